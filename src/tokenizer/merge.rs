//! The merge loop of SentencePiece and BPE.
//!
//! ```text
//! queue = every pair of neighbours that may merge
//! while queue is not empty:
//!     take the pair with the lowest priority, the leftmost of equals
//!     if both halves are unchanged: the left one absorbs the right one,
//!         and the pairs it makes with its two neighbours enter the queue
//! ```
//! Each adjacent pair enters once at the start and at most twice per merge, so a word of n symbols takes O(n log n).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A span of the text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    /// First byte in the text.
    pub start: u32,
    /// Length in bytes; 0 once merged into another symbol.
    pub len: u32,
    /// The token of this text, or [`NO_TOKEN`].
    pub id: u32,
    prev: u32,
    next: u32,
}

/// The id of a symbol whose text is not a token.
pub(super) const NO_TOKEN: u32 = u32::MAX;
/// The index of a missing neighbour.
const NO_SYMBOL: u32 = u32::MAX;

/// A pair that may merge. The derived order is the merge order: priority, then position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct MergeCandidate {
    priority: u32,
    left: u32,
    right: u32,
    len: u32,
    merged: u32,
}

/// The symbols of a word and their queue; reused between words to avoid allocation.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<MergeCandidate>>,
}

impl Merger {
    /// Removes the previous word.
    pub fn clear(&mut self) {
        self.symbols.clear();
        self.queue.clear();
    }

    /// Appends a symbol. The caller limits texts, and thereby symbols, to below 2^32.
    pub fn push(&mut self, start: u32, len: u32, id: u32) {
        let at = self.symbols.len() as u32;
        let prev = at.checked_sub(1).unwrap_or(NO_SYMBOL);
        if let Some(last) = self.symbols.last_mut() {
            last.next = at;
        }
        self.symbols.push(Symbol { start, len, id, prev, next: NO_SYMBOL });
    }

    /// Merges while `pair` returns a priority (lowest first) and a token for two neighbours.
    pub fn run(&mut self, pair: impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        for right in 1..self.symbols.len() as u32 {
            self.consider(right - 1, right, &pair);
        }
        while let Some(Reverse(candidate)) = self.queue.pop() {
            let left = self.symbols[candidate.left as usize];
            let right = self.symbols[candidate.right as usize];
            // Symbols only grow or vanish, so both are unchanged exactly if both live and their total length matches.
            if left.len == 0 || right.len == 0 || left.len + right.len != candidate.len {
                continue;
            }
            self.symbols[candidate.right as usize].len = 0;
            let merged = &mut self.symbols[candidate.left as usize];
            merged.len = candidate.len;
            merged.id = candidate.merged;
            merged.next = right.next;
            if right.next != NO_SYMBOL {
                self.symbols[right.next as usize].prev = candidate.left;
            }
            self.consider(left.prev, candidate.left, &pair);
            self.consider(candidate.left, right.next, &pair);
        }
    }

    /// The remaining symbols in text order.
    pub fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.len != 0)
    }

    fn consider(&mut self, left: u32, right: u32, pair: &impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        let (Some(a), Some(b)) = (self.symbols.get(left as usize), self.symbols.get(right as usize)) else { return };
        if let Some((priority, merged)) = pair(a, b) {
            self.queue.push(Reverse(MergeCandidate { priority, left, right, len: a.len + b.len, merged }));
        }
    }
}
