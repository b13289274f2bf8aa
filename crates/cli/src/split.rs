//! `tilewright split` and `tilewright merge`: shards of a GGUF file.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use tilewright::load::convert::{Shard, SplitLimit, SplitOptions, merge_files, split_file};

use super::{CommandFailure, bytes_above_0, counted, print_json, progress, show_bytes};

const TEMPLATE: &str = "{bar:32} {percent} % of {total_bytes}, {bytes_per_sec}, {eta} left";

/// Split a GGUF file into shards, named and laid out as by gguf-split.
///
/// Shards are named PREFIX-00001-of-0000N.gguf. All commands take the first one in place of the whole model and find
/// the others beside it.
#[derive(Args)]
pub struct SplitArgs {
    /// GGUF file, or address hf:OWNER/REPO[:QUANTISATION].
    #[arg(value_name = "FILE")]
    pub input: PathBuf,
    /// Beginning of the shards' names [default: FILE without `.gguf`, beside it].
    #[arg(value_name = "PREFIX")]
    prefix: Option<PathBuf>,
    /// Maximum size of a shard's tensors, such as 2G or 500M; as in gguf-split in powers of 1000.
    #[arg(long, value_parser = parse_size, value_name = "SIZE", conflicts_with = "max_tensors")]
    max_size: Option<u64>,
    /// Maximum number of a shard's tensors.
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tensors: usize,
    /// Leave the first shard without tensors: a small file with all metadata.
    #[arg(long)]
    no_tensor_first_split: bool,
    /// Print the shards without writing them.
    #[arg(long)]
    dry_run: bool,
    /// Overwrite existing shards.
    #[arg(long)]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn split(args: &SplitArgs) -> Result<(), CommandFailure> {
    let limit = args.max_size.map_or(SplitLimit::Tensors(args.max_tensors), SplitLimit::Bytes);
    let mut options = SplitOptions::new(limit);
    options.keys_apart = args.no_tensor_first_split;
    options.overwrite = args.force;
    options.dry_run = args.dry_run;
    let prefix = args.prefix.clone().unwrap_or_else(|| without_extension(&args.input));
    let bar = progress::bar(0, TEMPLATE);
    let shards = split_file(&args.input, &prefix, &options, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let shards = shards?;
    if args.json {
        return print_json(&json!({ "shards": shards.iter().map(as_json).collect::<Vec<_>>() }));
    }
    print(&shards)
}

/// Merge the shards of a GGUF file into one file.
#[derive(Args)]
pub struct MergeArgs {
    /// Any of the shards; the others are beside it.
    #[arg(value_name = "SHARD")]
    input: PathBuf,
    /// GGUF file to write.
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Overwrite OUT if it exists.
    #[arg(long)]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub fn merge(args: &MergeArgs) -> Result<(), CommandFailure> {
    let bar = progress::bar(0, TEMPLATE);
    let merged = merge_files(&args.input, &args.output, args.force, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let merged = merged?;
    match args.json {
        true => print_json(&as_json(&merged)),
        false => print(&[merged]),
    }
}

fn without_extension(path: &Path) -> PathBuf {
    match path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
        true => path.with_extension(""),
        false => path.into(),
    }
}

fn as_json(shard: &Shard) -> serde_json::Value {
    json!({ "file": shard.path, "tensors": shard.n_tensors, "size_bytes": shard.size_bytes })
}

fn print(shards: &[Shard]) -> Result<(), CommandFailure> {
    let mut out = io::stdout().lock();
    for Shard { path, n_tensors, size_bytes } in shards {
        writeln!(out, "{}: {}, {}", path.display(), counted(*n_tensors as u64, "tensor"), show_bytes(*size_bytes))?;
    }
    Ok(out.flush()?)
}

/// As in gguf-split, in powers of 1000.
fn parse_size(text: &str) -> Result<u64, String> {
    bytes_above_0(text, 1000.0)
}
