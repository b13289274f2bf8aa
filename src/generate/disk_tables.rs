//! Disk offload of embedding tables: the host fetches the rows of each pass's tokens.
//!
//! A pass reads few rows of an embedding table, which may be half of a model, so the table need not be on the
//! device. Before a pass, the host uploads its tokens' rows, packed as in the table, and the embedding kernel reads
//! those. The host must know the tokens, so only one pass is in flight.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use web_time::Instant;

use super::disk_offload::Streaming;
use crate::device::Device;
use crate::error::Error;
use crate::load::{TableRows, TensorIndex, WeightFiles, WeightUploader};
use crate::model::{FetchedRows, PassTensors, Transformer};

/// Moves the embedding tables of a part to disk, if the file stores their rows one by one.
pub(super) fn in_file(transformer: Transformer, tensor_index: &TensorIndex) -> Transformer {
    let are_readable = transformer.row_tables().all(|(name, _)| tensor_index.table_rows(name).is_some());
    if are_readable { transformer.fetching_rows() } else { transformer }
}

/// Fetches rows of embedding tables from disk.
pub(super) struct DiskTables {
    tables: Vec<(&'static str, TableRows)>,
    files: WeightFiles,
    /// Tensors that no device holds.
    feed: WeightUploader,
    size_bytes: u64,
    fitting_context: Option<u32>,
    n_read: AtomicU64,
    reading_ns: AtomicU64,
}

impl DiskTables {
    /// Disk offload for a part's embedding tables, if any. `resident`: the part on the other device, or the same;
    /// `fitting_context`: for the report.
    pub fn of(
        part: &Transformer,
        resident: &Transformer,
        tensor_index: &TensorIndex,
        files: &WeightFiles,
        fitting_context: Option<u32>,
    ) -> Option<DiskTables> {
        let tables: Vec<_> =
            part.fetched_tables().filter_map(|(name, _)| Some((name, tensor_index.table_rows(name)?))).collect();
        if tables.is_empty() {
            return None;
        }
        let is_unread = |name: &str| {
            tables.iter().any(|(table, _)| *table == name) && !resident.tensor_slots().any(|(known, _)| known == name)
        };
        let feed = WeightUploader::new(tensor_index, part.weights.tensor_slots().filter(|(name, _)| is_unread(name)));
        let slabs = part.fetched_tables().flat_map(|(_, matrix)| matrix.tensors());
        let size_bytes = slabs.map(|words| words.size_bytes()).sum();
        Some(DiskTables {
            tables,
            files: files.clone(),
            feed,
            size_bytes,
            fitting_context,
            n_read: AtomicU64::new(0),
            reading_ns: AtomicU64::new(0),
        })
    }

    /// The tables' share of the model digest, for tables that no device reads. Reads them completely.
    pub fn digest(&self) -> u64 {
        self.files.digest(&self.feed)
    }

    /// Uploads the rows of these tokens, from this position, for the next pass.
    ///
    /// # Errors
    /// Those of [`TableRows::write`].
    pub async fn fetch(&self, device: &Device, io: &PassTensors, position: usize, ids: &[u32]) -> Result<(), Error> {
        let start = Instant::now();
        let own_numbers = self.numbers(ids);
        for FetchedRows { table, rows, numbers } in &io.fetched {
            let Some((_, source)) = self.tables.iter().find(|(name, _)| name == table) else { continue };
            source.write(device, &self.files, ids, rows).await?;
            device.write(numbers, position, &own_numbers)?;
            self.n_read.fetch_add(ids.len() as u64, Ordering::Relaxed);
        }
        self.reading_ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Index of each token's fetched row. The kernel writes zeros for a token without a row.
    pub fn numbers(&self, ids: &[u32]) -> Vec<u32> {
        let n_rows = self.tables.iter().map(|(_, source)| source.len()).min().unwrap_or(0);
        let number = |(i, &id): (usize, &u32)| if u64::from(id) < n_rows { i as u32 } else { u32::MAX };
        ids.iter().enumerate().map(number).collect()
    }

    /// Adds the tables and their statistics to a report.
    pub fn report(&self, streaming: Streaming) -> Streaming {
        Streaming {
            tables_bytes: self.size_bytes,
            fitting_context: self.fitting_context,
            n_rows_read: self.n_read.load(Ordering::Relaxed),
            reading_rows: Duration::from_nanos(self.reading_ns.load(Ordering::Relaxed)),
            ..streaming
        }
    }
}
