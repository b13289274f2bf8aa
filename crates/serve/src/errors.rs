//! Errors, and their format in each API.

use axum::Json as Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value as Json, json};
use tilewright::Error;

/// Seconds after which a client may retry if the server was busy.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// The code of a request for a thread in Anthropic's API. Its clients find it in the error's details.
pub const NO_THREADS: &str = "thread_unsupported_request";

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

    /// An error of the library, with the name that the request has for its option.
    pub fn of_option(error: Error, field: &str) -> ApiError {
        match &error {
            Error::Option { expected, found, .. } => {
                let message = format!("{field} is {found}, expected {expected}");
                ApiError { message, ..ApiError::invalid(field, None, "") }
            }
            _ => error.into(),
        }
    }

    /// Whether it is the server's fault.
    fn is_ours(&self) -> bool {
        self.status.is_server_error()
    }

    /// The response body in OpenAI's format.
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

/// The API in whose format an error is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorFormat {
    OpenAi,
    Ollama,
    Anthropic,
    LlamaCpp,
    Tei,
}

impl ErrorFormat {
    /// The format for a path.
    pub fn of(path: &str) -> ErrorFormat {
        match path {
            "/completion" | "/completions" | "/embedding" | "/tokenize" | "/detokenize" | "/apply-template"
            | "/infill" | "/props" | "/slots" => ErrorFormat::LlamaCpp,
            "/embed" | "/similarity" | "/decode" | "/embed_all" | "/embed_sparse" | "/predict" | "/info" => {
                ErrorFormat::Tei
            }
            _ if path.starts_with("/api/") => ErrorFormat::Ollama,
            _ if path.starts_with("/v1/messages") => ErrorFormat::Anthropic,
            _ => ErrorFormat::OpenAi,
        }
    }

    /// The status of an error.
    pub fn status(self, error: &ApiError) -> StatusCode {
        match (self, error.status, error.code) {
            (ErrorFormat::Tei, StatusCode::BAD_REQUEST, "context_length_exceeded") => StatusCode::PAYLOAD_TOO_LARGE,
            (ErrorFormat::Tei, StatusCode::BAD_REQUEST, _) => StatusCode::UNPROCESSABLE_ENTITY,
            _ => error.status,
        }
    }

    /// The body of an error. `request_id` is in Anthropic's.
    pub fn body(self, error: &ApiError, request_id: Option<&str>) -> Json {
        let message = &error.message;
        match self {
            ErrorFormat::OpenAi => error.body(),
            ErrorFormat::Ollama => json!({"error": message}),
            ErrorFormat::Anthropic => {
                let kind = match error.status {
                    StatusCode::UNAUTHORIZED => "authentication_error",
                    StatusCode::FORBIDDEN => "permission_error",
                    StatusCode::NOT_FOUND => "not_found_error",
                    StatusCode::REQUEST_TIMEOUT => "timeout_error",
                    StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
                    StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
                    StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
                    _ if error.is_ours() => "api_error",
                    _ => "invalid_request_error",
                };
                let mut body =
                    json!({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id});
                if error.code == NO_THREADS {
                    body["error"]["details"] = json!({"error_code": error.code, "unsupported": ["thread"]});
                }
                body
            }
            ErrorFormat::LlamaCpp => {
                let kind = match (error.status, error.code) {
                    (_, "context_length_exceeded") => "exceed_context_size_error",
                    (StatusCode::UNAUTHORIZED, _) => "authentication_error",
                    (StatusCode::FORBIDDEN, _) => "permission_error",
                    (StatusCode::NOT_FOUND, _) => "not_found_error",
                    (StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE, _) => "unavailable_error",
                    _ if error.is_ours() => "server_error",
                    _ => "invalid_request_error",
                };
                json!({"error": {"code": error.status.as_u16(), "message": message, "type": kind}})
            }
            ErrorFormat::Tei => {
                let kind = match (error.status, error.code) {
                    (StatusCode::TOO_MANY_REQUESTS, _) => "Overloaded",
                    (StatusCode::SERVICE_UNAVAILABLE, _) => "Unhealthy",
                    (StatusCode::FAILED_DEPENDENCY, _) => "Backend",
                    (_, "tokenizer") => "Tokenizer",
                    _ if error.is_ours() => "Backend",
                    _ => "Validation",
                };
                json!({"error": message, "error_type": kind})
            }
        }
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        match &error {
            &Error::Option { option, .. } => return ApiError::of_option(error, option),
            // What precedes a colon is the name of the constraint, which is that of the field.
            Error::Constraint { field, expected, found } => {
                let message = format!("{field} is {found}, expected {expected}");
                let param = field.split(": ").next().map(str::to_owned);
                return ApiError { param, ..ApiError::refusal(StatusCode::BAD_REQUEST, "constraint", message) };
            }
            Error::Tokenizer { field, expected, found } if field == "prompt" => {
                let message = format!("prompt is {found}, expected {expected}");
                return ApiError { message, ..ApiError::invalid("prompt", None, "") };
            }
            _ => {}
        }
        let (status, code) = match error.code() {
            "unsupported" => (StatusCode::BAD_REQUEST, "unsupported_value"),
            "context_full" => (StatusCode::BAD_REQUEST, "context_length_exceeded"),
            code @ ("template" | "tokenizer" | "operand") => (StatusCode::BAD_REQUEST, code),
            "busy" => (StatusCode::TOO_MANY_REQUESTS, "busy"),
            "stopped" => (StatusCode::SERVICE_UNAVAILABLE, "stopped"),
            code => (StatusCode::INTERNAL_SERVER_ERROR, code),
        };
        let message = match code {
            // These name files of the server.
            "io" | "format" | "truncated" | "config" | "hub" => {
                "the model cannot be loaded; the server's log says why".into()
            }
            "template" if matches!(&error, Error::Template { found, .. } if found == "missing") => {
                "the model has no chat template, so it only continues texts, as /v1/completions does; the server's \
                 operator can choose a template with --template NAME"
                    .into()
            }
            // A panic's message may contain text of other requests.
            "panic" | "stopped" => "the model failed; the server's log says why".into(),
            _ => error.to_string(),
        };
        ApiError::refusal(status, code, message)
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

/// A digest in hexadecimal digits.
pub fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
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
