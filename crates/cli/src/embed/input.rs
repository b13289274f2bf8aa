//! Reads records batch by batch, never a whole file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use clap::ValueEnum;
use serde_json::{Map, Value};
use tilewright::Error;

use super::error::{BadRecord, EmbedError, RecordFault};
use super::pictures::is_named_as_picture;
use super::rows::{Cells, Records};
use super::tables::{self, Columns};

/// Longer lines are refused, to bound memory.
pub const MAX_LINE_BYTES: usize = 16 << 20;
/// A batch of lines ends at this size, to bound memory and to fit the offsets of an Arrow column.
pub const MAX_BATCH_BYTES: usize = 64 << 20;

/// How the input is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum InputFormat {
    /// By the file's extension; stdin is text.
    Auto,
    /// One record per line.
    Text,
    /// One JSON object or string per line.
    Jsonl,
    /// CSV with a header.
    Csv,
    /// Arrow IPC stream.
    ArrowStream,
    /// Arrow IPC file (Feather 2).
    ArrowFile,
    /// Parquet.
    Parquet,
}

impl InputFormat {
    /// Resolves `auto` by the file's extension.
    pub fn of(self, path: &Path) -> Result<InputFormat, EmbedError> {
        if self.is_file() && path.as_os_str() == "-" {
            let fault = "parquet and arrow-file cannot be read from stdin, they need a file";
            return Err(EmbedError::Usage(fault.into()));
        }
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
        let format = match extension.to_ascii_lowercase().as_str() {
            _ if self != InputFormat::Auto => self,
            _ if path.as_os_str() == "-" => InputFormat::Text,
            "txt" | "text" => InputFormat::Text,
            "jsonl" | "ndjson" => InputFormat::Jsonl,
            "csv" => InputFormat::Csv,
            "arrows" => InputFormat::ArrowStream,
            "arrow" | "feather" => InputFormat::ArrowFile,
            "parquet" => InputFormat::Parquet,
            _ => {
                let message = match is_named_as_picture(path) {
                    true => "a picture, which --images embeds",
                    false => "unknown extension; set --io to text, jsonl, csv, arrow-file or parquet",
                };
                return Err(EmbedError::Usage(format!("{}: {message}", path.display())));
            }
        };
        match format {
            InputFormat::Auto | InputFormat::Text | InputFormat::Jsonl => Ok(format),
            _ if cfg!(feature = "tables") => Ok(format),
            _ => Err(EmbedError::without_tables(path)),
        }
    }

    /// Whether the format is read from its end, which a pipe does not allow.
    fn is_file(self) -> bool {
        matches!(self, InputFormat::ArrowFile | InputFormat::Parquet)
    }
}

/// An open input.
pub struct InputRecords {
    /// File, or `stdin`.
    pub name: String,
    /// Columns; `None` for text and JSON lines.
    pub columns: Option<Columns>,
    pub batches: Box<dyn Iterator<Item = Result<Records, EmbedError>> + Send>,
}

/// Where and how to read.
pub struct InputSource<'a> {
    pub path: &'a Path,
    pub format: InputFormat,
    /// Column with the texts.
    pub column: &'a str,
    /// Records per batch, unless the input has batches of its own.
    pub batch_size: usize,
    /// Counts what is read.
    pub read: ReadProgress,
}

/// How much of a file has been read, shared with the thread that reads it.
#[derive(Clone, Default)]
pub struct ReadProgress(Arc<ReadCounts>);

#[derive(Default)]
struct ReadCounts {
    /// Of the file; 0 if unknown.
    size_bytes: AtomicU64,
    bytes: AtomicU64,
    records: AtomicU64,
}

/// The number of all records of an input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TotalRecords {
    /// The input was read to its end.
    Known(u64),
    /// By the bytes per record so far.
    Estimated(u64),
}

impl ReadProgress {
    /// Counts records that were read.
    pub fn add_records(&self, n: usize) {
        self.0.records.fetch_add(n as u64, Relaxed);
    }

    /// The number of all records; `None` for a pipe, and for files that are not read from beginning to end.
    pub fn total(&self) -> Option<TotalRecords> {
        let [size, bytes, records] =
            [&self.0.size_bytes, &self.0.bytes, &self.0.records].map(|count| count.load(Relaxed));
        match records {
            0 => None,
            _ if size == 0 || bytes == 0 => None,
            _ if bytes >= size => Some(TotalRecords::Known(records)),
            _ => Some(TotalRecords::Estimated((records as f64 * size as f64 / bytes as f64) as u64)),
        }
    }
}

/// A reader that counts the bytes taken from it.
struct Counted<R> {
    reader: R,
    read: ReadProgress,
}

impl<R: BufRead> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.reader.read(buffer)?;
        self.read.0.bytes.fetch_add(n as u64, Relaxed);
        Ok(n)
    }
}

impl<R: BufRead> BufRead for Counted<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.reader.fill_buf()
    }

    fn consume(&mut self, n: usize) {
        self.read.0.bytes.fetch_add(n as u64, Relaxed);
        self.reader.consume(n);
    }
}

/// Whether an input argument is a text rather than a file: no such file exists, and it is not written like a path.
pub fn is_text(input: &Path, format: InputFormat) -> bool {
    let Some(text) = input.to_str() else { return false };
    let has_extension = input.extension().is_some_and(|extension| !extension.is_empty());
    let is_path = InputFormat::Auto.of(input).is_ok()
        || !text.contains(char::is_whitespace) && (has_extension || text.contains(['/', '\\']));
    format == InputFormat::Auto && text != "-" && !text.trim().is_empty() && !input.exists() && !is_path
}

/// An input of one text.
pub fn one_text(text: &str, column: &str) -> InputRecords {
    let object = Map::from_iter([(column.to_string(), Value::String(text.into()))]);
    let records = Records { first_record: 1, cells: Cells::Objects(vec![object]), bad: Vec::new() };
    InputRecords { name: "the text".into(), columns: None, batches: Box::new(std::iter::once(Ok(records))) }
}

impl InputSource<'_> {
    /// Opens the input and reads its columns' names and types.
    pub fn open(&self) -> Result<InputRecords, EmbedError> {
        let name = match self.path.to_str() {
            Some("-") => "stdin".to_string(),
            _ => self.path.display().to_string(),
        };
        match self.format.of(self.path)? {
            InputFormat::Jsonl => self.jsonl(name),
            InputFormat::Text | InputFormat::Auto => self.text(name),
            format => tables::open(self, format, name),
        }
    }

    pub fn file(&self) -> Result<File, EmbedError> {
        File::open(self.path).map_err(|source| Error::Io { path: self.path.into(), source }.into())
    }

    pub fn reader(&self) -> Result<Box<dyn BufRead + Send>, EmbedError> {
        match self.path.to_str() {
            Some("-") => Ok(Box::new(BufReader::new(io::stdin()))),
            _ => {
                let file = self.file()?;
                let size_bytes =
                    file.metadata().map_or(0, |metadata| if metadata.is_file() { metadata.len() } else { 0 });
                self.read.0.size_bytes.store(size_bytes, Relaxed);
                Ok(Box::new(Counted { reader: BufReader::new(file), read: self.read.clone() }))
            }
        }
    }

    /// Each line is a record with only that text.
    fn text(&self, name: String) -> Result<InputRecords, EmbedError> {
        self.lines(name, |line, column| {
            let (text, fault) = match utf8(line) {
                Ok(text) => (Value::String(text), None),
                Err(fault) => (Value::Null, Some(fault)),
            };
            (Map::from_iter([(column.to_string(), text)]), fault)
        })
    }

    fn jsonl(&self, name: String) -> Result<InputRecords, EmbedError> {
        self.lines(name, |line, column| match object(&line, column) {
            Ok(object) => {
                let fault = text_fault(&object, column);
                (object, fault)
            }
            Err(fault) => (Map::new(), Some(fault)),
        })
    }

    /// One record per line. `record` parses a line into its fields and a fault, if any.
    fn lines(
        &self,
        name: String,
        record: impl Fn(Vec<u8>, &str) -> (Map<String, Value>, Option<RecordFault>) + Send + 'static,
    ) -> Result<InputRecords, EmbedError> {
        let lines = Lines { reader: self.reader()?, name: name.clone(), batch_size: self.batch_size, n_read: 0 };
        let (column, input) = (self.column.to_string(), name.clone());
        let batches = lines.map(move |lines| {
            let lines = lines?;
            let mut bad = Vec::new();
            let mut objects = Vec::with_capacity(lines.lines.len());
            for (number, line) in (lines.first_record..).zip(lines.lines) {
                let (object, fault) = match line {
                    Ok(line) => record(line, &column),
                    Err(fault) => (Map::new(), Some(fault)),
                };
                objects.push(object);
                bad.extend(fault.map(|fault| BadRecord { input: input.clone(), record: number, fault }));
            }
            Ok(Records { first_record: lines.first_record, cells: Cells::Objects(objects), bad })
        });
        Ok(InputRecords { name, columns: None, batches: Box::new(batches) })
    }
}

/// Lines in batches.
struct Lines {
    reader: Box<dyn BufRead + Send>,
    name: String,
    batch_size: usize,
    n_read: u64,
}

struct LineBatch {
    first_record: u64,
    lines: Vec<Result<Vec<u8>, RecordFault>>,
}

impl Iterator for Lines {
    type Item = Result<LineBatch, EmbedError>;

    fn next(&mut self) -> Option<Self::Item> {
        let first_record = self.n_read + 1;
        let (mut lines, mut n_bytes) = (Vec::new(), 0);
        while lines.len() < self.batch_size && n_bytes < MAX_BATCH_BYTES {
            let line = match line(&mut self.reader, self.n_read == 0) {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(source) => {
                    let path = self.name.clone().into();
                    return Some(Err(Error::Io { path, source }.into()));
                }
            };
            self.n_read += 1;
            n_bytes += line.as_ref().map_or(0, Vec::len);
            lines.push(line);
        }
        (!lines.is_empty()).then_some(Ok(LineBatch { first_record, lines }))
    }
}

/// The next line, without its line ending or a byte order mark at the start of the file; `None` at the end.
fn line(reader: &mut impl BufRead, is_first: bool) -> io::Result<Option<Result<Vec<u8>, RecordFault>>> {
    let mut line = Vec::new();
    if reader.by_ref().take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    if line.last() == Some(&b'\n') {
        line.pop();
        line.pop_if(|byte| *byte == b'\r');
    } else if line.len() == MAX_LINE_BYTES {
        reader.skip_until(b'\n')?;
        let expected = format!("{MAX_LINE_BYTES} bytes at most");
        return Ok(Some(Err(RecordFault::Value { field: "the line".into(), found: "too long".into(), expected })));
    }
    if is_first && line.starts_with(b"\xef\xbb\xbf") {
        line.drain(..3);
    }
    Ok(Some(Ok(line)))
}

pub fn utf8(bytes: Vec<u8>) -> Result<String, RecordFault> {
    String::from_utf8(bytes).map_err(|error| RecordFault::NotUtf8(error.utf8_error().valid_up_to()))
}

/// Parses a line as an object; a bare string becomes the text of one.
fn object(line: &[u8], column: &str) -> Result<Map<String, Value>, RecordFault> {
    let text = std::str::from_utf8(line).map_err(|error| RecordFault::NotUtf8(error.valid_up_to()))?;
    match serde_json::from_str(text)? {
        Value::Object(object) => Ok(object),
        text @ Value::String(_) => Ok(Map::from_iter([(column.to_string(), text)])),
        other => Err(RecordFault::Value {
            field: "the line".into(),
            found: kind(&other).into(),
            expected: "an object or a string".into(),
        }),
    }
}

fn text_fault(object: &Map<String, Value>, column: &str) -> Option<RecordFault> {
    match object.get(column) {
        Some(Value::String(_) | Value::Null) => None,
        Some(other) => Some(RecordFault::value(column, kind(other), "a string")),
        None => Some(RecordFault::value(column, "missing", "a string")),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
