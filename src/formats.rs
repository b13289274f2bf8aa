//! File formats: bytes become named views, and nothing else.
//!
//! A reader takes the head of a file and the file's length. It checks every count and size against the bytes that are
//! there before it allocates, and never touches tensor data, so a browser can feed it a growing prefix and a native
//! caller a memory map. What a reader returns is safe to act on: each tensor lies inside the file, overlaps no other,
//! and has a name of its own.
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

pub use block::BlockType;
pub use config_json::ConfigJson;
pub use gguf::Gguf;
pub use safetensors::{Safetensors, ShardIndex};

use crate::error::Error;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

/// Tensors that one file may hold. The largest published checkpoints have about 100,000 over more than a hundred
/// files; the bound keeps what a hostile header can make a reader allocate below 16 MiB.
pub const MAX_TENSORS: usize = 65_536;

/// Stands for the length of a file that is not known, as of some downloads: nothing is compared with its end then.
pub const UNKNOWN_LEN: u64 = u64::MAX;

/// What reading a prefix of a file came to.
#[derive(Debug)]
pub enum Parsed<T> {
    /// The header was all there.
    Complete(T),
    /// The header goes on behind the prefix: call again with at least this many bytes from the file's start. Offer
    /// twice as much as last time where that is more, because reading starts again from the beginning.
    NeedMore(u64),
}

impl<T> Parsed<T> {
    /// The result, where the caller has no more bytes to offer than the `len` it has given.
    fn complete(self, format: &'static str, len: usize) -> Result<T, Error> {
        match self {
            Parsed::Complete(value) => Ok(value),
            Parsed::NeedMore(needed) => Err(Error::Format {
                format,
                field: "header".into(),
                offset: len as u64,
                expected: format!("at least {needed} bytes of the file"),
                found: format!("{len} bytes"),
            }),
        }
    }
}

/// A tensor in a file: where it lies and how it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Dimensions with the contiguous one last, so that a matrix is `[rows, columns]`.
    pub shape: Vec<u64>,
    /// How the elements are stored.
    pub block_type: BlockType,
    /// Where the data begins, counted from the start of the file.
    pub offset: u64,
    /// Length of the data.
    pub size_bytes: u64,
}

impl TensorInfo {
    /// Number of elements. Reading the file has checked that the shape says the same.
    pub fn n_elements(&self) -> u64 {
        self.size_bytes / self.block_type.block_bytes() * self.block_type.block_len()
    }

    /// Where the data lies in the file.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.size_bytes
    }

    /// The tensor's data, where `file` is the whole file.
    ///
    /// # Errors
    /// [`Error::Format`] if `file` is shorter than the length that the header was read with.
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

/// Finds items by name: (hash, item) pairs in order. Eight bytes an item and no copy of the names keep even 300,000
/// keys far below the size of the file, and the hash is seeded, so a file cannot choose its collisions.
#[derive(Clone, Debug)]
struct NameIndex {
    slots: Vec<(u32, u32)>,
    hasher: RandomState,
}

impl NameIndex {
    /// Indexes items `0..n_items`, of which `name` gives the names. The error holds two items of the same name, the
    /// earlier first.
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

    /// The item called `wanted`, where `name` gives the names as it did for [`NameIndex::build`].
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

/// Displays a name from a file in a message: 128 characters of it, with what would break a line or a terminal escaped.
struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut characters = self.0.chars();
        for character in characters.by_ref().take(128) {
            write!(f, "{}", character.escape_debug())?;
        }
        f.write_str(if characters.next().is_some() { "..." } else { "" })
    }
}
