//! Text encoders, recorded: BERT (Devlin et al. 2018, arXiv:1810.04805) and its relatives, and decoders that serve as
//! encoders. Sequences of a batch are packed one after the other, without padding.

use super::encoder_weights::{EncoderLayer, EncoderWeights, NormWeights, ScoreHead};
use super::weights::Stack;
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{
    Activation, AttentionConfig, Gelu, Linear, PackedTiles, Pooling, RopeConfig, attention_packed, embed_sum,
    fuses_norm, geglu, head_norm, layer_norm, linear_norm, pool, rms_norm, rope_packed, swiglu,
};
use crate::model::config::{config_error, in_range};
use crate::recording::Recorder;
use crate::tensor::{Role, Tensor};

/// How an encoder knows where a token stands.
#[derive(Clone, Debug, PartialEq)]
pub enum Positions {
    /// A table of vectors is added to those of the tokens: BERT.
    Table {
        /// Row of a sequence's first token: 0, and in RoBERTa the row behind the padding token's.
        first: u32,
    },
    /// Queries and keys are rotated.
    Rotary {
        /// In layers that see all tokens.
        global: RopeConfig,
        /// In layers with a window, where it differs.
        local: Option<RopeConfig>,
    },
}

impl Positions {
    /// The rotations: of layers that see all tokens, then of those with a window.
    pub fn ropes(&self) -> impl Iterator<Item = &RopeConfig> {
        let (global, local) = match self {
            Positions::Table { .. } => (None, None),
            Positions::Rotary { global, local } => (Some(global), local.as_ref()),
        };
        global.into_iter().chain(local)
    }
}

/// Layers that see only near tokens, all but every `global_every`-th.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalLayers {
    /// Tokens less than this away are seen.
    pub window: u32,
    /// The first layer of so many sees all tokens.
    pub global_every: u32,
}

/// What stands between the two products of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeedForward {
    /// `gelu(up)`.
    Gelu(Gelu),
    /// `gelu(gate) * up`.
    GeGlu(Gelu),
    /// `silu(gate) * up`.
    SwiGlu,
}

/// How rows are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// To mean 0 and variance 1.
    Layer {
        /// Whether a bias is added: `norm_bias`.
        bias: bool,
    },
    /// To mean square 1.
    Rms,
}

/// Shape of an encoder. Each field names its key in GGUF metadata (the architecture stands in front)
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
    /// Hkv: `attention.head_count_kv`; `num_key_value_heads`.
    pub n_kv_heads: u32,
    /// D: `attention.key_length`; `head_dim`.
    pub head_dim: u32,
    /// V: rows of `token_embd.weight`; `vocab_size`.
    pub vocab_size: u32,
    /// Longest sequence: `context_length`; `max_position_embeddings`.
    pub max_seq_len: u32,
    /// Where tokens stand.
    pub positions: Positions,
    /// Rows of the table of token types: `token_type_count`; `type_vocab_size`. 0: there is none.
    pub n_token_types: u32,
    /// Whether a norm stands in front of each half of a layer, as in ModernBERT, rather than behind its sum.
    pub norm_first: bool,
    /// How rows are normalised.
    pub norm: NormKind,
    /// Whether the sum of the embeddings is normalised. A first layer behind it has no norm in front of its attention.
    pub embd_norm: bool,
    /// Whether each head of queries and keys is normalised, as in Qwen3.
    pub qk_norm: bool,
    /// Whether a token sees those before it alone, as in a decoder.
    pub causal: bool,
    /// `attention.layer_norm_epsilon`, `attention.layer_norm_rms_epsilon`; `layer_norm_eps`, `norm_eps`,
    /// `rms_norm_eps`.
    pub norm_eps: f32,
    /// Layers with a window: `attention.sliding_window`, `attention.sliding_window_pattern`; `local_attention`,
    /// `global_attn_every_n_layers`.
    pub local: Option<LocalLayers>,
    /// `hidden_activation`; `hidden_act`.
    pub feed_forward: FeedForward,
}

impl EncoderConfig {
    /// Columns of the queries, `H * D`.
    pub fn q_dim(&self) -> u32 {
        self.n_heads * self.head_dim
    }

    /// Columns of the keys, `Hkv * D`.
    pub fn kv_dim(&self) -> u32 {
        self.n_kv_heads * self.head_dim
    }

    /// Row of a sequence's first token in the table of positions; its position where there is none.
    pub fn first_position(&self) -> u32 {
        match self.positions {
            Positions::Table { first } => first,
            Positions::Rotary { .. } => 0,
        }
    }

    /// Rows of the first product of a feed-forward: gates come with their values.
    pub fn up_dim(&self) -> u32 {
        match self.feed_forward {
            FeedForward::Gelu(_) => self.ffn_dim,
            FeedForward::GeGlu(_) | FeedForward::SwiGlu => 2 * self.ffn_dim,
        }
    }

    /// Whether a layer sees only near tokens.
    fn is_local(&self, layer: usize) -> bool {
        self.local.is_some_and(|local| !(layer as u32).is_multiple_of(local.global_every))
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
        in_range("context_length (max_position_embeddings)", self.max_seq_len, 1 << 20)?;
        if self.n_token_types > 1 << 10 {
            return Err(config_error("token_type_count (type_vocab_size)", "0 to 1024".into(), self.n_token_types));
        }
        if self.first_position() > 1 << 20 {
            return Err(config_error("pad_token_id", "up to 1048575".into(), self.first_position() - 1));
        }
        in_range("attention.head_count_kv (num_key_value_heads)", self.n_kv_heads, self.n_heads)?;
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let expected = format!("a divisor of the {} heads", self.n_heads);
            return Err(config_error("attention.head_count_kv (num_key_value_heads)", expected, self.n_kv_heads));
        }
        if self.head_dim == 0 || self.head_dim > 256 || !self.head_dim.is_multiple_of(4) {
            let expected = "heads of a multiple of 4 up to 256".into();
            return Err(config_error("attention.key_length (head_dim)", expected, self.head_dim));
        }
        if !(self.norm_eps >= 0.0 && self.norm_eps < 1.0) {
            let field = "attention.layer_norm_epsilon (layer_norm_eps)";
            return Err(config_error(field, "0 to 1".into(), self.norm_eps));
        }
        if let Some(LocalLayers { window, global_every }) = self.local {
            in_range("attention.sliding_window (local_attention)", window, 1 << 20)?;
            let field = "attention.sliding_window_pattern (global_attn_every_n_layers)";
            in_range(field, global_every, 1 << 12)?;
        }
        let is_wrong = |rope: &&RopeConfig| !(rope.theta.is_finite() && rope.theta >= 1.0);
        if let Some(rope) = self.positions.ropes().find(is_wrong) {
            return Err(config_error("rope.freq_base (rope_theta)", "a finite number from 1".into(), rope.theta));
        }
        Ok(())
    }

    fn attention(&self, is_local: bool) -> AttentionConfig {
        AttentionConfig {
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            window: self.local.filter(|_| is_local).map(|local| local.window),
            scale: (self.head_dim as f32).powf(-0.5),
            soft_cap: None,
            causal: self.causal,
        }
    }
}

/// What makes a score of a sequence: its pooled row, a product with an activation, a norm, and a row of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreConfig {
    /// Which row: `classifier.pooling_type`; `classifier_pooling`.
    pub pooling: Pooling,
    /// Behind the first product: `classifier_activation`.
    pub activation: Activation,
    /// Whether a norm stands behind it, as in ModernBERT.
    pub norm: bool,
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
            tiles: PackedTiles::declare(device, &config.attention(false), [n_tokens, n_sequences, max_len])?,
            spans: tensor("spans", &[n_sequences, 2], DType::U32)?,
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
        let EncoderWeights { token_embd, positions, token_types, embd_norm, layers, output_norm, .. } = &self.weights;
        let [n_tokens, _] = io.tokens.dims2("embed_sum", "tokens")?;
        let sum = rec.temporary("sum", &[n_tokens, self.config.dim])?;
        embed_sum(rec, &io.tokens, token_embd, positions.as_ref(), token_types.as_ref(), &sum)?; // [T, C]
        let mut h = self.normed(rec, embd_norm.as_ref(), &sum)?; // [T, C]
        for (l, layer) in layers.iter().enumerate() {
            h = self.record_layer(rec, l, layer, io, h)?; // [T, C]
        }
        match output_norm {
            Some(_) => self.normed(rec, output_norm.as_ref(), &h),
            None => Ok(h),
        }
    }

    /// Records a layer: `[T, C]` to `[T, C]`.
    fn record_layer(
        &self,
        rec: &mut Recorder,
        l: usize,
        layer: &EncoderLayer,
        io: &BatchTensors,
        h: Tensor,
    ) -> Result<Tensor, Error> {
        let config = &self.config;
        let [n_tokens, _] = h.dims2("layer", "h")?;
        let heads = [config.n_heads, config.n_kv_heads, config.head_dim];
        let is_local = config.is_local(l);
        let in_front = |norm: &'_ Option<NormWeights>| norm.clone().filter(|_| config.norm_first);

        let x = self.normed(rec, in_front(&layer.attn_norm).as_ref(), &h)?;
        let qkv = rec.temporary("qkv", &[n_tokens, config.q_dim() + 2 * config.kv_dim()])?;
        layer.attn_qkv.record_tiled(rec, &x, None, false, &qkv)?; // [T, (H + 2 Hkv) D]
        if let Some(weights) = &layer.qk_norm {
            head_norm(rec, heads, weights, config.norm_eps, &qkv)?;
        }
        let ropes = config.positions.ropes().zip(&self.weights.rope);
        if let Some((rope, table)) = ropes.take(1 + usize::from(is_local)).last() {
            rope_packed(rec, rope, heads, &io.tokens, table, &qkv)?;
        }
        let mixed = rec.temporary("mixed", &[n_tokens, config.q_dim()])?;
        attention_packed(rec, &io.tiles, &config.attention(is_local), &qkv, &mixed)?; // [T, H D]
        let h = self.record_sum(rec, &layer.attn_output, layer.attn_norm.as_ref(), &mixed, h)?; // [T, C]

        let x = self.normed(rec, in_front(&layer.ffn_norm).as_ref(), &h)?;
        let up = rec.temporary("up", &[n_tokens, config.up_dim()])?;
        let activation = match config.feed_forward {
            FeedForward::Gelu(gelu) => Some(Activation::Gelu(gelu)),
            FeedForward::GeGlu(_) | FeedForward::SwiGlu => None,
        };
        layer.ffn_up.record_tiled(rec, &x, activation, false, &up)?; // [T, F], or gate and up, [T, 2 F]
        let gated = || rec.temporary("gated", &[n_tokens, config.ffn_dim]);
        let activated = match config.feed_forward {
            FeedForward::Gelu(_) => up,
            FeedForward::GeGlu(gelu) => {
                let gated = gated()?;
                geglu(rec, &up, &gated, gelu)?; // [T, F]
                gated
            }
            FeedForward::SwiGlu => {
                let gated = gated()?;
                swiglu(rec, &up, &gated)?; // [T, F]
                gated
            }
        };
        self.record_sum(rec, &layer.ffn_down, layer.ffn_norm.as_ref(), &activated, h) // [T, C]
    }

    /// Records a norm, if there is one.
    fn normed(&self, rec: &mut Recorder, norm: Option<&NormWeights>, x: &Tensor) -> Result<Tensor, Error> {
        let Some(norm) = norm else { return Ok(x.clone()) };
        let normed = rec.temporary("normed", x.shape())?;
        match self.config.norm {
            NormKind::Layer { .. } => layer_norm(rec, x, &norm.with(self.config.norm_eps), &normed)?,
            NormKind::Rms => rms_norm(rec, x, norm.weight(), &normed, self.config.norm_eps)?,
        }
        Ok(normed)
    }

    /// Records a row for each sequence, `[B, C]`, from the last layer's output.
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
    /// As [`Encoder::record_pooling`].
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
        head.dense.record_tiled(rec, &pooled, Some(head.config.activation), false, &dense)?; // [B, C]
        let normed = self.normed(rec, head.norm.as_ref(), &dense)?; // [B, C]
        head.output.record_tiled(rec, &normed, None, false, scores) // [B, 1]
    }

    /// Records the end of a layer's half, `h + x wᵀ (+ bias)`, with the norm if it stands behind: `[T, K]` and `[T, C]` to
    /// `[T, C]`.
    fn record_sum(
        &self,
        rec: &mut Recorder,
        product: &Stack,
        norm: Option<&NormWeights>,
        x: &Tensor,
        h: Tensor,
    ) -> Result<Tensor, Error> {
        let norm = norm.filter(|_| !self.config.norm_first);
        let is_layer_norm = matches!(self.config.norm, NormKind::Layer { .. });
        if let (Some(norm), Some(linear), true) = (norm, product.as_tiled(), is_layer_norm) {
            let linear = Linear { accumulate: true, ..linear };
            if fuses_norm(rec, &linear) {
                linear_norm(rec, &linear, &norm.with(self.config.norm_eps), x, &h)?;
                return Ok(h);
            }
        }
        product.record_tiled(rec, x, None, true, &h)?;
        self.normed(rec, norm, &h)
    }
}
