//! Scanners that find the end of a call character by character.

use super::format::Format;
use super::section::{SectionMarks, SectionScan};
use super::tags::{CallTags, TagScan};
use super::values::GEMMA_QUOTE;

/// Maximum nesting. Real tools need a few levels, and serde_json stops at 128.
pub const MAX_DEPTH: usize = 64;

/// Maximum length of a call's name and the syntax before its arguments.
pub const MAX_HEAD_BYTES: usize = 256;

/// Whether a tool's name may have this character, in formats where the name has no quotes.
pub fn is_name(c: char) -> bool {
    c.is_alphanumeric() || "_-.:/".contains(c)
}

/// A character's effect on a scanner.
#[derive(Debug, PartialEq, Eq)]
pub enum ScanStep {
    More,
    /// The character completes the call.
    Done,
    /// An invalid character: what was expected, and how many bytes before it to parse again.
    Invalid(&'static str, usize),
}

/// Finds the end of a call.
#[derive(Debug, Clone)]
pub enum Scan {
    /// Before the first character.
    Begin(Format),
    /// JSON, Gemma's notation or Python literals: strings and brackets.
    Nested(Nested),
    /// `NAME`, `call:NAME`, `NAME.call` or `NAME[CALL_ID]id[ARGS]`, up to the bracket that opens the arguments.
    Head(Format, usize),
    /// Tags of functions and parameters.
    Tags(TagScan),
    /// A call in a section.
    Section(SectionScan),
}

/// Open brackets and the open string.
#[derive(Debug, Clone)]
pub struct Nested {
    kind: BodySyntax,
    open: Vec<char>,
    /// The end of the open string.
    string: Option<&'static str>,
    escaped: bool,
    /// Matched bytes of Gemma's quote.
    tag: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodySyntax {
    Json,
    Gemma,
    Python,
}

impl Scan {
    /// A scanner for a call after its mark.
    pub fn new(format: Format) -> Self {
        Scan::Begin(format)
    }

    /// A scanner for a call after a mark that is part of it.
    pub fn function(format: Format) -> Self {
        CallTags::of(format).map_or(Scan::Begin(format), |tags| Scan::Tags(TagScan::named(tags)))
    }

    /// Whether any text is valid here, including marks.
    pub fn is_in_string(&self) -> bool {
        match self {
            Scan::Nested(nested) => nested.is_in_string(),
            Scan::Tags(tags) => tags.is_in_string(),
            Scan::Section(section) => section.is_in_string(),
            Scan::Begin(_) | Scan::Head(..) => false,
        }
    }

    pub fn step(&mut self, c: char) -> ScanStep {
        match self {
            Scan::Begin(format) => {
                let format = *format;
                self.begin(format, c)
            }
            Scan::Nested(nested) => nested.step(c),
            Scan::Head(format, len) => {
                *len += c.len_utf8();
                let named = is_name(c);
                let kind = match (*format, c) {
                    (Format::Gemma4, '{') => BodySyntax::Gemma,
                    (Format::Mistral, '{') => BodySyntax::Json,
                    (Format::Llama3, '(') => BodySyntax::Python,
                    (Format::Mistral, '[' | ']' | ' ') if *len <= MAX_HEAD_BYTES => return ScanStep::More,
                    _ if named && *len <= MAX_HEAD_BYTES => return ScanStep::More,
                    _ => return ScanStep::Invalid("a name and its arguments", 0),
                };
                *self = Scan::Nested(Nested::new(kind, c));
                ScanStep::More
            }
            Scan::Tags(tags) => tags.step(c),
            Scan::Section(section) => section.step(c),
        }
    }

    fn begin(&mut self, format: Format, c: char) -> ScanStep {
        if c.is_whitespace() {
            return ScanStep::More;
        }
        let (next, expected) = match (format, c) {
            (Format::Lfm2, '[') => (Some(Scan::Nested(Nested::new(BodySyntax::Python, c))), ""),
            (Format::Lfm2, _) => (None, "a list in brackets"),
            (Format::Gemma4, 'c') => (Some(Scan::Head(format, 1)), ""),
            (Format::Gemma4, _) => (None, "`call:`"),
            (Format::Hermes | Format::Xml, '<')
            | (Format::SeedOss | Format::Glm | Format::Dsml | Format::MiniMax, _) => {
                let scan = CallTags::of(format).and_then(|tags| TagScan::begin(tags, c));
                (scan.map(Scan::Tags), "a function's name")
            }
            (Format::DeepSeek | Format::KimiK2, _) => {
                let scan = SectionMarks::of(format).and_then(|marks| SectionScan::begin(marks, c));
                (scan.map(Scan::Section), "a call")
            }
            (Format::Harmony | Format::Llama3, '[') => (None, "a JSON object"),
            (_, '{' | '[') => (Some(Scan::Nested(Nested::new(BodySyntax::Json, c))), ""),
            (Format::Llama3 | Format::Mistral, _) if c.is_alphanumeric() || c == '_' => {
                (Some(Scan::Head(format, c.len_utf8())), "")
            }
            _ => (None, "a JSON object"),
        };
        match next {
            Some(next) => {
                *self = next;
                ScanStep::More
            }
            None => ScanStep::Invalid(expected, 0),
        }
    }
}

impl Nested {
    /// JSON from its first bracket on.
    pub fn json(first: char) -> Self {
        Nested::new(BodySyntax::Json, first)
    }

    /// Whether a string is open.
    pub fn is_in_string(&self) -> bool {
        self.string.is_some()
    }

    fn new(kind: BodySyntax, first: char) -> Self {
        Nested { kind, open: vec![first], string: None, escaped: false, tag: 0 }
    }

    pub fn step(&mut self, c: char) -> ScanStep {
        if let Some(end) = self.string {
            return self.in_string(c, end);
        }
        if self.tag > 0 || (self.kind == BodySyntax::Gemma && c == '<') {
            if GEMMA_QUOTE.get(self.tag..).is_some_and(|rest| rest.starts_with(c)) {
                self.tag += 1;
                if self.tag == GEMMA_QUOTE.len() {
                    self.tag = 0;
                    self.string = Some(GEMMA_QUOTE);
                }
                return ScanStep::More;
            }
            return ScanStep::Invalid("a value", self.tag);
        }
        match c {
            '"' => self.string = Some("\""),
            '\'' if self.kind == BodySyntax::Python => self.string = Some("'"),
            '{' | '[' => return self.open(c),
            '(' if self.kind == BodySyntax::Python => return self.open(c),
            '}' | ']' | ')' => {
                let opened = match c {
                    '}' => '{',
                    ']' => '[',
                    _ => '(',
                };
                if self.open.last() != Some(&opened) {
                    return ScanStep::Invalid("a bracket that closes the innermost one", 0);
                }
                self.open.pop();
                if self.open.is_empty() {
                    return ScanStep::Done;
                }
            }
            ',' | ':' | '+' | '-' | '.' => {}
            _ if c.is_ascii_whitespace() || c.is_ascii_alphanumeric() => {}
            // Unquoted keys.
            '_' | '$' | '/' | '@' | '#' if self.kind != BodySyntax::Json => {}
            '=' if self.kind == BodySyntax::Python => {}
            _ if self.kind != BodySyntax::Json && (c.is_alphanumeric() || c.is_whitespace()) => {}
            _ => return ScanStep::Invalid("a value", 0),
        }
        ScanStep::More
    }

    fn open(&mut self, c: char) -> ScanStep {
        if self.open.len() >= MAX_DEPTH {
            return ScanStep::Invalid("at most 64 nested lists and objects", 0);
        }
        self.open.push(c);
        ScanStep::More
    }

    fn in_string(&mut self, c: char, end: &'static str) -> ScanStep {
        if end == GEMMA_QUOTE {
            // Its first character occurs only at its start.
            let goes_on = end.get(self.tag..).is_some_and(|rest| rest.starts_with(c));
            self.tag = if goes_on { self.tag + 1 } else { usize::from(end.starts_with(c)) };
            if self.tag == end.len() {
                (self.tag, self.string) = (0, None);
            }
        } else if self.escaped {
            self.escaped = false;
        } else if c == '\\' {
            self.escaped = true;
        } else if end.starts_with(c) {
            self.string = None;
        }
        ScanStep::More
    }
}
