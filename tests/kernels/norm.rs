//! `rms_norm`, `layer_norm` and `linear_norm`.

#[cfg(not(target_arch = "wasm32"))]
use tilewright::Tier;
use tilewright::WeightType;
use tilewright::kernels::{self, LayerNorm, Linear};

use crate::common::Expected;
#[cfg(not(target_arch = "wasm32"))]
use crate::common::{self, shared};
use crate::harness::{Case, Data, FLUSH, Job, Operand, ROUND, Want, sum_rounding};
use crate::inputs::{Inputs, Source, dequantise, has_case};
use crate::linear::{Rows, product};

/// C, around the workgroup of 256 and subgroups of any size.
pub const WIDTHS: [u32; 19] = [1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097];

/// An index in [`WIDTHS`], its width, and T: few rows, and enough for the `scalar` tier to handle them one by one.
pub fn widths_and_heights() -> impl Iterator<Item = (usize, u32, u32)> {
    let widths = WIDTHS.into_iter().enumerate();
    widths.flat_map(|(i, dim)| [1 + i as u32 % 3, [4, 7, 8, 9, 17][i % 5]].map(|height| (i, dim, height)))
}

/// M, N, K: a workgroup handles 16 rows, and 256 columns at a time, up to 1024; rows of whole quads and others.
const LINEAR_NORM: [[u32; 3]; 10] = [
    [1, 1, 1],
    [3, 5, 33],
    [16, 64, 32],
    [17, 260, 36],
    [5, 256, 64],
    [33, 384, 132],
    [2, 1024, 96],
    [9, 1025, 64],
    [18, 130, 70],
    [31, 12, 260],
];

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
                build: Box::new(move |source| rms_norm(source, n_tokens, dim, eps, [i % 3 == 1, i % 6 == 1])),
            });
            let has_bias = i % 4 != 3;
            cases.push(Case {
                kernel: "layer_norm",
                variant: if has_bias { "F32+bias".into() } else { "F32".into() },
                sizes,
                inputs,
                build: Box::new(move |source| layer_norm(source, n_tokens, dim, eps, has_bias)),
            });
        }
    }
    for weight in WeightType::ALL {
        // Two of the sizes for other types: in the scalar tier each number of columns is a separate pipeline.
        let few = |i: usize| weight == WeightType::F32 || (i % 6 == 3 && has_case(weight, i / 6, 2));
        for (i, sizes @ [m, n, k]) in LINEAR_NORM.into_iter().enumerate().filter(|&(i, _)| few(i)) {
            // Bias, accumulation, bias of the norm.
            let flags = (i + 3) % 8;
            cases.push(Case {
                kernel: "linear_norm",
                variant: format!("{weight}+{flags}"),
                sizes: format!("t={m},n={n},k={k}"),
                inputs: [Inputs::Normal, Inputs::Student, Inputs::Channel1e3, Inputs::Repeated, Inputs::Zeros][i % 5],
                build: Box::new(move |source| linear_norm(source, weight, flags, sizes)),
            });
        }
    }
    for n_tokens in [257, 4097] {
        cases.push(Case {
            kernel: "rms_norm",
            variant: "F32".into(),
            sizes: format!("t={n_tokens},c=5"),
            inputs: Inputs::Normal,
            build: Box::new(move |source| rms_norm(source, n_tokens, 5, 1e-5, [false; 2])),
        });
    }
}

/// One row after the norm.
pub fn rms_normed(row: &[f32], weight: &[f32], eps: f32) -> Vec<Expected> {
    let rounding = sum_rounding(row.len());
    let mean_sq = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / row.len() as f64;
    let gain = 1.0 / (mean_sq + f64::from(eps)).sqrt();
    let element = |(&x, &w): (&f32, &f32)| {
        let value = f64::from(x) * gain * f64::from(w);
        let floor = FLUSH * (1.0 + (1.0 + gain) * (1.0 + f64::from(w).abs()));
        Expected::new(value, rounding * value.abs(), floor)
    };
    row.iter().zip(weight).map(element).collect()
}

/// With `adds`, accumulates into `y`, and with a factor of the sum.
fn rms_norm(source: &mut Source, n_tokens: u32, dim: u32, eps: f32, [adds, has_factor]: [bool; 2]) -> Job {
    let (x, weight) = (source.rows(n_tokens, dim), source.normal(dim));
    let held = source.normal(n_tokens * dim);
    let factor = source.normal(1);
    let gain = if has_factor { f64::from(factor[0]) } else { 1.0 };
    let normed = x.chunks_exact(dim as usize).flat_map(|row| rms_normed(row, &weight, eps));
    let want = normed.zip(&held).map(|(normed, &held)| match adds {
        true => {
            let held = f64::from(held);
            let bound = normed.bound + 2.0 * ROUND * (normed.value.abs() + held.abs());
            let (value, power) = ((normed.value + held) * gain, (normed.power + held * held) * gain * gain);
            let bound = bound * gain.abs() + ROUND * value.abs();
            Expected { value, bound, floor: (normed.floor + FLUSH) * (1.0 + gain.abs()), power }
        }
        false => normed,
    });
    let y = match adds {
        true => Operand::floats("y", &[n_tokens, dim], held.clone()).becomes(Want::Close(want.collect(), NMSE)),
        false => Operand::close("y", &[n_tokens, dim], want.collect(), NMSE),
    };
    let operands = vec![
        Operand::floats("x", &[n_tokens, dim], x),
        Operand::floats("weight", &[dim], weight),
        Operand::floats("factor", &[1], factor),
        y,
    ];
    Job::new(operands, move |rec, bound| {
        let [x, weight, factor, y] = [0, 1, 2, 3].map(|i| bound.tensor(i));
        match adds {
            true => kernels::add_rms_norm(rec, x, weight, has_factor.then_some(factor), y, eps),
            false => kernels::rms_norm(rec, x, weight, y, eps),
        }
    })
}

fn layer_norm(source: &mut Source, n_tokens: u32, dim: u32, eps: f32, has_bias: bool) -> Job {
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
        // The mean's error is its sum's rounding, relative to the elements' spread.
        let spread = mean_of(&mut row.iter().map(|v| (v - row[0]).abs()));
        for (c, value) in row.iter().enumerate() {
            let (w, b) = (f64::from(weight[c]), if has_bias { f64::from(bias[c]) } else { 0.0 });
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
        let norm = LayerNorm { weight: bound.tensor(1), bias: has_bias.then_some(bound.tensor(2)), eps };
        kernels::layer_norm(rec, bound.tensor(0), &norm, bound.tensor(3))
    })
}

fn linear_norm(source: &mut Source, weight: WeightType, flags: usize, [m, n, k]: [u32; 3]) -> Job {
    const EPS: f32 = 1e-12;
    let (has_bias, accumulate, has_shift) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
    let (x, held) = (source.rows(m, k), source.rows(m, n));
    let (bias, gain, shift) = (source.normal(n), source.normal(n), source.normal(n));
    let term = |(i, &held): (usize, &f32)| {
        let of = |is: bool, value: f32| if is { f64::from(value) } else { 0.0 };
        [of(accumulate, held), of(has_bias, bias[i % n as usize])]
    };
    let more: Vec<[f64; 2]> = held.iter().enumerate().map(term).collect();
    let sizes = [m as usize, n as usize, k as usize];
    // Sums whose squares overflow f32 have no norm.
    let (bytes, sums) = loop {
        let bytes = source.weights(weight, n, k);
        let rows = Rows::plain(&x, k as usize);
        let sums = product(source, &rows, &dequantise(weight, &bytes, k), &more, sizes);
        if sums.iter().all(|sum| sum.value.abs() < 1e15) {
            break (bytes, sums);
        }
    };
    let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / f64::from(n);
    let rounding = sum_rounding(n as usize);
    let mut want = Vec::with_capacity(sums.len());
    for row in sums.chunks_exact(n as usize) {
        let centre = mean(&mut row.iter().map(|s| s.value));
        let scale = 1.0 / (mean(&mut row.iter().map(|s| (s.value - centre).powi(2))) + f64::from(EPS)).sqrt();
        let z = |s: &Expected| (s.value - centre) * scale;
        // Errors of the element, the mean and the variance.
        let error = |s: &Expected, of: fn(&Expected) -> f64| {
            let of_mean = mean(&mut row.iter().map(of));
            of(s) + of_mean + z(s).abs() * mean(&mut row.iter().map(|s| z(s).abs() * of(s)))
        };
        let spread = mean(&mut row.iter().map(|s| (s.value - row[0].value).abs()));
        for (c, s) in row.iter().enumerate() {
            let w = f64::from(gain[c]);
            let b = if has_shift { f64::from(shift[c]) } else { 0.0 };
            let value = z(s) * w + b;
            let shifted = rounding * spread + 2.0 * ROUND * (s.value - row[0].value).abs();
            let bound = (error(s, |s| s.bound) + shifted) * scale * w.abs()
                + 2.0 * rounding * (z(s) * w).abs()
                + 2.0 * ROUND * b.abs();
            let floor = error(s, |s| s.floor) * scale * w.abs() + FLUSH * (1.0 + (3.0 + scale) * (1.0 + w.abs()));
            want.push(Expected { value, bound, floor, power: (value * value).max(s.power * (scale * w).powi(2)) });
        }
    }
    let mut y = Operand::close("y", &[m, n], want, NMSE);
    if accumulate {
        y.data = Data::Floats(held);
    }
    let operands = vec![
        Operand::weights(weight, &[n, k], bytes),
        Operand::floats("bias", &[n], bias),
        Operand::floats("x", &[m, k], x),
        Operand::floats("weight", &[n], gain),
        Operand::floats("shift", &[n], shift),
        y,
    ];
    Job::new(operands, move |rec, bound| {
        let bias = has_bias.then_some(bound.tensor(1));
        let linear = Linear { bias, accumulate, ..Linear::new(bound.matrix(0)) };
        let norm = LayerNorm { weight: bound.tensor(3), bias: has_shift.then_some(bound.tensor(4)), eps: EPS };
        kernels::linear_norm(rec, &linear, &norm, bound.tensor(2), bound.tensor(5))
    })
}

/// On a GPU, a row of `linear_norm` is bit-identical for any number and position of rows.
#[cfg(not(target_arch = "wasm32"))]
#[test]
fn linear_norm_rows_do_not_depend_on_their_batch() {
    use tilewright::{DType, Matrix, Role, Tensor, Workspace};
    let [n, k] = [100, 260];
    for device in shared::gpus([Tier::Baseline, Tier::Scalar]) {
        for weight in [WeightType::F32, WeightType::Q8_0, WeightType::Q4_K] {
            let mut source = Source::new(Inputs::Normal, 3, false);
            let (row, held) = (source.rows(1, k), source.rows(1, n));
            let w = Matrix::declare(&device.target(), "w", weight, n, k).expect("valid");
            w.upload(&device, &[&source.weights(weight, n, k)]).expect("whole rows");
            let gain = device.upload("weight", &[n], &source.normal(n)).expect("a tensor");
            let mut first: Option<Vec<f32>> = None;
            for (t, at) in [(1, 0), (2, 1), (11, 4), (12, 11), (16, 3), (40, 39), (130, 64)] {
                let (mut x, mut before) = (source.rows(t, k), source.rows(t, n));
                x[(at * k) as usize..][..k as usize].copy_from_slice(&row);
                before[(at * n) as usize..][..n as usize].copy_from_slice(&held);
                let x = device.upload("x", &[t, k], &x).expect("a tensor");
                let y = Tensor::declare("y", Role::Activations, &[t, n], DType::F32).expect("valid");
                device.write(&y, 0, &before).expect("equal lengths");
                let mut rec = device.recorder();
                let linear = Linear { accumulate: true, ..Linear::new(&w) };
                let norm = LayerNorm { weight: &gain, bias: None, eps: 1e-12 };
                kernels::linear_norm(&mut rec, &linear, &norm, &x, &y).expect("the shapes fit");
                device.run(&rec.finish(&mut Workspace::default())).expect("the recording runs");
                let y: Vec<f32> = common::block_on(device.read(&y)).expect("the result is readable");
                let found = y[(at * n) as usize..][..n as usize].to_vec();
                let first = first.get_or_insert_with(|| found.clone());
                assert_eq!(*first, found, "{weight}, row {at} of {t} on {:?}", device.info().name);
            }
        }
    }
}
