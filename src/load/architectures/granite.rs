//! Granite (Granite Team 2024): Llama with four multipliers.

use super::Architecture;
use super::llama::LLAMA;
use crate::load::keys::Key;

pub(super) const GRANITE: Architecture = Architecture {
    gguf: "granite",
    json: &["granite"],
    describe: |keys, config| {
        let factor = |gguf, json| Ok::<_, crate::error::Error>(keys.f32(Key(gguf, json))?.unwrap_or(1.0));
        config.embd_scale = factor("embedding_scale", "embedding_multiplier")?;
        config.residual_scale = factor("residual_scale", "residual_multiplier")?;
        config.logit_scale = 1.0 / factor("logit_scale", "logits_scaling")?;
        if let Some(scale) = keys.f32(Key("attention.scale", "attention_multiplier"))? {
            config.blocks.iter_mut().for_each(|block| block.attention.scale = scale);
        }
        Ok(())
    },
    ..LLAMA
};
