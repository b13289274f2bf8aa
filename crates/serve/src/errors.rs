//! Errors in OpenAI's format.

use axum::Json as Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value as Json, json};
use tilewright::Error;

/// Seconds after which a client may retry if the server was busy.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Length of a value in a message, in characters.
const MAX_SHOWN: usize = 60;

/// An error response.
#[derive(Clone, Debug)]
pub struct ApiError {
    pub status: StatusCode,
    pub code: &'static str,
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
}

impl ApiError {
    /// A refusal not caused by a field.
    pub fn refusal(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError { status, code, message: message.into(), param: None }
    }

    /// An invalid value.
    pub fn invalid(param: impl Into<String>, found: Option<&Json>, expected: &str) -> ApiError {
        let param = param.into();
        let message = format!("{param} is {}, expected {expected}", shown(found));
        ApiError { status: StatusCode::BAD_REQUEST, code: "invalid_value", message, param: Some(param) }
    }

    /// A field or value that the server does not support.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        let (param, message) = (Some(param.into()), message.into());
        ApiError { status: StatusCode::BAD_REQUEST, code: "unsupported_value", message, param }
    }

    /// An unknown model. `served`: the models that there are.
    pub fn no_model(name: &str, served: &str) -> ApiError {
        let message = format!("there is no model {}; this server has {served}", shown(Some(&name.into())));
        ApiError { status: StatusCode::NOT_FOUND, code: "model_not_found", message, param: Some("model".into()) }
    }

    /// Whether it is the server's fault.
    fn is_ours(&self) -> bool {
        self.status.is_server_error()
    }

    /// The response body.
    pub fn body(&self) -> Json {
        let ApiError { code, message, param, .. } = self;
        let kind = match self.status {
            _ if self.is_ours() => "server_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let param = match &error {
            Error::Option { option, .. } => Some((*option).to_owned()),
            _ => None,
        };
        let (status, code) = match error.code() {
            "option" => (StatusCode::BAD_REQUEST, "invalid_value"),
            "unsupported" => (StatusCode::BAD_REQUEST, "unsupported_value"),
            "context_full" => (StatusCode::BAD_REQUEST, "context_length_exceeded"),
            code @ ("constraint" | "template" | "tokenizer" | "operand") => (StatusCode::BAD_REQUEST, code),
            "busy" => (StatusCode::TOO_MANY_REQUESTS, "busy"),
            "stopped" => (StatusCode::SERVICE_UNAVAILABLE, "stopped"),
            code => (StatusCode::INTERNAL_SERVER_ERROR, code),
        };
        let message = match code {
            // These name files of the server.
            "io" | "format" | "truncated" | "config" | "hub" => {
                "the model cannot be loaded; the server's log says why".into()
            }
            // A panic's message may contain text of other requests.
            "panic" | "stopped" => "the model failed; the server's log says why".into(),
            _ => error.to_string(),
        };
        ApiError { status, code, message, param }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Body(self.body())).into_response();
        let headers = response.headers_mut();
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, RETRY_AFTER);
            }
            // A retry would fail the same way.
            _ => {
                let name = HeaderName::from_static("x-should-retry");
                headers.insert(name, HeaderValue::from_static("false"));
            }
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// A value, shortened for a message.
pub fn shown(value: Option<&Json>) -> String {
    let Some(value) = value else { return "missing".into() };
    let json = match value {
        // Avoid serialising a long string for its beginning.
        Json::String(text) => Json::from(text.chars().take(MAX_SHOWN + 1).collect::<String>()).to_string(),
        Json::Array(list) if list.len() > MAX_SHOWN => format!("a list of {}", list.len()),
        Json::Object(object) if object.len() > MAX_SHOWN => format!("an object of {} fields", object.len()),
        other => other.to_string(),
    };
    match json.chars().count() > MAX_SHOWN {
        true => json.chars().take(MAX_SHOWN).chain(['…']).collect(),
        false => json,
    }
}
