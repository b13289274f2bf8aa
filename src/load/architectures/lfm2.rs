//! LFM2 (Liquid AI 2025, arXiv:2511.23404): short-convolution layers between attention layers; optional experts.

use super::llama::LLAMA;
use super::{Architecture, FFN_WIDTH, SIGMOIDS, listed_layers, mixture_after_dense};
use crate::error::Error;
use crate::kernels::{QkNorm, RopeStyle};
use crate::load::keys::{Key, Keys};
use crate::model::{ModelConfig, Recurrence};

pub(super) const LFM2: Architecture = Architecture {
    gguf: "lfm2",
    json: &["lfm2"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("embedding_norm", "output_norm"),
        ("operator_norm", "attn_norm"),
        ("ffn_norm", "ffn_norm"),
        ("self_attn.q_layernorm", "attn_q_norm"),
        ("self_attn.k_layernorm", "attn_k_norm"),
        ("self_attn.out_proj", "attn_output"),
        ("conv.in_proj", "shortconv.in_proj"),
        ("conv.conv", "shortconv.conv"),
        ("conv.out_proj", "shortconv.out_proj"),
        ("feed_forward.w1", "ffn_gate"),
        ("feed_forward.w3", "ffn_up"),
        ("feed_forward.w2", "ffn_down"),
        ("feed_forward.gate", "ffn_gate_inp"),
        ("feed_forward.expert", "exp_probs_b"),
        ("feed_forward.experts.w1", "ffn_gate_exps"),
        ("feed_forward.experts.w3", "ffn_up_exps"),
        ("feed_forward.experts.w2", "ffn_down_exps"),
    ],
    gguf_names: &[("token_embd_norm", "output_norm")],
    tied: true,
    eps: (Key("attention.layer_norm_rms_epsilon", "norm_eps|block_norm_eps"), None),
    describe: |keys, config| {
        adjusted_width(keys, config)?;
        layers(keys, config)
    },
    ..LLAMA
};

pub(super) const LFM2_MOE: Architecture = Architecture {
    gguf: "lfm2moe",
    json: &["lfm2_moe"],
    describe: |keys, config| {
        mixture_after_dense(keys, config, SIGMOIDS)?;
        let has_bias = keys.bool(Key("", "use_expert_bias"))?.unwrap_or(true);
        for experts in config.blocks.iter_mut().filter_map(|block| block.feed_forward.experts.as_mut()) {
            experts.choice_bias = has_bias;
        }
        layers(keys, config)
    },
    ..LFM2
};

/// The attention layers; the others have no key/value heads in GGUF.
fn layers(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let n_layers = config.blocks.len();
    let types = listed_layers(keys, n_layers, &["full_attention", "conv"])?;
    let attends = match (types, keys.u32s(Key("", "full_attn_idxs"))?) {
        (Some(types), _) => types.iter().map(|&kind| kind == 0).collect(),
        (None, Some(listed)) => (0..n_layers as u32).map(|l| listed.contains(&l)).collect::<Vec<_>>(),
        (None, None) => config.blocks.iter().map(|block| block.attention.n_kv_heads > 0).collect(),
    };
    let taps = keys.required(Key("shortconv.l_cache", "conv_L_cache"))?;
    for (block, attends) in config.blocks.iter_mut().zip(attends) {
        block.attention.qk_norm = Some(QkNorm::Heads);
        block.recurrence = (!attends).then_some(Recurrence::ShortConv { taps });
    }
    Ok(())
}

/// The feed-forward width, if a `config.json` states one to derive it from.
fn adjusted_width(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let factor = keys.f32(Key("", "block_ffn_dim_multiplier"))?.unwrap_or(1.0);
    let multiple = keys.u32(Key("", "block_multiple_of"))?.unwrap_or(256).max(1);
    if keys.bool(Key("", "block_auto_adjust_ff_dim"))? == Some(true) {
        let width = (2 * u64::from(keys.required(FFN_WIDTH)?) / 3) as f32 * factor;
        let width = (width as u32).checked_next_multiple_of(multiple).unwrap_or(u32::MAX);
        config.blocks.iter_mut().for_each(|block| block.feed_forward.dim = width);
    }
    for name in [
        "conv_dim",
        "conv_dim_out",
        "block_dim",
        "block_mlp_init_scale",
        "block_out_init_scale",
        "block_use_swiglu",
        "block_use_xavier_init",
        "conv_use_xavier_init",
        "use_pos_enc",
    ] {
        keys.says(Key("", name));
    }
    Ok(())
}
