//! Searches for the scale, or scale and minimum, that fit a group's quants to its values.
//!
//! Sums are f32 in ggml's order, so that the quants are identical.

/// A group with magnitudes below this counts as zeros.
pub const ZERO: f32 = 1e-15;

/// The nearest integer, ties to even, by adding 1.5 * 2^23: as in ggml, even for meaningless results.
pub fn nearest(value: f32) -> i32 {
    const SHIFT: f32 = 12_582_912.0;
    ((value + SHIFT).to_bits() & 0x007f_ffff) as i32 - 0x0040_0000
}

/// The value of largest magnitude, the first of several.
pub fn extreme(values: &[f32]) -> f32 {
    let larger = |extreme: f32, &value: &f32| if value.abs() > extreme.abs() { value } else { extreme };
    values.iter().fold(0.0, larger)
}

/// A scale for signed quants from `-limit` to `limit - 1`, written to `quants` with `limit` added.
///
/// Least squares with `weights` or the values' squares, over 19 roundings. All zeros give scale 0 and quants of 0.
pub fn signed_scale(values: &[f32], weights: Option<&[f32]>, limit: i32, quants: &mut [u8]) -> f32 {
    let extreme = extreme(values);
    if extreme.abs() < ZERO {
        quants.fill(0);
        return 0.0;
    }
    let quant = |inverse: f32, value: f32| nearest(inverse * value).clamp(-limit, limit - 1);
    let sums = |inverse: f32| {
        let (mut sum_lx, mut sum_l2) = (0.0, 0.0);
        for (i, &x) in values.iter().enumerate() {
            let l = quant(inverse, x) as f32;
            let w = weights.map_or(x * x, |weights| weights[i]);
            sum_lx += w * x * l;
            sum_l2 += w * l * l;
        }
        (sum_lx, sum_l2)
    };
    let mut best_inverse = -limit as f32 / extreme;
    let (sum_lx, sum_l2) = sums(best_inverse);
    let mut scale = if sum_l2 != 0.0 { sum_lx / sum_l2 } else { 0.0 };
    let mut best = scale * sum_lx;
    for step in (-9..=9).filter(|&step| step != 0) {
        let inverse = -(limit as f32 + 0.1 * step as f32) / extreme;
        let (sum_lx, sum_l2) = sums(inverse);
        if sum_l2 > 0.0 && sum_lx * sum_lx > best * sum_l2 {
            best_inverse = inverse;
            scale = sum_lx / sum_l2;
            best = scale * sum_lx;
        }
    }
    for (quant_out, &x) in quants.iter_mut().zip(values) {
        *quant_out = (limit + quant(best_inverse, x)) as u8;
    }
    scale
}

/// A scale for signed quants from `-limit` to `limit - 1`: least squares weighted with the values' squares, moving
/// one quant at a time while that helps.
pub fn signed_scale_by_moves(values: &[f32; 16], limit: i32) -> (f32, [i32; 16]) {
    let mut quants = [-limit; 16];
    let extreme = extreme(values);
    if extreme.abs() < ZERO {
        return (0.0, quants);
    }
    let inverse = -limit as f32 / extreme;
    let (mut sum_lx, mut sum_l2) = (0.0_f32, 0.0_f32);
    for (l, &x) in quants.iter_mut().zip(values) {
        *l = nearest(inverse * x).clamp(-limit, limit - 1);
        let w = x * x;
        sum_lx += w * x * *l as f32;
        sum_l2 += w * *l as f32 * *l as f32;
    }
    for _ in 0..5 {
        let mut has_moved = false;
        for (l, &x) in quants.iter_mut().zip(values) {
            let w = x * x;
            let mut other_lx = sum_lx - w * x * *l as f32;
            if other_lx > 0.0 {
                let mut other_l2 = sum_l2 - w * *l as f32 * *l as f32;
                let moved = nearest(x * other_l2 / other_lx).clamp(-limit, limit - 1);
                if moved != *l {
                    other_lx += w * x * moved as f32;
                    other_l2 += w * moved as f32 * moved as f32;
                    if other_l2 > 0.0 && other_lx * other_lx * sum_l2 > sum_lx * sum_lx * other_l2 {
                        (*l, sum_lx, sum_l2) = (moved, other_lx, other_l2);
                        has_moved = true;
                    }
                }
            }
        }
        if !has_moved {
            break;
        }
    }
    (if sum_l2 > 0.0 { sum_lx / sum_l2 } else { 0.0 }, quants)
}

/// Settings of [`scale_and_min`].
#[derive(Clone, Copy)]
pub struct ScaleSearch {
    /// Added to the largest quant in the first rounding.
    pub first: f32,
    /// Added for each further rounding.
    pub step: f32,
    /// Number of further roundings.
    pub steps: u32,
    /// Whether errors count by magnitude rather than square.
    pub absolute: bool,
}

/// A scale and a subtracted minimum (0 or more) for quants from 0 to `limit`, written to `quants`: the best of
/// several roundings, each fitted by weighted least squares.
pub fn scale_and_min(values: &[f32], weights: &[f32], limit: u8, search: ScaleSearch, quants: &mut [u8]) -> (f32, f32) {
    let (mut min, mut max) = (values[0], values[0]);
    let mut sum_w = weights[0];
    let mut sum_x = sum_w * values[0];
    for (&x, &w) in values.iter().zip(weights).skip(1) {
        min = if x < min { x } else { min };
        max = if x > max { x } else { max };
        sum_w += w;
        sum_x += w * x;
    }
    min = if min > 0.0 { 0.0 } else { min };
    if max <= min {
        quants.fill(0);
        return (0.0, -min);
    }
    let limit = f32::from(limit);
    // The current minimum may be close to the largest value, which makes the quotient meaningless.
    let quant = |value: f32| if value > 0.0 { nearest(if value < limit { value } else { limit }) as u8 } else { 0 };
    let error = |scale: f32, min: f32, quants: &[u8]| {
        let mut sum = 0.0;
        for ((&x, &w), &l) in values.iter().zip(weights).zip(quants) {
            let difference = scale * f32::from(l) + min - x;
            sum += w * if search.absolute { difference.abs() } else { difference * difference };
        }
        sum
    };
    let inverse = limit / (max - min);
    let mut scale = 1.0 / inverse;
    for (l, &x) in quants.iter_mut().zip(values) {
        *l = quant(inverse * (x - min));
    }
    let mut best = error(scale, min, quants);
    let mut tried = [0; 32];
    let tried = &mut tried[..values.len()];
    for step in 0..=search.steps {
        let inverse = (search.first + search.step * step as f32 + limit) / (max - min);
        let (mut sum_l, mut sum_l2, mut sum_xl) = (0.0, 0.0, 0.0);
        for ((l, &x), &w) in tried.iter_mut().zip(values).zip(weights) {
            *l = quant(inverse * (x - min));
            let l = f32::from(*l);
            sum_l += w * l;
            sum_l2 += w * l * l;
            sum_xl += w * l * x;
        }
        let determinant = sum_w * sum_l2 - sum_l * sum_l;
        if determinant > 0.0 {
            let mut this_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
            let mut this_min = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
            if this_min > 0.0 {
                this_min = 0.0;
                this_scale = sum_xl / sum_l2;
            }
            let this_error = error(this_scale, this_min, tried);
            if this_error < best {
                quants.copy_from_slice(tried);
                (best, scale, min) = (this_error, this_scale, this_min);
            }
        }
    }
    (scale, -min)
}

/// A scale for quants from 0 to `limit` of non-negative values: the best of 9 roundings by weighted least squares,
/// then moving one quant at a time while that helps.
pub fn positive_scale<const N: usize>(values: &[f32; N], weights: &[f32; N], limit: u8) -> (f32, [u8; N]) {
    let max = values.iter().fold(0.0_f32, |max, &x| if max > x { max } else { x });
    let mut quants = [0; N];
    if max < ZERO {
        return (0.0, quants);
    }
    let top = f32::from(limit);
    let error = |inverse: f32, limit: u8| {
        let scale = 1.0 / inverse;
        let mut sum = 0.0;
        for (&x, &w) in values.iter().zip(weights) {
            let difference = x - scale * nearest(inverse * x).min(limit.into()) as f32;
            sum += w * difference * difference;
        }
        sum
    };
    let mut inverse = top / max;
    let mut best = error(inverse, u8::MAX);
    for step in (-4..=4).filter(|&step| step != 0) {
        let this_inverse = (0.1 * step as f32 + top) / max;
        let this_error = error(this_inverse, limit);
        if this_error < best {
            (best, inverse) = (this_error, this_inverse);
        }
    }
    let (mut sum_lx, mut sum_l2) = (0.0, 0.0);
    for ((l, &x), &w) in quants.iter_mut().zip(values).zip(weights) {
        *l = nearest(inverse * x).min(limit.into()) as u8;
        sum_lx += w * x * f32::from(*l);
        sum_l2 += w * f32::from(*l) * f32::from(*l);
    }
    for _ in 0..5 {
        let mut has_moved = false;
        for ((l, &x), &w) in quants.iter_mut().zip(values).zip(weights) {
            let mut other_lx = sum_lx - w * x * f32::from(*l);
            let mut other_l2 = sum_l2 - w * f32::from(*l) * f32::from(*l);
            if other_lx > 0.0 && other_l2 > 0.0 {
                let moved = nearest(x * other_l2 / other_lx).min(limit.into());
                if moved != i32::from(*l) {
                    other_lx += w * x * moved as f32;
                    other_l2 += w * moved as f32 * moved as f32;
                    if other_lx * other_lx * sum_l2 > sum_lx * sum_lx * other_l2 {
                        (*l, sum_lx, sum_l2) = (moved as u8, other_lx, other_l2);
                        has_moved = true;
                    }
                }
            }
        }
        if !has_moved {
            break;
        }
    }
    (if sum_l2 > 0.0 { sum_lx / sum_l2 } else { 0.0 }, quants)
}

/// The weight of each value of a group: its importance, increased for large values relative to `mean_square`.
pub fn weigh(values: &[f32], importance: &[f32], mean_square: f32, weights: &mut [f32]) {
    for ((weight, &x), &importance) in weights.iter_mut().zip(values).zip(importance) {
        *weight = importance * (mean_square + x * x).sqrt();
    }
}

/// The sum of squares in order.
pub fn sum_of_squares(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |sum, &x| sum + x * x)
}
