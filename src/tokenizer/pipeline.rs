//! The steps of a `tokenizer.json` before BPE over characters or Unigram: rewriting the text, finding added tokens in
//! the result, and splitting the rest into words.
//!
//! Order and corner cases match the `tokenizers` crate, with which the tests compare.

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};
use unicode_segmentation::UnicodeSegmentation;

use super::charsmap::Charsmap;
use super::special::{Fragment, Matchers};
use super::vocab::fault;
use crate::error::Error;

/// The steps in execution order.
#[derive(Debug)]
pub(super) struct TokenizerPipeline {
    pub rewrites: Vec<Rewrite>,
    /// Tokens found in rewritten text, in rewritten spelling.
    pub tokens: Matchers,
    pub cuts: Vec<Cut>,
}

/// A step of the normalizer.
#[derive(Debug)]
pub(super) enum Rewrite {
    /// Prepends a string to a non-empty text.
    Prepend(String),
    /// Replaces each occurrence of the non-empty `pattern`.
    Replace { pattern: String, content: String },
    /// Replaces each run of two or more spaces.
    ReplaceRuns { content: String },
    /// Unicode normalization form C.
    Nfc,
    /// SentencePiece's rules. Graphemes below six bytes use the shortest rule for their prefix as a whole.
    Charsmap(Charsmap),
    /// Trims white space.
    Strip { left: bool, right: bool },
}

/// A step of the pre-tokenizer.
#[derive(Debug)]
pub(super) enum Cut {
    /// Splits before each occurrence of the non-empty `pattern`, after it, or both.
    Split { pattern: String, before: bool, behind: bool },
    /// Replaces spaces with `replacement`, prepends one, and splits before each if `split` is set.
    Metaspace { replacement: char, prepend: Prepend, split: bool },
    /// Splits at white space and drops it.
    Spaces,
    /// Isolates runs of line breaks. With a word-start character, prepends it to the text between them unless
    /// present, and splits before each occurrence.
    Lines { word_start: Option<char> },
}

/// Whether to prepend a missing space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prepend {
    /// To every piece of text.
    Always,
    /// To the first piece of the text.
    First,
    Never,
}

/// Consecutive pieces of text.
#[derive(Debug, Default)]
struct WordList {
    text: String,
    /// End of each piece. Empty pieces are ignored.
    ends: Vec<usize>,
}

impl TokenizerPipeline {
    /// Appends the ids of `text`: of the tokens found in it, and those that `encode_word` appends for each word.
    /// `at_start`: whether it begins the whole text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for a text of 4 GiB or more; errors of `encode_word`.
    pub fn encode(
        &self,
        text: &str,
        at_start: bool,
        parse_special: bool,
        ids: &mut Vec<u32>,
        mut encode_word: impl FnMut(&str, &mut Vec<u32>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let text = rewrite(&self.rewrites, text);
        for (n, fragment) in self.tokens.select(parse_special).split(&text).into_iter().enumerate() {
            let piece = match fragment {
                Fragment::Text(piece) => piece,
                Fragment::Token(id) => {
                    ids.push(id);
                    continue;
                }
            };
            let mut words = WordList { text: piece.to_owned(), ends: vec![piece.len()] };
            for cut in &self.cuts {
                words = cut.apply(&words, at_start && n == 0);
            }
            if u32::try_from(words.text.len()).is_err() {
                return Err(fault("text", "less than 4 GiB", format!("{} bytes", words.text.len())));
            }
            for word in words.iter() {
                encode_word(word, ids)?;
            }
        }
        Ok(())
    }
}

/// `text` after all steps.
pub(super) fn rewrite(steps: &[Rewrite], text: &str) -> String {
    let mut text = text.to_owned();
    for step in steps {
        match step {
            Rewrite::Prepend(prefix) if !text.is_empty() => text.insert_str(0, prefix),
            Rewrite::Prepend(_) => {}
            Rewrite::Replace { pattern, content } => text = text.replace(pattern, content),
            Rewrite::Nfc if is_nfc_quick(text.chars()) != IsNormalized::Yes => text = text.nfc().collect(),
            Rewrite::Nfc => {}
            Rewrite::ReplaceRuns { content } => text = replace_runs(&text, content),
            Rewrite::Charsmap(charsmap) => text = by_rules(charsmap, &text),
            Rewrite::Strip { left, right } => {
                let stripped = if *right { text.trim_end() } else { &text };
                text = if *left { stripped.trim_start() } else { stripped }.to_owned();
            }
        }
    }
    text
}

fn replace_runs(text: &str, content: &str) -> String {
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("  ") {
        replaced.push_str(&rest[..at]);
        replaced.push_str(content);
        rest = rest[at..].trim_start_matches(' ');
    }
    replaced + rest
}

fn by_rules(charsmap: &Charsmap, text: &str) -> String {
    /// Shorter graphemes match rules as a whole.
    const LONG: usize = 6;
    let rule = |part: &str| charsmap.starts(part.as_bytes()).next().map(|(_, text)| text);
    let mut normalised = String::with_capacity(text.len());
    for grapheme in text.graphemes(true) {
        if let Some(other) = rule(grapheme).filter(|_| grapheme.len() < LONG) {
            normalised.push_str(other);
            continue;
        }
        for c in grapheme.chars() {
            match rule(c.encode_utf8(&mut [0; 4])) {
                Some(other) => normalised.push_str(other),
                None => normalised.push(c),
            }
        }
    }
    normalised
}

impl WordList {
    fn iter(&self) -> impl Iterator<Item = &str> {
        let mut start = 0;
        let words = self.ends.iter().map(move |&end| self.text.get(std::mem::replace(&mut start, end)..end));
        words.flatten().filter(|word| !word.is_empty())
    }

    /// Ends a word here.
    fn cut(&mut self) {
        self.ends.push(self.text.len());
    }
}

impl Cut {
    fn apply(&self, words: &WordList, at_start: bool) -> WordList {
        let mut cut = WordList { text: String::with_capacity(words.text.len()), ends: Vec::new() };
        for (n, word) in words.iter().enumerate() {
            match self {
                Cut::Spaces => {
                    for part in word.split_whitespace() {
                        cut.text.push_str(part);
                        cut.cut();
                    }
                }
                Cut::Lines { word_start } => {
                    let mut rest = word;
                    while let Some(first) = rest.chars().next() {
                        let end = rest.find(|c| (c == '\n') != (first == '\n')).unwrap_or(rest.len());
                        let (part, after) = rest.split_at_checked(end).unwrap_or((rest, ""));
                        match word_start.filter(|_| first != '\n') {
                            Some(start) => {
                                for (at, text) in part.strip_prefix(start).unwrap_or(part).split(start).enumerate() {
                                    if at > 0 {
                                        cut.cut();
                                    }
                                    cut.text.push(start);
                                    cut.text.push_str(text);
                                }
                            }
                            None => cut.text.push_str(part),
                        }
                        cut.cut();
                        rest = after;
                    }
                }
                Cut::Split { pattern, before, behind } => {
                    let mut done = 0;
                    for (at, found) in word.match_indices(pattern.as_str()) {
                        cut.text.push_str(word.get(done..at).unwrap_or(""));
                        if *before {
                            cut.cut();
                        }
                        cut.text.push_str(found);
                        if *behind {
                            cut.cut();
                        }
                        done = at + found.len();
                    }
                    cut.text.push_str(word.get(done..).unwrap_or(""));
                }
                &Cut::Metaspace { replacement, prepend, split } => {
                    let wanted = prepend == Prepend::Always || (prepend == Prepend::First && at_start && n == 0);
                    if wanted && !word.starts_with([' ', replacement]) {
                        cut.text.push(replacement);
                    }
                    for c in word.chars().map(|c| if c == ' ' { replacement } else { c }) {
                        if split && c == replacement {
                            cut.cut();
                        }
                        cut.text.push(c);
                    }
                }
            }
            cut.cut();
        }
        cut
    }
}
