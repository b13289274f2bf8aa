//! `tilewright embed`: tables of texts, or pictures, in; vectors out.

pub(super) mod error;
pub(super) mod input;
pub(super) mod job;
pub(super) mod log;
mod output;
mod pictures;
pub(super) mod rows;
#[cfg_attr(not(feature = "tables"), path = "embed/no_tables.rs")]
mod tables;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use clap::builder::{FalseyValueParser, PossibleValuesParser, TypedValueParser};
use serde_json::json;
use tilewright::embed::{Place, shortened};
use tilewright::kernels::Pooling;
use tilewright::{Device, EmbedOptions, Embedder, Error, Recovery};

use super::lost::TestLosses;
use super::run::with_loading_bar;
use super::{DeviceArgs, hub};
use error::{BadRecord, EXIT_CODES, EmbedError, RecordFault};
use input::{InputFormat, InputSource, ReadProgress};
use job::{Job, OnError, Skipped};
use log::{Log, ProgressLog};
use output::{OutputFormat, OutputTarget};

/// Embed a text, the texts of a file or stream, or pictures.
///
/// A single text gives its vector as a JSON array: `tilewright embed MODEL "a quiet river"`.
///
/// With CLIP and SigLIP, `--images FILE...` embeds pictures in the same space as texts.
///
/// Records keep their order and their other columns; a null text gets a null vector. The output file appears only when
/// it is complete.
///
/// As a worker for engines such as Ray or Spark, use `--io arrow-stream`: it reads an Arrow stream from stdin and
/// writes one to stdout, one batch out for each batch in, without delay, until stdin ends.
#[derive(Args)]
#[command(after_help = EXIT_CODES)]
pub struct EmbedArgs {
    /// Text encoder: Hugging Face folder, GGUF file, or address hf:OWNER/REPO.
    model: PathBuf,
    /// File with the texts, or a single text; `-` is stdin.
    ///
    /// An argument is a text if no such file exists and it is not written like a path, with an extension or a slash.
    #[arg(default_value = "-")]
    input: PathBuf,
    /// Pictures to embed instead of texts: PNG, JPEG, WebP or GIF files, or folders of them.
    ///
    /// A single file gives its vector as a JSON array, several a record each, with the field `image`.
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["input", "io", "prompt", "max_tokens", "pooling"])]
    images: Vec<PathBuf>,
    /// Output file; `-` is stdout.
    #[arg(long, short, default_value = "-", env = "TILEWRIGHT_EMBED_OUTPUT", value_name = "FILE")]
    output: PathBuf,
    /// Input format; Arrow, CSV and Parquet need a build with `--features tables`.
    #[arg(long, value_enum, default_value = "auto", env = "TILEWRIGHT_EMBED_IO", value_name = "FORMAT")]
    io: InputFormat,
    /// Output format [default: by the output file's extension].
    ///
    /// On stdout the default is `arrow-stream` for `arrow-stream` input, and `jsonl` otherwise.
    #[arg(long, value_enum, env = "TILEWRIGHT_EMBED_FORMAT", value_name = "FORMAT")]
    format: Option<OutputFormat>,
    /// Column or field with the texts.
    #[arg(long, default_value = "text", env = "TILEWRIGHT_EMBED_COLUMN", value_name = "NAME")]
    column: String,
    /// Column or field for the embeddings.
    #[arg(long, default_value = "embedding", env = "TILEWRIGHT_EMBED_OUT_COLUMN", value_name = "NAME")]
    out_column: String,
    /// Records per batch; Arrow streams and files keep their own batches.
    #[arg(long, default_value = "2048", env = "TILEWRIGHT_EMBED_BATCH_SIZE", value_name = "N")]
    batch_size: std::num::NonZeroU32,
    /// Tokens per device pass [default: 8192 on a GPU, 1024 on the CPU or a software adapter].
    #[arg(long, env = "TILEWRIGHT_EMBED_MAX_BATCH_TOKENS", value_name = "N")]
    max_batch_tokens: Option<u32>,
    /// Truncate texts to N tokens [default: as the model specifies].
    #[arg(long, env = "TILEWRIGHT_EMBED_MAX_TOKENS", value_name = "N")]
    max_tokens: Option<u32>,
    /// Keep the first N elements of each embedding [default: all].
    ///
    /// They are normalised again. Only embeddings of models trained for it (Matryoshka) keep their quality.
    #[arg(long, env = "TILEWRIGHT_EMBED_DIMENSIONS", value_name = "N")]
    dimensions: Option<std::num::NonZeroU32>,
    /// How token vectors are pooled [default: as the model specifies].
    #[arg(long, value_parser = pooling(), env = "TILEWRIGHT_EMBED_POOLING", value_name = "POOLING")]
    pooling: Option<Pooling>,
    /// Name of the model's prompt to put in front of each text [default: as the model specifies].
    #[arg(long, env = "TILEWRIGHT_EMBED_PROMPT", value_name = "NAME")]
    prompt: Option<String>,
    /// Task whose adapter is merged into the model, of models that have some, such as Jina's embeddings 3 and 5 [default:
    /// none, or `retrieval`].
    #[arg(long, env = "TILEWRIGHT_EMBED_TASK", value_name = "NAME")]
    task: Option<String>,
    /// Do not L2-normalise embeddings [default: as the model specifies].
    #[arg(long, value_parser = FalseyValueParser::new(), env = "TILEWRIGHT_EMBED_NO_NORMALIZE")]
    no_normalize: bool,
    /// What to do with a record without a valid text.
    ///
    /// A skipped record gets a null vector, or no row in an npy file.
    #[arg(long, value_enum, default_value = "fail", env = "TILEWRIGHT_EMBED_ON_ERROR", value_name = "WHAT")]
    on_error: OnError,
    /// File for the numbers and errors of skipped records, as JSON lines [default: stderr].
    #[arg(long, env = "TILEWRIGHT_EMBED_ERRORS", value_name = "FILE")]
    errors: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Load the model on the CPU too, and run each batch size where it was measured to be faster.
    #[arg(long, value_parser = FalseyValueParser::new(), env = "TILEWRIGHT_EMBED_OR_CPU")]
    or_cpu: bool,
    /// Show records per second even if stderr is not a terminal.
    #[arg(long, value_parser = FalseyValueParser::new(), env = "TILEWRIGHT_EMBED_PROGRESS")]
    progress: bool,
    /// Log to stderr as JSON lines.
    #[arg(long, value_parser = FalseyValueParser::new(), env = "TILEWRIGHT_EMBED_JSON_LOGS")]
    json_logs: bool,
}

/// Parses the name of a pooling.
fn pooling() -> impl TypedValueParser<Value = Pooling> {
    PossibleValuesParser::new(Pooling::ALL.map(Pooling::name))
        .try_map(|name| Pooling::ALL.into_iter().find(|pooling| pooling.name() == name).ok_or("not a pooling"))
}

pub fn embed(mut args: EmbedArgs) -> ExitCode {
    let log = Log { json: args.json_logs };
    log.ended(log.localise(&mut args.model).and_then(|()| args.run(log)))
}

impl EmbedArgs {
    fn run(&self, log: Log) -> Result<(), EmbedError> {
        let is_text = self.images.is_empty() && input::is_text(&self.input, self.io);
        let text = self.input.to_str().filter(|_| is_text);
        let format = self.check(text.is_some())?;
        let pictures = pictures::files(&self.images)?;
        let (mut embedder, mut recovery) = self.load(log)?;
        if !pictures.is_empty() {
            pictures::encoder(&embedder)?;
        }
        let only = match &self.images[..] {
            [path] if !path.is_dir() => path.to_str(),
            _ => text,
        };
        if let (Some(only), "-", None) = (only, self.output.to_str().unwrap_or_default(), self.format) {
            self.one(only, &mut embedder, &mut recovery)?;
            log.saved(&embedder);
            return Ok(());
        }
        let read = ReadProgress::default();
        let source = InputSource {
            read: read.clone(),
            path: &self.input,
            format: self.io,
            column: &self.column,
            batch_size: self.batch_size.get() as usize,
        };
        let metadata = metadata(&embedder);
        let (all_dims, dims) = self.dims(&embedder)?;
        let shortens = dims < all_dims;
        let normalizes = embedder.normalizes();
        let input = match text {
            _ if !pictures.is_empty() => pictures::records(pictures)?,
            Some(text) => input::one_text(text, &self.column),
            None => source.open()?,
        };
        let input = if format.is_tabular() { tables::tabled(input, self.column())? } else { input };
        let output =
            OutputTarget { path: &self.output, format, column: &self.out_column, dims, metadata }.open(&input)?;
        let job = Job {
            column: self.column(),
            on_error: self.on_error,
            has_nulls: format.has_nulls(),
            log,
            progress: ProgressLog::new(log, self.progress).of(read),
            skipped: Skipped::create(self.errors.as_deref())?,
        };
        let mut test = TestLosses::from_env();
        job.run(input, output, |texts, progress| {
            recovery.retry(&mut embedder, |embedder| {
                test.step(embedder.device());
                let vectors = pollster::block_on(self.vectors(embedder, texts, progress))?;
                Ok(match shortens {
                    true => shortened(&vectors, all_dims as usize, dims as usize, normalizes),
                    false => vectors,
                })
            })
        })?;
        for place in embedder.places() {
            let Place { n_tokens, n_texts, is_second, seconds } = place;
            let place = if is_second { "CPU" } else { embedder.device().info().name.as_str() };
            let fields = json!({ "tokens": n_tokens, "texts": n_texts, "place": place, "seconds": seconds });
            log.say("info", &format!("batches of up to {n_tokens} tokens and {n_texts} texts: {place}"), fields);
        }
        log.saved(&embedder);
        Ok(())
    }

    /// The column or field with texts or pictures.
    fn column(&self) -> &str {
        if self.images.is_empty() { &self.column } else { pictures::COLUMN }
    }

    /// The vectors of texts, or of the pictures in these files.
    async fn vectors(
        &self,
        embedder: &Embedder,
        inputs: &[&str],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>, Error> {
        match self.images.is_empty() {
            true => embedder.embed_with(inputs, progress).await,
            false => pictures::vectors(embedder, inputs, progress).await,
        }
    }

    /// Prints the vector of one text or picture as a JSON array.
    fn one(
        &self,
        input: &str,
        embedder: &mut Embedder,
        recovery: &mut Recovery<'_, Embedder>,
    ) -> Result<(), EmbedError> {
        let (all_dims, dims) = self.dims(embedder)?;
        let made =
            recovery.retry(embedder, |embedder| pollster::block_on(self.vectors(embedder, &[input], &mut |_| ())));
        let mut vector = made.map_err(|error| self.of_only(error))?;
        if dims < all_dims {
            vector = shortened(&vector, all_dims as usize, dims as usize, embedder.normalizes());
        }
        let line =
            serde_json::to_string(&vector).map_err(|error| EmbedError::write(&self.output, io::Error::from(error)))?;
        writeln!(io::stdout(), "{line}").map_err(|error| EmbedError::write(&self.output, error))
    }

    /// The error of the only input. A picture is named by its file.
    fn of_only(&self, error: Error) -> EmbedError {
        match error {
            Error::InRecord { source, .. } if !self.images.is_empty() => {
                let fault = RecordFault::Text(*source);
                BadRecord { input: pictures::INPUT.into(), record: 1, fault }.into()
            }
            error => error.into(),
        }
    }

    /// The size of the model's vectors, and of those that are written.
    fn dims(&self, embedder: &Embedder) -> Result<(u32, u32), EmbedError> {
        let all_dims = embedder.dims();
        let dims = self.dimensions.map_or(all_dims, std::num::NonZeroU32::get);
        match dims > all_dims {
            true => {
                let expected = format!("1 to {all_dims}, the size of the model's embeddings");
                Err(EmbedError::Usage(format!("--dimensions is {dims}, expected {expected}")))
            }
            false => Ok((all_dims, dims)),
        }
    }

    /// The output format. Fails if flags contradict each other.
    fn check(&self, is_text: bool) -> Result<OutputFormat, EmbedError> {
        let usage = |message: &str| Err(EmbedError::Usage(message.into()));
        let is_lines = is_text || !self.images.is_empty();
        let io = if is_lines { InputFormat::Text } else { self.io.of(&self.input)? };
        let format = self.format.map_or_else(|| OutputFormat::of(&self.output, io), Ok)?.available(&self.output)?;
        if format == OutputFormat::Npy && self.output.as_os_str() == "-" {
            return usage("npy cannot be written to stdout, it needs a file: --output FILE");
        }
        if self.errors.is_some() && self.on_error == OnError::Fail {
            return usage("--errors requires --on-error skip");
        }
        if format == OutputFormat::Npy && self.on_error == OnError::Skip && self.errors.is_none() {
            return usage("npy files leave out skipped records: list them with --errors FILE");
        }
        if self.column() == self.out_column {
            let message = match self.images.is_empty() {
                true => "--column and --out-column must differ",
                false => "--out-column must not be `image`, the field with the path of a picture",
            };
            return usage(message);
        }
        Ok(format)
    }

    /// The encoder, and its recovery from a lost device.
    fn load(&self, log: Log) -> Result<(Embedder, Recovery<'_, Embedder>), EmbedError> {
        let device = self.device.choose()?;
        log.notices(device.info());
        if self.or_cpu && !device.is_gpu() {
            log.say("notice", "--or-cpu has no effect: the device is the CPU", json!({}));
        }
        let load = move |device: &Device| self.load_onto(device);
        let mut recovery =
            Recovery::new(move || self.device.choose(), load, move |notice| log.say("notice", notice, json!({})));
        let loaded = recovery.load(&device).map_err(EmbedError::Model);
        log.findings(&device);
        let embedder = loaded?;
        let fields = json!({ "dims": embedder.dims(), "max_tokens": embedder.max_tokens() });
        log.loaded(embedder.name(), embedder.device().info(), fields);
        Ok((embedder, recovery))
    }

    fn load_onto(&self, device: &Device) -> Result<Embedder, Error> {
        hub::check(&self.model)?;
        let load = |device: &Device, second: Option<Embedder>| {
            with_loading_bar(|progress| {
                let options = EmbedOptions {
                    max_tokens: self.max_tokens,
                    pooling: self.pooling,
                    normalize: self.no_normalize.then_some(false),
                    task: self.task.clone(),
                    max_batch_tokens: self.max_batch_tokens,
                    second,
                    progress: Some(progress),
                    ..EmbedOptions::default()
                };
                Embedder::load(device, &self.model, options)
            })
        };
        let second = match self.or_cpu && device.is_gpu() {
            true => Some(load(&Device::cpu(), None)?),
            false => None,
        };
        let embedder = load(device, second)?;
        if self.images.is_empty() {
            embedder.encodings()?;
        }
        match &self.prompt {
            Some(prompt) => embedder.with_prompt(Some(prompt)),
            None => Ok(embedder),
        }
    }
}

/// Metadata for tables with vectors.
fn metadata(embedder: &Embedder) -> HashMap<String, String> {
    let entries = [
        ("model", embedder.name().to_string()),
        ("pooling", embedder.pooling().name().to_string()),
        ("normalized", embedder.normalizes().to_string()),
        ("max_tokens", embedder.max_tokens().to_string()),
        ("version", env!("CARGO_PKG_VERSION").to_string()),
    ];
    entries.into_iter().map(|(key, value)| (format!("tilewright.{key}"), value)).collect()
}
