//! Requests to a hub, and the headers of its responses.

use std::io::{self, Read};
use std::net::IpAddr;
use std::time::Duration;

use ureq::http::header::{AUTHORIZATION, CONTENT_RANGE, ETAG, LOCATION, RANGE, RETRY_AFTER};
use ureq::http::{HeaderMap, Uri};
use ureq::{Agent, Body};

use super::digest::Digest;
use crate::error::HubError;

const USER_AGENT: &str = concat!("tilewright/", env!("CARGO_PKG_VERSION"));
const MAX_REDIRECTS: usize = 10;
/// Timeout for a silent server.
const SILENCE: Duration = Duration::from_secs(30);
/// Limit of a file listing, which is kept in memory. The largest repositories have some MiB.
const MAX_LIST_BYTES: u64 = 64 << 20;

/// An HTTP client for one hub.
pub(super) struct HubClient {
    agent: Agent,
    /// The hub's base URL, without a trailing slash.
    endpoint: String,
    /// Sent to the hub only.
    token: Option<String>,
}

/// The response to a file request.
pub(super) struct FileResponse {
    pub body: Body,
    /// Offset of a partial response's content in the file.
    pub range_start: Option<u64>,
    /// The file's properties from the headers of all redirects.
    pub said: FileProperties,
}

/// A file's properties from headers.
#[derive(Default)]
pub(super) struct FileProperties {
    pub size: Option<u64>,
    pub digest: Option<Digest>,
}

enum FetchStep {
    Done(Box<ureq::http::Response<Body>>),
    Redirect(HeaderMap, String),
}

impl HubClient {
    pub fn new(endpoint: &str, token: Option<String>) -> HubClient {
        let config = Agent::config_builder()
            .user_agent(USER_AGENT)
            .http_status_as_error(false)
            // Redirects are followed here, without the token.
            .max_redirects(0)
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE));
        let token = token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        HubClient { agent: config.build().into(), endpoint: endpoint.trim_end_matches('/').into(), token }
    }

    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Whether the token would be sent unencrypted over a network.
    pub fn tells_token_in_clear(&self) -> bool {
        let is_own_machine = |host: &str| {
            let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
            host == "localhost" || host.ends_with(".localhost") || address.is_ok_and(|address| address.is_loopback())
        };
        let is_clear = |(scheme, host, _): (String, String, u16)| scheme == "http" && !is_own_machine(&host);
        self.token.is_some() && origin(&self.endpoint).is_some_and(is_clear)
    }

    /// URL of a revision's file listing.
    pub fn list_url(&self, repo: &str, revision: &str) -> String {
        format!("{}/api/models/{repo}/revision/{}?blobs=true", self.endpoint, escaped(revision, ""))
    }

    pub fn file_url(&self, repo: &str, commit: &str, path: &str) -> String {
        format!("{}/{repo}/resolve/{commit}/{}", self.endpoint, escaped(path, "/"))
    }

    /// Fetches a file listing.
    pub fn list(&self, url: &str) -> Result<Vec<u8>, HubError> {
        let response = self.follow(url, |at| self.step(at, None), |_| {})?;
        let mut bytes = Vec::new();
        let read = response.into_body().into_reader().take(MAX_LIST_BYTES + 1).read_to_end(&mut bytes);
        read.map_err(|error| HubError::Connection { url: url.into(), message: error.to_string() })?;
        if bytes.len() as u64 > MAX_LIST_BYTES {
            return Err(HubError::Answer {
                url: url.into(),
                field: "the list of files".into(),
                expected: format!("at most {MAX_LIST_BYTES} bytes"),
                found: "more".into(),
            });
        }
        Ok(bytes)
    }

    /// A file's properties, without its content.
    pub fn describe(&self, url: &str) -> Result<FileProperties, HubError> {
        let mut at = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let request = self.agent.head(&at);
            let sent = self.authorised(request, &at).call();
            let response = sent.map_err(|error| connection(url, &error))?;
            match self.judge(url, &at, response)? {
                FetchStep::Redirect(_, next) if self.is_own(&next) => at = next,
                // The content's host may not know its digest.
                FetchStep::Redirect(headers, _) => return Ok(said(&headers)),
                FetchStep::Done(response) => return Ok(said(response.headers())),
            }
        }
        Err(too_many(url))
    }

    /// A file's content from `start`, or all of it if the server ignores ranges.
    pub fn file(&self, url: &str, start: u64) -> Result<FileResponse, HubError> {
        let mut properties = FileProperties::default();
        let response = self.follow(
            url,
            |at| self.step(at, Some(start).filter(|start| *start > 0)),
            |headers| {
                let FileProperties { size, digest } = linked(headers);
                properties.size = properties.size.or(size);
                properties.digest = properties.digest.take().or(digest);
            },
        )?;
        let range_start = match response.status().as_u16() {
            206 => Some(range_start(url, response.headers())?),
            _ => None,
        };
        Ok(FileResponse { range_start, body: response.into_body(), said: properties })
    }

    /// Sends a request and follows redirects; `on_redirect` receives each redirect's headers.
    fn follow(
        &self,
        url: &str,
        mut send: impl FnMut(&str) -> Result<ureq::http::Response<Body>, HubError>,
        mut on_redirect: impl FnMut(&HeaderMap),
    ) -> Result<ureq::http::Response<Body>, HubError> {
        let mut at = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            match self.judge(url, &at, send(&at)?)? {
                FetchStep::Done(response) => return Ok(*response),
                FetchStep::Redirect(headers, next) => {
                    on_redirect(&headers);
                    at = next;
                }
            }
        }
        Err(too_many(url))
    }

    fn step(&self, url: &str, start: Option<u64>) -> Result<ureq::http::Response<Body>, HubError> {
        let mut request = self.authorised(self.agent.get(url), url);
        if let Some(start) = start {
            request = request.header(RANGE, format!("bytes={start}-"));
        }
        request.call().map_err(|error| connection(url, &error))
    }

    /// Adds the token if the request goes to the hub itself.
    fn authorised<B>(&self, request: ureq::RequestBuilder<B>, url: &str) -> ureq::RequestBuilder<B> {
        match &self.token {
            Some(token) if self.is_own(url) => request.header(AUTHORIZATION, format!("Bearer {token}")),
            _ => request,
        }
    }

    /// Whether a URL is the hub's: same scheme, host and port.
    fn is_own(&self, url: &str) -> bool {
        let own = origin(&self.endpoint);
        own.is_some() && own == origin(url)
    }

    /// Classifies a response: content, redirect, or error.
    fn judge(&self, url: &str, at: &str, response: ureq::http::Response<Body>) -> Result<FetchStep, HubError> {
        let (status, headers) = (response.status().as_u16(), response.headers());
        let message = words(headers);
        let url = url.to_owned();
        match status {
            200 | 206 => Ok(FetchStep::Done(Box::new(response))),
            301 | 302 | 303 | 307 | 308 => {
                let location = headers.get(LOCATION).and_then(|location| location.to_str().ok()).unwrap_or_default();
                match next(at, location) {
                    Some(next) => Ok(FetchStep::Redirect(headers.clone(), next)),
                    None => Err(HubError::Answer {
                        url,
                        field: "location".into(),
                        expected: "an HTTPS address, or HTTP if the request used HTTP".into(),
                        found: format!("`{}`", clip(location)),
                    }),
                }
            }
            429 => Err(HubError::TooManyRequests { url, retry_after: retry_after(headers) }),
            // Other hosts have their own reasons, such as an expired URL.
            401 if self.is_own(at) => Err(HubError::Unauthorized {
                url,
                expected: match self.token {
                    Some(_) => {
                        "a valid token, or a repository that exists; the token is from HF_TOKEN or the file `token`"
                    }
                    None => "a token in HF_TOKEN, or a repository that exists and is public",
                },
                message,
            }),
            403 if self.is_own(at) => Err(HubError::Forbidden { url, message }),
            404 => Err(HubError::NotFound { url, message }),
            status => Err(HubError::Status { url, status, message }),
        }
    }
}

/// Scheme, host and port of a URL.
fn origin(url: &str) -> Option<(String, String, u16)> {
    let uri: Uri = url.parse().ok()?;
    let scheme = uri.scheme_str()?.to_ascii_lowercase();
    let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some((scheme, uri.host()?.to_ascii_lowercase(), port))
}

/// The target of a redirect. Never from HTTPS to plain HTTP.
fn next(at: &str, location: &str) -> Option<String> {
    let scheme = origin(at)?.0;
    let next = match location {
        absolute if absolute.starts_with("https://") || absolute.starts_with("http://") => absolute.to_owned(),
        other_host if other_host.starts_with("//") => format!("{scheme}:{other_host}"),
        path if path.starts_with('/') => {
            let authority = at.parse::<Uri>().ok()?.authority()?.to_string();
            format!("{scheme}://{authority}{path}")
        }
        _ => return None,
    };
    let is_safe = scheme != "https" || next.starts_with("https://");
    (is_safe && origin(&next).is_some()).then_some(next)
}

/// The properties of the linked content.
fn linked(headers: &HeaderMap) -> FileProperties {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    FileProperties {
        size: text("x-linked-size").and_then(|size| size.parse().ok()),
        digest: text("x-linked-etag").and_then(Digest::of_etag),
    }
}

/// The same, falling back to the response's own headers.
fn said(headers: &HeaderMap) -> FileProperties {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let FileProperties { size, digest } = linked(headers);
    FileProperties {
        size: size.or_else(|| text("content-length").and_then(|size| size.parse().ok())),
        digest: digest.or_else(|| text(ETAG.as_str()).and_then(Digest::of_etag)),
    }
}

/// The first byte of `Content-Range: bytes 5-9/10`.
fn range_start(url: &str, headers: &HeaderMap) -> Result<u64, HubError> {
    let text = headers.get(CONTENT_RANGE).and_then(|range| range.to_str().ok()).unwrap_or_default();
    let start = text.strip_prefix("bytes ").and_then(|range| range.split_once('-')?.0.trim().parse().ok());
    start.ok_or_else(|| HubError::Answer {
        url: url.into(),
        field: "content-range".into(),
        expected: "bytes FIRST-LAST/SIZE".into(),
        found: format!("`{}`", clip(text)),
    })
}

/// `Retry-After` in seconds; dates are ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// The hub's error message.
fn words(headers: &HeaderMap) -> String {
    headers.get("x-error-message").and_then(|message| message.to_str().ok()).map(clip).unwrap_or_default()
}

/// Makes foreign text safe to print.
fn clip(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// The error of a request without a response: transient or permanent.
fn connection(url: &str, error: &ureq::Error) -> HubError {
    let (url, message) = (url.into(), error.to_string());
    match error {
        // Untrusted certificates are reported like this.
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData => HubError::Request { url, message },
        ureq::Error::Io(_)
        | ureq::Error::Timeout(_)
        | ureq::Error::HostNotFound
        | ureq::Error::ConnectionFailed
        | ureq::Error::Protocol(_) => HubError::Connection { url, message },
        _ => HubError::Request { url, message },
    }
}

fn too_many(url: &str) -> HubError {
    HubError::Answer {
        url: url.into(),
        field: "the number of redirects".into(),
        expected: format!("at most {MAX_REDIRECTS}"),
        found: "more".into(),
    }
}

/// Percent-encodes a path; keeps the bytes in `kept`.
fn escaped(text: &str, kept: &str) -> String {
    let is_plain =
        |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || kept.as_bytes().contains(&byte);
    let escape = |byte: u8| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirect_is_resolved_and_a_downgrade_is_refused() {
        let at = "https://hub.example:8443/a/b?c";
        for (location, want) in [
            ("/x/y", Some("https://hub.example:8443/x/y")),
            ("//cdn.example/x", Some("https://cdn.example/x")),
            ("https://cdn.example/x?y=z", Some("https://cdn.example/x?y=z")),
            ("http://hub.example:8443/x", None),
            ("file:///etc/passwd", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(next(at, location).as_deref(), want, "{location}");
        }
    }

    #[test]
    fn hub_host_is_matched_by_scheme_name_and_port() {
        let client = HubClient::new("https://hub.example/", Some("secret".into()));
        for (url, is_own) in [
            ("https://hub.example/x", true),
            ("https://HUB.example:443/x", true),
            ("http://hub.example/x", false),
            ("https://hub.example:444/x", false),
            ("https://hub.example.other/x", false),
            ("https://other@hub.example.other/x", false),
            ("https://hub.example@other/x", false),
        ] {
            assert_eq!(client.is_own(url), is_own, "{url}");
        }
    }

    #[test]
    fn token_over_http_to_another_machine_is_unencrypted() {
        for (endpoint, is_told) in [
            ("http://hub.example", true),
            ("HTTP://10.0.0.1:8080/mirror", true),
            ("http://[2001:db8::1]", true),
            ("http://localhost.example", true),
            ("http://127.0.0.1.example", true),
            ("https://hub.example", false),
            ("http://localhost:8080", false),
            ("http://127.1.2.3", false),
            ("http://[::1]:8080", false),
        ] {
            assert_eq!(HubClient::new(endpoint, Some("secret".into())).tells_token_in_clear(), is_told, "{endpoint}");
            assert!(!HubClient::new(endpoint, None).tells_token_in_clear());
        }
    }

    #[test]
    fn url_paths_are_percent_encoded() {
        let client = HubClient::new("http://h", None);
        assert_eq!(client.file_url("a/b", "c", "d e/ü#?.gguf"), "http://h/a/b/resolve/c/d%20e/%C3%BC%23%3F.gguf");
        assert_eq!(client.list_url("a/b", "refs/pr/1"), "http://h/api/models/a/b/revision/refs%2Fpr%2F1?blobs=true");
    }
}
