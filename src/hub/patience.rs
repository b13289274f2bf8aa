//! Retries of failed requests, and the waits between them.

use std::time::Duration;

use crate::error::{Error, HubError};

/// Consecutive attempts without progress.
const MAX_TRIES: u32 = 5;
/// The first wait; doubles each time.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// A request for a longer wait is an error.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// An attempt that receives this many bytes resets the count.
const PROGRESS_BYTES: u64 = 1 << 20;

/// Retry state of one file or listing.
pub(super) struct Patience<'a> {
    n_tries: u32,
    max_tries: u32,
    sleep: &'a dyn Fn(Duration),
}

impl<'a> Patience<'a> {
    /// For required data.
    pub fn new(sleep: &'a dyn Fn(Duration)) -> Patience<'a> {
        Patience { n_tries: 0, max_tries: MAX_TRIES, sleep }
    }

    /// For optional data: one attempt.
    pub fn none(sleep: &'a dyn Fn(Duration)) -> Patience<'a> {
        Patience { max_tries: 1, ..Patience::new(sleep) }
    }

    /// Waits before the next attempt, after one that received `bytes` and then failed.
    ///
    /// # Errors
    /// The attempt's error, if it is permanent or was the last attempt.
    pub fn wait(&mut self, error: HubError, bytes: u64) -> Result<(), Error> {
        self.wait_saying(error, bytes, &mut |_| {})
    }

    /// As [`Patience::wait`]; `say` receives the error before the first wait.
    pub fn wait_saying(&mut self, error: HubError, bytes: u64, say: &mut dyn FnMut(&HubError)) -> Result<(), Error> {
        self.n_tries = if bytes >= PROGRESS_BYTES { 1 } else { self.n_tries + 1 };
        let asked = match &error {
            HubError::TooManyRequests { retry_after, .. } => *retry_after,
            _ => None,
        };
        let wait = asked.unwrap_or(FIRST_WAIT * 2u32.saturating_pow(self.n_tries - 1));
        if !error.is_passing() || self.n_tries >= self.max_tries || wait > LONGEST_WAIT {
            return Err(error.into());
        }
        if self.n_tries == 1 {
            say(&error);
        }
        (self.sleep)(wait);
        Ok(())
    }
}
