//! Errors for unsupported architectures, naming what they need.

use super::ALL;
use crate::error::Error;
use crate::load::speech::WHISPER;
use crate::load::vision::CLIP;

/// Unsupported features of popular architectures, by their names in GGUF and `config.json`.
const MISSING: [(&[&str], &str); 14] = [
    (&["gemma3n", "gemma3n_text"], "several residual streams (AltUp) and sparse activations"),
    (&["deepseek_v32", "deepseek_v4", "glm-dsa", "glm_moe_dsa"], "sparse attention, whose keys an indexer chooses"),
    (&["bitnet", "bitnet-b1.58"], "norms inside attention and feed-forward"),
    (&["mamba", "falcon_mamba", "jamba"], "layers of Mamba 1"),
    (&["plamo2"], "PLaMo's own layers with a state-space model"),
    (&["rwkv6", "rwkv7", "rwkv6qwen2", "arwkv7"], "linear attention of RWKV"),
    (&["kimi-linear", "kimi_linear"], "Kimi Delta Attention with low-rank, unbounded gates"),
    (&["bailingmoe"], "Ling 1's routing by softmax"),
    (&["bailing_moe_linear"], "Lightning attention"),
    (&["llama4", "llama4_text"], "chunked attention, and experts in every other layer"),
    (&["t5", "bart"], "cross-attention from the decoder to an encoder"),
    (&["qwen2_audio"], "audio"),
    (&["clip_vision_model", "siglip_vision_model", "siglip2_vision_model"], "a text encoder beside the image encoder"),
    (&["qwen2vl", "mllama", "llava", "gemma4v"], "images"),
];

/// The error for an unsupported architecture `name` in `field`.
pub(in crate::load) fn refused(format: &'static str, field: &str, name: &str) -> Error {
    let is_gguf = format == "gguf";
    if is_gguf && name == CLIP {
        let found = format!("`{CLIP}`, a vision encoder");
        let supported = "a language model or text encoder; the vision encoder goes beside it, or to `--mmproj`".into();
        return Error::Unsupported { format, field: field.into(), found, supported };
    }
    if name == WHISPER {
        let found = format!("`{WHISPER}`, a speech model");
        let supported =
            "a language model or text encoder; `tilewright transcribe` and `Transcriber` take speech models";
        return Error::Unsupported { format, field: field.into(), found, supported: supported.into() };
    }
    let known = ALL.iter().flat_map(|architecture| match is_gguf {
        true => std::slice::from_ref(&architecture.gguf),
        false => architecture.json,
    });
    let known = known.copied().filter(|name| !name.is_empty()).collect::<Vec<_>>().join(", ");
    let needs = MISSING.iter().find(|(names, _)| names.contains(&name));
    let (needs, supported) = match needs {
        Some((_, needs)) => (format!(", which needs {needs}"), "the architectures in docs/models.md".into()),
        None => (String::new(), known),
    };
    let found = format!("`{}`{needs}", name.escape_debug());
    Error::Unsupported { format, field: field.into(), found, supported }
}
