//! The rows of the decode passes in flight.

use std::collections::HashMap;

use super::passes::DecodeForm;
use crate::error::Error;
use crate::generate::{InFlight, Pace};

/// Sequences from which decode passes may use the products of prefill, [`BatchInvariance::Many`].
///
/// [`BatchInvariance::Many`]: crate::recording::BatchInvariance::Many
pub(super) const MANY: u32 = 16;

/// Rows of a decode pass for `n` rows: 1, 2, 4 or a multiple of 8.
pub(super) fn decode_rows(n: u32) -> u32 {
    if n <= 4 { n.next_power_of_two() } else { n.next_multiple_of(8) }
}

/// Whether a decode pass of `n` sequences uses the products of prefill; draft tokens do not count, so that they change
/// no sums. Numbers in between keep what was `before`, so that one sequence that comes or goes does not change the
/// others' sums in each pass.
pub(super) fn uses_many(n: usize, before: bool) -> bool {
    match n as u32 {
        0..=8 => false,
        MANY.. => true,
        _ => before,
    }
}

/// Rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceRows {
    pub slot: u32,
    /// Position of the first row.
    pub pos: usize,
    /// Rows that compute tokens of the sequence.
    pub n_rows: usize,
    /// Rows of draft tokens after them.
    pub n_drafts: usize,
}

/// Passes in flight over the same rows, each with the tokens that the previous pass chose.
#[derive(Default)]
pub(super) struct DecodeBatch {
    /// In row order.
    pub runs: Vec<SequenceRows>,
    /// Input token of each row in the oldest pass.
    pub ids: Vec<u32>,
    pub form: DecodeForm,
    /// LoRA adapter of all rows.
    pub adapter: Option<String>,
    /// Errors of sequences, by slot, whose constraint allows no token.
    pub broken: HashMap<u32, Error>,
    pub in_flight: InFlight,
    pub pace: Pace,
}

impl DecodeBatch {
    /// Whether the batch has rows of the sequence in this slot.
    pub fn has(&self, slot: u32) -> bool {
        self.runs.iter().any(|run| run.slot == slot)
    }

    /// Reads the tokens that the oldest pass chose, like [`InFlight::next`]; empty if no pass is in flight.
    ///
    /// # Errors
    /// Those of the read.
    pub async fn next(&mut self) -> Result<Vec<u32>, Error> {
        Ok(self.in_flight.next(&mut self.pace).await?.unwrap_or_default())
    }
}
