//! SentencePiece's Unigram: of all ways to cut a text into tokens, the one whose scores have the highest sum.
//!
//! Kudo 2018, arXiv:1804.10959. Text is normalised first, by rules that come with the vocabulary: which characters become
//! which others, and what happens to spaces. A character that is in no token becomes the unknown token, one for a run of
//! such characters.

use super::spm::ESCAPED_SPACE;
use super::vocab::{TokenType, Vocab, fault, shown};
use crate::error::Error;

/// How far below the lowest score of a token that of an unknown character lies.
const UNKNOWN_PENALTY: f64 = 10.0;

/// An encoder for `tokenizer.ggml.model = t5`.
#[derive(Debug)]
pub(super) struct Unigram {
    charsmap: Charsmap,
    trie: Trie,
    /// Ids and scores of the tokens that text may become, as the trie numbers them.
    tokens: Vec<(u32, f64)>,
    unknown_score: f64,
    unk_id: Option<u32>,
    add_space_prefix: bool,
    remove_extra_spaces: bool,
}

/// The best way to a place in a text.
#[derive(Clone, Copy)]
struct Way {
    score: f64,
    /// Where its last token begins.
    from: u32,
    /// That token's number; none for an unknown character.
    token: Option<u32>,
}

impl Unigram {
    pub fn new(vocab: &Vocab) -> Result<Self, Error> {
        if vocab.scores.len() != vocab.tokens.len() {
            let expected = format!("one per token, {}", vocab.tokens.len());
            return Err(fault("scores", expected, vocab.scores.len()));
        }
        let is_text = |kind| matches!(kind, TokenType::Normal | TokenType::UserDefined | TokenType::Unused);
        let mut texts: Vec<(&str, u32)> =
            vocab.iter().filter(|token| is_text(token.2)).map(|(id, token, _)| (token, id)).collect();
        texts.sort_unstable();
        let score = |id: u32| f64::from(vocab.scores[id as usize]);
        let tokens: Vec<(u32, f64)> = texts.iter().map(|&(_, id)| (id, score(id))).collect();
        let normal = vocab.iter().filter(|token| token.2 == TokenType::Normal).map(|token| score(token.0));
        let lowest = normal.reduce(f64::min).ok_or_else(|| fault("tokens", "normal tokens", "none"))?;
        Ok(Unigram {
            charsmap: Charsmap::new(&vocab.charsmap)?,
            trie: Trie::new(&texts),
            tokens,
            unknown_score: lowest - UNKNOWN_PENALTY,
            unk_id: vocab.unk_id,
            add_space_prefix: vocab.add_space_prefix.unwrap_or(true),
            remove_extra_spaces: vocab.remove_extra_spaces.unwrap_or(false),
        })
    }

    /// Appends the ids of `text`.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), Error> {
        let text = self.normalised(text);
        if u32::try_from(text.len()).is_err() {
            return Err(fault("text", "less than 4 GiB", format!("{} bytes", text.len())));
        }
        let mut ways: Vec<Option<Way>> = vec![None; text.len() + 1];
        let take = |ways: &mut [Option<Way>], end: usize, way: Way| {
            // The first of two that are as good, as in SentencePiece.
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
                take(&mut ways, at + len, Way { score, from, token: Some(token) });
            }
            if !is_token {
                let score = before + self.unknown_score;
                take(&mut ways, at + c.len_utf8(), Way { score, from, token: None });
            }
        }

        let mut found = Vec::new();
        let mut at = text.len();
        while let Some(way) = ways[at] {
            found.push(way);
            at = way.from as usize;
        }
        let mut after_unknown = false;
        for way in found.into_iter().rev() {
            match (way.token, self.unk_id) {
                (Some(token), _) => ids.push(self.tokens[token as usize].0),
                (None, Some(_)) if after_unknown => {}
                (None, Some(unk_id)) => ids.push(unk_id),
                (None, None) => {
                    let expected = "characters that tokens or an unknown token cover";
                    return Err(fault("text", expected, shown(&text[way.from as usize..])));
                }
            }
            after_unknown = way.token.is_none();
        }
        Ok(())
    }

    /// The text by the rules of the vocabulary, spaces written as tokens have them.
    fn normalised(&self, text: &str) -> String {
        let mut normalised = String::with_capacity(text.len() + ESCAPED_SPACE.len_utf8());
        // Whether a space is still to be written.
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
            let len = match self.charsmap.longest(rest.as_bytes()) {
                Some((len, other)) => {
                    other.chars().for_each(&mut put);
                    len
                }
                None => {
                    put(c);
                    c.len_utf8()
                }
            };
            // Rules that end amid a character take all of it.
            rest = (len..).find_map(|len| rest.get(len.min(rest.len())..)).unwrap_or("");
        }
        if self.remove_extra_spaces {
            // Those that a text spells out, too.
            normalised.truncate(normalised.trim_end_matches(ESCAPED_SPACE).len());
        }
        normalised
    }
}

/// Tokens by their bytes. Nodes come in the order of their distance from the root, so that those behind one node lie side
/// by side, ordered by their bytes.
#[derive(Debug)]
struct Trie {
    /// The byte that leads to a node, and the token that ends there.
    nodes: Vec<(u8, Option<u32>)>,
    /// Where the nodes behind a node begin; they end where those of the next one begin.
    children: Vec<u32>,
}

impl Trie {
    /// A token's number is its place in `texts`, which are sorted and distinct.
    fn new(texts: &[(&str, u32)]) -> Trie {
        let byte = |token: usize, depth: usize| texts[token].0.as_bytes()[depth];
        let (mut nodes, mut children) = (vec![(0, None)], Vec::new());
        // Tokens whose texts lead to a node, by the nodes' numbers, and how long those starts are.
        let mut tokens = vec![(0..texts.len(), 0)];
        let mut node = 0;
        while let Some((range, depth)) = tokens.get(node).cloned() {
            children.push(nodes.len() as u32);
            let mut first = range.start;
            if first < range.end && texts[first].0.len() == depth {
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

    /// The tokens that `text` begins with, the shortest first: length in bytes, and number.
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

/// What starts of a text are replaced with: a `precompiled_charsmap` of SentencePiece, which is the number of bytes of a
/// double-array trie (Aoe 1989) as Darts-clone lays it out, the trie, and the texts in its place, each ended by a zero.
#[derive(Debug)]
struct Charsmap {
    units: Vec<u32>,
    texts: String,
}

/// Marks a unit that holds a value.
const VALUE: u32 = 1 << 31;

impl Charsmap {
    fn new(bytes: &[u8]) -> Result<Charsmap, Error> {
        let Some((size, rest)) = bytes.split_first_chunk() else {
            return match bytes {
                [] => Ok(Charsmap { units: Vec::new(), texts: String::new() }),
                _ => Err(fault("charsmap", "at least 4 bytes", bytes.len())),
            };
        };
        let size = u32::from_le_bytes(*size) as usize;
        let (trie, texts) = rest.split_at_checked(size).filter(|_| size.is_multiple_of(4)).ok_or_else(|| {
            fault("charsmap", format!("a multiple of 4 up to {}, the size of a trie", rest.len()), size)
        })?;
        let texts = String::from_utf8(texts.to_vec()).map_err(|error| fault("charsmap", "texts in UTF-8", error))?;
        let units: Vec<u32> = trie.as_chunks().0.iter().map(|&unit| u32::from_le_bytes(unit)).collect();
        let values = units.iter().filter(|unit| *unit & VALUE != 0).map(|unit| unit & !VALUE);
        for at in values {
            if !texts.get(at as usize..).is_some_and(|text| text.contains('\0')) {
                return Err(fault("charsmap", "places of texts that end", at));
            }
        }
        Ok(Charsmap { units, texts })
    }

    /// The length of the longest start of `text` that has a rule, and what stands in its place.
    fn longest(&self, text: &[u8]) -> Option<(usize, &str)> {
        let behind = |unit: u32| ((unit >> 10) << ((unit & 1 << 9) >> 6)) as usize;
        let mut node = behind(*self.units.first()?);
        let mut found = None;
        for (i, &byte) in text.iter().enumerate() {
            node ^= usize::from(byte);
            let Some(&unit) = self.units.get(node).filter(|unit| *unit & (VALUE | 0xff) == u32::from(byte)) else {
                break;
            };
            node ^= behind(unit);
            if unit & 1 << 8 != 0 {
                found = self.units.get(node).map(|value| (i + 1, value & !VALUE));
            }
        }
        let (len, at) = found?;
        self.texts.get(at as usize..)?.split('\0').next().map(|text| (len, text))
    }
}

#[cfg(test)]
mod tests {
    use crate::tokenizer::{PairTemplate, TokenType, Tokenizer, Vocab};

    #[test]
    fn two_texts_stand_as_xlm_roberta_has_them() {
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
