//! GGUF, versions 2 and 3, little endian. Format: ggml's `docs/gguf.md`.
//!
//! ```text
//! magic, version, tensor count, metadata count
//! metadata      count times: key, value type, value
//! tensor infos  count times: name, rank, dimensions (contiguous one first), type, offset into the data
//! padding       to `general.alignment`, 32 if not given
//! data          tensor after tensor in the order of the infos, each padded to the alignment
//! ```
//! Like ggml's reader, this one rejects gaps between tensors and reordered tensors, which the format permits. It also
//! rejects what ggml does not specify: empty, repeated or path-like names, zero dimensions, bools other than 0 and 1,
//! and bytes after the padding of the last tensor (as in a spliced download). The padding itself may be missing, as
//! in vocabulary-only files.

use super::{BlockType, Error, MAX_TENSORS, NameIndex, Parsed, Shown, TensorInfo, UNKNOWN_LEN};
use std::fmt;

const FORMAT: &str = "gguf";
/// Limit of the specification, "at most 2^16-1 bytes long".
const MAX_KEY_BYTES: u64 = 65_535;
/// Limit of the specification, "at most 64 bytes long".
const MAX_TENSOR_NAME_BYTES: u64 = 64;
/// Limit of the specification, "currently at most 4".
const MAX_RANK: u32 = 4;
/// Nested arrays. The specification sets no limit, no known key nests, and ggml rejects them.
const MAX_NESTING: usize = 4;
/// Key length, a byte of key, value type, a byte of value.
const MIN_KEY_VALUE_BYTES: u64 = 8 + 1 + 4 + 1;
/// Name length, a byte of name, rank, one dimension, type, offset.
const MIN_TENSOR_INFO_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;
/// Alignment of a file that does not state it.
pub(crate) const DEFAULT_ALIGNMENT: u32 = 32;
/// The specification requires a multiple of 8, ggml a power of two; no page is larger than 2 MiB.
const ALIGNMENTS: std::ops::RangeInclusive<u32> = 8..=2 << 20;

/// The header of a GGUF file.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// Version of the format, 2 or 3.
    pub version: u32,
    /// Keys and values.
    pub metadata: Metadata,
    /// Tensors in file order.
    pub tensors: Vec<TensorInfo>,
    /// Offset of the tensor data. Without tensors this may be past the end of the file.
    pub data_offset: u64,
    /// Alignment of tensor offsets, which count from `data_offset`.
    pub alignment: u32,
    index: NameIndex,
}

impl Gguf {
    /// Parses the header at the start of `head`, a prefix of a file of `file_len` bytes (or [`UNKNOWN_LEN`]).
    ///
    /// # Errors
    /// [`Error::Format`] if the file breaks the format or `head` ends within the header, [`Error::Unsupported`] for
    /// other versions and unknown tensor types.
    pub fn parse(head: &[u8], file_len: u64) -> Result<Self, Error> {
        Self::parse_prefix(head, file_len)?.complete(FORMAT, head.len())
    }

    /// As [`Gguf::parse`], for a prefix that may end within the header.
    ///
    /// # Errors
    /// As [`Gguf::parse`], except that a short `head` is [`Parsed::NeedMore`].
    pub fn parse_prefix(head: &[u8], file_len: u64) -> Result<Parsed<Self>, Error> {
        match read(head, file_len) {
            Ok(gguf) => Ok(Parsed::Complete(gguf)),
            Err(Halt::NeedMore(len)) => Ok(Parsed::NeedMore(len)),
            Err(Halt::Broken(error)) => Err(error),
        }
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let item = self.index.find(name, |item| self.tensors.get(item).map_or("", |tensor| &tensor.name))?;
        self.tensors.get(item)
    }
}

/// Metadata: keys with typed values in file order. Values stay in a copy of the header and are decoded on demand, so
/// a vocabulary of 150,000 tokens needs no allocation per token.
///
/// Each `get_*` returns `None` for an absent key, and [`Error::Format`] naming key and offset for a value of another
/// type.
#[derive(Clone, Debug)]
pub struct Metadata {
    /// The file up to the end of the metadata: positions are file offsets.
    header: Vec<u8>,
    /// Offset of each key.
    entries: Vec<u32>,
    index: NameIndex,
}

impl Metadata {
    /// Number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries.iter().filter_map(|&start| self.decode(start))
    }

    /// The value of `key`, of any type.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        self.find(key).map(|(_, value)| value)
    }

    /// An integer of any width that fits in 32 bits.
    pub fn get_u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.typed(key, "an integer from 0 to 4294967295", |value| u32::try_from(value.as_integer()?).ok())
    }

    /// An integer of any width that fits in 64 bits.
    pub fn get_u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "an integer from 0 to 18446744073709551615", |value| u64::try_from(value.as_integer()?).ok())
    }

    /// A float; 64-bit floats are rounded.
    pub fn get_f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.typed(key, "a float", Value::as_float)
    }

    /// A bool.
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "a bool", Value::as_bool)
    }

    /// A string.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>, Error> {
        self.typed(key, "a string", Value::as_str)
    }

    /// An array of strings.
    pub fn get_str_array(&self, key: &str) -> Result<Option<Vec<&str>>, Error> {
        self.typed_array(key, "an array of strings", Value::as_str)
    }

    /// An array of floats; 64-bit floats are rounded.
    pub fn get_f32_array(&self, key: &str) -> Result<Option<Vec<f32>>, Error> {
        self.typed_array(key, "an array of floats", Value::as_float)
    }

    /// An array of integers of any width that fit in 32 bits.
    pub fn get_u32_array(&self, key: &str) -> Result<Option<Vec<u32>>, Error> {
        let expected = "an array of integers from 0 to 4294967295";
        self.typed_array(key, expected, |value| u32::try_from(value.as_integer()?).ok())
    }

    /// An array of integers of any width that fit in 32 bits.
    pub fn get_i32_array(&self, key: &str) -> Result<Option<Vec<i32>>, Error> {
        let expected = "an array of integers from -2147483648 to 2147483647";
        self.typed_array(key, expected, |value| i32::try_from(value.as_integer()?).ok())
    }

    /// An array of signed or unsigned bytes.
    pub fn get_byte_array(&self, key: &str) -> Result<Option<Vec<u8>>, Error> {
        self.typed_array(key, "an array of bytes", |value| {
            let number = value.as_integer()?;
            u8::try_from(number).ok().or_else(|| i8::try_from(number).ok().map(|byte| byte as u8))
        })
    }

    /// An array of bools.
    pub fn get_bool_array(&self, key: &str) -> Result<Option<Vec<bool>>, Error> {
        self.typed_array(key, "an array of bools", Value::as_bool)
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some((start, value)) = self.find(key) else { return Ok(None) };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(broken(format_args!("`{}`", Shown(key)), start.into(), expected, value.to_string())),
        }
    }

    fn typed_array<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, Error> {
        self.typed(key, expected, |value| match value {
            Value::Array(array) => array.iter().map(convert).collect(),
            _ => None,
        })
    }

    /// Offset and value of `key`.
    fn find(&self, key: &str) -> Option<(u32, Value<'_>)> {
        let item = self.index.find(key, |item| key_at(&self.header, &self.entries, item))?;
        let start = *self.entries.get(item)?;
        Some((start, self.decode(start)?.1))
    }

    /// The key and value at `start`. Never `None`: parsing decoded the same bytes.
    fn decode(&self, start: u32) -> Option<(&str, Value<'_>)> {
        let mut cursor = Cursor::within(&self.header, start as usize);
        let key = cursor.key(0).ok()?;
        Some((key, cursor.value(key).ok()?))
    }
}

/// Type of a metadata value, `gguf_metadata_value_type` in the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    /// 8-bit unsigned integer.
    U8,
    /// 8-bit signed integer.
    I8,
    /// 16-bit unsigned integer.
    U16,
    /// 16-bit signed integer.
    I16,
    /// 32-bit unsigned integer.
    U32,
    /// 32-bit signed integer.
    I32,
    /// 32-bit float.
    F32,
    /// A byte, 0 or 1.
    Bool,
    /// UTF-8 text after its length.
    String,
    /// Elements of one type, after that type and their number.
    Array,
    /// 64-bit unsigned integer.
    U64,
    /// 64-bit signed integer.
    I64,
    /// 64-bit float.
    F64,
}

impl ValueType {
    /// In order of their numbers in files.
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::String,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    /// Minimum bytes of a value: a string has at least its length, an array its type and length.
    const fn min_bytes(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::String => 8,
            ValueType::Array => 12,
        }
    }

    /// Name in the specification, lower-case.
    pub const fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "uint8",
            ValueType::I8 => "int8",
            ValueType::U16 => "uint16",
            ValueType::I16 => "int16",
            ValueType::U32 => "uint32",
            ValueType::I32 => "int32",
            ValueType::F32 => "float32",
            ValueType::Bool => "bool",
            ValueType::String => "string",
            ValueType::Array => "array",
            ValueType::U64 => "uint64",
            ValueType::I64 => "int64",
            ValueType::F64 => "float64",
        }
    }
}

/// A metadata value. Its `Display` is shortened for messages.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    /// 8-bit unsigned integer.
    U8(u8),
    /// 8-bit signed integer.
    I8(i8),
    /// 16-bit unsigned integer.
    U16(u16),
    /// 16-bit signed integer.
    I16(i16),
    /// 32-bit unsigned integer.
    U32(u32),
    /// 32-bit signed integer.
    I32(i32),
    /// 32-bit float.
    F32(f32),
    /// A bool.
    Bool(bool),
    /// UTF-8 text.
    Str(&'a str),
    /// Elements of one type, undecoded.
    Array(Array<'a>),
    /// 64-bit unsigned integer.
    U64(u64),
    /// 64-bit signed integer.
    I64(i64),
    /// 64-bit float.
    F64(f64),
}

impl<'a> Value<'a> {
    /// The value of an integer of any width.
    pub fn as_integer(self) -> Option<i128> {
        match self {
            Value::U8(value) => Some(value.into()),
            Value::I8(value) => Some(value.into()),
            Value::U16(value) => Some(value.into()),
            Value::I16(value) => Some(value.into()),
            Value::U32(value) => Some(value.into()),
            Value::I32(value) => Some(value.into()),
            Value::U64(value) => Some(value.into()),
            Value::I64(value) => Some(value.into()),
            _ => None,
        }
    }

    /// The value of a float; 64-bit floats are rounded.
    pub fn as_float(self) -> Option<f32> {
        match self {
            Value::F32(value) => Some(value),
            Value::F64(value) => Some(value as f32),
            _ => None,
        }
    }

    /// The value of a bool.
    pub fn as_bool(self) -> Option<bool> {
        match self {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// The value of a string.
    pub fn as_str(self) -> Option<&'a str> {
        match self {
            Value::Str(value) => Some(value),
            _ => None,
        }
    }
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::F32(value) => write!(f, "{value}"),
            Value::F64(value) => write!(f, "{value}"),
            Value::Bool(value) => write!(f, "{value}"),
            Value::Str(value) => write!(f, "\"{}\"", Shown(value)),
            Value::Array(array) => write!(f, "array of {} {}", array.len, array.element_type.name()),
            integer => write!(f, "{}", integer.as_integer().unwrap_or_default()),
        }
    }
}

/// An array in the metadata, undecoded.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    element_type: ValueType,
    len: u64,
    /// The header up to the array's end.
    header: &'a [u8],
    /// Offset of the first element.
    start: usize,
}

impl<'a> Array<'a> {
    /// Type of the elements.
    pub fn element_type(&self) -> ValueType {
        self.element_type
    }

    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut cursor = Cursor::within(self.header, self.start);
        let element_type = self.element_type;
        (0..self.len).map_while(move |_| cursor.value_of(element_type, format_args!("element")).ok())
    }
}

/// Why parsing stopped.
enum Halt {
    Broken(Error),
    /// The prefix ends before the header; the file has at least this many bytes.
    NeedMore(u64),
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Halt::Broken(error)
    }
}

fn broken(field: fmt::Arguments<'_>, offset: u64, expected: impl Into<String>, found: impl Into<String>) -> Error {
    Error::Format { format: FORMAT, field: field.to_string(), offset, expected: expected.into(), found: found.into() }
}

/// Reads a prefix of a file. `format_args!` names fields without cost until there is an error.
struct Cursor<'a> {
    head: &'a [u8],
    pos: usize,
    file_len: u64,
}

impl<'a> Cursor<'a> {
    /// Reads the already parsed `header` from `pos`.
    fn within(header: &'a [u8], pos: usize) -> Self {
        Self { head: header, pos, file_len: header.len() as u64 }
    }

    fn file_left(&self) -> u64 {
        self.file_len.saturating_sub(self.pos as u64)
    }

    fn take(&mut self, len: u64, field: fmt::Arguments<'_>) -> Result<&'a [u8], Halt> {
        if len > self.file_left() {
            let found = format!("{} bytes to the end of the file", self.file_left());
            return Err(broken(field, self.pos as u64, format!("{len} bytes"), found).into());
        }
        let end = self.pos as u64 + len; // within the file, so it cannot wrap
        let taken =
            usize::try_from(end).ok().and_then(|end| self.head.get(self.pos..end)).ok_or(Halt::NeedMore(end))?;
        self.pos += taken.len();
        Ok(taken)
    }

    fn bytes<const N: usize>(&mut self, field: fmt::Arguments<'_>) -> Result<[u8; N], Halt> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N as u64, field)?);
        Ok(bytes)
    }

    fn u32(&mut self, field: fmt::Arguments<'_>) -> Result<u32, Halt> {
        self.bytes(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: fmt::Arguments<'_>) -> Result<u64, Halt> {
        self.bytes(field).map(u64::from_le_bytes)
    }

    /// A count of items of at least `min_bytes` each, checked against the rest of the file.
    fn count(&mut self, min_bytes: u64, field: fmt::Arguments<'_>) -> Result<u64, Halt> {
        let start = self.pos as u64;
        let count = self.u64(field)?;
        let limit = self.file_left() / min_bytes;
        if count > limit {
            let expected = format!("at most {limit}, the room in the rest of the file");
            return Err(broken(field, start, expected, count.to_string()).into());
        }
        Ok(count)
    }

    fn string(&mut self, max_bytes: u64, field: fmt::Arguments<'_>) -> Result<&'a str, Halt> {
        let start = self.pos as u64;
        let len = self.u64(field)?;
        let limit = max_bytes.min(self.file_left());
        if len > limit {
            return Err(broken(field, start, format!("at most {limit} bytes"), format!("{len} bytes")).into());
        }
        let text_start = self.pos as u64;
        let bytes = self.take(len, field)?;
        str::from_utf8(bytes).map_err(|error| {
            let offset = text_start + error.valid_up_to() as u64;
            broken(field, offset, "text in UTF-8", "invalid").into()
        })
    }

    fn key(&mut self, item: u64) -> Result<&'a str, Halt> {
        self.string(MAX_KEY_BYTES, format_args!("metadata key {item}"))
    }

    fn value_type(&mut self, field: fmt::Arguments<'_>) -> Result<ValueType, Halt> {
        let start = self.pos as u64;
        let number = self.u32(field)?;
        let value_type = usize::try_from(number).ok().and_then(|number| ValueType::ALL.get(number));
        value_type
            .copied()
            .ok_or_else(|| broken(format_args!("value type of {field}"), start, "0 to 12", number.to_string()).into())
    }

    /// A value after its type.
    fn value(&mut self, key: &str) -> Result<Value<'a>, Halt> {
        let key = Shown(key);
        let key = format_args!("`{key}`");
        let value_type = self.value_type(key)?;
        self.value_of(value_type, key)
    }

    fn value_of(&mut self, value_type: ValueType, field: fmt::Arguments<'_>) -> Result<Value<'a>, Halt> {
        Ok(match value_type {
            ValueType::U8 => Value::U8(u8::from_le_bytes(self.bytes(field)?)),
            ValueType::I8 => Value::I8(i8::from_le_bytes(self.bytes(field)?)),
            ValueType::U16 => Value::U16(u16::from_le_bytes(self.bytes(field)?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(self.bytes(field)?)),
            ValueType::U32 => Value::U32(self.u32(field)?),
            ValueType::I32 => Value::I32(i32::from_le_bytes(self.bytes(field)?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.bytes(field)?)),
            ValueType::U64 => Value::U64(self.u64(field)?),
            ValueType::I64 => Value::I64(i64::from_le_bytes(self.bytes(field)?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.bytes(field)?)),
            ValueType::String => Value::Str(self.string(u64::MAX, field)?),
            ValueType::Bool => {
                let start = self.pos as u64;
                match self.bytes(field)? {
                    [0] => Value::Bool(false),
                    [1] => Value::Bool(true),
                    [other] => return Err(broken(field, start, "0 or 1", other.to_string()).into()),
                }
            }
            ValueType::Array => {
                let (element_type, len) = self.array_head(field)?;
                let start = self.pos;
                self.skip(element_type, len, field)?;
                let header = self.head.get(..self.pos).unwrap_or_default();
                Value::Array(Array { element_type, len, header, start })
            }
        })
    }

    fn array_head(&mut self, field: fmt::Arguments<'_>) -> Result<(ValueType, u64), Halt> {
        let element_type = self.value_type(format_args!("elements of {field}"))?;
        Ok((element_type, self.count(element_type.min_bytes(), format_args!("length of {field}"))?))
    }

    /// Checks and skips `len` elements. Nested arrays are queued, so that a file cannot control the depth of the call
    /// stack.
    fn skip(&mut self, element_type: ValueType, len: u64, field: fmt::Arguments<'_>) -> Result<(), Halt> {
        let mut pending = vec![(element_type, len)];
        while let Some((element_type, len)) = pending.pop() {
            match element_type {
                ValueType::Array if len == 0 => {}
                ValueType::Array if pending.len() + 1 == MAX_NESTING => {
                    let expected = format!("at most {MAX_NESTING} nested arrays");
                    return Err(broken(field, self.pos as u64, expected, "more").into());
                }
                ValueType::Array => {
                    pending.push((ValueType::Array, len - 1));
                    pending.push(self.array_head(field)?);
                }
                ValueType::String | ValueType::Bool => {
                    for _ in 0..len {
                        self.value_of(element_type, field)?;
                    }
                }
                fixed => {
                    self.take(len.saturating_mul(fixed.min_bytes()), field)?;
                }
            }
        }
        Ok(())
    }
}

fn read(head: &[u8], file_len: u64) -> Result<Gguf, Halt> {
    let mut cursor = Cursor { head, pos: 0, file_len };
    let magic: [u8; 4] = cursor.bytes(format_args!("magic"))?;
    if magic != *b"GGUF" {
        let found = format!("\"{}\"", magic.escape_ascii());
        return Err(broken(format_args!("magic"), 0, "\"GGUF\"", found).into());
    }
    let version = cursor.u32(format_args!("version"))?;
    if !matches!(version, 2 | 3) {
        let big_endian = matches!(version.swap_bytes(), 1..=3);
        return Err(Error::Unsupported {
            format: FORMAT,
            field: "version at byte 4".into(),
            found: if big_endian { "big endian".into() } else { version.to_string() },
            supported: "versions 2 and 3, little endian".into(),
        }
        .into());
    }
    let tensor_count_start = cursor.pos as u64;
    let n_tensors = cursor.count(MIN_TENSOR_INFO_BYTES, format_args!("tensor count"))?;
    if n_tensors > MAX_TENSORS as u64 {
        let (field, expected) = (format_args!("tensor count"), format!("at most {MAX_TENSORS}"));
        return Err(broken(field, tensor_count_start, expected, n_tensors.to_string()).into());
    }
    let n_keys = cursor.count(MIN_KEY_VALUE_BYTES, format_args!("metadata count"))?;

    let metadata = read_metadata(&mut cursor, n_keys)?;
    let alignment = alignment(&metadata)?;
    let (mut tensors, index) = read_tensors(&mut cursor, n_tensors, alignment.into())?;
    let data_offset = (cursor.pos as u64).next_multiple_of(alignment.into());
    lay_out(&mut tensors, data_offset, alignment.into(), file_len)?;
    Ok(Gguf { version, metadata, tensors, data_offset, alignment, index })
}

fn read_metadata(cursor: &mut Cursor<'_>, n_keys: u64) -> Result<Metadata, Halt> {
    let mut entries = Vec::with_capacity(room_for(n_keys, cursor, MIN_KEY_VALUE_BYTES));
    for item in 0..n_keys {
        let start = cursor.pos as u64;
        let key = cursor.key(item)?;
        if key.is_empty() {
            return Err(broken(format_args!("metadata key {item}"), start, "a name", "empty").into());
        }
        entries
            .push(u32::try_from(start).map_err(|_| {
                broken(format_args!("metadata key {item}"), start, "metadata of at most 4 GiB", "more")
            })?);
        cursor.value(key)?;
    }
    let header = cursor.head.get(..cursor.pos).unwrap_or_default().to_vec();
    match NameIndex::build(entries.len(), |item| key_at(&header, &entries, item)) {
        Ok(index) => Ok(Metadata { header, entries, index }),
        Err([first, second]) => {
            let key = key_at(&header, &entries, second);
            let offset_of = |item: usize| entries.get(item).copied().unwrap_or_default();
            let found = format!("a duplicate of the key at byte {}", offset_of(first));
            let field = format_args!("metadata key `{}`", Shown(key));
            Err(broken(field, offset_of(second).into(), "a unique key", found).into())
        }
    }
}

/// The key of a parsed entry.
fn key_at<'a>(header: &'a [u8], entries: &[u32], item: usize) -> &'a str {
    let start = entries.get(item).copied().unwrap_or_default();
    Cursor::within(header, start as usize).key(item as u64).unwrap_or_default()
}

fn alignment(metadata: &Metadata) -> Result<u32, Error> {
    let key = "general.alignment";
    match metadata.find(key) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some((_, Value::U32(alignment))) if alignment.is_power_of_two() && ALIGNMENTS.contains(&alignment) => {
            Ok(alignment)
        }
        Some((start, other)) => {
            let expected = format!("a uint32, a power of two from {} to {}", ALIGNMENTS.start(), ALIGNMENTS.end());
            Err(broken(format_args!("`{key}`"), start.into(), expected, other.to_string()))
        }
    }
}

/// Capacity to reserve: the announced number of items, limited by the bytes at hand.
fn room_for(n_items: u64, cursor: &Cursor<'_>, min_bytes: u64) -> usize {
    let head_left = cursor.head.len().saturating_sub(cursor.pos) as u64;
    usize::try_from(n_items.min(head_left / min_bytes)).unwrap_or_default()
}

/// Reads the tensor infos. Offsets stay relative to the data, whose start is known only after the last info.
fn read_tensors(cursor: &mut Cursor<'_>, n_tensors: u64, alignment: u64) -> Result<(Vec<TensorInfo>, NameIndex), Halt> {
    let mut tensors: Vec<TensorInfo> = Vec::with_capacity(room_for(n_tensors, cursor, MIN_TENSOR_INFO_BYTES));
    let mut starts = Vec::with_capacity(tensors.capacity());
    let mut next_offset = 0;
    for item in 0..n_tensors {
        starts.push(cursor.pos as u64);
        let tensor = read_tensor(cursor, item, next_offset, alignment)?;
        // Cannot wrap: checked in `read_tensor`.
        next_offset = (tensor.offset + tensor.size_bytes).next_multiple_of(alignment);
        tensors.push(tensor);
    }
    let name = |item: usize| tensors.get(item).map_or("", |tensor| &tensor.name);
    match NameIndex::build(tensors.len(), name) {
        Ok(index) => Ok((tensors, index)),
        Err([first, second]) => {
            let start = starts.get(second).copied().unwrap_or_default();
            let found = format!("`{}`, a duplicate of tensor {first}", Shown(name(second)));
            Err(broken(format_args!("name of tensor {second}"), start, "a unique name", found).into())
        }
    }
}

fn read_tensor(cursor: &mut Cursor<'_>, item: u64, next_offset: u64, alignment: u64) -> Result<TensorInfo, Halt> {
    let start = cursor.pos as u64;
    let name = cursor.string(MAX_TENSOR_NAME_BYTES, format_args!("name of tensor {item}"))?;
    if name.is_empty() || name.contains(|c: char| c.is_control() || matches!(c, '/' | '\\')) || name.contains("..") {
        // Names are used in messages and for dumped files.
        let expected = "a name without control characters, slashes and `..`";
        let found = format!("\"{}\"", Shown(name));
        return Err(broken(format_args!("name of tensor {item}"), start, expected, found).into());
    }

    let rank_start = cursor.pos as u64;
    let rank = cursor.u32(format_args!("rank of tensor `{name}`"))?;
    if rank == 0 || rank > MAX_RANK {
        let (field, expected) = (format_args!("rank of tensor `{name}`"), format!("1 to {MAX_RANK}"));
        return Err(broken(field, rank_start, expected, rank.to_string()).into());
    }
    let shape_start = cursor.pos as u64;
    let mut shape = Vec::with_capacity(rank as usize);
    for _ in 0..rank {
        shape.push(cursor.u64(format_args!("shape of tensor `{name}`"))?);
    }
    shape.reverse();

    let type_start = cursor.pos as u64;
    let type_number = cursor.u32(format_args!("type of tensor `{name}`"))?;
    let block_type = BlockType::from_ggml_id(type_number).ok_or_else(|| Error::Unsupported {
        format: FORMAT,
        field: format!("type of tensor `{name}` at byte {type_start}"),
        found: format!("number {type_number}"),
        supported: "GGML types 0 to 41 except removed ones".into(),
    })?;
    let shape_error = |expected: String| {
        broken(format_args!("shape of tensor `{name}`"), shape_start, expected, format!("{shape:?}"))
    };
    if shape.contains(&0) {
        return Err(shape_error("dimensions above zero".into()).into());
    }
    let row_len = shape.last().copied().unwrap_or_default();
    if !row_len.is_multiple_of(block_type.block_len()) {
        return Err(shape_error(format!(
            "rows of a multiple of {}, the block of {block_type}",
            block_type.block_len()
        ))
        .into());
    }
    // Checks the padded end as well, so that the next tensor's offset cannot wrap.
    let end = |size: u64| next_offset.checked_add(size).filter(|end| end.checked_next_multiple_of(alignment).is_some());
    let room = cursor.file_left();
    let size_bytes = block_type.size_bytes(&shape).filter(|&size| end(size).is_some_and(|end| end <= room));
    let size_bytes =
        size_bytes.ok_or_else(|| shape_error(format!("data that fits the file's remaining {room} bytes")))?;

    let offset_start = cursor.pos as u64;
    let offset = cursor.u64(format_args!("offset of tensor `{name}`"))?;
    if offset != next_offset {
        let expected = format!("{next_offset}, the end of the previous tensor padded to {alignment}");
        let field = format_args!("offset of tensor `{name}`");
        return Err(broken(field, offset_start, expected, offset.to_string()).into());
    }
    Ok(TensorInfo { name: name.into(), shape, block_type, offset, size_bytes })
}

/// Converts tensor offsets from the data's start to the file's, and checks that the data fills the file.
fn lay_out(tensors: &mut [TensorInfo], data_offset: u64, alignment: u64, file_len: u64) -> Result<(), Error> {
    let mut data_end = data_offset;
    for tensor in tensors {
        let room = file_len.checked_sub(data_offset).and_then(|len| len.checked_sub(tensor.offset));
        if room.is_none_or(|room| room < tensor.size_bytes) {
            let field = format_args!("data of tensor `{}`", tensor.name);
            let found = format!("{} bytes to the end of the file", room.unwrap_or_default());
            let offset = data_offset.saturating_add(tensor.offset);
            return Err(broken(field, offset, format!("{} bytes", tensor.size_bytes), found));
        }
        tensor.offset += data_offset;
        data_end = tensor.range().end;
    }
    let left = file_len.saturating_sub(data_end);
    let padding = (alignment - data_end % alignment) % alignment;
    if file_len != UNKNOWN_LEN && left > padding {
        let expected = format!("at most {padding} bytes of padding");
        return Err(broken(format_args!("end of data"), data_end, expected, format!("{left} more bytes")));
    }
    Ok(())
}
