//! Rerankers.

use serde::{Deserialize, Serialize};
use wasm_bindgen::prelude::*;

use super::encoder::{EncoderInfo, telling};
use super::work::CurrentWork;
use super::{from_js, plan_to_js, to_js, to_js_error};
use crate::embed::RerankOptions;

/// A reranker with its weights on a device.
#[wasm_bindgen]
pub struct Reranker {
    reranker: crate::Reranker,
    work: CurrentWork,
}

#[wasm_bindgen]
impl Reranker {
    /// Describes the reranker, see `RerankerInfo` in the npm package.
    pub fn info(&self) -> Result<JsValue, JsValue> {
        #[derive(Serialize)]
        struct Info<'a> {
            #[serde(flatten)]
            encoder: EncoderInfo<'a>,
            sigmoid: bool,
            #[serde(skip_serializing_if = "Option::is_none")]
            instruction: Option<&'a str>,
        }
        let reranker = &self.reranker;
        let limits = [reranker.max_tokens(), reranker.max_batch_tokens()];
        to_js(&Info {
            encoder: EncoderInfo::new(reranker.name(), reranker.config(), limits, reranker.block_types()),
            sigmoid: reranker.has_sigmoid(),
            instruction: reranker.instruction(),
        })
    }

    /// See [`plan_to_js`].
    pub fn memory(&self) -> Result<JsValue, JsValue> {
        self.reranker.plan().map_err(to_js_error).and_then(|plan| plan_to_js(&plan))
    }

    /// The `top_k` best documents by score for a query, best first: `{ index, score }[]`; `undefined` if cancelled.
    /// `instruction`: instead of the model's own. `on_progress` receives the number of finished documents. One call at
    /// a time.
    pub async fn rerank(
        &self,
        query: String,
        documents: Vec<String>,
        top_k: Option<u32>,
        instruction: Option<String>,
        on_progress: js_sys::Function,
    ) -> Result<JsValue, JsValue> {
        let reranker = self.reranker.with_instruction(instruction.as_deref()).map_err(to_js_error)?;
        match self.work.run(reranker.rank_with(&query, &documents, &mut telling(on_progress))).await {
            Some(ranked) => {
                let best = ranked.map_err(to_js_error)?.into_iter().take(top_k.map_or(usize::MAX, |k| k as usize));
                to_js(&best.collect::<Vec<_>>())
            }
            None => Ok(JsValue::UNDEFINED),
        }
    }

    /// Cancels `rerank` after the batches in flight.
    pub fn cancel(&self) {
        self.work.cancel();
    }
}

impl Reranker {
    pub(super) fn new(reranker: crate::Reranker) -> Reranker {
        Reranker { reranker, work: CurrentWork::default() }
    }
}

/// Deserialises a reranker's options, with defaults.
pub(super) fn read_options(value: JsValue) -> Result<RerankOptions<'static>, JsValue> {
    #[derive(Deserialize, Default)]
    #[serde(rename_all = "camelCase", default)]
    struct Options {
        max_tokens: Option<u32>,
        sigmoid: Option<bool>,
        max_batch_tokens: Option<u32>,
        memory_limit: Option<u64>,
    }
    let given: Option<Options> = from_js("options", value)?;
    let Options { max_tokens, sigmoid, max_batch_tokens, memory_limit } = given.unwrap_or_default();
    Ok(RerankOptions { max_tokens, sigmoid, max_batch_tokens, memory_limit, ..RerankOptions::default() })
}
