//! The handle that requests are given to, and those that wait.

use std::collections::VecDeque;
use std::sync::Arc;

use super::driver::Driver;
use super::options::{EngineOptions, Request};
use super::stream::{ResponseSender, Stream, stream};
use super::watched::Watched;
use crate::counters::Counters;
use crate::device::Device;
use crate::error::Error;
use crate::generate::{Completion, ContextPolicy, Model, TokenConstraint, slide, token_constraint};
use crate::recording::MemoryPlan;
#[cfg(not(target_arch = "wasm32"))]
use crate::recovery::Recovery;

/// A request with the driver's end of its stream.
pub(super) struct Waiting {
    /// Of a text that has begun, its tokens come after the prompt's.
    pub request: Request,
    pub response: ResponseSender,
    pub text: Text,
}

/// How far the text of one that waits has come.
pub(super) enum Text {
    /// What it has to match, if it has to match something.
    New(Option<Box<dyn TokenConstraint>>),
    /// It began and has to wait for pages again.
    Begun(Box<Completion>),
}

/// What an engine and its drivers share.
pub(super) struct Shared {
    state: Watched<State>,
    max_queued: usize,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    /// Whether requests are still taken.
    is_closed: bool,
    n_handles: usize,
    n_submitted: u64,
    n_refused: u64,
    drivers: Vec<DriverState>,
    /// Why no driver computes any more.
    stopped: Option<String>,
}

/// Whether an engine computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineState {
    /// It does.
    #[default]
    Running,
    /// A step panicked, and its model is being loaded again. What waits is computed after that.
    Restarting,
    /// It never will again: the engine ended, or could not go on.
    Stopped,
}

/// What a driver says of itself.
#[derive(Default)]
struct DriverState {
    condition: EngineState,
    /// Places that it has free.
    n_free: usize,
    /// Whether the next request waits for its pages.
    lacks_pages: bool,
    /// Those that compute layers of its model, in order.
    devices: Vec<Device>,
    /// Of those whose place they took.
    counters_before: Counters,
    stats: EngineStats,
}

/// Counts since an engine began, and what is there now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[cfg_attr(target_arch = "wasm32", serde(rename_all = "camelCase"))]
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
    /// Steps that panicked: their texts ended with an error, and the model was loaded again.
    pub n_panics: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens of prompts that an earlier sequence had computed.
    pub cached_tokens: u64,
    /// Tokens that were generated.
    pub generated_tokens: u64,
    /// Tokens that were drafted, by prompt look-up, a draft model or the MTP head.
    pub drafted_tokens: u64,
    /// Of these the ones that the model chose as well.
    pub accepted_tokens: u64,
    /// Passes that computed the next token of each running sequence, and drafted ones after it.
    pub n_decode_passes: u64,
    /// Of these the ones that were submitted before the tokens of the one before were read: a GPU is busy while the host reads.
    pub n_ahead_passes: u64,
    /// Passes over a part of a prompt.
    pub n_prompt_passes: u64,
    /// Microseconds in steps; on a GPU with the waiting for it.
    pub busy_micros: u64,
    /// Tokens that the cache has room for.
    pub cache_tokens: u64,
    /// Pages of the cache.
    pub n_pages: usize,
    /// Pages that hold nothing.
    pub n_free_pages: usize,
    /// Pages that no running sequence has, and that one which begins alike can take.
    pub n_kept_pages: usize,
    /// Pages that the host's memory has, for when a sequence begins with them again.
    pub n_host_pages: usize,
    /// Bytes of these.
    pub host_page_bytes: u64,
    /// Pages that went to the host's memory.
    pub spilled_pages: u64,
    /// Pages that came back from it.
    pub restored_pages: u64,
    /// How often all texts went on with the model loaded again: after a lost device, or moved to another one.
    pub n_recoveries: u64,
    /// Steps that took longer than [`EngineOptions::step_limit`].
    pub n_slow_steps: u64,
    /// Of the tokens that were generated those that the CPU computed in the place of a GPU that failed.
    pub fallback_tokens: u64,
}

impl std::ops::Add for EngineStats {
    type Output = EngineStats;

    fn add(self, other: EngineStats) -> EngineStats {
        EngineStats {
            n_queued: self.n_queued + other.n_queued,
            n_running: self.n_running + other.n_running,
            n_submitted: self.n_submitted + other.n_submitted,
            n_refused: self.n_refused + other.n_refused,
            n_finished: self.n_finished + other.n_finished,
            n_cancelled: self.n_cancelled + other.n_cancelled,
            n_failed: self.n_failed + other.n_failed,
            n_panics: self.n_panics + other.n_panics,
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            cached_tokens: self.cached_tokens + other.cached_tokens,
            generated_tokens: self.generated_tokens + other.generated_tokens,
            drafted_tokens: self.drafted_tokens + other.drafted_tokens,
            accepted_tokens: self.accepted_tokens + other.accepted_tokens,
            n_decode_passes: self.n_decode_passes + other.n_decode_passes,
            n_ahead_passes: self.n_ahead_passes + other.n_ahead_passes,
            busy_micros: self.busy_micros + other.busy_micros,
            n_prompt_passes: self.n_prompt_passes + other.n_prompt_passes,
            cache_tokens: self.cache_tokens + other.cache_tokens,
            n_pages: self.n_pages + other.n_pages,
            n_free_pages: self.n_free_pages + other.n_free_pages,
            n_kept_pages: self.n_kept_pages + other.n_kept_pages,
            n_host_pages: self.n_host_pages + other.n_host_pages,
            host_page_bytes: self.host_page_bytes + other.host_page_bytes,
            spilled_pages: self.spilled_pages + other.spilled_pages,
            restored_pages: self.restored_pages + other.restored_pages,
            n_recoveries: self.n_recoveries + other.n_recoveries,
            n_slow_steps: self.n_slow_steps + other.n_slow_steps,
            fallback_tokens: self.fallback_tokens + other.fallback_tokens,
        }
    }
}

/// What one of an engine's devices did, and does.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DeviceStats {
    /// The device's name; of several that share a model's layers all, with ` + ` between.
    pub device: String,
    /// Of its texts alone; nothing waits for one device.
    pub stats: EngineStats,
    /// Of the device, and of those whose place it took.
    pub counters: Counters,
}

impl State {
    fn has_room(&self, max_queued: usize) -> bool {
        let n_free: usize = self.drivers.iter().map(|driver| driver.n_free).sum();
        !self.is_closed && self.waiting.len() < max_queued + n_free
    }

    /// Counts a refusal if there is no room.
    fn expect_room(&mut self, max_queued: usize) -> Result<(), Error> {
        if let Some(reason) = &self.stopped {
            return Err(Error::Stopped { reason: reason.clone() });
        }
        if self.has_room(max_queued) {
            return Ok(());
        }
        self.n_refused += 1;
        Err(Error::Busy { n_waiting: self.waiting.len() })
    }
}

impl DriverState {
    fn counters(&self) -> Counters {
        self.devices.iter().fold(self.counters_before, |sum, device| sum + device.counters())
    }
}

impl Shared {
    /// The request that a driver is to begin next: of the highest priority, the one that came first. None while another driver
    /// has more places free and will take it.
    pub fn take(&self, driver: usize) -> Option<Waiting> {
        self.state.with(|state| {
            let n_free = state.drivers.get(driver)?.n_free;
            if state.drivers.iter().any(|other| other.n_free > n_free && !other.lacks_pages) {
                return None;
            }
            let highest = state.waiting.iter().map(|waiting| waiting.request.priority).max()?;
            let at = state.waiting.iter().position(|waiting| waiting.request.priority == highest)?;
            state.waiting.remove(at)
        })
    }

    /// Puts back a request that cannot begin or go on for want of pages: it is the next of its priority.
    pub fn put_back(&self, driver: usize, waiting: Waiting) {
        self.state.with(|state| {
            state.waiting.push_front(waiting);
            if let Some(driver) = state.drivers.get_mut(driver) {
                driver.lacks_pages = true;
            }
        });
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

    /// Says how many more requests a driver can begin, and counts.
    pub fn update(&self, driver: usize, n_free: usize, change: impl FnOnce(&mut EngineStats)) {
        self.state.with(|state| {
            if let Some(driver) = state.drivers.get_mut(driver) {
                // What ended gave its pages back.
                driver.lacks_pages &= driver.n_free == n_free;
                driver.n_free = n_free;
                change(&mut driver.stats);
            }
        });
    }

    /// Says whether a driver computes, and what for if it has stopped. When none ever will, nobody is to wait for it.
    pub fn set_condition(&self, driver: usize, condition: EngineState, reason: &str) {
        let waiting = self.state.with(|state| {
            let Some(own) = state.drivers.get_mut(driver) else { return VecDeque::new() };
            own.condition = condition;
            if state.drivers.iter().any(|driver| driver.condition != EngineState::Stopped) {
                return VecDeque::new();
            }
            state.stopped.get_or_insert_with(|| reason.into());
            let waiting = std::mem::take(&mut state.waiting);
            if let Some(own) = state.drivers.get_mut(driver) {
                own.stats.n_failed += waiting.len() as u64;
            }
            waiting
        });
        for Waiting { response, .. } in waiting {
            response.fail(Error::Stopped { reason: reason.into() });
        }
    }

    /// Counts, wherever the driver is.
    pub fn count(&self, driver: usize, change: impl FnOnce(&mut EngineStats)) {
        self.state.with(|state| state.drivers.get_mut(driver).map(|driver| change(&mut driver.stats)));
    }

    /// Says what a driver computes on.
    pub fn set_devices(&self, driver: usize, devices: Vec<Device>) {
        self.state.with(|state| {
            if let Some(driver) = state.drivers.get_mut(driver) {
                driver.counters_before = driver.counters();
                driver.devices = devices;
            }
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
    /// [`Error::Option`] for options out of range; [`Error::Memory`] if the cache does not fit, or [`Error::OutOfMemory`] if a GPU has
    /// no memory for it.
    pub fn new(model: &Model, options: &EngineOptions) -> Result<(Engine, Driver), Error> {
        let (engine, mut drivers) = Engine::over(std::slice::from_ref(model), options)?;
        match drivers.pop() {
            Some(driver) => Ok((engine, driver)),
            None => Err(no_model()),
        }
    }

    /// An engine for a model that is loaded onto several devices, and what computes on each. All have one queue: the device with
    /// the most places free begins the next request, and each has `options` to itself but for `max_queued`.
    ///
    /// # Errors
    /// [`Error::Operand`] without a model, or if they are not one and the same; else as [`Engine::new`].
    pub fn over(models: &[Model], options: &EngineOptions) -> Result<(Engine, Vec<Driver>), Error> {
        options.check()?;
        let model = models.first().ok_or_else(no_model)?;
        if let Some(other) = models.iter().find(|other| other.shown_digest() != model.shown_digest()) {
            let (expected, found) = (format!("the weights of `{}` on all devices", model.name()), other.name().into());
            return Err(Error::Operand { kernel: "engine", operand: "models", expected, found });
        }
        let state = State { n_handles: 1, ..State::default() };
        let shared = Arc::new(Shared { state: Watched::new(state), max_queued: options.max_queued });
        let mut drivers = Vec::with_capacity(models.len());
        let mut plan = MemoryPlan::default();
        for (number, model) in models.iter().enumerate() {
            let n_free = options.max_sequences as usize;
            shared.state.with(|state| state.drivers.push(DriverState { n_free, ..DriverState::default() }));
            let driver = Driver::new(model, options, shared.clone(), number)?;
            plan = plan + driver.plan();
            drivers.push(driver);
        }
        Ok((Engine { model: model.clone(), plan, shared }, drivers))
    }

    /// The same of one device, with a thread that computes.
    ///
    /// # Errors
    /// As [`Engine::new`]; [`Error::Io`] if there can be no thread.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn spawn(model: &Model, options: &EngineOptions) -> Result<Engine, Error> {
        let (engine, driver) = Engine::new(model, options)?;
        driver.spawn(|mut driver| pollster::block_on(driver.run()))?;
        Ok(engine)
    }

    /// The same of several devices, each with a thread, where texts go on after a lost device: what is given with a device's
    /// model makes what loads it again.
    ///
    /// # Errors
    /// As [`Engine::over`]; [`Error::Io`] if there can be no thread.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn spawn_with<R>(models: Vec<(Model, R)>, options: &EngineOptions) -> Result<Engine, Error>
    where
        R: FnOnce() -> Recovery<'static, Model> + Send + 'static,
    {
        let (models, recoveries): (Vec<Model>, Vec<R>) = models.into_iter().unzip();
        let (engine, drivers) = Engine::over(&models, options)?;
        for (driver, recovery) in drivers.into_iter().zip(recoveries) {
            driver.spawn(|mut driver| pollster::block_on(driver.run_with(&mut recovery())))?;
        }
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
    /// [`Error::Busy`] if as many wait as may, or the engine is closed; [`Error::Stopped`] if no driver is left; [`Error::Option`] for options out of range
    /// and an adapter that the model has not; [`Error::Tokenizer`] for an unknown id or no tokens at all; [`Error::ContextFull`] if
    /// the prompt does not fit;
    /// [`Error::Constraint`] for one that cannot be enforced.
    pub fn submit(&self, request: Request) -> Result<Stream, Error> {
        let request = self.checked(request)?;
        // Here, since it may take seconds, which others' texts must not wait for.
        let constraint = token_constraint(&self.model, &request.options)?;
        self.put(request, constraint)
    }

    /// As [`Engine::submit`], with a constraint of the caller's.
    #[cfg(all(target_arch = "wasm32", feature = "web"))]
    pub(crate) fn submit_constrained(
        &self,
        request: Request,
        constraint: Option<Box<dyn TokenConstraint>>,
    ) -> Result<Stream, Error> {
        let request = self.checked(request)?;
        self.put(request, constraint)
    }

    /// A request that can be computed.
    fn checked(&self, mut request: Request) -> Result<Request, Error> {
        request.check()?;
        request.options.check_biases(self.model.config().vocab_size)?;
        self.model.adapted_by(request.adapter.as_deref())?;
        self.model.check_mtp(request.options.mtp_tokens)?;
        let context_length = self.model.context_length() as usize;
        if request.options.context_policy == ContextPolicy::Slide && request.ids.len() > context_length {
            slide(&mut request.ids, context_length);
        }
        self.model.check_prompt(&request.ids)?;
        Ok(request)
    }

    fn put(&self, request: Request, constraint: Option<Box<dyn TokenConstraint>>) -> Result<Stream, Error> {
        let (response, stream) = stream();
        self.shared.state.change(|state| {
            state.expect_room(self.shared.max_queued)?;
            state.n_submitted += 1;
            state.waiting.push_back(Waiting { request, response, text: Text::New(constraint) });
            Ok(stream)
        })
    }

    /// Whether [`Engine::submit`] would find room now. Nobody is to wait for room in an engine that has stopped.
    pub fn has_room(&self) -> bool {
        self.shared.state.with(|state| state.stopped.is_some() || state.has_room(self.shared.max_queued))
    }

    /// Refuses a request before its prompt is made, if there is no room for it now; that counts as a refusal. Where there is room
    /// others may still take it before the request is submitted.
    ///
    /// # Errors
    /// [`Error::Busy`] and [`Error::Stopped`] as [`Engine::submit`].
    pub fn expect_room(&self) -> Result<(), Error> {
        self.shared.state.with(|state| state.expect_room(self.shared.max_queued))
    }

    /// Whether it computes, if only on one of its devices.
    pub fn state(&self) -> EngineState {
        self.shared.state.with(|state| {
            let has = |condition| state.drivers.iter().any(|driver| driver.condition == condition);
            [EngineState::Running, EngineState::Restarting]
                .into_iter()
                .find(|&one| has(one))
                .unwrap_or(EngineState::Stopped)
        })
    }

    /// Takes no further requests: those that it has are finished, then the driver ends.
    pub fn close(&self) {
        self.shared.state.change(|state| state.is_closed = true);
    }

    /// What it has done, and what it does, on all its devices.
    pub fn stats(&self) -> EngineStats {
        self.shared.state.with(|state| {
            let &mut State { n_submitted, n_refused, .. } = state;
            let own = EngineStats { n_queued: state.waiting.len(), n_submitted, n_refused, ..EngineStats::default() };
            state.drivers.iter().fold(own, |sum, driver| sum + driver.stats)
        })
    }

    /// The same of each device. A device that was replaced by the CPU is the CPU.
    pub fn devices(&self) -> Vec<DeviceStats> {
        let unread = |driver: &DriverState| DeviceStats {
            device: driver.devices.iter().map(|device| device.info().name.as_str()).collect::<Vec<_>>().join(" + "),
            stats: driver.stats,
            counters: driver.counters(),
        };
        self.shared.state.with(|state| state.drivers.iter().map(unread).collect())
    }
}

fn no_model() -> Error {
    let (expected, found) = ("a model on a device".into(), "none".into());
    Error::Operand { kernel: "engine", operand: "models", expected, found }
}
