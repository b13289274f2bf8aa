//! `softmax`.

use tilewright::kernels;

use crate::common::Expected;
use crate::harness::{Case, FLUSH, Job, Operand, ROUND, sum_rounding};
use crate::inputs::{Inputs, Source};
use crate::norm::widths_and_heights;

pub fn cases(cases: &mut Vec<Case>) {
    let mut push = |inputs, n_rows: u32, dim: u32| {
        cases.push(Case {
            kernel: "softmax",
            variant: "F32".into(),
            sizes: format!("r={n_rows},c={dim}"),
            inputs,
            build: Box::new(move |source| softmax(source, n_rows, dim)),
        });
    };
    for inputs in Inputs::ALL {
        for (_, dim, n_rows) in widths_and_heights() {
            push(inputs, n_rows, dim);
        }
    }
    // More rows than workgroups per dimension, and a vocabulary.
    push(Inputs::Normal, 65_537, 3);
    push(Inputs::Student, 2, 151_936);
    push(Inputs::Constant, 8, 151_936);
    push(Inputs::Uniform, 9, 15_359);
    push(Inputs::Uniform, 9, 15_361);
}

/// Relative error that WGSL permits for `exp`, plus that of rounding its argument.
pub fn exp_rounding(argument: f64) -> f64 {
    2.0 * ROUND * (3.0 + 2.0 * argument.abs()) + ROUND * argument.abs()
}

fn softmax(source: &mut Source, n_rows: u32, dim: u32) -> Job {
    source.mask = -1e30;
    let x = source.rows(n_rows, dim);
    let mut want = Vec::with_capacity(x.len());
    for row in x.chunks_exact(dim as usize) {
        let highest = row.iter().copied().fold(f32::MIN, f32::max);
        let below: Vec<f64> = row.iter().map(|&v| f64::from(v) - f64::from(highest)).collect();
        let sum: f64 = below.iter().map(|d| d.exp()).sum();
        // Each term's relative error, weighted by the term.
        let sum_error = below.iter().map(|d| d.exp() * exp_rounding(*d)).sum::<f64>() / sum;
        want.extend(below.iter().map(|d| {
            let value = d.exp() / sum;
            let relative = exp_rounding(*d) + sum_error + sum_rounding(dim as usize) + 4.0 * ROUND;
            Expected::new(value, relative * value, 2.0 * FLUSH)
        }));
    }
    let operands = vec![Operand::floats("x", &[n_rows, dim], x), Operand::close("y", &[n_rows, dim], want, 1e-9)];
    Job::new(operands, |rec, bound| kernels::softmax(rec, bound.tensor(0), bound.tensor(1)))
}
