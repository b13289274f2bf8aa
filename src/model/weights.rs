//! A model's weights on a device, under GGUF's names.

use crate::device::Device;
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::kernels::{Activation, Linear, Norm, fold_norm, matmul, rope_table};
use crate::matrix::Matrix;
use crate::model::ModelConfig;
use crate::recording::Recorder;
use crate::shaders::{self, Kernel};
use crate::tensor::{Role, Tensor};

/// A tensor in a source: how its rows will be delivered, and its dimensions, the contiguous one last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// Weight type of the rows.
    pub weight: WeightType,
    /// `[rows, columns]`, or `[columns]`.
    pub shape: Vec<u64>,
}

/// Which tensors a source has. Names are GGUF's: `token_embd.weight`, `blk.0.attn_q.weight` and so on.
pub trait WeightSource {
    /// Type and shape of a tensor, if it is there.
    fn describe(&self, name: &str) -> Option<SourceTensor>;
}

/// Where the data of a source's tensor belongs.
#[derive(Clone, Debug)]
pub enum Destination {
    /// Rows of a matrix from `first_row` on.
    Rows {
        /// The matrix, whose [`WeightType`] the rows have.
        matrix: Matrix,
        /// First row.
        first_row: u32,
    },
    /// Elements of a vector from `first` on.
    Values {
        /// The vector.
        tensor: Tensor,
        /// First element.
        first: usize,
    },
}

/// Matrices side by side that share an input, such as Q, K and V: neighbours of one weight type are one matrix.
#[derive(Clone, Debug)]
pub struct Stack {
    parts: Vec<Part>,
    bias: Option<Bias>,
}

#[derive(Clone, Debug)]
struct Part {
    matrix: Matrix,
    /// Source tensors from top to bottom, with their numbers of rows.
    members: Vec<(String, u32)>,
}

#[derive(Clone, Debug)]
struct Bias {
    tensor: Tensor,
    /// As [`Part::members`].
    members: Vec<(String, u32)>,
}

impl Stack {
    /// Declares the matrices `names`, each `[rows, cols]`, and their biases if the source has them.
    pub(super) fn declare(
        device: &Device,
        source: &dyn WeightSource,
        prefix: &str,
        names: &[(&str, u32)],
        cols: u32,
    ) -> Result<Stack, Error> {
        let mut groups: Vec<(WeightType, Vec<(String, u32)>)> = Vec::new();
        for &(name, rows) in names {
            let member = (format!("{prefix}{name}.weight"), rows);
            let found = describe(source, &member.0, &[rows, cols])?;
            match groups.last_mut() {
                Some((weight, members)) if *weight == found.weight => members.push(member),
                _ => groups.push((found.weight, vec![member])),
            }
        }
        let part = |(weight, members): (WeightType, Vec<(String, u32)>)| {
            let matrix = Matrix::declare(device, &label(&members), weight, n_rows(&members), cols)?;
            Ok(Part { matrix, members })
        };
        let parts = groups.into_iter().map(part).collect::<Result<_, Error>>()?;

        let members: Vec<_> = names.iter().map(|(name, rows)| (format!("{prefix}{name}.bias"), *rows)).collect();
        let bias = if members.iter().any(|(name, _)| source.describe(name).is_some()) {
            for (name, rows) in &members {
                describe(source, name, &[*rows])?;
            }
            let tensor = Tensor::declare(label(&members), Role::Weights, &[n_rows(&members)], DType::F32)?;
            Some(Bias { tensor, members })
        } else {
            None
        };
        Ok(Stack { parts, bias })
    }

    /// Records `y = x wᵀ (+ bias)`, or `y += ..`, of `x` as it is or normalised.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub fn record(
        &self,
        rec: &mut Recorder,
        norm: Option<Norm<'_>>,
        x: &Tensor,
        y: &Tensor,
        accumulate: bool,
    ) -> Result<(), Error> {
        let (x, norm) = fold_norm(rec, x, norm, self.bias.is_some())?;
        for (w, y_start) in self.matrices() {
            let linear = Linear { bias: self.bias(), norm, y_start, accumulate, ..Linear::new(w) };
            linear.record(rec, &x, y)?;
        }
        Ok(())
    }

    /// Records `y = act(x wᵀ (+ bias))`, or `y += ..`, as tiles however few rows `x` has: a row's result is then the same
    /// whatever rows stand around it.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub fn record_tiled(
        &self,
        rec: &mut Recorder,
        x: &Tensor,
        activation: Option<Activation>,
        accumulate: bool,
        y: &Tensor,
    ) -> Result<(), Error> {
        for (w, y_start) in self.matrices() {
            matmul(rec, &Linear { activation, y_start, accumulate, ..self.tiled(w) }, x, y)?;
        }
        Ok(())
    }

    /// The stack as one such product, if it has a single matrix.
    pub(super) fn as_tiled(&self) -> Option<Linear<'_>> {
        match self.parts.as_slice() {
            [part] => Some(self.tiled(&part.matrix)),
            _ => None,
        }
    }

    /// A product whose sums are in one order for every number of rows.
    fn tiled<'a>(&'a self, w: &'a Matrix) -> Linear<'a> {
        Linear { bias: self.bias(), batch_invariant: true, ..Linear::new(w) }
    }

    /// The matrices from top to bottom, and their first rows.
    pub fn matrices(&self) -> impl Iterator<Item = (&Matrix, u32)> {
        self.parts.iter().scan(0, |next, part| {
            let first_row = *next;
            *next += part.matrix.rows();
            Some((&part.matrix, first_row))
        })
    }

    /// One value for each row.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref().map(|bias| &bias.tensor)
    }

    /// The stack as a single matrix without a bias in one slab, if it is one.
    pub fn as_one(&self) -> Option<&Matrix> {
        match (self.parts.as_slice(), &self.bias) {
            ([part], None) if part.matrix.n_slabs() == 1 => Some(&part.matrix),
            _ => None,
        }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let biases = self.bias.iter().map(|bias| &bias.tensor);
        self.parts.iter().flat_map(|part| part.matrix.tensors()).chain(biases)
    }

    pub(super) fn destinations(&self) -> impl Iterator<Item = (&str, Destination)> {
        let rows = self.parts.iter().flat_map(|part| {
            starts(&part.members)
                .map(|(name, first_row)| (name, Destination::Rows { matrix: part.matrix.clone(), first_row }))
        });
        let biases = self.bias.iter().flat_map(|bias| {
            starts(&bias.members)
                .map(|(name, first)| (name, Destination::Values { tensor: bias.tensor.clone(), first: first as usize }))
        });
        rows.chain(biases)
    }
}

/// The name of several source tensors as one.
fn label(members: &[(String, u32)]) -> String {
    members.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join("+")
}

fn n_rows(members: &[(String, u32)]) -> u32 {
    members.iter().map(|(_, rows)| rows).sum()
}

/// Each member's name and first row.
fn starts(members: &[(String, u32)]) -> impl Iterator<Item = (&str, u32)> {
    members.iter().scan(0, |next, (name, rows)| {
        let first = *next;
        *next += rows;
        Some((name.as_str(), first))
    })
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

    /// Where the data of each source tensor belongs, by its name.
    pub fn destinations(&self) -> impl Iterator<Item = (&str, Destination)> {
        let vector = |tensor: &'_ Tensor| Destination::Values { tensor: tensor.clone(), first: 0 };
        // A vector's label is its name in the source.
        let norms = self.layers.iter().flat_map(|layer| [&layer.attn_norm, &layer.ffn_norm]).chain([&self.output_norm]);
        let stacks = self
            .layers
            .iter()
            .flat_map(|layer| [&layer.attn_qkv, &layer.attn_output, &layer.ffn_gate_up, &layer.ffn_down])
            .chain(&self.output);
        let embd = Destination::Rows { matrix: self.token_embd.clone(), first_row: 0 };
        norms
            .map(move |norm| (norm.label(), vector(norm)))
            .chain(stacks.flat_map(Stack::destinations))
            .chain([("token_embd.weight", embd)])
    }

    /// Records the final norm and the head, with the embedding as `output` where they are tied:
    /// `logits = norm(x) outputᵀ`.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub fn record_head(&self, rec: &mut Recorder, x: &Tensor, eps: f32, logits: &Tensor) -> Result<(), Error> {
        let norm = Some(Norm { weight: &self.output_norm, eps });
        match &self.output {
            Some(output) => output.record(rec, norm, x, logits, false),
            None => Linear { norm, ..Linear::new(&self.token_embd) }.record(rec, x, logits),
        }
    }

    /// The matrices of a decode pass, each with the kernel that takes it.
    pub(crate) fn products(&self) -> impl Iterator<Item = (&'static Kernel, &Matrix)> {
        let head = self.output.iter().flat_map(|output| of_stack(&shaders::MATVEC, output));
        let tied = self.output.is_none().then_some((&shaders::MATVEC, &self.token_embd));
        self.layer_products().chain(head).chain(tied)
    }

    /// Those of the layers alone.
    pub(crate) fn layer_products(&self) -> impl Iterator<Item = (&'static Kernel, &Matrix)> {
        self.layers.iter().flat_map(|layer| {
            let is_whole = layer.attn_qkv.matrices().all(|(w, _)| w.n_slabs() == 1);
            let qkv = if is_whole { &shaders::QKV } else { &shaders::MATVEC };
            let gate_up = if layer.ffn_gate_up.as_one().is_some() { &shaders::GATE_UP } else { &shaders::MATVEC };
            of_stack(qkv, &layer.attn_qkv)
                .chain(of_stack(&shaders::MATVEC, &layer.attn_output))
                .chain(of_stack(gate_up, &layer.ffn_gate_up))
                .chain(of_stack(&shaders::MATVEC, &layer.ffn_down))
        })
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
pub(super) fn describe(source: &dyn WeightSource, name: &str, shape: &[u32]) -> Result<SourceTensor, Error> {
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

/// A stack's matrices with the kernel that takes them.
fn of_stack<'a>(kernel: &'static Kernel, stack: &'a Stack) -> impl Iterator<Item = (&'static Kernel, &'a Matrix)> {
    stack.matrices().map(move |(w, _)| (kernel, w))
}
