//! Splitting text into words before byte-level BPE, by hand-written scanners.
//!
//! Vocabularies describe the split by a regular expression. A backtracking engine takes quadratic time or gives
//! up on long runs, and engines differ between platforms, so each expression in use is a scanner here: linear
//! time, the same words everywhere. The expressions stand at the scanners, and the tests run them through a
//! regex engine for comparison.

use unicode_properties::{GeneralCategory as Category, GeneralCategoryGroup as Group, UnicodeGeneralCategory};

use crate::error::Error;

/// How one family of vocabularies prepares text. GGUF names it in `tokenizer.ggml.pre`.
#[derive(Debug, Clone, Copy)]
pub(super) struct PreTokenizer {
    pattern: Pattern,
    /// Text is brought to Unicode's composed form first.
    pub nfc: bool,
    /// A word that is a token is that token, whatever the merges say.
    pub ignore_merges: bool,
    /// What `add_bos_token` means where the file is silent.
    pub add_bos: bool,
    /// What `add_sep_token` means where the file is silent.
    pub add_sep: bool,
}

#[derive(Debug, Clone, Copy)]
enum Pattern {
    Gpt2,
    DigitsThenGpt2,
    Modern { max_digits: usize, marks: bool },
    Cased { max_digits: usize, contractions: bool },
    Deepseek3,
}

const GPT2: PreTokenizer =
    PreTokenizer { pattern: Pattern::Gpt2, nfc: false, ignore_merges: false, add_bos: false, add_sep: false };
const STARCODER: PreTokenizer = PreTokenizer { pattern: Pattern::DigitsThenGpt2, ..GPT2 };
const DBRX: PreTokenizer = PreTokenizer { pattern: Pattern::Modern { max_digits: 3, marks: false }, ..GPT2 };
const LLAMA3: PreTokenizer = PreTokenizer { ignore_merges: true, add_bos: true, ..DBRX };
const R1_QWEN: PreTokenizer = PreTokenizer { pattern: Pattern::Modern { max_digits: 1, marks: false }, ..GPT2 };
const QWEN35: PreTokenizer =
    PreTokenizer { pattern: Pattern::Modern { max_digits: 1, marks: true }, nfc: true, ..GPT2 };
const GPT4O: PreTokenizer = PreTokenizer { pattern: Pattern::Cased { max_digits: 3, contractions: true }, ..GPT2 };
const TEKKEN: PreTokenizer = PreTokenizer {
    pattern: Pattern::Cased { max_digits: 1, contractions: false },
    ignore_merges: true,
    add_bos: true,
    ..GPT2
};
const DEEPSEEK3: PreTokenizer = PreTokenizer { pattern: Pattern::Deepseek3, ..GPT2 };

/// GGUF's names. `default` is what files say that were made before the names existed; most of them are GPT-2's.
const KNOWN: [(&str, PreTokenizer); 25] = [
    ("default", GPT2),
    ("gpt-2", GPT2),
    ("phi-2", GPT2),
    ("mpt", PreTokenizer { nfc: true, ..GPT2 }),
    ("olmo", PreTokenizer { nfc: true, ..GPT2 }),
    ("modern-bert", PreTokenizer { nfc: true, ..GPT2 }),
    ("roberta-bpe", PreTokenizer { add_sep: true, ..GPT2 }),
    ("starcoder", STARCODER),
    ("refact", STARCODER),
    ("smollm", STARCODER),
    ("command-r", PreTokenizer { nfc: true, ..STARCODER }),
    ("llama3", LLAMA3),
    ("llama-v3", LLAMA3),
    ("llama-bpe", LLAMA3),
    ("falcon3", LLAMA3),
    ("lfm2", LLAMA3),
    ("dbrx", DBRX),
    ("smaug-bpe", DBRX),
    ("qwen2", PreTokenizer { nfc: true, ..R1_QWEN }),
    ("deepseek-r1-qwen", R1_QWEN),
    ("qwen35", QWEN35),
    ("gpt-4o", GPT4O),
    ("llama4", GPT4O),
    ("tekken", TEKKEN),
    ("deepseek-v3", DEEPSEEK3),
];

/// The expressions as files spell them, in the order in which `tokenizer.json` applies them.
const EXPRESSIONS: [(&[&str], Pattern); 7] = [
    (&[r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"], Pattern::Gpt2),
    (
        &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
        Pattern::Modern { max_digits: 3, marks: false },
    ),
    (
        &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
        Pattern::Modern { max_digits: 1, marks: false },
    ),
    (
        &[concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
        Pattern::Modern { max_digits: 1, marks: true },
    ),
    (
        &[concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
        Pattern::Cased { max_digits: 3, contractions: true },
    ),
    (
        &[concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
        Pattern::Cased { max_digits: 1, contractions: false },
    ),
    (
        &[
            r"\p{N}{1,3}",
            "[一-龥\u{3040}-ゟ゠-ヿ]+",
            concat!(
                "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
                "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
            ),
        ],
        Pattern::Deepseek3,
    ),
];

impl PreTokenizer {
    /// The pre-tokenizer that `tokenizer.ggml.pre` names.
    ///
    /// # Errors
    /// [`Error::Unsupported`], listing the known names: a wrong split gives other tokens without any sign of it.
    pub fn by_name(name: Option<&str>) -> Result<Self, Error> {
        let name = name.unwrap_or("default");
        KNOWN.iter().find(|(known, _)| *known == name).map(|&(_, rules)| rules).ok_or_else(|| Error::Unsupported {
            format: "tokenizer",
            field: "pre".into(),
            found: super::vocab::shown(name),
            supported: KNOWN.map(|(known, _)| known).join(", "),
        })
    }

    /// The pre-tokenizer for a `tokenizer.json` that splits by `expressions`, one after the other, and where
    /// `digits` isolates each digit before that.
    pub fn by_expressions(expressions: &[&str], digits: bool, nfc: bool, ignore_merges: bool) -> Option<Self> {
        let &(_, pattern) = EXPRESSIONS.iter().find(|(known, _)| *known == expressions)?;
        let pattern = match (pattern, digits) {
            (pattern, false) => pattern,
            (Pattern::Gpt2, true) => Pattern::DigitsThenGpt2,
            (_, true) => return None,
        };
        Some(PreTokenizer { pattern, nfc, ignore_merges, ..GPT2 })
    }

    /// The pre-tokenizer of a `tokenizer.json` that has GPT-2's split built in.
    pub fn gpt2(digits: bool, nfc: bool, ignore_merges: bool) -> Self {
        let pattern = if digits { Pattern::DigitsThenGpt2 } else { Pattern::Gpt2 };
        PreTokenizer { pattern, nfc, ignore_merges, ..GPT2 }
    }

    /// Hands the words of `text` to `emit`, in order; together they are the text.
    pub fn split<'t>(&self, text: &'t str, emit: &mut dyn FnMut(&'t str)) {
        match self.pattern {
            Pattern::Gpt2 => scan(text, gpt2, emit),
            Pattern::DigitsThenGpt2 => {
                // `\p{N}`, each a word of its own; what lies between is split as if it were a whole text.
                isolate(
                    text,
                    |rest| first(rest).filter(|&c| is_number(c)).map_or(0, char::len_utf8),
                    |part, found| {
                        if found { emit(part) } else { scan(part, gpt2, emit) }
                    },
                );
            }
            Pattern::Modern { max_digits, marks } => scan(text, |rest| modern(rest, max_digits, marks), emit),
            Pattern::Cased { max_digits, contractions } => {
                scan(text, |rest| cased(rest, max_digits, contractions), emit);
            }
            Pattern::Deepseek3 => {
                // Three expressions, each on all pieces of the one before. The last cuts no digits.
                isolate(
                    text,
                    |rest| limited_run(rest, 3, is_number),
                    |part, found| {
                        if found {
                            return emit(part);
                        }
                        isolate(
                            part,
                            |rest| run(rest, is_cjk_or_kana),
                            |part, _| isolate(part, deepseek3, |word, _| emit(word)),
                        );
                    },
                );
            }
        }
    }
}

/// Cuts `text` into the words whose length in bytes `word_len` finds at the start of what is left.
fn scan<'t>(text: &'t str, word_len: impl Fn(&str) -> usize, emit: &mut dyn FnMut(&'t str)) {
    let mut rest = text;
    while !rest.is_empty() {
        // The scanners match any text; a character is the least that a word can be.
        let len = word_len(rest).max(first(rest).map_or(1, char::len_utf8));
        let (word, after) = rest.split_at_checked(len).unwrap_or((rest, ""));
        emit(word);
        rest = after;
    }
}

/// Cuts `text` into matches (`match_len` > 0 bytes, flag true) and the stretches between them (flag false).
fn isolate<'t>(text: &'t str, match_len: impl Fn(&str) -> usize, mut emit: impl FnMut(&'t str, bool)) {
    let mut rest = text;
    let mut gap = 0;
    while let Some(c) = tail(rest, gap).chars().next() {
        let len = match_len(tail(rest, gap));
        if len == 0 {
            gap += c.len_utf8();
            continue;
        }
        let (before, found) = rest.split_at_checked(gap).unwrap_or(("", rest));
        let (found, after) = found.split_at_checked(len).unwrap_or((found, ""));
        if !before.is_empty() {
            emit(before, false);
        }
        emit(found, true);
        rest = after;
        gap = 0;
    }
    if !rest.is_empty() {
        emit(rest, false);
    }
}

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
fn gpt2(text: &str) -> usize {
    let short = contraction(text, |c| c);
    if short != 0 {
        return short;
    }
    let space = text.len() - text.strip_prefix(' ').unwrap_or(text).len();
    let word = tail(text, space);
    for class in [is_letter, is_number, is_symbol] as [fn(char) -> bool; 3] {
        let len = run(word, class);
        if len != 0 {
            return space + len;
        }
    }
    whitespace(text, false)
}

/// ```text
/// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
/// ```
/// with 1 or 3 digits, and with `[\p{L}\p{M}]+` for words and no `\p{M}` among the symbols where marks are letters.
fn modern(text: &str, max_digits: usize, marks: bool) -> usize {
    let short = contraction(text, fold_case);
    if short != 0 {
        return short;
    }
    let in_word = |c: char| is_letter(c) || (marks && is_mark(c));
    // A mark may also be the word's optional first character; the word is the same either way.
    let lead = if in_word(first(text).unwrap_or(' ')) { 0 } else { word_lead(text) };
    let len = run(tail(text, lead), in_word);
    if len != 0 {
        return lead + len;
    }
    digits_symbols_spaces(text, max_digits, |c| is_symbol(c) && !in_word(c), &['\r', '\n'])
}

/// With `U = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`, `W = [\p{Ll}\p{Lm}\p{Lo}\p{M}]`, `C = (?i:'s|'t|'re|'ve|'m|'ll|'d)?`:
/// ```text
/// [^\r\n\p{L}\p{N}]?U*W+C|[^\r\n\p{L}\p{N}]?U+W*C|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
/// ```
/// with 1 or 3 digits, and without `C` where contractions are off.
fn cased(text: &str, max_digits: usize, contractions: bool) -> usize {
    let lead = word_lead(text);
    for word_len in [capitals_then_small, capitals] as [fn(&str) -> usize; 2] {
        for lead in [lead, 0] {
            let len = word_len(tail(text, lead));
            if len != 0 {
                let end = lead + len;
                return end + if contractions { contraction(tail(text, end), fold_case) } else { 0 };
            }
        }
    }
    digits_symbols_spaces(text, max_digits, is_symbol, &['\r', '\n', '/'])
}

/// `U*W+`. `U*` takes all it can; if no `W` follows, it gives back up to the last character that is both.
fn capitals_then_small(text: &str) -> usize {
    let upper = run(text, is_capital);
    let small = run(tail(text, upper), is_small);
    if small != 0 {
        return upper + small;
    }
    let shared = text.get(..upper).and_then(|run| run.char_indices().rfind(|&(_, c)| is_small(c)));
    shared.map_or(0, |(at, c)| at + c.len_utf8())
}

/// `U+W*`
fn capitals(text: &str) -> usize {
    let upper = run(text, is_capital);
    if upper == 0 { 0 } else { upper + run(tail(text, upper), is_small) }
}

/// ```text
/// [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*
/// |\s*[\r\n]+|\s+(?!\S)|\s+
/// ```
/// 0 where none of it matches, as at a lone control character.
fn deepseek3(text: &str) -> usize {
    let Some(c) = first(text) else { return 0 };
    let after = tail(text, c.len_utf8());
    if c.is_ascii_punctuation() {
        let len = run(after, |c| c.is_ascii_alphabetic());
        if len != 0 {
            return c.len_utf8() + len;
        }
    }
    let in_word = |c: char| is_letter(c) || is_mark(c);
    let is_sign = |c: char| matches!(c.general_category_group(), Group::Punctuation | Group::Symbol);
    let may_lead = !matches!(c, '\r' | '\n') && !in_word(c) && !is_sign(c);
    let lead = if may_lead { c.len_utf8() } else { 0 };
    let word = run(tail(text, lead), in_word);
    if word != 0 {
        return lead + word;
    }
    let space = if c == ' ' { 1 } else { 0 };
    let signs = run(tail(text, space), is_sign);
    if signs != 0 {
        let end = space + signs;
        return end + run(tail(text, end), |c| matches!(c, '\r' | '\n'));
    }
    whitespace(text, true)
}

/// `\p{N}{1,max_digits}| ?SYMBOL+[TRAILER]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn digits_symbols_spaces(text: &str, max_digits: usize, symbol: impl Fn(char) -> bool, trailer: &[char]) -> usize {
    let digits = limited_run(text, max_digits, is_number);
    if digits != 0 {
        return digits;
    }
    let space = text.len() - text.strip_prefix(' ').unwrap_or(text).len();
    let symbols = run(tail(text, space), symbol);
    if symbols != 0 {
        let end = space + symbols;
        return end + run(tail(text, end), |c| trailer.contains(&c));
    }
    whitespace(text, true)
}

/// `\s+(?!\S)|\s+`, and before it `\s*[\r\n]+` if `lines` is set.
///
/// The lookahead makes a run give its last space to the word that follows, unless it has only that one.
fn whitespace(text: &str, lines: bool) -> usize {
    let (mut end, mut last, mut after_line) = (0, 0, 0);
    for (at, c) in text.char_indices() {
        if !c.is_whitespace() {
            break;
        }
        last = at;
        end = at + c.len_utf8();
        if matches!(c, '\r' | '\n') {
            after_line = end;
        }
    }
    match after_line {
        1.. if lines => after_line,
        _ if end == text.len() || last == 0 => end,
        _ => last,
    }
}

/// `'s|'t|'re|'ve|'m|'ll|'d`, each letter seen through `fold`.
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

/// Simple case folding as far as contractions need it: the long s folds to s.
fn fold_case(c: char) -> char {
    if c == 'ſ' { 's' } else { c.to_ascii_lowercase() }
}

/// `[^\r\n\p{L}\p{N}]?` in front of a word.
fn word_lead(text: &str) -> usize {
    first(text).filter(|&c| !matches!(c, '\r' | '\n') && !is_letter(c) && !is_number(c)).map_or(0, char::len_utf8)
}

/// Bytes at the start of `text` whose characters are in `class`.
fn run(text: &str, class: impl Fn(char) -> bool) -> usize {
    text.find(|c: char| !class(c)).unwrap_or(text.len())
}

/// [`run`] of at most `max_chars` characters.
fn limited_run(text: &str, max_chars: usize, class: impl Fn(char) -> bool) -> usize {
    text.chars().take(max_chars).take_while(|&c| class(c)).map(char::len_utf8).sum()
}

fn first(text: &str) -> Option<char> {
    text.chars().next()
}

fn tail(text: &str, from: usize) -> &str {
    text.get(from..).unwrap_or("")
}

/// `\p{L}`
fn is_letter(c: char) -> bool {
    if c.is_ascii() { c.is_ascii_alphabetic() } else { c.general_category_group() == Group::Letter }
}

/// `\p{N}`
fn is_number(c: char) -> bool {
    if c.is_ascii() { c.is_ascii_digit() } else { c.general_category_group() == Group::Number }
}

/// `\p{M}`
fn is_mark(c: char) -> bool {
    !c.is_ascii() && c.general_category_group() == Group::Mark
}

/// `[^\s\p{L}\p{N}]`
fn is_symbol(c: char) -> bool {
    !c.is_whitespace() && !is_letter(c) && !is_number(c)
}

/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
fn is_capital(c: char) -> bool {
    is_mark(c) || (is_letter(c) && c.general_category() != Category::LowercaseLetter)
}

/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
fn is_small(c: char) -> bool {
    let cased = matches!(c.general_category(), Category::UppercaseLetter | Category::TitlecaseLetter);
    is_mark(c) || (is_letter(c) && !cased)
}

/// `[一-龥぀-ゟ゠-ヿ]`
fn is_cjk_or_kana(c: char) -> bool {
    matches!(c, '\u{4E00}'..='\u{9FA5}' | '\u{3040}'..='\u{30FF}')
}

#[cfg(test)]
mod tests {
    use super::*;

    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior};

    /// Characters of every class that an expression tells apart, and of those that engines are prone to confuse.
    const ALPHABET: &str = "aZsStTrReEvVmMlLdD''''ſ    \n\n\r\t\u{b}\u{85}\u{a0}\u{3000}019²Ⅷ٣½éÉßǅʰªאحकाि中龥あゟ゠ー가\u{301}\u{5b0}\u{20dd}\
                            .,!?/-_$+<|~`«¿、。€😀\u{200d}\u{200b}\u{feff}\u{1}\u{7f}\u{e000}";

    /// `n` strings of up to 23 characters.
    fn random_texts(n: usize) -> impl Iterator<Item = String> {
        let alphabet: Vec<char> = ALPHABET.chars().collect();
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize
        };
        (0..n).map(move |_| (0..next() % 24).map(|_| alphabet[next() % alphabet.len()]).collect())
    }

    /// The words that the regex engine of the tokenizers crate finds.
    fn regex_words(text: &str, splits: &[Split]) -> Vec<String> {
        let mut words = PreTokenizedString::from(text);
        for split in splits {
            split.pre_tokenize(&mut words).unwrap();
        }
        let splits = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(word, ..)| word.to_owned()).filter(|word| !word.is_empty()).collect()
    }

    fn isolating(expression: &str) -> Split {
        Split::new(SplitPattern::Regex(expression.into()), SplitDelimiterBehavior::Isolated, false).unwrap()
    }

    fn words(pattern: Pattern, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        PreTokenizer { pattern, ..GPT2 }.split(text, &mut |word| words.push(word.to_owned()));
        words
    }

    #[test]
    fn scanners_match_their_expressions() {
        for (expressions, pattern) in EXPRESSIONS {
            let splits: Vec<Split> = expressions.iter().map(|expression| isolating(expression)).collect();
            for text in random_texts(20_000) {
                assert_eq!(words(pattern, &text), regex_words(&text, &splits), "{pattern:?} on {text:?}");
            }
        }
    }

    #[test]
    fn digits_are_isolated_before_gpt2() {
        let splits = [isolating(r"\p{N}"), isolating(EXPRESSIONS[0].0[0])];
        for text in random_texts(20_000) {
            assert_eq!(words(Pattern::DigitsThenGpt2, &text), regex_words(&text, &splits), "{text:?}");
        }
    }
}
