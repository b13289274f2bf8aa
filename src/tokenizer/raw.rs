//! BPE over the characters of a text as they are, from a GGUF file: Gemma 4's, and that of a few encoders.
//!
//! It is what such a model's `tokenizer.json` describes: spaces are written as U+2581, and a character that is no token becomes
//! its byte tokens. Line breaks are apart: no merge of these vocabularies joins one with anything else, and a run of them
//! that is a token is that token, because not all files list the merges of line breaks.

use std::collections::HashMap;

use super::bpe::{self, Bpe, Characters};
use super::pipeline::{Cut, Pipeline, Rewrite};
use super::special::Matchers;
use super::spm::ESCAPED_SPACE;
use super::vocab::{TokenType, Vocab, fault, parse_byte};
use crate::error::Error;

/// Names of `tokenizer.ggml.pre` for such vocabularies; `tokenizer.ggml.model = gemma4` stands for the first.
pub(super) const NAMES: &[&str] = &["gemma4", "granite-embed-multi-311m", "mmbert", "sarvam-moe"];

/// The encoder for one of [`NAMES`].
///
/// # Errors
/// [`Error::Tokenizer`] naming a merge or a token that is not what it must be.
pub(super) fn bpe(vocab: &Vocab, name: &str) -> Result<Bpe, Error> {
    let mut ids = HashMap::new();
    let mut words: HashMap<Box<[u8]>, u32> = HashMap::new();
    let mut bytes = [None; 256];
    for (id, token, kind) in vocab.iter() {
        match kind {
            TokenType::Byte => bytes[usize::from(parse_byte(id, token)?)] = Some(id),
            TokenType::Normal | TokenType::UserDefined => {
                let mut chars = token.chars();
                if let (Some(c), None) = (chars.next(), chars.next()) {
                    ids.insert(c, id);
                }
                if name != "sarvam-moe" && token.chars().all(|c| c == '\n') {
                    words.insert(token.as_bytes().into(), id);
                }
            }
            _ => {}
        }
    }
    if vocab.merges.is_empty() {
        return Err(fault("merges", "at least one", 0));
    }
    let byte_ids: Option<Vec<u32>> = bytes.into_iter().collect();
    let byte_ids = byte_ids.and_then(|ids| ids.into_boxed_slice().try_into().ok());
    let pipeline = Pipeline {
        rewrites: vec![Rewrite::Replace { pattern: " ".into(), content: ESCAPED_SPACE.into() }],
        tokens: Matchers::by_rule(std::iter::empty())?,
        cuts: vec![Cut::Lines { word_start: (name == "mmbert").then_some(ESCAPED_SPACE) }],
    };
    let merges = bpe::merges(vocab.iter(), bpe::pairs(&vocab.merges))?;
    let characters = Characters { ids, byte_ids, fuse_unk: true };
    Ok(Bpe::over_characters(characters, pipeline, merges, words, vocab.unk_id))
}
