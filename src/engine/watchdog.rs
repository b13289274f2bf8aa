//! A thread that gives up the GPU when a step exceeds its time limit.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::device::Device;
use crate::error::Error;
use crate::loss::LossReason;
use crate::panics::caught;
use crate::platform::spawn;

/// Dropping the watchdog ends its thread.
pub(super) struct Watchdog(Arc<WatchdogShared>);

struct WatchdogShared {
    limit: Duration,
    state: Mutex<WatchState>,
    changed: Condvar,
}

#[derive(Default)]
struct WatchState {
    /// The current step's deadline and devices.
    step: Option<(Instant, Vec<Device>)>,
    /// Whether the step missed its deadline.
    is_late: bool,
    is_over: bool,
}

impl WatchdogShared {
    fn state(&self) -> MutexGuard<'_, WatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.state();
        while !state.is_over {
            let left = match &state.step {
                Some((end, _)) if !state.is_late => Some(end.saturating_duration_since(Instant::now())),
                _ => None,
            };
            state = match left {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    state.is_late = true;
                    // Which of several devices hangs is unknown.
                    for device in state.step.iter().flat_map(|(_, devices)| devices) {
                        let message = format!("a step took longer than {} s", self.limit.as_secs_f64());
                        device.give_up(LossReason::SlowStep, message);
                    }
                    state
                }
                Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

impl Watchdog {
    /// Starts a thread that watches steps of at most `limit`.
    pub fn begin(limit: Duration) -> Result<Watchdog, Error> {
        let watch = Arc::new(WatchdogShared { limit, state: Mutex::default(), changed: Condvar::new() });
        let of_thread = watch.clone();
        let spawned = spawn("tilewright watchdog", move || {
            // Giving up a device may panic; keep watching the next steps.
            while caught("watching steps", || of_thread.run()).is_err() {}
        });
        spawned.map_err(|source| Error::Io { path: "a thread".into(), source })?;
        Ok(Watchdog(watch))
    }

    /// Starts the clock for a step on these devices.
    pub fn step_begins(&self, devices: Vec<Device>) {
        let end = Instant::now().checked_add(self.0.limit);
        *self.0.state() = WatchState { step: end.map(|end| (end, devices)), ..WatchState::default() };
        self.0.changed.notify_one();
    }

    /// Stops the clock and returns whether the step was late.
    pub fn step_ends(&self) -> bool {
        let mut state = self.0.state();
        state.step = None;
        state.is_late
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.state().is_over = true;
        self.0.changed.notify_one();
    }
}
