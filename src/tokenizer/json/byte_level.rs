//! Byte-level BPE from a `tokenizer.json`, built from our own parts.

use serde_json::Value;

use super::{ConfiguredIds, TokenizerFile, check_literal, flag, has_affixes, kind, not_ours, steps, surroundings};
use crate::error::Error;
use crate::tokenizer::Tokenizer;
use crate::tokenizer::pre_tokenizer::{PreTokenizer, PreTokenizerStep};
use crate::tokenizer::vocab::Vocab;

/// # Errors
/// [`Error::Unsupported`] naming an unsupported component.
pub(super) fn load(file: &TokenizerFile, named: &ConfiguredIds) -> Result<Tokenizer, Error> {
    let (json, model) = (&file.json, file.model());
    if has_affixes(model) || flag(model, "byte_fallback", false) {
        return Err(not_ours("model", "affixes or byte fallback", "byte-level BPE without these"));
    }
    let nfc = match steps(json.get("normalizer"), "normalizers")[..] {
        [] => false,
        [step] if kind(step) == "NFC" => true,
        _ => return Err(not_ours("normalizer", &json["normalizer"].to_string(), "none or NFC")),
    };
    let ignore_merges = flag(model, "ignore_merges", false);
    let pre_tokenizer = pre_tokenizer(json.get("pre_tokenizer"), nfc, ignore_merges)?;
    let around = surroundings(json.get("post_processor"))?;
    if !matches!(json.get("decoder"), Some(decoder) if kind(decoder) == "ByteLevel") {
        return Err(not_ours("decoder", &json["decoder"].to_string(), "ByteLevel"));
    }
    check_literal(json, nfc)?;

    let merges = model.get("merges").and_then(Value::as_array).into_iter().flatten().map(|merge| match merge {
        Value::Array(halves) => halves.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "),
        other => other.as_str().unwrap_or_default().to_owned(),
    });
    let unk = model.get("unk_token").and_then(Value::as_str);
    let vocab = Vocab {
        model: "gpt2".into(),
        tokens: file.tokens.iter().map(|token| token.text.clone()).collect(),
        token_types: file.tokens.iter().map(|token| token.kind).collect(),
        merges: merges.collect(),
        bos_id: named.bos_id,
        eos_id: named.eos_id,
        end_ids: named.end_ids.clone(),
        unk_id: unk.and_then(|unk| (0u32..).zip(&file.tokens).find(|(_, token)| token.text == unk)).map(|(id, _)| id),
        ..Vocab::default()
    };
    Tokenizer::byte_level(&vocab.checked()?, pre_tokenizer, around)
}

/// Published files have up to six steps.
const MAX_STEPS: usize = 16;

fn pre_tokenizer(component: Option<&Value>, nfc: bool, ignore_merges: bool) -> Result<PreTokenizer, Error> {
    let listed = steps(component, "pretokenizers");
    let refuse = |found: &str, known: &str| not_ours("pre_tokenizer", found, known);
    if listed.len() > MAX_STEPS {
        return Err(refuse(&format!("{} steps", listed.len()), &format!("up to {MAX_STEPS} steps")));
    }
    let mut steps = Vec::new();
    let mut spelled = false;
    for step in listed {
        let text = step.to_string();
        let refuse = |known: &str| refuse(&text, known);
        match kind(step) {
            "ByteLevel" if !spelled && !flag(step, "add_prefix_space", true) => {
                spelled = true;
                steps.extend(flag(step, "use_regex", true).then_some(PreTokenizerStep::Gpt2));
            }
            "Split" => {
                let regex = isolating_regex(step).ok_or_else(|| refuse("Split that isolates a regular expression"))?;
                // Later steps run on GPT-2's spelling of bytes, in which ASCII digits are unchanged.
                if spelled && regex != "[0-9][0-9][0-9]" {
                    return Err(refuse("no such step after ByteLevel"));
                }
                steps.push(PreTokenizerStep::Regex(regex));
            }
            "Digits" if !spelled => {
                steps.push(PreTokenizerStep::Digits { each: flag(step, "individual_digits", false) })
            }
            "Punctuation" if !spelled => match step.get("behavior").and_then(Value::as_str) {
                None | Some("Isolated") => steps.push(PreTokenizerStep::Punctuation { each: true }),
                Some("Contiguous") => steps.push(PreTokenizerStep::Punctuation { each: false }),
                _ => return Err(refuse("Isolated or Contiguous Punctuation")),
            },
            _ => return Err(refuse("Split, Digits and Punctuation, then ByteLevel without a space prefix")),
        }
    }
    if !spelled {
        return Err(refuse("no ByteLevel", "one"));
    }
    PreTokenizer::by_steps(&steps, nfc, ignore_merges).map_err(|step| match step {
        PreTokenizerStep::Regex(expression) => refuse(expression, "the expressions of known models"),
        _ => refuse("an unknown step", "the steps of known models"),
    })
}

/// The expression of a split that keeps both the matches and the text between them.
fn isolating_regex(step: &Value) -> Option<&str> {
    let keeps_all = match step.get("behavior").and_then(Value::as_str) {
        Some("Isolated") => !flag(step, "invert", false),
        // `Removed` drops unmatched text, but the supported expressions match everything.
        Some("Removed") => flag(step, "invert", false),
        _ => false,
    };
    if kind(step) != "Split" || !keeps_all {
        return None;
    }
    step.get("pattern")?.get("Regex")?.as_str()
}
