//! `attention_decode`, `attention_prefill` and `attention_merge`: each query and head by itself.

use std::ops::Range;

use super::simd::{self, Lanes, Numbers, WideWork, exp};
use super::softmax::ExpBelow;
use super::{Call, threads};
use crate::kernels::{AttentionParams, CAUSAL, PACKED, SINKS};

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
    let [state, q, k, v, sinks, y] = call.operands();
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
        let (k, v) = (HeadRows { data: k, stride, dim, n }, HeadRows { data: v, stride, dim, n });
        // A sink is what the softmax begins with, in one part.
        let has_sink = params.flags & SINKS != 0 && split == 0;
        let (mut highest, mut sum) = if has_sink { (sinks.get::<f32>()[h], 1.0) } else { (f32::MIN, 0.0) };
        let head = Head {
            q,
            k,
            v,
            scale: params.scale,
            soft_cap: params.soft_cap,
            y: &mut *y,
            highest: &mut highest,
            sum: &mut sum,
        };
        // Vectors of 512 bits only where they have no rest.
        if dim.is_multiple_of(16) {
            simd::run_wide(head)
        } else {
            simd::run(head)
        }
        match last {
            [to, of_weights, ..] => (*to, *of_weights) = (highest, sum),
            _ => y.iter_mut().for_each(|y| *y /= sum),
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
struct HeadRows<'a> {
    data: &'a [f32],
    stride: usize,
    dim: usize,
    n: usize,
}

impl<'a> HeadRows<'a> {
    #[inline(always)]
    fn row(self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..][..self.dim]
    }

    /// So many rows from `first` on, or those that are left.
    fn from(self, first: usize, n: usize) -> HeadRows<'a> {
        HeadRows { data: &self.data[first * self.stride..], n: n.min(self.n - first), ..self }
    }
}

/// Attention of one query with visible keys and values.
struct Head<'a> {
    q: &'a [f32],
    k: HeadRows<'a>,
    v: HeadRows<'a>,
    scale: f32,
    soft_cap: f32,
    /// Sums that are still to be divided.
    y: &'a mut [f32],
    /// Highest score.
    highest: &'a mut f32,
    /// Sum of weights.
    sum: &'a mut f32,
}

impl WideWork for Head<'_> {
    /// A streaming softmax: what has been summed is rescaled when a larger score appears, as in the shader.
    #[inline(always)]
    fn run_wide<const LEN: usize, L: Lanes<LEN>>(self) {
        const TILE: usize = 64;
        const RUN: usize = 16;
        let Head { q, k, v, scale, soft_cap, y, highest, sum } = self;
        y.fill(0.0);
        for first in (0..k.n).step_by(TILE) {
            let (k, v) = (k.from(first, TILE), v.from(first, TILE));
            let mut weights = [f32::MIN; TILE];
            let scores = &mut weights[..k.n];
            dots::<LEN, L>(q, k, scores);
            for score in scores.iter_mut() {
                *score *= scale;
            }
            if soft_cap > 0.0 {
                for score in scores.iter_mut() {
                    let small = exp::<L, f32>(-2.0 * score.abs() / soft_cap);
                    *score = (soft_cap * (1.0 - small) / (1.0 + small)).copysign(*score);
                }
            }
            // Whole runs, whose lanes behind the last score come to nothing.
            let runs = weights[..k.n.next_multiple_of(RUN)].as_chunks_mut::<RUN>().0;
            let mut lanes = [*highest; RUN];
            for run in runs.iter() {
                for (top, &score) in lanes.iter_mut().zip(run) {
                    *top = if score > *top { score } else { *top };
                }
            }
            let next = fold(lanes, f32::max);
            simd::each::<L>(runs.as_flattened_mut(), &ExpBelow { highest: next });
            let rescale = exp::<L, f32>(*highest - next);
            let mut lanes = [0.0; RUN];
            for run in runs.iter() {
                for (sum, &weight) in lanes.iter_mut().zip(run) {
                    *sum += weight;
                }
            }
            *sum = *sum * rescale + fold(lanes, |a, b| a + b);
            let weights = &weights[..k.n];
            *highest = next;
            // Runs of 32 columns.
            match LEN {
                16 => add_rows::<LEN, L, 2>(weights, v, rescale, y),
                _ => add_rows::<LEN, L, 4>(weights, v, rescale, y),
            }
        }
    }
}

/// All lanes to one, in pairs.
#[inline(always)]
fn fold(mut lanes: [f32; 16], pair: impl Fn(f32, f32) -> f32) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = pair(lanes[i], lanes[i + half]);
        }
    }
    lanes[0]
}

/// `sums[i] = q . k[i]`.
#[inline(always)]
fn dots<const LEN: usize, L: Lanes<LEN>>(q: &[f32], k: HeadRows<'_>, sums: &mut [f32]) {
    let (fours, last) = sums.as_chunks_mut::<4>();
    let n_fours = fours.len();
    for (i, sums) in fours.iter_mut().enumerate() {
        *sums = four_dots::<LEN, L>(q, std::array::from_fn(|j| k.row(4 * i + j)));
    }
    if !last.is_empty() {
        // Rows past the end repeat the last one.
        let found = four_dots::<LEN, L>(q, std::array::from_fn(|j| k.row((4 * n_fours + j).min(k.n - 1))));
        last.iter_mut().zip(found).for_each(|(sum, found)| *sum = found);
    }
}

#[inline(always)]
fn four_dots<const LEN: usize, L: Lanes<LEN>>(q: &[f32], k: [&[f32]; 4]) -> [f32; 4] {
    let (q, q_rest) = q.as_chunks::<LEN>();
    let runs = k.map(|row| &row.as_chunks::<LEN>().0[..q.len()]);
    let mut sums = [L::splat(0.0); 4];
    for (at, q) in q.iter().enumerate() {
        let q = L::load(q);
        for (sum, row) in sums.iter_mut().zip(runs) {
            *sum = L::load(&row[at]).fma(q, *sum);
        }
    }
    let mut sums = L::sum_each(sums);
    for (sum, row) in sums.iter_mut().zip(k) {
        for (q, k) in q_rest.iter().zip(&row[row.len() - q_rest.len()..]) {
            *sum = q.fma::<L>(*k, *sum);
        }
    }
    sums
}

/// `y = rescale * y + rows of v, weighted`. A tile is summed on its own first, since adding keys one by one to a long sum
/// would lose digits. Columns are taken in runs of `N` vectors whose sums stay in registers, of even rows and of odd ones,
/// so that none waits for the one before.
#[inline(always)]
fn add_rows<const LEN: usize, L: Lanes<LEN>, const N: usize>(
    weights: &[f32],
    v: HeadRows<'_>,
    rescale: f32,
    y: &mut [f32],
) {
    let n_columns = y.len() / (LEN * N) * (LEN * N);
    let (runs, rest) = y.split_at_mut(n_columns);
    for (i, y) in runs.chunks_exact_mut(LEN * N).enumerate() {
        let [mut even, mut odd] = [[L::splat(0.0); N]; 2];
        let (pairs, last) = weights.as_chunks::<2>();
        for (pair, weights) in pairs.iter().enumerate() {
            add_row(weights[0], &v.row(2 * pair)[i * LEN * N..], &mut even);
            add_row(weights[1], &v.row(2 * pair + 1)[i * LEN * N..], &mut odd);
        }
        if let [weight] = last {
            add_row(*weight, &v.row(v.n - 1)[i * LEN * N..], &mut even);
        }
        let (one, rescale) = (L::splat(1.0), L::splat(rescale));
        for ((y, even), odd) in y.as_chunks_mut().0.iter_mut().zip(even).zip(odd) {
            rescale.fma(L::load(y), even.fma(one, odd)).store(y);
        }
    }
    if rest.is_empty() {
        return;
    }
    let mut sums = [0.0; 32];
    for (row, &weight) in weights.iter().enumerate() {
        for (sum, &v) in sums.iter_mut().zip(&v.row(row)[n_columns..]) {
            *sum = weight.fma::<L>(v, *sum);
        }
    }
    for (y, sum) in rest.iter_mut().zip(sums) {
        *y = rescale.fma::<L>(*y, sum);
    }
}

/// `sums += weight * v`.
#[inline(always)]
fn add_row<const LEN: usize, L: Lanes<LEN>, const N: usize>(weight: f32, v: &[f32], sums: &mut [L; N]) {
    let weight = L::splat(weight);
    for (sum, v) in sums.iter_mut().zip(&v.as_chunks().0[..N]) {
        *sum = weight.fma(L::load(v), *sum);
    }
}
