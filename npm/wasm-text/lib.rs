//! What the library exports to JavaScript about constraints and answers (`tilewright::web`), linked into one module.

pub use tilewright::*;
