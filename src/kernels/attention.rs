//! Attention with a key/value cache.

use bytemuck::{Pod, Zeroable};

use super::StepState;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::Tensor;

/// Mirrors `Params` in `shaders/attention.wgsl`.
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
    pub _pad: u32,
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
    /// Keys that a query sees, itself included; all if `None`.
    pub window: Option<u32>,
    /// Factor of the scores, usually `head_dim^-1/2`.
    pub scale: f32,
}

/// Records causal attention of the pass's queries with all cached keys up to their own position, with a streaming
/// softmax. Shader: `shaders/attention.wgsl`.
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
    let AttentionConfig { n_heads, n_kv_heads, head_dim, window, scale } = *config;
    let operand = |operand, expected: &str, found: u32| Error::Operand {
        kernel: "attention",
        operand,
        expected: expected.into(),
        found: found.to_string(),
    };
    if head_dim == 0 || !head_dim.is_multiple_of(4) || head_dim > 256 {
        return Err(operand("head_dim", "a multiple of 4 up to 256", head_dim));
    }
    if n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) {
        return Err(operand("n_kv_heads", "a divisor of n_heads", n_kv_heads));
    }
    let [n_tokens, _] = q.dims2("attention", "q")?;
    let &[_, capacity, _] = k.shape() else {
        return Err(operand("k", "a tensor of three dimensions", k.shape().len() as u32));
    };
    q.expect_shape("attention", "q", &[n_tokens, n_heads * head_dim])?;
    k.expect_shape("attention", "k", &[n_kv_heads, capacity, head_dim])?;
    v.expect_shape("attention", "v", &[n_kv_heads, capacity, head_dim])?;
    y.expect_shape("attention", "y", &[n_tokens, n_heads * head_dim])?;
    let params = AttentionParams {
        n_tokens,
        n_heads,
        n_kv_heads,
        head_dim,
        capacity,
        window: window.unwrap_or(0),
        scale,
        _pad: 0,
    };
    let operands = [state.tensor(), q, k, v, y];
    rec.dispatch(&shaders::ATTENTION, None, &[], params, &operands, [n_heads, n_tokens, 1])
}
