//! Resampling by a windowed sinc (Smith and Gossett 1984): each output is a sum over the inputs around it, by a low-pass
//! filter that is sampled where the output lies between them.

/// Zeros of the sinc on either side.
const ZEROS: f64 = 32.0;
/// The end of the pass band, as a share of the lower rate's half.
const ROLLOFF: f64 = 0.92;
/// Shape of Kaiser's window: 80 dB.
const BETA: f64 = 8.0;
/// Filters that are kept, one for each place of an output between two inputs; more are computed anew.
const MAX_KEPT: u64 = 1 << 21;

/// The samples at another rate, as many as the time of `x` takes.
pub(super) fn resample(x: &[f32], from: u32, to: u32) -> Vec<f32> {
    let divisor = gcd(from, to);
    let (from, to) = (u64::from(from / divisor), u64::from(to / divisor));
    let n = (x.len() as u64 * to).div_ceil(from);
    let filter = Filter::new(from, to);
    let keeps = to.saturating_mul(filter.n_taps() as u64) <= MAX_KEPT && n > to;
    let kept: Vec<Vec<f32>> = if keeps { (0..to).map(|phase| filter.taps(phase)).collect() } else { Vec::new() };
    let output = |i: u64| {
        let (middle, phase) = (i * from / to, i * from % to);
        let computed;
        let taps = match kept.get(phase as usize) {
            Some(taps) => taps,
            None => {
                computed = filter.taps(phase);
                &computed
            }
        };
        let first = middle as i64 - filter.reach as i64;
        let skipped = (-first).max(0) as usize;
        let inputs = x.get((first + skipped as i64) as usize..).unwrap_or_default();
        taps[skipped.min(taps.len())..].iter().zip(inputs).map(|(tap, x)| tap * x).sum()
    };
    (0..n).map(output).collect()
}

/// A low-pass filter between two rates without a common divisor.
struct Filter {
    /// Share of the input's rate that passes.
    cutoff: f64,
    /// Places between two inputs.
    n_places: u64,
    /// Inputs on either side of an output.
    reach: usize,
}

impl Filter {
    fn new(from: u64, to: u64) -> Filter {
        let cutoff = ROLLOFF * (to as f64 / from as f64).min(1.0);
        Filter { cutoff, n_places: to, reach: (ZEROS / cutoff).ceil() as usize }
    }

    fn n_taps(&self) -> usize {
        2 * self.reach + 2
    }

    /// Factors of the inputs around an output, `phase` places after an input. Their sum is 1.
    fn taps(&self, phase: u64) -> Vec<f32> {
        let after = phase as f64 / self.n_places as f64;
        let tap = |i: usize| {
            let t = (i as f64 - self.reach as f64 - after) * self.cutoff;
            let share = t / ZEROS;
            if share.abs() >= 1.0 { 0.0 } else { sinc(t) * bessel(BETA * (1.0 - share * share).sqrt()) }
        };
        let taps: Vec<f64> = (0..self.n_taps()).map(tap).collect();
        let sum: f64 = taps.iter().sum();
        taps.iter().map(|tap| (tap / sum) as f32).collect()
    }
}

fn sinc(t: f64) -> f64 {
    let x = std::f64::consts::PI * t;
    if x.abs() < 1e-9 { 1.0 } else { x.sin() / x }
}

/// The modified Bessel function of the first kind and order 0, by its series.
fn bessel(x: f64) -> f64 {
    let quarter = x * x / 4.0;
    let (mut term, mut sum) = (1.0, 1.0);
    for k in 1..40 {
        term *= quarter / f64::from(k * k);
        sum += term;
    }
    sum
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

    /// The largest difference from a tone away from both ends.
    fn largest(found: &[f32], want: impl Fn(usize) -> f64) -> f64 {
        let inner = 100..found.len().saturating_sub(100);
        inner.map(|i| (f64::from(found[i]) - want(i)).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn tones_keep_their_pitch_and_phase_at_any_rate() {
        for rate in [8_000, 11_025, 16_001, 22_050, 44_100, 48_000, 192_000] {
            for hertz in [50.0, 440.0, 3_000.0] {
                let found = resample(&tone(rate, hertz, 0.2), rate, 16_000);
                let n = (f64::from((f64::from(rate) * 0.2) as u32) * 16_000.0 / f64::from(rate)).ceil() as usize;
                assert_eq!(found.len(), n, "{rate} Hz");
                let off = largest(&found, |i| (TAU * hertz * i as f64 / 16_000.0).sin());
                assert!(off < 2e-4, "{hertz} Hz from {rate}: off by {off:.1e}");
            }
        }
    }

    #[test]
    fn tones_above_the_new_rates_half_vanish() {
        for (rate, hertz) in [(44_100, 9_000.0), (48_000, 15_000.0), (192_000, 60_000.0)] {
            let off = largest(&resample(&tone(rate, hertz, 0.2), rate, 16_000), |_| 0.0);
            assert!(off < 2e-3, "{hertz} Hz from {rate}: {off:.1e}");
        }
    }

    #[test]
    fn a_sums_terms_are_those_of_the_formula() {
        // The formula in f64, term by term, without phases or kept filters.
        let x: Vec<f32> = (0..300).map(|i| ((i * i % 17) as f32 - 8.0) / 10.0).collect();
        let found = resample(&x, 441, 160);
        let cutoff = 0.92 * 160.0 / 441.0;
        for (n, found) in found.iter().enumerate() {
            let at = n as f64 * 441.0 / 160.0;
            let (mut sum, mut weights) = (0.0, 0.0);
            for i in -200i32..500 {
                let t = (f64::from(i) - at) * cutoff;
                if t.abs() >= 32.0 {
                    continue;
                }
                let x0 = 8.0 * (1.0 - (t / 32.0).powi(2)).sqrt();
                // The integral that defines the Bessel function, by the trapezoid rule.
                let window: f64 =
                    (0..2000).map(|k| (x0 * (TAU * f64::from(k) / 2000.0).cos()).exp()).sum::<f64>() / 2000.0;
                let arm = std::f64::consts::PI * t;
                let weight = window * if arm == 0.0 { 1.0 } else { arm.sin() / arm };
                weights += weight;
                sum += weight * x.get(i as usize).map_or(0.0, |&x| f64::from(x));
            }
            assert!((f64::from(*found) - sum / weights).abs() < 1e-5, "{n}: {found}, expected {}", sum / weights);
        }
    }

    #[test]
    fn short_sounds_are_resampled() {
        assert_eq!(resample(&[], 44_100, 16_000), Vec::<f32>::new());
        assert_eq!(resample(&[0.5], 44_100, 16_000).len(), 1);
        assert_eq!(resample(&[0.5], 8_000, 16_000).len(), 2);
    }
}
