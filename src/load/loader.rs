//! Loading from bytes that arrive piece by piece, as they do over a network.

use super::catalog::Wanted;
use super::{Feed, FileName, Head, HeaderReader, ModelHeader};
use crate::device::Device;
use crate::error::Error;
use crate::platform::MaybeSend;

/// Feeds a model's files into a device while they arrive; no more of them is kept than headers and a row. `T` is a
/// [`Model`](crate::Model), an [`Embedder`](crate::Embedder) or a [`Reranker`](crate::Reranker), each of which makes its own
/// with `loader`.
///
/// The files are one GGUF file, all shards of one in order, or those of a Hugging Face folder. Ask [`Loader::wanted`] and
/// push those bytes until it gives `None`, then call `finish`.
pub struct Loader<T> {
    pub(crate) device: Device,
    files: Vec<FileName>,
    stage: Stage<T>,
    /// Bytes that went to the device since it was last waited for.
    in_flight_bytes: u64,
}

/// From what the files say, and the numbers of those with weights, to what waits for its weights.
#[cfg(not(target_arch = "wasm32"))]
type Declare<T> = Box<dyn FnOnce(&Device, ModelHeader, &[usize]) -> Result<(T, Feed), Error> + Send>;
#[cfg(target_arch = "wasm32")]
type Declare<T> = Box<dyn FnOnce(&Device, ModelHeader, &[usize]) -> Result<(T, Feed), Error>>;

enum Stage<T> {
    Header(Box<HeaderReader>, Declare<T>),
    Weights(Box<Weights<T>>),
    /// An error ended it.
    Failed,
}

struct Weights<T> {
    declared: T,
    feed: Feed,
    heads: Vec<Head>,
}

impl<T> Loader<T> {
    /// A loader of these files, of which `declare` makes what is loaded once their headers are there.
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

    /// Says what the folder of the files is called, before the first bytes are pushed: a model of a Hugging Face folder has
    /// its name from there, and is called `model` otherwise.
    pub fn set_folder(&mut self, name: &str) {
        if let Stage::Header(reader, _) = &mut self.stage {
            reader.set_folder(name);
        }
    }

    /// The number of the file whose bytes are wanted next, and from which offset on. Offsets of one file grow, except
    /// that reading goes back once, from the headers of several files to their weights.
    pub fn wanted(&self) -> Option<(usize, u64)> {
        match &self.stage {
            Stage::Header(reader, _) => reader.wanted(),
            Stage::Weights(weights) => weights.wanted(),
            Stage::Failed => None,
        }
    }

    /// Takes bytes from the wanted offset on, as many as are there. Waits for the device where too much would pile up.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and what is wrong in it, [`Error::Memory`] if the model exceeds the limit,
    /// [`Error::Unsupported`] if it is of another kind, errors of [`Device::write`]. The loader is of no use then.
    pub async fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        /// Bytes of weights between two looks at what is in flight; types that no kernel reads become sixteen times as many.
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

    /// Waits for the device where too much is on its way there.
    async fn settle(&mut self) -> Result<(), Error> {
        /// Bytes that may be on their way to the device.
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

    /// The wanted file has no more bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`] if it should have; as [`Loader::push`].
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

    /// Bytes of weights taken, and their sum; zeros before the headers are read.
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

    /// The device, with its tuning.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What is declared, whether its weights have come or not; `None` before the headers are read.
    pub(crate) fn declared(&self) -> Option<&T> {
        match &self.stage {
            Stage::Weights(weights) => Some(&weights.declared),
            Stage::Header(..) | Stage::Failed => None,
        }
    }

    /// What is loaded, once nothing more is wanted, and the device.
    ///
    /// # Errors
    /// [`Error::Config`] if something is.
    pub(crate) fn loaded(self) -> Result<(T, Device), Error> {
        match self.stage {
            Stage::Weights(weights) if weights.feed.wanted().is_none() => Ok((weights.declared, self.device)),
            _ => Err(Error::Config {
                field: "files".into(),
                expected: "all that the loader wanted".into(),
                found: "less".into(),
            }),
        }
    }

    fn push_header(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let Stage::Header(reader, _) = &mut self.stage else { return Ok(()) };
        reader.push(bytes)?;
        self.begin_weights()
    }

    /// Goes over from headers to weights once the headers are there.
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

    /// Remembers that an error is the end, and lets go of all memory.
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
