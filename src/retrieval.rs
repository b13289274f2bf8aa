//! Retrieval: finding, among many items on a device, those that suit a query best.

pub mod index;
pub mod mol;

/// An item that was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hit {
    /// The item's id: how many were appended before it.
    pub id: u32,
    /// Cosine, dot product or mixture of logits: higher is better.
    pub score: f32,
}
