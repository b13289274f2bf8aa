//! One pipeline stage of an engine's model: a device's layers, their shared cache and recorded passes.

use std::collections::HashMap;
use std::ops::Range;

use super::decode_batch::{MANY, decode_rows};
use super::pages::PageId;
use super::windows::WindowSizes;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::generate::Adapted;
use crate::kernels::{KvType, PAGE, StepState};
use crate::model::{Ending, ImageTensors, KvCache, LayerCache, PassTensors, Sampler, Transformer};
use crate::platform::IS_BROWSER;
use crate::recording::{BatchInvariance, MemoryPlan, Recorder, Recording, Workspace};
use crate::tensor::{Role, Tensor, WordCopy};
use crate::tuning::self_test;
use crate::vision::ImageRows;

/// Sizes that determine an engine's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct EngineSizes {
    /// Maximum number of running sequences.
    pub n_sequences: u32,
    /// Maximum number of rows of a pass, a power of two.
    pub n_rows: u32,
    /// Recurrent states per sequence.
    pub n_states: u32,
    /// Pages, including the padding page 0.
    pub n_pages: u32,
    /// Pages of layers with a window, if these have their own; then pages do not spill.
    pub windows: Option<WindowSizes>,
    /// Maximum number of pages of a sequence.
    pub pages_each: u32,
    /// Copies of recurrent states, if the model is recurrent and prefixes are cached.
    pub n_copies: Option<u32>,
    /// Whether evicted pages move to host memory.
    pub spills: bool,
    /// Maximum number of tokens of a prefill chunk.
    pub max_pass: u32,
    /// Storage type of keys and values.
    pub kv_type: KvType,
    /// Whether the MTP head drafts.
    pub mtp: bool,
    /// Whether decode passes of many sequences use the products of prefill.
    pub many: bool,
}

impl EngineSizes {
    /// The largest passes: the temporaries of the others fit among theirs.
    fn largest(self) -> impl Iterator<Item = Pass> {
        let decode = move |many| Pass::Decode(self.n_rows, DecodeForm { many, ..DecodeForm::default() });
        [Pass::Prompt(self.max_pass), decode(false)].into_iter().chain(self.many.then(|| decode(true)))
    }
}

/// A recorded pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Pass {
    /// A prefill chunk of this many rows.
    Prompt(u32),
    /// The same over rows of an image.
    Image(u32),
    /// The same over tokens with the logits of all rows, at most [`SCORED_ROWS`].
    ScoredPrompt(u32),
    /// A decode pass of this many rows.
    Decode(u32, DecodeForm),
    /// The MTP head's prefill after a prefill chunk of this many rows.
    MtpFollow(u32),
    /// The MTP head's draft after a decode pass of this many rows, with this ending.
    MtpDraft(u32, Ending),
}

/// Maximum rows of a prefill chunk with logits: they take the memory of so many vocabularies.
pub(super) const SCORED_ROWS: u32 = 32;

/// Variants of decode passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct DecodeForm {
    pub sampler: Sampler,
    /// Whether consecutive rows may belong to one sequence: [`StepState::with_runs`].
    pub has_runs: bool,
    /// Whether products are those of prefill.
    pub many: bool,
}

impl DecodeForm {
    /// Rows of a pass for `n` rows.
    pub fn rows(self, n: u32) -> u32 {
        if self.many { decode_rows(n).max(MANY) } else { decode_rows(n) }
    }
}

/// A tensor, its first word and a number of words.
type TensorRange = (Tensor, usize, usize);

/// A device's cache, the tensors that passes share with the host, and recorded passes.
pub(super) struct Stage {
    pub device: Device,
    transformer: Transformer,
    cache: KvCache,
    /// KV cache of the MTP head.
    mtp: Option<KvCache>,
    /// Of decode passes: one token of each sequence, then its draft tokens.
    pub rows: PassTensors,
    /// Of prefill chunks.
    pub prompt: PassTensors,
    /// Of prefill chunks over rows of images, on first use.
    pub image: Option<PassTensors>,
    /// Of prefill chunks with logits of [`SCORED_ROWS`] rows.
    pub scored: PassTensors,
    /// Recurrent states of all sequences, and copies of some.
    states: Vec<(Tensor, Tensor)>,
    /// Staging buffer for moving a page or states to host memory and back.
    staging: Option<Tensor>,
    workspace: Workspace,
    sizes: EngineSizes,
    /// By adapter number.
    recordings: HashMap<(usize, Pass), Recording>,
}

impl Stage {
    /// Declares all tensors and records the largest passes; allocates nothing.
    ///
    /// # Errors
    /// [`Error::Operand`] if a tensor would be too large.
    pub fn declare(device: &Device, transformer: &Transformer, sizes: EngineSizes) -> Result<Stage, Error> {
        let EngineSizes {
            n_sequences,
            n_rows,
            n_states,
            n_pages,
            windows,
            pages_each,
            n_copies,
            spills,
            max_pass,
            kv_type,
            mtp,
            ..
        } = sizes;
        let config = &transformer.config;
        // State slot 0 is padding, like page 0.
        let n_slots = n_sequences + 1;
        let capacity = pages_each * PAGE;
        let shape = [n_pages, n_slots * n_states, capacity];
        let n_window_pages = windows.map(|windows| windows.n_pages);
        let cache = KvCache::declare_shared(config, transformer.layers(), kv_type, shape, n_window_pages)?;
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
            false => Some(StepState::declare_shared(Some(n_rows), 0, false)?),
        };
        let mut rows = PassTensors::declare_rows(config, [n_rows, n_slots, pages_each], windows.is_some())?;
        let mut prompt = PassTensors::declare_prompts(config, pages_each, max_pass, windows.is_some())?;
        [&mut rows, &mut prompt].into_iter().for_each(|io| io.state = io.state.with_states(n_states));
        let layer = config.n_layers();
        let mtp = match mtp && transformer.is_last() {
            true => Some(KvCache::declare_shared(config, layer..layer + 1, kv_type, [n_pages, 1, capacity], None)?),
            false => None,
        };
        if let Some(cache) = &mtp {
            rows = rows.with_mtp_over(config, cache, n_rows)?;
            prompt = prompt.with_mtp_over(config, cache, max_pass)?;
        }
        let prompt = PassTensors { fetched: fetched(max_pass)?, ..prompt };
        let mut stage = Stage {
            device: device.clone(),
            transformer: transformer.clone(),
            cache,
            mtp,
            states,
            staging: None,
            rows: PassTensors { fetched: fetched_rows, fetched_state, ..rows },
            image: None,
            scored: prompt.with_logits(config, SCORED_ROWS)?,
            prompt,
            workspace: Workspace::default(),
            sizes,
            recordings: HashMap::new(),
        };
        if spills {
            let words = |parts: Vec<TensorRange>| parts.iter().map(|(_, _, n_words)| n_words).sum::<usize>();
            let most = words(stage.parts_of_page(0)).max(words(stage.parts_of_slot(0))).max(1);
            let shape = [u32::try_from(most).unwrap_or(u32::MAX)];
            stage.staging = Some(Tensor::declare("cache.staging", Role::Cache, &shape, DType::U32)?);
        }
        let of_mtp = [Pass::MtpFollow(max_pass), Pass::MtpDraft(n_rows, Ending::MtpDraft)];
        let of_mtp = of_mtp.into_iter().filter(|_| stage.mtp.is_some());
        let all = sizes.largest().chain(of_mtp);
        all.collect::<Vec<_>>().into_iter().try_for_each(|pass| stage.record(None, pass))?;
        Ok(stage)
    }

    /// Memory of the weights, cache and passes.
    pub fn plan(&self) -> MemoryPlan {
        MemoryPlan::of(self.recordings.values(), self.others())
    }

    /// Tensors that only some passes use.
    fn others(&self) -> impl Iterator<Item = &Tensor> {
        let PassTensors { sampling, biases, allowed, tokens, .. } = &self.rows;
        let copies = self.states.iter().map(|(_, copies)| copies);
        [sampling, biases, allowed, tokens].into_iter().chain(copies).chain(&self.staging)
    }

    /// Allocates everything on a GPU, whose free memory is unknown before. `with_room` also allocates a sixteenth
    /// more and frees it again, as a reserve for other pass variants, reads and other models.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if it does not fit; the device is unchanged.
    pub fn allocate(&self, with_room: bool) -> Result<(), Error> {
        /// The reserve is this fraction of the stage's memory, at most `MAX_BYTES`.
        const PART: u64 = 16;
        const MAX_BYTES: u64 = 64 << 20;
        // A browser reports failed allocations later.
        if !self.device.is_gpu() || IS_BROWSER {
            return Ok(());
        }
        self.recordings.values().try_for_each(|recording| self.device.allocate_for(recording))?;
        self.others().try_for_each(|tensor| self.device.allocate(tensor))?;
        if with_room {
            let n_words = (self.plan().total_bytes() / PART).clamp(4, MAX_BYTES) / 4;
            let room = Tensor::declare("room", Role::Activations, &[n_words as u32], DType::U32)?;
            self.device.allocate(&room)?;
            drop(room);
            self.device.free_unused();
        }
        Ok(())
    }

    /// Allocates what prefill chunks with logits need, on a GPU.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if it does not fit; the device is unchanged. Those of [`Stage::pass`].
    pub async fn allocate_logits(&mut self, adapted: Option<Adapted<'_>>) -> Result<(), Error> {
        let pass = Pass::ScoredPrompt(SCORED_ROWS.min(self.sizes.max_pass));
        self.pass(adapted, pass).await?;
        if !self.device.is_gpu() || IS_BROWSER {
            return Ok(());
        }
        self.device.allocate(&self.scored.logits)?;
        self.device.allocate_for(&self.recordings[&(number(adapted), pass)])
    }

    /// Writes rows of an image, at these times, rows and columns, for a pass of `size` rows. Returns the RoPE table row of
    /// the first, if an image's rows have any of their own.
    ///
    /// # Errors
    /// Those of declaring and writing.
    pub fn write_image(
        &mut self,
        image: &ImageRows,
        positions: &[[u32; 3]],
        (rows, size): (Range<usize>, u32),
    ) -> Result<Option<u32>, Error> {
        let is_of = |io: &PassTensors| io.image.as_ref().is_some_and(|tensors| tensors.is_of(image.kind()));
        let io = match self.image.take().filter(is_of) {
            Some(io) => io,
            None => {
                self.recordings.retain(|(_, pass), _| !matches!(pass, Pass::Image(_)));
                let tensors = ImageTensors::declare(&self.transformer.config, self.sizes.max_pass, image.kind())?;
                PassTensors { image: Some(tensors), ..self.prompt.clone() }
            }
        };
        let io = self.image.insert(io);
        io.write_image(&self.device, image.dim, &image.rows, (rows, size))?;
        self.transformer.write_image_ropes(&self.device, positions)
    }

    /// Copies the states of a sequence to a copy.
    ///
    /// # Errors
    /// Those of [`Device::copy_words`].
    pub fn keep_states(&self, slot: u32, copy: u32) -> Result<(), Error> {
        copy_parts(&self.device, self.parts_of_slot(slot).into_iter().zip(self.parts_of_copy(copy)))
    }

    /// Copies states back to a sequence.
    ///
    /// # Errors
    /// As [`Stage::keep_states`].
    pub fn restore_states(&self, copy: u32, slot: u32) -> Result<(), Error> {
        copy_parts(&self.device, self.parts_of_copy(copy).into_iter().zip(self.parts_of_slot(slot)))
    }

    /// Reads a page's keys and values.
    ///
    /// # Errors
    /// Those of copying and reading.
    pub async fn read_page(&self, page: PageId) -> Result<Vec<u32>, Error> {
        self.read_parts(self.parts_of_page(page)).await
    }

    /// Reads a copy of states.
    ///
    /// # Errors
    /// As [`Stage::read_page`].
    pub async fn read_copy(&self, copy: u32) -> Result<Vec<u32>, Error> {
        self.read_parts(self.parts_of_copy(copy)).await
    }

    /// Writes a page's keys and values and returns the remaining words, for the next stages.
    ///
    /// # Errors
    /// Those of writing and copying.
    pub fn write_page<'a>(&self, page: PageId, keys: &'a [u32]) -> Result<&'a [u32], Error> {
        self.write_parts(self.parts_of_page(page), keys)
    }

    /// As [`Stage::write_page`], with a sequence's states.
    ///
    /// # Errors
    /// As [`Stage::write_page`].
    pub fn write_states<'a>(&self, slot: u32, states: &'a [u32]) -> Result<&'a [u32], Error> {
        self.write_parts(self.parts_of_slot(slot), states)
    }

    fn parts_of_page(&self, page: PageId) -> Vec<TensorRange> {
        let all = self.cache.kept().chain(self.mtp.iter().flat_map(KvCache::kept));
        let keys = all.filter(|(_, layer)| matches!(layer, LayerCache::Keys(_)));
        let heads = keys.flat_map(|(_, layer)| layer.tensors()).flat_map(|tensor| {
            let [n_heads, slots, row] = [0, 1, 2].map(|i| tensor.shape()[i] as usize);
            let n_words = PAGE as usize * row;
            (0..n_heads).map(move |head| (tensor.clone(), head * slots * row + page as usize * n_words, n_words))
        });
        heads.collect()
    }

    fn parts_of_slot(&self, slot: u32) -> Vec<TensorRange> {
        // Copies hold the states after whole pages, which are the first of a sequence's states.
        self.parts_of_states(|(states, _)| (states, slot * self.sizes.n_states))
    }

    fn parts_of_copy(&self, copy: u32) -> Vec<TensorRange> {
        self.parts_of_states(|(_, copies)| (copies, copy))
    }

    fn parts_of_states<'a>(&'a self, which: impl Fn(&'a (Tensor, Tensor)) -> (&'a Tensor, u32)) -> Vec<TensorRange> {
        let part = |pair| {
            let (tensor, place) = which(pair);
            let n_words = tensor.len() / tensor.shape()[0] as usize;
            (tensor.clone(), place as usize * n_words, n_words)
        };
        self.states.iter().map(part).collect()
    }

    /// Consecutive parts of [`Stage::staging`] of the same lengths, and their total number of words.
    fn staged(&self, parts: &[TensorRange]) -> Result<(Tensor, Vec<TensorRange>, usize), Error> {
        let staging = self.staging.clone().ok_or_else(|| Error::Operand {
            kernel: "engine",
            operand: "staging",
            expected: "a staging buffer (`host_cache_bytes` above 0)".into(),
            found: "none".into(),
        })?;
        let mut first = 0;
        let part = |&(_, _, n_words): &TensorRange| {
            first += n_words;
            (staging.clone(), first - n_words, n_words)
        };
        let staged = parts.iter().map(part).collect();
        Ok((staging, staged, first))
    }

    async fn read_parts(&self, parts: Vec<TensorRange>) -> Result<Vec<u32>, Error> {
        if parts.is_empty() {
            return Ok(Vec::new());
        }
        let (staging, staged, n_words) = self.staged(&parts)?;
        copy_parts(&self.device, parts.into_iter().zip(staged))?;
        self.device.read_part(&staging, 0..n_words).await
    }

    fn write_parts<'a>(&self, parts: Vec<TensorRange>, words: &'a [u32]) -> Result<&'a [u32], Error> {
        if parts.is_empty() {
            return Ok(words);
        }
        let (staging, staged, n_words) = self.staged(&parts)?;
        let (own, others) = words.split_at_checked(n_words).ok_or_else(|| Error::Operand {
            kernel: "engine",
            operand: "page",
            expected: format!("at least {n_words} words"),
            found: words.len().to_string(),
        })?;
        self.device.write(&staging, 0, own)?;
        copy_parts(&self.device, staged.into_iter().zip(parts))?;
        Ok(others)
    }

    /// Records a pass with the stage's weights or an adapter's. Batch invariance: prefill always uses the kernels
    /// for many rows and decoding those for few, or with many sequences the same, so that a row's result depends on
    /// nothing else of the batch.
    fn record(&mut self, adapted: Option<Adapted<'_>>, pass: Pass) -> Result<(), Error> {
        let few = BatchInvariance::Few { columns: self.sizes.n_rows.min(8) };
        let with_state;
        let (io, batch_invariance, n_rows, ending) = match pass {
            Pass::Prompt(n_rows) => (&self.prompt, BatchInvariance::Many, n_rows, Ending::Cache),
            Pass::Image(n_rows) => {
                (self.image.as_ref().unwrap_or(&self.prompt), BatchInvariance::Many, n_rows, Ending::Cache)
            }
            Pass::ScoredPrompt(n_rows) => (&self.scored, BatchInvariance::Many, n_rows, Ending::AllLogits),
            Pass::Decode(n_rows, DecodeForm { sampler, has_runs, many }) => {
                let state = if has_runs { self.rows.state.with_runs() } else { self.rows.state.clone() };
                with_state = PassTensors { state, ..self.rows.clone() };
                (&with_state, if many { BatchInvariance::Many } else { few }, n_rows, Ending::Sample(sampler))
            }
            Pass::MtpFollow(n_rows) => (&self.prompt, BatchInvariance::Many, n_rows, Ending::MtpFollow),
            Pass::MtpDraft(n_rows, ending) => (&self.rows, few, n_rows, ending),
        };
        let mut rec = Recorder::new(self.device.target()).with_batch_invariance(batch_invariance);
        let transformer = adapted.map_or(&self.transformer, |adapted| adapted.transformer);
        transformer.record_pass(&mut rec, &self.cache, io, n_rows, ending)?;
        let is_largest = self.sizes.largest().any(|largest| largest == pass);
        let recording = match is_largest {
            true => rec.finish(&mut self.workspace),
            false => rec.finish_within(&mut self.workspace),
        };
        self.recordings.insert((number(adapted), pass), recording);
        Ok(())
    }

    /// The recording of a pass with the stage's weights or an adapter's, after the self-test.
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
            // A shader variant was banned: record all passes again.
            self.recordings.clear();
        }
    }
}

/// The adapter's number, or 0 without one.
fn number(adapted: Option<Adapted<'_>>) -> usize {
    adapted.map_or(0, |adapted| adapted.number)
}

fn copy_parts(device: &Device, parts: impl Iterator<Item = (TensorRange, TensorRange)>) -> Result<(), Error> {
    let copy = |((from, from_first, n_words), (to, to_first, _)): (TensorRange, TensorRange)| WordCopy {
        from: (from, from_first),
        to: (to, to_first),
        n_words,
    };
    device.copy_words(&parts.map(copy).collect::<Vec<_>>())
}
