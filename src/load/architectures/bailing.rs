//! Ling 2 and 3 (inclusionAI 2025 and 2026, arXiv:2510.22115): experts in groups, scored by sigmoids, after the first
//! dense layers. Ling 2 has partial rotation and QK norms, Ling 3 layers of Kimi Delta Attention (Kimi Team 2025,
//! arXiv:2510.26692) and gated latent attention.

use super::deepseek::latent;
use super::llama::LLAMA;
use super::{
    Architecture, EXPERT_SCALE, GROUPS, SIGMOIDS, THETA, USED_GROUPS, decay_logs, listed_layers, mixture_after_dense,
    n_heads,
};
use crate::error::Error;
use crate::kernels::{Decay, DeltaRule, QkNorm, RopeStyle};
use crate::load::keys::{Key, Keys};
use crate::load::tensor_index::FileLayout;
use crate::model::{ModelConfig, OutputGates, Recurrence};

pub(super) const LING2: Architecture = Architecture {
    gguf: "bailingmoe2",
    json: &["bailing_moe", "bailing_moe_v2"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("word_embeddings", "token_embd"),
        ("attention.query_key_value", "attn_qkv"),
        ("attention.query_layernorm", "attn_q_norm"),
        ("attention.key_layernorm", "attn_k_norm"),
        ("attention.dense", "attn_output"),
        ("mlp.gate.expert", "exp_probs_b"),
        ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
        ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ],
    gguf_names: &[LAST_NORM],
    defaults: r#"{"partial_rotary_factor": 0.5}"#,
    mtp: true,
    describe: |keys, config| {
        let mut of_both = [SCORES, QK_NORM].into_iter();
        if let Some(key) = of_both.find(|key| !keys.is_gguf() && !keys.says(*key)) {
            return Err(keys.unsupported_model(key, "missing as in Ling 1", "Ling 2"));
        }
        for key in [QK_NORM, Key("", "use_rmsnorm"), Key("", "moe_router_enable_shared_expert")] {
            keys.only_bool(key, true)?;
        }
        config.blocks.iter_mut().for_each(|block| block.attention.qk_norm = Some(QkNorm::Heads));
        experts(keys, config)?;
        keys.only_u32(ROTATED, config.ropes[0].rot_dims)
    },
    ..LLAMA
};

pub(super) const LING3: Architecture = Architecture {
    gguf: "bailingmoe3",
    json: &["bailing_hybrid"],
    pairs: [RopeStyle::Interleaved; 2],
    names: &[
        ("word_embeddings", "token_embd"),
        ("attention.q_a_proj", "attn_q_a"),
        ("attention.q_a_layernorm", "attn_q_a_norm"),
        ("attention.q_b_proj", "attn_q_b"),
        ("attention.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
        ("attention.kv_a_layernorm", "attn_kv_a_norm"),
        ("attention.kv_b_proj", "attn_kv_b"),
        ("attention.q_proj", "attn_q"),
        ("attention.k_proj", "attn_k"),
        ("attention.v_proj", "attn_v"),
        ("attention.g_proj", "attn_gate"),
        ("attention.b_proj", "ssm_beta"),
        ("attention.f_proj", "ssm_alpha"),
        ("attention.q_conv1d", "ssm_conv1d_q"),
        ("attention.k_conv1d", "ssm_conv1d_k"),
        ("attention.v_conv1d", "ssm_conv1d_v"),
        ("attention.A_log", "ssm_a"),
        ("attention.dt", "ssm_dt"),
        ("attention.o_norm", "ssm_norm"),
        ("attention.o_proj", "attn_output"),
        ("attention.dense", "attn_output"),
        ("mlp.gate.expert", "exp_probs_b"),
        ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
        ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ],
    gguf_names: &[("ssm_a", "ssm_a"), ("ssm_f_a", "ssm_alpha"), ("ssm_g_a", "attn_gate"), LAST_NORM],
    stored: decay_logs,
    // GGUF files have the decay rate, not negated.
    gguf_stored: |name, _| match name.ends_with(".ssm_a.weight") {
        true => FileLayout::Scaled(-1.0),
        false => FileLayout::AsRead,
    },
    describes_heads: true,
    mtp: true,
    describe: |keys, config| {
        check_version(keys)?;
        layers(keys, config)?;
        latent(keys, config)?;
        for block in &mut config.blocks {
            block.attention.gates = Some(OutputGates::Heads);
        }
        experts(keys, config)?;
        keys.only_u32(ROTATED, config.ropes[0].rot_dims)
    },
    ..LLAMA
};

/// GGUF's name of the norm of an MTP head's output.
const LAST_NORM: (&str, &str) = ("layer_output_norm", "nextn.shared_head_norm");
const SCORES: Key = Key("", "score_function|scoring_func");
const QK_NORM: Key = Key("", "use_qk_norm");
const ROTATED: Key = Key("", "rotary_dim");
const BOUND: Key = Key("kda.gate_lower_bound", "kda_lower_bound");

/// Refuses Ling 2.5 and Ling 3.0 Flash, and folders that lack a key whose default would be of another model.
fn check_version(keys: &Keys<'_>) -> Result<(), Error> {
    if !keys.is_gguf() && !keys.says(BOUND) {
        return Err(keys.unsupported_model(BOUND, "missing as in Ling 2.5, with Lightning attention", "Ling 3"));
    }
    for key in [
        Key("swiglu_clamp_exp", "expert_swiglu_limit_list"),
        Key("swiglu_clamp_shexp", "share_expert_swiglu_limit_list"),
    ] {
        if keys.has_nonzero(key)? {
            let found = "a list of per-layer SwiGLU limits (Ling 3.0 Flash)";
            return Err(keys.unsupported_model(key, found, "no limits, or zeros"));
        }
    }
    let mut required = [THETA, GROUPS, USED_GROUPS, EXPERT_SCALE].into_iter();
    match required.find(|key| !keys.is_gguf() && !keys.says(*key)) {
        Some(key) => Err(keys.missing(key)),
        None => Ok(()),
    }
}

/// The layers of Kimi Delta Attention, which have no key/value heads in GGUF.
fn layers(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let n_layers = config.blocks.len();
    let every = Key("", "layer_group_size");
    let kinds = listed_layers(keys, n_layers, &["full_attention", "linear_attention"])?;
    let stated = keys.u32(every)?;
    let attends: Vec<bool> = match (kinds, keys.is_gguf()) {
        (_, true) => config.blocks.iter().map(|block| block.attention.n_kv_heads > 0).collect(),
        (Some(kinds), _) => kinds.iter().map(|&kind| kind == 0).collect(),
        (None, _) => {
            let every = match stated {
                None => return Err(keys.missing(every)),
                // Implementations differ in what layers after the last whole group are.
                Some(n) if n == 0 || !n_layers.is_multiple_of(n as usize) => {
                    return Err(keys.wrong(every, format!("a divisor of the {n_layers} layers"), n));
                }
                Some(n) => n as usize,
            };
            (1..=n_layers).map(|l| l.is_multiple_of(every)).collect()
        }
    };
    // KDA always normalises queries and keys to unit length.
    for key in [Key("kda.safe_gate", "kda_safe_gate"), Key("", "no_kda_lora"), Key("", "linear_silu"), QK_NORM] {
        keys.only_bool(key, true)?;
    }
    // The MTP head's block is that of a layer with latent attention.
    keys.only_bool(Key("", "mtp_use_kda"), false)?;
    // These keys belong to Ling 2.5's layers.
    for key in ["group_norm_size", "max_window_layers"] {
        keys.says(Key("", key));
    }
    let granularity = Key("", "gated_attention_proj_granularity_type");
    if let Some(found) = keys.str(granularity)?.filter(|&found| found != "head_wise") {
        return Err(keys.unsupported(granularity, found, "head_wise"));
    }
    let bound = match keys.required_f32(BOUND)? {
        found if found.is_normal() && found < 0.0 => found,
        found => return Err(keys.wrong(BOUND, "a number below 0".into(), found)),
    };
    let n_heads = n_heads(config);
    keys.only_u32(Key("", "linear_num_heads"), n_heads)?;
    let head_dim = keys.required(Key("kda.head_dim", "linear_head_dim|head_dim"))?;
    let rule = DeltaRule {
        n_key_heads: n_heads,
        n_heads,
        key_dim: head_dim,
        value_dim: head_dim,
        grouped: true,
        beta_scale: 1.0,
        decay: Decay::Channels { bound },
    };
    let taps = keys.required(Key("ssm.conv_kernel", "short_conv_kernel_size"))?;
    keys.only_u32(Key("", "linear_conv_kernel_dim"), taps)?;
    let eps = config.norm_eps;
    for (block, attends) in config.blocks.iter_mut().zip(attends) {
        block.recurrence = (!attends).then_some(Recurrence::DeltaNet { rule, taps, eps });
    }
    Ok(())
}

/// The experts of all but the first layers.
fn experts(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    // Published files have both.
    for key in SCORES.1.split('|').map(|name| Key("", name)) {
        if let Some(found) = keys.str(key)?.filter(|&found| found != "sigmoid") {
            return Err(keys.unsupported(key, found, "sigmoid"));
        }
    }
    let method = Key("", "topk_method");
    if let Some(found) = keys.str(method)?.filter(|&found| found != "noaux_tc") {
        return Err(keys.unsupported(method, found, "noaux_tc"));
    }
    keys.only_bool(Key("", "moe_router_enable_expert_bias"), true)?;
    // Of training.
    for name in ["router_dtype", "seq_aux"] {
        keys.says(Key("", name));
    }
    mixture_after_dense(keys, config, SIGMOIDS)?;
    let width = Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size");
    let shared = config.blocks.iter().find_map(|block| block.feed_forward.experts?.shared);
    keys.only_u32(width, shared.map_or(0, |shared| shared.dim))
}
