//! Writing records with their vectors, batch by batch.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Stdout, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, FixedSizeListArray, Float32Array, RecordBatch};
use arrow_buffer::NullBuffer;
use arrow_ipc::writer::{FileWriter, StreamWriter};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use clap::ValueEnum;

use super::error::EmbedError;
use super::input::{Input, InputFormat};
use super::rows::{Cells, Embedded};
use super::table;

/// Bytes of an npy file before its numbers, so that the number of rows can be put in at the end.
const NPY_HEADER_BYTES: usize = 128;

/// How the output is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// One array of numbers, a row for each record; to a file only.
    Npy,
    /// Objects with the fields of the input.
    Jsonl,
    /// The columns of the input, and the vector as a JSON array.
    Csv,
    /// Arrow's IPC stream: a batch for each batch of the input, at once.
    ArrowStream,
    /// Arrow's IPC file.
    ArrowFile,
    #[cfg(feature = "parquet")]
    Parquet,
}

impl OutputFormat {
    /// By the file's extension; on stdout what the input is, if it is a stream of Arrow's, else lines of JSON.
    pub fn of(path: &Path, input: InputFormat) -> Result<OutputFormat, EmbedError> {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
        Ok(match extension.to_ascii_lowercase().as_str() {
            _ if path.as_os_str() == "-" && input == InputFormat::ArrowStream => OutputFormat::ArrowStream,
            _ if path.as_os_str() == "-" => OutputFormat::Jsonl,
            "npy" => OutputFormat::Npy,
            "jsonl" | "ndjson" => OutputFormat::Jsonl,
            "csv" => OutputFormat::Csv,
            "arrows" => OutputFormat::ArrowStream,
            "arrow" | "feather" => OutputFormat::ArrowFile,
            #[cfg(feature = "parquet")]
            "parquet" => OutputFormat::Parquet,
            #[cfg(not(feature = "parquet"))]
            "parquet" => return Err(EmbedError::without_parquet(path)),
            _ => return Err(EmbedError::Usage(format!("{}: --format must say what to write", path.display()))),
        })
    }

    /// Whether it is made of columns.
    pub fn is_tabular(self) -> bool {
        !matches!(self, OutputFormat::Npy | OutputFormat::Jsonl)
    }

    /// Whether a record can be without a vector.
    pub fn has_nulls(self) -> bool {
        self != OutputFormat::Npy
    }
}

/// What is written, and where.
pub struct Target<'a> {
    pub path: &'a Path,
    pub format: OutputFormat,
    /// Name of the column of vectors.
    pub column: &'a str,
    /// Elements of a vector.
    pub dims: u32,
    /// What a table says of its vectors.
    pub metadata: HashMap<String, String>,
}

/// Where records go.
pub struct Output {
    path: PathBuf,
    column: String,
    dims: u32,
    /// Columns of what is written; empty for those that have none.
    schema: SchemaRef,
    encoder: Encoder,
}

enum Encoder {
    Npy {
        sink: Sink,
        n_rows: u64,
    },
    Jsonl(Sink),
    Csv(Sink),
    ArrowStream(StreamWriter<Sink>),
    ArrowFile(FileWriter<Sink>),
    #[cfg(feature = "parquet")]
    Parquet(super::parquet::Writer),
}

impl Target<'_> {
    /// Opens the output for records of `input`, and writes what comes before them.
    pub fn open(&self, input: &Input) -> Result<Output, EmbedError> {
        let mut schema = match &input.schema {
            Some(schema) => Schema::clone(schema),
            None => Schema::empty(),
        };
        if schema.field_with_name(self.column).is_ok() {
            let fault = format!("has a column `{}` already; --out-column names another", self.column);
            return Err(EmbedError::input(&input.name, fault));
        }
        if let (OutputFormat::Csv | OutputFormat::Jsonl, Some(field)) =
            (self.format, schema.fields().iter().find(|field| !table::is_plain(field.data_type())))
        {
            let fault =
                format!("column `{}` is {}, which neither JSON nor CSV can hold", field.name(), field.data_type());
            return Err(EmbedError::input(&input.name, format!("{fault}; Arrow and Parquet can (--format)")));
        }
        let fields = schema.fields().iter().cloned().chain([Arc::new(vector_field(self.column, self.dims))]);
        schema.fields = fields.collect();
        schema.metadata.extend(self.metadata.clone());
        let schema = Arc::new(schema);

        let failed = |error: ArrowError| EmbedError::write(self.path, error);
        let mut sink = Sink::create(self.path).map_err(|error| EmbedError::write(self.path, error))?;
        let encoder = match self.format {
            OutputFormat::Npy => {
                let header = sink.write_all(&npy_header(0, self.dims));
                header.map_err(|error| EmbedError::write(self.path, error))?;
                Encoder::Npy { sink, n_rows: 0 }
            }
            OutputFormat::Jsonl => Encoder::Jsonl(sink),
            OutputFormat::Csv => {
                let names = schema.fields().iter().map(|field| field.name().as_bytes().to_vec());
                csv_record(&mut sink, names).map_err(|error| EmbedError::write(self.path, error))?;
                Encoder::Csv(sink)
            }
            OutputFormat::ArrowStream => {
                let mut writer = StreamWriter::try_new(sink, &schema).map_err(failed)?;
                // Whoever reads may wait for the columns before sending anything.
                writer.flush().map_err(failed)?;
                Encoder::ArrowStream(writer)
            }
            OutputFormat::ArrowFile => Encoder::ArrowFile(FileWriter::try_new(sink, &schema).map_err(failed)?),
            #[cfg(feature = "parquet")]
            OutputFormat::Parquet => {
                let writer = super::parquet::Writer::new(sink, &schema, self.column);
                Encoder::Parquet(writer.map_err(|error| EmbedError::write(self.path, error))?)
            }
        };
        Ok(Output { path: self.path.into(), column: self.column.into(), dims: self.dims, schema, encoder })
    }
}

fn vector_field(name: &str, dims: u32) -> Field {
    Field::new(name, DataType::FixedSizeList(Arc::new(Field::new("item", DataType::Float32, true)), dims as i32), true)
}

impl Output {
    /// Writes a batch; whoever reads a pipe has it then.
    pub fn write(&mut self, batch: &Embedded) -> Result<(), EmbedError> {
        let failed = |error: ArrowError| EmbedError::write(&self.path, error);
        let (dims, column) = (self.dims as usize, &self.column);
        match &mut self.encoder {
            Encoder::Npy { sink, n_rows } => {
                *n_rows += (batch.vectors.len() / dims) as u64;
                let bytes: Vec<u8> = batch.vectors.iter().flat_map(|number| number.to_le_bytes()).collect();
                sink.write_all(&bytes)
            }
            Encoder::Jsonl(sink) => jsonl(sink, batch, column, dims),
            Encoder::Csv(sink) => csv(sink, batch, dims),
            Encoder::ArrowStream(writer) => {
                let table = with_vectors(batch, &self.schema, dims).map_err(failed)?;
                return writer.write(&table).and_then(|()| writer.flush()).map_err(failed);
            }
            Encoder::ArrowFile(writer) => {
                let table = with_vectors(batch, &self.schema, dims).map_err(failed)?;
                return writer.write(&table).map_err(failed);
            }
            #[cfg(feature = "parquet")]
            Encoder::Parquet(writer) => {
                let table = with_vectors(batch, &self.schema, dims).map_err(failed)?;
                return writer.write(&table).map_err(|error| EmbedError::write(&self.path, error));
            }
        }
        .map_err(|error| EmbedError::write(&self.path, error))
    }

    /// Writes what comes behind the last record, and puts a file in its place: a broken job leaves none.
    pub fn finish(self) -> Result<(), EmbedError> {
        let failed = |error: ArrowError| EmbedError::write(&self.path, error);
        let sink = match self.encoder {
            Encoder::Npy { mut sink, n_rows } => {
                let header = npy_header(n_rows, self.dims);
                let patched = sink.writer.seek(SeekFrom::Start(0)).and_then(|_| sink.write_all(&header));
                patched.map_err(|error| EmbedError::write(&self.path, error))?;
                sink
            }
            Encoder::Jsonl(sink) | Encoder::Csv(sink) => sink,
            Encoder::ArrowStream(writer) => writer.into_inner().map_err(failed)?,
            Encoder::ArrowFile(writer) => writer.into_inner().map_err(failed)?,
            #[cfg(feature = "parquet")]
            Encoder::Parquet(writer) => writer.finish().map_err(|error| EmbedError::write(&self.path, error))?,
        };
        sink.finish(&self.path).map_err(|error| EmbedError::write(&self.path, error))
    }
}

/// The table of a batch with its vectors as one more column.
fn with_vectors(batch: &Embedded, schema: &SchemaRef, dims: usize) -> Result<RecordBatch, ArrowError> {
    let Cells::Table(table) = &batch.rows.cells else {
        return Err(ArrowError::SchemaError("lines of JSON where columns are needed".into()));
    };
    let numbers = match batch.has_vector.contains(&false) {
        false => Float32Array::from(batch.vectors.clone()),
        // A null has numbers too, which count for nothing.
        true => {
            let nothing = vec![0.0; dims];
            let vectors = batch.vectors(dims).map(|vector| vector.unwrap_or(&nothing));
            Float32Array::from(vectors.collect::<Vec<_>>().concat())
        }
    };
    let nulls = batch.has_vector.contains(&false).then(|| NullBuffer::from(batch.has_vector.clone()));
    let item = Arc::new(Field::new("item", DataType::Float32, true));
    let vectors = FixedSizeListArray::try_new(item, dims as i32, Arc::new(numbers), nulls)?;
    let columns = table.columns().iter().cloned().chain([Arc::new(vectors) as ArrayRef]);
    RecordBatch::try_new(schema.clone(), columns.collect())
}

fn jsonl(sink: &mut Sink, batch: &Embedded, column: &str, dims: usize) -> io::Result<()> {
    for (row, vector) in batch.vectors(dims).enumerate() {
        let mut line = batch.rows.json(row)?;
        // The vector is appended as text: numbers of 32 bits are shorter than what a JSON value would make of them.
        line.pop();
        let comma = if line.len() > 1 { "," } else { "" };
        writeln!(sink, "{line}{comma}{}:{}}}", serde_json::to_string(column)?, serde_json::to_string(&vector)?)?;
    }
    sink.flush()
}

fn csv(sink: &mut Sink, batch: &Embedded, dims: usize) -> io::Result<()> {
    let Cells::Table(table) = &batch.rows.cells else {
        return Err(io::Error::other("lines of JSON where columns are needed"));
    };
    for (row, vector) in batch.vectors(dims).enumerate() {
        let vector = vector.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        let cells = table.columns().iter().map(|column| table::plain(&table::cell(column, row)).into_bytes());
        csv_record(sink, cells.chain([vector]))?;
    }
    sink.flush()
}

fn csv_record(sink: &mut Sink, cells: impl Iterator<Item = Vec<u8>>) -> io::Result<()> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(cells)?;
    let line = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    sink.write_all(&line)
}

/// NEP 1, version 1.0: magic, version, length, and a Python dictionary, padded to a length that any number of rows fits.
fn npy_header(n_rows: u64, dims: u32) -> [u8; NPY_HEADER_BYTES] {
    let mut header = [b' '; NPY_HEADER_BYTES];
    let dictionary = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({n_rows}, {dims}), }}");
    header[..8].copy_from_slice(b"\x93NUMPY\x01\x00");
    header[8..10].copy_from_slice(&(NPY_HEADER_BYTES as u16 - 10).to_le_bytes());
    header[10..][..dictionary.len()].copy_from_slice(dictionary.as_bytes());
    header[NPY_HEADER_BYTES - 1] = b'\n';
    header
}

/// A file that is complete or not there, or stdout.
pub struct Sink {
    writer: BufWriter<Stream>,
    /// Where the file is until it is complete.
    partial: Option<PathBuf>,
}

enum Stream {
    Stdout(Stdout),
    File(File),
}

impl Sink {
    fn create(path: &Path) -> io::Result<Sink> {
        if path.as_os_str() == "-" {
            return Ok(Sink { writer: BufWriter::new(Stream::Stdout(io::stdout())), partial: None });
        }
        // Pipes and devices are written as they are.
        let is_special = fs::metadata(path).is_ok_and(|metadata| !metadata.is_file());
        let partial = (!is_special).then(|| {
            let mut name = path.as_os_str().to_owned();
            name.push(".partial");
            PathBuf::from(name)
        });
        let file = match &partial {
            Some(partial) => File::create(partial)?,
            None => fs::OpenOptions::new().write(true).open(path)?,
        };
        Ok(Sink { writer: BufWriter::new(Stream::File(file)), partial })
    }

    fn finish(mut self, path: &Path) -> io::Result<()> {
        self.writer.flush()?;
        match self.partial.take() {
            Some(partial) => fs::rename(partial, path),
            None => Ok(()),
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            // It is no harm if it stays.
            let _ = fs::remove_file(partial);
        }
    }
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Stdout(stdout) => stdout.write(bytes),
            Stream::File(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Stdout(stdout) => stdout.flush(),
            Stream::File(file) => file.flush(),
        }
    }
}

impl Seek for Stream {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            Stream::Stdout(_) => Err(io::ErrorKind::NotSeekable.into()),
            Stream::File(file) => file.seek(to),
        }
    }
}
