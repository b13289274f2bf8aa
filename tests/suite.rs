//! All native tests but those of kernels, in one program: it is linked once, and its tests share what devices have compiled.

#[path = "common/allocator.rs"]
mod allocator;
mod common;

mod answer;
#[cfg(feature = "chat")]
mod chat;
mod cli;
#[cfg(feature = "fault-injection")]
mod crash;
mod embed;
mod embed_cli;
mod engine;
#[cfg(feature = "fault-injection")]
mod faults;
mod formats;
#[path = "fuzz/main.rs"]
mod fuzz;
mod generate;
#[cfg(feature = "grammar")]
mod grammar;
mod hub;
mod load;
mod lora;
#[path = "matrices/main.rs"]
mod matrices;
mod model;
mod quantize;
mod retrieval;
#[cfg(feature = "serve")]
mod serve;
mod shaders;
mod threads;
mod tokenizer;
#[cfg(feature = "grammar")]
mod tools;
mod tuning;
