//! llama.cpp's grammars: rules `name ::= alternatives`; `root` matches the whole text.
//! <https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md>
//!
//! Each rule becomes a Lark rule, and each character its own terminal: a longer terminal would match greedily and
//! leave nothing to its successor, but here every way to parse a text counts.

use std::collections::HashMap;
use std::fmt::Write;

use crate::error::Error;

/// Maximum nesting of groups.
const MAX_DEPTH: usize = 100;
/// Maximum repetitions, as in llama.cpp.
const MAX_TIMES: u32 = 2000;

/// An element of a rule.
#[derive(Clone, Copy)]
enum RuleElement {
    /// At least one character.
    Text,
    /// An empty text.
    Nothing,
    Rule(usize),
    Open,
    Close,
    Or,
    /// The element before it is optional.
    Optional,
}

struct Rule<'t> {
    name: &'t str,
    /// The lines where it is first named, and defined.
    named: usize,
    defined: Option<usize>,
    parts: Vec<RuleElement>,
    lark: String,
}

/// Whether this is llama.cpp's syntax rather than Lark's.
pub fn is_gbnf(text: &str) -> bool {
    text.lines().any(|line| {
        let rest = line.trim_start().strip_prefix("root");
        rest.is_some_and(|rest| rest.trim_start().starts_with("::="))
    })
}

/// Converts the grammar to Lark's syntax.
///
/// # Errors
/// [`Error::Constraint`] naming the line of a syntax error, an undefined rule or a left-recursive rule.
pub fn to_lark(text: &str) -> Result<String, Error> {
    let mut reader = GbnfParser { text, rest: text, counted: (0, 1), rules: Vec::new(), ids: HashMap::new() };
    reader.grammar()?;
    let GbnfParser { rules, ids, .. } = reader;
    if !ids.contains_key("root") {
        return Err(refused(text.lines().count(), "a rule `root`", "none"));
    }
    for rule in &rules {
        if rule.defined.is_none() {
            return Err(refused(rule.named, "a defined rule", format!("`{}`", rule.name)));
        }
    }
    if let Some(rule) = left_recursive(&rules).and_then(|at| rules.get(at)) {
        let line = rule.defined.unwrap_or(rule.named);
        return Err(refused(line, "a rule without left recursion", format!("`{}`", rule.name)));
    }
    let mut lark = String::new();
    for (at, rule) in rules.iter().enumerate() {
        // Writing to a string never fails.
        let _ = writeln!(lark, "{}: {}", lark_name(rule.name, at), rule.lark);
    }
    Ok(lark)
}

fn lark_name(name: &str, at: usize) -> String {
    if name == "root" { "start".into() } else { format!("g{at}") }
}

fn refused(line: usize, expected: impl Into<String>, found: impl Into<String>) -> Error {
    Error::Constraint { field: format!("gbnf: line {line}"), expected: expected.into(), found: found.into() }
}

struct GbnfParser<'t> {
    text: &'t str,
    rest: &'t str,
    /// A position and its line.
    counted: (usize, usize),
    rules: Vec<Rule<'t>>,
    ids: HashMap<&'t str, usize>,
}

impl<'t> GbnfParser<'t> {
    fn line(&mut self) -> usize {
        let position = self.text.len() - self.rest.len();
        let read = self.text.get(self.counted.0..position).unwrap_or_default();
        self.counted = (position, self.counted.1 + read.bytes().filter(|&byte| byte == b'\n').count());
        self.counted.1
    }

    fn error(&mut self, expected: &str) -> Error {
        let found = self.rest.chars().next().map_or("the end".into(), |c| format!("{c:?}"));
        refused(self.line(), expected, found)
    }

    fn skip(&mut self, token: &str) -> bool {
        let rest = self.rest.strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Skips spaces and comments, and line breaks if `over_lines`.
    fn space(&mut self, over_lines: bool) {
        loop {
            self.rest = match over_lines {
                true => self.rest.trim_start(),
                false => self.rest.trim_start_matches([' ', '\t']),
            };
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = self.rest.find(['\n', '\r']).and_then(|at| self.rest.get(at..)).unwrap_or_default();
        }
    }

    fn name(&mut self) -> Option<&'t str> {
        let n = self.rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_'));
        let (name, rest) = self.rest.split_at(n.unwrap_or(self.rest.len()));
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    fn rule_of(&mut self, name: &'t str, line: usize) -> usize {
        let next = self.rules.len();
        let id = *self.ids.entry(name).or_insert(next);
        if id == next {
            let (parts, lark) = (Vec::new(), String::new());
            self.rules.push(Rule { name, named: line, defined: None, parts, lark });
        }
        id
    }

    fn grammar(&mut self) -> Result<(), Error> {
        self.space(true);
        while !self.rest.is_empty() {
            let line = self.line();
            let Some(name) = self.name() else { return Err(self.error("the name of a rule")) };
            self.space(false);
            if !self.skip("::=") {
                return Err(self.error("`::=`"));
            }
            let id = self.rule_of(name, line);
            let (parts, lark) = self.body()?;
            let Some(rule) = self.rules.get_mut(id) else { continue };
            if let Some(first) = rule.defined.replace(line) {
                return Err(refused(line, "one definition of each rule", format!("`{name}`, defined in line {first}")));
            }
            (rule.parts, rule.lark) = (parts, lark);
            self.space(true);
        }
        Ok(())
    }

    /// A rule's alternatives, to the end of the line outside groups.
    fn body(&mut self) -> Result<(Vec<RuleElement>, String), Error> {
        let (mut parts, mut lark) = (Vec::new(), String::new());
        let mut depth = 0;
        // A line may break before the first alternative and after each bar.
        self.space(true);
        loop {
            self.space(depth > 0);
            let Some(c) = self.rest.chars().next() else { break };
            let is_repeatable = matches!(
                parts.last(),
                Some(RuleElement::Text | RuleElement::Nothing | RuleElement::Rule(_) | RuleElement::Close)
            );
            match c {
                '\n' | '\r' => break,
                '(' => {
                    self.skip("(");
                    depth += 1;
                    if depth > MAX_DEPTH {
                        return Err(refused(self.line(), format!("at most {MAX_DEPTH} nested groups"), "more groups"));
                    }
                    parts.push(RuleElement::Open);
                    lark += "(";
                    self.space(true);
                }
                ')' if depth > 0 => {
                    self.skip(")");
                    depth -= 1;
                    empty_if_nothing(&parts, &mut lark);
                    parts.push(RuleElement::Close);
                    lark += ")";
                }
                '|' => {
                    self.skip("|");
                    empty_if_nothing(&parts, &mut lark);
                    parts.push(RuleElement::Or);
                    lark += " | ";
                    self.space(true);
                }
                '*' | '+' | '?' if is_repeatable => {
                    self.rest = self.rest.get(1..).unwrap_or_default();
                    lark.push(c);
                    parts.extend((c != '+').then_some(RuleElement::Optional));
                }
                '{' if is_repeatable => {
                    let (least, times) = self.times()?;
                    parts.extend((least == 0).then_some(RuleElement::Optional));
                    lark += &times;
                }
                '"' => {
                    let chars = self.literal()?;
                    parts.push(if chars.is_empty() { RuleElement::Nothing } else { RuleElement::Text });
                    let quoted: Vec<String> = chars.iter().map(|c| quoted(*c)).collect();
                    // Grouped, so that a repetition applies to all of it.
                    lark += &match quoted.is_empty() {
                        true => " \"\"".into(),
                        false if quoted.len() == 1 => format!(" {}", quoted.concat()),
                        false => format!(" ({})", quoted.join(" ")),
                    };
                }
                '[' => {
                    lark += &self.class()?;
                    parts.push(RuleElement::Text);
                }
                '.' => {
                    self.skip(".");
                    lark += " /(?s:.)/";
                    parts.push(RuleElement::Text);
                }
                '<' => {
                    let end = self.rest.find('>').filter(|&at| {
                        !self.rest.get(1..at).is_none_or(|name| name.is_empty() || name.contains(char::is_whitespace))
                    });
                    let Some(end) = end else { return Err(self.error("the name of a token and `>`")) };
                    let (token, rest) = self.rest.split_at(end + 1);
                    self.rest = rest;
                    lark.push(' ');
                    lark += token;
                    parts.push(RuleElement::Text);
                }
                _ => {
                    let line = self.line();
                    let Some(name) = self.name() else { return Err(self.error("a part of a rule")) };
                    let id = self.rule_of(name, line);
                    parts.push(RuleElement::Rule(id));
                    lark.push(' ');
                    lark += &lark_name(name, id);
                }
            }
        }
        match depth {
            0 => {
                empty_if_nothing(&parts, &mut lark);
                Ok((parts, lark))
            }
            _ => Err(self.error("`)`")),
        }
    }

    /// `{2}`, `{2,}`, `{,3}` or `{2,3}`: the minimum, and Lark's notation.
    fn times(&mut self) -> Result<(u32, String), Error> {
        self.skip("{");
        let least = self.bound()?;
        let most = if self.skip(",") { self.bound()? } else { least };
        if !self.skip("}") {
            return Err(self.error("`}`"));
        }
        match (least, most) {
            (None, None) => Err(refused(self.line(), "a number of repetitions", "none")),
            (least, Some(most)) if least.unwrap_or(0) > most => {
                Err(refused(self.line(), format!("at most {most} times"), format!("at least {}", least.unwrap_or(0))))
            }
            (least, most) => {
                let least = least.unwrap_or(0);
                let most = most.map_or(String::new(), |most| most.to_string());
                Ok((least, format!("{{{least},{most}}}")))
            }
        }
    }

    /// An optional number.
    fn bound(&mut self) -> Result<Option<u32>, Error> {
        self.space(true);
        let n = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(n);
        self.rest = rest;
        self.space(true);
        match digits.parse::<u32>() {
            Ok(n) if n <= MAX_TIMES => Ok(Some(n)),
            Err(_) if digits.is_empty() => Ok(None),
            _ => Err(refused(self.line(), format!("at most {MAX_TIMES} times"), digits)),
        }
    }

    /// The characters of a quoted text.
    fn literal(&mut self) -> Result<Vec<char>, Error> {
        self.skip("\"");
        let mut chars = Vec::new();
        loop {
            match self.rest.chars().next() {
                Some('"') => {
                    self.skip("\"");
                    return Ok(chars);
                }
                Some('\n') | None => return Err(self.error("`\"`")),
                Some(_) => chars.push(self.character()?),
            }
        }
    }

    /// A character class in Lark's notation.
    fn class(&mut self) -> Result<String, Error> {
        self.skip("[");
        let mut class = String::from(if self.skip("^") { " /[^" } else { " /[" });
        let mut is_empty = true;
        while !self.skip("]") {
            if self.rest.is_empty() || self.rest.starts_with('\n') {
                return Err(self.error("`]`"));
            }
            let first = self.character()?;
            let mut last = first;
            // A dash at the end is literal.
            if self.rest.starts_with('-') && !self.rest.starts_with("-]") {
                self.skip("-");
                last = self.character()?;
            }
            if last < first {
                return Err(refused(self.line(), format!("a character not before {first:?}"), format!("{last:?}")));
            }
            let _ = write!(class, "\\x{{{:X}}}-\\x{{{:X}}}", u32::from(first), u32::from(last));
            is_empty = false;
        }
        match is_empty {
            true if class.ends_with('^') => Ok(" /(?s:.)/".into()),
            true => Err(refused(self.line(), "a character", "an empty class")),
            false => Ok(class + "]/"),
        }
    }

    /// A character or an escape.
    fn character(&mut self) -> Result<char, Error> {
        let mut chars = self.rest.chars();
        let c = match chars.next() {
            Some('\\') => {
                let (n, c) = match chars.next() {
                    Some('x') => (2, None),
                    Some('u') => (4, None),
                    Some('U') => (8, None),
                    Some('n') => (0, Some('\n')),
                    Some('r') => (0, Some('\r')),
                    Some('t') => (0, Some('\t')),
                    Some(c @ ('\\' | '"' | '[' | ']' | '-' | '^' | '/' | '.')) => (0, Some(c)),
                    _ => return Err(self.error("one of the escapes `\\n \\r \\t \\\\ \\\" \\[ \\] \\x \\u \\U`")),
                };
                let digits = chars.as_str().get(..n).unwrap_or_default();
                chars = chars.as_str().get(n..).unwrap_or_default().chars();
                let code =
                    || u32::from_str_radix(digits, 16).ok().filter(|_| digits.len() == n).and_then(char::from_u32);
                match c.or_else(code) {
                    Some(c) => c,
                    None => return Err(self.error("the digits of a character")),
                }
            }
            Some(c) => c,
            None => return Err(self.error("a character")),
        };
        self.rest = chars.as_str();
        Ok(c)
    }
}

/// Lark needs explicit empty alternatives in places.
fn empty_if_nothing(parts: &[RuleElement], lark: &mut String) {
    if matches!(parts.last(), None | Some(RuleElement::Open | RuleElement::Or)) {
        *lark += "\"\"";
    }
}

/// A quoted character.
fn quoted(c: char) -> String {
    match c {
        '\u{7F}' => "\"\\u007f\"".into(),
        c => serde_json::Value::from(c.to_string()).to_string(),
    }
}

/// A left-recursive rule.
fn left_recursive(rules: &[Rule]) -> Option<usize> {
    // Find the rules that may be empty; when one is, check its users again.
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); rules.len()];
    for (at, rule) in rules.iter().enumerate() {
        for part in &rule.parts {
            if let RuleElement::Rule(id) = part
                && let Some(users) = users.get_mut(*id)
            {
                users.push(at);
            }
        }
    }
    let mut empty = vec![false; rules.len()];
    let mut rest: Vec<usize> = (0..rules.len()).collect();
    while let Some(at) = rest.pop() {
        if !empty[at] && begin_of(&rules[at].parts, &empty).0 {
            empty[at] = true;
            rest.extend(&users[at]);
        }
    }
    let begins: Vec<Vec<usize>> = rules.iter().map(|rule| begin_of(&rule.parts, &empty).1).collect();
    // Depth first: a rule reached from itself is left-recursive.
    #[derive(Clone, Copy, PartialEq)]
    enum Seen {
        No,
        Above,
        Done,
    }
    let mut seen = vec![Seen::No; rules.len()];
    for first in 0..rules.len() {
        let mut stack = vec![(first, false)];
        while let Some((at, is_left)) = stack.pop() {
            match (is_left, seen[at]) {
                (true, _) => seen[at] = Seen::Done,
                (false, Seen::Done) => {}
                (false, Seen::Above) => return Some(at),
                (false, Seen::No) => {
                    seen[at] = Seen::Above;
                    stack.push((at, true));
                    stack.extend(begins[at].iter().map(|&next| (next, false)));
                }
            }
        }
    }
    None
}

/// Whether a rule may be empty, and the rules it may start with.
fn begin_of(parts: &[RuleElement], empty: &[bool]) -> (bool, Vec<usize>) {
    /// An unfinished alternative.
    #[derive(Clone, Copy)]
    struct Group {
        /// Whether the group is at the rule's start.
        is_begin: bool,
        /// Whether another alternative may be empty.
        other: bool,
        /// Whether this one may be empty so far.
        this: bool,
    }
    let mut begins = Vec::new();
    let mut groups = vec![Group { is_begin: true, other: false, this: true }];
    for (at, part) in parts.iter().enumerate() {
        let is_optional = matches!(parts.get(at + 1), Some(RuleElement::Optional));
        let Some(group) = groups.last_mut() else { break };
        match *part {
            RuleElement::Text => group.this &= is_optional,
            RuleElement::Nothing | RuleElement::Optional => {}
            RuleElement::Rule(id) => {
                if group.is_begin && group.this {
                    begins.push(id);
                }
                group.this &= is_optional || empty.get(id) == Some(&true);
            }
            RuleElement::Or => {
                group.other |= group.this;
                group.this = true;
            }
            RuleElement::Open => {
                let is_begin = group.is_begin && group.this;
                groups.push(Group { is_begin, other: false, this: true });
            }
            RuleElement::Close => {
                let inner = groups.pop().is_some_and(|inner| inner.other || inner.this);
                if let Some(group) = groups.last_mut() {
                    group.this &= is_optional || inner;
                }
            }
        }
    }
    (groups.first().is_some_and(|group| group.other || group.this), begins)
}
