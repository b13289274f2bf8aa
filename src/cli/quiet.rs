//! Keeps what GPU drivers print out of what a person reads.
//!
//! Drivers, and the layers that Vulkan's loader puts in front of them, print to stderr themselves: Mesa's device-select
//! layer asks for a Wayland display at each listing of adapters, and where there is none `libwayland-client` prints
//! "XDG_RUNTIME_DIR is invalid or not set in the environment". While a device is opened, stderr is therefore turned
//! away, until the last of those who open one at a time is done. Windows' drivers do not print.

#[cfg(unix)]
mod stderr {
    use std::fs::OpenOptions;
    use std::io;
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::{Mutex, MutexGuard, Once, PoisonError};

    use nix::unistd::dup2_stderr;

    struct Away {
        /// Those for whom it is turned away.
        n: usize,
        /// The real one, unless a panic has had it back already.
        real: Option<OwnedFd>,
    }

    /// Stderr is the process's. Whoever turns it away beside another must not take what is there then for the real one.
    static AWAY: Mutex<Away> = Mutex::new(Away { n: 0, real: None });

    fn away() -> MutexGuard<'static, Away> {
        AWAY.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn turn_away() -> io::Result<()> {
        static HOOK: Once = Once::new();
        // A panic's message is nothing that a driver printed.
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
            // If it fails, nobody could be told.
            let _ = dup2_stderr(real);
        }
    }
}

/// Turns stderr back when it is dropped, also by a panic.
#[cfg(unix)]
struct TurnBack;

#[cfg(unix)]
impl Drop for TurnBack {
    fn drop(&mut self) {
        stderr::turn_back();
    }
}

/// Runs something without what it prints to stderr.
pub fn quietly<T>(run: impl FnOnce() -> T) -> T {
    #[cfg(unix)]
    // Without a stderr there is nothing to keep clean.
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

    /// What file stderr is.
    fn stderr() -> [u64; 2] {
        let metadata = File::from(io::stderr().as_fd().try_clone_to_owned().unwrap()).metadata().unwrap();
        [metadata.dev(), metadata.ino()]
    }

    /// Two threads open devices at once, and the first ends first: stderr comes back with the second.
    #[test]
    fn stderr_comes_back_after_the_last_of_several() {
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
