//! Replaces `tables.rs` in builds without the feature `tables`. Its types have no values.

use super::error::EmbedError;
use super::input::{Input, InputFormat, Source};
use super::output::{OutputFormat, Sink, Target};
use super::rows::Embedded;

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
    pub fn create(target: &Target, _input: &Input, _sink: Sink) -> Result<Writer, EmbedError> {
        Err(EmbedError::without_tables(target.path))
    }

    pub fn write(&mut self, _batch: &Embedded) -> Result<(), EmbedError> {
        match *self {}
    }

    pub fn finish(self) -> Result<Sink, EmbedError> {
        match self {}
    }
}

pub fn open(source: &Source, _format: InputFormat, _name: String) -> Result<Input, EmbedError> {
    Err(EmbedError::without_tables(source.path))
}

/// Returns the input unchanged; formats with columns are refused when the output is opened.
pub fn tabled(input: Input, _text_column: &str) -> Result<Input, EmbedError> {
    Ok(input)
}
