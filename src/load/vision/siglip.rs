//! Encoders with the blocks of SigLIP (Zhai et al. 2023, arXiv:2303.15343): SmolVLM and Idefics3, and Gemma 3, whose
//! positions are learned for a fixed number of patches, and LFM2-VL with SigLIP 2 (2025, arXiv:2502.14786), which
//! resamples them.

use super::{FileKind, Learned, PatchPlaces, Tower, VisionFamily, size};
use crate::error::Error;
use crate::kernels::{Activation, Gelu};
use crate::load::keys::{Key, Keys};
use crate::load::tensor_index::FileLayout;
use crate::model::{Join, Projector, RowAttention, RowNorm, VisionConfig};
use crate::picture::Family;
use crate::picture::positions::Interpolation;

/// Names of the blocks.
const NAMES: [(&str, &str); 19] = [
    ("embeddings.patch_embedding", "patch_embd"),
    ("embeddings.position_embedding", "position_embd"),
    ("layer_norm1", "attn_norm"),
    ("layer_norm2", "ffn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.out_proj", "attn_output"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("post_layernorm", "output_norm"),
    ("layer_norm", "mm.norm"),
    ("linear_1", "mm.0"),
    ("linear_2", "mm.2"),
    ("modality_projection.proj", "mm.0"),
    ("mm_soft_emb_norm", "mm.norm"),
    ("mm_input_projection_weight", "mm.0"),
    // GGUF.
    ("mm.input_projection", "mm.0"),
    ("mm.model.fc", "mm.0"),
];

pub(super) const SMOLVLM: VisionFamily = VisionFamily {
    family: Family::SmolVlm,
    prefixes: &["model.vision_model.", "model.connector."],
    layers: "encoder.layers.",
    names: &NAMES,
    stored: |_, _, _| FileLayout::AsRead,
    describe: |keys| {
        let merge = size(keys, Key("projector.scale_factor", "scale_factor"), Some(4), 16)?;
        let projector = Projector { n_patches: merge * merge, ..PLAIN };
        describe(keys, "idefics3", projector, Interpolation::Nearest)
    },
};

/// A single product.
const PLAIN: Projector = Projector { n_patches: 1, join: Join::Concatenated, norm: RowNorm::None, hidden: None };

pub(super) const GEMMA3: VisionFamily = VisionFamily {
    family: Family::Gemma3,
    prefixes: &[
        "vision_tower.vision_model.",
        "model.vision_tower.vision_model.",
        "multi_modal_projector.",
        "model.multi_modal_projector.",
    ],
    layers: "encoder.layers.",
    names: &NAMES,
    stored: |name, _, kind| match (name, kind) {
        ("mm.0.weight", _) => FileLayout::Transposed,
        // As in the text model.
        ("mm.norm.weight", FileKind::Folder) => FileLayout::LessOne,
        _ => FileLayout::AsRead,
    },
    describe: |keys| {
        let norm = RowNorm::Rms { eps: keys.f32(EPS)?.unwrap_or(1e-6), weighted: true };
        let join = Join::Averaged { factor: 1.0, standardised: false };
        let projector = Projector { n_patches: pooled(keys)?, join, norm, hidden: None };
        describe(keys, "gemma3", projector, Interpolation::Nearest)
    },
};

const EPS: Key = Key("attention.layer_norm_epsilon", "layer_norm_eps");

/// Patches of a row of Gemma 3: a folder says how many rows there are.
fn pooled(keys: &Keys<'_>) -> Result<u32, Error> {
    let rows_key = Key("", "mm_tokens_per_image");
    if keys.is_gguf() {
        let merge = size(keys, Key("projector.scale_factor", ""), Some(4), 16)?;
        return Ok(merge * merge);
    }
    let n_rows = size(keys, rows_key, Some(256), 1 << 16)?;
    let side = size(keys, Key("", "image_size"), None, 1 << 14)? / size(keys, Key("", "patch_size"), None, 128)?;
    let n_patches = side * side;
    match n_patches.is_multiple_of(n_rows) {
        true => Ok(n_patches / n_rows),
        false => Err(keys.wrong(rows_key, format!("a divisor of {n_patches}, the number of patches"), n_rows)),
    }
}

pub(super) const LFM2_VL: VisionFamily = VisionFamily {
    family: Family::Lfm2Vl,
    prefixes: &["model.vision_tower.vision_model.", "model.multi_modal_projector."],
    layers: "encoder.layers.",
    names: &NAMES,
    stored: |_, _, _| FileLayout::AsRead,
    describe: |keys| {
        let merge = size(keys, Key("projector.scale_factor", "downsample_factor"), Some(2), 16)?;
        let act = Key("", "projector_hidden_act");
        if let Some(found) = keys.str(act)?.filter(|&found| found != "gelu") {
            return Err(keys.unsupported(act, found, "gelu"));
        }
        let normed = match keys.is_gguf() {
            true => keys.has("mm.norm.weight"),
            false => keys.bool(Key("", "projector_use_layernorm"))?.unwrap_or(true),
        };
        let hidden_dim = match keys.is_gguf() {
            true => keys.rows("mm.0.weight")?,
            false => size(keys, Key("", "projector_hidden_size"), Some(2560), 1 << 16)?,
        };
        let hidden = Some((hidden_dim, Activation::Gelu(Gelu::Exact)));
        let norm = if normed { RowNorm::OfBlocks } else { RowNorm::None };
        let projector = Projector { n_patches: merge * merge, norm, hidden, ..PLAIN };
        describe(keys, "lfm2_vl", projector, Interpolation::Antialiased)
    },
};

fn describe(
    keys: &Keys<'_>,
    name: &str,
    projector: Projector,
    interpolation: Interpolation,
) -> Result<(VisionConfig, PatchPlaces), Error> {
    let encoder = Tower::read(keys, 1e-6)?.config(keys, (name, None))?;
    let patch = size(keys, Key("patch_size", "patch_size"), None, 128)?;
    let head = Key("", "vision_use_head");
    if keys.bool(head)? == Some(true) {
        return Err(keys.unsupported(head, true, "false"));
    }
    for name in ["num_patches", "image_size", "num_channels", "projector_bias"] {
        keys.says(Key("", name));
    }
    let config = VisionConfig {
        encoder,
        patch_dim: 3 * patch * patch,
        has_embedding: true,
        patch_norms: [false; 2],
        has_positions: true,
        projector,
        deepstack: Vec::new(),
        has_grid: false,
        attention: RowAttention::ByLayer,
        row_dim: keys.required(Key("projection_dim", "text_hidden_size"))?,
    };
    Ok((config, PatchPlaces { learned: Some(Learned::Square(interpolation)), rope: None }))
}
