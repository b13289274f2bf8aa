//! Qwen2 (Yang et al. 2024, arXiv:2407.10671) with biases on queries, keys and values, and Qwen3 (2025,
//! arXiv:2505.09388) with QK norms per head instead, also as an encoder (Zhang et al. 2025, arXiv:2506.05176).

use super::llama::LLAMA;
use super::{Architecture, SHARES, WINDOW, encoder, listed_sliding, mixture};
use crate::error::Error;
use crate::kernels::{QkNorm, RopeStyle};
use crate::load::keys::{Key, Keys};
use crate::load::tensor_index::FileLayout;
use crate::model::ModelConfig;

pub(super) const QWEN2: Architecture =
    Architecture { gguf: "qwen2", json: &["qwen2"], pairs: [RopeStyle::Halves; 2], describe: windows, ..LLAMA };

pub(super) const QWEN3: Architecture = Architecture {
    gguf: "qwen3",
    json: &["qwen3"],
    describe: |keys, config| {
        config.blocks.iter_mut().for_each(|block| block.attention.qk_norm = Some(QkNorm::Heads));
        if keys.embeds {
            encoder(config, keys.bool(Key("attention.causal", ""))?.unwrap_or(true));
        }
        windows(keys, config)
    },
    ..QWEN2
};

/// Experts in all layers or at an interval, except the listed layers.
pub(super) const QWEN3_MOE: Architecture = Architecture {
    gguf: "qwen3moe",
    json: &["qwen3_moe"],
    describe: |keys, config| {
        let every = keys.u32(Key("", "decoder_sparse_step"))?.unwrap_or(1).max(1) as usize;
        let dense = keys.u32s(Key("", "mlp_only_layers"))?.unwrap_or_default();
        mixture(keys, config, SHARES, |l| (l + 1) % every == 0 && !dense.contains(&(l as u32)))?;
        (QWEN3.describe)(keys, config)
    },
    ..QWEN3
};

/// The text part of Qwen3-VL (2025, arXiv:2511.21631): Qwen3, since only images have multi-dimensional positions.
pub(super) const QWEN3_VL: Architecture = Architecture {
    gguf: "qwen3vl",
    json: &["qwen3_vl", "qwen3_vl_text"],
    describe: |keys, config| {
        mrope(keys, config)?;
        (QWEN3.describe)(keys, config)
    },
    ..QWEN3
};

pub(super) const QWEN3_VL_MOE: Architecture = Architecture {
    gguf: "qwen3vlmoe",
    json: &["qwen3_vl_moe", "qwen3_vl_moe_text"],
    describe: |keys, config| {
        mrope(keys, config)?;
        (QWEN3_MOE.describe)(keys, config)
    },
    // Published experts are `[E, columns, rows]`.
    stored: |name, _| match name.contains("_exps.") {
        true => FileLayout::ExpertsTransposed { paired: false },
        false => FileLayout::AsRead,
    },
    names: &[("mlp.experts.gate_up_proj", "ffn_gate_up_exps")],
    ..QWEN3_MOE
};

/// The sections of M-RoPE: text has the same position in all of them, patches of pictures have others.
pub(super) fn mrope(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let sections = Key("rope.dimension_sections", "rope_parameters.mrope_section|rope_scaling.mrope_section");
    keys.says(Key("n_deepstack_layers", "rope_parameters.mrope_interleaved|rope_scaling.mrope_interleaved"));
    let Some(found) = keys.u32s(sections)? else { return Ok(()) };
    let n_pairs = config.ropes.first().map_or(0, |rope| rope.rot_dims / 2);
    match found[..] {
        // GGUF files have a fourth section, of zero.
        [t, h, w] | [t, h, w, 0] if [t, h, w].iter().all(|&n| n <= n_pairs) && t + h + w == n_pairs => {
            config.mrope = Some([t, h, w]);
            Ok(())
        }
        _ => Err(keys.wrong(sections, format!("three numbers with the sum {n_pairs}"), format!("{found:?}"))),
    }
}

/// The sliding window of the layers after the first few, if enabled. GGUF files have none.
fn windows(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let (window, first) = (keys.u32(Key("", WINDOW.1))?, keys.u32(Key("", "max_window_layers"))?);
    let listed = listed_sliding(keys, config.blocks.len())?;
    if keys.bool(Key("", "use_sliding_window"))? == Some(true) {
        let first = first.unwrap_or(0) as usize;
        for (l, block) in config.blocks.iter_mut().enumerate() {
            let is_local = listed.as_ref().map_or(l >= first, |listed| listed[l]);
            block.attention.window = window.filter(|_| is_local);
        }
    }
    Ok(())
}
