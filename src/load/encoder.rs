//! What the files of a text encoder say: Hugging Face folders of BERT, RoBERTa, ModernBERT, Nomic's BERT and Qwen3,
//! with what sentence-transformers adds to them. What makes such a model of its numbers is here for GGUF files, too.

use std::collections::BTreeMap;

use serde_json::Value;

use super::huggingface::{CONFIG, MODULES, POOLING, PROMPTS, SENTENCE_CONFIG, Texts, missing, rope_scaling};
use super::{EncoderShape, Scoring};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::kernels::{Activation, Gelu, Pooling, RopeConfig, RopeScaling, RopeStyle};
use crate::model::{EncoderConfig, FeedForward, LocalLayers, NormKind, Positions, ScoreConfig};

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
        Some(json) => Some(pooling(&json).map_err(in_file(POOLING))?),
        None if scoring.is_some() => None,
        // What sentence-transformers takes for a plain checkpoint.
        None => Some(Pooling::Mean),
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

/// The form of the activation of this name.
fn gelu_named(name: &str) -> Option<Gelu> {
    match name {
        "gelu" => Some(Gelu::Exact),
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Some(Gelu::Tanh),
        _ => None,
    }
}

/// Names of the forms of GELU.
const GELUS: &str = "gelu, gelu_new, gelu_fast, gelu_pytorch_tanh";

/// The form of the activation `key`.
fn gelu(json: &ConfigJson, key: &str) -> Result<Gelu, Error> {
    let name = json.get_str(key)?.unwrap_or("gelu");
    gelu_named(name).ok_or_else(|| unsupported(key, name, GELUS))
}

/// The gated feed-forward with the activation of this name; `None` if none is known. [`GATES`] are.
pub(super) fn gated(activation: &str) -> Option<FeedForward> {
    match activation {
        "silu" => Some(FeedForward::SwiGlu),
        other => gelu_named(other).map(FeedForward::GeGlu),
    }
}

/// Names of activations of gated feed-forwards.
pub(super) const GATES: &str = "silu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh";

/// Refuses a key whose value is another than the one that is known.
fn only(json: &ConfigJson, key: &str, known: Value) -> Result<(), Error> {
    match json.get(key)? {
        Some(value) if *value != known => Err(unsupported(key, &value.to_string(), &known.to_string())),
        _ => Ok(()),
    }
}

/// BERT of these sizes; vocabulary, positions, token types and epsilon are for the caller to fill in. Heads share the
/// width unless `head_dim` says otherwise; the field `heads` is named where they cannot.
pub(super) fn plain(
    architecture: &str,
    [dim, ffn_dim, n_layers, n_heads]: [u32; 4],
    head_dim: Option<u32>,
    heads: &str,
) -> Result<EncoderConfig, Error> {
    let is_divisor = n_heads > 0 && dim.is_multiple_of(n_heads);
    let head_dim = head_dim.or_else(|| is_divisor.then(|| dim / n_heads));
    Ok(EncoderConfig {
        architecture: architecture.into(),
        dim,
        ffn_dim,
        n_layers,
        n_heads,
        n_kv_heads: n_heads,
        head_dim: head_dim.ok_or_else(|| wrong(heads, &format!("a divisor of the width {dim}"), n_heads))?,
        vocab_size: 0,
        max_seq_len: 0,
        positions: Positions::Table { first: 0 },
        n_token_types: 0,
        norm_first: false,
        norm: NormKind::Layer { bias: true },
        embd_norm: true,
        qk_norm: false,
        causal: false,
        norm_eps: 0.0,
        local: None,
        feed_forward: FeedForward::Gelu(Gelu::Exact),
    })
}

/// ModernBERT of these sizes, with the bases of the angles in layers that see all tokens and in those that do not.
pub(super) fn as_modern_bert(config: EncoderConfig, [global, local]: [f32; 2]) -> EncoderConfig {
    EncoderConfig {
        positions: Positions::Rotary {
            global: rope(config.head_dim, global),
            local: Some(rope(config.head_dim, local)),
        },
        n_token_types: 0,
        norm_first: true,
        norm: NormKind::Layer { bias: false },
        feed_forward: FeedForward::GeGlu(Gelu::Exact),
        ..config
    }
}

/// ModernBERT's layers that see as many tokens to both sides together.
pub(super) fn local_layers(n_tokens: u32, global_every: Option<u32>) -> LocalLayers {
    LocalLayers { window: n_tokens / 2 + 1, global_every: global_every.unwrap_or(3) }
}

/// Nomic's BERT of these sizes.
pub(super) fn as_nomic_bert(config: EncoderConfig, rope: RopeConfig) -> EncoderConfig {
    EncoderConfig {
        positions: Positions::Rotary { global: rope, local: None },
        feed_forward: FeedForward::SwiGlu,
        ..config
    }
}

/// Qwen3 of these sizes.
pub(super) fn as_qwen3(config: EncoderConfig, n_kv_heads: Option<u32>, rope: RopeConfig) -> EncoderConfig {
    EncoderConfig {
        n_kv_heads: n_kv_heads.unwrap_or(config.n_heads),
        positions: Positions::Rotary { global: rope, local: None },
        n_token_types: 0,
        norm_first: true,
        norm: NormKind::Rms,
        embd_norm: false,
        qk_norm: true,
        causal: true,
        feed_forward: FeedForward::SwiGlu,
        ..config
    }
}

pub(super) fn rope(rot_dims: u32, theta: f32) -> RopeConfig {
    RopeConfig { rot_dims, theta: f64::from(theta), style: RopeStyle::Halves, scaling: RopeScaling::None }
}

/// What the folders of all families have in common.
fn base(json: &ConfigJson, architecture: &str, head_dim: Option<u32>) -> Result<EncoderConfig, Error> {
    let sizes = [
        required(json, &["hidden_size", "n_embd"])?,
        required(json, &["intermediate_size", "n_inner"])?,
        required(json, &["num_hidden_layers", "n_layer"])?,
        required(json, &["num_attention_heads", "n_head"])?,
    ];
    Ok(EncoderConfig {
        vocab_size: required(json, &["vocab_size"])?,
        max_seq_len: required(json, &["max_position_embeddings", "n_positions"])?,
        n_token_types: json.get_u32("type_vocab_size")?.unwrap_or(0),
        norm_eps: json.get_f32("layer_norm_eps")?.unwrap_or(1e-12),
        ..plain(architecture, sizes, head_dim, "num_attention_heads")?
    })
}

fn bert(json: &ConfigJson, architecture: &str) -> Result<EncoderConfig, Error> {
    let config = base(json, architecture, None)?;
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
    let config = base(json, "modernbert", None)?;
    let theta = |kind: &str, plain: &str, default: f32| -> Result<f32, Error> {
        let theta = match json.get_f32(&format!("rope_parameters.{kind}.rope_theta"))? {
            Some(theta) => Some(theta),
            None => json.get_f32(plain)?,
        };
        Ok(theta.unwrap_or(default))
    };
    let thetas = [
        theta("full_attention", "global_rope_theta", 160_000.0)?,
        theta("sliding_attention", "local_rope_theta", 10_000.0)?,
    ];
    let activation = json.get_str("hidden_activation")?.unwrap_or("gelu");
    Ok(EncoderConfig {
        norm: NormKind::Layer { bias: json.get_bool("norm_bias")?.unwrap_or(false) },
        norm_eps: json.get_f32("norm_eps")?.unwrap_or(1e-5),
        local: Some(local_layers(
            json.get_u32("local_attention")?.unwrap_or(128),
            json.get_u32("global_attn_every_n_layers")?,
        )),
        feed_forward: gated(activation).ok_or_else(|| unsupported("hidden_activation", activation, GATES))?,
        ..as_modern_bert(config, thetas)
    })
}

/// Nomic's BERT (Nussbaum et al. 2024, arXiv:2402.01613), from the keys of its own code and of transformers 5.
fn nomic_bert(json: &ConfigJson) -> Result<EncoderConfig, Error> {
    let config = base(json, "nomic_bert", None)?;
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
        norm_eps,
        ..as_nomic_bert(config, rope(rot_dims, theta.unwrap_or(1000.0)))
    })
}

/// A decoder whose last token's vector stands for the text (Zhang et al. 2025, arXiv:2506.05176).
fn qwen3(json: &ConfigJson) -> Result<EncoderConfig, Error> {
    only(json, "hidden_act", "silu".into())?;
    only(json, "use_sliding_window", false.into())?;
    let config = base(json, "qwen3", json.get_u32("head_dim")?)?;
    let theta = match json.get_f32("rope_parameters.rope_theta")? {
        Some(theta) => Some(theta),
        None => json.get_f32("rope_theta")?,
    };
    let rope = RopeConfig { scaling: rope_scaling(json)?, ..rope(config.head_dim, theta.unwrap_or(10_000.0)) };
    Ok(EncoderConfig {
        norm_eps: json.get_f32("rms_norm_eps")?.ok_or_else(|| missing("rms_norm_eps"))?,
        ..as_qwen3(config, json.get_u32("num_key_value_heads")?, rope)
    })
}

/// The head of BERT and RoBERTa: the pooler or dense layer, and the classifier.
pub(super) const BERT_HEAD: ScoreConfig =
    ScoreConfig { pooling: Pooling::Cls, activation: Activation::Tanh, norm: false };

/// The head of a cross-encoder, if the model has one that is known.
fn scoring(json: &ConfigJson, architecture: &str) -> Result<Option<Scoring>, Error> {
    let classes = json.get_str_array("architectures")?.unwrap_or_default();
    if !classes.iter().any(|class| class.ends_with("ForSequenceClassification")) {
        return Ok(None);
    }
    let head = match architecture {
        "bert" | "roberta" | "xlm-roberta" => BERT_HEAD,
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
