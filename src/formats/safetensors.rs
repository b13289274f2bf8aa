//! safetensors, and the index of a sharded checkpoint. Format: the README of Hugging Face's `safetensors`.
//!
//! ```text
//! length   8 bytes, little endian: bytes of the header
//! header   JSON, {"name": {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {}}
//! data     the tensors, which fill it without hole or overlap
//! ```
//! The header is streamed into tensor infos, without a tree of JSON values; its grammar nests at most three deep.
//! Sizes are checked as in the format's own reader; the limit on dimensions is ours.

use super::{BlockType, Error, MAX_TENSORS, NameIndex, Parsed, Shown, TensorInfo, UNKNOWN_LEN};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::collections::HashMap;
use std::fmt;

const FORMAT: &str = "safetensors";
const INDEX_FORMAT: &str = "safetensors index";
/// Limit of the specification, "there is a limit on the size of the header of 100MB".
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the length before the header.
const LENGTH_BYTES: u64 = 8;
/// Dimensions of a tensor, far above any checkpoint's; without a limit a shape needs four times its text in memory.
const MAX_RANK: usize = 8;
/// Entries of `__metadata__`. Training tools write about a hundred; an entry takes 48 bytes for as few as 6 of JSON.
const MAX_METADATA: usize = 1 << 16;
/// Tensors in all shards together. The largest published checkpoints have about 140,000.
const MAX_INDEX_TENSORS: usize = 1 << 18;
/// Shards of a checkpoint. The largest published ones have about 200.
const MAX_SHARDS: usize = 1 << 12;

/// The header of a safetensors file.
#[derive(Clone, Debug)]
pub struct Safetensors {
    /// Tensors in header order.
    pub tensors: Vec<TensorInfo>,
    /// The entries of `__metadata__` in header order.
    pub metadata: Vec<(String, String)>,
    /// Offset of the tensor data.
    pub data_offset: u64,
    index: NameIndex,
}

impl Safetensors {
    /// A header for tensors of a file in another format; `None` if two have one name.
    pub(crate) fn of_tensors(tensors: Vec<TensorInfo>) -> Option<Safetensors> {
        let data_offset = tensors.iter().map(|tensor| tensor.offset).min().unwrap_or(0);
        let name = |item: usize| tensors.get(item).map_or("", |tensor| tensor.name.as_str());
        let index = NameIndex::build(tensors.len(), name).ok()?;
        Some(Safetensors { tensors, metadata: Vec::new(), data_offset, index })
    }

    /// Parses the header at the start of `head`, a prefix of a file of `file_len` bytes (or [`UNKNOWN_LEN`]).
    ///
    /// # Errors
    /// [`Error::Format`] if the file breaks the format or `head` ends within the header.
    pub fn parse(head: &[u8], file_len: u64) -> Result<Self, Error> {
        Self::parse_prefix(head, file_len)?.complete(FORMAT, head.len())
    }

    /// As [`Safetensors::parse`], for a prefix that may end within the header.
    ///
    /// # Errors
    /// As [`Safetensors::parse`], except that a short `head` is [`Parsed::NeedMore`].
    pub fn parse_prefix(head: &[u8], file_len: u64) -> Result<Parsed<Self>, Error> {
        let Some(data_len) = file_len.checked_sub(LENGTH_BYTES) else {
            return Err(broken("header length", 0, "8 bytes", format!("{file_len} bytes to the end of the file")));
        };
        let Some((length, rest)) = head.split_first_chunk() else { return Ok(Parsed::NeedMore(LENGTH_BYTES)) };
        let header_len = u64::from_le_bytes(*length);
        let limit = data_len.min(MAX_HEADER_BYTES);
        if !(2..=limit).contains(&header_len) {
            return Err(broken("header length", 0, format!("2 to {limit} bytes"), format!("{header_len} bytes")));
        }
        let data_offset = LENGTH_BYTES + header_len;
        match usize::try_from(header_len).ok().and_then(|len| rest.get(..len)) {
            Some(header) => read(header, data_offset, file_len).map(Parsed::Complete),
            None => Ok(Parsed::NeedMore(data_offset)),
        }
    }

    /// The value of this key in `__metadata__`.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.metadata.iter().find(|(known, _)| known == key).map(|(_, text)| text.as_str())
    }

    /// The head of a file with these contiguous tensors in this order: the length, then the header.
    pub fn head<'a>(
        metadata: impl IntoIterator<Item = (&'a str, &'a str)>,
        tensors: impl IntoIterator<Item = (&'a str, BlockType, &'a [u64])>,
    ) -> Vec<u8> {
        let metadata = metadata.into_iter().map(|(key, text)| (key.to_string(), text.into()));
        let metadata = serde_json::Map::from_iter(metadata);
        let mut header = serde_json::Map::from_iter([("__metadata__".to_string(), metadata.into())]);
        let mut begin = 0;
        for (name, block_type, shape) in tensors {
            let end = begin + shape.iter().product::<u64>() / block_type.block_len() * block_type.block_bytes();
            let entry = serde_json::json!({ "dtype": block_type.name(), "shape": shape, "data_offsets": [begin, end] });
            header.insert(name.into(), entry);
            begin = end;
        }
        let mut text = serde_json::Value::from(header).to_string();
        // Aligns the data to 8 bytes, which the format requires of writers.
        text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
        [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let item = self.index.find(name, |item| self.tensors.get(item).map_or("", |tensor| &tensor.name))?;
        self.tensors.get(item)
    }
}

fn broken(field: impl Into<String>, offset: u64, expected: impl Into<String>, found: impl Into<String>) -> Error {
    Error::Format { format: FORMAT, field: field.into(), offset, expected: expected.into(), found: found.into() }
}

fn read(header: &[u8], data_offset: u64, file_len: u64) -> Result<Safetensors, Error> {
    let text = str::from_utf8(header)
        .map_err(|error| broken("header", LENGTH_BYTES + error.valid_up_to() as u64, "text in UTF-8", "invalid"))?;
    if !text.starts_with('{') {
        let found = format!("{:?}", text.chars().next().unwrap_or_default());
        return Err(broken("header", LENGTH_BYTES, "a JSON object that starts with `{`", found));
    }
    let mut contents = HeaderBuilder::default();
    read_json(text, &mut contents).map_err(|error| {
        let field = match contents.current.as_str() {
            "" => "header".into(),
            name => format!("header entry `{}`", Shown(name)),
        };
        json_error(FORMAT, field, LENGTH_BYTES, text, &error)
    })?;

    let HeaderBuilder { mut tensors, metadata, .. } = contents;
    let name = |item: usize| tensors.get(item).map_or("", |tensor| &tensor.name);
    let index = NameIndex::build(tensors.len(), name).map_err(|[first, second]| {
        let field = format!("header entry `{}`", Shown(name(second)));
        broken(field, LENGTH_BYTES, "a unique name", format!("the name of entries {first} and {second}"))
    })?;
    let key = |item: usize| metadata.get(item).map_or("", |(key, _)| key);
    NameIndex::build(metadata.len(), key).map_err(|[_, second]| {
        let field = format!("__metadata__ key `{}`", Shown(key(second)));
        broken(field, LENGTH_BYTES, "a unique key", "a duplicate")
    })?;
    check_layout(&tensors, data_offset, file_len)?;
    for tensor in &mut tensors {
        tensor.offset += data_offset; // within the file, as just checked
    }
    Ok(Safetensors { tensors, metadata, data_offset, index })
}

/// Checks that the data of `tensors`, with offsets from `data_offset`, fills the file.
fn check_layout(tensors: &[TensorInfo], data_offset: u64, file_len: u64) -> Result<(), Error> {
    let mut in_order: Vec<&TensorInfo> = tensors.iter().collect();
    crate::sort::by_key(&mut in_order, |tensor| (tensor.offset, tensor.size_bytes));
    let mut end = 0;
    for tensor in in_order {
        if tensor.offset != end {
            let what = if tensor.offset < end { "an overlap" } else { "a hole" };
            let field = format!("data of tensor `{}`", Shown(&tensor.name));
            let expected = format!("a start of {end} in data_offsets, where the previous data ends");
            let offset = data_offset.saturating_add(tensor.offset);
            return Err(broken(field, offset, expected, format!("{}, {what}", tensor.offset)));
        }
        end = tensor.range().end; // `data_offsets` gave it, so it cannot wrap
    }
    let data_len = file_len - data_offset;
    if file_len != UNKNOWN_LEN && end != data_len {
        let offset = data_offset.saturating_add(end.min(data_len));
        return Err(broken("end of data", offset, format!("{end} bytes of data"), format!("{data_len} bytes")));
    }
    Ok(())
}

/// Parses one JSON value that spans `text`.
fn read_json<'de, S: DeserializeSeed<'de>>(text: &'de str, seed: S) -> Result<S::Value, serde_json::Error> {
    let mut json = serde_json::Deserializer::from_str(text);
    let value = seed.deserialize(&mut json)?;
    json.end()?;
    Ok(value)
}

/// An error of the JSON parser, with line and column converted to a file offset.
fn json_error(format: &'static str, field: String, text_start: u64, text: &str, error: &serde_json::Error) -> Error {
    let lines_before = text.split_inclusive('\n').take(error.line().saturating_sub(1));
    let offset = lines_before.map(str::len).sum::<usize>() + error.column().saturating_sub(1);
    let mut found = error.to_string();
    if let Some(position) = found.rfind(" at line ") {
        found.truncate(position); // redundant with the offset
    }
    let found = Shown(&found).to_string();
    Error::Format { format, field, offset: text_start + offset as u64, expected: "JSON of this format".into(), found }
}

/// The header during parsing.
#[derive(Default)]
struct HeaderBuilder {
    tensors: Vec<TensorInfo>,
    metadata: Vec<(String, String)>,
    /// Name of the entry being read, for messages.
    current: String,
}

impl<'de> DeserializeSeed<'de> for &mut HeaderBuilder {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut HeaderBuilder {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            self.current.clone_from(&name);
            if name == "__metadata__" {
                if std::mem::replace(&mut has_metadata, true) {
                    return Err(A::Error::custom("a second __metadata__"));
                }
                map.next_value_seed(TextListReader(&mut self.metadata))?;
            } else if name.is_empty() {
                return Err(A::Error::custom("an empty name"));
            } else if self.tensors.len() == MAX_TENSORS {
                return Err(A::Error::custom(format_args!("more than {MAX_TENSORS} tensors")));
            } else {
                let entry: TensorEntry = map.next_value()?;
                self.tensors.push(entry.named(name).map_err(A::Error::custom)?);
            }
            self.current.clear();
        }
        Ok(())
    }
}

/// A tensor's header entry.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TensorEntry {
    dtype: Dtype,
    shape: ShapeReader,
    data_offsets: [u64; 2],
}

impl TensorEntry {
    /// The tensor with its offset from the start of the data, or the error.
    fn named(self, name: String) -> Result<TensorInfo, String> {
        let (Dtype(block_type), ShapeReader(shape), [begin, end]) = (self.dtype, self.shape, self.data_offsets);
        let size_bytes = end.checked_sub(begin).ok_or("data_offsets in reverse")?;
        if block_type.size_bytes(&shape) != Some(size_bytes) {
            return Err(format!("{size_bytes} bytes for shape {shape:?} of {block_type}"));
        }
        Ok(TensorInfo { name, shape, block_type, offset: begin, size_bytes })
    }
}

struct Dtype(BlockType);

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let dtype = String::deserialize(deserializer)?;
        BlockType::from_safetensors(&dtype)
            .map(Dtype)
            .ok_or_else(|| D::Error::custom(format_args!("unknown dtype `{}`", Shown(&dtype))))
    }
}

struct ShapeReader(Vec<u64>);

impl<'de> Deserialize<'de> for ShapeReader {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dimensions;
        impl<'de> Visitor<'de> for Dimensions {
            type Value = ShapeReader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an array of at most {MAX_RANK} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<ShapeReader, A::Error> {
                let mut shape = Vec::with_capacity(4);
                while let Some(dimension) = seq.next_element()? {
                    if shape.len() == MAX_RANK {
                        return Err(A::Error::invalid_length(MAX_RANK + 1, &self));
                    }
                    shape.push(dimension);
                }
                Ok(ShapeReader(shape))
            }
        }
        deserializer.deserialize_seq(Dimensions)
    }
}

/// Reads an object of strings into a list in order.
struct TextListReader<'a>(&'a mut Vec<(String, String)>);

impl<'de> DeserializeSeed<'de> for TextListReader<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TextListReader<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(text) = map.next_entry()? {
            if self.0.len() == MAX_METADATA {
                return Err(A::Error::custom(format_args!("more than {MAX_METADATA} entries")));
            }
            self.0.push(text);
        }
        Ok(())
    }
}

/// `model.safetensors.index.json`: maps the tensors of a sharded checkpoint to files.
#[derive(Clone, Debug)]
pub struct ShardIndex {
    /// File names in order, each a plain name next to the index.
    shards: Vec<String>,
    /// Tensor and shard number, sorted by tensor name.
    tensors: Vec<(String, u32)>,
}

impl ShardIndex {
    /// Parses the index.
    ///
    /// # Errors
    /// [`Error::Format`] if it is not JSON of this format, names a file that is not a plain `*.safetensors` name, or
    /// assigns a tensor to two shards.
    pub fn parse(json: &[u8]) -> Result<Self, Error> {
        let broken = |field: String, offset: u64, expected: &str, found: String| Error::Format {
            format: INDEX_FORMAT,
            field,
            offset,
            expected: expected.into(),
            found,
        };
        let bytes = super::text::without_mark(json);
        let start = (json.len() - bytes.len()) as u64;
        let text = str::from_utf8(bytes).map_err(|error| {
            broken("file".into(), start + error.valid_up_to() as u64, "text in UTF-8", "invalid".into())
        })?;
        let mut contents = IndexFile::default();
        read_json(text, &mut contents).map_err(|error| json_error(INDEX_FORMAT, "file".into(), start, text, &error))?;
        let IndexFile { shards, mut tensors, .. } = contents;
        crate::sort::by(&mut tensors, Ord::cmp);
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            let field = format!("weight_map entry `{}`", Shown(&pair[0].0));
            return Err(broken(field, 0, "one shard per tensor", "two".into()));
        }
        Ok(Self { shards, tensors })
    }

    /// The shards' file names, in order of first appearance.
    pub fn shards(&self) -> &[String] {
        &self.shards
    }

    /// The shard of the tensor with this name.
    pub fn shard_of(&self, tensor: &str) -> Option<&str> {
        let item = self.tensors.binary_search_by(|(name, _)| name.as_str().cmp(tensor)).ok()?;
        let (_, shard) = self.tensors.get(item)?;
        self.shards.get(*shard as usize).map(String::as_str)
    }

    /// Checks that the file `shard` holds exactly the tensors that the index assigns to it.
    ///
    /// # Errors
    /// [`Error::Format`] naming the tensor.
    pub fn check_shard(&self, shard: &str, file: &Safetensors) -> Result<(), Error> {
        let mismatch = |tensor: &str, offset, expected: String, found: String| Error::Format {
            format: INDEX_FORMAT,
            field: format!("tensor `{}` in `{}`", Shown(tensor), Shown(shard)),
            offset,
            expected,
            found,
        };
        for tensor in &file.tensors {
            let expected = match self.shard_of(&tensor.name) {
                Some(indexed) if indexed == shard => continue,
                Some(other) => format!("in `{}`", Shown(other)),
                None => "nowhere, because the index does not list it".into(),
            };
            return Err(mismatch(&tensor.name, tensor.offset, expected, "in this shard".into()));
        }
        let number = self.shards.iter().position(|indexed| indexed == shard);
        let in_shard = self.tensors.iter().filter(|tensor| Some(tensor.1 as usize) == number);
        match in_shard.map(|(name, _)| name).find(|name| file.tensor(name).is_none()) {
            Some(name) => Err(mismatch(name, LENGTH_BYTES, "in this shard's header".into(), "missing".into())),
            None => Ok(()),
        }
    }
}

/// The index during parsing.
#[derive(Default)]
struct IndexFile {
    shards: Vec<String>,
    shard_numbers: HashMap<String, u32>,
    tensors: Vec<(String, u32)>,
}

impl<'de> DeserializeSeed<'de> for &mut IndexFile {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut IndexFile {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut has_weight_map = false;
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
            } else if std::mem::replace(&mut has_weight_map, true) {
                return Err(A::Error::custom("a second weight_map"));
            } else {
                map.next_value_seed(WeightMap(self))?;
            }
        }
        if has_weight_map { Ok(()) } else { Err(A::Error::missing_field("weight_map")) }
    }
}

struct WeightMap<'a>(&'a mut IndexFile);

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensor names and file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let IndexFile { shards, shard_numbers, tensors } = self.0;
        while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
            if tensors.len() == MAX_INDEX_TENSORS {
                return Err(A::Error::custom(format_args!("more than {MAX_INDEX_TENSORS} tensors")));
            }
            let number = match shard_numbers.get(&shard) {
                Some(&number) => number,
                None if !is_plain_file_name(&shard) => {
                    let shard = Shown(&shard);
                    return Err(A::Error::custom(format_args!(
                        "`{shard}` for tensor `{}`, which is not a plain *.safetensors name",
                        Shown(&tensor)
                    )));
                }
                None if shards.len() == MAX_SHARDS => {
                    return Err(A::Error::custom(format_args!("more than {MAX_SHARDS} shards")));
                }
                None => {
                    let number = shards.len() as u32;
                    shards.push(shard.clone());
                    shard_numbers.insert(shard, number);
                    number
                }
            };
            tensors.push((tensor, number));
        }
        Ok(())
    }
}

/// Whether `name` is a file in the folder it is joined to, on every system: no separator, drive or device.
fn is_plain_file_name(name: &str) -> bool {
    let refused = |c: char| c.is_control() || matches!(c, '/' | '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|');
    name.ends_with(".safetensors") && !name.starts_with('.') && name.len() <= 255 && !name.contains(refused)
}
