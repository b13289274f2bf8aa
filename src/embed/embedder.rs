//! A text encoder on a device.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use super::batch::{OutputHead, Tokens};
use super::batcher::{Batcher, EncoderLimits, Item, Truncation};
use super::images::{ImageEmbedder, ImageOptions};
use super::place::{Place, Second};
use super::{VectorCache, shortened};
use crate::device::Device;
use crate::error::Error;
use crate::formats::BlockType;
use crate::kernels::Pooling;
use crate::load::{EncoderShape, FileName, ImageEncoderFile, Loader, ModelFile, ModelHeader, Tasks, WeightUploader};
use crate::memory::Limit;
use crate::model::{DenseConfig, DenseLayer, ModelConfig};
use crate::picture::{Patches, Picture};
use crate::platform::IS_BROWSER;
use crate::recording::MemoryPlan;
use crate::tokenizer::EncodingCache;
use crate::tuning::while_testing;

/// Options for loading and running an encoder.
#[derive(Default)]
pub struct EmbedOptions<'a> {
    /// Maximum tokens per text including special tokens; longer texts are truncated. Default: the model's.
    pub max_tokens: Option<u32>,
    /// How token vectors are pooled into a text's vector. Default: the model's.
    pub pooling: Option<Pooling>,
    /// Whether to L2-normalise vectors. Default: as the model specifies.
    pub normalize: Option<bool>,
    /// Maximum tokens per batch; a longer text is a batch of its own. Default: 8192 on a GPU, 1024 on the CPU and on
    /// software adapters.
    pub max_batch_tokens: Option<u32>,
    /// Batches in flight, 1 to 8. Default: 2, so that one computes while the host prepares the next.
    pub in_flight: Option<usize>,
    /// Vectors to cache by text; 0 disables the cache.
    pub cached_vectors: usize,
    /// Maximum bytes of weights and the largest batch together.
    pub memory_limit: Option<u64>,
    /// The task whose adapter is merged into the weights, of models that have some: Jina's embeddings 3 and 5. Default:
    /// none of version 3, `retrieval` of version 5. Only [`Embedder::load`] reads it.
    pub task: Option<String>,
    /// Whether the image encoder of CLIP or SigLIP is left out.
    pub texts_only: bool,
    /// The same encoder on a second device. The first batch of each size is measured on both, later ones run on the
    /// faster device, see [`Embedder::places`]. A text's vector may then differ between batches by rounding.
    pub second: Option<Embedder>,
    /// Called with the uploaded and the total bytes of weights.
    pub progress: Option<&'a mut dyn FnMut(u64, u64)>,
}

/// An encoder on a device. Clones share the weights.
///
/// On one device, a text's vector has the same bits in any batch, at any position.
#[derive(Clone)]
pub struct Embedder {
    inner: Arc<EmbedderInner>,
    /// Text put before each input.
    prompt: Arc<str>,
    /// Elements that are kept of each vector.
    dims: u32,
    /// Its image encoder, or why it has none.
    images: Result<ImageEmbedder, Arc<str>>,
}

struct EmbedderInner {
    batcher: Batcher,
    pooling: Pooling,
    normalize: bool,
    prompts: BTreeMap<String, String>,
    vectors: Option<VectorCache>,
}

impl Embedder {
    /// Loads a Hugging Face folder or a GGUF file, see [`ModelFile::open`]; with its image encoder, if it is a folder of CLIP
    /// or SigLIP. Texts do without an image encoder that cannot be loaded or exceeds the limit together with the texts'
    /// encoder, and [`Embedder::images`] says why.
    ///
    /// # Errors
    /// Those of [`ModelFile::open`] and [`Embedder::from_file`].
    pub fn load(device: &Device, path: impl AsRef<Path>, options: EmbedOptions<'_>) -> Result<Embedder, Error> {
        let path = path.as_ref();
        let file = ModelFile::open(path)?.for_task(path, options.task.as_deref())?;
        let of_images = OfImages::new(device, &options);
        let are_wanted = of_images.are_wanted(&file.header);
        let embedder = Embedder::from_file(device, file, options).map_err(|e| e.in_model_file(path))?;
        if !are_wanted {
            return Ok(embedder);
        }
        let options = of_images.options(&embedder);
        let loaded = ImageEncoderFile::open(path)
            .and_then(|file| ImageEmbedder::from_file(device, file, options).map_err(|e| e.in_model_file(path)));
        Ok(embedder.with_images_if(loaded, of_images.limit))
    }

    /// The same encoder with an image encoder if that is loaded, has the right size and fits in memory; else with the
    /// reason.
    fn with_images_if(self, images: Result<ImageEmbedder, Error>, limit: Option<Limit>) -> Embedder {
        let with_images = |images: ImageEmbedder| {
            let both = self.clone().with_images(images)?;
            if let Some(limit) = limit {
                let plan = both.plan()?;
                if plan.total_bytes() > limit.bytes {
                    return Err(plan.refused(limit.bytes, limit.explained("reduce max_batch_tokens".into())));
                }
            }
            Ok(both)
        };
        let found = images.and_then(with_images);
        found.unwrap_or_else(|error| Embedder {
            images: Err(format!("its image encoder cannot be loaded: {error}").into()),
            ..self
        })
    }

    /// The same encoder with an image encoder, whose vectors are in the same space.
    ///
    /// # Errors
    /// [`Error::Option`] if its vectors have another size.
    pub fn with_images(self, images: ImageEmbedder) -> Result<Embedder, Error> {
        match images.dims() == self.width() {
            true => Ok(Embedder { images: Ok(images), ..self }),
            false => {
                let expected = format!("one with vectors of {} elements, as those of texts", self.width());
                Err(Error::Option { option: "images", expected, found: images.dims().to_string() })
            }
        }
    }

    /// The image encoder.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model embeds texts alone, or its image encoder cannot be loaded.
    pub fn images(&self) -> Result<&ImageEmbedder, Error> {
        self.images.as_ref().map_err(|reason| Error::Unsupported {
            format: "model",
            field: "images".into(),
            found: format!("`{}`: {reason}", self.name()),
            supported: "Hugging Face folders of CLIP, SigLIP and SigLIP 2".into(),
        })
    }

    /// Loads an encoder from an opened file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the model is not an encoder; [`Error::Memory`] if it exceeds the limit, with
    /// nothing allocated; [`Error::Option`] for an option out of range; [`Error::Config`] if a weight is missing;
    /// errors of [`Device::write`].
    pub fn from_file(device: &Device, file: ModelFile, options: EmbedOptions<'_>) -> Result<Embedder, Error> {
        let ModelFile { header, files } = file;
        check_merged(&header)?;
        let EmbedOptions { progress, .. } = options;
        let (embedder, mut feed) = Embedder::declare(device, header, EmbedOptions { progress: None, ..options })?;
        let batcher = &embedder.inner.batcher;
        while_testing(batcher.test(), || feed.take_all(device, &files, progress))?;
        batcher.complete()?;
        Ok(embedder)
    }

    /// A loader for these files. It ignores `options.progress`: use [`Loader::progress`].
    ///
    /// # Errors
    /// [`Error::Config`] if there are no files.
    pub fn loader(device: &Device, files: Vec<FileName>, options: EmbedOptions<'_>) -> Result<Loader<Embedder>, Error> {
        let of_images = OfImages::new(device, &options);
        Loader::of_encoders(device, files, move |device, header, images| {
            check_merged(&header)?;
            let are_wanted = of_images.are_wanted(&header);
            let (embedder, feed) = Embedder::declare(device, header, EmbedOptions { progress: None, ..options })?;
            if !are_wanted {
                return Ok((embedder, feed));
            }
            let declared = images.and_then(|file| ImageEmbedder::declare(device, file, of_images.options(&embedder)));
            let (images, feed_of_images) = match declared {
                Ok((images, feed)) => (Ok(images), Some(feed)),
                Err(error) => (Err(error), None),
            };
            let embedder = embedder.with_images_if(images, of_images.limit);
            Ok(match feed_of_images.filter(|_| embedder.images.is_ok()) {
                Some(further) => (embedder, feed.and(further)),
                None => (embedder, feed),
            })
        })
    }

    /// Memory needed for a file's weights and a full batch. Allocates nothing.
    ///
    /// # Errors
    /// Those of [`Embedder::from_file`], except errors in the weights' data.
    pub fn plan_file(device: &Device, file: ModelFile) -> Result<MemoryPlan, Error> {
        if IS_BROWSER {
            check_merged(&file.header)?;
        }
        Embedder::declare(device, file.header, EmbedOptions::default())?.0.plan()
    }

    /// Declares an encoder whose weights the feed will upload. Allocates nothing.
    fn declare(
        device: &Device,
        header: ModelHeader,
        options: EmbedOptions<'_>,
    ) -> Result<(Embedder, WeightUploader), Error> {
        let shape = header.shape.encoder()?.clone();
        if shape.late.is_some() {
            return Err(Error::Unsupported {
                format: "model",
                field: "modules".into(),
                found: format!("`{}` with a vector for each token (late interaction)", shape.config.architecture),
                supported: "one vector for each text; MultiVectorEmbedder and Reranker read this model".into(),
            });
        }
        let EncoderShape { pooling, normalize, dense, prompts, default_prompt, .. } = shape;
        let pooling = options.pooling.or(pooling).ok_or_else(|| Error::Unsupported {
            format: "model",
            field: "pooling_type".into(),
            found: "that of a cross-encoder".into(),
            supported: "mean, cls, last, in the files or as an option".into(),
        })?;
        let normalize = options.normalize.unwrap_or(normalize);
        let EmbedOptions { max_tokens, max_batch_tokens, in_flight, memory_limit, .. } = options;
        let limits = EncoderLimits { max_tokens, max_batch_tokens, in_flight, memory_limit };
        let (mut batcher, feed) = Batcher::declare(device, header, &limits, |header| {
            let layer = |&config: &DenseConfig| DenseLayer::declare(&device.target(), config, &header.tensor_index);
            let layers = dense.iter().map(layer).collect::<Result<_, _>>()?;
            Ok(OutputHead::Vector { pooling, normalize, layers })
        })?;
        if let Some(second) = &options.second {
            batcher.second = Some(second.beside(&batcher)?);
        }
        let vectors = NonZeroUsize::new(options.cached_vectors).map(VectorCache::new);
        let prompt = default_prompt.and_then(|name| prompts.get(&name)).map_or("", String::as_str).into();
        let dims = batcher.passes.width();
        let inner = Arc::new(EmbedderInner { batcher, pooling, normalize, prompts, vectors });
        let images = Err("it embeds texts alone".into());
        Ok((Embedder { inner, prompt, dims, images }, feed))
    }

    /// The model's prompts by name: `prompts` of `config_sentence_transformers.json`.
    pub fn prompts(&self) -> &BTreeMap<String, String> {
        &self.inner.prompts
    }

    /// The prompt put before each text; empty if the model's files choose none.
    pub fn prompt(&self) -> &str {
        &self.prompt
    }

    /// The same encoder with another of its prompts, such as `query`; `None` for no prompt.
    ///
    /// # Errors
    /// [`Error::Option`] with the prompts' names if there is none of this name.
    pub fn with_prompt(&self, name: Option<&str>) -> Result<Embedder, Error> {
        let prompt = match name {
            None => "",
            Some(name) => self.prompts().get(name).ok_or_else(|| {
                let names: Vec<&str> = self.prompts().keys().map(String::as_str).collect();
                let expected =
                    if names.is_empty() { "none: the model has no prompts".into() } else { names.join(", ") };
                Error::Option { option: "prompt", expected, found: name.into() }
            })?,
        };
        Ok(Embedder { prompt: prompt.into(), ..self.clone() })
    }

    /// The same encoder with vectors cut to their first `dims` elements, and normalised again if the model normalises
    /// them; `None` for whole ones. Only vectors of models trained for it keep their quality (Matryoshka, Kusupati et
    /// al. 2022, arXiv:2205.13147).
    ///
    /// # Errors
    /// [`Error::Option`] for 0, or more elements than the model's vectors have.
    pub fn with_dims(&self, dims: Option<u32>) -> Result<Embedder, Error> {
        let most = self.width();
        let dims = dims.unwrap_or(most);
        match (1..=most).contains(&dims) {
            true => Ok(Embedder { dims, ..self.clone() }),
            false => {
                let expected = format!("1 to {most}, the size of the model's vectors");
                Err(Error::Option { option: "dimensions", expected, found: dims.to_string() })
            }
        }
    }

    /// Elements in a whole vector.
    fn width(&self) -> u32 {
        self.inner.batcher.passes.width()
    }

    /// Whole vectors cut to [`Embedder::dims`].
    fn cut(&self, vectors: Vec<f32>) -> Vec<f32> {
        match self.dims < self.width() {
            true => shortened(&vectors, self.width() as usize, self.dims as usize, self.normalizes()),
            false => vectors,
        }
    }

    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        &self.inner.batcher.device
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.inner.batcher.name
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        self.inner.batcher.config()
    }

    pub(crate) fn encoder(&self) -> &crate::model::Transformer {
        self.inner.batcher.passes.encoder()
    }

    /// Elements in a vector: C, those of the last dense layer after pooling, or fewer by [`Embedder::with_dims`].
    pub fn dims(&self) -> u32 {
        self.dims
    }

    /// Maximum tokens per text including special tokens; longer texts are truncated.
    pub fn max_tokens(&self) -> u32 {
        self.inner.batcher.max_tokens
    }

    /// Maximum tokens per batch.
    pub fn max_batch_tokens(&self) -> u32 {
        self.inner.batcher.max_batch_tokens
    }

    /// How token vectors are pooled into a text's vector.
    pub fn pooling(&self) -> Pooling {
        self.inner.pooling
    }

    /// Whether vectors are L2-normalised.
    pub fn normalizes(&self) -> bool {
        self.inner.normalize
    }

    /// Block types of the file's weights, the one with most bytes first.
    pub fn block_types(&self) -> &[BlockType] {
        &self.inner.batcher.block_types
    }

    /// The tokenizer with its cache.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the model has no usable tokenizer.
    pub fn encodings(&self) -> Result<&EncodingCache, Error> {
        self.inner.batcher.encodings()
    }

    /// The cache of vectors, if enabled.
    pub fn cached_vectors(&self) -> Option<&VectorCache> {
        self.inner.vectors.as_ref()
    }

    /// Memory of the weights and a full batch; with an image encoder, of its weights and a full batch, too.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if a batch is too large for the device.
    pub fn plan(&self) -> Result<MemoryPlan, Error> {
        let plan = self.inner.batcher.plan()?;
        Ok(match &self.images {
            Ok(images) => plan + images.plan(images.batch_len() as u32)?,
            Err(_) => plan,
        })
    }

    /// Memory of the weights and a batch of `n_texts` texts with `n_tokens` tokens in total.
    ///
    /// # Errors
    /// As [`Embedder::plan`].
    pub fn batch_plan(&self, n_tokens: u32, n_texts: u32) -> Result<MemoryPlan, Error> {
        self.inner.batcher.batch_plan(n_tokens, n_texts)
    }

    /// Makes this encoder the second device of another.
    ///
    /// # Errors
    /// [`Error::Option`] if the encoders differ in shape, pooling or normalisation.
    fn beside(&self, first: &Batcher) -> Result<Second, Error> {
        let own = &self.inner.batcher;
        let says = |batcher: &Batcher| {
            let head = match batcher.passes.head() {
                OutputHead::Vector { pooling, normalize, layers } => {
                    let layers: Vec<_> = layers.iter().map(|layer| layer.config).collect();
                    format!("{pooling:?}, normalised: {normalize}, {layers:?}")
                }
                OutputHead::Tokens { .. } | OutputHead::Score(_) => "no vector of a text".into(),
            };
            format!("{} of {} tokens, {head}", batcher.name, batcher.max_tokens)
        };
        if own.config() == first.config() && says(own) == says(first) {
            return Ok(Second::new(own.passes.clone()));
        }
        Err(Error::Option { option: "second", expected: says(first), found: says(own) })
    }

    /// The device that runs each batch size seen so far; empty without a second device.
    pub fn places(&self) -> Vec<Place> {
        self.inner.batcher.second.as_ref().map_or(Vec::new(), Second::all)
    }

    /// Saves [`Embedder::places`] to the device's tuning file, so that the next process need not measure them.
    ///
    /// # Errors
    /// As [`Device::save_tuning`].
    pub fn save_places(&self) -> Result<(), Error> {
        let Batcher { device, passes, second, .. } = &self.inner.batcher;
        match second {
            Some(second) => device.with_tuning(second.tuning(passes)).save_tuning(),
            None => Ok(()),
        }
    }

    /// Dispatches of a batch of `n_texts` texts with `n_tokens` tokens in total.
    ///
    /// # Errors
    /// As [`Embedder::plan`].
    pub fn n_dispatches(&self, n_tokens: u32, n_texts: u32) -> Result<usize, Error> {
        self.inner.batcher.n_dispatches(n_tokens, n_texts)
    }

    /// Encodes a text with its prompt and special tokens, truncated to [`Embedder::max_tokens`].
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the text cannot be encoded or has no tokens.
    pub fn encode(&self, text: &str) -> Result<Tokens, Error> {
        self.inner.batcher.encode(&self.prompted(text))
    }

    /// As [`Embedder::encode`] with another truncation. Also returns the number of tokens before truncation.
    ///
    /// # Errors
    /// As [`Embedder::encode`]; [`Error::Option`] for a `max_tokens` that leaves no room beside the special tokens, or
    /// is more than [`Embedder::max_tokens`].
    pub fn encode_truncated(&self, text: &str, truncation: Truncation) -> Result<(Tokens, usize), Error> {
        self.inner.batcher.encode_truncated(&self.prompted(text), truncation)
    }

    /// Whether [`Embedder::encode`] truncates this text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the text cannot be encoded.
    pub fn is_cut(&self, text: &str) -> Result<bool, Error> {
        Ok(self.encode_truncated(text, Truncation::default())?.1 > self.max_tokens() as usize)
    }

    fn prompted<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if self.prompt.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(format!("{}{text}", self.prompt)) }
    }

    /// The vectors of `texts` in order, `[n, C]`.
    ///
    /// # Errors
    /// [`Error::InRecord`] with the index of a text that cannot be encoded or has a non-finite vector; errors of
    /// [`Device::run`].
    pub async fn embed<S: AsRef<str>>(&self, texts: &[S]) -> Result<Vec<f32>, Error> {
        self.embed_with(texts, &mut |_| ()).await
    }

    /// As [`Embedder::embed`]. Calls `progress` repeatedly with the number of finished texts. If the future is
    /// dropped, work stops after the batches in flight.
    ///
    /// # Errors
    /// As [`Embedder::embed`].
    pub async fn embed_with<S: AsRef<str>>(
        &self,
        texts: &[S],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>, Error> {
        let EmbedderInner { batcher, vectors: cache, .. } = &*self.inner;
        let item = |i: usize| {
            let text = self.prompted(texts[i].as_ref());
            match cache.as_ref().and_then(|cache| cache.get(&*text)) {
                Some(vector) => Ok(Item::Known(vector)),
                None => batcher.encode(&text).map(Item::Tokens),
            }
        };
        let vectors = batcher.rows(texts.len(), item, progress).await?;
        if let Some(cache) = cache {
            let rows = vectors.chunks_exact(self.width() as usize);
            texts.iter().zip(rows).for_each(|(text, row)| cache.put(self.prompted(text.as_ref()).into(), row.into()));
        }
        Ok(self.cut(vectors))
    }

    /// The vectors of encoded texts in order, `[n, C]`.
    ///
    /// # Errors
    /// [`Error::InRecord`] with the index of a text that has no tokens, too many or unknown ones; otherwise as
    /// [`Embedder::embed`].
    pub async fn embed_tokens(&self, texts: &[Tokens]) -> Result<Vec<f32>, Error> {
        let batcher = &self.inner.batcher;
        let item = |i: usize| batcher.check(&texts[i]).map(|()| Item::Tokens(texts[i].clone()));
        Ok(self.cut(batcher.rows(texts.len(), item, &mut |_| ()).await?))
    }

    /// The last layer's output for each token of an encoded text, `[T, C]`, for inspection and tests.
    ///
    /// # Errors
    /// As [`Embedder::embed_tokens`], without an index.
    pub async fn rows(&self, text: &Tokens) -> Result<Vec<f32>, Error> {
        self.inner.batcher.token_rows(text).await
    }

    /// The vectors of pictures in order, `[n, C]`, in one space with those of texts. Several pictures at once take less time
    /// than one by one.
    ///
    /// # Errors
    /// As [`Embedder::images`] and [`ImageEmbedder::embed`].
    pub async fn embed_images(&self, pictures: &[Picture]) -> Result<Vec<f32>, Error> {
        Ok(self.cut(self.images()?.embed(pictures).await?))
    }

    /// The vectors of prepared pictures in order, `[n, C]`.
    ///
    /// # Errors
    /// As [`Embedder::images`] and [`ImageEmbedder::embed_patches`].
    pub async fn embed_patches(&self, pictures: &[Patches]) -> Result<Vec<f32>, Error> {
        Ok(self.cut(self.images()?.embed_patches(pictures).await?))
    }
}

/// Options of a load that are those of its image encoder, too.
#[derive(Clone, Copy)]
struct OfImages {
    texts_only: bool,
    max_batch_patches: Option<u32>,
    /// The limit before either encoder was loaded.
    limit: Option<Limit>,
}

impl OfImages {
    fn new(device: &Device, options: &EmbedOptions<'_>) -> OfImages {
        let &EmbedOptions { texts_only, max_batch_tokens: max_batch_patches, memory_limit, .. } = options;
        OfImages { texts_only, max_batch_patches, limit: Limit::of(memory_limit, device.available_bytes()) }
    }

    /// Whether there should be an image encoder beside that of texts.
    fn are_wanted(self, header: &ModelHeader) -> bool {
        !self.texts_only && header.shape.encoder().is_ok_and(|shape| shape.tower.is_some())
    }

    fn options(self, embedder: &Embedder) -> ImageOptions {
        ImageOptions { normalize: embedder.normalizes(), max_batch_patches: self.max_batch_patches }
    }
}

/// Refuses weights that lack their task's adapter.
///
/// # Errors
/// Those of [`Tasks::check_merged`].
fn check_merged(header: &ModelHeader) -> Result<(), Error> {
    let tasks = header.shape.encoder().ok().and_then(|shape| shape.tasks.as_ref());
    tasks.map_or(Ok(()), Tasks::check_merged)
}

impl Loader<Embedder> {
    /// The encoder, after all wanted bytes were pushed.
    ///
    /// # Errors
    /// [`Error::Config`] if bytes are missing; errors of the device.
    pub async fn finish(self) -> Result<Embedder, Error> {
        let (embedder, device) = self.loaded()?;
        embedder.inner.batcher.complete()?;
        device.drained().await?;
        Ok(embedder)
    }
}
