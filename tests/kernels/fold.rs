//! Grids with more workgroups than the limit per dimension.

use std::collections::{BTreeMap, BTreeSet};

use tilewright::kernels;
use tilewright::{Device, Error, Recorder, TargetLimits, Tier, Workspace, shaders};

use crate::common::{self, Expected, shared};
use crate::harness::{Bound, Case, Job, Operand, ROUND, execute, recorded};
use crate::inputs::Source;
use crate::{all_cases, is_own};

/// Kernels with grids independent of the number of rows, and those that only the benches use.
const NEVER_FOLDED: [&str; 11] = [
    "advance",
    "candidates",
    "last_row",
    "mask_logits",
    "matmul_naive",
    "mol_gate",
    "penalize",
    "probe_matrix",
    "probe_read",
    "sample",
    "weighted_sum",
];

/// Runs the conformance cases on a device with an artificially low limit of workgroups per dimension.
#[test]
fn folded_grids_match_oracle() {
    /// Folded cases of each kernel to run on each tier, doubled with `TILEWRIGHT_FULL`.
    const ENOUGH: usize = 1;
    /// Cases of each kernel to try, spread from first to last, and more until one was folded on some tier; all with
    /// `TILEWRIGHT_FULL`. Computing expectations, once for all tiers, dominates the time.
    const LOOKED_AT: usize = 6;
    let enough = if common::is_full() { 2 * ENOUGH } else { ENOUGH };
    let tiers = [Tier::Baseline, Tier::Scalar, Tier::F16, Tier::Subgroups];
    // All tiers: some kernels are folded in one only.
    let devices = shared::gpus_in_each(tiers);
    if devices.is_empty() {
        return;
    }
    let mut by_kernel: BTreeMap<&str, Vec<Case>> = BTreeMap::new();
    for case in all_cases() {
        by_kernel.entry(case.kernel).or_default().push(case);
    }
    let (mut folded, mut executed) = (BTreeSet::new(), 0);
    let mut n_folded: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (looked_at, case) in by_kernel.values().flat_map(|cases| spread(cases, LOOKED_AT).enumerate()) {
        // Expectations are the same on all tiers, except for rounded operands.
        let mut jobs = [None, None];
        for device in devices.iter().filter(|device| is_own(case, device.tier())) {
            let tier = device.tier();
            let kernel = if tier.rounds_to_half() && case.kernel == "matmul" { "matmul_half" } else { case.kernel };
            let is_folded = |label: &&str| label.split('.').next() == Some(kernel);
            let is_enough = NEVER_FOLDED.contains(&case.kernel) || folded.iter().any(is_folded);
            // Checked before computing expectations.
            let is_done = n_folded.get(&(tier.name(), kernel)).is_some_and(|&n| n >= enough);
            if (is_done || looked_at >= LOOKED_AT && is_enough) && !common::is_full() {
                continue;
            }
            let staged_f16 = case.is_staged_in_half(device);
            let build = || (case.build)(&mut Source::new(case.inputs, case.seed(0), staged_f16));
            let job = &*jobs[usize::from(staged_f16)].get_or_insert_with(build);
            // The lowest sufficient limit.
            for max_workgroups in [2, 5, 13, 64] {
                let few = device.with_limits(TargetLimits { max_workgroups, ..device.limits() });
                let recording = match recorded(&few, job) {
                    Ok((_, rec)) => rec.finish(&mut Workspace::default()),
                    Err(Error::Operand { operand: "grid", .. }) => continue,
                    Err(error) => panic!("{}: {error}", case.name(tier.name(), 0)),
                };
                let steps = recording.labels().zip(recording.grids());
                let labels: Vec<_> = steps.filter(|(_, grid)| grid[1] > 1).map(|(label, _)| label).collect();
                let kernels = labels.iter().filter_map(|label| label.split('.').next());
                let kernels: BTreeSet<_> = kernels.map(|kernel| (tier.name(), kernel)).collect();
                if kernels.iter().any(|kernel| n_folded.get(kernel).is_none_or(|&n| n < enough)) {
                    let outcome = common::block_on(execute(&few, job, 1));
                    assert!(outcome.is_ok(), "{} in grids of {max_workgroups}: {outcome:?}", case.name(tier.name(), 0));
                    kernels.into_iter().for_each(|kernel| *n_folded.entry(kernel).or_default() += 1);
                    folded.extend(labels);
                    executed += 1;
                }
                break;
            }
        }
    }
    // `tests/matrices` folds kernels that only other tiers have.
    let runs = |kernel: &&&shaders::Kernel| kernel.variants.iter().any(|variant| tiers.contains(&variant.tier));
    let kernels = shaders::ALL.iter().filter(|kernel| !NEVER_FOLDED.contains(&kernel.name)).filter(runs);
    for kernel in kernels {
        let is_folded = folded.iter().any(|label| label.split('.').next() == Some(kernel.name));
        assert!(is_folded, "no grid of `{}` was folded in {executed} cases", kernel.name);
    }
}

/// All cases, beginning with `n` spread from first to last.
fn spread(cases: &[Case], n: usize) -> impl Iterator<Item = &Case> {
    let stride = cases.len().div_ceil(n).max(1);
    (0..stride).flat_map(move |first| cases.iter().skip(first).step_by(stride))
}

/// More rows than any adapter's limit of 65,535 workgroups per dimension, one workgroup each.
#[test]
fn rows_beyond_one_grid_dimension_are_computed() {
    const ROWS: u32 = 70_001;
    const DIM: usize = 4;
    let Some(device) = shared::gpu(Some(Tier::Baseline)) else { return };
    assert!(device.limits().max_workgroups < ROWS, "the adapter has room for all rows");
    let x: Vec<f32> = common::uniform(ROWS as usize * DIM, 1);
    let weight = common::uniform(DIM, 2);
    let normed = |row: &[f32]| {
        let mean_square = row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / DIM as f64;
        let scale = 1.0 / (mean_square + 1e-5).sqrt();
        let value = move |(&x, &weight): (&f32, &f32)| f64::from(x) * scale * f64::from(weight);
        row.iter().zip(&weight).map(value).collect::<Vec<f64>>()
    };
    let want = x.chunks_exact(DIM).flat_map(normed).map(|y| Expected::new(y, 16.0 * ROUND * y.abs(), 0.0)).collect();
    let operands = vec![
        Operand::floats("x", &[ROWS, DIM as u32], x),
        Operand::floats("weight", &[DIM as u32], weight),
        Operand::close("y", &[ROWS, DIM as u32], want, 1e-10),
    ];
    let job = Job::new(operands, |rec: &mut Recorder, bound: &Bound| {
        kernels::rms_norm(rec, bound.tensor(0), bound.tensor(1), bound.tensor(2), 1e-5)
    });
    let outcome = common::block_on(execute(&device, &job, 1));
    assert!(outcome.is_ok(), "{outcome:?}");
}

/// A grid too large for folding is an error that names the kernel.
#[test]
fn grids_beyond_two_dimensions_are_refused() {
    let device = Device::cpu();
    let few = device.with_limits(TargetLimits { max_workgroups: 3, ..device.limits() });
    let declare =
        |rows| tilewright::Tensor::declare("x", tilewright::Role::Activations, &[rows, 256], tilewright::DType::F32);
    let silu = |rows| {
        let [x, y] = [declare(rows), declare(rows)].map(|tensor| tensor.expect("the shape is valid"));
        kernels::silu(&mut few.recorder(), &x, &y)
    };
    assert!(silu(9).is_ok());
    assert!(matches!(silu(10), Err(Error::Operand { kernel: "silu", operand: "grid", .. })));
}
