//! Calls whose text has begun: their names, and their arguments as JSON as far as the text goes.

use serde_json::Value as Json;

use super::format::Format;
use super::section::SectionMarks;
use super::tags::{CallTags, is_string_type};
use super::values::{GEMMA_QUOTE, Types, ValueNotation, ValueParser, python_name};

/// A call as far as its text goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BegunCall {
    pub name: String,
    pub id: Option<String>,
    /// The beginning of its arguments, without white space.
    pub arguments: String,
    pub is_whole: bool,
}

impl BegunCall {
    pub fn new(name: &str, id: Option<String>) -> BegunCall {
        BegunCall { name: name.into(), id, arguments: String::new(), is_whole: false }
    }
}

/// The calls in a text that may end anywhere: those whose names are complete. A longer text has the same calls, and
/// arguments that begin with these. `header`: the call's name, if it is in a header.
pub fn begun_calls(format: Format, raw: &str, types: Option<&Types>, header: Option<&str>) -> Vec<BegunCall> {
    let mut calls = Vec::new();
    // `None` where the text ends.
    let _ = read(format, raw.trim_start(), types, header, &mut calls);
    calls
}

fn read(
    format: Format,
    raw: &str,
    types: Option<&Types>,
    header: Option<&str>,
    calls: &mut Vec<BegunCall>,
) -> Option<()> {
    if let Some(name) = header {
        calls.push(BegunCall::new(name, None));
        return ValueParser::new(raw, ValueNotation::Json).write_arguments(calls.last_mut()?);
    }
    if let Some(tags) = CallTags::of(format).filter(|_| !raw.starts_with(['{', '['])) {
        return tagged(tags, raw, types, calls);
    }
    if let Some(marks) = SectionMarks::of(format) {
        let call = marks.split(raw)?;
        calls.push(BegunCall::new(call.name, call.id.map(str::to_owned)));
        return ValueParser::new(call.arguments, ValueNotation::Json).write_arguments(calls.last_mut()?);
    }
    match format {
        Format::Lfm2 if !raw.trim_start_matches('[').trim_start().starts_with('{') => {
            let mut parser = ValueParser::new(raw, ValueNotation::Python);
            parser.expect("[").ok()?;
            parser.write_items("]", |parser| parser.write_call(calls))
        }
        Format::Llama3 if !raw.starts_with('{') => {
            let mut parser = ValueParser::new(raw, ValueNotation::Python);
            parser.write_call(calls)
        }
        Format::Gemma4 => {
            let (head, _) = raw.split_once('{')?;
            calls.push(BegunCall::new(head.strip_prefix("call:")?, None));
            let mut parser = ValueParser::new(raw.get(head.len()..)?, ValueNotation::Gemma);
            parser.write_arguments(calls.last_mut()?)
        }
        Format::Mistral if !raw.starts_with(['[', '{']) => {
            let (head, _) = raw.split_once('{')?;
            let name = head.trim_end().strip_suffix("[ARGS]").unwrap_or(head).trim();
            let (name, id) = name.split_once("[CALL_ID]").map_or((name, None), |(name, id)| (name, Some(id.into())));
            calls.push(BegunCall::new(name, id));
            let mut parser = ValueParser::new(raw.get(head.len()..)?, ValueNotation::Json);
            parser.write_arguments(calls.last_mut()?)
        }
        _ => {
            let mut parser = ValueParser::new(raw, ValueNotation::Json);
            match parser.skip("[") {
                true => parser.write_items("]", |parser| parser.write_json_call(calls, None)),
                false => parser.write_json_call(calls, None),
            }
        }
    }
}

/// A call in tags.
fn tagged(tags: &CallTags, raw: &str, types: Option<&Types>, calls: &mut Vec<BegunCall>) -> Option<()> {
    let (name, mut rest) = tags.name(raw)?;
    let types = types.and_then(|types| types.get(name));
    calls.push(BegunCall::new(name, None));
    let call = calls.last_mut()?;
    let mut before = "{";
    while let Some((key, is_string, after)) = tags.argument(rest) {
        let is_string = is_string.or_else(|| is_string_type(types.and_then(|types| types.get(key))));
        let begin = format!("{before}{}:", Json::from(key));
        let Some((value, behind)) = tags.value(after, is_string) else {
            if is_string == Some(true) {
                let text = if tags.is_on_lines { after.strip_prefix('\n').unwrap_or(after) } else { after };
                let ends = tags.value_ends();
                call.arguments += &begin;
                write_text(certain(text, &ends), false, &mut call.arguments);
            }
            return None;
        };
        call.arguments += &begin;
        call.arguments += &value.to_string();
        (before, rest) = (",", behind);
    }
    if rest.trim() == tags.end {
        call.arguments += if before == "{" { "{}" } else { "}" };
        call.is_whole = true;
    }
    Some(())
}

/// A text without its longest end that may begin one of these.
fn certain<'t>(text: &'t str, ends: &[impl AsRef<str>]) -> &'t str {
    let most = ends.iter().map(|end| end.as_ref().len()).max().unwrap_or(0);
    let from = text.len().saturating_sub(most);
    let may_begin =
        |at: &usize| text.get(*at..).is_some_and(|tail| ends.iter().any(|end| end.as_ref().starts_with(tail)));
    text.get(..(from..text.len()).find(may_begin).unwrap_or(text.len())).unwrap_or(text)
}

/// Writes a JSON string; without its end if it goes on.
fn write_text(text: &str, ends: bool, out: &mut String) {
    let quoted = Json::from(text).to_string();
    *out += if ends { &quoted } else { quoted.strip_suffix('"').unwrap_or(&quoted) };
}

/// Each returns `None` where the text ends or is malformed; what was written until then is certain.
impl ValueParser<'_> {
    /// The arguments of a call: an object, or a JSON string with one.
    fn write_arguments(&mut self, call: &mut BegunCall) -> Option<()> {
        if self.notation == ValueNotation::Json
            && let Some((text, ends)) = self.string_part().ok()?
        {
            ValueParser::new(&text, self.notation).write_arguments(call)?;
            call.is_whole = ends;
            return ends.then_some(());
        }
        self.expect("{").ok()?;
        self.write_members(("}", ":"), &mut call.arguments)?;
        call.is_whole = true;
        Some(())
    }

    /// `{"name": ..., "arguments": {...}}`, also inside `function`.
    fn write_json_call(&mut self, calls: &mut Vec<BegunCall>, id: Option<String>) -> Option<()> {
        let (at, mut id, mut name) = (calls.len(), id, None::<String>);
        self.expect("{").ok()?;
        self.write_items("}", |parser| {
            let key = parser.key(":")?;
            let is_given = matches!(key.as_str(), "arguments" | "parameters");
            match (key.as_str(), &name) {
                ("function", _) => return parser.write_json_call(calls, id.clone()),
                ("arguments" | "parameters", Some(name)) if calls.len() == at => {
                    calls.push(BegunCall::new(name, id.clone()));
                    return parser.write_arguments(calls.last_mut()?);
                }
                _ => {}
            }
            let mut value = String::new();
            parser.write(&mut value)?;
            let text = || serde_json::from_str::<String>(&value).ok();
            match key.as_str() {
                "name" => name = text(),
                "id" => id = text(),
                // Arguments before the name.
                _ if is_given => return None,
                _ => {}
            }
            Some(())
        })?;
        if calls.len() == at {
            calls.push(BegunCall { arguments: "{}".into(), is_whole: true, ..BegunCall::new(&name?, id) });
        }
        Some(())
    }

    /// `f(a=1)`
    fn write_call(&mut self, calls: &mut Vec<BegunCall>) -> Option<()> {
        self.skip("");
        let (name, rest) = self.rest.split_once('(')?;
        self.rest = rest;
        calls.push(BegunCall::new(python_name(name.trim()), None));
        let call = calls.last_mut()?;
        self.write_members((")", "="), &mut call.arguments)?;
        call.is_whole = true;
        Some(())
    }

    /// Members after the opening bracket, up to `close`.
    fn write_members(&mut self, (close, separator): (&str, &str), out: &mut String) -> Option<()> {
        let mut before = '{';
        self.write_items(close, |parser| {
            let key = parser.key(separator)?;
            out.push(std::mem::replace(&mut before, ','));
            write_text(&key, true, out);
            out.push(':');
            parser.write(out)
        })?;
        *out += if before == '{' { "{}" } else { "}" };
        Some(())
    }

    /// Items after the opening bracket, up to `close`.
    fn write_items(&mut self, close: &str, mut item: impl FnMut(&mut Self) -> Option<()>) -> Option<()> {
        while !self.skip(close) {
            item(self)?;
            if !self.skip(",") {
                return self.expect(close).ok();
            }
        }
        Some(())
    }

    /// A key and its separator.
    fn key(&mut self, separator: &str) -> Option<String> {
        let key = match separator {
            "=" => None,
            _ => self.string_part().ok()?,
        };
        let key = match key {
            Some((key, ends)) => ends.then_some(key)?,
            None if separator == ":" && self.notation != ValueNotation::Gemma => return None,
            None => {
                let (key, _) = self.rest.split_once(separator)?;
                self.rest = self.rest.get(key.len()..)?;
                key.trim().to_owned()
            }
        };
        self.expect(separator).ok()?;
        Some(key)
    }

    /// A value.
    fn write(&mut self, out: &mut String) -> Option<()> {
        if self.skip("{") {
            return self.write_members(("}", ":"), out);
        }
        for (open, close) in [("[", "]"), ("(", ")")] {
            if self.skip(open) {
                let mut before = '[';
                self.write_items(close, |parser| {
                    // Nothing is certain of an item that has not begun.
                    (!parser.rest.is_empty()).then_some(())?;
                    out.push(std::mem::replace(&mut before, ','));
                    parser.write(out)
                })?;
                *out += if before == '[' { "[]" } else { "]" };
                return Some(());
            }
        }
        if let Some((text, ends)) = self.string_part().ok()? {
            let text =
                if ends || self.notation != ValueNotation::Gemma { &text } else { certain(&text, &[GEMMA_QUOTE]) };
            write_text(text, ends, out);
            return ends.then_some(());
        }
        // A number may go on.
        self.rest.find([',', '}', ']', ')'])?;
        *out += &self.value().ok()?.to_string();
        Some(())
    }
}
