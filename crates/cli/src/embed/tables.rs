//! Tables of texts: Arrow, CSV and Parquet. Their columns pass through unchanged.

mod csv;
mod objects;
mod parquet;
#[cfg(test)]
mod tests;

use std::io::{self, BufReader, Write};
use std::path::PathBuf;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, FixedSizeListArray, Float32Array, RecordBatch};
use arrow_buffer::NullBuffer;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_ipc::writer::{FileWriter, StreamWriter};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use serde_json::Map;

use super::error::{BadRecord, EmbedError};
use super::input::{InputFormat, InputRecords, InputSource};
use super::output::{OutputFormat, OutputSink, OutputTarget};
use super::rows::{Cells, EmbeddedRecords, Records};

/// Names and types of a table's columns, and its metadata.
pub struct Columns(SchemaRef);

/// Records in columns.
pub struct Table(RecordBatch);

impl Columns {
    /// Checks that a column `out_column` can be added, and that `format` can hold all columns.
    pub fn check_output(&self, input: &str, out_column: &str, format: OutputFormat) -> Result<(), EmbedError> {
        if self.0.field_with_name(out_column).is_ok() {
            let fault = format!("has a column `{out_column}` already; choose another name with --out-column");
            return Err(EmbedError::input(input, fault));
        }
        let strange = self.0.fields().iter().find(|field| !objects::is_plain(field.data_type()));
        if let (OutputFormat::Csv | OutputFormat::Jsonl, Some(field)) = (format, strange) {
            let fault =
                format!("column `{}` is {}, which neither JSON nor CSV can hold", field.name(), field.data_type());
            return Err(EmbedError::input(input, format!("{fault}; use Arrow or Parquet (--format)")));
        }
        Ok(())
    }

    /// Checks that `column` exists and holds text.
    fn check_text(&self, input: &str, column: &str) -> Result<(), EmbedError> {
        let Ok(field) = self.0.field_with_name(column) else {
            let columns: Vec<&str> = self.0.fields().iter().map(|field| field.name().as_str()).collect();
            let fault = format!("no column `{column}`; choose one with --column: {}", columns.join(", "));
            return Err(EmbedError::input(input, fault));
        };
        if !holds_text(field.data_type()) {
            let fault = format!("column `{column}` is {}, expected text", field.data_type());
            return Err(EmbedError::input(input, fault));
        }
        Ok(())
    }
}

impl Table {
    pub fn n_rows(&self) -> usize {
        self.0.num_rows()
    }

    /// The texts of a column; all `None` if it holds no text.
    pub fn texts(&self, column: &str) -> Vec<Option<&str>> {
        let Some(column) = self.0.column_by_name(column) else { return vec![None; self.n_rows()] };
        match column.data_type() {
            DataType::Utf8 => column.as_string::<i32>().iter().collect(),
            DataType::LargeUtf8 => column.as_string::<i64>().iter().collect(),
            DataType::Utf8View => column.as_string_view().iter().collect(),
            _ => vec![None; column.len()],
        }
    }

    /// A record as a JSON object in one line.
    pub fn json(&self, row: usize) -> serde_json::Result<String> {
        let cells = self.0.schema_ref().fields().iter().zip(self.0.columns());
        let object: Map<_, _> =
            cells.map(|(field, column)| (field.name().clone(), objects::cell(column, row))).collect();
        serde_json::to_string(&object)
    }
}

/// Whether a column of this type can hold the texts.
fn holds_text(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

/// Opens a table and reads its schema.
pub fn open(source: &InputSource, format: InputFormat, name: String) -> Result<InputRecords, EmbedError> {
    let bad = |error: ArrowError| EmbedError::input(&name, error);
    let input = match format {
        InputFormat::Parquet => {
            let tables = parquet::read(source.file()?, source.batch_size);
            let (schema, reader) = tables.map_err(|error| EmbedError::input(&name, error))?;
            in_batches(name, schema, reader)
        }
        InputFormat::ArrowFile => {
            let reader = FileReader::try_new(BufReader::new(source.file()?), None).map_err(bad)?;
            in_batches(name, reader.schema(), reader)
        }
        InputFormat::Csv => csv::read(source, name)?,
        _ => {
            let reader = StreamReader::try_new(source.reader()?, None).map_err(bad)?;
            in_batches(name, reader.schema(), reader)
        }
    };
    if let Some(columns) = &input.columns {
        columns.check_text(&input.name, source.column)?;
    }
    Ok(input)
}

/// An input with the batches of its reader.
fn in_batches(
    name: String,
    schema: SchemaRef,
    batches: impl Iterator<Item = Result<RecordBatch, ArrowError>> + Send + 'static,
) -> InputRecords {
    let (mut first_record, input) = (1, name.clone());
    let batches = batches.map(move |batch| {
        let table = batch.map_err(|error| EmbedError::input(&input, error))?;
        let rows = Records { first_record, cells: Cells::Table(Table(table)), bad: Vec::new() };
        first_record += rows.len() as u64;
        Ok(rows)
    });
    InputRecords { name, columns: Some(Columns(schema)), batches: Box::new(batches) }
}

/// Converts the input to columns. For lines, the first batch determines them.
pub fn tabled(mut input: InputRecords, text_column: &str) -> Result<InputRecords, EmbedError> {
    if input.columns.is_some() {
        return Ok(input);
    }
    let first = input.batches.next().transpose()?;
    let records = match &first {
        Some(Records { cells: Cells::Objects(records), .. }) => &records[..],
        _ => &[],
    };
    let schema = objects::infer(records, text_column);
    let (columns, name) = (schema.clone(), input.name.clone());
    let batches = first.map(Ok).into_iter().chain(input.batches).map(move |rows| {
        let mut rows = rows?;
        if let Cells::Objects(records) = &rows.cells {
            for (record, object) in (rows.first_record..).zip(records) {
                let fault = objects::misfit(object, &columns);
                rows.bad.extend(fault.map(|fault| BadRecord { input: name.clone(), record, fault }));
            }
            let table = objects::table(records, &columns).map_err(|error| EmbedError::input(&name, error))?;
            rows.cells = Cells::Table(Table(table));
        }
        Ok(rows)
    });
    Ok(InputRecords { name: input.name, columns: Some(Columns(schema)), batches: Box::new(batches) })
}

/// Writes tables with their vectors as one more column.
pub struct Writer {
    path: PathBuf,
    dims: usize,
    /// Output columns.
    schema: SchemaRef,
    encoder: TableEncoder,
}

enum TableEncoder {
    Csv(OutputSink),
    ArrowStream(StreamWriter<OutputSink>),
    ArrowFile(FileWriter<OutputSink>),
    Parquet(parquet::ParquetWriter),
}

impl Writer {
    /// Opens a writer for records of `input` and writes the header.
    pub fn create(target: &OutputTarget, input: &InputRecords, mut sink: OutputSink) -> Result<Writer, EmbedError> {
        let mut schema = match &input.columns {
            Some(Columns(schema)) => Schema::clone(schema),
            None => Schema::empty(),
        };
        let fields = schema.fields().iter().cloned().chain([Arc::new(vector_field(target.column, target.dims))]);
        schema.fields = fields.collect();
        schema.metadata.extend(target.metadata.clone());
        let schema = Arc::new(schema);
        let failed = |error: ArrowError| EmbedError::write(target.path, error);
        let encoder = match target.format {
            OutputFormat::Parquet => {
                let writer = parquet::ParquetWriter::new(sink, &schema, target.column);
                TableEncoder::Parquet(writer.map_err(|error| EmbedError::write(target.path, error))?)
            }
            OutputFormat::ArrowFile => TableEncoder::ArrowFile(FileWriter::try_new(sink, &schema).map_err(failed)?),
            OutputFormat::Csv => {
                let names = schema.fields().iter().map(|field| field.name().as_bytes().to_vec());
                csv::write_record(&mut sink, names).map_err(|error| EmbedError::write(target.path, error))?;
                TableEncoder::Csv(sink)
            }
            _ => {
                let mut writer = StreamWriter::try_new(sink, &schema).map_err(failed)?;
                // The reader may wait for the schema before it sends anything.
                writer.flush().map_err(failed)?;
                TableEncoder::ArrowStream(writer)
            }
        };
        Ok(Writer { path: target.path.into(), dims: target.dims as usize, schema, encoder })
    }

    /// Writes a batch. In a format for pipes, the reader gets it at once.
    pub fn write(&mut self, batch: &EmbeddedRecords) -> Result<(), EmbedError> {
        let Cells::Table(Table(table)) = &batch.rows.cells else {
            let error = io::Error::other("JSON lines where columns are needed");
            return Err(EmbedError::write(&self.path, error));
        };
        if let TableEncoder::Csv(sink) = &mut self.encoder {
            let written = write_csv(sink, table, batch, self.dims);
            return written.map_err(|error| EmbedError::write(&self.path, error));
        }
        let failed = |error: ArrowError| EmbedError::write(&self.path, error);
        let table = with_vectors(table, batch, &self.schema, self.dims).map_err(failed)?;
        match &mut self.encoder {
            TableEncoder::Csv(_) => Ok(()),
            TableEncoder::ArrowStream(writer) => writer.write(&table).and_then(|()| writer.flush()).map_err(failed),
            TableEncoder::ArrowFile(writer) => writer.write(&table).map_err(failed),
            TableEncoder::Parquet(writer) => writer.write(&table).map_err(|error| EmbedError::write(&self.path, error)),
        }
    }

    /// Writes the footer.
    pub fn finish(self) -> Result<OutputSink, EmbedError> {
        let failed = |error: ArrowError| EmbedError::write(&self.path, error);
        match self.encoder {
            TableEncoder::Csv(sink) => Ok(sink),
            TableEncoder::ArrowStream(writer) => writer.into_inner().map_err(failed),
            TableEncoder::ArrowFile(writer) => writer.into_inner().map_err(failed),
            TableEncoder::Parquet(writer) => writer.finish().map_err(|error| EmbedError::write(&self.path, error)),
        }
    }
}

fn vector_field(name: &str, dims: u32) -> Field {
    Field::new(name, DataType::FixedSizeList(Arc::new(Field::new("item", DataType::Float32, true)), dims as i32), true)
}

/// The table of a batch with its vectors as one more column.
fn with_vectors(
    table: &RecordBatch,
    batch: &EmbeddedRecords,
    schema: &SchemaRef,
    dims: usize,
) -> Result<RecordBatch, ArrowError> {
    let numbers = match batch.has_vector.contains(&false) {
        false => Float32Array::from(batch.vectors.clone()),
        // A null vector needs numbers in the array too; readers ignore them.
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

fn write_csv(sink: &mut OutputSink, table: &RecordBatch, batch: &EmbeddedRecords, dims: usize) -> io::Result<()> {
    for (row, vector) in batch.vectors(dims).enumerate() {
        let vector = vector.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        let cells = table.columns().iter().map(|column| objects::plain(&objects::cell(column, row)).into_bytes());
        csv::write_record(sink, cells.chain([vector]))?;
    }
    sink.flush()
}
