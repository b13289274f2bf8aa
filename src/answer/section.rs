//! Calls in a section, each with marks of its own: DeepSeek's and Kimi K2's.
//!
//! ```text
//! BEGIN name SEPARATOR {...} END            DeepSeek V3.1; Kimi K2 writes `functions.name:0`, which is also its id
//! BEGIN function SEPARATOR name
//! ```json
//! {...}
//! ``` END                                   DeepSeek V3 and R1
//! ```

use super::ToolCall;
use super::body::{MAX_HEAD_BYTES, Nested, ScanStep, is_name};
use super::format::Format;
use super::values::{Wrong, arguments, wrong};

/// A line of backticks around DeepSeek V3's arguments.
const FENCE: &str = "```";

/// The marks of a call in a section.
#[derive(Debug)]
pub struct SectionMarks {
    begin: &'static str,
    separator: &'static str,
    /// Whether arguments may be fenced, with the name before them.
    is_fenced: bool,
}

const DEEPSEEK: SectionMarks =
    SectionMarks { begin: "<｜tool▁call▁begin｜>", separator: "<｜tool▁sep｜>", is_fenced: true };
const KIMI_K2: SectionMarks =
    SectionMarks { begin: "<|tool_call_begin|>", separator: "<|tool_call_argument_begin|>", is_fenced: false };

/// The parts of a call.
pub struct SectionCall<'t> {
    pub name: &'t str,
    pub id: Option<&'t str>,
    pub arguments: &'t str,
}

impl SectionMarks {
    /// The marks of a format's calls.
    pub fn of(format: Format) -> Option<&'static SectionMarks> {
        match format {
            Format::DeepSeek => Some(&DEEPSEEK),
            Format::KimiK2 => Some(&KIMI_K2),
            _ => None,
        }
    }

    /// The parts of a call, whose text may end anywhere in its arguments.
    pub fn split<'t>(&self, raw: &'t str) -> Option<SectionCall<'t>> {
        let raw = raw.strip_prefix(self.begin).unwrap_or(raw);
        let (head, rest) = raw.split_once(self.separator)?;
        let (before, arguments) = rest.split_at(rest.find('{')?);
        if self.is_fenced {
            let fenced = before.split_once(FENCE).map_or(before, |(name, _)| name).trim();
            let name = if fenced.is_empty() { head.trim() } else { fenced };
            return Some(SectionCall { name, id: None, arguments });
        }
        let id = head.trim();
        let numbered = id.rsplit_once(':').filter(|(_, number)| number.bytes().all(|byte| byte.is_ascii_digit()));
        let name = numbered.map_or(id, |(name, _)| name);
        Some(SectionCall { name: name.strip_prefix("functions.").unwrap_or(name), id: Some(id), arguments })
    }

    /// A call, whose text is complete.
    pub fn parse(&self, raw: &str) -> Result<ToolCall, Wrong> {
        let call = self.split(raw).filter(|call| !call.name.is_empty());
        let call = call.ok_or_else(|| wrong("a name and its arguments", raw))?;
        let given = if self.is_fenced { call.arguments.trim_end_matches('`') } else { call.arguments };
        let value = serde_json::from_str(given).map_err(|error| wrong("JSON", &error.to_string()))?;
        Ok(ToolCall { name: call.name.into(), arguments: arguments(value)?, id: call.id.map(str::to_owned) })
    }
}

/// Finds the end of a call in a section.
#[derive(Debug, Clone)]
pub struct SectionScan {
    marks: &'static SectionMarks,
    place: Place,
}

#[derive(Debug, Clone)]
enum Place {
    /// In the mark that begins the call, after as many of its bytes.
    Begin(usize),
    /// In the name, so many bytes long.
    Head(usize),
    Separator(usize),
    /// Between the separator and the arguments: so many bytes, and whether with a fence.
    Before(usize, bool),
    Arguments(Nested, bool),
    /// After the arguments and as many backticks.
    Fence(usize),
}

impl SectionScan {
    /// A scanner for a call from its first character on.
    pub fn begin(marks: &'static SectionMarks, first: char) -> Option<Self> {
        let place = match first {
            '<' => Place::Begin(1),
            c if is_name(c) => Place::Head(c.len_utf8()),
            _ => return None,
        };
        Some(SectionScan { marks, place })
    }

    /// Whether any text is valid here, including marks.
    pub fn is_in_string(&self) -> bool {
        matches!(&self.place, Place::Arguments(nested, _) if nested.is_in_string())
    }

    pub fn step(&mut self, c: char) -> ScanStep {
        const EXPECTED: ScanStep = ScanStep::Invalid("a name and its arguments", 0);
        let marks = self.marks;
        // Whether this character is the mark's next.
        let continues = |mark: &str, at: usize| mark.get(at..).is_some_and(|rest| rest.starts_with(c));
        match &mut self.place {
            Place::Begin(at) if continues(marks.begin, *at) => {
                *at += c.len_utf8();
                if *at == marks.begin.len() {
                    self.place = Place::Head(0);
                }
            }
            Place::Begin(at) => return ScanStep::Invalid("the mark of a call", *at),
            Place::Head(len) => {
                *len += c.len_utf8();
                match c {
                    '<' if *len > 1 => self.place = Place::Separator(1),
                    c if (is_name(c) || c == ' ') && *len <= MAX_HEAD_BYTES => {}
                    _ => return EXPECTED,
                }
            }
            Place::Separator(at) if continues(marks.separator, *at) => {
                *at += c.len_utf8();
                if *at == marks.separator.len() {
                    self.place = Place::Before(0, false);
                }
            }
            Place::Separator(at) => return ScanStep::Invalid("arguments after the name", *at),
            Place::Before(len, is_fenced) => {
                *len += c.len_utf8();
                *is_fenced |= c == '`';
                match c {
                    '{' => self.place = Place::Arguments(Nested::json(c), *is_fenced),
                    c if c.is_whitespace() && *len <= MAX_HEAD_BYTES => {}
                    c if marks.is_fenced && (is_name(c) || c == '`') && *len <= MAX_HEAD_BYTES => {}
                    _ => return EXPECTED,
                }
            }
            Place::Arguments(nested, is_fenced) => match (nested.step(c), *is_fenced) {
                (ScanStep::Done, true) => self.place = Place::Fence(0),
                (step, _) => return step,
            },
            Place::Fence(n) => match c {
                '`' if *n + 1 == FENCE.len() => return ScanStep::Done,
                '`' => *n += 1,
                c if c.is_whitespace() && *n == 0 => {}
                _ => return ScanStep::Invalid("the end of a fence", 0),
            },
        }
        ScanStep::More
    }
}
