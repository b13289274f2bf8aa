//! Blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, IQ4_NL. Byte j holds elements j (low nibble) and j + 16.

use super::fit::{ScaleSearch, extreme, scale_and_min, signed_scale, weigh};
use super::put_f16;
use crate::formats::block::{FP4_DOUBLED, half_scale};

/// A block's values and, with an importance matrix, their importances and the row's mean square.
#[derive(Clone, Copy)]
pub struct Group<'a> {
    pub values: &'a [f32; 32],
    pub importance: Option<(&'a [f32; 32], f32)>,
}

/// The search with an importance matrix.
const BY_IMPORTANCE: ScaleSearch = ScaleSearch { first: -0.9, step: 0.05, steps: 36, absolute: false };

impl Group<'_> {
    fn weights(self) -> Option<[f32; 32]> {
        self.importance.map(|(importance, mean_square)| {
            let mut weights = [0.0; 32];
            weigh(self.values, importance, mean_square, &mut weights);
            weights
        })
    }

    /// Minimum and maximum.
    fn range(self) -> (f32, f32) {
        self.values
            .iter()
            .fold((f32::MAX, f32::MIN), |(min, max), &x| (if x < min { x } else { min }, if x > max { x } else { max }))
    }

    /// A scale, and quants of `n_bits` bits around the middle of their range.
    fn symmetric(self, n_bits: u32) -> (f32, [u8; 32]) {
        let middle = 1 << (n_bits - 1);
        let mut quants = [0; 32];
        if let Some(weights) = self.weights() {
            let scale = signed_scale(self.values, Some(&weights), middle, &mut quants);
            return (scale, quants);
        }
        let scale = extreme(self.values) / -middle as f32;
        let inverse = inverse(scale);
        let top = 2 * middle as i8 - 1;
        for (quant, x) in quants.iter_mut().zip(self.values) {
            *quant = ((x * inverse + (middle as f32 + 0.5)) as i8).min(top) as u8;
        }
        (scale, quants)
    }

    /// A scale, a minimum, and quants of `n_bits` bits above it.
    fn above_min(self, n_bits: u32) -> (f32, f32, [u8; 32]) {
        let top = (1 << n_bits) - 1;
        let mut quants = [0; 32];
        if let Some(weights) = self.weights() {
            let (scale, subtracted) = scale_and_min(self.values, &weights, top, BY_IMPORTANCE, &mut quants);
            return (scale, -subtracted, quants);
        }
        let (min, max) = self.range();
        let scale = (max - min) / f32::from(top);
        let inverse = inverse(scale);
        for (quant, x) in quants.iter_mut().zip(self.values) {
            *quant = (((x - min) * inverse + 0.5) as u8).min(top);
        }
        (scale, min, quants)
    }
}

/// 1 / scale; 0 for a scale of 0.
pub fn inverse(scale: f32) -> f32 {
    if scale != 0.0 { 1.0 / scale } else { 0.0 }
}

/// Packs low nibbles of quants, the first half's below the second's.
fn put_nibbles(quants: &[u8; 32], out: &mut [u8]) {
    for (j, byte) in out.iter_mut().enumerate() {
        *byte = quants[j] & 15 | (quants[j + 16] & 15) << 4;
    }
}

/// The fifth bit of each quant.
fn fifth_bits(quants: &[u8; 32]) -> [u8; 4] {
    let bits = quants.iter().enumerate().fold(0_u32, |bits, (j, &quant)| bits | u32::from(quant >> 4 & 1) << j);
    bits.to_le_bytes()
}

pub fn q4_0(group: Group<'_>, out: &mut [u8; 18]) {
    let (scale, quants) = group.symmetric(4);
    put_f16(out, 0, scale);
    put_nibbles(&quants, &mut out[2..]);
}

pub fn q4_1(group: Group<'_>, out: &mut [u8; 20]) {
    let (scale, min, quants) = group.above_min(4);
    put_f16(out, 0, scale);
    put_f16(out, 2, min);
    put_nibbles(&quants, &mut out[4..]);
}

pub fn q5_0(group: Group<'_>, out: &mut [u8; 22]) {
    let (scale, quants) = group.symmetric(5);
    put_f16(out, 0, scale);
    out[2..6].copy_from_slice(&fifth_bits(&quants));
    put_nibbles(&quants, &mut out[6..]);
}

pub fn q5_1(group: Group<'_>, out: &mut [u8; 24]) {
    let (scale, min, quants) = group.above_min(5);
    put_f16(out, 0, scale);
    put_f16(out, 2, min);
    out[4..8].copy_from_slice(&fifth_bits(&quants));
    put_nibbles(&quants, &mut out[8..]);
}

/// Ignores importances.
pub fn q8_0(group: Group<'_>, out: &mut [u8; 34]) {
    let scale = extreme(group.values).abs() / 127.0;
    let inverse = inverse(scale);
    put_f16(out, 0, scale);
    for (byte, x) in out[2..].iter_mut().zip(group.values) {
        *byte = (x * inverse).round() as i8 as u8;
    }
}

/// Ignores importances. The exponent is the largest magnitude's, less that of the largest 4-bit float.
pub fn mxfp4(group: Group<'_>, out: &mut [u8; 17]) {
    let largest = extreme(group.values).abs();
    // Computed in f64, then rounded: f32 logarithms differ between systems, f64 ones not in the bits kept.
    let log = f64::from(largest).log2() as f32;
    out[0] = if largest > 0.0 { (log.floor() + 125.0) as u8 } else { 0 };
    let scale = half_scale(out[0]);
    let quants = group.values.map(|x| {
        let error = |quant: usize| (FP4_DOUBLED[quant] * scale - x).abs();
        (1..16).fold(0, |best, quant| if error(quant) < error(best) { quant } else { best }) as u8
    });
    put_nibbles(&quants, &mut out[1..]);
}
