//! Configuration keys of either format.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::gguf::{self, ConfigData};
use super::huggingface::missing;
use super::tensor_index::TensorIndex;
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::{Metadata, Value};
use crate::model::WeightSource;

/// A key: its GGUF name without the architecture prefix, and its `config.json` names, the usual one first, separated
/// by `|`. Empty if a format has no such key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key(pub &'static str, pub &'static str);

/// The source of the keys.
#[derive(Clone, Copy)]
pub(super) enum KeySource<'a> {
    /// A GGUF file's metadata, tensors, and configuration tensors' data.
    Gguf(&'a Metadata, &'a TensorIndex, &'a ConfigData),
    /// A `config.json`.
    Json(&'a ConfigJson),
}

/// A model's keys. Tracks the keys that are read to report unknown ones.
pub(super) struct Keys<'a> {
    source: KeySource<'a>,
    /// `general.architecture`, or `model_type`.
    pub architecture: &'a str,
    /// Whether the files mark the model as an embedding model.
    pub embeds: bool,
    asked: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    pub fn new(source: KeySource<'a>, architecture: &'a str, embeds: bool) -> Keys<'a> {
        Keys { source, architecture, embeds, asked: RefCell::default() }
    }

    /// Rows of a tensor in a GGUF file.
    ///
    /// # Errors
    /// [`Error::Config`] if it is missing.
    pub fn rows(&self, tensor: &str) -> Result<u32, Error> {
        let KeySource::Gguf(_, tensor_index, _) = self.source else { return Err(missing(tensor)) };
        let rows = tensor_index.describe(tensor).and_then(|tensor| u32::try_from(*tensor.shape.first()?).ok());
        rows.ok_or_else(|| missing(tensor))
    }

    /// Whether a GGUF file has this tensor.
    pub fn has(&self, tensor: &str) -> bool {
        matches!(self.source, KeySource::Gguf(_, tensor_index, _) if tensor_index.describe(tensor).is_some())
    }

    /// Whether the model is in GGUF files.
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, KeySource::Gguf(..))
    }

    /// The key's name in this format: in a `config.json` the first present one, else the first with a parent object.
    pub fn name(&self, key: Key) -> String {
        let KeySource::Json(json) = self.source else { return format!("{}.{}", self.architecture, key.0) };
        let is_there = |name: &str| json.get(name).is_ok_and(|value| value.is_some());
        let has_object = |name: &&str| name.rsplit_once('.').is_some_and(|(object, _)| is_there(object));
        let mut names = key.1.split('|');
        let first = names.clone().next();
        let found = names.clone().find(|name| is_there(name)).or_else(|| names.find(has_object)).or(first);
        found.unwrap_or_default().into()
    }

    /// The value of the first of a key's names that is present.
    fn find<T>(
        &self,
        key: Key,
        in_gguf: impl Fn(&'a Metadata, &str) -> Result<Option<T>, Error>,
        in_json: impl Fn(&'a ConfigJson, &str) -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        match self.source {
            KeySource::Gguf(..) if key.0.is_empty() => Ok(None),
            KeySource::Gguf(metadata, ..) => {
                let name = self.name(key);
                let found = in_gguf(metadata, &name);
                self.asked.borrow_mut().insert(name);
                found
            }
            KeySource::Json(json) => {
                let names: Vec<&str> = key.1.split('|').filter(|name| !name.is_empty()).collect();
                self.asked.borrow_mut().extend(names.iter().map(|name| name.to_string()));
                let mut found = names.into_iter().map(|name| in_json(json, name));
                found.find_map(Result::transpose).transpose()
            }
        }
    }

    pub fn u32(&self, key: Key) -> Result<Option<u32>, Error> {
        self.find(key, Metadata::get_u32, ConfigJson::get_u32)
    }

    /// A per-layer integer in a `config.json`, under the same name as the global one.
    pub fn of_layer(&self, layer: usize, name: &str) -> Result<Option<u32>, Error> {
        let KeySource::Json(json) = self.source else { return Ok(None) };
        let path = format!("per_layer_config.{layer}.{name}");
        let found = json.get_u32(&path);
        self.asked.borrow_mut().insert(path);
        found
    }

    pub fn f32(&self, key: Key) -> Result<Option<f32>, Error> {
        self.find(key, Metadata::get_f32, ConfigJson::get_f32)
    }

    pub fn bool(&self, key: Key) -> Result<Option<bool>, Error> {
        self.find(key, Metadata::get_bool, ConfigJson::get_bool)
    }

    pub fn str(&self, key: Key) -> Result<Option<&'a str>, Error> {
        self.find(key, |metadata, name| metadata.get_str(name), |json, name| json.get_str(name))
    }

    pub fn u32s(&self, key: Key) -> Result<Option<Vec<u32>>, Error> {
        self.find(key, Metadata::get_u32_array, ConfigJson::get_u32_array)
    }

    /// An integer for each of `n` layers: one for all, or a list in GGUF.
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
                Err(self.wrong(key, format!("a number or a list of {n}"), list.len()))
            }
            list => Ok(list),
        }
    }

    /// Bools in GGUF; `None` if the key is an integer.
    pub fn bools(&self, key: Key) -> Result<Option<Vec<bool>>, Error> {
        let in_gguf = |metadata: &'a Metadata, name: &str| match metadata.get(name) {
            Some(value) if value.as_integer().is_some() => Ok(None),
            _ => metadata.get_bool_array(name),
        };
        self.find(key, in_gguf, |_, _| Ok(None))
    }

    /// Whether a list of floats has one other than 0. A `config.json` may have nulls instead of zeros.
    pub fn has_nonzero(&self, key: Key) -> Result<bool, Error> {
        let is_zero = |value: &serde_json::Value| value.is_null() || value.as_f64() == Some(0.0);
        let found = self.find(
            key,
            |metadata, name| Ok(metadata.get_f32_array(name)?.map(|list| list.iter().any(|&value| value != 0.0))),
            |json, name| {
                let any = |value: &serde_json::Value| value.as_array().map(|list| !list.iter().all(is_zero));
                Ok(json.get(name)?.map(|value| any(value).unwrap_or(!is_zero(value))))
            },
        );
        Ok(found?.unwrap_or(false))
    }

    /// A `config.json` value of any type.
    pub fn json(&self, key: Key) -> Option<&'a serde_json::Value> {
        self.find(key, |_, _| Ok(None), ConfigJson::get).ok().flatten()
    }

    pub fn strs(&self, key: Key) -> Result<Option<Vec<&'a str>>, Error> {
        self.find(key, |metadata, name| metadata.get_str_array(name), |json, name| json.get_str_array(name))
    }

    /// A required integer.
    pub fn required(&self, key: Key) -> Result<u32, Error> {
        self.u32(key)?.ok_or_else(|| self.missing(key))
    }

    /// A required number.
    pub fn required_f32(&self, key: Key) -> Result<f32, Error> {
        self.f32(key)?.ok_or_else(|| self.missing(key))
    }

    /// The error for a missing key.
    pub fn missing(&self, key: Key) -> Error {
        self.wrong(key, "a value".into(), "missing")
    }

    /// The error for an invalid value.
    pub fn wrong(&self, key: Key, expected: String, found: impl ToString) -> Error {
        Error::Config { field: self.name(key), expected, found: found.to_string() }
    }

    /// The error for a valid but unsupported value.
    pub fn unsupported(&self, key: Key, found: impl ToString, supported: &str) -> Error {
        self.unsupported_model(key, &format!("`{}`", found.to_string()), supported)
    }

    /// The error for a key that shows an unsupported model. `found`: what the key is, in words.
    pub fn unsupported_model(&self, key: Key, found: &str, supported: &str) -> Error {
        let format = if self.is_gguf() { "gguf" } else { "config.json" };
        Error::Unsupported { format, field: self.name(key), found: found.into(), supported: supported.into() }
    }

    /// Refuses any value except `known`, the default of a missing key.
    pub fn only_bool(&self, key: Key, known: bool) -> Result<(), Error> {
        self.only(key, self.bool(key)?, known)
    }

    /// Refuses any number except `known`, the default of a missing key.
    pub fn only_u32(&self, key: Key, known: u32) -> Result<(), Error> {
        self.only(key, self.u32(key)?, known)
    }

    fn only<T: PartialEq + ToString>(&self, key: Key, found: Option<T>, known: T) -> Result<(), Error> {
        match found.filter(|found| *found != known) {
            Some(found) => Err(self.unsupported(key, found, &known.to_string())),
            None => Ok(()),
        }
    }

    /// Frequency factors, one for each of `n` pairs: a tensor in GGUF, a key in `config.json`.
    ///
    /// # Errors
    /// [`Error::Config`] for another number of factors, or factors that are not finite and above 0.
    pub fn factors(&self, tensor: &str, key: Key, n: u32) -> Result<Option<Vec<f32>>, Error> {
        let (field, found) = match self.source {
            KeySource::Gguf(_, tensor_index, data) => {
                (tensor.to_owned(), gguf::factors(tensor_index, data, tensor, n)?)
            }
            KeySource::Json(_) => (self.name(key), self.find(key, |_, _| Ok(None), ConfigJson::get_f32_array)?),
        };
        let refused = |expected: String, found: String| Err(Error::Config { field, expected, found });
        match &found {
            Some(factors) if factors.len() != n as usize => {
                refused(format!("{n} factors, one per pair"), factors.len().to_string())
            }
            Some(factors) => match factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
                Some(factor) => refused("finite factors above 0".into(), factor.to_string()),
                None => Ok(found),
            },
            None => Ok(None),
        }
    }

    /// Whether a key is present; marks it as read.
    pub fn says(&self, key: Key) -> bool {
        let found = self.find(
            key,
            |metadata, name| Ok(metadata.get(name).map(drop)),
            |json, name| Ok(json.get(name)?.map(drop)),
        );
        found.is_ok_and(|found| found.is_some())
    }

    /// Refuses keys that affect the model but were not read.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the first.
    pub fn check_read(&self) -> Result<(), Error> {
        let asked = self.asked.borrow();
        let unread = match self.source {
            KeySource::Gguf(metadata, ..) => metadata.iter().find_map(|(name, value)| {
                let key = name.strip_prefix(self.architecture)?.strip_prefix('.')?;
                let is_known = asked.contains(name) || UNREAD_GGUF.contains(&key);
                (!is_known && !is_nothing_in_gguf(value)).then(|| name.to_owned())
            }),
            KeySource::Json(json) => {
                let is_known = |name: &str| asked.contains(name) || is_unread_json(name);
                json.find(|name, value| !is_known(name) && !is_nothing(value))
            }
        };
        match unread {
            None => Ok(()),
            Some(field) => Err(Error::Unsupported {
                format: if self.is_gguf() { "gguf" } else { "config.json" },
                field,
                found: "unknown for this architecture".into(),
                supported: "the keys of published models".into(),
            }),
        }
    }
}

/// Whether a value is equivalent to a missing key.
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

/// As [`is_nothing`], for GGUF.
fn is_nothing_in_gguf(value: Value<'_>) -> bool {
    value.as_bool() == Some(false) || value.as_integer() == Some(0) || value.as_float() == Some(0.0)
}

/// GGUF keys that do not affect the forward pass, or duplicate the tensors' shapes.
const UNREAD_GGUF: [&str; 2] = ["vocab_size", "tensor_data_layout"];

/// Whether a `config.json` key does not affect the forward pass or duplicates the tensors: names and versions,
/// tokens, training, biases, and heads for other tasks.
fn is_unread_json(path: &str) -> bool {
    const BEGINS: [&str; 7] = ["_", "init", "summary_", "classifier_", "use_flash", "sentence_transformers", "mtp_"];
    const ENDS: [&str; 9] =
        ["_token_id", "dropout", "dropout_prob", "pdrop", "bias", "loss_coef", "_implementation", "_version", "dtype"];
    const NAMES: [&str; 36] = [
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
        "task_names",
        "matryoshka_dimensions",
    ];
    BEGINS.iter().any(|begin| path.starts_with(begin))
        || ENDS.iter().any(|end| path.ends_with(end))
        || NAMES.contains(&path)
}
