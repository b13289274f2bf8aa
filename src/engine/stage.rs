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
    /// Rows of a pass at most, a power of two.
    pub n_rows: u32,
    /// States that layers keep of a sequence.
    pub n_states: u32,
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
    /// Whether the MTP head drafts.
    pub mtp: bool,
}

/// A pass that is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    /// Over a part of a prompt, of so many rows.
    Prompt(u32),
    /// Over so many rows.
    Rows(u32, RowsForm),
    /// The MTP head goes on with what the last pass over a part of a prompt left, of so many rows.
    MtpFollow(u32),
    /// It drafts by this ending, after each of so many rows of the last pass over rows.
    MtpDraft(u32, Ending),
}

/// What tells passes over rows from each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct RowsForm {
    pub sampler: Sampler,
    /// Whether rows in turn may be of one sequence: [`StepState::with_runs`].
    pub has_runs: bool,
}

/// Words of a tensor, from the first of them on, and how many.
type Part = (Tensor, usize, usize);

/// Cache, tensors that passes share with the host, and passes.
pub(super) struct Stage {
    pub device: Device,
    transformer: Transformer,
    cache: KvCache,
    /// Keys and values of the MTP head.
    mtp: Option<KvCache>,
    /// Of passes over rows: a token of each of several sequences, and drafted tokens after it.
    pub rows: PassTensors,
    /// Of passes over a part of a prompt.
    pub prompt: PassTensors,
    /// The states of all sequences, and copies of some of them.
    states: Vec<(Tensor, Tensor)>,
    /// What a page or a copy of states goes through on its way to the host's memory and back.
    staging: Option<Tensor>,
    workspace: Workspace,
    sizes: Sizes,
    /// By the number of their adapter.
    recordings: HashMap<(usize, Pass), Recording>,
}

impl Stage {
    /// Declares all of it and records the largest passes; nothing is allocated.
    ///
    /// # Errors
    /// [`Error::Operand`] if something is larger than a tensor can be.
    pub fn declare(device: &Device, transformer: &Transformer, sizes: Sizes) -> Result<Stage, Error> {
        let Sizes { n_sequences, n_rows, n_states, n_pages, pages_each, n_copies, spills, max_pass, kv_type, mtp } =
            sizes;
        let config = &transformer.config;
        // The first place among states is nobody's, as the first page is.
        let n_slots = n_sequences + 1;
        let capacity = pages_each * PAGE;
        let cache =
            KvCache::declare_shared(config, transformer.layers(), kv_type, [n_pages, n_slots * n_states, capacity])?;
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
        let mut rows = PassTensors::declare_rows(config, [n_rows, n_slots, pages_each])?;
        let mut prompt = PassTensors::declare_prompts(config, pages_each, max_pass)?;
        [&mut rows, &mut prompt].into_iter().for_each(|io| io.state = io.state.with_states(n_states));
        let layer = config.n_layers();
        let mtp = match mtp && transformer.is_last() {
            true => Some(KvCache::declare_shared(config, layer..layer + 1, kv_type, [n_pages, 1, capacity])?),
            false => None,
        };
        if let Some(cache) = &mtp {
            rows = rows.with_mtp_over(config, cache, n_rows)?;
            prompt = prompt.with_mtp_over(config, cache, max_pass)?;
        }
        let mut stage = Stage {
            device: device.clone(),
            transformer: transformer.clone(),
            cache,
            mtp,
            states,
            staging: None,
            rows: PassTensors { fetched: fetched_rows, fetched_state, ..rows },
            prompt: PassTensors { fetched: fetched(max_pass)?, ..prompt },
            workspace: Workspace::default(),
            sizes,
            recordings: HashMap::new(),
        };
        if spills {
            let words = |parts: Vec<Part>| parts.iter().map(|(_, _, n_words)| n_words).sum::<usize>();
            let most = words(stage.parts_of_page(0)).max(words(stage.parts_of_slot(0))).max(1);
            let shape = [u32::try_from(most).unwrap_or(u32::MAX)];
            stage.staging = Some(Tensor::declare("cache.staging", Role::Cache, &shape, DType::U32)?);
        }
        let of_mtp = [Pass::MtpFollow(max_pass), Pass::MtpDraft(n_rows, Ending::MtpDraft)];
        let of_mtp = of_mtp.into_iter().filter(|_| stage.mtp.is_some());
        let all = [Pass::Prompt(max_pass), Pass::Rows(n_rows, RowsForm::default())].into_iter().chain(of_mtp);
        all.collect::<Vec<_>>().into_iter().try_for_each(|pass| stage.record(None, pass))?;
        Ok(stage)
    }

    /// Memory of the weights and of all this.
    pub fn plan(&self) -> MemoryPlan {
        MemoryPlan::of(self.recordings.values(), self.others())
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
        self.recordings.values().try_for_each(|recording| self.device.allocate_for(recording))?;
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
        let all = self.cache.kept().chain(self.mtp.iter().flat_map(KvCache::kept));
        let keys = all.filter(|(_, layer)| matches!(layer, LayerCache::Keys(_)));
        let heads = keys.flat_map(|(_, layer)| layer.tensors()).flat_map(|tensor| {
            let [n_heads, slots, row] = [0, 1, 2].map(|i| tensor.shape()[i] as usize);
            let n_words = PAGE as usize * row;
            (0..n_heads).map(move |head| (tensor.clone(), head * slots * row + page as usize * n_words, n_words))
        });
        heads.collect()
    }

    fn parts_of_slot(&self, slot: u32) -> Vec<Part> {
        // Copies are of the states after whole pages, which come first among those of a sequence.
        self.parts_of_states(|(states, _)| (states, slot * self.sizes.n_states))
    }

    fn parts_of_copy(&self, copy: u32) -> Vec<Part> {
        self.parts_of_states(|(_, copies)| (copies, copy))
    }

    fn parts_of_states<'a>(&'a self, which: impl Fn(&'a (Tensor, Tensor)) -> (&'a Tensor, u32)) -> Vec<Part> {
        let part = |channel| {
            let (tensor, place) = which(channel);
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

    /// Records a pass with the stage's own weights, or others in their place. A row of products is the same beside any number of others:
    /// prompts always take the kernels of many rows, and what is generated those of a few.
    fn record(&mut self, adapted: Option<Adapted<'_>>, pass: Pass) -> Result<(), Error> {
        let Sizes { n_rows: most_rows, max_pass, .. } = self.sizes;
        let few = Products::Few { columns: most_rows.min(8) };
        let with_runs;
        let (io, products, n_rows, ending) = match pass {
            Pass::Prompt(n_rows) => (&self.prompt, Products::Many, n_rows, Ending::Cache),
            Pass::Rows(n_rows, RowsForm { sampler, has_runs: false }) => {
                (&self.rows, few, n_rows, Ending::Sample(sampler))
            }
            Pass::Rows(n_rows, RowsForm { sampler, has_runs: true }) => {
                with_runs = PassTensors { state: self.rows.state.with_runs(), ..self.rows.clone() };
                (&with_runs, few, n_rows, Ending::Sample(sampler))
            }
            Pass::MtpFollow(n_rows) => (&self.prompt, Products::Many, n_rows, Ending::MtpFollow),
            Pass::MtpDraft(n_rows, ending) => (&self.rows, few, n_rows, ending),
        };
        let mut rec = Recorder::new(self.device.target()).with_products(products);
        let transformer = adapted.map_or(&self.transformer, |adapted| adapted.transformer);
        transformer.record_pass(&mut rec, &self.cache, io, n_rows, ending)?;
        let is_largest = pass == Pass::Prompt(max_pass) || pass == Pass::Rows(most_rows, RowsForm::default());
        let recording = match is_largest {
            true => rec.finish(&mut self.workspace),
            false => rec.finish_within(&mut self.workspace),
        };
        self.recordings.insert((number(adapted), pass), recording);
        Ok(())
    }

    /// A pass with the stage's own weights, or others in their place; the self-test has nothing against it.
    ///
    /// # Errors
    /// Those of recording and of the self-test.
    pub async fn pass(&mut self, adapted: Option<Adapted<'_>>, pass: Pass) -> Result<&Recording, Error> {
        let key = (number(adapted), pass);
        loop {
            if !self.recordings.contains_key(&key) {
                self.record(adapted, pass)?;
            }
            if self_test(&self.device, &self.recordings[&key]).await? {
                return Ok(&self.recordings[&key]);
            }
            // A variant of a shader was banned: all is recorded again.
            self.recordings.clear();
        }
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
