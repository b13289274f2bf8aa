//! WebGPU kernels for transformers and the inference engine built from them.
#![deny(missing_docs)]

mod counters;
mod cpu;
mod device;
mod dtype;
mod error;
mod gpu;
pub mod formats;
pub mod generate;
pub mod kernels;
pub mod load;
mod matrix;
pub mod model;
mod recording;
pub mod shaders;
mod tensor;
pub mod tokenizer;

pub use counters::Counters;
pub use device::{Device, DeviceChoice, DeviceInfo, DeviceLimits, Pending};
pub use dtype::{BLOCK, DType, WeightType};
pub use error::Error;
pub use generate::{GenerateOptions, LoadOptions, Model, Session};
pub use gpu::AdapterReport;
pub use matrix::{Matrix, file_row_bytes};
pub use recording::{MemoryPlan, Recorder, Recording, Workspace};
pub use shaders::Tier;
pub use tensor::{Role, Tensor};
