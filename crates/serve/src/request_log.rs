//! Lines of output about requests: one for each request if asked for, and one for each kind of refusal. They never
//! contain what a request says.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use serde_json::{Value as Json, json};
use tilewright::engine::Usage;

use super::LogSink;
use super::app::new_id;
use super::errors::ApiError;

/// Refusals of one kind are reported once in this time, the others counted.
const INTERVAL: Duration = Duration::from_secs(10);

/// Kinds of refusals that are counted at a time.
const MAX_KINDS: usize = 64;

/// Bytes of a path in a line.
const MAX_PATH: usize = 120;

/// What is known of a request and its answer, without their text. Endpoints fill it in.
#[derive(Debug, Default)]
pub struct RequestRecord {
    /// Sent back as `x-request-id`.
    pub id: String,
    peer: Option<IpAddr>,
    model: OnceLock<String>,
    first_token: OnceLock<Duration>,
    usage: OnceLock<Usage>,
}

impl RequestRecord {
    /// A record of a request from an address, if known.
    pub fn new(id: String, peer: Option<IpAddr>) -> RequestRecord {
        RequestRecord { id, peer, ..RequestRecord::default() }
    }

    /// Sets the model that answers.
    pub fn answered_by(&self, model: &str) {
        self.model.get_or_init(|| model.to_owned());
    }

    /// Sets the time to the first token.
    pub fn first_token(&self, after: Duration) {
        let _ = self.first_token.set(after);
    }

    /// Sets the tokens of the prompts and answers.
    pub fn used(&self, usage: Usage) {
        let _ = self.usage.set(usage);
    }

    /// The line of an ended request.
    pub fn line(&self, method: &str, path: &str, status: u16, code: Option<&str>, time: Duration) -> String {
        let mut line = json!({
            "time": super::app::now().as_secs_f64(),
            "id": self.id,
            "method": method,
            "path": shortened(path),
            "status": status,
            "ms": time.as_millis() as u64,
        });
        let mut add = |name: &str, value: Json| line[name] = value;
        if let Some(peer) = self.peer {
            add("client", peer.to_string().into());
        }
        if let Some(model) = self.model.get() {
            add("model", model.as_str().into());
        }
        if let Some(first) = self.first_token.get() {
            add("first_token_ms", (first.as_millis() as u64).into());
        }
        if let Some(usage) = self.usage.get() {
            add("prompt_tokens", usage.prompt_tokens.into());
            add("cached_tokens", usage.cached_tokens.into());
            add("completion_tokens", usage.completion_tokens.into());
        }
        if let Some(code) = code {
            add("error", code.into());
        }
        line.to_string()
    }
}

fn shortened(path: &str) -> &str {
    let end = (0..=MAX_PATH.min(path.len())).rev().find(|&end| path.is_char_boundary(end));
    &path[..end.unwrap_or(0)]
}

/// The name of a field without the places in lists.
fn plain_name(param: &str) -> String {
    let mut depth = 0;
    let mut name = String::new();
    for letter in shortened(param).chars() {
        match letter {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ if depth > 0 => {}
            letter if letter.is_ascii_alphanumeric() || "._".contains(letter) => name.push(letter),
            _ => return "a field".into(),
        }
    }
    name
}

/// Reports why requests are refused: each kind at once, then how many more there were.
pub struct Refusals {
    events: LogSink,
    kinds: Mutex<HashMap<String, (Instant, u64)>>,
}

impl Refusals {
    pub fn new(events: LogSink) -> Refusals {
        Refusals { events, kinds: Mutex::default() }
    }

    /// Reports a refused request. Messages that may quote a request are left out, and so are names of unknown fields.
    pub fn refused(&self, record: &RequestRecord, error: &ApiError) {
        let ApiError { status, code, message, param } = error;
        let is_safe = status.is_server_error()
            || matches!(*status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::TOO_MANY_REQUESTS);
        let why = match (is_safe, param) {
            (true, _) => message.clone(),
            (false, Some(param)) if *code == "invalid_value" => format!("at `{}`", plain_name(param)),
            (false, _) if *code == "unknown_url" => "(--log-requests shows the path)".into(),
            (false, _) => String::new(),
        };
        let kind = format!("{} {code} {why}", status.as_u16());
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, more)) = kinds.get_mut(&kind) {
            *more += 1;
            return;
        }
        if kinds.len() >= MAX_KINDS {
            return;
        }
        kinds.insert(kind.clone(), (Instant::now(), 0));
        drop(kinds);
        let from = record.peer.map(|peer| format!(" from {peer}")).unwrap_or_default();
        (self.events)(&format!("refused {}{from}: {}", record.id, kind.trim_end()));
    }

    /// Reports the refusals counted since their first line.
    pub fn flush(&self) {
        let mut over = Vec::new();
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner).retain(|kind, (since, more)| {
            let is_over = since.elapsed() >= INTERVAL;
            if is_over && *more > 0 {
                over.push(format!("refused {more} more: {}", kind.trim_end()));
            }
            !is_over
        });
        over.iter().for_each(|line| (self.events)(line));
    }
}

/// A request's id: the client's if it is short and printable, else a new one.
pub fn request_id(given: Option<&str>) -> String {
    let is_valid = |id: &&str| (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    given.filter(is_valid).map_or_else(|| new_id("req_"), str::to_owned)
}

/// Shared by a request's endpoint and the middleware.
pub type SharedRecord = Arc<RequestRecord>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_one_kind_are_reported_once_and_counted() {
        let lines: Arc<Mutex<Vec<String>>> = Arc::default();
        let sink = lines.clone();
        let refusals = Refusals::new(Arc::new(move |line: &str| sink.lock().unwrap().push(line.into())));
        let record = RequestRecord::new("one".into(), None);
        let secret = ApiError::invalid("messages[3].role", Some(&"a secret".into()), "a list");
        let unknown = ApiError::unsupported("a secret\nname", "a secret");
        refusals.refused(&record, &unknown);
        for _ in 0..3 {
            refusals.refused(&record, &secret);
        }
        refusals.refused(&record, &ApiError::refusal(StatusCode::FORBIDDEN, "host_not_allowed", "the host `x`"));
        refusals.flush();
        assert_eq!(
            *lines.lock().unwrap(),
            [
                "refused one: 400 unsupported_value",
                "refused one: 400 invalid_value at `messages.role`",
                "refused one: 403 host_not_allowed the host `x`"
            ]
        );
        let ago = Instant::now().checked_sub(INTERVAL).unwrap();
        refusals.kinds.lock().unwrap().values_mut().for_each(|(since, _)| *since = ago);
        refusals.flush();
        assert_eq!(lines.lock().unwrap()[3..], ["refused 2 more: 400 invalid_value at `messages.role`"]);
    }

    #[test]
    fn request_ids_are_the_clients_unless_unprintable() {
        assert_eq!(request_id(Some("abc-1")), "abc-1");
        for id in [None, Some(""), Some("a b"), Some("\u{1b}[2J"), Some(&*"x".repeat(129))] {
            assert!(request_id(id).starts_with("req_"), "{id:?}");
        }
    }
}
