//! A cross-encoder on a device: scores how well a document answers a query.

use std::path::Path;
use std::sync::Arc;

use super::batch::{OutputHead, Tokens};
use super::batcher::{Batcher, EncoderLimits, Item};
use super::late::{LateEncoder, TextKind};
use crate::device::Device;
use crate::error::Error;
use crate::formats::BlockType;
use crate::load::{FileName, Loader, ModelFile, ModelHeader, WeightUploader};
use crate::model::{ModelConfig, ScoreHead};
use crate::recording::MemoryPlan;
use crate::tokenizer::EncodingCache;
use crate::tuning::while_testing;

/// Options for loading and running a cross-encoder.
#[derive(Default)]
pub struct RerankOptions<'a> {
    /// Maximum tokens per pair including special tokens; the longer text is truncated first. Default: the model's
    /// maximum sequence length.
    pub max_tokens: Option<u32>,
    /// Whether a score is the sigmoid of the model's logit, 0 to 1, instead of the logit. Default: as the model's
    /// files specify, else the sigmoid, as in sentence-transformers.
    pub sigmoid: Option<bool>,
    /// As [`EmbedOptions::max_batch_tokens`](super::EmbedOptions::max_batch_tokens).
    pub max_batch_tokens: Option<u32>,
    /// As [`EmbedOptions::in_flight`](super::EmbedOptions::in_flight).
    pub in_flight: Option<usize>,
    /// Maximum bytes of weights and the largest batch together.
    pub memory_limit: Option<u64>,
    /// Called with the uploaded and the total bytes of weights.
    pub progress: Option<&'a mut dyn FnMut(u64, u64)>,
}

/// A document's score.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Ranked {
    /// The document's index in the input.
    pub index: usize,
    /// Higher scores answer the query better.
    pub score: f32,
}

/// A cross-encoder on a device, which reads a query and a document together, or a late-interaction model, whose score
/// is the sum of the best similarity for each token of the query. Clones share the weights.
///
/// On one device, a pair's score has the same bits in any batch, at any position.
#[derive(Clone)]
pub struct Reranker {
    inner: Arc<RerankerInner>,
    /// The instruction in the prompt, if it has one.
    instruction: Option<Arc<str>>,
}

struct RerankerInner {
    encoder: PairEncoder,
    sigmoid: bool,
    /// The default instruction, if the model's prompt has one.
    instruction: Option<Arc<str>>,
}

/// What reads queries and documents.
enum PairEncoder {
    /// A cross-encoder, or a language model: both together.
    Joint(Batcher),
    /// A late-interaction model: each by itself.
    Late(LateEncoder),
}

impl PairEncoder {
    fn batcher(&self) -> &Batcher {
        match self {
            PairEncoder::Joint(batcher) => batcher,
            PairEncoder::Late(encoder) => &encoder.batcher,
        }
    }

    /// The encoder of pairs.
    fn joint(&self) -> Result<&Batcher, Error> {
        match self {
            PairEncoder::Joint(batcher) => Ok(batcher),
            PairEncoder::Late(_) => Err(Error::Unsupported {
                format: "model",
                field: "modules".into(),
                found: "late interaction, which reads a query and a document by themselves".into(),
                supported: "tokens of pairs in cross-encoders; MultiVectorEmbedder has those of a text".into(),
            }),
        }
    }
}

impl Reranker {
    /// Loads a Hugging Face folder of a `BertForSequenceClassification` (or its RoBERTa, XLM-RoBERTa or ModernBERT
    /// counterpart) with one label, of Qwen3-Reranker, or of a ColBERT model, or a GGUF file with its whole head, see
    /// [`ModelFile::open`].
    ///
    /// # Errors
    /// Those of [`ModelFile::open`] and [`Reranker::from_file`].
    pub fn load(device: &Device, path: impl AsRef<Path>, options: RerankOptions<'_>) -> Result<Reranker, Error> {
        let path = path.as_ref();
        Reranker::from_file(device, ModelFile::open(path)?, options).map_err(|e| e.in_model_file(path))
    }

    /// Loads a cross-encoder from an opened file.
    ///
    /// # Errors
    /// As [`Embedder::from_file`](super::Embedder::from_file); also [`Error::Unsupported`] for a model with several
    /// labels or with another function applied to its logit.
    pub fn from_file(device: &Device, file: ModelFile, options: RerankOptions<'_>) -> Result<Reranker, Error> {
        let ModelFile { header, files } = file;
        let RerankOptions { progress, .. } = options;
        let (reranker, mut feed) = Reranker::declare(device, header, RerankOptions { progress: None, ..options })?;
        let batcher = reranker.batcher();
        while_testing(batcher.test(), || feed.take_all(device, &files, progress))?;
        batcher.complete()?;
        Ok(reranker)
    }

    /// A loader for these files. It ignores `options.progress`: use [`Loader::progress`].
    ///
    /// # Errors
    /// [`Error::Config`] if there are no files.
    pub fn loader(
        device: &Device,
        files: Vec<FileName>,
        options: RerankOptions<'_>,
    ) -> Result<Loader<Reranker>, Error> {
        Loader::new(device, files, move |device, header, _| {
            Reranker::declare(device, header, RerankOptions { progress: None, ..options })
        })
    }

    /// Memory needed for a file's weights and a full batch. Allocates nothing.
    ///
    /// # Errors
    /// Those of [`Reranker::from_file`], except errors in the weights' data.
    pub fn plan_file(device: &Device, file: ModelFile) -> Result<MemoryPlan, Error> {
        Reranker::declare(device, file.header, RerankOptions::default())?.0.plan()
    }

    /// Declares a cross-encoder whose weights the feed will upload. Allocates nothing.
    fn declare(
        device: &Device,
        header: ModelHeader,
        options: RerankOptions<'_>,
    ) -> Result<(Reranker, WeightUploader), Error> {
        let RerankOptions { max_tokens, max_batch_tokens, in_flight, memory_limit, .. } = options;
        let limits = EncoderLimits { max_tokens, max_batch_tokens, in_flight, memory_limit };
        if header.shape.encoder().is_ok_and(|shape| shape.late.is_some()) {
            let (encoder, feed) = LateEncoder::declare(device, header, &limits)?;
            let (encoder, sigmoid) = (PairEncoder::Late(encoder), options.sigmoid.unwrap_or(false));
            let inner = Arc::new(RerankerInner { encoder, sigmoid, instruction: None });
            return Ok((Reranker { inner, instruction: None }, feed));
        }
        let scoring = header.shape.scoring()?.clone();
        let sigmoid = scoring.sigmoid()?;
        let (batcher, feed) = Batcher::declare(device, header, &limits, |header| {
            let config = &header.shape.encoder()?.config;
            Ok(OutputHead::Score(Box::new(ScoreHead::declare(
                &device.target(),
                config,
                scoring.head,
                &header.tensor_index,
            )?)))
        })?;
        let sigmoid = options.sigmoid.unwrap_or(sigmoid);
        let instruction: Option<Arc<str>> = scoring.prompt.and_then(|prompt| prompt.instruction).map(Arc::from);
        let encoder = PairEncoder::Joint(batcher);
        let inner = Arc::new(RerankerInner { encoder, sigmoid, instruction: instruction.clone() });
        Ok((Reranker { inner, instruction }, feed))
    }

    fn batcher(&self) -> &Batcher {
        self.inner.encoder.batcher()
    }

    /// The instruction in the prompt of a language model, such as Qwen3-Reranker; `None` for other models.
    pub fn instruction(&self) -> Option<&str> {
        self.instruction.as_deref()
    }

    /// The same model with another instruction, which says what a document must do for the query; `None` for the
    /// model's default.
    ///
    /// # Errors
    /// [`Error::Option`] if the model takes no instruction.
    pub fn with_instruction(&self, instruction: Option<&str>) -> Result<Reranker, Error> {
        let default = &self.inner.instruction;
        if let (Some(found), None) = (instruction, default) {
            let expected = "none: the model takes no instruction".into();
            return Err(Error::Option { option: "instruction", expected, found: found.into() });
        }
        let instruction = instruction.map(Arc::from).or_else(|| default.clone());
        Ok(Reranker { inner: self.inner.clone(), instruction })
    }

    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        &self.batcher().device
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.batcher().name
    }

    /// The encoder's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.batcher().config()
    }

    /// Maximum tokens per pair including special tokens; longer pairs are truncated.
    pub fn max_tokens(&self) -> u32 {
        self.batcher().max_tokens
    }

    /// Maximum tokens per batch.
    pub fn max_batch_tokens(&self) -> u32 {
        self.batcher().max_batch_tokens
    }

    /// Block types of the file's weights, the one with most bytes first.
    pub fn block_types(&self) -> &[BlockType] {
        &self.batcher().block_types
    }

    /// Whether scores are sigmoids of logits.
    pub fn has_sigmoid(&self) -> bool {
        self.inner.sigmoid
    }

    /// Memory of the weights and a full batch.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if a batch is too large for the device.
    pub fn plan(&self) -> Result<MemoryPlan, Error> {
        self.batcher().plan()
    }

    /// Dispatches of a batch of `n_pairs` pairs with `n_tokens` tokens in total.
    ///
    /// # Errors
    /// As [`Reranker::plan`].
    pub fn n_dispatches(&self, n_tokens: u32, n_pairs: u32) -> Result<usize, Error> {
        self.batcher().n_dispatches(n_tokens, n_pairs)
    }

    /// Encodes a pair with its special tokens, truncated to [`Reranker::max_tokens`].
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if a text cannot be encoded; [`Error::Unsupported`] if the model reads texts by themselves.
    pub fn encode(&self, query: &str, document: &str) -> Result<Tokens, Error> {
        self.inner.encoder.joint()?.encode_pair([query, document], self.instruction())
    }

    /// Number of tokens of a pair before truncation, together if it is two texts.
    ///
    /// # Errors
    /// As [`Reranker::encode`].
    pub fn pair_len(&self, query: &str, document: &str) -> Result<usize, Error> {
        match &self.inner.encoder {
            PairEncoder::Joint(batcher) => batcher.pair_len([query, document], self.instruction()),
            PairEncoder::Late(encoder) => {
                Ok(encoder.encode(TextKind::Query, query)?.1 + encoder.encode(TextKind::Document, document)?.1)
            }
        }
    }

    /// The tokenizer with its cache.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the model has no usable tokenizer.
    pub fn encodings(&self) -> Result<&EncodingCache, Error> {
        self.batcher().encodings()
    }

    /// The logits of documents for a query, in the documents' order: scores before any sigmoid.
    ///
    /// # Errors
    /// As [`Reranker::score_pairs`].
    pub async fn logits<S: AsRef<str>>(&self, query: &str, documents: &[S]) -> Result<Vec<f32>, Error> {
        self.pair_logits(&pairs(query, documents), &mut |_| ()).await
    }

    /// The scores of documents for a query, in the documents' order.
    ///
    /// # Errors
    /// As [`Reranker::score_pairs`].
    pub async fn score<S: AsRef<str>>(&self, query: &str, documents: &[S]) -> Result<Vec<f32>, Error> {
        self.score_pairs(&pairs(query, documents)).await
    }

    /// The documents by descending score; ties keep the input's order.
    ///
    /// # Errors
    /// As [`Reranker::score_pairs`].
    pub async fn rank<S: AsRef<str>>(&self, query: &str, documents: &[S]) -> Result<Vec<Ranked>, Error> {
        self.rank_with(query, documents, &mut |_| ()).await
    }

    /// As [`Reranker::rank`]. Calls `progress` repeatedly with the number of finished documents. If the future is
    /// dropped, work stops after the batches in flight.
    ///
    /// # Errors
    /// As [`Reranker::score_pairs`].
    pub async fn rank_with<S: AsRef<str>>(
        &self,
        query: &str,
        documents: &[S],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<Ranked>, Error> {
        let scores = self.scores(&pairs(query, documents), progress).await?;
        let mut ranked: Vec<Ranked> =
            scores.into_iter().enumerate().map(|(index, score)| Ranked { index, score }).collect();
        crate::sort::by(&mut ranked, |a, b| b.score.total_cmp(&a.score));
        Ok(ranked)
    }

    /// The scores of pairs, in their order.
    ///
    /// # Errors
    /// [`Error::InRecord`] with the index of a pair that cannot be encoded or has a non-finite score; errors of
    /// [`Device::run`].
    pub async fn score_pairs<A: AsRef<str>, B: AsRef<str>>(&self, pairs: &[(A, B)]) -> Result<Vec<f32>, Error> {
        self.scores(pairs, &mut |_| ()).await
    }

    async fn scores<A: AsRef<str>, B: AsRef<str>>(
        &self,
        pairs: &[(A, B)],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>, Error> {
        let logits = self.pair_logits(pairs, progress).await?;
        Ok(logits.into_iter().map(|logit| self.score_of(logit)).collect())
    }

    async fn pair_logits<A: AsRef<str>, B: AsRef<str>>(
        &self,
        pairs: &[(A, B)],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>, Error> {
        if let PairEncoder::Late(encoder) = &self.inner.encoder {
            return late_scores(encoder, pairs, progress).await;
        }
        let item = |i: usize| {
            let (a, b) = &pairs[i];
            self.encode(a.as_ref(), b.as_ref()).map(Item::Tokens)
        };
        self.logits_of(pairs.len(), item, progress).await
    }

    /// The logits of encoded pairs, in their order.
    ///
    /// # Errors
    /// [`Error::InRecord`] with the index of a pair that has no tokens, too many or unknown ones; otherwise as
    /// [`Reranker::score_pairs`].
    pub async fn token_logits(&self, pairs: &[Tokens]) -> Result<Vec<f32>, Error> {
        let batcher = self.inner.encoder.joint()?;
        let item = |i: usize| batcher.check(&pairs[i]).map(|()| Item::Tokens(pairs[i].clone()));
        self.logits_of(pairs.len(), item, &mut |_| ()).await
    }

    async fn logits_of(
        &self,
        n: usize,
        item: impl FnMut(usize) -> Result<Item, Error>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>, Error> {
        let batcher = self.inner.encoder.joint()?;
        let rows = batcher.rows(n, item, progress).await?;
        let logit = |row: &[f32]| match *row {
            // The softmax of two logits is the sigmoid of their difference.
            [no, yes] => yes - no,
            _ => row.iter().sum(),
        };
        Ok(rows.chunks_exact(batcher.passes.width() as usize).map(logit).collect())
    }

    fn score_of(&self, logit: f32) -> f32 {
        if self.inner.sigmoid { 1.0 / (1.0 + (-logit).exp()) } else { logit }
    }
}

/// The scores of pairs by late interaction. Neighbours with one query are scored together.
async fn late_scores<A: AsRef<str>, B: AsRef<str>>(
    encoder: &LateEncoder,
    pairs: &[(A, B)],
    progress: &mut dyn FnMut(usize),
) -> Result<Vec<f32>, Error> {
    let mut scores = Vec::with_capacity(pairs.len());
    for of_query in pairs.chunk_by(|(a, _), (b, _)| a.as_ref() == b.as_ref()) {
        let before = scores.len();
        let at = |error: Error| match error {
            Error::InRecord { record, source } => source.in_record(before + record),
            other => other,
        };
        let Some((query, _)) = of_query.first() else { continue };
        let query = encoder.vectors(TextKind::Query, &[query.as_ref()], &mut |_| ()).await.map_err(at)?.concat();
        let documents: Vec<&str> = of_query.iter().map(|(_, document)| document.as_ref()).collect();
        let documents = encoder.vectors(TextKind::Document, &documents, &mut |done| progress(before + done)).await;
        scores.extend(encoder.scores(&query, &documents.map_err(at)?).await?);
    }
    Ok(scores)
}

/// Pairs the query with each document.
fn pairs<'a, S: AsRef<str>>(query: &'a str, documents: &'a [S]) -> Vec<(&'a str, &'a str)> {
    documents.iter().map(|document| (query, document.as_ref())).collect()
}

impl Loader<Reranker> {
    /// The cross-encoder, after all wanted bytes were pushed.
    ///
    /// # Errors
    /// [`Error::Config`] if bytes are missing; errors of the device.
    pub async fn finish(self) -> Result<Reranker, Error> {
        let (reranker, device) = self.loaded()?;
        reranker.batcher().complete()?;
        device.drained().await?;
        Ok(reranker)
    }
}
