//! A summary of a model's headers that needs no knowledge of its architecture, to inspect files that may not be
//! loadable.

use serde_json::Value;

use super::huggingface::FolderTexts;
use crate::error::Error;
use crate::formats::gguf::Gguf;
use crate::formats::text::read_json;
use crate::formats::{BlockType, TensorInfo};

/// Summary of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outline {
    /// `general.name` of a GGUF file.
    pub name: Option<String>,
    /// `general.architecture`, or `model_type` of a `config.json`.
    pub architecture: Option<String>,
    /// `general.type` of a GGUF file that is not a model, such as `adapter`.
    pub content: Option<String>,
    /// `general.license`.
    pub licence: Option<String>,
    /// The context length used in training.
    pub max_context_length: Option<u64>,
    /// Weights by storage type, largest first by bytes.
    pub weights: Vec<WeightShare>,
}

/// The weights of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightShare {
    /// Storage type.
    pub block_type: BlockType,
    /// Number of weights.
    pub n_elements: u64,
    /// Size in the files.
    pub size_bytes: u64,
}

impl Outline {
    /// The outline of a GGUF file or its shards.
    ///
    /// # Errors
    /// [`Error::Config`] if a key has the wrong type.
    pub(super) fn of_gguf(shards: &[Gguf]) -> Result<Outline, Error> {
        let weights = WeightShare::of(shards.iter().flat_map(|gguf| &gguf.tensors));
        let Some(metadata) = shards.first().map(|gguf| &gguf.metadata) else { return Ok(Outline::default()) };
        let text = |key| Ok::<_, Error>(metadata.get_str(key)?.map(str::to_owned));
        let architecture = text("general.architecture")?;
        let max_context_length = match &architecture {
            Some(name) => metadata.get_u64(&format!("{name}.context_length"))?,
            None => None,
        };
        Ok(Outline {
            name: text("general.name")?,
            content: text("general.type")?.filter(|content| content != "model"),
            licence: text("general.license")?,
            architecture,
            max_context_length,
            weights,
        })
    }

    /// The outline of a folder with these tensors. Ignores errors, which the header reports.
    pub(super) fn of_folder<'a>(texts: &FolderTexts, tensors: impl Iterator<Item = &'a TensorInfo>) -> Outline {
        let config = texts.config.as_deref().and_then(|bytes| read_json::<Value>(bytes).ok());
        let part = config.as_ref().and_then(|config| config.get("text_config"));
        let get = |key: &str| [part, config.as_ref()].into_iter().flatten().find_map(|object| object.get(key));
        let max_context_length =
            ["max_position_embeddings", "n_positions"].into_iter().find_map(|key| get(key)?.as_u64());
        Outline {
            architecture: get("model_type").and_then(Value::as_str).map(str::to_owned),
            max_context_length,
            weights: WeightShare::of(tensors),
            ..Outline::default()
        }
    }
}

impl WeightShare {
    /// Shares of these tensors by type, largest first by bytes.
    pub fn of<'a>(tensors: impl Iterator<Item = &'a TensorInfo>) -> Vec<WeightShare> {
        let mut shares: Vec<WeightShare> = Vec::new();
        for tensor in tensors {
            let block_type = tensor.block_type;
            let at = shares.iter().position(|share| share.block_type == block_type).unwrap_or_else(|| {
                shares.push(WeightShare { block_type, n_elements: 0, size_bytes: 0 });
                shares.len() - 1
            });
            // Hostile headers could overflow the sum.
            let share = &mut shares[at];
            share.n_elements = share.n_elements.saturating_add(tensor.n_elements());
            share.size_bytes = share.size_bytes.saturating_add(tensor.size_bytes);
        }
        crate::sort::by_key(&mut shares, |share| (std::cmp::Reverse(share.size_bytes), share.block_type.to_string()));
        shares
    }
}
