//! What the library exports to JavaScript for speech (`tilewright::web`), linked into one module.

pub use tilewright::*;
