//! Speech models: Whisper in Hugging Face folders and in files of whisper.cpp (Radford et al. 2022, arXiv:2212.04356).
//!
//! Encoder and decoder have tensors of the same names, those of GGUF text models, in an index each; around the encoder's
//! blocks there are `conv.1` and `conv.2`, and `cross_attn_*` in the decoder's.

mod ggml;
mod languages;

use std::path::Path;

use serde_json::Value;

use ggml::Ggml;
pub(super) use ggml::GgmlReader;
pub(crate) use languages::LANGUAGES;

use super::huggingface::{self, CONFIG, FolderTexts, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG};
use super::refused::parse_safetensors;
use super::tensor_index::{FileLayout, TensorIndex, check_type};
use super::{FileBytes, folder_of, is_of_folder, vision};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::safetensors::Safetensors;
use crate::kernels::Gelu;
use crate::model::{
    Attention, Between, Block, FeedForward, MAX_LAYERS, ModelConfig, NormKind, PositionTable, SpeechConfig,
};
use crate::platform::MaybeSend;
use crate::tokenizer::{Tokenizer, TokenizerConfig};

/// `model_type` of the models.
pub(super) const WHISPER: &str = "whisper";

const ALIGNMENT_HEADS: &str = "alignment_heads";

/// Names in a folder with ours.
const NAMES: [(&str, &str); 17] = [
    ("conv1", "conv.1"),
    ("conv2", "conv.2"),
    ("embed_tokens", "token_embd"),
    ("embed_positions", "position_embd"),
    ("layer_norm", "output_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn_layer_norm", "attn_norm"),
    ("encoder_attn.q_proj", "cross_attn_q"),
    ("encoder_attn.k_proj", "cross_attn_k"),
    ("encoder_attn.v_proj", "cross_attn_v"),
    ("encoder_attn.out_proj", "cross_attn_output"),
    ("encoder_attn_layer_norm", "cross_attn_norm"),
    ("fc1", "ffn_up"),
    ("fc2", "ffn_down"),
];

/// A speech model's files, complete: mapped or in memory.
pub struct SpeechFile {
    /// The folder's name.
    pub name: String,
    /// The model's shape.
    pub config: SpeechConfig,
    /// Settings of its texts.
    pub generation: SpeechGeneration,
    /// Its tokenizer, or the reason why it has none.
    pub tokenizer: Result<Tokenizer, Error>,
    /// The encoder's tensors.
    pub encoder: TensorIndex,
    /// The decoder's tensors.
    pub decoder: TensorIndex,
    /// The weight files.
    pub files: Vec<FileBytes>,
}

/// Headers of a file whose weights are between them. A trait, so that programs that load no such file go without its reader.
pub(super) trait ScatteredHeaders: MaybeSend {
    /// Offset of the next bytes wanted; `None` once all headers are known.
    fn wanted(&self) -> Option<u64>;

    /// Takes bytes at the wanted offset, any number.
    ///
    /// # Errors
    /// [`Error::Format`] naming the part and its offset, [`Error::Unsupported`] for an unknown type of a tensor.
    fn push(&mut self, bytes: &[u8]) -> Result<(), Error>;

    /// Ends the file.
    ///
    /// # Errors
    /// [`Error::Truncated`] within a header; as [`ScatteredHeaders::push`].
    fn end(&mut self) -> Result<(), Error>;

    /// The model of this name, without the file's bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`] if headers are missing; [`Error::Config`] or [`Error::Unsupported`] naming the key or the tensor.
    fn finish(self: Box<Self>, name: &str) -> Result<SpeechFile, Error>;
}

/// Settings of a speech model's texts: `generation_config.json`, or `config.json` in folders without one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeechGeneration {
    /// The token that a transcript starts with: `decoder_start_token_id`.
    pub start_id: Option<u32>,
    /// The token that ends a transcript: `eos_token_id`.
    pub end_id: Option<u32>,
    /// Tokens that no transcript has: `suppress_tokens`.
    pub suppressed: Vec<u32>,
    /// Tokens that no transcript begins with: `begin_suppress_tokens`.
    pub suppressed_first: Vec<u32>,
    /// Whether the model knows several languages: `is_multilingual`.
    pub is_multilingual: Option<bool>,
    /// Languages by code, with their tokens: `lang_to_id`.
    pub languages: Vec<(String, u32)>,
    /// The first timestamp is at most this many steps after the beginning: `max_initial_timestamp_index`.
    pub max_first_timestamp: u32,
    /// Layers and heads of the decoder that attend to the sound of each token: `alignment_heads`. Empty: unknown.
    pub alignment_heads: Vec<[u32; 2]>,
}

impl SpeechFile {
    /// Opens a speech model's Hugging Face folder, or a file of whisper.cpp (`ggml-*.bin`).
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part, [`Error::Unsupported`] for a model of another kind,
    /// [`Error::Io`] if it cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<SpeechFile, Error> {
        let path = path.as_ref();
        if !is_of_folder(path) {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            let open = || {
                let file = FileBytes::map(path)?;
                let opened = SpeechFile::of_ggml(&name, Ggml::parse(&file)?)?;
                Ok(SpeechFile { files: vec![file], ..opened })
            };
            return open().map_err(|error: Error| error.in_file(path));
        }
        let folder = folder_of(path);
        let texts = read_texts(folder)?;
        let (mut weights, mut files) = (Vec::new(), Vec::new());
        for name in huggingface::weight_files(&texts, None)? {
            let path = folder.join(&name);
            let file = FileBytes::map(&path)?;
            weights.push((name, parse_safetensors(&file).map_err(|e| e.in_file(&path))?));
            files.push(file);
        }
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let opened = SpeechFile::of_folder(&name, &texts, &weights).map_err(|error| error.in_folder(folder))?;
        let tokenizer = opened.tokenizer.map_err(|error| error.in_folder(folder));
        Ok(SpeechFile { tokenizer, files, ..opened })
    }

    /// That of a folder with these weight files, without their bytes.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part, [`Error::Unsupported`] for a model of another kind.
    pub(super) fn of_folder(
        name: &str,
        texts: &FolderTexts,
        weights: &[(String, Safetensors)],
    ) -> Result<SpeechFile, Error> {
        let in_file = |name: &'static str| move |error: Error| error.in_file(name);
        let bytes = texts.config.as_ref().ok_or_else(|| huggingface::missing(CONFIG))?;
        let json = ConfigJson::parse(bytes).map_err(in_file(CONFIG))?;
        let config = config(&json).map_err(in_file(CONFIG))?;
        let generation = match &texts.generation_config {
            Some(bytes) => {
                ConfigJson::parse(bytes).and_then(|json| generation(&json)).map_err(in_file(GENERATION_CONFIG))
            }
            None => generation(&json).map_err(in_file(CONFIG)),
        }?;
        check_heads(&generation, &config).map_err(in_file(GENERATION_CONFIG))?;
        let tied = json.get_bool("tie_word_embeddings").map_err(in_file(CONFIG))?.unwrap_or(true);
        let (mut encoder, mut decoder) = (TensorIndex::default(), TensorIndex::default());
        for (i, (name, weights)) in weights.iter().enumerate() {
            for tensor in &weights.tensors {
                check_type("safetensors", tensor).map_err(|e| e.in_file(name))?;
                let (index, name) = match part(&tensor.name) {
                    // The tied head, saved again.
                    (None, "proj_out.weight") if tied => continue,
                    (None, "proj_out.weight") => (&mut decoder, "output.weight".into()),
                    (Some("encoder"), rest) => (&mut encoder, our_name(rest)),
                    (_, rest) => (&mut decoder, our_name(rest)),
                };
                let stored = stored(&name);
                index.insert(name, i, tensor.clone(), stored);
            }
        }
        let (name, tokenizer) = (name.into(), tokenizer(texts));
        Ok(SpeechFile { name, config, generation, tokenizer, encoder, decoder, files: Vec::new() })
    }

    /// That of a file of whisper.cpp, without its bytes.
    ///
    /// # Errors
    /// [`Error::Config`] or [`Error::Unsupported`] naming the key or the tensor.
    fn of_ggml(name: &str, ggml: Ggml) -> Result<SpeechFile, Error> {
        let config = config(&ggml.config)?;
        let tokenizer = ggml.tokenizer();
        let generation =
            tokenizer.as_ref().map_or_else(|_| Ok(SpeechGeneration::default()), |of| ggml.generation(of))?;
        let (mut encoder, mut decoder) = (TensorIndex::default(), TensorIndex::default());
        for tensor in ggml.tensors {
            check_type("ggml", &tensor)?;
            let (index, name) = match ggml::our_name(&tensor.name) {
                Some(("encoder", name)) => (&mut encoder, name),
                Some((_, name)) => (&mut decoder, name),
                None => (&mut decoder, tensor.name.clone()),
            };
            let stored = stored(&name);
            index.insert(name, 0, tensor, stored);
        }
        Ok(SpeechFile { name: name.into(), config, generation, tokenizer, encoder, decoder, files: Vec::new() })
    }

    /// Whether a path is, or is within, a folder of a speech model, or a file of one.
    pub fn is_of_speech(path: impl AsRef<Path>) -> bool {
        if !is_of_folder(path.as_ref()) {
            return FileBytes::map(path.as_ref()).is_ok_and(|file| file.starts_with(ggml::MAGIC));
        }
        let config = folder_of(path.as_ref()).join(CONFIG);
        let json = huggingface::read(&config).and_then(|bytes| ConfigJson::parse(&bytes));
        json.is_ok_and(|json| json.get_str("model_type").is_ok_and(|found| found == Some(WHISPER)))
    }

    /// Bytes of the weights.
    pub fn size_bytes(&self) -> u64 {
        self.encoder.tensors().chain(self.decoder.tensors()).map(|tensor| tensor.size_bytes).sum()
    }
}

/// The error for what is no speech model.
fn no_model() -> Error {
    let supported = "a Hugging Face folder of a Whisper model, with config.json and safetensors, or a ggml-*.bin";
    Error::Unsupported {
        format: "speech model",
        field: "path".into(),
        found: "neither a folder nor a file of one".into(),
        supported: supported.into(),
    }
}

/// How a file stores the tensor of this name.
fn stored(name: &str) -> FileLayout {
    match name.starts_with("conv.") && name.ends_with(".weight") {
        true => FileLayout::ByTap,
        false => FileLayout::AsRead,
    }
}

fn read_texts(folder: &Path) -> Result<FolderTexts, Error> {
    let mut texts = FolderTexts::default();
    for name in [CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, huggingface::INDEX] {
        let path = folder.join(name);
        if let (true, Some(slot)) = (path.exists(), texts.slot(name)) {
            *slot = Some(huggingface::read(&path)?);
        }
    }
    Ok(texts)
}

fn tokenizer(texts: &FolderTexts) -> Result<Tokenizer, Error> {
    let config = match &texts.tokenizer_config {
        Some(bytes) => TokenizerConfig::from_json(bytes).map_err(|e| e.in_file(TOKENIZER_CONFIG))?,
        None => TokenizerConfig::default(),
    };
    let bytes = texts.tokenizer.as_ref().ok_or_else(|| huggingface::missing(TOKENIZER))?;
    Tokenizer::from_json(bytes, &config).map_err(|e| e.in_file(TOKENIZER))
}

/// The part that a folder's tensor belongs to, and the rest of its name.
fn part(name: &str) -> (Option<&str>, &str) {
    let plain = name.strip_prefix("model.").unwrap_or(name);
    ["encoder", "decoder"]
        .into_iter()
        .find_map(|part| Some((Some(part), plain.strip_prefix(part)?.strip_prefix('.')?)))
        .unwrap_or((None, plain))
}

/// Our name of a tensor of a part.
fn our_name(name: &str) -> String {
    let (stem, suffix) = name.rsplit_once('.').unwrap_or((name, "weight"));
    let renamed = |part: &str| NAMES.iter().find(|(theirs, _)| *theirs == part).map(|(_, ours)| *ours);
    match stem.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, "final_layer_norm")) => format!("blk.{layer}.ffn_norm.{suffix}"),
        Some((layer, part)) => format!("blk.{layer}.{}.{suffix}", renamed(part).unwrap_or(part)),
        None => format!("{}.{suffix}", renamed(stem).unwrap_or(stem)),
    }
}

fn config(json: &ConfigJson) -> Result<SpeechConfig, Error> {
    let refused = |field: &str, found: &str, supported: &str| Error::Unsupported {
        format: "config.json",
        field: field.into(),
        found: format!("`{}`", found.escape_debug()),
        supported: supported.into(),
    };
    let model_type = json.get_str("model_type")?.unwrap_or("missing");
    if model_type != WHISPER {
        return Err(refused("model_type", model_type, "whisper"));
    }
    let activation = json.get_str("activation_function")?.unwrap_or("gelu");
    if activation != "gelu" {
        return Err(refused("activation_function", activation, "gelu"));
    }
    let required = |key: &str| json.get_u32(key)?.ok_or_else(|| huggingface::missing(key));
    let dim = required("d_model")?;
    let blocks = |part: &str| -> Result<Vec<Block>, Error> {
        let key = |name: &str| format!("{part}_{name}");
        let (n_layers, n_heads) = (required(&key("layers"))?, required(&key("attention_heads"))?);
        let wrong = |name: &str, expected: String, found: u32| Error::Config {
            field: key(name),
            expected,
            found: found.to_string(),
        };
        if !(1..=MAX_LAYERS).contains(&n_layers) {
            return Err(wrong("layers", format!("1 to {MAX_LAYERS}"), n_layers));
        }
        if n_heads == 0 || !dim.is_multiple_of(n_heads) {
            return Err(wrong("attention_heads", format!("a divisor of the width {dim}"), n_heads));
        }
        let between = Between::Gelu(Gelu::Exact);
        let feed_forward = FeedForward { dim: required(&key("ffn_dim"))?, between, experts: None };
        let block = Block::plain(Attention::plain(n_heads, dim / n_heads), feed_forward);
        Ok(vec![Block { cross: part == "decoder", ..block }; n_layers as usize])
    };
    let scaled = json.get_bool("scale_embedding")?.unwrap_or(false);
    let config = SpeechConfig {
        n_bands: json.get_u32("num_mel_bins")?.unwrap_or(80),
        n_rows: json.get_u32("max_source_positions")?.unwrap_or(1500),
        encoder: of_blocks(dim, blocks("encoder")?),
        decoder: ModelConfig {
            vocab_size: required("vocab_size")?,
            max_seq_len: json.get_u32("max_target_positions")?.unwrap_or(448),
            positions: Some(PositionTable { first: 0 }),
            embd_scale: if scaled { (dim as f32).sqrt() } else { 1.0 },
            causal: true,
            has_head: true,
            ..of_blocks(dim, blocks("decoder")?)
        },
    };
    config.check()?;
    Ok(config)
}

/// Blocks with a norm after the last one, and attention in all directions.
fn of_blocks(dim: u32, blocks: Vec<Block>) -> ModelConfig {
    let plain = vision::of_blocks(WHISPER, dim, blocks, (NormKind::Layer { bias: true }, 1e-5));
    ModelConfig { output_norm: true, ..plain }
}

fn generation(json: &ConfigJson) -> Result<SpeechGeneration, Error> {
    let wrong = |field: &str, expected: &str, found: &Value| Error::Config {
        field: field.into(),
        expected: expected.into(),
        found: found.to_string().chars().take(60).collect(),
    };
    let id = |key: &str, value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| wrong(key, "a token id", value))
    };
    let ids = |key: &str| match json.get(key)? {
        None | Some(Value::Null) => Ok(Vec::new()),
        // -1 in a list stands for tokens that the folder then lists.
        Some(Value::Array(ids)) => {
            ids.iter().filter(|value| value.as_i64() != Some(-1)).map(|value| id(key, value)).collect()
        }
        Some(other) => Err(wrong(key, "a list of token ids", other)),
    };
    let one = |key: &str| match json.get(key)? {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(ids)) => ids.first().map(|value| id(key, value)).transpose(),
        Some(value) => id(key, value).map(Some),
    };
    let languages = match json.get("lang_to_id")? {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Object(all)) => {
            let code = |name: &str| name.trim_matches(['<', '|', '>']).to_owned();
            let of = |(name, value): (&String, &Value)| Ok((code(name), id("lang_to_id", value)?));
            all.iter().map(of).collect::<Result<_, Error>>()?
        }
        Some(other) => return Err(wrong("lang_to_id", "an object of token ids by language", other)),
    };
    let number = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
    let pair = |value: &Value| match &value.as_array()?[..] {
        [layer, head] => Some([number(layer)?, number(head)?]),
        _ => None,
    };
    let alignment_heads = match json.get(ALIGNMENT_HEADS)? {
        None => Vec::new(),
        Some(value) => value
            .as_array()
            .and_then(|pairs| pairs.iter().map(pair).collect::<Option<Vec<[u32; 2]>>>())
            .ok_or_else(|| wrong(ALIGNMENT_HEADS, "a list of pairs of a layer and a head", value))?,
    };
    Ok(SpeechGeneration {
        start_id: one("decoder_start_token_id")?,
        end_id: one("eos_token_id")?,
        suppressed: ids("suppress_tokens")?,
        suppressed_first: ids("begin_suppress_tokens")?,
        is_multilingual: json.get_bool("is_multilingual")?,
        languages,
        max_first_timestamp: json.get_u32("max_initial_timestamp_index")?.unwrap_or(50),
        alignment_heads,
    })
}

/// Refuses heads that the decoder does not have.
fn check_heads(generation: &SpeechGeneration, config: &SpeechConfig) -> Result<(), Error> {
    match config.missing_head(&generation.alignment_heads) {
        None => Ok(()),
        Some((expected, found)) => {
            Err(Error::Config { field: ALIGNMENT_HEADS.into(), expected, found: format!("{found:?}") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_both_parts_get_the_names_of_text_models() {
        let named = |name: &str| {
            let (part, rest) = part(name);
            (part.unwrap_or("none").to_owned(), our_name(rest))
        };
        for (theirs, of, ours) in [
            ("model.encoder.conv1.weight", "encoder", "conv.1.weight"),
            ("model.encoder.layers.3.final_layer_norm.bias", "encoder", "blk.3.ffn_norm.bias"),
            ("model.decoder.layers.11.encoder_attn.k_proj.weight", "decoder", "blk.11.cross_attn_k.weight"),
            ("model.decoder.layer_norm.weight", "decoder", "output_norm.weight"),
            ("decoder.embed_tokens.weight", "decoder", "token_embd.weight"),
        ] {
            assert_eq!(named(theirs), (of.into(), ours.into()), "{theirs}");
        }
    }

    #[test]
    fn settings_of_texts_are_read() {
        let json = br#"{"decoder_start_token_id": 50258, "eos_token_id": [50257], "suppress_tokens": [1, -1, 2],
            "begin_suppress_tokens": null, "lang_to_id": {"<|en|>": 50259}, "is_multilingual": true,
            "alignment_heads": [[3, 1], [4, 2]]}"#;
        let found = generation(&ConfigJson::parse(json).unwrap()).unwrap();
        let want = SpeechGeneration {
            start_id: Some(50258),
            end_id: Some(50257),
            suppressed: vec![1, 2],
            suppressed_first: vec![],
            is_multilingual: Some(true),
            languages: vec![("en".into(), 50259)],
            max_first_timestamp: 50,
            alignment_heads: vec![[3, 1], [4, 2]],
        };
        assert_eq!(found, want);
        for (json, want) in [
            (r#"{"suppress_tokens": ["a"]}"#, "suppress_tokens is \"a\", expected a token id"),
            (
                r#"{"alignment_heads": [[1, 2, 3]]}"#,
                "alignment_heads is [[1,2,3]], expected a list of pairs of a layer and a head",
            ),
        ] {
            let json = ConfigJson::parse(json.as_bytes()).unwrap();
            let error = generation(&json).unwrap_err().to_string();
            assert_eq!(error, format!("model configuration: {want}"));
        }
    }
}
