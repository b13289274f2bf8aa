//! Queries about models: `/api/tags`, `/api/ps`, `/api/show` and `/api/version`.

use std::sync::Arc;
use std::time::Duration;

use axum::Json as Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value as Json, json};

use super::super::app::{ApiRequest, App, now};
use super::super::errors::ApiError;
use super::super::models::{Loaded, ServedModel};
use super::super::schema::{Endpoint, Kind, Neutral, field, neutral};
use super::options::EITHER_NAME;
use super::{API_VERSION, name_of, time_of};

/// When a permanently loaded model expires: in a hundred years.
const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// The beginning of the user agent of VS Code's Copilot.
const COPILOT: &str = "GitHubCopilotChat/";

/// `/api/show`.
pub const SHOW: Endpoint = Endpoint::post(
    "/api/show",
    "Shows a model, as Ollama's",
    &[
        EITHER_NAME,
        &[
            field("verbose", Kind::Flag, "false", "List the tensors."),
            field("system", Kind::Text, "\"\"", "The system message to show."),
            neutral("options", &[Neutral::AnyObject], "Ignored."),
            neutral("template", &[Neutral::AnyText], "Ignored, as by Ollama."),
        ],
    ],
);

fn format_of(entry: &ServedModel) -> &'static str {
    if entry.is_gguf() { "gguf" } else { "safetensors" }
}

fn model_json(name: &str, entry: &ServedModel) -> Json {
    let about = entry.about();
    json!({
        "name": name,
        "model": name,
        "modified_at": time_of(entry.modified()),
        "size": entry.size_bytes(),
        "digest": entry.digest(),
        "details": about.as_ref().map_or_else(|| json!({}), |about| about.details(format_of(entry))),
        "capabilities": about.map(|about| about.capabilities()).unwrap_or_default(),
    })
}

/// `/api/tags`.
pub async fn tags(State(app): State<Arc<App>>) -> Result<Body<Json>, ApiError> {
    let of = app.clone();
    let describe =
        move || Ok(of.models.listed().iter().map(|(name, entry)| model_json(name, entry)).collect::<Vec<_>>());
    Ok(Body(json!({"models": app.prepare(describe).await?})))
}

/// `/api/ps`: the loaded models, the last to be unloaded first.
pub async fn loaded(State(app): State<Arc<App>>) -> Result<Body<Json>, ApiError> {
    let of = app.clone();
    let models = app.prepare(move || {
        let describe = |(name, entry): (String, Arc<ServedModel>)| {
            let loaded = entry.loaded()?;
            let size = loaded.plan().unwrap_or_default().total_bytes();
            let left = of.models.time_left(&entry).unwrap_or(FOR_EVER);
            let mut body = model_json(&name, &entry);
            body["size"] = size.into();
            body["size_vram"] = entry.gpu_bytes(size).into();
            body["expires_at"] = time_of(now().saturating_add(left).as_secs()).into();
            body["context_length"] = loaded.context_length().into();
            Some((left, body))
        };
        let mut models: Vec<_> = of.models.listed().into_iter().filter_map(describe).collect();
        models.sort_by_key(|(left, _)| std::cmp::Reverse(left.as_secs()));
        Ok(models.into_iter().map(|(_, body)| body).collect::<Vec<_>>())
    });
    Ok(Body(json!({"models": models.await?})))
}

/// Answers `/api/show`.
pub async fn show(State(app): State<Arc<App>>, headers: HeaderMap, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(SHOW.fields)?;
    let system = fields.text("system")?.unwrap_or_default().to_owned();
    let name = name_of(fields)?.to_owned();
    let is_verbose = fields.checked_flag("verbose").unwrap_or(false);
    let entry = app.models.find(&name)?;
    let is_copilot =
        headers.get(header::USER_AGENT).is_some_and(|agent| agent.as_bytes().starts_with(COPILOT.as_bytes()));
    let body = app.prepare(move || {
        let context_length = match entry.loaded() {
            Some(Loaded::Decoder(decoder)) => Some(decoder.model().context_length()),
            _ => None,
        };
        let mut body = entry.about().map_or_else(
            || json!({"details": {}, "model_info": {}, "capabilities": []}),
            |about| about.shown(&name, format_of(&entry), context_length),
        );
        body["system"] = system.into();
        body["modified_at"] = time_of(entry.modified()).into();
        if is_verbose {
            body["tensors"] = entry.tensors().into();
        }
        // Copilot shows this name; Ollama sends it the requested one too.
        if is_copilot {
            body["model_info"]["general.basename"] = name.into();
        }
        Ok(body)
    });
    Ok(Body(body.await?).into_response())
}

/// `/api/version`: the compatible version of Ollama, since clients require a minimum, and this program's own.
pub async fn version() -> Body<Json> {
    Body(json!({"version": API_VERSION, "tilewright": env!("CARGO_PKG_VERSION")}))
}
