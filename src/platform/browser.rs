//! Browsers, without files, and with threads only in the module whose memory they can share. See `native.rs` for the functions.

use std::any::Any;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io::{Error, ErrorKind, Result as IoResult};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::thread::JoinHandle;
use std::time::Duration;

use wasm_bindgen::JsCast;

pub(crate) const IS_BROWSER: bool = true;

pub(crate) const KERNELS_SHARE: bool = cfg!(target_feature = "atomics");

/// The rest of 32-bit addresses is for the program, file headers, and bytes in transit.
pub(crate) const ADDRESSABLE_BYTES: Option<u64> = Some((1 << 32) - (256 << 20));

pub(crate) trait MaybeSend {}
impl<T> MaybeSend for T {}

pub(crate) trait MaybeSync {}
impl<T> MaybeSync for T {}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Native<T>(Infallible, PhantomData<T>);

impl<T> Deref for Native<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self.0 {}
    }
}

impl<T> DerefMut for Native<T> {
    fn deref_mut(&mut self) -> &mut T {
        match self.0 {}
    }
}

pub(crate) fn native<T>(_: T) -> Native<T> {
    unreachable!("browsers have none")
}

pub(crate) type AnyAttached = dyn Any;

pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// There is none.
#[derive(Debug)]
pub enum FileMap {}

impl Deref for FileMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match *self {}
    }
}

pub(crate) fn map(_: &std::fs::File) -> IoResult<FileMap> {
    Err(Error::from(ErrorKind::Unsupported))
}

pub(crate) fn spawn(_: &str, _: impl FnOnce() + 'static) -> IoResult<JoinHandle<()>> {
    Err(Error::from(ErrorKind::Unsupported))
}

pub(crate) fn join(thread: Native<JoinHandle<()>>) -> std::thread::Result<()> {
    match thread.0 {}
}

pub(crate) fn block_on<T>(_: impl Future<Output = T>) -> T {
    unreachable!("browsers cannot block")
}

pub(crate) fn unless_browser<F: Future>(
    _: impl FnOnce() -> F,
    otherwise: impl FnOnce() -> F::Output,
) -> Ready<F::Output> {
    ready(otherwise())
}

pub(crate) fn while_computing<E>(
    _: impl Future<Output = Result<(), E>>,
    work: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    work()
}

pub(crate) fn while_looking<T>(_: &str, _: Duration, _: impl Fn(), work: impl FnOnce() -> T) -> T {
    work()
}

pub(crate) fn on_threads<T>(_: usize, work: impl Fn() -> T) -> Vec<T> {
    vec![work()]
}

pub(crate) fn n_cores() -> usize {
    1
}

#[derive(Debug)]
pub(crate) struct Threads;

impl Threads {
    pub fn new() -> Threads {
        Threads
    }

    pub fn run<R>(&self, work: impl FnOnce() -> R) -> IoResult<R> {
        Ok(work())
    }
}

/// The threads that share the module's memory.
#[cfg(target_feature = "atomics")]
pub(crate) static POOL: super::pool::Pool = super::pool::Pool::new();

pub(crate) fn n_pool_threads() -> usize {
    #[cfg(target_feature = "atomics")]
    return POOL.threads();
    #[cfg(not(target_feature = "atomics"))]
    1
}

pub(crate) fn for_each_chunk<T: Send>(y: &mut [T], chunk_len: usize, work: &(dyn Fn(usize, &mut [T]) + Sync)) {
    #[cfg(target_feature = "atomics")]
    {
        struct Shared<T>(*mut T);
        // SAFETY: it stands for a slice that is borrowed as a whole, of which each thread has chunks of its own.
        unsafe impl<T: Send> Sync for Shared<T> {}

        let (len, all) = (y.len(), &Shared(y.as_mut_ptr()));
        POOL.for_each_number(len.div_ceil(chunk_len), &|| {
            Box::new(move |i| {
                let first = i * chunk_len;
                // SAFETY: numbers are below the number of chunks and come once each.
                let chunk = unsafe { std::slice::from_raw_parts_mut(all.0.add(first), chunk_len.min(len - first)) };
                work(i, chunk);
            })
        });
    }
    #[cfg(not(target_feature = "atomics"))]
    y.chunks_mut(chunk_len).enumerate().for_each(|(i, chunk)| work(i, chunk));
}

pub(crate) fn for_each_number<'a>(n: usize, worker: &(dyn Fn() -> Box<dyn FnMut(usize) + 'a> + Sync)) {
    #[cfg(target_feature = "atomics")]
    POOL.for_each_number(n, worker);
    #[cfg(not(target_feature = "atomics"))]
    (0..n).for_each(worker());
}

pub(crate) fn for_each_item<T>(items: impl Iterator<Item = T>, work: impl Fn(T)) {
    items.for_each(work);
}

pub(crate) async fn pause() {
    // Windows, Node and Deno are not workers, but have this method as well.
    let scope = js_sys::global().unchecked_into::<web_sys::WorkerGlobalScope>();
    let promise = js_sys::Promise::new(&mut |resolve, _| {
        // It can only fail for a callback given as a string.
        let _ = scope.set_timeout_with_callback_and_timeout_and_arguments_0(&resolve, 0);
    });
    // The promise is never rejected.
    let _ = wasm_bindgen_futures::JsFuture::from(promise).await;
}

/// A seed that differs from call to call.
pub fn random_seed() -> u64 {
    // 53 random bits.
    (js_sys::Math::random() * 9_007_199_254_740_992.0) as u64
}
