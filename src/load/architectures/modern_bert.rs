//! ModernBERT (Warner et al. 2024, arXiv:2412.13663).

use super::llama::LLAMA;
use super::{Architecture, RMS_EPS, THETA, add_local_rope, encoder, listed_sliding};
use crate::kernels::RopeStyle;
use crate::load::keys::Key;
use crate::model::{NormKind, NormPlace};

pub(super) const MODERN_BERT: Architecture = Architecture {
    gguf: "modern-bert",
    json: &["modernbert"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("embeddings.tok_embeddings", "token_embd"),
        ("embeddings.norm", "token_embd_norm"),
        ("attn_norm", "attn_norm"),
        ("attn.Wqkv", "attn_qkv"),
        ("attn.Wo", "attn_output"),
        ("mlp_norm", "ffn_norm"),
        ("mlp.Wi", "ffn_up"),
        ("mlp.Wo", "ffn_down"),
        ("final_norm", "output_norm"),
        ("head.dense", "cls"),
        ("head.norm", "cls.norm"),
        ("classifier", "cls.output"),
    ],
    eps: (Key("attention.layer_norm_epsilon", "norm_eps"), Some(1e-5)),
    activation: "gelu",
    describe: |keys, config| {
        // Converters also write the epsilon of the other norm type.
        keys.says(RMS_EPS);
        let theta = match keys.is_gguf() {
            true => keys.required_f32(THETA)?,
            false => keys.f32(THETA)?.unwrap_or(160_000.0),
        };
        config.ropes[0].theta = theta.into();
        let local_rope = add_local_rope(keys, config, 10_000.0)?;

        // The window spans both sides, in all but the first of every three layers.
        let key = Key("attention.sliding_window", "local_attention");
        let window = keys.u32(key)?;
        if window == Some(0) && !keys.is_gguf() {
            return Err(keys.wrong(key, "1 or more".into(), 0));
        }
        let window = if keys.is_gguf() { window.filter(|&window| window > 0) } else { window.or(Some(128)) };
        let pattern = Key("attention.sliding_window_pattern", "global_attn_every_n_layers");
        let every = keys.u32(pattern)?.unwrap_or(3) as usize;
        if every == 0 {
            return Err(keys.wrong(pattern, "1 or more".into(), every));
        }
        let listed = listed_sliding(keys, config.blocks.len())?;
        for (l, block) in config.blocks.iter_mut().enumerate() {
            let is_local = listed.as_ref().map_or(l % every != 0, |listed| listed[l]);
            if let Some(window) = window.filter(|_| is_local) {
                block.attention.window = Some(window / 2 + 1);
                block.attention.rope = Some(local_rope);
            }
        }
        // The embedding's norm serves as the first layer's.
        config.blocks[0].attn_norm = NormPlace::Nowhere;
        encoder(config, false);
        config.embd_norm = true;
        config.norm = NormKind::Layer { bias: keys.bool(Key("", "norm_bias"))?.unwrap_or(false) };
        Ok(())
    },
    ..LLAMA
};
