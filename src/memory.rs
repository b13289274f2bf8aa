//! Memory available for a model, if known before loading.
//!
//! Unknown memory is no reason to refuse a model. WebGPU cannot query GPU memory, and this module does not ask
//! native drivers; on a GPU, running out of memory is therefore an error of the device during loading.

use crate::platform::ADDRESSABLE_BYTES;

/// Bytes that the process can still allocate: available memory, including reclaimable caches, plus free swap, at
/// most the container's limit. `None` if the system does not report it.
#[cfg(target_os = "linux")]
pub(crate) fn of_host() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let container = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    available(&meminfo, container.as_deref())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn of_host() -> Option<u64> {
    ADDRESSABLE_BYTES
}

/// Parses `/proc/meminfo` and the control group's `memory.max`, a number of bytes or `max`. The group's current
/// usage is ignored: much of it is reclaimable page cache.
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

/// Whether [`of_host`] is a hard limit, as with 32-bit addresses; a system might still free memory.
const IS_FIXED: bool = ADDRESSABLE_BYTES.is_some();

/// A memory limit for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub bytes: u64,
    source: LimitSource,
}

/// The origin of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LimitSource {
    /// Set by the caller.
    Chosen,
    /// Available memory as the system reports it; callers may override it.
    Available,
    /// A hard limit.
    Fixed,
}

impl Limit {
    /// The caller's limit, else the device's memory if known; the lesser of both if that is a hard limit.
    pub fn of(chosen: Option<u64>, available: Option<u64>) -> Option<Limit> {
        Self::within(chosen, available, IS_FIXED)
    }

    fn within(chosen: Option<u64>, available: Option<u64>, is_fixed: bool) -> Option<Limit> {
        let source = if is_fixed { LimitSource::Fixed } else { LimitSource::Available };
        let most = available.map(|bytes| Limit { bytes, source });
        match (chosen, most) {
            (Some(bytes), Some(most)) if is_fixed && bytes > most.bytes => Some(most),
            (Some(bytes), _) => Some(Limit { bytes, source: LimitSource::Chosen }),
            (None, most) => most,
        }
    }

    /// `hint` plus the origin of the limit.
    pub fn explained(&self, hint: String) -> String {
        match self.source {
            LimitSource::Chosen => hint,
            LimitSource::Available => {
                format!("{hint}; the limit is the available memory, unless a memory limit is set")
            }
            LimitSource::Fixed => format!("{hint}; the limit is that of 32-bit addresses"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str =
        "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    8000000 kB\nSwapFree:   500000 kB\n";

    #[test]
    fn available_memory_counts_swap_within_the_cgroup_limit() {
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
    fn memory_limit_is_the_callers_or_what_is_available() {
        assert_eq!(Limit::within(None, None, false), None);
        assert_eq!(Limit::within(Some(9), Some(5), false), Some(Limit { bytes: 9, source: LimitSource::Chosen }));
        let found = Limit::within(None, Some(5), false).unwrap();
        assert_eq!(found, Limit { bytes: 5, source: LimitSource::Available });
        assert!(found.explained("a".into()).contains("available memory"));
    }

    #[test]
    fn chosen_memory_limit_is_capped_by_the_address_space() {
        let fixed = Limit { bytes: 5, source: LimitSource::Fixed };
        assert_eq!(Limit::within(Some(9), Some(5), true), Some(fixed));
        assert_eq!(Limit::within(None, Some(5), true), Some(fixed));
        assert_eq!(Limit::within(Some(4), Some(5), true), Some(Limit { bytes: 4, source: LimitSource::Chosen }));
        assert_eq!(Limit::within(Some(9), None, true), Some(Limit { bytes: 9, source: LimitSource::Chosen }));
        assert!(!fixed.explained("a".into()).contains("replaces"));
    }
}
