//! Finds literal tokens in a text before any other step.

use std::ops::Range;

use std::sync::Arc;

use aho_corasick::automaton::Automaton;
use aho_corasick::nfa::contiguous::NFA;
use aho_corasick::{BuildError, Input, Match, MatchKind};
use unicode_properties::{GeneralCategory as Category, GeneralCategoryGroup as Group, UnicodeGeneralCategory};

use super::vocab::{TokenType, Vocab, fault};
use crate::error::Error;

/// Finds the leftmost-longest of several texts, in time linear in the searched text even with overlaps. Of the
/// suitable automata, this one is also linear in the size of the texts; a full byte table may need a kilobyte per
/// byte of them.
#[derive(Debug, Clone)]
pub(crate) struct Search(Arc<NFA>);

impl Search {
    /// Searches for these texts.
    pub fn new(texts: &[&str]) -> Result<Search, BuildError> {
        NFA::builder().match_kind(MatchKind::LeftmostLongest).build(texts).map(|automaton| Search(Arc::new(automaton)))
    }

    /// Matches from left to right.
    pub fn find_iter<'s>(&'s self, text: &'s str) -> impl Iterator<Item = Match> + 's {
        // The only errors are unsupported modes, such as overlapping matches.
        self.0.try_find_iter(Input::new(text)).into_iter().flatten()
    }
}

/// Finds its tokens in texts.
#[derive(Debug, Clone)]
pub(super) struct Matcher {
    search: Option<Search>,
    tokens: Vec<(u32, SpecialRule)>,
    /// Whether names of special tokens become those tokens. Otherwise they stay text, as do tokens that overlap them.
    parse_special: bool,
}

/// When a literal token is recognised, and the white space it absorbs.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SpecialRule {
    /// A special token: recognised only when parsing special tokens.
    pub special: bool,
    /// Only without an adjacent letter, digit or underscore.
    pub single_word: bool,
    /// Absorbs the white space before it.
    pub lstrip: bool,
    /// Absorbs the white space after it.
    pub rstrip: bool,
}

/// A part of a text.
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

impl Matcher {
    /// A matcher that parses special tokens.
    pub fn new<'v>(tokens: impl Iterator<Item = (u32, &'v str, SpecialRule)>) -> Result<Self, Error> {
        let (tokens, texts): (Vec<(u32, SpecialRule)>, Vec<&str>) =
            tokens.map(|(id, text, rule)| ((id, rule), text)).unzip();
        if tokens.is_empty() {
            return Ok(Matcher { search: None, tokens, parse_special: true });
        }
        let search = Search::new(&texts);
        let search = search.map_err(|error| fault("special tokens", "few and short enough to search", error))?;
        Ok(Matcher { search: Some(search), tokens, parse_special: true })
    }

    /// Splits `text` at the tokens; no fragment is empty.
    pub fn split<'t>(&self, text: &'t str) -> Vec<Fragment<'t>> {
        let mut fragments = Vec::new();
        let mut done = 0;
        // White space already scanned: tokens may be spaces themselves, and each would scan all that follow.
        let mut spaces: Range<usize> = 0..0;
        for found in self.search.iter().flat_map(|search| search.find_iter(text)) {
            let Some(&(id, rule)) = self.tokens.get(found.pattern().as_usize()) else { continue };
            if rule.special && !self.parse_special || rule.single_word && !is_single_word(text, found.range()) {
                continue;
            }
            let before = text.get(done..found.start()).unwrap_or("");
            let before = if rule.lstrip { before.trim_end() } else { before };
            if !before.is_empty() {
                fragments.push(Fragment::Text(before));
            }
            fragments.push(Fragment::Token(id));
            done = found.end();
            if rule.rstrip {
                if !spaces.contains(&done) {
                    let rest = text.get(done..).unwrap_or("");
                    spaces = done..done + rest.len() - rest.trim_start().len();
                }
                done = spaces.end;
            }
        }
        fragments.extend(text.get(done..).filter(|rest| !rest.is_empty()).map(Fragment::Text));
        fragments
    }
}

/// The two ways to find tokens in a text.
#[derive(Debug)]
pub(super) struct Matchers {
    plain: Matcher,
    parsing: Matcher,
}

impl Matchers {
    /// User-defined tokens, recognised in every text; when parsing, special tokens as well.
    pub fn by_kind(vocab: &Vocab) -> Result<Self, Error> {
        let rule = |token: &str| SpecialRule {
            rstrip: vocab.special_strips_right && !["<unk>", "<s>", "<|endoftext|>"].contains(&token),
            ..SpecialRule::default()
        };
        let of_kind = |wanted: fn(TokenType) -> bool| {
            let tokens = vocab.iter().filter(|token| wanted(token.2));
            Matcher::new(tokens.map(|(id, token, _)| (id, token, rule(token))))
        };
        Ok(Matchers {
            plain: of_kind(|kind| kind == TokenType::UserDefined)?,
            parsing: of_kind(|kind| kind == TokenType::UserDefined || kind.is_special())?,
        })
    }

    /// The added tokens of a `tokenizer.json`.
    pub fn by_rule<'v>(tokens: impl Iterator<Item = (u32, &'v str, SpecialRule)>) -> Result<Self, Error> {
        let parsing = Matcher::new(tokens)?;
        Ok(Matchers { plain: Matcher { parse_special: false, ..parsing.clone() }, parsing })
    }

    pub fn select(&self, parse_special: bool) -> &Matcher {
        if parse_special { &self.parsing } else { &self.plain }
    }
}

fn is_single_word(text: &str, range: Range<usize>) -> bool {
    let before = text.get(..range.start).and_then(|before| before.chars().next_back());
    let after = text.get(range.end..).and_then(|after| after.chars().next());
    !before.is_some_and(is_word) && !after.is_some_and(is_word)
}

/// `\w` as in Unicode Technical Standard 18.
pub(super) fn is_word(c: char) -> bool {
    let joins = || matches!(c, '\u{200C}' | '\u{200D}') || c.general_category_group() == Group::Mark;
    let category = || matches!(c.general_category(), Category::DecimalNumber | Category::ConnectorPunctuation);
    c.is_alphabetic() || category() || joins()
}
