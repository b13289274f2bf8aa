//! Rules for a schema's arguments in each format's notation.
//!
//! llguidance compiles JSON. Gemma's notation, Python literals and tags have rules for common values, above all
//! strings; for the rest, readers of all three also accept JSON.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::{Lark, Tool, either, escaped, quoted, refused};
use crate::answer::{CallTags, GEMMA_QUOTE};
use crate::error::Error;
use crate::grammar::{formats, simplify};

/// Annotations.
const NOTES: [&str; 14] = [
    "$comment",
    "$id",
    "$schema",
    "default",
    "deprecated",
    "description",
    "example",
    "examples",
    "nullable",
    "readOnly",
    "strict",
    "title",
    "writeOnly",
    "x-guidance",
];
/// Maximum depth of schemas in Gemma's notation; deeper ones are written as JSON.
const MAX_DEPTH: usize = 8;
/// Integers within this range are exact in 64-bit floats.
const MAX_INTEGER: i64 = (1 << 53) - 1;
/// The range of other numbers. Longer ones may overflow when parsed.
const MAX_NUMBER: i64 = 1_000_000_000_000_000;

/// Notations other than JSON.
#[derive(Clone, Copy)]
pub enum Notation<'a> {
    /// `key:value`, with this mark around strings.
    Gemma(&'a str),
    /// `key=value`.
    Python,
    /// `<parameter=key>\nvalue\n</parameter>\n` and the like.
    Tags(&'a TagRules<'a>),
}

/// Rules for the tags around parameters.
pub struct TagRules<'a> {
    pub tags: &'static CallTags,
    /// The rule before a value, for a parameter's name and whether the value is a string.
    pub open: &'a dyn Fn(&str, bool) -> String,
    pub close: TagEnd,
}

/// The end of a value, with the line breaks next to it.
pub enum TagEnd {
    Letters(String),
    /// A rule that begins with a token.
    Token(String),
}

impl TagEnd {
    fn rule(&self) -> String {
        match self {
            TagEnd::Letters(letters) => quoted(letters),
            TagEnd::Token(rule) => rule.clone(),
        }
    }

    /// This text and the end.
    fn behind(&self, text: &str) -> String {
        match self {
            TagEnd::Letters(letters) => quoted(&format!("{text}{letters}")),
            TagEnd::Token(rule) if text.is_empty() => rule.clone(),
            TagEnd::Token(rule) => format!("{} {rule}", quoted(text)),
        }
    }
}

/// The schema of a tool's arguments, narrowed for calls.
pub fn parameters(tool: &str, given: Option<&Value>) -> Result<Value, Error> {
    let mut schema = match given {
        None => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        Some(given) => given.clone(),
    };
    let of = || format!("`{tool}`: parameters");
    let Some(keywords) = schema.as_object_mut() else {
        return Err(refused(of(), "a schema of an object", &schema));
    };
    keywords.shift_remove("x-guidance");
    match keywords.get("type") {
        None if keywords.contains_key("$ref") => {}
        None => {
            keywords.insert("type".into(), "object".into());
        }
        Some(Value::String(kind)) if kind == "object" => {}
        Some(other) => return Err(refused(format!("{}.type", of()), "object", other)),
    }
    simplify::simplify(&mut schema)
        .map_err(|excess| refused(format!("{}.{}", of(), excess.of), excess.expected, excess.found))?;
    let joins = joins(&schema);
    narrow(&mut schema, !joins);
    formats::tighten(&mut schema);
    Ok(schema)
}

/// Whether schemas are combined, so that no single one names all properties.
fn joins(schema: &Value) -> bool {
    match schema {
        Value::Object(keywords) => keywords.iter().any(|(key, value)| {
            let together = matches!(key.as_str(), "allOf" | "anyOf" | "oneOf");
            (together && keywords.contains_key("properties"))
                || (key == "allOf" && value.as_array().is_some_and(|all| all.len() > 1))
                || (key == "$ref" && keywords.contains_key("properties"))
                || joins(value)
        }),
        Value::Array(values) => values.iter().any(joins),
        _ => false,
    }
}

/// Keywords that map names to schemas.
const MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Adds limits where missing: to numbers, so that they can be parsed, and to properties, if `closes`.
fn narrow(schema: &mut Value, closes: bool) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(|schema| narrow(schema, closes)),
        Value::Object(keywords) => {
            let is_data = |key: &str| matches!(key, "const" | "default" | "enum" | "examples" | "required");
            // Properties may be named like keywords.
            for (key, value) in keywords.iter_mut().filter(|(key, _)| !is_data(key)) {
                match value {
                    Value::Object(members) if MAPS.contains(&key.as_str()) => {
                        members.values_mut().for_each(|member| narrow(member, closes));
                    }
                    value => narrow(value, closes),
                }
            }
            let has = |key: &str| keywords.contains_key(key);
            let is_of = |kind: &str| match keywords.get("type") {
                Some(Value::String(found)) => found == kind,
                Some(Value::Array(kinds)) => kinds.iter().any(|found| found == kind),
                _ => false,
            };
            let names_all = ["additionalProperties", "patternProperties", "unevaluatedProperties"];
            if closes && keywords.get("properties").is_some_and(Value::is_object) && !names_all.into_iter().any(has) {
                keywords.insert("additionalProperties".into(), false.into());
                return;
            }
            let most = match (is_of("number"), is_of("integer")) {
                (true, _) => MAX_NUMBER,
                (_, true) => MAX_INTEGER,
                _ => return,
            };
            let limits = ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"];
            let given = limits.map(|key| keywords.get(key).and_then(Value::as_f64));
            if has("enum") || has("const") || given.iter().flatten().any(|limit| limit.abs() >= most as f64) {
                return;
            }
            if given.iter().take(2).all(Option::is_none) {
                keywords.insert("minimum".into(), (-most).into());
            }
            if given.iter().skip(2).all(Option::is_none) {
                keywords.insert("maximum".into(), most.into());
            }
        }
        _ => {}
    }
}

/// A tool's arguments, without the surrounding syntax.
pub fn members(notation: Notation, tool: &Tool, lark: &mut Lark) -> Result<String, Error> {
    let of = format!("`{}`: parameters", tool.name);
    let none = Map::new();
    let schema = tool.parameters.as_object().unwrap_or(&none);
    let known = ["type", "properties", "required", "additionalProperties", "$defs", "definitions"];
    if let Some((key, _)) = schema.iter().find(|(key, _)| !known.contains(&key.as_str()) && !is_note(key)) {
        return Err(refused(of, "keywords that this format supports here", format!("`{key}`")));
    }
    let context = ToolContext { notation, root: schema, of };
    context.members(schema, &context.of, lark, 0)
}

fn is_note(key: &str) -> bool {
    NOTES.contains(&key) || key.starts_with("x-")
}

/// Context of one tool.
struct ToolContext<'a> {
    notation: Notation<'a>,
    root: &'a Map<String, Value>,
    of: String,
}

impl ToolContext<'_> {
    /// An object's properties in order; optional ones can be skipped.
    fn members(&self, schema: &Map<String, Value>, of: &str, lark: &mut Lark, depth: usize) -> Result<String, Error> {
        let none = Map::new();
        let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
        let required = schema.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let required: HashSet<&str> = required.iter().filter_map(Value::as_str).collect();
        if let Some(name) = required.iter().find(|name| !properties.contains_key(**name)) {
            return Err(refused(format!("{of}.required"), "names of properties", format!("`{name}`")));
        }
        let separator = match self.notation {
            Notation::Gemma(_) => "\",\"",
            Notation::Python => "\", \"",
            Notation::Tags(_) => "",
        };
        // From the end: the rules after a property, and before any property.
        let (mut rest, mut first) = (String::new(), String::new());
        for (key, value) in properties.iter().rev() {
            let of = format!("{of}.properties.{key}");
            let head = self.key(key, value, &of)?;
            let value = self.value(value, &of, lark, depth)?;
            let item = lark.rule(&format!("{head} {value}"));
            let (with, alone) = (format!("{separator} {item} {rest}"), format!("{item} {rest}"));
            (rest, first) = match (required.contains(key.as_str()), rest.is_empty()) {
                (true, _) => (lark.rule(&with), lark.rule(&alone)),
                (false, true) => (lark.rule(&format!("({with})?")), lark.rule(&format!("({alone})?"))),
                (false, false) => (lark.rule(&format!("{with} | {rest}")), lark.rule(&format!("{alone} | {first}"))),
            };
        }
        Ok(first)
    }

    /// The rule of a property's name and the separator after it.
    fn key(&self, key: &str, value: &Value, of: &str) -> Result<String, Error> {
        let is_word = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || "_$/@#-.".contains(c));
        let odd = || refused(of, "a name that this format supports", format!("`{}`", key.escape_default()));
        match self.notation {
            Notation::Gemma(_) if is_word => Ok(quoted(&format!("{key}:"))),
            Notation::Gemma(_) => Ok(quoted(&format!("{}:", Value::from(key)))),
            Notation::Python if is_word => Ok(quoted(&format!("{key}="))),
            Notation::Tags(rules)
                if !key.is_empty() && key.len() <= 128 && !key.contains(['<', '>', '"', '\n', '\r']) =>
            {
                Ok((rules.open)(key, value.get("type").is_some_and(|kind| kind == "string")))
            }
            _ => Err(odd()),
        }
    }

    /// A value and its end.
    fn value(&self, schema: &Value, of: &str, lark: &mut Lark, depth: usize) -> Result<String, Error> {
        let none = Map::new();
        let keywords = match schema {
            Value::Object(keywords) => keywords,
            Value::Bool(true) => &none,
            other => return Err(refused(of, "a schema that allows some value", other)),
        };
        let kind = keywords.get("type").and_then(Value::as_str).unwrap_or_default();
        let plain = |known: &[&str]| keywords.keys().all(|key| is_note(key) || known.contains(&key.as_str()));
        match (self.notation, kind) {
            (Notation::Tags(rules), "string") => return tagged_text(rules, keywords, of, lark),
            (Notation::Tags(rules), "boolean") if plain(&["type"]) => {
                return Ok(format!("(\"true\" | \"false\" | \"True\" | \"False\") {}", rules.close.rule()));
            }
            (Notation::Python, "boolean") if plain(&["type"]) => return Ok("(\"True\" | \"False\")".into()),
            (Notation::Python, "null") if plain(&["type"]) => return Ok("\"None\"".into()),
            (Notation::Gemma(quote), "string") if plain(&["type", "enum", "minLength", "maxLength"]) => {
                return gemma_text(quote, keywords, of, lark);
            }
            (Notation::Gemma(_), "object")
                if depth < MAX_DEPTH
                    && keywords.get("additionalProperties") == Some(&Value::Bool(false))
                    && plain(&["type", "properties", "required", "additionalProperties"]) =>
            {
                let members = self.members(keywords, of, lark, depth + 1)?;
                return Ok(format!("\"{{\" {members} \"}}\""));
            }
            (Notation::Gemma(_), "array")
                if depth < MAX_DEPTH
                    && keywords.get("items").is_some_and(Value::is_object)
                    && plain(&["type", "items", "minItems", "maxItems"]) =>
            {
                let of = format!("{of}.items");
                let item = self.value(keywords.get("items").unwrap_or(&Value::Null), &of, lark, depth + 1)?;
                let item = lark.rule(&item);
                let (least, most) = limits_of(keywords, ["minItems", "maxItems"], &of)?;
                if most == Some(0) {
                    return Ok("\"[]\"".into());
                }
                let most = most.map_or(String::new(), |most| (most - 1).to_string());
                let list = format!("{item} (\",\" {item}){{{},{most}}}", least.saturating_sub(1));
                return Ok(if least == 0 { format!("\"[\" ({list})? \"]\"") } else { format!("\"[\" {list} \"]\"") });
            }
            _ => {}
        }
        let mut schema = schema.clone();
        if let Some(keywords) = schema.as_object_mut() {
            self.take_definitions(keywords);
        } else {
            schema = json!({});
        }
        let Notation::Tags(rules) = self.notation else { return Ok(lark.json(&schema)) };
        let end = rules.tags.value[1];
        if schema.to_string().contains(end) {
            return Err(refused(of, format!("values without `{end}`"), format!("`{end}`")));
        }
        without_tags(&mut schema, &no_tag(end));
        Ok(format!("{} {}", lark.json(&schema), rules.close.rule()))
    }

    /// Copies the definitions that a schema refers to.
    fn take_definitions(&self, keywords: &mut Map<String, Value>) {
        if !Value::from(keywords.clone()).to_string().contains("\"$ref\"") {
            return;
        }
        for key in ["$defs", "definitions"] {
            if let Some(given) = self.root.get(key) {
                keywords.insert(key.into(), given.clone());
            }
        }
    }
}

/// A minimum, and an optional maximum, of lengths or item counts.
fn limits_of(keywords: &Map<String, Value>, keys: [&str; 2], of: &str) -> Result<(u64, Option<u64>), Error> {
    let limit = |key: &str| match keywords.get(key) {
        None => Ok(None),
        Some(found) => match found.as_u64().filter(|&n| n <= 1_000_000) {
            Some(n) => Ok(Some(n)),
            None => Err(refused(format!("{of}.{key}"), "0 to 1000000", found)),
        },
    };
    let (least, most) = (limit(keys[0])?.unwrap_or(0), limit(keys[1])?);
    match most {
        Some(most) if most < least => {
            Err(refused(format!("{of}.{}", keys[1]), format!("at least {} of {least}", keys[0]), most))
        }
        _ => Ok((least, most)),
    }
}

/// The strings in `enum` and `const`.
fn named_texts(keywords: &Map<String, Value>, of: &str) -> Result<Option<Vec<String>>, Error> {
    let values = match (keywords.get("enum").and_then(Value::as_array), keywords.get("const")) {
        (None, None) => return Ok(None),
        (_, Some(one)) => vec![one.clone()],
        (Some(all), None) => all.clone(),
    };
    let texts: Vec<String> = values.iter().filter_map(Value::as_str).map(str::to_owned).collect();
    match texts.is_empty() {
        true => Err(refused(format!("{of}.enum"), "a text", Value::from(values))),
        false => Ok(Some(texts)),
    }
}

/// A string in Gemma's quotes.
fn gemma_text(quote: &str, keywords: &Map<String, Value>, of: &str, lark: &mut Lark) -> Result<String, Error> {
    let (least, most) = limits_of(keywords, ["minLength", "maxLength"], of)?;
    if let Some(texts) = named_texts(keywords, of)? {
        let fits = |text: &&String| {
            let n = text.chars().count() as u64;
            n >= least && most.is_none_or(|most| n <= most) && !text.contains(GEMMA_QUOTE)
        };
        let texts: Vec<String> = texts.iter().filter(fits).map(|text| quoted(text)).collect();
        return match texts.is_empty() {
            true => Err(refused(format!("{of}.enum"), "a text that this format supports", "none")),
            false => Ok(format!("{quote} {} {quote}", either(&texts))),
        };
    }
    // The quote's letters also end a string.
    let text = format!("/[^<]*(?:<{})*/{}", other_than(&[&GEMMA_QUOTE[1..]], "<"), lengths(least, most));
    let text = lark.terminal(&text);
    match quote.starts_with('<') {
        true => Ok(format!("{quote} {text} {quote}")),
        false => {
            let text = lark.lazy(&format!("{text} {quote}"));
            Ok(format!("{quote} {text}"))
        }
    }
}

/// ` & ...` for texts of some length.
fn lengths(least: u64, most: Option<u64>) -> String {
    match (least, most) {
        (0, None) => String::new(),
        (least, None) => format!(" & /(?s:.{{{least},}})/"),
        (least, Some(most)) => format!(" & /(?s:.{{{least},{most}}})/"),
    }
}

/// A regular expression for texts without the `stops` characters that start with none of `words`. A complement is
/// equivalent, but intersecting it with a length is slow.
fn other_than(words: &[&str], stops: &str) -> String {
    let mut firsts: Vec<char> = words.iter().filter_map(|word| word.chars().next()).collect();
    firsts.dedup();
    let stops_escaped = escaped(stops);
    let class: String = firsts.iter().map(|c| escaped(c.encode_utf8(&mut [0; 4]))).collect();
    let mut ways = vec![format!("[^{class}{stops_escaped}][^{stops_escaped}]*")];
    for first in firsts {
        let rest: Vec<&str> = words.iter().filter_map(|word| word.strip_prefix(first)).collect();
        if !rest.contains(&"") {
            ways.push(escaped(first.encode_utf8(&mut [0; 4])) + &other_than(&rest, stops));
        }
    }
    format!("(?:{})?", ways.join("|"))
}

/// Texts that contain no value's end, in parts that start with `<` or a line break.
fn without_value_ends(tags: &CallTags) -> String {
    let [value, key, function] = [tags.value[1], tags.key[0], tags.end].map(|tag| tag.trim_start_matches('<'));
    if !tags.is_on_lines {
        return format!("[^<]*(?:<{})*", other_than(&[value], "<"));
    }
    let [in_line, begins_line] = [&[value][..], &[value, function, key]].map(|words| other_than(words, "<\n"));
    let line = format!("(?:(?:<{begins_line}|[^<\\n]+)(?:<{in_line})*)?");
    format!("{line}(?:\\n{line})*")
}

/// Texts without the first letters of an end tag, such as `</p`: JSON between tags must not contain it.
fn no_tag(end: &str) -> String {
    let letter: String = end.chars().skip(2).take(1).collect();
    format!("^(?:[^<]|<+(?:/<+)*(?:[^</]|/[^<{letter}]))*(?:<+(?:/<+)*/?)?$")
}

/// A raw string between tags: it has no JSON form, so all its restrictions must be expressed here.
fn tagged_text(
    rules: &TagRules<'_>,
    keywords: &Map<String, Value>,
    of: &str,
    lark: &mut Lark,
) -> Result<String, Error> {
    const KNOWN: [&str; 7] = ["type", "enum", "const", "minLength", "maxLength", "pattern", "format"];
    const SCHEMAS: [&str; 7] = ["$ref", "allOf", "anyOf", "oneOf", "not", "if", "contentEncoding"];
    if let Some((key, _)) = keywords.iter().find(|(key, _)| SCHEMAS.contains(&key.as_str())) {
        let known = KNOWN.join(", ");
        // `tighten` adds a pattern to an existing one.
        let is_pattern = |schema: &Value| schema.as_object().is_some_and(|all| all.keys().eq(["pattern"]));
        let are_patterns =
            keywords.get("allOf").and_then(Value::as_array).is_some_and(|all| all.iter().all(is_pattern));
        if key != "allOf" || !are_patterns {
            return Err(refused(
                format!("{of}.{key}"),
                format!("one of {known} for a string between tags"),
                format!("`{key}`"),
            ));
        }
    }
    let (least, most) = limits_of(keywords, ["minLength", "maxLength"], of)?;
    if let Some(texts) = named_texts(keywords, of)? {
        let ends = rules.tags.value_ends();
        let fits = |text: &&String| {
            let n = text.chars().count() as u64;
            let whole = format!("\n{text}");
            n >= least && most.is_none_or(|most| n <= most) && !ends.iter().any(|end| whole.contains(end))
        };
        let texts: Vec<String> = texts.iter().filter(fits).map(|text| rules.close.behind(text)).collect();
        return match texts.is_empty() {
            true => Err(refused(format!("{of}.enum"), "a text that this format supports", "none")),
            false => Ok(either(&texts)),
        };
    }
    // A token's letters also end a value.
    let mut text = format!("/{}/{}", without_value_ends(rules.tags), lengths(least, most));
    let more = keywords.get("allOf").and_then(Value::as_array).into_iter().flatten();
    let patterns = more.filter_map(|schema| schema.get("pattern")).chain(keywords.get("pattern"));
    for pattern in patterns {
        let found = pattern.as_str().and_then(whole_texts);
        let found = found.ok_or_else(|| {
            refused(format!("{of}.pattern"), "a pattern with `^` and `$` only at the ends of alternatives", pattern)
        })?;
        text += &format!(" & /{found}/");
    }
    if let Some(pattern) = keywords.get("format").and_then(Value::as_str).and_then(form_of) {
        text += &format!(" & /{}/", pattern.replace('/', "\\/"));
    }
    let text = lark.terminal(&text);
    Ok(match &rules.close {
        TagEnd::Letters(letters) => lark.lazy(&format!("{text} {}", quoted(letters))),
        TagEnd::Token(rule) => format!("{text} {rule}"),
    })
}

/// A regular expression for a format; `None` for an annotation. `tighten` restricts the days.
fn form_of(format: &str) -> Option<&'static str> {
    macro_rules! date {
        () => {
            "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
        };
    }
    macro_rules! time {
        () => {
            r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
        };
    }
    /// Hours, minutes and seconds, without gaps.
    macro_rules! time_span {
        () => {
            "T(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S)"
        };
    }
    macro_rules! hex {
        () => {
            "[0-9a-fA-F]{1,4}"
        };
    }
    /// An address with `before` groups before `::`, and at most `after` groups beyond the first one after it.
    macro_rules! cut {
        ($before:literal, $after:literal) => {
            concat!("(?:", hex!(), ":){", $before, "}:(?:", hex!(), "(?::", hex!(), "){0,", $after, "})?|")
        };
    }
    Some(match format {
        "duration" => concat!(
            "P(?:(?:[0-9]{1,6}Y(?:[0-9]{1,6}M(?:[0-9]{1,6}D)?)?|[0-9]{1,6}M(?:[0-9]{1,6}D)?|[0-9]{1,6}D)(?:",
            time_span!(),
            ")?|",
            time_span!(),
            "|[0-9]{1,6}W)"
        ),
        "ipv6" => concat!(
            "(?:",
            hex!(),
            ":){7}",
            hex!(),
            "|",
            cut!(1, 5),
            cut!(2, 4),
            cut!(3, 3),
            cut!(4, 2),
            cut!(5, 1),
            cut!(6, 0),
            "::(?:",
            hex!(),
            "(?::",
            hex!(),
            "){0,6})?"
        ),
        "date" => date!(),
        "time" => time!(),
        "date-time" => concat!(date!(), "[tT]", time!()),
        "uuid" => "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
        "ipv4" => {
            r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
        }
        "email" => {
            r"[A-Za-z0-9_+-]{1,32}(?:\.[A-Za-z0-9_+-]{1,31}){0,1}@[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?){0,3}"
        }
        "hostname" => {
            r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?){0,2}"
        }
        "uri" => {
            r"[a-z][a-z0-9+.-]{1,15}://[A-Za-z0-9][A-Za-z0-9.-]{0,80}(?::[0-9]{1,4})?(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*(?:\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?(?:#[A-Za-z0-9._~!$&'()*+,;=:@/?-]*)?"
        }
        _ => return None,
    })
}

/// A regular expression for whole texts that contain a match of a pattern, with `/` escaped for Lark; `None` if `^`
/// does not begin an alternative, or `$` does not end one.
fn whole_texts(pattern: &str) -> Option<String> {
    let (mut alternatives, mut one) = (Vec::new(), String::new());
    let (mut depth, mut in_class, mut escapes) = (0, false, false);
    let (mut begins, mut ends) = (false, false);
    let mut close = |one: &mut String, begins: &mut bool, ends: &mut bool| {
        let any = |is_bound: bool| if is_bound { "" } else { "(?s:.*)" };
        alternatives.push(format!("{}(?:{}){}", any(*begins), std::mem::take(one), any(*ends)));
        (*begins, *ends) = (false, false);
    };
    for c in pattern.chars() {
        if ends && !(c == '|' && depth == 0) {
            return None;
        }
        if escapes {
            // Word boundaries are refused later, when the grammar is compiled.
            escapes = false;
            one.push(c);
            continue;
        }
        match c {
            '\\' => escapes = true,
            '[' if !in_class => in_class = true,
            ']' if in_class => in_class = false,
            _ if in_class => {}
            '(' => depth += 1,
            ')' => depth -= 1,
            '^' if one.is_empty() && depth == 0 && !begins => {
                begins = true;
                continue;
            }
            '$' if depth == 0 => {
                ends = true;
                continue;
            }
            '^' | '$' => return None,
            '|' if depth == 0 => {
                close(&mut one, &mut begins, &mut ends);
                continue;
            }
            _ => {}
        }
        match c {
            '/' => one += "\\/",
            '\n' => one += "\\n",
            c => one.push(c),
        }
    }
    close(&mut one, &mut begins, &mut ends);
    Some(alternatives.join("|"))
}

/// Excludes the closing tag from the schema's strings, by this pattern.
fn without_tags(schema: &mut Value, no_tag: &str) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(|schema| without_tags(schema, no_tag)),
        Value::Object(keywords) => {
            let is_data = |key: &str| matches!(key, "const" | "default" | "enum" | "examples");
            for (key, value) in keywords.iter_mut().filter(|(key, _)| !is_data(key)) {
                match value {
                    // Properties may be named like keywords.
                    Value::Object(members) if MAPS.contains(&key.as_str()) => {
                        members.values_mut().for_each(|member| without_tags(member, no_tag));
                    }
                    value => without_tags(value, no_tag),
                }
            }
            let is_text = match keywords.get("type") {
                Some(Value::String(kind)) => kind == "string",
                Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
                _ => false,
            };
            if !is_text || keywords.contains_key("enum") || keywords.contains_key("const") {
                return;
            }
            if !keywords.contains_key("pattern") {
                keywords.insert("pattern".into(), no_tag.into());
            } else if let Value::Array(all) = keywords.entry("allOf").or_insert_with(|| json!([])) {
                all.push(json!({"pattern": no_tag}));
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{CallTags, no_tag, whole_texts, without_tags};
    use crate::answer::Format;

    /// Covers referenced schemas and properties named like keywords.
    #[test]
    fn string_schemas_exclude_the_closing_tag() {
        let text = json!({"type": "string"});
        let mut schema = json!({"type": "object", "properties": {"default": text, "a": {"enum": ["x"], "type": "string"}},
            "$defs": {"enum": {"anyOf": [text, {"type": "null"}]}}, "default": {"type": "string"}});
        without_tags(&mut schema, "a");
        let kept = json!({"type": "string", "pattern": "a"});
        assert_eq!(schema["properties"], json!({"default": kept, "a": {"enum": ["x"], "type": "string"}}));
        assert_eq!(schema["$defs"]["enum"]["anyOf"][0], kept);
        assert_eq!(schema["default"], text);
    }

    #[test]
    fn whole_text_pattern_matches_like_a_pattern_search() {
        let texts = ["", "a", "b", "ab", "xa", "ax", "bx", "xb", "a/b", "x\na"];
        for pattern in ["a", "^a", "a$", "^a$", "^a|b$", "a|^b", "^(a|b)$", "[$^]", "a/b", "^$", r"\$", "^[^/]*$"] {
            let whole = whole_texts(pattern).unwrap();
            let whole = regex::Regex::new(&format!("^(?:{whole})$")).unwrap();
            let found = regex::Regex::new(pattern).unwrap();
            for text in texts {
                assert_eq!(whole.is_match(text), found.is_match(text), "{pattern} in {text:?}");
            }
        }
        for pattern in ["a^", "$a", "(^a)", "a(b$)"] {
            assert_eq!(whole_texts(pattern), None, "{pattern}");
        }
    }

    #[test]
    fn value_pattern_matches_all_texts_without_an_end_tag() {
        for (format, end) in [(Format::Xml, "</parameter>"), (Format::Glm, "</arg_value>")] {
            let tags = CallTags::of(format).unwrap();
            let whole = regex::Regex::new(&format!("^(?:{})$", super::without_value_ends(tags))).unwrap();
            let cut = &end[..end.len() - 1];
            let parts = [end, "<parameter=", "</function>", "\n", "<", "/", "a", cut, "</fun", "<p>", "\n\n"];
            // The preceding line break is part of the tag.
            let ends: &[&str] = match tags.is_on_lines {
                true => &[end, "\n<parameter=", "\n</function>"],
                false => &[end],
            };
            for i in 0..parts.len().pow(4) {
                let at = |k: u32| parts[i / parts.len().pow(k) % parts.len()];
                let text = [at(0), at(1), at(2), at(3)].concat();
                let line = format!("\n{text}");
                assert_eq!(whole.is_match(&text), !ends.iter().any(|end| line.contains(end)), "{text:?}");
            }
        }
    }

    #[test]
    fn tag_free_pattern_matches_all_texts_without_the_tag() {
        let found = regex::Regex::new(&no_tag("</parameter>")).unwrap();
        for text in ["", "a", "<", "</", "<b>", "</b>", "<<", "</<", "<</", "</a", "</q", "<</<b", "</\n"] {
            assert!(found.is_match(text), "{text}");
        }
        for text in ["</p", "</parameter>", "<</p", "</</p", "x</parameter>y"] {
            assert!(!found.is_match(text), "{text}");
        }
        assert!(!regex::Regex::new(&no_tag("</｜DSML｜parameter>")).unwrap().is_match("a</｜DSML"));
    }
}
