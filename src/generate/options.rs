//! What a caller may ask of a generation.

use std::collections::BTreeMap;

use crate::error::Error;
#[cfg(feature = "grammar")]
use crate::grammar::Constraint;
use crate::kernels::Sampling;
use crate::model::{Sampler, VERIFIED_ROWS};
use crate::tokenizer::Tokenizer;

/// What happens when the context is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContextPolicy {
    /// A prompt that does not fit is refused; a generation that reaches the end stops with
    /// [`StopReason::ContextFull`](super::StopReason::ContextFull).
    #[default]
    Stop,
    /// The first token and the latest half of the context are kept, computed anew, and generation goes on. A prompt that
    /// does not fit loses its middle in the same way.
    Slide,
}

/// How tokens are chosen and when to stop.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Divides the logits before the draw; 0 always takes the most likely token. 0 to 100.
    pub temperature: f32,
    /// Draws among the k most likely tokens; 0 is off.
    pub top_k: u32,
    /// Draws among the most likely tokens that together have this probability; 1 is off. Above 0 to 1.
    pub top_p: f32,
    /// Draws among tokens with at least this share of the most likely one's probability; 0 is off. 0 to 1.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens; 1 is off. Above 0 to 100.
    pub repeat_penalty: f32,
    /// How many tokens back count as recent.
    pub repeat_last_n: u32,
    /// Taken off the logits of tokens that were generated before, once; 0 is off. -100 to 100, of which OpenAI's interface
    /// has -2 to 2.
    pub presence_penalty: f32,
    /// Taken off the logits of tokens that were generated before, as often as they were; 0 is off. As above.
    pub frequency_penalty: f32,
    /// Added to the logits of tokens: ids and biases, -1000 to 1000, up to [`Sampling::MOST_BIASES`]. With -100 a token hardly
    /// ever comes.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Tell of each token how likely it was, and which tokens were the likeliest, so many of them: 0 to
    /// [`GenerateOptions::MOST_LOGPROBS`]; see [`Piece::logprobs`](super::Piece::logprobs). One token is computed at a time
    /// then. Not with drafts.
    pub logprobs: Option<u32>,
    /// Seed of the draws: the same seed, options and model give the same text on the same device.
    pub seed: u64,
    /// Texts that end the generation; they are not part of the output. Up to [`GenerateOptions::MOST_STOPS`], of up to
    /// [`GenerateOptions::MOST_STOP_BYTES`] each. Of several the one that is complete first counts, and of those the longest.
    pub stop: Vec<String>,
    /// Tokens that end the generation besides those that end a text, such as the one that ends a turn of a chat.
    pub stop_ids: Vec<u32>,
    /// Whether to go on past the tokens that end a text, and past `stop_ids`.
    pub ignore_eos: bool,
    /// What to do when the context is full.
    pub context_policy: ContextPolicy,
    /// Tokens that one submission to a GPU computes, 1 to 16: more cost less time each and come in bursts. The text is
    /// the same. [`Model::tokens_per_submit`](super::Model::tokens_per_submit) if `None`; the CPU takes one at a time.
    pub tokens_per_submit: Option<u32>,
    /// Tokens to draft at most by prompt look-up, 0 to [`GenerateOptions::MAX_DRAFT_TOKENS`]; 0 is off. What followed the last
    /// tokens when they came up before is computed in one pass with them, and as much of it is kept as the model would have
    /// chosen, which pays where a text repeats much of its prompt. Tokens must not be drawn, penalised or constrained. Every step
    /// waits for the one before. A generation whose kernels are timed computes one token after the other all the same.
    pub prompt_lookup: u32,
    /// Tokens to draft at most by the model's own MTP head, 0 to [`GenerateOptions::MAX_DRAFT_TOKENS`]; 0 is off. The
    /// model must have one and be loaded with it ([`LoadOptions::mtp_tokens`](super::LoadOptions::mtp_tokens)). They are
    /// verified in one pass, as those of `prompt_lookup`, which come first where there are some, and under the same conditions.
    pub mtp_tokens: u32,
    /// Submissions to a GPU that are in flight, the one that is being read included, 1 to 8. The text is the same. If
    /// `None`, 2 to 8, as many as keep the GPU busy by what was measured of the session; a model with states of a fixed size
    /// has room for fewer. The CPU has one.
    pub submits_in_flight: Option<u32>,
    /// What the text must match. Tokens that it forbids are never chosen; the tokens that end a text may come where it is
    /// complete, and where nothing may follow the generation ends by itself
    /// ([`StopReason::Complete`](super::StopReason::Complete)). A stop text, the end of the context or `max_tokens` may end the
    /// text before it is complete. One token is computed at a time, whatever the two options above say; what can only be one
    /// text is computed in one pass. Not with drafts.
    #[cfg(feature = "grammar")]
    pub constraint: Option<Constraint>,
}

impl Default for GenerateOptions {
    /// 256 tokens, temperature 0.8, top-k 40, top-p 0.95, min-p 0.05, no penalty, seed 0.
    fn default() -> Self {
        GenerateOptions {
            max_tokens: 256,
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            logprobs: None,
            seed: 0,
            stop: Vec::new(),
            stop_ids: Vec::new(),
            ignore_eos: false,
            context_policy: ContextPolicy::Stop,
            tokens_per_submit: None,
            submits_in_flight: None,
            prompt_lookup: 0,
            mtp_tokens: 0,
            #[cfg(feature = "grammar")]
            constraint: None,
        }
    }
}

impl GenerateOptions {
    /// Guesses that one pass verifies at most.
    pub const MAX_DRAFT_TOKENS: u32 = VERIFIED_ROWS - 1;

    /// Likeliest tokens that are told at most.
    pub const MOST_LOGPROBS: u32 = 100;

    /// Texts at most that end a generation: each is compared with every byte of the text.
    pub const MOST_STOPS: usize = 128;

    /// Bytes at most of a text that ends a generation: as many may be held back.
    pub const MOST_STOP_BYTES: usize = 1024;

    /// Always the most likely token, up to `max_tokens`.
    pub fn greedy(max_tokens: usize) -> Self {
        GenerateOptions { max_tokens, temperature: 0.0, ..GenerateOptions::default() }
    }

    /// Refuses values out of range.
    ///
    /// # Errors
    /// [`Error::Option`] naming the option.
    pub fn check(&self) -> Result<(), Error> {
        let check = |option, ok: bool, expected: &str, found: f32| match ok {
            true => Ok(()),
            false => Err(Error::Option { option, expected: expected.into(), found: found.to_string() }),
        };
        let t = self.temperature;
        // Below a thousandth, quotients of logits could overflow; that cold, the draw is greedy anyway.
        check("temperature", t == 0.0 || (0.001..=100.0).contains(&t), "0, or 0.001 to 100", t)?;
        check("top_p", self.top_p > 0.0 && self.top_p <= 1.0, "above 0 to 1", self.top_p)?;
        check("min_p", (0.0..=1.0).contains(&self.min_p), "0 to 1", self.min_p)?;
        let penalty = self.repeat_penalty;
        check("repeat_penalty", penalty > 0.0 && penalty <= 100.0, "above 0 to 100", penalty)?;
        for (option, penalty) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            check(option, (-100.0..=100.0).contains(&penalty), "-100 to 100", penalty)?;
        }
        for (id, &bias) in &self.logit_bias {
            let expected = format!("for the token {id} -1000 to 1000");
            check("logit_bias", (-1000.0..=1000.0).contains(&bias), &expected, bias)?;
        }
        if self.logit_bias.len() > Sampling::MOST_BIASES as usize {
            let expected = format!("at most {} tokens", Sampling::MOST_BIASES);
            return Err(Error::Option { option: "logit_bias", expected, found: self.logit_bias.len().to_string() });
        }
        if let Some(n) = self.logprobs.filter(|&n| n > Self::MOST_LOGPROBS) {
            let expected = format!("at most {}", Self::MOST_LOGPROBS);
            return Err(Error::Option { option: "logprobs", expected, found: n.to_string() });
        }
        for (option, n, most) in
            [("tokens_per_submit", self.tokens_per_submit, 16), ("submits_in_flight", self.submits_in_flight, 8)]
        {
            if let Some(found) = n.filter(|n| !(1..=most).contains(n)) {
                let (expected, found) = (format!("1 to {most}"), found.to_string());
                return Err(Error::Option { option, expected, found });
            }
        }
        for (option, n) in self.drafts() {
            self.check_drafts(option, n, self.has_constraint())?;
        }
        self.check_stops()
    }

    fn check_stops(&self) -> Result<(), Error> {
        let refusal = |expected, found| Err(Error::Option { option: "stop", expected, found });
        if self.stop.len() > Self::MOST_STOPS {
            return refusal(format!("at most {} texts", Self::MOST_STOPS), self.stop.len().to_string());
        }
        match self.stop.iter().map(String::len).find(|len| !(1..=Self::MOST_STOP_BYTES).contains(len)) {
            Some(len) => refusal(format!("texts of 1 to {} bytes", Self::MOST_STOP_BYTES), format!("one of {len}")),
            None => Ok(()),
        }
    }

    /// Whether these options say what the text has to match.
    pub(crate) fn has_constraint(&self) -> bool {
        #[cfg(feature = "grammar")]
        return self.constraint.is_some();
        #[cfg(not(feature = "grammar"))]
        false
    }

    /// Tokens that end the text.
    pub(crate) fn end_ids(&self, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
        match self.ignore_eos {
            true => Vec::new(),
            false => tokenizer.iter().flat_map(|t| t.eos_ids()).chain(&self.stop_ids).copied().collect(),
        }
    }

    /// How a pass chooses a token, of all or of those that a token_constraint allows.
    pub(super) fn sampler(&self, is_constrained: bool) -> Sampler {
        Sampler { mask: is_constrained, ..Sampler::of(&self.sampling(0)) }
    }

    /// The options that ask for drafts, and of how many tokens.
    pub(super) fn drafts(&self) -> [(&'static str, u32); 2] {
        [("prompt_lookup", self.prompt_lookup), ("mtp_tokens", self.mtp_tokens)]
    }

    /// Refuses more drafts than a pass verifies, and any where choices are not plainly the most likely tokens.
    pub(super) fn check_drafts(&self, option: &'static str, n: u32, is_constrained: bool) -> Result<(), Error> {
        let is_greedy = self.sampler(is_constrained) == Sampler::default();
        let is_greedy = is_greedy && self.logprobs.is_none();
        let most = if is_greedy { Self::MAX_DRAFT_TOKENS } else { 0 };
        if n <= most {
            return Ok(());
        }
        let expected = match is_greedy {
            true => format!("0 to {most}"),
            false => {
                "0 where tokens are drawn, penalised, biased, constrained or told of; temperature 0 without a penalty"
                    .into()
            }
        };
        Err(Error::Option { option, expected, found: n.to_string() })
    }

    /// Refuses biases of tokens that there are not.
    pub(crate) fn check_biases(&self, vocab_size: u32) -> Result<(), Error> {
        match self.logit_bias.last_key_value() {
            Some((&id, _)) if id >= vocab_size => {
                let expected = format!("token ids below {vocab_size}");
                Err(Error::Option { option: "logit_bias", expected, found: id.to_string() })
            }
            _ => Ok(()),
        }
    }

    /// Ids and the bits of their biases, in turns.
    pub(crate) fn biases(&self) -> Vec<u32> {
        self.logit_bias.iter().flat_map(|(&id, bias)| [id, bias.to_bits()]).collect()
    }

    /// The settings as kernels read them, of a text whose first generated token stands at this position.
    pub(crate) fn sampling(&self, generated_from: u32) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: [self.seed as u32, (self.seed >> 32) as u32],
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            generated_from,
            n_biases: self.logit_bias.len() as u32,
        }
    }
}
