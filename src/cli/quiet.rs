//! Keeps what GPU drivers print out of what a person reads.
//!
//! Drivers, and the layers that Vulkan's loader puts in front of them, print to stderr themselves: Mesa's device-select
//! layer asks for a Wayland display at each listing of adapters, and where there is none `libwayland-client` prints
//! "XDG_RUNTIME_DIR is invalid or not set in the environment". While a device is opened, stderr is therefore turned
//! away. Windows' drivers do not print.

#[cfg(unix)]
mod stderr {
    use std::fs::OpenOptions;
    use std::io;
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::{Mutex, Once, PoisonError};

    use nix::unistd::dup2_stderr;

    /// The real stderr while it is turned away.
    static SAVED: Mutex<Option<OwnedFd>> = Mutex::new(None);

    pub fn turn_away() -> io::Result<()> {
        static HOOK: Once = Once::new();
        // A panic's message is nothing that a driver printed.
        HOOK.call_once(|| {
            let hook = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                turn_back();
                hook(panic);
            }));
        });
        let real = io::stderr().as_fd().try_clone_to_owned()?;
        dup2_stderr(OpenOptions::new().write(true).open("/dev/null")?)?;
        *SAVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(real);
        Ok(())
    }

    pub fn turn_back() {
        if let Some(real) = SAVED.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // If it fails, nobody could be told.
            let _ = dup2_stderr(real);
        }
    }
}

/// Runs something without what it prints to stderr.
pub fn quietly<T>(run: impl FnOnce() -> T) -> T {
    #[cfg(unix)]
    // Without a stderr there is nothing to keep clean.
    let _ = stderr::turn_away();
    let done = run();
    #[cfg(unix)]
    stderr::turn_back();
    done
}
