//! OLMo 2 (OLMo Team 2024, arXiv:2501.00656), which normalises results rather than inputs, and OLMo 3 (2025), with windows
//! and another rotation beyond them.

use super::llama::LLAMA;
use super::{Architecture, SHARES, WINDOW, add_local_rope, mixture, sliding};
use crate::kernels::{QkNorm, RopeStyle, Router};
use crate::model::NormPlace;

pub(super) const OLMO2: Architecture = Architecture {
    gguf: "olmo2",
    json: &["olmo2"],
    pairs: [RopeStyle::Halves; 2],
    names: &[("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm")],
    describe: |keys, config| {
        let window = keys.u32(WINDOW)?;
        let is_local = if window.is_some() { sliding(keys, config, 4)? } else { Vec::new() };
        // Layers with a window keep their angles.
        let local_rope = if window.is_some() { add_local_rope(keys, config, config.ropes[0].theta)? } else { 0 };
        for (l, block) in config.blocks.iter_mut().enumerate() {
            (block.attn_norm, block.ffn_norm) = (NormPlace::Result, NormPlace::Result);
            block.attention.qk_norm = Some(QkNorm::Whole);
            if is_local.get(l) == Some(&true) {
                block.attention.window = window;
                block.attention.rope = Some(local_rope);
            }
        }
        Ok(())
    },
    ..LLAMA
};

/// GGUF files of it say that they are OLMo 2, hence no name.
pub(super) const OLMO3: Architecture = Architecture { gguf: "", json: &["olmo3"], ..OLMO2 };

/// Experts whose weights are their scores (Muennighoff et al. 2024, arXiv:2409.02060), and norms of inputs.
pub(super) const OLMOE: Architecture = Architecture {
    gguf: "olmoe",
    json: &["olmoe"],
    names: &[],
    describe: |keys, config| {
        mixture(keys, config, Router { shares: false, ..SHARES }, |_| true)?;
        config.blocks.iter_mut().for_each(|block| block.attention.qk_norm = Some(QkNorm::Whole));
        Ok(())
    },
    ..OLMO2
};
