//! Embedding gathers.

use super::{StepState, fold};
use crate::error::Error;
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::params::{EmbedParams, EmbedSumParams};
use crate::tensor::Tensor;

/// Where the embeddings of a sequence's tokens come from.
#[derive(Clone, Copy, Debug)]
pub struct Embedding<'a> {
    /// `[V, C]`.
    pub w: &'a Matrix,
    /// Factor of its rows.
    pub factor: f32,
    /// `[N, C]`, whose rows are added by position. The last one stands for positions past its end.
    pub positions: Option<&'a Tensor>,
}

impl<'a> Embedding<'a> {
    /// The rows of `w`.
    pub fn new(w: &'a Matrix) -> Self {
        Embedding { w, factor: 1.0, positions: None }
    }
}

/// Records `y[t] = factor * w[tokens[pos + t]] (+ positions[pos + t])`. Shader: `shaders/embed.wgsl`, one dispatch for
/// each slab of `w`.
///
/// Rows after the state's last token are zeros, and so are rows whose id is not below V: whatever the memory of tokens and
/// rows held before, no row that pads a pass has a NaN.
///
/// # Shapes
/// `tokens`: `[S]`, token ids, which count for nothing where the state has a row for each token; `y`: `[T, C]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with `w`.
pub fn embed(
    rec: &mut Recorder,
    state: &StepState,
    tokens: &Tensor,
    embedding: &Embedding<'_>,
    y: &Tensor,
) -> Result<(), Error> {
    let &Embedding { w, factor, positions } = embedding;
    let tokens = if state.is_batch() { state.tensor() } else { tokens };
    let [n_tokens, _] = y.dims2("embed", "y")?;
    y.expect_shape("embed", "y", &[n_tokens, w.cols()])?;
    let n_positions = table_rows("embed", "positions", positions, w)?;
    // What stands for a table that is not there is never read.
    let absent = rec.temporary("absent", &[1])?;
    let grid = fold(rec.target(), n_tokens.into());
    for slab in w.slabs() {
        let params = EmbedParams {
            dim: w.cols(),
            blocks: w.blocks(),
            w_scales: w.quants_words(slab),
            slab_start: slab.first_row,
            slab_rows: slab.rows,
            n_tokens,
            factor,
            n_positions,
            row_words: state.row_words(),
        };
        let operands = [state.tensor(), tokens, &slab.words, positions.unwrap_or(&absent), y];
        rec.dispatch(&shaders::EMBED, Some(w.weight()), &[], params, &operands, grid)?;
    }
    Ok(())
}

/// Rows of a table that is added to the embeddings; 0 if there is none.
fn table_rows(kernel: &'static str, operand: &'static str, table: Option<&Tensor>, w: &Matrix) -> Result<u32, Error> {
    let Some(table) = table else { return Ok(0) };
    let [rows, _] = table.dims2(kernel, operand)?;
    table.expect_shape(kernel, operand, &[rows, w.cols()])?;
    Ok(rows)
}

/// Records `y[t] = w[id] + positions[position] + types[type]`, as text encoders begin. A table that is not there adds
/// nothing, and a number past a table's end counts as its last row. Shader: `shaders/embed_sum.wgsl`, one dispatch for
/// each slab of `w`.
///
/// # Shapes
/// `tokens`: `[T, 3]`, the id, position and type of each token; `w`: `[V, C]`; `positions`: `[S, C]`; `types`: `[N, C]`;
/// `y`: `[T, C]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with `w` or `y`.
pub fn embed_sum(
    rec: &mut Recorder,
    tokens: &Tensor,
    w: &Matrix,
    positions: Option<&Tensor>,
    types: Option<&Tensor>,
    y: &Tensor,
) -> Result<(), Error> {
    let [n_tokens, _] = y.dims2("embed_sum", "y")?;
    y.expect_shape("embed_sum", "y", &[n_tokens, w.cols()])?;
    tokens.expect_shape("embed_sum", "tokens", &[n_tokens, 3])?;
    let rows = |operand, table| table_rows("embed_sum", operand, table, w);
    let (n_positions, n_types) = (rows("positions", positions)?, rows("types", types)?);
    // What stands for a table that is not there is never read.
    let absent = rec.temporary("absent", &[1])?;
    let tables = [positions, types].map(|table| table.unwrap_or(&absent));
    let grid = fold(rec.target(), n_tokens.into());
    for slab in w.slabs() {
        let params = EmbedSumParams {
            dim: w.cols(),
            blocks: w.blocks(),
            w_scales: w.quants_words(slab),
            slab_start: slab.first_row,
            slab_rows: slab.rows,
            n_ids: w.rows(),
            n_positions,
            n_types,
            n_tokens,
        };
        let operands = [tokens, &slab.words, tables[0], tables[1], y];
        rec.dispatch(&shaders::EMBED_SUM, Some(w.weight()), &[], params, &operands, grid)?;
    }
    Ok(())
}
