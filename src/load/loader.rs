//! Loads models incrementally from arriving bytes, as over a network.

use super::tensor_index::NeededRange;
use super::{FileName, Head, HeaderReader, ModelHeader, SpeechFile, VisionFile, WeightUploader};
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
    files: Vec<FileName>,
    stage: LoadStage<T>,
    /// Bytes uploaded since the last wait for the device.
    in_flight_bytes: u64,
}

/// Declares the model from its headers, with the heads of its weight files.
#[cfg(not(target_arch = "wasm32"))]
type Declare<T> = Box<dyn FnOnce(&Device, HeaderReader) -> Result<(T, WeightUploader, Vec<Head>), Error> + Send>;
#[cfg(target_arch = "wasm32")]
type Declare<T> = Box<dyn FnOnce(&Device, HeaderReader) -> Result<(T, WeightUploader, Vec<Head>), Error>>;

enum LoadStage<T> {
    Header(Box<HeaderReader>, Declare<T>),
    Weights(Box<WeightUpload<T>>),
    /// Terminal state after an error.
    Failed,
}

struct WeightUpload<T> {
    declared: T,
    feed: WeightUploader,
    heads: Vec<Head>,
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
        let stage = LoadStage::Header(Box::new(reader(files.clone())?), Box::new(declare));
        Ok(Loader { device: device.clone(), files, stage, in_flight_bytes: 0 })
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
        if let LoadStage::Header(reader, _) = &mut self.stage {
            reader.set_folder(name);
        }
    }

    /// Number and offset of the next bytes wanted. Offsets within a file grow, except for one step back from the
    /// headers of several files, or those among the weights of whisper.cpp's, to the weights.
    pub fn wanted(&self) -> Option<(usize, u64)> {
        match &self.stage {
            LoadStage::Header(reader, _) => reader.wanted(),
            LoadStage::Weights(weights) => weights.wanted(),
            LoadStage::Failed => None,
        }
    }

    /// Pushes bytes at the wanted offset, any number. Waits for the device if too many uploads are pending.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and its invalid part, [`Error::Memory`] above the limit,
    /// [`Error::Unsupported`] for another kind of model, errors of [`Device::write`]. The loader is then unusable.
    pub async fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        /// Bytes of weights between checks of pending uploads; unsupported types may expand sixteenfold.
        const PIECE: usize = 1 << 20;
        let wanted = match &self.stage {
            LoadStage::Weights(weights) => weights.feed.wanted(),
            LoadStage::Header(..) | LoadStage::Failed => None,
        };
        let Some(NeededRange { file, offset, .. }) = wanted else {
            let pushed = self.push_header(bytes);
            self.keep(pushed)?;
            return self.settle().await;
        };
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            let LoadStage::Weights(weights) = &mut self.stage else { break };
            let fed = weights.feed.take(&self.device, file, offset + (i * PIECE) as u64, piece);
            self.keep(fed)?;
            self.settle().await?;
        }
        Ok(())
    }

    /// Waits for the device if too many uploads are pending.
    async fn settle(&mut self) -> Result<(), Error> {
        /// Limit of pending uploads in bytes.
        const MAX_IN_FLIGHT: u64 = 32 << 20;
        if let LoadStage::Weights(weights) = &mut self.stage {
            self.in_flight_bytes += weights.feed.take_uploaded();
        }
        if self.in_flight_bytes >= MAX_IN_FLIGHT {
            self.in_flight_bytes = 0;
            let drained = self.device.drained().await;
            self.keep(drained)?;
        }
        Ok(())
    }

    /// Marks the end of the wanted file.
    ///
    /// # Errors
    /// [`Error::Truncated`] if more bytes are needed; as [`Loader::push`].
    pub fn end(&mut self) -> Result<(), Error> {
        let ended = match &mut self.stage {
            LoadStage::Header(reader, _) => reader.end(),
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
        self.keep(ended)?;
        let begun = self.begin_weights();
        self.keep(begun)
    }

    /// Bytes of weights pushed, and their total; zeros before the headers are read.
    pub fn progress(&self) -> (u64, u64) {
        match &self.stage {
            LoadStage::Weights(weights) => weights.feed.progress(),
            LoadStage::Header(..) | LoadStage::Failed => (0, 0),
        }
    }

    /// See [`WeightUploader::digest`]; zero before the headers are read.
    pub(crate) fn digest(&self) -> u64 {
        match &self.stage {
            LoadStage::Weights(weights) => weights.feed.digest(),
            LoadStage::Header(..) | LoadStage::Failed => 0,
        }
    }

    /// The device with its tuning.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The declared model, loaded or not; `None` before the headers are read.
    pub(crate) fn declared(&self) -> Option<&T> {
        match &self.stage {
            LoadStage::Weights(weights) => Some(&weights.declared),
            LoadStage::Header(..) | LoadStage::Failed => None,
        }
    }

    /// The loaded model and the device, once no more bytes are wanted.
    ///
    /// # Errors
    /// [`Error::Config`] if bytes are still wanted.
    pub(crate) fn loaded(self) -> Result<(T, Device), Error> {
        match self.stage {
            LoadStage::Weights(weights) if weights.feed.wanted().is_none() => Ok((weights.declared, self.device)),
            _ => Err(Error::Config {
                field: "files".into(),
                expected: "all bytes that the loader wants".into(),
                found: "incomplete".into(),
            }),
        }
    }

    fn push_header(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let LoadStage::Header(reader, _) = &mut self.stage else { return Ok(()) };
        reader.push(bytes)?;
        self.begin_weights()
    }

    /// Proceeds from headers to weights once the headers are complete.
    fn begin_weights(&mut self) -> Result<(), Error> {
        if !matches!(&self.stage, LoadStage::Header(reader, _) if reader.wanted().is_none()) {
            return Ok(());
        }
        let LoadStage::Header(reader, declare) = std::mem::replace(&mut self.stage, LoadStage::Failed) else {
            return Ok(());
        };
        let (declared, feed, heads) = declare(&self.device, *reader)?;
        let mut weights = WeightUpload { declared, feed, heads };
        for file in 0..weights.heads.len() {
            let head = std::mem::take(&mut weights.heads[file].bytes);
            weights.feed.take(&self.device, file, 0, &head)?;
        }
        self.stage = LoadStage::Weights(Box::new(weights));
        Ok(())
    }

    /// On error enters the terminal state, which frees all memory.
    fn keep(&mut self, result: Result<(), Error>) -> Result<(), Error> {
        if result.is_err() {
            self.stage = LoadStage::Failed;
        }
        result
    }
}

impl<T> WeightUpload<T> {
    fn wanted(&self) -> Option<(usize, u64)> {
        let wanted = self.feed.wanted()?;
        Some((self.heads.get(wanted.file)?.file, wanted.offset))
    }
}
