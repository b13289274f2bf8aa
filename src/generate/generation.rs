//! The loop that generates: passes run ahead on the device, tokens are read and kept one at a time, and become text.

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
use super::lookup::{judge, look_up};
use super::options::GenerateOptions;
use super::session::Session;
use super::stats::{Profile, Speculation, Stats};
use crate::error::Error;
use crate::kernels::{NON_FINITE, StepState};
use crate::model::Ending;

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The model ended the text.
    Eos,
    /// The text matches its constraint, and nothing may follow.
    Complete,
    /// A stop text came up.
    StopText,
    /// As many tokens as asked for.
    MaxTokens,
    /// No position is left in the context.
    ContextFull,
    /// [`Generation::cancel`] was called.
    Cancelled,
    /// The time that an engine's request had is over.
    Deadline,
}

/// A generated token and the text that it completes, which may be empty.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Token id.
    pub id: u32,
    /// Whole characters that are certain now.
    pub text: String,
    /// How likely it was, if [`GenerateOptions::logprobs`](field@GenerateOptions::logprobs) asks for that.
    pub logprobs: Option<Logprobs>,
    /// How many of the latest tokens, this one included, have no text in this piece or an earlier one: their characters
    /// are incomplete, or may begin a stop text. At the end with [`StopReason::StopText`] they are the stop text's.
    pub held: usize,
}

/// Ends a generation from elsewhere; the token in progress is the last.
#[derive(Clone, Debug, Default)]
pub struct CancelHandle(Arc<AtomicBool>);

impl CancelHandle {
    /// Ends the generation: [`Generation::next`] gives `None` soon.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A generation in progress: call [`Generation::next`] until it gives `None`. Dropping it keeps in the session what was
/// generated so far.
pub struct Generation<'s> {
    session: &'s mut Session,
    /// Guesses the next tokens, and how many at a time.
    draft: Option<(&'s mut Session, usize)>,
    options: GenerateOptions,
    ending: Ending,
    completion: Completion,
    in_flight: InFlight,
    /// Tokens that the pass in flight verifies, and its row after which the first of them should be chosen.
    drafted: Option<(Vec<u32>, usize)>,
    /// Tokens that were read and are not kept so far: those after them were not read.
    read: VecDeque<u32>,
    /// Those that the token was chosen by which was read last, where they are asked for.
    logits: Option<Vec<f32>>,
    stop_reason: Option<StopReason>,
    /// Whether an error was the end.
    failed: bool,
    cancelled: CancelHandle,
    prefill: Stats,
    decode: Stats,
    speculation: Speculation,
    profile: Option<Profile>,
}

impl<'s> Generation<'s> {
    /// With a constraint the text is one that the constraint allows.
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

    /// Lets another model, usually a smaller one of the same family, draft up to `n` tokens at a time, which are verified in
    /// one pass: the same greedy text, faster where the small model is much faster and often right. Where prompt look-up finds
    /// something, that comes first. Leviathan et al. 2023, arXiv:2211.17192. The session follows this one's tokens; it may
    /// have others before.
    ///
    /// # Errors
    /// [`Error::Option`] unless `n` is 1 to [`GenerateOptions::MAX_DRAFT_TOKENS`] and the options are greedy, without a penalty;
    /// [`Error::Operand`] if the other model has another number of tokens in its vocabulary.
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

    /// Times every kernel of the decode passes; they then run one at a time. See [`Generation::profile`].
    pub fn enable_profile(&mut self) {
        self.profile = Some(Profile::default());
    }

    /// Calls and total time of each kernel since [`Generation::enable_profile`], the slowest first.
    pub fn profile(&self) -> Vec<(&'static str, u64, Duration)> {
        self.profile.as_ref().map(Profile::rows).unwrap_or_default()
    }

    /// The session that generates.
    pub fn session(&self) -> &Session {
        self.session
    }

    /// Why the generation ended; `None` while it goes on.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    /// Tokens and time of the prompt.
    pub fn prefill(&self) -> Stats {
        self.prefill
    }

    /// Tokens and time of the generated tokens after the first, whose time is the prompt's.
    pub fn decode(&self) -> Stats {
        self.decode
    }

    /// Guesses so far, of [`GenerateOptions::prompt_lookup`], [`GenerateOptions::mtp_tokens`] and
    /// [`Generation::draft_with`].
    pub fn speculation(&self) -> Speculation {
        self.speculation
    }

    /// Ends the generation: [`Generation::next`] gives `None` from now on.
    pub fn cancel(&mut self) {
        self.stop_reason.get_or_insert(StopReason::Cancelled);
    }

    /// Ends the generation from elsewhere, for instance while [`Generation::next`] computes a long prompt.
    pub fn cancel_handle(&self) -> CancelHandle {
        self.cancelled.clone()
    }

    /// Goes on after [`Error::DeviceLost`] with the same tokens, on the same model loaded anew on another device.
    /// Everything is computed again there, and no token is given out twice; a model that drafted does so no more, since it may
    /// be on the lost device. A generation that ended otherwise stays ended.
    ///
    /// # Errors
    /// [`Error::Operand`] if it is not the same model with the same context length, or if its sessions begin with another
    /// adapter than the one in use.
    pub fn resume(&mut self, model: &Model) -> Result<(), Error> {
        if self.failed {
            self.session.move_to(model)?;
            self.draft = None;
            self.failed = false;
            self.stop_reason = None;
        }
        Ok(())
    }

    /// Begins with these tokens as if they had been chosen now: a text that was generated elsewhere with the same prompt and
    /// options goes on as it would have there. They are given out once more, and computed together with the prompt.
    pub fn replay(&mut self, ids: impl IntoIterator<Item = u32>) {
        self.read.extend(ids);
    }

    /// The next token, or `None` at the end. The last piece also has the text that was held back because it might have
    /// begun a stop text or been half a character.
    ///
    /// # Errors
    /// [`Error::NonFinite`] if no token could be chosen, [`Error::Constraint`] if none may be, errors of [`Device::run`](crate::Device::run). The generation is
    /// over then. What the session has computed so far is computed again by the next one: an error may come long after
    /// the pass that failed.
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

    /// Passes every piece to `on_piece` as it is produced, until the generation ends or `on_piece` breaks it off.
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
            self.session.choose_angles();
            if let Some(allowed) = self.completion.allowed()? {
                self.session.allow(allowed)?;
            }
            self.draft().await?;
        }
        // Nothing follows a token that was chosen and cannot be read any more: whoever asked for it did not wait for it.
        let follows = self.session.sequence.n_ahead() == Some(0) || !self.in_flight.is_empty() || !self.read.is_empty();
        let n_fed = if follows { Some(0) } else { self.feed().await? };
        let Some(n_fed) = n_fed.filter(|_| !self.cancelled.0.load(Ordering::Relaxed)) else {
            self.stop_reason = Some(StopReason::Cancelled);
            return Ok(None);
        };
        if self.read.is_empty() {
            self.run_ahead().await?;
            if self.options.logprobs.is_some() && !self.in_flight.is_empty() {
                // Before the token leaves the queue, so that whoever drops this future and calls again misses neither.
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
                    let (n_right, next) = judge(&ids, words.get(first_row..).unwrap_or_default());
                    self.session.sequence.verified(n_right, ids.len());
                    self.speculation.accepted += n_right;
                    self.read.extend(ids.into_iter().take(n_right).chain(next));
                }
            }
        }
        let id = self.read.pop_front();
        let pos = self.session.tokens().len() as u32;
        let id = id.filter(|&id| id != NON_FINITE).ok_or(Error::NonFinite { pos })?;
        // A single token in the middle is a step like others, and so are tokens that a constraint forces or that wrong drafts
        // leave to be computed again.
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

    /// Runs what is not cached, up to the first choice of a token. Returns how many tokens that were, or `None` if the
    /// generation was cancelled meanwhile.
    async fn feed(&mut self) -> Result<Option<usize>, Error> {
        self.session.pace.pause();
        let sampling = self.completion.sampling(&self.options, self.session.tokens().len());
        let fed = self.session.feed_and_choose(&self.options, sampling, self.ending, &self.cancelled.0).await?;
        Ok(fed.map(|(n_fed, pending)| {
            // It takes as long as the prompt is.
            self.in_flight.push(pending, false);
            n_fed
        }))
    }

    /// Whether the next tokens may be drafted.
    fn drafts(&self) -> bool {
        (self.options.drafts().iter().any(|&(_, n)| n > 0) || self.draft.is_some()) && self.profile.is_none()
    }

    /// Submits what may come next to be verified, if that is asked for and something is found. All tokens that were read are
    /// kept, and none is on its way.
    async fn draft(&mut self) -> Result<(), Error> {
        if !self.drafts() {
            return Ok(());
        }
        // One more token comes with the drafts.
        let wanted = self.completion.n_left(&self.options).saturating_sub(1);
        let room = self.session.n_positions().saturating_sub(self.session.tokens().len());
        let n = wanted.min(room);
        let mut ids = look_up(self.session.tokens(), n.min(self.options.prompt_lookup as usize));
        #[cfg(not(target_arch = "wasm32"))]
        if self.options.mtp_tokens > 0 {
            // It follows the other drafts, too.
            let most = if ids.is_empty() { n.min(self.options.mtp_tokens as usize) } else { 0 };
            let most = if most > 0 { self.session.room_for_drafts(most) } else { 0 };
            ids.extend(self.session.mtp_drafts(most).await?);
        }
        // The first token comes with the prompt.
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

    /// Submits passes after those that are read next, as far as they can be needed. All tokens that were read are kept.
    async fn run_ahead(&mut self) -> Result<(), Error> {
        // The CPU runs a pass when it is submitted, so there is nothing to gain; a profile runs them one at a time.
        let model = &self.session.model;
        let (depth, n_each) = match (model.runs_ahead(), &self.profile) {
            // Guesses are made of tokens that were read, and they say which may follow.
            // The logits are read before the next pass overwrites them.
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

    /// Runs one pass with a clock around each kernel and gives the state after it.
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

    /// The text that a token completes, and whether the generation ends with it.
    fn piece(&mut self, id: u32) -> Result<Piece, Error> {
        let room = [self.session.tokens().len(), self.session.passes.capacity()];
        let logits = self.logits.take();
        let Decoded { piece, stop_reason, forced } =
            self.completion.accept(id, &self.options, room, logits.as_deref())?;
        // Those that must come are given out one after the other, before a pass computes all of them.
        if self.read.is_empty() {
            self.read.extend(forced);
        }
        if stop_reason.is_none() && room[0] > room[1] {
            // All tokens have been read: nothing is submitted when the cache is full.
            self.session.slide();
        }
        self.stop_reason = stop_reason;
        Ok(piece)
    }
}

/// Up to `n` tokens that a model chooses after `ids`: none if its context has no room for them.
async fn draft_ids(session: &mut Session, ids: &[u32], n: usize) -> Result<Vec<u32>, Error> {
    if n == 0 || ids.len() + n > session.n_positions() {
        return Ok(Vec::new());
    }
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(n) };
    let mut generation = session.generate_from(ids, &options)?;
    let mut drafts = Vec::with_capacity(n);
    // Boxed because it is the same function that waits for it.
    while let Some(piece) = Box::pin(generation.next()).await {
        drafts.push(piece?.id);
    }
    Ok(drafts)
}
