//! A product, the residual stream and the layer normalisation behind them.

use super::linear::{INVARIANT, operations, set, vector};
use super::{GridPart, LOOP_ROUNDS, LayerNorm, Linear, add, grid_parts, layer_norm, matmul};
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders::constants::linear::{ACCUMULATE, BIAS};
use crate::shaders::constants::linear_norm::SHIFT;
use crate::shaders::params::LinearParams;
use crate::shaders::{self, Tier};
use crate::tensor::Tensor;

/// Rows of `y` that a workgroup takes.
const ROWS: u32 = 16;
/// Columns of `y` that a workgroup may have, in one step in the `scalar` tier.
const MAX_COLS: u32 = 1024;

/// Records `y = norm(y + x wᵀ (+ bias))`, or without `y` if `linear` does not accumulate: what ends each half of a layer
/// in encoders that normalise behind it. Shader: `shaders/linear_norm.wgsl`.
///
/// Where N is above 1024, `w` is in slabs or `linear` has an activation, it takes [`matmul`], [`add`] and
/// [`layer_norm`].
///
/// # Shapes
/// `x`: `[T, K]`; `y`: `[T, N]`; the norm's tensors: `[N]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the weights, [`Error::Operand`] as in [`matmul`].
pub fn linear_norm(rec: &mut Recorder, linear: &Linear, norm: &LayerNorm, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let kernel = &shaders::LINEAR_NORM;
    let [n_tokens, _] = x.dims2(kernel.name, "x")?;
    let (n_out, dim) = (linear.w.rows(), linear.w.cols());
    x.expect_shape(kernel.name, "x", &[n_tokens, dim])?;
    linear.check(kernel, n_tokens, y)?;
    y.expect_shape(kernel.name, "y", &[n_tokens, n_out])?;
    norm.check(kernel.name, ["weight", "shift"], n_out)?;

    let is_whole = n_out.is_multiple_of(4) && dim.is_multiple_of(4);
    let tier = match rec.target().tier_for(kernel, Some(linear.w.weight())) {
        Tier::Scalar if !is_whole => Tier::Baseline,
        tier => tier,
    };
    let [slab] = linear.w.slabs() else { return apart(rec, linear, norm, x, y) };
    if !takes_whole(linear) {
        return apart(rec, linear, norm, x, y);
    }
    let constant = match tier {
        Tier::Scalar => ("WG", f64::from(n_out.div_ceil(8))),
        _ => ("WIDTH", 64.0),
    };
    let flags = set(&[
        (linear.bias.is_some(), BIAS),
        (linear.accumulate, ACCUMULATE),
        (norm.bias.is_some(), SHIFT),
        (linear.batch_invariant, INVARIANT),
    ]);
    let vector = vector(kernel.name, None, linear.bias, dim)?;
    // A vector that is not there is never read; x is at hand.
    let operands = [&slab.words, vector.unwrap_or(x), x, norm.weight, norm.bias.unwrap_or(x), y];
    for GridPart { first, grid } in
        grid_parts(rec.target(), n_tokens.div_ceil(ROWS).into(), operations(n_tokens, n_out, dim))
    {
        let params = LinearParams {
            n_tokens,
            n_out,
            dim,
            blocks: linear.w.blocks(),
            w_scales: linear.w.quants_words(slab),
            y_start: 0,
            y_stride: n_out,
            flags,
            eps: norm.eps,
            split_blocks: linear.w.blocks(),
            first_group: first,
        };
        rec.dispatch_as(tier, kernel, Some(linear.w.weight()), &[constant], params, &operands, grid)?;
    }
    Ok(())
}

/// Whether one dispatch takes the product with its norm.
fn takes_whole(linear: &Linear) -> bool {
    // At most four steps of columns along K by elements, and the rows' own loops.
    let rounds = 5 * u64::from(linear.w.cols()) + u64::from(MAX_COLS);
    linear.w.rows() <= MAX_COLS
        && linear.w.n_slabs() == 1
        && linear.activation.is_none()
        && rounds <= u64::from(LOOP_ROUNDS)
}

/// Whether a product is taken together with the norm behind it. A workgroup has all columns of its rows, so there are few
/// of them: on a GPU, only where K is short.
pub(crate) fn fuses_norm(rec: &Recorder, linear: &Linear) -> bool {
    let target = rec.target();
    let is_short = linear.w.cols() <= linear.w.rows();
    takes_whole(linear) && (is_short || !target.is_gpu() || target.tier() == Tier::Scalar)
}

/// The same by kernels of their own.
fn apart(rec: &mut Recorder, linear: &Linear, norm: &LayerNorm, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let sums = rec.temporary("sums", y.shape())?;
    matmul(rec, &Linear { accumulate: false, ..*linear }, x, &sums)?;
    if linear.accumulate {
        add(rec, y, &sums)?;
    }
    layer_norm(rec, &sums, norm, y)
}
