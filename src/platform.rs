//! Differences between browsers and other platforms. Both have the same functions and types here, so that other
//! modules have one code for both.

#[cfg_attr(target_arch = "wasm32", path = "platform/browser.rs")]
#[cfg_attr(not(target_arch = "wasm32"), path = "platform/native.rs")]
mod system;

#[cfg(any(test, all(target_arch = "wasm32", target_feature = "atomics")))]
mod pool;

pub use system::random_seed;
pub(crate) use system::*;

/// Values that any thread may share; in a browser, where a device stays on its thread, all values.
pub(crate) trait Attachable: std::any::Any + MaybeSend + MaybeSync {}
impl<T: std::any::Any + MaybeSend + MaybeSync> Attachable for T {}
