//! Text encoders.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use wasm_bindgen::prelude::*;

use super::encoder::{EncoderInfo, telling};
use super::work::CurrentWork;
use super::{from_js, pick, plan_to_js, to_js, to_js_error};
use crate::embed::EmbedOptions;
use crate::kernels::Pooling;

/// An encoder whose weights are on a device.
#[wasm_bindgen]
pub struct Embedder {
    embedder: crate::Embedder,
    work: CurrentWork,
}

#[wasm_bindgen]
impl Embedder {
    /// Describes the encoder, see `EmbedderInfo` in the npm package.
    pub fn info(&self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        struct Info<'a> {
            #[serde(flatten)]
            encoder: EncoderInfo<'a>,
            dims: u32,
            pooling: &'static str,
            normalize: bool,
            prompts: &'a BTreeMap<String, String>,
            prompt: &'a str,
        }
        let embedder = &self.embedder;
        let limits = [embedder.max_tokens(), embedder.max_batch_tokens()];
        to_js(&Info {
            encoder: EncoderInfo::new(embedder.name(), embedder.config(), limits, embedder.block_types()),
            dims: embedder.dims(),
            pooling: embedder.pooling().name(),
            normalize: embedder.normalizes(),
            prompts: embedder.prompts(),
            prompt: embedder.prompt(),
        })
    }

    /// See [`plan_to_js`].
    pub fn memory(&self) -> Result<JsValue, JsValue> {
        self.embedder.plan().map_err(to_js_error).and_then(|plan| plan_to_js(&plan))
    }

    /// Token ids of a text for the encoder: with the prompt and special tokens, truncated. `prompt`: see `embed`.
    pub fn encode(&self, text: &str, prompt: JsValue) -> Result<Vec<u32>, JsValue> {
        self.prompted(prompt)?.encode(text).map(|tokens| tokens.ids).map_err(to_js_error)
    }

    /// Concatenated vectors of texts as a `Float32Array`; `undefined` if cancelled. `prompt` names the prompt before
    /// each text: `null` for none, `undefined` for the model's default. `dimensions`: elements to keep of each vector.
    /// `on_progress` receives the number of finished texts. One call at a time.
    pub async fn embed(
        &self,
        texts: Vec<String>,
        prompt: JsValue,
        dimensions: Option<u32>,
        on_progress: js_sys::Function,
    ) -> Result<JsValue, JsValue> {
        let embedder = self.prompted(prompt)?.with_dims(dimensions).map_err(to_js_error)?;
        match self.work.run(embedder.embed_with(&texts, &mut telling(on_progress))).await {
            Some(vectors) => Ok(js_sys::Float32Array::from(vectors.map_err(to_js_error)?.as_slice()).into()),
            None => Ok(JsValue::UNDEFINED),
        }
    }

    /// Cancels `embed` after the batches in flight.
    pub fn cancel(&self) {
        self.work.cancel();
    }
}

impl Embedder {
    pub(super) fn new(embedder: crate::Embedder) -> Embedder {
        Embedder { embedder, work: CurrentWork::default() }
    }

    fn prompted(&self, prompt: JsValue) -> Result<crate::Embedder, JsValue> {
        if prompt.is_undefined() {
            return Ok(self.embedder.clone());
        }
        let name: Option<String> = from_js("prompt", prompt)?;
        self.embedder.with_prompt(name.as_deref()).map_err(to_js_error)
    }
}

/// Deserialises an encoder's options, with defaults.
pub(super) fn read_options(value: JsValue) -> Result<EmbedOptions<'static>, JsValue> {
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "camelCase", default)]
    struct Options {
        max_tokens: Option<u32>,
        pooling: Option<String>,
        normalize: Option<bool>,
        max_batch_tokens: Option<u32>,
        cached_vectors: Option<usize>,
        memory_limit: Option<u64>,
    }
    let given: Option<Options> = from_js("options", value)?;
    let Options { max_tokens, pooling, normalize, max_batch_tokens, cached_vectors, memory_limit } =
        given.unwrap_or_default();
    Ok(EmbedOptions {
        max_tokens,
        pooling: pick("pooling", pooling, &Pooling::ALL, Pooling::name)?,
        normalize,
        max_batch_tokens,
        cached_vectors: cached_vectors.unwrap_or(0),
        memory_limit,
        ..EmbedOptions::default()
    })
}
