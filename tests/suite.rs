//! Native tests of the library in one program: it is linked once, and its tests share compiled pipelines. Tests of
//! kernels, which also run in browsers, and tests of loading, which check notices shared by all devices of a process,
//! are separate programs. So are those of the program and the server, in `crates/cli/tests`.

#[path = "common/allocator.rs"]
mod allocator;
mod common;
#[path = "common/files.rs"]
mod files;
#[path = "common/scripted.rs"]
#[allow(dead_code)] // tests of the server use all of it
mod scripted;

mod answer;
#[cfg(feature = "sound")]
mod audio;
mod chat;
mod chat_model;
mod embed;
mod engine;
#[cfg(feature = "fault-injection")]
mod faults;
mod formats;
#[path = "fuzz/main.rs"]
mod fuzz;
mod generate;
mod grammar;
mod hub;
mod interop;
mod layers;
mod lora;
#[path = "matrices/main.rs"]
mod matrices;
mod matrix;
mod model;
mod picture;
mod quantize;
mod retrieval;
mod shaders;
#[cfg(feature = "sound-files")]
mod sound;
mod threads;
mod tokenizer;
mod tools;
mod vision;
#[cfg(feature = "sound")]
mod whisper_cpp;
