//! Loading a model from bytes that arrive piece by piece, as they do over a network.

use std::time::Duration;

use super::Model;
use super::model::Loading;
use crate::device::Device;
use crate::error::Error;
use crate::load::{FileName, Head, HeaderReader};
use crate::tuning::{TunedRow, Tuning, tune_products};

/// Feeds a model's files into a device while they arrive; no more of them is kept than headers and a row.
///
/// The files are one GGUF file, all shards of one in order, or those of a Hugging Face folder. Ask [`Loader::wanted`] and
/// push those bytes until it gives `None`, then call [`Loader::finish`].
pub struct Loader {
    device: Device,
    files: Vec<FileName>,
    context_length: Option<u32>,
    memory_limit: Option<u64>,
    stage: Stage,
    /// Bytes pushed since the device was last waited for.
    in_flight_bytes: usize,
}

enum Stage {
    Header(Box<HeaderReader>),
    Weights(Box<Weights>),
    /// An error ended it.
    Failed,
}

struct Weights {
    loading: Loading,
    heads: Vec<Head>,
}

impl Loader {
    /// A loader of these files; the limits are those of [`LoadOptions`](super::LoadOptions).
    ///
    /// # Errors
    /// [`Error::Config`] if there are no files.
    pub fn new(
        device: &Device,
        files: Vec<FileName>,
        context_length: Option<u32>,
        memory_limit: Option<u64>,
    ) -> Result<Loader, Error> {
        let stage = Stage::Header(Box::new(HeaderReader::new(files.clone())?));
        Ok(Loader { device: device.clone(), files, context_length, memory_limit, stage, in_flight_bytes: 0 })
    }

    /// The number of the file whose bytes are wanted next, and from which offset on. Offsets of one file grow, except
    /// that reading goes back once, from the headers of several files to their weights.
    pub fn wanted(&self) -> Option<(usize, u64)> {
        match &self.stage {
            Stage::Header(reader) => reader.wanted(),
            Stage::Weights(weights) => weights.wanted(),
            Stage::Failed => None,
        }
    }

    /// Takes bytes from the wanted offset on, as many as are there. Waits for the device where too much would pile up.
    ///
    /// # Errors
    /// [`Error::InFile`] naming the file and what is wrong in it, [`Error::Memory`] if the model exceeds the limit, errors
    /// of [`Device::write`]. The loader is of no use then.
    pub async fn push(&mut self, bytes: &[u8]) -> Result<(), Error> {
        /// Bytes that may be on their way to the device.
        const MAX_IN_FLIGHT: usize = 32 << 20;
        let pushed = self.push_now(bytes);
        self.keep(pushed)?;
        self.in_flight_bytes += bytes.len();
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
            Stage::Header(reader) => reader.end(),
            Stage::Weights(weights) => match (weights.wanted(), weights.loading.feed.wanted()) {
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
            Stage::Weights(weights) => weights.loading.feed.progress(),
            Stage::Header(_) | Stage::Failed => (0, 0),
        }
    }

    /// The device, with its tuning.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Makes the model follow another tuning of the device.
    pub fn set_tuning(&mut self, tuning: Tuning) {
        self.device = self.device.with_tuning(tuning);
    }

    /// Measures the ways in which the device can take the model's products, and makes the model follow the fastest; what is
    /// measured is as in [`crate::tuning`]. Nothing further is begun after two seconds, which the products share, but the
    /// usual way of each is compiled and run whatever that takes: slow adapters take longer. Does nothing on the CPU, and
    /// before the headers are read.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn tune(&mut self) -> Result<Vec<TunedRow>, Error> {
        const BUDGET: Duration = Duration::from_secs(2);
        let Stage::Weights(weights) = &self.stage else { return Ok(Vec::new()) };
        if !self.device.is_gpu() {
            return Ok(Vec::new());
        }
        let (tuning, rows) =
            tune_products(&self.device, weights.loading.weights(), |n_buckets| BUDGET / n_buckets.max(1)).await?;
        self.set_tuning(tuning);
        Ok(rows)
    }

    /// The model, once nothing more is wanted.
    ///
    /// # Errors
    /// [`Error::Config`] if something is; errors of the device.
    pub async fn finish(self) -> Result<Model, Error> {
        let weights = match self.stage {
            Stage::Weights(weights) if weights.loading.feed.wanted().is_none() => weights,
            _ => {
                return Err(Error::Config {
                    field: "files".into(),
                    expected: "all that the loader wanted".into(),
                    found: "less".into(),
                });
            }
        };
        let model = weights.loading.finish(&self.device)?;
        self.device.drained().await?;
        Ok(model)
    }

    fn push_now(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if let Stage::Header(reader) = &mut self.stage {
            reader.push(bytes)?;
            return self.begin_weights();
        }
        let Stage::Weights(weights) = &mut self.stage else { return Ok(()) };
        let Some(first) = weights.loading.feed.wanted() else { return Ok(()) };
        weights.feed(&self.device, first.file, first.offset, bytes)
    }

    /// Goes over from headers to weights once the headers are there.
    fn begin_weights(&mut self) -> Result<(), Error> {
        if !matches!(&self.stage, Stage::Header(reader) if reader.wanted().is_none()) {
            return Ok(());
        }
        let Stage::Header(reader) = std::mem::replace(&mut self.stage, Stage::Failed) else { return Ok(()) };
        let (header, heads) = reader.finish()?;
        let loading = Loading::begin(&self.device, header, self.context_length, self.memory_limit, None)?;
        let mut weights = Weights { loading, heads };
        for file in 0..weights.heads.len() {
            let head = std::mem::take(&mut weights.heads[file].bytes);
            weights.feed(&self.device, file, 0, &head)?;
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

impl Weights {
    fn wanted(&self) -> Option<(usize, u64)> {
        let wanted = self.loading.feed.wanted()?;
        Some((self.heads.get(wanted.file)?.file, wanted.offset))
    }

    /// Feeds what is wanted of the bytes that begin at `start` in weight file `file`; what lies between tensors is
    /// passed over.
    fn feed(&mut self, device: &Device, file: usize, start: u64, bytes: &[u8]) -> Result<(), Error> {
        while let Some(wanted) = self.loading.feed.wanted().filter(|wanted| wanted.file == file) {
            let skip = wanted.offset.checked_sub(start).and_then(|skip| usize::try_from(skip).ok());
            let Some(rest) = skip.and_then(|skip| bytes.get(skip..)).filter(|rest| !rest.is_empty()) else { break };
            let len = usize::try_from(wanted.len).unwrap_or(usize::MAX).min(rest.len());
            self.loading.feed.push(device, &rest[..len])?;
        }
        Ok(())
    }
}
