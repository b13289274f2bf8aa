//! Quantisers against llama.cpp's bytes, and files written by `quantize_file`.

#[path = "quantize/blocks.rs"]
mod blocks;
use crate::common;
#[path = "quantize/files.rs"]
mod files;
#[path = "quantize/folders.rs"]
mod folders;
