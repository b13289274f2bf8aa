//! Whisper models of whisper.cpp, `ggml-*.bin`. Format: its `models/convert-pt-to-ggml.py`; little endian, nothing is aligned.
//!
//! ```text
//! magic         "ggml" as a number
//! shape         11 numbers: n_vocab, n_audio_ctx, n_audio_state, n_audio_head, n_audio_layer, n_text_ctx, n_text_state,
//!               n_text_head, n_text_layer, n_mels, ftype
//! filters       bands, frequencies, then floats; the spectrogram's own are the same
//! vocabulary    count, then length and bytes of each token of text; the others follow these
//! tensors       up to the end: rank, length of the name, type, dimensions (contiguous one first), name, data
//! ```

use std::collections::HashMap;

use serde_json::json;

use super::{LANGUAGES, ScatteredHeaders, SpeechFile, SpeechGeneration};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::{BlockType, TensorInfo, UNKNOWN_LEN};
use crate::tokenizer::{TokenType, Tokenizer, Vocab, spelled};

/// What a file begins with.
pub(super) const MAGIC: &[u8] = b"lmgg";
/// Limits far above those of any model.
const MAX_FLOATS: u32 = 1 << 20;
const MAX_TOKENS: u32 = 1 << 20;
const MAX_TOKEN_BYTES: u32 = 1 << 12;
const MAX_TENSORS: usize = 1 << 14;
const MAX_NAME_BYTES: u32 = 256;
const MAX_RANK: u32 = 4;
/// Tokens after those of text that are no languages: the ends of a text and its beginning, tasks and other marks, timestamps.
const N_MARKS: u32 = 2 + MARKS.len() as u32 + N_TIMESTAMPS;
const MARKS: [&str; 6] = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"];
const N_TIMESTAMPS: u32 = 1501;
/// Tokens of text that models of several languages have at least.
const N_MULTILINGUAL: u32 = 50_257;

/// Names in a file with ours.
const NAMES: [(&str, &str); 15] = [
    ("attn_ln", "attn_norm"),
    ("attn.query", "attn_q"),
    ("attn.key", "attn_k"),
    ("attn.value", "attn_v"),
    ("attn.out", "attn_output"),
    ("cross_attn_ln", "cross_attn_norm"),
    ("cross_attn.query", "cross_attn_q"),
    ("cross_attn.key", "cross_attn_k"),
    ("cross_attn.value", "cross_attn_v"),
    ("cross_attn.out", "cross_attn_output"),
    ("mlp_ln", "ffn_norm"),
    ("mlp.0", "ffn_up"),
    ("mlp.2", "ffn_down"),
    ("conv1", "conv.1"),
    ("conv2", "conv.2"),
];

/// A file's parts.
#[derive(Debug)]
pub(super) struct Ggml {
    /// The shape by the names of a Hugging Face folder.
    pub config: ConfigJson,
    /// Tokens of text.
    tokens: Vec<Vec<u8>>,
    n_vocab: u32,
    pub tensors: Vec<TensorInfo>,
}

/// The parts before the tensors.
#[derive(Debug)]
struct Head {
    /// The 11 numbers.
    shape: [u32; 11],
    tokens: Vec<Vec<u8>>,
}

/// Reads a file's parts as its bytes arrive. Tensors are described between the others' data, which it skips.
#[derive(Debug, Default)]
pub(in crate::load) struct GgmlReader {
    /// Bytes of the file, if known.
    size: Option<u64>,
    head: Option<Head>,
    tensors: Vec<TensorInfo>,
    /// Where the next part begins.
    next: u64,
    /// Bytes from there on.
    pending: Vec<u8>,
    /// As many are needed to read it.
    needed: u64,
    is_whole: bool,
}

impl ScatteredHeaders for GgmlReader {
    fn wanted(&self) -> Option<u64> {
        let at = self.next + self.pending.len() as u64;
        (!self.is_whole && (self.head.is_none() || self.size != Some(at))).then_some(at)
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if self.pending.is_empty() {
            let n_read = self.read(bytes)?;
            self.pending = bytes[n_read..].to_vec();
            return Ok(());
        }
        self.pending.extend_from_slice(bytes);
        if (self.pending.len() as u64) < self.needed {
            return Ok(());
        }
        let pending = std::mem::take(&mut self.pending);
        let n_read = self.read(&pending)?;
        self.pending = pending;
        self.pending.drain(..n_read);
        Ok(())
    }

    fn end(&mut self) -> Result<(), Error> {
        let found_bytes = self.next + self.pending.len() as u64;
        let needed_bytes = self.next + self.needed.max(1);
        // The last tensor's data were skipped, so whether all are there shows when they are read.
        match self.head.is_some() && self.pending.is_empty() {
            true => self.is_whole = true,
            false => return Err(Error::Truncated { part: "its header".into(), needed_bytes, found_bytes }),
        }
        Ok(())
    }

    fn finish(self: Box<Self>, name: &str) -> Result<SpeechFile, Error> {
        SpeechFile::of_ggml(name, self.parts()?)
    }
}

impl GgmlReader {
    /// Of a file of this size, if it is known.
    pub fn new(size: Option<u64>) -> GgmlReader {
        GgmlReader { size, ..GgmlReader::default() }
    }

    /// All parts.
    ///
    /// # Errors
    /// [`Error::Truncated`] if some are missing.
    fn parts(mut self) -> Result<Ggml, Error> {
        if self.wanted().is_some() {
            self.end()?;
        }
        let Some(Head { shape, tokens }) = self.head else {
            return Err(wrong("header", 0, "all of it", "a part"));
        };
        Ggml::new(shape, tokens, self.tensors)
    }

    /// Reads the parts in these bytes from `next` on. Returns how many of them need not be seen again.
    fn read(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        let start = self.next;
        loop {
            let n_read = usize::try_from(self.next - start).unwrap_or(usize::MAX).min(bytes.len());
            let rest = &bytes[n_read..];
            if rest.is_empty() {
                self.needed = 0;
                return Ok(n_read);
            }
            let mut reader = Reader { bytes: rest, at: 0, start: self.next };
            let outcome = match &self.head {
                None => Head::read(&mut reader).map(|head| {
                    self.head = Some(head);
                    reader.at as u64
                }),
                Some(_) => reader.tensor(self.size).map(|tensor| {
                    let end = reader.at as u64 + tensor.size_bytes;
                    self.tensors.push(tensor);
                    end
                }),
            };
            match outcome {
                Ok(n_bytes) => self.next += n_bytes,
                // A head is read from its beginning each time, so it waits for a quarter more.
                Err(Stop::NeedMore(needed)) => {
                    self.needed = needed.max(if self.head.is_none() { rest.len() as u64 / 4 * 5 } else { 0 });
                    let left = self.size.map(|size| size.saturating_sub(self.next));
                    return match left {
                        Some(left) if needed > left => {
                            let (part, found_bytes) = ("its header".into(), self.next + left);
                            Err(Error::Truncated { part, needed_bytes: self.next + needed, found_bytes })
                        }
                        left => {
                            self.needed = self.needed.min(left.unwrap_or(u64::MAX));
                            Ok(n_read)
                        }
                    };
                }
                Err(Stop::Wrong(error)) => return Err(error),
            }
            if self.tensors.len() > MAX_TENSORS {
                return Err(wrong("tensors", self.next, &format!("at most {MAX_TENSORS}"), "more"));
            }
        }
    }
}

impl Head {
    fn read(reader: &mut Reader<'_>) -> Result<Head, Stop> {
        if reader.take(MAGIC.len() as u32)? != MAGIC {
            return Err(Stop::Wrong(super::no_model()));
        }
        let mut shape = [0; 11];
        for number in &mut shape {
            *number = reader.number()?;
        }
        let (dim, text_dim) = (shape[2], shape[6]);
        if text_dim != dim {
            return Err(Stop::Wrong(wrong("n_text_state", 28, &format!("n_audio_state, {dim}"), text_dim)));
        }
        let [bands, frequencies] = [reader.number()?, reader.number()?];
        let n_floats = reader.limited("filters", bands.saturating_mul(frequencies), MAX_FLOATS)?;
        reader.take(4 * n_floats)?;
        let n_tokens = reader.number()?;
        let n_tokens = reader.limited("vocabulary", n_tokens, MAX_TOKENS)?;
        let mut tokens = Vec::new();
        for _ in 0..n_tokens {
            let n_bytes = reader.number()?;
            let n_bytes = reader.limited("token", n_bytes, MAX_TOKEN_BYTES)?;
            tokens.push(reader.take(n_bytes)?.to_vec());
        }
        Ok(Head { shape, tokens })
    }
}

impl Ggml {
    /// Reads a whole file.
    ///
    /// # Errors
    /// [`Error::Format`] naming the part and its offset, [`Error::Unsupported`] for an unknown type of a tensor,
    /// [`Error::Truncated`] if parts are missing.
    pub fn parse(bytes: &[u8]) -> Result<Ggml, Error> {
        let mut reader = GgmlReader::new(Some(bytes.len() as u64));
        reader.push(bytes)?;
        reader.parts()
    }

    fn new(shape: [u32; 11], tokens: Vec<Vec<u8>>, tensors: Vec<TensorInfo>) -> Result<Ggml, Error> {
        let [n_vocab, n_rows, dim, heads, layers, context, _, text_heads, text_layers, n_bands, _] = shape;
        // Of published models four times the width.
        let ffn_dim = |part: &str| {
            let name = format!("{part}.blocks.0.mlp.0.weight");
            let found = tensors.iter().find(|tensor| tensor.name == name);
            found.and_then(|tensor| tensor.shape.first().copied()).unwrap_or(u64::from(dim) * 4)
        };
        let json = json!({
            "model_type": super::WHISPER,
            "d_model": dim,
            "num_mel_bins": n_bands,
            "max_source_positions": n_rows,
            "max_target_positions": context,
            "vocab_size": n_vocab,
            "encoder_layers": layers,
            "encoder_attention_heads": heads,
            "encoder_ffn_dim": ffn_dim("encoder"),
            "decoder_layers": text_layers,
            "decoder_attention_heads": text_heads,
            "decoder_ffn_dim": ffn_dim("decoder"),
        });
        let config = ConfigJson::parse(json.to_string().as_bytes())?;
        Ok(Ggml { config, tokens, n_vocab, tensors })
    }

    /// The tokenizer: tokens of text by their ranks, then those with a meaning.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the number of tokens is that of no Whisper model.
    pub fn tokenizer(&self) -> Result<Tokenizer, Error> {
        let n_text = self.tokens.len() as u32;
        let n_languages = self.n_vocab.checked_sub(n_text).and_then(|n| n.checked_sub(N_MARKS));
        let Some(languages) = n_languages.and_then(|n| LANGUAGES.get(..n as usize)) else {
            return Err(Error::Tokenizer {
                field: "n_vocab".into(),
                expected: format!("{N_MARKS} to {} more than the {n_text} of text", N_MARKS as usize + LANGUAGES.len()),
                found: self.n_vocab.to_string(),
            });
        };
        let named = ["endoftext", "startoftranscript"].into_iter().chain(languages.iter().map(|(code, _)| *code));
        let named = named.chain(MARKS).map(|name| format!("<|{name}|>"));
        let times = (0..N_TIMESTAMPS).map(|step| format!("<|{:.2}|>", f64::from(step) * 0.02));
        let mut tokens: Vec<String> = self.tokens.iter().map(|token| spelled(token)).collect();
        let mut token_types = vec![TokenType::Normal; tokens.len()];
        tokens.extend(named.chain(times));
        token_types.resize(tokens.len(), TokenType::Control);
        Tokenizer::from_vocab(Vocab {
            model: "gpt2".into(),
            pre: Some("gpt-2".into()),
            merges: merges(&self.tokens),
            tokens,
            token_types,
            eos_id: Some(n_text),
            ..Vocab::default()
        })
    }

    /// Settings of texts, which the file does not have: those of OpenAI's `whisper`.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn generation(&self, tokenizer: &Tokenizer) -> Result<SpeechGeneration, Error> {
        let end = self.tokens.len() as u32;
        let mut suppressed = Vec::new();
        for (symbol, is_note) in symbols() {
            for text in [symbol.to_owned(), format!(" {symbol}")] {
                match tokenizer.encode(&text, false)?[..] {
                    [id] => suppressed.push(id),
                    [id, ..] if is_note => suppressed.push(id),
                    _ => {}
                }
            }
        }
        // A hyphen or an apostrophe may be within a word, but not begin one.
        for text in [" -", " '"] {
            suppressed.extend(tokenizer.encode(text, false)?.first());
        }
        suppressed.sort_unstable();
        suppressed.dedup();
        let space = tokenizer.encode(" ", false)?;
        Ok(SpeechGeneration {
            end_id: Some(end),
            suppressed,
            suppressed_first: space.into_iter().chain([end]).collect(),
            is_multilingual: Some(end >= N_MULTILINGUAL),
            max_first_timestamp: 50,
            ..SpeechGeneration::default()
        })
    }
}

/// Symbols of subtitles that are not spoken, and whether they stand for music, whose first token is enough.
fn symbols() -> impl Iterator<Item = (&'static str, bool)> {
    const SINGLE: &str = "\" # ( ) * + / : ; < = > @ [ \\ ] ^ _ ` { | } ~ 「 」 『 』";
    const SEVERAL: &str = "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪";
    const NOTES: &str = "♩ ♪ ♫ ♬ ♭ ♮ ♯";
    let of = |list: &'static str, is_note| list.split(' ').map(move |symbol| (symbol, is_note));
    of(SINGLE, false).chain(of(SEVERAL, false)).chain(of(NOTES, true))
}

/// The merge that makes each token, in their order: of the two parts that are left when all earlier ones are applied.
fn merges(tokens: &[Vec<u8>]) -> Vec<String> {
    let ranks: HashMap<&[u8], usize> = tokens.iter().enumerate().map(|(rank, token)| (&token[..], rank)).collect();
    let merge = |(rank, token): (usize, &Vec<u8>)| {
        // Where each part begins, and the end.
        let mut cuts: Vec<usize> = (0..=token.len()).collect();
        while cuts.len() > 3 {
            let rank_at = |i: usize| ranks.get(&token[cuts[i - 1]..cuts[i + 1]]).copied().filter(|&other| other < rank);
            let next = (1..cuts.len() - 1).filter_map(|i| Some((rank_at(i)?, i))).min()?;
            cuts.remove(next.1);
        }
        let [_, middle, _] = cuts[..] else { return None };
        Some(format!("{} {}", spelled(&token[..middle]), spelled(&token[middle..])))
    };
    tokens.iter().enumerate().filter_map(merge).collect()
}

/// The part that a tensor belongs to, and our name of it.
pub(super) fn our_name(name: &str) -> Option<(&str, String)> {
    let (part, rest) = name.split_once('.')?;
    let plain = match (part, rest) {
        (_, "positional_embedding") => return Some((part, "position_embd.weight".into())),
        ("encoder", rest) => rest.replacen("ln_post.", "output_norm.", 1),
        (_, rest) if rest.starts_with("ln.") => rest.replacen("ln.", "output_norm.", 1),
        (_, rest) => rest.replacen("token_embedding.", "token_embd.", 1),
    };
    let (stem, suffix) = plain.rsplit_once('.')?;
    let renamed = |stem: &str| {
        NAMES.iter().find(|(theirs, _)| *theirs == stem).map_or(stem.to_owned(), |(_, ours)| (*ours).into())
    };
    Some((
        part,
        match stem.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
            Some((layer, stem)) => format!("blk.{layer}.{}.{suffix}", renamed(stem)),
            None => format!("{}.{suffix}", renamed(stem)),
        },
    ))
}

/// Why a part is not read.
enum Stop {
    /// It has this many bytes or more.
    NeedMore(u64),
    Wrong(Error),
}

/// Bytes of a part that may end within it.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where the bytes are in the file.
    start: u64,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: u32) -> Result<&'a [u8], Stop> {
        let end = self.at + n as usize;
        let found = self.bytes.get(self.at..end).ok_or(Stop::NeedMore(end as u64))?;
        self.at = end;
        Ok(found)
    }

    fn number(&mut self) -> Result<u32, Stop> {
        let mut number = [0; 4];
        number.copy_from_slice(self.take(4)?);
        Ok(u32::from_le_bytes(number))
    }

    fn limited(&self, field: &str, number: u32, most: u32) -> Result<u32, Stop> {
        match number <= most {
            true => Ok(number),
            false => {
                let at = self.start + self.at as u64 - 4;
                Err(Stop::Wrong(wrong(field, at, &format!("at most {most}"), number)))
            }
        }
    }

    /// A tensor's description, in a file of this size.
    fn tensor(&mut self, file_size: Option<u64>) -> Result<TensorInfo, Stop> {
        let start = self.start;
        let refused = |error| Err(Stop::Wrong(error));
        let [rank, name_bytes, kind] = [self.number()?, self.number()?, self.number()?];
        if !(1..=MAX_RANK).contains(&rank) {
            return refused(wrong("dimensions of a tensor", start, &format!("1 to {MAX_RANK}"), rank));
        }
        let name_bytes = self.limited("name of a tensor", name_bytes, MAX_NAME_BYTES)?;
        let mut shape = (0..rank).map(|_| self.number().map(u64::from)).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        let name = self.take(name_bytes)?;
        let Ok(name) = std::str::from_utf8(name) else {
            return refused(wrong("name of a tensor", start, "UTF-8", name.escape_ascii()));
        };
        let Some(block_type) = BlockType::from_ggml_id(kind) else {
            return refused(Error::Unsupported {
                format: "ggml",
                field: format!("type of tensor `{}`", name.escape_debug()),
                found: kind.to_string(),
                supported: "those of GGUF".into(),
            });
        };
        let has_whole_rows = shape.last().is_some_and(|row| row.is_multiple_of(block_type.block_len()));
        let offset = self.start + self.at as u64;
        let left = file_size.unwrap_or(UNKNOWN_LEN).saturating_sub(offset);
        let size_bytes = block_type.size_bytes(&shape).filter(|size| has_whole_rows && (1..=left).contains(size));
        let Some(size_bytes) = size_bytes else {
            let expected = format!("dimensions within the file's last {left} bytes");
            let field = format!("tensor `{}`", name.escape_debug());
            return refused(wrong(&field, start, &expected, format!("{shape:?} of {block_type}")));
        };
        // Biases of convolutions are columns.
        if shape.len() == 2 && shape[1] == 1 && name.ends_with(".bias") {
            shape.pop();
        }
        Ok(TensorInfo { name: name.into(), shape, block_type, offset, size_bytes })
    }
}

fn wrong(field: &str, offset: u64, expected: &str, found: impl ToString) -> Error {
    Error::Format { format: "ggml", field: field.into(), offset, expected: expected.into(), found: found.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_are_found_from_ranks() {
        let tokens = ["a", "b", "c", "ab", "bc", "abc", " ", " abc", "abcab"].map(|token| token.as_bytes().to_vec());
        assert_eq!(merges(&tokens), ["a b", "b c", "ab c", "\u{120} abc", "abc ab"]);
    }

    #[test]
    fn names_are_those_of_text_models() {
        for (theirs, part, ours) in [
            ("encoder.conv1.weight", "encoder", "conv.1.weight"),
            ("encoder.positional_embedding", "encoder", "position_embd.weight"),
            ("encoder.blocks.3.mlp_ln.bias", "encoder", "blk.3.ffn_norm.bias"),
            ("encoder.ln_post.weight", "encoder", "output_norm.weight"),
            ("decoder.blocks.11.cross_attn.key.weight", "decoder", "blk.11.cross_attn_k.weight"),
            ("decoder.blocks.0.mlp.2.weight", "decoder", "blk.0.ffn_down.weight"),
            ("decoder.ln.bias", "decoder", "output_norm.bias"),
            ("decoder.token_embedding.weight", "decoder", "token_embd.weight"),
        ] {
            assert_eq!(our_name(theirs), Some((part, ours.into())), "{theirs}");
        }
    }
}
