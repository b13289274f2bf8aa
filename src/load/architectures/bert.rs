//! BERT (Devlin et al. 2018, arXiv:1810.04805) and RoBERTa (Liu et al. 2019, arXiv:1907.11692), with a position
//! offset; and with rotated heads (Sturua et al. 2024, arXiv:2409.10173).

use super::llama::LLAMA;
use super::{Architecture, CONTEXT, encoder};
use crate::kernels::RopeStyle;
use crate::load::keys::Key;
use crate::model::{NormKind, NormPlace, PositionTable};

pub(super) const BERT: Architecture = Architecture {
    gguf: "bert",
    json: &["bert", "roberta", "xlm-roberta"],
    names: &[
        ("embeddings.word_embeddings", "token_embd"),
        ("embeddings.position_embeddings", "position_embd"),
        ("embeddings.token_type_embeddings", "token_types"),
        ("embeddings.LayerNorm", "token_embd_norm"),
        ("attention.self.query", "attn_q"),
        ("attention.self.key", "attn_k"),
        ("attention.self.value", "attn_v"),
        ("attention.output.dense", "attn_output"),
        ("attention.output.LayerNorm", "attn_output_norm"),
        ("intermediate.dense", "ffn_up"),
        ("output.dense", "ffn_down"),
        ("output.LayerNorm", "layer_output_norm"),
        ("pooler.dense", "cls"),
        ("classifier.dense", "cls"),
        ("classifier.out_proj", "cls.output"),
        ("classifier", "cls.output"),
        // Jina's code for XLM-RoBERTa.
        ("emb_ln", "token_embd_norm"),
        ("mixer.Wqkv", "attn_qkv"),
        ("mixer.out_proj", "attn_output"),
        ("norm1", "attn_output_norm"),
        ("mlp.fc1", "ffn_up"),
        ("mlp.fc2", "ffn_down"),
        ("norm2", "layer_output_norm"),
        // Its port to transformers.
        ("post_attention_layernorm", "attn_output_norm"),
        ("post_mlp_layernorm", "layer_output_norm"),
    ],
    eps: (Key("attention.layer_norm_epsilon", "layer_norm_eps"), Some(1e-12)),
    activation: "gelu",
    gated: false,
    describe: |keys, config| {
        let (kind, pad) = (Key("", "position_embedding_type"), Key("", "pad_token_id"));
        if let Some(found @ ("relative_key" | "relative_key_query")) = keys.str(kind)? {
            return Err(keys.unsupported(kind, found, "absolute"));
        }
        let is_rotated = is_jina(keys.architecture) || keys.str(kind)? == Some("rotary");
        // Settings of Jina's code; its adapters are read with the weights.
        for name in JINA_KEYS {
            keys.says(Key("", name));
        }
        // RoBERTa's first token uses the row after the padding token's; the GGUF converter drops the rows before.
        let first = match keys.architecture {
            "bert" => 0,
            _ if is_rotated => 0,
            _ => keys.u32(pad)?.unwrap_or(1).saturating_add(1),
        };
        if keys.is_gguf() {
            if !is_rotated {
                config.max_seq_len = keys.rows("position_embd.weight")?;
            }
            config.n_token_types = keys.rows("token_types.weight").unwrap_or(0);
        } else {
            let n_rows = keys.required(CONTEXT)?;
            let rest = n_rows.checked_sub(first);
            config.max_seq_len =
                rest.ok_or_else(|| keys.wrong(pad, format!("below the {n_rows} positions"), first.saturating_sub(1)))?;
            config.n_token_types = keys.u32(Key("", "type_vocab_size"))?.unwrap_or(0);
        }
        encoder(config, false);
        if !is_rotated {
            config.ropes.clear();
            config.positions = Some(PositionTable { first });
        }
        config.norm = NormKind::Layer { bias: true };
        (config.embd_norm, config.output_norm) = (true, false);
        for block in &mut config.blocks {
            block.attention.rope = is_rotated.then_some(0);
            (block.attn_norm, block.ffn_norm) = (NormPlace::Sum, NormPlace::Sum);
        }
        Ok(())
    },
    ..LLAMA
};

/// XLM-RoBERTa with rotated heads: Jina's embeddings 3.
pub(super) const JINA_BERT_V3: Architecture = Architecture {
    gguf: "jina-bert-v3",
    json: &["jina_embeddings_v3"],
    pairs: [RopeStyle::Halves; 2],
    defaults: r#"{"rope_theta": 20000.0}"#,
    ..BERT
};

fn is_jina(architecture: &str) -> bool {
    architecture == JINA_BERT_V3.gguf || JINA_BERT_V3.json.contains(&architecture)
}

const JINA_KEYS: [&str; 8] = [
    "lora_adaptations",
    "lora_alpha",
    "lora_rank",
    "lora_dropout_p",
    "lora_main_params_trainable",
    "task_instructions",
    "emb_pooler",
    "load_trained_adapters",
];
