//! Records on their way from input to output.

use std::collections::HashSet;

use arrow_array::cast::AsArray;
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::DataType;
use serde_json::{Map, Value};

use super::error::BadRecord;
use super::table;

/// Records that were read together.
pub struct Rows {
    /// Number of the first, counted from 1.
    pub first_record: u64,
    pub cells: Cells,
    /// Those of them that have no text, and why.
    pub bad: Vec<BadRecord>,
}

/// What the records hold besides vectors.
pub enum Cells {
    Table(RecordBatch),
    /// Lines of JSON, kept as they were.
    Objects(Vec<Map<String, Value>>),
}

/// Records with their vectors.
pub struct Embedded {
    pub rows: Rows,
    /// Which records have a vector.
    pub has_vector: Vec<bool>,
    /// The vectors of those, one after the other.
    pub vectors: Vec<f32>,
}

impl Rows {
    pub fn len(&self) -> usize {
        match &self.cells {
            Cells::Table(batch) => batch.num_rows(),
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
            Cells::Table(batch) => batch.column_by_name(column).map(strings).unwrap_or_default(),
            Cells::Objects(objects) => objects.iter().map(|object| object.get(column)?.as_str()).collect(),
        };
        self.bad_rows().into_iter().for_each(|row| texts[row] = None);
        texts
    }

    /// A record as an object in one line.
    pub fn json(&self, row: usize) -> serde_json::Result<String> {
        match &self.cells {
            Cells::Objects(objects) => serde_json::to_string(&objects[row]),
            Cells::Table(table) => {
                let cells = table.schema_ref().fields().iter().zip(table.columns());
                let object: Map<_, _> =
                    cells.map(|(field, column)| (field.name().clone(), table::cell(column, row))).collect();
                serde_json::to_string(&object)
            }
        }
    }

    fn bad_rows(&self) -> HashSet<usize> {
        self.bad.iter().map(|bad| (bad.record - self.first_record) as usize).collect()
    }
}

/// Whether a column of this type can hold the texts.
pub fn holds_text(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

fn strings(column: &ArrayRef) -> Vec<Option<&str>> {
    match column.data_type() {
        DataType::Utf8 => column.as_string::<i32>().iter().collect(),
        DataType::LargeUtf8 => column.as_string::<i64>().iter().collect(),
        DataType::Utf8View => column.as_string_view().iter().collect(),
        _ => vec![None; column.len()],
    }
}

impl Embedded {
    /// Each record's vector.
    pub fn vectors(&self, dims: usize) -> impl Iterator<Item = Option<&[f32]>> {
        let mut vectors = self.vectors.chunks_exact(dims);
        self.has_vector.iter().map(move |&has| if has { vectors.next() } else { None })
    }
}
