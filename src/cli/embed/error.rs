//! What stops `tilewright embed`, and what is wrong with a record.

use std::io;
use std::path::Path;

use tilewright::Error;
use tilewright::hub::HubError;

/// What `--help` says of [`EmbedError::code`].
pub const EXIT_CODES: &str = "\
Exit codes: 0 success, also if stdout was closed; 1 runtime error; 2 invalid command line; 3 the model cannot be \
loaded; 4 no matching adapter; 6 invalid input.

A GPU that is lost is opened again; after three losses within a minute the CPU takes over.";

/// What ends the command before its time.
#[derive(Debug, thiserror::Error)]
pub enum EmbedError {
    /// Flags that do not go together.
    #[error("{0}")]
    Usage(String),
    /// The model cannot be loaded.
    #[error("{0}")]
    Model(Error),
    /// An error at work.
    #[error(transparent)]
    Work(#[from] Error),
    /// The input as a whole is not what it should be.
    #[error("{input}: {fault}")]
    Input { input: String, fault: String },
    /// A record is not what it should be.
    #[error(transparent)]
    Record(Box<BadRecord>),
    /// Whoever reads stdout went away: nothing is left to do, and nobody to tell.
    #[error("stdout was closed")]
    StdoutClosed,
}

impl EmbedError {
    /// The command's exit code.
    pub fn code(&self) -> u8 {
        match self {
            EmbedError::StdoutClosed => 0,
            EmbedError::Usage(_) | EmbedError::Work(Error::Option { .. }) | EmbedError::Model(Error::Option { .. }) => {
                2
            }
            EmbedError::Model(Error::Hub(HubError::Address { .. })) => 2,
            EmbedError::Work(Error::NoAdapter { .. }) => 4,
            EmbedError::Model(_) => 3,
            EmbedError::Input { .. } | EmbedError::Record(_) => 6,
            EmbedError::Work(_) => 1,
        }
    }

    /// The command line names a table, and this build has none.
    pub fn without_tables(path: &Path) -> EmbedError {
        let path = if path.as_os_str() == "-" { "the stream".into() } else { path.display().to_string() };
        let cure = "rebuild with `--features tables`";
        EmbedError::Usage(format!("{path}: this build has no support for Arrow, CSV and Parquet; {cure}"))
    }

    /// The input cannot be read as what it is said to be.
    pub fn input(input: &str, fault: impl ToString) -> EmbedError {
        EmbedError::Input { input: input.into(), fault: fault.to_string() }
    }

    /// `path` could not be written: an error of the system, or of a format on top of it.
    pub fn write(path: &Path, error: impl std::error::Error + 'static) -> EmbedError {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
        while let Some(error) = cause {
            let kind = error.downcast_ref().map(io::Error::kind);
            if kind == Some(io::ErrorKind::BrokenPipe) && path.as_os_str() == "-" {
                return EmbedError::StdoutClosed;
            }
            cause = error.source();
        }
        let path = if path.as_os_str() == "-" { "stdout".into() } else { path.into() };
        EmbedError::Work(Error::Io { path, source: io::Error::other(error.to_string()) })
    }
}

impl From<BadRecord> for EmbedError {
    fn from(bad: BadRecord) -> EmbedError {
        EmbedError::Record(Box::new(bad))
    }
}

/// One record that has no text.
#[derive(Debug, thiserror::Error)]
#[error("{input}: record {record}: {fault}")]
pub struct BadRecord {
    /// File, or `stdin`.
    pub input: String,
    /// Line or row, counted from 1; a CSV file's header is none.
    pub record: u64,
    /// What is wrong.
    pub fault: Fault,
}

/// What can be wrong with a record.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("{field} is {found}, expected {expected}")]
    Value { field: String, expected: String, found: String },
    #[error("invalid UTF-8 at byte {0}")]
    NotUtf8(usize),
    #[error("not JSON: {0}")]
    NotJson(#[from] serde_json::Error),
    /// The model cannot take the text.
    #[error(transparent)]
    Text(Error),
}

impl Fault {
    pub fn value(field: &str, found: impl Into<String>, expected: impl Into<String>) -> Fault {
        Fault::Value { field: format!("`{field}`"), found: found.into(), expected: expected.into() }
    }
}
