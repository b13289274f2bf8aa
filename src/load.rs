//! Loads models: detects the format, interprets its keys and locates each weight.
//!
//! `formats` parses files and knows no model; `model` records passes and knows no file. This module is between them:
//! it turns GGUF metadata or a `config.json` into a [`ModelShape`], and maps tensors to GGUF's names.

mod architectures;
#[cfg(feature = "sound")]
mod audio;
mod chat;
#[cfg(not(target_arch = "wasm32"))]
pub mod convert;
mod encoder;
mod file;
mod gguf;
mod gguf_encoder;
mod huggingface;
mod keys;
mod late;
mod llm_reranker;
mod loader;
#[cfg(feature = "lora")]
mod lora;
#[cfg(feature = "lora")]
mod merge;
mod mxfp4;
mod outline;
mod placement;
mod reader;
mod refused;
mod scaling;
mod shards;
mod speech;
mod tasks;
mod tensor_index;
mod text_tower;
mod token_heads;
mod unread;
mod vision;
mod vocab;
#[cfg_attr(target_arch = "wasm32", path = "load/weight_files/browser.rs")]
mod weight_files;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use crate::device::Device;
use crate::error::Error;
use crate::kernels::Pooling;
use crate::model::{Block, DenseConfig, ModelConfig, ScoreConfig};
use crate::tokenizer::Tokenizer;

#[cfg(feature = "sound")]
pub use audio::AudioFile;
#[cfg(feature = "sound")]
pub(crate) use audio::AudioTokens;
pub use chat::ChatSource;
pub use file::FileBytes;
pub(crate) use huggingface::config_of_json;
#[cfg(feature = "hub")]
pub(crate) use huggingface::{CONFIG, DENSE_WEIGHTS, INDEX, TEXTS};
pub use late::LateInteraction;
pub use llm_reranker::RerankPrompt;
pub use loader::Loader;
#[cfg(feature = "lora")]
pub use lora::AdapterFile;
#[cfg(feature = "lora")]
pub(crate) use lora::LoraFactors;
pub use outline::{Outline, WeightShare};
pub(crate) use placement::layers_before;
pub(crate) use placement::{
    ExpertSizes, InFile, LayerSizes, Needs, Placement, PlacementOptions, SLOTS, Share, Sizes, slot_sizes,
};
pub use reader::{FileName, Head, HeaderReader};
use refused::parse_gguf;
#[cfg(feature = "hub")]
pub(crate) use shards::{numbered, stem};
pub(crate) use speech::LANGUAGES;
pub use speech::{SpeechFile, SpeechGeneration};
#[cfg(feature = "hub")]
pub(crate) use tasks::ADAPTERS;
pub use tasks::Tasks;
pub(crate) use tensor_index::TableRows;
pub use tensor_index::TensorIndex;
pub(crate) use tensor_index::{WeightUploader, Widened};
pub use text_tower::{Canonical, Padding, PaddingSide, TextTower};
#[cfg(feature = "hub")]
pub(crate) use token_heads::TOKEN_HEADS;
#[cfg(feature = "sound")]
pub(crate) use unread::AUDIO;
pub(crate) use unread::{MTP, MTP_COPIES, VISION};
pub use vision::{ImageEncoderFile, VisionFile};
pub(crate) use vision::{Learned, PatchPlaces};
#[cfg(feature = "hub")]
pub(crate) use vision::{PREPROCESSORS, is_mmproj};
pub use vocab::vocab_from_gguf;
pub(crate) use weight_files::*;

/// A model's properties from its files' headers: everything except the weights.
pub struct ModelHeader {
    /// `general.name`, or the file's or folder's name.
    pub name: String,
    /// Shape of the model.
    pub shape: ModelShape,
    /// Its tokenizer, or the reason why it has none.
    pub tokenizer: Result<Tokenizer, Error>,
    /// Its chat templates.
    pub chat: ChatSource,
    /// Its tensors.
    pub tensor_index: TensorIndex,
    /// The block of the MTP head, if the files have one; appended to [`ModelConfig::blocks`] when the head is used.
    pub mtp: Option<Block>,
    /// Parts in the files that are ignored, such as a vision tower.
    pub unread: Vec<&'static str>,
}

impl ModelHeader {
    /// Reports ignored parts of the vocabulary, and missing parts of an encoder, as notices of the device.
    pub(crate) fn note_vocabulary(&self, device: &Device) {
        if let ModelShape::Encoder(EncoderShape { config, dense, .. }) = &self.shape
            && config.architecture == "gemma-embedding"
            && dense.is_empty()
        {
            device.tested().note(
                "the file lacks EmbeddingGemma's dense layers, so its vectors are llama.cpp's, not \
                 sentence-transformers'"
                    .into(),
            );
        }
        for notice in self.tokenizer.as_ref().map_or(&[][..], Tokenizer::notices) {
            device.tested().note(format!("vocabulary: {notice}"));
        }
    }

    /// A copy for a memory plan, without tokenizer and chat templates.
    #[cfg(all(feature = "web", target_arch = "wasm32"))]
    pub(crate) fn for_plan(&self) -> ModelHeader {
        let tokenizer =
            Err(Error::Tokenizer { field: "model".into(), expected: "a tokenizer".into(), found: "left out".into() });
        let ModelHeader { name, shape, tensor_index, mtp, .. } = self;
        let (name, shape, tensor_index) = (name.clone(), shape.clone(), tensor_index.clone());
        ModelHeader {
            name,
            shape,
            tokenizer,
            chat: ChatSource::default(),
            tensor_index,
            mtp: mtp.clone(),
            unread: Vec::new(),
        }
    }
}

/// Names in a GGUF file of tensors whose usual names, by which [`Model`](crate::Model)s know them, are others.
///
/// # Errors
/// As [`ModelFile::open`].
pub fn names_in_file(path: &Path) -> Result<HashMap<String, String>, Error> {
    if is_of_folder(path) {
        return Ok(HashMap::new());
    }
    let file = ModelFile::open(path)?;
    let names = file.header.tensor_index.entries().map(|(name, _, info, _)| (name.to_owned(), info.name.clone()));
    Ok(names.filter(|(name, in_file)| name != in_file).collect())
}

/// Shape of a model by kind.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a model has one")]
pub enum ModelShape {
    /// Generates text.
    Decoder(ModelConfig),
    /// Computes embeddings of texts.
    Encoder(EncoderShape),
}

/// Shape of an encoder, with its usage settings.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderShape {
    /// The encoder.
    pub config: ModelConfig,
    /// How token vectors are pooled: `pooling_type`; `1_Pooling/config.json`. `None` for a cross-encoder whose files
    /// state no pooling.
    pub pooling: Option<Pooling>,
    /// Whether embeddings are L2-normalised: a `Normalize` module in `modules.json`. Always true for GGUF files,
    /// which do not state it.
    pub normalize: bool,
    /// Dense layers after pooling: `Dense` modules in `modules.json`; `dense_2.weight`, `dense_3.weight`.
    pub dense: Vec<DenseConfig>,
    /// Texts are truncated to this many tokens: `sentence_bert_config.json`. Default: the longest sequence.
    pub max_tokens: u32,
    /// Prompts to prepend to texts, by name: `config_sentence_transformers.json`.
    pub prompts: BTreeMap<String, String>,
    /// Name of the default prompt.
    pub default_prompt: Option<String>,
    /// Scoring of pairs, if the model is a cross-encoder.
    pub scoring: Option<Scoring>,
    /// How texts are read, if each of their tokens becomes a vector; then `pooling` is `None`.
    pub late: Option<LateInteraction>,
    /// Further heads of a model with one vector for each text.
    pub token_heads: TokenHeads,
    /// How texts are read, if there is an image encoder beside it, whose vectors are of the same space.
    pub tower: Option<TextTower>,
    /// The tasks whose adapters its files have beside its weights.
    pub tasks: Option<Tasks>,
}

/// Heads that make something of each token: BGE-M3 (Chen et al. 2024, arXiv:2402.03216).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenHeads {
    /// A vector: `colbert_linear.pt`.
    pub vectors: Option<DenseConfig>,
    /// A weight: `sparse_linear.pt`.
    pub weights: Option<DenseConfig>,
    /// Why one of these files is not read, if so.
    pub unread: Option<String>,
}

impl EncoderShape {
    /// Whether a [`Reranker`](crate::Reranker) scores pairs of texts with it.
    pub fn ranks(&self) -> bool {
        self.scoring.is_some() || self.late.is_some()
    }
}

/// Scoring of a cross-encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Scoring {
    /// The head.
    pub head: ScoreConfig,
    /// Number of logits per pair: `classifier.output_labels`; `num_labels`, or the entries of `id2label`.
    pub n_labels: u32,
    /// The function applied to the logit: `sentence_transformers.activation_fn`.
    pub activation_fn: Option<String>,
    /// The text around a pair, if the model is a language model; others have special tokens of the tokenizer.
    pub prompt: Option<RerankPrompt>,
}

impl Scoring {
    /// Whether a score is the sigmoid of its logit (sentence-transformers' default) rather than the logit itself.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another function or several logits.
    pub fn sigmoid(&self) -> Result<bool, Error> {
        let unsupported = |field: &str, found: String, supported: &str| {
            Err(Error::Unsupported { format: "model", field: field.into(), found, supported: supported.into() })
        };
        if self.n_labels != 1 {
            return unsupported("classifier.output_labels (num_labels, id2label)", self.n_labels.to_string(), "1");
        }
        // A torch class path; the last component names the function.
        match self.activation_fn.as_deref().map(|name| name.rsplit('.').next().unwrap_or(name)) {
            None | Some("Sigmoid") => Ok(true),
            Some("Identity") => Ok(false),
            Some(other) => {
                unsupported("sentence_transformers.activation_fn", format!("`{other}`"), "Sigmoid, Identity")
            }
        }
    }
}

impl ModelShape {
    /// The configuration of either kind.
    pub fn config(&self) -> &ModelConfig {
        match self {
            ModelShape::Decoder(config) => config,
            ModelShape::Encoder(shape) => &shape.config,
        }
    }

    /// The configuration of a decoder.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model is an encoder.
    pub fn decoder(&self) -> Result<&ModelConfig, Error> {
        match self {
            ModelShape::Decoder(config) => Ok(config),
            ModelShape::Encoder(EncoderShape { config, .. }) => {
                Err(other_kind(&config.architecture, "an encoder", "decoders"))
            }
        }
    }

    /// Like [`ModelShape::decoder`], by value.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model is an encoder.
    pub fn into_decoder(self) -> Result<ModelConfig, Error> {
        match self {
            ModelShape::Decoder(config) => Ok(config),
            other => other.decoder().cloned(),
        }
    }

    /// The shape of an encoder.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model is a decoder.
    pub fn encoder(&self) -> Result<&EncoderShape, Error> {
        match self {
            ModelShape::Encoder(shape) => Ok(shape),
            ModelShape::Decoder(config) => Err(other_kind(&config.architecture, "a decoder", "encoders")),
        }
    }

    /// The scoring of a cross-encoder.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model is not a cross-encoder.
    pub fn scoring(&self) -> Result<&Scoring, Error> {
        let ModelShape::Encoder(EncoderShape { config, scoring, .. }) = self else {
            let supported =
                "rerankers; a Qwen3-Reranker's config.json may say \"classifier_from_token\": [\"no\", \"yes\"]";
            return Err(other_kind(&self.config().architecture, "a decoder", supported));
        };
        scoring.as_ref().ok_or_else(|| Error::Unsupported {
            format: "model",
            field: "pooling_type (architectures)".into(),
            found: format!("`{}`, an encoder without a scoring head", config.architecture),
            supported: "4 (rank), or a head in the file (ForSequenceClassification)".into(),
        })
    }
}

fn other_kind(architecture: &str, kind: &str, supported: &str) -> Error {
    Error::Unsupported {
        format: "model",
        field: "architecture".into(),
        found: format!("`{architecture}`, {kind}"),
        supported: supported.into(),
    }
}

/// The tokenizer of a Hugging Face folder, or of a GGUF file of any architecture, which may hold a vocabulary alone.
///
/// # Errors
/// As [`ModelFile::open`] for a folder; [`Error::InFile`] naming the invalid part of a GGUF file's vocabulary.
pub fn tokenizer(path: impl AsRef<Path>) -> Result<Tokenizer, Error> {
    let path = path.as_ref();
    if is_of_folder(path) {
        return huggingface::open(path)?.header.tokenizer.map_err(|e| e.in_file(path));
    }
    let read = || vocab_from_gguf(&parse_gguf(&FileBytes::map(path)?)?.metadata).and_then(Tokenizer::from_vocab);
    read().map_err(|e| e.in_file(path))
}

#[cfg(not(feature = "lora"))]
impl ModelFile {
    /// The model without a task's adapter.
    ///
    /// # Errors
    /// [`Error::Option`] for a task.
    pub(crate) fn for_task(self, _: &Path, task: Option<&str>) -> Result<ModelFile, Error> {
        match task {
            None => Ok(self),
            Some(task) => {
                let expected = "none: this build has no adapters (the feature `lora`)".into();
                Err(Error::Option { option: "task", expected, found: format!("`{}`", task.escape_debug()) })
            }
        }
    }
}

/// Whether a path names a Hugging Face folder or a file in one.
fn is_of_folder(path: &Path) -> bool {
    let is_in_one = |path: std::path::PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        name.ends_with(".safetensors") || name.ends_with(".json")
    };
    path.is_dir() || shards::links(path).any(is_in_one)
}

/// The folder of a path for which [`is_of_folder`] is true.
fn folder_of(path: &Path) -> &Path {
    if path.is_dir() { path } else { path.parent().unwrap_or(path) }
}

/// A model whose files are complete: mapped or in memory.
pub struct ModelFile {
    /// The model's header.
    pub header: ModelHeader,
    /// The files that hold weights.
    pub(crate) files: Vec<FileBytes>,
}

impl ModelFile {
    /// Opens a GGUF file (with all its shards), a Hugging Face folder (`config.json` with `model.safetensors` or its
    /// sharded index), or a `.safetensors` or `.json` file in such a folder.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part, [`Error::Io`] if it cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFile, Error> {
        let path = path.as_ref();
        if is_of_folder(path) {
            return huggingface::open(path);
        }
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let open = || {
            let file = FileBytes::map(path)?;
            let files = match gguf::n_shards(&parse_gguf(&file)?)? {
                1 => vec![file],
                n => shards::paths(path, n)?.iter().map(|path| FileBytes::map(path)).collect::<Result<_, _>>()?,
            };
            ModelFile::from_shards(&stem, files)
        };
        open().map_err(|e| e.in_file(path))
    }

    /// Reads a GGUF file in memory.
    ///
    /// # Errors
    /// Any of [`Error::Format`], [`Error::Unsupported`] and [`Error::Config`].
    pub fn from_gguf_bytes(bytes: impl Into<FileBytes>) -> Result<ModelFile, Error> {
        ModelFile::from_shards("gguf", vec![bytes.into()])
    }

    fn from_shards(name: &str, files: Vec<FileBytes>) -> Result<ModelFile, Error> {
        let shards = files.iter().map(|file| parse_gguf(file)).collect::<Result<Vec<_>, _>>()?;
        let config_data = gguf::config_tensors(&shards)
            .map(|(file, tensor)| Ok((tensor.name.clone(), tensor.bytes(&files[file])?.to_vec())))
            .collect::<Result<_, Error>>()?;
        let header = gguf::header(name, shards, &config_data)?;
        Ok(ModelFile { header, files })
    }

    /// The model bundled with this crate: about a million parameters, tells short stories.
    ///
    /// # Errors
    /// None in practice: the file is compiled in, and a test opens it.
    #[cfg(feature = "builtin")]
    pub fn builtin() -> Result<ModelFile, Error> {
        ModelFile::from_gguf_bytes(ModelFile::BUILTIN)
    }

    /// The GGUF file of the bundled model.
    #[cfg(feature = "builtin")]
    pub const BUILTIN: &'static [u8] = include_bytes!("../assets/stories.gguf");

    /// Bytes of the files that hold weights.
    pub fn size_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.len() as u64).sum()
    }
}
