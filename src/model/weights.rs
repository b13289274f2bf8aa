//! A model's weights on a device, under GGUF's names.

use super::block::{Attention, Block, NormPlace, Recurrence};
use super::config::{ModelConfig, NormKind};
use super::experts::ExpertWeights;
use super::further::FurtherWeights;
use super::per_layer::{PerLayerHalf, PerLayerWeights};
use super::stack::{Destination, Joined, RowPlaces, Stack, WeightSource, describe, table};
use crate::error::Error;
use crate::kernels::{LayerNorm, Linear, Norm, QkNorm};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders::{self, Kernel};
use crate::target::Target;
use crate::tensor::Tensor;

/// The table of tokens, by its name in sources.
pub(super) const TOKEN_EMBD: &str = "token_embd.weight";

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
    /// Of the third half.
    pub per_layer: Option<PerLayerHalf>,
    /// What the stream is multiplied by at the end, `[1]`.
    pub output_scale: Option<Tensor>,
}

/// The vectors of a layer that keeps a state of fixed size.
#[derive(Clone, Debug)]
pub struct RecurrenceWeights {
    /// Of the convolution, `[channels, taps]`.
    pub conv: Tensor,
    /// Of the convolution, `[channels]`.
    pub conv_bias: Option<Tensor>,
    /// Of the heads of a delta rule: decays, time steps, and the weights of the norm, `[2 H + Dv]`; of a selective scan:
    /// decays, time steps, and factors of the values that are added, `[3 H]`.
    heads: Option<Joined>,
    /// Norm of what a selective scan gives, `[H P]`.
    pub norm: Option<Tensor>,
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
            Recurrence::DeltaNet { .. } | Recurrence::Mamba2 { .. } => "ssm_conv1d",
        };
        let member = |name: &str, len| (format!("{prefix}{name}"), len);
        let heads = match recurrence {
            Recurrence::DeltaNet { rule, .. } => {
                let members = vec![
                    member("ssm_a.weight", rule.n_heads),
                    member("ssm_dt.bias", rule.n_heads),
                    member("ssm_norm.weight", rule.value_dim),
                ];
                Some(Joined::declare(source, members)?)
            }
            Recurrence::Mamba2 { scan, .. } => {
                let names = ["ssm_a.weight", "ssm_dt.bias", "ssm_d.weight"];
                Some(Joined::declare(source, names.map(|name| member(name, scan.n_heads)).into())?)
            }
            Recurrence::ShortConv { .. } => None,
        };
        let norm = match recurrence {
            Recurrence::Mamba2 { scan, .. } => {
                Some(table(source, &format!("{prefix}ssm_norm.weight"), &[scan.inner_dim()])?)
            }
            Recurrence::DeltaNet { .. } | Recurrence::ShortConv { .. } => None,
        };
        let channels = recurrence.channels(dim);
        let bias = format!("{prefix}{conv}.bias");
        let conv_bias = match source.describe(&bias) {
            Some(_) => Some(table(source, &bias, &[channels])?),
            None => None,
        };
        let conv = table(source, &format!("{prefix}{conv}.weight"), &[channels, recurrence.taps()])?;
        Ok(RecurrenceWeights { conv, conv_bias, heads, norm })
    }

    /// What the heads of a delta rule or a selective scan have.
    pub(super) fn heads(&self) -> Option<&Tensor> {
        self.heads.as_ref().map(Joined::tensor)
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        std::iter::once(&self.conv).chain(&self.conv_bias).chain(&self.norm)
    }
}

impl BlockWeights {
    fn declare(
        target: &Target,
        source: &dyn WeightSource,
        config: &ModelConfig,
        block: &Block,
        prefix: &str,
    ) -> Result<BlockWeights, Error> {
        let (dim, attention, ffn) = (config.dim, &block.attention, &block.feed_forward);
        let stack = |names: &[(&str, u32)], cols| Stack::declare(target, source, prefix, names, cols);
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
            Some(Recurrence::Mamba2 { scan, .. }) => (vec![("ssm_in", scan.inputs())], ("ssm_out", scan.inner_dim())),
            Some(recurrence @ Recurrence::ShortConv { .. }) => {
                (vec![("shortconv.in_proj", recurrence.inputs(dim))], ("shortconv.out_proj", dim))
            }
            // Only of these layers the heads were checked.
            None => {
                let (q_dim, kv_dim) = (attention.q_dim(), attention.kv_dim());
                let mut inputs = match rows("attn_qkv") {
                    Some(_) => vec![("attn_qkv", attention.qkv_dim())],
                    None => vec![("attn_q", attention.gate_dim() + q_dim)],
                };
                if rows("attn_qkv").is_none() && attention.keys_of.is_none() {
                    inputs.extend([("attn_k", kv_dim), ("attn_v", kv_dim)]);
                }
                (inputs, ("attn_output", q_dim))
            }
        };
        let owned = |names: &[(String, u32)], cols| {
            let names: Vec<(&str, u32)> = names.iter().map(|(name, rows)| (name.as_str(), *rows)).collect();
            Stack::declare(target, source, prefix, &names, cols)
        };
        let (up, down, experts) = match &ffn.experts {
            Some(experts) => {
                (vec![], vec![], Some(ExpertWeights::declare(target, source, prefix, experts, [dim, ffn.dim])?))
            }
            None => {
                // A feed-forward beside no experts.
                let suffix = match (rows("ffn_down"), rows("ffn_down_shexp")) {
                    (None, Some(_)) => "_shexp",
                    _ => "",
                };
                let up = dense_up(&rows, suffix, [ffn.dim, ffn.up_dim()]);
                (up, vec![(format!("ffn_down{suffix}"), dim)], None)
            }
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
            per_layer: match config.per_layer.filter(|_| block.per_layer) {
                Some(part) => Some(PerLayerHalf::declare(target, source, config, prefix, part.dim)?),
                None => None,
            },
            output_scale: match block.output_scale {
                true => Some(table(source, &format!("{prefix}layer_output_scale.weight"), &[1])?),
                false => None,
            },
        })
    }

    /// Norms of queries and of keys, one after the other.
    pub(super) fn qk_norm(&self) -> Option<&Tensor> {
        self.qk_norm.as_ref().map(Joined::tensor)
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        let router = self.experts.iter().map(|experts| &experts.logits);
        let per_layer = self.per_layer.iter().flat_map(|half| [&half.gate, &half.proj]);
        let halves = [&self.attn_qkv, &self.attn_output, &self.ffn_up, &self.ffn_down].into_iter();
        halves.chain(router).chain(per_layer)
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
            .chain(self.per_layer.iter().flat_map(|half| half.norm.tensors()))
            .chain(&self.output_scale)
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
    /// Of the second table of tokens, of which each layer reads a part.
    pub per_layer: Option<PerLayerWeights>,
    /// Of the sum of these.
    pub embd_norm: Option<NormWeights>,
    /// Blocks in order.
    pub blocks: Vec<BlockWeights>,
    /// What the head for further tokens has beside its block, which is the last.
    pub further: Option<FurtherWeights>,
    /// Of the last layer's output.
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
    pub fn declare(target: &Target, config: &ModelConfig, source: &dyn WeightSource) -> Result<Weights, Error> {
        let &ModelConfig { dim, vocab_size, max_seq_len, n_token_types, .. } = config;
        let norm = |name: &str, is_there| match is_there {
            true => NormWeights::declare(source, name, config).map(Some),
            false => Ok(None),
        };
        let embd = describe(source, TOKEN_EMBD, &[vocab_size, dim])?;
        let token_embd = Matrix::declare(target, TOKEN_EMBD, embd.weight, vocab_size, dim)?;
        let blocks = config.blocks.iter().enumerate();
        let blocks = blocks
            .map(|(l, block)| BlockWeights::declare(target, source, config, block, &format!("blk.{l}.")))
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
            Some(_) if config.has_head => Some(Stack::declare(target, source, "", &[("output", vocab_size)], dim)?),
            _ => None,
        };
        Ok(Weights {
            token_embd,
            positions,
            token_types,
            per_layer: match config.per_layer {
                Some(per_layer) => Some(PerLayerWeights::declare(target, source, config, per_layer)?),
                None => None,
            },
            embd_norm: norm("token_embd_norm", config.embd_norm)?,
            blocks,
            further: match config.n_further {
                0 => None,
                _ => Some(FurtherWeights::declare(target, source, config, config.n_layers() as usize)?),
            },
            output_norm: norm("output_norm", config.output_norm)?,
            output,
        })
    }

    /// Declares slots for `n_slots` experts of each of these layers that has experts, see [`ExpertWeights::keep`]: passes of so
    /// few tokens that all they can choose has room compute with them.
    ///
    /// # Errors
    /// Errors of [`Matrix::declare`].
    pub(crate) fn keep_experts(
        &mut self,
        target: &Target,
        config: &ModelConfig,
        source: &dyn WeightSource,
        layers: std::ops::Range<u32>,
        n_slots: u32,
    ) -> Result<(), Error> {
        let of_layers =
            layers.clone().zip(config.blocks.get(layers.start as usize..layers.end as usize).unwrap_or(&[]));
        let most_used = of_layers.clone().filter_map(|(_, block)| Some(block.feed_forward.experts?.n_used)).max();
        let most_tokens = n_slots / most_used.unwrap_or(1).max(1);
        for (l, block) in of_layers {
            let weights = self.blocks.get_mut(l as usize).and_then(|weights| weights.experts.as_mut());
            if let (Some(experts), Some(weights)) = (&block.feed_forward.experts, weights) {
                let dims = [config.dim, block.feed_forward.dim];
                weights.keep(target, source, &format!("blk.{l}."), experts, dims, [n_slots, most_tokens])?;
            }
        }
        Ok(())
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        let per_layer = self.per_layer.iter().map(|per_layer| &per_layer.proj);
        self.blocks.iter().flat_map(BlockWeights::stacks).chain(&self.output).chain(per_layer)
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
        let per_layer = self.per_layer.iter().map(|per_layer| &per_layer.norm);
        let further = self.further.iter().flat_map(FurtherWeights::tables);
        norms.chain(&self.positions).chain(&self.token_types).chain(per_layer).chain(further)
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
            .chain([(TOKEN_EMBD, embd)])
            .chain(self.per_layer.iter().map(PerLayerWeights::destination))
            .chain(self.further.iter().map(FurtherWeights::destination))
    }

    /// Every tensor.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let tables = self.tables().chain(self.joined().map(Joined::tensor));
        let experts = self.experts().flat_map(ExpertWeights::tensors);
        let per_layer = self.per_layer.iter().flat_map(|per_layer| per_layer.token_embd.tensors());
        let stacks = self.stacks().flat_map(Stack::tensors).chain(experts);
        let further = self.further.iter().flat_map(FurtherWeights::matrices).flat_map(Matrix::tensors);
        tables.chain(stacks).chain(self.token_embd.tensors()).chain(per_layer).chain(further)
    }

    /// Whether the head is a matrix of its own.
    pub(super) fn has_output(&self) -> bool {
        self.output.is_some()
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
        let tied = self.output.is_none().then_some((&shaders::MATVEC.kernel, &self.token_embd));
        self.layer_products().chain(head).chain(tied)
    }

    /// Those of the layers alone.
    pub(crate) fn layer_products(&self) -> impl Iterator<Item = (&'static Kernel, &Matrix)> {
        self.blocks.iter().flat_map(|block| {
            // Ups apart from their gates are measured as a plain product.
            let up = if block.ffn_up.as_one().is_some() { &shaders::GATE_UP.kernel } else { &shaders::MATVEC.kernel };
            let experts = block.experts.iter().flat_map(|experts| {
                let [up, down] = experts.matrices();
                of_stack(&shaders::MATVEC, &experts.logits)
                    .chain(up.map(|w| (&shaders::EXPERT_GATE_UP.kernel, w)))
                    .chain(down.map(|w| (&shaders::EXPERT_DOWN.kernel, w)))
            });
            let per_layer = block.per_layer.iter().flat_map(|half| [&half.gate, &half.proj]);
            of_stack(&shaders::MATVEC, &block.attn_qkv)
                .chain(per_layer.flat_map(|stack| of_stack(&shaders::MATVEC, stack)))
                .chain(of_stack(&shaders::MATVEC, &block.attn_output))
                .chain(experts)
                .chain(of_stack(up, &block.ffn_up))
                .chain(of_stack(&shaders::MATVEC, &block.ffn_down))
        })
    }
}

/// Tensors of a layer with their rows.
type Members = Vec<(String, u32)>;

/// The first matrices of a feed-forward of this width, which have so many rows together: one matrix, or gates and ups.
/// `rows` gives those of a tensor of the layer, whose names end in `suffix`.
fn dense_up(rows: &dyn Fn(&str) -> Option<u64>, suffix: &str, [ffn_dim, up_dim]: [u32; 2]) -> Members {
    let [gate, up] = ["gate", "up"].map(|name| format!("ffn_{name}{suffix}"));
    match up_dim > ffn_dim && (rows(&gate).is_some() || rows(&up) != Some(up_dim.into())) {
        true => vec![(gate, ffn_dim), (up, ffn_dim)],
        false => vec![(up, up_dim)],
    }
}

/// Declares the norms of a layer's queries and keys side by side, if it has them.
fn qk_norm(source: &dyn WeightSource, prefix: &str, attention: &Attention) -> Result<Option<Joined>, Error> {
    let (q_len, k_len) = match attention.qk_norm {
        None => return Ok(None),
        Some(QkNorm::Heads | QkNorm::RotatedHeads | QkNorm::HeadsAndValues) => (attention.head_dim, attention.head_dim),
        Some(QkNorm::Whole) => (attention.q_dim(), attention.kv_dim()),
    };
    let member = |name: &str, len| (format!("{prefix}{name}.weight"), len);
    let of_keys = attention.keys_of.is_none().then(|| member("attn_k_norm", k_len));
    let members = [member("attn_q_norm", q_len)].into_iter().chain(of_keys).collect();
    Joined::declare(source, members).map(Some)
}

/// A stack's matrices with the kernel that takes them.
fn of_stack<'a>(kernel: &'static Kernel, stack: &'a Stack) -> impl Iterator<Item = (&'static Kernel, &'a Matrix)> {
    stack.matrices().map(move |(w, _)| (kernel, w))
}
