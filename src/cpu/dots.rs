//! Products of two matrices whose rows are both contiguous along K, a tile of dot products at a time in registers: nothing
//! is packed, and each result is summed in one order, wherever its tile begins and however many rows there are.

use super::simd::{Vector, Work};

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

impl Work for Dots<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        // As many sums as there are registers for them, beside what is multiplied.
        match V::SUMS {
            ..12 => self.tiled::<V, 2, 2>(),
            12.. => self.tiled::<V, 4, 3>(),
        }
    }
}

impl Dots<'_> {
    #[inline(always)]
    fn tiled<V: Vector, const N: usize, const T: usize>(self) {
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
                        V::prefetch(next);
                    }
                    let tokens = T.min(n_tokens - t);
                    let x: [&[f32]; T] = std::array::from_fn(|i| &x[(t + i.min(tokens - 1)) * dim..][..dim]);
                    for (i, found) in tile::<V, N, T>(w, x).iter().take(tokens).enumerate() {
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
fn tile<V: Vector, const N: usize, const T: usize>(w: [&[f32]; N], x: [&[f32]; T]) -> [[f32; N]; T] {
    let mut sums = [[V::splat(0.0); N]; T];
    let w = w.map(|row| row.as_chunks::<8>().0);
    let x = x.map(|row| row.as_chunks::<8>().0);
    let n = w[0].len();
    // Rows of one length, which the compiler sees here: no bounds are checked below.
    let (w, x) = (w.map(|row| &row[..n]), x.map(|row| &row[..n]));
    for k in 0..n {
        let mut eights = [V::splat(0.0); T];
        for (eight, row) in eights.iter_mut().zip(x) {
            *eight = V::load(&row[k]);
        }
        for (i, row) in w.iter().enumerate() {
            let w = V::load(&row[k]);
            for (sums, x) in sums.iter_mut().zip(eights) {
                sums[i] = w.fma(x, sums[i]);
            }
        }
    }
    let mut found = [[0.0; N]; T];
    for (found, sums) in found.iter_mut().zip(sums) {
        *found = V::sum_each(sums);
    }
    found
}
