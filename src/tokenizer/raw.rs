//! BPE over the unsplit characters of a text, from a GGUF file: for Gemma 4 and a few encoders.
//!
//! Equivalent to such a model's `tokenizer.json`: spaces are written as U+2581, and characters without a token become
//! byte tokens. Line breaks are isolated: no merge joins them with other characters, and a run of them that is a
//! token skips the merges, because not all files list the merges of line breaks.

use std::collections::HashMap;

use super::bpe::{self, Bpe, Characters};
use super::pipeline::{Cut, Rewrite, TokenizerPipeline};
use super::special::Matchers;
use super::spm::ESCAPED_SPACE;
use super::vocab::{TokenType, Vocab, fault, parse_byte};
use crate::error::Error;

/// Names of such vocabularies in `tokenizer.ggml.pre`; the first also for `tokenizer.ggml.model = gemma4`.
pub(super) const NAMES: &[&str] = &["gemma4", "granite-embed-multi-311m", "mmbert", "sarvam-moe"];

/// The encoder for one of [`NAMES`].
///
/// # Errors
/// [`Error::Tokenizer`] naming an invalid merge or token.
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
    let pipeline = TokenizerPipeline {
        rewrites: vec![Rewrite::Replace { pattern: " ".into(), content: ESCAPED_SPACE.into() }],
        tokens: Matchers::by_rule(std::iter::empty())?,
        cuts: vec![Cut::Lines { word_start: (name == "mmbert").then_some(ESCAPED_SPACE) }],
    };
    let merges = bpe::merges(vocab.iter(), bpe::pairs(&vocab.merges))?;
    let characters = Characters { ids, byte_ids, fuse_unk: true };
    Ok(Bpe::over_characters(characters, pipeline, merges, words, vocab.unk_id))
}
