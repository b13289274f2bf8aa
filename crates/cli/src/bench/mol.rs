//! `tilewright bench mol`: mixtures of logits on the device's roofline, shapes and searches within limits.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use tilewright::bench::mol::{self, MolPlan, MolRates, MolRow, MolShape};
use tilewright::bench::{Limits, Probes, normal};
use tilewright::retrieval::mol::{Mol, MolChoice, MolSearch, MolWeights};
use tilewright::{Device, Error, WeightType};

use super::{parse_ms, print_csv, print_device};
use crate::{CommandFailure, DeviceArgs, print_json, show_bytes};

/// Shapes of the paper's experiments: MovieLens 1M and 20M, Amazon Books.
const PAPER: [[u32; 3]; 3] = [[8, 4, 64], [8, 4, 128], [8, 8, 32]];
const PAPER_HIDDEN: u32 = 128;
/// Queries of each search.
const QUERIES: usize = 32;

#[derive(Args)]
pub struct MolBenchArgs {
    /// Number of items in the corpus; the default is the size of Amazon Books in the paper.
    #[arg(long, default_value_t = 695_762, value_parser = clap::value_parser!(u64).range(1..=1 << 31), value_name = "N")]
    items: u64,
    /// Numbers of components per query and per item.
    #[arg(long, value_delimiter = ',', default_value = "4x4,8x4,8x8", value_parser = parse_components, value_name = "NxM,..")]
    components: Vec<[u32; 2]>,
    /// Dimensions of a component.
    #[arg(long, value_delimiter = ',', default_value = "32,64,128", value_name = "N,..")]
    dims: Vec<u32>,
    /// Widths of the gate's hidden layer.
    #[arg(long, value_delimiter = ',', default_value = "32,128", value_name = "N,..")]
    gates: Vec<u32>,
    /// Storage types of item components: f32, f16, q8_0.
    #[arg(long, value_delimiter = ',', default_value = "f16,q8_0", value_parser = parse_storage, value_name = "TYPE,..")]
    storage: Vec<WeightType>,
    /// Queries per batch, 1 to 32.
    #[arg(long, value_delimiter = ',', default_value = "1,8,32", value_name = "N,..")]
    batch: Vec<u32>,
    /// Time limit of a batch over all items, in milliseconds.
    #[arg(long, value_parser = parse_ms, value_name = "MS")]
    max_ms: Option<f64>,
    /// Memory limit of all items, in MiB.
    #[arg(long, value_name = "MB")]
    max_mb: Option<u64>,
    /// Items scored at a time when a mixture is compared with other kernels [default: by device].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 16), value_name = "N")]
    strip: Option<u32>,
    /// Shapes to measure for each batch size.
    #[arg(long, default_value_t = 2, value_name = "N")]
    measured: usize,
    /// Weights of a mixture (safetensors), to try searching random items with it.
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Recall that a search must reach.
    #[arg(long, default_value_t = 0.99, value_name = "SHARE")]
    recall: f64,
    /// Results per query.
    #[arg(short, default_value_t = 10, value_name = "N")]
    k: usize,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    format: super::FormatArgs,
}

fn parse_components(text: &str) -> Result<[u32; 2], String> {
    let pair = text.split_once('x').and_then(|(n, m)| Some([n.parse().ok()?, m.parse().ok()?]));
    pair.ok_or("expected two numbers such as 8x4".into())
}

fn parse_storage(text: &str) -> Result<WeightType, String> {
    let types = [WeightType::F32, WeightType::F16, WeightType::Q8_0];
    types.into_iter().find(|t| t.name().eq_ignore_ascii_case(text)).ok_or("expected f32, f16 or q8_0".into())
}

pub fn bench(args: &MolBenchArgs) -> Result<(), CommandFailure> {
    let mut grid = Vec::new();
    for &[query_components, item_components] in &args.components {
        for (&dim, &hidden) in args.dims.iter().flat_map(|dim| args.gates.iter().map(move |hidden| (dim, hidden))) {
            for (&storage, &n_queries) in args.storage.iter().flat_map(|s| args.batch.iter().map(move |n| (s, n))) {
                let shape = MolShape { query_components, item_components, dim, hidden, storage, n_queries };
                shape.check()?;
                grid.push(shape);
            }
        }
    }
    let limits = Limits { seconds: args.max_ms.map(|ms| ms / 1e3), bytes: args.max_mb.map(|mb| mb << 20) };
    let device = args.device.open()?;
    let probes = pollster::block_on(Probes::measure(&device))?;
    // A GPU needs more items to be busy.
    let usual = if device.is_gpu() && device.info().tier != "scalar" { 1 << 14 } else { 1 << 11 };
    let strip = args.strip.unwrap_or(usual);
    let mut tables = Vec::new();
    for [query_components, item_components, dim] in PAPER {
        let (hidden, storage, n_queries) = (PAPER_HIDDEN, WeightType::F16, 32);
        let shape = MolShape { query_components, item_components, dim, hidden, storage, n_queries };
        tables.push((shape, pollster::block_on(mol::measure(&device, shape, strip, &probes))?));
    }
    let rates = MolRates::new(&tables[0].0, strip, &tables[0].1, &probes);
    let mut plans = mol::predict(&grid, args.items, &rates, &probes);
    let device = settle(&device, &mut plans, args, &limits)?;
    let choice = match &args.weights {
        None => None,
        Some(path) => Some(pollster::block_on(try_searches(&device, path, args))?),
    };
    if args.format.json {
        let tables: Vec<_> = tables.iter().map(|(shape, rows)| json!({ "shape": shape, "rows": rows })).collect();
        return print_json(&json!({
            "bench": "mol",
            "device": device.info(),
            "probes": probes,
            "strip": strip,
            "tables": tables,
            "rates": rates,
            "items": args.items,
            "limits": limits,
            "plans": plans,
            "searches": choice,
        }));
    }
    let mut out = io::stdout().lock();
    if args.format.csv {
        print_csv(&mut out, &device, &plans)?;
        return Ok(out.flush()?);
    }
    print_device(&mut out, device.info(), &probes)?;
    for (shape, rows) in &tables {
        print_rows(&mut out, shape, strip, rows)?;
    }
    print_plans(&mut out, &plans, args, &limits)?;
    if let Some(choice) = choice {
        print_searches(&mut out, &choice, args)?;
    }
    Ok(out.flush()?)
}

/// Measures the first plans of each batch size that fit the limits, and saves the tuning made for them.
fn settle(
    device: &Device,
    plans: &mut [MolPlan],
    args: &MolBenchArgs,
    limits: &Limits,
) -> Result<Device, CommandFailure> {
    let mut device = device.clone();
    for &n_queries in &args.batch {
        let mut n_fitting = 0;
        for plan in plans.iter_mut().filter(|plan| plan.shape.n_queries == n_queries) {
            if n_fitting == args.measured {
                break;
            }
            if plan.fits(limits) {
                device = pollster::block_on(mol::settle(&device, plan, args.items))?;
                n_fitting += usize::from(plan.fits(limits));
            }
        }
    }
    if device.is_gpu() {
        device.save_tuning()?;
    }
    Ok(device)
}

async fn try_searches(device: &Device, path: &Path, args: &MolBenchArgs) -> Result<MolChoice, Error> {
    let bytes = fs::read(path).map_err(|error| Error::Io { path: path.into(), source: error })?;
    let weights = MolWeights::from_safetensors(&bytes)?;
    let mut mol = Mol::new(device, &weights, args.storage[0])?;
    let config = mol.config();
    let (item_dim, query_dim) = (config.item_dim as usize, config.query_dim as usize);
    let mut numbers = normal(1);
    let mut take = |n: usize| -> Vec<f32> { numbers.by_ref().take(n).collect() };
    let queries = take(QUERIES * query_dim);
    // In parts, so that not all vectors and components are in memory at a time.
    const PART: u64 = 1 << 16;
    for first in (0..args.items).step_by(PART as usize) {
        let n = PART.min(args.items - first) as usize;
        mol.append(&take(n * item_dim)).await?;
    }
    let users: Vec<u32> = if mol.has_users() { (0..QUERIES as u32).collect() } else { Vec::new() };
    mol.choose(&queries, &users, args.k, args.recall).await
}

fn print_rows(out: &mut impl Write, shape: &MolShape, strip: u32, rows: &[MolRow]) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<44} {:>10} {:>10} {:>11} {:>10} {:>10} {:>9}",
        format!("{shape}, {strip} items"),
        "dispatches",
        "FLOP/byte",
        "ms",
        "GFLOP/s",
        "least ms",
        "of least"
    )?;
    for row in rows {
        writeln!(
            out,
            "{:<44} {:>10} {:>10.1} {:>11.3} {:>10.1} {:>10.3} {:>8.1}%",
            row.operation,
            row.n_dispatches,
            row.intensity(),
            row.seconds * 1e3,
            row.flop as f64 / row.seconds / 1e9,
            row.least_seconds * 1e3,
            100.0 * row.share(),
        )?;
    }
    let row = |operation| rows.iter().find(|row| row.operation == operation);
    if let (Some(mixture), Some(chain), Some(dots)) = (row("mixture"), row("chain"), row("dot product")) {
        writeln!(
            out,
            "the chain takes {:.2} x the mixture's time, {:.2} x its lower bound",
            chain.seconds / mixture.seconds,
            chain.seconds / mixture.least_seconds,
        )?;
        writeln!(
            out,
            "the mixture takes {:.2} x the dot product's time, at least {:.2} x, with {:.0} times the operations",
            mixture.seconds / dots.seconds,
            mixture.least_seconds / dots.seconds,
            mixture.flop as f64 / dots.flop as f64,
        )?;
    }
    Ok(())
}

fn print_plans(out: &mut impl Write, plans: &[MolPlan], args: &MolBenchArgs, limits: &Limits) -> io::Result<()> {
    let fitting = plans.iter().filter(|plan| plan.fits(limits)).count();
    writeln!(out, "\n{} of {} shapes fit the limits for {} items", fitting, plans.len(), args.items)?;
    writeln!(
        out,
        "{:<44} {:>12} {:>10} {:>13} {:>12} {:>9} {:>11} {:>5}",
        "measured", "items", "least ms", "predicted ms", "measured ms", "ratio", "queries/s", "tile"
    )?;
    for plan in plans {
        let Some(seconds) = plan.measured_seconds else { continue };
        writeln!(
            out,
            "{:<44} {:>12} {:>10.1} {:>13.1} {:>12.1} {:>8.2}x {:>11.1} {:>5}{}",
            plan.shape.to_string(),
            show_bytes(plan.items_bytes),
            plan.least_seconds * 1e3,
            plan.predicted_seconds * 1e3,
            seconds * 1e3,
            seconds / plan.predicted_seconds,
            f64::from(plan.shape.n_queries) / seconds,
            plan.tile.map_or("-".into(), |tile| tile.to_string()),
            if plan.fits(limits) { "" } else { "  over the limits" },
        )?;
    }
    for &n_queries in &args.batch {
        let best = plans
            .iter()
            .find(|plan| plan.shape.n_queries == n_queries && plan.measured_seconds.is_some() && plan.fits(limits));
        match best {
            Some(plan) => writeln!(out, "batch {n_queries}: {}", plan.shape)?,
            None => writeln!(out, "batch {n_queries}: no shape fits")?,
        }
    }
    writeln!(out, "Measured on a strip of the items, times the number of strips.")
}

fn print_searches(out: &mut impl Write, choice: &MolChoice, args: &MolBenchArgs) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<44} {:>8} {:>13} {:>12} {:>9} {:>9}",
        format!("{} best of {} random items, {QUERIES} queries", args.k, args.items),
        "recall",
        "predicted ms",
        "measured ms",
        "speed-up",
        "scored"
    )?;
    let exact = choice.trials[0].seconds;
    for (i, trial) in choice.trials.iter().enumerate() {
        writeln!(
            out,
            "{:<44} {:>8.4} {:>13} {:>12.1} {:>8.1}x {:>9.0}{}",
            show_search(trial.how),
            trial.recall,
            trial.predicted_seconds.map_or("-".into(), |seconds| format!("{:.1}", seconds * 1e3)),
            trial.seconds * 1e3,
            exact / trial.seconds,
            trial.scored,
            if i == choice.best { format!("  fastest with at least {}", args.recall) } else { String::new() },
        )?;
    }
    Ok(())
}

fn show_search(how: MolSearch) -> String {
    match how {
        MolSearch::BruteForce => "brute force".into(),
        MolSearch::Naive { per_pair } => format!("naive, {per_pair} a pair"),
        MolSearch::Avg { candidates } => format!("average, {candidates}"),
        MolSearch::Comb { per_pair, candidates } => format!("combined, {per_pair} a pair and {candidates}"),
        MolSearch::Highest { candidates } => format!("highest logit, {candidates}"),
        MolSearch::TwoPass { candidates } => format!("two passes, {candidates}"),
        MolSearch::HIndexer { candidates, sample } => format!("h-indexer, {candidates} by {sample}"),
        MolSearch::Mips => "dot product".into(),
    }
}
