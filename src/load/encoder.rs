//! sentence-transformers' files of a text encoder: pooling, prompts, and cross-encoder heads.

use std::collections::BTreeMap;

use serde_json::Value;

use super::architectures::{self, activation};
use super::huggingface::{
    CONFIG, DENSE, DENSE_WEIGHTS, FolderTexts, MODULES, POOLING, PROMPTS, SENTENCE_CONFIG, missing,
};
use super::llm_reranker::{self, LogitSource};
use super::{EncoderShape, LateInteraction, Scoring, TextTower, late, token_heads};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::text::read_json;
use crate::kernels::{Activation, Gate, Gelu, Pooling};
use crate::model::{DenseConfig, MAX_DIM, ModelConfig, ScoreConfig, WeightSource};

/// The shape of a folder's encoder. `logits`: of a reranker that is a language model.
pub(super) fn shape(
    config: ModelConfig,
    json: &ConfigJson,
    texts: &FolderTexts,
    tensors: &dyn WeightSource,
    logits: Option<&LogitSource>,
) -> Result<EncoderShape, Error> {
    let in_file = |file: &'static str| move |error: Error| error.in_file(file);
    let parse = |file: &'static str, bytes: &Option<Vec<u8>>| match bytes {
        Some(bytes) => ConfigJson::parse(bytes).map(Some).map_err(in_file(file)),
        None => Ok(None),
    };
    let (prompts, default_prompt) = match parse(PROMPTS, &texts.prompts)? {
        Some(json) => prompts(&json).map_err(in_file(PROMPTS))?,
        None => Default::default(),
    };
    let scoring = match logits {
        Some(logits) => {
            let instruction = default_prompt.as_ref().and_then(|name| prompts.get(name)).map(String::as_str);
            let classifier = classifier(json).map_err(in_file(CONFIG))?;
            Some(llm_reranker::folder_scoring(logits, instruction, classifier))
        }
        None => scoring(json, &config.architecture).map_err(in_file(CONFIG))?,
    };
    let modules = match &texts.modules {
        Some(_) if logits.is_some() => Modules::default(),
        Some(bytes) => Modules::read(bytes).map_err(in_file(MODULES))?,
        None => Modules { pools: true, normalize: true, n_dense: 0 },
    };
    let limit = config.max_seq_len;
    let stanford = match late::is_stanford(json, texts).map_err(in_file(CONFIG))? {
        true => Some(late::stanford(texts, tensors, [config.dim, limit])?),
        false => None,
    };
    let (late, linear) = match stanford {
        Some((late, linear)) => (Some(late), Some(linear)),
        None if modules.is_late() => (Some(late::pylate(texts, limit)?), None),
        None => (None, None),
    };
    if let (Some(_), Some(name)) = (&late, &default_prompt) {
        return Err(wrong("default_prompt_name", "none: a query and a document have markers", name).in_file(PROMPTS));
    }
    let tower = TextTower::of(&config, json).map_err(in_file(CONFIG))?;
    let pooling = match parse(POOLING, &texts.pooling)? {
        _ if late.is_some() => None,
        Some(json) => Some(pooling(&json).map_err(in_file(POOLING))?),
        None if scoring.is_some() => None,
        None if tower.is_some() => Some(Pooling::Last),
        // sentence-transformers' default for a plain checkpoint.
        None => Some(Pooling::Mean),
    };
    let mut dense: Vec<DenseConfig> = architectures::projection(&config, json)?.into_iter().chain(linear).collect();
    if tower.is_some() {
        dense.push(TextTower::projection(&config, tensors)?);
    }
    let files = DENSE.into_iter().zip(&texts.dense).enumerate().skip(modules.first_dense()).take(modules.n_dense);
    for (i, (file, bytes)) in files {
        let width = dense.last().map_or(config.dim, |layer| layer.outputs);
        let read = || dense_layer(i, bytes.as_ref().ok_or_else(|| missing("file"))?, width, late.is_some());
        dense.push(read().map_err(in_file(file))?);
    }
    let max_tokens = match parse(SENTENCE_CONFIG, &texts.sentence_config)? {
        Some(json) => json.get_u32("max_seq_length").map_err(in_file(SENTENCE_CONFIG))?,
        None => None,
    };
    let usual = if logits.is_some() { llm_reranker::MAX_TOKENS } else { u32::MAX };
    let max_tokens = match &late {
        Some(LateInteraction { lengths: [query, document], .. }) => *query.max(document),
        None => max_tokens.unwrap_or(usual).clamp(1, config.max_seq_len),
    };
    let normalize = modules.normalize || late.is_some();
    let token_heads = token_heads::shape(tensors, config.dim, texts.unread_head.clone());
    Ok(EncoderShape {
        config,
        pooling,
        normalize,
        dense,
        max_tokens,
        prompts,
        default_prompt,
        scoring,
        late,
        token_heads,
        tower,
        tasks: None,
    })
}

/// GGUF names of dense layers, in order; the first is of models without pooling.
pub(super) const DENSE_NAMES: [&str; 3] = ["dense_1", "dense_2", "dense_3"];

/// The GGUF name of a dense layer's tensor, by its file in the folder.
pub(super) fn dense_tensor(file: &str, name: &str) -> Option<String> {
    let i = DENSE_WEIGHTS.iter().position(|weights| *weights == file)?;
    Some(format!("{}.{}", DENSE_NAMES[i], name.strip_prefix("linear.")?))
}

/// A dense layer from its `config.json`: after pooling, or of each token. `width`: that of its input.
fn dense_layer(i: usize, bytes: &[u8], width: u32, of_tokens: bool) -> Result<DenseConfig, Error> {
    let json = ConfigJson::parse(bytes)?;
    let size = |key: &str| json.get_u32(key)?.ok_or_else(|| missing(key));
    let (inputs, outputs) = (size("in_features")?, size("out_features")?);
    if inputs != width {
        return Err(wrong("in_features", &format!("{width}, the width of its input"), inputs));
    }
    if !(1..=MAX_DIM).contains(&outputs) {
        return Err(wrong("out_features", &format!("1 to {MAX_DIM}"), outputs));
    }
    // sentence-transformers' default is the hyperbolic tangent, PyLate's none.
    let (input, usual) = match of_tokens {
        true => ("token_embeddings", "torch.nn.modules.linear.Identity"),
        false => ("sentence_embedding", "torch.nn.modules.activation.Tanh"),
    };
    let name = json.get_str("activation_function")?.unwrap_or(usual);
    let activation = match name.rsplit('.').next().unwrap_or(name) {
        "Identity" => None,
        "Tanh" => Some(Activation::Tanh),
        "GELU" => Some(Activation::Gelu(Gelu::Exact)),
        _ => return Err(unsupported("activation_function", name, "Identity, Tanh, GELU")),
    };
    for key in ["module_input_name", "module_output_name"] {
        if let Some(found) = json.get_str(key)?.filter(|&found| found != input) {
            return Err(unsupported(key, found, input));
        }
    }
    if json.get_bool("use_residual")? == Some(true) {
        return Err(unsupported("use_residual", "true", "false"));
    }
    let bias = json.get_bool("bias")?.unwrap_or(true);
    Ok(DenseConfig { name: DENSE_NAMES[i], inputs, outputs, bias, activation })
}

/// What sentence-transformers' modules do after the encoder.
#[derive(Default)]
struct Modules {
    /// Whether tokens' vectors are pooled.
    pools: bool,
    /// Whether embeddings are L2-normalised.
    normalize: bool,
    /// Number of dense layers, after pooling if there is any.
    n_dense: usize,
}

impl Modules {
    /// Reads `modules.json`. Refuses other modules, and another order than Transformer, Pooling, Dense, Normalize.
    fn read(json: &[u8]) -> Result<Modules, Error> {
        let listed: Vec<Value> = read_json(json).map_err(|e| wrong("modules", "a list of modules", e.message))?;
        let mut modules = Modules::default();
        let mut last = 0;
        for module in &listed {
            // The last component of a type names its function.
            let kind = module["type"].as_str().unwrap_or("missing");
            let place = match kind.rsplit('.').next().unwrap_or(kind) {
                "Transformer" => 0,
                "Pooling" => {
                    modules.pools = true;
                    1
                }
                "Dense" => {
                    modules.check_dense(module)?;
                    modules.n_dense += 1;
                    2
                }
                "Normalize" => {
                    modules.normalize = true;
                    3
                }
                _ => return Err(unknown_module("type", kind, "Transformer, Pooling, Dense, Normalize")),
            };
            if place < last {
                return Err(unknown_module("type", kind, "Transformer, Pooling, Dense, Normalize in this order"));
            }
            last = place;
        }
        Ok(modules)
    }

    /// Refuses a further dense layer than those that are read.
    fn check_dense(&self, module: &Value) -> Result<(), Error> {
        let path = module["path"].as_str().unwrap_or("missing");
        let file = DENSE.get(self.first_dense() + self.n_dense);
        match file.is_some_and(|file| file.strip_suffix("/config.json") == Some(path)) {
            true => Ok(()),
            false => Err(unknown_module("path", path, "2_Dense, then 3_Dense; 1_Dense before them without pooling")),
        }
    }

    /// Number of the first dense layer's file.
    fn first_dense(&self) -> usize {
        usize::from(self.pools)
    }

    /// Whether each token keeps a vector.
    fn is_late(&self) -> bool {
        !self.pools && self.n_dense > 0
    }
}

fn unknown_module(field: &str, found: &str, supported: &str) -> Error {
    Error::Unsupported {
        format: "modules.json",
        field: field.into(),
        found: format!("`{}`", found.escape_debug()),
        supported: supported.into(),
    }
}

/// The head of BERT and RoBERTa: pooler or dense layer, then classifier.
pub(super) const BERT_HEAD: ScoreConfig =
    ScoreConfig { pooling: Pooling::Cls, dense: Some(Activation::Tanh), norm: false, answers: false };

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
        "bert" | "roberta" | "xlm-roberta" | "mpnet" | "new" => BERT_HEAD,
        "modernbert" => ScoreConfig {
            pooling: match json.get_str("classifier_pooling")?.unwrap_or("cls") {
                "cls" => Pooling::Cls,
                "mean" => Pooling::Mean,
                other => return Err(unsupported("classifier_pooling", other, "cls, mean")),
            },
            dense: Some(Activation::Gelu(gelu(json, "classifier_activation")?)),
            norm: true,
            answers: false,
        },
        _ => return Ok(None),
    };
    let (n_labels, activation_fn) = classifier(json)?;
    Ok(Some(Scoring { head, n_labels, activation_fn, prompt: None }))
}

/// The number of labels of a classifier, and the function applied to its logits, if stated.
fn classifier(json: &ConfigJson) -> Result<(u32, Option<String>), Error> {
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
    Ok((n_labels, activation_fn.map(str::to_owned)))
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
