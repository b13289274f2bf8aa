//! `tilewright run`: continues a prompt.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use tilewright::answer::{AnswerReader, Format, ToolCall};
use tilewright::generate::{ContextPolicy, DeviceLayers, ExpertCacheStats, Generation, Stats, StopReason, Streaming};
use tilewright::kernels::KvType;
use tilewright::load::ModelFile;
use tilewright::tokenizer::EncodeOptions;
use tilewright::{
    ChatModel, ChatRequest, Counters, Device, DeviceChoice, Error, GenerateOptions, LoadOptions, Model, Recovery,
};

use super::answer::AnswerPrinter;
use super::lora::LoraArgs;
use super::lost::each_piece;
use super::parallel::{self, ParallelArgs};
use super::several::SeveralArgs;
use super::speculation::{self, DraftArgs, SpeculationArgs};
use super::{
    CommandFailure, DeviceArgs, parse_bytes, parse_device, print_json, read_text, save_pipeline_caches, show_bytes,
    tell_findings, text_of,
};

#[derive(Args)]
pub struct RunArgs {
    /// Model: GGUF file, Hugging Face folder, or hf:OWNER/REPO[:QUANTISATION] [default: the built-in model].
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub generate: GenerateArgs,
}

/// A model and where it runs.
#[derive(Args)]
pub struct ModelArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Context length in tokens, or `auto` for the longest that fits in memory [default: the model's, at most 4096].
    #[arg(long, value_name = "N|auto")]
    ctx: Option<Ctx>,
    /// Memory limit, such as 512M or 2G; what does not fit is offloaded to disk [default: free memory, if known].
    ///
    /// Offloaded weights are read from the file again in every pass: first rows of embedding tables (see
    /// --stream-rows), then experts or layers. A model that does not fit even so is refused.
    #[arg(long, value_parser = parse_bytes, env = "TILEWRIGHT_MEMORY_LIMIT", value_name = "BYTES")]
    memory_limit: Option<u64>,
    /// CPU offload: run only the last N layers and the head on the GPU, the others on the CPU [default: all on the
    /// GPU].
    #[arg(long, value_name = "N")]
    gpu_layers: Option<u32>,
    /// Run N layers on another device, before those of --device; repeatable, in layer order.
    ///
    /// DEVICE is `cpu`, a number from `tilewright info`, or part of an adapter's name. Each device holds the weights
    /// of its own layers.
    #[arg(long, value_name = "DEVICE=N")]
    layers_on: Vec<LayersOn>,
    /// Disk offload of embedding tables: read the row of each token from the file instead of loading the table.
    ///
    /// Applies to per-layer embeddings, and to the token embedding of models with a separate output head.
    #[arg(long)]
    stream_rows: bool,
    #[command(flatten)]
    precision: PrecisionArgs,
    #[command(flatten)]
    lora: LoraArgs,
}

/// A context length.
#[derive(Clone, Copy)]
enum Ctx {
    /// The longest that fits.
    Auto,
    Of(u32),
}

impl FromStr for Ctx {
    type Err = String;

    fn from_str(text: &str) -> Result<Ctx, String> {
        match text {
            "auto" => Ok(Ctx::Auto),
            n => n.parse().map(Ctx::Of).map_err(|error| format!("`{n}`: {error}; expected a number or `auto`")),
        }
    }
}

/// Layers on another device.
#[derive(Clone, Debug)]
struct LayersOn {
    device: DeviceChoice,
    n_layers: u32,
}

impl FromStr for LayersOn {
    type Err = String;

    fn from_str(text: &str) -> Result<LayersOn, String> {
        let wrong = || format!("`{text}`: expected a device and a number of layers, such as 1=12");
        let (device, n_layers) = text.rsplit_once('=').ok_or_else(wrong)?;
        Ok(LayersOn { device: parse_device(device)?, n_layers: n_layers.trim().parse().map_err(|_| wrong())? })
    }
}

/// Precision of KV cache and activations.
#[derive(Args)]
pub struct PrecisionArgs {
    /// KV cache type: f32, f16 or q8_0.
    #[arg(long, value_name = "TYPE", default_value_t)]
    pub kv_type: KvType,
    /// Do not round activations; slower.
    ///
    /// By default the CPU rounds them to 8 bits where they meet quantised weights, and GPUs run prefill in half
    /// precision.
    #[arg(long)]
    pub exact: bool,
}

/// Sampling and stopping.
#[derive(Args)]
pub struct SamplingArgs {
    /// Maximum number of tokens to generate.
    #[arg(long, short = 'n', default_value_t = 256, value_name = "N")]
    max_tokens: usize,
    /// Sampling temperature; 0 always takes the most likely token.
    #[arg(long, default_value_t = 0.8, value_name = "T")]
    temperature: f32,
    /// Sample from the K most likely tokens; 0 disables.
    #[arg(long, default_value_t = 40, value_name = "K")]
    top_k: u32,
    /// Sample from the most likely tokens whose probabilities add up to P; 1 disables.
    #[arg(long, default_value_t = 0.95, value_name = "P")]
    top_p: f32,
    /// Sample from tokens with at least P times the highest probability; 0 disables.
    #[arg(long, default_value_t = 0.05, value_name = "P")]
    min_p: f32,
    /// Repetition penalty on the last 64 tokens; 1 disables.
    #[arg(long, default_value_t = 1.0, value_name = "X")]
    repeat_penalty: f32,
    /// Subtract X from the logit of every token generated before; 0 disables.
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Subtract X from a token's logit for each time it was generated before; 0 disables.
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Add X to the logit of token ID, such as 15043=-100; repeatable.
    #[arg(long, value_name = "ID=X", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Sampling seed [default: from the clock, printed in the summary].
    #[arg(long)]
    seed: Option<u64>,
    /// Stop at this text; repeatable.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue past end-of-text tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// When the context is full, drop its older half and continue instead of stopping.
    #[arg(long)]
    slide: bool,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    constraint: super::constrain::ConstraintArgs,
}

#[derive(Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Text to continue.
    #[arg(long, short, default_value = "Once upon a time", conflicts_with = "prompt_file")]
    prompt: String,
    /// File with the text to continue; `-` is stdin.
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Token ids to continue, such as 1,5,9; prints token ids and needs no tokenizer.
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with_all = ["prompt", "prompt_file"])]
    prompt_ids: Option<Vec<u32>>,
    /// Recognise control tokens such as <|im_start|> in the prompt; by default they are plain text.
    #[arg(long, conflicts_with = "prompt_ids")]
    parse_special: bool,
    /// Session file: resume from its KV cache if it exists, and write it at the end.
    ///
    /// A prompt that starts with the saved text computes only the rest.
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    /// Tokens computed per GPU submission, 1 to 16 [default: by model and device].
    #[arg(long, value_name = "N")]
    tokens_per_submit: Option<u32>,
    #[command(flatten)]
    several: SeveralArgs,
    #[command(flatten)]
    parallel: ParallelArgs,
    /// With --json, report the log-probability of each token and the N most likely ones.
    #[arg(long, value_name = "N", requires = "json")]
    logprobs: Option<u32>,
    /// Time each kernel and print a table.
    #[arg(long)]
    profile: bool,
    #[command(flatten)]
    tools: ToolArgs,
    /// Print one JSON object at the end instead of text.
    #[arg(long)]
    json: bool,
}

/// Parses a token id and its logit bias.
fn bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || format!("`{text}`: expected a token id and a number, such as 15043=-100");
    let (id, bias) = text.split_once('=').ok_or_else(wrong)?;
    Ok((id.trim().parse().map_err(|_| wrong())?, bias.trim().parse().map_err(|_| wrong())?))
}

/// Tools whose calls are enforced. They are not added to the prompt, which must describe them itself.
#[derive(Args)]
struct ToolArgs {
    /// JSON file with a list of tools the model may call: {"type": "function", "function": {...}}.
    ///
    /// The text is then read as an answer and printed as in `chat`: thinking set apart, each call on a line of its
    /// own.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt_ids")]
    tools: Option<PathBuf>,
    /// Tool call format [default: detected from the chat template or the vocabulary].
    #[arg(long, value_parser = Format::ALL.map(Format::name), value_name = "NAME")]
    tool_format: Option<String>,
    #[command(flatten)]
    calls: super::constrain::CallArgs,
}

impl ToolArgs {
    /// The parser of the answer. Adds the constraint on tool calls to `options`.
    fn reader(
        &self,
        model: &Model,
        prompt: &str,
        options: &mut GenerateOptions,
        drafts: bool,
    ) -> Result<Option<AnswerReader>, Error> {
        let Some(path) = &self.tools else { return Ok(None) };
        let tools = super::read_list(path)?;
        let mut request = ChatRequest { tools, options: options.clone(), ..ChatRequest::new(Vec::new()) };
        let mut chat = ChatModel::of(model, None)?;
        if let Some(format) = self.tool_format.as_deref().and_then(Format::from_name) {
            chat = chat.with_format(format);
        }
        self.calls.enforce(&mut request, &chat, drafts)?;
        let (bound, reader) = chat.continue_text(prompt, &request)?;
        *options = bound;
        Ok(Some(reader))
    }
}

impl GenerateArgs {
    /// The draft model.
    pub fn draft(&mut self) -> Option<&mut PathBuf> {
        self.sampling.speculation.draft.path.as_mut()
    }
}

impl ModelArgs {
    pub fn open(&self) -> Result<Device, Error> {
        self.device.open()
    }

    /// The selected devices, for commands that can use several.
    #[cfg(feature = "serve")]
    ///
    /// # Errors
    /// [`Error::Option`] for an invalid name.
    pub fn devices(&self) -> Result<Vec<DeviceChoice>, Error> {
        self.device.choices()
    }

    /// Opens one of these devices.
    #[cfg(feature = "serve")]
    pub fn open_one(&self, choice: &DeviceChoice) -> Result<Device, Error> {
        self.device.open_one(choice)
    }

    /// Options for loading the model, without layers on further devices.
    pub fn options(&self) -> LoadOptions<'static> {
        LoadOptions {
            context_length: self.ctx.and_then(|ctx| if let Ctx::Of(n) = ctx { Some(n) } else { None }),
            fit_context: matches!(self.ctx, Some(Ctx::Auto)),
            memory_limit: self.memory_limit,
            stream_layers: true,
            stream_rows: self.stream_rows,
            gpu_layers: self.gpu_layers,
            kv_type: self.precision.kv_type,
            exact: self.precision.exact,
            ..LoadOptions::default()
        }
    }

    /// The devices of `--layers-on`, in order.
    #[cfg(feature = "serve")]
    pub fn layers_on(&self) -> impl Iterator<Item = &DeviceChoice> {
        self.layers_on.iter().map(|layers| &layers.device)
    }

    /// Opens the devices of `--layers-on` by `open`. If `device` is not a GPU, the CPU computes all layers, with a
    /// notice.
    pub fn open_layers_on(
        &self,
        device: &Device,
        open: impl Fn(&DeviceChoice) -> Result<Device, Error>,
    ) -> Result<Vec<DeviceLayers>, Error> {
        if device.is_gpu() {
            let opened =
                |layers: &LayersOn| Ok(DeviceLayers { device: open(&layers.device)?, n_layers: layers.n_layers });
            return self.layers_on.iter().map(opened).collect();
        }
        let asked = [("--gpu-layers", self.gpu_layers.is_some()), ("--layers-on", !self.layers_on.is_empty())];
        for (option, _) in asked.into_iter().filter(|(_, is_asked)| *is_asked) {
            eprintln!("notice: there is no GPU for {option}; the CPU computes all layers");
        }
        Ok(Vec::new())
    }

    /// The model with its LoRA adapter, if any.
    #[cfg(feature = "serve")]
    pub fn adapted(&self, model: Model) -> Result<Model, Error> {
        self.lora.added_to(model)
    }

    /// Loads the model with a progress bar, and again after a device loss. `draft`: the draft model of an engine,
    /// loaded with the model.
    pub fn recovery<'a>(
        &'a self,
        path: Option<&'a Path>,
        speculation: &SpeculationArgs,
        draft: Option<&'a DraftArgs>,
    ) -> Recovery<'a, Model> {
        let mtp_tokens = speculation.mtp > 0;
        // The notices of opening were printed the first time.
        let open = move || self.device.choose();
        let load = move |device: &Device| {
            let layers_on = self.open_layers_on(device, |choice| self.device.open_one(choice))?;
            let options = LoadOptions { mtp_tokens, layers_on, ..self.options() };
            let model = load(path, device, options)?;
            if self.stream_rows && model.streaming().is_none_or(|streaming| streaming.tables_bytes == 0) {
                eprintln!("notice: --stream-rows has no effect: the model has no table that can be read by row");
            }
            let model = self.lora.added_to(model)?;
            match draft {
                Some(draft) => draft.load_with(model),
                None => Ok(model),
            }
        };
        Recovery::new(open, load, |notice| eprintln!("notice: {notice}"))
    }
}

/// Loads a model (without a path, the built-in one), with a progress bar on a terminal.
pub fn load(path: Option<&Path>, device: &Device, options: LoadOptions<'_>) -> Result<Model, Error> {
    let loaded = with_loading_bar(|progress| {
        let options = LoadOptions { progress: Some(progress), ..options };
        match path {
            Some(path) => Model::load(device, path, options),
            None => Model::from_file(device, ModelFile::builtin()?, options),
        }
    });
    tell_findings(device);
    if let Ok(model) = &loaded {
        model.devices().for_each(tell_findings);
        if let Some(streaming) = model.streaming() {
            tell_streaming(&streaming);
        }
    }
    loaded
}

/// Reports the weights that are offloaded to disk.
fn tell_streaming(streaming: &Streaming) {
    let &Streaming { n_layers, n_streamed, streamed_bytes, fitting_context, tables_bytes, experts, .. } = streaming;
    let hint = fitting_context.map_or(String::new(), |n| format!("; with --ctx {n} all of it would fit in memory"));
    if tables_bytes > 0 {
        let hint = if n_streamed == 0 { hint.as_str() } else { "" };
        eprintln!(
            "notice: embedding tables of {} are not loaded; each pass reads the rows of its tokens from the file{hint}",
            show_bytes(tables_bytes)
        );
    }
    let bytes = show_bytes(streamed_bytes);
    match experts {
        Some(ExpertCacheStats { n_experts, n_kept, .. }) => eprintln!(
            "notice: {n_kept} of {n_experts} experts fit in memory; others are read from the file when a token selects \
             them, and long passes read all of these, {bytes}{hint}",
        ),
        None if n_streamed > 0 => eprintln!(
            "notice: {} of {n_layers} layers fit in memory; each pass reads the other {n_streamed} from the file, \
             {bytes}{hint}",
            n_layers - n_streamed,
        ),
        None => {}
    }
}

/// Calls `load` with a progress bar for the bytes of weights, shown only on a terminal.
pub fn with_loading_bar<T>(load: impl FnOnce(&mut dyn FnMut(u64, u64)) -> T) -> T {
    let bar = match io::stderr().is_terminal() {
        true => ProgressBar::new(0),
        false => ProgressBar::hidden(),
    };
    if let Ok(style) = ProgressStyle::with_template("loading {bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta}") {
        bar.set_style(style);
    }
    let loaded = load(&mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    loaded
}

impl SamplingArgs {
    /// The options; a missing seed is taken from the clock.
    pub fn options(&self) -> Result<GenerateOptions, Error> {
        Ok(GenerateOptions {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.iter().copied().collect(),
            seed: self.seed.unwrap_or_else(clock_seed),
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            context_policy: if self.slide { ContextPolicy::Slide } else { ContextPolicy::Stop },
            prompt_lookup: self.speculation.prompt_lookup,
            mtp_tokens: self.speculation.mtp,
            constraint: self.constraint.constraint()?,
            ..GenerateOptions::default()
        })
    }
}

pub fn run(path: Option<&Path>, args: &GenerateArgs) -> Result<(), CommandFailure> {
    let mut options = GenerateOptions {
        tokens_per_submit: args.tokens_per_submit,
        logprobs: args.logprobs,
        ..args.sampling.options()?
    };
    options.check()?;
    let prompt = match args.prompt_ids {
        Some(_) => String::new(),
        None => prompt(args)?,
    };
    let encoding = EncodeOptions { add_special: true, parse_special: args.parse_special };
    let draft = &args.sampling.speculation.draft;
    let of_engine = args.parallel.parallel.map(|_| draft);
    let mut recovery = args.model.recovery(path, &args.sampling.speculation, of_engine);
    let model = recovery.load(&args.model.open()?)?;
    if let Some(n_at_once) = args.parallel.parallel {
        return parallel::run(&model, &mut recovery, (n_at_once, draft.n()), (&prompt, encoding), &options, args.json);
    }
    let mut session = model.session()?;
    let mut reader =
        args.tools.reader(session.model(), &prompt, &mut options, args.sampling.speculation.is_asked_for())?;
    let mut draft = draft.load_session(session.model())?;
    let before = counters_of(session.model());
    let prompt_ids = match &args.prompt_ids {
        Some(ids) => ids.clone(),
        None => session.model().encode_with(&prompt, encoding)?,
    };
    if let Some(path) = args.session.as_deref().filter(|path| path.exists()) {
        session.load(path)?;
    }
    if args.several.print(&mut session, &prompt_ids, &options, (args.json, args.prompt_ids.is_some()))? {
        return Ok(());
    }
    let mut generation = session.generate_from(&prompt_ids, &options)?;
    if let Some(draft) = &mut draft {
        draft.draft_for(&mut generation)?;
    }
    if args.profile {
        generation.enable_profile();
    }
    let mut out: Box<dyn Write> = if args.json { Box::new(io::sink()) } else { Box::new(io::stdout().lock()) };
    write!(out, "{prompt}")?;
    out.flush()?;
    let mut answer = AnswerPrinter::new(&mut out);
    let (mut text, mut token_ids, mut logprobs) = (String::new(), Vec::new(), Vec::new());
    let mut ended = each_piece(&mut generation, &mut recovery, |piece| {
        token_ids.push(piece.id);
        logprobs.extend(piece.logprobs);
        text += &piece.text;
        match (&mut reader, &args.prompt_ids) {
            (Some(reader), _) => answer.take(reader.push(piece.id, &piece.text)?),
            (None, Some(_)) => answer.write(format_args!("{}{}", if token_ids.len() > 1 { "," } else { "" }, piece.id)),
            (None, None) => answer.write(format_args!("{}", piece.text)),
        }
    });
    if let Some(reader) = &mut reader
        && !matches!(ended, Err(CommandFailure::StdoutClosed))
    {
        ended = answer.take(reader.finish()).and(ended);
    }
    if !matches!(ended, Err(CommandFailure::StdoutClosed)) {
        // The text before an error is not complete, and must not look so.
        answer.end(ended.is_err())?;
    }
    let read = reader.map(|_| (answer.thought, answer.text, answer.calls));
    drop(out);
    // The counters of a replacement device start at its opening.
    let before = if ended? > 0 { Counters::default() } else { before };
    let model = generation.session().model();
    let device = model.device();
    model.devices().for_each(tell_findings);
    save_pipeline_caches(model.devices());
    let counters = counters_of(model) - before;
    if let Some(path) = &args.session {
        pollster::block_on(generation.session().save(path, ""))?;
    }
    let stop_reason = generation.stop_reason().unwrap_or(StopReason::Cancelled);
    let (prefill, decode) = (generation.prefill(), generation.decode());
    if args.profile {
        print_profile(&generation);
    }
    if args.json {
        let mut all = json!({
            "model": model.name(),
            "device": device.info(),
            "seed": options.seed,
            "prompt_token_ids": prompt_ids,
            "token_ids": token_ids,
            "text": text,
            "logprobs": args.logprobs.map(|_| logprobs),
            "stop_reason": stop_reason,
            "prefill": prefill,
            "decode": decode,
            "speculation": generation.speculation(),
            "memory": generation.session().plan(),
            "streaming": model.streaming(),
            "placement": model.placement()?,
            "counters": counters,
        });
        if let (Some((thinking, answer, calls)), Some(fields)) = (read, all.as_object_mut()) {
            let call = |(at, call): (usize, &ToolCall)| call.to_json(at);
            let calls: Vec<_> = calls.iter().enumerate().map(call).collect();
            fields.extend(
                [("thinking", json!(thinking)), ("answer", json!(answer)), ("tool_calls", json!(calls))]
                    .map(|(key, value)| (key.to_owned(), value)),
            );
        }
        return print_json(&all);
    }
    summary(device, &options, stop_reason, prefill, decode);
    if let Some(streaming) = model.streaming() {
        if streaming.tables_bytes > 0 {
            let Streaming { n_rows_read, reading_rows, .. } = streaming;
            eprintln!("{n_rows_read} embedding rows read in {:.3} s", reading_rows.as_secs_f64());
        }
        if streaming.n_streamed > 0 {
            eprintln!("{}", streamed(&streaming));
        }
    }
    if let Some(summary) = speculation::summary(args.sampling.speculation.is_asked_for(), generation.speculation()) {
        eprintln!("{summary}");
    }
    Ok(())
}

/// Counters of all devices of the model.
fn counters_of(model: &Model) -> Counters {
    model.devices().fold(Counters::default(), |sum, device| sum + device.counters())
}

/// A seed that differs from run to run and is short enough to type again.
fn clock_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| u64::from(since.subsec_nanos()) % 1_000_000)
}

fn prompt(args: &GenerateArgs) -> Result<String, Error> {
    let Some(path) = &args.prompt_file else { return Ok(args.prompt.clone()) };
    if path.as_os_str() == "-" {
        return text_of(path, io::read_to_string(io::stdin()));
    }
    read_text(path)
}

fn summary(device: &Device, options: &GenerateOptions, reason: StopReason, prefill: Stats, decode: Stats) {
    let reason = match reason {
        StopReason::Eos => "the model ended the text",
        StopReason::Complete => "the text is complete",
        StopReason::StopText => "a stop text was reached",
        StopReason::MaxTokens => "--max-tokens was reached",
        StopReason::ContextFull => "the context is full",
        StopReason::Cancelled => "cancelled",
        StopReason::Deadline => "deadline",
    };
    let rate = |name: &str, stats: Stats| format!("{name} {} tokens, {:.1} tokens/s", stats.tokens, stats.rate());
    let seed = if options.temperature > 0.0 { format!("; seed {}", options.seed) } else { String::new() };
    eprintln!("\n{}; {}; {reason}{seed}", rate("prefill", prefill), rate("decode", decode));
    let info = device.info();
    eprintln!("on {} ({}): {}", info.name, info.backend, info.reason);
}

/// Summary of disk offload.
fn streamed(streaming: &Streaming) -> String {
    let Streaming { n_read, reading, .. } = streaming;
    if let Some(experts) = streaming.experts {
        return format!(
            "{:.0} % of {} selected experts were in memory, {} experts read; {n_read} layers read for long passes; \
             {} read in {:.1} s",
            100.0 * experts.hit_rate(),
            experts.n_chosen,
            experts.n_read,
            show_bytes(streaming.read_bytes),
            reading.as_secs_f64(),
        );
    }
    format!(
        "{n_read} layers read in {:.1} s, {:.0} % of it during computation; {:.0} % of the layers' bytes are in memory",
        reading.as_secs_f64(),
        100.0 * streaming.overlap(),
        100.0 * streaming.hit_rate()
    )
}

fn print_profile(generation: &Generation<'_>) {
    let rows = generation.profile();
    let total: Duration = rows.iter().map(|(_, _, time)| *time).sum();
    eprintln!("\n{:<28} {:>8} {:>12} {:>10} {:>7}", "kernel", "calls", "total ms", "us/call", "share");
    for (label, calls, time) in rows {
        let us_per_call = time.as_secs_f64() * 1e6 / calls as f64;
        let share = 100.0 * time.as_secs_f64() / total.as_secs_f64().max(1e-12);
        eprintln!("{label:<28} {calls:>8} {:>12.2} {us_per_call:>10.1} {share:>6.1}%", time.as_secs_f64() * 1e3);
    }
    let plan = generation.session().plan();
    eprintln!(
        "memory: weights {}, cache {}, activations {}",
        show_bytes(plan.weights_bytes),
        show_bytes(plan.cache_bytes),
        show_bytes(plan.activations_bytes)
    );
}
