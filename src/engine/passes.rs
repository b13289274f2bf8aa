//! What an engine's sequences share on the device, and the passes that are recorded over it.

use std::collections::HashMap;
use std::sync::Arc;

use super::pages::{HostPage, PageId};
use crate::device::{Device, WordCopy};
use crate::dtype::DType;
use crate::error::Error;
use crate::generate::{Model, rows_for};
use crate::kernels::PAGE;
use crate::model::{Ending, KvCache, LayerCache, PassTensors, RowsEnding};
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
    /// Whether pages go to the host's memory.
    pub spills: bool,
}

/// Words of a tensor, from the first of them on, and how many.
type Part = (Tensor, usize, usize);

/// Cache, tensors that passes share with the host, and passes.
pub(super) struct Passes {
    pub cache: KvCache,
    /// Of passes over one token of each of several sequences.
    pub rows: PassTensors,
    /// Of passes over a part of a prompt.
    pub prompt: PassTensors,
    /// The states of all sequences, and copies of some of them.
    states: Vec<(Tensor, Tensor)>,
    /// What a page or a copy of states goes through on its way to the host's memory and back.
    staging: Option<Tensor>,
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
        let Sizes { n_sequences, n_pages, pages_each, n_copies, spills } = sizes;
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
            staging: None,
            rows: PassTensors::declare_rows(config, [n_rows, n_slots, pages_each])?,
            prompt: PassTensors::declare_prompts(config, pages_each, max_pass)?,
            workspace: Workspace::default(),
            sizes,
            max_pass,
            of_rows: HashMap::new(),
            of_prompts: HashMap::new(),
        };
        if spills {
            let words = |parts: Vec<Part>| parts.iter().map(|(_, _, n_words)| n_words).sum::<usize>();
            let most = words(passes.parts_of_page(0)).max(words(passes.parts_of_slot(0)));
            let shape = [u32::try_from(most).unwrap_or(u32::MAX)];
            passes.staging = Some(Tensor::declare("cache.staging", Role::Cache, &shape, DType::U32)?);
        }
        passes.record_prompt(model, max_pass)?;
        passes.record_rows(model, n_rows, RowsEnding::default())?;
        Ok(passes)
    }

    /// Memory of the weights and of all this.
    pub fn plan(&self) -> MemoryPlan {
        let PassTensors { sampling, biases, allowed, tokens, .. } = &self.rows;
        let copies = self.states.iter().map(|(_, copies)| copies);
        let others = [sampling, biases, allowed, tokens].into_iter().chain(copies).chain(&self.staging);
        MemoryPlan::of(self.of_rows.values().chain(self.of_prompts.values()), others)
    }

    /// Copies the states of the sequence in a place to a copy.
    ///
    /// # Errors
    /// Those of [`Device::copy_words`].
    pub fn keep_states(&self, device: &Device, slot: u32, copy: u32) -> Result<(), Error> {
        copy_parts(device, self.parts_of_slot(slot).into_iter().zip(self.parts_of_copy(copy)))
    }

    /// Copies states back, to the sequence in a place.
    ///
    /// # Errors
    /// As [`Passes::keep_states`].
    pub fn restore_states(&self, device: &Device, copy: u32, slot: u32) -> Result<(), Error> {
        copy_parts(device, self.parts_of_copy(copy).into_iter().zip(self.parts_of_slot(slot)))
    }

    /// What a page holds, and the copy of the states after it.
    ///
    /// # Errors
    /// Those of copying and reading.
    pub async fn read_page(&self, device: &Device, page: PageId, copy: Option<u32>) -> Result<HostPage, Error> {
        let keys = self.read_parts(device, self.parts_of_page(page)).await?;
        let states = match copy {
            Some(copy) => Some(self.read_parts(device, self.parts_of_copy(copy)).await?),
            None => None,
        };
        Ok(HostPage { keys, states })
    }

    /// Writes keys and values back to a page.
    ///
    /// # Errors
    /// Those of writing and copying.
    pub fn write_page(&self, device: &Device, page: PageId, keys: &[u32]) -> Result<(), Error> {
        self.write_parts(device, self.parts_of_page(page), keys)
    }

    /// Writes states back, to the sequence in a place.
    ///
    /// # Errors
    /// As [`Passes::write_page`].
    pub fn write_states(&self, device: &Device, slot: u32, states: &[u32]) -> Result<(), Error> {
        self.write_parts(device, self.parts_of_slot(slot), states)
    }

    fn parts_of_page(&self, page: PageId) -> Vec<Part> {
        let keys = self.cache.kept().filter(|(_, layer)| matches!(layer, LayerCache::Keys(_)));
        let heads = keys.flat_map(|(_, layer)| layer.tensors()).flat_map(|tensor| {
            let [n_heads, slots, row] = [0, 1, 2].map(|i| tensor.shape()[i] as usize);
            let n_words = PAGE as usize * row;
            (0..n_heads).map(move |head| (tensor.clone(), head * slots * row + page as usize * n_words, n_words))
        });
        heads.collect()
    }

    fn parts_of_slot(&self, slot: u32) -> Vec<Part> {
        self.parts_of_states(|(states, _)| (states, slot))
    }

    fn parts_of_copy(&self, copy: u32) -> Vec<Part> {
        self.parts_of_states(|(_, copies)| (copies, copy))
    }

    fn parts_of_states<'a>(&'a self, which: impl Fn(&'a (Tensor, Tensor)) -> (&'a Tensor, u32)) -> Vec<Part> {
        let part = |both| {
            let (tensor, place) = which(both);
            let n_words = tensor.len() / tensor.shape()[0] as usize;
            (tensor.clone(), place as usize * n_words, n_words)
        };
        self.states.iter().map(part).collect()
    }

    /// Parts of [`Passes::staging`] as long as others, one after the other, and all of their words.
    fn staged(&self, parts: &[Part]) -> Result<(Tensor, Vec<Part>, usize), Error> {
        let staging = self.staging.clone().ok_or_else(|| Error::Operand {
            kernel: "engine",
            operand: "staging",
            expected: "an engine that keeps pages in the host's memory".into(),
            found: "another".into(),
        })?;
        let mut first = 0;
        let part = |&(_, _, n_words): &Part| {
            first += n_words;
            (staging.clone(), first - n_words, n_words)
        };
        let staged = parts.iter().map(part).collect();
        Ok((staging, staged, first))
    }

    async fn read_parts(&self, device: &Device, parts: Vec<Part>) -> Result<Arc<[u32]>, Error> {
        let (staging, staged, n_words) = self.staged(&parts)?;
        copy_parts(device, parts.into_iter().zip(staged))?;
        Ok(device.read_part(&staging, 0..n_words).await?.into())
    }

    fn write_parts(&self, device: &Device, parts: Vec<Part>, words: &[u32]) -> Result<(), Error> {
        let (staging, staged, _) = self.staged(&parts)?;
        device.write(&staging, 0, words)?;
        copy_parts(device, staged.into_iter().zip(parts))
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

fn copy_parts(device: &Device, parts: impl Iterator<Item = (Part, Part)>) -> Result<(), Error> {
    let copy = |((from, from_first, n_words), (to, to_first, _)): (Part, Part)| WordCopy {
        from: (from, from_first),
        to: (to, to_first),
        n_words,
    };
    device.copy_words(&parts.map(copy).collect::<Vec<_>>())
}
