//! gpt-oss (OpenAI 2025, arXiv:2508.10925): experts with a custom gate, attention sinks, biases, and sliding windows
//! in every other layer.

use super::llama::LLAMA;
use super::{Architecture, SHARES, WINDOW, mixture, sliding};
use crate::kernels::{Gate, RopeScaling, RopeStyle};
use crate::load::keys::Key;
use crate::load::tensor_index::FileLayout;
use crate::model::Between;

pub(super) const GPT_OSS: Architecture = Architecture {
    gguf: "gpt-oss",
    json: &["gpt_oss"],
    pairs: [RopeStyle::Halves; 2],
    names: &[
        ("self_attn.sinks", "attn_sinks"),
        ("mlp.router", "ffn_gate_inp"),
        ("mlp.experts.gate_up_proj", "ffn_gate_up_exps"),
        ("mlp.experts.down_proj", "ffn_down_exps"),
    ],
    gguf_names: &[("post_attention_norm", "ffn_norm")],
    stored: |name, _| match name {
        _ if name.contains(".ffn_gate_up_exps.") => FileLayout::ExpertsTransposed { paired: true },
        _ if name.ends_with(".ffn_down_exps.weight") => FileLayout::ExpertsTransposed { paired: false },
        _ => FileLayout::AsRead,
    },
    describe: |keys, config| {
        for (key, known) in [(Key("", "swiglu_alpha"), 1.702), (Key("", "swiglu_limit"), 7.0)] {
            if let Some(found) = keys.f32(key)?.filter(|&found| found != known) {
                return Err(keys.unsupported(key, found, &known.to_string()));
            }
        }
        let quantized = Key("", "quantization_config.quant_method");
        if let Some(found) = keys.str(quantized)?.filter(|&found| found != "mxfp4") {
            return Err(keys.unsupported(quantized, found, "mxfp4"));
        }
        // Redundant with tensors and other keys.
        for name in ["quantization_config.modules_to_not_convert", "experts_per_token", "initial_context_length"] {
            keys.says(Key("", name));
        }
        mixture(keys, config, SHARES, |_| true)?;
        if let Some(RopeScaling::Yarn { truncate, .. }) = config.ropes.first_mut().map(|rope| &mut rope.scaling) {
            *truncate = false;
        }
        let (window, is_local) = (keys.u32(WINDOW)?, sliding(keys, config, 2)?);
        for (block, is_local) in config.blocks.iter_mut().zip(is_local) {
            block.attention.sinks = true;
            block.attention.window = window.filter(|_| is_local);
            block.feed_forward.between = Between::Gate(Gate::Clamped);
        }
        Ok(())
    },
    ..LLAMA
};
