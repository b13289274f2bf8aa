//! Serialises device tensors to files, reading them in pieces.

use std::collections::VecDeque;

use crate::device::Device;
use crate::error::Error;
use crate::tensor::Tensor;

/// Bytes read from a device at a time.
const PIECE_BYTES: usize = 4 << 20;

/// A file's content, read from a device in pieces. Concurrent writes to the tensors may or may not be included.
pub struct Saving {
    pieces: VecDeque<SavedPiece>,
    size_bytes: u64,
}

enum SavedPiece {
    Bytes(Vec<u8>),
    Rows(TensorRows),
}

/// Contiguous rows of a tensor.
struct TensorRows {
    device: Device,
    tensor: Tensor,
    first_word: usize,
    n_rows: usize,
    row: RowSize,
}

/// A row's size on the device and in the file.
#[derive(Clone, Copy)]
pub(crate) struct RowSize {
    /// Words on the device.
    pub words: usize,
    /// Bytes written to the file.
    pub kept_bytes: usize,
}

impl RowSize {
    /// A row written to the file completely.
    pub fn whole(words: usize) -> RowSize {
        RowSize { words, kept_bytes: 4 * words }
    }
}

impl Saving {
    /// A file that starts with these bytes.
    pub(crate) fn new(head: Vec<u8>) -> Saving {
        let mut saving = Saving { pieces: VecDeque::new(), size_bytes: 0 };
        saving.add(head);
        saving
    }

    /// Appends bytes.
    pub(crate) fn add(&mut self, bytes: Vec<u8>) {
        self.size_bytes += bytes.len() as u64;
        self.pieces.push_back(SavedPiece::Bytes(bytes));
    }

    /// Appends rows of a tensor.
    pub(crate) fn add_rows(
        &mut self,
        device: &Device,
        tensor: &Tensor,
        first_word: usize,
        n_rows: usize,
        row: RowSize,
    ) {
        self.size_bytes += (n_rows * row.kept_bytes) as u64;
        let at_once = (PIECE_BYTES / (4 * row.words).max(1)).max(1);
        for first in (0..n_rows).step_by(at_once) {
            self.pieces.push_back(SavedPiece::Rows(TensorRows {
                device: device.clone(),
                tensor: tensor.clone(),
                first_word: first_word + first * row.words,
                n_rows: at_once.min(n_rows - first),
                row,
            }));
        }
    }

    /// Bytes of the whole file.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The file's next bytes, or `None` at the end. Unusable after an error.
    ///
    /// # Errors
    /// Errors of [`Device::read`].
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let Some(piece) = self.pieces.pop_front() else { return Ok(None) };
        let TensorRows { device, tensor, first_word, n_rows, row } = match piece {
            SavedPiece::Bytes(bytes) => return Ok(Some(bytes)),
            SavedPiece::Rows(rows) => rows,
        };
        let words = device.read_part(&tensor, first_word..first_word + n_rows * row.words).await?;
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        if row.kept_bytes == 4 * row.words {
            return Ok(Some(bytes.to_vec()));
        }
        let mut kept = Vec::with_capacity(n_rows * row.kept_bytes);
        bytes.chunks_exact(4 * row.words).for_each(|bytes| kept.extend_from_slice(&bytes[..row.kept_bytes]));
        Ok(Some(kept))
    }

    /// All bytes of the file.
    ///
    /// # Errors
    /// As [`Saving::next`].
    pub async fn to_bytes(mut self) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::with_capacity(usize::try_from(self.size_bytes).unwrap_or_default());
        while let Some(piece) = self.next().await? {
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }

    /// Writes the file. Replaces an existing one only after everything is written.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; as [`Saving::next`].
    pub(crate) async fn write(mut self, path: &std::path::Path) -> Result<(), Error> {
        let mut file = crate::cache::Replacement::begin(path)?;
        while let Some(piece) = self.next().await? {
            file.write(&piece)?;
        }
        file.finish()
    }
}
