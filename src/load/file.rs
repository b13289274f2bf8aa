//! A file's bytes from any source.

use std::ops::{Deref, Range};
use std::path::Path;
#[cfg(target_arch = "wasm32")]
use std::pin::Pin;

use crate::error::Error;

/// The whole content of a file.
#[derive(Debug)]
pub enum FileBytes {
    /// Compiled into the program.
    Static(&'static [u8]),
    /// In memory.
    Owned(Vec<u8>),
    /// Mapped from disk: pages are read on use and can be dropped.
    #[cfg(not(target_arch = "wasm32"))]
    Mapped(memmap2::Mmap),
}

#[cfg(not(target_arch = "wasm32"))]
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
        // SAFETY: the mapping is read-only, and all reads are bounds-checked slices. Truncation by another process is
        // an environment fault, as for every memory-mapped reader.
        unsafe { memmap2::Mmap::map(&file) }.map(FileBytes::Mapped).map_err(io)
    }
}

/// Weight files that are read again during inference, by their numbers in the catalog.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) type WeightFiles = std::sync::Arc<Vec<FileBytes>>;

/// Reads part of a file: its number in the loader, an offset, and the maximum length.
#[cfg(target_arch = "wasm32")]
pub(crate) type ReadFile =
    std::rc::Rc<dyn Fn(usize, u64, u64) -> Pin<Box<dyn Future<Output = Result<Vec<u8>, Error>>>>>;

/// Weight files that are read again during inference, by their numbers in the catalog.
#[cfg(target_arch = "wasm32")]
#[derive(Clone)]
pub(crate) struct WeightFiles {
    read: ReadFile,
    numbers: std::rc::Rc<[usize]>,
}

#[cfg(target_arch = "wasm32")]
impl WeightFiles {
    /// The files with these loader numbers.
    #[cfg(feature = "web")]
    pub fn new(read: ReadFile, numbers: &[usize]) -> WeightFiles {
        WeightFiles { read, numbers: numbers.into() }
    }

    /// At most `len` bytes of a file from an offset.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the offset is past the file's end; errors of reading.
    pub async fn read(&self, file: usize, offset: u64, len: u64) -> Result<Vec<u8>, Error> {
        let bytes = (self.read)(self.numbers[file], offset, len).await?;
        match bytes.is_empty() {
            true => Err(Error::Truncated { needed_bytes: offset + 1, found_bytes: offset }),
            false => Ok(bytes),
        }
    }

    /// Fills `to` from a file's offset.
    ///
    /// # Errors
    /// As [`WeightFiles::read`].
    pub async fn read_exact(&self, file: usize, offset: u64, to: &mut [u8]) -> Result<(), Error> {
        let mut done = 0;
        while done < to.len() {
            let bytes = self.read(file, offset + done as u64, (to.len() - done) as u64).await?;
            let n = bytes.len().min(to.len() - done);
            to[done..done + n].copy_from_slice(&bytes[..n]);
            done += n;
        }
        Ok(())
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
            #[cfg(not(target_arch = "wasm32"))]
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
