//! ERNIE 4.5 (Baidu 2025): Llama with interleaved RoPE in published checkpoints as well.

use super::Architecture;
use super::llama::LLAMA;
use crate::kernels::RopeStyle;

pub(super) const ERNIE4_5: Architecture = Architecture {
    gguf: "ernie4_5",
    json: &["ernie4_5"],
    pairs: [RopeStyle::Interleaved; 2],
    tied: true,
    describe: |_, _| Ok(()),
    ..LLAMA
};
