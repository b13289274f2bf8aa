//! Many texts at once: requests join a queue, one driver computes them together, and each has a stream of pieces.
//!
//! ```text
//! Engine::submit -> queue --admitted--> sequences --one step after the other--> pieces -> Stream
//! ```
//!
//! [`Engine`] is a handle that threads share. [`Driver`] owns what is on the device and computes; it runs wherever its future
//! is polled, natively usually on a thread of its own ([`Engine::spawn`]). Several devices have a driver each and one queue.

mod decode_batch;
#[cfg(not(target_arch = "wasm32"))]
mod draft_model;
mod drafter;
mod driver;
mod options;
mod pages;
mod passes;
mod queue;
mod running;
mod stage;
mod stream;
#[cfg(not(target_arch = "wasm32"))]
mod watchdog;
mod watched;

pub use self::driver::Driver;
pub use self::options::{EngineOptions, Request};
pub use self::queue::{DeviceStats, Engine, EngineState, EngineStats};
pub use self::stream::{Stream, StreamHandle, Usage};
