//! Hugging Face folders: `config.json`, `model.safetensors` or its sharded index, `tokenizer.json`.

#[cfg(not(target_arch = "wasm32"))]
use std::path::Path;

use super::catalog::{Catalog, check_type};
#[cfg(not(target_arch = "wasm32"))]
use super::{FileBytes, ModelFile};
use super::{ModelHeader, ModelShape, encoder};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::safetensors::{Safetensors, ShardIndex};
use crate::kernels::{RopeConfig, RopeScaling, RopeStyle};
use crate::model::{ModelConfig, WeightSource};
use crate::tokenizer::{Tokenizer, TokenizerConfig};

/// Name of the configuration in a folder.
pub(super) const CONFIG: &str = "config.json";
/// Name of the tokenizer.
pub(super) const TOKENIZER: &str = "tokenizer.json";
/// Name of the tokenizer's configuration, which may be missing.
pub(super) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Name of the chat template where it is a file of its own.
pub(super) const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Names of what sentence-transformers adds to a folder.
pub(super) const MODULES: &str = "modules.json";
pub(super) const POOLING: &str = "1_Pooling/config.json";
pub(super) const SENTENCE_CONFIG: &str = "sentence_bert_config.json";
pub(super) const PROMPTS: &str = "config_sentence_transformers.json";
/// Name of the list of shards, which may be missing.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The small files of a folder, those that are there.
#[derive(Debug, Default)]
pub(super) struct Texts {
    pub config: Option<Vec<u8>>,
    pub tokenizer: Option<Vec<u8>>,
    pub tokenizer_config: Option<Vec<u8>>,
    pub chat_template: Option<Vec<u8>>,
    pub index: Option<Vec<u8>>,
    pub modules: Option<Vec<u8>>,
    pub pooling: Option<Vec<u8>>,
    pub sentence_config: Option<Vec<u8>>,
    pub prompts: Option<Vec<u8>>,
}

impl Texts {
    /// Where the file of this name is kept; `None` for a file that is not read.
    pub fn slot(&mut self, name: &str) -> Option<&mut Option<Vec<u8>>> {
        Some(match name {
            CONFIG => &mut self.config,
            TOKENIZER => &mut self.tokenizer,
            TOKENIZER_CONFIG => &mut self.tokenizer_config,
            CHAT_TEMPLATE => &mut self.chat_template,
            INDEX => &mut self.index,
            MODULES => &mut self.modules,
            POOLING => &mut self.pooling,
            SENTENCE_CONFIG => &mut self.sentence_config,
            PROMPTS => &mut self.prompts,
            _ => return None,
        })
    }
}

/// What a folder's files say of the model. `weights` are the headers of its weight files with their names.
pub(super) fn header(name: &str, texts: &Texts, weights: &[(String, Safetensors)]) -> Result<ModelHeader, Error> {
    let in_file = |file: &'static str| move |error: Error| error.in_file(file);
    let bytes = texts.config.as_ref().ok_or_else(|| missing(CONFIG))?;
    let json = ConfigJson::parse(bytes).map_err(in_file(CONFIG))?;
    let (shape, is_tied) = match encoder::shape(&json, texts)? {
        Some(shape) => (ModelShape::Encoder(shape), true),
        None => {
            let (config, is_tied) = config(&json).map_err(in_file(CONFIG))?;
            (ModelShape::Decoder(config), is_tied)
        }
    };
    let gguf_name = |name: &str| match &shape {
        ModelShape::Decoder(_) => gguf_name(name),
        ModelShape::Encoder(shape) => encoder::gguf_name(&shape.config.architecture, name),
    };
    let mut catalog = Catalog::default();
    for (file, (file_name, header)) in weights.iter().enumerate() {
        for tensor in &header.tensors {
            // Other tensors, such as buffers that old checkpoints saved along, are not read.
            let Some(name) = gguf_name(&tensor.name) else { continue };
            check_type("safetensors", tensor).map_err(|e| e.in_file(file_name))?;
            catalog.insert(name, file, tensor.clone());
        }
    }
    if !is_tied && catalog.describe("output.weight").is_none() {
        return Err(missing("lm_head.weight"));
    }
    let tokenizer_config = match &texts.tokenizer_config {
        Some(bytes) => TokenizerConfig::from_json(bytes).map_err(in_file(TOKENIZER_CONFIG)),
        None => Ok(TokenizerConfig::default()),
    };
    let tokenizer = tokenizer_config.and_then(|config| {
        let bytes = texts.tokenizer.as_ref().ok_or_else(|| missing(TOKENIZER))?;
        Tokenizer::from_json(bytes, &config).map_err(in_file(TOKENIZER))
    });
    let chat_template = match (&texts.chat_template, &texts.tokenizer_config) {
        (Some(bytes), _) => Some(String::from_utf8_lossy(bytes).into_owned()),
        // A broken file is the tokenizer's error.
        (None, Some(bytes)) => template_in(bytes).unwrap_or_default(),
        (None, None) => None,
    };
    Ok(ModelHeader { name: name.to_owned(), shape, tokenizer, chat_template, catalog })
}

/// The chat template in a `tokenizer_config.json`: a text, or the one called `default` in a list.
fn template_in(json: &[u8]) -> Result<Option<String>, Error> {
    let json = ConfigJson::parse(json)?;
    let template = match json.get("chat_template")? {
        Some(serde_json::Value::Array(named)) => named
            .iter()
            .find(|entry| entry.get("name").is_some_and(|name| name == "default"))
            .and_then(|entry| entry.get("template")),
        other => other,
    };
    Ok(template.and_then(|template| template.as_str()).map(str::to_owned))
}

/// Opens a folder, or one `.safetensors` file with the `config.json` beside it.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn open(path: &Path) -> Result<ModelFile, Error> {
    let folder = match path.is_dir() {
        true => path,
        false => path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")),
    };
    let mut texts = Texts::default();
    for name in [CONFIG, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, INDEX, MODULES, POOLING, SENTENCE_CONFIG, PROMPTS]
    {
        let path = folder.join(name);
        if let Some(slot) = texts.slot(name)
            && path.exists()
        {
            *slot = Some(read(&path)?);
        }
    }
    let chosen = path.extension().is_some_and(|ext| ext == "safetensors").then_some(path);
    let chosen = chosen.and_then(Path::file_name).map(|name| name.to_string_lossy());
    let names = weight_files(&texts, chosen.as_deref()).map_err(|e| e.in_folder(folder))?;
    let mut files = Vec::new();
    let mut weights = Vec::new();
    for name in names {
        let path = folder.join(&name);
        let bytes = FileBytes::map(&path)?;
        let header = Safetensors::parse(&bytes, bytes.len() as u64).map_err(|e| e.in_file(&path))?;
        weights.push((name, header));
        files.push(bytes);
    }
    check_shards(&texts, &weights).map_err(|e| e.in_folder(folder))?;
    if texts.config.is_none() {
        // The system's own words for why it cannot be read.
        texts.config = Some(read(&folder.join(CONFIG))?);
    }
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let mut header = header(&name, &texts, &weights).map_err(|e| e.in_folder(folder))?;
    header.tokenizer = header.tokenizer.map_err(|e| e.in_folder(folder));
    Ok(ModelFile { header, files })
}

/// Names of the weight files: `chosen`, or all shards of the index if it lists `chosen` or nothing is chosen, or the
/// one file that a folder without an index has.
pub(super) fn weight_files(texts: &Texts, chosen: Option<&str>) -> Result<Vec<String>, Error> {
    let index = match &texts.index {
        Some(json) => Some(ShardIndex::parse(json).map_err(|e| e.in_file(INDEX))?),
        None => None,
    };
    let listed = index.filter(|index| chosen.is_none_or(|name| index.shards().iter().any(|shard| shard == name)));
    Ok(match listed {
        Some(index) => index.shards().to_vec(),
        None => vec![chosen.unwrap_or("model.safetensors").to_owned()],
    })
}

/// Compares each weight file with what the index says of it.
pub(super) fn check_shards(texts: &Texts, weights: &[(String, Safetensors)]) -> Result<(), Error> {
    let Some(json) = &texts.index else { return Ok(()) };
    let index = ShardIndex::parse(json).map_err(|e| e.in_file(INDEX))?;
    let listed = weights.iter().filter(|(name, _)| index.shards().contains(name));
    listed.into_iter().try_for_each(|(name, header)| index.check_shard(name, header).map_err(|e| e.in_file(name)))
}

#[cfg(not(target_arch = "wasm32"))]
fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let io = |source| Error::Io { path: path.into(), source };
    check_text_size(std::fs::metadata(path).map_err(io)?.len()).map_err(|e| e.in_file(path))?;
    std::fs::read(path).map_err(io)
}

/// Refuses a configuration or vocabulary that is far larger than any.
pub(super) fn check_text_size(size: u64) -> Result<(), Error> {
    const MAX_BYTES: u64 = 256 << 20;
    match size <= MAX_BYTES {
        true => Ok(()),
        false => Err(Error::Format {
            format: "json",
            field: "size".into(),
            offset: 0,
            expected: format!("at most {MAX_BYTES} bytes"),
            found: size.to_string(),
        }),
    }
}

/// The configuration, from the keys of `LlamaForCausalLM` and `MistralForCausalLM`, as transformers 4 and 5 write them,
/// and whether the embedding is also the head.
fn config(json: &ConfigJson) -> Result<(ModelConfig, bool), Error> {
    let architecture = json.get_str("model_type")?.unwrap_or("missing");
    if !matches!(architecture, "llama" | "mistral") {
        return Err(Error::Unsupported {
            format: "config.json",
            field: "model_type".into(),
            found: format!("`{architecture}`"),
            supported: "llama, mistral; bert, roberta, xlm-roberta, modernbert, nomic_bert, and qwen3 for embeddings"
                .into(),
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
            scaling: rope_scaling(json)?,
        },
        window: json.get_u32("sliding_window")?,
    };
    config.check()?;
    Ok((config, json.get_bool("tie_word_embeddings")?.unwrap_or(false)))
}

pub(super) fn rope_scaling(json: &ConfigJson) -> Result<RopeScaling, Error> {
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

pub(super) fn missing(field: &str) -> Error {
    Error::Config { field: field.into(), expected: "a value".into(), found: "missing".into() }
}

/// GGUF's name of the tensor that published Llama checkpoints call `name`; `None` if no pass reads it.
fn gguf_name(name: &str) -> Option<String> {
    let (stem, suffix) = name.rsplit_once('.').filter(|(_, suffix)| matches!(*suffix, "weight" | "bias"))?;
    let plain = match stem {
        "model.embed_tokens" => "token_embd",
        "model.norm" => "output_norm",
        "lm_head" => "output",
        _ => {
            let (layer, part) = stem.strip_prefix("model.layers.")?.split_once('.')?;
            let part = match part {
                "input_layernorm" => "attn_norm",
                "self_attn.q_proj" => "attn_q",
                "self_attn.k_proj" => "attn_k",
                "self_attn.v_proj" => "attn_v",
                "self_attn.o_proj" => "attn_output",
                "post_attention_layernorm" => "ffn_norm",
                "mlp.gate_proj" => "ffn_gate",
                "mlp.up_proj" => "ffn_up",
                "mlp.down_proj" => "ffn_down",
                _ => return None,
            };
            return Some(format!("blk.{layer}.{part}.{suffix}"));
        }
    };
    Some(format!("{plain}.{suffix}"))
}
