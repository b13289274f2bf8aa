//! A vocabulary as plain data, and the checks that make it safe to build on.

use std::collections::HashMap;
use std::fmt::Display;

use crate::error::Error;

/// What a token is for. The numbers are those of GGUF's `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum TokenType {
    /// Stands for its text.
    Normal = 1,
    /// Stands for text that no other token covers.
    Unknown = 2,
    /// Steers the model (`<s>`, `<|im_end|>`) and is not text.
    Control = 3,
    /// Stands for its text and is found before anything else is.
    UserDefined = 4,
    /// Reserved by the vocabulary.
    Unused = 5,
    /// Stands for one byte, spelled `<0xHH>`.
    Byte = 6,
}

impl TokenType {
    /// Whether the token's text is its name and not what it stands for.
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

/// Stands for no token in files that have no other way to say so: -1 in 32 bits.
pub(crate) const NO_ID: u32 = u32::MAX;

/// Everything a vocabulary file says, with no trace of the file's format.
///
/// The key in each field's documentation is the GGUF one. `None` means that the file is silent; the tokenizer
/// then does what llama.cpp does for that kind of vocabulary. So it does for an id that is `u32::MAX`, or that is outside the
/// vocabulary and not needed.
#[derive(Debug, Clone, Default)]
pub struct Vocab {
    /// `tokenizer.ggml.model`: `llama` (SentencePiece), `gpt2` (byte-level BPE), `gemma4` (BPE over characters), `bert`
    /// (WordPiece) or `t5` (Unigram).
    pub model: String,
    /// `tokenizer.ggml.pre`: how byte-level BPE splits text into words.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`: a token's text, by id. Byte-level BPE in GPT-2's spelling, a space as `Ġ`.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`: merge priority by id, higher first, or a token's logarithmic probability. SentencePiece and
    /// Unigram only.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`, by id. Empty: every token is normal, but for those that an id below names.
    pub token_types: Vec<TokenType>,
    /// `tokenizer.ggml.merges`: `"left right"`, first merge first. Byte-level BPE only.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`: begins a text.
    pub bos_id: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`: ends a text.
    pub eos_id: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`: ends a turn of a conversation.
    pub eot_id: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`: ends a message that a tool is to answer.
    pub eom_id: Option<u32>,
    /// Further tokens that end an answer, from a `generation_config.json`; GGUF has no key for them.
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
    /// `tokenizer.ggml.add_sep_token`: behind the first of two texts stands SEP, after EOS if that is added.
    pub add_sep: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`: SentencePiece puts a space before a text.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.remove_extra_whitespaces`: Unigram takes several spaces for one, and those around a text away.
    pub remove_extra_spaces: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`: which characters Unigram takes for which others.
    pub charsmap: Vec<u8>,
    /// Special tokens that end or begin turns swallow the white space behind them. GGUF has no key for it: it is so in Phi-3's
    /// `tokenizer.json`.
    pub special_strips_right: bool,
    /// `tokenizer.ggml.normalizer.lowercase`: WordPiece lower-cases and strips accents.
    pub lowercase: Option<bool>,
    /// What was passed over in the file, for a person to know.
    pub notices: Vec<String>,
}

impl Vocab {
    /// Checks what every kind of vocabulary must keep, and fills in the token types.
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
        // Where a text ends, and what stands in front of it, cannot be passed over. Whoever needs another one looks for it.
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
                NO_ID => self.notices.push(format!("{field} is -1, which is taken for none")),
                _ if is_needed => return Err(fault(field, format!("below the vocabulary size {n_tokens}"), wrong)),
                _ => self.notices.push(format!("{field} is {wrong}, beyond the {n_tokens} tokens, and taken for none")),
            }
        }
        // The others still end a text.
        self.end_ids.retain(|&id| (id as usize) < n_tokens);
        if let Some(id) = self.scores.iter().position(|score| score.is_nan()) {
            return Err(fault(format!("scores[{id}]"), "a number", "NaN"));
        }
        check_texts(self.tokens.iter().map(String::as_str))?;
        let mut seen = HashMap::with_capacity(n_tokens);
        for (id, token) in self.tokens.iter().enumerate().filter(|(_, token)| !token.is_empty()) {
            if let Some(first) = seen.insert(token.as_str(), id) {
                let found = format!("{}, which is token {first} already", shown(token));
                return Err(fault(format!("tokens[{id}]"), "a text of its own", found));
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

    /// Every token that has a text, with its id and type.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &str, TokenType)> {
        let typed = self.tokens.iter().zip(&self.token_types).zip(0u32..);
        typed.map(|((token, &kind), id)| (id, token.as_str(), kind)).filter(|(_, token, _)| !token.is_empty())
    }
}

/// Refuses tokens that only serve to exhaust memory: tables over them take several times their bytes.
pub(super) fn check_texts<'v>(tokens: impl Iterator<Item = &'v str>) -> Result<(), Error> {
    /// Of one token. Published ones have hundreds at most.
    const MAX_BYTES: usize = 1 << 16;
    /// Of all. Published vocabularies have a few million.
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
        false => Err(fault("tokens", format!("at most {MAX_ALL_BYTES} bytes in all"), all)),
    }
}

/// No vocabulary in use comes near this; it keeps ids and table sizes within 32 bits.
const MAX_TOKENS: usize = 1 << 24;

/// The byte that a byte token such as `<0x0A>` stands for.
pub(super) fn parse_byte(id: u32, token: &str) -> Result<u8, Error> {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits
        .filter(|digits| digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()))
        .and_then(|digits| u8::from_str_radix(digits, 16).ok())
        .ok_or_else(|| fault(format!("tokens[{id}]"), "a byte token such as <0x0A>", shown(token)))
}

/// [`Error::Tokenizer`] in one line.
pub(super) fn fault(field: impl Into<String>, expected: impl Into<String>, found: impl Display) -> Error {
    Error::Tokenizer { field: field.into(), expected: expected.into(), found: found.to_string() }
}

/// `text` quoted for a message and cut short: it comes from a file and may be a megabyte long.
pub(super) fn shown(text: &str) -> String {
    const MAX_CHARS: usize = 40;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{:?}...", text.get(..end).unwrap_or_default()),
        None => format!("{text:?}"),
    }
}
