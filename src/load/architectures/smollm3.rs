//! SmolLM3 (Bakouch et al. 2025): every fourth layer does not rotate (NoPE, Kazemnejad et al. 2023, arXiv:2305.19466).

use super::llama::LLAMA;
use super::{Architecture, listed_sliding};
use crate::load::keys::Key;

pub(super) const SMOLLM3: Architecture = Architecture {
    gguf: "smollm3",
    json: &["smollm3"],
    tied: true,
    describe: |keys, config| {
        let key = Key("", "no_rope_layers");
        let interval = Key("", "no_rope_layer_interval");
        keys.only_bool(Key("", "use_sliding_window"), false)?;
        let n_layers = config.blocks.len();
        if listed_sliding(keys, n_layers)?.is_some_and(|listed| listed.contains(&true)) {
            return Err(keys.unsupported(Key("", "layer_types"), "sliding_attention", "full_attention"));
        }
        let rotates = match (keys.u32s(key)?, keys.u32(interval)?.unwrap_or(4)) {
            (Some(list), _) if list.len() == n_layers => list,
            (Some(list), _) => return Err(keys.wrong(key, format!("{n_layers} numbers"), list.len())),
            (None, 0) => return Err(keys.wrong(interval, "1 or more".into(), 0)),
            (None, every) => (1..=n_layers as u32).map(|l| u32::from(!l.is_multiple_of(every))).collect(),
        };
        for (block, rotates) in config.blocks.iter_mut().zip(rotates) {
            block.attention.rope = (rotates != 0).then_some(0);
        }
        Ok(())
    },
    ..LLAMA
};
