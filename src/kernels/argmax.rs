//! Index of the largest element of each row.

use super::fold;
use crate::dtype::DType;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::params::{ArgmaxMergeParams, ArgmaxParams};
use crate::tensor::Tensor;

/// Elements that one workgroup searches.
pub const ARGMAX_CHUNK: u32 = 2048;

/// Records `ids[r] = argmax over v of x[r, v]`, the lowest index among equals, or
/// [`NON_FINITE`](super::NON_FINITE) if the row holds a NaN or an infinity. Two dispatches: `shaders/argmax.wgsl` finds
/// the best of each chunk, `shaders/argmax_merge.wgsl` the best of those.
///
/// # Shapes
/// `x`: `[R, V]`; `ids`: `[R]`.
/// # Errors
/// [`Error::Shape`] if `ids` disagrees with `x`.
pub fn argmax(rec: &mut Recorder, x: &Tensor, ids: &Tensor) -> Result<(), Error> {
    let [n_rows, dim] = x.dims2("argmax", "x")?;
    ids.expect_shape("argmax", "ids", &[n_rows])?;
    let n_chunks = dim.div_ceil(ARGMAX_CHUNK);
    let best = Tensor::temporary("argmax.best", &[n_rows, n_chunks, 2], DType::U32)?;
    let params = ArgmaxParams { dim, chunk: ARGMAX_CHUNK, n_chunks, n_rows };
    let grid = fold(rec.target(), u64::from(n_rows) * u64::from(n_chunks));
    rec.dispatch(&shaders::ARGMAX, None, &[], params, &[x, &best], grid)?;
    let params = ArgmaxMergeParams { n_chunks, n_rows };
    let grid = fold(rec.target(), n_rows.into());
    rec.dispatch(&shaders::ARGMAX_MERGE, None, &[], params, &[&best, ids], grid)
}
