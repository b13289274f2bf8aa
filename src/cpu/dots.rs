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
        let n_rows = w.len() / dim;
        assert!(dim.is_multiple_of(8) && sums.len() * dim == x.len() * n_rows);
        for (x, sums) in x.chunks(ROWS_NEAR * dim).zip(sums.chunks_mut(ROWS_NEAR * n_rows)) {
            let n_tokens = x.len() / dim;
            let n_tiles = n_tokens.div_ceil(T);
            for n in (0..n_rows).step_by(N) {
                let rows = N.min(n_rows - n);
                // Weights come from memory, where a few tokens would wait for them: each tile fetches a part of the next rows.
                let mut next = w[(n + rows) * dim..].chunks((N * dim).div_ceil(n_tiles).next_multiple_of(16));
                // Tiles at the edges take their last row again.
                let w: [&[f32]; N] = std::array::from_fn(|i| &w[(n + i.min(rows - 1)) * dim..][..dim]);
                for t in (0..n_tokens).step_by(T) {
                    if let Some(next) = next.next() {
                        L::prefetch(next);
                    }
                    let tokens = T.min(n_tokens - t);
                    let x: [&[f32]; T] = std::array::from_fn(|i| &x[(t + i.min(tokens - 1)) * dim..][..dim]);
                    for (i, found) in tile::<LEN, L, N, T>(w, x).iter().take(tokens).enumerate() {
                        sums[(t + i) * n_rows + n..][..rows].copy_from_slice(&found[..rows]);
                    }
                }
            }
        }
    }
}

/// Dot products of each row of `x` with each row of `w`. Loops, since what a closure calls may not be inlined, and is then
/// compiled for any processor.
#[inline(always)]
fn tile<const LEN: usize, L: Lanes<LEN>, const N: usize, const T: usize>(
    w: [&[f32]; N],
    x: [&[f32]; T],
) -> [[f32; N]; T] {
    let mut sums = [[L::zero(); N]; T];
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
    // Rows of one length, which the compiler sees here: no bounds are checked below.
    let (w, x) = (w.map(|row| &row[..n]), x.map(|row| &row[..n]));
    let mut total = *sums;
    for k in 0..n {
        let mut runs = [L::zero(); T];
        for (run, row) in runs.iter_mut().zip(x) {
            *run = L::load(&row[k]);
        }
        for (i, row) in w.iter().enumerate() {
            let w = L::load(&row[k]);
            for (total, x) in total.iter_mut().zip(runs) {
                total[i] = w.fma(x, total[i]);
            }
        }
    }
    *sums = total;
}
