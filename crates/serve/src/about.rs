//! Descriptions of models for clients, whether loaded or not.

use serde_json::{Map, Value as Json, json};
use tilewright::answer::Format;
use tilewright::load::{ModelFile, ModelShape, SpeechFile, TensorIndex, WeightShare};
use tilewright::model::ModelConfig;

use super::models::{Loaded, ModelFiles};

/// The capability of speech models.
pub const TRANSCRIPTION: &str = "transcription";

/// A description of a model.
#[derive(Clone, Debug)]
pub struct ModelDescription {
    name: String,
    config: ModelConfig,
    /// Its capabilities, as Ollama names them.
    capabilities: Vec<&'static str>,
    /// Parameter count, and the type of most parameters.
    n_parameters: Option<u64>,
    block_type: String,
    template: String,
}

impl ModelDescription {
    /// Describes a model by its files' headers.
    pub fn of_files(files: &ModelFiles) -> ModelDescription {
        match files {
            ModelFiles::Text(file) => ModelDescription::of_file(file),
            ModelFiles::Speech(file) => ModelDescription::of_speech(file),
        }
    }

    /// Describes a speech model by its decoder.
    fn of_speech(file: &SpeechFile) -> ModelDescription {
        let indices = [&file.decoder, &file.encoder];
        ModelDescription {
            name: file.name.clone(),
            config: file.config.decoder.clone(),
            capabilities: vec![TRANSCRIPTION],
            n_parameters: Some(indices.into_iter().map(n_parameters).fold(0, u64::saturating_add)),
            block_type: most_used_type(&file.decoder),
            template: String::new(),
        }
    }

    fn of_file(file: &ModelFile) -> ModelDescription {
        let header = &file.header;
        let source = header.chat.templates.first().map(|(_, source)| source.clone()).unwrap_or_default();
        let (config, capabilities) = match &header.shape {
            ModelShape::Decoder(config) => {
                let has_token = |name: &str| header.tokenizer.as_ref().is_ok_and(|own| own.special_id(name).is_some());
                let format = Format::detect(&source, has_token);
                (config.clone(), capabilities(&source, format))
            }
            ModelShape::Encoder(shape) => {
                let capability = if shape.ranks() { "rerank" } else { "embedding" };
                (shape.config.clone(), vec![capability])
            }
        };
        ModelDescription {
            name: header.name.clone(),
            config,
            capabilities,
            n_parameters: Some(n_parameters(&header.tensor_index)),
            block_type: most_used_type(&header.tensor_index),
            template: source,
        }
    }

    /// Describes a loaded model whose files are unknown.
    pub fn of_loaded(loaded: &Loaded) -> ModelDescription {
        let (name, config, types) = match loaded {
            Loaded::Decoder(decoder) => {
                (decoder.model().name(), decoder.model().config(), decoder.model().block_types())
            }
            Loaded::Embedder(embedder) => (embedder.name(), embedder.config(), embedder.block_types()),
            Loaded::Reranker(reranker) => (reranker.name(), reranker.config(), reranker.block_types()),
            Loaded::Transcriber(transcriber) => (transcriber.name(), transcriber.config(), &[][..]),
        };
        let mut about = ModelDescription {
            name: name.to_owned(),
            config: config.clone(),
            capabilities: Vec::new(),
            n_parameters: None,
            block_type: types.first().map(ToString::to_string).unwrap_or_default(),
            template: String::new(),
        };
        about.add_loaded(loaded);
        about
    }

    /// Whether it has a capability, as Ollama names it.
    pub fn can(&self, capability: &str) -> bool {
        self.capabilities.contains(&capability)
    }

    /// Adds what only a loaded model has: its template may be a built-in one.
    pub fn add_loaded(&mut self, loaded: &Loaded) {
        self.capabilities = match loaded {
            Loaded::Decoder(decoder) => {
                let templates = &decoder.model().chat_source().templates;
                self.template = templates.first().map(|(_, source)| source.clone()).unwrap_or_default();
                let has_template = decoder.chat.template().is_ok();
                let mut all = capabilities(if has_template { "built in" } else { "" }, decoder.chat.format());
                all.extend(decoder.model().vision().map(|_| "vision"));
                all.extend(decoder.model().audio().map(|_| "audio"));
                all
            }
            Loaded::Embedder(_) => vec!["embedding"],
            Loaded::Reranker(_) => vec!["rerank"],
            Loaded::Transcriber(_) => vec![TRANSCRIPTION],
        };
    }

    /// Maximum number of tokens of a sequence.
    pub fn context_length(&self) -> u32 {
        self.config.max_seq_len
    }

    /// Sizes under llama-server's names.
    pub fn meta(&self, size_bytes: u64) -> Json {
        json!({
            "n_ctx_train": self.config.max_seq_len,
            "n_embd": self.config.dim,
            "n_params": self.n_parameters,
            "n_vocab": self.config.vocab_size,
            "size": size_bytes,
        })
    }

    /// Its capabilities, as Ollama names them.
    pub fn capabilities(&self) -> Vec<&'static str> {
        self.capabilities.clone()
    }

    /// Ollama's `details`.
    pub fn details(&self, format: &str) -> Json {
        let family = &self.config.architecture;
        json!({
            "parent_model": "", "format": format, "family": family, "families": [family],
            "parameter_size": self.n_parameters.map(human).unwrap_or_default(),
            "quantization_level": self.block_type,
            "context_length": self.config.max_seq_len, "embedding_length": self.config.dim,
        })
    }

    /// Ollama's answer to `/api/show` about the model of that name, with GGUF's metadata names. `context_length` is the
    /// server's, if the model is loaded.
    pub fn shown(&self, name: &str, format: &str, context_length: Option<u32>) -> Json {
        let ModelDescription { config, .. } = self;
        let architecture = &config.architecture;
        let mut info = Map::new();
        info.insert("general.architecture".into(), architecture.as_str().into());
        info.insert("general.basename".into(), self.name.as_str().into());
        info.insert("general.name".into(), self.name.as_str().into());
        if let Some(n) = self.n_parameters {
            info.insert("general.parameter_count".into(), n.into());
        }
        let attention = config.blocks.iter().map(|block| &block.attention).find(|attention| attention.n_heads > 0);
        let mut add = |name: &str, value: u32| info.insert(format!("{architecture}.{name}"), value.into());
        add("context_length", context_length.unwrap_or(config.max_seq_len));
        add("embedding_length", config.dim);
        add("block_count", config.n_layers());
        add("vocab_size", config.vocab_size);
        if let Some(attention) = attention {
            add("attention.head_count", attention.n_heads);
            add("attention.head_count_kv", attention.n_kv_heads);
            add("attention.key_length", attention.head_dim);
        }
        let mut modelfile = format!("FROM {name}\n");
        if !self.template.is_empty() {
            modelfile += &format!("TEMPLATE \"\"\"{}\"\"\"\n", self.template);
        }
        json!({
            "license": "", "modelfile": modelfile, "parameters": "", "template": self.template,
            "details": self.details(format),
            "model_info": info,
            "capabilities": self.capabilities,
        })
    }
}

fn n_parameters(index: &TensorIndex) -> u64 {
    index.shares().iter().fold(0, |sum, share| sum.saturating_add(share.n_elements))
}

fn most_used_type(index: &TensorIndex) -> String {
    index.shares().first().map(|WeightShare { block_type, .. }| block_type.to_string()).unwrap_or_default()
}

fn capabilities(template: &str, format: Format) -> Vec<&'static str> {
    let mut all = vec!["completion"];
    if !template.is_empty() && format != Format::Plain {
        all.push("tools");
        all.extend(format.can_think().then_some("thinking"));
    }
    all
}

/// A number of parameters in Ollama's format, such as 1.2B.
fn human(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.2}K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2}M", n as f64 / 1e6),
        _ => format!("{:.1}B", n as f64 / 1e9),
    }
}
