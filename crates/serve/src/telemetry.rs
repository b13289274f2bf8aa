//! Traces of requests for OpenTelemetry: `tracing` spans, sent by OTLP over HTTP.
//!
//! ```text
//! POST /v1/chat/completions       the request; its parent is in `traceparent`
//!   chat MODEL                    the generation, named by the conventions for generative AI
//!     queue                       an answer waits for a place in the batch
//!     prompt                      prefill, up to the first token
//!     decode                      the other tokens
//! ```
//! Times match the metrics in `metrics.rs`: a stage starts when its answer is polled anyway. Spans have no text of
//! prompts or answers. Finished spans wait in a queue for the exporter thread. When the queue is full they are
//! dropped and counted, so neither a request nor the engine waits for a collector.

use std::collections::BTreeMap;
use std::fmt;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::uri::Scheme;
use axum::http::{self, Method, Uri};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Status, TracerProvider};
use opentelemetry::{Array, Context, Key, KeyValue, StringValue, Value};
use opentelemetry_http::{HeaderExtractor, HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter as Otlp, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, OTEL_BSP_MAX_QUEUE_SIZE, OTEL_BSP_MAX_QUEUE_SIZE_DEFAULT,
    SdkTracerProvider, Span as SdkSpan, SpanData, SpanExporter, SpanProcessor,
};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use tilewright::Error;
use tilewright::engine::Usage;
use tracing::{Dispatch, Span, dispatcher, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::layer::SubscriberExt;

use super::LogSink;

/// Timeout for a batch, including retries.
const SENDING: Duration = Duration::from_secs(10);

/// Timeout for the remaining spans at shutdown.
const LAST: Duration = Duration::from_secs(5);

/// The default service name.
const SERVICE: &str = "tilewright";

/// The `error.type` of a request whose client disconnected.
const CANCELLED: &str = "cancelled";

/// Maximum bytes read of a collector's answer, which says why it refused spans.
const ANSWER_BYTES: u64 = 64 << 10;

/// Sends the traces of a server's requests, if enabled.
#[derive(Clone, Default)]
pub struct Telemetry(Option<Arc<Sending>>);

struct Sending {
    /// For this server alone: it sends no spans of other crates and leaves the program's own subscriber in place.
    dispatch: Dispatch,
    provider: SdkTracerProvider,
    counts: Arc<Counts>,
    scheme: &'static str,
    report: LogSink,
}

impl Telemetry {
    /// Starts sending to a collector. `/v1/traces` is appended to `endpoint`; OpenTelemetry's environment variables
    /// set the rest.
    ///
    /// # Errors
    /// [`Error::Option`] if `endpoint` is not a valid address.
    pub fn open(endpoint: &str, has_tls: bool, report: &LogSink) -> Result<Telemetry, Error> {
        let refused = || {
            let expected = "an address such as http://localhost:4318".into();
            Error::Option { option: "otlp_endpoint", expected, found: endpoint.into() }
        };
        let address = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
        let uri: Uri = address.parse().map_err(|_| refused())?;
        if uri.authority().is_none() || ![Some(&Scheme::HTTP), Some(&Scheme::HTTPS)].contains(&uri.scheme()) {
            return Err(refused());
        }
        let otlp = Otlp::builder()
            .with_http()
            .with_endpoint(address)
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(SENDING)
            .with_http_client(ExportClient::new())
            .build()
            .map_err(|_| refused())?;
        let counts = Arc::new(Counts::default());
        let exporter =
            Exporter { otlp, counts: counts.clone(), report: report.clone(), has_failed: AtomicBool::new(false) };
        let most = std::env::var(OTEL_BSP_MAX_QUEUE_SIZE).ok().and_then(|most| most.parse().ok());
        let most = most.unwrap_or(OTEL_BSP_MAX_QUEUE_SIZE_DEFAULT).max(1);
        let config = BatchConfigBuilder::default().with_max_queue_size(most).build();
        let batches = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
        let provider = SdkTracerProvider::builder()
            .with_span_processor(Bounded { batches, most, counts: counts.clone() })
            .with_resource(resource())
            .build();
        let layer = tracing_opentelemetry::layer()
            .with_tracer(provider.tracer(SERVICE))
            .with_context_activation(false)
            .with_location(false)
            .with_target(false)
            .with_threads(false)
            .with_tracked_inactivity(false);
        let dispatch = Dispatch::new(tracing_subscriber::Registry::default().with(layer));
        let scheme = if has_tls { "https" } else { "http" };
        Ok(Telemetry(Some(Arc::new(Sending { dispatch, provider, counts, scheme, report: report.clone() }))))
    }

    /// Registers metrics for sent and dropped spans.
    pub fn register(&self, registry: &mut Registry) {
        if let Some(sending) = &self.0 {
            let Counts { sent, dropped, .. } = &*sending.counts;
            registry.register("trace_spans_sent", "Trace spans accepted by the collector", sent.clone());
            registry.register("trace_spans_dropped", "Trace spans dropped", dropped.clone());
        }
    }

    /// Starts a request's span.
    pub fn request(&self, request: &Request, route: Option<&str>) -> ServerSpan {
        let Some(sending) = &self.0 else { return ServerSpan { span: None, trace: TraceContext::default() } };
        // The conventions use one name for all non-standard methods.
        let method = match request.method() {
            &Method::CONNECT
            | &Method::DELETE
            | &Method::GET
            | &Method::HEAD
            | &Method::OPTIONS
            | &Method::PATCH
            | &Method::POST
            | &Method::PUT
            | &Method::TRACE => request.method().as_str().to_owned(),
            _ => "_OTHER".to_owned(),
        };
        let name = match (route, method.as_str()) {
            (Some(route), "_OTHER") => format!("HTTP {route}"),
            (None, "_OTHER") => "HTTP".to_owned(),
            (Some(route), method) => format!("{method} {route}"),
            (None, method) => method.to_owned(),
        };
        let parent =
            TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(request.headers()));
        let make = || info_span!(parent: None, "request", otel.name = name, otel.kind = "server");
        let span = child(&sending.dispatch, parent, make);
        span.set_attribute("http.request.method", method);
        span.set_attribute("url.scheme", sending.scheme);
        if let Some(route) = route {
            span.set_attribute("http.route", route.to_owned());
            // For an unknown path it would be arbitrary client text.
            span.set_attribute("url.path", request.uri().path().to_owned());
        }
        let parent =
            Parent { dispatch: sending.dispatch.clone(), context: span.context(), operation: operation_of(route) };
        ServerSpan { span: Some(span), trace: TraceContext(Some(Arc::new(parent))) }
    }

    /// Sends the remaining spans, for at most `LAST`, then stops.
    pub async fn end(self) {
        let Some(sending) = self.0 else { return };
        let last = tokio::task::spawn_blocking(move || {
            // The result is in the counts.
            let _ = sending.provider.shutdown_with_timeout(LAST);
            let n = sending.counts.dropped.get() + sending.counts.n_waiting.load(Ordering::Relaxed) as u64;
            if n > 0 {
                (sending.report)(&format!("{n} spans of traces were not sent"));
            }
        });
        let _ = last.await;
    }
}

/// Describes this process.
fn resource() -> Resource {
    let resource = Resource::builder().build();
    let name = resource.get_ref(&Key::from_static_str("service.name")).map(|name| name.as_str().into_owned());
    let about = Resource::builder().with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    match name {
        Some(name) if !name.starts_with("unknown_service") => about.build(),
        _ => about.with_service_name(SERVICE).build(),
    }
}

/// The conventions' name for an endpoint's work.
fn operation_of(route: Option<&str>) -> &'static str {
    match route {
        Some("/v1/completions" | "/api/generate") => "text_completion",
        Some("/v1/embeddings" | "/api/embed") => "embeddings",
        Some("/v1/rerank") => "rerank",
        Some("/v1/audio/transcriptions" | "/v1/audio/translations") => "transcription",
        _ => "chat",
    }
}

/// A span whose parent is only in OpenTelemetry's context. The registry would close a parent with its last child
/// through the thread's current subscriber, which is not this one.
fn child(dispatch: &Dispatch, parent: Context, make: impl FnOnce() -> Span) -> Span {
    let span = dispatcher::with_default(dispatch, make);
    // Fails only for a span that has started.
    let _ = span.set_parent(parent);
    span
}

/// The parent of spans for a request's work.
#[derive(Clone, Default)]
pub struct TraceContext(Option<Arc<Parent>>);

struct Parent {
    dispatch: Dispatch,
    context: Context,
    operation: &'static str,
}

impl TraceContext {
    fn child(&self, make: impl FnOnce() -> Span) -> Option<Span> {
        self.0.as_ref().map(|parent| child(&parent.dispatch, parent.context.clone(), make))
    }

    /// Starts the span of a model's work for a request with `n_answers` answers.
    pub fn operation(&self, model: &str, n_answers: usize) -> Operation {
        let Some(parent) = &self.0 else {
            return Operation { span: None, trace: TraceContext::default(), finished: BTreeMap::new(), is_over: true };
        };
        let name = format!("{} {model}", parent.operation);
        // The model runs in this process.
        let make = || info_span!(parent: None, "operation", otel.name = name, otel.kind = "internal");
        let span = child(&parent.dispatch, parent.context.clone(), make);
        span.set_attribute("gen_ai.operation.name", parent.operation);
        span.set_attribute("gen_ai.provider.name", SERVICE);
        span.set_attribute("gen_ai.request.model", model.to_owned());
        if n_answers > 1 {
            span.set_attribute("gen_ai.request.choice.count", count(n_answers));
        }
        let parent = Parent { dispatch: parent.dispatch.clone(), context: span.context(), operation: parent.operation };
        Operation {
            span: Some(span),
            trace: TraceContext(Some(Arc::new(parent))),
            finished: BTreeMap::new(),
            is_over: false,
        }
    }
}

fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn texts(texts: impl IntoIterator<Item = &'static str>) -> Value {
    Value::Array(Array::String(texts.into_iter().map(StringValue::from).collect()))
}

/// The span of a request, until it is dropped.
pub struct ServerSpan {
    span: Option<Span>,
    trace: TraceContext,
}

impl ServerSpan {
    /// The parent for child spans.
    pub fn trace(&self) -> TraceContext {
        self.trace.clone()
    }

    /// Records the status and error code.
    pub fn answered(&self, status: u16, code: Option<&'static str>) {
        let Some(span) = &self.span else { return };
        span.set_attribute("http.response.status_code", i64::from(status));
        // The conventions do not count client errors as server errors.
        if status >= 500 {
            span.set_attribute("error.type", code.map_or_else(|| status.to_string(), str::to_owned));
            span.set_status(Status::error(""));
        }
    }

    /// The client disconnected before a status.
    pub fn gone(&self) {
        if let Some(span) = &self.span {
            span.set_attribute("error.type", CANCELLED);
        }
    }
}

/// The span of a model's work, until it is dropped.
pub struct Operation {
    span: Option<Span>,
    trace: TraceContext,
    finished: BTreeMap<usize, &'static str>,
    is_over: bool,
}

impl Operation {
    /// Starts the stages of answer `index`.
    pub fn queued(&self, index: usize) -> Stages {
        let mut stages = Stages { trace: self.trace.clone(), index, stage: AnswerStage::Over, span: None };
        stages.enter(AnswerStage::Queue, || info_span!(parent: None, "queue"));
        stages
    }

    /// Records the time from the request to the first token.
    pub fn first_token(&self, time: Duration) {
        if let Some(span) = &self.span {
            span.set_attribute("gen_ai.response.time_to_first_chunk", time.as_secs_f64());
        }
    }

    /// Records the finish reason of answer `index`.
    pub fn finished(&mut self, index: usize, reason: &'static str) {
        if self.span.is_some() {
            self.finished.insert(index, reason);
        }
    }

    /// Records the tokens of all answers.
    pub fn used(&self, usage: impl FnOnce() -> Usage) {
        let Some(span) = &self.span else { return };
        let usage = usage();
        tell_prompt(span, usage);
        span.set_attribute("gen_ai.usage.output_tokens", count(usage.completion_tokens));
        if !self.finished.is_empty() {
            span.set_attribute("gen_ai.response.finish_reasons", texts(self.finished.values().copied()));
        }
    }

    /// Marks the work as complete.
    pub fn done(&mut self) {
        self.is_over = true;
    }

    /// Marks the work as failed.
    pub fn failed(&mut self, code: &'static str) {
        self.is_over = true;
        if let Some(span) = &self.span {
            span.set_attribute("error.type", code);
            span.set_status(Status::error(""));
        }
    }
}

impl Drop for Operation {
    /// If dropped early, the work was cancelled.
    fn drop(&mut self) {
        if let Some(span) = self.span.as_ref().filter(|_| !self.is_over) {
            span.set_attribute("error.type", CANCELLED);
        }
    }
}

fn tell_prompt(span: &Span, usage: Usage) {
    span.set_attribute("gen_ai.usage.input_tokens", count(usage.prompt_tokens));
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", count(usage.cached_tokens));
}

/// The stages of an answer, one span each.
pub struct Stages {
    trace: TraceContext,
    index: usize,
    stage: AnswerStage,
    span: Option<Span>,
}

#[derive(Clone, Copy, PartialEq)]
enum AnswerStage {
    Queue,
    Prompt,
    Decode,
    Over,
}

impl Stages {
    /// Starts the prompt stage once the engine reports prompt tokens.
    pub fn look(&mut self, usage: impl FnOnce() -> Usage) {
        if self.stage != AnswerStage::Queue {
            return;
        }
        let usage = usage();
        if usage.prompt_tokens > 0 {
            self.enter(AnswerStage::Prompt, || info_span!(parent: None, "prompt"));
            if let Some(span) = &self.span {
                tell_prompt(span, usage);
            }
        }
    }

    /// Starts the decode stage.
    pub fn first_token(&mut self, usage: Usage) {
        self.look(|| usage);
        self.enter(AnswerStage::Decode, || info_span!(parent: None, "decode"));
    }

    /// Ends the last stage. `reason` is `None` if the answer was cancelled.
    pub fn end(&mut self, usage: Usage, reason: Option<&'static str>) {
        self.look(|| usage);
        if let Some(span) = self.span.as_ref().filter(|_| self.stage == AnswerStage::Decode) {
            span.set_attribute("gen_ai.usage.output_tokens", count(usage.completion_tokens));
            if let Some(reason) = reason {
                span.set_attribute("gen_ai.response.finish_reasons", texts([reason]));
            }
        }
        (self.stage, self.span) = (AnswerStage::Over, None);
    }

    fn enter(&mut self, stage: AnswerStage, make: impl FnOnce() -> Span) {
        // End the previous span first.
        self.span = None;
        self.span = self.trace.child(make);
        self.stage = if self.span.is_some() { stage } else { AnswerStage::Over };
        if let Some(span) = &self.span {
            span.set_attribute("tilewright.choice.index", count(self.index));
        }
    }
}

/// Counts of spans.
#[derive(Debug, Default)]
struct Counts {
    /// Accepted by the collector.
    sent: Counter<u64, AtomicU64>,
    /// Dropped at a full queue, or refused by the collector.
    dropped: Counter<u64, AtomicU64>,
    n_waiting: AtomicUsize,
}

/// Limits the queued spans, including those being sent, and counts dropped ones. The inner queue has the same limit,
/// but drops silently.
#[derive(Debug)]
struct Bounded {
    batches: BatchSpanProcessor,
    most: usize,
    counts: Arc<Counts>,
}

impl SpanProcessor for Bounded {
    fn on_start(&self, span: &mut SdkSpan, context: &Context) {
        self.batches.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        let more = |n: usize| (n < self.most).then_some(n + 1);
        match self.counts.n_waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => self.batches.on_end(span),
            Err(_) => drop(self.counts.dropped.inc()),
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.batches.set_resource(resource);
    }
}

/// Sends batches and counts them.
struct Exporter {
    otlp: Otlp,
    counts: Arc<Counts>,
    report: LogSink,
    /// Whether the latest batch failed: only the first failure of several is reported.
    has_failed: AtomicBool,
}

impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exporter").field("otlp", &self.otlp).finish_non_exhaustive()
    }
}

impl SpanExporter for Exporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let n = batch.len();
        let sent = self.otlp.export(batch).await;
        let counts = &self.counts;
        counts.n_waiting.fetch_sub(n, Ordering::Relaxed);
        match &sent {
            Ok(()) => counts.sent.inc_by(n as u64),
            Err(_) => counts.dropped.inc_by(n as u64),
        };
        let had_failed = self.has_failed.swap(sent.is_err(), Ordering::Relaxed);
        if let Err(error) = &sent
            && !had_failed
        {
            (self.report)(&format!("traces cannot be sent and are dropped: {error}"));
        }
        sent
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.otlp.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.otlp.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.otlp.set_resource(resource);
    }
}

/// A blocking HTTP client for the exporter thread.
#[derive(Debug)]
struct ExportClient(ureq::Agent);

impl ExportClient {
    fn new() -> ExportClient {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // Headers from the environment may contain a key.
            .max_redirects(0)
            .timeout_global(Some(SENDING));
        ExportClient(config.build().into())
    }

    fn send(&self, request: http::Request<Bytes>) -> Result<http::Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let answer = self.0.run(http::Request::from_parts(parts, &body[..]))?;
        let (parts, mut body) = answer.into_parts();
        let body = body.with_config().limit(ANSWER_BYTES).read_to_vec()?;
        Ok(http::Response::from_parts(parts, body.into()))
    }
}

/// A future of [`HttpClient`].
type Sent<'a> = Pin<Box<dyn Future<Output = Result<http::Response<Bytes>, HttpError>> + Send + 'a>>;

impl HttpClient for ExportClient {
    // The signature that `async_trait` generates.
    fn send_bytes<'a, 'b>(&'a self, request: http::Request<Bytes>) -> Sent<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(ready(self.send(request)))
    }
}
