//! GGUF metadata of text encoders, as llama.cpp's converter writes it: pooling and cross-encoder heads.

use super::encoder::BERT_HEAD;
use super::keys::{Key, Keys};
use super::{EncoderShape, Scoring};
use crate::error::Error;
use crate::formats::gguf::Metadata;
use crate::kernels::{Activation, Gelu, Pooling};
use crate::model::{ModelConfig, ScoreConfig};

/// How token vectors are pooled.
const POOLING: Key = Key("pooling_type", "");
/// Pooling type of cross-encoders.
const RANK: u32 = 4;

/// Whether a file's model is an embedding model.
pub(super) fn embeds(architecture: &str, metadata: &Metadata) -> Result<bool, Error> {
    Ok(metadata.get_u32(&format!("{architecture}.{}", POOLING.0))?.is_some())
}

pub(super) fn shape(config: ModelConfig, keys: &Keys<'_>) -> Result<EncoderShape, Error> {
    let pooling = match keys.u32(POOLING)? {
        // Files of cross-encoders rarely state their pooling type.
        None if has_head(&config) && keys.rows("cls.output.weight").is_ok() => None,
        Some(RANK) if has_head(&config) => None,
        // `none` leaves pooling to the caller.
        None | Some(0 | 1) => Some(Pooling::Mean),
        Some(2) => Some(Pooling::Cls),
        Some(3) => Some(Pooling::Last),
        Some(other) => {
            let rank = if has_head(&config) { ", 4 (rank)" } else { "" };
            return Err(keys.unsupported(POOLING, other, &format!("1 (mean), 2 (cls), 3 (last){rank}")));
        }
    };
    let scoring = match pooling {
        None => Some(scoring(keys, &config)?),
        Some(_) => None,
    };
    let max_tokens = keys.u32(Key("context_length", ""))?.unwrap_or(u32::MAX).clamp(1, config.max_seq_len);
    let (prompts, default_prompt) = Default::default();
    Ok(EncoderShape { config, pooling, normalize: true, max_tokens, prompts, default_prompt, scoring })
}

/// Whether the architecture has a supported scoring head.
fn has_head(config: &ModelConfig) -> bool {
    matches!(config.architecture.as_str(), "bert" | "modern-bert")
}

/// The head of a cross-encoder. Files do not state the function applied to its logit.
fn scoring(keys: &Keys<'_>, config: &ModelConfig) -> Result<Scoring, Error> {
    let head_pooling = Key("classifier.pooling_type", "");
    let head = match keys.architecture {
        "modern-bert" => ScoreConfig {
            pooling: match keys.u32(head_pooling)? {
                None | Some(1) => Pooling::Mean,
                Some(2) => Pooling::Cls,
                Some(other) => return Err(keys.unsupported(head_pooling, other, "1 (mean), 2 (cls)")),
            },
            activation: Activation::Gelu(Gelu::Exact),
            norm: true,
        },
        _ if config.n_token_types == 0 => {
            return Err(Error::Unsupported {
                format: "gguf",
                field: "token_types.weight".into(),
                found: "missing, as in DistilBERT, which has a different head".into(),
                supported: "the heads of BERT and RoBERTa".into(),
            });
        }
        _ => BERT_HEAD,
    };
    let n_labels = match keys.strs(Key("classifier.output_labels", ""))? {
        Some(labels) => labels.len() as u32,
        None => keys.rows("cls.output.weight")?,
    };
    Ok(Scoring { head, n_labels, activation_fn: None })
}
