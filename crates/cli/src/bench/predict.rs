//! `tilewright bench --predict`: predicted times of passes on another GPU.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;
use tilewright::bench::predict::{BoundBy, MACHINES, Machine, Prediction};
use tilewright::bench::shapes::{SHAPES, Shape, ShapePass};
use tilewright::{Error, WeightType};

use super::super::{CommandFailure, print_json};

/// Tokens in the KV cache before a decode pass.
const DEPTH: u32 = 512;
/// Tokens of a small decode batch or a verification of draft tokens.
const FEW: u32 = 8;
/// Tokens of a prefill pass, and of an encoder's text.
const PROMPT: u32 = 512;
/// Tokens in the KV cache before the last chunk of a long prompt.
const LONG: u32 = 8192;
/// Matrix types of decoders and of encoders.
const WEIGHTS: [WeightType; 2] = [WeightType::Q4_K, WeightType::F16];

/// A pass of a model, with its prediction.
#[derive(Serialize)]
struct Predicted {
    model: &'static str,
    weights: &'static str,
    tokens: u32,
    depth: u32,
    tokens_per_second: f64,
    #[serde(flatten)]
    prediction: Prediction,
}

pub fn bench(gpu: &str, json: bool) -> Result<(), CommandFailure> {
    let mut out = io::stdout().lock();
    if gpu == "list" {
        return Ok(MACHINES.iter().try_for_each(|machine| writeln!(out, "{:<14} {}", machine.name, machine.source))?);
    }
    let machine = Machine::named(gpu).ok_or_else(|| Error::Option {
        option: "predict",
        expected: format!("one of {}", MACHINES.map(|machine| machine.name).join(", ")),
        found: gpu.into(),
    })?;
    let mut passes = Vec::new();
    for shape in &SHAPES {
        passes.extend(predict(machine, shape)?);
    }
    if json {
        return print_json(&serde_json::json!({ "prediction": true, "gpu": machine, "passes": passes }));
    }
    print(&mut out, machine, &passes)?;
    Ok(())
}

fn predict(machine: &Machine, shape: &Shape) -> Result<Vec<Predicted>, Error> {
    let is_decoder = shape.config()?.has_head;
    let weights = WEIGHTS[usize::from(!is_decoder)];
    let cases: &[(u32, u32)] =
        if is_decoder { &[(1, DEPTH), (FEW, DEPTH), (PROMPT, 0), (PROMPT, LONG)] } else { &[(PROMPT, 0)] };
    let of = |&(tokens, depth): &(u32, u32)| {
        let context_length = (tokens + depth).next_power_of_two().max(4096);
        let pass = ShapePass { n_tokens: tokens, context_length };
        let prediction = machine.predict(&shape.record(&machine.target(), weights, pass)?, depth);
        let tokens_per_second = f64::from(tokens) / prediction.seconds;
        Ok(Predicted { model: shape.name, weights: weights.name(), tokens, depth, tokens_per_second, prediction })
    };
    cases.iter().map(of).collect()
}

fn print(out: &mut impl Write, machine: &Machine, passes: &[Predicted]) -> io::Result<()> {
    writeln!(out, "PREDICTION for {}, where nothing was measured. Figures: {}.", machine.name, machine.source)?;
    let peak = machine
        .matrix
        .map_or("no matrix units".to_string(), |units| format!("{:.0} TFLOP/s of matrix units", units.rate / 1e12));
    writeln!(
        out,
        "Peaks: {:.0} GB/s, {:.1} TFLOP/s, {peak}.\n",
        machine.memory_rate / 1e9,
        2.0 * machine.lane_rate() / 1e12
    )?;
    writeln!(
        out,
        "{:<13} {:<5} {:>6} {:>6} {:>10} {:>10} {:>10} {:>10} {:>10}  bound by (share of the time)",
        "model", "type", "tokens", "depth", "dispatches", "ms", "tokens/s", "bandwidth", "operations"
    )?;
    for pass in passes {
        let prediction = &pass.prediction;
        let mut bounds: BTreeMap<&str, f64> = BTreeMap::new();
        for dispatch in &prediction.dispatches {
            *bounds.entry(dispatch.bound_by.name()).or_default() += dispatch.seconds / prediction.seconds;
        }
        let mut bounds: Vec<(&str, f64)> = bounds.into_iter().collect();
        bounds.sort_by(|a, b| b.1.total_cmp(&a.1));
        let bounds: Vec<String> = bounds.iter().map(|(name, share)| format!("{name} {:.0} %", 100.0 * share)).collect();
        writeln!(
            out,
            "{:<13} {:<5} {:>6} {:>6} {:>10} {:>10.3} {:>10.0} {:>9.0}% {:>9.0}%  {}",
            pass.model,
            pass.weights,
            pass.tokens,
            pass.depth,
            prediction.dispatches.len(),
            1e3 * prediction.seconds,
            pass.tokens_per_second,
            100.0 * prediction.memory_share,
            100.0 * prediction.compute_share,
            bounds.join(", ")
        )?;
    }
    let waits: f64 =
        passes.iter().flat_map(|pass| &pass.prediction.dispatches).filter(|d| d.bound_by == BoundBy::Start).count()
            as f64;
    let all = passes.iter().map(|pass| pass.prediction.dispatches.len()).sum::<usize>() as f64;
    writeln!(out, "\n{:.0} % of all dispatches take no longer than it takes to begin them.", 100.0 * waits / all)
}
