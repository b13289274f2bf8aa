//! Per-layer embeddings (Gemma 4, 2026): a second embedding table whose rows have a part per layer. A part is added
//! to a projection of the token embedding, and gates a third half of its layer. EmbeddingGemma 2 has no table, only the
//! projection.

use super::config::{ModelConfig, PerLayer};
use super::decoder::PassTensors;
use super::forward::{Flow, Transformer};
use super::stack::{RowPlaces, Stack, TensorSlot, WeightSource, describe, table};
use super::weights::NormWeights;
use crate::error::Error;
use crate::kernels::{Activation, Embedding, Gates, Gelu, Input, add_rms_norm, multiply, rms_norm};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::Tensor;

/// Weights of the per-layer embeddings outside the layers.
#[derive(Clone, Debug)]
pub struct PerLayerWeights {
    /// `[V, L P]`, gathered by token, if any.
    pub token_embd: Option<Matrix>,
    /// `[L P, C]`.
    pub proj: Stack,
    /// Norm of each layer's part of the projection, `[P]`.
    pub norm: Tensor,
}

impl PerLayerWeights {
    pub(super) const TABLE: &str = "per_layer_token_embd.weight";

    pub(super) fn declare(
        target: &Target,
        source: &dyn WeightSource,
        config: &ModelConfig,
        PerLayer { dim, vocab_size }: PerLayer,
    ) -> Result<PerLayerWeights, Error> {
        let width = dim.saturating_mul(config.n_layers());
        let token_embd = match vocab_size {
            0 => None,
            _ => {
                let found = describe(source, Self::TABLE, &[vocab_size, width])?;
                Some(Matrix::declare(target, Self::TABLE, found.weight, vocab_size, width)?)
            }
        };
        Ok(PerLayerWeights {
            token_embd,
            proj: Stack::declare(target, source, "", &[("per_layer_model_proj", width)], config.dim)?,
            norm: table(source, "per_layer_proj_norm.weight", &[dim])?,
        })
    }

    /// Destination of the table's rows.
    pub(super) fn destination(&self) -> Option<(&str, TensorSlot)> {
        let matrix = self.token_embd.clone()?;
        Some((Self::TABLE, TensorSlot::Rows { matrix, places: RowPlaces::from(0) }))
    }
}

/// Weights of a layer's third half.
#[derive(Clone, Debug)]
pub struct PerLayerHalf {
    /// `[P, C]`.
    pub gate: Stack,
    /// `[C, P]`.
    pub proj: Stack,
    /// Norm of the result.
    pub norm: NormWeights,
}

impl PerLayerHalf {
    pub(super) fn declare(
        target: &Target,
        source: &dyn WeightSource,
        config: &ModelConfig,
        prefix: &str,
        width: u32,
    ) -> Result<PerLayerHalf, Error> {
        let stack = |name, rows, cols| Stack::declare(target, source, prefix, &[(name, rows)], cols);
        Ok(PerLayerHalf {
            gate: stack("inp_gate", width, config.dim)?,
            proj: stack("proj", config.dim, width)?,
            norm: NormWeights::declare(source, &format!("{prefix}post_norm"), config)?,
        })
    }
}

impl Transformer {
    /// Records the parts of all layers, `sqrt(P) table[id] + norm(proj h / sqrt(C))`, `[T, L P]`. They are `sqrt(2)`
    /// times the published ones; the norm at the end of the half undoes that.
    pub(super) fn record_parts(
        &self,
        rec: &mut Recorder,
        io: &PassTensors,
        h: &Tensor,
    ) -> Result<Option<Tensor>, Error> {
        let (Some(PerLayer { dim, .. }), Some(weights)) = (self.config.per_layer, &self.weights.per_layer) else {
            return Ok(None);
        };
        let (n_tokens, n_layers) = (h.shape()[0], self.config.n_layers());
        let shape = [n_tokens, n_layers * dim];
        let Some(table) = &weights.token_embd else { return Ok(None) };
        let embedding = Embedding { factor: (dim as f32).sqrt(), ..Embedding::new(table) };
        let parts = rec.temporary("parts", &shape)?;
        io.record_embedding(rec, PerLayerWeights::TABLE, &embedding, &parts)?; // [T, L P]
        let projected = rec.temporary("projected", &shape)?;
        weights.proj.record(rec, None, h, &projected, false)?; // [T, L P]
        // A norm undoes a scale of its input, except for epsilon.
        let eps = self.config.norm_eps * self.config.dim as f32;
        let rows = [n_tokens * n_layers, dim];
        add_rms_norm(rec, &projected.reshape(&rows)?, &weights.norm, None, &parts.reshape(&rows)?, eps)?;
        Ok(Some(parts))
    }

    /// Records the parts of all layers without a table, `norm(proj h / sqrt(C))`, `[T, L P]`, of packed sequences.
    pub(super) fn record_packed_parts(&self, rec: &mut Recorder, h: &Tensor) -> Result<Option<Tensor>, Error> {
        let (Some(PerLayer { dim, .. }), Some(weights)) = (self.config.per_layer, &self.weights.per_layer) else {
            return Ok(None);
        };
        let (n_tokens, n_layers) = (h.shape()[0], self.config.n_layers());
        let shape = [n_tokens, n_layers * dim];
        let projected = rec.temporary("projected", &shape)?;
        weights.proj.record_tiled(rec, &mut Input::new(h), None, false, &projected)?; // [T, L P]
        let parts = rec.temporary("parts", &shape)?;
        let rows = [n_tokens * n_layers, dim];
        // A norm undoes a scale of its input, except for epsilon.
        let eps = self.config.norm_eps * self.config.dim as f32;
        rms_norm(rec, &projected.reshape(&rows)?, &weights.norm, &parts.reshape(&rows)?, eps)?;
        Ok(Some(parts))
    }

    /// Records a layer's third half and output scale: `(h + norm(proj (gelu(gate h) * part))) * scale`.
    pub(super) fn record_per_layer(
        &self,
        rec: &mut Recorder,
        flow: Flow<'_>,
        l: usize,
        half: &PerLayerHalf,
        parts: &Tensor,
        h: &Tensor,
    ) -> Result<(), Error> {
        let [n_tokens, width] = parts.dims2("per_layer", "parts")?;
        let dim = width / self.config.n_layers();
        let gate = rec.temporary("gate", &[n_tokens, dim])?;
        let activation = Activation::Gelu(Gelu::Tanh);
        match flow {
            Flow::Cached(..) => half.gate.record_activated(rec, h, activation, &gate)?, // [T, P]
            Flow::Packed(_) => {
                half.gate.record_tiled(rec, &mut Input::new(h), Some(activation), false, &gate)?; // [T, P]
            }
        }
        multiply(rec, Gates { columns: parts, start: l as u32 * dim, size: 1 }, &gate)?;
        let result = rec.temporary("result", h.shape())?;
        match flow {
            Flow::Cached(..) => half.proj.record(rec, None, &gate, &result, false)?, // [T, C]
            Flow::Packed(_) => {
                half.proj.record_tiled(rec, &mut Input::new(&gate), None, false, &result)?; // [T, C]
            }
        }
        let has_table = self.weights.per_layer.as_ref().is_some_and(|weights| weights.token_embd.is_some());
        let norm = half.norm.rms(if has_table { 2.0 } else { 1.0 } * self.config.norm_eps);
        add_rms_norm(rec, &result, norm.weight, self.weights.blocks[l].output_scale.as_ref(), h, norm.eps)
    }
}
