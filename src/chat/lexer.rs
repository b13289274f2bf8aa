//! Splits a template's source into tokens, with Jinja's white-space rules for `trim_blocks` and `lstrip_blocks`.

use std::sync::Arc;

use super::values::{RenderFault, Result, wrong};

#[derive(Debug, Clone, PartialEq)]
pub enum TemplateToken {
    /// Text outside tags.
    Data(Arc<str>),
    BlockStart,
    BlockEnd,
    PrintStart,
    PrintEnd,
    Name(Arc<str>),
    Str(String),
    Int(i64),
    Float(f64),
    Op(&'static str),
    End,
}

/// Longest match first.
const OPERATORS: [&str; 27] = [
    "**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">", "(", ")", "[", "]", "{", "}", ",", ".",
    ":", "|", "=", ";", "!",
];

/// Opening and closing delimiters of tags.
const TAGS: [(&str, &str); 3] = [("{%", "%}"), ("{{", "}}"), ("{#", "#}")];

/// The tokens with their lines. On failure, also returns the line.
pub fn tokens(source: &str) -> std::result::Result<Vec<(TemplateToken, u32)>, (RenderFault, u32)> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    // Jinja drops one newline at the end of a template.
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer { rest: source, line: 1, tokens: Vec::new(), starts_line: true };
    match lexer.read() {
        Ok(()) => {
            lexer.push(TemplateToken::End);
            Ok(lexer.tokens)
        }
        Err(fault) => Err((fault, lexer.line)),
    }
}

struct Lexer<'s> {
    rest: &'s str,
    line: u32,
    tokens: Vec<(TemplateToken, u32)>,
    /// Whether the rest is at the start of a line.
    starts_line: bool,
}

impl<'s> Lexer<'s> {
    fn push(&mut self, token: TemplateToken) {
        self.tokens.push((token, self.line));
    }

    /// Takes bytes, counting lines.
    fn take(&mut self, n_bytes: usize) -> &'s str {
        let (taken, rest) = self.rest.split_at_checked(n_bytes).unwrap_or((self.rest, ""));
        self.line += taken.matches('\n').count() as u32;
        self.rest = rest;
        if !taken.is_empty() {
            self.starts_line = taken.ends_with('\n');
        }
        taken
    }

    fn read(&mut self) -> Result<()> {
        while !self.rest.is_empty() {
            let tag_at = |at: usize| TAGS.iter().find(|tag| self.rest.get(at..at + 2) == Some(tag.0));
            let mut places = self.rest.match_indices('{');
            let Some((at, (open, close))) = places.find_map(|(at, _)| Some((at, *tag_at(at)?))) else {
                self.data(self.rest.len(), "", "");
                return Ok(());
            };
            let sign = self.rest.get(at + 2..).and_then(|tag| tag.get(..1)).filter(|sign| matches!(*sign, "-" | "+"));
            self.data(at, open, sign.unwrap_or_default());
            let line = self.line;
            self.take(2 + sign.map_or(0, str::len));
            match open {
                "{#" => {
                    let Some(end) = self.rest.find(close) else { return wrong("a comment without its end") };
                    let (comment, _) = self.rest.split_at(end);
                    self.take(end - usize::from(comment.ends_with(['-', '+'])));
                    self.close(close);
                }
                "{%" if self.is_tag("raw") => self.raw()?,
                _ => {
                    self.tokens
                        .push((if open == "{%" { TemplateToken::BlockStart } else { TemplateToken::PrintStart }, line));
                    self.tag(close)?;
                }
            }
        }
        Ok(())
    }

    /// Adds text before a tag that starts with `open` and `sign`.
    fn data(&mut self, n_bytes: usize, open: &str, sign: &str) {
        let (starts_line, line) = (self.starts_line, self.line);
        let data = self.take(n_bytes);
        let data = match sign {
            "-" => data.trim_end(),
            "+" => data,
            _ if open == "{%" || open == "{#" => {
                let line_start = data.rfind('\n').map_or(0, |at| at + 1);
                let (before, last) = data.split_at(line_start);
                let is_blank = last.chars().all(|c| matches!(c, ' ' | '\t'));
                if is_blank && (line_start > 0 || starts_line) { before } else { data }
            }
            _ => data,
        };
        if !data.is_empty() {
            self.tokens.push((TemplateToken::Data(data.into()), line));
        }
    }

    /// Takes the end of a tag, if present, and the white space that belongs to it.
    fn close(&mut self, close: &str) -> bool {
        let sign = self.rest.get(..1).filter(|sign| matches!(*sign, "-" | "+")).unwrap_or_default();
        // Only a block's end may have a plus sign.
        let sign = if sign == "+" && close == "}}" { "" } else { sign };
        let Some(after) = self.rest.get(sign.len()..).and_then(|rest| rest.strip_prefix(close)) else { return false };
        let space = match sign {
            "-" => after.len() - after.trim_start().len(),
            "" if close != "}}" => usize::from(after.starts_with('\n')),
            _ => 0,
        };
        self.take(sign.len() + close.len() + space);
        true
    }

    /// Whether the tag is only this name.
    fn is_tag(&self, name: &str) -> bool {
        let after = self.rest.trim_start().strip_prefix(name).map(str::trim_start);
        after.is_some_and(|after| after.trim_start_matches(['-', '+']).starts_with("%}"))
    }

    /// Adds the text between `raw` and `endraw` unparsed.
    fn raw(&mut self) -> Result<()> {
        let Some(end) = self.rest.find("%}") else { return wrong("a tag without its end") };
        let strips = self.rest.get(..end).is_some_and(|tag| tag.ends_with('-'));
        self.take(end + 2);
        if strips {
            self.take(self.rest.len() - self.rest.trim_start().len());
        }
        for (at, _) in self.rest.match_indices("{%") {
            let tag = self.rest.get(at + 2..).unwrap_or_default();
            let sign = tag.get(..1).filter(|sign| matches!(*sign, "-" | "+")).unwrap_or_default();
            let inner = Lexer {
                rest: tag.get(sign.len()..).unwrap_or_default(),
                line: 0,
                tokens: Vec::new(),
                starts_line: false,
            };
            if inner.is_tag("endraw") {
                self.data(at, "{%", sign);
                let end = self.rest.find("%}").unwrap_or_default();
                let has_sign = self.rest.get(..end).is_some_and(|tag| tag.ends_with(['-', '+']));
                self.take(end - usize::from(has_sign));
                self.close("%}");
                return Ok(());
            }
        }
        wrong("`raw` without `endraw`")
    }

    /// Reads a tag's tokens and its end.
    fn tag(&mut self, close: &str) -> Result<()> {
        let mut n_open = 0usize;
        loop {
            let space = self.rest.len() - self.rest.trim_start().len();
            self.take(space);
            // Inside brackets the delimiter does not end the tag: `{{ {'a': {}} }}`.
            if n_open == 0 && self.close(close) {
                self.push(if close == "%}" { TemplateToken::BlockEnd } else { TemplateToken::PrintEnd });
                return Ok(());
            }
            let Some(first) = self.rest.chars().next() else { return wrong("a tag without its end") };
            let token = match first {
                '"' | '\'' => self.string(first)?,
                '0'..='9' => self.number()?,
                _ if first == '_' || first.is_alphabetic() => {
                    let end = self.rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(self.rest.len());
                    TemplateToken::Name(self.take(end).into())
                }
                _ => {
                    let Some(operator) = OPERATORS.iter().find(|operator| self.rest.starts_with(**operator)) else {
                        return wrong(format!("unexpected character {first:?} in a tag"));
                    };
                    match *operator {
                        "(" | "[" | "{" => n_open += 1,
                        ")" | "]" | "}" if n_open == 0 => return wrong(format!("`{operator}` without its beginning")),
                        ")" | "]" | "}" => n_open -= 1,
                        _ => {}
                    }
                    self.take(operator.len());
                    TemplateToken::Op(operator)
                }
            };
            self.push(token);
        }
    }

    fn number(&mut self) -> Result<TemplateToken> {
        let end = self.rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(self.rest.len());
        let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit() || c == '_');
        let (mut len, mut is_float) = (end, false);
        let whole = self.rest.get(..end).unwrap_or_default();
        let plain = whole.find(['e', 'E']).map_or(whole, |at| &whole[..at]);
        if digits(plain) {
            // A fraction starts with a digit: in `1.real` the point is an operator.
            let after = self.rest.get(end..).unwrap_or_default();
            if plain.len() == end && after.starts_with('.') && after.get(1..2).is_some_and(digits) {
                is_float = true;
                let fraction = after.get(1..).unwrap_or_default();
                len += 1 + fraction.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(fraction.len());
            }
            let so_far = self.rest.get(..len).unwrap_or_default();
            if so_far.ends_with(['e', 'E']) {
                let exponent = self.rest.get(len..).unwrap_or_default();
                let digits = exponent.get(1..).unwrap_or_default();
                let n_digits = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
                if exponent.starts_with(['+', '-']) {
                    len += 1 + n_digits;
                }
            }
            is_float |= so_far.contains(['e', 'E']);
        }
        let text = self.take(len).replace('_', "");
        let radix = match text.get(..2).map(str::to_ascii_lowercase).as_deref() {
            Some("0x") => 16,
            Some("0o") => 8,
            Some("0b") => 2,
            _ => 10,
        };
        let token = match (is_float, radix) {
            (true, _) => text.parse().ok().map(TemplateToken::Float),
            (_, 10) => text.parse().ok().map(TemplateToken::Int),
            _ => i64::from_str_radix(text.get(2..).unwrap_or_default(), radix).ok().map(TemplateToken::Int),
        };
        token.map_or_else(|| wrong(format!("invalid number {text}")), Ok)
    }

    fn string(&mut self, quote: char) -> Result<TemplateToken> {
        let mut text = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            if c == quote {
                self.take(at + 1);
                return Ok(TemplateToken::Str(text));
            }
            if c != '\\' {
                text.push(c);
                continue;
            }
            let n_digits = match chars.next().map(|(_, c)| c) {
                Some('x') => 2,
                Some('u') => 4,
                Some('U') => 8,
                Some('n') => push(&mut text, "\n"),
                Some('r') => push(&mut text, "\r"),
                Some('t') => push(&mut text, "\t"),
                Some('b') => push(&mut text, "\u{8}"),
                Some('f') => push(&mut text, "\u{C}"),
                Some('v') => push(&mut text, "\u{B}"),
                Some('a') => push(&mut text, "\u{7}"),
                Some('0') => push(&mut text, "\0"),
                Some('\n') => 0,
                Some(c @ ('\\' | '\'' | '"')) => push(&mut text, c.encode_utf8(&mut [0; 4])),
                Some(c) => push(&mut text, &format!("\\{c}")),
                None => break,
            };
            if n_digits > 0 {
                let digits: String = chars.by_ref().take(n_digits).map(|(_, c)| c).collect();
                let c = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
                let Some(c) = c else { return wrong(format!("invalid character code {digits} in a string")) };
                text.push(c);
            }
        }
        wrong("a string without its end")
    }
}

/// Adds the text of an escape without digits.
fn push(text: &mut String, escaped: &str) -> usize {
    text.push_str(escaped);
    0
}
