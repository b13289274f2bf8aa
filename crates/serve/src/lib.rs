//! HTTP server for models, with the APIs of OpenAI, Anthropic, Ollama, llama.cpp and TEI.
//!
//! ```text
//! connection --limits--> guard (host, origin, key) --> endpoint: check fields and queue, make prompt --> engine
//!                                                                          client <-- parts <-- answers
//! ```
//! Requests are checked in this order, so that unauthorised ones cost as little as possible. A client that
//! disconnects drops its answers, which cancels them in the engine. Request contents are never logged.
//!
//! - **Order of checks.** `Host` and `Origin` come before the key, the key before the body. DNS rebinding puts the
//!   attacking page's name into `Host`, so a host must be `localhost`, an address of this machine, or an allowed
//!   name. Keys are compared as digests, in constant time.
//! - **Connections** (`connections.rs`) use hyper directly, because `axum::serve` cannot limit the time for headers.
//!   HTTP/1.1 only. At the limit, the connection idle for longest (at least 200 ms) is closed; busy ones are left
//!   alone. Bodies share a memory limit that exempts the first 64 KiB of each.
//! - **Fields** are rows of a table (`schema.rs`), by which requests are checked and `/openapi.json` is made. They are
//!   read one by one (`fields.rs`), so that an error names the field. Parsing, templates and tokenizing run on as many threads as there are processors; grammars get half of
//!   them.
//! - **Back pressure.** The engine is asked for room (`Engine::expect_room`) before a prompt is made: under overload,
//!   most prompts would be made for nothing.
//! - **Answers** (`answers.rs`, `sse.rs`). The body owns the answer's task: a client that disconnects drops the body,
//!   which drops the engine's stream and cancels the sequence. The status waits for the first part, so an early error
//!   has its own status; after `keep_alive` without a part, a comment line starts the answer.
//! - **Models** (`models.rs`) are looked up by name; a name never becomes part of a path. Breakers belong to the
//!   model's entry and outlive the loaded model. Static files are those present at the start.
//! - **Sounds** (`audio.rs`) come in forms with a limit of their own. A speech model transcribes one at a time, and stops
//!   after a window whose client has disconnected.
//! - **Traces** (`telemetry.rs`) are recorded where metrics are; the engine does not know them.
#![deny(missing_docs)]
// Checking that a server's shared state is `Send` recurses through all types inside a device.
#![recursion_limit = "256"]

mod about;
mod answers;
mod anthropic;
mod app;
mod audio;
pub mod bench;
mod chat;
mod completions;
mod connections;
mod constraints;
mod conversation;
mod embeddings;
mod errors;
mod extras;
mod fields;
mod files;
mod guard;
mod limits;
mod llama;
mod media;
mod metrics;
mod models;
mod ollama;
mod openapi;
mod page;
mod request_log;
mod responses;
mod routes;
mod sampling;
mod schema;
mod sse;
mod stored;
mod tei;
#[cfg(feature = "telemetry")]
mod telemetry;
#[cfg(not(feature = "telemetry"))]
#[path = "no_telemetry.rs"]
mod telemetry;
mod vllm;

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use axum::Router;
use tilewright::Error;
use tokio::sync::Semaphore;

pub use audio::SharedTranscriber;
pub use limits::Limits;
pub use models::{Decoder, Fetch, KeepOptions, Load, Loaded, ModelFiles, ModelSpec};

use app::App;
use connections::{Connections, Tls};
use guard::Guard;
use metrics::Metrics;
use models::Models;
use page::StaticFiles;
use request_log::Refusals;
use stored::StoredResponses;
use telemetry::Telemetry;

/// Receives a line of output.
pub type LogSink = Arc<dyn Fn(&str) + Send + Sync>;

/// A server's options, other than its address and models.
#[derive(Clone, Default)]
pub struct ServerOptions {
    /// Limits on requests.
    pub limits: Limits,
    /// How models are kept.
    pub keep: KeepOptions,
    /// API keys, one of which each request must have. Without keys, only loopback addresses are allowed.
    pub api_keys: Vec<String>,
    /// Files with API keys, one per line. They are read again when they change.
    pub api_key_files: Vec<PathBuf>,
    /// Allows requests without a key from other machines.
    pub is_open: bool,
    /// The server's further host names, beside `localhost` and addresses: `chat.example.org`, `*.example.org`, `*`.
    pub hosts: Vec<String>,
    /// Origins whose pages may use the server: `https://example.org`, `http://localhost:*`, `*`.
    pub origins: Vec<String>,
    /// Whether fields and values without support are ignored with a warning instead of being refused.
    pub lenient: bool,
    /// Variables of chat templates, for requests that do not set them.
    pub template_variables: serde_json::Map<String, serde_json::Value>,
    /// A folder of static files, served without a key. If absent, the demo page, if the build has included it.
    pub page: Option<PathBuf>,
    /// The certificate and key files for TLS, in PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Fetches models for clients, which may then also name and delete models; `None`: they may not change the models.
    pub fetch: Option<Arc<Fetch>>,
    /// Receives errors that clients do not see.
    pub report: Option<LogSink>,
    /// Receives a line for each model that is loaded or unloaded, for readiness, for refused requests, and for what was
    /// ignored in requests.
    pub events: Option<LogSink>,
    /// Receives a JSON line for each request.
    pub log: Option<LogSink>,
    /// The address of an OpenTelemetry collector, such as `http://localhost:4318`. Each request's trace is sent there
    /// by OTLP over HTTP. OpenTelemetry's environment variables, such as `OTEL_SERVICE_NAME`, set the rest.
    #[cfg(feature = "telemetry")]
    pub otlp_endpoint: Option<String>,
}

/// Where the server's lines of output go.
#[derive(Clone)]
struct Sinks {
    /// Errors that clients do not see.
    report: LogSink,
    /// Models that are loaded or unloaded, readiness, refused requests.
    events: LogSink,
}

impl Default for Sinks {
    /// Prints nothing.
    fn default() -> Self {
        Sinks { report: Arc::new(|_| ()), events: Arc::new(|_| ()) }
    }
}

/// A server bound to its address that accepts no connections yet.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
    connections: Connections,
    /// Loads the models. Hides the type of the server's state: that it is `Send` takes the compiler too many steps for
    /// crates with the usual `recursion_limit`.
    preload: Arc<dyn Fn() -> Result<(), Error> + Send + Sync>,
    n_keys: usize,
    events: LogSink,
    telemetry: Telemetry,
}

impl Server {
    /// Binds the address. No model is loaded yet.
    ///
    /// # Errors
    /// [`Error::Option`] for conflicting options; [`Error::Io`] if the address or a file is not available.
    pub fn bind(address: SocketAddr, models: Vec<ModelSpec>, options: ServerOptions) -> Result<Server, Error> {
        #[cfg(feature = "telemetry")]
        let (otlp_endpoint, has_tls) = (options.otlp_endpoint.clone(), options.tls.is_some());
        let silent = Sinks::default();
        let sinks = Sinks {
            report: options.report.clone().unwrap_or(silent.report),
            events: options.events.clone().unwrap_or(silent.events),
        };
        let guard = Guard::new(address, &options)?;
        let ServerOptions { limits, keep, page, tls, fetch, log, .. } = options;
        let (is_lenient, variables) = (options.lenient, options.template_variables);
        let bodies = [(limits.body_bytes, "--max-body"), (limits.audio_bytes, "--max-audio")];
        if let Some((most, flag)) = bodies.into_iter().max().filter(|(most, _)| limits.bodies_bytes < *most) {
            let expected = format!("at least {most}, the limit of one body ({flag})");
            return Err(Error::Option { option: "max_bodies", expected, found: limits.bodies_bytes.to_string() });
        }
        let failed = |source| Error::Io { path: address.to_string().into(), source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let tls = tls.map(|(certificates, key)| Tls::open(certificates, key)).transpose()?.map(Arc::new);
        #[cfg(feature = "telemetry")]
        let telemetry = otlp_endpoint
            .map(|endpoint| Telemetry::open(&endpoint, has_tls, &sinks.report))
            .transpose()?
            .unwrap_or_default();
        #[cfg(not(feature = "telemetry"))]
        let telemetry = Telemetry;
        let models = Models::new(models, keep, limits.batches, fetch, sinks.clone())?;
        let n_preparing = std::thread::available_parallelism().map_or(2, usize::from).max(2);
        let preparing = Arc::new(Semaphore::new(n_preparing));
        let slow = Arc::new(Semaphore::new(n_preparing / 2));
        let page = page.as_deref().map(StaticFiles::open).transpose()?.or_else(StaticFiles::included);
        let of_bodies = || Arc::new(Semaphore::new(limits.bodies_bytes.min(Semaphore::MAX_PERMITS)));
        let (bodies, sounds) = (of_bodies(), of_bodies());
        let metrics = Arc::new(Metrics::new(&telemetry));
        let app = Arc::new(App {
            models,
            responses: StoredResponses::new(limits.stored_bytes),
            events: sinks.events.clone(),
            said: Mutex::default(),
            is_lenient,
            variables,
            limits,
            guard,
            metrics,
            page,
            log,
            telemetry: telemetry.clone(),
            preparing,
            slow,
            bodies,
            sounds,
            refusals: Refusals::new(sinks.events.clone()),
        });
        let router = routes::router(app.clone());
        let events = sinks.events.clone();
        let (of_sweep, of_reload) = (app.clone(), tls.clone());
        let connections = Connections {
            limits: app.limits.clone(),
            metrics: app.metrics.clone(),
            tls,
            sweep: Arc::new(move || {
                of_sweep.models.sweep();
                of_sweep.refusals.flush();
                of_sweep.guard.refresh(&sinks);
                if let Some(tls) = &of_reload {
                    tls.refresh(&sinks);
                }
            }),
        };
        let n_keys = app.guard.n_keys();
        let preload = Arc::new(move || app.models.preload());
        Ok(Server { listener, address, router, connections, preload, n_keys, events, telemetry })
    }

    /// The bound address, with the port that the system chose if 0 was requested.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Number of API keys.
    pub fn n_keys(&self) -> usize {
        self.n_keys
    }

    /// A function that reads changed key and certificate files again at once, as [`Server::run`] does every second.
    pub fn reload(&self) -> impl Fn() + Send + Sync + 'static {
        let sweep = self.connections.sweep.clone();
        move || sweep()
    }

    /// Loads the models that [`Server::run`] would load. Blocks.
    ///
    /// # Errors
    /// A loading error, if no model can be loaded.
    pub fn load(&self) -> Result<(), Error> {
        (self.preload)()
    }

    /// Serves on a Tokio runtime until `end` resolves, and then until running answers finish or `drain` has passed.
    /// Meanwhile loads the models, unless [`KeepOptions::lazy`]: until then `/health` has status 503, and requests for a
    /// model wait. Key and certificate files are read again when they change.
    ///
    /// # Errors
    /// [`Error::Io`] if the listener fails; a loading error, if no model can be loaded.
    pub async fn run(self, end: impl Future<Output = ()>) -> Result<(), Error> {
        let Server { listener, address, router, connections, preload, events, telemetry, .. } = self;
        let lost = |source| Error::Io { path: address.to_string().into(), source };
        let loading = tokio::task::spawn_blocking(move || preload());
        let mut failure = None;
        let end = async {
            tokio::pin!(end);
            tokio::select! {
                () = &mut end => {}
                loaded = loading => match loaded {
                    Ok(Err(error)) => failure = Some(error),
                    _ => {
                        events("ready");
                        end.await;
                    }
                }
            }
        };
        let served = connections.run(listener, router, end).await.map_err(lost);
        telemetry.end().await;
        failure.map_or(served, Err)
    }
}

/// Size of a model file, or of all files in a folder.
pub fn size_of_files(path: &Path) -> u64 {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |about| if about.is_file() { about.len() } else { 0 });
    match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| size(&entry.path())).sum(),
        Err(_) => size(path),
    }
}
