//! Beam search for the most likely completions.
//!
//! Each step extends every beam by its most likely tokens and keeps the best of all these continuations. Each beam
//! has a session; a beam that continues in two ways is copied on the device.

use super::logprobs::{likeliest, log_sum_exp};
use super::{GenerateOptions, Model, Session};
use crate::error::Error;

/// Options of a beam search.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamOptions {
    /// Number of beams, and maximum number of results: 1 to 32. Each has a KV cache on the device.
    pub width: usize,
    /// Maximum number of tokens of a completion.
    pub max_tokens: usize,
    /// Exponent of the length by which log probabilities are divided: 0 prefers short completions, 1 compares means.
    /// 0 to 10.
    pub length_penalty: f32,
    /// End tokens besides the model's, also with `ignore_eos`.
    pub stop_ids: Vec<u32>,
    /// Whether to continue past the model's end tokens.
    pub ignore_eos: bool,
}

impl Default for BeamOptions {
    /// Four beams of 256 tokens, compared by mean log probability.
    fn default() -> Self {
        BeamOptions { width: 4, max_tokens: 256, length_penalty: 1.0, stop_ids: Vec::new(), ignore_eos: false }
    }
}

impl BeamOptions {
    /// Maximum of [`BeamOptions::width`].
    pub const MAX_WIDTH: usize = 32;

    fn check(&self) -> Result<(), Error> {
        let wrong = |option, expected: String, found: String| Err(Error::Option { option, expected, found });
        if !(1..=Self::MAX_WIDTH).contains(&self.width) {
            return wrong("width", format!("1 to {}", Self::MAX_WIDTH), self.width.to_string());
        }
        if !(0.0..=10.0).contains(&self.length_penalty) {
            return wrong("length_penalty", "0 to 10".into(), self.length_penalty.to_string());
        }
        Ok(())
    }

    fn score(&self, logprob: f64, n_tokens: usize) -> f64 {
        logprob / (n_tokens.max(1) as f64).powf(self.length_penalty.into())
    }
}

/// A completion found by beam search.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Beam {
    /// Generated tokens, including the end token, if any.
    pub ids: Vec<u32>,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// Length-normalised log probability, see [`BeamOptions::length_penalty`].
    pub score: f64,
    /// Whether an end token ended it.
    pub ended: bool,
}

/// A beam in progress.
struct Live {
    session: Session,
    ids: Vec<u32>,
    logprob: f64,
    /// Logits of its next token.
    logits: Vec<f32>,
}

impl Model {
    /// Searches for the most likely completions of a prompt: best first, up to `width`. Ends when no beam in
    /// progress is better than the worst of `width` ended ones, or by the options.
    ///
    /// # Errors
    /// [`Error::Option`] for options out of range; [`Error::Memory`] if the beams exceed the limit; errors of
    /// [`Session::logits`]; [`Error::NonFinite`] if a logit is NaN.
    pub async fn beam_search(&self, prompt: &[u32], options: &BeamOptions) -> Result<Vec<Beam>, Error> {
        options.check()?;
        self.check_beams_fit(options.width as u64)?;
        let BeamOptions { ignore_eos, ref stop_ids, .. } = *options;
        let ends = GenerateOptions { ignore_eos, stop_ids: stop_ids.clone(), ..GenerateOptions::default() };
        let end_ids = ends.end_ids(self.tokenizer().ok());
        let mut session = self.session()?;
        let room = (self.context_length() as usize).saturating_sub(prompt.len());
        let logits = session.logits(prompt).await?;
        let mut live = vec![Live { session, ids: Vec::new(), logprob: 0.0, logits }];
        // Sessions of dropped beams.
        let mut idle: Vec<Session> = Vec::new();
        let mut ended: Vec<Beam> = Vec::new();
        for n_tokens in 1..=options.max_tokens.min(room.saturating_add(1)) {
            let chosen = best_continuations(&live, options, &end_ids, &mut ended)?;
            let worst = ended.get(options.width - 1).map(|beam| beam.score);
            let best = chosen.first().map(|next| options.score(next.logprob, n_tokens));
            if best.is_none() || worst.zip(best).is_some_and(|(worst, best)| worst >= best) {
                live.clear();
                break;
            }
            live = self.go_on(live, &mut idle, chosen).await?;
            if n_tokens == options.max_tokens || n_tokens > room {
                break;
            }
            for beam in &mut live {
                let last = beam.ids.last().copied();
                beam.logits = beam.session.logits(last.as_slice()).await?;
            }
        }
        let rest = live.into_iter().map(|Live { ids, logprob, .. }| {
            let score = options.score(logprob, ids.len());
            Beam { ids, logprob, score, ended: false }
        });
        ended.extend(rest);
        ended.sort_by(|a, b| b.score.total_cmp(&a.score));
        ended.truncate(options.width);
        Ok(ended)
    }

    /// Each beam has a session, and one that continues in two ways a copy of its cache.
    fn check_beams_fit(&self, width: u64) -> Result<(), Error> {
        let mut plan = self.plan();
        plan.cache_bytes = plan.cache_bytes.saturating_mul(width + width / 2);
        plan.activations_bytes = plan.activations_bytes.saturating_mul(width);
        self.check_fits(&plan, "use a shorter context or fewer beams")
    }

    /// Makes the next beams, each with its parent's session or a copy of it.
    async fn go_on(
        &self,
        live: Vec<Live>,
        idle: &mut Vec<Session>,
        chosen: Vec<BeamCandidate>,
    ) -> Result<Vec<Live>, Error> {
        let mut next = Vec::with_capacity(chosen.len());
        for (parent, Live { session, ids, .. }) in live.into_iter().enumerate() {
            let mut session = Some(session);
            let mut snapshot = None;
            let children: Vec<&BeamCandidate> = chosen.iter().filter(|next| next.parent == parent).collect();
            for (i, &&BeamCandidate { id, logprob, .. }) in children.iter().enumerate() {
                if let (Some(session), None, true) = (&session, &snapshot, i + 1 < children.len()) {
                    snapshot = Some(session.snapshot()?);
                }
                // The last child takes the parent's session.
                let own = match &snapshot {
                    Some(snapshot) if i + 1 < children.len() => {
                        let mut copy = idle.pop().map_or_else(|| self.session(), Ok)?;
                        copy.restore(snapshot)?;
                        Some(copy)
                    }
                    _ => session.take(),
                };
                let Some(session) = own else { continue };
                let ids = ids.iter().copied().chain([id]).collect();
                next.push(Live { session, ids, logprob, logits: Vec::new() });
            }
            idle.extend(session);
        }
        Ok(next)
    }
}

/// A beam's continuation by one token.
struct BeamCandidate {
    parent: usize,
    id: u32,
    logprob: f64,
}

/// The best continuations, best first. Those by an end token move to `ended`.
fn best_continuations(
    live: &[Live],
    options: &BeamOptions,
    end_ids: &[u32],
    ended: &mut Vec<Beam>,
) -> Result<Vec<BeamCandidate>, Error> {
    // Enough to fill the beams even if all end tokens are among the best.
    let n_each = options.width * (1 + end_ids.len());
    let mut all = Vec::new();
    for (parent, Live { logprob, logits, session, .. }) in live.iter().enumerate() {
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(Error::NonFinite { pos: session.tokens().len() as u32 });
        }
        let normalizer = log_sum_exp(logits);
        let of_parent = likeliest(logits, n_each).into_iter();
        all.extend(of_parent.map(|(id, logit)| BeamCandidate {
            parent,
            id,
            logprob: logprob + f64::from(logit) - normalizer,
        }));
    }
    // Stable among equals: earlier beams, then lower ids.
    all.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
    let mut chosen = Vec::new();
    for (rank, next) in all.into_iter().enumerate() {
        if chosen.len() == options.width {
            break;
        }
        if !end_ids.contains(&next.id) {
            chosen.push(next);
        } else if rank < options.width {
            let ids: Vec<u32> = live[next.parent].ids.iter().copied().chain([next.id]).collect();
            let score = options.score(next.logprob, ids.len());
            ended.push(Beam { ids, logprob: next.logprob, score, ended: true });
        }
    }
    ended.sort_by(|a, b| b.score.total_cmp(&a.score));
    Ok(chosen)
}
