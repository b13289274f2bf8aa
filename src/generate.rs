//! Logits to token ids to text: a loaded model, its sessions, and generation.

mod loader;
mod model;
mod options;
mod session;
mod stop;

pub use model::{LoadOptions, Model, Trace};
pub use options::{ContextPolicy, GenerateOptions};
pub use session::{CancelHandle, Generation, PASS_SIZES, Piece, Session, Snapshot, Stats, StopReason};
