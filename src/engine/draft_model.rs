//! A smaller model that drafts tokens for an engine's sequences: Leviathan et al. 2023, arXiv:2211.17192.
//!
//! Each of the engine's sequences has a slot with pages for a full context, so drafting never waits for pages.
//! Drafting first prefills the tokens that a slot lacks, then decodes greedily for all sequences together.

use super::decode_batch::decode_rows;
use super::options::EngineOptions;
use super::passes::{DecodeForm, EngineSizes, Passes};
use crate::error::Error;
use crate::generate::Model;
use crate::kernels::{BatchRow, PAGE};
use crate::recording::MemoryPlan;

pub(super) struct DraftModel {
    model: Model,
    passes: Passes,
    /// Draft tokens per call.
    n: usize,
    pages_each: u32,
    /// The cached tokens of each slot.
    known: Vec<KnownPrefix>,
}

/// A cached prefix.
#[derive(Clone, Default)]
struct KnownPrefix {
    ids: Vec<u32>,
    /// RoPE table row of position 0.
    rope_offset: u32,
}

/// A sequence's slot, its tokens and its maximum number of draft tokens.
pub(super) type Undrafted<'a> = (u32, &'a [u32], usize);

impl DraftModel {
    /// The draft model of `model`, or `None` without one or with `draft_tokens` 0.
    ///
    /// # Errors
    /// Those of [`Passes::declare`] and [`Passes::allocate`].
    pub fn of(model: &Model, options: &EngineOptions) -> Result<Option<DraftModel>, Error> {
        let Some(draft) = model.draft().filter(|_| options.draft_tokens > 0) else { return Ok(None) };
        let n_sequences = options.max_sequences;
        let pages_each = draft.context_length().div_ceil(PAGE);
        let sizes = EngineSizes {
            n_sequences,
            n_rows: decode_rows(n_sequences),
            n_states: 1,
            n_pages: n_sequences.saturating_mul(pages_each).saturating_add(1),
            windows: None,
            pages_each,
            n_copies: None,
            spills: false,
            max_pass: draft.max_pass(),
            kv_type: draft.kv_type(),
            mtp: false,
            many: false,
        };
        let passes = Passes::declare(draft, sizes)?;
        passes.allocate(false)?;
        Ok(Some(DraftModel {
            model: draft.clone(),
            passes,
            n: options.draft_tokens as usize,
            pages_each,
            known: vec![KnownPrefix::default(); n_sequences as usize],
        }))
    }

    /// Memory of the draft model's weights and cache.
    pub fn plan(&self) -> MemoryPlan {
        self.passes.whole_plan()
    }

    /// Draft tokens for each sequence, at most `room` in all; none for a sequence that exceeds the draft model's
    /// context.
    ///
    /// # Errors
    /// Those of the devices.
    pub async fn draft(&mut self, texts: &[Undrafted<'_>], room: usize) -> Result<Vec<Vec<u32>>, Error> {
        let drafted = self.try_draft(texts, room).await;
        if drafted.is_err() {
            // The cache contents are unknown after a failed pass.
            self.known.fill(KnownPrefix::default());
        }
        drafted
    }

    async fn try_draft(&mut self, texts: &[Undrafted<'_>], room: usize) -> Result<Vec<Vec<u32>>, Error> {
        let mut drafts = vec![Vec::new(); texts.len()];
        let n = self.n.min(room.checked_div(texts.len()).unwrap_or(0));
        let end =
            |len: usize| self.model.transformer().rope_offset_end(len as u32).min(self.model.context_length()) as usize;
        let fits = |&(_, &(_, ids, most)): &(usize, &Undrafted<'_>)| most > 0 && ids.len() + n <= end(ids.len());
        let chosen: Vec<(usize, &Undrafted<'_>)> = texts.iter().enumerate().filter(fits).collect();
        if n == 0 || chosen.is_empty() {
            return Ok(drafts);
        }
        let mut rows = Vec::with_capacity(chosen.len());
        for &(_, &(slot, ids, _)) in &chosen {
            self.follow(slot, ids).await?;
            rows.push(self.row(slot, ids, ids.len() - 1, 1));
        }
        let mut passes = Vec::with_capacity(n);
        for pass in 0..n {
            // The device feeds its own tokens back, unless the host takes part in each pass.
            if pass == 0 || !self.model.runs_ahead() {
                self.passes.set_rows(&self.model, rows.clone(), DecodeForm::default()).await?;
            }
            let adapted = self.model.adapted_by(None)?;
            let pending =
                self.passes.submit_rows((&self.model, adapted), chosen.len() as u32, DecodeForm::default()).await?;
            if self.model.runs_ahead() {
                passes.push(pending);
                continue;
            }
            let ids = pending.await?;
            rows.iter_mut().zip(&ids).for_each(|(row, &id)| (row.pos, row.token) = (row.pos + 1, id));
            chosen.iter().zip(ids).for_each(|(&(at, _), id)| drafts[at].push(id));
        }
        for pending in passes {
            chosen.iter().zip(pending.await?).for_each(|(&(at, _), id)| drafts[at].push(id));
        }
        let vocab_size = self.model.config().vocab_size;
        for &(at, &(slot, ids, most)) in &chosen {
            // The last draft token has no KV cache entry yet.
            let known = &mut self.known[slot as usize - 1].ids;
            known.extend(ids.last());
            known.extend(&drafts[at][..n - 1]);
            // Non-finite logits choose no token.
            let n_finite = drafts[at].iter().take_while(|&&id| id < vocab_size).count();
            drafts[at].truncate(most.min(n_finite));
        }
        Ok(drafts)
    }

    /// Prefills the uncached tokens of a sequence, all but the last.
    async fn follow(&mut self, slot: u32, ids: &[u32]) -> Result<(), Error> {
        let rope_offset = self.model.transformer().rope_offset(ids.len() as u32);
        let known = &mut self.known[slot as usize - 1];
        let common = known.ids.iter().zip(ids).take_while(|(known, id)| known == id).count();
        let mut n = if known.rope_offset == rope_offset { common.min(ids.len() - 1) } else { 0 };
        known.rope_offset = rope_offset;
        known.ids.truncate(n);
        while n < ids.len() - 1 {
            let part = (ids.len() - 1 - n).min(self.passes.max_pass() as usize);
            let row = self.row(slot, ids, n, part as u32);
            let adapted = self.model.adapted_by(None)?;
            self.passes.compute_prompt((&self.model, adapted), row, &ids[n..n + part], false).await?;
            self.known[slot as usize - 1].ids.extend(&ids[n..n + part]);
            n += part;
        }
        Ok(())
    }

    /// The batch row of a pass over `n_tokens` tokens of a sequence from position `pos`.
    fn row(&self, slot: u32, ids: &[u32], pos: usize, n_tokens: u32) -> BatchRow {
        let first = 1 + (slot - 1) * self.pages_each;
        BatchRow {
            pos: pos as u32,
            n_tokens,
            token: ids[pos],
            rope_offset: self.model.transformer().rope_offset(ids.len() as u32),
            slot,
            n_before: 0,
            pages: (first..first + self.pages_each).collect(),
            window_pages: Vec::new(),
        }
    }
}
