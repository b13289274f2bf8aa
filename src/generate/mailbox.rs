//! An async queue between tasks and threads.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// A first-in, first-out queue. With a single value that each taker puts back, it is a non-blocking lock.
pub(super) struct Mailbox<T>(Mutex<MailboxState<T>>);

struct MailboxState<T> {
    values: VecDeque<T>,
    /// Tasks waiting for a value.
    takers: Vec<Waker>,
}

impl<T> Mailbox<T> {
    pub fn new(values: impl IntoIterator<Item = T>) -> Mailbox<T> {
        Mailbox(Mutex::new(MailboxState { values: values.into_iter().collect(), takers: Vec::new() }))
    }

    pub fn put(&self, value: T) {
        let mut content = self.content();
        content.values.push_back(value);
        let takers = std::mem::take(&mut content.takers);
        drop(content);
        // One taker gets the value; the others wait again. Stale wakers are harmless.
        takers.into_iter().for_each(Waker::wake);
    }

    /// Waits for the next value.
    pub async fn take(&self) -> T {
        let next = poll_fn(|cx| {
            let mut content = self.content();
            if let Some(value) = content.values.pop_front() {
                return Poll::Ready(value);
            }
            if !content.takers.iter().any(|taker| taker.will_wake(cx.waker())) {
                content.takers.push(cx.waker().clone());
            }
            Poll::Pending
        });
        next.await
    }

    fn content(&self) -> MutexGuard<'_, MailboxState<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn mailbox_values_arrive_in_order_and_wake_all_waiters() {
        let mailbox = Mailbox::new([1, 2]);
        let woken: [Arc<Woken>; 2] = Default::default();
        let wakers = woken.clone().map(Waker::from);
        let [mut first, mut second] = wakers.each_ref().map(Context::from_waker);
        let numbers = || woken.each_ref().map(|woken| woken.0.load(Ordering::Relaxed));
        for expected in [1, 2] {
            assert_eq!(pin!(mailbox.take()).poll(&mut first), Poll::Ready(expected));
        }
        let mut waits = pin!(mailbox.take());
        {
            let mut gives_up = pin!(mailbox.take());
            assert!(gives_up.as_mut().poll(&mut first).is_pending() && waits.as_mut().poll(&mut second).is_pending());
            assert!(waits.as_mut().poll(&mut second).is_pending());
        }
        mailbox.put(3);
        assert_eq!(numbers(), [1, 1]);
        assert_eq!(waits.as_mut().poll(&mut second), Poll::Ready(3));
        mailbox.put(4);
        assert_eq!(numbers(), [1, 1], "nobody waits any more");
        assert_eq!(pin!(mailbox.take()).poll(&mut second), Poll::Ready(4));
    }
}
