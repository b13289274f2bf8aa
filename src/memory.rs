//! How much memory there is for a model, as far as that can be known before one is loaded.
//!
//! What is not known is no reason to refuse a model. WebGPU has no query for the memory of a graphics card, and nothing
//! here asks a native driver; on a GPU the error for want of memory therefore comes from the device, while the model loads.

/// Bytes that the process can still get from the system: free memory and caches that give way, with free swap, and no more
/// than the container may use. `None` where the system does not say.
#[cfg(target_os = "linux")]
pub(crate) fn of_host() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let container = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    available(&meminfo, container.as_deref())
}

/// What a heap of 32-bit addresses has for a model. The rest is for the program, the file's headers, and bytes that arrive.
#[cfg(target_arch = "wasm32")]
pub(crate) fn of_host() -> Option<u64> {
    const ALL: u64 = 1 << 32;
    const OTHERS: u64 = 256 << 20;
    Some(ALL - OTHERS)
}

#[cfg(not(any(target_os = "linux", target_arch = "wasm32")))]
pub(crate) fn of_host() -> Option<u64> {
    None
}

/// From the texts of `/proc/meminfo` and of the control group's `memory.max`, a number of bytes or `max`. What the group
/// uses already is not counted: much of that are pages of files, which give way.
#[cfg(any(target_os = "linux", test))]
fn available(meminfo: &str, container: Option<&str>) -> Option<u64> {
    let bytes = |key: &str| {
        let rest = meminfo.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    let host = bytes("MemAvailable")?.saturating_add(bytes("SwapFree").unwrap_or(0));
    let container = container.and_then(|max| max.trim().parse().ok()).unwrap_or(u64::MAX);
    Some(host.min(container))
}

/// Whether no caller can know better than [`of_host`] what there is: addresses end, where a system could still make room.
const IS_FIXED: bool = cfg!(target_arch = "wasm32");

/// The most memory that a model may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub bytes: u64,
    source: Source,
}

/// Where a limit comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The caller named it.
    Chosen,
    /// All there is, as far as the system says; a caller may know better.
    Available,
    /// All there can be.
    Fixed,
}

impl Limit {
    /// The caller's own limit, else what the device can hold, if that is known. Where that is fixed, the lesser of both.
    pub fn of(chosen: Option<u64>, available: Option<u64>) -> Option<Limit> {
        Self::within(chosen, available, IS_FIXED)
    }

    fn within(chosen: Option<u64>, available: Option<u64>, is_fixed: bool) -> Option<Limit> {
        let source = if is_fixed { Source::Fixed } else { Source::Available };
        let most = available.map(|bytes| Limit { bytes, source });
        match (chosen, most) {
            (Some(bytes), Some(most)) if is_fixed && bytes > most.bytes => Some(most),
            (Some(bytes), _) => Some(Limit { bytes, source: Source::Chosen }),
            (None, most) => most,
        }
    }

    /// What a refusal adds to its hint.
    pub fn explained(&self, hint: String) -> String {
        match self.source {
            Source::Chosen => hint,
            Source::Available => {
                format!("{hint}; the limit is the memory that is left here, and a memory limit replaces it")
            }
            Source::Fixed => format!("{hint}; the limit is the memory that 32-bit addresses have for a model"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str =
        "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    8000000 kB\nSwapFree:   500000 kB\n";

    #[test]
    fn memory_is_what_is_available_with_swap_and_within_the_container() {
        const HOST: u64 = 8_500_000 * 1024;
        assert_eq!(available(MEMINFO, None), Some(HOST));
        assert_eq!(available(MEMINFO, Some("max\n")), Some(HOST));
        assert_eq!(available(MEMINFO, Some("1073741824\n")), Some(1 << 30));
        assert_eq!(available(MEMINFO, Some("99999999999999\n")), Some(HOST));
        assert_eq!(available("MemAvailable: 3 kB\n", None), Some(3 << 10));
        for unknown in ["", "MemTotal: 3 kB\n", "MemAvailable: many kB\n", "MemAvailable: 18446744073709551615 kB\n"] {
            assert_eq!(available(unknown, Some("5")), None, "{unknown}");
        }
    }

    #[test]
    fn a_limit_is_the_callers_or_what_there_is() {
        assert_eq!(Limit::within(None, None, false), None);
        assert_eq!(Limit::within(Some(9), Some(5), false), Some(Limit { bytes: 9, source: Source::Chosen }));
        let found = Limit::within(None, Some(5), false).unwrap();
        assert_eq!(found, Limit { bytes: 5, source: Source::Available });
        assert!(found.explained("a".into()).contains("memory that is left here"));
    }

    #[test]
    fn nobody_chooses_more_than_addresses_allow() {
        let fixed = Limit { bytes: 5, source: Source::Fixed };
        assert_eq!(Limit::within(Some(9), Some(5), true), Some(fixed));
        assert_eq!(Limit::within(None, Some(5), true), Some(fixed));
        assert_eq!(Limit::within(Some(4), Some(5), true), Some(Limit { bytes: 4, source: Source::Chosen }));
        assert_eq!(Limit::within(Some(9), None, true), Some(Limit { bytes: 9, source: Source::Chosen }));
        assert!(!fixed.explained("a".into()).contains("replaces"));
    }
}
