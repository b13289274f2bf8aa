//! Hugging Face folders: `config.json`, `model.safetensors` or its sharded index, `tokenizer.json`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use super::gguf::{check_type, describe, floats, rows};
use super::{FileBytes, ModelFile};
use crate::error::Error;
use crate::formats::TensorInfo;
use crate::formats::config_json::ConfigJson;
use crate::formats::safetensors::{Safetensors, ShardIndex};
use crate::kernels::{RopeConfig, RopeScaling, RopeStyle};
use crate::model::{ModelConfig, SourceTensor, WeightSource};
use crate::tokenizer::{Tokenizer, TokenizerConfig};

/// Opens a folder, or one `.safetensors` file with the `config.json` beside it.
pub(super) fn open(path: &Path) -> Result<ModelFile, Error> {
    let folder = match path.is_dir() {
        true => path,
        false => path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")),
    };
    let is_weights = path.extension().is_some_and(|ext| ext == "safetensors");
    let source = SafetensorsSource::open(folder, is_weights.then_some(path))?;
    let config_path = folder.join("config.json");
    let (config, is_tied) = config(&read(&config_path)?).map_err(|e| e.in_file(&config_path))?;
    if !is_tied && source.describe("output.weight").is_none() {
        return Err(missing("lm_head.weight").in_file(path));
    }
    Ok(ModelFile {
        name: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        config,
        size_bytes: source.files.iter().map(|file| file.len() as u64).sum(),
        source: Box::new(source),
        tokenizer: tokenizer(folder),
    })
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    /// Far more than any configuration or vocabulary has.
    const MAX_BYTES: u64 = 256 << 20;
    let io = |source| Error::Io { path: path.into(), source };
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > MAX_BYTES {
        let expected = format!("at most {MAX_BYTES} bytes");
        let error =
            Error::Format { format: "json", field: "size".into(), offset: 0, expected, found: size.to_string() };
        return Err(error.in_file(path));
    }
    std::fs::read(path).map_err(io)
}

fn tokenizer(folder: &Path) -> Result<Tokenizer, Error> {
    let config_path = folder.join("tokenizer_config.json");
    let config = match config_path.exists() {
        true => TokenizerConfig::from_json(&read(&config_path)?).map_err(|e| e.in_file(&config_path))?,
        false => TokenizerConfig::default(),
    };
    let path = folder.join("tokenizer.json");
    Tokenizer::from_json(&read(&path)?, &config).map_err(|e| e.in_file(path))
}

/// The configuration, from the keys of `LlamaForCausalLM` and `MistralForCausalLM`, as transformers 4 and 5 write them,
/// and whether the embedding is also the head.
fn config(bytes: &[u8]) -> Result<(ModelConfig, bool), Error> {
    let json = ConfigJson::parse(bytes)?;
    let architecture = json.get_str("model_type")?.unwrap_or("missing");
    if !matches!(architecture, "llama" | "mistral") {
        return Err(Error::Unsupported {
            format: "config.json",
            field: "model_type".into(),
            found: format!("`{architecture}`"),
            supported: "llama, mistral".into(),
        });
    }
    if let Some(activation) = json.get_str("hidden_act")?
        && activation != "silu"
    {
        return Err(Error::Unsupported {
            format: "config.json",
            field: "hidden_act".into(),
            found: format!("`{activation}`"),
            supported: "silu".into(),
        });
    }
    let required = |key: &str| json.get_u32(key)?.ok_or_else(|| missing(key));
    let (dim, n_heads) = (required("hidden_size")?, required("num_attention_heads")?);
    let head_dim = match json.get_u32("head_dim")? {
        Some(head_dim) => head_dim,
        None => dim.checked_div(n_heads).unwrap_or(0),
    };
    // transformers 5 keeps base and scaling together.
    let theta = match json.get_f32("rope_parameters.rope_theta")? {
        Some(theta) => Some(theta),
        None => json.get_f32("rope_theta")?,
    };
    let config = ModelConfig {
        architecture: architecture.into(),
        dim,
        ffn_dim: required("intermediate_size")?,
        n_layers: required("num_hidden_layers")?,
        n_heads,
        n_kv_heads: json.get_u32("num_key_value_heads")?.unwrap_or(n_heads),
        head_dim,
        vocab_size: required("vocab_size")?,
        max_seq_len: required("max_position_embeddings")?,
        norm_eps: json.get_f32("rms_norm_eps")?.ok_or_else(|| missing("rms_norm_eps"))?,
        rope: RopeConfig {
            rot_dims: head_dim,
            theta: f64::from(theta.unwrap_or(10_000.0)),
            style: RopeStyle::Halves,
            scaling: rope_scaling(&json)?,
        },
        window: json.get_u32("sliding_window")?,
    };
    config.check()?;
    Ok((config, json.get_bool("tie_word_embeddings")?.unwrap_or(false)))
}

fn rope_scaling(json: &ConfigJson) -> Result<RopeScaling, Error> {
    let section = ["rope_parameters", "rope_scaling"].into_iter().find_map(|section| match json.get(section) {
        Ok(None) => None,
        other => Some(other.map(|_| section)),
    });
    let Some(section) = section.transpose()? else { return Ok(RopeScaling::None) };
    let key = |name: &str| format!("{section}.{name}");
    // Older files say `type`.
    let kind = match json.get_str(&key("rope_type"))? {
        Some(kind) => Some(kind),
        None => json.get_str(&key("type"))?,
    };
    let number = |name: &str| -> Result<f64, Error> {
        let value = json.get_f32(&key(name))?.ok_or_else(|| missing(&key(name)))?;
        match value.is_finite() && value > 0.0 {
            true => Ok(f64::from(value)),
            false => Err(Error::Config {
                field: key(name),
                expected: "a finite number above 0".into(),
                found: value.to_string(),
            }),
        }
    };
    match kind {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: number("factor")? }),
        Some("llama3") => {
            let (low_freq_factor, high_freq_factor) = (number("low_freq_factor")?, number("high_freq_factor")?);
            if low_freq_factor >= high_freq_factor {
                return Err(Error::Config {
                    field: key("high_freq_factor"),
                    expected: format!("a number above low_freq_factor, {low_freq_factor}"),
                    found: high_freq_factor.to_string(),
                });
            }
            Ok(RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor,
                high_freq_factor,
                original_max_seq_len: number("original_max_position_embeddings")?,
            })
        }
        Some(other) => Err(Error::Unsupported {
            format: "config.json",
            field: key("rope_type"),
            found: format!("`{other}`"),
            supported: "default, linear, llama3".into(),
        }),
    }
}

fn missing(field: &str) -> Error {
    Error::Config { field: field.into(), expected: "a value".into(), found: "missing".into() }
}

/// Tensors of one or more safetensors files.
struct SafetensorsSource {
    files: Vec<FileBytes>,
    /// By name: which file, and where in it.
    tensors: HashMap<String, (usize, TensorInfo)>,
}

impl SafetensorsSource {
    /// The tensors of `weights`, or of the folder: all shards of its index, or its only file. A shard stands for all.
    fn open(folder: &Path, weights: Option<&Path>) -> Result<SafetensorsSource, Error> {
        let mut source = SafetensorsSource { files: Vec::new(), tensors: HashMap::new() };
        let index_path = folder.join("model.safetensors.index.json");
        let index = match index_path.exists() {
            true => Some(ShardIndex::parse(&read(&index_path)?).map_err(|e| e.in_file(&index_path))?),
            false => None,
        };
        let name = weights.and_then(Path::file_name).map(|name| name.to_string_lossy());
        let index = index.filter(|index| name.is_none_or(|name| index.shards().iter().any(|shard| *shard == name)));
        let Some(index) = index else {
            source.add(weights.unwrap_or(&folder.join("model.safetensors")), |_| Ok(()))?;
            return Ok(source);
        };
        for shard in index.shards() {
            source.add(&folder.join(shard), |file| index.check_shard(shard, file))?;
        }
        Ok(source)
    }

    fn add(&mut self, path: &Path, check: impl Fn(&Safetensors) -> Result<(), Error>) -> Result<(), Error> {
        let bytes = FileBytes::map(path)?;
        let parsed = Safetensors::parse(&bytes, bytes.len() as u64).and_then(|file| check(&file).map(|()| file));
        for tensor in parsed.map_err(|e| e.in_file(path))?.tensors {
            // Other tensors, such as buffers that old checkpoints saved along, are not read.
            if tensor.name.ends_with(".weight") || tensor.name.ends_with(".bias") {
                check_type("safetensors", &tensor).map_err(|e| e.in_file(path))?;
            }
            self.tensors.insert(tensor.name.clone(), (self.files.len(), tensor));
        }
        self.files.push(bytes);
        Ok(())
    }

    /// The tensor that GGUF calls `name`.
    fn find(&self, name: &str) -> Option<(&TensorInfo, &[u8])> {
        let (file, tensor) = self.tensors.get(&published_name(name)?)?;
        Some((tensor, self.files.get(*file)?))
    }
}

/// The name that published Llama checkpoints give to the tensor that GGUF calls `name`.
fn published_name(name: &str) -> Option<String> {
    let (stem, suffix) = name.rsplit_once('.')?;
    let plain = match stem {
        "token_embd" => "model.embed_tokens",
        "output_norm" => "model.norm",
        "output" => "lm_head",
        _ => {
            let (layer, part) = stem.strip_prefix("blk.")?.split_once('.')?;
            let part = match part {
                "attn_norm" => "input_layernorm",
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_output" => "self_attn.o_proj",
                "ffn_norm" => "post_attention_layernorm",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                _ => return None,
            };
            return Some(format!("model.layers.{layer}.{part}.{suffix}"));
        }
    };
    Some(format!("{plain}.{suffix}"))
}

impl WeightSource for SafetensorsSource {
    fn describe(&self, name: &str) -> Option<SourceTensor> {
        self.find(name).map(|(tensor, _)| describe(tensor))
    }

    fn rows(&self, name: &str) -> Result<Cow<'_, [u8]>, Error> {
        let (tensor, file) = self.find(name).ok_or_else(|| missing(name))?;
        rows(tensor, file)
    }

    fn floats(&self, name: &str) -> Result<Vec<f32>, Error> {
        let (tensor, file) = self.find(name).ok_or_else(|| missing(name))?;
        floats(tensor, file)
    }
}
