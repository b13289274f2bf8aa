//! The command line, a thin layer over the library: arguments, exit codes and output conventions. Results go to stdout,
//! everything else to stderr.

#[macro_use]
mod messages;

mod answer;
mod attachments;
mod bench;
mod chat;
mod command_line;
mod constrain;
mod embed;
mod environment;
mod failure;
mod help;
mod hub;
mod imatrix;
mod info;
mod inspect;
mod kernels;
mod line_editor;
mod lora;
mod lost;
mod manual;
mod model_names;
mod nearest;
#[cfg(not(feature = "serve"))]
mod no_serve;
mod parallel;
mod perplexity;
mod progress;
#[cfg(feature = "serve")]
mod ps;
mod quantize;
mod quiet;
mod rerank;
mod run;
#[cfg(feature = "serve")]
mod serve;
mod several;
mod speculation;
mod split;
mod tokenize;
mod transcribe;
mod tune;
mod version;
mod word_wrap;

use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use clap::{Parser, Subcommand};
#[cfg(feature = "serve")]
use tilewright::AdapterReport;
use tilewright::{Device, DeviceChoice, Error, Power, Tier};

use failure::{CommandFailure, ended};
use messages::{Level, MessageArgs};

const USAGE: &str = "tilewright [MODEL] [PROMPT] [OPTIONS]\n       tilewright <COMMAND> [OPTIONS]";

const AFTER_HELP: &str = "\
Without a command, runs the model: a conversation as in `chat` if it has a chat template, else as in `run`, with their
options. Without a model, the built-in one tells a story. `tilewright COMMAND --help` explains a command.

Exit codes: 0 success, 1 runtime error, 2 invalid command line.";

/// Run language models on any GPU through WebGPU, or on the CPU.
#[derive(Parser)]
#[command(name = "tilewright", version, override_usage = USAGE, after_help = AFTER_HELP)]
#[command(subcommand_required = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    messages: MessageArgs,
}

#[derive(Subcommand)]
enum Command {
    /// Generate text from a prompt, with a model file or the built-in model.
    Run(run::RunArgs),
    Chat(chat::ChatArgs),
    #[cfg(feature = "serve")]
    Serve(Box<serve::ServeArgs>),
    #[cfg(not(feature = "serve"))]
    Serve(no_serve::ServeArgs),
    #[cfg(feature = "serve")]
    Ps(ps::PsArgs),
    Embed(embed::EmbedArgs),
    Rerank(rerank::RerankArgs),
    Transcribe(transcribe::TranscribeArgs),
    Pull(hub::PullArgs),
    #[command(visible_alias = "ls")]
    List(hub::ListArgs),
    Rm(hub::RmArgs),
    /// Show adapters with their features and limits, and the device that would be used.
    Info(info::InfoArgs),
    Tokenize(tokenize::TokenizeArgs),
    Detokenize(tokenize::DetokenizeArgs),
    /// Show metadata, tensors and memory plan of a model file.
    #[command(visible_alias = "show")]
    Inspect(inspect::InspectArgs),
    Quantize(quantize::QuantizeArgs),
    Split(split::SplitArgs),
    Merge(split::MergeArgs),
    Perplexity(perplexity::PerplexityArgs),
    Imatrix(imatrix::ImatrixArgs),
    /// Benchmark a model: prefill and decode speed, next to what the device can reach.
    ///
    /// Tests are named as in llama-bench: `pp512` is a prompt of 512 tokens, `tg128` generates 128 tokens one after
    /// the other, `@ d1024` starts from a context of 1024 tokens, and `b32` runs prefill in passes of 32 tokens
    /// instead of the usual size. Rates are the median of the repetitions, with the lowest and the highest. All tests
    /// run a single sequence.
    ///
    /// The last column compares with two kernels measured on the same device in the same run: decoding with `scale`,
    /// which copies a large tensor, and prefill with an F32 `matmul`.
    ///
    /// With `--report`, measures the device as a whole: memory and arithmetic probes, each kernel as a share of
    /// their rates, and the model. `www/bench.html` writes the same report in a browser.
    Bench(Box<bench::BenchArgs>),
    /// Measure the matrix-product kernels for a model's shapes and save the fastest for later runs.
    ///
    /// Each product is measured for up to 2 s. A kernel is chosen only if it is at least 5 % faster than every simpler
    /// one and its results agree up to rounding. The choices apply to this version, adapter, driver and tier.
    Tune(tune::TuneArgs),
    Kernels(kernels::KernelsArgs),
    Version(version::VersionArgs),
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
}

impl Cli {
    /// The model arguments: files, folders or addresses. `embed` and `rerank` resolve their own, to report errors by
    /// their exit codes and logs.
    fn models(&mut self) -> Vec<&mut PathBuf> {
        let (model, draft) = match &mut self.command {
            Command::Run(args) => (args.model.as_mut(), args.generate.draft()),
            Command::Chat(args) => args.models(),
            Command::Tokenize(args) => (args.model.as_mut(), None),
            Command::Detokenize(args) => (args.model.as_mut(), None),
            Command::Perplexity(args) => (args.model.as_mut(), None),
            Command::Imatrix(args) => (Some(&mut args.model), None),
            Command::Transcribe(args) => (Some(&mut args.model), None),
            Command::Split(args) => (Some(&mut args.input), None),
            Command::Merge(_) => (None, None),
            Command::Inspect(args) => (args.file.as_mut(), None),
            Command::Quantize(args) => (Some(&mut args.input), None),
            Command::Bench(args) => (args.model(), None),
            Command::Tune(args) => (args.model.as_mut(), None),
            Command::Embed(_) | Command::Rerank(_) | Command::Info(_) | Command::Version(_) => (None, None),
            Command::Pull(_) | Command::List(_) | Command::Rm(_) => (None, None),
            Command::Completions(_) | Command::Man(_) => (None, None),
            // `serve` resolves its models itself.
            Command::Serve(_) | Command::Kernels(_) => (None, None),
            #[cfg(feature = "serve")]
            Command::Ps(_) => (None, None),
        };
        model.into_iter().chain(draft).collect()
    }

    /// The model of `run` and `chat`.
    fn model(&mut self) -> Option<&mut PathBuf> {
        match &mut self.command {
            Command::Run(args) => args.model.as_mut(),
            Command::Chat(args) => args.models().0,
            _ => None,
        }
    }

    /// The command line with `--model` in its place.
    ///
    /// # Errors
    /// A message, if there are two models or prompts.
    fn joined(mut self) -> Result<Cli, String> {
        match &mut self.command {
            Command::Run(args) => args.join()?,
            Command::Chat(args) => args.join()?,
            Command::Tokenize(args) => args.join()?,
            Command::Detokenize(args) => args.join(),
            _ => {}
        }
        Ok(self)
    }
}

fn main() -> ExitCode {
    let mut cli = match command_line::parse() {
        Ok(cli) => cli,
        Err(error) => return ended(Err(error.into())),
    };
    if let Command::Transcribe(args) = &cli.command
        && let Err(error) = args.check_files()
    {
        return ended(Err(error.into()));
    }
    let mut tell = |text: &str| notice!("{text}");
    let localised = cli.models().into_iter().try_for_each(|model| hub::localise(model, &mut tell));
    if let Err(error) = localised {
        return ended(Err(error.into()));
    }
    ended(match cli.command {
        Command::Run(args) => run::run(args.model.as_deref(), args.text.as_deref(), &args.generate),
        Command::Chat(args) => chat::chat(&args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::serve(*args),
        #[cfg(not(feature = "serve"))]
        Command::Serve(_) => no_serve::serve(),
        #[cfg(feature = "serve")]
        Command::Ps(args) => ps::ps(&args),
        // These two have more exit codes, for the programs that start them.
        Command::Embed(args) => return embed::embed(args),
        Command::Rerank(args) => return rerank::rerank(args),
        Command::Transcribe(args) => transcribe::transcribe(&args),
        Command::Pull(args) => hub::pull(&args),
        Command::List(args) => hub::list(&args),
        Command::Rm(args) => hub::rm(&args),
        Command::Info(args) => info::info(&args),
        Command::Tokenize(args) => tokenize::tokenize(&args),
        Command::Detokenize(args) => tokenize::detokenize(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Quantize(args) => quantize::quantize(&args),
        Command::Split(args) => split::split(&args),
        Command::Merge(args) => split::merge(&args),
        Command::Perplexity(args) => perplexity::perplexity(&args),
        Command::Imatrix(args) => imatrix::imatrix(&args),
        Command::Bench(args) => bench::bench(*args),
        Command::Tune(args) => tune::tune(&args),
        Command::Kernels(args) => kernels::kernels(&args),
        Command::Version(args) => version::version(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args),
    })
}

/// Which device to use.
#[derive(clap::Args)]
struct DeviceArgs {
    /// Device: `auto`, `cpu`, `gpu`, or part of an adapter's name.
    ///
    /// `auto` picks a hardware GPU (discrete before integrated before virtual, Vulkan or Metal before DirectX), or the
    /// CPU if there is none. `serve` also accepts `all` for every hardware GPU, or a list such as `0,1,cpu` of names
    /// and of numbers from `tilewright info`.
    #[arg(long, default_value = "auto", env = "TILEWRIGHT_DEVICE", value_name = "DEVICE")]
    device: DeviceChoice,
    /// GPU adapter, overriding --device: `pci:0000:3b:00.0`, a number from `tilewright info`, or part of its name.
    #[arg(long, value_parser = parse_adapter, env = "TILEWRIGHT_ADAPTER", value_name = "ADAPTER")]
    adapter: Option<DeviceChoice>,
    /// GPU that `--device auto` prefers: `high` for discrete, `low` for integrated, which saves power.
    #[arg(long, value_parser = parse_power, default_value = "high", env = "TILEWRIGHT_POWER", value_name = "POWER")]
    power: Power,
    /// Threads on the CPU [default: as many as the process may use].
    ///
    /// CPU affinity and the quota of a container's control group count. RAYON_NUM_THREADS sets the default.
    #[arg(long, short, value_parser = parse_threads, env = "TILEWRIGHT_THREADS", value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Shader tier; `f16`, `matrix8` and `matrix16` round operands [default: the best for the adapter].
    #[arg(long, value_parser = parse_tier, env = "TILEWRIGHT_TIER", value_name = "TIER")]
    tier: Option<Tier>,
}

impl DeviceArgs {
    /// Opens the device and prints its notices.
    fn open(&self) -> Result<Device, Error> {
        self.open_one(&self.choice())
    }

    fn open_one(&self, choice: &DeviceChoice) -> Result<Device, Error> {
        let device = self.choose_one(choice)?;
        device.info().notices.iter().for_each(|text| notice!("{text}"));
        let info = device.info();
        debug!("device {} ({}): {}", info.name, info.backend, info.reason);
        Ok(device)
    }

    /// Opens the device without printing its notices.
    fn choose(&self) -> Result<Device, Error> {
        self.choose_one(&self.choice())
    }

    fn choose_one(&self, choice: &DeviceChoice) -> Result<Device, Error> {
        if let Some(n) = self.threads {
            tilewright::set_threads(n)?;
        }
        self.quietly(|| pollster::block_on(Device::open(choice, self.tier)))
    }

    fn choice(&self) -> DeviceChoice {
        match (&self.adapter, &self.device, self.power) {
            (Some(adapter), _, _) => adapter.clone(),
            (None, DeviceChoice::Auto, Power::Low) => DeviceChoice::LowPower,
            (None, device, _) => device.clone(),
        }
    }

    /// The selected devices: for `all`, every hardware GPU, or `auto` without one; for a list, its entries, unless an
    /// adapter's name contains the text.
    #[cfg(feature = "serve")]
    fn choices(&self) -> Result<Vec<DeviceChoice>, Error> {
        let DeviceChoice::Named(text) = self.choice() else { return Ok(vec![self.choice()]) };
        let adapters = self.quietly(|| pollster::block_on(Device::adapters()));
        let is_name = |adapter: &AdapterReport| adapter.name.to_lowercase().contains(&text.to_lowercase());
        if adapters.iter().any(is_name) || !(text == "all" || text.contains(',')) {
            return Ok(vec![DeviceChoice::Named(text)]);
        }
        let one = |name: &str| {
            parse_device(name).map_err(|expected| {
                let found = format!("`{name}`");
                Error::Option { option: "device", expected, found }
            })
        };
        let found: Vec<DeviceChoice> = match text.as_str() {
            "all" => (0..adapters.len()).filter(|&i| !adapters[i].is_software).map(DeviceChoice::Number).collect(),
            list => list.split(',').map(str::trim).map(one).collect::<Result<_, _>>()?,
        };
        Ok(if found.is_empty() { vec![DeviceChoice::Auto] } else { found })
    }

    /// Calls `run`, suppressing what drivers print to stderr, unless all messages are printed.
    fn quietly<T>(&self, run: impl FnOnce() -> T) -> T {
        if messages::are_shown(Level::Debug) { run() } else { quiet::quietly(run) }
    }
}

/// Prints the self-test's notices since the last call.
fn tell_findings(device: &Device) {
    device.take_notices().iter().for_each(|text| notice!("{text}"));
}

/// Saves the pipeline cache of each device, so that the next start compiles nothing.
fn save_pipeline_caches<'a>(devices: impl IntoIterator<Item = &'a Device>) {
    for error in devices.into_iter().filter_map(|device| device.save_pipeline_cache().err()) {
        warning!("the pipeline cache was not saved: {error}");
    }
}

/// Parses one device of a list.
fn parse_device(name: &str) -> Result<DeviceChoice, String> {
    match name {
        "auto" | "cpu" | "gpu" => Ok(DeviceChoice::from_str(name).unwrap_or_default()),
        name => parse_adapter(name),
    }
}

fn parse_adapter(text: &str) -> Result<DeviceChoice, String> {
    match (text.strip_prefix("pci:"), text.parse()) {
        (Some(address), _) => {
            DeviceChoice::pci(address).ok_or("expected domain:bus:device.function, such as 0000:3b:00.0".into())
        }
        (None, Ok(number)) => Ok(DeviceChoice::Number(number)),
        (None, Err(_)) => Ok(DeviceChoice::Named(text.into())),
    }
}

fn parse_power(text: &str) -> Result<Power, String> {
    match text {
        "low" => Ok(Power::Low),
        "high" => Ok(Power::High),
        _ => Err("expected low or high".into()),
    }
}

fn parse_tier(text: &str) -> Result<Tier, String> {
    let names = Tier::ALL.map(Tier::name).join(", ");
    Tier::ALL.into_iter().find(|tier| tier.name() == text).ok_or(format!("expected one of {names}"))
}

fn parse_threads(text: &str) -> Result<NonZeroUsize, String> {
    const MOST: usize = 1024;
    let n = text.parse().ok().filter(|n: &NonZeroUsize| n.get() <= MOST);
    n.ok_or(format!("expected 1 to {MOST}"))
}

/// A number of bytes: plain, or with K, M, G (powers of 1024), as in `512M`, `1.5GiB`.
fn parse_bytes(text: &str) -> Result<u64, String> {
    bytes_of(text, 1024.0)
}

/// A number of bytes above 0, with K, M or G for powers of `step`.
fn bytes_above_0(text: &str, step: f64) -> Result<u64, String> {
    match bytes_of(text, step)? {
        0 => Err("expected 1 byte or more".into()),
        bytes => Ok(bytes),
    }
}

/// A number of bytes with K, M or G for powers of `step`; KiB, MiB and GiB are always powers of 1024.
fn bytes_of(text: &str, step: f64) -> Result<u64, String> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let Ok(number) = number.parse::<f64>() else { return Err("expected a number of bytes, such as 512M".into()) };
    let lower = unit.trim().to_ascii_lowercase();
    let (letter, step) = match lower.strip_suffix("ib") {
        Some(letter) => (letter, 1024.0),
        None => (lower.strip_suffix('b').unwrap_or(&lower), step),
    };
    let power = ["", "k", "m", "g"].iter().position(|known| *known == letter);
    let power = power.ok_or_else(|| format!("unknown unit `{}`, expected K, M or G", unit.trim()))?;
    Ok((number * step.powi(power as i32)) as u64)
}

/// Refuses to write over an existing file without `--force`, over an input in any case, and into a missing folder.
///
/// # Errors
/// [`Error::Io`], [`Error::Option`].
fn check_output(option: &'static str, output: &Path, inputs: &[&Path], force: bool) -> Result<(), Error> {
    if output.exists() && !force {
        let source = io::Error::new(io::ErrorKind::AlreadyExists, "exists already");
        return Err(Error::Io { path: output.into(), source });
    }
    if !has_folder(output) {
        let source = io::Error::new(io::ErrorKind::NotFound, "the folder does not exist");
        return Err(Error::Io { path: output.into(), source });
    }
    let Ok(real) = output.canonicalize() else { return Ok(()) };
    match inputs.iter().any(|input| input.canonicalize().is_ok_and(|input| input == real)) {
        true => {
            let (expected, found) =
                ("a file other than the model and the text".into(), format!("`{}`", real.display()));
            Err(Error::Option { option, expected, found })
        }
        false => Ok(()),
    }
}

/// A number of things, such as `1 file`.
fn counted(n: u64, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

/// Formats a number of bytes, such as `1.50 GiB`.
fn show_bytes(bytes: u64) -> String {
    let mib = bytes as f64 / (1 << 20) as f64;
    match mib {
        1024.0.. => format!("{:.2} GiB", mib / 1024.0),
        1.0.. => format!("{mib:.1} MiB"),
        _ => format!("{:.1} KiB", bytes as f64 / 1024.0),
    }
}

/// Refuses a session file in a folder that does not exist, before anything is computed for it.
fn check_session(session: Option<&Path>) -> Result<(), Error> {
    match session.filter(|file| !has_folder(file)) {
        None => Ok(()),
        Some(file) => Err(Error::Option {
            option: "session",
            expected: "a file in a folder that exists".into(),
            found: format!("`{}`", file.display()),
        }),
    }
}

/// Whether the folder of a file exists.
fn has_folder(file: &Path) -> bool {
    file.parent().is_none_or(|folder| folder.as_os_str().is_empty() || folder.is_dir())
}

/// The byte order mark, which is not part of the text.
const MARK: char = '\u{feff}';

/// The text of a file, without a byte order mark.
///
/// # Errors
/// [`Error::Io`] if the file cannot be read or is not UTF-8.
fn read_text(path: &Path) -> Result<String, Error> {
    text_of(path, std::fs::read_to_string(path))
}

/// The text of a file, or of stdin for `-`.
fn text_or_stdin(path: &Path) -> Result<String, Error> {
    match path.as_os_str() == "-" {
        true => text_of(Path::new("stdin"), io::read_to_string(io::stdin())),
        false => read_text(path),
    }
}

/// Text read from a file or stdin, without the byte order mark that editors and PowerShell write.
fn text_of(path: &Path, read: io::Result<String>) -> Result<String, Error> {
    let mut text = read.map_err(|source| Error::Io { path: path.into(), source })?;
    if text.starts_with(MARK) {
        text.drain(..MARK.len_utf8());
    }
    Ok(text)
}

/// Reads a JSON list of objects.
fn read_list(path: &Path) -> Result<Vec<serde_json::Value>, Error> {
    let text = read_text(path)?;
    let objects = |list: &Vec<serde_json::Value>| list.iter().all(serde_json::Value::is_object);
    let parsed = serde_json::from_str(&text).map_err(|error| error.to_string());
    parsed
        .and_then(|list| if objects(&list) { Ok(list) } else { Err("an item is not an object".into()) })
        .map_err(|reason| invalid(path, &reason, "a JSON list of objects"))
}

/// The error of a file's content.
fn invalid(path: &Path, reason: &str, expected: &str) -> Error {
    let source = io::Error::new(io::ErrorKind::InvalidData, format!("{reason}; expected {expected}"));
    Error::Io { path: path.into(), source }
}

/// Prints one JSON value to stdout.
fn print_json(value: &serde_json::Value) -> Result<(), CommandFailure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{value:#}")?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_definition_passes_its_debug_assertions() {
        command_line::command(&[]).debug_assert();
    }

    #[test]
    fn adapter_argument_is_parsed_in_all_spellings() {
        let address = DeviceChoice::Pci("0000:3b:00.0".into());
        for text in ["pci:0000:3b:00.0", "pci:00000000:3B:00.0", "pci:3b:0.0"] {
            assert_eq!(parse_adapter(text), Ok(address.clone()), "{text}");
        }
        for text in ["pci:", "pci:3b", "pci:3b:00", "pci:0:0:3b:00.0", "pci:3g:00.0", "pci:3b:00.0.0"] {
            assert!(parse_adapter(text).is_err(), "{text}");
        }
        assert_eq!(parse_adapter("1"), Ok(DeviceChoice::Number(1)));
        assert_eq!(parse_adapter("llvmpipe"), Ok(DeviceChoice::Named("llvmpipe".into())));
    }

    #[test]
    fn byte_size_argument_is_parsed_in_all_spellings() {
        for (text, bytes) in [("17", 17), ("2K", 2048), ("1.5GiB", 3 << 29), ("512mb", 512 << 20), ("3 M", 3 << 20)] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        let by_1000 = [("2G", 2_000_000_000), ("500M", 500_000_000), ("1.5kb", 1500), ("1GiB", 1 << 30), ("7", 7)];
        for (text, bytes) in by_1000 {
            assert_eq!(bytes_above_0(text, 1000.0), Ok(bytes), "{text}");
        }
        for text in ["", "M", "1T", "1..2", "-1", "x", "1 kx"] {
            assert!(parse_bytes(text).is_err() && bytes_above_0(text, 1000.0).is_err(), "{text}");
        }
        assert!(parse_bytes("0") == Ok(0) && bytes_above_0("0", 1000.0).is_err());
    }
}
