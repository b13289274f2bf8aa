//! Sets of ids.

/// A bit per id below a length: which vectors a search may find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitset {
    /// 32 bits per word, lowest first; bits past the end are 0.
    words: Vec<u32>,
    len: u32,
}

impl Bitset {
    /// `len` unset bits.
    pub fn new(len: u32) -> Bitset {
        Bitset { words: vec![0; len.div_ceil(32) as usize], len }
    }

    /// `len` bits, set where `is_set` returns true.
    pub fn from_fn(len: u32, is_set: impl Fn(u32) -> bool) -> Bitset {
        let mut bits = Bitset::new(len);
        (0..len).filter(|&id| is_set(id)).for_each(|id| bits.set(id, true));
        bits
    }

    /// `len` bits from words; `None` if a bit past the end is set or the number of words is wrong.
    pub fn from_words(len: u32, words: Vec<u32>) -> Option<Bitset> {
        let is_short = words.last().is_none_or(|&last| len.is_multiple_of(32) || last >> (len % 32) == 0);
        (words.len() == len.div_ceil(32) as usize && is_short).then_some(Bitset { words, len })
    }

    /// Number of bits.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of set bits.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|word| word.count_ones()).sum()
    }

    /// Whether a bit is set.
    ///
    /// # Panics
    /// If `id` is out of range.
    pub fn get(&self, id: u32) -> bool {
        assert!(id < self.len, "bit {id} of {}", self.len);
        self.words[id as usize / 32] >> (id % 32) & 1 == 1
    }

    /// Sets or clears a bit.
    ///
    /// # Panics
    /// If `id` is out of range.
    pub fn set(&mut self, id: u32, is_set: bool) {
        assert!(id < self.len, "bit {id} of {}", self.len);
        let (word, bit) = (&mut self.words[id as usize / 32], 1 << (id % 32));
        *word = if is_set { *word | bit } else { *word & !bit };
    }

    /// 32 bits per word, lowest first; bits past the end are 0.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Extends the set with unset bits.
    pub(super) fn resize(&mut self, len: u32) {
        self.words.resize(len.div_ceil(32) as usize, 0);
        self.len = len;
    }
}
