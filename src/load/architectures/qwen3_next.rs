//! Qwen3-Next and Qwen3-Coder-Next (2025): Qwen3.5's layers, with projections stored in groups, one per key head.

use super::Architecture;
use super::qwen35::{QWEN35, QWEN35_MOE};
use crate::load::keys::Key;
use crate::load::tensor_index::FileLayout;
use crate::model::{ModelConfig, Recurrence, layer_of};

pub(super) const QWEN3_NEXT: Architecture = Architecture {
    gguf: "qwen3next",
    json: &["qwen3_next"],
    names: &[
        ("linear_attn.in_proj_qkvz", "attn_qkv"),
        ("linear_attn.in_proj_ba", "ssm_ba"),
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
    stored: |name, config| grouped(name, config).unwrap_or_else(|| (QWEN35.stored)(name, config)),
    gguf_stored: |name, config| match name.ends_with(".ssm_ba.weight") {
        true => grouped(name, config).unwrap_or(FileLayout::AsRead),
        false => (QWEN35.gguf_stored)(name, config),
    },
    describe: |keys, config| {
        keys.only_u32(Key("", "decoder_sparse_step"), 1)?;
        let dense = Key("", "mlp_only_layers");
        if let Some(found) = keys.u32s(dense)?.and_then(|dense| dense.first().copied()) {
            return Err(keys.unsupported(dense, found, "no dense layers"));
        }
        (QWEN35_MOE.describe)(keys, config)
    },
    ..QWEN35_MOE
};

/// The layout of a projection in groups: queries, keys, values and output gates, or beta and alpha, of a key head.
fn grouped(name: &str, config: &ModelConfig) -> Option<FileLayout> {
    let block = config.blocks.get(layer_of(name)? as usize)?;
    let Some(Recurrence::DeltaNet { rule, .. }) = &block.recurrence else { return None };
    let share = rule.n_heads.checked_div(rule.n_key_heads)?;
    let values = share.saturating_mul(rule.value_dim);
    let rows = match name.rsplit_once(".weight")?.0.rsplit_once('.')?.1 {
        "attn_qkv" => [rule.key_dim, rule.key_dim, values, values],
        "ssm_ba" => [share, share, 0, 0],
        _ => return None,
    };
    Some(FileLayout::Grouped { n: rule.n_key_heads, rows })
}
