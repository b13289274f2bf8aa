//! SentencePiece's BPE as in llama.cpp: the pair with the highest-scored text merges first.
//!
//! Spaces are first written as U+2581. Characters without a token become byte tokens, or without those the unknown
//! token, one per run of such characters.

use std::collections::HashMap;

use super::merge::{Merger, NO_TOKEN};
use super::vocab::{TokenType, Vocab, fault, parse_byte, shown};
use crate::error::Error;

/// SentencePiece's spelling of a space.
pub(super) const ESCAPED_SPACE: char = '\u{2581}';

/// An encoder for `tokenizer.ggml.model = llama`.
#[derive(Debug)]
pub(super) struct Spm {
    /// Priority and id of the tokens that text can become, by text. Excludes control, unknown and byte tokens, so
    /// that no text merges into one.
    tokens: HashMap<Box<str>, (u32, u32)>,
    max_len: u32,
    /// Whether spaces only begin tokens: then no merge crosses a word boundary and words are merged separately,
    /// several times faster than the whole text.
    spaces_begin_tokens: bool,
    byte_ids: Box<[Option<u32>; 256]>,
    unk_id: Option<u32>,
    add_space_prefix: bool,
}

impl Spm {
    pub fn new(vocab: &Vocab) -> Result<Self, Error> {
        if vocab.scores.len() != vocab.tokens.len() {
            let expected = format!("one per token, {}", vocab.tokens.len());
            return Err(fault("scores", expected, vocab.scores.len()));
        }
        let mut tokens: HashMap<Box<str>, (u32, u32)> = HashMap::with_capacity(vocab.tokens.len());
        let mut byte_ids = Box::new([None; 256]);
        for ((id, token, kind), &score) in vocab.iter_with_scores() {
            match kind {
                TokenType::Byte => {
                    let slot = &mut byte_ids[usize::from(parse_byte(id, token)?)];
                    if let Some(first) = slot.replace(id) {
                        return Err(fault(
                            format!("tokens[{id}]"),
                            format!("a byte different from token {first}'s"),
                            shown(token),
                        ));
                    }
                }
                TokenType::Normal | TokenType::UserDefined | TokenType::Unused => {
                    tokens.insert(token.into(), (priority(score), id));
                }
                TokenType::Control | TokenType::Unknown => {}
            }
        }
        let max_len = tokens.keys().map(|token| token.len()).max().unwrap_or(0);
        let spaces_begin = |token: &str| !token.trim_start_matches(ESCAPED_SPACE).contains(ESCAPED_SPACE);
        Ok(Spm {
            spaces_begin_tokens: tokens.keys().all(|token| spaces_begin(token)),
            tokens,
            max_len: u32::try_from(max_len).unwrap_or(u32::MAX),
            byte_ids,
            unk_id: vocab.unk_id,
            add_space_prefix: vocab.add_space_prefix.unwrap_or(true),
        })
    }

    /// Appends the ids of `text`. `after_special`: whether it follows a special token or nothing, so that it gets the
    /// space prefix.
    pub fn encode(&self, text: &str, after_special: bool, ids: &mut Vec<u32>) -> Result<(), Error> {
        let mut escaped = String::with_capacity(text.len() + ESCAPED_SPACE.len_utf8());
        if self.add_space_prefix && after_special {
            escaped.push(ESCAPED_SPACE);
        }
        escaped.extend(text.chars().map(|c| if c == ' ' { ESCAPED_SPACE } else { c }));
        if u32::try_from(escaped.len()).is_err() {
            return Err(fault("text", "less than 4 GiB", format!("{} bytes", escaped.len())));
        }

        let mut merger = Merger::default();
        let mut after_unknown = false;
        let mut rest = escaped.as_str();
        while !rest.is_empty() {
            let (word, after) = rest.split_at_checked(self.word_len(rest)).unwrap_or((rest, ""));
            self.encode_word(word, &mut merger, &mut after_unknown, ids)?;
            rest = after;
        }
        Ok(())
    }

    /// Length in bytes of the longest prefix of `text` that can be merged separately.
    fn word_len(&self, text: &str) -> usize {
        let spaces = text.find(|c| c != ESCAPED_SPACE).unwrap_or(text.len());
        let word =
            if self.spaces_begin_tokens { text.get(spaces..).and_then(|word| word.find(ESCAPED_SPACE)) } else { None };
        word.map_or(text.len(), |len| spaces + len)
    }

    fn encode_word(
        &self,
        word: &str,
        merger: &mut Merger,
        after_unknown: &mut bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), Error> {
        let slice = |start: u32, len: u32| word.get(start as usize..start as usize + len as usize).unwrap_or("");
        merger.clear();
        for (start, c) in word.char_indices() {
            let (start, len) = (start as u32, c.len_utf8() as u32);
            merger.push(start, len, self.tokens.get(slice(start, len)).map_or(NO_TOKEN, |&(_, id)| id));
        }
        merger.run(|left, right| {
            let len = left.len + right.len;
            if len > self.max_len { None } else { self.tokens.get(slice(left.start, len)).copied() }
        });
        for symbol in merger.symbols() {
            if symbol.id != NO_TOKEN {
                ids.push(symbol.id);
                *after_unknown = false;
                continue;
            }
            let text = slice(symbol.start, symbol.len);
            let bytes: Option<Vec<u32>> = text.bytes().map(|byte| self.byte_ids[usize::from(byte)]).collect();
            match (bytes, self.unk_id) {
                (Some(bytes), _) => {
                    ids.extend(bytes);
                    *after_unknown = false;
                }
                (None, Some(unk_id)) => {
                    if !*after_unknown {
                        ids.push(unk_id);
                    }
                    *after_unknown = true;
                }
                (None, None) => {
                    let expected = "characters with a token or byte tokens, or an unknown token";
                    return Err(fault("text", expected, shown(text)));
                }
            }
        }
        Ok(())
    }
}

/// Converts a score (high first) to a merge priority (low first).
fn priority(score: f32) -> u32 {
    // Adding zero unifies -0.0 and 0.0. Flipping the sign bit of positive numbers and all bits of negative ones
    // orders floats as unsigned integers.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    !ascending
}

impl Vocab {
    fn iter_with_scores(&self) -> impl Iterator<Item = ((u32, &str, TokenType), &f32)> {
        self.iter().filter_map(|token| Some((token, self.scores.get(token.0 as usize)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::priority;

    #[test]
    fn merge_priority_reverses_the_score_order() {
        let descending = [f32::INFINITY, 1e9, 1.0, f32::MIN_POSITIVE, 0.0, -1e-40, -1.0, -31739.0, f32::NEG_INFINITY];
        assert!(descending.windows(2).all(|pair| priority(pair[0]) < priority(pair[1])));
        assert_eq!(priority(0.0), priority(-0.0));
    }
}
