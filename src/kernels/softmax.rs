//! Softmax of rows.

use super::{by_row, fold};
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::params::SoftmaxParams;
use crate::tensor::Tensor;

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
    let params = SoftmaxParams { n_rows, dim };
    rec.dispatch_as(tier, &shaders::SOFTMAX, None, &[], params, &[x, y], grid)
}
