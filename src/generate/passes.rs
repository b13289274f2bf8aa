//! A session's forward passes, recorded for a few sizes, and their shared tensors.

use std::collections::HashMap;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::KvType;
use crate::model::{
    Drawing, Ending, ImageTensors, KvCache, PassTensors, RowAttention, Sampler, Transformer, VERIFIED_ROWS,
};
use crate::recording::{BatchInvariance, MemoryPlan, Recorder, Recording, Workspace};
use crate::target::Target;
use crate::tensor::{Role, Tensor};
use crate::tuning::{record_tested, self_test};

/// Possible sizes of a model's largest pass, see [`Model::max_pass`](super::Model::max_pass). A session records
/// these sizes at once and those between on first use.
pub const PASS_SIZES: [u32; 5] = [1, 8, 32, 128, 512];

/// Rows of a pass for `n_tokens` tokens: 1, or a multiple of an eighth of the power of two below, in steps of at
/// least 8. Each size is a separate recording; at most an eighth of a long pass is padding.
pub(crate) fn rows_for(n_tokens: u32) -> u32 {
    match n_tokens {
        0 | 1 => 1,
        _ => n_tokens.next_multiple_of((n_tokens.next_power_of_two() / 16).max(8)),
    }
}

/// Sizes of a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionLimits {
    /// Capacity of the KV cache, in tokens.
    pub context_length: u32,
    /// Maximum number of tokens of a pass.
    pub max_pass: u32,
    /// Storage type of cached keys and values.
    pub kv_type: KvType,
}

/// Records one pass of a model whose weights need not be allocated.
///
/// # Errors
/// [`Error::Operand`] or [`Error::Shape`] if the pass exceeds the target's limits.
pub(crate) fn record_pass(
    target: &Target,
    transformer: &Transformer,
    context_length: u32,
    n_tokens: u32,
    ending: Ending,
) -> Result<Recording, Error> {
    let config = &transformer.config;
    let cache = KvCache::declare(config, KvType::default(), context_length, n_tokens)?;
    let io = PassTensors::declare(config, context_length, n_tokens)?;
    let mut rec = Recorder::new(target.clone());
    transformer.record_pass(&mut rec, &cache, &io, n_tokens, ending)?;
    Ok(rec.finish(&mut Workspace::default()))
}

/// Rows of the largest pass of up to `max_pass` rows, a power of two, whose logits take 64 MiB at most.
fn scored_rows(vocab_size: u32, max_pass: u32) -> u32 {
    const MOST_BYTES: u32 = 64 << 20;
    let most = (MOST_BYTES / 4 / vocab_size.max(1)).clamp(VERIFIED_ROWS, PASS_SIZES[PASS_SIZES.len() - 1]);
    (1 << most.ilog2()).min(max_pass)
}

/// A session's tensors and its recorded passes.
pub(super) struct RecordedPasses {
    pub cache: KvCache,
    pub io: PassTensors,
    /// The same with room for the logits of many tokens, for passes that end with [`Ending::AllLogits`].
    pub scoring: PassTensors,
    /// The same for passes over rows of images, and those passes by size, on first use.
    images: Option<(PassTensors, HashMap<u32, Recording>)>,
    workspace: Workspace,
    /// The [`PASS_SIZES`] recorded at once.
    sizes: &'static [u32],
    /// By ending and size.
    recordings: HashMap<(Ending, u32), Recording>,
    /// Passes of other adapters, by adapter number; 0 is none.
    #[cfg(feature = "lora")]
    others: HashMap<u64, HashMap<(Ending, u32), Recording>>,
    #[cfg(feature = "lora")]
    in_use: u64,
    plan: MemoryPlan,
}

impl RecordedPasses {
    /// Declares tensors and records the greedy passes of [`PASS_SIZES`]; allocates nothing.
    pub fn declare(target: &Target, transformer: &Transformer, room: SessionLimits) -> Result<RecordedPasses, Error> {
        let SessionLimits { context_length, max_pass, kv_type } = room;
        let config = &transformer.config;
        // A pass larger than the context would never be full.
        let [largest, enough] = [
            PASS_SIZES.iter().rposition(|&size| size <= max_pass),
            PASS_SIZES.iter().position(|&size| size >= context_length),
        ];
        let last = largest.unwrap_or(0).min(enough.unwrap_or(PASS_SIZES.len() - 1));
        let sizes = &PASS_SIZES[..=last];
        let cache = KvCache::declare_part(config, transformer.layers(), kv_type, context_length, PASS_SIZES[last])?;
        let io = PassTensors {
            fetched: transformer.declare_fetched(target, PASS_SIZES[last])?,
            ..PassTensors::declare(config, context_length, PASS_SIZES[last])?
        };
        let io = match transformer.is_last() {
            true => io.with_mtp(config, kv_type, context_length, PASS_SIZES[last])?,
            false => io,
        };
        let scoring = io.with_logits(config, scored_rows(config.vocab_size, PASS_SIZES[last]))?;
        let (workspace, recordings) = (Workspace::default(), HashMap::new());
        let mut passes = RecordedPasses {
            cache,
            io,
            scoring,
            images: None,
            workspace,
            sizes,
            recordings,
            #[cfg(feature = "lora")]
            others: HashMap::new(),
            #[cfg(feature = "lora")]
            in_use: 0,
            plan: MemoryPlan::default(),
        };
        passes.record_usual(target, transformer)?;
        passes.plan = passes.planned();
        Ok(passes)
    }

    fn planned(&self) -> MemoryPlan {
        // Greedy passes use all tensors but the sampling settings, biases and bitmask.
        let PassTensors { sampling, biases, allowed, .. } = &self.io;
        let recordings = self.recordings.values();
        #[cfg(feature = "lora")]
        let recordings = recordings.chain(self.others.values().flat_map(HashMap::values));
        MemoryPlan::of(recordings, [sampling, biases, allowed])
    }

    /// Sets the number of the adapter in use.
    #[cfg(feature = "lora")]
    pub fn begin_with(&mut self, adapter: u64) {
        self.in_use = adapter;
    }

    /// Switches to the passes of another adapter, or none, and drops those of adapters that are no longer
    /// `resident`.
    #[cfg(feature = "lora")]
    pub fn select(
        &mut self,
        target: &Target,
        transformer: &Transformer,
        adapter: u64,
        resident: &[u64],
    ) -> Result<(), Error> {
        if adapter != self.in_use {
            self.images = None;
            let chosen = self.others.remove(&adapter).unwrap_or_default();
            self.others.insert(self.in_use, std::mem::replace(&mut self.recordings, chosen));
            self.in_use = adapter;
        }
        self.others.retain(|other, _| *other == 0 || resident.contains(other));
        self.record_usual(target, transformer)?;
        self.plan = self.planned();
        Ok(())
    }

    /// Records the greedy passes, largest first: smaller ones fit its workspace.
    fn record_usual(&mut self, target: &Target, transformer: &Transformer) -> Result<(), Error> {
        // Only full passes run within a prompt.
        self.record(target, transformer, self.largest(), Ending::Cache)?;
        let sizes = self.sizes;
        sizes.iter().rev().try_for_each(|&size| self.record_greedy(target, transformer, size))?;
        if self.io.mtp.is_none() {
            return Ok(());
        }
        sizes.iter().rev().try_for_each(|&size| self.record(target, transformer, size, Ending::MtpDraft))?;
        self.record(target, transformer, self.largest(), Ending::MtpFollow)?;
        self.record(target, transformer, 1, Ending::MtpDraftNext)
    }

    fn record_greedy(&mut self, target: &Target, transformer: &Transformer, size: u32) -> Result<(), Error> {
        self.record(target, transformer, size, Ending::GREEDY)
    }

    /// Records a pass unless it is recorded already.
    pub fn record(
        &mut self,
        target: &Target,
        transformer: &Transformer,
        size: u32,
        ending: Ending,
    ) -> Result<(), Error> {
        // A stage without the last layers ends all passes alike.
        let ending = if transformer.is_last() { ending } else { Ending::Cache };
        if !self.recordings.contains_key(&(ending, size)) {
            let mut rec = Recorder::new(target.clone());
            let io = if ending == Ending::AllLogits { &self.scoring } else { &self.io };
            transformer.record_pass(&mut rec, &self.cache, io, size, ending)?;
            let recording = match self.sizes.contains(&size) {
                true => rec.finish(&mut self.workspace),
                false => rec.finish_within(&mut self.workspace),
            };
            self.recordings.insert((ending, size), recording);
        }
        Ok(())
    }

    /// Records all sizes that prompts can need.
    pub fn record_all_sizes(&mut self, target: &Target, transformer: &Transformer) -> Result<(), Error> {
        // Sizes grow with the number of tokens.
        let mut sizes: Vec<u32> = (1..=self.largest()).map(|n_tokens| self.size(n_tokens)).collect();
        sizes.dedup();
        sizes.into_iter().rev().try_for_each(|size| self.record_greedy(target, transformer, size))
    }

    /// Makes sure that a pass has passed the self-test.
    ///
    /// # Errors
    /// Those of the self-test and of [`RecordedPasses::record`].
    pub async fn test(
        &mut self,
        device: &Device,
        transformer: &Transformer,
        size: u32,
        ending: Ending,
    ) -> Result<(), Error> {
        loop {
            self.record(&device.target(), transformer, size, ending)?;
            if self_test(device, self.get(size, ending)?).await? {
                return Ok(());
            }
            #[cfg(feature = "lora")]
            self.others.clear();
            self.images = None;
            let known: Vec<(Ending, u32)> = self.recordings.drain().map(|(key, _)| key).collect();
            self.record_usual(&device.target(), transformer)?;
            for (ending, size) in known {
                self.record(&device.target(), transformer, size, ending)?;
            }
        }
    }

    /// Makes sure that the pass over rows of an image of this kind is recorded and has passed the self-test.
    ///
    /// # Errors
    /// As [`RecordedPasses::test`].
    pub async fn test_image(
        &mut self,
        device: &Device,
        transformer: &Transformer,
        size: u32,
        kind: (usize, RowAttention),
    ) -> Result<(), Error> {
        let is_of = |(io, _): &(PassTensors, _)| io.image.as_ref().is_some_and(|image| image.is_of(kind));
        let (io, known) = match self.images.take().filter(is_of) {
            Some(images) => images,
            None => {
                let image = ImageTensors::declare(&transformer.config, self.largest(), kind)?;
                (PassTensors { image: Some(image), ..self.io.clone() }, HashMap::new())
            }
        };
        let (_, known) = self.images.insert((io.clone(), known));
        if known.contains_key(&size) {
            return Ok(());
        }
        let record = || {
            let mut rec = Recorder::new(device.target());
            transformer.record_pass(&mut rec, &self.cache, &io, size, Ending::Cache)?;
            Ok(rec.finish_within(&mut self.workspace))
        };
        let recording = record_tested(device, record, |recording| recording).await?;
        known.insert(size, recording);
        Ok(())
    }

    /// The recorded pass over rows of an image, and its tensors.
    pub fn image(&self, size: u32) -> Result<(&Recording, &PassTensors), Error> {
        let found = self.images.as_ref().and_then(|(io, known)| Some((known.get(&size)?, io)));
        found.ok_or_else(|| not_recorded(format!("rows of an image, {size}")))
    }

    /// Records a pass that fills the cache and returns the queries of a layer, `[size, H D]`; see
    /// [`PassTensors::queries`].
    ///
    /// # Errors
    /// As [`RecordedPasses::test`].
    pub async fn record_queries(
        &mut self,
        device: &Device,
        transformer: &Transformer,
        size: u32,
        layer: usize,
    ) -> Result<(Recording, Tensor), Error> {
        let shape = [size, transformer.config.blocks[layer].attention.q_dim()];
        let queries = Tensor::declare("queries", Role::Activations, &shape, DType::F32)?;
        let io = PassTensors { queries: Some((layer, queries.clone())), ..self.io.clone() };
        let record = || {
            let mut rec = Recorder::new(device.target());
            transformer.record_pass(&mut rec, &self.cache, &io, size, Ending::Cache)?;
            Ok(rec.finish_within(&mut self.workspace))
        };
        Ok((record_tested(device, record, |recording| recording).await?, queries))
    }

    /// Records a pass that fills the cache, with products of the kernels for many rows, whose inputs are tensors of
    /// their own: norms and activations are not folded in.
    ///
    /// # Errors
    /// As [`RecordedPasses::test`].
    pub async fn record_unfolded(
        &mut self,
        device: &Device,
        transformer: &Transformer,
        size: u32,
    ) -> Result<Recording, Error> {
        let record = || {
            let mut rec = Recorder::new(device.target()).with_batch_invariance(BatchInvariance::Many);
            transformer.record_pass(&mut rec, &self.cache, &self.io, size, Ending::Cache)?;
            Ok(rec.finish_within(&mut self.workspace))
        };
        record_tested(device, record, |recording| recording).await
    }

    /// Runs the self-test on the greedy passes of a model, before any session exists.
    ///
    /// # Errors
    /// As [`RecordedPasses::test`].
    pub async fn test_usual(device: &Device, transformer: &Transformer, room: SessionLimits) -> Result<(), Error> {
        if !device.is_gpu() {
            return Ok(());
        }
        let target = device.target();
        let mut passes = RecordedPasses::declare(&target, transformer, room)?;
        passes.record_all_sizes(&target, transformer)?;
        for draw in [Drawing::None, Drawing::All] {
            let sampler = Sampler { penalize: true, mask: false, draw };
            passes.record(&target, transformer, 1, Ending::Sample(sampler))?;
        }
        passes.test_all(device, transformer).await
    }

    /// As [`RecordedPasses::test`], for all recorded passes.
    async fn test_all(&mut self, device: &Device, transformer: &Transformer) -> Result<(), Error> {
        device.compile(self.recordings.values());
        let all: Vec<(Ending, u32)> = self.recordings.keys().copied().collect();
        for (ending, size) in all {
            self.test(device, transformer, size, ending).await?;
        }
        Ok(())
    }

    fn largest(&self) -> u32 {
        self.sizes[self.sizes.len() - 1]
    }

    /// Capacity of the cache, in tokens.
    pub fn capacity(&self) -> usize {
        self.cache.capacity() as usize
    }

    /// Memory of the weights and the greedy passes. Other passes share their workspace and add only their
    /// dispatches' parameters.
    pub fn plan(&self) -> MemoryPlan {
        self.plan
    }

    /// Size of the next pass over `n_tokens` remaining tokens: the smallest that holds all, or the largest.
    pub fn size(&self, n_tokens: u32) -> u32 {
        rows_for(n_tokens.min(self.largest())).min(self.largest())
    }

    /// The recorded pass of a size and ending.
    pub fn get(&self, size: u32, ending: Ending) -> Result<&Recording, Error> {
        self.recordings.get(&(ending, size)).ok_or_else(|| not_recorded(format!("{ending:?} of {size}")))
    }
}

fn not_recorded(found: String) -> Error {
    Error::Operand { kernel: "session", operand: "pass", expected: "a recorded pass".into(), found }
}
