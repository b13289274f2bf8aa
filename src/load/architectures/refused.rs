//! Errors for unsupported architectures, naming what they need.

use super::ALL;
use crate::error::Error;

/// Unsupported features of popular architectures, by their names in GGUF and `config.json`.
const MISSING: [(&[&str], &str); 18] = [
    (&["gemma3n", "gemma3n_text"], "several residual streams (AltUp) and sparse activations"),
    (&["falcon-h1", "falcon_h1"], "attention and a state-space model side by side in a layer"),
    (&["nemotron_h", "nemotron_h_moe"], "layers with only a state-space model, attention or a feed-forward"),
    (&["deepseek2", "deepseek_v2", "deepseek_v3", "kimi_k2"], "multi-head latent attention"),
    (&["glm4moe", "glm4_moe"], "a router that chooses groups of experts first"),
    (&["glm-dsa", "glm4_moe_lite", "glm_moe_dsa"], "multi-head latent attention"),
    (&["bitnet", "bitnet-b1.58"], "norms inside attention and feed-forward"),
    (&["mamba", "mamba2", "falcon_mamba", "jamba", "plamo2"], "layers with a state-space model in place of attention"),
    (&["rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7"], "linear attention of RWKV"),
    (&["qwen3next", "qwen3_next"], "gated delta rules whose projections are stored in groups"),
    (&["kimi-linear", "kimi_linear"], "Kimi delta attention"),
    (&["llama4", "llama4_text"], "chunked attention, and experts in every other layer"),
    (&["t5", "t5encoder", "bart"], "cross-attention from the decoder to an encoder"),
    (&["whisper", "qwen2_audio"], "audio"),
    (&["mpnet"], "attention scores with a bias by relative position"),
    (&["nomic-bert-moe"], "experts in every second layer of an encoder"),
    (&["jina-bert-v3", "jina_embeddings_v3"], "an adapter for each task inside an encoder"),
    (&["qwen2vl", "qwen3vl", "mllama", "llava", "clip", "gemma4v"], "images"),
];

/// The error for an unsupported architecture `name` in `field`.
pub(in crate::load) fn refused(format: &'static str, field: &str, name: &str) -> Error {
    let is_gguf = format == "gguf";
    let known = ALL.iter().flat_map(|architecture| match is_gguf {
        true => std::slice::from_ref(&architecture.gguf),
        false => architecture.json,
    });
    let known = known.copied().filter(|name| !name.is_empty()).collect::<Vec<_>>().join(", ");
    let needs = MISSING.iter().find(|(names, _)| names.contains(&name));
    let needs = needs.map_or(String::new(), |(_, needs)| format!(", which needs {needs}"));
    let found = format!("`{}`{needs}", name.escape_debug());
    Error::Unsupported { format, field: field.into(), found, supported: known }
}
