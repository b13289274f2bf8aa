//! How often a request that failed is made again, and after which time.

use std::time::Duration;

use crate::error::{Error, HubError};

/// Tries in a row that bring nothing.
const MAX_TRIES: u32 = 5;
/// The first wait; each further one is twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// A server that asks for a longer wait is not waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// What a try must bring so that the tries before it do not count.
const PROGRESS_BYTES: u64 = 1 << 20;

/// What is left of it for one file or list.
pub(super) struct Patience<'a> {
    n_tries: u32,
    max_tries: u32,
    sleep: &'a dyn Fn(Duration),
}

impl<'a> Patience<'a> {
    /// For something that is needed.
    pub fn new(sleep: &'a dyn Fn(Duration)) -> Patience<'a> {
        Patience { n_tries: 0, max_tries: MAX_TRIES, sleep }
    }

    /// For something that can be done without: one try.
    pub fn none(sleep: &'a dyn Fn(Duration)) -> Patience<'a> {
        Patience { max_tries: 1, ..Patience::new(sleep) }
    }

    /// Waits before the next try, after one that brought some bytes and then failed.
    ///
    /// # Errors
    /// The error of that try, if it will not pass or was the last one.
    pub fn wait(&mut self, error: HubError, bytes: u64) -> Result<(), Error> {
        self.n_tries = if bytes >= PROGRESS_BYTES { 1 } else { self.n_tries + 1 };
        let asked = match &error {
            HubError::TooManyRequests { retry_after, .. } => *retry_after,
            _ => None,
        };
        let wait = asked.unwrap_or(FIRST_WAIT * 2u32.saturating_pow(self.n_tries - 1));
        if !error.is_passing() || self.n_tries >= self.max_tries || wait > LONGEST_WAIT {
            return Err(error.into());
        }
        (self.sleep)(wait);
        Ok(())
    }
}
