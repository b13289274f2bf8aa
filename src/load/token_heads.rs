//! Heads of BGE-M3 (Chen et al. 2024, arXiv:2402.03216) that make something of each token, beside its weights as
//! `torch.save` writes them.

use std::path::Path;

use super::FileBytes;
use super::TokenHeads;
use super::huggingface::FolderTexts;
use crate::error::Error;
use crate::formats::safetensors::Safetensors;
use crate::model::{DenseConfig, WeightSource};

/// Files of heads.
pub(crate) const TOKEN_HEADS: [&str; 2] = ["colbert_linear.pt", "sparse_linear.pt"];
/// The same with the names of their layers.
const FILES: [(&str, &str); 2] = [(TOKEN_HEADS[0], "cls.colbert"), (TOKEN_HEADS[1], "cls.sparse")];

/// The name of a head's tensor, by its file in the folder.
pub(super) fn tensor_name(file: &str, name: &str) -> Option<String> {
    let (_, layer) = FILES.iter().find(|(of_file, _)| *of_file == file)?;
    ["weight", "bias"].contains(&name).then(|| format!("{layer}.{name}"))
}

/// The heads of an encoder of width `inputs` that a folder has.
pub(super) fn shape(tensors: &dyn WeightSource, inputs: u32, unread: Option<String>) -> TokenHeads {
    let [vectors, weights] = FILES.map(|(_, name)| {
        let weight = tensors.describe(&format!("{name}.weight"))?;
        let outputs = u32::try_from(*weight.shape.first()?).ok()?;
        let bias = tensors.describe(&format!("{name}.bias")).is_some();
        Some(DenseConfig { name, inputs, outputs, bias, activation: None })
    });
    TokenHeads { vectors, weights: weights.filter(|head| head.outputs == 1), unread }
}

/// Opens the files of heads that a folder has. One that is not read is no error, since its model has other uses.
///
/// # Errors
/// Those of [`FileBytes::map`].
pub(super) fn open(
    folder: &Path,
    texts: &mut FolderTexts,
    weights: &mut Vec<(String, Safetensors)>,
    files: &mut Vec<FileBytes>,
) -> Result<(), Error> {
    for (name, _) in FILES {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let bytes = FileBytes::map(&path)?;
        match crate::formats::torch::parse(&bytes) {
            Ok(header) if header.tensors.iter().any(|tensor| tensor_name(name, &tensor.name).is_none()) => {
                texts.unread_head = Some(format!("{name}: tensors other than `weight` and `bias`"));
            }
            Ok(header) => {
                weights.push((name.to_owned(), header));
                files.push(bytes);
            }
            Err(error) => texts.unread_head = Some(format!("{name}: {error}")),
        }
    }
    Ok(())
}
