//! What an engine's sequences share on the device, and the passes that are recorded over it.

use std::collections::HashMap;

use crate::device::{Device, WordCopy};
use crate::error::Error;
use crate::generate::{Model, rows_for};
use crate::kernels::PAGE;
use crate::model::{Ending, KvCache, PassTensors, RowsEnding};
use crate::recording::{MemoryPlan, Products, Recorder, Recording, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tuning::self_test;

/// What decides how much an engine takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Sequences at a time.
    pub n_sequences: u32,
    /// Pages with the one that is nobody's.
    pub n_pages: u32,
    /// Pages of a sequence at most.
    pub pages_each: u32,
    /// Copies of states, where the model has states.
    pub n_copies: Option<u32>,
}

/// Cache, tensors that passes share with the host, and passes.
pub(super) struct Passes {
    pub cache: KvCache,
    /// Of passes over one token of each of several sequences.
    pub rows: PassTensors,
    /// Of passes over a part of a prompt.
    pub prompt: PassTensors,
    /// The states of all sequences, and copies of some of them.
    states: Vec<(Tensor, Tensor)>,
    workspace: Workspace,
    sizes: Sizes,
    max_pass: u32,
    of_rows: HashMap<(u32, RowsEnding), Recording>,
    of_prompts: HashMap<u32, Recording>,
}

impl Passes {
    /// Declares all of it and records the largest passes; nothing is allocated.
    ///
    /// # Errors
    /// [`Error::Operand`] if something is larger than a tensor can be.
    pub fn declare(model: &Model, sizes: Sizes) -> Result<Passes, Error> {
        let Sizes { n_sequences, n_pages, pages_each, n_copies } = sizes;
        let (config, max_pass) = (model.config(), model.max_pass());
        // The first place among states is nobody's, as the first page is.
        let n_slots = n_sequences + 1;
        let n_rows = n_sequences.next_power_of_two();
        let cache = KvCache::declare_shared(config, model.kv_type(), [n_pages, n_slots, pages_each * PAGE])?;
        let copied = |tensor: &Tensor| {
            let shape = [&[n_copies.unwrap_or(0).max(1)], &tensor.shape()[1..]].concat();
            Ok((tensor.clone(), Tensor::declare(tensor.label(), Role::Cache, &shape, tensor.dtype())?))
        };
        let states = match n_copies {
            Some(_) => cache.states().map(copied).collect::<Result<_, Error>>()?,
            None => Vec::new(),
        };
        let mut passes = Passes {
            cache,
            states,
            rows: PassTensors::declare_rows(config, [n_rows, n_slots, pages_each])?,
            prompt: PassTensors::declare_prompts(config, pages_each, max_pass)?,
            workspace: Workspace::default(),
            sizes,
            max_pass,
            of_rows: HashMap::new(),
            of_prompts: HashMap::new(),
        };
        passes.record_prompt(model, max_pass)?;
        passes.record_rows(model, n_rows, RowsEnding::default())?;
        Ok(passes)
    }

    /// Memory of the weights and of all this.
    pub fn plan(&self) -> MemoryPlan {
        let PassTensors { sampling, biases, allowed, tokens, .. } = &self.rows;
        let copies = self.states.iter().map(|(_, copies)| copies);
        let others = [sampling, biases, allowed, tokens].into_iter().chain(copies);
        MemoryPlan::of(self.of_rows.values().chain(self.of_prompts.values()), others)
    }

    /// Copies the states of the sequence in a place to a copy.
    ///
    /// # Errors
    /// Those of [`Device::copy_words`].
    pub fn keep_states(&self, device: &Device, slot: u32, copy: u32) -> Result<(), Error> {
        self.copy_states(device, |states, copies, n| [(states, slot as usize * n), (copies, copy as usize * n)])
    }

    /// Copies states back, to the sequence in a place.
    ///
    /// # Errors
    /// As [`Passes::keep_states`].
    pub fn restore_states(&self, device: &Device, copy: u32, slot: u32) -> Result<(), Error> {
        self.copy_states(device, |states, copies, n| [(copies, copy as usize * n), (states, slot as usize * n)])
    }

    fn copy_states<'a>(
        &'a self,
        device: &Device,
        ends: impl Fn(&'a Tensor, &'a Tensor, usize) -> [(&'a Tensor, usize); 2],
    ) -> Result<(), Error> {
        let copies = self.states.iter().map(|(states, copies)| {
            let n_words = states.len() / states.shape()[0] as usize;
            let [from, to] = ends(states, copies, n_words);
            let [from, to] = [from, to].map(|(tensor, first)| (tensor.clone(), first));
            WordCopy { from, to, n_words }
        });
        device.copy_words(&copies.collect::<Vec<_>>())
    }

    /// Pages, the one that is nobody's included.
    pub fn n_pages(&self) -> u32 {
        self.sizes.n_pages
    }

    /// Tokens that a pass over a prompt takes at most.
    pub fn max_pass(&self) -> u32 {
        self.max_pass
    }

    /// A row of products is the same beside any number of others: prompts always take the kernels of many rows, and what is
    /// generated those of a few.
    fn recorder(model: &Model, products: Products) -> Recorder {
        Recorder::new(model.device().target()).with_products(products)
    }

    fn record_prompt(&mut self, model: &Model, size: u32) -> Result<(), Error> {
        let mut rec = Passes::recorder(model, Products::Many);
        model.transformer().record_pass(&mut rec, &self.cache, &self.prompt, size, Ending::Cache)?;
        let recording = self.finish(rec, self.of_prompts.is_empty());
        self.of_prompts.insert(size, recording);
        Ok(())
    }

    fn record_rows(&mut self, model: &Model, n_rows: u32, ending: RowsEnding) -> Result<(), Error> {
        let columns = self.sizes.n_sequences.next_power_of_two().min(8);
        let mut rec = Passes::recorder(model, Products::Few { columns });
        model.transformer().record_rows(&mut rec, &self.cache, &self.rows, n_rows, ending)?;
        let recording = self.finish(rec, self.of_rows.is_empty());
        self.of_rows.insert((n_rows, ending), recording);
        Ok(())
    }

    fn finish(&mut self, rec: Recorder, is_largest: bool) -> Recording {
        if is_largest { rec.finish(&mut self.workspace) } else { rec.finish_within(&mut self.workspace) }
    }

    /// The pass over so many tokens of a prompt, with its rows; the self-test has nothing against it.
    ///
    /// # Errors
    /// Those of recording and of the self-test.
    pub async fn of_prompt(&mut self, model: &Model, n_tokens: u32) -> Result<&Recording, Error> {
        let size = rows_for(n_tokens).min(self.max_pass);
        loop {
            if !self.of_prompts.contains_key(&size) {
                self.record_prompt(model, size)?;
            }
            if self_test(model.device(), &self.of_prompts[&size]).await? {
                return Ok(&self.of_prompts[&size]);
            }
            self.forget_recordings();
        }
    }

    /// The pass over a token of each of `n` sequences.
    ///
    /// # Errors
    /// As [`Passes::of_prompt`].
    pub async fn of_rows(&mut self, model: &Model, n: u32, ending: RowsEnding) -> Result<&Recording, Error> {
        let key = (n.next_power_of_two(), ending);
        loop {
            if !self.of_rows.contains_key(&key) {
                self.record_rows(model, key.0, ending)?;
            }
            if self_test(model.device(), &self.of_rows[&key]).await? {
                return Ok(&self.of_rows[&key]);
            }
            self.forget_recordings();
        }
    }

    /// A variant of a shader was banned: all is recorded again.
    fn forget_recordings(&mut self) {
        self.of_prompts.clear();
        self.of_rows.clear();
    }
}
