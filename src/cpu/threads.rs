//! Work shared out over the processor's threads; on the web there is one.

use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{OnceLock, mpsc};

use crate::error::Error;

/// Operations below which a kernel stays on the calling thread: waking the others takes longer than this work.
const PARALLEL_OPS: usize = 1 << 16;

/// The threads of one device; on the web, where there are none, the caller's.
///
/// They run kernels and nothing else, and a caller waits for them without doing other work meanwhile. In a pool that callers
/// share, as rayon's global one, a caller that waits would take up another caller's work, which needs the executor that the
/// first one has: it would wait for itself.
#[derive(Debug)]
pub(super) struct Threads {
    #[cfg(not(target_arch = "wasm32"))]
    pool: OnceLock<rayon::ThreadPool>,
    /// As many as the pool has in which the device was opened: rayon's global one, `RAYON_NUM_THREADS`, or a caller's own.
    #[cfg(not(target_arch = "wasm32"))]
    n: usize,
}

#[cfg(not(target_arch = "wasm32"))]
impl Threads {
    pub fn new() -> Threads {
        Threads { pool: OnceLock::new(), n: rayon::current_num_threads() }
    }

    /// Does the work on one of the threads, which shares chunks out to the others. Begun elsewhere, each kernel would put
    /// its chunks into their queue, wake them and go to sleep: about forty times as many switches of threads in decoding.
    ///
    /// # Errors
    /// [`Error::Io`] if the system gives no threads.
    pub fn run<R: Send + 'static>(&self, work: impl FnOnce() -> R + Send + 'static) -> Result<R, Error> {
        let (done, wait) = mpsc::sync_channel(1);
        self.pool()?.spawn(move || {
            // A send fails where the caller is gone, and then nobody wants to know.
            let _ = done.send(catch_unwind(AssertUnwindSafe(work)));
        });
        match wait.recv() {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(panic)) => resume_unwind(panic),
            Err(error) => Err(no_threads(io::Error::other(error))),
        }
    }

    fn pool(&self) -> Result<&rayon::ThreadPool, Error> {
        if let Some(pool) = self.pool.get() {
            return Ok(pool);
        }
        let builder = rayon::ThreadPoolBuilder::new().num_threads(self.n).thread_name(|i| format!("tilewright {i}"));
        let pool = builder.build().map_err(|error| no_threads(io::Error::other(error)))?;
        Ok(self.pool.get_or_init(|| pool))
    }
}

fn no_threads(source: io::Error) -> Error {
    Error::Io { path: "threads of the CPU".into(), source }
}

#[cfg(target_arch = "wasm32")]
impl Threads {
    pub fn new() -> Threads {
        Threads {}
    }

    /// Does the work.
    ///
    /// # Errors
    /// None.
    pub fn run<R>(&self, work: impl FnOnce() -> R) -> Result<R, Error> {
        Ok(work())
    }
}

/// Calls `work(i, chunk)` for each run of `chunk_len` elements of `y`, the last one perhaps shorter; on several threads
/// if all of it takes many operations, of which `ops` is an estimate.
pub(crate) fn for_each_chunk<T: Send>(
    y: &mut [T],
    chunk_len: usize,
    ops: usize,
    work: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    #[cfg(not(target_arch = "wasm32"))]
    if ops >= PARALLEL_OPS && y.len() > chunk_len {
        return share_chunks(y, chunk_len, &work);
    }
    #[cfg(target_arch = "wasm32")]
    let _ = (ops, PARALLEL_OPS);
    y.chunks_mut(chunk_len).enumerate().for_each(|(i, chunk)| work(i, chunk));
}

/// Shares chunks out over the threads. Takes the work by reference, as [`share_numbers`] does, so that rayon's part of it is
/// compiled once and not for each kernel.
#[cfg(not(target_arch = "wasm32"))]
fn share_chunks<T: Send>(y: &mut [T], chunk_len: usize, work: &(dyn Fn(usize, &mut [T]) + Sync)) {
    use rayon::prelude::*;
    y.par_chunks_mut(chunk_len).enumerate().for_each(|(i, chunk)| work(i, chunk));
}

/// Shares the numbers below `n` out over the threads. Each piece of them gets a worker of its own.
#[cfg(not(target_arch = "wasm32"))]
fn share_numbers<'a>(n: usize, worker: &(dyn Fn() -> Box<dyn FnMut(usize) + 'a> + Sync)) {
    use rayon::prelude::*;
    (0..n).into_par_iter().for_each_init(worker, |worker, i| worker(i));
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
    #[cfg(not(target_arch = "wasm32"))]
    if ops >= PARALLEL_OPS && down * across > 1 {
        let (work, tile) = (&work, &tile);
        return share_numbers(down * across, &|| {
            let mut scratch = S::default();
            Box::new(move |i| work(&mut scratch, tile(i)))
        });
    }
    #[cfg(target_arch = "wasm32")]
    let _ = (ops, PARALLEL_OPS);
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
