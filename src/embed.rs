//! Texts to vectors, and pairs of texts to scores: a loaded encoder, batches of texts, and what is remembered of them.

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
