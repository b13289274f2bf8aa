//! Costs of sampling a token: two dispatches dominated by barriers and latency instead of bytes.

use super::{DispatchWork, params};
use crate::recording::Dispatch;
use crate::shaders::constants::candidates::PART;
use crate::shaders::constants::sampling::MOST;
use crate::shaders::params::SampleParams;

/// Assumed top-k: a recording does not contain it.
const TOP_K: f64 = 40.0;
/// Invocations per workgroup.
const LANES: f64 = 256.0;
/// Cycles of a barrier in a workgroup of 256.
const BARRIER: f64 = 40.0;
/// Latency in cycles of a load from workgroup memory.
const SHARED_LOAD: f64 = 30.0;
/// Cycles per atomic addition of a subgroup's lanes to the same word of workgroup memory: the leading bits of logits
/// differ little, so a selection's first histogram has most of them in a few bins.
const SAME_WORD: f64 = 2.0;

/// Cycles of a radix selection over `n_keys` keys: four histograms, each with five barriers and a search of its bins.
fn selection(n_keys: f64) -> f64 {
    4.0 * (5.0 * BARRIER + 4.0 * SHARED_LOAD) + SAME_WORD * n_keys
}

/// `candidates`: reads a part of the logits once and writes its list.
pub(super) fn candidates(dispatch: &Dispatch<'_>, rows: DispatchWork) -> DispatchWork {
    let SampleParams { n_vocab, n_parts, .. } = params(dispatch);
    let listed = f64::from(n_parts) * (1.0 + TOP_K);
    let n_keys = f64::from(PART.min(n_vocab));
    DispatchWork {
        bytes: 4.0 * f64::from(n_vocab) + 8.0 * listed,
        operations: 0.0,
        // Loading a key and comparing it in each of four histograms.
        instructions: f64::from(n_vocab) * (8.0 + 4.0 * 6.0),
        group_lanes: LANES,
        cycles: selection(n_keys) + 4.0 * BARRIER,
        // Options, then logits.
        trips: 2.0,
        ..rows
    }
}

/// `sample`: reduces the lists in one workgroup.
pub(super) fn sample(dispatch: &Dispatch<'_>, rows: DispatchWork) -> DispatchWork {
    let SampleParams { n_parts, .. } = params(dispatch);
    let listed = f64::from(n_parts) * TOP_K;
    debug_assert!(TOP_K <= f64::from(MOST));
    // Each candidate is visited for its rank, for the mass and for the run's sum; then the runs' sums.
    let walks = 3.0 * TOP_K * SHARED_LOAD + LANES * 8.0;
    let reductions = 3.0 * 11.0 * BARRIER;
    DispatchWork {
        bytes: 8.0 * (f64::from(n_parts) + listed),
        operations: 0.0,
        instructions: listed * 32.0,
        group_lanes: LANES,
        cycles: selection(listed) + selection(TOP_K) + walks + reductions + 8.0 * BARRIER,
        // Options, the parts' results, and their lists twice: keys, then pairs.
        trips: 4.0,
        ..rows
    }
}
