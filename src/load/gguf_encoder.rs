//! What GGUF files of text encoders say of their use, as llama.cpp's converter writes them: pooling, and the heads of
//! cross-encoders.

use super::encoder::BERT_HEAD;
use super::keys::{Key, Keys};
use super::{EncoderShape, Scoring};
use crate::error::Error;
use crate::formats::gguf::Metadata;
use crate::kernels::{Activation, Gelu, Pooling};
use crate::model::{ModelConfig, ScoreConfig};

/// How a text's vector is made from its tokens'.
const POOLING: Key = Key("pooling_type", "");
/// The value that stands for a head that scores pairs.
const RANK: u32 = 4;

/// Whether a file says that its model makes vectors of texts.
pub(super) fn embeds(architecture: &str, metadata: &Metadata) -> Result<bool, Error> {
    Ok(metadata.get_u32(&format!("{architecture}.{}", POOLING.0))?.is_some())
}

/// The shape of a file's encoder of this configuration.
pub(super) fn shape(config: ModelConfig, keys: &Keys<'_>) -> Result<EncoderShape, Error> {
    let pooling = match keys.u32(POOLING)? {
        // Files of cross-encoders seldom say what they are.
        None if has_head(&config) && keys.rows("cls.output.weight").is_ok() => None,
        Some(RANK) if has_head(&config) => None,
        // `none` leaves it to the caller.
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

/// Whether files of the architecture may hold a head that is known.
fn has_head(config: &ModelConfig) -> bool {
    matches!(config.architecture.as_str(), "bert" | "modern-bert")
}

/// The head of a cross-encoder. Files do not say what becomes of its logit.
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
                found: "missing, as in DistilBERT, whose head is another".into(),
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
