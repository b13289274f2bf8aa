//! Choosing a token from logits.

use bytemuck::{Pod, Zeroable};

use super::StepState;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::constants::{candidates, order, penalize, sampling};
use crate::shaders::params::{MaskLogitsParams, PenalizeParams, SampleParams};
use crate::tensor::Tensor;

/// The id that stands for "no token": some logit is NaN or infinite.
pub const NON_FINITE: u32 = order::NON_FINITE;

/// Sampling settings as kernels read them, twelve words.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Sampling {
    /// Divides the logits; above 0.
    pub temperature: f32,
    /// Keeps the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens with at least this share of the most likely one's probability; 0 keeps all.
    pub min_p: f32,
    /// Seed, low and high word.
    pub seed: [u32; 2],
    /// Divides positive and multiplies negative logits of recent tokens; 1 changes nothing.
    pub repeat_penalty: f32,
    /// How many tokens back count as recent.
    pub repeat_last_n: u32,
    /// Taken off the logits of generated tokens.
    pub presence_penalty: f32,
    /// Taken off the logits of generated tokens as often as they were generated.
    pub frequency_penalty: f32,
    /// The position of the first generated token.
    pub generated_from: u32,
    /// Pairs of ids and biases that count.
    pub n_biases: u32,
}

/// Its words are those that shaders name.
const _: () = {
    use std::mem::offset_of;
    let words = [
        (offset_of!(Sampling, temperature), sampling::TEMPERATURE),
        (offset_of!(Sampling, top_k), sampling::TOP_K),
        (offset_of!(Sampling, top_p), sampling::TOP_P),
        (offset_of!(Sampling, min_p), sampling::MIN_P),
        (offset_of!(Sampling, seed), sampling::SEED_LOW),
        (offset_of!(Sampling, seed) + 4, sampling::SEED_HIGH),
        (offset_of!(Sampling, repeat_penalty), sampling::REPEAT_PENALTY),
        (offset_of!(Sampling, repeat_last_n), sampling::REPEAT_LAST_N),
        (offset_of!(Sampling, presence_penalty), sampling::PRESENCE_PENALTY),
        (offset_of!(Sampling, frequency_penalty), sampling::FREQUENCY_PENALTY),
        (offset_of!(Sampling, generated_from), sampling::GENERATED_FROM),
        (offset_of!(Sampling, n_biases), sampling::N_BIASES),
        (size_of::<Sampling>(), sampling::SETTINGS),
    ];
    let mut i = 0;
    while i < words.len() {
        assert!(words[i].0 == 4 * words[i].1 as usize);
        i += 1;
    }
};

impl Sampling {
    /// Words of the settings.
    pub const WORDS: u32 = sampling::SETTINGS;

    /// Pairs of ids and biases that passes have room for.
    pub const MAX_BIASES: u32 = 1024;

    /// Whether `candidates` makes lists of the top k of each part of so many logits.
    pub(crate) fn has_lists(&self, n_vocab: u32) -> bool {
        (1..=sampling::MOST).contains(&self.top_k) && self.top_k < n_vocab
    }
}

/// Records penalties of recent and of generated tokens, and biases of any, in place. The work grows with the number of these
/// tokens. Shader: `shaders/penalize.wgsl`.
///
/// # Shapes
/// `sampling`: `[R, 12]`; `tokens`: `[S]`, or `[slots, S]` where the state has a row for each of the logits'; `biases`: `[R, 2 B]`,
/// ids and the bits of their biases in turns; `logits`: `[R, V]`.
/// # Errors
/// [`Error::Shape`] if an operand has another shape.
pub fn penalize(
    rec: &mut Recorder,
    sampling: &Tensor,
    state: &StepState,
    tokens: &Tensor,
    biases: &Tensor,
    logits: &Tensor,
) -> Result<(), Error> {
    let [n_rows, n_vocab] = logits.dims2("penalize", "logits")?;
    sampling.expect_shape("penalize", "sampling", &[n_rows, Sampling::WORDS])?;
    let [_, biases_stride] = biases.dims2("penalize", "biases")?;
    biases.expect_shape("penalize", "biases", &[n_rows, biases_stride])?;
    let capacity = tokens.shape().last().copied().unwrap_or(0);
    let params = PenalizeParams { n_vocab, capacity, row_words: state.row_words(), biases_stride };
    let grid = [n_vocab.div_ceil(penalize::CHUNK), n_rows, 1];
    rec.dispatch(&shaders::PENALIZE, None, &[], params, &[sampling, state.tensor(), tokens, biases, logits], grid)
}

/// Words of a bit for each of so many tokens.
pub(crate) fn mask_words(n_vocab: u32) -> u32 {
    n_vocab.div_ceil(32)
}

/// Records that only tokens whose bit is set may be chosen, in place: the logits of all others become the lowest float. It
/// comes after [`penalize`], which would make an infinity of that. Shader: `shaders/mask_logits.wgsl`.
///
/// # Shapes
/// `allowed`: `[R, ceil(V / 32)]`, the lowest bit first; `logits`: `[R, V]`.
/// # Errors
/// [`Error::Shape`] if `allowed` has not a bit for each logit.
pub fn mask_logits(rec: &mut Recorder, allowed: &Tensor, logits: &Tensor) -> Result<(), Error> {
    let [n_rows, n_vocab] = logits.dims2("mask_logits", "logits")?;
    allowed.expect_shape("mask_logits", "allowed", &[n_rows, mask_words(n_vocab)])?;
    let params = MaskLogitsParams { n_vocab };
    rec.dispatch(&shaders::MASK_LOGITS, None, &[], params, &[allowed, logits], [n_vocab.div_ceil(256), n_rows, 1])
}

/// Records the draw of a token with temperature, top-k, top-p and min-p. Two dispatches: `shaders/candidates.wgsl` finds the
/// top k of each part of the vocabulary, `shaders/sample.wgsl` cuts and draws. Without top-k, or with one above 1024, the
/// second walks all logits, in one workgroup. A token with the lowest float as its logit is not drawn while there is another.
///
/// # Shapes
/// `sampling`: `[R, 12]`; `logits`: `[R, V]`; `ids`: `[R]`. Several rows are of different sequences: the state has a row for each.
/// # Errors
/// [`Error::Shape`] if an operand has another shape.
pub fn sample(
    rec: &mut Recorder,
    sampling: &Tensor,
    state: &StepState,
    logits: &Tensor,
    ids: &Tensor,
) -> Result<(), Error> {
    let [n_rows, n_vocab] = logits.dims2("sample", "logits")?;
    sampling.expect_shape("sample", "sampling", &[n_rows, Sampling::WORDS])?;
    ids.expect_shape("sample", "ids", &[n_rows])?;
    let n_parts = n_vocab.div_ceil(candidates::PART);
    // A pair of words for each part, then as many for each as lists can have.
    let n_found = 1 + sampling::MOST.min(n_vocab);
    let found = rec.temporary_words("candidates", &[n_rows, n_found, n_parts, 2])?;
    let params = SampleParams { n_vocab, n_parts, row_words: state.row_words(), found_stride: n_found * n_parts };
    rec.dispatch(&shaders::CANDIDATES, None, &[], params, &[sampling, logits, &found], [n_parts, n_rows, 1])?;
    rec.dispatch(&shaders::SAMPLE, None, &[], params, &[sampling, state.tensor(), logits, &found, ids], [n_rows, 1, 1])
}
