//! BERT's WordPiece from a `tokenizer.json`, built from our own parts.

use serde_json::Value;

use super::{File, added_tokens_are_literal, flag, kind, steps, surroundings};
use crate::error::Error;
use crate::tokenizer::spm::ESCAPED_SPACE;
use crate::tokenizer::vocab::{TokenType, Vocab};
use crate::tokenizer::{Tokenizer, wordpiece};

/// How the file marks a piece that continues a word.
const CONTINUES: &str = "##";

/// `None` if any part of the pipeline is not one of those known here.
pub(super) fn load(file: &File, bos_id: Option<u32>, eos_id: Option<u32>) -> Result<Option<Tokenizer>, Error> {
    let json = &file.json;
    let Some(lowercase) = json.get("normalizer").and_then(lowercases) else { return Ok(None) };
    let Some((prefix, suffix)) = surroundings(json.get("post_processor")) else { return Ok(None) };
    let is_wordpiece = json.get("model").is_some_and(|model| {
        let continues = model.get("continuing_subword_prefix").and_then(Value::as_str) == Some(CONTINUES);
        let max_chars = model.get("max_input_chars_per_word").and_then(Value::as_u64);
        kind(model) == "WordPiece" && continues && max_chars == Some(wordpiece::MAX_WORD_CHARS as u64)
    });
    let splits =
        matches!(steps(json.get("pre_tokenizer"), "pretokenizers")[..], [step] if kind(step) == "BertPreTokenizer");
    let decodes = json.get("decoder").is_some_and(|decoder| {
        let prefix = decoder.get("prefix").and_then(Value::as_str);
        kind(decoder) == "WordPiece" && prefix == Some(CONTINUES) && flag(decoder, "cleanup", true)
    });
    // The character that marks the beginning of a word below must not stand for itself.
    let unmarked = !file.tokens.iter().any(|token| token.text.contains(ESCAPED_SPACE));
    let unk = file.tokens.iter().position(|token| token.kind == TokenType::Unknown);
    let Some(unk_id) = unk.and_then(|id| u32::try_from(id).ok()) else { return Ok(None) };
    if !(is_wordpiece && splits && decodes && unmarked && added_tokens_are_literal(json, true)) {
        return Ok(None);
    }

    let tokens = file.tokens.iter().map(|token| match token.text.strip_prefix(CONTINUES) {
        _ if token.kind != TokenType::Normal => token.text.clone(),
        // A word that begins with the mark's first half is still a word.
        Some(piece) if !piece.is_empty() => piece.to_owned(),
        _ => format!("{ESCAPED_SPACE}{}", token.text),
    });
    let vocab = Vocab {
        model: "bert".into(),
        tokens: tokens.collect(),
        token_types: file.tokens.iter().map(|token| token.kind).collect(),
        bos_id,
        eos_id,
        unk_id: Some(unk_id),
        lowercase: Some(lowercase),
        ..Vocab::default()
    };
    Tokenizer::wordpiece(&vocab.checked()?, unk_id, prefix, suffix).map(Some)
}

/// The one choice that a `BertNormalizer` leaves; `None` for one that leaves out other steps.
fn lowercases(normalizer: &Value) -> Option<bool> {
    let lowercase = flag(normalizer, "lowercase", true);
    let strips = flag(normalizer, "strip_accents", lowercase);
    let complete = flag(normalizer, "clean_text", true) && flag(normalizer, "handle_chinese_chars", true);
    (kind(normalizer) == "BertNormalizer" && complete && strips == lowercase).then_some(lowercase)
}
