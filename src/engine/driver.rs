//! The driver: admits requests, runs passes, sends pieces to streams.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use web_time::Instant;

use super::decode_batch::{DecodeBatch, MANY, SequenceRows, uses_many};
use super::drafter::Drafter;
use super::options::EngineOptions;
use super::pages::{ContentId, Pages};
use super::passes::{DecodeForm, EngineSizes, Passes, SCORED_ROWS};
use super::queue::{EngineShared, EngineState, EngineStats, QueuedRequest};
use super::running::Running;
use super::stream::ResponseSender;
use super::watchdog::Watchdog;
use super::windows::PageLimits;
use crate::device::Device;
use crate::error::Error;
use crate::generate::{Model, PromptLogprobs, StopReason, verify_drafts};
use crate::kernels::{BatchRow, NON_FINITE, PAGE, Sampling, mask_words};
use crate::loss::LossReason;
use crate::model::{Drawing, Sampler};
use crate::panics::{caught, caught_in};
use crate::platform::{IS_BROWSER, MaybeSend, Native, native, pause, spawn, unless_browser, while_looking};
use crate::recording::MemoryPlan;
use crate::recovery::Recovery;

/// How long a decode pass waits for the mask of a constraint, once for each mask; then its sequence joins a later pass.
const MASK_GRACE: Duration = Duration::from_millis(1);

/// How long a step waits for a mask that all sequences lack.
const MASK_WAIT: Duration = Duration::from_millis(5);

/// Maximum prefill tokens per step while other sequences decode.
const MAX_PREFILL_WHILE_DECODING: u32 = 128;

/// Computes the requests of an [`Engine`](super::Engine). Each step runs one prefill chunk and one decode pass over
/// all sequences whose prompt is computed.
pub struct Driver {
    model: Model,
    shared: Arc<EngineShared>,
    /// Index among the engine's drivers.
    number: usize,
    options: EngineOptions,
    passes: Passes,
    drafter: Drafter,
    pages: Pages,
    /// Free slots for recurrent states and token histories.
    slots: Vec<u32>,
    /// In order of admission.
    running: Vec<Running>,
    /// Decode passes submitted but not yet read.
    batch: DecodeBatch,
    n_generated: u64,
    /// Why the driver has stopped.
    stopped: Option<String>,
    watchdog: Option<Native<Watchdog>>,
}

impl Drop for Driver {
    /// Fails the running sequences and leaves waiting requests to other drivers. A panic may have dropped the
    /// driver.
    fn drop(&mut self) {
        let reason = self.stopped.take().unwrap_or_else(|| "the driver was dropped".into());
        let n_failed = self.running.len() as u64;
        for Running { response, .. } in self.running.drain(..) {
            response.fail(Error::Stopped { reason: reason.clone() });
        }
        self.shared.update(self.number, 0, |stats| {
            stats.n_running = 0;
            stats.n_failed += n_failed;
        });
        self.shared.set_condition(self.number, EngineState::Stopped, &reason);
    }
}

impl Driver {
    pub(super) fn new(
        model: &Model,
        options: &EngineOptions,
        shared: Arc<EngineShared>,
        number: usize,
    ) -> Result<Driver, Error> {
        let drafter = Drafter::of(model, options)?;
        let passes = make_passes(model, options, u32::MAX, drafter.plan())?;
        let pages = new_pages(model, options, &passes);
        let driver = Driver {
            model: model.clone(),
            shared,
            number,
            options: options.clone(),
            passes,
            drafter,
            pages,
            slots: slots(options),
            running: Vec::new(),
            batch: DecodeBatch::default(),
            n_generated: 0,
            stopped: None,
            watchdog: options.step_limit.filter(|_| !IS_BROWSER).map(Watchdog::begin).transpose()?.map(native),
        };
        driver.publish_devices();
        driver.update(|_| {});
        Ok(driver)
    }

    /// Memory of the weights, caches and passes on all devices, including the draft model's.
    pub fn plan(&self) -> MemoryPlan {
        self.passes.whole_plan() + self.drafter.plan()
    }

    /// Runs until the engine is closed or dropped and every request has ended. An error fails all running
    /// sequences. A panic also stops the driver, because the device state is unknown; later requests get
    /// [`Error::Stopped`].
    pub async fn run(&mut self) {
        self.run_by(None).await;
    }

    /// As [`Driver::run`], but reloads the model after a lost device and continues all sequences with the same
    /// tokens. A panic fails the running sequences; the reloaded model serves the waiting requests.
    pub async fn run_with(&mut self, recovery: &mut Recovery<'_, Model>) {
        self.run_by(Some(recovery)).await;
    }

    async fn run_by(&mut self, mut recovery: Option<&mut Recovery<'_, Model>>) {
        while self.stopped.is_none() && (!self.running.is_empty() || self.shared.wait().await) {
            if let Err(error) = self.compute_or_recover(recovery.as_deref_mut()).await {
                self.fail(error);
            }
            pause().await;
        }
    }

    /// Runs the driver on its own thread.
    pub(super) fn spawn(self, run: impl FnOnce(Driver) + MaybeSend + 'static) -> Result<(), Error> {
        let spawned = spawn("tilewright engine", move || run(self));
        spawned.map(drop).map_err(|source| Error::Io { path: "a thread".into(), source })
    }

    /// Computes one step; false if nothing is left to do. An error fails all running sequences.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn step(&mut self) -> Result<bool, Error> {
        self.step_by(None).await
    }

    /// As [`Driver::step`], but reloads the model after a lost device and continues all sequences with the same
    /// tokens.
    ///
    /// # Errors
    /// Those of the device.
    pub async fn step_with(&mut self, recovery: &mut Recovery<'_, Model>) -> Result<bool, Error> {
        self.step_by(Some(recovery)).await
    }

    async fn step_by(&mut self, recovery: Option<&mut Recovery<'_, Model>>) -> Result<bool, Error> {
        if let Err(error) = self.compute_or_recover(recovery).await {
            let said = copy_of(&error);
            self.fail(error);
            return Err(said);
        }
        Ok(!self.running.is_empty() || self.shared.has_waiting())
    }

    /// Waits for requests and computes one step; false once the engine is closed and idle. After an error,
    /// [`Driver::resume_with`] continues the sequences and [`Driver::fail`] ends them.
    ///
    /// # Errors
    /// [`Error::DeviceLost`].
    #[cfg(all(target_arch = "wasm32", feature = "web"))]
    pub(crate) async fn next_step(&mut self) -> Result<bool, Error> {
        if self.running.is_empty() && !self.shared.wait().await {
            return Ok(false);
        }
        if let Err(error) = self.compute().await {
            match self.lost(error) {
                lost @ Error::DeviceLost { .. } => return Err(lost),
                error => self.fail(error),
            }
        }
        Ok(true)
    }

    async fn compute_or_recover(&mut self, recovery: Option<&mut Recovery<'_, Model>>) -> Result<(), Error> {
        if let Some(reason) = &self.stopped {
            return Err(Error::Stopped { reason: reason.clone() });
        }
        let Some(recovery) = recovery else {
            let computed = self.caught_compute().await;
            if let Err(panic @ Error::Panic { .. }) = &computed {
                self.fail_after_panic(panic);
                self.stop("the driver panicked and cannot reload the model");
            }
            return computed;
        };
        let moved = caught("moving a model", || match recovery.moved(self.model.device().is_gpu())? {
            Some(model) => self.resume_with(model),
            None => Ok(()),
        });
        let n_before = self.n_generated;
        let computed = match moved.flatten() {
            Ok(()) => self.caught_compute().await,
            error => error,
        };
        if recovery.is_fallback() && !self.model.device().is_gpu() {
            let n = self.n_generated - n_before;
            self.update(|stats| stats.fallback_tokens += n);
        }
        computed.or_else(|error| self.recover(recovery, error))
    }

    /// Reloads the model if `error` allows recovery, again if the reloaded model's device is lost too.
    ///
    /// # Errors
    /// `error` itself if a reload cannot help, or the error of loading; after a panic the driver has stopped then.
    fn recover(&mut self, recovery: &mut Recovery<'_, Model>, error: Error) -> Result<(), Error> {
        let (mut error, mut has_panicked) = (error, false);
        loop {
            error = self.lost(error);
            if matches!(error, Error::Panic { .. }) {
                has_panicked = true;
                self.fail_after_panic(&error);
                // Other drivers take the waiting requests.
                self.shared.update(self.number, 0, |_| {});
                self.shared.set_condition(self.number, EngineState::Restarting, "");
            }
            let (shared, number, tokens_before) = (self.shared.clone(), self.number, self.cache_tokens());
            let reload = || recovery.reload(error).and_then(|model| self.resume_with(model));
            match while_expiring_requests(&shared, number, || caught("reloading a model", reload)).flatten() {
                Ok(()) => {
                    let tokens = self.cache_tokens();
                    if tokens != tokens_before {
                        recovery.say(&format!("the KV cache now holds {tokens} tokens, before {tokens_before}"));
                    }
                    self.shared.set_condition(self.number, EngineState::Running, "");
                    return Ok(());
                }
                Err(again) if again.loss().is_some() => error = again,
                Err(again) => {
                    if has_panicked {
                        let reason = match &again {
                            Error::Stopped { reason } => reason.clone(),
                            other => format!("the driver panicked and could not reload the model ({other})"),
                        };
                        recovery.say(&format!("an engine has stopped: {reason}"));
                        self.stop(&reason);
                    }
                    return Err(again);
                }
            }
        }
    }

    /// Stops computing. Without another driver, waiting requests fail with `reason`.
    fn stop(&mut self, reason: &str) {
        self.stopped = Some(reason.into());
        self.fail_after_panic(&Error::Stopped { reason: reason.into() });
        self.shared.update(self.number, 0, |_| {});
        self.shared.set_condition(self.number, EngineState::Stopped, reason);
    }

    /// Treats a GPU error or a panic in a step as a lost device, so that there is one way to recover.
    fn lost(&self, error: Error) -> Error {
        let reason = match &error {
            Error::OutOfMemory { .. } => LossReason::OutOfMemory,
            Error::Gpu { .. } => LossReason::Refused,
            Error::Panic { .. } => {
                // Destroying a device may panic as well.
                let _ = caught("destroying a device", || self.model.devices().for_each(Device::destroy));
                return error;
            }
            _ => return error,
        };
        // Which of several GPUs failed is unknown.
        let mut gpus = self.model.devices().filter(|device| device.is_gpu()).peekable();
        if gpus.peek().is_none() {
            return error;
        }
        gpus.for_each(Device::destroy);
        Error::DeviceLost { reason, context: "computing a step".into(), message: error.to_string() }
    }

    /// Recomputes all sequences with a reloaded model. The cache never grows and may shrink for lack of memory;
    /// sequences that do not fit then wait.
    pub(crate) fn resume_with(&mut self, model: Model) -> Result<(), Error> {
        self.model = model;
        self.batch = DecodeBatch::default();
        self.publish_devices();
        // Free the old draft model first.
        self.drafter = Drafter::default();
        self.drafter = Drafter::of(&self.model, &self.options)?;
        self.passes = make_passes(&self.model, &self.options, self.passes.n_pages() - 1, self.drafter.plan())?;
        self.running.iter_mut().for_each(Running::lose_pages);
        for i in (0..self.running.len()).rev() {
            if let Some(error) = self.model.adapted_by(self.running[i].request.adapter.as_deref()).err() {
                self.fail_one(i, error);
            }
        }
        self.pages = new_pages(&self.model, &self.options, &self.passes);
        self.keep_running(|sequence, pages| sequence.begin_anew(pages));
        self.update(|stats| stats.n_recoveries += 1);
        Ok(())
    }

    /// Requeues the sequences that cannot continue, with their tokens; the oldest is next in the queue.
    fn keep_running(&mut self, mut goes_on: impl FnMut(&mut Running, &mut Pages) -> bool) {
        let pages = &mut self.pages;
        let over = self.running.extract_if(.., |sequence| !goes_on(sequence, pages)).collect::<Vec<_>>();
        over.into_iter().rev().for_each(|sequence| self.put_back(sequence));
    }

    fn put_back(&mut self, sequence: Running) {
        self.slots.push(sequence.slot);
        let waiting = sequence.wait(&mut self.pages);
        self.update(|_| {});
        self.shared.put_back(self.number, waiting);
    }

    fn cache_tokens(&self) -> usize {
        self.pages.len() * PAGE as usize
    }

    /// Computes a step and catches panics. After a panic the device state must be discarded.
    async fn caught_compute(&mut self) -> Result<(), Error> {
        let computed = caught_in("computing a step", self.watched_compute()).await.flatten();
        if let (Err(Error::Panic { .. }), Some(watchdog)) = (&computed, &self.watchdog) {
            watchdog.step_ends();
        }
        computed
    }

    fn publish_devices(&self) {
        self.shared.set_devices(self.number, self.model.devices().cloned().collect());
    }

    /// Computes a step under the watchdog.
    async fn watched_compute(&mut self) -> Result<(), Error> {
        if let Some(watchdog) = &self.watchdog {
            watchdog.step_begins(self.model.devices().cloned().collect());
        }
        let computed = self.compute().await;
        if self.watchdog.as_ref().is_some_and(|watchdog| watchdog.step_ends()) {
            self.update(|stats| stats.n_slow_steps += 1);
        }
        computed
    }

    /// Fails all sequences: the first with `error`, the others with a copy of its message.
    pub(crate) fn fail(&mut self, error: Error) {
        let said = copy_of(&error);
        let mut error = Some(error);
        self.batch = DecodeBatch::default();
        for sequence in std::mem::take(&mut self.running) {
            let response = self.leave(sequence);
            response.fail(error.take().unwrap_or_else(|| copy_of(&said)));
            self.update(|stats| stats.n_failed += 1);
        }
        // A failed pass may leave pages undefined.
        self.pages.forget();
    }

    /// As [`Driver::fail`], after a panic: rebuilds the page and slot bookkeeping, which may be inconsistent.
    fn fail_after_panic(&mut self, error: &Error) {
        self.batch = DecodeBatch::default();
        let n_panics = u64::from(matches!(error, Error::Panic { .. }));
        let n_failed = self.running.len() as u64;
        for Running { response, .. } in self.running.drain(..) {
            response.fail(copy_of(error));
        }
        self.pages = new_pages(&self.model, &self.options, &self.passes);
        self.slots = slots(&self.options);
        self.update(|stats| {
            stats.n_failed += n_failed;
            stats.n_panics += n_panics;
        });
    }

    /// Fails the `i`-th sequence.
    fn fail_one(&mut self, i: usize, error: Error) {
        let sequence = self.running.remove(i);
        self.leave(sequence).fail(error);
        self.update(|stats| stats.n_failed += 1);
    }

    fn leave(&mut self, sequence: Running) -> ResponseSender {
        self.slots.push(sequence.slot);
        sequence.end(&mut self.pages)
    }

    fn update(&self, change: impl FnOnce(&mut EngineStats)) {
        self.shared.update(self.number, self.slots.len(), |stats| {
            stats.n_running = self.running.len();
            stats.n_pages = self.pages.len();
            stats.cache_tokens = self.cache_tokens() as u64;
            stats.n_free_pages = self.pages.n_free();
            stats.n_kept_pages = self.pages.n_kept();
            (stats.n_host_pages, stats.host_page_bytes) = self.pages.on_host();
            change(stats);
        });
    }

    /// Computes one step and counts its time.
    async fn compute(&mut self) -> Result<(), Error> {
        let begun = Instant::now();
        let computed = self.compute_all().await;
        self.update(|stats| stats.busy_micros += begun.elapsed().as_micros() as u64);
        computed
    }

    async fn compute_all(&mut self) -> Result<(), Error> {
        self.drop_over();
        // Admission and prefill need a decode batch without passes in flight.
        if self.batch.in_flight.is_empty() {
            self.admit().await?;
            self.compute_prompt().await?;
            self.end_done();
            self.submit_rows().await?;
        }
        self.run_ahead().await?;
        self.read_rows().await?;
        // Passes in flight may belong to ended sequences only.
        if self.running.iter().all(|sequence| !self.batch.has(sequence.slot)) {
            self.batch.in_flight.clear();
        }
        Ok(())
    }

    /// Ends cancelled sequences and those past their deadline.
    fn drop_over(&mut self) {
        drop_waiting(&self.shared, self.number);
        let (mut i, now) = (0, Instant::now());
        while let Some(sequence) = self.running.get(i) {
            match over(&sequence.response, sequence.request.deadline, now) {
                Some(reason) => self.end(i, reason),
                None => i += 1,
            }
        }
    }

    /// Ends sequences that generate nothing, once their prompt is computed.
    fn end_done(&mut self) {
        while let Some(i) = self.running.iter().position(Running::is_done) {
            self.end(i, StopReason::MaxTokens);
        }
    }

    fn end(&mut self, i: usize, reason: StopReason) {
        let sequence = self.running.remove(i);
        let response = self.leave(sequence);
        self.update(|stats| match reason {
            StopReason::Cancelled | StopReason::Deadline => stats.n_cancelled += 1,
            _ => stats.n_finished += 1,
        });
        response.end(reason);
    }

    /// Starts requests while slots and pages are free.
    async fn admit(&mut self) -> Result<(), Error> {
        while let Some(&slot) = self.slots.last() {
            let Some(mut waiting) = self.shared.take(self.number) else { break };
            let asked = &mut waiting.request.options;
            asked.prompt_lookup = asked.prompt_lookup.max(self.options.prompt_lookup);
            asked.mtp_tokens = match self.passes.has_mtp() {
                true => asked.mtp_tokens.max(self.options.mtp_tokens),
                false => 0,
            };
            // A reloaded model may lack the adapter.
            if let Err(error) = self.model.adapted_by(waiting.request.adapter.as_deref()) {
                waiting.response.fail(error);
                self.update(|stats| stats.n_failed += 1);
                continue;
            }
            if waiting.request.options.max_tokens == 0 && waiting.request.options.prompt_logprobs.is_none() {
                waiting.response.begin(waiting.request.ids.len(), 0);
                waiting.response.end(StopReason::MaxTokens);
                self.update(|stats| stats.n_finished += 1);
                continue;
            }
            match Running::begin(&self.model, waiting, slot, &mut self.pages) {
                Ok(mut sequence) => {
                    self.slots.pop();
                    let is_restored = self.restore_prefix(&mut sequence).await;
                    if let Ok(false) = is_restored {
                        self.put_back(sequence);
                        break;
                    }
                    sequence.send_begin();
                    if let Some(constraint) = sequence.constraint() {
                        constraint.begin_mask();
                    }
                    let n_cached = sequence.n_cached() as u64;
                    self.running.push(sequence);
                    self.update(|stats| stats.cached_tokens += n_cached);
                    is_restored?;
                }
                // Requests behind this one also wait for pages.
                Err(waiting) => {
                    self.shared.put_back(self.number, *waiting);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Restores a sequence's cached prefix. False if the sequence must wait for pages again.
    async fn restore_prefix(&mut self, sequence: &mut Running) -> Result<bool, Error> {
        // Before another page reuses the copy.
        if let Some(copy) = sequence.copy.take() {
            self.passes.restore_states(copy, sequence.slot)?;
        }
        let on_host = std::mem::take(&mut sequence.on_host);
        if on_host.is_empty() {
            return Ok(true);
        }
        unless_browser(|| self.restore_pages(sequence, on_host), || Ok(true)).await
    }

    /// Restores the pages that follow a sequence's own from host memory. False as [`Driver::restore_prefix`].
    async fn restore_pages(&mut self, sequence: &mut Running, on_host: Vec<ContentId>) -> Result<bool, Error> {
        let (mut states, mut n_restored) = (None, 0);
        for content in on_host {
            self.make_free(1).await?;
            // Spilling a page for this one may have evicted it from host memory.
            let page = self.pages.on_host_of(content);
            states = page.as_ref().and_then(|page| page.states.clone());
            let Some(page) = page else { break };
            let id = sequence.take_back(content, &mut self.pages)?;
            self.passes.write_page(id, &page.keys)?;
            n_restored += 1;
        }
        self.update(|stats| stats.restored_pages += n_restored);
        match (n_copies(&self.model, &self.options), states) {
            (None, _) => Ok(true),
            (Some(_), Some(states)) => {
                self.passes.write_states(sequence.slot, &states)?;
                keep_states(&self.passes, &mut self.pages, sequence).map(|()| true)
            }
            // Pages are useless without the states after them.
            (Some(_), None) => Ok(sequence.begin_anew(&mut self.pages)),
        }
    }

    /// With CPU offload: spills evictable pages until `n` pages are free.
    async fn make_free(&mut self, n: usize) -> Result<(), Error> {
        unless_browser(|| self.spill_pages(n), || Ok(())).await
    }

    async fn spill_pages(&mut self, n: usize) -> Result<(), Error> {
        let mut n_spilled = 0;
        while let Some((id, copy)) = self.pages.next_victim(n) {
            let page = self.passes.read_page(id, copy).await?;
            self.pages.spill(id, page);
            n_spilled += 1;
        }
        if n_spilled > 0 {
            self.update(|stats| stats.spilled_pages += n_spilled);
        }
        Ok(())
    }

    /// Computes the next prefill chunk of the oldest sequence in prefill.
    async fn compute_prompt(&mut self) -> Result<(), Error> {
        let others_wait = self.running.iter().any(Running::is_ready);
        let mut most = self.passes.max_pass();
        if others_wait {
            most = most.min(MAX_PREFILL_WHILE_DECODING);
        }
        let Some(at) = self.running.iter().position(|sequence| !sequence.is_ready()) else { return Ok(()) };
        let n_top = self.running[at].scores_prompt();
        if n_top.is_some() {
            most = most.min(SCORED_ROWS);
            let adapted = self.model.adapted_by(self.running[at].request.adapter.as_deref())?;
            // Logits are no part of the planned memory, so only this request fails without room for them.
            match self.passes.allocate_logits(adapted).await {
                Err(error @ Error::OutOfMemory { .. }) => {
                    self.fail_one(at, error);
                    return Ok(());
                }
                allocated => allocated?,
            }
        }
        let copies = n_copies(&self.model, &self.options).is_some();
        let n_tokens = self.running[at].next_len(most as usize, copies, &self.model);
        self.make_free(self.running[at].pages_for(n_tokens)).await?;
        let Driver { model, passes, pages, running, .. } = self;
        let sequence = &mut running[at];
        let adapted = model.adapted_by(sequence.request.adapter.as_deref())?;
        let ids = sequence.next_tokens(n_tokens).to_vec();
        sequence.take_pages(n_tokens, pages)?;
        let row = sequence.row(ids.len() as u32);
        let logits = match sequence.next_image() {
            Some((image, first)) => {
                let rows = first..first + ids.len();
                let positions = sequence.image_positions(&image, rows.clone());
                passes.compute_image((model, adapted), row.clone(), (&image, rows), &positions).await?;
                Vec::new()
            }
            None => passes.compute_prompt((model, adapted), row.clone(), &ids, n_top.is_some()).await?,
        };
        if let Some(n_top) = n_top {
            let rows = logits.chunks_exact(model.config().vocab_size as usize);
            let next = sequence.next_ids(row.pos as usize, ids.len());
            let scored = rows.zip(next).map(|(row, &id)| PromptLogprobs::of(row, id, n_top));
            sequence.response.prompt_logprobs(row.pos as usize, scored);
        }
        if passes.has_mtp() {
            let next_ids = sequence.next_ids(row.pos as usize, ids.len());
            unless_browser(|| passes.mtp_follow(model, row, next_ids), || Ok(())).await?;
        }
        sequence.computed_prompt(ids.len(), pages);
        keep_states(passes, pages, sequence)?;
        self.update(|stats| {
            stats.n_prompt_passes += 1;
            stats.prompt_tokens += ids.len() as u64;
        });
        Ok(())
    }

    /// Submits a decode pass over the ready sequences and their draft tokens.
    async fn submit_rows(&mut self) -> Result<(), Error> {
        let model = self.model.clone();
        let Driver { drafter, passes, running, pages, .. } = self;
        let drafts = unless_browser(|| drafter.draft_by_mtp(&model, passes, running, pages), || Ok(HashMap::new()));
        let of_head = drafts.await?;
        self.keep_running(|sequence, pages| sequence.choose_rope_offset(&model, pages));
        let Driver { running, batch, .. } = self;
        let ready: Vec<usize> = (0..running.len()).filter(|&i| running[i].is_ready()).collect();
        let mut ready = with_masks(running, ready);
        if ready.is_empty() {
            return Ok(());
        }
        // A pass uses one adapter; adapters take turns in order of their names.
        let adapters = || ready.iter().map(|&i| &running[i].request.adapter);
        let next = adapters().filter(|adapter| **adapter > batch.adapter).min().or(adapters().min());
        let adapter = next.cloned().flatten();
        ready.retain(|&i| running[i].request.adapter == adapter);
        // Recomputed tokens may leave no rows for some sequences, which wait for the next pass.
        let mut n_free = self.passes.n_rows() as usize;
        ready.retain(|&i| {
            let n_rows = self.running[i].n_rows();
            let has_room = n_rows <= n_free;
            n_free -= if has_room { n_rows } else { 0 };
            has_room
        });
        let Driver { drafter, passes, running, .. } = self;
        let drafts = drafter.draft((&model, passes), (running, &ready), of_head, n_free).await?;
        let pages_for = |(&i, drafts): (&usize, &Vec<u32>)| {
            let sequence = &self.running[i];
            sequence.pages_for(sequence.n_rows() + drafts.len())
        };
        self.make_free(ready.iter().zip(&drafts).map(pages_for).sum()).await?;
        let Driver { model, passes, pages, running, .. } = self;
        let n_drafts: usize = drafts.iter().map(Vec::len).sum();
        let n_rows = ready.iter().map(|&i| running[i].n_rows()).sum::<usize>() + n_drafts;
        let many = passes.has_many() && uses_many(ready.len(), self.batch.form.many);
        let form = DecodeForm { has_runs: n_rows > ready.len(), many, ..DecodeForm::default() };
        let sampler = Sampler {
            penalize: ready.iter().any(|&i| running[i].penalizes()),
            mask: ready.iter().any(|&i| running[i].is_constrained()),
            draw: match ready.iter().filter(|&&i| running[i].draws()).count() {
                0 => Drawing::None,
                // Idle and draft rows do not sample.
                n if n == n_rows && form.rows(n as u32) == n as u32 => Drawing::All,
                _ => Drawing::Some,
            },
        };
        let device = model.device();
        let mut rows = Vec::with_capacity(n_rows);
        let mut runs = Vec::with_capacity(ready.len());
        let mut settings: Vec<Sampling> = Vec::with_capacity(n_rows);
        let mut broken = HashMap::new();
        // The bitmask of a row without a constraint.
        let all =
            if sampler.mask { vec![u32::MAX; mask_words(model.config().vocab_size) as usize] } else { Vec::new() };
        for (&i, drafts) in ready.iter().zip(&drafts) {
            let (row, sequence) = (rows.len(), &mut running[i]);
            sequence.take_pages(sequence.n_rows() + drafts.len(), pages)?;
            rows.extend(sequence.rows(drafts));
            let (slot, pos) = (sequence.slot, sequence.n_cached());
            runs.push(SequenceRows { slot, pos, n_rows: sequence.n_rows(), n_drafts: drafts.len() });
            settings.resize(rows.len(), sequence.sampling());
            if sequence.penalizes() {
                // The device appends the tokens it chooses.
                if !sequence.has_tokens {
                    device.write(
                        &passes.rows().tokens,
                        sequence.slot as usize * passes.rows().capacity(),
                        sequence.ids(),
                    )?;
                    sequence.has_tokens = true;
                }
                let biases = sequence.request.options.biases();
                if !biases.is_empty() {
                    device.write(&passes.rows().biases, row * 2 * Sampling::MAX_BIASES as usize, &biases)?;
                }
            }
            if sampler.mask {
                let allowed = match sequence.allowed() {
                    Ok(allowed) => allowed.unwrap_or(&all),
                    Err(error) => {
                        broken.insert(sequence.slot, error);
                        &all
                    }
                };
                device.write(&passes.rows().allowed, row * all.len(), allowed)?;
                // Draft rows have no constraint.
                for row in row + 1..rows.len() {
                    device.write(&passes.rows().allowed, row * all.len(), &all)?;
                }
            }
        }
        if sampler.draw != Drawing::None || sampler.penalize {
            device.write(&passes.rows().sampling, 0, bytemuck::cast_slice::<_, u32>(&settings))?;
        }
        let form = DecodeForm { sampler, ..form };
        let ids = rows.iter().map(|row: &BatchRow| row.token).collect();
        let DecodeBatch { in_flight, mut pace, .. } = std::mem::take(&mut self.batch);
        pace.pause();
        self.batch = DecodeBatch { runs, ids, form, adapter, broken, in_flight, pace };
        passes.set_rows(model, rows, form).await?;
        self.update(|stats| stats.drafted_tokens += n_drafts as u64);
        self.submit_pass(Running::submitted_rows).await
    }

    /// Submits a pass over the batch's rows and marks their sequences' tokens as submitted.
    async fn submit_pass(&mut self, submitted: impl Fn(&mut Running, usize)) -> Result<(), Error> {
        let Driver { model, passes, running, batch, .. } = self;
        let adapted = model.adapted_by(batch.adapter.as_deref())?;
        batch.in_flight.push(passes.submit_rows((model, adapted), batch.ids.len() as u32, batch.form).await?, true);
        for run in &batch.runs {
            if let Some(sequence) = running.iter_mut().find(|sequence| sequence.slot == run.slot) {
                submitted(sequence, run.n_drafts);
            }
        }
        Ok(())
    }

    /// Submits passes ahead of reading the previous tokens, as many as keep the device busy, while no sequence can
    /// end and the host has no part in them.
    async fn run_ahead(&mut self) -> Result<(), Error> {
        while self.may_run_ahead() {
            self.make_free(self.running.iter().map(|sequence| sequence.pages_for(1)).sum()).await?;
            let Driver { passes, pages, running, batch, .. } = self;
            for (row, run) in batch.runs.iter().enumerate() {
                let Some(sequence) = running.iter_mut().find(|sequence| sequence.slot == run.slot) else { continue };
                let n_before = sequence.pages().len();
                sequence.take_pages(1, pages)?;
                for (at, &page) in sequence.pages().iter().enumerate().skip(n_before) {
                    passes.set_page(row, at, [page, sequence.window_page(at)])?;
                }
            }
            self.submit_pass(|sequence, _| sequence.submitted_ahead()).await?;
            self.update(|stats| stats.n_ahead_passes += 1);
        }
        Ok(())
    }

    fn may_run_ahead(&self) -> bool {
        let n = self.batch.in_flight.len();
        // A waiting request must start at once.
        let others_wait =
            self.running.len() != self.batch.runs.len() || (!self.slots.is_empty() && self.shared.has_waiting());
        (1..self.batch.pace.depth()).contains(&n)
            && self.model.runs_ahead()
            && !self.batch.form.sampler.mask
            && !self.batch.form.has_runs
            && !self.drafter.needs_tokens(&self.running, &self.passes)
            && !others_wait
            && self.running.iter().all(|sequence| sequence.can_run_ahead(n, &self.model))
    }

    /// Reads the oldest pass in flight and appends its tokens to the sequences.
    async fn read_rows(&mut self) -> Result<(), Error> {
        if self.batch.in_flight.is_empty() {
            return Ok(());
        }
        let Driver { model, passes, running, batch, drafter, .. } = self;
        drafter.clear_mtp_rows();
        let device = model.device();
        let wants_logits =
            running.iter().any(|sequence| sequence.request.options.logprobs.is_some() && batch.has(sequence.slot));
        // No pass is submitted ahead while a request wants logits.
        let logits: Vec<f32> = if wants_logits { device.read(&passes.rows().logits).await? } else { Vec::new() };
        let chosen = batch.next().await?;

        let vocab_size = model.config().vocab_size as usize;
        let context_length = model.context_length() as usize;
        let mut over: Vec<(u32, Result<StopReason, Error>)> = Vec::new();
        let mut broken = std::mem::take(&mut batch.broken);
        let (mut n_generated, mut n_accepted) = (0, 0);
        let mut end = 0;
        for &SequenceRows { slot, pos, n_rows, n_drafts } in &batch.runs {
            let (first, first_draft) = (end, end + n_rows);
            end = first_draft + n_drafts;
            // The sequence may have ended meanwhile.
            let Some(sequence) = running.iter_mut().find(|sequence| sequence.slot == slot) else { continue };
            let (n_verified, _) = verify_drafts(&batch.ids[first_draft..end], &chosen[first_draft - 1..end]);
            sequence.verified(n_verified, n_drafts);
            let mut n_accepted_here = 0;
            let mut is_over = false;
            for (row, &id) in chosen.iter().enumerate().take(first_draft + n_verified).skip(first_draft - 1) {
                n_generated += 1;
                n_accepted_here = row + 1 - first_draft;
                let logits = logits.get(row * vocab_size..(row + 1) * vocab_size);
                let accepted = match (broken.remove(&slot), id) {
                    (Some(error), _) => Err(error),
                    (None, NON_FINITE) => Err(Error::NonFinite { pos: sequence.ids().len() as u32 }),
                    (None, id) => sequence.accept(id, logits, context_length),
                };
                if let Some(ended) = accepted.transpose() {
                    over.push((slot, ended));
                    is_over = true;
                    break;
                }
            }
            n_accepted += n_accepted_here as u64;
            if let Some(constraint) = sequence.constraint().filter(|_| !is_over) {
                constraint.begin_mask();
            }
            if passes.has_mtp() && sequence.uses_mtp() && !is_over {
                drafter.add_mtp_rows(first, sequence.mtp_rows(pos, n_rows + n_verified));
            }
            if n_drafts > 0 {
                sequence.response.drafted(n_drafts, n_accepted_here);
            }
        }
        self.n_generated += n_generated;
        self.update(|stats| {
            stats.n_decode_passes += 1;
            stats.generated_tokens += n_generated;
            stats.accepted_tokens += n_accepted;
        });
        for (slot, ended) in over {
            let Some(i) = self.running.iter().position(|sequence| sequence.slot == slot) else { continue };
            match ended {
                Ok(reason) => self.end(i, reason),
                Err(error) => self.fail_one(i, error),
            }
        }
        // No pass is in flight here: a sequence that fills the context never runs ahead.
        self.keep_running(|sequence, pages| sequence.slide(context_length, pages));
        Ok(())
    }
}

/// The ready sequences whose masks are computed. The others join a later pass, so that they delay none; if all lack
/// one, this waits a little for the first.
fn with_masks(running: &mut [Running], ready: Vec<usize>) -> Vec<usize> {
    if IS_BROWSER {
        return ready;
    }
    let until = Instant::now() + MASK_GRACE;
    let mut has_mask = |&i: &usize| {
        let left = until.saturating_duration_since(Instant::now());
        running[i].constraint().is_none_or(|constraint| constraint.has_mask(left))
    };
    let mut masked: Vec<usize> = ready.iter().copied().filter(&mut has_mask).collect();
    if masked.is_empty()
        && let Some(&first) = ready.first()
        && running[first].constraint().is_none_or(|constraint| constraint.wait(MASK_WAIT))
    {
        masked.push(first);
    }
    masked
}

/// A copy of an error for another stream.
fn copy_of(error: &Error) -> Error {
    match error {
        Error::Panic { context, message } => Error::Panic { context: context.clone(), message: message.clone() },
        Error::Stopped { reason } => Error::Stopped { reason: reason.clone() },
        Error::Gpu { context, message } => Error::Gpu { context: context.clone(), message: message.clone() },
        other => Error::Gpu { context: "a step of the engine".into(), message: other.to_string() },
    }
}

/// Runs long work while another thread ends waiting requests that are cancelled or past their deadline.
fn while_expiring_requests<T>(shared: &EngineShared, driver: usize, work: impl FnOnce() -> T) -> T {
    const INTERVAL: Duration = Duration::from_millis(50);
    // Without a thread they end after the work.
    while_looking("tilewright deadlines", INTERVAL, || drop_waiting(shared, driver), work)
}

/// Why a sequence must end: cancelled or past its deadline.
fn over(response: &ResponseSender, deadline: Option<Instant>, now: Instant) -> Option<StopReason> {
    match response.is_cancelled() {
        true => Some(StopReason::Cancelled),
        false => deadline.filter(|deadline| now >= *deadline).map(|_| StopReason::Deadline),
    }
}

/// Ends waiting requests that are cancelled or past their deadline.
fn drop_waiting(shared: &EngineShared, driver: usize) {
    let now = Instant::now();
    let reason = |waiting: &QueuedRequest| over(&waiting.response, waiting.request.deadline, now);
    for waiting in shared.drop_waiting(|waiting| reason(waiting).is_some()) {
        if let Some(reason) = reason(&waiting) {
            waiting.response.end(reason);
            shared.count(driver, |stats| stats.n_cancelled += 1);
        }
    }
}

/// All slots, free.
fn slots(options: &EngineOptions) -> Vec<u32> {
    (1..=options.max_sequences).rev().collect()
}

/// Page bookkeeping for the pages of `passes`, all free.
fn new_pages(model: &Model, options: &EngineOptions, passes: &Passes) -> Pages {
    let n_copies = n_copies(model, options);
    Pages::new(passes.n_pages(), options.prefix_cache, n_copies, options.host_cache_bytes, passes.windows())
}

/// Number of state copies, for recurrent models with a prefix cache.
fn n_copies(model: &Model, options: &EngineOptions) -> Option<u32> {
    (model.config().is_recurrent() && options.prefix_cache).then_some(2 * options.max_sequences)
}

/// Copies the recurrent states of a sequence that ends at a page boundary, for later sequences to start from.
fn keep_states(passes: &Passes, pages: &mut Pages, sequence: &Running) -> Result<(), Error> {
    match sequence.page_at_end().and_then(|page| pages.take_copy(page)) {
        Some(copy) => passes.keep_states(sequence.slot, copy),
        None => Ok(()),
    }
}

/// Allocates the shared cache and the passes, with up to `most_pages` pages. Free GPU memory is unknown, so the
/// allocation itself is the test; without a requested size, half the pages are tried until it fits. `beside`: memory
/// of the draft model.
fn make_passes(model: &Model, options: &EngineOptions, most_pages: u32, beside: MemoryPlan) -> Result<Passes, Error> {
    let pages_each = model.context_length().div_ceil(PAGE);
    let n_sequences = options.max_sequences;
    let (n_copies, spills) = (n_copies(model, options), options.host_cache_bytes > 0);
    let (max_pass, kv_type) = (model.max_pass(), model.kv_type());
    let n_rows = options.rows();
    let limits = PageLimits::of(model, options);
    let most = limits.most.min(most_pages).max(pages_each);
    let n_states = options.states(model);
    let sizes = |n_pages| EngineSizes {
        n_sequences,
        n_rows,
        n_states,
        n_pages: n_pages + 1,
        windows: limits.windows(n_pages),
        pages_each,
        n_copies,
        spills,
        max_pass,
        kv_type,
        mtp: options.mtp_tokens > 0 && model.config().n_mtp > 0,
        many: !options.deterministic
            && n_sequences >= MANY
            && model.devices().all(|device| device.target().suits_many()),
    };
    let asked = options.cache_tokens.map(|tokens| tokens.div_ceil(PAGE).max(pages_each));
    let mut n_pages = asked.unwrap_or(n_sequences.saturating_mul(pages_each)).min(most);
    loop {
        let passes = Passes::declare(model, sizes(n_pages))?;
        let mut plan = passes.plan() + beside;
        plan.weights_bytes += model.named_adapters_bytes();
        let fits = model.check_fits(&plan, "use fewer sequences or a shorter context");
        let fits = fits.and_then(|()| model.check_fits_before(passes.plans_before()));
        match fits.and_then(|()| passes.allocate(asked.is_none())) {
            Err(Error::Memory { .. } | Error::OutOfMemory { .. }) if asked.is_none() && n_pages > pages_each => {
                drop(passes);
                model.devices().for_each(Device::free_unused);
                n_pages = (n_pages / 2).max(pages_each)
            }
            // The first step finds the loss again and recovers.
            Err(Error::DeviceLost { .. }) => return Ok(passes),
            fits => return fits.map(|()| passes),
        }
    }
}
