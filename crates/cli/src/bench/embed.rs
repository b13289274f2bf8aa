//! `tilewright bench embed`: batches of a text encoder on the device's roofline, and the gain from its pipeline.

use std::collections::HashSet;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tilewright::bench::embed::{self, Bound, EmbedCase, EmbedParts, EmbedRow, FLIGHT_TOKENS, FlightRow, Naive};
use tilewright::bench::{Limits, Probes};
use tilewright::{Device, EmbedOptions, Embedder, Error};

use super::{parse_ms, print_csv, print_device};
use crate::run::with_loading_bar;
use crate::{CommandFailure, DeviceArgs, print_json, read_text, show_bytes};

/// Generated texts; more if a batch is larger.
const MADE_UP: usize = 256;

#[derive(Args)]
pub struct EmbedBenchArgs {
    /// Text encoder: Hugging Face folder, GGUF file, or address hf:OWNER/REPO.
    pub model: PathBuf,
    /// Texts per batch.
    #[arg(long, short = 'b', value_delimiter = ',', default_value = "1,8,32,100", value_name = "N,..")]
    batch: Vec<usize>,
    /// File with one text per line, duplicates ignored [default: generated texts].
    #[arg(long, value_name = "FILE")]
    texts: Option<PathBuf>,
    /// Batches of each size to time, after a warm-up.
    #[arg(long, short = 'r', default_value_t = 50, value_name = "N")]
    repetitions: usize,
    /// Limit of the 95th percentile latency of a batch, in milliseconds.
    #[arg(long, value_parser = parse_ms, value_name = "MS")]
    max_ms: Option<f64>,
    /// Limit of the memory for weights and a batch, in MiB.
    #[arg(long, value_name = "MB")]
    max_mb: Option<u32>,
    /// Numbers of submissions in flight to measure, 1 to 8; 0 for none.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8", value_name = "N,..")]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=8))]
    in_flight: Vec<u8>,
    /// Skip the comparison with loading the encoder for each text.
    #[arg(long)]
    no_naive: bool,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    format: super::FormatArgs,
}

pub fn bench(args: &EmbedBenchArgs) -> Result<(), CommandFailure> {
    let texts = args.texts()?;
    let cases = || args.batch.iter().map(|&n_texts| EmbedCase { n_texts, repetitions: args.repetitions });
    cases().try_for_each(|case| case.check(texts.len()))?;
    let limits = Limits { seconds: args.max_ms.map(|ms| ms / 1e3), bytes: args.max_mb.map(|mb| u64::from(mb) << 20) };
    let device = args.device.open()?;
    let load = |options: EmbedOptions<'static>| Embedder::load(&device, &args.model, options);
    let embedder = with_loading_bar(|progress| {
        let options = EmbedOptions { progress: Some(progress), ..EmbedOptions::default() };
        Embedder::load(&device, &args.model, options)
    })?;
    let probes = pollster::block_on(Probes::measure(&device))?;
    let measured = cases().map(|case| pollster::block_on(embed::measure(&embedder, &texts, case, &probes)));
    let mut rows: Vec<EmbedRow> = measured.collect::<Result<_, Error>>()?;
    embed::predict(&mut rows);
    let mut out = io::stdout().lock();
    if args.format.csv {
        print_csv(&mut out, &device, &rows)?;
        return Ok(out.flush()?);
    }
    let best = embed::best(&rows, &limits);
    let parts = pollster::block_on(EmbedParts::measure(&embedder, &texts))?;
    let numbers: Vec<usize> = args.in_flight.iter().filter(|&&n| n > 0).map(|&n| n.into()).collect();
    let flights = pollster::block_on(embed::measure_in_flight(load, &texts, &numbers))?;
    let naive = match args.no_naive {
        true => None,
        false => Some(pollster::block_on(Naive::measure(load, &texts, &parts))?),
    };
    if args.format.json {
        return print_json(&json!({
            "bench": "embed",
            "model": embedder.name(),
            "device": device.info(),
            "texts": texts.len(),
            "repetitions": args.repetitions,
            "probes": probes,
            "rows": rows,
            "limits": limits,
            "best": best.map(|row| row.n_texts),
            "parts": parts,
            "in_flight": flights,
            "naive": naive,
        }));
    }
    writeln!(out, "model   {}, {} texts, {} repetitions", about(&embedder)?, texts.len(), args.repetitions)?;
    print_device(&mut out, device.info(), &probes)?;
    print_batches(&mut out, &rows)?;
    print_roofline(&mut out, &rows)?;
    let within = if args.max_ms.is_some() || args.max_mb.is_some() { " within the limits" } else { "" };
    match best {
        Some(row) => writeln!(out, "most texts/s{within}: batches of {}", row.n_texts)?,
        None => writeln!(out, "no batch fits the limits")?,
    }
    print_parts(&mut out, &parts)?;
    print_flights(&mut out, &device, &flights)?;
    if let Some(Naive { n_texts, texts_per_second, gain }) = naive {
        writeln!(
            out,
            "\nloaded for each of {n_texts} texts: {texts_per_second:.2} texts/s; one call {gain:.1} times as fast"
        )?;
    }
    Ok(out.flush()?)
}

impl EmbedBenchArgs {
    fn texts(&self) -> Result<Vec<String>, Error> {
        let Some(path) = &self.texts else {
            let largest = self.batch.iter().max().copied().unwrap_or_default();
            return Ok(embed::made_up_texts(largest.clamp(MADE_UP, embed::MAX_BATCH)));
        };
        let content = read_text(path)?;
        let mut seen = HashSet::new();
        let lines = content.lines().filter(|line| !line.trim().is_empty() && seen.insert(*line));
        let texts: Vec<String> = lines.map(str::to_owned).collect();
        match texts.is_empty() {
            true => Err(Error::Option { option: "texts", expected: "a line with text".into(), found: "none".into() }),
            false => Ok(texts),
        }
    }
}

fn about(embedder: &Embedder) -> Result<String, Error> {
    let types: Vec<&str> = embedder.block_types().iter().map(|t| t.name()).collect();
    let weights = show_bytes(embedder.plan()?.weights_bytes);
    let most = embedder.max_batch_tokens();
    Ok(format!("{} ({}, weights {weights}, up to {most} tokens per pass)", embedder.name(), types.join(" ")))
}

fn print_batches(out: &mut impl Write, rows: &[EmbedRow]) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<10} {:>8} {:>28} {:>10} {:>9} {:>9} {:>9} {:>10} {:>8} {:>6} {:>10} {:>10}",
        "batch",
        "tokens",
        "texts/s (lowest to highest)",
        "tokens/s",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "dispatches",
        "submits",
        "reads",
        "read",
        "memory"
    )?;
    for row in rows {
        let rate = row.texts_per_second;
        let rate = format!("{:.1} ({:.1} to {:.1})", rate.median, rate.lowest, rate.highest);
        let latency = row.latency_seconds;
        let [p50, p95, p99] = [latency.p50, latency.p95, latency.p99].map(|seconds| seconds * 1e3);
        writeln!(
            out,
            "{:<10} {:>8.1} {rate:>28} {:>10.1} {p50:>9.3} {p95:>9.3} {p99:>9.3} {:>10.1} {:>8.2} {:>6.2} {:>10} {:>10}",
            row.n_texts,
            row.n_tokens,
            row.tokens_per_second.median,
            row.dispatches,
            row.submits,
            row.reads,
            show_bytes(row.bytes_read as u64),
            show_bytes(row.memory_bytes),
        )?;
    }
    writeln!(out, "Counts and bytes are per batch; texts are tokenized again every time.")
}

fn print_roofline(out: &mut impl Write, rows: &[EmbedRow]) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<10} {:>10} {:>11} {:>10} {:>10} {:>8} {:>11} {:>10} {:>8} {:>12} {:>12} {:>8}",
        "batch",
        "MFLOP",
        "least bytes",
        "FLOP/byte",
        "GFLOP/s",
        "of probe",
        "bound by",
        "least ms",
        "of least",
        "measured ms",
        "predicted ms",
        "ratio"
    )?;
    for row in rows {
        let bound = match row.bound {
            Bound::Bandwidth => "bandwidth",
            Bound::Operations => "operations",
        };
        let predicted = |show: &dyn Fn(f64) -> String| row.predicted_seconds.map_or("-".into(), show);
        writeln!(
            out,
            "{:<10} {:>10.1} {:>11} {:>10.1} {:>10.1} {:>7.1}% {bound:>11} {:>10.3} {:>7.1}% {:>12.3} {:>12} {:>8}",
            row.n_texts,
            row.flop / 1e6,
            show_bytes(row.bytes as u64),
            row.intensity,
            row.flop / row.seconds / 1e9,
            100.0 * row.flop_share,
            row.least_seconds * 1e3,
            100.0 * row.share(),
            row.seconds * 1e3,
            predicted(&|seconds| format!("{:.3}", seconds * 1e3)),
            predicted(&|seconds| format!("{:.2}x", row.seconds / seconds)),
        )?;
    }
    writeln!(out, "Predicted from the two batches with the fewest tokens; above 100%, the weights fit in a cache.")
}

fn print_parts(out: &mut impl Write, parts: &EmbedParts) -> io::Result<()> {
    let EmbedParts { n_texts, n_tokens, tokenize_seconds, vectors_seconds, seconds } = *parts;
    let call = format!("{n_texts} texts in one call");
    writeln!(out, "\n{call:<32} {:>10} {:>12} {:>12} {:>9}", "ms", "texts/s", "tokens/s", "of call")?;
    for (part, time) in [("tokens alone", tokenize_seconds), ("vectors alone", vectors_seconds), ("both", seconds)] {
        writeln!(
            out,
            "{part:<32} {:>10.3} {:>12.1} {:>12.1} {:>8.1}%",
            time * 1e3,
            n_texts as f64 / time,
            n_tokens as f64 / time,
            100.0 * time / seconds,
        )?;
    }
    Ok(())
}

fn print_flights(out: &mut impl Write, device: &Device, rows: &[FlightRow]) -> io::Result<()> {
    let Some(first) = rows.first() else { return Ok(()) };
    let batches = format!("batches of {FLIGHT_TOKENS} tokens");
    let of_first = format!("of {}", first.in_flight);
    writeln!(out, "\n{batches:<32} {:>28} {of_first:>8}", "texts/s (lowest to highest)")?;
    for row in rows {
        let rate = row.texts_per_second;
        let rate = format!("{:.1} ({:.1} to {:.1})", rate.median, rate.lowest, rate.highest);
        writeln!(out, "{:<32} {rate:>28} {:>7.2}x", format!("{} in flight", row.in_flight), row.ratio)?;
    }
    if !device.is_gpu() {
        writeln!(out, "The CPU computes a batch when it is submitted, so only one is ever in flight.")?;
    }
    Ok(())
}
