//! The largest elements of each row.

use bytemuck::{Pod, Zeroable};

use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::Tensor;

/// Mirrors `Params` in `shaders/top_k.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct TopKParams {
    pub dim: u32,
    pub k: u32,
    pub _pad: [u32; 2],
}

/// Records the k largest elements of each row of `x` in falling order, lowest index first among equals; a row with a NaN
/// or an infinity has [`NON_FINITE`](super::NON_FINITE) as its first id. Shader: `shaders/top_k.wgsl`.
///
/// # Shapes
/// `x`: `[R, V]`; `values`, `ids`: `[R, k]`.
/// # Errors
/// [`Error::Shape`] if `values` or `ids` disagree, [`Error::Operand`] if k exceeds V.
pub fn top_k(rec: &mut Recorder, x: &Tensor, values: &Tensor, ids: &Tensor) -> Result<(), Error> {
    let [n_rows, dim] = x.dims2("top_k", "x")?;
    let [_, k] = values.dims2("top_k", "values")?;
    values.expect_shape("top_k", "values", &[n_rows, k])?;
    ids.expect_shape("top_k", "ids", &[n_rows, k])?;
    if k > dim {
        return Err(Error::Operand {
            kernel: "top_k",
            operand: "values",
            expected: format!("at most the {dim} elements of a row"),
            found: format!("k = {k}"),
        });
    }
    let params = TopKParams { dim, k, _pad: [0; 2] };
    rec.dispatch(&shaders::TOP_K, None, &[], params, &[x, values, ids], [n_rows, 1, 1])
}
