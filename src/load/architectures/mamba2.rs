//! Mamba 2 (Dao and Gu 2024, arXiv:2405.21060): mixers alone, without attention or feed-forwards.

use super::Architecture;
use super::granite_hybrid::check_time_steps;
use super::nemotron_h::{NEMOTRON_H, mixer};
use crate::error::Error;
use crate::load::keys::{Key, Keys};
use crate::model::{Halves, ModelConfig, Recurrence};

pub(super) const MAMBA2: Architecture = Architecture {
    gguf: "mamba2",
    json: &["mamba2"],
    activation: "silu",
    gated: true,
    // There are no heads and no positions; the context is the one that llama.cpp's converter writes.
    defaults: r#"{"num_attention_heads": 1, "max_position_embeddings": 1048576}"#,
    ffn_widths: Some(1),
    describes_heads: true,
    describe: layers,
    ..NEMOTRON_H
};

fn layers(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let (scan, taps) = mixer(keys, ["num_heads", "state_size", "head_dim"])?;
    check_time_steps(keys)?;
    let (inner, inner_dim) = (Key("", "intermediate_size"), scan.n_heads.saturating_mul(scan.head_dim));
    if let Some(found) = keys.u32(inner)?.filter(|&found| found != inner_dim) {
        return Err(keys.wrong(inner, format!("{inner_dim}, that of all heads"), found));
    }
    let normed = Key("", "rms_norm");
    if keys.bool(normed)? == Some(false) {
        return Err(keys.unsupported(normed, false, "true"));
    }
    for name in [
        "chunk_size",
        "expand",
        // The gate always comes first.
        "norm_before_gate",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "time_step_floor",
        "time_step_init_scheme",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
        "time_step_scale",
    ] {
        keys.says(Key("", name));
    }
    config.ropes.clear();
    for block in &mut config.blocks {
        block.attention.rope = None;
        block.halves = Halves::Mixing;
        block.recurrence = Some(Recurrence::Mamba2 { scan, taps, normed: true });
    }
    Ok(())
}
