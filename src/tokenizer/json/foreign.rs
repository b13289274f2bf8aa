//! Pipelines that run in the `tokenizers` crate.
//!
//! Only for encoding: decoding needs pieces that are independent of the tokens after them ([`DecoderSteps`]).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use serde_json::Value;
use tokenizers::Tokenizer as Pipeline;

use super::decoder::DecoderSteps;
use super::{ConfiguredIds, TokenizerFile};
use crate::error::Error;
use crate::tokenizer::decode::TokenPieces;
use crate::tokenizer::vocab::{TokenType, fault, shown};
use crate::tokenizer::{EncodeOptions, Encoder, PairTemplate, Tokenizer, roles};

/// The regex engine silently gives up after a million backtracking steps and then splits elsewhere; a lookahead after
/// a run of n characters costs about n steps.
const MAX_REGEX_TEXT_BYTES: usize = 1 << 18;

#[derive(Debug)]
pub(crate) struct ForeignEncoder {
    /// Treats names of special tokens as text.
    plain: Pipeline,
    /// Parses special tokens. A lazy copy, because this is a setting of the pipeline.
    parsing: OnceLock<Box<Pipeline>>,
    max_text_bytes: usize,
}

pub(super) fn load(file: TokenizerFile, named: &ConfiguredIds) -> Result<Tokenizer, Error> {
    let TokenizerFile { mut json, tokens } = file;
    let decoder = DecoderSteps::new(json.get("decoder"))?;
    let backtracks = uses_lookaround(json.get("normalizer")) || uses_lookaround(json.get("pre_tokenizer"));
    if let Some(fields) = json.as_object_mut() {
        // The caller handles length; this also removes values on which the crate would panic.
        fields.insert("truncation".into(), Value::Null);
        fields.insert("padding".into(), Value::Null);
        if let Some(Value::Object(model)) = fields.get_mut("model") {
            // Random merge dropout is for training.
            model.remove("dropout");
        }
    }
    let bytes = json.to_string().into_bytes();
    drop(json);
    let mut plain: Pipeline = guarded("tokenizer.json", || Pipeline::from_bytes(&bytes))?;
    plain.set_encode_special_tokens(true);

    let mut pieces = Vec::with_capacity(tokens.len());
    for (id, token) in (0u32..).zip(&tokens) {
        // The crate may return an added token's normalised text, which decoding then shows.
        let text = plain.id_to_token(id);
        if text.is_none() != token.text.is_empty() {
            return Err(fault(format!("token id {id}"), shown(&token.text), shown(&text.unwrap_or_default())));
        }
        pieces.push((decoder.piece(id, &text.unwrap_or_default()), token.kind));
    }

    let find =
        |text: &str| (0u32..).zip(&tokens).find(|(_, token)| token.text == text).map(|(id, token)| (id, token.kind));
    let special = |kind: TokenType| kind.is_special() || kind == TokenType::UserDefined;
    let with_names = (0u32..).zip(&tokens).filter(|(_, token)| special(token.kind));
    let foreign = ForeignEncoder {
        plain,
        parsing: OnceLock::new(),
        max_text_bytes: if backtracks { MAX_REGEX_TEXT_BYTES } else { u32::MAX as usize },
    };
    Ok(Tokenizer {
        special_ids: with_names.map(|(id, token)| (token.text.as_str().into(), id)).collect(),
        eos_ids: roles::ends(named.eos_id.into_iter().chain(named.end_ids.iter().copied()), find),
        message_end_id: roles::message_end(find),
        notices: Vec::new(),
        bos_id: named.bos_id,
        pieces: Arc::new(TokenPieces::new(pieces.into_iter(), decoder.strip)),
        encoder: Encoder::Foreign(Box::new(foreign)),
    })
}

impl ForeignEncoder {
    pub fn encode(&self, text: &str, options: EncodeOptions, pieces: &TokenPieces) -> Result<Vec<u32>, Error> {
        if text.len() > self.max_text_bytes {
            let expected = format!("at most {} bytes with this tokenizer", self.max_text_bytes);
            return Err(fault("text", expected, format!("{} bytes", text.len())));
        }
        let pipeline = if options.parse_special {
            self.parsing.get_or_init(|| {
                let mut parsing = self.plain.clone();
                parsing.set_encode_special_tokens(false);
                Box::new(parsing)
            })
        } else {
            &self.plain
        };
        let encoding = guarded("text", || pipeline.encode_fast(text, options.add_special))?;
        if !options.parse_special {
            // Some pipelines look up whole words and may find control tokens.
            let added = encoding.get_special_tokens_mask();
            let is_control = |&(&id, &added): &(&u32, &u32)| added == 0 && pieces.kind(id) == Some(TokenType::Control);
            if let Some((id, _)) = encoding.get_ids().iter().zip(added).find(is_control) {
                return Err(fault("text", "text that is not a control token", format!("the name of token {id}")));
            }
        }
        Ok(encoding.get_ids().to_vec())
    }

    /// Special tokens around a pair, found by encoding a pair of texts with tokens in every vocabulary.
    pub fn pair_template(&self) -> Result<PairTemplate, Error> {
        let encoding = guarded("text", || self.plain.encode(("a", "a"), true))?;
        let (ids, added) = (encoding.get_ids(), encoding.get_special_tokens_mask());
        let is_text = |i: &usize| added[*i] == 0;
        let texts: Vec<usize> = (0..ids.len()).filter(is_text).collect();
        let (Some(&first), Some(&last)) = (texts.first(), texts.last()) else {
            return Err(fault("text", "tokens of `a`", "none"));
        };
        let middle = (first..last).filter(|i| !is_text(i)).map(|i| ids[i]).collect();
        let second_type = encoding.get_type_ids()[last];
        Ok(PairTemplate { prefix: ids[..first].into(), middle, suffix: ids[last + 1..].into(), second_type })
    }
}

/// Runs the crate's code and converts its errors and panics.
fn guarded<T>(field: &str, run: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, Error> {
    let expected = "a value that the tokenizers crate accepts";
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|error| fault(field, expected, error)),
        Err(_) => Err(fault(field, expected, "one on which it panics")),
    }
}

/// Whether a component has a regular expression that needs backtracking.
fn uses_lookaround(component: Option<&Value>) -> bool {
    match component {
        Some(Value::Object(fields)) => fields.iter().any(|(name, value)| match (name.as_str(), value) {
            ("Regex", Value::String(pattern)) => {
                let marks = ["(?=", "(?!", "(?<", "(?>", "++", "*+", "?+", "}+", r"\1", r"\k", r"\G", r"\K"];
                marks.iter().any(|mark| pattern.contains(mark))
            }
            // GPT-2's expression, built into this step, uses lookahead.
            ("type", Value::String(kind)) => kind == "ByteLevel" && flag_of(fields, "use_regex"),
            _ => uses_lookaround(Some(value)),
        }),
        Some(Value::Array(items)) => items.iter().any(|item| uses_lookaround(Some(item))),
        _ => false,
    }
}

fn flag_of(fields: &serde_json::Map<String, Value>, field: &str) -> bool {
    fields.get(field).and_then(Value::as_bool).unwrap_or(true)
}
