//! The server, over real sockets, on the CPU: each endpoint against the library, errors, streams, limits and abuse.

use crate::{common, scripted};

#[path = "serve/abuse.rs"]
mod abuse;
#[path = "serve/anthropic.rs"]
mod anthropic;
#[path = "serve/audio.rs"]
mod audio;
#[path = "serve/bench.rs"]
mod bench;
#[path = "serve/client.rs"]
pub mod client;
#[path = "serve/compatible.rs"]
mod compatible;
#[path = "serve/deploy.rs"]
mod deploy;
#[path = "serve/endpoints.rs"]
mod endpoints;
#[path = "serve/errors.rs"]
mod errors;
#[path = "serve/faults.rs"]
mod faults;
#[path = "serve/guard.rs"]
mod guard;
#[path = "serve/limits.rs"]
mod limits;
#[path = "serve/llama.rs"]
mod llama;
#[path = "serve/ollama.rs"]
mod ollama;
#[path = "serve/pictures.rs"]
mod pictures;
#[path = "serve/program.rs"]
mod program;
#[path = "serve/server.rs"]
pub mod server;
#[path = "serve/streams.rs"]
mod streams;
#[path = "serve/tei.rs"]
mod tei;
#[cfg(feature = "telemetry")]
#[path = "serve/telemetry.rs"]
mod telemetry;
#[path = "serve/templates.rs"]
mod templates;
