//! Nemotron-H (NVIDIA 2025, arXiv:2504.03624) and Nemotron 3 Nano: each layer is a Mamba 2 mixer, attention without RoPE,
//! a feed-forward with squared ReLU, or experts with it.

use super::granite_hybrid::{check_time_steps, selective_scan};
use super::llama::LLAMA;
use super::{Architecture, SIGMOIDS, decay_logs, mixture};
use crate::error::Error;
use crate::kernels::{RopeStyle, SelectiveScan};
use crate::load::keys::{Key, Keys};
use crate::model::{Halves, ModelConfig, Recurrence, SharedExpert};

pub(super) const NEMOTRON_H: Architecture = Architecture {
    gguf: "nemotron_h",
    json: &["nemotron_h"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("embeddings", "token_embd"),
        ("norm_f", "output_norm"),
        ("norm", "attn_norm"),
        ("mixer.in_proj", "ssm_in"),
        ("mixer.conv1d", "ssm_conv1d"),
        ("mixer.A_log", "ssm_a"),
        ("mixer.D", "ssm_d"),
        ("mixer.dt", "ssm_dt"),
        ("mixer.norm", "ssm_norm"),
        ("mixer.out_proj", "ssm_out"),
        ("mixer.q_proj", "attn_q"),
        ("mixer.k_proj", "attn_k"),
        ("mixer.v_proj", "attn_v"),
        ("mixer.o_proj", "attn_output"),
        ("mixer.up_proj", "ffn_up"),
        ("mixer.down_proj", "ffn_down"),
        ("mixer.gate", "ffn_gate_inp"),
        ("mixer.gate.e_score_correction", "exp_probs_b"),
        ("mixer.experts.up_proj", "ffn_up_exps"),
        ("mixer.experts.down_proj", "ffn_down_exps"),
        ("mixer.shared_experts.up_proj", "ffn_up_shexp"),
        ("mixer.shared_experts.down_proj", "ffn_down_shexp"),
    ],
    gguf_names: &[("ssm_a", "ssm_a"), ("ssm_d", "ssm_d")],
    stored: decay_logs,
    eps: (Key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"), None),
    activation: "relu2",
    gated: false,
    describe: layers,
    ..LLAMA
};

pub(super) const NEMOTRON_H_MOE: Architecture = Architecture { gguf: "nemotron_h_moe", json: &[], ..NEMOTRON_H };

/// What a layer is.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Mamba,
    Attention,
    Dense,
    Experts,
}

fn layers(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let kinds = kinds(keys, config.blocks.len())?;
    let (scan, taps) = mixer(keys, ["mamba_num_heads", "ssm_state_size", "mamba_head_dim"])?;
    ignore(keys)?;
    check_time_steps(keys)?;
    if kinds.contains(&Kind::Experts) {
        mixture(keys, config, SIGMOIDS, |l| kinds[l] == Kind::Experts)?;
        // Read with the router of other models.
        ["n_group", "topk_group", "n_shared_experts"].map(|name| keys.says(Key("", name)))
    } else {
        // Published configurations of dense models state the experts of others.
        for name in ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"] {
            keys.u32(Key("", name))?;
        }
        let scale = Key("", "routed_scaling_factor");
        if let Some(found) = keys.f32(scale)?.filter(|scale| !(scale.is_normal() && *scale > 0.0)) {
            return Err(keys.wrong(scale, "a positive number".into(), found));
        }
        ["norm_topk_prob", "n_group", "topk_group"].map(|name| keys.says(Key("", name)))
    };
    for (l, (block, kind)) in config.blocks.iter_mut().zip(kinds).enumerate() {
        block.attention.rope = None;
        block.halves = if matches!(kind, Kind::Mamba | Kind::Attention) { Halves::Mixing } else { Halves::FeedForward };
        block.recurrence = (kind == Kind::Mamba).then_some(Recurrence::Mamba2 { scan, taps, normed: true });
        if let Some(experts) = &mut block.feed_forward.experts {
            let shared = Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size");
            experts.shared = keys.u32(shared)?.filter(|&dim| dim > 0).map(|dim| SharedExpert { dim, gated: false });
            experts.choice_bias = !keys.is_gguf() || keys.has(&format!("blk.{l}.exp_probs_b.bias"));
        }
    }
    Ok(())
}

/// Reads a Mamba 2 mixer's shape and its convolution's taps, with the keys of heads, the state's size and a head's size
/// in `config.json`.
pub(super) fn mixer(
    keys: &Keys<'_>,
    [n_heads, state_dim, head_dim]: [&'static str; 3],
) -> Result<(SelectiveScan, u32), Error> {
    let inner = match keys.u32(Key("ssm.inner_size", ""))? {
        Some(inner) => inner,
        None => keys.required(Key("", n_heads))?.saturating_mul(keys.required(Key("", head_dim))?),
    };
    selective_scan(keys, [n_heads, "n_groups", state_dim, "conv_kernel"], inner)
}

/// The kinds of all layers: a list or a pattern of letters in `config.json`; in GGUF by the layer's tensors.
fn kinds(keys: &Keys<'_>, n_layers: usize) -> Result<Vec<Kind>, Error> {
    if keys.is_gguf() {
        let has = |l: usize, name: &str| keys.has(&format!("blk.{l}.{name}.weight"));
        let kind = |l| match (has(l, "ssm_in"), has(l, "attn_q"), has(l, "ffn_gate_inp")) {
            (true, ..) => Kind::Mamba,
            (_, true, _) => Kind::Attention,
            (.., true) => Kind::Experts,
            _ => Kind::Dense,
        };
        return Ok((0..n_layers).map(kind).collect());
    }
    let (list, pattern) = (Key("", "layers_block_type"), Key("", "hybrid_override_pattern"));
    let kinds: Vec<Kind> = match (keys.strs(list)?, keys.str(pattern)?) {
        (Some(names), _) => {
            let kind = |name: &&str| match *name {
                "linear_attention" | "mamba" => Ok(Kind::Mamba),
                "full_attention" | "attention" => Ok(Kind::Attention),
                "mlp" => Ok(Kind::Dense),
                "moe" => Ok(Kind::Experts),
                found => Err(keys.unsupported(list, found, "linear_attention, full_attention, mlp, moe")),
            };
            names.iter().map(kind).collect::<Result<_, _>>()?
        }
        (None, Some(letters)) => {
            let kind = |letter| match letter {
                'M' => Ok(Kind::Mamba),
                '*' => Ok(Kind::Attention),
                '-' => Ok(Kind::Dense),
                'E' => Ok(Kind::Experts),
                found => Err(keys.unsupported(pattern, found, "M, *, -, E")),
            };
            letters.chars().map(kind).collect::<Result<_, _>>()?
        }
        (None, None) => return Err(keys.missing(list)),
    };
    match kinds.len() == n_layers {
        true => Ok(kinds),
        false => Err(keys.wrong(list, format!("{n_layers}, one per layer"), kinds.len())),
    }
}

/// Marks keys about training and other implementations as read, and refuses experts in a smaller width.
fn ignore(keys: &Keys<'_>) -> Result<(), Error> {
    let latent = Key("", "moe_latent_size");
    if let Some(found) = keys.u32(latent)?.filter(|&size| size > 0) {
        return Err(keys.unsupported(latent, found, "none: experts of the model's width"));
    }
    for name in [
        "chunk_size",
        "expand",
        "mamba_ssm_cache_dtype",
        "moe_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_overlap",
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
        "num_logits_to_keep",
        "n_shared_experts",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "sliding_window",
        "time_step_floor",
        "time_step_max",
        "time_step_min",
        "use_mamba_kernels",
    ] {
        keys.says(Key("", name));
    }
    let activation = Key("", "mamba_hidden_act");
    match keys.str(activation)? {
        Some(found) if found != "silu" => Err(keys.unsupported(activation, found, "silu")),
        _ => Ok(()),
    }
}
