//! Granite 3 MoE and Granite 4 hybrid (IBM 2024 and 2025): Granite's four multipliers, with experts, a shared
//! feed-forward or both; the hybrid mixes Mamba 2 layers with attention layers without RoPE.

use super::granite::GRANITE;
use super::{Architecture, SHARES, WIDTH, decay_logs, listed_layers, mixture};
use crate::error::Error;
use crate::formats::text::FLOAT;
use crate::kernels::SelectiveScan;
use crate::load::keys::{Key, Keys};
use crate::model::{ModelConfig, Recurrence, SharedExpert};

pub(super) const GRANITE_MOE: Architecture = Architecture {
    gguf: "granitemoe",
    json: &["granitemoe", "granitemoeshared"],
    describe: |keys, config| {
        (GRANITE.describe)(keys, config)?;
        feed_forwards(keys, config)
    },
    ..GRANITE_HYBRID
};

pub(super) const GRANITE_HYBRID: Architecture = Architecture {
    gguf: "granitehybrid",
    json: &["granitemoehybrid"],
    names: &[
        ("mamba.in_proj", "ssm_in"),
        ("mamba.conv1d", "ssm_conv1d"),
        ("mamba.A_log", "ssm_a"),
        ("mamba.D", "ssm_d"),
        ("mamba.dt", "ssm_dt"),
        ("mamba.norm", "ssm_norm"),
        ("mamba.out_proj", "ssm_out"),
        ("block_sparse_moe.router.layer", "ffn_gate_inp"),
        ("block_sparse_moe.input_linear", "ffn_gate_up_exps"),
        ("block_sparse_moe.output_linear", "ffn_down_exps"),
        ("shared_mlp.input_linear", "ffn_gate_up_shexp"),
        ("shared_mlp.output_linear", "ffn_down_shexp"),
    ],
    gguf_names: &[("ssm_a", "ssm_a"), ("ssm_d", "ssm_d")],
    stored: decay_logs,
    describe: |keys, config| {
        (GRANITE.describe)(keys, config)?;
        feed_forwards(keys, config)?;
        layers(keys, config)
    },
    ..GRANITE
};

/// Experts, or the shared feed-forward alone, whose width a `config.json` states as the shared experts'.
fn feed_forwards(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let shared = keys.u32(Key("expert_shared_feed_forward_length", "shared_intermediate_size"))?.filter(|&dim| dim > 0);
    mixture(keys, config, SHARES, |_| true)?;
    for feed_forward in config.blocks.iter_mut().map(|block| &mut block.feed_forward) {
        match &mut feed_forward.experts {
            Some(experts) => experts.shared = shared.map(|dim| SharedExpert { dim, gated: false }),
            None if keys.is_gguf() => {}
            None => feed_forward.dim = shared.unwrap_or(feed_forward.dim),
        }
    }
    Ok(())
}

/// The attention layers, and the shape of the others, which have no key/value heads in GGUF.
fn layers(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let n_layers = config.blocks.len();
    let kinds = listed_layers(keys, n_layers, &["full_attention", "attention", "linear_attention", "mamba"])?;
    let attends: Vec<bool> = match (kinds, keys.is_gguf()) {
        (Some(kinds), _) => kinds.iter().map(|&kind| kind < 2).collect(),
        (None, true) => config.blocks.iter().map(|block| block.attention.n_kv_heads > 0).collect(),
        (None, false) => vec![false; n_layers],
    };
    let rotates = match keys.is_gguf() {
        true => keys.bool(Key("rope.scaling.finetuned", ""))?.unwrap_or(true),
        false => keys.str(Key("", "position_embedding_type"))? == Some("rope"),
    };
    let inner = inner_width(keys, Key("ssm.inner_size", ""))?;
    let (scan, taps) = selective_scan(keys, SCAN, inner)?;
    // The head width follows from the other keys, and the chunk size affects only other implementations.
    keys.says(Key("", "mamba_d_head"));
    keys.says(Key("", "mamba_chunk_size"));
    check_time_steps(keys)?;
    for (block, attends) in config.blocks.iter_mut().zip(attends) {
        block.recurrence = (!attends).then_some(Recurrence::Mamba2 { scan, taps, normed: true });
        block.attention.rope = block.attention.rope.filter(|_| rotates);
    }
    Ok(())
}

/// Keys of heads, groups, the state's size and the convolution's taps in `config.json`.
pub(super) const SCAN: [&str; 4] = ["mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"];

/// The inner width of Mamba 2 layers: that of this key, or a multiple of the model's.
pub(super) fn inner_width(keys: &Keys<'_>, key: Key) -> Result<u32, Error> {
    match keys.u32(key)? {
        Some(inner) => Ok(inner),
        None => Ok(keys.required(WIDTH)?.saturating_mul(keys.u32(Key("", "mamba_expand"))?.unwrap_or(2))),
    }
}

/// The shape of Mamba 2 layers of this inner width, and the taps of their convolution, with the names of [`SCAN`]'s
/// keys.
pub(super) fn selective_scan(
    keys: &Keys<'_>,
    [heads, groups, states, taps]: [&'static str; 4],
    inner: u32,
) -> Result<(SelectiveScan, u32), Error> {
    let heads = Key("ssm.time_step_rank", heads);
    let n_heads = keys.required(heads)?;
    if n_heads == 0 || !inner.is_multiple_of(n_heads) {
        return Err(keys.wrong(heads, format!("a divisor of the inner width {inner}"), n_heads));
    }
    let scan = SelectiveScan {
        n_groups: keys.required(Key("ssm.group_count", groups))?,
        n_heads,
        state_dim: keys.required(Key("ssm.state_size", states))?,
        head_dim: inner / n_heads,
    };
    Ok((scan, keys.required(Key("ssm.conv_kernel", taps))?))
}

/// Refuses time-step limits, which no published model has.
pub(super) fn check_time_steps(keys: &Keys<'_>) -> Result<(), Error> {
    let bounds = Key("", "time_step_limit");
    let Some(serde_json::Value::Array(found)) = keys.json(bounds) else { return Ok(()) };
    match &found[..] {
        [first, last] if first.as_f64() == Some(0.0) && last[FLOAT] == "Infinity" => Ok(()),
        _ => Err(keys.unsupported(bounds, serde_json::Value::Array(found.clone()), "0 to infinity")),
    }
}
