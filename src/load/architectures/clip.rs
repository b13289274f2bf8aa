//! Text encoders of CLIP (Radford et al. 2021, arXiv:2103.00020) and of SigLIP (Zhai et al. 2023, arXiv:2303.15343),
//! beside an image encoder: see `load/vision/clip.rs` and `load/text_tower.rs`.

use super::llama::LLAMA;
use super::{Architecture, encoder};
use crate::load::keys::{Key, Keys};
use crate::model::{ModelConfig, NormKind, PositionTable};

/// The name of the product behind pooling.
pub(in crate::load) const PROJECTION: &str = "text_projection";

pub(super) const CLIP: Architecture = Architecture {
    gguf: "",
    json: &["clip", "clip_text_model"],
    names: &[
        ("embeddings.token_embedding", "token_embd"),
        ("embeddings.position_embedding", "position_embd"),
        ("layer_norm1", "attn_norm"),
        ("layer_norm2", "ffn_norm"),
        ("self_attn.out_proj", "attn_output"),
        ("mlp.fc1", "ffn_up"),
        ("mlp.fc2", "ffn_down"),
        ("final_layer_norm", "output_norm"),
        (PROJECTION, PROJECTION),
        // SigLIP's.
        ("head", PROJECTION),
    ],
    eps: (Key("", "layer_norm_eps"), Some(1e-5)),
    activation: "quick_gelu",
    gated: false,
    // From `CLIPTextConfig`.
    defaults: r#"{
        "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 8, "max_position_embeddings": 77
    }"#,
    describe: |keys, config| {
        describe(keys, config);
        encoder(config, true);
        Ok(())
    },
    ..LLAMA
};

pub(super) const SIGLIP: Architecture = Architecture {
    gguf: "",
    json: &["siglip", "siglip2", "siglip_text_model", "siglip2_text_model"],
    eps: (Key("", "layer_norm_eps"), Some(1e-6)),
    activation: "gelu_pytorch_tanh",
    // From `SiglipTextConfig`.
    defaults: r#"{
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 64
    }"#,
    describe: |keys, config| {
        describe(keys, config);
        encoder(config, false);
        Ok(())
    },
    ..CLIP
};

/// What both have in common: blocks of GPT-2 and learned positions.
fn describe(keys: &Keys<'_>, config: &mut ModelConfig) {
    config.norm = NormKind::Layer { bias: true };
    config.positions = Some(PositionTable { first: 0 });
    config.ropes.clear();
    config.blocks.iter_mut().for_each(|block| block.attention.rope = None);
    says_generation(keys);
    // Duplicates of a tensor's shape.
    for name in ["projection_dim", "projection_size"] {
        keys.says(Key("", name));
    }
}

/// Marks settings of generation as read, which old files list for each part although nothing is generated.
pub(in crate::load) fn says_generation(keys: &Keys<'_>) {
    const NAMES: [&str; 9] = [
        "length_penalty",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ];
    for name in NAMES {
        keys.says(Key("", name));
    }
}
