//! `rms_norm` and `layer_norm`.

use tilewright::kernels;

use crate::common::Expected;
use crate::harness::{Case, FLUSH, Job, Operand, ROUND, sum_rounding};
use crate::inputs::{Inputs, Source};

/// C, around the workgroup of 256 and subgroups of any size.
pub const WIDTHS: [u32; 19] = [1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097];

/// A place in [`WIDTHS`], the width there, and T: few rows, and enough for the `scalar` tier to take them one by one.
pub fn widths_and_heights() -> impl Iterator<Item = (usize, u32, u32)> {
    let widths = WIDTHS.into_iter().enumerate();
    widths.flat_map(|(i, dim)| [1 + i as u32 % 3, [4, 7, 8, 9, 17][i % 5]].map(|height| (i, dim, height)))
}

const NMSE: f64 = 1e-9;

pub fn cases(cases: &mut Vec<Case>) {
    for inputs in Inputs::ALL {
        for (i, dim, n_tokens) in widths_and_heights() {
            let eps = [1e-5, 1e-6, 1e-12][i % 3];
            let sizes = format!("t={n_tokens},c={dim},eps={eps:e}");
            cases.push(Case {
                kernel: "rms_norm",
                variant: "F32".into(),
                sizes: sizes.clone(),
                inputs,
                build: Box::new(move |source| rms_norm(source, n_tokens, dim, eps)),
            });
            cases.push(Case {
                kernel: "layer_norm",
                variant: "F32".into(),
                sizes,
                inputs,
                build: Box::new(move |source| layer_norm(source, n_tokens, dim, eps)),
            });
        }
    }
    for n_tokens in [257, 4097] {
        cases.push(Case {
            kernel: "rms_norm",
            variant: "F32".into(),
            sizes: format!("t={n_tokens},c=5"),
            inputs: Inputs::Normal,
            build: Box::new(move |source| rms_norm(source, n_tokens, 5, 1e-5)),
        });
    }
}

fn rms_norm(source: &mut Source, n_tokens: u32, dim: u32, eps: f32) -> Job {
    let (x, weight) = (source.rows(n_tokens, dim), source.normal(dim));
    let rounding = sum_rounding(dim as usize);
    let mut want = Vec::with_capacity(x.len());
    for row in x.chunks_exact(dim as usize) {
        let mean_sq = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / f64::from(dim);
        let gain = 1.0 / (mean_sq + f64::from(eps)).sqrt();
        want.extend(row.iter().zip(&weight).map(|(&x, &w)| {
            let value = f64::from(x) * gain * f64::from(w);
            let floor = FLUSH * (1.0 + (1.0 + gain) * (1.0 + f64::from(w).abs()));
            Expected::new(value, rounding * value.abs(), floor)
        }));
    }
    let operands = vec![
        Operand::floats("x", &[n_tokens, dim], x),
        Operand::floats("weight", &[dim], weight),
        Operand::close("y", &[n_tokens, dim], want, NMSE),
    ];
    Job::new(operands, move |rec, bound| kernels::rms_norm(rec, bound.tensor(0), bound.tensor(1), bound.tensor(2), eps))
}

fn layer_norm(source: &mut Source, n_tokens: u32, dim: u32, eps: f32) -> Job {
    let x = source.rows(n_tokens, dim);
    let (weight, bias) = (source.normal(dim), source.normal(dim));
    let rounding = sum_rounding(dim as usize);
    let mean_of = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / f64::from(dim);
    let mut want = Vec::with_capacity(x.len());
    for row in x.chunks_exact(dim as usize) {
        let row: Vec<f64> = row.iter().map(|&v| f64::from(v)).collect();
        let mean = mean_of(&mut row.iter().copied());
        let variance = mean_of(&mut row.iter().map(|v| (v - mean).powi(2)));
        let gain = 1.0 / (variance + f64::from(eps)).sqrt();
        // The mean is found to within its sum's rounding, relative to how far elements lie apart.
        let spread = mean_of(&mut row.iter().map(|v| (v - row[0]).abs()));
        for (c, value) in row.iter().enumerate() {
            let (w, b) = (f64::from(weight[c]), f64::from(bias[c]));
            let scaled = (value - mean) * gain * w;
            let shift = rounding * spread + 2.0 * ROUND * (value - row[0]).abs();
            let bound = shift * gain * w.abs() + 2.0 * rounding * scaled.abs() + 2.0 * ROUND * b.abs();
            let floor = FLUSH * (1.0 + (3.0 + gain) * (1.0 + w.abs()));
            want.push(Expected::new(scaled + b, bound, floor));
        }
    }
    let operands = vec![
        Operand::floats("x", &[n_tokens, dim], x),
        Operand::floats("weight", &[dim], weight),
        Operand::floats("bias", &[dim], bias),
        Operand::close("y", &[n_tokens, dim], want, NMSE),
    ];
    Job::new(operands, move |rec, bound| {
        kernels::layer_norm(rec, bound.tensor(0), bound.tensor(1), bound.tensor(2), bound.tensor(3), eps)
    })
}
