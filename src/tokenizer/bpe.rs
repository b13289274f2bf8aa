//! BPE with ranked merges: splits text into words and words into bytes or characters, and merges these by rank.
//!
//! Sennrich et al. 2016, arXiv:1508.07909; on bytes since GPT-2, whose vocabularies spell the 256 bytes as printable
//! characters ([`byte_of_char`]); on characters for a `tokenizer.json` made from SentencePiece and Gemma 4's files.

use std::borrow::Cow;
use std::collections::HashMap;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::merge::{Merger, NO_TOKEN};
use super::pipeline::TokenizerPipeline;
use super::pre_tokenizer::PreTokenizer;
use super::vocab::{TokenType, Vocab, fault, shown};
use crate::error::Error;

/// An encoder for `tokenizer.ggml.model = gpt2`, and for a `tokenizer.json` with BPE.
#[derive(Debug)]
pub(super) struct Bpe {
    alphabet: Alphabet,
    /// Rank and merged token by pair of tokens.
    merges: Merges,
    /// Words that are tokens, for vocabularies that skip merges for them; else empty.
    words: HashMap<Box<[u8]>, u32>,
    unk_id: Option<u32>,
}

pub(super) type Merges = HashMap<(u32, u32), (u32, u32)>;

/// The units of words, and the splitting of text into words.
#[derive(Debug)]
enum Alphabet {
    Bytes { ids: Box<[Option<u32>; 256]>, pre_tokenizer: PreTokenizer },
    Characters { characters: Characters, pipeline: TokenizerPipeline },
}

/// The initial units of merging.
#[derive(Debug)]
pub(super) struct Characters {
    pub ids: HashMap<char, u32>,
    /// Byte tokens for characters without a token, if the vocabulary has them.
    pub byte_ids: Option<Box<[u32; 256]>>,
    /// Adjacent unknown characters become one unknown token.
    pub fuse_unk: bool,
}

impl Bpe {
    /// BPE over bytes.
    pub fn new(vocab: &Vocab, pre_tokenizer: PreTokenizer) -> Result<Self, Error> {
        let mut byte_ids = Box::new([None; 256]);
        let mut words = HashMap::new();
        for (id, token, _) in vocab.iter().filter(|token| token.2 == TokenType::Normal) {
            let bytes = token_bytes(token);
            if let [byte] = bytes[..] {
                byte_ids[usize::from(byte)].get_or_insert(id);
            }
            if pre_tokenizer.ignore_merges {
                words.entry(bytes.into()).or_insert(id);
            }
        }
        Ok(Bpe {
            merges: merges(vocab.iter(), pairs(&vocab.merges))?,
            alphabet: Alphabet::Bytes { ids: byte_ids, pre_tokenizer },
            words,
            unk_id: vocab.unk_id,
        })
    }

    /// BPE over characters. `words` are looked up before merging.
    pub fn over_characters(
        characters: Characters,
        pipeline: TokenizerPipeline,
        merges: Merges,
        words: HashMap<Box<[u8]>, u32>,
        unk_id: Option<u32>,
    ) -> Self {
        Bpe { alphabet: Alphabet::Characters { characters, pipeline }, merges, words, unk_id }
    }

    pub fn name(&self) -> &'static str {
        match self.alphabet {
            Alphabet::Bytes { .. } => "byte-level BPE",
            Alphabet::Characters { .. } => "BPE",
        }
    }

    /// Appends the ids of `text`. `at_start`: whether it begins the whole text.
    pub fn encode(&self, text: &str, at_start: bool, parse_special: bool, ids: &mut Vec<u32>) -> Result<(), Error> {
        let mut merger = Merger::default();
        let pre_tokenizer = match &self.alphabet {
            Alphabet::Bytes { pre_tokenizer, .. } => pre_tokenizer,
            Alphabet::Characters { pipeline, .. } => {
                return pipeline
                    .encode(text, at_start, parse_special, ids, |word, ids| self.encode_word(word, &mut merger, ids));
            }
        };
        let normal: Cow<str> = if pre_tokenizer.nfc && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            text.nfc().collect::<String>().into()
        } else {
            text.into()
        };
        if u32::try_from(normal.len()).is_err() {
            return Err(fault("text", "less than 4 GiB", format!("{} bytes", normal.len())));
        }
        let mut result = Ok(());
        pre_tokenizer.split(&normal, &mut |word| {
            if result.is_ok() {
                result = self.encode_word(word, &mut merger, ids);
            }
        });
        result
    }

    fn encode_word(&self, word: &str, merger: &mut Merger, ids: &mut Vec<u32>) -> Result<(), Error> {
        if let Some(&id) = self.words.get(word.as_bytes()) {
            ids.push(id);
            return Ok(());
        }
        merger.clear();
        let fuse_unk = match &self.alphabet {
            Alphabet::Bytes { ids, .. } => {
                for (start, byte) in (0u32..).zip(word.bytes()) {
                    merger.push(start, 1, ids[usize::from(byte)].unwrap_or(NO_TOKEN));
                }
                false
            }
            Alphabet::Characters { characters, .. } => {
                characters.spell(word, merger);
                characters.fuse_unk
            }
        };
        merger.run(|left, right| self.merges.get(&(left.id, right.id)).copied());
        let mut after_unknown = false;
        for symbol in merger.symbols() {
            if symbol.id != NO_TOKEN {
                ids.push(symbol.id);
                after_unknown = false;
                continue;
            }
            let unknown = || {
                let start = symbol.start as usize;
                let byte = word.as_bytes().get(start).copied().unwrap_or_default();
                match &self.alphabet {
                    Alphabet::Bytes { .. } => {
                        fault("text", "bytes with a token, or an unknown token", format!("byte 0x{byte:02X}"))
                    }
                    Alphabet::Characters { .. } => {
                        let character = word.get(start..start + symbol.len as usize).unwrap_or_default();
                        fault("text", "characters with a token, or an unknown token", shown(character))
                    }
                }
            };
            let unk_id = self.unk_id.ok_or_else(unknown)?;
            if !(fuse_unk && after_unknown) {
                ids.push(unk_id);
            }
            after_unknown = true;
        }
        Ok(())
    }
}

impl Characters {
    fn spell(&self, word: &str, merger: &mut Merger) {
        for (start, c) in word.char_indices() {
            // The pipeline limits words to 4 GiB.
            let start = start as u32;
            match (self.ids.get(&c), &self.byte_ids) {
                (None, Some(byte_ids)) => {
                    for (start, &byte) in (start..).zip(c.encode_utf8(&mut [0; 4]).as_bytes()) {
                        merger.push(start, 1, byte_ids[usize::from(byte)]);
                    }
                }
                (id, _) => merger.push(start, c.len_utf8() as u32, id.copied().unwrap_or(NO_TOKEN)),
            }
        }
    }
}

/// The ranked halves of `"left right"`.
pub(super) fn pairs(merges: &[String]) -> impl Iterator<Item = Result<(u32, &str, &str), Error>> {
    (0u32..).zip(merges).map(|(rank, merge)| {
        // No half is empty, so a leading space belongs to the left half.
        let space = merge.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
        let halves = space.and_then(|at| Some((merge.get(..at)?, merge.get(at + 1..)?)));
        let (left, right) = halves
            .filter(|(_, right)| !right.is_empty())
            .ok_or_else(|| fault(merge_field(rank), "two tokens separated by a space", shown(merge)))?;
        Ok((rank, left, right))
    })
}

/// The table of merges from ranks and halves. The first of duplicate pairs applies.
pub(super) fn merges<'v>(
    tokens: impl Iterator<Item = (u32, &'v str, TokenType)>,
    pairs: impl Iterator<Item = Result<(u32, &'v str, &'v str), Error>>,
) -> Result<Merges, Error> {
    let texts: HashMap<&str, (u32, TokenType)> = tokens.map(|(id, token, kind)| (token, (id, kind))).collect();
    let mut merges = HashMap::with_capacity(pairs.size_hint().0);
    let mut merged = String::new();
    for pair in pairs {
        let (rank, left, right) = pair?;
        let broken = |expected: String| fault(merge_field(rank), expected, shown(&[left, right].join(" ")));
        let find = |text: &str| {
            let none = || broken(format!("tokens of the vocabulary ({} is not)", shown(text)));
            // Otherwise text could be spelled to merge into a control token.
            match texts.get(text).copied().ok_or_else(none)? {
                (_, TokenType::Control | TokenType::Unknown) => {
                    Err(broken(format!("text tokens ({} is not)", shown(text))))
                }
                (id, _) => Ok(id),
            }
        };
        let halves = (find(left)?, find(right)?);
        merged.clear();
        merged.push_str(left);
        merged.push_str(right);
        merges.entry(halves).or_insert((rank, find(&merged)?));
    }
    Ok(merges)
}

fn merge_field(rank: u32) -> String {
    format!("merges[{rank}]")
}

/// The byte that GPT-2 spells as `c`: printable Latin-1 characters are themselves, and the other 68 bytes, in order,
/// U+0100 to U+0143.
pub(super) fn byte_of_char(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Bytes in GPT-2's spelling.
pub(crate) fn spelled(bytes: &[u8]) -> String {
    let char = |&byte: &u8| match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        0..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap_or_default(),
        0x7F..=0xA0 => char::from_u32(0x121 - 0x7F + u32::from(byte)).unwrap_or_default(),
        0xAD => '\u{143}',
    };
    bytes.iter().map(char).collect()
}

/// The bytes of a token in GPT-2's spelling, or the literal bytes of a token with any other character.
pub(super) fn token_bytes(token: &str) -> Vec<u8> {
    token.chars().map(byte_of_char).collect::<Option<_>>().unwrap_or_else(|| token.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::{byte_of_char, spelled, token_bytes};

    #[test]
    fn byte_level_alphabet_covers_each_byte_once() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(token_bytes(&spelled(&all)), all);
        let mut bytes: Vec<u8> = ('\0'..='\u{200}').filter_map(byte_of_char).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        let known = [('Ġ', b' '), ('Ċ', b'\n'), ('ĉ', b'\t'), ('č', b'\r'), ('A', b'A'), ('Ģ', 0x80), ('ł', 0xA0)];
        assert!(known.iter().all(|&(c, byte)| byte_of_char(c) == Some(byte)));
    }
}
