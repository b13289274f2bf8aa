//! An encoder's weights on a device, under GGUF's names.

use super::encoder::{EncoderConfig, FeedForward, NormKind, Positions, ScoreConfig};
use super::weights::{Destination, Stack, WeightSource, describe};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{LayerNorm, RopeConfig, rope_table};
use crate::matrix::Matrix;
use crate::tensor::{Role, Tensor};

/// Weight and bias of a norm, `[C]` each.
#[derive(Clone, Debug)]
pub struct NormWeights {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl NormWeights {
    fn declare(source: &dyn WeightSource, name: &str, config: &EncoderConfig) -> Result<NormWeights, Error> {
        let vector = |suffix: &str| table(source, &format!("{name}.{suffix}"), &[config.dim]);
        let bias = match config.norm {
            NormKind::Layer { bias: true } => Some(vector("bias")?),
            NormKind::Layer { bias: false } | NormKind::Rms => None,
        };
        Ok(NormWeights { weight: vector("weight")?, bias })
    }

    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The layer normalisation with its epsilon.
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
    /// Q, K and V, `[(H + 2 Hkv) D, C]`.
    pub attn_qkv: Stack,
    /// Norms of queries and keys, `[2, D]`.
    pub qk_norm: Option<Tensor>,
    /// `[C, H D]`.
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
    pub embd_norm: Option<NormWeights>,
    /// Blocks in order.
    pub layers: Vec<EncoderLayer>,
    /// Behind the last block, if norms stand in front.
    pub output_norm: Option<NormWeights>,
    /// Tables of [`Positions::ropes`], `[S, D / 2, 2]` each.
    pub rope: Vec<Tensor>,
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
        let (q_dim, kv_dim) = (config.q_dim(), config.kv_dim());
        let stack = |prefix: &str, names: &[(&str, u32)], cols| Stack::declare(device, source, prefix, names, cols);
        let embd = describe(source, "token_embd.weight", &[vocab_size, dim])?;
        let [attn_norm, ffn_norm] =
            if norm_first { ["attn_norm", "ffn_norm"] } else { ["attn_output_norm", "layer_output_norm"] };
        let mut layers = Vec::new();
        for l in 0..config.n_layers {
            let p = format!("blk.{l}.");
            let norm = |name: &str| NormWeights::declare(source, &format!("{p}{name}"), config);
            let qkv: &[(&str, u32)] = match source.describe(&format!("{p}attn_qkv.weight")) {
                Some(_) => &[("attn_qkv", q_dim + 2 * kv_dim)],
                None => &[("attn_q", q_dim), ("attn_k", kv_dim), ("attn_v", kv_dim)],
            };
            let up: &[(&str, u32)] = match source.describe(&format!("{p}ffn_gate.weight")) {
                Some(_) if !matches!(config.feed_forward, FeedForward::Gelu(_)) => {
                    &[("ffn_gate", ffn_dim), ("ffn_up", ffn_dim)]
                }
                _ => &[("ffn_up", config.up_dim())],
            };
            let qk_norm = match config.qk_norm {
                true => Some(qk_norm(source, &p, config.head_dim)?),
                false => None,
            };
            layers.push(EncoderLayer {
                attn_norm: if norm_first && config.embd_norm && l == 0 { None } else { Some(norm(attn_norm)?) },
                attn_qkv: stack(&p, qkv, dim)?,
                qk_norm,
                attn_output: stack(&p, &[("attn_output", dim)], q_dim)?,
                ffn_norm: Some(norm(ffn_norm)?),
                ffn_up: stack(&p, up, dim)?,
                ffn_down: stack(&p, &[("ffn_down", dim)], ffn_dim)?,
            });
        }
        let positions = match config.positions {
            Positions::Table { first } => Some(table(source, "position_embd.weight", &[max_seq_len + first, dim])?),
            Positions::Rotary { .. } => None,
        };
        let angles = |rope: &RopeConfig| {
            Tensor::declare("rope", Role::Weights, &[max_seq_len, rope.rot_dims / 2, 2], DType::F32)
        };
        let rope = config.positions.ropes().map(angles).collect::<Result<_, _>>()?;
        let token_types = match n_token_types {
            0 => None,
            n => Some(table(source, "token_types.weight", &[n, dim])?),
        };
        Ok(EncoderWeights {
            token_embd: Matrix::declare(device, "token_embd.weight", embd.weight, vocab_size, dim)?,
            positions,
            token_types,
            embd_norm: match config.embd_norm {
                true => Some(NormWeights::declare(source, "token_embd_norm", config)?),
                false => None,
            },
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
        let mut tables = config.positions.ropes().zip(&self.rope);
        tables.try_for_each(|(rope, table)| device.write(table, 0, &rope_table(rope, table.shape()[0])))
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.layers.iter().flat_map(|layer| [&layer.attn_qkv, &layer.attn_output, &layer.ffn_up, &layer.ffn_down])
    }

    /// Tensors of F32, whose labels are their names in the source.
    fn tables(&self) -> impl Iterator<Item = &Tensor> {
        let norms = self.layers.iter().flat_map(|layer| layer.attn_norm.iter().chain(&layer.ffn_norm));
        let norms = norms.chain(&self.embd_norm).chain(&self.output_norm).flat_map(NormWeights::tensors);
        norms.chain(&self.positions).chain(&self.token_types)
    }

    /// Where the data of each source tensor belongs, by its name.
    pub fn destinations(&self) -> impl Iterator<Item = (&str, Destination)> {
        let qk_norms = self.qk_norms().flat_map(|tensor| {
            // The label of such a tensor is the names of both its rows.
            let names = tensor.label().split('+');
            (0..).zip(names).map(|(row, name)| {
                (name, Destination::Values { tensor: tensor.clone(), first: row * tensor.shape()[1] as usize })
            })
        });
        let tables =
            self.tables().map(|tensor| (tensor.label(), Destination::Values { tensor: tensor.clone(), first: 0 }));
        let embd = Destination::Rows { matrix: self.token_embd.clone(), first_row: 0 };
        tables.chain(qk_norms).chain(self.stacks().flat_map(Stack::destinations)).chain([("token_embd.weight", embd)])
    }

    /// Every tensor.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let stacks = self.stacks().flat_map(Stack::tensors);
        let tables = self.tables().chain(self.qk_norms()).chain(&self.rope);
        tables.chain(stacks).chain(self.token_embd.tensors())
    }

    fn qk_norms(&self) -> impl Iterator<Item = &Tensor> {
        self.layers.iter().filter_map(|layer| layer.qk_norm.as_ref())
    }
}

/// The head of a cross-encoder.
#[derive(Clone, Debug)]
pub struct ScoreHead {
    /// What it does.
    pub config: ScoreConfig,
    /// `[C, C]`.
    pub dense: Stack,
    /// `[C]`.
    pub norm: Option<NormWeights>,
    /// `[1, C]`.
    pub output: Stack,
}

impl ScoreHead {
    /// Declares its tensors, checking each one's shape in the source.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has another shape.
    pub fn declare(
        device: &Device,
        encoder: &EncoderConfig,
        config: ScoreConfig,
        source: &dyn WeightSource,
    ) -> Result<ScoreHead, Error> {
        let stack = |name, rows| Stack::declare(device, source, "", &[(name, rows)], encoder.dim);
        let norm = if config.norm { Some(NormWeights::declare(source, "cls.norm", encoder)?) } else { None };
        Ok(ScoreHead { config, dense: stack("cls", encoder.dim)?, norm, output: stack("cls.output", 1)? })
    }

    /// Where the data of each source tensor belongs, by its name.
    pub fn destinations(&self) -> impl Iterator<Item = (&str, Destination)> {
        let norm = self.norm.iter().flat_map(NormWeights::tensors);
        let norm = norm.map(|tensor| (tensor.label(), Destination::Values { tensor: tensor.clone(), first: 0 }));
        norm.chain([&self.dense, &self.output].into_iter().flat_map(Stack::destinations))
    }

    /// Every tensor.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let norm = self.norm.iter().flat_map(NormWeights::tensors);
        norm.chain([&self.dense, &self.output].into_iter().flat_map(Stack::tensors))
    }
}

/// Declares the norms of a layer's queries and keys as one tensor, `[2, D]`.
fn qk_norm(source: &dyn WeightSource, prefix: &str, head_dim: u32) -> Result<Tensor, Error> {
    let names = ["attn_q_norm", "attn_k_norm"].map(|name| format!("{prefix}{name}.weight"));
    names.iter().try_for_each(|name| describe(source, name, &[head_dim]).map(drop))?;
    Tensor::declare(names.join("+"), Role::Weights, &[2, head_dim], DType::F32)
}

/// Declares a tensor of F32 under its name in the source.
fn table(source: &dyn WeightSource, name: &str, shape: &[u32]) -> Result<Tensor, Error> {
    describe(source, name, shape)?;
    Tensor::declare(name, Role::Weights, shape, DType::F32)
}
