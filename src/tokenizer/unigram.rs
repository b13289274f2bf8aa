//! SentencePiece's Unigram: splits a text into the tokens with the highest total score.
//!
//! Kudo 2018, arXiv:1804.10959. Text is first normalised by the vocabulary's rules for characters and spaces.
//! Characters without a token become the unknown token, one per run of such characters.

use super::charsmap::Charsmap;
use super::pipeline::TokenizerPipeline;
use super::spm::ESCAPED_SPACE;
use super::vocab::{TokenType, Vocab, fault, shown};
use crate::error::Error;

/// Distance of an unknown character's score below the lowest token's.
const UNKNOWN_PENALTY: f64 = 10.0;

/// An encoder for `tokenizer.ggml.model = t5`, and for Unigram in a `tokenizer.json`.
#[derive(Debug)]
pub(super) struct Unigram {
    preparation: Preparation,
    model: UnigramModel,
}

/// Text preparation before the model.
#[derive(Debug)]
enum Preparation {
    /// SentencePiece's own steps; the model receives the whole text.
    Normalizer(Normalizer),
    /// The steps of a `tokenizer.json`; the model receives words.
    Pipeline(Box<TokenizerPipeline>),
}

#[derive(Debug)]
struct Normalizer {
    charsmap: Charsmap,
    add_space_prefix: bool,
    remove_extra_spaces: bool,
}

/// Tokens with their scores.
#[derive(Debug)]
pub(super) struct UnigramModel {
    trie: Trie,
    /// Ids and scores of the tokens that text can become, in the trie's order.
    tokens: Vec<(u32, f64)>,
    unknown_score: f64,
    unk_id: Option<u32>,
    /// Byte tokens, used before the unknown token.
    byte_ids: Option<Box<[u32; 256]>>,
}

/// The best segmentation up to a position.
#[derive(Clone, Copy)]
struct Segmentation {
    score: f64,
    /// Start of its last token.
    from: u32,
    /// That token's number; `None` for an unknown character.
    token: Option<u32>,
}

impl Unigram {
    pub fn new(vocab: &Vocab) -> Result<Self, Error> {
        if vocab.scores.len() != vocab.tokens.len() {
            let expected = format!("one per token, {}", vocab.tokens.len());
            return Err(fault("scores", expected, vocab.scores.len()));
        }
        let scored = || vocab.iter().map(|(id, text, kind)| (text, id, f64::from(vocab.scores[id as usize]), kind));
        let is_text = |kind| matches!(kind, TokenType::Normal | TokenType::UserDefined | TokenType::Unused);
        let tokens = scored().filter(|token| is_text(token.3)).map(|(text, id, score, _)| (text, id, score)).collect();
        let normal = scored().filter(|token| token.3 == TokenType::Normal).map(|token| token.2);
        let lowest = normal.reduce(f64::min).ok_or_else(|| fault("tokens", "normal tokens", "none"))?;
        Ok(Unigram {
            preparation: Preparation::Normalizer(Normalizer {
                charsmap: Charsmap::new("charsmap", &vocab.charsmap)?,
                add_space_prefix: vocab.add_space_prefix.unwrap_or(true),
                remove_extra_spaces: vocab.remove_extra_spaces.unwrap_or(false),
            }),
            model: UnigramModel::new(tokens, lowest, vocab.unk_id, None),
        })
    }

    /// A model for a pipeline's words.
    pub fn of_words(pipeline: TokenizerPipeline, model: UnigramModel) -> Self {
        Unigram { preparation: Preparation::Pipeline(Box::new(pipeline)), model }
    }

    /// Appends the ids of `text`. `at_start`: whether it begins the whole text.
    pub fn encode(&self, text: &str, at_start: bool, parse_special: bool, ids: &mut Vec<u32>) -> Result<(), Error> {
        match &self.preparation {
            Preparation::Normalizer(normalizer) => {
                let text = normalizer.apply(text);
                if u32::try_from(text.len()).is_err() {
                    return Err(fault("text", "less than 4 GiB", format!("{} bytes", text.len())));
                }
                self.model.encode(&text, ids)
            }
            Preparation::Pipeline(pipeline) => {
                pipeline.encode(text, at_start, parse_special, ids, |word, ids| self.model.encode(word, ids))
            }
        }
    }
}

impl UnigramModel {
    /// `tokens` are those that text can become: distinct texts, ids and scores; `lowest` is the lowest score of all.
    pub fn new(
        mut tokens: Vec<(&str, u32, f64)>,
        lowest: f64,
        unk_id: Option<u32>,
        byte_ids: Option<Box<[u32; 256]>>,
    ) -> Self {
        crate::sort::by(&mut tokens, |a, b| a.0.cmp(b.0));
        let texts: Vec<&str> = tokens.iter().map(|token| token.0).collect();
        UnigramModel {
            trie: Trie::new(&texts),
            tokens: tokens.iter().map(|&(_, id, score)| (id, score)).collect(),
            unknown_score: lowest - UNKNOWN_PENALTY,
            unk_id,
            byte_ids,
        }
    }

    /// Appends the ids of `text`, which is below 4 GiB.
    fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
        let mut ways: Vec<Option<Segmentation>> = vec![None; text.len() + 1];
        let take = |ways: &mut [Option<Segmentation>], end: usize, way: Segmentation| {
            // The first of equal scores, as in SentencePiece.
            if ways[end].is_none_or(|best| way.score > best.score) {
                ways[end] = Some(way);
            }
        };
        for (at, c) in text.char_indices() {
            let (before, from) = (ways[at].map_or(0.0, |way| way.score), at as u32);
            let mut is_token = false;
            for (len, token) in self.trie.starts(&text.as_bytes()[at..]) {
                is_token |= len == c.len_utf8();
                let score = before + self.tokens[token as usize].1;
                take(&mut ways, at + len, Segmentation { score, from, token: Some(token) });
            }
            if !is_token {
                let score = before + self.unknown_score;
                take(&mut ways, at + c.len_utf8(), Segmentation { score, from, token: None });
            }
        }

        let mut found = Vec::new();
        let mut at = text.len();
        while let Some(way) = ways[at] {
            found.push((way, at));
            at = way.from as usize;
        }
        let mut after_unknown = false;
        for (way, end) in found.into_iter().rev() {
            match (way.token, &self.byte_ids, self.unk_id) {
                (Some(token), ..) => ids.push(self.tokens[token as usize].0),
                (None, Some(byte_ids), _) => {
                    ids.extend(text[way.from as usize..end].bytes().map(|byte| byte_ids[usize::from(byte)]));
                }
                (None, None, Some(_)) if after_unknown => {}
                (None, None, Some(unk_id)) => ids.push(unk_id),
                (None, None, None) => {
                    let expected = "characters with a token, or an unknown token";
                    return Err(fault("text", expected, shown(&text[way.from as usize..])));
                }
            }
            after_unknown = way.token.is_none();
        }
        Ok(())
    }
}

impl Normalizer {
    /// Applies the vocabulary's rules, and writes spaces as in tokens.
    fn apply(&self, text: &str) -> String {
        let mut normalised = String::with_capacity(text.len() + ESCAPED_SPACE.len_utf8());
        // Whether a space is pending.
        let mut is_due = self.add_space_prefix;
        let mut put = |c: char| {
            if c == ' ' && self.remove_extra_spaces {
                is_due |= !normalised.is_empty();
                return;
            }
            if is_due {
                normalised.push(ESCAPED_SPACE);
                is_due = false;
            }
            normalised.push(if c == ' ' { ESCAPED_SPACE } else { c });
        };
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let len = match self.charsmap.starts(rest.as_bytes()).last() {
                Some((len, other)) => {
                    other.chars().for_each(&mut put);
                    len
                }
                None => {
                    put(c);
                    c.len_utf8()
                }
            };
            // A rule that ends inside a character consumes all of it.
            rest = (len..).find_map(|len| rest.get(len.min(rest.len())..)).unwrap_or("");
        }
        if self.remove_extra_spaces {
            // Literal ones as well.
            normalised.truncate(normalised.trim_end_matches(ESCAPED_SPACE).len());
        }
        normalised
    }
}

/// Tokens by their bytes, nodes in breadth-first order: the children of a node are adjacent, sorted by byte.
#[derive(Debug)]
struct Trie {
    /// The byte leading to each node, and the token that ends there.
    nodes: Vec<(u8, Option<u32>)>,
    /// Start of each node's children; they end where the next node's begin.
    children: Vec<u32>,
}

impl Trie {
    /// A token's number is its index in `texts`, which are sorted and distinct.
    fn new(texts: &[&str]) -> Trie {
        let byte = |token: usize, depth: usize| texts[token].as_bytes()[depth];
        let (mut nodes, mut children) = (vec![(0, None)], Vec::new());
        // Tokens with each node's prefix, and the prefix's length, by node number.
        let mut tokens = vec![(0..texts.len(), 0)];
        let mut node = 0;
        while let Some((range, depth)) = tokens.get(node).cloned() {
            children.push(nodes.len() as u32);
            let mut first = range.start;
            if first < range.end && texts[first].len() == depth {
                nodes[node].1 = Some(first as u32);
                first += 1;
            }
            while first < range.end {
                let next = byte(first, depth);
                let end = first + (first..range.end).take_while(|&token| byte(token, depth) == next).count();
                nodes.push((next, None));
                tokens.push((first..end, depth + 1));
                first = end;
            }
            node += 1;
        }
        children.push(nodes.len() as u32);
        Trie { nodes, children }
    }

    /// The tokens that are prefixes of `text`, shortest first: length in bytes, and number.
    fn starts(&self, text: &[u8]) -> impl Iterator<Item = (usize, u32)> {
        let mut node = 0;
        let found = text.iter().enumerate().map_while(move |(at, byte)| {
            let first = self.children[node] as usize;
            let children = &self.nodes[first..self.children[node + 1] as usize];
            node = first + children.binary_search_by_key(byte, |child| child.0).ok()?;
            Some(self.nodes[node].1.map(|token| (at + 1, token)))
        });
        found.flatten()
    }
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::{PairTemplate, TokenType, Tokenizer, Vocab};

    #[test]
    fn pair_encoding_follows_xlm_roberta() {
        use TokenType::{Control, Normal, Unknown};
        let vocab = Vocab {
            model: "t5".into(),
            tokens: ["<s>", "<pad>", "</s>", "<unk>", "\u{2581}a"].map(String::from).to_vec(),
            scores: vec![0.0; 5],
            token_types: vec![Control, Control, Control, Unknown, Normal],
            bos_id: Some(0),
            eos_id: Some(2),
            sep_id: Some(2),
            add_bos: Some(true),
            add_eos: Some(true),
            ..Vocab::default()
        };
        let found = Tokenizer::from_vocab(vocab).expect("a whole vocabulary").pair_template().expect("room for two");
        // <s> A </s></s> B </s>
        assert_eq!(found, PairTemplate { prefix: vec![0], middle: vec![2, 2], suffix: vec![2], second_type: 0 });
    }
}
