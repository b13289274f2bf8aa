//! Embeddings and reranking: a loaded encoder, batches of texts, and caches of their results.
//!
//! Batches are packed without padding and batch-invariant: a text's vector has the same bits alone and in every
//! batch, because a tile of attention has rows of one sequence only and products add along K in one order
//! (`Linear::batch_invariant`). Texts are sorted by length within a window and cut into batches. Two batches are in
//! flight: the host encodes one while the device computes the other. Each size, rounded up, is recorded once. With a
//! second device, each batch size runs where it was measured to be faster (`place.rs`).

mod batch;
mod batcher;
mod embedder;
mod place;
mod reranker;

pub use batch::Tokens;
pub(crate) use batch::{OutputHead, record_texts};
pub use embedder::{EmbedOptions, Embedder};
pub use place::Place;
pub use reranker::{Ranked, RerankOptions, Reranker};

use std::sync::Arc;

use crate::counted::CountedCache;

/// Cached vectors, keyed by the text with its prompt.
pub type VectorCache = CountedCache<Box<str>, Arc<[f32]>>;
