//! Text encoders.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use serde::{Deserialize, Serialize};
use wasm_bindgen::prelude::*;

use super::{from_js, plan_to_js, to_js, to_js_error};
use crate::embed::EmbedOptions;
use crate::error::Error;
use crate::kernels::Pooling;

/// An encoder whose weights are on a device.
#[wasm_bindgen]
pub struct Embedder {
    embedder: crate::Embedder,
    is_cancelled: Cell<bool>,
}

#[wasm_bindgen]
impl Embedder {
    /// What the encoder is, see `EmbedderInfo` in the npm package.
    pub fn info(&self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Info<'a> {
            name: &'a str,
            architecture: &'a str,
            dims: u32,
            n_layers: u32,
            n_heads: u32,
            vocab_size: u32,
            max_tokens: u32,
            max_batch_tokens: u32,
            pooling: &'static str,
            normalize: bool,
            weight_types: Vec<String>,
        }
        let (embedder, config) = (&self.embedder, self.embedder.config());
        to_js(&Info {
            name: embedder.name(),
            architecture: &config.architecture,
            dims: embedder.dims(),
            n_layers: config.n_layers,
            n_heads: config.n_heads,
            vocab_size: config.vocab_size,
            max_tokens: embedder.max_tokens(),
            max_batch_tokens: embedder.max_batch_tokens(),
            pooling: pooling_name(embedder.pooling()),
            normalize: embedder.normalizes(),
            weight_types: embedder.block_types().iter().map(ToString::to_string).collect(),
        })
    }

    /// See [`plan_to_js`].
    pub fn memory(&self) -> Result<JsValue, JsValue> {
        self.embedder.plan().map_err(to_js_error).and_then(|plan| plan_to_js(&plan))
    }

    /// Token ids of a text as the encoder reads it: with the tokens around it, and cut.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, JsValue> {
        self.embedder.encode(text).map(|tokens| tokens.ids).map_err(to_js_error)
    }

    /// The vectors of texts, one after the other, as a `Float32Array`; `undefined` if `cancel` came first. `on_progress` is
    /// told how many texts are done. One call at a time.
    pub async fn embed(&self, texts: Vec<String>, on_progress: js_sys::Function) -> Result<JsValue, JsValue> {
        self.is_cancelled.set(false);
        let mut progress = |done: usize| {
            // What the listener throws is not the encoder's business.
            let _ = on_progress.call1(&JsValue::UNDEFINED, &(done as f64).into());
        };
        let mut work = pin!(self.embedder.embed_with(&texts, &mut progress));
        let outcome = poll_fn(|context| match self.is_cancelled.get() {
            true => Poll::Ready(None),
            false => work.as_mut().poll(context).map(Some),
        });
        match outcome.await {
            Some(Ok(vectors)) => Ok(js_sys::Float32Array::from(vectors.as_slice()).into()),
            Some(Err(error)) => Err(to_js_error(error)),
            None => Ok(JsValue::UNDEFINED),
        }
    }

    /// Ends what `embed` does, after the batches in flight.
    pub fn cancel(&self) {
        self.is_cancelled.set(true);
    }
}

impl Embedder {
    pub(super) fn new(embedder: crate::Embedder) -> Embedder {
        Embedder { embedder, is_cancelled: Cell::new(false) }
    }
}

const POOLINGS: [Pooling; 3] = [Pooling::Mean, Pooling::Cls, Pooling::Last];

fn pooling_name(pooling: Pooling) -> &'static str {
    match pooling {
        Pooling::Mean => "mean",
        Pooling::Cls => "cls",
        Pooling::Last => "last",
    }
}

/// Options of an encoder as JavaScript gives them; what is missing has its default.
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
    let pooling = match pooling {
        None => None,
        Some(name) => Some(POOLINGS.into_iter().find(|&pooling| pooling_name(pooling) == name).ok_or_else(|| {
            let expected = POOLINGS.map(pooling_name).join(", ");
            to_js_error(Error::Option { option: "pooling", expected, found: name })
        })?),
    };
    Ok(EmbedOptions {
        max_tokens,
        pooling,
        normalize,
        max_batch_tokens,
        cached_vectors: cached_vectors.unwrap_or(0),
        memory_limit,
        ..EmbedOptions::default()
    })
}
