//! Parquet files.

use std::fs::File;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::schema::types::ColumnPath;

use super::super::output::OutputSink;

/// Size of a row group in bytes, which is kept in memory until it is full.
const ROW_GROUP_BYTES: usize = 128 << 20;

/// The file's schema with its metadata, and its rows in batches.
pub fn read(file: File, batch_size: usize) -> Result<(SchemaRef, ParquetRecordBatchReader), ParquetError> {
    let builder = ParquetRecordBatchReaderBuilder::try_new(file)?;
    let mut columns = builder.metadata().row_groups().iter().flat_map(|group| group.columns());
    let codec = columns.find_map(|column| match column.compression() {
        Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_) => None,
        Compression::LZ4 | Compression::LZ4_RAW => None,
        other => Some(other),
    });
    if let Some(codec) = codec {
        let fault = format!("compressed with {codec}; supported are snappy, gzip and lz4");
        return Err(ParquetError::NYI(fault));
    }
    // The reader's own schema lacks the metadata.
    let schema = builder.schema().clone();
    Ok((schema, builder.with_batch_size(batch_size).build()?))
}

/// Writes tables.
pub struct ParquetWriter(Box<ArrowWriter<OutputSink>>);

impl ParquetWriter {
    /// For tables of `schema`; `vectors` is the vector column.
    pub fn new(sink: OutputSink, schema: &SchemaRef, vectors: &str) -> Result<ParquetWriter, ParquetError> {
        // Elements of vectors hardly repeat, and their ranges are of no use.
        let vectors = ColumnPath::new(vec![vectors.into(), "list".into(), "item".into()]);
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_max_row_group_bytes(Some(ROW_GROUP_BYTES))
            .set_column_dictionary_enabled(vectors.clone(), false)
            .set_column_statistics_enabled(vectors.clone(), EnabledStatistics::None)
            .set_column_compression(vectors, Compression::UNCOMPRESSED);
        let mut writer = ArrowWriter::try_new(sink, schema.clone(), Some(properties.build()))?;
        for (key, value) in schema.metadata() {
            writer.append_key_value_metadata(KeyValue::new(key.clone(), value.clone()));
        }
        Ok(ParquetWriter(Box::new(writer)))
    }

    pub fn write(&mut self, table: &RecordBatch) -> Result<(), ParquetError> {
        self.0.write(table)
    }

    /// Writes the footer.
    pub fn finish(self) -> Result<OutputSink, ParquetError> {
        self.0.into_inner()
    }
}
