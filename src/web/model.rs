//! Models and generation.

use std::cell::RefCell;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use wasm_bindgen::convert::TryFromJsValue;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

use super::saving::Saving;
use super::vision::{Pictures, VisionEncoder};
use super::{from_js, plan_to_js, to_js, to_js_error};
use crate::Clock;
use crate::chat::{ChatOptions, ChatTemplate, Message};
use crate::error::Error;
use crate::generate::{
    CancelHandle, ContextPolicy, GenerateOptions, Logprobs, Piece, SessionLoader, StopReason, TimedDispatch,
    TokenConstraint,
};
use crate::kernels::N_STATES;
use crate::load::AdapterFile;
use crate::vision::{Inputs, place_rows};

/// A model with its weights on a device.
#[wasm_bindgen]
pub struct Model {
    model: crate::Model,
    /// Its chat template; `None` if it only supports text completion.
    template: Option<ChatTemplate>,
}

#[wasm_bindgen]
impl Model {
    /// Describes the model, see `ModelInfo` in the npm package.
    pub fn info(&self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Info<'a> {
            name: &'a str,
            architecture: &'a str,
            dim: u32,
            n_layers: u32,
            n_heads: u32,
            n_kv_heads: u32,
            vocab_size: u32,
            context_length: u32,
            max_context_length: u32,
            kv_type: &'a str,
            weight_types: Vec<String>,
            chat_template: &'a str,
            takes_images: bool,
        }
        let config = self.model.config();
        let [n_heads, n_kv_heads, _] = config.blocks.first().map_or([0; 3], |block| block.attention.heads());
        to_js(&Info {
            name: self.model.name(),
            architecture: &config.architecture,
            dim: config.dim,
            n_layers: config.n_layers(),
            n_heads,
            n_kv_heads,
            vocab_size: config.vocab_size,
            context_length: self.model.context_length(),
            max_context_length: config.max_seq_len,
            kv_type: self.model.kv_type().name(),
            weight_types: self.model.block_types().iter().map(ToString::to_string).collect(),
            chat_template: match &self.template {
                None => "none",
                Some(template) if template.unreadable().next().is_some() => "broken",
                Some(template) => template.name(),
            },
            takes_images: self.model.vision().is_some(),
        })
    }

    /// See [`plan_to_js`].
    pub fn memory(&self) -> Result<JsValue, JsValue> {
        plan_to_js(&self.model.plan())
    }

    /// Bytes of layers that each pass reads from the files, without table rows; `undefined` without disk offload.
    #[wasm_bindgen(js_name = streamedBytes)]
    pub fn streamed_bytes(&self) -> Option<f64> {
        self.model.streaming().map(|streaming| streaming.streamed_bytes as f64)
    }

    /// Token ids of a text, with the model's special tokens around it if `add_special`.
    pub fn tokenize(&self, text: &str, add_special: bool) -> Result<Vec<u32>, JsValue> {
        self.model.tokenizer().and_then(|tokenizer| tokenizer.encode(text, add_special)).map_err(to_js_error)
    }

    /// The text of token ids, without special tokens.
    pub fn detokenize(&self, ids: &[u32]) -> Result<String, JsValue> {
        self.model.tokenizer().and_then(|tokenizer| tokenizer.decode(ids, true)).map_err(to_js_error)
    }

    /// Token ids of a conversation, `{ role, content, ... }[]`, up to the start of the assistant's answer. Nothing in
    /// a message becomes a control token. `options`: [`ChatOptions`], also in the npm package, with `now` in seconds
    /// since 1970. `pictures`: one for each part `{ type: "image" }` of a content.
    #[wasm_bindgen(js_name = chatTokens)]
    pub fn chat_tokens(&self, messages: JsValue, options: JsValue, pictures: &Pictures) -> Result<Vec<u32>, JsValue> {
        let messages: Vec<Message> = from_js("messages", messages)?;
        let options: Option<ChatOptions> = from_js("options", options)?;
        let encode = |template: &ChatTemplate| {
            let tokenizer = self.model.tokenizer()?;
            let ids = template.encode(tokenizer, &messages, &options.unwrap_or_default())?;
            let family = self.model.vision().map(crate::VisionEncoder::family);
            Ok(place_rows(tokenizer, ids, &[Inputs::images(family, pictures.images())])?.0)
        };
        self.template().and_then(encode).map_err(to_js_error)
    }

    /// What ends the assistant's turn besides the EOS tokens: `{ ids, texts }`.
    #[wasm_bindgen(js_name = chatStops)]
    pub fn chat_stops(&self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        struct Stops<'a> {
            ids: Vec<u32>,
            texts: &'a [&'a str],
        }
        let template = self.template().map_err(to_js_error)?;
        let ids = template.stop_ids(self.model.tokenizer().map_err(to_js_error)?);
        to_js(&Stops { ids, texts: template.stop_texts() })
    }

    /// The concatenated sources of all chat templates.
    pub fn templates(&self) -> String {
        self.model.chat_source().templates.iter().map(|(_, source)| source.as_str()).collect()
    }

    /// For each token, its length in [`Model::token_bytes`] times 8 plus its type.
    pub fn tokens(&self) -> Result<Vec<u32>, JsValue> {
        let tokenizer = self.model.tokenizer().map_err(to_js_error)?;
        let word = |id| {
            let n_bytes = tokenizer.token_bytes(id).map_or(0, <[u8]>::len) as u32;
            n_bytes * 8 + tokenizer.token_type(id).map_or(0, |kind| kind as u32)
        };
        Ok((0..tokenizer.vocab_size() as u32).map(word).collect())
    }

    /// The concatenated bytes of all tokens.
    #[wasm_bindgen(js_name = tokenBytes)]
    pub fn token_bytes(&self) -> Result<Vec<u8>, JsValue> {
        let tokenizer = self.model.tokenizer().map_err(to_js_error)?;
        let ids = 0..tokenizer.vocab_size() as u32;
        Ok(ids.flat_map(|id| tokenizer.token_bytes(id).unwrap_or_default()).copied().collect())
    }

    /// The EOS tokens.
    #[wasm_bindgen(js_name = endIds)]
    pub fn end_ids(&self) -> Result<Vec<u32>, JsValue> {
        self.model.tokenizer().map(|tokenizer| tokenizer.eos_ids().to_vec()).map_err(to_js_error)
    }

    /// Each token's own text: a control token's name; invalid UTF-8 is replaced.
    pub fn pieces(&self, ids: &[u32]) -> Result<Vec<String>, JsValue> {
        let tokenizer = self.model.tokenizer().map_err(to_js_error)?;
        let text = |&id: &u32| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or_default()).into_owned();
        Ok(ids.iter().map(text).collect())
    }

    /// Token ids of a text inside another; `undefined` if the tokenizer only encodes whole texts.
    #[wasm_bindgen(js_name = encodeWithin)]
    pub fn encode_within(&self, text: &str) -> Option<Vec<u32>> {
        self.model.tokenizer().ok()?.encode_within(text)
    }

    /// How many tokens a sequence can at least be rolled back, if limited.
    #[wasm_bindgen(js_name = mostBack)]
    pub fn most_back(&self) -> Option<u32> {
        self.model.config().is_recurrent().then_some(N_STATES - 1)
    }

    /// Identifies the weights, the LoRA adapter and the KV-cache type: a session is only valid with the same ones.
    pub fn digest(&self) -> Option<String> {
        let digest = || format!("{}-{}", self.model.shown_digest(), self.model.kv_type().name());
        self.model.streaming().is_none().then(digest)
    }

    /// Applies a LoRA adapter to new sessions, scaled by `scale`: a GGUF file, or PEFT's `adapter_model.safetensors`
    /// with its `adapter_config.json`. One at a time.
    #[wasm_bindgen(js_name = useAdapter)]
    pub fn use_adapter(&mut self, weights: Vec<u8>, config: Option<Vec<u8>>, scale: f32) -> Result<(), JsValue> {
        let read = match config {
            Some(config) => AdapterFile::from_peft_bytes(&config, weights),
            None => AdapterFile::from_gguf_bytes(weights),
        };
        let add = |file| {
            let adapter = self.model.add_adapter(&file, scale)?;
            self.model.with_adapter(Some(&adapter))
        };
        self.model = read.and_then(add).map_err(to_js_error)?;
        Ok(())
    }

    /// Takes pictures with this encoder, in new sessions.
    #[wasm_bindgen(js_name = useVision)]
    pub fn use_vision(&mut self, encoder: &VisionEncoder) -> Result<(), JsValue> {
        self.model = self.model.clone().with_vision(encoder.inner().clone()).map_err(to_js_error)?;
        Ok(())
    }

    /// The number of tokens that a picture of this size takes in a prompt.
    #[wasm_bindgen(js_name = imageTokens)]
    pub fn image_tokens(&self, width: u32, height: u32) -> Result<u32, JsValue> {
        self.vision().and_then(|encoder| encoder.n_rows(width, height)).map_err(to_js_error)
    }

    /// A new, empty session.
    pub fn session(&self) -> Result<Session, JsValue> {
        let session = self.model.session().map_err(to_js_error)?;
        Ok(Session { session: RefCell::new(session), cancel: RefCell::default() })
    }
}

impl Model {
    pub(super) fn new(model: crate::Model) -> Model {
        let tokenizer = model.tokenizer().ok();
        let template = tokenizer.and_then(|tokenizer| ChatTemplate::for_model(model.chat_source(), tokenizer));
        Model { model, template }
    }

    pub(super) fn inner(&self) -> &crate::Model {
        &self.model
    }

    pub(super) fn vision(&self) -> Result<&crate::VisionEncoder, Error> {
        self.model.vision().ok_or_else(|| Error::Unsupported {
            format: "model",
            field: "image".into(),
            found: format!("`{}`, which was loaded without a vision encoder", self.model.name()),
            supported: "a model that was loaded with the option `vision`".into(),
        })
    }

    fn template(&self) -> Result<&ChatTemplate, Error> {
        self.template.as_ref().ok_or_else(|| Error::Template {
            field: "chat template".into(),
            expected: "a template in the model's file".into(),
            found: "missing: this model only supports text completion".into(),
        })
    }
}

#[wasm_bindgen]
extern "C" {
    /// Knows the allowed tokens, see [`TokenConstraint`].
    #[wasm_bindgen(typescript_type = "TokenConstraint")]
    pub type JsConstraint;
    #[wasm_bindgen(method, catch)]
    fn allowed(this: &JsConstraint) -> Result<Vec<u32>, JsValue>;
    /// `undefined`: no further token is allowed.
    #[wasm_bindgen(method, catch)]
    fn accept(this: &JsConstraint, id: u32) -> Result<Option<Vec<u32>>, JsValue>;
}

/// A guide and its last bitmask.
struct Guided {
    guide: JsConstraint,
    allowed: Vec<u32>,
}

impl TokenConstraint for Guided {
    fn allowed(&mut self) -> Result<&[u32], Error> {
        self.allowed = self.guide.allowed().map_err(failed)?;
        Ok(&self.allowed)
    }

    fn accept(&mut self, id: u32) -> Result<Option<Vec<u32>>, Error> {
        self.guide.accept(id).map_err(failed)
    }
}

pub(super) fn guided(guide: Option<JsConstraint>) -> Option<Box<dyn TokenConstraint>> {
    guide.map(|guide| Box::new(Guided { guide, allowed: Vec::new() }) as Box<dyn TokenConstraint>)
}

/// The guide keeps the error that it threw, and the caller of the generation throws it again.
fn failed(_: JsValue) -> Error {
    Error::Constraint { field: "guide".into(), expected: "an answer".into(), found: "an error".into() }
}

/// The result of a generation.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct GenerationOutcome {
    pub stop_reason: StopReason,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub generated_tokens: usize,
    pub drafted_tokens: usize,
    pub accepted_tokens: usize,
    pub prefill_seconds: f64,
    pub decode_seconds: f64,
}

/// Receives the pieces of a completion.
pub(super) struct PieceSink {
    pub on_piece: js_sys::Function,
}

impl PieceSink {
    /// Sends a piece. Returns whether to continue.
    pub async fn tell(&self, model: &crate::Model, piece: Piece, is_last: bool) -> Result<bool, JsValue> {
        let logprobs_json = piece.logprobs.map(|logprobs| logprobs_json(model, piece.id, &logprobs, piece.held));
        let logprobs_json = logprobs_json.map_or(JsValue::UNDEFINED, JsValue::from);
        let (id, text) = (piece.id.into(), piece.text.into());
        let answer = self.on_piece.call4(&JsValue::UNDEFINED, &id, &text, &is_last.into(), &logprobs_json)?;
        Ok(JsFuture::from(js_sys::Promise::resolve(&answer)).await?.is_truthy())
    }
}

/// A sequence of tokens with its KV cache.
#[wasm_bindgen]
pub struct Session {
    session: RefCell<crate::Session>,
    /// Cancels the current generation.
    cancel: RefCell<CancelHandle>,
}

#[wasm_bindgen]
impl Session {
    /// Sets the sequence to `ids`, prefills only what is new, and generates, constrained by `guide` if given. Each
    /// piece is passed to `on_piece(id, text, is_last, logprobs)`, which resolves to whether to continue; `logprobs`,
    /// if requested, is JSON of the token, its most likely alternatives, and the number of tokens whose text is still
    /// held: `{ tokens: { id, logprob, bytes }[], held }`. First, `on_begin(n)` gets the number of cached `ids`. When
    /// the device is lost, `on_lost(error)` resolves to the same model on another device, and the stream continues
    /// with the same tokens. `pictures`: those in `ids`.
    #[expect(clippy::too_many_arguments, reason = "JavaScript passes them")]
    pub async fn generate(
        &self,
        ids: &[u32],
        pictures: &Pictures,
        options: JsValue,
        guide: Option<JsConstraint>,
        on_begin: js_sys::Function,
        on_piece: js_sys::Function,
        on_lost: js_sys::Function,
    ) -> Result<JsValue, JsValue> {
        let (options, replay) = read_options(options)?;
        let Ok(mut session) = self.session.try_borrow_mut() else { return Err(busy()) };
        session.set_images(&pictures.rows()).map_err(to_js_error)?;
        let mut generation = session.generate_constrained_from(ids, &options, guided(guide)).map_err(to_js_error)?;
        generation.replay(replay);
        self.cancel.replace(generation.cancel_handle());
        // The last one is always computed, for its logits.
        let cached_tokens = generation.session().n_cached().min(ids.len().saturating_sub(1));
        on_begin.call1(&JsValue::UNDEFINED, &(cached_tokens as u32).into())?;
        let pieces = PieceSink { on_piece };
        let mut n_generated = 0;
        while let Some(piece) = generation.next().await {
            match piece {
                Ok(piece) => {
                    n_generated += 1;
                    let is_last = generation.stop_reason().is_some();
                    if !pieces.tell(generation.session().model(), piece, is_last).await? {
                        generation.cancel();
                    }
                }
                Err(error @ Error::DeviceLost { .. }) => {
                    let answer = on_lost.call1(&JsValue::UNDEFINED, &to_js_error(error))?;
                    let model = JsFuture::from(js_sys::Promise::resolve(&answer)).await?;
                    let model = Model::try_from_js_value(model).map_err(|_| {
                        let (expected, found) = ("a model".into(), "not a model".into());
                        to_js_error(Error::Option { option: "onLost", expected, found })
                    })?;
                    generation.resume(&model.model).map_err(to_js_error)?;
                }
                Err(error) => return Err(to_js_error(error)),
            }
        }
        to_js(&GenerationOutcome {
            stop_reason: generation.stop_reason().unwrap_or(StopReason::Cancelled),
            prompt_tokens: ids.len(),
            cached_tokens,
            generated_tokens: n_generated,
            drafted_tokens: generation.speculation().drafted,
            accepted_tokens: generation.speculation().accepted,
            prefill_seconds: generation.prefill().seconds,
            decode_seconds: generation.decode().seconds,
        })
    }

    /// The sequence.
    pub fn tokens(&self) -> Result<Vec<u32>, JsValue> {
        self.session.try_borrow().map(|session| session.tokens().to_vec()).map_err(|_| busy())
    }

    /// The number of leading tokens in the KV cache.
    #[wasm_bindgen(js_name = nCached)]
    pub fn n_cached(&self) -> Result<u32, JsValue> {
        self.session.try_borrow().map(|session| session.n_cached() as u32).map_err(|_| busy())
    }

    /// Drops tokens that are not cached, and returns the session as a file.
    pub fn saving(&self) -> Result<Saving, JsValue> {
        let Ok(mut session) = self.session.try_borrow_mut() else { return Err(busy()) };
        session.check_savable().map_err(to_js_error)?;
        let n_cached = session.n_cached();
        session.truncate(n_cached);
        Ok(Saving(session.saving("")))
    }

    /// Restores a session of the same model from a file of `size` bytes. `read(offset)` resolves to some bytes at
    /// that offset, or none at the end.
    pub async fn restore(&self, size: f64, read: js_sys::Function) -> Result<(), JsValue> {
        let Ok(mut session) = self.session.try_borrow_mut() else { return Err(busy()) };
        let mut loader = SessionLoader::new(&mut session, size as u64);
        while let Some(offset) = loader.wanted() {
            let answer = read.call1(&JsValue::UNDEFINED, &JsValue::from(offset as f64))?;
            let bytes = JsFuture::from(js_sys::Promise::resolve(&answer)).await?;
            loader.push(&js_sys::Uint8Array::new(&bytes).to_vec()).await.map_err(to_js_error)?;
        }
        loader.finish().map_err(to_js_error)
    }

    /// The latest decode pass, dispatch by dispatch, see `Timeline` in the npm package.
    pub async fn timeline(&self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        struct Dispatch {
            kernel: &'static str,
            variant: &'static str,
            #[serde(skip_serializing_if = "Option::is_none")]
            layer: Option<u32>,
            grid: [u32; 3],
            micros: f64,
        }
        #[derive(Serialize)]
        struct TimelineRecord {
            clock: Clock,
            position: usize,
            micros: f64,
            dispatches: Vec<Dispatch>,
        }
        let Ok(mut session) = self.session.try_borrow_mut() else { return Err(busy()) };
        let timeline = session.timeline().await.map_err(to_js_error)?;
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let dispatch_of = |&TimedDispatch { kernel, variant, layer, grid, time }: &TimedDispatch| Dispatch {
            kernel,
            variant,
            layer,
            grid,
            micros: micros(time),
        };
        to_js(&TimelineRecord {
            clock: timeline.clock,
            position: timeline.position,
            micros: micros(timeline.total()),
            dispatches: timeline.dispatches.iter().map(dispatch_of).collect(),
        })
    }

    /// Attention weights of the last tokens in a head, row by row, each with a weight per token.
    #[wasm_bindgen(js_name = headWeights)]
    pub async fn head_weights(&self, layer: u32, head: u32, last_queries: u32) -> Result<Vec<f32>, JsValue> {
        let Ok(mut session) = self.session.try_borrow_mut() else { return Err(busy()) };
        let of_head = session.head_weights(layer as usize, head as usize, last_queries as usize).await;
        of_head.map(|of_head| of_head.weights).map_err(to_js_error)
    }

    /// Cancels the generation after the current pass.
    pub fn cancel(&self) {
        self.cancel.borrow().cancel();
    }
}

/// The session is in use.
fn busy() -> JsValue {
    let (expected, found) = ("one generation at a time".into(), "a generation in progress".into());
    to_js_error(Error::Operand { kernel: "session", operand: "generation", expected, found })
}

/// Log probabilities of a token and its alternatives as JSON. A model may have more logits than tokens.
fn logprobs_json(model: &crate::Model, id: u32, logprobs: &Logprobs, held: usize) -> String {
    #[derive(Serialize)]
    struct Token<'a> {
        id: u32,
        logprob: f32,
        bytes: &'a [u8],
    }
    let tokenizer = model.tokenizer().ok();
    let bytes = |id| tokenizer.and_then(|tokenizer| tokenizer.token_bytes(id).ok()).unwrap_or_default();
    let token = |(id, logprob)| Token { id, logprob, bytes: bytes(id) };
    let all = std::iter::once((id, logprobs.logprob)).chain(logprobs.top.iter().copied());
    #[derive(Serialize)]
    struct LogprobRecord<'a> {
        tokens: Vec<Token<'a>>,
        held: usize,
    }
    // Numbers and lists of numbers always serialise.
    serde_json::to_string(&LogprobRecord { tokens: all.map(token).collect(), held }).unwrap_or_default()
}

/// Deserialises generation options with defaults, and the tokens at the start.
pub(super) fn read_options(value: JsValue) -> Result<(GenerateOptions, Vec<u32>), JsValue> {
    /// What is no field of [`GenerateOptions`], or has another form.
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "camelCase", default)]
    struct Others {
        logit_bias: Vec<(u32, f32)>,
        slide: bool,
        replay: Vec<u32>,
    }
    let options: Option<GenerateOptions> = from_js("options", value.clone())?;
    let others: Option<Others> = from_js("options", value)?;
    let (mut options, others) = (options.unwrap_or_default(), others.unwrap_or_default());
    // `collect` would sort first, which costs 5 KB of code.
    options.logit_bias.extend(others.logit_bias);
    if others.slide {
        options.context_policy = ContextPolicy::Slide;
    }
    Ok((options, others.replay))
}
