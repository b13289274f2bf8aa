//! Qwen3-VL (2025, arXiv:2511.21631) and Qwen3.5: patches of 16 x 16, positions learned and rotated by row and column,
//! a merger of four neighbours; Qwen3-VL also has mergers of earlier layers (deepstack).

use super::{Learned, PatchPlaces, Tower, VisionFamily, size};
use crate::error::Error;
use crate::kernels::{Activation, Gelu};
use crate::load::keys::{Key, Keys};
use crate::load::tensor_index::FileLayout;
use crate::model::{Join, Projector, RowAttention, RowNorm, VisionConfig};
use crate::picture::Family;
use crate::picture::positions::Interpolation;
use crate::picture::rope::Axes;

pub(super) const QWEN3_VL: VisionFamily = VisionFamily {
    family: Family::Qwen3Vl,
    prefixes: &["model.visual.", "visual."],
    layers: "blocks.",
    names: &[
        ("patch_embed.proj", "patch_embd"),
        ("pos_embed", "position_embd"),
        ("attn.qkv", "attn_qkv"),
        ("attn.proj", "attn_output"),
        ("norm1", "attn_norm"),
        ("norm2", "ffn_norm"),
        ("mlp.linear_fc1", "ffn_up"),
        ("mlp.linear_fc2", "ffn_down"),
        ("merger.norm", "output_norm"),
        ("merger.linear_fc1", "mm.0"),
        ("merger.linear_fc2", "mm.2"),
    ],
    stored: |_, _, _| FileLayout::AsRead,
    describe,
};

fn describe(keys: &Keys<'_>) -> Result<(VisionConfig, PatchPlaces), Error> {
    let tower = Tower::read(keys, 1e-6)?;
    let encoder = tower.config(keys, ("qwen3vl_merger", Some(10_000.0)))?;
    let patch = size(keys, Key("patch_size", "patch_size"), None, 128)?;
    let merge = size(keys, Key("spatial_merge_size", "spatial_merge_size"), Some(2), 16)?;
    let frames = Key("", "temporal_patch_size");
    if let Some(found) = keys.u32(frames)?.filter(|&found| found != 2) {
        return Err(keys.unsupported(frames, found, "2"));
    }
    for key in [Key("", "rope_parameters.rope_theta"), Key("", "in_channels"), Key("", "num_position_embeddings")] {
        keys.says(key);
    }
    let kind = Key("", "rope_parameters.rope_type");
    if let Some(found) = keys.str(kind)?.filter(|found| !["axial", "default"].contains(found)) {
        return Err(keys.unsupported(kind, found, "axial"));
    }
    let n_patches = merge * merge;
    let deepstack = match keys.bools(Key("is_deepstack_layers", ""))? {
        Some(listed) => (0..).zip(listed).filter_map(|(layer, is_one)| is_one.then_some(layer)).collect(),
        None => keys.u32s(Key("", "deepstack_visual_indexes"))?.unwrap_or_default(),
    };
    let hidden = (n_patches.saturating_mul(encoder.dim), Activation::Gelu(Gelu::Exact));
    let config = VisionConfig {
        encoder,
        patch_dim: 3 * patch * patch,
        has_embedding: true,
        patch_norms: [false; 2],
        has_positions: true,
        projector: Projector { n_patches, join: Join::Concatenated, norm: RowNorm::None, hidden: Some(hidden) },
        deepstack,
        has_grid: true,
        attention: RowAttention::ByLayer,
        row_dim: keys.required(Key("projection_dim", "out_hidden_size|text_hidden_size"))?,
    };
    let learned = Some(Learned::Square(Interpolation::Bilinear));
    Ok((config, PatchPlaces { learned, rope: Some((Axes::RowFirst, 10_000.0)) }))
}
