//! `tilewright bench memory`: memory of well-known decoders.

use std::io::{self, Write};

use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};
use tilewright::bench::shapes::SIZES;
use tilewright::{Device, Error, LoadOptions, MemoryPlan, WeightType};

use super::super::{CommandFailure, DeviceArgs, print_json, show_bytes};
use super::FormatArgs;
use super::print_csv;
use crate::run::PrecisionArgs;

/// Supported matrix types.
const WEIGHTS: [WeightType; 6] =
    [WeightType::F32, WeightType::F16, WeightType::Q8_0, WeightType::Q6_K, WeightType::Q4_K, WeightType::Q4_0];

#[derive(Args)]
pub struct MemoryBenchArgs {
    /// Context length in tokens.
    #[arg(long, default_value_t = USUAL_CTX, value_name = "N")]
    ctx: u32,
    /// Matrix types: f32, f16, q8_0, q6_k, q4_k, q4_0.
    #[arg(long, value_delimiter = ',', default_values_t = USUAL_WEIGHTS, value_parser = parse_weight, value_name = "TYPE,..")]
    weights: Vec<WeightType>,
    #[command(flatten)]
    precision: PrecisionArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    format: FormatArgs,
}

fn parse_weight(text: &str) -> Result<WeightType, String> {
    let found = WEIGHTS.into_iter().find(|weight| weight.name().eq_ignore_ascii_case(text));
    found.ok_or_else(|| format!("expected one of {}", WEIGHTS.map(WeightType::name).join(", ")))
}

/// Memory of a model with one matrix type.
#[derive(Serialize)]
struct MemoryRow {
    model: &'static str,
    weights: &'static str,
    #[serde(flatten)]
    plan: MemoryPlan,
    total_bytes: u64,
}

/// Default context length and matrix types.
const USUAL_CTX: u32 = 4096;
const USUAL_WEIGHTS: [WeightType; 4] = [WeightType::F32, WeightType::F16, WeightType::Q8_0, WeightType::Q4_K];

fn rows_of(device: &Device, weights: &[WeightType], options: &LoadOptions<'_>) -> Result<Vec<MemoryRow>, Error> {
    let target = device.model_target(options.exact);
    let mut rows = Vec::new();
    for shape in &SIZES {
        for &weight in weights {
            let plan = shape.plan(&target, weight, options)?;
            rows.push(MemoryRow { model: shape.name, weights: weight.name(), plan, total_bytes: plan.total_bytes() });
        }
    }
    Ok(rows)
}

fn to_json(device: &Device, options: &LoadOptions<'_>, rows: &[MemoryRow]) -> Value {
    json!({
        "bench": "memory",
        "device": device.info(),
        "context_length": options.context_length,
        "kv_type": options.kv_type.name(),
        "rows": rows,
    })
}

/// The table with default arguments.
pub fn usual(device: &Device) -> Result<Value, Error> {
    let options = LoadOptions { context_length: Some(USUAL_CTX), ..LoadOptions::default() };
    Ok(to_json(device, &options, &rows_of(device, &USUAL_WEIGHTS, &options)?))
}

pub fn bench(args: &MemoryBenchArgs) -> Result<(), CommandFailure> {
    let device = args.device.open()?;
    let PrecisionArgs { kv_type, exact } = args.precision;
    let options = LoadOptions { context_length: Some(args.ctx), kv_type, exact, ..LoadOptions::default() };
    let rows = rows_of(&device, &args.weights, &options)?;
    if args.format.json {
        return print_json(&to_json(&device, &options, &rows));
    }
    let mut out = io::stdout().lock();
    if args.format.csv {
        print_csv(&mut out, &device, &rows)?;
    } else {
        print(&mut out, args, kv_type.name(), &rows)?;
    }
    Ok(out.flush()?)
}

fn print(out: &mut impl Write, args: &MemoryBenchArgs, kv_type: &str, rows: &[MemoryRow]) -> io::Result<()> {
    writeln!(out, "one session of {} tokens, KV cache in {kv_type}\n", args.ctx)?;
    writeln!(
        out,
        "{:<16} {:<8} {:>12} {:>12} {:>12} {:>12}",
        "model", "type", "weights", "cache", "activations", "total"
    )?;
    for row in rows {
        let MemoryPlan { weights_bytes, cache_bytes, activations_bytes } = row.plan;
        let [weights, cache, activations, total] =
            [weights_bytes, cache_bytes, activations_bytes, row.total_bytes].map(show_bytes);
        writeln!(out, "{:<16} {:<8} {weights:>12} {cache:>12} {activations:>12} {total:>12}", row.model, row.weights)?;
    }
    Ok(())
}
