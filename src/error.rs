//! Everything that can go wrong, as one type.
//!
//! Each variant names the operand, field or offset at fault and says what was expected and what was found,
//! so that a message needs no stack trace to be acted on.

#[cfg(not(target_arch = "wasm32"))]
use std::path::Path;
use std::path::PathBuf;

#[cfg(all(feature = "hub", not(target_arch = "wasm32")))]
mod hub;

use crate::loss::LossReason;
#[cfg(all(feature = "hub", not(target_arch = "wasm32")))]
pub use hub::HubError;

/// The library's error type.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operand of a kernel has the wrong shape.
    #[error("{kernel}: `{operand}` has shape {found:?}, expected {expected:?}")]
    Shape {
        /// Kernel that refused the operand.
        kernel: &'static str,
        /// Operand's name in the kernel's signature.
        operand: &'static str,
        /// Shape the other operands imply.
        expected: Vec<u32>,
        /// Shape that was passed.
        found: Vec<u32>,
    },

    /// An operand or argument of a kernel is outside what the kernel computes.
    #[error("{kernel}: `{operand}` is {found}, expected {expected}")]
    Operand {
        /// Kernel that refused the operand.
        kernel: &'static str,
        /// Operand's or argument's name in the kernel's signature.
        operand: &'static str,
        /// What the kernel accepts.
        expected: String,
        /// What was passed.
        found: String,
    },

    /// A file's content breaks its format.
    #[error("{format}: {field} at byte {offset} is {found}, expected {expected}")]
    Format {
        /// File format, such as `gguf`.
        format: &'static str,
        /// Field of the format, or the metadata key or tensor name.
        field: String,
        /// Byte offset in the file where the field starts.
        offset: u64,
        /// What the format demands.
        expected: String,
        /// What stands there.
        found: String,
    },

    /// A file ends before what it says it holds.
    #[error("the file ends after {found_bytes} bytes, at least {needed_bytes} are needed")]
    Truncated {
        /// Bytes that the header or a tensor asks for.
        needed_bytes: u64,
        /// Bytes that there are.
        found_bytes: u64,
    },

    /// A file is well formed and uses something that is not supported.
    #[error("{format}: {field} is {found}, which is not supported ({supported})")]
    Unsupported {
        /// File format or component.
        format: &'static str,
        /// Field, metadata key or tensor name.
        field: String,
        /// The unsupported value.
        found: String,
        /// What is supported instead.
        supported: String,
    },

    /// A model's configuration is missing a value or contradicts itself.
    #[error("model configuration: {field} is {found}, expected {expected}")]
    Config {
        /// Key in the metadata or in `config.json`.
        field: String,
        /// What the architecture demands.
        expected: String,
        /// What the file says.
        found: String,
    },

    /// An adapter is of another model, or is none.
    #[cfg(feature = "lora")]
    #[error("adapter: {field} is {found}, expected {expected}")]
    Adapter {
        /// Key or tensor of the adapter's file.
        field: String,
        /// What the model, or the format, demands.
        expected: String,
        /// What the file says.
        found: String,
    },

    /// A tokenizer's data is inconsistent, or text cannot be encoded with it.
    #[error("tokenizer: {field} is {found}, expected {expected}")]
    Tokenizer {
        /// Field of the vocabulary or argument.
        field: String,
        /// What the tokenizer needs.
        expected: String,
        /// What it got.
        found: String,
    },

    /// A chat template cannot be used, or does not accept a conversation.
    #[error("chat template: {field} is {found}, expected {expected}")]
    Template {
        /// What of the template or the conversation is at fault.
        field: String,
        /// What a template may do or needs.
        expected: String,
        /// What it does or got.
        found: String,
    },

    /// A sampling or generation option is out of range.
    #[error("option {option}: {found} is out of range, expected {expected}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Accepted range.
        expected: String,
        /// Value given.
        found: String,
    },

    /// What a text is to match cannot be used.
    #[error("constraint: {field} is {found}, expected {expected}")]
    Constraint {
        /// Kind of the constraint, and what of it is at fault.
        field: String,
        /// What a constraint may be.
        expected: String,
        /// What is wrong with it, in the words of the crate that reads it.
        found: String,
    },

    /// The prompt and the tokens asked for do not fit the context.
    #[error("context full: {needed} tokens needed, the context holds {capacity}")]
    ContextFull {
        /// Tokens that would have to be cached.
        needed: usize,
        /// Tokens the cache holds.
        capacity: usize,
    },

    /// An engine has as many requests as it may, or takes no more.
    #[error("busy: {n_waiting} requests wait already")]
    Busy {
        /// Requests that wait.
        n_waiting: usize,
    },

    /// Nothing computes for an engine any more, and nothing will.
    #[error("engine: nothing computes any more: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },

    /// What was being done panicked: a fault of this program or of a driver. What it was computing is lost.
    #[error("panic while {context}: {message}")]
    Panic {
        /// What was being done.
        context: String,
        /// The panic's own words.
        message: String,
    },

    /// The memory plan exceeds the limit; nothing was allocated.
    #[error("memory: {needed_bytes} bytes needed ({breakdown}), the limit is {limit_bytes}; {hint}")]
    Memory {
        /// Bytes the plan needs.
        needed_bytes: u64,
        /// Bytes allowed.
        limit_bytes: u64,
        /// Weights, cache and activations separately.
        breakdown: String,
        /// What would fit.
        hint: String,
    },

    /// No adapter answers to the name asked for.
    #[error("device: no adapter matches `{wanted}`; available: {available}")]
    NoAdapter {
        /// What was asked for.
        wanted: String,
        /// Adapters that are there.
        available: String,
    },

    /// The adapter lacks something the engine cannot do without.
    #[error("device `{adapter}`: {limit} is {found}, at least {expected} is needed")]
    Limit {
        /// Adapter's name.
        adapter: String,
        /// WebGPU limit or feature.
        limit: &'static str,
        /// Value needed.
        expected: u64,
        /// Value the adapter has.
        found: u64,
    },

    /// The device has no memory left for a buffer. Nothing was allocated, and a smaller request may still succeed.
    #[error(
        "gpu: out of memory: {size_bytes} bytes asked for `{label}`, {allocated_bytes} bytes are allocated: {message}"
    )]
    OutOfMemory {
        /// Label of the tensor or buffer.
        label: String,
        /// Bytes asked for.
        size_bytes: u64,
        /// Bytes of all other buffers of the device, those kept for later use included.
        allocated_bytes: u64,
        /// The GPU API's own words.
        message: String,
    },

    /// The GPU reported an error while `context` was done.
    #[error("gpu: {context}: {message}")]
    Gpu {
        /// What was being done.
        context: String,
        /// The GPU API's own words.
        message: String,
    },

    /// The device was lost or stopped answering; every buffer on it is gone.
    #[error("gpu: device lost while {context}: {message}")]
    DeviceLost {
        /// Why it is gone.
        reason: LossReason,
        /// What was being done.
        context: String,
        /// The GPU API's own words.
        message: String,
    },

    /// A logit is NaN or infinite, so no token can be chosen.
    #[error("logits: a non-finite value at position {pos}; the weights or a kernel are broken")]
    NonFinite {
        /// Absolute position of the token whose logits are broken.
        pos: u32,
    },

    /// An index of vectors does not take what it was given, or is not the one that is needed.
    #[error("index: {field} is {found}, expected {expected}")]
    Index {
        /// The record or query at fault, with its number, or the property.
        field: String,
        /// What the index takes, or what is needed.
        expected: String,
        /// What was given, or what the index has.
        found: String,
    },

    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's own error.
        source: std::io::Error,
    },

    /// A model of a hub cannot be had.
    #[cfg(all(feature = "hub", not(target_arch = "wasm32")))]
    #[error(transparent)]
    Hub(#[from] HubError),

    /// An error inside a named file.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        source: Box<Error>,
    },

    /// An error of one of several records.
    #[error("record {record}: {source}")]
    InRecord {
        /// Its number among those of the call, counted from 0.
        record: usize,
        /// What is wrong with it.
        source: Box<Error>,
    },
}

impl Error {
    /// Names the file in which this error was found.
    pub fn in_file(self, path: impl Into<PathBuf>) -> Self {
        match self {
            named @ (Error::Io { .. } | Error::InFile { .. }) => named,
            source => Error::InFile { path: path.into(), source: Box::new(source) },
        }
    }

    /// Names a model's file, unless what went wrong while it was loaded is not the file's fault.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn in_model_file(self, path: &Path) -> Self {
        match self {
            Error::Memory { .. }
            | Error::Option { .. }
            | Error::OutOfMemory { .. }
            | Error::Gpu { .. }
            | Error::DeviceLost { .. }
            | Error::Panic { .. } => self,
            other => other.in_file(path),
        }
    }

    /// Names the folder of the file in which this error was found, or the folder alone if it is in none of its files.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn in_folder(self, folder: &Path) -> Self {
        match self {
            Error::InFile { path, source } => Error::InFile { path: folder.join(path), source },
            other => other.in_file(folder),
        }
    }

    /// Names the record in which this error was found: its number among those of a call, counted from 0.
    pub(crate) fn in_record(self, record: usize) -> Self {
        Error::InRecord { record, source: Box::new(self) }
    }

    /// Why a device is gone, if the error says that one is; also where it names the record that was at work. Nobody knows what a
    /// panic has left on a device, so that it counts as gone as well.
    pub fn loss(&self) -> Option<LossReason> {
        match self {
            Error::DeviceLost { reason, .. } => Some(*reason),
            Error::Panic { .. } => Some(LossReason::Panic),
            Error::InFile { source, .. } | Error::InRecord { source, .. } => source.loss(),
            _ => None,
        }
    }

    /// A short name of the kind of error, the same in every language binding.
    pub fn code(&self) -> &'static str {
        match self {
            Error::Shape { .. } => "shape",
            Error::Operand { .. } => "operand",
            Error::Format { .. } => "format",
            Error::Truncated { .. } => "truncated",
            Error::Unsupported { .. } => "unsupported",
            Error::Config { .. } => "config",
            #[cfg(feature = "lora")]
            Error::Adapter { .. } => "adapter",
            Error::Tokenizer { .. } => "tokenizer",
            Error::Template { .. } => "template",
            Error::Option { .. } => "option",
            Error::Constraint { .. } => "constraint",
            Error::ContextFull { .. } => "context_full",
            Error::Busy { .. } => "busy",
            Error::Stopped { .. } => "stopped",
            Error::Panic { .. } => "panic",
            Error::Memory { .. } => "memory",
            Error::NoAdapter { .. } => "no_adapter",
            Error::Limit { .. } => "limit",
            Error::OutOfMemory { .. } => "out_of_memory",
            Error::Gpu { .. } => "gpu",
            Error::DeviceLost { .. } => "device_lost",
            Error::NonFinite { .. } => "non_finite",
            Error::Index { .. } => "index",
            Error::Io { .. } => "io",
            #[cfg(all(feature = "hub", not(target_arch = "wasm32")))]
            Error::Hub(_) => "hub",
            Error::InFile { source, .. } | Error::InRecord { source, .. } => source.code(),
        }
    }
}
