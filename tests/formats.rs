//! Parsers of GGUF, safetensors and `config.json`, and the block decoders.
//!
//! Hostile files are generated: a valid file with one change, so the test knows which field the error must name and
//! where it starts. Every parse runs under a counting allocator, because the memory bound is guaranteed. Valid,
//! unusual and real files must load.

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
