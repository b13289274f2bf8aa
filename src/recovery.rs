//! Going on after a device was lost: what was on it is loaded again, onto the device opened anew or onto the CPU.

use std::time::Duration;

use web_time::Instant;

use crate::device::Device;
use crate::error::Error;

/// A device that is lost so often within [`PERIOD`] is not opened again.
const MAX_LOSSES: usize = 3;

/// See [`MAX_LOSSES`].
const PERIOD: Duration = Duration::from_secs(60);

/// Loads something, such as a model, onto a device, and again when that device is lost: onto the device opened anew, or onto
/// the CPU where it does not open, cannot be loaded onto, or is lost for the third time within a minute.
///
/// The caller says what opens the device and what loads, and is told once after each loss what became of it:
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
    load: Box<Load<'a, T>>,
    tell: Box<dyn FnMut(&str) + 'a>,
    clock: Box<dyn Fn() -> Instant + 'a>,
    losses: Losses,
}

/// Loads onto a device.
type Load<'a, T> = dyn FnMut(&Device) -> Result<T, Error> + 'a;

impl<'a, T> Recovery<'a, T> {
    /// `open` opens the device, `load` loads onto a device, `tell` is given one sentence after each loss.
    pub fn new(
        open: impl FnMut() -> Result<Device, Error> + 'a,
        load: impl FnMut(&Device) -> Result<T, Error> + 'a,
        tell: impl FnMut(&str) + 'a,
    ) -> Self {
        let (open, load, tell, clock) = (Box::new(open), Box::new(load), Box::new(tell), Box::new(Instant::now));
        Recovery { open, load, tell, clock, losses: Losses::default() }
    }

    /// Tells the time of losses by another clock, so that a test does not depend on its own speed.
    pub fn with_clock(self, clock: impl Fn() -> Instant + 'a) -> Self {
        Recovery { clock: Box::new(clock), ..self }
    }

    /// Loads onto a device that is open.
    ///
    /// # Errors
    /// Those of loading, other than a lost device's.
    pub fn load(&mut self, device: &Device) -> Result<T, Error> {
        (self.load)(device).or_else(|error| self.reload(error))
    }

    /// Loads again after `error`, if that is [`Error::DeviceLost`].
    ///
    /// # Errors
    /// `error` itself if it is another one; those of loading onto the CPU.
    pub fn reload(&mut self, error: Error) -> Result<T, Error> {
        if !is_loss(&error) {
            return Err(error);
        }
        let (loaded, device) = self.load_anew()?;
        let info = device.info();
        let place = if device.is_gpu() { info.name.clone() } else { format!("{}: {}", info.name, info.reason) };
        (self.tell)(&format!("the device was lost ({error}); what was on it was loaded again onto {place}"));
        Ok(loaded)
    }

    /// What `work` makes of what was loaded, which is loaded again where the device is lost on the way; `work` then begins
    /// anew.
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

    fn load_anew(&mut self) -> Result<(T, Device), Error> {
        // Why the CPU has to do, once it has.
        let reason = loop {
            if self.losses.are_too_many((self.clock)()) {
                break format!("the GPU was lost {MAX_LOSSES} times within a minute");
            }
            let device = match (self.open)() {
                Ok(device) => device,
                Err(error) => break format!("the GPU was lost and could not be opened again ({error})"),
            };
            match (self.load)(&device) {
                Ok(loaded) => return Ok((loaded, device)),
                Err(error) if device.is_gpu() && is_loss(&error) => {}
                // If the files are at fault, the CPU says so too.
                Err(error) if device.is_gpu() => {
                    break format!("the GPU was lost and loading onto it failed ({error})");
                }
                Err(error) => return Err(error),
            }
        };
        // Exact, so that a text goes on as on the GPU.
        let device = Device::on_cpu(reason).exact();
        let loaded = (self.load)(&device)?;
        Ok((loaded, device))
    }
}

/// Also where the error names the record that was at work.
fn is_loss(error: &Error) -> bool {
    error.code() == "device_lost"
}

/// When devices were lost, as far as that still counts.
#[derive(Debug, Default)]
struct Losses(Vec<Instant>);

impl Losses {
    /// Counts a loss. Whether there were too many of late to open the device again.
    fn are_too_many(&mut self, now: Instant) -> bool {
        self.0.retain(|&earlier| now.saturating_duration_since(earlier) <= PERIOD);
        self.0.push(now);
        self.0.len() >= MAX_LOSSES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost() -> Error {
        Error::DeviceLost { context: "testing".into(), message: "gone".into() }
    }

    /// Whether a device is opened again after each of these seconds.
    fn reopened(seconds: &[u64]) -> Vec<bool> {
        let (start, mut losses) = (Instant::now(), Losses::default());
        seconds.iter().map(|&s| !losses.are_too_many(start + Duration::from_secs(s))).collect()
    }

    #[test]
    fn the_third_loss_within_a_minute_is_the_last() {
        assert_eq!(reopened(&[0, 1, 2]), [true, true, false]);
        assert_eq!(reopened(&[0, 30, 60]), [true, true, false]);
        assert_eq!(reopened(&[0, 30, 61, 90, 200]), [true, true, true, false, true]);
        assert_eq!(reopened(&[0, 61, 122, 183, 244]), [true; 5]);
    }

    #[test]
    fn other_errors_come_back() {
        let never = |_: &Device| -> Result<u32, Error> { panic!("loaded") };
        let mut recovery = Recovery::new(|| panic!("opened"), never, |_| panic!("told"));
        let error = recovery.reload(Error::NonFinite { pos: 3 }).unwrap_err();
        assert!(matches!(error, Error::NonFinite { pos: 3 }));
    }

    #[test]
    fn a_device_that_does_not_open_again_is_replaced_by_the_cpu() {
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
    fn work_begins_anew_as_often_as_it_must() {
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
}
