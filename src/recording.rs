//! A step as a list of kernels over planned tensors: recorded once, replayed by an executor.
//!
//! Kernels check shapes and push dispatches to a [`Recorder`]. [`Recorder::finish`] places temporaries in the blocks of
//! a [`Workspace`], so that tensors that are never alive at the same time share memory. Nothing is allocated until an
//! executor prepares the recording.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytemuck::Pod;

use crate::dtype::{DType, WeightType};
use crate::error::Error;
#[cfg(not(target_arch = "wasm32"))]
use crate::shaders::Ablation;
use crate::shaders::{Kernel, KernelOf, Tier, Variant, overrides};
use crate::target::Target;
use crate::tensor::{Attached, MemoryBlock, Role, Tensor, TensorStorage};

/// Whether a row's result is independent of the number of rows that are computed with it. Matrix products have kernels
/// for few rows and for many, whose results differ in their bits; an engine chooses by the number of sequences, or once
/// for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BatchInvariance {
    /// The fastest kernel for the number of rows.
    #[default]
    Off,
    /// The kernel for few rows, whatever their number.
    Few {
        /// Maximum number of rows that are multiplied by a weight at once.
        columns: u32,
    },
    /// The kernel for many rows, whatever their number.
    Many,
}

/// One dispatch.
#[derive(Debug)]
pub(crate) struct Step {
    pub kernel: &'static Kernel,
    pub variant: &'static Variant,
    /// Values of the shader's overrides.
    pub constants: Vec<(&'static str, f64)>,
    pub params: Vec<u8>,
    /// In binding order.
    pub operands: Vec<Tensor>,
    /// Workgroups in x, y and z.
    pub grid: [u32; 3],
    /// The layer that it belongs to, if it does to one.
    pub layer: Option<u32>,
    /// For the CPU, which also chooses by the number of rows.
    pub batch_invariance: BatchInvariance,
}

impl Step {
    /// What is compiled for it.
    pub fn pipeline(&self) -> PipelineKey {
        let constants = self.constants.iter().map(|&(name, value)| (name, value.to_bits())).collect();
        PipelineKey { label: self.variant.label, constants }
    }
}

/// A shader variant with the values of its overrides: what is compiled, once, into one pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PipelineKey {
    pub label: &'static str,
    /// Names, and the values' bits.
    constants: Vec<(&'static str, u64)>,
}

impl fmt::Display for PipelineKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label)?;
        self.constants.iter().try_for_each(|&(name, bits)| write!(f, " {name}={}", f64::from_bits(bits)))
    }
}

/// Collects dispatches for a target.
pub struct Recorder {
    target: Target,
    steps: Vec<Step>,
    /// The layer that the next steps belong to.
    layer: Option<u32>,
    batch_invariance: BatchInvariance,
    choices: Vec<Choice>,
}

/// Where a pass has chosen its experts of a layer, which need not all be on the device.
#[derive(Debug)]
pub(crate) struct Choice {
    /// The first step after the choice.
    pub step: usize,
    pub layer: u32,
    /// What was chosen, `[T, K, 2]`; the steps that follow find slots there in place of experts.
    pub routes: Tensor,
}

impl Recorder {
    /// An empty recorder; the target decides which shader variants are recorded and what limits hold.
    pub fn new(target: Target) -> Recorder {
        Recorder { target, steps: Vec::new(), layer: None, batch_invariance: BatchInvariance::Off, choices: Vec::new() }
    }

    /// The same, for products that are taken like this.
    pub fn with_batch_invariance(self, batch_invariance: BatchInvariance) -> Recorder {
        Recorder { batch_invariance, ..self }
    }

    /// How products are taken.
    pub(crate) fn batch_invariance(&self) -> BatchInvariance {
        self.batch_invariance
    }

    /// The target recorded for.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Says that the steps that follow use the matrices of this layer and of no other, or of none; see
    /// [`Recording::layers`].
    pub(crate) fn begin_layer(&mut self, layer: Option<u32>) {
        self.layer = layer;
    }

    /// Says that the steps so far have chosen a layer's experts, and that those which follow want slots; see
    /// [`Recording::choices`].
    pub(crate) fn end_choice(&mut self, layer: u32, routes: &Tensor) {
        self.choices.push(Choice { step: self.steps.len(), layer, routes: routes.clone() });
    }

    /// Declares a temporary: it lives from its first to its last use in this recording.
    ///
    /// # Errors
    /// [`Error::Operand`] as in [`Tensor::declare`].
    pub fn temporary(&self, label: &str, shape: &[u32]) -> Result<Tensor, Error> {
        Tensor::temporary(label, shape, DType::F32)
    }

    /// A tensor of words that holds nothing outside of the recording.
    ///
    /// # Errors
    /// [`Error::Operand`] if it is larger than a tensor can be.
    pub(crate) fn temporary_words(&self, label: &str, shape: &[u32]) -> Result<Tensor, Error> {
        Tensor::temporary(label, shape, DType::U32)
    }

    /// Records one dispatch of `kernel` in the tier that the target has it in.
    pub(crate) fn dispatch<P: Pod>(
        &mut self,
        kernel: &'static KernelOf<P>,
        weight: Option<WeightType>,
        constants: &[(&'static str, f64)],
        params: P,
        operands: &[&Tensor],
        grid: [u32; 3],
    ) -> Result<(), Error> {
        self.dispatch_as(self.target.tier_for(kernel, weight), kernel, weight, constants, params, operands, grid)
    }

    /// Records one dispatch of `kernel` in a tier that follows from [`Target::tier_for`] and the operands' sizes.
    #[expect(clippy::too_many_arguments)]
    pub(crate) fn dispatch_as<P: Pod>(
        &mut self,
        tier: Tier,
        kernel: &'static KernelOf<P>,
        weight: Option<WeightType>,
        constants: &[(&'static str, f64)],
        params: P,
        operands: &[&Tensor],
        grid: [u32; 3],
    ) -> Result<(), Error> {
        let params = kernel.params_bytes(&params);
        self.push(tier, &kernel.kernel, weight, constants, params, operands, grid)
    }

    #[expect(clippy::too_many_arguments)]
    fn push(
        &mut self,
        tier: Tier,
        kernel: &'static Kernel,
        weight: Option<WeightType>,
        constants: &[(&'static str, f64)],
        params: Vec<u8>,
        operands: &[&Tensor],
        grid: [u32; 3],
    ) -> Result<(), Error> {
        debug_assert_eq!(operands.len(), kernel.bindings.len(), "{}", kernel.name);
        let variant = kernel.variant(weight, tier).ok_or_else(|| Error::Operand {
            kernel: kernel.name,
            operand: "w",
            expected: "a weight type of the kernel".into(),
            found: format!("{weight:?}"),
        })?;
        let limits = self.target.limits();
        if let Some(&found) = grid.iter().find(|&&n| n > limits.max_workgroups) {
            return Err(Error::Operand {
                kernel: kernel.name,
                operand: "grid",
                expected: format!("at most {} workgroups in a dimension", limits.max_workgroups),
                found: found.to_string(),
            });
        }
        for (i, (binding, operand)) in kernel.bindings.iter().zip(operands).enumerate() {
            if operand.size_bytes() > limits.max_binding_bytes {
                return Err(Error::Operand {
                    kernel: kernel.name,
                    operand: binding.name,
                    expected: format!("at most {} bytes, the adapter's limit for a binding", limits.max_binding_bytes),
                    found: format!("{} bytes", operand.size_bytes()),
                });
            }
            if operand.dtype() != binding.dtype {
                return Err(Error::Operand {
                    kernel: kernel.name,
                    operand: binding.name,
                    expected: format!("a tensor of {:?}", binding.dtype),
                    found: format!("one of {:?}", operand.dtype()),
                });
            }
            let alias = operands.iter().enumerate().any(|(j, o)| j != i && Arc::ptr_eq(&o.storage, &operand.storage));
            if binding.writes && alias {
                return Err(Error::Operand {
                    kernel: kernel.name,
                    operand: binding.name,
                    expected: "a tensor that no other operand shares".into(),
                    found: format!("`{}`", operand.label()),
                });
            }
        }
        let mut constants = constants.to_vec();
        if self.target.limits().converts_slowly && variant.has_override(overrides::BY_BITS) {
            constants.push((overrides::BY_BITS, 1.0));
        }
        self.steps.push(Step {
            kernel,
            variant,
            constants,
            params,
            operands: operands.iter().map(|&o| o.clone()).collect(),
            grid,
            layer: self.layer,
            batch_invariance: self.batch_invariance,
        });
        Ok(())
    }

    /// Replaces the variants of a kernel's steps by those of an ablation, and sets overrides of their shaders.
    ///
    /// # Errors
    /// What is missing: the ablation of a variant, or an override.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn ablate(
        &mut self,
        kernel: &Kernel,
        ablation: Option<&'static Ablation>,
        overrides: &[(&'static str, f64)],
    ) -> Result<(), String> {
        for step in self.steps.iter_mut().filter(|step| step.kernel.id == kernel.id) {
            if let Some(ablation) = ablation.filter(|ablation| ablation.kernel.id == kernel.id) {
                let is_same = |v: &&Variant| (v.tier, v.weight) == (step.variant.tier, step.variant.weight);
                let found = ablation.variants.iter().find(is_same);
                step.variant = found.ok_or_else(|| format!("{} has no such ablation", step.variant.label))?;
            }
            if let Some((name, _)) = overrides.iter().find(|(name, _)| !step.variant.has_override(name)) {
                return Err(format!("{} has no override {name}", step.variant.label));
            }
            step.constants.retain(|(name, _)| overrides.iter().all(|(other, _)| other != name));
            step.constants.extend(overrides);
        }
        Ok(())
    }

    /// Ends the recording and places its temporaries in `workspace`.
    pub fn finish(self, workspace: &mut Workspace) -> Recording {
        self.finish_in(workspace, Workspace::LARGEST_MISMATCH)
    }

    /// As [`Recorder::finish`], of a recording that is smaller than one whose temporaries are there: it takes what room
    /// there is, however large.
    pub(crate) fn finish_within(self, workspace: &mut Workspace) -> Recording {
        self.finish_in(workspace, u64::MAX)
    }

    fn finish_in(self, workspace: &mut Workspace, largest_mismatch: u64) -> Recording {
        workspace.place(&self.steps, largest_mismatch);
        Recording {
            params_bytes: self.target.params_bytes(self.steps.len()),
            steps: self.steps.into(),
            choices: self.choices,
            prepared: Attached::default(),
            tested: OnceLock::new(),
        }
    }
}

/// Memory for the temporaries of recordings that never run at the same time: each recording finds all of it free.
#[derive(Debug, Default)]
pub struct Workspace {
    blocks: Vec<Arc<MemoryBlock>>,
}

impl Workspace {
    /// A block serves a temporary that needs at least this share of it; a larger mismatch would waste more than it saves.
    const LARGEST_MISMATCH: u64 = 4;

    /// Gives each temporary of `steps` the tightest block that is free from its first to its last use.
    fn place(&mut self, steps: &[Step], largest_mismatch: u64) {
        let mut last_use: HashMap<*const TensorStorage, usize> = HashMap::new();
        for (i, step) in steps.iter().enumerate() {
            for operand in &step.operands {
                last_use.insert(Arc::as_ptr(&operand.storage), i);
            }
        }
        let mut free: Vec<usize> = (0..self.blocks.len()).collect();
        let mut placed: HashMap<*const TensorStorage, usize> = HashMap::new();
        for (i, step) in steps.iter().enumerate() {
            for operand in &step.operands {
                let storage = &operand.storage;
                if storage.block().is_some() {
                    continue;
                }
                let size = size_class(storage.size_bytes);
                let fits = |&at: &usize| {
                    let has = self.blocks[at].size_bytes;
                    has >= size && has / largest_mismatch <= size
                };
                let found = free.iter().copied().filter(fits).min_by_key(|&at| self.blocks[at].size_bytes);
                let at = found.unwrap_or_else(|| {
                    self.blocks.push(MemoryBlock::new(size, Role::Activations));
                    self.blocks.len() - 1
                });
                free.retain(|&other| other != at);
                storage.place(&self.blocks[at]);
                placed.insert(Arc::as_ptr(storage), at);
            }
            for operand in &step.operands {
                let storage = Arc::as_ptr(&operand.storage);
                if last_use.get(&storage) == Some(&i) {
                    free.extend(placed.remove(&storage));
                }
            }
        }
    }
}

/// Rounds a size up so that few distinct sizes occur: to a multiple of 256 bytes and of an eighth of its power of two.
pub(crate) fn size_class(size_bytes: u64) -> u64 {
    let step = (size_bytes.next_power_of_two() / 8).max(256);
    size_bytes.next_multiple_of(step)
}

/// A step, ready to be replayed any number of times by [`Device::run`](crate::Device::run).
pub struct Recording {
    /// Bytes that the params of its dispatches take on the target.
    params_bytes: u64,
    /// Shared with the threads that run them.
    pub(crate) steps: Arc<[Step]>,
    choices: Vec<Choice>,
    /// What the executor made of it to replay it.
    pub(crate) prepared: Attached,
    /// Set once the self-test has nothing against its pipelines.
    pub(crate) tested: OnceLock<()>,
}

impl Recording {
    /// The steps of each layer, in order, so that a layer's matrices can come and go while the recording runs.
    pub(crate) fn layers(&self) -> impl Iterator<Item = (u32, Range<usize>)> {
        let mut end = 0;
        self.steps.chunk_by(|a, b| a.layer == b.layer).filter_map(move |steps| {
            let start = end;
            end += steps.len();
            Some((steps[0].layer?, start..end))
        })
    }

    /// Where the host has to bring experts and to replace their numbers by those of their slots, in order.
    pub(crate) fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// Number of dispatches in one run.
    pub fn n_dispatches(&self) -> usize {
        self.steps.len()
    }

    /// Bytes of all operands of all dispatches: what kernels read and write if each does so once.
    pub(crate) fn operand_bytes(&self) -> u64 {
        self.steps.iter().flat_map(|step| &step.operands).map(Tensor::size_bytes).sum()
    }

    /// Its dispatches in order.
    pub fn dispatches(&self) -> impl Iterator<Item = Dispatch<'_>> {
        self.steps.iter().map(Dispatch)
    }

    /// Labels of the shader variants in order.
    pub fn labels(&self) -> impl Iterator<Item = &'static str> {
        self.steps.iter().map(|step| step.variant.label)
    }

    /// Workgroups of each dispatch in order, so that a test can tell which were folded.
    #[doc(hidden)]
    pub fn grids(&self) -> impl Iterator<Item = [u32; 3]> {
        self.steps.iter().map(|step| step.grid)
    }
}

/// One dispatch of a recording, for tools that compile or count what would run.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch<'a>(&'a Step);

impl<'a> Dispatch<'a> {
    /// The kernel.
    pub fn kernel(&self) -> &'static Kernel {
        self.0.kernel
    }

    /// The shader variant.
    pub fn variant(&self) -> &'static Variant {
        self.0.variant
    }

    /// The variant's label.
    pub fn label(&self) -> &'static str {
        self.0.variant.label
    }

    /// Values of the shader's overrides.
    pub fn constants(&self) -> &'a [(&'static str, f64)] {
        &self.0.constants
    }

    /// The kernel's params, as its `Params` in WGSL.
    pub fn params(&self) -> &'a [u8] {
        &self.0.params
    }

    /// The operands in binding order.
    pub fn operands(&self) -> &'a [Tensor] {
        &self.0.operands
    }

    /// Workgroups in x, y and z.
    pub fn grid(&self) -> [u32; 3] {
        self.0.grid
    }

    /// The layer of a model that it belongs to; none for what comes before the first and after the last.
    pub fn layer(&self) -> Option<u32> {
        self.0.layer
    }
}

/// Bytes needed, by role, each piece of memory counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MemoryPlan {
    /// Weights and tables.
    pub weights_bytes: u64,
    /// Cached keys and values.
    pub cache_bytes: u64,
    /// Temporaries, logits, state, kernel params.
    pub activations_bytes: u64,
}

impl std::ops::Add for MemoryPlan {
    type Output = MemoryPlan;

    fn add(self, other: MemoryPlan) -> MemoryPlan {
        MemoryPlan {
            weights_bytes: self.weights_bytes + other.weights_bytes,
            cache_bytes: self.cache_bytes + other.cache_bytes,
            activations_bytes: self.activations_bytes + other.activations_bytes,
        }
    }
}

impl MemoryPlan {
    /// What `recordings` need in all, together with tensors that no recording mentions.
    pub fn of<'a>(
        recordings: impl IntoIterator<Item = &'a Recording>,
        others: impl IntoIterator<Item = &'a Tensor>,
    ) -> MemoryPlan {
        let recordings: Vec<&Recording> = recordings.into_iter().collect();
        let recorded = recordings.iter().flat_map(|r| r.steps.iter()).flat_map(|s| &s.operands);
        let mut blocks: HashMap<*const MemoryBlock, &MemoryBlock> = HashMap::new();
        for tensor in recorded.chain(others) {
            if let Some(block) = tensor.storage.block() {
                blocks.insert(Arc::as_ptr(block), block);
            }
        }
        let params_bytes = recordings.iter().map(|r| r.params_bytes).sum();
        let mut plan = MemoryPlan { activations_bytes: params_bytes, ..MemoryPlan::default() };
        for block in blocks.values() {
            match block.role {
                Role::Weights => plan.weights_bytes += block.size_bytes,
                Role::Cache => plan.cache_bytes += block.size_bytes,
                Role::Activations => plan.activations_bytes += block.size_bytes,
            }
        }
        plan
    }

    /// The refusal of this plan, with what would fit.
    pub(crate) fn refused(&self, limit_bytes: u64, hint: String) -> Error {
        Error::Memory {
            needed_bytes: self.total_bytes(),
            limit_bytes,
            breakdown: format!(
                "weights {}, cache {}, activations {}",
                self.weights_bytes, self.cache_bytes, self.activations_bytes
            ),
            hint,
        }
    }

    /// Everything together.
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes + self.cache_bytes + self.activations_bytes
    }
}
