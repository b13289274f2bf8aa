//! Text encoders, recorded: BERT (Devlin et al. 2018, arXiv:1810.04805) and its relatives. Sequences of a batch are packed
//! one after the other, without padding.

use super::encoder_weights::{EncoderLayer, EncoderWeights, Half};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{AttentionConfig, Gelu, PackedTiles, Pooling, attention_packed, embed_sum, pool};
use crate::model::config::{config_error, in_range};
use crate::recording::Recorder;
use crate::tensor::{Role, Tensor};

/// Shape of an encoder of the BERT family. Each field names its key in GGUF metadata (the architecture stands in front)
/// and in `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderConfig {
    /// `general.architecture`; `model_type`.
    pub architecture: String,
    /// C, model width: `embedding_length`; `hidden_size`.
    pub dim: u32,
    /// F, feed-forward width: `feed_forward_length`; `intermediate_size`.
    pub ffn_dim: u32,
    /// `block_count`; `num_hidden_layers`.
    pub n_layers: u32,
    /// H: `attention.head_count`; `num_attention_heads`.
    pub n_heads: u32,
    /// V: rows of `token_embd.weight`; `vocab_size`.
    pub vocab_size: u32,
    /// Rows of the table of positions: `context_length`; `max_position_embeddings`.
    pub n_positions: u32,
    /// Row of a sequence's first token in that table: 0, and in RoBERTa the row behind the padding token's.
    pub first_position: u32,
    /// Rows of the table of token types: `token_type_count`; `type_vocab_size`.
    pub n_token_types: u32,
    /// `attention.layer_norm_epsilon`; `layer_norm_eps`.
    pub norm_eps: f32,
    /// Form of the feed-forward's activation; `hidden_act`.
    pub gelu: Gelu,
}

impl EncoderConfig {
    /// D, size of a head.
    pub fn head_dim(&self) -> u32 {
        self.dim / self.n_heads
    }

    /// Longest sequence.
    pub fn max_seq_len(&self) -> u32 {
        self.n_positions - self.first_position
    }

    /// Refuses values that no model has or that the kernels cannot compute, before anything is sized by them.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field as GGUF and, in brackets, as `config.json` calls it.
    pub fn check(&self) -> Result<(), Error> {
        in_range("embedding_length (hidden_size)", self.dim, 1 << 20)?;
        in_range("feed_forward_length (intermediate_size)", self.ffn_dim, 1 << 20)?;
        in_range("block_count (num_hidden_layers)", self.n_layers, 1 << 12)?;
        in_range("attention.head_count (num_attention_heads)", self.n_heads, 1 << 12)?;
        in_range("vocab_size", self.vocab_size, 1 << 24)?;
        in_range("context_length (max_position_embeddings)", self.n_positions, 1 << 20)?;
        if self.n_token_types > 1 << 10 {
            return Err(config_error("token_type_count (type_vocab_size)", "0 to 1024".into(), self.n_token_types));
        }
        if !self.dim.is_multiple_of(self.n_heads) {
            let expected = format!("a divisor of the width {}", self.dim);
            return Err(config_error("attention.head_count (num_attention_heads)", expected, self.n_heads));
        }
        if self.head_dim() > 256 || !self.head_dim().is_multiple_of(4) {
            let expected = "heads of a multiple of 4 up to 256".into();
            return Err(config_error("attention.head_count (num_attention_heads)", expected, self.n_heads));
        }
        if self.first_position >= self.n_positions {
            let expected = format!("below the {} positions", self.n_positions);
            return Err(config_error("pad_token_id", expected, self.first_position));
        }
        if !(self.norm_eps >= 0.0 && self.norm_eps < 1.0) {
            return Err(config_error("attention.layer_norm_epsilon (layer_norm_eps)", "0 to 1".into(), self.norm_eps));
        }
        Ok(())
    }

    fn attention(&self) -> AttentionConfig {
        AttentionConfig {
            n_heads: self.n_heads,
            n_kv_heads: self.n_heads,
            head_dim: self.head_dim(),
            window: None,
            scale: (self.head_dim() as f32).powf(-0.5),
            soft_cap: None,
            causal: false,
        }
    }
}

/// What a batch of packed sequences may hold at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchSize {
    /// T, tokens of all sequences.
    pub n_tokens: u32,
    /// B.
    pub n_sequences: u32,
}

/// Tensors that a batch shares with the host.
#[derive(Clone, Debug)]
pub struct BatchTensors {
    /// Token id, position and token type of each token, `[T, 3]`. The rest of it is 0.
    pub tokens: Tensor,
    /// Tiles of attention.
    pub tiles: PackedTiles,
    /// First and end row of each sequence, `[B, 2]`. The rest of it is 0.
    pub spans: Tensor,
    /// A vector for each sequence, `[B, C]`.
    pub vectors: Tensor,
}

impl BatchTensors {
    /// Declares them for batches of `size`, whose sequences have up to `max_len` tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if they are too large.
    pub fn declare(
        device: &Device,
        config: &EncoderConfig,
        size: BatchSize,
        max_len: u32,
    ) -> Result<BatchTensors, Error> {
        let BatchSize { n_tokens, n_sequences } = size;
        let tensor = |label, shape: &[u32], dtype| Tensor::declare(label, Role::Activations, shape, dtype);
        Ok(BatchTensors {
            tokens: tensor("tokens", &[n_tokens, 3], DType::U32)?,
            tiles: PackedTiles::declare(device, &config.attention(), [n_tokens, n_sequences, max_len])?,
            spans: tensor("spans", &[n_sequences, 2], DType::U32)?,
            vectors: tensor("vectors", &[n_sequences, config.dim], DType::F32)?,
        })
    }
}

/// An encoder.
#[derive(Clone, Debug)]
pub struct Encoder {
    /// Its shape.
    pub config: EncoderConfig,
    /// Its weights.
    pub weights: EncoderWeights,
}

impl Encoder {
    /// Records a pass over a batch up to the last layer's output, `[T, C]`, which it returns.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the tensors do not fit the configuration.
    pub fn record_layers(&self, rec: &mut Recorder, io: &BatchTensors) -> Result<Tensor, Error> {
        let EncoderWeights { token_embd, positions, token_types, embd_norm, layers } = &self.weights;
        let [n_tokens, _] = io.tokens.dims2("embed_sum", "tokens")?;
        let sum = rec.temporary("sum", &[n_tokens, self.config.dim])?;
        embed_sum(rec, &io.tokens, token_embd, Some(positions), token_types.as_ref(), &sum)?; // [T, C]
        let h = rec.temporary("h", &[n_tokens, self.config.dim])?;
        embd_norm.record(rec, &sum, &h, self.config.norm_eps)?; // [T, C]
        layers.iter().try_fold(h, |h, layer| self.record_layer(rec, layer, io, h))
    }

    /// Records a layer, whose norms stand behind its halves: `[T, C]` to `[T, C]`.
    fn record_layer(
        &self,
        rec: &mut Recorder,
        layer: &EncoderLayer,
        io: &BatchTensors,
        h: Tensor,
    ) -> Result<Tensor, Error> {
        let config = &self.config;
        let [n_tokens, dim] = h.dims2("layer", "h")?;
        let qkv = rec.temporary("qkv", &[n_tokens, 3 * dim])?;
        layer.attn_qkv.record_tiled(rec, &h, None, false, &qkv)?; // [T, 3 C]
        let mixed = rec.temporary("mixed", &[n_tokens, dim])?;
        attention_packed(rec, &io.tiles, &config.attention(), &qkv, &mixed)?; // [T, C]
        let h = self.record_half(rec, &layer.attn_output, &mixed, h)?; // [T, C]
        let up = rec.temporary("up", &[n_tokens, config.ffn_dim])?;
        layer.ffn_up.record_tiled(rec, &h, Some(config.gelu), false, &up)?; // [T, F]
        self.record_half(rec, &layer.ffn_down, &up, h) // [T, C]
    }

    /// Records the vectors of all sequences from the last layer's output.
    ///
    /// # Errors
    /// [`Error::Shape`] if `h` is not `[T, C]`.
    pub fn record_pooling(
        &self,
        rec: &mut Recorder,
        io: &BatchTensors,
        h: &Tensor,
        pooling: Pooling,
        normalize: bool,
    ) -> Result<(), Error> {
        pool(rec, pooling, normalize, &io.spans, h, &io.vectors) // [B, C]
    }

    /// Records the end of a layer's half, `LayerNorm(h + x wᵀ + bias)`: `[T, K]` and `[T, C]` to `[T, C]`.
    fn record_half(&self, rec: &mut Recorder, half: &Half, x: &Tensor, h: Tensor) -> Result<Tensor, Error> {
        half.product.record_tiled(rec, x, None, true, &h)?;
        let normed = rec.temporary("h", h.shape())?;
        half.norm.record(rec, &h, &normed, self.config.norm_eps)?;
        Ok(normed)
    }
}
