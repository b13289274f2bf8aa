//! Detokenizer: token ids to text, all at once or incrementally.

use std::sync::Arc;

use super::vocab::{TokenType, fault};
use crate::error::Error;

/// The decoded bytes and types of all tokens.
#[derive(Debug)]
pub(super) struct TokenPieces {
    /// The bytes of all tokens, concatenated.
    bytes: Vec<u8>,
    /// End of each token's bytes.
    ends: Vec<usize>,
    types: Vec<TokenType>,
    strip: Strip,
}

/// Spaces stripped at the start of a text, which the encoder added.
#[derive(Debug, Clone, Copy)]
pub(super) enum Strip {
    /// Up to this many spaces.
    Spaces(usize),
    /// All spaces of the first token.
    FirstToken,
}

impl TokenPieces {
    /// `tokens` are complete, by id.
    pub fn new(tokens: impl Iterator<Item = (Vec<u8>, TokenType)>, strip: Strip) -> Self {
        let (mut bytes, mut ends, mut types) = (Vec::new(), Vec::new(), Vec::new());
        for (piece, kind) in tokens {
            bytes.extend(piece);
            ends.push(bytes.len());
            types.push(kind);
        }
        TokenPieces { bytes, ends, types, strip }
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn kind(&self, id: u32) -> Option<TokenType> {
        self.types.get(id as usize).copied()
    }

    /// # Errors
    /// [`Error::Tokenizer`] for an id outside the vocabulary.
    pub fn bytes(&self, id: u32) -> Result<&[u8], Error> {
        let at = id as usize;
        let start = at.checked_sub(1).map_or(Some(0), |before| self.ends.get(before).copied());
        let bytes = start.zip(self.ends.get(at)).and_then(|(start, &end)| self.bytes.get(start..end));
        bytes.ok_or_else(|| fault("token id", format!("below the vocabulary size {}", self.len()), id))
    }
}

/// Decodes ids one at a time and never emits incomplete characters.
///
/// The concatenated results equal [`Tokenizer::decode`](super::Tokenizer::decode) of all ids.
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    pieces: Arc<TokenPieces>,
    skip_special: bool,
    /// Spaces still to be stripped.
    strip: Strip,
    /// Bytes of an incomplete character: at most three.
    pending: Vec<u8>,
}

impl StreamDecoder {
    pub(super) fn new(pieces: Arc<TokenPieces>, skip_special: bool) -> Self {
        StreamDecoder { skip_special, strip: pieces.strip, pieces, pending: Vec::new() }
    }

    /// Decodes control and unknown tokens, too, to their names.
    pub fn with_special(mut self) -> Self {
        self.skip_special = false;
        self
    }

    /// Decodes a continuation: keeps a leading space, which is otherwise stripped as the encoder's space prefix.
    pub fn continuing(mut self) -> Self {
        self.strip = Strip::Spaces(0);
        self
    }

    /// The text completed by `id`; empty while a character is incomplete.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for an id outside the vocabulary, which the decoder then ignores.
    pub fn push(&mut self, id: u32) -> Result<String, Error> {
        let mut text = String::new();
        self.push_to(id, &mut text)?;
        Ok(text)
    }

    /// The remaining text: an incomplete character becomes U+FFFD. Resets the decoder.
    pub fn finish(&mut self) -> String {
        self.strip = self.pieces.strip;
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    pub(super) fn push_to(&mut self, id: u32, text: &mut String) -> Result<(), Error> {
        let mut bytes = self.pieces.bytes(id)?;
        if self.skip_special && self.pieces.kind(id).is_some_and(TokenType::is_special) {
            return Ok(());
        }
        while let (Strip::Spaces(left @ 1..), Some(rest)) = (self.strip, bytes.strip_prefix(b" ")) {
            bytes = rest;
            self.strip = Strip::Spaces(left - 1);
        }
        if bytes.is_empty() {
            return Ok(());
        }
        match std::mem::replace(&mut self.strip, Strip::Spaces(0)) {
            Strip::Spaces(_) => self.pending.extend_from_slice(bytes),
            Strip::FirstToken => self.pending.extend(bytes.iter().filter(|&&byte| byte != b' ')),
        }
        let mut rest = self.pending.as_slice();
        loop {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, invalid) = rest.split_at_checked(error.valid_up_to()).unwrap_or((rest, &[]));
            text.push_str(std::str::from_utf8(valid).unwrap_or_default());
            rest = invalid;
            // No length: an incomplete character, which the next token may complete.
            let Some(len) = error.error_len() else { break };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = rest.get(len..).unwrap_or(&[]);
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        Ok(())
    }
}
