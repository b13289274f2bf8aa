//! GTE (Zhang et al. 2024, arXiv:2407.19669), whose `model_type` is `new`, and Snowflake's Arctic 2.0 of medium size:
//! BERT with rotated heads and gated units.

use super::bert::BERT;
use super::{Architecture, encoder};
use crate::kernels::RopeStyle;
use crate::load::keys::Key;
use crate::load::tensor_index::FileLayout;
use crate::model::{NormKind, NormPlace};

pub(super) const GTE: Architecture = Architecture {
    gguf: "",
    json: &["new", "gte"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("embeddings.word_embeddings", "token_embd"),
        ("embeddings.token_type_embeddings", "token_types"),
        ("embeddings.LayerNorm", "token_embd_norm"),
        ("attention.qkv_proj", "attn_qkv"),
        ("attention.q_proj", "attn_q"),
        ("attention.k_proj", "attn_k"),
        ("attention.v_proj", "attn_v"),
        ("attention.o_proj", "attn_output"),
        ("attn_ln", "attn_output_norm"),
        ("mlp.up_gate_proj", "ffn_up"),
        ("mlp_ln", "layer_output_norm"),
        ("pooler.dense", "cls"),
        ("classifier", "cls.output"),
    ],
    // Kernels read gates first.
    stored: |name, _| match name.ends_with(".ffn_up.weight") {
        true => FileLayout::ByHead { n_heads: 1, kinds: &[1, 0] },
        false => FileLayout::AsRead,
    },
    gated: true,
    describe: |keys, config| {
        for (key, known) in [(Key("", "position_embedding_type"), "rope"), (Key("", "layer_norm_type"), "layer_norm")] {
            if let Some(found) = keys.str(key)?.filter(|&found| found != known) {
                return Err(keys.unsupported(key, found, known));
            }
        }
        keys.only_bool(Key("", "logn_attention_scale"), false)?;
        // Which of two forms a product has, and how batches are padded.
        for name in ["pack_qkv", "unpad_inputs", "use_memory_efficient_attention", "logn_attention_clip1"] {
            keys.says(Key("", name));
        }
        config.n_token_types = keys.u32(Key("", "type_vocab_size"))?.unwrap_or(0);
        encoder(config, false);
        config.norm = NormKind::Layer { bias: true };
        (config.embd_norm, config.output_norm) = (true, false);
        for block in &mut config.blocks {
            (block.attn_norm, block.ffn_norm) = (NormPlace::Sum, NormPlace::Sum);
        }
        Ok(())
    },
    ..BERT
};
