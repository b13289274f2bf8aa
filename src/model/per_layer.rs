//! Per-layer embeddings (Gemma 4, 2026): a second embedding table whose rows have a part per layer. A part is added
//! to a projection of the token embedding, and gates a third half of its layer.

use super::config::{ModelConfig, PerLayer};
use super::decoder::PassTensors;
use super::forward::Transformer;
use super::stack::{RowPlaces, Stack, TensorSlot, WeightSource, describe, table};
use super::weights::NormWeights;
use crate::error::Error;
use crate::kernels::{Activation, Embedding, Gates, Gelu, add_rms_norm, multiply};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::Tensor;

/// Weights of the per-layer embeddings outside the layers.
#[derive(Clone, Debug)]
pub struct PerLayerWeights {
    /// `[V, L P]`, gathered by token.
    pub token_embd: Matrix,
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
        let found = describe(source, Self::TABLE, &[vocab_size, width])?;
        Ok(PerLayerWeights {
            token_embd: Matrix::declare(target, Self::TABLE, found.weight, vocab_size, width)?,
            proj: Stack::declare(target, source, "", &[("per_layer_model_proj", width)], config.dim)?,
            norm: table(source, "per_layer_proj_norm.weight", &[dim])?,
        })
    }

    /// Destination of the table's rows.
    pub(super) fn destination(&self) -> (&str, TensorSlot) {
        (Self::TABLE, TensorSlot::Rows { matrix: self.token_embd.clone(), places: RowPlaces::from(0) })
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
        let embedding = Embedding { factor: (dim as f32).sqrt(), ..Embedding::new(&weights.token_embd) };
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

    /// Records a layer's third half and output scale: `(h + norm(proj (gelu(gate h) * part))) * scale`.
    pub(super) fn record_per_layer(
        &self,
        rec: &mut Recorder,
        l: usize,
        half: &PerLayerHalf,
        parts: &Tensor,
        h: &Tensor,
    ) -> Result<(), Error> {
        let [n_tokens, width] = parts.dims2("per_layer", "parts")?;
        let dim = width / self.config.n_layers();
        let gate = rec.temporary("gate", &[n_tokens, dim])?;
        half.gate.record_activated(rec, h, Activation::Gelu(Gelu::Tanh), &gate)?; // [T, P]
        multiply(rec, Gates { columns: parts, start: l as u32 * dim, size: 1 }, &gate)?;
        let result = rec.temporary("result", h.shape())?;
        half.proj.record(rec, None, &gate, &result, false)?; // [T, C]
        let norm = half.norm.rms(2.0 * self.config.norm_eps);
        add_rms_norm(rec, &result, norm.weight, self.weights.blocks[l].output_scale.as_ref(), h, norm.eps)
    }
}
