//! Files of late-interaction models (ColBERT: Khattab & Zaharia 2020, arXiv:2004.12832).
//!
//! Stanford's folders say `HF_ColBERT` among `architectures`, with a projection `linear.weight` and the settings in
//! `artifact.metadata`. PyLate's have sentence-transformers' `modules.json` with dense layers and no pooling, and the
//! settings in `config_sentence_transformers.json`.

use super::huggingface::{CONFIG, FolderTexts, METADATA, PROMPTS, missing};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::model::{DenseConfig, WeightSource};

/// How a late-interaction model reads texts. Each token becomes a vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LateInteraction {
    /// Tokens put behind the first token of a query and of a document, by name; empty for none: `query_prefix`,
    /// `document_prefix`; `query_token_id`, `doc_token_id`.
    pub markers: [String; 2],
    /// Tokens that queries and documents are cut to: `query_length`, `document_length`; `query_maxlen`, `doc_maxlen`.
    pub lengths: [u32; 2],
    /// Whether a shorter query is filled up with mask tokens: `do_query_expansion`.
    pub expands: bool,
    /// Whether other tokens see these: `attend_to_expansion_tokens`; `attend_to_mask_tokens`.
    pub sees_masks: bool,
    /// Words whose tokens are left out of documents: `skiplist_words`; punctuation if `mask_punctuation`.
    pub skipped: Vec<String>,
    /// Whether the first token, which stands for the whole text, has no vector.
    pub skips_first: bool,
}

impl LateInteraction {
    /// Whole texts of up to this many tokens, as BGE-M3 reads them.
    pub(crate) fn plain(length: u32) -> LateInteraction {
        let (markers, skipped) = Default::default();
        let lengths = [length; 2];
        LateInteraction { markers, lengths, expands: false, sees_masks: false, skipped, skips_first: true }
    }

    /// The first dense layer's name.
    const LINEAR: &'static str = "dense_1";

    /// Settings under these keys, where PyLate's and Stanford's defaults agree but for the markers.
    fn read(json: Option<&ConfigJson>, keys: &SettingKeys, limit: u32) -> Result<LateInteraction, Error> {
        let text = |i: usize| match json {
            Some(json) => json.get_str(keys.markers[i]),
            None => Ok(None),
        };
        let length = |i: usize, usual: u32| {
            let stated = json.map_or(Ok(None), |json| json.get_u32(keys.lengths[i]))?;
            // A query of the marker and three tokens.
            match stated {
                Some(stated) if stated < 4 => Err(Error::Config {
                    field: keys.lengths[i].into(),
                    expected: "4 or more".into(),
                    found: stated.to_string(),
                }),
                stated => Ok(stated.unwrap_or(usual).min(limit)),
            }
        };
        let flag =
            |key: &str, usual: bool| Ok::<_, Error>(json.map_or(Ok(None), |json| json.get_bool(key))?.unwrap_or(usual));
        let marker = |i: usize| Ok::<_, Error>(text(i)?.unwrap_or(keys.usual_markers[i]).to_owned());
        let expands = flag("do_query_expansion", true)?;
        Ok(LateInteraction {
            markers: [marker(0)?, marker(1)?],
            lengths: [length(0, 32)?, length(1, 180)?],
            expands,
            sees_masks: expands && flag(keys.sees_masks, false)?,
            skipped: ('!'..='~').filter(char::is_ascii_punctuation).map(String::from).collect(),
            skips_first: false,
        })
    }
}

/// Names of settings.
struct SettingKeys {
    markers: [&'static str; 2],
    usual_markers: [&'static str; 2],
    lengths: [&'static str; 2],
    sees_masks: &'static str,
}

const STANFORD: SettingKeys = SettingKeys {
    markers: ["query_token_id", "doc_token_id"],
    usual_markers: ["[unused0]", "[unused1]"],
    lengths: ["query_maxlen", "doc_maxlen"],
    sees_masks: "attend_to_mask_tokens",
};

const PYLATE: SettingKeys = SettingKeys {
    markers: ["query_prefix", "document_prefix"],
    usual_markers: ["[Q] ", "[D] "],
    lengths: ["query_length", "document_length"],
    sees_masks: "attend_to_expansion_tokens",
};

/// Whether a folder is of a model in Stanford's format.
///
/// # Errors
/// Those of [`ConfigJson::get_str_array`].
pub(super) fn is_stanford(json: &ConfigJson, texts: &FolderTexts) -> Result<bool, Error> {
    Ok(texts.modules.is_none() && json.get_str_array("architectures")?.unwrap_or_default().contains(&"HF_ColBERT"))
}

/// The name of the projection in Stanford's format.
pub(super) fn tensor_name(is_stanford: bool, name: &str) -> Option<String> {
    (is_stanford && name == "linear.weight").then(|| format!("{}.weight", LateInteraction::LINEAR))
}

/// A model in Stanford's format: how it reads texts, and its projection. `width`: the encoder's.
///
/// # Errors
/// [`Error::Config`] or [`Error::Unsupported`] naming the file and the key.
pub(super) fn stanford(
    texts: &FolderTexts,
    tensors: &dyn WeightSource,
    [width, limit]: [u32; 2],
) -> Result<(LateInteraction, DenseConfig), Error> {
    let read = || {
        let json = texts.metadata.as_ref().map(|bytes| ConfigJson::parse(bytes)).transpose()?;
        let mut late = LateInteraction::read(json.as_ref(), &STANFORD, limit)?;
        if let Some(json) = &json {
            if let Some(found) = json.get_str("similarity")?.filter(|&found| found != "cosine") {
                return Err(unsupported("similarity", found, "cosine"));
            }
            if json.get_bool("mask_punctuation")? == Some(false) {
                late.skipped.clear();
            }
        }
        Ok(late)
    };
    let late = read().map_err(|error: Error| error.in_file(METADATA))?;
    let name = LateInteraction::LINEAR;
    let linear = tensors.describe(&format!("{name}.weight")).ok_or_else(|| missing("linear.weight").in_file(CONFIG))?;
    let outputs = linear.shape.first().and_then(|&rows| u32::try_from(rows).ok()).unwrap_or(0);
    Ok((late, DenseConfig { name, inputs: width, outputs, bias: false, activation: None }))
}

/// How a model in PyLate's format reads texts.
///
/// # Errors
/// [`Error::Config`] or [`Error::Unsupported`] naming the key.
pub(super) fn pylate(texts: &FolderTexts, limit: u32) -> Result<LateInteraction, Error> {
    let read = || {
        let json = texts.prompts.as_ref().map(|bytes| ConfigJson::parse(bytes)).transpose()?;
        let mut late = LateInteraction::read(json.as_ref(), &PYLATE, limit)?;
        if let Some(words) = json.as_ref().map_or(Ok(None), |json| json.get_str_array("skiplist_words"))? {
            late.skipped = words.into_iter().map(str::to_owned).collect();
        }
        Ok(late)
    };
    read().map_err(|error: Error| error.in_file(PROMPTS))
}

fn unsupported(field: &str, found: &str, supported: &str) -> Error {
    Error::Unsupported {
        format: "config.json",
        field: field.into(),
        found: format!("`{}`", found.escape_debug()),
        supported: supported.into(),
    }
}
