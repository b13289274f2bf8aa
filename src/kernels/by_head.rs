//! Rows of heads in the layout of a cache.

use super::fold;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::params::ByHeadParams;
use crate::tensor::Tensor;

/// Records `y[h, s] = x[s, h]` for the heads of each row, which makes projected keys or values what
/// [`attention`](super::attention) takes. Shader: `shaders/by_head.wgsl`.
///
/// # Shapes
/// `x`: `[S, H * D]`; `y`: `[H, S, D]`.
/// # Errors
/// [`Error::Shape`] if `x` disagrees with `y`, [`Error::Operand`] if `y` does not have three dimensions.
pub fn by_head(rec: &mut Recorder, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let &[n_heads, n_rows, head_dim] = y.shape() else {
        return Err(Error::Operand {
            kernel: "by_head",
            operand: "y",
            expected: "a tensor of three dimensions".into(),
            found: format!("of shape {:?}", y.shape()),
        });
    };
    x.expect_shape("by_head", "x", &[n_rows, n_heads * head_dim])?;
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(256));
    let params = ByHeadParams { n_rows, n_heads, head_dim };
    rec.dispatch(&shaders::BY_HEAD, None, &[], params, &[x, y], grid)
}
