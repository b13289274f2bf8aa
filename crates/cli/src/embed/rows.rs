//! Records between input and output.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::error::BadRecord;
use super::tables::Table;

/// A batch of records.
pub struct Records {
    /// Number of the first record, counted from 1.
    pub first_record: u64,
    pub cells: Cells,
    /// Records without a valid text, and why.
    pub bad: Vec<BadRecord>,
}

/// Contents of records, without vectors.
pub enum Cells {
    #[cfg_attr(not(feature = "tables"), expect(dead_code, reason = "only `tables` constructs it"))]
    Table(Table),
    /// Text or JSON lines, unchanged.
    Objects(Vec<Map<String, Value>>),
}

/// Records with their vectors.
pub struct EmbeddedRecords {
    pub rows: Records,
    /// Which records have a vector.
    pub has_vector: Vec<bool>,
    /// Their vectors, concatenated.
    pub vectors: Vec<f32>,
}

impl Records {
    pub fn len(&self) -> usize {
        match &self.cells {
            Cells::Table(table) => table.n_rows(),
            Cells::Objects(objects) => objects.len(),
        }
    }

    /// Rows with a null text that are not bad, counted from 0 in this batch.
    pub fn nulls(&self, column: &str) -> Vec<usize> {
        let bad = self.bad_rows();
        let texts = self.texts(column);
        (0..texts.len()).filter(|row| texts[*row].is_none() && !bad.contains(row)).collect()
    }

    /// The text of each record; `None` where it is null or the record is bad.
    pub fn texts(&self, column: &str) -> Vec<Option<&str>> {
        let mut texts: Vec<Option<&str>> = match &self.cells {
            Cells::Table(table) => table.texts(column),
            Cells::Objects(objects) => objects.iter().map(|object| object.get(column)?.as_str()).collect(),
        };
        self.bad_rows().into_iter().for_each(|row| texts[row] = None);
        texts
    }

    /// A record as a JSON object in one line.
    pub fn json(&self, row: usize) -> serde_json::Result<String> {
        match &self.cells {
            Cells::Objects(objects) => serde_json::to_string(&objects[row]),
            Cells::Table(table) => table.json(row),
        }
    }

    fn bad_rows(&self) -> HashSet<usize> {
        self.bad.iter().map(|bad| (bad.record - self.first_record) as usize).collect()
    }
}

impl EmbeddedRecords {
    /// Each record's vector.
    pub fn vectors(&self, dims: usize) -> impl Iterator<Item = Option<&[f32]>> {
        let mut vectors = self.vectors.chunks_exact(dims);
        self.has_vector.iter().map(move |&has| if has { vectors.next() } else { None })
    }
}
