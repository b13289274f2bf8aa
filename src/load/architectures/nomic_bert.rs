//! Nomic BERT (Nussbaum et al. 2024, arXiv:2402.01613), with the keys of its own code or of transformers 5.

use super::llama::LLAMA;
use super::{Architecture, THETA, encoder};
use crate::kernels::RopeStyle;
use crate::load::keys::Key;
use crate::model::{NormKind, NormPlace};

pub(super) const NOMIC_BERT: Architecture = Architecture {
    gguf: "nomic-bert",
    json: &["nomic_bert"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("embeddings.word_embeddings", "token_embd"),
        ("embeddings.token_type_embeddings", "token_types"),
        ("emb_ln", "token_embd_norm"),
        ("embeddings.LayerNorm", "token_embd_norm"),
        ("attn.Wqkv", "attn_qkv"),
        ("attn.out_proj", "attn_output"),
        ("norm1", "attn_output_norm"),
        ("post_attention_layernorm", "attn_output_norm"),
        ("mlp.fc12", "ffn_gate"),
        ("mlp.fc11", "ffn_up"),
        ("mlp.fc2", "ffn_down"),
        ("norm2", "layer_output_norm"),
        ("post_mlp_layernorm", "layer_output_norm"),
    ],
    eps: (Key("attention.layer_norm_epsilon", "layer_norm_epsilon|layer_norm_eps"), Some(1e-12)),
    activation: "silu",
    describe: |keys, config| {
        for (key, known) in
            [(Key("", "prenorm"), false), (Key("", "use_rms_norm"), false), (Key("", "rotary_emb_interleaved"), false)]
        {
            keys.only_bool(key, known)?;
        }
        for key in [Key("", "num_experts"), Key("", "rotary_emb_scale_base")] {
            if let Some(found) = keys.f32(key)?.filter(|&found| found != 0.0) {
                return Err(keys.unsupported(key, found, "0"));
            }
        }
        let fraction = Key("", "rotary_emb_fraction");
        let share = keys.f32(fraction)?.unwrap_or(1.0);
        let rope = &mut config.ropes[0];
        rope.theta = keys.f32(THETA)?.unwrap_or(1000.0).into();
        rope.rot_dims = (rope.rot_dims as f32 * share) as u32;
        // Longer texts would need length-dependent RoPE angles.
        let trained = keys.u32(Key("", "max_trained_positions"))?;
        keys.says(Key("", "rotary_scaling_factor"));
        config.max_seq_len = config.max_seq_len.min(trained.unwrap_or(u32::MAX));
        config.n_token_types = match keys.is_gguf() {
            true => keys.rows("token_types.weight").unwrap_or(0),
            false => keys.u32(Key("", "type_vocab_size"))?.unwrap_or(0),
        };
        encoder(config, false);
        config.norm = NormKind::Layer { bias: true };
        (config.embd_norm, config.output_norm) = (true, false);
        for block in &mut config.blocks {
            (block.attn_norm, block.ffn_norm) = (NormPlace::Sum, NormPlace::Sum);
        }
        Ok(())
    },
    ..LLAMA
};
