//! Kernels that do one thing and nothing else: copy, read in a chosen order, add up, multiply.

use crate::error::Error;
use crate::kernels::fold;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::constants::probe_read;
use crate::shaders::params::ProbeMatrixParams;
use crate::shaders::params::{ProbeCopyParams, ProbeFmaParams, ProbeReadParams, ProbeReduceParams};
use crate::tensor::Tensor;

/// Words that [`probe_read`] reads for each that it writes.
pub const PROBE_READS: u32 = probe_read::READS;

/// Multiplications and additions of [`probe_fma`] for each number and round.
pub const PROBE_FMA_FLOP: u64 = 2 * PROBE_NUMBERS as u64;

/// Numbers that an invocation of [`probe_fma`] has in registers.
pub(crate) const PROBE_NUMBERS: u32 = 32;

/// In which order [`probe_read`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOrder {
    /// One word out of so many, a power of two, then the next of each: 1 is in sequence. Every word is read once.
    Strided(u32),
    /// Anywhere: some words several times, others never.
    Scattered,
}

/// Records reads of all of `x`, [`PROBE_READS`] words for each word of `y`, which becomes their exclusive or. Shader:
/// `benches/shaders/probe_read.wgsl`.
///
/// # Shapes
/// `x`: `[PROBE_READS * N]`; `y`: `[N]`, N a power of two; words both.
/// # Errors
/// [`Error::Shape`] if `x` disagrees with `y`, [`Error::Operand`] if N or the stride is no power of two or the stride is
/// longer than `x`.
pub fn probe_read(rec: &mut Recorder, x: &Tensor, y: &Tensor, order: ReadOrder) -> Result<(), Error> {
    let &[n_out] = y.shape() else { return Err(refused("probe_read", "y", "a tensor of one dimension", y)) };
    let len = n_out.checked_mul(PROBE_READS).filter(|len| len.is_power_of_two());
    let Some(len) = len else { return Err(refused("probe_read", "y", "a power of two up to 2^27 words", y)) };
    x.expect_shape("probe_read", "x", &[len])?;
    let stride = if let ReadOrder::Strided(stride) = order { stride } else { 1 };
    if !stride.is_power_of_two() || stride > len {
        let expected = "a stride of a power of two up to the words of `x`";
        return Err(out_of_range("probe_read", "order", expected, stride));
    }
    let grid = fold(rec.target(), n_out.div_ceil(256).into());
    let params = ProbeReadParams {
        len,
        n_out,
        rows_shift: (len / stride).ilog2(),
        stride_shift: stride.ilog2(),
        scattered: u32::from(order == ReadOrder::Scattered),
        grid_x: grid[0],
    };
    rec.dispatch(&shaders::PROBE_READ, None, &[], params, &[x, y], grid)
}

/// Records `y = x`. Shader: `benches/shaders/probe_copy.wgsl`.
///
/// # Shapes
/// `x`, `y`: `[N]`, N a multiple of four; words.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`, [`Error::Operand`] if `x` is no row of such a length.
pub fn probe_copy(rec: &mut Recorder, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let &[len] = x.shape() else { return Err(refused("probe_copy", "x", "a tensor of one dimension", x)) };
    if !len.is_multiple_of(4) {
        return Err(refused("probe_copy", "x", "a multiple of four words", x));
    }
    y.expect_shape("probe_copy", "y", &[len])?;
    let params = ProbeCopyParams { n_quads: len / 4 };
    let grid = fold(rec.target(), params.n_quads.div_ceil(256).into());
    rec.dispatch(&shaders::PROBE_COPY, None, &[], params, &[x, y], grid)
}

/// Records `y[r] = sum over c of x[r, c]`, each row by a workgroup. Shader: `benches/shaders/probe_reduce.wgsl`.
///
/// # Shapes
/// `x`: `[R, C]`, C a multiple of four; `y`: `[R]`.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`, [`Error::Operand`] if `x` has no such rows.
pub fn probe_reduce(rec: &mut Recorder, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let &[n_rows, columns] = x.shape() else { return Err(refused("probe_reduce", "x", "a matrix", x)) };
    if !columns.is_multiple_of(4) {
        return Err(refused("probe_reduce", "x", "rows of a multiple of four elements", x));
    }
    y.expect_shape("probe_reduce", "y", &[n_rows])?;
    let params = ProbeReduceParams { n_rows, row_quads: columns / 4 };
    let grid = fold(rec.target(), n_rows.into());
    rec.dispatch(&shaders::PROBE_REDUCE, None, &[], params, &[x, y], grid)
}

/// What [`probe_fma`] does to its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FmaRounds {
    /// How often, a multiple of four.
    pub rounds: u32,
    /// What a number is multiplied by.
    pub factor: f32,
    /// What is added then.
    pub step: f32,
}

/// Records `rounds` fused multiplications and additions of 32 numbers for each element of `y`, which becomes the sum of
/// what they are then: [`PROBE_FMA_FLOP`] operations for each element and round, in half precision in the tier `f16`.
/// Shader: `benches/shaders/probe_fma.wgsl`.
///
/// # Shapes
/// `y`: `[N]`.
/// # Errors
/// [`Error::Operand`] if `y` is no row, or the number of rounds no multiple of four or above 65,536.
pub fn probe_fma(rec: &mut Recorder, what: FmaRounds, y: &Tensor) -> Result<(), Error> {
    /// llvmpipe leaves a loop after 65,535 rounds, and one of the shader's takes four of these.
    const MAX_ROUNDS: u32 = 1 << 16;
    let &[n_out] = y.shape() else { return Err(refused("probe_fma", "y", "a tensor of one dimension", y)) };
    let FmaRounds { rounds, factor, step } = what;
    if !rounds.is_multiple_of(4) || rounds > MAX_ROUNDS {
        return Err(out_of_range("probe_fma", "rounds", "a multiple of four up to 65536", rounds));
    }
    let grid = fold(rec.target(), n_out.div_ceil(256).into());
    rec.dispatch(&shaders::PROBE_FMA, None, &[], ProbeFmaParams { n_out, rounds, factor, step }, &[y], grid)
}

/// Side of the matrices of [`probe_matrix`] on a target: that of its tier, or 8 where it has none.
pub fn probe_matrix_size(target: &crate::Target) -> u32 {
    target.tier_for(&shaders::PROBE_MATRIX, None).matrix_size().unwrap_or(8)
}

/// Records `y[g, i, j] = rounds * A[i] B[j]`, with operands in half precision in the tiers that have cooperative
/// matrices: `2 S^3` operations for each of y's matrices and each round. Shader: `benches/shaders/probe_matrix.wgsl`.
///
/// # Shapes
/// `x`: `[6, S, S]`, two matrices A and four matrices B of [`probe_matrix_size`]; `y`: `[G, 2, 4, S, S]`, G a multiple of
/// four, one for each subgroup.
/// # Errors
/// [`Error::Shape`] if `x` or `y` has other matrices, [`Error::Operand`] if G is no multiple of four, or if there are more
/// than 4096 rounds.
pub fn probe_matrix(rec: &mut Recorder, x: &Tensor, y: &Tensor, rounds: u32) -> Result<(), Error> {
    /// Sixteen products a round in the baseline, within what llvmpipe walks.
    const MAX_ROUNDS: u32 = 1 << 12;
    let size = probe_matrix_size(rec.target());
    x.expect_shape("probe_matrix", "x", &[6, size, size])?;
    let n_subgroups = y.shape()[0];
    if !n_subgroups.is_multiple_of(4) {
        return Err(refused("probe_matrix", "y", "matrices of a multiple of four subgroups", y));
    }
    y.expect_shape("probe_matrix", "y", &[n_subgroups, 2, 4, size, size])?;
    if rounds > MAX_ROUNDS {
        return Err(out_of_range("probe_matrix", "rounds", "at most 4096", rounds));
    }
    let params = ProbeMatrixParams { n_groups: n_subgroups / 4, rounds };
    let grid = fold(rec.target(), params.n_groups.into());
    let has_matrices = rec.target().tier_for(&shaders::PROBE_MATRIX, None).matrix_size().is_some();
    let subgroup = [("SUBGROUP", f64::from(rec.target().limits().max_subgroup))];
    let constants = if has_matrices { &subgroup[..] } else { &[] };
    rec.dispatch(&shaders::PROBE_MATRIX, None, constants, params, &[x, y], grid)
}

#[cold]
#[inline(never)]
fn refused(kernel: &'static str, operand: &'static str, expected: &str, found: &Tensor) -> Error {
    Error::Operand { kernel, operand, expected: expected.into(), found: format!("one of shape {:?}", found.shape()) }
}

#[cold]
#[inline(never)]
fn out_of_range(kernel: &'static str, operand: &'static str, expected: &str, found: u32) -> Error {
    Error::Operand { kernel, operand, expected: expected.into(), found: found.to_string() }
}
