//! Texts to vectors, and pairs of texts to scores: a loaded encoder, batches of texts, and what is remembered of them.
//!
//! A batch is packed without padding, and a text has the same vector, to the last bit, alone and in every batch: a
//! tile of attention has rows of one sequence only, and products add along K in one order
//! (`Linear::batch_invariant`). Texts are sorted by length within a window, cut into batches, and two batches are in
//! flight, so the host encodes one while the device computes the other. Passes are recorded by size, rounded up, and
//! kept. With a second device, each size of batch goes where it was faster (`place.rs`).

mod batch;
mod batcher;
mod embedder;
mod place;
mod reranker;

pub use batch::Tokens;
#[cfg(not(target_arch = "wasm32"))]
pub(crate) use batch::{Head, record_texts};
pub use embedder::{EmbedOptions, Embedder};
pub use place::Place;
pub use reranker::{Ranked, RerankOptions, Reranker};

use std::sync::Arc;

use crate::counted::CountedCache;

/// Vectors by what the encoder read: a text behind its prompt.
pub type VectorCache = CountedCache<Box<str>, Arc<[f32]>>;
