//! Caches encodings of texts.

use std::num::NonZeroUsize;
use std::ops::Deref;
use std::sync::Arc;

use super::{EncodeOptions, Tokenizer};
use crate::counted::CountedCache;
use crate::error::Error;

/// Longer texts are not cached, so that a few of them cannot fill the memory.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// A tokenizer that caches its latest results and counts hits.
///
/// Two threads that miss the same text at once both encode it.
#[derive(Debug)]
pub struct EncodingCache {
    tokenizer: Arc<Tokenizer>,
    entries: CountedCache<(Box<str>, EncodeOptions), Arc<[u32]>>,
}

impl EncodingCache {
    /// A cache of at most `capacity` texts.
    pub fn new(tokenizer: Arc<Tokenizer>, capacity: NonZeroUsize) -> Self {
        EncodingCache { tokenizer, entries: CountedCache::new(capacity) }
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// A shared handle to the tokenizer.
    #[cfg(any(feature = "grammar", all(feature = "answer", feature = "chat")))]
    pub(crate) fn shared_tokenizer(&self) -> Arc<Tokenizer> {
        Arc::clone(&self.tokenizer)
    }

    /// [`Tokenizer::encode_with`], cached.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_with`]; errors are not cached.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Arc<[u32]>, Error> {
        // Encodes without a lock, so that a long text does not block others.
        let encode = || self.tokenizer.encode_with(text, options).map(Arc::from);
        if text.len() > MAX_TEXT_BYTES {
            self.entries.miss();
            return encode();
        }
        let key = (text.into(), options);
        if let Some(ids) = self.entries.get(&key) {
            return Ok(ids);
        }
        let ids: Arc<[u32]> = encode()?;
        self.entries.put(key, Arc::clone(&ids));
        Ok(ids)
    }
}

impl Deref for EncodingCache {
    type Target = CountedCache<(Box<str>, EncodeOptions), Arc<[u32]>>;

    /// The counts.
    fn deref(&self) -> &Self::Target {
        &self.entries
    }
}
