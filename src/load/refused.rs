//! Why a model file is not parsed, if that is not the fault of its content: a download that was cut off, or another
//! file in its place.

use crate::error::Error;
use crate::formats::gguf::Gguf;
use crate::formats::safetensors::Safetensors;
use crate::formats::{Parsed, Shown, TensorInfo, UNKNOWN_LEN};

/// First line of a [Git LFS pointer](https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
const LFS: &[u8] = b"version https://git-lfs";

/// Parses a GGUF file.
///
/// # Errors
/// [`Error::Truncated`] if only the end of the file is missing, else as [`Gguf::parse`].
pub(super) fn parse_gguf(bytes: &[u8]) -> Result<Gguf, Error> {
    Gguf::parse(bytes, bytes.len() as u64).map_err(|error| {
        let whole = || Gguf::parse_prefix(bytes, UNKNOWN_LEN);
        reason("gguf", bytes, whole, |gguf| gguf.tensors).unwrap_or(error)
    })
}

/// Parses the header of a safetensors file.
///
/// # Errors
/// [`Error::Truncated`] if only the end of the file is missing, else as [`Safetensors::parse`].
pub(super) fn parse_safetensors(bytes: &[u8]) -> Result<Safetensors, Error> {
    Safetensors::parse(bytes, bytes.len() as u64).map_err(|error| {
        let whole = || Safetensors::parse_prefix(bytes, UNKNOWN_LEN);
        reason("safetensors", bytes, whole, |header| header.tensors).unwrap_or(error)
    })
}

/// `whole` parses the file as if it were longer.
fn reason<H>(
    format: &'static str,
    bytes: &[u8],
    whole: impl FnOnce() -> Result<Parsed<H>, Error>,
    tensors: impl FnOnce(H) -> Vec<TensorInfo>,
) -> Option<Error> {
    if bytes.starts_with(LFS) {
        return Some(Error::Format {
            format,
            field: "content".into(),
            offset: 0,
            expected: "the file itself, which `git lfs pull` fetches".into(),
            found: "a Git LFS pointer".into(),
        });
    }
    let found_bytes = bytes.len() as u64;
    let (part, needed_bytes) = match whole().ok()? {
        Parsed::NeedMore(needed_bytes) => ("its header".into(), needed_bytes),
        Parsed::Complete(header) => {
            let tensors = tensors(header);
            let cut = tensors.iter().find(|tensor| tensor.range().end > found_bytes)?;
            (format!("tensor `{}`", Shown(&cut.name)), cut.range().end)
        }
    };
    Some(Error::Truncated { part, needed_bytes, found_bytes })
}
