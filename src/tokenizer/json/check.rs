//! Checks of a `tokenizer.json` before anything is built from it.

use std::collections::HashMap;

use serde_json::Value;

use super::{TokenEntry, kind, steps, unsupported};
use crate::error::Error;
use crate::tokenizer::vocab::{TokenType, check_texts, fault, parse_byte, shown};

/// Unused ids allowed beyond the number of tokens: tables over all ids must stay proportionate to the file.
const MAX_HOLES: usize = 1 << 16;
/// Maximum growth of a text by normalisation.
const MAX_GROWTH: usize = 64;
/// Larger repetition counts in regular expressions only serve to exhaust memory.
const MAX_REPETITION: usize = 1000;

/// Checks a file and returns its tokens by id.
pub(super) fn file(json: &Value) -> Result<Vec<TokenEntry>, Error> {
    let model = json.get("model").filter(|model| model.is_object());
    let model = model.ok_or_else(|| fault("model", "an object", "none"))?;
    let mut ids = vocab(model)?;
    check_texts(ids.keys().copied()).map_err(|error| match error {
        Error::Tokenizer { expected, found, .. } => fault("model.vocab", expected, found),
        other => other,
    })?;
    let in_model = ids.len();
    let mut kinds = HashMap::new();
    for (at, token) in array(json, "added_tokens")?.iter().enumerate() {
        let field = format!("added_tokens[{at}]");
        let content = token.get("content").and_then(Value::as_str).unwrap_or_default();
        if content.is_empty() {
            return Err(fault(field, "a token with text", "empty"));
        }
        let id = id(token.get("id").unwrap_or(&Value::Null), &field)?;
        if let Some(&other) = ids.get(content).filter(|&&other| other != id) {
            return Err(fault(field, format!("id {other}, as elsewhere in the file"), id));
        }
        ids.insert(content, id);
        let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
        kinds.insert(content, if special { TokenType::Control } else { TokenType::UserDefined });
    }
    let n_tokens = ids.values().max().map_or(0, |&max| max as usize + 1);
    if in_model == 0 || n_tokens > ids.len() + MAX_HOLES {
        return Err(fault(
            "model.vocab",
            format!("tokens with ids below about {}", ids.len()),
            format!("ids up to {n_tokens}"),
        ));
    }
    merges(model, &ids)?;
    let unk = match model.get("unk_token").and_then(Value::as_str) {
        Some(unk) if !ids.contains_key(unk) && !unk.is_empty() => {
            return Err(fault("model.unk_token", "a token of the vocabulary", shown(unk)));
        }
        Some(unk) => Some(unk),
        // Unigram names it by id.
        None => model
            .get("unk_id")
            .and_then(Value::as_u64)
            .and_then(|id| ids.iter().find(|&(_, &other)| u64::from(other) == id).map(|(&text, _)| text)),
    };
    let byte_fallback = model.get("byte_fallback").and_then(Value::as_bool).unwrap_or(false);
    let mut tokens = vec![TokenEntry { text: String::new(), kind: TokenType::Unused }; n_tokens];
    for (&text, &id) in &ids {
        let Some(token) = tokens.get_mut(id as usize) else { continue };
        if !token.text.is_empty() {
            let found = format!("the id of {} and {}", shown(&token.text), shown(text));
            return Err(fault(format!("token id {id}"), "one token", found));
        }
        let kind = match kinds.get(text) {
            _ if unk == Some(text) => TokenType::Unknown,
            Some(&kind) => kind,
            None if byte_fallback && parse_byte(id, text).is_ok() => TokenType::Byte,
            None => TokenType::Normal,
        };
        *token = TokenEntry { text: text.to_owned(), kind };
    }

    normalizer(json)?;
    pre_tokenizer(json)?;
    post_processor(json, n_tokens)?;
    for component in ["normalizer", "pre_tokenizer", "decoder"] {
        regexes(json.get(component).unwrap_or(&Value::Null), component)?;
    }
    Ok(tokens)
}

/// `model.vocab`: an object of ids, or Unigram's list of `[token, score]`.
fn vocab(model: &Value) -> Result<HashMap<&str, u32>, Error> {
    match model.get("vocab") {
        Some(Value::Object(entries)) => entries
            .iter()
            .map(|(token, number)| Ok((token.as_str(), id(number, &format!("model.vocab[{}]", shown(token)))?)))
            .collect(),
        Some(Value::Array(entries)) => {
            let mut ids = HashMap::with_capacity(entries.len());
            for (at, entry) in (0u32..).zip(entries) {
                let token = entry.get(0).and_then(Value::as_str);
                let (Some(token), Some(_)) = (token, entry.get(1).and_then(Value::as_f64)) else {
                    return Err(fault(format!("model.vocab[{at}]"), "a token and a score", shown(&entry.to_string())));
                };
                if ids.insert(token, at).is_some() {
                    return Err(fault(format!("model.vocab[{at}]"), "a unique text", shown(token)));
                }
            }
            if let Some(unk_id) = model.get("unk_id").filter(|unk_id| !unk_id.is_null()) {
                let id = id(unk_id, "model.unk_id")?;
                if id as usize >= entries.len() {
                    return Err(fault("model.unk_id", format!("below the vocabulary size {}", entries.len()), id));
                }
            }
            Ok(ids)
        }
        _ => Err(fault("model.vocab", "an object or a list", "neither")),
    }
}

fn id(number: &Value, field: &str) -> Result<u32, Error> {
    let id = number.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| id < u32::MAX);
    id.ok_or_else(|| fault(field, "an id from 0 to 2^32 - 2", shown(&number.to_string())))
}

/// Each merge must be two tokens that form a third.
fn merges(model: &Value, ids: &HashMap<&str, u32>) -> Result<(), Error> {
    let prefix = model.get("continuing_subword_prefix").and_then(Value::as_str).unwrap_or("");
    for (rank, merge) in array(model, "merges")?.iter().enumerate() {
        let halves = match merge {
            Value::String(pair) => pair.split_once(' ').filter(|(_, right)| !right.contains(' ')),
            other => match other.as_array().map(Vec::as_slice) {
                Some([left, right]) => left.as_str().zip(right.as_str()),
                _ => None,
            },
        };
        let broken = |expected: &str| fault(format!("model.merges[{rank}]"), expected, shown(&merge.to_string()));
        let (left, right) = halves.ok_or_else(|| broken("two tokens separated by a space"))?;
        let joined = right.get(prefix.len()..).map(|rest| [left, rest].concat());
        let joined = joined.ok_or_else(|| broken("a right half with the continuing prefix"))?;
        if ![left, right, joined.as_str()].iter().all(|token| ids.contains_key(token)) {
            return Err(broken("two tokens of the vocabulary that form a third"));
        }
    }
    Ok(())
}

/// Refuses normalizers that expand a text too much.
fn normalizer(json: &Value) -> Result<(), Error> {
    let mut growth = 1usize;
    for step in steps(json.get("normalizer"), "normalizers") {
        let len = |field: &str| step.get(field).and_then(Value::as_str).map_or(0, str::len);
        let pattern = step.get("pattern").and_then(|pattern| pattern.get("String")).and_then(Value::as_str);
        let factor = match kind(step) {
            "Replace" => len("content").div_ceil(pattern.map_or(1, |pattern| pattern.len().max(1))),
            "Prepend" => len("prepend"),
            _ => 1,
        };
        growth = growth.saturating_mul(factor.max(1));
    }
    if growth > MAX_GROWTH {
        return Err(unsupported(
            "normalizer",
            format!("growth of text by a factor of {growth}"),
            format!("up to {MAX_GROWTH}"),
        ));
    }
    Ok(())
}

fn pre_tokenizer(json: &Value) -> Result<(), Error> {
    for step in steps(json.get("pre_tokenizer"), "pretokenizers") {
        let length = step.get("length").and_then(Value::as_u64);
        if kind(step) == "FixedLength" && length == Some(0) {
            return Err(fault("pre_tokenizer.length", "at least 1", 0));
        }
    }
    Ok(())
}

/// Special tokens must have ids of the vocabulary, and templates must use declared ones.
fn post_processor(json: &Value, n_tokens: usize) -> Result<(), Error> {
    let in_vocab = |number: &Value| match id(number, "post_processor")? {
        id if id as usize >= n_tokens => Err(fault("post_processor", format!("ids below {n_tokens}"), id)),
        _ => Ok(()),
    };
    for step in steps(json.get("post_processor"), "processors") {
        for pair in ["cls", "sep"].iter().filter_map(|field| step.get(field)) {
            in_vocab(pair.get(1).unwrap_or(&Value::Null))?;
        }
        if kind(step) != "TemplateProcessing" {
            continue;
        }
        let declared = step.get("special_tokens");
        for item in ["single", "pair"].iter().filter_map(|field| step.get(field).and_then(Value::as_array)).flatten() {
            let Some(name) = item.get("SpecialToken").and_then(|special| special.get("id")) else { continue };
            let name = name.as_str().unwrap_or_default();
            let ids = declared.and_then(|declared| declared.get(name)?.get("ids")?.as_array());
            let ids = ids.ok_or_else(|| fault("post_processor", "declared special tokens", shown(name)))?;
            ids.iter().try_for_each(in_vocab)?;
        }
    }
    Ok(())
}

/// Checks every regular expression in a component.
fn regexes(component: &Value, field: &str) -> Result<(), Error> {
    match component {
        Value::Object(fields) => fields.iter().try_for_each(|(name, value)| match (name.as_str(), value) {
            ("Regex", Value::String(pattern)) => regex(pattern, field),
            _ => regexes(value, field),
        }),
        Value::Array(items) => items.iter().try_for_each(|item| regexes(item, field)),
        _ => Ok(()),
    }
}

/// Refuses nested unlimited repetitions, `(a+)+`, which backtracking tries in exponentially many ways, and counts
/// that only serve to exhaust memory.
fn regex(pattern: &str, field: &str) -> Result<(), Error> {
    let refuse =
        |supported: &str| Err(unsupported(field, format!("the regular expression {}", shown(pattern)), supported));
    // For each open group: whether it contains an unlimited repetition.
    let mut groups = vec![false];
    let mut chars = pattern.chars().peekable();
    while let Some(c) = chars.next() {
        let mut inner = false;
        match c {
            '\\' => {
                let class = chars.next();
                if matches!(class, Some('p' | 'P' | 'x' | 'u' | 'k')) && chars.peek() == Some(&'{') {
                    chars.by_ref().find(|&c| c == '}');
                }
            }
            '[' => skip_class(&mut chars),
            '(' => {
                groups.push(false);
                // `(?` opens a group; the question mark is not a repetition.
                chars.next_if_eq(&'?');
                continue;
            }
            ')' => inner = groups.pop().unwrap_or(false),
            _ => {}
        }
        let most = match chars.peek() {
            Some('*' | '+') => usize::MAX,
            Some('{') => {
                let count: String = chars.clone().skip(1).take_while(|&c| c != '}').collect();
                match count.rsplit(',').next().map(str::trim) {
                    Some("") => usize::MAX,
                    Some(number) => match number.parse::<usize>() {
                        Ok(number) if number > MAX_REPETITION => return refuse("repetitions up to 1000"),
                        Ok(number) => number,
                        Err(_) if number.bytes().all(|digit| digit.is_ascii_digit()) => {
                            return refuse("repetitions up to 1000");
                        }
                        // A brace without a count is literal.
                        Err(_) => 1,
                    },
                    None => 1,
                }
            }
            _ => 1,
        };
        if inner && most > 1 {
            return refuse("no nested repetitions");
        }
        match groups.last_mut() {
            Some(group) => *group |= inner || most == usize::MAX,
            None => return refuse("balanced parentheses"),
        }
    }
    Ok(())
}

/// Skips to the end of a character class after its `[`; classes may nest.
fn skip_class(chars: &mut std::iter::Peekable<std::str::Chars>) {
    let mut depth = 1;
    // A leading bracket is literal.
    chars.next_if_eq(&'^');
    chars.next_if_eq(&']');
    while depth > 0 {
        match chars.next() {
            Some('\\') => {
                chars.next();
            }
            Some('[') => depth += 1,
            Some(']') => depth -= 1,
            Some(_) => {}
            None => return,
        }
    }
}

fn array<'j>(object: &'j Value, field: &str) -> Result<&'j [Value], Error> {
    match object.get(field) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(other) => Err(fault(field, "a list", shown(&other.to_string()))),
    }
}

#[cfg(test)]
mod tests {
    use super::regex;

    #[test]
    fn exponential_regexes_are_refused_and_common_ones_pass() {
        let harmless = [
            r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+",
            r"[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re)?",
            r"\d{1,3}(?=(?:\d{3})*\b)",
            r"[!-/:-@\[-`{-~][A-Za-z]+|[]+*)(]+|\(a+\)+",
            r"\s{512}(?!\S)",
        ];
        assert!(harmless.iter().all(|pattern| regex(pattern, "pre_tokenizer").is_ok()));
        let exponential = [
            "(a+)+",
            "(a*)*b",
            r"((?:\w+)\s?)*$",
            "(a{2,}b?){3}",
            "((a|b+)c)*",
            "a{1,1000000000}",
            "a{99999999999999999999}",
            "a)",
        ];
        for pattern in exponential {
            assert!(regex(pattern, "pre_tokenizer").is_err(), "{pattern}");
        }
    }
}
