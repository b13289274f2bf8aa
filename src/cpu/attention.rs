//! `attention_decode`, `attention_prefill` and `attention_merge`: each query and head by itself.

use std::ops::Range;

use super::simd::{self, Vector, Work, dot, exp, fma};
use super::{Call, threads};
use crate::kernels::AttentionParams;

impl AttentionParams {
    /// Keys that a token sees; padding of the last chunk may lie past the cache.
    fn visible(&self, state: &[u32], token: usize) -> Range<usize> {
        let (pos, capacity, window) = (state[0] as usize, self.capacity as usize, self.window as usize);
        if self.causal == 0 {
            return 0..(pos + state[1] as usize).min(capacity);
        }
        let end = (pos + token + 1).min(capacity);
        if window > 0 { end.saturating_sub(window)..end } else { 0..end }
    }

    /// Keys that any token of the pass sees.
    fn visible_to_all(&self, state: &[u32]) -> Range<usize> {
        self.visible(state, 0).start..self.visible(state, self.n_tokens as usize - 1).end
    }

    /// Keys of each part of the pass; the last one may have fewer, and those behind it none.
    fn part_keys(&self, all: &Range<usize>) -> usize {
        all.len().div_ceil(self.splits as usize).next_multiple_of(self.step as usize)
    }
}

/// Both forms: all keys at once, or in parts that are still to be merged.
pub(crate) fn attention(mut call: Call<'_>) {
    let params: AttentionParams = call.params();
    let [state, q, k, v, y] = call.operands();
    let (n_heads, n_kv_heads) = (params.n_heads as usize, params.n_kv_heads as usize);
    let (dim, capacity, splits) = (params.head_dim as usize, params.capacity as usize, params.splits as usize);
    let (state, q, k, v) = (state.get::<u32>(), q.get::<f32>(), k.get::<f32>(), v.get::<f32>());
    let all = params.visible_to_all(state);
    let part_keys = params.part_keys(&all);
    let n_queries = params.n_tokens as usize * n_heads;
    let part_len = if splits > 1 { dim + 4 } else { dim };
    let ops = 2 * n_queries * dim * all.len();
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..n_queries * splits * part_len], part_len, ops, |i, y| {
        let (query, split) = (i / splits, i % splits);
        let (t, h) = (query / n_heads, query % n_heads);
        let visible = params.visible(state, t);
        let part = all.start + split * part_keys..(all.start + (split + 1) * part_keys).min(all.end);
        if part.is_empty() {
            return;
        }
        let first = visible.start.max(part.start);
        let end = visible.end.min(part.end).max(first);
        let cached = h * n_kv_heads / n_heads * capacity;
        let rows = (cached + first) * dim..(cached + end) * dim;
        let (y, last) = y.split_at_mut(dim);
        let q = &q[query * dim..][..dim];
        let head = Head { q, k: &k[rows.clone()], v: &v[rows], scale: params.scale, soft_cap: params.soft_cap, y };
        let found = simd::run(head);
        if let [highest, sum, ..] = last {
            (*highest, *sum) = found;
        } else {
            y.iter_mut().for_each(|y| *y /= found.1);
        }
    });
}

/// Parts of `attention_decode`, weighted by how far their highest score lies below the highest of all.
pub(crate) fn attention_merge(mut call: Call<'_>) {
    let params: AttentionParams = call.params();
    let [state, parts, y] = call.operands();
    let (dim, splits) = (params.head_dim as usize, params.splits as usize);
    let all = params.visible_to_all(state.get::<u32>());
    let n_parts = all.len().div_ceil(params.part_keys(&all));
    let parts = parts.get::<f32>();
    let len = params.n_tokens as usize * params.n_heads as usize * dim;
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], dim, 2 * len * n_parts, |query, y| {
        let parts = &parts[query * splits * (dim + 4)..][..n_parts * (dim + 4)];
        let highest = parts.chunks_exact(dim + 4).map(|part| part[dim]).fold(f32::MIN, f32::max);
        let mut sum = 0.0;
        y.fill(0.0);
        for part in parts.chunks_exact(dim + 4) {
            let weight = (part[dim] - highest).exp();
            sum += weight * part[dim + 1];
            y.iter_mut().zip(part).for_each(|(y, part)| *y += weight * part);
        }
        y.iter_mut().for_each(|y| *y /= sum);
    });
}

/// Attention of one query with visible keys and values, rows of the query's length.
struct Head<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    scale: f32,
    soft_cap: f32,
    y: &'a mut [f32],
}

impl Work for Head<'_> {
    /// Highest score and sum of weights.
    type Output = (f32, f32);

    /// A streaming softmax: what has been summed is rescaled when a larger score appears, as in the shader. Leaves sums
    /// in `y` that are still to be divided.
    #[inline(always)]
    fn run<V: Vector>(self) -> (f32, f32) {
        const TILE: usize = 64;
        let Head { q, k, v, scale, soft_cap, y } = self;
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
            if soft_cap > 0.0 {
                for weight in weights.iter_mut() {
                    let small = exp::<V>(-2.0 * weight.abs() / soft_cap);
                    *weight = (soft_cap * (1.0 - small) / (1.0 + small)).copysign(*weight);
                }
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
        (highest, sum)
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
