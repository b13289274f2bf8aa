//! What the library exports to JavaScript (`tilewright::web`), linked into one module.

pub use tilewright::*;
