//! Tensors of published folders that are ignored, with the parts they belong to. All others must be read.

/// The ignored part that a tensor belongs to; empty for a buffer that duplicates the configuration; `None` for an
/// unknown tensor.
pub(super) fn part(name: &str, is_encoder: bool) -> Option<&'static str> {
    /// Name prefixes, also after `model.`.
    const PARTS: [(&str, &str); 16] = [
        ("vision_tower.", VISION),
        ("vision_model.", VISION),
        ("visual.", VISION),
        ("multi_modal_projector.", VISION),
        ("connector.", VISION),
        ("embed_vision.", VISION),
        ("vision_embedder.", VISION),
        ("visual_projection.", VISION),
        // Scale and bias of a similarity's logit, which change no vector.
        ("logit_scale", ""),
        ("logit_bias", ""),
        ("audio_tower.", AUDIO),
        ("embed_audio.", AUDIO),
        ("mtp.", MTP),
        ("nextn.", MTP),
        // Training heads.
        ("cls.predictions.", "masked tokens"),
        ("cls.seq_relationship.", "masked tokens"),
    ];
    /// Suffixes of buffers saved in old checkpoints: angles, masks, position counters.
    const BUFFERS: [&str; 7] = [
        "rotary_emb.inv_freq",
        "rotary_emb.original_inv_freq",
        "attn.bias",
        "attn.masked_bias",
        "attention.bias",
        "attention.masked_bias",
        "position_ids",
    ];
    let plain = name.strip_prefix("model.").unwrap_or(name);
    let known = PARTS.iter().find(|(begin, _)| plain.starts_with(begin)).map(|(_, part)| *part);
    let of_masked =
        || (is_encoder && (name.starts_with("lm_head.") || name.starts_with("decoder."))).then_some("masked tokens");
    known.or_else(of_masked).or_else(|| BUFFERS.iter().any(|end| name.ends_with(end)).then_some(""))
}

/// Whether a tensor belongs to an MTP head.
pub(super) fn is_of_mtp(name: &str) -> bool {
    part(name, false) == Some(MTP)
}

/// Vision encoders.
pub(crate) const VISION: &str = "vision";
/// Parts for sound.
pub(crate) const AUDIO: &str = "audio";
/// MTP heads.
pub(crate) const MTP: &str = "multi-token prediction";
/// Tensors of an MTP head that uses the model's instead.
pub(crate) const MTP_COPIES: &str = "the MTP head's own embedding and output head";
