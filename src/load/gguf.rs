//! GGUF files of the llama architecture.

use std::borrow::Cow;

use super::{FileBytes, ModelFile, vocab_from_gguf};
use crate::dtype::WeightType;
use crate::error::Error;
use crate::formats::gguf::{Gguf, Metadata};
use crate::formats::{BlockType, TensorInfo, block};
use crate::kernels::{RopeConfig, RopeScaling, RopeStyle};
use crate::model::{ModelConfig, SourceTensor, WeightSource};
use crate::tokenizer::Tokenizer;

/// Frequency factors of the rotary embedding.
const ROPE_FREQS: &str = "rope_freqs.weight";

pub(super) fn open(name: String, bytes: FileBytes) -> Result<ModelFile, Error> {
    let gguf = Gguf::parse(&bytes, bytes.len() as u64)?;
    if let Some(count @ 2..) = gguf.metadata.get_u32("split.count")? {
        return Err(Error::Unsupported {
            format: "gguf",
            field: "split.count".into(),
            found: count.to_string(),
            supported: "one file; join the parts first".into(),
        });
    }
    let name = gguf.metadata.get_str("general.name")?.map_or(name, str::to_owned);
    let tokenizer = vocab_from_gguf(&gguf.metadata).and_then(Tokenizer::from_vocab);
    let size_bytes = bytes.len() as u64;
    gguf.tensors.iter().try_for_each(|tensor| check_type("gguf", tensor))?;
    let source = GgufSource { bytes, gguf };
    let config = config(&source)?;
    check_names(&source.gguf.tensors, config.n_layers)?;
    if let Ok(tokenizer) = &tokenizer
        && tokenizer.vocab_size() > config.vocab_size as usize
    {
        return Err(Error::Config {
            field: "tokenizer.ggml.tokens".into(),
            expected: format!("at most the {} rows of token_embd.weight", config.vocab_size),
            found: tokenizer.vocab_size().to_string(),
        });
    }
    Ok(ModelFile { name, config, source: Box::new(source), tokenizer, size_bytes })
}

/// The configuration, from the keys of the llama architecture.
fn config(source: &GgufSource) -> Result<ModelConfig, Error> {
    let metadata = &source.gguf.metadata;
    let architecture = metadata.get_str("general.architecture")?.unwrap_or("missing");
    if architecture != "llama" {
        return Err(Error::Unsupported {
            format: "gguf",
            field: "general.architecture".into(),
            found: format!("`{architecture}`"),
            supported: "llama".into(),
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
    let embd = source.describe("token_embd.weight").ok_or_else(|| missing("token_embd.weight"))?;
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
            scaling: rope_scaling(source, metadata, rot_dims)?,
        },
        window: optional("attention.sliding_window")?,
    };
    config.check()?;
    Ok(config)
}

/// Frequency factors where the file has them, else the scaling that its keys name.
fn rope_scaling(source: &GgufSource, metadata: &Metadata, rot_dims: u32) -> Result<RopeScaling, Error> {
    if let Some(freqs) = source.describe(ROPE_FREQS) {
        let refused = |expected: String, found: String| Error::Config { field: ROPE_FREQS.into(), expected, found };
        // Before it is read: a pair of dimensions has one factor, however large the tensor is.
        let expected = [u64::from(rot_dims / 2)];
        if freqs.shape != expected {
            return Err(refused(format!("a tensor of shape {expected:?}"), format!("one of shape {:?}", freqs.shape)));
        }
        let factors = source.floats(ROPE_FREQS)?;
        return match factors.iter().find(|factor| !(factor.is_finite() && **factor > 0.0)) {
            Some(factor) => Err(refused("finite factors above 0".into(), factor.to_string())),
            None => Ok(RopeScaling::Factors(factors)),
        };
    }
    let factor = metadata.get_f32("llama.rope.scaling.factor")?;
    match (metadata.get_str("llama.rope.scaling.type")?, factor) {
        (None | Some("none"), _) | (Some("linear"), None) => Ok(RopeScaling::None),
        (Some("linear"), Some(factor)) if factor.is_finite() && factor > 0.0 => {
            Ok(RopeScaling::Linear { factor: f64::from(factor) })
        }
        (Some("linear"), Some(factor)) => Err(Error::Config {
            field: "llama.rope.scaling.factor".into(),
            expected: "a finite number above 0".into(),
            found: factor.to_string(),
        }),
        (Some(other), _) => Err(Error::Unsupported {
            format: "gguf",
            field: "llama.rope.scaling.type".into(),
            found: format!("`{other}`"),
            supported: "none, linear, or rope_freqs.weight".into(),
        }),
    }
}

/// Refuses tensors that no pass would read: a file with them is of another model, whose text ours would not be.
fn check_names(tensors: &[TensorInfo], n_layers: u32) -> Result<(), Error> {
    const NORMS: [&str; 2] = ["attn_norm", "ffn_norm"];
    const PROJECTIONS: [&str; 7] = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let is_read = |name: &str| {
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
    match tensors.iter().find(|tensor| is_read(&tensor.name) != Some(true)) {
        Some(tensor) => Err(Error::Config {
            field: tensor.name.clone(),
            expected: format!("no such tensor in a llama model of {n_layers} layers"),
            found: "in the file".into(),
        }),
        None => Ok(()),
    }
}

fn missing(field: &str) -> Error {
    Error::Config { field: field.into(), expected: "a value".into(), found: "missing".into() }
}

struct GgufSource {
    bytes: FileBytes,
    gguf: Gguf,
}

impl WeightSource for GgufSource {
    fn describe(&self, name: &str) -> Option<SourceTensor> {
        self.gguf.tensor(name).map(describe)
    }

    fn rows(&self, name: &str) -> Result<Cow<'_, [u8]>, Error> {
        rows(self.gguf.tensor(name).ok_or_else(|| missing(name))?, &self.bytes)
    }

    fn floats(&self, name: &str) -> Result<Vec<f32>, Error> {
        floats(self.gguf.tensor(name).ok_or_else(|| missing(name))?, &self.bytes)
    }
}

/// Refuses a tensor whose type has no decoder, before anything is allocated for the model.
pub(super) fn check_type(format: &'static str, tensor: &TensorInfo) -> Result<(), Error> {
    // The decoder is chosen by the type alone, so that no data at all tells whether there is one.
    block::dequantize(tensor.block_type, &[], &mut []).map_err(|error| match error {
        Error::Unsupported { found, supported, .. } => {
            let field = format!("type of tensor `{}`", tensor.name.escape_debug());
            Error::Unsupported { format, field, found, supported }
        }
        other => other,
    })
}

/// The weight type under which a tensor's rows are served: its own where kernels have it, else F32, which is exact.
fn weight_type(block_type: BlockType) -> WeightType {
    match block_type {
        BlockType::F16 => WeightType::F16,
        BlockType::BF16 => WeightType::BF16,
        BlockType::Q8_0 => WeightType::Q8_0,
        BlockType::Q4_0 => WeightType::Q4_0,
        _ => WeightType::F32,
    }
}

pub(super) fn describe(tensor: &TensorInfo) -> SourceTensor {
    SourceTensor { weight: weight_type(tensor.block_type), shape: tensor.shape.clone() }
}

/// Rows as they stand in the file; types that no kernel reads are expanded to F32.
pub(super) fn rows<'a>(tensor: &TensorInfo, file: &'a [u8]) -> Result<Cow<'a, [u8]>, Error> {
    let weight = weight_type(tensor.block_type);
    if weight != WeightType::F32 || tensor.block_type == BlockType::F32 {
        return Ok(Cow::Borrowed(tensor.bytes(file)?));
    }
    Ok(Cow::Owned(bytemuck::cast_slice(&floats(tensor, file)?).to_vec()))
}

pub(super) fn floats(tensor: &TensorInfo, file: &[u8]) -> Result<Vec<f32>, Error> {
    let mut values = vec![0.0; tensor.n_elements() as usize];
    block::dequantize(tensor.block_type, tensor.bytes(file)?, &mut values)?;
    Ok(values)
}
