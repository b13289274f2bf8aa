//! Hunyuan, dense (Tencent 2025): QK norms per head after RoPE.

use super::Architecture;
use super::llama::LLAMA;
use crate::kernels::{QkNorm, RopeStyle};

pub(super) const HUNYUAN_DENSE: Architecture = Architecture {
    gguf: "hunyuan-dense",
    json: &["hunyuan_v1_dense"],
    pairs: [RopeStyle::Halves; 2],
    names: &[("self_attn.query_layernorm", "attn_q_norm"), ("self_attn.key_layernorm", "attn_k_norm")],
    describe: |_, config| {
        config.blocks.iter_mut().for_each(|block| block.attention.qk_norm = Some(QkNorm::RotatedHeads));
        Ok(())
    },
    ..LLAMA
};
