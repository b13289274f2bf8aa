//! Loads models incrementally from arriving bytes, as over a network.

use super::catalog::Wanted;
use super::{Feed, FileName, Head, HeaderReader, ModelHeader};
use crate::device::Device;
use crate::error::Error;
use crate::platform::MaybeSend;

/// Uploads a model's files to a device as their bytes arrive, buffering only headers and one row. `T` is a
/// [`Model`](crate::Model), an [`Embedder`](crate::Embedder) or a [`Reranker`](crate::Reranker); each creates its
/// loader with `loader`.
///
/// The files are one GGUF file, all shards of one in order, or a Hugging Face folder's. Push the bytes that
/// [`Loader::wanted`] asks for until it returns `None`, then call `finish`.
pub struct Loader<T> {
    pub(crate) device: Device,
    files: Vec<FileName>,
    stage: Stage<T>,
    /// Bytes uploaded since the last wait for the device.
    in_flight_bytes: u64,
}

/// Declares the model from its header and the numbers of its weight files.
#[cfg(not(target_arch = "wasm32"))]
type Declare<T> = Box<dyn FnOnce(&Device, ModelHeader, &[usize]) -> Result<(T, Feed), Error> + Send>;
#[cfg(target_arch = "wasm32")]
type Declare<T> = Box<dyn FnOnce(&Device, ModelHeader, &[usize]) -> Result<(T, Feed), Error>>;

enum Stage<T> {
    Header(Box<HeaderReader>, Declare<T>),
    Weights(Box<Weights<T>>),
    /// Terminal state after an error.
    Failed,
}

struct Weights<T> {
    declared: T,
    feed: Feed,
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
        declare: impl FnOnce(&Device, ModelHeader, &[usize]) -> Result<(T, Feed), Error> + MaybeSend + 'static,
    ) -> Result<Loader<T>, Error> {
        let stage = Stage::Header(Box::new(HeaderReader::new(files.clone())?), Box::new(declare));
        Ok(Loader { device: device.clone(), files, stage, in_flight_bytes: 0 })
    }

    /// Sets the folder's name, which becomes the name of a Hugging Face model (default `model`). Call it before the
    /// first push.
    pub fn set_folder(&mut self, name: &str) {
        if let Stage::Header(reader, _) = &mut self.stage {
            reader.set_folder(name);
        }
    }

    /// Number and offset of the next bytes wanted. Offsets within a file grow, except for one step back from the
    /// headers of several files to their weights.
    pub fn wanted(&self) -> Option<(usize, u64)> {
        match &self.stage {
            Stage::Header(reader, _) => reader.wanted(),
            Stage::Weights(weights) => weights.wanted(),
            Stage::Failed => None,
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
            Stage::Weights(weights) => weights.feed.wanted(),
            Stage::Header(..) | Stage::Failed => None,
        };
        let Some(Wanted { file, offset, .. }) = wanted else {
            let pushed = self.push_header(bytes);
            self.keep(pushed)?;
            return self.settle().await;
        };
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            let Stage::Weights(weights) = &mut self.stage else { break };
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
        if let Stage::Weights(weights) = &mut self.stage {
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
            Stage::Header(reader, _) => reader.end(),
            Stage::Weights(weights) => match (weights.wanted(), weights.feed.wanted()) {
                (Some((file, offset)), Some(wanted)) => {
                    let error = Error::Truncated { needed_bytes: offset + wanted.len, found_bytes: offset };
                    Err(error.in_file(&self.files[file].name))
                }
                _ => Ok(()),
            },
            Stage::Failed => Ok(()),
        };
        self.keep(ended)?;
        let begun = self.begin_weights();
        self.keep(begun)
    }

    /// Bytes of weights pushed, and their total; zeros before the headers are read.
    pub fn progress(&self) -> (u64, u64) {
        match &self.stage {
            Stage::Weights(weights) => weights.feed.progress(),
            Stage::Header(..) | Stage::Failed => (0, 0),
        }
    }

    /// See [`Feed::digest`]; zero before the headers are read.
    pub(crate) fn digest(&self) -> u64 {
        match &self.stage {
            Stage::Weights(weights) => weights.feed.digest(),
            Stage::Header(..) | Stage::Failed => 0,
        }
    }

    /// The device with its tuning.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The declared model, loaded or not; `None` before the headers are read.
    pub(crate) fn declared(&self) -> Option<&T> {
        match &self.stage {
            Stage::Weights(weights) => Some(&weights.declared),
            Stage::Header(..) | Stage::Failed => None,
        }
    }

    /// The loaded model and the device, once no more bytes are wanted.
    ///
    /// # Errors
    /// [`Error::Config`] if bytes are still wanted.
    pub(crate) fn loaded(self) -> Result<(T, Device), Error> {
        match self.stage {
            Stage::Weights(weights) if weights.feed.wanted().is_none() => Ok((weights.declared, self.device)),
            _ => Err(Error::Config {
                field: "files".into(),
                expected: "all bytes that the loader wants".into(),
                found: "incomplete".into(),
            }),
        }
    }

    fn push_header(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let Stage::Header(reader, _) = &mut self.stage else { return Ok(()) };
        reader.push(bytes)?;
        self.begin_weights()
    }

    /// Proceeds from headers to weights once the headers are complete.
    fn begin_weights(&mut self) -> Result<(), Error> {
        if !matches!(&self.stage, Stage::Header(reader, _) if reader.wanted().is_none()) {
            return Ok(());
        }
        let Stage::Header(reader, declare) = std::mem::replace(&mut self.stage, Stage::Failed) else { return Ok(()) };
        let (header, heads) = reader.finish()?;
        let numbers: Vec<usize> = heads.iter().map(|head| head.file).collect();
        let (declared, feed) = declare(&self.device, header, &numbers)?;
        let mut weights = Weights { declared, feed, heads };
        for file in 0..weights.heads.len() {
            let head = std::mem::take(&mut weights.heads[file].bytes);
            weights.feed.take(&self.device, file, 0, &head)?;
        }
        self.stage = Stage::Weights(Box::new(weights));
        Ok(())
    }

    /// On error enters the terminal state, which frees all memory.
    fn keep(&mut self, result: Result<(), Error>) -> Result<(), Error> {
        if result.is_err() {
            self.stage = Stage::Failed;
        }
        result
    }
}

impl<T> Weights<T> {
    fn wanted(&self) -> Option<(usize, u64)> {
        let wanted = self.feed.wanted()?;
        Some((self.heads.get(wanted.file)?.file, wanted.offset))
    }
}
