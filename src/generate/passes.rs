//! The forward passes of a session: recorded once for a few numbers of tokens, with the tensors that they share.

use std::collections::HashMap;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::KvType;
use crate::model::{Drawing, Ending, KvCache, PassTensors, Sampler, Transformer};
use crate::recording::{MemoryPlan, Recorder, Recording, Workspace};
use crate::target::Target;
use crate::tensor::{Role, Tensor};
use crate::tuning::{record_tested, self_test};

/// Tokens that a model's largest pass can take, see [`Model::max_pass`](super::Model::max_pass). A session records passes of
/// these sizes at once, and of those between when a prompt first needs one.
pub const PASS_SIZES: [u32; 5] = [1, 8, 32, 128, 512];

/// Rows of a pass for so many tokens: 1, or whole eighths of the power of two below, in steps of 8 at least. Each further
/// size is a recording of its own; with these no more than an eighth of a long pass is idle.
pub(crate) fn rows_for(n_tokens: u32) -> u32 {
    match n_tokens {
        0 | 1 => 1,
        _ => n_tokens.next_multiple_of((n_tokens.next_power_of_two() / 16).max(8)),
    }
}

/// What a session has room for.
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionLimits {
    /// Positions of its cache.
    pub context_length: u32,
    /// Tokens that one pass takes at most.
    pub max_pass: u32,
    /// What keys and values are cached as.
    pub kv_type: KvType,
}

/// Records one pass with an ending, of a model whose weights may be nowhere.
///
/// # Errors
/// [`Error::Operand`] or [`Error::Shape`] if the target's limits are too small for it.
#[cfg(not(target_arch = "wasm32"))]
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

/// A session's tensors and the passes that are recorded over them.
pub(super) struct RecordedPasses {
    pub cache: KvCache,
    pub io: PassTensors,
    workspace: Workspace,
    /// Those of [`PASS_SIZES`] that are recorded at once.
    sizes: &'static [u32],
    /// By what comes after the layers, and by size.
    recordings: HashMap<(Ending, u32), Recording>,
    /// Those with other adapters than the one in use, or with none, by the adapters' numbers, of which 0 is none.
    #[cfg(feature = "lora")]
    others: HashMap<u64, HashMap<(Ending, u32), Recording>>,
    #[cfg(feature = "lora")]
    in_use: u64,
    plan: MemoryPlan,
}

impl RecordedPasses {
    /// Declares tensors and records the passes of a greedy generation for [`PASS_SIZES`]; nothing is allocated.
    pub fn declare(target: &Target, transformer: &Transformer, room: SessionLimits) -> Result<RecordedPasses, Error> {
        let SessionLimits { context_length, max_pass, kv_type } = room;
        let config = &transformer.config;
        // A pass for more tokens than the context has positions would never be full.
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
        let (workspace, recordings) = (Workspace::default(), HashMap::new());
        let mut passes = RecordedPasses {
            cache,
            io,
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
        // They use all of it but the sampling settings, biases and what is allowed, which a greedy pass does not read.
        let PassTensors { sampling, biases, allowed, .. } = &self.io;
        let recordings = self.recordings.values();
        #[cfg(feature = "lora")]
        let recordings = recordings.chain(self.others.values().flat_map(HashMap::values));
        MemoryPlan::of(recordings, [sampling, biases, allowed])
    }

    /// Says which adapter the passes so far are with, by its number.
    #[cfg(feature = "lora")]
    pub fn begin_with(&mut self, adapter: u64) {
        self.in_use = adapter;
    }

    /// Goes over to the passes of a model with another adapter, or with none, by the adapters' numbers. Those of adapters that
    /// are not `resident` any more are given up.
    #[cfg(feature = "lora")]
    pub fn select(
        &mut self,
        target: &Target,
        transformer: &Transformer,
        adapter: u64,
        resident: &[u64],
    ) -> Result<(), Error> {
        if adapter != self.in_use {
            let chosen = self.others.remove(&adapter).unwrap_or_default();
            self.others.insert(self.in_use, std::mem::replace(&mut self.recordings, chosen));
            self.in_use = adapter;
        }
        self.others.retain(|other, _| *other == 0 || resident.contains(other));
        self.record_usual(target, transformer)?;
        self.plan = self.planned();
        Ok(())
    }

    /// Records the passes of a greedy generation, the largest first: smaller ones find room in its workspace.
    fn record_usual(&mut self, target: &Target, transformer: &Transformer) -> Result<(), Error> {
        // In the middle of a prompt only full passes run.
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

    /// Records a pass unless that was done before.
    pub fn record(
        &mut self,
        target: &Target,
        transformer: &Transformer,
        size: u32,
        ending: Ending,
    ) -> Result<(), Error> {
        // Without the last layers all passes of a size end alike.
        let ending = if transformer.is_last() { ending } else { Ending::Cache };
        if !self.recordings.contains_key(&(ending, size)) {
            let mut rec = Recorder::new(target.clone());
            transformer.record_pass(&mut rec, &self.cache, &self.io, size, ending)?;
            let recording = match self.sizes.contains(&size) {
                true => rec.finish(&mut self.workspace),
                false => rec.finish_within(&mut self.workspace),
            };
            self.recordings.insert((ending, size), recording);
        }
        Ok(())
    }

    /// Records the passes of all sizes that prompts can need.
    pub fn record_all_sizes(&mut self, target: &Target, transformer: &Transformer) -> Result<(), Error> {
        // They grow with the tokens.
        let mut sizes: Vec<u32> = (1..=self.largest()).map(|n_tokens| self.size(n_tokens)).collect();
        sizes.dedup();
        sizes.into_iter().rev().try_for_each(|size| self.record_greedy(target, transformer, size))
    }

    /// Sees to it that the self-test has nothing against a pass.
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
            let known: Vec<(Ending, u32)> = self.recordings.drain().map(|(key, _)| key).collect();
            self.record_usual(&device.target(), transformer)?;
            for (ending, size) in known {
                self.record(&device.target(), transformer, size, ending)?;
            }
        }
    }

    /// A pass that fills the cache and leaves a layer's queries, with these, `[size, H D]`; see [`PassTensors::queries`].
    ///
    /// # Errors
    /// As [`RecordedPasses::test`].
    pub async fn watch(
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

    /// Tests the passes of all generations, of which there are none yet.
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

    /// As [`RecordedPasses::test`], for all passes that are recorded.
    async fn test_all(&mut self, device: &Device, transformer: &Transformer) -> Result<(), Error> {
        #[cfg(not(target_arch = "wasm32"))]
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

    /// Positions of the cache.
    pub fn capacity(&self) -> usize {
        self.cache.capacity() as usize
    }

    /// Memory of the weights and of the passes of a greedy generation that are recorded at once. Others share their workspace;
    /// what they add is the params of their dispatches.
    pub fn plan(&self) -> MemoryPlan {
        self.plan
    }

    /// The size of the next pass where `n_tokens` tokens are left: the smallest that takes them all, or else the largest.
    pub fn size(&self, n_tokens: u32) -> u32 {
        rows_for(n_tokens.min(self.largest())).min(self.largest())
    }

    /// The recorded pass of a size, with what comes after its layers.
    pub fn get(&self, size: u32, ending: Ending) -> Result<&Recording, Error> {
        self.recordings.get(&(ending, size)).ok_or_else(|| Error::Operand {
            kernel: "session",
            operand: "pass",
            expected: "one that was recorded".into(),
            found: format!("{ending:?} of {size}"),
        })
    }
}
