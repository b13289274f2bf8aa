//! GPT-2 (Radford et al. 2019).

use super::Architecture;
use super::llama::LLAMA;
use crate::load::keys::Key;
use crate::load::tensor_index::FileLayout;
use crate::model::{NormKind, PositionTable};

pub(super) const GPT2: Architecture = Architecture {
    gguf: "gpt2",
    json: &["gpt2"],
    names: &[
        ("wte", "token_embd"),
        ("wpe", "position_embd"),
        ("ln_f", "output_norm"),
        ("ln_1", "attn_norm"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("ln_2", "ffn_norm"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ],
    stored: |name, _| {
        let is_product = ["attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"];
        if is_product.iter().any(|product| name.ends_with(product)) {
            FileLayout::Transposed
        } else {
            FileLayout::AsRead
        }
    },
    tied: true,
    eps: (Key("attention.layer_norm_epsilon", "layer_norm_epsilon"), Some(1e-5)),
    activation: "gelu_new",
    gated: false,
    ffn_widths: Some(4),
    describe: |keys, config| {
        keys.only_bool(Key("", "scale_attn_weights"), true)?;
        config.norm = NormKind::Layer { bias: true };
        config.positions = Some(PositionTable { first: 0 });
        config.ropes.clear();
        config.blocks.iter_mut().for_each(|block| block.attention.rope = None);
        Ok(())
    },
    ..LLAMA
};
