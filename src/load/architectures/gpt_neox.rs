//! GPT-NeoX (Black et al. 2022, arXiv:2204.06745): parallel attention and feed-forward, partial RoPE.

use super::llama::LLAMA;
use super::{Architecture, n_heads};
use crate::kernels::RopeStyle;
use crate::load::keys::Key;
use crate::load::tensor_index::FileLayout;
use crate::model::NormKind;

pub(super) const GPT_NEOX: Architecture = Architecture {
    gguf: "gptneox",
    json: &["gpt_neox"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("embed_in", "token_embd"),
        ("embed_out", "output"),
        ("final_layer_norm", "output_norm"),
        ("attention.query_key_value", "attn_qkv"),
        ("attention.dense", "attn_output"),
        ("mlp.dense_h_to_4h", "ffn_up"),
        ("mlp.dense_4h_to_h", "ffn_down"),
    ],
    stored: |name, config| match name.contains(".attn_qkv.") {
        true => FileLayout::ByHead { n_heads: n_heads(config), kinds: &[0, 1, 2] },
        false => FileLayout::AsRead,
    },
    eps: (Key("attention.layer_norm_epsilon", "layer_norm_eps"), Some(1e-5)),
    activation: "gelu",
    gated: false,
    describe: |keys, config| {
        config.norm = NormKind::Layer { bias: true };
        let parallel = keys.bool(Key("use_parallel_residual", "use_parallel_residual"))?.unwrap_or(true);
        let share = keys.f32(Key("", "rotary_pct"))?;
        for rope in &mut config.ropes {
            if let Some(share) = share {
                rope.rot_dims = (rope.rot_dims as f32 * share) as u32;
            }
        }
        config.blocks.iter_mut().for_each(|block| block.parallel = parallel);
        Ok(())
    },
    ..LLAMA
};
