//! T5's encoder (Raffel et al. 2019, arXiv:1910.10683), as models of sentence embeddings have it (Ni et al. 2021,
//! arXiv:2108.08877): no positions but biases of attention scores, which are not divided by anything.

use super::llama::LLAMA;
use super::mpnet::by_distance;
use super::{Architecture, encoder};
use crate::error::Error;
use crate::kernels::{Gate, Gelu};
use crate::load::keys::{Key, Keys};
use crate::model::{Between, MAX_DIM, PositionBiases};

pub(super) const T5_ENCODER: Architecture = Architecture {
    gguf: "t5encoder",
    json: &["t5"],
    names: &[
        ("shared", "token_embd"),
        ("encoder.embed_tokens", "token_embd"),
        ("layer.0.layer_norm", "attn_norm"),
        ("layer.0.SelfAttention.q", "attn_q"),
        ("layer.0.SelfAttention.k", "attn_k"),
        ("layer.0.SelfAttention.v", "attn_v"),
        ("layer.0.SelfAttention.o", "attn_output"),
        ("layer.0.SelfAttention.relative_attention_bias", "attn_rel_b"),
        ("layer.1.layer_norm", "ffn_norm"),
        ("layer.1.DenseReluDense.wi", "ffn_up"),
        ("layer.1.DenseReluDense.wi_0", "ffn_gate"),
        ("layer.1.DenseReluDense.wi_1", "ffn_up"),
        ("layer.1.DenseReluDense.wo", "ffn_down"),
        ("encoder.final_layer_norm", "output_norm"),
    ],
    gguf_names: &[("blk.0.attn_rel_b", "attn_rel_b"), ("attn_o", "attn_output")],
    // The first layer has the biases of all.
    renamed: |name, _| match &*name {
        "blk.0.attn_rel_b.weight" => "attn_rel_b.weight".into(),
        _ => name,
    },
    stored: by_distance,
    gguf_stored: by_distance,
    eps: (Key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"), Some(1e-6)),
    activation: "gelu",
    gated: false,
    defaults: r#"{"n_positions": 512}"#,
    describes_heads: true,
    describe: |keys, config| {
        let classes = keys.strs(Key("", "architectures"))?.unwrap_or_default();
        let is_encoder = keys.is_gguf() || keys.embeds || classes.contains(&"T5EncoderModel");
        if !is_encoder {
            let found = format!("{}, whose decoder attends to an encoder", classes.join(", "));
            return Err(keys.unsupported(Key("", "architectures"), found, "T5EncoderModel, for embeddings"));
        }
        // Keys of the decoder and of training, and copies of others.
        for name in ["decoder_start_token_id", "attention.layer_norm_epsilon", "attention.value_length"] {
            keys.says(Key(name, ""));
        }
        for name in
            ["num_decoder_layers", "is_encoder_decoder", "dropout_rate", "output_past", "dense_act_fn", "is_gated_act"]
        {
            keys.says(Key("", name));
        }
        let head_dim = keys.required(HEAD_DIM)?;
        if !(1..=MAX_DIM).contains(&head_dim) {
            return Err(keys.wrong(HEAD_DIM, format!("1 to {MAX_DIM}"), head_dim));
        }
        let biases = PositionBiases {
            n_buckets: keys
                .u32(Key("attention.relative_buckets_count", "relative_attention_num_buckets"))?
                .unwrap_or(32),
            max_distance: keys.u32(Key("", "relative_attention_max_distance"))?.unwrap_or(128),
        };
        let between = between(keys)?;
        encoder(config, false);
        config.ropes.clear();
        config.position_biases = Some(biases);
        for block in &mut config.blocks {
            let attention = &mut block.attention;
            (attention.head_dim, attention.scale, attention.rope) = (head_dim, 1.0, None);
            block.feed_forward.between = between;
        }
        Ok(())
    },
    ..LLAMA
};

const HEAD_DIM: Key = Key("attention.key_length", "d_kv");

/// The activation of a feed-forward: ReLU, or gates with GELU since version 1.1.
fn between(keys: &Keys<'_>) -> Result<Between, Error> {
    let kind = Key("", "feed_forward_proj");
    match keys.str(kind)? {
        None if keys.has("blk.0.ffn_gate.weight") => Ok(Between::Gate(Gate::Gelu(Gelu::Tanh))),
        None | Some("relu") => Ok(Between::Relu),
        Some("gated-gelu") => Ok(Between::Gate(Gate::Gelu(Gelu::Tanh))),
        Some("gated-silu") => Ok(Between::Gate(Gate::Silu)),
        Some(other) => Err(keys.unsupported(kind, other, "relu, gated-gelu, gated-silu")),
    }
}
