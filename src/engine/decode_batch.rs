//! The rows of passes over several sequences, while some that were submitted are not read.

use std::collections::HashMap;

use super::passes::RowsForm;
use crate::error::Error;
use crate::generate::{InFlight, Pace};

/// Rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// The sequence's place.
    pub slot: u32,
    /// The position of the first row.
    pub pos: usize,
    /// Rows of tokens that are to be computed.
    pub n_rows: usize,
    /// Rows of drafted tokens after them.
    pub n_drafts: usize,
}

/// Passes in flight, all of them over the same rows, each with the tokens that the one before it chose.
#[derive(Default)]
pub(super) struct DecodeBatch {
    /// In the order of their rows.
    pub runs: Vec<Run>,
    /// The token of each row, in the oldest pass.
    pub ids: Vec<u32>,
    pub form: RowsForm,
    /// The adapter of all rows.
    pub adapter: Option<String>,
    /// Why the sequences at some places cannot go on: no token is allowed there.
    pub broken: HashMap<u32, Error>,
    pub in_flight: InFlight,
    pub pace: Pace,
}

impl DecodeBatch {
    /// Whether it has rows of the sequence at this place.
    pub fn has(&self, slot: u32) -> bool {
        self.runs.iter().any(|run| run.slot == slot)
    }

    /// The tokens that the oldest pass chose, as [`InFlight::next`].
    ///
    /// # Errors
    /// Those of the read.
    pub async fn next(&mut self) -> Result<Vec<u32>, Error> {
        Ok(self.in_flight.next(&mut self.pace).await?.unwrap_or_default())
    }
}
