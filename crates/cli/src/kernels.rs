//! `tilewright kernels`: the compute shaders as WGSL files.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;
use tilewright::shaders::{self, Kernel, Variant};
use tilewright::{Error, Tier, WeightType};

use super::nearest::nearest;
use super::{CommandFailure, parse_tier};

/// List the compute kernels, or write them as WGSL files.
#[derive(Args)]
pub struct KernelsArgs {
    #[command(subcommand)]
    command: KernelsCommand,
}

#[derive(Subcommand)]
enum KernelsCommand {
    /// List all kernels with their variants and storage bindings.
    List,
    /// Write linked WGSL, with comments that give shapes, and `kernels.json` with the bindings and params.
    ///
    /// Each file is one variant, named after kernel, weight type and tier, and needs no other file. Binding 0 is the
    /// uniform struct `params`; kernels.json has the name, type and byte offset of each field. A file without overrides
    /// is a complete shader; `override` values have their defaults in it.
    Export(ExportArgs),
}

#[derive(Args)]
struct ExportArgs {
    /// Folder for the files; `-` prints one variant to stdout.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Only this kernel, such as rms_norm.
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Only variants for this weight type, such as Q4_0.
    #[arg(long, value_parser = parse_weight, value_name = "TYPE")]
    weight: Option<WeightType>,
    /// Only variants of this tier.
    #[arg(long, value_parser = parse_tier, value_name = "TIER")]
    tier: Option<Tier>,
}

fn parse_weight(text: &str) -> Result<WeightType, String> {
    let names = || WeightType::ALL.map(WeightType::name).join(", ");
    let is_named = |weight: &WeightType| weight.name().eq_ignore_ascii_case(text);
    WeightType::ALL.into_iter().find(is_named).ok_or_else(|| format!("expected one of {}", names()))
}

pub fn kernels(args: &KernelsArgs) -> Result<(), CommandFailure> {
    match &args.command {
        KernelsCommand::List => list(),
        KernelsCommand::Export(args) => export(args),
    }
}

fn list() -> Result<(), CommandFailure> {
    let mut out = io::stdout().lock();
    for kernel in shaders::ALL {
        let bindings: Vec<&str> = kernel.bindings.iter().map(|binding| binding.name).collect();
        writeln!(out, "{:<26} {:>3} variants  {}", kernel.name, kernel.variants.len(), bindings.join(", "))?;
    }
    Ok(out.flush()?)
}

fn export(args: &ExportArgs) -> Result<(), CommandFailure> {
    let chosen: Vec<(&Kernel, Vec<&Variant>)> = shaders::ALL
        .iter()
        .filter(|kernel| args.kernel.as_deref().is_none_or(|name| name == kernel.name))
        .map(|kernel| {
            let is_wanted = |variant: &&Variant| {
                args.tier.is_none_or(|tier| tier == variant.tier)
                    && args.weight.is_none_or(|weight| Some(weight.layout()) == variant.weight)
            };
            (&**kernel, kernel.variants.iter().filter(is_wanted).collect())
        })
        .filter(|(_, variants): &(_, Vec<_>)| !variants.is_empty())
        .collect();
    let variants: Vec<&Variant> = chosen.iter().flat_map(|(_, variants)| variants.iter().copied()).collect();
    if variants.is_empty() {
        return Err(args.without_variant().into());
    }
    if args.folder == Path::new("-") {
        let [variant] = variants[..] else { return Err(args.with_several(&variants).into()) };
        let mut out = io::stdout().lock();
        out.write_all(variant.source().as_bytes())?;
        return Ok(out.flush()?);
    }
    write_files(&args.folder, &chosen)?;
    say!("wrote {} shaders and kernels.json to {}", variants.len(), args.folder.display());
    Ok(())
}

impl ExportArgs {
    /// The error of a kernel that does not exist, or has no such variant.
    fn without_variant(&self) -> Error {
        let known = shaders::ALL.iter().find(|kernel| self.kernel.as_deref() == Some(kernel.name));
        match (known, &self.kernel) {
            (None, Some(name)) => {
                let near = nearest(name, shaders::ALL.iter().map(|kernel| kernel.name));
                let near = near.map_or(String::new(), |near| format!(", such as {near}"));
                let expected = format!("a kernel of `tilewright kernels list`{near}");
                Error::Option { option: "kernel", expected, found: format!("`{name}`") }
            }
            (kernel, _) => {
                let of_kernel = kernel.map_or("of some kernel".into(), |kernel| labels(kernel.variants.iter()));
                let (option, found) = match (self.weight, self.tier) {
                    (Some(weight), Some(tier)) => ("weight, tier", format!("{} and {}", weight.name(), tier.name())),
                    (Some(weight), None) => ("weight", weight.name().to_owned()),
                    (None, tier) => ("tier", tier.map_or(String::new(), |tier| tier.name().to_owned())),
                };
                Error::Option { option, expected: format!("one of the variants {of_kernel}"), found }
            }
        }
    }

    /// The error of `-` with several variants.
    fn with_several(&self, variants: &[&Variant]) -> Error {
        let found = match &self.kernel {
            Some(name) => format!("`{name}` with {} variants ({})", variants.len(), labels(variants.iter().copied())),
            None => "missing".into(),
        };
        let expected = "one variant for `-`, by --kernel, --weight and --tier".into();
        Error::Option { option: "kernel", expected, found }
    }
}

/// The first labels of variants.
fn labels<'v>(variants: impl Iterator<Item = &'v Variant>) -> String {
    const MOST: usize = 8;
    let mut labels: Vec<&str> = variants.take(MOST + 1).map(|variant| variant.label).collect();
    if labels.len() > MOST {
        labels[MOST] = "...";
    }
    labels.join(", ")
}

/// A variant's file: kernel, weight type and tier.
fn file_of(variant: &Variant) -> String {
    let kernel = variant.label.rsplit_once('.').map_or(variant.label, |(kernel, _)| kernel);
    format!("{kernel}.{}.wgsl", variant.tier.name())
}

fn write_files(folder: &Path, chosen: &[(&Kernel, Vec<&Variant>)]) -> Result<(), Error> {
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).map_err(|source| Error::Io { path, source })
    };
    std::fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.into(), source })?;
    let mut table = Vec::new();
    for (kernel, variants) in chosen {
        for variant in variants {
            write(&file_of(variant), &variant.source())?;
        }
        let bindings = kernel.bindings.iter().enumerate().map(|(at, binding)| {
            let elements = format!("{:?}", binding.dtype).to_lowercase();
            json!({"binding": at + 1, "name": binding.name, "writes": binding.writes, "elements": elements})
        });
        let params = kernel
            .params
            .iter()
            .map(|field| json!({"name": field.name, "type": field.wgsl_type, "offset": field.offset_bytes}));
        let variants = variants.iter().map(|variant| {
            json!({
                "file": file_of(variant),
                "tier": variant.tier.name(),
                "weight": variant.weight.map(|weight| weight.to_string()),
                "workgroup_bytes": variant.workgroup_bytes,
            })
        });
        table.push(json!({
            "entry_point": kernel.name,
            "params_bytes": kernel.params_size,
            "params": params.collect::<Vec<_>>(),
            "bindings": bindings.collect::<Vec<_>>(),
            "variants": variants.collect::<Vec<_>>(),
        }));
    }
    write("kernels.json", &format!("{:#}\n", serde_json::Value::from(table)))
}
