//! Cached keys and values, on the device.

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::model::{Block, ModelConfig};
use crate::tensor::{Role, Tensor};

/// Keys and values of all layers for up to `capacity` positions, `[Hkv, capacity, D]` each. Which of them are valid is
/// known to the session: truncating and clearing only move its position.
#[derive(Clone, Debug)]
pub struct KvCache {
    layers: Vec<(Tensor, Tensor)>,
    capacity: u32,
}

impl KvCache {
    /// Declares a cache.
    ///
    /// # Errors
    /// [`Error::Operand`] if `capacity` is zero or too large for one tensor.
    pub fn declare(config: &ModelConfig, capacity: u32) -> Result<KvCache, Error> {
        let layer = |(l, block): (usize, &Block)| {
            let shape = [block.attention.n_kv_heads, capacity, block.attention.head_dim];
            let declare = |name: &str| Tensor::declare(format!("cache.{l}.{name}"), Role::Cache, &shape, DType::F32);
            Ok((declare("k")?, declare("v")?))
        };
        let layers = config.blocks.iter().enumerate().map(layer).collect::<Result<_, Error>>()?;
        Ok(KvCache { layers, capacity })
    }

    /// Positions that fit.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Keys and values of a layer.
    pub fn layer(&self, layer_idx: usize) -> (&Tensor, &Tensor) {
        let (k, v) = &self.layers[layer_idx];
        (k, v)
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.layers.iter().flat_map(|(k, v)| [k, v])
    }

    /// Copies another cache's content into this one, on the device.
    ///
    /// # Errors
    /// [`Error::Shape`] if the caches differ; errors of [`Device::copy`].
    pub fn copy_from(&self, device: &Device, other: &KvCache) -> Result<(), Error> {
        let pairs: Vec<(&Tensor, &Tensor)> = other.tensors().zip(self.tensors()).collect();
        device.copy(&pairs)
    }
}
