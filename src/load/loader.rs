//! Loads models incrementally from arriving bytes, as over a network.

use super::tensor_index::NeededRange;
use super::{FileName, Head, HeaderReader, ImageEncoderFile, ModelHeader, SpeechFile, VisionFile, WeightUploader};
use crate::device::Device;
use crate::error::Error;
use crate::platform::MaybeSend;

/// Uploads a model's files to a device as their bytes arrive, buffering only headers and one row. `T` is a
/// [`Model`](crate::Model), an [`Embedder`](crate::Embedder), a [`Reranker`](crate::Reranker), a
/// [`VisionEncoder`](crate::VisionEncoder) or a `Transcriber`; each creates its loader with `loader`.
///
/// The files are one GGUF file, all shards of one in order, one of whisper.cpp, or a Hugging Face folder's. Push the bytes that
/// [`Loader::wanted`] asks for until it returns `None`, then call `finish`.
pub struct Loader<T> {
    pub(crate) device: Device,
    upload: Upload,
    of: Declared<T>,
}

/// The part of a loader that all kinds of models share, so that it is compiled once.
struct Upload {
    files: Vec<FileName>,
    stage: LoadStage,
    /// Bytes uploaded since the last wait for the device.
    in_flight_bytes: u64,
}

enum LoadStage {
    Header(Box<HeaderReader>),
    Weights(Box<WeightUpload>),
    /// Terminal state after an error.
    Failed,
}

struct WeightUpload {
    feed: WeightUploader,
    heads: Vec<Head>,
}

/// Declares the model from its headers, with the heads of its weight files.
#[cfg(not(target_arch = "wasm32"))]
type Declare<T> = Box<dyn FnOnce(&Device, HeaderReader) -> Result<(T, WeightUploader, Vec<Head>), Error> + Send>;
#[cfg(target_arch = "wasm32")]
type Declare<T> = Box<dyn FnOnce(&Device, HeaderReader) -> Result<(T, WeightUploader, Vec<Head>), Error>>;

/// A model that is declared once its headers are read.
enum Declared<T> {
    Not(Option<Declare<T>>),
    Is(T),
}

/// Declares a model of some kind.
trait DeclareModel: MaybeSend {
    fn declare(&mut self, device: &Device, reader: HeaderReader) -> Result<Option<WeightUpload>, Error>;

    /// Frees what was declared.
    fn forget(&mut self);
}

impl<T: MaybeSend> DeclareModel for Declared<T> {
    fn declare(&mut self, device: &Device, reader: HeaderReader) -> Result<Option<WeightUpload>, Error> {
        let Declared::Not(declare) = self else { return Ok(None) };
        let Some(declare) = declare.take() else { return Ok(None) };
        let (declared, feed, heads) = declare(device, reader)?;
        *self = Declared::Is(declared);
        Ok(Some(WeightUpload { feed, heads }))
    }

    fn forget(&mut self) {
        *self = Declared::Not(None);
    }
}

impl<T> Loader<T> {
    /// A loader of these files; `declare` creates the model after their headers are read.
    ///
    /// # Errors
    /// [`Error::Config`] if there are no files.
    pub(crate) fn new(
        device: &Device,
        files: Vec<FileName>,
        declare: impl FnOnce(&Device, ModelHeader, &[usize]) -> Result<(T, WeightUploader), Error> + MaybeSend + 'static,
    ) -> Result<Loader<T>, Error> {
        let declare = move |device: &Device, reader: HeaderReader| {
            let (header, heads) = reader.finish()?;
            let numbers: Vec<usize> = heads.iter().map(|head| head.file).collect();
            declare(device, header, &numbers).map(|(declared, feed)| (declared, feed, heads))
        };
        Loader::reading(device, files, HeaderReader::new, declare)
    }

    /// A loader of these files; `declare` creates the model from their headers, with the heads of its weight files.
    fn reading(
        device: &Device,
        files: Vec<FileName>,
        reader: impl FnOnce(Vec<FileName>) -> Result<HeaderReader, Error>,
        declare: impl FnOnce(&Device, HeaderReader) -> Result<(T, WeightUploader, Vec<Head>), Error> + MaybeSend + 'static,
    ) -> Result<Loader<T>, Error> {
        let stage = LoadStage::Header(Box::new(reader(files.clone())?));
        let upload = Upload { files, stage, in_flight_bytes: 0 };
        Ok(Loader { device: device.clone(), upload, of: Declared::Not(Some(Box::new(declare))) })
    }

    /// A loader of an encoder's files, and those of the image encoder in its folder; `declare` gets that, or why there
    /// is none.
    ///
    /// # Errors
    /// [`Error::Config`] if there are no files.
    pub(crate) fn of_encoders(
        device: &Device,
        files: Vec<FileName>,
        declare: impl FnOnce(&Device, ModelHeader, Result<ImageEncoderFile, Error>) -> Result<(T, WeightUploader), Error>
        + MaybeSend
        + 'static,
    ) -> Result<Loader<T>, Error> {
        let declare = move |device: &Device, reader: HeaderReader| {
            let (header, images, heads) = reader.finish_encoders()?;
            declare(device, header, images).map(|(declared, feed)| (declared, feed, heads))
        };
        Loader::reading(device, files, HeaderReader::of_encoders, declare)
    }

    /// A loader of a vision encoder's files.
    ///
    /// # Errors
    /// [`Error::Config`] if there are no files, or several GGUF files.
    pub(crate) fn of_vision(
        device: &Device,
        files: Vec<FileName>,
        declare: impl FnOnce(&Device, VisionFile) -> Result<(T, WeightUploader), Error> + MaybeSend + 'static,
    ) -> Result<Loader<T>, Error> {
        let declare = move |device: &Device, reader: HeaderReader| {
            let (file, heads) = reader.finish_vision()?;
            declare(device, file).map(|(declared, feed)| (declared, feed, heads))
        };
        Loader::reading(device, files, HeaderReader::of_vision, declare)
    }

    /// A loader of a speech model's files.
    ///
    /// # Errors
    /// [`Error::Config`] if there are no files, or several files of whisper.cpp.
    pub(crate) fn of_speech(
        device: &Device,
        files: Vec<FileName>,
        declare: impl FnOnce(&Device, SpeechFile) -> Result<(T, WeightUploader), Error> + MaybeSend + 'static,
    ) -> Result<Loader<T>, Error> {
        let declare = move |device: &Device, reader: HeaderReader| {
            let (file, heads) = reader.finish_speech()?;
            declare(device, file).map(|(declared, feed)| (declared, feed, heads))
        };
        Loader::reading(device, files, HeaderReader::of_speech, declare)
    }

    /// Sets the folder's name, which becomes the name of a Hugging Face model (default `model`). Call it before the
    /// first push.
    pub fn set_folder(&mut self, name: &str) {
        if let LoadStage::Header(reader) = &mut self.upload.stage {
            reader.set_folder(name);
        }
    }

    /// Number and offset of the next bytes wanted. Offsets within a file grow, except for one step back from the
    /// headers of several files, or those among the weights of whisper.cpp's, to the weights.
    pub fn wanted(&self) -> Option<(usize, u64)> {
        self.upload.wanted()
    }

    /// Bytes of weights pushed, and their total; zeros before the headers are read.
    pub fn progress(&self) -> (u64, u64) {
        self.upload.feed().map_or((0, 0), WeightUploader::progress)
    }

    /// See [`WeightUploader::digest`]; zero before the headers are read.
    pub(crate) fn digest(&self) -> u64 {
        self.upload.feed().map_or(0, WeightUploader::digest)
    }

    /// The device with its tuning.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The declared model, loaded or not; `None` before the headers are read.
    pub(crate) fn declared(&self) -> Option<&T> {
        match &self.of {
            Declared::Is(declared) => Some(declared),
            Declared::Not(_) => None,
        }
    }

    /// The loaded model and the device, once no more bytes are wanted.
    ///
    /// # Errors
    /// [`Error::Config`] if bytes are still wanted.
    pub(crate) fn loaded(self) -> Result<(T, Device), Error> {
        match self.of {
            Declared::Is(declared) if self.upload.feed().is_some_and(|feed| feed.wanted().is_none()) => {
                Ok((declared, self.device))
            }
            _ => Err(Error::Config {
                field: "files".into(),
                expected: "all bytes that the loader wants".into(),
                found: "incomplete".into(),
            }),
        }
    }
}

#[expect(private_bounds, reason = "it is `Send` natively, and nothing in browsers")]
impl<T: MaybeSend> Loader<T> {
    /// Pushes bytes at the wanted offset, any number. Waits for the device if too many uploads are pending.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part, [`Error::Memory`] above the limit,
    /// [`Error::Unsupported`] for another kind of model, errors of [`Device::write`]. The loader is then unusable.
    pub fn push(&mut self, bytes: &[u8]) -> impl Future<Output = Result<(), Error>> {
        self.upload.push(&self.device, &mut self.of, bytes)
    }

    /// Marks the end of the wanted file.
    ///
    /// # Errors
    /// [`Error::Truncated`] if more bytes are needed; as [`Loader::push`].
    pub fn end(&mut self) -> Result<(), Error> {
        self.upload.end(&self.device, &mut self.of)
    }
}

impl Upload {
    /// The weights' feed, once the headers are read.
    fn feed(&self) -> Option<&WeightUploader> {
        match &self.stage {
            LoadStage::Weights(weights) => Some(&weights.feed),
            LoadStage::Header(_) | LoadStage::Failed => None,
        }
    }

    fn wanted(&self) -> Option<(usize, u64)> {
        match &self.stage {
            LoadStage::Header(reader) => reader.wanted(),
            LoadStage::Weights(weights) => weights.wanted(),
            LoadStage::Failed => None,
        }
    }

    async fn push(&mut self, device: &Device, of: &mut dyn DeclareModel, bytes: &[u8]) -> Result<(), Error> {
        /// Bytes of weights between checks of pending uploads; unsupported types may expand sixteenfold.
        const PIECE: usize = 1 << 20;
        let Some(NeededRange { file, offset, .. }) = self.feed().and_then(WeightUploader::wanted) else {
            let pushed = self.push_header(device, of, bytes);
            self.keep(of, pushed)?;
            return self.settle(device, of).await;
        };
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            let LoadStage::Weights(weights) = &mut self.stage else { break };
            let fed = weights.feed.take(device, file, offset + (i * PIECE) as u64, piece);
            self.keep(of, fed)?;
            self.settle(device, of).await?;
        }
        Ok(())
    }

    /// Waits for the device if too many uploads are pending.
    async fn settle(&mut self, device: &Device, of: &mut dyn DeclareModel) -> Result<(), Error> {
        /// Limit of pending uploads in bytes.
        const MAX_IN_FLIGHT: u64 = 32 << 20;
        if let LoadStage::Weights(weights) = &mut self.stage {
            self.in_flight_bytes += weights.feed.take_uploaded();
        }
        if self.in_flight_bytes >= MAX_IN_FLIGHT {
            self.in_flight_bytes = 0;
            let drained = device.drained().await;
            self.keep(of, drained)?;
        }
        Ok(())
    }

    fn end(&mut self, device: &Device, of: &mut dyn DeclareModel) -> Result<(), Error> {
        let ended = match &mut self.stage {
            LoadStage::Header(reader) => reader.end(),
            LoadStage::Weights(weights) => match (weights.wanted(), weights.feed.wanted()) {
                (Some((file, offset)), Some(wanted)) => {
                    let (part, needed_bytes) = ("a tensor".into(), offset + wanted.len);
                    let error = Error::Truncated { part, needed_bytes, found_bytes: offset };
                    Err(error.in_file(&self.files[file].name))
                }
                _ => Ok(()),
            },
            LoadStage::Failed => Ok(()),
        };
        self.keep(of, ended)?;
        let begun = self.begin_weights(device, of);
        self.keep(of, begun)
    }

    fn push_header(&mut self, device: &Device, of: &mut dyn DeclareModel, bytes: &[u8]) -> Result<(), Error> {
        let LoadStage::Header(reader) = &mut self.stage else { return Ok(()) };
        reader.push(bytes)?;
        self.begin_weights(device, of)
    }

    /// Proceeds from headers to weights once the headers are complete.
    fn begin_weights(&mut self, device: &Device, of: &mut dyn DeclareModel) -> Result<(), Error> {
        if !matches!(&self.stage, LoadStage::Header(reader) if reader.wanted().is_none()) {
            return Ok(());
        }
        let LoadStage::Header(reader) = std::mem::replace(&mut self.stage, LoadStage::Failed) else {
            return Ok(());
        };
        let Some(mut weights) = of.declare(device, *reader)? else { return Ok(()) };
        for file in 0..weights.heads.len() {
            let head = std::mem::take(&mut weights.heads[file].bytes);
            weights.feed.take(device, file, 0, &head)?;
        }
        self.stage = LoadStage::Weights(Box::new(weights));
        Ok(())
    }

    /// On error enters the terminal state, which frees all memory.
    fn keep(&mut self, of: &mut dyn DeclareModel, result: Result<(), Error>) -> Result<(), Error> {
        if result.is_err() {
            self.stage = LoadStage::Failed;
            of.forget();
        }
        result
    }
}

impl WeightUpload {
    fn wanted(&self) -> Option<(usize, u64)> {
        let wanted = self.feed.wanted()?;
        Some((self.heads.get(wanted.file)?.file, wanted.offset))
    }
}
