//! Logarithmic mel spectrograms as Whisper was trained with (Radford et al. 2022, arXiv:2212.04356).

use std::f64::consts::TAU;

use super::fourier::{Complex, Fourier};
use super::{SAMPLE_RATE, check_finite};
use crate::error::Error;

/// Samples of a frame.
const FRAME: usize = 400;
/// Samples from one frame to the next.
pub(crate) const HOP: usize = 160;
/// The least power of a band.
const LEAST: f64 = 1e-10;
/// Powers of ten between the loudest band and the quietest one that counts.
const RANGE: f64 = 8.0;

/// The spectrogram of a sound, which is followed by silence. Its frames are computed when they are asked for.
pub struct Spectrogram<'a> {
    samples: &'a [f32],
    /// Samples with the silence that counts; behind them is their mirror image.
    end: usize,
    fourier: Fourier,
    window: Vec<f64>,
    /// First frequency of each band, and the factors of those from it on.
    bands: Vec<(usize, Vec<f64>)>,
    /// What bands are raised to, as a logarithm.
    floor: f64,
}

impl Spectrogram<'_> {
    /// Of samples at [`SAMPLE_RATE`]. `n_frames`: those of a model's window, to which shorter sounds are filled up.
    ///
    /// # Errors
    /// [`Error::Operand`] for a sample that is no finite number.
    pub fn new(samples: &[f32], n_bands: u32, n_frames: u32) -> Result<Spectrogram<'_>, Error> {
        check_finite(samples)?;
        let n_window = n_frames as usize * HOP;
        let silence = if samples.len() <= n_window { n_window - samples.len() } else { n_window };
        let mut all = Spectrogram {
            samples,
            end: samples.len() + silence,
            fourier: Fourier::new(FRAME),
            window: (0..FRAME).map(|i| 0.5 - 0.5 * (TAU * i as f64 / FRAME as f64).cos()).collect(),
            bands: mel_bands(n_bands),
            floor: f64::MIN,
        };
        let n_frames = (samples.len() / HOP + 3).min(all.end / HOP);
        let mut loudest = LEAST.log10();
        all.each(0..n_frames, |bands| loudest = bands.iter().fold(loudest, |most, band| most.max(*band)));
        all.floor = loudest - RANGE;
        Ok(all)
    }

    /// Whole frames of the sound; at least one unless it is empty.
    pub fn n_frames(&self) -> u32 {
        frames_of(self.samples)
    }

    /// `n` frames from `first` on, `[n, bands]`.
    pub fn frames(&self, first: u32, n: u32) -> Vec<f32> {
        let mut values = Vec::with_capacity(n as usize * self.bands.len());
        let first = first as usize;
        self.each(first..first + n as usize, |bands| {
            values.extend(bands.iter().map(|band| ((band.max(self.floor) + 4.0) / 4.0) as f32));
        });
        values
    }

    /// Calls `take` with the logarithms of each frame's bands, in order. Two frames are the real and the imaginary part of one
    /// transform.
    fn each(&self, frames: std::ops::Range<usize>, mut take: impl FnMut(&[f64])) {
        let (mut x, mut y) = (vec![[0.0; 2]; FRAME], vec![[0.0; 2]; FRAME]);
        let mut bands = vec![0.0; self.bands.len()];
        for pair in frames.clone().step_by(2) {
            if self.is_silent_from(pair) {
                bands.fill(LEAST.log10());
                (pair..frames.end).for_each(|_| take(&bands));
                return;
            }
            for (i, (x, window)) in x.iter_mut().zip(&self.window).enumerate() {
                *x = [pair, pair + 1].map(|frame| window * self.sample(frame, i));
            }
            self.fourier.run(&x, &mut y);
            for part in 0..(frames.end - pair).min(2) {
                for (band, (first, factors)) in bands.iter_mut().zip(&self.bands) {
                    let powers = factors.iter().enumerate().map(|(i, factor)| factor * power(&y, first + i, part));
                    *band = powers.sum::<f64>().max(LEAST).log10();
                }
                take(&bands);
            }
        }
    }

    /// Whether a frame and all after it begin behind the sound. The mirrored samples there are silence, too.
    fn is_silent_from(&self, frame: usize) -> bool {
        frame * HOP >= self.samples.len() + FRAME / 2
    }

    /// A sample of a frame, whose middle is where it begins. Sounds are mirrored at both ends.
    fn sample(&self, frame: usize, i: usize) -> f64 {
        let is_within = frame * HOP < self.end;
        let at = match (frame * HOP + i).checked_sub(FRAME / 2) {
            Some(at) if at >= self.end && is_within => (2 * self.end).saturating_sub(2 + at),
            Some(at) => at,
            None => FRAME / 2 - frame * HOP - i,
        };
        self.samples.get(at).map_or(0.0, |&sample| f64::from(sample))
    }
}

/// Whole frames of samples; at least one unless there are none.
pub(crate) fn frames_of(samples: &[f32]) -> u32 {
    let n_whole = (samples.len() / HOP) as u32;
    n_whole.max(u32::from(!samples.is_empty()))
}

/// The power of a frequency in the transform of a real signal, which is the real part (0) or the imaginary part (1) of what
/// was transformed.
fn power(y: &[Complex], k: usize, part: usize) -> f64 {
    let ([a, b], [c, d]) = (y[k], y[(FRAME - k) % FRAME]);
    let [re, im] = if part == 0 { [a + c, b - d] } else { [b + d, c - a] };
    (re * re + im * im) / 4.0
}

/// Triangles over the frequencies of a frame, evenly spaced on Slaney's mel scale and of equal area.
fn mel_bands(n: u32) -> Vec<(usize, Vec<f64>)> {
    let nyquist = f64::from(SAMPLE_RATE) / 2.0;
    let top = to_mel(nyquist);
    let edge = |i: u32| to_hertz(top * f64::from(i) / f64::from(n + 1));
    let hertz = |k: usize| k as f64 * f64::from(SAMPLE_RATE) / FRAME as f64;
    let band = |i: u32| {
        let [low, middle, high] = [edge(i), edge(i + 1), edge(i + 2)];
        let factor = |k: usize| {
            let rising = (hertz(k) - low) / (middle - low);
            let falling = (high - hertz(k)) / (high - middle);
            rising.min(falling).max(0.0) * 2.0 / (high - low)
        };
        let factors: Vec<f64> = (0..=FRAME / 2).map(factor).collect();
        let first = factors.iter().position(|&factor| factor > 0.0).unwrap_or(0);
        let end = factors.iter().rposition(|&factor| factor > 0.0).map_or(first, |last| last + 1);
        (first, factors[first..end].to_vec())
    };
    (0..n).map(band).collect()
}

/// Slaney's scale: linear up to 1 kHz, logarithmic above.
const LINEAR_END: f64 = 1000.0;
const HERTZ_PER_MEL: f64 = 200.0 / 3.0;

/// Logarithm of the ratio of two frequencies one mel apart, above 1 kHz.
fn log_step() -> f64 {
    6.4f64.ln() / 27.0
}

fn to_mel(hertz: f64) -> f64 {
    match hertz < LINEAR_END {
        true => hertz / HERTZ_PER_MEL,
        false => LINEAR_END / HERTZ_PER_MEL + (hertz / LINEAR_END).ln() / log_step(),
    }
}

fn to_hertz(mel: f64) -> f64 {
    let linear_end = LINEAR_END / HERTZ_PER_MEL;
    match mel < linear_end {
        true => mel * HERTZ_PER_MEL,
        false => LINEAR_END * ((mel - linear_end) * log_step()).exp(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_one_value_in_all_bands() {
        for samples in [&[][..], &[0.0], &[0.0; 5000]] {
            let frames = Spectrogram::new(samples, 80, 20).unwrap().frames(0, 20);
            assert_eq!(frames, vec![((-10.0 + 4.0) / 4.0) as f32; 20 * 80]);
        }
    }

    #[test]
    fn a_tone_is_loudest_in_the_band_around_it() {
        let tone: Vec<f32> = (0..16_000).map(|i| (TAU * 1000.0 * f64::from(i) / 16_000.0).sin() as f32).collect();
        let frames = Spectrogram::new(&tone, 80, 100).unwrap().frames(40, 2);
        let loudest = (0..80).max_by(|&a, &b| frames[a].total_cmp(&frames[b])).unwrap();
        // Mel 15 of 45.2 in 81 steps.
        assert_eq!(loudest, (15.0 / to_mel(8000.0) * 81.0).round() as usize - 1);
    }

    #[test]
    fn frames_of_a_long_sound_do_not_depend_on_how_they_are_asked_for() {
        let sound: Vec<f32> = (0..20_000).map(|i| ((i * 37 % 101) as f32 - 50.0) / 100.0).collect();
        let all = Spectrogram::new(&sound, 128, 50).unwrap();
        assert_eq!(all.n_frames(), 125);
        let (whole, part) = (all.frames(0, 125), all.frames(33, 50));
        let off = whole[33 * 128..83 * 128].iter().zip(&part).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 1e-6, "{off}");
    }

    #[test]
    fn frames_after_a_sound_are_silent() {
        // Fills its window.
        let sound: Vec<f32> = (0..3200).map(|i| ((i * 37 % 101) as f32 - 50.0) / 100.0).collect();
        let frames = Spectrogram::new(&sound, 80, 20).unwrap().frames(18, 20);
        let quietest = frames.iter().copied().fold(f32::MAX, f32::min);
        assert!(frames[..2 * 80].iter().any(|&value| value > quietest + 1.0));
        assert!(frames[4 * 80..].iter().all(|&value| value == quietest));
    }

    #[test]
    fn silence_behind_a_sound_is_as_zeros_in_it() {
        for n in [1, 199, 3200, 3333, 3360] {
            let mut sound: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 100.0).collect();
            let found = Spectrogram::new(&sound, 80, 30).unwrap().frames(0, 30);
            sound.resize(4800, 0.0);
            assert_eq!(found, Spectrogram::new(&sound, 80, 30).unwrap().frames(0, 30), "{n} samples");
        }
    }

    #[test]
    fn samples_that_are_no_numbers_are_refused() {
        let error = Spectrogram::new(&[0.0, f32::INFINITY], 80, 20).err().unwrap().to_string();
        assert_eq!(error, "sound: `samples` is inf at sample 1, expected finite numbers");
    }
}
