//! Changes of the models by clients: `/api/pull`, `/api/copy`, `/api/delete`, if the server lets them. `/api/create`,
//! `/api/push` and `/api/blobs` are refused.

use std::sync::Arc;
use std::time::Duration;

use axum::Json as Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value as Json, json};
use sha2::{Digest, Sha256};
use tilewright::Error;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::super::app::{ApiRequest, App};
use super::super::errors::{ApiError, hex};
use super::super::models::Fetch;
use super::super::schema::{Endpoint, Kind, Neutral, field, neutral, required};
use super::super::sse::{Disconnected, PartSender, Style, streamed};
use super::name_of;
use super::options::EITHER_NAME;

/// Time between two reports of progress.
const PAUSE: Duration = Duration::from_millis(100);

/// `/api/pull`.
pub const PULL: Endpoint = Endpoint::post(
    "/api/pull",
    "Adds a model from the hub, as Ollama's; needs `serve --allow-model-changes`",
    &[
        EITHER_NAME,
        &[
            field("stream", Kind::Flag, "true", "Report progress, one JSON object per line."),
            neutral("insecure", &[Neutral::AnyFlag], "Ignored, as by Ollama."),
            neutral("username", &[Neutral::AnyText], "Ignored, as by Ollama."),
            neutral("password", &[Neutral::AnyText], "Ignored, as by Ollama."),
        ],
    ],
);

/// `/api/copy`.
pub const COPY: Endpoint = Endpoint::post(
    "/api/copy",
    "Gives a model a further name, as Ollama's; needs `serve --allow-model-changes`",
    &[&[
        required("source", Kind::Text, "Name of the model."),
        required("destination", Kind::Text, "Its further name, until the server ends."),
    ]],
);

/// `/api/delete`.
pub const DELETE: Endpoint = Endpoint {
    method: "delete",
    ..Endpoint::post("/api/delete", "Deletes a model, as Ollama's; needs `serve --allow-model-changes`", &[EITHER_NAME])
};

/// Answers `/api/pull`. A client that disconnects does not end the download.
pub async fn pull(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(PULL.fields)?;
    let name = name_of(fields)?.to_owned();
    let streams = fields.checked_flag("stream").unwrap_or(true);
    let fetch = app.models.fetch();
    // Many clients pull a model before they use it.
    let is_done = app.models.find(&name).is_ok_and(|entry| fetch.is_err() || !entry.can_delete());
    let download = if is_done { None } else { Some(Download::begin(&app, fetch?.clone(), name)?) };
    match streams {
        true => {
            let work = move |parts| report(download, parts);
            streamed(Style::Lines, app.limits.keep_alive, work).await
        }
        false => {
            if let Some(download) = download {
                download.end().await?;
            }
            Ok(Body(status("success")).into_response())
        }
    }
}

fn status(status: &str) -> Json {
    json!({"status": status})
}

/// A download on a thread.
struct Download {
    /// Its key in reports: the digest of the model's name.
    digest: String,
    /// Bytes done and in total.
    progress: watch::Receiver<(u64, u64)>,
    work: JoinHandle<Result<(), ApiError>>,
}

impl Download {
    fn begin(app: &Arc<App>, fetch: Arc<Fetch>, name: String) -> Result<Download, ApiError> {
        let turn = app.models.fetching.clone().try_acquire_owned().map_err(|_| {
            let message = "as many models are being pulled as the server pulls at a time; retry later";
            ApiError::refusal(StatusCode::TOO_MANY_REQUESTS, "busy", message)
        })?;
        let digest = hex(&Sha256::digest(&name));
        let (sender, progress) = watch::channel((0, 0));
        let app = app.clone();
        let work = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let mut tell = |done, total| {
                sender.send_replace((done, total));
            };
            let spec = fetch(&name, &mut tell).map_err(|error| fetch_error(&app, &name, error))?;
            app.models.add(spec);
            Ok(())
        });
        Ok(Download { digest, progress, work })
    }

    async fn end(self) -> Result<(), ApiError> {
        self.work.await.unwrap_or_else(|_| {
            let message = "the download failed; the server's log says why";
            Err(ApiError::refusal(StatusCode::INTERNAL_SERVER_ERROR, "internal", message))
        })
    }
}

/// Clients may know what the hub says, but not the server's files.
fn fetch_error(app: &App, name: &str, error: Error) -> ApiError {
    app.models.report(&format!("pull of {name}: {error}"));
    match error.code() {
        "hub" => {
            let refusal = ApiError::refusal(StatusCode::BAD_REQUEST, "hub", error.to_string());
            ApiError { param: Some("model".into()), ..refusal }
        }
        _ => error.into(),
    }
}

/// Streams a download's progress.
async fn report(download: Option<Download>, parts: PartSender) -> Result<PartSender, Disconnected> {
    parts.send(status("pulling manifest")).await?;
    if let Some(mut download) = download {
        while download.progress.changed().await.is_ok() {
            let (done, total) = *download.progress.borrow_and_update();
            let digest = &download.digest;
            let status = format!("pulling {}", digest.get(..12).unwrap_or_default());
            let digest = format!("sha256:{digest}");
            parts.send(json!({"status": status, "digest": digest, "total": total, "completed": done})).await?;
            tokio::time::sleep(PAUSE).await;
        }
        parts.checked(download.end().await).await?;
        parts.send(status("verifying sha256 digest")).await?;
        parts.send(status("writing manifest")).await?;
    }
    parts.send(status("success")).await?;
    Ok(parts)
}

/// Answers `/api/copy`.
pub async fn copy(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<(), ApiError> {
    let fields = asked.fields()?;
    fields.check(COPY.fields)?;
    let (source, destination) = (fields.some_text("source")?, fields.some_text("destination")?);
    app.models.fetch()?;
    if !(1..=256).contains(&destination.len()) || destination.chars().any(char::is_control) {
        return Err(fields.wrong("destination", "a name of 1 to 256 bytes"));
    }
    app.models.copy(source, destination)
}

/// Answers `/api/delete`: deletes the model's files if that was its only name.
pub async fn remove(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<(), ApiError> {
    let fields = asked.fields()?;
    fields.check(DELETE.fields)?;
    let name = name_of(fields)?.to_owned();
    app.models.fetch()?;
    let Some(entry) = app.models.remove(&name)? else { return Ok(()) };
    entry.unload();
    let of_thread = app.clone();
    let delete = move || {
        entry.delete().map_err(|error| {
            of_thread.models.report(&format!("deletion of {name}: {error}"));
            let message = "the model is no longer served, but its files were not deleted; the server's log says why";
            ApiError::refusal(StatusCode::INTERNAL_SERVER_ERROR, error.code(), message)
        })
    };
    app.prepare(delete).await
}

/// `/api/create`.
pub async fn create() -> ApiError {
    refused("/api/create is not supported: serve a file as NAME=FILE, and send system and options with each request")
}

/// `/api/push`.
pub async fn push() -> ApiError {
    refused("/api/push is not supported: this server has no registry")
}

/// `/api/blobs`, which is for `/api/create`.
pub async fn blob() -> ApiError {
    refused("/api/blobs is not supported: models are files of the server, or pulled from a hub")
}

fn refused(message: &str) -> ApiError {
    ApiError::refusal(StatusCode::BAD_REQUEST, "unsupported_endpoint", message)
}
