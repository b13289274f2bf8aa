//! Normalisation of each token.

use super::{by_row, fold};
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::constants::{layer_norm, rms_norm};
use crate::shaders::params::{NormParams, RmsNormParams};
use crate::tensor::Tensor;

/// Records `y = weight * x / sqrt(mean(x²) + eps)`, one token at a time. Shader: `shaders/rms_norm.wgsl`.
///
/// # Shapes
/// `x`, `y`: `[T, C]`; `weight`: `[C]`.
/// # Errors
/// [`Error::Shape`] if `weight` or `y` disagrees with `x`.
pub fn rms_norm(rec: &mut Recorder, x: &Tensor, weight: &Tensor, y: &Tensor, eps: f32) -> Result<(), Error> {
    x.dims2("rms_norm", "x")?;
    y.expect_shape("rms_norm", "y", x.shape())?;
    rms(rec, x, weight, None, y, eps, 0)
}

/// As [`rms_norm`], of each group of neighbouring columns by itself.
///
/// # Shapes
/// `x`, `y`: `[T, C]`; `weight`: `[C]`.
/// # Errors
/// As [`rms_norm`], and [`Error::Operand`] if groups do not fill a row.
pub fn rms_norm_groups(
    rec: &mut Recorder,
    x: &Tensor,
    weight: &Tensor,
    n_groups: u32,
    y: &Tensor,
    eps: f32,
) -> Result<(), Error> {
    let [n_tokens, dim] = x.dims2("rms_norm", "x")?;
    y.expect_shape("rms_norm", "y", x.shape())?;
    weight.expect_shape("rms_norm", "weight", &[dim])?;
    let Some(width) = dim.checked_div(n_groups).filter(|width| width * n_groups == dim) else {
        let (expected, found) = (format!("a divisor of {dim}"), n_groups.to_string());
        return Err(Error::Operand { kernel: "rms_norm", operand: "n_groups", expected, found });
    };
    let [x, y] = [x, y].map(|rows| rows.reshape(&[n_tokens * n_groups, width]));
    rms(rec, &x?, &weight.reshape(&[n_groups, width])?, None, &y?, eps, 0)
}

/// As [`rms_norm`], of the first columns of a wider `x`.
///
/// # Shapes
/// `x`: `[T, C]` or wider; `y`: `[T, C]`.
/// # Errors
/// As [`rms_norm`].
pub fn rms_norm_columns(rec: &mut Recorder, x: &Tensor, weight: &Tensor, y: &Tensor, eps: f32) -> Result<(), Error> {
    rms(rec, x, weight, None, y, eps, 0)
}

/// Records `y = (y + weight * x / sqrt(mean(x²) + eps)) (* factor)`, otherwise as [`rms_norm`].
///
/// # Shapes
/// `factor`: `[1]`.
/// # Errors
/// As [`rms_norm`].
pub fn add_rms_norm(
    rec: &mut Recorder,
    x: &Tensor,
    weight: &Tensor,
    factor: Option<&Tensor>,
    y: &Tensor,
    eps: f32,
) -> Result<(), Error> {
    x.dims2("rms_norm", "x")?;
    y.expect_shape("rms_norm", "y", x.shape())?;
    rms(rec, x, weight, factor, y, eps, rms_norm::ACCUMULATE)
}

fn rms(
    rec: &mut Recorder,
    x: &Tensor,
    weight: &Tensor,
    factor: Option<&Tensor>,
    y: &Tensor,
    eps: f32,
    flags: u32,
) -> Result<(), Error> {
    let ([n_tokens, stride], [_, dim]) = (x.dims2("rms_norm", "x")?, y.dims2("rms_norm", "y")?);
    let weight_rows = if let [rows, _] = *weight.shape() { rows } else { 1 };
    let by_group = [weight_rows, dim];
    weight.expect_shape("rms_norm", "weight", if weight.shape().len() == 2 { &by_group } else { &by_group[1..] })?;
    y.expect_shape("rms_norm", "y", &[n_tokens, dim.min(stride)])?;
    let has_factor = match factor {
        Some(factor) => factor.expect_shape("rms_norm", "factor", &[1]).map(|()| rms_norm::FACTOR)?,
        None => 0,
    };
    let params = RmsNormParams { n_tokens, dim, eps, flags: flags | has_factor, stride, weight_rows };
    let (tier, rows) = by_row(rec.target(), &shaders::RMS_NORM, dim);
    let grid = fold(rec.target(), n_tokens.div_ceil(rows).into());
    // A factor that is not there is never read; the weight is at hand.
    let operands = [x, weight, factor.unwrap_or(weight), y];
    rec.dispatch_as(tier, &shaders::RMS_NORM, None, &[], params, &operands, grid)
}

/// A layer normalisation.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm<'a> {
    /// `[C]`.
    pub weight: &'a Tensor,
    /// `[C]`, added at the end.
    pub bias: Option<&'a Tensor>,
    /// Added to the variance.
    pub eps: f32,
}

impl LayerNorm<'_> {
    /// Refuses a weight and a bias that are not for rows of `dim` elements.
    pub(super) fn check(&self, kernel: &'static str, [weight, bias]: [&'static str; 2], dim: u32) -> Result<(), Error> {
        self.weight.expect_shape(kernel, weight, &[dim])?;
        self.bias.map_or(Ok(()), |tensor| tensor.expect_shape(kernel, bias, &[dim]))
    }
}

/// Records `y = weight * (x - mean) / sqrt(variance + eps) (+ bias)`, one token at a time. Shader:
/// `shaders/layer_norm.wgsl`.
///
/// # Shapes
/// `x`, `y`: `[T, C]`.
/// # Errors
/// [`Error::Shape`] if `norm` or `y` disagrees with `x`.
pub fn layer_norm(rec: &mut Recorder, x: &Tensor, norm: &LayerNorm, y: &Tensor) -> Result<(), Error> {
    let [n_tokens, dim] = x.dims2("layer_norm", "x")?;
    norm.check("layer_norm", ["weight", "bias"], dim)?;
    y.expect_shape("layer_norm", "y", &[n_tokens, dim])?;
    let params =
        NormParams { n_tokens, dim, eps: norm.eps, flags: if norm.bias.is_some() { layer_norm::BIAS } else { 0 } };
    // A bias that is not there is never read; x is at hand.
    let operands = [x, norm.weight, norm.bias.unwrap_or(x), y];
    let (tier, rows) = by_row(rec.target(), &shaders::LAYER_NORM, dim);
    let grid = fold(rec.target(), n_tokens.div_ceil(rows).into());
    rec.dispatch_as(tier, &shaders::LAYER_NORM, None, &[], params, &operands, grid)
}
