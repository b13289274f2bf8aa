//! Speculative decoding in an engine: the idle rows of a decode batch verify draft tokens.

use std::collections::HashMap;

use super::draft_model::DraftModel;
use super::options::EngineOptions;
use super::pages::Pages;
use super::passes::Passes;
use super::running::Running;
use crate::error::Error;
use crate::generate::Model;
use crate::kernels::BatchRow;
use crate::model::Ending;
use crate::platform::{Native, native, unless_browser};
use crate::recording::MemoryPlan;

/// The draft model and the MTP head; prompt lookup needs no state.
#[derive(Default)]
pub(super) struct Drafter {
    draft: Option<Native<DraftModel>>,
    /// The MTP head's next input: the position of each row of the last pass and the token after it.
    mtp_rows: Vec<BatchRow>,
}

impl Drafter {
    /// Prepares the draft model's passes, if the model has one.
    ///
    /// # Errors
    /// Those of [`DraftModel::of`].
    pub fn of(model: &Model, options: &EngineOptions) -> Result<Drafter, Error> {
        Ok(Drafter { draft: DraftModel::of(model, options)?.map(native), mtp_rows: Vec::new() })
    }

    /// Memory of the draft model.
    pub fn plan(&self) -> MemoryPlan {
        self.draft.as_ref().map_or(MemoryPlan::default(), |draft| draft.plan())
    }

    /// Whether the draft model or the MTP head drafts for any of these sequences. Both need the previous token, so
    /// no pass can run ahead.
    pub fn needs_tokens(&self, running: &[Running], passes: &Passes) -> bool {
        let uses_mtp = passes.has_mtp() && running.iter().any(Running::uses_mtp);
        let has_draft = self.draft.is_some() && running.len() < passes.n_rows() as usize;
        uses_mtp || (has_draft && running.iter().any(|one| one.may_be_drafted() && !one.has_images()))
    }

    /// Clears the rows of the previous pass.
    pub fn clear_mtp_rows(&mut self) {
        self.mtp_rows.clear();
    }

    /// Adds a sequence's rows, from row `first` of the pass, each with the token after it.
    pub fn add_mtp_rows(&mut self, first: usize, rows: impl Iterator<Item = BatchRow>) {
        self.mtp_rows.resize_with(first, BatchRow::default);
        self.mtp_rows.extend(rows);
    }

    /// Runs the MTP head over the rows of the last pass and returns its draft tokens by slot.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn draft_by_mtp(
        &mut self,
        model: &Model,
        passes: &mut Passes,
        running: &mut [Running],
        pages: &mut Pages,
    ) -> Result<HashMap<u32, Vec<u32>>, Error> {
        let mut rows = std::mem::take(&mut self.mtp_rows);
        let mut drafts: HashMap<u32, Vec<u32>> = HashMap::new();
        if !passes.has_mtp() || rows.is_empty() {
            return Ok(drafts);
        }
        // Slot, last row and number of draft tokens of each sequence.
        let mut last: Vec<(u32, usize, usize)> = Vec::new();
        for (at, row) in rows.iter_mut().enumerate() {
            let is_of =
                |sequence: &&mut Running| sequence.slot == row.slot && sequence.is_ready() && sequence.uses_mtp();
            let Some(sequence) = running.iter_mut().find(is_of) else {
                // The sequence has ended or is being recomputed.
                *row = BatchRow::default();
                continue;
            };
            let n = sequence.max_drafts(model).min(sequence.request.options.mtp_tokens as usize);
            sequence.take_pages(sequence.n_rows() + n, pages)?;
            row.pages = sequence.pages().to_vec();
            last.retain(|(other, ..)| *other != sequence.slot);
            last.push((sequence.slot, at, n));
        }
        let vocab_size = model.config().vocab_size;
        let mut ending = Ending::MtpDraft;
        while !last.is_empty() {
            let chosen = passes.mtp_draft(rows.clone(), ending).await?;
            let idle = vec![BatchRow::default(); rows.len()];
            let before = std::mem::replace(&mut rows, idle);
            last.retain(|&(slot, at, n)| {
                let (id, known) = (chosen[at], drafts.entry(slot).or_default());
                // Non-finite logits choose no token.
                if known.len() < n && id < vocab_size {
                    known.push(id);
                    rows[at] = BatchRow { pos: before[at].pos + 1, token: id, n_before: 0, ..before[at].clone() };
                }
                known.len() < n && id < vocab_size
            });
            ending = Ending::MtpDraftNext;
        }
        Ok(drafts)
    }

    /// Draft tokens for each of the `ready` sequences, at most `room` in all: from prompt lookup, else the MTP head
    /// (`of_head`), else the draft model.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn draft(
        &mut self,
        (model, passes): (&Model, &Passes),
        (running, ready): (&[Running], &[usize]),
        mut of_head: HashMap<u32, Vec<u32>>,
        room: usize,
    ) -> Result<Vec<Vec<u32>>, Error> {
        let (keeps_states, n_states) = (model.config().is_recurrent(), passes.n_states() as usize);
        if keeps_states && n_states == 1 {
            return Ok(vec![Vec::new(); ready.len()]);
        }
        let draft = |&i: &usize| {
            let found = running[i].look_up(model);
            if found.is_empty() { of_head.remove(&running[i].slot).unwrap_or_default() } else { found }
        };
        let mut drafts: Vec<Vec<u32>> = ready.iter().map(draft).collect();
        // Shorten the longest drafts first.
        while drafts.iter().map(Vec::len).sum::<usize>() > room {
            drafts.iter_mut().max_by_key(|drafts| drafts.len()).map(Vec::pop);
        }
        if let Some(draft) = &mut self.draft {
            let room = room - drafts.iter().map(Vec::len).sum::<usize>();
            let undrafted = ready.iter().map(|&i| &running[i]).zip(&mut drafts);
            // The prompt's last pass chooses the first token.
            let is_undrafted = |(sequence, drafts): &(&Running, &mut Vec<u32>)| {
                drafts.is_empty() && sequence.may_be_drafted() && sequence.has_generated() && !sequence.has_images()
            };
            let text = |(sequence, drafts)| {
                let sequence: &Running = sequence;
                ((sequence.slot, sequence.ids(), sequence.max_drafts(model)), drafts)
            };
            let (texts, places): (Vec<_>, Vec<&mut Vec<u32>>) = undrafted.filter(is_undrafted).map(text).unzip();
            let found = unless_browser(|| draft.draft(&texts, room), || Ok(Vec::new())).await?;
            for (place, ids) in places.into_iter().zip(found) {
                *place = ids;
            }
        }
        for (&i, drafts) in ready.iter().zip(&mut drafts).filter(|_| keeps_states) {
            drafts.truncate(running[i].n_drafts(drafts.len()));
        }
        Ok(drafts)
    }
}
