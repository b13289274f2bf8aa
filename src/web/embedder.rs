//! Encoders of texts, some of which embed pictures too.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use wasm_bindgen::prelude::*;

use super::encoder::{EncoderInfo, telling};
use super::vision::picture;
use super::work::CurrentWork;
use super::{from_js, pick, plan_to_js, to_js, to_js_error};
use crate::embed::EmbedOptions;
use crate::error::Error;
use crate::kernels::Pooling;
use crate::picture::Patches;

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
            #[serde(rename = "takesImages")]
            takes_images: bool,
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
            takes_images: embedder.images().is_ok(),
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

    /// Concatenated vectors of pictures, of which a batch has [`Embedder::n_images`]. `dimensions`: as of `embed`.
    #[wasm_bindgen(js_name = embedImages)]
    pub async fn embed_images(
        &self,
        pictures: &PreparedPictures,
        dimensions: Option<u32>,
    ) -> Result<Vec<f32>, JsValue> {
        let embedder = self.embedder.with_dims(dimensions).map_err(to_js_error)?;
        let vectors = embedder.embed_patches(&pictures.patches).await;
        vectors.map_err(|error| match error {
            Error::InRecord { record, source } => to_js_error(source.in_record(pictures.first + record)),
            other => to_js_error(other),
        })
    }

    /// Pictures that fill a batch.
    #[wasm_bindgen(js_name = nImages)]
    pub fn n_images(&self) -> Result<u32, JsValue> {
        self.embedder.images().map(|images| images.batch_len() as u32).map_err(to_js_error)
    }

    /// Cancels `embed` after the batches in flight.
    pub fn cancel(&self) {
        self.work.cancel();
    }
}

/// Pictures for `embedImages`, resized and cut into patches.
#[wasm_bindgen]
pub struct PreparedPictures {
    /// The number of the first one among all of the call.
    first: usize,
    patches: Vec<Patches>,
}

#[wasm_bindgen]
impl PreparedPictures {
    /// No pictures, after this many others.
    #[wasm_bindgen(constructor)]
    pub fn new(first: u32) -> PreparedPictures {
        PreparedPictures { first: first as usize, patches: Vec::new() }
    }

    /// Adds a picture for an encoder: its pixels, 3 or 4 bytes each. Alpha is dropped.
    pub fn add(&mut self, embedder: &Embedder, width: u32, height: u32, pixels: Vec<u8>) -> Result<(), JsValue> {
        let prepare = || embedder.embedder.images()?.prepare(&picture(width, height, pixels)?);
        let number = self.first + self.patches.len();
        self.patches.push(prepare().map_err(|error| to_js_error(error.in_record(number)))?);
        Ok(())
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
        texts_only: bool,
    }
    let given: Option<Options> = from_js("options", value)?;
    let Options { max_tokens, pooling, normalize, max_batch_tokens, cached_vectors, memory_limit, texts_only } =
        given.unwrap_or_default();
    Ok(EmbedOptions {
        max_tokens,
        pooling: pick("pooling", pooling, &Pooling::ALL, Pooling::name)?,
        normalize,
        max_batch_tokens,
        cached_vectors: cached_vectors.unwrap_or(0),
        memory_limit,
        texts_only,
        ..EmbedOptions::default()
    })
}
