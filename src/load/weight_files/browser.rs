//! Weight files that JavaScript reads, piece by piece. See `weight_files.rs` for the functions.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use crate::device::Device;
use crate::error::Error;
use crate::formats::TensorInfo;
use crate::load::tensor_index::NeededRange;
use crate::load::{FileBytes, WeightUploader};

/// Reads part of a file: its number in the loader, an offset, and the maximum length.
pub(crate) type ReadFile = Rc<dyn Fn(usize, u64, u64) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, Error>>>>>;

#[derive(Clone)]
pub(crate) struct WeightFiles {
    read: ReadFile,
    numbers: Rc<[usize]>,
}

impl WeightFiles {
    /// The files with these loader numbers.
    pub fn new(read: ReadFile, numbers: &[usize]) -> WeightFiles {
        WeightFiles { read, numbers: numbers.into() }
    }

    pub fn whole(_: &Arc<Vec<FileBytes>>) -> Option<WeightFiles> {
        None
    }

    pub async fn copy(&self, file: usize, info: &TensorInfo, first: u64, to: &mut [u8]) -> Result<(), Error> {
        let (mut done, offset) = (0, info.offset + first);
        while done < to.len() {
            let bytes = self.read(file, offset + done as u64, (to.len() - done) as u64).await?;
            let n = bytes.len().min(to.len() - done);
            to[done..done + n].copy_from_slice(&bytes[..n]);
            done += n;
        }
        Ok(())
    }

    pub async fn feed(&self, feed: &mut WeightUploader, device: &Device) -> Result<bool, Error> {
        let Some(NeededRange { file, offset, len }) = feed.wanted() else { return Ok(false) };
        let bytes = self.read(file, offset, len).await?;
        feed.take(device, file, offset, &bytes).map(|()| true)
    }

    pub async fn feed_all(&self, feed: WeightUploader, device: &Device) -> Result<(), Error> {
        feed.read_again(device, self).await.map(drop)
    }

    pub fn announce(&self, _: &WeightUploader) {}

    pub fn digest(&self, _: &WeightUploader) -> u64 {
        0
    }

    /// At most `len` bytes of a file from an offset.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the offset is past the file's end; errors of reading.
    async fn read(&self, file: usize, offset: u64, len: u64) -> Result<Vec<u8>, Error> {
        let bytes = (self.read)(self.numbers[file], offset, len).await?;
        match bytes.is_empty() {
            true => Err(Error::Truncated { part: "a tensor".into(), needed_bytes: offset + 1, found_bytes: offset }),
            false => Ok(bytes),
        }
    }
}
