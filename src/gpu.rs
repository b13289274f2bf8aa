//! All that knows `wgpu`: adapters, buffers, pipelines, and the executor that replays recordings on a GPU.

mod adapter;
mod buffer_pool;
mod executor;
mod pipeline;
mod readback;

pub use adapter::AdapterReport;
#[cfg(not(target_arch = "wasm32"))]
pub use adapter::adapters;
#[cfg(target_arch = "wasm32")]
pub use adapter::{BrowserAdapter, browser_adapter};
pub(crate) use buffer_pool::PooledBuffer;
pub(crate) use executor::{Gpu, PreparedSteps};
pub(crate) use readback::ReadFuture;
