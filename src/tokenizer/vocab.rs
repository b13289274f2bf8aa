//! A vocabulary as plain data, with its checks.

use std::collections::HashMap;
use std::fmt::Display;

use crate::error::Error;

/// A token's type, numbered as in GGUF's `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum TokenType {
    /// Normal text.
    Normal = 1,
    /// Text without another token.
    Unknown = 2,
    /// A control token such as `<s>` or `<|im_end|>`, not text.
    Control = 3,
    /// Text that is matched before all other steps.
    UserDefined = 4,
    /// Reserved by the vocabulary.
    Unused = 5,
    /// One byte, spelled `<0xHH>`.
    Byte = 6,
}

impl TokenType {
    /// Whether the token's text is a name rather than content.
    pub(crate) fn is_special(self) -> bool {
        matches!(self, TokenType::Control | TokenType::Unknown)
    }
}

impl TryFrom<u32> for TokenType {
    type Error = Error;

    /// # Errors
    /// [`Error::Tokenizer`] for numbers outside 1 to 6.
    fn try_from(number: u32) -> Result<Self, Error> {
        Ok(match number {
            1 => TokenType::Normal,
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            _ => return Err(fault("token_types", "1 to 6", number)),
        })
    }
}

/// No token: -1 in 32 bits, for files without another way to express it.
pub(crate) const NO_ID: u32 = u32::MAX;

/// The contents of a vocabulary file, independent of its format.
///
/// Field documentation names the GGUF keys. `None` means that the key is absent; the tokenizer then applies
/// llama.cpp's default for that kind of vocabulary, as it does for an id of `u32::MAX`, or an unneeded id outside the
/// vocabulary.
#[derive(Debug, Clone, Default)]
pub struct Vocab {
    /// `tokenizer.ggml.model`: `llama` (SentencePiece), `gpt2` (byte-level BPE), `gemma4` (BPE over characters), `bert`
    /// (WordPiece) or `t5` (Unigram).
    pub model: String,
    /// `tokenizer.ggml.pre`: how byte-level BPE splits text into words.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`: token texts by id. Byte-level BPE in GPT-2's spelling, a space as `Ġ`.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`: merge priority by id, higher first, or log probability. SentencePiece and Unigram
    /// only.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`, by id. If empty, all tokens are normal except those named by an id below.
    pub token_types: Vec<TokenType>,
    /// `tokenizer.ggml.merges`: `"left right"` in rank order. Byte-level BPE only.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`: begins a text.
    pub bos_id: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`: ends a text.
    pub eos_id: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`: ends a turn of a conversation.
    pub eot_id: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`: ends a message that a tool answers.
    pub eom_id: Option<u32>,
    /// Additional end tokens from a `generation_config.json`; GGUF has no key for them.
    pub end_ids: Vec<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk_id: Option<u32>,
    /// `tokenizer.ggml.separator_token_id`: ends a text for BERT.
    pub sep_id: Option<u32>,
    /// `tokenizer.ggml.cls_token_id`: begins a text for BERT.
    pub cls_id: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad_id: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_sep_token`: SEP follows the first text of a pair, after EOS if that is added.
    pub add_sep: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`: SentencePiece prepends a space to a text.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.remove_extra_whitespaces`: Unigram collapses runs of spaces and trims a text.
    pub remove_extra_spaces: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`: Unigram's character replacements.
    pub charsmap: Vec<u8>,
    /// Special tokens that begin or end turns absorb the white space after them, as in Phi-3's `tokenizer.json`; GGUF
    /// has no key for it.
    pub special_strips_right: bool,
    /// `tokenizer.ggml.normalizer.lowercase`: WordPiece lower-cases and strips accents.
    pub lowercase: Option<bool>,
    /// Notices for the user about ignored parts of the file.
    pub notices: Vec<String>,
}

impl Vocab {
    /// Checks the rules common to all vocabularies, and fills in token types.
    pub(super) fn checked(mut self) -> Result<Self, Error> {
        let n_tokens = self.tokens.len();
        if n_tokens == 0 || n_tokens > MAX_TOKENS {
            return Err(fault("tokens", format!("1 to {MAX_TOKENS} tokens"), n_tokens));
        }
        for (field, len) in [("scores", self.scores.len()), ("token_types", self.token_types.len())] {
            if len != 0 && len != n_tokens {
                return Err(fault(field, format!("one per token, {n_tokens}"), len));
            }
        }
        // EOS and an added BOS are essential. Other ids are checked where needed.
        let adds_bos = self.add_bos == Some(true);
        let ids = [
            ("bos_id", &mut self.bos_id, adds_bos),
            ("eos_id", &mut self.eos_id, true),
            ("eot_id", &mut self.eot_id, false),
            ("eom_id", &mut self.eom_id, false),
            ("unk_id", &mut self.unk_id, false),
            ("sep_id", &mut self.sep_id, false),
            ("cls_id", &mut self.cls_id, false),
            ("pad_id", &mut self.pad_id, false),
        ];
        for (field, id, is_needed) in ids {
            let Some(wrong) = id.take_if(|id| *id as usize >= n_tokens) else { continue };
            match wrong {
                NO_ID => self.notices.push(format!("{field} is -1; ignored")),
                _ if is_needed => return Err(fault(field, format!("below the vocabulary size {n_tokens}"), wrong)),
                _ => self.notices.push(format!("{field} is {wrong}, beyond the {n_tokens} tokens; ignored")),
            }
        }
        // The remaining end tokens stay valid.
        self.end_ids.retain(|&id| (id as usize) < n_tokens);
        if let Some(id) = self.scores.iter().position(|score| score.is_nan()) {
            return Err(fault(format!("scores[{id}]"), "a number", "NaN"));
        }
        check_texts(self.tokens.iter().map(String::as_str))?;
        let mut seen = HashMap::with_capacity(n_tokens);
        for (id, token) in self.tokens.iter().enumerate().filter(|(_, token)| !token.is_empty()) {
            if let Some(first) = seen.insert(token.as_str(), id) {
                let found = format!("{}, a duplicate of token {first}", shown(token));
                return Err(fault(format!("tokens[{id}]"), "a unique text", found));
            }
        }
        if self.token_types.is_empty() {
            self.token_types = vec![TokenType::Normal; n_tokens];
            let control = [self.bos_id, self.eos_id, self.eot_id, self.eom_id, self.sep_id, self.cls_id];
            for (id, kind) in control
                .into_iter()
                .flatten()
                .map(|id| (id, TokenType::Control))
                .chain(self.unk_id.map(|id| (id, TokenType::Unknown)))
            {
                if let Some(slot) = self.token_types.get_mut(id as usize) {
                    *slot = kind;
                }
            }
        }
        Ok(self)
    }

    /// All tokens with text, with ids and types.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &str, TokenType)> {
        let typed = self.tokens.iter().zip(&self.token_types).zip(0u32..);
        typed.map(|((token, &kind), id)| (id, token.as_str(), kind)).filter(|(_, token, _)| !token.is_empty())
    }
}

/// Refuses tokens that only serve to exhaust memory: their tables need several times their bytes.
pub(super) fn check_texts<'v>(tokens: impl Iterator<Item = &'v str>) -> Result<(), Error> {
    /// Per token. Published ones have hundreds at most.
    const MAX_BYTES: usize = 1 << 16;
    /// In total. Published vocabularies have a few million.
    const MAX_ALL_BYTES: usize = 1 << 26;
    let mut all = 0;
    for (id, token) in tokens.enumerate() {
        if token.len() > MAX_BYTES {
            let found = format!("{} with {} bytes", shown(token), token.len());
            return Err(fault(format!("tokens[{id}]"), format!("at most {MAX_BYTES} bytes"), found));
        }
        all += token.len();
    }
    match all <= MAX_ALL_BYTES {
        true => Ok(()),
        false => Err(fault("tokens", format!("at most {MAX_ALL_BYTES} bytes in total"), all)),
    }
}

/// Far above any vocabulary in use; keeps ids and table sizes within 32 bits.
const MAX_TOKENS: usize = 1 << 24;

/// The byte of a byte token such as `<0x0A>`.
pub(super) fn parse_byte(id: u32, token: &str) -> Result<u8, Error> {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits
        .filter(|digits| digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
        .and_then(|digits| u8::from_str_radix(digits, 16).ok())
        .ok_or_else(|| fault(format!("tokens[{id}]"), "a byte token such as <0x0A>", shown(token)))
}

/// An [`Error::Tokenizer`].
pub(super) fn fault(field: impl Into<String>, expected: impl Into<String>, found: impl Display) -> Error {
    Error::Tokenizer { field: field.into(), expected: expected.into(), found: found.to_string() }
}

/// `text` quoted and shortened for a message: a file's text may be a megabyte long.
pub(super) fn shown(text: &str) -> String {
    const MAX_CHARS: usize = 40;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{:?}...", text.get(..end).unwrap_or_default()),
        None => format!("{text:?}"),
    }
}
