//! `tilewright bench`: speed of a model and of the kernels, beside the limits of the device.

mod ablate;
mod embed;
mod html;
mod memory;
mod mol;
mod report;
#[cfg(feature = "serve")]
mod serve;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::{Value, json};
use tilewright::bench::kernels::{KernelRow, Shapes};
use tilewright::bench::{self, CacheRow, Case, Phase, Probes, Reads, Row};
use tilewright::generate::{PASS_SIZES, TimedDispatch, Timeline};
use tilewright::{Device, DeviceInfo, Error, GenerateOptions, LoadOptions, Model};

use self::ablate::AblateArgs;
use self::embed::EmbedBenchArgs;
use self::memory::MemoryBenchArgs;
use self::mol::MolBenchArgs;
use super::lora::LoraArgs;
use super::run::{PrecisionArgs, TuneOnLoadArgs, load};
use super::{CommandFailure, DeviceArgs, print_json, show_bytes};

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    command: Option<BenchCommand>,
    #[command(flatten)]
    model: ModelBenchArgs,
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Benchmark each kernel of a forward pass, and what the KV cache saves.
    ///
    /// Operands have the shapes of a Llama model. Rates are in bytes per second for kernels that the probes show to be
    /// limited by memory bandwidth, and in operations per second for the others.
    Kernels(KernelBenchArgs),
    /// Show where a GPU's time goes: kernels with parts left out or settings changed, next to the kernels as they are.
    ///
    /// Matrix times vector, matrix product in half precision, a layer's products by number of rows, chains of
    /// dispatches, and attention by depth. The column `predicted` is what arithmetic says for an H100, written down
    /// before it was measured. Results of a kernel without one of its parts are wrong: only times are of interest.
    Ablate(AblateArgs),
    /// Benchmark a text encoder by batch size, and find the fastest batch within limits.
    ///
    /// Shows rate, latency and place on the device's roofline for each batch size, next to a prediction from the two
    /// smallest ones. Then embeds all texts in one call, to show the share of tokenizing, the gain from more
    /// submissions in flight, and the gain over loading the encoder for each text.
    Embed(EmbedBenchArgs),
    /// Benchmark mixtures of logits, and find shapes and searches within limits.
    ///
    /// First compares a mixture with the same in separate kernels and with a dot-product scan that reads as many
    /// bytes, each next to the lower bound that follows from the device's bandwidth and arithmetic. Then predicts the
    /// time for different shapes of mixtures, the most expressive first, and measures the first that fit the limits.
    /// With `--weights`, tries searches of that mixture with more and more candidates until one reaches the recall.
    Mol(MolBenchArgs),
    /// Show the memory that decoders of 1 to 70 billion weights would take on this device.
    ///
    /// Follows the plan that loading uses, without measuring or allocating anything. `inspect` shows the plan of a
    /// file.
    Memory(MemoryBenchArgs),
    /// Load-test a server: latencies by number of clients and by request rate.
    ///
    /// Each request streams a completion of a prompt of its own through OpenAI's API. Without --url, the server runs
    /// in this process. The column `refused` counts answers with status 429.
    #[cfg(feature = "serve")]
    Serve(Box<serve::ServeBenchArgs>),
}

#[derive(Args)]
struct ModelBenchArgs {
    /// Model: GGUF file, Hugging Face folder, or hf:OWNER/REPO[:QUANTISATION] [default: the built-in model].
    model: Option<PathBuf>,
    /// The same, as a flag.
    #[arg(long = "model", short = 'm', conflicts_with = "model", value_name = "MODEL")]
    named: Option<PathBuf>,
    /// Prompt lengths to measure, in tokens; 0 for none.
    #[arg(long, short = 'p', value_delimiter = ',', default_value = "512", value_name = "N,..")]
    n_prompt: Vec<usize>,
    /// Numbers of generated tokens to measure; 0 for none.
    #[arg(long, short = 'n', value_delimiter = ',', default_value = "128", value_name = "N,..")]
    n_gen: Vec<usize>,
    /// Tokens in the context before each test.
    #[arg(long, short = 'd', value_delimiter = ',', default_value = "0", value_name = "N,..")]
    depth: Vec<usize>,
    /// Maximum tokens per prefill pass: 1, 8, 32, 128 or 512 [default: by device].
    #[arg(long, short = 'b', value_delimiter = ',', value_parser = parse_batch_size, value_name = "N,..")]
    batch_size: Vec<u32>,
    /// Tokens generated per GPU submission, 1 to 16 [default: by model and device].
    #[arg(long, value_name = "N")]
    tokens_per_submit: Option<u32>,
    #[command(flatten)]
    precision: PrecisionArgs,
    #[command(flatten)]
    tune: TuneOnLoadArgs,
    #[command(flatten)]
    lora: LoraArgs,
    /// Repetitions of each test, after a warm-up.
    #[arg(long, short = 'r', default_value_t = 5, value_name = "N")]
    repetitions: usize,
    /// Measure the device and its kernels too, and write a JSON report to a file or stdout.
    ///
    /// `benches/record/community/README.md` describes the report and where to send it.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", conflicts_with_all = ["json", "csv"])]
    #[arg(group = "whole")]
    report: Option<PathBuf>,
    /// Measure the kernels too, and write a self-contained HTML page with charts.
    #[arg(long, value_name = "FILE", group = "whole", conflicts_with_all = ["json", "csv"])]
    html: Option<PathBuf>,
    /// Output of other benches, or of `tune`, with --json, to add to the --html page.
    #[arg(long, value_delimiter = ',', value_name = "FILE,..", requires = "html")]
    with: Vec<PathBuf>,
    /// Folder made by scripts/build-web, with the template of the --html page.
    #[arg(long, value_name = "DIR", default_value = "www/dist", requires = "html")]
    page: PathBuf,
    /// With --report or --html, measure less: smaller shapes or a single weight type, and for a shorter time.
    #[arg(long, requires = "whole")]
    quick: bool,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Args)]
struct KernelBenchArgs {
    /// Width of the model whose shapes are measured, a multiple of 64.
    #[arg(long, default_value_t = 2048, value_name = "N")]
    dim: u32,
    /// Tokens of the prefill pass.
    #[arg(long, short = 'p', default_value_t = 128, value_name = "N")]
    n_prompt: u32,
    /// Tokens in the KV cache before a pass.
    #[arg(long, short = 'd', default_value_t = 1024, value_name = "N")]
    depth: u32,
    /// Text lengths for comparing decoding with and without a KV cache.
    #[arg(long, value_delimiter = ',', default_value = "10,50,100", value_name = "N,..")]
    texts: Vec<usize>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    format: FormatArgs,
}

#[derive(Args)]
struct FormatArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Print CSV with a header.
    #[arg(long, conflicts_with = "json")]
    csv: bool,
}

fn parse_ms(text: &str) -> Result<f64, String> {
    let ms = text.parse().ok().filter(|ms: &f64| ms.is_finite() && *ms > 0.0);
    ms.ok_or("expected a number of milliseconds above 0".into())
}

fn parse_batch_size(text: &str) -> Result<u32, String> {
    let size = text.parse().ok().filter(|size| PASS_SIZES.contains(size));
    size.ok_or(format!("expected one of {PASS_SIZES:?}"))
}

impl BenchArgs {
    /// The model that is measured.
    pub fn model(&mut self) -> Option<&mut PathBuf> {
        match &mut self.command {
            None => self.model.model.as_mut().or(self.model.named.as_mut()),
            Some(BenchCommand::Embed(args)) => Some(&mut args.model),
            Some(
                BenchCommand::Kernels(_) | BenchCommand::Ablate(_) | BenchCommand::Memory(_) | BenchCommand::Mol(_),
            ) => None,
            // `bench serve` resolves its model itself.
            #[cfg(feature = "serve")]
            Some(BenchCommand::Serve(_)) => None,
        }
    }
}

pub fn bench(args: BenchArgs) -> Result<(), CommandFailure> {
    match args.command {
        None => bench_model(&args.model),
        Some(BenchCommand::Kernels(args)) => bench_kernels(&args),
        Some(BenchCommand::Ablate(args)) => ablate::bench(&args),
        Some(BenchCommand::Embed(args)) => embed::bench(&args),
        Some(BenchCommand::Memory(args)) => memory::bench(&args),
        Some(BenchCommand::Mol(args)) => mol::bench(&args),
        #[cfg(feature = "serve")]
        Some(BenchCommand::Serve(args)) => serve::bench(*args),
    }
}

fn bench_model(args: &ModelBenchArgs) -> Result<(), CommandFailure> {
    let phases = [(Phase::Prefill, &args.n_prompt), (Phase::Decode, &args.n_gen)];
    let cases: Vec<Case> = args
        .depth
        .iter()
        .flat_map(|&depth| {
            let of = move |(phase, counts): (Phase, &Vec<usize>)| -> Vec<Case> {
                counts.iter().filter(|&&n| n > 0).map(|&n_tokens| Case { phase, n_tokens, depth }).collect()
            };
            phases.into_iter().flat_map(of)
        })
        .collect();
    let option = |option, expected: &str, found: usize| Error::Option {
        option,
        expected: expected.into(),
        found: found.to_string(),
    };
    if args.repetitions == 0 {
        return Err(option("repetitions", "at least 1", 0).into());
    }
    let tokens_per_submit = args.tokens_per_submit;
    GenerateOptions { tokens_per_submit, ..GenerateOptions::default() }.check()?;
    let Some(positions) = cases.iter().map(Case::positions).max() else {
        return Err(option("n_prompt, n_gen", "a number above 0 in one of them", 0).into());
    };
    let context =
        u32::try_from(positions).map_err(|_| option("depth", "a context of less than 2^32 tokens", positions))?;

    if let Some(path) = &args.report {
        report::check(path)?;
    }
    let page = args.html.as_deref().map(|path| html::HtmlPage::open(path, &args.page)).transpose()?;
    let given = page.as_ref().map(|_| html::read(&args.with)).transpose()?;
    let device = args.device.open()?;
    // Unknown for GPUs: no WebGPU API reports free memory.
    let free_bytes = if device.is_gpu() { None } else { bench::free_bytes() };
    let PrecisionArgs { kv_type, exact } = args.precision;
    let tune = args.tune.place();
    let options = LoadOptions { context_length: Some(context), kv_type, exact, tune, ..LoadOptions::default() };
    let loaded = load(args.model.as_deref().or(args.named.as_deref()), &device, options).map_err(|error| match error {
        Error::Option { option: "context_length", expected, found } => {
            Error::Option { option: "n_prompt, n_gen, depth", expected: format!("{expected} together"), found }
        }
        other => other,
    });
    let model = args.lora.added_to(loaded?)?;
    let measured = args.report.as_ref().map(|_| report::measure(&device, args.quick)).transpose()?;
    let probes = match &measured {
        Some(measured) => measured.probes(),
        None => pollster::block_on(Probes::measure(&device))?,
    };
    let models: Vec<Model> = match args.batch_size.as_slice() {
        [] => vec![model.clone()],
        sizes => sizes.iter().map(|&size| model.with_max_pass(size)).collect::<Result<_, Error>>()?,
    };
    let (mut rows, mut timeline): (Vec<Row>, _) = (Vec::new(), None);
    for model in &models {
        let mut session = model.session()?;
        for &case in &cases {
            let measured = bench::measure(&mut session, case, tokens_per_submit, args.repetitions, &probes);
            rows.push(pollster::block_on(measured)?);
        }
        // Fails if some layers are not on the device.
        timeline = pollster::block_on(session.timeline()).ok();
    }
    if let (Some(path), Some(measured)) = (&args.report, &measured) {
        return report::write(path, measured, &device, &model, &rows);
    }
    if args.format.json || page.is_some() {
        let pieces: Vec<Value> = rows
            .iter()
            .filter(|row| row.phase == Phase::Decode)
            .map(|row| json!({ "test": row.test, "seconds": row.piece_seconds }))
            .collect();
        let value = json!({
            "bench": "model",
            "model": model.name(),
            "device": device.info(),
            "sequences": 1,
            "tokens_per_submit": tokens_per_submit,
            "kv_type": kv_type.name(),
            "context_length": context,
            "rounds": model.rounds(),
            "repetitions": args.repetitions,
            "probes": probes,
            "rows": rows,
            "memory": model.plan(),
            "free_bytes": free_bytes,
            "pieces": pieces,
            "timeline": timeline.as_ref().map(to_json),
        });
        let Some((page, given)) = page.zip(given) else { return print_json(&value) };
        let (shapes, texts): (_, &[usize]) = match args.quick {
            true => (Shapes { dim: 512, n_prompt: 32, n_cached: 256 }, &[10]),
            false => (Shapes { dim: 2048, n_prompt: 128, n_cached: 1024 }, &[10, 50, 100]),
        };
        let kernels = KernelBench::measure(&device, shapes, probes.clone(), texts, args.quick)?.to_json(&device);
        let memory = memory::usual(&device)?;
        return page.write(&[&[value, kernels, memory][..], &given].concat());
    }
    let mut out = io::stdout().lock();
    if args.format.csv {
        print_csv(&mut out, &device, &rows)?;
    } else {
        writeln!(out, "model   {}, one sequence, {} repetitions", about(&model), args.repetitions)?;
        print_device(&mut out, device.info(), &probes)?;
        print_rows(&mut out, &rows)?;
    }
    Ok(out.flush()?)
}

/// Results of `bench kernels`.
struct KernelBench {
    shapes: Shapes,
    probes: Probes,
    reads: Reads,
    rows: Vec<KernelRow>,
    model: Model,
    texts: Vec<CacheRow>,
}

impl KernelBench {
    fn measure(
        device: &Device,
        shapes: Shapes,
        probes: Probes,
        texts: &[usize],
        quick: bool,
    ) -> Result<KernelBench, CommandFailure> {
        let reads = pollster::block_on(Reads::measure(device))?;
        let rows = pollster::block_on(bench::kernels::measure(device, &shapes, &probes, quick))?;
        let context = texts.iter().max().copied().unwrap_or(0).max(1) as u32;
        let model = load(None, device, LoadOptions { context_length: Some(context), ..LoadOptions::default() })?;
        let mut session = model.session()?;
        let texts = texts.iter().filter(|&&n| n > 0);
        let texts: Vec<CacheRow> =
            texts.map(|&n| pollster::block_on(bench::measure_cache(&mut session, n))).collect::<Result<_, Error>>()?;
        Ok(KernelBench { shapes, probes, reads, rows, model, texts })
    }

    fn to_json(&self, device: &Device) -> Value {
        json!({
            "bench": "kernels",
            "device": device.info(),
            "shapes": self.shapes,
            "probes": self.probes,
            "reads": self.reads,
            "rows": self.rows,
            "cache": { "model": self.model.name(), "rows": self.texts },
        })
    }
}

fn bench_kernels(args: &KernelBenchArgs) -> Result<(), CommandFailure> {
    let shapes = Shapes { dim: args.dim, n_prompt: args.n_prompt, n_cached: args.depth };
    shapes.check()?;
    let device = args.device.open()?;
    let probes = pollster::block_on(Probes::measure(&device))?;
    let measured = KernelBench::measure(&device, shapes, probes, &args.texts, false)?;
    if args.format.json {
        return print_json(&measured.to_json(&device));
    }
    let mut out = io::stdout().lock();
    if args.format.csv {
        print_csv(&mut out, &device, &measured.rows)?;
    } else {
        print_device(&mut out, device.info(), &measured.probes)?;
        print_reads(&mut out, &measured.reads)?;
        print_kernels(&mut out, &measured.rows, &measured.probes)?;
        print_cache(&mut out, &measured.model, &measured.texts)?;
    }
    Ok(out.flush()?)
}

/// A pass over one token, dispatch by dispatch.
fn to_json(timeline: &Timeline) -> Value {
    let dispatch = |dispatch: &TimedDispatch| {
        json!({
            "kernel": dispatch.kernel,
            "variant": dispatch.variant,
            "layer": dispatch.layer,
            "seconds": dispatch.time.as_secs_f64(),
        })
    };
    let dispatches: Vec<Value> = timeline.dispatches.iter().map(dispatch).collect();
    json!({ "clock": timeline.clock, "position": timeline.position, "dispatches": dispatches })
}

fn about(model: &Model) -> String {
    let types: Vec<&str> = model.block_types().iter().map(|t| t.name()).collect();
    let rounds = if model.rounds() { ", activations rounded" } else { "" };
    format!("{} ({}, weights {}{rounds})", model.name(), types.join(" "), show_bytes(model.plan().weights_bytes))
}

fn print_device(out: &mut impl Write, info: &DeviceInfo, probes: &Probes) -> io::Result<()> {
    let tier = if info.tier == "none" { String::new() } else { format!(", tier {}", info.tier) };
    writeln!(out, "device  {} ({}{tier}): {}", info.name, info.backend, info.reason)?;
    writeln!(
        out,
        "probes  copy {:.2} GB/s (`scale` of {}), {:.1} GFLOP/s (`matmul` of F32, {} cubed)",
        probes.copy_bytes_per_second / 1e9,
        show_bytes(probes.copy_tensor_bytes),
        probes.flop_per_second / 1e9,
        probes.matmul_size,
    )
}

fn print_reads(out: &mut impl Write, reads: &Reads) -> io::Result<()> {
    writeln!(
        out,
        "reads   {:.2} GB/s in sequence, {:.2} GB/s one word of each 128 bytes, {:.2} GB/s anywhere (`probe_read` of {})",
        reads.sequential_bytes_per_second / 1e9,
        reads.strided_bytes_per_second / 1e9,
        reads.scattered_bytes_per_second / 1e9,
        show_bytes(reads.tensor_bytes),
    )
}

fn print_rows(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<15} {:>25} {:>8} {:>7} {:>8} {:>6} {:>10} {:>14}",
        "test", "tokens/s (low to high)", "dispatch", "submits", "uploaded", "read", "bytes", "of probe"
    )?;
    for row in rows {
        let rate = row.tokens_per_second;
        // Wide rates need no tenths.
        let digits = if rate.highest < 1000.0 { 1 } else { 0 };
        let rate = format!("{:.digits$} ({:.digits$} to {:.digits$})", rate.median, rate.lowest, rate.highest);
        let share = match row.phase {
            Phase::Prefill => format!("{:.0}% of FLOP/s", 100.0 * row.flop_share),
            Phase::Decode => format!("{:.0}% of copy", 100.0 * row.bandwidth_share),
        };
        writeln!(
            out,
            "{:<15} {rate:>25} {:>8.2} {:>7.3} {:>8.1} {:>6.2} {:>10} {share:>14}",
            row.test,
            row.dispatches_per_token,
            row.submits_per_token,
            row.uploaded_bytes_per_token,
            row.read_bytes_per_token,
            show_bytes(row.bytes_per_token as u64),
        )?;
    }
    writeln!(out, "\nDispatches, submissions and bytes are per token; `bytes` is the least for weights and KV cache.")
}

fn print_kernels(out: &mut impl Write, rows: &[KernelRow], probes: &Probes) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<28} {:<16} {:>6} {:>11} {:>16} {:>9} {:>7}",
        "kernel", "operation", "tokens", "us", "rate", "of probe", "vs F16"
    )?;
    for row in rows {
        let rate = match row.is_compute_bound(probes) {
            true => format!("{:.2} GFLOP/s", row.flop as f64 / row.seconds / 1e9),
            false => format!("{:.2} GB/s", row.bytes as f64 / row.seconds / 1e9),
        };
        let vs_f16 = row.vs_f16.map_or(String::new(), |ratio| format!("{ratio:.2}x"));
        writeln!(
            out,
            "{:<28} {:<16} {:>6} {:>11.1} {rate:>16} {:>8.1}% {vs_f16:>7}",
            row.kernel,
            row.operation,
            row.n_tokens,
            row.seconds * 1e6,
            100.0 * row.share,
        )?;
    }
    writeln!(out, "\nRuns cycle through up to 128 MiB of operands; above 100% they fit in a hardware cache.")
}

fn print_cache(out: &mut impl Write, model: &Model, rows: &[CacheRow]) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<32} {:>12} {:>12} {:>8}",
        format!("text of {}", model.name()),
        "cache ms",
        "without ms",
        "ratio"
    )?;
    for row in rows {
        let [cached, uncached] = [row.cached_seconds, row.uncached_seconds].map(|seconds| seconds * 1e3);
        let name = format!("{} tokens", row.n_tokens);
        writeln!(out, "{name:<32} {cached:>12.2} {uncached:>12.2} {:>7.1}x", uncached / cached)?;
    }
    Ok(())
}

/// The device and the fields of each row; names of nested fields are joined by a dot.
fn print_csv<R: Serialize>(out: &mut impl Write, device: &Device, rows: &[R]) -> Result<(), CommandFailure> {
    let info = device.info();
    for (i, row) in rows.iter().enumerate() {
        let mut fields = vec![("device".to_string(), json!(info.name)), ("tier".into(), json!(info.tier))];
        flatten("", &json!(row), &mut fields);
        if i == 0 {
            let names: Vec<&str> = fields.iter().map(|(name, _)| name.as_str()).collect();
            writeln!(out, "{}", names.join(","))?;
        }
        let values: Vec<String> = fields.iter().map(|(_, value)| csv_field(value)).collect();
        writeln!(out, "{}", values.join(","))?;
    }
    Ok(())
}

fn flatten(name: &str, value: &serde_json::Value, fields: &mut Vec<(String, serde_json::Value)>) {
    let serde_json::Value::Object(members) = value else { return fields.push((name.to_string(), value.clone())) };
    for (member, value) in members {
        let name = if name.is_empty() { member.clone() } else { format!("{name}.{member}") };
        flatten(&name, value, fields);
    }
}

/// A value as a field by RFC 4180.
fn csv_field(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Null => String::new(),
        serde_json::Value::String(text) if text.contains([',', '"', '\n']) => {
            format!("\"{}\"", text.replace('"', "\"\""))
        }
        serde_json::Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_fields_with_special_characters_are_quoted() {
        let quoted = [("plain", "plain"), ("CPU, 2 threads", "\"CPU, 2 threads\""), ("a \"b\"", "\"a \"\"b\"\"\"")];
        for (text, expected) in quoted {
            assert_eq!(csv_field(&json!(text)), expected);
        }
        let mut fields = Vec::new();
        flatten("", &json!({ "a": 1, "b": { "c": 2.5, "d": null } }), &mut fields);
        let fields: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={}", csv_field(value))).collect();
        assert_eq!(fields, ["a=1", "b.c=2.5", "b.d="]);
    }
}
