//! `/api/embed`, and the older `/api/embeddings` for one text.

use std::sync::Arc;

use axum::Json as Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value as Json, json};
use tilewright::embed::{Embedder, Truncation};

use super::super::app::{ApiRequest, App};
use super::super::conversation::with_notice;
use super::super::embeddings::EmbedJob;
use super::super::errors::ApiError;
use super::super::fields::Fields;
use super::super::models::Lease;
use super::super::schema::{Endpoint, Kind, field};
use super::options::{KEEP_ALIVE, MODEL, OPTIONS, RequestOptions, keep_of};

/// `/api/embed`.
pub const EMBED: Endpoint = Endpoint::post(
    "/api/embed",
    "Computes embeddings, as Ollama's",
    &[&[
        MODEL,
        field(
            "input",
            Kind::Other(&["string", "array"], "a text or a list of texts"),
            "[]",
            "The texts. Without them the request only loads the model.",
        ),
        field("truncate", Kind::Flag, "true", "Cut texts that are too long, instead of refusing them."),
        field("dimensions", Kind::Whole(0, u32::MAX as i64), "0", "Elements to keep of each vector; 0: all."),
        OPTIONS,
        KEEP_ALIVE,
    ]],
);

/// `/api/embeddings`.
pub const EMBEDDINGS: Endpoint = Endpoint::post(
    "/api/embeddings",
    "Computes one embedding, as Ollama's older endpoint",
    &[&[
        MODEL,
        field("prompt", Kind::Text, "\"\"", "The text. Without it the request only loads the model."),
        OPTIONS,
        KEEP_ALIVE,
    ]],
);

/// Serialised from the numbers themselves, as in OpenAI's interface.
#[derive(Serialize)]
struct EmbedResponse<'a> {
    model: &'a str,
    embeddings: Vec<Vec<f32>>,
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

#[derive(Serialize)]
struct EmbeddingResponse {
    embedding: Vec<f32>,
}

/// Loads an embedding model, sets its `keep_alive`, and checks the options.
async fn lease_of(app: &App, fields: Fields<'_>) -> Result<(Lease, Option<u32>), ApiError> {
    let model = fields.some_text("model")?;
    let n_ctx = RequestOptions::read(fields, app)?.n_ctx;
    let keep = keep_of(fields)?;
    let lease = app.models.get(model).await?;
    lease.embedder()?;
    if let Some(keep) = keep {
        lease.entry.keep_for(keep);
    }
    Ok((lease, n_ctx))
}

/// The texts of `input`; none if it is missing or empty, which only loads the model.
fn texts_of(fields: Fields<'_>, app: &App) -> Result<Vec<String>, ApiError> {
    match fields.get("input") {
        None => Ok(Vec::new()),
        Some(Json::String(text)) if text.is_empty() => Ok(Vec::new()),
        Some(Json::Array(list)) if list.is_empty() => Ok(Vec::new()),
        Some(_) => {
            let texts = fields.texts("input", app.limits.texts)?.unwrap_or_default();
            Ok(texts.into_iter().map(str::to_owned).collect())
        }
    }
}

/// The index of the first text with more tokens than `most`, which the model may take. Takes as long as encoding.
fn first_cut(embedder: &Embedder, texts: &[String], most: u32) -> Result<Option<usize>, ApiError> {
    for (at, text) in texts.iter().enumerate() {
        let (_, n_tokens) = embedder.encode_truncated(text, Truncation::default())?;
        if n_tokens > most.min(embedder.max_tokens()) as usize {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Answers `/api/embed`.
pub async fn embed(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(EMBED.fields)?;
    let texts = texts_of(fields, &app)?;
    let truncates = fields.checked_flag("truncate").unwrap_or(true);
    let dimensions = fields.checked_whole("dimensions").filter(|&n| n > 0);
    let (lease, n_ctx) = lease_of(&app, fields).await?;
    let (model, embedder) = (fields.some_text("model")?, lease.embedder()?);
    let load = asked.since.at.elapsed();
    let dims = embedder.dims();
    if let Some(dimensions) = dimensions.filter(|&n| n > i64::from(dims)) {
        let message = format!("dimensions is {dimensions}, but vectors of {model} have {dims}");
        return Err(ApiError { message, ..ApiError::invalid("dimensions", None, "") });
    }
    let max_tokens = embedder.max_tokens();
    // Whoever wants no text cut wants none longer than `num_ctx` either.
    let most = n_ctx.filter(|_| !truncates).map_or(max_tokens, |n| n.min(max_tokens));
    let shared = Arc::new(texts);
    let of_thread = shared.clone();
    let cut = app.prepare(move || first_cut(&embedder, &of_thread, most)).await?;
    if let Some(at) = cut.filter(|_| !truncates) {
        let whose = if most < max_tokens { "of options.num_ctx" } else { "of the model" };
        let message = format!("input[{at}] has more than the {most} tokens {whose}");
        return Err(ApiError { message, ..ApiError::invalid("input", None, "") });
    }
    let texts = Arc::try_unwrap(shared).unwrap_or_else(|shared| shared.to_vec());
    let (vectors, n) = match texts.is_empty() {
        true => (Vec::new(), 0),
        false => {
            let dimensions = dimensions.map(|n| n as u64);
            EmbedJob { dimensions, ..EmbedJob::of_texts(texts) }.run(&app, lease, &asked.since).await?
        }
    };
    let total_duration = asked.since.at.elapsed().as_nanos() as u64;
    let load_duration = load.as_nanos() as u64;
    let body = EmbedResponse { model, embeddings: vectors, total_duration, load_duration, prompt_eval_count: n };
    let response = Body(body).into_response();
    Ok(match cut {
        Some(at) => with_notice(response, &format!("input[{at}] was cut to the model's {max_tokens} tokens")),
        None => response,
    })
}

/// Answers `/api/embeddings`.
pub async fn embedding(State(app): State<Arc<App>>, asked: ApiRequest) -> Result<Response, ApiError> {
    let fields = asked.fields()?;
    fields.check(EMBEDDINGS.fields)?;
    let text = fields.text("prompt")?.unwrap_or_default().to_owned();
    let (lease, _) = lease_of(&app, fields).await?;
    if text.is_empty() {
        return Ok(Body(json!({"embedding": []})).into_response());
    }
    let (mut vectors, _) = EmbedJob::of_texts(vec![text]).run(&app, lease, &asked.since).await?;
    Ok(Body(EmbeddingResponse { embedding: vectors.pop().unwrap_or_default() }).into_response())
}
