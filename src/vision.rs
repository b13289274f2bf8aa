//! Vision encoders on a device: pictures to rows for a text model.
//!
//! The host cuts a picture into patches (`picture/prepare.rs`), uploads them with their rotation and learned positions,
//! and reads the rows back. Rows stay on the host, by the picture's digest: a pass of the text model uploads those of
//! its tokens, wherever it runs, and a conversation's later turns compute no picture again.

mod kept;
mod patches;
#[cfg(feature = "chat")]
mod place;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::device::Device;
use crate::error::Error;
use crate::load::{FileName, Loader, VisionFile, WeightUploader};
use crate::model::{RowAttention, VisionConfig};
use crate::picture::{Family, Patches, Picture, Prepared, Preprocess, TextPart};
use crate::recording::MemoryPlan;

pub(crate) use kept::KeptRows;
pub(crate) use patches::{HostValues, PatchEncoder};
#[cfg(feature = "chat")]
pub(crate) use place::{Inputs, place_rows};

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
    patches: PatchEncoder,
    preprocess: Preprocess,
    kept: KeptRows,
}

/// The rows that a picture contributes to a sequence, and the text around them. A sound's are of the same kind, one
/// tile.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageEmbeddings {
    /// Rows of each tile, in order.
    pub tiles: Vec<Arc<ImageRows>>,
    /// Replaces the placeholder in a prompt: [`Family::placeholder`].
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

/// Consecutive rows of a sequence, of an image or of a sound.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageRows {
    /// D, the text model's width.
    pub dim: u32,
    /// `[n, D]`: those in place of token embeddings, then those that are added after the text model's first layers.
    pub rows: Vec<Vec<f32>>,
    /// Rows and columns of M-RoPE, whose product is n; `None` for positions like those of tokens.
    pub grid: Option<[u32; 2]>,
    /// Which rows see each other in the text model.
    pub attention: RowAttention,
    /// Ids that stand for the rows in a sequence: no others do as long as the program runs.
    pub ids: Range<u32>,
}

impl ImageRows {
    /// Rows with new ids.
    ///
    /// # Errors
    /// [`Error::Operand`] after 2^31 rows.
    fn new(
        (dim, attention): (u32, RowAttention),
        rows: Vec<Vec<f32>>,
        grid: Option<[u32; 2]>,
    ) -> Result<ImageRows, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(FIRST_ROW_ID);
        let n = rows.first().map_or(0, |rows| rows.len() / dim.max(1) as usize) as u32;
        let first = NEXT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |first| first.checked_add(n));
        let first = first.map_err(|_| Error::Operand {
            kernel: "vision",
            operand: "rows",
            expected: format!("at most {FIRST_ROW_ID} in the life of a program"),
            found: "more".into(),
        })?;
        Ok(ImageRows { dim, rows, grid, attention, ids: first..first + n })
    }

    /// Rows for further layers, and which rows see each other: images alike in both share recorded passes.
    pub(crate) fn kind(&self) -> (usize, RowAttention) {
        (self.rows.len().saturating_sub(1), self.attention)
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
        encoder.inner.patches.upload_later(uploader, files);
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
        let host = HostValues { merge: preprocess.merge, places, positions, standard };
        let (patches, uploader) = PatchEncoder::declare(device, (config, &tensor_index), host, max_patches)?;
        let inner = VisionInner { patches, preprocess, kept: KeptRows::new() };
        Ok((VisionEncoder { inner: Arc::new(inner) }, uploader))
    }

    /// The encoder's shape.
    pub fn config(&self) -> &VisionConfig {
        self.inner.patches.config()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.inner.patches.device()
    }

    /// The family of models, which says what stands for a picture in a prompt.
    pub fn family(&self) -> Family {
        self.inner.preprocess.family
    }

    /// Patches of a tile at most, or of a picture, where it is one tile.
    pub fn max_patches(&self) -> u32 {
        self.inner.patches.max_patches()
    }

    /// Rows of a tile at most; those of a picture, where it is one tile.
    pub fn max_rows(&self) -> u32 {
        self.max_patches() / self.config().projector.n_patches
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
        self.inner.patches.plan(n_patches)
    }

    /// Number of dispatches of a pass over this many patches.
    ///
    /// # Errors
    /// As [`VisionEncoder::plan`].
    pub fn n_dispatches(&self, n_patches: u32) -> Result<usize, Error> {
        self.inner.patches.n_dispatches(n_patches)
    }

    /// The rows of a picture, computed unless they are at hand.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn encode(&self, picture: &Picture) -> Result<Arc<ImageEmbeddings>, Error> {
        let VisionInner { preprocess, kept, .. } = &*self.inner;
        let digest = kept.digest(|digest| {
            digest.write_u32(picture.width());
            digest.write_u32(picture.height());
            digest.write(picture.rgb());
        });
        if let Some(known) = kept.get(digest) {
            return Ok(known);
        }
        let Prepared { tiles, layout } = preprocess.prepare(picture)?;
        let mut rows = Vec::new();
        for patches in &tiles {
            rows.push(Arc::new(self.encode_patches(patches).await?));
        }
        let embeddings = Arc::new(ImageEmbeddings { tiles: rows, text: preprocess.text(&layout) });
        kept.keep(digest, embeddings.clone());
        Ok(embeddings)
    }

    /// The embedded patches and the output of each layer, `[n, C]` each, for inspection and tests.
    ///
    /// # Errors
    /// As [`VisionEncoder::encode_patches`].
    pub async fn trace(&self, patches: &Patches) -> Result<Vec<Vec<f32>>, Error> {
        self.inner.patches.trace(patches).await
    }

    /// The rows of a tile's patches.
    ///
    /// # Errors
    /// [`Error::Shape`] for patches of another size, [`Error::Operand`] for too many or for missing values; errors of
    /// the device.
    pub async fn encode_patches(&self, patches: &Patches) -> Result<ImageRows, Error> {
        self.inner.patches.encode(patches).await
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
