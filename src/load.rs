//! From a file to a model: which format it is, what its keys mean, where each weight lies.
//!
//! `formats` reads bytes and knows no model; `model` records passes and knows no file. This room stands between them:
//! it turns GGUF metadata or a `config.json` into a [`ModelConfig`], and serves tensors under GGUF's names.

mod file;
mod gguf;
mod huggingface;
mod vocab;

use std::path::Path;

use crate::error::Error;
use crate::model::{ModelConfig, WeightSource};
use crate::tokenizer::Tokenizer;

pub use file::FileBytes;
pub use vocab::vocab_from_gguf;

/// A model in a file, read but not on a device.
pub struct ModelFile {
    /// `general.name`, or the file's or folder's name.
    pub name: String,
    /// Shape of the model.
    pub config: ModelConfig,
    /// Its weights.
    pub source: Box<dyn WeightSource>,
    /// Its tokenizer, or why there is none.
    pub tokenizer: Result<Tokenizer, Error>,
    /// Bytes on disk.
    pub size_bytes: u64,
}

impl ModelFile {
    /// Opens a GGUF file, or a Hugging Face folder (`config.json` with `model.safetensors` or its sharded index), or a
    /// `.safetensors` or `.json` file in such a folder.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and what is wrong in it, [`Error::Io`] if it cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFile, Error> {
        let path = path.as_ref();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let is_published = name.ends_with(".safetensors") || name.ends_with(".json");
        if is_published || path.is_dir() {
            return huggingface::open(path);
        }
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        FileBytes::map(path).and_then(|bytes| gguf::open(stem, bytes)).map_err(|e| e.in_file(path))
    }

    /// Reads a GGUF file that is in memory.
    ///
    /// # Errors
    /// Any of [`Error::Format`], [`Error::Unsupported`] and [`Error::Config`].
    pub fn from_gguf_bytes(bytes: impl Into<FileBytes>) -> Result<ModelFile, Error> {
        gguf::open("gguf".into(), bytes.into())
    }

    /// The file of the model that is part of this crate.
    pub const BUILTIN: &'static [u8] = include_bytes!("../assets/stories.gguf");

    /// The model that is part of this crate: about a million parameters that tell short stories.
    ///
    /// # Errors
    /// None in practice; the file is part of the program and a test opens it.
    pub fn builtin() -> Result<ModelFile, Error> {
        ModelFile::from_gguf_bytes(ModelFile::BUILTIN)
    }
}
