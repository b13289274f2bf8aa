//! Records on their way from input to output.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::error::BadRecord;
use super::tables::Table;

/// Records that were read together.
pub struct Records {
    /// Number of the first, counted from 1.
    pub first_record: u64,
    pub cells: Cells,
    /// Those of them that have no text, and why.
    pub bad: Vec<BadRecord>,
}

/// What the records hold besides vectors.
pub enum Cells {
    #[cfg_attr(not(feature = "tables"), expect(dead_code, reason = "nothing makes one"))]
    Table(Table),
    /// Lines of text or of JSON, kept as they were.
    Objects(Vec<Map<String, Value>>),
}

/// Records with their vectors.
pub struct Embedded {
    pub rows: Records,
    /// Which records have a vector.
    pub has_vector: Vec<bool>,
    /// The vectors of those, one after the other.
    pub vectors: Vec<f32>,
}

impl Records {
    pub fn len(&self) -> usize {
        match &self.cells {
            Cells::Table(table) => table.n_rows(),
            Cells::Objects(objects) => objects.len(),
        }
    }

    /// Records whose text is null and that are not bad, counted from 0 in this batch.
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

    /// A record as an object in one line.
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

impl Embedded {
    /// Each record's vector.
    pub fn vectors(&self, dims: usize) -> impl Iterator<Item = Option<&[f32]>> {
        let mut vectors = self.vectors.chunks_exact(dims);
        self.has_vector.iter().map(move |&has| if has { vectors.next() } else { None })
    }
}
