//! Logits to token ids to text: a loaded model, its sessions, and generation.

#[cfg(feature = "lora")]
mod adapter;
#[cfg(not(target_arch = "wasm32"))]
mod beam;
#[cfg(not(target_arch = "wasm32"))]
mod front;
mod further;
mod generation;
mod guide;
mod held;
mod in_flight;
mod inside;
mod kept;
mod loader;
mod logprobs;
mod lookup;
mod mailbox;
mod model;
mod options;
mod pace;
mod part;
mod passes;
mod rows;
mod saved;
mod sequence;
mod session;
mod stats;
mod stop;
mod streamed;
mod written;

#[cfg(feature = "lora")]
pub use adapter::Adapter;
#[cfg(not(target_arch = "wasm32"))]
pub use beam::{Beam, BeamOptions};
#[cfg(not(target_arch = "wasm32"))]
pub use front::DeviceLayers;
pub use generation::{CancelHandle, Generation, Piece, StopReason};
pub(crate) use guide::{TokenGuide, guide};
pub(crate) use in_flight::InFlight;
pub use inside::{HeadWeights, TimedDispatch, Timeline};
pub use kept::KeptStats;
pub use logprobs::Logprobs;
pub(crate) use lookup::{judge, look_up};
pub(crate) use model::Adapted;
#[cfg(not(target_arch = "wasm32"))]
pub use model::Placed;
#[cfg(not(target_arch = "wasm32"))]
pub(crate) use model::plan_of;
pub use model::{LoadOptions, Model, Trace};
pub use options::{ContextPolicy, GenerateOptions};
pub(crate) use pace::Pace;
pub use passes::PASS_SIZES;
#[cfg(not(target_arch = "wasm32"))]
pub(crate) use passes::record_pass;
pub(crate) use passes::rows_for;
#[cfg(all(target_arch = "wasm32", feature = "web"))]
pub(crate) use saved::SessionLoader;
pub(crate) use sequence::{Sequence, slide};
pub use session::{Session, Snapshot};
pub use stats::{Speculation, Stats};
pub use streamed::Streaming;
pub(crate) use written::{Completed, Written};
