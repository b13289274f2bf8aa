//! What can go wrong between a hub and a file.

use std::path::PathBuf;
use std::time::Duration;

/// Why a model of a hub is not there. Each names the address, and what was expected and found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// A text is no address of a model.
    #[error("`{text}` is no address of a model: {found}, expected hf:owner/repo[/path][:quantisation][@revision]")]
    Address {
        /// The text.
        text: String,
        /// What is wrong with it.
        found: String,
    },

    /// Several files would do, or none.
    #[error("{address}: {wanted}; there {}", list(available))]
    Choice {
        /// The model's address.
        address: String,
        /// What was looked for, and how that failed.
        wanted: String,
        /// What is there.
        available: Vec<String>,
    },

    /// The hub does not know who asks: status 401. It says so of repositories that do not exist, too.
    #[error("{url}: status 401: expected {expected}{}", words(message))]
    Unauthorized {
        /// What was asked for.
        url: String,
        /// What would be let in.
        expected: &'static str,
        /// The hub's own words, if it has any.
        message: String,
    },

    /// The hub knows who asks and refuses: status 403, as for models whose terms must be accepted first.
    #[error(
        "{url}: status 403: expected a token of an account that may read this; the page of the model says how to get \
         access{}",
        words(message)
    )]
    Forbidden {
        /// What was asked for.
        url: String,
        /// The hub's own words, if it has any.
        message: String,
    },

    /// There is no such repository, revision or file: status 404.
    #[error("{url}: status 404: no such repository, revision or file{}", words(message))]
    NotFound {
        /// What was asked for.
        url: String,
        /// The hub's own words, if it has any.
        message: String,
    },

    /// Too many requests: status 429.
    #[error("{url}: status 429: too many requests{}", later(retry_after))]
    TooManyRequests {
        /// What was asked for.
        url: String,
        /// How long the server wants no more of them.
        retry_after: Option<Duration>,
    },

    /// Another status than those that mean something here.
    #[error("{url}: status {status}, expected 200{}", words(message))]
    Status {
        /// What was asked for.
        url: String,
        /// What came.
        status: u16,
        /// The server's own words, if it has any.
        message: String,
    },

    /// No answer, or one that broke off.
    #[error("{url}: {message}")]
    Connection {
        /// What was asked for.
        url: String,
        /// What happened.
        message: String,
    },

    /// A request that cannot be made as things are: a certificate that is not trusted, a proxy that is none.
    #[error("{url}: {message}")]
    Request {
        /// What was asked for.
        url: String,
        /// What is wrong.
        message: String,
    },

    /// An answer that is not what a hub says.
    #[error("{url}: {field} is {found}, expected {expected}")]
    Answer {
        /// What was asked for.
        url: String,
        /// Field of the JSON, or header.
        field: String,
        /// What a hub says there.
        expected: String,
        /// What it said.
        found: String,
    },

    /// A file has another size than the hub says.
    #[error("{url}: the file has {found} bytes, expected {expected}")]
    Size {
        /// The file's address.
        url: String,
        /// Size in the hub's list.
        expected: u64,
        /// Size of what came, or would have come.
        found: u64,
    },

    /// A file has another content than the hub says.
    #[error("{url}: the file's digest is {found}, expected {expected}; what was downloaded of it is removed")]
    Digest {
        /// The file's address.
        url: String,
        /// Digest in the hub's list.
        expected: String,
        /// Digest of what came.
        found: String,
    },

    /// No request may be made, and what is needed is not in the cache.
    #[error("{address} is not in {}{}: HF_HUB_OFFLINE is set, so nothing is downloaded", cache.display(), words(found))]
    Offline {
        /// The model's address.
        address: String,
        /// What is there of the repository instead; empty if nothing.
        found: String,
        /// Where it was looked for.
        cache: PathBuf,
    },

    /// What is to be removed is not in the cache.
    #[error("{address} is not in {}; `tilewright list` shows what is", cache.display())]
    NotCached {
        /// The model's address.
        address: String,
        /// Where it was looked for.
        cache: PathBuf,
    },

    /// No room for a file.
    #[error(
        "{}: the disk is full: {missing_bytes} bytes are missing; what is there is kept, and a later try goes on from it",
        path.display()
    )]
    DiskFull {
        /// What could not be written.
        path: PathBuf,
        /// Bytes of the file that were still to come.
        missing_bytes: u64,
    },
}

impl HubError {
    /// Whether the same request may succeed later.
    pub fn is_passing(&self) -> bool {
        match self {
            HubError::TooManyRequests { .. } | HubError::Connection { .. } => true,
            HubError::Status { status, .. } => matches!(status, 408 | 500..=599),
            _ => false,
        }
    }
}

/// The server's own words, at the end of a sentence.
fn words(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" ({message})") }
}

fn later(retry_after: &Option<Duration>) -> String {
    retry_after.map_or(String::new(), |wait| format!("; the server asks to wait for {} s", wait.as_secs()))
}

/// Names for a sentence, not more than anyone reads.
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
