//! Pictures to vectors, in the space of the texts' vectors: CLIP and SigLIP.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;

use crate::device::{Device, Pending};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::scale;
use crate::load::{FileBytes, ImageEncoderFile, WeightUploader, Widened};
use crate::model::{BatchSize, ImageBatchTensors, ImageEncoder, ImageEncoderConfig};
use crate::picture::positions::{Interpolation, interpolate};
use crate::picture::{Family, Patches, Picture, Preprocess};
use crate::platform::IS_BROWSER;
use crate::recording::{MemoryPlan, Recorder, Recording, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tuning::{record_tested, self_test};

/// Recorded passes to cache, by number of rows and pictures.
const KEPT_PASSES: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// How to load an image encoder.
#[derive(Clone, Copy, Debug)]
pub struct ImageOptions {
    /// Whether to L2-normalise vectors. Default: true.
    pub normalize: bool,
    /// Patches per batch at most; a picture of more is a batch of its own. Default: 8192 on a GPU, 1024 on the CPU and on
    /// software adapters.
    pub max_batch_patches: Option<u32>,
}

impl Default for ImageOptions {
    fn default() -> ImageOptions {
        ImageOptions { normalize: true, max_batch_patches: None }
    }
}

/// An image encoder on a device, whose vectors are in one space with those of a text encoder. Its weights are uploaded for
/// the first picture. Clones share them.
///
/// A picture's vector has the same bits in any batch.
///
/// ```no_run
/// use tilewright::picture::Picture;
/// use tilewright::{Device, EmbedOptions, Embedder};
///
/// # pollster::block_on(async {
/// let device = Device::auto().await;
/// let embedder = Embedder::load(&device, "siglip2-base-patch16-224", EmbedOptions::default())?;
/// // With the feature `pictures`, `Picture::decode` reads files.
/// let pictures = [Picture::new(2, 1, vec![255, 0, 0, 0, 0, 255])?];
/// let images = embedder.embed_images(&pictures).await?;
/// let texts = embedder.embed(&["a red dot and a blue one"]).await?;
/// let similarity: f32 = images.iter().zip(&texts).map(|(a, b)| a * b).sum();
/// println!("{similarity}");
/// # Ok::<(), tilewright::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct ImageEmbedder {
    inner: Arc<ImageInner>,
}

struct ImageInner {
    device: Device,
    encoder: ImageEncoder,
    preprocess: Preprocess,
    interpolation: Interpolation,
    /// Learned positions of patches, `[N, C]`.
    positions: Vec<f32>,
    /// Embedding of the class token with its position, `[C]`; empty without.
    class: Vec<f32>,
    max_batch_rows: u32,
    state: Mutex<ImageState>,
}

struct ImageState {
    passes: LruCache<BatchSize, RecordedImages>,
    /// Passes run one at a time, so they share memory for temporaries.
    workspace: Workspace,
    /// The weights that are not on the device yet.
    weights: Option<(WeightUploader, Vec<FileBytes>)>,
}

struct RecordedImages {
    io: Arc<ImageBatchTensors>,
    recording: Arc<Recording>,
    /// Grids of the pictures whose positions the tensors hold.
    grids: Vec<[u32; 2]>,
}

impl ImageEmbedder {
    /// Loads the image encoder of a Hugging Face folder of CLIP, SigLIP or SigLIP 2.
    ///
    /// # Errors
    /// Those of [`ImageEncoderFile::open`] and [`ImageEmbedder::from_file`].
    pub fn load(device: &Device, path: impl AsRef<Path>, options: ImageOptions) -> Result<ImageEmbedder, Error> {
        let path = path.as_ref();
        ImageEmbedder::from_file(device, ImageEncoderFile::open(path)?, options).map_err(|e| e.in_model_file(path))
    }

    /// Prepares an image encoder, whose weights are uploaded for the first picture.
    ///
    /// # Errors
    /// [`Error::Config`] if a weight is missing or has another shape, [`Error::Option`] for batches of no patches.
    pub fn from_file(
        device: &Device,
        mut file: ImageEncoderFile,
        options: ImageOptions,
    ) -> Result<ImageEmbedder, Error> {
        let files = std::mem::take(&mut file.files);
        let (images, uploader) = ImageEmbedder::declare(device, file, options)?;
        images.inner.state().weights = Some((uploader, files));
        Ok(images)
    }

    /// The encoder without its weights.
    pub(super) fn declare(
        device: &Device,
        file: ImageEncoderFile,
        options: ImageOptions,
    ) -> Result<(ImageEmbedder, WeightUploader), Error> {
        let ImageEncoderFile { config, preprocess, interpolation, positions, class, tensor_index, .. } = file;
        let usual = if device.is_real_gpu() { 8192 } else { 1024 };
        let max_batch_rows = options.max_batch_patches.unwrap_or(usual);
        if max_batch_rows == 0 {
            let (option, expected) = ("max_batch_patches", "1 or more".into());
            return Err(Error::Option { option, expected, found: "0".into() });
        }
        let max_rows = preprocess.max_patches().saturating_add(config.n_class_rows());
        // Encoders of pictures round nothing.
        let device = device.exact();
        let how = (max_rows, options.normalize);
        let encoder = match device.is_gpu() {
            true => ImageEncoder::declare(&device.target(), config, &tensor_index, how)?,
            false => ImageEncoder::declare(&device.target(), config, &Widened(&tensor_index), how)?,
        };
        let uploader = WeightUploader::of_all(&tensor_index, encoder.tensor_slots())?;
        let state = ImageState { passes: LruCache::new(KEPT_PASSES), workspace: Workspace::default(), weights: None };
        let state = Mutex::new(state);
        let inner = ImageInner { device, encoder, preprocess, interpolation, positions, class, max_batch_rows, state };
        Ok((ImageEmbedder { inner: Arc::new(inner) }, uploader))
    }

    /// The encoder's shape.
    pub fn config(&self) -> &ImageEncoderConfig {
        &self.inner.encoder.config
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The family of models, which says how pictures are prepared.
    pub fn family(&self) -> Family {
        self.inner.preprocess.family
    }

    /// Elements in a vector.
    pub fn dims(&self) -> u32 {
        self.config().dims()
    }

    /// Pictures that fill a batch.
    pub fn batch_len(&self) -> usize {
        (self.inner.max_batch_rows / self.inner.max_rows()).max(1) as usize
    }

    /// Memory of the weights and a pass over this many pictures of the largest size. Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Operand`] or [`Error::Shape`] if the pass exceeds the device's limits.
    pub fn plan(&self, n_pictures: u32) -> Result<MemoryPlan, Error> {
        let pass = self.inner.record(self.inner.size_of(n_pictures), &mut Workspace::default())?;
        Ok(MemoryPlan::of([&*pass.recording], self.inner.encoder.tensors()))
    }

    /// Number of dispatches of a pass over this many pictures of the largest size.
    ///
    /// # Errors
    /// As [`ImageEmbedder::plan`].
    pub fn n_dispatches(&self, n_pictures: u32) -> Result<usize, Error> {
        let pass = self.inner.record(self.inner.size_of(n_pictures), &mut Workspace::default())?;
        Ok(pass.recording.n_dispatches())
    }

    /// A picture, resized and cut into patches, which take less memory than most files.
    ///
    /// # Errors
    /// [`Error::Operand`] if a step would need too much memory.
    pub fn prepare(&self, picture: &Picture) -> Result<Patches, Error> {
        let tiles = self.inner.preprocess.prepare(picture)?.tiles;
        tiles.into_iter().next().ok_or_else(|| refused("patches", "a tile".into(), "none"))
    }

    /// The vectors of pictures in order, `[n, D]`.
    ///
    /// # Errors
    /// [`Error::InRecord`] with the index of a picture that cannot be prepared or has a non-finite vector; errors of the
    /// device.
    pub async fn embed(&self, pictures: &[Picture]) -> Result<Vec<f32>, Error> {
        /// Batches prepared together.
        const AHEAD: usize = 4;
        let mut vectors = Vec::with_capacity(pictures.len() * self.dims() as usize);
        let n = AHEAD * self.batch_len();
        for (i, pictures) in pictures.chunks(n).enumerate() {
            let at = |error: Error, k: usize| error.in_record(i * n + k);
            let prepared = pictures.iter().enumerate();
            let prepared = prepared.map(|(k, picture)| self.prepare(picture).map_err(|e| at(e, k)));
            let patches = prepared.collect::<Result<Vec<_>, _>>()?;
            let made = self.embed_patches(&patches).await.map_err(|error| match error {
                Error::InRecord { record, source } => at(*source, record),
                other => other,
            });
            vectors.extend(made?);
        }
        Ok(vectors)
    }

    /// The vectors of prepared pictures in order, `[n, D]`.
    ///
    /// # Errors
    /// [`Error::InRecord`] with the index of a picture whose patches have another size or number, or whose vector is not
    /// finite; errors of the device.
    pub async fn embed_patches(&self, pictures: &[Patches]) -> Result<Vec<f32>, Error> {
        let inner = &*self.inner;
        pictures.iter().enumerate().try_for_each(|(i, patches)| inner.check(patches).map_err(|e| e.in_record(i)))?;
        inner.upload_weights()?;
        let mut vectors = Vec::with_capacity(pictures.len() * self.dims() as usize);
        // One batch computes while the next is uploaded.
        let mut flight: Option<(Range<usize>, Pending)> = None;
        for batch in inner.batches(pictures) {
            let of_batch = &pictures[batch.clone()];
            inner.test(of_batch).await?;
            let pending = inner.run(of_batch)?;
            if let Some(landed) = flight.replace((batch, pending)) {
                inner.land(landed, &mut vectors).await?;
            }
        }
        if let Some(landed) = flight {
            inner.land(landed, &mut vectors).await?;
        }
        Ok(vectors)
    }

    /// The rows of a picture that the head takes, `[n, C]`, for inspection and tests: the last layer's output, which SigLIP
    /// normalises.
    ///
    /// # Errors
    /// As [`ImageEmbedder::embed_patches`], without an index.
    pub async fn rows(&self, patches: &Patches) -> Result<Vec<f32>, Error> {
        let inner = &*self.inner;
        inner.check(patches)?;
        inner.upload_weights()?;
        let patches = std::slice::from_ref(patches);
        let io = inner.encoder.declare_batch(&inner.device.target(), inner.size(patches))?;
        let record = || {
            let mut rows = Vec::new();
            let mut tap = |rec: &mut Recorder, h: &Tensor| {
                let kept = Tensor::declare("rows", Role::Activations, h.shape(), DType::F32)?;
                scale(rec, h, &kept, 1.0)?;
                rows.push(kept);
                Ok(())
            };
            let mut rec = Recorder::new(inner.device.target());
            inner.encoder.record(&mut rec, &io, &mut tap)?;
            Ok((rec.finish(&mut Workspace::default()), rows))
        };
        let (recording, rows) = record_tested(&inner.device, record, |(recording, _)| recording).await?;
        inner.upload(&io, patches, true)?;
        inner.device.run(&recording)?;
        match rows.first() {
            Some(rows) => inner.device.read(rows).await,
            None => Ok(Vec::new()),
        }
    }
}

impl ImageInner {
    fn state(&self) -> MutexGuard<'_, ImageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rows of a picture at most.
    fn max_rows(&self) -> u32 {
        self.preprocess.max_patches().saturating_add(self.encoder.config.n_class_rows()).max(1)
    }

    fn n_rows(&self, patches: &Patches) -> u32 {
        patches.places.len() as u32 + self.encoder.config.n_class_rows()
    }

    /// The size of a batch of so many pictures of the largest size.
    fn size_of(&self, n_pictures: u32) -> BatchSize {
        BatchSize { n_tokens: n_pictures.saturating_mul(self.max_rows()), n_sequences: n_pictures }
    }

    fn size(&self, pictures: &[Patches]) -> BatchSize {
        let n_tokens = pictures.iter().map(|patches| self.n_rows(patches)).sum();
        BatchSize { n_tokens, n_sequences: pictures.len() as u32 }
    }

    /// Cuts pictures into batches.
    fn batches(&self, pictures: &[Patches]) -> Vec<Range<usize>> {
        let mut batches: Vec<Range<usize>> = Vec::new();
        let mut n_rows = 0u32;
        for (i, patches) in pictures.iter().enumerate() {
            let own = self.n_rows(patches);
            n_rows = n_rows.saturating_add(own);
            match batches.last_mut() {
                Some(batch) if n_rows <= self.max_batch_rows => batch.end = i + 1,
                _ => {
                    n_rows = own;
                    batches.push(i..i + 1);
                }
            }
        }
        batches
    }

    fn check(&self, patches: &Patches) -> Result<(), Error> {
        let (n, patch_dim) = (patches.places.len(), self.encoder.config.patch_dim);
        let most = self.preprocess.max_patches() as usize;
        if patches.patch_dim != patch_dim {
            let [expected, found] = [patch_dim, patches.patch_dim].map(|dim| vec![n as u32, dim]);
            return Err(Error::Shape { kernel: "image encoder", operand: "patches", expected, found });
        }
        if n == 0 || n > most || patches.grid.iter().map(|&side| side as usize).product::<usize>() != n {
            return Err(refused("patches", format!("a grid of 1 to {most}"), n));
        }
        if self.interpolation == Interpolation::Nearest && n != most {
            return Err(refused("patches", format!("the {most} of a picture"), n));
        }
        match patches.values.len() == n * patch_dim as usize {
            true => Ok(()),
            false => Err(refused("values", format!("{} numbers", n * patch_dim as usize), patches.values.len())),
        }
    }

    /// Uploads the weights, once. In a browser a loader has.
    fn upload_weights(&self) -> Result<(), Error> {
        if IS_BROWSER {
            return Ok(());
        }
        let mut state = self.state();
        if let Some((uploader, files)) = &state.weights {
            uploader.clone().take_all(&self.device, files, None)?;
            state.weights = None;
        }
        Ok(())
    }

    /// Runs the self-test of the pass that these pictures need.
    async fn test(&self, pictures: &[Patches]) -> Result<(), Error> {
        let size = self.size(pictures);
        loop {
            let recording = self.pass(&mut self.state(), size)?.recording.clone();
            if self_test(&self.device, &recording).await? {
                return Ok(());
            }
            self.state().passes.pop(&size);
        }
    }

    /// Runs a batch.
    fn run(&self, pictures: &[Patches]) -> Result<Pending, Error> {
        // Held until the batch is submitted, so that another one overwrites no patches.
        let mut state = self.state();
        let pass = self.pass(&mut state, self.size(pictures))?;
        let grids: Vec<[u32; 2]> = pictures.iter().map(|patches| patches.grid).collect();
        let is_new = pass.grids != grids;
        self.upload(&pass.io, pictures, is_new)?;
        pass.grids = grids;
        self.device.run_and_read(&pass.recording, &pass.io.vectors)
    }

    async fn land(&self, (batch, pending): (Range<usize>, Pending), vectors: &mut Vec<f32>) -> Result<(), Error> {
        let words = pending.await?;
        let dims = self.encoder.config.dims() as usize;
        let rows = bytemuck::cast_slice::<u32, f32>(&words).chunks_exact(dims);
        for (i, row) in batch.zip(rows) {
            if let Some(value) = row.iter().find(|value| !value.is_finite()) {
                return Err(refused("vectors", "finite numbers".into(), value).in_record(i));
            }
            vectors.extend_from_slice(row);
        }
        Ok(())
    }

    fn pass<'a>(&self, state: &'a mut ImageState, size: BatchSize) -> Result<&'a mut RecordedImages, Error> {
        let ImageState { passes, workspace, .. } = state;
        passes.try_get_or_insert_mut(size, || self.record(size, workspace))
    }

    fn record(&self, size: BatchSize, workspace: &mut Workspace) -> Result<RecordedImages, Error> {
        let target = self.device.target();
        let io = self.encoder.declare_batch(&target, size)?;
        let mut rec = Recorder::new(target);
        self.encoder.record(&mut rec, &io, &mut |_, _| Ok(()))?;
        let recording = Arc::new(rec.finish(workspace));
        Ok(RecordedImages { io: Arc::new(io), recording, grids: Vec::new() })
    }

    /// Uploads patches, and what depends on the grids if they are new.
    fn upload(&self, io: &ImageBatchTensors, pictures: &[Patches], is_new: bool) -> Result<(), Error> {
        let config = &self.encoder.config;
        let (dim, n_class) = (config.encoder.dim as usize, config.n_class_rows());
        // A class token is a patch of zeros.
        let mut values = Vec::with_capacity(io.patches.len());
        for patches in pictures {
            values.resize(values.len() + (n_class * config.patch_dim) as usize, 0.0);
            values.extend_from_slice(&patches.values);
        }
        self.device.write(&io.patches, 0, &values)?;
        if !is_new {
            return Ok(());
        }
        let lengths: Vec<u32> = pictures.iter().map(|patches| self.n_rows(patches)).collect();
        io.set_lengths(&self.device, &lengths)?;
        let mut positions = Vec::with_capacity(io.positions.len());
        for patches in pictures {
            positions.extend_from_slice(&self.class);
            positions.extend(interpolate(&self.positions, dim, patches.grid, 1, self.interpolation)?);
        }
        self.device.write(&io.positions, 0, &positions)
    }
}

fn refused(operand: &'static str, expected: String, found: impl ToString) -> Error {
    Error::Operand { kernel: "image encoder", operand, expected, found: found.to_string() }
}
