//! BPE over characters from a `tokenizer.json`, built from our own parts: converted SentencePiece models such as
//! Llama's, Mistral's and Gemma's.

use std::collections::HashMap;

use serde_json::Value;

use super::parts::{ModelVocab, PipelineParts, strict_flag};
use super::{ConfiguredIds, TokenizerFile, has_affixes, not_ours};
use crate::error::Error;
use crate::tokenizer::bpe::{self, Bpe, Characters};
use crate::tokenizer::{Algorithm, Tokenizer};

/// # Errors
/// [`Error::Unsupported`] naming an unsupported component.
pub(super) fn load(file: &TokenizerFile, named: &ConfiguredIds) -> Result<Tokenizer, Error> {
    let model = file.model();
    if has_affixes(model) {
        return Err(not_ours("model", "tokens that continue or end words", "BPE without these"));
    }
    if !model.get("vocab").is_some_and(Value::is_object) {
        return Err(not_ours("model.vocab", "not an object", "an object of ids"));
    }
    let vocab = ModelVocab::new(file);
    let parts = PipelineParts::new(file, &vocab)?;
    let characters = Characters {
        ids: characters(&vocab),
        byte_ids: vocab.byte_ids(model)?,
        fuse_unk: strict_flag(model, "model", "fuse_unk")?,
    };
    let words = if strict_flag(model, "model", "ignore_merges")? { words(&vocab) } else { HashMap::new() };
    let unk_id = unk_id(&vocab, model)?;
    let merges = merges(&vocab, model)?;
    parts.tokenizer(file, named, unk_id, |pipeline| {
        Algorithm::Bpe(Box::new(Bpe::over_characters(characters, pipeline, merges, words, unk_id)))
    })
}

fn characters(vocab: &ModelVocab) -> HashMap<char, u32> {
    let only_char = |text: &str| text.chars().next().filter(|c| c.len_utf8() == text.len());
    vocab.of_text().filter_map(|(text, id)| Some((only_char(text)?, id))).collect()
}

fn words(vocab: &ModelVocab) -> HashMap<Box<[u8]>, u32> {
    vocab.of_text().map(|(text, id)| (text.as_bytes().into(), id)).collect()
}

fn unk_id(vocab: &ModelVocab, model: &Value) -> Result<Option<u32>, Error> {
    match model.get("unk_token") {
        None | Some(Value::Null) => Ok(None),
        Some(unk) => match unk.as_str().and_then(|unk| vocab.id(unk)) {
            Some(id) => Ok(Some(id)),
            None => Err(not_ours("model.unk_token", &unk.to_string(), "a token of model.vocab")),
        },
    }
}

fn merges(vocab: &ModelVocab, model: &Value) -> Result<bpe::Merges, Error> {
    let listed = model.get("merges").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    // In the crate the last of duplicate pairs applies.
    let pairs = listed.iter().enumerate().rev().map(|(rank, merge)| {
        let halves = match merge {
            Value::String(pair) => pair.split_once(' '),
            pair => pair.get(0).and_then(Value::as_str).zip(pair.get(1).and_then(Value::as_str)),
        };
        let field = || format!("model.merges[{rank}]");
        let ranked = u32::try_from(rank).ok().zip(halves);
        let (rank, (left, right)) = ranked.ok_or_else(|| not_ours(&field(), &merge.to_string(), "pairs of tokens"))?;
        Ok((rank, left, right))
    });
    bpe::merges(vocab.tokens.iter().map(|(&text, &(id, kind))| (id, text, kind)), pairs)
}
