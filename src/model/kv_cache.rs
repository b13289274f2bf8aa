//! Cached keys and values, on the device.

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::model::ModelConfig;
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
        let shape = [config.n_kv_heads, capacity, config.head_dim];
        let declare = |name: &str, l| Tensor::declare(format!("cache.{l}.{name}"), Role::Cache, &shape, DType::F32);
        let layers =
            (0..config.n_layers).map(|l| Ok((declare("k", l)?, declare("v", l)?))).collect::<Result<_, _>>()?;
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
