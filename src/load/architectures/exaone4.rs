//! EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): post-norms, QK norms, and no RoPE in global-attention layers.

use super::llama::LLAMA;
use super::{Architecture, WINDOW, sliding};
use crate::kernels::{QkNorm, RopeStyle};
use crate::model::NormPlace;

pub(super) const EXAONE4: Architecture = Architecture {
    gguf: "exaone4",
    json: &["exaone4"],
    pairs: [RopeStyle::Halves; 2],
    names: &[("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm")],
    describe: |keys, config| {
        let window = keys.u32(WINDOW)?.filter(|&window| window > 0);
        let is_local = if window.is_some() { sliding(keys, config, 4)? } else { Vec::new() };
        for (l, block) in config.blocks.iter_mut().enumerate() {
            (block.attn_norm, block.ffn_norm) = (NormPlace::Result, NormPlace::Result);
            block.attention.qk_norm = Some(QkNorm::Heads);
            match is_local.get(l) {
                Some(true) => block.attention.window = window,
                Some(false) => block.attention.rope = None,
                None => {}
            }
        }
        Ok(())
    },
    ..LLAMA
};
