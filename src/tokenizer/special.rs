//! Finding tokens that stand literally in a text, before anything else looks at it.

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

use super::vocab::fault;
use crate::error::Error;

/// Finds the longest of its tokens at the leftmost place, in time linear in the text however the tokens overlap.
#[derive(Debug)]
pub(super) struct Matcher {
    automaton: Option<AhoCorasick>,
    ids: Vec<u32>,
}

/// A stretch of a text.
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

impl Matcher {
    pub fn new<'v>(tokens: impl Iterator<Item = (u32, &'v str)>) -> Result<Self, Error> {
        let (ids, texts): (Vec<u32>, Vec<&str>) = tokens.unzip();
        if ids.is_empty() {
            return Ok(Matcher { automaton: None, ids });
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            // The faster kind may take a kilobyte for each byte of the tokens.
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(&texts)
            .map_err(|error| fault("special tokens", "few and short enough to search for", error))?;
        Ok(Matcher { automaton: Some(automaton), ids })
    }

    /// `text` cut at the tokens; no fragment is empty.
    pub fn split<'t>(&self, text: &'t str) -> Vec<Fragment<'t>> {
        let mut fragments = Vec::new();
        let mut done = 0;
        for found in self.automaton.iter().flat_map(|automaton| automaton.find_iter(text)) {
            let before = text.get(done..found.start()).filter(|before| !before.is_empty());
            fragments.extend(before.map(Fragment::Text));
            fragments.extend(self.ids.get(found.pattern().as_usize()).copied().map(Fragment::Token));
            done = found.end();
        }
        fragments.extend(text.get(done..).filter(|rest| !rest.is_empty()).map(Fragment::Text));
        fragments
    }
}
