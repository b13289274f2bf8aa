//! Outcomes of GPU operations: each runs in error scopes, so that a call returns its own errors only.
//!
//! Natively, the outcome is known when the scope is popped, and the call returns the error. In a browser it arrives
//! later: the pipeline or buffer and a list of the device store it, and the next read waits for it and returns the
//! error, which names the operation that caused it.

use std::fmt;
use std::sync::Weak;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use super::signal::{Signal, complete};
use crate::error::Error;
use crate::loss::LossReason;
use crate::platform::{BoxFuture, IS_BROWSER};

/// Why an operation failed. Unlike [`Error`], it is `Clone`, because it may be reported several times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The GPU refused the operation.
    Refused { context: String, message: String },
    /// Out of memory for a buffer.
    OutOfMemory { label: String, size_bytes: u64, allocated_bytes: u64, message: String },
}

impl Failure {
    /// Converts the failure to an error.
    pub fn into_error(self) -> Error {
        match self {
            Failure::Refused { context, message } => Error::Gpu { context, message },
            Failure::OutOfMemory { label, size_bytes, allocated_bytes, message } => {
                Error::OutOfMemory { label, size_bytes, allocated_bytes, message }
            }
        }
    }
}

/// Resolves to the failure, or `None` on success.
pub(crate) type FailureCheck = BoxFuture<'static, Option<Failure>>;

/// An operation's outcome, possibly unknown yet. Clones share it; dropping a clone loses nothing.
#[derive(Clone, Debug)]
pub(crate) struct Outcome(Arc<OutcomeShared>);

struct OutcomeShared {
    state: Mutex<OutcomeState>,
    waiters: Arc<Waiters>,
}

enum OutcomeState {
    Pending(FailureCheck),
    Known(Option<Failure>),
}

impl fmt::Debug for OutcomeShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*lock(&self.state) {
            OutcomeState::Pending(_) => f.write_str("pending"),
            OutcomeState::Known(failure) => failure.fmt(f),
        }
    }
}

/// All tasks that wait for one outcome. A check wakes only the last task that polled it, which may be gone.
#[derive(Default)]
struct Waiters(Mutex<Vec<Waker>>);

impl Wake for Waiters {
    fn wake(self: Arc<Self>) {
        let waiters = std::mem::take(&mut *lock(&self.0));
        waiters.into_iter().for_each(Waker::wake);
    }
}

impl Outcome {
    /// The outcome that `check` resolves to. `Ok(None)` if the operation has succeeded already.
    pub fn of(mut check: FailureCheck) -> Result<Option<Outcome>, Failure> {
        match check.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(None) => Ok(None),
            Poll::Ready(Some(failure)) => Err(failure),
            Poll::Pending => {
                let (state, waiters) = (Mutex::new(OutcomeState::Pending(check)), Arc::default());
                Ok(Some(Outcome(Arc::new(OutcomeShared { state, waiters }))))
            }
        }
    }

    /// Resolves to the failure, or `None` on success.
    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<Option<Failure>> {
        let mut state = lock(&self.0.state);
        let OutcomeState::Pending(check) = &mut *state else {
            let OutcomeState::Known(failure) = &*state else { return Poll::Pending };
            return Poll::Ready(failure.clone());
        };
        {
            let mut waiters = lock(&self.0.waiters.0);
            if !waiters.iter().any(|waiter| waiter.will_wake(cx.waker())) {
                waiters.push(cx.waker().clone());
            }
        }
        let waker = Waker::from(self.0.waiters.clone());
        let Poll::Ready(failure) = check.as_mut().poll(&mut Context::from_waker(&waker)) else { return Poll::Pending };
        *state = OutcomeState::Known(failure.clone());
        drop(state);
        // Wakes the other waiting tasks.
        waker.wake();
        Poll::Ready(failure)
    }

    /// The failure, or `None` on success; pending if unknown.
    pub fn now(&self) -> Poll<Option<Failure>> {
        match &*lock(&self.0.state) {
            OutcomeState::Known(failure) => return Poll::Ready(failure.clone()),
            OutcomeState::Pending(_) => {}
        }
        self.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn is(&self, other: &Outcome) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Outcomes that no call has returned yet. Always empty natively.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unsettled(Arc<Mutex<Vec<Outcome>>>);

impl Unsettled {
    /// Stores an outcome for the next read.
    pub fn add(&self, outcome: Option<Outcome>) {
        if let Some(outcome) = outcome {
            let mut outcomes = lock(&self.0);
            if !outcomes.iter().any(|known| known.is(&outcome)) {
                outcomes.push(outcome);
            }
        }
    }

    /// All outcomes in the order of operations, for a read that depends on them. They stay stored until [`Reports`]
    /// resolves, so reads that are dropped lose none.
    pub fn reports(&self) -> Reports {
        let mut outcomes = lock(&self.0);
        outcomes.retain(|outcome| outcome.now() != Poll::Ready(None));
        Reports { waiting: outcomes.clone(), unsettled: self.clone() }
    }
}

/// Outcomes of everything submitted before a read.
pub(crate) struct Reports {
    waiting: Vec<Outcome>,
    unsettled: Unsettled,
}

impl Reports {
    /// Resolves to the first failure when all outcomes are known.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        let mut first = None;
        for outcome in &self.waiting {
            match outcome.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(failure) => first = first.or(failure),
            }
        }
        // Later failures follow from the first and are dropped.
        let delivered = std::mem::take(&mut self.waiting);
        if !delivered.is_empty() {
            lock(&self.unsettled.0).retain(|outcome| !delivered.iter().any(|known| known.is(outcome)));
        }
        Poll::Ready(first.map_or(Ok(()), Err))
    }
}

/// Runs an operation in error scopes for `filters`; `explain` converts the first caught error to a failure.
pub(super) fn scoped<T>(
    device: &wgpu::Device,
    filters: &[wgpu::ErrorFilter],
    explain: impl FnOnce(wgpu::Error) -> Failure + Send + 'static,
    operation: impl FnOnce() -> T,
) -> (T, Result<Option<Outcome>, Failure>) {
    let scopes = Scopes::open(device, filters);
    let done = operation();
    let error = scopes.close();
    (done, Outcome::of(Box::pin(async move { error.await.map(explain) })))
}

/// Open error scopes.
pub(super) struct Scopes(Vec<wgpu::ErrorScopeGuard>);

impl Scopes {
    /// Opens one scope per filter, the last one innermost.
    pub fn open(device: &wgpu::Device, filters: &[wgpu::ErrorFilter]) -> Scopes {
        Scopes(filters.iter().map(|&filter| device.push_error_scope(filter)).collect())
    }

    /// Closes the scopes. Resolves to the error of the innermost scope that caught one.
    pub fn close(mut self) -> impl Future<Output = Option<wgpu::Error>> {
        // wgpu requires scopes to be popped in reverse order.
        let popped: Vec<_> = std::mem::take(&mut self.0).into_iter().rev().map(wgpu::ErrorScopeGuard::pop).collect();
        async move {
            for error in popped {
                if let Some(error) = error.await {
                    return Some(error);
                }
            }
            None
        }
    }
}

impl Drop for Scopes {
    /// Closes scopes that an early return left open, in reverse order: wgpu panics otherwise.
    fn drop(&mut self) {
        while let Some(scope) = self.0.pop() {
            drop(scope);
        }
    }
}

/// A failure of `context` with the GPU API's message.
pub(super) fn refused(context: impl Into<String>) -> impl FnOnce(wgpu::Error) -> Failure + Send + 'static {
    let context = context.into();
    move |error| Failure::Refused { context, message: error.to_string() }
}

/// What the GPU reports outside operations: its loss, and errors that no scope caught.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fault(Arc<Mutex<Reported>>);

#[derive(Debug, Default)]
struct Reported {
    lost: Option<(LossReason, String)>,
    stray: Option<String>,
    /// Signals to complete when the device is lost.
    waiting: Vec<Weak<Mutex<Signal>>>,
}

impl Fault {
    /// Marks the device as lost with the first reason given, and completes all waiting signals.
    pub fn lose(&self, reason: LossReason, message: String) {
        let mut reported = lock(&self.0);
        reported.lost.get_or_insert((reason, message));
        // Nothing waits in a browser.
        if !IS_BROWSER {
            let waiting = std::mem::take(&mut reported.waiting);
            drop(reported);
            waiting.iter().filter_map(Weak::upgrade).for_each(|signal| self.tell(&signal));
        }
    }

    /// Completes a signal if the device is lost, now or later.
    pub fn tell(&self, signal: &Arc<Mutex<Signal>>) {
        let mut reported = lock(&self.0);
        if reported.lost.is_none() {
            reported.waiting.retain(|waiting| waiting.strong_count() > 0);
            reported.waiting.push(Arc::downgrade(signal));
            return;
        }
        drop(reported);
        complete(signal, self.check_lost("waiting for a submission"));
    }

    /// Why the device is lost, if it is.
    pub fn lost(&self) -> Option<LossReason> {
        lock(&self.0).lost.as_ref().map(|(reason, _)| *reason)
    }

    /// Stores an error of no known operation for the next check.
    pub fn stray(&self, message: String) {
        lock(&self.0).stray.get_or_insert(message);
    }

    /// Fails if the device is lost.
    pub fn check_lost(&self, context: &str) -> Result<(), Error> {
        match &lock(&self.0).lost {
            Some((reason, message)) => {
                Err(Error::DeviceLost { reason: *reason, context: context.into(), message: message.clone() })
            }
            None => Ok(()),
        }
    }

    /// Fails if the device is lost, or with the stray error since the last check.
    pub fn check(&self, context: &str) -> Result<(), Error> {
        self.check_lost(context)?;
        match lock(&self.0).stray.take() {
            Some(message) => Err(Error::Gpu { context: context.into(), message }),
            None => Ok(()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;

    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A check that the test resolves later, as in a browser.
    #[derive(Clone, Default)]
    struct Later(Arc<Mutex<Reported>>);

    #[derive(Default)]
    struct Reported {
        outcome: Option<Option<Failure>>,
        waker: Option<Waker>,
    }

    impl Later {
        fn outcome(&self) -> Outcome {
            Outcome::of(Box::pin(self.clone())).unwrap().unwrap()
        }

        fn tell(&self, failure: Option<Failure>) {
            let mut state = lock(&self.0);
            state.outcome = Some(failure);
            if let Some(waker) = state.waker.take() {
                drop(state);
                waker.wake();
            }
        }
    }

    impl Future for Later {
        type Output = Option<Failure>;

        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
            let mut state = lock(&self.0);
            // Like a promise, it keeps only the last waker.
            state.waker = Some(cx.waker().clone());
            state.outcome.take().map_or(Poll::Pending, Poll::Ready)
        }
    }

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn failure() -> Failure {
        Failure::Refused { context: "compiling `softmax`".into(), message: "no such type".into() }
    }

    fn poll(reports: &mut Reports) -> Poll<Result<(), Failure>> {
        reports.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn abandoned_reads_do_not_lose_a_pending_error() {
        for n_given_up in 0..3 {
            let (later, unsettled) = (Later::default(), Unsettled::default());
            unsettled.add(Some(later.outcome()));
            for _ in 0..n_given_up {
                let mut given_up = unsettled.reports();
                assert_eq!(poll(&mut given_up), Poll::Pending);
            }
            later.tell(Some(failure()));
            assert_eq!(poll(&mut unsettled.reports()), Poll::Ready(Err(failure())), "{n_given_up} given up");
            // Delivered once, it is not an error of later reads.
            assert_eq!(poll(&mut unsettled.reports()), Poll::Ready(Ok(())));
        }
    }

    #[test]
    fn a_read_waits_for_all_outcomes_and_returns_the_first_failure() {
        let (first, second, unsettled) = (Later::default(), Later::default(), Unsettled::default());
        for later in [&first, &second] {
            unsettled.add(Some(later.outcome()));
        }
        let mut reports = unsettled.reports();
        let follows = Failure::Refused { context: "submitting".into(), message: "an invalid pipeline".into() };
        second.tell(Some(follows));
        assert_eq!(poll(&mut reports), Poll::Pending);
        first.tell(Some(failure()));
        assert_eq!(poll(&mut reports), Poll::Ready(Err(failure())));
        assert_eq!(poll(&mut unsettled.reports()), Poll::Ready(Ok(())));
    }

    #[test]
    fn an_outcome_wakes_every_task_that_waits_for_it() {
        let later = Later::default();
        let outcome = later.outcome();
        let tasks = [(); 3].map(|()| Arc::new(Wakes::default()));
        for task in &tasks {
            assert!(outcome.clone().poll(&mut Context::from_waker(&Waker::from(task.clone()))).is_pending());
        }
        later.tell(None);
        for task in &tasks {
            assert_eq!(task.0.load(Ordering::Relaxed), 1);
            assert_eq!(outcome.poll(&mut Context::from_waker(&Waker::from(task.clone()))), Poll::Ready(None));
        }
    }

    #[test]
    fn device_loss_persists_and_stray_errors_are_reported_once() {
        let fault = Fault::default();
        fault.stray("stray".into());
        assert!(matches!(fault.check("running"), Err(Error::Gpu { message, .. }) if message == "stray"));
        assert!(fault.check("running").is_ok());
        fault.lose(LossReason::NoAnswer, "first".into());
        fault.lose(LossReason::Driver, "second".into());
        for _ in 0..2 {
            assert!(
                matches!(fault.check("running"), Err(Error::DeviceLost { reason: LossReason::NoAnswer, message, .. }) if message == "first")
            );
        }
    }
    #[test]
    fn device_loss_fails_current_and_later_waits() {
        use super::super::signal::SignalFuture;
        let (fault, mut signals) = (Fault::default(), Vec::new());
        let mut wait = |fault: &Fault| {
            let (signal, done) = SignalFuture::new();
            fault.tell(&signal);
            // The waiting thread holds it, however long the driver blocks that thread.
            signals.push(signal);
            done
        };
        let mut before = [wait(&fault), wait(&fault)];
        let is_told = |done: &mut SignalFuture| match Pin::new(done).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(Error::DeviceLost { reason: LossReason::SlowStep, message, .. })) => message == "slow",
            Poll::Pending => false,
            other => panic!("{other:?}"),
        };
        assert!(!before.iter_mut().any(is_told));
        fault.lose(LossReason::SlowStep, "slow".into());
        assert!(before.iter_mut().all(is_told));
        assert!(is_told(&mut wait(&fault)));
    }
}
