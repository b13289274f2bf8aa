//! `attention_decode`, `attention_prefill` and `attention_merge`: queries of a prompt together, a head at a time; of decoding,
//! each query and head by itself.

use std::ops::Range;

use super::cached::{Floats, Halves, Pages, Quants, Stored, write_row};
use super::rope::{Rotation, Turning};
use super::simd::{self, Lanes, Numbers, WideWork, exp};
use super::softmax::ExpBelow;
use super::whole_sequences::{self, Biases, HeadBiases, Keys, Packed, Rows, Scratch, Sequence};
use super::{Call, threads};
use crate::kernels::{KvType, QkNorm};
use crate::platform::IS_BROWSER;
use crate::shaders::constants::attention::{CAUSAL, OWN_KEYS, PACKED, WHOLE_PASS};
use crate::shaders::constants::rotate;
use crate::shaders::overrides;
use crate::shaders::params::AttentionParams;

impl AttentionParams {
    /// Keys of the sequence that a token belongs to; padding of the last chunk may lie past the cache.
    fn keys(&self, state: &[u32], token: usize) -> Range<usize> {
        if self.flags & PACKED != 0 {
            let row = token as u32 * (self.n_heads / self.n_kv_heads);
            let tile = state.as_chunks().0.iter().find(|[first, end, _, _]| (*first..*end).contains(&row));
            return tile.map_or(0..0, |&[_, _, first, end]| first as usize..end as usize);
        }
        let row = self.state_row(token);
        let n_tokens = if self.row_words > 0 { 1 } else { state[1] };
        let end = if self.flags & CAUSAL != 0 { u32::MAX } else { state[row] + n_tokens };
        0..end.min(self.capacity) as usize
    }

    /// Where the row of the step state begins that tells of a token's sequence.
    fn state_row(&self, token: usize) -> usize {
        token * self.row_words as usize
    }

    /// Where the keys of a token's sequence are.
    fn pages<'a>(&self, state: &'a [u32], token: usize, page_table: u32) -> Pages<'a> {
        Pages::of_row(state, page_table, self.state_row(token), self.slots as usize)
    }

    /// Keys that a token sees.
    fn visible(&self, state: &[u32], token: usize) -> Range<usize> {
        let keys = self.keys(state, token);
        let (is_causal, is_packed) = (self.flags & CAUSAL != 0, self.flags & PACKED != 0);
        let window = self.window as usize;
        let own = match self.row_words {
            _ if is_packed => token,
            0 => state[0] as usize + token,
            _ => state[self.state_row(token)] as usize,
        };
        let end = match (is_causal, window) {
            (true, _) => (own + 1).min(keys.end),
            (false, 1..) if is_packed => (own + window).min(keys.end),
            (false, _) => keys.end,
        };
        let next = if is_packed && !is_causal { own + 1 } else { end.min(own + 1) };
        let first = if window > 0 { keys.start.max(next.saturating_sub(window)) } else { keys.start };
        let first = if self.flags & WHOLE_PASS != 0 { first.min(state[0] as usize) } else { first };
        first..end
    }

    /// Keys that each token of the pass sees.
    fn all_visible(&self, state: &[u32]) -> Vec<Range<usize>> {
        (0..self.n_tokens as usize).map(|t| self.visible(state, t)).collect()
    }

    /// Keys that are cut into parts: those that a token sees where each is of a sequence of its own, else those that any token
    /// of the pass sees.
    fn cut(&self, state: &[u32], token: usize) -> Range<usize> {
        match self.row_words {
            0 => self.visible(state, 0).start..self.visible(state, self.n_tokens as usize - 1).end,
            _ => self.visible(state, token),
        }
    }

    /// Keys of each part of the pass; the last one may have fewer, and those behind it none.
    fn part_keys(&self, all: &Range<usize>) -> usize {
        all.len().div_ceil(self.splits as usize).next_multiple_of(self.step as usize)
    }
}

/// One token, or one of each of several sequences: heads are turned and keys and values are cached first; then they are queries
/// like any others.
pub(crate) fn attention_decode(mut call: Call<'_>) {
    let params: AttentionParams = call.params();
    let (cache, norm, has_sinks) =
        (Cache::of(&call), QkNorm::of(call.constant(overrides::NORM)), call.is(overrides::SINKS));
    let [state, table, weight, qkv, sinks, k, v, y] = call.operands();
    // Those that it projects.
    let has_keys = params.flags & OWN_KEYS != 0;
    let (n_heads, n_kv_heads) = (params.n_heads as usize, if has_keys { params.n_kv_heads as usize } else { 0 });
    let (head_dim, slots) = (params.head_dim as usize, params.slots as usize);
    let rotation =
        Rotation { rot_dims: params.rot_dims as usize, halves: params.style == rotate::HALVES, table: table.get() };
    let weight = weight.get();
    let turning = Turning { rotation, norm, weight, eps: params.eps, n_heads, n_kv_heads, head_dim };
    let state = state.get::<u32>();
    let n_tokens = params.n_tokens as usize;
    let mut scratch = vec![0.0; head_dim];
    let mut keys = vec![0.0; n_kv_heads * head_dim];
    let mut q = vec![0.0; n_tokens * n_heads * head_dim];
    for (t, q) in q.chunks_exact_mut(n_heads * head_dim).enumerate() {
        let &[pos, _, _, rope_offset, ..] = &state[params.state_row(t)..] else { return };
        let (pos, angles) = (pos as usize, pos.wrapping_add(rope_offset) as usize);
        let first = 4 * (params.query_start as usize + t * params.query_stride as usize);
        let n_value_heads = if cache.values_from > 0 { 0 } else { n_kv_heads };
        let row = &qkv.get::<f32>()[first..][..(n_heads + n_kv_heads + n_value_heads) * head_dim];
        for (head, to) in q.chunks_exact_mut(head_dim).chain(keys.chunks_exact_mut(head_dim)).enumerate() {
            let angles = if head < n_heads { angles + params.query_row as usize } else { angles };
            turning.turn(angles, row, head, &mut scratch, to);
        }
        if pos < params.capacity as usize {
            let words = cache.kind.row_words(params.head_dim) as usize;
            let slot = params.pages(state, t, cache.page_table).slot(pos);
            for (g, key) in keys.chunks_exact(head_dim).enumerate() {
                let at = (g * slots + slot) * words;
                write_row(cache.kind, key, &mut k.get_mut()[at..][..words]);
                if cache.values_from == 0 {
                    write_row(cache.kind, &turning.value(row, g), &mut v.get_mut()[at..][..words]);
                }
            }
        }
    }
    let params = AttentionParams { query_start: 0, query_stride: params.n_heads * (params.head_dim / 4), ..params };
    let sinks = has_sinks.then(|| sinks.get());
    let learned = Learned { sinks, biases: None };
    let visible = params.all_visible(state);
    by_query(&params, cache, state, &visible, &q, [k.get(), v.get()], learned, y.get_mut());
}

/// Queries of several tokens, which are turned already, as their keys and values are.
pub(crate) fn attention_prefill(mut call: Call<'_>) {
    let params: AttentionParams = call.params();
    let cache = Cache::of(&call);
    let [has_sinks, has_biases] = [overrides::SINKS, overrides::BIASES].map(|name| call.is(name));
    let [state, q, k, v, sinks, y] = call.operands();
    let biases = Biases { n_heads: params.n_heads as usize, reach: params.reach as usize, table: sinks.get() };
    let learned = Learned { sinks: has_sinks.then_some(biases.table), biases: has_biases.then_some(biases) };
    let (state, q, kv) = (state.get(), q.get(), [k.get(), v.get()]);
    let visible = params.all_visible(state);
    let dim = params.head_dim as usize;
    let has_runs = [dim, dim - cache.values_from].into_iter().all(whole_sequences::takes) && params.splits == 1;
    let is_whole =
        params.flags & (PACKED | CAUSAL) == PACKED && !has_sinks && params.window == 0 && cache.values_from == 0;
    let y = y.get_mut();
    if has_runs && is_whole && cache.kind == KvType::F32 && params.soft_cap <= 0.0 {
        let y = &mut y[..params.n_tokens as usize * params.n_heads as usize * dim];
        whole(&params, &visible, learned.biases, [q, bytemuck::cast_slice(kv[0]), bytemuck::cast_slice(kv[1])], y);
    } else if has_runs && !has_biases && params.row_words == 0 && !IS_BROWSER {
        // It would make the modules of browsers 10 KB larger.
        by_sequence(&params, cache, state, &visible, q, kv, learned.sinks, y);
    } else {
        by_query(&params, cache, state, &visible, q, kv, learned, y);
    }
}

/// Learned scores, if a layer has them.
#[derive(Clone, Copy)]
struct Learned<'a> {
    /// `[H]`.
    sinks: Option<&'a [f32]>,
    biases: Option<Biases<'a>>,
}

/// What keys and values are stored as, and which table of pages says where they are.
#[derive(Clone, Copy)]
struct Cache {
    kind: KvType,
    page_table: u32,
    /// First element of a key that is its value's; 0 where values are apart.
    values_from: usize,
}

impl Cache {
    fn of(call: &Call<'_>) -> Cache {
        let kind = KvType::of(call.weight).unwrap_or(KvType::F32);
        let values_from = 4 * call.constant(overrides::VALUES_FROM) as usize;
        Cache { kind, page_table: call.constant(overrides::PAGE_TABLE), values_from }
    }
}

/// Each query by itself, with all keys at once or in parts that are still to be merged.
#[expect(clippy::too_many_arguments)]
fn by_query(
    params: &AttentionParams,
    Cache { kind, page_table, values_from }: Cache,
    state: &[u32],
    visible: &[Range<usize>],
    q: &[f32],
    [k, v]: [&[u32]; 2],
    Learned { sinks, biases }: Learned<'_>,
    y: &mut [f32],
) {
    let (n_heads, n_kv_heads) = (params.n_heads as usize, params.n_kv_heads as usize);
    let (dim, splits) = (params.head_dim as usize, params.splits as usize);
    let value_dim = dim - values_from;
    let v = if values_from > 0 { k } else { v };
    let in_words = |units: u32| 4 * units as usize;
    let stride = in_words(params.key_stride);
    let n_queries = params.n_tokens as usize * n_heads;
    let part_len = if splits > 1 { value_dim + 4 } else { value_dim };
    let ops = n_heads * (dim + value_dim) * visible.iter().map(Range::len).sum::<usize>();
    threads::for_each_chunk(&mut y[..n_queries * splits * part_len], part_len, ops, |i, y| {
        let (query, split) = (i / splits, i % splits);
        let (t, h) = (query / n_heads, query % n_heads);
        let visible = &visible[t];
        // Sequences that are packed are not cut into parts.
        let all = if splits > 1 { params.cut(state, t) } else { 0..usize::MAX };
        let part_keys = if splits > 1 { params.part_keys(&all) } else { usize::MAX };
        let part = all.start + split * part_keys..(all.start + (split + 1) * part_keys).min(all.end);
        if part.is_empty() || visible.is_empty() {
            return;
        }
        let first = visible.start.max(part.start);
        let end = visible.end.min(part.end).max(first);
        let head = h * n_kv_heads / n_heads * in_words(params.head_stride);
        let (y, last) = y.split_at_mut(value_dim);
        let q = &q[in_words(params.query_start) + t * in_words(params.query_stride) + h * dim..][..dim];
        let pages = params.pages(state, t, page_table);
        let rows = |words, skipped| HeadRows { words, kind, stride, dim, skipped, pages };
        let k = rows(&k[in_words(params.key_start) + head..], 0);
        let v = rows(&v[in_words(params.value_start) + head..], values_from);
        // A sink is what the softmax begins with, in one part.
        let sink = sinks.filter(|_| split == 0).map(|sinks| sinks[h]);
        let (mut highest, mut sum) = sink.map_or((f32::MIN, 0.0), |sink| (sink, 1.0));
        let head = Head {
            q,
            k,
            v,
            seen: first..end,
            scale: params.scale,
            biases: biases.map(|biases| biases.of(h, t)),
            soft_cap: params.soft_cap,
            y: &mut *y,
            highest: &mut highest,
            sum: &mut sum,
        };
        // Vectors of 512 bits only where they have no rest.
        if dim.is_multiple_of(16) && values_from.is_multiple_of(16) {
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

/// Tokens of one sequence, or of packed ones, each of which sees a range of keys: a head of many tokens at a time, so that a
/// key is widened once for all of them.
#[expect(clippy::too_many_arguments)]
fn by_sequence(
    params: &AttentionParams,
    Cache { kind, page_table, values_from }: Cache,
    state: &[u32],
    visible: &[Range<usize>],
    q: &[f32],
    [k, v]: [&[u32]; 2],
    sinks: Option<&[f32]>,
    y: &mut [f32],
) {
    /// Tokens at a time: with more, fewer threads would have work.
    const TOKENS: usize = 64;
    let (n_heads, n_kv_heads, dim) = (params.n_heads as usize, params.n_kv_heads as usize, params.head_dim as usize);
    let value_dim = dim - values_from;
    let in_words = |units: u32| 4 * units as usize;
    let (q_stride, stride) = (in_words(params.query_stride), in_words(params.key_stride));
    let is_packed = params.flags & PACKED != 0;
    // Where a token's sequence begins, and what it sees of it: the same in any batch.
    let starts: Vec<usize> =
        (0..visible.len()).map(|t| if is_packed { params.keys(state, t).start } else { 0 }).collect();
    let within =
        |(seen, start): (&Range<usize>, &usize)| seen.start.saturating_sub(*start)..seen.end.saturating_sub(*start);
    let seen: Vec<Range<usize>> = visible.iter().zip(&starts).map(within).collect();
    let ops = n_heads * (dim + value_dim) * visible.iter().map(Range::len).sum::<usize>();
    let width = n_heads * value_dim;
    let y = &mut y[..visible.len() * width];
    threads::for_each_tile(y, width, 0..width, [TOKENS, value_dim], ops, |scratch: &mut Scratch, mut tile| {
        let (h, mut t) = (tile.columns.start / value_dim, tile.rows.start);
        let head = h * n_kv_heads / n_heads * in_words(params.head_stride);
        let mut y: Vec<&mut [f32]> = tile.rows_mut().collect();
        let mut rest = &mut y[..];
        while !rest.is_empty() {
            // All that are left of this sequence; padding behind the last token may see nothing.
            let is_alike = |other: &usize| starts[*other] == starts[t] && seen[*other].is_empty() == seen[t].is_empty();
            let n = (t..t + rest.len()).take_while(is_alike).count();
            let (y, others) = rest.split_at_mut(n);
            rest = others;
            let of_tokens = &seen[t..t + n];
            let first = of_tokens.iter().map(|seen| seen.start).min().unwrap_or_default();
            let end = of_tokens.iter().map(|seen| seen.end).max().unwrap_or_default();
            if first < end {
                let pages = params.pages(state, t, page_table);
                let rows = |words, skipped| HeadRows { words, kind, stride, dim, skipped, pages };
                let v_words = if values_from > 0 { k } else { v };
                let k_rows = rows(&k[in_words(params.key_start) + head..], 0);
                let v_rows = rows(&v_words[in_words(params.value_start) + head..], values_from);
                simd::run_wide(Sequence {
                    q: &q[in_words(params.query_start) + t * q_stride + h * dim..],
                    q_stride,
                    keys: Cached { k: k_rows, v: v_rows, start: starts[t] },
                    seen: Some(of_tokens),
                    all: first..end,
                    scale: params.scale,
                    soft_cap: params.soft_cap,
                    sink: sinks.map(|sinks| sinks[h]),
                    biases: None,
                    y,
                    scratch,
                });
            }
            t += n;
        }
    });
}

/// Rows of a head as a cache stores them.
struct Cached<'a> {
    k: HeadRows<'a>,
    v: HeadRows<'a>,
    /// The position that the others count from.
    start: usize,
}

impl Keys for Cached<'_> {
    fn dims(&self) -> [usize; 2] {
        [self.k.dim, self.v.dim - self.v.skipped]
    }

    #[inline(always)]
    fn tile<'n, const LEN: usize, L: Lanes<LEN>>(
        &'n self,
        positions: Range<usize>,
        _: bool,
        near: &'n mut [f32],
    ) -> [Rows<'n>; 2] {
        let [dim, value_dim] = self.dims();
        let positions = self.start + positions.start..self.start + positions.end;
        let (near_k, near_v) = near.split_at_mut(positions.len() * dim);
        self.k.widen::<LEN, L>(positions.clone(), near_k);
        if value_dim < dim {
            let v = Rows { floats: &near_k[self.v.skipped..], stride: dim, dim: value_dim };
            return [Rows { floats: near_k, stride: dim, dim }, v];
        }
        self.v.widen::<LEN, L>(positions, near_v);
        [Rows { floats: near_k, stride: dim, dim }, Rows { floats: near_v, stride: dim, dim }]
    }
}

/// Tokens that see all keys of their sequences, a head of many tokens at a time.
fn whole(
    params: &AttentionParams,
    visible: &[Range<usize>],
    biases: Option<Biases<'_>>,
    [q, k, v]: [&[f32]; 3],
    y: &mut [f32],
) {
    /// Tokens at a time: enough that few sequences are cut, whose last queries leave lanes idle.
    const TOKENS: usize = 128;
    let (n_heads, n_kv_heads) = (params.n_heads as usize, params.n_kv_heads as usize);
    let dim = params.head_dim as usize;
    let in_floats = |units: u32| 4 * units as usize;
    let (q_stride, stride) = (in_floats(params.query_stride), in_floats(params.key_stride));
    let ops = 2 * n_heads * dim * visible.iter().map(Range::len).sum::<usize>();
    let width = n_heads * dim;
    threads::for_each_tile(y, width, 0..width, [TOKENS, dim], ops, |scratch: &mut Scratch, mut tile| {
        let (h, mut t) = (tile.columns.start / dim, tile.rows.start);
        let head = h * n_kv_heads / n_heads * in_floats(params.head_stride);
        let mut y: Vec<&mut [f32]> = tile.rows_mut().collect();
        let mut rest = &mut y[..];
        while let Some(keys) = visible.get(t).filter(|_| !rest.is_empty()) {
            // All that are left of this sequence; rows behind the last sequence see nothing.
            let n = visible[t..].iter().take(rest.len()).take_while(|other| *other == keys).count();
            let (y, others) = rest.split_at_mut(n);
            rest = others;
            if !keys.is_empty() {
                let first = |start| in_floats(start) + head + keys.start * stride;
                let rows = |floats, start| Rows { floats: &<[f32]>::as_ref(floats)[first(start)..], stride, dim };
                let sequence = Sequence {
                    q: &q[in_floats(params.query_start) + t * q_stride + h * dim..],
                    q_stride,
                    keys: Packed { k: rows(k, params.key_start), v: rows(v, params.value_start) },
                    seen: None,
                    all: 0..keys.len(),
                    scale: params.scale,
                    soft_cap: 0.0,
                    sink: None,
                    biases: biases.map(|biases| biases.of(h, t - keys.start)),
                    y,
                    scratch,
                };
                simd::run_wide(sequence);
            }
            t += n;
        }
    });
}

/// Parts of `attention_decode`, weighted by how far their highest score lies below the highest of all.
pub(crate) fn attention_merge(mut call: Call<'_>) {
    let params: AttentionParams = call.params();
    let [state, parts, y] = call.operands();
    let (dim, splits) = (params.head_dim as usize, params.splits as usize);
    let state = state.get::<u32>();
    let parts = parts.get::<f32>();
    let len = params.n_tokens as usize * params.n_heads as usize * dim;
    threads::for_each_chunk(&mut y.get_mut::<f32>()[..len], dim, 2 * len * splits, |query, y| {
        let all = params.cut(state, query / params.n_heads as usize);
        let n_parts = all.len().div_ceil(params.part_keys(&all));
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

/// Keys or values of a head: slots are `stride` words apart.
#[derive(Clone, Copy)]
struct HeadRows<'a> {
    words: &'a [u32],
    kind: KvType,
    stride: usize,
    dim: usize,
    /// Elements of a row before those that count.
    skipped: usize,
    pages: Pages<'a>,
}

impl<'a> HeadRows<'a> {
    /// The rows of positions that lie in slots one after the other.
    #[inline(always)]
    fn tile(self, positions: Range<usize>) -> Tile<'a> {
        let words = &self.words[self.pages.slot(positions.start) * self.stride..];
        Tile { words, stride: self.stride, dim: self.dim, skipped: self.skipped, n: positions.len() }
    }

    /// Whole rows as floats, one after the other.
    #[inline(always)]
    fn widen<const LEN: usize, L: Lanes<LEN>>(self, positions: Range<usize>, to: &mut [f32]) {
        for (position, to) in positions.zip(to.chunks_exact_mut(self.dim)) {
            let row = &self.words[self.pages.slot(position) * self.stride..];
            match self.kind {
                KvType::F32 => widen_row::<LEN, L, Floats>(row, to),
                KvType::F16 => widen_row::<LEN, L, Halves>(row, to),
                KvType::Q8_0 => widen_row::<LEN, L, Quants>(row, to),
            }
        }
    }
}

#[inline(always)]
fn widen_row<const LEN: usize, L: Lanes<LEN>, S: Stored>(row: &[u32], to: &mut [f32]) {
    let dim = to.len();
    let (runs, rest) = to.as_chunks_mut::<LEN>();
    let from = S::runs::<LEN>(row, dim, 0, runs.len());
    for (at, to) in runs.iter_mut().enumerate() {
        S::load::<LEN, L>(from, at).store(to);
    }
    if !rest.is_empty() {
        let from = S::rest::<LEN>(row, dim, dim - rest.len());
        for (to, from) in rest.iter_mut().zip(from) {
            *to = from;
        }
    }
}

/// Some rows of a head: `n` of `dim` elements, one every `stride` words.
#[derive(Clone, Copy)]
struct Tile<'a> {
    words: &'a [u32],
    stride: usize,
    dim: usize,
    skipped: usize,
    n: usize,
}

impl<'a> Tile<'a> {
    /// The row, and what may lie behind it.
    #[inline(always)]
    fn row(self, i: usize) -> &'a [u32] {
        &self.words[i * self.stride..]
    }
}

/// Attention of one query with visible keys and values.
struct Head<'a> {
    q: &'a [f32],
    k: HeadRows<'a>,
    v: HeadRows<'a>,
    /// Positions that it sees.
    seen: Range<usize>,
    scale: f32,
    /// By the position of a key.
    biases: Option<HeadBiases<'a>>,
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
        let Head { q, k: keys, v: values, seen, scale, biases, soft_cap, y, highest, sum } = self;
        y.fill(0.0);
        let mut first = seen.start;
        while first < seen.end {
            // Up to where the next position's slot is elsewhere.
            let positions = first..seen.end.min(first + TILE).min(first + keys.pages.run(first).1);
            first = positions.end;
            let k = keys.tile(positions.clone());
            let mut weights = [f32::MIN; TILE];
            let scores = &mut weights[..k.n];
            match keys.kind {
                KvType::F32 => dots::<LEN, L, Floats>(q, k, scores),
                KvType::F16 => dots::<LEN, L, Halves>(q, k, scores),
                KvType::Q8_0 => dots::<LEN, L, Quants>(q, k, scores),
            }
            for score in scores.iter_mut() {
                *score *= scale;
            }
            if soft_cap > 0.0 {
                for score in scores.iter_mut() {
                    let small = exp::<L, f32>(-2.0 * score.abs() / soft_cap);
                    *score = (soft_cap * (1.0 - small) / (1.0 + small)).copysign(*score);
                }
            }
            if let Some(biases) = biases {
                for (key, score) in positions.clone().zip(scores.iter_mut()) {
                    *score += biases.get(0, key);
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
            let (v, weights) = (values.tile(positions), &weights[..k.n]);
            *highest = next;
            match values.kind {
                KvType::F32 => add_rows::<LEN, L, Floats>(weights, v, rescale, y),
                KvType::F16 => add_rows::<LEN, L, Halves>(weights, v, rescale, y),
                KvType::Q8_0 => add_rows::<LEN, L, Quants>(weights, v, rescale, y),
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
fn dots<const LEN: usize, L: Lanes<LEN>, S: Stored>(q: &[f32], k: Tile<'_>, sums: &mut [f32]) {
    let (fours, last) = sums.as_chunks_mut::<4>();
    let n_fours = fours.len();
    for (i, sums) in fours.iter_mut().enumerate() {
        *sums = four_dots::<LEN, L, S>(q, std::array::from_fn(|j| k.row(4 * i + j)));
    }
    if !last.is_empty() {
        // Rows past the end repeat the last one.
        let found = four_dots::<LEN, L, S>(q, std::array::from_fn(|j| k.row((4 * n_fours + j).min(k.n - 1))));
        last.iter_mut().zip(found).for_each(|(sum, found)| *sum = found);
    }
}

#[inline(always)]
fn four_dots<const LEN: usize, L: Lanes<LEN>, S: Stored>(q: &[f32], k: [&[u32]; 4]) -> [f32; 4] {
    let dim = q.len();
    let (q, q_rest) = q.as_chunks::<LEN>();
    let mut sums = [L::splat(0.0); 4];
    // Loops, since what a closure calls may be compiled for any processor.
    let mut runs = [S::runs::<LEN>(k[0], dim, 0, q.len()); 4];
    for (runs, row) in runs[1..].iter_mut().zip(&k[1..]) {
        *runs = S::runs::<LEN>(row, dim, 0, q.len());
    }
    for (at, q) in q.iter().enumerate() {
        let q = L::load(q);
        for (sum, runs) in sums.iter_mut().zip(runs) {
            *sum = S::load::<LEN, L>(runs, at).fma(q, *sum);
        }
    }
    let mut sums = L::sum_each(sums);
    if !q_rest.is_empty() {
        for (sum, row) in sums.iter_mut().zip(k) {
            for (q, k) in q_rest.iter().zip(S::rest::<LEN>(row, dim, dim - q_rest.len())) {
                *sum = q.fma::<L>(k, *sum);
            }
        }
    }
    sums
}

/// `y = rescale * y + rows of v, weighted`. A tile is summed on its own first, since adding keys one by one to a long sum
/// would lose digits. Columns are taken in runs of up to 32.
#[inline(always)]
fn add_rows<const LEN: usize, L: Lanes<LEN>, S: Stored>(weights: &[f32], v: Tile<'_>, rescale: f32, y: &mut [f32]) {
    let (runs, rest) = y.as_chunks_mut::<LEN>();
    let n_runs = runs.len();
    let mut first = 0;
    while first < n_runs {
        // Four vectors of eight, or two of sixteen.
        first += match (n_runs - first, LEN) {
            (4.., 8) => add_runs::<LEN, L, S, 4>(weights, v, rescale, first, runs),
            (2.., _) => add_runs::<LEN, L, S, 2>(weights, v, rescale, first, runs),
            _ => add_runs::<LEN, L, S, 1>(weights, v, rescale, first, runs),
        };
    }
    if rest.is_empty() {
        return;
    }
    let mut sums = [0.0; LEN];
    for (row, &weight) in weights.iter().enumerate() {
        for (sum, v) in sums.iter_mut().zip(S::rest::<LEN>(v.row(row), v.dim, v.skipped + n_runs * LEN)) {
            *sum = weight.fma::<L>(v, *sum);
        }
    }
    for (y, sum) in rest.iter_mut().zip(sums) {
        *y = rescale.fma::<L>(*y, sum);
    }
}

/// `N` vectors of columns, whose sums stay in registers, of even rows and of odd ones, so that none waits for the one
/// before. Returns `N`.
#[inline(always)]
fn add_runs<const LEN: usize, L: Lanes<LEN>, S: Stored, const N: usize>(
    weights: &[f32],
    v: Tile<'_>,
    rescale: f32,
    first: usize,
    y: &mut [[f32; LEN]],
) -> usize {
    let [mut even, mut odd] = [[L::splat(0.0); N]; 2];
    let (pairs, last) = weights.as_chunks::<2>();
    let run = v.skipped / LEN + first;
    for (pair, weights) in pairs.iter().enumerate() {
        add_row::<LEN, L, S, N>(weights[0], S::runs(v.row(2 * pair), v.dim, run, N), &mut even);
        add_row::<LEN, L, S, N>(weights[1], S::runs(v.row(2 * pair + 1), v.dim, run, N), &mut odd);
    }
    if let [weight] = last {
        add_row::<LEN, L, S, N>(*weight, S::runs(v.row(v.n - 1), v.dim, run, N), &mut even);
    }
    let (one, rescale) = (L::splat(1.0), L::splat(rescale));
    for ((y, even), odd) in y[first..][..N].iter_mut().zip(even).zip(odd) {
        rescale.fma(L::load(y), even.fma(one, odd)).store(y);
    }
    N
}

/// `sums += weight * v`.
#[inline(always)]
fn add_row<const LEN: usize, L: Lanes<LEN>, S: Stored, const N: usize>(
    weight: f32,
    v: S::Runs<'_, LEN>,
    sums: &mut [L; N],
) {
    let weight = L::splat(weight);
    for (at, sum) in sums.iter_mut().enumerate() {
        *sum = weight.fma(S::load::<LEN, L>(v, at), *sum);
    }
}
