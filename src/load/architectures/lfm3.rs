//! LFM3 (Liquid AI 2026): LFM2 with longer convolutions, sandwich norms, sliding windows in some attention layers with
//! a RoPE of their own, and a gate for each head.

use super::lfm2::LFM2;
use super::{Architecture, WINDOW, add_local_rope, listed_layers};
use crate::error::Error;
use crate::kernels::QkNorm;
use crate::load::keys::{Key, Keys};
use crate::load::scaling;
use crate::model::{ModelConfig, NormPlace, OutputGates, Recurrence};

pub(super) const LFM3: Architecture = Architecture {
    gguf: "",
    json: &["lfm3"],
    names: &[
        ("embedding_norm", "output_norm"),
        ("operator_norm", "attn_norm"),
        ("post_operator_norm", "post_attention_norm"),
        ("ffn_norm", "ffn_norm"),
        ("post_ffn_norm", "post_ffw_norm"),
        ("self_attn.g_proj", "attn_gate"),
        ("self_attn.gate_proj", "attn_gate"),
        ("conv.in_proj", "shortconv.in_proj"),
        ("conv.conv", "shortconv.conv"),
        ("conv.out_proj", "shortconv.out_proj"),
        ("feed_forward.w1", "ffn_gate"),
        ("feed_forward.w3", "ffn_up"),
        ("feed_forward.w2", "ffn_down"),
    ],
    gguf_names: &[],
    eps: (Key("", "norm_eps"), Some(1e-5)),
    describe: layers,
    ..LFM2
};

fn layers(keys: &Keys<'_>, config: &mut ModelConfig) -> Result<(), Error> {
    let kinds = ["full_attention", "sliding_attention", "conv"];
    let kinds =
        listed_layers(keys, config.blocks.len(), &kinds)?.ok_or_else(|| keys.missing(Key("", "layer_types")))?;
    let taps = keys.u32(Key("", "conv_L_cache"))?.unwrap_or(7);
    let window = keys.u32(WINDOW)?;
    let gates = keys.bool(Key("", "use_attention_gate"))?.unwrap_or(true).then_some(OutputGates::Heads);
    let has_both_norms = keys.bool(Key("", "use_sandwich_norm"))?.unwrap_or(true);
    let local_rope = add_local_rope(keys, config, 10_000.0)?;
    let head_dim = config.blocks.first().map_or(0, |block| block.attention.head_dim);
    config.ropes[local_rope].rot_dims = head_dim;
    // The share of rotated pairs is a matter of the scaling.
    let scaling = scaling::read(keys, head_dim, config.max_seq_len)?;
    (config.ropes[0].rot_dims, config.ropes[0].scaling) = (head_dim, scaling);
    for (block, kind) in config.blocks.iter_mut().zip(kinds) {
        let is_local = kind == 1;
        block.recurrence = (kind == 2).then_some(Recurrence::ShortConv { taps });
        block.attention.qk_norm = Some(QkNorm::Heads);
        block.attention.gates = gates;
        block.attention.window = window.filter(|_| is_local);
        block.attention.rope = Some(if is_local { local_rope } else { 0 });
        if has_both_norms {
            (block.attn_norm, block.ffn_norm) = (NormPlace::Both, NormPlace::Both);
        }
    }
    Ok(())
}
