//! Exact vector search: an [`Index`] holds vectors on a device and finds the best for each query.
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
//! Vectors lie in shards, matrices `[N, D]` that are never copied: a full index gets a further one, half as large as
//! all before, at least for 1024 vectors and at most as large as the device binds or for 65,536. A search multiplies
//! the queries with one shard after the other and keeps the best as it goes, so scores exist for one shard at a time
//! and nothing is sorted. It is one submission and one read for up to 32 queries; what it needs is recorded the first
//! time that a number of queries and of hits, both rounded up to powers of two, is asked for.
//!
//! `select_top` does not sort. Each part of a row has an ordered list of its K best scores, and a score below the
//! list's minimum costs one load and one comparison. Better ones wait in workgroup memory until 256 have gathered,
//! and are merged by rank. Pairs of score and id all differ, so the result does not depend on the order of
//! invocations; among equal scores the lower id wins. A score that is not finite comes first, so that the host sees
//! it and names the record.

mod bitset;
mod file;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use half::f16;
use half::slice::HalfFloatSliceExt;

pub use bitset::Bitset;
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

/// What makes a vector good for a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Metric {
    /// The cosine of the angle between them. Both are made unit vectors, so none may be zero.
    #[default]
    Cosine,
    /// Their dot product.
    Dot,
}

impl Metric {
    /// All metrics.
    pub const ALL: [Metric; 2] = [Metric::Cosine, Metric::Dot];

    /// Name in files.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Cosine => "cosine",
            Metric::Dot => "dot",
        }
    }
}

/// How vectors are stored. Products are summed in f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Storage {
    /// As 32-bit floats.
    #[default]
    F32,
    /// In half precision, half as large.
    F16,
    /// As signed bytes with an f16 scale for each 32, little more than a quarter as large.
    Int8,
}

impl Storage {
    /// All storages.
    pub const ALL: [Storage; 3] = [Storage::F32, Storage::F16, Storage::Int8];

    /// Name in files.
    pub fn name(self) -> &'static str {
        match self {
            Storage::F32 => "f32",
            Storage::F16 => "f16",
            Storage::Int8 => "int8",
        }
    }

    /// The type of a matrix that stores so.
    pub fn weight(self) -> WeightType {
        match self {
            Storage::F32 => WeightType::F32,
            Storage::F16 => WeightType::F16,
            Storage::Int8 => WeightType::Q8_0,
        }
    }

    /// Columns of matrices for vectors of `dims` numbers. Rows are padded to whole blocks anyway; two scales share a
    /// word, which is not to be shared by two vectors.
    fn cols(self, dims: u32) -> u32 {
        let blocks = if self == Storage::Int8 { 2 } else { 1 };
        dims.next_multiple_of(blocks * BLOCK as u32)
    }
}

/// What an index is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexOptions {
    /// What is looked for.
    pub metric: Metric,
    /// How vectors are stored.
    pub storage: Storage,
    /// The model that makes the vectors; see [`Index::expect_model`].
    pub model: Option<String>,
    /// How that model makes one vector of many tokens.
    pub pooling: Option<String>,
}

/// Numbers of a vector, at most.
pub const MAX_DIMS: u32 = 1 << 16;
/// Queries of one submission. From eight on a GPU reads the vectors once for all of them, below that once for each.
const MAX_BATCH: usize = 32;
/// Vectors of the largest shard, and of the smallest: multiples of the largest tile of a matrix product.
const SHARD_ROWS: Range<u32> = 1024..65_536;
const ROW_STEP: u32 = 128;
/// Bytes of vectors that are packed at a time.
const PIECE_BYTES: usize = 8 << 20;

/// A run of vectors in a matrix of their own.
struct Shard {
    vectors: Matrix,
    first_id: u32,
}

/// What a recorded search depends on, besides the shards.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    batch: u32,
    k: u32,
    is_filtered: bool,
}

/// A recorded search and its ends.
struct RecordedSearch {
    recording: Recording,
    /// `[B, columns]`.
    queries: Tensor,
    /// `[B, K, 2]`.
    best: Tensor,
}

/// Searches recorded so far. They use the same memory, one after the other.
#[derive(Default)]
struct RecordedSearches {
    workspace: Workspace,
    by_shape: HashMap<Shape, RecordedSearch>,
}

/// Vectors on a device, and the search for the best of them.
///
/// Ids count the vectors as they are appended and are never given to another, so deleted vectors keep their place in
/// memory.
pub struct Index {
    device: Device,
    dims: u32,
    options: IndexOptions,
    shards: Vec<Shard>,
    /// Ids that are not deleted; as long as there are ids.
    live: Bitset,
    /// The same for kernels, and room for a filter: a bit for each place in the shards.
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

    /// Numbers of a vector.
    pub fn dims(&self) -> u32 {
        self.dims
    }

    /// What the index is for.
    pub fn options(&self) -> &IndexOptions {
        &self.options
    }

    /// Vectors that can be found.
    pub fn len(&self) -> u32 {
        self.live.count()
    }

    /// Whether no vector can be found.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ids that were given out: the next vector gets this one.
    pub fn n_ids(&self) -> u32 {
        self.live.len()
    }

    /// Bytes that the vectors take on the device, those that are still to come and fit included.
    pub fn size_bytes(&self) -> u64 {
        self.shards.iter().flat_map(|shard| shard.vectors.tensors()).map(Tensor::size_bytes).sum()
    }

    /// Whether `id` was appended and not deleted.
    pub fn contains(&self, id: u32) -> bool {
        id < self.n_ids() && self.live.get(id)
    }

    /// Refuses vectors of another model or of another length than the index was made for.
    ///
    /// # Errors
    /// [`Error::Index`] that says which.
    pub fn expect_model(&self, model: &str, dims: u32) -> Result<(), Error> {
        match self.options.model.as_deref() {
            Some(own) if own != model => return Err(wrong("model", format!("`{model}`"), format!("`{own}`"))),
            None => return Err(wrong("model", format!("`{model}`"), "none".into())),
            _ => {}
        }
        if self.dims == dims { Ok(()) } else { Err(wrong("dims", dims.to_string(), self.dims.to_string())) }
    }

    /// Appends vectors, one after the other in `vectors`, and gives their ids. Waits for the device now and then, so
    /// that uploads do not pile up.
    ///
    /// # Errors
    /// [`Error::Index`] that names the record, counted from 0 in `vectors`, if it is not finite, too large for the
    /// storage, or zero where cosines are looked for; if there is no whole number of vectors, or no id left. Errors of
    /// [`Device::write`]. The index is as before then.
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

    /// Deletes vectors: they are never found again. Returns how many were there until now.
    ///
    /// # Errors
    /// [`Error::Index`] if an id was never given out; nothing is deleted then. Errors of [`Device::write`].
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

    /// The best `k` vectors for each query, one after the other in `queries`: higher scores first, among equals the
    /// lower id. There are fewer where fewer are live and allowed by the filter, which has a bit for each id.
    ///
    /// # Errors
    /// [`Error::Index`] that names the query, counted from 0, if it is not finite or, where cosines are looked for,
    /// zero; if there is no whole number of queries; if the filter has not as many bits as there are ids; if a score is
    /// not finite, naming the record. [`Error::Option`] if `k` is not 1 to 1024; errors of [`Device::run`].
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
            let shape = Shape {
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

    /// Refuses anything but whole, finite vectors that can be stored, called `what`. Returns how many they are.
    fn check(&self, vectors: &[f32], what: &str) -> Result<u32, Error> {
        let dims = self.dims as usize;
        let Some(n) = u32::try_from(vectors.len() / dims).ok().filter(|_| vectors.len().is_multiple_of(dims)) else {
            let whole = vectors.len() / dims;
            let expected = format!("{dims} numbers, as in each before");
            return Err(wrong(
                format!("{what} {whole}"),
                expected,
                format!("{} numbers", vectors.len() - whole * dims),
            ));
        };
        for (i, vector) in vectors.chunks_exact(dims).enumerate() {
            let error = |expected: &str, found: String| Err(wrong(format!("{what} {i}"), expected.into(), found));
            let largest = vector.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            // A NaN would be lost in the maximum.
            if let Some(at) = vector.iter().position(|x| !x.is_finite()) {
                return error("finite numbers", format!("{} in column {at}", vector[at]));
            }
            let limit = match (self.options.metric, self.options.storage) {
                (Metric::Cosine, _) if largest == 0.0 => return error("a direction", "zero".into()),
                (Metric::Dot, Storage::F16) if what == "record" => f32::from(f16::MAX),
                (Metric::Dot, Storage::Int8) if what == "record" => 127.0 * f32::from(f16::MAX),
                _ => f32::MAX,
            };
            if largest > limit {
                return error(&format!("numbers up to {limit}"), format!("one of size {largest}"));
            }
        }
        Ok(n)
    }

    /// The vector as it is stored: of length 1 where cosines are looked for.
    fn put(&self, vector: &[f32], to: &mut [f32]) {
        match self.options.metric {
            Metric::Dot => to.copy_from_slice(vector),
            Metric::Cosine => {
                let scale = vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt().recip();
                to.iter_mut().zip(vector).for_each(|(to, &x)| *to = (f64::from(x) * scale) as f32);
            }
        }
    }

    /// Appends a vector to `bytes` as files of its weight type store it, padded with zeros.
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
                    // A scale that was rounded down must not carry the largest past 127.
                    let quant = |x: f32| (x / f32::from(scale)).round().clamp(-127.0, 127.0) as i8;
                    bytes.extend(block.iter().map(|&x| if scale == f16::ZERO { 0 } else { quant(x) as u8 }));
                }
            }
        }
    }

    /// Makes room for `n` vectors and gives the ids that they will have.
    fn reserve(&mut self, n: u32) -> Result<Range<u32>, Error> {
        let start = self.n_ids();
        let cols = self.options.storage.cols(self.dims);
        let row_bytes = 4 * u64::from(cols); // at least what a row takes in any storage, its scales included
        let most =
            (self.device.limits().max_binding_bytes.saturating_sub(16) / row_bytes).min(u64::from(SHARD_ROWS.end));
        let most = (most as u32 / ROW_STEP * ROW_STEP).max(ROW_STEP);
        // The last shard may have places past the last id.
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
        // What was recorded knows neither the new shards nor the new bits.
        self.searches = Mutex::default();
        Ok(start..end)
    }

    /// Places for vectors.
    fn capacity(&self) -> u32 {
        self.shards.last().map_or(0, |shard| shard.first_id + shard.vectors.rows())
    }

    /// Writes packed vectors to the places of `first_id` and those that follow, and waits until the device has them.
    async fn write_rows(&self, first_id: u32, bytes: &[u8]) -> Result<(), Error> {
        let row_bytes = file_row_bytes(self.options.storage.weight(), self.options.storage.cols(self.dims) as usize);
        let end = first_id + (bytes.len() / row_bytes) as u32;
        for shard in &self.shards {
            let shard_end = shard.first_id + shard.vectors.rows();
            let (first, last) = (first_id.max(shard.first_id), end.min(shard_end));
            if first < last {
                let rows = &bytes[(first - first_id) as usize * row_bytes..(last - first_id) as usize * row_bytes];
                // No two rows share a word of scales, so nothing is kept.
                let mut edges = TailEdges::default();
                shard.vectors.write_rows(&self.device, first - shard.first_id, rows, &mut edges)?;
            }
        }
        self.device.drained().await
    }

    /// Gives out ids whose vectors are in place; those that `is_live` refuses are deleted already.
    fn publish(&mut self, ids: Range<u32>, is_live: impl Fn(u32) -> bool) -> Result<(), Error> {
        self.live.resize(ids.end);
        ids.clone().filter(|&id| is_live(id)).for_each(|id| self.live.set(id, true));
        self.write_live(ids)
    }

    /// Tells the device which of these ids are live.
    fn write_live(&self, ids: Range<u32>) -> Result<(), Error> {
        let (first, end) = (ids.start as usize / 32, ids.end.div_ceil(32) as usize);
        match &self.bits {
            Some([live, _]) if first < end => self.device.write(live, first, &self.live.words()[first..end]),
            _ => Ok(()),
        }
    }

    /// Sees to it that the self-test has nothing against the search of a shape.
    async fn test(&self, shape: Shape) -> Result<(), Error> {
        let is_known = self.searches.lock().unwrap_or_else(PoisonError::into_inner).by_shape.contains_key(&shape);
        if is_known {
            return Ok(());
        }
        // Recorded aside: nothing is allocated, and other searches go on meanwhile.
        let record = || self.record(shape, &mut Workspace::default());
        record_tested(&self.device, record, |search| &search.recording).await.map(drop)
    }

    /// Submits a search for up to [`MAX_BATCH`] queries. Nothing else comes between its writes and its run.
    fn start(&self, queries: &[f32], shape: Shape, filter: Option<&Bitset>) -> Result<Pending, Error> {
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
        Shape { batch, k, is_filtered }: Shape,
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

/// The hits of a list of (bits of the score, id).
fn hits(list: &[u32]) -> Result<Vec<Hit>, Error> {
    listed(list)
        .map(|hit| match hit.score.is_finite() {
            true => Ok(hit),
            false => Err(wrong(format!("score of record {}", hit.id), "a finite number".into(), "none".into())),
        })
        .collect()
}

fn wrong(field: impl Into<String>, expected: String, found: String) -> Error {
    Error::Index { field: field.into(), expected, found }
}
