//! BERT's WordPiece from a `tokenizer.json`, built from our own parts.

use serde_json::Value;

use super::{ConfiguredIds, TokenizerFile, check_literal, flag, kind, not_ours, steps, surroundings};
use crate::error::Error;
use crate::tokenizer::spm::ESCAPED_SPACE;
use crate::tokenizer::vocab::{TokenType, Vocab};
use crate::tokenizer::{Tokenizer, wordpiece};

/// The mark of a piece that continues a word.
const CONTINUES: &str = "##";

/// # Errors
/// [`Error::Unsupported`] naming an unsupported component.
pub(super) fn load(file: &TokenizerFile, named: &ConfiguredIds) -> Result<Tokenizer, Error> {
    let (json, model) = (&file.json, file.model());
    let known = |is_known: bool, field: &str, ours: &str| {
        if is_known { Ok(()) } else { Err(not_ours(field, "another one", ours)) }
    };
    let continues = model.get("continuing_subword_prefix").and_then(Value::as_str) == Some(CONTINUES);
    let max_chars = model.get("max_input_chars_per_word").and_then(Value::as_u64);
    let is_bert = continues && max_chars == Some(wordpiece::MAX_WORD_CHARS as u64);
    known(is_bert, "model", "WordPiece with ## and words of up to 100 characters")?;
    let lowercase = json.get("normalizer").and_then(lowercases);
    let lowercase = lowercase
        .ok_or_else(|| not_ours("normalizer", &json["normalizer"].to_string(), "a complete BertNormalizer"))?;
    let splits =
        matches!(steps(json.get("pre_tokenizer"), "pretokenizers")[..], [step] if kind(step) == "BertPreTokenizer");
    known(splits, "pre_tokenizer", "BertPreTokenizer")?;
    let around = surroundings(json.get("post_processor"))?;
    let decodes = json.get("decoder").is_some_and(|decoder| {
        let prefix = decoder.get("prefix").and_then(Value::as_str);
        kind(decoder) == "WordPiece" && prefix == Some(CONTINUES) && flag(decoder, "cleanup", true)
    });
    known(decodes, "decoder", "WordPiece with ## and cleanup")?;
    // The mark of a word's beginning, used below, must not be a token's text.
    let unmarked = !file.tokens.iter().any(|token| token.text.contains(ESCAPED_SPACE));
    known(unmarked, "model.vocab", "WordPiece without U+2581")?;
    let unk = file.tokens.iter().position(|token| token.kind == TokenType::Unknown);
    let unk_id = unk.and_then(|id| u32::try_from(id).ok());
    let unk_id = unk_id.ok_or_else(|| not_ours("model.unk_token", "none", "WordPiece with an unknown token"))?;
    check_literal(json, true)?;

    let tokens = file.tokens.iter().map(|token| match token.text.strip_prefix(CONTINUES) {
        _ if token.kind != TokenType::Normal => token.text.clone(),
        // The tokens `#` and `##` are words.
        Some(piece) if !piece.is_empty() => piece.to_owned(),
        _ => format!("{ESCAPED_SPACE}{}", token.text),
    });
    let vocab = Vocab {
        model: "bert".into(),
        tokens: tokens.collect(),
        token_types: file.tokens.iter().map(|token| token.kind).collect(),
        bos_id: named.bos_id,
        eos_id: named.eos_id,
        end_ids: named.end_ids.clone(),
        unk_id: Some(unk_id),
        lowercase: Some(lowercase),
        ..Vocab::default()
    };
    Tokenizer::wordpiece(&vocab.checked()?, unk_id, around)
}

/// Whether a complete `BertNormalizer` lower-cases; `None` for one that omits other steps.
fn lowercases(normalizer: &Value) -> Option<bool> {
    let lowercase = flag(normalizer, "lowercase", true);
    let strips = flag(normalizer, "strip_accents", lowercase);
    let complete = flag(normalizer, "clean_text", true) && flag(normalizer, "handle_chinese_chars", true);
    (kind(normalizer) == "BertNormalizer" && complete && strips == lowercase).then_some(lowercase)
}
