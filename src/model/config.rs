//! Model configuration, independent of the file format.

use super::block::{Attention, Block, Experts, FeedForward, Latent, NormPlace, Recurrence};
use super::position_biases::PositionBiases;
use crate::error::Error;
use crate::kernels::{Decay, MAX_EXPERTS, MAX_HEAD_DIM, MAX_TAPS, RopeConfig, SelectiveScan};

/// Shape of a decoder or an encoder. Each field names its key in GGUF metadata (without the architecture prefix) and
/// in `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `general.architecture`; `model_type`.
    pub architecture: String,
    /// C, model width: `embedding_length`; `hidden_size`.
    pub dim: u32,
    /// V: rows of `token_embd.weight`; `vocab_size`.
    pub vocab_size: u32,
    /// Trained context length: `context_length`; `max_position_embeddings`.
    pub max_seq_len: u32,
    /// Layers in order, then the block of the MTP head, if there is one.
    pub blocks: Vec<Block>,
    /// Number of MTP blocks at the end, 0 or 1: `nextn_predict_layers`; `mtp_num_hidden_layers`.
    pub n_mtp: u32,
    /// Kind of norm.
    pub norm: NormKind,
    /// Epsilon: `attention.layer_norm_rms_epsilon`, `attention.layer_norm_epsilon`; `rms_norm_eps`, `layer_norm_eps`,
    /// `norm_eps`.
    pub norm_eps: f32,
    /// RoPE configurations that blocks refer to: `rope.*`; `rope_theta`, `rope_scaling`, `rope_parameters`.
    pub ropes: Vec<RopeConfig>,
    /// M-RoPE: pairs of elements that are rotated by a picture's time, row and column, interleaved, if its patches
    /// have such positions: `rope.dimension_sections`; `mrope_section`.
    pub mrope: Option<[u32; 3]>,
    /// Learned position embeddings, if any.
    pub positions: Option<PositionTable>,
    /// Biases of attention scores by relative position, if any. The layers' heads are then alike.
    pub position_biases: Option<PositionBiases>,
    /// Number of token types: `token_type_count`; `type_vocab_size`. 0: none.
    pub n_token_types: u32,
    /// Per-layer embeddings, if any.
    pub per_layer: Option<PerLayer>,
    /// Whether the sum of the embeddings is normalised.
    pub embd_norm: bool,
    /// Whether the last layer's output is normalised.
    pub output_norm: bool,
    /// Scale of the embeddings: `embedding_scale`; `embedding_multiplier`.
    pub embd_scale: f32,
    /// Scale of each half's output before the residual sum: `residual_scale`; `residual_multiplier`.
    pub residual_scale: f32,
    /// Scale of the logits: the inverse of `logit_scale`; of `logits_scaling`.
    pub logit_scale: f32,
    /// Soft cap of the logits: `final_logit_softcapping`.
    pub logit_soft_cap: Option<f32>,
    /// Whether attention is causal.
    pub causal: bool,
    /// Whether it predicts tokens, with an `output` matrix or the tied embedding.
    pub has_head: bool,
    /// Factors of rows that published checkpoints leave to the forward pass and loading multiplied into their weights:
    /// a tensor's GGUF name without the layer, and how many of its rows have which factor. Empty for GGUF files, which
    /// have them in their weights.
    pub row_factors: Vec<(&'static str, Vec<(u32, f32)>)>,
}

/// Kind of norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Layer norm: mean 0, variance 1.
    Layer {
        /// With a bias: `norm_bias`.
        bias: bool,
    },
    /// RMS norm: mean square 1.
    Rms,
}

/// Per-layer embeddings, as in Gemma 4: a second table whose rows have a part per layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerLayer {
    /// P, width of a layer's part: `embedding_length_per_layer_input`; `hidden_size_per_layer_input`.
    pub dim: u32,
    /// Rows: those of `per_layer_token_embd.weight`; `vocab_size_per_layer_input`. 0: no table, only the projection.
    pub vocab_size: u32,
}

/// Learned position embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PositionTable {
    /// Row of a sequence's first token: 0, or in RoBERTa the row after the padding token's.
    pub first: u32,
}

impl ModelConfig {
    /// Whether a pass over rows of an image must go to the image's end, because rows see those after them.
    pub(crate) fn has_bidirectional_images(&self) -> bool {
        self.blocks.iter().any(|block| block.attention.bidirectional_images)
    }

    /// Whether any layer has a window of fewer tokens.
    pub(crate) fn has_window_below(&self, n_tokens: usize) -> bool {
        self.blocks.iter().filter_map(|block| block.attention.window).any(|window| (window as usize) < n_tokens)
    }

    /// Whether any layer is recurrent, so that a sequence can only go back to positions with a saved state.
    pub fn is_recurrent(&self) -> bool {
        self.blocks.iter().any(|block| block.recurs().is_some())
    }

    /// Names of tensors that files may have but no pass reads: keys and values of layers that share another's.
    pub(crate) fn unread(&self) -> Vec<String> {
        const NAMES: [&str; 3] = ["attn_k", "attn_v", "attn_k_norm"];
        let shared = self.blocks.iter().enumerate().filter(|(_, block)| block.attention.keys_of.is_some());
        shared.flat_map(|(l, _)| NAMES.map(|name| format!("blk.{l}.{name}.weight"))).collect()
    }

    /// Number of layers, without the MTP block.
    pub fn n_layers(&self) -> u32 {
        (self.blocks.len() as u32).saturating_sub(self.n_mtp)
    }

    /// Row of a sequence's first token in the position embeddings; 0 without them.
    pub fn first_position(&self) -> u32 {
        self.positions.map_or(0, |table| table.first)
    }

    /// Refuses values beyond any model or the kernels' limits, before anything is sized by them.
    ///
    /// # Errors
    /// [`Error::Config`] naming the field's GGUF key and, in brackets, its `config.json` key.
    pub fn check(&self) -> Result<(), Error> {
        in_range("embedding_length (hidden_size)", self.dim, MAX_DIM)?;
        in_range("vocab_size", self.vocab_size, 1 << 24)?;
        in_range("context_length (max_position_embeddings)", self.max_seq_len, MAX_CONTEXT)?;
        if self.n_token_types > 1 << 10 {
            return Err(config_error("token_type_count (type_vocab_size)", "0 to 1024".into(), self.n_token_types));
        }
        if self.first_position() > 1 << 20 {
            return Err(config_error("pad_token_id", "up to 1048575".into(), self.first_position() - 1));
        }
        if !(self.norm_eps >= 0.0 && self.norm_eps < 1.0) {
            let field = match self.norm {
                NormKind::Rms => "attention.layer_norm_rms_epsilon (rms_norm_eps, layer_norm_epsilon)",
                NormKind::Layer { .. } => "attention.layer_norm_epsilon (layer_norm_eps)",
            };
            return Err(config_error(field, "0 to 1".into(), self.norm_eps));
        }
        for (field, factor) in [
            ("embedding_scale (embedding_multiplier)", self.embd_scale),
            ("residual_scale (residual_multiplier)", self.residual_scale),
            ("logit_scale (logits_scaling)", self.logit_scale),
        ] {
            if !(factor.is_normal() && factor > 0.0) {
                return Err(config_error(field, "a positive number".into(), factor));
            }
        }
        soft_cap("final_logit_softcapping", self.logit_soft_cap)?;
        // The residual stream is stored divided by this scale, which only norms of the stream undo.
        let is_before = |block: &Block| block.attn_norm == NormPlace::Before && block.ffn_norm == NormPlace::Before;
        if self.residual_scale != 1.0 && !(self.norm == NormKind::Rms && self.blocks.iter().all(is_before)) {
            let field = "residual_scale (residual_multiplier)";
            return Err(config_error(
                field,
                "1 unless all norms are RMS norms before each half".into(),
                self.residual_scale,
            ));
        }
        for rope in &self.ropes {
            if !(rope.theta.is_finite() && rope.theta >= 1.0) {
                return Err(config_error("rope.freq_base (rope_theta)", "a finite number from 1".into(), rope.theta));
            }
        }
        if let Some(biases) = self.position_biases {
            biases.check()?;
        }
        if let Some(PerLayer { dim, vocab_size }) = self.per_layer {
            in_range("embedding_length_per_layer_input (hidden_size_per_layer_input)", dim, MAX_DIM)?;
            in_range("vocab_size_per_layer_input", vocab_size.max(1), 1 << 24)?;
        }
        self.check_blocks()
    }

    /// As [`ModelConfig::check`], for the blocks alone.
    ///
    /// # Errors
    /// As [`ModelConfig::check`].
    pub(super) fn check_blocks(&self) -> Result<(), Error> {
        in_range("block_count (num_hidden_layers)", self.n_layers(), MAX_LAYERS)?;
        for (l, block) in self.blocks.iter().enumerate() {
            self.check_shared_keys(l, &block.attention)?;
            if block.output_scale && !block.per_layer && !block.ffn_norm.is_on_result() {
                let expected = "a layer with a norm on its output".into();
                return Err(config_error("layer_output_scale (layer_scalar)", expected, format!("layer {l}")));
            }
        }
        self.blocks.iter().try_for_each(|block| {
            if let Some(recurrence) = block.recurs() {
                check_recurrence(recurrence)?;
            }
            if block.attends() {
                self.check_attention(&block.attention)?;
            }
            if block.feeds_forward() { check_feed_forward(&block.feed_forward) } else { Ok(()) }
        })
    }

    /// Refuses a layer that shares keys unless an earlier layer has them in the same shape.
    fn check_shared_keys(&self, l: usize, attention: &Attention) -> Result<(), Error> {
        let Some(of) = attention.keys_of else { return Ok(()) };
        let has_such_keys = |block: &Block| {
            let Attention { n_kv_heads, head_dim, keys_of, .. } = block.attention;
            let is_alike = (n_kv_heads, head_dim) == (attention.n_kv_heads, attention.head_dim);
            block.attends() && keys_of.is_none() && is_alike
        };
        match self.blocks.get(of).is_some_and(|block| of < l && has_such_keys(block)) {
            true => Ok(()),
            false => {
                let expected = format!("an earlier layer with keys of layer {l}'s shape");
                Err(config_error("attention.shared_kv_layers (num_kv_shared_layers)", expected, format!("layer {of}")))
            }
        }
    }

    fn check_attention(&self, attention: &Attention) -> Result<(), Error> {
        let &Attention { n_heads, n_kv_heads, head_dim, window, scale, .. } = attention;
        in_range("attention.head_count (num_attention_heads)", n_heads, MAX_HEADS)?;
        in_range("attention.head_count_kv (num_key_value_heads)", n_kv_heads, MAX_HEADS)?;
        in_range("attention.key_length (head_dim)", head_dim, MAX_HEAD_DIM)?;
        if let Some(latent) = &attention.latent {
            check_latent(attention, latent)?;
        }
        if !n_heads.is_multiple_of(n_kv_heads) {
            let expected = format!("a divisor of the {n_heads} query heads");
            return Err(config_error("attention.head_count_kv (num_key_value_heads)", expected, n_kv_heads));
        }
        if !head_dim.is_multiple_of(4) {
            return Err(config_error("attention.key_length (head_dim)", "a multiple of 4".into(), head_dim));
        }
        if let Some(rope) = attention.rope.and_then(|rope| self.ropes.get(rope))
            && (rope.rot_dims == 0 || !rope.rot_dims.is_multiple_of(2) || rope.rot_dims > head_dim)
        {
            let expected = format!("an even number up to the head size {head_dim}");
            return Err(config_error(
                "rope.dimension_count (partial_rotary_factor, rotary_pct)",
                expected,
                rope.rot_dims,
            ));
        }
        if window == Some(0) {
            return Err(config_error("attention.sliding_window (sliding_window)", "at least 1".into(), 0));
        }
        if !(scale.is_normal() && scale > 0.0) {
            let field = "attention.scale (attention_multiplier, query_pre_attn_scalar)";
            return Err(config_error(field, "a positive number".into(), scale));
        }
        soft_cap("attn_logit_softcapping", attention.soft_cap)
    }
}

/// Far beyond every published model, but low enough that no product of sizes overflows.
pub(crate) const MAX_DIM: u32 = 1 << 20;
pub(crate) const MAX_LAYERS: u32 = 1 << 12;
pub(crate) const MAX_CONTEXT: u32 = 1 << 28;
const MAX_HEADS: u32 = 1 << 12;

fn check_latent(attention: &Attention, latent: &Latent) -> Result<(), Error> {
    let sizes = [
        ("attention.kv_lora_rank (kv_lora_rank)", latent.kv_rank, 4),
        ("attention.q_lora_rank (q_lora_rank)", latent.q_rank.unwrap_or(4), 4),
        ("attention.key_length_mla (qk_nope_head_dim)", latent.nope_dim, 4),
        ("attention.value_length_mla (v_head_dim)", latent.value_dim, 4),
        ("rope.dimension_count (qk_rope_head_dim)", attention.head_dim.saturating_sub(latent.kv_rank), 8),
    ];
    for (field, size, unit) in sizes {
        in_range(field, size, MAX_DIM)?;
        if !size.is_multiple_of(unit) {
            return Err(config_error(field, format!("a multiple of {unit}"), size));
        }
    }
    // Rows of a product begin at multiples of 4.
    match attention.gate_dim() {
        n if n.is_multiple_of(4) => Ok(()),
        n => {
            let expected = "a multiple of 4 for latent attention with output gates".into();
            Err(config_error("attention.head_count (num_attention_heads)", expected, n))
        }
    }
}

fn check_recurrence(recurrence: &Recurrence) -> Result<(), Error> {
    // Its size is read within limits.
    if let Recurrence::GridConv { .. } = recurrence {
        return Ok(());
    }
    let field = "shortconv.l_cache, ssm.conv_kernel (conv_L_cache, linear_conv_kernel_dim, short_conv_kernel_size, \
                 mamba_d_conv)";
    if !(2..=MAX_TAPS).contains(&recurrence.taps()) {
        return Err(config_error(field, format!("2 to {MAX_TAPS}"), recurrence.taps()));
    }
    let rule = match recurrence {
        Recurrence::ShortConv { .. } | Recurrence::GridConv { .. } => return Ok(()),
        Recurrence::Mamba2 { scan, .. } => return check_scan(scan),
        Recurrence::DeltaNet { rule, .. } => rule,
    };
    if let Decay::Channels { .. } = rule.decay {
        // One size for keys and values, and as many heads as attention has.
        in_range("kda.head_dim (linear_head_dim, head_dim)", rule.key_dim, 256)?;
        return in_range("attention.head_count (num_attention_heads)", rule.n_heads, MAX_HEADS);
    }
    in_range("ssm.state_size (linear_key_head_dim)", rule.key_dim, 256)?;
    in_range("ssm.inner_size (linear_value_head_dim)", rule.value_dim, 256)?;
    in_range("ssm.group_count (linear_num_key_heads)", rule.n_key_heads, MAX_HEADS)?;
    in_range("ssm.time_step_rank (linear_num_value_heads)", rule.n_heads, MAX_HEADS)?;
    match rule.n_heads.is_multiple_of(rule.n_key_heads) {
        true => Ok(()),
        false => {
            let expected = format!("a multiple of the {} key heads", rule.n_key_heads);
            Err(config_error("ssm.time_step_rank (linear_num_value_heads)", expected, rule.n_heads))
        }
    }
}

fn check_scan(scan: &SelectiveScan) -> Result<(), Error> {
    in_range("ssm.state_size (mamba_d_state, state_size)", scan.state_dim, 256)?;
    in_range("ssm.inner_size (mamba_expand, head_dim)", scan.head_dim, 256)?;
    in_range("ssm.time_step_rank (mamba_n_heads, num_heads)", scan.n_heads, MAX_HEADS)?;
    match scan.n_groups {
        n if n > 0 && scan.n_heads.is_multiple_of(n) => Ok(()),
        n => {
            let expected = format!("a divisor of the {} heads", scan.n_heads);
            Err(config_error("ssm.group_count (mamba_n_groups, n_groups)", expected, n))
        }
    }
}

fn check_feed_forward(feed_forward: &FeedForward) -> Result<(), Error> {
    let Some(Experts { n, n_used, router, .. }) = feed_forward.experts else {
        return in_range("feed_forward_length (intermediate_size)", feed_forward.dim, MAX_DIM);
    };
    let field = "expert_feed_forward_length (moe_intermediate_size)";
    in_range(field, feed_forward.dim, MAX_DIM)?;
    if let Some(dim) = feed_forward.dense_dim() {
        in_range("feed_forward_length (intermediate_size)", dim, MAX_DIM)?;
    }
    if !feed_forward.dim.is_multiple_of(4) {
        return Err(config_error(field, "a multiple of 4".into(), feed_forward.dim));
    }
    in_range("expert_count (num_experts)", n, MAX_EXPERTS)?;
    in_range("expert_used_count (num_experts_per_tok)", n_used, n)?;
    if let Some(shared) = &feed_forward.experts.and_then(|experts| experts.shared) {
        in_range("expert_shared_feed_forward_length (shared_expert_intermediate_size)", shared.dim, MAX_DIM)?;
    }
    match router.scale.is_normal() && router.scale > 0.0 {
        true => Ok(()),
        false => {
            let field = "expert_weights_scale (routed_scaling_factor)";
            Err(config_error(field, "a positive number".into(), router.scale))
        }
    }
}

fn soft_cap(field: &str, cap: Option<f32>) -> Result<(), Error> {
    match cap {
        Some(cap) if !(cap.is_normal() && cap > 0.0) => Err(config_error(field, "a positive number".into(), cap)),
        _ => Ok(()),
    }
}

/// Refuses a number outside 1 to `max`.
fn in_range(field: &str, value: u32, max: u32) -> Result<(), Error> {
    match value {
        1.. if value <= max => Ok(()),
        _ => Err(config_error(field, format!("1 to {max}"), value)),
    }
}

/// A configuration error with the value found.
pub(super) fn config_error(field: &str, expected: String, found: impl ToString) -> Error {
    Error::Config { field: field.into(), expected, found: found.to_string() }
}
