//! Forward pass of text encoders: BERT (Devlin et al. 2018, arXiv:1810.04805) and relatives, and decoders used as
//! encoders. A batch packs sequences without padding.

use super::config::{ModelConfig, config_error};
use super::forward::{Flow, Transformer};
use super::stack::{RowPlaces, Stack, TensorSlot, WeightSource};
use super::weights::NormWeights;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{Activation, Input, PackedTiles, Pooling, embed_sum, pool};
use crate::recording::Recorder;
use crate::target::Target;
use crate::tensor::{Role, Tensor};

/// Scoring head: pooled row, dense product with activation, optional norm, and a row of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreConfig {
    /// Pooling: `classifier.pooling_type`; `classifier_pooling`.
    pub pooling: Pooling,
    /// Activation after the dense product: `classifier_activation`.
    pub activation: Activation,
    /// Whether a norm follows the activation, as in ModernBERT.
    pub norm: bool,
}

/// Maximum size of a packed batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchSize {
    /// T, total number of tokens.
    pub n_tokens: u32,
    /// B, number of sequences.
    pub n_sequences: u32,
}

/// Tensors that a batch shares with the host.
#[derive(Clone, Debug)]
pub struct BatchTensors {
    /// Token id, position and token type of each token, `[T, 3]`, zero-padded.
    pub tokens: Tensor,
    /// Attention tiles.
    pub tiles: PackedTiles,
    /// First and end row of each sequence, `[B, 2]`, zero-padded.
    pub spans: Tensor,
}

impl BatchTensors {
    /// Declares tensors for batches of `size` with sequences of up to `max_len` tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if they are too large.
    pub fn declare(
        target: &Target,
        config: &ModelConfig,
        size: BatchSize,
        max_len: u32,
    ) -> Result<BatchTensors, Error> {
        let BatchSize { n_tokens, n_sequences } = size;
        // All layers share one tile table, so their heads must be alike.
        let heads = match config.blocks.as_slice() {
            [first, rest @ ..] if rest.iter().all(|block| block.attention.heads() == first.attention.heads()) => {
                first.attention.kernel(config.causal)
            }
            _ => {
                let mut heads: Vec<[u32; 3]> = config.blocks.iter().map(|block| block.attention.heads()).collect();
                heads.dedup();
                let found = format!("{heads:?}");
                return Err(config_error("attention.head_count", "the same in all layers".into(), found));
            }
        };
        let tensor = |label, shape: &[u32], dtype| Tensor::declare(label, Role::Activations, shape, dtype);
        Ok(BatchTensors {
            tokens: tensor("tokens", &[n_tokens, 3], DType::U32)?,
            tiles: PackedTiles::declare(target, &heads, [n_tokens, n_sequences, max_len])?,
            spans: tensor("spans", &[n_sequences, 2], DType::U32)?,
        })
    }
}

/// The head of a cross-encoder.
#[derive(Clone, Debug)]
pub struct ScoreHead {
    /// Configuration.
    pub config: ScoreConfig,
    /// `[C, C]`.
    pub dense: Stack,
    /// `[C]`.
    pub norm: Option<NormWeights>,
    /// `[1, C]`.
    pub output: Stack,
}

impl ScoreHead {
    /// Declares the head's tensors and checks their shapes.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has the wrong shape.
    pub fn declare(
        target: &Target,
        encoder: &ModelConfig,
        config: ScoreConfig,
        source: &dyn WeightSource,
    ) -> Result<ScoreHead, Error> {
        let stack = |name, rows| Stack::declare(target, source, "", &[(name, rows)], encoder.dim);
        let norm = if config.norm { Some(NormWeights::declare(source, "cls.norm", encoder)?) } else { None };
        Ok(ScoreHead { config, dense: stack("cls", encoder.dim)?, norm, output: stack("cls.output", 1)? })
    }

    /// Destinations of the source tensors, by name.
    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let norm = self.norm.iter().flat_map(NormWeights::tensors);
        let norm = norm
            .map(|tensor| (tensor.label(), TensorSlot::Values { tensor: tensor.clone(), places: RowPlaces::from(0) }));
        norm.chain([&self.dense, &self.output].into_iter().flat_map(Stack::tensor_slots))
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let norm = self.norm.iter().flat_map(NormWeights::tensors);
        norm.chain([&self.dense, &self.output].into_iter().flat_map(Stack::tensors))
    }
}

impl Transformer {
    /// Records a pass over a batch and returns the last layer's output, `[T, C]`.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the tensors do not fit the configuration.
    pub fn record_batch(&self, rec: &mut Recorder, io: &BatchTensors) -> Result<Tensor, Error> {
        let weights = &self.weights;
        let [n_tokens, _] = io.tokens.dims2("embed_sum", "tokens")?;
        let sum = rec.temporary("sum", &[n_tokens, self.config.dim])?;
        let tables = [&weights.positions, &weights.token_types].map(Option::as_ref);
        embed_sum(rec, &io.tokens, &weights.token_embd, tables[0], tables[1], &sum)?; // [T, C]
        let h = self.normed(rec, weights.embd_norm.as_ref(), &sum)?; // [T, C]
        let h = self.record_blocks(rec, Flow::Packed(io), None, h, &mut |_, _| Ok(()))?; // [T, C]
        self.normed(rec, weights.output_norm.as_ref(), &h) // [T, C]
    }

    /// Records the pooling of the last layer's output to a row per sequence, `[B, C]`.
    ///
    /// # Errors
    /// [`Error::Shape`] if `h` is not `[T, C]` or `vectors` not `[B, C]`.
    pub fn record_pooling(
        &self,
        rec: &mut Recorder,
        io: &BatchTensors,
        h: &Tensor,
        (pooling, normalize): (Pooling, bool),
        vectors: &Tensor,
    ) -> Result<(), Error> {
        pool(rec, pooling, normalize, &io.spans, h, vectors) // [B, C]
    }

    /// Records the scores of all sequences, `[B, 1]`, from the last layer's output.
    ///
    /// # Errors
    /// As [`Transformer::record_pooling`].
    pub fn record_scores(
        &self,
        rec: &mut Recorder,
        io: &BatchTensors,
        h: &Tensor,
        head: &ScoreHead,
        scores: &Tensor,
    ) -> Result<(), Error> {
        let shape = [io.spans.shape()[0], self.config.dim];
        let pooled = rec.temporary("pooled", &shape)?;
        self.record_pooling(rec, io, h, (head.config.pooling, false), &pooled)?; // [B, C]
        let dense = rec.temporary("dense", &shape)?;
        head.dense.record_tiled(rec, &mut Input::new(&pooled), Some(head.config.activation), false, &dense)?; // [B, C]
        let normed = self.normed(rec, head.norm.as_ref(), &dense)?; // [B, C]
        head.output.record_tiled(rec, &mut Input::new(&normed), None, false, scores) // [B, 1]
    }
}
