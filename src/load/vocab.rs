//! The vocabulary in a GGUF file's metadata.

use crate::error::Error;
use crate::formats::gguf::{Metadata, Value};
use crate::tokenizer::{NO_ID, TokenType, Vocab};

/// Collects the `tokenizer.ggml.*` keys. [`Tokenizer::from_vocab`](crate::tokenizer::Tokenizer::from_vocab) checks
/// their consistency.
///
/// # Errors
/// [`Error::Config`] if the file has no vocabulary, [`Error::Format`] for a key of the wrong type,
/// [`Error::Tokenizer`] for an unknown token type.
pub fn vocab_from_gguf(metadata: &Metadata) -> Result<Vocab, Error> {
    let missing = |field: &str, found: &str| Error::Config {
        field: field.into(),
        expected: "a vocabulary".into(),
        found: found.into(),
    };
    let model = metadata.get_str("tokenizer.ggml.model")?;
    let model = model.ok_or_else(|| missing("tokenizer.ggml.model", "missing"))?;
    if matches!(model, "no_vocab" | "none") {
        return Err(missing("tokenizer.ggml.model", model));
    }
    let tokens = metadata.get_str_array("tokenizer.ggml.tokens")?;
    let token_types = metadata.get_u32_array("tokenizer.ggml.token_type")?.unwrap_or_default();
    let sep_id = match id(metadata, "tokenizer.ggml.separator_token_id")? {
        // The key was misspelled for years; most files have the old spelling.
        None => id(metadata, "tokenizer.ggml.seperator_token_id")?,
        sep_id => sep_id,
    };
    let pre = metadata.get_str("tokenizer.ggml.pre")?;
    let add_sep = match pre {
        // ModernBERT's files set the key too, although its pairs have a single separator.
        Some("modern-bert") => Some(false),
        _ => metadata.get_bool("tokenizer.ggml.add_sep_token")?,
    };
    // The SentencePiece vocabulary of Phi-3 and 3.5. Phi-4's differs.
    let is_phi3 = model == "llama" && metadata.get_str("general.architecture")? == Some("phi3");
    let owned = |texts: Vec<&str>| texts.into_iter().map(str::to_owned).collect();
    Ok(Vocab {
        model: model.into(),
        pre: pre.map(str::to_owned),
        tokens: owned(tokens.ok_or_else(|| missing("tokenizer.ggml.tokens", "missing"))?),
        scores: metadata.get_f32_array("tokenizer.ggml.scores")?.unwrap_or_default(),
        token_types: token_types.into_iter().map(TokenType::try_from).collect::<Result<_, _>>()?,
        merges: owned(metadata.get_str_array("tokenizer.ggml.merges")?.unwrap_or_default()),
        bos_id: id(metadata, "tokenizer.ggml.bos_token_id")?,
        eos_id: id(metadata, "tokenizer.ggml.eos_token_id")?,
        eot_id: id(metadata, "tokenizer.ggml.eot_token_id")?,
        eom_id: id(metadata, "tokenizer.ggml.eom_token_id")?,
        end_ids: Vec::new(),
        unk_id: id(metadata, "tokenizer.ggml.unknown_token_id")?,
        sep_id,
        cls_id: id(metadata, "tokenizer.ggml.cls_token_id")?,
        pad_id: id(metadata, "tokenizer.ggml.padding_token_id")?,
        add_bos: metadata.get_bool("tokenizer.ggml.add_bos_token")?,
        add_eos: metadata.get_bool("tokenizer.ggml.add_eos_token")?,
        add_sep,
        add_space_prefix: metadata.get_bool("tokenizer.ggml.add_space_prefix")?,
        remove_extra_spaces: metadata.get_bool("tokenizer.ggml.remove_extra_whitespaces")?,
        charsmap: metadata.get_byte_array("tokenizer.ggml.precompiled_charsmap")?.unwrap_or_default(),
        special_strips_right: is_phi3,
        lowercase: metadata.get_bool("tokenizer.ggml.normalizer.lowercase")?,
        notices: Vec::new(),
    })
}

/// The id of a special token. -1 of any width means none, [`NO_ID`] here.
///
/// # Errors
/// [`Error::Format`] for a non-integer or an invalid id.
pub(super) fn id(metadata: &Metadata, key: &str) -> Result<Option<u32>, Error> {
    match metadata.get(key).and_then(Value::as_integer) {
        Some(-1) => Ok(Some(NO_ID)),
        Some(id) if id == i128::from(u64::MAX) => Ok(Some(NO_ID)),
        _ => metadata.get_u32(key),
    }
}
