//! What changes from token to token: one small tensor that kernels read and the end of a pass advances.

use bytemuck::{Pod, Zeroable};

use crate::dtype::DType;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::{Role, Tensor, TensorWriter};

/// Mirrors `Params` in `shaders/last_row.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct LastRowParams {
    pub dim: u32,
    pub _pad: [u32; 3],
}

/// Mirrors `Params` in `shaders/advance.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct AdvanceParams {
    pub capacity: u32,
    pub _pad: [u32; 3],
}

/// Position and number of tokens of the current pass, the token chosen last, and the row of the tables of angles that
/// position 0 has. Four words: `pos`, `n_tokens`, `token`, `angles`; `shaders/shared/state.wgsl` names them.
#[derive(Clone, Debug)]
pub struct StepState(Tensor);

impl StepState {
    /// Declares a state.
    ///
    /// # Errors
    /// None in practice; the shape is fixed.
    pub fn declare() -> Result<StepState, Error> {
        Ok(StepState(Tensor::declare("state", Role::Activations, &[4], DType::U32)?))
    }

    /// Sets position and number of tokens for the next pass.
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn set(&self, device: &dyn TensorWriter, pos: u32, n_tokens: u32) -> Result<(), Error> {
        self.set_turned(device, pos, n_tokens, 0)
    }

    /// As [`StepState::set`], with the row of angles that position 0 has, see
    /// [`RopeConfig::first_row`](super::RopeConfig::first_row).
    ///
    /// # Errors
    /// Errors of [`TensorWriter::write_words`].
    pub fn set_turned(&self, device: &dyn TensorWriter, pos: u32, n_tokens: u32, angles: u32) -> Result<(), Error> {
        device.write_words(&self.0, 0, &[pos, n_tokens, 0, angles])
    }

    /// The words; [`StepState::tokens`] takes them apart after a read.
    pub fn tensor(&self) -> &Tensor {
        &self.0
    }

    /// The token chosen last, from the words of one state after another as read back. [`NON_FINITE`](super::NON_FINITE)
    /// if none could be.
    pub fn tokens(words: &[u32]) -> impl Iterator<Item = u32> {
        words.chunks_exact(4).map(|state| state[2])
    }
}

/// Records `y = x[n_tokens - 1]`, the last token's row. Shader: `shaders/last_row.wgsl`.
///
/// # Shapes
/// `x`: `[T, C]`; `y`: `[1, C]`.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`.
pub fn last_row(rec: &mut Recorder, state: &StepState, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let [_, dim] = x.dims2("last_row", "x")?;
    y.expect_shape("last_row", "y", &[1, dim])?;
    let params = LastRowParams { dim, _pad: [0; 3] };
    rec.dispatch(&shaders::LAST_ROW, None, &[], params, &[&state.0, x, y], [dim.div_ceil(256), 1, 1])
}

/// Records the end of a pass: `ids[0]` joins `tokens` and the state moves on to it. Shader: `shaders/advance.wgsl`.
///
/// # Shapes
/// `ids`: `[1]`; `tokens`: `[S]`.
/// # Errors
/// [`Error::Shape`] if `ids` is not one id.
pub fn advance(rec: &mut Recorder, state: &StepState, ids: &Tensor, tokens: &Tensor) -> Result<(), Error> {
    ids.expect_shape("advance", "ids", &[1])?;
    let params = AdvanceParams { capacity: tokens.len() as u32, _pad: [0; 3] };
    rec.dispatch(&shaders::ADVANCE, None, &[], params, &[ids, &state.0, tokens], [1, 1, 1])
}
