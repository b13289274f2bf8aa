//! Recovery of `run`, `chat`, `embed` and `rerank` from a lost device. [`Recovery`] decides whether they resume on
//! the reopened device or on the CPU.

use tilewright::generate::{Generation, Piece};
use tilewright::{Device, Model, Recovery};

use super::CommandFailure;

/// Passes each piece of a generation to `on_piece`. After a device loss, the generation resumes with the same tokens
/// and repeats no piece. Returns the number of losses.
pub fn each_piece(
    generation: &mut Generation<'_>,
    recovery: &mut Recovery<'_, Model>,
    mut on_piece: impl FnMut(Piece) -> Result<(), CommandFailure>,
) -> Result<usize, CommandFailure> {
    let (mut n_losses, mut test) = (0, TestLosses::from_env());
    loop {
        test.step(generation.session().model().device());
        match pollster::block_on(generation.next()) {
            None => return Ok(n_losses),
            Some(Ok(piece)) => on_piece(piece)?,
            Some(Err(error)) => {
                generation.resume(&recovery.reload(error)?)?;
                n_losses += 1;
            }
        }
    }
}

/// Device losses for tests: `TILEWRIGHT_LOSE_DEVICE=3,9` destroys the GPU device before the third and the ninth step,
/// a piece of text or a batch of records. Only tests should set it.
#[derive(Default)]
pub struct TestLosses {
    at: Vec<u64>,
    n_steps: u64,
}

impl TestLosses {
    pub fn from_env() -> Self {
        let text = std::env::var("TILEWRIGHT_LOSE_DEVICE").unwrap_or_default();
        TestLosses { at: text.split(',').filter_map(|step| step.parse().ok()).collect(), n_steps: 0 }
    }

    /// Must be called before each step.
    pub fn step(&mut self, device: &Device) {
        self.n_steps += 1;
        if self.at.contains(&self.n_steps) {
            device.destroy();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::Instant;

    use tilewright::{DeviceChoice, Error, GenerateOptions};

    use super::*;

    /// A GPU adapter, or a visible skip.
    fn gpu() -> Option<Device> {
        match pollster::block_on(Device::open_in(&DeviceChoice::Gpu, None, None)) {
            Ok(device) => Some(device),
            Err(error @ Error::NoAdapter { .. }) => {
                assert!(std::env::var_os("REQUIRE_ADAPTER").is_none(), "REQUIRE_ADAPTER is set: {error}");
                println!("skipped: no adapter ({error})");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn generation_survives_three_device_losses_then_uses_the_cpu() {
        let Some(device) = gpu() else { return };
        let options =
            GenerateOptions { max_tokens: 40, repeat_penalty: 1.1, seed: Some(5), ..GenerateOptions::default() };
        let mut session = Model::builtin(&device).unwrap().session().unwrap();
        let mut generation = session.generate("Once upon a time", &options).unwrap();
        let undisturbed: Vec<Piece> =
            std::iter::from_fn(|| pollster::block_on(generation.next())).map(Result::unwrap).collect();

        // The devices in use, the latest last, and the notices.
        let (devices, told) = (RefCell::new(vec![device]), RefCell::new(Vec::new()));
        let open = || {
            devices.borrow_mut().push(gpu().unwrap());
            Ok(devices.borrow().last().unwrap().clone())
        };
        let (tell, start) = (|notice: &str| told.borrow_mut().push(notice.to_string()), Instant::now());
        let mut recovery = Recovery::new(open, Model::builtin, tell).with_clock(|| start);
        let first = devices.borrow()[0].clone();
        let mut session = recovery.load(&first).unwrap().session().unwrap();
        let mut generation = session.generate("Once upon a time", &options).unwrap();
        let mut pieces = Vec::new();
        let n_losses = each_piece(&mut generation, &mut recovery, |piece| {
            pieces.push(piece);
            if [4, 5, 29].contains(&pieces.len()) {
                devices.borrow().last().unwrap().destroy();
            }
            Ok(())
        });
        assert_eq!((n_losses.ok(), devices.borrow().len()), (Some(3), 3));
        assert!(!generation.session().model().device().is_gpu());
        assert_eq!(pieces, undisturbed);
        let told = told.borrow();
        assert!(told.len() == 3 && told[2].contains("3 times within a minute"), "{told:?}");
    }
}
