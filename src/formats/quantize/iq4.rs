//! IQ4_NL and IQ4_XS: indices into sixteen uneven levels.

use super::fit::{ZERO, extreme, nearest, sum_of_squares, weigh};
use super::put_f16;
use super::small::inverse;
use crate::formats::block::IQ4_LEVELS;

/// The level nearest to `x`, the upper one of two equally near.
fn nearest_level(x: f32) -> usize {
    let above = IQ4_LEVELS.partition_point(|&level| level <= x);
    match above {
        0 => 0,
        16 => 15,
        above if x - IQ4_LEVELS[above - 1] < IQ4_LEVELS[above] - x => above - 1,
        above => above,
    }
}

/// The scale of a group of 32 by weighted least squares, the best of 16 roundings.
fn scale(values: &[f32], weights: &[f32; 32]) -> f32 {
    const TRIES: i32 = 7;
    let extreme = extreme(values);
    if extreme.abs() < ZERO {
        return 0.0;
    }
    let sums = |inverse: f32| {
        let (mut sum_qx, mut sum_q2) = (0.0, 0.0);
        for (&x, &w) in values.iter().zip(weights) {
            let q = IQ4_LEVELS[nearest_level(inverse * x)];
            sum_qx += w * q * x;
            sum_q2 += w * q * q;
        }
        (sum_qx, sum_q2)
    };
    let (sum_qx, sum_q2) = sums(1.0 / (-extreme / IQ4_LEVELS[0]));
    let mut scale = if sum_q2 > 0.0 { sum_qx / sum_q2 } else { 0.0 };
    let mut best = scale * sum_qx;
    for step in -TRIES..=TRIES {
        let (sum_qx, sum_q2) = sums((step as f32 + IQ4_LEVELS[0]) / extreme);
        if sum_q2 > 0.0 && sum_qx * sum_qx > best * sum_q2 {
            scale = sum_qx / sum_q2;
            best = scale * sum_qx;
        }
    }
    scale
}

/// Weights of a group: by importance, or the values' squares.
fn weights(values: &[f32], importance: Option<&[f32]>, mean_square: f32) -> [f32; 32] {
    let mut weights = [0.0; 32];
    match importance {
        Some(importance) => weigh(values, importance, mean_square, &mut weights),
        None => weights.iter_mut().zip(values).for_each(|(weight, x)| *weight = x * x),
    }
    weights
}

fn put_levels(values: &[f32], inverse: f32, out: &mut [u8]) {
    for (j, byte) in out.iter_mut().enumerate() {
        let quant = |i: usize| nearest_level(inverse * values[i]) as u8;
        *byte = quant(j) | quant(j + 16) << 4;
    }
}

pub fn iq4_nl(values: &[f32; 32], importance: Option<&[f32; 32]>, out: &mut [u8; 18]) {
    let mean_square = sum_of_squares(values) * (2.0 / 32.0);
    let scale = scale(values, &weights(values, importance.map(|all| &all[..]), mean_square));
    put_f16(out, 0, scale);
    put_levels(values, inverse(scale), &mut out[2..]);
}

/// Bytes: as in [`block::dequantize`](crate::formats::block::dequantize).
pub fn iq4_xs(values: &[f32; 256], importance: Option<&[f32; 256]>, out: &mut [u8; 136]) {
    let mean_square = sum_of_squares(values) * (2.0 / 256.0);
    let mut scales = [0.0; 8];
    for (group, group_scale) in scales.iter_mut().enumerate() {
        let range = group * 32..group * 32 + 32;
        let weights = weights(&values[range.clone()], importance.map(|all| &all[range.clone()]), mean_square);
        *group_scale = scale(&values[range], &weights);
    }
    let scale = -extreme(&scales) / 32.0;
    put_f16(out, 0, scale);
    out[2..8].fill(0);
    let mut high = 0_u16;
    for (group, group_scale) in scales.iter().enumerate() {
        let quant = nearest(inverse(scale) * group_scale).clamp(-32, 31);
        put_levels(&values[group * 32..][..32], inverse(scale * quant as f32), &mut out[8 + group * 16..][..16]);
        let quant = (quant + 32) as u8;
        out[4 + group / 2] |= (quant & 15) << (4 * (group % 2));
        high |= u16::from(quant >> 4) << (2 * group);
    }
    out[2..4].copy_from_slice(&high.to_le_bytes());
}
