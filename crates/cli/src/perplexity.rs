//! `tilewright perplexity`: how well a model predicts a text, and how far its predictions are from another model's.

use std::io::{self, Write};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use tilewright::generate::perplexity::{
    Divergence, Estimate, Perplexity, PerplexityRun, Quantile, ReferenceLogprobs, TextWindows,
};
use tilewright::{Error, LoadOptions, Model};

use super::lora::LoraArgs;
use super::run::{PrecisionArgs, load};
use super::{
    CommandFailure, DeviceArgs, check_output, parse_bytes, print_json, progress, save_pipeline_caches, text_or_stdin,
};

/// Measure how well a model predicts a text: its perplexity, computed as by llama-perplexity.
///
/// The text is cut into windows of --ctx tokens, each beginning with BOS where the model's texts do, and the tokens
/// of each window's second half are scored. A text that ends within a window loses that part.
///
/// To judge a quantised model, record the predictions of the original with --kl-save, then compare with --kl: the
/// Kullback-Leibler divergence shows changes that a perplexity averages out. The files are those of llama.cpp's
/// --kl-divergence-base, with two bytes per token of the vocabulary and scored token.
#[derive(Args)]
pub struct PerplexityArgs {
    /// Model: GGUF file, Hugging Face folder, or hf:OWNER/REPO[:QUANTISATION] [default: the built-in model].
    pub model: Option<PathBuf>,
    /// Text file; `-` is stdin.
    #[arg(long, short, value_name = "FILE", required_unless_present = "kl")]
    file: Option<PathBuf>,
    #[command(flatten)]
    windows: WindowArgs,
    /// Write all predictions to a file, for --kl.
    #[arg(long, value_name = "FILE", conflicts_with = "kl")]
    kl_save: Option<PathBuf>,
    /// Compare with the predictions in a file, over the text and the windows that it holds.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["file", "ctx", "chunks"])]
    kl: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Memory limit, such as 512M or 2G; what does not fit is offloaded to disk [default: free memory, if known].
    #[arg(long, value_parser = parse_bytes, env = "TILEWRIGHT_MEMORY_LIMIT", value_name = "BYTES")]
    memory_limit: Option<u64>,
    #[command(flatten)]
    precision: PrecisionArgs,
    #[command(flatten)]
    lora: LoraArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// How a text is cut into windows.
#[derive(Args)]
pub struct WindowArgs {
    /// Tokens per window.
    #[arg(long, short, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(4..))]
    pub ctx: u32,
    /// Use only the first N windows.
    #[arg(long, value_name = "N")]
    chunks: Option<NonZeroU32>,
}

impl WindowArgs {
    /// The windows of a text.
    ///
    /// # Errors
    /// Those of [`TextWindows::new`].
    pub fn of(&self, model: &Model, text: &str) -> Result<TextWindows, Error> {
        TextWindows::new(model, text, self.ctx as usize, self.chunks.map(|chunks| chunks.get() as usize))
    }
}

pub fn perplexity(args: &PerplexityArgs) -> Result<(), CommandFailure> {
    let reference = args.kl.as_ref().map(ReferenceLogprobs::open).transpose()?;
    if let Some(saved) = &args.kl_save {
        let inputs: Vec<&Path> = [&args.model, &args.file].into_iter().flatten().map(PathBuf::as_path).collect();
        check_output("kl_save", saved, &inputs, true)?;
    }
    let text = args.file.as_deref().map(text_or_stdin).transpose()?;
    let n_ctx = reference.as_ref().map_or(args.windows.ctx, |reference| reference.windows().n_ctx() as u32);
    let device = args.device.open()?;
    let options = LoadOptions {
        context_length: Some(n_ctx),
        memory_limit: args.memory_limit,
        stream_layers: true,
        kv_type: args.precision.kv_type,
        exact: args.precision.exact,
        ..LoadOptions::default()
    };
    let model = args.lora.added_to(load(args.model.as_deref(), &device, options)?)?;
    let mut run = match (reference, text) {
        (Some(reference), _) => PerplexityRun::compared(&model, reference)?,
        (None, text) => args.over(&model, &text.unwrap_or_default())?,
    };
    let found = measure(&mut run)?;
    save_pipeline_caches([&device]);
    match args.json {
        true => print_json(&as_json(&model, &run, &found)),
        false => print(&run, &found),
    }
}

impl PerplexityArgs {
    fn over(&self, model: &Model, text: &str) -> Result<PerplexityRun, Error> {
        let run = PerplexityRun::new(model, self.windows.of(model, text)?)?;
        match &self.kl_save {
            Some(path) => run.recorded(path),
            None => Ok(run),
        }
    }
}

/// Scores all windows, with a bar that shows the perplexity so far.
fn measure(run: &mut PerplexityRun) -> Result<Perplexity, Error> {
    let template = "{bar:32} {pos}/{len} windows, {percent} %, {eta} left, perplexity {msg}";
    let bar = progress::bar(run.windows().len() as u64, template);
    while let Some(so_far) = pollster::block_on(run.next_window())? {
        bar.set_position(so_far.windows as u64);
        bar.set_message(format!("{:.4}", so_far.perplexity.value));
    }
    bar.finish_and_clear();
    Ok(run.perplexity())
}

fn as_json(model: &Model, run: &PerplexityRun, found: &Perplexity) -> serde_json::Value {
    let mut report = json!({
        "model": model.name(),
        "device": model.device().info().name,
        "ctx": run.windows().n_ctx(),
        "windows": found.windows,
        "tokens": found.tokens,
        "perplexity": found.perplexity,
        "nll": found.nll,
    });
    if let Some(divergence) = run.divergence() {
        report["divergence"] = json!(divergence);
    }
    report
}

fn print(run: &PerplexityRun, found: &Perplexity) -> Result<(), CommandFailure> {
    let mut out = io::stdout().lock();
    let Perplexity { windows, tokens, .. } = found;
    let n_ctx = run.windows().n_ctx();
    writeln!(out, "perplexity          {}", shown(found.perplexity, 1.0))?;
    if let Some(divergence) = run.divergence() {
        print_divergence(&mut out, &divergence)?;
    }
    writeln!(out, "{tokens} tokens scored in {windows} windows of {n_ctx}")?;
    Ok(out.flush()?)
}

fn print_divergence(out: &mut impl Write, found: &Divergence) -> io::Result<()> {
    let quantile = |all: &[Quantile], share: f64| {
        all.iter().find(|quantile| quantile.share == share).map_or(0.0, |quantile| quantile.value)
    };
    let kl = |share| quantile(&found.kl_quantiles, share);
    let delta_p = |share| 100.0 * quantile(&found.delta_p_quantiles, share);
    writeln!(out, "reference           {}", shown(found.reference, 1.0))?;
    writeln!(out, "ratio               {}", shown(found.ratio, 1.0))?;
    writeln!(out, "log ratio           {}", shown(found.log_ratio, 1.0))?;
    writeln!(out, "correlation         {:.2} %", 100.0 * found.correlation)?;
    writeln!(out, "KL divergence       {}", shown(found.kl, 1.0))?;
    writeln!(out, "  median            {:.6}", kl(0.5))?;
    writeln!(out, "  99 %, 99.9 %      {:.6}, {:.6}", kl(0.99), kl(0.999))?;
    writeln!(out, "  maximum           {:.6}", kl(1.0))?;
    writeln!(out, "same top token      {} %", shown(found.same_top, 100.0))?;
    writeln!(out, "change of p, mean   {} %", shown(found.delta_p, 100.0))?;
    writeln!(out, "  RMS               {} %", shown(found.delta_p_rms, 100.0))?;
    writeln!(out, "  1 %, 99 %         {:.3} %, {:.3} %", delta_p(0.01), delta_p(0.99))
}

/// A value with its standard error.
fn shown(of: Estimate, factor: f64) -> String {
    format!("{:.6} ± {:.6}", factor * of.value, factor * of.error)
}
