//! Falcon-H1 (TII 2025, arXiv:2507.22448): attention and a Mamba 2 mixer side by side on one norm, and a dozen
//! multipliers, which GGUF files have in their weights.

use super::granite_hybrid::{SCAN, check_time_steps, inner_width, selective_scan};
use super::llama::LLAMA;
use super::{Architecture, Factors, decay_logs};
use crate::error::Error;
use crate::kernels::RopeStyle;
use crate::load::keys::{Key, Keys};
use crate::model::{ModelConfig, Recurrence};

pub(super) const FALCON_H1: Architecture = Architecture {
    gguf: "falcon-h1",
    json: &["falcon_h1"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("final_layernorm", "output_norm"),
        ("pre_ff_layernorm", "ffn_norm"),
        ("feed_forward.gate_proj", "ffn_gate"),
        ("feed_forward.up_proj", "ffn_up"),
        ("feed_forward.down_proj", "ffn_down"),
        ("mamba.in_proj", "ssm_in"),
        ("mamba.conv1d", "ssm_conv1d"),
        ("mamba.A_log", "ssm_a"),
        ("mamba.D", "ssm_d"),
        ("mamba.dt", "ssm_dt"),
        ("mamba.norm", "ssm_norm"),
        ("mamba.out_proj", "ssm_out"),
    ],
    gguf_names: &[("ssm_a", "ssm_a"), ("ssm_d", "ssm_d"), ("ffn_norm", "ffn_norm")],
    stored: decay_logs,
    describe: layers,
    factors: Some(factors),
    ..LLAMA
};

fn layers(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let (scan, taps) = selective_scan(keys, SCAN, inner_width(keys, Key("ssm.inner_size", "mamba_d_ssm"))?)?;
    let normed = keys.bool(Key("", "mamba_rms_norm"))?.unwrap_or(false) || keys.has("blk.0.ssm_norm.weight");
    let first = Key("", "mamba_norm_before_gate");
    if keys.bool(first)? == Some(true) && normed {
        return Err(keys.unsupported(first, true, "false"));
    }
    for name in ["mamba_d_head", "mamba_chunk_size", "mamba_expand", "num_logits_to_keep", "mamba_use_mlp"] {
        keys.says(Key("", name));
    }
    check_time_steps(keys)?;
    config.embd_scale = multiplier(keys, "embedding_multiplier")?;
    config.logit_scale = multiplier(keys, "lm_head_multiplier")?;
    let input = multiplier(keys, "attention_in_multiplier")?;
    let sharper = input * input * multiplier(keys, "key_multiplier")?;
    for block in &mut config.blocks {
        block.recurrence = Some(Recurrence::Mamba2 { scan, taps, normed });
        block.attends_beside = true;
        block.attention.scale *= sharper;
    }
    Ok(())
}

fn multiplier(keys: &Keys<'_>, name: &'static str) -> Result<f32, Error> {
    let key = Key("", name);
    match keys.f32(key)?.unwrap_or(1.0) {
        factor if factor.is_normal() && factor > 0.0 => Ok(factor),
        found => Err(keys.wrong(key, "a positive number".into(), found)),
    }
}

/// Several multipliers in a list of this length, 1 each by default.
fn multipliers<const N: usize>(keys: &Keys<'_>, name: &'static str) -> Result<[f32; N], Error> {
    let key = Key("", name);
    let Some(found) = keys.json(key) else { return Ok([1.0; N]) };
    let factors = found.as_array().into_iter().flatten().map(|factor| factor.as_f64().map(|factor| factor as f32));
    let factors = factors.collect::<Option<Vec<f32>>>().and_then(|factors| <[f32; N]>::try_from(factors).ok());
    let factors = factors.filter(|factors| factors.iter().all(|factor| factor.is_normal()));
    factors.ok_or_else(|| keys.wrong(key, format!("{N} numbers other than 0"), found))
}

/// Multipliers that published checkpoints leave to the forward pass.
fn factors(keys: &Keys<'_>, config: &ModelConfig) -> Result<Vec<Factors>, Error> {
    let Some(block) = config.blocks.first() else { return Ok(Vec::new()) };
    let Some(Recurrence::Mamba2 { scan, .. }) = &block.recurrence else { return Ok(Vec::new()) };
    let of_input = multiplier(keys, "ssm_in_multiplier")?;
    let each: [f32; 5] = multipliers(keys, "ssm_multipliers")?;
    let [gate, down] = multipliers(keys, "mlp_multipliers")?;
    let of_groups = scan.n_groups * scan.state_dim;
    let rows = [scan.inner_dim(), scan.inner_dim(), of_groups, of_groups, scan.n_heads];
    let output = multiplier(keys, "attention_in_multiplier")? * multiplier(keys, "attention_out_multiplier")?;
    Ok(vec![
        ("ssm_in.weight", rows.into_iter().zip(each.map(|factor| of_input * factor)).collect()),
        ("ssm_out.weight", vec![(config.dim, multiplier(keys, "ssm_out_multiplier")?)]),
        ("attn_output.weight", vec![(config.dim, output)]),
        ("ffn_gate.weight", vec![(block.feed_forward.dim, gate)]),
        ("ffn_down.weight", vec![(config.dim, down)]),
    ])
}
