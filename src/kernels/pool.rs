//! Sequences of a batch to one row each.

use super::{check_loop, fold};
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::constants::pool;
use crate::shaders::params::PoolParams;
use crate::tensor::Tensor;

/// What becomes of a sequence's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Pooling {
    /// Their mean.
    Mean = 0,
    /// The first, which is BERT's `[CLS]`.
    Cls = pool::CLS,
    /// The last.
    Last = pool::LAST,
}

impl Pooling {
    /// All ways.
    pub const ALL: [Pooling; 3] = [Pooling::Mean, Pooling::Cls, Pooling::Last];

    /// Name in options and in files that we write.
    pub fn name(self) -> &'static str {
        match self {
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::Last => "last",
        }
    }
}

/// Records one row for each sequence of a batch, divided by its Euclidean norm (but at least 1e-12) if `normalise`. An
/// empty span gives zeros, and a span's end counts as T at most. A result does not depend on where its sequence lies.
/// Shader: `shaders/pool.wgsl`.
///
/// # Shapes
/// `spans`: `[B, 2]`, the first row of each sequence and the one behind its last; `x`: `[T, C]`; `y`: `[B, C]`.
/// # Errors
/// [`Error::Shape`] if `spans` or `y` disagrees with the others, [`Error::Operand`] if the scalar tier's loops cannot
/// take so many rows.
pub fn pool(
    rec: &mut Recorder,
    pooling: Pooling,
    normalise: bool,
    spans: &Tensor,
    x: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    let ([n_rows, dim], [n_spans, _]) = (x.dims2("pool", "x")?, y.dims2("pool", "y")?);
    spans.expect_shape("pool", "spans", &[n_spans, 2])?;
    y.expect_shape("pool", "y", &[n_spans, dim])?;
    // An invocation walks all rows of a sequence for each of its quads, and ragged quads by elements.
    let per_row = if dim.is_multiple_of(4) { 1 } else { 5 };
    let rounds = u64::from(dim.div_ceil(1024)) * (u64::from(n_rows) * per_row + u64::from(n_rows / 64) + 8);
    check_loop(rec.target(), "pool", rounds, n_rows, "rows")?;
    let params = PoolParams { n_rows, dim, pooling: pooling as u32, normalise: u32::from(normalise), n_spans };
    let grid = fold(rec.target(), n_spans.into());
    rec.dispatch(&shaders::POOL, None, &[], params, &[spans, x, y], grid)
}
