//! Remembering the vectors of texts.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;

/// Vectors of the texts that were embedded last: the least recently used one goes when it is full.
#[derive(Debug)]
pub struct VectorCache {
    entries: Mutex<LruCache<Box<str>, Arc<[f32]>>>,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl VectorCache {
    /// A cache of at most `capacity` texts.
    pub(super) fn new(capacity: NonZeroUsize) -> VectorCache {
        // Growing on demand: a table for the full capacity at once would be memory that may never be used.
        let mut entries = LruCache::unbounded();
        entries.resize(capacity);
        VectorCache { entries: Mutex::new(entries), hits: AtomicU64::new(0), misses: AtomicU64::new(0) }
    }

    /// The vector of a text, if it is remembered.
    pub(super) fn get(&self, text: &str) -> Option<Arc<[f32]>> {
        let found = self.entries().get(text).cloned();
        let count = if found.is_some() { &self.hits } else { &self.misses };
        count.fetch_add(1, Ordering::Relaxed);
        found
    }

    pub(super) fn put(&self, text: &str, vector: &[f32]) {
        self.entries().put(text.into(), vector.into());
    }

    /// Texts answered from memory.
    pub fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// Texts that had to be embedded.
    pub fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }

    /// Hits per text, 0 to 1; 0 before the first text.
    pub fn hit_rate(&self) -> f64 {
        let (hits, misses) = (self.hits() as f64, self.misses() as f64);
        if hits + misses == 0.0 { 0.0 } else { hits / (hits + misses) }
    }

    /// A panic elsewhere cannot leave the map half changed, so a poisoned lock is as good as any.
    fn entries(&self) -> MutexGuard<'_, LruCache<Box<str>, Arc<[f32]>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
