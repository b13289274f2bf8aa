//! The handle that requests are given to, and those that wait.

use std::collections::VecDeque;
use std::sync::Arc;

use super::driver::Driver;
use super::options::{EngineOptions, Request};
use super::stream::{Stream, Teller, stream};
use super::watched::Watched;
use crate::error::Error;
use crate::generate::{Model, TokenGuide, guide};
use crate::recording::MemoryPlan;

/// A request with the driver's end of its stream, and what its text has to match.
pub(super) struct Waiting {
    pub request: Request,
    pub teller: Teller,
    pub guide: Option<Box<dyn TokenGuide>>,
}

/// What engine and driver share.
pub(super) struct Shared {
    state: Watched<State>,
    max_queued: usize,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    /// Places that the driver has free.
    n_free: usize,
    /// Whether requests are still taken.
    is_closed: bool,
    n_handles: usize,
    stats: EngineStats,
}

/// Counts since an engine began, and what is there now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct EngineStats {
    /// Requests that wait.
    pub n_queued: usize,
    /// Sequences that are computed.
    pub n_running: usize,
    /// Requests that were taken.
    pub n_submitted: u64,
    /// Requests that were refused because the queue was full.
    pub n_refused: u64,
    /// Texts that ended by themselves.
    pub n_finished: u64,
    /// Texts that were cancelled, or whose deadline came.
    pub n_cancelled: u64,
    /// Texts that ended with an error.
    pub n_failed: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens of prompts that an earlier sequence had computed.
    pub cached_tokens: u64,
    /// Tokens that were generated.
    pub generated_tokens: u64,
    /// Passes that computed one token of each running sequence.
    pub n_decode_passes: u64,
    /// Passes over a part of a prompt.
    pub n_prompt_passes: u64,
    /// Microseconds in steps; on a GPU with the waiting for it.
    pub busy_micros: u64,
    /// Pages of the cache.
    pub n_pages: usize,
    /// Pages that hold nothing.
    pub n_free_pages: usize,
    /// Pages that no running sequence has, and that one which begins alike can take.
    pub n_kept_pages: usize,
}

impl Shared {
    /// The request to begin next: of the highest priority, the one that came first.
    pub fn take(&self) -> Option<Waiting> {
        self.state.with(|state| {
            let highest = state.waiting.iter().map(|waiting| waiting.request.priority).max()?;
            let at = state.waiting.iter().position(|waiting| waiting.request.priority == highest)?;
            state.waiting.remove(at)
        })
    }

    /// Puts back a request that could not begin.
    pub fn put_back(&self, waiting: Waiting) {
        self.state.with(|state| state.waiting.push_front(waiting));
    }

    /// Those that wait and that nobody wants any more.
    pub fn drop_waiting(&self, mut is_over: impl FnMut(&Waiting) -> bool) -> Vec<Waiting> {
        self.state.with(|state| {
            let all = std::mem::take(&mut state.waiting).into_iter();
            let (over, waiting) = all.partition(|waiting| is_over(waiting));
            state.waiting = waiting;
            Vec::from(over)
        })
    }

    /// Says how many more requests can begin, and counts.
    pub fn update(&self, n_free: usize, change: impl FnOnce(&mut EngineStats)) {
        self.state.with(|state| {
            state.n_free = n_free;
            change(&mut state.stats);
        });
    }

    pub fn has_waiting(&self) -> bool {
        self.state.with(|state| !state.waiting.is_empty())
    }

    /// Until a request waits; false if none comes any more.
    pub async fn wait(&self) -> bool {
        let is_there = |state: &mut State| match state.waiting.is_empty() {
            false => Some(true),
            true => (state.is_closed || state.n_handles == 0).then_some(false),
        };
        self.state.until(is_there).await
    }
}

/// Takes requests and gives their streams. Clones are of the same engine. When the last one is dropped, the driver ends with
/// the requests that it has.
pub struct Engine {
    model: Model,
    plan: MemoryPlan,
    shared: Arc<Shared>,
}

impl Clone for Engine {
    fn clone(&self) -> Engine {
        self.shared.state.with(|state| state.n_handles += 1);
        Engine { model: self.model.clone(), plan: self.plan, shared: self.shared.clone() }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.state.change(|state| state.n_handles -= 1);
    }
}

impl Engine {
    /// An engine for a model, and what computes for it.
    ///
    /// # Errors
    /// [`Error::Option`] for options out of range, [`Error::Memory`] if the cache does not fit.
    pub fn new(model: &Model, options: &EngineOptions) -> Result<(Engine, Driver), Error> {
        options.check()?;
        let state = State { n_free: options.max_sequences as usize, n_handles: 1, ..State::default() };
        let shared = Arc::new(Shared { state: Watched::new(state), max_queued: options.max_queued });
        let driver = Driver::new(model, options, shared.clone())?;
        Ok((Engine { model: model.clone(), plan: driver.plan(), shared }, driver))
    }

    /// The same, with a thread that computes.
    ///
    /// # Errors
    /// As [`Engine::new`]; [`Error::Io`] if there can be no thread.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn spawn(model: &Model, options: &EngineOptions) -> Result<Engine, Error> {
        let (engine, mut driver) = Engine::new(model, options)?;
        let thread = std::thread::Builder::new().name("tilewright engine".into());
        let spawned = thread.spawn(move || pollster::block_on(driver.run()));
        spawned.map_err(|source| Error::Io { path: "a thread".into(), source })?;
        Ok(engine)
    }

    /// Memory of the weights and of what all sequences share.
    pub fn plan(&self) -> MemoryPlan {
        self.plan
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Puts a request into the queue.
    ///
    /// # Errors
    /// [`Error::Busy`] if as many wait as may, or the engine is closed; [`Error::Option`] for options out of range;
    /// [`Error::Tokenizer`] for an unknown id or no tokens at all; [`Error::ContextFull`] if the prompt does not fit;
    /// [`Error::Constraint`] for one that cannot be enforced.
    pub fn submit(&self, request: Request) -> Result<Stream, Error> {
        request.check()?;
        request.options.check_biases(self.model.config().vocab_size)?;
        self.model.check_prompt(&request.ids)?;
        // Here, since it may take seconds, which others' texts must not wait for.
        let guide = guide(&self.model, &request.options)?;
        let (teller, stream) = stream();
        self.shared.state.change(|state| {
            let n_waiting = state.waiting.len();
            if state.is_closed || n_waiting >= self.shared.max_queued + state.n_free {
                state.stats.n_refused += 1;
                return Err(Error::Busy { n_waiting });
            }
            state.stats.n_submitted += 1;
            state.waiting.push_back(Waiting { request, teller, guide });
            Ok(stream)
        })
    }

    /// Takes no further requests: those that it has are finished, then the driver ends.
    pub fn close(&self) {
        self.shared.state.change(|state| state.is_closed = true);
    }

    /// What it has done, and what it does.
    pub fn stats(&self) -> EngineStats {
        self.shared.state.with(|state| EngineStats { n_queued: state.waiting.len(), ..state.stats })
    }
}
