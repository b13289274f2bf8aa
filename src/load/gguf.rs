//! GGUF files.

use super::architectures::{Architecture, MTP_LAYERS, refused};
use super::keys::{KeySource, Keys};
use super::tensor_index::{FileLayout, TensorIndex, check_type, floats};
use super::unread::MTP;
use super::{ChatSource, ModelHeader, ModelShape, gguf_encoder, llm_reranker, vocab_from_gguf};
use crate::error::Error;
use crate::formats::TensorInfo;
use crate::formats::gguf::{Gguf, Metadata};
use crate::tokenizer::Tokenizer;

/// Names of the RoPE frequency factors: for all sequences, short ones and long ones.
pub(super) const FACTORS: [&str; 3] = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

/// Data of configuration tensors by name.
pub(super) type ConfigData = Vec<(String, Vec<u8>)>;

/// Number of shards of a file's model.
pub(super) fn n_shards(gguf: &Gguf) -> Result<usize, Error> {
    Ok(gguf.metadata.get_u32("split.count")?.unwrap_or(1).max(1) as usize)
}

/// Configuration tensors and the numbers of their files.
pub(super) fn config_tensors(shards: &[Gguf]) -> impl Iterator<Item = (usize, &TensorInfo)> {
    /// Far above the size of one factor per pair; larger tensors fail the shape check.
    const MAX_BYTES: u64 = 1 << 16;
    let find = |name| shards.iter().enumerate().find_map(move |(file, gguf)| Some((file, gguf.tensor(name)?)));
    FACTORS.into_iter().filter_map(find).filter(|(_, tensor)| tensor.size_bytes <= MAX_BYTES)
}

/// The model's header from the headers of a GGUF file or all its shards. `config_data` is the data of
/// [`config_tensors`].
pub(super) fn header(name: &str, shards: Vec<Gguf>, config_data: &ConfigData) -> Result<ModelHeader, Error> {
    let Some(first) = shards.first() else { return Err(missing("split.count")) };
    let (architecture, name_of_it) = architecture(&first.metadata)?;
    let mut tensor_index = TensorIndex::default();
    let wrong = |field: &str, expected: String, found: String| Error::Config { field: field.into(), expected, found };
    for (file, gguf) in shards.iter().enumerate() {
        let count = n_shards(gguf)?;
        if count != shards.len() {
            let found = format!("{} of {count}", shards.len());
            return Err(wrong("split.count", format!("all {count} shards in order"), found));
        }
        let no = gguf.metadata.get_u32("split.no")?.unwrap_or(0) as usize;
        if no != file {
            return Err(wrong("split.no", format!("{file}"), format!("{no}")));
        }
        for tensor in &gguf.tensors {
            check_type("gguf", tensor)?;
            let name = architecture.usual_name(&tensor.name);
            if tensor_index.find(&name).is_some() {
                let name = tensor.name.escape_debug().to_string();
                return Err(wrong(&name, "a unique tensor".into(), "a duplicate".into()));
            }
            tensor_index.insert(name, file, tensor.clone(), FileLayout::AsRead);
        }
    }
    let metadata = &first.metadata;
    let shape = shape(metadata, (architecture, name_of_it), &tensor_index, config_data)?;
    tensor_index.set_layouts(|name| (architecture.gguf_stored)(name, shape.config()));
    if shape.scoring().is_ok_and(|scoring| scoring.head.answers) {
        let key = format!("{name_of_it}.{}", gguf_encoder::LABELS.0);
        llm_reranker::add_gguf_rows(&mut tensor_index, metadata.get_str_array(&key)?, key)?;
    }
    let mut unread = Vec::new();
    let mtp = metadata.get_u32(&format!("{name_of_it}.{}", MTP_LAYERS.0))?;
    // Without this key, `block_count` does not include an MTP layer.
    let block = mtp.and_then(|n| architecture.take_mtp_block(shape.config(), &mut tensor_index, Some(n), &mut unread));
    if block.is_none() && mtp.is_some_and(|n| n > 0) && tensor_index.drop_layers(shape.config().n_layers()) {
        unread.push(MTP);
    }
    let vocab_size = shape.config().vocab_size;
    let tokenizer = vocab_from_gguf(metadata).and_then(Tokenizer::from_vocab);
    if let Ok(tokenizer) = &tokenizer
        && tokenizer.vocab_size() > vocab_size as usize
    {
        return Err(Error::Config {
            field: "tokenizer.ggml.tokens".into(),
            expected: format!("at most the {vocab_size} rows of token_embd.weight"),
            found: tokenizer.vocab_size().to_string(),
        });
    }
    let chat = ChatSource::of_gguf(metadata, tokenizer.as_ref().ok())?;
    let name = metadata.get_str("general.name")?.unwrap_or(name).to_owned();
    Ok(ModelHeader { name, shape, tokenizer, chat, tensor_index, mtp: block, unread })
}

/// A file's architecture, with its name there.
fn architecture(metadata: &Metadata) -> Result<(&'static Architecture, &str), Error> {
    let name = metadata.get_str("general.architecture")?.unwrap_or("missing");
    let found = Architecture::of_gguf(name).ok_or_else(|| refused("gguf", "general.architecture", name))?;
    Ok((found, name))
}

/// The shape that the keys describe.
fn shape(
    metadata: &Metadata,
    (architecture, name): (&Architecture, &str),
    tensor_index: &TensorIndex,
    config_data: &ConfigData,
) -> Result<ModelShape, Error> {
    let keys =
        Keys::new(KeySource::Gguf(metadata, tensor_index, config_data), name, gguf_encoder::embeds(name, metadata)?);
    let config = architecture.config(&keys)?;
    let shape = match config.has_head {
        true => ModelShape::Decoder(config),
        false => ModelShape::Encoder(gguf_encoder::shape(config, &keys, metadata)?),
    };
    keys.check_read()?;
    Ok(shape)
}

/// The RoPE frequency factors of this name, one for each of `n` pairs, if the file has them.
pub(super) fn factors(
    tensor_index: &TensorIndex,
    config_data: &ConfigData,
    name: &str,
    n: u32,
) -> Result<Option<Vec<f32>>, Error> {
    let Some((_, tensor)) = tensor_index.find(name) else { return Ok(None) };
    let refused = |expected: String, found: String| Error::Config { field: name.into(), expected, found };
    // Checked before reading, so that an oversized tensor is not read.
    let expected = [u64::from(n)];
    if tensor.shape != expected {
        return Err(refused(format!("shape {expected:?}"), format!("of shape {:?}", tensor.shape)));
    }
    let data = config_data.iter().find(|(of, _)| of == name).ok_or_else(|| missing(name))?;
    floats(tensor, &data.1).map(Some)
}

pub(super) fn missing(field: &str) -> Error {
    Error::Config { field: field.into(), expected: "a value".into(), found: "missing".into() }
}
