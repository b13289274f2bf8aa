//! The kernels: shape checks, params and grids. Each function records one kernel (a few record two); what it computes
//! stands in `shaders/<kernel>.wgsl`, and again in Rust in `cpu/`.

mod activation;
mod argmax;
mod attention;
mod embed;
mod linear;
mod norm;
mod probe;
mod rope;
mod sample;
mod softmax;
mod state;
mod top_k;

pub use activation::{Gelu, add, gelu, scale, swiglu};
pub use argmax::{ARGMAX_CHUNK, argmax};
pub use attention::{AttentionConfig, attention};
pub use embed::embed;
pub use linear::{Linear, matmul, matmul_naive, matmul_plain, matvec};
pub use norm::{layer_norm, rms_norm};
pub use probe::{PROBE_READS, ReadOrder, probe_read};
pub use rope::{RopeConfig, RopeScaling, RopeStyle, rope, rope_kv, rope_table};
pub use sample::{NON_FINITE, Sampling, penalize, sample};
pub use softmax::softmax;
pub use state::{StepState, advance, last_row};
pub use top_k::top_k;

pub(crate) use activation::{AddParams, GeluParams, ScaleParams, SwigluParams};
pub(crate) use argmax::{ArgmaxMergeParams, ArgmaxParams};
pub(crate) use attention::AttentionParams;
pub(crate) use embed::EmbedParams;
pub(crate) use linear::{ACCUMULATE, BIAS, LinearParams, PlainParams};
pub(crate) use norm::NormParams;
pub(crate) use probe::ProbeReadParams;
pub(crate) use rope::{RopeKvParams, RopeParams};
pub(crate) use sample::SampleParams;
pub(crate) use softmax::SoftmaxParams;
pub(crate) use state::{AdvanceParams, LastRowParams};
pub(crate) use top_k::TopKParams;

/// Workgroups for `len` elements at `per_group` each, folded over x and y; the shader needs x to undo it.
fn fold(len: u64, per_group: u64) -> [u32; 3] {
    const MAX_X: u64 = 32_768;
    let groups = len.div_ceil(per_group).max(1);
    let x = groups.min(MAX_X);
    // An absurd length saturates here and is refused by the recorder's grid check.
    [x as u32, u32::try_from(groups.div_ceil(x)).unwrap_or(u32::MAX), 1]
}
