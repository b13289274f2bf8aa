//! Continuous batching.

use std::cell::RefCell;
use std::rc::Rc;

use serde::Deserialize;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::{JsFuture, future_to_promise};
use web_time::Instant;

use super::model::{GenerationOutcome, JsConstraint, Model, PieceSink, guided, read_options};
use super::vision::Pictures;
use super::{as_js_error, from_js, plan_to_js, to_js, to_js_error};
use crate::engine::{self, Driver, EngineOptions, Request, Stream, StreamHandle};
use crate::error::Error;
use crate::generate::StopReason;

/// An engine. When freed, it finishes its requests.
#[wasm_bindgen]
pub struct Engine {
    engine: engine::Engine,
    /// And the error that lost its device.
    running: Rc<RefCell<(Driver, Option<Error>)>>,
}

#[wasm_bindgen]
impl Engine {
    /// For a model; `options`: `{ maxSequences?, maxQueued?, cacheTokens?, prefixCache?, deterministic? }`,
    /// see [`EngineOptions`].
    #[wasm_bindgen(constructor)]
    pub fn new(model: &Model, options: JsValue) -> Result<Engine, JsValue> {
        #[derive(Deserialize, Default)]
        #[serde(rename_all = "camelCase", default)]
        struct Options {
            max_sequences: Option<u32>,
            max_queued: Option<usize>,
            cache_tokens: Option<u32>,
            prefix_cache: Option<bool>,
            deterministic: bool,
        }
        let given: Options = from_js("options", options)?;
        let default = EngineOptions::default();
        let options = EngineOptions {
            max_sequences: given.max_sequences.unwrap_or(default.max_sequences),
            max_queued: given.max_queued.unwrap_or(default.max_queued),
            cache_tokens: given.cache_tokens,
            prefix_cache: given.prefix_cache.unwrap_or(default.prefix_cache),
            deterministic: given.deterministic,
            ..default
        };
        let (engine, driver) = engine::Engine::new(model.inner(), &options).map_err(to_js_error)?;
        Ok(Engine { engine, running: Rc::new(RefCell::new((driver, None))) })
    }

    /// Runs until the engine is freed and has no requests left, then resolves to `undefined`. Resolves to an error
    /// when the device is lost: requests wait until `resume` or `fail`, and another `run`. After each step,
    /// `on_turn()` resolves once others had their turn.
    pub fn run(&self, on_turn: js_sys::Function) -> js_sys::Promise {
        let running = self.running.clone();
        future_to_promise(async move {
            let Ok(mut running) = running.try_borrow_mut() else { return Ok(JsValue::UNDEFINED) };
            let (driver, lost) = &mut *running;
            loop {
                match driver.next_step().await {
                    Ok(true) => JsFuture::from(js_sys::Promise::resolve(&on_turn.call0(&JsValue::UNDEFINED)?)).await?,
                    Ok(false) => return Ok(JsValue::UNDEFINED),
                    Err(error) => return Ok(as_js_error(lost.insert(error))),
                };
            }
        })
    }

    /// After a lost device: resumes the requests with the same model on another device.
    pub fn resume(&self, model: &Model) -> Result<(), JsValue> {
        let (driver, _) = &mut *self.running.borrow_mut();
        driver.resume_with(model.inner().clone()).map_err(|error| {
            let js = as_js_error(&error);
            driver.fail(error);
            js
        })
    }

    /// After a lost device: fails the requests with that error.
    pub fn fail(&self) {
        let (driver, lost) = &mut *self.running.borrow_mut();
        if let Some(lost) = lost.take() {
            driver.fail(lost);
        }
    }

    /// Queues a request: generates after `ids`, which have these pictures, constrained by `guide`.
    pub fn submit(
        &self,
        ids: Vec<u32>,
        pictures: &Pictures,
        options: JsValue,
        guide: Option<JsConstraint>,
    ) -> Result<Text, JsValue> {
        let (options, _) = read_options(options)?;
        let request = Request { images: pictures.rows(), ..Request::new(ids, options) };
        let stream = self.engine.submit_constrained(request, guided(guide)).map_err(to_js_error)?;
        let (handle, begun) = (stream.handle(), Instant::now());
        Ok(Text { handle, stream: RefCell::new(stream), model: self.engine.model().clone(), begun })
    }

    /// See [`plan_to_js`].
    pub fn memory(&self) -> Result<JsValue, JsValue> {
        plan_to_js(&self.engine.plan())
    }

    /// See [`EngineStats`](engine::EngineStats), and `EngineStats` in the npm package.
    pub fn stats(&self) -> Result<JsValue, JsValue> {
        to_js(&self.engine.stats())
    }
}

/// A request of an engine. Freeing it cancels it.
#[wasm_bindgen]
pub struct Text {
    stream: RefCell<Stream>,
    handle: StreamHandle,
    model: crate::Model,
    begun: Instant,
}

#[wasm_bindgen]
impl Text {
    /// Streams the pieces like [`Session::generate`](super::model::Session::generate); `on_begin(n)` is called at the
    /// first one.
    pub async fn pieces(&self, on_begin: js_sys::Function, on_piece: js_sys::Function) -> Result<JsValue, JsValue> {
        let mut stream = self.stream.borrow_mut();
        let pieces = PieceSink { on_piece };
        let mut prefill = None;
        while let Some(piece) = stream.next().await {
            let piece = piece.map_err(to_js_error)?;
            if prefill.is_none() {
                prefill = Some(self.begun.elapsed());
                on_begin.call1(&JsValue::UNDEFINED, &(stream.usage().cached_tokens as u32).into())?;
            }
            let is_last = stream.is_at_end();
            if !pieces.tell(&self.model, piece, is_last).await? {
                self.handle.cancel();
            }
        }
        let (usage, prefill) = (stream.usage(), prefill.unwrap_or_default());
        to_js(&GenerationOutcome {
            stop_reason: stream.stop_reason().unwrap_or(StopReason::Cancelled),
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            generated_tokens: usage.completion_tokens,
            drafted_tokens: usage.drafted_tokens,
            accepted_tokens: usage.accepted_tokens,
            prefill_seconds: prefill.as_secs_f64(),
            decode_seconds: self.begun.elapsed().saturating_sub(prefill).as_secs_f64(),
        })
    }

    /// Cancels the request.
    pub fn cancel(&self) {
        self.handle.cancel();
    }
}
