//! Gemma 4 (Google 2026): Gemma 3 with value norms, a head shape per layer type, KV sharing in the last layers,
//! per-layer embeddings or experts beside the dense feed-forward, values from the keys' projection in the larger
//! models' global layers, and an output scale per layer.

use super::gemma::{GEMMA, SANDWICH};
use super::{Architecture, EXPERTS, FINAL_SOFT_CAP, SHARES, WINDOW, add_local_rope, mixture, sliding};
use crate::error::Error;
use crate::kernels::QkNorm;
use crate::load::keys::{Key, Keys};
use crate::load::scaling;
use crate::load::tensor_index::FileLayout;
use crate::model::{Block, MAX_DIM, ModelConfig, NormPlace, PerLayer};

pub(super) const GEMMA4: Architecture = Architecture {
    gguf: "gemma4",
    json: &["gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"],
    names: &[
        SANDWICH[0],
        SANDWICH[1],
        SANDWICH[2],
        ("embed_tokens_per_layer", "per_layer_token_embd"),
        ("per_layer_model_projection", "per_layer_model_proj"),
        ("per_layer_projection_norm", "per_layer_proj_norm"),
        ("per_layer_input_gate", "inp_gate"),
        ("per_layer_projection", "proj"),
        ("post_per_layer_input_norm", "post_norm"),
        ("layer_scalar", "layer_output_scale"),
        ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
        ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
        ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
        ("router.proj", "ffn_gate_inp"),
        ("router.scale", "ffn_gate_inp_scale"),
        ("router.per_expert_scale", "ffn_down_exps_scale"),
        ("experts.gate_up_proj", "ffn_gate_up_exps"),
        ("experts.down_proj", "ffn_down_exps"),
    ],
    gguf_names: &[("ffn_gate_inp.scale", "ffn_gate_inp_scale"), ("ffn_down_exps.scale", "ffn_down_exps_scale")],
    stored: router_scale,
    gguf_stored: router_scale,
    describe: |keys, config| {
        (GEMMA.describe)(keys, config)?;
        config.logit_soft_cap = keys.f32(FINAL_SOFT_CAP)?;
        let is_local = sliding(keys, config, 6)?;
        layers(keys, config, &is_local)?;
        share_keys(keys, config, &is_local)?;
        values_of_keys(keys, config, &is_local)?;
        experts(keys, config)?;
        per_layer(keys, config)?;
        bidirectional_images(keys, config, &is_local)
    },
    ..GEMMA
};

/// Router weights apply to a norm of length 1 rather than of mean square 1.
fn router_scale(name: &str, config: &ModelConfig) -> FileLayout {
    match name.ends_with(".ffn_gate_inp_scale.weight") {
        true => FileLayout::Scaled((config.dim as f32).powf(-0.5)),
        false => FileLayout::AsRead,
    }
}

/// In the larger models' local layers, rows of an image see each other. GGUF has no key for it: the smaller models
/// have per-layer embeddings.
fn bidirectional_images(keys: &Keys<'_>, config: &mut ModelConfig, is_local: &[bool]) -> Result<(), Error> {
    let both_ways = Key("", "use_bidirectional_attention");
    let sees = match keys.str(both_ways)? {
        None => keys.is_gguf() && config.per_layer.is_none(),
        Some("vision") => true,
        Some(found) => return Err(keys.unsupported(both_ways, found, "vision")),
    };
    for (block, &is_local) in config.blocks.iter_mut().zip(is_local) {
        block.attention.bidirectional_images = sees && is_local;
    }
    Ok(())
}

/// The global layers whose values are the projected keys: a key of `config.json`, missing tensors in GGUF.
fn values_of_keys(keys: &Keys<'_>, config: &mut ModelConfig, is_local: &[bool]) -> Result<(), Error> {
    let stated = keys.bool(Key("", "attention_k_eq_v"))?.unwrap_or(false);
    for (l, (block, &is_local)) in config.blocks.iter_mut().zip(is_local).enumerate() {
        let is_missing = keys.is_gguf() && !keys.has(&format!("blk.{l}.attn_v.weight"));
        block.attention.values_of_keys = !is_local && block.attention.keys_of.is_none() && (stated || is_missing);
    }
    Ok(())
}

/// The experts beside each layer's dense feed-forward, if there are any.
fn experts(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let switch = Key("", "enable_moe_block");
    let is_on = keys.bool(switch)?;
    let n = keys.u32(EXPERTS)?.unwrap_or(0);
    match (is_on, n) {
        (Some(false), 1..) => return Err(keys.unsupported(switch, false, &format!("true, for {n} experts"))),
        (Some(true), 0) => return Err(keys.wrong(switch, "false without num_experts".into(), true)),
        _ => {}
    }
    let dense: Vec<u32> = config.blocks.iter().map(|block| block.feed_forward.dim).collect();
    mixture(keys, config, SHARES, |_| true)?;
    for (block, dense) in config.blocks.iter_mut().zip(dense) {
        block.feed_forward.experts.iter_mut().for_each(|experts| experts.dense = Some(dense));
    }
    Ok(())
}

/// Head shape and RoPE of each layer type. The generic keys mean the sliding-window layers in a `config.json`, the
/// global ones in GGUF.
fn layers(keys: &Keys<'_>, config: &mut ModelConfig, is_local: &[bool]) -> Result<(), Error> {
    let of_all = config.blocks.first().map_or(0, |block| block.attention.head_dim);
    let [local, global] = match keys.is_gguf() {
        true => [keys.u32(Key("attention.key_length_swa", ""))?.unwrap_or(of_all), of_all],
        false => [of_all, keys.u32(Key("", "global_head_dim"))?.unwrap_or(of_all)],
    };
    keys.says(Key("attention.value_length_swa", ""));
    let global_kv_heads = keys.u32(Key("", "num_global_key_value_heads"))?;
    let window = keys.u32(WINDOW)?;
    for (l, (block, &is_local)) in config.blocks.iter_mut().zip(is_local).enumerate() {
        let attention = &mut block.attention;
        let head_dim = keys.of_layer(l, "head_dim")?.unwrap_or(if is_local { local } else { global });
        let n_kv_heads = keys.of_layer(l, "num_key_value_heads")?.or(global_kv_heads.filter(|_| !is_local));
        // Limited before multiplication.
        attention.head_dim = head_dim.min(MAX_DIM);
        attention.n_kv_heads = n_kv_heads.unwrap_or(attention.n_kv_heads);
        attention.scale = 1.0;
        attention.window = window.filter(|_| is_local);
        attention.qk_norm = Some(QkNorm::HeadsAndValues);
        block.attn_norm = NormPlace::Both;
        block.ffn_norm = NormPlace::Both;
        block.output_scale = true;
    }
    let local_rope = add_local_rope(keys, config, 10_000.0)?;
    let kind = |wanted: bool| {
        let found = config.blocks.iter().zip(is_local).find(|&(_, &is_local)| is_local == wanted);
        found.map(|(block, _)| block.attention.head_dim)
    };
    let [of_local, of_global] = [kind(true), kind(false)];
    if let Some(head_dim) = of_local {
        config.ropes[local_rope].rot_dims = keys.u32(Key("rope.dimension_count_swa", ""))?.unwrap_or(head_dim);
    }
    if let Some(head_dim) = of_global.filter(|_| !keys.is_gguf()) {
        let scaling = scaling::read(keys, head_dim, config.max_seq_len)?;
        let rope = &mut config.ropes[0];
        (rope.rot_dims, rope.scaling) = (head_dim, scaling);
    }
    for (block, &is_local) in config.blocks.iter_mut().zip(is_local) {
        block.attention.rope = Some(if is_local { local_rope } else { 0 });
    }
    Ok(())
}

/// The last layers reuse the keys of the last unshared layer of their type; a `config.json` may double their
/// feed-forward width, which GGUF lists.
fn share_keys(keys: &Keys<'_>, config: &mut ModelConfig, is_local: &[bool]) -> Result<(), Error> {
    let key = Key("attention.shared_kv_layers", "num_kv_shared_layers");
    let n_shared = keys.u32(key)?.unwrap_or(0) as usize;
    let doubles = keys.bool(Key("", "use_double_wide_mlp"))?.unwrap_or(false);
    let n_layers = config.blocks.len();
    let Some(n_own) = n_layers.checked_sub(n_shared) else {
        return Err(keys.wrong(key, format!("0 to {n_layers}"), n_shared));
    };
    for l in n_own..n_layers {
        let of = (0..n_own).rfind(|&of| is_local[of] == is_local[l]);
        let Some(of) = of else {
            return Err(keys.wrong(key, format!("an earlier layer of layer {l}'s type"), n_shared));
        };
        let Block { attention, feed_forward, .. } = &mut config.blocks[l];
        attention.keys_of = Some(of);
        feed_forward.dim = feed_forward.dim.saturating_mul(if doubles { 2 } else { 1 });
    }
    Ok(())
}

/// The per-layer embedding table.
fn per_layer(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let dim = keys.u32(Key("embedding_length_per_layer_input", "hidden_size_per_layer_input"))?.unwrap_or(0);
    let rows_key = Key("", "vocab_size_per_layer_input");
    let rows = keys.u32(rows_key)?;
    if dim == 0 {
        return Ok(());
    }
    if rows == Some(0) {
        return Err(keys.wrong(rows_key, "1 or more".into(), 0));
    }
    let vocab_size = match keys.is_gguf() {
        true => keys.rows("per_layer_token_embd.weight")?,
        false => rows.unwrap_or(config.vocab_size),
    };
    config.per_layer = Some(PerLayer { dim, vocab_size });
    config.blocks.iter_mut().for_each(|block| block.per_layer = true);
    Ok(())
}
