//! The server's models: loaded on demand, unloaded when idle.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};
use tilewright::chat::ChatTemplate;
use tilewright::embed::{Embedder, Reranker};
use tilewright::engine::{DeviceStats, Engine, EngineOptions, EngineState, EngineStats};
use tilewright::formats::TensorInfo;
use tilewright::generate::Model;
use tilewright::load::{ModelFile, SpeechFile};
use tilewright::tokenizer::Tokenizer;
use tilewright::{Breaker, BreakerStats, ChatModel, Circuit, Counters, Device, Error, LossReason, MemoryPlan, caught};
use tokio::sync::{Mutex as AsyncMutex, Semaphore};

use super::Sinks;
use super::about::{ModelDescription, TRANSCRIPTION};
use super::app::broken;
use super::audio::SharedTranscriber;
use super::errors::{ApiError, hex};

/// What an endpoint needs a model for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    Generate,
    Embed,
    Rerank,
    Transcribe,
    /// Embeddings or reranking.
    Encode,
    /// Any model of texts.
    Any,
}

impl Task {
    /// The capabilities that suit it, as Ollama names them.
    fn capabilities(self) -> &'static [&'static str] {
        match self {
            Task::Generate => &["completion"],
            Task::Embed => &["embedding"],
            Task::Rerank => &["rerank"],
            Task::Transcribe => &[TRANSCRIPTION],
            Task::Encode => &["embedding", "rerank"],
            Task::Any => &["completion", "embedding", "rerank"],
        }
    }

    /// The ability of a suitable model, in words.
    fn ability(self) -> &'static str {
        match self {
            Task::Generate => "generates text",
            Task::Embed => "computes embeddings",
            Task::Rerank => "scores documents",
            Task::Transcribe => "transcribes speech",
            Task::Encode => "is an encoder",
            Task::Any => "reads texts",
        }
    }
}

/// A generative model and its engine.
pub struct Decoder {
    /// Runs the model.
    pub engine: Engine,
    /// Its chat format. Without a template it only supports text completion.
    pub chat: ChatModel,
}

impl Decoder {
    /// Starts an engine for a model. `template` names a built-in one, for a model without its own. If the model's own
    /// template is invalid, conversations are refused; text completion still works.
    ///
    /// # Errors
    /// Errors of [`Engine::spawn`], and a model without a tokenizer.
    pub fn new(model: &Model, options: &EngineOptions, template: Option<&str>) -> Result<Decoder, Error> {
        Decoder::of(Engine::spawn(model, options)?, template)
    }

    /// Uses a running engine, such as one from [`Engine::spawn_with`].
    ///
    /// # Errors
    /// A model without a tokenizer.
    pub fn of(engine: Engine, template: Option<&str>) -> Result<Decoder, Error> {
        let model = engine.model();
        let own = ChatTemplate::for_model(model.chat_source(), model.tokenizer()?);
        let chat = ChatModel::of(model, own.or_else(|| ChatTemplate::known(template?)))?;
        Ok(Decoder { engine, chat })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        self.engine.model()
    }
}

/// A loaded model.
#[derive(Clone)]
pub enum Loaded {
    /// Generates text.
    Decoder(Arc<Decoder>),
    /// Computes embeddings.
    Embedder(Embedder),
    /// Scores documents.
    Reranker(Reranker),
    /// Transcribes speech.
    Transcriber(SharedTranscriber),
}

impl Loaded {
    /// Its kind, for messages.
    fn kind(&self) -> &'static str {
        match self {
            Loaded::Decoder(_) => "a generative model",
            Loaded::Embedder(_) => "an embedding model",
            Loaded::Reranker(_) => "a reranker",
            Loaded::Transcriber(_) => "a speech model",
        }
    }

    /// The embedding model, if it is one.
    pub fn embedder(&self) -> Option<&Embedder> {
        match self {
            Loaded::Embedder(embedder) => Some(embedder),
            _ => None,
        }
    }

    /// The reranker, if it is one.
    pub fn reranker(&self) -> Option<&Reranker> {
        match self {
            Loaded::Reranker(reranker) => Some(reranker),
            _ => None,
        }
    }

    /// The speech model, if it is one.
    pub fn transcriber(&self) -> Option<&SharedTranscriber> {
        match self {
            Loaded::Transcriber(transcriber) => Some(transcriber),
            _ => None,
        }
    }

    /// The devices in use.
    pub fn devices(&self) -> Vec<Device> {
        match self {
            Loaded::Decoder(decoder) => decoder.engine.devices_in_use(),
            Loaded::Embedder(embedder) => vec![embedder.device().clone()],
            Loaded::Reranker(reranker) => vec![reranker.device().clone()],
            Loaded::Transcriber(transcriber) => vec![transcriber.device().clone()],
        }
    }

    /// Maximum number of tokens of a sequence.
    pub fn context_length(&self) -> u32 {
        match self {
            Loaded::Decoder(decoder) => decoder.model().context_length(),
            Loaded::Embedder(embedder) => embedder.max_tokens(),
            Loaded::Reranker(reranker) => reranker.max_tokens(),
            Loaded::Transcriber(transcriber) => transcriber.config().max_seq_len,
        }
    }

    /// What it is, where it runs and what memory it takes, for the operator.
    fn summary(&self) -> String {
        let size = match self {
            Loaded::Decoder(decoder) => {
                let (context, stats) = (self.context_length(), decoder.engine.stats());
                let parallel = decoder.engine.max_sequences();
                let chat = match decoder.chat.template() {
                    Err(_) => ", no chat template (--template NAME chooses one)",
                    Ok(template) if template.name() == "plain" => {
                        ", no chat template: continues the text of messages (--template NAME chooses one)"
                    }
                    Ok(_) => "",
                };
                let cache = stats.cache_tokens;
                format!("context {context}, {parallel} sequences at a time, KV cache of {cache} tokens{chat}")
            }
            Loaded::Embedder(embedder) => {
                format!("embeddings of {} numbers, up to {} tokens", embedder.dims(), self.context_length())
            }
            Loaded::Reranker(_) => format!("reranker, up to {} tokens", self.context_length()),
            Loaded::Transcriber(transcriber) => match transcriber.n_languages() {
                1 => "speech to text in one language".into(),
                n => format!("speech to text in {n} languages"),
            },
        };
        let plan = self.plan().map(|plan| {
            let parts =
                [("weights", plan.weights_bytes), ("cache", plan.cache_bytes), ("working", plan.activations_bytes)];
            let parts = parts.map(|(name, bytes)| format!("{} {name}", show_mib(bytes)));
            format!("; memory {}", parts.join(" + "))
        });
        let devices: Vec<String> = self
            .devices()
            .into_iter()
            .map(|device| {
                let info = device.info();
                format!("{} ({}): {}", info.name, info.backend, info.reason)
            })
            .collect();
        format!("{size}{}; on {}", plan.unwrap_or_default(), devices.join(" and "))
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the model has no usable tokenizer, [`Error::Unsupported`] for a speech model.
    pub fn tokenizer(&self) -> Result<&Tokenizer, Error> {
        match self {
            Loaded::Decoder(decoder) => decoder.model().tokenizer(),
            Loaded::Embedder(embedder) => Ok(embedder.encodings()?.tokenizer()),
            Loaded::Reranker(reranker) => Ok(reranker.encodings()?.tokenizer()),
            Loaded::Transcriber(_) => Err(Error::Unsupported {
                format: "request",
                field: "model".into(),
                found: self.kind().into(),
                supported: "models that read texts".into(),
            }),
        }
    }

    /// Bytes of memory by kind.
    pub fn plan(&self) -> Option<MemoryPlan> {
        match self {
            Loaded::Decoder(decoder) => Some(decoder.engine.plan()),
            Loaded::Embedder(embedder) => embedder.plan().ok(),
            Loaded::Reranker(reranker) => reranker.plan().ok(),
            Loaded::Transcriber(transcriber) => transcriber.plan(),
        }
    }
}

/// A size in MiB.
fn show_mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// A model's files.
pub enum ModelFiles {
    /// Of a generative model or an encoder.
    Text(Box<ModelFile>),
    /// Of a speech model.
    Speech(Box<SpeechFile>),
}

impl ModelFiles {
    /// Opens a file or folder of a model of any kind.
    ///
    /// # Errors
    /// Those of [`ModelFile::open`] and [`SpeechFile::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFiles, Error> {
        match SpeechFile::is_of_speech(&path) {
            true => Ok(ModelFiles::Speech(Box::new(SpeechFile::open(path)?))),
            false => Ok(ModelFiles::Text(Box::new(ModelFile::open(path)?))),
        }
    }

    /// Its tensors.
    fn tensors(&self) -> Vec<&TensorInfo> {
        match self {
            ModelFiles::Text(file) => file.header.tensor_index.tensors().collect(),
            ModelFiles::Speech(file) => file.encoder.tensors().chain(file.decoder.tensors()).collect(),
        }
    }
}

/// Opens a model's files to read their headers.
type Describe = dyn Fn() -> Result<ModelFiles, Error> + Send + Sync;

/// Loads a model.
pub type Load = dyn Fn() -> Result<Loaded, Error> + Send + Sync;

/// Fetches the model of the name that a client asks for, such as from a hub, and reports the bytes done and in total.
/// Blocks. Clients see errors of the hub.
pub type Fetch = dyn Fn(&str, &mut dyn FnMut(u64, u64)) -> Result<ModelSpec, Error> + Send + Sync;

/// Deletes a model's files.
type Delete = dyn Fn() -> Result<(), Error> + Send + Sync;

/// A model that a server offers.
pub struct ModelSpec {
    name: String,
    size_bytes: u64,
    load: Box<Load>,
    /// Reads the headers, at most once.
    describe: Option<Box<Describe>>,
    about: OnceLock<Option<ModelDescription>>,
    is_gguf: bool,
    breakers: Vec<Arc<Breaker>>,
    adapters: Vec<String>,
    digest: Option<String>,
    modified: Option<SystemTime>,
    delete: Option<Box<Delete>>,
}

impl ModelSpec {
    /// A model with the name that requests use in `model`, and the size of its files. `load` runs on a thread of its
    /// own each time the model is loaded.
    pub fn new(
        name: impl Into<String>,
        size_bytes: u64,
        load: impl Fn() -> Result<Loaded, Error> + Send + Sync + 'static,
    ) -> ModelSpec {
        ModelSpec {
            name: name.into(),
            size_bytes,
            load: Box::new(load),
            describe: None,
            about: OnceLock::new(),
            is_gguf: true,
            breakers: vec![Arc::default()],
            adapters: Vec::new(),
            digest: None,
            modified: None,
            delete: None,
        }
    }

    /// Names the model's LoRA adapters ([`Model::with_adapters`]); requests select one with `model:adapter`.
    pub fn with_adapters(self, adapters: Vec<String>) -> ModelSpec {
        ModelSpec { adapters, ..self }
    }

    /// Sets how to open its files, which describe the model to clients before it is loaded.
    pub fn with_files(
        self,
        is_gguf: bool,
        open: impl Fn() -> Result<ModelFiles, Error> + Send + Sync + 'static,
    ) -> ModelSpec {
        ModelSpec { describe: Some(Box::new(open)), is_gguf, ..self }
    }

    /// Sets the breakers that count lost devices: those of the model's [`Recovery`](tilewright::Recovery), one per device.
    /// For an encoder or a speech model the server counts losses with the first one; `load` must ask [`Breaker::admits`].
    pub fn with_breakers(self, breakers: Vec<Arc<Breaker>>) -> ModelSpec {
        ModelSpec { breakers, ..self }
    }

    /// Sets what clients are told of its files: their SHA-256 digest in hexadecimal digits, and when they were last
    /// modified. Without a digest, clients get one of name and size.
    pub fn with_origin(self, digest: Option<String>, modified: Option<SystemTime>) -> ModelSpec {
        ModelSpec { digest, modified, ..self }
    }

    /// Lets clients delete its files, if the server lets them change its models ([`ServerOptions::fetch`]).
    ///
    /// [`ServerOptions::fetch`]: super::ServerOptions::fetch
    pub fn with_delete(self, delete: impl Fn() -> Result<(), Error> + Send + Sync + 'static) -> ModelSpec {
        ModelSpec { delete: Some(Box::new(delete)), ..self }
    }

    /// The name that requests use.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// When models are loaded, and unloaded because they are idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeepOptions {
    /// Maximum number of loaded models; the least recently used one is unloaded. `None`: all.
    pub max_loaded: Option<usize>,
    /// Unloads a model idle for this long; `None`: never.
    pub idle: Option<Duration>,
    /// Loads each model at its first request.
    pub lazy: bool,
}

/// A model, loaded or not.
pub struct ServedModel {
    pub spec: ModelSpec,
    /// Start of the server, in seconds since 1970.
    pub created: u64,
    /// Locked while loading, so that concurrent requests load the model once.
    slot: Arc<AsyncMutex<()>>,
    state: Mutex<ModelState>,
    n_users: AtomicUsize,
    /// Permits for requests to an encoder or a speech model, queued or running.
    pub batches: Arc<Semaphore>,
    /// Permits for those that run.
    pub computing: Arc<Semaphore>,
}

struct ModelState {
    loaded: Option<Loaded>,
    /// Whether a load is running.
    is_loading: bool,
    /// Why the last load failed.
    failure: Option<String>,
    /// How many times it was loaded.
    n_loads: u64,
    used: Instant,
    /// How long to keep it after its last use, if a client set that since it was loaded; an inner `None` is forever.
    keep: Option<Option<Duration>>,
}

impl ServedModel {
    fn state(&self) -> std::sync::MutexGuard<'_, ModelState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The loaded model, if any.
    pub fn loaded(&self) -> Option<Loaded> {
        self.state().loaded.clone()
    }

    /// Loads the model. The caller holds `slot`.
    fn load(&self) -> Result<Loaded, Error> {
        self.state().is_loading = true;
        let loaded = caught("loading a model", || (self.spec.load)()).flatten();
        let mut state = self.state();
        state.is_loading = false;
        state.failure = loaded.as_ref().err().map(ToString::to_string);
        let loaded = loaded?;
        (state.loaded, state.used) = (Some(loaded.clone()), Instant::now());
        state.n_loads += 1;
        Ok(loaded)
    }

    /// Loads the model and announces it. The caller holds `slot`.
    fn load_and_announce(&self, sinks: &Sinks) -> Result<Loaded, Error> {
        let since = Instant::now();
        let loaded = self.load()?;
        let name = self.name();
        let seconds = since.elapsed().as_secs_f64();
        (sinks.events)(&format!("model `{name}`: {}; loaded in {seconds:.1} s", loaded.summary()));
        if let Loaded::Decoder(decoder) = &loaded {
            let unreadable = decoder.chat.template().into_iter().flat_map(ChatTemplate::unreadable);
            unreadable.for_each(|error| (sinks.report)(&format!("{name}: conversations are refused: {error}")));
        }
        Ok(loaded)
    }

    /// `loaded`, `loading`, `failed` or `unloaded`.
    pub fn status(&self) -> &'static str {
        let state = self.state();
        match (&state.loaded, state.is_loading, &state.failure) {
            (Some(_), ..) => "loaded",
            (None, true, _) => "loading",
            (None, false, Some(_)) => "failed",
            (None, false, None) => "unloaded",
        }
    }

    /// A description of the model for clients; `None` if it is not loaded and its files cannot be read. The first call
    /// reads files.
    pub fn about(&self) -> Option<ModelDescription> {
        let of_files =
            || self.spec.describe.as_ref().and_then(|open| open().ok()).map(|files| ModelDescription::of_files(&files));
        let of_files = self.spec.about.get_or_init(of_files).clone();
        match (of_files, self.loaded()) {
            (Some(mut about), Some(loaded)) => {
                about.add_loaded(&loaded);
                Some(about)
            }
            (about, loaded) => about.or_else(|| loaded.as_ref().map(ModelDescription::of_loaded)),
        }
    }

    /// Its tensors in Ollama's format: name, type and shape; none if its files cannot be read. Reads files.
    pub fn tensors(&self) -> Vec<Json> {
        let Some(Ok(files)) = self.spec.describe.as_ref().map(|open| open()) else { return Vec::new() };
        let mut tensors = files.tensors();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        let tensor = |info: &TensorInfo| {
            // GGUF states the fastest dimension first.
            let shape: Vec<u64> = info.shape.iter().rev().copied().collect();
            json!({"name": info.name, "type": info.block_type.to_string(), "shape": shape})
        };
        tensors.into_iter().map(tensor).collect()
    }

    /// The name that requests use.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Its LoRA adapters.
    pub fn adapters(&self) -> &[String] {
        &self.spec.adapters
    }

    /// Whether its files are known to be GGUF.
    pub fn is_gguf(&self) -> bool {
        self.spec.is_gguf
    }

    /// Size of its files.
    pub fn size_bytes(&self) -> u64 {
        self.spec.size_bytes
    }

    /// SHA-256 digest of its files, or else of its name and size, in hexadecimal digits.
    pub fn digest(&self) -> String {
        let derived = || hex(&Sha256::digest(format!("{} {}", self.name(), self.size_bytes())));
        self.spec.digest.clone().unwrap_or_else(derived)
    }

    /// When its files were last modified, or else the start of the server, in seconds since 1970.
    pub fn modified(&self) -> u64 {
        let modified = self.spec.modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        modified.map_or(self.created, |since| since.as_secs())
    }

    /// Whether clients may delete its files.
    pub fn can_delete(&self) -> bool {
        self.spec.delete.is_some()
    }

    /// Deletes its files.
    ///
    /// # Errors
    /// Errors of the deletion.
    pub fn delete(&self) -> Result<(), Error> {
        self.spec.delete.as_ref().map_or(Ok(()), |delete| delete())
    }

    /// Statistics of its engine.
    pub fn stats(&self) -> Option<EngineStats> {
        match self.loaded()? {
            Loaded::Decoder(decoder) => Some(decoder.engine.stats()),
            _ => None,
        }
    }

    /// State of its engine, or of the one that would be loaded.
    pub fn engine_state(&self) -> EngineState {
        match self.loaded() {
            Some(Loaded::Decoder(decoder)) => decoder.engine.state(),
            _ => EngineState::Running,
        }
    }

    /// Statistics of each device of its engine.
    pub fn devices(&self) -> Vec<DeviceStats> {
        match self.loaded() {
            Some(Loaded::Decoder(decoder)) => decoder.engine.devices(),
            _ => Vec::new(),
        }
    }

    /// Bytes of its memory that are on GPUs, at most `total`; none while the CPU replaces its GPU.
    pub fn gpu_bytes(&self, total: u64) -> u64 {
        let on_gpu = |device: &Device| if device.is_gpu() { device.used_bytes() } else { 0 };
        let used = match self.loaded() {
            _ if self.losses().circuit == Circuit::Open => 0,
            Some(Loaded::Decoder(decoder)) => decoder.model().devices().map(on_gpu).sum(),
            Some(loaded) => loaded.devices().iter().map(on_gpu).sum(),
            None => 0,
        };
        used.min(total)
    }

    /// Counters of its devices.
    pub fn counters(&self) -> Option<Counters> {
        Some(match self.loaded()? {
            Loaded::Decoder(decoder) => {
                let devices = decoder.engine.devices();
                devices.iter().fold(Counters::default(), |sum, device| sum + device.counters)
            }
            one => one.devices().first()?.counters(),
        })
    }

    /// Counts of lost GPUs, and whether the CPU replaces one.
    pub fn losses(&self) -> BreakerStats {
        let now = Instant::now();
        let stats = self.spec.breakers.iter().map(|breaker| breaker.stats(now));
        stats.fold(BreakerStats::default(), |sum, stats| sum + stats)
    }

    fn breaker(&self) -> Option<&Breaker> {
        self.spec.breakers.first().map(Arc::as_ref)
    }

    /// Unloads it once no request uses it.
    pub fn unload(&self) {
        self.state().loaded = None;
    }

    /// Sets how long to keep it after its last use, in place of the server's option, until it is unloaded.
    pub fn keep_for(&self, keep: Option<Duration>) {
        self.state().keep = Some(keep);
    }
}

/// A model in use, which is not unloaded as idle.
pub struct Lease {
    pub entry: Arc<ServedModel>,
    pub loaded: Loaded,
    /// The requested LoRA adapter.
    pub adapter: Option<String>,
    /// See [`ModelState::n_loads`].
    load: u64,
    /// How many times this request reloaded it.
    n_reloads: usize,
}

impl Lease {
    fn of(entry: Arc<ServedModel>, adapter: Option<String>, loaded: Loaded) -> Lease {
        entry.n_users.fetch_add(1, Ordering::Relaxed);
        let mut state = entry.state();
        state.used = Instant::now();
        let load = state.n_loads;
        drop(state);
        Lease { entry, loaded, adapter, load, n_reloads: 0 }
    }

    /// Unloads the model after an error that a reload may fix.
    pub fn note(&self, error: &Error) {
        if error.code() == "device_lost" {
            self.entry.unload();
        }
    }

    /// Reloads an encoder or a speech model after an error, if its device was lost and a reload may help. Blocks. A panic
    /// would recur with the same work, so then the next request reloads it.
    ///
    /// # Errors
    /// `error` itself if it is not a lost device; loading errors.
    pub fn reload(&mut self, error: Error) -> Result<(), Error> {
        let Some(reason) = error.loss() else { return Err(error) };
        if reason == LossReason::Panic {
            if let Some(breaker) = self.entry.breaker().filter(|_| self.entry.state().n_loads == self.load) {
                breaker.lost(reason, Instant::now());
            }
            // The panic may have left the device in any state.
            let _ = caught("giving a device up", || self.loaded.devices().iter().for_each(Device::destroy));
            self.entry.unload();
            return Err(error);
        }
        self.n_reloads += 1;
        // By then it runs on the CPU, if `load` asks the breaker.
        let Some(breaker) = self.entry.breaker().filter(|breaker| self.n_reloads <= breaker.options().losses) else {
            self.note(&error);
            return Err(error);
        };
        let loading = self.entry.slot.clone().blocking_lock_owned();
        // Another request may have reloaded it.
        let loaded = match self.entry.loaded() {
            Some(loaded) if self.entry.state().n_loads != self.load => loaded,
            _ => {
                breaker.lost(reason, Instant::now());
                self.entry.unload();
                self.entry.load()?
            }
        };
        drop(loading);
        (self.loaded, self.load) = (loaded, self.entry.state().n_loads);
        Ok(())
    }

    /// The generative model.
    ///
    /// # Errors
    /// If it is another kind of model.
    pub fn decoder(&self) -> Result<Arc<Decoder>, ApiError> {
        match &self.loaded {
            Loaded::Decoder(decoder) => Ok(decoder.clone()),
            _ => Err(self.wrong_kind("cannot generate text")),
        }
    }

    /// The embedding model.
    ///
    /// # Errors
    /// If it is another kind of model.
    pub fn embedder(&self) -> Result<Embedder, ApiError> {
        self.loaded.embedder().cloned().ok_or_else(|| self.wrong_kind("cannot compute embeddings"))
    }

    /// The reranker.
    ///
    /// # Errors
    /// If it is another kind of model.
    pub fn reranker(&self) -> Result<Reranker, ApiError> {
        self.loaded.reranker().cloned().ok_or_else(|| self.wrong_kind("cannot score documents"))
    }

    /// The speech model.
    ///
    /// # Errors
    /// If it is another kind of model.
    pub fn transcriber(&self) -> Result<&SharedTranscriber, ApiError> {
        self.loaded.transcriber().ok_or_else(|| self.wrong_kind("cannot transcribe speech"))
    }

    /// Refuses an encoder's or a speech model's request before its input is prepared, if `most` are queued or running.
    ///
    /// # Errors
    /// `busy`.
    pub fn expect_batch(&self, most: usize) -> Result<(), ApiError> {
        match self.entry.batches.available_permits() {
            0 => Err(Error::Busy { n_waiting: most }.into()),
            _ => Ok(()),
        }
    }

    /// The refusal of a model of another kind.
    pub fn wrong_kind(&self, lacks: &str) -> ApiError {
        let message = format!("{} is {} and {lacks}", self.entry.name(), self.loaded.kind());
        ApiError { message, ..ApiError::invalid("model", None, "") }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let is_last = self.entry.n_users.fetch_sub(1, Ordering::Relaxed) == 1;
        let mut state = self.entry.state();
        state.used = Instant::now();
        if is_last && state.keep == Some(Some(Duration::ZERO)) {
            (state.loaded, state.keep) = (None, None);
        }
    }
}

/// All models of a server.
pub struct Models {
    list: RwLock<ModelList>,
    keep: KeepOptions,
    batches: usize,
    /// Adds models; `None`: clients may not change the models.
    fetch: Option<Arc<Fetch>>,
    /// Permits for fetching models.
    pub fetching: Arc<Semaphore>,
    /// Locked while a model is unloaded to make room for another.
    room: Arc<AsyncMutex<()>>,
    sinks: Sinks,
    /// Whether the models to load at the start are loaded, or have failed.
    is_ready: AtomicBool,
}

/// The models, and further names of them.
#[derive(Default)]
struct ModelList {
    entries: Vec<Arc<ServedModel>>,
    aliases: Vec<(String, Arc<ServedModel>)>,
}

impl ModelList {
    /// The model of a name, which need not have Ollama's `:latest`.
    fn find(&self, name: &str) -> Option<&Arc<ServedModel>> {
        let alias = |name: &str| self.aliases.iter().find(|(alias, _)| alias == name).map(|(_, entry)| entry);
        let named = |name: &str| self.entries.iter().find(|entry| entry.name() == name).or_else(|| alias(name));
        named(name).or_else(|| named(name.strip_suffix(LATEST)?))
    }
}

/// Models that are fetched at a time.
const MAX_FETCHES: usize = 4;

/// What Ollama's clients append to names without a tag.
const LATEST: &str = ":latest";

impl Models {
    pub fn new(
        specs: Vec<ModelSpec>,
        keep: KeepOptions,
        batches: usize,
        fetch: Option<Arc<Fetch>>,
        sinks: Sinks,
    ) -> Result<Models, Error> {
        let (list, room, fetching) = (RwLock::default(), Arc::default(), Arc::new(Semaphore::new(MAX_FETCHES)));
        let is_ready = AtomicBool::new(false);
        let models = Models { list, keep, batches, fetch, fetching, room, sinks, is_ready };
        for spec in specs {
            if models.entries().iter().any(|entry| entry.name() == spec.name) {
                let expected = "names that differ: NAME=MODEL gives a model another one".into();
                return Err(Error::Option { option: "models", expected, found: format!("`{}` twice", spec.name) });
            }
            models.add(spec);
        }
        Ok(models)
    }

    fn list(&self) -> std::sync::RwLockReadGuard<'_, ModelList> {
        self.list.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut ModelList) -> T) -> T {
        change(&mut self.list.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// The models.
    pub fn entries(&self) -> Vec<Arc<ServedModel>> {
        self.list().entries.clone()
    }

    /// The models with their names; after them, those that have further names.
    pub fn listed(&self) -> Vec<(String, Arc<ServedModel>)> {
        let list = self.list();
        let own = list.entries.iter().map(|entry| (entry.name().to_owned(), entry.clone()));
        own.chain(list.aliases.iter().cloned()).collect()
    }

    /// Adds a model, in place of one of the same name unless that has the same known digest. Requests in progress keep
    /// the model that they have.
    pub fn add(&self, spec: ModelSpec) {
        let is_same = |entry: &Arc<ServedModel>| {
            entry.name() == spec.name && spec.digest.is_some() && entry.spec.digest == spec.digest
        };
        if self.entries().iter().any(is_same) {
            return;
        }
        let entry = Arc::new(ServedModel {
            spec,
            created: super::app::now().as_secs(),
            slot: Arc::default(),
            state: Mutex::new(ModelState {
                loaded: None,
                is_loading: false,
                failure: None,
                n_loads: 0,
                used: Instant::now(),
                keep: None,
            }),
            n_users: AtomicUsize::new(0),
            batches: Arc::new(Semaphore::new(self.batches)),
            computing: Arc::new(Semaphore::new(1)),
        });
        self.change(|list| {
            let same = list.entries.iter_mut().find(|other| other.name() == entry.name());
            list.aliases.iter_mut().filter(|(_, of)| of.name() == entry.name()).for_each(|(_, of)| *of = entry.clone());
            list.aliases.retain(|(alias, _)| alias != entry.name());
            match same {
                Some(same) => *same = entry,
                None => list.entries.push(entry),
            }
        });
    }

    /// Gives a model a further name.
    ///
    /// # Errors
    /// `model_not_found`; `name_in_use` if another model has the name.
    pub fn copy(&self, source: &str, name: &str) -> Result<(), ApiError> {
        let name = name.strip_suffix(LATEST).unwrap_or(name);
        let entry = self.find(source)?;
        self.change(|list| match list.find(name) {
            Some(other) if Arc::ptr_eq(other, &entry) => Ok(()),
            Some(_) => {
                let message = format!("destination is {name}, the name of another model: delete that first");
                Err(ApiError::refusal(StatusCode::CONFLICT, "name_in_use", message))
            }
            None => {
                list.aliases.push((name.to_owned(), entry));
                Ok(())
            }
        })
    }

    /// Removes a name. Returns its model if this was its only name.
    ///
    /// # Errors
    /// `model_not_found`; `name_in_use` if the model has further names; `forbidden` if clients may not delete it.
    pub fn remove(&self, name: &str) -> Result<Option<Arc<ServedModel>>, ApiError> {
        let entry = self.find(name)?;
        let is_name = |known: &str| known == name || Some(known) == name.strip_suffix(LATEST);
        self.change(|list| {
            let n_aliases = list.aliases.len();
            if !is_name(entry.name()) {
                list.aliases.retain(|(alias, _)| !is_name(alias));
            }
            if list.aliases.len() < n_aliases {
                return Ok(None);
            }
            if let Some((alias, _)) = list.aliases.iter().find(|(_, of)| Arc::ptr_eq(of, &entry)) {
                let message = format!("{name} is also served as {alias}: delete that name first");
                return Err(ApiError::refusal(StatusCode::CONFLICT, "name_in_use", message));
            }
            if !entry.can_delete() {
                let message = format!("{name} is a file of the server's command line, which clients cannot delete");
                return Err(ApiError::refusal(StatusCode::FORBIDDEN, "forbidden", message));
            }
            list.entries.retain(|other| !Arc::ptr_eq(other, &entry));
            Ok(Some(entry))
        })
    }

    /// The function that fetches models for clients.
    ///
    /// # Errors
    /// `forbidden` if clients may not change the models.
    pub fn fetch(&self) -> Result<&Arc<Fetch>, ApiError> {
        self.fetch.as_ref().ok_or_else(|| {
            let message = "clients may not change the models of this server; `serve --allow-model-changes` lets them";
            ApiError::refusal(StatusCode::FORBIDDEN, "forbidden", message)
        })
    }

    /// How long a model stays loaded if no request uses it; `None`: for ever.
    pub fn time_left(&self, entry: &ServedModel) -> Option<Duration> {
        let state = entry.state();
        let keep = state.keep.unwrap_or(self.keep.idle)?;
        let is_used = entry.n_users.load(Ordering::Relaxed) > 0;
        Some(if is_used { keep } else { keep.saturating_sub(state.used.elapsed()) })
    }

    /// Reports an error that clients do not see.
    pub fn report(&self, line: &str) {
        (self.sinks.report)(line);
    }

    /// Loads models at the start; blocks. Requests for a model wait until it is loaded. A model that fails does not
    /// affect the others, and a request for it tries again.
    ///
    /// # Errors
    /// The last loading error, if no model could be loaded; the others are reported.
    pub fn preload(&self) -> Result<(), Error> {
        let entries = self.entries();
        let n = if self.keep.lazy { 0 } else { self.keep.max_loaded.unwrap_or(usize::MAX).min(entries.len()) };
        let (mut failed, mut n_failed) = (None, 0);
        for entry in &entries[..n] {
            let _loading = entry.slot.blocking_lock();
            if entry.loaded().is_some() {
                continue;
            }
            if let Err(error) = entry.load_and_announce(&self.sinks) {
                n_failed += 1;
                if n_failed < n {
                    (self.sinks.report)(&format!("{}: {error}", entry.name()));
                }
                failed = Some(error);
            }
        }
        self.is_ready.store(true, Ordering::Release);
        failed.filter(|_| n_failed == n).map_or(Ok(()), Err)
    }

    /// Whether the models to load at the start are loaded, or have failed.
    pub fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Acquire)
    }

    /// Finds a model by name. Ollama's clients may append `:latest`.
    ///
    /// # Errors
    /// `model_not_found`.
    pub fn find(&self, name: &str) -> Result<Arc<ServedModel>, ApiError> {
        self.list().find(name).cloned().ok_or_else(|| ApiError::no_model(name, &self.names()))
    }

    /// The names of the models, for a message.
    fn names(&self) -> String {
        const MOST: usize = 20;
        let listed = self.listed();
        let names = listed.iter().take(MOST).map(|(name, _)| format!("`{name}`"));
        let others = listed.len().saturating_sub(MOST);
        let others = (others > 0).then(|| format!("{others} others at /v1/models"));
        names.chain(others).collect::<Vec<_>>().join(", ")
    }

    /// Finds a model by its name, or by `model:adapter` with the adapter.
    ///
    /// # Errors
    /// `model_not_found`.
    pub fn find_adapted(&self, name: &str) -> Result<(Arc<ServedModel>, Option<String>), ApiError> {
        let adapted = |entry: Arc<ServedModel>| {
            let adapter = name.strip_prefix(entry.name())?.strip_prefix(':')?.to_owned();
            entry.adapters().contains(&adapter).then_some((entry, Some(adapter)))
        };
        let own = self.list().find(name).cloned();
        let found = own.map(|entry| (entry, None)).or_else(|| self.entries().into_iter().find_map(adapted));
        found.ok_or_else(|| ApiError::no_model(name, &self.names()))
    }

    /// The name of a request's model: `named`, or without one the only model that can do the task.
    ///
    /// # Errors
    /// `invalid_value` naming the models if there are none or several.
    pub async fn name_for(&self, named: Option<&str>, task: Task) -> Result<String, ApiError> {
        if let Some(name) = named {
            return Ok(name.to_owned());
        }
        let entries = self.entries();
        // Reads the headers of models that are not loaded.
        let able = move || {
            let can = |about: &ModelDescription| task.capabilities().iter().any(|capability| about.can(capability));
            let is_able = |entry: &&Arc<ServedModel>| match entry.about() {
                Some(about) => can(&about),
                None => entry.status() != "failed",
            };
            let able = entries.iter().filter(is_able);
            able.map(|entry| entry.name().to_owned()).collect::<Vec<_>>()
        };
        let mut able = tokio::task::spawn_blocking(able).await.map_err(|_| broken())?;
        match (able.pop(), able.is_empty()) {
            (Some(only), true) => Ok(only),
            (Some(last), false) => {
                able.push(last);
                Err(ApiError::invalid("model", None, &format!("one of `{}`", able.join("`, `"))))
            }
            (None, _) => {
                let message = format!("model is missing, and no served model {}", task.ability());
                Err(ApiError { message, ..ApiError::invalid("model", None, "") })
            }
        }
    }

    /// Loads the model of [`Models::name_for`] if necessary.
    ///
    /// # Errors
    /// Errors of [`Models::name_for`] and [`Models::get`].
    pub async fn get_for(&self, named: Option<&str>, task: Task) -> Result<Lease, ApiError> {
        let name = self.name_for(named, task).await?;
        self.get(&name).await
    }

    /// Finds a model and loads it if necessary.
    ///
    /// # Errors
    /// `model_not_found`; `busy` if all loaded models are in use; loading errors.
    pub async fn get(&self, name: &str) -> Result<Lease, ApiError> {
        let (entry, adapter) = self.find_adapted(name)?;
        if entry.loaded().is_some_and(|loaded| !matches!(loaded, Loaded::Decoder(_)))
            && entry.breaker().is_some_and(|breaker| breaker.is_due(Instant::now()))
        {
            // Reloading tries the GPU again. A decoder's recovery does that itself.
            entry.unload();
        }
        if let Some(loaded) = entry.loaded() {
            return Ok(Lease::of(entry, adapter, loaded));
        }
        let loading = entry.slot.clone().lock_owned().await;
        // Another request may have loaded it.
        if let Some(loaded) = entry.loaded() {
            return Ok(Lease::of(entry, adapter, loaded));
        }
        let room = match self.keep.max_loaded {
            Some(most) => {
                let room = self.room.clone().lock_owned().await;
                self.make_room(most)?;
                Some(room)
            }
            None => None,
        };
        let (of_thread, sinks) = (entry.clone(), self.sinks.clone());
        // Finishes even if the client disconnects, so that the next request need not load again.
        let load = move || {
            let _held = (loading, room);
            of_thread.load_and_announce(&sinks)
        };
        let loaded = tokio::task::spawn_blocking(load).await;
        let loaded = loaded
            .unwrap_or_else(|panic| Err(Error::Gpu { context: "loading a model".into(), message: panic.to_string() }));
        let loaded = loaded.map_err(|error| {
            (self.sinks.report)(&format!("{}: {error}", entry.name()));
            // A broken model file is not the request's fault.
            let status = StatusCode::INTERNAL_SERVER_ERROR;
            ApiError { status, param: None, ..ApiError::from(error) }
        })?;
        Ok(Lease::of(entry, adapter, loaded))
    }

    /// Unloads the least recently used models until another may be loaded.
    fn make_room(&self, most: usize) -> Result<(), ApiError> {
        loop {
            let loaded: Vec<_> = self.entries().into_iter().filter(|entry| entry.loaded().is_some()).collect();
            if loaded.len() < most {
                return Ok(());
            }
            let idle = loaded.into_iter().filter(|entry| entry.n_users.load(Ordering::Relaxed) == 0);
            let Some(oldest) = idle.min_by_key(|entry| entry.state().used) else {
                let message = format!("all {most} models that the server may load are in use");
                return Err(ApiError::refusal(StatusCode::TOO_MANY_REQUESTS, "busy", message));
            };
            oldest.unload();
        }
    }

    /// Unloads models that were idle for too long.
    pub fn sweep(&self) {
        for entry in self.entries() {
            let mut state = entry.state();
            let keep = state.keep.unwrap_or(self.keep.idle);
            let is_idle = entry.n_users.load(Ordering::Relaxed) == 0;
            if is_idle && keep.is_some_and(|keep| state.used.elapsed() >= keep) {
                let was_loaded = state.loaded.take().is_some();
                state.keep = None;
                drop(state);
                if was_loaded {
                    (self.sinks.events)(&format!("model `{}`: unloaded, idle", entry.name()));
                }
            }
        }
    }
}
