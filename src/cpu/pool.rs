//! `pool`: sequences of a batch to one row each, with sums in f64.

use super::{Call, threads};
use crate::shaders::constants::pool::{CLS, LAST};
use crate::shaders::params::PoolParams;

pub(crate) fn pool(mut call: Call<'_>) {
    let params: PoolParams = call.params();
    let n_spans = params.n_spans as usize;
    let [spans, x, y] = call.operands();
    let dim = params.dim as usize;
    let (spans, rows) = (spans.get::<[u32; 2]>(), &x.get::<f32>()[..params.n_rows as usize * dim]);
    let len = n_spans * dim;
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], dim, rows.len(), |b, y| {
        let end = spans[b][1].min(params.n_rows);
        let first = spans[b][0].min(end);
        let rows = &rows[first as usize * dim..end as usize * dim];
        let mut sums = vec![0.0; dim];
        let picked = match params.pooling {
            CLS => &rows[..dim.min(rows.len())],
            LAST => &rows[rows.len().saturating_sub(dim)..],
            _ => rows,
        };
        for row in picked.chunks_exact(dim) {
            sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        let n = (picked.len() / dim).max(1) as f64;
        sums.iter_mut().for_each(|sum| *sum /= n);
        let norm = match params.normalise {
            0 => 1.0,
            _ => sums.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-12),
        };
        y.iter_mut().zip(sums).for_each(|(y, sum)| *y = (sum / norm) as f32);
    });
}
