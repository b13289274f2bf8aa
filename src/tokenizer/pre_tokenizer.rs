//! Splits text into words before byte-level BPE, with hand-written scanners.
//!
//! Vocabularies define the split by a sequence of regular expressions. Backtracking engines take quadratic time or
//! give up on long runs, and engines differ between platforms, so each expression in use has a scanner: linear time,
//! the same words everywhere. [`splits`] has the expressions with their scanners, [`names`] GGUF's names for them.
//! The tests compare the scanners with a regex engine.

mod classes;
mod names;
mod numbers;
mod splits;
mod words;

use names::{FAMILIES, Family};
use splits::CutFn;

use crate::error::Error;

/// The text preparation of a family of vocabularies, named in `tokenizer.ggml.pre`.
#[derive(Debug, Clone)]
pub(super) struct PreTokenizer {
    /// Each step runs on all pieces of the previous one.
    steps: Vec<CutFn>,
    /// Normalises text to Unicode form C first.
    pub nfc: bool,
    /// Words that are tokens skip the merges.
    pub ignore_merges: bool,
    /// Default of `add_bos_token`.
    pub add_bos: bool,
    /// Default of `add_sep_token`.
    pub add_sep: bool,
}

/// A pre-tokenizer step of a `tokenizer.json`.
pub(super) enum PreTokenizerStep<'j> {
    /// Isolates the matches of a regular expression.
    Regex(&'j str),
    /// Isolates digits, singly or as whole numbers.
    Digits { each: bool },
    /// Isolates punctuation, singly or in runs.
    Punctuation { each: bool },
    /// GPT-2's expression, built into `ByteLevel`.
    Gpt2,
}

impl PreTokenizer {
    /// The pre-tokenizer named in `tokenizer.ggml.pre`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] listing the known names: a wrong split would silently produce other tokens.
    pub fn by_name(name: Option<&str>) -> Result<Self, Error> {
        let name = name.unwrap_or("default");
        let family = FAMILIES.iter().find(|family| family.names.contains(&name));
        family.map(Self::of_family).ok_or_else(|| {
            let known = FAMILIES.iter().flat_map(|family| family.names).chain(super::raw::NAMES);
            Error::Unsupported {
                format: "tokenizer",
                field: "pre".into(),
                found: super::vocab::shown(name),
                supported: known.copied().collect::<Vec<_>>().join(", "),
            }
        })
    }

    fn of_family(family: &Family) -> Self {
        PreTokenizer {
            steps: family.steps.iter().map(|split| split.cut).collect(),
            nfc: family.nfc,
            ignore_merges: family.ignore_merges,
            add_bos: family.add_bos,
            add_sep: family.add_sep,
        }
    }

    /// The pre-tokenizer of a `tokenizer.json`. The error is an unsupported step.
    pub fn by_steps<'s, 'j>(
        steps: &'s [PreTokenizerStep<'j>],
        nfc: bool,
        ignore_merges: bool,
    ) -> Result<Self, &'s PreTokenizerStep<'j>> {
        let cut = |step: &'s PreTokenizerStep<'j>| match step {
            PreTokenizerStep::Regex(expression) => {
                splits::ALL.iter().find(|split| split.expression == *expression).map(|split| split.cut).ok_or(step)
            }
            PreTokenizerStep::Digits { each: true } => Ok(splits::DIGIT.cut),
            PreTokenizerStep::Digits { each: false } => Ok(splits::NUMBERS.cut),
            PreTokenizerStep::Punctuation { each: true } => Ok(splits::PUNCTUATION.cut),
            PreTokenizerStep::Punctuation { each: false } => Ok(splits::PUNCTUATION_RUN.cut),
            PreTokenizerStep::Gpt2 => Ok(splits::GPT2.cut),
        };
        let steps = steps.iter().map(cut).collect::<Result<_, _>>()?;
        Ok(PreTokenizer { steps, nfc, ignore_merges, add_bos: false, add_sep: false })
    }

    /// Passes the words of `text` to `emit` in order; concatenated they are `text`.
    pub fn split<'t>(&self, text: &'t str, emit: &mut dyn FnMut(&'t str)) {
        cut(&self.steps, text, emit);
    }
}

/// The recursion depth is the number of steps.
fn cut<'t>(steps: &[CutFn], text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    match steps.split_first() {
        Some((first, rest)) => first(text, &mut |part| cut(rest, part, emit)),
        None => emit(text),
    }
}

#[cfg(test)]
mod tests {
    use super::splits::Split;
    use super::*;

    use tokenizers::pre_tokenizers::split::{Split as RegexSplit, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior};

    /// Characters of every class that expressions distinguish, and those that engines often confuse.
    const ALPHABET: &str = "aZsStTrReEvVmMlLdD''''ſ    \n\n\r\t\u{b}\u{85}\u{a0}\u{3000}00112345٣²Ⅷ½éÉßǅʰªאحकाि中龥あゟ゠ー가ㄱㄅ々〇ก\
                            \u{301}\u{5b0}\u{20dd}.,!?/-_$+<|~`()«¿、。！…€😀\u{200d}\u{200b}\u{feff}\u{1}\u{7f}\u{e000}𐐀Ａ";

    /// Texts that expressions match, but random characters rarely form.
    const PIECES: [&str; 16] = [
        "<sentinel:12>",
        "<sentinel:>",
        "IMGIMGABZ",
        "IMGIMGABCDEZ",
        "IMGIMGZ",
        "don't I'LL we'Ve",
        "two words",
        "1234567",
        "123456",
        "a12b",
        "١٢٣٤",
        "                                                     ",
        "  \n  ",
        "camelCaseHTTPServer",
        "e\u{301}e\u{301}",
        "中文 中文ABC中",
    ];

    /// `n` strings of up to 23 characters and pieces.
    fn random_texts(n: usize) -> impl Iterator<Item = String> {
        let alphabet: Vec<char> = ALPHABET.chars().collect();
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize
        };
        (0..n).map(move |_| {
            let mut text = String::new();
            for _ in 0..next() % 24 {
                match PIECES.get(next() % 160) {
                    Some(piece) => text.push_str(piece),
                    None => text.push(alphabet[next() % alphabet.len()]),
                }
            }
            text
        })
    }

    /// White space of every length around the powers of two, followed by a word, a number or nothing.
    fn spaces() -> impl Iterator<Item = String> {
        (0..1100).flat_map(|n| ["", "x", "1", "\nx", "."].map(|after| format!("a{}{after}", " ".repeat(n))))
    }

    /// The words by the regex engine of the tokenizers crate.
    fn regex_words(text: &str, splits: &[RegexSplit]) -> Vec<String> {
        let mut words = PreTokenizedString::from(text);
        for split in splits {
            split.pre_tokenize(&mut words).unwrap();
        }
        let splits = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(word, ..)| word.to_owned()).filter(|word| !word.is_empty()).collect()
    }

    fn isolating(split: &Split) -> RegexSplit {
        let pattern = SplitPattern::Regex(split.expression.into());
        RegexSplit::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap()
    }

    fn words(steps: &[Split], text: &str) -> Vec<String> {
        let steps: Vec<CutFn> = steps.iter().map(|split| split.cut).collect();
        let mut words = Vec::new();
        cut(&steps, text, &mut |word| words.push(word.to_owned()));
        words.retain(|word| !word.is_empty());
        words
    }

    #[test]
    fn split_scanners_match_their_regexes() {
        let is_full = std::env::var_os("TILEWRIGHT_FULL").is_some();
        for split in splits::ALL {
            let regex = [isolating(&split)];
            for text in random_texts(if is_full { 20_000 } else { 4000 }) {
                assert_eq!(words(&[split], &text), regex_words(&text, &regex), "{} on {text:?}", split.expression);
            }
        }
        for split in [splits::JAIS2, splits::LLAMA3, splits::GPT2, splits::TABS, splits::SPACES_AT_END] {
            let regex = [isolating(&split)];
            for text in spaces() {
                assert_eq!(words(&[split], &text), regex_words(&text, &regex), "{} on {text:?}", split.expression);
            }
        }
    }

    #[test]
    fn successive_split_steps_match_chained_regexes() {
        for family in FAMILIES.iter().filter(|family| family.steps.len() > 1) {
            let regexes: Vec<RegexSplit> = family.steps.iter().map(isolating).collect();
            for text in random_texts(2000) {
                assert_eq!(words(family.steps, &text), regex_words(&text, &regexes), "{:?} on {text:?}", family.names);
            }
        }
    }

    /// Names and expressions are unique: a duplicate would never be found.
    #[test]
    fn pre_tokenizer_names_and_regexes_are_unique() {
        let mut names: Vec<&str> =
            FAMILIES.iter().flat_map(|family| family.names).chain(crate::tokenizer::raw::NAMES).copied().collect();
        let mut expressions: Vec<&str> = splits::ALL.iter().map(|split| split.expression).collect();
        for all in [&mut names, &mut expressions] {
            let n = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), n);
        }
        for family in &FAMILIES {
            assert!(family.steps.iter().all(|step| expressions.contains(&step.expression)), "{:?}", family.names);
        }
    }

    #[test]
    fn long_runs_take_linear_time() {
        let n_bytes = if std::env::var_os("TILEWRIGHT_FULL").is_some() { 100_000 } else { 20_000 };
        for run in
            [" ", "a", "A", "\n", "\u{301}", "'", "1", "中", "\t ", "a ", "<sentinel:", "IMGIMG", " \u{a0}", "1a", "."]
        {
            let text = run.repeat(n_bytes / run.len());
            for split in splits::ALL {
                let mut n_words = 0usize;
                let start = std::time::Instant::now();
                (split.cut)(&text, &mut |_| n_words += 1);
                let elapsed = start.elapsed();
                // Quadratic time would take a minute or more on the longer ones.
                assert!(n_words > 0 && elapsed.as_secs() < 5, "{}: {run:?} in {elapsed:?}", split.expression);
            }
        }
    }
}
