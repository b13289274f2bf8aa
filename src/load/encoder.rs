//! What the files of a text encoder say: Hugging Face folders of BERT, RoBERTa and ModernBERT, with what sentence-transformers adds to
//! them, and GGUF files of the architecture `bert`.

use super::EncoderShape;
use super::catalog::Catalog;
use super::huggingface::{CONFIG, MODULES, POOLING, SENTENCE_CONFIG, Texts, missing};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::Metadata;
use crate::kernels::{Gelu, Pooling, RopeConfig, RopeScaling, RopeStyle};
use crate::model::{EncoderConfig, FeedForward, LocalLayers, Positions, WeightSource};

/// The shape that a folder's files give, if it is an encoder's.
pub(super) fn shape(json: &ConfigJson, texts: &Texts) -> Result<Option<EncoderShape>, Error> {
    let in_file = |file: &'static str| move |error: Error| error.in_file(file);
    let Some(config) = config(json).map_err(in_file(CONFIG))? else { return Ok(None) };
    let parse = |file: &'static str, bytes: &Option<Vec<u8>>| match bytes {
        Some(bytes) => ConfigJson::parse(bytes).map(Some).map_err(in_file(file)),
        None => Ok(None),
    };
    let pooling = match parse(POOLING, &texts.pooling)? {
        Some(json) => pooling(&json).map_err(in_file(POOLING))?,
        // What sentence-transformers takes for a plain checkpoint.
        None => Pooling::Mean,
    };
    let normalize = match &texts.modules {
        Some(bytes) => has_normalize(bytes).map_err(in_file(MODULES))?,
        None => true,
    };
    let max_tokens = match parse(SENTENCE_CONFIG, &texts.sentence_config)? {
        Some(json) => json.get_u32("max_seq_length").map_err(in_file(SENTENCE_CONFIG))?,
        None => None,
    };
    let max_tokens = max_tokens.unwrap_or(u32::MAX).clamp(1, config.max_seq_len);
    Ok(Some(EncoderShape { config, pooling, normalize, max_tokens }))
}

/// The configuration, from the keys of `BertModel`, `RobertaModel` and `ModernBertModel`, as transformers 4 and 5 write
/// them; `None` for other models.
fn config(json: &ConfigJson) -> Result<Option<EncoderConfig>, Error> {
    let architecture = json.get_str("model_type")?.unwrap_or("missing");
    let required = |key: &str| json.get_u32(key)?.ok_or_else(|| missing(key));
    let gelu = |key: &str| match json.get_str(key)?.unwrap_or("gelu") {
        "gelu" => Ok(Gelu::Exact),
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(Gelu::Tanh),
        other => Err(unsupported(key, other, "gelu, gelu_new, gelu_fast, gelu_pytorch_tanh")),
    };
    let (dim, n_heads) = match architecture {
        "bert" | "roberta" | "xlm-roberta" | "modernbert" => {
            (required("hidden_size")?, required("num_attention_heads")?)
        }
        _ => return Ok(None),
    };
    let n_positions = required("max_position_embeddings")?;
    let config = EncoderConfig {
        architecture: architecture.into(),
        dim,
        ffn_dim: required("intermediate_size")?,
        n_layers: required("num_hidden_layers")?,
        n_heads,
        vocab_size: required("vocab_size")?,
        max_seq_len: n_positions,
        positions: Positions::Table { first: 0 },
        n_token_types: json.get_u32("type_vocab_size")?.unwrap_or(0),
        norm_first: false,
        norm_bias: true,
        norm_eps: json.get_f32("layer_norm_eps")?.unwrap_or(1e-12),
        local: None,
        feed_forward: FeedForward::Gelu(Gelu::Exact),
    };
    let config = if architecture == "modernbert" {
        let rope = |kind: &str, plain: &str, default: f32| -> Result<RopeConfig, Error> {
            let theta = match json.get_f32(&format!("rope_parameters.{kind}.rope_theta"))? {
                Some(theta) => Some(theta),
                None => json.get_f32(plain)?,
            };
            Ok(RopeConfig {
                rot_dims: dim.checked_div(n_heads).unwrap_or(0),
                theta: f64::from(theta.unwrap_or(default)),
                style: RopeStyle::Halves,
                scaling: RopeScaling::None,
            })
        };
        let local = LocalLayers {
            // As many tokens to both sides together.
            window: json.get_u32("local_attention")?.unwrap_or(128) / 2 + 1,
            global_every: json.get_u32("global_attn_every_n_layers")?.unwrap_or(3),
        };
        EncoderConfig {
            positions: Positions::Rotary {
                global: rope("full_attention", "global_rope_theta", 160_000.0)?,
                local: rope("sliding_attention", "local_rope_theta", 10_000.0)?,
            },
            norm_first: true,
            norm_bias: json.get_bool("norm_bias")?.unwrap_or(false),
            norm_eps: json.get_f32("norm_eps")?.unwrap_or(1e-5),
            local: Some(local),
            feed_forward: FeedForward::GeGlu(gelu("hidden_activation")?),
            ..config
        }
    } else {
        if let Some(kind @ ("relative_key" | "relative_key_query")) = json.get_str("position_embedding_type")? {
            return Err(unsupported("position_embedding_type", kind, "absolute"));
        }
        // RoBERTa counts positions from behind the padding token's id, which has none.
        let first = match architecture {
            "bert" => 0,
            _ => json.get_u32("pad_token_id")?.unwrap_or(1).saturating_add(1),
        };
        let max_seq_len = n_positions.checked_sub(first).ok_or_else(|| {
            wrong("pad_token_id", &format!("below the {n_positions} positions"), first.saturating_sub(1))
        })?;
        EncoderConfig {
            max_seq_len,
            positions: Positions::Table { first },
            feed_forward: FeedForward::Gelu(gelu("hidden_act")?),
            ..config
        }
    };
    config.check()?;
    Ok(Some(config))
}

/// Whether a list of modules divides vectors by their norm. Modules that would do something else to them are refused.
fn has_normalize(json: &[u8]) -> Result<bool, Error> {
    let modules: Vec<serde_json::Value> =
        serde_json::from_slice(json).map_err(|e| wrong("modules", "a list of modules", e))?;
    let mut normalizes = false;
    for module in &modules {
        // A type's last word says what it does.
        let kind = module["type"].as_str().unwrap_or("missing");
        match kind.rsplit('.').next().unwrap_or(kind) {
            "Normalize" => normalizes = true,
            "Transformer" | "Pooling" => {}
            _ => {
                return Err(Error::Unsupported {
                    format: "modules.json",
                    field: "type".into(),
                    found: format!("`{kind}`"),
                    supported: "Transformer, Pooling, Normalize".into(),
                });
            }
        }
    }
    Ok(normalizes)
}

/// The pooling of sentence-transformers' module.
fn pooling(json: &ConfigJson) -> Result<Pooling, Error> {
    const MODES: [(&str, Option<Pooling>); 6] = [
        ("pooling_mode_cls_token", Some(Pooling::Cls)),
        ("pooling_mode_mean_tokens", Some(Pooling::Mean)),
        ("pooling_mode_lasttoken", Some(Pooling::Last)),
        ("pooling_mode_max_tokens", None),
        ("pooling_mode_mean_sqrt_len_tokens", None),
        ("pooling_mode_weightedmean_tokens", None),
    ];
    let mut found = Vec::new();
    for (mode, pooling) in MODES {
        if json.get_bool(mode)?.unwrap_or(false) {
            found.push((mode, pooling));
        }
    }
    match found.as_slice() {
        [(_, Some(pooling))] => Ok(*pooling),
        [] => Ok(Pooling::Mean),
        other => {
            let modes: Vec<_> = other.iter().map(|(mode, _)| *mode).collect();
            Err(unsupported("pooling_mode", &modes.join(" with "), "one of cls_token, mean_tokens, lasttoken"))
        }
    }
}

/// GGUF's name of the tensor that published checkpoints of the family call `name`; `None` if no pass reads it.
pub(super) fn gguf_name(name: &str) -> Option<String> {
    let name = ["bert.", "roberta.", "model."].iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
    let (stem, suffix) = name.rsplit_once('.')?;
    // TensorFlow's names of a norm's weight and bias are in old checkpoints.
    let suffix = match suffix {
        "weight" | "gamma" => "weight",
        "bias" | "beta" => "bias",
        _ => return None,
    };
    let plain = match stem {
        "embeddings.word_embeddings" | "embeddings.tok_embeddings" => "token_embd",
        "embeddings.position_embeddings" => "position_embd",
        "embeddings.token_type_embeddings" => "token_types",
        "embeddings.LayerNorm" | "embeddings.norm" => "token_embd_norm",
        "final_norm" => "output_norm",
        _ => {
            let layers = ["encoder.layer.", "layers."].iter().find_map(|prefix| stem.strip_prefix(prefix));
            let (layer, part) = layers?.split_once('.')?;
            let part = match part {
                "attention.self.query" => "attn_q",
                "attention.self.key" => "attn_k",
                "attention.self.value" => "attn_v",
                "attention.output.dense" => "attn_output",
                "attention.output.LayerNorm" => "attn_output_norm",
                "intermediate.dense" => "ffn_up",
                "output.dense" => "ffn_down",
                "output.LayerNorm" => "layer_output_norm",
                "attn_norm" => "attn_norm",
                "attn.Wqkv" => "attn_qkv",
                "attn.Wo" => "attn_output",
                "mlp_norm" => "ffn_norm",
                "mlp.Wi" => "ffn_up",
                "mlp.Wo" => "ffn_down",
                _ => return None,
            };
            return Some(format!("blk.{layer}.{part}.{suffix}"));
        }
    };
    Some(format!("{plain}.{suffix}"))
}

/// The shape that a GGUF file of the architecture `bert` gives.
pub(super) fn gguf_shape(metadata: &Metadata, catalog: &Catalog) -> Result<EncoderShape, Error> {
    let required = |key: &str| -> Result<u32, Error> {
        let key = format!("bert.{key}");
        metadata.get_u32(&key)?.ok_or_else(|| missing(&key))
    };
    let rows = |name: &str| catalog.describe(name).and_then(|tensor| u32::try_from(*tensor.shape.first()?).ok());
    let config = EncoderConfig {
        architecture: "bert".into(),
        dim: required("embedding_length")?,
        ffn_dim: required("feed_forward_length")?,
        n_layers: required("block_count")?,
        n_heads: required("attention.head_count")?,
        vocab_size: rows("token_embd.weight").ok_or_else(|| missing("token_embd.weight"))?,
        max_seq_len: rows("position_embd.weight").ok_or_else(|| missing("position_embd.weight"))?,
        positions: Positions::Table { first: 0 },
        n_token_types: rows("token_types.weight").unwrap_or(0),
        norm_eps: metadata
            .get_f32("bert.attention.layer_norm_epsilon")?
            .ok_or_else(|| missing("bert.attention.layer_norm_epsilon"))?,
        norm_first: false,
        norm_bias: true,
        local: None,
        feed_forward: FeedForward::Gelu(Gelu::Exact),
    };
    config.check()?;
    let pooling = match metadata.get_u32("bert.pooling_type")? {
        // `none` leaves it to the caller.
        None | Some(0 | 1) => Pooling::Mean,
        Some(2) => Pooling::Cls,
        Some(3) => Pooling::Last,
        Some(other) => {
            return Err(Error::Unsupported {
                format: "gguf",
                field: "bert.pooling_type".into(),
                found: other.to_string(),
                supported: "1 (mean), 2 (cls), 3 (last)".into(),
            });
        }
    };
    let context = metadata.get_u32("bert.context_length")?.unwrap_or(u32::MAX);
    let max_tokens = context.clamp(1, config.max_seq_len);
    Ok(EncoderShape { config, pooling, normalize: true, max_tokens })
}

/// Whether a pass of a BERT of so many layers reads the tensor.
pub(super) fn reads(name: &str, n_layers: u32) -> bool {
    const PARTS: [&str; 8] =
        ["attn_q", "attn_k", "attn_v", "attn_output", "attn_output_norm", "ffn_up", "ffn_down", "layer_output_norm"];
    let Some((stem, suffix)) = name.rsplit_once('.') else { return false };
    let has_bias = match stem.strip_prefix("blk.") {
        None if stem == "token_embd_norm" => true,
        None if matches!(stem, "token_embd" | "position_embd" | "token_types") => false,
        None => return false,
        Some(rest) => match rest.split_once('.') {
            Some((layer, part)) => {
                if layer.parse().ok().is_none_or(|layer: u32| layer >= n_layers) || !PARTS.contains(&part) {
                    return false;
                }
                true
            }
            None => return false,
        },
    };
    suffix == "weight" || suffix == "bias" && has_bias
}

fn unsupported(field: &str, found: &str, supported: &str) -> Error {
    Error::Unsupported {
        format: "config.json",
        field: field.into(),
        found: format!("`{found}`"),
        supported: supported.into(),
    }
}

fn wrong(field: &str, expected: &str, found: impl ToString) -> Error {
    Error::Config { field: field.into(), expected: expected.into(), found: found.to_string() }
}
