//! Remembering results: a cache that counts its hits.

use std::borrow::Borrow;
use std::hash::Hash;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;

/// What was computed last: the least recently used entry goes when it is full. All methods take `&self`, and
/// threads may share it.
#[derive(Debug)]
pub struct CountedCache<K: Hash + Eq, V> {
    entries: Mutex<LruCache<K, V>>,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl<K: Hash + Eq, V: Clone> CountedCache<K, V> {
    /// A cache of at most `capacity` entries.
    pub(crate) fn new(capacity: NonZeroUsize) -> CountedCache<K, V> {
        // Growing on demand: a table for the full capacity at once would be memory that may never be used.
        let mut entries = LruCache::unbounded();
        entries.resize(capacity);
        CountedCache { entries: Mutex::new(entries), hits: AtomicU64::new(0), misses: AtomicU64::new(0) }
    }

    pub(crate) fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        let found = self.entries().get(key).cloned();
        if found.is_some() {
            self.hits.fetch_add(1, Ordering::Relaxed)
        } else {
            self.miss()
        };
        found
    }

    /// Counts what was not looked up.
    pub(crate) fn miss(&self) -> u64 {
        self.misses.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn put(&self, key: K, value: V) {
        self.entries().put(key, value);
    }

    /// Answered from memory since the start or [`clear`](Self::clear).
    pub fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// What had to be computed since then.
    pub fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }

    /// Hits per question, 0 to 1; 0 before the first.
    pub fn hit_rate(&self) -> f64 {
        let (hits, misses) = (self.hits() as f64, self.misses() as f64);
        if hits + misses == 0.0 { 0.0 } else { hits / (hits + misses) }
    }

    /// Entries now.
    pub fn len(&self) -> usize {
        self.entries().len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets everything, the counts included.
    pub fn clear(&self) {
        self.entries().clear();
        self.hits.store(0, Ordering::Relaxed);
        self.misses.store(0, Ordering::Relaxed);
    }

    /// A panic elsewhere cannot leave the map half changed, so a poisoned lock is as good as any.
    fn entries(&self) -> MutexGuard<'_, LruCache<K, V>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
