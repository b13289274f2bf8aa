//! Exact vector search: an [`Index`] holds vectors on a device and finds the best ones for each query.
//!
//! ```
//! use tilewright::Device;
//! use tilewright::retrieval::index::{Index, IndexOptions};
//!
//! # pollster::block_on(async {
//! let device = Device::auto().await;
//! let mut index = Index::new(&device, 3, IndexOptions::default())?;
//! index.append(&[1.0, 0.0, 0.0, /* */ 0.0, 2.0, 0.0, /* */ 1.0, 1.0, 0.0]).await?;
//! let hits = index.search(&[3.0, 1.0, 0.0], 2, None).await?;
//! assert_eq!([hits[0][0].id, hits[0][1].id], [0, 2]);
//! assert!((hits[0][0].score - 0.9487).abs() < 1e-4);
//! # Ok::<(), tilewright::Error>(())
//! # }).unwrap();
//! ```
//!
//! Vectors are stored in shards, matrices `[N, D]` that are never copied. A full index adds a shard half as large as
//! all shards before, for at least 1024 vectors and at most 65,536 or as many as a binding holds. A search
//! multiplies the queries with one shard at a time and updates the list of the best, so only one shard's scores
//! exist at a time and nothing is sorted. Up to 32 queries need one submission and one read. A search is recorded at
//! its first use for each number of queries and of hits, both rounded up to powers of two.
//!
//! `select_top` does not sort. Each part of a row has an ordered list of its K best scores, and a score below the
//! list's minimum costs one load and one comparison. Better scores wait in workgroup memory until 256 have gathered,
//! and are merged by rank. Pairs of score and id all differ, so the result does not depend on the order of
//! invocations; among equal scores the lower id wins. A non-finite score sorts first, so that the host sees it and
//! names the record.

mod bitset;
mod documents;
mod file;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use half::f16;
use half::slice::HalfFloatSliceExt;

pub use bitset::Bitset;
pub use documents::DocumentIndex;
pub use file::IndexLoader;

use crate::device::{Device, Pending};
use crate::dtype::{BLOCK, DType, WeightType};
use crate::error::Error;
use crate::file_row_bytes;
use crate::kernels::{Linear, MAX_TOP, NO_ITEM, TopStrip, merge_top, select_top, top_splits};
use crate::matrix::{Matrix, TailEdges};
use crate::platform::pause;
use crate::recording::{Recording, Workspace};
use crate::retrieval::{Hit, listed};
use crate::tensor::{Role, Tensor};
use crate::tuning::record_tested;

/// The similarity of a vector and a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Metric {
    /// Cosine similarity. Vectors are normalised and must not be zero.
    #[default]
    Cosine,
    /// Dot product.
    Dot,
}

impl Metric {
    /// All metrics.
    pub const ALL: [Metric; 2] = [Metric::Cosine, Metric::Dot];

    /// The metric's name in files.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Cosine => "cosine",
            Metric::Dot => "dot",
        }
    }
}

/// How vectors are stored. Products are always summed in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Storage {
    /// As 32-bit floats.
    #[default]
    F32,
    /// In half precision, half the size.
    F16,
    /// As signed bytes with an f16 scale per 32, slightly more than a quarter of the size.
    Int8,
}

impl Storage {
    /// All storage types.
    pub const ALL: [Storage; 3] = [Storage::F32, Storage::F16, Storage::Int8];

    /// The storage type's name in files.
    pub fn name(self) -> &'static str {
        match self {
            Storage::F32 => "f32",
            Storage::F16 => "f16",
            Storage::Int8 => "int8",
        }
    }

    /// The weight type of the shards' matrices.
    pub fn weight(self) -> WeightType {
        match self {
            Storage::F32 => WeightType::F32,
            Storage::F16 => WeightType::F16,
            Storage::Int8 => WeightType::Q8_0,
        }
    }

    /// Columns of a shard's matrix. Rows are padded to whole blocks; two scales share a word, which must not belong
    /// to two vectors.
    fn cols(self, dims: u32) -> u32 {
        let blocks = if self == Storage::Int8 { 2 } else { 1 };
        dims.next_multiple_of(blocks * BLOCK as u32)
    }
}

/// Options for an index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexOptions {
    /// The similarity to search by.
    pub metric: Metric,
    /// How vectors are stored.
    pub storage: Storage,
    /// The model that computed the vectors; see [`Index::expect_model`].
    pub model: Option<String>,
    /// The model's pooling.
    pub pooling: Option<String>,
}

/// Maximum dimensions of a vector.
pub const MAX_DIMS: u32 = 1 << 16;
/// Queries per submission. A GPU reads the vectors once for eight or more queries, but once per query for fewer.
const MAX_BATCH: usize = 32;
/// Vectors in the smallest and the largest shard: multiples of the largest tile of a matrix product.
const SHARD_ROWS: Range<u32> = 1024..65_536;
const ROW_STEP: u32 = 128;
/// Bytes of vectors packed at a time.
const PIECE_BYTES: usize = 8 << 20;

/// Consecutive vectors in one matrix.
struct Shard {
    vectors: Matrix,
    first_id: u32,
}

/// The parameters of a recorded search, besides the shards.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct SearchShape {
    batch: u32,
    k: u32,
    is_filtered: bool,
}

/// A recorded search with its input and output.
struct RecordedSearch {
    recording: Recording,
    /// `[B, columns]`.
    queries: Tensor,
    /// `[B, K, 2]`.
    best: Tensor,
}

/// Cached recorded searches. They run one at a time and share memory.
#[derive(Default)]
struct RecordedSearches {
    workspace: Workspace,
    by_shape: HashMap<SearchShape, RecordedSearch>,
}

/// Vectors on a device, searchable for the best matches.
///
/// Ids count the vectors in the order of appending and are never reused, so deleted vectors still occupy memory.
pub struct Index {
    device: Device,
    dims: u32,
    options: IndexOptions,
    shards: Vec<Shard>,
    /// One bit per id: whether the vector is not deleted.
    live: Bitset,
    /// `live` and a filter on the device: one bit per row of the shards.
    bits: Option<[Tensor; 2]>,
    searches: Mutex<RecordedSearches>,
}

impl Index {
    /// An empty index for vectors of `dims` numbers.
    ///
    /// # Errors
    /// [`Error::Index`] if `dims` is not 1 to [`MAX_DIMS`].
    pub fn new(device: &Device, dims: u32, options: IndexOptions) -> Result<Index, Error> {
        if !(1..=MAX_DIMS).contains(&dims) {
            return Err(wrong("dims", format!("1 to {MAX_DIMS}"), dims.to_string()));
        }
        let (shards, live, searches) = (Vec::new(), Bitset::new(0), Mutex::default());
        Ok(Index { device: device.clone(), dims, options, shards, live, bits: None, searches })
    }

    /// Dimensions of a vector.
    pub fn dims(&self) -> u32 {
        self.dims
    }

    /// The index's options.
    pub fn options(&self) -> &IndexOptions {
        &self.options
    }

    /// Vectors that are not deleted.
    pub fn len(&self) -> u32 {
        self.live.count()
    }

    /// Whether all vectors are deleted or none was appended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ids assigned so far, which is the next vector's id.
    pub fn n_ids(&self) -> u32 {
        self.live.len()
    }

    /// Bytes allocated for vectors on the device, including unused capacity.
    pub fn size_bytes(&self) -> u64 {
        self.shards.iter().flat_map(|shard| shard.vectors.tensors()).map(Tensor::size_bytes).sum()
    }

    /// Whether `id` was appended and not deleted.
    pub fn contains(&self, id: u32) -> bool {
        id < self.n_ids() && self.live.get(id)
    }

    /// Refuses vectors of a model or dimensions other than the index's.
    ///
    /// # Errors
    /// [`Error::Index`] with the model or the dimensions.
    pub fn expect_model(&self, model: &str, dims: u32) -> Result<(), Error> {
        match self.options.model.as_deref() {
            Some(own) if own != model => return Err(wrong("model", format!("`{model}`"), format!("`{own}`"))),
            None => return Err(wrong("model", format!("`{model}`"), "none".into())),
            _ => {}
        }
        if self.dims == dims { Ok(()) } else { Err(wrong("dims", dims.to_string(), self.dims.to_string())) }
    }

    /// Appends the vectors in `vectors`, which are stored in sequence, and returns their ids. Waits for the device
    /// at intervals, so that uploads do not accumulate.
    ///
    /// # Errors
    /// [`Error::Index`] with the record, counted from 0, if it is non-finite, too large for the storage type, or
    /// zero with [`Metric::Cosine`]; if `vectors` is not a whole number of vectors, or no id is left. Errors of
    /// [`Device::write`]. On an error, the index is unchanged.
    pub async fn append(&mut self, vectors: &[f32]) -> Result<Range<u32>, Error> {
        let n = self.check(vectors, "record")?;
        let ids = self.reserve(n)?;
        let dims = self.dims as usize;
        let row_bytes = file_row_bytes(self.options.storage.weight(), self.options.storage.cols(self.dims) as usize);
        let mut bytes = Vec::new();
        let mut first_id = ids.start;
        for rows in vectors.chunks((PIECE_BYTES / row_bytes).max(1) * dims) {
            bytes.clear();
            rows.chunks_exact(dims).for_each(|row| self.pack(row, &mut bytes));
            self.write_rows(first_id, &bytes).await?;
            first_id += (rows.len() / dims) as u32;
        }
        self.publish(ids.clone(), |_| true)?;
        Ok(ids)
    }

    /// Deletes vectors. Returns how many of them were not deleted before.
    ///
    /// # Errors
    /// [`Error::Index`] if an id was never assigned; then nothing is deleted. Errors of [`Device::write`].
    pub fn delete(&mut self, ids: &[u32]) -> Result<u32, Error> {
        if let Some(id) = ids.iter().find(|&&id| id >= self.n_ids()) {
            return Err(wrong("id", format!("one below {}", self.n_ids()), id.to_string()));
        }
        let before = self.len();
        ids.iter().for_each(|&id| self.live.set(id, false));
        if let (Some(&first), Some(&last)) = (ids.iter().min(), ids.iter().max()) {
            self.write_live(first..last + 1)?;
        }
        Ok(before - self.len())
    }

    /// The best `k` vectors for each query in `queries`, which are stored in sequence: higher scores first, ties by
    /// lower id. The list is shorter if fewer vectors are live and pass the filter, which has one bit per id.
    ///
    /// # Errors
    /// [`Error::Index`] with the query, counted from 0, if it is non-finite, or zero with [`Metric::Cosine`]; if
    /// `queries` is not a whole number of queries; if the filter does not have one bit per id; with the record if a
    /// score is non-finite. [`Error::Option`] if `k` is not 1 to 1024; errors of [`Device::run`].
    pub async fn search(&self, queries: &[f32], k: usize, filter: Option<&Bitset>) -> Result<Vec<Vec<Hit>>, Error> {
        let n = self.check(queries, "query")? as usize;
        if !(1..=MAX_TOP as usize).contains(&k) {
            return Err(Error::Option { option: "k", expected: format!("1 to {MAX_TOP}"), found: k.to_string() });
        }
        if let Some(filter) = filter.filter(|filter| filter.len() != self.n_ids()) {
            return Err(wrong("filter", format!("{} bits", self.n_ids()), filter.len().to_string()));
        }
        let mut found = Vec::with_capacity(n);
        for queries in queries.chunks(MAX_BATCH * self.dims as usize) {
            let n = queries.len() / self.dims as usize;
            if self.is_empty() {
                found.extend(vec![Vec::new(); n]);
                continue;
            }
            let shape = SearchShape {
                batch: (n as u32).next_power_of_two(),
                k: (k as u32).next_power_of_two().max(8),
                is_filtered: filter.is_some(),
            };
            self.test(shape).await?;
            let pending = self.start(queries, shape, filter)?;
            let words = pending.await?;
            for list in words.chunks_exact(2 * shape.k as usize).take(n) {
                found.push(hits(&list[..2 * k])?);
            }
            pause().await;
        }
        Ok(found)
    }

    /// Checks that `vectors` are whole, finite and storable, and returns their number. Errors call a vector `what`.
    fn check(&self, vectors: &[f32], what: &str) -> Result<u32, Error> {
        let dims = self.dims as usize;
        let Some(n) = u32::try_from(vectors.len() / dims).ok().filter(|_| vectors.len().is_multiple_of(dims)) else {
            let whole = vectors.len() / dims;
            let expected = format!("{dims} numbers");
            return Err(wrong(
                format!("{what} {whole}"),
                expected,
                format!("{} numbers", vectors.len() - whole * dims),
            ));
        };
        for (i, vector) in vectors.chunks_exact(dims).enumerate() {
            let error = |expected: &str, found: String| Err(wrong(format!("{what} {i}"), expected.into(), found));
            let largest = vector.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            // The maximum would drop a NaN.
            if let Some(at) = vector.iter().position(|x| !x.is_finite()) {
                return error("finite numbers", format!("{} in column {at}", vector[at]));
            }
            let limit = match (self.options.metric, self.options.storage) {
                (Metric::Cosine, _) if largest == 0.0 => return error("a non-zero vector", "zero".into()),
                (Metric::Dot, Storage::F16) if what == "record" => f32::from(f16::MAX),
                (Metric::Dot, Storage::Int8) if what == "record" => 127.0 * f32::from(f16::MAX),
                _ => f32::MAX,
            };
            if largest > limit {
                return error(&format!("numbers up to {limit}"), format!("one of magnitude {largest}"));
            }
        }
        Ok(n)
    }

    /// Writes the vector as stored: normalised for [`Metric::Cosine`].
    fn put(&self, vector: &[f32], to: &mut [f32]) {
        match self.options.metric {
            Metric::Dot => to.copy_from_slice(vector),
            Metric::Cosine => {
                let scale = vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt().recip();
                to.iter_mut().zip(vector).for_each(|(to, &x)| *to = (f64::from(x) * scale) as f32);
            }
        }
    }

    /// Appends a vector to `bytes` in its weight type's file layout, padded with zeros.
    fn pack(&self, vector: &[f32], bytes: &mut Vec<u8>) {
        let mut row = vec![0.0; self.options.storage.cols(self.dims) as usize];
        self.put(vector, &mut row[..vector.len()]);
        match self.options.storage {
            Storage::F32 => bytes.extend_from_slice(bytemuck::cast_slice(&row)),
            Storage::F16 => {
                let mut halves = vec![f16::ZERO; row.len()];
                halves.convert_from_f32_slice(&row);
                bytes.extend_from_slice(bytemuck::cast_slice(&halves));
            }
            Storage::Int8 => {
                for block in row.chunks_exact(BLOCK) {
                    let largest = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                    let scale = f16::from_f32(largest / 127.0);
                    bytes.extend(scale.to_le_bytes());
                    // A scale that was rounded down must not take the largest number past 127.
                    let quant = |x: f32| (x / f32::from(scale)).round().clamp(-127.0, 127.0) as i8;
                    bytes.extend(block.iter().map(|&x| if scale == f16::ZERO { 0 } else { quant(x) as u8 }));
                }
            }
        }
    }

    /// Allocates space for `n` vectors and returns their ids.
    fn reserve(&mut self, n: u32) -> Result<Range<u32>, Error> {
        let start = self.n_ids();
        let cols = self.options.storage.cols(self.dims);
        let most = self.most_rows();
        // The last shard may have rows past the last id.
        let Some(end) = start.checked_add(n).filter(|end| *end < NO_ITEM - most) else {
            return Err(wrong("records", format!("ids below {}", NO_ITEM - most), format!("{n} from {start} on")));
        };
        let mut capacity = self.capacity();
        if end <= capacity {
            return Ok(start..end);
        }
        let mut shards = Vec::new();
        while capacity < end {
            let wanted = (capacity / 2).max(end - capacity).max(SHARD_ROWS.start).next_multiple_of(ROW_STEP).min(most);
            let vectors =
                Matrix::declare(&self.device.target(), "vectors", self.options.storage.weight(), wanted, cols)?;
            vectors.tensors().try_for_each(|words| self.device.allocate(words))?;
            shards.push(Shard { vectors, first_id: capacity });
            capacity += wanted;
        }
        let mut words = self.live.words().to_vec();
        words.resize(capacity as usize / 32, 0);
        let bits = |label| {
            let tensor = Tensor::declare(label, Role::Weights, &[capacity / 32], DType::U32)?;
            self.device.write(&tensor, 0, &words)?;
            Ok::<_, Error>(tensor)
        };
        let bits = [bits("live")?, bits("filter")?];
        self.shards.append(&mut shards);
        self.bits = Some(bits);
        // Cached recordings lack the new shards and bits.
        self.searches = Mutex::default();
        Ok(start..end)
    }

    /// Most vectors of a shard.
    fn most_rows(&self) -> u32 {
        // Upper bound for any storage, including scales.
        let row_bytes = 4 * u64::from(self.options.storage.cols(self.dims));
        let most = self.device.limits().max_binding_bytes.saturating_sub(16) / row_bytes;
        (most.min(u64::from(SHARD_ROWS.end)) as u32 / ROW_STEP * ROW_STEP).max(ROW_STEP)
    }

    /// Vectors that fit in the shards.
    fn capacity(&self) -> u32 {
        self.shards.last().map_or(0, |shard| shard.first_id + shard.vectors.rows())
    }

    /// Writes packed vectors to the rows from `first_id` on, and waits for the upload.
    async fn write_rows(&self, first_id: u32, bytes: &[u8]) -> Result<(), Error> {
        let row_bytes = file_row_bytes(self.options.storage.weight(), self.options.storage.cols(self.dims) as usize);
        let end = first_id + (bytes.len() / row_bytes) as u32;
        for shard in &self.shards {
            let shard_end = shard.first_id + shard.vectors.rows();
            let (first, last) = (first_id.max(shard.first_id), end.min(shard_end));
            if first < last {
                let rows = &bytes[(first - first_id) as usize * row_bytes..(last - first_id) as usize * row_bytes];
                // Rows do not share words of scales, so no edge is needed.
                let mut edges = TailEdges::default();
                shard.vectors.write_rows(&self.device, first - shard.first_id, rows, &mut edges)?;
            }
        }
        self.device.drained().await
    }

    /// Makes written vectors searchable, except those that `is_live` marks as deleted.
    fn publish(&mut self, ids: Range<u32>, is_live: impl Fn(u32) -> bool) -> Result<(), Error> {
        self.live.resize(ids.end);
        ids.clone().filter(|&id| is_live(id)).for_each(|id| self.live.set(id, true));
        self.write_live(ids)
    }

    /// Uploads the live bits of these ids.
    fn write_live(&self, ids: Range<u32>) -> Result<(), Error> {
        let (first, end) = (ids.start as usize / 32, ids.end.div_ceil(32) as usize);
        match &self.bits {
            Some([live, _]) if first < end => self.device.write(live, first, &self.live.words()[first..end]),
            _ => Ok(()),
        }
    }

    /// Runs the self-test of this search.
    async fn test(&self, shape: SearchShape) -> Result<(), Error> {
        let is_known = self.searches.lock().unwrap_or_else(PoisonError::into_inner).by_shape.contains_key(&shape);
        if is_known {
            return Ok(());
        }
        // A separate recording: it allocates nothing and does not block other searches.
        let record = || self.record(shape, &mut Workspace::default());
        record_tested(&self.device, record, |search| &search.recording).await.map(drop)
    }

    /// Submits a search for up to [`MAX_BATCH`] queries, under a lock from its first write to its run.
    fn start(&self, queries: &[f32], shape: SearchShape, filter: Option<&Bitset>) -> Result<Pending, Error> {
        let mut searches = self.searches.lock().unwrap_or_else(PoisonError::into_inner);
        let RecordedSearches { workspace, by_shape } = &mut *searches;
        let search = match by_shape.entry(shape) {
            Entry::Occupied(search) => search.into_mut(),
            Entry::Vacant(place) => place.insert(self.record(shape, workspace)?),
        };
        let (dims, cols) = (self.dims as usize, self.options.storage.cols(self.dims) as usize);
        let mut rows = vec![0.0; shape.batch as usize * cols];
        for (query, row) in queries.chunks_exact(dims).zip(rows.chunks_exact_mut(cols)) {
            self.put(query, &mut row[..dims]);
        }
        self.device.write(&search.queries, 0, &rows)?;
        if let (Some(filter), Some([_, bits])) = (filter, &self.bits) {
            let words = self.live.words().iter().zip(filter.words()).map(|(live, filter)| live & filter);
            self.device.write(bits, 0, &words.collect::<Vec<u32>>())?;
        }
        self.device.run_and_read(&search.recording, &search.best)
    }

    fn record(
        &self,
        SearchShape { batch, k, is_filtered }: SearchShape,
        workspace: &mut Workspace,
    ) -> Result<RecordedSearch, Error> {
        let cols = self.options.storage.cols(self.dims);
        let queries = Tensor::declare("queries", Role::Activations, &[batch, cols], DType::F32)?;
        let best = Tensor::declare("best", Role::Activations, &[batch, k, 2], DType::U32)?;
        let longest = self.shards.iter().map(|shard| shard.vectors.rows()).max().unwrap_or(1);
        let n_splits = top_splits(batch, longest);
        let lists = Tensor::temporary("lists", &[batch, n_splits, k, 2], DType::U32)?;
        let mut rec = self.device.recorder();
        for shard in &self.shards {
            let scores = rec.temporary("scores", &[batch, shard.vectors.rows()])?;
            Linear::new(&shard.vectors).record(&mut rec, &queries, &scores)?;
            let allowed = self.bits.as_ref().map(|bits| &bits[usize::from(is_filtered)]);
            let strip = TopStrip { first_id: shard.first_id, begins: shard.first_id == 0, allowed };
            select_top(&mut rec, &scores, &strip, &lists)?;
        }
        merge_top(&mut rec, &lists, &best)?;
        Ok(RecordedSearch { recording: rec.finish(workspace), queries, best })
    }
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Index { dims, options, .. } = self;
        f.debug_struct("Index").field("dims", dims).field("options", options).field("len", &self.len()).finish()
    }
}

/// Decodes a list of score bits and ids.
fn hits(list: &[u32]) -> Result<Vec<Hit>, Error> {
    listed(list)
        .map(|hit| match hit.score.is_finite() {
            true => Ok(hit),
            false => {
                Err(wrong(format!("score of record {}", hit.id), "a finite number".into(), "NaN or infinite".into()))
            }
        })
        .collect()
}

fn wrong(field: impl Into<String>, expected: String, found: String) -> Error {
    Error::Index { field: field.into(), expected, found }
}
