//! LFM3-VL (Liquid AI 2026): gated convolutions over a picture's patches, and attention with grouped keys rotated by row
//! and column; no learned positions.

use super::{HEADS, LAYERS, PatchPlaces, VisionFamily, axial, of_blocks, size};
use crate::error::Error;
use crate::kernels::{Activation, Gate, Gelu, QkNorm};
use crate::load::architectures::listed_layers;
use crate::load::keys::{Key, Keys};
use crate::load::tensor_index::FileLayout;
use crate::model::{
    Attention, Between, Block, FeedForward, Join, MAX_LAYERS, NormKind, Projector, Recurrence, RowAttention, RowNorm,
    VisionConfig,
};
use crate::picture::Family;
use crate::picture::rope::Axes;

pub(super) const LFM3_VL: VisionFamily = VisionFamily {
    family: Family::Lfm3Vl,
    prefixes: &["model.vision_tower.", "model.multi_modal_projector."],
    layers: "layers.",
    names: &[
        ("patchifier", "patch_embd"),
        ("patch_embed", "patch_embd"),
        ("embedding_norm", "patch_norm.2"),
        ("operator_norm", "attn_norm"),
        ("conv.in_proj", "shortconv.in_proj"),
        ("conv.spatial_conv", "shortconv.conv"),
        ("conv.out_proj", "shortconv.out_proj"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.out_proj", "attn_output"),
        ("self_attn.q_layernorm", "attn_q_norm"),
        ("self_attn.k_layernorm", "attn_k_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("feed_forward.w1", "ffn_gate"),
        ("feed_forward.w3", "ffn_up"),
        ("feed_forward.w2", "ffn_down"),
        ("layer_norm", "mm.norm"),
        ("linear_1", "mm.0"),
        ("linear_2", "mm.2"),
    ],
    stored: |name, _, _| match name {
        "patch_embd.weight" => FileLayout::SummedFrames,
        _ => FileLayout::AsRead,
    },
    describe,
};

fn describe(keys: &Keys<'_>) -> Result<(VisionConfig, PatchPlaces), Error> {
    /// Of the projector's layer norm.
    const LAYER_EPS: f32 = 1e-6;
    let dim = keys.required(Key("", "hidden_size"))?;
    let [n_heads, n_layers]: [u32; 2] = [keys.required(HEADS)?, keys.required(LAYERS)?];
    if n_heads == 0 || !dim.is_multiple_of(n_heads) {
        return Err(keys.wrong(HEADS, format!("a divisor of the width {dim}"), n_heads));
    }
    if !(1..=MAX_LAYERS).contains(&n_layers) {
        return Err(keys.wrong(LAYERS, format!("1 to {MAX_LAYERS}"), n_layers));
    }
    let head_dim = dim / n_heads;
    let side = size(keys, Key("", "conv_kernel_size"), Some(3), 7)?;
    let is_conv = listed_layers(keys, n_layers as usize, &["full_attention", "conv"])?
        .ok_or_else(|| keys.missing(Key("", "layer_types")))?;
    for (key, wanted) in [(Key("", "temporal_patch_size"), 2), (Key("", "in_channels"), 3)] {
        if let Some(found) = keys.u32(key)?.filter(|&found| found != wanted) {
            return Err(keys.unsupported(key, found, &wanted.to_string()));
        }
    }
    let kind = Key("", "rope_parameters.rope_type");
    if let Some(found) = keys.str(kind)?.filter(|&found| found != "axial") {
        return Err(keys.unsupported(kind, found, "axial"));
    }
    let act = Key("", "projector_hidden_act");
    if let Some(found) = keys.str(act)?.filter(|&found| found != "gelu") {
        return Err(keys.unsupported(act, found, "gelu"));
    }
    keys.says(Key("", "projector_bias"));
    let theta = keys.f32(Key("", "rope_parameters.rope_theta"))?.unwrap_or(1e6).into();
    let n_kv_heads = keys.u32(Key("", "num_key_value_heads"))?.unwrap_or(n_heads);
    let attention =
        Attention { n_kv_heads, rope: Some(0), qk_norm: Some(QkNorm::Heads), ..Attention::plain(n_heads, head_dim) };
    let between = Between::Gate(Gate::Silu);
    let ffn_dim = keys.required(Key("", "intermediate_size"))?;
    let plain = Block::plain(attention, FeedForward { dim: ffn_dim, between, experts: None });
    let mixing = |kind: &usize| (*kind == 1).then_some(Recurrence::GridConv { side });
    let blocks = is_conv.iter().map(|kind| Block { recurrence: mixing(kind), ..plain.clone() }).collect();
    let eps = keys.f32(Key("", "norm_eps"))?.unwrap_or(1e-5);
    let mut encoder = of_blocks("lfm3_vl", dim, blocks, (NormKind::Rms, eps));
    encoder.ropes.push(axial(head_dim, theta));
    let patch = size(keys, Key("", "patch_size"), None, 128)?;
    let merge = size(keys, Key("", "spatial_merge_size"), Some(2), 16)?;
    let hidden_dim = size(keys, Key("", "projector_hidden_size"), Some(2560), 1 << 16)?;
    let config = VisionConfig {
        encoder,
        patch_dim: 3 * patch * patch,
        has_embedding: true,
        patch_norms: [false, true],
        has_positions: false,
        projector: Projector {
            n_patches: merge * merge,
            join: Join::Concatenated,
            norm: RowNorm::OfPatches { eps: LAYER_EPS },
            hidden: Some((hidden_dim, Activation::Gelu(Gelu::Exact))),
        },
        deepstack: Vec::new(),
        has_grid: false,
        attention: RowAttention::ByLayer,
        row_dim: keys.required(Key("", "text_hidden_size"))?,
    };
    Ok((config, PatchPlaces { learned: None, rope: Some((Axes::RowFirst, theta)) }))
}
