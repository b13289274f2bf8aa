//! Ollama's interface, as its command line, client libraries and editors use it.
//!
//! - `options.rs`: fields of both `/api/generate` and `/api/chat`, and Ollama's options.
//! - `answers.rs`: `/api/generate` and `/api/chat`.
//! - `vectors.rs`: `/api/embed` and the older `/api/embeddings`.
//! - `catalog.rs`: `/api/tags`, `/api/ps`, `/api/show`, `/api/version`.
//! - `changes.rs`: `/api/pull`, `/api/copy`, `/api/delete`.

mod answers;
mod catalog;
mod changes;
mod options;
mod vectors;

use std::sync::Arc;

use axum::Router;
use axum::routing::{delete, get, post};
use tilewright::chat::date_time;

pub use answers::{CHAT, GENERATE};
pub use catalog::SHOW;
pub use changes::{COPY, DELETE, PULL};
pub use vectors::{EMBED, EMBEDDINGS};

use super::app::{App, now};
use super::errors::ApiError;
use super::fields::Fields;

/// The version of Ollama with these endpoints: 0.12.11 has log probabilities, 0.13.3 `/v1/responses`, 0.14.0
/// `/v1/messages`. VS Code refuses servers below 0.6.4, other clients below 0.5.
const API_VERSION: &str = "0.14.0";

/// All endpoints under `/api`.
pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/api/generate", post(answers::generate))
        .route("/api/chat", post(answers::chat))
        .route("/api/embed", post(vectors::embed))
        .route("/api/embeddings", post(vectors::embedding))
        .route("/api/tags", get(catalog::tags))
        .route("/api/ps", get(catalog::loaded))
        .route("/api/show", post(catalog::show))
        .route("/api/version", get(catalog::version))
        .route("/api/pull", post(changes::pull))
        .route("/api/copy", post(changes::copy))
        .route("/api/delete", delete(changes::remove))
        .route("/api/create", post(changes::create))
        .route("/api/push", post(changes::push))
        .route("/api/blobs/{name}", post(changes::blob).head(changes::blob))
}

/// The model's name: older clients send `name`.
fn name_of<'a>(fields: Fields<'a>) -> Result<&'a str, ApiError> {
    match fields.text("model")?.filter(|name| !name.is_empty()) {
        Some(name) => Ok(name),
        None => fields.some_text("name").map_err(|_| fields.wrong("model", "a model's name")),
    }
}

/// The current time in Ollama's format.
fn time() -> String {
    time_of(now().as_secs())
}

/// Seconds since 1970 in Ollama's format.
fn time_of(seconds: u64) -> String {
    date_time(i64::try_from(seconds).unwrap_or_default())
}
