//! Nomic BERT (Nussbaum et al. 2024, arXiv:2402.01613), with the keys of its own code or of transformers 5; and with
//! experts in some layers (Nussbaum & Duderstadt 2025, arXiv:2502.07972).

use super::llama::LLAMA;
use super::{Architecture, EXPERTS, SHARES, THETA, encoder, mixture};
use crate::error::Error;
use crate::kernels::{Gelu, RopeStyle, Router};
use crate::load::keys::{Key, Keys};
use crate::load::tensor_index::FileLayout;
use crate::model::{Between, ModelConfig, NormKind, NormPlace};

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
        ("mlp.fc1", "ffn_up"),
        ("mlp.fc2", "ffn_down"),
        ("mlp.router.layer", "ffn_gate_inp"),
        ("mlp.experts.mlp.w1", "ffn_up_exps"),
        ("mlp.experts.mlp.w2", "ffn_down_exps"),
        ("mlp.experts", "ffn_exps"),
        ("norm2", "layer_output_norm"),
        ("post_mlp_layernorm", "layer_output_norm"),
    ],
    eps: (Key("attention.layer_norm_epsilon", "layer_norm_epsilon|layer_norm_eps"), Some(1e-12)),
    stored: joint_experts,
    activation: "silu",
    describe: |keys, config| {
        for (key, known) in
            [(Key("", "prenorm"), false), (Key("", "use_rms_norm"), false), (Key("", "rotary_emb_interleaved"), false)]
        {
            keys.only_bool(key, known)?;
        }
        keys.only_bool(Key("", "scale_attn_weights"), true)?;
        let scale_base = Key("", "rotary_emb_scale_base");
        if let Some(found) = keys.f32(scale_base)?.filter(|&found| found != 0.0) {
            return Err(keys.unsupported(scale_base, found, "0"));
        }
        // Only gated units have names of their own.
        if keys.is_gguf() && keys.architecture == NOMIC_BERT_MOE.gguf || keys.str(ACTIVATION)? == Some("gelu") {
            config.blocks.iter_mut().for_each(|block| block.feed_forward.between = Between::Gelu(Gelu::Exact));
        }
        experts(keys, config)?;
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

/// With GELU in place of gated units, and experts.
pub(super) const NOMIC_BERT_MOE: Architecture = Architecture { gguf: "nomic-bert-moe", json: &[], ..NOMIC_BERT };

const ACTIVATION: Key = Key("", "activation_function");

/// Makes every n-th feed-forward a mixture of experts, from the second layer on.
fn experts(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let interval = Key("moe_every_n_layers", "moe_every_n_layers");
    let every = keys.u32(interval)?.unwrap_or(0) as usize;
    for key in [Key("", "expert_choice_router"), Key("", "moe_normalize_expert_weights")] {
        keys.only_bool(key, false)?;
    }
    keys.only_u32(Key("", "num_shared_experts"), 0)?;
    // Numbers that other code of theirs reads.
    for name in ["moe_impl", "ffn_div"] {
        keys.says(Key("", name));
    }
    if every == 0 {
        return match keys.u32(EXPERTS)?.filter(|&n| n > 0) {
            Some(n) => Err(keys.wrong(interval, format!("1 or more with {n} experts"), every)),
            None => Ok(()),
        };
    }
    if keys.u32(EXPERTS)?.is_none_or(|n| n == 0) {
        return Err(keys.missing(EXPERTS));
    }
    mixture(keys, config, Router { shares: false, ..SHARES }, |l| l % every == 1)
}

fn joint_experts(name: &str, config: &ModelConfig) -> FileLayout {
    let experts = config.blocks.iter().find_map(|block| block.feed_forward.experts);
    match experts {
        Some(experts) if name.ends_with(".ffn_down_exps.weight") => FileLayout::ExpertsTransposedJoint { n: experts.n },
        _ => FileLayout::AsRead,
    }
}
