//! Systems with threads and files.

use std::any::Any;
use std::io;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, channel, sync_channel};
use std::thread::{self, JoinHandle, ScopedJoinHandle};
use std::time::Duration;

use rayon::prelude::*;

/// Whether this is a browser, which has no files and no `std::thread`. A constant: code for others is not linked there,
/// except what an `async` function awaits, see [`unless_browser`].
pub(crate) const IS_BROWSER: bool = false;

/// Whether kernels share work out to threads; in browsers only the module for the CPU does.
pub(crate) const KERNELS_SHARE: bool = true;

/// Memory that addresses leave for a model, if they are the limit.
pub(crate) const ADDRESSABLE_BYTES: Option<u64> = None;

/// `Send`, except in a browser.
pub(crate) trait MaybeSend: Send {}
impl<T: Send> MaybeSend for T {}

/// `Sync`, except in a browser.
pub(crate) trait MaybeSync: Sync {}
impl<T: Sync> MaybeSync for T {}

/// What a browser has no values of, and hence no code for.
pub(crate) type Native<T> = T;

/// A value for [`Native`]. Never call this in a browser.
pub(crate) fn native<T>(value: T) -> Native<T> {
    value
}

/// Any value of [`Attachable`](super::Attachable).
pub(crate) type AnyAttached = dyn Any + Send + Sync;

/// A future that another thread may poll.
pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A mapped file.
pub(crate) type FileMap = memmap2::Mmap;

/// Maps a file that is not empty and does not change while in use.
///
/// # Errors
/// Those of the system; always in a browser.
pub(crate) fn map(file: &std::fs::File) -> io::Result<FileMap> {
    // SAFETY: the mapping is read-only, and all reads are bounds-checked slices. Truncation by another process is an
    // environment fault, as for every memory-mapped reader.
    unsafe { memmap2::Mmap::map(file) }
}

/// Runs work on a new thread, where it may block.
///
/// # Errors
/// If the system cannot create a thread; always in a browser.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.into()).spawn(work)
}

/// Waits for a thread.
pub(crate) fn join(thread: Native<JoinHandle<()>>) -> thread::Result<()> {
    thread.join()
}

/// Waits for a future. Never call this in a browser.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    pollster::block_on(work)
}

/// What to await where browsers do nothing: a future, or `otherwise` in a browser, without the future's code.
pub(crate) fn unless_browser<F: Future>(work: impl FnOnce() -> F, _: impl FnOnce() -> F::Output) -> F {
    work()
}

/// Does `work` while another thread computes `beside`, which a browser drops.
///
/// # Errors
/// Those of `work`, then those of `beside`.
pub(crate) fn while_computing<E: Send>(
    beside: impl Future<Output = Result<(), E>> + Send,
    work: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    thread::scope(|scope| {
        let beside = scope.spawn(|| pollster::block_on(beside));
        work()?;
        beside.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Does `work` while another thread calls `look` after each interval. Without a thread, nothing calls it.
pub(crate) fn while_looking<T>(name: &str, interval: Duration, look: impl Fn() + Send, work: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let (working, is_over) = channel::<()>();
        let look = move || {
            while is_over.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                look();
            }
        };
        let _ = thread::Builder::new().name(name.into()).spawn_scoped(scope, look);
        let worked = work();
        drop(working);
        worked
    })
}

/// Calls `work` on `n` threads, at least on this one, and returns all results.
pub(crate) fn on_threads<T: Send>(n: usize, work: impl Fn() -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let others: Vec<_> = (1..n).map(|_| scope.spawn(&work)).collect();
        let own = work();
        let join = |other: ScopedJoinHandle<'_, T>| other.join().unwrap_or_else(|panic| resume_unwind(panic));
        others.into_iter().map(join).chain([own]).collect()
    })
}

/// Number of cores that threads can use.
pub(crate) fn n_cores() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// The threads of one device; in a browser, the caller's.
///
/// They run kernels and nothing else, and a caller waits for them without doing other work meanwhile. In a pool that
/// callers share, as rayon's global one, a caller that waits would take up another caller's work, which needs the
/// executor that the first one has: it would wait for itself.
#[derive(Debug)]
pub(crate) struct Threads {
    pool: OnceLock<rayon::ThreadPool>,
    /// As many as the pool has in which the device was opened: rayon's global one, `RAYON_NUM_THREADS`, or a caller's
    /// own.
    n: usize,
}

impl Threads {
    pub fn new() -> Threads {
        Threads { pool: OnceLock::new(), n: rayon::current_num_threads() }
    }

    /// Does the work on one of the threads, which shares chunks out to the others. Begun elsewhere, each kernel would
    /// put its chunks into their queue, wake them and go to sleep: about forty times as many switches of threads in
    /// decoding.
    ///
    /// # Errors
    /// If the system gives no threads; none in a browser.
    pub fn run<R: Send + 'static>(&self, work: impl FnOnce() -> R + Send + 'static) -> io::Result<R> {
        let (done, wait) = sync_channel(1);
        self.pool()?.spawn(move || {
            // A send fails where the caller is gone, and then nobody wants to know.
            let _ = done.send(catch_unwind(AssertUnwindSafe(work)));
        });
        match wait.recv() {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(panic)) => resume_unwind(panic),
            Err(error) => Err(io::Error::other(error)),
        }
    }

    fn pool(&self) -> io::Result<&rayon::ThreadPool> {
        if let Some(pool) = self.pool.get() {
            return Ok(pool);
        }
        let builder = rayon::ThreadPoolBuilder::new().num_threads(self.n).thread_name(|i| format!("tilewright {i}"));
        let pool = builder.build().map_err(io::Error::other)?;
        Ok(self.pool.get_or_init(|| pool))
    }
}

/// Sets the number of threads in the pools from now on. Returns the number that the process has: another one if its
/// threads already run.
pub(crate) fn set_threads(n: NonZeroUsize) -> usize {
    let _ = rayon::ThreadPoolBuilder::new().num_threads(n.get()).build_global();
    rayon::current_num_threads()
}

/// Number of threads in the current pool, which the following functions use.
pub(crate) fn n_pool_threads() -> usize {
    rayon::current_num_threads()
}

/// Calls `work(i, chunk)` for each run of `chunk_len` elements. Takes the work by reference, as [`for_each_number`],
/// so that rayon's part of it is compiled once and not for each kernel.
pub(crate) fn for_each_chunk<T: Send>(y: &mut [T], chunk_len: usize, work: &(dyn Fn(usize, &mut [T]) + Sync)) {
    y.par_chunks_mut(chunk_len).enumerate().for_each(|(i, chunk)| work(i, chunk));
}

/// Calls a worker with each number below `n`. Each piece of them gets its own worker.
pub(crate) fn for_each_number<'a>(n: usize, worker: &(dyn Fn() -> Box<dyn FnMut(usize) + 'a> + Sync)) {
    (0..n).into_par_iter().for_each_init(worker, |worker, i| worker(i));
}

/// Calls `work` with each item.
pub(crate) fn for_each_item<T: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) + Sync + Send) {
    items.collect::<Vec<T>>().into_par_iter().for_each(work);
}

/// Yields to a browser's event loop during long work; does nothing elsewhere.
pub(crate) async fn pause() {}

/// A seed that differs from call to call.
pub fn random_seed() -> u64 {
    // Each state has new random keys.
    std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0)
}
