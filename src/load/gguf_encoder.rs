//! GGUF metadata of text encoders, as llama.cpp's converter writes it: pooling and cross-encoder heads.

use super::encoder::{BERT_HEAD, DENSE_NAMES};
use super::keys::{Key, Keys};
use super::{EncoderShape, Scoring, TokenHeads, llm_reranker};
use crate::error::Error;
use crate::formats::gguf::Metadata;
use crate::kernels::{Activation, Gelu, Pooling};
use crate::model::{DenseConfig, MAX_DIM, ModelConfig, ScoreConfig};

/// How token vectors are pooled.
const POOLING: Key = Key("pooling_type", "");
/// Pooling type of cross-encoders.
const RANK: u32 = 4;
/// Names of a cross-encoder's outputs.
pub(super) const LABELS: Key = Key("classifier.output_labels", "");

/// Whether a file's model is an embedding model.
pub(super) fn embeds(architecture: &str, metadata: &Metadata) -> Result<bool, Error> {
    Ok(metadata.get_u32(&format!("{architecture}.{}", POOLING.0))?.is_some())
}

pub(super) fn shape(config: ModelConfig, keys: &Keys<'_>, metadata: &Metadata) -> Result<EncoderShape, Error> {
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
        None if is_qwen3(&config) => {
            keys.says(LABELS);
            Some(llm_reranker::gguf_scoring(metadata)?)
        }
        None => Some(scoring(keys, &config)?),
        Some(_) => None,
    };
    let usual = if is_qwen3(&config) && scoring.is_some() { llm_reranker::MAX_TOKENS } else { u32::MAX };
    let max_tokens = keys.u32(Key("context_length", ""))?.unwrap_or(u32::MAX).clamp(1, config.max_seq_len).min(usual);
    let (prompts, default_prompt) = Default::default();
    let dense = dense(keys, &config)?;
    Ok(EncoderShape {
        config,
        pooling,
        normalize: true,
        dense,
        max_tokens,
        prompts,
        default_prompt,
        scoring,
        late: None,
        token_heads: TokenHeads::default(),
        tower: None,
        tasks: None,
    })
}

/// The dense layers after pooling, which only EmbeddingGemma's files have.
fn dense(keys: &Keys<'_>, config: &ModelConfig) -> Result<Vec<DenseConfig>, Error> {
    const SIZES: [[Key; 2]; 2] = [
        [Key("dense_2_feat_in", ""), Key("dense_2_feat_out", "")],
        [Key("dense_3_feat_in", ""), Key("dense_3_feat_out", "")],
    ];
    let mut dense: Vec<DenseConfig> = Vec::new();
    if config.architecture != "gemma-embedding" {
        return Ok(dense);
    }
    for (name, sizes) in DENSE_NAMES.into_iter().skip(1).zip(SIZES) {
        let width = dense.last().map_or(config.dim, |layer| layer.outputs);
        let [inputs, outputs] = [keys.u32(sizes[0])?, keys.u32(sizes[1])?];
        let outputs = match (outputs, keys.rows(&format!("{name}.weight"))) {
            (None, Err(_)) => continue,
            (None, Ok(rows)) => rows,
            (Some(outputs), _) => outputs,
        };
        if let Some(inputs) = inputs.filter(|&inputs| inputs != width) {
            return Err(keys.wrong(sizes[0], format!("{width}, the width of its input"), inputs));
        }
        if !(1..=MAX_DIM).contains(&outputs) {
            return Err(keys.wrong(sizes[1], format!("1 to {MAX_DIM}"), outputs));
        }
        dense.push(DenseConfig { name, inputs: width, outputs, bias: false, activation: None });
    }
    Ok(dense)
}

/// Whether the architecture has a supported scoring head.
fn has_head(config: &ModelConfig) -> bool {
    matches!(config.architecture.as_str(), "bert" | "modern-bert") || is_qwen3(config)
}

fn is_qwen3(config: &ModelConfig) -> bool {
    config.architecture == "qwen3"
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
            dense: Some(Activation::Gelu(Gelu::Exact)),
            norm: true,
            answers: false,
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
    let n_labels = match keys.strs(LABELS)? {
        Some(labels) => labels.len() as u32,
        None => keys.rows("cls.output.weight")?,
    };
    Ok(Scoring { head, n_labels, activation_fn: None, prompt: None })
}
