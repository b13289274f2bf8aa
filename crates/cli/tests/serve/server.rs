//! Test servers: in threads of this process, on the CPU.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use tilewright::engine::EngineOptions;
use tilewright::{Device, EmbedOptions, Embedder, Error, Model, RerankOptions, Reranker};
use tilewright_serve::{Decoder, Loaded, ModelSpec, Server, ServerOptions};
use tokio::sync::oneshot;

use super::common;

/// A server that is shut down on drop.
pub struct Running {
    pub address: SocketAddr,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    /// Starts the shutdown. The thread ends with it.
    pub fn end(&mut self) -> JoinHandle<()> {
        self.end.take().unwrap().send(()).unwrap();
        self.thread.take().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            let _ = end.send(());
        }
    }
}

/// Starts a server whose models are loaded.
pub fn start(models: Vec<ModelSpec>, options: ServerOptions) -> Running {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), models, options).unwrap();
    server.load().unwrap();
    run(server)
}

/// Starts a server that loads its models meanwhile.
pub fn start_loading(models: Vec<ModelSpec>, options: ServerOptions) -> Running {
    run(Server::bind("127.0.0.1:0".parse().unwrap(), models, options).unwrap())
}

fn run(server: Server) -> Running {
    let address = server.address();
    let (end, ended) = oneshot::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(server.run(async { drop(ended.await) })).unwrap();
        runtime.shutdown_background();
    });
    Running { address, end: Some(end), thread: Some(thread) }
}

/// The built-in model with an added chat template.
pub fn story(name: &str, options: EngineOptions) -> ModelSpec {
    ModelSpec::new(name, 1 << 20, move || load_story(&options, Some("chatml")))
}

pub fn load_story(options: &EngineOptions, template: Option<&str>) -> Result<Loaded, Error> {
    let model = Model::builtin(&Device::cpu())?;
    Ok(Loaded::Decoder(Arc::new(Decoder::new(&model, options, template)?)))
}

pub fn encoder_path(name: &str) -> PathBuf {
    common::data(&["encoders"]).expect("committed test data").join(format!("encoders/{name}"))
}

pub fn embedder() -> Result<Embedder, Error> {
    Embedder::load(&Device::cpu(), encoder_path("nomic"), EmbedOptions::default())
}

pub fn reranker() -> Result<Reranker, Error> {
    Reranker::load(&Device::cpu(), encoder_path("bert-reranker"), RerankOptions::default())
}

/// A server shared by tests that do not change it: models `story`, `plain` (without a template), `nomic` and `bert`.
pub fn shared() -> SocketAddr {
    static SERVER: OnceLock<Running> = OnceLock::new();
    let server = SERVER.get_or_init(|| {
        let options = EngineOptions { max_sequences: 4, max_queued: 64, ..EngineOptions::default() };
        let plain = options.clone();
        let models = vec![
            story("story", options),
            ModelSpec::new("plain", 1 << 20, move || load_story(&plain, None)),
            ModelSpec::new("nomic", 1 << 20, || embedder().map(Loaded::Embedder)),
            ModelSpec::new("bert", 1 << 20, || reranker().map(Loaded::Reranker)),
        ];
        start(models, ServerOptions::default())
    });
    server.address
}

/// A separate server with only the model `story`.
pub fn own(change: impl FnOnce(&mut EngineOptions, &mut ServerOptions)) -> Running {
    let mut engine = EngineOptions { max_sequences: 2, max_queued: 16, ..EngineOptions::default() };
    let mut options = ServerOptions::default();
    change(&mut engine, &mut options);
    start(vec![story("story", engine)], options)
}
