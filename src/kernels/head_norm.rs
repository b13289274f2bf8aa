//! Normalisation of each head of packed queries and keys.

use bytemuck::{Pod, Zeroable};

use super::fold;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::Tensor;

/// Mirrors `Params` in `shaders/head_norm.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct HeadNormParams {
    pub n_tokens: u32,
    pub n_heads: u32,
    pub n_queries: u32,
    pub head_quads: u32,
    pub stride_quads: u32,
    pub eps: f32,
    pub _pad: [u32; 2],
}

/// Records the root-mean-square normalisation of each head of packed queries and keys where they stand; values stay as
/// they are. Shader: `shaders/head_norm.wgsl`.
///
/// # Shapes
/// `weight`: `[2, D]`, of queries and of keys; `qkv`: `[T, (H + 2 Hkv) D]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the heads, [`Error::Operand`] if D is no multiple of 4.
pub fn head_norm(
    rec: &mut Recorder,
    [n_heads, n_kv_heads, head_dim]: [u32; 3],
    weight: &Tensor,
    eps: f32,
    qkv: &Tensor,
) -> Result<(), Error> {
    let [n_tokens, _] = qkv.dims2("head_norm", "qkv")?;
    let stride = (n_heads + 2 * n_kv_heads) * head_dim;
    weight.expect_shape("head_norm", "weight", &[2, head_dim])?;
    qkv.expect_shape("head_norm", "qkv", &[n_tokens, stride])?;
    if !head_dim.is_multiple_of(4) {
        return Err(Error::Operand {
            kernel: "head_norm",
            operand: "qkv",
            expected: "heads of a multiple of 4".into(),
            found: head_dim.to_string(),
        });
    }
    let grid = fold(rec.device(), (u64::from(n_tokens) * u64::from(n_heads + n_kv_heads)).div_ceil(16));
    let params = HeadNormParams {
        n_tokens,
        n_heads: n_heads + n_kv_heads,
        n_queries: n_heads,
        head_quads: head_dim / 4,
        stride_quads: stride / 4,
        eps,
        _pad: [0; 2],
    };
    rec.dispatch(&shaders::HEAD_NORM, None, &[], params, &[weight, qkv], grid)
}
