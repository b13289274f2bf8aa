//! Attention of tokens that see all of their sequence, as encoders have it: one query in each lane of a vector, so that
//! neither its scores nor their sum are added up across lanes. A key's elements, and its value's, are the same in all lanes.
//!
//! A query meets the keys of its sequence in one order, by itself, whatever stands in the other lanes: its result is the
//! same in any batch.

use super::simd::{self, Exp, Lanes, WideWork};

/// Keys whose scores are found before they are weighted.
const TILE: usize = 64;
/// Sums side by side, so that none waits for the one before: scores of so many keys, then so many columns of values.
const TOGETHER: usize = 8;

/// What a thread computes in.
#[derive(Default)]
pub(super) struct Scratch {
    /// Queries, `[D, lanes]`.
    q: Vec<f32>,
    /// `[keys of a tile, lanes]`.
    scores: Vec<f32>,
    /// Sums of values, `[D, lanes]`.
    y: Vec<f32>,
}

/// Whether heads of this size have whole runs of columns.
pub(super) fn takes(head_dim: usize) -> bool {
    head_dim.is_multiple_of(TOGETHER)
}

/// Attention of some tokens of a sequence in one head.
pub(super) struct Sequence<'a, 'y> {
    /// The first token's query, and `q_stride` elements on the next one's.
    pub q: &'a [f32],
    pub q_stride: usize,
    /// Those of the sequence's first token, and of the others.
    pub k: Rows<'a>,
    pub v: Rows<'a>,
    pub n_keys: usize,
    pub scale: f32,
    /// Of the first token.
    pub biases: Option<HeadBiases<'a>>,
    /// A row of each token.
    pub y: &'a mut [&'y mut [f32]],
    pub scratch: &'a mut Scratch,
}

impl WideWork for Sequence<'_, '_> {
    #[inline(always)]
    fn run_wide<const LEN: usize, L: Lanes<LEN>>(self) {
        let Sequence { q, q_stride, k, v, n_keys, scale, biases, y, scratch } = self;
        let dim = k.dim;
        // Of products; with biases they are scores already.
        let factor = if biases.is_some() { 1.0 } else { scale };
        let Scratch { q: turned, scores, y: sums } = scratch;
        turned.resize(dim * LEN, 0.0);
        scores.resize(TILE * LEN, 0.0);
        sums.resize(dim * LEN, 0.0);
        let (turned, scores, sums) = (lanes_mut(turned), lanes_mut(scores), lanes_mut(sums));
        for (i, y) in y.chunks_mut(LEN).enumerate() {
            for (block, turned) in turned.chunks_mut(LEN).enumerate() {
                let mut square = [[0.0; LEN]; LEN];
                for (lane, square) in square.iter_mut().enumerate() {
                    // Lanes behind the last query repeat it.
                    let row = &q[(i * LEN + lane.min(y.len() - 1)) * q_stride..][..dim];
                    copy::<LEN>(&row[block * LEN..], square);
                }
                L::transpose(&mut square);
                for (turned, square) in turned.iter_mut().zip(square) {
                    *turned = square;
                }
            }
            sums.as_flattened_mut().fill(0.0);
            let (mut highest, mut total) = ([f32::MIN; LEN], [0.0; LEN]);
            for start in (0..n_keys).step_by(TILE) {
                let n = TILE.min(n_keys - start);
                score::<LEN, L>(turned, &k, start, n, scores);
                let scores = &mut scores[..n];
                if let Some(biases) = &biases {
                    for (key, scores) in scores.iter_mut().enumerate() {
                        for (lane, score) in scores.iter_mut().enumerate() {
                            *score = scale * *score + biases.get(i * LEN + lane, start + key);
                        }
                    }
                }
                let mut next = highest;
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
                highest = next;
                add_values::<LEN, L>(scores, &v, start, &rescale, sums);
            }
            let mut inverse = [0.0; LEN];
            for (inverse, total) in inverse.iter_mut().zip(total) {
                *inverse = 1.0 / total;
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
pub(super) struct Rows<'a> {
    pub floats: &'a [f32],
    pub stride: usize,
    pub dim: usize,
}

impl Rows<'_> {
    #[inline(always)]
    fn row(&self, i: usize) -> &[f32] {
        &self.floats[i * self.stride..][..self.dim]
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

/// `scores[i] = q . k[start + i]` for `n` keys. Loops, since what a closure calls may be compiled for any processor.
#[inline(always)]
fn score<const LEN: usize, L: Lanes<LEN>>(
    q: &[[f32; LEN]],
    k: &Rows<'_>,
    start: usize,
    n: usize,
    scores: &mut [[f32; LEN]],
) {
    let dim = q.len();
    for (block, scores) in scores.as_chunks_mut::<TOGETHER>().0.iter_mut().enumerate() {
        let first = block * TOGETHER;
        if first >= n {
            break;
        }
        let mut rows = [&k.floats[..0]; TOGETHER];
        for (i, row) in rows.iter_mut().enumerate() {
            // Rows behind the last key repeat it.
            *row = &k.row(start + (first + i).min(n - 1))[..dim];
        }
        let mut sums = [L::splat(0.0); TOGETHER];
        for (d, q) in q.iter().enumerate() {
            let q = L::load(q);
            for (sum, row) in sums.iter_mut().zip(rows) {
                *sum = L::splat(row[d]).fma(q, *sum);
            }
        }
        for (scores, sum) in scores.iter_mut().zip(sums) {
            sum.store(scores);
        }
    }
}

/// `y = rescale * y + weights * v[start..]`. A tile is summed on its own first, since adding keys one by one to a long sum
/// would lose digits.
#[inline(always)]
fn add_values<const LEN: usize, L: Lanes<LEN>>(
    weights: &[[f32; LEN]],
    v: &Rows<'_>,
    start: usize,
    rescale: &[f32; LEN],
    y: &mut [[f32; LEN]],
) {
    let rescale = L::load(rescale);
    for (block, y) in y.as_chunks_mut::<TOGETHER>().0.iter_mut().enumerate() {
        let mut sums = [L::splat(0.0); TOGETHER];
        for (i, weights) in weights.iter().enumerate() {
            let weights = L::load(weights);
            let columns = &v.row(start + i)[block * TOGETHER..][..TOGETHER];
            for (sum, &column) in sums.iter_mut().zip(columns) {
                *sum = L::splat(column).fma(weights, *sum);
            }
        }
        for (y, sum) in y.iter_mut().zip(sums) {
            rescale.fma(L::load(y), sum).store(y);
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
            k: of(1),
            v: of(2),
            n_keys,
            scale: SCALE,
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
