//! Writes records with their vectors, batch by batch.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Stdout, Write};
use std::path::{Path, PathBuf};

use clap::ValueEnum;

use super::error::EmbedError;
use super::input::{InputFormat, InputRecords};
use super::rows::EmbeddedRecords;
use super::tables::Writer;

/// Size of an npy file's header. It is fixed, so that the number of rows can be written at the end.
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
    /// By the file's extension. On stdout, an Arrow stream for input that is one, else JSON lines.
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

    /// The same format, if this build can write it.
    pub fn available(self, path: &Path) -> Result<OutputFormat, EmbedError> {
        match self.is_tabular() && !cfg!(feature = "tables") {
            true => Err(EmbedError::without_tables(path)),
            false => Ok(self),
        }
    }

    /// Whether the format has columns.
    pub fn is_tabular(self) -> bool {
        !matches!(self, OutputFormat::Npy | OutputFormat::Jsonl)
    }

    /// Whether a record can be without a vector.
    pub fn has_nulls(self) -> bool {
        self != OutputFormat::Npy
    }
}

/// Where and how to write.
pub struct OutputTarget<'a> {
    pub path: &'a Path,
    pub format: OutputFormat,
    /// Name of the vector column.
    pub column: &'a str,
    /// Elements of a vector.
    pub dims: u32,
    /// Metadata of a table.
    #[cfg_attr(not(feature = "tables"), expect(dead_code, reason = "only tables have metadata"))]
    pub metadata: HashMap<String, String>,
}

/// An open output.
pub struct RecordOutput {
    path: PathBuf,
    column: String,
    dims: u32,
    encoder: OutputEncoder,
}

enum OutputEncoder {
    Npy { sink: OutputSink, n_rows: u64 },
    Jsonl(OutputSink),
    Table(Box<Writer>),
}

impl OutputTarget<'_> {
    /// Opens the output for records of `input` and writes its header.
    pub fn open(&self, input: &InputRecords) -> Result<RecordOutput, EmbedError> {
        if let Some(columns) = &input.columns {
            columns.check_output(&input.name, self.column, self.format)?;
        }
        let mut sink = OutputSink::create(self.path).map_err(|error| EmbedError::write(self.path, error))?;
        let encoder = match self.format {
            OutputFormat::Npy => {
                let header = sink.write_all(&npy_header(0, self.dims));
                header.map_err(|error| EmbedError::write(self.path, error))?;
                OutputEncoder::Npy { sink, n_rows: 0 }
            }
            OutputFormat::Jsonl => OutputEncoder::Jsonl(sink),
            _ => OutputEncoder::Table(Box::new(Writer::create(self, input, sink)?)),
        };
        Ok(RecordOutput { path: self.path.into(), column: self.column.into(), dims: self.dims, encoder })
    }
}

impl RecordOutput {
    /// Writes a batch. In a format for pipes, the reader gets it at once.
    pub fn write(&mut self, batch: &EmbeddedRecords) -> Result<(), EmbedError> {
        let dims = self.dims as usize;
        match &mut self.encoder {
            OutputEncoder::Npy { sink, n_rows } => {
                *n_rows += (batch.vectors.len() / dims) as u64;
                let bytes: Vec<u8> = batch.vectors.iter().flat_map(|number| number.to_le_bytes()).collect();
                sink.write_all(&bytes)
            }
            OutputEncoder::Jsonl(sink) => jsonl(sink, batch, &self.column, dims),
            OutputEncoder::Table(writer) => return writer.write(batch),
        }
        .map_err(|error| EmbedError::write(&self.path, error))
    }

    /// Completes the output and moves a file to its final path. A failed job leaves no file.
    pub fn finish(self) -> Result<(), EmbedError> {
        let sink = match self.encoder {
            OutputEncoder::Npy { mut sink, n_rows } => {
                let header = npy_header(n_rows, self.dims);
                let patched = sink.writer.seek(SeekFrom::Start(0)).and_then(|_| sink.write_all(&header));
                patched.map_err(|error| EmbedError::write(&self.path, error))?;
                sink
            }
            OutputEncoder::Jsonl(sink) => sink,
            OutputEncoder::Table(writer) => writer.finish()?,
        };
        sink.finish(&self.path).map_err(|error| EmbedError::write(&self.path, error))
    }
}

fn jsonl(sink: &mut OutputSink, batch: &EmbeddedRecords, column: &str, dims: usize) -> io::Result<()> {
    for (row, vector) in batch.vectors(dims).enumerate() {
        let mut line = batch.rows.json(row)?;
        // The vector is appended as text: a JSON value stores f64, which prints more digits than f32.
        line.pop();
        let comma = if line.len() > 1 { "," } else { "" };
        writeln!(sink, "{line}{comma}{}:{}}}", serde_json::to_string(column)?, serde_json::to_string(&vector)?)?;
    }
    sink.flush()
}

/// NEP 1, version 1.0: magic, version, length and a Python dictionary, padded to fit any number of rows.
fn npy_header(n_rows: u64, dims: u32) -> [u8; NPY_HEADER_BYTES] {
    let mut header = [b' '; NPY_HEADER_BYTES];
    let dictionary = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({n_rows}, {dims}), }}");
    header[..8].copy_from_slice(b"\x93NUMPY\x01\x00");
    header[8..10].copy_from_slice(&(NPY_HEADER_BYTES as u16 - 10).to_le_bytes());
    header[10..][..dictionary.len()].copy_from_slice(dictionary.as_bytes());
    header[NPY_HEADER_BYTES - 1] = b'\n';
    header
}

/// Stdout, or a file that appears under its name only when it is complete.
pub struct OutputSink {
    writer: BufWriter<OutputStream>,
    /// Path of the file until it is complete.
    partial: Option<PathBuf>,
}

enum OutputStream {
    Stdout(Stdout),
    File(File),
}

impl OutputSink {
    fn create(path: &Path) -> io::Result<OutputSink> {
        if path.as_os_str() == "-" {
            return Ok(OutputSink { writer: BufWriter::new(OutputStream::Stdout(io::stdout())), partial: None });
        }
        // Pipes and devices are written directly.
        let is_special = fs::metadata(path).is_ok_and(|metadata| !metadata.is_file());
        let partial = (!is_special).then(|| {
            let mut name = path.as_os_str().to_owned();
            name.push(".partial");
            PathBuf::from(name)
        });
        let file = match &partial {
            Some(partial) => {
                // An earlier run may have left one. If it is a link, the link's target is never written.
                let _ = fs::remove_file(partial);
                File::create_new(partial)?
            }
            None => fs::OpenOptions::new().write(true).open(path)?,
        };
        Ok(OutputSink { writer: BufWriter::new(OutputStream::File(file)), partial })
    }

    fn finish(mut self, path: &Path) -> io::Result<()> {
        self.writer.flush()?;
        match self.partial.take() {
            Some(partial) => fs::rename(partial, path),
            None => Ok(()),
        }
    }
}

impl Drop for OutputSink {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            // A leftover file does no harm.
            let _ = fs::remove_file(partial);
        }
    }
}

impl Write for OutputSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl Write for OutputStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            OutputStream::Stdout(stdout) => stdout.write(bytes),
            OutputStream::File(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            OutputStream::Stdout(stdout) => stdout.flush(),
            OutputStream::File(file) => file.flush(),
        }
    }
}

impl Seek for OutputStream {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match self {
            OutputStream::Stdout(_) => Err(io::ErrorKind::NotSeekable.into()),
            OutputStream::File(file) => file.seek(to),
        }
    }
}
