//! An encoder's weights on a device, under GGUF's names.

use super::encoder::EncoderConfig;
use super::weights::{Place, Stack, WeightSource, describe};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::layer_norm;
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::tensor::{Role, Tensor};

/// Weight and bias of a LayerNorm, `[C]` each.
#[derive(Clone, Debug)]
pub struct NormWeights {
    weight: Tensor,
    bias: Tensor,
}

impl NormWeights {
    fn declare(source: &dyn WeightSource, name: &str, dim: u32) -> Result<NormWeights, Error> {
        let vector = |suffix: &str| table(source, &format!("{name}.{suffix}"), &[dim]);
        Ok(NormWeights { weight: vector("weight")?, bias: vector("bias")? })
    }

    /// Records `y = LayerNorm(x)` of each row.
    pub(super) fn record(&self, rec: &mut Recorder, x: &Tensor, y: &Tensor, eps: f32) -> Result<(), Error> {
        layer_norm(rec, x, &self.weight, &self.bias, y, eps)
    }

    fn tensors(&self) -> [&Tensor; 2] {
        [&self.weight, &self.bias]
    }
}

/// The product that ends one half of a layer, and the norm behind the sum.
#[derive(Clone, Debug)]
pub struct Half {
    /// `[C, C]` or `[C, F]`.
    pub product: Stack,
    /// `[C]`.
    pub norm: NormWeights,
}

/// One transformer block.
#[derive(Clone, Debug)]
pub struct EncoderLayer {
    /// Q, K and V, `[3 C, C]`.
    pub attn_qkv: Stack,
    /// `[C, C]`.
    pub attn_output: Half,
    /// `[F, C]`.
    pub ffn_up: Stack,
    /// `[C, F]`.
    pub ffn_down: Half,
}

/// All weights of an encoder, declared first and uploaded later.
#[derive(Clone, Debug)]
pub struct EncoderWeights {
    /// `[V, C]`.
    pub token_embd: Matrix,
    /// `[positions, C]`.
    pub positions: Tensor,
    /// `[types, C]`.
    pub token_types: Option<Tensor>,
    /// Of the sum of these.
    pub embd_norm: NormWeights,
    /// Blocks in order.
    pub layers: Vec<EncoderLayer>,
}

impl EncoderWeights {
    /// Declares all tensors of `config`, checking each one's shape in the source.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has another shape.
    pub fn declare(
        device: &Device,
        config: &EncoderConfig,
        source: &dyn WeightSource,
    ) -> Result<EncoderWeights, Error> {
        let EncoderConfig { dim, ffn_dim, vocab_size, n_positions, n_token_types, .. } = *config;
        let stack = |prefix: &str, names: &[(&str, u32)], cols| Stack::declare(device, source, prefix, names, cols);
        let embd = describe(source, "token_embd.weight", &[vocab_size, dim])?;
        let mut layers = Vec::new();
        for l in 0..config.n_layers {
            let p = format!("blk.{l}.");
            let half = |name: &str, cols: u32, norm: &str| -> Result<Half, Error> {
                let product = stack(&p, &[(name, dim)], cols)?;
                Ok(Half { product, norm: NormWeights::declare(source, &format!("{p}{norm}"), dim)? })
            };
            layers.push(EncoderLayer {
                attn_qkv: stack(&p, &[("attn_q", dim), ("attn_k", dim), ("attn_v", dim)], dim)?,
                attn_output: half("attn_output", dim, "attn_output_norm")?,
                ffn_up: stack(&p, &[("ffn_up", ffn_dim)], dim)?,
                ffn_down: half("ffn_down", ffn_dim, "layer_output_norm")?,
            });
        }
        let token_types = match n_token_types {
            0 => None,
            n => Some(table(source, "token_types.weight", &[n, dim])?),
        };
        Ok(EncoderWeights {
            token_embd: Matrix::declare(device, "token_embd.weight", embd.weight, vocab_size, dim)?,
            positions: table(source, "position_embd.weight", &[n_positions, dim])?,
            token_types,
            embd_norm: NormWeights::declare(source, "token_embd_norm", dim)?,
            layers,
        })
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.layers
            .iter()
            .flat_map(|layer| [&layer.attn_qkv, &layer.attn_output.product, &layer.ffn_up, &layer.ffn_down.product])
    }

    /// Tensors of F32, whose labels are their names in the source.
    fn tables(&self) -> impl Iterator<Item = &Tensor> {
        let norms = self.layers.iter().flat_map(|layer| [&layer.attn_output.norm, &layer.ffn_down.norm]);
        let norms = norms.chain([&self.embd_norm]).flat_map(NormWeights::tensors);
        norms.chain([&self.positions]).chain(&self.token_types)
    }

    /// Where the data of each source tensor belongs, by its name.
    pub fn places(&self) -> impl Iterator<Item = (&str, Place)> {
        let tables = self.tables().map(|tensor| (tensor.label(), Place::Values { tensor: tensor.clone(), first: 0 }));
        let embd = Place::Rows { matrix: self.token_embd.clone(), first_row: 0 };
        tables.chain(self.stacks().flat_map(Stack::places)).chain([("token_embd.weight", embd)])
    }

    /// Every tensor.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tables().chain(self.stacks().flat_map(Stack::tensors)).chain(self.token_embd.tensors())
    }
}

/// Declares a tensor of F32 under its name in the source.
fn table(source: &dyn WeightSource, name: &str, shape: &[u32]) -> Result<Tensor, Error> {
    describe(source, name, shape)?;
    Tensor::declare(name, Role::Weights, shape, DType::F32)
}
