//! Products of two matrices whose rows are both contiguous along K, a tile of dot products at a time in registers: nothing
//! is packed, and each result is summed in one order, wherever its tile begins and however many rows there are.

use super::simd::{Lanes, WideWork};

/// Rows of `x` that stay near while all of `w` meets them.
const ROWS_NEAR: usize = 48;

/// `sums[t, n] = x[t] . w[n]`; rows of `w` and `x` have `dim` elements, a multiple of 8.
pub(super) struct Dots<'a> {
    pub w: &'a [f32],
    pub x: &'a [f32],
    pub dim: usize,
    /// `[rows of x, rows of w]`.
    pub sums: &'a mut [f32],
}

impl WideWork for Dots<'_> {
    #[inline(always)]
    fn run_wide<const LEN: usize, L: Lanes<LEN>>(self) {
        // As many sums as there are registers for them, beside what is multiplied.
        match L::SUMS {
            ..12 => self.tiled::<LEN, L, 2, 2>(),
            12..16 => self.tiled::<LEN, L, 4, 3>(),
            16.. => self.tiled::<LEN, L, 4, 4>(),
        }
    }
}

impl Dots<'_> {
    #[inline(always)]
    fn tiled<const LEN: usize, L: Lanes<LEN>, const N: usize, const T: usize>(self) {
        let Dots { w, x, dim, sums } = self;
        let (n_rows, n_tokens) = (w.len() / dim, x.len() / dim);
        assert!(dim.is_multiple_of(8) && w.len() == n_rows * dim && x.len() == n_tokens * dim);
        assert!(sums.len() == n_tokens * n_rows);
        // Blocks of one size, so that none is smaller than a tile if there is any that is not.
        let near = n_tokens.div_ceil(n_tokens.div_ceil(ROWS_NEAR).max(1)).max(1);
        for (x, sums) in x.chunks(near * dim).zip(sums.chunks_mut(near * n_rows)) {
            match (n_rows >= N, x.len() >= T * dim) {
                (true, true) => block::<LEN, L, N, T>(w, x, dim, sums),
                (true, false) => block::<LEN, L, N, 1>(w, x, dim, sums),
                (false, _) => block::<LEN, L, 1, 1>(w, x, dim, sums),
            }
        }
    }
}

/// Where tiles of `size` begin that cover `len`; the last one may begin inside another, whose results it finds again.
fn starts(len: usize, size: usize) -> impl Iterator<Item = usize> {
    (0..len.div_ceil(size)).map(move |i| (i * size).min(len - size))
}

/// At least `N` rows of `w` and `T` of `x`.
#[inline(always)]
fn block<const LEN: usize, L: Lanes<LEN>, const N: usize, const T: usize>(
    w: &[f32],
    x: &[f32],
    dim: usize,
    sums: &mut [f32],
) {
    /// Floats of a tile's rows that leave the nearest cache room for those of the next one.
    const FEW: usize = 1 << 12;
    let (n_rows, n_tokens) = (w.len() / dim, x.len() / dim);
    let fetched = if N * dim <= FEW { (N * dim).div_ceil(n_tokens.div_ceil(T)).next_multiple_of(16) } else { 0 };
    for n in starts(n_rows, N) {
        // Weights come from memory, where a few tokens would wait for them: each tile fetches a part of the next rows.
        let mut next = &w[((n + N) * dim).min(w.len())..];
        let w = &w[n * dim..][..N * dim];
        for t in starts(n_tokens, T) {
            let (now, later) = next.split_at(fetched.min(next.len()));
            L::prefetch(now);
            next = later;
            let found = tile::<LEN, L, N, T>(w, &x[t * dim..][..T * dim], dim);
            for (i, found) in found.into_iter().enumerate() {
                sums[(t + i) * n_rows + n..][..N].copy_from_slice(&found);
            }
        }
    }
}

/// Dot products of each row of `x` with each row of `w`. Loops, since what a closure calls may not be inlined, and is then
/// compiled for any processor.
#[inline(always)]
fn tile<const LEN: usize, L: Lanes<LEN>, const N: usize, const T: usize>(
    w: &[f32],
    x: &[f32],
    dim: usize,
) -> [[f32; N]; T] {
    let w: [&[f32]; N] = std::array::from_fn(|i| &w[i * dim..][..dim]);
    let x: [&[f32]; T] = std::array::from_fn(|i| &x[i * dim..][..dim]);
    let mut sums = [[L::splat(0.0); N]; T];
    let (w_runs, x_runs) = (w.map(|row| row.as_chunks::<LEN>().0), x.map(|row| row.as_chunks::<LEN>().0));
    add(w_runs, x_runs, &mut sums);
    let at = w_runs[0].len() * LEN;
    if w[0].len() > at {
        // A rest shorter than a run, with zeros behind it.
        let (w, x) = (w.map(|row| [padded(&row[at..])]), x.map(|row| [padded(&row[at..])]));
        add(w.each_ref().map(|run| &run[..]), x.each_ref().map(|run| &run[..]), &mut sums);
    }
    let mut found = [[0.0; N]; T];
    for (found, sums) in found.iter_mut().zip(sums) {
        *found = L::sum_each(sums);
    }
    found
}

fn padded<const LEN: usize>(rest: &[f32]) -> [f32; LEN] {
    let mut run = [0.0; LEN];
    run[..rest.len()].copy_from_slice(rest);
    run
}

/// Adds the products of all runs.
#[inline(always)]
fn add<const LEN: usize, L: Lanes<LEN>, const N: usize, const T: usize>(
    w: [&[[f32; LEN]]; N],
    x: [&[[f32; LEN]]; T],
    sums: &mut [[L; N]; T],
) {
    let n = w[0].len();
    assert!(w.iter().all(|row| row.len() == n) && x.iter().all(|row| row.len() == n));
    let mut total = *sums;
    for k in 0..n {
        let mut runs = [L::splat(0.0); T];
        for (run, row) in runs.iter_mut().zip(x) {
            // SAFETY: all rows have `n` runs, as just checked. Checked again for each run, the sums would take a
            // twentieth more time.
            *run = L::load(unsafe { row.get_unchecked(k) });
        }
        for (i, row) in w.iter().enumerate() {
            // SAFETY: as above.
            let w = L::load(unsafe { row.get_unchecked(k) });
            for (total, x) in total.iter_mut().zip(runs) {
                total[i] = w.fma(x, total[i]);
            }
        }
    }
    *sums = total;
}
