//! Weights of tokens, for lexical search: BGE-M3 (Chen et al. 2024, arXiv:2402.03216).

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use super::batch::OutputHead;
use super::batcher::{Batcher, Item};
use super::late::{MultiVectorOptions, token_head_missing};
use crate::device::Device;
use crate::error::Error;
use crate::load::{ModelFile, ModelHeader, WeightUploader};
use crate::model::DenseLayer;
use crate::tuning::while_testing;

/// A token of a text, and how much it says about it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenWeight {
    /// The token's id.
    pub id: u32,
    /// Above 0. The similarity of two texts is the sum of products of the weights of tokens that both have.
    pub weight: f32,
}

/// An encoder on a device that weighs the tokens of a text. Clones share the weights.
#[derive(Clone)]
pub struct SparseEmbedder {
    inner: Arc<SparseInner>,
}

struct SparseInner {
    batcher: Batcher,
    /// Special tokens, which have no weight.
    special: HashSet<u32>,
}

impl SparseEmbedder {
    /// Loads a Hugging Face folder of BGE-M3 with its `sparse_linear.pt`, see [`ModelFile::open`].
    ///
    /// # Errors
    /// Those of [`ModelFile::open`] and [`SparseEmbedder::from_file`].
    pub fn load(
        device: &Device,
        path: impl AsRef<Path>,
        options: MultiVectorOptions<'_>,
    ) -> Result<SparseEmbedder, Error> {
        let path = path.as_ref();
        SparseEmbedder::from_file(device, ModelFile::open(path)?, options).map_err(|e| e.in_model_file(path))
    }

    /// Loads a model from an opened file.
    ///
    /// # Errors
    /// As [`Embedder::from_file`](super::Embedder::from_file); also [`Error::Unsupported`] for a model that does not weigh tokens.
    pub fn from_file(
        device: &Device,
        file: ModelFile,
        options: MultiVectorOptions<'_>,
    ) -> Result<SparseEmbedder, Error> {
        let ModelFile { header, files } = file;
        let (embedder, mut feed) = SparseEmbedder::declare(device, header, &options)?;
        let batcher = &embedder.inner.batcher;
        while_testing(batcher.test(), || feed.take_all(device, &files, options.progress))?;
        batcher.complete()?;
        Ok(embedder)
    }

    fn declare(
        device: &Device,
        header: ModelHeader,
        options: &MultiVectorOptions<'_>,
    ) -> Result<(SparseEmbedder, WeightUploader), Error> {
        let shape = header.shape.encoder()?;
        let head = shape.token_heads.weights.ok_or_else(|| token_head_missing(shape, "sparse_linear.pt"))?;
        let special = header.tokenizer.as_ref().map(|tokenizer| tokenizer.special_tokens().map(|(_, id)| id).collect());
        let special = special.unwrap_or_default();
        let (batcher, feed) = Batcher::declare(device, header, &options.limits(), |header| {
            let layers = vec![DenseLayer::declare(&device.target(), head, &header.tensor_index)?];
            Ok(OutputHead::Tokens { normalize: false, layers })
        })?;
        Ok((SparseEmbedder { inner: Arc::new(SparseInner { batcher, special }) }, feed))
    }

    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        &self.inner.batcher.device
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.inner.batcher.name
    }

    /// The weighty tokens of each text by id: of a token that occurs several times the highest weight, and none of
    /// special ones.
    ///
    /// # Errors
    /// [`Error::InRecord`] with the index of a text that cannot be encoded or has a non-finite weight; errors of
    /// [`Device::run`].
    pub async fn embed<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<Vec<TokenWeight>>, Error> {
        let SparseInner { batcher, special } = &*self.inner;
        let ids = RefCell::new(vec![Vec::new(); texts.len()]);
        let item = |i: usize| {
            let tokens = batcher.encode(texts[i].as_ref())?;
            ids.borrow_mut()[i] = tokens.ids.clone();
            Ok(Item::Tokens(tokens))
        };
        let mut all = vec![Vec::new(); texts.len()];
        let mut put = |i: usize, weights: &[f32]| {
            let mut highest = BTreeMap::new();
            for (id, &weight) in ids.borrow()[i].iter().zip(weights).filter(|(id, _)| !special.contains(id)) {
                let known = highest.entry(*id).or_insert(0.0);
                *known = weight.max(*known);
            }
            let weights = highest.into_iter().filter(|(_, weight)| *weight > 0.0);
            all[i] = weights.map(|(id, weight)| TokenWeight { id, weight }).collect();
        };
        batcher.each(texts.len(), item, &mut put, &mut |_| ()).await?;
        Ok(all)
    }
}
