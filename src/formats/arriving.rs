//! Reads safetensors incrementally from arriving bytes.

use std::collections::VecDeque;

use super::{Parsed, Safetensors, Shown, TensorInfo};
use crate::error::Error;

/// Consumer of a file's data.
pub(crate) trait Sink {
    /// Inspects the header. Returns the wanted tensors in file order; empty ones are never delivered.
    fn begin(&mut self, header: Safetensors) -> Result<Vec<TensorInfo>, Error>;

    /// Consumes bytes of a tensor from its byte `at`, and returns their number. The rest is delivered again with the
    /// next bytes; the tensor's last bytes must all be consumed.
    fn take(&mut self, tensor: &TensorInfo, at: u64, bytes: &[u8]) -> Result<usize, Error>;
}

/// A safetensors file read as it arrives. Buffers only data that the [`Sink`] leaves.
pub(crate) struct Arriving {
    file_len: u64,
    /// The header's bytes so far; `None` once it is parsed.
    head: Option<Vec<u8>>,
    wanted: VecDeque<TensorInfo>,
    /// Bytes consumed of the first wanted tensor, and the bytes left after them.
    taken: u64,
    left: Vec<u8>,
}

impl Arriving {
    /// A file of this length, or [`UNKNOWN_LEN`].
    pub fn new(file_len: u64) -> Arriving {
        Arriving { file_len, head: Some(Vec::new()), wanted: VecDeque::new(), taken: 0, left: Vec::new() }
    }

    /// Offset of the next bytes wanted; `None` at the end.
    pub fn wanted(&self) -> Option<u64> {
        match &self.head {
            Some(head) => Some(head.len() as u64),
            None => self.wanted.front().map(|tensor| tensor.offset + self.taken + self.left.len() as u64),
        }
    }

    /// Consumes the wanted part of the file's bytes from `start`.
    ///
    /// # Errors
    /// Errors of [`Safetensors::parse`] and of the sink.
    pub fn push(&mut self, start: u64, bytes: &[u8], sink: &mut dyn Sink) -> Result<(), Error> {
        self.push_header(start, bytes, sink)?;
        while let Some(tensor) = self.wanted.front() {
            let at = tensor.offset + self.taken + self.left.len() as u64;
            let Some(rest) = at.checked_sub(start).and_then(|skip| bytes.get(usize::try_from(skip).ok()?..)) else {
                break;
            };
            let missing = tensor.range().end - at;
            let piece = &rest[..usize::try_from(missing).map_or(rest.len(), |missing| rest.len().min(missing))];
            if piece.is_empty() {
                break;
            }
            if self.left.is_empty() {
                let n = sink.take(tensor, self.taken, piece)?;
                self.taken += n as u64;
                self.left.extend_from_slice(&piece[n..]);
            } else {
                self.left.extend_from_slice(piece);
                let n = sink.take(tensor, self.taken, &self.left)?;
                self.taken += n as u64;
                self.left.drain(..n);
            }
            if missing == piece.len() as u64 {
                self.wanted.pop_front();
                self.taken = 0;
                self.left.clear();
            }
        }
        Ok(())
    }

    fn push_header(&mut self, start: u64, bytes: &[u8], sink: &mut dyn Sink) -> Result<(), Error> {
        while let Some(head) = &mut self.head {
            match Safetensors::parse_prefix(head, self.file_len)? {
                Parsed::Complete(header) => {
                    self.wanted = sink.begin(header)?.into_iter().filter(|tensor| tensor.size_bytes > 0).collect();
                    self.head = None;
                }
                Parsed::NeedMore(needed) => {
                    let have = head.len() as u64;
                    let rest = have.checked_sub(start).and_then(|skip| bytes.get(usize::try_from(skip).ok()?..));
                    let rest = rest.unwrap_or_default();
                    let n = usize::try_from(needed - have).map_or(rest.len(), |n| n.min(rest.len()));
                    head.extend_from_slice(&rest[..n]);
                    if (head.len() as u64) < needed {
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Marks the end of the file.
    ///
    /// # Errors
    /// [`Error::Truncated`] or [`Error::Format`] if bytes are still wanted.
    pub fn end(&self) -> Result<(), Error> {
        match (&self.head, self.wanted.front(), self.wanted()) {
            (Some(head), ..) => Safetensors::parse(head, head.len() as u64).map(drop),
            (None, Some(tensor), Some(at)) => {
                let (part, needed_bytes) = (format!("tensor `{}`", Shown(&tensor.name)), tensor.range().end);
                Err(Error::Truncated { part, needed_bytes, found_bytes: at })
            }
            _ => Ok(()),
        }
    }

    /// Reads a complete file.
    ///
    /// # Errors
    /// As [`Arriving::push`].
    pub fn read(file: &[u8], sink: &mut dyn Sink) -> Result<(), Error> {
        let mut arriving = Arriving::new(file.len() as u64);
        while let Some(start) = arriving.wanted() {
            let rest = usize::try_from(start).ok().and_then(|start| file.get(start..)).unwrap_or_default();
            arriving.push(start, rest, sink)?;
        }
        Ok(())
    }
}
