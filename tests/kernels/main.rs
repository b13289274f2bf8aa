//! Kernel conformance: every kernel, on the CPU and in every tier of the GPU, against f64 oracles written here.
//!
//! A case is named by one line, `matvec/Q8_0/subgroups/t=2,n=65,k=96/student/seed=17`; failures print it, and
//! `TILEWRIGHT_CASE=<line>` runs it alone (a part of the line runs all cases that contain it). All cases run with
//! `TILEWRIGHT_FULL` (`scripts/test --full`). Otherwise each executor has `BUDGET`: it runs a case of each kernel,
//! then one of each of its forms and weight types, then others, in a random order; `TILEWRIGHT_SEED` with the printed
//! seed repeats the order. A case does not depend on the order. `TILEWRIGHT_ROUNDS=n` draws inputs from n seeds.

#[path = "../common/mod.rs"]
mod common;

mod activation;
mod argmax;
mod attention;
mod by_head;
#[cfg(not(target_arch = "wasm32"))]
mod draws;
mod embed;
#[cfg(not(target_arch = "wasm32"))]
mod errors;
mod experts;
#[cfg(not(target_arch = "wasm32"))]
mod fold;
mod fused;
mod grid_conv;
mod harness;
mod inputs;
mod latent;
mod linear;
#[cfg(feature = "lora")]
mod lora;
mod max_sim;
mod mol;
#[cfg(not(target_arch = "wasm32"))]
mod mol_parts;
mod norm;
mod pool;
#[cfg(not(target_arch = "wasm32"))]
mod probe;
mod recurrent;
mod rope;
mod rows;
mod sample;
mod select_top;
mod softmax;
#[cfg(target_arch = "wasm32")]
mod web;

use std::collections::{BTreeMap, HashSet};
#[cfg(not(target_arch = "wasm32"))]
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

#[cfg(not(target_arch = "wasm32"))]
use common::shared;
#[cfg(not(target_arch = "wasm32"))]
use tilewright::{Bucket, Choice};
use tilewright::{Device, Tier, WeightType, Workspace, shaders};

use harness::{Case, execute, recorded};
use inputs::Source;
use web_time::Instant;

/// Time in which an executor may start cases beyond one of each kernel. On a software adapter nearly all of it goes to
/// compiling pipelines.
const BUDGET: Duration = Duration::from_secs(if cfg!(target_arch = "wasm32") { 12 } else { 30 });
/// Minimum cases executed on all GPU tiers together and on the CPU, in a full run.
const FEWEST: [usize; 2] = [12_000, 6000];
/// One case in this many runs `REPEATS` times and must give the same bits each time.
const REPEATED: usize = 40;
const REPEATS: usize = 20;

/// Prints a line, in a browser to the console.
macro_rules! say {
    ($($arg:tt)*) => {
        #[cfg(not(target_arch = "wasm32"))]
        println!($($arg)*);
        #[cfg(target_arch = "wasm32")]
        wasm_bindgen_test::console_log!($($arg)*);
    };
}

fn all_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    activation::cases(&mut cases);
    argmax::cases(&mut cases);
    attention::cases(&mut cases);
    by_head::cases(&mut cases);
    embed::cases(&mut cases);
    experts::cases(&mut cases);
    fused::cases(&mut cases);
    grid_conv::cases(&mut cases);
    latent::cases(&mut cases);
    linear::cases(&mut cases);
    #[cfg(feature = "lora")]
    lora::cases(&mut cases);
    max_sim::cases(&mut cases);
    mol::cases(&mut cases);
    norm::cases(&mut cases);
    pool::cases(&mut cases);
    recurrent::cases(&mut cases);
    rope::cases(&mut cases);
    sample::cases(&mut cases);
    select_top::cases(&mut cases);
    softmax::cases(&mut cases);
    #[cfg(not(target_arch = "wasm32"))]
    {
        mol_parts::cases(&mut cases);
        probe::cases(&mut cases);
    }
    cases
}

/// Kernels that a case may record, by its name; `linear` and `matmul_split` choose among several.
fn kernels_of(case: &Case) -> &[&str] {
    match case.kernel {
        // Half precision records another kernel.
        "matmul" => &["matmul", "matmul_half"],
        "attention" if case.variant.contains("+next") => &["attention_decode"],
        "attention" => &["attention_prefill", "attention_half"],
        _ => std::slice::from_ref(&case.kernel),
    }
}

/// Whether a tier has its own shader for a case's kernel and weight type, which its variant begins with; the baseline
/// has one for each. Names that are not kernels stand for a choice among kernels and run everywhere.
fn is_own(case: &Case, tier: Tier) -> bool {
    let mut kernels = shaders::ALL.iter().filter(|kernel| kernels_of(case).contains(&kernel.name)).peekable();
    if tier == Tier::Baseline || kernels.peek().is_none() {
        return true;
    }
    let weight = weight_of(case).map(WeightType::layout);
    let is_of_weight = |v: &shaders::Variant| v.weight.is_none() || weight.is_none() || v.weight == weight;
    kernels.any(|kernel| kernel.variants.iter().any(|v| v.tier == tier && is_of_weight(v)))
}

/// Weight type at the beginning of a case's variant.
fn weight_of(case: &Case) -> Option<WeightType> {
    WeightType::ALL.into_iter().find(|weight| case.variant.split('+').next() == Some(weight.name()))
}

/// Weight type of a case's variant, if any, and the rest, which compiles to a different pipeline per type.
fn weight_and_form(case: &Case) -> [&str; 2] {
    let (weight, form) = case.variant.split_at(weight_of(case).map_or(0, |weight| weight.name().len()));
    [weight, form]
}

/// Pipelines of a case: shaders with the values of their overrides. None if it cannot be recorded, which its run
/// reports.
fn pipelines_of(device: &Device, case: &Case) -> HashSet<(&'static str, String)> {
    let mut source = Source::new(case.inputs, case.seed(0), case.is_staged_in_half(device));
    let job = (case.build)(&mut source);
    let Ok((_, rec)) = recorded(device, &job) else { return HashSet::new() };
    let recording = rec.finish(&mut Workspace::default());
    recording.dispatches().map(|dispatch| (dispatch.label(), format!("{:?}", dispatch.constants()))).collect()
}

/// The case requested by name, without its seed, and the seed.
fn filter() -> Option<(String, Option<u64>)> {
    let line = std::env::var("TILEWRIGHT_CASE").ok()?;
    Some(match line.split_once("seed=") {
        Some((name, seed)) => (name.to_string(), Some(seed.parse().expect("the seed is a number"))),
        None => (line, None),
    })
}

#[derive(Default)]
struct Summary {
    executed: usize,
    failed: usize,
    worst_nmse: f64,
    worst_case: String,
    time: Duration,
}

/// Failures printed per kernel: a broken kernel breaks hundreds of cases.
const PRINTED: usize = 3;

/// The cases that a device has shaders for, in seeded order: first one of each kernel, then one of each form and
/// weight type, then all others. Each with a flag for the first of its kernel.
fn drawn<'a>(device: &Device, cases: &'a [Case], seed: u64) -> Vec<(&'a Case, bool)> {
    let is_own = |case: &&Case| !device.is_gpu() || is_own(case, device.tier());
    let mut drawn: Vec<&Case> = cases.iter().filter(is_own).collect();
    drawn.sort_by_cached_key(|case| case.seed(seed));
    let mut seen = HashSet::new();
    let mut ranked: Vec<(u8, &Case)> = Vec::with_capacity(drawn.len());
    for case in drawn {
        let [weight, form] = weight_and_form(case);
        let is_new_kernel = seen.insert((case.kernel, "", ""));
        let is_new = seen.insert((case.kernel, weight, "weight")) | seen.insert((case.kernel, form, "form"));
        ranked.push((if is_new_kernel { 0 } else { 2 - u8::from(is_new) }, case));
    }
    ranked.sort_by_key(|&(rank, _)| rank);
    ranked.into_iter().map(|(rank, case)| (case, rank == 0)).collect()
}

/// Runs the cases that the device has shaders for: all, or one of each kernel and as many others as the budget allows.
/// Prints failures and a line per kernel. Returns the numbers executed and failed.
async fn conform(device: &Device, cases: &[Case], budget: Option<Duration>) -> (usize, usize) {
    let start = Instant::now();
    let executor = if device.is_gpu() { device.tier().name() } else { "cpu" };
    let filter = filter();
    let budget = budget.filter(|_| !common::is_full() && filter.is_none());
    let seed = common::seed();
    let mut compiled = HashSet::new();
    let n_seeds = std::env::var("TILEWRIGHT_ROUNDS").ok().map_or(1, |n| n.parse().expect("a number of rounds"));
    let mut summaries: BTreeMap<&str, Summary> = BTreeMap::new();
    for (i, (case, is_first)) in drawn(device, cases, seed).into_iter().enumerate() {
        if let Some(budget) = budget {
            if !is_first && start.elapsed() > budget {
                break;
            }
            let needed = if device.is_gpu() { pipelines_of(device, case) } else { HashSet::new() };
            // The last third is for quick cases that need no new pipeline.
            let compiles = is_first || start.elapsed() < budget * 2 / 3;
            if !compiles && !needed.is_subset(&compiled) {
                continue;
            }
            compiled.extend(needed);
        }
        let asked = filter.as_ref().and_then(|(_, seed)| *seed);
        for seed in asked.map_or(0..n_seeds, |seed| seed..seed + 1) {
            let name = case.name(executor, seed);
            if filter.as_ref().is_some_and(|(part, _)| !name.contains(part.as_str())) {
                continue;
            }
            let case_start = Instant::now();
            let staged_f16 = case.is_staged_in_half(device);
            let rounds = if i % REPEATED == 0 { REPEATS } else { 1 };
            let mut source = Source::new(case.inputs, case.seed(seed), staged_f16);
            let job = (case.build)(&mut source);
            #[cfg(target_arch = "wasm32")]
            let outcome = execute(device, &job, rounds).await;
            // A panicking case is named like any other failure.
            #[cfg(not(target_arch = "wasm32"))]
            let outcome = catch_unwind(AssertUnwindSafe(|| common::block_on(execute(device, &job, rounds))))
                .unwrap_or_else(|_| Err("panicked".into()));
            let summary = summaries.entry(case.kernel).or_default();
            summary.executed += 1;
            summary.time += case_start.elapsed();
            match outcome {
                Ok(nmse) if nmse > summary.worst_nmse => (summary.worst_nmse, summary.worst_case) = (nmse, name),
                Ok(_) => {}
                Err(reason) => {
                    summary.failed += 1;
                    if summary.failed <= PRINTED {
                        say!("FAILED {name}: {reason}");
                    }
                }
            }
        }
    }
    let (executed, failed) = summaries.values().fold((0, 0), |(e, f), s| (e + s.executed, f + s.failed));
    let (info, limits) = (device.info(), device.limits());
    let seconds = start.elapsed().as_secs_f64();
    say!("{executor}: {executed} cases, {failed} failed, in {seconds:.1} s on {} {}", info.name, info.driver);
    let chosen = match budget {
        Some(_) => format!(", {} pipelines, TILEWRIGHT_SEED={seed}", compiled.len()),
        None => String::new(), // all cases ran
    };
    say!("  largest binding {} bytes{chosen}", limits.max_binding_bytes);
    for (kernel, s) in &summaries {
        let ms = s.time.as_secs_f64() * 1e3;
        let counts = format!("{:5} cases {:5} failed {ms:7.0} ms", s.executed, s.failed);
        say!("  {kernel:13} {counts}  worst NMSE {:.1e} {}", s.worst_nmse, s.worst_case);
    }
    (executed, failed)
}

/// Fails if a case did, or if a full run executed too few.
fn judge(executed: usize, failed: usize, fewest: usize) {
    assert!(failed == 0, "{failed} of {executed} cases failed; TILEWRIGHT_CASE=<line> runs one");
    let is_all = common::is_full() && filter().is_none();
    assert!(executed >= if is_all { fewest } else { 1 }, "only {executed} cases were executed, of {fewest} at least");
}

#[cfg(not(target_arch = "wasm32"))]
#[test]
fn cpu_matches_oracle() {
    let (executed, failed) = common::block_on(conform(&common::cpu(), &all_cases(), Some(BUDGET / 2)));
    judge(executed, failed, FEWEST[1]);
}

#[cfg(not(target_arch = "wasm32"))]
#[test]
fn gpu_matches_oracle() {
    // Small dispatches use one core at most, so each tier has its own device and thread.
    let of_tier = |tier: Tier| {
        let device = shared::gpus_beside_cpu([tier]).pop()?;
        Some((tier.name(), common::block_on(conform(&device, &all_cases(), Some(BUDGET)))))
    };
    let outcomes: Vec<(&str, (usize, usize))> = std::thread::scope(|scope| {
        let asked = std::env::var("TILEWRIGHT_TIER").ok();
        let tiers = Tier::ALL.into_iter().filter(|tier| asked.as_ref().is_none_or(|asked| asked == tier.name()));
        let threads: Vec<_> = tiers.map(|tier| scope.spawn(move || of_tier(tier))).collect();
        threads.into_iter().filter_map(|thread| thread.join().expect("a tier panicked")).collect()
    });
    if outcomes.is_empty() {
        return common::skip("no adapter has one of the tiers");
    }
    let (executed, failed) = outcomes.iter().fold((0, 0), |(e, f), (_, of_tier)| (e + of_tier.0, f + of_tier.1));
    println!("gpu: {executed} cases in tiers {:?}", outcomes.iter().map(|(tier, _)| tier).collect::<Vec<_>>());
    judge(executed, failed, FEWEST[0]);
}

/// All choices open to a tuner, on a few cases each.
#[cfg(not(target_arch = "wasm32"))]
#[test]
fn every_tuning_choice_matches_oracle() {
    let Some(device) = shared::gpu(Some(Tier::Subgroups)).or_else(|| shared::gpu(Some(Tier::Baseline))) else { return };
    // A device skips kernels that its tier has no variant of.
    let Some(baseline) = shared::gpu(Some(Tier::Baseline)) else { return };
    let together = |tier| (0..=6).map(move |log| Choice::new(tier, 1 << log));
    let tiles = |tier| [64, 128].map(|size| Choice::new(tier, size));
    let alone = Choice::new(Tier::Scalar, 1);
    let of_rows = together(Tier::Baseline).chain(together(Tier::Subgroups)).chain([alone]);
    let runs = of_rows.map(|choice| (&device, &["matvec", "gate_up"][..], choice));
    let of_tiles = tiles(Tier::Baseline).into_iter().chain([alone]).map(|choice| (&baseline, choice));
    let runs = runs.chain(of_tiles.map(|(device, choice)| (device, &["matmul"][..], choice)));
    let (mut executed, mut failed) = (0, 0);
    for (i, (device, kernels, choice)) in runs.enumerate() {
        let mut tuning = device.tuning().clone();
        let logs = |n: u32| (0..n).map(|log| 1 << log);
        for (&kernel, weight) in kernels.iter().flat_map(|k| WeightType::ALL.map(|weight| (k, weight))) {
            let tokens = if kernel == "matmul" { 9 } else { 1 };
            for (rows, blocks) in logs(18).flat_map(|rows| logs(8).map(move |blocks| (rows, blocks))) {
                for tokens in logs(tokens) {
                    tuning.choose(Bucket { kernel, weight, rows, blocks, tokens }, Some(choice));
                }
            }
        }
        // Pipelines of all types would take a minute. Choices of the same size in different tiers get different types.
        let few = ["F32", "Q8_0", "Q4_K"];
        let of_choice = if common::is_full() { &few[..] } else { &few[i % few.len()..][..1] };
        let few = |case: &Case| of_choice.iter().any(|weight| case.variant.starts_with(weight));
        let cases = all_cases().into_iter().filter(|case| kernels.contains(&case.kernel) && few(case));
        // Every n-th case, different for each choice; or a random sample.
        let cases: Vec<Case> =
            if common::is_full() { cases.skip(i).step_by(37).collect() } else { common::drawn(9, cases) };
        println!("{choice:?}");
        let of_choice = common::block_on(conform(&device.with_tuning(tuning), &cases, None));
        (executed, failed) = (executed + of_choice.0, failed + of_choice.1);
    }
    assert!(failed == 0, "{failed} of {executed} cases failed");
    let fewest = if common::is_full() { 300 } else { 100 };
    assert!(filter().is_some() || executed > fewest, "only {executed} cases were executed");
}
