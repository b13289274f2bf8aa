//! Parses complete calls: JSON, Gemma's notation, Python literals.

use std::collections::HashMap;

use serde_json::{Map, Value as Json};

use super::ToolCall;
use super::body::MAX_DEPTH;
use super::format::Format;
use super::section::SectionMarks;
use super::tags::CallTags;

/// Gemma's quote, a token.
pub const GEMMA_QUOTE: &str = "<|\"|>";

/// What was expected, and what was found.
pub type Wrong = (String, String);

/// Types of parameters by tool and name: the `type` of each property in the schema.
pub type Types = HashMap<String, HashMap<String, Json>>;

/// The types of tools, each `{"type": "function", "function": {...}}` or only the `function` object.
pub fn types_of(tools: &[Json]) -> Types {
    let described = tools.iter().filter_map(|tool| {
        let tool = tool.get("function").unwrap_or(tool);
        let properties = tool.pointer("/parameters/properties").and_then(Json::as_object);
        let types = properties.into_iter().flatten();
        let types = types.filter_map(|(name, schema)| Some((name.clone(), schema.get("type")?.clone())));
        Some((tool.get("name")?.as_str()?.to_owned(), types.collect()))
    });
    described.collect()
}

/// The calls in a complete text.
pub fn parse(format: Format, raw: &str, types: Option<&Types>) -> Result<Vec<ToolCall>, Wrong> {
    let raw = raw.trim();
    if let Some(tags) = CallTags::of(format).filter(|_| !raw.starts_with(['{', '['])) {
        return tags.parse(raw, types).map(|call| vec![call]);
    }
    if let Some(marks) = SectionMarks::of(format) {
        return marks.parse(raw).map(|call| vec![call]);
    }
    match format {
        Format::Lfm2 if !raw.trim_start_matches('[').trim_start().starts_with('{') => {
            let mut reader = ValueParser::new(raw, ValueNotation::Python);
            reader.calls()
        }
        Format::Llama3 if !raw.starts_with('{') => {
            let mut reader = ValueParser::new(raw, ValueNotation::Python);
            reader.call().map(|call| vec![call])
        }
        Format::Gemma4 => {
            let (head, arguments) = raw.split_at(raw.find('{').unwrap_or(raw.len()));
            let name = head.strip_prefix("call:").filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| wrong("`call:` and a name", head))?;
            match ValueParser::new(arguments, ValueNotation::Gemma).value()? {
                Json::Object(arguments) => Ok(vec![ToolCall { name: name.into(), arguments, id: None }]),
                other => Err(wrong("arguments in braces", &other.to_string())),
            }
        }
        Format::Mistral if !raw.starts_with(['[', '{']) => mistral(raw).map(|call| vec![call]),
        _ => {
            let value: Json = serde_json::from_str(raw).map_err(|error| wrong("JSON", &error.to_string()))?;
            match value {
                Json::Array(calls) => calls.into_iter().map(call_of).collect(),
                call => call_of(call).map(|call| vec![call]),
            }
        }
    }
}

/// A call's arguments: an object or, as in OpenAI's interface, a string with one.
pub fn arguments(value: Json) -> Result<Map<String, Json>, Wrong> {
    let value = match value {
        Json::String(text) => match serde_json::from_str(&text) {
            Ok(value) => value,
            Err(_) => Json::String(text),
        },
        value => value,
    };
    match value {
        Json::Object(arguments) => Ok(arguments),
        other => Err(wrong("arguments as a JSON object", &other.to_string())),
    }
}

/// A call as JSON: `name`, and optionally `arguments` or `parameters`.
fn call_of(value: Json) -> Result<ToolCall, Wrong> {
    let found = value.to_string();
    let Json::Object(mut call) = value else { return Err(wrong("a JSON object with a name", &found)) };
    let id = call.get("id").and_then(Json::as_str).map(str::to_owned);
    if let Some(Json::Object(function)) = call.get_mut("function") {
        call = std::mem::take(function);
    }
    let name = call.get("name").and_then(Json::as_str).filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| wrong("a JSON object with a name", &found))?.to_owned();
    let given = call.remove("arguments").or_else(|| call.remove("parameters"));
    let arguments = given.map_or_else(|| Ok(Map::new()), arguments)?;
    Ok(ToolCall { name, arguments, id })
}

/// `NAME[CALL_ID]id[ARGS]{...}`, with optional parts in brackets.
fn mistral(raw: &str) -> Result<ToolCall, Wrong> {
    let (head, given) = raw.split_at(raw.find('{').unwrap_or(raw.len()));
    let head = head.trim_end().strip_suffix("[ARGS]").unwrap_or(head).trim();
    let (name, id) = head.split_once("[CALL_ID]").map_or((head, None), |(name, id)| (name, Some(id.to_owned())));
    if name.is_empty() || name.contains(['[', ']', ' ']) {
        return Err(wrong("a name and `[ARGS]`", head));
    }
    let value = serde_json::from_str(given).map_err(|error| wrong("JSON", &error.to_string()))?;
    Ok(ToolCall { name: name.into(), arguments: arguments(value)?, id })
}

/// A function's name: Llama writes `NAME.call`.
pub fn python_name(name: &str) -> &str {
    name.strip_suffix(".call").unwrap_or(name)
}

/// An error with the start of the found text.
pub fn wrong(expected: &str, found: &str) -> Wrong {
    (expected.into(), super::shortened(found))
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ValueNotation {
    Json,
    /// Keys bare or in Gemma's quotes; strings in those or, as models also write, in plain ones.
    Gemma,
    /// Calls `f(a=1)` and literals. <https://docs.python.org/3/reference/lexical_analysis.html#literals>
    Python,
}

/// Parses values from left to right.
pub struct ValueParser<'t> {
    pub rest: &'t str,
    pub notation: ValueNotation,
    /// Lists and objects that are open: a scanner limits them, but not between tags.
    depth: usize,
}

impl<'t> ValueParser<'t> {
    pub fn new(text: &'t str, notation: ValueNotation) -> Self {
        ValueParser { rest: text, notation, depth: 0 }
    }

    /// Skips white space, then `token` if it is next.
    pub fn skip(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    pub fn expect(&mut self, token: &str) -> Result<(), Wrong> {
        match self.skip(token) {
            true => Ok(()),
            false => Err(wrong(&format!("`{token}`"), self.rest)),
        }
    }

    /// Up to the first of these characters.
    fn word(&mut self, ends: &[char]) -> &'t str {
        let (word, rest) = self.rest.split_at(self.rest.find(ends).unwrap_or(self.rest.len()));
        self.rest = rest;
        word.trim()
    }

    /// `[f(a=1), g()]`
    fn calls(&mut self) -> Result<Vec<ToolCall>, Wrong> {
        let mut calls = Vec::new();
        self.expect("[")?;
        while !self.skip("]") {
            calls.push(self.call()?);
            if !self.skip(",") {
                self.expect("]")?;
                break;
            }
        }
        Ok(calls)
    }

    /// `f(a=1)`
    fn call(&mut self) -> Result<ToolCall, Wrong> {
        let name = python_name(self.word(&['(', ',', ']', '=', '"', '\''])).to_owned();
        self.expect("(")?;
        let mut arguments = Map::new();
        while !self.skip(")") {
            let key = self.word(&['=', ',', ')', '(', '"', '\'']);
            if key.is_empty() {
                return Err(wrong("an argument with its name", self.rest));
            }
            self.expect("=")?;
            arguments.insert(key.into(), self.value()?);
            if !self.skip(",") {
                self.expect(")")?;
                break;
            }
        }
        match name.is_empty() {
            true => Err(wrong("a name", self.rest)),
            false => Ok(ToolCall { name, arguments, id: None }),
        }
    }

    pub fn value(&mut self) -> Result<Json, Wrong> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(wrong("at most 64 nested lists and objects", self.rest));
        }
        let value = self.value_of_depth()?;
        self.depth -= 1;
        Ok(value)
    }

    fn value_of_depth(&mut self) -> Result<Json, Wrong> {
        if self.skip("{") {
            return self.object();
        }
        for (open, close) in [("[", "]"), ("(", ")")] {
            if self.skip(open) {
                let mut items = Vec::new();
                while !self.skip(close) {
                    items.push(self.value()?);
                    if !self.skip(",") {
                        self.expect(close)?;
                        break;
                    }
                }
                return Ok(Json::Array(items));
            }
        }
        if let Some(text) = self.string()? {
            return Ok(Json::String(text));
        }
        match self.word(&[',', '}', ']', ')']) {
            "True" | "true" => Ok(Json::Bool(true)),
            "False" | "false" => Ok(Json::Bool(false)),
            "None" | "null" => Ok(Json::Null),
            word => {
                // Python allows numbers that JSON does not, such as `1_000` and `.5`.
                let plain = || word.replace('_', "").parse::<f64>().ok().and_then(serde_json::Number::from_f64);
                let number = serde_json::from_str(word).ok().or_else(plain);
                number.map(Json::Number).ok_or_else(|| wrong("a value", word))
            }
        }
    }

    /// An object after its `{`.
    fn object(&mut self) -> Result<Json, Wrong> {
        let mut fields = Map::new();
        while !self.skip("}") {
            let key = match self.string()? {
                Some(key) => key,
                None if self.notation == ValueNotation::Gemma => self.word(&[':', ',', '}']).to_owned(),
                None => return Err(wrong("a key in quotes", self.rest)),
            };
            self.expect(":")?;
            fields.insert(key, self.value()?);
            if !self.skip(",") {
                self.expect("}")?;
                break;
            }
        }
        Ok(Json::Object(fields))
    }

    /// A string, if one starts here.
    fn string(&mut self) -> Result<Option<String>, Wrong> {
        let quote = if self.notation == ValueNotation::Gemma { GEMMA_QUOTE } else { "the end of a string" };
        match self.string_part()? {
            Some((text, false)) => Err(wrong(quote, &text)),
            part => Ok(part.map(|(text, _)| text)),
        }
    }

    /// A string, if one starts here, as far as the text goes, and whether it ends.
    pub fn string_part(&mut self) -> Result<Option<(String, bool)>, Wrong> {
        if self.notation == ValueNotation::Gemma {
            if self.skip(GEMMA_QUOTE) {
                let (text, rest) = self.rest.split_once(GEMMA_QUOTE).map_or((self.rest, None), |(a, b)| (a, Some(b)));
                self.rest = rest.unwrap_or_default();
                return Ok(Some((text.into(), rest.is_some())));
            }
            if !self.rest.starts_with('"') {
                return Ok(None);
            }
        }
        let Some(quote) = ['"', '\''].into_iter().find(|quote| self.skip(quote.encode_utf8(&mut [0; 4]))) else {
            return Ok(None);
        };
        let mut text = String::new();
        let mut chars = self.rest.chars();
        while let Some(c) = chars.next() {
            if c == quote {
                self.rest = chars.as_str();
                return Ok(Some((text, true)));
            }
            if c != '\\' {
                text.push(c);
                continue;
            }
            let Some(escaped) = chars.next() else { break };
            match escaped {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                'b' => text.push('\u{8}'),
                'f' => text.push('\u{C}'),
                '\n' => {}
                '\\' | '\'' | '"' | '/' => text.push(escaped),
                'x' | 'u' | 'U' => {
                    let n = match escaped {
                        'x' => 2,
                        'u' => 4,
                        _ => 8,
                    };
                    if chars.as_str().len() < n {
                        break;
                    }
                    let mut code = hex(&mut chars, n)?;
                    // JSON writes characters outside the basic plane as surrogate pairs.
                    if (0xD800..0xDC00).contains(&code) {
                        let low = chars.as_str();
                        if low.len() < 6 && (low.starts_with("\\u") || "\\u".starts_with(low)) {
                            break;
                        }
                        if low.starts_with("\\u") {
                            chars.nth(1);
                            let low = hex(&mut chars, 4)?;
                            code = 0x10000 + ((code - 0xD800) << 10) + (low.wrapping_sub(0xDC00) & 0x3FF);
                        }
                    }
                    text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                }
                // As in Python.
                other => text.extend(['\\', other]),
            }
        }
        self.rest = "";
        Ok(Some((text, false)))
    }
}

/// A number of `n` hexadecimal digits.
fn hex(chars: &mut std::str::Chars<'_>, n: usize) -> Result<u32, Wrong> {
    let text = chars.as_str();
    let digits = text.get(..n).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let code = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok());
    *chars = text.get(n..).unwrap_or_default().chars();
    code.ok_or_else(|| wrong("digits of a character", text))
}
