//! EuroBERT (Boizard et al. 2025, arXiv:2503.05500): Llama whose tokens see each other both ways.

use super::llama::LLAMA;
use super::{Architecture, encoder};
use crate::kernels::RopeStyle;
use crate::load::keys::Key;

pub(super) const EUROBERT: Architecture = Architecture {
    gguf: "eurobert",
    json: &["eurobert"],
    pairs: [RopeStyle::Halves; 2],
    describe: |keys, config| {
        // Names of tokens, and the pooling of a classifier.
        for name in ["bos_token", "eos_token", "pad_token", "mask_token", "clf_pooling"] {
            keys.says(Key("", name));
        }
        encoder(config, false);
        Ok(())
    },
    ..LLAMA
};
