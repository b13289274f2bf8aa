//! Llama (Touvron et al. 2023, arXiv:2302.13971), Mistral (Jiang et al. 2023, arXiv:2310.06825) with a sliding
//! window, and Ministral 3 (2025) with queries that grow with position, as its RoPE keys state.

use super::{Architecture, RMS_EPS, SHARES, WINDOW, mixture};
use crate::kernels::RopeStyle;
use crate::load::tensor_index::FileLayout;

pub(super) const LLAMA: Architecture = Architecture {
    gguf: "llama",
    json: &["llama", "mistral"],
    pairs: [RopeStyle::Interleaved, RopeStyle::Halves],
    names: &[],
    gguf_names: &[],
    stored: |_, _| FileLayout::AsRead,
    gguf_stored: |_, _| FileLayout::AsRead,
    renamed: |name, _| name,
    factors: None,
    tied: false,
    eps: (RMS_EPS, None),
    activation: "silu",
    gated: true,
    ffn_widths: None,
    defaults: "{}",
    mtp: false,
    describes_heads: false,
    describe: |keys, config| {
        // Mixtral's GGUF files.
        if keys.is_gguf() {
            mixture(keys, config, SHARES, |_| true)?;
        }
        let window = keys.u32(WINDOW)?;
        config.blocks.iter_mut().for_each(|block| block.attention.window = window);
        Ok(())
    },
};

pub(super) const MISTRAL3: Architecture = Architecture { gguf: "mistral3", json: &["ministral3"], ..LLAMA };

/// A mixture of experts (Jiang et al. 2024, arXiv:2401.04088). Its GGUF files say `llama`, hence no GGUF name.
pub(super) const MIXTRAL: Architecture = Architecture {
    gguf: "",
    json: &["mixtral"],
    names: &[
        ("block_sparse_moe.gate", "ffn_gate_inp"),
        ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
        ("block_sparse_moe.experts.w3", "ffn_up_exps"),
        ("block_sparse_moe.experts.w2", "ffn_down_exps"),
    ],
    describe: |keys, config| {
        mixture(keys, config, SHARES, |_| true)?;
        (LLAMA.describe)(keys, config)
    },
    ..LLAMA
};
