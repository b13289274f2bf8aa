//! The readers of GGUF, safetensors and `config.json`, and the block decoders.
//!
//! Hostile files are generated: a valid file with one thing changed, and the test knows which field the error has to
//! name and where it starts. Every parse runs under an allocator that counts, because the bound on memory is part of
//! the promise. Valid files, odd ones and real ones, have to load.

#[path = "formats/blocks.rs"]
mod blocks;
#[path = "formats/builder.rs"]
pub mod builder;
use crate::common;
#[path = "formats/config_json.rs"]
mod config_json;
#[path = "formats/data.rs"]
mod data;
#[path = "formats/hostile.rs"]
pub mod hostile;
#[path = "formats/hostile_gguf.rs"]
mod hostile_gguf;
#[path = "formats/hostile_safetensors.rs"]
mod hostile_safetensors;
#[path = "formats/real_files.rs"]
mod real_files;
#[path = "formats/valid_gguf.rs"]
mod valid_gguf;
#[path = "formats/valid_safetensors.rs"]
mod valid_safetensors;
