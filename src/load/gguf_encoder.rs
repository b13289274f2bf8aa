//! GGUF files of text encoders, as llama.cpp's converter writes them: the architectures `bert`, which RoBERTa and
//! XLM-RoBERTa share, `modern-bert`, `nomic-bert` and, where a pooling is named, `qwen3`.

use super::catalog::Catalog;
use super::encoder::{BERT_HEAD, GATES, as_modern_bert, as_nomic_bert, as_qwen3, gated, local_layers, plain, rope};
use super::gguf::named_scaling;
use super::huggingface::missing;
use super::{EncoderShape, Scoring};
use crate::error::Error;
use crate::formats::gguf::Metadata;
use crate::kernels::{Activation, Gelu, Pooling, RopeConfig};
use crate::model::{EncoderConfig, FeedForward, NormKind, Positions, ScoreConfig, WeightSource};

/// The value of `pooling_type` that stands for a head that scores pairs.
const RANK: u32 = 4;

/// The keys of one architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.metadata.get_u32(&self.name(key))
    }

    fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.metadata.get_f32(&self.name(key))
    }

    fn required(&self, key: &str) -> Result<u32, Error> {
        self.u32(key)?.ok_or_else(|| missing(&self.name(key)))
    }

    fn required_f32(&self, key: &str) -> Result<f32, Error> {
        self.f32(key)?.ok_or_else(|| missing(&self.name(key)))
    }

    fn unsupported(&self, key: &str, found: impl ToString, supported: &str) -> Error {
        let (field, found) = (self.name(key), found.to_string());
        Error::Unsupported { format: "gguf", field, found, supported: supported.into() }
    }
}

/// The shape that a file gives, if it is an encoder's.
pub(super) fn shape(metadata: &Metadata, catalog: &Catalog) -> Result<Option<EncoderShape>, Error> {
    let Some(architecture) = metadata.get_str("general.architecture")? else { return Ok(None) };
    let keys = Keys { metadata, architecture };
    let pooling_type = keys.u32("pooling_type")?;
    let config = match architecture {
        "bert" => bert(&keys, catalog)?,
        "modern-bert" => modern_bert(&keys, catalog)?,
        "nomic-bert" => nomic_bert(&keys, catalog)?,
        // Decoders are of that architecture as well.
        "qwen3" if pooling_type.is_some() => qwen3(&keys, catalog)?,
        _ => return Ok(None),
    };
    config.check()?;
    let pooling = match pooling_type {
        // Files of cross-encoders seldom say what they are.
        None if has_head(&config) && catalog.describe("cls.output.weight").is_some() => None,
        Some(RANK) if has_head(&config) => None,
        // `none` leaves it to the caller.
        None | Some(0 | 1) => Some(Pooling::Mean),
        Some(2) => Some(Pooling::Cls),
        Some(3) => Some(Pooling::Last),
        Some(other) => {
            let rank = if has_head(&config) { ", 4 (rank)" } else { "" };
            return Err(keys.unsupported("pooling_type", other, &format!("1 (mean), 2 (cls), 3 (last){rank}")));
        }
    };
    let scoring = match pooling {
        None => Some(scoring(&keys, &config, catalog)?),
        Some(_) => None,
    };
    let max_tokens = keys.u32("context_length")?.unwrap_or(u32::MAX).clamp(1, config.max_seq_len);
    let (prompts, default_prompt) = Default::default();
    Ok(Some(EncoderShape { config, pooling, normalize: true, max_tokens, prompts, default_prompt, scoring }))
}

/// Rows of a tensor.
fn rows(catalog: &Catalog, name: &str) -> Option<u32> {
    catalog.describe(name).and_then(|tensor| u32::try_from(*tensor.shape.first()?).ok())
}

/// What the files of all architectures have in common. `eps` is the end of the key of the norms' epsilon.
fn base(keys: &Keys<'_>, catalog: &Catalog, head_dim: Option<u32>, eps: &str) -> Result<EncoderConfig, Error> {
    let sizes = [
        keys.required("embedding_length")?,
        keys.required("feed_forward_length")?,
        keys.required("block_count")?,
        keys.required("attention.head_count")?,
    ];
    Ok(EncoderConfig {
        vocab_size: rows(catalog, "token_embd.weight").ok_or_else(|| missing("token_embd.weight"))?,
        n_token_types: rows(catalog, "token_types.weight").unwrap_or(0),
        norm_eps: keys.required_f32(&format!("attention.{eps}"))?,
        ..plain(keys.architecture, sizes, head_dim, &keys.name("attention.head_count"))?
    })
}

/// RoBERTa's rows of positions begin with that of the first token: the converter cuts those in front off.
fn bert(keys: &Keys<'_>, catalog: &Catalog) -> Result<EncoderConfig, Error> {
    let table = "position_embd.weight";
    Ok(EncoderConfig {
        max_seq_len: rows(catalog, table).ok_or_else(|| missing(table))?,
        ..base(keys, catalog, None, "layer_norm_epsilon")?
    })
}

fn modern_bert(keys: &Keys<'_>, catalog: &Catalog) -> Result<EncoderConfig, Error> {
    let config = base(keys, catalog, None, "layer_norm_epsilon")?;
    let thetas = [keys.required_f32("rope.freq_base")?, keys.f32("rope.freq_base_swa")?.unwrap_or(10_000.0)];
    let activation = keys.metadata.get_str(&keys.name("hidden_activation"))?.unwrap_or("gelu");
    let window = keys.u32("attention.sliding_window")?.filter(|window| *window > 0);
    let global_every = keys.u32("attention.sliding_window_pattern")?;
    Ok(EncoderConfig {
        max_seq_len: keys.required("context_length")?,
        local: window.map(|window| local_layers(window, global_every)),
        feed_forward: gated(activation)
            .ok_or_else(|| keys.unsupported("hidden_activation", format!("`{activation}`"), GATES))?,
        ..as_modern_bert(config, thetas)
    })
}

fn nomic_bert(keys: &Keys<'_>, catalog: &Catalog) -> Result<EncoderConfig, Error> {
    let config = base(keys, catalog, None, "layer_norm_epsilon")?;
    let rope = rope(config.head_dim, keys.f32("rope.freq_base")?.unwrap_or(1000.0));
    Ok(EncoderConfig { max_seq_len: keys.required("context_length")?, ..as_nomic_bert(config, rope) })
}

fn qwen3(keys: &Keys<'_>, catalog: &Catalog) -> Result<EncoderConfig, Error> {
    let head_dim = keys.u32("attention.key_length")?;
    let config = base(keys, catalog, head_dim, "layer_norm_rms_epsilon")?;
    let rope = RopeConfig {
        scaling: named_scaling(keys.architecture, keys.metadata, "none, linear")?,
        ..rope(config.head_dim, keys.f32("rope.freq_base")?.unwrap_or(10_000.0))
    };
    Ok(EncoderConfig {
        max_seq_len: keys.required("context_length")?,
        causal: keys.metadata.get_bool(&keys.name("attention.causal"))?.unwrap_or(true),
        ..as_qwen3(config, keys.u32("attention.head_count_kv")?, rope)
    })
}

/// Whether files of the architecture may hold a head that is known.
fn has_head(config: &EncoderConfig) -> bool {
    matches!(config.architecture.as_str(), "bert" | "modern-bert")
}

/// The head of a cross-encoder. Files do not say what becomes of its logit.
fn scoring(keys: &Keys<'_>, config: &EncoderConfig, catalog: &Catalog) -> Result<Scoring, Error> {
    let head = match keys.architecture {
        "modern-bert" => ScoreConfig {
            pooling: match keys.u32("classifier.pooling_type")? {
                None | Some(1) => Pooling::Mean,
                Some(2) => Pooling::Cls,
                Some(other) => return Err(keys.unsupported("classifier.pooling_type", other, "1 (mean), 2 (cls)")),
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
    let n_labels = match keys.metadata.get_str_array(&keys.name("classifier.output_labels"))? {
        Some(labels) => labels.len() as u32,
        None => rows(catalog, "cls.output.weight").ok_or_else(|| missing("cls.output.weight"))?,
    };
    Ok(Scoring { head, n_labels, activation_fn: None })
}

/// Whether a pass of such an encoder reads the tensor, or may well leave it out.
pub(super) fn reads(name: &str, config: &EncoderConfig) -> bool {
    let Some((stem, suffix)) = name.rsplit_once('.') else { return false };
    let norm = Some(config.norm == NormKind::Layer { bias: true });
    let (weight, any) = (Some(false), Some(true));
    // Whether it may have a bias.
    let has_bias = match stem.strip_prefix("blk.") {
        None => match stem {
            "token_embd" => weight,
            "position_embd" if matches!(config.positions, Positions::Table { .. }) => weight,
            "token_types" if config.n_token_types > 0 => weight,
            "token_embd_norm" if config.embd_norm => norm,
            "output_norm" if config.norm_first => norm,
            "cls" | "cls.output" if has_head(config) => any,
            "cls.norm" if has_head(config) && config.norm_first => norm,
            // A decoder's logits, which no vector needs.
            "output" if config.architecture == "qwen3" => weight,
            _ => None,
        },
        Some(rest) => {
            let layer = rest.split_once('.').and_then(|(layer, part)| Some((layer.parse::<u32>().ok()?, part)));
            match layer.filter(|(layer, _)| *layer < config.n_layers) {
                Some((_, "attn_q" | "attn_k" | "attn_v" | "attn_qkv" | "attn_output" | "ffn_up" | "ffn_down")) => any,
                Some((_, "ffn_gate")) if !matches!(config.feed_forward, FeedForward::Gelu(_)) => any,
                Some((0, "attn_norm")) if config.embd_norm => None,
                Some((_, "attn_norm" | "ffn_norm")) if config.norm_first => norm,
                Some((_, "attn_output_norm" | "layer_output_norm")) if !config.norm_first => norm,
                Some((_, "attn_q_norm" | "attn_k_norm")) if config.qk_norm => weight,
                _ => None,
            }
        }
    };
    has_bias.is_some_and(|has_bias| suffix == "weight" || suffix == "bias" && has_bias)
}
