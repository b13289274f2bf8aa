//! Attention with a key/value cache.

use bytemuck::{Pod, Zeroable};

use super::linear::operations;
use super::{LOOP_ROUNDS, StepState, runs};
use crate::dtype::DType;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders::{self, Tier};
use crate::tensor::Tensor;

/// Mirrors `Params` in `shaders/attention_decode.wgsl`, `shaders/attention_prefill.wgsl` and
/// `shaders/attention_merge.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct AttentionParams {
    pub n_tokens: u32,
    pub n_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim: u32,
    pub capacity: u32,
    pub window: u32,
    pub scale: f32,
    pub soft_cap: f32,
    pub causal: u32,
    pub splits: u32,
    pub step: u32,
    pub first_group: u32,
}

/// Shape of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// H, query heads; a multiple of `n_kv_heads`.
    pub n_heads: u32,
    /// Hkv, key/value heads.
    pub n_kv_heads: u32,
    /// D, size of a head: a multiple of 4 up to 256.
    pub head_dim: u32,
    /// Keys that a query sees, itself included; all if `None`. Only causal attention has a window.
    pub window: Option<u32>,
    /// Factor of the scores, usually `head_dim^-1/2`.
    pub scale: f32,
    /// Bound that scores approach, `cap * tanh(score / cap)`; none if `None`.
    pub soft_cap: Option<f32>,
    /// Whether a query sees no key behind its own. Otherwise it sees all up to the pass's last token, as in encoders.
    pub causal: bool,
}

/// Records attention of the pass's queries with cached keys, with a streaming softmax. A few tokens take one dispatch of
/// `shaders/attention_decode.wgsl`, and a second one, `shaders/attention_merge.wgsl`, if the cache is long enough to be cut
/// into parts; more tokens take `shaders/attention_prefill.wgsl`.
///
/// # Shapes
/// `q`, `y`: `[T, H * D]`; `k`, `v`: `[Hkv, S, D]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the configuration, [`Error::Operand`] if that is out of range.
pub fn attention(
    rec: &mut Recorder,
    state: &StepState,
    config: &AttentionConfig,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    /// From here on there are rows enough to keep a device busy without cutting the keys.
    const PREFILL_TOKENS: u32 = 8;
    let AttentionConfig { n_heads, n_kv_heads, head_dim, window, scale, soft_cap, causal } = *config;
    let operand = |operand, expected: &str, found: &dyn ToString| Error::Operand {
        kernel: "attention",
        operand,
        expected: expected.into(),
        found: found.to_string(),
    };
    if head_dim == 0 || !head_dim.is_multiple_of(4) || head_dim > 256 {
        return Err(operand("head_dim", "a multiple of 4 up to 256", &head_dim));
    }
    if n_heads == 0 || n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) {
        return Err(operand("n_kv_heads", "a divisor of n_heads", &n_kv_heads));
    }
    if let Some(cap) = soft_cap.filter(|cap| !cap.is_normal() || *cap < 0.0) {
        return Err(operand("soft_cap", "a positive number", &cap));
    }
    if let (false, Some(window)) = (causal, window) {
        return Err(operand("window", "none where attention is not causal", &window));
    }
    let [n_tokens, _] = q.dims2("attention", "q")?;
    let &[_, capacity, _] = k.shape() else {
        return Err(operand("k", "a tensor of three dimensions", &k.shape().len()));
    };
    q.expect_shape("attention", "q", &[n_tokens, n_heads * head_dim])?;
    k.expect_shape("attention", "k", &[n_kv_heads, capacity, head_dim])?;
    v.expect_shape("attention", "v", &[n_kv_heads, capacity, head_dim])?;
    y.expect_shape("attention", "y", &[n_tokens, n_heads * head_dim])?;

    let is_scalar = |kernel, rec: &Recorder| rec.device().tier_for(kernel, None) == Tier::Scalar;
    let scalar_prefill = is_scalar(&shaders::ATTENTION_PREFILL, rec);
    let scalar_decode = is_scalar(&shaders::ATTENTION_DECODE, rec);
    let n_rows = n_tokens * (n_heads / n_kv_heads); // that share a key/value head
    let rows = n_rows.min(4);
    let mut params = AttentionParams {
        n_tokens,
        n_heads,
        n_kv_heads,
        head_dim,
        capacity,
        window: window.unwrap_or(0),
        scale,
        soft_cap: soft_cap.unwrap_or(0.0),
        causal: causal.into(),
        splits: 1,
        step: 1,
        first_group: 0,
    };
    let constants = [("ROWS", f64::from(rows))];
    // A cache that is too long for one invocation is cut whatever the number of tokens.
    if n_tokens >= PREFILL_TOKENS && !(scalar_prefill && capacity > scalar_part(head_dim)) {
        let (constants, axis, grid) = if scalar_prefill {
            // Eight if there are enough for all invocations of two workgroups, else as decoding takes them.
            let rows = if n_rows / 8 * n_kv_heads >= 16 { 8 } else { rows };
            ([("ROWS", f64::from(rows))], 0, [(n_rows.div_ceil(rows) * n_kv_heads).div_ceil(8), 1, 1])
        } else {
            ([("PARTS", f64::from(head_dim.div_ceil(64)))], 1, [n_kv_heads, n_rows.div_ceil(16), 1])
        };
        // Of scores and of values, if the cache is full.
        let operations = 2 * operations(n_tokens, n_heads * head_dim, capacity);
        for run in runs(rec.device(), grid, axis, operations) {
            params.first_group = run.first;
            let operands = [state.tensor(), q, k, v, y];
            rec.dispatch(&shaders::ATTENTION_PREFILL, None, &constants, params, &operands, run.grid)?;
        }
        return Ok(());
    }
    let fours = n_rows.div_ceil(rows);
    (params.splits, params.step) =
        if scalar_decode { scalar_splits(capacity, head_dim) } else { splits(capacity, n_kv_heads * fours) };
    let grid = [n_kv_heads, if scalar_decode { params.splits.div_ceil(8) } else { params.splits }, fours];
    let mut decode =
        |y| rec.dispatch(&shaders::ATTENTION_DECODE, None, &constants, params, &[state.tensor(), q, k, v, y], grid);
    if params.splits == 1 {
        return decode(y);
    }
    let parts = Tensor::temporary("parts", &[n_tokens * n_heads, params.splits, head_dim + 4], DType::F32)?;
    decode(&parts)?;
    let grid = [(n_tokens * n_heads * (head_dim / 4)).div_ceil(64), 1, 1];
    rec.dispatch(&shaders::ATTENTION_MERGE, None, &[], params, &[state.tensor(), &parts, y], grid)
}

/// Most parts of the keys, and what their lengths are multiples of, for `groups` workgroups to each part. A pass uses as
/// many parts as its keys fill, so that a short text costs nothing in a long cache.
fn splits(capacity: u32, groups: u32) -> (u32, u32) {
    /// Keys of a tile.
    const TILE: u32 = 64;
    /// What one workgroup walks before a second dispatch pays.
    const LONGEST: u32 = 256;
    /// Workgroups of 64 that occupy a large GPU.
    const ENOUGH: u32 = 512;
    (capacity.div_ceil(LONGEST).min(ENOUGH.div_ceil(groups)), TILE)
}

/// Keys of a tile in the `scalar` tier.
const SCALAR_TILE: u32 = 8;

/// The same for the `scalar` tier, where a part is one lane of a processor's vector: two vectors for each key/value head
/// once a cache is long enough to pay for a second dispatch, and more where an invocation could not walk its part to the
/// end.
fn scalar_splits(capacity: u32, head_dim: u32) -> (u32, u32) {
    const LONGEST: u32 = 512;
    let splits = if capacity > LONGEST { 16 } else { 1 };
    (splits.max(capacity.div_ceil(scalar_part(head_dim))), SCALAR_TILE)
}

/// Most keys that one invocation walks: for a tile, or two, it takes a loop over a head's quads for keys and one for
/// values.
fn scalar_part(head_dim: u32) -> u32 {
    LOOP_ROUNDS / (head_dim / 2 + 1) * SCALAR_TILE
}
