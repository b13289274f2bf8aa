//! `tilewright imatrix`: measures which columns of a model's matrices matter.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tilewright::LoadOptions;
use tilewright::generate::importance::{ImportanceRun, ImportanceSums};
use tilewright::load::names_in_file;

use super::perplexity::WindowArgs;
use super::run::load;
use super::{
    CommandFailure, DeviceArgs, check_output, counted, print_json, progress, save_pipeline_caches, text_or_stdin,
};

/// Measure an importance matrix for `quantize --imatrix`, as llama-imatrix does.
///
/// The model reads the text in windows of --ctx tokens; for each matrix, the squares of its inputs are summed column by
/// column, for a mixture of experts expert by expert. The file is llama.cpp's, in GGUF. A hundred windows of text like
/// what the model is used for are enough.
#[derive(Args)]
pub struct ImatrixArgs {
    /// Model, unquantised if possible: GGUF file, Hugging Face folder, or hf:OWNER/REPO[:QUANTISATION].
    pub model: PathBuf,
    /// Text file; `-` is stdin.
    #[arg(long, short, value_name = "FILE")]
    file: PathBuf,
    /// GGUF file to write.
    #[arg(long, short, default_value = "imatrix.gguf", value_name = "OUT")]
    output: PathBuf,
    #[command(flatten)]
    windows: WindowArgs,
    /// Overwrite OUT if it exists.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn imatrix(args: &ImatrixArgs) -> Result<(), CommandFailure> {
    check_output("output", &args.output, &[&args.model, &args.file], args.force)?;
    let text = text_or_stdin(&args.file)?;
    let device = args.device.open()?;
    let options = LoadOptions { context_length: Some(args.windows.ctx), exact: true, ..LoadOptions::default() };
    let model = load(Some(&args.model), &device, options)?;
    let mut run = ImportanceRun::new(&model, args.windows.of(&model, &text)?)?;
    let bar = progress::bar(run.windows().len() as u64, "{bar:32} {pos}/{len} windows, {percent} %, {eta} left");
    while let Some(n_done) = pollster::block_on(run.next_window())? {
        bar.set_position(n_done as u64);
    }
    bar.finish_and_clear();
    save_pipeline_caches([&device]);
    let names = names_in_file(&args.model)?;
    let sums = run.sums().renamed(|name| names.get(name).cloned());
    sums.write(&args.output, &args.file.to_string_lossy())?;
    report_unreached(&sums);
    let (n_windows, n_tensors) = (run.windows().len(), sums.entries().count());
    if args.json {
        return print_json(&json!({
            "file": args.output,
            "model": model.name(),
            "device": device.info().name,
            "ctx": args.windows.ctx,
            "windows": n_windows,
            "tensors": n_tensors,
        }));
    }
    let mut out = io::stdout().lock();
    let [tensors, windows] = [(n_tensors, "tensor"), (n_windows, "window")].map(|(n, noun)| counted(n as u64, noun));
    writeln!(out, "{}: {tensors} over {windows} of {} tokens", args.output.display(), args.windows.ctx)?;
    Ok(out.flush()?)
}

/// Reports experts that the text never reached.
fn report_unreached(sums: &ImportanceSums) {
    let (n_without, n) = sums.experts_without_inputs();
    if n_without > 0 {
        notice!("{n_without} of {n} matrices had no inputs: no token chose their expert; use a longer text");
    }
}
