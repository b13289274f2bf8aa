//! Byte-level BPE from a `tokenizer.json`, built from our own parts.

use serde_json::Value;

use super::{File, check_literal, flag, has_affixes, kind, not_ours, steps, surroundings};
use crate::error::Error;
use crate::tokenizer::Tokenizer;
use crate::tokenizer::pre_tokenizer::PreTokenizer;
use crate::tokenizer::vocab::Vocab;

/// # Errors
/// [`Error::Unsupported`] naming the part of the pipeline that is not one of those known here.
pub(super) fn load(file: &File, bos_id: Option<u32>, eos_id: Option<u32>) -> Result<Tokenizer, Error> {
    let (json, model) = (&file.json, file.model());
    if has_affixes(model) || flag(model, "byte_fallback", false) {
        return Err(not_ours("model", "affixes or byte fallback", "byte-level BPE without"));
    }
    let nfc = match steps(json.get("normalizer"), "normalizers")[..] {
        [] => false,
        [step] if kind(step) == "NFC" => true,
        _ => return Err(not_ours("normalizer", "something else", "none or NFC")),
    };
    let ignore_merges = flag(model, "ignore_merges", false);
    let pre_tokenizer = pre_tokenizer(json.get("pre_tokenizer"), nfc, ignore_merges)
        .ok_or_else(|| not_ours("pre_tokenizer", "something else", "ByteLevel behind splits of known models"))?;
    let around = surroundings(json.get("post_processor"))?;
    if !matches!(json.get("decoder"), Some(decoder) if kind(decoder) == "ByteLevel") {
        return Err(not_ours("decoder", "something else", "ByteLevel"));
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
        bos_id,
        eos_id,
        unk_id: unk.and_then(|unk| (0u32..).zip(&file.tokens).find(|(_, token)| token.text == unk)).map(|(id, _)| id),
        ..Vocab::default()
    };
    Tokenizer::byte_level(&vocab.checked()?, pre_tokenizer, around)
}

fn pre_tokenizer(component: Option<&Value>, nfc: bool, ignore_merges: bool) -> Option<PreTokenizer> {
    let steps = steps(component, "pretokenizers");
    let (last, before) = steps.split_last()?;
    if kind(last) != "ByteLevel" || flag(last, "add_prefix_space", true) {
        return None;
    }
    let (digits, splits) = match before.split_first() {
        Some((step, splits)) if kind(step) == "Digits" && flag(step, "individual_digits", false) => (true, splits),
        _ => (false, before),
    };
    if flag(last, "use_regex", true) {
        return splits.is_empty().then(|| PreTokenizer::gpt2(digits, nfc, ignore_merges));
    }
    let expressions: Option<Vec<&str>> = splits.iter().map(|step| isolating_regex(step)).collect();
    PreTokenizer::by_expressions(&expressions?, digits, nfc, ignore_merges)
}

/// The expression of a split that keeps matches and what lies between them as words.
fn isolating_regex(step: &Value) -> Option<&str> {
    let keeps_all = match step.get("behavior").and_then(Value::as_str) {
        Some("Isolated") => !flag(step, "invert", false),
        // Dropping what does not match: the expressions known here match everything.
        Some("Removed") => flag(step, "invert", false),
        _ => false,
    };
    if kind(step) != "Split" || !keeps_all {
        return None;
    }
    step.get("pattern")?.get("Regex")?.as_str()
}
