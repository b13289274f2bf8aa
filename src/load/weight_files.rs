//! Weight files that are read again during inference, by their numbers in the tensor index. Natively they are mapped,
//! and reading blocks.

use std::sync::Arc;

use super::{FileBytes, WeightUploader};
use crate::device::Device;
use crate::error::Error;
use crate::formats::TensorInfo;

/// The model's files.
#[derive(Clone)]
pub(crate) struct WeightFiles(Arc<Vec<FileBytes>>);

impl WeightFiles {
    /// Complete files; `None` in a browser, where they would stay in memory.
    pub fn whole(files: &Arc<Vec<FileBytes>>) -> Option<WeightFiles> {
        Some(WeightFiles(files.clone()))
    }

    /// Copies bytes of a tensor from an offset in it.
    ///
    /// # Errors
    /// [`Error::Format`] if the tensor is past its file's end; errors of reading.
    pub async fn copy(&self, file: usize, info: &TensorInfo, first: u64, to: &mut [u8]) -> Result<(), Error> {
        to.copy_from_slice(&info.bytes(&self.0[file])?[first as usize..][..to.len()]);
        Ok(())
    }

    /// Uploads the next bytes of an upload. Returns whether there were any.
    ///
    /// # Errors
    /// Errors of reading; as [`WeightUploader::take_all`].
    pub async fn feed(&self, feed: &mut WeightUploader, device: &Device) -> Result<bool, Error> {
        feed.take_piece(device, &self.0)
    }

    /// Uploads resident weights.
    ///
    /// # Errors
    /// Errors of reading; as [`WeightUploader::take_all`].
    pub async fn feed_all(&self, mut feed: WeightUploader, device: &Device) -> Result<(), Error> {
        feed.take_all(device, &self.0, None)
    }

    /// Announces that an upload reads next.
    pub fn announce(&self, feed: &WeightUploader) {
        feed.announce(&self.0);
    }

    /// The digest of an upload at its end. Reads everything; 0 in a browser.
    pub fn digest(&self, feed: &WeightUploader) -> u64 {
        feed.digest_of_files(&self.0)
    }
}
