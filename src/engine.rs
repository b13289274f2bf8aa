//! Continuous batching: requests join a queue, a driver computes them together, and each has a stream of pieces.
//!
//! ```text
//! Engine::submit -> queue --admission--> running sequences --one step at a time--> pieces -> Stream
//! ```
//!
//! [`Engine`] is a handle that threads share. [`Driver`] owns the device state and computes wherever its future is
//! polled, natively usually on its own thread ([`Engine::spawn`]). Several devices have one driver each and share
//! one queue.

mod decode_batch;
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
mod watchdog;
mod watched;
mod windows;

pub use self::driver::Driver;
pub use self::options::{EngineOptions, Request};
pub use self::queue::{DeviceStats, Engine, EngineState, EngineStats};
pub use self::stream::{Stream, StreamHandle, Usage};
