//! Reading records, batch by batch: never a whole file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, Field, Schema, SchemaRef};
use clap::ValueEnum;
use serde_json::{Map, Value};
use tilewright::Error;

use super::error::{BadRecord, EmbedError, Fault};
use super::rows::{Cells, Rows, holds_text};
use super::table;

/// A longer line is refused: it would fill the memory.
const MAX_LINE_BYTES: usize = 16 << 20;
/// A batch of lines ends here even if it has few, so that memory and the offsets of a column suffice.
const MAX_BATCH_BYTES: usize = 64 << 20;

/// How the input is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum InputFormat {
    /// By the file's extension; text from stdin.
    Auto,
    /// A line, a record.
    Text,
    /// A JSON object or string in each line.
    Jsonl,
    /// With a header.
    Csv,
    /// Arrow's IPC stream.
    ArrowStream,
    /// Arrow's IPC file, which is Feather 2.
    ArrowFile,
    #[cfg(feature = "parquet")]
    Parquet,
}

impl InputFormat {
    /// The format itself, where it is `auto`.
    pub fn of(self, path: &Path) -> Result<InputFormat, EmbedError> {
        if self.is_file() && path.as_os_str() == "-" {
            let fault = "parquet and arrow-file are read from their end, so they cannot come from stdin";
            return Err(EmbedError::Usage(fault.into()));
        }
        if self != InputFormat::Auto {
            return Ok(self);
        }
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
        Ok(match extension.to_ascii_lowercase().as_str() {
            _ if path.as_os_str() == "-" => InputFormat::Text,
            "txt" | "text" => InputFormat::Text,
            "jsonl" | "ndjson" => InputFormat::Jsonl,
            "csv" => InputFormat::Csv,
            "arrows" => InputFormat::ArrowStream,
            "arrow" | "feather" => InputFormat::ArrowFile,
            #[cfg(feature = "parquet")]
            "parquet" => InputFormat::Parquet,
            #[cfg(not(feature = "parquet"))]
            "parquet" => return Err(EmbedError::without_parquet(path)),
            _ => return Err(EmbedError::Usage(format!("{}: --io must say what this file is", path.display()))),
        })
    }

    /// Whether it is read from its end, which a pipe shows last.
    fn is_file(self) -> bool {
        match self {
            #[cfg(feature = "parquet")]
            InputFormat::Parquet => true,
            other => other == InputFormat::ArrowFile,
        }
    }
}

/// Where records come from.
pub struct Input {
    /// File, or `stdin`.
    pub name: String,
    /// Columns; `None` for lines of JSON.
    pub schema: Option<SchemaRef>,
    pub batches: Box<dyn Iterator<Item = Result<Rows, EmbedError>> + Send>,
}

/// What is read, and how.
pub struct Source<'a> {
    pub path: &'a Path,
    pub format: InputFormat,
    /// Column with the texts.
    pub column: &'a str,
    /// Records that are read together, where the input is not in batches of its own.
    pub batch_size: usize,
}

impl Source<'_> {
    /// Opens the input and reads as much of it as its columns take.
    pub fn open(&self) -> Result<Input, EmbedError> {
        let name = match self.path.to_str() {
            Some("-") => "stdin".to_string(),
            _ => self.path.display().to_string(),
        };
        let format = self.format.of(self.path)?;
        let bad = |error: ArrowError| EmbedError::input(&name, error);
        let input = match format {
            #[cfg(feature = "parquet")]
            InputFormat::Parquet => {
                let tables = super::parquet::read(self.file()?, self.batch_size);
                let (schema, reader) = tables.map_err(|error| EmbedError::input(&name, error))?;
                in_batches(name, schema, reader)
            }
            InputFormat::ArrowFile => {
                let reader = FileReader::try_new(BufReader::new(self.file()?), None).map_err(bad)?;
                in_batches(name, reader.schema(), reader)
            }
            InputFormat::ArrowStream => {
                let reader = StreamReader::try_new(self.reader()?, None).map_err(bad)?;
                in_batches(name, reader.schema(), reader)
            }
            InputFormat::Csv => self.csv(name)?,
            InputFormat::Jsonl => self.jsonl(name)?,
            InputFormat::Text | InputFormat::Auto => self.text(name)?,
        };
        if let Some(schema) = &input.schema {
            self.check(&input.name, schema)?;
        }
        Ok(input)
    }

    fn check(&self, name: &str, schema: &Schema) -> Result<(), EmbedError> {
        let Ok(field) = schema.field_with_name(self.column) else {
            let columns: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
            let fault = format!("no column `{}` (--column); there are: {}", self.column, columns.join(", "));
            return Err(EmbedError::input(name, fault));
        };
        if !holds_text(field.data_type()) {
            let fault = format!("column `{}` is {}, expected text", self.column, field.data_type());
            return Err(EmbedError::input(name, fault));
        }
        Ok(())
    }

    fn file(&self) -> Result<File, EmbedError> {
        File::open(self.path).map_err(|source| Error::Io { path: self.path.into(), source }.into())
    }

    fn reader(&self) -> Result<Box<dyn BufRead + Send>, EmbedError> {
        match self.path.to_str() {
            Some("-") => Ok(Box::new(BufReader::new(io::stdin()))),
            _ => Ok(Box::new(BufReader::new(self.file()?))),
        }
    }

    fn text(&self, name: String) -> Result<Input, EmbedError> {
        let schema = Arc::new(Schema::new(vec![Field::new(self.column, arrow_schema::DataType::Utf8, true)]));
        let lines = Lines { reader: self.reader()?, name: name.clone(), batch_size: self.batch_size, n_read: 0 };
        let (columns, input) = (schema.clone(), name.clone());
        let batches = lines.map(move |lines| {
            let lines = lines?;
            let mut bad = Vec::new();
            let mut texts = Vec::with_capacity(lines.lines.len());
            for (record, line) in (lines.first_record..).zip(lines.lines) {
                match line.and_then(utf8) {
                    Ok(text) => texts.push(Some(text)),
                    Err(fault) => {
                        texts.push(None);
                        bad.push(BadRecord { input: input.clone(), record, fault });
                    }
                }
            }
            let texts: ArrayRef = Arc::new(StringArray::from(texts));
            let table = RecordBatch::try_new(columns.clone(), vec![texts]);
            let table = table.map_err(|error| EmbedError::input(&input, error))?;
            Ok(Rows { first_record: lines.first_record, cells: Cells::Table(table), bad })
        });
        Ok(Input { name, schema: Some(schema), batches: Box::new(batches) })
    }

    fn jsonl(&self, name: String) -> Result<Input, EmbedError> {
        let lines = Lines { reader: self.reader()?, name: name.clone(), batch_size: self.batch_size, n_read: 0 };
        let (column, input) = (self.column.to_string(), name.clone());
        let batches = lines.map(move |lines| {
            let lines = lines?;
            let mut bad = Vec::new();
            let mut objects = Vec::with_capacity(lines.lines.len());
            for (record, line) in (lines.first_record..).zip(lines.lines) {
                let (object, fault) = match line.and_then(|line| object(&line, &column)) {
                    Ok(object) => {
                        let fault = text_fault(&object, &column);
                        (object, fault)
                    }
                    Err(fault) => (Map::new(), Some(fault)),
                };
                objects.push(object);
                bad.extend(fault.map(|fault| BadRecord { input: input.clone(), record, fault }));
            }
            Ok(Rows { first_record: lines.first_record, cells: Cells::Objects(objects), bad })
        });
        Ok(Input { name, schema: None, batches: Box::new(batches) })
    }

    fn csv(&self, name: String) -> Result<Input, EmbedError> {
        let failed = |input: &str, error: csv::Error| EmbedError::input(input, error);
        let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(self.reader()?);
        let header = reader.headers().map_err(|error| failed(&name, error))?;
        let fields = header.iter().map(|name| Field::new(name, arrow_schema::DataType::Utf8, true));
        let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
        let (columns, column, input, batch_size) =
            (schema.clone(), self.column.to_string(), name.clone(), self.batch_size);
        let mut n_read = 0;
        let batches = std::iter::from_fn(move || {
            let mut cells: Vec<Vec<Option<String>>> = vec![Vec::new(); columns.fields().len()];
            let (mut bad, mut n_rows, mut n_bytes) = (Vec::new(), 0, 0);
            let mut record = csv::ByteRecord::new();
            while n_rows < batch_size && n_bytes < MAX_BATCH_BYTES {
                match reader.read_byte_record(&mut record) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => return Some(Err(failed(&input, error))),
                }
                n_rows += 1;
                n_bytes += record.as_slice().len();
                let row = csv_row(&record, &columns, &column).map(|row| row.into_iter().map(Some).collect());
                let row: Vec<Option<String>> = row.unwrap_or_else(|fault| {
                    bad.push(BadRecord { input: input.clone(), record: n_read + n_rows as u64, fault });
                    vec![None; cells.len()]
                });
                for ((cells, cell), field) in cells.iter_mut().zip(row).zip(columns.fields()) {
                    // CSV has no other way to say null.
                    cells.push(cell.filter(|cell| !(cell.is_empty() && *field.name() == column)));
                }
            }
            if n_rows == 0 {
                return None;
            }
            let first_record = n_read + 1;
            n_read += n_rows as u64;
            let arrays = cells.into_iter().map(|cells| Arc::new(StringArray::from(cells)) as ArrayRef);
            let table = RecordBatch::try_new(columns.clone(), arrays.collect());
            let rows = table.map(|table| Rows { first_record, cells: Cells::Table(table), bad });
            Some(rows.map_err(|error| EmbedError::input(&input, error)))
        });
        Ok(Input { name, schema: Some(schema), batches: Box::new(batches) })
    }
}

impl Input {
    /// The input as columns, which lines of JSON become by what the first batch holds.
    pub fn tabled(mut self, text_column: &str) -> Result<Input, EmbedError> {
        if self.schema.is_some() {
            return Ok(self);
        }
        let first = self.batches.next().transpose()?;
        let objects = match &first {
            Some(Rows { cells: Cells::Objects(objects), .. }) => &objects[..],
            _ => &[],
        };
        let schema = table::infer(objects, text_column);
        let (columns, name) = (schema.clone(), self.name.clone());
        let batches = first.map(Ok).into_iter().chain(self.batches).map(move |rows| {
            let mut rows = rows?;
            if let Cells::Objects(objects) = &rows.cells {
                for (record, object) in (rows.first_record..).zip(objects) {
                    let fault = table::misfit(object, &columns);
                    rows.bad.extend(fault.map(|fault| BadRecord { input: name.clone(), record, fault }));
                }
                let table = table::table(objects, &columns).map_err(|error| EmbedError::input(&name, error))?;
                rows.cells = Cells::Table(table);
            }
            Ok(rows)
        });
        Ok(Input { name: self.name, schema: Some(schema), batches: Box::new(batches) })
    }
}

/// Tables in the batches in which they come.
fn in_batches(
    name: String,
    schema: SchemaRef,
    batches: impl Iterator<Item = Result<RecordBatch, ArrowError>> + Send + 'static,
) -> Input {
    let (mut first_record, input) = (1, name.clone());
    let batches = batches.map(move |batch| {
        let table = batch.map_err(|error| EmbedError::input(&input, error))?;
        let rows = Rows { first_record, cells: Cells::Table(table), bad: Vec::new() };
        first_record += rows.len() as u64;
        Ok(rows)
    });
    Input { name, schema: Some(schema), batches: Box::new(batches) }
}

/// Lines, some at a time.
struct Lines {
    reader: Box<dyn BufRead + Send>,
    name: String,
    batch_size: usize,
    n_read: u64,
}

struct LineBatch {
    first_record: u64,
    lines: Vec<Result<Vec<u8>, Fault>>,
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

/// The next line without its end, nor the mark that Windows puts at the beginning of a file; `None` at the end.
fn line(reader: &mut impl BufRead, is_first: bool) -> io::Result<Option<Result<Vec<u8>, Fault>>> {
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
        return Ok(Some(Err(Fault::Value { field: "the line".into(), found: "longer".into(), expected })));
    }
    if is_first && line.starts_with(b"\xef\xbb\xbf") {
        line.drain(..3);
    }
    Ok(Some(Ok(line)))
}

fn utf8(bytes: Vec<u8>) -> Result<String, Fault> {
    String::from_utf8(bytes).map_err(|error| Fault::NotUtf8(error.utf8_error().valid_up_to()))
}

/// The object in a line; a string alone is one with nothing but the text.
fn object(line: &[u8], column: &str) -> Result<Map<String, Value>, Fault> {
    let text = std::str::from_utf8(line).map_err(|error| Fault::NotUtf8(error.valid_up_to()))?;
    match serde_json::from_str(text)? {
        Value::Object(object) => Ok(object),
        text @ Value::String(_) => Ok(Map::from_iter([(column.to_string(), text)])),
        other => Err(Fault::Value {
            field: "the line".into(),
            found: kind(&other).into(),
            expected: "an object or a string".into(),
        }),
    }
}

fn text_fault(object: &Map<String, Value>, column: &str) -> Option<Fault> {
    match object.get(column) {
        Some(Value::String(_) | Value::Null) => None,
        Some(other) => Some(Fault::value(column, kind(other), "a string")),
        None => Some(Fault::value(column, "missing", "a string")),
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

fn csv_row(record: &csv::ByteRecord, columns: &Schema, column: &str) -> Result<Vec<String>, Fault> {
    let size = record.as_slice().len();
    if size > MAX_LINE_BYTES {
        let (found, expected) = (format!("{size} bytes; a quote may be open"), format!("{MAX_LINE_BYTES} at most"));
        return Err(Fault::Value { field: "the row".into(), found, expected });
    }
    if record.len() != columns.fields().len() {
        let (found, expected) = (format!("{} fields", record.len()), columns.fields().len().to_string());
        return Err(Fault::Value { field: "the row".into(), found, expected });
    }
    let cells = record.iter().zip(columns.fields());
    cells
        .map(|(cell, field)| match utf8(cell.to_vec()) {
            Err(_) if field.name() != column => Err(Fault::value(field.name(), "not UTF-8", "text")),
            cell => cell,
        })
        .collect()
}
