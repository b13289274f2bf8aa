//! Suppresses the output of GPU drivers.
//!
//! Drivers and Vulkan layers print to stderr themselves: Mesa's device-select layer opens a Wayland display whenever
//! adapters are listed, and without one `libwayland-client` prints "XDG_RUNTIME_DIR is invalid or not set in the
//! environment". So stderr is redirected while a device is opened; if several are opened at a time, until the last
//! one is done. Windows drivers do not print.

#[cfg(unix)]
mod stderr {
    use std::fs::OpenOptions;
    use std::io;
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::{Mutex, MutexGuard, Once, PoisonError};

    use nix::unistd::dup2_stderr;

    struct Away {
        /// Number of redirections in effect.
        n: usize,
        /// The real stderr, unless a panic has restored it.
        real: Option<OwnedFd>,
    }

    /// Stderr belongs to the process: a second redirection must not mistake the first one for the real stderr.
    static AWAY: Mutex<Away> = Mutex::new(Away { n: 0, real: None });

    fn away() -> MutexGuard<'static, Away> {
        AWAY.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn turn_away() -> io::Result<()> {
        static HOOK: Once = Once::new();
        // Panic messages must be printed.
        HOOK.call_once(|| {
            let hook = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                restore(&mut away());
                hook(panic);
            }));
        });
        let mut away = away();
        if away.n == 0 {
            let real = io::stderr().as_fd().try_clone_to_owned()?;
            dup2_stderr(OpenOptions::new().write(true).open("/dev/null")?)?;
            away.real = Some(real);
        }
        away.n += 1;
        Ok(())
    }

    pub fn turn_back() {
        let mut away = away();
        away.n = away.n.saturating_sub(1);
        if away.n == 0 {
            restore(&mut away);
        }
    }

    fn restore(away: &mut Away) {
        if let Some(real) = away.real.take() {
            // A failure here cannot be reported.
            let _ = dup2_stderr(real);
        }
    }
}

/// Restores stderr on drop, also in a panic.
#[cfg(unix)]
struct TurnBack;

#[cfg(unix)]
impl Drop for TurnBack {
    fn drop(&mut self) {
        stderr::turn_back();
    }
}

/// Calls `run` with stderr suppressed.
pub fn quietly<T>(run: impl FnOnce() -> T) -> T {
    #[cfg(unix)]
    // Fails without a stderr, where nothing needs suppressing.
    let _back = stderr::turn_away().ok().map(|()| TurnBack);
    run()
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs::File;
    use std::io;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    use super::stderr::{turn_away, turn_back};

    /// The file of stderr: device and inode.
    fn stderr() -> [u64; 2] {
        let metadata = File::from(io::stderr().as_fd().try_clone_to_owned().unwrap()).metadata().unwrap();
        [metadata.dev(), metadata.ino()]
    }

    /// Of two overlapping redirections the first one ends first; the second one restores stderr.
    #[test]
    fn stderr_is_restored_after_the_last_of_nested_redirects() {
        let real = stderr();
        turn_away().unwrap();
        let away = stderr();
        turn_away().unwrap();
        turn_back();
        let still_away = stderr();
        turn_back();
        let back = stderr();
        assert!(real != away && still_away == away && back == real, "{real:?}, {away:?}, {still_away:?}, {back:?}");
    }
}
