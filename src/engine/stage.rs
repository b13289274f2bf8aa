//! The layers of an engine's model that one device computes: what sequences share there, and the passes that are recorded
//! over it.

use std::collections::HashMap;

use super::pages::PageId;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::generate::Adapted;
use crate::kernels::{KvType, PAGE, StepState};
use crate::model::{Ending, KvCache, LayerCache, PassTensors, Sampler, Transformer};
use crate::recording::{MemoryPlan, Products, Recorder, Recording, Workspace};
use crate::tensor::{Role, Tensor, WordCopy};
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
    /// Tokens that a pass over a prompt takes at most.
    pub max_pass: u32,
    /// What keys and values are kept as.
    pub kv_type: KvType,
}

/// Words of a tensor, from the first of them on, and how many.
type Part = (Tensor, usize, usize);

/// Cache, tensors that passes share with the host, and passes.
pub(super) struct Stage {
    pub device: Device,
    transformer: Transformer,
    cache: KvCache,
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
    /// By the number of their adapter, rows and sampler.
    of_rows: HashMap<(usize, u32, Sampler), Recording>,
    /// By the number of their adapter and rows.
    of_prompts: HashMap<(usize, u32), Recording>,
}

impl Stage {
    /// Declares all of it and records the largest passes; nothing is allocated.
    ///
    /// # Errors
    /// [`Error::Operand`] if something is larger than a tensor can be.
    pub fn declare(device: &Device, transformer: &Transformer, sizes: Sizes) -> Result<Stage, Error> {
        let Sizes { n_sequences, n_pages, pages_each, n_copies, spills, max_pass, kv_type } = sizes;
        let config = &transformer.config;
        // The first place among states is nobody's, as the first page is.
        let n_slots = n_sequences + 1;
        let n_rows = n_sequences.next_power_of_two();
        let capacity = pages_each * PAGE;
        let cache = KvCache::declare_shared(config, transformer.layers(), kv_type, [n_pages, n_slots, capacity])?;
        let copied = |tensor: &Tensor| {
            let shape = [&[n_copies.unwrap_or(0).max(1)], &tensor.shape()[1..]].concat();
            Ok((tensor.clone(), Tensor::declare(tensor.label(), Role::Cache, &shape, tensor.dtype())?))
        };
        let states = match n_copies {
            Some(_) => cache.states().map(copied).collect::<Result<_, Error>>()?,
            None => Vec::new(),
        };
        let fetched = |n_rows| transformer.declare_fetched(&device.target(), n_rows);
        let fetched_rows = fetched(n_rows)?;
        let fetched_state = match fetched_rows.is_empty() {
            true => None,
            false => Some(StepState::declare_shared(Some(n_rows), 0)?),
        };
        let mut stage = Stage {
            device: device.clone(),
            transformer: transformer.clone(),
            cache,
            states,
            staging: None,
            rows: PassTensors {
                fetched: fetched_rows,
                fetched_state,
                ..PassTensors::declare_rows(config, [n_rows, n_slots, pages_each])?
            },
            prompt: PassTensors {
                fetched: fetched(max_pass)?,
                ..PassTensors::declare_prompts(config, pages_each, max_pass)?
            },
            workspace: Workspace::default(),
            sizes,
            of_rows: HashMap::new(),
            of_prompts: HashMap::new(),
        };
        if spills {
            let words = |parts: Vec<Part>| parts.iter().map(|(_, _, n_words)| n_words).sum::<usize>();
            let most = words(stage.parts_of_page(0)).max(words(stage.parts_of_slot(0))).max(1);
            let shape = [u32::try_from(most).unwrap_or(u32::MAX)];
            stage.staging = Some(Tensor::declare("cache.staging", Role::Cache, &shape, DType::U32)?);
        }
        stage.record_prompt(None, max_pass)?;
        stage.record_rows(None, n_rows, Sampler::default())?;
        Ok(stage)
    }

    /// Memory of the weights and of all this.
    pub fn plan(&self) -> MemoryPlan {
        MemoryPlan::of(self.recordings(), self.others())
    }

    fn recordings(&self) -> impl Iterator<Item = &Recording> {
        self.of_rows.values().chain(self.of_prompts.values())
    }

    /// What not every pass uses.
    fn others(&self) -> impl Iterator<Item = &Tensor> {
        let PassTensors { sampling, biases, allowed, tokens, .. } = &self.rows;
        let copies = self.states.iter().map(|(_, copies)| copies);
        [sampling, biases, allowed, tokens].into_iter().chain(copies).chain(&self.staging)
    }

    /// Allocates all of it on a GPU, whose memory nobody knows before. Where there is to be room for more, a part of it is allocated
    /// twice, and once of it let go: for what passes of other forms, reads and other models take.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is not so much; the device is as it was.
    pub fn allocate(&self, with_room: bool) -> Result<(), Error> {
        /// A part of what the stage takes with its weights, and at most.
        const PART: u64 = 16;
        const MOST_BYTES: u64 = 64 << 20;
        // A browser tells later what came of it.
        if !self.device.is_gpu() || cfg!(target_arch = "wasm32") {
            return Ok(());
        }
        self.recordings().try_for_each(|recording| self.device.allocate_for(recording))?;
        self.others().try_for_each(|tensor| self.device.allocate(tensor))?;
        if with_room {
            let n_words = (self.plan().total_bytes() / PART).clamp(4, MOST_BYTES) / 4;
            let room = Tensor::declare("room", Role::Activations, &[n_words as u32], DType::U32)?;
            self.device.allocate(&room)?;
            drop(room);
            self.device.free_unused();
        }
        Ok(())
    }

    /// Copies the states of the sequence in a place to a copy.
    ///
    /// # Errors
    /// Those of [`Device::copy_words`].
    pub fn keep_states(&self, slot: u32, copy: u32) -> Result<(), Error> {
        copy_parts(&self.device, self.parts_of_slot(slot).into_iter().zip(self.parts_of_copy(copy)))
    }

    /// Copies states back, to the sequence in a place.
    ///
    /// # Errors
    /// As [`Stage::keep_states`].
    pub fn restore_states(&self, copy: u32, slot: u32) -> Result<(), Error> {
        copy_parts(&self.device, self.parts_of_copy(copy).into_iter().zip(self.parts_of_slot(slot)))
    }

    /// Keys and values of a page.
    ///
    /// # Errors
    /// Those of copying and reading.
    pub async fn read_page(&self, page: PageId) -> Result<Vec<u32>, Error> {
        self.read_parts(self.parts_of_page(page)).await
    }

    /// States of a copy.
    ///
    /// # Errors
    /// As [`Stage::read_page`].
    pub async fn read_copy(&self, copy: u32) -> Result<Vec<u32>, Error> {
        self.read_parts(self.parts_of_copy(copy)).await
    }

    /// Writes keys and values to a page, and returns the words after them, which are of other stages.
    ///
    /// # Errors
    /// Those of writing and copying.
    pub fn write_page<'a>(&self, page: PageId, keys: &'a [u32]) -> Result<&'a [u32], Error> {
        self.write_parts(self.parts_of_page(page), keys)
    }

    /// The same with states, to the sequence in a place.
    ///
    /// # Errors
    /// As [`Stage::write_page`].
    pub fn write_states<'a>(&self, slot: u32, states: &'a [u32]) -> Result<&'a [u32], Error> {
        self.write_parts(self.parts_of_slot(slot), states)
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

    /// Parts of [`Stage::staging`] as long as others, one after the other, and all of their words.
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

    async fn read_parts(&self, parts: Vec<Part>) -> Result<Vec<u32>, Error> {
        if parts.is_empty() {
            return Ok(Vec::new());
        }
        let (staging, staged, n_words) = self.staged(&parts)?;
        copy_parts(&self.device, parts.into_iter().zip(staged))?;
        self.device.read_part(&staging, 0..n_words).await
    }

    fn write_parts<'a>(&self, parts: Vec<Part>, words: &'a [u32]) -> Result<&'a [u32], Error> {
        if parts.is_empty() {
            return Ok(words);
        }
        let (staging, staged, n_words) = self.staged(&parts)?;
        let (own, others) = words.split_at_checked(n_words).ok_or_else(|| Error::Operand {
            kernel: "engine",
            operand: "page",
            expected: format!("{n_words} words at least"),
            found: words.len().to_string(),
        })?;
        self.device.write(&staging, 0, own)?;
        copy_parts(&self.device, staged.into_iter().zip(parts))?;
        Ok(others)
    }

    /// A row of products is the same beside any number of others: prompts always take the kernels of many rows, and what is
    /// generated those of a few.
    fn recorder(&self, products: Products) -> Recorder {
        Recorder::new(self.device.target()).with_products(products)
    }

    fn record_prompt(&mut self, adapted: Option<Adapted<'_>>, size: u32) -> Result<(), Error> {
        let mut rec = self.recorder(Products::Many);
        let transformer = adapted.map_or(&self.transformer, |adapted| adapted.transformer);
        transformer.record_pass(&mut rec, &self.cache, &self.prompt, size, Ending::Cache)?;
        let recording = self.finish(rec, self.of_prompts.is_empty());
        self.of_prompts.insert((number(adapted), size), recording);
        Ok(())
    }

    fn record_rows(&mut self, adapted: Option<Adapted<'_>>, n_rows: u32, sampler: Sampler) -> Result<(), Error> {
        let columns = self.sizes.n_sequences.next_power_of_two().min(8);
        let mut rec = self.recorder(Products::Few { columns });
        let transformer = adapted.map_or(&self.transformer, |adapted| adapted.transformer);
        transformer.record_pass(&mut rec, &self.cache, &self.rows, n_rows, Ending::Sample(sampler))?;
        let recording = self.finish(rec, self.of_rows.is_empty());
        self.of_rows.insert((number(adapted), n_rows, sampler), recording);
        Ok(())
    }

    fn finish(&mut self, rec: Recorder, is_largest: bool) -> Recording {
        if is_largest { rec.finish(&mut self.workspace) } else { rec.finish_within(&mut self.workspace) }
    }

    /// The pass over a part of a prompt, of so many rows, with the stage's own weights or others in their place; the self-test has
    /// nothing against it.
    ///
    /// # Errors
    /// Those of recording and of the self-test.
    pub async fn of_prompt(&mut self, adapted: Option<Adapted<'_>>, size: u32) -> Result<&Recording, Error> {
        let key = (number(adapted), size);
        loop {
            if !self.of_prompts.contains_key(&key) {
                self.record_prompt(adapted, size)?;
            }
            if self_test(&self.device, &self.of_prompts[&key]).await? {
                return Ok(&self.of_prompts[&key]);
            }
            self.forget_recordings();
        }
    }

    /// The pass over a token of each of so many sequences.
    ///
    /// # Errors
    /// As [`Stage::of_prompt`].
    pub async fn of_rows(
        &mut self,
        adapted: Option<Adapted<'_>>,
        n_rows: u32,
        sampler: Sampler,
    ) -> Result<&Recording, Error> {
        let key = (number(adapted), n_rows, sampler);
        loop {
            if !self.of_rows.contains_key(&key) {
                self.record_rows(adapted, n_rows, sampler)?;
            }
            if self_test(&self.device, &self.of_rows[&key]).await? {
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

/// The number of an adapter, 0 where there is none.
fn number(adapted: Option<Adapted<'_>>) -> usize {
    adapted.map_or(0, |adapted| adapted.number)
}

fn copy_parts(device: &Device, parts: impl Iterator<Item = (Part, Part)>) -> Result<(), Error> {
    let copy = |((from, from_first, n_words), (to, to_first, _)): (Part, Part)| WordCopy {
        from: (from, from_first),
        to: (to, to_first),
        n_words,
    };
    device.copy_words(&parts.map(copy).collect::<Vec<_>>())
}
