//! Embedding gather.

use bytemuck::{Pod, Zeroable};

use super::StepState;
use crate::error::Error;
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::Tensor;

/// Mirrors `Params` in `shaders/embed.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct EmbedParams {
    pub dim: u32,
    pub blocks: u32,
    pub w_scales: u32,
    pub slab_start: u32,
    pub slab_rows: u32,
    pub _pad: [u32; 3],
}

/// Records `y[t] = w[tokens[pos + t]]`. Shader: `shaders/embed.wgsl`, one dispatch for each slab of `w`.
///
/// Ids must be below V; the tokenizer and the generation check that. A row whose id is not keeps what it held.
///
/// # Shapes
/// `tokens`: `[S]`, token ids; `w`: `[V, C]`; `y`: `[T, C]`.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `w`.
pub fn embed(rec: &mut Recorder, state: &StepState, tokens: &Tensor, w: &Matrix, y: &Tensor) -> Result<(), Error> {
    let [n_tokens, _] = y.dims2("embed", "y")?;
    y.expect_shape("embed", "y", &[n_tokens, w.cols()])?;
    for slab in w.slabs() {
        let params = EmbedParams {
            dim: w.cols(),
            blocks: w.blocks(),
            w_scales: w.quants_words(slab),
            slab_start: slab.first_row,
            slab_rows: slab.rows,
            _pad: [0; 3],
        };
        let operands = [state.tensor(), tokens, &slab.words, y];
        rec.dispatch(&shaders::EMBED, Some(w.weight()), &[], params, &operands, [n_tokens, 1, 1])?;
    }
    Ok(())
}
