//! sentence-transformers' files of a text encoder: pooling, prompts, and cross-encoder heads.

use std::collections::BTreeMap;

use serde_json::Value;

use super::architectures::activation;
use super::huggingface::{CONFIG, FolderTexts, MODULES, POOLING, PROMPTS, SENTENCE_CONFIG};
use super::{EncoderShape, Scoring};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::text::read_json;
use crate::kernels::{Activation, Gate, Gelu, Pooling};
use crate::model::{ModelConfig, ScoreConfig};

pub(super) fn shape(config: ModelConfig, json: &ConfigJson, texts: &FolderTexts) -> Result<EncoderShape, Error> {
    let in_file = |file: &'static str| move |error: Error| error.in_file(file);
    let scoring = scoring(json, &config.architecture).map_err(in_file(CONFIG))?;
    let parse = |file: &'static str, bytes: &Option<Vec<u8>>| match bytes {
        Some(bytes) => ConfigJson::parse(bytes).map(Some).map_err(in_file(file)),
        None => Ok(None),
    };
    let pooling = match parse(POOLING, &texts.pooling)? {
        Some(json) => Some(pooling(&json).map_err(in_file(POOLING))?),
        None if scoring.is_some() => None,
        // sentence-transformers' default for a plain checkpoint.
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
    Ok(EncoderShape { config, pooling, normalize, max_tokens, prompts, default_prompt, scoring })
}

/// The head of BERT and RoBERTa: pooler or dense layer, then classifier.
pub(super) const BERT_HEAD: ScoreConfig =
    ScoreConfig { pooling: Pooling::Cls, activation: Activation::Tanh, norm: false };

/// The GELU variant under `key`.
fn gelu(json: &ConfigJson, key: &str) -> Result<Gelu, Error> {
    let name = json.get_str(key)?.unwrap_or("gelu");
    match activation(name) {
        Some(Gate::Gelu(form)) => Ok(form),
        _ => Err(unsupported(key, name, "gelu, gelu_new, gelu_fast, gelu_pytorch_tanh")),
    }
}

/// The head of a cross-encoder, if it is a supported one.
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
        // transformers' default.
        None => listed()?.unwrap_or(2),
    };
    let activation_fn = match json.get_str("sentence_transformers.activation_fn")? {
        Some(name) => Some(name),
        None => json.get_str("sbert_ce_default_activation_function")?,
    };
    Ok(Some(Scoring { head, n_labels, activation_fn: activation_fn.map(str::to_owned) }))
}

/// Prompts by name, and the default prompt's name.
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
        Some(name) => Err(wrong("default_prompt_name", "a name in `prompts`", name)),
        None => Ok((prompts, default.map(str::to_owned))),
    }
}

/// Whether the modules L2-normalise embeddings. Refuses unsupported modules.
fn has_normalize(json: &[u8]) -> Result<bool, Error> {
    let modules: Vec<Value> = read_json(json).map_err(|e| wrong("modules", "a list of modules", e.message))?;
    let mut normalizes = false;
    for module in &modules {
        // The last component of a type names its function.
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

/// The mode of sentence-transformers' pooling module.
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
