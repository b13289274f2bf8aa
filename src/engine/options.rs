//! What an engine is given, and what it is asked for.

use std::time::Duration;

use web_time::Instant;

use crate::error::Error;
use crate::generate::{GenerateOptions, Model};
use crate::kernels::N_STATES;

/// How many texts an engine computes together, and how many wait.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Sequences that are computed together at most: 1 to [`EngineOptions::MOST_SEQUENCES`].
    pub max_sequences: u32,
    /// Requests that wait at most, beside those that are computed; 0 refuses all that cannot begin at once.
    pub max_queued: usize,
    /// Tokens of all sequences together that the cache holds: all of them, or the engine does not begin. `None`: the context length
    /// of each sequence, or half of that as often as there is no memory for it, down to the context length of one. On a GPU, whose
    /// memory nobody knows, they are allocated at once to see that; natively, since a browser tells it later.
    pub cache_tokens: Option<u32>,
    /// Whether what sequences have in common at their beginnings is computed once.
    pub prefix_cache: bool,
    /// Bytes of the host's memory for beginnings that the cache has no room for any more, until they come again; 0: none. Not
    /// without `prefix_cache`.
    pub host_cache_bytes: u64,
    /// Tokens to guess by prompt look-up for greedy requests that do not ask for more themselves
    /// ([`GenerateOptions::prompt_lookup`]), 0 to [`GenerateOptions::MAX_DRAFT_TOKENS`]; 0 is off. Passes have room for as many even with
    /// few sequences. With many, drafts take the rows that are idle. Of a model whose layers keep states, nothing is drafted while this
    /// and the next two are 0: states before wrong drafts take memory.
    pub prompt_lookup: u32,
    /// The same by the model's draft model, if it has one ([`Model::with_draft`](crate::Model::with_draft)), where prompt look-up finds
    /// nothing.
    pub draft_tokens: u32,
    /// The same by the model's own MTP head, if it was loaded with one
    /// ([`LoadOptions::mtp_tokens`](crate::LoadOptions::mtp_tokens)), where prompt look-up finds nothing. With 0 the head
    /// drafts nothing, whatever requests ask for: it has no memory then.
    pub mtp_tokens: u32,
    /// How long a step may take: the first ones compile shaders, which takes seconds on some devices. A GPU that takes longer
    /// is given up, as one that is lost; of the CPU it is only counted. No limit if `None`; never one in a browser.
    pub step_limit: Option<Duration>,
}

impl Default for EngineOptions {
    /// 16 sequences, twice as many waiting, a cache as the memory allows, with a prefix cache on the device alone, steps without a
    /// limit.
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
            step_limit: None,
        }
    }
}

impl EngineOptions {
    /// Sequences of one pass at most.
    pub const MOST_SEQUENCES: u32 = 64;

    /// Rows of a pass at most.
    pub(super) fn rows(&self) -> u32 {
        self.max_sequences.max(1 + self.drafts()).next_power_of_two()
    }

    /// States that layers of a model keep of a sequence: the one before a wrong guess is wanted again.
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
        let most = Self::MOST_SEQUENCES;
        if !(1..=most).contains(&self.max_sequences) {
            let (expected, found) = (format!("1 to {most}"), self.max_sequences.to_string());
            return Err(Error::Option { option: "max_sequences", expected, found });
        }
        if self.cache_tokens == Some(0) {
            return Err(Error::Option { option: "cache_tokens", expected: "1 or more".into(), found: "0".into() });
        }
        if self.host_cache_bytes > 0 && !self.prefix_cache {
            let expected = "0 without a prefix cache: there is nothing to keep".into();
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

/// A text to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt's tokens, with what the model expects in front.
    pub ids: Vec<u32>,
    /// How it goes on. Options of speed (`tokens_per_submit`, `submits_in_flight`) have no meaning here.
    pub options: GenerateOptions,
    /// Requests of a higher priority begin first; among equals the one that came first.
    pub priority: i8,
    /// When it ends, finished or not, with [`StopReason::Deadline`](crate::generate::StopReason::Deadline).
    pub deadline: Option<Instant>,
    /// Whose beginnings it shares: only requests of the same salt take what another has computed, so that
    /// [`Usage::cached_tokens`](super::Usage::cached_tokens) and times tell nothing of what others have asked. Up to
    /// [`Request::MOST_SALT_BYTES`]. `None`: that of all requests without one.
    pub cache_salt: Option<String>,
    /// The adapter that it is computed with, by its name in [`Model::with_adapters`](crate::Model::with_adapters). Requests with
    /// different adapters take turns: a pass has the weights of one.
    pub adapter: Option<String>,
}

impl Request {
    /// Bytes of a salt at most.
    pub const MOST_SALT_BYTES: usize = 1024;

    /// Of usual priority, without a deadline, a salt and an adapter.
    pub fn new(ids: Vec<u32>, options: GenerateOptions) -> Request {
        Request { ids, options, priority: 0, deadline: None, cache_salt: None, adapter: None }
    }

    /// Refuses what an engine cannot do.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.options.check()?;
        let n_salt = self.cache_salt.as_ref().map_or(0, String::len);
        if n_salt > Self::MOST_SALT_BYTES {
            let expected = format!("at most {} bytes", Self::MOST_SALT_BYTES);
            return Err(Error::Option { option: "cache_salt", expected, found: n_salt.to_string() });
        }
        Ok(())
    }
}
