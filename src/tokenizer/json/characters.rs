//! BPE over characters from a `tokenizer.json`, built from our own parts: what SentencePiece models such as Llama's,
//! Mistral's and Gemma's are converted to.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::decoder::Decoder;
use super::{File, added_tokens, has_affixes, kind, not_ours, steps, surroundings};
use crate::error::Error;
use crate::tokenizer::bpe::{self, Bpe, Characters};
use crate::tokenizer::decode::{Pieces, Strip};
use crate::tokenizer::pipeline::{Cut, Pipeline, Prepend, Rewrite, rewrite};
use crate::tokenizer::special::{Matchers, Rule};
use crate::tokenizer::vocab::{TokenType, Vocab, shown};
use crate::tokenizer::{Algorithm, Tokenizer};

/// # Errors
/// [`Error::Unsupported`] naming the part of the pipeline that is not one of those known here.
pub(super) fn load(file: &File, bos_id: Option<u32>, eos_id: Option<u32>) -> Result<Tokenizer, Error> {
    let (json, model) = (&file.json, file.model());
    if has_affixes(model) {
        return Err(not_ours("model", "tokens that continue or end words", "BPE without"));
    }
    let vocab = ModelVocab::new(file, model)?;
    let rewrites = rewrites(json.get("normalizer"))?;
    let added = Added::all(json, &vocab, &rewrites)?;
    let cuts = cuts(json.get("pre_tokenizer"), &rewrites, added.iter().any(|token| token.normalized))?;
    let pieces = pieces(file, &added)?;
    let around = surroundings(json.get("post_processor"))?;

    let characters = Characters {
        ids: vocab.characters(),
        byte_ids: vocab.byte_ids(strict_flag(model, "model", "byte_fallback")?)?,
        fuse_unk: strict_flag(model, "model", "fuse_unk")?,
    };
    let words = if strict_flag(model, "model", "ignore_merges")? { vocab.words() } else { HashMap::new() };
    let unk_id = vocab.unk_id(model)?;
    let matchers = |normalized: bool| {
        Matchers::by_rule(
            added
                .iter()
                .filter(move |token| token.normalized == normalized)
                .map(|token| (token.id, token.text.as_str(), token.rule)),
        )
    };
    let pipeline = Pipeline { rewrites, tokens: matchers(true)?, cuts };
    let bpe = Bpe::over_characters(characters, pipeline, vocab.merges(model)?, words, unk_id);

    let vocab = Vocab {
        model: "gpt2".into(),
        tokens: file.tokens.iter().map(|token| token.text.clone()).collect(),
        token_types: file.tokens.iter().map(|token| token.kind).collect(),
        bos_id,
        eos_id,
        unk_id,
        ..Vocab::default()
    };
    Tokenizer::own(&vocab.checked()?, Algorithm::Bpe(Box::new(bpe)), matchers(false)?, pieces, around)
}

/// `model.vocab`: the tokens that text may become. Added tokens that are not among them are only found by name.
struct ModelVocab<'j> {
    tokens: HashMap<&'j str, (u32, TokenType)>,
}

impl<'j> ModelVocab<'j> {
    fn new(file: &'j File, model: &'j Value) -> Result<Self, Error> {
        let names = model.get("vocab").and_then(Value::as_object);
        let names = names.ok_or_else(|| not_ours("model.vocab", "no object", "an object of ids"))?;
        let tokens = (0u32..).zip(&file.tokens).filter(|(_, token)| names.contains_key(&token.text));
        Ok(ModelVocab { tokens: tokens.map(|(id, token)| (token.text.as_str(), (id, token.kind))).collect() })
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.tokens.get(text).map(|token| token.0)
    }

    /// Tokens that text may become without their names being parsed.
    fn of_text(&self) -> impl Iterator<Item = (&'j str, u32)> {
        self.tokens.iter().filter(|(_, token)| token.1 != TokenType::Control).map(|(&text, token)| (text, token.0))
    }

    fn characters(&self) -> HashMap<char, u32> {
        let only_char = |text: &str| text.chars().next().filter(|c| c.len_utf8() == text.len());
        self.of_text().filter_map(|(text, id)| Some((only_char(text)?, id))).collect()
    }

    fn words(&self) -> HashMap<Box<[u8]>, u32> {
        self.of_text().map(|(text, id)| (text.as_bytes().into(), id)).collect()
    }

    /// The 256 byte tokens. With only some of them the crate lets unknown tokens change places with bytes.
    fn byte_ids(&self, byte_fallback: bool) -> Result<Option<Box<[u32; 256]>>, Error> {
        let spelled = (0..=255u8).map(|byte| self.tokens.get(format!("<0x{byte:02X}>").as_str()));
        let found: Vec<u32> = spelled
            .flatten()
            .filter(|token| byte_fallback && token.1 != TokenType::Control)
            .map(|token| token.0)
            .collect();
        let n_found = found.len();
        match <Box<[u32; 256]>>::try_from(found.into_boxed_slice()) {
            Ok(ids) => Ok(Some(ids)),
            Err(_) if n_found == 0 => Ok(None),
            Err(_) => Err(not_ours("model.byte_fallback", &format!("{n_found} byte tokens"), "none or all 256")),
        }
    }

    fn unk_id(&self, model: &Value) -> Result<Option<u32>, Error> {
        match model.get("unk_token") {
            None | Some(Value::Null) => Ok(None),
            Some(unk) => match unk.as_str().and_then(|unk| self.id(unk)) {
                Some(id) => Ok(Some(id)),
                None => Err(not_ours("model.unk_token", &unk.to_string(), "a token of model.vocab")),
            },
        }
    }

    fn merges(&self, model: &Value) -> Result<bpe::Merges, Error> {
        let listed = model.get("merges").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        // The crate lets the last of a pair listed twice count.
        let pairs = listed.iter().enumerate().rev().map(|(rank, merge)| {
            let halves = match merge {
                Value::String(pair) => pair.split_once(' '),
                pair => pair.get(0).and_then(Value::as_str).zip(pair.get(1).and_then(Value::as_str)),
            };
            let field = || format!("model.merges[{rank}]");
            let ranked = u32::try_from(rank).ok().zip(halves);
            let (rank, (left, right)) =
                ranked.ok_or_else(|| not_ours(&field(), &merge.to_string(), "pairs of tokens"))?;
            Ok((rank, left, right))
        });
        bpe::merges(self.tokens.iter().map(|(&text, &(id, kind))| (id, text, kind)), pairs)
    }
}

/// One of `added_tokens`.
struct Added {
    id: u32,
    /// As it is found in a text: rewritten if it is found in rewritten text.
    text: String,
    normalized: bool,
    rule: Rule,
}

impl Added {
    fn all(json: &Value, vocab: &ModelVocab, rewrites: &[Rewrite]) -> Result<Vec<Self>, Error> {
        let mut all: Vec<Added> = Vec::new();
        let mut seen = HashSet::new();
        let mut next_id = vocab.tokens.len() as u64;
        for (at, token) in added_tokens(json).enumerate() {
            let field = format!("added_tokens[{at}]");
            let refuse = |known: &str| not_ours(&field, &token.to_string(), known);
            let content = token.get("content").and_then(Value::as_str).unwrap_or_default();
            // The crate numbers the tokens that are not in the model, whatever the file says.
            let id = vocab.id(content).map_or(next_id, u64::from);
            next_id += u64::from(vocab.id(content).is_none());
            if token.get("id").and_then(Value::as_u64) != Some(id) {
                return Err(refuse("ids that continue those of model.vocab"));
            }
            let flag = |name: &str| token.get(name).and_then(Value::as_bool).ok_or_else(|| refuse("all five flags"));
            let normalized = flag("normalized")?;
            let text = if normalized { rewrite(rewrites, content) } else { content.to_owned() };
            if text.is_empty() || !seen.insert((normalized, text.clone())) {
                return Err(refuse("tokens that stay different and do not vanish when they are normalized"));
            }
            let rule = Rule {
                special: flag("special")?,
                single_word: flag("single_word")?,
                lstrip: flag("lstrip")?,
                rstrip: flag("rstrip")?,
            };
            let id = u32::try_from(id).map_err(|_| refuse("ids of 32 bits"))?;
            all.push(Added { id, text, normalized, rule });
        }
        Ok(all)
    }
}

/// The steps of the normalizer.
fn rewrites(component: Option<&Value>) -> Result<Vec<Rewrite>, Error> {
    let read = |step: &Value| {
        let text = |field: &str| step.get(field).and_then(Value::as_str).map(str::to_owned);
        match kind(step) {
            "Prepend" => Some(Rewrite::Prepend(text("prepend")?)),
            "Replace" => Some(Rewrite::Replace { pattern: pattern(step)?, content: text("content")? }),
            "NFC" => Some(Rewrite::Nfc),
            _ => None,
        }
    };
    let ours = "Prepend, Replace of a text, NFC";
    let steps = steps(component, "normalizers").into_iter();
    steps.map(|step| read(step).ok_or_else(|| not_ours("normalizer", &step.to_string(), ours))).collect()
}

/// The steps of the pre-tokenizer.
fn cuts(component: Option<&Value>, rewrites: &[Rewrite], tokens_cut_rewritten: bool) -> Result<Vec<Cut>, Error> {
    let mut cuts = Vec::new();
    for step in steps(component, "pretokenizers") {
        let refuse = |known: &str| not_ours("pre_tokenizer", &step.to_string(), known);
        let ours = "Metaspace, Split at a text that is kept";
        let cut = match kind(step) {
            "Metaspace" => metaspace(step),
            "Split" if step.get("invert") == Some(&Value::Bool(false)) => split(step),
            _ => None,
        };
        let cut = cut.ok_or_else(|| refuse(ours))?;
        if matches!(cut, Cut::Metaspace { prepend: Prepend::First, .. }) {
            // The crate asks where a piece begins in the text as it was before rewriting. That is certain if nothing was
            // rewritten, or if what was rewritten is still in one piece.
            let unchanged = rewrites.is_empty() && cuts.iter().all(|cut| matches!(cut, Cut::Split { .. }));
            let whole = !tokens_cut_rewritten && cuts.is_empty();
            if !(unchanged || whole) {
                return Err(refuse("the prepend_scheme first where text is not rewritten before it is cut"));
            }
        }
        cuts.push(cut);
    }
    Ok(cuts)
}

fn metaspace(step: &Value) -> Option<Cut> {
    let mut replacement = step.get("replacement")?.as_str()?.chars();
    let (Some(replacement), None) = (replacement.next(), replacement.next()) else { return None };
    let prepend = match step.get("prepend_scheme").map(Value::as_str) {
        None | Some(Some("always")) => Prepend::Always,
        Some(Some("first")) => Prepend::First,
        Some(Some("never")) => Prepend::Never,
        Some(_) => return None,
    };
    match (step.get("add_prefix_space"), prepend) {
        (None | Some(Value::Null | Value::Bool(true)), _) | (Some(Value::Bool(false)), Prepend::Never) => {}
        _ => return None,
    }
    let split = match step.get("split") {
        None | Some(Value::Null) => true,
        Some(split) => split.as_bool()?,
    };
    Some(Cut::Metaspace { replacement, prepend, split })
}

fn split(step: &Value) -> Option<Cut> {
    let (before, behind) = match step.get("behavior")?.as_str()? {
        "Isolated" => (true, true),
        "MergedWithPrevious" => (false, true),
        "MergedWithNext" => (true, false),
        _ => return None,
    };
    Some(Cut::Split { pattern: pattern(step)?, before, behind })
}

/// A pattern that is a text.
fn pattern(step: &Value) -> Option<String> {
    let pattern = step.get("pattern")?.get("String")?.as_str()?;
    (!pattern.is_empty()).then(|| pattern.to_owned())
}

/// What tokens are decoded to.
fn pieces(file: &File, added: &[Added]) -> Result<Pieces, Error> {
    let component = file.json.get("decoder");
    let kinds: Vec<&str> = steps(component, "decoders").into_iter().map(kind).collect();
    let order: Option<Vec<usize>> =
        kinds.iter().map(|kind| ["Replace", "ByteFallback", "Fuse", "Strip"].iter().position(|k| k == kind)).collect();
    // Steps in another order work on more than one token, or on what is no text yet.
    let in_order = order.is_some_and(|order| order.is_sorted_by(|a, b| a < b || (*a, *b) == (0, 0)));
    let ours = "Metaspace, or Replace, ByteFallback, Fuse, Strip in that order";
    let refuse = |found: &str| not_ours("decoder", found, ours);
    if !(in_order || kinds == ["Metaspace"]) {
        return Err(refuse(&kinds.join(", ")));
    }
    let decoder = Decoder::new(component)?;
    let spaced = file.tokens.iter().find(|token| token.text.contains(' '));
    if let (Strip::FirstToken, Some(token)) = (decoder.strip, spaced) {
        return Err(refuse(&format!("Metaspace with a space in the token {}", shown(&token.text))));
    }
    let rewritten: HashMap<u32, &str> = added.iter().map(|token| (token.id, token.text.as_str())).collect();
    let pieces = (0u32..).zip(&file.tokens).map(|(id, token)| {
        let text = rewritten.get(&id).copied().unwrap_or(&token.text);
        (decoder.piece(id, text), token.kind)
    });
    Ok(Pieces::new(pieces, decoder.strip))
}

/// A flag that may be absent, but is nothing else than a flag.
fn strict_flag(component: &Value, name: &str, field: &str) -> Result<bool, Error> {
    match component.get(field) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(not_ours(&format!("{name}.{field}"), &other.to_string(), "true and false")),
    }
}
