//! A model's weights on a device, under GGUF's names.

use std::borrow::Cow;

use crate::device::Device;
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::kernels::{Linear, rope_table};
use crate::matrix::Matrix;
use crate::model::ModelConfig;
use crate::recording::Recorder;
use crate::tensor::{Role, Tensor};

/// A tensor in a source: how its rows will be delivered, and its dimensions, the contiguous one last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// Weight type of the rows.
    pub weight: WeightType,
    /// `[rows, columns]`, or `[columns]`.
    pub shape: Vec<u64>,
}

/// Where weights come from. Names are GGUF's: `token_embd.weight`, `blk.0.attn_q.weight` and so on.
pub trait WeightSource: Send + Sync {
    /// Type and shape of a tensor, if it is there.
    fn describe(&self, name: &str) -> Option<SourceTensor>;

    /// The rows of a matrix as files store its [`WeightType`].
    ///
    /// # Errors
    /// [`Error::Format`] if the data cannot be read.
    fn rows(&self, name: &str) -> Result<Cow<'_, [u8]>, Error>;

    /// The values of a vector.
    ///
    /// # Errors
    /// [`Error::Format`] if the data cannot be read.
    fn floats(&self, name: &str) -> Result<Vec<f32>, Error>;
}

/// Matrices side by side that share an input, such as Q, K and V: neighbours of one weight type are one matrix.
#[derive(Clone, Debug)]
pub struct Stack {
    parts: Vec<Part>,
    bias: Option<(Tensor, Vec<String>)>,
}

#[derive(Clone, Debug)]
struct Part {
    matrix: Matrix,
    names: Vec<String>,
}

impl Stack {
    /// Declares the matrices `names`, each `[rows, cols]`, and their biases if the source has them.
    fn declare(
        device: &Device,
        source: &dyn WeightSource,
        prefix: &str,
        names: &[(&str, u32)],
        cols: u32,
    ) -> Result<Stack, Error> {
        let mut groups: Vec<(WeightType, u32, Vec<String>)> = Vec::new();
        for &(name, rows) in names {
            let full = format!("{prefix}{name}.weight");
            let found = describe(source, &full, &[rows, cols])?;
            match groups.last_mut() {
                Some((weight, total, members)) if *weight == found.weight => {
                    *total += rows;
                    members.push(full);
                }
                _ => groups.push((found.weight, rows, vec![full])),
            }
        }
        let part = |(weight, rows, names): (WeightType, u32, Vec<String>)| {
            Ok(Part { matrix: Matrix::declare(device, &names.join("+"), weight, rows, cols)?, names })
        };
        let parts = groups.into_iter().map(part).collect::<Result<_, Error>>()?;

        let biases: Vec<String> = names.iter().map(|(name, _)| format!("{prefix}{name}.bias")).collect();
        let bias = if biases.iter().any(|name| source.describe(name).is_some()) {
            for (name, &(_, rows)) in biases.iter().zip(names) {
                describe(source, name, &[rows])?;
            }
            let total = names.iter().map(|&(_, rows)| rows).sum();
            Some((Tensor::declare(biases.join("+"), Role::Weights, &[total], DType::F32)?, biases))
        } else {
            None
        };
        Ok(Stack { parts, bias })
    }

    /// Records `y = x wᵀ (+ bias)`, or `y += ..`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub fn record(&self, rec: &mut Recorder, x: &Tensor, y: &Tensor, accumulate: bool) -> Result<(), Error> {
        let mut y_start = 0;
        for part in &self.parts {
            let bias = self.bias.as_ref().map(|(bias, _)| bias);
            Linear { w: &part.matrix, bias, y_start, accumulate }.record(rec, x, y)?;
            y_start += part.matrix.rows();
        }
        Ok(())
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let biases = self.bias.iter().map(|(bias, _)| bias);
        self.parts.iter().flat_map(|part| part.matrix.tensors()).chain(biases)
    }

    fn upload(&self, upload: &mut Upload<'_>) -> Result<(), Error> {
        for part in &self.parts {
            upload.matrix(&part.matrix, &part.names)?;
        }
        if let Some((bias, names)) = &self.bias {
            upload.vector(bias, names)?;
        }
        Ok(())
    }
}

/// One transformer block.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[C]`.
    pub attn_norm: Tensor,
    /// Q, K and V, `[(H + 2 Hkv) D, C]`.
    pub attn_qkv: Stack,
    /// `[C, H D]`.
    pub attn_output: Stack,
    /// `[C]`.
    pub ffn_norm: Tensor,
    /// Gate and up, `[2 F, C]`.
    pub ffn_gate_up: Stack,
    /// `[C, F]`.
    pub ffn_down: Stack,
}

/// All weights of a model, declared first and uploaded later.
#[derive(Clone, Debug)]
pub struct Weights {
    /// `[V, C]`.
    pub token_embd: Matrix,
    /// Blocks in order.
    pub layers: Vec<LayerWeights>,
    /// `[C]`.
    pub output_norm: Tensor,
    /// `[V, C]`; `None` if the embedding serves as the head.
    output: Option<Stack>,
}

impl Weights {
    /// Declares all tensors of `config`, checking each one's shape in the source.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has another shape.
    pub fn declare(device: &Device, config: &ModelConfig, source: &dyn WeightSource) -> Result<Weights, Error> {
        let ModelConfig { dim, ffn_dim, vocab_size, .. } = *config;
        let (q_dim, kv_dim) = (config.q_dim(), config.n_kv_heads * config.head_dim);
        let norm = |name: &str| {
            describe(source, name, &[dim])?;
            Tensor::declare(name, Role::Weights, &[dim], DType::F32)
        };
        let stack = |prefix: &str, names: &[(&str, u32)], cols| Stack::declare(device, source, prefix, names, cols);
        let embd = describe(source, "token_embd.weight", &[vocab_size, dim])?;
        let mut layers = Vec::new();
        for l in 0..config.n_layers {
            let p = format!("blk.{l}.");
            layers.push(LayerWeights {
                attn_norm: norm(&format!("{p}attn_norm.weight"))?,
                attn_qkv: stack(&p, &[("attn_q", q_dim), ("attn_k", kv_dim), ("attn_v", kv_dim)], dim)?,
                attn_output: stack(&p, &[("attn_output", dim)], q_dim)?,
                ffn_norm: norm(&format!("{p}ffn_norm.weight"))?,
                ffn_gate_up: stack(&p, &[("ffn_gate", ffn_dim), ("ffn_up", ffn_dim)], dim)?,
                ffn_down: stack(&p, &[("ffn_down", dim)], ffn_dim)?,
            });
        }
        let output = match source.describe("output.weight") {
            Some(_) => Some(stack("", &[("output", vocab_size)], dim)?),
            None => None,
        };
        Ok(Weights {
            token_embd: Matrix::declare(device, "token_embd.weight", embd.weight, vocab_size, dim)?,
            layers,
            output_norm: norm("output_norm.weight")?,
            output,
        })
    }

    /// Uploads everything, tensor by tensor; `progress` is told the bytes done and the bytes in all.
    ///
    /// # Errors
    /// Errors of the source and of [`Device::write`].
    pub fn upload(
        &self,
        device: &Device,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Error> {
        let total = self.tensors().map(Tensor::size_bytes).sum();
        let mut upload = Upload { device, source, progress, done: 0, total };
        upload.matrix(&self.token_embd, &["token_embd.weight".into()])?;
        for layer in &self.layers {
            upload.named(&layer.attn_norm)?;
            layer.attn_qkv.upload(&mut upload)?;
            layer.attn_output.upload(&mut upload)?;
            upload.named(&layer.ffn_norm)?;
            layer.ffn_gate_up.upload(&mut upload)?;
            layer.ffn_down.upload(&mut upload)?;
        }
        upload.named(&self.output_norm)?;
        if let Some(output) = &self.output {
            output.upload(&mut upload)?;
        }
        Ok(())
    }

    /// Records the head: `logits = x output^T`, with the embedding as `output` where they are tied.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub fn record_head(&self, rec: &mut Recorder, x: &Tensor, logits: &Tensor) -> Result<(), Error> {
        match &self.output {
            Some(output) => output.record(rec, x, logits, false),
            None => Linear::new(&self.token_embd).record(rec, x, logits),
        }
    }

    /// Every tensor.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let layers = self.layers.iter().flat_map(|layer| {
            let norms = [&layer.attn_norm, &layer.ffn_norm].into_iter();
            let stacks = [&layer.attn_qkv, &layer.attn_output, &layer.ffn_gate_up, &layer.ffn_down];
            norms.chain(stacks.into_iter().flat_map(Stack::tensors))
        });
        let head = self.output.iter().flat_map(Stack::tensors);
        self.token_embd.tensors().chain(layers).chain([&self.output_norm]).chain(head)
    }
}

/// The rotation table of a model for `n_pos` positions, declared as `[n_pos, rot_dims / 2, 2]` and filled on demand.
pub(crate) fn rope_tensor(config: &ModelConfig, n_pos: u32) -> Result<Tensor, Error> {
    Tensor::declare("rope", Role::Cache, &[n_pos, config.rope.rot_dims / 2, 2], DType::F32)
}

/// Fills a table from [`rope_tensor`].
pub(crate) fn upload_rope(device: &Device, config: &ModelConfig, table: &Tensor) -> Result<(), Error> {
    device.write(table, 0, &rope_table(&config.rope, table.shape()[0]))
}

/// The tensor `name`, which must have this shape.
fn describe(source: &dyn WeightSource, name: &str, shape: &[u32]) -> Result<SourceTensor, Error> {
    let found = source.describe(name);
    let expected: Vec<u64> = shape.iter().map(|&d| u64::from(d)).collect();
    match found {
        Some(tensor) if tensor.shape == expected => Ok(tensor),
        found => Err(Error::Config {
            field: name.into(),
            expected: format!("a tensor of shape {expected:?}"),
            found: found.map_or("missing".into(), |tensor| format!("one of shape {:?}", tensor.shape)),
        }),
    }
}

/// An upload in progress.
struct Upload<'a> {
    device: &'a Device,
    source: &'a dyn WeightSource,
    progress: &'a mut dyn FnMut(u64, u64),
    done: u64,
    total: u64,
}

impl Upload<'_> {
    fn matrix(&mut self, matrix: &Matrix, names: &[String]) -> Result<(), Error> {
        let parts = names.iter().map(|name| self.source.rows(name)).collect::<Result<Vec<_>, _>>()?;
        let parts: Vec<&[u8]> = parts.iter().map(|part| &**part).collect();
        matrix.upload(self.device, &parts)?;
        self.advance(matrix.tensors().map(Tensor::size_bytes).sum());
        Ok(())
    }

    fn vector(&mut self, tensor: &Tensor, names: &[String]) -> Result<(), Error> {
        let mut values = Vec::with_capacity(tensor.len());
        for name in names {
            values.extend(self.source.floats(name)?);
        }
        self.device.write(tensor, 0, &values)?;
        self.advance(tensor.size_bytes());
        Ok(())
    }

    /// A vector whose label is its name in the source.
    fn named(&mut self, tensor: &Tensor) -> Result<(), Error> {
        self.vector(tensor, &[tensor.label().to_string()])
    }

    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        (self.progress)(self.done, self.total);
    }
}
