//! `attention`.

use tilewright::kernels::{self, AttentionConfig};

use crate::common::Expected;
use crate::harness::{Case, FLUSH, Job, Operand, ROUND, sum_rounding};
use crate::inputs::{Inputs, Source};
use crate::softmax::exp_rounding;

/// T, H, Hkv, D, pos, window (0: none): keys are walked in tiles of 64.
const SIZES: [[u32; 6]; 22] = [
    [1, 1, 1, 4, 0, 0],
    [2, 1, 1, 8, 0, 0],
    [3, 2, 1, 16, 1, 0],
    [1, 2, 2, 32, 30, 0],
    [1, 4, 1, 36, 31, 0],
    [2, 3, 3, 40, 32, 0],
    [1, 8, 4, 64, 62, 0],
    [2, 4, 2, 64, 62, 0],
    [1, 16, 1, 64, 64, 0],
    [3, 2, 1, 80, 126, 0],
    [1, 4, 2, 128, 127, 0],
    [1, 3, 1, 128, 128, 0],
    [2, 1, 1, 252, 20, 0],
    [1, 2, 1, 256, 255, 0],
    [1, 2, 1, 256, 256, 0],
    [65, 2, 1, 16, 0, 0],
    [1, 1, 1, 16, 999, 0],
    [5, 2, 1, 32, 0, 1],
    [9, 2, 1, 32, 3, 8],
    [2, 2, 2, 64, 100, 63],
    [2, 2, 1, 64, 100, 64],
    [3, 4, 2, 32, 200, 65],
];

pub fn cases(cases: &mut Vec<Case>) {
    let mut push = |inputs, sizes: [u32; 6]| {
        let [t, h, hkv, d, pos, window] = sizes;
        cases.push(Case {
            kernel: "attention",
            variant: if window == 0 { "causal" } else { "window" }.into(),
            sizes: format!("t={t},h={h},hkv={hkv},d={d},pos={pos},window={window}"),
            inputs,
            build: Box::new(move |source| attention(source, sizes)),
        });
    };
    for inputs in Inputs::ALL {
        SIZES.into_iter().for_each(|sizes| push(inputs, sizes));
    }
    push(Inputs::Normal, [1, 1, 1, 8, 4096, 0]);
    push(Inputs::Repeated, [1, 1, 1, 8, 4096, 0]);
}

fn attention(source: &mut Source, [t, h, hkv, d, pos, window]: [u32; 6]) -> Job {
    // Rows past the last key are never to be read: they hold NaN.
    let capacity = pos + t + 3;
    let q = source.rows(t, h * d);
    let cache = |source: &mut Source| {
        let mut rows = source.rows(hkv * capacity, d);
        for (i, row) in rows.chunks_exact_mut(d as usize).enumerate() {
            if i as u32 % capacity >= pos + t {
                row.fill(f32::NAN);
            }
        }
        rows
    };
    let (k, v) = (cache(source), cache(source));

    let dim = d as usize;
    let row = |cache: &'_ [f32], group: u32, s: u32| -> Vec<f64> {
        let at = (group * capacity + s) as usize * dim;
        cache[at..at + dim].iter().map(|&v| f64::from(v)).collect()
    };
    let terms = |query: &[f32], key: &[f64]| -> (f64, f64) {
        let terms = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * k);
        terms.fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
    };
    // One pass over all visible pairs finds the largest score. Scores beyond a few dozen turn softmax into a choice
    // that their last digit decides, in any arithmetic: the factor keeps them in that range.
    let visible = |token: u32| {
        let end = pos + token + 1;
        if window == 0 { 0..end } else { end.saturating_sub(window)..end }
    };
    let group = |head: u32| head / (h / hkv);
    let mut scores = Vec::new();
    let mut largest = 0.0f64;
    for (i, query) in q.chunks_exact(dim).enumerate() {
        let (token, head) = (i as u32 / h, i as u32 % h);
        let of_query: Vec<_> = visible(token).map(|s| terms(query, &row(&k, group(head), s))).collect();
        largest = of_query.iter().map(|(score, _)| score.abs()).fold(largest, f64::max);
        scores.push(of_query);
    }
    let usual = f64::from(d).powf(-0.5);
    let scale = if largest * usual > 20.0 { 20.0 / largest } else { usual } as f32;

    let mut want = Vec::with_capacity(q.len());
    for (i, of_query) in scores.iter().enumerate() {
        let (token, head) = (i as u32 / h, i as u32 % h);
        let factor = f64::from(scale);
        let highest = of_query.iter().map(|(score, _)| score * factor).fold(f64::MIN, f64::max);
        let weights: Vec<f64> = of_query.iter().map(|(score, _)| (score * factor - highest).exp()).collect();
        let total: f64 = weights.iter().sum();
        // What rounding does to a score it does to its weight, relatively; `exp` adds its own.
        let relative = |(score, magnitude): &(f64, f64)| {
            let below = score * factor - highest;
            sum_rounding(dim) * magnitude * factor + 2.0 * ROUND * (score * factor).abs() + exp_rounding(below)
        };
        let worst = of_query.iter().map(relative).fold(0.0, f64::max);
        let mut sums = vec![(0.0f64, 0.0f64, 0.0f64); dim];
        for (s, weight) in visible(token).zip(&weights) {
            for (sum, v) in sums.iter_mut().zip(row(&v, group(head), s)) {
                let term = weight / total * v;
                *sum = (sum.0 + term, sum.1 + term.abs(), sum.2 + term * term);
            }
        }
        want.extend(sums.iter().map(|&(value, magnitude, power)| Expected {
            value,
            bound: magnitude * (2.0 * worst + 2.0 * sum_rounding(weights.len())),
            floor: FLUSH * (weights.len() as f64 + 2.0),
            power: power.max(value * value),
        }));
    }
    let config = AttentionConfig {
        n_heads: h,
        n_kv_heads: hkv,
        head_dim: d,
        window: if window == 0 { None } else { Some(window) },
        scale,
    };
    let cache = [hkv, capacity, d];
    let operands = vec![
        Operand::state(pos, t),
        Operand::floats("q", &[t, h * d], q),
        Operand::floats("k", &cache, k),
        Operand::floats("v", &cache, v),
        Operand::close("y", &[t, h * d], want, 1e-9),
    ];
    Job::new(operands, move |rec, bound| {
        let tensor = |i| bound.tensor(i);
        kernels::attention(rec, bound.state(0), &config, tensor(1), tensor(2), tensor(3), tensor(4))
    })
}
