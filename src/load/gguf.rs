//! GGUF files: those of the llama architecture, and what they have in common with those of encoders.

use super::catalog::{Catalog, check_type, floats};
use super::{ModelHeader, ModelShape, gguf_encoder, vocab_from_gguf};
use crate::error::Error;
use crate::formats::TensorInfo;
use crate::formats::gguf::{Gguf, Metadata};
use crate::kernels::{RopeConfig, RopeScaling, RopeStyle};
use crate::model::{ModelConfig, WeightSource};
use crate::tokenizer::Tokenizer;

/// Frequency factors of the rotary embedding.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// How many files the model of this one is split into.
pub(super) fn n_shards(gguf: &Gguf) -> Result<usize, Error> {
    Ok(gguf.metadata.get_u32("split.count")?.unwrap_or(1).max(1) as usize)
}

/// The tensor whose data belongs to the configuration, and the number of its file.
pub(super) fn config_tensor(shards: &[Gguf]) -> Option<(usize, &TensorInfo)> {
    /// Far more than one factor for each pair of dimensions takes; what is larger is refused by its shape.
    const MAX_BYTES: u64 = 1 << 16;
    let found = shards.iter().enumerate().find_map(|(file, gguf)| Some((file, gguf.tensor(ROPE_FREQS)?)));
    found.filter(|(_, tensor)| tensor.size_bytes <= MAX_BYTES)
}

/// What the headers of a GGUF file, or of all shards of one, say of the model. `config_data` is the data of
/// [`config_tensor`].
pub(super) fn header(name: &str, shards: Vec<Gguf>, config_data: Option<&[u8]>) -> Result<ModelHeader, Error> {
    let mut catalog = Catalog::default();
    let wrong = |field: &str, expected: String, found: String| Error::Config { field: field.into(), expected, found };
    for (file, gguf) in shards.iter().enumerate() {
        let count = n_shards(gguf)?;
        if count != shards.len() {
            let found = format!("{} of {count}", shards.len());
            return Err(wrong("split.count", format!("all {count} files of the model, in order"), found));
        }
        let no = gguf.metadata.get_u32("split.no")?.unwrap_or(0) as usize;
        if no != file {
            return Err(wrong("split.no", format!("file {file} at this place"), format!("file {no}")));
        }
        for tensor in &gguf.tensors {
            check_type("gguf", tensor)?;
            if catalog.find(&tensor.name).is_some() {
                let name = tensor.name.escape_debug().to_string();
                return Err(wrong(&name, "a tensor in one file of the model".into(), "a second one".into()));
            }
            catalog.insert(tensor.name.clone(), file, tensor.clone());
        }
    }
    let Some(first) = shards.first() else { return Err(missing("split.count")) };
    let metadata = &first.metadata;
    let shape = match gguf_encoder::shape(metadata, &catalog)? {
        Some(shape) => ModelShape::Encoder(shape),
        None => ModelShape::Decoder(config(metadata, &catalog, config_data)?),
    };
    let vocab_size = match &shape {
        ModelShape::Decoder(config) => config.vocab_size,
        ModelShape::Encoder(shape) => shape.config.vocab_size,
    };
    shards.iter().try_for_each(|gguf| check_names(&gguf.tensors, &shape))?;
    let tokenizer = vocab_from_gguf(metadata).and_then(Tokenizer::from_vocab);
    if let Ok(tokenizer) = &tokenizer
        && tokenizer.vocab_size() > vocab_size as usize
    {
        return Err(Error::Config {
            field: "tokenizer.ggml.tokens".into(),
            expected: format!("at most the {vocab_size} rows of token_embd.weight"),
            found: tokenizer.vocab_size().to_string(),
        });
    }
    Ok(ModelHeader {
        name: metadata.get_str("general.name")?.unwrap_or(name).to_owned(),
        shape,
        tokenizer,
        chat_template: metadata.get_str("tokenizer.chat_template")?.map(str::to_owned),
        catalog,
    })
}

/// The configuration, from the keys of the llama architecture.
fn config(metadata: &Metadata, catalog: &Catalog, config_data: Option<&[u8]>) -> Result<ModelConfig, Error> {
    let architecture = metadata.get_str("general.architecture")?.unwrap_or("missing");
    if architecture != "llama" {
        return Err(Error::Unsupported {
            format: "gguf",
            field: "general.architecture".into(),
            found: format!("`{architecture}`"),
            supported: "llama, bert, modern-bert, nomic-bert, and qwen3 with qwen3.pooling_type".into(),
        });
    }
    let required = |key: &str| -> Result<u32, Error> {
        let key = format!("llama.{key}");
        metadata.get_u32(&key)?.ok_or_else(|| missing(&key))
    };
    let optional = |key: &str| metadata.get_u32(&format!("llama.{key}"));
    if let Some(experts @ 1..) = optional("expert_count")? {
        return Err(Error::Unsupported {
            format: "gguf",
            field: "llama.expert_count".into(),
            found: experts.to_string(),
            supported: "models without experts".into(),
        });
    }
    let dim = required("embedding_length")?;
    let n_heads = required("attention.head_count")?;
    let head_dim = match optional("attention.key_length")? {
        Some(head_dim) => head_dim,
        None => dim.checked_div(n_heads).filter(|d| d * n_heads == dim).ok_or_else(|| Error::Config {
            field: "llama.attention.head_count".into(),
            expected: format!("a divisor of the width {dim}"),
            found: n_heads.to_string(),
        })?,
    };
    let rot_dims = optional("rope.dimension_count")?.unwrap_or(head_dim);
    let embd = catalog.describe("token_embd.weight").ok_or_else(|| missing("token_embd.weight"))?;
    let vocab_size = embd.shape.first().and_then(|&rows| u32::try_from(rows).ok()).unwrap_or(0);
    let config = ModelConfig {
        architecture: architecture.into(),
        dim,
        ffn_dim: required("feed_forward_length")?,
        n_layers: required("block_count")?,
        n_heads,
        n_kv_heads: optional("attention.head_count_kv")?.unwrap_or(n_heads),
        head_dim,
        vocab_size,
        max_seq_len: required("context_length")?,
        norm_eps: metadata
            .get_f32("llama.attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| missing("llama.attention.layer_norm_rms_epsilon"))?,
        rope: RopeConfig {
            rot_dims,
            theta: f64::from(metadata.get_f32("llama.rope.freq_base")?.unwrap_or(10_000.0)),
            style: RopeStyle::Interleaved,
            scaling: rope_scaling(metadata, catalog, config_data, rot_dims)?,
        },
        window: optional("attention.sliding_window")?,
    };
    config.check()?;
    Ok(config)
}

/// Frequency factors where the file has them, else the scaling that its keys name.
fn rope_scaling(
    metadata: &Metadata,
    catalog: &Catalog,
    config_data: Option<&[u8]>,
    rot_dims: u32,
) -> Result<RopeScaling, Error> {
    if let Some((_, freqs)) = catalog.find(ROPE_FREQS) {
        let refused = |expected: String, found: String| Error::Config { field: ROPE_FREQS.into(), expected, found };
        // Before it is read: a pair of dimensions has one factor, however large the tensor is.
        let expected = [u64::from(rot_dims / 2)];
        if freqs.shape != expected {
            return Err(refused(format!("a tensor of shape {expected:?}"), format!("one of shape {:?}", freqs.shape)));
        }
        let factors = floats(freqs, config_data.ok_or_else(|| missing(ROPE_FREQS))?)?;
        return match factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
            Some(factor) => Err(refused("finite factors above 0".into(), factor.to_string())),
            None => Ok(RopeScaling::Factors(factors)),
        };
    }
    named_scaling("llama", metadata, "none, linear, or rope_freqs.weight")
}

/// The scaling that the architecture's keys name.
pub(super) fn named_scaling(architecture: &str, metadata: &Metadata, supported: &str) -> Result<RopeScaling, Error> {
    let key = |key: &str| format!("{architecture}.rope.scaling.{key}");
    let factor = metadata.get_f32(&key("factor"))?;
    match (metadata.get_str(&key("type"))?, factor) {
        (None | Some("none"), _) | (Some("linear"), None) => Ok(RopeScaling::None),
        (Some("linear"), Some(factor)) if factor.is_finite() && factor > 0.0 => {
            Ok(RopeScaling::Linear { factor: f64::from(factor) })
        }
        (Some("linear"), Some(factor)) => Err(Error::Config {
            field: key("factor"),
            expected: "a finite number above 0".into(),
            found: factor.to_string(),
        }),
        (Some(other), _) => Err(Error::Unsupported {
            format: "gguf",
            field: key("type"),
            found: format!("`{other}`"),
            supported: supported.into(),
        }),
    }
}

/// Refuses tensors that no pass would read: a file with them is of another model, whose text ours would not be.
fn check_names(tensors: &[TensorInfo], shape: &ModelShape) -> Result<(), Error> {
    let (architecture, n_layers) = match shape {
        ModelShape::Decoder(config) => (&config.architecture, config.n_layers),
        ModelShape::Encoder(shape) => (&shape.config.architecture, shape.config.n_layers),
    };
    let is_read = |name: &str| match shape {
        ModelShape::Decoder(_) => reads(name, n_layers),
        ModelShape::Encoder(shape) => gguf_encoder::reads(name, &shape.config),
    };
    match tensors.iter().find(|tensor| !is_read(&tensor.name)) {
        Some(tensor) => Err(Error::Config {
            field: tensor.name.clone(),
            expected: format!("no such tensor in a {architecture} model of {n_layers} layers"),
            found: "in the file".into(),
        }),
        None => Ok(()),
    }
}

/// Whether a pass of a Llama of so many layers reads the tensor.
fn reads(name: &str, n_layers: u32) -> bool {
    const NORMS: [&str; 2] = ["attn_norm", "ffn_norm"];
    const PROJECTIONS: [&str; 7] = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let is_read = || {
        let (stem, suffix) = name.rsplit_once('.')?;
        let (has_weight, has_bias) = match stem.strip_prefix("blk.") {
            None => (matches!(stem, "token_embd" | "output_norm" | "output" | "rope_freqs"), stem == "output"),
            Some(rest) => {
                let (layer, part) = rest.split_once('.')?;
                layer.parse().ok().filter(|layer: &u32| *layer < n_layers)?;
                let is_projection = PROJECTIONS.contains(&part);
                // The first converters wrote the plain frequencies of each layer, which everyone computes anyway.
                (is_projection || NORMS.contains(&part) || part == "attn_rot_embd", is_projection)
            }
        };
        Some(suffix == "weight" && has_weight || suffix == "bias" && has_bias)
    };
    is_read() == Some(true)
}

fn missing(field: &str) -> Error {
    Error::Config { field: field.into(), expected: "a value".into(), found: "missing".into() }
}
