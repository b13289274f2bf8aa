//! Shared state of all endpoints, and parsing of requests.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::{Map, Value as Json};
use tilewright::engine::Usage;
use tilewright::{Error, caught, random_seed};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::LogSink;
use super::answers::{Answers, PreparedPrompt};
use super::connections::AtWork;
use super::conversation::{Conversation, with_notices};
use super::errors::ApiError;
use super::fields::{Fields, IgnoredFields};
use super::guard::Guard;
use super::limits::Limits;
use super::metrics::Metrics;
use super::models::{Decoder, Lease, Loaded, Models};
use super::page::StaticFiles;
use super::request_log::{Refusals, SharedRecord};
use super::schema::JSON;
use super::stored::StoredResponses;
use super::telemetry::{Telemetry, TraceContext};

/// Bodies below this size are parsed in place, which costs less than a thread. Each body may have this many bytes
/// regardless of others, so that usual requests always succeed.
const SMALL_BODY: usize = 64 << 10;

/// Upper bound of a JSON value's memory without its text: as a member of an object, with its name.
const VALUE_BYTES: usize = 128;

/// The server.
pub struct App {
    pub models: Models,
    pub limits: Limits,
    pub guard: Guard,
    pub metrics: Arc<Metrics>,
    pub page: Option<StaticFiles>,
    /// Receives a line for each request, never its content.
    pub log: Option<LogSink>,
    /// Reports refused requests.
    pub refusals: Refusals,
    /// Receives what was ignored in requests, once each.
    pub events: LogSink,
    /// What was reported once for all requests.
    pub said: Mutex<HashSet<String>>,
    /// Whether fields without support are ignored with a warning instead of being refused.
    pub is_lenient: bool,
    /// Template variables of requests that do not set them.
    pub variables: Map<String, Json>,
    /// Responses that later requests can continue.
    pub responses: StoredResponses,
    /// Sends traces of requests.
    pub telemetry: Telemetry,
    /// Permits for threads that parse large bodies and make prompts.
    pub preparing: Arc<Semaphore>,
    /// The part of those for work that can take seconds (grammars, long prompts); the rest stay free for others.
    pub slow: Arc<Semaphore>,
    /// Bytes still available for bodies and what is parsed from them.
    pub bodies: Arc<Semaphore>,
    /// Bytes still available for samples of sounds.
    pub sounds: Arc<Semaphore>,
}

/// Whether a prompt of this size may take long to encode.
pub fn is_long(n_bytes: usize) -> bool {
    n_bytes > 64 << 10
}

impl App {
    /// Reports a line, but only once.
    pub fn report_once(&self, line: String) {
        /// Clients choose a part of the lines.
        const MOST: usize = 1000;
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() < MOST && !said.contains(&line) {
            (self.events)(&format!("notice: {line}"));
            said.insert(line);
        }
    }

    /// Reports ignored parts of a request to this endpoint, to the operator and in the response.
    pub fn noticed(&self, endpoint: &str, response: Response, notices: &[String]) -> Response {
        self.report_notices(endpoint, notices);
        with_notices(response, notices)
    }

    /// Reports ignored parts of requests to this endpoint.
    pub fn report_notices(&self, endpoint: &str, notices: &[String]) {
        notices.iter().for_each(|notice| self.report_once(format!("{endpoint}: {notice}; it was ignored")));
    }

    /// Runs work that grows with the request on a blocking thread; bounded concurrency.
    ///
    /// # Errors
    /// Errors of the work.
    pub async fn prepare<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = self.preparing.clone().acquire_owned().await;
        let work = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        work.await.unwrap_or_else(|_| Err(broken()))
    }

    /// Generates answers to a conversation.
    ///
    /// # Errors
    /// Errors of [`Models::get`], [`Conversation::prepare`] and [`Answers::begin`].
    pub async fn converse(
        &self,
        model: &str,
        conversation: Conversation,
        since: &RequestContext,
    ) -> Result<Answers, ApiError> {
        let lease = self.models.get(model).await?;
        self.answer_conversation(lease, since, conversation).await
    }

    /// [`App::converse`] with a leased model.
    ///
    /// # Errors
    /// Errors of [`Conversation::prepare`] and [`Answers::begin`].
    pub async fn answer_conversation(
        &self,
        lease: Lease,
        since: &RequestContext,
        mut conversation: Conversation,
    ) -> Result<Answers, ApiError> {
        conversation.add_variables(&self.variables);
        let is_slow = conversation.has_grammar() || conversation.has_media() || is_long(conversation.prompt_bytes());
        self.answer(lease, since, is_slow, move |decoder| Ok(vec![conversation.prepare(decoder)?])).await
    }

    /// Generates answers to prompts made on a thread, unless the queue is already full: under overload, making
    /// prompts would slow the running requests. `is_slow` says whether making them parses a grammar or encodes a
    /// prompt that [`is_long`].
    ///
    /// # Errors
    /// `busy` if the queue is full; errors of the prompts and of [`Answers::begin`].
    pub async fn answer(
        &self,
        lease: Lease,
        since: &RequestContext,
        is_slow: bool,
        asks: impl FnOnce(&Decoder) -> Result<Vec<PreparedPrompt>, ApiError> + Send + 'static,
    ) -> Result<Answers, ApiError> {
        let decoder = lease.decoder()?;
        if let Err(error) = decoder.engine.expect_room() {
            let error = ApiError::from(error);
            since.trace.operation(lease.entry.name(), 1).failed(error.code);
            return Err(error);
        }
        let (metrics, since, deadline) = (self.metrics.clone(), since.clone(), since.at + self.limits.answer_time);
        let most = self.limits.answer_bytes;
        let work = move || {
            let asks = asks(&decoder)?;
            check_reported(&asks, most, since.run.reports_ends)?;
            Answers::begin(lease, metrics, asks, &since, deadline)
        };
        self.prepare_in_turn(is_slow, work).await
    }

    /// As [`App::prepare`]; slow work also waits for its own turn, so that quick work finds a thread.
    ///
    /// # Errors
    /// Errors of the work.
    pub async fn prepare_in_turn<T: Send + 'static>(
        &self,
        is_slow: bool,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let turn = match is_slow {
            true => Some(self.slow.clone().acquire_owned().await),
            false => None,
        };
        self.prepare(move || {
            let _turn = turn;
            work()
        })
        .await
    }

    /// Runs an encoder or a speech model on a thread, in parts, to stop early when the client disconnects; `part` also
    /// gets a flag that is set while the client waits. Returns the parts' results. If the device is lost, reloads the model and
    /// repeats the part.
    ///
    /// # Errors
    /// `busy` if the queue is full; errors of the work.
    pub async fn compute<T: Computed>(
        &self,
        lease: Lease,
        since: &RequestContext,
        part: impl FnMut(&Loaded, usize, &AtomicBool) -> Option<Result<T, Error>> + Send + 'static,
    ) -> Result<Vec<T>, ApiError> {
        since.record.answered_by(lease.entry.name());
        let mut operation = since.trace.operation(lease.entry.name(), 1);
        let mut queued = operation.queued(0);
        let done = self.compute_in_turn(lease, || queued.end(Usage::default(), None), part).await;
        match &done {
            Ok(parts) => {
                let usage = T::usage(parts);
                since.record.used(usage);
                operation.used(|| usage);
                operation.done();
            }
            Err(error) => operation.failed(error.code),
        }
        done
    }

    async fn compute_in_turn<T: Computed>(
        &self,
        mut lease: Lease,
        begins: impl FnOnce(),
        mut part: impl FnMut(&Loaded, usize, &AtomicBool) -> Option<Result<T, Error>> + Send + 'static,
    ) -> Result<Vec<T>, ApiError> {
        let entry = lease.entry.clone();
        let Ok(_room) = entry.batches.try_acquire() else {
            return Err(Error::Busy { n_waiting: self.limits.batches }.into());
        };
        let turn = entry.computing.clone().acquire_owned().await;
        begins();
        let wanted = CancelOnDrop(Arc::new(AtomicBool::new(true)));
        let is_wanted = wanted.0.clone();
        let work = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let mut done = Vec::new();
            while is_wanted.load(Ordering::Relaxed) {
                match caught("computing", || part(&lease.loaded, done.len(), &is_wanted)) {
                    Ok(Some(Ok(result))) => done.push(result),
                    // Repeat this part after a reload.
                    Ok(Some(Err(error))) | Err(error) => lease.reload(error)?,
                    Ok(None) => break,
                }
            }
            Ok(done)
        });
        work.await.unwrap_or_else(|_| Err(broken()))
    }
}

impl App {
    /// Reserves bytes of the shared limit until the request holds `n_bytes`; the first [`SMALL_BODY`] are free.
    ///
    /// # Errors
    /// `busy` if so many are not left.
    pub fn hold(&self, held: &mut HeldBytes, n_bytes: usize) -> Result<(), ApiError> {
        self.reserve(&self.bodies, held, n_bytes)
    }

    /// Reserves bytes of a sound's samples, in a limit of their own: they wait for minutes, bodies do not.
    ///
    /// # Errors
    /// `busy` if so many are not left.
    pub fn hold_sound(&self, n_bytes: usize) -> Result<HeldBytes, ApiError> {
        let mut held = None;
        self.reserve(&self.sounds, &mut held, n_bytes)?;
        Ok(held)
    }

    fn reserve(&self, limit: &Arc<Semaphore>, held: &mut HeldBytes, n_bytes: usize) -> Result<(), ApiError> {
        // A request above the whole limit needs all of it.
        let n_bytes = n_bytes.saturating_sub(SMALL_BODY).min(self.limits.bodies_bytes);
        let n_held = held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let n_more = u32::try_from(n_bytes.saturating_sub(n_held)).unwrap_or(u32::MAX);
        if n_more == 0 {
            return Ok(());
        }
        let more = limit.clone().try_acquire_many_owned(n_more).map_err(|_| {
            let message = "the server's memory for request bodies is in use; retry later";
            ApiError::refusal(StatusCode::TOO_MANY_REQUESTS, "busy", message)
        })?;
        match held {
            Some(held) => held.merge(more),
            None => *held = Some(more),
        }
        Ok(())
    }

    /// Checks a request's headers, reads its body of at most `most` bytes, and reserves these. `kind`: the media type that
    /// it must have if it has one.
    ///
    /// # Errors
    /// `unsupported_media_type`, `request_too_large`, `busy`, `request_timeout`, `invalid_body`.
    pub async fn receive(&self, request: Request, kind: Option<&str>, most: usize) -> Result<Received, ApiError> {
        let since = request.extensions().get().cloned();
        let since = since.unwrap_or_else(|| {
            RequestContext::new(Instant::now(), TraceContext::default(), None, SharedRecord::default())
        });
        check_headers(request.headers(), kind, most)?;
        let _awaits_body = request.extensions().get::<Arc<AtWork>>().cloned().map(AtWork::awaits_body);
        let (body, held) = self.read(request.into_body(), most).await?;
        Ok(Received { since, body, held })
    }

    /// Reads a body and reserves its bytes.
    async fn read(&self, body: Body, most: usize) -> Result<(Vec<u8>, HeldBytes), ApiError> {
        let mut body = Limited::new(body, most);
        let mut read = Vec::new();
        let mut held = None;
        let all = async {
            while let Some(frame) = body.frame().await {
                let frame = match frame {
                    Ok(frame) => frame,
                    Err(error) if error.is::<LengthLimitError>() => return Err(too_large(most)),
                    Err(_) => {
                        let message = "the request's body ended early";
                        return Err(ApiError::refusal(StatusCode::BAD_REQUEST, "invalid_body", message));
                    }
                };
                let Some(data) = frame.data_ref() else { continue };
                self.hold(&mut held, read.len() + data.len())?;
                read.extend_from_slice(data);
            }
            Ok(())
        };
        match timeout(self.limits.body_time, all).await {
            Ok(all) => all?,
            Err(_) => {
                let message = "the request's body did not arrive in time";
                return Err(ApiError::refusal(StatusCode::REQUEST_TIMEOUT, "request_timeout", message));
            }
        }
        Ok((read, held))
    }

    /// Checks the number of a text's JSON values before they are parsed, and reserves their bytes.
    fn hold_values(&self, held: &mut HeldBytes, text: &[u8]) -> Result<(), ApiError> {
        let n_values = values_of(text);
        if n_values > self.limits.values {
            let expected = format!("at most {}", self.limits.values);
            let message = format!("the request has {n_values} JSON values, expected {expected}");
            return Err(ApiError::refusal(StatusCode::BAD_REQUEST, "invalid_value", message));
        }
        self.hold(held, text.len() + n_values * VALUE_BYTES)
    }
}

/// Bytes of the shared limit that a request holds.
pub type HeldBytes = Option<OwnedSemaphorePermit>;

/// A request whose body has been read.
pub struct Received {
    pub since: RequestContext,
    pub body: Vec<u8>,
    pub held: HeldBytes,
}

/// A part of what an encoder or a speech model computes for a request.
pub trait Computed: Send + Sized + 'static {
    /// Tokens that all parts have read and written.
    fn usage(parts: &[Self]) -> Usage;
}

/// Refuses log probabilities of prompts that take more memory than an answer.
fn check_reported(asks: &[PreparedPrompt], most: usize, echoes: bool) -> Result<(), ApiError> {
    /// Of a token, or one of the most likely ones, as JSON.
    const EACH: usize = 512;
    let n_bytes = asks.iter().map(|ask| match ask.choices.options.prompt_logprobs {
        Some(n_top) => ask.ids.len() * (n_top as usize + 2) * EACH * ask.choices.seeds.len(),
        None => 0,
    });
    match n_bytes.sum::<usize>() > most {
        true => {
            let message = format!(
                "the log probabilities of all prompts take more than the {most} bytes of an answer; ask for fewer, or \
                 send fewer prompts at a time"
            );
            let is_echo = |ask: &PreparedPrompt| ask.choices.options.logprobs == ask.choices.options.prompt_logprobs;
            let field = if echoes && asks.iter().any(is_echo) { "logprobs" } else { "prompt_logprobs" };
            Err(ApiError { message, ..ApiError::invalid(field, None, "") })
        }
        false => Ok(()),
    }
}

/// Set while the client waits.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

pub fn broken() -> ApiError {
    ApiError::refusal(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the server failed to handle this request")
}

/// How the engine runs a request, and what it reports.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// Higher priorities start first.
    pub priority: i32,
    /// Whether the prompt's cached beginning is used.
    pub reads_cache: bool,
    /// Whether answers have the ids of their tokens.
    pub reports_ids: bool,
    /// Whether the token that ended an answer is among those with log probabilities.
    pub reports_ends: bool,
}

impl Default for RunOptions {
    fn default() -> Self {
        RunOptions { priority: 0, reads_cache: true, reports_ids: false, reports_ends: false }
    }
}

/// What is known of a request besides its body.
#[derive(Clone)]
pub struct RequestContext {
    pub at: Instant,
    pub trace: TraceContext,
    /// Identifies the API key without revealing it.
    pub key: Option<String>,
    /// See [`Request::cache_salt`](tilewright::engine::Request::cache_salt): API key and field of that name.
    pub cache_salt: Option<String>,
    pub record: SharedRecord,
    /// Fields that were ignored, on a lenient server.
    pub ignored: Option<Arc<IgnoredFields>>,
    pub run: RunOptions,
}

impl RequestContext {
    /// The context of a request that arrived now or before, with this key's identifier.
    pub fn new(at: Instant, trace: TraceContext, key: Option<String>, record: SharedRecord) -> RequestContext {
        RequestContext { at, trace, cache_salt: key.clone(), key, record, ignored: None, run: RunOptions::default() }
    }

    /// The same with other options.
    pub fn with(&self, run: RunOptions) -> RequestContext {
        RequestContext { run, ..self.clone() }
    }

    /// Maximum length of the field, in bytes.
    const MAX_SALT_BYTES: usize = 256;

    fn salted(mut self, request: &Json) -> Result<RequestContext, ApiError> {
        let Some(fields) = Fields::of(request, None).ok().filter(|fields| fields.get("cache_salt").is_some()) else {
            return Ok(self);
        };
        match fields.text("cache_salt")? {
            Some(salt) if (1..=Self::MAX_SALT_BYTES).contains(&salt.len()) => {
                // Keys are hexadecimal digests, so no two pairs of key and field give the same salt.
                self.cache_salt = Some(format!("{} {salt}", self.cache_salt.unwrap_or_default()));
                Ok(self)
            }
            _ => Err(fields.wrong("cache_salt", &format!("a text of 1 to {} bytes", Self::MAX_SALT_BYTES))),
        }
    }
}

/// A request's JSON.
pub struct ApiRequest {
    pub json: Json,
    pub since: RequestContext,
    /// The bytes it reserved.
    _held: HeldBytes,
}

impl ApiRequest {
    /// The fields.
    ///
    /// # Errors
    /// If the request is not an object.
    pub fn fields(&self) -> Result<Fields<'_>, ApiError> {
        Fields::of(&self.json, self.since.ignored.as_deref())
    }
}

impl FromRequest<Arc<App>> for ApiRequest {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<ApiRequest, ApiError> {
        let kind = request.uri().path().starts_with("/v1/").then_some(JSON);
        let Received { since, body, mut held } = app.receive(request, kind, app.limits.body_bytes).await?;
        app.hold_values(&mut held, &body)?;
        let parse = |body: &[u8]| {
            // A byte order mark is not part of the text.
            let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
            serde_json::from_slice(body).map_err(|error| {
                let message = format!("the request is not valid JSON: {error}");
                ApiError::refusal(StatusCode::BAD_REQUEST, "invalid_json", message)
            })
        };
        let json = match body.len() {
            ..SMALL_BODY => parse(&body),
            _ => app.prepare(move || parse(&body)).await,
        };
        let json = json?;
        Ok(ApiRequest { since: since.salted(&json)?, json, _held: held })
    }
}

/// Refuses a body by its headers.
fn check_headers(headers: &HeaderMap, expected: Option<&str>, most: usize) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("unreadable"));
    let media = |message: String| {
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Err(ApiError::refusal(status, "unsupported_media_type", message))
    };
    if let (Some(kind), Some(expected)) = (text(header::CONTENT_TYPE), expected)
        && !kind.trim_start().to_ascii_lowercase().starts_with(expected)
    {
        let kind: String = kind.chars().take(60).collect();
        return media(format!("the request is {kind}, expected {expected}"));
    }
    if let Some(encoding) = text(header::CONTENT_ENCODING)
        && encoding != "identity"
    {
        return media("the request is compressed, expected no Content-Encoding".into());
    }
    match text(header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok()) {
        Some(length) if length > most as u64 => Err(too_large(most)),
        _ => Ok(()),
    }
}

/// Counts a text's JSON values without parsing it, with one too many for each empty list or object. For invalid JSON
/// the count is arbitrary.
fn values_of(text: &[u8]) -> usize {
    let (mut n, mut in_string, mut is_escaped) = (1, false, false);
    for byte in text {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = in_string,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' if !in_string => n += 1,
            _ => {}
        }
    }
    n
}

fn too_large(most: usize) -> ApiError {
    let message = format!("the request has more than {most} bytes");
    ApiError::refusal(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
}

/// An answer's id, time and model.
pub struct AnswerMetadata {
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
}

impl AnswerMetadata {
    /// A head with a new id, which begins with `prefix`.
    pub fn new(prefix: &str, model: &str) -> AnswerMetadata {
        AnswerMetadata { id: new_id(prefix), created: now().as_secs(), model: model.to_owned() }
    }

    /// The first fields of an object.
    pub fn object(&self, kind: &str) -> Map<String, Json> {
        let AnswerMetadata { id, created, model } = self;
        let fields: [(&str, Json); 4] = [
            ("id", id.as_str().into()),
            ("object", kind.into()),
            ("created", (*created).into()),
            ("model", model.as_str().into()),
        ];
        fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// A new id with this beginning.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_seed(), random_seed())
}

/// The time since 1970.
pub fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the count with the parsed values.
    #[test]
    fn json_values_are_counted_before_parsing() {
        fn n_read(value: &Json) -> usize {
            match value {
                Json::Array(list) => 1 + list.iter().map(n_read).sum::<usize>(),
                Json::Object(object) => 1 + object.values().map(n_read).sum::<usize>(),
                _ => 1,
            }
        }
        for text in ["1", "[1, 2, [3, {}]]", r#"{"a": [{"b,[{": "\\"}, "\",["], "c": {"d": null}}"#, " [[[[1]]]] "] {
            let read: Json = serde_json::from_str(text).unwrap();
            let n_empty = text.matches("{}").count();
            assert_eq!(values_of(text.as_bytes()), n_read(&read) + n_empty, "{text}");
        }
    }
}
