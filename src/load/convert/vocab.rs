//! The vocabulary of a `tokenizer.json` under GGUF's keys.
//!
//! Byte-level BPE becomes `gpt2`, BPE converted from SentencePiece `llama`, Gemma 4's `gemma4`. How texts are split
//! and which tokens surround them is found by trial: the vocabulary is read back and must produce the same ids as the
//! folder's tokenizer.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value as Json;

use super::folder::set_texts;
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::{Value, ValueType};
use crate::formats::gguf_writer::GgufHeader;
use crate::formats::text::read_json;
use crate::load::huggingface::{CONFIG, TOKENIZER, TOKENIZER_CONFIG, read};
use crate::tokenizer::{TokenType, Tokenizer, TokenizerConfig, Vocab};

/// GGUF's pre-tokenizer names, the usual ones first; and whether words that are tokens skip the merges.
const SPLITS: [(&str, bool); 28] = [
    ("qwen2", false),
    ("llama-bpe", true),
    ("gpt-2", false),
    ("smollm", false),
    ("tekken", true),
    ("gpt-4o", false),
    ("dbrx", false),
    ("deepseek-r1-qwen", false),
    ("deepseek-v3", false),
    ("qwen35", false),
    ("command-r", false),
    ("mpt", false),
    ("glm4", true),
    ("granite-embed-multi-97m", true),
    ("falcon", false),
    ("deepseek-llm", false),
    ("deepseek-coder", false),
    ("tiny_aya", false),
    ("bloom", false),
    ("viking", false),
    ("superbpe", false),
    ("youtu", true),
    ("minicpm5", true),
    ("exaone-moe", false),
    ("seed-coder", false),
    ("ufakzeka", false),
    ("jais-2", false),
    ("spark2_5", false),
];

/// Texts that tell pre-tokenizers apart: numbers, case, contractions, marks, spaces, lines, scripts, symbols.
const TEXTS: [&str; 14] = [
    "Hello world",
    " Hello  World   and    more",
    "It's 'tis I'LL we'Ve DON'T",
    "1 12 123 1234 12345678 3.14 1,000 ½ ²",
    "a\nb\r\n\r\nc\n\n\nd \n e\t\tf  \n",
    "camelCase HTTPServer ABCdef snake_case x86_64 été",
    "e\u{301}cole ñ \u{1112}\u{1161}\u{11ab} ﬁ",
    "你好，世界。こんにちは 안녕하세요",
    "Привет мир, χαίρε κόσμε, नमस्ते दुनिया, สวัสดี",
    "🚀 🤦🏽\u{200d}♂️ «quotes» “curly” — dash…",
    "fn main() { println!(\"{}\", a[0]); } // ===== <b>&amp;</b>",
    "!!! ??? ... --- ,,, ((( ))) /// a/b \\n $5 #1 @x",
    "  leading and trailing  ",
    "\u{a0}\u{3000}\u{200b}x",
];

/// The vocabulary of a folder; `None` without any. `tokenizer` is the result of loading the folder's tokenizer.
pub(super) fn of_folder(
    folder: &Path,
    tokenizer: &Result<Tokenizer, Error>,
    vocab_size: u32,
) -> Result<Option<Vocab>, Error> {
    let path = folder.join(TOKENIZER);
    if !path.exists() {
        let other = ["tokenizer.model", "vocab.json", "spiece.model", "tekken.json", TOKENIZER_CONFIG];
        return match other.into_iter().find(|name| folder.join(name).exists()) {
            None => Ok(None),
            Some(name) => Err(unsupported(TOKENIZER, format!("missing beside `{name}`"), "a tokenizer.json")),
        };
    }
    let tokenizer = match tokenizer {
        Ok(tokenizer) => tokenizer,
        Err(error) => return Err(unsupported(TOKENIZER, format!("invalid: {error}"), "a valid tokenizer.json")),
    };
    let json: Json =
        read_json(&read(&path)?).map_err(|fault| unsupported(TOKENIZER, fault.message, "a JSON object"))?;
    let names = match folder.join(TOKENIZER_CONFIG) {
        path if path.exists() => read(&path)?,
        _ => b"{}".to_vec(),
    };
    let config = ConfigJson::parse(&read(&folder.join(CONFIG))?)?;
    let base = vocab(&json, &names, &config, tokenizer, vocab_size)?;
    let ignore_merges = json.pointer("/model/ignore_merges").and_then(Json::as_bool).unwrap_or(false);
    let candidates: Vec<Vocab> = match base.model.as_str() {
        "gpt2" => SPLITS
            .iter()
            .filter(|(_, ignores)| *ignores == ignore_merges)
            .map(|(name, _)| Vocab { pre: Some((*name).into()), ..base.clone() })
            .collect(),
        "gemma4" => vec![base],
        _ => [true, false].map(|prefix| Vocab { add_space_prefix: Some(prefix), ..base.clone() }).into(),
    };
    match candidates.into_iter().find(|candidate| gives_the_same(candidate, tokenizer)) {
        Some(found) => Ok(Some(found)),
        None => Err(unsupported(TOKENIZER, "a pre-tokenizer without a name in GGUF".into(), "named ones")),
    }
}

/// Whether a vocabulary and a tokenizer produce the same ids.
fn gives_the_same(vocab: &Vocab, tokenizer: &Tokenizer) -> bool {
    let Ok(other) = Tokenizer::from_vocab(vocab.clone()) else { return false };
    TEXTS.iter().all(|text| {
        let ids = tokenizer.encode(text, true);
        matches!((ids, other.encode(text, true)), (Ok(ids), Ok(others)) if ids == others)
    })
}

fn unsupported(field: &str, found: String, supported: &str) -> Error {
    Error::Unsupported { format: "quantize", field: field.into(), found, supported: supported.into() }
}

/// The vocabulary without its pre-tokenizer.
fn vocab(
    json: &Json,
    names: &[u8],
    config: &ConfigJson,
    tokenizer: &Tokenizer,
    vocab_size: u32,
) -> Result<Vocab, Error> {
    let model = json.get("model").unwrap_or(&Json::Null);
    let Some(entries) = model.get("vocab").and_then(Json::as_object).filter(|_| model.get("merges").is_some()) else {
        let kind = model.get("type").and_then(Json::as_str).unwrap_or("none");
        return Err(unsupported("tokenizer.json model", format!("`{}`", kind.escape_debug()), "BPE"));
    };
    let is_byte_level = tokenizer.algorithm() == "byte-level BPE";
    let unk = model.get("unk_token").and_then(Json::as_str);
    // Every embedding row gets a token: ids missing in the file become unused tokens.
    let mut tokens: Vec<String> = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
    let mut token_types = vec![TokenType::Unused; tokens.len()];
    let mut put = |id: Option<u64>, text: &str, kind: TokenType| {
        let slot = id.and_then(|id| usize::try_from(id).ok()).filter(|&id| id < tokens.len());
        let Some(id) = slot else {
            let supported = format!("ids below vocab_size, {vocab_size}");
            return Err(unsupported("tokenizer.json", format!("id {id:?} of `{}`", text.escape_debug()), &supported));
        };
        (tokens[id], token_types[id]) = (text.to_owned(), kind);
        Ok(())
    };
    for (text, id) in entries {
        let is_byte = text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
        let kind = match () {
            _ if unk == Some(text) && !is_byte_level => TokenType::Unknown,
            _ if is_byte && !is_byte_level => TokenType::Byte,
            _ => TokenType::Normal,
        };
        put(id.as_u64(), text, kind)?;
    }
    for token in json.get("added_tokens").and_then(Json::as_array).into_iter().flatten() {
        let text = token.get("content").and_then(Json::as_str).unwrap_or_default();
        let kind = match token.get("special").and_then(Json::as_bool) {
            _ if unk == Some(text) && !is_byte_level => TokenType::Unknown,
            Some(true) => TokenType::Control,
            _ => TokenType::UserDefined,
        };
        put(token.get("id").and_then(Json::as_u64), text, kind)?;
    }
    let merges: Vec<String> = model
        .get("merges")
        .and_then(Json::as_array)
        .into_iter()
        .flatten()
        .map(|merge| match merge {
            Json::Array(halves) => halves.iter().filter_map(Json::as_str).collect::<Vec<_>>().join(" "),
            other => other.as_str().unwrap_or_default().to_owned(),
        })
        .collect();
    let ids: HashMap<&str, u32> = (0..).zip(&tokens).map(|(id, token)| (token.as_str(), id)).collect();
    let id_of = |text: Option<&str>| text.and_then(|text| ids.get(text).copied());
    let named = TokenizerConfig::from_json(names)?;
    let names: Json = read_json(names).unwrap_or_default();
    let name = |key: &str| match names.get(key) {
        Some(Json::String(name)) => Some(name.clone()),
        other => other.and_then(|token| token.get("content")?.as_str().map(str::to_owned)),
    };
    // The first of several end tokens is the usual one.
    let number = |key: &str| match config.get(key) {
        Ok(Some(Json::Array(ids))) => ids.first().and_then(Json::as_u64),
        Ok(Some(id)) => id.as_u64(),
        _ => None,
    };
    let id_under = |key: &str| number(key).and_then(|id| u32::try_from(id).ok()).filter(|&id| id < vocab_size);
    let bos_id = id_of(named.bos_token.as_deref()).or_else(|| id_under("bos_token_id"));
    let eos_id = id_of(named.eos_token.as_deref()).or_else(|| id_under("eos_token_id"));
    // The tokens around a text.
    let (around, plain) = (tokenizer.encode("a", true)?, tokenizer.encode("a", false)?);
    let at = around.windows(plain.len().max(1)).position(|window| window == plain).unwrap_or_default();
    let (before, after) = (&around[..at], around.get(at + plain.len()..).unwrap_or_default());
    let is_around = |ids: &[u32], id: Option<u32>| ids.is_empty() || Some(ids) == id.as_ref().map(std::slice::from_ref);
    if !is_around(before, bos_id) || !is_around(after, eos_id) {
        let found = format!("{before:?} before a text and {after:?} after it");
        return Err(unsupported("tokenizer.json post_processor", found, "BOS before, EOS after"));
    }
    let (add_bos, add_eos) = (Some(!before.is_empty()), Some(!after.is_empty()));
    let unk_id = id_of(unk).or_else(|| id_of(name("unk_token").as_deref()));
    let pad_id = id_of(name("pad_token").as_deref());
    let is_gemma4 = ["<|turn>", "<turn|>"].iter().all(|name| tokenizer.special_id(name).is_some());
    let (model, merges, scores) = match (is_byte_level, is_gemma4) {
        (true, _) => ("gpt2", merges, vec![]),
        (false, true) => ("gemma4", merges, vec![]),
        (false, false) => ("llama", vec![], scores(&tokens, &token_types, &merges)),
    };
    Ok(Vocab {
        model: model.into(),
        merges,
        scores,
        bos_id,
        eos_id,
        unk_id,
        pad_id,
        add_bos,
        add_eos,
        tokens,
        token_types,
        ..Vocab::default()
    })
}

/// SentencePiece's scores: earlier merges score higher. Tokens without a merge score lowest.
fn scores(tokens: &[String], token_types: &[TokenType], merges: &[String]) -> Vec<f32> {
    let mut ranks = HashMap::new();
    for (rank, merge) in merges.iter().enumerate() {
        // Tokens made by a merge contain no spaces.
        ranks.entry(merge.replacen(' ', "", 1)).or_insert(rank);
    }
    let score = |(token, kind): (&String, &TokenType)| match (ranks.get(token), kind) {
        (Some(&rank), TokenType::Normal | TokenType::UserDefined) => -(rank as f32),
        (None, TokenType::Normal) => -(merges.len() as f32) - 1.0,
        _ => 0.0,
    };
    tokens.iter().zip(token_types).map(score).collect()
}

pub(super) fn set(header: &mut GgufHeader, vocab: &Vocab) -> Result<(), Error> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    header.set(&key("model"), Value::Str(&vocab.model))?;
    if let Some(pre) = &vocab.pre {
        header.set(&key("pre"), Value::Str(pre))?;
    }
    set_texts(header, &key("tokens"), &vocab.tokens)?;
    if !vocab.scores.is_empty() {
        let scores = vocab.scores.iter().map(|&score| Value::F32(score));
        header.set_array(&key("scores"), ValueType::F32, scores)?;
    }
    let types = vocab.token_types.iter().map(|&kind| Value::I32(kind as i32));
    header.set_array(&key("token_type"), ValueType::I32, types)?;
    if !vocab.merges.is_empty() {
        set_texts(header, &key("merges"), &vocab.merges)?;
    }
    let ids = [
        ("bos_token_id", vocab.bos_id),
        ("eos_token_id", vocab.eos_id),
        ("unknown_token_id", vocab.unk_id),
        ("padding_token_id", vocab.pad_id),
    ];
    for (name, id) in ids {
        if let Some(id) = id {
            header.set(&key(name), Value::U32(id))?;
        }
    }
    let flags = [
        ("add_bos_token", vocab.add_bos),
        ("add_eos_token", vocab.add_eos),
        ("add_space_prefix", vocab.add_space_prefix),
    ];
    for (name, flag) in flags {
        if let Some(flag) = flag {
            header.set(&key(name), Value::Bool(flag))?;
        }
    }
    Ok(())
}
