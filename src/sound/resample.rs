//! Resampling by `rubato`: a block is transformed, filtered, and transformed back at the other rate.

use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler as _};

use super::{check_finite_from, check_rate};
use crate::error::Error;

/// Samples of a block at the lower rate, about: the more, the closer the filter's edge is to half of that rate. Of 1024 the pass
/// band ends at 98 % of it.
const BLOCK: u64 = 1024;
/// Samples of a block at the higher rate at most, where the rates allow it.
const MAX_BLOCK: u64 = 1 << 17;

/// Resamples one channel, in parts.
pub(super) struct Resampler {
    from: u32,
    to: u32,
    /// Samples so far.
    n: u64,
    /// None for equal rates.
    blocks: Option<Blocks>,
    resampled: Vec<f32>,
}

struct Blocks {
    fft: Fft<f32>,
    /// The block that is being filled, and its samples so far.
    block: Vec<f32>,
    n: usize,
    /// A block at the other rate.
    output: Vec<f32>,
    /// Outputs before the sound's beginning, which are left out.
    n_early: usize,
}

impl Resampler {
    /// # Errors
    /// [`Error::Operand`] for a rate that is 0 or above [`super::MAX_RATE`].
    pub fn new(from: u32, to: u32) -> Result<Resampler, Error> {
        [from, to].into_iter().try_for_each(check_rate)?;
        let blocks = if from == to { None } else { Some(Blocks::new(from, to)?) };
        Ok(Resampler { from, to, n: 0, blocks, resampled: Vec::new() })
    }

    /// Samples of the result so far.
    pub fn n_resampled(&self) -> u64 {
        self.of(self.n)
    }

    /// # Errors
    /// [`Error::Operand`] for a sample that is no finite number.
    pub fn push(&mut self, mut samples: &[f32]) -> Result<(), Error> {
        check_finite_from(self.n, samples)?;
        self.n += samples.len() as u64;
        let Some(blocks) = &mut self.blocks else {
            self.resampled.extend_from_slice(samples);
            return Ok(());
        };
        while !samples.is_empty() {
            let (now, later) = samples.split_at(samples.len().min(blocks.block.len() - blocks.n));
            blocks.block[blocks.n..blocks.n + now.len()].copy_from_slice(now);
            blocks.n += now.len();
            samples = later;
            if blocks.n == blocks.block.len() {
                blocks.run(&mut self.resampled)?;
            }
        }
        Ok(())
    }

    /// All samples, as many as their time takes at the new rate.
    ///
    /// # Errors
    /// As [`Resampler::push`].
    pub fn finish(mut self) -> Result<Vec<f32>, Error> {
        let n = self.n_resampled() as usize;
        if let Some(mut blocks) = self.blocks {
            while self.resampled.len() < n {
                blocks.run(&mut self.resampled)?;
            }
        }
        self.resampled.truncate(n);
        Ok(self.resampled)
    }

    fn of(&self, n: u64) -> u64 {
        (n * u64::from(self.to)).div_ceil(u64::from(self.from))
    }
}

impl Blocks {
    fn new(from: u32, to: u32) -> Result<Blocks, Error> {
        // The least block of the lower rate, and how many of them: an even number, so that the filter's middle is a sample.
        let least = u64::from(from.min(to) / gcd(from, to));
        let times = u64::from(from.max(to)) / u64::from(from.min(to));
        let n_least = BLOCK.min(MAX_BLOCK / times).div_ceil(least).max(1).next_multiple_of(2);
        let n_input = n_least as usize * (from / gcd(from, to)) as usize;
        let fft = Fft::new_custom(
            from as usize,
            to as usize,
            n_input,
            1,
            1,
            rubato::WindowFunction::BlackmanHarris2,
            FixedSync::Both,
        );
        let fft = fft.map_err(|error| refused("rate", error.to_string()))?;
        let output = vec![0.0; fft.output_frames_next()];
        Ok(Blocks { block: vec![0.0; fft.input_frames_next()], n: 0, output, n_early: fft.output_delay(), fft })
    }

    /// Resamples the block, with silence where it is not filled.
    fn run(&mut self, resampled: &mut Vec<f32>) -> Result<(), Error> {
        self.block[self.n..].fill(0.0);
        self.n = 0;
        let (n_input, n_output) = (self.block.len(), self.output.len());
        let failed = |error: String| refused("samples", error);
        let input = InterleavedSlice::new(&self.block, 1, n_input).map_err(|error| failed(error.to_string()))?;
        let output = InterleavedSlice::new_mut(&mut self.output, 1, n_output);
        let mut output = output.map_err(|error| failed(error.to_string()))?;
        self.fft.process_into_buffer(&input, &mut output, None).map_err(|error| failed(error.to_string()))?;
        let n_early = self.n_early.min(n_output);
        self.n_early -= n_early;
        resampled.extend_from_slice(&self.output[n_early..]);
        Ok(())
    }
}

/// What the crate refuses, which the checks of rates and samples leave nothing for.
fn refused(operand: &'static str, found: String) -> Error {
    Error::Operand { kernel: "sound", operand, expected: "a sound that can be resampled".into(), found }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f64::consts::TAU;

    fn tone(rate: u32, hertz: f64, seconds: f64) -> Vec<f32> {
        let n = (f64::from(rate) * seconds) as usize;
        (0..n).map(|i| (TAU * hertz * i as f64 / f64::from(rate)).sin() as f32).collect()
    }

    fn resample(x: &[f32], from: u32, to: u32) -> Vec<f32> {
        let mut resampler = Resampler::new(from, to).unwrap();
        // In parts of any length.
        x.chunks(777).for_each(|part| resampler.push(part).unwrap());
        resampler.finish().unwrap()
    }

    /// The largest difference from a tone away from both ends.
    fn largest(found: &[f32], n_end: usize, want: impl Fn(usize) -> f64) -> f64 {
        let inner = n_end..found.len() - n_end;
        inner.map(|i| (f64::from(found[i]) - want(i)).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn tones_keep_their_pitch_and_phase_at_any_rate() {
        for rate in [8_000, 11_025, 16_001, 22_050, 44_100, 48_000, 192_000] {
            // Without a common divisor, a block has a second.
            let (seconds, n_end) = if rate == 16_001 { (2.2, 16_100) } else { (0.3, 1_400) };
            for hertz in [50.0, 440.0, 3_000.0] {
                let found = resample(&tone(rate, hertz, seconds), rate, 16_000);
                let n = (f64::from((f64::from(rate) * seconds) as u32) * 16_000.0 / f64::from(rate)).ceil() as usize;
                assert_eq!(found.len(), n, "{rate} Hz");
                let off = largest(&found, n_end, |i| (TAU * hertz * i as f64 / 16_000.0).sin());
                assert!(off < 1e-4, "{hertz} Hz from {rate}: off by {off:.1e}");
            }
        }
    }

    #[test]
    fn tones_above_the_new_rates_half_vanish() {
        for (rate, hertz) in [(44_100, 8_400.0), (48_000, 15_000.0), (192_000, 60_000.0)] {
            let off = largest(&resample(&tone(rate, hertz, 0.3), rate, 16_000), 1_400, |_| 0.0);
            assert!(off < 1e-4, "{hertz} Hz from {rate}: {off:.1e}");
        }
    }

    #[test]
    fn short_sounds_and_extreme_rates_are_resampled() {
        assert_eq!(resample(&[], 44_100, 16_000), Vec::<f32>::new());
        assert_eq!(resample(&[0.5], 44_100, 16_000).len(), 1);
        assert_eq!(resample(&[0.5], 8_000, 16_000).len(), 2);
        assert_eq!(resample(&[0.5; 3], 1, 16_000).len(), 48_000);
        assert_eq!(resample(&[0.5; 767_999], 767_999, 16_000).len(), 16_000);
    }

    #[test]
    fn samples_that_are_no_numbers_are_refused_by_their_place() {
        let mut resampler = Resampler::new(8_000, 16_000).unwrap();
        resampler.push(&[0.0; 5]).unwrap();
        let error = resampler.push(&[0.0, f32::NAN]).unwrap_err().to_string();
        assert_eq!(error, "sound: `samples` is NaN at sample 6, expected finite numbers");
    }
}
