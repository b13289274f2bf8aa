//! What the draw of a token needs: two dispatches whose time is barriers and waiting rather than bytes.

use super::{Work, params};
use crate::recording::Dispatch;
use crate::shaders::constants::candidates::PART;
use crate::shaders::constants::sampling::MOST;
use crate::shaders::params::SampleParams;

/// Top-k that is assumed: a recording does not know it.
const TOP_K: f64 = 40.0;
/// Invocations of a workgroup.
const LANES: f64 = 256.0;
/// Cycles that a barrier of a workgroup of 256 takes.
const BARRIER: f64 = 40.0;
/// Cycles from a load from workgroup memory to its value.
const SHARED_LOAD: f64 = 30.0;
/// Cycles for each addition of one subgroup's lanes to the same word of workgroup memory: the leading bits of logits differ
/// little, so the first histogram of a selection has nearly all of them in a few bins.
const SAME_WORD: f64 = 2.0;

/// Cycles of a radix selection over so many keys: four histograms, each with five barriers and a search of its bins.
fn selection(n_keys: f64) -> f64 {
    4.0 * (5.0 * BARRIER + 4.0 * SHARED_LOAD) + SAME_WORD * n_keys
}

/// `candidates`: a part of the logits, once, and its list.
pub(super) fn candidates(dispatch: &Dispatch<'_>, rows: Work) -> Work {
    let SampleParams { n_vocab, n_parts, .. } = params(dispatch);
    let listed = f64::from(n_parts) * (1.0 + TOP_K);
    let n_keys = f64::from(PART.min(n_vocab));
    Work {
        bytes: 4.0 * f64::from(n_vocab) + 8.0 * listed,
        operations: 0.0,
        // To load a key and compare it in each of four histograms.
        instructions: f64::from(n_vocab) * (8.0 + 4.0 * 6.0),
        group_lanes: LANES,
        cycles: selection(n_keys) + 4.0 * BARRIER,
        // Settings, logits.
        trips: 2.0,
        ..rows
    }
}

/// `sample`: the lists, in one workgroup, and what is left of them.
pub(super) fn sample(dispatch: &Dispatch<'_>, rows: Work) -> Work {
    let SampleParams { n_parts, .. } = params(dispatch);
    let listed = f64::from(n_parts) * TOP_K;
    debug_assert!(TOP_K <= f64::from(MOST));
    // Each of these is walked once for its rank, once for the mass and once for the run's sum; then come all runs' sums.
    let walks = 3.0 * TOP_K * SHARED_LOAD + LANES * 8.0;
    let reductions = 3.0 * 11.0 * BARRIER;
    Work {
        bytes: 8.0 * (f64::from(n_parts) + listed),
        operations: 0.0,
        instructions: listed * 32.0,
        group_lanes: LANES,
        cycles: selection(listed) + selection(TOP_K) + walks + reductions + 8.0 * BARRIER,
        // Settings, what parts say, and their lists twice: keys, then pairs.
        trips: 4.0,
        ..rows
    }
}
