//! Work shared out over the processor's threads; on the web the module for GPUs has one.

use std::marker::PhantomData;
use std::ops::Range;

use crate::error::Error;
use crate::platform::{self, KERNELS_SHARE, MaybeSend, Threads};

/// Operations below which a kernel stays on the calling thread: waking the others takes longer than this work.
const PARALLEL_OPS: usize = 1 << 16;

/// Sets the number of threads of devices that are opened from now on, and of everything else in this process that
/// shares work out. Without a call they are `RAYON_NUM_THREADS`, else as many as the process may use: on Linux, that
/// respects CPU affinity and the CPU quota of the control group.
///
/// # Errors
/// [`Error::Option`] if the process already has another number of threads.
#[cfg(not(target_arch = "wasm32"))]
pub fn set_threads(n: std::num::NonZeroUsize) -> Result<(), Error> {
    match platform::set_threads(n) {
        found if found == n.get() => Ok(()),
        found => {
            let expected = format!("{found}, the number of threads that already run");
            Err(Error::Option { option: "threads", expected, found: n.to_string() })
        }
    }
}

/// Does the work on one of a device's threads.
///
/// # Errors
/// [`Error::Io`] if the system gives no threads.
pub(super) fn run_on<R: MaybeSend + 'static>(
    threads: &Threads,
    work: impl FnOnce() -> R + MaybeSend + 'static,
) -> Result<R, Error> {
    threads.run(work).map_err(|source| Error::Io { path: "threads of the CPU".into(), source })
}

/// Calls `work(i, chunk)` for each run of `chunk_len` elements of `y`, the last one perhaps shorter; on several threads
/// if all of it takes many operations, of which `ops` is an estimate.
pub(crate) fn for_each_chunk<T: Send>(
    y: &mut [T],
    chunk_len: usize,
    ops: usize,
    work: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    if KERNELS_SHARE && ops >= PARALLEL_OPS && y.len() > chunk_len {
        return platform::for_each_chunk(y, chunk_len, &work);
    }
    y.chunks_mut(chunk_len).enumerate().for_each(|(i, chunk)| work(i, chunk));
}

/// Some columns of some rows of a matrix, which no other thread has.
pub(super) struct Tile<'a> {
    first: *mut f32,
    stride: usize,
    /// Where in the matrix they are; columns count from the first that is written.
    pub rows: Range<usize>,
    pub columns: Range<usize>,
    matrix: PhantomData<&'a mut [f32]>,
}

impl Tile<'_> {
    /// The tile's part of each row.
    pub fn rows_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        let (first, stride, width) = (self.first, self.stride, self.columns.len());
        // SAFETY: `for_each_tile` makes tiles inside the matrix that do not overlap, and this one is borrowed as a whole;
        // its rows do not overlap either, since a stride is at least as long as they are.
        (0..self.rows.len()).map(move |i| unsafe { std::slice::from_raw_parts_mut(first.add(i * stride), width) })
    }
}

/// Calls `work(scratch, tile)` for each tile of `height` rows and `width` columns that the columns `range` of `y`,
/// `[rows, stride]`, are cut into, those at the ends perhaps smaller; on several threads if all of it takes many operations,
/// of which `ops` is an estimate. The scratch is one of several that go from tile to tile.
pub(super) fn for_each_tile<S: Default>(
    y: &mut [f32],
    stride: usize,
    range: Range<usize>,
    [height, width]: [usize; 2],
    ops: usize,
    work: impl Fn(&mut S, Tile<'_>) + Sync + Send,
) {
    /// Shared by threads that take different tiles.
    struct Matrix(*mut f32);
    // SAFETY: it stands for a slice of floats that is borrowed as a whole, of which each thread writes tiles of its own.
    unsafe impl Sync for Matrix {}

    if y.is_empty() || range.is_empty() {
        return;
    }
    assert!(range.end <= stride && y.len().is_multiple_of(stride) && height > 0 && width > 0);
    let (n_rows, n_columns, matrix) = (y.len() / stride, range.len(), Matrix(y.as_mut_ptr()));
    let (down, across) = (n_rows.div_ceil(height), n_columns.div_ceil(width));
    let tile = |i: usize| {
        let matrix = &matrix;
        let (row, column) = (i / across * height, i % across * width);
        let (rows, columns) = (row..(row + height).min(n_rows), column..(column + width).min(n_columns));
        // SAFETY: the row is one of the matrix, and the range ends inside it.
        let first = unsafe { matrix.0.add(row * stride + range.start + column) };
        Tile { first, stride, rows, columns, matrix: PhantomData }
    };
    if KERNELS_SHARE && ops >= PARALLEL_OPS && down * across > 1 {
        let (work, tile) = (&work, &tile);
        return platform::for_each_number(down * across, &|| {
            let mut scratch = S::default();
            Box::new(move |i| work(&mut scratch, tile(i)))
        });
    }
    let mut scratch = S::default();
    (0..down * across).for_each(|i| work(&mut scratch, tile(i)));
}

/// Length of the pieces into which `len` equal parts are cut so that every thread gets several, within bounds.
pub(super) fn chunk_len(len: usize, shortest: usize, longest: usize) -> usize {
    /// More pieces than threads even out threads that are slow or busy.
    const PIECES: usize = 4;
    len.div_ceil(PIECES * super::threads()).next_multiple_of(shortest).clamp(shortest, longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_each_element_once() {
        for ([n_rows, stride], range, shape) in [
            ([7, 11], 2..10, [3, 4]),
            ([1, 5], 0..5, [1, 2]),
            ([64, 33], 0..33, [64, 16]),
            ([5, 4], 1..1, [2, 2]),
            ([9, 6], 0..3, [100, 100]),
        ] {
            let mut y = vec![0.0f32; n_rows * stride];
            for_each_tile(&mut y, stride, range.clone(), shape, usize::MAX, |(): &mut (), mut tile| {
                let (rows, columns) = (tile.rows.clone(), tile.columns.clone());
                assert!(rows.len() <= shape[0] && columns.len() <= shape[1]);
                for (row, y) in rows.zip(tile.rows_mut()) {
                    assert_eq!(y.len(), columns.len());
                    y.iter_mut().zip(columns.clone()).for_each(|(y, column)| *y += (1 + row * stride + column) as f32);
                }
            });
            for (i, &y) in y.iter().enumerate() {
                let (row, column) = (i / stride, i % stride);
                let want = if range.contains(&column) { 1 + row * stride + column - range.start } else { 0 };
                assert_eq!(y, want as f32, "{row}, {column}");
            }
        }
    }
}
