//! Writes the header of a GGUF file, version 3. Format: see [`gguf`](super::gguf).
//!
//! ```text
//! GgufHeader::new -> set keys -> add tensors -> to_bytes, then each tensor's data with its padding
//! ```

use super::gguf::{Value, ValueType};
use super::{BlockType, Error, Shown};
use std::collections::HashSet;

const VERSION: u32 = 3;
/// Limit of tensor names in bytes: ggml uses one of the specification's 64 for the terminator.
const MAX_NAME_BYTES: usize = 63;
const MAX_RANK: usize = 4;

/// Keys and tensors of a new GGUF file, in order.
#[derive(Clone, Debug)]
pub struct GgufHeader {
    metadata: Vec<u8>,
    keys: HashSet<String>,
    tensors: Vec<u8>,
    names: HashSet<String>,
    /// Offset of the next tensor in the data.
    next_offset: u64,
    alignment: u64,
}

impl GgufHeader {
    /// A header without keys. Tensors start at multiples of `alignment` bytes, a power of two; unless it is 32, also
    /// set it as `general.alignment`.
    pub fn new(alignment: u32) -> GgufHeader {
        GgufHeader {
            metadata: Vec::new(),
            keys: HashSet::new(),
            tensors: Vec::new(),
            names: HashSet::new(),
            next_offset: 0,
            alignment: u64::from(alignment.max(1)),
        }
    }

    /// Adds a key.
    ///
    /// # Errors
    /// [`Error::Format`] if the key exists.
    pub fn set(&mut self, key: &str, value: Value<'_>) -> Result<(), Error> {
        self.key(key)?;
        put_type(&mut self.metadata, value_type(value));
        put_value(&mut self.metadata, value);
        Ok(())
    }

    /// Adds an array of values of one type.
    ///
    /// # Errors
    /// [`Error::Format`] if the key exists, or for a value of another type.
    pub fn set_array<'a>(
        &mut self,
        key: &str,
        element_type: ValueType,
        values: impl ExactSizeIterator<Item = Value<'a>>,
    ) -> Result<(), Error> {
        self.key(key)?;
        put_type(&mut self.metadata, ValueType::Array);
        put_type(&mut self.metadata, element_type);
        self.metadata.extend((values.len() as u64).to_le_bytes());
        for value in values {
            if value_type(value) != element_type {
                return Err(wrong(format!("`{}`", Shown(key)), element_type.name(), value_type(value).name()));
            }
            put_value(&mut self.metadata, value);
        }
        Ok(())
    }

    fn key(&mut self, key: &str) -> Result<(), Error> {
        if !self.keys.insert(key.to_owned()) {
            return Err(wrong(format!("metadata key `{}`", Shown(key)), "a unique key", "a duplicate"));
        }
        put_text(&mut self.metadata, key);
        Ok(())
    }

    /// Appends a tensor of this shape, contiguous dimension last. Returns the size of its data, without the
    /// [`GgufHeader::padding`] after it.
    ///
    /// # Errors
    /// [`Error::Format`] naming the tensor, if GGUF cannot hold it: a duplicate name or one longer than 63 bytes, no
    /// dimension or more than four, rows that are not a whole number of blocks, a type without a number.
    pub fn add_tensor(&mut self, name: &str, shape: &[u64], block_type: BlockType) -> Result<u64, Error> {
        let of = |what: &str| format!("{what} of tensor `{}`", Shown(name));
        if name.is_empty() || name.len() > MAX_NAME_BYTES {
            return Err(wrong(of("name"), format!("1 to {MAX_NAME_BYTES} bytes"), format!("{} bytes", name.len())));
        }
        if !self.names.insert(name.to_owned()) {
            return Err(wrong(of("name"), "a unique name", "a duplicate"));
        }
        let row_len = shape.last().copied().unwrap_or_default();
        let fits = (1..=MAX_RANK).contains(&shape.len()) && row_len.is_multiple_of(block_type.block_len());
        let size_bytes = block_type.size_bytes(shape).filter(|&size| fits && size > 0);
        let end = |size: u64| self.next_offset.checked_add(size)?.checked_next_multiple_of(self.alignment);
        let Some((size_bytes, end)) = size_bytes.and_then(|size| Some((size, end(size)?))) else {
            let block_len = block_type.block_len();
            let expected = format!("1 to {MAX_RANK} dimensions above zero, the last a multiple of {block_len}");
            return Err(wrong(of("shape"), expected, format!("{shape:?}")));
        };
        let Some(id) = block_type.ggml_id() else {
            return Err(wrong(of("type"), "a GGUF type", block_type.name()));
        };
        put_text(&mut self.tensors, name);
        self.tensors.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|dimension| self.tensors.extend(dimension.to_le_bytes()));
        self.tensors.extend(id.to_le_bytes());
        self.tensors.extend(self.next_offset.to_le_bytes());
        self.next_offset = end;
        Ok(size_bytes)
    }

    /// Bytes of zero padding after `size_bytes` of data.
    pub fn padding(&self, size_bytes: u64) -> usize {
        (size_bytes.next_multiple_of(self.alignment) - size_bytes) as usize
    }

    /// The file up to its first tensor.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.names.len() as u64).to_le_bytes());
        bytes.extend((self.keys.len() as u64).to_le_bytes());
        bytes.extend(&self.metadata);
        bytes.extend(&self.tensors);
        bytes.resize(bytes.len() + self.padding(bytes.len() as u64), 0);
        bytes
    }
}

fn wrong(field: String, expected: impl Into<String>, found: impl Into<String>) -> Error {
    Error::Format { format: "gguf", field, offset: 0, expected: expected.into(), found: found.into() }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_type(out: &mut Vec<u8>, value_type: ValueType) {
    out.extend((value_type as u32).to_le_bytes());
}

fn value_type(value: Value<'_>) -> ValueType {
    match value {
        Value::U8(_) => ValueType::U8,
        Value::I8(_) => ValueType::I8,
        Value::U16(_) => ValueType::U16,
        Value::I16(_) => ValueType::I16,
        Value::U32(_) => ValueType::U32,
        Value::I32(_) => ValueType::I32,
        Value::F32(_) => ValueType::F32,
        Value::Bool(_) => ValueType::Bool,
        Value::Str(_) => ValueType::String,
        Value::Array(_) => ValueType::Array,
        Value::U64(_) => ValueType::U64,
        Value::I64(_) => ValueType::I64,
        Value::F64(_) => ValueType::F64,
    }
}

/// Parsing limited the nesting of arrays.
fn put_value(out: &mut Vec<u8>, value: Value<'_>) {
    match value {
        Value::U8(value) => out.extend(value.to_le_bytes()),
        Value::I8(value) => out.extend(value.to_le_bytes()),
        Value::U16(value) => out.extend(value.to_le_bytes()),
        Value::I16(value) => out.extend(value.to_le_bytes()),
        Value::U32(value) => out.extend(value.to_le_bytes()),
        Value::I32(value) => out.extend(value.to_le_bytes()),
        Value::F32(value) => out.extend(value.to_le_bytes()),
        Value::Bool(value) => out.push(value.into()),
        Value::Str(value) => put_text(out, value),
        Value::U64(value) => out.extend(value.to_le_bytes()),
        Value::I64(value) => out.extend(value.to_le_bytes()),
        Value::F64(value) => out.extend(value.to_le_bytes()),
        Value::Array(array) => {
            put_type(out, array.element_type());
            out.extend(array.len().to_le_bytes());
            array.iter().for_each(|value| put_value(out, value));
        }
    }
}
