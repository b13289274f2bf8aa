//! Vision encoders on a device: pictures to rows for a text model.
//!
//! The host cuts a picture into patches (`picture/prepare.rs`), uploads them with their rotation and learned positions,
//! and reads the rows back. Rows stay on the host, by the picture's digest: a pass of the text model uploads those of
//! its tokens, wherever it runs, and a conversation's later turns compute no picture again.

#[cfg(feature = "chat")]
mod place;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::scale;
use crate::load::{FileBytes, FileName, Learned, Loader, PatchPlaces, VisionFile, WeightUploader};
use crate::model::{MeanTensors, PatchTensors, VisionConfig, VisionTransformer};
use crate::picture::positions::{add_axes, grid_neighbours, interpolate};
use crate::picture::rope::grid_angles;
use crate::picture::{Family, Patches, Picture, Prepared, Preprocess, TextPart};
use crate::platform::IS_BROWSER;
use crate::recording::{MemoryPlan, Recorder, Recording, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tuning::{record_tested, self_test};

#[cfg(feature = "chat")]
pub(crate) use place::place_images;

/// Recorded passes to cache, by number of patches.
const KEPT_PASSES: NonZeroUsize = NonZeroUsize::new(16).unwrap();
/// Pictures whose rows stay on the host, and bytes of them. The last picture's stay, whatever they take.
const KEPT_PICTURES: NonZeroUsize = NonZeroUsize::new(64).unwrap();
const KEPT_BYTES: usize = 1 << 30;
/// The first id that stands for a row of a picture: above every vocabulary.
pub(crate) const FIRST_ROW_ID: u32 = 1 << 31;

/// How to load a vision encoder.
#[derive(Clone, Copy, Debug)]
pub struct VisionOptions {
    /// Rows that a picture may take at most; larger pictures are made smaller. Default: 4096.
    pub max_rows: u32,
}

impl Default for VisionOptions {
    fn default() -> VisionOptions {
        VisionOptions { max_rows: 4096 }
    }
}

/// A vision encoder on a device. Its weights are uploaded for the first picture. Clones share them.
///
/// ```no_run
/// use tilewright::chat::Message;
/// use tilewright::picture::Picture;
/// use tilewright::{ChatModel, ChatRequest, Device, LoadOptions, Model, VisionEncoder, VisionOptions};
///
/// # pollster::block_on(async {
/// let device = Device::auto().await;
/// let encoder = VisionEncoder::load(&device, "Qwen3-VL-2B/mmproj-F16.gguf", VisionOptions::default())?;
/// let model = Model::load(&device, "Qwen3-VL-2B/model-Q4_K_M.gguf", LoadOptions::default())?.with_vision(encoder)?;
/// // With the feature `pictures`, `Picture::decode` reads files.
/// let picture = Picture::new(2, 1, vec![255, 0, 0, 0, 0, 255])?;
/// let image = model.vision().expect("an encoder").encode(&picture).await?;
/// let message = Message::with_images("user", 1, "Which colours are these?");
/// let request = ChatRequest { images: vec![image], ..ChatRequest::new(vec![message]) };
/// let answer = ChatModel::new(&model)?.answer(&mut model.session()?, &request).await?;
/// println!("{}", answer.text);
/// # Ok::<(), tilewright::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct VisionEncoder {
    inner: Arc<VisionInner>,
}

struct VisionInner {
    device: Device,
    transformer: VisionTransformer,
    preprocess: Preprocess,
    places: PatchPlaces,
    /// Learned positions, `[N, C]`; empty without.
    positions: Vec<f32>,
    /// Biases of means of patches, and their inverse deviations, `[C]`; empty unless means are standardised.
    standard: [Vec<f32>; 2],
    max_patches: u32,
    digests: [RandomState; 2],
    state: Mutex<VisionState>,
}

struct VisionState {
    passes: LruCache<u32, Arc<RecordedPatches>>,
    /// Passes run one at a time, so they share memory for temporaries.
    workspace: Workspace,
    /// The weights that are not on the device yet.
    weights: Option<(WeightUploader, Vec<FileBytes>)>,
    /// By digest of pixels.
    pictures: LruCache<[u64; 2], Arc<ImageEmbeddings>>,
}

struct RecordedPatches {
    io: PatchTensors,
    recording: Recording,
}

/// The rows that a picture contributes to a sequence, and the text around them.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageEmbeddings {
    /// Rows of each tile, in order.
    pub tiles: Vec<Arc<ImageRows>>,
    /// Replaces [`Family::placeholder`] in a prompt.
    pub text: Vec<TextPart>,
}

impl ImageEmbeddings {
    /// Number of rows, without the tokens around them.
    pub fn n_rows(&self) -> usize {
        self.tiles.iter().map(|tile| tile.len()).sum()
    }

    fn size_bytes(&self) -> usize {
        self.tiles.iter().flat_map(|tile| &tile.rows).map(|rows| size_of_val(&rows[..])).sum()
    }
}

/// Consecutive rows of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageRows {
    /// D, the text model's width.
    pub dim: u32,
    /// `[n, D]`: those in place of token embeddings, then those that are added after the text model's first layers.
    pub rows: Vec<Vec<f32>>,
    /// Rows and columns of M-RoPE, whose product is n; `None` for positions like those of tokens.
    pub grid: Option<[u32; 2]>,
    /// Whether rows see each other in all layers of the text model: [`VisionConfig::sees_all`].
    pub sees_all: bool,
    /// Ids that stand for the rows in a sequence: no others do as long as the program runs.
    pub ids: Range<u32>,
}

impl ImageRows {
    /// Rows with new ids.
    ///
    /// # Errors
    /// [`Error::Operand`] after 2^31 rows.
    fn new((dim, sees_all): (u32, bool), rows: Vec<Vec<f32>>, grid: Option<[u32; 2]>) -> Result<ImageRows, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(FIRST_ROW_ID);
        let n = rows.first().map_or(0, |rows| rows.len() / dim.max(1) as usize) as u32;
        let first = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |first| first.checked_add(n));
        let first = first.map_err(|_| Error::Operand {
            kernel: "vision",
            operand: "rows",
            expected: format!("at most {FIRST_ROW_ID} in the life of a program"),
            found: "more".into(),
        })?;
        Ok(ImageRows { dim, rows, grid, sees_all, ids: first..first + n })
    }

    /// Rows for further layers, and [`ImageRows::sees_all`]: images alike in both share recorded passes.
    pub(crate) fn kind(&self) -> (usize, bool) {
        (self.rows.len().saturating_sub(1), self.sees_all)
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Positions that the rows take: fewer than rows with M-RoPE.
    pub fn n_positions(&self) -> u32 {
        self.grid.map_or(self.len() as u32, |[rows, cols]| rows.max(cols))
    }
}

impl VisionEncoder {
    /// Loads the vision encoder of a Hugging Face folder, or a GGUF file of one (`mmproj`).
    ///
    /// # Errors
    /// Those of [`VisionFile::open`] and [`VisionEncoder::from_file`].
    pub fn load(device: &Device, path: impl AsRef<Path>, options: VisionOptions) -> Result<VisionEncoder, Error> {
        let path = path.as_ref();
        VisionEncoder::from_file(device, VisionFile::open(path)?, options).map_err(|e| e.in_model_file(path))
    }

    /// Prepares a vision encoder, whose weights are uploaded for the first picture.
    ///
    /// # Errors
    /// [`Error::Config`] if a weight is missing or has another shape, [`Error::Option`] for no rows.
    pub fn from_file(device: &Device, mut file: VisionFile, options: VisionOptions) -> Result<VisionEncoder, Error> {
        let files = std::mem::take(&mut file.files);
        let (encoder, uploader) = VisionEncoder::declare(device, file, options)?;
        encoder.inner.state().weights = Some((uploader, files));
        Ok(encoder)
    }

    /// A loader of these files: a GGUF file of a vision encoder (`mmproj`), or those of a Hugging Face folder.
    ///
    /// # Errors
    /// [`Error::Config`] if there are none, or several GGUF files.
    pub fn loader(
        device: &Device,
        files: Vec<FileName>,
        options: VisionOptions,
    ) -> Result<Loader<VisionEncoder>, Error> {
        Loader::of_vision(device, files, move |device, file| VisionEncoder::declare(device, file, options))
    }

    /// The encoder without its weights.
    fn declare(
        device: &Device,
        file: VisionFile,
        options: VisionOptions,
    ) -> Result<(VisionEncoder, WeightUploader), Error> {
        let VisionFile { config, preprocess, places, positions, standard, tensor_index, .. } = file;
        let preprocess = preprocess.limited_to(options.max_rows)?;
        let max_patches = preprocess.max_patches();
        // Encoders round nothing.
        let device = device.exact();
        let transformer = VisionTransformer::declare(&device.target(), config, &tensor_index, max_patches)?;
        let uploader = WeightUploader::of_all(&tensor_index, transformer.tensor_slots())?;
        let state = VisionState {
            passes: LruCache::new(KEPT_PASSES),
            workspace: Workspace::default(),
            weights: None,
            pictures: LruCache::new(KEPT_PICTURES),
        };
        let inner = VisionInner {
            device,
            transformer,
            preprocess,
            places,
            positions,
            standard,
            max_patches,
            digests: Default::default(),
            state: Mutex::new(state),
        };
        Ok((VisionEncoder { inner: Arc::new(inner) }, uploader))
    }

    /// The encoder's shape.
    pub fn config(&self) -> &VisionConfig {
        &self.inner.transformer.config
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The family of models, which says what stands for a picture in a prompt.
    pub fn family(&self) -> Family {
        self.inner.preprocess.family
    }

    /// Patches of a tile at most, or of a picture, where it is one tile.
    pub fn max_patches(&self) -> u32 {
        self.inner.max_patches
    }

    /// Rows of a tile at most; those of a picture, where it is one tile.
    pub fn max_rows(&self) -> u32 {
        self.inner.max_patches / self.config().projector.n_patches
    }

    /// Number of rows that a picture of this size takes in a sequence.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a size that the family refuses.
    pub fn n_rows(&self, width: u32, height: u32) -> Result<u32, Error> {
        Ok(self.inner.preprocess.layout(width, height)?.n_rows())
    }

    /// Memory of the weights and a pass over this many patches. Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Operand`] or [`Error::Shape`] if the pass exceeds the device's limits.
    pub fn plan(&self, n_patches: u32) -> Result<MemoryPlan, Error> {
        let pass = self.inner.record(n_patches, &mut Workspace::default())?;
        Ok(MemoryPlan::of([&pass.recording], self.inner.transformer.tensors()))
    }

    /// Number of dispatches of a pass over this many patches.
    ///
    /// # Errors
    /// As [`VisionEncoder::plan`].
    pub fn n_dispatches(&self, n_patches: u32) -> Result<usize, Error> {
        Ok(self.inner.record(n_patches, &mut Workspace::default())?.recording.n_dispatches())
    }

    /// The rows of a picture, computed unless they are at hand.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn encode(&self, picture: &Picture) -> Result<Arc<ImageEmbeddings>, Error> {
        let digest = self.inner.digest(picture);
        if let Some(known) = self.inner.state().pictures.get(&digest) {
            return Ok(known.clone());
        }
        let Prepared { tiles, layout } = self.inner.preprocess.prepare(picture)?;
        let mut rows = Vec::new();
        for patches in &tiles {
            rows.push(Arc::new(self.encode_patches(patches).await?));
        }
        let embeddings = Arc::new(ImageEmbeddings { tiles: rows, text: self.inner.preprocess.text(&layout) });
        self.inner.state().keep(digest, embeddings.clone(), KEPT_BYTES);
        Ok(embeddings)
    }

    /// The embedded patches and the output of each layer, `[n, C]` each, for inspection and tests.
    ///
    /// # Errors
    /// As [`VisionEncoder::encode_patches`].
    pub async fn trace(&self, patches: &Patches) -> Result<Vec<Vec<f32>>, Error> {
        let inner = &self.inner;
        inner.check(patches)?;
        inner.upload_weights()?;
        let io = inner.transformer.declare_patches(&inner.device.target(), patches.places.len() as u32)?;
        let record = || {
            let mut layers = Vec::new();
            let mut tap = |rec: &mut Recorder, h: &Tensor| {
                let kept = Tensor::declare("hidden", Role::Activations, h.shape(), DType::F32)?;
                scale(rec, h, &kept, 1.0)?;
                layers.push(kept);
                Ok(())
            };
            let mut rec = Recorder::new(inner.device.target());
            inner.transformer.record(&mut rec, &io, &mut tap)?;
            Ok((rec.finish(&mut Workspace::default()), layers))
        };
        let (recording, layers) = record_tested(&inner.device, record, |(recording, _)| recording).await?;
        {
            // Passes share the table of rotations.
            let _state = inner.state();
            inner.upload(&io, patches)?;
            inner.device.run(&recording)?;
        }
        let mut values = Vec::new();
        for tensor in &layers {
            values.push(inner.device.read(tensor).await?);
        }
        Ok(values)
    }

    /// The rows of a tile's patches.
    ///
    /// # Errors
    /// [`Error::Shape`] for patches of another size, [`Error::Operand`] for too many or for missing values; errors of
    /// the device.
    pub async fn encode_patches(&self, patches: &Patches) -> Result<ImageRows, Error> {
        let inner = &self.inner;
        let n = patches.places.len() as u32;
        inner.check(patches)?;
        inner.upload_weights()?;
        let pass = inner.tested(n).await?;
        let reads = {
            // Held until the reads are submitted, so that another picture's pass overwrites neither patches nor rows.
            let _state = inner.state();
            inner.upload(&pass.io, patches)?;
            inner.device.run(&pass.recording)?;
            let reads = pass.io.rows.iter().map(|rows| inner.device.start_read(rows));
            reads.collect::<Result<Vec<_>, Error>>()?
        };
        let mut rows = Vec::new();
        for (tensor, read) in pass.io.rows.iter().zip(reads) {
            let mut values: Vec<f32> = bytemuck::cast_vec(read.await?);
            values.truncate(tensor.len());
            if let Some(found) = values.iter().find(|value| !value.is_finite()) {
                let (expected, found) = ("finite numbers".into(), found.to_string());
                return Err(Error::Operand { kernel: "vision", operand: "rows", expected, found });
            }
            rows.push(values);
        }
        let merge = inner.preprocess.merge;
        let VisionConfig { row_dim, sees_all, has_grid, .. } = *self.config();
        let grid = has_grid.then(|| patches.grid.map(|n| n / merge));
        ImageRows::new((row_dim, sees_all), rows, grid)
    }
}

impl VisionState {
    /// Keeps a picture, and as many of those used last as fit beside it.
    fn keep(&mut self, digest: [u64; 2], embeddings: Arc<ImageEmbeddings>, max_bytes: usize) {
        self.pictures.put(digest, embeddings);
        let mut kept_bytes: usize = self.pictures.iter().map(|(_, picture)| picture.size_bytes()).sum();
        while kept_bytes > max_bytes && self.pictures.len() > 1 {
            kept_bytes -= self.pictures.pop_lru().map_or(0, |(_, picture)| picture.size_bytes());
        }
    }
}

impl VisionInner {
    fn state(&self) -> MutexGuard<'_, VisionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A digest of a picture's size and pixels, keyed by numbers that nobody knows: a cached picture answers for no other.
    fn digest(&self, picture: &Picture) -> [u64; 2] {
        self.digests.each_ref().map(|key| {
            let mut digest = key.build_hasher();
            digest.write_u32(picture.width());
            digest.write_u32(picture.height());
            digest.write(picture.rgb());
            digest.finish()
        })
    }

    fn check(&self, patches: &Patches) -> Result<(), Error> {
        let (n, patch_dim) = (patches.places.len(), self.transformer.config.patch_dim);
        let n_values = n as u64 * u64::from(patch_dim);
        let refused = |operand, expected: String, found: usize| {
            Err(Error::Operand { kernel: "vision", operand, expected, found: found.to_string() })
        };
        if n > self.max_patches as usize {
            return refused("patches", format!("at most {}", self.max_patches), n);
        }
        if patches.patch_dim != patch_dim {
            let [expected, found] = [patch_dim, patches.patch_dim].map(|dim| vec![n as u32, dim]);
            return Err(Error::Shape { kernel: "vision", operand: "patches", expected, found });
        }
        match patches.values.len() as u64 == n_values {
            true => Ok(()),
            false => refused("values", format!("{n_values} numbers"), patches.values.len()),
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

    /// The pass of a picture, after its self-test.
    async fn tested(&self, n_patches: u32) -> Result<Arc<RecordedPatches>, Error> {
        loop {
            let pass = self.pass(&mut self.state(), n_patches)?;
            if self_test(&self.device, &pass.recording).await? {
                return Ok(pass);
            }
            self.state().passes.pop(&n_patches);
        }
    }

    fn pass(&self, state: &mut VisionState, n_patches: u32) -> Result<Arc<RecordedPatches>, Error> {
        if let Some(pass) = state.passes.get(&n_patches) {
            return Ok(pass.clone());
        }
        let pass = Arc::new(self.record(n_patches, &mut state.workspace)?);
        state.passes.put(n_patches, pass.clone());
        Ok(pass)
    }

    fn record(&self, n_patches: u32, workspace: &mut Workspace) -> Result<RecordedPatches, Error> {
        let target = self.device.target();
        let io = self.transformer.declare_patches(&target, n_patches)?;
        let mut rec = Recorder::new(target);
        self.transformer.record(&mut rec, &io, &mut |_, _| Ok(()))?;
        Ok(RecordedPatches { io, recording: rec.finish(workspace) })
    }

    /// Uploads patches, with their numbers, rotations and positions.
    fn upload(&self, io: &PatchTensors, patches: &Patches) -> Result<(), Error> {
        let n = patches.places.len() as u32;
        let tokens: Vec<u32> = (0..n).flat_map(|number| [0, number, 0]).collect();
        self.device.write(&io.batch.tokens, 0, &tokens)?;
        io.batch.set_lengths(&self.device, &[[n, n]])?;
        self.device.write(&io.patches, 0, &patches.values)?;
        let ones = |tensor: &Tensor| self.device.write(tensor, 0, &vec![1f32; tensor.len()]);
        self.transformer.ones().try_for_each(ones)?;
        let merge = self.preprocess.merge;
        if let (Some(table), Some((axes, base))) = (self.transformer.angles(), self.places.rope) {
            let angles = grid_angles(patches.grid, merge, 2 * table.shape()[1], base, axes)?;
            self.device.write(table, 0, angles.as_flattened())?;
        }
        if let (Some(tensor), Some(learned)) = (&io.positions, self.places.learned) {
            let dim = self.transformer.config.encoder.dim as usize;
            let rows = match learned {
                Learned::Square(how) => interpolate(&self.positions, dim, patches.grid, merge, how)?,
                Learned::Axes => {
                    let (columns, rows) = self.positions.split_at(self.positions.len() / 2);
                    add_axes(columns, rows, dim, &patches.places)?
                }
            };
            self.device.write(tensor, 0, &rows)?;
        }
        if let Some(neighbours) = &io.batch.neighbours {
            let side = neighbours.shape()[1].isqrt();
            self.device.write(neighbours, 0, &grid_neighbours(patches.grid, &patches.places, side))?;
        }
        if let Some(MeanTensors { spans, standard }) = &io.means {
            let n_joined = self.transformer.config.projector.n_patches;
            let ends: Vec<u32> = (0..n / n_joined).flat_map(|row| [row * n_joined, (row + 1) * n_joined]).collect();
            self.device.write(spans, 0, &ends)?;
            if let Some([bias, inverse]) = standard {
                let n_rows = (n / n_joined) as usize;
                let [biases, scales] = &self.standard;
                let negated: Vec<f32> = biases.iter().map(|bias| -bias).collect();
                self.device.write(bias, 0, &negated.repeat(n_rows))?;
                self.device.write(inverse, 0, &scales.repeat(n_rows))?;
            }
        }
        Ok(())
    }
}

impl Loader<VisionEncoder> {
    /// The encoder, once no more bytes are wanted.
    ///
    /// # Errors
    /// [`Error::Config`] if bytes are still wanted; errors of the device.
    pub async fn finish(self) -> Result<VisionEncoder, Error> {
        let (encoder, device) = self.loaded()?;
        device.drained().await?;
        Ok(encoder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_are_kept_up_to_a_size() {
        let weights = None;
        let (passes, pictures) = (LruCache::new(KEPT_PASSES), LruCache::new(KEPT_PICTURES));
        let mut state = VisionState { passes, workspace: Workspace::default(), weights, pictures };
        let picture = |n: usize| {
            let rows = ImageRows::new((2, false), vec![vec![0.0; 2 * n]; 3], None).unwrap();
            Arc::new(ImageEmbeddings { tiles: vec![Arc::new(rows)], text: Vec::new() })
        };
        assert_eq!(picture(5).size_bytes(), 5 * 2 * 3 * 4);
        for i in 0..4 {
            state.keep([i; 2], picture(5), 360);
        }
        let kept = |state: &VisionState| state.pictures.iter().map(|(digest, _)| digest[0]).collect::<Vec<_>>();
        assert_eq!(kept(&state), [3, 2, 1]);
        state.pictures.get(&[1; 2]);
        state.keep([4; 2], picture(10), 360);
        assert_eq!(kept(&state), [4, 1]);
        state.keep([5; 2], picture(100), 360);
        assert_eq!(kept(&state), [5]);
    }
}
