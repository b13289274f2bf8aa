//! Llama (Touvron et al. 2023, arXiv:2302.13971) and Mistral (Jiang et al. 2023, arXiv:2310.06825), which adds a window;
//! Ministral 3 (2025), whose queries grow with their position, which the rotation's keys say.

use super::{Architecture, RMS_EPS, WINDOW};
use crate::kernels::RopeStyle;
use crate::load::catalog::Stored;
use crate::load::keys::Key;

pub(super) const LLAMA: Architecture = Architecture {
    gguf: "llama",
    json: &["llama", "mistral"],
    pairs: [RopeStyle::Interleaved, RopeStyle::Halves],
    names: &[],
    stored: |_, _| Stored::AsRead,
    tied: false,
    eps: (RMS_EPS, None),
    activation: "silu",
    gated: true,
    ffn_widths: None,
    describe: |keys, config| {
        let experts = Key("expert_count", "num_local_experts");
        if let Some(n @ 1..) = keys.u32(experts)? {
            return Err(keys.unsupported(experts, n, "models without experts"));
        }
        let window = keys.u32(WINDOW)?;
        config.blocks.iter_mut().for_each(|block| block.attention.window = window);
        Ok(())
    },
};

pub(super) const MISTRAL3: Architecture = Architecture { gguf: "mistral3", json: &["ministral3"], ..LLAMA };
