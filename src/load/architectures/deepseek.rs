//! DeepSeek-V2 (2024, arXiv:2405.04434), V3 (arXiv:2412.19437) and models after them: latent attention, and experts after
//! the first dense layers. Their GGUF files say `deepseek2`.

use super::llama::LLAMA;
use super::{Architecture, KV_HEADS, SHARES, SIGMOIDS, mixture_after_dense, n_heads};
use crate::error::Error;
use crate::kernels::{ExpertScore, RopeScaling, RopeStyle, Router};
use crate::load::keys::{Key, Keys};
use crate::load::scaling;
use crate::model::{Latent, MAX_DIM, ModelConfig};

pub(super) const DEEPSEEK: Architecture = Architecture {
    gguf: "deepseek2",
    json: &["deepseek_v2", "deepseek_v3", "kimi_k2", "youtu"],
    pairs: [RopeStyle::Interleaved; 2],
    names: &[
        ("self_attn.q_a_proj", "attn_q_a"),
        ("self_attn.q_a_layernorm", "attn_q_a_norm"),
        ("self_attn.q_b_proj", "attn_q_b"),
        ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
        ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
        ("self_attn.kv_b_proj", "attn_kv_b"),
        ("mlp.gate.e_score_correction", "exp_probs_b"),
        ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
        ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ],
    mtp: true,
    describes_heads: true,
    describe: |keys, config| {
        // Of training.
        for name in ["aux_loss_alpha", "seq_aux", "ep_size"] {
            keys.says(Key("", name));
        }
        keys.only_u32(Key("", "moe_layer_freq"), 1)?;
        latent(keys, config)?;
        mixture_after_dense(keys, config, router(keys)?)
    },
    ..LLAMA
};

/// GLM-4.7-Flash (2026). Its GGUF files say `deepseek2`, hence no GGUF name.
pub(super) const GLM4_MOE_LITE: Architecture =
    Architecture { gguf: "", json: &["glm4_moe_lite"], defaults: r#"{"first_k_dense_replace": 1}"#, ..DEEPSEEK };

/// Norms of latents have the published code's default, whatever the model's epsilon is.
const LATENT_EPS: f32 = 1e-6;

/// How experts are scored: a softmax without normalisation in V2, else sigmoids.
fn router(keys: &Keys<'_>) -> Result<Router, Error> {
    let (scores, gating) = (Key("", "scoring_func"), Key("expert_gating_func", ""));
    let method = Key("", "topk_method");
    let is_sigmoid = match keys.is_gguf() {
        // Files of V2 do not say.
        true => keys.u32(gating)? == Some(2),
        false => match keys.str(scores)? {
            Some("softmax") => false,
            Some("sigmoid") => true,
            None => keys.architecture != "deepseek_v2",
            Some(found) => return Err(keys.unsupported(scores, found, "softmax, sigmoid")),
        },
    };
    match (keys.str(method)?, is_sigmoid) {
        (None, _) | (Some("greedy" | "group_limited_greedy"), false) | (Some("noaux_tc"), true) => {}
        (Some(found), _) => {
            let supported = if is_sigmoid { "noaux_tc" } else { "greedy, group_limited_greedy" };
            return Err(keys.unsupported(method, found, supported));
        }
    }
    Ok(match is_sigmoid {
        true => SIGMOIDS,
        false => Router { score: ExpertScore::Softmax, shares: false, ..SHARES },
    })
}

/// Latent attention in all layers that attend.
pub(super) fn latent(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let limited = |key: Key| match keys.required(key)? {
        value @ 1..=MAX_DIM => Ok(value),
        value => Err(keys.wrong(key, format!("1 to {MAX_DIM}"), value)),
    };
    let kv_rank = limited(Key("attention.kv_lora_rank", "kv_lora_rank"))?;
    let q_rank = keys.u32(Key("attention.q_lora_rank", "q_lora_rank"))?.filter(|&rank| rank > 0);
    let turned = limited(Key("rope.dimension_count", "qk_rope_head_dim"))?;
    // Files from before llama.cpp's latent attention state the sizes of whole heads, and have one matrix for keys and
    // values.
    let is_older = keys.is_gguf() && !keys.says(Key("attention.key_length_mla", ""));
    let [key_length, value_length] = match is_older {
        true => ["attention.key_length", "attention.value_length"],
        false => ["attention.key_length_mla", "attention.value_length_mla"],
    };
    let whole = Key(key_length, "qk_head_dim");
    let nope_dim = match keys.is_gguf() {
        true => {
            let found = limited(whole)?;
            found.checked_sub(turned).ok_or_else(|| keys.wrong(whole, format!("more than {turned}"), found))?
        }
        false => {
            keys.says(whole);
            limited(Key("", "qk_nope_head_dim"))?
        }
    };
    // Published configurations state as many as queries have.
    let n_heads = n_heads(config);
    let stated = keys.each_u32(KV_HEADS, config.n_layers())?.into_iter().flatten();
    let mut attending = config.blocks.iter().zip(stated).filter(|(block, _)| block.recurrence.is_none());
    if let Some((_, found)) = attending.find(|(_, found)| ![1, n_heads].contains(found)) {
        return Err(keys.wrong(KV_HEADS, format!("1 or {n_heads}"), found));
    }
    let value_dim = limited(Key(value_length, "v_head_dim"))?;
    if keys.bool(Key("", "rope_interleave"))? == Some(false) {
        config.ropes[0].style = RopeStyle::Halves;
    }
    let mut scaling = scaling::read(keys, turned, config.max_seq_len)?;
    // YaRN sharpens the scores of all keys as it lengthens the rotated ones: the square of a factor of its own.
    let sharper = match &mut scaling {
        RopeScaling::Yarn { factor, magnitude, .. } => {
            // GGUF states one factor for both, which cancel.
            *magnitude = if keys.is_gguf() { 1.0 } else { *magnitude };
            scaling::yarn_mscale(keys, *factor)?
        }
        _ => 1.0,
    };
    (config.ropes[0].rot_dims, config.ropes[0].scaling) = (turned, scaling);
    for block in config.blocks.iter_mut().filter(|block| block.recurrence.is_none()) {
        let attention = &mut block.attention;
        attention.scale = ((nope_dim + turned) as f32).powf(-0.5) * (sharper * sharper) as f32;
        attention.n_kv_heads = 1;
        attention.head_dim = kv_rank.saturating_add(turned);
        attention.latent = Some(Latent { kv_rank, q_rank, nope_dim, value_dim, eps: LATENT_EPS });
    }
    Ok(())
}
