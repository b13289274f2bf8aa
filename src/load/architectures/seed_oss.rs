//! Seed-OSS (ByteDance 2025): Qwen2's biases, with a head size of its own.

use super::Architecture;
use super::qwen::QWEN2;

pub(super) const SEED_OSS: Architecture =
    Architecture { gguf: "seed_oss", json: &["seed_oss"], gguf_names: &[("post_attention_norm", "ffn_norm")], ..QWEN2 };
