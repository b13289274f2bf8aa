//! Reads in a chosen order, to measure memory.

use bytemuck::{Pod, Zeroable};

use crate::error::Error;
use crate::kernels::fold;
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::Tensor;

/// Words that [`probe_read`] reads for each that it writes.
pub const PROBE_READS: u32 = 16;

/// Mirrors `Params` in `benches/shaders/probe_read.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ProbeReadParams {
    pub len: u32,
    pub n_out: u32,
    pub rows_shift: u32,
    pub stride_shift: u32,
    pub scattered: u32,
    pub grid_x: u32,
    pub _pad: [u32; 2],
}

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
    let operand =
        |operand, expected: String, found: String| Error::Operand { kernel: "probe_read", operand, expected, found };
    let &[n_out] = y.shape() else {
        return Err(operand("y", "a tensor of one dimension".into(), format!("of shape {:?}", y.shape())));
    };
    let len = n_out.checked_mul(PROBE_READS).filter(|len| len.is_power_of_two());
    let Some(len) = len else {
        return Err(operand("y", "a power of two up to 2^27 words".into(), n_out.to_string()));
    };
    x.expect_shape("probe_read", "x", &[len])?;
    let stride = if let ReadOrder::Strided(stride) = order { stride } else { 1 };
    if !stride.is_power_of_two() || stride > len {
        return Err(operand("order", format!("a power of two up to {len}"), stride.to_string()));
    }
    let grid = fold(rec.target(), n_out.div_ceil(256).into());
    let params = ProbeReadParams {
        len,
        n_out,
        rows_shift: (len / stride).ilog2(),
        stride_shift: stride.ilog2(),
        scattered: u32::from(order == ReadOrder::Scattered),
        grid_x: grid[0],
        _pad: [0; 2],
    };
    rec.dispatch(&shaders::PROBE_READ, None, &[], params, &[x, y], grid)
}
