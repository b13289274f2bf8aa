//! Streamed answers: server-sent events or lines of JSON.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use hyper::body::Frame;
use serde_json::Value as Json;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, timeout};

use super::errors::{ApiError, ErrorFormat};

/// Parts buffered for a slow client. Further output waits in the engine's stream.
const MAX_WAITING: usize = 16;

/// The format of parts.
#[derive(Clone, Copy)]
pub enum Style {
    /// `data: JSON`, with `data: [DONE]` at the end.
    Data,
    /// `event: TYPE`, and `data: JSON` with the same type in `type`.
    Named,
    /// As `Named`, in Anthropic's API.
    Messages,
    /// `data: JSON` without a mark at the end, in llama.cpp's API.
    Completion,
    /// A line of JSON.
    Lines,
}

impl Style {
    fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Style::Data | Style::Named | Style::Messages | Style::Completion => "text/event-stream",
            Style::Lines => "application/x-ndjson",
        })
    }

    fn part(self, json: &Json) -> Bytes {
        match (self, json.get("type").and_then(Json::as_str)) {
            (Style::Named | Style::Messages, Some(kind)) => format!("event: {kind}\ndata: {json}\n\n"),
            (Style::Lines, _) => format!("{json}\n"),
            _ => format!("data: {json}\n\n"),
        }
        .into()
    }

    /// An error after the status was sent: the last part before the end.
    fn failure(self, error: &ApiError) -> Bytes {
        let body = error.body();
        match self {
            Style::Data => [self.part(&body), self.end().unwrap_or_default()].concat().into(),
            Style::Named => {
                let field_of = |field: &str| body.pointer(&format!("/error/{field}")).cloned().unwrap_or_default();
                let (code, message, param) = (field_of("code"), field_of("message"), field_of("param"));
                self.part(&serde_json::json!({"type": "error", "code": code, "message": message, "param": param}))
            }
            Style::Messages => self.part(&ErrorFormat::Anthropic.body(error, None)),
            Style::Completion => self.part(&ErrorFormat::LlamaCpp.body(error, None)),
            Style::Lines => self.part(&ErrorFormat::Ollama.body(error, None)),
        }
    }

    fn end(self) -> Option<Bytes> {
        matches!(self, Style::Data).then(|| Bytes::from_static(b"data: [DONE]\n\n"))
    }

    /// A part without content, so that clients do not time out.
    fn keep_alive(self) -> Option<Bytes> {
        match self {
            Style::Data | Style::Named | Style::Completion => Some(Bytes::from_static(b": alive\n\n")),
            Style::Messages => Some(self.part(&serde_json::json!({"type": "ping"}))),
            Style::Lines => None,
        }
    }
}

/// Sends parts of an answer.
pub struct PartSender {
    style: Style,
    sender: mpsc::Sender<Result<Bytes, ApiError>>,
}

/// The stream is over: the client disconnected, or was sent an error.
pub struct Disconnected;

impl PartSender {
    /// Sends a part; waits for slow clients.
    ///
    /// # Errors
    /// [`Disconnected`].
    pub async fn send(&self, json: Json) -> Result<(), Disconnected> {
        self.sender.send(Ok(self.style.part(&json))).await.map_err(|_| Disconnected)
    }

    /// Sends an error as the last part.
    ///
    /// # Errors
    /// [`Disconnected`].
    async fn fail(&self, error: ApiError) -> Result<(), Disconnected> {
        self.sender.send(Err(error)).await.map_err(|_| Disconnected)
    }

    /// The value of a result; an error is sent as the last part, and ends the work.
    ///
    /// # Errors
    /// [`Disconnected`], which here means that there is nothing more to send.
    pub async fn checked<T>(&self, result: Result<T, ApiError>) -> Result<T, Disconnected> {
        match result {
            Ok(value) => Ok(value),
            Err(error) => {
                self.fail(error).await?;
                Err(Disconnected)
            }
        }
    }

    async fn finish(&self) -> Result<(), Disconnected> {
        match self.style.end() {
            Some(end) => self.sender.send(Ok(end)).await.map_err(|_| Disconnected),
            None => Ok(()),
        }
    }
}

/// A task that is aborted when dropped.
struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Streams the parts that `work` sends. The status waits for the first part, so that an invalid request gets its own,
/// but at most for `alive`; then a comment starts the answer. A client that disconnects aborts `work`.
///
/// # Errors
/// An error sent as the first part.
pub async fn streamed<W>(
    style: Style,
    alive: Duration,
    work: impl FnOnce(PartSender) -> W,
) -> Result<Response, ApiError>
where
    W: Future<Output = Result<PartSender, Disconnected>> + Send + 'static,
{
    let (sender, mut receiver) = mpsc::channel(MAX_WAITING);
    let parts = work(PartSender { style, sender });
    let work = AbortOnDrop(tokio::spawn(async move {
        if let Ok(parts) = parts.await {
            let _ = parts.finish().await;
        }
    }));
    let first = match timeout(alive, receiver.recv()).await {
        Ok(Some(first)) => Some(first?),
        Ok(None) => None,
        Err(_) => style.keep_alive(),
    };
    let mut clock = interval_at(Instant::now() + alive, alive);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let body = Events { style, first, receiver, clock, is_over: false, _work: work };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, style.content_type());
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // Stop proxies from buffering.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

/// The body of a streamed answer.
struct Events {
    style: Style,
    first: Option<Bytes>,
    receiver: mpsc::Receiver<Result<Bytes, ApiError>>,
    clock: Interval,
    is_over: bool,
    _work: AbortOnDrop,
}

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        let frame = |bytes| Poll::Ready(Some(Ok(Frame::data(bytes))));
        if let Some(first) = this.first.take() {
            return frame(first);
        }
        if this.is_over {
            return Poll::Ready(None);
        }
        match this.receiver.poll_recv(context) {
            Poll::Ready(Some(Ok(part))) => {
                this.clock.reset();
                return frame(part);
            }
            Poll::Ready(Some(Err(error))) => {
                this.is_over = true;
                return frame(this.style.failure(&error));
            }
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Pending => {}
        }
        match (this.clock.poll_tick(context), this.style.keep_alive()) {
            (Poll::Ready(_), Some(sign)) => frame(sign),
            _ => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients wait for the end, even after an error.
    #[test]
    fn event_stream_ends_after_an_error() {
        let error = ApiError::no_model("x", "`y`");
        let text = |style: Style| String::from_utf8(style.failure(&error).to_vec()).unwrap();
        let event = text(Style::Data);
        assert!(event.starts_with("data: {\"error\"") && event.ends_with("}}\n\ndata: [DONE]\n\n"), "{event}");
        assert!(text(Style::Named).starts_with("event: error\n"));
        assert!(text(Style::Messages).starts_with("event: error\ndata: {\"type\":\"error\",\"error\":{"));
        assert!(text(Style::Completion).starts_with("data: {\"error\":{\"code\":404,"));
        assert_eq!(text(Style::Lines).matches('\n').count(), 1);
    }
}
