//! What an engine's sequences may go on with: tokens that are guessed, to be verified in the rows of a pass that would be idle.

use std::collections::HashMap;

#[cfg(not(target_arch = "wasm32"))]
use super::draft::Draft;
use super::options::EngineOptions;
#[cfg(not(target_arch = "wasm32"))]
use super::pages::Pages;
use super::passes::Passes;
use super::running::Running;
use crate::error::Error;
use crate::generate::Model;
use crate::kernels::StateRow;
#[cfg(not(target_arch = "wasm32"))]
use crate::model::Ending;
use crate::recording::MemoryPlan;

/// What guesses beside prompt look-up.
#[derive(Default)]
pub(super) struct Guesses {
    #[cfg(not(target_arch = "wasm32"))]
    draft: Option<Draft>,
    /// What the head for further tokens goes on with: for each row of the last pass its position and the token that came next.
    left: Vec<StateRow>,
}

impl Guesses {
    /// With what the model has to guess with.
    ///
    /// # Errors
    /// Those of [`Draft::of`].
    #[cfg_attr(target_arch = "wasm32", expect(unused_variables))]
    pub fn of(model: &Model, options: &EngineOptions) -> Result<Guesses, Error> {
        Ok(Guesses {
            #[cfg(not(target_arch = "wasm32"))]
            draft: Draft::of(model, options)?,
            left: Vec::new(),
        })
    }

    /// Memory of a draft model.
    pub fn plan(&self) -> MemoryPlan {
        #[cfg(not(target_arch = "wasm32"))]
        let plan = self.draft.as_ref().map_or(MemoryPlan::default(), Draft::plan);
        #[cfg(target_arch = "wasm32")]
        let plan = MemoryPlan::default();
        plan
    }

    /// Whether some of these sequences may be guessed by a draft model or a head for further tokens, which have to know all tokens.
    pub fn waits_for_tokens(&self, running: &[Running], passes: &Passes) -> bool {
        let asks_head = passes.has_further() && running.iter().any(Running::asks_head);
        #[cfg(not(target_arch = "wasm32"))]
        let has_draft = self.draft.is_some() && running.len() < passes.n_rows() as usize;
        #[cfg(target_arch = "wasm32")]
        let has_draft = false;
        asks_head || (has_draft && running.iter().any(Running::may_be_guessed))
    }

    /// Another pass over rows is read.
    pub fn begin_read(&mut self) {
        self.left.clear();
    }

    /// From row `first` on the pass has left these rows of a sequence: each with the token after it.
    pub fn left(&mut self, first: usize, rows: impl Iterator<Item = StateRow>) {
        self.left.resize_with(first, StateRow::default);
        self.left.extend(rows);
    }

    /// Has the head for further tokens go on with what the last pass left, and returns what it guesses for each of its sequences, by
    /// its place.
    ///
    /// # Errors
    /// Those of the device.
    #[cfg(not(target_arch = "wasm32"))]
    pub async fn ask_head(
        &mut self,
        model: &Model,
        passes: &mut Passes,
        running: &mut [Running],
        pages: &mut Pages,
    ) -> Result<HashMap<u32, Vec<u32>>, Error> {
        let mut left = std::mem::take(&mut self.left);
        let mut guesses: HashMap<u32, Vec<u32>> = HashMap::new();
        if !passes.has_further() || left.is_empty() {
            return Ok(guesses);
        }
        // Where a sequence's last row is, and how many tokens are to be guessed after it.
        let mut last: Vec<(u32, usize, usize)> = Vec::new();
        for (at, row) in left.iter_mut().enumerate() {
            let is_of =
                |sequence: &&mut Running| sequence.slot == row.slot && sequence.is_ready() && sequence.asks_head();
            let Some(sequence) = running.iter_mut().find(is_of) else {
                // It has ended, or has to be computed anew.
                *row = StateRow::default();
                continue;
            };
            let n = sequence.most_guesses(model).min(sequence.request.options.further_tokens as usize);
            sequence.make_room(sequence.n_rows() + n, pages)?;
            row.pages = sequence.pages().to_vec();
            last.retain(|(other, ..)| *other != sequence.slot);
            last.push((sequence.slot, at, n));
        }
        let vocab_size = model.config().vocab_size;
        let mut ending = Ending::Guess;
        while !last.is_empty() {
            let chosen = passes.guess_further(left.clone(), ending).await?;
            let idle = vec![StateRow::default(); left.len()];
            let before = std::mem::replace(&mut left, idle);
            last.retain(|&(slot, at, n)| {
                let (id, known) = (chosen[at], guesses.entry(slot).or_default());
                // From numbers that are not finite no token is chosen.
                if known.len() < n && id < vocab_size {
                    known.push(id);
                    left[at] = StateRow { pos: before[at].pos + 1, token: id, n_before: 0, ..before[at].clone() };
                }
                known.len() < n && id < vocab_size
            });
            ending = Ending::GuessOn;
        }
        Ok(guesses)
    }

    /// Guesses what follows each of the sequences that are `ready`, `room` tokens of all together at most: what prompt look-up finds,
    /// or else what the head has guessed, or the draft model chooses.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn of_ready(
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
        let guess = |&i: &usize| {
            let found = running[i].look_up(model);
            if found.is_empty() { of_head.remove(&running[i].slot).unwrap_or_default() } else { found }
        };
        let mut guesses: Vec<Vec<u32>> = ready.iter().map(guess).collect();
        // The longest are shortened first.
        while guesses.iter().map(Vec::len).sum::<usize>() > room {
            guesses.iter_mut().max_by_key(|guesses| guesses.len()).map(Vec::pop);
        }
        #[cfg(not(target_arch = "wasm32"))]
        if let Some(draft) = &mut self.draft {
            let room = room - guesses.iter().map(Vec::len).sum::<usize>();
            let unguessed = ready.iter().map(|&i| &running[i]).zip(&mut guesses);
            // The first token comes with the prompt.
            let is_unguessed = |(sequence, guesses): &(&Running, &mut Vec<u32>)| {
                guesses.is_empty() && sequence.may_be_guessed() && sequence.has_generated()
            };
            let text = |(sequence, guesses)| {
                let sequence: &Running = sequence;
                ((sequence.slot, sequence.ids(), sequence.most_guesses(model)), guesses)
            };
            let (texts, places): (Vec<_>, Vec<&mut Vec<u32>>) = unguessed.filter(is_unguessed).map(text).unzip();
            for (place, ids) in places.into_iter().zip(draft.guess(&texts, room).await?) {
                *place = ids;
            }
        }
        for (&i, guesses) in ready.iter().zip(&mut guesses).filter(|_| keeps_states) {
            guesses.truncate(running[i].n_guesses(guesses.len()));
        }
        Ok(guesses)
    }
}
