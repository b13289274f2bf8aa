//! `add`, `clip`, `geglu`, `gelu`, `scale`, `silu` and `swiglu`: element by element.

use super::linear::gated_by;
use super::simd::{self, Function, Instructions, Map, Numbers, exp, polynomial};
use super::{Call, threads};
use crate::shaders::constants::gelu::{QUICK_FORM, TANH_FORM};
use crate::shaders::params::{
    AddParams, ClipParams, GegluParams, GeluParams, ReluParams, ScaleParams, SigmoidGateParams, SiluParams,
    SwigluParams,
};

/// Elements that a thread takes at a time.
const CHUNK: usize = 1 << 12;
/// Operations in an exponential.
pub(super) const EXP_OPS: usize = 16;

pub(crate) fn add(mut call: Call<'_>) {
    let params: AddParams = call.params();
    let [x, y] = call.operands();
    let x = &x.get::<f32>()[..params.x_len as usize];
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..params.len as usize], CHUNK, params.len as usize, |i, y| {
        let x = x.iter().cycle().skip(i * CHUNK % x.len().max(1));
        y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
    });
}

pub(crate) fn scale(mut call: Call<'_>) {
    let params: ScaleParams = call.params();
    let [x, y] = call.operands();
    let x = x.get::<f32>();
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..params.len as usize], CHUNK, params.len as usize, |i, y| {
        y.iter_mut().zip(&x[i * CHUNK..]).for_each(|(y, x)| *y = params.factor * x);
        if params.cap > 0.0 {
            let scaled: Vec<f32> = y.iter().map(|x| x / params.cap).collect();
            simd::run_wide(Map { function: Tanh, x: &scaled, y: &mut *y });
            y.iter_mut().for_each(|y| *y *= params.cap);
        }
    });
}

/// The tanh formula.
pub(super) struct GeluTanh;

impl Function for GeluTanh {
    #[inline(always)]
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X {
        // 1 + tanh(u) = 2 / (1 + exp(-2 u)), which does not overflow where tanh itself might.
        let u = X::splat(0.797_884_6) * (x + X::splat(0.044_715) * x * x * x);
        x / (X::splat(1.0) + exp::<I, X>(X::splat(-2.0) * u))
    }
}

/// By a sigmoid.
pub(super) struct GeluQuick;

impl Function for GeluQuick {
    #[inline(always)]
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X {
        x / (X::splat(1.0) + exp::<I, X>(X::splat(-1.702) * x))
    }
}

/// The hyperbolic tangent.
pub(super) struct Tanh;

impl Function for Tanh {
    #[inline(always)]
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X {
        // By an exponential whose overflow does no harm.
        let [one, two] = [X::splat(1.0), X::splat(2.0)];
        one - two / (one + exp::<I, X>(two * x))
    }
}

/// By the error function.
pub(super) struct GeluExact;

impl Function for GeluExact {
    #[inline(always)]
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X {
        let magnitude = x.abs() * X::splat(std::f32::consts::FRAC_1_SQRT_2);
        let tail = X::splat(0.5) * erfc_positive::<I, X>(magnitude.at_most(10.0));
        x * x.if_below(0.0, tail, X::splat(1.0) - tail)
    }
}

/// `1 - erf(a)` for `a` from 0 on, with the Chebyshev fit of `shaders/gelu.wgsl`.
#[inline(always)]
fn erfc_positive<I: Instructions, X: Numbers>(a: X) -> X {
    const FIT: [f32; 9] = [
        1.000_023_7,
        0.374_091_96,
        0.096_784_18,
        -0.186_288_06,
        0.278_868_07,
        -1.135_204,
        1.488_515_9,
        -0.822_152_2,
        0.170_872_77,
    ];
    let one = X::splat(1.0);
    let t = one / (one + X::splat(0.5) * a);
    let p = polynomial::<I, X, 9>(t, FIT);
    t * exp::<I, X>((-a).fma::<I>(a, t.fma::<I>(p, X::splat(-1.265_512_2))))
}

pub(crate) fn gelu(mut call: Call<'_>) {
    let params: GeluParams = call.params();
    let [x, y] = call.operands();
    let (len, x) = (params.len as usize, x.get::<f32>());
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], CHUNK, len * EXP_OPS, |i, y| {
        let x = &x[i * CHUNK..];
        match params.form {
            TANH_FORM => simd::run_wide(Map { function: GeluTanh, x, y }),
            QUICK_FORM => simd::run_wide(Map { function: GeluQuick, x, y }),
            _ => simd::run_wide(Map { function: GeluExact, x, y }),
        }
    });
}

/// `x / (1 + e^-x)`.
pub(super) struct Silu;

impl Function for Silu {
    #[inline(always)]
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X {
        x / (X::splat(1.0) + exp::<I, X>(-x))
    }
}

pub(crate) fn silu(mut call: Call<'_>) {
    let params: SiluParams = call.params();
    let [x, y] = call.operands();
    let (len, x) = (params.len as usize, x.get::<f32>());
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], CHUNK, len * EXP_OPS, |i, y| {
        simd::run_wide(Map { function: Silu, x: &x[i * CHUNK..], y });
    });
}

pub(crate) fn swiglu(call: Call<'_>) {
    let SwigluParams { n_tokens, ffn_dim } = call.params();
    let kind = call.gate();
    gated(call, [n_tokens, ffn_dim], |gate, up, y| gated_by(kind, gate, up, y));
}

pub(crate) fn geglu(call: Call<'_>) {
    let GegluParams { n_tokens, ffn_dim, form } = call.params();
    match form {
        TANH_FORM => gated(call, [n_tokens, ffn_dim], |gate, up, y| gated_row(GeluTanh, gate, up, y)),
        QUICK_FORM => gated(call, [n_tokens, ffn_dim], |gate, up, y| gated_row(GeluQuick, gate, up, y)),
        _ => gated(call, [n_tokens, ffn_dim], |gate, up, y| gated_row(GeluExact, gate, up, y)),
    }
}

fn gated(mut call: Call<'_>, sizes: [u32; 2], row: impl Fn(&[f32], &[f32], &mut [f32]) + Sync + Send) {
    let [n_tokens, dim] = sizes.map(|n| n as usize);
    let [gate_up, y] = call.operands();
    let gate_up = gate_up.get::<f32>();
    let y = &mut y.get_mut::<f32>()[..n_tokens * dim];
    threads::for_each_chunk(y, dim, n_tokens * dim * EXP_OPS, |t, y| {
        let (gate, up) = gate_up[t * 2 * dim..][..2 * dim].split_at(dim);
        row(gate, up, y);
    });
}

pub(crate) fn relu(mut call: Call<'_>) {
    let params: ReluParams = call.params();
    let [x, y] = call.operands();
    let len = params.len as usize;
    let rectified = x.get::<f32>().iter().map(|x| x.max(0.0));
    let pairs = y.get_mut::<f32>()[..len].iter_mut().zip(rectified);
    match params.is_squared {
        0 => pairs.for_each(|(y, x)| *y = x),
        _ => pairs.for_each(|(y, x)| *y = x * x),
    }
}

pub(crate) fn clip(mut call: Call<'_>) {
    let params: ClipParams = call.params();
    let [bounds, x, y] = call.operands();
    let (bounds, width, len) = (bounds.get::<f32>(), params.width as usize, params.len as usize);
    let [second, third] = [params.second, params.third].map(|first| first as usize);
    for (y, x) in y.get_mut::<f32>()[..len].chunks_exact_mut(width).zip(x.get::<f32>().chunks_exact(width)) {
        for (column, (y, x)) in y.iter_mut().zip(x).enumerate() {
            let group = usize::from(column >= second) + usize::from(column >= third);
            *y = x.max(bounds[2 * group]).min(bounds[2 * group + 1]);
        }
    }
}

pub(crate) fn sigmoid_gate(mut call: Call<'_>) {
    let params: SigmoidGateParams = call.params();
    let [gates, y] = call.operands();
    let (dim, stride, start) = (params.dim as usize, params.gate_stride as usize, params.gate_start as usize);
    let (size, gates) = (params.size as usize, gates.get::<f32>());
    let len = params.n_rows as usize * dim;
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], dim, len * EXP_OPS, |t, y| {
        for (i, y) in y.iter_mut().enumerate() {
            let gate = gates[t * stride + start + i / size];
            *y *= if params.plain != 0 { gate } else { 1.0 / (1.0 + (-gate).exp()) };
        }
    });
}

/// `y = function(gate) * up`.
pub(super) fn gated_row(function: impl Function, gate: &[f32], up: &[f32], y: &mut [f32]) {
    simd::run_wide(Map { function, x: gate, y: &mut *y });
    y.iter_mut().zip(up).for_each(|(y, up)| *y *= up);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Operand;

    /// `erf` by its series around zero and `erfc` by its continued fraction further out, both in f64.
    fn gelu_f64(x: f64) -> f64 {
        let a = x.abs() / std::f64::consts::SQRT_2;
        let erfc = if a < 2.0 {
            let terms = (0..80).scan(a, |term, n| {
                let current = *term / f64::from(2 * n + 1);
                *term *= -a * a / f64::from(n + 1);
                Some(current)
            });
            1.0 - terms.sum::<f64>() * std::f64::consts::FRAC_2_SQRT_PI
        } else {
            let fraction = (1..=60).rev().fold(a, |fraction, n| a + f64::from(n) / 2.0 / fraction);
            (-a * a).exp() / fraction / std::f64::consts::PI.sqrt()
        };
        if x > 0.0 { x * (1.0 - erfc / 2.0) } else { x * erfc / 2.0 }
    }

    #[test]
    fn gelu_agrees_with_f64() {
        let x: Vec<f32> = (-1000..=1000).map(|i| i as f32 * 0.013).collect();
        let mut y = vec![0.0f32; x.len()];
        for form in [0, TANH_FORM, QUICK_FORM] {
            let params = GeluParams { len: x.len() as u32, form };
            gelu(Call {
                params: bytemuck::bytes_of(&params),
                constants: &[],
                weight: None,
                rounds: false,
                batch_invariance: Default::default(),
                panels: None,
                operands: vec![
                    Operand::Read(bytemuck::cast_slice(&x)),
                    Operand::Write(bytemuck::cast_slice_mut(&mut y)),
                ],
            });
            for (&x, &found) in x.iter().zip(&y) {
                let x = f64::from(x);
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                let want = match form {
                    0 => gelu_f64(x),
                    TANH_FORM => x / 2.0 * (1.0 + u.tanh()),
                    _ => x / (1.0 + (-1.702 * x).exp()),
                };
                let error = (f64::from(found) - want).abs();
                assert!(error < 1e-7 * (1.0 + 2.0 * x.abs()), "gelu({x}) is {want}, found {found}");
            }
        }
    }
}
