//! Retrieval by a mixture of logits (MoL), a similarity that is learned: Ding & Zhai 2024, "Retrieval with Learned
//! Similarities", arXiv:2407.15462.
//!
//! ```text
//! score(q, x) = sum over pairs p of pi_p(q, x) * l_p(q, x),   pi >= 0, their sum is 1
//! l_(n, m)    = < f_n(q) / |f_n(q)|, g_m(x) / |g_m(x)| > / temperature
//! pi          = softmax(z * sigmoid(z)),   z = A(q) * B(x) + C(l)
//! ```
//! Queries have N components f, items M components g, and all N M pairs count. What depends on the item alone is computed
//! when it is appended; [`kernels::mol`](fn@crate::kernels::mol) does the rest in one pass over the items.

mod top;
mod weights;

pub use weights::{Glu, MolConfig, MolWeights};

use std::ops::Range;

use crate::device::Device;
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::kernels::{self, Gelu, Linear, MolGate, MolGateWeights, MolOperands, MolScores, Pairing};
use crate::matrix::Matrix;
use crate::recording::{Recorder, Workspace};
use crate::retrieval::Hit;
use crate::tensor::{Role, Tensor};
use top::Top;
use weights::{Gate, Layer, Projection};

/// Items whose scores exist at a time.
const STRIP: usize = 1 << 16;
/// Queries of a pass.
const BATCH: usize = 32;
/// Rows that are encoded at a time.
const ROWS: usize = 1 << 13;
/// Bytes of logits that exist at a time where they are looked at pair by pair.
const LOGITS_BYTES: usize = 64 << 20;

/// How to find the best items. Names are those of the paper and its code, where they have the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MolSearch {
    /// Scores all items.
    BruteForce,
    /// Scores the union of the best items by each pair's logit alone.
    Naive {
        /// Items of each pair.
        per_pair: usize,
    },
    /// Scores the best items by the dot product of the sum of the query's components with the mean of the item's.
    Avg {
        /// Items that are scored.
        candidates: usize,
    },
    /// Scores the union of both.
    Comb {
        /// As in `Naive`.
        per_pair: usize,
        /// As in `Avg`.
        candidates: usize,
    },
    /// Scores the items whose highest logit is highest: what `TwoPass` bounds scores by, without its proof. Like `Naive` it finds
    /// items of which a single pair knows, in one pass and without the logits of each pair in memory.
    Highest {
        /// Items that are scored.
        candidates: usize,
    },
    /// Exact: no score exceeds its highest logit, so what is not among the candidates of `Avg` need only be scored where a
    /// logit reaches the k-th best score of these.
    TwoPass {
        /// As in `Avg`.
        candidates: usize,
    },
    /// Scores what passes a threshold by the product of `Avg` in 8 bits. A sample tells the threshold, so that nothing is
    /// sorted. Zhai et al. 2023, arXiv:2306.04039.
    HIndexer {
        /// Items that should pass.
        candidates: usize,
        /// Items in the sample.
        sample: usize,
    },
    /// The best items by the dot product of `Avg`; nothing is scored by the mixture.
    Mips,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct MolHits {
    /// For each query, the best score first, among equals the lowest id.
    pub hits: Vec<Vec<Hit>>,
    /// For each query, how many items went through the mixture.
    pub scored: Vec<usize>,
}

/// A layer on a device.
struct Dense {
    w: Matrix,
    bias: Tensor,
}

impl Dense {
    fn new(device: &Device, label: &str, layer: &Layer) -> Result<Dense, Error> {
        Ok(Dense {
            w: Matrix::from_f32(device, label, layer.n_out, layer.n_in, &layer.w)?,
            bias: device.upload(label, &[layer.n_out], &layer.b)?,
        })
    }

    fn record(&self, rec: &mut Recorder, x: &Tensor) -> Result<Tensor, Error> {
        let y = Tensor::declare("y", Role::Activations, &[x.shape()[0], self.w.rows()], DType::F32)?;
        Linear { bias: Some(&self.bias), ..Linear::new(&self.w) }.record(rec, x, &y)?;
        Ok(y)
    }

    /// The layer with its SiLU: `silu(z)` is `swiglu` of z and ones, which a layer of twice the width makes.
    fn record_silu(&self, rec: &mut Recorder, x: &Tensor) -> Result<Tensor, Error> {
        let both = self.record(rec, x)?;
        let y = Tensor::declare("y", Role::Activations, &[x.shape()[0], self.w.rows() / 2], DType::F32)?;
        kernels::swiglu(rec, &both, &y)?;
        Ok(y)
    }
}

enum Activated {
    Gelu(Dense),
    /// Of twice the width, see [`Dense::record_silu`].
    Silu(Dense),
}

enum DenseGate {
    None,
    Linear(Dense),
    /// The first of twice the width.
    Perceptron(Dense, Dense),
}

/// From vectors to components and gates.
struct Encoder {
    glu: Option<(Activated, Dense)>,
    out: Dense,
    gate: DenseGate,
}

impl Encoder {
    fn new(device: &Device, projection: &Projection, glu: Glu, gate: &Gate) -> Result<Encoder, Error> {
        let glu = match &projection.glu {
            None => None,
            Some([gate, up]) => {
                let gate = match glu {
                    Glu::GeGlu => Activated::Gelu(Dense::new(device, "mol.glu", gate)?),
                    Glu::SwiGlu => Activated::Silu(Dense::new(device, "mol.glu", &gate.with_ones())?),
                };
                Some((gate, Dense::new(device, "mol.up", up)?))
            }
        };
        let out = Dense::new(device, "mol.out", &projection.out)?;
        let gate = match gate {
            Gate::None => DenseGate::None,
            Gate::Linear(layer) => DenseGate::Linear(Dense::new(device, "mol.gate", layer)?),
            Gate::Perceptron(first, second) => DenseGate::Perceptron(
                Dense::new(device, "mol.gate.1", &first.with_ones())?,
                Dense::new(device, "mol.gate.2", second)?,
            ),
        };
        Ok(Encoder { glu, out, gate })
    }

    /// Components and gates of rows, one after the other; no gates if there is no such part.
    async fn encode(&self, device: &Device, x: &[f32], n_rows: usize) -> Result<[Vec<f32>; 2], Error> {
        let x = device.upload("x", &[n_rows as u32, (x.len() / n_rows) as u32], x)?;
        let mut rec = Recorder::new(device);
        let gates = match &self.gate {
            DenseGate::None => None,
            DenseGate::Linear(layer) => Some(layer.record(&mut rec, &x)?),
            DenseGate::Perceptron(first, second) => {
                let hidden = first.record_silu(&mut rec, &x)?;
                Some(second.record(&mut rec, &hidden)?)
            }
        };
        let glu = match &self.glu {
            None => None,
            Some((gate, up)) => {
                let gate = match gate {
                    Activated::Silu(layer) => layer.record_silu(&mut rec, &x)?,
                    Activated::Gelu(layer) => {
                        let z = layer.record(&mut rec, &x)?;
                        let y = Tensor::declare("y", Role::Activations, z.shape(), DType::F32)?;
                        kernels::gelu(&mut rec, &z, &y, Gelu::Exact)?;
                        y
                    }
                };
                Some((gate, up.record(&mut rec, &x)?))
            }
        };
        device.run(&rec.finish(&mut Workspace::default()))?;
        let x = match glu {
            None => x,
            Some((gate, up)) => {
                let (gate, up) = (device.read::<f32>(&gate).await?, device.read::<f32>(&up).await?);
                let hidden: Vec<f32> = gate.iter().zip(up).map(|(gate, up)| gate * up).collect();
                device.upload("hidden", &[n_rows as u32, (hidden.len() / n_rows) as u32], &hidden)?
            }
        };
        let mut rec = Recorder::new(device);
        let components = self.out.record(&mut rec, &x)?;
        device.run(&rec.finish(&mut Workspace::default()))?;
        let gates = match gates {
            Some(gates) => device.read(&gates).await?,
            None => Vec::new(),
        };
        Ok([device.read(&components).await?, gates])
    }
}

/// A strip of items.
struct Shard {
    first: u32,
    n_items: usize,
    /// `[M I, D]`.
    components: Matrix,
    /// `[I, G]`.
    gates: Tensor,
    /// `[I, D]`: means of the components.
    means: Matrix,
    /// The same in 8 bits.
    coarse: Matrix,
}

/// Queries as the kernel takes them.
struct Queries {
    n: usize,
    /// `[B, N D]`.
    components: Tensor,
    /// `[B, G]`.
    gates: Tensor,
    /// `[B, D]`: sums of the components.
    sums: Tensor,
    /// For each query the length of its longest component.
    norms: Vec<f32>,
}

/// A corpus of items under a mixture of logits.
pub struct Mol {
    device: Device,
    config: MolConfig,
    gate: MolGate,
    query_encoder: Encoder,
    item_encoder: Encoder,
    users: Vec<Vec<f32>>,
    storage: WeightType,
    shards: Vec<Shard>,
    n_items: usize,
    /// Of the longest component of an item.
    norm: f32,
}

impl Mol {
    /// An empty corpus on a device; `storage` says how components of items are kept: F32, F16 or Q8_0.
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
            query_encoder: Encoder::new(device, &weights.query, config.glu, &weights.query_gate)?,
            item_encoder: Encoder::new(device, &weights.item, config.glu, &weights.item_gate)?,
            users: weights.users.clone(),
            device: device.clone(),
            config,
            storage,
            shards: Vec::new(),
            n_items: 0,
            norm: 0.0,
        })
    }

    /// Sizes and form of the mixture.
    pub fn config(&self) -> &MolConfig {
        &self.config
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.n_items
    }

    /// Whether there is no item.
    pub fn is_empty(&self) -> bool {
        self.n_items == 0
    }

    /// Bytes of components and gates of an item, which a pass over the items reads.
    pub fn item_bytes(&self) -> usize {
        let form = &self.config.form;
        let row = crate::matrix::file_row_bytes(self.storage, self.config.dim as usize);
        form.item_components as usize * row + 4 * form.gate_columns().max(4) as usize
    }

    /// Appends items, `[n, item_dim]`, and returns their ids. Many at once are scored in fewer passes than a few at a time.
    ///
    /// # Errors
    /// [`Error::Option`] if these are not whole vectors, or a number is not finite; errors of [`Device::run`].
    pub async fn append(&mut self, items: &[f32]) -> Result<Range<u32>, Error> {
        let width = self.config.item_dim as usize;
        let n_new = whole_rows("items", items, width)?;
        let first = self.n_items as u32;
        if u32::try_from(self.n_items + n_new).is_err() {
            let found = format!("{}", self.n_items + n_new);
            return Err(Error::Option { option: "items", expected: "fewer than 2^32 in all".into(), found });
        }
        for strip in items.chunks(self.strip() * width) {
            let shard = self.shard(strip, width).await?;
            self.n_items += shard.n_items;
            self.shards.push(shard);
        }
        Ok(first..self.n_items as u32)
    }

    /// Items of a shard, whose components and scores fit a binding.
    fn strip(&self) -> usize {
        let limit = self.device.limits().max_binding_bytes;
        let form = &self.config.form;
        let row = u64::from(self.config.dim.next_multiple_of(32)) * 4 * u64::from(form.item_components);
        let largest = row.max(4 * BATCH as u64).max(4 * u64::from(form.gate_columns()));
        // A matrix is cut where its end, rounded up, would not fit.
        usize::try_from((limit - 16) / largest).unwrap_or(STRIP).clamp(1, STRIP)
    }

    async fn shard(&mut self, items: &[f32], width: usize) -> Result<Shard, Error> {
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
            let matrix = Matrix::declare(device, label, weight, rows as u32, dim)?;
            matrix.upload(device, &[&packed(weight, values, d)])?;
            Ok::<_, Error>(matrix)
        };
        Ok(Shard {
            first: self.n_items as u32,
            n_items,
            components: matrix("mol.components", self.storage, m * n_items, &components)?,
            gates: device.upload("mol.gates", &[n_items as u32, columns], &gates)?,
            means: matrix("mol.means", self.storage, n_items, &means)?,
            coarse: matrix("mol.coarse", WeightType::Q8_0, n_items, &means)?,
        })
    }

    /// The k best items for each query, fewer if there are fewer. `queries`: `[n, query_dim]`; `users`: an id for each query
    /// where the mixture has components of users.
    ///
    /// # Errors
    /// [`Error::Option`] if `queries` are not whole vectors, a number is not finite, `users` are missing or too many, or k or
    /// a number of candidates is 0; [`Error::Operand`] if a score is not finite; errors of [`Device::run`].
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
            let queries = self.encode(rows, users, n).await?;
            let batch = self.search_batch(&queries, k, how).await?;
            found.hits.extend(batch.hits);
            found.scored.extend(batch.scored);
        }
        Ok(found)
    }

    async fn encode(&self, rows: &[f32], users: &[u32], n: usize) -> Result<Queries, Error> {
        let MolConfig { form, dim, temperature, .. } = self.config;
        let [encoded, gates] = self.query_encoder.encode(&self.device, rows, n).await?;
        let d = dim as usize;
        let mut components = Vec::with_capacity(n * form.query_components as usize * d);
        for (query, encoded) in encoded.chunks_exact(encoded.len() / n).enumerate() {
            components.extend(encoded);
            for table in &self.users {
                // The first row stands for nobody.
                let row = users[query] as usize % (table.len() / d - 1) + 1;
                components.extend(&table[row * d..][..d]);
            }
        }
        let mut norms = self.config.normalise(&mut components);
        components.iter_mut().for_each(|x| *x /= temperature);
        norms.iter_mut().for_each(|norm| *norm /= temperature);
        let per_query = form.query_components as usize;
        let mut sums = vec![0.0; n * d];
        for (sum, query) in sums.chunks_exact_mut(d).zip(components.chunks_exact(per_query * d)) {
            query.chunks_exact(d).for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
        }
        let columns = form.gate_columns().max(4);
        let mut gates = form.gate_rows(&gates);
        gates.resize(n * columns as usize, 0.0);
        let rows = n as u32;
        Ok(Queries {
            n,
            components: self.device.upload("mol.queries", &[rows, form.query_components * dim], &components)?,
            gates: self.device.upload("mol.query_gates", &[rows, columns], &gates)?,
            sums: self.device.upload("mol.sums", &[rows, dim], &sums)?,
            norms: norms.chunks_exact(per_query).map(|norms| norms.iter().copied().fold(0.0, f32::max)).collect(),
        })
    }

    async fn search_batch(&self, queries: &Queries, k: usize, how: MolSearch) -> Result<MolHits, Error> {
        match how {
            MolSearch::BruteForce => {
                let mut tops = vec![Top::new(k); queries.n];
                self.scan(queries, MolScores::All, |query, first, scores| tops[query].extend(first, scores)).await?;
                Ok(MolHits { hits: hits(tops)?, scored: vec![self.n_items; queries.n] })
            }
            MolSearch::Mips => Ok(MolHits { hits: hits(self.average(queries, k).await?)?, scored: vec![0; queries.n] }),
            MolSearch::Avg { candidates } => {
                let tops = self.average(queries, candidates).await?;
                self.rescore(queries, k, ids(tops)).await
            }
            MolSearch::Highest { candidates } => {
                let mut tops = vec![Top::new(candidates); queries.n];
                self.scan(queries, MolScores::Bounds, |query, first, bounds| tops[query].extend(first, bounds)).await?;
                self.rescore(queries, k, ids(tops)).await
            }
            MolSearch::Naive { per_pair } => {
                let candidates = self.naive(queries, per_pair).await?;
                self.rescore(queries, k, candidates).await
            }
            MolSearch::Comb { per_pair, candidates } => {
                let mut union = self.naive(queries, per_pair).await?;
                let others = ids(self.average(queries, candidates).await?);
                union.iter_mut().zip(others).for_each(|(union, others)| union.extend(others));
                self.rescore(queries, k, union).await
            }
            MolSearch::HIndexer { candidates, sample } => {
                let candidates = self.above_threshold(queries, candidates, sample).await?;
                self.rescore(queries, k, candidates).await
            }
            MolSearch::TwoPass { candidates } => {
                let tops = self.average(queries, candidates.max(k)).await?;
                let first = self.rescore(queries, k, ids(tops)).await?;
                let bars: Vec<f32> = (first.hits.iter().zip(&queries.norms))
                    .map(|(hits, norm)| match hits.get(k - 1) {
                        Some(last) => last.score - self.margin(*norm),
                        None => f32::MIN,
                    })
                    .collect();
                let mut reach = vec![Vec::new(); queries.n];
                self.scan(queries, MolScores::Bounds, |query, first, bounds| {
                    let above = bounds.iter().enumerate().filter(|(_, bound)| **bound >= bars[query]);
                    reach[query].extend(above.map(|(i, _)| first + i as u32));
                })
                .await?;
                let scored: Vec<usize> = first.scored;
                let mut second = self.rescore(queries, k, reach).await?;
                second.scored.iter_mut().zip(scored).for_each(|(all, first)| *all += first);
                Ok(second)
            }
        }
    }

    /// By how much a computed score may exceed the computed bound. Each logit is a sum of D products and off by at most
    /// D + 2 roundings of the product of its norms; weights and weighted logits are sums of P terms each. Twice that, to be safe.
    fn margin(&self, query_norm: f32) -> f32 {
        let n_roundings = self.config.dim + 2 * self.config.form.n_pairs() + 16;
        n_roundings as f32 * f32::EPSILON * query_norm * self.norm
    }

    /// Runs the mixture over all items; `take` gets a query, the first item's id, and scores.
    async fn scan(
        &self,
        queries: &Queries,
        what: MolScores<'_>,
        mut take: impl FnMut(usize, u32, &[f32]),
    ) -> Result<(), Error> {
        for shard in &self.shards {
            let scores = self.scores(queries, shard, what, shard.n_items).await?;
            let rows = scores.chunks_exact(shard.n_items).enumerate();
            rows.for_each(|(query, scores)| take(query, shard.first, scores));
        }
        Ok(())
    }

    async fn scores(
        &self,
        queries: &Queries,
        shard: &Shard,
        what: MolScores<'_>,
        n_scores: usize,
    ) -> Result<Vec<f32>, Error> {
        let mut rec = Recorder::new(&self.device);
        let scores =
            Tensor::declare("mol.scores", Role::Activations, &[queries.n as u32, n_scores as u32], DType::F32)?;
        let operands = MolOperands {
            items: &shard.components,
            item_gates: &shard.gates,
            queries: &queries.components,
            query_gates: &queries.gates,
        };
        kernels::mol(&mut rec, &self.gate, &operands, what, &scores)?;
        self.read_after(rec, &scores).await
    }

    async fn read_after(&self, rec: Recorder, y: &Tensor) -> Result<Vec<f32>, Error> {
        let recording = rec.finish(&mut Workspace::default());
        let mut words = self.device.run_and_read(&recording, y)?.await?;
        words.truncate(y.len());
        Ok(bytemuck::cast_vec(words))
    }

    /// The best items by the dot product of summed queries with mean items.
    async fn average(&self, queries: &Queries, n: usize) -> Result<Vec<Top>, Error> {
        let mut tops = vec![Top::new(n); queries.n];
        for shard in &self.shards {
            let scores = self.products(&queries.sums, &shard.means).await?;
            let rows = scores.chunks_exact(shard.n_items).zip(&mut tops);
            rows.for_each(|(scores, top)| top.extend(shard.first, scores));
        }
        Ok(tops)
    }

    /// Items whose coarse product is as high as the highest of a sample, in the share that gives so many candidates.
    async fn above_threshold(&self, queries: &Queries, n: usize, sample: usize) -> Result<Vec<Vec<u32>>, Error> {
        let mut scores = vec![Vec::with_capacity(self.n_items); queries.n];
        for shard in &self.shards {
            let of_shard = self.products(&queries.sums, &shard.coarse).await?;
            let rows = of_shard.chunks_exact(shard.n_items).zip(&mut scores);
            rows.for_each(|(from, to)| to.extend_from_slice(from));
        }
        let select = |scores: Vec<f32>| {
            // Multiples of a large odd number, so that items appended together are not drawn together.
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

    /// `x wᵀ`.
    async fn products(&self, x: &Tensor, w: &Matrix) -> Result<Vec<f32>, Error> {
        let mut rec = Recorder::new(&self.device);
        let y = Tensor::declare("mol.products", Role::Activations, &[x.shape()[0], w.rows()], DType::F32)?;
        Linear::new(w).record(&mut rec, x, &y)?;
        self.read_after(rec, &y).await
    }

    /// The union over pairs of the best items by the pair's logit.
    async fn naive(&self, queries: &Queries, per_pair: usize) -> Result<Vec<Vec<u32>>, Error> {
        let MolConfig { form, dim, .. } = self.config;
        let (n, m) = (form.query_components as usize, form.item_components as usize);
        let is_pair = |i: usize, j: usize| form.pairing == Pairing::Cross || i == j;
        let components: Vec<f32> = self.device.read(&queries.components).await?;
        let mut tops = vec![Top::new(per_pair); queries.n * n * m];
        for shard in &self.shards {
            let row_bytes = 4 * m * shard.n_items;
            let n_rows = (LOGITS_BYTES / row_bytes).clamp(1, queries.n * n);
            for (i, rows) in components.chunks(n_rows * dim as usize).enumerate() {
                let x = self.device.upload("mol.rows", &[(rows.len() / dim as usize) as u32, dim], rows)?;
                let logits = self.products(&x, &shard.components).await?;
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
        let mut tops = tops.into_iter();
        Ok((0..queries.n).map(|_| ids(tops.by_ref().take(n * m).collect()).concat()).collect())
    }

    /// Scores candidates, each once, and keeps the k best.
    async fn rescore(&self, queries: &Queries, k: usize, mut candidates: Vec<Vec<u32>>) -> Result<MolHits, Error> {
        for ids in &mut candidates {
            ids.sort_unstable();
            ids.dedup();
        }
        let mut tops = vec![Top::new(k); queries.n];
        for shard in &self.shards {
            let of_shard: Vec<&[u32]> = (candidates.iter())
                .map(|ids| {
                    let at = |id: u32| ids.partition_point(|&other| other < id);
                    &ids[at(shard.first)..at(shard.first.saturating_add(shard.n_items as u32))]
                })
                .collect();
            let most = of_shard.iter().map(|ids| ids.len()).max().unwrap_or_default();
            for first in (0..most).step_by(STRIP) {
                let columns = (most - first).min(STRIP);
                // Shorter lists end with numbers that are no item's.
                let mut local = vec![u32::MAX; queries.n * columns];
                let parts: Vec<&[u32]> =
                    of_shard.iter().map(|ids| &ids[first.min(ids.len())..(first + columns).min(ids.len())]).collect();
                for (to, from) in local.chunks_exact_mut(columns).zip(&parts) {
                    to.iter_mut().zip(*from).for_each(|(to, id)| *to = id - shard.first);
                }
                let ids = self.device.upload("mol.ids", &[queries.n as u32, columns as u32], &local)?;
                let scores = self.scores(queries, shard, MolScores::Of(&ids), columns).await?;
                for ((top, ids), scores) in tops.iter_mut().zip(&parts).zip(scores.chunks_exact(columns)) {
                    ids.iter().zip(scores).for_each(|(&id, &score)| top.push(id, score));
                }
            }
        }
        Ok(MolHits { hits: hits(tops)?, scored: candidates.iter().map(Vec::len).collect() })
    }
}

fn ids(tops: Vec<Top>) -> Vec<Vec<u32>> {
    tops.into_iter().map(|top| top.into_hits().iter().map(|hit| hit.id).collect()).collect()
}

/// The hits of each query; a score that is not finite comes first and is refused.
fn hits(tops: Vec<Top>) -> Result<Vec<Vec<Hit>>, Error> {
    let hits: Vec<Vec<Hit>> = tops.into_iter().map(Top::into_hits).collect();
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

/// Rows of `dim` numbers in the layout of files.
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
