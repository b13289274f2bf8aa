//! What the files of a text encoder say: Hugging Face folders of BERT, RoBERTa, ModernBERT, Nomic's BERT and Qwen3,
//! with what sentence-transformers adds to them, and GGUF files of the architectures `bert` and `nomic-bert`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::catalog::Catalog;
use super::huggingface::{CONFIG, MODULES, POOLING, PROMPTS, SENTENCE_CONFIG, Texts, missing, rope_scaling};
use super::{EncoderShape, Scoring};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::Metadata;
use crate::kernels::{Activation, Gelu, Pooling, RopeConfig, RopeScaling, RopeStyle};
use crate::model::{EncoderConfig, FeedForward, LocalLayers, NormKind, Positions, ScoreConfig, WeightSource};

/// The shape that a folder's files give, if it is an encoder's. A decoder's folder is one if it has
/// sentence-transformers' modules.
pub(super) fn shape(json: &ConfigJson, texts: &Texts) -> Result<Option<EncoderShape>, Error> {
    let in_file = |file: &'static str| move |error: Error| error.in_file(file);
    let embeds = texts.modules.is_some() || texts.pooling.is_some();
    let Some(config) = config(json, embeds).map_err(in_file(CONFIG))? else { return Ok(None) };
    let scoring = scoring(json, &config.architecture).map_err(in_file(CONFIG))?;
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
    let (prompts, default_prompt) = match parse(PROMPTS, &texts.prompts)? {
        Some(json) => prompts(&json).map_err(in_file(PROMPTS))?,
        None => Default::default(),
    };
    Ok(Some(EncoderShape { config, pooling, normalize, max_tokens, prompts, default_prompt, scoring }))
}

/// The configuration, from the keys of `BertModel`, `RobertaModel`, `ModernBertModel`, `NomicBertModel` and, if it
/// `embeds`, `Qwen3Model`, as transformers 4 and 5 write them; `None` for other models.
fn config(json: &ConfigJson, embeds: bool) -> Result<Option<EncoderConfig>, Error> {
    let config = match json.get_str("model_type")?.unwrap_or("missing") {
        architecture @ ("bert" | "roberta" | "xlm-roberta") => bert(json, architecture)?,
        "modernbert" => modern_bert(json)?,
        "nomic_bert" => nomic_bert(json)?,
        "qwen3" if embeds => qwen3(json)?,
        _ => return Ok(None),
    };
    config.check()?;
    Ok(Some(config))
}

/// The number under the first of these keys that is there.
fn required(json: &ConfigJson, keys: &[&str]) -> Result<u32, Error> {
    for key in keys {
        if let Some(value) = json.get_u32(key)? {
            return Ok(value);
        }
    }
    Err(missing(&keys.join(" or ")))
}

/// The form of the activation `key`.
fn gelu(json: &ConfigJson, key: &str) -> Result<Gelu, Error> {
    match json.get_str(key)?.unwrap_or("gelu") {
        "gelu" => Ok(Gelu::Exact),
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(Gelu::Tanh),
        other => Err(unsupported(key, other, "gelu, gelu_new, gelu_fast, gelu_pytorch_tanh")),
    }
}

/// Refuses a key whose value is another than the one that is known.
fn only(json: &ConfigJson, key: &str, known: Value) -> Result<(), Error> {
    match json.get(key)? {
        Some(value) if *value != known => Err(unsupported(key, &value.to_string(), &known.to_string())),
        _ => Ok(()),
    }
}

/// What the families have in common: BERT's, of heads that share the width.
fn base(json: &ConfigJson, architecture: &str) -> Result<EncoderConfig, Error> {
    let dim = required(json, &["hidden_size", "n_embd"])?;
    let n_heads = required(json, &["num_attention_heads", "n_head"])?;
    Ok(EncoderConfig {
        architecture: architecture.into(),
        dim,
        ffn_dim: required(json, &["intermediate_size", "n_inner"])?,
        n_layers: required(json, &["num_hidden_layers", "n_layer"])?,
        n_heads,
        n_kv_heads: n_heads,
        head_dim: share(dim, n_heads, "num_attention_heads")?,
        vocab_size: required(json, &["vocab_size"])?,
        max_seq_len: required(json, &["max_position_embeddings", "n_positions"])?,
        positions: Positions::Table { first: 0 },
        n_token_types: json.get_u32("type_vocab_size")?.unwrap_or(0),
        norm_first: false,
        norm: NormKind::Layer { bias: true },
        embd_norm: true,
        qk_norm: false,
        causal: false,
        norm_eps: json.get_f32("layer_norm_eps")?.unwrap_or(1e-12),
        local: None,
        feed_forward: FeedForward::Gelu(Gelu::Exact),
    })
}

/// The size of each of `n_heads` heads.
fn share(dim: u32, n_heads: u32, field: &str) -> Result<u32, Error> {
    let is_divisor = n_heads > 0 && dim.is_multiple_of(n_heads);
    if is_divisor { Ok(dim / n_heads) } else { Err(wrong(field, &format!("a divisor of the width {dim}"), n_heads)) }
}

fn rope(rot_dims: u32, theta: f32) -> RopeConfig {
    RopeConfig { rot_dims, theta: f64::from(theta), style: RopeStyle::Halves, scaling: RopeScaling::None }
}

fn bert(json: &ConfigJson, architecture: &str) -> Result<EncoderConfig, Error> {
    let config = base(json, architecture)?;
    if let Some(kind @ ("relative_key" | "relative_key_query")) = json.get_str("position_embedding_type")? {
        return Err(unsupported("position_embedding_type", kind, "absolute"));
    }
    // RoBERTa counts positions from behind the padding token's id, which has none.
    let first = match architecture {
        "bert" => 0,
        _ => json.get_u32("pad_token_id")?.unwrap_or(1).saturating_add(1),
    };
    let n_positions = config.max_seq_len;
    let max_seq_len = n_positions
        .checked_sub(first)
        .ok_or_else(|| wrong("pad_token_id", &format!("below the {n_positions} positions"), first.saturating_sub(1)))?;
    let feed_forward = FeedForward::Gelu(gelu(json, "hidden_act")?);
    Ok(EncoderConfig { max_seq_len, positions: Positions::Table { first }, feed_forward, ..config })
}

fn modern_bert(json: &ConfigJson) -> Result<EncoderConfig, Error> {
    let config = base(json, "modernbert")?;
    let theta = |kind: &str, plain: &str, default: f32| -> Result<f32, Error> {
        let theta = match json.get_f32(&format!("rope_parameters.{kind}.rope_theta"))? {
            Some(theta) => Some(theta),
            None => json.get_f32(plain)?,
        };
        Ok(theta.unwrap_or(default))
    };
    let local = LocalLayers {
        // As many tokens to both sides together.
        window: json.get_u32("local_attention")?.unwrap_or(128) / 2 + 1,
        global_every: json.get_u32("global_attn_every_n_layers")?.unwrap_or(3),
    };
    Ok(EncoderConfig {
        positions: Positions::Rotary {
            global: rope(config.head_dim, theta("full_attention", "global_rope_theta", 160_000.0)?),
            local: Some(rope(config.head_dim, theta("sliding_attention", "local_rope_theta", 10_000.0)?)),
        },
        n_token_types: 0,
        norm_first: true,
        norm: NormKind::Layer { bias: json.get_bool("norm_bias")?.unwrap_or(false) },
        norm_eps: json.get_f32("norm_eps")?.unwrap_or(1e-5),
        local: Some(local),
        feed_forward: FeedForward::GeGlu(gelu(json, "hidden_activation")?),
        ..config
    })
}

/// Nomic's BERT (Nussbaum et al. 2024, arXiv:2402.01613), from the keys of its own code and of transformers 5.
fn nomic_bert(json: &ConfigJson) -> Result<EncoderConfig, Error> {
    let config = base(json, "nomic_bert")?;
    for (key, known) in [
        ("activation_function", "swiglu".into()),
        ("hidden_act", "silu".into()),
        ("prenorm", false.into()),
        ("use_rms_norm", false.into()),
        ("rotary_emb_interleaved", false.into()),
        ("rotary_emb_scale_base", Value::Null),
        ("num_experts", 0.into()),
    ] {
        only(json, key, known)?;
    }
    let theta = match json.get_f32("rope_parameters.rope_theta")? {
        Some(theta) => Some(theta),
        None => json.get_f32("rotary_emb_base")?,
    };
    let fraction = json.get_f32("rotary_emb_fraction")?.unwrap_or(1.0);
    let rot_dims = (config.head_dim as f32 * fraction) as u32;
    if rot_dims == 0 || rot_dims > config.head_dim || !rot_dims.is_multiple_of(2) {
        return Err(wrong("rotary_emb_fraction", "an even part of each head", fraction));
    }
    let norm_eps = match json.get_f32("layer_norm_epsilon")? {
        Some(eps) => eps,
        None => config.norm_eps,
    };
    Ok(EncoderConfig {
        // Longer texts would take other angles, which depend on their length.
        max_seq_len: config.max_seq_len.min(json.get_u32("max_trained_positions")?.unwrap_or(u32::MAX)),
        positions: Positions::Rotary { global: rope(rot_dims, theta.unwrap_or(1000.0)), local: None },
        norm_eps,
        feed_forward: FeedForward::SwiGlu,
        ..config
    })
}

/// A decoder whose last token's vector stands for the text (Zhang et al. 2025, arXiv:2506.05176).
fn qwen3(json: &ConfigJson) -> Result<EncoderConfig, Error> {
    only(json, "hidden_act", "silu".into())?;
    only(json, "use_sliding_window", false.into())?;
    let dim = required(json, &["hidden_size"])?;
    let n_heads = required(json, &["num_attention_heads"])?;
    let head_dim = match json.get_u32("head_dim")? {
        Some(head_dim) => head_dim,
        None => share(dim, n_heads, "num_attention_heads")?,
    };
    let theta = match json.get_f32("rope_parameters.rope_theta")? {
        Some(theta) => Some(theta),
        None => json.get_f32("rope_theta")?,
    };
    let global = RopeConfig { scaling: rope_scaling(json)?, ..rope(head_dim, theta.unwrap_or(10_000.0)) };
    Ok(EncoderConfig {
        architecture: "qwen3".into(),
        dim,
        ffn_dim: required(json, &["intermediate_size"])?,
        n_layers: required(json, &["num_hidden_layers"])?,
        n_heads,
        n_kv_heads: json.get_u32("num_key_value_heads")?.unwrap_or(n_heads),
        head_dim,
        vocab_size: required(json, &["vocab_size"])?,
        max_seq_len: required(json, &["max_position_embeddings"])?,
        positions: Positions::Rotary { global, local: None },
        n_token_types: 0,
        norm_first: true,
        norm: NormKind::Rms,
        embd_norm: false,
        qk_norm: true,
        causal: true,
        norm_eps: json.get_f32("rms_norm_eps")?.ok_or_else(|| missing("rms_norm_eps"))?,
        local: None,
        feed_forward: FeedForward::SwiGlu,
    })
}

/// The head of a cross-encoder, if the model has one that is known.
fn scoring(json: &ConfigJson, architecture: &str) -> Result<Option<Scoring>, Error> {
    let classes = json.get_str_array("architectures")?.unwrap_or_default();
    if !classes.iter().any(|class| class.ends_with("ForSequenceClassification")) {
        return Ok(None);
    }
    let head = match architecture {
        "bert" | "roberta" | "xlm-roberta" => {
            ScoreConfig { pooling: Pooling::Cls, activation: Activation::Tanh, norm: false }
        }
        "modernbert" => ScoreConfig {
            pooling: match json.get_str("classifier_pooling")?.unwrap_or("cls") {
                "cls" => Pooling::Cls,
                "mean" => Pooling::Mean,
                other => return Err(unsupported("classifier_pooling", other, "cls, mean")),
            },
            activation: Activation::Gelu(gelu(json, "classifier_activation")?),
            norm: true,
        },
        _ => return Ok(None),
    };
    let listed = || Ok::<_, Error>(json.get("id2label")?.and_then(|labels| Some(labels.as_object()?.len() as u32)));
    let n_labels = match json.get_u32("num_labels")? {
        Some(n) => n,
        // What transformers takes for a model that says nothing.
        None => listed()?.unwrap_or(2),
    };
    let activation_fn = match json.get_str("sentence_transformers.activation_fn")? {
        Some(name) => Some(name),
        None => json.get_str("sbert_ce_default_activation_function")?,
    };
    Ok(Some(Scoring { head, n_labels, activation_fn: activation_fn.map(str::to_owned) }))
}

/// Prompts by name, and the name of the one that is used by itself.
fn prompts(json: &ConfigJson) -> Result<(BTreeMap<String, String>, Option<String>), Error> {
    let mut prompts = BTreeMap::new();
    if let Some(listed) = json.get("prompts")? {
        for (name, prompt) in listed.as_object().ok_or_else(|| wrong("prompts", "an object", listed))? {
            let text = prompt.as_str().ok_or_else(|| wrong("prompts", "texts by name", prompt))?;
            prompts.insert(name.clone(), text.to_owned());
        }
    }
    let default = json.get_str("default_prompt_name")?;
    match default.filter(|name| !prompts.contains_key(*name)) {
        Some(name) => Err(wrong("default_prompt_name", "a name among the prompts", name)),
        None => Ok((prompts, default.map(str::to_owned))),
    }
}

/// Whether a list of modules divides vectors by their norm. Modules that would do something else to them are refused.
fn has_normalize(json: &[u8]) -> Result<bool, Error> {
    let modules: Vec<Value> = serde_json::from_slice(json).map_err(|e| wrong("modules", "a list of modules", e))?;
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
    if !json.get_bool("include_prompt")?.unwrap_or(true) {
        return Err(unsupported("include_prompt", "false", "true"));
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

/// GGUF's name of the tensor that published checkpoints of the architecture call `name`; `None` if no pass reads it.
pub(super) fn gguf_name(architecture: &str, name: &str) -> Option<String> {
    let prefixes = ["bert.", "roberta.", "model.", "nomic_bert."];
    let name = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
    let (stem, suffix) = name.rsplit_once('.')?;
    // TensorFlow's names of a norm's weight and bias are in old checkpoints.
    let suffix = match suffix {
        "weight" | "gamma" => "weight",
        "bias" | "beta" => "bias",
        _ => return None,
    };
    let plain = match stem {
        "embeddings.word_embeddings" | "embeddings.tok_embeddings" | "embed_tokens" => "token_embd",
        "embeddings.position_embeddings" => "position_embd",
        "embeddings.token_type_embeddings" => "token_types",
        "embeddings.LayerNorm" | "embeddings.norm" | "emb_ln" => "token_embd_norm",
        "final_norm" | "norm" => "output_norm",
        "pooler.dense" | "classifier.dense" | "head.dense" => "cls",
        "head.norm" => "cls.norm",
        "classifier" | "classifier.out_proj" => "cls.output",
        _ => {
            let prefixes = ["encoder.layer.", "encoder.layers.", "layers."];
            let layers = prefixes.iter().find_map(|prefix| stem.strip_prefix(prefix));
            let (layer, part) = layers?.split_once('.')?;
            let part = match part {
                "attention.self.query" | "self_attn.q_proj" => "attn_q",
                "attention.self.key" | "self_attn.k_proj" => "attn_k",
                "attention.self.value" | "self_attn.v_proj" => "attn_v",
                "attn.Wqkv" => "attn_qkv",
                "self_attn.q_norm" => "attn_q_norm",
                "self_attn.k_norm" => "attn_k_norm",
                "attention.output.dense" | "attn.Wo" | "attn.out_proj" | "self_attn.o_proj" => "attn_output",
                "attn_norm" | "input_layernorm" => "attn_norm",
                "mlp_norm" => "ffn_norm",
                // What is in front of Qwen's feed-forward.
                "post_attention_layernorm" if architecture == "qwen3" => "ffn_norm",
                "attention.output.LayerNorm" | "norm1" | "post_attention_layernorm" => "attn_output_norm",
                "output.LayerNorm" | "norm2" | "post_mlp_layernorm" => "layer_output_norm",
                "mlp.fc12" | "mlp.gate_proj" => "ffn_gate",
                "intermediate.dense" | "mlp.Wi" | "mlp.fc11" | "mlp.up_proj" => "ffn_up",
                "output.dense" | "mlp.Wo" | "mlp.fc2" | "mlp.down_proj" => "ffn_down",
                _ => return None,
            };
            return Some(format!("blk.{layer}.{part}.{suffix}"));
        }
    };
    Some(format!("{plain}.{suffix}"))
}

/// The shape that a GGUF file of the architecture `bert` or `nomic-bert` gives.
pub(super) fn gguf_shape(architecture: &str, metadata: &Metadata, catalog: &Catalog) -> Result<EncoderShape, Error> {
    let key = |key: &str| format!("{architecture}.{key}");
    let required = |name: &str| metadata.get_u32(&key(name))?.ok_or_else(|| missing(&key(name)));
    let rows = |name: &str| catalog.describe(name).and_then(|tensor| u32::try_from(*tensor.shape.first()?).ok());
    let (dim, n_heads) = (required("embedding_length")?, required("attention.head_count")?);
    let head_dim = share(dim, n_heads, &key("attention.head_count"))?;
    let eps = key("attention.layer_norm_epsilon");
    let config = EncoderConfig {
        architecture: architecture.into(),
        dim,
        ffn_dim: required("feed_forward_length")?,
        n_layers: required("block_count")?,
        n_heads,
        n_kv_heads: n_heads,
        head_dim,
        vocab_size: rows("token_embd.weight").ok_or_else(|| missing("token_embd.weight"))?,
        max_seq_len: 0,
        positions: Positions::Table { first: 0 },
        n_token_types: rows("token_types.weight").unwrap_or(0),
        norm_eps: metadata.get_f32(&eps)?.ok_or_else(|| missing(&eps))?,
        norm_first: false,
        norm: NormKind::Layer { bias: true },
        embd_norm: true,
        qk_norm: false,
        causal: false,
        local: None,
        feed_forward: FeedForward::Gelu(Gelu::Exact),
    };
    let config = match architecture {
        "nomic-bert" => {
            let theta = metadata.get_f32(&key("rope.freq_base"))?.unwrap_or(1000.0);
            EncoderConfig {
                max_seq_len: required("context_length")?,
                positions: Positions::Rotary { global: rope(head_dim, theta), local: None },
                feed_forward: FeedForward::SwiGlu,
                ..config
            }
        }
        _ => EncoderConfig {
            max_seq_len: rows("position_embd.weight").ok_or_else(|| missing("position_embd.weight"))?,
            ..config
        },
    };
    config.check()?;
    let pooling = match metadata.get_u32(&key("pooling_type"))? {
        // `none` leaves it to the caller.
        None | Some(0 | 1) => Pooling::Mean,
        Some(2) => Pooling::Cls,
        Some(3) => Pooling::Last,
        Some(other) => {
            return Err(Error::Unsupported {
                format: "gguf",
                field: key("pooling_type"),
                found: other.to_string(),
                supported: "1 (mean), 2 (cls), 3 (last)".into(),
            });
        }
    };
    let context = metadata.get_u32(&key("context_length"))?.unwrap_or(u32::MAX);
    let max_tokens = context.clamp(1, config.max_seq_len);
    let (prompts, default_prompt) = Default::default();
    Ok(EncoderShape { config, pooling, normalize: true, max_tokens, prompts, default_prompt, scoring: None })
}

/// Whether a pass of a BERT of so many layers reads the tensor.
pub(super) fn reads(name: &str, n_layers: u32) -> bool {
    const PARTS: [&str; 10] = [
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_qkv",
        "attn_output",
        "attn_output_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
        "layer_output_norm",
    ];
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
