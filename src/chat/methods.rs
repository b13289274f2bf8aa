//! Methods of strings, lists and dicts, as in Python, and of the variable `loop`.

use std::rc::Rc;

use super::engine::Args;
use super::values::{Budget, Dict, Result, Seq, SeqKind, TrackedText, Value, cost, wrong};

/// A method; its first argument is the value.
type MethodFn = fn(&Args, &Budget) -> Result<Value>;

/// Methods of strings.
const STRING_METHODS: [(&str, MethodFn); 30] = [
    ("strip", |args, budget| strip(args, "", true, true, budget)),
    ("lstrip", |args, budget| strip(args, "", true, false, budget)),
    ("rstrip", |args, budget| strip(args, "", false, true, budget)),
    ("upper", |args, budget| Ok(string(args, budget)?.map(str::to_uppercase).into())),
    ("lower", |args, budget| Ok(string(args, budget)?.map(str::to_lowercase).into())),
    ("capitalize", |args, budget| Ok(capitalized(&*string(args, budget)?).into())),
    ("title", |args, budget| Ok(string(args, budget)?.map(titled).into())),
    ("replace", replace),
    ("split", |args, budget| split(args, false, budget)),
    ("rsplit", |args, budget| split(args, true, budget)),
    ("splitlines", |args, budget| {
        let text = string(args, budget)?;
        budget.charge(64 * text.text.len())?;
        let keep = args.get(1, "keepends").is_some_and(Value::is_true);
        let lines = text.text.split_inclusive('\n').map(|line| match keep {
            true => text.slice_of(line),
            false => {
                text.slice_of(line.strip_suffix('\n').map_or(line, |line| line.strip_suffix('\r').unwrap_or(line)))
            }
        });
        Seq::list(lines.map(Value::from).collect(), budget)
    }),
    ("partition", |args, budget| partition(args, false, budget)),
    ("rpartition", |args, budget| partition(args, true, budget)),
    ("startswith", |args, budget| affix(args, budget, |text, affix| text.starts_with(affix))),
    ("endswith", |args, budget| affix(args, budget, |text, affix| text.ends_with(affix))),
    ("removeprefix", |args, budget| {
        let (text, affix) = (string(args, budget)?, needle(args, 1)?);
        Ok(text.slice_of(text.text.strip_prefix(affix).unwrap_or(&text.text)).into())
    }),
    ("removesuffix", |args, budget| {
        let (text, affix) = (string(args, budget)?, needle(args, 1)?);
        Ok(text.slice_of(text.text.strip_suffix(affix).unwrap_or(&text.text)).into())
    }),
    ("find", |args, budget| Ok(Value::Int(found(args, budget, |text, part| text.find(part))?.unwrap_or(-1)))),
    ("rfind", |args, budget| Ok(Value::Int(found(args, budget, |text, part| text.rfind(part))?.unwrap_or(-1)))),
    ("index", |args, budget| {
        let at = found(args, budget, |text, part| text.find(part))?;
        at.map_or_else(|| wrong("index(): the text is not found"), |at| Ok(Value::Int(at)))
    }),
    ("count", |args, budget| Ok(string(args, budget)?.text.matches(needle(args, 1)?).count().into())),
    ("join", |args, budget| join(&*string(args, budget)?, &args.need(1)?.items(budget)?, budget)),
    ("format", format),
    ("isdigit", |args, budget| every(args, budget, char::is_numeric)),
    ("isnumeric", |args, budget| every(args, budget, char::is_numeric)),
    ("isalpha", |args, budget| every(args, budget, char::is_alphabetic)),
    ("isalnum", |args, budget| every(args, budget, char::is_alphanumeric)),
    ("isspace", |args, budget| every(args, budget, is_space)),
    ("islower", |args, budget| cased(args, budget, char::is_lowercase, char::is_uppercase).map(Value::Bool)),
    ("isupper", |args, budget| cased(args, budget, char::is_uppercase, char::is_lowercase).map(Value::Bool)),
];

/// Methods of dicts.
const DICT_METHODS: [(&str, MethodFn); 5] = [
    ("items", |args, budget| entries(args.need(0)?, SeqKind::View, budget)),
    ("keys", |args, budget| {
        Seq::build(args.need(0)?.pairs()?.iter().map(|pair| pair.0.clone()).collect(), SeqKind::View, budget)
    }),
    ("values", |args, budget| {
        Seq::build(args.need(0)?.pairs()?.iter().map(|pair| pair.1.clone()).collect(), SeqKind::View, budget)
    }),
    ("get", |args, budget| {
        budget.charge(cost(args.need(1)?))?;
        let found = match args.need(0)? {
            Value::Dict(dict) => dict.get(args.need(1)?),
            _ => None,
        };
        Ok(found.or_else(|| args.get(2, "default")).cloned().unwrap_or(Value::None))
    }),
    ("copy", |args, budget| Dict::build(args.need(0)?.pairs()?.to_vec(), budget)),
];

/// Methods of lists.
const SEQ_METHODS: [(&str, MethodFn); 3] = [
    ("count", |args, budget| {
        let mut count = 0usize;
        for item in args.need(0)?.items(budget)? {
            count += usize::from(item.equals(args.need(1)?, budget)?);
        }
        Ok(count.into())
    }),
    ("index", |args, budget| {
        for (at, item) in args.need(0)?.items(budget)?.into_iter().enumerate() {
            if item.equals(args.need(1)?, budget)? {
                return Ok(at.into());
            }
        }
        wrong("index(): the value is not found")
    }),
    ("copy", |args, budget| Seq::list(args.need(0)?.items(budget)?, budget)),
];

/// Methods of `loop`.
const LOOP_METHODS: [(&str, MethodFn); 2] = [
    ("cycle", |args, _| match (args.need(0)?, args.rest(1)) {
        (Value::Loop(state), values @ [_, ..]) => Ok(values.get(state.at % values.len()).cloned().unwrap_or_default()),
        _ => wrong("cycle() needs values"),
    }),
    ("changed", |args, budget| {
        let Value::Loop(state) = args.need(0)? else { return wrong("changed() needs a loop") };
        let now = Seq::list(args.rest(1).to_vec(), budget)?;
        let before = state.last.replace(Some(now.clone()));
        Ok(Value::Bool(!before.map_or(Ok(false), |before| before.equals(&now, budget))?))
    }),
];

/// Finds a method of a value.
pub fn find(value: &Value, name: &str) -> Option<MethodFn> {
    let methods: &[(&str, MethodFn)] = match value {
        Value::Str(_) => &STRING_METHODS,
        Value::Dict(_) => &DICT_METHODS,
        Value::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple) => &SEQ_METHODS,
        Value::Loop(_) => &LOOP_METHODS,
        _ => &[],
    };
    methods.iter().find(|method| method.0 == name).map(|method| method.1)
}

/// Calls a method of the first argument.
pub fn call(name: &str, args: &Args, budget: &Budget) -> Result<Value> {
    let value = args.need(0)?;
    match find(value, name) {
        Some(method) => method(args, budget),
        None => wrong(format!("a value of type {} has no method {name}", value.type_name())),
    }
}

/// The first argument as text.
pub fn string(args: &Args, budget: &Budget) -> Result<Rc<TrackedText>> {
    let text = args.need(0)?.to_text(budget)?;
    // Pays for the caller's use of it.
    budget.charge(3 * text.size())?;
    Ok(text)
}

/// The text to search for.
pub fn needle(args: &Args, at: usize) -> Result<&str> {
    args.need(at)?.as_str().map_or_else(|| wrong(format!("argument {at} is not a string")), Ok)
}

/// Position of a part, in characters.
fn found(args: &Args, budget: &Budget, find: fn(&str, &str) -> Option<usize>) -> Result<Option<i64>> {
    let text = string(args, budget)?;
    let at = find(&text.text, needle(args, 1)?);
    let n_chars = at.and_then(|at| text.text.get(..at)).map(|before| before.chars().count());
    Ok(n_chars.and_then(|n_chars| i64::try_from(n_chars).ok()))
}

/// White space in Python's sense.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1C}'..='\u{1F}')
}

pub fn strip(args: &Args, name: &str, at_start: bool, at_end: bool, budget: &Budget) -> Result<Value> {
    let text = string(args, budget)?;
    let chars = args.get(1, name).and_then(Value::as_str);
    budget.charge(text.text.len().saturating_mul(chars.map_or(0, str::len) / 8))?;
    let goes = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let mut rest = text.text.as_str();
    if at_start {
        rest = rest.trim_start_matches(goes);
    }
    if at_end {
        rest = rest.trim_end_matches(goes);
    }
    Ok(text.slice_of(rest).into())
}

pub fn capitalized(text: &TrackedText) -> TrackedText {
    let mut capitalized = text.map(str::to_lowercase);
    if let Some(first) = text.text.chars().next() {
        let head = text.slice(0..first.len_utf8()).map(str::to_uppercase);
        let rest = text.slice(first.len_utf8()..text.text.len()).map(str::to_lowercase);
        capitalized = head;
        capitalized.push_text(&rest);
    }
    capitalized
}

pub fn titled(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        match in_word {
            true => titled.extend(c.to_lowercase()),
            false => titled.extend(c.to_uppercase()),
        }
        in_word = c.is_alphanumeric();
    }
    titled
}

pub fn replace(args: &Args, budget: &Budget) -> Result<Value> {
    let text = string(args, budget)?;
    let (old, new) = (needle(args, 1)?, args.need(2)?.to_text(budget)?);
    let count = args.get(3, "count").and_then(Value::as_int).and_then(|count| usize::try_from(count).ok());
    let mut replaced = TrackedText::default();
    let mut done = 0;
    for (start, part) in text.text.match_indices(old).take(count.unwrap_or(usize::MAX)) {
        budget.charge(new.size() + 16)?;
        replaced.push_text(&text.slice(done..start));
        replaced.push_text(&new);
        done = start + part.len();
    }
    replaced.push_text(&text.slice(done..text.text.len()));
    Ok(replaced.into())
}

pub fn join(separator: &TrackedText, values: &[Value], budget: &Budget) -> Result<Value> {
    let mut joined = TrackedText::default();
    for (at, value) in values.iter().enumerate() {
        let text = value.to_text(budget)?;
        budget.charge(text.size() + separator.size())?;
        if at > 0 {
            joined.push_text(separator);
        }
        joined.push_text(&text);
    }
    Ok(joined.into())
}

fn split(args: &Args, from_end: bool, budget: &Budget) -> Result<Value> {
    let text = string(args, budget)?;
    let separator = args.get(1, "sep").filter(|separator| !separator.is_none());
    let most = args.get(2, "maxsplit").and_then(Value::as_int).and_then(|most| usize::try_from(most).ok());
    let most = most.unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    match separator.map(Value::as_str) {
        Some(None) => return wrong("split() takes a string"),
        Some(Some("")) => return wrong("split(): the separator is empty"),
        Some(Some(separator)) => match from_end {
            true => {
                parts.extend(text.text.rsplitn(most.saturating_add(1), separator));
                parts.reverse();
            }
            false => parts.extend(text.text.splitn(most.saturating_add(1), separator)),
        },
        None => {
            // The side from which it splits loses its space; the rest after the last split is unchanged.
            let trimmed = |rest: &'_ str| -> usize {
                if from_end { rest.trim_end_matches(is_space).len() } else { rest.trim_start_matches(is_space).len() }
            };
            let mut rest = text.text.as_str();
            loop {
                let len = trimmed(rest);
                rest = if from_end { rest.get(..len) } else { rest.get(rest.len() - len..) }.unwrap_or_default();
                if rest.is_empty() {
                    break;
                }
                let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
                let Some(at) = cut.filter(|_| parts.len() < most) else {
                    parts.push(rest);
                    break;
                };
                let (before, after) = rest.split_at(at);
                let part = if from_end { after.trim_start_matches(is_space) } else { before };
                parts.push(part);
                rest = if from_end { rest.get(..rest.len() - part.len()).unwrap_or_default() } else { after };
            }
            if from_end {
                parts.reverse();
            }
        }
    }
    // Each part is a reference and a string.
    budget.charge(64 * parts.len())?;
    Seq::list(parts.into_iter().map(|part| text.slice_of(part).into()).collect(), budget)
}

fn partition(args: &Args, from_end: bool, budget: &Budget) -> Result<Value> {
    let (text, separator) = (string(args, budget)?, needle(args, 1)?);
    let at = if from_end { text.text.rfind(separator) } else { text.text.find(separator) };
    let all = text.text.len();
    let bounds = match (at, from_end) {
        (Some(at), _) => [0..at, at..at + separator.len(), at + separator.len()..all],
        (None, false) => [0..all, all..all, all..all],
        (None, true) => [0..0, 0..0, 0..all],
    };
    Seq::build(bounds.map(|range| text.slice(range).into()).to_vec(), SeqKind::Tuple, budget)
}

fn affix(args: &Args, budget: &Budget, has: fn(&str, &str) -> bool) -> Result<Value> {
    let text = args.need(0)?.as_str().unwrap_or_default();
    let affixes = match args.need(1)? {
        one @ Value::Str(_) => vec![one.clone()],
        several => several.items(budget)?,
    };
    let mut is_there = false;
    for affix in &affixes {
        let Some(affix) = affix.as_str() else { return wrong("startswith() and endswith() take strings") };
        budget.charge(affix.len())?;
        is_there |= has(text, affix);
    }
    Ok(Value::Bool(is_there))
}

fn every(args: &Args, budget: &Budget, is: fn(char) -> bool) -> Result<Value> {
    let text = string(args, budget)?;
    Ok(Value::Bool(!text.text.is_empty() && text.text.chars().all(is)))
}

pub fn cased(args: &Args, budget: &Budget, some: fn(char) -> bool, none: fn(char) -> bool) -> Result<bool> {
    let text = string(args, budget)?;
    Ok(text.text.chars().any(some) && !text.text.chars().any(none))
}

/// `"{} {name} {0}".format(...)`, without format specifications.
fn format(args: &Args, budget: &Budget) -> Result<Value> {
    let text = string(args, budget)?;
    let (mut formatted, mut next, mut done) = (TrackedText::default(), 1, 0);
    while let Some(at) = text.text.get(done..).and_then(|rest| rest.find(['{', '}'])).map(|at| done + at) {
        formatted.push_text(&text.slice(done..at));
        let rest = text.text.get(at..).unwrap_or_default();
        if rest.starts_with("{{") || rest.starts_with("}}") {
            formatted.push_text(&text.slice(at..at + 1));
            done = at + 2;
            continue;
        }
        let end = rest.find('}').filter(|_| rest.starts_with('{'));
        let end = end.map_or_else(|| wrong("format(): an unmatched brace"), Ok)?;
        let name = rest.get(1..end).unwrap_or_default();
        let value = match name.parse::<usize>() {
            Ok(place) => args.get(place.saturating_add(1), ""),
            Err(_) if name.is_empty() => {
                next += 1;
                args.get(next - 1, "")
            }
            Err(_) => args.get(usize::MAX, name),
        };
        let value = value.map_or_else(|| wrong(format!("format(): there is no argument `{name}`")), Ok)?;
        formatted.push_text(&*value.to_text(budget)?);
        budget.charge(16)?;
        done = at + end + 1;
    }
    formatted.push_text(&text.slice(done..text.text.len()));
    Ok(formatted.into())
}

/// A dict's entries as tuples.
pub fn entries(value: &Value, kind: SeqKind, budget: &Budget) -> Result<Value> {
    let tuple = |(key, value): &(Value, Value)| Seq::build(vec![key.clone(), value.clone()], SeqKind::Tuple, budget);
    let tuples: Result<Vec<Value>> = value.pairs()?.iter().map(tuple).collect();
    Seq::build(tuples?, kind, budget)
}
