//! Qwen3.5 (2026): three gated delta rule layers per gated attention layer; optional experts.

use super::llama::LLAMA;
use super::qwen::mrope;
use super::{Architecture, SHARES, listed_layers, mixture, n_heads};
use crate::error::Error;
use crate::kernels::{Decay, DeltaRule, QkNorm, RopeStyle};
use crate::load::keys::{Key, Keys};
use crate::load::tensor_index::FileLayout;
use crate::model::{ModelConfig, OutputGates, Recurrence, SharedExpert};

pub(super) const QWEN35: Architecture = Architecture {
    gguf: "qwen35",
    json: &["qwen3_5", "qwen3_5_text"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("linear_attn.in_proj_qkv", "attn_qkv"),
        ("linear_attn.in_proj_z", "attn_gate"),
        ("linear_attn.in_proj_b", "ssm_beta"),
        ("linear_attn.in_proj_a", "ssm_alpha"),
        ("linear_attn.conv1d", "ssm_conv1d"),
        ("linear_attn.A_log", "ssm_a"),
        ("linear_attn.dt", "ssm_dt"),
        ("linear_attn.norm", "ssm_norm"),
        ("linear_attn.out_proj", "ssm_out"),
        ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
        ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
        ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
        ("mlp.experts.gate_up_proj", "ffn_gate_up_exps"),
    ],
    gguf_names: &[("post_attention_norm", "ffn_norm"), ("ssm_a", "ssm_a")],
    stored: |name, config| match name {
        // Published norm weights are offsets from 1, except the delta rule's.
        _ if name.ends_with("norm.weight") && !name.ends_with("ssm_norm.weight") => FileLayout::LessOne,
        _ if name.ends_with("ssm_a.weight") => FileLayout::NegativeLog,
        _ => gates_first(name, config),
    },
    gguf_stored: gates_first,
    mtp: true,
    describe: |keys, config| {
        layers(keys, config)?;
        mrope(keys, config)
    },
    ..LLAMA
};

pub(super) const QWEN35_MOE: Architecture = Architecture {
    gguf: "qwen35moe",
    json: &["qwen3_5_moe", "qwen3_5_moe_text"],
    describe: |keys, config| {
        let shared = keys.u32(Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size"))?;
        mixture(keys, config, SHARES, |_| true)?;
        for experts in config.blocks.iter_mut().filter_map(|block| block.feed_forward.experts.as_mut()) {
            experts.shared = shared.map(|dim| SharedExpert { dim, gated: true });
        }
        (QWEN35.describe)(keys, config)
    },
    ..QWEN35
};

/// Files store a head's queries before its gates.
fn gates_first(name: &str, config: &ModelConfig) -> FileLayout {
    match name.ends_with(".attn_q.weight") {
        true => FileLayout::ByHead { n_heads: n_heads(config), kinds: &[1, 0] },
        false => FileLayout::AsRead,
    }
}

/// The attention layers, and the shape of the others.
fn layers(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let n_layers = config.blocks.len();
    let every = Key("full_attention_interval", "full_attention_interval");
    let usual = keys.u32(every)?.unwrap_or(4).max(1) as usize;
    let attends = match listed_layers(keys, n_layers, &["full_attention", "linear_attention"])? {
        Some(listed) => listed.iter().map(|&kind| kind == 0).collect(),
        None => (1..=n_layers).map(|l| l.is_multiple_of(usual)).collect::<Vec<_>>(),
    };
    let n_heads = keys.required(Key("ssm.time_step_rank", "linear_num_value_heads"))?;
    let inner = keys.u32(Key("ssm.inner_size", ""))?.map(|inner| inner / n_heads.max(1));
    let value_dim = match inner {
        Some(value_dim) => value_dim,
        None => keys.required(Key("", "linear_value_head_dim"))?,
    };
    let rule = DeltaRule {
        n_key_heads: keys.required(Key("ssm.group_count", "linear_num_key_heads"))?,
        n_heads,
        key_dim: keys.required(Key("ssm.state_size", "linear_key_head_dim"))?,
        value_dim,
        // The GGUF converter reorders the value heads of Qwen3.5.
        grouped: !keys.is_gguf() || keys.architecture == "qwen3next",
        beta_scale: 1.0,
        decay: Decay::Heads,
    };
    let taps = keys.required(Key("ssm.conv_kernel", "linear_conv_kernel_dim"))?;
    let eps = config.norm_eps;
    for (block, attends) in config.blocks.iter_mut().zip(attends) {
        block.recurrence = (!attends).then_some(Recurrence::DeltaNet { rule, taps, eps });
        block.attention.gates = Some(OutputGates::Elements);
        block.attention.qk_norm = Some(QkNorm::Heads);
    }
    Ok(())
}
