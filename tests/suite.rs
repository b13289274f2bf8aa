//! Native tests in one program: it is linked once, and its tests share compiled pipelines. Tests of kernels, which
//! also run in browsers, and tests of loading and tuning, which check notices shared by all devices of a process, are
//! separate programs.

#[path = "common/allocator.rs"]
mod allocator;
mod common;
#[cfg(all(feature = "chat", feature = "grammar"))]
#[path = "common/scripted.rs"]
mod scripted;

mod answer;
#[cfg(feature = "chat")]
mod chat;
#[cfg(all(feature = "chat", feature = "grammar"))]
mod chat_model;
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
mod layers;
mod lora;
#[path = "matrices/main.rs"]
mod matrices;
#[cfg(feature = "lora")]
mod matrix;
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
