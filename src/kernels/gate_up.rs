//! The gated feed-forward's first half for a few tokens.

use bytemuck::Pod;

use super::linear::{MatvecPlan, Norm, operations, quads, vector};
use super::{Gate, GridPart, grid_parts};
use crate::error::Error;
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders::params::GateUpParams;
use crate::shaders::{self, KernelOf};
use crate::tensor::Tensor;

/// Records `y = act(x gateᵀ) * (x upᵀ)`, where `w` holds the rows of `gate` and then those of `up`; `norm` normalises
/// `x` first. Shader: `shaders/gate_up.wgsl`.
///
/// # Shapes
/// `w`: `[2 F, K]` in one slab, see [`Matrix::n_slabs`]; `x`: `[T, K]`, K a multiple of 4; `y`: `[T, F]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with `w`, [`Error::Operand`] if K is no multiple of 4 or `w` is in slabs.
pub fn gate_up(
    rec: &mut Recorder,
    w: &Matrix,
    norm: Option<Norm<'_>>,
    gate: Gate,
    x: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    record(rec, (w, false), norm, gate, x, y)
}

/// Records `y = act(y) * (x wᵀ)`: the ups, where the gates are of another weight type and their products wait in `y`.
/// Shader: `shaders/gate_up.wgsl`.
///
/// # Shapes
/// `w`: `[F, K]` in one slab; `x`: `[T, K]`, K a multiple of 4; `y`: `[T, F]`.
/// # Errors
/// As [`gate_up`].
pub fn up_gated(
    rec: &mut Recorder,
    w: &Matrix,
    norm: Option<Norm<'_>>,
    gate: Gate,
    x: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    record(rec, (w, true), norm, gate, x, y)
}

fn record(
    rec: &mut Recorder,
    (w, is_ups): (&Matrix, bool),
    norm: Option<Norm<'_>>,
    gate: Gate,
    x: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    let n_tokens = quads("gate_up", x)?;
    let lanes = MatvecPlan::new(rec, &shaders::GATE_UP, w, n_tokens);
    record_gate_up(rec, &shaders::GATE_UP, &lanes, (w, is_ups), norm, gate, (x, &[]), y, |params| params)
}

/// Records `kernel`, whose operands are those of `gate_up` with `others` after `x`, and whose params begin as its do.
#[expect(clippy::too_many_arguments)]
pub(super) fn record_gate_up<P: Pod>(
    rec: &mut Recorder,
    kernel: &'static KernelOf<P>,
    lanes: &MatvecPlan,
    (w, is_ups): (&Matrix, bool),
    norm: Option<Norm<'_>>,
    gate: Gate,
    (x, others): (&Tensor, &[&Tensor]),
    y: &Tensor,
    with: impl Fn(GateUpParams) -> P,
) -> Result<(), Error> {
    let n_tokens = quads(kernel.name, x)?;
    let slab = w.only_slab(kernel.name)?;
    let (dim, ffn_dim) = (w.cols(), if is_ups { w.rows() } else { w.rows() / 2 });
    x.expect_shape(kernel.name, "x", &[n_tokens, dim])?;
    y.expect_shape(kernel.name, "y", &[n_tokens, ffn_dim])?;
    let vector = vector(kernel.name, norm, None, dim)?;
    let params = |first_group| GateUpParams {
        n_tokens,
        ffn_dim,
        dim,
        blocks: w.blocks(),
        w_scales: w.quants_words(slab),
        eps: norm.map_or(0.0, |norm| norm.eps),
        first_group,
    };
    let kind = is_ups.then_some(("UPS", 1.0));
    let constants: Vec<_> =
        lanes.constants(norm.is_some()).into_iter().chain(gate.constants().iter().copied()).chain(kind).collect();
    let n_rows = if is_ups { ffn_dim } else { 2 * ffn_dim.next_multiple_of(2) };
    // A vector that is not there is never read; x is at hand.
    let operands = [&[&slab.words, vector.unwrap_or(x), x], others, &[y]].concat();
    for GridPart { first, grid: [x_groups, y_groups, _] } in
        grid_parts(rec.target(), lanes.groups(n_rows), operations(n_tokens, w.rows(), dim))
    {
        let grid = [x_groups, y_groups, lanes.parts(n_tokens)];
        rec.dispatch_as(lanes.tier, kernel, Some(w.weight()), &constants, with(params(first)), &operands, grid)?;
    }
    Ok(())
}
