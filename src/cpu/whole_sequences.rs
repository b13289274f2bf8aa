//! Attention of several tokens of a sequence, all of which see all of it (encoders) or each its own range (prefill): one
//! query in each lane of a vector, so that neither its scores nor their sum are added up across lanes. A key's elements, and
//! its value's, are the same in all lanes.
//!
//! Keys are visited a tile at a time by all queries, and copied next to each other before: their rows lie in different
//! pages, which processors do not fetch ahead, and those of a cache have to be widened.
//!
//! A query meets the keys of its sequence in one order, by itself, whatever stands in the other lanes: its result is the
//! same in any batch. Tiles begin at multiples of their size, and a key that a query does not see has the weight 0.

use std::ops::Range;

use super::simd::{self, Exp, Lanes, WideWork, exp};

/// Keys whose scores are found before they are weighted.
const TILE: usize = 64;

/// What a thread computes in.
#[derive(Default)]
pub(super) struct Scratch {
    /// Keys of a tile, then values, `[2, keys, D]`.
    near: Vec<f32>,
    /// Queries, `[vectors, D, lanes]`.
    q: Vec<f32>,
    /// Scores of the vectors that are computed together, `[vectors, keys of a tile, lanes]`.
    scores: Vec<f32>,
    /// Highest score and sum of weights so far, `[vectors, 2, lanes]`.
    totals: Vec<f32>,
    /// Sums of values, `[vectors, D, lanes]`.
    y: Vec<f32>,
}

/// Whether heads of this size have whole runs of columns.
pub(super) fn takes(head_dim: usize) -> bool {
    head_dim.is_multiple_of(8)
}

/// Keys and values of a head.
pub(super) trait Keys {
    /// Elements of a key, and of a value.
    fn dims(&self) -> [usize; 2];

    /// Keys and values of these positions, at most [`TILE`]. `near` has room for a copy; `reused`: they are read several times.
    fn tile<'n, const LEN: usize, L: Lanes<LEN>>(
        &'n self,
        positions: Range<usize>,
        reused: bool,
        near: &'n mut [f32],
    ) -> [Rows<'n>; 2];
}

/// Those of a sequence in a batch, from its first token on.
pub(super) struct Packed<'a> {
    pub k: Rows<'a>,
    pub v: Rows<'a>,
}

impl Keys for Packed<'_> {
    fn dims(&self) -> [usize; 2] {
        [self.k.dim, self.v.dim]
    }

    #[inline(always)]
    fn tile<'n, const LEN: usize, L: Lanes<LEN>>(
        &'n self,
        positions: Range<usize>,
        reused: bool,
        near: &'n mut [f32],
    ) -> [Rows<'n>; 2] {
        let (k, v) = (self.k.from(positions.start), self.v.from(positions.start));
        if !reused {
            return [k, v];
        }
        let (near_k, near_v) = near.split_at_mut(TILE * self.k.dim);
        [k.copied(positions.len(), near_k), v.copied(positions.len(), near_v)]
    }
}

/// Attention of some tokens of a sequence in one head.
pub(super) struct Sequence<'a, 'y, K> {
    /// The first token's query, and `q_stride` elements on the next one's.
    pub q: &'a [f32],
    pub q_stride: usize,
    pub keys: K,
    /// The positions that each token sees; `None`: all of `all`.
    pub seen: Option<&'a [Range<usize>]>,
    /// Those that any token sees.
    pub all: Range<usize>,
    pub scale: f32,
    /// 0: none.
    pub soft_cap: f32,
    /// A score that takes part in the softmax and has no value.
    pub sink: Option<f32>,
    /// Of the first token.
    pub biases: Option<HeadBiases<'a>>,
    /// A row of each token.
    pub y: &'a mut [&'y mut [f32]],
    pub scratch: &'a mut Scratch,
}

impl<K: Keys> WideWork for Sequence<'_, '_, K> {
    #[inline(always)]
    fn run_wide<const LEN: usize, L: Lanes<LEN>>(self) {
        // As many sums as there are registers for, beside the queries.
        match L::SUMS {
            ..12 => self.visit_all::<LEN, L, 1, 4>(),
            12..16 => self.visit_all::<LEN, L, 2, 4>(),
            16.. => self.visit_all::<LEN, L, 2, 8>(),
        }
    }
}

impl<K: Keys> Sequence<'_, '_, K> {
    /// `Q` vectors of queries together, and `N` keys or columns of values.
    #[inline(always)]
    fn visit_all<const LEN: usize, L: Lanes<LEN>, const Q: usize, const N: usize>(self) {
        let Sequence { q, q_stride, keys, seen, all, scale, soft_cap, sink, biases, y, scratch } = self;
        let ([dim, value_dim], n_vectors) = (keys.dims(), y.len().div_ceil(LEN));
        let Scratch { near, q: turned, scores, totals, y: sums } = scratch;
        near.resize(TILE * (dim + value_dim), 0.0);
        turned.resize(n_vectors * dim * LEN, 0.0);
        scores.resize(Q * TILE * LEN, 0.0);
        totals.resize(n_vectors * 2 * LEN, 0.0);
        sums.resize(n_vectors * value_dim * LEN, 0.0);
        let (turned, scores, sums) = (lanes_mut(turned), lanes_mut(scores), lanes_mut(sums));
        let totals = lanes_mut::<LEN>(totals).as_chunks_mut::<2>().0;
        for (i, turned) in turned.chunks_exact_mut(dim).enumerate() {
            let rows = &q[i * LEN * q_stride..];
            turn::<LEN, L>(rows, q_stride, LEN.min(y.len() - i * LEN), turned);
        }
        sums.as_flattened_mut().fill(0.0);
        totals.fill(sink.map_or([[f32::MIN; LEN], [0.0; LEN]], |sink| [[sink; LEN], [1.0; LEN]]));
        let mut start = all.start;
        while start < all.end {
            let positions = start..all.end.min((start / TILE + 1) * TILE);
            start = positions.end;
            // Queries that take one step read each key once, so a copy would not pay.
            let [k, v] = keys.tile::<LEN, L>(positions.clone(), n_vectors > Q, near);
            let mut first = 0;
            while first < n_vectors {
                let together = if n_vectors - first >= Q { Q } else { 1 };
                // Lanes behind the last query repeat it.
                let seen = seen.map(|seen| &seen[first * LEN..seen.len().min((first + together) * LEN)]);
                let mut group = Group {
                    q: &turned[first * dim..(first + together) * dim],
                    scores: &mut *scores,
                    totals: &mut totals[first..first + together],
                    y: &mut sums[first * value_dim..(first + together) * value_dim],
                };
                let rule =
                    ScoreRule { scale, soft_cap, biases, seen, first: first * LEN, positions: positions.clone() };
                if rule.sees_any() {
                    match together == Q {
                        true => group.visit::<L, Q, N>(&k, &v, &rule),
                        false => group.visit::<L, 1, N>(&k, &v, &rule),
                    }
                }
                first += together;
            }
        }
        for ((y, sums), [_, total]) in y.chunks_mut(LEN).zip(sums.chunks_exact(value_dim)).zip(totals) {
            let mut inverse = [0.0; LEN];
            for (inverse, total) in inverse.iter_mut().zip(total) {
                *inverse = 1.0 / *total;
            }
            let inverse = L::load(&inverse);
            for (block, sums) in sums.chunks(LEN).enumerate() {
                let mut square = [[0.0; LEN]; LEN];
                for (square, sums) in square.iter_mut().zip(sums) {
                    L::load(sums).fma(inverse, L::splat(0.0)).store(square);
                }
                L::transpose(&mut square);
                for (y, square) in y.iter_mut().zip(square) {
                    copy::<LEN>(&square, &mut y[block * LEN..]);
                }
            }
        }
    }
}

/// What becomes of products of some queries and keys.
struct ScoreRule<'a> {
    scale: f32,
    soft_cap: f32,
    biases: Option<HeadBiases<'a>>,
    /// By query, of those that have lanes.
    seen: Option<&'a [Range<usize>]>,
    /// The number of the first query.
    first: usize,
    /// Of the keys.
    positions: Range<usize>,
}

impl ScoreRule<'_> {
    fn sees_any(&self) -> bool {
        let overlaps = |seen: &Range<usize>| seen.start < self.positions.end && seen.end > self.positions.start;
        self.seen.is_none_or(|seen| seen.iter().any(overlaps))
    }

    /// Makes scores of a vector's products, `i` being its number among those of the rule; returns a factor that they still lack.
    #[inline(always)]
    fn apply<const LEN: usize, L: Lanes<LEN>>(&self, i: usize, scores: &mut [[f32; LEN]]) -> f32 {
        if self.seen.is_none() && self.biases.is_none() && self.soft_cap <= 0.0 {
            return self.scale;
        }
        for scores in scores.iter_mut() {
            for score in scores {
                *score *= self.scale;
            }
        }
        if self.soft_cap > 0.0 {
            for scores in scores.iter_mut() {
                for score in scores {
                    let small = exp::<L, f32>(-2.0 * score.abs() / self.soft_cap);
                    *score = (self.soft_cap * (1.0 - small) / (1.0 + small)).copysign(*score);
                }
            }
        }
        if let Some(biases) = &self.biases {
            for (key, scores) in self.positions.clone().zip(scores.iter_mut()) {
                for (lane, score) in scores.iter_mut().enumerate() {
                    *score += biases.get(self.first + i * LEN + lane, key);
                }
            }
        }
        let Some(seen) = self.seen else { return 1.0 };
        let (mut firsts, mut ends) = ([0u32; LEN], [0u32; LEN]);
        for lane in 0..LEN {
            let seen = &seen[(i * LEN + lane).min(seen.len() - 1)];
            let within =
                |position: usize| position.clamp(self.positions.start, self.positions.end) - self.positions.start;
            (firsts[lane], ends[lane]) = (within(seen.start) as u32, within(seen.end) as u32);
        }
        let n = scores.len() as u32;
        if firsts.iter().any(|&first| first > 0) || ends.iter().any(|&end| end < n) {
            for (key, scores) in (0..).zip(scores.iter_mut()) {
                for lane in 0..LEN {
                    let is_seen = firsts[lane] <= key && key < ends[lane];
                    scores[lane] = if is_seen { scores[lane] } else { f32::MIN };
                }
            }
        }
        1.0
    }
}

/// Vectors of queries that are computed together.
struct Group<'a, const LEN: usize> {
    /// `[vectors, D]`.
    q: &'a [[f32; LEN]],
    /// `[vectors, keys of a tile]`.
    scores: &'a mut [[f32; LEN]],
    /// Highest score and sum of weights of each vector.
    totals: &'a mut [[[f32; LEN]; 2]],
    /// `[vectors, D]`.
    y: &'a mut [[f32; LEN]],
}

impl<const LEN: usize> Group<'_, LEN> {
    /// Adds keys and values.
    #[inline(always)]
    fn visit<L: Lanes<LEN>, const Q: usize, const N: usize>(
        &mut self,
        k: &Rows<'_>,
        v: &Rows<'_>,
        rule: &ScoreRule<'_>,
    ) {
        let n = rule.positions.len();
        score::<LEN, L, Q, N>(self.q, k, n, self.scores);
        let mut rescales = [[0.0; LEN]; Q];
        for (i, rescale) in rescales.iter_mut().enumerate() {
            let scores = &mut self.scores[i * TILE..][..n];
            let factor = rule.apply::<LEN, L>(i, scores);
            *rescale = weigh::<LEN, L>(scores, factor, &mut self.totals[i]);
        }
        add_values::<LEN, L, Q, N>(self.scores, v, n, &rescales, self.y);
    }
}

/// Biases of scores by the distance from query to key, `[2 R + 1, H]`.
#[derive(Clone, Copy)]
pub(super) struct Biases<'a> {
    pub n_heads: usize,
    /// R: keys farther away have the bias of the nearest that is not.
    pub reach: usize,
    pub table: &'a [f32],
}

impl<'a> Biases<'a> {
    /// Those of a head, for queries from position `first` on.
    pub fn of(self, head: usize, first: usize) -> HeadBiases<'a> {
        HeadBiases { all: self, head, first }
    }
}

/// Biases of one head's scores.
#[derive(Clone, Copy)]
pub(super) struct HeadBiases<'a> {
    all: Biases<'a>,
    head: usize,
    first: usize,
}

impl HeadBiases<'_> {
    /// The bias of a key's score with the `i`-th query.
    #[inline(always)]
    pub fn get(&self, i: usize, key: usize) -> f32 {
        let Biases { n_heads, reach, table } = self.all;
        let row = (key + reach).saturating_sub(self.first + i).min(2 * reach);
        table[row * n_heads + self.head]
    }
}

/// Keys or values: rows of `dim` floats, one every `stride`.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub floats: &'a [f32],
    pub stride: usize,
    pub dim: usize,
}

impl<'a> Rows<'a> {
    #[inline(always)]
    fn row(&self, i: usize) -> &'a [f32] {
        &self.floats[i * self.stride..][..self.dim]
    }

    /// Those from the `i`-th on.
    #[inline(always)]
    fn from(&self, i: usize) -> Rows<'a> {
        Rows { floats: &self.floats[i * self.stride..], stride: self.stride, dim: self.dim }
    }

    /// The first `n` one after the other.
    #[inline(always)]
    fn copied<'b>(&self, n: usize, to: &'b mut [f32]) -> Rows<'b> {
        for (i, to) in to.chunks_exact_mut(self.dim).take(n).enumerate() {
            to.copy_from_slice(self.row(i));
        }
        Rows { floats: to, stride: self.dim, dim: self.dim }
    }
}

#[inline(always)]
fn lanes_mut<const LEN: usize>(floats: &mut [f32]) -> &mut [[f32; LEN]] {
    floats.as_chunks_mut().0
}

/// As much as both have; most often a whole vector.
#[inline(always)]
fn copy<const LEN: usize>(from: &[f32], to: &mut [f32]) {
    match (from.first_chunk::<LEN>(), to.first_chunk_mut::<LEN>()) {
        (Some(from), Some(to)) => *to = *from,
        _ => {
            for (to, from) in to.iter_mut().zip(from) {
                *to = *from;
            }
        }
    }
}

/// Puts `n` queries into the lanes of vectors, `[D]`. Lanes behind the last query repeat it.
#[inline(always)]
fn turn<const LEN: usize, L: Lanes<LEN>>(q: &[f32], stride: usize, n: usize, turned: &mut [[f32; LEN]]) {
    let dim = turned.len();
    for (block, turned) in turned.chunks_mut(LEN).enumerate() {
        let mut square = [[0.0; LEN]; LEN];
        for (lane, square) in square.iter_mut().enumerate() {
            let row = &q[lane.min(n - 1) * stride..][..dim];
            copy::<LEN>(&row[block * LEN..], square);
        }
        L::transpose(&mut square);
        for (turned, square) in turned.iter_mut().zip(square) {
            *turned = square;
        }
    }
}

/// `scores[i] = q . k[i]` for `n` keys and `Q` vectors. Loops, since what a closure calls may be compiled for any
/// processor.
#[inline(always)]
fn score<const LEN: usize, L: Lanes<LEN>, const Q: usize, const N: usize>(
    q: &[[f32; LEN]],
    k: &Rows<'_>,
    n: usize,
    scores: &mut [[f32; LEN]],
) {
    let dim = q.len() / Q;
    let mut vectors = [&q[..0]; Q];
    for (i, vector) in vectors.iter_mut().enumerate() {
        *vector = &q[i * dim..][..dim];
    }
    for first in (0..n).step_by(N) {
        let mut rows = [&k.floats[..0]; N];
        for (i, row) in rows.iter_mut().enumerate() {
            // Rows behind the last key repeat it.
            *row = &k.row((first + i).min(n - 1))[..dim];
        }
        let mut sums = [[L::splat(0.0); Q]; N];
        for d in 0..dim {
            let mut q = [L::splat(0.0); Q];
            for (q, vector) in q.iter_mut().zip(vectors) {
                *q = L::load(&vector[d]);
            }
            for (sums, row) in sums.iter_mut().zip(rows) {
                let x = L::splat(row[d]);
                for (sum, q) in sums.iter_mut().zip(q) {
                    *sum = x.fma(q, *sum);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (vector, sum) in sums.into_iter().enumerate() {
                sum.store(&mut scores[vector * TILE + first + i]);
            }
        }
    }
}

/// Makes weights of a vector's scores, relative to its highest so far. Returns what earlier sums are multiplied by.
#[inline(always)]
fn weigh<const LEN: usize, L: Lanes<LEN>>(
    scores: &mut [[f32; LEN]],
    factor: f32,
    [highest, total]: &mut [[f32; LEN]; 2],
) -> [f32; LEN] {
    let mut next = *highest;
    for scores in scores.iter() {
        for (next, score) in next.iter_mut().zip(scores) {
            let score = factor * score;
            *next = if score > *next { score } else { *next };
        }
    }
    let mut below = [0.0; LEN];
    for lane in 0..LEN {
        below[lane] = -next[lane];
    }
    let below = L::load(&below);
    for scores in scores.iter_mut() {
        L::load(scores).fma(L::splat(factor), below).store(scores);
    }
    simd::each::<L>(scores.as_flattened_mut(), &Exp);
    let mut rescale = [0.0; LEN];
    for lane in 0..LEN {
        rescale[lane] = highest[lane] - next[lane];
    }
    simd::each::<L>(&mut rescale, &Exp);
    let mut sum = [0.0; LEN];
    for weights in scores.iter() {
        for (sum, weight) in sum.iter_mut().zip(weights) {
            *sum += weight;
        }
    }
    for lane in 0..LEN {
        total[lane] = total[lane] * rescale[lane] + sum[lane];
    }
    *highest = next;
    rescale
}

/// `y = rescale * y + weights * v` of `n` keys and `Q` vectors. A tile is summed on its own first, since adding keys
/// one by one to a long sum would lose digits.
#[inline(always)]
fn add_values<const LEN: usize, L: Lanes<LEN>, const Q: usize, const N: usize>(
    weights: &[[f32; LEN]],
    v: &Rows<'_>,
    n: usize,
    rescales: &[[f32; LEN]; Q],
    y: &mut [[f32; LEN]],
) {
    let dim = y.len() / Q;
    let mut vectors = [&weights[..0]; Q];
    for (i, vector) in vectors.iter_mut().enumerate() {
        *vector = &weights[i * TILE..][..n];
    }
    for first in (0..dim).step_by(N) {
        let mut sums = [[L::splat(0.0); Q]; N];
        for key in 0..n {
            let mut weights = [L::splat(0.0); Q];
            for (weights, vector) in weights.iter_mut().zip(vectors) {
                *weights = L::load(&vector[key]);
            }
            let columns = &v.row(key)[first..][..N];
            for (sums, &column) in sums.iter_mut().zip(columns) {
                let x = L::splat(column);
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = x.fma(weights, *sum);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for ((vector, sum), rescale) in sums.into_iter().enumerate().zip(rescales) {
                let y = &mut y[vector * dim + first + i];
                L::load(rescale).fma(L::load(y), sum).store(y);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::simd::Work;
    use super::*;

    /// Numbers in [-1, 1) without a pattern.
    fn numbers(n: usize) -> Vec<f32> {
        let next = |state: &mut u32| {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            Some((*state >> 8) as f32 / (1 << 23) as f32 - 1.0)
        };
        (0..n).scan(7, |state, _| next(state)).collect()
    }

    /// Attention of tokens from `first` on of a sequence of `n_keys`, whose rows have query, key and value of one head.
    fn attention(rows: &[f32], dim: usize, n_keys: usize, first: usize, n: usize, lanes: usize) -> Vec<f32> {
        const SCALE: f32 = 0.3;
        let stride = 3 * dim;
        let mut y = vec![f32::NAN; n * dim];
        let mut y_rows: Vec<&mut [f32]> = y.chunks_exact_mut(dim).collect();
        let of = |column: usize| Rows { floats: &rows[column * dim..], stride, dim };
        let sequence = Sequence {
            q: &rows[first * stride..],
            q_stride: stride,
            keys: Packed { k: of(1), v: of(2) },
            seen: None,
            all: 0..n_keys,
            scale: SCALE,
            soft_cap: 0.0,
            sink: None,
            biases: None,
            y: &mut y_rows,
            scratch: &mut Scratch::default(),
        };
        match lanes {
            16 => simd::run_wide(sequence),
            8 => simd::run(sequence),
            _ => sequence.run::<[f32; 8]>(),
        }
        for (t, y) in y.chunks_exact(dim).enumerate() {
            let row = |i: usize, column: usize| rows[i * stride + column * dim..][..dim].iter().map(|&x| f64::from(x));
            let weight = |i: usize| {
                let dot: f64 = row(first + t, 0).zip(row(i, 1)).map(|(q, k)| q * k).sum();
                (dot * f64::from(SCALE)).exp()
            };
            let total: f64 = (0..n_keys).map(weight).sum();
            for (d, &found) in y.iter().enumerate() {
                let want = (0..n_keys).map(|i| weight(i) * row(i, 2).nth(d).unwrap_or_default()).sum::<f64>() / total;
                assert!((f64::from(found) - want).abs() < 2e-6, "{lanes}: token {t}, {d} is {want}, found {found}");
            }
        }
        y
    }

    #[test]
    fn attention_of_a_token_does_not_depend_on_its_neighbours() {
        for (dim, n_keys) in [(32, 1), (32, 21), (64, 64), (8, 70), (24, 131)] {
            let rows = numbers(n_keys * 3 * dim);
            for lanes in [16, 8, 0] {
                let all = attention(&rows, dim, n_keys, 0, n_keys, lanes);
                for first in [0, n_keys / 2, n_keys - 1] {
                    let n = (n_keys - first).min(3);
                    let few = attention(&rows, dim, n_keys, first, n, lanes);
                    assert_eq!(few, all[first * dim..][..n * dim], "{dim}, {n_keys}, {lanes}");
                }
            }
        }
    }
}
