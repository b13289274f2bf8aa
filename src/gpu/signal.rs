//! Signals a future that a read, or all work on a queue, is done.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::error::Error;

/// State shared by a future and the callback that completes it.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    result: Option<Result<(), Error>>,
    waker: Option<Waker>,
}

pub(crate) fn complete(signal: &Mutex<Signal>, result: Result<(), Error>) {
    let waker = {
        let mut signal = signal.lock().unwrap_or_else(PoisonError::into_inner);
        // The first result counts: a map may complete after its device was marked as lost.
        signal.result.get_or_insert(result);
        signal.waker.take()
    };
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Resolves when its signal is completed.
pub(crate) struct SignalFuture(Arc<Mutex<Signal>>);

impl SignalFuture {
    /// A signal and its future.
    pub fn new() -> (Arc<Mutex<Signal>>, SignalFuture) {
        let signal = Arc::new(Mutex::new(Signal::default()));
        (signal.clone(), SignalFuture(signal))
    }

    pub fn signal(&self) -> Arc<Mutex<Signal>> {
        self.0.clone()
    }
}

impl Future for SignalFuture {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut signal = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match signal.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                signal.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}
