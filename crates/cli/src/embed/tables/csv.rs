//! CSV. The `csv` crate handles quoting and its corner cases.

use std::io::{self, Write};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};

use super::super::error::{BadRecord, EmbedError, RecordFault};
use super::super::input::{InputRecords, InputSource, MAX_BATCH_BYTES, MAX_LINE_BYTES, utf8};
use super::super::output::OutputSink;
use super::super::rows::{Cells, Records};
use super::{Columns, Table};

/// Reads CSV with a header; all columns are text.
pub fn read(source: &InputSource, name: String) -> Result<InputRecords, EmbedError> {
    let failed = |input: &str, error: csv::Error| EmbedError::input(input, error);
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(source.reader()?);
    let header = reader.headers().map_err(|error| failed(&name, error))?;
    let fields = header.iter().map(|name| Field::new(name, DataType::Utf8, true));
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let (columns, column, input, batch_size) =
        (schema.clone(), source.column.to_string(), name.clone(), source.batch_size);
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
            let row = row(&record, &columns, &column).map(|row| row.into_iter().map(Some).collect());
            let row: Vec<Option<String>> = row.unwrap_or_else(|fault| {
                bad.push(BadRecord { input: input.clone(), record: n_read + n_rows as u64, fault });
                vec![None; cells.len()]
            });
            for ((cells, cell), field) in cells.iter_mut().zip(row).zip(columns.fields()) {
                // An empty text is null: CSV cannot express it otherwise.
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
        let rows = table.map(|table| Records { first_record, cells: Cells::Table(Table(table)), bad });
        Some(rows.map_err(|error| EmbedError::input(&input, error)))
    });
    Ok(InputRecords { name, columns: Some(Columns(schema)), batches: Box::new(batches) })
}

fn row(record: &csv::ByteRecord, columns: &Schema, column: &str) -> Result<Vec<String>, RecordFault> {
    let size = record.as_slice().len();
    if size > MAX_LINE_BYTES {
        let (found, expected) = (format!("{size} bytes; a quote may be unclosed"), format!("{MAX_LINE_BYTES} at most"));
        return Err(RecordFault::Value { field: "the row".into(), found, expected });
    }
    if record.len() != columns.fields().len() {
        let (found, expected) = (format!("{} fields", record.len()), columns.fields().len().to_string());
        return Err(RecordFault::Value { field: "the row".into(), found, expected });
    }
    let cells = record.iter().zip(columns.fields());
    cells
        .map(|(cell, field)| match utf8(cell.to_vec()) {
            Err(_) if field.name() != column => Err(RecordFault::value(field.name(), "not UTF-8", "text")),
            cell => cell,
        })
        .collect()
}

/// Writes one row.
pub fn write_record(sink: &mut OutputSink, cells: impl Iterator<Item = Vec<u8>>) -> io::Result<()> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(cells)?;
    let line = writer.into_inner().map_err(|error| io::Error::other(error.to_string()))?;
    sink.write_all(&line)
}
