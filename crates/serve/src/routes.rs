//! Routes, and the middleware around each request.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Json as Body;
use axum::Router;
use axum::body::{Body as AnyBody, Bytes, HttpBody as _};
use axum::extract::{MatchedPath, Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use serde_json::{Value as Json, json};
use tilewright::engine::EngineState;
use tilewright::{BreakerStats, Circuit, Device};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::app::{ApiRequest, App, RequestContext};
use super::connections::{AtWork, Framing, Peer};
use super::errors::{ApiError, ErrorFormat};
use super::models::{Loaded, ServedModel};
use super::page::StaticFiles;
use super::request_log::{RequestRecord, SharedRecord, request_id};
use super::telemetry::ServerSpan;
use super::{anthropic, audio, chat, completions, embeddings, llama, ollama, openapi, responses, tei, vllm};

/// Names a request in its response and in logs.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Characters of an unknown path in the error.
const MAX_SHOWN_PATH: usize = 100;

/// The endpoint of unknown paths in metrics.
const OTHER: &str = "other";

/// Paths without a key: health checks, and public files.
const OPEN: [&str; 2] = ["/health", OTHER];

/// The header that Anthropic's clients send with each request.
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");

/// The header in which they expect the request's id.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// All endpoints.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/rerank", post(embeddings::rerank))
        .route("/v2/rerank", post(embeddings::rerank))
        .route("/v1/reranking", post(embeddings::rerank))
        .route("/reranking", post(embeddings::rerank))
        .route("/rerank", post(rerank))
        .route("/v1/audio/transcriptions", post(audio::transcribe))
        .route("/v1/audio/translations", post(audio::translate))
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/models", get(list))
        .route("/models", get(list))
        .route("/v1/models/{*name}", get(retrieve).post(load))
        .merge(ollama::routes())
        .route("/completion", post(llama::create))
        .route("/completions", post(llama::create))
        .route("/infill", post(llama::infill))
        .route("/embedding", post(llama::embedding))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(llama::detokenize))
        .route("/tokenizer_info", get(vllm::tokenizer_info))
        .route("/score", post(vllm::score))
        .route("/v1/score", post(vllm::score))
        .route("/version", get(vllm::version))
        .route("/apply-template", post(llama::apply_template))
        .route("/props", get(llama::props))
        .route("/slots", get(llama::slots))
        .route("/embed", post(tei::embed))
        .route("/similarity", post(tei::similarity))
        .route("/decode", post(tei::decode))
        .route("/embed_all", post(tei::refuse))
        .route("/embed_sparse", post(tei::refuse))
        .route("/predict", post(tei::refuse))
        .route("/info", get(tei::info))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(async || Body(&*openapi::DOCUMENT)))
        .method_not_allowed_fallback(wrong_method)
        .fallback(other)
        .layer(from_fn_with_state(app.clone(), middleware))
        .with_state(app)
}

/// Checks access, and measures and logs the request.
async fn middleware(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let since = Instant::now();
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let span = app.telemetry.request(&request, route.as_deref());
    let trace = span.trace();
    let endpoint = route.unwrap_or_else(|| OTHER.into());
    let is_anthropic = request.headers().contains_key(ANTHROPIC_VERSION);
    let format = if is_anthropic { ErrorFormat::Anthropic } else { ErrorFormat::of(request.uri().path()) };
    let framed = check_framing(&request);
    let is_coded = request.headers().contains_key(header::TRANSFER_ENCODING);
    if !request.headers().contains_key(header::EXPECT) {
        let time = app.limits.body_time;
        request = request.map(|body| AnyBody::new(DrainBody { body, time, is_over: false }));
    }
    let at_work = request.extensions().get().cloned();
    let method = request.method().clone();
    let given = request.headers().get(&REQUEST_ID).and_then(|id| id.to_str().ok());
    let peer = request.extensions().get().map(|&Peer(peer)| peer);
    let record = Arc::new(RequestRecord::new(request_id(given), peer));
    let watch = RequestMetrics {
        app: app.clone(),
        endpoint,
        method,
        path: request.uri().path().to_owned(),
        since,
        status: None,
        code: None,
        record: record.clone(),
        span,
        _at_work: at_work,
    };
    let cors = app.guard.cors(request.headers());
    let checked = framed.and_then(|()| app.guard.check_source(request.uri(), request.headers()));
    let preflight = app.guard.preflight(request.method(), request.headers());
    let checked = checked.and_then(|()| match OPEN.contains(&watch.endpoint.as_str()) || preflight.is_some() {
        true => Ok(None),
        false => app.guard.check_key(request.headers()),
    });
    let mut response = match (checked, preflight) {
        (Err(refusal), _) => refusal.into_response(),
        (Ok(_), Some(reply)) => (StatusCode::NO_CONTENT, reply).into_response(),
        (Ok(key), None) => {
            let ignored = app.is_lenient.then(Arc::default);
            let context =
                RequestContext { ignored: ignored.clone(), ..RequestContext::new(since, trace, key, record.clone()) };
            request.extensions_mut().insert(context);
            let response = next.run(request).await;
            let names = ignored.map(|ignored| ignored.names()).unwrap_or_default();
            with_ignored(&app, &watch.endpoint, response, &names)
        }
    };
    let code = response.extensions().get::<ApiError>().map(|error| {
        app.refusals.refused(&record, error);
        error.code
    });
    response = formatted(response, format, &record.id);
    response.headers_mut().extend(cors);
    if let Ok(id) = HeaderValue::from_str(&record.id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if is_coded {
        // What follows such a body is not scanned; see `Framing`.
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    watch.answered(response, code)
}

/// Tells the client and the operator which fields a lenient server has ignored.
fn with_ignored(app: &App, endpoint: &str, mut response: Response, names: &[String]) -> Response {
    if names.is_empty() {
        return response;
    }
    for name in names.iter().take(MAX_IGNORED) {
        app.report_once(format!("{endpoint}: the field {name:?} of a request is not supported and was ignored"));
    }
    // A header has one line of visible letters.
    let plain = |letter: char| if letter.is_ascii_graphic() && letter != ',' { letter } else { '?' };
    let short = |name: &String| name.chars().take(MAX_SHOWN_PATH).map(plain).collect();
    let names: Vec<String> = names.iter().take(MAX_IGNORED).map(short).collect();
    if let Ok(value) = HeaderValue::from_str(&names.join(", ")) {
        response.headers_mut().insert(IGNORED, value);
    }
    response
}

/// Ignored fields that a response and the log name.
const MAX_IGNORED: usize = 16;

/// The response header that lists ignored fields.
const IGNORED: HeaderName = HeaderName::from_static("x-tilewright-ignored");

/// Writes an error in the format of the request's API, unless the endpoint chose another. Anthropic's clients read the
/// request's id from a header.
fn formatted(mut response: Response, format: ErrorFormat, id: &str) -> Response {
    let format = response.extensions().get().copied().unwrap_or(format);
    if let Some(error) = response.extensions().get::<ApiError>().filter(|_| format != ErrorFormat::OpenAi) {
        let body = Body(format.body(error, Some(id)));
        response = (format.status(error), response.headers().clone(), body).into_response();
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    if format == ErrorFormat::Anthropic
        && let Ok(id) = HeaderValue::from_str(id)
    {
        response.headers_mut().insert(ANTHROPIC_REQUEST_ID, id);
    }
    response
}

/// Errors of `result` in this format.
fn in_format(result: Result<Response, ApiError>, format: ErrorFormat) -> Response {
    let mut response = result.into_response();
    response.extensions_mut().insert(format);
    response
}

/// `/rerank`: TEI's with `texts`, otherwise that of Cohere, Jina and llama.cpp.
async fn rerank(State(app): State<Arc<App>>, asked: ApiRequest) -> Response {
    let has = |field: &str| asked.fields().is_ok_and(|fields| fields.get(field).is_some());
    match (has("texts"), has("documents")) {
        (true, _) => in_format(tei::rerank(&app, &asked).await, ErrorFormat::Tei),
        (false, false) => ApiError::invalid("texts or documents", None, "a list of texts").into_response(),
        (false, true) => embeddings::rerank(State(app), asked).await.into_response(),
    }
}

/// `/tokenize`: TEI's with `inputs`, vLLM's with `prompt`, otherwise llama.cpp's.
async fn tokenize(State(app): State<Arc<App>>, asked: ApiRequest) -> Response {
    let has = |field: &str| asked.fields().is_ok_and(|fields| fields.get(field).is_some());
    match (has("inputs"), has("prompt")) {
        (true, _) => in_format(tei::tokenize(&app, &asked).await, ErrorFormat::Tei),
        (false, true) => in_format(vllm::tokenize(&app, &asked).await, ErrorFormat::OpenAi),
        (false, false) => llama::tokenize(&app, &asked).await.into_response(),
    }
}

/// The parameters in a URL.
pub type Queried = Query<HashMap<String, String>>;

/// Refuses a body that is not plainly chunked, and one with two lengths: another reader, such as a proxy, may take
/// part of it for the next request.
fn check_framing(request: &Request) -> Result<(), ApiError> {
    let refused = |message: &str| Err(ApiError::refusal(StatusCode::BAD_REQUEST, "invalid_framing", message));
    let mut codings = request.headers().get_all(header::TRANSFER_ENCODING).iter();
    let Some(coding) = codings.next() else { return Ok(()) };
    if request.extensions().get().is_some_and(|framing: &Framing| framing.has_two_lengths) {
        return refused("the request has both Content-Length and Transfer-Encoding, expected one of them");
    }
    match coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") && codings.next().is_none() {
        true => Ok(()),
        false => refused("the request's Transfer-Encoding is not supported, expected chunked"),
    }
}

/// Maximum bytes of an unused body that are read.
const MAX_UNWANTED: usize = 64 << 20;

/// A request's body. The unread rest is read and dropped, so that the client gets the early answer: closing a
/// connection with unread bytes discards it.
struct DrainBody {
    body: AnyBody,
    /// Timeout for the rest.
    time: Duration,
    is_over: bool,
}

impl hyper::body::Body for DrainBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        self.is_over |= matches!(frame, Poll::Ready(None | Some(Err(_))));
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for DrainBody {
    fn drop(&mut self) {
        if self.is_over || self.body.is_end_stream() {
            return;
        }
        let (mut body, time) = (std::mem::take(&mut self.body), self.time);
        let rest = async move {
            let mut n_read = 0;
            while let Some(Ok(frame)) = body.frame().await {
                n_read += frame.data_ref().map_or(0, Bytes::len);
                if n_read > MAX_UNWANTED {
                    break;
                }
            }
        };
        // The runtime may have ended at shutdown.
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(timeout(time, rest));
        }
    }
}

/// Measures and traces a request until its answer is sent or its client disconnects.
struct RequestMetrics {
    app: Arc<App>,
    endpoint: String,
    method: Method,
    path: String,
    since: Instant,
    status: Option<u16>,
    code: Option<&'static str>,
    record: SharedRecord,
    span: ServerSpan,
    _at_work: Option<Arc<AtWork>>,
}

impl RequestMetrics {
    fn answered(mut self, response: Response, code: Option<&'static str>) -> Response {
        let status = response.status().as_u16();
        (self.status, self.code) = (Some(status), code);
        self.app.metrics.answered(&self.endpoint, status);
        self.span.answered(status, code);
        response.map(|body| AnyBody::new(MeasuredBody { body, _watch: self }))
    }
}

impl Drop for RequestMetrics {
    fn drop(&mut self) {
        /// The usual code for a client that disconnected early.
        const GONE: u16 = 499;
        let time = self.since.elapsed();
        if self.status.is_none() {
            self.app.metrics.answered(&self.endpoint, GONE);
            self.span.gone();
        }
        self.app.metrics.ended(&self.endpoint, time);
        if let Some(log) = &self.app.log {
            let status = self.status.unwrap_or(GONE);
            log(&self.record.line(self.method.as_str(), &self.path, status, self.code, time));
        }
    }
}

/// A measured body.
struct MeasuredBody {
    body: AnyBody,
    _watch: RequestMetrics,
}

impl hyper::body::Body for MeasuredBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

async fn wrong_method(method: Method, path: MatchedPath) -> ApiError {
    let message = format!("{} does not accept {method}", path.as_str());
    ApiError::refusal(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// Static files, the response that Ollama's clients expect at the root, or an error.
async fn other(State(app): State<Arc<App>>, request: Request) -> Response {
    let (reads, path) = (matches!(*request.method(), Method::GET | Method::HEAD), request.uri().path());
    let is_html = |kinds: &HeaderValue| kinds.to_str().is_ok_and(|kinds| kinds.contains("text/html"));
    let is_browser = request.headers().get_all(header::ACCEPT).iter().any(is_html);
    // Ollama's clients expect the text below, unless the operator has put a page there.
    let wants_page = path != "/" || !app.page.as_ref().is_some_and(StaticFiles::is_included) || is_browser;
    if let Some(page) = app.page.as_ref().filter(|_| reads && wants_page)
        && let Some(file) = page.get(request.method(), path, request.headers()).await
    {
        return file;
    }
    if reads && path == "/" {
        return match is_browser {
            true => "tilewright is running; /openapi.json describes its APIs".into_response(),
            // Clients of Ollama compare this text.
            false => "Ollama is running".into_response(),
        };
    }
    let path: String = path.chars().take(MAX_SHOWN_PATH).collect();
    let message = format!("there is no endpoint {} {path}", request.method());
    ApiError::refusal(StatusCode::NOT_FOUND, "unknown_url", message).into_response()
}

fn device_json(device: &Device) -> Json {
    let info = device.info();
    json!({"name": info.name, "backend": info.backend, "driver": info.driver, "reason": info.reason})
}

fn model_json(name: &str, entry: &ServedModel, adapter: Option<&str>) -> Json {
    let mut reply = json!({
        "id": name, "object": "model", "created": entry.created, "owned_by": "local", "status": entry.status(),
    });
    if let Some(about) = entry.about() {
        reply["max_model_len"] = entry.loaded().map_or(about.context_length(), |loaded| loaded.context_length()).into();
        reply["meta"] = about.meta(entry.size_bytes());
    }
    if let Some(loaded) = entry.loaded() {
        reply["devices"] = loaded.devices().iter().map(device_json).collect();
        reply["memory"] = json!(loaded.plan());
        if let Loaded::Decoder(decoder) = &loaded {
            reply["parallel"] = decoder.engine.max_sequences().into();
            reply["cache_tokens"] = decoder.engine.stats().cache_tokens.into();
        }
    }
    if let Some(adapter) = adapter {
        reply["id"] = format!("{name}:{adapter}").into();
        reply["parent"] = name.into();
    }
    reply
}

async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Result<Body<Json>, ApiError> {
    let is_anthropic = headers.contains_key(ANTHROPIC_VERSION);
    let model = if is_anthropic { anthropic::model_json } else { model_json };
    let of = app.clone();
    // Descriptions are read from files.
    let data = app.prepare(move || {
        let mut data = Vec::new();
        for (name, entry) in of.models.listed() {
            data.push(model(&name, &entry, None));
            // Adapters have the name of the model itself only.
            let adapters = entry.adapters().iter().filter(|_| name == entry.name());
            data.extend(adapters.map(|adapter| model(&name, &entry, Some(adapter))));
        }
        Ok(data)
    });
    let data = data.await?;
    let id = |model: Option<&Json>| model.map(|model| model["id"].clone());
    Ok(match is_anthropic {
        true => {
            let [first, last] = [id(data.first()), id(data.last())];
            Body(json!({"data": data, "has_more": false, "first_id": first, "last_id": last}))
        }
        false => Body(json!({"object": "list", "data": data})),
    })
}

async fn retrieve(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Body<Json>, ApiError> {
    let (entry, adapter) = app.models.find_adapted(&name)?;
    let is_alias = adapter.is_none() && app.models.listed().iter().any(|(known, _)| *known == name);
    let own = if is_alias { name } else { entry.name().to_owned() };
    let model = if headers.contains_key(ANTHROPIC_VERSION) { anthropic::model_json } else { model_json };
    Ok(Body(app.prepare(move || Ok(model(&own, &entry, adapter.as_deref()))).await?))
}

/// `/v1/models/NAME/load` and `/unload`.
async fn load(State(app): State<Arc<App>>, Path(path): Path<String>) -> Result<Body<Json>, ApiError> {
    let entry = match path.rsplit_once('/') {
        Some((name, "load")) => app.models.get(name).await?.entry.clone(),
        Some((name, "unload")) => {
            let entry = app.models.find(name)?;
            entry.unload();
            entry
        }
        _ => {
            let message = "a model accepts GET, and POST at /load and /unload";
            return Err(ApiError::refusal(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message));
        }
    };
    Ok(Body(app.prepare(move || Ok(model_json(entry.name(), &entry, None))).await?))
}

/// Status 503 while models are loaded at the start, and if a model's engine has stopped: probes only check the status.
async fn health(State(app): State<Arc<App>>) -> (StatusCode, Body<Json>) {
    let entries = app.models.entries();
    let n_loaded = entries.iter().filter(|entry| entry.loaded().is_some()).count();
    let losses: Vec<BreakerStats> = entries.iter().map(|entry| entry.losses()).collect();
    let n_on_cpu = losses.iter().filter(|stats| stats.circuit == Circuit::Open).count();
    let n_lost: u64 = losses.iter().map(BreakerStats::n_losses).sum();
    let n_down = entries.iter().filter(|entry| entry.engine_state() != EngineState::Running).count();
    let n_failed = entries.iter().filter(|entry| entry.status() == "failed").count();
    let (code, status) = match (app.models.is_ready(), n_down, n_on_cpu + n_failed) {
        (false, ..) => (StatusCode::SERVICE_UNAVAILABLE, "loading"),
        (true, 1.., _) => (StatusCode::SERVICE_UNAVAILABLE, "down"),
        (true, 0, 1..) => (StatusCode::OK, "degraded"),
        (true, 0, 0) => (StatusCode::OK, "ok"),
    };
    let mut devices: Vec<Json> = Vec::new();
    for loaded in entries.iter().filter_map(|entry| entry.loaded()) {
        for device in loaded.devices().iter().map(device_json) {
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
    }
    let reply = json!({
        "status": status,
        "version": env!("CARGO_PKG_VERSION"),
        "devices": devices,
        "failed": n_failed,
        "models": entries.len(),
        "loaded": n_loaded,
        "down": n_down,
        "fallback": n_on_cpu,
        "device_lost": n_lost,
    });
    (code, Body(reply))
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], app.metrics.text(&app.models)).into_response()
}
