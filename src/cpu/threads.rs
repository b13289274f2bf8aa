//! Work shared out over the processor's threads; on the web there is one.

/// Operations below which a kernel stays on the calling thread: waking the others takes longer than this work.
const PARALLEL_OPS: usize = 1 << 16;

/// Does the work on one of the threads that share chunks out. Begun elsewhere, each kernel would put its chunks into
/// their queue, wake them and go to sleep: about forty times as many switches of threads in decoding.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn enter<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| work())
}

#[cfg(target_arch = "wasm32")]
pub(super) fn enter<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// Calls `work(i, chunk)` for each run of `chunk_len` elements of `y`, the last one perhaps shorter; on several threads
/// if all of it takes many operations, of which `ops` is an estimate.
pub(super) fn for_each_chunk<T: Send>(
    y: &mut [T],
    chunk_len: usize,
    ops: usize,
    work: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    #[cfg(not(target_arch = "wasm32"))]
    if ops >= PARALLEL_OPS && y.len() > chunk_len {
        use rayon::prelude::*;
        y.par_chunks_mut(chunk_len).enumerate().for_each(|(i, chunk)| work(i, chunk));
        return;
    }
    #[cfg(target_arch = "wasm32")]
    let _ = (ops, PARALLEL_OPS);
    y.chunks_mut(chunk_len).enumerate().for_each(|(i, chunk)| work(i, chunk));
}

/// Length of the pieces into which `len` equal parts are cut so that every thread gets several, within bounds.
pub(super) fn chunk_len(len: usize, shortest: usize, longest: usize) -> usize {
    /// More pieces than threads even out threads that are slow or busy.
    const PIECES: usize = 4;
    len.div_ceil(PIECES * super::threads()).next_multiple_of(shortest).clamp(shortest, longest)
}
