//! Engine options and requests.

use std::sync::Arc;
use std::time::Duration;

use web_time::Instant;

use super::decode_batch::decode_rows;
use crate::error::Error;
use crate::generate::{GenerateOptions, Model};
use crate::kernels::N_STATES;
use crate::vision::ImageRows;

/// Batch, queue and cache sizes of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Maximum number of running sequences: 1 to [`EngineOptions::MAX_SEQUENCES`].
    pub max_sequences: u32,
    /// Maximum number of queued requests; 0 refuses every request that cannot start at once.
    pub max_queued: usize,
    /// KV cache size in tokens, shared by all sequences; the engine fails to start if it does not fit. `None`: the
    /// context length of every sequence, halved until it fits, but at least one context length. Free GPU memory is
    /// unknown, so the cache is allocated at once, except in browsers, which report failures later.
    pub cache_tokens: Option<u32>,
    /// Whether sequences share the KV cache of common prefixes.
    pub prefix_cache: bool,
    /// Host memory in bytes for CPU offload of evicted prefix-cache pages; 0: none. Requires `prefix_cache`. Layers
    /// with a sliding window then keep all positions on the device.
    pub host_cache_bytes: u64,
    /// Draft tokens by prompt lookup for greedy requests that ask for fewer ([`GenerateOptions::prompt_lookup`]), 0
    /// to [`GenerateOptions::MAX_DRAFT_TOKENS`]; 0 is off. Passes have rows for as many drafts even with few
    /// sequences; with many, drafts use the idle rows. Recurrent models draft only if this or one of the next two
    /// options is above 0: the states before wrong drafts need memory.
    pub prompt_lookup: u32,
    /// Draft tokens by the draft model, if there is one ([`Model::with_draft`](crate::Model::with_draft)), where
    /// prompt lookup finds none.
    pub draft_tokens: u32,
    /// Draft tokens by the MTP head, if it was loaded ([`LoadOptions::mtp_tokens`](crate::LoadOptions::mtp_tokens)),
    /// where prompt lookup finds none. 0 disables the head for all requests: it has no memory.
    pub mtp_tokens: u32,
    /// Whether a sequence's output must not depend on the sequences beside it. Otherwise decode passes of 16 sequences
    /// and more may use other products than those of 8 and fewer, which is faster, but adds in another order.
    pub deterministic: bool,
    /// Time limit of a step; the first steps compile shaders, which takes seconds on some devices. A GPU that
    /// exceeds it is treated as lost; for the CPU the step is only counted. `None`: no limit. Ignored in browsers.
    pub step_limit: Option<Duration>,
}

impl Default for EngineOptions {
    /// 16 sequences, 32 queued requests, a cache as large as fits, a prefix cache without CPU offload, products by
    /// number of sequences, no step limit.
    fn default() -> Self {
        EngineOptions {
            max_sequences: 16,
            max_queued: 32,
            cache_tokens: None,
            prefix_cache: true,
            host_cache_bytes: 0,
            prompt_lookup: 0,
            draft_tokens: 0,
            mtp_tokens: 0,
            deterministic: false,
            step_limit: None,
        }
    }
}

impl EngineOptions {
    /// Maximum of [`EngineOptions::max_sequences`].
    pub const MAX_SEQUENCES: u32 = 64;

    /// Maximum number of rows of a pass.
    pub(super) fn rows(&self) -> u32 {
        decode_rows(self.max_sequences.max(1 + self.drafts()))
    }

    /// Recurrent states per sequence: a wrong draft is rolled back to the state before it.
    pub(super) fn states(&self, model: &Model) -> u32 {
        if model.config().is_recurrent() && self.drafts() > 0 { N_STATES } else { 1 }
    }

    fn drafts(&self) -> u32 {
        self.prompt_lookup.max(self.draft_tokens).max(self.mtp_tokens)
    }

    /// Refuses values out of range.
    ///
    /// # Errors
    /// [`Error::Option`] naming the option.
    pub fn check(&self) -> Result<(), Error> {
        let most = Self::MAX_SEQUENCES;
        if !(1..=most).contains(&self.max_sequences) {
            let (expected, found) = (format!("1 to {most}"), self.max_sequences.to_string());
            return Err(Error::Option { option: "max_sequences", expected, found });
        }
        if self.cache_tokens == Some(0) {
            return Err(Error::Option { option: "cache_tokens", expected: "1 or more".into(), found: "0".into() });
        }
        if self.host_cache_bytes > 0 && !self.prefix_cache {
            let expected = "0 without a prefix cache".into();
            let found = self.host_cache_bytes.to_string();
            return Err(Error::Option { option: "host_cache_bytes", expected, found });
        }
        let most = GenerateOptions::MAX_DRAFT_TOKENS;
        for (option, n) in [
            ("prompt_lookup", self.prompt_lookup),
            ("draft_tokens", self.draft_tokens),
            ("mtp_tokens", self.mtp_tokens),
        ] {
            if n > most {
                return Err(Error::Option { option, expected: format!("0 to {most}"), found: n.to_string() });
            }
        }
        if self.step_limit == Some(Duration::ZERO) {
            return Err(Error::Option { option: "step_limit", expected: "a time above 0".into(), found: "0 s".into() });
        }
        Ok(())
    }
}

/// A completion to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt's token ids, with the model's special tokens in front.
    pub ids: Vec<u32>,
    /// Sampling and stop options. `tokens_per_submit` and `submits_in_flight` are ignored.
    pub options: GenerateOptions,
    /// Higher priorities start first; equal ones in order of arrival.
    pub priority: i32,
    /// When the request ends, finished or not, with [`StopReason::Deadline`](crate::generate::StopReason::Deadline).
    pub deadline: Option<Instant>,
    /// Isolates the prefix cache: only requests with the same salt share pages, so that
    /// [`Usage::cached_tokens`](super::Usage::cached_tokens) and timing reveal nothing about other requests. At most
    /// [`Request::MAX_SALT_BYTES`]. `None`: shared by all requests without a salt.
    pub cache_salt: Option<String>,
    /// Whether the prompt's cached beginning is used; otherwise all of it is computed.
    pub reads_cache: bool,
    /// LoRA adapter, by its name in [`Model::with_adapters`](crate::Model::with_adapters). A pass uses one adapter,
    /// so requests with different adapters take turns.
    pub adapter: Option<String>,
    /// Images and sounds whose rows' ids stand among `ids`: [`ImageRows::ids`].
    pub images: Vec<Arc<ImageRows>>,
}

impl Request {
    /// Maximum length of a salt in bytes.
    pub const MAX_SALT_BYTES: usize = 1024;

    /// A request with priority 0 that reads the prefix cache, without a deadline, salt or adapter.
    pub fn new(ids: Vec<u32>, options: GenerateOptions) -> Request {
        Request {
            ids,
            options,
            priority: 0,
            deadline: None,
            cache_salt: None,
            reads_cache: true,
            adapter: None,
            images: Vec::new(),
        }
    }

    /// Refuses unsupported options.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.options.check()?;
        if let (false, Some(found)) = (self.images.is_empty(), self.options.prompt_logprobs) {
            let (expected, found) = ("none for a prompt with images".into(), found.to_string());
            return Err(Error::Option { option: "prompt_logprobs", expected, found });
        }
        let n_salt = self.cache_salt.as_ref().map_or(0, String::len);
        if n_salt > Self::MAX_SALT_BYTES {
            let expected = format!("at most {} bytes", Self::MAX_SALT_BYTES);
            return Err(Error::Option { option: "cache_salt", expected, found: n_salt.to_string() });
        }
        Ok(())
    }
}
