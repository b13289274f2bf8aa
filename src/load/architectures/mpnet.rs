//! MPNet (Song et al. 2020, arXiv:2004.09297): BERT with RoBERTa's positions, without token types, and with biases of
//! attention scores by relative position.

use super::Architecture;
use super::bert::BERT;
use crate::load::keys::Key;
use crate::load::tensor_index::FileLayout;
use crate::model::{ModelConfig, PositionBiases};

pub(super) const MPNET: Architecture = Architecture {
    gguf: "",
    json: &["mpnet"],
    names: &[
        ("embeddings.word_embeddings", "token_embd"),
        ("embeddings.position_embeddings", "position_embd"),
        ("embeddings.LayerNorm", "token_embd_norm"),
        ("encoder.relative_attention_bias", "attn_rel_b"),
        ("attention.attn.q", "attn_q"),
        ("attention.attn.k", "attn_k"),
        ("attention.attn.v", "attn_v"),
        ("attention.attn.o", "attn_output"),
        ("attention.LayerNorm", "attn_output_norm"),
        ("intermediate.dense", "ffn_up"),
        ("output.dense", "ffn_down"),
        ("output.LayerNorm", "layer_output_norm"),
        ("pooler.dense", "cls"),
        ("classifier.dense", "cls"),
        ("classifier.out_proj", "cls.output"),
    ],
    stored: by_distance,
    describe: |keys, config| {
        (BERT.describe)(keys, config)?;
        let n_buckets = keys.u32(Key("", "relative_attention_num_buckets"))?.unwrap_or(32);
        config.position_biases = Some(PositionBiases { n_buckets, max_distance: 128 });
        Ok(())
    },
    ..BERT
};

pub(super) fn by_distance(name: &str, config: &ModelConfig) -> FileLayout {
    match config.position_biases {
        Some(biases) if name == "attn_rel_b.weight" => FileLayout::ByDistance(biases),
        _ => FileLayout::AsRead,
    }
}
