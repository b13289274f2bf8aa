//! Hugging Face folders: `config.json`, `model.safetensors` or its sharded index, `tokenizer.json`.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use serde_json::Value;

use super::architectures::{Architecture, MTP_LAYERS, refused};
use super::keys::{Key, KeySource, Keys};
use super::refused::parse_safetensors;
use super::shards;
use super::tasks::{self, Tasks};
use super::tensor_index::{FileLayout, TensorIndex, check_type};
use super::unread::{self, MTP};
use super::vision::PREPROCESSORS;
use super::{ChatSource, EncoderShape, ModelHeader, ModelShape, encoder, late, llm_reranker, mxfp4, token_heads};
use super::{FileBytes, ModelFile};
use crate::error::Error;
use crate::formats::TensorInfo;
use crate::formats::config_json::ConfigJson;
use crate::formats::safetensors::{Safetensors, ShardIndex};
use crate::kernels::Pooling;
use crate::model::{ModelConfig, WeightSource};
use crate::tokenizer::{Tokenizer, TokenizerConfig};

/// The configuration's name.
pub(crate) const CONFIG: &str = "config.json";
/// The tokenizer's name.
pub(super) const TOKENIZER: &str = "tokenizer.json";
/// The tokenizer configuration's name, optional.
pub(super) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The generation defaults' name, optional.
pub(super) const GENERATION_CONFIG: &str = "generation_config.json";
/// Names of a separate chat template.
const CHAT_TEMPLATE: &str = "chat_template.jinja";
const CHAT_TEMPLATE_JSON: &str = "chat_template.json";
/// Names of additional templates, as `transformers` writes them.
const TOOL_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";
const RAG_TEMPLATE: &str = "additional_chat_templates/rag.jinja";
/// Names of sentence-transformers' files.
pub(super) const MODULES: &str = "modules.json";
pub(super) const POOLING: &str = "1_Pooling/config.json";
pub(super) const LOGIT_SCORE: &str = "1_LogitScore/config.json";
pub(super) const DENSE: [&str; 3] = ["1_Dense/config.json", "2_Dense/config.json", "3_Dense/config.json"];
/// Names of the weight files beside those.
pub(crate) const DENSE_WEIGHTS: [&str; 3] =
    ["1_Dense/model.safetensors", "2_Dense/model.safetensors", "3_Dense/model.safetensors"];
pub(super) const SENTENCE_CONFIG: &str = "sentence_bert_config.json";
pub(super) const PROMPTS: &str = "config_sentence_transformers.json";
/// The name of ColBERT's settings.
pub(super) const METADATA: &str = "artifact.metadata";
/// The shard index's name, optional.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The small files of a folder.
pub(crate) const TEXTS: [&str; 18] = [
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    GENERATION_CONFIG,
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_JSON,
    TOOL_TEMPLATE,
    RAG_TEMPLATE,
    INDEX,
    MODULES,
    POOLING,
    LOGIT_SCORE,
    DENSE[0],
    DENSE[1],
    DENSE[2],
    SENTENCE_CONFIG,
    PROMPTS,
    METADATA,
];

/// The contents of a folder's small files.
#[derive(Debug, Default)]
pub(super) struct FolderTexts {
    pub config: Option<Vec<u8>>,
    pub tokenizer: Option<Vec<u8>>,
    pub tokenizer_config: Option<Vec<u8>>,
    pub generation_config: Option<Vec<u8>>,
    pub chat_template: Option<Vec<u8>>,
    pub chat_template_json: Option<Vec<u8>>,
    pub tool_template: Option<Vec<u8>>,
    pub rag_template: Option<Vec<u8>>,
    pub index: Option<Vec<u8>>,
    pub modules: Option<Vec<u8>>,
    pub pooling: Option<Vec<u8>>,
    pub logit_score: Option<Vec<u8>>,
    pub dense: [Option<Vec<u8>>; 3],
    pub sentence_config: Option<Vec<u8>>,
    pub prompts: Option<Vec<u8>>,
    pub metadata: Option<Vec<u8>>,
    /// Those of [`PREPROCESSORS`](super::vision::PREPROCESSORS).
    pub preprocessor: Option<Vec<u8>>,
    pub processor: Option<Vec<u8>>,
    /// Why a file of [`TokenHeads`](super::TokenHeads) is not read.
    pub unread_head: Option<String>,
}

impl FolderTexts {
    /// The slot for the file of this name; `None` if the file is not used.
    pub fn slot(&mut self, name: &str) -> Option<&mut Option<Vec<u8>>> {
        Some(match name {
            CONFIG => &mut self.config,
            TOKENIZER => &mut self.tokenizer,
            TOKENIZER_CONFIG => &mut self.tokenizer_config,
            GENERATION_CONFIG => &mut self.generation_config,
            CHAT_TEMPLATE => &mut self.chat_template,
            CHAT_TEMPLATE_JSON => &mut self.chat_template_json,
            TOOL_TEMPLATE => &mut self.tool_template,
            RAG_TEMPLATE => &mut self.rag_template,
            INDEX => &mut self.index,
            MODULES => &mut self.modules,
            POOLING => &mut self.pooling,
            LOGIT_SCORE => &mut self.logit_score,
            _ if name == DENSE[0] => &mut self.dense[0],
            _ if name == DENSE[1] => &mut self.dense[1],
            _ if name == DENSE[2] => &mut self.dense[2],
            SENTENCE_CONFIG => &mut self.sentence_config,
            PROMPTS => &mut self.prompts,
            METADATA => &mut self.metadata,
            _ if name == PREPROCESSORS[0] => &mut self.preprocessor,
            _ if name == PREPROCESSORS[1] => &mut self.processor,
            _ => return None,
        })
    }

    /// The image preprocessor's settings, and the name of their file.
    ///
    /// # Errors
    /// [`Error::InFile`] if the file is not JSON.
    pub fn preprocessor_json(&self) -> Result<Option<(Value, &'static str)>, Error> {
        let [usual, other] = PREPROCESSORS;
        let found = [(&self.preprocessor, usual), (&self.processor, other)];
        let Some((bytes, name)) = found.into_iter().find_map(|(bytes, name)| Some((bytes.as_ref()?, name))) else {
            return Ok(None);
        };
        let json = ConfigJson::parse(bytes).map_err(|e| e.in_file(name))?;
        Ok(Some((json.into_value(), name)))
    }
}

/// The configuration in a `config.json` alone.
///
/// # Errors
/// [`Error::Config`] or [`Error::Unsupported`] naming the key.
pub(crate) fn config_of_json(bytes: &[u8]) -> Result<ModelConfig, Error> {
    let json = ConfigJson::parse(bytes).and_then(text_part)?;
    let (architecture, model_type) = architecture(&json)?;
    let model_type = model_type.to_owned();
    let json = json.or_defaults(architecture.defaults)?;
    architecture.config(&Keys::new(KeySource::Json(&json), &model_type, false))
}

/// The model's header. `weights` are the weight files' names and headers.
pub(super) fn header(name: &str, texts: &FolderTexts, weights: &[(String, Safetensors)]) -> Result<ModelHeader, Error> {
    let in_file = |file: &'static str| move |error: Error| error.in_file(file);
    let bytes = texts.config.as_ref().ok_or_else(|| missing(CONFIG))?;
    let json = ConfigJson::parse(bytes).and_then(text_part).map_err(in_file(CONFIG))?;
    let (architecture, model_type) = architecture_of(&json, weights).map_err(in_file(CONFIG))?;
    let model_type = model_type.to_owned();
    let json = json.or_defaults(architecture.defaults).map_err(in_file(CONFIG))?;
    let logits = llm_reranker::of_folder(name, &json, texts).map_err(in_file(CONFIG))?;
    let is_unmerged = tasks::is_unmerged(&json).map_err(in_file(CONFIG))?;
    let embeds = texts.modules.is_some() || texts.pooling.is_some() || logits.is_some() || is_unmerged;
    let keys = Keys::new(KeySource::Json(&json), &model_type, embeds);
    if is_unmerged {
        // Which of two models it is.
        keys.says(Key("", "is_decoder"));
    }
    let mut config = architecture.config(&keys).map_err(in_file(CONFIG))?;
    let is_stanford = late::is_stanford(&json, texts).map_err(in_file(CONFIG))?;
    let further = |file: &str, name: &str| {
        let dense = encoder::dense_tensor(file, name).or_else(|| late::tensor_name(is_stanford, name));
        let dense = dense.or_else(|| token_heads::tensor_name(file, name));
        dense.or_else(|| llm_reranker::tensor_name(logits.as_ref(), name))
    };
    let (mut tensor_index, unread) = tensor_index(architecture, &config, weights, &further)?;
    if let Some(factors) = architecture.factors {
        config.row_factors = factors(&keys, &config).map_err(in_file(CONFIG))?;
        config.row_factors.iter().for_each(|(name, groups)| tensor_index.scale(name, groups));
    }
    let mut unread: Vec<&'static str> = unread.into_iter().collect();
    let n_mtp = keys.u32(MTP_LAYERS).map_err(in_file(CONFIG))?;
    let mtp = architecture.take_mtp_block(&config, &mut tensor_index, n_mtp, &mut unread);
    if mtp.is_none() && n_mtp.is_some_and(|n| n > 0) && tensor_index.drop_layers(config.n_layers()) {
        unread.push(MTP);
    }
    let tied = keys.bool(Key("", "tie_word_embeddings")).map_err(in_file(CONFIG))?;
    let ties = tied.unwrap_or(architecture.tied);
    let is_tied = !config.has_head || ties;
    let mut shape = match config.has_head {
        true => ModelShape::Decoder(config),
        false => ModelShape::Encoder(encoder::shape(config, &json, texts, &tensor_index, logits.as_ref())?),
    };
    let tasks = Tasks::of(&json, weights).map_err(in_file(CONFIG))?;
    if let ModelShape::Encoder(shape) = &mut shape {
        shape.tasks = tasks;
        if is_unmerged && texts.pooling.is_none() {
            shape.pooling = Some(Pooling::Last);
        }
    }
    if logits.is_some() {
        llm_reranker::read_overrides(&keys).map_err(in_file(CONFIG))?;
    }
    keys.check_read().map_err(in_file(CONFIG))?;
    if !is_tied && tensor_index.describe("output.weight").is_none() {
        return Err(missing("lm_head.weight"));
    }
    let tokenizer_config = match &texts.tokenizer_config {
        Some(bytes) => TokenizerConfig::from_json(bytes).map_err(in_file(TOKENIZER_CONFIG)),
        None => Ok(TokenizerConfig::default()),
    };
    let tokenizer = tokenizer_config.and_then(|mut config| {
        config.add_end_ids(json.get("eos_token_id")?).map_err(in_file(CONFIG))?;
        if let Some(bytes) = &texts.generation_config {
            let add = |json: ConfigJson| config.add_end_ids(json.get("eos_token_id")?);
            ConfigJson::parse(bytes).and_then(add).map_err(in_file(GENERATION_CONFIG))?;
        }
        let bytes = texts.tokenizer.as_ref().ok_or_else(|| missing(TOKENIZER))?;
        Tokenizer::from_json(bytes, &config).map_err(in_file(TOKENIZER))
    });
    if let ModelShape::Encoder(EncoderShape { tower: Some(tower), .. }) = &mut shape {
        if let (Some(json), Ok(tokenizer)) = (&texts.tokenizer_config, &tokenizer) {
            tower.read_tokenizer(json, tokenizer)?;
        }
        // Read as an `ImageEncoderFile`.
        unread.retain(|part| *part != "vision");
    }
    let (name, chat) = (name.to_owned(), ChatSource::of_folder(texts));
    if let Some(logits) = &logits {
        llm_reranker::check_template(&chat.templates)?;
        llm_reranker::add_rows(&mut tensor_index, logits, ties, &tokenizer)?;
    }
    Ok(ModelHeader { name, shape, tokenizer, chat, tensor_index, mtp, unread })
}

/// The text part of a multimodal configuration. The listed keys are inherited from the top level.
fn text_part(json: ConfigJson) -> Result<ConfigJson, Error> {
    json.part("text_config", &["model_type", "tie_word_embeddings", "quantization_config"])
}

/// The tensors of the weight files under GGUF's names, and the ignored parts. `further` names those that are not the
/// architecture's.
fn tensor_index(
    architecture: &Architecture,
    config: &ModelConfig,
    weights: &[(String, Safetensors)],
    further: &dyn Fn(&str, &str) -> Option<String>,
) -> Result<(TensorIndex, BTreeSet<&'static str>), Error> {
    let (mut tensor_index, mut unread) = (TensorIndex::default(), BTreeSet::new());
    let all = || weights.iter().enumerate().flat_map(|(i, (_, header))| header.tensors.iter().map(move |t| (i, t)));
    // An MTP head without `fc`, or with unknown tensors, is ignored.
    let mtp_name = |name: &str| architecture.mtp_name(name, config.n_layers());
    let of_mtp = || all().map(|(_, tensor)| tensor.name.as_str()).filter(|name| unread::is_of_mtp(name));
    let has_mtp = of_mtp().any(|name| name.ends_with("mtp.fc.weight")) && of_mtp().all(|name| mtp_name(name).is_some());
    let mtp_name = |name: &str| mtp_name(name).filter(|_| has_mtp);
    // Scales may be in another file than their quants.
    let scales = all().filter_map(|(file, tensor)| match mxfp4::half(&tensor.name) {
        Some((stem, true)) => Some((stem, (file, tensor))),
        _ => None,
    });
    let mut scales: HashMap<&str, (usize, &TensorInfo)> = scales.collect();
    let has_classifier = all().any(|(_, tensor)| tensor.name == "classifier.dense.weight");
    let mut halves = Vec::new();
    for (file, tensor) in all() {
        let in_file = |error: Error| error.in_file(&weights[file].0);
        if let Some((stem, is_scales)) = mxfp4::half(&tensor.name)
            && let Some(name) = architecture.gguf_name(stem)
        {
            if !is_scales {
                halves.push((name, stem, file, tensor));
            }
            continue;
        }
        if tasks::is_factor(&tensor.name) {
            continue;
        }
        let plain = tasks::plain_name(&tensor.name);
        // RoBERTa's classifiers do without the pooler, which older files still have.
        if has_classifier && plain.contains("pooler.dense.") {
            continue;
        }
        let known = further(&weights[file].0, &plain).or_else(|| architecture.gguf_name(&plain));
        let Some(name) = known.or_else(|| mtp_name(&tensor.name)) else {
            let part = unread::part(&tensor.name, !config.has_head).ok_or_else(|| in_file(unknown(tensor)))?;
            unread.extend((!part.is_empty()).then_some(part));
            continue;
        };
        check_type("safetensors", tensor).map_err(in_file)?;
        let name = (architecture.renamed)(name, config);
        let stored = (architecture.stored)(&name, config);
        check_unique(&tensor_index, &name, tensor).map_err(in_file)?;
        match name.strip_suffix(".ffn_gate_up_shexp.weight") {
            Some(layer) => tensor_index.insert_halves(layer, ["ffn_gate_shexp", "ffn_up_shexp"], file, tensor),
            None => tensor_index.insert(name, file, tensor.clone(), stored),
        }
    }
    for (name, stem, file, blocks) in halves {
        let in_file = |error: Error| error.in_file(&weights[file].0);
        let scales = scales.remove(stem).ok_or_else(|| in_file(missing(&format!("{stem}_scales"))))?;
        check_unique(&tensor_index, &name, blocks).map_err(in_file)?;
        let paired = (architecture.stored)(&name, config) == FileLayout::ExpertsTransposed { paired: true };
        tensor_index.insert_scaled(name, (file, blocks), (scales.0, scales.1.clone()), paired).map_err(in_file)?;
    }
    Ok((tensor_index, unread))
}

/// Refuses a tensor whose GGUF name another has. T5's embedding may have two names.
fn check_unique(tensor_index: &TensorIndex, name: &str, tensor: &TensorInfo) -> Result<(), Error> {
    let halves = name.strip_suffix(".ffn_gate_up_shexp.weight").map(|layer| format!("{layer}.ffn_gate_shexp.weight"));
    let other = tensor_index.find(halves.as_deref().unwrap_or(name)).map(|(_, other)| other);
    let is_of_t5 = |tensor: &TensorInfo| ["shared.weight", "encoder.embed_tokens.weight"].contains(&&*tensor.name);
    match other.filter(|other| !(is_of_t5(tensor) && is_of_t5(other))) {
        None => Ok(()),
        Some(other) => Err(Error::Config {
            field: tensor.name.escape_debug().to_string(),
            expected: "a unique tensor".into(),
            found: format!("a duplicate of `{}`", other.name.escape_debug()),
        }),
    }
}

/// The error for an unknown tensor.
fn unknown(tensor: &TensorInfo) -> Error {
    Error::Config {
        field: tensor.name.escape_debug().to_string(),
        expected: "no such tensor in this architecture".into(),
        found: "in the file".into(),
    }
}

/// Opens a folder, or one `.safetensors` file with the `config.json` beside it.
pub(super) fn open(path: &Path) -> Result<ModelFile, Error> {
    // The folder of the file, or of the link's target: the first with a configuration.
    let folder_of = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        folder.unwrap_or(Path::new(".")).to_path_buf()
    };
    let linked = (!path.is_dir()).then(|| shards::links(path).find(|path| folder_of(path).join(CONFIG).exists()));
    let path = &linked.flatten().unwrap_or_else(|| path.to_path_buf());
    let folder = &if path.is_dir() { path.clone() } else { folder_of(path) };
    let mut texts = FolderTexts::default();
    for name in TEXTS {
        let path = folder.join(name);
        if let Some(slot) = texts.slot(name)
            && path.exists()
        {
            *slot = Some(read(&path)?);
        }
    }
    let chosen = path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("safetensors"));
    let chosen = chosen.then_some(path);
    let chosen = chosen.and_then(|path| path.file_name()).map(|name| name.to_string_lossy());
    let names = weight_files(&texts, chosen.as_deref()).map_err(|e| e.in_folder(folder))?;
    if texts.config.is_none() && !names.iter().any(|name| folder.join(name).exists()) {
        return Err(no_model(folder));
    }
    let mut files = Vec::new();
    let mut weights = Vec::new();
    for name in names {
        let path = folder.join(&name);
        let bytes = FileBytes::map(&path)?;
        let header = parse_safetensors(&bytes).map_err(|e| e.in_file(&path))?;
        weights.push((name, header));
        files.push(bytes);
    }
    token_heads::open(folder, &mut texts, &mut weights, &mut files)?;
    check_shards(&texts, &weights).map_err(|e| e.in_folder(folder))?;
    if texts.config.is_none() {
        // Reports the system's error for an unreadable file.
        texts.config = Some(read(&folder.join(CONFIG))?);
    }
    let mut header = header(&name_of(folder), &texts, &weights).map_err(|e| e.in_folder(folder))?;
    header.tokenizer = header.tokenizer.map_err(|e| e.in_folder(folder));
    Ok(ModelFile { header, files })
}

/// The error for a folder without a configuration and weights.
fn no_model(folder: &Path) -> Error {
    let names = || -> std::io::Result<Vec<String>> {
        let name = |entry: std::io::Result<std::fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
        std::fs::read_dir(folder)?.map(name).collect()
    };
    let mut models = match names() {
        Ok(names) => names,
        Err(source) => return Error::Io { path: folder.into(), source },
    };
    models.retain(|name| name.to_lowercase().ends_with(".gguf"));
    models.sort();
    let expected = match models.is_empty() {
        true => "a folder with config.json and model.safetensors, or a GGUF file".into(),
        false => format!("the path of one of the GGUF files in this folder: {}", models.join(", ")),
    };
    Error::Config { field: CONFIG.into(), expected, found: "missing".into() }.in_file(folder)
}

/// The folder's name, or the repository's for a snapshot in a hub's cache.
fn name_of(folder: &Path) -> String {
    let name = |folder: &Path| folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let repo = || {
        let snapshots = folder.parent().filter(|snapshots| name(snapshots) == "snapshots")?;
        Some(name(snapshots.parent()?).strip_prefix("models--")?.rsplit_once("--")?.1.to_owned())
    };
    repo().unwrap_or_else(|| name(folder))
}

/// The weight files: `chosen` alone, or all shards if the index lists `chosen` or nothing is chosen, or the only file
/// of a folder without an index; then those of dense layers after pooling.
pub(super) fn weight_files(texts: &FolderTexts, chosen: Option<&str>) -> Result<Vec<String>, Error> {
    let index = match &texts.index {
        Some(json) => Some(ShardIndex::parse(json).map_err(|e| e.in_file(INDEX))?),
        None => None,
    };
    let listed = index.filter(|index| chosen.is_none_or(|name| index.shards().iter().any(|shard| shard == name)));
    let mut names = match listed {
        Some(index) => index.shards().to_vec(),
        None => vec![chosen.unwrap_or("model.safetensors").to_owned()],
    };
    let dense = DENSE_WEIGHTS.iter().zip(&texts.dense).filter(|(_, config)| config.is_some());
    names.extend(dense.map(|(name, _)| (*name).to_owned()));
    Ok(names)
}

/// Checks each weight file against the index.
pub(super) fn check_shards(texts: &FolderTexts, weights: &[(String, Safetensors)]) -> Result<(), Error> {
    let Some(json) = &texts.index else { return Ok(()) };
    let index = ShardIndex::parse(json).map_err(|e| e.in_file(INDEX))?;
    let listed = weights.iter().filter(|(name, _)| index.shards().contains(name));
    listed.into_iter().try_for_each(|(name, header)| index.check_shard(name, header).map_err(|e| e.in_file(name)))
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let io = |source| Error::Io { path: path.into(), source };
    check_text_size(std::fs::metadata(path).map_err(io)?.len()).map_err(|e| e.in_file(path))?;
    std::fs::read(path).map_err(io)
}

/// Refuses an oversized configuration or vocabulary.
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

/// The architecture of a `config.json`, with its `model_type`.
fn architecture(json: &ConfigJson) -> Result<(&'static Architecture, &str), Error> {
    let name = json.get_str("model_type")?.unwrap_or("missing");
    let found = Architecture::of_json(name).ok_or_else(|| refused("config.json", "model_type", name))?;
    Ok((found, name))
}

/// As [`architecture`], of weight files with these headers: Jina's embeddings 5 are Qwen3 or EuroBERT.
fn architecture_of<'a>(
    json: &'a ConfigJson,
    weights: &[(String, Safetensors)],
) -> Result<(&'static Architecture, &'a str), Error> {
    if !tasks::is_unmerged(json)? {
        return architecture(json);
    }
    let mut tensors = weights.iter().flat_map(|(_, header)| &header.tensors);
    let is_qwen = tensors.any(|tensor| tensor.name.ends_with(".self_attn.q_norm.weight"));
    let name = if is_qwen { "qwen3" } else { "eurobert" };
    Architecture::of_json(name).map(|found| (found, name)).ok_or_else(|| missing("model_type"))
}

pub(super) fn missing(field: &str) -> Error {
    Error::Config { field: field.into(), expected: "a value".into(), found: "missing".into() }
}
