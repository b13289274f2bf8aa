//! WebGPU kernels for transformers and the inference engine built from them.
//!
//! ```text
//! weights   bytes -> formats -> load -> tensors --+
//! prompt    text -> tokenizer -> token ids -------+-> recording (kernels) -> executor -> token ids -> text
//! ```
//!
//! A forward pass is written once in terms of kernels and recorded. An executor replays the recording: the GPU in
//! one compute pass and one submission, or the CPU with the same kernels in Rust.
//!
//! ```
//! use tilewright::{Device, GenerateOptions, Model};
//!
//! # pollster::block_on(async {
//! let device = Device::auto().await;
//! let model = Model::builtin(&device)?; // or Model::load(&device, "model.gguf", LoadOptions::default())
//! let mut session = model.session()?;
//! let mut generation = session.generate("Once upon a time", &GenerateOptions::greedy(32))?;
//! while let Some(piece) = generation.next().await {
//!     print!("{}", piece?.text);
//! }
//! # Ok::<(), tilewright::Error>(())
//! # }).unwrap();
//! ```
//!
//! A kernel on its own: upload tensors, record, run, read.
//!
//! ```
//! use tilewright::{Device, Workspace, kernels};
//!
//! # pollster::block_on(async {
//! let device = Device::auto().await;
//! let x = device.upload("x", &[2, 3], &[1.0f32, 2.0, 3.0, 1.0, 1.0, 1.0])?;
//! let y = device.upload("y", &[2, 3], &[0.0f32; 6])?;
//! let mut rec = device.recorder();
//! kernels::softmax(&mut rec, &x, &y)?;
//! device.run(&rec.finish(&mut Workspace::default()))?;
//! let probs: Vec<f32> = device.read(&y).await?;
//! assert!((probs[0] - 0.0900).abs() < 1e-4 && (probs[3] - 1.0 / 3.0).abs() < 1e-6);
//! # Ok::<(), tilewright::Error>(())
//! # }).unwrap();
//! ```
// Most native code also compiles for WASM, which links only its exports. Native builds report dead code.
#![cfg_attr(target_arch = "wasm32", allow(dead_code, unused_imports))]
#![deny(missing_docs)]

#[cfg(feature = "answer")]
pub mod answer;
#[cfg(all(devices, feature = "sound"))]
mod audio;
#[cfg(devices)]
pub mod bench;
mod cache;
#[cfg(all(devices, feature = "chat"))]
pub mod chat;
#[cfg(all(devices, feature = "answer", feature = "chat"))]
mod chat_model;
mod counted;
mod counters;
#[cfg(devices)]
mod cpu;
#[cfg(devices)]
mod device;
mod dtype;
#[cfg(devices)]
pub mod embed;
#[cfg(devices)]
pub mod engine;
mod error;
pub mod formats;
#[cfg(devices)]
pub mod generate;
#[cfg(devices)]
mod gpu;
#[cfg(feature = "grammar")]
pub mod grammar;
#[cfg(all(feature = "hub", not(target_arch = "wasm32")))]
pub mod hub;
#[cfg(not(target_arch = "wasm32"))]
mod interop;
pub mod kernels;
#[cfg(devices)]
pub mod load;
mod loss;
mod matrix;
mod memory;
#[cfg(devices)]
pub mod model;
#[cfg(devices)]
mod open;
mod panics;
pub mod picture;
mod platform;
mod recording;
#[cfg(devices)]
mod recovery;
#[cfg(devices)]
pub mod retrieval;
#[cfg(devices)]
mod saving;
pub mod shaders;
mod sort;
#[cfg(feature = "sound")]
pub mod sound;
mod target;
mod tensor;
#[cfg(devices)]
mod tested;
pub mod tokenizer;
#[cfg(all(devices, feature = "sound"))]
pub mod transcribe;
#[cfg(devices)]
pub mod tuning;
#[cfg(devices)]
pub mod vision;
#[cfg(target_arch = "wasm32")]
pub mod web;
mod xxh64;

// For the program, which replaces files as the library does.
#[cfg(all(devices, feature = "sound"))]
pub use audio::AudioEncoder;
#[doc(hidden)]
pub use cache::write as replace_file;
#[cfg(all(devices, feature = "answer", feature = "chat"))]
pub use chat_model::{ChatAnswer, ChatModel, ChatPieces, ChatPrompt, ChatRequest, ChatStream};
pub use counters::Counters;
#[cfg(not(target_arch = "wasm32"))]
pub use cpu::set_threads;
#[cfg(devices)]
pub use device::{Clock, Device, DeviceChoice, DeviceInfo, Pending};
pub use dtype::{BLOCK, DType, WeightType};
#[cfg(devices)]
pub use embed::{EmbedOptions, Embedder, ImageEmbedder, ImageOptions, RerankOptions, Reranker};
pub use error::Error;
#[cfg(all(devices, feature = "lora"))]
pub use generate::Adapter;
#[cfg(devices)]
pub use generate::{GenerateOptions, LoadOptions, Model, Session};
#[cfg(all(devices, target_arch = "wasm32"))]
pub use gpu::BrowserAdapter;
#[cfg(devices)]
pub use gpu::{AdapterKind, AdapterReport, Power};
#[cfg(feature = "fault-injection")]
#[doc(hidden)]
pub use gpu::{Call, Effect, Faults};
#[cfg(not(target_arch = "wasm32"))]
pub use interop::{BUFFER_USAGES, wgpu};
pub use loss::LossReason;
pub use matrix::{Matrix, file_row_bytes};
// For the server, whose errors of panics are the library's.
#[doc(hidden)]
pub use panics::caught;
#[doc(hidden)]
pub use platform::random_seed;
pub use recording::{BatchInvariance, Dispatch, MemoryPlan, Recorder, Recording, Workspace};
#[cfg(devices)]
pub use recovery::{Breaker, BreakerOptions, BreakerStats, Circuit, Recovery};
#[cfg(devices)]
pub use saving::Saving;
pub use shaders::Tier;
pub use target::{Bucket, Choice, Target, TargetKind, TargetLimits, TileForm, Tuning};
pub use tensor::{Role, Tensor, TensorWriter};
#[cfg(all(devices, feature = "sound"))]
pub use transcribe::{TranscribeOptions, Transcriber, TranscriberOptions, Transcript};
#[cfg(devices)]
pub use vision::{ImageEmbeddings, ImageRows, VisionEncoder, VisionOptions};
