//! How language models take sound: parts of Hugging Face folders, and of GGUF files that llama.cpp's users call
//! `mmproj`.
//!
//! Frames of samples become rows of the text model as patches of pictures do, so they have a [`VisionConfig`] and the
//! names of [`VisionFile`](super::VisionFile)'s tensors.

use std::path::{Path, PathBuf};

use super::huggingface::{self, CONFIG, FolderTexts};
use super::keys::{KeySource, Keys};
use super::refused::parse_gguf;
use super::tensor_index::{FileLayout, TensorIndex, check_type};
use super::vision::{
    Folder, GEMMA4_UNIFIED_SOUND, PREPROCESSORS, check_clip, is_sound, part_beside, read_texts, unsupported,
};
use super::{FileBytes, folder_of, is_of_folder};
use crate::error::Error;
use crate::formats::config_json::ConfigJson;
use crate::formats::gguf::Gguf;
use crate::model::VisionConfig;
use crate::sound::{MAX_RATE, SAMPLE_RATE};

/// How one family's files name and describe its part for sound.
pub(super) struct AudioFamily {
    /// `model_type` in `config.json`.
    pub json: &'static str,
    /// `clip.audio.projector_type` in GGUF.
    pub gguf: &'static str,
    /// Prefix of its tensors in a folder.
    pub prefix: &'static str,
    /// Names in a folder, after the prefix, and in GGUF, with ours.
    pub names: &'static [(&'static str, &'static str)],
    /// The texts around a sound.
    pub tokens: AudioTokens,
    /// The part that the keys describe.
    pub describe: fn(&Keys<'_>) -> Result<VisionConfig, Error>,
}

/// The texts that stand for a sound.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AudioTokens {
    /// In the text of a chat template.
    pub placeholder: &'static str,
    /// Before its rows.
    pub begin: &'static str,
    /// After its rows.
    pub end: &'static str,
}

static FAMILIES: [AudioFamily; 1] = [GEMMA4_UNIFIED_SOUND];

/// Encoders of sound that are not supported, by `model_type` and projector.
const OTHERS: [(&[&str], &str); 4] = [
    (&["gemma4", "gemma4a", "gemma3n", "gemma3na", "granite_speech", "phi4_multimodal"], "a conformer"),
    (&["lfm2_audio", "lfm2a"], "a conformer"),
    (
        &["qwen2_audio", "qwen2a", "qwen2_5_omni", "qwen2.5o", "qwen3_omni_moe", "qwen3a", "voxtral", "ultravox"],
        "an encoder like Whisper's",
    ),
    (&["audioflamingo3", "musicflamingo", "glma"], "an encoder like Whisper's"),
];

/// The part's own object in `config.json`.
const AUDIO_CONFIG: &str = "audio_config";

/// A model's part for sound, complete: mapped or in memory.
pub struct AudioFile {
    /// How frames of samples become rows.
    pub config: VisionConfig,
    /// Samples in a second.
    pub rate: u32,
    /// Rows of a sound at most.
    pub max_rows: u32,
    pub(crate) tokens: AudioTokens,
    pub(crate) tensor_index: TensorIndex,
    pub(crate) files: Vec<FileBytes>,
}

impl AudioFile {
    /// Opens the part for sound of a Hugging Face folder, or of a GGUF file (`mmproj`).
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part, [`Error::Unsupported`] for a model that takes no sound,
    /// or by other means than the supported ones, [`Error::Io`] if it cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<AudioFile, Error> {
        let path = path.as_ref();
        match is_of_folder(path) {
            true => AudioFile::of_folder(folder_of(path)),
            false => FileBytes::map(path).and_then(AudioFile::of_gguf).map_err(|e| e.in_file(path)),
        }
    }

    /// The part for sound that belongs to a model: its folder, if that has one, or the only GGUF file beside it whose
    /// name has `mmproj` in it, likewise.
    ///
    /// # Errors
    /// As [`VisionFile::beside`](super::VisionFile::beside), and for an invalid GGUF file.
    pub fn beside(model: impl AsRef<Path>) -> Result<Option<PathBuf>, Error> {
        match part_beside(model.as_ref(), AUDIO_CONFIG)? {
            Some(path) if is_of_folder(&path) || AudioFile::is_in(&path)? => Ok(Some(path)),
            _ => Ok(None),
        }
    }

    /// Whether a GGUF file (`mmproj`) has a part for sound, supported or not.
    ///
    /// # Errors
    /// [`Error::InFile`] for an invalid file, [`Error::Io`] if it cannot be read.
    pub fn is_in(mmproj: impl AsRef<Path>) -> Result<bool, Error> {
        let path = mmproj.as_ref();
        let found = FileBytes::map(path).and_then(|file| Ok(projector(&parse_gguf(&file)?)?.is_some()));
        found.map_err(|e| e.in_file(path))
    }

    fn of_folder(folder: &Path) -> Result<AudioFile, Error> {
        let texts = read_texts(folder)?;
        let (family, mut file) = of_texts(&texts).map_err(|e| e.in_folder(folder))?;
        let Folder { weights, files, .. } = Folder::with_texts(folder, texts)?;
        for (i, (name, header)) in weights.iter().enumerate() {
            for tensor in &header.tensors {
                if let Some(rest) = tensor.name.strip_prefix(family.prefix) {
                    check_type("safetensors", tensor).map_err(|e| e.in_file(folder.join(name)))?;
                    file.tensor_index.insert(family.name(rest), i, tensor.clone(), FileLayout::AsRead);
                }
            }
        }
        Ok(AudioFile { files, ..file })
    }

    fn of_gguf(bytes: FileBytes) -> Result<AudioFile, Error> {
        let gguf = parse_gguf(&bytes)?;
        let metadata = &gguf.metadata;
        check_clip(metadata)?;
        let names = FAMILIES.iter().map(|family| family.gguf);
        let Some(found) = projector(&gguf)? else {
            return Err(unsupported("gguf", "clip.has_audio_encoder", "false", supported(names)));
        };
        let family = FAMILIES
            .iter()
            .find(|family| family.gguf == found)
            .ok_or_else(|| other("gguf", "clip.audio.projector_type", found, names))?;
        let mut tensor_index = TensorIndex::default();
        for tensor in gguf.tensors.iter().filter(|tensor| is_sound(&tensor.name)) {
            check_type("gguf", tensor)?;
            tensor_index.insert(family.name(&tensor.name), 0, tensor.clone(), FileLayout::AsRead);
        }
        let data = Vec::new();
        let keys = Keys::new(KeySource::Gguf(metadata, &tensor_index, &data), "clip.audio", false);
        let config = (family.describe)(&keys)?;
        config.check()?;
        Ok(AudioFile { tensor_index, files: vec![bytes], ..family.file(config) })
    }
}

/// The family and the part of a folder with these texts, without its tensors.
fn of_texts(texts: &FolderTexts) -> Result<(&'static AudioFamily, AudioFile), Error> {
    let in_file = |name: &'static str| move |error: Error| error.in_file(name);
    let bytes = texts.config.as_ref().ok_or_else(|| huggingface::missing(CONFIG))?;
    let json = ConfigJson::parse(bytes).map_err(in_file(CONFIG))?;
    let names = FAMILIES.iter().map(|family| family.json);
    let model_type = json.get_str("model_type").map_err(in_file(CONFIG))?.unwrap_or("missing").to_owned();
    let family = FAMILIES.iter().find(|family| family.json == model_type);
    let has_part = json.get(AUDIO_CONFIG).map_err(in_file(CONFIG))?.is_some();
    let family = match (family, has_part) {
        (Some(family), true) => family,
        (Some(_), false) => return Err(unsupported(CONFIG, AUDIO_CONFIG, "missing", supported(names)).in_file(CONFIG)),
        (None, _) => return Err(other(CONFIG, "model_type", &model_type, names).in_file(CONFIG)),
    };
    let row_dim = json.get_u32("text_config.hidden_size").map_err(in_file(CONFIG))?;
    let json = json.required_part(AUDIO_CONFIG, &[]).map_err(in_file(CONFIG))?;
    let json = json.or_value("text_hidden_size", row_dim.map(Into::into));
    let keys = Keys::new(KeySource::Json(&json), &model_type, false);
    let config =
        (family.describe)(&keys).and_then(|config| config.check().map(|()| config)).map_err(in_file(CONFIG))?;
    keys.check_read().map_err(in_file(CONFIG))?;
    let mut file = family.file(config);
    for (bytes, name) in [&texts.preprocessor, &texts.processor].into_iter().zip(PREPROCESSORS) {
        if let Some(bytes) = bytes {
            file.take_settings(&ConfigJson::parse(bytes).map_err(in_file(name))?).map_err(in_file(name))?;
        }
    }
    Ok((family, file))
}

impl AudioFile {
    /// Reads the settings that a preprocessor has.
    fn take_settings(&mut self, json: &ConfigJson) -> Result<(), Error> {
        let number = |path: &str, value: &mut u32, max: u32| match json.get_u32(path)? {
            Some(found) if (1..=max).contains(&found) => {
                *value = found;
                Ok(())
            }
            Some(found) => {
                let (expected, found) = (format!("1 to {max}"), found.to_string());
                Err(Error::Config { field: path.into(), expected, found })
            }
            None => Ok(()),
        };
        number("feature_extractor.sampling_rate", &mut self.rate, MAX_RATE)?;
        number("audio_seq_length", &mut self.max_rows, 1 << 16)?;
        let path = "feature_extractor.audio_samples_per_token";
        match json.get(path)?.filter(|found| found.as_u64() != Some(self.config.patch_dim.into())) {
            Some(found) => {
                let (expected, found) = (format!("{}, as in {CONFIG}", self.config.patch_dim), found.to_string());
                Err(Error::Config { field: path.into(), expected, found })
            }
            None => Ok(()),
        }
    }
}

impl AudioFamily {
    /// A part of this shape without tensors, with the usual settings.
    fn file(&self, config: VisionConfig) -> AudioFile {
        /// 30 seconds of Gemma 4.
        const ROWS: u32 = 750;
        let (tensor_index, files) = (TensorIndex::default(), Vec::new());
        AudioFile { config, rate: SAMPLE_RATE, max_rows: ROWS, tokens: self.tokens, tensor_index, files }
    }

    /// Our name of a tensor.
    fn name(&self, name: &str) -> String {
        let (stem, suffix) = name.rsplit_once('.').unwrap_or((name, "weight"));
        let known = self.names.iter().find(|(theirs, _)| *theirs == stem);
        format!("{}.{suffix}", known.map_or(stem, |(_, ours)| ours))
    }
}

/// The projector of a GGUF file's sound; `None` without.
fn projector(gguf: &Gguf) -> Result<Option<&str>, Error> {
    let metadata = &gguf.metadata;
    if metadata.get_bool("clip.has_audio_encoder")? != Some(true) {
        return Ok(None);
    }
    Ok(metadata.get_str("clip.audio.projector_type")?.or(metadata.get_str("clip.projector_type")?).or(Some("missing")))
}

/// The error for a model that encodes sound in another way, or not at all.
fn other(format: &'static str, field: &str, name: &str, names: impl Iterator<Item = &'static str>) -> Error {
    let means = OTHERS.iter().find(|(names, _)| names.contains(&name)).map(|(_, means)| means);
    let error = unsupported(format, field, name, supported(names));
    match (error, means) {
        (Error::Unsupported { format, field, found, supported }, Some(means)) => {
            Error::Unsupported { format, field, found: format!("{found}, whose sound goes through {means}"), supported }
        }
        (error, _) => error,
    }
}

/// The supported families, by these names.
fn supported(names: impl Iterator<Item = &'static str>) -> String {
    format!("models that take sound without an encoder: {}", names.collect::<Vec<_>>().join(", "))
}
