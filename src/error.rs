//! The library's error type.
//!
//! Each variant names the operand, field or offset at fault, with the expected and the found value, so that a
//! message can be acted on without a stack trace.

use std::path::Path;
use std::path::PathBuf;

#[cfg(feature = "hub")]
mod hub;

use crate::loss::LossReason;
#[cfg(feature = "hub")]
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
        /// Shape implied by the other operands.
        expected: Vec<u32>,
        /// The shape passed.
        found: Vec<u32>,
    },

    /// An operand or argument of a kernel is out of range.
    #[error("{kernel}: `{operand}` is {found}, expected {expected}")]
    Operand {
        /// Kernel that refused the operand.
        kernel: &'static str,
        /// Operand's or argument's name in the kernel's signature.
        operand: &'static str,
        /// What the kernel accepts.
        expected: String,
        /// The value passed.
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
        /// What the format requires.
        expected: String,
        /// The value in the file.
        found: String,
    },

    /// A file is shorter than its header requires, such as after an interrupted download.
    #[error(
        "the file ends after {found_bytes} bytes, but {part} needs at least {needed_bytes}: download or save it again"
    )]
    Truncated {
        /// The part of the file that is incomplete, such as a tensor.
        part: String,
        /// Bytes required by the header or a tensor.
        needed_bytes: u64,
        /// Bytes in the file.
        found_bytes: u64,
    },

    /// A file is well-formed but uses an unsupported feature.
    #[error("{format}: {field} is {found}, which is not supported (supported: {supported})")]
    Unsupported {
        /// File format or component.
        format: &'static str,
        /// Field, metadata key or tensor name.
        field: String,
        /// The unsupported value.
        found: String,
        /// Supported values.
        supported: String,
    },

    /// A model's configuration is missing a value or contradicts itself.
    #[error("model configuration: {field} is {found}, expected {expected}")]
    Config {
        /// Key in the metadata or in `config.json`.
        field: String,
        /// What the architecture requires.
        expected: String,
        /// The file's value.
        found: String,
    },

    /// A LoRA adapter is invalid or does not fit the model.
    #[cfg(feature = "lora")]
    #[error("adapter: {field} is {found}, expected {expected}")]
    Adapter {
        /// Key or tensor of the adapter's file.
        field: String,
        /// What the model or the format requires.
        expected: String,
        /// The file's value.
        found: String,
    },

    /// A tokenizer's data is inconsistent, or text cannot be encoded with it.
    #[error("tokenizer: {field} is {found}, expected {expected}")]
    Tokenizer {
        /// Field of the vocabulary or argument.
        field: String,
        /// What the tokenizer needs.
        expected: String,
        /// The value found.
        found: String,
    },

    /// A chat template is unusable or rejects a conversation.
    #[error("chat template: {field} is {found}, expected {expected}")]
    Template {
        /// The part of the template or conversation at fault.
        field: String,
        /// What a template may do or requires.
        expected: String,
        /// What the template does, or the value found.
        found: String,
    },

    /// A sampling or generation option is out of range.
    #[error("option {option} is {found}, expected {expected}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Accepted range.
        expected: String,
        /// The value given.
        found: String,
    },

    /// A constraint on a completion is unusable.
    #[error("constraint: {field} is {found}, expected {expected}")]
    Constraint {
        /// Kind of constraint, and the part at fault.
        field: String,
        /// What a constraint may be.
        expected: String,
        /// The error, as reported by the crate that parses the constraint.
        found: String,
    },

    /// The prompt and the requested tokens exceed the context.
    #[error("context full: {needed} tokens needed, the context holds {capacity}")]
    ContextFull {
        /// Tokens to cache.
        needed: usize,
        /// Tokens that the cache holds.
        capacity: usize,
    },

    /// An engine's queue is full or closed.
    #[error("busy: {n_waiting} requests are already waiting")]
    Busy {
        /// Waiting requests.
        n_waiting: usize,
    },

    /// The engine has stopped for good.
    #[error("engine stopped: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },

    /// An operation panicked because of a bug in this program or a driver. Its result is lost.
    #[error("panic while {context}: {message}")]
    Panic {
        /// The operation.
        context: String,
        /// The panic's message.
        message: String,
    },

    /// The memory plan exceeds the limit; nothing was allocated.
    #[error("memory: {needed_bytes} bytes needed ({breakdown}), the limit is {limit_bytes}; {hint}")]
    Memory {
        /// Bytes the plan needs.
        needed_bytes: u64,
        /// The limit in bytes.
        limit_bytes: u64,
        /// Bytes of weights, cache and activations.
        breakdown: String,
        /// What would fit.
        hint: String,
    },

    /// No adapter matches the requested name.
    #[error("device: no adapter matches `{wanted}`; available: {available}")]
    NoAdapter {
        /// The requested adapter.
        wanted: String,
        /// Adapters of this machine.
        available: String,
    },

    /// The adapter lacks a required feature or limit.
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

    /// The device has no memory for a buffer. Nothing was allocated, and a smaller request may succeed.
    #[error("gpu: out of memory: {size_bytes} bytes requested for `{label}`, {allocated_bytes} allocated: {message}")]
    OutOfMemory {
        /// Label of the tensor or buffer.
        label: String,
        /// Requested bytes.
        size_bytes: u64,
        /// Bytes of the device's other buffers, including idle ones in the pool.
        allocated_bytes: u64,
        /// The GPU API's message.
        message: String,
    },

    /// The GPU reported an error during `context`.
    #[error("gpu: {context}: {message}")]
    Gpu {
        /// The operation.
        context: String,
        /// The GPU API's message.
        message: String,
    },

    /// The device was lost or stopped answering; all its buffers are gone.
    #[error("gpu: device lost while {context}: {message}")]
    DeviceLost {
        /// Why the device is lost.
        reason: LossReason,
        /// The operation.
        context: String,
        /// The GPU API's message.
        message: String,
    },

    /// A logit is NaN or infinite, so no token can be chosen.
    #[error("logits: a non-finite value at position {pos}; the weights or a kernel are broken")]
    NonFinite {
        /// Absolute position of the token with these logits.
        pos: u32,
    },

    /// A vector index refuses its input or is not the required one.
    #[error("index: {field} is {found}, expected {expected}")]
    Index {
        /// The record or query at fault, with its number, or the property.
        field: String,
        /// What the index accepts, or the requirement.
        expected: String,
        /// The input, or the index's value.
        found: String,
    },

    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },

    /// A model cannot be obtained from a hub.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] HubError),

    /// An error inside a named file.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// The error in the file.
        source: Box<Error>,
    },

    /// An error of one of several records.
    #[error("record {record}: {source}")]
    InRecord {
        /// The record's index in the call.
        record: usize,
        /// The record's error.
        source: Box<Error>,
    },
}

impl Error {
    /// Adds the file's name to the error.
    pub fn in_file(self, path: impl Into<PathBuf>) -> Self {
        match self {
            named @ (Error::Io { .. } | Error::InFile { .. }) => named,
            source => Error::InFile { path: path.into(), source: Box::new(source) },
        }
    }

    /// Adds the model file's name, unless the error is not the file's fault.
    #[doc(hidden)]
    pub fn in_model_file(self, path: &Path) -> Self {
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

    /// Adds the folder to the file's name, or names the folder if the error names no file.
    pub(crate) fn in_folder(self, folder: &Path) -> Self {
        match self {
            Error::InFile { path, source } => Error::InFile { path: folder.join(path), source },
            other => other.in_file(folder),
        }
    }

    /// Adds the record's index in the call.
    pub(crate) fn in_record(self, record: usize) -> Self {
        Error::InRecord { record, source: Box::new(self) }
    }

    /// Why the device is lost, if the error says so, also for a record's error. A panic leaves a device in an
    /// unknown state, so it counts as a loss.
    pub fn loss(&self) -> Option<LossReason> {
        match self {
            Error::DeviceLost { reason, .. } => Some(*reason),
            Error::Panic { .. } => Some(LossReason::Panic),
            Error::InFile { source, .. } | Error::InRecord { source, .. } => source.loss(),
            _ => None,
        }
    }

    /// A short name for the kind of error, the same in all language bindings.
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
            #[cfg(feature = "hub")]
            Error::Hub(_) => "hub",
            Error::InFile { source, .. } | Error::InRecord { source, .. } => source.code(),
        }
    }
}
