//! Models by address: `hf:owner/repo` wherever a command takes a model, and `tilewright pull`, `list` and `rm`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tilewright::Error;
use tilewright::hub::{Address, Damaged, Event, Hub, KNOWN_MODELS, Verified};

use super::{CommandFailure, counted, model_names, print_json, progress, show_bytes};

/// Download or update a model and print its path.
///
/// An address is hf:OWNER/REPO, with :QUANTISATION for one of its GGUF files (default: the best common one), /PATH for
/// a file or folder in it, and @REVISION for a branch, tag or commit. A repository without GGUF files is downloaded as
/// a folder with config.json and safetensors. Interrupted downloads are resumed.
///
/// HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_ENDPOINT and HF_HUB_OFFLINE work as in other programs that share the cache.
#[derive(Args)]
pub struct PullArgs {
    /// Model address, such as hf:Qwen/Qwen3-0.6B-GGUF:Q8_0.
    #[arg(value_name = "ADDRESS", required_unless_present = "verify")]
    address: Option<Address>,
    /// Check cached files against their digests and download damaged ones again.
    ///
    /// With ADDRESS, checks only the files of its repository.
    #[arg(long)]
    verify: bool,
}

/// List downloaded models, including those of other programs that share the cache.
#[derive(Args)]
pub struct ListArgs {
    /// List suggested models, with their addresses, instead of downloaded ones; needs no network.
    #[arg(long)]
    available: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Delete a downloaded model, without confirmation.
///
/// Keeps files that other models of the repository need. Without @REVISION, deletes the model in all revisions.
#[derive(Args)]
pub struct RmArgs {
    /// Model address, as printed by `tilewright list`.
    #[arg(value_name = "ADDRESS")]
    address: Address,
}

/// The contents of `assets/models.json`.
#[derive(Deserialize)]
struct ModelTable {
    models: Vec<KnownModel>,
}

/// A suggested model.
#[derive(Deserialize, Serialize)]
pub struct KnownModel {
    pub name: String,
    pub address: String,
    /// `chat`, `embed`, `rerank` or `speech`.
    r#use: String,
    quantisation: Option<String>,
    /// Approximate size of the files.
    size_bytes: u64,
    /// KV cache of one token, as f16; `None` for embedders and rerankers.
    cache_bytes_per_token: Option<u64>,
    licence: String,
    /// File in the same repository that adds images; tilewright does not use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    vision: Option<String>,
    /// Whether the project has run this model.
    tried: bool,
}

/// Replaces an `hf:` address by its local file or folder, downloading it if necessary; other paths must exist. Notices
/// go to `tell`.
///
/// # Errors
/// Those of [`Hub::fetch`] and [`check`].
pub fn localise(model: &mut PathBuf, tell: &mut dyn FnMut(&str)) -> Result<(), Error> {
    download(model, tell)?;
    check(model)
}

/// As [`localise`], but other paths may be missing.
///
/// # Errors
/// Those of [`Hub::fetch`].
pub fn download(model: &mut PathBuf, tell: &mut dyn FnMut(&str)) -> Result<(), Error> {
    if let Some(text) = model.to_str().filter(|text| Address::is_meant_by(text)) {
        *model = fetch(&text.parse()?, tell)?;
    }
    Ok(())
}

/// Parses an address as this program or Ollama spells it, such as `hf.co/owner/repo:quantisation`.
///
/// # Errors
/// [`HubError::Address`].
#[cfg(feature = "serve")]
pub fn address_of(name: &str) -> Result<Address, Error> {
    Ok(model_names::address(name, &[]).unwrap_or_else(|| name.to_owned()).parse()?)
}

/// Deletes a downloaded model.
///
/// # Errors
/// Those of [`Hub::remove`].
#[cfg(feature = "serve")]
pub fn delete(address: &Address) -> Result<(), Error> {
    Hub::from_env()?.remove(address).map(drop)
}

/// Refuses a model that does not exist.
///
/// # Errors
/// [`Error::Io`], with a hint at what to type instead.
pub fn check(model: &Path) -> Result<(), Error> {
    if !matches!(model.try_exists(), Ok(false)) {
        return Ok(());
    }
    let hint = model_names::hint(&model.to_string_lossy(), &available()?);
    let source = io::Error::new(io::ErrorKind::NotFound, format!("no such file or folder; {hint}"));
    Err(Error::Io { path: model.into(), source })
}

pub fn pull(args: &PullArgs) -> Result<(), CommandFailure> {
    if args.verify {
        verify(args.address.as_ref())?;
    }
    let Some(address) = &args.address else { return Ok(()) };
    let path = fetch(address, &mut |text| notice!("{text}"))?;
    let mut out = io::stdout().lock();
    writeln!(out, "{}", path.display())?;
    Ok(out.flush()?)
}

/// Verifies cached files and reports damaged ones. Fails if one cannot be downloaded again.
fn verify(address: Option<&Address>) -> Result<(), CommandFailure> {
    let bar = progress::bar(0, "{bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    let verified = Hub::from_env()?.verify(address, &mut |event| show(&bar, event));
    bar.finish_and_clear();
    let Verified { n_files, size_bytes, damaged, unknown } = verified?;
    for path in &unknown {
        notice!("no digest is known for {}; it is not verified", path.display());
    }
    let mut failed = None;
    for Damaged { repo, path, digests: [expected, found], files, restored } in damaged {
        let files: Vec<&str> = files.iter().map(|(_, path)| path.as_str()).collect();
        let (files, path) = (files.join(", "), path.display());
        notice!("{files} of {repo} was damaged: {path} had the digest {found}, expected {expected}");
        match restored {
            Ok(()) => notice!("{files} of {repo} was downloaded again"),
            Err(error) => failed = Some(error),
        }
    }
    notice!("{} verified, {}", counted(n_files as u64, "file"), show_bytes(size_bytes));
    failed.map_or(Ok(()), |error| Err(error.into()))
}

pub fn list(args: &ListArgs) -> Result<(), CommandFailure> {
    if args.available {
        return list_available(args.json);
    }
    let hub = Hub::from_env()?;
    let models = hub.list()?;
    if args.json {
        let object = |model: &tilewright::hub::Cached| {
            json!({
                "address": model.address.to_string(),
                "path": model.path,
                "size_bytes": model.size_bytes,
                "modified_unix_s": unix_seconds(model.modified),
            })
        };
        return print_json(&models.iter().map(object).collect());
    }
    if models.is_empty() {
        say!("no models in {}; `tilewright list --available` lists suggested models", hub.cache().display());
    }
    let addresses: Vec<String> = models.iter().map(|model| model.address.to_string()).collect();
    let width = addresses.iter().map(String::len).max().unwrap_or_default();
    let mut out = io::stdout().lock();
    for (model, address) in models.iter().zip(&addresses) {
        let (size, date) = (show_bytes(model.size_bytes), date(unix_seconds(model.modified)));
        writeln!(out, "{address:<width$}  {size:>10}  {date}  {}", model.path.display())?;
    }
    Ok(out.flush()?)
}

fn list_available(as_json: bool) -> Result<(), CommandFailure> {
    let models = available()?;
    if as_json {
        return print_json(&json!(models));
    }
    let width = models.iter().map(|model| model.address.len()).max().unwrap_or_default();
    let mut out = io::stdout().lock();
    for model in &models {
        let per_1024 = model.cache_bytes_per_token.map(|bytes| show_bytes(1024 * bytes));
        let context = per_1024.map_or(String::new(), |size| format!(", {size} per 1024 tokens"));
        let size = show_bytes(model.size_bytes);
        writeln!(out, "{:<width$}  {:<6}  about {size:>9}{context}; {}", model.address, model.r#use, model.licence)?;
    }
    Ok(out.flush()?)
}

/// The table of suggested models.
pub fn available() -> Result<Vec<KnownModel>, Error> {
    let table: ModelTable = serde_json::from_str(KNOWN_MODELS).map_err(|error| Error::Format {
        format: "json",
        field: "assets/models.json".into(),
        offset: 0,
        expected: "the table of models".into(),
        found: error.to_string(),
    })?;
    Ok(table.models)
}

pub fn rm(args: &RmArgs) -> Result<(), CommandFailure> {
    let freed = Hub::from_env()?.remove(&args.address)?;
    let mut out = io::stdout().lock();
    writeln!(out, "{freed} bytes freed ({})", show_bytes(freed))?;
    Ok(out.flush()?)
}

/// Fetches a model, with a notice before and after a download, and a progress bar if stderr is a terminal.
fn fetch(address: &Address, tell: &mut dyn FnMut(&str)) -> Result<PathBuf, Error> {
    let hub = Hub::from_env()?;
    let bar = progress::bar(0, "{bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    let mut is_begun = false;
    let fetched = hub.fetch(address, &mut |event| match event {
        Event::Begin { n_files, total_bytes } => {
            is_begun = true;
            let files = counted(n_files as u64, "file");
            tell(&format!("downloading {address}: {files}, {}", show_bytes(total_bytes)));
        }
        Event::Notice(notice) => tell(notice),
        event => show(&bar, event),
    });
    bar.finish_and_clear();
    let path = fetched?;
    if is_begun {
        tell(&format!("downloaded to {}", path.display()));
    }
    Ok(path)
}

fn show(bar: &ProgressBar, event: Event<'_>) {
    if let Event::Progress { done_bytes, total_bytes } = event {
        bar.set_length(total_bytes);
        bar.set_position(done_bytes);
    }
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The date in UTC, such as 2026-11-25. Years start in March, so that a leap day is the last day.
fn date(unix_seconds: u64) -> String {
    // Days since 0000-03-01; 400 years have 146,097 of them.
    let days = unix_seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    format!("{:04}-{month:02}-{day:02}", 400 * era + year + u64::from(month <= 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_correct_across_leap_years() {
        for (seconds, want) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_735_689_599, "2024-12-31"),
            (1_764_028_800, "2025-11-25"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date(seconds), want, "{seconds}");
        }
    }

    #[test]
    fn every_listed_model_has_a_valid_address() {
        let models = available().unwrap();
        assert!(models.len() > 5);
        for model in &models {
            let address: Address = model.address.parse().unwrap();
            assert_eq!(address.quant, model.quantisation, "{}", model.name);
            assert_eq!(model.cache_bytes_per_token.is_some(), model.r#use == "chat", "{}", model.name);
            assert_eq!(models.iter().filter(|other| other.address == model.address).count(), 1, "{}", model.name);
        }
        // By use, then by size: `list --available` prints this order, and a name means the first model that has it.
        let uses = ["chat", "embed", "rerank", "speech"];
        let order = |model: &KnownModel| (uses.iter().position(|name| *name == model.r#use).unwrap(), model.size_bytes);
        assert!(models.is_sorted_by_key(order));
    }

    #[test]
    fn path_without_hub_prefix_is_left_unchanged() {
        let mut model = PathBuf::from("Cargo.toml");
        localise(&mut model, &mut |_| {}).unwrap();
        assert_eq!(model, PathBuf::from("Cargo.toml"));
        for path in ["model.gguf", "./hf:a/b", "no_folder/"] {
            let error = localise(&mut PathBuf::from(path), &mut |_| {}).unwrap_err();
            assert!(error.to_string().starts_with(&format!("{path}: no such file or folder; ")), "{error}");
        }
        let error = localise(&mut PathBuf::from("hf:a"), &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains("`hf:a` is not a model address"), "{error}");
    }
}
