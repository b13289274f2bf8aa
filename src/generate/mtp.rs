//! The MTP head's progress in a session's sequence, and its drafts.
//!
//! The head consumes the hidden rows of the model's last pass, one per position, once the next tokens are known:
//! within a prompt at once, for the last token when the host has read the chosen one. A pass that the head does not
//! follow leaves a gap. Its cache then restarts with the rows after the gap, at its own position 0: drafts are worse
//! for a while, output is unaffected.

use std::ops::Range;

use super::session::Session;
use crate::error::Error;
use crate::kernels::StepState;
use crate::model::Ending;
use crate::platform::unless_browser;

/// Ranges are positions of the sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct MtpHead {
    /// Whether the head follows the model's passes.
    follows: bool,
    /// Positions whose hidden rows the model's last pass left.
    left: Range<usize>,
    /// Positions in the head's cache, from its own position 0.
    cached: Range<usize>,
}

impl MtpHead {
    /// Records that a pass of the model over these positions was submitted.
    pub fn left(&mut self, positions: Range<usize>) {
        self.left = positions;
    }

    /// Discards the rows left so far; later passes are followed if `follows`.
    pub fn begin(&mut self, follows: bool) {
        *self = MtpHead { follows, left: 0..0, cached: std::mem::take(&mut self.cached) };
    }

    /// Truncates to the first `n` tokens. The head's entry for the last one used the dropped next token.
    pub fn truncate(&mut self, n: usize) {
        let end = self.cached.end.min(n.saturating_sub(1));
        self.cached = self.cached.start.min(end)..end;
    }

    /// Discards everything.
    pub fn forget(&mut self) {
        (self.left, self.cached) = (0..0, 0..0);
    }

    /// The positions that the head can process in a sequence of `n_tokens`, and its own position for the first.
    fn next(&mut self, n_tokens: usize) -> Option<(Range<usize>, usize)> {
        let Range { start, end } = std::mem::take(&mut self.left);
        // The token after the last one is unknown.
        let positions = start..end.min(n_tokens.saturating_sub(1));
        if !self.follows || positions.is_empty() {
            return None;
        }
        if !(self.cached.start..=self.cached.end).contains(&start) {
            self.cached.start = start;
        }
        self.cached.end = positions.end;
        Some((positions, start - self.cached.start))
    }
}

impl Session {
    /// Runs the head over the rows of the last pass. Browsers load no head.
    pub(super) async fn follow(&mut self) -> Result<(), Error> {
        unless_browser(|| self.run_head(), || Ok(())).await
    }

    async fn run_head(&mut self) -> Result<(), Error> {
        match self.mtp_size(Ending::MtpFollow).await? {
            Some((size, n_rows)) => self.model.run(self.passes.get(size, Ending::MtpFollow)?, n_rows).await,
            None => Ok(()),
        }
    }

    /// Runs the head over the rows of the last pass and returns up to `n` draft tokens; none if there are no rows.
    pub(super) async fn mtp_drafts(&mut self, n: usize) -> Result<Vec<u32>, Error> {
        if n == 0 {
            self.follow().await?;
            return Ok(Vec::new());
        }
        let Some((size, _)) = self.mtp_size(Ending::MtpDraft).await? else { return Ok(Vec::new()) };
        let model = self.model.clone();
        let device = model.device();
        if n > 1 {
            self.passes.test(device, model.transformer(), 1, Ending::MtpDraftNext).await?;
        }
        let Some(mtp) = &self.passes.io.mtp else { return Ok(Vec::new()) };
        let state = mtp.state().tensor();
        // The head's weights stay on the device even with disk offload.
        let mut words = vec![device.replay_and_read(self.passes.get(size, Ending::MtpDraft)?, state, 1)?];
        if n > 1 {
            words.push(device.replay_and_read(self.passes.get(1, Ending::MtpDraftNext)?, state, n as u32 - 1)?);
        }
        let mut drafts = Vec::with_capacity(n);
        for pending in words {
            drafts.extend(StepState::tokens(&pending.await?));
        }
        let vocab_size = model.config().vocab_size;
        // Non-finite logits choose no token.
        Ok(drafts.into_iter().take_while(|&id| id < vocab_size).collect())
    }

    /// Prepares the head's pass over the rows of the last pass, and returns its size and number of tokens; `None` if
    /// there are no rows.
    async fn mtp_size(&mut self, ending: Ending) -> Result<Option<(u32, usize)>, Error> {
        let Some((positions, first)) = self.mtp.next(self.tokens().len()) else { return Ok(None) };
        let model = self.model.clone();
        let size = self.passes.size(positions.len() as u32);
        self.passes.test(model.device(), model.transformer(), size, ending).await?;
        let Some(mtp) = &self.passes.io.mtp else { return Ok(None) };
        let came_next = &self.sequence.ids()[positions.start + 1..positions.end + 1];
        model.device().write(mtp.tokens(), first, came_next)?;
        mtp.state().set_with_rope(
            model.device(),
            first as u32,
            came_next.len() as u32,
            self.sequence.rope_offset_at(first),
        )?;
        Ok(Some((size, came_next.len())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn following() -> MtpHead {
        MtpHead { follows: true, ..MtpHead::default() }
    }

    #[test]
    fn mtp_head_advances_once_the_next_token_is_known() {
        let mut mtp = following();
        // A prompt of five tokens in passes of three; the sixth comes later.
        mtp.left(0..3);
        assert_eq!(mtp.next(5), Some((0..3, 0)));
        assert_eq!(mtp.next(5), None);
        mtp.left(3..5);
        assert_eq!(mtp.next(6), Some((3..5, 3)));
        // Of four rows two were drafts that are wrong.
        mtp.left(5..9);
        assert_eq!(mtp.next(8), Some((5..7, 5)));
        // The same positions once more, as states of recurrent layers need it.
        mtp.left(5..10);
        assert_eq!(mtp.next(11), Some((5..10, 5)));
    }

    #[test]
    fn mtp_head_restarts_after_a_gap_in_positions() {
        let mut mtp = following();
        mtp.left(0..4);
        assert_eq!(mtp.next(5), Some((0..4, 0)));
        mtp.left(7..8);
        assert_eq!(mtp.next(9), Some((7..8, 0)));
        mtp.left(8..9);
        assert_eq!(mtp.next(10), Some((8..9, 1)));
        // Positions before what the cache begins with.
        mtp.left(2..4);
        assert_eq!(mtp.next(5), Some((2..4, 0)));
        mtp.forget();
        mtp.left(4..5);
        assert_eq!(mtp.next(6), Some((4..5, 0)));
    }

    #[test]
    fn truncating_a_sequence_truncates_its_mtp_head() {
        let mut mtp = following();
        mtp.left(0..50);
        assert_eq!(mtp.next(51), Some((0..50, 0)));
        mtp.truncate(10);
        mtp.begin(false);
        mtp.begin(true);
        // Nothing was made of the tokens from the tenth on.
        mtp.left(40..41);
        assert_eq!(mtp.next(42), Some((40..41, 0)));
        mtp.truncate(41);
        mtp.left(40..41);
        assert_eq!(mtp.next(42), Some((40..41, 0)));
        mtp.truncate(0);
        mtp.left(0..3);
        assert_eq!(mtp.next(4), Some((0..3, 0)));
    }

    #[test]
    fn generation_without_mtp_leaves_the_head_unchanged() {
        let mut mtp = following();
        mtp.left(0..4);
        assert_eq!(mtp.next(5), Some((0..4, 0)));
        mtp.begin(false);
        mtp.left(4..5);
        assert_eq!(mtp.next(6), None);
        mtp.left(5..6);
        mtp.begin(true);
        assert_eq!(mtp.next(7), None);
        // What the session computes after the head's last position is a gap.
        mtp.left(6..7);
        assert_eq!(mtp.next(8), Some((6..7, 0)));
    }
}
