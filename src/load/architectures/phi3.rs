//! Phi-3 (Abdin et al. 2024, arXiv:2404.14219): fused QKV and gate-up matrices.

use super::llama::LLAMA;
use super::{Architecture, WINDOW};
use crate::kernels::RopeStyle;
use crate::load::keys::Key;

pub(super) const PHI3: Architecture = Architecture {
    gguf: "phi3",
    json: &["phi3"],
    pairs: [RopeStyle::Halves; 2],
    names: &[("self_attn.qkv_proj", "attn_qkv"), ("mlp.gate_up_proj", "ffn_up")],
    describe: |keys, config| {
        // Converters write GGUF's key, but implementations ignore it.
        let window = keys.u32(Key("", WINDOW.1))?;
        config.blocks.iter_mut().for_each(|block| block.attention.window = window);
        Ok(())
    },
    ..LLAMA
};
