//! Importance matrices, as measured by `llama-imatrix`: the mean square of the inputs of each matrix column. Two
//! formats: GGUF, and the older `.dat`.
//!
//! ```text
//! GGUF   tensors `NAME.in_sum2` [matrices, columns] and `NAME.counts` [matrices, 1]
//! .dat   number of entries; each: length of the name, name, calls, number of values, values that are sums over the
//! calls
//! ```

use std::collections::HashMap;
use std::path::Path;

use super::FileBytes;
use crate::error::Error;
use crate::formats::gguf::Gguf;
use crate::formats::{BlockType, TensorInfo};
use crate::load::tensor_index::floats;

const FORMAT: &str = "imatrix";

/// Importances by tensor name.
#[derive(Clone, Debug, Default)]
pub struct ImportanceMatrix {
    entries: HashMap<String, Vec<f32>>,
    file_name: String,
}

impl ImportanceMatrix {
    /// Reads a file of either format.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be read, [`Error::InFile`] naming its invalid part: a negative or non-finite value,
    /// an entry without counts.
    pub fn open(path: impl AsRef<Path>) -> Result<ImportanceMatrix, Error> {
        let path = path.as_ref();
        let mut found = FileBytes::map(path).and_then(|file| Self::parse(&file)).map_err(|e| e.in_file(path))?;
        found.file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(found)
    }

    /// Reads a file of either format in memory.
    ///
    /// # Errors
    /// As [`ImportanceMatrix::open`].
    pub fn parse(bytes: &[u8]) -> Result<ImportanceMatrix, Error> {
        let entries = if bytes.starts_with(b"GGUF") { gguf(bytes)? } else { dat(bytes)? };
        for (name, values) in &entries {
            if let Some(at) = values.iter().position(|value| !(value.is_finite() && *value >= 0.0)) {
                let found = format!("{} at {at}", values[at]);
                return Err(wrong(
                    &format!("entry `{}`", name.escape_debug()),
                    0,
                    "finite numbers of 0 or more",
                    found,
                ));
            }
        }
        Ok(ImportanceMatrix { entries, file_name: String::new() })
    }

    /// Number of tensors with importances.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The importances of a tensor's columns, expert by expert.
    pub fn get(&self, tensor: &str) -> Option<&[f32]> {
        self.entries.get(tensor).map(Vec::as_slice)
    }

    /// The file's name without its folder.
    pub fn file_name(&self) -> &str {
        &self.file_name
    }
}

fn wrong(field: &str, offset: u64, expected: &str, found: impl ToString) -> Error {
    Error::Format { format: FORMAT, field: field.into(), offset, expected: expected.into(), found: found.to_string() }
}

fn gguf(bytes: &[u8]) -> Result<HashMap<String, Vec<f32>>, Error> {
    let file = Gguf::parse(bytes, bytes.len() as u64)?;
    let values = |tensor: &TensorInfo| match tensor.block_type {
        BlockType::F32 => floats(tensor, tensor.bytes(bytes)?),
        other => Err(wrong(&format!("type of tensor `{}`", tensor.name), tensor.offset, "F32", other)),
    };
    let mut entries = HashMap::new();
    for tensor in &file.tensors {
        let Some(name) = tensor.name.strip_suffix(".in_sum2") else { continue };
        let missing = || wrong(&format!("tensor `{name}.counts`"), tensor.offset, "a tensor", "missing");
        let counts_tensor = file.tensor(&format!("{name}.counts")).ok_or_else(missing)?;
        let (mut sums, counts) = (values(tensor)?, values(counts_tensor)?);
        if counts.is_empty() || !sums.len().is_multiple_of(counts.len()) {
            let expected = format!("a divisor of {}", sums.len());
            return Err(wrong(&format!("tensor `{name}.counts`"), counts_tensor.offset, &expected, counts.len()));
        }
        let n_columns = sums.len() / counts.len();
        for (sums, &count) in sums.chunks_mut(n_columns.max(1)).zip(&counts) {
            // An expert without samples gets uniform importances.
            sums.iter_mut().for_each(|sum| *sum = if count > 0.0 { *sum / count } else { 1.0 });
        }
        entries.insert(name.to_owned(), sums);
    }
    match entries.is_empty() {
        true => Err(wrong("tensors", 0, "names ending in `.in_sum2`", "none")),
        false => Ok(entries),
    }
}

/// Reads the older format; each length is checked against the remaining bytes before allocation.
struct ByteCursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> ByteCursor<'a> {
    fn take(&mut self, len: usize, field: &str) -> Result<&'a [u8], Error> {
        let left = self.bytes.len() - self.at;
        let taken = self.at.checked_add(len).and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| {
            wrong(field, self.at as u64, &format!("{len} bytes"), format!("{left} bytes to the end of the file"))
        })?;
        self.at += len;
        Ok(taken)
    }

    /// A non-negative integer.
    fn count(&mut self, field: &str) -> Result<usize, Error> {
        let start = self.at as u64;
        let bytes = self.take(4, field)?;
        let number = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        usize::try_from(number).map_err(|_| wrong(field, start, "0 or more", number))
    }
}

fn dat(bytes: &[u8]) -> Result<HashMap<String, Vec<f32>>, Error> {
    let mut cursor = ByteCursor { bytes, at: 0 };
    let n_entries = cursor.count("number of entries")?;
    if n_entries == 0 {
        return Err(wrong("number of entries", 0, "1 or more, or a GGUF file", 0));
    }
    let mut entries = HashMap::new();
    for entry in 0..n_entries {
        let start = cursor.at as u64;
        let len = cursor.count(&format!("length of the name of entry {entry}"))?;
        let name = cursor.take(len, &format!("name of entry {entry}"))?;
        let name = str::from_utf8(name)
            .map_err(|_| wrong(&format!("name of entry {entry}"), start, "text in UTF-8", "invalid"))?;
        let calls = cursor.count(&format!("calls of entry `{}`", name.escape_debug()))?;
        let field = format!("values of entry `{}`", name.escape_debug());
        let n_values = cursor.count(&field)?;
        let values = cursor.take(n_values.saturating_mul(4), &field)?;
        let share = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes) / if calls > 0 { calls as f32 } else { 1.0 };
        entries.insert(name.to_owned(), values.as_chunks().0.iter().map(share).collect());
    }
    Ok(entries)
}
