//! Rotary position embedding.

use std::f64::consts::TAU;

use super::{CachedKeys, StepState, fold};
use crate::dtype::WeightType;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders::constants::{heads, rotate};
use crate::shaders::params::{RopeKvParams, RopePackedParams, RopeParams};
use crate::shaders::{self, Kernel, Tier};
use crate::tensor::Tensor;

/// Which elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(2 i, 2 i + 1)`, as in GGUF files of the llama architecture.
    Interleaved,
    /// `(i, i + rot_dims / 2)`, as in Hugging Face files.
    Halves,
}

impl RopeStyle {
    /// The value in kernels' params.
    fn code(self) -> u32 {
        match self {
            RopeStyle::Interleaved => 0,
            RopeStyle::Halves => rotate::HALVES,
        }
    }
}

/// How angles are stretched for contexts longer than the model was first trained on.
#[derive(Clone, Debug, PartialEq, Default)]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    None,
    /// All positions divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Each frequency divided by a factor of its own, as GGUF's `rope_freqs.weight` states them.
    Factors(Vec<f32>),
    /// Llama 3: low frequencies are divided by `factor`, high ones kept, those between blended.
    Llama3 {
        /// Divides the low frequencies.
        factor: f64,
        /// `original_max_seq_len / low_freq_factor` is the wavelength above which a frequency is low.
        low_freq_factor: f64,
        /// `original_max_seq_len / high_freq_factor` is the wavelength below which a frequency is high.
        high_freq_factor: f64,
        /// Context length before scaling.
        original_max_seq_len: f64,
    },
    /// LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency divided by a factor of its own, which is another one
    /// for all positions of a sequence that outgrows the original context; and rotated elements grow.
    Long {
        /// Factors of sequences within the original context, one for each pair.
        short: Vec<f32>,
        /// Those of longer ones.
        long: Vec<f32>,
        /// Context length before scaling.
        original_max_seq_len: u32,
        /// What rotated elements are multiplied by.
        magnitude: f64,
    },
    /// YaRN (Peng et al. 2023, arXiv:2309.00071): low frequencies are divided by `factor`, high ones kept, those between
    /// blended by their place, and the rotated elements grow.
    Yarn {
        /// Divides the low frequencies.
        factor: f64,
        /// Turns over the original context from which a frequency is high.
        beta_fast: f64,
        /// Turns up to which it is low.
        beta_slow: f64,
        /// Context length before scaling.
        original_max_seq_len: f64,
        /// Whether the places between which frequencies are blended are rounded outwards to whole pairs.
        truncate: bool,
        /// What rotated elements are multiplied by.
        magnitude: f64,
    },
}

/// Parameters of the embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Elements of a head that are rotated; even, at most the head's size.
    pub rot_dims: u32,
    /// Base of the frequencies.
    pub theta: f64,
    /// Pairing.
    pub style: RopeStyle,
    /// Stretching.
    pub scaling: RopeScaling,
    /// How queries grow with their position, if they do.
    pub query_growth: Option<QueryGrowth>,
}

/// Queries grow with their position, `1 + beta ln(1 + floor(pos / length))`, as in Llama 4 and Ministral 3.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// How much.
    pub beta: f64,
    /// Positions after which a step is taken.
    pub length: u32,
}

impl QueryGrowth {
    /// The factor of a position.
    fn at(self, pos: u32) -> f64 {
        1.0 + self.beta * f64::from(1 + pos / self.length.max(1)).ln()
    }
}

impl RopeConfig {
    /// A plain rotation.
    pub const fn new(rot_dims: u32, theta: f64, style: RopeStyle) -> RopeConfig {
        RopeConfig { rot_dims, theta, style, scaling: RopeScaling::None, query_growth: None }
    }

    /// Rows of the table for positions below `n_pos`; see [`rope_table`].
    pub fn n_rows(&self, n_pos: u32) -> u32 {
        let of_keys = n_pos.saturating_add(self.long_row(n_pos));
        of_keys.saturating_mul(if self.query_growth.is_some() { 2 } else { 1 })
    }

    /// The row of position 0 for a sequence of so many tokens in all, in a table for positions below `n_pos`.
    pub fn first_row(&self, n_tokens: u32, n_pos: u32) -> u32 {
        match self.scaling {
            RopeScaling::Long { original_max_seq_len, .. } if n_tokens > original_max_seq_len => self.long_row(n_pos),
            _ => 0,
        }
    }

    /// The row where those of long sequences begin.
    fn long_row(&self, n_pos: u32) -> u32 {
        match self.scaling {
            RopeScaling::Long { original_max_seq_len, .. } => original_max_seq_len.min(n_pos),
            _ => 0,
        }
    }

    /// The row of a table where those of queries begin.
    pub(crate) fn query_row(&self, table: &Tensor) -> u32 {
        if self.query_growth.is_some() { table.shape()[0] / 2 } else { 0 }
    }
}

/// The table of `(cos, sin)`, times the magnitude, for positions `0..n_pos`: `[n_rows, rot_dims / 2, 2]`, computed in f64.
/// A row is a position; where long sequences have other angles, those come after the rows of short ones, and where queries
/// grow, their rows come last.
pub fn rope_table(config: &RopeConfig, n_pos: u32) -> Vec<f32> {
    let magnitude = match config.scaling {
        RopeScaling::Yarn { magnitude, .. } | RopeScaling::Long { magnitude, .. } => magnitude,
        _ => 1.0,
    };
    let mut table = Vec::new();
    for growth in [None].into_iter().chain(config.query_growth.map(Some)) {
        for (n_pos, is_long) in [(config.long_row(n_pos), false), (n_pos, true)] {
            let frequencies: Vec<f64> = (0..config.rot_dims / 2).map(|i| frequency(config, i, is_long)).collect();
            for pos in 0..n_pos {
                let grown = growth.map_or(1.0, |growth| growth.at(pos));
                let angles = frequencies.iter().map(|frequency| f64::from(pos) * frequency);
                let pairs = angles.flat_map(|angle| [angle.cos(), angle.sin()]);
                table.extend(pairs.map(|value| (magnitude * grown * value) as f32));
            }
        }
    }
    table
}

/// Rows of the table for patches of a picture, whose positions are time, row and column: `[n, rot_dims / 2, 2]`. Pairs take
/// them in turns, as far as the section of each reaches, and the rest is time's (Qwen3-VL 2025, arXiv:2511.21631,
/// interleaved M-RoPE).
pub(crate) fn mrope_rows(config: &RopeConfig, sections: [u32; 3], positions: &[[u32; 3]]) -> Vec<f32> {
    let axis = |i: u32| match i % 3 {
        0 => 0,
        axis if i / 3 < sections[axis as usize] => axis as usize,
        _ => 0,
    };
    let pairs: Vec<(usize, f64)> = (0..config.rot_dims / 2).map(|i| (axis(i), frequency(config, i, false))).collect();
    let turned = |at: &[u32; 3]| {
        let at = *at;
        pairs.iter().flat_map(move |&(axis, frequency)| {
            let angle = f64::from(at[axis]) * frequency;
            [angle.cos() as f32, angle.sin() as f32]
        })
    };
    positions.iter().flat_map(turned).collect()
}

/// By how much pair `i` turns from one position to the next; in a long sequence, where that makes a difference.
fn frequency(config: &RopeConfig, i: u32, is_long: bool) -> f64 {
    let plain = config.theta.powf(-f64::from(2 * i) / f64::from(config.rot_dims));
    match &config.scaling {
        RopeScaling::None => plain,
        RopeScaling::Linear { factor } => plain / factor,
        RopeScaling::Factors(factors) => plain / factors.get(i as usize).copied().map_or(1.0, f64::from),
        RopeScaling::Long { short, long, .. } => {
            let factors = if is_long { long } else { short };
            plain / factors.get(i as usize).copied().map_or(1.0, f64::from)
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_seq_len } => {
            // Turns over the original context tell how high a frequency is; the blend is linear in them.
            let turns = original_max_seq_len * plain / TAU;
            let share = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
            share * plain + (1.0 - share) * plain / factor
        }
        &RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_seq_len, truncate, .. } => {
            // The pair that turns so often over the original context.
            let dims = f64::from(config.rot_dims);
            let pair_of = |turns: f64| dims * (original_max_seq_len / (turns * TAU)).ln() / (2.0 * config.theta.ln());
            let (fast, slow) = (pair_of(beta_fast), pair_of(beta_slow));
            let (fast, slow) = if truncate { (fast.floor(), slow.ceil()) } else { (fast, slow) };
            let (fast, slow) = (fast.max(0.0), slow.min(dims - 1.0));
            let width = if fast == slow { 0.001 } else { slow - fast };
            let share = 1.0 - ((f64::from(i) - fast) / width).clamp(0.0, 1.0);
            share * plain + (1.0 - share) * plain / factor
        }
    }
}

/// Refuses a pairing that does not fit the head, or a table that does not fit the pairing.
pub(super) fn check(kernel: &'static str, config: &RopeConfig, head_dim: u32, table: &Tensor) -> Result<(), Error> {
    let rot_dims = config.rot_dims;
    if !head_dim.is_multiple_of(2) || !rot_dims.is_multiple_of(2) || rot_dims == 0 || rot_dims > head_dim {
        return Err(Error::Operand {
            kernel,
            operand: "rot_dims",
            expected: format!("an even number up to the head's {head_dim}, itself even"),
            found: rot_dims.to_string(),
        });
    }
    let n_pos = table.shape()[0];
    table.expect_shape(kernel, "table", &[n_pos, rot_dims / 2, 2])
}

/// Records the rotation of heads at positions `pos..`. Shader: `shaders/rope.wgsl`.
///
/// # Shapes
/// `table`: `[S, rot_dims / 2, 2]` from [`rope_table`]; `x`, `y`: `[T, H, D]`.
/// # Errors
/// [`Error::Shape`] or [`Error::Operand`] if the operands disagree.
pub fn rope(
    rec: &mut Recorder,
    state: &StepState,
    config: &RopeConfig,
    table: &Tensor,
    x: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    let &[n_tokens, n_heads, head_dim] = x.shape() else {
        return Err(Error::Operand {
            kernel: "rope",
            operand: "x",
            expected: "a tensor of three dimensions".into(),
            found: format!("of shape {:?}", x.shape()),
        });
    };
    check("rope", config, head_dim, table)?;
    y.expect_shape("rope", "y", x.shape())?;
    let grid = fold(rec.target(), (x.len() as u64 / 2).div_ceil(64));
    let params = RopeParams { n_tokens, n_heads, head_dim, rot_dims: config.rot_dims, style: config.style.code() };
    rec.dispatch(&shaders::ROPE, None, &[], params, &[state.tensor(), table, x, y], grid)
}

/// How queries and keys are normalised, to mean square 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by itself, before it is rotated: Qwen3.
    Heads,
    /// Each head by itself, after it is rotated: Hunyuan.
    RotatedHeads,
    /// All queries of a token together, and all its keys, before they are rotated: OLMo 2.
    Whole,
    /// Each head by itself, before it is rotated, and each head of values, without weights: Gemma 4.
    HeadsAndValues,
}

impl QkNorm {
    /// The value of the override `NORM`; 0: no norm.
    fn code(norm: Option<QkNorm>) -> u32 {
        match norm {
            None => 0,
            Some(QkNorm::Heads) => heads::NORM_HEADS,
            Some(QkNorm::RotatedHeads) => heads::NORM_ROTATED,
            Some(QkNorm::Whole) => heads::NORM_WHOLE,
            Some(QkNorm::HeadsAndValues) => heads::NORM_VALUES,
        }
    }

    /// The norm of a code.
    pub(crate) fn of(code: u32) -> Option<QkNorm> {
        let all = [QkNorm::Heads, QkNorm::RotatedHeads, QkNorm::Whole, QkNorm::HeadsAndValues];
        all.into_iter().find(|&norm| QkNorm::code(Some(norm)) == code)
    }
}

/// What becomes of the heads of a projection before attention.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a> {
    /// H. 0 where there are keys and values alone.
    pub n_heads: u32,
    /// Hkv. 0 where there are queries alone.
    pub n_kv_heads: u32,
    /// D, a multiple of 2.
    pub head_dim: u32,
    /// Whether keys hold their values, so that no values are projected.
    pub keys_hold_values: bool,
    /// Columns of a projection before those of the queries, which are something else's; 0 where heads are packed.
    pub first_column: u32,
    /// How queries and keys are rotated, and the table of angles, `[S, rot_dims / 2, 2]`. `None`: they are not.
    pub rope: Option<(&'a RopeConfig, &'a Tensor)>,
    /// How queries and keys are normalised; the weights of queries and then those of keys, if there are any, `[2 D]` or for
    /// [`QkNorm::Whole`] `[(H + Hkv) D]`; and what is added to the mean square.
    pub norm: Option<(QkNorm, &'a Tensor, f32)>,
}

impl Heads<'_> {
    /// Columns of queries, keys and values side by side.
    pub(super) fn qkv_dim(&self) -> u32 {
        self.first_column + (self.n_heads + self.n_kv_heads + self.n_value_heads()) * self.head_dim
    }

    /// Heads of values.
    fn n_value_heads(&self) -> u32 {
        if self.keys_hold_values { 0 } else { self.n_kv_heads }
    }

    /// Refuses a table or weights that do not fit the heads.
    pub(super) fn check(&self, kernel: &'static str) -> Result<(), Error> {
        if let Some((config, table)) = self.rope {
            check(kernel, config, self.head_dim, table)?;
        } else if !self.head_dim.is_multiple_of(2) {
            let (expected, found) = ("an even number".into(), self.head_dim.to_string());
            return Err(Error::Operand { kernel, operand: "head_dim", expected, found });
        }
        match self.norm {
            Some((QkNorm::Whole, weight, _)) => {
                weight.expect_shape(kernel, "weight", &[(self.n_heads + self.n_kv_heads) * self.head_dim])
            }
            Some((_, weight, _)) => {
                let n_kinds = if self.n_kv_heads == 0 { 1 } else { 2 };
                weight.expect_shape(kernel, "weight", &[n_kinds * self.head_dim])
            }
            None => Ok(()),
        }
    }

    pub(super) fn rot_dims(&self) -> u32 {
        self.rope.map_or(0, |(config, _)| config.rot_dims)
    }

    pub(super) fn style(&self) -> u32 {
        self.rope.map_or(0, |(config, _)| config.style.code())
    }

    /// Table and weights; what stands for one that is not there is never read.
    pub(super) fn operands(&self, rec: &mut Recorder) -> Result<[Tensor; 2], Error> {
        let absent = rec.temporary("absent", &[2])?;
        let table = self.rope.map_or(&absent, |(_, table)| table).clone();
        Ok([table, self.norm.map_or(absent, |(_, weight, _)| weight.clone())])
    }

    /// The value of the override `NORM`.
    pub(super) fn constant(&self) -> (&'static str, f64) {
        ("NORM", f64::from(QkNorm::code(self.norm.map(|(norm, ..)| norm))))
    }

    /// Row of the table that queries have, counted from that of keys.
    pub(super) fn query_row(&self) -> u32 {
        self.rope.map_or(0, |(config, table)| config.query_row(table))
    }

    pub(super) fn eps(&self) -> f32 {
        self.norm.map_or(0.0, |(.., eps)| eps)
    }
}

/// Workgroups for so many heads in all.
fn head_groups(rec: &Recorder, kernel: &Kernel, variant: Option<WeightType>, n_heads: u64) -> [u32; 3] {
    // Heads of a workgroup of 64: an invocation each, or 16 of them for one.
    let of_group = match rec.target().tier_for(kernel, variant) {
        Tier::Scalar => 64,
        _ => 4,
    };
    fold(rec.target(), n_heads.div_ceil(of_group))
}

/// Records the split of a fused projection: queries, normalised and rotated, to `q`; keys, likewise, and values to the
/// cache at `pos..`. Shader: `shaders/rope_kv.wgsl`.
///
/// # Shapes
/// `qkv`: `[T, first + (H + 2 Hkv) * D]`, first and D multiples of 4; `q`: `[T, H * D]`. With queries alone the cache is that of
/// other heads, which stays as it is.
/// # Errors
/// [`Error::Shape`] or [`Error::Operand`] if the operands disagree.
pub fn rope_kv(
    rec: &mut Recorder,
    state: &StepState,
    heads: &Heads<'_>,
    qkv: &Tensor,
    q: &Tensor,
    cached: &CachedKeys,
) -> Result<(), Error> {
    let [n_tokens, _] = qkv.dims2("rope_kv", "qkv")?;
    q.expect_shape("rope_kv", "q", &[n_tokens, heads.n_heads * heads.head_dim])?;
    split_heads(rec, state, heads, qkv, q, cached)
}

/// As [`rope_kv`], of keys and values alone: `heads` has no query heads. So a decoder caches those of an encoder's output.
///
/// # Shapes
/// `kv`: `[T, first + 2 Hkv * D]`.
/// # Errors
/// As [`rope_kv`].
pub fn cache_kv(
    rec: &mut Recorder,
    state: &StepState,
    heads: &Heads<'_>,
    kv: &Tensor,
    cached: &CachedKeys,
) -> Result<(), Error> {
    if heads.n_heads > 0 || heads.n_kv_heads == 0 {
        let (expected, found) = ("keys and values alone".into(), format!("{} of queries", heads.n_heads));
        return Err(Error::Operand { kernel: "rope_kv", operand: "heads", expected, found });
    }
    // Never written.
    let absent = rec.temporary("absent", &[4])?;
    split_heads(rec, state, heads, kv, &absent, cached)
}

fn split_heads(
    rec: &mut Recorder,
    state: &StepState,
    heads: &Heads<'_>,
    qkv: &Tensor,
    q: &Tensor,
    cached: &CachedKeys,
) -> Result<(), Error> {
    let &Heads { n_heads, n_kv_heads, head_dim, .. } = heads;
    heads.check("rope_kv")?;
    for (operand, found) in [("head_dim", head_dim), ("first_column", heads.first_column)] {
        if !found.is_multiple_of(4) {
            let (expected, found) = ("a multiple of 4".into(), found.to_string());
            return Err(Error::Operand { kernel: "rope_kv", operand, expected, found });
        }
    }
    let [n_tokens, _] = qkv.dims2("rope_kv", "qkv")?;
    qkv.expect_shape("rope_kv", "qkv", &[n_tokens, heads.qkv_dim()])?;
    let slots = match n_kv_heads {
        0 => 1,
        n => cached.slots_for("rope_kv", [n, head_dim], heads.keys_hold_values)?,
    };
    let params = RopeKvParams {
        n_tokens,
        n_heads,
        n_kv_heads,
        head_dim,
        rot_dims: heads.rot_dims(),
        style: heads.style(),
        capacity: cached.capacity,
        eps: heads.eps(),
        query_row: heads.query_row(),
        first: heads.first_column,
        slots,
        n_value_heads: heads.n_value_heads(),
    };
    let (kernel, variant) = (&shaders::ROPE_KV, Some(cached.kind.variant()));
    let [table, weight] = heads.operands(rec)?;
    let n_all = u64::from(n_heads + n_kv_heads + heads.n_value_heads());
    let grid = head_groups(rec, kernel, variant, u64::from(n_tokens) * n_all);
    // Written by nobody where keys hold their values.
    let absent = rec.temporary_words("absent", &[4])?;
    let v = cached.v.as_ref().unwrap_or(&absent);
    let operands = [state.tensor(), &table, &weight, qkv, q, &cached.k, v];
    let constants: Vec<_> = [heads.constant()].into_iter().chain(state.constant()).collect();
    rec.dispatch(kernel, variant, &constants, params, &operands, grid)
}

/// Records the norm and the rotation of packed queries and keys, where they stand, by their tokens' positions; values stay
/// as they are, unless they have a norm of their own. Shader: `shaders/rope_packed.wgsl`.
///
/// # Shapes
/// `tokens`: `[T, 3]`, id, position and type of each token; `qkv`: `[T, (H + 2 Hkv) D]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the heads, [`Error::Operand`] if these do not fit the rotation, or for
/// [`QkNorm::Whole`], which cannot be taken in place.
pub fn rope_packed(rec: &mut Recorder, heads: &Heads<'_>, tokens: &Tensor, qkv: &Tensor) -> Result<(), Error> {
    let &Heads { n_heads, n_kv_heads, head_dim, .. } = heads;
    heads.check("rope_packed")?;
    if heads.first_column != 0 {
        return Err(Error::Operand {
            kernel: "rope_packed",
            operand: "first_column",
            expected: "0".into(),
            found: heads.first_column.to_string(),
        });
    }
    if let Some((norm @ QkNorm::Whole, ..)) = heads.norm {
        return Err(Error::Operand {
            kernel: "rope_packed",
            operand: "norm",
            expected: "one of each head of queries and keys".into(),
            found: format!("{norm:?}"),
        });
    }
    let [n_tokens, _] = qkv.dims2("rope_packed", "qkv")?;
    tokens.expect_shape("rope_packed", "tokens", &[n_tokens, 3])?;
    qkv.expect_shape("rope_packed", "qkv", &[n_tokens, heads.qkv_dim()])?;
    let params = RopePackedParams {
        n_tokens,
        n_heads,
        n_kv_heads,
        head_dim,
        rot_dims: heads.rot_dims(),
        style: heads.style(),
        eps: heads.eps(),
    };
    let kernel = &shaders::ROPE_PACKED;
    let [table, weight] = heads.operands(rec)?;
    let normed_values = match heads.norm {
        Some((QkNorm::HeadsAndValues, ..)) => n_kv_heads,
        _ => 0,
    };
    let n_changed = n_heads + n_kv_heads + normed_values;
    let grid = head_groups(rec, kernel, None, u64::from(n_tokens) * u64::from(n_changed));
    rec.dispatch(kernel, None, &[heads.constant()], params, &[tokens, &table, &weight, qkv], grid)
}
