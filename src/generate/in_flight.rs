//! Passes that were submitted and whose tokens were not read.

use std::collections::VecDeque;

use web_time::Instant;

use super::pace::Pace;
use crate::device::Pending;
use crate::error::Error;

/// The oldest first, with seconds from the first submission on; none for one whose time says nothing of those that follow, such as
/// a prompt's.
#[derive(Default)]
pub(crate) struct InFlight {
    passes: VecDeque<(Option<f64>, Pending)>,
    start: Option<Instant>,
}

impl InFlight {
    /// Whether all are read.
    pub fn is_empty(&self) -> bool {
        self.passes.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.passes.len()
    }

    /// Another was submitted.
    pub fn push(&mut self, pending: Pending, is_timed: bool) {
        let at = is_timed.then(|| self.seconds());
        self.passes.push_back((at, pending));
    }

    /// Nobody waits for them any more.
    pub fn clear(&mut self) {
        self.passes.clear();
    }

    /// The words that the oldest one leaves, when they are there. It stays until then: whoever drops this future and calls again
    /// misses none.
    ///
    /// # Errors
    /// Those of the read.
    pub async fn next(&mut self, pace: &mut Pace) -> Result<Option<Vec<u32>>, Error> {
        let Some((_, pending)) = self.passes.front_mut() else { return Ok(None) };
        let words = pending.await?;
        if let Some((Some(at), _)) = self.passes.pop_front() {
            pace.seen(at, self.seconds());
        }
        Ok(Some(words))
    }

    fn seconds(&mut self) -> f64 {
        self.start.get_or_insert_with(Instant::now).elapsed().as_secs_f64()
    }
}
