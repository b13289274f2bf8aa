//! Remembering what texts encode to.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;

use super::{EncodeOptions, Tokenizer};
use crate::error::Error;

/// A longer text is encoded anew each time, so that a few of them cannot fill the memory.
const MAX_TEXT_BYTES: usize = 64 << 10;

type Key = (Box<str>, EncodeOptions);

/// A tokenizer that remembers its latest results: the least recently used one goes when it is full.
///
/// All methods take `&self`, and threads may share it. Two threads that miss the same text at once both encode it.
#[derive(Debug)]
pub struct EncodingCache {
    tokenizer: Arc<Tokenizer>,
    entries: Mutex<LruCache<Key, Arc<[u32]>>>,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl EncodingCache {
    /// A cache of at most `capacity` texts.
    pub fn new(tokenizer: Arc<Tokenizer>, capacity: NonZeroUsize) -> Self {
        // Growing on demand: a table for the full capacity at once would be memory that may never be used.
        let mut entries = LruCache::unbounded();
        entries.resize(capacity);
        EncodingCache { tokenizer, entries: Mutex::new(entries), hits: AtomicU64::new(0), misses: AtomicU64::new(0) }
    }

    /// The tokenizer inside.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// [`Tokenizer::encode_with`], from memory where possible.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode_with`]; an error is not remembered.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Arc<[u32]>, Error> {
        if text.len() > MAX_TEXT_BYTES {
            self.misses.fetch_add(1, Ordering::Relaxed);
            return Ok(self.tokenizer.encode_with(text, options)?.into());
        }
        let key = (text.into(), options);
        if let Some(ids) = self.entries().get(&key) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return Ok(Arc::clone(ids));
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        // The lock is not held meanwhile, so a long text does not keep the others waiting.
        let ids: Arc<[u32]> = self.tokenizer.encode_with(text, options)?.into();
        self.entries().put(key, Arc::clone(&ids));
        Ok(ids)
    }

    /// Texts answered from memory since the start or [`clear`](Self::clear).
    pub fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
    }

    /// Texts that had to be encoded since then.
    pub fn misses(&self) -> u64 {
        self.misses.load(Ordering::Relaxed)
    }

    /// Hits per text, 0 to 1; 0 before the first text.
    pub fn hit_rate(&self) -> f64 {
        let (hits, misses) = (self.hits() as f64, self.misses() as f64);
        if hits + misses == 0.0 { 0.0 } else { hits / (hits + misses) }
    }

    /// Texts remembered now.
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
    fn entries(&self) -> MutexGuard<'_, LruCache<Key, Arc<[u32]>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
