//! `tilewright bench ablate`: where a kernel's time goes.

use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tilewright::bench::ablate::{self, Ablations, LeftOut, Part};

use super::print_csv;
use crate::{CommandFailure, DeviceArgs, print_json};

#[derive(Args)]
pub struct AblateArgs {
    /// Parts to measure: matvec, matmul_half, rows, chain, attention [default: all].
    #[arg(long, value_delimiter = ',', value_parser = parse_part, value_name = "PART,..")]
    only: Vec<Part>,
    /// Measure small operands for a short time, to try it out; nothing is comparable with the predictions.
    #[arg(long)]
    quick: bool,
    /// Seconds after which no further case begins.
    #[arg(long, default_value_t = 420, value_name = "SECONDS")]
    limit: u32,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    format: super::FormatArgs,
}

fn parse_part(text: &str) -> Result<Part, String> {
    let names = Part::ALL.map(Part::name).join(", ");
    Part::ALL.into_iter().find(|part| part.name() == text).ok_or(format!("expected some of {names}"))
}

pub fn bench(args: &AblateArgs) -> Result<(), CommandFailure> {
    let device = args.device.open()?;
    let parts = if args.only.is_empty() { &Part::ALL[..] } else { &args.only };
    let limit = Duration::from_secs(args.limit.into());
    let found = pollster::block_on(ablate::measure(&device, parts, args.quick, limit))?;
    if args.format.json {
        let Ablations { is_quick, rows, left_out } = found;
        return print_json(&json!({
            "bench": "ablate",
            "device": device.info(),
            "is_quick": is_quick,
            "rows": rows,
            "left_out": left_out,
        }));
    }
    let mut out = io::stdout().lock();
    if args.format.csv {
        print_csv(&mut out, &device, &found.rows)?;
    } else {
        let info = device.info();
        writeln!(out, "device  {} ({}, tier {}): {}", info.name, info.backend, info.tier, info.reason)?;
        print_rows(&mut out, &found)?;
    }
    Ok(out.flush()?)
}

fn print_rows(out: &mut impl Write, found: &Ablations) -> io::Result<()> {
    let mut last = None;
    for row in &found.rows {
        if last.replace(row.part) != Some(row.part) {
            writeln!(
                out,
                "\n{:<36} {:>10} {:>16} {:>9} {:>9} {:>13}",
                row.part.name(),
                "us",
                "rate",
                "of first",
                "predicted",
                "predicted us"
            )?;
        }
        let rate = match row.part {
            Part::MatmulHalf | Part::Rows => format!("{:.2} TFLOP/s", row.flop_per_second / 1e12),
            Part::Matvec | Part::Chain | Part::Attention => format!("{:.1} GB/s", row.bytes_per_second / 1e9),
        };
        let predicted_us = match found.is_quick {
            true => "-".into(),
            false => format!("{:.1}", 1e6 * row.predicted_seconds),
        };
        writeln!(
            out,
            "{:<36} {:>10.1} {rate:>16} {:>9.2} {:>9.2} {predicted_us:>13}",
            row.case,
            1e6 * row.seconds,
            row.of_as_is,
            row.predicted_of_as_is,
        )?;
    }
    for LeftOut { part, case, reason } in &found.left_out {
        writeln!(out, "\nleft out: {} {}: {reason}", part.name(), case.as_deref().unwrap_or("altogether"))?;
    }
    writeln!(out, "\nRates are of the bytes and operations of the kernel as it is. Predictions are for an H100.")
}
