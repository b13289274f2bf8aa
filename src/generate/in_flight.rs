//! Submitted passes whose tokens have not been read.

use std::collections::VecDeque;

use web_time::Instant;

use super::pace::Pace;
use crate::device::Pending;
use crate::error::Error;

/// Oldest first, with their submission times in seconds; `None` for a pass whose duration does not predict the next
/// one's, such as prefill.
#[derive(Default)]
pub(crate) struct InFlight {
    passes: VecDeque<(Option<f64>, Pending)>,
    start: Option<Instant>,
}

impl InFlight {
    pub fn is_empty(&self) -> bool {
        self.passes.is_empty()
    }

    /// Number of passes in flight.
    pub fn len(&self) -> usize {
        self.passes.len()
    }

    /// Adds a submitted pass.
    pub fn push(&mut self, pending: Pending, is_timed: bool) {
        let at = is_timed.then(|| self.seconds());
        self.passes.push_back((at, pending));
    }

    /// Drops all passes unread.
    pub fn clear(&mut self) {
        self.passes.clear();
    }

    /// Waits for the oldest pass's words. The pass stays in the queue until then, so that a caller may drop this
    /// future and call again.
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
