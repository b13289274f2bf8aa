//! Writing records with their vectors, batch by batch.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Stdout, Write};
use std::path::{Path, PathBuf};

use clap::ValueEnum;

use super::error::EmbedError;
use super::input::{Input, InputFormat};
use super::rows::Embedded;
use super::tables::Writer;

/// Bytes of an npy file before its numbers, so that the number of rows can be put in at the end.
const NPY_HEADER_BYTES: usize = 128;

/// How the output is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// One array with a row per record; to a file only.
    Npy,
    /// JSON objects with the fields of the input.
    Jsonl,
    /// The columns of the input, and the vector as a JSON array.
    Csv,
    /// Arrow IPC stream, one batch per input batch.
    ArrowStream,
    /// Arrow IPC file.
    ArrowFile,
    /// Parquet.
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
            "parquet" => OutputFormat::Parquet,
            _ => return Err(EmbedError::Usage(format!("{}: unknown extension; set --format", path.display()))),
        })
    }

    /// Itself, if this build can write it.
    pub fn available(self, path: &Path) -> Result<OutputFormat, EmbedError> {
        match self.is_tabular() && !cfg!(feature = "tables") {
            true => Err(EmbedError::without_tables(path)),
            false => Ok(self),
        }
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
    #[cfg_attr(not(feature = "tables"), expect(dead_code, reason = "only tables have a place for it"))]
    pub metadata: HashMap<String, String>,
}

/// Where records go.
pub struct Output {
    path: PathBuf,
    column: String,
    dims: u32,
    encoder: Encoder,
}

enum Encoder {
    Npy { sink: Sink, n_rows: u64 },
    Jsonl(Sink),
    Table(Box<Writer>),
}

impl Target<'_> {
    /// Opens the output for records of `input`, and writes what comes before them.
    pub fn open(&self, input: &Input) -> Result<Output, EmbedError> {
        if let Some(columns) = &input.columns {
            columns.check_output(&input.name, self.column, self.format)?;
        }
        let mut sink = Sink::create(self.path).map_err(|error| EmbedError::write(self.path, error))?;
        let encoder = match self.format {
            OutputFormat::Npy => {
                let header = sink.write_all(&npy_header(0, self.dims));
                header.map_err(|error| EmbedError::write(self.path, error))?;
                Encoder::Npy { sink, n_rows: 0 }
            }
            OutputFormat::Jsonl => Encoder::Jsonl(sink),
            _ => Encoder::Table(Box::new(Writer::create(self, input, sink)?)),
        };
        Ok(Output { path: self.path.into(), column: self.column.into(), dims: self.dims, encoder })
    }
}

impl Output {
    /// Writes a batch; whoever reads a pipe has it then.
    pub fn write(&mut self, batch: &Embedded) -> Result<(), EmbedError> {
        let dims = self.dims as usize;
        match &mut self.encoder {
            Encoder::Npy { sink, n_rows } => {
                *n_rows += (batch.vectors.len() / dims) as u64;
                let bytes: Vec<u8> = batch.vectors.iter().flat_map(|number| number.to_le_bytes()).collect();
                sink.write_all(&bytes)
            }
            Encoder::Jsonl(sink) => jsonl(sink, batch, &self.column, dims),
            Encoder::Table(writer) => return writer.write(batch),
        }
        .map_err(|error| EmbedError::write(&self.path, error))
    }

    /// Writes what comes after the last record, and puts a file in its place: a broken job leaves none.
    pub fn finish(self) -> Result<(), EmbedError> {
        let sink = match self.encoder {
            Encoder::Npy { mut sink, n_rows } => {
                let header = npy_header(n_rows, self.dims);
                let patched = sink.writer.seek(SeekFrom::Start(0)).and_then(|_| sink.write_all(&header));
                patched.map_err(|error| EmbedError::write(&self.path, error))?;
                sink
            }
            Encoder::Jsonl(sink) => sink,
            Encoder::Table(writer) => writer.finish()?,
        };
        sink.finish(&self.path).map_err(|error| EmbedError::write(&self.path, error))
    }
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
            Some(partial) => {
                // An earlier run may have left one. What a link of that name leads to is never written to.
                let _ = fs::remove_file(partial);
                File::create_new(partial)?
            }
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
