//! Exact search by late interaction (Khattab & Zaharia 2020, arXiv:2004.12832): a [`DocumentIndex`] holds a vector for
//! each token of its documents.
//!
//! ```
//! use tilewright::Device;
//! use tilewright::retrieval::index::{DocumentIndex, IndexOptions};
//!
//! # pollster::block_on(async {
//! let device = Device::auto().await;
//! let mut index = DocumentIndex::new(&device, 2, IndexOptions::default())?;
//! // Documents of two tokens and of one.
//! index.append(&[1.0, 0.0, 0.0, 1.0, /* */ 0.6, 0.8], &[2, 1]).await?;
//! let hits = index.search(&[1.0, 0.0, 0.0, 1.0], 2, None).await?;
//! assert_eq!([hits[0].id, hits[1].id], [0, 1]);
//! assert!((hits[0].score - 2.0).abs() < 1e-5 && (hits[1].score - 1.4).abs() < 1e-5);
//! # Ok::<(), tilewright::Error>(())
//! # }).unwrap();
//! ```
//!
//! Tokens are the vectors of an [`Index`], those of a document in one shard. A search multiplies the query's tokens
//! with a shard at a time, as [`Index`] does, and `max_sim` makes the documents' scores of that.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Bitset, Index, IndexOptions, PIECE_BYTES, RecordedSearch, Shard, hits, wrong};
use crate::device::{Device, Pending};
use crate::dtype::DType;
use crate::error::Error;
use crate::file_row_bytes;
use crate::kernels::{Linear, MAX_TOP, TopStrip, max_sim, merge_top, select_top, top_splits};
use crate::recording::Workspace;
use crate::retrieval::Hit;
use crate::tensor::{Role, Tensor};
use crate::tuning::record_tested;

/// Documents of many vectors each on a device, searchable for those that answer a query best: for each of its tokens
/// the highest similarity with any token of the document, summed up.
///
/// Ids count the documents in the order of appending and are never reused.
#[derive(Debug)]
pub struct DocumentIndex {
    /// The documents' tokens, in order. Those that would cross the end of a shard are in the next one.
    tokens: Index,
    /// First row of each document in its shard, and the one behind its last.
    spans: Vec<[u32; 2]>,
    /// The first document of each shard.
    firsts: Vec<u32>,
    /// One bit per id: whether the document is not deleted.
    live: Bitset,
    searches: Mutex<DocumentSearches>,
}

/// What searches need on the device. Appending and deleting make it out of date.
#[derive(Default)]
struct DocumentSearches {
    workspace: Workspace,
    tables: Option<Tables>,
    by_shape: HashMap<DocumentShape, RecordedSearch>,
}

impl std::fmt::Debug for DocumentSearches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DocumentSearches").field("len", &self.by_shape.len()).finish()
    }
}

#[derive(Clone)]
struct Tables {
    /// Spans of each shard's documents, `[I, 2]`.
    spans: Vec<Tensor>,
    /// Live documents, and those that pass a filter: one bit each.
    bits: [Tensor; 2],
    /// The query's rows, `[1, 2]`.
    query_span: Tensor,
}

/// Rows of the query and hits, both rounded up.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct DocumentShape {
    n_rows: u32,
    k: u32,
    is_filtered: bool,
}

impl DocumentIndex {
    /// An empty index for tokens' vectors of `dims` numbers.
    ///
    /// # Errors
    /// As [`Index::new`].
    pub fn new(device: &Device, dims: u32, options: IndexOptions) -> Result<DocumentIndex, Error> {
        let (tokens, searches) = (Index::new(device, dims, options)?, Mutex::default());
        Ok(DocumentIndex { tokens, spans: Vec::new(), firsts: Vec::new(), live: Bitset::new(0), searches })
    }

    /// Dimensions of a token's vector.
    pub fn dims(&self) -> u32 {
        self.tokens.dims()
    }

    /// The index's options.
    pub fn options(&self) -> &IndexOptions {
        self.tokens.options()
    }

    /// Documents that are not deleted.
    pub fn len(&self) -> u32 {
        self.live.count()
    }

    /// Whether all documents are deleted or none was appended.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ids assigned so far, which is the next document's id.
    pub fn n_ids(&self) -> u32 {
        self.live.len()
    }

    /// Bytes allocated for vectors on the device, including unused capacity.
    pub fn size_bytes(&self) -> u64 {
        self.tokens.size_bytes()
    }

    /// Appends documents whose tokens' vectors are stored in sequence, `lengths` of each, and returns their ids. The
    /// next search uploads a table of all documents, so append many at a time.
    ///
    /// # Errors
    /// [`Error::Index`] naming the document, counted from 0, if it is empty or longer than a shard; if the lengths do not add up to
    /// the vectors; otherwise as [`Index::append`], naming the token. On an error, no document is added.
    pub async fn append(&mut self, vectors: &[f32], lengths: &[u32]) -> Result<Range<u32>, Error> {
        let n = self.tokens.check(vectors, "token")?;
        let most = self.tokens.most_rows();
        if let Some((i, len)) = lengths.iter().enumerate().find(|(_, len)| !(1..=most).contains(*len)) {
            return Err(wrong(format!("document {i}"), format!("1 to {most} tokens"), len.to_string()));
        }
        if lengths.iter().map(|&len| u64::from(len)).sum::<u64>() != u64::from(n) {
            let sum: u64 = lengths.iter().map(|&len| u64::from(len)).sum();
            return Err(wrong("lengths", format!("{n} tokens together"), sum.to_string()));
        }
        let n_rows = self.tokens.n_ids();
        let rows = lengths.iter().map(|&len| self.place(len)).collect::<Result<Vec<u32>, Error>>();
        let rows = rows.inspect_err(|_| self.tokens.live.resize(n_rows))?;
        self.write(vectors, lengths, &rows).await?;
        let first_id = self.n_ids();
        for (&row, &len) in rows.iter().zip(lengths) {
            let shard = self.tokens.shards.partition_point(|shard| shard.first_id <= row) - 1;
            let within = row - self.tokens.shards[shard].first_id;
            self.firsts.resize((shard + 1).max(self.firsts.len()), self.spans.len() as u32);
            self.spans.push([within, within + len]);
        }
        let end = first_id + lengths.len() as u32;
        self.live.resize(end);
        (first_id..end).for_each(|id| self.live.set(id, true));
        self.searches = Mutex::default();
        Ok(first_id..end)
    }

    /// Takes `len` rows of one shard, and returns the first.
    fn place(&mut self, len: u32) -> Result<u32, Error> {
        let mut row = self.tokens.n_ids();
        loop {
            let end = |shard: &Shard| shard.first_id + shard.vectors.rows();
            match self.tokens.shards.iter().map(end).find(|&end| row < end) {
                Some(end) if len <= end - row => break,
                Some(end) => row = end,
                None => {
                    self.tokens.live.resize(row);
                    self.tokens.reserve(len)?;
                }
            }
        }
        self.tokens.live.resize(row + len);
        Ok(row)
    }

    /// Writes the documents' vectors from these rows on.
    async fn write(&self, vectors: &[f32], lengths: &[u32], rows: &[u32]) -> Result<(), Error> {
        let index = &self.tokens;
        let row_bytes = file_row_bytes(index.options.storage.weight(), index.options.storage.cols(index.dims) as usize);
        let (mut bytes, mut first, mut rest) = (Vec::new(), 0, vectors);
        for (&row, &len) in rows.iter().zip(lengths) {
            if row != first + (bytes.len() / row_bytes) as u32 || bytes.len() >= PIECE_BYTES {
                index.write_rows(first, &bytes).await?;
                bytes.clear();
                first = row;
            }
            let (document, others) = rest.split_at(len as usize * index.dims as usize);
            document.chunks_exact(index.dims as usize).for_each(|token| index.pack(token, &mut bytes));
            rest = others;
        }
        index.write_rows(first, &bytes).await
    }

    /// Deletes documents. Returns how many of them were not deleted before.
    ///
    /// # Errors
    /// [`Error::Index`] if an id was never assigned; then nothing is deleted.
    pub fn delete(&mut self, ids: &[u32]) -> Result<u32, Error> {
        if let Some(id) = ids.iter().find(|&&id| id >= self.n_ids()) {
            return Err(wrong("id", format!("one below {}", self.n_ids()), id.to_string()));
        }
        let before = self.len();
        ids.iter().for_each(|&id| self.live.set(id, false));
        self.searches = Mutex::default();
        Ok(before - self.len())
    }

    /// The best `k` documents for a query of the tokens' vectors in `query`: higher scores first, ties by lower id.
    /// The list is shorter if fewer documents are live and pass the filter, which has one bit per id.
    ///
    /// # Errors
    /// As [`Index::search`], naming the token.
    pub async fn search(&self, query: &[f32], k: usize, filter: Option<&Bitset>) -> Result<Vec<Hit>, Error> {
        let n_rows = self.tokens.check(query, "query token")?;
        if n_rows == 0 {
            return Err(wrong("query", "1 token or more".into(), "none".into()));
        }
        if !(1..=MAX_TOP as usize).contains(&k) {
            return Err(Error::Option { option: "k", expected: format!("1 to {MAX_TOP}"), found: k.to_string() });
        }
        if let Some(filter) = filter.filter(|filter| filter.len() != self.n_ids()) {
            return Err(wrong("filter", format!("{} bits", self.n_ids()), filter.len().to_string()));
        }
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let shape = DocumentShape {
            n_rows: n_rows.next_power_of_two().max(8),
            k: (k as u32).next_power_of_two().max(8),
            is_filtered: filter.is_some(),
        };
        if !self.searches().by_shape.contains_key(&shape) {
            let tables = self.tables(&mut self.searches())?;
            let record = || self.record(shape, &tables, &mut Workspace::default());
            record_tested(&self.tokens.device, record, |search| &search.recording).await?;
        }
        let words = self.start(query, n_rows, shape, filter)?.await?;
        hits(&words[..2 * k])
    }

    fn searches(&self) -> MutexGuard<'_, DocumentSearches> {
        self.searches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The tables on the device.
    fn tables(&self, searches: &mut DocumentSearches) -> Result<Tables, Error> {
        if let Some(tables) = &searches.tables {
            return Ok(tables.clone());
        }
        let device = &self.tokens.device;
        let table = |label, shape: &[u32], words: &[u32]| {
            let tensor = Tensor::declare(label, Role::Weights, shape, DType::U32)?;
            device.write(&tensor, 0, words)?;
            Ok::<_, Error>(tensor)
        };
        let spans = self.documents().map(|(_, documents)| {
            let spans = &self.spans[documents.start as usize..documents.end as usize];
            table("document spans", &[spans.len() as u32, 2], spans.as_flattened())
        });
        let spans = spans.collect::<Result<_, _>>()?;
        let bits = |label| table(label, &[self.live.words().len() as u32], self.live.words());
        let tables = Tables {
            spans,
            bits: [bits("live")?, bits("filter")?],
            query_span: table("query span", &[1, 2], &[0; 2])?,
        };
        Ok(searches.tables.insert(tables).clone())
    }

    /// The shards that have documents, with their ids.
    fn documents(&self) -> impl Iterator<Item = (&Shard, Range<u32>)> {
        let ends = self.firsts.iter().skip(1).copied().chain([self.n_ids()]);
        let shards = self.tokens.shards.iter().zip(self.firsts.iter().zip(ends));
        shards.map(|(shard, (&first, end))| (shard, first..end)).filter(|(_, documents)| !documents.is_empty())
    }

    /// Submits a search, under a lock from its first write to its run.
    fn start(
        &self,
        query: &[f32],
        n_rows: u32,
        shape: DocumentShape,
        filter: Option<&Bitset>,
    ) -> Result<Pending, Error> {
        let Index { device, dims, options, .. } = &self.tokens;
        let mut searches = self.searches();
        let tables = self.tables(&mut searches)?;
        let DocumentSearches { workspace, by_shape, .. } = &mut *searches;
        let search = match by_shape.entry(shape) {
            Entry::Occupied(search) => search.into_mut(),
            Entry::Vacant(place) => place.insert(self.record(shape, &tables, workspace)?),
        };
        let cols = options.storage.cols(*dims) as usize;
        let mut rows = vec![0.0; shape.n_rows as usize * cols];
        for (token, row) in query.chunks_exact(*dims as usize).zip(rows.chunks_exact_mut(cols)) {
            self.tokens.put(token, &mut row[..*dims as usize]);
        }
        device.write(&search.queries, 0, &rows)?;
        device.write(&tables.query_span, 0, &[0, n_rows])?;
        if let Some(filter) = filter {
            let words = self.live.words().iter().zip(filter.words()).map(|(live, filter)| live & filter);
            device.write(&tables.bits[1], 0, &words.collect::<Vec<u32>>())?;
        }
        device.run_and_read(&search.recording, &search.best)
    }

    fn record(
        &self,
        DocumentShape { n_rows, k, is_filtered }: DocumentShape,
        tables: &Tables,
        workspace: &mut Workspace,
    ) -> Result<RecordedSearch, Error> {
        let Index { device, dims, options, .. } = &self.tokens;
        let queries =
            Tensor::declare("queries", Role::Activations, &[n_rows, options.storage.cols(*dims)], DType::F32)?;
        let best = Tensor::declare("best", Role::Activations, &[1, k, 2], DType::U32)?;
        let mut rec = device.recorder();
        let scores = rec.temporary("scores", &[1, self.n_ids()])?;
        for ((shard, documents), spans) in self.documents().zip(&tables.spans) {
            let similarities = rec.temporary("similarities", &[n_rows, shard.vectors.rows()])?;
            Linear::new(&shard.vectors).record(&mut rec, &queries, &similarities)?;
            max_sim(&mut rec, &tables.query_span, spans, &similarities, documents.start, &scores)?;
        }
        let lists = Tensor::temporary("lists", &[1, top_splits(1, self.n_ids()), k, 2], DType::U32)?;
        let allowed = Some(&tables.bits[usize::from(is_filtered)]);
        select_top(&mut rec, &scores, &TopStrip { first_id: 0, begins: true, allowed }, &lists)?;
        merge_top(&mut rec, &lists, &best)?;
        Ok(RecordedSearch { recording: rec.finish(workspace), queries, best })
    }
}
