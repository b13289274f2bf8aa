//! What a constraint may ask for. Reading some grammars takes time that grows with a square or worse, and there is no way to
//! stop it: so what is read has limits, below which it takes less than 250 ms (`benches/hostile.rs`). They are far above
//! what is used to describe answers and tools.

use serde_json::Value;

/// Values of a schema, which together may be that deep.
const MOST_VALUES: usize = 10_000;
const MOST_DEPTH: usize = 200;
/// Bytes of a schema's texts.
const MOST_SCHEMA_BYTES: usize = 256 << 10;
/// Bytes of a grammar, and of all regular expressions of a schema.
const MOST_LARK_BYTES: usize = 32 << 10;
const MOST_PATTERN_BYTES: usize = 16 << 10;
/// Sum of the squares of how many properties each object has or requires: 1000 in one object.
const MOST_PROPERTIES: usize = 1_000_000;
/// Characters that a pattern's texts have at least: what follows from one character only is written at once.
const MOST_LEAST_LENGTH: u64 = 20_000;
/// Patterns of names: each is compared with each.
const MOST_NAME_PATTERNS: usize = 64;
/// Patterns that a text may have to match all.
const MOST_JOINED_PATTERNS: usize = 16;
/// The least common multiple of what numbers have to be multiples of, without their decimal points: an automaton has so many
/// states.
const MOST_MULTIPLE: u64 = 20_000;

/// What is above a limit.
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

/// What a schema asks for, added up.
#[derive(Default)]
struct Sums {
    values: usize,
    bytes: usize,
    pattern_bytes: usize,
    properties: usize,
    name_patterns: usize,
    patterns: usize,
    least_length: u64,
    /// Whether schemas are put together of several.
    joins: bool,
    multiple: u64,
}

impl Sums {
    fn check(&self) -> Result<(), Excess> {
        check("number of values", self.values, MOST_VALUES)?;
        check("bytes of texts", self.bytes, MOST_SCHEMA_BYTES)?;
        check("bytes of patterns", self.pattern_bytes, MOST_PATTERN_BYTES)?;
        check("length of a pattern's texts", self.least_length, MOST_LEAST_LENGTH)?;
        check("squares of numbers of properties", self.properties, MOST_PROPERTIES)?;
        check("number of patternProperties", self.name_patterns, MOST_NAME_PATTERNS)?;
        if self.joins {
            check("number of patterns, with allOf or keywords beside $ref", self.patterns, MOST_JOINED_PATTERNS)?;
        }
        check("common multiple of multipleOf", self.multiple, MOST_MULTIPLE)
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

/// Saturates at the largest number.
fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor.max(1)).saturating_mul(b)
}

/// About how long a text of a regular expression is at least: of alternatives the longest counts, and a class is a character.
fn least_length(pattern: &str) -> u64 {
    // Of each open group: what stands before it, and the longest alternative so far.
    let mut groups = vec![(0u64, 0u64)];
    // What is certain of the alternative, and what a repetition would repeat.
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
                    // It says that a repetition is as short as possible.
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

/// Refuses a schema that is too large, without recursion.
pub(super) fn check_schema(schema: &Value) -> Result<(), Excess> {
    let mut sums = Sums::default();
    let mut rest = vec![(schema, 1)];
    while let Some((value, depth)) = rest.pop() {
        sums.values += 1;
        check("depth", depth, MOST_DEPTH)?;
        match value {
            Value::Object(members) => {
                sums.joins |= members.contains_key("$ref") && members.len() > 1;
                for (key, member) in members {
                    sums.add_keyword(key, member);
                    rest.push((member, depth + 1));
                }
            }
            Value::Array(elements) => rest.extend(elements.iter().map(|element| (element, depth + 1))),
            Value::String(text) => sums.bytes += text.len(),
            _ => {}
        }
        // Long before all of it has been seen.
        check("number of values", sums.values.max(rest.len()), MOST_VALUES)?;
    }
    sums.check()
}

/// Refuses a regular expression that is too long, or whose texts are.
pub(super) fn check_pattern(pattern: &str) -> Result<(), Excess> {
    check("bytes", pattern.len(), MOST_PATTERN_BYTES)?;
    check("length of its texts", least_length(pattern), MOST_LEAST_LENGTH)
}

/// Refuses a grammar that is too long, or has a schema that is too large.
pub(super) fn check_lark(text: &str) -> Result<(), Excess> {
    check("bytes", text.len(), MOST_LARK_BYTES)?;
    check("length of its texts", text.lines().map(least_length).max().unwrap_or(0), MOST_LEAST_LENGTH)?;
    for (at, keyword) in text.match_indices("%json") {
        let rest = &text[at + keyword.len()..];
        // What is no JSON is refused when the grammar is read.
        if let Some(Ok(schema)) = serde_json::Deserializer::from_str(rest).into_iter::<Value>().next() {
            check_schema(&schema)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::least_length;

    #[test]
    fn lengths_of_texts_are_those_of_their_patterns() {
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
}
