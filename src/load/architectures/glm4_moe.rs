//! GLM-4.5 to 4.7 (Zhipu AI 2025, arXiv:2508.06471): experts scored by sigmoids after the first dense layers, partial
//! rotation, biases on queries, keys and values, and QK norms in the largest model.

use super::llama::LLAMA;
use super::{Architecture, SIGMOIDS, mixture_after_dense};
use crate::kernels::{QkNorm, RopeStyle};
use crate::load::keys::Key;

pub(super) const GLM4_MOE: Architecture = Architecture {
    gguf: "glm4moe",
    json: &["glm4_moe"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("mlp.gate.e_score_correction", "exp_probs_b"),
        ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
        ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
        ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ],
    gguf_names: &[("post_attention_norm", "ffn_norm")],
    defaults: r#"{"first_k_dense_replace": 1}"#,
    mtp: true,
    describe: |keys, config| {
        mixture_after_dense(keys, config, SIGMOIDS)?;
        let has_norms = keys.bool(Key("", "use_qk_norm"))?.unwrap_or(false) || keys.has("blk.0.attn_q_norm.weight");
        config.blocks.iter_mut().for_each(|block| block.attention.qk_norm = has_norms.then_some(QkNorm::Heads));
        Ok(())
    },
    ..LLAMA
};
