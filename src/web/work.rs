//! Work that can be cancelled.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

/// The current work, one at a time.
#[derive(Default)]
pub(super) struct CurrentWork {
    is_cancelled: Cell<bool>,
}

impl CurrentWork {
    /// The result of `work`, or `None` if cancelled.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        self.is_cancelled.set(false);
        let mut work = pin!(work);
        let outcome = poll_fn(|context| match self.is_cancelled.get() {
            true => Poll::Ready(None),
            false => work.as_mut().poll(context).map(Some),
        });
        outcome.await
    }

    /// Cancels it after the passes in flight.
    pub fn cancel(&self) {
        self.is_cancelled.set(true);
    }
}
