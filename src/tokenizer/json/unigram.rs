//! SentencePiece's Unigram from a `tokenizer.json`, built from our own parts: for XLM-RoBERTa, T5, and encoders
//! derived from them.

use serde_json::Value;

use super::parts::{ModelVocab, PipelineParts};
use super::{ConfiguredIds, TokenizerFile, not_ours};
use crate::error::Error;
use crate::tokenizer::unigram::{Unigram, UnigramModel};
use crate::tokenizer::vocab::TokenType;
use crate::tokenizer::{Algorithm, Tokenizer};

/// # Errors
/// [`Error::Unsupported`] naming an unsupported component.
pub(super) fn load(file: &TokenizerFile, named: &ConfiguredIds) -> Result<Tokenizer, Error> {
    let model = file.model();
    let entries = model.get("vocab").and_then(Value::as_array);
    let entries = entries.ok_or_else(|| not_ours("model.vocab", "not a list", "a list of tokens and scores"))?;
    let vocab = ModelVocab::new(file);
    let parts = PipelineParts::new(file, &vocab)?;
    let scores: Vec<f64> = entries.iter().filter_map(|entry| entry.get(1)?.as_f64()).collect();
    // Names of special tokens in a text are text.
    let is_text = |kind: TokenType| !kind.is_special();
    let texts = vocab.tokens.iter().filter(|(text, (_, kind))| !text.is_empty() && is_text(*kind));
    let tokens = texts.filter_map(|(&text, &(id, _))| Some((text, id, *scores.get(id as usize)?))).collect();
    let lowest = scores.iter().copied().fold(f64::INFINITY, f64::min);
    let unk_id = model.get("unk_id").and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
    let words = UnigramModel::new(tokens, lowest, unk_id, vocab.byte_ids(model)?);
    parts.tokenizer(file, named, unk_id, |pipeline| Algorithm::Unigram(Unigram::of_words(pipeline, words)))
}
