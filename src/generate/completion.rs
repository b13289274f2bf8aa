//! A text while it is generated: each token completes a piece of it, until something ends it.

use std::collections::HashSet;

use super::constraint::TokenConstraint;
use super::generation::{Piece, StopReason};
use super::logprobs::Logprobs;
use super::model::Model;
use super::options::{ContextPolicy, GenerateOptions};
use super::pending_text::PendingText;
use super::stop::StopFilter;
use crate::error::Error;
use crate::kernels::Sampling;
use crate::tokenizer::StreamDecoder;

/// What a text has so far that the next token changes.
pub(crate) struct Completion {
    decoder: Option<StreamDecoder>,
    stop_filter: StopFilter,
    held: PendingText,
    eos_ids: HashSet<u32>,
    n_generated: usize,
    /// Knows what the text may be, if it has to match something.
    constraint: Option<Box<dyn TokenConstraint>>,
}

/// What a token completes.
pub(crate) struct Decoded {
    pub piece: Piece,
    /// Why the text ends with it, if it does.
    pub stop_reason: Option<StopReason>,
    /// The tokens that have to come next, as far as there is no choice.
    pub forced: Vec<u32>,
}

impl Completion {
    /// A text after these tokens. With a constraint it is one that the constraint allows.
    pub fn new(
        model: &Model,
        before: &[u32],
        options: &GenerateOptions,
        constraint: Option<Box<dyn TokenConstraint>>,
    ) -> Completion {
        let tokenizer = model.tokenizer().ok();
        let decoder = tokenizer.map(|tokenizer| {
            // A constraint is about all of its text, and so about a space at its beginning.
            let begins_text = constraint.is_none() && before.iter().all(|&id| tokenizer.is_control(id));
            if begins_text { tokenizer.decoder() } else { tokenizer.decoder().continuing() }
        });
        Completion {
            decoder,
            stop_filter: StopFilter::new(&options.stop),
            held: PendingText::default(),
            eos_ids: options.end_ids(tokenizer).into_iter().collect(),
            n_generated: 0,
            constraint,
        }
    }

    /// Whether the text has to match something.
    pub fn is_constrained(&self) -> bool {
        self.constraint.is_some()
    }

    /// The tokens that may come next, if not all may: a bit for each of the vocabulary.
    ///
    /// # Errors
    /// [`Error::Constraint`] if there is none.
    pub fn allowed(&mut self) -> Result<Option<&[u32]>, Error> {
        self.constraint.as_mut().map(|constraint| constraint.allowed()).transpose()
    }

    /// Tokens so far.
    pub fn n_generated(&self) -> usize {
        self.n_generated
    }

    /// Tokens that may still come.
    pub fn n_left(&self, options: &GenerateOptions) -> usize {
        options.max_tokens.saturating_sub(self.n_generated)
    }

    /// What the kernels choose the next token by, of a sequence with so many.
    pub fn sampling(&self, options: &GenerateOptions, n_tokens: usize) -> Sampling {
        options.sampling(n_tokens.saturating_sub(self.n_generated) as u32)
    }

    /// Goes on with a token, with which the sequence has `n_tokens` of at most `capacity`; `logits`: those that it was chosen by, where
    /// they are asked for and it was not the only one.
    ///
    /// # Errors
    /// [`Error::Constraint`] for a token that may not come.
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
        // Rows that pad a model's vocabulary beyond the tokenizer's have no text.
        let mut text = self.decoder.as_mut().and_then(|decoder| decoder.push(id).ok()).unwrap_or_default();
        self.held.decoded(text.len());
        let stopped;
        (text, stopped) = self.stop_filter.push(&text);
        if stopped {
            stop_reason = Some(StopReason::StopText);
        } else {
            let limit = if is_last { Some(StopReason::MaxTokens) } else { is_full.then_some(StopReason::ContextFull) };
            stop_reason = stop_reason.or(limit);
            if stop_reason.is_some() {
                let rest = self.decoder.as_mut().map(StreamDecoder::finish).unwrap_or_default();
                let (rest, stopped) = self.stop_filter.push(&rest);
                text += &rest;
                if !stopped {
                    text += &self.stop_filter.finish();
                }
            }
        }
        let held = self.held.given_out(text.len());
        Ok(Decoded { piece: Piece { id, text, logprobs, held }, stop_reason, forced })
    }
}
