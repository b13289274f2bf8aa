//! Softmax of rows.

use bytemuck::{Pod, Zeroable};

use super::{by_row, fold};
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::Tensor;

/// Mirrors `Params` in `shaders/softmax.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct SoftmaxParams {
    pub n_rows: u32,
    pub dim: u32,
    pub _pad: [u32; 2],
}

/// Records the softmax of each row. Shader: `shaders/softmax.wgsl`.
///
/// # Shapes
/// `x`, `y`: `[R, C]`.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`.
pub fn softmax(rec: &mut Recorder, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let [n_rows, dim] = x.dims2("softmax", "x")?;
    y.expect_shape("softmax", "y", &[n_rows, dim])?;
    let (tier, rows) = by_row(rec.target(), &shaders::SOFTMAX, dim);
    let grid = fold(rec.target(), n_rows.div_ceil(rows).into());
    let params = SoftmaxParams { n_rows, dim, _pad: [0; 2] };
    rec.dispatch_as(tier, &shaders::SOFTMAX, None, &[], params, &[x, y], grid)
}
