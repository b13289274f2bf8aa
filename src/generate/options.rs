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

/// Calls `$declare!` with the numeric sampling options, which every interface has: documentation, which is also that of
/// the command line and the npm package, name, type, default, placeholder in `--help`, least and greatest value, range
/// in words, and a further condition.
#[doc(hidden)]
#[macro_export]
macro_rules! sampling_numbers {
    ($declare:ident $($others:tt)*) => {
        $declare! {
            // Below a thousandth, quotients of logits could overflow, and sampling is greedy anyway.
            /// Sampling temperature; 0 always takes the most likely token.
            temperature: f32 = 0.8, "T", [0.0, 100.0, "0, or 0.001 to 100", |t| t == 0.0 || t >= 0.001];
            /// Sample from the K most likely tokens; 0 disables.
            top_k: u32 = 40, "K", [0, u32::MAX, "0 or more"];
            /// Sample from the most likely tokens whose probabilities add up to P; 1 disables.
            top_p: f32 = 0.95, "P", [0.0, 1.0, "above 0 to 1", |p| p > 0.0];
            /// Sample from tokens with at least P times the highest probability; 0 disables.
            min_p: f32 = 0.05, "P", [0.0, 1.0, "0 to 1"];
            /// Divide positive and multiply negative logits of recent tokens by X; 1 disables.
            repeat_penalty: f32 = 1.0, "X", [0.0, 100.0, "0.01 to 100", |x| x >= 0.01];
            /// Number of latest tokens that the repetition penalty covers.
            repeat_last_n: u32 = 64, "N", [0, u32::MAX, "0 or more"];
            /// Subtract X from the logit of every token generated before; 0 disables.
            presence_penalty: f32 = 0.0, "X", [-100.0, 100.0, "-100 to 100"];
            /// Subtract X from a token's logit for each time it was generated before; 0 disables.
            frequency_penalty: f32 = 0.0, "X", [-100.0, 100.0, "-100 to 100"];
            $($others)*
        }
    };
}

/// A numeric sampling option.
pub struct SamplingNumber {
    /// Field of [`GenerateOptions`], and name in requests.
    pub name: &'static str,
    /// Whether it is an integer.
    pub is_whole: bool,
    /// Least and greatest value; [`GenerateOptions::check`] is stricter near 0.
    pub bounds: [f64; 2],
    /// The default, as in Rust.
    pub default: &'static str,
    pub set: fn(&mut GenerateOptions, f64),
}

/// Declares the options with their defaults and ranges. Those without a range are no plain numbers, or depend on others.
macro_rules! declare {
    ($(
        $(#[doc = $doc:literal])* $(#[cfg($cfg:meta)])? $(#[serde($serde:meta)])?
        $name:ident: $type:ty = $default:expr
        $(, $value:literal, [$least:expr, $most:expr, $range:literal $(, $holds:expr)?])?
        $(, within [$values:expr, $words:literal])?;
    )*) => {
        /// Sampling and stop options.
        #[derive(Clone, Debug, PartialEq)]
        #[cfg_attr(target_arch = "wasm32", derive(serde::Deserialize), serde(default, rename_all = "camelCase"))]
        pub struct GenerateOptions {$(
            $(#[doc = $doc])*
            #[doc = concat!(" Default: `", stringify!($default), "`.")]
            $(#[doc = concat!(" Range: ", $range, ".")])?
            $(#[doc = concat!(" Range: ", $words, ".")])?
            $(#[cfg($cfg)])?
            $(#[cfg_attr(target_arch = "wasm32", serde($serde))])?
            pub $name: $type,
        )*}

        impl Default for GenerateOptions {
            fn default() -> Self {
                GenerateOptions { $($(#[cfg($cfg)])? $name: $default,)* }
            }
        }

        impl GenerateOptions {
            /// The numeric sampling options.
            #[doc(hidden)]
            pub const NUMBERS: [SamplingNumber; 8] = [$($(SamplingNumber {
                name: stringify!($name),
                is_whole: 0.5 as $type as f32 == 0.0,
                bounds: [$least as f64, $most as f64],
                default: stringify!($default),
                set: |options, value| options.$name = value as $type,
            },)?)*];

            /// The documentation of each option, after a space.
            #[doc(hidden)]
            pub const DOCS: &[(&str, &str)] =
                &[$($(#[cfg($cfg)])? (stringify!($name), concat!($($doc),*)),)*];

            fn check_ranges(&self) -> Result<(), Error> {
                $($(if !($least..=$most).contains(&self.$name) $(|| !($holds)(self.$name))? {
                    return refused(stringify!($name), $range, self.$name);
                })?
                $(if let Some(n) = self.$name.filter(|n| !($values).contains(n)) {
                    return refused(stringify!($name), $words, n);
                })?)*
                Ok(())
            }
        }
    };
}

sampling_numbers! { declare
    /// Maximum number of generated tokens.
    max_tokens: usize = 256;
    /// Biases added to the logits, by token id: -1000 to 1000, up to [`Sampling::MAX_BIASES`]. -100 all but bans a
    /// token.
    #[serde(skip)]
    logit_bias: BTreeMap<u32, f32> = BTreeMap::new();
    /// Number of generated tokens before which no end token can be chosen and no stop string counts; at most
    /// `max_tokens`. A constraint that allows nothing but the end takes precedence. Excludes drafts.
    #[serde(skip)]
    min_tokens: usize = 0;
    /// Report each token's log probability and this many most likely tokens; see
    /// [`Piece::logprobs`](super::Piece::logprobs). Passes then never run ahead. Excludes drafts.
    logprobs: Option<u32> = None, within [0..=GenerateOptions::MAX_LOGPROBS, "at most 100"];
    /// In an engine: report the log probability of each prompt token and this many most likely tokens; see
    /// [`Stream::prompt_logprobs`](crate::engine::Stream::prompt_logprobs). The prompt's cached beginning is not used.
    #[serde(skip)]
    prompt_logprobs: Option<u32> = None, within [0..=GenerateOptions::MAX_LOGPROBS, "at most 100"];
    /// Sampling seed: the same seed, options, model and device generate the same text. `None`: a random one.
    seed: Option<u64> = None;
    /// Stop strings, excluded from the output unless `include_stop` is set. Up to [`GenerateOptions::MAX_STOPS`] of up to
    /// [`GenerateOptions::MAX_STOP_BYTES`] each. The first complete one counts; of several that end together, the
    /// longest.
    stop: Vec<String> = Vec::new();
    /// End tokens besides the model's, such as the one that ends a chat turn.
    stop_ids: Vec<u32> = Vec::new();
    /// Whether the output includes the stop string, or the text of the end token, that ended it.
    #[serde(skip)]
    include_stop: bool = false;
    /// Whether to continue past the model's end tokens. Those of `stop_ids` still end the text.
    ignore_eos: bool = false;
    /// Whether special tokens have no text; otherwise their names are part of the output.
    #[serde(skip)]
    skip_special_tokens: bool = true;
    /// What to do when the context is full.
    #[serde(skip)]
    context_policy: ContextPolicy = ContextPolicy::Stop;
    /// Tokens per GPU submission: more take less time each but arrive in bursts. Output is unchanged.
    /// `None`: [`Model::tokens_per_submit`](super::Model::tokens_per_submit). The CPU computes one at a time.
    tokens_per_submit: Option<u32> = None, within [1..=16, "1 to 16"];
    /// Maximum draft tokens by prompt lookup, 0 to [`GenerateOptions::MAX_DRAFT_TOKENS`]; 0 is off. One pass
    /// verifies the tokens that followed an earlier occurrence of the latest ones and keeps those that the model
    /// would choose: faster if the output repeats much of the prompt. Requires greedy decoding without penalties,
    /// biases, constraint or logprobs. Passes never run ahead. Ignored while kernels are profiled.
    prompt_lookup: u32 = 0;
    /// Maximum draft tokens by the MTP head, 0 to [`GenerateOptions::MAX_DRAFT_TOKENS`]; 0 is off. Needs
    /// [`LoadOptions::mtp_tokens`](super::LoadOptions::mtp_tokens). Verified as those of `prompt_lookup`, which take
    /// precedence, under the same conditions.
    mtp_tokens: u32 = 0;
    /// GPU submissions in flight, including the one being read. Output is unchanged. `None`: 2 to 8, as
    /// measured to keep the GPU busy; recurrent models have room for fewer. The CPU has one.
    submits_in_flight: Option<u32> = None, within [1..=8, "1 to 8"];
    /// Constraint on the text. Forbidden tokens are never chosen. End tokens are allowed where the text is complete;
    /// where nothing may follow, the generation ends with [`StopReason::Complete`](super::StopReason::Complete). A
    /// stop string, a full context or `max_tokens` may end the text before it is complete. Passes never run ahead,
    /// whatever `tokens_per_submit` and `submits_in_flight` say; one pass computes all forced tokens. Excludes
    /// drafts.
    #[cfg(feature = "grammar")]
    #[serde(skip)]
    constraint: Option<Constraint> = None;
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
        self.check_ranges()?;
        if self.min_tokens > self.max_tokens {
            return refused("min_tokens", format!("at most max_tokens, {}", self.max_tokens), self.min_tokens);
        }
        for (id, &bias) in &self.logit_bias {
            if !(-1000.0..=1000.0).contains(&bias) {
                return refused("logit_bias", format!("-1000 to 1000 for token {id}"), bias);
            }
        }
        if self.logit_bias.len() > Sampling::MAX_BIASES as usize {
            return refused("logit_bias", format!("at most {} tokens", Sampling::MAX_BIASES), self.logit_bias.len());
        }
        for (option, n) in self.drafts() {
            self.check_drafts(option, n, self.has_constraint())?;
        }
        if self.stop.len() > Self::MAX_STOPS {
            return refused("stop", format!("at most {} strings", Self::MAX_STOPS), self.stop.len());
        }
        match self.stop.iter().map(String::len).find(|len| !(1..=Self::MAX_STOP_BYTES).contains(len)) {
            Some(len) => {
                refused("stop", format!("strings of 1 to {} bytes", Self::MAX_STOP_BYTES), format!("one of {len}"))
            }
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

    /// The tokens that end a text: [`GenerateOptions::stop_ids`], and the tokenizer's unless
    /// [`GenerateOptions::ignore_eos`] is set.
    pub fn end_ids(&self, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
        let own = tokenizer.filter(|_| !self.ignore_eos).into_iter().flat_map(|tokenizer| tokenizer.eos_ids());
        own.chain(&self.stop_ids).copied().collect()
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
        let is_greedy = is_greedy && self.logprobs.is_none() && self.min_tokens == 0;
        let most = if is_greedy { Self::MAX_DRAFT_TOKENS } else { 0 };
        if n <= most {
            return Ok(());
        }
        let expected = match is_greedy {
            true => format!("0 to {most}"),
            false => "0: speculation requires greedy decoding (temperature 0) without penalties, biases, constraint, logprobs or min_tokens".into(),
        };
        refused(option, expected, n)
    }

    /// Refuses biases of unknown tokens.
    pub(crate) fn check_biases(&self, vocab_size: u32) -> Result<(), Error> {
        match self.logit_bias.last_key_value() {
            Some((id, _)) if *id >= vocab_size => refused("logit_bias", format!("token ids below {vocab_size}"), id),
            _ => Ok(()),
        }
    }

    /// Token ids and bit patterns of their biases, alternating.
    pub(crate) fn biases(&self) -> Vec<u32> {
        self.logit_bias.iter().flat_map(|(&id, bias)| [id, bias.to_bits()]).collect()
    }

    /// The kernels' sampling parameters without the seed, for a completion that starts at position `generated_from`.
    pub(crate) fn sampling(&self, generated_from: u32) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: [0; 2],
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            generated_from,
            n_biases: self.logit_bias.len() as u32,
        }
    }
}

fn refused(option: &'static str, expected: impl Into<String>, found: impl ToString) -> Result<(), Error> {
    Err(Error::Option { option, expected: expected.into(), found: found.to_string() })
}
