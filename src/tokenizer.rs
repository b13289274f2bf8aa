//! Text to token ids and back.
//!
//! ```text
//! text --special tokens found--> fragments --SentencePiece | BPE | WordPiece | Unigram--> ids --pieces--> text
//! ```
//! A [`Tokenizer`] is built from a [`Vocab`], which is plain data, or from a `tokenizer.json`. Our four algorithms
//! run in O(n log n) on any text, except that Unigram and WordPiece need up to a token's length of steps per
//! character. A `tokenizer.json` with another pipeline uses the `tokenizers` crate if the feature `tokenizer-json` is
//! on.
//!
//! Names of special tokens in a text are plain text unless [`EncodeOptions::parse_special`] is set, so user input can
//! never inject control tokens.
//!
//! A pre-tokenizer is a list of regular expressions, each with an equivalent linear-time scanner. If llama.cpp and a
//! model's own `tokenizer.json` differ, the latter applies. BOS is added once, if the file, the template or the model
//! requires it, never twice. `roles.rs` also lists end-of-answer tokens.

mod bpe;
mod cache;
mod charsmap;
mod decode;
mod json;
mod merge;
mod pipeline;
mod pre_tokenizer;
mod raw;
mod roles;
mod special;
mod spm;
mod unigram;
mod vocab;
mod wordpiece;

use std::collections::HashMap;
use std::sync::Arc;

pub(crate) use bpe::spelled;
pub use cache::EncodingCache;
pub use decode::StreamDecoder;
pub use json::TokenizerConfig;
#[cfg(feature = "chat")]
pub(crate) use special::Search;
pub(crate) use vocab::NO_ID;
pub use vocab::{TokenType, Vocab};

use crate::error::Error;
use bpe::Bpe;
use decode::{Strip, TokenPieces};
use pre_tokenizer::PreTokenizer;
use special::{Fragment, Matchers};
use spm::{ESCAPED_SPACE, Spm};
use unigram::Unigram;
use vocab::fault;
use wordpiece::WordPiece;

/// Options of [`Tokenizer::encode_with`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct EncodeOptions {
    /// Adds the model's special tokens around a text, such as BOS, or `[CLS]` and `[SEP]`.
    pub add_special: bool,
    /// Parses names of special tokens (`<|im_end|>`) as those tokens. For text from a chat template, not from a user.
    pub parse_special: bool,
}

/// A vocabulary with its encoder and decoder.
#[derive(Debug)]
pub struct Tokenizer {
    encoder: Encoder,
    pieces: Arc<TokenPieces>,
    /// Ids of control, unknown and user-defined tokens by name.
    special_ids: HashMap<Box<str>, u32>,
    bos_id: Option<u32>,
    eos_ids: Vec<u32>,
    #[cfg_attr(not(feature = "chat"), allow(dead_code))]
    message_end_id: Option<u32>,
    notices: Vec<String>,
}

#[derive(Debug)]
enum Encoder {
    Own(Box<OwnEncoder>),
    #[cfg(feature = "tokenizer-json")]
    Foreign(Box<json::foreign::ForeignEncoder>),
    /// Another module's encoder, which encodes continuations or nothing.
    #[cfg_attr(not(target_arch = "wasm32"), expect(dead_code, reason = "no other module has a tokenizer"))]
    Elsewhere(fn(&str) -> Option<Vec<u32>>),
}

#[derive(Debug)]
struct OwnEncoder {
    algorithm: Algorithm,
    /// Tokens found in a text before the algorithm runs.
    tokens: Matchers,
    /// The tokens that `add_special` adds.
    around: Surroundings,
}

/// Special tokens around a text or a pair of texts.
#[derive(Debug, Clone)]
struct Surroundings {
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    /// `None` if the file's template does not keep the pair in order.
    pair: Option<PairTemplate>,
}

/// Special tokens around a pair of texts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PairTemplate {
    /// Before the first text.
    pub prefix: Vec<u32>,
    /// Between the texts.
    pub middle: Vec<u32>,
    /// After the second text.
    pub suffix: Vec<u32>,
    /// Token type of the second text and everything after it; 0 before.
    pub second_type: u32,
}

impl PairTemplate {
    /// Number of special tokens.
    pub fn len(&self) -> usize {
        self.prefix.len() + self.middle.len() + self.suffix.len()
    }
}

impl Surroundings {
    /// By default the texts of a pair are adjacent.
    fn new(prefix: Vec<u32>, suffix: Vec<u32>) -> Surroundings {
        let pair = PairTemplate { prefix: prefix.clone(), suffix: suffix.clone(), ..PairTemplate::default() };
        Surroundings { prefix, suffix, pair: Some(pair) }
    }
}

#[derive(Debug)]
enum Algorithm {
    Spm(Spm),
    Bpe(Box<Bpe>),
    WordPiece(WordPiece),
    Unigram(Unigram),
}

impl Tokenizer {
    /// Builds a tokenizer from a vocabulary.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming a missing or contradictory field; [`Error::Unsupported`] for an unknown `model` or
    /// `pre`.
    pub fn from_vocab(vocab: Vocab) -> Result<Self, Error> {
        let mut vocab = vocab.checked()?;
        match vocab.model.as_str() {
            "llama" => {
                // Files may omit the family's standard ids.
                (vocab.bos_id, vocab.eos_id, vocab.unk_id) = (
                    vocab.bos_id.or_else(|| control(&vocab, 1)),
                    vocab.eos_id.or_else(|| control(&vocab, 2)),
                    vocab.unk_id.or_else(|| unknown(&vocab)),
                );
                let around = bos_and_eos(&vocab, true, false)?;
                let pieces = sentence_pieces(&vocab, usize::from(vocab.add_space_prefix.unwrap_or(true)))?;
                let algorithm = Algorithm::Spm(Spm::new(&vocab)?);
                Self::own(&vocab, algorithm, Matchers::by_kind(&vocab)?, pieces, around)
            }
            "t5" => {
                vocab.unk_id = vocab.unk_id.or_else(|| unknown(&vocab));
                // T5's defaults.
                vocab.eos_id = vocab.eos_id.or_else(|| control(&vocab, 1));
                vocab.add_eos = vocab.add_eos.or(Some(true));
                // XLM-RoBERTa's separator of pairs.
                let around = bos_and_eos(&vocab, false, true)?;
                let algorithm = Algorithm::Unigram(Unigram::new(&vocab)?);
                let pieces = sentence_pieces(&vocab, usize::from(vocab.add_space_prefix.unwrap_or(true)))?;
                Self::own(&vocab, algorithm, Matchers::by_kind(&vocab)?, pieces, around)
            }
            "gemma4" => Self::raw(vocab, "gemma4"),
            "gpt2" if vocab.pre.as_deref().is_some_and(|pre| raw::NAMES.contains(&pre)) => {
                let name = vocab.pre.clone().unwrap_or_default();
                Self::raw(vocab, &name)
            }
            "gpt2" => {
                let pre_tokenizer = PreTokenizer::by_name(vocab.pre.as_deref())?;
                let around = bos_and_eos(&vocab, pre_tokenizer.add_bos, pre_tokenizer.add_sep)?;
                Self::byte_level(&vocab, pre_tokenizer, around)
            }
            "bert" => {
                let special = |field: &str, id: Option<u32>, name: &str| {
                    let named = || vocab.iter().find(|token| token.1 == name).map(|token| token.0);
                    id.or_else(named).ok_or_else(|| fault(field, format!("an id, or a token {name}"), "neither"))
                };
                let cls_id = special("cls_id", vocab.cls_id.or(vocab.bos_id), "[CLS]")?;
                let sep_id = special("sep_id", vocab.sep_id, "[SEP]")?;
                let unk_id = special("unk_id", vocab.unk_id, "[UNK]")?;
                let (cls, sep) = (vec![cls_id], vec![sep_id]);
                let pair =
                    PairTemplate { prefix: cls.clone(), middle: sep.clone(), suffix: sep.clone(), second_type: 1 };
                Self::wordpiece(&vocab, unk_id, Surroundings { prefix: cls, suffix: sep, pair: Some(pair) })
            }
            other => Err(Error::Unsupported {
                format: "tokenizer",
                field: "model".into(),
                found: vocab::shown(other),
                supported: "llama, gpt2, gemma4, bert, t5".into(),
            }),
        }
    }

    /// Builds a tokenizer from a `tokenizer.json`. `config` names special tokens, which that file does not.
    /// Truncation and padding are left to the caller.
    ///
    /// # Errors
    /// [`Error::Format`] for invalid JSON, [`Error::Tokenizer`] naming the invalid field, [`Error::Unsupported`] for
    /// a component that is unsafe or needs the feature `tokenizer-json`.
    pub fn from_json(bytes: &[u8], config: &TokenizerConfig) -> Result<Self, Error> {
        json::load(bytes, config)
    }

    /// The ids of `text`, without parsing special tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for a character without a token in a vocabulary without an unknown token, or for a text
    /// above the size limit (4 GiB for our own algorithms).
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        self.encode_with(text, EncodeOptions { add_special, parse_special: false })
    }

    /// The ids of `text`.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_with(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, Error> {
        let mut ids = match &self.encoder {
            Encoder::Own(own) => own.encode(text, options),
            #[cfg(feature = "tokenizer-json")]
            Encoder::Foreign(foreign) => foreign.encode(text, options, &self.pieces),
            Encoder::Elsewhere(encode) => {
                encode(text).ok_or_else(|| fault("text", "a text that another module encodes", "not encoded"))
            }
        }?;
        // Drops a second BOS: llama.cpp warns of two (#7332), and they degrade answers.
        if let (true, [first, second, ..]) = (options.add_special && options.parse_special, &ids[..])
            && first == second
            && Some(*first) == self.bos_id
        {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// The ids of `text` as a continuation. `None` for a tokenizer that only encodes whole texts.
    #[cfg(any(feature = "grammar", all(target_arch = "wasm32", feature = "web")))]
    pub(crate) fn encode_within(&self, text: &str) -> Option<Vec<u32>> {
        match &self.encoder {
            Encoder::Own(own) => match own.algorithm {
                Algorithm::Spm(_) | Algorithm::Bpe(_) => own.encode_from(text, EncodeOptions::default(), true).ok(),
                Algorithm::WordPiece(_) | Algorithm::Unigram(_) => None,
            },
            #[cfg(feature = "tokenizer-json")]
            Encoder::Foreign(_) => None,
            Encoder::Elsewhere(encode) => encode(text),
        }
    }

    /// Special tokens around a pair of texts.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] without a template that keeps the pair in order; as [`encode`](Self::encode).
    pub(crate) fn pair_template(&self) -> Result<PairTemplate, Error> {
        match &self.encoder {
            Encoder::Own(own) => own.around.pair.clone().ok_or_else(|| Error::Tokenizer {
                field: "post_processor.pair".into(),
                expected: "a template of two texts in order".into(),
                found: "missing or in another order".into(),
            }),
            #[cfg(feature = "tokenizer-json")]
            Encoder::Foreign(foreign) => foreign.pair_template(),
            Encoder::Elsewhere(_) => Err(fault("text", "a single text in this module", "a pair")),
        }
    }

    /// The text of `ids`. Invalid UTF-8 becomes U+FFFD. `skip_special` omits control and unknown tokens, which
    /// otherwise appear by name.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming the first id outside the vocabulary and the vocabulary's size.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        let mut decoder = StreamDecoder::new(Arc::clone(&self.pieces), skip_special);
        let mut text = String::new();
        for &id in ids {
            decoder.push_to(id, &mut text)?;
        }
        text.push_str(&decoder.finish());
        Ok(text)
    }

    /// An incremental decoder. It skips special tokens; see [`StreamDecoder::with_special`].
    pub fn decoder(&self) -> StreamDecoder {
        StreamDecoder::new(Arc::clone(&self.pieces), true)
    }

    /// Notices for the user about ignored parts of the vocabulary.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// The bytes of a token in the middle of a text; a control token's name.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Result<&[u8], Error> {
        self.pieces.bytes(id)
    }

    /// Control and unknown tokens by name, unordered.
    pub fn special_tokens(&self) -> impl Iterator<Item = (&str, u32)> {
        let is_special = |id: &u32| self.pieces.kind(*id).is_some_and(TokenType::is_special);
        self.special_ids.iter().filter(move |(_, id)| is_special(id)).map(|(name, &id)| (&**name, id))
    }

    /// The id of the control, unknown or user-defined token of this name.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.special_ids.get(name).copied()
    }

    /// The id of a token by name: a special or user-defined one, or else a word of the vocabulary.
    pub(crate) fn token_id(&self, name: &str) -> Option<u32> {
        // Words of a WordPiece vocabulary begin with a space.
        let is_it = |id: &u32| {
            let bytes = self.token_bytes(*id).unwrap_or_default();
            bytes.strip_prefix(b" ").unwrap_or(bytes) == name.as_bytes()
        };
        self.special_id(name).or_else(|| (0..u32::try_from(self.vocab_size()).ok()?).find(is_it))
    }

    /// Number of tokens; all ids are below.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The BOS token, whether or not `add_special` adds it.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    /// Whether `add_special` adds BOS.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub(crate) fn adds_bos(&self) -> Result<bool, Error> {
        let first = match &self.encoder {
            Encoder::Own(own) => own.around.prefix.first().copied(),
            #[cfg(feature = "tokenizer-json")]
            Encoder::Foreign(_) => self.encode("", true)?.first().copied(),
            Encoder::Elsewhere(_) => None,
        };
        Ok(self.bos_id.is_some() && first == self.bos_id)
    }

    /// Tokens that end a text or a turn, at which generation stops.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The algorithm: `SentencePiece`, `byte-level BPE`, `BPE` (over characters), `WordPiece`, `Unigram`, or
    /// `tokenizers` for the crate of that name.
    pub fn algorithm(&self) -> &'static str {
        match &self.encoder {
            Encoder::Own(own) => match &own.algorithm {
                Algorithm::Spm(_) => "SentencePiece",
                Algorithm::Bpe(bpe) => bpe.name(),
                Algorithm::WordPiece(_) => "WordPiece",
                Algorithm::Unigram(_) => "Unigram",
            },
            #[cfg(feature = "tokenizer-json")]
            Encoder::Foreign(_) => "tokenizers",
            Encoder::Elsewhere(_) => "another module's",
        }
    }

    /// Whether a token is a control token. False outside the vocabulary.
    pub fn is_control(&self, id: u32) -> bool {
        self.pieces.kind(id) == Some(TokenType::Control)
    }

    /// A token's type. `None` outside the vocabulary.
    #[cfg(any(feature = "grammar", all(target_arch = "wasm32", feature = "web")))]
    pub(crate) fn token_type(&self, id: u32) -> Option<TokenType> {
        self.pieces.kind(id)
    }

    /// A token that ends a message but not the answer, if the vocabulary has one.
    #[cfg(feature = "chat")]
    pub(crate) fn message_end_id(&self) -> Option<u32> {
        self.message_end_id
    }

    /// Decodes another module's tokens, given by id with their end tokens; encodes with `encode`.
    #[cfg(all(target_arch = "wasm32", feature = "web-text"))]
    pub(crate) fn elsewhere(
        tokens: Vec<(Vec<u8>, TokenType)>,
        eos_ids: Vec<u32>,
        encode: fn(&str) -> Option<Vec<u32>>,
    ) -> Self {
        let named = (0u32..).zip(&tokens).filter(|(_, (_, kind))| kind.is_special() || *kind == TokenType::UserDefined);
        let name = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned().into_boxed_str();
        Tokenizer {
            encoder: Encoder::Elsewhere(encode),
            special_ids: named.map(|(id, (bytes, _))| (name(bytes), id)).collect(),
            pieces: Arc::new(TokenPieces::new(tokens.into_iter(), Strip::Spaces(0))),
            bos_id: None,
            eos_ids,
            message_end_id: None,
            notices: Vec::new(),
        }
    }

    /// BPE over characters, from a GGUF file.
    fn raw(mut vocab: Vocab, name: &str) -> Result<Self, Error> {
        vocab.unk_id = vocab.unk_id.or_else(|| unknown(&vocab));
        if name == "gemma4" {
            vocab.bos_id = vocab.bos_id.or_else(|| vocab.iter().find(|token| token.1 == "<bos>").map(|token| token.0));
            // See `roles::needs_bos`.
            vocab.add_bos = Some(true);
        }
        let around = bos_and_eos(&vocab, false, false)?;
        let pieces = sentence_pieces(&vocab, 0)?;
        let algorithm = Algorithm::Bpe(Box::new(raw::bpe(&vocab, name)?));
        Self::own(&vocab, algorithm, Matchers::by_kind(&vocab)?, pieces, around)
    }

    /// Byte-level BPE with this pre-tokenizer and special tokens.
    fn byte_level(vocab: &Vocab, pre_tokenizer: PreTokenizer, around: Surroundings) -> Result<Self, Error> {
        let pieces = pieces(vocab, Strip::Spaces(0), |_, token, kind| match kind {
            TokenType::Normal => Ok(bpe::token_bytes(token)),
            _ => Ok(token.into()),
        })?;
        let algorithm = Algorithm::Bpe(Box::new(Bpe::new(vocab, pre_tokenizer)?));
        Self::own(vocab, algorithm, Matchers::by_kind(vocab)?, pieces, around)
    }

    /// WordPiece with these special tokens.
    fn wordpiece(vocab: &Vocab, unk_id: u32, around: Surroundings) -> Result<Self, Error> {
        let pieces = pieces(vocab, Strip::Spaces(1), |_, token, kind| Ok(wordpiece_bytes(token, kind)))?;
        let algorithm = Algorithm::WordPiece(WordPiece::new(vocab, unk_id)?);
        Self::own(vocab, algorithm, Matchers::by_kind(vocab)?, pieces, around)
    }

    fn own(
        vocab: &Vocab,
        algorithm: Algorithm,
        tokens: Matchers,
        pieces: TokenPieces,
        around: Surroundings,
    ) -> Result<Self, Error> {
        let named = vocab.iter().filter(|token| token.2.is_special() || token.2 == TokenType::UserDefined);
        let by_text: HashMap<&str, (u32, TokenType)> =
            vocab.iter().map(|(id, text, kind)| (text, (id, kind))).collect();
        let find = |text: &str| by_text.get(text).copied();
        let named_ends =
            [vocab.eos_id, vocab.eot_id, vocab.eom_id].into_iter().flatten().chain(vocab.end_ids.iter().copied());
        Ok(Tokenizer {
            encoder: Encoder::Own(Box::new(OwnEncoder { algorithm, tokens, around })),
            pieces: Arc::new(pieces),
            special_ids: named.map(|(id, token, _)| (token.into(), id)).collect(),
            bos_id: vocab.bos_id.or(vocab.cls_id),
            eos_ids: roles::ends(named_ends, find),
            message_end_id: roles::message_end(find),
            notices: vocab.notices.clone(),
        })
    }
}

impl OwnEncoder {
    fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, Error> {
        self.encode_from(text, options, false)
    }

    /// As `encode`; without a space prefix if `continues`.
    fn encode_from(&self, text: &str, options: EncodeOptions, continues: bool) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        if options.add_special {
            ids.extend(&self.around.prefix);
        }
        let mut after_special = !continues;
        for (n, fragment) in self.tokens.select(options.parse_special).split(text).into_iter().enumerate() {
            match fragment {
                Fragment::Token(id) => ids.push(id),
                Fragment::Text(text) => match &self.algorithm {
                    Algorithm::Spm(spm) => spm.encode(text, after_special, &mut ids)?,
                    Algorithm::Bpe(bpe) => bpe.encode(text, n == 0 && !continues, options.parse_special, &mut ids)?,
                    Algorithm::WordPiece(wordpiece) => wordpiece.encode(text, &mut ids),
                    Algorithm::Unigram(unigram) => {
                        unigram.encode(text, n == 0 && !continues, options.parse_special, &mut ids)?
                    }
                },
            }
            after_special = matches!(fragment, Fragment::Token(_));
        }
        if options.add_special {
            ids.extend(&self.around.suffix);
        }
        Ok(ids)
    }
}

/// The tokens that `add_bos`, `add_eos` and `add_sep` require. EOS follows both texts of a pair.
fn bos_and_eos(vocab: &Vocab, default_bos: bool, default_sep: bool) -> Result<Surroundings, Error> {
    let wanted = |add: bool, field: &str, id: Option<u32>| match (add, id) {
        (false, _) => Ok(Vec::new()),
        (true, Some(id)) => Ok(vec![id]),
        (true, None) => Err(fault(field, "an id to add to texts", "missing")),
    };
    let prefix = wanted(vocab.add_bos.unwrap_or(default_bos), "bos_id", vocab.bos_id)?;
    let suffix = wanted(vocab.add_eos.unwrap_or(false), "eos_id", vocab.eos_id)?;
    let sep = wanted(vocab.add_sep.unwrap_or(default_sep), "sep_id", vocab.sep_id.or(vocab.eos_id))?;
    let pair = PairTemplate {
        prefix: prefix.clone(),
        middle: [suffix.as_slice(), &sep].concat(),
        suffix: suffix.clone(),
        second_type: 0,
    };
    Ok(Surroundings { prefix, suffix, pair: Some(pair) })
}

fn pieces(
    vocab: &Vocab,
    strip: Strip,
    bytes: impl Fn(u32, &str, TokenType) -> Result<Vec<u8>, Error>,
) -> Result<TokenPieces, Error> {
    let tokens = (0u32..).zip(&vocab.tokens).zip(&vocab.token_types);
    let tokens: Result<Vec<_>, Error> =
        tokens.map(|((id, token), &kind)| Ok((bytes(id, token, kind)?, kind))).collect();
    Ok(TokenPieces::new(tokens?.into_iter(), strip))
}

/// `id`, if it is a control token's.
fn control(vocab: &Vocab, id: u32) -> Option<u32> {
    vocab.iter().any(|token| (token.0, token.2) == (id, TokenType::Control)).then_some(id)
}

/// The unknown token, by its type.
fn unknown(vocab: &Vocab) -> Option<u32> {
    vocab.iter().find(|token| token.2 == TokenType::Unknown).map(|token| token.0)
}

/// The pieces of a vocabulary that writes spaces as U+2581. Decoding strips `n_spaces` at the start of a text.
fn sentence_pieces(vocab: &Vocab, n_spaces: usize) -> Result<TokenPieces, Error> {
    pieces(vocab, Strip::Spaces(n_spaces), |id, token, kind| match kind {
        TokenType::Byte => Ok(vec![vocab::parse_byte(id, token)?]),
        TokenType::Control | TokenType::Unknown => Ok(token.into()),
        _ => Ok(token.replace(ESCAPED_SPACE, " ").into()),
    })
}

/// A space precedes pieces that begin a word, except close punctuation.
fn wordpiece_bytes(token: &str, kind: TokenType) -> Vec<u8> {
    let word = match (kind, token.strip_prefix(ESCAPED_SPACE)) {
        (_, Some(word)) => word,
        (kind, None) if kind.is_special() => token,
        (_, None) => return token.into(),
    };
    let close = matches!(word, "." | "?" | "!" | ",");
    if close { word.into() } else { format!(" {word}").into() }
}
