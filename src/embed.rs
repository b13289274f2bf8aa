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
mod images;
mod late;
mod place;
mod prompt;
mod reranker;
mod sparse;

pub use batch::Tokens;
pub(crate) use batch::{OutputHead, record_texts};
pub use batcher::{Truncation, TruncationSide};
pub use embedder::{EmbedOptions, Embedder};
pub use images::{ImageEmbedder, ImageOptions};
pub use late::{MultiVectorEmbedder, MultiVectorOptions, TextKind};
pub use place::Place;
pub use reranker::{Ranked, RerankOptions, Reranker};
pub use sparse::{SparseEmbedder, TokenWeight};

use std::sync::Arc;

use crate::counted::CountedCache;

/// Cached vectors, keyed by the text with its prompt.
pub type VectorCache = CountedCache<Box<str>, Arc<[f32]>>;

/// The first `n_kept` elements of each vector of `dims`, scaled to length 1 if `normalizes`. Only vectors of models
/// that are trained for it keep their quality (Matryoshka representations, <https://arxiv.org/abs/2205.13147>).
pub fn shortened(vectors: &[f32], dims: usize, n_kept: usize, normalizes: bool) -> Vec<f32> {
    let mut all = Vec::with_capacity(vectors.len() / dims.max(1) * n_kept.min(dims));
    for vector in vectors.chunks_exact(dims.max(1)) {
        let kept = &vector[..n_kept.min(dims)];
        let length = kept.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        let scale = if normalizes && length > 0.0 { 1.0 / length } else { 1.0 };
        all.extend(kept.iter().map(|&x| (f64::from(x) * scale) as f32));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::shortened;

    #[test]
    fn shortened_vectors_have_length_one() {
        let vectors = [3.0, 4.0, 12.0, 0.0, 0.0, 1.0];
        assert_eq!(shortened(&vectors, 3, 2, true), [0.6, 0.8, 0.0, 0.0]);
        assert_eq!(shortened(&vectors, 3, 2, false), [3.0, 4.0, 0.0, 0.0]);
        assert_eq!(shortened(&vectors, 3, 9, false), vectors);
    }
}
