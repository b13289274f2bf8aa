//! Calls whose arguments are text between tags: Qwen3-Coder's, GLM's, Seed-OSS's, DeepSeek V3.2's and MiniMax M2's.
//!
//! A value is a string if its tag or the tool's schema says so, or if it is not a literal: templates write strings bare
//! and other values as JSON, or Seed-OSS's as Python.

use serde_json::{Map, Value as Json};

use super::ToolCall;
use super::body::{MAX_HEAD_BYTES, ScanStep, is_name};
use super::format::Format;
use super::values::{Types, ValueNotation, ValueParser, Wrong, wrong};

/// The tags of a format.
#[derive(Debug)]
pub struct CallTags {
    /// Around the function's name. If both are empty, it is up to a line break or tag.
    pub name: [&'static str; 2],
    /// Around a parameter's name.
    pub key: [&'static str; 2],
    /// Around its value. Before the first one is only white space, or whether it is a string.
    pub value: [&'static str; 2],
    pub end: &'static str,
    /// Whether the line breaks next to a value belong to its tags, and its end tag may be missing: Qwen3-Coder omits
    /// it.
    pub is_on_lines: bool,
    /// What may follow a value.
    expected: &'static str,
}

const XML: CallTags = CallTags {
    name: ["<function=", ">"],
    key: ["<parameter=", ">"],
    value: ["", "</parameter>"],
    end: "</function>",
    is_on_lines: true,
    expected: "`<parameter=` or `</function>`",
};
const SEED_OSS: CallTags = CallTags { is_on_lines: false, ..XML };
const GLM: CallTags = CallTags {
    name: ["", ""],
    key: ["<arg_key>", "</arg_key>"],
    value: ["<arg_value>", "</arg_value>"],
    end: "</tool_call>",
    is_on_lines: false,
    expected: "`<arg_key>` or `</tool_call>`",
};
const DSML: CallTags = CallTags {
    name: ["<｜DSML｜invoke name=\"", "\">"],
    key: ["<｜DSML｜parameter name=\"", "\""],
    value: [">", "</｜DSML｜parameter>"],
    end: "</｜DSML｜invoke>",
    is_on_lines: false,
    expected: "`<｜DSML｜parameter` or `</｜DSML｜invoke>`",
};
const MINIMAX: CallTags = CallTags {
    name: ["<invoke name=\"", "\">"],
    key: ["<parameter name=\"", "\""],
    value: [">", "</parameter>"],
    end: "</invoke>",
    is_on_lines: false,
    expected: "`<parameter` or `</invoke>`",
};

/// A parameter's name, whether its tag says that the value is a string, and the text behind the value's first tag.
pub type Argument<'t> = (&'t str, Option<bool>, &'t str);

impl CallTags {
    /// The tags of a format's calls. Hermes's models also write Qwen3-Coder's.
    pub fn of(format: Format) -> Option<&'static CallTags> {
        Some(match format {
            Format::Hermes | Format::Xml => &XML,
            Format::SeedOss => &SEED_OSS,
            Format::Glm => &GLM,
            Format::Dsml => &DSML,
            Format::MiniMax => &MINIMAX,
            _ => return None,
        })
    }

    /// A call, whose text is complete.
    pub fn parse(&self, raw: &str, types: Option<&Types>) -> Result<ToolCall, Wrong> {
        let expected = || wrong(&format!("`{}NAME{}`", self.name[0], self.name[1]), raw);
        let (name, mut rest) = self.name(raw).ok_or_else(expected)?;
        let types = types.and_then(|types| types.get(name));
        let mut arguments = Map::new();
        while let Some((key, is_string, after)) = self.argument(rest) {
            let is_string = is_string.or_else(|| is_string_type(types.and_then(|types| types.get(key))));
            let (value, behind) =
                self.value(after, is_string).ok_or_else(|| wrong(&format!("`{}`", self.value[1]), after))?;
            rest = behind;
            arguments.insert(key.into(), value);
        }
        match rest.trim() == self.end {
            true => Ok(ToolCall { name: name.into(), arguments, id: None }),
            false => Err(wrong(&format!("`{}`", self.end), rest.trim())),
        }
    }

    /// The function's name and the text behind it, if it ends.
    pub fn name<'t>(&self, raw: &'t str) -> Option<(&'t str, &'t str)> {
        let [before, behind] = self.name;
        let (name, rest) = match before.is_empty() {
            true => raw.split_at(raw.find(['\n', '<'])?),
            false => raw.strip_prefix(before)?.split_once(behind)?,
        };
        (!name.is_empty()).then_some((name, rest))
    }

    /// The parameter that is next, if its name ends.
    pub fn argument<'t>(&self, rest: &'t str) -> Option<Argument<'t>> {
        let (key, after) = rest.trim_start().strip_prefix(self.key[0])?.split_once(self.key[1])?;
        let (between, after) = match self.value[0] {
            "" => ("", after),
            tag => after.split_once(tag)?,
        };
        let is_string = match between.trim() {
            "" => None,
            "string=\"true\"" => Some(true),
            "string=\"false\"" => Some(false),
            _ => return None,
        };
        Some((key, is_string, after))
    }

    /// A parameter's value and the text behind it, if it ends.
    pub fn value<'t>(&self, after: &'t str, is_string: Option<bool>) -> Option<(Json, &'t str)> {
        let close = self.value[1];
        let (at, is_closed) = self.value_end(after)?;
        let (value, behind) = after.split_at(at);
        let mut value = value;
        if self.is_on_lines {
            value = value.strip_prefix('\n').unwrap_or(value);
            // A line break before this tag belongs to it; before the other two ends, to the value.
            value = if is_closed { value.strip_suffix('\n').unwrap_or(value) } else { value };
        }
        let literal = if is_string == Some(true) { None } else { literal(value) };
        let value = literal.unwrap_or_else(|| Json::from(value));
        Some((value, behind.strip_prefix(close).unwrap_or(behind)))
    }

    /// Where a value ends, and whether by its own tag.
    fn value_end(&self, text: &str) -> Option<(usize, bool)> {
        text.match_indices('<').find_map(|(at, _)| {
            if text.get(at..)?.starts_with(self.value[1]) {
                return Some((at, true));
            }
            let line = at.checked_sub(1).filter(|_| self.is_on_lines)?;
            let rest = text.get(line..)?.strip_prefix('\n')?;
            (rest.starts_with(self.key[0]) || rest.starts_with(self.end)).then_some((line, false))
        })
    }

    /// The texts that end a value.
    pub fn value_ends(&self) -> Vec<String> {
        let mut ends = vec![self.value[1].to_owned()];
        if self.is_on_lines {
            ends.extend([self.value[1], self.key[0], self.end].map(|tag| format!("\n{tag}")));
        }
        ends
    }
}

/// Whether a schema's type says that a value is a string.
pub fn is_string_type(of_type: Option<&Json>) -> Option<bool> {
    of_type.and_then(Json::as_str).filter(|kind| *kind == "string").map(|_| true)
}

/// A value as JSON or as Python writes it.
fn literal(text: &str) -> Option<Json> {
    let text = text.trim();
    match text {
        "True" => return Some(Json::Bool(true)),
        "False" => return Some(Json::Bool(false)),
        "None" => return Some(Json::Null),
        _ => {}
    }
    if let Ok(value) = serde_json::from_str(text) {
        return Some(value);
    }
    if !text.starts_with(['[', '{']) {
        return None;
    }
    let mut parser = ValueParser::new(text, ValueNotation::Python);
    parser.value().ok().filter(|_| parser.rest.trim().is_empty())
}

/// Finds the end of a call in tags.
#[derive(Debug, Clone)]
pub struct TagScan {
    tags: &'static CallTags,
    place: Place,
}

/// State between tags, with the current tag's text.
#[derive(Debug, Clone)]
enum Place {
    /// In the name of a function.
    Name(usize),
    Between(String),
    /// The end of a value, at most as long as its closing tag.
    Value(String),
}

impl TagScan {
    /// A scanner for a call from its first character on.
    pub fn begin(tags: &'static CallTags, first: char) -> Option<Self> {
        let place = match tags.name[0].is_empty() {
            true => is_name(first).then(|| Place::Name(first.len_utf8()))?,
            false => (first == '<').then(|| Place::Between(first.into()))?,
        };
        Some(TagScan { tags, place })
    }

    /// A scanner for a call after the tag that opens its name.
    pub fn named(tags: &'static CallTags) -> Self {
        TagScan { tags, place: Place::Name(0) }
    }

    /// Whether any text is valid here, including marks.
    pub fn is_in_string(&self) -> bool {
        matches!(self.place, Place::Value(_))
    }

    pub fn step(&mut self, c: char) -> ScanStep {
        let tags = self.tags;
        match &mut self.place {
            Place::Name(len) => {
                *len += c.len_utf8();
                match c {
                    _ if *len > MAX_HEAD_BYTES => return ScanStep::Invalid("a name of at most 256 bytes", 0),
                    '\n' if tags.name[0].is_empty() => self.place = Place::Between(String::new()),
                    '<' if tags.name[0].is_empty() => self.place = Place::Between(c.into()),
                    _ if tags.name[0].is_empty() && is_name(c) => {}
                    _ if tags.name[0].is_empty() => return ScanStep::Invalid("a name and its arguments", 0),
                    '>' if *len > 1 => self.place = Place::Between(String::new()),
                    '<' | '>' | '\n' => return ScanStep::Invalid("a name and `>`", 0),
                    _ => {}
                }
            }
            Place::Between(tag) => {
                if tag.is_empty() && c.is_whitespace() {
                    return ScanStep::More;
                }
                tag.push(c);
                let known = [tags.name[0], tags.key[0], tags.end];
                if tag == tags.end {
                    return ScanStep::Done;
                }
                if tag == tags.key[0] {
                    // A parameter's value follows its name.
                    self.place = Place::Value(String::new());
                } else if tag == tags.name[0] {
                    self.place = Place::Name(0);
                } else if !known.iter().any(|whole| whole.starts_with(tag.as_str())) {
                    return ScanStep::Invalid(tags.expected, tag.len() - c.len_utf8());
                }
            }
            Place::Value(last) => {
                last.push(c);
                // An unclosed value ends at the next tag at the start of a line.
                let is_end = |last: &str| last.strip_suffix(tags.end).is_some_and(|rest| rest.ends_with('\n'));
                if last.ends_with(tags.value[1]) {
                    self.place = Place::Between(String::new());
                } else if tags.is_on_lines && is_end(last) {
                    return ScanStep::Done;
                } else if last.len() > 64 {
                    let from = (last.len() - tags.value[1].len()..).find(|&at| last.is_char_boundary(at));
                    last.drain(..from.unwrap_or_default());
                }
            }
        }
        ScanStep::More
    }
}
