//! Texts to vectors: a loaded encoder, batches of texts, and what is remembered of them.

mod batch;
mod cache;
mod embedder;

pub use batch::Tokens;
pub use cache::VectorCache;
pub use embedder::{EmbedOptions, Embedder};
