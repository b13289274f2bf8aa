//! The `wgpu` backend: adapters, buffers, pipelines, and the executor that replays recordings on a GPU.

mod adapter;
mod buffer_pool;
mod executor;
mod faults;
mod outcome;
mod pipeline;
mod polling;
mod readback;
mod signal;
mod unchecked;

pub use adapter::adapters;
pub(crate) use adapter::report_within;
pub use adapter::{AdapterKind, AdapterReport, Power};
#[cfg(target_arch = "wasm32")]
pub use adapter::{BrowserAdapter, browser_adapter};
pub use buffer_pool::BUFFER_USAGES;
pub(crate) use buffer_pool::PooledBuffer;
pub(crate) use executor::{Gpu, Setup};
#[cfg(not(feature = "fault-injection"))]
pub(crate) use faults::Faults;
#[cfg(feature = "fault-injection")]
pub use faults::{Call, Effect, Faults};
pub(crate) use outcome::Fault;
pub(crate) use pipeline::checked;
pub(crate) use readback::ReadFuture;

#[cfg(test)]
mod tests;
