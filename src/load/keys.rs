//! The keys of a model's configuration, whichever format states them.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::catalog::Catalog;
use super::gguf::{self, ConfigData};
use super::huggingface::missing;
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::{Metadata, Value};
use crate::model::WeightSource;

/// A key: its name in GGUF, after the architecture and a dot, and its names in `config.json`, the usual one first and
/// others after `|`. Empty where a format has no such key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key(pub &'static str, pub &'static str);

/// Where keys are read.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// Metadata of a GGUF file, its tensors, and the data of some of them.
    Gguf(&'a Metadata, &'a Catalog, &'a ConfigData),
    /// A `config.json`.
    Json(&'a ConfigJson),
}

/// A model's keys. What was asked for is remembered, so that what was not can be named.
pub(super) struct Keys<'a> {
    source: Source<'a>,
    /// `general.architecture`, or `model_type`.
    pub architecture: &'a str,
    /// Whether the files say that the model makes vectors of texts.
    pub embeds: bool,
    asked: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    pub fn new(source: Source<'a>, architecture: &'a str, embeds: bool) -> Keys<'a> {
        Keys { source, architecture, embeds, asked: RefCell::default() }
    }

    /// Rows of a tensor of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not there.
    pub fn rows(&self, tensor: &str) -> Result<u32, Error> {
        let Source::Gguf(_, catalog, _) = self.source else { return Err(missing(tensor)) };
        let rows = catalog.describe(tensor).and_then(|tensor| u32::try_from(*tensor.shape.first()?).ok());
        rows.ok_or_else(|| missing(tensor))
    }

    /// Whether the model is in GGUF files.
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf(..))
    }

    /// How this format calls a key: a `config.json` by the name that is there, or that has its object there.
    pub fn name(&self, key: Key) -> String {
        let Source::Json(json) = self.source else { return format!("{}.{}", self.architecture, key.0) };
        let is_there = |name: &str| json.get(name).is_ok_and(|value| value.is_some());
        let has_object = |name: &&str| name.rsplit_once('.').is_some_and(|(object, _)| is_there(object));
        let mut names = key.1.split('|');
        let first = names.clone().next();
        let found = names.clone().find(|name| is_there(name)).or_else(|| names.find(has_object)).or(first);
        found.unwrap_or_default().into()
    }

    /// The value under the first of a key's names that is there.
    fn find<T>(
        &self,
        key: Key,
        in_gguf: impl Fn(&'a Metadata, &str) -> Result<Option<T>, Error>,
        in_json: impl Fn(&'a ConfigJson, &str) -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        match self.source {
            Source::Gguf(..) if key.0.is_empty() => Ok(None),
            Source::Gguf(metadata, ..) => {
                let name = self.name(key);
                let found = in_gguf(metadata, &name);
                self.asked.borrow_mut().insert(name);
                found
            }
            Source::Json(json) => {
                let names: Vec<&str> = key.1.split('|').filter(|name| !name.is_empty()).collect();
                self.asked.borrow_mut().extend(names.iter().map(|name| name.to_string()));
                let mut found = names.into_iter().map(|name| in_json(json, name));
                found.find_map(Result::transpose).transpose()
            }
        }
    }

    /// An integer.
    pub fn u32(&self, key: Key) -> Result<Option<u32>, Error> {
        self.find(key, Metadata::get_u32, ConfigJson::get_u32)
    }

    /// An integer that a `config.json` has for one layer alone, under the name that it has for all.
    pub fn of_layer(&self, layer: usize, name: &str) -> Result<Option<u32>, Error> {
        let Source::Json(json) = self.source else { return Ok(None) };
        let path = format!("per_layer_config.{layer}.{name}");
        let found = json.get_u32(&path);
        self.asked.borrow_mut().insert(path);
        found
    }

    /// A number.
    pub fn f32(&self, key: Key) -> Result<Option<f32>, Error> {
        self.find(key, Metadata::get_f32, ConfigJson::get_f32)
    }

    /// A bool.
    pub fn bool(&self, key: Key) -> Result<Option<bool>, Error> {
        self.find(key, Metadata::get_bool, ConfigJson::get_bool)
    }

    /// A text.
    pub fn str(&self, key: Key) -> Result<Option<&'a str>, Error> {
        self.find(key, |metadata, name| metadata.get_str(name), |json, name| json.get_str(name))
    }

    /// Integers.
    pub fn u32s(&self, key: Key) -> Result<Option<Vec<u32>>, Error> {
        self.find(key, Metadata::get_u32_array, ConfigJson::get_u32_array)
    }

    /// An integer for each of `n` layers: one for all, or a list of them in GGUF.
    ///
    /// # Errors
    /// [`Error::Config`] for a list of another length.
    pub fn each_u32(&self, key: Key, n: u32) -> Result<Option<Vec<u32>>, Error> {
        let is_list = |metadata: &'a Metadata, name: &str| {
            Ok(metadata.get(name).filter(|value| value.as_integer().is_none()).map(drop))
        };
        if self.find(key, is_list, |_, _| Ok(None))?.is_none() {
            return Ok(self.u32(key)?.map(|value| vec![value; n as usize]));
        }
        match self.u32s(key)? {
            Some(list) if list.len() != n as usize => {
                Err(self.wrong(key, format!("a number, or {n} of them"), list.len()))
            }
            list => Ok(list),
        }
    }

    /// Bools in GGUF; `None` where the key holds one number.
    pub fn bools(&self, key: Key) -> Result<Option<Vec<bool>>, Error> {
        let in_gguf = |metadata: &'a Metadata, name: &str| match metadata.get(name) {
            Some(value) if value.as_integer().is_some() => Ok(None),
            _ => metadata.get_bool_array(name),
        };
        self.find(key, in_gguf, |_, _| Ok(None))
    }

    /// A value of a `config.json`, whatever it is.
    pub fn json(&self, key: Key) -> Option<&'a serde_json::Value> {
        self.find(key, |_, _| Ok(None), ConfigJson::get).ok().flatten()
    }

    /// Texts.
    pub fn strs(&self, key: Key) -> Result<Option<Vec<&'a str>>, Error> {
        self.find(key, |metadata, name| metadata.get_str_array(name), |json, name| json.get_str_array(name))
    }

    /// An integer that must be there.
    pub fn required(&self, key: Key) -> Result<u32, Error> {
        self.u32(key)?.ok_or_else(|| self.missing(key))
    }

    /// A number that must be there.
    pub fn required_f32(&self, key: Key) -> Result<f32, Error> {
        self.f32(key)?.ok_or_else(|| self.missing(key))
    }

    /// Refuses a key that is not there.
    pub fn missing(&self, key: Key) -> Error {
        self.wrong(key, "a value".into(), "missing")
    }

    /// Refuses a value that no model has.
    pub fn wrong(&self, key: Key, expected: String, found: impl ToString) -> Error {
        Error::Config { field: self.name(key), expected, found: found.to_string() }
    }

    /// Refuses a value that models have, but that is not supported here.
    pub fn unsupported(&self, key: Key, found: impl ToString, supported: &str) -> Error {
        let format = if self.is_gguf() { "gguf" } else { "config.json" };
        Error::Unsupported {
            format,
            field: self.name(key),
            found: format!("`{}`", found.to_string()),
            supported: supported.into(),
        }
    }

    /// Refuses a value other than this one, which a missing key stands for.
    pub fn only_bool(&self, key: Key, known: bool) -> Result<(), Error> {
        match self.bool(key)? {
            Some(found) if found != known => Err(self.unsupported(key, found, &known.to_string())),
            _ => Ok(()),
        }
    }

    /// LoraFactors of frequencies, one for each of `n` pairs: a tensor in GGUF, a key in `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`] if they are not as many, or not finite numbers above 0.
    pub fn factors(&self, tensor: &str, key: Key, n: u32) -> Result<Option<Vec<f32>>, Error> {
        let (field, found) = match self.source {
            Source::Gguf(_, catalog, data) => (tensor.to_owned(), gguf::factors(catalog, data, tensor, n)?),
            Source::Json(_) => (self.name(key), self.find(key, |_, _| Ok(None), ConfigJson::get_f32_array)?),
        };
        let refused = |expected: String, found: String| Err(Error::Config { field, expected, found });
        match &found {
            Some(factors) if factors.len() != n as usize => {
                refused(format!("{n} factors, one for each pair"), factors.len().to_string())
            }
            Some(factors) => match factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
                Some(factor) => refused("finite factors above 0".into(), factor.to_string()),
                None => Ok(found),
            },
            None => Ok(None),
        }
    }

    /// Whether a key is there; it counts as read.
    pub fn says(&self, key: Key) -> bool {
        let found = self.find(
            key,
            |metadata, name| Ok(metadata.get(name).map(drop)),
            |json, name| Ok(json.get(name)?.map(drop)),
        );
        found.is_ok_and(|found| found.is_some())
    }

    /// Refuses keys that say something of the model and that nobody asked for.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the first.
    pub fn check_read(&self) -> Result<(), Error> {
        let asked = self.asked.borrow();
        let unread = match self.source {
            Source::Gguf(metadata, ..) => metadata.iter().find_map(|(name, value)| {
                let key = name.strip_prefix(self.architecture)?.strip_prefix('.')?;
                let is_known = asked.contains(name) || UNREAD_GGUF.contains(&key);
                (!is_known && !is_nothing_in_gguf(value)).then(|| name.to_owned())
            }),
            Source::Json(json) => {
                let is_known = |name: &str| asked.contains(name) || is_unread_json(name);
                json.find(|name, value| !is_known(name) && !is_nothing(value))
            }
        };
        match unread {
            None => Ok(()),
            Some(field) => Err(Error::Unsupported {
                format: if self.is_gguf() { "gguf" } else { "config.json" },
                field,
                found: "a key that is not known for this architecture".into(),
                supported: "the keys of published models".into(),
            }),
        }
    }
}

/// Whether a value leaves a model as it is without the key.
fn is_nothing(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::Null => true,
        serde_json::Value::Bool(value) => !value,
        serde_json::Value::Number(value) => value.as_f64() == Some(0.0),
        serde_json::Value::String(value) => value.is_empty(),
        serde_json::Value::Array(values) => values.is_empty(),
        serde_json::Value::Object(values) => values.is_empty(),
    }
}

/// As [`is_nothing`], in GGUF.
fn is_nothing_in_gguf(value: Value<'_>) -> bool {
    value.as_bool() == Some(false) || value.as_integer() == Some(0) || value.as_float() == Some(0.0)
}

/// Keys of GGUF that say nothing of the forward pass, or what tensors say as well.
const UNREAD_GGUF: [&str; 2] = ["vocab_size", "tensor_data_layout"];

/// Whether a key of `config.json` says nothing of the forward pass, or what tensors say as well: names and versions,
/// tokens, training, biases, and the heads of other uses.
fn is_unread_json(path: &str) -> bool {
    const BEGINS: [&str; 7] = ["_", "init", "summary_", "classifier_", "use_flash", "sentence_transformers", "mtp_"];
    const ENDS: [&str; 9] =
        ["_token_id", "dropout", "dropout_prob", "pdrop", "bias", "loss_coef", "_implementation", "_version", "dtype"];
    const NAMES: [&str; 34] = [
        "architectures",
        "model_type",
        "model_max_length",
        "auto_map",
        "use_cache",
        "return_dict",
        "gradient_checkpointing",
        "im_start_id",
        "im_end_id",
        "tokenizer_class",
        "max_length",
        "output_router_logits",
        "router_jitter_noise",
        "pretraining_tp",
        "task_specific_params",
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "deterministic_flash_attn",
        "reference_compile",
        "repad_logits_with_grad",
        "reorder_and_upcast_attn",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "sbert_ce_default_activation_function",
        "dense_seq_output",
        "fused_bias_fc",
        "fused_dropout_add_ln",
        "use_xentropy",
        "pad_vocab_size_multiple",
        "vocab_size",
        "torchscript",
    ];
    BEGINS.iter().any(|begin| path.starts_with(begin))
        || ENDS.iter().any(|end| path.ends_with(end))
        || NAMES.contains(&path)
}
