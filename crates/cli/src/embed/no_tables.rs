//! Replaces `tables.rs` in builds without the feature `tables`. Its types have no values.

use super::error::EmbedError;
use super::input::{InputFormat, InputRecords, InputSource};
use super::output::{OutputFormat, OutputSink, OutputTarget};
use super::rows::EmbeddedRecords;

/// Columns of a table.
pub enum Columns {}

/// Records in columns.
pub enum Table {}

/// Writes tables.
pub enum Writer {}

impl Columns {
    pub fn check_output(&self, _input: &str, _out_column: &str, _format: OutputFormat) -> Result<(), EmbedError> {
        match *self {}
    }
}

impl Table {
    pub fn n_rows(&self) -> usize {
        match *self {}
    }

    pub fn texts(&self, _column: &str) -> Vec<Option<&str>> {
        match *self {}
    }

    pub fn json(&self, _row: usize) -> serde_json::Result<String> {
        match *self {}
    }
}

impl Writer {
    pub fn create(target: &OutputTarget, _input: &InputRecords, _sink: OutputSink) -> Result<Writer, EmbedError> {
        Err(EmbedError::without_tables(target.path))
    }

    pub fn write(&mut self, _batch: &EmbeddedRecords) -> Result<(), EmbedError> {
        match *self {}
    }

    pub fn finish(self) -> Result<OutputSink, EmbedError> {
        match self {}
    }
}

pub fn open(source: &InputSource, _format: InputFormat, _name: String) -> Result<InputRecords, EmbedError> {
    Err(EmbedError::without_tables(source.path))
}

/// Returns the input unchanged; formats with columns are refused when the output is opened.
pub fn tabled(input: InputRecords, _text_column: &str) -> Result<InputRecords, EmbedError> {
    Ok(input)
}
