//! `attention_decode`, `attention_prefill` and `attention_merge`: each query and head by itself.

use std::ops::Range;

use super::simd::{self, Vector, Work, dot, exp, fma};
use super::{Call, threads};
use crate::kernels::{AttentionParams, CAUSAL, PACKED};

impl AttentionParams {
    /// Keys of the sequence that a token belongs to; padding of the last chunk may lie past the cache.
    fn keys(&self, state: &[u32], token: usize) -> Range<usize> {
        if self.flags & PACKED != 0 {
            let row = token as u32 * (self.n_heads / self.n_kv_heads);
            let tile = state.as_chunks().0.iter().find(|[first, end, _, _]| (*first..*end).contains(&row));
            return tile.map_or(0..0, |&[_, _, first, end]| first as usize..end as usize);
        }
        let end = if self.flags & CAUSAL != 0 { u32::MAX } else { state[0] + state[1] };
        0..end.min(self.capacity) as usize
    }

    /// Keys that a token sees.
    fn visible(&self, state: &[u32], token: usize) -> Range<usize> {
        let keys = self.keys(state, token);
        let (is_causal, window) = (self.flags & CAUSAL != 0, self.window as usize);
        let own = if self.flags & PACKED != 0 { token } else { state[0] as usize + token };
        let end = match (is_causal, window) {
            (true, _) => (own + 1).min(keys.end),
            (false, 0) => keys.end,
            (false, _) => (own + window).min(keys.end),
        };
        let next = if is_causal { end } else { own + 1 };
        let first = if window > 0 { keys.start.max(next.saturating_sub(window)) } else { keys.start };
        first..end
    }

    /// Keys that any token of a pass over cached keys sees.
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
    let (dim, splits) = (params.head_dim as usize, params.splits as usize);
    let in_quads = |quads: u32| 4 * quads as usize;
    let (stride, key_start, value_start) =
        (in_quads(params.key_stride), in_quads(params.key_start), in_quads(params.value_start));
    let (state, q, k, v) = (state.get::<u32>(), q.get::<f32>(), k.get::<f32>(), v.get::<f32>());
    let visible: Vec<Range<usize>> = (0..params.n_tokens as usize).map(|t| params.visible(state, t)).collect();
    // Sequences that are packed are not cut into parts.
    let all = if splits > 1 { params.visible_to_all(state) } else { 0..usize::MAX };
    let part_keys = if splits > 1 { params.part_keys(&all) } else { usize::MAX };
    let n_queries = params.n_tokens as usize * n_heads;
    let part_len = if splits > 1 { dim + 4 } else { dim };
    let ops = 2 * n_heads * dim * visible.iter().map(Range::len).sum::<usize>();
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..n_queries * splits * part_len], part_len, ops, |i, y| {
        let (query, split) = (i / splits, i % splits);
        let (t, h) = (query / n_heads, query % n_heads);
        let visible = &visible[t];
        let part = all.start + split * part_keys..(all.start + (split + 1) * part_keys).min(all.end);
        if part.is_empty() || visible.is_empty() {
            return;
        }
        let first = visible.start.max(part.start);
        let end = visible.end.min(part.end).max(first);
        let cached = h * n_kv_heads / n_heads * in_quads(params.head_stride) + first * stride;
        let n = end - first;
        let (y, last) = y.split_at_mut(dim);
        let q = &q[in_quads(params.query_start) + t * in_quads(params.query_stride) + h * dim..][..dim];
        let (k, v) = (&k[key_start + cached..], &v[value_start + cached..]);
        let (k, v) = (Rows { data: k, stride, dim, n }, Rows { data: v, stride, dim, n });
        let found = simd::run(Head { q, k, v, scale: params.scale, soft_cap: params.soft_cap, y });
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

/// Keys or values of a head: `n` rows of `dim` elements, one every `stride`.
#[derive(Clone, Copy)]
struct Rows<'a> {
    data: &'a [f32],
    stride: usize,
    dim: usize,
    n: usize,
}

impl<'a> Rows<'a> {
    fn iter(self) -> impl Iterator<Item = &'a [f32]> {
        (0..self.n).map(move |i| &self.data[i * self.stride..][..self.dim])
    }

    /// So many rows from `first` on, or those that are left.
    fn from(self, first: usize, n: usize) -> Rows<'a> {
        Rows { data: &self.data[first * self.stride..], n: n.min(self.n - first), ..self }
    }
}

/// Attention of one query with visible keys and values.
struct Head<'a> {
    q: &'a [f32],
    k: Rows<'a>,
    v: Rows<'a>,
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
        let mut highest = f32::MIN;
        let mut sum = 0.0;
        y.fill(0.0);
        for first in (0..k.n).step_by(TILE) {
            let (k, v) = (k.from(first, TILE), v.from(first, TILE));
            let mut weights = [0.0; TILE];
            let weights = &mut weights[..k.n];
            for (weight, k) in weights.iter_mut().zip(k.iter()) {
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
fn add_rows<V: Vector>(weights: &[f32], v: Rows<'_>, rescale: f32, y: &mut [f32]) {
    let dim = y.len();
    let (runs, rest) = y.as_chunks_mut::<32>();
    for (i, y) in runs.iter_mut().enumerate() {
        let mut sums = [V::splat(0.0); 4];
        for (&weight, v) in weights.iter().zip(v.iter()) {
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
    for (&weight, v) in weights.iter().zip(v.iter()) {
        for (sum, &v) in sums.iter_mut().zip(&v[dim - dim % 32..]) {
            *sum = fma::<V>(weight, v, *sum);
        }
    }
    for (y, sum) in rest.iter_mut().zip(sums) {
        *y = fma::<V>(rescale, *y, sum);
    }
}
