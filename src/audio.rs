//! Sounds to rows for a text model, without an encoder: frames of samples go through a norm and a product, as patches
//! of pictures do in models without a tower. Rows stay on the host, by the sound's digest.

use std::path::Path;
use std::sync::Arc;

use crate::device::Device;
use crate::error::Error;
use crate::load::{AudioFile, AudioTokens, PatchPlaces};
use crate::model::VisionConfig;
use crate::picture::{Patches, TextPart};
use crate::recording::MemoryPlan;
use crate::sound::Sound;
#[cfg(feature = "sound-files")]
use crate::sound::SoundLimits;
use crate::vision::{HostValues, ImageEmbeddings, KeptRows, PatchEncoder};

/// An encoder of sounds for a text model, on a device: it makes rows of them. Its weights are uploaded for the first
/// sound. Clones share them.
///
/// ```no_run
/// use tilewright::chat::Message;
/// use tilewright::sound::Sound;
/// use tilewright::{AudioEncoder, ChatModel, ChatRequest, Device, LoadOptions, Model};
///
/// # pollster::block_on(async {
/// let device = Device::auto().await;
/// let encoder = AudioEncoder::load(&device, "gemma-4-12B/mmproj-F16.gguf")?;
/// let model = Model::load(&device, "gemma-4-12B/model-Q4_K_M.gguf", LoadOptions::default())?.with_audio(encoder)?;
/// // With the feature `sound-files`, `Sound::decode_at` reads files.
/// let sound = Sound::new(16_000, 1, &[0.0; 16_000])?;
/// let sound = model.audio().expect("an encoder").encode(&sound).await?;
/// let message = Message::with_sounds("user", 1, "What is said?");
/// let request = ChatRequest { sounds: vec![sound], ..ChatRequest::new(vec![message]) };
/// let answer = ChatModel::new(&model)?.answer(&mut model.session()?, &request).await?;
/// println!("{}", answer.text);
/// # Ok::<(), tilewright::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct AudioEncoder {
    inner: Arc<AudioInner>,
}

struct AudioInner {
    frames: PatchEncoder,
    rate: u32,
    tokens: AudioTokens,
    kept: KeptRows,
}

impl AudioEncoder {
    /// Loads the part for sound of a Hugging Face folder, or of a GGUF file (`mmproj`).
    ///
    /// # Errors
    /// Those of [`AudioFile::open`] and [`AudioEncoder::from_file`].
    pub fn load(device: &Device, path: impl AsRef<Path>) -> Result<AudioEncoder, Error> {
        let path = path.as_ref();
        AudioEncoder::from_file(device, AudioFile::open(path)?).map_err(|e| e.in_model_file(path))
    }

    /// Prepares the part for sound, whose weights are uploaded for the first one.
    ///
    /// # Errors
    /// [`Error::Config`] if a weight is missing or has another shape.
    pub fn from_file(device: &Device, file: AudioFile) -> Result<AudioEncoder, Error> {
        let AudioFile { config, rate, max_rows, tokens, tensor_index, files } = file;
        let places = PatchPlaces { learned: None, rope: None };
        let host = HostValues { merge: 1, places, positions: Vec::new(), standard: Default::default() };
        let (frames, uploader) = PatchEncoder::declare(device, (config, &tensor_index), host, max_rows)?;
        frames.upload_later(uploader, files);
        Ok(AudioEncoder { inner: Arc::new(AudioInner { frames, rate, tokens, kept: KeptRows::new() }) })
    }

    /// Its shape.
    pub fn config(&self) -> &VisionConfig {
        self.inner.frames.config()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.inner.frames.device()
    }

    /// Samples in a second.
    pub fn rate(&self) -> u32 {
        self.inner.rate
    }

    /// Rows of a sound at most.
    pub fn max_rows(&self) -> u32 {
        self.inner.frames.max_patches()
    }

    /// Seconds of a sound at most.
    pub fn max_seconds(&self) -> f64 {
        f64::from(self.max_rows()) * f64::from(self.config().patch_dim) / f64::from(self.rate())
    }

    /// Limits on the files of its sounds.
    #[cfg(feature = "sound-files")]
    pub fn limits(&self) -> SoundLimits {
        SoundLimits { max_bytes: 256 << 20, max_seconds: self.max_seconds(), ..SoundLimits::default() }
    }

    /// Number of rows that a sound takes in a sequence.
    ///
    /// # Errors
    /// [`Error::Operand`] for a sound at another rate, without samples or longer than [`AudioEncoder::max_seconds`].
    pub fn n_rows(&self, sound: &Sound) -> Result<u32, Error> {
        let refused = |operand, expected, found: String| Error::Operand { kernel: "audio", operand, expected, found };
        if sound.rate() != self.rate() {
            let expected = format!("{} samples in a second", self.rate());
            return Err(refused("rate", expected, sound.rate().to_string()));
        }
        let (n, frame) = (sound.samples().len() as u64, u64::from(self.config().patch_dim));
        let most = u64::from(self.max_rows()) * frame;
        match (1..=most).contains(&n) {
            true => Ok(n.div_ceil(frame) as u32),
            false => {
                let expected = format!("1 to {most} ({} seconds)", self.max_seconds());
                Err(refused("number of samples", expected, n.to_string()))
            }
        }
    }

    /// Memory of the weights and a pass over so many rows. Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Operand`] or [`Error::Shape`] if the pass exceeds the device's limits.
    pub fn plan(&self, n_rows: u32) -> Result<MemoryPlan, Error> {
        self.inner.frames.plan(n_rows)
    }

    /// The rows of a sound, computed unless they are at hand. The last frame is padded with zeros.
    ///
    /// # Errors
    /// As [`AudioEncoder::n_rows`]; errors of the device.
    pub async fn encode(&self, sound: &Sound) -> Result<Arc<ImageEmbeddings>, Error> {
        let n = self.n_rows(sound)?;
        let AudioInner { frames, tokens, kept, .. } = &*self.inner;
        let (samples, dim) = (sound.samples(), frames.config().patch_dim);
        let digest = kept.digest(|digest| digest.write(bytemuck::cast_slice(samples)));
        if let Some(known) = kept.get(digest) {
            return Ok(known);
        }
        let mut values = samples.to_vec();
        values.resize(n as usize * dim as usize, 0.0);
        let places = (0..n).map(|row| [row, 0]).collect();
        let patches = Patches { values, patch_dim: dim, grid: [n, 1], places };
        let rows = TextPart::Rows { tile: 0, count: n };
        let [begin, end] = [tokens.begin, tokens.end].map(|text| TextPart::Text(text.into()));
        let tiles = vec![Arc::new(frames.encode(&patches).await?)];
        let embeddings = Arc::new(ImageEmbeddings { tiles, text: vec![begin, rows, end] });
        kept.keep(digest, embeddings.clone());
        Ok(embeddings)
    }

    /// A sound in the text of a chat template.
    #[cfg(all(feature = "answer", feature = "chat"))]
    pub(crate) fn placeholder(&self) -> &'static str {
        self.inner.tokens.placeholder
    }
}
