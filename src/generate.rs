//! Logits to token ids to text: a loaded model, its sessions, and generation.

#[cfg(feature = "lora")]
mod adapter;
mod beam;
mod completion;
mod constraint;
mod disk_offload;
mod disk_tables;
mod expert_cache;
mod generation;
mod images;
pub mod importance;
mod in_flight;
mod inside;
mod loader;
mod logprobs;
mod lookup;
mod mailbox;
mod model;
mod mtp;
mod options;
mod pace;
mod part;
mod passes;
mod pending_text;
pub mod perplexity;
mod pipeline;
mod saved;
mod scoring;
mod sequence;
mod session;
mod stats;
mod stop;

#[cfg(feature = "lora")]
pub use adapter::Adapter;
pub use beam::{Beam, BeamOptions};
pub(crate) use completion::{Completion, Decoded};
pub(crate) use constraint::{SequenceConstraint, TokenConstraint, token_constraint};
pub use disk_offload::Streaming;
pub use expert_cache::ExpertCacheStats;
pub use generation::{CancelHandle, Generation, Piece, StopReason};
pub(crate) use in_flight::InFlight;
pub use inside::{HeadWeights, TimedDispatch, Timeline};
pub(crate) use logprobs::log_sum_exp;
pub use logprobs::{Logprobs, PromptLogprobs};
pub(crate) use lookup::{look_up, verify_drafts};
pub(crate) use model::Adapted;
pub use model::Placed;
pub(crate) use model::plan_of;
pub use model::{LoadOptions, Model, Trace};
pub use options::{ContextPolicy, GenerateOptions};
pub(crate) use pace::Pace;
pub use passes::PASS_SIZES;
pub(crate) use passes::record_pass;
pub(crate) use passes::rows_for;
pub use pipeline::DeviceLayers;
#[cfg(all(target_arch = "wasm32", feature = "web"))]
pub(crate) use saved::SessionLoader;
pub use scoring::LogitRows;
pub(crate) use sequence::{Sequence, slide};
pub use session::{Session, Snapshot};
pub use stats::{Speculation, Stats};
