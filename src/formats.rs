//! File formats: parses bytes into named views.
//!
//! A reader receives a file's head and length. It checks every count and size against the available bytes before
//! allocation, and never touches tensor data, so a browser can feed it a growing prefix and a native caller a memory
//! map. Its result is safe to use: each tensor lies inside the file, overlaps no other, and has a unique name.
//!
//! This module knows no GPU and no model.

#![forbid(unsafe_code)]

pub(crate) mod arriving;
pub mod block;
pub mod config_json;
pub mod gguf;
pub mod gguf_writer;
pub(crate) mod own_file;
pub mod quantize;
pub mod safetensors;
pub(crate) mod text;
pub(crate) mod torch;

pub use block::BlockType;
pub use config_json::ConfigJson;
pub use gguf::Gguf;
pub use safetensors::{Safetensors, ShardIndex};

use crate::error::Error;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

/// Limit of tensors per file. The largest published checkpoints have about 100,000 over more than a hundred files;
/// the limit keeps the allocations for a hostile header below 16 MiB.
pub const MAX_TENSORS: usize = 65_536;

/// An unknown file length, as in some downloads: nothing is checked against the file's end.
pub const UNKNOWN_LEN: u64 = u64::MAX;

/// Result of parsing a prefix of a file.
#[derive(Debug)]
pub enum Parsed<T> {
    /// The header was complete.
    Complete(T),
    /// The header extends beyond the prefix: call again with at least this many bytes from the file's start, or twice
    /// the previous number if that is more, because parsing restarts from the beginning.
    NeedMore(u64),
}

impl<T> Parsed<T> {
    /// The result, if the caller has no more bytes than the `len` given.
    fn complete(self, format: &'static str, len: usize) -> Result<T, Error> {
        match self {
            Parsed::Complete(value) => Ok(value),
            Parsed::NeedMore(needed) => Err(Error::Format {
                format,
                field: "header".into(),
                offset: len as u64,
                expected: format!("at least {needed} bytes"),
                found: format!("{len} bytes"),
            }),
        }
    }
}

/// The name of a file's format by the first signature that it has, each with its offset.
#[cfg(any(feature = "pictures", feature = "sound-files"))]
pub(crate) fn named_by_signature(bytes: &[u8], signatures: &[(usize, &[u8], &'static str)]) -> Option<&'static str> {
    let is_at =
        |(at, signature, _): &&(usize, &[u8], _)| bytes.get(*at..).is_some_and(|rest| rest.starts_with(signature));
    signatures.iter().find(is_at).map(|(.., name)| *name)
}

/// A tensor's location and storage type in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Dimensions, contiguous one last: a matrix is `[rows, columns]`.
    pub shape: Vec<u64>,
    /// Storage type.
    pub block_type: BlockType,
    /// Offset of the data in the file.
    pub offset: u64,
    /// Size of the data.
    pub size_bytes: u64,
}

impl TensorInfo {
    /// Number of elements, consistent with the shape.
    pub fn n_elements(&self) -> u64 {
        self.size_bytes / self.block_type.block_bytes() * self.block_type.block_len()
    }

    /// Range of the data in the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.size_bytes
    }

    /// The tensor's data in `file`, the whole file.
    ///
    /// # Errors
    /// [`Error::Format`] if `file` is shorter than the length its header was parsed with.
    pub fn bytes<'a>(&self, file: &'a [u8]) -> Result<&'a [u8], Error> {
        let Range { start, end } = self.range();
        let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
        range.and_then(|(start, end)| file.get(start..end)).ok_or_else(|| Error::Format {
            format: "tensor data",
            field: format!("data of tensor `{}`", self.name),
            offset: start,
            expected: format!("{} bytes", self.size_bytes),
            found: format!("a file of {} bytes", file.len()),
        })
    }
}

/// Finds items by name: sorted (hash, item) pairs. At eight bytes per item and without copies of the names, even
/// 300,000 keys stay far below the file's size; the hash is seeded, so a file cannot force collisions.
#[derive(Clone, Debug)]
struct NameIndex {
    slots: Vec<(u32, u32)>,
    hasher: RandomState,
}

impl NameIndex {
    /// Indexes items `0..n_items` by `name`. The error holds two items of the same name, the earlier first.
    fn build<'a>(n_items: usize, name: impl Fn(usize) -> &'a str) -> Result<Self, [usize; 2]> {
        let hasher = RandomState::new();
        let name_of = |slot: &(u32, u32)| name(slot.1 as usize);
        let mut slots: Vec<_> = (0..n_items).map(|item| (hash(&hasher, name(item)), item as u32)).collect();
        crate::sort::by(&mut slots, |a, b| a.0.cmp(&b.0).then_with(|| name_of(a).cmp(name_of(b))));
        let is_duplicate = |pair: &&[(u32, u32)]| pair[0].0 == pair[1].0 && name_of(&pair[0]) == name_of(&pair[1]);
        match slots.windows(2).find(is_duplicate) {
            Some(pair) => Err([pair[0].1 as usize, pair[1].1 as usize]),
            None => Ok(Self { slots, hasher }),
        }
    }

    /// The item called `wanted`, with the same `name` as in [`NameIndex::build`].
    fn find<'a>(&self, wanted: &str, name: impl Fn(usize) -> &'a str) -> Option<usize> {
        let hash = hash(&self.hasher, wanted);
        let first = self.slots.partition_point(|slot| slot.0 < hash);
        let same_hash = self.slots.iter().skip(first).take_while(|slot| slot.0 == hash);
        same_hash.map(|slot| slot.1 as usize).find(|&item| name(item) == wanted)
    }
}

fn hash(hasher: &RandomState, name: &str) -> u32 {
    (hasher.hash_one(name) >> 32) as u32
}

/// Displays a file's name in a message: at most 128 characters, with control characters escaped.
pub(crate) struct Shown<'a>(pub &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut characters = self.0.chars();
        for character in characters.by_ref().take(128) {
            write!(f, "{}", character.escape_debug())?;
        }
        f.write_str(if characters.next().is_some() { "..." } else { "" })
    }
}
