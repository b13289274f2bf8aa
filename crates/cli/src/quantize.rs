//! `tilewright quantize`: converts the matrices of a model to another type.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use tilewright::Error;
use tilewright::formats::BlockType;
use tilewright::formats::quantize::QUANTIZABLE;
use tilewright::load::convert::{ImportanceMatrix, QuantizeOptions, QuantizeReport, quantize_file};

use super::{CommandFailure, print_json, show_bytes};

/// Convert a model to a GGUF file with its matrices in another type.
///
/// IN is a GGUF file of any supported type (the first, if there are several), or a Hugging Face folder of Llama,
/// Mistral, Qwen2, Qwen3 or Gemma 1 to 3 with a BPE tokenizer.json. Metadata, tokenizer and chat template are kept;
/// norms, biases and other small tensors keep their type. All matrices get the same type, as with llama.cpp's
/// `--pure`. Where rows are not a multiple of the block size, the type falls back as in llama.cpp: Q4_K to Q5_0, Q5_K
/// to Q5_1, Q6_K to Q8_0, Q2_K and Q3_K to Q4_0, IQ4_XS to IQ4_NL; if they are not a multiple of 32 either, to F16.
///
/// A model that is already quantised loses precision a second time: prefer an F16, BF16 or F32 source.
///
/// OUT appears only when it is complete, and cannot be the input.
#[derive(Args)]
pub struct QuantizeArgs {
    /// Source: GGUF file, Hugging Face folder, or address hf:OWNER/REPO[:QUANTISATION].
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// GGUF file to write.
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Matrix type: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS or
    /// MXFP4.
    #[arg(long = "type", value_parser = parse_type, value_name = "TYPE")]
    block_type: BlockType,
    /// Importance matrix from llama-imatrix, a GGUF or .dat file, to round important columns more precisely.
    ///
    /// F32, F16, BF16, Q8_0 and MXFP4 do not use it.
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Overwrite OUT if it exists.
    #[arg(long)]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn quantize(args: &QuantizeArgs) -> Result<(), CommandFailure> {
    if args.output.exists() && !args.force {
        // Before anything is read. The library checks this too, but its message does not mention `--force`.
        let source = io::Error::new(io::ErrorKind::AlreadyExists, "exists already; --force overwrites it");
        return Err(Error::Io { path: args.output.clone(), source }.into());
    }
    let mut options = QuantizeOptions::new(args.block_type);
    options.overwrite = args.force;
    options.importance = args.imatrix.as_ref().map(ImportanceMatrix::open).transpose()?;
    let bar = if io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("{bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta} {msg}") {
        bar.set_style(style);
    }
    let written = quantize_file(&args.input, &args.output, &options, &mut |tensor, done, total| {
        bar.set_length(total);
        bar.set_position(done);
        if bar.message() != tensor {
            bar.set_message(tensor.to_owned());
        }
    });
    bar.finish_and_clear();
    let report = written?;
    tell(&report, args);
    if args.json {
        return print_json(&as_json(&report, args));
    }
    let mut out = io::stdout().lock();
    for (block_type, n_tensors, bytes) in report.by_type() {
        writeln!(out, "{:<8} {n_tensors:>5} tensors {:>12}", block_type.name(), show_bytes(bytes))?;
    }
    let (source, written) = (report.source_bytes, report.written_bytes);
    let (source_size, size) = (show_bytes(source), show_bytes(written));
    writeln!(out, "{}: {size}, {:.3} of {source_size}", args.output.display(), ratio(&report))?;
    Ok(out.flush()?)
}

/// Prints notices on other types than requested, tensors quantised twice, and the importance matrix.
fn tell(report: &QuantizeReport, args: &QuantizeArgs) {
    let fell_back: Vec<_> = report.tensors.iter().filter(|tensor| tensor.fell_back).collect();
    if let Some(first) = fell_back.first() {
        let n = fell_back.len();
        let row = first.shape.last().copied().unwrap_or_default();
        let block_len = args.block_type.block_len();
        eprintln!(
            "notice: {n} tensors have rows that are not a multiple of {block_len} and get another type, such as `{}` \
             with rows of {row}: {}",
            first.name, first.to
        );
    }
    let again = report.tensors.iter().find(|tensor| tensor.from != tensor.to && tensor.from.block_len() > 1);
    if let Some(tensor) = again {
        eprintln!(
            "notice: `{}` and others were already quantised, to {}, and lost precision twice",
            tensor.name, tensor.from
        );
    }
    if args.imatrix.is_some() {
        let weighable = report.tensors.iter().filter(|tensor| tensor.to.block_len() > 1 && tensor.from != tensor.to);
        let (n, n_weighted) = (weighable.count(), report.tensors.iter().filter(|tensor| tensor.weighted).count());
        eprintln!("notice: the importance matrix was used for {n_weighted} of {n} matrices");
    }
}

fn ratio(report: &QuantizeReport) -> f64 {
    report.written_bytes as f64 / report.source_bytes.max(1) as f64
}

fn as_json(report: &QuantizeReport, args: &QuantizeArgs) -> serde_json::Value {
    let types = report.by_type().into_iter().map(|(block_type, n_tensors, size_bytes)| {
        json!({ "type": block_type.name(), "n_tensors": n_tensors, "size_bytes": size_bytes })
    });
    let n_weights: u64 = report.tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum();
    let data_bytes: u64 = report.tensors.iter().map(|tensor| tensor.size_bytes).sum();
    json!({
        "file": args.output,
        "type": args.block_type.name(),
        "types": types.collect::<Vec<_>>(),
        "source_bytes": report.source_bytes,
        "written_bytes": report.written_bytes,
        "ratio": ratio(report),
        "bits_per_weight": 8.0 * data_bytes as f64 / n_weights.max(1) as f64,
        "n_fell_back": report.tensors.iter().filter(|tensor| tensor.fell_back).count(),
        "n_weighted": report.tensors.iter().filter(|tensor| tensor.weighted).count(),
    })
}

fn parse_type(text: &str) -> Result<BlockType, String> {
    let found = QUANTIZABLE.into_iter().find(|block_type| block_type.name().eq_ignore_ascii_case(text));
    found.ok_or_else(|| format!("expected one of {}", QUANTIZABLE.map(BlockType::name).join(", ")))
}
