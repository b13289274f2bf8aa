//! Shared JavaScript code of embedders and rerankers.

use serde::Serialize;
use wasm_bindgen::JsValue;

use crate::formats::BlockType;
use crate::model::ModelConfig;

/// Fields of both descriptions, see `EncoderInfo` in the npm package.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EncoderInfo<'a> {
    name: &'a str,
    architecture: &'a str,
    n_layers: u32,
    n_heads: u32,
    vocab_size: u32,
    max_tokens: u32,
    max_batch_tokens: u32,
    weight_types: Vec<String>,
}

impl<'a> EncoderInfo<'a> {
    /// Describes an encoder with this name and shape, and these limits on tokens of a text and a batch.
    pub fn new(
        name: &'a str,
        config: &'a ModelConfig,
        [max_tokens, max_batch_tokens]: [u32; 2],
        block_types: &[BlockType],
    ) -> EncoderInfo<'a> {
        EncoderInfo {
            name,
            architecture: &config.architecture,
            n_layers: config.n_layers(),
            n_heads: config.blocks.first().map_or(0, |block| block.attention.n_heads),
            vocab_size: config.vocab_size,
            max_tokens,
            max_batch_tokens,
            weight_types: block_types.iter().map(ToString::to_string).collect(),
        }
    }
}

/// Reports the number of finished texts to a listener.
pub(super) fn telling(listener: js_sys::Function) -> impl FnMut(usize) {
    move |done| {
        // Ignore the listener's errors.
        let _ = listener.call1(&JsValue::UNDEFINED, &(done as f64).into());
    }
}
