//! Logits after each of the given tokens.

use super::Session;
use crate::device::Pending;
use crate::error::Error;
use crate::model::Ending;
use crate::platform::pause;

/// Rows of logits of consecutive tokens.
#[derive(Clone, Copy, Debug)]
pub struct LogitRows<'a> {
    /// Index of the first row's token among the given ones.
    pub first: usize,
    /// `[T, V]`, row by row: each row predicts the token after its own.
    pub logits: &'a [f32],
    /// Vocabulary size.
    pub vocab_size: usize,
}

impl LogitRows<'_> {
    /// The rows, each with the index of its token.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &[f32])> {
        (self.first..).zip(self.logits.chunks_exact(self.vocab_size))
    }
}

impl Session {
    /// Appends tokens and calls `each` with the logits after those from index `first` on, some rows at a time, in
    /// order. At most 64 MiB of logits are on the device, and twice as many on the host.
    ///
    /// # Errors
    /// As [`Session::logits`]; those that `each` returns.
    pub async fn logits_of_all(
        &mut self,
        ids: &[u32],
        first: usize,
        each: &mut dyn FnMut(LogitRows<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.check_ids(ids)?;
        let n_before = self.tokens().len();
        self.sequence.append(ids);
        let scored = self.score(n_before, first.min(ids.len()), each).await;
        if scored.is_err() {
            self.sequence.forget_cache();
        }
        scored
    }

    /// Caches all tokens; those from `first` after the earlier `n_before` on with their logits.
    async fn score(
        &mut self,
        n_before: usize,
        first: usize,
        each: &mut dyn FnMut(LogitRows<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let vocab_size = self.model.config().vocab_size as usize;
        let n_rows = self.tokens().len() - n_before - first;
        self.cache_all_but(n_rows).await?;
        // Read while the next pass runs.
        let mut unread: Option<(usize, usize, Pending)> = None;
        loop {
            let next = match self.sequence.uncached().is_empty() {
                true => None,
                false => Some(self.submit_scored(n_before).await?),
            };
            let is_last = next.is_none();
            if let Some((first, n_rows, pending)) = std::mem::replace(&mut unread, next) {
                let logits = pending.await?;
                let logits = bytemuck::cast_slice(&logits[..n_rows * vocab_size]);
                each(LogitRows { first, logits, vocab_size })?;
            }
            if is_last {
                return Ok(());
            }
            pause().await;
        }
    }

    /// Submits a pass over the next uncached tokens and returns the index of the first after the earlier
    /// `n_before`, their number, and their logits to read.
    async fn submit_scored(&mut self, n_before: usize) -> Result<(usize, usize, Pending), Error> {
        let model = self.model.clone();
        let position = self.sequence.n_cached();
        let most = self.passes.scoring.logits.shape()[0] as usize;
        let n_tokens = self.sequence.uncached().len().min(most);
        let size = self.passes.size(n_tokens as u32);
        self.ready(size, n_tokens, Ending::AllLogits).await?;
        let logits = self.passes.scoring.logits.first_rows(size)?;
        let pass = self.passes.get(size, Ending::AllLogits)?;
        let pending = model.run_and_read(pass, n_tokens, &logits, 1).await?;
        self.submitted(n_tokens, size);
        self.follow().await?;
        Ok((position - n_before, n_tokens, pending))
    }
}
