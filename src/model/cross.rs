//! Attention of a decoder to an encoder's output (Vaswani et al. 2017, arXiv:1706.03762): queries of tokens, keys and values
//! of the encoder's rows, which are computed once and kept like a cache.

use std::collections::BTreeMap;

use super::block::Block;
use super::config::ModelConfig;
use super::forward::{Flow, HalfEnd, Transformer, wrong_cache};
use super::stack::{Stack, WeightSource};
use super::weights::HalfNorms;
use crate::error::Error;
use crate::kernels::{
    BatchRow, CachedKeys, Heads, Input, KvType, PAGE, StepState, attention, attention_next, cache_kv,
};
use crate::recording::{BatchInvariance, Recorder};
use crate::target::Target;
use crate::tensor::{Tensor, TensorWriter};

/// Weights of a layer's attention to an encoder's output.
#[derive(Clone, Debug)]
pub struct CrossWeights {
    /// Norms.
    pub norms: HalfNorms,
    /// Queries of tokens, `[H D, C]`.
    pub query: Stack,
    /// Keys and values of the encoder's rows, `[2 Hkv D, C]`.
    pub keys_values: Stack,
    /// Output projection, `[C, H D]`.
    pub output: Stack,
}

impl CrossWeights {
    pub(super) fn declare(
        target: &Target,
        source: &dyn WeightSource,
        config: &ModelConfig,
        Block { attention, attn_norm, .. }: &Block,
        prefix: &str,
    ) -> Result<CrossWeights, Error> {
        let stack = |name, rows, cols| Stack::declare(target, source, prefix, &[(name, rows)], cols);
        let (dim, kv_dim) = (config.dim, attention.kv_dim());
        let keys_values = [("cross_attn_k", kv_dim), ("cross_attn_v", kv_dim)];
        let names = ["cross_attn_norm", "cross_attn_post_norm", "cross_attn_output_norm"];
        Ok(CrossWeights {
            norms: HalfNorms::declare(source, prefix, config, *attn_norm, names)?,
            query: stack("cross_attn_q", attention.q_dim(), dim)?,
            // Attention does not see a bias of all keys.
            keys_values: Stack::declare_biased(target, source, prefix, (&keys_values, Some("cross_attn_k")), dim)?,
            output: stack("cross_attn_output", dim, attention.q_dim())?,
        })
    }

    pub(super) fn stacks(&self) -> impl Iterator<Item = &Stack> {
        [&self.query, &self.keys_values, &self.output].into_iter()
    }
}

/// Keys and values of an encoder's rows, for each layer: of several encodings, each in pages of its own.
#[derive(Clone, Debug)]
pub struct CrossTensors {
    keys: Vec<CachedKeys>,
    /// The encoding that is written: all rows are a pass's, from position 0 on.
    written: StepState,
    /// The encoding that all tokens of a pass read: the last row is the pass's only one, so that any query sees all.
    read: StepState,
    /// The same for each token of a batch.
    read_each: StepState,
    /// Tensors that receive the queries of layers, `[T, H D]`, for inspection of attention weights.
    queries: BTreeMap<usize, Tensor>,
}

impl CrossTensors {
    /// Declares keys and values of type `kind` for `n` encodings of `n_rows` rows each.
    ///
    /// # Errors
    /// [`Error::Operand`] if they are too large for a tensor.
    pub fn declare(config: &ModelConfig, kind: KvType, [n, n_rows]: [u32; 2]) -> Result<CrossTensors, Error> {
        let n_pages = n_rows.div_ceil(PAGE);
        let n_slots = n.saturating_mul(n_pages).saturating_mul(PAGE);
        let declare = |(l, block): (usize, &Block)| {
            let shape = [block.attention.n_kv_heads, n_slots, block.attention.head_dim];
            CachedKeys::declare(&format!("cross.{l}"), kind, shape, n_rows)
        };
        let keys = config.blocks.iter().enumerate().map(declare).collect::<Result<_, _>>()?;
        let state = |n_tokens| StepState::declare_shared(n_tokens, n_pages, false);
        let (written, read, read_each) = (state(None)?, state(None)?, state(Some(n))?);
        Ok(CrossTensors { keys, written, read, read_each, queries: BTreeMap::new() })
    }

    /// The same tensors, with those that receive the queries of layers, `[T, H D]`.
    pub(crate) fn with_queries(&self, queries: BTreeMap<usize, Tensor>) -> CrossTensors {
        CrossTensors { queries, ..self.clone() }
    }

    /// A layer's keys and values, and the slot of an encoding's first row, which the others follow.
    pub(crate) fn keys(&self, layer: usize, encoding: u32) -> Option<(&CachedKeys, usize)> {
        let cached = self.keys.get(layer)?;
        Some((cached, encoding as usize * cached.capacity.next_multiple_of(PAGE) as usize))
    }

    /// Selects the encoding that the next pass over an encoder's rows writes.
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn write_to(&self, device: &dyn TensorWriter, encoding: u32) -> Result<(), Error> {
        let row = self.row(encoding);
        self.written.set_rows(device, &[BatchRow { pos: 0, n_tokens: row.pos + 1, ..row }])
    }

    /// Selects the encoding that all tokens of the next passes read.
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn read_from(&self, device: &dyn TensorWriter, encoding: u32) -> Result<(), Error> {
        self.read.set_rows(device, &[self.row(encoding)])
    }

    /// Selects the encoding that each token of the next batches reads.
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn read_each_from(&self, device: &dyn TensorWriter, encodings: &[u32]) -> Result<(), Error> {
        let rows: Vec<BatchRow> = encodings.iter().map(|&encoding| self.row(encoding)).collect();
        self.read_each.set_rows(device, &rows)
    }

    fn row(&self, encoding: u32) -> BatchRow {
        let n_rows = self.keys.first().map_or(1, |cached| cached.capacity);
        let pages = BatchRow::pages_of(encoding, n_rows);
        BatchRow { pos: n_rows.saturating_sub(1), n_tokens: 1, pages, ..BatchRow::default() }
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let keys = self.keys.iter().flat_map(|cached| [&cached.k].into_iter().chain(&cached.v));
        keys.chain([&self.written, &self.read, &self.read_each].map(StepState::tensor))
    }
}

impl Transformer {
    /// Records the keys and values of an encoder's rows, `[S, C]`, for all layers that attend to them.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees with the configuration.
    pub fn record_cross_keys(&self, rec: &mut Recorder, rows: &Tensor, cross: &CrossTensors) -> Result<(), Error> {
        for (l, (block, weights)) in self.config.blocks.iter().zip(&self.weights.blocks).enumerate() {
            let Some(weights) = &weights.cross else { continue };
            let cached = cross.keys.get(l).ok_or_else(|| wrong_cache(l))?;
            let kv = rec.temporary("kv", &[rows.shape()[0], 2 * block.attention.kv_dim()])?;
            weights.keys_values.record_tiled(rec, &mut Input::new(rows), None, false, &kv)?; // [S, 2 Hkv D]
            let heads = Heads { n_heads: 0, ..unturned(block) };
            cache_kv(rec, &cross.written, &heads, &kv, cached)?;
        }
        Ok(())
    }

    /// Records a layer's attention to an encoder's output: `[T, C]` to `[T, C]`.
    pub(super) fn record_cross(
        &self,
        rec: &mut Recorder,
        flow: Flow<'_>,
        l: usize,
        weights: &CrossWeights,
        h: Tensor,
    ) -> Result<Tensor, Error> {
        let block = &self.config.blocks[l];
        let Flow::Cached(io, _) = flow else { return Err(wrong_cache(l)) };
        let cross = io.cross.as_ref().ok_or_else(|| wrong_cache(l))?;
        let cached = cross.keys.get(l).ok_or_else(|| wrong_cache(l))?;
        let n_tokens = h.shape()[0];
        let shape = [n_tokens, block.attention.q_dim()];
        let q = match cross.queries.get(&l) {
            Some(q) => q.clone(),
            None => rec.temporary("q", &shape)?,
        };
        self.record_product(rec, flow, &weights.query, weights.norms.before.as_ref(), &h, &q)?; // [T, H D]
        let mixed = rec.temporary("mixed", &shape)?;
        let kernel = block.attention.kernel(false);
        let is_batch = io.state.is_batch();
        let state = if is_batch { &cross.read_each } else { &cross.read };
        if is_batch || n_tokens == 1 && rec.batch_invariance() != BatchInvariance::Many {
            let heads = Heads { n_kv_heads: 0, ..unturned(block) };
            attention_next(rec, state, &kernel, &heads, None, &q, cached, &mixed)?; // [T, H D]
        } else {
            attention(rec, state, &kernel, None, &q, cached, &mixed)?; // [T, H D]
        }
        let end = HalfEnd { product: &weights.output, place: block.attn_norm, norms: &weights.norms, factor: None };
        self.record_end(rec, flow, &end, &mut Input::new(&mixed), h) // [T, C]
    }
}

/// Heads as they are projected, which are neither rotated nor normalised.
fn unturned(Block { attention, .. }: &Block) -> Heads<'_> {
    Heads {
        n_heads: attention.n_heads,
        n_kv_heads: attention.n_kv_heads,
        head_dim: attention.head_dim,
        keys_hold_values: false,
        first_column: 0,
        rope: None,
        norm: None,
    }
}
