//! Passes over rows of several sequences that were submitted and not read.

use std::collections::{HashMap, VecDeque};

use web_time::Instant;

use super::passes::RowsForm;
use crate::device::Pending;
use crate::error::Error;
use crate::generate::Pace;

/// Passes in flight, all of them over the same rows, each with the tokens that the one before it chose.
#[derive(Default)]
pub(super) struct Ahead {
    /// The place of each row's sequence. Rows of one sequence follow each other: tokens to be computed, then guessed ones.
    pub rows: Vec<u32>,
    /// The token of each row, in the oldest pass.
    pub ids: Vec<u32>,
    pub form: RowsForm,
    /// The adapter of all rows.
    pub adapter: Option<String>,
    /// Why the sequences at some places cannot go on: no token is allowed there.
    pub broken: HashMap<u32, Error>,
    /// The oldest first, with when it was submitted.
    passes: VecDeque<(Instant, Pending)>,
    pace: Pace,
    /// From when the pace's seconds are counted.
    begun: Option<Instant>,
}

impl Ahead {
    pub fn is_empty(&self) -> bool {
        self.passes.is_empty()
    }

    pub fn len(&self) -> usize {
        self.passes.len()
    }

    /// How many there should be.
    pub fn depth(&self) -> usize {
        self.pace.depth()
    }

    /// Other rows begin.
    pub fn begin(
        &mut self,
        rows: impl Iterator<Item = (u32, u32)>,
        form: RowsForm,
        adapter: Option<String>,
        broken: HashMap<u32, Error>,
    ) {
        (self.rows, self.ids) = rows.unzip();
        (self.form, self.adapter, self.broken) = (form, adapter, broken);
        self.pace.pause();
    }

    pub fn submitted(&mut self, pending: Pending) {
        self.passes.push_back((Instant::now(), pending));
    }

    /// Nobody waits for what is in flight.
    pub fn forget(&mut self) {
        self.passes.clear();
    }

    /// The tokens that the oldest pass chose, when they are there. It stays until then: whoever drops this future and calls again
    /// misses none.
    ///
    /// # Errors
    /// Those of the read.
    pub async fn next(&mut self) -> Result<Vec<u32>, Error> {
        let Some((at, pending)) = self.passes.front_mut() else { return Ok(Vec::new()) };
        let chosen = pending.await?;
        let begun = *self.begun.get_or_insert(*at);
        let seconds = |instant: Instant| instant.saturating_duration_since(begun).as_secs_f64();
        self.pace.seen(seconds(*at), seconds(Instant::now()));
        self.passes.pop_front();
        Ok(chosen)
    }
}
