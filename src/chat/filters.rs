//! Filters, tests and methods of templates, as Jinja2 and Python define them.

use std::cmp::Ordering;
use std::sync::Arc;

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::operators::{Args, Function, add, bound, contains, equal};
use super::values::{Budget, Map, Seq, Text, cost, items, number, pairs, plain, refused, to_text};

/// A test that looks at the type of a value, or at a number.
type Test = fn(&Value) -> bool;

/// Tests that cost nothing.
const KINDS: [(&str, Test); 17] = [
    ("defined", |value| !value.is_undefined()),
    ("undefined", Value::is_undefined),
    ("none", Value::is_none),
    ("boolean", |value| value.kind() == ValueKind::Bool),
    ("true", |value| value.kind() == ValueKind::Bool && value.is_true()),
    ("false", |value| value.kind() == ValueKind::Bool && !value.is_true()),
    ("integer", |value| value.is_integer() && value.kind() == ValueKind::Number),
    ("float", |value| value.is_number() && !value.is_integer()),
    ("number", |value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool)),
    ("string", |value| value.kind() == ValueKind::String),
    ("mapping", |value| value.downcast_object_ref::<Map>().is_some()),
    ("sequence", is_sequence),
    ("iterable", |value| is_sequence(value) || matches!(value.kind(), ValueKind::Iterable)),
    ("callable", |value| value.kind() == ValueKind::Plain || (value.as_object().is_some() && !is_sequence(value))),
    ("odd", |value| value.as_i64().is_some_and(|number| number % 2 != 0)),
    ("even", |value| value.as_i64().is_some_and(|number| number % 2 == 0)),
    ("escaped", |_| false),
];

fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Undefined)
        || value.downcast_object_ref::<Map>().is_some()
}

/// Tests that compare.
const COMPARISONS: [(&[&str], Function); 10] = [
    (&["eq", "equalto", "==", "sameas"], |_, args, budget| {
        equal(args.need(0)?, args.need(1)?, budget).map(Value::from)
    }),
    (&["ne", "!="], |_, args, budget| equal(args.need(0)?, args.need(1)?, budget).map(|equal| Value::from(!equal))),
    (&["in"], |_, args, budget| contains(args.need(1)?, args.need(0)?, budget).map(Value::from)),
    (&["lt", "lessthan", "<"], |_, args, budget| {
        Ok(Value::from(order(args.need(0)?, args.need(1)?, true, budget)?.is_lt()))
    }),
    (&["le", "<="], |_, args, budget| Ok(Value::from(order(args.need(0)?, args.need(1)?, true, budget)?.is_le()))),
    (&["gt", "greaterthan", ">"], |_, args, budget| {
        Ok(Value::from(order(args.need(0)?, args.need(1)?, true, budget)?.is_gt()))
    }),
    (&["ge", ">="], |_, args, budget| Ok(Value::from(order(args.need(0)?, args.need(1)?, true, budget)?.is_ge()))),
    (&["divisibleby"], |_, args, _| {
        let remainder = args.need(0)?.as_i64().zip(args.need(1)?.as_i64()).and_then(|(n, by)| n.checked_rem(by));
        Ok(Value::from(remainder == Some(0)))
    }),
    (&["lower"], |_, args, budget| cased(args, budget, char::is_lowercase, char::is_uppercase)),
    (&["upper"], |_, args, budget| cased(args, budget, char::is_uppercase, char::is_lowercase)),
];

const FILTERS: [(&[&str], Function); 35] = [
    (&["trim"], |_, args, budget| strip(args, "chars", true, true, budget)),
    (&["upper"], |_, args, budget| Ok(string(args, budget)?.map(str::to_uppercase).into_value())),
    (&["lower"], |_, args, budget| Ok(string(args, budget)?.map(str::to_lowercase).into_value())),
    (&["capitalize"], |_, args, budget| Ok(capitalized(string(args, budget)?).into_value())),
    (&["title"], |_, args, budget| Ok(string(args, budget)?.map(titled).into_value())),
    (&["string"], |_, args, budget| Ok(string(args, budget)?.into_value())),
    // User text stays user text: only the template's own is ever trusted.
    (&["safe"], |_, args, _| args.need(0).cloned()),
    (&["e", "escape", "forceescape"], |_, args, budget| Ok(string(args, budget)?.map(html).into_value())),
    (&["replace"], replace),
    (&["length", "count"], |_, args, budget| {
        let value = args.need(0)?;
        if let Some(text) = plain(value) {
            budget.charge_len(text.len())?;
            return Ok(Value::from(text.chars().count()));
        }
        match value.len() {
            _ if value.is_undefined() => Ok(Value::from(0)),
            Some(len) => Ok(Value::from(len)),
            None => Err(refused(format!("a value of type {} has no length", value.kind()))),
        }
    }),
    (&["default", "d"], |_, args, _| {
        let value = args.need(0)?;
        let also_false = args.get(2, "boolean").is_some_and(|flag| flag.is_true());
        let keep = if also_false { value.is_true() } else { !value.is_undefined() };
        Ok(if keep {
            value.clone()
        } else {
            args.get(1, "default_value").unwrap_or_else(|| Value::from_safe_string(String::new()))
        })
    }),
    (&["join"], |_, args, budget| {
        let separator = args.get(1, "d").map(|value| to_text(&value, budget)).transpose()?.unwrap_or_default();
        let attribute = args.get(2, "attribute");
        let values = items(args.need(0)?, budget)?;
        let values: Result<Vec<Value>, Error> = values
            .iter()
            .map(|value| attribute.as_ref().map_or(Ok(value.clone()), |name| path(value, name, budget)))
            .collect();
        join(&separator, &values?, budget)
    }),
    (&["list"], |_, args, budget| Seq::list(items(args.need(0)?, budget)?, budget)),
    (&["items"], |_, args, budget| match args.need(0)? {
        value if value.is_undefined() => Seq::list(Vec::new(), budget),
        value => entries(value, budget),
    }),
    (&["dictsort"], |_, args, budget| {
        let by_value = args.get(2, "by").is_some_and(|by| by.as_str() == Some("value"));
        let mut sorted = pairs(args.need(0)?)?;
        let case_sensitive = args.get(1, "case_sensitive").is_some_and(|flag| flag.is_true());
        budget.charge(cost(args.need(0)?))?;
        sort_by(&mut sorted, |a, b| match by_value {
            true => order(&a.1, &b.1, case_sensitive, budget),
            false => order(&a.0, &b.0, case_sensitive, budget),
        })?;
        if args.get(3, "reverse").is_some_and(|flag| flag.is_true()) {
            sorted.reverse();
        }
        let pairs: Result<Vec<Value>, Error> =
            sorted.into_iter().map(|(key, value)| Seq::tuple(vec![key, value], budget)).collect();
        Seq::list(pairs?, budget)
    }),
    (&["first"], |_, args, budget| Ok(items_or_chars(args, budget)?.into_iter().next().unwrap_or_default())),
    (&["last"], |_, args, budget| Ok(items_or_chars(args, budget)?.into_iter().next_back().unwrap_or_default())),
    (&["reverse"], |_, args, budget| {
        let value = args.need(0)?;
        let reversed: Vec<Value> = items(value, budget)?.into_iter().rev().collect();
        if value.kind() == ValueKind::String {
            join(&Text::default(), &reversed, budget)
        } else {
            Seq::list(reversed, budget)
        }
    }),
    (&["sort"], |_, args, budget| {
        let mut sorted = items(args.need(0)?, budget)?;
        let attribute = args.get(3, "attribute");
        let case_sensitive = args.get(2, "case_sensitive").is_some_and(|flag| flag.is_true());
        budget.charge(cost(args.need(0)?))?;
        sort_by(&mut sorted, |a, b| by_attribute(a, b, attribute.as_ref(), case_sensitive, budget))?;
        if args.get(1, "reverse").is_some_and(|flag| flag.is_true()) {
            sorted.reverse();
        }
        Seq::list(sorted, budget)
    }),
    (&["min"], |_, args, budget| extreme(args, Ordering::Less, budget)),
    (&["max"], |_, args, budget| extreme(args, Ordering::Greater, budget)),
    (&["sum"], |_, args, budget| {
        let attribute = args.get(1, "attribute");
        let start = args.get(2, "start").unwrap_or_else(|| Value::from(0));
        items(args.need(0)?, budget)?.iter().try_fold(start, |sum, value| match &attribute {
            Some(name) => add(&sum, &path(value, name, budget)?, budget),
            None => add(&sum, value, budget),
        })
    }),
    (&["unique"], |_, args, budget| {
        let mut seen: Vec<Value> = Vec::new();
        for value in items(args.need(0)?, budget)? {
            let known = seen.iter().try_fold(false, |known, other| {
                Ok::<bool, Error>(
                    known
                        || order(other, &value, false, budget).is_ok_and(Ordering::is_eq) && equal_kinds(other, &value),
                )
            })?;
            if !known {
                seen.push(value);
            }
        }
        Seq::list(seen, budget)
    }),
    (&["map"], map),
    (&["select"], |state, args, budget| select(state, args, budget, false, true)),
    (&["reject"], |state, args, budget| select(state, args, budget, false, false)),
    (&["selectattr"], |state, args, budget| select(state, args, budget, true, true)),
    (&["rejectattr"], |state, args, budget| select(state, args, budget, true, false)),
    (&["attr"], |_, args, budget| path(args.need(0)?, args.need(1)?, budget)),
    (&["int"], |_, args, _| {
        let value = args.need(0)?;
        let parsed = match plain(value) {
            Some(text) => text.trim().parse::<i64>().ok().or_else(|| float_to_int(text.trim().parse().ok()?)),
            None if value.kind() == ValueKind::Bool => Some(i64::from(value.is_true())),
            None => value.as_i64().or_else(|| float_to_int(f64::try_from(value.clone()).ok()?)),
        };
        Ok(parsed.map_or_else(|| args.get(1, "default").unwrap_or_else(|| Value::from(0)), Value::from))
    }),
    (&["float"], |_, args, _| {
        let value = args.need(0)?;
        let parsed = match plain(value) {
            Some(text) => text.trim().parse().ok(),
            None => f64::try_from(value.clone()).ok(),
        };
        Ok(parsed.map_or_else(|| args.get(1, "default").unwrap_or_else(|| Value::from(0.0)), Value::from))
    }),
    (&["abs"], |_, args, _| match args.need(0)? {
        value if value.is_integer() => {
            Ok(value.as_i64().and_then(i64::checked_abs).map_or(Value::UNDEFINED, Value::from))
        }
        value => Ok(Value::from(f64::try_from(value.clone())?.abs())),
    }),
    (&["round"], |_, args, _| {
        let scale = 10f64.powi(
            i32::try_from(args.get(1, "precision").and_then(|n| n.as_i64()).unwrap_or(0).clamp(-300, 300)).unwrap_or(0),
        );
        let scaled = f64::try_from(args.need(0)?.clone())? * scale;
        let method = args.get(2, "method");
        Ok(Value::from(
            match method.as_ref().and_then(|method| method.as_str()) {
                Some("ceil") => scaled.ceil(),
                Some("floor") => scaled.floor(),
                _ => scaled.round_ties_even(),
            } / scale,
        ))
    }),
    (&["indent"], indent),
    (&["tojson"], tojson),
];

/// Methods of strings.
const STRING_METHODS: [(&str, Function); 30] = [
    ("strip", |_, args, budget| strip(args, "", true, true, budget)),
    ("lstrip", |_, args, budget| strip(args, "", true, false, budget)),
    ("rstrip", |_, args, budget| strip(args, "", false, true, budget)),
    ("upper", |_, args, budget| Ok(string(args, budget)?.map(str::to_uppercase).into_value())),
    ("lower", |_, args, budget| Ok(string(args, budget)?.map(str::to_lowercase).into_value())),
    ("capitalize", |_, args, budget| Ok(capitalized(string(args, budget)?).into_value())),
    ("title", |_, args, budget| Ok(string(args, budget)?.map(titled).into_value())),
    ("replace", replace),
    ("split", |_, args, budget| split(args, false, budget)),
    ("rsplit", |_, args, budget| split(args, true, budget)),
    ("splitlines", |_, args, budget| {
        let text = string(args, budget)?;
        let keep = args.get(1, "keepends").is_some_and(|keep| keep.is_true());
        let lines = text.text.split_inclusive('\n').map(|line| match keep {
            true => text.slice_of(line),
            false => {
                text.slice_of(line.strip_suffix('\n').map_or(line, |line| line.strip_suffix('\r').unwrap_or(line)))
            }
        });
        Seq::list(lines.map(Text::into_value).collect(), budget)
    }),
    ("partition", |_, args, budget| partition(args, false, budget)),
    ("rpartition", |_, args, budget| partition(args, true, budget)),
    ("startswith", |_, args, budget| affix(args, budget, |text, affix| text.starts_with(affix))),
    ("endswith", |_, args, budget| affix(args, budget, |text, affix| text.ends_with(affix))),
    ("removeprefix", |_, args, budget| {
        let (text, affix) = (string(args, budget)?, needle(args, 1)?);
        Ok(text.slice_of(text.text.strip_prefix(&affix).unwrap_or(&text.text)).into_value())
    }),
    ("removesuffix", |_, args, budget| {
        let (text, affix) = (string(args, budget)?, needle(args, 1)?);
        Ok(text.slice_of(text.text.strip_suffix(&affix).unwrap_or(&text.text)).into_value())
    }),
    ("find", |_, args, budget| {
        Ok(found(&string(args, budget)?.text, |text| Ok(text.find(&needle(args, 1)?)))?.unwrap_or(-1).into())
    }),
    ("rfind", |_, args, budget| {
        Ok(found(&string(args, budget)?.text, |text| Ok(text.rfind(&needle(args, 1)?)))?.unwrap_or(-1).into())
    }),
    ("index", |_, args, budget| {
        let at = found(&string(args, budget)?.text, |text| Ok(text.find(&needle(args, 1)?)))?;
        at.map(Value::from).ok_or_else(|| refused("index(): the text is not found"))
    }),
    ("count", |_, args, budget| Ok(Value::from(string(args, budget)?.text.matches(&needle(args, 1)?).count()))),
    ("join", |_, args, budget| join(&string(args, budget)?, &items(args.need(1)?, budget)?, budget)),
    ("format", format),
    ("isdigit", |_, args, budget| every(args, budget, char::is_numeric)),
    ("isnumeric", |_, args, budget| every(args, budget, char::is_numeric)),
    ("isalpha", |_, args, budget| every(args, budget, char::is_alphabetic)),
    ("isalnum", |_, args, budget| every(args, budget, char::is_alphanumeric)),
    ("isspace", |_, args, budget| every(args, budget, char::is_whitespace)),
    ("islower", |_, args, budget| cased(args, budget, char::is_lowercase, char::is_uppercase)),
    ("isupper", |_, args, budget| cased(args, budget, char::is_uppercase, char::is_lowercase)),
];

/// Methods of dicts.
const MAP_METHODS: [(&str, Function); 5] = [
    ("items", |_, args, budget| entries(args.need(0)?, budget)),
    ("keys", |_, args, budget| Seq::list(pairs(args.need(0)?)?.into_iter().map(|pair| pair.0).collect(), budget)),
    ("values", |_, args, budget| Seq::list(pairs(args.need(0)?)?.into_iter().map(|pair| pair.1).collect(), budget)),
    ("get", |_, args, budget| {
        budget.charge(cost(args.need(1)?))?;
        let key = plain(args.need(1)?).map_or_else(|| args.need(1).cloned(), |key| Ok(Value::from(key.as_ref())))?;
        let value = args.need(0)?.get_item(&key).unwrap_or_default();
        Ok(if value.is_undefined() { args.get(2, "default").unwrap_or_else(|| Value::from(())) } else { value })
    }),
    ("copy", |_, args, budget| Map::build(pairs(args.need(0)?)?, budget)),
];

/// Methods of lists.
const SEQ_METHODS: [(&str, Function); 2] = [
    ("count", |_, args, budget| {
        let mut count = 0;
        for item in items(args.need(0)?, budget)? {
            count += i64::from(equal(&item, args.need(1)?, budget)?);
        }
        Ok(Value::from(count))
    }),
    ("index", |_, args, budget| {
        for (at, item) in (0i64..).zip(items(args.need(0)?, budget)?) {
            if equal(&item, args.need(1)?, budget)? {
                return Ok(Value::from(at));
            }
        }
        Err(refused("index(): the value is not found"))
    }),
];

/// Gives a template its filters, tests and methods.
pub fn register(env: &mut Environment<'_>, budget: &Arc<Budget>) {
    for (names, function) in FILTERS {
        names.iter().for_each(|name| env.add_filter(*name, bound(function, budget)));
    }
    for (names, function) in COMPARISONS {
        names.iter().for_each(|name| env.add_test(*name, bound(function, budget)));
    }
    for (name, test) in KINDS {
        env.add_test(name, move |value: &Value| test(value));
    }
    let budget = Arc::clone(budget);
    env.set_unknown_method_callback(move |state, value, name, args| {
        let find = |methods: &[(&str, Function)]| methods.iter().find(|method| method.0 == name).map(|method| method.1);
        let method = match value.kind() {
            ValueKind::String => find(&STRING_METHODS),
            ValueKind::Map => find(&MAP_METHODS),
            ValueKind::Seq => find(&SEQ_METHODS),
            _ => None,
        };
        let method = method.ok_or_else(|| Error::from(ErrorKind::UnknownMethod))?;
        let all: Vec<Value> = [value].into_iter().chain(args).cloned().collect();
        method(state, &Args::new(&all), &budget)
    });
}

/// The first argument as text.
fn string(args: &Args, budget: &Budget) -> Result<Text, Error> {
    let text = to_text(args.need(0)?, budget)?;
    // For what the caller makes of it.
    budget.charge_len(2 * text.text.len())?;
    Ok(text)
}

/// A text to look for.
fn needle(args: &Args, at: usize) -> Result<String, Error> {
    let text = plain(args.need(at)?).map(|text| text.into_owned());
    text.ok_or_else(|| refused(format!("argument {at} is no string")))
}

/// Where a part is found, in characters.
fn found(text: &str, find: impl Fn(&str) -> Result<Option<usize>, Error>) -> Result<Option<i64>, Error> {
    let chars_before = |at: usize| text.get(..at).map_or(0, |before| before.chars().count());
    Ok(find(text)?.and_then(|at| i64::try_from(chars_before(at)).ok()))
}

/// What Python takes for white space.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1C}'..='\u{1F}')
}

fn strip(args: &Args, name: &str, at_start: bool, at_end: bool, budget: &Budget) -> Result<Value, Error> {
    let text = string(args, budget)?;
    let chars = args.get(1, name).filter(|chars| !chars.is_none());
    let chars = chars.as_ref().and_then(plain);
    let goes = |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(c));
    let mut rest = text.text.as_str();
    if at_start {
        rest = rest.trim_start_matches(goes);
    }
    if at_end {
        rest = rest.trim_end_matches(goes);
    }
    Ok(text.slice_of(rest).into_value())
}

fn capitalized(text: Text) -> Text {
    let mut capitalized = text.map(str::to_lowercase);
    if let Some(first) = text.text.chars().next() {
        let head = text.slice(0..first.len_utf8()).map(str::to_uppercase);
        let rest = text.slice(first.len_utf8()..text.text.len()).map(str::to_lowercase);
        capitalized = head;
        capitalized.push_text(&rest);
    }
    capitalized
}

fn titled(text: &str) -> String {
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

fn html(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&#34;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

fn replace(_: &mut State, args: &Args, budget: &Budget) -> Result<Value, Error> {
    let text = string(args, budget)?;
    let (old, new) = (needle(args, 1)?, to_text(args.need(2)?, budget)?);
    let count = args.get(3, "count").and_then(|count| count.as_i64()).and_then(|count| usize::try_from(count).ok());
    let mut replaced = Text::default();
    let mut done = 0;
    for (start, part) in text.text.match_indices(&old).take(count.unwrap_or(usize::MAX)) {
        budget.charge_len(new.text.len() + 16)?;
        replaced.push_text(&text.slice(done..start));
        replaced.push_text(&new);
        done = start + part.len();
    }
    replaced.push_text(&text.slice(done..text.text.len()));
    Ok(replaced.into_value())
}

fn join(separator: &Text, values: &[Value], budget: &Budget) -> Result<Value, Error> {
    let mut joined = Text::default();
    for (at, value) in values.iter().enumerate() {
        let text = to_text(value, budget)?;
        budget.charge_len(text.text.len() + separator.text.len())?;
        if at > 0 {
            joined.push_text(separator);
        }
        joined.push_text(&text);
    }
    Ok(joined.into_value())
}

fn split(args: &Args, from_end: bool, budget: &Budget) -> Result<Value, Error> {
    let text = string(args, budget)?;
    let separator = args.get(1, "sep").filter(|separator| !separator.is_none() && !separator.is_undefined());
    let most = args.get(2, "maxsplit").and_then(|most| most.as_i64()).and_then(|most| usize::try_from(most).ok());
    let most = most.unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    match separator.as_ref().map(plain) {
        Some(None) => return Err(refused("split() takes a string")),
        Some(Some(separator)) if separator.is_empty() => return Err(refused("split(): the separator is empty")),
        Some(Some(separator)) => match from_end {
            true => {
                parts.extend(text.text.rsplitn(most.saturating_add(1), separator.as_ref()));
                parts.reverse();
            }
            false => parts.extend(text.text.splitn(most.saturating_add(1), separator.as_ref())),
        },
        None => {
            // The side from which it splits loses its space; what is left when it may split no more is as it was.
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
    // A part costs a reference and a string.
    budget.charge_len(64 * parts.len())?;
    Seq::list(parts.into_iter().map(|part| text.slice_of(part).into_value()).collect(), budget)
}

fn partition(args: &Args, from_end: bool, budget: &Budget) -> Result<Value, Error> {
    let (text, separator) = (string(args, budget)?, needle(args, 1)?);
    let at = if from_end { text.text.rfind(&separator) } else { text.text.find(&separator) };
    let all = text.text.len();
    let bounds = match (at, from_end) {
        (Some(at), _) => [0..at, at..at + separator.len(), at + separator.len()..all],
        (None, false) => [0..all, all..all, all..all],
        (None, true) => [0..0, 0..0, 0..all],
    };
    Seq::tuple(bounds.map(|range| text.slice(range).into_value()).to_vec(), budget)
}

fn affix(args: &Args, budget: &Budget, has: fn(&str, &str) -> bool) -> Result<Value, Error> {
    let value = args.need(0)?;
    let text = plain(value).ok_or_else(|| Error::from(ErrorKind::UnknownMethod))?;
    let affixes = match args.need(1)? {
        one if one.kind() == ValueKind::String => vec![one.clone()],
        several => items(several, budget)?,
    };
    let mut is_there = false;
    for affix in affixes {
        let affix = plain(&affix).ok_or_else(|| refused("startswith() and endswith() take strings"))?;
        budget.charge_len(affix.len())?;
        is_there |= has(&text, &affix);
    }
    Ok(Value::from(is_there))
}

fn every(args: &Args, budget: &Budget, is: fn(char) -> bool) -> Result<Value, Error> {
    let text = string(args, budget)?.text;
    Ok(Value::from(!text.is_empty() && text.chars().all(is)))
}

fn cased(args: &Args, budget: &Budget, some: fn(char) -> bool, none: fn(char) -> bool) -> Result<Value, Error> {
    let text = string(args, budget)?.text;
    Ok(Value::from(text.chars().any(some) && !text.chars().any(none)))
}

/// `"{} {name} {0}".format(...)`, without format specifications.
fn format(_: &mut State, args: &Args, budget: &Budget) -> Result<Value, Error> {
    let text = string(args, budget)?;
    let (mut formatted, mut next, mut done) = (Text::default(), 1, 0);
    while let Some(at) = text.text.get(done..).and_then(|rest| rest.find(['{', '}'])).map(|at| done + at) {
        formatted.push_text(&text.slice(done..at));
        let rest = text.text.get(at..).unwrap_or_default();
        if rest.starts_with("{{") || rest.starts_with("}}") {
            formatted.push_text(&text.slice(at..at + 1));
            done = at + 2;
            continue;
        }
        let end = rest.find('}').filter(|_| rest.starts_with('{'));
        let end = end.ok_or_else(|| refused("format(): a brace that is alone"))?;
        let name = rest.get(1..end).unwrap_or_default();
        let value = match name.parse::<usize>() {
            Ok(place) => args.get(place.saturating_add(1), ""),
            Err(_) if name.is_empty() => {
                next += 1;
                args.get(next - 1, "")
            }
            Err(_) => args.get(usize::MAX, name),
        };
        let value = value.ok_or_else(|| refused(format!("format(): there is no argument `{name}`")))?;
        formatted.push_text(&to_text(&value, budget)?);
        budget.charge_len(formatted.text.len() / 16 + 16)?;
        done = at + end + 1;
    }
    formatted.push_text(&text.slice(done..text.text.len()));
    Ok(formatted.into_value())
}

/// The keys and values of a dict, in tuples.
fn entries(value: &Value, budget: &Budget) -> Result<Value, Error> {
    let tuples: Result<Vec<Value>, Error> =
        pairs(value)?.into_iter().map(|(key, value)| Seq::tuple(vec![key, value], budget)).collect();
    Seq::list(tuples?, budget)
}

fn items_or_chars(args: &Args, budget: &Budget) -> Result<Vec<Value>, Error> {
    items(args.need(0)?, budget)
}

/// An attribute, or an attribute of an attribute: `function.name`.
fn path(value: &Value, name: &Value, budget: &Budget) -> Result<Value, Error> {
    budget.charge(cost(name))?;
    if let Some(at) = name.as_usize() {
        return Ok(value.get_item_by_index(at).unwrap_or_default());
    }
    let name = plain(name).ok_or_else(|| refused("the name of an attribute is a string"))?;
    let mut found = value.clone();
    for part in name.split('.') {
        found = match (found.is_undefined(), part.parse::<usize>()) {
            (true, _) => return Ok(Value::UNDEFINED),
            (false, Ok(at)) => found.get_item_by_index(at).unwrap_or_default(),
            (false, Err(_)) => found.get_attr(part).unwrap_or_default(),
        };
    }
    Ok(found)
}

/// The order of two values; strings without regard to case unless asked.
fn order(left: &Value, right: &Value, case_sensitive: bool, budget: &Budget) -> Result<Ordering, Error> {
    budget.charge(cost(left).min(cost(right)))?;
    match (plain(left), plain(right)) {
        (Some(left), Some(right)) if case_sensitive => Ok(left.cmp(&right)),
        (Some(left), Some(right)) => Ok(left.to_lowercase().cmp(&right.to_lowercase())),
        (None, None) => Ok(left.cmp(right)),
        _ => Err(refused(format!("values of type {} and {} have no order", left.kind(), right.kind()))),
    }
}

fn equal_kinds(left: &Value, right: &Value) -> bool {
    left.kind() == right.kind()
}

fn by_attribute(
    left: &Value,
    right: &Value,
    attribute: Option<&Value>,
    case_sensitive: bool,
    budget: &Budget,
) -> Result<Ordering, Error> {
    match attribute {
        Some(name) => order(&path(left, name, budget)?, &path(right, name, budget)?, case_sensitive, budget),
        None => order(left, right, case_sensitive, budget),
    }
}

/// Sorts by an order that may fail.
fn sort_by<T>(values: &mut [T], order: impl Fn(&T, &T) -> Result<Ordering, Error>) -> Result<(), Error> {
    let mut result = Ok(());
    values.sort_by(|left, right| match order(left, right) {
        Ok(order) => order,
        Err(error) => {
            result = Err(error);
            Ordering::Equal
        }
    });
    result
}

fn extreme(args: &Args, wanted: Ordering, budget: &Budget) -> Result<Value, Error> {
    let case_sensitive = args.get(1, "case_sensitive").is_some_and(|flag| flag.is_true());
    let attribute = args.get(2, "attribute");
    let mut best: Option<Value> = None;
    for value in items(args.need(0)?, budget)? {
        let better = match &best {
            None => true,
            Some(best) => by_attribute(&value, best, attribute.as_ref(), case_sensitive, budget)? == wanted,
        };
        if better {
            best = Some(value);
        }
    }
    Ok(best.unwrap_or_default())
}

fn map(state: &mut State, args: &Args, budget: &Budget) -> Result<Value, Error> {
    let values = items(args.need(0)?, budget)?;
    let attribute = args.get(usize::MAX, "attribute");
    let default = args.get(usize::MAX, "default");
    let mut mapped = Vec::with_capacity(values.len());
    for value in values {
        mapped.push(match &attribute {
            Some(name) => match (path(&value, name, budget)?, &default) {
                (found, Some(default)) if found.is_undefined() => default.clone(),
                (found, _) => found,
            },
            None => {
                let name = needle(args, 1)?;
                let all: Vec<Value> = [&value].into_iter().chain(args.rest(2)).cloned().collect();
                state.apply_filter(&name, &all)?
            }
        });
    }
    Seq::list(mapped, budget)
}

fn select(state: &mut State, args: &Args, budget: &Budget, by_attribute: bool, wanted: bool) -> Result<Value, Error> {
    let test_at = if by_attribute { 2 } else { 1 };
    let test = args.rest(test_at).first().map(|_| needle(args, test_at)).transpose()?;
    let mut kept = Vec::new();
    for value in items(args.need(0)?, budget)? {
        let subject = if by_attribute { path(&value, args.need(1)?, budget)? } else { value.clone() };
        let passes = match &test {
            Some(test) => {
                let all: Vec<Value> = [&subject].into_iter().chain(args.rest(test_at + 1)).cloned().collect();
                state.perform_test(test, &all)?
            }
            None => subject.is_true(),
        };
        if passes == wanted {
            kept.push(value);
        }
    }
    Seq::list(kept, budget)
}

fn float_to_int(float: f64) -> Option<i64> {
    // Rust saturates; Python's integers do not end.
    (float.is_finite() && float.abs() < 9e18).then_some(float as i64)
}

fn indent(_: &mut State, args: &Args, budget: &Budget) -> Result<Value, Error> {
    let text = string(args, budget)?;
    let prefix = match args.get(1, "width") {
        Some(width) if width.is_integer() => Text::template(" ".repeat(width.as_usize().unwrap_or(0).min(1 << 10))),
        Some(width) => to_text(&width, budget)?,
        None => Text::template("    "),
    };
    let with_first = args.get(2, "first").is_some_and(|first| first.is_true());
    let with_blank = args.get(3, "blank").is_some_and(|blank| blank.is_true());
    let mut indented = Text::default();
    for (at, line) in text.text.split_inclusive('\n').enumerate() {
        budget.charge_len(line.len() + prefix.text.len())?;
        let is_blank = line.trim_end_matches(['\n', '\r']).is_empty();
        if (at > 0 || with_first) && (with_blank || !is_blank) {
            indented.push_text(&prefix);
        }
        indented.push_text(&text.slice_of(line));
    }
    Ok(indented.into_value())
}

/// JSON as Python writes it, with the arguments that Hugging Face gives this filter.
fn tojson(_: &mut State, args: &Args, budget: &Budget) -> Result<Value, Error> {
    let given = |name: &str| args.get(usize::MAX, name).filter(|value| !value.is_none());
    let indent = args.get(1, "indent").filter(|indent| !indent.is_none());
    let indent = match indent {
        Some(indent) if indent.is_integer() => Some(" ".repeat(indent.as_usize().unwrap_or(0).min(64))),
        Some(indent) => plain(&indent).map(|text| text.into_owned()),
        None => None,
    };
    let separators = given("separators").map(|value| items(&value, budget)).transpose()?.unwrap_or_default();
    let separator =
        |at: usize, default: &str| separators.get(at).and_then(plain).map_or(default.into(), |text| text.into_owned());
    let mut json = Json {
        text: String::new(),
        comma: separator(0, if indent.is_some() { "," } else { ", " }),
        colon: separator(1, ": "),
        indent,
        ascii: given("ensure_ascii").is_some_and(|flag| flag.is_true()),
        sorted: given("sort_keys").is_some_and(|flag| flag.is_true()),
        budget,
    };
    json.write(args.need(0)?, 0)?;
    Ok(Text::user(json.text).into_value())
}

struct Json<'b> {
    text: String,
    comma: String,
    colon: String,
    indent: Option<String>,
    ascii: bool,
    sorted: bool,
    budget: &'b Budget,
}

impl Json<'_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let before = self.text.len();
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text.push_str(&match number(value).as_str() {
                "nan" => "NaN".into(),
                "inf" => "Infinity".into(),
                "-inf" => "-Infinity".into(),
                number => number.to_owned(),
            }),
            ValueKind::String => self.string(&plain(value).unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items = items(value, self.budget)?;
                self.text.push('[');
                for (at, item) in items.iter().enumerate() {
                    self.next(at, depth)?;
                    self.write(item, depth + 1)?;
                }
                self.close(items.is_empty(), depth)?;
                self.text.push(']');
            }
            ValueKind::Map => {
                let mut pairs = pairs(value)?;
                if self.sorted {
                    sort_by(&mut pairs, |left, right| order(&left.0, &right.0, true, self.budget))?;
                }
                self.text.push('{');
                for (at, (key, item)) in pairs.iter().enumerate() {
                    self.next(at, depth)?;
                    match plain(key) {
                        Some(key) => self.string(&key)?,
                        None => {
                            self.text.push('"');
                            self.write(key, depth + 1)?;
                            self.text.push('"');
                        }
                    }
                    self.text.push_str(&self.colon);
                    self.write(item, depth + 1)?;
                }
                self.close(pairs.is_empty(), depth)?;
                self.text.push('}');
            }
            other => return Err(refused(format!("a value of type {other} is no JSON"))),
        }
        self.budget.charge_len(self.text.len().saturating_sub(before))
    }

    fn next(&mut self, at: usize, depth: usize) -> Result<(), Error> {
        if at > 0 {
            self.text.push_str(&self.comma);
        }
        self.line(depth + 1)
    }

    fn close(&mut self, is_empty: bool, depth: usize) -> Result<(), Error> {
        if is_empty { Ok(()) } else { self.line(depth) }
    }

    fn line(&mut self, depth: usize) -> Result<(), Error> {
        let Some(indent) = &self.indent else { return Ok(()) };
        self.budget.charge_len(1 + depth * indent.len())?;
        self.text.push('\n');
        (0..depth).for_each(|_| self.text.push_str(indent));
        Ok(())
    }

    fn string(&mut self, string: &str) -> Result<(), Error> {
        self.budget.charge_len(6 * string.len())?;
        self.text.push('"');
        for c in string.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{C}' => self.text.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        self.text.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
        Ok(())
    }
}
