//! A model's configuration, whatever file it came from.

use crate::error::Error;
use crate::kernels::RopeConfig;

/// Shape of a Llama-family model. Each field names its key in GGUF metadata (`llama.` stands in front) and in
/// `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
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
    /// D: `attention.key_length`; `head_dim`. C / H if neither says.
    pub head_dim: u32,
    /// V: rows of `token_embd.weight`; `vocab_size`.
    pub vocab_size: u32,
    /// Positions that the model was trained on: `context_length`; `max_position_embeddings`.
    pub max_seq_len: u32,
    /// `attention.layer_norm_rms_epsilon`; `rms_norm_eps`.
    pub norm_eps: f32,
    /// `rope.dimension_count`, `rope.freq_base`, `rope.scaling.*`, `rope_freqs.weight`; `rope_theta`, `rope_scaling`.
    pub rope: RopeConfig,
    /// Keys that a query sees: `attention.sliding_window`; `sliding_window`.
    pub window: Option<u32>,
}

impl ModelConfig {
    /// Width of the fused projection of queries, keys and values.
    pub fn qkv_dim(&self) -> u32 {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Width of all query heads.
    pub fn q_dim(&self) -> u32 {
        self.n_heads * self.head_dim
    }

    /// Refuses values that no model has or that the kernels cannot compute, before anything is sized by them.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field as GGUF and, in brackets, as `config.json` calls it.
    pub fn check(&self) -> Result<(), Error> {
        /// Far above every published model, and low enough that no product below overflows.
        const MAX_DIM: u32 = 1 << 20;
        const MAX_LAYERS: u32 = 1 << 12;
        const MAX_HEADS: u32 = 1 << 12;
        in_range("embedding_length (hidden_size)", self.dim, MAX_DIM)?;
        in_range("feed_forward_length (intermediate_size)", self.ffn_dim, MAX_DIM)?;
        in_range("block_count (num_hidden_layers)", self.n_layers, MAX_LAYERS)?;
        in_range("attention.head_count (num_attention_heads)", self.n_heads, MAX_HEADS)?;
        in_range("attention.head_count_kv (num_key_value_heads)", self.n_kv_heads, MAX_HEADS)?;
        in_range("attention.key_length (head_dim)", self.head_dim, 256)?;
        in_range("vocab_size", self.vocab_size, 1 << 24)?;
        in_range("context_length (max_position_embeddings)", self.max_seq_len, 1 << 28)?;
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let expected = format!("a divisor of the {} query heads", self.n_heads);
            return Err(config_error("attention.head_count_kv (num_key_value_heads)", expected, self.n_kv_heads));
        }
        if !self.head_dim.is_multiple_of(4) {
            return Err(config_error("attention.key_length (head_dim)", "a multiple of 4".into(), self.head_dim));
        }
        let rot_dims = self.rope.rot_dims;
        if rot_dims == 0 || !rot_dims.is_multiple_of(2) || rot_dims > self.head_dim {
            let expected = format!("an even number up to the head size {}", self.head_dim);
            return Err(config_error("rope.dimension_count", expected, rot_dims));
        }
        if !(self.norm_eps >= 0.0 && self.norm_eps < 1.0) {
            return Err(config_error(
                "attention.layer_norm_rms_epsilon (rms_norm_eps)",
                "0 to 1".into(),
                self.norm_eps,
            ));
        }
        if !(self.rope.theta.is_finite() && self.rope.theta >= 1.0) {
            return Err(config_error("rope.freq_base (rope_theta)", "a finite number from 1".into(), self.rope.theta));
        }
        if self.window == Some(0) {
            return Err(config_error("attention.sliding_window", "at least 1".into(), 0));
        }
        Ok(())
    }
}

/// Refuses a number outside of 1 to `max`.
pub(super) fn in_range(field: &str, value: u32, max: u32) -> Result<(), Error> {
    match value {
        1.. if value <= max => Ok(()),
        _ => Err(config_error(field, format!("1 to {max}"), value)),
    }
}

/// A configuration error with the value that was found.
pub(super) fn config_error(field: &str, expected: String, found: impl ToString) -> Error {
    Error::Config { field: field.into(), expected, found: found.to_string() }
}
