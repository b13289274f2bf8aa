//! Rows in half precision for products, and the inputs of products, in whichever form each asks for.

use super::linear::are_few;
use super::{Gate, Norm, fold, folds_norm, gated, rms_norm};
use crate::dtype::DType;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::params::HalfRowsParams;
use crate::tensor::Tensor;

/// Columns that rows in half precision are padded to a multiple of: the longest units of packed weights.
const UNIT: u32 = 256;

/// Rows in half precision, each times a power of two.
#[derive(Clone, Debug)]
pub struct HalfRows {
    /// `[M, K]`, K rounded up to a multiple of 256.
    pub rows: Tensor,
    /// What sums of the rows' products are to be multiplied by, `[M]`.
    pub inverse: Tensor,
    /// K.
    pub dim: u32,
}

/// What the rows of an [`Input`] are made of.
#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    /// `[M, K]`, as they are or normalised.
    Rows(&'a Tensor, Option<Norm<'a>>),
    /// A feed-forward's gates and ups, `[M, 2 K]`.
    Halves(&'a Tensor, Gate),
}

/// The input of products: `[M, K]`. What it is made of is turned into rows, in single or in half precision, once a product
/// asks for them, and once for all that do.
#[derive(Clone, Debug)]
pub struct Input<'a> {
    source: Source<'a>,
    rows: Option<Tensor>,
    half: Option<HalfRows>,
}

impl<'a> Input<'a> {
    /// Rows as they are, `[M, K]`.
    pub fn new(x: &'a Tensor) -> Input<'a> {
        Input::normed(x, None)
    }

    /// Rows that are to be normalised if there is a norm, `[M, K]`.
    pub fn normed(x: &'a Tensor, norm: Option<Norm<'a>>) -> Input<'a> {
        Input { source: Source::Rows(x, norm), rows: None, half: None }
    }

    /// A feed-forward's gates and ups, `[M, 2 K]`, of which rows of K are to be made.
    pub fn gated(gate_up: &'a Tensor, gate: Gate) -> Input<'a> {
        Input { source: Source::Halves(gate_up, gate), rows: None, half: None }
    }

    /// `[M, K]`.
    pub(crate) fn dims(&self, kernel: &'static str) -> Result<[u32; 2], Error> {
        match self.source {
            Source::Rows(x, _) => x.dims2(kernel, "x"),
            Source::Halves(x, _) => x.dims2(kernel, "x").map(|[n_rows, dim]| [n_rows, dim / 2]),
        }
    }

    /// Refuses another K.
    pub(super) fn expect_dim(&self, kernel: &'static str, dim: u32) -> Result<(), Error> {
        let [n_rows, _] = self.dims(kernel)?;
        match self.source {
            Source::Rows(x, _) => x.expect_shape(kernel, "x", &[n_rows, dim]),
            Source::Halves(x, _) => x.expect_shape(kernel, "x", &[n_rows, 2 * dim]),
        }
    }

    /// For products of a few tokens: rows, and the norm that is to be folded in where that pays. `None` for many tokens.
    pub(crate) fn folded(
        &mut self,
        rec: &mut Recorder,
        has_bias: bool,
    ) -> Result<Option<(Tensor, Option<Norm<'a>>)>, Error> {
        if !are_few(rec, self.dims("matvec")?) {
            return Ok(None);
        }
        match (&self.rows, self.source) {
            (None, Source::Rows(x, norm)) if folds_norm(rec, x, has_bias) => Ok(Some((x.clone(), norm))),
            _ => Ok(Some((self.rows(rec)?, None))),
        }
    }

    /// The rows in single precision.
    pub(crate) fn rows(&mut self, rec: &mut Recorder) -> Result<Tensor, Error> {
        if let Some(rows) = &self.rows {
            return Ok(rows.clone());
        }
        let rows = match self.source {
            Source::Rows(x, None) => x.clone(),
            Source::Rows(x, Some(Norm { weight, eps })) => {
                let rows = rec.temporary("normed", x.shape())?;
                rms_norm(rec, x, weight, &rows, eps)?;
                rows
            }
            Source::Halves(x, gate) => {
                let rows = rec.temporary("activated", &self.dims("gated")?)?;
                gated(rec, gate, x, &rows)?;
                rows
            }
        };
        self.rows = Some(rows.clone());
        Ok(rows)
    }

    /// The rows in half precision; K is a multiple of 4.
    pub(super) fn half(&mut self, rec: &mut Recorder) -> Result<HalfRows, Error> {
        if let Some(half) = &self.half {
            return Ok(half.clone());
        }
        // Rows that are there already need not be made again.
        let half = match (&self.rows, self.source) {
            (Some(rows), _) => half_rows(rec, rows, None)?,
            (None, Source::Rows(x, norm)) => half_rows(rec, x, norm)?,
            (None, Source::Halves(x, gate)) => half_gated(rec, x, gate)?,
        };
        self.half = Some(half.clone());
        Ok(half)
    }
}

/// Records rows in half precision, normalised first if there is a norm. Shader: `shaders/half_rows.wgsl`.
///
/// # Shapes
/// `x`: `[M, K]`, K a multiple of 4.
/// # Errors
/// [`Error::Shape`] if the norm's weight disagrees with `x`, [`Error::Operand`] if K is no multiple of 4 or the target has
/// no half precision.
pub fn half_rows(rec: &mut Recorder, x: &Tensor, norm: Option<Norm<'_>>) -> Result<HalfRows, Error> {
    let kernel = shaders::HALF_ROWS.name;
    let [_, dim] = x.dims2(kernel, "x")?;
    match norm {
        None => record(rec, x, x, dim, &[], 0.0),
        Some(Norm { weight, eps }) => {
            weight.expect_shape(kernel, "weight", &[dim])?;
            record(rec, x, weight, dim, &[("NORM", 1.0)], eps)
        }
    }
}

/// Records a feed-forward's two halves as rows in half precision, `act(gate) * up`. Shader: `shaders/half_rows.wgsl`.
///
/// # Shapes
/// `gate_up`: `[M, 2 K]`, K a multiple of 4.
/// # Errors
/// [`Error::Operand`] if K is no multiple of 4 or the target has no half precision.
pub fn half_gated(rec: &mut Recorder, gate_up: &Tensor, gate: Gate) -> Result<HalfRows, Error> {
    let [_, both] = gate_up.dims2(shaders::HALF_ROWS.name, "x")?;
    record(rec, gate_up, gate_up, both / 2, &[&[("GATED", 1.0)], gate.constants()].concat(), 0.0)
}

fn record(
    rec: &mut Recorder,
    x: &Tensor,
    weight: &Tensor,
    dim: u32,
    constants: &[(&'static str, f64)],
    eps: f32,
) -> Result<HalfRows, Error> {
    let kernel = &shaders::HALF_ROWS;
    let [n_tokens, columns] = x.dims2(kernel.name, "x")?;
    if dim == 0 || !dim.is_multiple_of(4) || !columns.is_multiple_of(dim) {
        let expected = "a multiple of 4 columns in each half".into();
        return Err(Error::Operand { kernel: kernel.name, operand: "x", expected, found: columns.to_string() });
    }
    let width = dim.checked_next_multiple_of(UNIT).unwrap_or(u32::MAX);
    let rows = Tensor::temporary("half", &[n_tokens, width], DType::F16)?;
    let inverse = rec.temporary("inverse", &[n_tokens])?;
    let grid = fold(rec.target(), n_tokens.into());
    let params = HalfRowsParams { n_tokens, dim, width, eps };
    rec.dispatch(kernel, None, constants, params, &[x, weight, &rows, &inverse], grid)?;
    Ok(HalfRows { rows, inverse, dim })
}
