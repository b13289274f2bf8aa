//! Late interaction: a vector for each token of a text (ColBERT: Khattab & Zaharia 2020, arXiv:2004.12832).

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use super::batch::{OutputHead, Tokens};
use super::batcher::{Batcher, EncoderLimits, Item, Truncation};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::formats::BlockType;
use crate::kernels::{matmul_plain, max_sim};
use crate::load::{EncoderShape, FileName, LateInteraction, Loader, ModelFile, ModelHeader, WeightUploader};
use crate::model::{DenseConfig, DenseLayer, ModelConfig};
use crate::recording::{MemoryPlan, Recording, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tokenizer::Tokenizer;
use crate::tuning::{record_tested, while_testing};

/// Options for loading and running a [`MultiVectorEmbedder`].
#[derive(Default)]
pub struct MultiVectorOptions<'a> {
    /// As [`EmbedOptions::max_batch_tokens`](super::EmbedOptions::max_batch_tokens).
    pub max_batch_tokens: Option<u32>,
    /// As [`EmbedOptions::in_flight`](super::EmbedOptions::in_flight).
    pub in_flight: Option<usize>,
    /// Maximum bytes of weights and the largest batch together.
    pub memory_limit: Option<u64>,
    /// Called with the uploaded and the total bytes of weights.
    pub progress: Option<&'a mut dyn FnMut(u64, u64)>,
}

impl MultiVectorOptions<'_> {
    pub(super) fn limits(&self) -> EncoderLimits {
        let MultiVectorOptions { max_batch_tokens, in_flight, memory_limit, .. } = *self;
        EncoderLimits { max_tokens: None, max_batch_tokens, in_flight, memory_limit }
    }
}

/// Kind of a text, which late-interaction models read differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextKind {
    /// A text to search with.
    Query,
    /// A text to be found.
    Document,
}

/// A late-interaction model on a device: texts in, a vector of length 1 for each token out, for a
/// [`DocumentIndex`](crate::retrieval::index::DocumentIndex). Clones share the weights.
///
/// On one device, a text's vectors have the same bits in any batch, at any position.
#[derive(Clone)]
pub struct MultiVectorEmbedder {
    inner: Arc<LateEncoder>,
}

/// An encoder with a head for tokens.
pub(super) struct LateEncoder {
    pub batcher: Batcher,
    late: LateInteraction,
    /// What texts are made of, or why the tokenizer has no such tokens.
    tokens: Result<LateTokens, String>,
}

/// Ids of the tokens that a model adds to texts, or leaves out.
struct LateTokens {
    /// Of queries and of documents.
    markers: [Option<u32>; 2],
    mask: Option<u32>,
    skipped: HashSet<u32>,
}

impl LateTokens {
    fn new(late: &LateInteraction, tokenizer: &Tokenizer) -> Result<LateTokens, Error> {
        let lacks = |field: &str, found: &str| Error::Tokenizer {
            field: field.into(),
            expected: "a token of the vocabulary".into(),
            found: format!("`{}`", found.escape_debug()),
        };
        let marker = |field: &str, name: &str| match name {
            "" => Ok(None),
            name => tokenizer.token_id(name).map(Some).ok_or_else(|| lacks(field, name)),
        };
        let [query, document] = &late.markers;
        let mask = || ["[MASK]", "<mask>"].into_iter().find_map(|name| tokenizer.special_id(name));
        let mask = late.expands.then(|| mask().ok_or_else(|| lacks("mask_token", "none"))).transpose()?;
        let mut skipped = HashSet::new();
        for word in &late.skipped {
            // A word of several tokens is not one to leave out.
            if let [id] = tokenizer.encode(word, false)?[..] {
                skipped.insert(id);
            }
        }
        Ok(LateTokens {
            markers: [marker("query marker", query)?, marker("document marker", document)?],
            mask,
            skipped,
        })
    }
}

impl LateEncoder {
    /// Declares an encoder whose weights the feed will upload. Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model has no late interaction; otherwise as [`Batcher::declare`].
    pub fn declare(
        device: &Device,
        header: ModelHeader,
        limits: &EncoderLimits,
    ) -> Result<(LateEncoder, WeightUploader), Error> {
        let shape = header.shape.encoder()?;
        let (late, dense) = match (&shape.late, shape.token_heads.vectors) {
            (Some(late), _) => (late.clone(), shape.dense.clone()),
            (None, Some(head)) => (LateInteraction::plain(shape.max_tokens), vec![head]),
            (None, None) => return Err(token_head_missing(shape, "colbert_linear.pt")),
        };
        // A token that nobody sees must see one itself.
        let nearest = shape.config.blocks.iter().filter_map(|block| block.attention.window).min();
        if let Some(window) = nearest.filter(|&window| late.expands && !late.sees_masks && late.lengths[0] > window) {
            return Err(Error::Unsupported {
                format: "model",
                field: "query_length".into(),
                found: late.lengths[0].to_string(),
                supported: format!("up to {window}, so that mask tokens see a token within the attention window"),
            });
        }
        let tokens = match &header.tokenizer {
            Ok(tokenizer) => LateTokens::new(&late, tokenizer).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let (batcher, feed) = Batcher::declare(device, header, limits, |header| {
            let layer = |&config: &DenseConfig| DenseLayer::declare(&device.target(), config, &header.tensor_index);
            let layers = dense.iter().map(layer).collect::<Result<_, _>>()?;
            Ok(OutputHead::Tokens { normalize: true, layers })
        })?;
        let lengths = late.lengths.map(|length| length.min(batcher.max_tokens));
        Ok((LateEncoder { batcher, late: LateInteraction { lengths, ..late }, tokens }, feed))
    }

    fn tokens(&self) -> Result<&LateTokens, Error> {
        self.tokens.as_ref().map_err(|reason| Error::Tokenizer {
            field: "model".into(),
            expected: "a tokenizer with the model's markers".into(),
            found: format!("none: {reason}"),
        })
    }

    /// The tokens of a text, and their number before truncation.
    pub fn encode(&self, kind: TextKind, text: &str) -> Result<(Tokens, usize), Error> {
        let LateTokens { markers, mask, .. } = self.tokens()?;
        let (marker, length) = (markers[kind as usize], self.late.lengths[kind as usize]);
        let most = length - u32::from(marker.is_some());
        let truncation = Truncation { max_tokens: Some(most), ..Truncation::default() };
        let (mut tokens, n) = self.batcher.encode_truncated(text, truncation)?;
        if let Some(marker) = marker {
            tokens.ids.insert(tokens.ids.len().min(1), marker);
        }
        let n_seen = tokens.ids.len() as u32;
        if let Some(mask) = mask.filter(|_| kind == TextKind::Query) {
            tokens.ids.resize(length as usize, mask);
        }
        let len = tokens.ids.len() as u32;
        tokens = Tokens { first_len: len, seen_len: if self.late.sees_masks { len } else { n_seen }, ..tokens };
        self.batcher.check(&tokens)?;
        Ok((tokens, n + usize::from(marker.is_some())))
    }

    /// The vectors of each text's tokens, in order, without those of left-out tokens.
    pub async fn vectors<S: AsRef<str>>(
        &self,
        kind: TextKind,
        texts: &[S],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, Error> {
        let skipped = &self.tokens()?.skipped;
        let width = self.batcher.passes.width() as usize;
        // Which tokens are kept, known once a text is encoded.
        let kept = std::cell::RefCell::new(vec![Vec::new(); texts.len()]);
        let item = |i: usize| {
            let (tokens, _) = self.encode(kind, texts[i].as_ref())?;
            let keeps = |(at, id): (usize, &u32)| {
                let is_first = at == 0 && self.late.skips_first;
                !is_first && (kind == TextKind::Query || !skipped.contains(id))
            };
            kept.borrow_mut()[i] = tokens.ids.iter().enumerate().map(keeps).collect::<Vec<bool>>();
            Ok(Item::Tokens(tokens))
        };
        let mut vectors = vec![Vec::new(); texts.len()];
        let mut put = |i: usize, rows: &[f32]| {
            let kept = std::mem::take(&mut kept.borrow_mut()[i]);
            let rows = rows.chunks_exact(width).zip(kept).filter(|(_, kept)| *kept);
            vectors[i] = rows.flat_map(|(row, _)| row).copied().collect();
        };
        self.batcher.each(texts.len(), item, &mut put, progress).await?;
        Ok(vectors)
    }

    /// For each token of the query the highest similarity with any token of a document, summed up, for all documents:
    /// 0 for one without tokens.
    pub async fn scores(&self, query: &[f32], documents: &[Vec<f32>]) -> Result<Vec<f32>, Error> {
        /// Tokens of documents at a time.
        const MOST: usize = 1 << 14;
        let width = self.batcher.passes.width() as usize;
        let mut scores = Vec::with_capacity(documents.len());
        let mut rest = documents;
        while !rest.is_empty() {
            let ends = rest.iter().scan(0, |end, document| {
                *end += document.len() / width;
                Some(*end)
            });
            let n = ends.take_while(|&end| end <= MOST).count().max(1);
            let (some, others) = rest.split_at(n);
            scores.extend(self.scores_at_once(query, some).await?);
            rest = others;
        }
        Ok(scores)
    }

    async fn scores_at_once(&self, query: &[f32], documents: &[Vec<f32>]) -> Result<Vec<f32>, Error> {
        let device = &self.batcher.device;
        let width = self.batcher.passes.width();
        let mut spans = Vec::with_capacity(2 * documents.len());
        let mut n_cols = 0;
        for document in documents {
            let first = n_cols;
            n_cols += document.len() as u32 / width;
            spans.extend([first, n_cols]);
        }
        if n_cols == 0 {
            return Ok(vec![0.0; documents.len()]);
        }
        // A column for each token.
        let mut columns = vec![0.0; (width * n_cols) as usize];
        for (c, token) in documents.iter().flat_map(|document| document.chunks_exact(width as usize)).enumerate() {
            for (k, &x) in token.iter().enumerate() {
                columns[k * n_cols as usize + c] = x;
            }
        }
        let n_rows = query.len() as u32 / width;
        let n_documents = documents.len() as u32;
        let x = device.upload("query", &[n_rows, width], query)?;
        let columns = device.upload("documents", &[width, n_cols], &columns)?;
        let query_span = device.upload("query span", &[1, 2], &[0, n_rows])?;
        let spans = device.upload("document spans", &[n_documents, 2], &spans)?;
        let scores = Tensor::declare("scores", Role::Activations, &[1, n_documents], DType::F32)?;
        let record = || {
            let mut rec = device.recorder();
            let similarities = rec.temporary("similarities", &[n_rows, n_cols])?;
            matmul_plain(&mut rec, &x, &columns, &similarities)?;
            max_sim(&mut rec, &query_span, &spans, &similarities, 0, &scores)?;
            Ok(rec.finish(&mut Workspace::default()))
        };
        let recording = record_tested(device, record, |recording: &Recording| recording).await?;
        let words = device.run_and_read(&recording, &scores)?.await?;
        // The buffer may be longer.
        Ok(bytemuck::cast_slice::<u32, f32>(&words).iter().copied().take(documents.len()).collect())
    }
}

/// The error for a model with one vector for each text, whose folder lacks a file of a head for tokens.
pub(super) fn token_head_missing(shape: &EncoderShape, file: &str) -> Error {
    let reason = shape.token_heads.unread.as_ref().map_or(String::new(), |reason| format!("; {reason}"));
    Error::Unsupported {
        format: "model",
        field: "modules".into(),
        found: format!("`{}`, an encoder with one vector for each text{reason}", shape.config.architecture),
        supported: format!("dense layers without pooling (ColBERT), or BGE-M3 with {file}"),
    }
}

impl MultiVectorEmbedder {
    /// Loads a Hugging Face folder of a ColBERT model, in Stanford's or PyLate's format, or of BGE-M3 with its
    /// `colbert_linear.pt`, see [`ModelFile::open`].
    ///
    /// # Errors
    /// Those of [`ModelFile::open`] and [`MultiVectorEmbedder::from_file`].
    pub fn load(
        device: &Device,
        path: impl AsRef<Path>,
        options: MultiVectorOptions<'_>,
    ) -> Result<MultiVectorEmbedder, Error> {
        let path = path.as_ref();
        MultiVectorEmbedder::from_file(device, ModelFile::open(path)?, options).map_err(|e| e.in_model_file(path))
    }

    /// Loads a model from an opened file.
    ///
    /// # Errors
    /// As [`Embedder::from_file`](super::Embedder::from_file); also [`Error::Unsupported`] for a model with one vector for each
    /// text.
    pub fn from_file(
        device: &Device,
        file: ModelFile,
        options: MultiVectorOptions<'_>,
    ) -> Result<MultiVectorEmbedder, Error> {
        let ModelFile { header, files } = file;
        let (embedder, mut feed) = MultiVectorEmbedder::declare(device, header, &options.limits())?;
        let batcher = &embedder.inner.batcher;
        while_testing(batcher.test(), || feed.take_all(device, &files, options.progress))?;
        batcher.complete()?;
        Ok(embedder)
    }

    /// A loader for these files. It ignores `options.progress`: use [`Loader::progress`].
    ///
    /// # Errors
    /// [`Error::Config`] if there are no files.
    pub fn loader(
        device: &Device,
        files: Vec<FileName>,
        options: MultiVectorOptions<'_>,
    ) -> Result<Loader<MultiVectorEmbedder>, Error> {
        let limits = options.limits();
        Loader::new(device, files, move |device, header, _| MultiVectorEmbedder::declare(device, header, &limits))
    }

    fn declare(
        device: &Device,
        header: ModelHeader,
        limits: &EncoderLimits,
    ) -> Result<(MultiVectorEmbedder, WeightUploader), Error> {
        let (encoder, feed) = LateEncoder::declare(device, header, limits)?;
        Ok((MultiVectorEmbedder { inner: Arc::new(encoder) }, feed))
    }

    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        &self.inner.batcher.device
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.inner.batcher.name
    }

    /// The encoder's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.inner.batcher.config()
    }

    /// Block types of the file's weights, the one with most bytes first.
    pub fn block_types(&self) -> &[BlockType] {
        &self.inner.batcher.block_types
    }

    /// Elements in a token's vector.
    pub fn dims(&self) -> u32 {
        self.inner.batcher.passes.width()
    }

    /// How the model reads texts.
    pub fn late_interaction(&self) -> &LateInteraction {
        &self.inner.late
    }

    /// Memory of the weights and a full batch.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if a batch is too large for the device.
    pub fn plan(&self) -> Result<MemoryPlan, Error> {
        self.inner.batcher.plan()
    }

    /// Encodes a text with the model's markers, truncated, and a query filled up with mask tokens if the model does so.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the text cannot be encoded, or the vocabulary lacks the markers.
    pub fn encode(&self, kind: TextKind, text: &str) -> Result<Tokens, Error> {
        Ok(self.inner.encode(kind, text)?.0)
    }

    /// The vectors of each text's tokens, `[T, dims]`, in order. Documents lack those of punctuation if the model
    /// leaves it out.
    ///
    /// # Errors
    /// [`Error::InRecord`] with the index of a text that cannot be encoded or has a non-finite vector; errors of
    /// [`Device::run`].
    pub async fn embed<S: AsRef<str>>(&self, kind: TextKind, texts: &[S]) -> Result<Vec<Vec<f32>>, Error> {
        self.inner.vectors(kind, texts, &mut |_| ()).await
    }

    /// How well documents' tokens answer those of a query, in the documents' order: for each token of the query the
    /// highest dot product with any token of the document, summed up; 0 for a document without tokens.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the vectors are too many for the device; errors of [`Device::run`].
    pub async fn scores(&self, query: &[f32], documents: &[Vec<f32>]) -> Result<Vec<f32>, Error> {
        self.inner.scores(query, documents).await
    }
}

impl Loader<MultiVectorEmbedder> {
    /// The model, after all wanted bytes were pushed.
    ///
    /// # Errors
    /// [`Error::Config`] if bytes are missing; errors of the device.
    pub async fn finish(self) -> Result<MultiVectorEmbedder, Error> {
        let (embedder, device) = self.loaded()?;
        embedder.inner.batcher.complete()?;
        device.drained().await?;
        Ok(embedder)
    }
}
