//! Retrieval: finds the items on a device that best match a query.

pub mod index;
pub mod mol;

use crate::kernels::NO_ITEM;

/// A search result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// The item's id: how many were appended before it.
    pub id: u32,
    /// Cosine, dot product or mixture of logits: higher is better.
    pub score: f32,
}

/// The hits in a list from `merge_top`, pairs of a score's bits and an id, up to the first empty entry.
fn listed(words: &[u32]) -> impl Iterator<Item = Hit> {
    let pairs = words.chunks_exact(2).map(|pair| Hit { id: pair[1], score: f32::from_bits(pair[0]) });
    pairs.take_while(|hit| hit.id != NO_ITEM)
}
