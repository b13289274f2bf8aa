//! Gemma 4 (Google 2026). Its tower has sandwich norms, norms of queries, keys and values, positions learned for each
//! axis and rotated by column and row, and numbers clipped to measured ranges in the smallest models; rows are means of
//! patches. "Unified" models have no tower: large patches go through norms and two products, frames of samples through
//! one.

use super::{HEADS, LAYERS, Learned, PatchPlaces, VisionFamily, axial, of_blocks, size};
use crate::error::Error;
use crate::kernels::{Gate, Gelu, QkNorm};
#[cfg(feature = "sound")]
use crate::load::audio::{AudioFamily, AudioTokens};
use crate::load::keys::{Key, Keys};
use crate::load::tensor_index::FileLayout;
use crate::model::{
    Attention, Between, Block, FeedForward, Join, MAX_LAYERS, NormKind, NormPlace, Projector, RowAttention, RowNorm,
    VisionConfig, name_in_layer,
};
use crate::picture::Family;
use crate::picture::rope::Axes;

const WIDTH: Key = Key("embedding_length", "hidden_size");
const EPS: Key = Key("attention.layer_norm_epsilon", "rms_norm_eps");
const PATCH: Key = Key("patch_size", "patch_size");
const POOLED: Key = Key("projector.scale_factor", "pooling_kernel_size");
const ROW_DIM: Key = Key("projection_dim", "text_hidden_size");

pub(super) const GEMMA4: VisionFamily = VisionFamily {
    family: Family::Gemma4,
    prefixes: &["model.vision_tower.", "model.embed_vision."],
    layers: "encoder.layers.",
    names: &[
        ("patch_embedder.input_proj", "patch_embd"),
        ("patch_embedder.position_embedding_table", "position_embd"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        // Products, and beside them the bounds of their numbers.
        ("self_attn.q_proj.linear", "attn_q"),
        ("self_attn.k_proj.linear", "attn_k"),
        ("self_attn.v_proj.linear", "attn_v"),
        ("self_attn.o_proj.linear", "attn_output"),
        ("mlp.gate_proj.linear", "ffn_gate"),
        ("mlp.up_proj.linear", "ffn_up"),
        ("mlp.down_proj.linear", "ffn_down"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("embedding_projection", "mm.0"),
        ("std_bias", "std_bias"),
        ("std_scale", "std_scale"),
        // GGUF.
        ("mm.input_projection", "mm.0"),
        ("v.std_bias", "std_bias"),
        ("v.std_scale", "std_scale"),
    ],
    stored: |name, config, _| {
        let n_heads = config.encoder.blocks.first().map_or(1, |block| block.attention.n_heads);
        match name_in_layer(name) {
            Some("attn_q.weight" | "attn_k.weight") => FileLayout::Quarters { n_heads },
            Some("attn_q_norm.weight" | "attn_k_norm.weight") => FileLayout::Quarters { n_heads: 1 },
            _ => FileLayout::AsRead,
        }
    },
    describe: tower,
};

pub(super) const GEMMA4_UNIFIED: VisionFamily = VisionFamily {
    family: Family::Gemma4Unified,
    prefixes: &["model.vision_embedder.", "model.embed_vision."],
    layers: "layers.",
    names: &[
        ("patch_ln1", "patch_norm.1"),
        ("patch_dense", "patch_embd"),
        ("patch_ln2", "patch_norm.2"),
        ("pos_embedding", "position_embd"),
        ("pos_norm", "output_norm"),
        ("embedding_projection", "mm.0"),
        // GGUF.
        ("v.patch_norm.3", "output_norm"),
        ("mm.input_projection", "mm.0"),
    ],
    stored: |_, _, _| FileLayout::AsRead,
    describe: unified,
};

#[cfg(feature = "sound")]
pub(in crate::load) const GEMMA4_UNIFIED_SOUND: AudioFamily = AudioFamily {
    json: "gemma4_unified",
    gguf: "gemma4ua",
    prefix: "model.embed_audio.",
    names: &[("embedding_projection", "mm.0"), ("mm.a.input_projection", "mm.0")],
    tokens: AudioTokens { placeholder: "<|audio|>", begin: "<|audio>", end: "<audio|>" },
    describe: sound,
};

fn tower(keys: &Keys<'_>) -> Result<(VisionConfig, PatchPlaces), Error> {
    let [dim, n_heads, n_layers]: [u32; 3] = [keys.required(WIDTH)?, keys.required(HEADS)?, keys.required(LAYERS)?];
    if n_heads == 0 || !dim.is_multiple_of(n_heads) {
        return Err(keys.wrong(HEADS, format!("a divisor of the width {dim}"), n_heads));
    }
    if !(1..=MAX_LAYERS).contains(&n_layers) {
        return Err(keys.wrong(LAYERS, format!("1 to {MAX_LAYERS}"), n_layers));
    }
    let of_keys = Key("", "num_key_value_heads");
    if let Some(found) = keys.u32(of_keys)?.filter(|&found| found != n_heads) {
        return Err(keys.unsupported(of_keys, found, &n_heads.to_string()));
    }
    let head_dim = size(keys, Key("", "head_dim"), Some(dim / n_heads), 512)?;
    keys.only_bool(Key("", "attention_bias"), false)?;
    let act = Key("", "hidden_activation");
    if let Some(found) = keys.str(act)?.filter(|&found| found != "gelu_pytorch_tanh") {
        return Err(keys.unsupported(act, found, "gelu_pytorch_tanh"));
    }
    let kind = Key("", "rope_parameters.rope_type");
    // Published files call it "default".
    if let Some(found) = keys.str(kind)?.filter(|found| !["axial", "default"].contains(found)) {
        return Err(keys.unsupported(kind, found, "axial"));
    }
    let theta = keys.f32(Key("", "rope_parameters.rope_theta"))?.unwrap_or(100.0).into();
    let of_global = Key("", "global_head_dim");
    if let Some(found) = keys.u32(of_global)?.filter(|&found| found != head_dim) {
        return Err(keys.unsupported(of_global, found, &head_dim.to_string()));
    }
    for name in ["use_clipped_linears", "position_embedding_size", "max_position_embeddings", "default_output_length"] {
        keys.says(Key("", name));
    }
    let standardised = match keys.is_gguf() {
        true => keys.has("std_bias.weight"),
        false => keys.bool(Key("", "standardize"))?.unwrap_or(false),
    };
    let eps = keys.f32(EPS)?.unwrap_or(1e-6);
    let qk_norm = Some(QkNorm::HeadsAndValues);
    let attention = Attention { rope: Some(0), qk_norm, scale: 1.0, ..Attention::plain(n_heads, head_dim) };
    let between = Between::Gate(Gate::Gelu(Gelu::Tanh));
    let ffn_dim = keys.required(Key("feed_forward_length", "intermediate_size"))?;
    let feed_forward = FeedForward { dim: ffn_dim, between, experts: None };
    let (attn_norm, ffn_norm) = (NormPlace::Both, NormPlace::Both);
    let block = Block { attn_norm, ffn_norm, ..Block::plain(attention, feed_forward) };
    let mut encoder = of_blocks("gemma4v", dim, vec![block; n_layers as usize], (NormKind::Rms, eps));
    encoder.ropes.push(axial(head_dim, theta));
    let (patch, merge) = (size(keys, PATCH, None, 128)?, size(keys, POOLED, Some(3), 16)?);
    let config = VisionConfig {
        encoder,
        patch_dim: 3 * patch * patch,
        has_embedding: true,
        patch_norms: [false; 2],
        has_positions: true,
        projector: Projector {
            n_patches: merge * merge,
            join: Join::Averaged { factor: (dim as f32).sqrt(), standardised },
            norm: RowNorm::Rms { eps, weighted: false },
            hidden: None,
        },
        deepstack: Vec::new(),
        has_grid: false,
        attention: RowAttention::ByLayer,
        row_dim: keys.required(ROW_DIM)?,
    };
    Ok((config, PatchPlaces { learned: Some(Learned::Axes), rope: Some((Axes::ColumnFirst, theta)) }))
}

fn unified(keys: &Keys<'_>) -> Result<(VisionConfig, PatchPlaces), Error> {
    /// Of layer norms, whatever the file says of the RMS norm.
    const LAYER_EPS: f32 = 1e-5;
    let dim = keys.required(Key("embedding_length", "mm_embed_dim"))?;
    let of_output = Key("", "output_proj_dims");
    if let Some(found) = keys.u32(of_output)?.filter(|&found| found != dim) {
        return Err(keys.unsupported(of_output, found, &dim.to_string()));
    }
    let of_json = ["mm_posemb_size", "model_patch_size", "num_soft_tokens"].map(|name| Key("", name));
    let of_gguf = [Key("block_count", ""), HEADS, Key("feed_forward_length", "")];
    for key in of_json.into_iter().chain(of_gguf) {
        keys.says(key);
    }
    let side = size(keys, PATCH, Some(16), 128)? * size(keys, POOLED, Some(3), 16)?;
    let mut encoder = of_blocks("gemma4uv", dim, Vec::new(), (NormKind::Layer { bias: true }, LAYER_EPS));
    encoder.output_norm = true;
    let config = VisionConfig {
        encoder,
        patch_dim: 3 * side * side,
        has_embedding: true,
        patch_norms: [true; 2],
        has_positions: true,
        projector: Projector {
            n_patches: 1,
            join: Join::Concatenated,
            norm: RowNorm::Rms { eps: keys.f32(EPS)?.unwrap_or(1e-6), weighted: false },
            hidden: None,
        },
        deepstack: Vec::new(),
        has_grid: false,
        attention: RowAttention::Whole,
        row_dim: keys.required(ROW_DIM)?,
    };
    Ok((config, PatchPlaces { learned: Some(Learned::Axes), rope: None }))
}

/// Frames of samples go through a norm and a product.
#[cfg(feature = "sound")]
fn sound(keys: &Keys<'_>) -> Result<VisionConfig, Error> {
    let frame = Key("embedding_length", "audio_embed_dim|audio_samples_per_token|hidden_size");
    let dim = keys.required(frame)?;
    let of_output = Key("", "output_proj_dims");
    if let Some(found) = keys.u32(of_output)?.filter(|&found| found != dim) {
        return Err(keys.unsupported(of_output, found, &dim.to_string()));
    }
    Ok(VisionConfig {
        encoder: of_blocks("gemma4ua", dim, Vec::new(), (NormKind::Rms, 1e-6)),
        patch_dim: dim,
        has_embedding: false,
        patch_norms: [false; 2],
        has_positions: false,
        projector: Projector {
            n_patches: 1,
            join: Join::Concatenated,
            norm: RowNorm::Rms { eps: keys.f32(EPS)?.unwrap_or(1e-6), weighted: false },
            hidden: None,
        },
        deepstack: Vec::new(),
        has_grid: false,
        attention: RowAttention::Causal,
        row_dim: keys.required(ROW_DIM)?,
    })
}
