//! Scanners for expressions that split whole texts into words: each function returns the number of bytes that its
//! expression matches at the start of a text.

use super::classes::{is_capital, is_han, is_letter, is_line_break, is_mark, is_number, is_sign, is_small, is_symbol};

/// Variations of the GPT-4 family of expressions:
/// ```text
/// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
/// ```
pub(super) struct Modern {
    /// Whether contractions such as `'s` are words.
    pub contractions: bool,
    /// `[\p{L}\p{M}]+` for words, and no `\p{M}` among the symbols.
    pub marks: bool,
    pub max_digits: usize,
    /// Characters that may follow symbols, and their maximum number.
    pub trailer: (&'static [char], usize),
}

pub(super) const GPT4: Modern =
    Modern { contractions: true, marks: false, max_digits: 3, trailer: (&['\r', '\n'], usize::MAX) };

/// Variations of the GPT-4o family of expressions. With `U = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`,
/// `W = [\p{Ll}\p{Lm}\p{Lo}\p{M}]`, `C = (?i:'s|'t|'re|'ve|'m|'ll|'d)?`:
/// ```text
/// [^\r\n\p{L}\p{N}]?U*W+C|[^\r\n\p{L}\p{N}]?U+W*C|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
/// ```
pub(super) struct Cased {
    /// Whether the expression has `C`.
    pub contractions: bool,
    /// `\p{Han}+` first, and no Han characters in `U` and `W`.
    pub han_apart: bool,
    pub max_digits: usize,
    /// Characters that may follow symbols.
    pub trailer: &'static [char],
}

pub(super) const GPT4O: Cased =
    Cased { contractions: true, han_apart: false, max_digits: 3, trailer: &['\r', '\n', '/'] };

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
pub(super) fn gpt2(text: &str) -> usize {
    let short = contraction(text, |c| c);
    if short != 0 {
        return short;
    }
    let space = leading_space(text);
    let word = tail(text, space);
    for class in [is_letter, is_number, is_symbol] as [fn(char) -> bool; 3] {
        let len = run(word, class);
        if len != 0 {
            return space + len;
        }
    }
    whitespace(text, false)
}

pub(super) fn modern(text: &str, rules: &Modern) -> usize {
    match modern_word(text, rules) {
        0 => whitespace(text, true),
        len => len,
    }
}

/// [`modern`] without its last three alternatives, those for white space.
pub(super) fn modern_word(text: &str, rules: &Modern) -> usize {
    let short = if rules.contractions { contraction(text, fold_case) } else { 0 };
    if short != 0 {
        return short;
    }
    let in_word = |c: char| is_letter(c) || (rules.marks && is_mark(c));
    // A mark may also be the word's optional first character; the result is the same.
    let lead = if in_word(first(text).unwrap_or(' ')) { 0 } else { word_lead(text) };
    let len = run(tail(text, lead), in_word);
    if len != 0 {
        return lead + len;
    }
    digits_or_symbols(text, rules.max_digits, |c| is_symbol(c) && !in_word(c), rules.trailer)
}

/// [`GPT4`] with one digit, `[\r\n/]?` after symbols, `\s*[\r\n]` for lines, and words that continue after a space:
/// `[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+`
pub(super) fn phrases(text: &str) -> usize {
    let short = contraction(text, fold_case);
    if short != 0 {
        return short;
    }
    let lead = word_lead(text);
    let letter = |from: usize| {
        let len = first(tail(text, from)).filter(|&c| is_letter(c)).map_or(0, char::len_utf8);
        if len == 0 { 0 } else { len + run(tail(text, from + len), is_mark) }
    };
    let mut end = lead;
    loop {
        let space = if end == lead { 0 } else { leading_space(tail(text, end)) };
        match (letter(end), letter(end + space)) {
            (0, 0) => break,
            (0, len) => end += space + len,
            (len, _) => end += len,
        }
    }
    if end > lead {
        return end;
    }
    match digits_or_symbols(text, 1, is_symbol, (&['\r', '\n', '/'], 1)) {
        // A greedy `\s*` leaves the last line break to `[\r\n]`, so this ends where `\s*[\r\n]+` does.
        0 => whitespace(text, true),
        len => len,
    }
}

pub(super) fn cased(text: &str, rules: &Cased) -> usize {
    if rules.han_apart {
        let han = run(text, is_han);
        if han != 0 {
            return han;
        }
    }
    let allowed = |c: char| !(rules.han_apart && is_han(c));
    let capital = |c: char| is_capital(c) && allowed(c);
    let small = |c: char| is_small(c) && allowed(c);
    let with_contraction =
        |end: usize| end + if rules.contractions { contraction(tail(text, end), fold_case) } else { 0 };
    let lead = word_lead(text);
    for from in [lead, 0] {
        let len = capitals_then_small(tail(text, from), capital, small);
        if len != 0 {
            return with_contraction(from + len);
        }
    }
    for from in [lead, 0] {
        // U+W*
        let upper = run(tail(text, from), capital);
        if upper != 0 {
            return with_contraction(from + upper + run(tail(text, from + upper), small));
        }
    }
    match digits_or_symbols(text, rules.max_digits, is_symbol, (rules.trailer, usize::MAX)) {
        0 => whitespace(text, true),
        len => len,
    }
}

/// `U*W+`. `U*` is greedy; without a following `W` it backtracks to the last character in both.
fn capitals_then_small(text: &str, capital: impl Fn(char) -> bool, small: impl Fn(char) -> bool) -> usize {
    let upper = run(text, capital);
    let lower = run(tail(text, upper), &small);
    if lower != 0 {
        return upper + lower;
    }
    let shared = text.get(..upper).and_then(|run| run.char_indices().rfind(|&(_, c)| small(c)));
    shared.map_or(0, |(at, c)| at + c.len_utf8())
}

/// ```text
/// [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*
/// |\s*[\r\n]+|\s+(?!\S)|\s+
/// ```
/// and with `lines` false ` ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+` after the first two. 0 without a match, as at a lone
/// control character.
pub(super) fn deepseek(text: &str, lines: bool) -> usize {
    let Some(c) = first(text) else { return 0 };
    let after = tail(text, c.len_utf8());
    if c.is_ascii_punctuation() {
        let len = run(after, |c| c.is_ascii_alphabetic());
        if len != 0 {
            return c.len_utf8() + len;
        }
    }
    let in_word = |c: char| is_letter(c) || is_mark(c);
    let may_lead = !is_line_break(c) && !in_word(c) && !is_sign(c);
    let lead = if may_lead { c.len_utf8() } else { 0 };
    let word = run(tail(text, lead), in_word);
    if word != 0 {
        return lead + word;
    }
    let space = leading_space(text);
    let signs = run(tail(text, space), is_sign);
    if signs != 0 {
        let end = space + signs;
        return if lines { end + run(tail(text, end), is_line_break) } else { end };
    }
    if !lines && is_line_break(c) { c.len_utf8() } else { whitespace(text, lines) }
}

/// `\p{N}{1,max_digits}| ?SYMBOL+[TRAILER]*`
fn digits_or_symbols(
    text: &str,
    max_digits: usize,
    symbol: impl Fn(char) -> bool,
    (trailer, max_trailer): (&[char], usize),
) -> usize {
    let digits = limited_run(text, max_digits, is_number);
    if digits != 0 {
        return digits;
    }
    let space = leading_space(text);
    match run(tail(text, space), symbol) {
        0 => 0,
        symbols => {
            let end = space + symbols;
            end + limited_run(tail(text, end), max_trailer, |c| trailer.contains(&c))
        }
    }
}

/// `\s+(?!\S)|\s+`, preceded by `\s*[\r\n]+` if `lines` is set.
///
/// The lookahead leaves a run's last space to the next word, unless it is the only one.
pub(super) fn whitespace(text: &str, lines: bool) -> usize {
    let (mut end, mut last, mut after_line) = (0, 0, 0);
    for (at, c) in text.char_indices() {
        if !c.is_whitespace() {
            break;
        }
        last = at;
        end = at + c.len_utf8();
        if is_line_break(c) {
            after_line = end;
        }
    }
    match after_line {
        1.. if lines => after_line,
        _ if end == text.len() || last == 0 => end,
        _ => last,
    }
}

/// `'s|'t|'re|'ve|'m|'ll|'d`, with each letter mapped by `fold`.
fn contraction(text: &str, fold: impl Fn(char) -> char) -> usize {
    let Some(after) = text.strip_prefix('\'') else { return 0 };
    let mut letters = after.chars();
    let (one, two) = (letters.next(), letters.next());
    let len = |c: Option<char>| c.map_or(0, char::len_utf8);
    match (one.map(&fold), two.map(&fold)) {
        (Some('s' | 't' | 'm' | 'd'), _) => 1 + len(one),
        (Some('r' | 'v'), Some('e')) | (Some('l'), Some('l')) => 1 + len(one) + len(two),
        _ => 0,
    }
}

/// Simple case folding for contractions: the long s folds to s.
fn fold_case(c: char) -> char {
    if c == 'ſ' { 's' } else { c.to_ascii_lowercase() }
}

/// `[^\r\n\p{L}\p{N}]?` before a word.
fn word_lead(text: &str) -> usize {
    first(text).filter(|&c| !is_line_break(c) && !is_letter(c) && !is_number(c)).map_or(0, char::len_utf8)
}

/// ` ?`
fn leading_space(text: &str) -> usize {
    usize::from(text.starts_with(' '))
}

/// Length in bytes of the leading characters in `class`.
pub(super) fn run(text: &str, class: impl Fn(char) -> bool) -> usize {
    text.find(|c: char| !class(c)).unwrap_or(text.len())
}

/// [`run`] of at most `max_chars` characters.
pub(super) fn limited_run(text: &str, max_chars: usize, class: impl Fn(char) -> bool) -> usize {
    text.chars().take(max_chars).take_while(|&c| class(c)).map(char::len_utf8).sum()
}

pub(super) fn first(text: &str) -> Option<char> {
    text.chars().next()
}

pub(super) fn tail(text: &str, from: usize) -> &str {
    text.get(from..).unwrap_or("")
}
