//! The steps of a mixture of logits that have no other kernel, one by one: a chain of these and of matrix products is what
//! [`mol`](crate::kernels::mol()) is measured against.

use crate::error::Error;
use crate::kernels::{Combination, fold};
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::params::{MolGateParams, WeightedSumParams};
use crate::tensor::Tensor;

/// Records the gates of all pairs of queries and items from what sees the query, the item and the logits: `a`, `b` and
/// `c`. Shader: `benches/shaders/mol_gate.wgsl`.
///
/// # Shapes
/// `a`: `[B, P]`; `b`: `[I, P]`; `c`, `y`: `[I, B, P]`.
/// # Errors
/// [`Error::Shape`] if shapes disagree; [`Error::Operand`] for a combination that needs all pairs at once.
pub fn mol_gate(
    rec: &mut Recorder,
    combination: Combination,
    [a, b, c]: [&Tensor; 3],
    y: &Tensor,
) -> Result<(), Error> {
    let kernel = &shaders::MOL_GATE;
    let [n_queries, pairs] = a.dims2(kernel.name, "a")?;
    let [n_items, _] = b.dims2(kernel.name, "b")?;
    b.expect_shape(kernel.name, "b", &[n_items, pairs])?;
    c.expect_shape(kernel.name, "c", &[n_items, n_queries, pairs])?;
    y.expect_shape(kernel.name, "y", c.shape())?;
    if combination == Combination::GluSiluLn {
        let expected = "Sum or GluSilu, which need only one pair at a time".into();
        let found = format!("{combination:?}");
        return Err(Error::Operand { kernel: kernel.name, operand: "combination", expected, found });
    }
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(256));
    let is_sum = u32::from(combination == Combination::Sum);
    let params = MolGateParams { n_items, n_queries, pairs, grid_x: grid[0], is_sum };
    rec.dispatch(kernel, None, &[], params, &[a, b, c, y], grid)
}

/// Records the sum of each row of `x`, each element times its weight. Shader: `benches/shaders/weighted_sum.wgsl`.
///
/// # Shapes
/// `weight`, `x`: `[R, C]`; `y`: `[R]`.
/// # Errors
/// [`Error::Shape`] if shapes disagree.
pub fn weighted_sum(rec: &mut Recorder, weight: &Tensor, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let kernel = &shaders::WEIGHTED_SUM;
    let [n_rows, dim] = x.dims2(kernel.name, "x")?;
    weight.expect_shape(kernel.name, "weight", &[n_rows, dim])?;
    y.expect_shape(kernel.name, "y", &[n_rows])?;
    let grid = fold(rec.target(), n_rows.div_ceil(64).into());
    let params = WeightedSumParams { n_rows, dim, grid_x: grid[0] };
    rec.dispatch(kernel, None, &[], params, &[weight, x, y], grid)
}
