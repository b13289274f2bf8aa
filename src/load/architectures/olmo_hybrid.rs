//! OLMo Hybrid (Ai2 2026): three gated delta rule layers with pre-norms per attention layer with post-norms. States may
//! have negative eigenvalues (Grazzi et al. 2024, arXiv:2411.12537).

use super::llama::LLAMA;
use super::{Architecture, decay_logs, listed_layers};
use crate::error::Error;
use crate::kernels::{Decay, DeltaRule, QkNorm, RopeStyle};
use crate::load::keys::{Key, Keys};
use crate::model::{ModelConfig, NormPlace, Recurrence, layer_of};

pub(super) const OLMO_HYBRID: Architecture = Architecture {
    gguf: "",
    json: &["olmo_hybrid"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("attention_layer_norm", "attn_norm"),
        ("feedforward_layer_norm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("linear_attn.q_proj", "attn_q"),
        ("linear_attn.k_proj", "attn_k"),
        ("linear_attn.v_proj", "attn_v"),
        ("linear_attn.g_proj", "attn_gate"),
        ("linear_attn.b_proj", "ssm_beta"),
        ("linear_attn.a_proj", "ssm_alpha"),
        ("linear_attn.q_conv1d", "ssm_conv1d_q"),
        ("linear_attn.k_conv1d", "ssm_conv1d_k"),
        ("linear_attn.v_conv1d", "ssm_conv1d_v"),
        ("linear_attn.A_log", "ssm_a"),
        ("linear_attn.dt", "ssm_dt"),
        ("linear_attn.o_norm", "ssm_norm"),
        ("linear_attn.o_proj", "ssm_out"),
    ],
    stored: decay_logs,
    // The norm before the feed-forward of a recurrent layer is called like that after attention.
    renamed: |name, config| {
        let block = layer_of(&name).and_then(|layer| config.blocks.get(layer as usize));
        match block.is_some_and(|block| block.recurrence.is_none()) {
            true => name.replace(".ffn_norm.", ".post_attention_norm."),
            false => name,
        }
    },
    describe: layers,
    ..LLAMA
};

fn layers(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let kinds = listed_layers(keys, config.blocks.len(), &["full_attention", "linear_attention"])?;
    let kinds = kinds.ok_or_else(|| keys.missing(Key("", "layer_types")))?;
    let has_negative = keys.bool(Key("", "linear_allow_neg_eigval"))?.unwrap_or(true);
    let rule = DeltaRule {
        n_key_heads: keys.required(Key("", "linear_num_key_heads"))?,
        n_heads: keys.required(Key("", "linear_num_value_heads"))?,
        key_dim: keys.required(Key("", "linear_key_head_dim"))?,
        value_dim: keys.required(Key("", "linear_value_head_dim"))?,
        grouped: true,
        beta_scale: if has_negative { 2.0 } else { 1.0 },
        decay: Decay::Heads,
    };
    let taps = keys.required(Key("", "linear_conv_kernel_dim"))?;
    // Of the initial weights.
    for name in ["linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"] {
        keys.says(Key("", name));
    }
    // Without the key, positions are not rotated.
    let rope = keys.says(Key("", "rope_parameters|rope_theta")).then_some(0);
    for (block, kind) in config.blocks.iter_mut().zip(kinds) {
        match kind {
            0 => {
                (block.attn_norm, block.ffn_norm) = (NormPlace::Result, NormPlace::Result);
                block.attention.qk_norm = Some(QkNorm::Whole);
                block.attention.rope = rope;
            }
            // The published layer leaves its norm's epsilon at its default.
            _ => block.recurrence = Some(Recurrence::DeltaNet { rule, taps, eps: 1e-5 }),
        }
    }
    Ok(())
}
