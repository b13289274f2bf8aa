//! OLMo 2 (OLMo Team 2024, arXiv:2501.00656) with post-norms only, and OLMo 3 (2025) with sliding windows and a
//! separate RoPE in global layers.

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
        // Sliding-window layers keep the unscaled RoPE.
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

/// Its GGUF files say `olmo2`, hence no GGUF name.
pub(super) const OLMO3: Architecture = Architecture { gguf: "", json: &["olmo3"], ..OLMO2 };

/// Experts weighted by unnormalised scores (Muennighoff et al. 2024, arXiv:2409.02060), and pre-norms.
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
