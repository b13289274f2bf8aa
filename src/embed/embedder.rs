//! A text encoder on a device.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
#[cfg(not(target_arch = "wasm32"))]
use std::path::Path;
use std::sync::Arc;

use super::VectorCache;
use super::batch::{Head, Passes, Tokens, batches, size_for};
use crate::device::{Device, Pending, pause};
use crate::error::Error;
use crate::formats::BlockType;
use crate::kernels::Pooling;
use crate::load::{EncoderShape, Feed, FileName, Loader, ModelFile, ModelHeader, Widened};
use crate::model::{Encoder, EncoderConfig, EncoderWeights};
use crate::recording::MemoryPlan;
use crate::tokenizer::{EncodeOptions, EncodingCache, Tokenizer};

/// Texts whose encodings are remembered.
const ENCODING_CACHE: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// How to load an encoder, and how it is used.
#[derive(Default)]
pub struct EmbedOptions<'a> {
    /// Tokens to which a text is cut, those around it included. What the model's files say if `None`.
    pub max_tokens: Option<u32>,
    /// How a vector is made from its tokens' vectors. What the model's files say if `None`.
    pub pooling: Option<Pooling>,
    /// Whether vectors are divided by their Euclidean norm. What the model's files say if `None`.
    pub normalize: Option<bool>,
    /// Tokens of a batch. 8192 on a GPU, 1024 on the CPU and on software adapters if `None`; a longer text is a batch by
    /// itself.
    pub max_batch_tokens: Option<u32>,
    /// Batches that are submitted before the first of them is waited for, 1 to 8. 2 if `None`: one computes while
    /// the host makes the next.
    pub in_flight: Option<usize>,
    /// Vectors that are remembered by their texts; none if 0.
    pub cached_vectors: usize,
    /// Bytes that weights and the largest batch may take together.
    pub memory_limit: Option<u64>,
    /// Told bytes of weights that were read and uploaded, and their sum.
    pub progress: Option<&'a mut dyn FnMut(u64, u64)>,
}

/// An encoder whose weights are on a device. Cloning shares them.
///
/// A text's vector is the same to the last bit in any batch, at any place in it, on one device.
#[derive(Clone)]
pub struct Embedder(Arc<Inner>);

struct Inner {
    device: Device,
    name: String,
    passes: Passes,
    reader: Result<Reader, String>,
    block_types: Vec<BlockType>,
    max_tokens: u32,
    max_batch_tokens: u32,
    in_flight: usize,
    vectors: Option<VectorCache>,
}

/// From a text to tokens.
struct Reader {
    encodings: EncodingCache,
    /// Tokens around a text.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
}

impl Embedder {
    /// Loads a Hugging Face folder or a GGUF file, see [`ModelFile::open`].
    ///
    /// # Errors
    /// Those of [`ModelFile::open`] and [`Embedder::from_file`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn load(device: &Device, path: impl AsRef<Path>, options: EmbedOptions<'_>) -> Result<Embedder, Error> {
        let path = path.as_ref();
        Embedder::from_file(device, ModelFile::open(path)?, options).map_err(|e| e.in_model_file(path))
    }

    /// Puts an encoder on a device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model is none; [`Error::Memory`] if it exceeds the limit, with nothing allocated;
    /// [`Error::Option`] for an option out of range; [`Error::Config`] if a weight is missing; errors of
    /// [`Device::write`].
    pub fn from_file(device: &Device, file: ModelFile, options: EmbedOptions<'_>) -> Result<Embedder, Error> {
        let ModelFile { header, files } = file;
        let EmbedOptions { progress, .. } = options;
        let (embedder, feed) = Embedder::declare(device, header, EmbedOptions { progress: None, ..options })?;
        feed.take_all(device, &files, progress)?;
        embedder.complete()
    }

    /// The encoder, once the feed wants nothing more.
    fn complete(self) -> Result<Embedder, Error> {
        let Encoder { config, weights } = self.0.passes.encoder();
        weights.upload_rope(self.device(), config)?;
        Ok(self)
    }

    /// A loader of these files. `options.progress` is not called: [`Loader::progress`] tells.
    ///
    /// # Errors
    /// [`Error::Config`] if there are no files.
    pub fn loader(device: &Device, files: Vec<FileName>, options: EmbedOptions<'_>) -> Result<Loader<Embedder>, Error> {
        Loader::new(device, files, move |device, header| {
            Embedder::declare(device, header, EmbedOptions { progress: None, ..options })
        })
    }

    /// Declares an encoder whose weights the feed is still to take; nothing is allocated.
    fn declare(device: &Device, header: ModelHeader, options: EmbedOptions<'_>) -> Result<(Embedder, Feed), Error> {
        let ModelHeader { name, shape, tokenizer, catalog, .. } = header;
        let EncoderShape { config, pooling, normalize, max_tokens } = shape.encoder()?.clone();
        let limit = config.max_seq_len;
        let max_tokens = checked("max_tokens", options.max_tokens.unwrap_or(max_tokens), 1..=limit)?;
        let usual_batch = if device.is_real_gpu() { 8192 } else { 1024 };
        let max_batch_tokens =
            checked("max_batch_tokens", options.max_batch_tokens.unwrap_or(usual_batch), 16..=1 << 20)?;
        let in_flight = checked("in_flight", options.in_flight.unwrap_or(2) as u32, 1..=8)? as usize;
        let reader = tokenizer.and_then(Reader::new).map_err(|error| error.to_string());
        if let Ok(Reader { prefix, suffix, .. }) = &reader {
            checked("max_tokens", max_tokens, (prefix.len() + suffix.len()) as u32..=limit)?;
        }

        let weights = match device.is_gpu() {
            true => EncoderWeights::declare(device, &config, &catalog)?,
            false => EncoderWeights::declare(device, &config, &Widened(&catalog))?,
        };
        let feed = Feed::new(&catalog, weights.places());
        let head =
            Head { pooling: options.pooling.unwrap_or(pooling), normalize: options.normalize.unwrap_or(normalize) };
        let passes = Passes::new(device, Encoder { config, weights }, head, max_tokens);
        let embedder = Embedder(Arc::new(Inner {
            device: device.clone(),
            name,
            passes,
            reader,
            block_types: catalog.block_types(),
            max_tokens,
            max_batch_tokens,
            in_flight,
            vectors: NonZeroUsize::new(options.cached_vectors).map(VectorCache::new),
        }));
        if let Some(limit_bytes) = options.memory_limit {
            let plan = embedder.plan()?;
            if plan.total_bytes() > limit_bytes {
                return Err(plan.refused(limit_bytes, "a smaller max_batch_tokens takes less".into()));
            }
        }
        Ok((embedder, feed))
    }

    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The model's shape.
    pub fn config(&self) -> &EncoderConfig {
        &self.0.passes.encoder().config
    }

    /// C, elements of a vector.
    pub fn dims(&self) -> u32 {
        self.config().dim
    }

    /// Tokens to which a text is cut, those around it included.
    pub fn max_tokens(&self) -> u32 {
        self.0.max_tokens
    }

    /// Tokens of a batch.
    pub fn max_batch_tokens(&self) -> u32 {
        self.0.max_batch_tokens
    }

    /// How a vector is made from its tokens' vectors.
    pub fn pooling(&self) -> Pooling {
        self.0.passes.head().pooling
    }

    /// Whether vectors are divided by their Euclidean norm.
    pub fn normalizes(&self) -> bool {
        self.0.passes.head().normalize
    }

    /// Block types of the weights in the file, the one with most bytes first.
    pub fn block_types(&self) -> &[BlockType] {
        &self.0.block_types
    }

    /// The tokenizer, which remembers what it encoded.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the model has none that can be used.
    pub fn encodings(&self) -> Result<&EncodingCache, Error> {
        Ok(&self.reader()?.encodings)
    }

    fn reader(&self) -> Result<&Reader, Error> {
        self.0.reader.as_ref().map_err(|reason| Error::Tokenizer {
            field: "model".into(),
            expected: "a tokenizer".into(),
            found: format!("none: {reason}"),
        })
    }

    /// Vectors that are remembered, if that was asked for.
    pub fn cached_vectors(&self) -> Option<&VectorCache> {
        self.0.vectors.as_ref()
    }

    /// Memory of the weights and a full batch.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if a batch is too large for the device.
    pub fn plan(&self) -> Result<MemoryPlan, Error> {
        let n_tokens = self.0.max_batch_tokens.max(self.0.max_tokens);
        self.0.passes.plan(size_for(n_tokens, n_tokens / 8))
    }

    /// Dispatches of a batch of so many texts with so many tokens in all.
    ///
    /// # Errors
    /// As [`Embedder::plan`].
    pub fn n_dispatches(&self, n_tokens: u32, n_texts: u32) -> Result<usize, Error> {
        self.0.passes.n_dispatches(size_for(n_tokens, n_texts))
    }

    /// Tokens of a text as the model reads it: with the tokens around it, and cut to [`Embedder::max_tokens`].
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the text cannot be encoded, or is nothing at all to the model.
    pub fn encode(&self, text: &str) -> Result<Tokens, Error> {
        let Reader { encodings, prefix, suffix } = self.reader()?;
        let inner = encodings.encode(text, EncodeOptions::default())?;
        let room = self.0.max_tokens as usize - prefix.len() - suffix.len();
        let ids = [prefix, &inner[..inner.len().min(room)], suffix].concat();
        self.check(&ids)?;
        Ok(Tokens::from(ids))
    }

    /// Refuses what is no sequence of this model.
    fn check(&self, ids: &[u32]) -> Result<(), Error> {
        let wrong = |field: &str, expected: String, found: String| {
            Err(Error::Tokenizer { field: field.into(), expected, found })
        };
        let vocab_size = self.config().vocab_size;
        if ids.is_empty() || ids.len() > self.0.max_tokens as usize {
            return wrong("tokens", format!("1 to {}", self.0.max_tokens), ids.len().to_string());
        }
        match ids.iter().find(|&&id| id >= vocab_size) {
            Some(id) => wrong("token id", format!("below {vocab_size}"), id.to_string()),
            None => Ok(()),
        }
    }

    /// The vectors of `texts`, `[n, C]`, in their order.
    ///
    /// # Errors
    /// [`Error::InRecord`] naming the text that cannot be encoded or whose vector is not finite; errors of
    /// [`Device::run`].
    pub async fn embed<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<f32>, Error> {
        self.embed_with(texts, &mut |_| ()).await
    }

    /// As [`Embedder::embed`]. `progress` is told how many texts are done, time and again. Dropping the future ends the
    /// work after the batches in flight.
    ///
    /// # Errors
    /// As [`Embedder::embed`].
    pub async fn embed_with<S: AsRef<str>>(
        &self,
        texts: &[S],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>, Error> {
        /// Batches whose texts are encoded together: the more, the less their lengths differ, and the later the first
        /// of them begins.
        const AHEAD: usize = 8;
        let mut vectors = vec![0.0; texts.len() * self.dims() as usize];
        let mut run = Run::new(self, &mut vectors, progress);
        let mut window = Vec::new();
        let mut n_tokens = 0;
        for (i, text) in texts.iter().enumerate() {
            let text = text.as_ref();
            if let Some(vector) = self.0.vectors.as_ref().and_then(|cache| cache.get(text)) {
                run.take(i, &vector);
                continue;
            }
            let tokens = self.encode(text).map_err(|e| e.in_record(i))?;
            n_tokens += tokens.ids.len();
            window.push((i, tokens));
            if n_tokens >= AHEAD * self.0.max_batch_tokens as usize {
                run.submit(std::mem::take(&mut window)).await?;
                n_tokens = 0;
            }
        }
        run.submit(window).await?;
        run.land_all().await?;
        if let Some(cache) = &self.0.vectors {
            let vectors = vectors.chunks_exact(self.dims() as usize);
            texts.iter().zip(vectors).for_each(|(text, vector)| cache.put(text.as_ref(), vector));
        }
        Ok(vectors)
    }

    /// The vectors of texts that are tokens already, `[n, C]`, in their order.
    ///
    /// # Errors
    /// [`Error::InRecord`] naming the text that has no tokens, too many, or unknown ones; otherwise as
    /// [`Embedder::embed`].
    pub async fn embed_tokens(&self, texts: &[Tokens]) -> Result<Vec<f32>, Error> {
        for (i, text) in texts.iter().enumerate() {
            self.check(&text.ids).map_err(|e| e.in_record(i))?;
        }
        let mut vectors = vec![0.0; texts.len() * self.dims() as usize];
        let mut ignore = |_| ();
        let mut run = Run::new(self, &mut vectors, &mut ignore);
        run.submit(texts.iter().cloned().enumerate().collect()).await?;
        run.land_all().await?;
        Ok(vectors)
    }
}

impl Loader<Embedder> {
    /// The encoder, once nothing more is wanted.
    ///
    /// # Errors
    /// [`Error::Config`] if something is; errors of the device.
    pub async fn finish(self) -> Result<Embedder, Error> {
        let (embedder, device) = self.loaded()?;
        let embedder = embedder.complete()?;
        device.drained().await?;
        Ok(embedder)
    }
}

impl Reader {
    fn new(tokenizer: Tokenizer) -> Result<Reader, Error> {
        // A text that every vocabulary has a token for, and that no normalizer takes away.
        let (inner, whole) = (tokenizer.encode("a", false)?, tokenizer.encode("a", true)?);
        let at = whole.windows(inner.len().max(1)).position(|window| window == inner).unwrap_or(0);
        let end = (at + inner.len()).min(whole.len());
        let (prefix, suffix) = (whole[..at].to_vec(), whole[end..].to_vec());
        Ok(Reader { encodings: EncodingCache::new(Arc::new(tokenizer), ENCODING_CACHE), prefix, suffix })
    }
}

/// Texts on their way through the device.
struct Run<'a> {
    embedder: &'a Embedder,
    /// `[n, C]`.
    vectors: &'a mut [f32],
    flights: VecDeque<(Vec<usize>, Pending)>,
    done: usize,
    progress: &'a mut dyn FnMut(usize),
}

impl<'a> Run<'a> {
    fn new(embedder: &'a Embedder, vectors: &'a mut [f32], progress: &'a mut dyn FnMut(usize)) -> Run<'a> {
        Run { embedder, vectors, flights: VecDeque::new(), done: 0, progress }
    }

    /// Submits texts, given with their numbers, batch by batch.
    async fn submit(&mut self, window: Vec<(usize, Tokens)>) -> Result<(), Error> {
        let Inner { max_batch_tokens, in_flight, passes, .. } = &*self.embedder.0;
        let lengths: Vec<usize> = window.iter().map(|(_, text)| text.ids.len()).collect();
        let is_gpu = self.embedder.device().is_gpu();
        // The CPU computes a batch when it is submitted.
        let in_flight = if is_gpu { *in_flight } else { 1 };
        for batch in batches(&lengths, *max_batch_tokens as usize) {
            if self.flights.len() >= in_flight {
                self.land().await?;
                if !is_gpu {
                    pause().await;
                }
            }
            let encoded: Vec<&Tokens> = batch.iter().map(|&i| &window[i].1).collect();
            let pending = passes.run(&encoded)?;
            self.flights.push_back((batch.iter().map(|&i| window[i].0).collect(), pending));
        }
        Ok(())
    }

    /// Waits for the oldest batch.
    async fn land(&mut self) -> Result<(), Error> {
        let Some((numbers, pending)) = self.flights.pop_front() else { return Ok(()) };
        let words = pending.await?;
        let found: &[f32] = bytemuck::cast_slice(&words);
        let dims = self.embedder.dims() as usize;
        for (i, vector) in numbers.into_iter().zip(found.chunks_exact(dims)) {
            if let Some(at) = vector.iter().position(|v| !v.is_finite()) {
                let (expected, found) = ("a finite number".into(), vector[at].to_string());
                let error = Error::Operand { kernel: "pool", operand: "y", expected, found };
                return Err(error.in_record(i));
            }
            self.take(i, vector);
        }
        (self.progress)(self.done);
        Ok(())
    }

    async fn land_all(&mut self) -> Result<(), Error> {
        while !self.flights.is_empty() {
            self.land().await?;
        }
        Ok(())
    }

    fn take(&mut self, i: usize, vector: &[f32]) {
        self.vectors[i * vector.len()..][..vector.len()].copy_from_slice(vector);
        self.done += 1;
    }
}

/// An option's value, if it is in range.
fn checked(option: &'static str, value: u32, range: std::ops::RangeInclusive<u32>) -> Result<u32, Error> {
    match range.contains(&value) {
        true => Ok(value),
        false => {
            let expected = format!("{} to {}", range.start(), range.end());
            Err(Error::Option { option, expected, found: value.to_string() })
        }
    }
}
