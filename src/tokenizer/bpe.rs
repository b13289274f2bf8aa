//! Byte-level BPE: text is split into words, a word into bytes, and bytes merge by the rank of the merge.
//!
//! Sennrich et al. 2016, arXiv:1508.07909; on bytes since GPT-2, whose vocabularies spell the 256 bytes as 256
//! printable characters ([`byte_of_char`]).

use std::borrow::Cow;
use std::collections::HashMap;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::merge::{Merger, NO_TOKEN};
use super::pre_tokenizer::PreTokenizer;
use super::vocab::{TokenType, Vocab, fault, shown};
use crate::error::Error;

/// An encoder for `tokenizer.ggml.model = gpt2`.
#[derive(Debug)]
pub(super) struct Bpe {
    pre_tokenizer: PreTokenizer,
    /// Rank and merged token by the pair of tokens that merges.
    merges: HashMap<(u32, u32), (u32, u32)>,
    byte_ids: Box<[Option<u32>; 256]>,
    /// Whole words that are tokens, for vocabularies that look there before merging; empty for the others.
    words: HashMap<Box<[u8]>, u32>,
    unk_id: Option<u32>,
}

impl Bpe {
    pub fn new(vocab: &Vocab, pre_tokenizer: PreTokenizer) -> Result<Self, Error> {
        let mut texts = HashMap::with_capacity(vocab.tokens.len());
        let mut byte_ids = Box::new([None; 256]);
        let mut words = HashMap::new();
        for (id, token, kind) in vocab.iter() {
            texts.insert(token, (id, kind));
            if kind != TokenType::Normal {
                continue;
            }
            let bytes = token_bytes(token);
            if let [byte] = bytes[..] {
                byte_ids[usize::from(byte)].get_or_insert(id);
            }
            if pre_tokenizer.ignore_merges {
                words.entry(bytes.into()).or_insert(id);
            }
        }

        let mut merges = HashMap::with_capacity(vocab.merges.len());
        for (rank, merge) in (0u32..).zip(&vocab.merges) {
            let field = || format!("merges[{rank}]");
            // No half is empty, so a first character that is a space belongs to the left half.
            let space = merge.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
            let halves = space.and_then(|at| Some((merge.get(..at)?, merge.get(at + 1..)?)));
            let (left, right) = halves
                .filter(|(_, right)| !right.is_empty())
                .ok_or_else(|| fault(field(), "two tokens with a space between", shown(merge)))?;
            let find = |text: &str| {
                let (id, kind) = texts.get(text).copied().ok_or_else(|| {
                    fault(field(), format!("tokens of the vocabulary ({} is none)", shown(text)), shown(merge))
                })?;
                // Otherwise text could be spelled so that it becomes a control token.
                match kind {
                    TokenType::Control | TokenType::Unknown => {
                        Err(fault(field(), format!("tokens that are text ({} is not)", shown(text)), shown(merge)))
                    }
                    _ => Ok(id),
                }
            };
            let (left_id, right_id) = (find(left)?, find(right)?);
            let merged_id = find(&[left, right].concat())?;
            // A pair listed twice keeps its first rank.
            merges.entry((left_id, right_id)).or_insert((rank, merged_id));
        }
        Ok(Bpe { pre_tokenizer, merges, byte_ids, words, unk_id: vocab.unk_id })
    }

    /// Appends the ids of `text`.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
        let normal: Cow<str> = if self.pre_tokenizer.nfc && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            text.nfc().collect::<String>().into()
        } else {
            text.into()
        };
        if u32::try_from(normal.len()).is_err() {
            return Err(fault("text", "less than 4 GiB", format!("{} bytes", normal.len())));
        }
        let mut merger = Merger::default();
        let mut result = Ok(());
        self.pre_tokenizer.split(&normal, &mut |word| {
            if result.is_ok() {
                result = self.encode_word(word.as_bytes(), &mut merger, ids);
            }
        });
        result
    }

    fn encode_word(&self, word: &[u8], merger: &mut Merger, ids: &mut Vec<u32>) -> Result<(), Error> {
        if let Some(&id) = self.words.get(word) {
            ids.push(id);
            return Ok(());
        }
        merger.clear();
        for (start, &byte) in (0u32..).zip(word) {
            merger.push(start, 1, self.byte_ids[usize::from(byte)].unwrap_or(NO_TOKEN));
        }
        merger.run(|left, right| self.merges.get(&(left.id, right.id)).copied());
        for symbol in merger.symbols() {
            if symbol.id != NO_TOKEN {
                ids.push(symbol.id);
                continue;
            }
            let byte = word.get(symbol.start as usize).copied().unwrap_or_default();
            let unknown = || fault("text", "bytes that tokens or an unknown token cover", format!("byte 0x{byte:02X}"));
            ids.push(self.unk_id.ok_or_else(unknown)?);
        }
        Ok(())
    }
}

/// The byte that GPT-2 spells as `c`: printable Latin-1 characters stand for themselves, and the other 68 bytes,
/// in order, are U+0100 to U+0143.
pub(super) fn byte_of_char(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// The bytes of a token in GPT-2's spelling; one that holds any other character was never spelled so and is
/// taken literally.
pub(super) fn token_bytes(token: &str) -> Vec<u8> {
    token.chars().map(byte_of_char).collect::<Option<_>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::byte_of_char;

    #[test]
    fn spelling_covers_each_byte_once() {
        let mut bytes: Vec<u8> = ('\0'..='\u{200}').filter_map(byte_of_char).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        let known = [('Ġ', b' '), ('Ċ', b'\n'), ('ĉ', b'\t'), ('č', b'\r'), ('A', b'A'), ('Ģ', 0x80), ('ł', 0xA0)];
        assert!(known.iter().all(|&(c, byte)| byte_of_char(c) == Some(byte)));
    }
}
