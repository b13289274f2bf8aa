//! An encoder's weights on a device, under GGUF's names.

use super::encoder::{EncoderConfig, Positions};
use super::weights::{Place, Stack, WeightSource, describe};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{LayerNorm, RopeConfig, rope_table};
use crate::matrix::Matrix;
use crate::tensor::{Role, Tensor};

/// Weight and bias of a LayerNorm, `[C]` each.
#[derive(Clone, Debug)]
pub struct NormWeights {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl NormWeights {
    fn declare(source: &dyn WeightSource, name: &str, config: &EncoderConfig) -> Result<NormWeights, Error> {
        let vector = |suffix: &str| table(source, &format!("{name}.{suffix}"), &[config.dim]);
        let bias = if config.norm_bias { Some(vector("bias")?) } else { None };
        Ok(NormWeights { weight: vector("weight")?, bias })
    }

    /// The norm with its epsilon.
    pub(super) fn with(&self, eps: f32) -> LayerNorm<'_> {
        LayerNorm { weight: &self.weight, bias: self.bias.as_ref(), eps }
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.weight].into_iter().chain(&self.bias)
    }
}

/// One transformer block. A norm stands in front of its half of the block or behind it.
#[derive(Clone, Debug)]
pub struct EncoderLayer {
    /// `[C]`; the first layer has none if norms stand in front, since that of the embedding is there.
    pub attn_norm: Option<NormWeights>,
    /// Q, K and V, `[3 C, C]`.
    pub attn_qkv: Stack,
    /// `[C, C]`.
    pub attn_output: Stack,
    /// `[C]`.
    pub ffn_norm: Option<NormWeights>,
    /// `[F, C]`, or gate and up, `[2 F, C]`.
    pub ffn_up: Stack,
    /// `[C, F]`.
    pub ffn_down: Stack,
}

/// All weights of an encoder, declared first and uploaded later.
#[derive(Clone, Debug)]
pub struct EncoderWeights {
    /// `[V, C]`.
    pub token_embd: Matrix,
    /// `[positions, C]`.
    pub positions: Option<Tensor>,
    /// `[types, C]`.
    pub token_types: Option<Tensor>,
    /// Of the sum of these.
    pub embd_norm: NormWeights,
    /// Blocks in order.
    pub layers: Vec<EncoderLayer>,
    /// Behind the last block, if norms stand in front.
    pub output_norm: Option<NormWeights>,
    /// Rotation tables of layers that see all tokens and of those with a window, `[S, D / 2, 2]`.
    pub rope: Option<[Tensor; 2]>,
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
        let EncoderConfig { dim, ffn_dim, vocab_size, max_seq_len, n_token_types, norm_first, .. } = *config;
        let stack = |prefix: &str, names: &[(&str, u32)], cols| Stack::declare(device, source, prefix, names, cols);
        let embd = describe(source, "token_embd.weight", &[vocab_size, dim])?;
        let [attn_norm, ffn_norm] =
            if norm_first { ["attn_norm", "ffn_norm"] } else { ["attn_output_norm", "layer_output_norm"] };
        let mut layers = Vec::new();
        for l in 0..config.n_layers {
            let p = format!("blk.{l}.");
            let norm = |name: &str| NormWeights::declare(source, &format!("{p}{name}"), config);
            let qkv: &[(&str, u32)] = match source.describe(&format!("{p}attn_qkv.weight")) {
                Some(_) => &[("attn_qkv", 3 * dim)],
                None => &[("attn_q", dim), ("attn_k", dim), ("attn_v", dim)],
            };
            layers.push(EncoderLayer {
                attn_norm: if norm_first && l == 0 { None } else { Some(norm(attn_norm)?) },
                attn_qkv: stack(&p, qkv, dim)?,
                attn_output: stack(&p, &[("attn_output", dim)], dim)?,
                ffn_norm: Some(norm(ffn_norm)?),
                ffn_up: stack(&p, &[("ffn_up", config.up_dim())], dim)?,
                ffn_down: stack(&p, &[("ffn_down", dim)], ffn_dim)?,
            });
        }
        let positions = match config.positions {
            Positions::Table { first } => Some(table(source, "position_embd.weight", &[max_seq_len + first, dim])?),
            Positions::Rotary { .. } => None,
        };
        let rope = match &config.positions {
            Positions::Table { .. } => None,
            Positions::Rotary { global, local } => {
                let table = |label, rope: &RopeConfig| {
                    Tensor::declare(label, Role::Weights, &[max_seq_len, rope.rot_dims / 2, 2], DType::F32)
                };
                Some([table("rope.global", global)?, table("rope.local", local)?])
            }
        };
        let token_types = match n_token_types {
            0 => None,
            n => Some(table(source, "token_types.weight", &[n, dim])?),
        };
        Ok(EncoderWeights {
            token_embd: Matrix::declare(device, "token_embd.weight", embd.weight, vocab_size, dim)?,
            positions,
            token_types,
            embd_norm: NormWeights::declare(source, "token_embd_norm", config)?,
            layers,
            output_norm: if norm_first { Some(NormWeights::declare(source, "output_norm", config)?) } else { None },
            rope,
        })
    }

    /// Fills the rotation tables.
    ///
    /// # Errors
    /// Errors of [`Device::write`].
    pub fn upload_rope(&self, device: &Device, config: &EncoderConfig) -> Result<(), Error> {
        if let (Positions::Rotary { global, local }, Some(tables)) = (&config.positions, &self.rope) {
            for (rope, table) in [global, local].into_iter().zip(tables) {
                device.write(table, 0, &rope_table(rope, table.shape()[0]))?;
            }
        }
        Ok(())
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.layers.iter().flat_map(|layer| [&layer.attn_qkv, &layer.attn_output, &layer.ffn_up, &layer.ffn_down])
    }

    /// Tensors of F32, whose labels are their names in the source.
    fn tables(&self) -> impl Iterator<Item = &Tensor> {
        let norms = self.layers.iter().flat_map(|layer| layer.attn_norm.iter().chain(&layer.ffn_norm));
        let norms = norms.chain([&self.embd_norm]).chain(&self.output_norm).flat_map(NormWeights::tensors);
        norms.chain(&self.positions).chain(&self.token_types)
    }

    /// Where the data of each source tensor belongs, by its name.
    pub fn places(&self) -> impl Iterator<Item = (&str, Place)> {
        let tables = self.tables().map(|tensor| (tensor.label(), Place::Values { tensor: tensor.clone(), first: 0 }));
        let embd = Place::Rows { matrix: self.token_embd.clone(), first_row: 0 };
        tables.chain(self.stacks().flat_map(Stack::places)).chain([("token_embd.weight", embd)])
    }

    /// Every tensor.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let stacks = self.stacks().flat_map(Stack::tensors);
        self.tables().chain(stacks).chain(self.token_embd.tensors()).chain(self.rope.iter().flatten())
    }
}

/// Declares a tensor of F32 under its name in the source.
fn table(source: &dyn WeightSource, name: &str, shape: &[u32]) -> Result<Tensor, Error> {
    describe(source, name, shape)?;
    Tensor::declare(name, Role::Weights, shape, DType::F32)
}
