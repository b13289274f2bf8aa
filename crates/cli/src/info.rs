//! `tilewright info`: the adapters of this machine and the chosen device.

use std::io::{self, Write};

use clap::Args;
use serde_json::json;
use tilewright::{AdapterReport, Device};

use super::{CommandFailure, DeviceArgs, print_json, show_bytes};

#[derive(Args)]
pub struct InfoArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn info(args: &InfoArgs) -> Result<(), CommandFailure> {
    let adapters = args.device.quietly(|| pollster::block_on(Device::adapters()));
    let device = args.device.open()?;
    let chosen = device.info();
    if args.json {
        return print_json(&json!({ "device": chosen, "tuning": tuning(&device), "adapters": adapters }));
    }
    let mut out = io::stdout().lock();
    writeln!(out, "device    {} ({}): {}", chosen.name, chosen.backend, chosen.reason)?;
    show_tuning(&mut out, &device)?;
    if adapters.is_empty() {
        writeln!(out, "adapters  none")?;
    }
    for (number, adapter) in adapters.iter().enumerate() {
        show(&mut out, number, adapter)?;
    }
    Ok(out.flush()?)
}

/// Self-test results and tuned choices for the device.
fn tuning(device: &Device) -> serde_json::Value {
    let tuning = device.tuning();
    let banned = device.banned().into_iter();
    json!({
        "file": device.tuning_file(),
        "n_passed": device.n_passed(),
        "banned": banned.map(|(variant, found)| json!({ "variant": variant, "found": found })).collect::<Vec<_>>(),
        "n_tuned": tuning.choices().count(),
    })
}

fn show_tuning(out: &mut impl Write, device: &Device) -> io::Result<()> {
    if !device.is_gpu() {
        return Ok(());
    }
    let tuning = device.tuning();
    let banned = device.banned();
    let (n_passed, n_banned, n_tuned) = (device.n_passed(), banned.len(), tuning.choices().count());
    write!(out, "tuning    {n_passed} shader pipelines passed the self-test, {n_banned} variants banned")?;
    writeln!(out, "; {n_tuned} choices from `tilewright tune`")?;
    for (variant, found) in banned {
        writeln!(out, "  banned  {variant}: {found}")?;
    }
    match device.tuning_file() {
        Some(path) => writeln!(out, "  file    {}", path.display()),
        None => writeln!(out, "  file    none: TILEWRIGHT_CACHE_DIR is empty"),
    }
}

fn show(out: &mut impl Write, number: usize, adapter: &AdapterReport) -> io::Result<()> {
    writeln!(out, "\nadapter {number}: {} ({}, {})", adapter.name, adapter.backend, adapter.kind.name())?;
    writeln!(out, "  driver            {}", adapter.driver)?;
    if !adapter.pci_bus_id.is_empty() {
        writeln!(out, "  pci bus id        {}", adapter.pci_bus_id)?;
    }
    writeln!(out, "  tier              {}", adapter.tier.name())?;
    writeln!(out, "  shader-f16        {}", yes(adapter.has_f16))?;
    match adapter.subgroups {
        Some([min, max]) if min == max => writeln!(out, "  subgroups         of {min}")?,
        Some([min, max]) => writeln!(out, "  subgroups         of {min} to {max}")?,
        None => writeln!(out, "  subgroups         no")?,
    }
    let matrices: Vec<String> = adapter.matrices.iter().map(|size| format!("{size} x {size}")).collect();
    writeln!(out, "  matrices          {}", if matrices.is_empty() { "no".into() } else { matrices.join(", ") })?;
    writeln!(out, "  timestamps        {}", yes(adapter.has_timestamps))?;
    writeln!(out, "  largest buffer    {}", show_bytes(adapter.max_buffer_bytes))?;
    writeln!(out, "  largest binding   {}", show_bytes(adapter.max_binding_bytes))?;
    writeln!(out, "  workgroup memory  {}", show_bytes(u64::from(adapter.max_workgroup_bytes)))
}

fn yes(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}
