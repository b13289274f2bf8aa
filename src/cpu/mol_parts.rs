//! `mol_gate` and `weighted_sum`: a mixture of logits step by step.

use super::activation::{EXP_OPS, Silu};
use super::simd::{self, Map};
use super::{Call, threads};
use crate::shaders::params::{MolGateParams, WeightedSumParams};

pub(crate) fn mol_gate(mut call: Call<'_>) {
    let MolGateParams { n_items, n_queries, pairs, is_sum, .. } = call.params();
    let [a, b, c, y] = call.operands();
    let (pairs, row) = (pairs as usize, (n_queries * pairs) as usize);
    let (a, b, c, len) = (a.get::<f32>(), b.get::<f32>(), c.get::<f32>(), n_items as usize * row);
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], row, len * EXP_OPS, |item, y| {
        let (b, c) = (&b[item * pairs..][..pairs], &c[item * row..][..row]);
        let parts = a.chunks_exact(pairs).zip(c.chunks_exact(pairs)).zip(y.chunks_exact_mut(pairs));
        if is_sum != 0 {
            parts.for_each(|((a, c), y)| (0..pairs).for_each(|p| y[p] = a[p] + b[p] + c[p]));
            return;
        }
        let mut z = vec![0.0; pairs];
        for ((a, c), y) in parts {
            (0..pairs).for_each(|p| z[p] = a[p] * b[p] + c[p]);
            simd::run_wide(Map { function: Silu, x: &z, y });
        }
    });
}

pub(crate) fn weighted_sum(mut call: Call<'_>) {
    /// Rows that a thread takes at a time.
    const ROWS: usize = 1 << 10;
    let WeightedSumParams { n_rows, dim, .. } = call.params();
    let [weight, x, y] = call.operands();
    let (n_rows, dim) = (n_rows as usize, dim as usize);
    let (weight, x) = (weight.get::<f32>(), x.get::<f32>());
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..n_rows], ROWS, n_rows * dim, |i, y| {
        let rows = weight[i * ROWS * dim..].chunks_exact(dim).zip(x[i * ROWS * dim..].chunks_exact(dim));
        for (y, (weight, x)) in y.iter_mut().zip(rows) {
            *y = weight.iter().zip(x).map(|(weight, x)| weight * x).sum();
        }
    });
}
