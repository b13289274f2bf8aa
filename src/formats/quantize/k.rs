//! Blocks of 256 in groups of 16 or 32: Q2_K to Q6_K. Layouts as in
//! [`block::dequantize`](crate::formats::block::dequantize).

use super::fit::{
    ScaleSearch, ZERO, nearest, positive_scale, scale_and_min, signed_scale, signed_scale_by_moves, sum_of_squares,
    weigh,
};
use super::{put_f16, rounded_f16};

/// The search with an importance matrix.
const BY_IMPORTANCE: ScaleSearch = ScaleSearch { first: -0.9, step: 0.05, steps: 36, absolute: false };

/// The importances of group `group` of `N` values.
fn of_group<const N: usize>(importance: &[f32; 256], group: usize) -> &[f32] {
    &importance[group * N..][..N]
}

/// Quantised scales and mins of a block's `GROUPS` groups, with their own scales, and the quants.
struct Groups<const GROUPS: usize> {
    scales: [u8; GROUPS],
    mins: [u8; GROUPS],
    /// Scale of the scales, rounded to f16.
    scale: f32,
    /// Scale of the mins, rounded to f16.
    min: f32,
    quants: [u8; 256],
}

/// Quantises the groups' scales relative to the largest.
fn shares<const GROUPS: usize>(values: &[f32; GROUPS], limit: u8) -> (f32, [u8; GROUPS]) {
    let max = values.iter().fold(0.0_f32, |max, &x| if x > max { x } else { max });
    let top = f32::from(limit);
    let inverse = if max > 0.0 { top / max } else { 0.0 };
    (max / top, values.map(|x| (nearest(inverse * x) as u8).min(limit)))
}

/// Parameters of a type for [`groups`].
struct GroupParams {
    /// Largest quant.
    limit: u8,
    /// Largest scale and min.
    scale_limit: u8,
    /// The search without an importance matrix.
    search: ScaleSearch,
    /// With an importance matrix: factor of the block's mean square, the threshold for large values.
    mean_square: f32,
}

/// Scale, min and quants of each group of `N` values.
fn groups<const N: usize, const GROUPS: usize>(
    values: &[f32; 256],
    importance: Option<&[f32; 256]>,
    kind: &GroupParams,
) -> Groups<GROUPS> {
    let mut quants = [0; 256];
    let (mut scales, mut mins, mut sums) = ([0.0; GROUPS], [0.0; GROUPS], [0.0; GROUPS]);
    let mean_square = kind.mean_square * sum_of_squares(values) / 256.0;
    for group in 0..GROUPS {
        let x = &values[group * N..][..N];
        let mut weights = [0.0; 32];
        let weights = &mut weights[..N];
        let search = match importance {
            Some(importance) => {
                weigh(x, of_group::<N>(importance, group), mean_square, weights);
                BY_IMPORTANCE
            }
            None => {
                // Q2_K uses magnitudes only.
                let floor = if kind.search.absolute { 0.0 } else { (sum_of_squares(x) / N as f32).sqrt() };
                weights.iter_mut().zip(x).for_each(|(weight, x)| *weight = floor + x.abs());
                kind.search
            }
        };
        sums[group] = weights.iter().fold(0.0, |sum, weight| sum + weight);
        let quants = &mut quants[group * N..][..N];
        (scales[group], mins[group]) = scale_and_min(x, weights, kind.limit, search, quants);
    }
    let fit = |values: &[f32; GROUPS]| match importance {
        Some(_) => positive_scale(values, &sums, kind.scale_limit),
        None => shares(values, kind.scale_limit),
    };
    let ((scale, scales), (min, mins)) = (fit(&scales), fit(&mins));
    let (scale, min) = (rounded_f16(scale), rounded_f16(min));
    // Requantises with the stored scales.
    for group in 0..GROUPS {
        let group_scale = scale * f32::from(scales[group]);
        if group_scale != 0.0 {
            let group_min = min * f32::from(mins[group]);
            for i in group * N..(group + 1) * N {
                quants[i] = nearest((values[i] + group_min) / group_scale).clamp(0, kind.limit.into()) as u8;
            }
        }
    }
    Groups { scales, mins, scale, min, quants }
}

/// Packs two bits of each quant: in each half, four parts of 32 elements share 32 bytes.
fn put_two_bits(quants: &[u8; 256], out: &mut [u8]) {
    for (i, &quant) in quants.iter().enumerate() {
        let (half, part, l) = (i / 128, i / 32 % 4, i % 32);
        out[half * 32 + l] |= (quant & 3) << (2 * part);
    }
}

pub fn q2_k(values: &[f32; 256], importance: Option<&[f32; 256]>, out: &mut [u8; 84]) {
    let search = ScaleSearch { first: -0.5, step: 0.1, steps: 15, absolute: true };
    let kind = GroupParams { limit: 3, scale_limit: 15, search, mean_square: 1.0 };
    let found: Groups<16> = groups::<16, 16>(values, importance, &kind);
    out.fill(0);
    for (byte, (scale, min)) in out.iter_mut().zip(found.scales.iter().zip(&found.mins)) {
        *byte = scale | min << 4;
    }
    put_two_bits(&found.quants, &mut out[16..80]);
    put_f16(out, 80, found.scale);
    put_f16(out, 82, found.min);
}

pub fn q3_k(values: &[f32; 256], importance: Option<&[f32; 256]>, out: &mut [u8; 110]) {
    let mut quants = [0; 256];
    let mut scales = [0.0; 16];
    let mean_square = 2.0 * sum_of_squares(values) / 256.0;
    let mut sums = [0.0; 16];
    for (group, x) in values.as_chunks::<16>().0.iter().enumerate() {
        let quants = &mut quants[group * 16..][..16];
        match importance {
            Some(importance) => {
                let mut weights = [0.0; 16];
                weigh(x, of_group::<16>(importance, group), mean_square, &mut weights);
                sums[group] = weights.iter().fold(0.0, |sum, weight| sum + weight);
                scales[group] = signed_scale(x, Some(&weights), 4, quants);
            }
            None => {
                let signed;
                (scales[group], signed) = signed_scale_by_moves(x, 4);
                quants.iter_mut().zip(signed).for_each(|(quant, signed)| *quant = (signed + 4) as u8);
            }
        }
    }
    // Scales with 32 added, and their scale.
    let mut shares = [0; 16];
    let scale = match importance {
        Some(_) => signed_scale(&scales, Some(&sums), 32, &mut shares),
        None => {
            let extreme = super::fit::extreme(&scales);
            let inverse = -32.0 / extreme;
            for (share, scale) in shares.iter_mut().zip(scales) {
                *share = if extreme != 0.0 { (nearest(inverse * scale).clamp(-32, 31) + 32) as u8 } else { 0 };
            }
            if extreme != 0.0 { 1.0 / inverse } else { 0.0 }
        }
    };
    let scale = rounded_f16(scale);
    for (group, &share) in shares.iter().enumerate() {
        let group_scale = scale * (f32::from(share) - 32.0);
        if group_scale != 0.0 {
            for i in group * 16..group * 16 + 16 {
                quants[i] = (nearest(values[i] / group_scale).clamp(-4, 3) + 4) as u8;
            }
        }
    }
    out.fill(0);
    for (i, &quant) in quants.iter().enumerate() {
        out[i % 32] |= (quant >> 2) << (i / 32);
    }
    put_two_bits(&quants, &mut out[32..96]);
    for (group, &share) in shares.iter().enumerate() {
        out[96 + group % 8] |= (share & 15) << (4 * (group / 8));
        out[104 + group % 4] |= (share >> 4) << (2 * (group / 4));
    }
    put_f16(out, 108, scale);
}

/// Packs 6-bit scales and mins as `block::scale_and_min` reads them.
fn put_scales_and_mins(scales: &[u8; 8], mins: &[u8; 8], out: &mut [u8]) {
    for j in 0..4 {
        out[j] = scales[j] | scales[j + 4] >> 4 << 6;
        out[j + 4] = mins[j] | mins[j + 4] >> 4 << 6;
        out[j + 8] = scales[j + 4] & 15 | (mins[j + 4] & 15) << 4;
    }
}

/// Packs the low nibbles of two groups of 32 into 32 bytes.
fn put_nibbles_of_groups(quants: &[u8; 256], out: &mut [u8]) {
    for (i, byte) in out.iter_mut().enumerate() {
        let first = i / 32 * 64 + i % 32;
        *byte = quants[first] & 15 | (quants[first + 32] & 15) << 4;
    }
}

pub fn q4_k(values: &[f32; 256], importance: Option<&[f32; 256]>, out: &mut [u8; 144]) {
    let search = ScaleSearch { first: -1.0, step: 0.1, steps: 20, absolute: false };
    let kind = GroupParams { limit: 15, scale_limit: 63, search, mean_square: 2.0 };
    let found: Groups<8> = groups::<32, 8>(values, importance, &kind);
    put_f16(out, 0, found.scale);
    put_f16(out, 2, found.min);
    put_scales_and_mins(&found.scales, &found.mins, &mut out[4..16]);
    put_nibbles_of_groups(&found.quants, &mut out[16..]);
}

pub fn q5_k(values: &[f32; 256], importance: Option<&[f32; 256]>, out: &mut [u8; 176]) {
    let search = ScaleSearch { first: -0.5, step: 0.1, steps: 15, absolute: false };
    let kind = GroupParams { limit: 31, scale_limit: 63, search, mean_square: 2.0 };
    let found: Groups<8> = groups::<32, 8>(values, importance, &kind);
    put_f16(out, 0, found.scale);
    put_f16(out, 2, found.min);
    put_scales_and_mins(&found.scales, &found.mins, &mut out[4..16]);
    out[16..48].fill(0);
    for (i, &quant) in found.quants.iter().enumerate() {
        out[16 + i % 32] |= (quant >> 4) << (i / 32);
    }
    put_nibbles_of_groups(&found.quants, &mut out[48..]);
}

pub fn q6_k(values: &[f32; 256], importance: Option<&[f32; 256]>, out: &mut [u8; 210]) {
    out.fill(0);
    let mut quants = [0; 256];
    let mut scales = [0.0; 16];
    for (group, scale) in scales.iter_mut().enumerate() {
        let x = &values[group * 16..][..16];
        let weights = importance.map(|importance| of_group::<16>(importance, group));
        *scale = signed_scale(x, weights, 32, &mut quants[group * 16..][..16]);
    }
    let extreme = super::fit::extreme(&scales);
    if extreme.abs() < ZERO {
        return;
    }
    let inverse = -128.0 / extreme;
    let scale = rounded_f16(1.0 / inverse);
    for (group, group_scale) in scales.iter().enumerate() {
        let share = nearest(inverse * group_scale).min(127) as i8;
        out[192 + group] = share as u8;
        let group_scale = scale * f32::from(share);
        if group_scale != 0.0 {
            for i in group * 16..group * 16 + 16 {
                quants[i] = (nearest(values[i] / group_scale).clamp(-32, 31) + 32) as u8;
            }
        }
    }
    for (i, &quant) in quants.iter().enumerate() {
        let (half, part, l) = (i / 128, i / 32 % 4, i % 32);
        out[half * 64 + part % 2 * 32 + l] |= (quant & 15) << (4 * (part / 2));
        out[128 + half * 32 + l] |= (quant >> 4) << (2 * part);
    }
    put_f16(out, 208, scale);
}
