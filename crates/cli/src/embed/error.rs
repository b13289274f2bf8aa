//! Errors of `tilewright embed` and `rerank`, and faults of records.

use std::io;
use std::path::Path;

use tilewright::Error;
use tilewright::hub::HubError;

use super::super::failure::describe;

/// Help text for [`EmbedError::code`].
pub const EXIT_CODES: &str = "\
Exit codes: 0 success, also if stdout was closed; 1 runtime error; 2 invalid command line; 3 the model cannot be \
loaded; 4 no matching adapter; 6 invalid input.

A GPU that is lost is opened again; after three losses within a minute the CPU takes over.";

/// Why the command ended early.
#[derive(Debug, thiserror::Error)]
pub enum EmbedError {
    /// Invalid command line.
    #[error("{0}")]
    Usage(String),
    /// The model cannot be loaded.
    #[error("{}", describe(.0))]
    Model(Error),
    /// Runtime error.
    #[error("{}", describe(.0))]
    Work(#[from] Error),
    /// The input as a whole is invalid.
    #[error("{input}: {fault}")]
    Input { input: String, fault: String },
    /// A record is invalid.
    #[error(transparent)]
    Record(Box<BadRecord>),
    /// The reader closed stdout. This counts as success.
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

    /// The command line requires tables, which this build does not support.
    pub fn without_tables(path: &Path) -> EmbedError {
        let path = if path.as_os_str() == "-" { "the stream".into() } else { path.display().to_string() };
        let cure = "rebuild with `--features tables`";
        EmbedError::Usage(format!("{path}: this build has no support for Arrow, CSV and Parquet; {cure}"))
    }

    /// The input is not valid in its format.
    pub fn input(input: &str, fault: impl ToString) -> EmbedError {
        EmbedError::Input { input: input.into(), fault: fault.to_string() }
    }

    /// `path` could not be written: an I/O error, or a format's error that may wrap one.
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

/// A record without a valid text.
#[derive(Debug, thiserror::Error)]
#[error("{input}: record {record}: {fault}")]
pub struct BadRecord {
    /// File, or `stdin`.
    pub input: String,
    /// Line or row, counted from 1; the header of a CSV file does not count.
    pub record: u64,
    pub fault: RecordFault,
}

/// A fault of a record.
#[derive(Debug, thiserror::Error)]
pub enum RecordFault {
    #[error("{field} is {found}, expected {expected}")]
    Value { field: String, expected: String, found: String },
    #[error("invalid UTF-8 at byte {0}")]
    NotUtf8(usize),
    #[error("not JSON: {0}")]
    NotJson(#[from] serde_json::Error),
    /// The model refuses the text, or the picture.
    #[error(transparent)]
    Text(Error),
}

impl RecordFault {
    pub fn value(field: &str, found: impl Into<String>, expected: impl Into<String>) -> RecordFault {
        RecordFault::Value { field: format!("`{field}`"), found: found.into(), expected: expected.into() }
    }
}
