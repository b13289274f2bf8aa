//! `tokenizer.json`, the file of Hugging Face's tokenizers.
//!
//! The file describes a pipeline: normalizer, pre-tokenizer, model, post-processor, decoder. Common pipelines are
//! built from our own parts: byte-level BPE ([`byte_level`]), BPE over characters converted from SentencePiece
//! ([`characters`]), its Unigram ([`unigram`]), and BERT's ([`bert`]). Each supports an exact set of components.
//! Other pipelines run in the `tokenizers` crate ([`foreign`]), which panics on several kinds of broken file
//! (huggingface/tokenizers issues 2094, 2151 and 2198) and runs any regular expression, so everything is checked
//! first.

mod bert;
mod byte_level;
mod characters;
mod check;
mod decoder;
#[cfg(feature = "tokenizer-json")]
pub(super) mod foreign;
mod parts;
mod unigram;

use serde_json::Value;
use unicode_normalization::is_nfc;

use super::vocab::{TokenType, fault, shown};
use super::{PairTemplate, Surroundings, Tokenizer};
use crate::error::Error;
use crate::formats::text::{JsonFault, read_json};

/// The special tokens' names, stored in `tokenizer_config.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// `bos_token`: begins a text.
    pub bos_token: Option<String>,
    /// `eos_token`: ends a text.
    pub eos_token: Option<String>,
    /// Additional end tokens: `eos_token_id` of a `generation_config.json` or `config.json`. Ids outside the
    /// vocabulary are ignored.
    pub end_ids: Vec<u32>,
}

/// The ids from a file's configuration.
struct ConfiguredIds {
    bos_id: Option<u32>,
    eos_id: Option<u32>,
    end_ids: Vec<u32>,
}

impl TokenizerConfig {
    /// Parses a `tokenizer_config.json`; a token is a string, or an object with `content`.
    ///
    /// # Errors
    /// [`Error::Format`] for invalid JSON, [`Error::Tokenizer`] if a token has another form.
    pub fn from_json(bytes: &[u8]) -> Result<Self, Error> {
        let file = parse("tokenizer_config.json", bytes)?;
        let token = |field: &str| match file.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(token)) => Ok(Some(token.clone())),
            Some(other) => match other.get("content").and_then(Value::as_str) {
                Some(content) => Ok(Some(content.to_owned())),
                None => Err(fault(field, "a string or an object with `content`", shown(&other.to_string()))),
            },
        };
        Ok(TokenizerConfig { bos_token: token("bos_token")?, eos_token: token("eos_token")?, end_ids: Vec::new() })
    }

    /// Adds the `eos_token_id` of a `generation_config.json` or `config.json`: a number, or a list of them.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for another type.
    pub(crate) fn add_end_ids(&mut self, eos_token_id: Option<&Value>) -> Result<(), Error> {
        let ids = match eos_token_id {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::Array(ids)) => ids.as_slice(),
            Some(id) => std::slice::from_ref(id),
        };
        for id in ids {
            // -1 means none.
            if id.as_i64() == Some(-1) {
                continue;
            }
            let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let number =
                number.ok_or_else(|| fault("eos_token_id", "an id or a list of ids", shown(&id.to_string())))?;
            self.end_ids.push(number);
        }
        Ok(())
    }
}

/// An entry of the vocabulary or `added_tokens`.
#[derive(Debug, Clone)]
struct TokenEntry {
    text: String,
    kind: TokenType,
}

/// A checked file: the parts common to all pipelines.
struct TokenizerFile {
    json: Value,
    /// By id. Missing ids are empty, unused tokens.
    tokens: Vec<TokenEntry>,
}

pub(super) fn load(bytes: &[u8], config: &TokenizerConfig) -> Result<Tokenizer, Error> {
    let json = parse("tokenizer.json", bytes)?;
    let tokens = check::file(&json)?;
    let file = TokenizerFile { json, tokens };
    let special = |field: &str, name: &Option<String>| match name {
        None => Ok(None),
        Some(name) => match file.tokens.iter().position(|token| token.text == *name) {
            Some(id) => Ok(u32::try_from(id).ok()),
            None => Err(fault(field, "a token of the vocabulary", shown(name))),
        },
    };
    let named = ConfiguredIds {
        bos_id: special("bos_token", &config.bos_token)?,
        eos_id: special("eos_token", &config.eos_token)?,
        end_ids: config.end_ids.iter().copied().filter(|&id| (id as usize) < file.tokens.len()).collect(),
    };
    let loader = match kind(file.model()) {
        "WordPiece" => bert::load,
        // Old files have no `type`; only BPE has merges.
        "BPE" | "" if file.model().get("merges").is_some() && file.is_byte_level() => byte_level::load,
        "BPE" | "" if file.model().get("merges").is_some() => characters::load,
        "Unigram" => unigram::load,
        _ => |file: &TokenizerFile, _: &ConfiguredIds| {
            Err(not_ours("model", kind(file.model()), "BPE, WordPiece, Unigram"))
        },
    };
    match loader(&file, &named) {
        #[cfg(feature = "tokenizer-json")]
        Err(Error::Unsupported { .. }) => foreign::load(file, &named),
        result => result,
    }
}

impl TokenizerFile {
    fn model(&self) -> &Value {
        self.json.get("model").unwrap_or(&Value::Null)
    }

    /// A token's id and type by its text.
    fn find(&self, text: &str) -> Option<(u32, TokenType)> {
        (0..).zip(&self.tokens).find(|(_, token)| token.text == text).map(|(id, token)| (id, token.kind))
    }

    /// Whether tokens are in GPT-2's spelling of bytes.
    fn is_byte_level(&self) -> bool {
        [("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")].iter().any(|(component, list)| {
            steps(self.json.get(component), list).into_iter().any(|step| kind(step) == "ByteLevel")
        })
    }
}

/// # Errors
/// [`Error::Format`] with the byte offset. `serde_json` limits nesting to 128 levels.
fn parse(format: &'static str, bytes: &[u8]) -> Result<Value, Error> {
    read_json(bytes).map_err(|JsonFault { offset, message }| Error::Format {
        format,
        field: "file".into(),
        offset: offset as u64,
        expected: "JSON".into(),
        found: message,
    })
}

fn unsupported(field: impl Into<String>, found: impl Into<String>, supported: impl Into<String>) -> Error {
    let (field, found, supported) = (field.into(), found.into(), supported.into());
    Error::Unsupported { format: "tokenizer.json", field, found, supported }
}

/// The error for a component that our own code does not support.
fn not_ours(field: &str, found: &str, known: &str) -> Error {
    unsupported(field, shown(found), format!("{known}; others with the feature tokenizer-json"))
}

/// The steps of a component: of a `Sequence`, a single one, or none if null.
fn steps<'j>(component: Option<&'j Value>, list: &str) -> Vec<&'j Value> {
    match component {
        None | Some(Value::Null) => Vec::new(),
        Some(step) if kind(step) == "Sequence" => {
            // Sequences may be nested; the JSON limits the depth.
            let inner = step.get(list).and_then(Value::as_array).into_iter().flatten();
            inner.flat_map(|step| steps(Some(step), list)).collect()
        }
        Some(step) => vec![step],
    }
}

/// A component's `type`.
fn kind(component: &Value) -> &str {
    component.get("type").and_then(Value::as_str).unwrap_or("")
}

/// A flag with its default.
fn flag(component: &Value, field: &str, default: bool) -> bool {
    component.get(field).and_then(Value::as_bool).unwrap_or(default)
}

/// Whether BPE marks tokens that continue or end a word.
fn has_affixes(model: &Value) -> bool {
    ["continuing_subword_prefix", "end_of_word_suffix"].iter().any(|field| match model.get(field) {
        None | Some(Value::Null) => false,
        Some(affix) => affix.as_str() != Some(""),
    })
}

/// The special tokens that the post-processor adds around a text and a pair.
fn surroundings(component: Option<&Value>) -> Result<Surroundings, Error> {
    let mut around = None;
    for step in steps(component, "processors") {
        let read = match kind(step) {
            "ByteLevel" => Some(()),
            "TemplateProcessing" | "BertProcessing" | "RobertaProcessing" if around.is_none() => {
                around = if kind(step) == "TemplateProcessing" { template(step) } else { cls_and_sep(step) };
                around.as_ref().map(|_| ())
            }
            _ => None,
        };
        let ours = "ByteLevel and one of TemplateProcessing, BertProcessing, RobertaProcessing";
        read.ok_or_else(|| not_ours("post_processor", kind(step), ours))?;
    }
    Ok(around.unwrap_or_else(|| Surroundings::new(Vec::new(), Vec::new())))
}

/// The special tokens of the older components, which have two of them.
fn cls_and_sep(step: &Value) -> Option<Surroundings> {
    let id = |field: &str| u32::try_from(step.get(field)?.get(1)?.as_u64()?).ok();
    let (cls, sep) = (vec![id("cls")?], vec![id("sep")?]);
    // RoBERTa has two tokens between texts and no token types.
    let (n, second_type) = if kind(step) == "RobertaProcessing" { (2, 0) } else { (1, 1) };
    let pair = PairTemplate { prefix: cls.clone(), middle: sep.repeat(n), suffix: sep.clone(), second_type };
    Some(Surroundings { prefix: cls, suffix: sep, pair: Some(pair) })
}

/// The special tokens of templates that contain each text once.
fn template(step: &Value) -> Option<Surroundings> {
    /// Special tokens before, between and after the texts; and the last text's type.
    fn parts<const N: usize>(step: &Value, field: &str) -> Option<([Vec<u32>; N], u32)> {
        let mut parts = [const { Vec::new() }; N];
        let (mut texts, mut last_type) = (0, 0);
        for item in step.get(field)?.as_array()? {
            if let Some(special) = item.get("SpecialToken") {
                let ids = step.get("special_tokens")?.get(special.get("id")?.as_str()?)?.get("ids")?.as_array()?;
                let ids = ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
                parts[texts].extend(ids.collect::<Option<Vec<u32>>>()?);
            } else {
                let text = item.get("Sequence")?;
                // In order.
                let is_next = text.get("id")?.as_str()? == ["A", "B"][texts.min(1)];
                texts = Some(texts + 1).filter(|&texts| is_next && texts < N)?;
                last_type = u32::try_from(text.get("type_id").and_then(Value::as_u64).unwrap_or(0)).ok()?;
            }
        }
        (texts + 1 == N).then_some((parts, last_type))
    }
    let ([prefix, suffix], _) = parts(step, "single")?;
    // A template that swaps the texts is unusable for pairs, but fine for single texts.
    let pair = parts(step, "pair");
    let pair = pair.map(|([prefix, middle, suffix], second_type)| PairTemplate { prefix, middle, suffix, second_type });
    Some(Surroundings { prefix, suffix, pair })
}

fn added_tokens(json: &Value) -> impl Iterator<Item = &Value> {
    json.get("added_tokens").and_then(Value::as_array).into_iter().flatten()
}

/// Refuses added tokens unless they match literally and keep surrounding spaces.
fn check_literal(json: &Value, nfc: bool) -> Result<(), Error> {
    let literal = |token: &&Value| {
        let strict = !["lstrip", "rstrip", "single_word"].iter().any(|field| flag(token, field, false));
        let stays = !nfc || token.get("content").and_then(Value::as_str).is_some_and(is_nfc);
        strict && stays
    };
    match added_tokens(json).find(|token| !literal(token)) {
        Some(token) => Err(not_ours("added_tokens", &token.to_string(), "literal tokens with this pipeline")),
        None => Ok(()),
    }
}
