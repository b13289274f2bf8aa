//! `tilewright run`: continues a prompt.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use tilewright::answer::{AnswerReader, Format, ToolCall};
use tilewright::chat::ChatTemplate;
use tilewright::generate::{ContextPolicy, DeviceLayers, ExpertCacheStats, Generation, Stats, StopReason, Streaming};
use tilewright::kernels::KvType;
use tilewright::load::ModelFile;
use tilewright::tokenizer::EncodeOptions;
use tilewright::tuning::TuneOnLoad;
use tilewright::{
    ChatModel, ChatRequest, Counters, Device, DeviceChoice, Error, GenerateOptions, LoadOptions, Model, Recovery,
};

use super::answer::AnswerPrinter;
use super::attachments::VisionArgs;
use super::lora::LoraArgs;
use super::lost::each_piece;
use super::parallel::{self, ParallelArgs};
use super::several::{Output, SeveralArgs};
use super::speculation::{self, DraftArgs, SpeculationArgs};
use super::{
    CommandFailure, DeviceArgs, check_session, command_line, parse_bytes, parse_device, print_json, progress,
    save_pipeline_caches, show_bytes, tell_findings, text_of, text_or_stdin,
};

#[derive(Args)]
pub struct RunArgs {
    /// Model: GGUF file, folder or hf:OWNER/REPO[:QUANTISATION] [default: the built-in model].
    ///
    /// A folder is one of Hugging Face, with config.json and safetensors.
    pub model: Option<PathBuf>,
    /// The model, as a flag; a word without a flag is then the prompt.
    #[arg(long = "model", short = 'm', value_name = "MODEL")]
    named: Option<PathBuf>,
    /// Text to continue, after the text from a pipe, if any.
    #[arg(value_name = "PROMPT", conflicts_with_all = ["prompt", "prompt_file", "prompt_ids"])]
    pub text: Option<String>,
    #[command(flatten)]
    pub generate: GenerateArgs,
}

impl RunArgs {
    /// Puts `--model` in the place of the model.
    ///
    /// # Errors
    /// A message, if there are two models or prompts.
    pub fn join(&mut self) -> Result<(), String> {
        let GenerateArgs { prompt, prompt_file, prompt_ids, .. } = &self.generate;
        let has_prompt = prompt.is_some() || prompt_file.is_some() || prompt_ids.is_some();
        command_line::join(&mut self.model, self.named.take(), &mut self.text, has_prompt)
    }
}

/// A model and where it runs.
#[derive(Args)]
pub struct ModelArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Context length; 0: the model's; `auto`: what fits [default: up to 4096].
    ///
    /// In tokens. The default is the model's length, at most 4096. `auto` is the longest that fits in memory, where
    /// that is known. More than the model's is reduced to it, with a warning.
    #[arg(long, short, alias = "ctx-size", value_name = "N|auto")]
    ctx: Option<Ctx>,
    /// Memory limit, such as 512M or 2G; what does not fit is read from disk.
    ///
    /// The default is free memory, if known. Offloaded weights are read from the file again in every pass: first rows
    /// of embedding tables (see --stream-rows), then experts or layers. A model that does not fit even so is refused.
    #[arg(long, value_parser = parse_bytes, env = "TILEWRIGHT_MEMORY_LIMIT", value_name = "BYTES")]
    memory_limit: Option<u64>,
    /// Run only the last N layers on the GPU; also -ngl N [default: all].
    ///
    /// The CPU runs the others; 0 is the same as --device cpu. A larger N than the model has means all.
    #[arg(long, alias = "n-gpu-layers", value_parser = gpu_layers, value_name = "N|all")]
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
    tune: TuneOnLoadArgs,
    #[command(flatten)]
    lora: LoraArgs,
    #[command(flatten)]
    pub vision: VisionArgs,
}

/// A context length.
#[derive(Clone, Copy)]
enum Ctx {
    /// The longest that fits.
    Auto,
    /// The model's.
    Whole,
    Of(u32),
}

/// Parses a number of layers, as llama.cpp does.
fn gpu_layers(text: &str) -> Result<u32, String> {
    match text {
        "all" => Ok(u32::MAX),
        n => n.parse().map_err(|_| "expected a number of layers, or `all`".into()),
    }
}

impl FromStr for Ctx {
    type Err = String;

    fn from_str(text: &str) -> Result<Ctx, String> {
        match text {
            "auto" => Ok(Ctx::Auto),
            "0" => Ok(Ctx::Whole),
            n => n.parse().map(Ctx::Of).map_err(|_| "expected a number of tokens, 0 (the model's) or `auto`".into()),
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

/// Measurements when a model is loaded.
#[derive(Args)]
pub struct TuneOnLoadArgs {
    /// Do not measure kernels when a GPU loads the model for the first time.
    ///
    /// That takes up to 3 s, once; the results are saved as those of `tilewright tune`, which measures for longer.
    #[arg(long)]
    no_tune: bool,
}

impl TuneOnLoadArgs {
    /// Where loading measures. For tests, `TILEWRIGHT_TUNE_SOFTWARE` includes software adapters.
    pub fn place(&self) -> TuneOnLoad {
        match std::env::var_os("TILEWRIGHT_TUNE_SOFTWARE") {
            _ if self.no_tune => TuneOnLoad::Never,
            None => TuneOnLoad::Gpus,
            Some(_) => TuneOnLoad::AllAdapters,
        }
    }
}

macro_rules! number_args {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $default:literal, $value:literal, $range:tt;)*) => {
        #[derive(Args)]
        struct NumberArgs {$(
            $(#[$doc])*
            #[arg(long, default_value_t = $default, value_name = $value, allow_negative_numbers = true)]
            $name: $type,
        )*}

        impl NumberArgs {
            fn options(&self) -> GenerateOptions {
                GenerateOptions { $($name: self.$name,)* ..GenerateOptions::default() }
            }
        }
    };
}

tilewright::sampling_numbers! { number_args }

/// Sampling and stopping.
#[derive(Args)]
pub struct SamplingArgs {
    /// Maximum number of tokens to generate; -1: until the context is full.
    #[arg(
        long,
        short = 'n',
        aliases = ["n-predict", "predict"],
        default_value_t = GenerateOptions::default().max_tokens,
        value_parser = max_tokens,
        allow_negative_numbers = true,
        value_name = "N"
    )]
    max_tokens: usize,
    #[command(flatten)]
    numbers: NumberArgs,
    /// Add X to the logit of token ID, such as 15043=-100; repeatable.
    #[arg(long, value_name = "ID=X", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Sampling seed; -1: from the clock, printed in the summary [default: -1].
    #[arg(long, short, value_parser = seed, value_name = "N")]
    seed: Option<u64>,
    /// Stop at this text; repeatable.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Continue past end-of-text tokens.
    #[arg(long)]
    ignore_eos: bool,
    /// When the context is full, drop its older half and continue.
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
    /// Text to continue [default: the text from a pipe, or "Once upon a time"].
    #[arg(long, short, conflicts_with = "prompt_file", value_name = "PROMPT")]
    prompt: Option<String>,
    /// File with the text to continue; `-` is stdin.
    #[arg(long, short = 'f', alias = "file", value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Token ids to continue, such as 1,5,9; prints token ids and needs no tokenizer.
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with_all = ["prompt", "prompt_file"])]
    prompt_ids: Option<Vec<u32>>,
    /// Recognise control tokens such as <|im_start|> in the prompt; by default they are plain text.
    #[arg(long, conflicts_with = "prompt_ids")]
    parse_special: bool,
    /// Print only what the model generates, without the prompt.
    #[arg(long)]
    no_display_prompt: bool,
    /// Session file: resume from it if it exists, and write it at the end.
    ///
    /// It holds the KV cache. A prompt that starts with the saved text computes only the rest.
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

/// Parses a number of tokens. As in llama.cpp, -1 and -2 stand for no limit, except the context's.
fn max_tokens(text: &str) -> Result<usize, String> {
    match text {
        "-1" | "-2" => Ok(usize::MAX),
        n => n.parse().map_err(|_| "expected a number of tokens, or -1".into()),
    }
}

/// Parses a seed. As in llama.cpp, -1 stands for another one each time.
fn seed(text: &str) -> Result<u64, String> {
    match text {
        "-1" => Ok(clock_seed()),
        n => n.parse().map_err(|_| "expected a whole number, 0 or more, or -1".into()),
    }
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
    /// JSON file with a list of tools that the model may call.
    ///
    /// Each is {"type": "function", "function": {...}}. The text is then read as an answer and printed as in `chat`:
    /// thinking set apart, each call on a line of its own.
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
        self.device.open_one(&self.choice())
    }

    /// The selected device; without layers on the GPU, the CPU.
    fn choice(&self) -> DeviceChoice {
        if self.gpu_layers == Some(0) { DeviceChoice::Cpu } else { self.device.choice() }
    }

    /// The selected devices, for commands that can use several.
    #[cfg(feature = "serve")]
    ///
    /// # Errors
    /// [`Error::Option`] for an invalid name.
    pub fn devices(&self) -> Result<Vec<DeviceChoice>, Error> {
        if self.gpu_layers == Some(0) { Ok(vec![DeviceChoice::Cpu]) } else { self.device.choices() }
    }

    /// Opens one of these devices.
    #[cfg(feature = "serve")]
    pub fn open_one(&self, choice: &DeviceChoice) -> Result<Device, Error> {
        self.device.open_one(choice)
    }

    /// Options for loading the model, without layers on further devices.
    pub fn options(&self) -> LoadOptions<'static> {
        LoadOptions {
            context_length: match self.ctx {
                None | Some(Ctx::Auto) => None,
                Some(Ctx::Whole) => Some(WHOLE_CONTEXT),
                Some(Ctx::Of(n)) => Some(n),
            },
            fit_context: matches!(self.ctx, Some(Ctx::Auto)),
            memory_limit: self.memory_limit,
            stream_layers: true,
            stream_rows: self.stream_rows,
            gpu_layers: self.gpu_layers.filter(|&n| n > 0),
            kv_type: self.precision.kv_type,
            exact: self.precision.exact,
            tune: self.tune.place(),
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
        let asked =
            [("--gpu-layers", self.gpu_layers.is_some_and(|n| n > 0)), ("--layers-on", !self.layers_on.is_empty())];
        for (option, _) in asked.into_iter().filter(|(_, is_asked)| *is_asked) {
            notice!("there is no GPU for {option}; the CPU computes all layers");
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
        let mtp = speculation.mtp;
        // The notices of opening were printed the first time.
        let open = move || self.device.choose_one(&self.choice());
        let load = move |device: &Device| {
            let layers_on = self.open_layers_on(device, |choice| self.device.open_one(choice))?;
            let options = LoadOptions { mtp_tokens: mtp > 0, layers_on, ..self.options() };
            let model = load_reduced(path, device, options)?;
            if mtp > 0 && model.config().n_mtp == 0 {
                let found = format!("{mtp}, but {} has no MTP head", model.name());
                let expected = "0; --draft MODEL and --prompt-lookup N work with any model".into();
                return Err(Error::Option { option: "mtp_tokens", expected, found });
            }
            if self.stream_rows && model.streaming().is_none_or(|streaming| streaming.tables_bytes == 0) {
                notice!("--stream-rows has no effect: the model has no table that can be read by row");
            }
            let model = self.vision.added_to(self.lora.added_to(model)?, path)?;
            match draft {
                Some(draft) => draft.load_with(model),
                None => Ok(model),
            }
        };
        Recovery::new(open, load, |text| notice!("{text}"))
    }
}

/// A context length that stands for the model's own, without a warning.
const WHOLE_CONTEXT: u32 = u32::MAX;

/// A context length within the model's limit, with a warning if it is reduced.
pub fn within_limit(asked: u32, limit: u32) -> u32 {
    if asked > limit && asked != WHOLE_CONTEXT {
        warning!("a context of {asked} tokens is more than the model's {limit}, which is used instead");
    }
    asked.min(limit)
}

/// Loads a model (without a path, the built-in one), with a progress bar on a terminal.
pub fn load(path: Option<&Path>, device: &Device, options: LoadOptions<'_>) -> Result<Model, Error> {
    load_with(path, device, |_| options)
}

/// As [`load`]; a context that is longer than the model's is reduced to it, with a warning.
pub fn load_reduced(path: Option<&Path>, device: &Device, options: LoadOptions<'_>) -> Result<Model, Error> {
    load_with(path, device, |limit| LoadOptions {
        context_length: options.context_length.map(|asked| within_limit(asked, limit)),
        ..options
    })
}

/// `options` receives the model's longest context.
fn load_with<'a>(
    path: Option<&Path>,
    device: &Device,
    options: impl FnOnce(u32) -> LoadOptions<'a>,
) -> Result<Model, Error> {
    let start = Instant::now();
    let loaded = with_loading_bar(|progress| {
        let file = match path {
            Some(path) => ModelFile::open(path)?,
            None => ModelFile::builtin()?,
        };
        let options = options(file.header.shape.config().max_seq_len);
        let loaded = Model::from_file(device, file, LoadOptions { progress: Some(progress), ..options });
        match path {
            Some(path) => loaded.map_err(|error| error.in_model_file(path)),
            None => loaded,
        }
    });
    tell_findings(device);
    if let Ok(model) = &loaded {
        let seconds = start.elapsed().as_secs_f64();
        let plan = model.plan();
        debug!(
            "{} loaded in {seconds:.2} s: weights {}, context of {} tokens {}, activations {}",
            model.name(),
            show_bytes(plan.weights_bytes),
            model.context_length(),
            show_bytes(plan.cache_bytes),
            show_bytes(plan.activations_bytes)
        );
        model.devices().for_each(tell_findings);
        if let Some(streaming) = model.streaming() {
            tell_streaming(&streaming);
        }
    }
    loaded
}

/// Reports the weights that are offloaded to disk.
fn tell_streaming(streaming: &Streaming) {
    streaming_lines(streaming).iter().for_each(|line| notice!("{line}"));
}

/// The weights that are offloaded to disk, as sentences.
pub fn streaming_lines(streaming: &Streaming) -> Vec<String> {
    let mut lines = Vec::new();
    let &Streaming { n_layers, n_streamed, streamed_bytes, fitting_context, tables_bytes, experts, .. } = streaming;
    let hint = fitting_context.map_or(String::new(), |n| format!("; with --ctx {n} all of it would fit in memory"));
    if tables_bytes > 0 {
        let hint = if n_streamed == 0 { hint.as_str() } else { "" };
        lines.push(format!(
            "embedding tables of {} are not loaded; each pass reads the rows of its tokens from the file{hint}",
            show_bytes(tables_bytes)
        ));
    }
    let bytes = show_bytes(streamed_bytes);
    match experts {
        Some(ExpertCacheStats { n_experts, n_kept, .. }) => lines.push(format!(
            "{n_kept} of {n_experts} experts fit in memory; others are read from the file when a token selects \
             them, and long passes read all of these, {bytes}{hint}",
        )),
        None if n_streamed > 0 => lines.push(format!(
            "{} of {n_layers} layers fit in memory; each pass reads the other {n_streamed} from the file, \
             {bytes}{hint}",
            n_layers - n_streamed,
        )),
        None => {}
    }
    lines
}

/// Calls `load` with a progress bar for the bytes of weights, shown only on a terminal.
pub fn with_loading_bar<T>(load: impl FnOnce(&mut dyn FnMut(u64, u64)) -> T) -> T {
    let bar = progress::bar(0, "loading {bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
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
            logit_bias: self.logit_bias.iter().copied().collect(),
            seed: Some(self.seed.unwrap_or_else(clock_seed)),
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            context_policy: if self.slide { ContextPolicy::Slide } else { ContextPolicy::Stop },
            prompt_lookup: self.speculation.prompt_lookup,
            mtp_tokens: self.speculation.mtp,
            constraint: self.constraint.constraint()?,
            ..self.numbers.options()
        })
    }
}

/// `text`: the prompt given without a flag.
pub fn run(path: Option<&Path>, text: Option<&str>, args: &GenerateArgs) -> Result<(), CommandFailure> {
    let mut options = GenerateOptions {
        tokens_per_submit: args.tokens_per_submit,
        logprobs: args.logprobs,
        ..args.sampling.options()?
    };
    options.check()?;
    check_session(args.session.as_deref())?;
    let prompt = match args.prompt_ids {
        Some(_) => String::new(),
        None => prompt(args, text)?,
    };
    let encoding = EncodeOptions { add_special: true, parse_special: args.parse_special };
    let draft = &args.sampling.speculation.draft;
    let of_engine = args.parallel.parallel.map(|_| draft);
    let mut recovery = args.model.recovery(path, &args.sampling.speculation, of_engine);
    let model = recovery.load(&args.model.open()?)?;
    if let Some(n_at_once) = args.parallel.parallel {
        let shows = (args.json, !args.no_display_prompt);
        return parallel::run(&model, &mut recovery, (n_at_once, draft.n()), (&prompt, encoding), &options, shows);
    }
    tell_template(&model, args);
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
    let shown_prompt = if args.no_display_prompt { "" } else { &prompt };
    let output = Output { json: args.json, ids: args.prompt_ids.is_some(), prompt: shown_prompt };
    if args.several.print(&mut session, &prompt_ids, &options, &output)? {
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
    let mut answer = AnswerPrinter::new(&mut out);
    answer.write(shown_prompt)?;
    let (mut text, mut token_ids, mut logprobs) = (String::new(), Vec::new(), Vec::new());
    let mut ended = each_piece(&mut generation, &mut recovery, |piece| {
        token_ids.push(piece.id);
        logprobs.extend(piece.logprobs);
        text += &piece.text;
        match (&mut reader, &args.prompt_ids) {
            (Some(reader), _) => answer.take(reader.push(piece.id, &piece.text)?),
            (None, Some(_)) => answer.write(&format!("{}{}", if token_ids.len() > 1 { "," } else { "" }, piece.id)),
            (None, None) => answer.write(&piece.text),
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
    summary(device, &options, stop_reason, prefill, (token_ids.len(), decode));
    if let Some(streaming) = model.streaming() {
        if streaming.tables_bytes > 0 {
            let Streaming { n_rows_read, reading_rows, .. } = streaming;
            summary!("{n_rows_read} embedding rows read in {:.3} s", reading_rows.as_secs_f64());
        }
        if streaming.n_streamed > 0 {
            summary!("{}", streamed(&streaming));
        }
    }
    if let Some(summary) = speculation::summary(args.sampling.speculation.is_asked_for(), generation.speculation()) {
        summary!("{summary}");
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

fn prompt(args: &GenerateArgs, text: Option<&str>) -> Result<String, Error> {
    match (&args.prompt_file, &args.prompt) {
        (Some(path), _) => text_or_stdin(path),
        (None, Some(prompt)) => Ok(prompt.clone()),
        (None, None) => Ok(after_pipe(text)?.unwrap_or_else(|| "Once upon a time".into())),
    }
}

/// The text from a pipe, then `text`; `None` if both are empty.
pub fn after_pipe(text: Option<&str>) -> Result<Option<String>, Error> {
    let mut all = match io::stdin().is_terminal() {
        true => String::new(),
        false => text_of(Path::new("stdin"), io::read_to_string(io::stdin()))?,
    };
    // The newline at the end of a pipe is not part of the text.
    all.truncate(all.strip_suffix('\n').map_or(all.len(), |all| all.strip_suffix('\r').unwrap_or(all).len()));
    let parts = [all.as_str(), text.unwrap_or_default()];
    let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    Ok((!parts.is_empty()).then(|| parts.join("\n")))
}

/// Says that a model is made for conversations, which `run` does not format as such.
fn tell_template(model: &Model, args: &GenerateArgs) {
    let formats = args.parse_special || args.prompt_ids.is_some() || args.json;
    let has_template = |tokenizer| ChatTemplate::for_model(model.chat_source(), tokenizer).is_some();
    if !formats && model.tokenizer().is_ok_and(has_template) {
        notice!("{} is made for conversations: `tilewright chat` uses its chat template", model.name());
    }
}

/// `decode`: the number of generated tokens, and the passes after the first of them.
fn summary(
    device: &Device,
    options: &GenerateOptions,
    reason: StopReason,
    prefill: Stats,
    (n_generated, decode): (usize, Stats),
) {
    let reason = match reason {
        StopReason::Eos => "the model ended the text",
        StopReason::Complete => "the text is complete",
        StopReason::StopText => "a stop text was reached",
        StopReason::MaxTokens => "--max-tokens was reached",
        StopReason::ContextFull => "the context is full",
        StopReason::Cancelled => "cancelled",
        StopReason::Deadline => "deadline",
    };
    let seed =
        if options.temperature > 0.0 { format!("; seed {}", options.seed.unwrap_or_default()) } else { String::new() };
    let (prefill, decode) = (rate_text(prefill.tokens, prefill), rate_text(n_generated, decode));
    summary!("\nprefill {prefill}; decode {decode}; {reason}{seed}");
    let info = device.info();
    summary!("on {} ({}): {}", info.name, info.backend, info.reason);
}

/// A number of tokens, with their rate if there are enough of them for one.
pub fn rate_text(n_tokens: usize, stats: Stats) -> String {
    /// Fewer may take no time: they were computed before they were asked for.
    const ENOUGH: usize = 8;
    let tokens = if n_tokens == 1 { "1 token".into() } else { format!("{n_tokens} tokens") };
    if stats.tokens < ENOUGH { tokens } else { format!("{tokens}, {:.1} tokens/s", stats.rate()) }
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
    say!("\n{:<28} {:>8} {:>12} {:>10} {:>7}", "kernel", "calls", "total ms", "us/call", "share");
    for (label, calls, time) in rows {
        let us_per_call = time.as_secs_f64() * 1e6 / calls as f64;
        let share = 100.0 * time.as_secs_f64() / total.as_secs_f64().max(1e-12);
        say!("{label:<28} {calls:>8} {:>12.2} {us_per_call:>10.1} {share:>6.1}%", time.as_secs_f64() * 1e3);
    }
    let plan = generation.session().plan();
    say!(
        "memory: weights {}, cache {}, activations {}",
        show_bytes(plan.weights_bytes),
        show_bytes(plan.cache_bytes),
        show_bytes(plan.activations_bytes)
    );
}
