//! Pre-tokenizer steps: regular expressions that isolate their matches, each with an equivalent scanner.

use super::classes::{is_digit, is_in, is_letter, is_line_break, is_number, is_punctuation};
use super::numbers;
use super::words::{
    Cased, GPT4, GPT4O as GPT4O_RULES, Modern, cased, deepseek, first, gpt2, limited_run, modern, modern_word, phrases,
    run, tail,
};
use crate::tokenizer::special::is_word;

/// A step: passes the pieces of a text to a function in order; concatenated they are the text.
pub(in crate::tokenizer) type CutFn = for<'t> fn(&'t str, &mut dyn FnMut(&'t str));

/// A step with its expression as files spell it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Split {
    pub expression: &'static str,
    pub cut: CutFn,
}

// Contents of brackets in expressions, also used by `is_in`.
macro_rules! cjk {
    () => {
        "一-龥\u{3040}-ゟ゠-ヿ"
    };
}
macro_rules! east_asian {
    () => {
        "一-龥\u{800}-一가-\u{D7FF}"
    };
}
macro_rules! asian {
    () => {
        concat!(
            "一-\u{9FFF}㐀-\u{4DBF}\u{8C48}-\u{FAFF}\u{3040}-ゟ゠-ヿ･-ﾟ⼀-\u{2FDF}\u{E40}-\u{E7F}\u{E80}-\u{EFF}",
            "\u{1780}-\u{17FF}\u{1000}-\u{109F}\u{AA60}-\u{AA7F}\u{A9E0}-\u{A9FF}가-\u{D7AF}\u{1100}-\u{11FF}"
        )
    };
}
macro_rules! full_width_signs {
    () => {
        "！…“”‘’—：；，、-\u{303F}︰-\u{FE4F}"
    };
}
macro_rules! signs {
    () => {
        "!-/:-~！-／：-～‘-‟\u{3000}-。"
    };
}
macro_rules! cased_letters {
    () => {
        concat!(
            "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ",
            "Ὗ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ",
            "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
        )
    };
}

pub(super) const GPT2: Split = Split {
    expression: r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    cut: |text, emit| isolate(text, gpt2, emit),
};

pub(super) const LLAMA3: Split = Split {
    expression: concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    cut: |text, emit| isolate(text, |rest| modern(rest, &GPT4), emit),
};

/// White space outside words is split into pieces of fixed lengths.
pub(super) const JAIS2: Split = Split {
    expression: concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)",
        r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ),
    cut: words_and_lengths,
};

pub(super) const QWEN2: Split = Split {
    expression: concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    cut: |text, emit| isolate(text, |rest| modern(rest, &Modern { max_digits: 1, ..GPT4 }), emit),
};

/// Equivalent for every text: possessive where backtracking finds nothing, and one line break after a greedy `\s*`.
pub(super) const BAILING: Split = Split {
    expression: r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ..QWEN2
};

pub(super) const QWEN35: Split = Split {
    expression: concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    cut: |text, emit| isolate(text, |rest| modern(rest, &Modern { max_digits: 1, marks: true, ..GPT4 }), emit),
};

pub(super) const MINICPM5: Split = Split {
    expression: concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    cut: |text, emit| isolate(text, |rest| modern(rest, &Modern { max_digits: usize::MAX, ..GPT4 }), emit),
};

pub(super) const SEED_CODER: Split = Split {
    expression: concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+",
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    cut: |text, emit| isolate(text, |rest| modern(rest, &Modern { max_digits: 1, trailer: (&[], 0), ..GPT4 }), emit),
};

pub(super) const UFAKZEKA: Split = Split {
    expression: concat!(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*", r"|\s*[\r\n]+|\s+(?!\S)|\s+"),
    cut: |text, emit| isolate(text, |rest| modern(rest, &Modern { max_digits: 1, contractions: false, ..GPT4 }), emit),
};

pub(super) const EXAONE_MOE: Split = Split {
    expression: concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    cut: |text, emit| isolate(text, phrases, emit),
};

pub(super) const GPT4O: Split = Split {
    expression: concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    cut: |text, emit| isolate(text, |rest| cased(rest, &GPT4O_RULES), emit),
};

pub(super) const TEKKEN: Split = Split {
    expression: concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    cut: |text, emit| {
        isolate(text, |rest| cased(rest, &Cased { max_digits: 1, contractions: false, ..GPT4O_RULES }), emit);
    },
};

pub(super) const YOUTU: Split = Split {
    expression: concat!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    cut: |text, emit| isolate(text, |rest| cased(rest, &Cased { max_digits: 1, ..GPT4O_RULES }), emit),
};

pub(super) const KIMI: Split = Split {
    expression: concat!(
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    cut: |text, emit| {
        let rules = Cased { han_apart: true, trailer: &['\r', '\n'], ..GPT4O_RULES };
        isolate(text, |rest| cased(rest, &rules), emit);
    },
};

pub(super) const DEEPSEEK3: Split = Split {
    expression: concat!(
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    ),
    cut: |text, emit| isolate(text, |rest| deepseek(rest, true), emit),
};

pub(super) const SPARK: Split = Split {
    expression: concat!(
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
        "| ?[\\p{P}\\p{S}]+|[\r\n]|\\s+(?!\\S)|\\s+"
    ),
    cut: |text, emit| isolate(text, |rest| deepseek(rest, false), emit),
};

pub(super) const DIGIT: Split =
    Split { expression: r"\p{N}", cut: |text, emit| isolate(text, |rest| limited_run(rest, 1, is_number), emit) };

pub(super) const THREE_DIGITS: Split =
    Split { expression: r"\p{N}{1,3}", cut: |text, emit| isolate(text, |rest| limited_run(rest, 3, is_number), emit) };

pub(super) const NUMBERS: Split =
    Split { expression: r"\p{N}+", cut: |text, emit| isolate(text, |rest| run(rest, is_number), emit) };

pub(super) const THREE_ASCII_DIGITS: Split = Split {
    expression: "[0-9][0-9][0-9]",
    cut: |text, emit| {
        let digits = |rest: &str| limited_run(rest, 3, |c| c.is_ascii_digit());
        isolate(text, |rest| if digits(rest) == 3 { 3 } else { 0 }, emit);
    },
};

/// Numbers in groups of three from the end, unless a letter follows.
pub(super) const DIGIT_GROUPS: Split = Split {
    expression: r"\d{1,3}(?=(?:\d{3})*\b)",
    cut: |text, emit| numbers::isolate_groups(text, is_digit, |next| !next.is_some_and(is_word), emit),
};

/// Numbers in groups of three from the end. AFMoE's files spell it differently.
pub(super) const NUMBER_GROUPS: Split = Split {
    expression: r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    cut: |text, emit| numbers::isolate_groups(text, is_number, |_| true, emit),
};

/// Positions in numbers before a multiple of three digits.
pub(super) const BEFORE_GROUPS: Split =
    Split { expression: r"(?=(\d{3})+(?!\d))", cut: |text, emit| numbers::cut_before_groups(text, is_digit, emit) };

pub(super) const CJK: Split = Split {
    expression: concat!("[", cjk!(), "]+"),
    cut: |text, emit| isolate(text, |rest| run(rest, |c| is_in(cjk!(), c)), emit),
};

pub(super) const EAST_ASIAN: Split = Split {
    expression: concat!("[", east_asian!(), "]+"),
    cut: |text, emit| isolate(text, |rest| run(rest, |c| is_in(east_asian!(), c)), emit),
};

pub(super) const ASIAN: Split = Split {
    expression: concat!("[", asian!(), "]+"),
    cut: |text, emit| isolate(text, |rest| run(rest, |c| !c.is_ascii() && is_in(asian!(), c)), emit),
};

pub(super) const SCRIPTS: Split = Split {
    expression: concat!("[가-힣ㄱ-ㆎ]+|[", full_width_signs!(), "]+|[ㄅ-ㄯ]+|[", cjk!(), "]+"),
    cut: |text, emit| {
        let of = |rest: &str, class: &str| run(rest, |c| !c.is_ascii() && is_in(class, c));
        let classes = ["가-힣ㄱ-ㆎ", full_width_signs!(), "ㄅ-ㄯ", cjk!()];
        isolate(text, |rest| classes.iter().map(|class| of(rest, class)).find(|&len| len != 0).unwrap_or(0), emit);
    },
};

pub(super) const LINE_BREAK: Split =
    Split { expression: "[\r\n]", cut: |text, emit| isolate(text, |rest| limited_run(rest, 1, is_line_break), emit) };

pub(super) const LINES: Split =
    Split { expression: r"[^\n]+|[\n]+", cut: |text, emit| isolate(text, |rest| run(rest, |c| c == '\n'), emit) };

pub(super) const SPACED_LETTERS: Split =
    Split { expression: r"\s?\p{L}+", cut: |text, emit| isolate(text, |rest| spaced(rest, is_letter), emit) };

pub(super) const SPACED_PUNCTUATION: Split =
    Split { expression: r"\s?\p{P}+", cut: |text, emit| isolate(text, |rest| spaced(rest, is_punctuation), emit) };

pub(super) const SPACED_CASED_LETTERS: Split = Split {
    expression: concat!(r"\s?[", cased_letters!(), "]+"),
    cut: |text, emit| isolate(text, |rest| spaced(rest, |c| is_in(cased_letters!(), c)), emit),
};

pub(super) const SPACED_SIGNS: Split = Split {
    expression: concat!(r"\s?[", signs!(), "]+"),
    cut: |text, emit| isolate(text, |rest| spaced(rest, |c| is_in(signs!(), c)), emit),
};

pub(super) const SPACES_AT_END: Split = Split {
    expression: r"\s+$",
    cut: |text, emit| {
        let (before, spaces) = text.split_at(text.trim_end().len());
        [before, spaces].into_iter().filter(|part| !part.is_empty()).for_each(emit);
    },
};

pub(super) const PUNCTUATION: Split = Split {
    expression: r"[\p{P}\$\+<=>\^~\|`]",
    cut: |text, emit| isolate(text, |rest| limited_run(rest, 1, is_punctuation_or_ascii_sign), emit),
};

pub(super) const PUNCTUATION_RUN: Split = Split {
    expression: r"[\p{P}\$\+<=>\^~\|`]+",
    cut: |text, emit| isolate(text, |rest| run(rest, is_punctuation_or_ascii_sign), emit),
};

/// In this class, parentheses and the bar are literal.
pub(super) const BLOOM: Split = Split {
    expression: r" ?[^(\s|.,!?…。，、।۔،)]+",
    cut: |text, emit| {
        let in_word = |c: char| !c.is_whitespace() && !"(|.,!?…。，、।۔،)".contains(c);
        isolate(
            text,
            |rest| {
                let space = usize::from(rest.starts_with(' '));
                match run(tail(rest, space), in_word) {
                    0 => 0,
                    len => space + len,
                }
            },
            emit,
        );
    },
};

pub(super) const SENTINEL: Split = Split {
    expression: "<sentinel:[0-9]+>",
    cut: |text, emit| {
        let token = |rest: &str| {
            let after = rest.strip_prefix("<sentinel:")?;
            let digits = run(after, |c| c.is_ascii_digit());
            let behind = tail(after, digits).strip_prefix('>').filter(|_| digits != 0)?;
            Some(rest.len() - behind.len())
        };
        isolate(text, |rest| token(rest).unwrap_or(0), emit);
    },
};

pub(super) const IMAGE: Split = Split {
    expression: "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    cut: |text, emit| {
        let token = |rest: &str| {
            let after = rest.strip_prefix("IMGIMG")?;
            let letters = limited_run(after, 4, |c| matches!(c, 'A'..='I'));
            let behind = tail(after, letters).strip_prefix('Z').filter(|_| letters != 0)?;
            Some(rest.len() - behind.len())
        };
        isolate(text, |rest| token(rest).unwrap_or(0), emit);
    },
};

pub(super) const TABS: Split = Split {
    expression: r"([\t\n]|    |  )",
    cut: |text, emit| {
        isolate(
            text,
            |rest| ["\t", "\n", "    ", "  "].iter().find(|t| rest.starts_with(**t)).map_or(0, |t| t.len()),
            emit,
        );
    },
};

/// All steps, to look up those of a `tokenizer.json`.
pub(super) const ALL: [Split; 40] = [
    GPT2,
    LLAMA3,
    JAIS2,
    QWEN2,
    BAILING,
    QWEN35,
    MINICPM5,
    SEED_CODER,
    UFAKZEKA,
    EXAONE_MOE,
    GPT4O,
    TEKKEN,
    YOUTU,
    KIMI,
    DEEPSEEK3,
    SPARK,
    DIGIT,
    THREE_DIGITS,
    NUMBERS,
    THREE_ASCII_DIGITS,
    DIGIT_GROUPS,
    NUMBER_GROUPS,
    BEFORE_GROUPS,
    CJK,
    EAST_ASIAN,
    ASIAN,
    SCRIPTS,
    LINE_BREAK,
    LINES,
    SPACED_LETTERS,
    SPACED_PUNCTUATION,
    SPACED_CASED_LETTERS,
    SPACED_SIGNS,
    SPACES_AT_END,
    PUNCTUATION,
    PUNCTUATION_RUN,
    BLOOM,
    SENTINEL,
    IMAGE,
    TABS,
];

/// Emits matches (`match_len` > 0 bytes) and the text between them.
fn isolate<'t>(text: &'t str, match_len: impl Fn(&str) -> usize, emit: &mut dyn FnMut(&'t str)) {
    let mut rest = text;
    let mut gap = 0;
    while let Some(c) = first(tail(rest, gap)) {
        let len = match_len(tail(rest, gap));
        if len == 0 {
            gap += c.len_utf8();
            continue;
        }
        let (before, found) = rest.split_at_checked(gap).unwrap_or(("", rest));
        let (found, after) = found.split_at_checked(len).unwrap_or((found, ""));
        if !before.is_empty() {
            emit(before);
        }
        emit(found);
        rest = after;
        gap = 0;
    }
    if !rest.is_empty() {
        emit(rest);
    }
}

/// `\s?CLASS+`
fn spaced(text: &str, class: impl Fn(char) -> bool) -> usize {
    let len = run(text, &class);
    if len != 0 {
        return len;
    }
    let space = limited_run(text, 1, char::is_whitespace);
    match run(tail(text, space), class) {
        0 => 0,
        len => space + len,
    }
}

/// The class of the crate's `Punctuation`.
fn is_punctuation_or_ascii_sign(c: char) -> bool {
    if c.is_ascii() { c.is_ascii_punctuation() } else { is_punctuation(c) }
}

/// [`JAIS2`]: words, line breaks with preceding white space, and other white space in powers of two.
fn words_and_lengths<'t>(text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    let mut rest = text;
    let mut take = |rest: &mut &'t str, len: usize| {
        let (part, after) = rest.split_at_checked(len).unwrap_or((rest, ""));
        emit(part);
        *rest = after;
    };
    while let Some(c) = first(rest) {
        let word = modern_word(rest, &GPT4);
        if word != 0 {
            take(&mut rest, word);
            continue;
        }
        let spaces = rest.get(..run(rest, char::is_whitespace)).unwrap_or_default();
        if spaces.is_empty() {
            take(&mut rest, c.len_utf8());
            continue;
        }
        if let Some(at) = spaces.rfind(is_line_break) {
            take(&mut rest, at + 1);
            continue;
        }
        let word_follows = spaces.len() < rest.len();
        let mut left = spaces.chars().count();
        while left > 0 {
            // A length fits if more white space follows, or the text ends.
            let fits = |len: &usize| left > *len || (left == *len && !word_follows);
            let len = [512, 256, 128, 64, 32, 16, 8, 4, 2].into_iter().find(fits).unwrap_or(1);
            let bytes = limited_run(rest, len, |_| true);
            take(&mut rest, bytes);
            left -= len;
            if left == 1 && word_follows {
                // The next word may include it.
                break;
            }
        }
    }
}
