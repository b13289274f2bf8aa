//! A mutex-guarded value that tasks can wait on.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

#[derive(Default)]
pub(super) struct Watched<T>(Mutex<WatchedValue<T>>);

#[derive(Default)]
struct WatchedValue<T> {
    value: T,
    wakers: Vec<Waker>,
}

impl<T> Watched<T> {
    pub fn new(value: T) -> Watched<T> {
        Watched(Mutex::new(WatchedValue { value, wakers: Vec::new() }))
    }

    fn inner(&self) -> MutexGuard<'_, WatchedValue<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads or changes the value without waking waiters.
    pub fn with<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        look(&mut self.inner().value)
    }

    /// Changes the value and wakes all waiters.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut inner = self.inner();
        let changed = change(&mut inner.value);
        let wakers = std::mem::take(&mut inner.wakers);
        drop(inner);
        wakers.into_iter().for_each(Waker::wake);
        changed
    }

    /// Waits until `take` returns a value.
    pub async fn until<R>(&self, mut take: impl FnMut(&mut T) -> Option<R>) -> R {
        poll_fn(|context| {
            let mut inner = self.inner();
            match take(&mut inner.value) {
                Some(found) => Poll::Ready(found),
                None => {
                    if !inner.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                        inner.wakers.push(context.waker().clone());
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }
}
