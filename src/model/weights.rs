//! A model's weights on a device, under GGUF's names.

use super::block::{Attention, Between, Block, FeedForward, NormPlace, Recurrence};
use super::config::{ModelConfig, NormKind};
use super::experts::ExpertWeights;
use super::stack::{Destination, Joined, RowPlaces, Stack, WeightSource, describe};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{LayerNorm, Linear, Norm, QkNorm};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders::{self, Kernel};
use crate::tensor::{Role, Tensor};

/// Weight and bias of a norm, `[C]` each.
#[derive(Clone, Debug)]
pub struct NormWeights {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl NormWeights {
    pub(super) fn declare(source: &dyn WeightSource, name: &str, config: &ModelConfig) -> Result<NormWeights, Error> {
        let vector = |suffix: &str| table(source, &format!("{name}.{suffix}"), &[config.dim]);
        let bias = match config.norm {
            NormKind::Layer { bias: true } => Some(vector("bias")?),
            NormKind::Layer { bias: false } | NormKind::Rms => None,
        };
        Ok(NormWeights { weight: vector("weight")?, bias })
    }

    /// The root-mean-square normalisation with its epsilon.
    pub(super) fn rms(&self, eps: f32) -> Norm<'_> {
        Norm { weight: &self.weight, eps }
    }

    /// The layer normalisation with its epsilon.
    pub(super) fn layer(&self, eps: f32) -> LayerNorm<'_> {
        LayerNorm { weight: &self.weight, bias: self.bias.as_ref(), eps }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.weight].into_iter().chain(&self.bias)
    }
}

/// The norms of a block's half.
#[derive(Clone, Debug)]
pub struct HalfNorms {
    /// Of its input.
    pub before: Option<NormWeights>,
    /// Of its result, or of the sum.
    pub after: Option<NormWeights>,
}

impl HalfNorms {
    /// Declares those that the place asks for, whose names follow from what they normalise: the input, the result or the
    /// sum.
    fn declare(
        source: &dyn WeightSource,
        prefix: &str,
        config: &ModelConfig,
        place: NormPlace,
        [input, result, sum]: [&str; 3],
    ) -> Result<HalfNorms, Error> {
        let norm = |name: &str| NormWeights::declare(source, &format!("{prefix}{name}"), config).map(Some);
        Ok(HalfNorms {
            before: if place.is_before() { norm(input)? } else { None },
            after: match place {
                NormPlace::Sum => norm(sum)?,
                _ if place.is_on_result() => norm(result)?,
                _ => None,
            },
        })
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.before.iter().chain(&self.after).flat_map(NormWeights::tensors)
    }
}

/// One transformer block.
#[derive(Clone, Debug)]
pub struct BlockWeights {
    /// Of attention.
    pub attn_norms: HalfNorms,
    /// Q, K and V, `[(H + 2 Hkv) D, C]`, or the inputs of what the layer does in place of attention.
    pub attn_qkv: Stack,
    /// Of what it does in place of attention.
    pub recurrence: Option<RecurrenceWeights>,
    /// Norms of queries and of keys.
    qk_norm: Option<Joined>,
    /// Scores of the heads that have no value, `[H]`.
    pub attn_sinks: Option<Tensor>,
    /// `[C, H D]`.
    pub attn_output: Stack,
    /// Of the feed-forward.
    pub ffn_norms: HalfNorms,
    /// `[F, C]`, or gate and up, `[2 F, C]`; nothing where there are experts.
    pub ffn_up: Stack,
    /// `[C, F]`; nothing where there are experts.
    pub ffn_down: Stack,
    /// The experts that the feed-forward consists of, if it does.
    pub experts: Option<ExpertWeights>,
}

/// The vectors of a layer that keeps a state of fixed size.
#[derive(Clone, Debug)]
pub struct RecurrenceWeights {
    /// Of the convolution, `[channels, taps]`.
    pub conv: Tensor,
    /// Of the convolution, `[channels]`.
    pub conv_bias: Option<Tensor>,
    /// Of the heads of a delta rule: decays, time steps, and the weights of the norm, `[2 H + Dv]`.
    heads: Option<Joined>,
}

impl RecurrenceWeights {
    fn declare(
        source: &dyn WeightSource,
        prefix: &str,
        recurrence: &Recurrence,
        dim: u32,
    ) -> Result<RecurrenceWeights, Error> {
        let conv = match recurrence {
            Recurrence::ShortConv { .. } => "shortconv.conv",
            Recurrence::DeltaNet { .. } => "ssm_conv1d",
        };
        let heads = match recurrence {
            Recurrence::DeltaNet { rule, .. } => {
                let member = |name: &str, len| (format!("{prefix}{name}"), len);
                let members = vec![
                    member("ssm_a.weight", rule.n_heads),
                    member("ssm_dt.bias", rule.n_heads),
                    member("ssm_norm.weight", rule.value_dim),
                ];
                Some(Joined::declare(source, members)?)
            }
            Recurrence::ShortConv { .. } => None,
        };
        let channels = recurrence.channels(dim);
        let bias = format!("{prefix}{conv}.bias");
        let conv_bias = match source.describe(&bias) {
            Some(_) => Some(table(source, &bias, &[channels])?),
            None => None,
        };
        let conv = table(source, &format!("{prefix}{conv}.weight"), &[channels, recurrence.taps()])?;
        Ok(RecurrenceWeights { conv, conv_bias, heads })
    }

    /// What the heads of a delta rule have.
    pub(super) fn heads(&self) -> Option<&Tensor> {
        self.heads.as_ref().map(Joined::tensor)
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.conv).chain(&self.conv_bias)
    }
}

impl BlockWeights {
    fn declare(
        device: &Device,
        source: &dyn WeightSource,
        config: &ModelConfig,
        block: &Block,
        prefix: &str,
    ) -> Result<BlockWeights, Error> {
        let (dim, attention, ffn) = (config.dim, &block.attention, &block.feed_forward);
        let (q_dim, kv_dim) = (attention.q_dim(), attention.kv_dim());
        let stack = |names: &[(&str, u32)], cols| Stack::declare(device, source, prefix, names, cols);
        let norms = |place, names| HalfNorms::declare(source, prefix, config, place, names);
        let rows = |name: &str| {
            let described = source.describe(&format!("{prefix}{name}.weight"));
            described.and_then(|tensor| tensor.shape.first().copied())
        };
        let (inputs, output) = match &block.recurrence {
            Some(Recurrence::DeltaNet { rule, .. }) => {
                let (n, inner) = (rule.n_heads, rule.n_heads * rule.value_dim);
                let inputs =
                    vec![("attn_qkv", rule.channels()), ("attn_gate", inner), ("ssm_beta", n), ("ssm_alpha", n)];
                (inputs, ("ssm_out", inner))
            }
            Some(recurrence @ Recurrence::ShortConv { .. }) => {
                (vec![("shortconv.in_proj", recurrence.inputs(dim))], ("shortconv.out_proj", dim))
            }
            None if rows("attn_qkv").is_some() => (vec![("attn_qkv", attention.qkv_dim())], ("attn_output", q_dim)),
            None => {
                let queries = attention.gate_dim() + q_dim;
                (vec![("attn_q", queries), ("attn_k", kv_dim), ("attn_v", kv_dim)], ("attn_output", q_dim))
            }
        };
        let (up, down, experts) = match &ffn.experts {
            Some(experts) => {
                (vec![], vec![], Some(ExpertWeights::declare(device, source, prefix, experts, [dim, ffn.dim])?))
            }
            None => (dense_up(&rows, ffn), vec![("ffn_down".to_owned(), dim)], None),
        };
        let owned = |names: &[(String, u32)], cols| {
            let names: Vec<(&str, u32)> = names.iter().map(|(name, rows)| (name.as_str(), *rows)).collect();
            Stack::declare(device, source, prefix, &names, cols)
        };
        Ok(BlockWeights {
            attn_norms: norms(block.attn_norm, ["attn_norm", "post_attention_norm", "attn_output_norm"])?,
            attn_qkv: stack(&inputs, dim)?,
            qk_norm: match block.recurrence {
                Some(_) => None,
                None => qk_norm(source, prefix, attention)?,
            },
            recurrence: match &block.recurrence {
                Some(recurrence) => Some(RecurrenceWeights::declare(source, prefix, recurrence, dim)?),
                None => None,
            },
            attn_sinks: match attention.sinks {
                true => Some(table(source, &format!("{prefix}attn_sinks.weight"), &[attention.n_heads])?),
                false => None,
            },
            attn_output: stack(&[(output.0, dim)], output.1)?,
            ffn_norms: norms(block.ffn_norm, ["ffn_norm", "post_ffw_norm", "layer_output_norm"])?,
            ffn_up: owned(&up, dim)?,
            ffn_down: owned(&down, ffn.dim)?,
            experts,
        })
    }

    /// Norms of queries and of keys, one after the other.
    pub(super) fn qk_norm(&self) -> Option<&Tensor> {
        self.qk_norm.as_ref().map(Joined::tensor)
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        let router = self.experts.iter().map(|experts| &experts.logits);
        [&self.attn_qkv, &self.attn_output, &self.ffn_up, &self.ffn_down].into_iter().chain(router)
    }

    /// Vectors of F32 under their own names.
    fn vectors(&self) -> impl Iterator<Item = &Tensor> {
        let recurrence = self.recurrence.iter().flat_map(RecurrenceWeights::tensors);
        let choice_bias = self.experts.iter().filter_map(|experts| experts.choice_bias.as_ref());
        self.attn_norms
            .tensors()
            .chain(self.ffn_norms.tensors())
            .chain(&self.attn_sinks)
            .chain(choice_bias)
            .chain(recurrence)
    }
}

/// All weights of a model, declared first and uploaded later.
#[derive(Clone, Debug)]
pub struct Weights {
    /// `[V, C]`.
    pub token_embd: Matrix,
    /// `[positions, C]`.
    pub positions: Option<Tensor>,
    /// `[types, C]`.
    pub token_types: Option<Tensor>,
    /// Of the sum of these.
    pub embd_norm: Option<NormWeights>,
    /// Blocks in order.
    pub blocks: Vec<BlockWeights>,
    /// Of the last block's output.
    pub output_norm: Option<NormWeights>,
    /// The head, `[V, C]`, where the source has one: of an encoder it is not read, and a decoder without one takes the
    /// embedding.
    output: Option<Stack>,
}

impl Weights {
    /// Declares all tensors of `config`, checking each one's shape in the source.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has another shape.
    pub fn declare(device: &Device, config: &ModelConfig, source: &dyn WeightSource) -> Result<Weights, Error> {
        let &ModelConfig { dim, vocab_size, max_seq_len, n_token_types, .. } = config;
        let norm = |name: &str, is_there| match is_there {
            true => NormWeights::declare(source, name, config).map(Some),
            false => Ok(None),
        };
        let embd = describe(source, "token_embd.weight", &[vocab_size, dim])?;
        let token_embd = Matrix::declare(device, "token_embd.weight", embd.weight, vocab_size, dim)?;
        let blocks = config.blocks.iter().enumerate();
        let blocks = blocks
            .map(|(l, block)| BlockWeights::declare(device, source, config, block, &format!("blk.{l}.")))
            .collect::<Result<_, _>>()?;
        let positions = match config.positions {
            Some(positions) => Some(table(source, "position_embd.weight", &[max_seq_len + positions.first, dim])?),
            None => None,
        };
        let token_types = match n_token_types {
            0 => None,
            n => Some(table(source, "token_types.weight", &[n, dim])?),
        };
        let output = match source.describe("output.weight") {
            Some(_) if config.has_head => Some(Stack::declare(device, source, "", &[("output", vocab_size)], dim)?),
            _ => None,
        };
        Ok(Weights {
            token_embd,
            positions,
            token_types,
            embd_norm: norm("token_embd_norm", config.embd_norm)?,
            blocks,
            output_norm: norm("output_norm", config.output_norm)?,
            output,
        })
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.blocks.iter().flat_map(BlockWeights::stacks).chain(&self.output)
    }

    fn experts(&self) -> impl Iterator<Item = &ExpertWeights> {
        self.blocks.iter().filter_map(|block| block.experts.as_ref())
    }

    fn joined(&self) -> impl Iterator<Item = &Joined> {
        self.blocks.iter().flat_map(|block| {
            let heads = block.recurrence.iter().filter_map(|recurrence| recurrence.heads.as_ref());
            block.qk_norm.iter().chain(heads)
        })
    }

    /// Tensors of F32, whose labels are their names in the source.
    fn tables(&self) -> impl Iterator<Item = &Tensor> {
        let norms = self.embd_norm.iter().chain(&self.output_norm).flat_map(NormWeights::tensors);
        let norms = norms.chain(self.blocks.iter().flat_map(BlockWeights::vectors));
        norms.chain(&self.positions).chain(&self.token_types)
    }

    /// Where the data of each source tensor belongs, by its name.
    pub fn destinations(&self) -> impl Iterator<Item = (&str, Destination)> {
        let tables = self.tables();
        let tables = tables
            .map(|tensor| (tensor.label(), Destination::Values { tensor: tensor.clone(), places: RowPlaces::from(0) }));
        let embd = Destination::Rows { matrix: self.token_embd.clone(), places: RowPlaces::from(0) };
        tables
            .chain(self.joined().flat_map(Joined::destinations))
            .chain(self.stacks().flat_map(Stack::destinations))
            .chain(self.experts().flat_map(ExpertWeights::destinations))
            .chain([("token_embd.weight", embd)])
    }

    /// Every tensor.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let tables = self.tables().chain(self.joined().map(Joined::tensor));
        let experts = self.experts().flat_map(ExpertWeights::tensors);
        tables.chain(self.stacks().flat_map(Stack::tensors)).chain(experts).chain(self.token_embd.tensors())
    }

    /// Records the head, `y = norm(x) outputᵀ`, with the embedding as `output` where they are tied.
    ///
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees.
    pub(super) fn record_output(
        &self,
        rec: &mut Recorder,
        norm: Option<Norm<'_>>,
        x: &Tensor,
        y: &Tensor,
    ) -> Result<(), Error> {
        match &self.output {
            Some(output) => output.record(rec, norm, x, y, false),
            None => Linear { norm, ..Linear::new(&self.token_embd) }.record(rec, x, y),
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
        self.blocks.iter().flat_map(|block| {
            let up = if block.ffn_up.as_one().is_some() { &shaders::GATE_UP } else { &shaders::MATVEC };
            let experts = block.experts.iter().flat_map(|experts| {
                let [up, down] = experts.matrices();
                of_stack(&shaders::MATVEC, &experts.logits)
                    .chain(up.map(|w| (&shaders::EXPERT_GATE_UP, w)))
                    .chain(down.map(|w| (&shaders::EXPERT_DOWN, w)))
            });
            of_stack(&shaders::MATVEC, &block.attn_qkv)
                .chain(of_stack(&shaders::MATVEC, &block.attn_output))
                .chain(experts)
                .chain(of_stack(up, &block.ffn_up))
                .chain(of_stack(&shaders::MATVEC, &block.ffn_down))
        })
    }
}

/// Tensors of a layer with their rows.
type Members = Vec<(String, u32)>;

/// The first matrices of a feed-forward without experts, and their rows. `rows` gives those of a tensor of the layer.
fn dense_up(rows: &dyn Fn(&str) -> Option<u64>, ffn: &FeedForward) -> Members {
    let named = |name: &str, rows| (name.to_owned(), rows);
    match ffn.between {
        // One matrix, or two.
        Between::Gate(_) if rows("ffn_gate").is_some() || rows("ffn_up") != Some(ffn.up_dim().into()) => {
            vec![named("ffn_gate", ffn.dim), named("ffn_up", ffn.dim)]
        }
        _ => vec![named("ffn_up", ffn.up_dim())],
    }
}

/// Declares the norms of a layer's queries and keys side by side, if it has them.
fn qk_norm(source: &dyn WeightSource, prefix: &str, attention: &Attention) -> Result<Option<Joined>, Error> {
    let (q_len, k_len) = match attention.qk_norm {
        None => return Ok(None),
        Some(QkNorm::Heads | QkNorm::RotatedHeads) => (attention.head_dim, attention.head_dim),
        Some(QkNorm::Whole) => (attention.q_dim(), attention.kv_dim()),
    };
    let member = |name: &str, len| (format!("{prefix}{name}.weight"), len);
    Joined::declare(source, vec![member("attn_q_norm", q_len), member("attn_k_norm", k_len)]).map(Some)
}

/// Declares a tensor of F32 under its name in the source.
pub(super) fn table(source: &dyn WeightSource, name: &str, shape: &[u32]) -> Result<Tensor, Error> {
    describe(source, name, shape)?;
    Tensor::declare(name, Role::Weights, shape, DType::F32)
}

/// A stack's matrices with the kernel that takes them.
fn of_stack<'a>(kernel: &'static Kernel, stack: &'a Stack) -> impl Iterator<Item = (&'static Kernel, &'a Matrix)> {
    stack.matrices().map(move |(w, _)| (kernel, w))
}
