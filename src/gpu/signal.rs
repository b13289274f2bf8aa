//! What tells a future that something is done: a read, or all work on a queue.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::error::Error;

/// State shared by a read's future and the callback that ends it.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    result: Option<Result<(), Error>>,
    waker: Option<Waker>,
}

pub(crate) fn complete(signal: &Mutex<Signal>, result: Result<(), Error>) {
    let waker = {
        let mut signal = signal.lock().unwrap_or_else(PoisonError::into_inner);
        // The first result counts: a map may still be reported after its device was given up.
        signal.result.get_or_insert(result);
        signal.waker.take()
    };
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Resolves when its signal is given.
pub(crate) struct Completion(Arc<Mutex<Signal>>);

impl Completion {
    /// A signal and what waits for it.
    pub fn new() -> (Arc<Mutex<Signal>>, Completion) {
        let signal = Arc::new(Mutex::new(Signal::default()));
        (signal.clone(), Completion(signal))
    }

    pub fn signal(&self) -> Arc<Mutex<Signal>> {
        self.0.clone()
    }
}

impl Future for Completion {
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
