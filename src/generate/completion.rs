//! A completion in progress: each token yields a piece of text, until something ends it.

use std::collections::HashSet;

use super::constraint::{SequenceConstraint, TokenConstraint};
use super::generation::{Piece, StopReason};
use super::logprobs::Logprobs;
use super::model::Model;
use super::options::{ContextPolicy, GenerateOptions};
use super::pending_text::PendingText;
use super::stop::StopFilter;
use crate::error::Error;
use crate::kernels::{Sampling, mask_words};
use crate::platform::random_seed;
use crate::tokenizer::StreamDecoder;

/// State of a completion that the next token changes.
pub(crate) struct Completion {
    decoder: Option<StreamDecoder>,
    stop_filter: StopFilter,
    pending_text: PendingText,
    eos_ids: HashSet<u32>,
    n_generated: usize,
    seed: u64,
    constraint: Option<SequenceConstraint>,
    /// Number of tokens before which no end token is allowed.
    min_tokens: usize,
    /// Bitmask of the allowed next tokens while end tokens are forbidden.
    without_ends: Vec<u32>,
    vocab_size: u32,
}

/// The result of accepting a token.
pub(crate) struct Decoded {
    pub piece: Piece,
    /// Why the completion ends with this token, if it does.
    pub stop_reason: Option<StopReason>,
    /// The forced next tokens.
    pub forced: Vec<u32>,
}

impl Completion {
    /// A completion after the tokens `before`, which satisfies `constraint`, if any.
    pub fn new(
        model: &Model,
        before: &[u32],
        options: &GenerateOptions,
        constraint: Option<Box<dyn TokenConstraint>>,
    ) -> Completion {
        let tokenizer = model.tokenizer().ok();
        let decoder = tokenizer.map(|tokenizer| {
            // A constraint covers the whole text, including a leading space.
            let begins_text = constraint.is_none() && before.iter().all(|&id| tokenizer.is_control(id));
            let decoder = if begins_text { tokenizer.decoder() } else { tokenizer.decoder().continuing() };
            if options.skip_special_tokens { decoder } else { decoder.with_special() }
        });
        Completion {
            decoder,
            stop_filter: StopFilter::new(&options.stop, options.include_stop),
            pending_text: PendingText::default(),
            eos_ids: options.end_ids(tokenizer).into_iter().collect(),
            n_generated: 0,
            seed: options.seed.unwrap_or_else(random_seed),
            constraint: constraint.map(SequenceConstraint::new),
            min_tokens: options.min_tokens,
            without_ends: Vec::new(),
            vocab_size: model.config().vocab_size,
        }
    }

    /// Whether some tokens may be forbidden now.
    pub fn is_constrained(&self) -> bool {
        self.constraint.is_some() || self.forbids_ends()
    }

    /// Whether end tokens are forbidden because too few tokens are generated.
    fn forbids_ends(&self) -> bool {
        self.n_generated < self.min_tokens && !self.eos_ids.is_empty()
    }

    /// Its constraint, whose mask may be computed by a thread.
    pub fn constraint(&mut self) -> Option<&mut SequenceConstraint> {
        self.constraint.as_mut()
    }

    /// Bitmask of the allowed next tokens, or `None` if all are.
    ///
    /// # Errors
    /// [`Error::Constraint`] if no token is allowed.
    pub fn allowed(&mut self) -> Result<Option<&[u32]>, Error> {
        let forbids_ends = self.forbids_ends();
        let allowed = self.constraint.as_mut().map(|constraint| constraint.allowed()).transpose()?;
        if !forbids_ends {
            return Ok(allowed);
        }
        let mask = &mut self.without_ends;
        mask.clear();
        match allowed {
            Some(allowed) => mask.extend_from_slice(allowed),
            None => mask.resize(mask_words(self.vocab_size) as usize, u32::MAX),
        }
        for &id in &self.eos_ids {
            if let Some(word) = mask.get_mut(id as usize / 32) {
                *word &= !(1 << (id % 32));
            }
        }
        match allowed {
            // The constraint allows nothing but the end.
            Some(allowed) if mask.iter().all(|&word| word == 0) => Ok(Some(allowed)),
            _ => Ok(Some(mask)),
        }
    }

    /// Number of generated tokens.
    pub fn n_generated(&self) -> usize {
        self.n_generated
    }

    /// Number of tokens that may still be generated.
    pub fn n_left(&self, options: &GenerateOptions) -> usize {
        options.max_tokens.saturating_sub(self.n_generated)
    }

    /// Sampling parameters of the next token, in a sequence of `n_tokens`.
    pub fn sampling(&self, options: &GenerateOptions, n_tokens: usize) -> Sampling {
        let seed = [self.seed as u32, (self.seed >> 32) as u32];
        Sampling { seed, ..options.sampling(n_tokens.saturating_sub(self.n_generated) as u32) }
    }

    /// The sampling seed: the given or the random one.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Accepts a token, with which the sequence has `n_tokens` of at most `capacity`. `logits`: those it was chosen
    /// from, if requested and it was not forced.
    ///
    /// # Errors
    /// [`Error::Constraint`] for a token that the constraint forbids.
    pub fn accept(
        &mut self,
        id: u32,
        options: &GenerateOptions,
        [n_tokens, capacity]: [usize; 2],
        logits: Option<&[f32]>,
    ) -> Result<Decoded, Error> {
        self.n_generated += 1;
        let is_last = self.n_left(options) == 0;
        let is_full = n_tokens > capacity && options.context_policy != ContextPolicy::Slide;
        let logprobs = options.logprobs.map(|n| match logits {
            Some(logits) => Logprobs::of(logits, id, n as usize),
            None => Logprobs { logprob: 0.0, top: if n > 0 { vec![(id, 0.0)] } else { Vec::new() } },
        });
        let (mut stop_reason, mut forced) = (None, Vec::new());
        if self.eos_ids.contains(&id) {
            stop_reason = Some(StopReason::Eos);
        }
        if let (None, Some(constraint)) = (stop_reason, &mut self.constraint) {
            match constraint.accept(id)? {
                Some(ids) => forced = ids,
                None => stop_reason = Some(StopReason::Complete),
            }
        }
        // Padding ids beyond the tokenizer's vocabulary have no text.
        let has_text = options.include_stop || stop_reason != Some(StopReason::Eos);
        let decoder = self.decoder.as_mut().filter(|_| has_text);
        let mut text = decoder.and_then(|decoder| decoder.push(id).ok()).unwrap_or_default();
        self.pending_text.decoded(text.len());
        let mut stop = None;
        if self.n_generated > self.min_tokens {
            (text, stop) = self.stop_filter.push(&text);
        }
        if stop.is_some() {
            stop_reason = Some(StopReason::StopText);
        } else {
            let limit = if is_last { Some(StopReason::MaxTokens) } else { is_full.then_some(StopReason::ContextFull) };
            stop_reason = stop_reason.or(limit);
            if stop_reason.is_some() {
                let mut rest = self.decoder.as_mut().map(StreamDecoder::finish).unwrap_or_default();
                match self.n_generated > self.min_tokens {
                    true => {
                        (rest, stop) = self.stop_filter.push(&rest);
                        text += &rest;
                        if stop.is_none() {
                            text += &self.stop_filter.finish();
                        }
                    }
                    false => text += &rest,
                }
            }
        }
        let held = self.pending_text.given_out(text.len());
        Ok(Decoded { piece: Piece { id, text, logprobs, held, stop }, stop_reason, forced })
    }
}
