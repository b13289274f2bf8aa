//! The kernels: shape checks, params and grids. Each function records one kernel (a few record two); what it computes
//! stands in `shaders/<kernel>.wgsl`, and again in Rust in `cpu/`.

mod activation;
mod argmax;
mod attention;
mod by_head;
mod cached;
mod embed;
mod experts;
mod gate_up;
mod grid_conv;
mod half_rows;
mod head_matmul;
mod linear;
mod linear_norm;
#[cfg(feature = "lora")]
mod lora;
mod matmul;
mod max_sim;
pub mod microbench;
mod mol;
mod norm;
mod pool;
mod recurrent;
mod rope;
mod sample;
mod select_top;
mod softmax;
mod state;

pub use activation::{
    Activation, Gate, Gates, Gelu, add, clip, gated, geglu, gelu, multiply, relu, scale, sigmoid_gate, silu, soft_cap,
    swiglu,
};
pub use argmax::{ARGMAX_CHUNK, argmax};
pub use attention::{AttentionConfig, PackedTiles, attention, attention_next, attention_packed, cross_attention};
pub use by_head::by_head;
pub use cached::{CachedKeys, KvType};
pub use embed::{Embedding, embed, embed_sum};
pub use experts::{
    ExpertDown, ExpertGateUp, ExpertGroups, ExpertProduct, ExpertRows, ExpertScore, ExpertTiles, MAX_EXPERTS,
    MAX_GROUPS, MAX_SHARED, Router, SharedExperts, expert_sum, route,
};
pub use gate_up::{gate_up, up_gated};
pub use grid_conv::grid_conv;
pub use half_rows::{HalfRows, Input, half_gated, half_rows};
pub use head_matmul::{HeadColumns, HeadMatrices, LatentKey};
pub use linear::{Linear, Norm, matvec};
pub use linear_norm::linear_norm;
#[cfg(feature = "lora")]
pub use lora::{LowRank, MAX_MEMBERS, add_lora, gate_up_lora, matvec_lora, up_gated_lora};
pub use matmul::{matmul, matmul_plain, split_sum};
pub use max_sim::max_sim;
pub use mol::{Combination, MolActivation, MolForm, MolGate, MolGateWeights, MolOperands, MolScores, Pairing, mol};
pub use norm::{LayerNorm, add_rms_norm, layer_norm, rms_norm, rms_norm_columns, rms_norm_groups};
pub use pool::{Pooling, pool};
pub use recurrent::{Decay, DeltaRule, MAX_TAPS, N_STATES, SelectiveScan, ShortConv};
pub(crate) use rope::mrope_rows;
pub use rope::{
    Heads, QkNorm, QueryGrowth, RopeConfig, RopeScaling, RopeStyle, cache_kv, rope, rope_kv, rope_packed, rope_table,
};
pub use sample::{NON_FINITE, Sampling, mask_logits, penalize, sample};
pub use select_top::{MAX_TOP, NO_ITEM, TopStrip, merge_top, select_top, top_splits};
pub use softmax::softmax;
pub use state::{BatchRow, PAGE, StepState, advance, last_row};

pub(crate) use attention::MAX_HEAD_DIM;
pub(crate) use linear::DispatchPlan;
pub(crate) use linear::{INVARIANT, fold_norm, folds_norm, suits_few};
pub(crate) use linear::{is_sound, usual};
pub(crate) use linear_norm::fuses_norm;
pub(crate) use matmul::{is_tiled, matmul_input, product_kernel};
pub(crate) use mol::{MOL_TILES, mol_tile};
pub(crate) use sample::mask_words;

use crate::dtype::WeightType;
use crate::error::Error;
use crate::shaders::{Kernel, Tier};
use crate::target::Target;

/// A grid of so many workgroups, folded over x and y because a dimension is limited; a shader finds a workgroup's number
/// by `group_index` in `shaders/shared/fold.wgsl`. There may be workgroups past the end, fewer than there are in y.
///
/// A recording for the CPU has all of them in x, and so does one for a GPU unless there are too many.
pub(crate) fn fold(target: &Target, n_groups: u64) -> [u32; 3] {
    let n_groups = n_groups.max(1);
    let y = n_groups.div_ceil(u64::from(target.limits().max_workgroups));
    // An absurd number saturates here and is refused by the recorder's grid check.
    [n_groups.div_ceil(y), y, 1].map(|n| u32::try_from(n).unwrap_or(u32::MAX))
}

/// Workgroups of one dispatch: the number of the first, and the grid from there.
#[derive(Clone, Copy)]
struct GridPart {
    first: u32,
    grid: [u32; 3],
}

/// Cuts `n_groups` workgroups, which have `operations` together, into dispatches that take no longer than the target lets
/// one take and fit into a folded grid.
fn grid_parts(target: &Target, n_groups: u64, operations: u64) -> impl Iterator<Item = GridPart> + use<> {
    let limits = target.limits();
    let n_groups = n_groups.clamp(1, u64::from(u32::MAX)) as u32;
    let n = operations.div_ceil(target.max_dispatch_operations()).max(1);
    let most = u64::from(limits.max_workgroups).saturating_mul(u64::from(limits.max_workgroups));
    let each = (u64::from(n_groups) / n).clamp(1, most.clamp(1, u64::from(u32::MAX))) as u32;
    let target = target.clone();
    (0..n_groups).step_by(each as usize).map(move |first| {
        let grid = fold(&target, u64::from((n_groups - first).min(each)));
        GridPart { first, grid }
    })
}

/// Maximum loop iterations of an invocation, over all its loops: llvmpipe silently leaves loops after 65,535
/// of them. Less a reserve.
const LOOP_ROUNDS: u32 = 65_535 - 4096;

/// The target's tier for a kernel, or the baseline where one invocation of the `scalar` tier would need too many loop
/// iterations.
fn tier_for(target: &Target, kernel: &Kernel, weight: Option<WeightType>, rounds: u64) -> Tier {
    match target.tier_for(kernel, weight) {
        Tier::Scalar if rounds > u64::from(LOOP_ROUNDS) => Tier::Baseline,
        tier => tier,
    }
}

/// Refuses rows or columns of `x`, as `what` says, that one invocation could not walk to the end on software adapters, whose tier is `scalar`.
fn check_loop(target: &Target, kernel: &'static str, rounds: u64, n: u32, what: &str) -> Result<(), Error> {
    if target.tier() != Tier::Scalar || rounds <= u64::from(LOOP_ROUNDS) {
        return Ok(());
    }
    Err(Error::Operand {
        kernel,
        operand: "x",
        expected: format!("{what} that take at most {LOOP_ROUNDS} rounds of a loop in the scalar tier"),
        found: format!("{n}, which take {rounds}"),
    })
}

/// The tier in which a kernel takes rows of `dim` elements, and rows for each workgroup: in the `scalar` tier each
/// invocation takes one. On lavapipe that is faster even for a single row: RMSNorm of 1 x 2048 took 28 us, and 38 us in
/// the baseline.
fn by_row(target: &Target, kernel: &Kernel, dim: u32) -> (Tier, u32) {
    // Three loops over the row, which take an element at a time at worst, in runs of 64.
    let tier = tier_for(target, kernel, None, 4 * u64::from(dim));
    (tier, if tier == Tier::Scalar { 8 } else { 1 })
}
