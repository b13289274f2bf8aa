//! Attention: with a key/value cache, and of packed sequences.
//!
//! All query heads that share a key/value head, for all tokens of a pass, are rows that read the same keys, so each
//! key that a workgroup loads serves several queries. The number of tokens selects the form:
//!
//! - one token: `attention_decode` takes the projection and does head norms, rotation, the cache write and attention.
//!   Rotation is here because only here a workgroup has whole heads, as norms and blocks of a quantised cache need.
//!   The first part of the keys begins with the token's own key, which one workgroup writes to the cache, where no
//!   other reads it in the same dispatch. The cache's size fixes the number of parts, because grids are recorded;
//!   parts that the position does not reach return at once, and `attention_merge` combines the others.
//! - several tokens: `rope_kv`, then `attention_prefill`, 16 rows against tiles of 32 keys in workgroup memory. Tiles
//!   that no row can see are not read.
//! - with matrix units: `attention_half`, 64 rows, heads of up to 128 elements that are a multiple of 16, caches of
//!   f16 and Q8_0. Matrices have no cheap factor per row, so sums are not rescaled for each tile: a row's weights are
//!   relative to a reference that stays while none exceeds 2^15, and then becomes 2^-7 of the highest. What a row
//!   sums does not depend on its neighbours. `tests/matrices` runs the shader on any adapter with matrices made of
//!   lanes.
//!
//! In the `scalar` tier an invocation walks keys alone, up to eight rows at a time. llvmpipe leaves an invocation's
//! loops after 65,535 rounds in all, without an error, so longer caches are cut into more parts and longer rows use
//! the baseline.
//!
//! In an engine (`PAGE_TABLE`) the slot of a position is looked up in the row's pages. Tiles of keys begin at fixed
//! multiples, so the position at which a pass begins changes no sum. Where rows of a batch may be of one sequence,
//! `attention_decode` runs twice: it stores the keys of all rows, then reads them.

use super::linear::operations;
use super::{CachedKeys, Heads, KvType, LOOP_ROUNDS, StepState, fold, grid_parts};
use crate::dtype::DType;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders::constants::attention::{CAUSAL, OWN_KEYS, PACKED, WHOLE_PASS};
use crate::shaders::constants::attention_prefill::TILE_ROWS;
use crate::shaders::constants::parts::{HAS_STORED, STORES_ONLY};
use crate::shaders::params::AttentionParams;
use crate::shaders::{self, KernelOf, Tier};
use crate::target::Target;
use crate::tensor::{Role, Tensor};

/// The largest head.
pub(crate) const MAX_HEAD_DIM: u32 = 576;
/// The largest head of the `scalar` tier's own kernel for a single token.
const MAX_SCALAR_DIM: u32 = 512;
/// Columns of the values that a workgroup has.
const COLUMNS: u32 = 256;

/// Shape of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// H, query heads; a multiple of `n_kv_heads`.
    pub n_heads: u32,
    /// Hkv, key/value heads.
    pub n_kv_heads: u32,
    /// D, size of a head: a multiple of 4 up to 576.
    pub head_dim: u32,
    /// Where keys hold their values (multi-head latent attention, DeepSeek-AI 2024, arXiv:2405.04434): the first element of
    /// a key that is its value's, a multiple of 8. `None`: values are apart, as large as keys.
    pub values_from: Option<u32>,
    /// Sliding window: a query sees only keys at a distance below this, so a causal one sees this many keys, its own
    /// included. Cached keys after its own are not limited by it. `None`: no window.
    pub window: Option<u32>,
    /// Factor of the scores, usually `head_dim^-1/2`.
    pub scale: f32,
    /// Bound that scores approach, `cap * tanh(score / cap)`; none if `None`.
    pub soft_cap: Option<f32>,
    /// Whether a query sees no key after its own. Otherwise it sees all up to the pass's last token, as in encoders and
    /// among rows of an image.
    pub causal: bool,
    /// Whether queries that are not causal see all keys of their pass, those beyond the window too.
    pub whole_pass: bool,
}

impl AttentionConfig {
    /// Refuses what the kernels have no room for.
    fn check(&self) -> Result<(), Error> {
        let AttentionConfig { n_heads, n_kv_heads, head_dim, soft_cap, .. } = *self;
        if head_dim == 0 || !head_dim.is_multiple_of(4) || head_dim > MAX_HEAD_DIM {
            return Err(wrong("head_dim", &format!("a multiple of 4 up to {MAX_HEAD_DIM}"), &head_dim));
        }
        if n_heads == 0 || n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) {
            return Err(wrong("n_kv_heads", "a divisor of n_heads", &n_kv_heads));
        }
        if let Some(from) = self.values_from.filter(|from| *from == 0 || *from >= head_dim || !from.is_multiple_of(8)) {
            return Err(wrong("values_from", &format!("a multiple of 8 within the head's {head_dim}"), &from));
        }
        if let Some(cap) = soft_cap.filter(|cap| !cap.is_normal() || *cap < 0.0) {
            return Err(wrong("soft_cap", "a positive number", &cap));
        }
        Ok(())
    }

    /// Parameters for keys and values in tensors of their own, `[Hkv, slots, row]`.
    fn params(&self, n_tokens: u32, kind: KvType, [slots, capacity]: [u32; 2]) -> AttentionParams {
        let (quads, units) = (self.head_dim / 4, kind.row_words(self.head_dim) / 4);
        AttentionParams {
            n_tokens,
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            capacity,
            window: self.window.unwrap_or(0),
            scale: self.scale,
            soft_cap: self.soft_cap.unwrap_or(0.0),
            flags: self.flags(),
            splits: 1,
            step: 1,
            first_group: 0,
            query_stride: self.n_heads * quads,
            key_stride: units,
            head_stride: slots * units,
            n_tiles: 0,
            query_start: 0,
            key_start: 0,
            value_start: 0,
            slots,
            rot_dims: 0,
            style: 0,
            eps: 0.0,
            query_row: 0,
            row_words: 0,
            reach: 0,
        }
    }

    fn flags(&self) -> u32 {
        match (self.causal, self.whole_pass) {
            (true, _) => CAUSAL,
            (false, true) => WHOLE_PASS,
            (false, false) => 0,
        }
    }

    /// Size of a value.
    pub(crate) fn value_dim(&self) -> u32 {
        self.head_dim - self.values_from.unwrap_or(0)
    }

    /// The override that says where keys hold their values.
    fn values_constant(&self) -> Option<(&'static str, f64)> {
        self.values_from.map(|from| ("VALUES_FROM", f64::from(from / 4)))
    }

    /// Query heads that share a key/value head.
    fn share(&self) -> u32 {
        self.n_heads / self.n_kv_heads
    }
}

fn wrong(operand: &'static str, expected: &str, found: &dyn ToString) -> Error {
    Error::Operand { kernel: "attention", operand, expected: expected.into(), found: found.to_string() }
}

/// Records attention of the pass's queries with cached keys, with a streaming softmax. Shaders:
/// `shaders/attention_prefill.wgsl`, or `shaders/attention_half.wgsl` where the target rounds to half precision by matrices.
/// A single token takes [`attention_next`].
///
/// # Shapes
/// `sinks`: `[H]`, a score of each head that takes part in the softmax and has no value; `q`, `y`: `[T, H * D]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the configuration, [`Error::Operand`] if that is out of range.
pub fn attention(
    rec: &mut Recorder,
    state: &StepState,
    config: &AttentionConfig,
    sinks: Option<&Tensor>,
    q: &Tensor,
    cached: &CachedKeys,
    y: &Tensor,
) -> Result<(), Error> {
    config.check()?;
    let AttentionConfig { n_heads, n_kv_heads, head_dim, .. } = *config;
    let [n_tokens, _] = q.dims2("attention", "q")?;
    q.expect_shape("attention", "q", &[n_tokens, n_heads * head_dim])?;
    let slots = cached.slots("attention", config)?;
    let n_keys = most_keys(state, slots, cached);
    y.expect_shape("attention", "y", &[n_tokens, n_heads * config.value_dim()])?;
    if let Some(sinks) = sinks {
        sinks.expect_shape("attention", "sinks", &[n_heads])?;
    }
    let n_rows = n_tokens * config.share(); // of a key/value head
    let plan = AttentionPlan::half(rec.target(), cached.kind, config).unwrap_or_else(|| {
        let plan = AttentionPlan::prefill(rec.target(), cached.kind, n_keys, head_dim);
        match plan.tier {
            // Eight if there are enough for all invocations of two workgroups.
            Tier::Scalar if n_rows / SCALAR_ROWS * n_kv_heads < 16 => {
                AttentionPlan { tile_rows: n_rows.min(4), ..plan }
            }
            _ => plan,
        }
    });
    let params = AttentionParams {
        flags: config.flags(),
        n_tiles: n_rows.div_ceil(plan.tile_rows),
        ..config.params(n_tokens, cached.kind, [slots, cached.capacity])
    };
    // Sinks that are not there are never read; queries are at hand. All keys, as if the cache were full.
    let operands = [state.tensor(), q, &cached.k, cached.v.as_ref().unwrap_or(&cached.k), sinks.unwrap_or(q), y];
    let constants: Vec<_> =
        sink_constant(sinks).into_iter().chain(state.constant()).chain(config.values_constant()).collect();
    plan.record(rec, params, [n_keys, config.value_dim()], &constants, &operands)
}

fn sink_constant(sinks: Option<&Tensor>) -> Option<(&'static str, f64)> {
    sinks.map(|_| ("SINKS", 1.0))
}

/// Records attention of a single token, or of one of each of several sequences, from its projection on: what [`rope_kv`](super::rope_kv) and [`attention`] do for
/// several. One dispatch of `shaders/attention_decode.wgsl`, and a second one, `shaders/attention_merge.wgsl`, if the cache
/// is long enough to be cut into parts. Where rows may be of one sequence ([`StepState::with_runs`]), a dispatch before them stores
/// the keys and values of all rows; each row's result is the same to the bit.
///
/// # Shapes
/// `sinks`: `[H]`; `qkv`: `[T, first + (H + 2 Hkv) * D]`, T being 1 unless the state has a row for each token; `y`: `[T, H * D]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the configuration, [`Error::Operand`] if that is out of range.
#[expect(clippy::too_many_arguments)]
pub fn attention_next(
    rec: &mut Recorder,
    state: &StepState,
    config: &AttentionConfig,
    heads: &Heads<'_>,
    sinks: Option<&Tensor>,
    qkv: &Tensor,
    cached: &CachedKeys,
    y: &Tensor,
) -> Result<(), Error> {
    config.check()?;
    heads.check("attention")?;
    let AttentionConfig { n_heads, n_kv_heads, head_dim, .. } = *config;
    // Without keys of its own it sees those that another layer has cached, of the token too.
    let has_keys = heads.n_kv_heads > 0;
    let found = [heads.n_heads, if has_keys { heads.n_kv_heads } else { n_kv_heads }, heads.head_dim];
    let is_alike = found == [n_heads, n_kv_heads, head_dim] && heads.keys_hold_values == config.values_from.is_some();
    if !is_alike || !heads.first_column.is_multiple_of(4) {
        let expected = format!("{:?} from a column that is a multiple of 4 on", [n_heads, n_kv_heads, head_dim]);
        return Err(wrong("heads", &expected, &format!("{found:?} from column {} on", heads.first_column)));
    }
    let [n_tokens, _] = if state.is_batch() { qkv.dims2("attention", "qkv")? } else { [1, 0] };
    qkv.expect_shape("attention", "qkv", &[n_tokens, heads.qkv_dim()])?;
    let slots = cached.slots("attention", config)?;
    let value_dim = config.value_dim();
    y.expect_shape("attention", "y", &[n_tokens, n_heads * value_dim])?;
    if let Some(sinks) = sinks {
        sinks.expect_shape("attention", "sinks", &[n_heads])?;
    }
    let (kernel, variant) = (&shaders::ATTENTION_DECODE, Some(cached.kind.variant()));
    let tier = match rec.target().tier_for(kernel, variant) {
        Tier::Scalar if head_dim > MAX_SCALAR_DIM => Tier::Baseline,
        tier => tier,
    };
    let is_scalar = tier == Tier::Scalar;
    let n_keys = most_keys(state, slots, cached);
    // Queries of a workgroup together have 1024 elements, those of an invocation of the `scalar` tier 512.
    let room = if is_scalar { 512 / head_dim } else { 1024 / head_dim };
    let rows = config.share().min(room.clamp(1, 4));
    let fours = config.share().div_ceil(rows);
    let groups = n_kv_heads * fours;
    let (splits, step) = match is_scalar {
        true => scalar_splits(n_keys, head_dim, (n_heads + n_kv_heads) * head_dim / 4),
        false => splits(n_keys, groups),
    };
    let params = AttentionParams {
        flags: config.flags() | if has_keys { OWN_KEYS } else { 0 },
        splits,
        step,
        query_start: heads.first_column / 4,
        rot_dims: heads.rot_dims(),
        style: heads.style(),
        eps: heads.eps(),
        query_row: heads.query_row(),
        query_stride: heads.qkv_dim() / 4,
        row_words: state.row_words(),
        ..config.params(n_tokens, cached.kind, [slots, cached.capacity])
    };
    let with_dim = (!is_scalar).then_some(("HEAD_DIM", f64::from(head_dim)));
    let constants = [("ROWS", f64::from(rows)), heads.constant()].into_iter().chain(with_dim);
    let constants = constants.chain(sink_constant(sinks)).chain(state.constant());
    let constants: Vec<_> = constants.chain(config.values_constant()).collect();
    let [table, weight] = heads.operands(rec)?;
    // Written by nobody where keys hold their values.
    let absent = rec.temporary_words("absent", &[4])?;
    let v = cached.v.as_ref().unwrap_or(&absent);
    let columns = if is_scalar { 1 } else { value_dim.div_ceil(COLUMNS) };
    let [x, y_groups, _] = fold(rec.target(), u64::from(groups) * u64::from(columns) * u64::from(n_tokens));
    let grid = [x, y_groups, if is_scalar { splits.div_ceil(8) } else { splits }];
    // The CPU's kernel stores those of all rows before it reads any.
    let stores = state.has_runs() && has_keys && rec.target().is_gpu();
    let mut decode = |y: &Tensor| {
        let operands = [state.tensor(), &table, &weight, qkv, sinks.unwrap_or(qkv), &cached.k, v, y];
        if !stores {
            return rec.dispatch_as(tier, kernel, variant, &constants, params, &operands, grid);
        }
        for (store, grid) in [(STORES_ONLY, [x, y_groups, 1]), (HAS_STORED, grid)] {
            let constants = [&constants[..], &[("STORE", f64::from(store))]].concat();
            rec.dispatch_as(tier, kernel, variant, &constants, params, &operands, grid)?;
        }
        Ok(())
    };
    if splits == 1 {
        return decode(y);
    }
    let parts = Tensor::temporary("parts", &[n_tokens * n_heads, splits, value_dim + 4], DType::F32)?;
    decode(&parts)?;
    let params = AttentionParams { head_dim: value_dim, ..params };
    let grid = fold(rec.target(), u64::from(n_tokens * n_heads * (value_dim / 4)).div_ceil(64));
    rec.dispatch(&shaders::ATTENTION_MERGE, None, &[], params, &[state.tensor(), &parts, y], grid)
}

/// How attention of many rows is taken.
#[derive(Clone, Copy, Debug)]
struct AttentionPlan {
    kernel: &'static KernelOf<AttentionParams>,
    tier: Tier,
    kind: KvType,
    /// Rows of a tile.
    tile_rows: u32,
}

impl AttentionPlan {
    /// By `attention_prefill`, for queries that see up to so many keys: more than one invocation of the `scalar` tier walks
    /// take the baseline.
    fn prefill(target: &Target, kind: KvType, n_keys: u32, head_dim: u32) -> AttentionPlan {
        let kernel = &shaders::ATTENTION_PREFILL;
        let tier = match target.tier_for(kernel, Some(kind.variant())) {
            Tier::Scalar if n_keys > scalar_part(head_dim, 0) => Tier::Baseline,
            tier => tier,
        };
        AttentionPlan { kernel, tier, kind, tile_rows: if tier == Tier::Scalar { SCALAR_ROWS } else { TILE_ROWS } }
    }

    /// By `attention_half`, if the target rounds to half precision by matrices and the shader has room for such heads.
    fn half(target: &Target, kind: KvType, config: &AttentionConfig) -> Option<AttentionPlan> {
        let head_dim = config.head_dim;
        let kernel = &shaders::ATTENTION_HALF;
        let tier = target.tier_for(kernel, Some(kind.variant()));
        let fits = head_dim.is_multiple_of(16) && head_dim <= MAX_HALF_DIM && config.values_from.is_none();
        let has_room = (16..=64).contains(&target.limits().max_subgroup);
        (tier.matrix_size().is_some() && fits && has_room).then_some(AttentionPlan {
            kernel,
            tier,
            kind,
            tile_rows: HALF_ROWS,
        })
    }

    /// Records it for queries that see at most so many keys each, with values of this size.
    fn record(
        self,
        rec: &mut Recorder,
        params: AttentionParams,
        [n_keys, value_dim]: [u32; 2],
        others: &[(&'static str, f64)],
        operands: &[&Tensor; 6],
    ) -> Result<(), Error> {
        let AttentionParams { n_tokens, n_heads, n_kv_heads, head_dim, n_tiles, .. } = params;
        let n_groups = u64::from(n_tiles) * u64::from(n_kv_heads);
        let columns = value_dim.div_ceil(COLUMNS);
        let (constants, n_groups) = match self.tier {
            Tier::Scalar => (vec![("ROWS", self.tile_rows)], n_groups.div_ceil(8)),
            tier if tier.matrix_size().is_some() => {
                (vec![("HEAD_DIM", head_dim), ("SUBGROUP", rec.target().limits().max_subgroup)], n_groups)
            }
            _ => (vec![("PARTS", head_dim.div_ceil(64))], n_groups * u64::from(columns)),
        };
        let constants = constants.into_iter().map(|(name, value)| (name, f64::from(value)));
        let constants: Vec<_> = constants.chain(others.iter().copied()).collect();
        // Of scores and of values.
        let operations = 2 * operations(n_tokens, n_heads * head_dim, n_keys);
        for part in grid_parts(rec.target(), n_groups, operations) {
            let params = AttentionParams { first_group: part.first, ..params };
            let variant = Some(self.kind.variant());
            rec.dispatch_as(self.tier, self.kernel, variant, &constants, params, operands, part.grid)?;
        }
        Ok(())
    }
}

/// Sequences packed one after the other, cut into tiles of rows that an invocation or workgroup processes together. A
/// tile has rows of only one sequence, counted from the sequence's start, so that results do not depend on what else
/// is packed with it.
#[derive(Clone, Debug)]
pub struct PackedTiles {
    /// First row, end of rows, first key and end of keys of each tile, `[tiles, 4]`; unused tiles are empty.
    table: Tensor,
    max_len: u32,
    share: u32,
    plan: AttentionPlan,
}

impl PackedTiles {
    /// A table for up to `max_sequences` sequences of up to `max_len` tokens each, `n_tokens` together.
    ///
    /// # Errors
    /// [`Error::Operand`] if the configuration is out of range, [`Error::Shape`] for more tiles than a tensor holds.
    pub fn declare(
        target: &Target,
        config: &AttentionConfig,
        [n_tokens, max_sequences, max_len]: [u32; 3],
    ) -> Result<PackedTiles, Error> {
        config.check()?;
        let plan = AttentionPlan::prefill(target, KvType::F32, max_len, config.head_dim);
        // Each sequence may leave a tile unfilled.
        let n_tiles = (n_tokens * config.share()).div_ceil(plan.tile_rows) + max_sequences;
        let table = Tensor::declare("tiles", Role::Activations, &[n_tiles, 4], DType::U32)?;
        Ok(PackedTiles { table, max_len, share: config.share(), plan })
    }

    /// The table, `[tiles, 4]` of U32.
    pub fn tensor(&self) -> &Tensor {
        &self.table
    }

    /// The table for sequences of these lengths, in their order.
    ///
    /// # Errors
    /// [`Error::Operand`] if a sequence is longer than declared, or all of them take more tiles.
    pub fn of(&self, lengths: &[u32]) -> Result<Vec<u32>, Error> {
        let all: Vec<[u32; 2]> = lengths.iter().map(|&len| [len; 2]).collect();
        self.of_seen(&all)
    }

    /// The table for sequences of which only so many first tokens are seen, by all of their tokens: pairs of a length
    /// and this number.
    ///
    /// # Errors
    /// As [`PackedTiles::of`]; [`Error::Operand`] if a sequence has a token but none that is seen.
    pub fn of_seen(&self, lengths: &[[u32; 2]]) -> Result<Vec<u32>, Error> {
        let n_rows = self.plan.tile_rows;
        let mut table = Vec::with_capacity(self.table.len());
        let mut first_token = 0;
        for &[len, seen] in lengths {
            if len > self.max_len {
                return Err(wrong("tiles", &format!("sequences of up to {} tokens", self.max_len), &len));
            }
            if seen > len || (seen == 0 && len > 0) {
                return Err(wrong("tiles", &format!("1 to {len} seen tokens"), &seen));
            }
            let [first_row, end_row] = [first_token, first_token + len].map(|token| token * self.share);
            for row in (first_row..end_row).step_by(n_rows as usize) {
                table.extend([row, end_row.min(row + n_rows), first_token, first_token + seen]);
            }
            first_token += len;
        }
        if table.len() > self.table.len() {
            let expected = format!("sequences that take up to {} tiles", self.table.len() / 4);
            return Err(wrong("tiles", &expected, &(table.len() / 4)));
        }
        table.resize(self.table.len(), 0);
        Ok(table)
    }

    /// The table for one query of each sequence of these lengths, for [`cross_attention`].
    ///
    /// # Errors
    /// As [`PackedTiles::of`].
    pub fn of_one_query(&self, lengths: &[u32]) -> Result<Vec<u32>, Error> {
        let mut table = Vec::with_capacity(self.table.len());
        let mut first_key = 0;
        for (i, &len) in (0..).zip(lengths) {
            if len > self.max_len {
                return Err(wrong("tiles", &format!("sequences of up to {} tokens", self.max_len), &len));
            }
            let [first_row, end_row] = [i, i + 1].map(|query: u32| query * self.share);
            for row in (first_row..end_row).step_by(self.plan.tile_rows as usize) {
                table.extend([row, end_row.min(row + self.plan.tile_rows), first_key, first_key + len]);
            }
            first_key += len;
        }
        if table.len() > self.table.len() {
            let expected = format!("sequences that take up to {} tiles", self.table.len() / 4);
            return Err(wrong("tiles", &expected, &(table.len() / 4)));
        }
        table.resize(self.table.len(), 0);
        Ok(table)
    }

    fn check_share(&self, config: &AttentionConfig) -> Result<(), Error> {
        match self.share == config.share() {
            true => Ok(()),
            false => {
                let expected = format!("a table for {} heads that share keys", config.share());
                Err(wrong("tiles", &expected, &self.share))
            }
        }
    }
}

/// Records attention of packed sequences, each with itself alone. Shader: `shaders/attention_prefill.wgsl`.
///
/// # Shapes
/// `biases`: `[2 R + 1, H]`, added to a head's score of a key that is -R to R tokens behind its query; keys farther away have
/// the first or the last; `qkv`: `[T, (H + 2 Hkv) D]`, a token's queries, keys and values; `y`: `[T, H D]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the configuration, [`Error::Operand`] if that is out of range.
pub fn attention_packed(
    rec: &mut Recorder,
    tiles: &PackedTiles,
    config: &AttentionConfig,
    biases: Option<&Tensor>,
    qkv: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    config.check()?;
    if let Some(from) = config.values_from {
        return Err(wrong("values_from", "none: packed values are apart", &from));
    }
    let AttentionConfig { n_heads, n_kv_heads, head_dim, .. } = *config;
    let [n_tokens, _] = y.dims2("attention", "y")?;
    y.expect_shape("attention", "y", &[n_tokens, n_heads * head_dim])?;
    qkv.expect_shape("attention", "qkv", &[n_tokens, (n_heads + 2 * n_kv_heads) * head_dim])?;
    tiles.check_share(config)?;
    let n_distances = match biases {
        None => 0,
        Some(biases) => {
            let [n, _] = biases.dims2("attention", "biases")?;
            biases.expect_shape("attention", "biases", &[n, n_heads])?;
            if n % 2 == 0 {
                return Err(wrong("biases", "an odd number of rows", &n));
            }
            n
        }
    };
    let quads = head_dim / 4;
    let stride = (n_heads + 2 * n_kv_heads) * quads;
    let params = AttentionParams {
        flags: config.flags() | PACKED,
        query_stride: stride,
        key_stride: stride,
        head_stride: quads,
        key_start: n_heads * quads,
        value_start: (n_heads + n_kv_heads) * quads,
        n_tiles: (tiles.table.len() / 4) as u32,
        reach: n_distances / 2,
        ..config.params(n_tokens, KvType::F32, [n_tokens; 2])
    };
    let words = qkv.words();
    let constants: Vec<_> = biases.map(|_| ("BIASES", 1.0)).into_iter().collect();
    let operands = [&tiles.table, qkv, &words, &words, biases.unwrap_or(qkv), y];
    tiles.plan.record(rec, params, [tiles.max_len, head_dim], &constants, &operands)
}

/// Records attention of one query of each packed sequence, which sees all of its keys. The table of `tiles` is that of
/// [`PackedTiles::of_one_query`]. Shader: `shaders/attention_prefill.wgsl`.
///
/// # Shapes
/// `q`: `[B, H D]`; `kv`: `[T, 2 Hkv D]`, a row's keys and values; `y`: `[B, H D]`.
/// # Errors
/// As [`attention_packed`]; [`Error::Operand`] for causal attention, or a window.
pub fn cross_attention(
    rec: &mut Recorder,
    tiles: &PackedTiles,
    config: &AttentionConfig,
    q: &Tensor,
    kv: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    config.check()?;
    let AttentionConfig { n_heads, n_kv_heads, head_dim, window, values_from, causal, .. } = *config;
    if causal || window.is_some() || values_from.is_some() {
        return Err(wrong("config", "queries that see all keys, and values apart from keys", &"another"));
    }
    let ([n_queries, _], [n_keys, _]) = (y.dims2("attention", "y")?, kv.dims2("attention", "kv")?);
    for (operand, tensor) in [("y", y), ("q", q)] {
        tensor.expect_shape("attention", operand, &[n_queries, n_heads * head_dim])?;
    }
    kv.expect_shape("attention", "kv", &[n_keys, 2 * n_kv_heads * head_dim])?;
    tiles.check_share(config)?;
    let quads = head_dim / 4;
    let params = AttentionParams {
        flags: config.flags() | PACKED,
        key_stride: 2 * n_kv_heads * quads,
        head_stride: quads,
        value_start: n_kv_heads * quads,
        n_tiles: (tiles.table.len() / 4) as u32,
        ..config.params(n_queries, KvType::F32, [n_keys; 2])
    };
    let words = kv.words();
    tiles.plan.record(rec, params, [tiles.max_len, head_dim], &[], &[&tiles.table, q, &words, &words, q, y])
}

/// Rows of a tile of `attention_prefill`, [`TILE_ROWS`], for the `scalar` tier.
const SCALAR_ROWS: u32 = 8;
/// The same of `attention_half`, and the largest head that it has registers for.
const HALF_ROWS: u32 = 64;
const MAX_HALF_DIM: u32 = 128;

/// Most parts of the keys, and what their lengths are multiples of, for `groups` workgroups to each part. A pass uses as
/// many parts as its keys fill, so that a short text costs nothing in a long cache.
fn splits(capacity: u32, groups: u32) -> (u32, u32) {
    /// Keys of a tile.
    const TILE: u32 = 64;
    /// What one workgroup walks before a second dispatch pays.
    const LONGEST: u32 = 256;
    /// Workgroups of 64 that occupy a large GPU.
    const ENOUGH: u32 = 512;
    let splits = if capacity > LONGEST { capacity.div_ceil(TILE).min(ENOUGH.div_ceil(groups)) } else { 1 };
    (splits, TILE)
}

/// Keys of a tile in the `scalar` tier.
const SCALAR_TILE: u32 = 8;

/// Keys of a sequence at most: how they are split must not depend on how many slots sequences share.
fn most_keys(state: &StepState, slots: u32, cached: &CachedKeys) -> u32 {
    if state.is_shared() { cached.capacity } else { slots.min(cached.capacity) }
}

/// The same for the `scalar` tier, where a part is one lane of a processor's vector: two vectors for each key/value head
/// once a cache is long enough to pay for a second dispatch, and more where an invocation could not walk its part to the
/// end. `norm_rounds`: rounds that the squares of all queries and keys take.
fn scalar_splits(slots: u32, head_dim: u32, norm_rounds: u32) -> (u32, u32) {
    const LONGEST: u32 = 512;
    let splits = if slots > LONGEST { 16 } else { 1 };
    // Heads are made quad by quad, and those of a block see its other quads too.
    let own = norm_rounds.saturating_add(16 * head_dim);
    (splits.max(slots.div_ceil(scalar_part(head_dim, own))), SCALAR_TILE)
}

/// Most keys that one invocation walks after `own` rounds of other loops: for a tile, or two, it takes a loop over a head's
/// quads for keys and one for values.
fn scalar_part(head_dim: u32, own: u32) -> u32 {
    LOOP_ROUNDS.saturating_sub(own).max(LOOP_ROUNDS / 2) / (head_dim / 2 + 1) * SCALAR_TILE
}
