//! `rms_norm` and `layer_norm`, one token at a time, with sums in f64.

use super::{Call, threads};
use crate::shaders::constants::layer_norm::BIAS;
use crate::shaders::constants::rms_norm::{ACCUMULATE, FACTOR};
use crate::shaders::params::{NormParams, RmsNormParams};

/// Operations for an element, roughly.
pub(super) const OPS: usize = 8;

/// Mean over a row of a function of its elements, in eight sums side by side.
pub(super) fn mean(row: &[f32], function: impl Fn(f64) -> f64) -> f64 {
    let (eights, rest) = row.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for eight in eights {
        sums = std::array::from_fn(|i| sums[i] + function(f64::from(eight[i])));
    }
    let rest: f64 = rest.iter().map(|&x| function(f64::from(x))).sum();
    (sums.iter().sum::<f64>() + rest) / row.len() as f64
}

/// One token's RMSNorm.
pub(super) fn rms_norm_row(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let scale = 1.0 / (mean(x, |x| x * x) + f64::from(eps)).sqrt();
    for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
        *y = (f64::from(x) * scale) as f32 * weight;
    }
}

/// One token's layer normalisation, in place.
pub(super) fn layer_norm_row(row: &mut [f32], weight: &[f32], bias: Option<&[f32]>, eps: f32) {
    let centre = mean(row, |x| x);
    let variance = mean(row, |x| (x - centre) * (x - centre));
    let scale = 1.0 / (variance + f64::from(eps)).sqrt();
    for (y, &weight) in row.iter_mut().zip(weight) {
        *y = ((f64::from(*y) - centre) * scale) as f32 * weight;
    }
    if let Some(bias) = bias {
        row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
    }
}

pub(crate) fn rms_norm(mut call: Call<'_>) {
    let params: RmsNormParams = call.params();
    let [x, weight, factor, y] = call.operands();
    let (dim, len) = (params.dim as usize, params.n_tokens as usize * params.dim as usize);
    let (x, weight) = (x.get::<f32>(), weight.get::<f32>());
    let weight_of = |t: usize| &weight[t % params.weight_rows as usize * dim..][..dim];
    let adds = params.flags & ACCUMULATE != 0;
    let factor = if params.flags & FACTOR != 0 { factor.get::<f32>()[0] } else { 1.0 };
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], dim, len * OPS, |t, y| {
        let held = if adds { y.to_vec() } else { Vec::new() };
        rms_norm_row(&x[t * params.stride as usize..][..dim], weight_of(t), params.eps, y);
        y.iter_mut().zip(held).for_each(|(y, held)| *y += held);
        if factor != 1.0 {
            y.iter_mut().for_each(|y| *y *= factor);
        }
    });
}

pub(crate) fn layer_norm(mut call: Call<'_>) {
    let params: NormParams = call.params();
    let [x, weight, bias, y] = call.operands();
    let (dim, len) = (params.dim as usize, params.n_tokens as usize * params.dim as usize);
    let (x, weight) = (x.get::<f32>(), &weight.get::<f32>()[..dim]);
    let bias = (params.flags & BIAS != 0).then(|| &bias.get::<f32>()[..dim]);
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], dim, len * OPS, |t, y| {
        y.copy_from_slice(&x[t * dim..][..dim]);
        layer_norm_row(y, weight, bias, params.eps);
    });
}
