//! Options of a generation.

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
    /// Refuse a prompt that does not fit; end a generation at the limit with
    /// [`StopReason::ContextFull`](super::StopReason::ContextFull).
    #[default]
    Stop,
    /// Keep the first token and the latest half of the context, recompute them and continue. A prompt that does not
    /// fit loses its middle in the same way.
    Slide,
}

/// Sampling and stop options.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Maximum number of generated tokens.
    pub max_tokens: usize,
    /// Divides the logits before sampling; 0 is greedy. 0 to 100.
    pub temperature: f32,
    /// Samples from the k most likely tokens; 0 is off.
    pub top_k: u32,
    /// Samples from the most likely tokens whose probabilities sum to this; 1 is off. Above 0 to 1.
    pub top_p: f32,
    /// Samples from tokens with at least this fraction of the highest probability; 0 is off. 0 to 1.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens; 1 is off. Above 0 to 100.
    pub repeat_penalty: f32,
    /// Number of latest tokens that `repeat_penalty` covers.
    pub repeat_last_n: u32,
    /// Subtracted from the logits of tokens generated before; 0 is off. -100 to 100; OpenAI's API allows -2 to 2.
    pub presence_penalty: f32,
    /// Subtracted once per earlier occurrence among the generated tokens; 0 is off. Range as `presence_penalty`.
    pub frequency_penalty: f32,
    /// Biases added to the logits, by token id: -1000 to 1000, up to [`Sampling::MAX_BIASES`]. -100 all but bans a
    /// token.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Report each token's log probability and this many most likely tokens, 0 to
    /// [`GenerateOptions::MAX_LOGPROBS`]; see [`Piece::logprobs`](super::Piece::logprobs). Passes then never run
    /// ahead. Excludes drafts.
    pub logprobs: Option<u32>,
    /// Sampling seed: the same seed, options, model and device generate the same text.
    pub seed: u64,
    /// Stop strings, excluded from the output. Up to [`GenerateOptions::MAX_STOPS`] of up to
    /// [`GenerateOptions::MAX_STOP_BYTES`] each. The first complete one counts; of several that end together, the
    /// longest.
    pub stop: Vec<String>,
    /// End tokens besides the model's, such as the one that ends a chat turn.
    pub stop_ids: Vec<u32>,
    /// Whether to continue past end tokens, including `stop_ids`.
    pub ignore_eos: bool,
    /// What to do when the context is full.
    pub context_policy: ContextPolicy,
    /// Tokens per GPU submission, 1 to 16: more take less time each but arrive in bursts. Output is unchanged.
    /// `None`: [`Model::tokens_per_submit`](super::Model::tokens_per_submit). The CPU computes one at a time.
    pub tokens_per_submit: Option<u32>,
    /// Maximum draft tokens by prompt lookup, 0 to [`GenerateOptions::MAX_DRAFT_TOKENS`]; 0 is off. One pass
    /// verifies the tokens that followed an earlier occurrence of the latest ones and keeps those that the model
    /// would choose: faster if the output repeats much of the prompt. Requires greedy decoding without penalties,
    /// biases, constraint or logprobs. Passes never run ahead. Ignored while kernels are profiled.
    pub prompt_lookup: u32,
    /// Maximum draft tokens by the MTP head, 0 to [`GenerateOptions::MAX_DRAFT_TOKENS`]; 0 is off. Needs
    /// [`LoadOptions::mtp_tokens`](super::LoadOptions::mtp_tokens). Verified as those of `prompt_lookup`, which take
    /// precedence, under the same conditions.
    pub mtp_tokens: u32,
    /// GPU submissions in flight, including the one being read, 1 to 8. Output is unchanged. `None`: 2 to 8, as
    /// measured to keep the GPU busy; recurrent models have room for fewer. The CPU has one.
    pub submits_in_flight: Option<u32>,
    /// Constraint on the text. Forbidden tokens are never chosen. End tokens are allowed where the text is complete;
    /// where nothing may follow, the generation ends with [`StopReason::Complete`](super::StopReason::Complete). A
    /// stop string, a full context or `max_tokens` may end the text before it is complete. Passes never run ahead,
    /// whatever `tokens_per_submit` and `submits_in_flight` say; one pass computes all forced tokens. Excludes
    /// drafts.
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
    /// Maximum number of draft tokens that one pass verifies.
    pub const MAX_DRAFT_TOKENS: u32 = VERIFIED_ROWS - 1;

    /// Maximum of [`GenerateOptions::logprobs`](field@GenerateOptions::logprobs).
    pub const MAX_LOGPROBS: u32 = 100;

    /// Maximum number of stop strings: each is compared with every byte of the text.
    pub const MAX_STOPS: usize = 128;

    /// Maximum bytes of a stop string: as many may be held back.
    pub const MAX_STOP_BYTES: usize = 1024;

    /// Greedy decoding of up to `max_tokens` tokens.
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
        // Below a thousandth, quotients of logits could overflow, and sampling is greedy anyway.
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
            let expected = format!("-1000 to 1000 for token {id}");
            check("logit_bias", (-1000.0..=1000.0).contains(&bias), &expected, bias)?;
        }
        if self.logit_bias.len() > Sampling::MAX_BIASES as usize {
            let expected = format!("at most {} tokens", Sampling::MAX_BIASES);
            return Err(Error::Option { option: "logit_bias", expected, found: self.logit_bias.len().to_string() });
        }
        if let Some(n) = self.logprobs.filter(|&n| n > Self::MAX_LOGPROBS) {
            let expected = format!("at most {}", Self::MAX_LOGPROBS);
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
        if self.stop.len() > Self::MAX_STOPS {
            return refusal(format!("at most {} strings", Self::MAX_STOPS), self.stop.len().to_string());
        }
        match self.stop.iter().map(String::len).find(|len| !(1..=Self::MAX_STOP_BYTES).contains(len)) {
            Some(len) => refusal(format!("strings of 1 to {} bytes", Self::MAX_STOP_BYTES), format!("one of {len}")),
            None => Ok(()),
        }
    }

    /// Whether these options constrain the text.
    pub(crate) fn has_constraint(&self) -> bool {
        #[cfg(feature = "grammar")]
        return self.constraint.is_some();
        #[cfg(not(feature = "grammar"))]
        false
    }

    /// The tokens that end a text: the tokenizer's and [`GenerateOptions::stop_ids`]. None with
    /// [`GenerateOptions::ignore_eos`].
    pub fn end_ids(&self, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
        match self.ignore_eos {
            true => Vec::new(),
            false => tokenizer.iter().flat_map(|t| t.eos_ids()).chain(&self.stop_ids).copied().collect(),
        }
    }

    /// How a pass chooses a token, with a bitmask if there is a constraint.
    pub(super) fn sampler(&self, is_constrained: bool) -> Sampler {
        Sampler { mask: is_constrained, ..Sampler::of(&self.sampling(0)) }
    }

    /// The draft options and their values.
    pub(super) fn drafts(&self) -> [(&'static str, u32); 2] {
        [("prompt_lookup", self.prompt_lookup), ("mtp_tokens", self.mtp_tokens)]
    }

    /// Refuses more drafts than a pass verifies, and any unless decoding is plainly greedy.
    pub(super) fn check_drafts(&self, option: &'static str, n: u32, is_constrained: bool) -> Result<(), Error> {
        let is_greedy = self.sampler(is_constrained) == Sampler::default();
        let is_greedy = is_greedy && self.logprobs.is_none();
        let most = if is_greedy { Self::MAX_DRAFT_TOKENS } else { 0 };
        if n <= most {
            return Ok(());
        }
        let expected = match is_greedy {
            true => format!("0 to {most}"),
            false => "0: speculation requires greedy decoding (temperature 0) without penalties, biases, constraint or logprobs".into(),
        };
        Err(Error::Option { option, expected, found: n.to_string() })
    }

    /// Refuses biases of unknown tokens.
    pub(crate) fn check_biases(&self, vocab_size: u32) -> Result<(), Error> {
        match self.logit_bias.last_key_value() {
            Some((&id, _)) if id >= vocab_size => {
                let expected = format!("token ids below {vocab_size}");
                Err(Error::Option { option: "logit_bias", expected, found: id.to_string() })
            }
            _ => Ok(()),
        }
    }

    /// Token ids and bit patterns of their biases, alternating.
    pub(crate) fn biases(&self) -> Vec<u32> {
        self.logit_bias.iter().flat_map(|(&id, bias)| [id, bias.to_bits()]).collect()
    }

    /// The kernels' sampling parameters, for a completion that starts at position `generated_from`.
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
