//! Access control: hosts and origins that other sites' pages cannot forge, and API keys.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};
use tilewright::Error;

use super::errors::{ApiError, hex};
use super::files::{FileVersion, versions};
use super::{ServerOptions, Sinks};

/// This machine's name.
const LOCAL: &str = "localhost";

/// Allowed request headers for preflights that name none.
const USUAL_HEADERS: HeaderValue = HeaderValue::from_static("authorization, content-type, x-api-key");

/// The header in which Anthropic's clients send a key.
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Response headers that a page may read.
const EXPOSED: &str = "retry-after, x-request-id, x-should-retry, x-tilewright-ignored, x-tilewright-notice";

/// Allows every host or origin.
const ANY: &str = "*";

/// The end of an origin that allows every port.
const ANY_PORT: &str = ":*";

/// Characters of a refused name in a message.
const MAX_NAME: usize = 100;

fn refused(option: &'static str, expected: &str, found: String) -> Error {
    Error::Option { option, expected: expected.into(), found }
}

/// Digest of a key.
type KeyDigest = [u8; 32];

/// Checks requests before any other work.
///
/// A browser lets any page send requests to this machine, with the page's origin in `Origin`. Under DNS rebinding,
/// `Host` has the attacking page's own name. So the host must be one of the server's names, or a plain address if the
/// server listens on non-local addresses; the origin must be the server itself or an allowed one.
pub struct Guard {
    is_local: bool,
    hosts: Vec<String>,
    origins: Vec<String>,
    /// Keys that were given themselves.
    given_keys: Vec<String>,
    key_files: Vec<PathBuf>,
    keys: RwLock<KeyRing>,
    scheme: &'static str,
}

/// The keys in use, and the versions of the files that they are from.
struct KeyRing {
    digests: Vec<KeyDigest>,
    versions: Vec<FileVersion>,
}

impl Guard {
    /// # Errors
    /// [`Error::Option`] for a missing key on an address that others reach, an empty key, a key file without a key, or
    /// an invalid host or origin; [`Error::Io`] for a key file that cannot be read.
    pub fn new(address: SocketAddr, options: &ServerOptions) -> Result<Guard, Error> {
        let ServerOptions { api_keys, api_key_files, hosts, origins, is_open, tls, .. } = options;
        let is_local = address.ip().is_loopback();
        let keys = KeyRing::read(api_keys, api_key_files)?;
        if keys.digests.is_empty() && !is_local && !is_open {
            let expected =
                format!("a key, since other machines can reach {address}; --no-api-key allows requests without one");
            return Err(refused("api_key", &expected, "missing".into()));
        }
        for host in hosts {
            let name = host.strip_prefix("*.").unwrap_or(host);
            let is_name = host == ANY || (!name.contains(['*', '/', '@']) && name.parse::<Authority>().is_ok());
            if !is_name {
                let expected = "a name without a port such as chat.example.org, *.example.org, or *";
                return Err(refused("allow_host", expected, format!("`{host}`")));
            }
        }
        for origin in origins {
            let plain = origin.strip_suffix(ANY_PORT).unwrap_or(origin);
            let uri: Option<Uri> = plain.parse().ok();
            let is_origin = uri.is_some_and(|uri| {
                let has_scheme = matches!(uri.scheme_str(), Some("http" | "https"));
                let has_host = uri.authority().is_some_and(|authority| !authority.as_str().contains('*'));
                has_scheme && has_host && !plain.ends_with('/') && matches!(uri.path(), "" | "/")
            });
            if !is_origin && origin != ANY {
                let expected = "an origin such as https://example.org, http://localhost:* for any port, or *";
                return Err(refused("cors", expected, format!("`{origin}`")));
            }
        }
        Ok(Guard {
            is_local,
            hosts: hosts.iter().map(|host| host.to_ascii_lowercase()).collect(),
            origins: origins.iter().map(|origin| origin.to_ascii_lowercase()).collect(),
            given_keys: api_keys.clone(),
            key_files: api_key_files.clone(),
            keys: RwLock::new(keys),
            scheme: if tls.is_some() { "https" } else { "http" },
        })
    }

    /// Number of keys.
    pub fn n_keys(&self) -> usize {
        self.keys().digests.len()
    }

    fn keys(&self) -> RwLockReadGuard<'_, KeyRing> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads changed key files again. On an error the earlier keys stay in use until the files change again.
    pub fn refresh(&self, sinks: &Sinks) {
        let versions = versions(&self.key_files);
        if self.keys().versions == versions {
            return;
        }
        let read = KeyRing::read(&self.given_keys, &self.key_files);
        let mut keys = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(read) => {
                *keys = read;
                (sinks.events)(&format!("API keys were read again: {} in use", keys.digests.len()));
            }
            Err(error) => {
                keys.versions = versions;
                (sinks.report)(&format!("the previous API keys stay in use: {error}"));
            }
        }
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
            let name: String = host.host().chars().take(MAX_NAME).collect();
            let message =
                format!("the host `{name}` is not allowed; the server's operator can add --allow-host {name}");
            return Err(forbidden("host_not_allowed", message));
        }
        let own = format!("{}://{host}", self.scheme).to_ascii_lowercase();
        for origin in headers.get_all(header::ORIGIN) {
            let origin = origin.to_str().unwrap_or("null").to_ascii_lowercase();
            if origin != own && !self.is_named(&origin) {
                let origin: String = origin.chars().take(MAX_NAME).collect();
                let message =
                    format!("the origin `{origin}` is not allowed; the server's operator can add --cors {origin}");
                return Err(forbidden("origin_not_allowed", message));
            }
        }
        Ok(())
    }

    fn is_own(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        let address: Option<IpAddr> = host.trim_start_matches('[').trim_end_matches(']').parse().ok();
        match address {
            // An address is not a name, so it cannot be rebound.
            Some(address) => address.is_loopback() || !self.is_local || self.is_allowed(&host),
            None => host == LOCAL || self.is_allowed(&host),
        }
    }

    fn is_allowed(&self, host: &str) -> bool {
        self.hosts.iter().any(|allowed| match allowed.strip_prefix('*') {
            // `*`, or `*.example.org` for each name below it.
            Some(end) => host.strip_suffix(end).is_some_and(|begin| !begin.is_empty()),
            None => allowed == host,
        })
    }

    fn is_named(&self, origin: &str) -> bool {
        self.origins.iter().any(|named| match named.strip_suffix(ANY_PORT) {
            Some(begin) => origin.strip_prefix(begin).is_some_and(|port| {
                port.is_empty() || port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok())
            }),
            None => named == ANY || named == origin,
        })
    }

    /// Refuses a request without a valid key, if there are keys: `Authorization: Bearer KEY` or `x-api-key: KEY`.
    /// Returns an identifier of the key that does not reveal it.
    ///
    /// # Errors
    /// `invalid_api_key`.
    pub fn check_key(&self, headers: &HeaderMap) -> Result<Option<String>, ApiError> {
        let keys = self.keys();
        if keys.digests.is_empty() {
            return Ok(None);
        }
        let bytes = |name: &HeaderName| headers.get(name).map(HeaderValue::as_bytes).unwrap_or_default();
        let scheme = b"bearer ";
        let bearer = match bytes(&header::AUTHORIZATION).split_at_checked(scheme.len()) {
            Some((begin, key)) if begin.eq_ignore_ascii_case(scheme) => key,
            _ => &[],
        };
        // Clients that have two keys, such as one of a cloud service, send both.
        for key in [bearer, bytes(&X_API_KEY)] {
            // Digests have one length and all are compared, so that timing reveals nothing about the keys.
            let given: KeyDigest = Sha256::digest(key).into();
            let is_right = keys.digests.iter().fold(Choice::from(0), |found, own| found | own.ct_eq(&given));
            if bool::from(is_right) {
                return Ok(Some(hex(&given)));
            }
        }
        let message = "the request has no valid key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`";
        Err(ApiError::refusal(StatusCode::UNAUTHORIZED, "invalid_api_key", message))
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
            cors_headers
                .insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, HEAD, POST, DELETE"));
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

impl KeyRing {
    fn read(given: &[String], files: &[PathBuf]) -> Result<KeyRing, Error> {
        // Before reading, so that a later change is noticed.
        let versions = versions(files);
        if given.iter().any(|key| key.trim().is_empty()) {
            return Err(refused("api_key", "a key", "empty".into()));
        }
        let mut keys = given.to_vec();
        for file in files {
            keys.extend(keys_of(file)?);
        }
        let digests = keys.iter().map(|key| Sha256::digest(key.as_bytes()).into()).collect();
        Ok(KeyRing { digests, versions })
    }
}

/// The keys of a file, one per line. Lines that begin with `#` are comments.
fn keys_of(path: &Path) -> Result<Vec<String>, Error> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
    // Without the byte order mark that editors on Windows write.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let is_key = |line: &&str| !line.is_empty() && !line.starts_with('#');
    let keys: Vec<String> = text.lines().map(str::trim).filter(is_key).map(str::to_owned).collect();
    match keys.is_empty() {
        true => Err(refused("api_key_file", "a file with a key", format!("`{}` without a key", path.display()))),
        false => Ok(keys),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_keys_are_read_from_arguments_and_files() {
        let file = std::env::temp_dir().join(format!("tilewright-keys-{}", std::process::id()));
        let keys = |given: &[String]| {
            let ring = KeyRing::read(given, std::slice::from_ref(&file));
            ring.map(|ring| ring.digests)
        };
        let digests = |keys: &[&str]| keys.iter().map(|key| Sha256::digest(key).into()).collect::<Vec<KeyDigest>>();
        // With a byte order mark and CRLF, as on Windows.
        std::fs::write(&file, "\u{feff}one\r\n# old\r\n\r\n two \r\n").unwrap();
        assert_eq!(keys(&["zero".into()]).unwrap(), digests(&["zero", "one", "two"]));
        std::fs::write(&file, "\n").unwrap();
        assert_eq!(keys(&[]).unwrap_err().code(), "option");
        std::fs::remove_file(&file).unwrap();
        assert_eq!(keys(&[]).unwrap_err().code(), "io");
    }
}
