//! Tests of the program and the server, in one program. Tests of tuning, which check notices shared by all devices of
//! a process, are a separate one.

#[path = "../../../tests/common/mod.rs"]
mod common;
#[path = "../../../tests/common/files.rs"]
#[cfg_attr(not(feature = "serve"), allow(dead_code))] // adapters are for tests of the server
mod files;
#[cfg(feature = "serve")]
#[path = "../../../tests/common/picture_model.rs"]
mod picture_model;
#[cfg(feature = "serve")]
#[path = "../../../tests/common/scripted.rs"]
mod scripted;

mod chat;
mod cli;
#[cfg(feature = "fault-injection")]
mod crash;
mod embed_cli;
#[cfg(feature = "serve")]
mod fuzz;
mod hub;
mod lora;
#[cfg(feature = "serve")]
mod pictures;
mod quantize;
mod recipes;
mod scoring;
#[cfg(feature = "serve")]
mod serve;
#[cfg(feature = "serve")]
mod sounds;
#[cfg(target_os = "linux")]
mod terminal;
mod tools;
mod transcribe;
