//! Recovery from a lost device: reloads its content onto the reopened device or the CPU.

mod breaker;

use std::sync::Arc;
use std::time::Duration;

use web_time::Instant;

pub use self::breaker::{Breaker, BreakerOptions, BreakerStats, Circuit};

use crate::device::Device;
use crate::error::Error;
use crate::loss::LossReason;
use crate::panics::caught;

/// Loads a value, such as a model, onto a device, and reloads it when that device is lost: onto the reopened device,
/// or onto the CPU if reopening or loading fails or its [`Breaker`] opens, by default after three losses in a minute.
///
/// The caller supplies functions that open the device, load, and receive one notice per loss:
///
/// ```
/// use tilewright::{Device, DeviceChoice, Error, GenerateOptions, Model, Recovery};
///
/// # fn main() -> Result<(), Error> {
/// let open = || pollster::block_on(Device::open(&DeviceChoice::Auto, None));
/// let mut recovery = Recovery::new(open, Model::builtin, |notice| eprintln!("notice: {notice}"));
/// let model = recovery.load(&open()?)?;
/// let mut session = model.session()?;
/// let mut generation = session.generate("Once upon a time", &GenerateOptions::greedy(8))?;
/// while let Some(piece) = pollster::block_on(generation.next()) {
///     match piece {
///         Ok(piece) => print!("{}", piece.text),
///         Err(error) => generation.resume(&recovery.reload(error)?)?,
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct Recovery<'a, T> {
    open: Box<dyn FnMut() -> Result<Device, Error> + 'a>,
    load: Box<LoadFn<'a, T>>,
    tell: Box<dyn FnMut(&str) + 'a>,
    clock: Box<dyn Fn() -> Instant + 'a>,
    breaker: Arc<Breaker>,
    /// Whether the value was last loaded onto a GPU, if known.
    is_on_gpu: Option<bool>,
    /// Times of recent panics on the CPU.
    panics: Vec<Instant>,
}

/// Loads onto a device.
type LoadFn<'a, T> = dyn FnMut(&Device) -> Result<T, Error> + 'a;

impl<'a, T> Recovery<'a, T> {
    /// `open` opens the device, `load` loads onto a device, `tell` receives one sentence per loss.
    pub fn new(
        open: impl FnMut() -> Result<Device, Error> + 'a,
        load: impl FnMut(&Device) -> Result<T, Error> + 'a,
        tell: impl FnMut(&str) + 'a,
    ) -> Self {
        let (open, load, tell, clock) = (Box::new(open), Box::new(load), Box::new(tell), Box::new(Instant::now));
        Recovery { open, load, tell, clock, breaker: Arc::default(), is_on_gpu: None, panics: Vec::new() }
    }

    /// Counts losses with a shared breaker or one with other options.
    pub fn with_breaker(self, breaker: Arc<Breaker>) -> Self {
        Recovery { breaker, ..self }
    }

    /// Uses another clock for losses, so that a test does not depend on its own speed.
    pub fn with_clock(self, clock: impl Fn() -> Instant + 'a) -> Self {
        Recovery { clock: Box::new(clock), ..self }
    }

    /// Loads onto an open device.
    ///
    /// # Errors
    /// Those of loading, except a lost device.
    pub fn load(&mut self, device: &Device) -> Result<T, Error> {
        self.is_on_gpu = Some(device.is_gpu());
        (self.load)(device).or_else(|error| self.reload(error))
    }

    /// Reloads after `error`, if that is [`Error::DeviceLost`] or [`Error::Panic`].
    ///
    /// # Errors
    /// `error` itself if it is another one; those of loading onto the CPU; [`Error::Stopped`] if the CPU panicked as
    /// often as a GPU may be lost, since there is no other device.
    pub fn reload(&mut self, error: Error) -> Result<T, Error> {
        let Some(reason) = error.loss() else { return Err(error) };
        match (reason, self.is_on_gpu) {
            (LossReason::Panic, Some(false)) => self.expect_few_panics()?,
            _ => self.breaker.lost(reason, (self.clock)()),
        }
        let (loaded, place) = self.load_anew()?;
        (self.tell)(&format!("the device was lost ({error}); reloaded onto {place}"));
        Ok(loaded)
    }

    /// Counts a panic on the CPU.
    fn expect_few_panics(&mut self) -> Result<(), Error> {
        let (now, BreakerOptions { losses, within, .. }) = ((self.clock)(), self.breaker.options());
        self.panics.retain(|&earlier| now.saturating_duration_since(earlier) <= within);
        self.panics.push(now);
        match self.panics.len() < losses {
            true => Ok(()),
            false => Err(Error::Stopped { reason: format!("it panicked {}", times(losses, within)) }),
        }
    }

    /// Sends the caller a notice that is not about a loss.
    pub(crate) fn say(&mut self, notice: &str) {
        (self.tell)(notice);
    }

    /// Opens the device. A panic becomes an error, so that another device can be tried.
    fn open(&mut self) -> Result<Device, Error> {
        caught("opening a device", &mut self.open).flatten()
    }

    /// Loads onto a device. A panic becomes an error.
    fn load_onto(&mut self, device: &Device) -> Result<T, Error> {
        self.is_on_gpu = Some(device.is_gpu());
        caught("loading", || (self.load)(device)).flatten()
    }

    /// Moves the value if the breaker requires it: from the GPU (`is_on_gpu`) to the CPU if the breaker is open, or
    /// back to the GPU if a trial is due. `None` if it stays.
    ///
    /// # Errors
    /// Those of loading onto the CPU.
    pub fn moved(&mut self, is_on_gpu: bool) -> Result<Option<T>, Error> {
        let now = (self.clock)();
        self.is_on_gpu = Some(is_on_gpu);
        match is_on_gpu {
            true if self.breaker.is_open(now) => {
                let (loaded, place) = self.load_onto_cpu("requested instead of the GPU".into())?;
                (self.tell)(&format!("reloaded onto {place}"));
                Ok(Some(loaded))
            }
            false if self.breaker.is_due(now) => Ok(self.tried()),
            _ => Ok(None),
        }
    }

    /// Whether the breaker has replaced the GPU by the CPU.
    pub fn is_fallback(&self) -> bool {
        self.breaker.is_open((self.clock)())
    }

    /// Runs `work` on the loaded value. If the device is lost, reloads the value and runs `work` again from the start.
    ///
    /// # Errors
    /// Those of `work` and of [`Recovery::reload`].
    pub fn retry<R>(&mut self, loaded: &mut T, mut work: impl FnMut(&T) -> Result<R, Error>) -> Result<R, Error> {
        loop {
            match work(loaded) {
                Err(error) => *loaded = self.reload(error)?,
                done => return done,
            }
        }
    }

    /// Reloads and returns the place: the reopened GPU if the breaker allows it and it works, else the CPU.
    fn load_anew(&mut self) -> Result<(T, String), Error> {
        loop {
            if !self.breaker.admits((self.clock)()) {
                let BreakerOptions { losses, within, .. } = self.breaker.options();
                // A failed trial counts as a loss.
                return self.load_onto_cpu(format!("the GPU was lost {}", times(losses, within)));
            }
            let device = match self.open() {
                Ok(device) => device,
                Err(error) => {
                    self.breaker.open((self.clock)());
                    return self.load_onto_cpu(format!("the GPU was lost and could not be opened again ({error})"));
                }
            };
            match self.load_onto(&device) {
                Ok(loaded) => return Ok((loaded, place(&device))),
                Err(error) => match error.loss() {
                    Some(reason) if device.is_gpu() => self.breaker.lost(reason, (self.clock)()),
                    // If the files are at fault, loading onto the CPU fails too.
                    None if device.is_gpu() => {
                        self.breaker.open((self.clock)());
                        return self.load_onto_cpu(format!("the GPU was lost and loading onto it failed ({error})"));
                    }
                    _ => return Err(error),
                },
            }
        }
    }

    fn load_onto_cpu(&mut self, reason: String) -> Result<(T, String), Error> {
        // Exact, so that completions continue as on the GPU.
        let device = Device::on_cpu(reason).exact();
        let loaded = self.load_onto(&device)?;
        Ok((loaded, place(&device)))
    }

    /// Tries to load onto the GPU; `None` if that fails.
    fn tried(&mut self) -> Option<T> {
        self.breaker.admits((self.clock)());
        let tried = self.open().and_then(|device| match device.is_gpu() {
            true => self.load_onto(&device).map(|loaded| Some((loaded, place(&device)))),
            // The reopened device is not a GPU.
            false => Ok(None),
        });
        let (loaded, said) = match tried {
            Ok(Some((loaded, place))) => (Some(loaded), format!("retrying the GPU: the model is on {place}")),
            Ok(None) => (None, "there is no GPU anymore".into()),
            Err(error) => (None, format!("retrying the GPU failed ({error})")),
        };
        if loaded.is_none() {
            // The value stays on the CPU.
            self.is_on_gpu = Some(false);
            self.breaker.lost(LossReason::NotOpened, (self.clock)());
        }
        (self.tell)(&said);
        loaded
    }
}

/// How often something happened, in words.
fn times(n: usize, within: Duration) -> String {
    match within.as_secs() {
        60 => format!("{n} times within a minute"),
        seconds => format!("{n} times within {seconds} s"),
    }
}

/// A device in a notice: its name, and for the CPU the reason.
fn place(device: &Device) -> String {
    let info = device.info();
    if device.is_gpu() { info.name.clone() } else { format!("{}: {}", info.name, info.reason) }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn lost() -> Error {
        Error::DeviceLost { reason: LossReason::Driver, context: "testing".into(), message: "gone".into() }
    }

    #[test]
    fn errors_other_than_device_loss_are_returned() {
        let never = |_: &Device| -> Result<u32, Error> { panic!("loaded") };
        let mut recovery = Recovery::new(|| panic!("opened"), never, |_| panic!("told"));
        let error = recovery.reload(Error::NonFinite { pos: 3 }).unwrap_err();
        assert!(matches!(error, Error::NonFinite { pos: 3 }));
    }

    #[test]
    fn device_that_fails_to_reopen_is_replaced_by_the_cpu() {
        let mut notices = Vec::new();
        let gone = || Error::NoAdapter { wanted: "gpu".into(), available: "none".into() };
        let mut recovery = Recovery::new(
            || Err(gone()),
            |device| Ok(device.info().reason.clone()),
            |notice| notices.push(notice.to_string()),
        );
        let in_record = Error::InRecord { record: 4, source: Box::new(lost()) };
        let reason = recovery.reload(in_record).unwrap();
        drop(recovery);
        assert!(reason.contains("could not be opened again") && reason.contains(&gone().to_string()), "{reason}");
        assert_eq!(notices.len(), 1);
        assert!(notices[0].contains("gone") && notices[0].contains(&reason), "{notices:?}");
    }

    #[test]
    fn work_is_retried_after_every_device_loss() {
        let (mut n_opened, mut n_loaded, start) = (0, 0, Instant::now());
        let open = || {
            n_opened += 1;
            Ok(Device::cpu())
        };
        let load = |_: &Device| {
            n_loaded += 1;
            Ok(n_loaded)
        };
        let mut notices = Vec::new();
        let mut recovery = Recovery::new(open, load, |notice| notices.push(notice.to_string())).with_clock(|| start);
        let mut loaded = recovery.load(&Device::cpu()).unwrap();
        let done = recovery.retry(&mut loaded, |&n| if n < 4 { Err(lost()) } else { Ok(10 * n) });
        assert_eq!((done.unwrap(), loaded), (40, 4));
        drop(recovery);
        assert_eq!((n_opened, n_loaded, notices.len()), (2, 4, 3), "the third loss opens nothing");
        assert!(notices[2].contains("3 times within a minute") && !notices[1].contains("times"), "{notices:?}");
    }

    #[test]
    fn gpu_trial_that_opens_only_a_cpu_ends() {
        let (start, second) = (Instant::now(), Cell::new(0));
        let (breaker, mut notices) = (Arc::new(Breaker::default()), Vec::new());
        breaker.open(start);
        let mut recovery = Recovery::new(|| Ok(Device::cpu()), |_| Ok(()), |notice| notices.push(notice.to_string()))
            .with_clock(|| start + Duration::from_secs(second.get()))
            .with_breaker(breaker.clone());
        // The GPU was in use when the breaker opened, so no trial is due yet.
        assert!(recovery.moved(true).unwrap().is_some() && recovery.is_fallback());
        assert!(recovery.moved(false).unwrap().is_none());
        second.set(300);
        assert!(recovery.moved(false).unwrap().is_none() && recovery.is_fallback());
        drop(recovery);
        assert_eq!(breaker.stats(start).n_trials, 1);
        assert!(notices.len() == 2 && notices[1].contains("no GPU anymore"), "{notices:?}");
    }
}
