//! BERT's WordPiece: words are cleaned, lower-cased and split greedily into the longest known pieces.
//!
//! Devlin et al. 2019, arXiv:1810.04805; cleaning and splitting follow the `BertNormalizer` and `BertPreTokenizer` of
//! Hugging Face's tokenizers, with which BERT models were trained. llama.cpp differs in two ways: here a word over
//! 100 characters is unknown, and decomposed Hangul stays decomposed.

use std::collections::HashMap;

use unicode_normalization::UnicodeNormalization;
use unicode_properties::{GeneralCategory as Category, GeneralCategoryGroup as Group, UnicodeGeneralCategory};

use super::spm::ESCAPED_SPACE;
use super::vocab::{Vocab, fault};
use crate::error::Error;

/// Longer words are unknown.
pub(super) const MAX_WORD_CHARS: usize = 100;

/// An encoder for `tokenizer.ggml.model = bert`.
#[derive(Debug)]
pub(super) struct WordPiece {
    /// Pieces that begin a word, marked by U+2581 in GGUF; BERT's own files mark all others by `##`.
    first: HashMap<Box<str>, u32>,
    /// Pieces that continue a word.
    next: HashMap<Box<str>, u32>,
    max_piece_len: usize,
    unk_id: u32,
    lowercase: bool,
}

impl WordPiece {
    pub fn new(vocab: &Vocab, unk_id: u32) -> Result<Self, Error> {
        let (mut first, mut next) = (HashMap::new(), HashMap::new());
        let mut max_piece_len = 0;
        for (id, token, kind) in vocab.iter() {
            if kind.is_special() || id == unk_id {
                continue;
            }
            let (pieces, piece) = match token.strip_prefix(ESCAPED_SPACE) {
                Some(piece) => (&mut first, piece),
                None => (&mut next, token),
            };
            max_piece_len = max_piece_len.max(piece.len());
            pieces.insert(piece.into(), id);
        }
        if first.is_empty() {
            return Err(fault("tokens", "pieces that begin a word (marked U+2581)", "none"));
        }
        Ok(WordPiece { first, next, max_piece_len, unk_id, lowercase: vocab.lowercase.unwrap_or(true) })
    }

    /// Appends the ids of `text`.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let mut word = String::new();
        let mut put = |c: char| {
            if is_punctuation(c) || is_chinese(c) {
                self.encode_word(&word, ids);
                self.encode_word(c.encode_utf8(&mut [0; 4]), ids);
                word.clear();
            } else if c.is_whitespace() {
                self.encode_word(&word, ids);
                word.clear();
            } else {
                word.push(c);
            }
        };
        let clean = text.chars().filter(|&c| !is_removed(c));
        if self.lowercase {
            let bare = clean.nfd().filter(|&c| c.general_category() != Category::NonspacingMark);
            bare.flat_map(char::to_lowercase).for_each(&mut put);
        } else {
            clean.for_each(&mut put);
        }
        put(' ');
    }

    fn encode_word(&self, word: &str, ids: &mut Vec<u32>) {
        if word.is_empty() {
            return;
        }
        if word.chars().nth(MAX_WORD_CHARS).is_some() {
            ids.push(self.unk_id);
            return;
        }
        let whole = ids.len();
        let mut rest = word;
        let mut pieces = &self.first;
        while !rest.is_empty() {
            let ends = rest.char_indices().map(|(at, c)| at + c.len_utf8());
            let ends: Vec<usize> = ends.take_while(|&end| end <= self.max_piece_len).collect();
            let longest = ends.into_iter().rev().find_map(|end| {
                let (piece, after) = rest.split_at_checked(end)?;
                Some((*pieces.get(piece)?, after))
            });
            let Some((id, after)) = longest else {
                // A missing piece makes the whole word unknown.
                ids.truncate(whole);
                ids.push(self.unk_id);
                return;
            };
            ids.push(id);
            rest = after;
            pieces = &self.next;
        }
    }
}

/// Characters that cleaning removes: null, the replacement character and the categories Cc, Cf and Co, except control
/// characters that are spaces.
fn is_removed(c: char) -> bool {
    match c {
        '\t' | '\n' | '\r' => false,
        '\u{FFFD}' => true,
        _ => matches!(c.general_category(), Category::Control | Category::Format | Category::PrivateUse),
    }
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.general_category_group() == Group::Punctuation
}

/// The CJK blocks, in which each character is a word. The original has the gap from U+2B820 to U+2B91F, too.
fn is_chinese(c: char) -> bool {
    matches!(u32::from(c),
        0x3400..=0x4DBF | 0x4E00..=0x9FFF | 0xF900..=0xFAFF | 0x20000..=0x2A6DF | 0x2A700..=0x2B73F
        | 0x2B740..=0x2B81F | 0x2B920..=0x2CEAF | 0x2F800..=0x2FA1F)
}
