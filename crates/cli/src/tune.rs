//! `tilewright tune`: measures the fastest kernels for a model's matrix products on this device.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tilewright::TileForm;
use tilewright::load::ModelFile;
use tilewright::tuning::{self, Timed};

use super::{CommandFailure, DeviceArgs, print_json};

#[derive(Args)]
pub struct TuneArgs {
    /// Model whose shapes are measured, as for `run` [default: the built-in model].
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn tune(args: &TuneArgs) -> Result<(), CommandFailure> {
    let file = match &args.model {
        Some(path) => ModelFile::open(path)?,
        None => ModelFile::builtin()?,
    };
    let device = args.device.open()?;
    let (tuning, rows) = pollster::block_on(tuning::tune(&device, &file))?;
    let device = device.with_tuning(tuning);
    device.save_tuning()?;
    if args.json {
        return print_json(&json!({
            "bench": "tune",
            "device": device.info(),
            "file": device.tuning_file(),
            "rows": rows,
        }));
    }
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{:<8} {:<6} {:>8} {:>8} {:>8} {:>31} {:>10} {:>31} {:>10} {:>7} {:>10}",
        "kernel", "type", "rows", "blocks", "tokens", "usual", "us", "best", "us", "ratio", "candidates"
    )?;
    for row in &rows {
        let unit = if row.kernel.starts_with("matmul") { "tile" } else { "lanes" };
        let show = |timed: &Timed| match (timed.size, timed.form) {
            (1, _) => timed.tier.to_string(),
            (size, TileForm::Plain) => format!("{}, {unit} {size}", timed.tier),
            (size, TileForm::TwoStages) => format!("{}, {unit} {size}, 2 stages", timed.tier),
            (size, TileForm::EightSubgroups) => format!("{}, {unit} {size}, 8 subgroups", timed.tier),
        };
        writeln!(
            out,
            "{:<8} {:<6} {:>8} {:>8} {:>8} {:>31} {:>10.1} {:>31} {:>10.1} {:>6.2}x {:>10}",
            row.kernel,
            row.weight,
            row.rows,
            row.blocks,
            row.tokens,
            show(&row.usual),
            row.usual.seconds * 1e6,
            show(&row.best),
            row.best.seconds * 1e6,
            row.usual.seconds / row.best.seconds,
            format!("{} of {}", row.n_measured, row.n_candidates),
        )?;
    }
    writeln!(
        out,
        "\nRows, blocks and tokens are rounded up to powers of two: one choice serves all shapes in between."
    )?;
    match device.tuning_file() {
        Some(path) => writeln!(out, "saved to {}", path.display())?,
        None => writeln!(out, "not saved: TILEWRIGHT_CACHE_DIR is empty")?,
    }
    Ok(out.flush()?)
}
