//! EmbeddingGemma (Google 2025, arXiv:2509.20354): Gemma 3 whose tokens see each other both ways, then dense layers
//! after pooling; and its successor.

use super::gemma::{GEMMA3, SANDWICH};
use super::gemma4::GEMMA4;
use super::{Architecture, WINDOW, encoder};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::load::keys::{Key, Keys};
use crate::model::{DenseConfig, MAX_CONTEXT, MAX_DIM, ModelConfig};

/// A folder's `model_type` is Gemma 3's.
pub(super) const EMBEDDING_GEMMA: Architecture = Architecture {
    gguf: "gemma-embedding",
    json: &[],
    describe: |keys, config| {
        keys.only_bool(Key("attention.causal", ""), false)?;
        (GEMMA3.describe)(keys, config)?;
        both_ways(keys, config)
    },
    ..GEMMA3
};

/// Turns Gemma 3 into an encoder if its files are those of one: causal, unless they say otherwise.
pub(super) fn as_encoder(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    if keys.bool(Key("", "use_bidirectional_attention"))? == Some(true) {
        return both_ways(keys, config);
    }
    if keys.embeds {
        encoder(config, true);
    }
    Ok(())
}

/// Makes attention bidirectional. The files' windows span both sides.
fn both_ways(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    if keys.u32(WINDOW)? == Some(0) {
        return Err(keys.wrong(WINDOW, "1 or more".into(), 0));
    }
    for window in config.blocks.iter_mut().filter_map(|block| block.attention.window.as_mut()) {
        *window = *window / 2 + 1;
    }
    encoder(config, false);
    Ok(())
}

/// EmbeddingGemma 2 (Google 2026): Gemma 4's blocks whose tokens see each other both ways, without a table of per-layer
/// embeddings, and a projection at the end. Its text part.
pub(super) const EMBEDDING_GEMMA2: Architecture = Architecture {
    gguf: "",
    json: &["embedding_gemma2_text"],
    names: &[
        SANDWICH[0],
        SANDWICH[1],
        SANDWICH[2],
        ("ple.per_layer_model_projection", "per_layer_model_proj"),
        ("ple.per_layer_projection_norm", "per_layer_proj_norm"),
        ("ple_block.per_layer_input_gate", "inp_gate"),
        ("ple_block.per_layer_projection", "proj"),
        ("ple_block.post_per_layer_input_norm", "post_norm"),
        ("layer_scalar", "layer_output_scale"),
        (PROJECTION, PROJECTION),
    ],
    // From `EmbeddingGemma2TextConfig`.
    defaults: r#"{
        "vocab_size": 262144, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 1, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "sliding_window": 512, "hidden_size_per_layer_input": 512, "embedding_dim": 768,
        "rope_parameters": { "full_attention": { "rope_theta": 1e6 }, "sliding_attention": { "rope_theta": 1e4 } }
    }"#,
    describe: |keys, config| {
        let dim = keys.required(EMBEDDING_DIM)?;
        if !(1..=MAX_DIM).contains(&dim) {
            return Err(keys.wrong(EMBEDDING_DIM, format!("1 to {MAX_DIM}"), dim));
        }
        let width = Key("", "hidden_size_per_layer_input");
        if keys.u32(width)? == Some(0) {
            return Err(keys.wrong(width, "1 or more".into(), 0));
        }
        let radius = keys.required(WINDOW)?;
        if !(1..=MAX_CONTEXT).contains(&radius) {
            return Err(keys.wrong(WINDOW, format!("1 to {MAX_CONTEXT}"), radius));
        }
        (GEMMA4.describe)(keys, config)?;
        for window in config.blocks.iter_mut().filter_map(|block| block.attention.window.as_mut()) {
            *window = radius + 1;
        }
        config.per_layer.iter_mut().for_each(|per_layer| per_layer.vocab_size = 0);
        encoder(config, false);
        Ok(())
    },
    ..GEMMA4
};

const EMBEDDING_DIM: Key = Key("", "embedding_dim");
/// Name of EmbeddingGemma 2's projection.
const PROJECTION: &str = "embedding_projection";

/// The projection at the end of an encoder, as a dense layer: without a bias, it commutes with mean pooling.
///
/// # Errors
/// [`Error::Config`] for a size that is no number.
pub(in crate::load) fn projection(config: &ModelConfig, json: &ConfigJson) -> Result<Option<DenseConfig>, Error> {
    if config.architecture != EMBEDDING_GEMMA2.json[0] {
        return Ok(None);
    }
    let outputs = json.get_u32(EMBEDDING_DIM.1)?;
    let layer = |outputs| DenseConfig { name: PROJECTION, inputs: config.dim, outputs, bias: false, activation: None };
    Ok(outputs.map(layer))
}
