//! Perplexity of a text, and divergence from another model's predictions, computed as by llama.cpp's
//! `llama-perplexity`.
//!
//! ```text
//! text -> tokens -> windows of n_ctx tokens, each beginning with BOS if the model's texts do
//! each window -> logits of its second half -> negative log likelihood of each next token
//! ```
//! The second half alone is scored, so that each prediction has at least half a window before it.

mod reference;

use std::path::Path;

use serde::Serialize;

use super::log_sum_exp;
use super::scoring::LogitRows;
use super::{Model, Session};
use crate::cpu::for_each_chunk;
use crate::error::Error;
pub use reference::ReferenceLogprobs;
use reference::{Packed, RecordedLogprobs};

/// Windows of a text's tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextWindows {
    /// The tokens of all windows, one after the other.
    ids: Vec<u32>,
    /// Tokens per window.
    n_ctx: usize,
}

impl TextWindows {
    /// Fewest tokens of a window: one of its second half is scored.
    pub const SHORTEST: usize = 4;

    /// Cuts a text into windows of `n_ctx` tokens, at most `max_windows` of them, and drops the rest.
    ///
    /// # Errors
    /// [`Error::Option`] for a window of fewer than [`TextWindows::SHORTEST`] tokens, or more than the text has or the
    /// model's sessions hold; [`Error::Tokenizer`] without a tokenizer.
    pub fn new(model: &Model, text: &str, n_ctx: usize, max_windows: Option<usize>) -> Result<TextWindows, Error> {
        TextWindows::of_tokens(model, model.encode(text)?, n_ctx, max_windows)
    }

    /// As [`TextWindows::new`], of a text's tokens.
    ///
    /// # Errors
    /// As [`TextWindows::new`].
    pub fn of_tokens(
        model: &Model,
        mut ids: Vec<u32>,
        n_ctx: usize,
        max_windows: Option<usize>,
    ) -> Result<TextWindows, Error> {
        check_window(model, n_ctx)?;
        let n_windows = (ids.len() / n_ctx).min(max_windows.unwrap_or(usize::MAX));
        if n_windows == 0 {
            let expected = format!("at most the text's {} tokens: a shorter window or a longer text", ids.len());
            return Err(Error::Option { option: "n_ctx", expected, found: n_ctx.to_string() });
        }
        ids.truncate(n_windows * n_ctx);
        Ok(TextWindows { ids, n_ctx })
    }

    /// Number of windows.
    pub fn len(&self) -> usize {
        self.ids.len() / self.n_ctx
    }

    /// Always false.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Tokens per window.
    pub fn n_ctx(&self) -> usize {
        self.n_ctx
    }

    /// The tokens of a window, which begin with `bos` if there is one.
    pub(super) fn window(&self, i: usize, bos: Option<u32>) -> Option<Vec<u32>> {
        let mut ids = self.ids.get(i * self.n_ctx..(i + 1) * self.n_ctx)?.to_vec();
        ids[0] = bos.unwrap_or(ids[0]);
        Some(ids)
    }

    /// First token of a window whose logits count.
    fn first_scored(&self) -> usize {
        self.n_ctx / 2
    }

    /// Predictions per window that are scored: the last token's next one is unknown.
    pub fn n_scored(&self) -> usize {
        self.n_ctx - 1 - self.first_scored()
    }
}

/// Refuses windows that are too short, or longer than a session.
fn check_window(model: &Model, n_ctx: usize) -> Result<(), Error> {
    let most = model.context_length() as usize;
    match (TextWindows::SHORTEST..=most).contains(&n_ctx) {
        true => Ok(()),
        false => Err(Error::Option {
            option: "ctx",
            expected: format!("{} to {most} tokens", TextWindows::SHORTEST),
            found: n_ctx.to_string(),
        }),
    }
}

/// What happens to predictions besides scoring.
enum Extra {
    Nothing,
    /// They are written to a file.
    Record(RecordedLogprobs),
    /// They are compared with those in a file.
    Compare(Box<ReferenceLogprobs>, Divergences),
}

/// A run over all windows of a text.
pub struct PerplexityRun {
    session: Session,
    windows: TextWindows,
    bos: Option<u32>,
    extra: Extra,
    n_done: usize,
    likelihood: Moments,
}

/// Perplexity: `e` to the mean negative log likelihood per token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Perplexity {
    /// Windows so far.
    pub windows: usize,
    /// Scored tokens.
    pub tokens: usize,
    /// Mean negative log likelihood per token, natural logarithm.
    pub nll: Estimate,
    /// The perplexity.
    pub perplexity: Estimate,
}

/// A mean with its standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub value: f64,
    /// Standard error.
    pub error: f64,
}

/// How a model's predictions differ from those of a reference model, over the scored tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Divergence {
    /// The reference's perplexity.
    pub reference: Estimate,
    /// Perplexity divided by the reference's.
    pub ratio: Estimate,
    /// Natural logarithm of the ratio.
    pub log_ratio: Estimate,
    /// Correlation of both models' log likelihoods.
    pub correlation: f64,
    /// Kullback-Leibler divergence of the reference's distribution from the model's.
    pub kl: Estimate,
    /// Share of tokens for which both models have the same most likely token.
    pub same_top: Estimate,
    /// Mean change in the probability of the right token.
    pub delta_p: Estimate,
    /// Root of the mean squared change in that probability.
    pub delta_p_rms: Estimate,
    /// Quantiles of the divergence, lowest first.
    pub kl_quantiles: Vec<Quantile>,
    /// Quantiles of the change in probability, lowest first.
    pub delta_p_quantiles: Vec<Quantile>,
}

/// A value that a share of all values does not exceed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quantile {
    /// Share of the values, 0 to 1.
    pub share: f64,
    /// The value, interpolated.
    pub value: f64,
}

impl PerplexityRun {
    /// A run over a text with a session of the model.
    ///
    /// # Errors
    /// [`Error::Option`] if the windows are longer than the model's sessions; as [`Model::session`].
    pub fn new(model: &Model, windows: TextWindows) -> Result<PerplexityRun, Error> {
        check_window(model, windows.n_ctx)?;
        let bos = window_bos(model);
        let session = model.session()?;
        Ok(PerplexityRun { session, windows, bos, extra: Extra::Nothing, n_done: 0, likelihood: Moments::default() })
    }

    /// Also writes the predictions to a file, for [`PerplexityRun::compared`]. It is complete after the last window.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be written.
    pub fn recorded(self, path: &Path) -> Result<PerplexityRun, Error> {
        let vocab_size = self.session.model().config().vocab_size;
        let recorded = RecordedLogprobs::create(path, vocab_size, &self.windows)?;
        Ok(PerplexityRun { extra: Extra::Record(recorded), ..self })
    }

    /// A run over the windows of recorded predictions that compares the model's own with them.
    ///
    /// # Errors
    /// [`Error::Option`] if the windows are longer than the model's sessions, [`Error::Config`] if the vocabularies
    /// differ; as [`PerplexityRun::new`].
    pub fn compared(model: &Model, reference: ReferenceLogprobs) -> Result<PerplexityRun, Error> {
        reference.check_vocab(model.config().vocab_size)?;
        let run = PerplexityRun::new(model, reference.windows().clone())?;
        Ok(PerplexityRun { extra: Extra::Compare(Box::new(reference), Divergences::default()), ..run })
    }

    /// The windows.
    pub fn windows(&self) -> &TextWindows {
        &self.windows
    }

    /// Scores the next window and returns the perplexity so far; `None` after the last one.
    ///
    /// # Errors
    /// As [`Session::logits`]; [`Error::Io`] and [`Error::Format`] of the recorded predictions;
    /// [`Error::NonFinite`] if logits are not finite.
    pub async fn next_window(&mut self) -> Result<Option<Perplexity>, Error> {
        let Some(ids) = self.windows.window(self.n_done, self.bos) else { return Ok(None) };
        let (n_ctx, first) = (ids.len(), self.windows.first_scored());
        let PerplexityRun { session, extra, likelihood, .. } = self;
        session.clear();
        let (fed, next) = (&ids[..n_ctx - 1], &ids[1..]);
        let mut score = |rows: LogitRows<'_>| score_rows(rows, next, extra, likelihood);
        session.logits_of_all(fed, first, &mut score).await?;
        self.n_done += 1;
        if self.n_done == self.windows.len()
            && matches!(self.extra, Extra::Record(_))
            && let Extra::Record(recorded) = std::mem::replace(&mut self.extra, Extra::Nothing)
        {
            recorded.finish()?;
        }
        Ok(Some(self.perplexity()))
    }

    /// The perplexity of the windows scored so far.
    pub fn perplexity(&self) -> Perplexity {
        let nll = self.likelihood.estimate();
        let value = nll.value.exp();
        let perplexity = Estimate { value, error: nll.error * value };
        Perplexity { windows: self.n_done, tokens: self.likelihood.n, nll, perplexity }
    }

    /// The divergence from the recorded predictions, so far; `None` if they are not compared.
    pub fn divergence(&self) -> Option<Divergence> {
        match &self.extra {
            Extra::Compare(_, divergences) => Some(divergences.summary(self.likelihood)),
            Extra::Nothing | Extra::Record(_) => None,
        }
    }
}

/// The token that replaces each window's first, if the model's texts begin with it.
pub(super) fn window_bos(model: &Model) -> Option<u32> {
    let tokenizer = model.tokenizer().ok()?;
    tokenizer.bos_id().filter(|_| tokenizer.adds_bos().unwrap_or(false))
}

/// A scored row.
#[derive(Clone, Copy, Debug, Default)]
struct ScoredRow {
    nll: f64,
    compared: Option<ComparedRow>,
}

/// Scores rows, in parallel; `next` has the token after each of the window's tokens.
fn score_rows(rows: LogitRows<'_>, next: &[u32], extra: &mut Extra, likelihood: &mut Moments) -> Result<(), Error> {
    let LogitRows { first, logits, vocab_size } = rows;
    let n_rows = logits.len() / vocab_size;
    let row = |i: usize| (&logits[i * vocab_size..][..vocab_size], next[first + i] as usize);
    let mut scored = vec![ScoredRow::default(); n_rows];
    let ops = 8 * logits.len();
    match extra {
        Extra::Nothing => for_each_chunk(&mut scored, 1, ops, |i, scored| {
            let (row, next) = row(i);
            scored[0].nll = log_sum_exp(row) - f64::from(row[next]);
        }),
        Extra::Record(recorded) => {
            let mut packed = vec![Packed::default(); n_rows];
            for_each_chunk(&mut packed, 1, ops, |i, packed| packed[0] = Packed::of(row(i).0));
            for (i, (packed, scored)) in packed.iter().zip(&mut scored).enumerate() {
                let (row, next) = row(i);
                scored.nll = packed.log_sum_exp - f64::from(row[next]);
                recorded.write(packed)?;
            }
        }
        Extra::Compare(reference, _) => {
            let bases = reference.read(n_rows)?;
            for_each_chunk(&mut scored, 1, ops, |i, scored| {
                let (row, next) = row(i);
                let log_sum = log_sum_exp(row);
                let nll = log_sum - f64::from(row[next]);
                scored[0] = ScoredRow { nll, compared: Some(ComparedRow::of(row, log_sum, next, bases.row(i))) };
            });
        }
    }
    for (i, scored) in scored.iter().enumerate() {
        if !scored.nll.is_finite() {
            return Err(Error::NonFinite { pos: (first + i) as u32 });
        }
        likelihood.add(scored.nll);
        if let (Extra::Compare(_, divergences), Some(compared)) = (&mut *extra, scored.compared) {
            divergences.add(scored.nll, compared);
        }
    }
    Ok(())
}

/// Sums of values and squares.
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    n: usize,
    sum: f64,
    squares: f64,
}

impl Moments {
    fn add(&mut self, value: f64) {
        self.n += 1;
        self.sum += value;
        self.squares += value * value;
    }

    /// The mean and its standard error.
    fn estimate(self) -> Estimate {
        let n = self.n.max(1) as f64;
        let value = self.sum / n;
        let variance = (self.squares / n - value * value).max(0.0);
        Estimate { value, error: (variance / (n - 1.0).max(1.0)).sqrt() }
    }
}

/// A prediction beside the reference's.
#[derive(Clone, Copy, Debug)]
struct ComparedRow {
    base_nll: f64,
    kl: f64,
    delta_p: f64,
    same_top: bool,
}

impl ComparedRow {
    /// Compares logits, whose exponentials sum to `e` to the `log_sum`, with a recorded row.
    fn of(row: &[f32], log_sum: f64, next: usize, base: reference::RecordedRow<'_>) -> ComparedRow {
        /// As llama.cpp: recorded log probabilities reach 16 below the highest, and lower ones do not count.
        const LEAST: f32 = -16.0;
        let (mut kl, mut top, mut base_top) = (0.0, (f32::NEG_INFINITY, 0), (f32::NEG_INFINITY, 0));
        for (id, (&logit, base)) in row.iter().zip(base.logprobs()).enumerate() {
            if logit > top.0 {
                top = (logit, id);
            }
            if base > base_top.0 {
                base_top = (base, id);
            }
            if base > LEAST {
                let base = f64::from(base);
                kl += base.exp() * (base - (f64::from(logit) - log_sum));
            }
        }
        let base_nll = -f64::from(base.logprob(next));
        let p = (f64::from(row[next]) - log_sum).exp();
        ComparedRow { base_nll, kl, delta_p: p - (-base_nll).exp(), same_top: top.1 == base_top.1 }
    }
}

/// Sums over compared rows, and their values for quantiles.
#[derive(Debug, Default)]
struct Divergences {
    base: Moments,
    /// Sum of products of both models' negative log likelihoods.
    products: f64,
    kl: Moments,
    delta_p: Moments,
    squared_delta_p: Moments,
    n_same_top: usize,
    kls: Vec<f32>,
    delta_ps: Vec<f32>,
}

impl Divergences {
    fn add(&mut self, nll: f64, row: ComparedRow) {
        self.base.add(row.base_nll);
        self.products += nll * row.base_nll;
        self.kl.add(row.kl);
        self.delta_p.add(row.delta_p);
        self.squared_delta_p.add(row.delta_p * row.delta_p);
        self.n_same_top += usize::from(row.same_top);
        self.kls.push(row.kl as f32);
        self.delta_ps.push(row.delta_p as f32);
    }

    fn summary(&self, likelihood: Moments) -> Divergence {
        let n = likelihood.n.max(1) as f64;
        let (own, base) = (likelihood.estimate(), self.base.estimate());
        let covariance = (self.products / n - own.value * base.value) / (n - 1.0).max(1.0);
        let variance = own.error.powi(2) + base.error.powi(2) - 2.0 * covariance;
        let log_ratio = Estimate { value: own.value - base.value, error: variance.max(0.0).sqrt() };
        let exp = |of: Estimate| Estimate { value: of.value.exp(), error: of.value.exp() * of.error };
        let share = self.n_same_top as f64 / n;
        let squared = self.squared_delta_p.estimate();
        let rms = squared.value.sqrt();
        const KL_SHARES: [f64; 11] = [0.0, 0.001, 0.01, 0.05, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0];
        const DELTA_P_SHARES: [f64; 13] = [0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0];
        Divergence {
            reference: exp(base),
            ratio: exp(log_ratio),
            log_ratio,
            correlation: covariance / (own.error * base.error),
            kl: self.kl.estimate(),
            same_top: Estimate { value: share, error: (share * (1.0 - share) / (n - 1.0).max(1.0)).sqrt() },
            delta_p: self.delta_p.estimate(),
            delta_p_rms: Estimate { value: rms, error: if rms > 0.0 { 0.5 / rms * squared.error } else { 0.0 } },
            kl_quantiles: quantiles(&self.kls, &KL_SHARES),
            delta_p_quantiles: quantiles(&self.delta_ps, &DELTA_P_SHARES),
        }
    }
}

/// Quantiles, interpolated between neighbours.
fn quantiles(values: &[f32], shares: &[f64]) -> Vec<Quantile> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f32::total_cmp);
    let of = |&share: &f64| {
        let at = share * sorted.len().saturating_sub(1) as f64;
        let [low, high] = [at.floor(), at.ceil()].map(|at| sorted.get(at as usize).copied().map_or(0.0, f64::from));
        Quantile { share, value: low + (high - low) * at.fract() }
    };
    shares.iter().map(of).collect()
}
