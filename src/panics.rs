//! Converts panics to errors, so that nothing waits forever for a dead thread.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

use crate::error::Error;
use crate::platform::IS_BROWSER;

/// Runs `work`. After a panic, the caller must discard state that `work` may have half changed.
///
/// # Errors
/// [`Error::Panic`] if `work` panics. Never on the web, where a panic aborts the module.
pub fn caught<T>(context: &str, work: impl FnOnce() -> T) -> Result<T, Error> {
    if IS_BROWSER {
        return Ok(work());
    }
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        // The payloads of `panic!` with and without arguments.
        let texts = (panic.downcast_ref::<String>().map(String::as_str), panic.downcast_ref::<&str>().copied());
        let message = texts.0.or(texts.1).unwrap_or("no message").into();
        let_go(panic);
        Error::Panic { context: context.into(), message }
    })
}

/// As [`caught`], for a future.
///
/// # Errors
/// As [`caught`].
pub(crate) async fn caught_in<T>(context: &str, work: impl Future<Output = T>) -> Result<T, Error> {
    let mut work = pin!(work);
    poll_fn(|cx| match caught(context, || work.as_mut().poll(cx)) {
        Ok(polled) => polled.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

/// Dropping a panic's payload may panic.
fn let_go(panic: Box<dyn Any + Send>) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(panic)));
}
