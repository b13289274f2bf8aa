//! Rows of pictures and sounds that stay on the host, by a digest of their inputs.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;

use super::ImageEmbeddings;

/// Pictures whose rows stay on the host, and bytes of them. The last picture's stay, whatever they take.
const KEPT: NonZeroUsize = NonZeroUsize::new(64).unwrap();
const KEPT_BYTES: usize = 1 << 30;

/// Rows by a digest with random keys, so that nobody can make two inputs with one digest.
pub(crate) struct KeptRows {
    keys: [RandomState; 2],
    kept: Mutex<LruCache<[u64; 2], Arc<ImageEmbeddings>>>,
}

impl KeptRows {
    pub fn new() -> KeptRows {
        KeptRows { keys: Default::default(), kept: Mutex::new(LruCache::new(KEPT)) }
    }

    /// A digest of what `write` writes.
    pub fn digest(&self, write: impl Fn(&mut dyn Hasher)) -> [u64; 2] {
        self.keys.each_ref().map(|key| {
            let mut digest = key.build_hasher();
            write(&mut digest);
            digest.finish()
        })
    }

    /// The rows of this digest, if they are at hand.
    pub fn get(&self, digest: [u64; 2]) -> Option<Arc<ImageEmbeddings>> {
        self.kept().get(&digest).cloned()
    }

    /// Keeps rows, and as many of those used last as fit beside them.
    pub fn keep(&self, digest: [u64; 2], embeddings: Arc<ImageEmbeddings>) {
        self.keep_within(KEPT_BYTES, digest, embeddings);
    }

    fn keep_within(&self, max_bytes: usize, digest: [u64; 2], embeddings: Arc<ImageEmbeddings>) {
        let mut kept = self.kept();
        kept.put(digest, embeddings);
        let mut kept_bytes: usize = kept.iter().map(|(_, rows)| rows.size_bytes()).sum();
        while kept_bytes > max_bytes && kept.len() > 1 {
            kept_bytes -= kept.pop_lru().map_or(0, |(_, rows)| rows.size_bytes());
        }
    }

    fn kept(&self) -> MutexGuard<'_, LruCache<[u64; 2], Arc<ImageEmbeddings>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::RowAttention;
    use crate::vision::ImageRows;

    #[test]
    fn pictures_are_kept_up_to_a_size() {
        let rows = KeptRows::new();
        let picture = |n: usize| {
            let rows = ImageRows::new((2, RowAttention::ByLayer), vec![vec![0.0; 2 * n]; 3], None).unwrap();
            Arc::new(ImageEmbeddings { tiles: vec![Arc::new(rows)], text: Vec::new() })
        };
        assert_eq!(picture(5).size_bytes(), 5 * 2 * 3 * 4);
        for i in 0..4 {
            rows.keep_within(360, [i; 2], picture(5));
        }
        let kept = || rows.kept().iter().map(|(digest, _)| digest[0]).collect::<Vec<_>>();
        assert_eq!(kept(), [3, 2, 1]);
        rows.get([1; 2]);
        rows.keep_within(360, [4; 2], picture(10));
        assert_eq!(kept(), [4, 1]);
        rows.keep_within(360, [5; 2], picture(100));
        assert_eq!(kept(), [5]);
    }
}
