//! Access control: hosts and origins that other sites' pages cannot forge, and API keys.

use std::net::{IpAddr, SocketAddr};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};
use tilewright::Error;

use super::errors::ApiError;

/// This machine's name.
const LOCAL: &str = "localhost";

/// Allowed request headers for preflights that name none.
const USUAL_HEADERS: HeaderValue = HeaderValue::from_static("authorization, content-type");

/// Response headers that a page may read.
const EXPOSED: &str = "retry-after, x-should-retry, x-tilewright-notice";

/// Checks requests before any other work.
///
/// A browser lets any page send requests to this machine, with the page's origin in `Origin`. Under DNS rebinding,
/// `Host` has the attacking page's own name. So the host must be one of the server's names, or a plain address if the
/// server listens on non-local addresses; the origin must be the server itself or an allowed one.
pub struct Guard {
    is_local: bool,
    hosts: Vec<String>,
    origins: Vec<String>,
    /// Digests of the keys.
    keys: Vec<[u8; 32]>,
    scheme: &'static str,
}

impl Guard {
    /// # Errors
    /// [`Error::Option`] for a missing key on an address that others reach, an empty key, or an invalid origin.
    pub fn new(
        address: SocketAddr,
        hosts: &[String],
        origins: &[String],
        keys: &[String],
        has_tls: bool,
    ) -> Result<Guard, Error> {
        let is_local = address.ip().is_loopback();
        let refused =
            |option, expected: &str, found: String| Error::Option { option, expected: expected.into(), found };
        if keys.is_empty() && !is_local {
            let expected = "a key, since other machines reach this address";
            return Err(refused("api_key", expected, format!("none for {address}")));
        }
        if keys.iter().any(|key| key.trim().is_empty()) {
            return Err(refused("api_key", "a key", "an empty one".into()));
        }
        for origin in origins {
            let uri: Option<Uri> = origin.parse().ok();
            let is_origin = uri.is_some_and(|uri| {
                let has_scheme = matches!(uri.scheme_str(), Some("http" | "https"));
                has_scheme && uri.authority().is_some() && !origin.ends_with('/') && matches!(uri.path(), "" | "/")
            });
            if !is_origin {
                return Err(refused("cors", "an origin such as https://example.org", origin.clone()));
            }
        }
        let digest = |key: &String| Sha256::digest(key.as_bytes()).into();
        Ok(Guard {
            is_local,
            hosts: hosts.iter().map(|host| host.to_ascii_lowercase()).collect(),
            origins: origins.iter().map(|origin| origin.to_ascii_lowercase()).collect(),
            keys: keys.iter().map(digest).collect(),
            scheme: if has_tls { "https" } else { "http" },
        })
    }

    /// Refuses a foreign host, and an origin that is neither the server nor allowed.
    ///
    /// # Errors
    /// `host_not_allowed`, `origin_not_allowed`.
    pub fn check_source(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        let forbidden = |code, message: String| ApiError::refusal(StatusCode::FORBIDDEN, code, message);
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok()).and_then(|host| host.parse::<Authority>().ok());
        let host = host.filter(|host| hosts.next().is_none() && !host.as_str().contains('@'));
        let Some(host) = host else {
            return Err(ApiError::refusal(
                StatusCode::BAD_REQUEST,
                "invalid_host",
                "the request has no valid Host header",
            ));
        };
        // The request line may also name a host.
        if uri.authority().is_some_and(|of_line| *of_line != host) || !self.is_own(host.host()) {
            let message = "this host is not allowed; the server's operator can allow it with --allow-host";
            return Err(forbidden("host_not_allowed", message.into()));
        }
        let own = format!("{}://{host}", self.scheme).to_ascii_lowercase();
        for origin in headers.get_all(header::ORIGIN) {
            let origin = origin.to_str().unwrap_or("null").to_ascii_lowercase();
            if origin != own && !self.is_named(&origin) {
                let message = "this origin is not allowed; the server's operator can allow it with --cors";
                return Err(forbidden("origin_not_allowed", message.into()));
            }
        }
        Ok(())
    }

    fn is_own(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        let address: Option<IpAddr> = host.trim_start_matches('[').trim_end_matches(']').parse().ok();
        match address {
            // An address is not a name, so it cannot be rebound.
            Some(address) => address.is_loopback() || !self.is_local || self.hosts.contains(&host),
            None => host == LOCAL || self.hosts.contains(&host),
        }
    }

    fn is_named(&self, origin: &str) -> bool {
        self.origins.iter().any(|named| named == origin)
    }

    /// Refuses a request without a valid key, if there are keys. Returns an identifier of the key that does not
    /// reveal it.
    ///
    /// # Errors
    /// `invalid_api_key`.
    pub fn check_key(&self, headers: &HeaderMap) -> Result<Option<String>, ApiError> {
        if self.keys.is_empty() {
            return Ok(None);
        }
        let given = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
        let scheme = b"bearer ";
        let key = match given.split_at_checked(scheme.len()) {
            Some((begin, key)) if begin.eq_ignore_ascii_case(scheme) => key,
            _ => &[],
        };
        // Digests have one length and all are compared, so that timing reveals nothing about the keys.
        let given: [u8; 32] = Sha256::digest(key).into();
        let is_right = self.keys.iter().fold(Choice::from(0), |found, own| found | own.ct_eq(&given));
        match bool::from(is_right) {
            true => Ok(Some(given.iter().map(|byte| format!("{byte:02x}")).collect())),
            false => {
                let message = "the request has no valid key; send it as `Authorization: Bearer KEY`";
                Err(ApiError::refusal(StatusCode::UNAUTHORIZED, "invalid_api_key", message))
            }
        }
    }

    /// Response headers for a preflight from an allowed origin; `None` for other requests.
    pub fn preflight(&self, method: &Method, headers: &HeaderMap) -> Option<HeaderMap> {
        let asked = header::ACCESS_CONTROL_REQUEST_METHOD;
        if *method != Method::OPTIONS || !headers.contains_key(asked) {
            return None;
        }
        let mut cors_headers = self.cors(headers);
        if !cors_headers.is_empty() {
            let wanted = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned().unwrap_or(USUAL_HEADERS);
            cors_headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
            cors_headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
            cors_headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        }
        Some(cors_headers)
    }

    /// Headers that let a page of an allowed origin read a response.
    pub fn cors(&self, headers: &HeaderMap) -> HeaderMap {
        let mut cors_headers = HeaderMap::new();
        let origin = headers.get(header::ORIGIN);
        let named =
            origin.filter(|origin| origin.to_str().is_ok_and(|origin| self.is_named(&origin.to_ascii_lowercase())));
        if let Some(origin) = named {
            cors_headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
            cors_headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
            cors_headers.insert(header::VARY, HeaderValue::from_name(HeaderName::from_static("origin")));
        }
        cors_headers
    }
}
