//! A smaller model that drafts what an engine's sequences go on with: Leviathan et al. 2023, arXiv:2211.17192.
//!
//! It has a place for each of the engine's sequences and room there for all of its tokens, so that it never waits for pages. It
//! computes what a sequence has beyond what it knew of it, then greedy tokens of all of them together.

use super::options::EngineOptions;
use super::passes::{Passes, RowsForm, Sizes};
use crate::error::Error;
use crate::generate::Model;
use crate::kernels::{PAGE, StateRow};
use crate::recording::MemoryPlan;

pub(super) struct DraftModel {
    model: Model,
    passes: Passes,
    /// Tokens that it drafts at a time.
    n: usize,
    pages_each: u32,
    /// What it knows of the sequence in each place.
    known: Vec<Known>,
}

/// A beginning that is computed.
#[derive(Clone, Default)]
struct Known {
    ids: Vec<u32>,
    /// The row of angles of position 0.
    angles: u32,
}

/// A sequence's place, its tokens, and how many can be drafted at most.
pub(super) type Undrafted<'a> = (u32, &'a [u32], usize);

impl DraftModel {
    /// What the draft model of a model needs, if there is one and it is to draft.
    ///
    /// # Errors
    /// Those of [`Passes::declare`] and [`Passes::allocate`].
    pub fn of(model: &Model, options: &EngineOptions) -> Result<Option<DraftModel>, Error> {
        let Some(draft) = model.draft().filter(|_| options.draft_tokens > 0) else { return Ok(None) };
        let n_sequences = options.max_sequences;
        let pages_each = draft.context_length().div_ceil(PAGE);
        let sizes = Sizes {
            n_sequences,
            n_rows: n_sequences.next_power_of_two(),
            n_states: 1,
            n_pages: n_sequences.saturating_mul(pages_each).saturating_add(1),
            pages_each,
            n_copies: None,
            spills: false,
            max_pass: draft.max_pass(),
            kv_type: draft.kv_type(),
            mtp: false,
        };
        let passes = Passes::declare(draft, sizes)?;
        passes.allocate(false)?;
        Ok(Some(DraftModel {
            model: draft.clone(),
            passes,
            n: options.draft_tokens as usize,
            pages_each,
            known: vec![Known::default(); n_sequences as usize],
        }))
    }

    /// Memory of its weights and its cache.
    pub fn plan(&self) -> MemoryPlan {
        self.passes.whole_plan()
    }

    /// Draft tokens for each of these sequences, at most `room` in all, and none for one that the draft model's context has no room
    /// for.
    ///
    /// # Errors
    /// Those of the devices.
    pub async fn draft(&mut self, texts: &[Undrafted<'_>], room: usize) -> Result<Vec<Vec<u32>>, Error> {
        let drafted = self.try_draft(texts, room).await;
        if drafted.is_err() {
            // Nobody knows what passes have left.
            self.known.fill(Known::default());
        }
        drafted
    }

    async fn try_draft(&mut self, texts: &[Undrafted<'_>], room: usize) -> Result<Vec<Vec<u32>>, Error> {
        let mut drafts = vec![Vec::new(); texts.len()];
        let n = self.n.min(room.checked_div(texts.len()).unwrap_or(0));
        let end =
            |len: usize| self.model.transformer().angles_end(len as u32).min(self.model.context_length()) as usize;
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
            // The device goes on with what it has chosen, unless the host has a part in a pass.
            if pass == 0 || !self.model.runs_ahead() {
                self.passes.set_rows(&self.model, rows.clone()).await?;
            }
            let adapted = self.model.adapted_by(None)?;
            let pending =
                self.passes.submit_rows((&self.model, adapted), chosen.len() as u32, RowsForm::default()).await?;
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
            // The last draft token is not computed.
            let known = &mut self.known[slot as usize - 1].ids;
            known.extend(ids.last());
            known.extend(&drafts[at][..n - 1]);
            // From numbers that are not finite no token is chosen.
            let n_finite = drafts[at].iter().take_while(|&&id| id < vocab_size).count();
            drafts[at].truncate(most.min(n_finite));
        }
        Ok(drafts)
    }

    /// Computes all tokens of a sequence but the last one, as far as they are not known.
    async fn follow(&mut self, slot: u32, ids: &[u32]) -> Result<(), Error> {
        let angles = self.model.transformer().angles(ids.len() as u32);
        let known = &mut self.known[slot as usize - 1];
        let common = known.ids.iter().zip(ids).take_while(|(known, id)| known == id).count();
        let mut n = if known.angles == angles { common.min(ids.len() - 1) } else { 0 };
        known.angles = angles;
        known.ids.truncate(n);
        while n < ids.len() - 1 {
            let part = (ids.len() - 1 - n).min(self.passes.max_pass() as usize);
            let row = self.row(slot, ids, n, part as u32);
            let adapted = self.model.adapted_by(None)?;
            self.passes.compute_prompt((&self.model, adapted), row, &ids[n..n + part]).await?;
            self.known[slot as usize - 1].ids.extend(&ids[n..n + part]);
            n += part;
        }
        Ok(())
    }

    /// The state row of a pass over some of a sequence's tokens, from position `pos` on.
    fn row(&self, slot: u32, ids: &[u32], pos: usize, n_tokens: u32) -> StateRow {
        let first = 1 + (slot - 1) * self.pages_each;
        StateRow {
            pos: pos as u32,
            n_tokens,
            token: ids[pos],
            angles: self.model.transformer().angles(ids.len() as u32),
            slot,
            n_before: 0,
            pages: (first..first + self.pages_each).collect(),
        }
    }
}
