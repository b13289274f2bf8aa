//! Models: configuration, weights on a device, key/value cache, and the forward pass that records kernels.

mod config;
mod encoder;
mod encoder_weights;
mod kv_cache;
mod llama;
mod weights;

pub use config::ModelConfig;
pub use encoder::{
    BatchSize, BatchTensors, Encoder, EncoderConfig, FeedForward, LocalLayers, NormKind, Positions, ScoreConfig,
};
pub use encoder_weights::{EncoderLayer, EncoderWeights, NormWeights, ScoreHead};
pub use kv_cache::KvCache;
pub use llama::{Ending, Llama, PassTensors, Tap};
pub use weights::{Destination, LayerWeights, SourceTensor, Stack, WeightSource, Weights};
pub(crate) use weights::{rope_tensor, upload_rope};
