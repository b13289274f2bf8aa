//! A file's bytes from any source.

use std::ops::{Deref, Range};
use std::path::Path;

use crate::error::Error;
use crate::platform::{FileMap, map};

/// The whole content of a file.
#[derive(Debug)]
pub enum FileBytes {
    /// Compiled into the program.
    Static(&'static [u8]),
    /// In memory.
    Owned(Vec<u8>),
    /// Mapped from disk: pages are read on use and can be dropped.
    Mapped(FileMap),
}

impl FileBytes {
    /// Maps a file, which must not change while in use.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened.
    pub fn map(path: &Path) -> Result<FileBytes, Error> {
        let io = |source| Error::Io { path: path.into(), source };
        let file = std::fs::File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Ok(FileBytes::Static(&[])); // an empty file cannot be mapped
        }
        map(&file).map(FileBytes::Mapped).map_err(io)
    }
}

impl FileBytes {
    /// Tells the system to prefetch these bytes.
    pub(crate) fn announce(&self, which: Range<usize>) {
        #[cfg(unix)]
        if let FileBytes::Mapped(map) = self {
            // On failure, pages are read on use.
            let _ = map.advise_range(memmap2::Advice::WillNeed, which.start, which.len());
        }
        #[cfg(not(unix))]
        let _ = which;
    }

    /// Drops the pages of bytes that are not needed soon; later reads reload them.
    pub(crate) fn let_go(&self, which: Range<usize>) {
        #[cfg(unix)]
        if let FileBytes::Mapped(map) = self {
            // SAFETY: the mapping is a read-only file mapping: dropped pages are read from the file again.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, which.start, which.len()) };
        }
        #[cfg(not(unix))]
        let _ = which;
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            FileBytes::Static(bytes) => bytes,
            FileBytes::Owned(bytes) => bytes,
            FileBytes::Mapped(map) => map,
        }
    }
}

impl From<&'static [u8]> for FileBytes {
    fn from(bytes: &'static [u8]) -> Self {
        FileBytes::Static(bytes)
    }
}

impl From<Vec<u8>> for FileBytes {
    fn from(bytes: Vec<u8>) -> Self {
        FileBytes::Owned(bytes)
    }
}
