//! Sound on its way into a model: files to samples, to 16 kHz in one channel, to a spectrogram. Pure functions over plain
//! data.
//!
//! ```text
//! bytes -> Sound::decode_at -> Sound (one channel, 16 kHz) -> Spectrogram::frames -> [frames, bands]
//! ```

#[cfg(feature = "sound-files")]
mod decode;
mod fourier;
#[cfg(feature = "sound-files")]
mod opus;
#[cfg(not(target_arch = "wasm32"))]
mod resample;
mod spectrogram;

#[cfg(feature = "sound-files")]
pub use decode::SoundLimits;
pub use spectrogram::Spectrogram;
pub(crate) use spectrogram::{HOP, frames_of};

use crate::error::Error;
#[cfg(not(target_arch = "wasm32"))]
use resample::Resampler;

/// Samples in a second as speech models read them.
pub const SAMPLE_RATE: u32 = 16_000;
/// The highest rate of samples that is resampled.
pub const MAX_RATE: u32 = 768_000;

/// A sound: samples of one channel, from -1 to 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Sound {
    rate: u32,
    samples: Vec<f32>,
    n_damaged_packets: u64,
}

impl Sound {
    /// From samples of one channel or the mean of several, `[n, channels]`. Samples after the last whole frame do not count.
    ///
    /// # Errors
    /// [`Error::Operand`] for a rate that is 0 or above [`MAX_RATE`], no channels, or a sample that is no finite number.
    pub fn new(rate: u32, channels: u32, samples: &[f32]) -> Result<Sound, Error> {
        check_rate(rate)?;
        if channels == 0 {
            return Err(refused("channels", "at least 1".into(), "0".into()));
        }
        check_finite(samples)?;
        let samples = match channels {
            1 => samples.to_vec(),
            n => mean(samples, n as usize).collect(),
        };
        Ok(Sound { rate, samples, n_damaged_packets: 0 })
    }

    /// Samples in a second.
    pub fn rate(&self) -> u32 {
        self.rate
    }

    /// The samples.
    pub fn samples(&self) -> &[f32] {
        &self.samples
    }

    /// Packets of its file that could not be decoded, and became silence.
    pub fn n_damaged_packets(&self) -> u64 {
        self.n_damaged_packets
    }

    /// Its length in seconds.
    pub fn seconds(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.rate)
    }

    /// The same sound at another rate. What the lower rate cannot hold is filtered out before. Not in a browser.
    ///
    /// # Errors
    /// [`Error::Operand`] for a rate that is 0 or above [`MAX_RATE`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn resampled(&self, rate: u32) -> Result<Sound, Error> {
        let mut resampler = Resampler::new(self.rate, rate)?;
        resampler.push(&self.samples)?;
        Ok(Sound { rate, samples: resampler.finish()?, n_damaged_packets: self.n_damaged_packets })
    }
}

/// The mean of the channels of each whole frame.
fn mean(samples: &[f32], n_channels: usize) -> impl Iterator<Item = f32> {
    samples.chunks_exact(n_channels).map(move |frame| frame.iter().sum::<f32>() / n_channels as f32)
}

fn refused(operand: &'static str, expected: String, found: String) -> Error {
    Error::Operand { kernel: "sound", operand, expected, found }
}

/// # Errors
/// [`Error::Operand`] for a rate that is 0 or above [`MAX_RATE`].
fn check_rate(rate: u32) -> Result<(), Error> {
    match (1..=MAX_RATE).contains(&rate) {
        true => Ok(()),
        false => Err(refused("rate", format!("1 to {MAX_RATE} samples in a second"), rate.to_string())),
    }
}

/// Refuses samples that are no finite numbers.
///
/// # Errors
/// [`Error::Operand`] naming the first.
pub(crate) fn check_finite(samples: &[f32]) -> Result<(), Error> {
    check_finite_from(0, samples)
}

/// As [`check_finite`], for samples after `first` others.
fn check_finite_from(first: u64, samples: &[f32]) -> Result<(), Error> {
    match samples.iter().position(|sample| !sample.is_finite()) {
        None => Ok(()),
        Some(at) => {
            let found = format!("{} at sample {}", samples[at], first + at as u64);
            Err(refused("samples", "finite numbers".into(), found))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_become_their_mean() {
        let sound = Sound::new(8000, 2, &[1.0, 0.0, -1.0, 0.5, 0.25]).unwrap();
        assert_eq!((sound.samples(), sound.seconds()), (&[0.5, -0.25][..], 2.0 / 8000.0));
    }

    #[test]
    fn impossible_sounds_are_refused() {
        for (rate, channels, samples, want) in [
            (0, 1, [0.0], "sound: `rate` is 0, expected 1 to 768000 samples in a second"),
            (16000, 0, [0.0], "sound: `channels` is 0, expected at least 1"),
            (16000, 1, [f32::NAN], "sound: `samples` is NaN at sample 0, expected finite numbers"),
        ] {
            assert_eq!(Sound::new(rate, channels, &samples).unwrap_err().to_string(), want);
        }
    }
}
