//! Character classes of the expressions.

use unicode_properties::{GeneralCategory as Category, GeneralCategoryGroup as Group, UnicodeGeneralCategory};

/// Unicode's Han script as ranges: `\p{Han}`.
const HAN: &str = "⺀-⺙⺛-⻳⼀-⿕々〇〡-〩〸-〻㐀-䶿一-鿿\u{F900}-\u{FA6D}\u{FA70}-\u{FAD9}\u{16FE2}-\u{16FE3}\
                   \u{16FF0}-\u{16FF1}\u{20000}-\u{2A6DF}\u{2A700}-\u{2B739}\u{2B740}-\u{2B81D}\u{2B820}-\u{2CEA1}\
                   \u{2CEB0}-\u{2EBE0}\u{2EBF0}-\u{2EE5D}\u{2F800}-\u{2FA1D}\u{30000}-\u{3134A}\u{31350}-\u{323AF}";

/// Whether `c` is in a class in expression syntax, such as `a-zß`. A hyphen forms a range wherever possible.
pub(super) fn is_in(class: &str, c: char) -> bool {
    let mut chars = class.chars();
    while let Some(first) = chars.next() {
        let mut ahead = chars.clone();
        let last = match (ahead.next(), ahead.next()) {
            (Some('-'), Some(last)) => {
                chars = ahead;
                last
            }
            _ => first,
        };
        if (first..=last).contains(&c) {
            return true;
        }
    }
    false
}

/// `\p{L}`
pub(super) fn is_letter(c: char) -> bool {
    if c.is_ascii() { c.is_ascii_alphabetic() } else { c.general_category_group() == Group::Letter }
}

/// `\p{N}`
pub(super) fn is_number(c: char) -> bool {
    if c.is_ascii() { c.is_ascii_digit() } else { c.general_category_group() == Group::Number }
}

/// `\d`
pub(super) fn is_digit(c: char) -> bool {
    if c.is_ascii() { c.is_ascii_digit() } else { c.general_category() == Category::DecimalNumber }
}

/// `\p{M}`
pub(super) fn is_mark(c: char) -> bool {
    !c.is_ascii() && c.general_category_group() == Group::Mark
}

/// `\p{P}`
pub(super) fn is_punctuation(c: char) -> bool {
    c.general_category_group() == Group::Punctuation
}

/// `[\p{P}\p{S}]`
pub(super) fn is_sign(c: char) -> bool {
    matches!(c.general_category_group(), Group::Punctuation | Group::Symbol)
}

/// `[^\s\p{L}\p{N}]`
pub(super) fn is_symbol(c: char) -> bool {
    !c.is_whitespace() && !is_letter(c) && !is_number(c)
}

/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
pub(super) fn is_capital(c: char) -> bool {
    is_mark(c) || (is_letter(c) && c.general_category() != Category::LowercaseLetter)
}

/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
pub(super) fn is_small(c: char) -> bool {
    let cased = matches!(c.general_category(), Category::UppercaseLetter | Category::TitlecaseLetter);
    is_mark(c) || (is_letter(c) && !cased)
}

/// `[\r\n]`
pub(super) fn is_line_break(c: char) -> bool {
    matches!(c, '\r' | '\n')
}

/// `\p{Han}`
pub(super) fn is_han(c: char) -> bool {
    c >= '\u{2E80}' && is_in(HAN, c)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use tokenizers::tokenizer::pattern::Pattern;
    use tokenizers::utils::SysRegex;

    use super::*;

    /// Characters whose category changed between Unicode versions.
    const MOVED: [char; 1] = ['ʕ'];

    /// Compares every character with a regex engine's classes.
    #[test]
    fn character_classes_match_a_regex_engine() {
        type Class = fn(char) -> bool;
        let classes: [(&str, Class); 11] = [
            (r"\p{L}", is_letter),
            (r"\p{N}", is_number),
            (r"\d", is_digit),
            (r"\p{M}", is_mark),
            (r"\p{P}", is_punctuation),
            (r"[\p{P}\p{S}]", is_sign),
            (r"[^\s\p{L}\p{N}]", is_symbol),
            (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", is_capital),
            (r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", is_small),
            (r"[\r\n]", is_line_break),
            (r"\p{Han}", is_han),
        ];
        let all: String = ('\0'..=char::MAX).collect();
        let matches = |expression: &str| -> Vec<(bool, &str)> {
            let regex = SysRegex::new(expression).unwrap();
            let found = (&regex).find_matches(&all).unwrap();
            found.into_iter().map(|((start, end), is_match)| (is_match, &all[start..end])).collect()
        };
        // The engine may know another Unicode version, without some of the characters.
        let unknown: HashSet<char> =
            matches(r"\p{Cn}+").into_iter().filter(|found| found.0).flat_map(|found| found.1.chars()).collect();
        let is_known = |c: &char| !unknown.contains(c) && c.general_category() != Category::Unassigned;
        for (expression, class) in classes {
            let mut compared = 0;
            for (is_match, part) in matches(&format!("{expression}+")) {
                for c in part.chars().filter(is_known) {
                    assert!(class(c) == is_match || MOVED.contains(&c), "{expression} and {c:?}");
                    compared += 1;
                }
            }
            assert!(compared > 280_000, "{expression}: {compared} characters");
        }
    }

    #[test]
    fn bracket_class_syntax_is_parsed() {
        let found: String = ('\0'..='\u{FF}').filter(|&c| is_in("!a-cx-µ-", c) && c.is_ascii()).collect();
        assert_eq!(found, "!-abcxyz{|}~\u{7f}");
    }
}
