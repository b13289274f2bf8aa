//! Gemma (Gemma Team 2024, arXiv:2403.08295), Gemma 2 (arXiv:2408.00118) and Gemma 3 (2025, arXiv:2503.19786).

use super::embedding_gemma::as_encoder;
use super::llama::LLAMA;
use super::{Architecture, FINAL_SOFT_CAP, HEADS, WIDTH, WINDOW, add_local_rope, sliding};
use crate::error::Error;
use crate::kernels::{Gate, Gelu, QkNorm, RopeStyle};
use crate::load::keys::{Key, Keys};
use crate::load::tensor_index::FileLayout;
use crate::model::{Between, ModelConfig, NormPlace};

pub(super) const GEMMA: Architecture = Architecture {
    gguf: "gemma",
    json: &["gemma"],
    pairs: [RopeStyle::Halves; 2],
    // Published norm weights are offsets from 1.
    stored: |name, _| if name.ends_with("norm.weight") { FileLayout::LessOne } else { FileLayout::AsRead },
    tied: true,
    activation: "gelu_pytorch_tanh",
    describe: |_, config| {
        config.embd_scale = (config.dim as f32).sqrt();
        for block in &mut config.blocks {
            // Even if the file says `gelu`.
            block.feed_forward.between = Between::Gate(Gate::Gelu(Gelu::Tanh));
        }
        Ok(())
    },
    ..LLAMA
};

/// Pre- and post-norms, soft caps, sliding windows in every other layer.
pub(super) const GEMMA2: Architecture = Architecture {
    gguf: "gemma2",
    json: &["gemma2"],
    names: SANDWICH,
    describe: |keys, config| {
        (GEMMA.describe)(keys, config)?;
        sandwich(keys, config, 46)?;
        let soft_cap = keys.f32(Key("attn_logit_softcapping", "attn_logit_softcapping"))?;
        config.logit_soft_cap = keys.f32(FINAL_SOFT_CAP)?;
        let (window, is_local) = (keys.u32(WINDOW)?, sliding(keys, config, 2)?);
        for (block, is_local) in config.blocks.iter_mut().zip(is_local) {
            block.attention.soft_cap = soft_cap;
            block.attention.window = window.filter(|_| is_local);
        }
        Ok(())
    },
    ..GEMMA
};

/// QK norms instead of soft caps; five sliding-window layers with their own RoPE per global one.
pub(super) const GEMMA3: Architecture = Architecture {
    gguf: "gemma3",
    json: &["gemma3_text"],
    // From `Gemma3TextConfig`; the larger models' folders omit most text settings.
    defaults: r#"{
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "query_pre_attn_scalar": 256
    }"#,
    describe: |keys, config| {
        (GEMMA.describe)(keys, config)?;
        sandwich(keys, config, 62)?;
        let local_rope = add_local_rope(keys, config, 10_000.0)?;
        config.logit_soft_cap = keys.f32(FINAL_SOFT_CAP)?;
        let soft_cap = keys.f32(Key("attn_logit_softcapping", "attn_logit_softcapping"))?;
        let (window, is_local) = (keys.u32(WINDOW)?, sliding(keys, config, 6)?);
        for (block, is_local) in config.blocks.iter_mut().zip(is_local) {
            block.attention.soft_cap = soft_cap;
            block.attention.qk_norm = Some(QkNorm::Heads);
            block.attention.window = window.filter(|_| is_local);
            block.attention.rope = Some(if is_local { local_rope } else { 0 });
            block.attention.bidirectional_images = true;
        }
        as_encoder(keys, config)
    },
    ..GEMMA2
};

/// Tensor names for pre- and post-norms.
pub(super) const SANDWICH: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Pre- and post-norms, and the attention scale. GGUF has no key for it: it differs in the 27B model, identified by
/// its number of layers.
fn sandwich(keys: &Keys<'_>, config: &mut ModelConfig, layers_of_27b: usize) -> Result<(), Error> {
    let is_27b = keys.is_gguf() && config.blocks.len() == layers_of_27b;
    let share = keys.required(WIDTH)? as f32 / keys.required(HEADS)? as f32;
    let scalar = keys.f32(Key("", "query_pre_attn_scalar"))?.or(is_27b.then_some(share));
    for block in &mut config.blocks {
        block.attn_norm = NormPlace::Both;
        block.ffn_norm = NormPlace::Both;
        if let Some(scalar) = scalar {
            block.attention.scale = scalar.powf(-0.5);
        }
    }
    Ok(())
}
