//! Retrieval with a mixture of logits (MoL), a learned similarity: Ding & Zhai 2024, "Retrieval with Learned
//! Similarities", arXiv:2407.15462.
//!
//! ```text
//! score(q, x) = sum over pairs p of pi_p(q, x) * l_p(q, x),   pi >= 0, their sum is 1
//! l_(n, m)    = < f_n(q) / |f_n(q)|, g_m(x) / |g_m(x)| > / temperature
//! pi          = softmax(z * sigmoid(z)),   z = A(q) * B(x) + C(l)
//! ```
//! Queries have N components f, items M components g, and all N M pairs count. Whatever depends on the item only is
//! computed when it is appended; [`kernels::mol`](fn@crate::kernels::mol) does the rest in one pass over the items.
//!
//! The gate's two layers cost two to eight times as much as the products. So an invocation handles one item and up to
//! four queries: it keeps products and gate sums in registers, and reads the gate's weights once for all four.
//! llvmpipe cannot index registers, so pairs are in up to four 4 x 4 matrices: 64 pairs for one query, or 16 for four.
//!
//! A score does not depend on the other items in a pass, so approximate and exact searches compute equal bits. The
//! exact search in two passes relies on that, and on a weighted mean exceeding the highest logit at most by rounding.

mod choose;
mod encoder;
mod lane;
mod top;
mod weights;

pub use choose::{MolChoice, MolTrial};
pub use weights::{Glu, MolConfig, MolLoader, MolWeights};

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::cpu::for_each_chunk;
use crate::device::Device;
use crate::dtype::WeightType;
use crate::error::Error;
use crate::kernels::{Linear, MAX_TOP, MolGate, MolGateWeights, Pairing};
use crate::matrix::Matrix;
use crate::recording::Workspace;
use crate::retrieval::Hit;
use crate::tensor::Tensor;
use crate::tuning::record_tested;
use encoder::MolEncoder;
use lane::{By, Lane};
use top::TopHits;

/// Items scored at a time.
const STRIP: usize = 1 << 16;
/// Queries per pass.
const BATCH: usize = 32;
/// Rows encoded at a time.
const ROWS: usize = 1 << 13;
/// Bytes of logits held at a time by the search over single pairs.
const LOGITS_BYTES: usize = 64 << 20;

/// How to find the best items. Names follow the paper and its code where these have the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MolSearch {
    /// Scores all items.
    BruteForce,
    /// Scores the union of each pair's best items by its logit.
    Naive {
        /// Items per pair.
        per_pair: usize,
    },
    /// Scores the best items by the dot product of the sum of the query's components with the mean of the item's.
    Avg {
        /// Items to score.
        candidates: usize,
    },
    /// Scores the union of the items of `Naive` and `Avg`.
    Comb {
        /// As in `Naive`.
        per_pair: usize,
        /// As in `Avg`.
        candidates: usize,
    },
    /// Scores the items with the highest maximum logit, the bound of `TwoPass` without its proof. Like `Naive`, it
    /// finds items with a single high logit, but in one pass and without storing each pair's logits.
    Highest {
        /// Items to score.
        candidates: usize,
    },
    /// Exact: no score exceeds its highest logit, so an item outside the candidates of `Avg` is scored only if one
    /// of its logits reaches the candidates' k-th best score.
    TwoPass {
        /// As in `Avg`.
        candidates: usize,
    },
    /// Scores the items whose 8-bit dot product of `Avg` passes a threshold. A sample determines the threshold, so
    /// nothing is sorted. Zhai et al. 2023, arXiv:2306.04039.
    HIndexer {
        /// Items that should pass.
        candidates: usize,
        /// Items in the sample.
        sample: usize,
    },
    /// The best items by the dot product of `Avg`, without the mixture.
    Mips,
}

/// Results of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct MolHits {
    /// The hits of each query, higher scores first, ties by lower id.
    pub hits: Vec<Vec<Hit>>,
    /// Items scored by the mixture for each query.
    pub scored: Vec<usize>,
}

/// Consecutive items.
struct ItemShard {
    first: u32,
    n_items: usize,
    /// `[M I, D]`.
    components: Matrix,
    /// `[I, G]`.
    gates: Tensor,
    /// `[I, D]`: means of the components.
    means: Matrix,
    /// `means` in 8 bits.
    coarse: Matrix,
}

/// A corpus of items scored by a mixture of logits.
pub struct Mol {
    device: Device,
    config: MolConfig,
    gate: MolGate,
    query_encoder: MolEncoder,
    item_encoder: MolEncoder,
    users: Vec<Vec<f32>>,
    storage: WeightType,
    shards: Vec<ItemShard>,
    n_items: usize,
    /// Norm of the longest component of an item.
    norm: f32,
    /// Lanes of finished searches, for reuse.
    lanes: Mutex<Vec<Lane>>,
}

impl Mol {
    /// An empty corpus on a device. `storage` is the type of the items' components: F32, F16 or Q8_0.
    ///
    /// # Errors
    /// [`Error::Option`] for another type; errors of [`Device::upload`].
    pub fn new(device: &Device, weights: &MolWeights, storage: WeightType) -> Result<Mol, Error> {
        if !matches!(storage, WeightType::F32 | WeightType::F16 | WeightType::Q8_0) {
            let expected = "F32, F16 or Q8_0".to_string();
            return Err(Error::Option { option: "storage", expected, found: storage.to_string() });
        }
        let config = weights.config.clone();
        let pair = &weights.pair_gate;
        let gate = MolGateWeights { w1: &pair.w1, b1: &pair.b1, w2: &pair.w2, b2: &pair.b2 };
        Ok(Mol {
            gate: MolGate::new(device, config.form, &gate)?,
            query_encoder: MolEncoder::new(device, &weights.query, config.glu, &weights.query_gate)?,
            item_encoder: MolEncoder::new(device, &weights.item, config.glu, &weights.item_gate)?,
            users: weights.users.clone(),
            device: device.clone(),
            config,
            storage,
            shards: Vec::new(),
            n_items: 0,
            norm: 0.0,
            lanes: Mutex::default(),
        })
    }

    /// Sizes and form of the mixture.
    pub fn config(&self) -> &MolConfig {
        &self.config
    }

    /// Whether some query components are user embeddings, so that searches need a user id per query.
    pub fn has_users(&self) -> bool {
        !self.users.is_empty()
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.n_items
    }

    /// Whether there are no items.
    pub fn is_empty(&self) -> bool {
        self.n_items == 0
    }

    /// Bytes of an item's components and gates, which each pass reads.
    pub fn item_bytes(&self) -> u64 {
        self.config.form.item_bytes(self.storage, self.config.dim)
    }

    /// Appends items, `[n, item_dim]`, and returns their ids. Appending many at once makes searches need fewer passes.
    ///
    /// # Errors
    /// [`Error::Option`] if `items` is not whole vectors or has a non-finite number; errors of [`Device::run`].
    pub async fn append(&mut self, items: &[f32]) -> Result<Range<u32>, Error> {
        let width = self.config.item_dim as usize;
        let n_new = whole_rows("items", items, width)?;
        let first = self.n_items as u32;
        if u32::try_from(self.n_items + n_new).is_err() {
            let found = format!("{}", self.n_items + n_new);
            return Err(Error::Option { option: "items", expected: "fewer than 2^32 in total".into(), found });
        }
        // Cached recordings lack the new items.
        self.lanes = Mutex::default();
        for strip in items.chunks(self.strip() * width) {
            let shard = self.shard(strip, width).await?;
            self.n_items += shard.n_items;
            self.shards.push(shard);
        }
        Ok(first..self.n_items as u32)
    }

    /// Items per shard, so that components and scores fit a binding.
    fn strip(&self) -> usize {
        let limit = self.device.limits().max_binding_bytes;
        let form = &self.config.form;
        let row = u64::from(self.config.dim.next_multiple_of(32)) * 4 * u64::from(form.item_components);
        let largest = row.max(4 * BATCH as u64).max(4 * u64::from(form.gate_columns()));
        // A matrix is split where its rounded-up end would not fit.
        usize::try_from((limit - 16) / largest).unwrap_or(STRIP).clamp(1, STRIP)
    }

    async fn shard(&mut self, items: &[f32], width: usize) -> Result<ItemShard, Error> {
        let MolConfig { form, dim, .. } = self.config;
        let (m, d, n_items) = (form.item_components as usize, dim as usize, items.len() / width);
        let mut components = vec![0.0; m * n_items * d];
        let mut means = vec![0.0f32; n_items * d];
        let mut gates = Vec::new();
        for (i, rows) in items.chunks(ROWS * width).enumerate() {
            let n_rows = rows.len() / width;
            let [mut encoded, gate] = self.item_encoder.encode(&self.device, rows, n_rows).await?;
            self.norm = self.config.normalise(&mut encoded).into_iter().fold(self.norm, f32::max);
            for (j, item) in encoded.chunks_exact(m * d).enumerate() {
                let at = i * ROWS + j;
                let mean = &mut means[at * d..][..d];
                for (component, row) in item.chunks_exact(d).enumerate() {
                    components[(component * n_items + at) * d..][..d].copy_from_slice(row);
                    mean.iter_mut().zip(row).for_each(|(mean, x)| *mean += x / m as f32);
                }
            }
            gates.extend(form.gate_rows(&gate));
        }
        let device = &self.device;
        let columns = form.gate_columns().max(4);
        gates.resize(n_items * columns as usize, 0.0);
        let matrix = |label: &str, weight, rows: usize, values: &[f32]| {
            let matrix = Matrix::declare(&device.target(), label, weight, rows as u32, dim)?;
            matrix.upload(device, &[&packed(weight, values, d)])?;
            Ok::<_, Error>(matrix)
        };
        Ok(ItemShard {
            first: self.n_items as u32,
            n_items,
            components: matrix("mol.components", self.storage, m * n_items, &components)?,
            gates: device.upload("mol.gates", &[n_items as u32, columns], &gates)?,
            means: matrix("mol.means", self.storage, n_items, &means)?,
            coarse: matrix("mol.coarse", WeightType::Q8_0, n_items, &means)?,
        })
    }

    /// The `k` best items for each query, or fewer if there are fewer. `queries`: `[n, query_dim]`; `users`: one id
    /// per query if the mixture has user embeddings.
    ///
    /// # Errors
    /// [`Error::Option`] if `queries` is not whole vectors or has a non-finite number, if `users` has another length
    /// than needed, or if `k` or a number of candidates is 0; [`Error::Operand`] if a score is non-finite; errors of
    /// [`Device::run`].
    pub async fn search(&self, queries: &[f32], users: &[u32], k: usize, how: MolSearch) -> Result<MolHits, Error> {
        let width = self.config.query_dim as usize;
        let n_queries = whole_rows("queries", queries, width)?;
        let n_users = if self.users.is_empty() { 0 } else { n_queries };
        let numbers = match how {
            MolSearch::BruteForce | MolSearch::Mips => [1, 1],
            MolSearch::Naive { per_pair } => [per_pair, 1],
            MolSearch::Avg { candidates } | MolSearch::Highest { candidates } | MolSearch::TwoPass { candidates } => {
                [candidates, 1]
            }
            MolSearch::Comb { per_pair, candidates } => [per_pair, candidates],
            MolSearch::HIndexer { candidates, sample } => [candidates, sample],
        };
        for (option, expected, found) in [("users", n_users, users.len()), ("k", k.max(1), k)] {
            if expected != found {
                return Err(Error::Option { option, expected: format!("{expected}"), found: format!("{found}") });
            }
        }
        if numbers.contains(&0) {
            let found = format!("{how:?}");
            return Err(Error::Option { option: "search", expected: "numbers above 0".into(), found });
        }
        let mut found = MolHits { hits: Vec::new(), scored: Vec::new() };
        for (i, rows) in queries.chunks(BATCH * width).enumerate() {
            let n = rows.len() / width;
            let users = if n_users == 0 { users } else { &users[i * BATCH..][..n] };
            let mut lane = self.take_lane(Lane::size_for(n)).await?;
            let norms = self.encode(&lane, rows, users, n).await?;
            let mut batch = Batch { mol: self, lane: &mut lane, norms };
            let MolHits { hits, scored } = batch.search(k, how).await?;
            found.hits.extend(hits);
            found.scored.extend(scored);
            self.lanes().push(lane);
        }
        Ok(found)
    }

    fn lanes(&self) -> std::sync::MutexGuard<'_, Vec<Lane>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn take_lane(&self, batch: u32) -> Result<Lane, Error> {
        let kept = {
            let mut lanes = self.lanes();
            lanes.iter().position(|lane| lane.batch == batch).map(|at| lanes.swap_remove(at))
        };
        match kept {
            Some(lane) => Ok(lane),
            None => Lane::new(self, batch).await,
        }
    }

    /// Encodes queries into a lane and returns the norm of each query's longest component.
    async fn encode(&self, lane: &Lane, rows: &[f32], users: &[u32], n: usize) -> Result<Vec<f32>, Error> {
        let MolConfig { form, dim, temperature, .. } = self.config;
        let [encoded, gates] = lane.encode(self, rows).await?;
        let (d, batch) = (dim as usize, lane.batch as usize);
        let mut components = Vec::with_capacity(batch * form.query_components as usize * d);
        for (query, encoded) in encoded.chunks_exact(encoded.len() / batch).enumerate() {
            components.extend(encoded);
            for table in &self.users {
                // Row 0 belongs to no user.
                let row = users.get(query).map_or(0, |&user| user as usize % (table.len() / d - 1) + 1);
                components.extend(&table[row * d..][..d]);
            }
        }
        let mut norms = self.config.normalise(&mut components);
        components.iter_mut().for_each(|x| *x /= temperature);
        norms.iter_mut().for_each(|norm| *norm /= temperature);
        let per_query = form.query_components as usize;
        let mut sums = vec![0.0; batch * d];
        for (sum, query) in sums.chunks_exact_mut(d).zip(components.chunks_exact(per_query * d)) {
            query.chunks_exact(d).for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
        }
        let inputs = lane.inputs();
        let mut gates = form.gate_rows(&gates);
        gates.resize(inputs.gates.len(), 0.0);
        self.device.write(&inputs.components, 0, &components)?;
        self.device.write(&inputs.gates, 0, &gates)?;
        self.device.write(&inputs.sums, 0, &sums)?;
        let longest = |norms: &[f32]| norms.iter().copied().fold(0.0, f32::max);
        Ok(norms.chunks_exact(per_query).map(longest).take(n).collect())
    }

    /// Maximum excess of a computed score over the computed bound. Each logit is a sum of D products and off by at
    /// most D + 2 roundings of the product of its norms; weights and weighted logits are sums of P terms each.
    /// Doubled for safety.
    fn margin(&self, query_norm: f32) -> f32 {
        let n_roundings = self.config.dim + 2 * self.config.form.n_pairs() + 16;
        n_roundings as f32 * f32::EPSILON * query_norm * self.norm
    }
}

/// A search for a batch of queries.
struct Batch<'a> {
    mol: &'a Mol,
    lane: &'a mut Lane,
    /// Norm of each query's longest component.
    norms: Vec<f32>,
}

impl Batch<'_> {
    async fn search(&mut self, k: usize, how: MolSearch) -> Result<MolHits, Error> {
        let n_queries = self.norms.len();
        match how {
            MolSearch::BruteForce => {
                let hits = finite(self.best(By::Mixture, k).await?)?;
                Ok(MolHits { hits, scored: vec![self.mol.n_items; n_queries] })
            }
            MolSearch::Mips => Ok(MolHits { hits: finite(self.best(By::Mean, k).await?)?, scored: vec![0; n_queries] }),
            MolSearch::Avg { candidates } => {
                let candidates = self.candidates(By::Mean, candidates).await?;
                self.rescore(k, candidates).await
            }
            MolSearch::Highest { candidates } => {
                let candidates = self.candidates(By::Bound, candidates).await?;
                self.rescore(k, candidates).await
            }
            MolSearch::Naive { per_pair } => {
                let candidates = self.naive(per_pair).await?;
                self.rescore(k, candidates).await
            }
            MolSearch::Comb { per_pair, candidates } => {
                let mut union = self.naive(per_pair).await?;
                let others = self.candidates(By::Mean, candidates).await?;
                union.iter_mut().zip(others).for_each(|(union, others)| union.extend(others));
                self.rescore(k, union).await
            }
            MolSearch::HIndexer { candidates, sample } => {
                let candidates = self.above_threshold(candidates, sample).await?;
                self.rescore(k, candidates).await
            }
            MolSearch::TwoPass { candidates } => {
                let candidates = self.candidates(By::Mean, candidates.max(k)).await?;
                let first = self.rescore(k, candidates).await?;
                let bars: Vec<f32> = (first.hits.iter().zip(&self.norms))
                    .map(|(hits, norm)| match hits.get(k - 1) {
                        Some(last) => last.score - self.mol.margin(*norm),
                        None => f32::MIN,
                    })
                    .collect();
                let mut reach: Vec<(f32, Vec<u32>)> = bars.into_iter().map(|bar| (bar, Vec::new())).collect();
                self.scan(By::Bound, &mut reach, |(bar, reach), first, bounds| {
                    reach.extend((first..).zip(bounds).filter(|(_, bound)| *bound >= bar).map(|(id, _)| id));
                })
                .await?;
                let mut second = self.rescore(k, reach.into_iter().map(|(_, reach)| reach).collect()).await?;
                second.scored.iter_mut().zip(first.scored).for_each(|(all, first)| *all += first);
                Ok(second)
            }
        }
    }

    /// The best items of each query, in order. The device selects them if `n` is small enough.
    async fn best(&mut self, by: By, n: usize) -> Result<Vec<Vec<Hit>>, Error> {
        if self.mol.is_empty() {
            return Ok(vec![Vec::new(); self.norms.len()]);
        }
        if n <= MAX_TOP as usize {
            let mut best = self.lane.best(self.mol, by, n).await?;
            best.truncate(self.norms.len());
            return Ok(best);
        }
        Ok(self.most(by, n).await?.into_iter().map(TopHits::into_hits).collect())
    }

    /// The best items of each query, unordered.
    async fn candidates(&mut self, by: By, n: usize) -> Result<Vec<Vec<u32>>, Error> {
        if n <= MAX_TOP as usize {
            return Ok(ids(self.best(by, n).await?));
        }
        Ok(self.most(by, n).await?.into_iter().map(TopHits::into_ids).collect())
    }

    /// The best items of each query, selected by the host.
    async fn most(&mut self, by: By, n: usize) -> Result<Vec<TopHits>, Error> {
        let mut tops = vec![TopHits::new(n); self.norms.len()];
        self.scan(by, &mut tops, TopHits::extend).await?;
        Ok(tops)
    }

    /// Scores all items. `take` gets each query's own state, the first item's id and the scores.
    async fn scan<T: Send>(
        &mut self,
        by: By,
        each: &mut [T],
        take: impl Fn(&mut T, u32, &[f32]) + Sync + Send,
    ) -> Result<(), Error> {
        for (i, shard) in self.mol.shards.iter().enumerate() {
            // In a browser, threads cannot share values with tensors.
            let (first, n_items) = (shard.first, shard.n_items);
            let scores = self.lane.scores(self.mol, by, i).await?;
            for_each_chunk(each, 1, scores.len(), |query, each| {
                let scores = &scores[query * n_items..][..n_items];
                each.iter_mut().for_each(|each| take(each, first, scores));
            });
        }
        Ok(())
    }

    /// Items whose coarse dot product passes the threshold that a sample gives for `n` candidates.
    async fn above_threshold(&mut self, n: usize, sample: usize) -> Result<Vec<Vec<u32>>, Error> {
        let mut scores = vec![Vec::with_capacity(self.mol.n_items); self.norms.len()];
        self.scan(By::Coarse, &mut scores, |scores, _, of_shard| scores.extend_from_slice(of_shard)).await?;
        let select = |scores: Vec<f32>| {
            // Multiples of a large odd number spread the sample over items that were appended together.
            let draw = |i: usize| scores[(i as u64 * 0x9e37_79b1 % scores.len() as u64) as usize];
            let n_drawn = sample.min(scores.len());
            let mut drawn: Vec<f32> = (0..n_drawn).map(draw).collect();
            let rank = (n * n_drawn).div_ceil(scores.len().max(1)).min(n_drawn);
            let bar = match rank.checked_sub(1) {
                Some(last) if rank < n_drawn => *drawn.select_nth_unstable_by(last, |a, b| b.total_cmp(a)).1,
                _ => f32::MIN,
            };
            let above = scores.iter().enumerate().filter(|(_, score)| **score >= bar);
            above.map(|(id, _)| id as u32).collect()
        };
        Ok(scores.into_iter().map(select).collect())
    }

    /// The union of each pair's best items by its logit.
    async fn naive(&mut self, per_pair: usize) -> Result<Vec<Vec<u32>>, Error> {
        let MolConfig { form, dim, .. } = self.mol.config;
        let (device, n_queries) = (&self.mol.device, self.norms.len());
        let (n, m) = (form.query_components as usize, form.item_components as usize);
        let is_pair = |i: usize, j: usize| form.pairing == Pairing::Cross || i == j;
        let components: Vec<f32> = device.read(&self.lane.inputs().components).await?;
        let mut tops = vec![TopHits::new(per_pair); n_queries * n * m];
        for shard in &self.mol.shards {
            let row_bytes = 4 * m * shard.n_items;
            let n_rows = (LOGITS_BYTES / row_bytes).clamp(1, n_queries * n);
            let rows = &components[..n_queries * n * dim as usize];
            for (i, rows) in rows.chunks(n_rows * dim as usize).enumerate() {
                let x = device.upload("mol.rows", &[(rows.len() / dim as usize) as u32, dim], rows)?;
                let record = || {
                    let mut rec = device.recorder();
                    let y = rec.temporary("logits", &[x.shape()[0], shard.components.rows()])?;
                    Linear::new(&shard.components).record(&mut rec, &x, &y)?;
                    Ok((rec.finish(&mut Workspace::default()), y))
                };
                let (recording, y) = record_tested(device, record, |(recording, _)| recording).await?;
                let logits: Vec<f32> = bytemuck::cast_vec(device.run_and_read(&recording, &y)?.await?);
                for (row, logits) in logits.chunks_exact(m * shard.n_items).enumerate() {
                    let row = i * n_rows + row;
                    for (j, logits) in
                        logits.chunks_exact(shard.n_items).enumerate().filter(|&(j, _)| is_pair(row % n, j))
                    {
                        tops[row * m + j].extend(shard.first, logits);
                    }
                }
            }
        }
        let mut tops = tops.into_iter().map(TopHits::into_ids);
        Ok((0..n_queries).map(|_| tops.by_ref().take(n * m).flatten().collect()).collect())
    }

    /// Scores distinct candidates and keeps the `k` best.
    async fn rescore(&mut self, k: usize, mut candidates: Vec<Vec<u32>>) -> Result<MolHits, Error> {
        /// Minimum candidates per pass. Their number is rounded up, so that few sizes are recorded.
        const FEWEST: usize = 64;
        for ids in &mut candidates {
            ids.sort_unstable();
            ids.dedup();
        }
        let mut tops = vec![TopHits::new(k); candidates.len()];
        for (i, shard) in self.mol.shards.iter().enumerate() {
            let of_shard: Vec<&[u32]> = (candidates.iter())
                .map(|ids| {
                    let at = |id: u32| ids.partition_point(|&other| other < id);
                    &ids[at(shard.first)..at(shard.first.saturating_add(shard.n_items as u32))]
                })
                .collect();
            let most = of_shard.iter().map(|ids| ids.len()).max().unwrap_or_default();
            for first in (0..most).step_by(STRIP) {
                let step = (most.next_power_of_two() / 8).max(FEWEST);
                let columns = (most - first).next_multiple_of(step).min(STRIP);
                // Shorter lists are padded with an invalid item number.
                let mut local = vec![u32::MAX; self.lane.batch as usize * columns];
                let parts: Vec<&[u32]> =
                    of_shard.iter().map(|ids| &ids[first.min(ids.len())..(first + columns).min(ids.len())]).collect();
                for (to, from) in local.chunks_exact_mut(columns).zip(&parts) {
                    to.iter_mut().zip(*from).for_each(|(to, id)| *to = id - shard.first);
                }
                let scores = self.lane.scores_of(self.mol, i, &local).await?;
                for ((top, ids), scores) in tops.iter_mut().zip(&parts).zip(scores.chunks_exact(columns)) {
                    ids.iter().zip(scores).for_each(|(&id, &score)| top.push(id, score));
                }
            }
        }
        let hits = finite(tops.into_iter().map(TopHits::into_hits).collect())?;
        Ok(MolHits { hits, scored: candidates.iter().map(Vec::len).collect() })
    }
}

fn ids(hits: Vec<Vec<Hit>>) -> Vec<Vec<u32>> {
    hits.into_iter().map(|hits| hits.iter().map(|hit| hit.id).collect()).collect()
}

/// The hits of each query; a non-finite score sorts first and is refused.
fn finite(hits: Vec<Vec<Hit>>) -> Result<Vec<Vec<Hit>>, Error> {
    match hits.iter().flatten().find(|hit| !hit.score.is_finite()) {
        Some(hit) => Err(Error::Operand {
            kernel: "mol",
            operand: "scores",
            expected: "finite numbers".into(),
            found: format!("{} for item {}", hit.score, hit.id),
        }),
        None => Ok(hits),
    }
}

/// The number of vectors in `values`, all finite.
fn whole_rows(option: &'static str, values: &[f32], width: usize) -> Result<usize, Error> {
    if values.is_empty() || !values.len().is_multiple_of(width) {
        let (expected, found) = (format!("vectors of {width} numbers"), format!("{} numbers", values.len()));
        return Err(Error::Option { option, expected, found });
    }
    match values.iter().position(|x| !x.is_finite()) {
        Some(at) => {
            let found = format!("{} in vector {}", values[at], at / width);
            Err(Error::Option { option, expected: "finite numbers".into(), found })
        }
        None => Ok(values.len() / width),
    }
}

/// Rows of `dim` numbers in the weight type's file layout.
fn packed(weight: WeightType, values: &[f32], dim: usize) -> Vec<u8> {
    use half::f16;
    match weight {
        WeightType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        WeightType::Q8_0 => {
            let mut bytes = Vec::with_capacity(values.len() / 32 * 34);
            for block in values.chunks_exact(dim).flat_map(|row| row.chunks(32)) {
                let scale = f16::from_f32(block.iter().fold(0.0f32, |top, x| top.max(x.abs())) / 127.0);
                let inverse = if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
                let quant = |i| block.get(i).map_or(0.0, |x: &f32| (x * inverse).round().clamp(-127.0, 127.0)) as i8;
                bytes.extend(scale.to_le_bytes());
                bytes.extend((0..32).map(|i| quant(i) as u8));
            }
            bytes
        }
        _ => bytemuck::cast_slice(values).to_vec(),
    }
}
