//! Shared parts of pipelines over characters in a `tokenizer.json`: text tokens, steps before the model, tokens found
//! by name, and decoding.

use std::collections::{HashMap, HashSet};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

use super::decoder::DecoderSteps;
use super::{ConfiguredIds, TokenizerFile, added_tokens, kind, not_ours, steps, surroundings};
use crate::error::Error;
use crate::tokenizer::charsmap::Charsmap;
use crate::tokenizer::decode::{Strip, TokenPieces};
use crate::tokenizer::pipeline::{Cut, Prepend, Rewrite, TokenizerPipeline, rewrite};
use crate::tokenizer::special::{Matchers, SpecialRule};
use crate::tokenizer::vocab::{TokenType, Vocab, fault, shown};
use crate::tokenizer::{Algorithm, Surroundings, Tokenizer, roles};

/// A pipeline without its model.
pub(super) struct PipelineParts {
    pipeline: TokenizerPipeline,
    /// Tokens found in unnormalised text.
    tokens: Matchers,
    pieces: TokenPieces,
    around: Surroundings,
}

impl PipelineParts {
    /// # Errors
    /// [`Error::Unsupported`] naming an unsupported component.
    pub fn new(file: &TokenizerFile, vocab: &ModelVocab) -> Result<Self, Error> {
        let json = &file.json;
        let rewrites = rewrites(json.get("normalizer"))?;
        let added = Added::all(json, vocab, &rewrites)?;
        let cuts = cuts(json.get("pre_tokenizer"), &rewrites, added.iter().any(|token| token.normalized))?;
        let matchers = |normalized: bool| {
            let tokens = added.iter().filter(move |token| token.normalized == normalized);
            Matchers::by_rule(tokens.map(|token| (token.id, token.text.as_str(), token.rule)))
        };
        Ok(PipelineParts {
            pieces: pieces(file, &added)?,
            around: surroundings(json.get("post_processor"))?,
            tokens: matchers(false)?,
            pipeline: TokenizerPipeline { tokens: matchers(true)?, rewrites, cuts },
        })
    }

    /// The tokenizer with the model that `model` builds from the pipeline.
    pub fn tokenizer(
        self,
        file: &TokenizerFile,
        named: &ConfiguredIds,
        unk_id: Option<u32>,
        model: impl FnOnce(TokenizerPipeline) -> Algorithm,
    ) -> Result<Tokenizer, Error> {
        let vocab = Vocab {
            tokens: file.tokens.iter().map(|token| token.text.clone()).collect(),
            token_types: file.tokens.iter().map(|token| token.kind).collect(),
            bos_id: named.bos_id,
            eos_id: named.eos_id,
            end_ids: named.end_ids.clone(),
            unk_id,
            ..Vocab::default()
        };
        let mut around = self.around;
        if around.prefix.is_empty() && roles::needs_bos(|text| file.find(text)) {
            around.prefix.extend(named.bos_id);
        }
        Tokenizer::own(&vocab.checked()?, model(self.pipeline), self.tokens, self.pieces, around)
    }
}

/// `model.vocab`: the tokens that text can become. Other added tokens are only found by name.
pub(super) struct ModelVocab<'j> {
    /// Ids and kinds by text.
    pub tokens: HashMap<&'j str, (u32, TokenType)>,
}

impl<'j> ModelVocab<'j> {
    pub fn new(file: &'j TokenizerFile) -> Self {
        let vocab = file.model().get("vocab");
        let is_there = |id: u32, text: &str| match vocab {
            Some(Value::Object(ids)) => ids.contains_key(text),
            Some(Value::Array(scored)) => (id as usize) < scored.len(),
            _ => false,
        };
        let tokens = (0u32..).zip(&file.tokens).filter(|(id, token)| is_there(*id, &token.text));
        ModelVocab { tokens: tokens.map(|(id, token)| (token.text.as_str(), (id, token.kind))).collect() }
    }

    pub fn id(&self, text: &str) -> Option<u32> {
        self.tokens.get(text).map(|token| token.0)
    }

    /// Tokens that text can become without parsing special tokens.
    pub fn of_text(&self) -> impl Iterator<Item = (&'j str, u32)> {
        self.tokens.iter().filter(|(_, token)| token.1 != TokenType::Control).map(|(&text, token)| (text, token.0))
    }

    /// The 256 byte tokens for unknown characters, if the model has all. With only some of them the crate reorders
    /// unknown tokens and bytes.
    pub fn byte_ids(&self, model: &Value) -> Result<Option<Box<[u32; 256]>>, Error> {
        let byte_fallback = strict_flag(model, "model", "byte_fallback")?;
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
}

/// An entry of `added_tokens`.
struct Added {
    id: u32,
    /// The text to find: normalised if `normalized`.
    text: String,
    normalized: bool,
    rule: SpecialRule,
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
            // The crate numbers tokens outside the model itself, regardless of the file.
            let id = vocab.id(content).map_or(next_id, u64::from);
            next_id += u64::from(vocab.id(content).is_none());
            if token.get("id").and_then(Value::as_u64) != Some(id) {
                return Err(refuse("ids that continue those of model.vocab"));
            }
            let flag = |name: &str| token.get(name).and_then(Value::as_bool).ok_or_else(|| refuse("all five flags"));
            let normalized = flag("normalized")?;
            let text = if normalized { rewrite(rewrites, content) } else { content.to_owned() };
            if text.is_empty() || !seen.insert((normalized, text.clone())) {
                return Err(refuse("tokens that stay distinct and non-empty when normalized"));
            }
            let rule = SpecialRule {
                special: flag("special")?,
                single_word: flag("single_word")?,
                lstrip: flag("lstrip")?,
                rstrip: flag("rstrip")?,
            };
            let id = u32::try_from(id).map_err(|_| refuse("32-bit ids"))?;
            all.push(Added { id, text, normalized, rule });
        }
        Ok(all)
    }
}

/// The steps of the normalizer.
fn rewrites(component: Option<&Value>) -> Result<Vec<Rewrite>, Error> {
    let ours = "Prepend, Replace of a string or of runs of spaces, NFC, Precompiled, Strip";
    let read = |step: &Value| {
        if kind(step) == "Precompiled" {
            return charsmap(step).map(Rewrite::Charsmap);
        }
        rewrite_of(step).ok_or_else(|| not_ours("normalizer", &step.to_string(), ours))
    };
    steps(component, "normalizers").into_iter().map(read).collect()
}

fn rewrite_of(step: &Value) -> Option<Rewrite> {
    /// The only supported expression.
    const RUN_OF_SPACES: &str = " {2,}";
    let text = |field: &str| step.get(field).and_then(Value::as_str).map(str::to_owned);
    let flag = |field: &str| step.get(field).and_then(Value::as_bool);
    let is_run = || step.pointer("/pattern/Regex").and_then(Value::as_str) == Some(RUN_OF_SPACES);
    Some(match kind(step) {
        "Prepend" => Rewrite::Prepend(text("prepend")?),
        "Replace" if is_run() => Rewrite::ReplaceRuns { content: text("content")? },
        "Replace" => Rewrite::Replace { pattern: pattern(step)?, content: text("content")? },
        "NFC" => Rewrite::Nfc,
        "Strip" => Rewrite::Strip { left: flag("strip_left")?, right: flag("strip_right")? },
        _ => return None,
    })
}

/// The rules of a `Precompiled` normalizer.
fn charsmap(step: &Value) -> Result<Charsmap, Error> {
    let field = "normalizer.precompiled_charsmap";
    let encoded = step.get("precompiled_charsmap").and_then(Value::as_str);
    let encoded = encoded.ok_or_else(|| fault(field, "a text in base64", "none"))?;
    let bytes = BASE64_STANDARD.decode(encoded).map_err(|error| fault(field, "a text in base64", error))?;
    Charsmap::new(field, &bytes)
}

/// The steps of the pre-tokenizer.
fn cuts(component: Option<&Value>, rewrites: &[Rewrite], tokens_cut_rewritten: bool) -> Result<Vec<Cut>, Error> {
    let mut cuts = Vec::new();
    for step in steps(component, "pretokenizers") {
        let refuse = |known: &str| not_ours("pre_tokenizer", &step.to_string(), known);
        let ours = "Metaspace, WhitespaceSplit, Split at a kept string";
        let cut = match kind(step) {
            "Metaspace" => metaspace(step),
            "WhitespaceSplit" => Some(Cut::Spaces),
            "Split" if step.get("invert") == Some(&Value::Bool(false)) => split(step),
            _ => None,
        };
        let cut = cut.ok_or_else(|| refuse(ours))?;
        if matches!(cut, Cut::Metaspace { prepend: Prepend::First, .. }) {
            // The crate checks where a piece begins in the text before rewriting. That is known only if nothing was
            // rewritten, or the rewritten text is still in one piece.
            let unchanged = rewrites.is_empty() && cuts.iter().all(|cut| matches!(cut, Cut::Split { .. }));
            let whole = !tokens_cut_rewritten && cuts.is_empty();
            if !(unchanged || whole) {
                return Err(refuse("prepend_scheme first only without rewriting before the split"));
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

/// A literal pattern.
fn pattern(step: &Value) -> Option<String> {
    let pattern = step.get("pattern")?.get("String")?.as_str()?;
    (!pattern.is_empty()).then(|| pattern.to_owned())
}

/// The decoded pieces of all tokens.
fn pieces(file: &TokenizerFile, added: &[Added]) -> Result<TokenPieces, Error> {
    let component = file.json.get("decoder");
    let kinds: Vec<&str> = steps(component, "decoders").into_iter().map(kind).collect();
    let order: Option<Vec<usize>> =
        kinds.iter().map(|kind| ["Replace", "ByteFallback", "Fuse", "Strip"].iter().position(|k| k == kind)).collect();
    // Steps in another order need more than one token, or precede decoding to text.
    let in_order = order.is_some_and(|order| order.is_sorted_by(|a, b| a < b || (*a, *b) == (0, 0)));
    let ours = "Metaspace, or Replace, ByteFallback, Fuse, Strip in that order";
    let refuse = |found: &str| not_ours("decoder", found, ours);
    if !(in_order || kinds == ["Metaspace"]) {
        return Err(refuse(&kinds.join(", ")));
    }
    let decoder = DecoderSteps::new(component)?;
    let rewritten: HashMap<u32, &str> = added.iter().map(|token| (token.id, token.text.as_str())).collect();
    let texts = || {
        (0u32..)
            .zip(&file.tokens)
            .map(|(id, token)| (id, *rewritten.get(&id).unwrap_or(&token.text.as_str()), token.kind))
    };
    let spaced = texts().find(|(_, text, _)| text.contains(' '));
    if let (Strip::FirstToken, Some((_, text, _))) = (decoder.strip, spaced) {
        return Err(refuse(&format!("Metaspace with a space in the token {}", shown(text))));
    }
    let pieces = texts().map(|(id, text, kind)| (decoder.piece(id, text), kind));
    Ok(TokenPieces::new(pieces, decoder.strip))
}

/// An optional flag, strictly a bool.
pub(super) fn strict_flag(component: &Value, name: &str, field: &str) -> Result<bool, Error> {
    match component.get(field) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(not_ours(&format!("{name}.{field}"), &other.to_string(), "true and false")),
    }
}
