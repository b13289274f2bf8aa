//! `attention`: causal, with grouped queries and an optional window, each query and head by itself.

use super::simd::{self, Vector, Work, dot, exp, fma};
use super::{Call, threads};
use crate::kernels::AttentionParams;

pub(crate) fn attention(mut call: Call<'_>) {
    let params: AttentionParams = call.params();
    let [state, q, k, v, y] = call.operands();
    let (n_tokens, n_heads, n_kv_heads) =
        (params.n_tokens as usize, params.n_heads as usize, params.n_kv_heads as usize);
    let (dim, capacity, window) = (params.head_dim as usize, params.capacity as usize, params.window as usize);
    let pos = state.get::<u32>()[0] as usize;
    let (q, k, v) = (q.get::<f32>(), k.get::<f32>(), v.get::<f32>());
    let len = n_tokens * n_heads * dim;
    let ops = 2 * len * (pos + n_tokens).min(capacity);
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], dim, ops, |i, y| {
        let (t, h) = (i / n_heads, i % n_heads);
        // Keys first .. end are visible; padding of the last chunk may lie past the cache.
        let end = (pos + t + 1).min(capacity);
        let first = if window > 0 { end.saturating_sub(window) } else { 0 };
        let cached = h * n_kv_heads / n_heads * capacity;
        let visible = (cached + first) * dim..(cached + end) * dim;
        simd::run(Head { q: &q[i * dim..][..dim], k: &k[visible.clone()], v: &v[visible], scale: params.scale, y });
    });
}

/// Attention of one query with its visible keys and values, rows of the query's length.
struct Head<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    scale: f32,
    y: &'a mut [f32],
}

impl Work for Head<'_> {
    type Output = ();

    /// A streaming softmax: what has been summed is rescaled when a larger score appears, as in the shader.
    #[inline(always)]
    fn run<V: Vector>(self) {
        const TILE: usize = 64;
        let Head { q, k, v, scale, y } = self;
        let dim = q.len();
        let mut highest = f32::MIN;
        let mut sum = 0.0;
        y.fill(0.0);
        for (k, v) in k.chunks(TILE * dim).zip(v.chunks(TILE * dim)) {
            let mut weights = [0.0; TILE];
            let weights = &mut weights[..k.len() / dim];
            for (weight, k) in weights.iter_mut().zip(k.chunks_exact(dim)) {
                *weight = scale * dot::<V>(q, k);
            }
            let next = weights.iter().copied().fold(highest, f32::max);
            for weight in weights.iter_mut() {
                *weight = exp::<V>(*weight - next);
            }
            let rescale = exp::<V>(highest - next);
            sum = sum * rescale + weights.iter().sum::<f32>();
            highest = next;
            add_rows::<V>(weights, v, rescale, y);
        }
        y.iter_mut().for_each(|y| *y /= sum);
    }
}

/// `y = rescale * y + rows of v, weighted`. A tile is summed on its own first, since adding keys one by one to a long sum
/// would lose digits. Columns are taken in runs whose sums stay in registers.
#[inline(always)]
fn add_rows<V: Vector>(weights: &[f32], v: &[f32], rescale: f32, y: &mut [f32]) {
    let dim = y.len();
    let (runs, rest) = y.as_chunks_mut::<32>();
    for (i, y) in runs.iter_mut().enumerate() {
        let mut sums = [V::splat(0.0); 4];
        for (&weight, v) in weights.iter().zip(v.chunks_exact(dim)) {
            let (weight, v) = (V::splat(weight), v.as_chunks::<8>().0);
            for (j, sum) in sums.iter_mut().enumerate() {
                *sum = weight.fma(V::load(&v[4 * i + j]), *sum);
            }
        }
        for (y, sum) in y.as_chunks_mut().0.iter_mut().zip(sums) {
            *y = V::splat(rescale).fma(V::load(y), sum).lanes();
        }
    }
    if rest.is_empty() {
        return;
    }
    let mut sums = [0.0; 32];
    for (&weight, v) in weights.iter().zip(v.chunks_exact(dim)) {
        for (sum, &v) in sums.iter_mut().zip(&v[dim - dim % 32..]) {
            *sum = fma::<V>(weight, v, *sum);
        }
    }
    for (y, sum) in rest.iter_mut().zip(sums) {
        *y = fma::<V>(rescale, *y, sum);
    }
}
