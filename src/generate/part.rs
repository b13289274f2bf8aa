//! A device's part of a model, declared as the placement says.

use std::ops::Range;

use super::disk_offload::{DiskOffload, layer_sizes};
use super::disk_tables;
use super::passes::{RecordedPasses, SessionLimits};
use crate::error::Error;
use crate::load::{InFile, Needs, Placement, Share, Sizes, TensorIndex, WeightFiles, WeightUploader};
use crate::model::{ExpertWeights, ModelConfig, Transformer, Weights};
use crate::recording::MemoryPlan;
use crate::target::Target;

/// A device's layers, and the output head with the last of them. Allocates nothing.
pub(super) struct ModelPart<'a> {
    target: Target,
    config: &'a ModelConfig,
    tensor_index: &'a TensorIndex,
    /// Session limits; the placement decides the context length.
    room: SessionLimits,
    layers: Range<u32>,
    /// Weights without disk offload.
    pub weights: Weights,
}

impl<'a> ModelPart<'a> {
    /// Declares the weights of all layers.
    ///
    /// # Errors
    /// As [`Weights::declare`].
    pub fn declare(
        target: Target,
        config: &'a ModelConfig,
        tensor_index: &'a TensorIndex,
        room: SessionLimits,
    ) -> Result<ModelPart<'a>, Error> {
        let weights = Weights::declare(&target, config, tensor_index)?;
        Ok(ModelPart { target, config, tensor_index, room, layers: 0..config.n_layers(), weights })
    }

    /// Restricts the part to some layers.
    pub fn of_layers(self, layers: Range<u32>) -> ModelPart<'a> {
        ModelPart { layers, ..self }
    }

    /// The transformer without offloaded layers.
    ///
    /// # Errors
    /// As [`Transformer::declare`].
    pub fn transformer(&self, context_length: u32, tables_in_file: bool) -> Result<Transformer, Error> {
        self.transformer_of(self.weights.clone(), context_length, tables_in_file)
    }

    fn transformer_of(
        &self,
        weights: Weights,
        context_length: u32,
        tables_in_file: bool,
    ) -> Result<Transformer, Error> {
        let all = Transformer::declare(self.config.clone(), weights, context_length)?;
        let transformer = all.part(self.layers.clone());
        if tables_in_file {
            return Ok(disk_tables::in_file(transformer, self.tensor_index));
        }
        Ok(transformer)
    }

    /// Whether experts can share slots and are stored consecutively in the file.
    fn may_keep_experts(&self) -> bool {
        let mut weights = self.weights.clone();
        let kept = weights.cache_experts(&self.target, self.config, self.tensor_index, self.layers.clone(), 1);
        let is_apart = |experts: &ExpertWeights| match experts.kept() {
            Some(kept) => {
                experts.can_be_cached(kept.n_experts())
                    && WeightUploader::of_expert(self.tensor_index, kept.parts(0, 0)).is_ok()
            }
            None => true,
        };
        kept.is_ok() && weights.blocks.iter().filter_map(|block| block.experts.as_ref()).all(is_apart)
    }

    fn plan_of(&self, transformer: &Transformer, context_length: u32) -> Result<MemoryPlan, Error> {
        let room = SessionLimits { context_length, ..self.room };
        Ok(RecordedPasses::declare(&self.target, transformer, room)?.plan())
    }

    /// The transformer as placed, its memory plan, and disk offload of layers, if any.
    ///
    /// # Errors
    /// As [`ModelPart::transformer`]; those of declaring slots and of recording.
    pub fn place(
        &self,
        placement: &Placement,
        files: Option<&WeightFiles>,
    ) -> Result<(Transformer, MemoryPlan, Option<DiskOffload>), Error> {
        let Placement { context_length, in_file: InFile { tables, share, fitting_context }, plan } = placement;
        let (Some(share), Some(files)) = (share, files) else {
            return Ok((self.transformer(*context_length, *tables)?, *plan, None));
        };
        // Planning has placed the tensors of `self.weights`.
        let mut weights = Weights::declare(&self.target, self.config, self.tensor_index)?;
        if let Share::Experts { n_slots } = share {
            weights.cache_experts(&self.target, self.config, self.tensor_index, self.layers.clone(), *n_slots)?;
        }
        let transformer = self.transformer_of(weights, *context_length, *tables)?;
        let streamed = DiskOffload::new(&transformer, self.tensor_index, files.clone(), share, *fitting_context);
        let plan = self.plan_of(&transformer, *context_length)?;
        Ok((transformer, plan, Some(streamed)))
    }
}

impl Needs for ModelPart<'_> {
    fn plan(&self, context_length: u32, tables_in_file: bool) -> Result<MemoryPlan, Error> {
        self.plan_of(&self.transformer(context_length, tables_in_file)?, context_length)
    }

    fn sizes(&self) -> Sizes {
        let mut layers = layer_sizes(&self.weights, self.config, self.layers.clone());
        if !self.may_keep_experts() {
            layers.iter_mut().for_each(|layer| layer.experts = None);
        }
        Sizes { layers, max_pass: self.room.max_pass }
    }
}
