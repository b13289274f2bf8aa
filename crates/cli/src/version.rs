//! `tilewright version`: what this build has.

use std::io::{self, Write};

use clap::Args;
use serde_json::json;
use tilewright::Tier;

use super::{CommandFailure, print_json};

/// Print the version, build features, shader tiers and threads.
#[derive(Args)]
pub struct VersionArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Features of the build that change what commands can do.
const FEATURES: [(&str, bool); 5] = [
    ("serve", cfg!(feature = "serve")),
    ("tables", cfg!(feature = "tables")),
    ("telemetry", cfg!(feature = "telemetry")),
    ("tokenizer-json", cfg!(feature = "tokenizer-json")),
    ("fault-injection", cfg!(feature = "fault-injection")),
];

pub fn version(args: &VersionArgs) -> Result<(), CommandFailure> {
    let features: Vec<&str> = FEATURES.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
    let tiers = Tier::ALL.map(Tier::name);
    let target = format!("{} {}", std::env::consts::ARCH, std::env::consts::OS);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let version = env!("CARGO_PKG_VERSION");
    if args.json {
        return print_json(&json!({
            "version": version, "features": features, "tiers": tiers, "target": target, "build": build,
            "threads": threads,
        }));
    }
    let mut out = io::stdout().lock();
    writeln!(out, "tilewright {version}")?;
    let features = if features.is_empty() { "none".into() } else { features.join(", ") };
    writeln!(out, "features  {features}")?;
    writeln!(out, "tiers     {}", tiers.join(", "))?;
    writeln!(out, "target    {target}, {build} build")?;
    writeln!(out, "threads   {threads}")?;
    Ok(out.flush()?)
}
