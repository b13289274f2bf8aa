//! Splitting text into words before byte-level BPE, by hand-written scanners.
//!
//! Vocabularies describe the split by regular expressions, one after the other. A backtracking engine takes quadratic time
//! or gives up on long runs, and engines differ between platforms, so each expression in use is a scanner here: linear
//! time, the same words everywhere. [`splits`] has the expressions with their scanners, [`names`] has what GGUF calls them.
//! The tests run the expressions through a regex engine for comparison.

mod classes;
mod names;
mod numbers;
mod splits;
mod words;

use names::{FAMILIES, Family};
use splits::Cut;

use crate::error::Error;

/// How one family of vocabularies prepares text. GGUF names it in `tokenizer.ggml.pre`.
#[derive(Debug, Clone)]
pub(super) struct PreTokenizer {
    /// Each is done to all pieces of the one before.
    steps: Vec<Cut>,
    /// Text is brought to Unicode's composed form first.
    pub nfc: bool,
    /// A word that is a token is that token, whatever the merges say.
    pub ignore_merges: bool,
    /// What `add_bos_token` means where the file is silent.
    pub add_bos: bool,
    /// What `add_sep_token` means where the file is silent.
    pub add_sep: bool,
}

/// A step of a `tokenizer.json`.
pub(super) enum Step<'j> {
    /// Isolates the matches of a regular expression.
    Regex(&'j str),
    /// Isolates digits, each alone or a number as a whole.
    Digits { each: bool },
    /// Isolates punctuation, each character alone or runs of it.
    Punctuation { each: bool },
    /// GPT-2's expression, which `ByteLevel` has built in.
    Gpt2,
}

impl PreTokenizer {
    /// The pre-tokenizer that `tokenizer.ggml.pre` names.
    ///
    /// # Errors
    /// [`Error::Unsupported`], listing the known names: a wrong split gives other tokens without any sign of it.
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

    /// The pre-tokenizer of a `tokenizer.json`. The step that is not known here is the error.
    pub fn by_steps<'s, 'j>(steps: &'s [Step<'j>], nfc: bool, ignore_merges: bool) -> Result<Self, &'s Step<'j>> {
        let cut = |step: &'s Step<'j>| match step {
            Step::Regex(expression) => {
                splits::ALL.iter().find(|split| split.expression == *expression).map(|split| split.cut).ok_or(step)
            }
            Step::Digits { each: true } => Ok(splits::DIGIT.cut),
            Step::Digits { each: false } => Ok(splits::NUMBERS.cut),
            Step::Punctuation { each: true } => Ok(splits::PUNCTUATION.cut),
            Step::Punctuation { each: false } => Ok(splits::PUNCTUATION_RUN.cut),
            Step::Gpt2 => Ok(splits::GPT2.cut),
        };
        let steps = steps.iter().map(cut).collect::<Result<_, _>>()?;
        Ok(PreTokenizer { steps, nfc, ignore_merges, add_bos: false, add_sep: false })
    }

    /// Hands the words of `text` to `emit`, in order; together they are the text.
    pub fn split<'t>(&self, text: &'t str, emit: &mut dyn FnMut(&'t str)) {
        cut(&self.steps, text, emit);
    }
}

/// Depth is the number of steps.
fn cut<'t>(steps: &[Cut], text: &'t str, emit: &mut dyn FnMut(&'t str)) {
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

    /// Characters of every class that an expression tells apart, and of those that engines are prone to confuse.
    const ALPHABET: &str = "aZsStTrReEvVmMlLdD''''ſ    \n\n\r\t\u{b}\u{85}\u{a0}\u{3000}00112345٣²Ⅷ½éÉßǅʰªאحकाि中龥あゟ゠ー가ㄱㄅ々〇ก\
                            \u{301}\u{5b0}\u{20dd}.,!?/-_$+<|~`()«¿、。！…€😀\u{200d}\u{200b}\u{feff}\u{1}\u{7f}\u{e000}𐐀Ａ";

    /// What expressions look for that random characters seldom make.
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

    /// White space of every length around the powers of two, with a word, a number or nothing behind.
    fn spaces() -> impl Iterator<Item = String> {
        (0..1100).flat_map(|n| ["", "x", "1", "\nx", "."].map(|after| format!("a{}{after}", " ".repeat(n))))
    }

    /// The words that the regex engine of the tokenizers crate finds.
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
        let steps: Vec<Cut> = steps.iter().map(|split| split.cut).collect();
        let mut words = Vec::new();
        cut(&steps, text, &mut |word| words.push(word.to_owned()));
        words.retain(|word| !word.is_empty());
        words
    }

    #[test]
    fn scanners_match_their_expressions() {
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
    fn steps_follow_each_other() {
        for family in FAMILIES.iter().filter(|family| family.steps.len() > 1) {
            let regexes: Vec<RegexSplit> = family.steps.iter().map(isolating).collect();
            for text in random_texts(2000) {
                assert_eq!(words(family.steps, &text), regex_words(&text, &regexes), "{:?} on {text:?}", family.names);
            }
        }
    }

    /// Every name once, and no expression twice: the second would never be found.
    #[test]
    fn names_and_expressions_differ() {
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
                // Quadratic time would be a minute and more for the longer ones.
                assert!(n_words > 0 && elapsed.as_secs() < 5, "{}: {run:?} in {elapsed:?}", split.expression);
            }
        }
    }
}
