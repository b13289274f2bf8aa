//! `tilewright serve`: models behind HTTP.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use tilewright::chat::ChatTemplate;
use tilewright::engine::{Engine, EngineOptions};
use tilewright::hub::{Address, Event, Hub};
use tilewright::load::{ModelFile, ModelShape};
use tilewright::{
    Breaker, Device, DeviceChoice, EmbedOptions, Embedder, Error, LoadOptions, Model, Recovery, RerankOptions,
    Reranker, Transcriber, TranscriberOptions,
};
use tilewright_serve::{
    Decoder, KeepOptions, Limits, Loaded, ModelFiles, ModelSpec, Server, ServerOptions, size_of_files,
};

use super::lora::Lora;
use super::model_names::BUILTIN;
use super::run::{self, ModelArgs, with_loading_bar};
use super::speculation::DraftArgs;
use super::{CommandFailure, bytes_above_0, hub, save_pipeline_caches, tell_findings};

const EXAMPLES: &str = "\
Examples:
  tilewright serve model.gguf                          model `model` at http://127.0.0.1:8080/v1
  tilewright serve chat=qwen.gguf embed=hf:sentence-transformers/all-MiniLM-L6-v2
  tilewright serve --template chatml                   the built-in model, as `stories`
  tilewright serve model.gguf --host 0.0.0.0 --api-key-file key --tls-cert cert.pem --tls-key key.pem
  tilewright serve a.gguf b.gguf c.gguf --max-loaded 1 --idle-timeout 300
  tilewright serve model.gguf --device all             spread requests over all GPUs

  curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \\
    -d '{\"model\": \"model\", \"stream\": true, \"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'

Exit codes: 0 clean shutdown, 1 runtime error, 2 invalid command line.";

/// Serve models over HTTP: OpenAI's API under /v1, Ollama's under /api.
///
/// Language models answer chat and completion requests, encoders make embeddings, cross-encoders rerank, speech models
/// transcribe. Listens on localhost by default; --host with another address requires an API key. Web pages can call the
/// server only from origins listed with --cors. Request contents are never logged. SIGINT and SIGTERM drain running
/// requests.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct ServeArgs {
    /// Models to serve, optionally as NAME=MODEL (default name: the file's) [default: the built-in model].
    ///
    /// Each is a GGUF file, a Hugging Face folder, or an address hf:OWNER/REPO[:QUANTISATION].
    #[arg(value_name = "[NAME=]MODEL")]
    models: Vec<String>,
    /// The same, as a flag; repeatable.
    #[arg(long = "model", short = 'm', value_name = "[NAME=]MODEL")]
    named: Vec<String>,
    /// Address to listen on, or a name of one, such as localhost.
    #[arg(long, default_value = "127.0.0.1", env = "TILEWRIGHT_HOST", value_name = "ADDRESS")]
    host: String,
    /// Port to listen on; 0 picks a free one.
    #[arg(long, default_value_t = 8080, env = "TILEWRIGHT_PORT", value_name = "PORT")]
    port: u16,
    /// API key that requests must send as `Authorization: Bearer KEY`; repeatable.
    ///
    /// Other users of this machine can see command lines: prefer the environment variable or --api-key-file.
    #[arg(long, env = "TILEWRIGHT_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Vec<String>,
    /// File with API keys, one per line; read again when it changes, and at SIGHUP; repeatable.
    #[arg(long, value_name = "FILE")]
    api_key_file: Vec<PathBuf>,
    /// Allow requests without an API key from other machines; for private networks.
    #[arg(long, conflicts_with_all = ["api_key", "api_key_file"])]
    no_api_key: bool,
    /// Additional server name to accept in the `Host` header: a name, *.example.org, or *; repeatable.
    #[arg(long, value_name = "NAME")]
    allow_host: Vec<String>,
    /// Origin whose web pages may call the server: https://example.org, http://localhost:*, or *; repeatable.
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<String>,
    /// TLS certificate chain, in PEM.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the TLS certificate, in PEM.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Folder of static files to serve without authentication [default: the demo page, if the build includes it].
    #[arg(long, value_name = "DIR")]
    page: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    limits: LimitArgs,
    /// Serve a LoRA adapter as model MODEL:NAME, scaled by SCALE [default: 1]; repeatable.
    ///
    /// MODEL can be left out if the server has one model.
    #[arg(long, value_name = "[MODEL:]NAME=FILE[:SCALE]")]
    lora_adapter: Vec<ServedAdapter>,
    #[command(flatten)]
    draft: DraftArgs,
    /// Built-in chat template for models whose files have none.
    #[arg(long, value_parser = ChatTemplate::KNOWN, value_name = "NAME")]
    template: Option<String>,
    /// Chat template variable for requests without `chat_template_kwargs`, such as enable_thinking=false; repeatable.
    #[arg(long, value_name = "NAME=VALUE", value_parser = super::chat::parse_variable)]
    template_var: Vec<(String, serde_json::Value)>,
    /// Ignore unknown and unsupported fields of requests with a warning, instead of refusing them.
    ///
    /// Each field is reported once on stderr; the header `x-tilewright-ignored` of an answer lists its ignored fields.
    #[arg(long)]
    lenient: bool,
    /// Shut down when stdin closes, as it does when the parent process ends.
    #[arg(long)]
    end_with_stdin: bool,
    /// Log each request to stderr as a JSON line: id, path, model, status, tokens, times.
    #[arg(long)]
    log_requests: bool,
    /// OpenTelemetry collector for request traces, by OTLP over HTTP, such as http://localhost:4318.
    ///
    /// Traces hold times and token counts, no text. OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER set the service name and
    /// the sampling.
    #[cfg(feature = "telemetry")]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL")]
    otlp_endpoint: Option<String>,
    #[command(flatten)]
    model: ModelArgs,
}

/// A LoRA adapter, and the name under which requests choose it.
#[derive(Clone, Debug, PartialEq)]
struct ServedAdapter {
    model: Option<String>,
    name: String,
    lora: Lora,
}

impl FromStr for ServedAdapter {
    type Err = String;

    fn from_str(text: &str) -> Result<ServedAdapter, String> {
        let (names, file) = text.split_once('=').ok_or("expected NAME=FILE")?;
        let (model, name) = match names.rsplit_once(':') {
            Some((model, name)) => (Some(model.to_owned()), name),
            None => (None, names),
        };
        if name.is_empty() || model.as_deref() == Some("") {
            return Err("expected a name before `=`".into());
        }
        Ok(ServedAdapter { model, name: name.into(), lora: file.parse()? })
    }
}

/// Batching, caching and loading of models.
#[derive(Args)]
struct EngineArgs {
    /// Maximum batch size: sequences that a model computes at a time.
    #[arg(long, value_name = "N", default_value_t = EngineOptions::default().max_sequences)]
    parallel: u32,
    /// Maximum requests waiting per model; more are refused with status 429 [default: twice --parallel].
    #[arg(long, value_name = "N")]
    queue: Option<usize>,
    /// KV cache size per model, in tokens [default: whatever fits].
    ///
    /// The default is the context length times --parallel, halved until it fits on the GPU. If a given size does not
    /// fit, the server does not start.
    #[arg(long, value_name = "N")]
    cache_tokens: Option<u32>,
    /// Seconds after which a GPU that hangs in a step counts as lost [default: no limit].
    ///
    /// Allow for the first steps, which compile shaders and can take seconds.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    step_limit: Option<u64>,
    /// Make output independent of the requests beside it; slower with 16 and more at once.
    ///
    /// Without it, sums are in another order once 16 sequences run at a time, until 8 are left, so a text may differ where
    /// two tokens are almost equally likely.
    #[arg(long)]
    deterministic: bool,
    /// Disable prefix caching.
    #[arg(long)]
    no_prefix_cache: bool,
    /// Host memory per model for evicted prefix-cache pages, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 0, conflicts_with = "no_prefix_cache")]
    host_cache: u64,
    /// Speculative decoding by prompt lookup: draft up to N (1-7) tokens per step; output is unchanged.
    ///
    /// Applies to requests at temperature 0, without penalties or constraints. Requests can also ask for it with
    /// `prompt_lookup`.
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    prompt_lookup: u32,
    /// Speculative decoding by the model's MTP head: draft up to N (1-7) tokens per step; output is unchanged.
    ///
    /// Applies to the same requests as --prompt-lookup. For Qwen3.5 and Qwen3-Next, whose head takes about as much memory
    /// as a layer.
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "N")]
    mtp: u32,
    /// Let clients pull, name and delete models through Ollama's API: /api/pull, /api/copy, /api/delete.
    ///
    /// A pulled model stays in the cache that all programs share, and is served until the server ends. Models given as
    /// files cannot be deleted.
    #[arg(long)]
    allow_model_changes: bool,
    /// Maximum number of loaded models; the least recently used is unloaded first [default: all].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_loaded: Option<u16>,
    /// Unload a model after this many seconds without requests [default: never].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    idle_timeout: Option<u64>,
    /// Load each model at its first request instead of at startup.
    #[arg(long)]
    lazy: bool,
}

/// Limits on clients.
#[derive(Args)]
struct LimitArgs {
    /// Maximum number of tokens per answer [default: up to the context length].
    #[arg(long, short = 'n', value_name = "N")]
    max_tokens: Option<usize>,
    /// Time limit per answer, in seconds; it is cut off there. Transcripts have none.
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    answer_time: u64,
    /// Maximum size of a request body, such as 8M.
    #[arg(long, default_value = "8M", value_parser = parse_some_bytes, value_name = "BYTES")]
    max_body: u64,
    /// Maximum size of a request with a sound, such as 25M.
    #[arg(long, default_value = "25M", value_parser = parse_some_bytes, value_name = "BYTES")]
    max_audio: u64,
    /// Maximum size of all request bodies together; more get status 429 [default: 8 times the larger of --max-body and
    /// --max-audio].
    ///
    /// The first 64 KiB of each body do not count. Sounds that wait for their transcripts have another limit of this size, and
    /// take 64 KB for each second.
    #[arg(long, value_parser = parse_some_bytes, value_name = "BYTES")]
    max_bodies: Option<u64>,
    /// Maximum open connections; the longest-idle one is closed to admit a new one.
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_connections: u16,
    /// Shutdown grace period, in seconds.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    drain: u64,
}

fn parse_some_bytes(text: &str) -> Result<u64, String> {
    bytes_above_0(text, 1024.0)
}

/// Loads models. Each device is opened once, and again after a loss.
pub struct ModelLoader {
    args: ModelArgs,
    engine: EngineOptions,
    template: Option<String>,
    adapters: Vec<ServedAdapter>,
    draft: Option<DraftArgs>,
    /// Devices of the engines, then those of `--layers-on`.
    places: Vec<SharedDevice>,
    n_engines: usize,
}

/// A device that models share.
struct SharedDevice {
    choice: DeviceChoice,
    device: Mutex<Option<Device>>,
}

impl SharedDevice {
    fn device(&self, args: &ModelArgs) -> Result<Device, Error> {
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        match &*device {
            Some(device) if !device.is_lost() => Ok(device.clone()),
            _ => Ok(device.insert(args.open_one(&self.choice)?).clone()),
        }
    }
}

impl ModelLoader {
    /// Loads models with these options, without LoRA adapters or a draft model.
    pub fn new(args: ModelArgs, engine: EngineOptions, template: Option<String>) -> Result<Arc<ModelLoader>, Error> {
        ModelLoader::with(args, engine, template, (Vec::new(), None))
    }

    fn with(
        args: ModelArgs,
        engine: EngineOptions,
        template: Option<String>,
        (adapters, draft): (Vec<ServedAdapter>, Option<DraftArgs>),
    ) -> Result<Arc<ModelLoader>, Error> {
        let mut choices = args.devices()?;
        let n_engines = choices.len();
        choices.extend(args.layers_on().map(Clone::clone));
        let places = choices.into_iter().map(|choice| SharedDevice { choice, device: Mutex::default() }).collect();
        Ok(Arc::new(ModelLoader { args, engine, template, adapters, draft, places, n_engines }))
    }

    /// The model given as `[NAME=]MODEL`, or the built-in one.
    pub fn spec(self: &Arc<Self>, given: Option<&str>) -> Result<ModelSpec, Error> {
        let Some(given) = given else { return Ok(self.spec_of(BUILTIN.into(), None)) };
        let NamedModel { name, model, path } = NamedModel::read(given)?;
        let spec = self.spec_of(name, Some(path));
        Ok(match model.parse::<Address>() {
            Ok(address) => spec.with_delete(move || hub::delete(&address)),
            Err(_) => spec,
        })
    }

    /// The model that a client asks for by an address, which is downloaded if necessary.
    fn fetch(self: &Arc<Self>, name: &str, progress: &mut dyn FnMut(u64, u64)) -> Result<ModelSpec, Error> {
        let name = name.strip_suffix(":latest").unwrap_or(name);
        let address = hub::address_of(name)?;
        let path = Hub::from_env()?.fetch(&address, &mut |event| match event {
            Event::Progress { done_bytes, total_bytes } => progress(done_bytes, total_bytes),
            Event::Notice(text) => notice!("{text}"),
            Event::Begin { .. } | Event::End => {}
        })?;
        // Refuses what is no model before it is listed.
        ModelFiles::open(&path)?;
        Ok(self.spec_of(name.into(), Some(path)).with_delete(move || hub::delete(&address)))
    }

    fn spec_of(self: &Arc<Self>, name: String, path: Option<PathBuf>) -> ModelSpec {
        let size = path.as_deref().map_or(ModelFile::BUILTIN.len() as u64, size_of_files);
        let breakers: Vec<Arc<Breaker>> = (0..self.n_engines).map(|_| Arc::default()).collect();
        let (loader, of_load, of_spec) = (self.clone(), breakers.clone(), name.clone());
        let of_header = path.clone();
        let open = move || match &of_header {
            Some(path) => ModelFiles::open(path),
            None => Ok(ModelFiles::Text(Box::new(ModelFile::builtin()?))),
        };
        let is_gguf =
            path.as_ref().is_none_or(|path| path.extension().is_some_and(|own| own.eq_ignore_ascii_case("gguf")));
        let adapters = self.adapters_of(&name).map(|adapter| adapter.name.clone()).collect();
        let (digest, modified) = path.as_deref().map_or((None, None), origin_of);
        let spec = ModelSpec::new(name, size, move || loader.load(&of_spec, path.as_deref(), &of_load));
        spec.with_files(is_gguf, open).with_breakers(breakers).with_adapters(adapters).with_origin(digest, modified)
    }

    /// The LoRA adapters of a model.
    fn adapters_of(&self, model: &str) -> impl Iterator<Item = &ServedAdapter> {
        self.adapters.iter().filter(move |adapter| adapter.model.as_deref().is_none_or(|own| own == model))
    }

    /// The devices of engines, which are opened if necessary.
    fn devices(&self) -> Result<Vec<Device>, Error> {
        (0..self.n_engines).map(|i| self.open(i)).collect()
    }

    /// The first device, which is opened if necessary.
    pub fn device(&self) -> Result<Device, Error> {
        self.open(0)
    }

    /// Loads a decoder on every device, another model on the first. An open breaker replaces its device by the CPU.
    fn load(self: &Arc<Self>, name: &str, path: Option<&Path>, breakers: &[Arc<Breaker>]) -> Result<Loaded, Error> {
        let mut models = Vec::new();
        for (i, breaker) in breakers.iter().enumerate() {
            let loader = self.clone();
            let mut recovery =
                Recovery::new(move || loader.open(i), |device| self.load_onto(name, path, device), report)
                    .with_breaker(breaker.clone());
            let loaded = match breaker.admits(Instant::now()) {
                true => recovery.load(&self.open(i)?)?,
                false => recovery.load(&Device::cpu())?,
            };
            match loaded {
                Loading::Other(loaded) => return Ok(loaded),
                Loading::Decoder(model) => models.push((model, self.recovery(name, path, i, breaker))),
            }
        }
        let engine = Engine::spawn_with(models, &self.engine)?;
        // The built-in model continues the text of messages, as in `chat`.
        let template = self.template.as_deref().or(path.is_none().then_some("plain"));
        Ok(Loaded::Decoder(Arc::new(Decoder::of(engine, template)?)))
    }

    /// The `i`-th device.
    fn open(&self, i: usize) -> Result<Device, Error> {
        self.places[i].device(&self.args)
    }

    fn load_onto(&self, name: &str, path: Option<&Path>, device: &Device) -> Result<Loading, Error> {
        let files = path.map(ModelFiles::open).transpose()?;
        let generates = match &files {
            Some(ModelFiles::Text(file)) => matches!(file.header.shape, ModelShape::Decoder(_)),
            Some(ModelFiles::Speech(_)) => false,
            None => true,
        };
        if let (false, Some(adapter)) = (generates, self.adapters_of(name).next()) {
            let (expected, found) = ("a model that generates text".into(), format!("`{name}:{}`", adapter.name));
            return Err(Error::Option { option: "lora_adapter", expected, found });
        }
        let loaded = match (files, path) {
            (Some(files), Some(path)) if !generates => Loading::Other(self.load_other(files, path, device)?),
            _ => Loading::Decoder(self.load_decoder(name, path, device)?),
        };
        tell_findings(device);
        match &loaded {
            Loading::Decoder(model) => save_pipeline_caches(model.devices()),
            Loading::Other(_) => save_pipeline_caches([device]),
        }
        Ok(loaded)
    }

    /// Loads an encoder or a speech model.
    fn load_other(&self, files: ModelFiles, path: &Path, device: &Device) -> Result<Loaded, Error> {
        let LoadOptions { memory_limit, kv_type, .. } = self.args.options();
        match files {
            ModelFiles::Speech(file) => {
                let loaded = Transcriber::from_file(device, *file, TranscriberOptions { kv_type, memory_limit });
                loaded.map(|transcriber| Loaded::Transcriber(transcriber.into())).map_err(|e| e.in_model_file(path))
            }
            ModelFiles::Text(file) if matches!(&file.header.shape, ModelShape::Encoder(shape) if shape.ranks()) => {
                with_loading_bar(|progress: &mut dyn FnMut(u64, u64)| {
                    let options = RerankOptions { progress: Some(progress), memory_limit, ..RerankOptions::default() };
                    Reranker::load(device, path, options)
                })
                .map(Loaded::Reranker)
            }
            ModelFiles::Text(_) => with_loading_bar(|progress: &mut dyn FnMut(u64, u64)| {
                let options = EmbedOptions { progress: Some(progress), memory_limit, ..EmbedOptions::default() };
                Embedder::load(device, path, options)
            })
            .map(Loaded::Embedder),
        }
    }

    fn load_decoder(&self, name: &str, path: Option<&Path>, device: &Device) -> Result<Model, Error> {
        let open = |choice: &DeviceChoice| match self.places.iter().find(|place| place.choice == *choice) {
            Some(place) => place.device(&self.args),
            None => self.args.open_one(choice),
        };
        let layers_on = self.args.open_layers_on(device, open)?;
        let model = self.args.adapted(run::load_reduced(
            path,
            device,
            LoadOptions { layers_on, mtp_tokens: self.engine.mtp_tokens > 0, ..self.args.options() },
        )?)?;
        if self.engine.mtp_tokens > 0 && model.config().n_mtp == 0 {
            warning!("--mtp has no effect on `{name}`, which has no MTP head");
        }
        let adapters = self.adapters_of(name).map(|adapter| Ok((adapter.name.clone(), adapter.lora.load(&model)?)));
        let model = model.with_adapters(adapters.collect::<Result<Vec<_>, Error>>()?)?;
        let model = self.args.vision.added_to(model, path)?;
        match &self.draft {
            Some(draft) => draft.load_with(model),
            None => Ok(model),
        }
    }

    /// Returns a function that makes a model's [`Recovery`] in the engine's thread.
    fn recovery(
        self: &Arc<Self>,
        name: &str,
        path: Option<&Path>,
        i: usize,
        breaker: &Arc<Breaker>,
    ) -> impl FnOnce() -> Recovery<'static, Model> + Send + use<> {
        let (name, path, breaker) = (name.to_owned(), path.map(Path::to_path_buf), breaker.clone());
        let (opens, loads) = (self.clone(), self.clone());
        move || {
            let load = move |device: &Device| loads.load_decoder(&name, path.as_deref(), device);
            Recovery::new(move || opens.open(i), load, report).with_breaker(breaker)
        }
    }
}

/// The SHA-256 digest of a file, if it is in the hub's cache, whose files have theirs as names, and when it was last
/// modified.
fn origin_of(path: &Path) -> (Option<String>, Option<SystemTime>) {
    let is_digest = |name: &String| name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    let stored = path.canonicalize().ok();
    let name = stored.and_then(|stored| Some(stored.file_name()?.to_str()?.to_owned()));
    let modified = std::fs::metadata(path).and_then(|about| about.modified());
    (name.filter(is_digest), modified.ok())
}

/// A loaded model, before its engine starts.
enum Loading {
    /// Runs without an engine.
    Other(Loaded),
    Decoder(Model),
}

fn report(notice: &str) {
    notice!("{notice}");
}

/// `[NAME=]MODEL`.
#[derive(Debug)]
struct NamedModel<'g> {
    name: String,
    model: &'g str,
    /// Where the model is on this machine.
    path: PathBuf,
}

impl NamedModel<'_> {
    fn read(given: &str) -> Result<NamedModel<'_>, Error> {
        let (name, model) = match given.split_once('=') {
            // A path may contain `=` too.
            Some((name, model)) if !name.is_empty() && !name.contains(['/', '\\', ':']) => (Some(name), model),
            _ => (None, given),
        };
        let mut path = PathBuf::from(model);
        hub::localise(&mut path, &mut |text| notice!("{text}"))?;
        let name = match name {
            Some(name) => name.to_owned(),
            None if model.starts_with("hf:") => model.trim_start_matches("hf:").to_owned(),
            // A path such as `.` has a name only when made absolute.
            None => path
                .canonicalize()
                .unwrap_or_else(|_| path.clone())
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into(),
        };
        Ok(NamedModel { name, model, path })
    }
}

pub fn serve(args: ServeArgs) -> Result<(), CommandFailure> {
    let ServeArgs { models, host, port, allow_host, cors, tls_cert, tls_key, page, no_api_key, .. } = args;
    let address = socket_address(&host, port)?;
    let EngineArgs {
        parallel,
        queue,
        cache_tokens,
        deterministic,
        no_prefix_cache,
        host_cache,
        max_loaded,
        idle_timeout,
        lazy,
        allow_model_changes,
        step_limit,
        prompt_lookup,
        mtp,
    } = args.engine;
    let mut draft = args.draft;
    if let Some(path) = &mut draft.path {
        hub::localise(path, &mut |text| notice!("{text}"))?;
    }
    let engine = EngineOptions {
        max_sequences: parallel,
        max_queued: queue.unwrap_or(2 * parallel as usize),
        cache_tokens,
        prefix_cache: !no_prefix_cache,
        deterministic,
        host_cache_bytes: host_cache.saturating_mul(1 << 20),
        step_limit: step_limit.map(Duration::from_secs),
        prompt_lookup,
        draft_tokens: draft.n(),
        mtp_tokens: mtp,
    };
    engine.check()?;
    let adapters = args.lora_adapter.clone();
    let loader = ModelLoader::with(args.model, engine, args.template, (args.lora_adapter, Some(draft)))?;
    let mut specs: Vec<ModelSpec> =
        models.iter().chain(&args.named).map(|given| loader.spec(Some(given))).collect::<Result<_, Error>>()?;
    if specs.is_empty() {
        specs.push(loader.spec(None)?);
    }
    let is_there = |name: &str| specs.iter().any(|spec| spec.name() == name);
    for ServedAdapter { model, name, .. } in adapters {
        let (expected, found) = match model {
            None if specs.len() > 1 => ("MODEL:NAME=FILE, since there are several models", name),
            Some(model) if !is_there(&model) => ("MODEL:NAME=FILE with a model that is served", model),
            _ => continue,
        };
        return Err(
            Error::Option { option: "lora_adapter", expected: expected.into(), found: format!("`{found}`") }.into()
        );
    }
    let names: Vec<String> = specs.iter().map(|spec| format!("`{}`", spec.name())).collect();
    let LimitArgs { max_tokens, answer_time, max_body, max_audio, max_bodies, max_connections, drain } = args.limits;
    let bytes = |given: u64| usize::try_from(given).unwrap_or(usize::MAX);
    let limits = Limits {
        body_bytes: bytes(max_body),
        audio_bytes: bytes(max_audio),
        bodies_bytes: bytes(max_bodies.unwrap_or(max_body.max(max_audio).saturating_mul(8))),
        connections: usize::from(max_connections),
        max_tokens,
        answer_time: Duration::from_secs(answer_time),
        drain: Duration::from_secs(drain),
        ..Limits::default()
    };
    let keep =
        KeepOptions { max_loaded: max_loaded.map(usize::from), idle: idle_timeout.map(Duration::from_secs), lazy };
    let options = ServerOptions {
        limits,
        keep,
        api_keys: args.api_key,
        api_key_files: args.api_key_file,
        is_open: no_api_key,
        hosts: allow_host,
        origins: cors,
        lenient: args.lenient,
        template_variables: args.template_var.into_iter().collect(),
        page,
        tls: tls_cert.zip(tls_key),
        fetch: allow_model_changes.then(|| {
            let loader = loader.clone();
            Arc::new(move |name: &str, progress: &mut dyn FnMut(u64, u64)| loader.fetch(name, progress)) as _
        }),
        report: Some(Arc::new(|line: &str| say!("error: {}", one_line(line)))),
        events: Some(Arc::new(|line: &str| say!("{}", one_line(line)))),
        log: args.log_requests.then(|| Arc::new(|line: &str| say!("{line}")) as _),
        // By the OpenTelemetry specification, an empty variable is the same as none.
        #[cfg(feature = "telemetry")]
        otlp_endpoint: args.otlp_endpoint.filter(|endpoint| !endpoint.is_empty()),
    };
    let has_tls = options.tls.is_some();
    // Models that are loaded later name their devices then.
    let devices = if lazy { loader.devices()? } else { Vec::new() };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|source| Error::Io { path: "threads".into(), source })?;
    let server = Server::bind(address, specs, options)?;
    announce(&server, &names, has_tls);
    for info in devices.iter().map(Device::info) {
        summary!("device: {} ({}): {}", info.name, info.backend, info.reason);
    }
    let reload = server.reload();
    let served = runtime.block_on(async {
        let reloading = tokio::spawn(reload_at_hangup(reload));
        let served = server.run(ending(args.end_with_stdin)).await;
        reloading.abort();
        served
    });
    // Drops answers that outlast the grace period.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(served?)
}

/// A line of output without control characters, which clients could send, of a limited length.
fn one_line(line: &str) -> String {
    /// Characters of a line.
    const MAX: usize = 2000;
    line.chars().take(MAX).map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect()
}

/// The address of a name or number to listen on.
fn socket_address(host: &str, port: u16) -> Result<SocketAddr, Error> {
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    let found = match plain.parse::<IpAddr>() {
        Ok(address) => Ok(Some(SocketAddr::new(address, port))),
        Err(_) => (plain, port).to_socket_addrs().map(|mut all| all.next()),
    };
    found.ok().flatten().ok_or_else(|| Error::Option {
        option: "host",
        expected: "an address of this machine such as 127.0.0.1 or 0.0.0.0, or a name of one".into(),
        found: format!("`{host}`"),
    })
}

/// Says where the server listens, who may use it, and which interfaces it has.
fn announce(server: &Server, names: &[String], has_tls: bool) {
    let (address, scheme) = (server.address(), if has_tls { "https" } else { "http" });
    say!("serving {} at {scheme}://{address}", names.join(", "));
    summary!(
        "APIs: OpenAI and Anthropic at /v1, Ollama at /api, llama.cpp and TEI at /; /health, /metrics, /openapi.json"
    );
    let keys = match server.n_keys() {
        0 => "no API key".into(),
        n => super::counted(n as u64, "API key"),
    };
    let reach = if address.ip().is_loopback() { "this machine only" } else { "any machine that reaches this address" };
    summary!("access: {reach}, {keys}, {}", if has_tls { "TLS" } else { "no TLS" });
    if server.n_keys() == 0 && !address.ip().is_loopback() {
        warning!("anyone who reaches this address can use the server (--no-api-key)");
    }
}

/// Reads key and certificate files again at each SIGHUP, unless that is the end of the terminal.
#[cfg(unix)]
async fn reload_at_hangup(reload: impl Fn()) {
    use tokio::signal::unix::{SignalKind, signal};
    if is_at_terminal() {
        return;
    }
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    while hangup.recv().await.is_some() {
        reload();
    }
}

#[cfg(not(unix))]
async fn reload_at_hangup(_: impl Fn()) {}

/// Whether a terminal controls the program. It then ends at the terminal's SIGHUP.
#[cfg(unix)]
fn is_at_terminal() -> bool {
    std::io::IsTerminal::is_terminal(&std::io::stderr())
}

/// Returns at a signal, or at the end of stdin if `with_stdin`. A second signal ends the program at once.
async fn ending(with_stdin: bool) {
    tokio::select! {
        () = signalled() => {}
        () = input_ended(), if with_stdin => {}
    }
    summary!("shutting down: waiting for running requests; a second signal stops them");
    tokio::spawn(async {
        signalled().await;
        // The exit code of shells for a program that Ctrl-C ended.
        std::process::exit(130);
    });
}

async fn input_ended() {
    let (sender, ended) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        // A read error counts as the end.
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = sender.send(());
    });
    let _ = ended.await;
}

#[cfg(unix)]
async fn signalled() {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(mut interrupt), Ok(mut terminate)) => {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        }
        // Without signal handlers, the server runs until it is killed.
        _ => std::future::pending().await,
    }
}

#[cfg(not(unix))]
async fn signalled() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_name_is_the_given_one_or_that_of_its_file() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/stories.gguf");
        let minilm = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/minilm");
        for (given, name, model) in
            [(file, "stories", file), (&*format!("tale={file}"), "tale", file), (minilm, "minilm", minilm)]
        {
            let read = NamedModel::read(given).unwrap();
            assert_eq!((&*read.name, read.model, read.path.exists()), (name, model, true), "{given}");
        }
        for given in ["tale=none.gguf", "/tale=none.gguf", "=none.gguf"] {
            assert_eq!(NamedModel::read(given).unwrap_err().code(), "io", "{given}");
        }
    }
}
