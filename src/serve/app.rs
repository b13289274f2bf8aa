//! What all endpoints have in common: the server's state, and how a request is read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::{Map, Value as Json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::Tell;
use super::answers::{Answers, Ask};
use super::connections::AtWork;
use super::conversation::Conversation;
use super::embeddings::Vectors;
use super::errors::ApiError;
use super::fields::Fields;
use super::guard::Guard;
use super::limits::Limits;
use super::metrics::Metrics;
use super::models::{Decoder, Lease, Loaded, Models};
use super::page::Page;
use super::telemetry::{Telemetry, Trace};
use crate::engine::Usage;
use crate::error::Error;
use crate::panics::caught;

/// Bodies below this are parsed where they are read: it takes less than to hand them to a thread. So much of each body is there
/// to be held whatever others hold, so that usual requests come through.
const SMALL_BODY: usize = 64 << 10;

/// Bytes that a JSON value takes in memory at most, without its text: as a member of an object, with its name.
const VALUE_BYTES: usize = 128;

/// The server.
pub struct App {
    pub models: Models,
    pub limits: Limits,
    pub guard: Guard,
    pub metrics: Arc<Metrics>,
    pub page: Option<Page>,
    /// Told of each request: its method, endpoint, status and time. Nothing of what it says.
    pub log: Option<Tell>,
    /// Sends traces of requests.
    pub telemetry: Telemetry,
    /// Threads that parse large bodies and make prompts.
    pub preparing: Arc<Semaphore>,
    /// Of those threads the ones for what can take seconds, grammars and long prompts: others are left for everybody else.
    pub slow: Arc<Semaphore>,
    /// Bytes of bodies, and of what is made of them, that may yet be held.
    pub bodies: Arc<Semaphore>,
}

/// Whether a prompt of so many bytes may take long to encode.
pub fn is_long(n_bytes: usize) -> bool {
    n_bytes > 64 << 10
}

impl App {
    /// Does what takes time by a request's size, in a thread of its own, so many at a time.
    ///
    /// # Errors
    /// Those of the work.
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

    /// Has a model answer a conversation.
    ///
    /// # Errors
    /// Those of [`Models::get`], [`Conversation::prepare`] and [`Answers::begin`].
    pub async fn converse(&self, model: &str, conversation: Conversation, since: &Since) -> Result<Answers, ApiError> {
        let lease = self.models.get(model).await?;
        self.answer_conversation(lease, since, conversation).await
    }

    /// The same of a model that is there.
    ///
    /// # Errors
    /// Those of [`Conversation::prepare`] and [`Answers::begin`].
    pub async fn answer_conversation(
        &self,
        lease: Lease,
        since: &Since,
        conversation: Conversation,
    ) -> Result<Answers, ApiError> {
        let is_slow = conversation.has_grammar() || is_long(conversation.prompt_bytes());
        self.answer(lease, since, is_slow, move |decoder| Ok(vec![conversation.prepare(decoder)?])).await
    }

    /// Has a model answer prompts that are made in a thread, unless its queue is full already: where many ask for more than can be
    /// answered, their prompts would take time from those that are. `is_slow` says whether that reads a grammar or makes a prompt that
    /// [`is_long`].
    ///
    /// # Errors
    /// `busy` if the queue is full; those of the prompts and of [`Answers::begin`].
    pub async fn answer(
        &self,
        lease: Lease,
        since: &Since,
        is_slow: bool,
        asks: impl FnOnce(&Decoder) -> Result<Vec<Ask>, ApiError> + Send + 'static,
    ) -> Result<Answers, ApiError> {
        let decoder = lease.decoder()?;
        if let Err(error) = decoder.engine.expect_room() {
            let error = ApiError::from(error);
            since.trace.operation(lease.entry.name(), 1).failed(error.code);
            return Err(error);
        }
        let (metrics, since, deadline) = (self.metrics.clone(), since.clone(), since.at + self.limits.answer_time);
        let turn = match is_slow {
            true => Some(self.slow.clone().acquire_owned().await),
            false => None,
        };
        let work = move || {
            let _turn = turn;
            Answers::begin(lease, metrics, asks(&decoder)?, &since, deadline)
        };
        self.prepare(work).await
    }

    /// Has an encoder compute, in a thread and in parts, so that little is computed for a client that is gone. What was computed
    /// is for the parts one after the other. Where the device is lost the encoder is loaded again, and the part computed again.
    ///
    /// # Errors
    /// `busy` if as many requests wait as may; those of the work.
    pub async fn compute(
        &self,
        lease: Lease,
        trace: &Trace,
        part: impl FnMut(&Loaded, usize) -> Option<Result<Vectors, Error>> + Send + 'static,
    ) -> Result<Vec<Vectors>, ApiError> {
        let mut operation = trace.operation(lease.entry.name(), 1);
        let mut queued = operation.queued(0);
        let done = self.compute_in_turn(lease, || queued.end(Usage::default(), None), part).await;
        match &done {
            Ok(parts) => {
                let prompt_tokens = || parts.iter().map(|(_, n)| n).sum();
                operation.used(|| Usage { prompt_tokens: prompt_tokens(), ..Usage::default() });
                operation.done();
            }
            Err(error) => operation.failed(error.code),
        }
        done
    }

    async fn compute_in_turn(
        &self,
        mut lease: Lease,
        begins: impl FnOnce(),
        mut part: impl FnMut(&Loaded, usize) -> Option<Result<Vectors, Error>> + Send + 'static,
    ) -> Result<Vec<Vectors>, ApiError> {
        let entry = lease.entry.clone();
        let Ok(_room) = entry.batches.try_acquire() else {
            return Err(Error::Busy { n_waiting: self.limits.batches }.into());
        };
        let turn = entry.computing.clone().acquire_owned().await;
        begins();
        let wanted = Wanted(Arc::new(AtomicBool::new(true)));
        let is_wanted = wanted.0.clone();
        let work = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let mut done = Vec::new();
            while is_wanted.load(Ordering::Relaxed) {
                match caught("computing", || part(&lease.loaded, done.len())) {
                    Ok(Some(Ok(result))) => done.push(result),
                    // This part once more, if that helps.
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
    /// Takes bytes from those that all requests may hold, until a request has so many; its first ones are free.
    fn hold(&self, held: &mut Option<OwnedSemaphorePermit>, n_bytes: usize) -> Result<(), ApiError> {
        // What alone is more than all may hold has to wait for all others.
        let n_bytes = n_bytes.saturating_sub(SMALL_BODY).min(self.limits.bodies_bytes);
        let n_held = held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let n_more = u32::try_from(n_bytes.saturating_sub(n_held)).unwrap_or(u32::MAX);
        if n_more == 0 {
            return Ok(());
        }
        let more = self.bodies.clone().try_acquire_many_owned(n_more).map_err(|_| {
            let message = "requests have as many bytes as the server may hold; ask again later";
            ApiError::refusal(StatusCode::TOO_MANY_REQUESTS, "busy", message)
        })?;
        match held {
            Some(held) => held.merge(more),
            None => *held = Some(more),
        }
        Ok(())
    }

    /// Reads a body, and takes its bytes from those that all bodies together may have.
    async fn read(&self, body: Body) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ApiError> {
        let most = self.limits.body_bytes;
        let mut body = Limited::new(body, most);
        let mut read = Vec::new();
        let mut held: Option<OwnedSemaphorePermit> = None;
        let all = async {
            while let Some(frame) = body.frame().await {
                let frame = match frame {
                    Ok(frame) => frame,
                    Err(error) if error.is::<LengthLimitError>() => return Err(too_large(most)),
                    Err(_) => {
                        let message = "the request's body ends before its time";
                        return Err(ApiError::refusal(StatusCode::BAD_REQUEST, "invalid_body", message));
                    }
                };
                let Some(data) = frame.data_ref() else { continue };
                self.hold(&mut held, read.len() + data.len())?;
                read.extend_from_slice(data);
            }
            // What is made of it is known before it is made.
            let n_values = values_of(&read);
            if n_values > self.limits.values {
                let expected = format!("at most {}", self.limits.values);
                let message = format!("the request has {n_values} JSON values, expected {expected}");
                return Err(ApiError::refusal(StatusCode::BAD_REQUEST, "invalid_value", message));
            }
            self.hold(&mut held, read.len() + n_values * VALUE_BYTES)
        };
        match timeout(self.limits.body_time, all).await {
            Ok(all) => all?,
            Err(_) => {
                let message = "the request's body did not come in time";
                return Err(ApiError::refusal(StatusCode::REQUEST_TIMEOUT, "request_timeout", message));
            }
        }
        Ok((read, held))
    }
}

/// Whether somebody still waits.
struct Wanted(Arc<AtomicBool>);

impl Drop for Wanted {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

fn broken() -> ApiError {
    ApiError::refusal(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the server failed at this request")
}

/// When a request came, what its trace is made of, and whose beginnings it shares.
#[derive(Clone)]
pub struct Since {
    pub at: Instant,
    pub trace: Trace,
    /// See [`Request::cache_salt`](crate::engine::Request::cache_salt): of the key, and of the field of that name.
    pub cache_salt: Option<String>,
}

impl Since {
    /// Bytes of the field at most.
    const MOST_SALT_BYTES: usize = 256;

    fn salted(mut self, request: &Json) -> Result<Since, ApiError> {
        let Some(fields) = Fields::of(request).ok().filter(|fields| fields.get("cache_salt").is_some()) else {
            return Ok(self);
        };
        match fields.text("cache_salt")? {
            Some(salt) if (1..=Self::MOST_SALT_BYTES).contains(&salt.len()) => {
                // A key is told in hexadecimal digits, so that no two pairs of key and field are one text.
                self.cache_salt = Some(format!("{} {salt}", self.cache_salt.unwrap_or_default()));
                Ok(self)
            }
            _ => Err(fields.wrong("cache_salt", &format!("a text of 1 to {} bytes", Self::MOST_SALT_BYTES))),
        }
    }
}

/// A request's JSON.
pub struct Asked {
    pub json: Json,
    pub since: Since,
    /// Of the bytes that all requests may hold, those of this one.
    _held: Option<OwnedSemaphorePermit>,
}

impl Asked {
    /// Its fields.
    ///
    /// # Errors
    /// If it is no object.
    pub fn fields(&self) -> Result<Fields<'_>, ApiError> {
        Fields::of(&self.json)
    }
}

impl FromRequest<Arc<App>> for Asked {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Asked, ApiError> {
        let since = request.extensions().get().cloned();
        let since = since.unwrap_or_else(|| Since { at: Instant::now(), trace: Trace::default(), cache_salt: None });
        check_headers(request.headers(), request.uri().path().starts_with("/v1/"), app.limits.body_bytes)?;
        let awaits_body = request.extensions().get::<Arc<AtWork>>().cloned().map(AtWork::awaits_body);
        let (body, held) = app.read(request.into_body()).await?;
        drop(awaits_body);
        let parse = |body: &[u8]| {
            // A byte order mark is none of the text.
            let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
            serde_json::from_slice(body).map_err(|error| {
                let message = format!("the request is no JSON: {error}");
                ApiError::refusal(StatusCode::BAD_REQUEST, "invalid_json", message)
            })
        };
        let json = match body.len() {
            ..SMALL_BODY => parse(&body),
            _ => app.prepare(move || parse(&body)).await,
        };
        let json = json?;
        Ok(Asked { since: since.salted(&json)?, json, _held: held })
    }
}

/// Refuses a body by what its headers say of it.
fn check_headers(headers: &HeaderMap, is_typed: bool, most: usize) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or("unreadable"));
    let media = |message: String| {
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Err(ApiError::refusal(status, "unsupported_media_type", message))
    };
    if let Some(kind) = text(header::CONTENT_TYPE)
        && is_typed
        && !kind.trim_start().to_ascii_lowercase().starts_with("application/json")
    {
        let kind: String = kind.chars().take(60).collect();
        return media(format!("the request is {kind}, expected application/json"));
    }
    if let Some(encoding) = text(header::CONTENT_ENCODING)
        && encoding != "identity"
    {
        return media("the request is compressed, expected it plain".into());
    }
    match text(header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok()) {
        Some(length) if length > most as u64 => Err(too_large(most)),
        _ => Ok(()),
    }
}

/// JSON values of a text, counted without reading it: one more for each empty list or object than there are. Of what is no JSON it
/// is any number.
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

/// What identifies an answer.
pub struct Head {
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
}

impl Head {
    /// A head with a new id.
    pub fn new(kind: &str, model: &str) -> Head {
        let random = || super::sampling::random();
        Head {
            id: format!("{kind}-{:014x}{:014x}", random(), random()),
            created: now().as_secs(),
            model: model.to_owned(),
        }
    }

    /// The beginning of an object.
    pub fn object(&self, kind: &str) -> Map<String, Json> {
        let Head { id, created, model } = self;
        let fields: [(&str, Json); 4] = [
            ("id", id.as_str().into()),
            ("object", kind.into()),
            ("created", (*created).into()),
            ("model", model.as_str().into()),
        ];
        fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// The time since 1970.
pub fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As many as there are in what is read.
    #[test]
    fn values_are_counted_before_they_are_made() {
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
