//! Errors of downloads from a hub.

use std::path::PathBuf;
use std::time::Duration;

/// Why a model of a hub is not available. Each variant names the address, and what was expected and found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// A text is not a model address.
    #[error("`{text}` is not a model address: {found}, expected hf:owner/repo[/path][:quantisation][@revision]")]
    Address {
        /// The text.
        text: String,
        /// What is wrong with it.
        found: String,
    },

    /// Several files match, or none.
    #[error("{address}: {wanted}; there {}", list(available))]
    Choice {
        /// The model's address.
        address: String,
        /// What was requested, and the problem.
        wanted: String,
        /// The available choices.
        available: Vec<String>,
    },

    /// Status 401: the request is not authenticated, or the repository does not exist.
    #[error("{url}: status 401: expected {expected}{}", words(message))]
    Unauthorized {
        /// The requested URL.
        url: String,
        /// What the hub would accept.
        expected: &'static str,
        /// The hub's message; may be empty.
        message: String,
    },

    /// Status 403: the account has no access, such as to a model whose terms must be accepted first.
    #[error(
        "{url}: status 403: expected a token of an account that may read this; the model's page says how to get \
         access{}",
        words(message)
    )]
    Forbidden {
        /// The requested URL.
        url: String,
        /// The hub's message; may be empty.
        message: String,
    },

    /// Status 404: no such repository, revision or file.
    #[error("{url}: status 404: no such repository, revision or file{}", words(message))]
    NotFound {
        /// The requested URL.
        url: String,
        /// The hub's message; may be empty.
        message: String,
    },

    /// Status 429: too many requests.
    #[error("{url}: status 429: too many requests{}", later(retry_after))]
    TooManyRequests {
        /// The requested URL.
        url: String,
        /// How long to wait, if the server says.
        retry_after: Option<Duration>,
    },

    /// Any other status.
    #[error("{url}: status {status}, expected 200{}", words(message))]
    Status {
        /// The requested URL.
        url: String,
        /// The status.
        status: u16,
        /// The server's message; may be empty.
        message: String,
    },

    /// No answer, or an interrupted one.
    #[error("{url}: {message}")]
    Connection {
        /// The requested URL.
        url: String,
        /// What happened.
        message: String,
    },

    /// The hub does not answer, and the model is not in the cache.
    #[error(
        "{endpoint} does not answer ({message}), and {address} is not in {}: check the network and HTTPS_PROXY, or \
         give the path of a copy",
        cache.display()
    )]
    Unreachable {
        /// The hub.
        endpoint: String,
        /// The model's address.
        address: String,
        /// What happened.
        message: String,
        /// The cache folder.
        cache: PathBuf,
    },

    /// A request that cannot be made, such as with an untrusted certificate or an invalid proxy.
    #[error("{url}: {message}")]
    Request {
        /// The requested URL.
        url: String,
        /// What is wrong.
        message: String,
    },

    /// An invalid answer.
    #[error("{url}: {field} is {found}, expected {expected}")]
    Answer {
        /// The requested URL.
        url: String,
        /// The JSON field or header.
        field: String,
        /// The expected value.
        expected: String,
        /// The value found.
        found: String,
    },

    /// A file's size differs from the hub's list.
    #[error("{url}: the file has {found} bytes, expected {expected}")]
    Size {
        /// The file's address.
        url: String,
        /// Size in the hub's list.
        expected: u64,
        /// Size received or announced.
        found: u64,
    },

    /// A file's digest differs from the hub's list.
    #[error("{url}: the file's digest is {found}, expected {expected}; the download is deleted")]
    Digest {
        /// The file's address.
        url: String,
        /// Digest in the hub's list.
        expected: String,
        /// Digest of the download.
        found: String,
    },

    /// Offline mode is on, and the model is not in the cache.
    #[error("{address} is not in {}{}: HF_HUB_OFFLINE is set, so nothing is downloaded", cache.display(), words(found))]
    Offline {
        /// The model's address.
        address: String,
        /// What the cache has of the repository; may be empty.
        found: String,
        /// The cache folder.
        cache: PathBuf,
    },

    /// The model to remove is not in the cache.
    #[error("{address} is not in {}; `tilewright list` lists cached models", cache.display())]
    NotCached {
        /// The model's address.
        address: String,
        /// The cache folder.
        cache: PathBuf,
    },

    /// The disk is full.
    #[error(
        "{}: the disk is full: {missing_bytes} bytes are missing; the partial download is kept and can be resumed",
        path.display()
    )]
    DiskFull {
        /// The file.
        path: PathBuf,
        /// Bytes missing from the file.
        missing_bytes: u64,
    },
}

impl HubError {
    /// Whether the same request may succeed later.
    pub fn is_passing(&self) -> bool {
        match self {
            HubError::TooManyRequests { .. } | HubError::Connection { .. } | HubError::Unreachable { .. } => true,
            HubError::Status { status, .. } => matches!(status, 408 | 500..=599),
            _ => false,
        }
    }
}

/// The server's message in parentheses, or nothing.
fn words(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" ({message})") }
}

fn later(retry_after: &Option<Duration>) -> String {
    retry_after.map_or(String::new(), |wait| format!("; the server asks to wait for {} s", wait.as_secs()))
}

/// Up to 40 names, for a message.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 40;
    match names {
        [] => "is nothing".into(),
        [one] => format!("is {one}"),
        _ => {
            let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = names.len().saturating_sub(SHOWN);
            if more > 0 { format!("are {shown} and {more} more") } else { format!("are {shown}") }
        }
    }
}
