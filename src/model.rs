//! Models: configuration, weights on a device, KV cache, and the forward pass as recorded kernels.

mod block;
mod config;
mod cross;
mod decoder;
mod encoder;
mod experts;
mod forward;
mod image_encoder;
mod kv_cache;
#[cfg(feature = "lora")]
mod lora;
mod mtp;
mod per_layer;
mod position_biases;
mod speech;
mod stack;
mod vision;
mod weights;

pub use block::{
    Attention, Between, Block, Experts, FeedForward, Halves, Latent, NormPlace, OutputGates, Recurrence, RowAttention,
    SharedExpert,
};
pub(crate) use config::{MAX_CONTEXT, MAX_DIM, MAX_LAYERS};
pub use config::{ModelConfig, NormKind, PerLayer, PositionTable};
pub use cross::{CrossTensors, CrossWeights};
pub use decoder::{Drawing, Ending, FetchedRows, ImageTensors, PassTensors, Sampler, VERIFIED_ROWS};
pub use encoder::{BatchSize, BatchTensors, DenseConfig, DenseLayer, ScoreConfig, ScoreHead};
pub use experts::ExpertWeights;
pub(crate) use experts::{CachedExperts, ExpertMatrix, ExpertPart};
pub use forward::{Tap, Transformer};
pub use image_encoder::{ImageBatchTensors, ImageEncoder, ImageEncoderConfig, ImageHead};
pub use kv_cache::{KvCache, LayerCache, Ring};
#[cfg(feature = "lora")]
pub use lora::FactorPlaces;
pub use mtp::{MtpTensors, MtpWeights};
pub use per_layer::{PerLayerHalf, PerLayerWeights};
pub use position_biases::PositionBiases;
pub use speech::{SoundTensors, SpeechConfig, SpeechEncoder};
pub use stack::{RowPlaces, SourceTensor, Stack, TensorSlot, WeightSource};
pub(crate) use stack::{layer_of, name_in_layer};
pub use vision::{Join, MeanTensors, PatchTensors, Projector, RowNorm, VisionConfig, VisionTransformer};
pub use weights::{BlockWeights, HalfNorms, NormWeights, Weights};
