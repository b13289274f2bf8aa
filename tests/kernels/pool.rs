//! `pool`.

use tilewright::kernels::{self, Pooling};

use crate::common::Expected;
use crate::harness::{Case, FLUSH, Job, Operand, Want, sum_rounding};
use crate::inputs::{Inputs, Source};

/// C, and the lengths of sequences: around a run of 64 rows, one long, and an empty one.
const SIZES: [(u32, &[u32]); 7] = [
    (1, &[1]),
    (3, &[2, 0, 1]),
    (31, &[63, 5]),
    (64, &[64, 65, 3, 0]),
    (257, &[1, 129]),
    (1028, &[7, 2]),
    (36, &[3, 8192]),
];

pub fn cases(cases: &mut Vec<Case>) {
    for inputs in [Inputs::Normal, Inputs::Channel1e5, Inputs::Subnormal, Inputs::Zeros, Inputs::Constant] {
        for (i, (dim, lengths)) in SIZES.into_iter().enumerate() {
            let (pooling, normalise) = (Pooling::ALL[i % 3], i % 2 == 0);
            // The mean has both.
            for normalise in if pooling == Pooling::Mean { vec![false, true] } else { vec![normalise] } {
                cases.push(Case {
                    kernel: "pool",
                    variant: format!("{}{}", pooling.name(), if normalise { "+norm" } else { "" }),
                    sizes: format!("c={dim},lengths={lengths:?}"),
                    inputs,
                    build: Box::new(move |source| pool(source, pooling, normalise, dim, lengths)),
                });
            }
        }
        cases.push(Case {
            kernel: "pool",
            variant: "mean+norm+moved".into(),
            sizes: "c=132".into(),
            inputs,
            build: Box::new(moved),
        });
    }
}

/// Divides a row known within bounds by its norm.
fn normalised(row: &mut [Expected]) {
    let rounding = sum_rounding(row.len());
    let norm = row.iter().map(|e| e.value * e.value).sum::<f64>().sqrt();
    let off = row.iter().map(|e| e.bound * e.bound).sum::<f64>().sqrt();
    let flushed = row.iter().map(|e| (e.floor + FLUSH).powi(2)).sum::<f64>().sqrt();
    // Squares below the smallest normal number are flushed, and with them a norm of up to its root.
    let lost = (row.len() as f64 * FLUSH).sqrt();
    let scale = norm.max(1e-12);
    for e in row {
        let value = e.value / scale;
        e.bound = e.bound / scale + value.abs() * (off / scale + rounding);
        e.floor = (e.floor + FLUSH) * (1.0 + 1.0 / scale) + value.abs() * (flushed + lost) / scale;
        e.power = (e.power / (scale * scale)).max(value * value);
        e.value = value;
    }
}

fn pool(source: &mut Source, pooling: Pooling, normalise: bool, dim: u32, lengths: &[u32]) -> Job {
    // Rows between sequences are unused.
    let mut spans = Vec::new();
    let mut n_rows = 0;
    for &length in lengths {
        n_rows += source.rng.below(3) as u32;
        spans.extend([n_rows, n_rows + length]);
        n_rows += length;
    }
    let x = source.rows(n_rows.max(1), dim);
    let mut want = Vec::new();
    for span in spans.chunks_exact(2) {
        let of = match pooling {
            _ if span[0] == span[1] => 0..0,
            Pooling::Mean => span[0]..span[1],
            Pooling::Cls => span[0]..span[0] + 1,
            Pooling::Last => span[1] - 1..span[1],
        };
        let n = of.len().max(1) as f64;
        let mut row: Vec<Expected> = (0..dim)
            .map(|c| {
                let terms = || of.clone().map(|r| f64::from(x[(r * dim + c) as usize]) / n);
                let (value, magnitude) = (terms().sum(), terms().map(f64::abs).sum::<f64>());
                let rounding = if pooling == Pooling::Mean { sum_rounding(of.len()) } else { 0.0 };
                let power = terms().map(|x| x * x).sum::<f64>().max(f64::powi(value, 2));
                Expected { power, ..Expected::new(value, rounding * magnitude, 2.0 * FLUSH) }
            })
            .collect();
        if normalise {
            normalised(&mut row);
        }
        want.extend(row);
    }
    let n_spans = lengths.len() as u32;
    let operands = vec![
        Operand::words("spans", &[n_spans, 2], spans),
        Operand::floats("x", &[n_rows.max(1), dim], x),
        Operand::close("y", &[n_spans, dim], want, 1e-10),
    ];
    Job::new(operands, move |rec, bound| {
        kernels::pool(rec, pooling, normalise, bound.tensor(0), bound.tensor(1), bound.tensor(2))
    })
}

/// The same rows at several places of a batch give the same bits.
fn moved(source: &mut Source) -> Job {
    const DIM: u32 = 132;
    let rows = source.rows(100, DIM);
    let others = source.rows(1, DIM);
    let x: Vec<f32> = [&rows[..], &others, &rows, &rows[..50 * DIM as usize], &rows].concat();
    let spans = vec![0, 100, 101, 201, 251, 351];
    let check = |words: &[u32]| {
        let row = &words[..DIM as usize];
        let is_right = words.chunks_exact(DIM as usize).all(|other| other == row);
        let is_finite = row.iter().all(|&bits| f32::from_bits(bits).is_finite());
        if is_right && is_finite { Ok(()) } else { Err("rows differ by where they lie".to_string()) }
    };
    let operands = vec![
        Operand::words("spans", &[3, 2], spans),
        Operand::floats("x", &[351, DIM], x),
        Operand::close("y", &[3, DIM], Vec::new(), 0.0).becomes(Want::Check(Box::new(check))),
    ];
    Job::new(operands, |rec, bound| {
        kernels::pool(rec, Pooling::Mean, true, bound.tensor(0), bound.tensor(1), bound.tensor(2))
    })
}
