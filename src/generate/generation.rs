//! The generation loop: submits passes ahead, reads one token at a time and decodes it to text.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use web_time::Instant;

use super::Model;
use super::completion::{Completion, Decoded};
use super::constraint::TokenConstraint;
use super::in_flight::InFlight;
use super::logprobs::Logprobs;
use super::lookup::{look_up, verify_drafts};
use super::options::GenerateOptions;
use super::session::Session;
use super::stats::{Profile, Speculation, Stats};
use crate::error::Error;
use crate::kernels::{NON_FINITE, StepState};
use crate::model::Ending;
use crate::platform::{IS_BROWSER, unless_browser};

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// An end-of-sequence token.
    Eos,
    /// The constraint is satisfied and allows no more tokens.
    Complete,
    /// A stop string.
    StopText,
    /// [`GenerateOptions::max_tokens`] was reached.
    MaxTokens,
    /// The context is full.
    ContextFull,
    /// [`Generation::cancel`] was called.
    Cancelled,
    /// An engine request passed its deadline.
    Deadline,
}

/// A generated token and the text it completes, which may be empty.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Token id.
    pub id: u32,
    /// Complete characters that cannot belong to a stop string.
    pub text: String,
    /// The token's log probability, if [`GenerateOptions::logprobs`](field@GenerateOptions::logprobs) is set.
    pub logprobs: Option<Logprobs>,
    /// How many of the latest tokens, this one included, have no emitted text yet: their characters are incomplete
    /// or may begin a stop string. After [`StopReason::StopText`] these are the stop string's tokens.
    pub held: usize,
    /// The stop string that this token completes: an index into
    /// [`GenerateOptions::stop`](field@GenerateOptions::stop).
    pub stop: Option<usize>,
}

/// Cancels a generation, also from another thread; the token in progress is the last.
#[derive(Clone, Debug, Default)]
pub struct CancelHandle(Arc<AtomicBool>);

impl CancelHandle {
    /// Cancels the generation: [`Generation::next`] soon returns `None`.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A generation in progress: call [`Generation::next`] until it returns `None`. Dropping it keeps the generated
/// tokens in the session.
pub struct Generation<'s> {
    session: &'s mut Session,
    /// The draft model's session and its number of draft tokens.
    draft: Option<(&'s mut Session, usize)>,
    options: GenerateOptions,
    ending: Ending,
    completion: Completion,
    in_flight: InFlight,
    /// Draft tokens that the pass in flight verifies, and the row that predicts the first of them.
    drafted: Option<(Vec<u32>, usize)>,
    /// Tokens read from the device or forced, but not yet kept.
    read: VecDeque<u32>,
    /// Logits of the token read last, if requested.
    logits: Option<Vec<f32>>,
    stop_reason: Option<StopReason>,
    /// Whether an error ended it.
    failed: bool,
    cancelled: CancelHandle,
    prefill: Stats,
    decode: Stats,
    speculation: Speculation,
    profile: Option<Profile>,
}

impl<'s> Generation<'s> {
    pub(super) fn new(
        session: &'s mut Session,
        options: &GenerateOptions,
        constraint: Option<Box<dyn TokenConstraint>>,
    ) -> Result<Self, Error> {
        let completion = Completion::new(&session.model, session.tokens(), options, constraint);
        session.mtp.begin(options.mtp_tokens > 0);
        Ok(Generation {
            draft: None,
            ending: Ending::Sample(options.sampler(completion.is_constrained())),
            completion,
            in_flight: InFlight::default(),
            drafted: None,
            read: VecDeque::new(),
            logits: None,
            stop_reason: None,
            failed: false,
            cancelled: CancelHandle::default(),
            prefill: Stats::default(),
            decode: Stats::default(),
            speculation: Speculation::default(),
            profile: None,
            options: options.clone(),
            session,
        })
    }

    /// Speculative decoding with a draft model, usually a smaller one of the same family: one pass verifies up to
    /// `n` draft tokens. Greedy output is unchanged, and faster if the draft model is much faster and often right.
    /// Prompt lookup takes precedence where it finds something. The draft session follows this one's tokens,
    /// whatever it held before. Leviathan et al. 2023, arXiv:2211.17192.
    ///
    /// # Errors
    /// [`Error::Option`] unless `n` is 1 to [`GenerateOptions::MAX_DRAFT_TOKENS`] and the options are greedy,
    /// without a penalty; [`Error::Operand`] if the vocabulary sizes differ.
    pub fn draft_with(&mut self, session: &'s mut Session, n: u32) -> Result<(), Error> {
        self.options.check_drafts("draft", n, self.completion.is_constrained())?;
        if n == 0 {
            return Err(Error::Option { option: "draft", expected: "1 or more".into(), found: "0".into() });
        }
        let [own, other] = [self.session.model(), session.model()].map(|model| model.config().vocab_size);
        if own != other {
            return Err(Error::Operand {
                kernel: "session",
                operand: "draft",
                expected: format!("a vocabulary of {own} tokens"),
                found: format!("{other}"),
            });
        }
        self.draft = Some((session, n as usize));
        Ok(())
    }

    /// Times every kernel of the decode passes, which then run one at a time. See [`Generation::profile`].
    pub fn enable_profile(&mut self) {
        self.profile = Some(Profile::default());
    }

    /// Calls and total time of each kernel since [`Generation::enable_profile`], slowest first.
    pub fn profile(&self) -> Vec<(&'static str, u64, Duration)> {
        self.profile.as_ref().map(Profile::rows).unwrap_or_default()
    }

    /// The session that generates.
    pub fn session(&self) -> &Session {
        self.session
    }

    /// Why the generation ended; `None` while it runs.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    /// Prompt tokens and prefill time.
    pub fn prefill(&self) -> Stats {
        self.prefill
    }

    /// Tokens and time of decoding, from the second generated token on; the first counts as prefill.
    pub fn decode(&self) -> Stats {
        self.decode
    }

    /// Speculation so far, by [`GenerateOptions::prompt_lookup`], [`GenerateOptions::mtp_tokens`] and
    /// [`Generation::draft_with`].
    pub fn speculation(&self) -> Speculation {
        self.speculation
    }

    /// The sampling seed, with which [`GenerateOptions::seed`] repeats the text.
    pub fn seed(&self) -> u64 {
        self.completion.seed()
    }

    /// Ends the generation: [`Generation::next`] returns `None` from now on.
    pub fn cancel(&mut self) {
        self.stop_reason.get_or_insert(StopReason::Cancelled);
    }

    /// A handle to cancel the generation, for example while [`Generation::next`] computes a long prompt.
    pub fn cancel_handle(&self) -> CancelHandle {
        self.cancelled.clone()
    }

    /// Continues after [`Error::DeviceLost`] on the same model reloaded on another device. All tokens are recomputed
    /// and none is emitted twice. Stops using a draft model, which may be on the lost device. No effect on a
    /// generation that ended otherwise.
    ///
    /// # Errors
    /// [`Error::Operand`] for another model or context length, or if the model's initial adapter is not the one in
    /// use.
    pub fn resume(&mut self, model: &Model) -> Result<(), Error> {
        if self.failed {
            self.session.move_to(model)?;
            self.draft = None;
            self.failed = false;
            self.stop_reason = None;
        }
        Ok(())
    }

    /// Starts with these tokens as if they had just been generated, so that a completion moved from elsewhere
    /// continues unchanged. They are emitted again and computed with the prompt.
    pub fn replay(&mut self, ids: impl IntoIterator<Item = u32>) {
        self.read.extend(ids);
    }

    /// The next token, or `None` at the end. The last piece includes pending text.
    ///
    /// # Errors
    /// [`Error::NonFinite`] if logits are not finite, [`Error::Constraint`] if no token is allowed, errors of
    /// [`Device::run`](crate::Device::run), possibly long after the pass that failed. An error ends the generation
    /// and clears the session's cache, but not its tokens.
    pub async fn next(&mut self) -> Option<Result<Piece, Error>> {
        if self.stop_reason.is_some() {
            return None;
        }
        match self.advance().await {
            Ok(piece) => piece.map(Ok),
            Err(error) => {
                self.stop_reason = Some(StopReason::Cancelled);
                self.failed = true;
                self.in_flight.clear();
                self.drafted = None;
                self.read.clear();
                self.logits = None;
                self.session.sequence.forget_cache();
                Some(Err(error))
            }
        }
    }

    /// Passes each piece to `on_piece` until the generation ends or `on_piece` breaks.
    ///
    /// # Errors
    /// As [`Generation::next`].
    pub async fn for_each(&mut self, mut on_piece: impl FnMut(Piece) -> ControlFlow<()>) -> Result<StopReason, Error> {
        while let Some(piece) = self.next().await {
            if on_piece(piece?).is_break() {
                self.cancel();
            }
        }
        Ok(self.stop_reason.unwrap_or(StopReason::Cancelled))
    }

    async fn advance(&mut self) -> Result<Option<Piece>, Error> {
        if self.completion.n_left(&self.options) == 0 {
            self.stop_reason = Some(StopReason::MaxTokens);
            return Ok(None);
        }
        let start = Instant::now();
        if self.read.is_empty() && self.in_flight.is_empty() {
            self.choose_ending().await?;
            self.session.choose_rope_offset();
            if let Some(allowed) = self.completion.allowed()? {
                self.session.allow(allowed)?;
            }
            self.draft().await?;
        }
        // A token chosen on the device but lost when its reader was dropped cannot be followed: recompute from the
        // kept tokens.
        let follows = self.session.sequence.n_ahead() == Some(0) || !self.in_flight.is_empty() || !self.read.is_empty();
        let n_fed = if follows { Some(0) } else { self.feed().await? };
        let Some(n_fed) = n_fed.filter(|_| !self.cancelled.0.load(Ordering::Relaxed)) else {
            self.stop_reason = Some(StopReason::Cancelled);
            return Ok(None);
        };
        if self.read.is_empty() {
            self.run_ahead().await?;
            if self.options.logprobs.is_some() && !self.in_flight.is_empty() {
                // Read before the token leaves the queue, so that a caller may drop this future and call again
                // without losing either.
                self.logits = Some(self.session.last_logits().await?);
            }
            let words = match self.in_flight.next(&mut self.session.pace).await? {
                Some(words) => words,
                None => {
                    let words = self.step_profiled().await?;
                    if self.options.logprobs.is_some() {
                        self.logits = Some(self.session.last_logits().await?);
                    }
                    words
                }
            };
            match self.drafted.take() {
                None => self.read.extend(StepState::tokens(&words)),
                Some((ids, first_row)) => {
                    let (n_accepted, next) = verify_drafts(&ids, words.get(first_row..).unwrap_or_default());
                    self.session.sequence.verified(n_accepted, ids.len());
                    self.speculation.accepted += n_accepted;
                    self.read.extend(ids.into_iter().take(n_accepted).chain(next));
                }
            }
        }
        let id = self.read.pop_front();
        let pos = self.session.tokens().len() as u32;
        let id = id.filter(|&id| id != NON_FINITE).ok_or(Error::NonFinite { pos })?;
        // Count one-token steps as decoding, and also the steps that recompute forced or rejected tokens.
        if (n_fed > 1 && !self.completion.is_constrained() && !self.drafts())
            || (n_fed > 0 && self.completion.n_generated() == 0)
        {
            self.prefill.add(n_fed, start.elapsed());
        } else {
            self.decode.add(1, start.elapsed());
        }
        self.session.sequence.keep(id);
        self.piece(id).map(Some)
    }

    /// Samples without a bitmask once no token is forbidden any more. Requires that no pass is in flight.
    async fn choose_ending(&mut self) -> Result<(), Error> {
        let ending = Ending::Sample(self.options.sampler(self.completion.is_constrained()));
        if ending != self.ending {
            let Session { model, passes, .. } = &mut *self.session;
            passes.test(model.device(), model.transformer(), 1, ending).await?;
            self.ending = ending;
        }
        Ok(())
    }

    /// Prefills the uncached tokens and chooses the next one. Returns the number of tokens, or `None` if cancelled.
    async fn feed(&mut self) -> Result<Option<usize>, Error> {
        self.session.pace.pause();
        let sampling = self.completion.sampling(&self.options, self.session.tokens().len());
        let fed = self.session.feed_and_choose(&self.options, sampling, self.ending, &self.cancelled.0).await?;
        Ok(fed.map(|(n_fed, pending)| {
            // Not timed: its duration depends on the prompt's length.
            self.in_flight.push(pending, false);
            n_fed
        }))
    }

    /// Whether draft tokens may be used.
    fn drafts(&self) -> bool {
        (self.options.drafts().iter().any(|&(_, n)| n > 0) || self.draft.is_some()) && self.profile.is_none()
    }

    /// Submits draft tokens for verification, if enabled and found. Requires that all read tokens are kept and no
    /// pass is in flight.
    async fn draft(&mut self) -> Result<(), Error> {
        if !self.drafts() {
            return Ok(());
        }
        // Verification yields one token beyond the drafts.
        let wanted = self.completion.n_left(&self.options).saturating_sub(1);
        let room = self.session.n_positions().saturating_sub(self.session.tokens().len());
        let n = wanted.min(room);
        let mut ids = look_up(self.session.tokens(), n.min(self.options.prompt_lookup as usize));
        if !IS_BROWSER && self.options.mtp_tokens > 0 {
            // The MTP head must follow the other drafts, too.
            let most = if ids.is_empty() { n.min(self.options.mtp_tokens as usize) } else { 0 };
            let most = if most > 0 { self.session.room_for_drafts(most) } else { 0 };
            let drafts = unless_browser(|| self.session.mtp_drafts(most), || Ok(Vec::new())).await?;
            ids.extend(drafts);
        }
        // The prompt's last pass chooses the first token.
        if let (true, Some((draft, most))) = (ids.is_empty() && self.completion.n_generated() > 0, &mut self.draft) {
            ids = draft_ids(draft, self.session.tokens(), n.min(*most)).await?;
        }
        if ids.is_empty() {
            return Ok(());
        }
        if let Some((pending, first_row)) = self.session.verify(&mut ids).await? {
            self.speculation.drafted += ids.len();
            self.speculation.passes += 1;
            self.in_flight.push(pending, false);
            self.drafted = Some((ids, first_row));
        }
        Ok(())
    }

    /// Submits passes ahead, as far as needed. Requires that all read tokens are kept.
    async fn run_ahead(&mut self) -> Result<(), Error> {
        // The CPU runs a pass on submission, so running ahead gains nothing; a profile runs passes one at a time.
        let model = &self.session.model;
        let (depth, n_each) = match (model.runs_ahead(), &self.profile) {
            // Drafts and constraints depend on the tokens read, and logits must be read before the next pass
            // overwrites them.
            (true, None) if self.drafts() || self.completion.is_constrained() || self.options.logprobs.is_some() => {
                (1, 1)
            }
            (true, None) => {
                let depth = self.options.submits_in_flight.map_or(self.session.pace.depth(), |n| n as usize);
                (depth, self.options.tokens_per_submit.unwrap_or(model.tokens_per_submit()))
            }
            (false, None) => (1, 1),
            (_, Some(_)) => (0, 0),
        };
        while self.in_flight.len() < depth {
            let sequence = &self.session.sequence;
            let wanted = self.completion.n_left(&self.options) - sequence.n_ahead().unwrap_or(0);
            let n = wanted.min(self.session.n_positions().saturating_sub(sequence.next_position()));
            let n = n.min(n_each as usize).min(sequence.n_free_states());
            if n == 0 {
                break;
            }
            let pending = self.session.run_ahead(self.ending, n as u32).await?;
            self.in_flight.push(pending, true);
        }
        Ok(())
    }

    /// Runs one pass with each kernel timed, and returns the state after it.
    async fn step_profiled(&mut self) -> Result<Vec<u32>, Error> {
        self.session.model.expect_resident("profile")?;
        let last = self.session.tokens().last().copied();
        self.session.run_host_part(self.session.sequence.next_position(), last.as_slice(), 1).await?;
        let Session { model, passes, sequence, .. } = &mut *self.session;
        let recording = passes.get(1, self.ending)?;
        sequence.submitted_ahead(1);
        let times = model.device().run_profiled(recording).await?;
        for (label, time) in times {
            self.profile.get_or_insert_default().add(label, time);
        }
        model.device().read(passes.io.state.tensor()).await
    }

    /// The piece that a token completes; sets the stop reason if the generation ends.
    fn piece(&mut self, id: u32) -> Result<Piece, Error> {
        let room = [self.session.tokens().len(), self.session.passes.capacity()];
        let logits = self.logits.take();
        let Decoded { piece, stop_reason, forced } =
            self.completion.accept(id, &self.options, room, logits.as_deref())?;
        // Forced tokens are emitted one at a time; one pass later computes all of them.
        if self.read.is_empty() {
            self.read.extend(forced);
        }
        if stop_reason.is_none() && room[0] > room[1] {
            // Nothing is in flight: no pass is submitted when the cache is full.
            self.session.slide();
        }
        self.stop_reason = stop_reason;
        Ok(piece)
    }
}

/// Up to `n` draft tokens after `ids`; none beyond the draft model's context.
async fn draft_ids(session: &mut Session, ids: &[u32], n: usize) -> Result<Vec<u32>, Error> {
    if n == 0 || ids.len() + n > session.n_positions() {
        return Ok(Vec::new());
    }
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(n) };
    let mut generation = session.generate_from(ids, &options)?;
    let mut drafts = Vec::with_capacity(n);
    // Boxed because this function is reached from `next` itself.
    while let Some(piece) = Box::pin(generation.next()).await {
        drafts.push(piece?.id);
    }
    Ok(drafts)
}
