//! Limits of constraints. Compiling some grammars takes quadratic time or worse and cannot be stopped, so these
//! limits keep it below 250 ms (`benches/hostile.rs`). They are far above typical answers and tools.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// Maximum values in a schema, and their depth.
const MAX_VALUES: usize = 10_000;
const MAX_DEPTH: usize = 200;
/// Maximum bytes of a schema's strings.
const MAX_SCHEMA_BYTES: usize = 256 << 10;
/// Maximum bytes of a grammar, and of all regular expressions in a schema.
const MAX_LARK_BYTES: usize = 32 << 10;
/// Maximum bytes of a llama.cpp grammar, which is several times as long in Lark's syntax.
const MAX_GBNF_BYTES: usize = 16 << 10;
const MAX_PATTERN_BYTES: usize = 16 << 10;
/// Maximum sum of squares of each object's numbers of properties and required ones: 1000 in one object.
const MAX_PROPERTIES: usize = 1_000_000;
/// Limit of a pattern's minimum length of text: forced text is written at once.
const MAX_LEAST_LENGTH: u64 = 20_000;
/// Maximum patterns of property names: each pair is compared.
const MAX_NAME_PATTERNS: usize = 64;
/// Maximum patterns that one string must match.
const MAX_JOINED_PATTERNS: usize = 16;
/// Maximum least common multiple of all `multipleOf`, without decimal points: the automaton has as many states.
const MAX_MULTIPLE: u64 = 20_000;

/// A value above a limit.
pub(super) struct Excess {
    pub of: &'static str,
    pub expected: String,
    pub found: String,
}

fn check<T: PartialOrd + ToString>(of: &'static str, found: T, most: T) -> Result<(), Excess> {
    match found <= most {
        true => Ok(()),
        false => Err(Excess { of, expected: format!("at most {}", most.to_string()), found: found.to_string() }),
    }
}

/// Totals over a schema.
#[derive(Default)]
struct SchemaTotals {
    values: usize,
    bytes: usize,
    pattern_bytes: usize,
    properties: usize,
    name_patterns: usize,
    patterns: usize,
    least_length: u64,
    /// Whether schemas are combined.
    joins: bool,
    multiple: u64,
}

impl SchemaTotals {
    fn check(&self) -> Result<(), Excess> {
        check("number of values", self.values, MAX_VALUES)?;
        check("bytes of strings", self.bytes, MAX_SCHEMA_BYTES)?;
        check("bytes of patterns", self.pattern_bytes, MAX_PATTERN_BYTES)?;
        check("minimum length of a pattern's text", self.least_length, MAX_LEAST_LENGTH)?;
        check("sum of squares of property counts", self.properties, MAX_PROPERTIES)?;
        check("number of patternProperties", self.name_patterns, MAX_NAME_PATTERNS)?;
        if self.joins {
            check("number of patterns, with allOf or keywords beside $ref", self.patterns, MAX_JOINED_PATTERNS)?;
        }
        check("least common multiple of multipleOf", self.multiple, MAX_MULTIPLE)
    }

    fn add_keyword(&mut self, key: &str, value: &Value) {
        self.bytes += key.len();
        match (key, value) {
            ("properties", Value::Object(members)) => self.properties += members.len().pow(2),
            ("required", Value::Array(names)) => self.properties += names.len().pow(2),
            ("patternProperties", Value::Object(members)) => {
                self.name_patterns += members.len();
                self.pattern_bytes += members.keys().map(String::len).sum::<usize>();
            }
            ("pattern", Value::String(pattern)) => {
                self.patterns += 1;
                self.least_length = self.least_length.max(least_length(pattern));
                self.pattern_bytes += pattern.len();
            }
            ("allOf", Value::Array(_)) => self.joins = true,
            ("multipleOf", Value::Number(number)) => {
                // 0.25 has the digits 25, and 1e-7 the digit 1.
                let text = number.to_string();
                let digits: String =
                    text.split(['e', 'E']).take(1).flat_map(str::chars).filter(char::is_ascii_digit).collect();
                let digits = digits.parse().unwrap_or(u64::MAX).max(1);
                self.multiple = least_common_multiple(self.multiple.max(1), digits);
            }
            _ => {}
        }
    }
}

/// Saturates on overflow.
fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor.max(1)).saturating_mul(b)
}

/// Approximate minimum length of a regular expression's text: the longest alternative counts, and a class is one
/// character.
fn least_length(pattern: &str) -> u64 {
    // Per open group: the length before it, and the longest alternative so far.
    let mut groups = vec![(0u64, 0u64)];
    // The alternative's length so far, and that of the last element, for repetitions.
    let (mut sum, mut last) = (0u64, 0u64);
    let mut is_repeated = false;
    let mut chars = pattern.chars().peekable();
    while let Some(c) = chars.next() {
        let was_repeated = std::mem::take(&mut is_repeated);
        let atom = match c {
            '(' => {
                groups.push((sum.saturating_add(last), 0));
                (sum, last) = (0, 0);
                continue;
            }
            ')' if groups.len() > 1 => {
                let (before, longest) = groups.pop().unwrap_or_default();
                let atom = longest.max(sum.saturating_add(last));
                (sum, last) = (before, 0);
                atom
            }
            '|' => {
                if let Some((_, longest)) = groups.last_mut() {
                    *longest = (*longest).max(sum.saturating_add(last));
                }
                (sum, last) = (0, 0);
                continue;
            }
            '*' | '+' | '?' | '{' => {
                is_repeated = true;
                let times = match c {
                    '{' => {
                        let digits: String = std::iter::from_fn(|| chars.next_if(char::is_ascii_digit)).collect();
                        while chars.next().is_some_and(|c| c != '}') {}
                        digits.parse().unwrap_or(if digits.is_empty() { 1 } else { u64::MAX })
                    }
                    // A lazy repetition.
                    '?' if was_repeated => 1,
                    '+' => 1,
                    _ => 0,
                };
                last = last.saturating_mul(times);
                continue;
            }
            '[' => {
                while let Some(c) = chars.next().filter(|&c| c != ']') {
                    if c == '\\' {
                        chars.next();
                    }
                }
                1
            }
            '\\' => {
                chars.next();
                1
            }
            _ => 1,
        };
        (sum, last) = (sum.saturating_add(last), atom);
    }
    groups.last().map_or(0, |&(_, longest)| longest).max(sum.saturating_add(last))
}

/// An element of a grammar's definition.
enum DefinitionToken<'t> {
    Length(u64),
    Name(&'t str),
    Open,
    Close,
    Or,
    /// Repeats the previous one.
    Times(u64),
}

/// Approximate minimum length of a grammar's text. A terminal, written at once, counts its longest alternative, as in
/// a pattern; a rule its shortest.
fn lark_length(text: &str) -> u64 {
    let mut bodies: HashMap<&str, String> = HashMap::new();
    let mut current = "";
    for line in text.lines() {
        let named = line.trim_start_matches(['!', '?']);
        let n = named.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-')).unwrap_or(named.len());
        let (name, rest) = named.split_at(n);
        let rest = if rest.starts_with('[') { rest.split_once(']').map_or("", |(_, rest)| rest) } else { rest };
        match rest.trim_start().strip_prefix(':') {
            Some(body) if !name.is_empty() => {
                current = name;
                bodies.insert(name, body.into());
            }
            _ => {
                if let Some(body) = bodies.get_mut(current) {
                    body.push('\n');
                    *body += line;
                }
            }
        }
    }
    let parts: HashMap<&str, Vec<DefinitionToken>> =
        bodies.iter().map(|(&name, body)| (name, parts_of(body))).collect();
    let mut known: HashMap<&str, u64> = HashMap::new();
    // Each definition is visited before and after those it names.
    let mut stack: Vec<(&str, bool)> = parts.keys().map(|name| (*name, false)).collect();
    let mut seen = HashSet::new();
    while let Some((name, is_known)) = stack.pop() {
        let Some(parts) = parts.get(name) else { continue };
        if is_known {
            let of = |name: &str| known.get(name).copied().unwrap_or(0);
            let length = parts_length(parts, name.trim_start_matches('_').starts_with(char::is_uppercase), of);
            known.insert(name, length);
        } else if seen.insert(name) {
            stack.push((name, true));
            stack.extend(
                parts.iter().filter_map(|part| {
                    if let DefinitionToken::Name(name) = part { Some((*name, false)) } else { None }
                }),
            );
        }
    }
    known.into_values().max().unwrap_or(0)
}

/// The elements of a definition; schemas and the like have length 0.
fn parts_of(body: &str) -> Vec<DefinitionToken<'_>> {
    let mut parts = Vec::new();
    let mut rest = body;
    while let Some(c) = rest.chars().next() {
        let after = rest.get(c.len_utf8()..).unwrap_or_default();
        // To the next `end` that is not escaped.
        let quoted = |end: char| {
            let mut is_escaped = false;
            let at = after.find(|c| {
                let ends = c == end && !is_escaped;
                is_escaped = c == '\\' && !is_escaped;
                ends
            });
            after.split_at(at.unwrap_or(after.len()))
        };
        let word = |is_in: fn(char) -> bool| after.split_at(after.find(|c| !is_in(c)).unwrap_or(after.len()));
        let next;
        (next, rest) = match c {
            '"' => {
                let (text, rest) = quoted('"');
                (Some(DefinitionToken::Length(text.chars().count() as u64)), rest.get(1..).unwrap_or_default())
            }
            '/' if after.starts_with('/') => (None, after.split_once('\n').map_or("", |(_, rest)| rest)),
            '#' => (None, after.split_once('\n').map_or("", |(_, rest)| rest)),
            '/' => {
                let (pattern, rest) = quoted('/');
                let rest = rest.get(1..).unwrap_or_default().trim_start_matches(|c: char| "imslux".contains(c));
                (Some(DefinitionToken::Length(least_length(pattern))), rest)
            }
            '<' => (None, after.split_once('>').map_or("", |(_, rest)| rest)),
            '%' => (None, ""),
            '(' | '[' => (Some(DefinitionToken::Open), after),
            // Brackets are optional.
            ']' => {
                parts.push(DefinitionToken::Close);
                (Some(DefinitionToken::Times(0)), after)
            }
            ')' => (Some(DefinitionToken::Close), after),
            '|' => (Some(DefinitionToken::Or), after),
            '*' | '?' => (Some(DefinitionToken::Times(0)), after),
            '+' => (Some(DefinitionToken::Times(1)), after),
            '{' | '~' => {
                let (digits, rest) = word(|c| c.is_ascii_digit());
                let least = digits.parse().unwrap_or(if digits.is_empty() { 0 } else { u64::MAX });
                let rest = if c == '{' { rest.split_once('}').map_or("", |(_, rest)| rest) } else { rest };
                let rest =
                    rest.strip_prefix("..").map_or(rest, |rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
                (Some(DefinitionToken::Times(least)), rest)
            }
            _ if c.is_ascii_alphabetic() || c == '_' => {
                let (_, rest_of) = word(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
                let name = rest.get(..rest.len() - rest_of.len()).unwrap_or_default();
                (Some(DefinitionToken::Name(name)), rest_of)
            }
            _ => (None, after),
        };
        parts.extend(next);
    }
    parts
}

fn parts_length(parts: &[DefinitionToken], is_terminal: bool, of: impl Fn(&str) -> u64) -> u64 {
    let better = |a: Option<u64>, b: u64| a.map_or(b, |a| if is_terminal { a.max(b) } else { a.min(b) });
    // As in `least_length`.
    let mut groups: Vec<(u64, Option<u64>)> = vec![(0, None)];
    let (mut sum, mut last) = (0u64, 0u64);
    for part in parts {
        let atom = match part {
            DefinitionToken::Length(length) => *length,
            DefinitionToken::Name(name) => of(name),
            DefinitionToken::Open => {
                groups.push((sum.saturating_add(last), None));
                (sum, last) = (0, 0);
                continue;
            }
            DefinitionToken::Close if groups.len() > 1 => {
                let (before, best) = groups.pop().unwrap_or_default();
                let atom = better(best, sum.saturating_add(last));
                (sum, last) = (before, 0);
                atom
            }
            DefinitionToken::Close => 0,
            DefinitionToken::Or => {
                if let Some((_, best)) = groups.last_mut() {
                    *best = Some(better(*best, sum.saturating_add(last)));
                }
                (sum, last) = (0, 0);
                continue;
            }
            DefinitionToken::Times(n) => {
                last = last.saturating_mul(*n);
                continue;
            }
        };
        (sum, last) = (sum.saturating_add(last), atom);
    }
    better(groups.last().and_then(|(_, best)| *best), sum.saturating_add(last))
}

/// Refuses a schema that is too large, without recursion.
pub(super) fn check_schema(schema: &Value) -> Result<(), Excess> {
    /// Beyond it, llguidance writes a neighbouring number.
    const MAX_EXACT: u64 = 1 << 53;
    let mut sums = SchemaTotals::default();
    let mut rest = vec![(schema, 1, false)];
    while let Some((value, depth, is_written)) = rest.pop() {
        sums.values += 1;
        check("depth", depth, MAX_DEPTH)?;
        match value {
            Value::Object(members) => {
                sums.joins |= members.contains_key("$ref") && members.len() > 1;
                for (key, member) in members {
                    sums.add_keyword(key, member);
                    rest.push((member, depth + 1, is_written || matches!(key.as_str(), "const" | "enum")));
                }
            }
            Value::Array(elements) => rest.extend(elements.iter().map(|element| (element, depth + 1, is_written))),
            Value::String(text) => sums.bytes += text.len(),
            Value::Number(number) if is_written && !number.is_f64() => {
                let magnitude = number.as_i64().map_or(u64::MAX, i64::unsigned_abs);
                check("magnitude of an integer in const or enum", magnitude, MAX_EXACT)?;
            }
            _ => {}
        }
        // Stop before visiting a large schema.
        check("number of values", sums.values.max(rest.len()), MAX_VALUES)?;
    }
    sums.check()
}

/// Refuses a regular expression that is too long or forces too long a text.
pub(super) fn check_pattern(pattern: &str) -> Result<(), Excess> {
    check("bytes", pattern.len(), MAX_PATTERN_BYTES)?;
    check("minimum length of its text", least_length(pattern), MAX_LEAST_LENGTH)
}

/// Refuses a llama.cpp grammar that is too long.
pub(super) fn check_gbnf(text: &str) -> Result<(), Excess> {
    check("bytes", text.len(), MAX_GBNF_BYTES)
}

/// Refuses a Lark grammar that forces too long a text.
pub(super) fn check_lengths(text: &str) -> Result<(), Excess> {
    check("minimum length of its text", lark_length(text), MAX_LEAST_LENGTH)
}

/// Refuses a Lark grammar that is too long or has a schema that is too large.
pub(super) fn check_lark(text: &str) -> Result<(), Excess> {
    check("bytes", text.len(), MAX_LARK_BYTES)?;
    check("minimum length of its text", text.lines().map(least_length).max().unwrap_or(0), MAX_LEAST_LENGTH)?;
    check_lengths(text)?;
    for (at, keyword) in text.match_indices("%json") {
        let rest = &text[at + keyword.len()..];
        // Invalid JSON is refused when the grammar is compiled.
        if let Some(Ok(schema)) = serde_json::Deserializer::from_str(rest).into_iter::<Value>().next() {
            check_schema(&schema)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{lark_length, least_length};

    #[test]
    fn pattern_length_multiplies_nested_repetitions() {
        for (pattern, length) in [
            ("", 0),
            ("abc", 3),
            (r"\d{4}-\d{2}", 7),
            ("[a-z\\]]{3,9}x?", 3),
            ("(a|bcd)+e*", 3),
            ("((ab){3}|c){10}", 60),
            ("(a{1000}){1000}", 1_000_000),
            ("(.*a.{1000}){50}", 50_050),
            ("a{99999999999999999999}", u64::MAX),
            ("(a{10}?){10}", 100),
            ("(((", 0),
            (")){5}", 6),
        ] {
            assert_eq!(least_length(pattern), length, "{pattern}");
        }
    }

    #[test]
    fn grammar_length_follows_rule_references() {
        for (grammar, length) in [
            ("start: A", 0),
            ("start: A B\nA: \"ab\"\nB: /c{3}/", 5),
            ("start: A{10}\nA: B{10} | \"x\"\nB: \"x\"", 100),
            ("start: a\na: b{10} | \"x\"\nb: \"xy\"", 2),
            ("start: A\nA: B B\n  | C\nB: C~3..4\nC: /a{5}/i // C C C", 30),
            ("start: a \"x\"\na: a \"y\" | a a", 1),
            ("start: [A] A? A* %json {\"A\": 1}\nA: \"xxx\"", 3),
        ] {
            assert_eq!(lark_length(grammar), length, "{grammar}");
        }
        let doubled: String = (0..40).map(|i| format!("T{i}: T{} T{}\n", i + 1, i + 1)).collect();
        assert_eq!(lark_length(&format!("start: T0\n{doubled}T40: \"x\"")), 1 << 40);
    }
}
