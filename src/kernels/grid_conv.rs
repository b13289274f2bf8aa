//! Convolutions over the patches of a picture.

use super::fold;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::params::GridConvParams;
use crate::tensor::Tensor;

/// Most taps of a convolution: 7 x 7.
const MAX_GRID_TAPS: u32 = 49;

/// Records a gated convolution of each channel over the neighbours of patches: with `x[t] = b | g | v`,
/// `y[t] = g[t] * sum over i of weight[i] * (b * v)[neighbours[t, i]]`. Shader: `shaders/grid_conv.wgsl`.
///
/// # Shapes
/// `neighbours`: `[T, taps]` of U32, rows of `x`, or T and more for none; `x`: `[T, 3 C]`; `weight`: `[C, taps]`, 1 to 49
/// taps; `y`: `[T, C]`.
/// # Errors
/// [`Error::Shape`] if the operands disagree, [`Error::Operand`] for another number of taps.
pub fn grid_conv(
    rec: &mut Recorder,
    neighbours: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    const KERNEL: &str = "grid_conv";
    let ([n_patches, channels], [_, taps]) = (y.dims2(KERNEL, "y")?, weight.dims2(KERNEL, "weight")?);
    weight.expect_shape(KERNEL, "weight", &[channels, taps])?;
    if !(1..=MAX_GRID_TAPS).contains(&taps) {
        let expected = format!("1 to {MAX_GRID_TAPS} taps");
        return Err(Error::Operand { kernel: KERNEL, operand: "weight", expected, found: taps.to_string() });
    }
    neighbours.expect_shape(KERNEL, "neighbours", &[n_patches, taps])?;
    x.expect_shape(KERNEL, "x", &[n_patches, 3 * channels])?;
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(256));
    rec.dispatch(
        &shaders::GRID_CONV,
        None,
        &[],
        GridConvParams { n_patches, channels, taps },
        &[neighbours, x, weight, y],
        grid,
    )
}
