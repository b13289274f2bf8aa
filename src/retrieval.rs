//! Retrieval: finding, among many items on a device, those that suit a query best.

pub mod index;
pub mod mol;

use crate::kernels::NO_ITEM;

/// An item that was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// The item's id: how many were appended before it.
    pub id: u32,
    /// Cosine, dot product or mixture of logits: higher is better.
    pub score: f32,
}

/// What a list of the best holds, pairs of a score's bits and an id as `merge_top` leaves them, up to the first empty place.
fn listed(words: &[u32]) -> impl Iterator<Item = Hit> {
    let pairs = words.chunks_exact(2).map(|pair| Hit { id: pair[1], score: f32::from_bits(pair[0]) });
    pairs.take_while(|hit| hit.id != NO_ITEM)
}
