//! Models behind HTTP, in the shape of OpenAI's interface and of Ollama's.
//!
//! ```text
//! connection --limits--> guard (host, origin, key) --> endpoint: fields checked, room in the queue, prompt made --> engine
//!                                                                                        client <-- parts <-- answers
//! ```
//! Every request is checked in this order, so that what a stranger sends costs as little as it can. A client that goes away
//! drops its answers, and that cancels them in the engine. Nothing of what requests say is logged.
//!
//! - **Order of checks.** `Host` and `Origin` come before the key, the key before the body. A page whose name
//!   resolves to this machine (DNS rebinding) has that name in `Host`, so a host is `localhost`, an address of this
//!   machine, or an allowed name. All keys are compared, as digests, in constant time.
//! - **Connections** (`connections.rs`) are driven through hyper, because `axum::serve` has no limit on the time of
//!   headers. Only HTTP/1.1 is spoken. At the limit, the connection that has waited longest for its client is closed,
//!   after 200 ms at the least; busy ones are left alone. Bodies share a memory limit, of which the first 64 KiB of
//!   each are exempt.
//! - **Fields** are read one by one (`fields.rs`), so that an error names the field and unknown fields can be
//!   refused. Parsing, templates and tokenizing run on threads, as many at a time as there are processors; grammars
//!   get half of them.
//! - **Back pressure.** Before a prompt is made, the engine is asked for room (`Engine::expect_room`): under
//!   overload, most prompts would be made for nothing.
//! - **Answers** (`answers.rs`, `sse.rs`). The body owns the answer's task: a client that leaves drops the body,
//!   which drops the engine's stream and cancels the sequence. The status waits for the first part, so an early error
//!   has its own status; after `keep_alive` without one, a comment line begins the answer.
//! - **Models** (`models.rs`) are looked up by name; a name never becomes part of a path. Breakers belong to the
//!   model's entry and outlive what is loaded. Static files are those that were there at the start.
//! - **Traces** (`telemetry.rs`) are made where metrics are taken; the engine knows nothing of them.

mod about;
mod answers;
mod app;
mod chat;
mod completions;
mod connections;
mod conversation;
mod embeddings;
mod errors;
mod fields;
mod guard;
mod limits;
mod metrics;
mod models;
mod ollama;
mod openapi;
mod page;
mod responses;
mod routes;
mod sampling;
mod sse;
#[cfg(feature = "telemetry")]
mod telemetry;
#[cfg(not(feature = "telemetry"))]
#[path = "serve/no_telemetry.rs"]
mod telemetry;

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Router;
use tokio::sync::Semaphore;

pub use limits::Limits;
pub use models::{Decoder, KeepOptions, Load, Loaded, ModelSpec};

use crate::error::Error;
use app::App;
use connections::{Connections, Tls};
use guard::Guard;
use metrics::Metrics;
use models::Models;
use page::Page;
use telemetry::Telemetry;

/// Takes a line that is to be told.
pub type Tell = Arc<dyn Fn(&str) + Send + Sync>;

/// What a server is, beside its address and models.
#[derive(Clone, Default)]
pub struct ServerOptions {
    /// What clients may ask for at most.
    pub limits: Limits,
    /// How models are kept.
    pub keep: KeepOptions,
    /// Keys, one of which a request must have. Without any, only an address that no other machine reaches is served.
    pub api_keys: Vec<String>,
    /// Further names of the server's own, beside `localhost` and addresses.
    pub hosts: Vec<String>,
    /// Origins whose pages may use the server, such as `https://example.org`.
    pub origins: Vec<String>,
    /// A folder of static files that is served to anyone who may connect.
    pub page: Option<PathBuf>,
    /// Files with the certificates and the key of TLS, in PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Is told of what goes wrong, and is nothing that a client is told.
    pub tell: Option<Tell>,
    /// Is told of each request: when, what endpoint, its status and its time.
    pub log: Option<Tell>,
    /// The address of an OpenTelemetry collector, such as `http://localhost:4318`, to which a trace of each request is sent by OTLP
    /// over HTTP. Environment variables that OpenTelemetry defines say the rest, such as `OTEL_SERVICE_NAME`.
    #[cfg(feature = "telemetry")]
    pub otlp_endpoint: Option<String>,
}

/// A server that has its address, and takes no connections so far.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
    connections: Connections,
    telemetry: Telemetry,
}

impl Server {
    /// Takes an address, and loads the models that are to be there from the beginning.
    ///
    /// # Errors
    /// [`Error::Option`] for options that do not go together; [`Error::Io`] if the address or a file cannot be had; those of
    /// loading.
    pub fn bind(address: SocketAddr, models: Vec<ModelSpec>, options: ServerOptions) -> Result<Server, Error> {
        #[cfg(feature = "telemetry")]
        let (otlp_endpoint, has_tls) = (options.otlp_endpoint.clone(), options.tls.is_some());
        let ServerOptions { limits, keep, api_keys, hosts, origins, page, tls, tell, log, .. } = options;
        if limits.bodies_bytes < limits.body_bytes {
            let (expected, found) =
                (format!("{} or more, the bytes of one body", limits.body_bytes), limits.bodies_bytes);
            return Err(Error::Option { option: "max_bodies", expected, found: found.to_string() });
        }
        let guard = Guard::new(address, &hosts, &origins, &api_keys, tls.is_some())?;
        let failed = |source| Error::Io { path: address.to_string().into(), source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let tls = tls.map(|(certificates, key)| Tls::open(certificates, key)).transpose()?.map(Arc::new);
        let tell = tell.unwrap_or_else(|| Arc::new(|_: &str| ()));
        #[cfg(feature = "telemetry")]
        let telemetry =
            otlp_endpoint.map(|endpoint| Telemetry::open(&endpoint, has_tls, &tell)).transpose()?.unwrap_or_default();
        #[cfg(not(feature = "telemetry"))]
        let telemetry = Telemetry;
        let models = Models::new(models, keep, limits.batches, tell.clone())?;
        models.preload()?;
        let n_preparing = std::thread::available_parallelism().map_or(2, usize::from).max(2);
        let preparing = Arc::new(Semaphore::new(n_preparing));
        let slow = Arc::new(Semaphore::new(n_preparing / 2));
        let page = page.as_deref().map(Page::open).transpose()?;
        let bodies = Arc::new(Semaphore::new(limits.bodies_bytes.min(Semaphore::MAX_PERMITS)));
        let metrics = Arc::new(Metrics::new(&telemetry));
        let app = Arc::new(App {
            models,
            limits,
            guard,
            metrics,
            page,
            log,
            telemetry: telemetry.clone(),
            preparing,
            slow,
            bodies,
        });
        let router = routes::router(app.clone());
        let connections = Connections {
            limits: app.limits.clone(),
            metrics: app.metrics.clone(),
            tls,
            tell,
            sweep: Arc::new(move || app.models.sweep()),
        };
        Ok(Server { listener, address, router, connections, telemetry })
    }

    /// The address, with the port that was found where none was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves in a runtime of Tokio, until `end` is there and the answers in progress are out, or their time is over.
    ///
    /// # Errors
    /// [`Error::Io`] if the address is lost.
    pub async fn run(self, end: impl Future<Output = ()>) -> Result<(), Error> {
        let Server { listener, address, router, connections, telemetry } = self;
        let lost = |source| Error::Io { path: address.to_string().into(), source };
        let served = connections.run(listener, router, end).await.map_err(lost);
        telemetry.end().await;
        served
    }
}

/// Bytes of a model's files: a file, or those in a folder.
pub fn size_of_files(path: &Path) -> u64 {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |about| if about.is_file() { about.len() } else { 0 });
    match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| size(&entry.path())).sum(),
        Err(_) => size(path),
    }
}
