//! What a `tokenizer.json` has done to a text before BPE over characters: rewriting it, finding added tokens in what
//! that gives, and cutting the rest into words.
//!
//! The order and the corner cases are those of the `tokenizers` crate, which the tests compare with.

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::special::{Fragment, Matchers};
use super::vocab::fault;
use crate::error::Error;

/// The steps, in the order in which they run.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub rewrites: Vec<Rewrite>,
    /// Tokens that are found in rewritten text, spelled as the rewriting leaves them.
    pub tokens: Matchers,
    pub cuts: Vec<Cut>,
}

/// A step of the normalizer.
#[derive(Debug)]
pub(super) enum Rewrite {
    /// Puts a text in front of one that is not empty.
    Prepend(String),
    /// Replaces each occurrence of `pattern`, which is not empty.
    Replace { pattern: String, content: String },
    /// Unicode's composed form.
    Nfc,
}

/// A step of the pre-tokenizer.
#[derive(Debug)]
pub(super) enum Cut {
    /// Cuts before each occurrence of `pattern`, which is not empty, behind it, or both.
    Split { pattern: String, before: bool, behind: bool },
    /// Writes spaces as `replacement`, puts one in front, and cuts before each if `split` is set.
    Metaspace { replacement: char, prepend: Prepend, split: bool },
}

/// Where a space is put that is not there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prepend {
    /// In front of every piece of text.
    Always,
    /// In front of the piece that begins the text.
    First,
    Never,
}

/// Pieces of text, one behind the other.
#[derive(Debug, Default)]
struct Words {
    text: String,
    /// Where each ends. One that is empty counts for nothing.
    ends: Vec<usize>,
}

impl Pipeline {
    /// Hands the words and tokens of `text` to `emit`, in order. `at_start` says that it begins the whole text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for a text beyond 4 GiB, and what `emit` returns.
    pub fn split(
        &self,
        text: &str,
        at_start: bool,
        parse_special: bool,
        emit: &mut dyn FnMut(Fragment) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let text = rewrite(&self.rewrites, text);
        for (n, fragment) in self.tokens.select(parse_special).split(&text).into_iter().enumerate() {
            let Fragment::Text(piece) = fragment else {
                emit(fragment)?;
                continue;
            };
            let mut words = Words { text: piece.to_owned(), ends: vec![piece.len()] };
            for cut in &self.cuts {
                words = cut.apply(&words, at_start && n == 0);
            }
            if u32::try_from(words.text.len()).is_err() {
                return Err(fault("text", "less than 4 GiB", format!("{} bytes", words.text.len())));
            }
            for word in words.iter() {
                emit(Fragment::Text(word))?;
            }
        }
        Ok(())
    }
}

/// `text` after all of the steps.
pub(super) fn rewrite(steps: &[Rewrite], text: &str) -> String {
    let mut text = text.to_owned();
    for step in steps {
        match step {
            Rewrite::Prepend(prefix) if !text.is_empty() => text.insert_str(0, prefix),
            Rewrite::Prepend(_) => {}
            Rewrite::Replace { pattern, content } => text = text.replace(pattern, content),
            Rewrite::Nfc if is_nfc_quick(text.chars()) != IsNormalized::Yes => text = text.nfc().collect(),
            Rewrite::Nfc => {}
        }
    }
    text
}

impl Words {
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
    fn apply(&self, words: &Words, at_start: bool) -> Words {
        let mut cut = Words { text: String::with_capacity(words.text.len()), ends: Vec::new() };
        for (n, word) in words.iter().enumerate() {
            match self {
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
