//! A model's weights on a device, by GGUF name.

use super::block::{Attention, Block, Halves, Latent, NormPlace, OutputGates, Recurrence};
use super::config::{ModelConfig, NormKind};
use super::cross::CrossWeights;
use super::experts::{BesideWeights, ExpertWeights};
use super::mtp::MtpWeights;
use super::per_layer::{PerLayerHalf, PerLayerWeights};
use super::stack::{Joined, RowPlaces, Stack, TensorSlot, WeightSource, describe, table};
use crate::error::Error;
use crate::kernels::{LayerNorm, Linear, Norm, QkNorm};
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders::{self, Kernel};
use crate::target::Target;
use crate::tensor::Tensor;

/// Name of the token embedding.
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

    /// As an RMS norm.
    pub(super) fn rms(&self, eps: f32) -> Norm<'_> {
        Norm { weight: &self.weight, eps }
    }

    /// As a layer norm.
    pub(super) fn layer(&self, eps: f32) -> LayerNorm<'_> {
        LayerNorm { weight: &self.weight, bias: self.bias.as_ref(), eps }
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.weight].into_iter().chain(&self.bias)
    }
}

/// Norms of a block's half.
#[derive(Clone, Debug)]
pub struct HalfNorms {
    /// Norm of the input.
    pub before: Option<NormWeights>,
    /// Norm of the output, or of the sum.
    pub after: Option<NormWeights>,
}

impl HalfNorms {
    /// Declares the norms for this place; their names say whether they apply to the input, the output or the sum.
    pub(super) fn declare(
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

    pub(super) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.before.iter().chain(&self.after).flat_map(NormWeights::tensors)
    }
}

/// One transformer block.
#[derive(Clone, Debug)]
pub struct BlockWeights {
    /// Norms of attention.
    pub attn_norms: HalfNorms,
    /// Q, K and V, `[(H + 2 Hkv) D, C]`; empty without attention.
    pub attn_qkv: Stack,
    /// Recurrence.
    pub recurrence: Option<RecurrenceWeights>,
    /// Further weights of latent attention.
    pub latent: Option<LatentWeights>,
    /// Norms of queries and of keys.
    qk_norm: Option<Joined>,
    /// Attention sinks, `[H]`.
    pub attn_sinks: Option<Tensor>,
    /// Output projection, `[C, H D]`; empty without attention.
    pub attn_output: Stack,
    /// Attention to an encoder's output.
    pub cross: Option<CrossWeights>,
    /// Norms of the feed-forward.
    pub ffn_norms: HalfNorms,
    /// `[F, C]`, or gate and up, `[2 F, C]`; empty without a dense feed-forward.
    pub ffn_up: Stack,
    /// `[C, F]`; empty without a dense feed-forward.
    pub ffn_down: Stack,
    /// Mixture of experts.
    pub experts: Option<ExpertWeights>,
    /// Third half.
    pub per_layer: Option<PerLayerHalf>,
    /// Output scale, `[1]`.
    pub output_scale: Option<Tensor>,
}

/// Weights of latent attention beside the products of the layer's input.
#[derive(Clone, Debug)]
pub struct LatentWeights {
    /// Norm of the queries' latent, `[Rq]`, and their projection, `[H (N + R), Rq]`.
    pub queries: Option<(Tensor, Stack)>,
    /// Norm of the latent, `[L]`.
    pub kv_norm: Tensor,
    /// What makes keys of the latent, `[H L, N]` by head, and values, `[H V, L]`; or both, `[H (N + V), L]`, which then
    /// stand one above the other for each head.
    pub keys: Stack,
    /// What makes values of the latent, if apart.
    pub values: Option<Stack>,
}

impl LatentWeights {
    fn declare(
        target: &Target,
        source: &dyn WeightSource,
        prefix: &str,
        attention: &Attention,
        latent: &Latent,
    ) -> Result<LatentWeights, Error> {
        let &Latent { kv_rank, q_rank, nope_dim, value_dim, .. } = latent;
        let n_heads = attention.n_heads;
        let stack = |name, rows, cols| Stack::declare(target, source, prefix, &[(name, rows)], cols);
        let vector = |name: &str, len| table(source, &format!("{prefix}{name}.weight"), &[len]);
        let is_joint = source.describe(&format!("{prefix}attn_kv_b.weight")).is_some();
        Ok(LatentWeights {
            queries: match q_rank {
                Some(rank) => {
                    let [query_dim, _] = attention.latent_dims(latent);
                    Some((vector("attn_q_a_norm", rank)?, stack("attn_q_b", query_dim, rank)?))
                }
                None => None,
            },
            kv_norm: vector("attn_kv_a_norm", kv_rank)?,
            keys: match is_joint {
                true => stack("attn_kv_b", n_heads * (nope_dim + value_dim), kv_rank)?,
                false => stack("attn_k_b", n_heads * kv_rank, nope_dim)?,
            },
            values: match is_joint {
                true => None,
                false => Some(stack("attn_v_b", n_heads * value_dim, kv_rank)?),
            },
        })
    }

    fn stacks(&self) -> impl Iterator<Item = &Stack> {
        self.queries.iter().map(|(_, stack)| stack).chain([&self.keys]).chain(&self.values)
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.queries.iter().map(|(norm, _)| norm).chain([&self.kv_norm])
    }
}

/// Weights of a recurrence.
#[derive(Clone, Debug)]
pub struct RecurrenceWeights {
    /// Input projection.
    pub input: Stack,
    /// Output projection.
    pub output: Stack,
    /// Convolution, `[channels, taps]`.
    conv: Joined,
    /// Convolution, `[channels]`.
    pub conv_bias: Option<Tensor>,
    /// Per-head vectors. Delta rule: rates, time steps and norm weights, `[H + decays + Dv]`; selective scan: decays, time
    /// steps and D, `[3 H]`.
    heads: Option<Joined>,
    /// Norm of a selective scan's output, `[H P]`, if it has one.
    pub norm: Option<Tensor>,
    /// Groups of heads that are normalised separately.
    pub n_norm_groups: u32,
}

impl RecurrenceWeights {
    fn declare(
        target: &Target,
        source: &dyn WeightSource,
        prefix: &str,
        recurrence: &Recurrence,
        dim: u32,
    ) -> Result<RecurrenceWeights, Error> {
        let stack = |names: &[(&str, u32)], cols| Stack::declare(target, source, prefix, names, cols);
        let rows = |name: &str| source.describe(&format!("{prefix}{name}.weight"));
        let (inputs, output) = match recurrence {
            Recurrence::DeltaNet { rule, .. } => {
                let (n, inner, channels) = (rule.n_heads, rule.n_heads * rule.value_dim, rule.channels());
                // Queries, keys, values and output gates; files may store some of them together.
                let mut inputs = match (rows("attn_qkv"), rows("attn_gate")) {
                    (Some(_), None) => vec![("attn_qkv", channels + inner)],
                    (None, _) => {
                        let keys = rule.n_key_heads * rule.key_dim;
                        vec![("attn_q", keys), ("attn_k", keys), ("attn_v", inner), ("attn_gate", inner)]
                    }
                    _ => vec![("attn_qkv", channels), ("attn_gate", inner)],
                };
                match rows("ssm_ba") {
                    Some(_) => inputs.push(("ssm_ba", 2 * n)),
                    None => inputs.extend([("ssm_beta", n), ("ssm_alpha", rule.n_decays())]),
                }
                // Kimi Delta Attention's output projection has the name of attention's.
                (inputs, if rows("attn_output").is_some() { "attn_output" } else { "ssm_out" })
            }
            Recurrence::Mamba2 { scan, .. } => (vec![("ssm_in", scan.inputs())], "ssm_out"),
            Recurrence::ShortConv { .. } | Recurrence::GridConv { .. } => {
                (vec![("shortconv.in_proj", recurrence.inputs(dim))], "shortconv.out_proj")
            }
        };
        let conv = match recurrence {
            Recurrence::ShortConv { .. } | Recurrence::GridConv { .. } => "shortconv.conv",
            Recurrence::DeltaNet { .. } | Recurrence::Mamba2 { .. } => "ssm_conv1d",
        };
        let member = |name: &str, len| (format!("{prefix}{name}"), len);
        let heads = match recurrence {
            Recurrence::DeltaNet { rule, .. } => {
                let members = vec![
                    member("ssm_a.weight", rule.n_heads),
                    member("ssm_dt.bias", rule.n_decays()),
                    member("ssm_norm.weight", rule.value_dim),
                ];
                Some(Joined::declare(source, members)?)
            }
            Recurrence::Mamba2 { scan, .. } => {
                let names = ["ssm_a.weight", "ssm_dt.bias", "ssm_d.weight"];
                Some(Joined::declare(source, names.map(|name| member(name, scan.n_heads)).into())?)
            }
            Recurrence::ShortConv { .. } | Recurrence::GridConv { .. } => None,
        };
        let (norm, n_norm_groups) = match recurrence {
            Recurrence::Mamba2 { scan, normed: true, .. } => {
                (Some(table(source, &format!("{prefix}ssm_norm.weight"), &[scan.inner_dim()])?), scan.n_groups)
            }
            _ => (None, 1),
        };
        let channels = recurrence.channels(dim);
        let parts = match source.describe(&format!("{prefix}{conv}_q.weight")) {
            Some(_) => ["q", "k", "v"].map(|part| format!("{prefix}{conv}_{part}.weight")).into(),
            None => vec![format!("{prefix}{conv}.weight")],
        };
        let bias = format!("{prefix}{conv}.bias");
        let conv_bias = match source.describe(&bias) {
            Some(_) => Some(table(source, &bias, &[channels])?),
            None => None,
        };
        let conv = Joined::declare_rows(source, parts, [channels, recurrence.taps()])?;
        Ok(RecurrenceWeights {
            input: stack(&inputs, dim)?,
            output: stack(&[(output, dim)], recurrence.outputs(dim))?,
            conv,
            conv_bias,
            heads,
            norm,
            n_norm_groups,
        })
    }

    /// The convolution, `[channels, taps]`.
    pub(super) fn conv(&self) -> &Tensor {
        self.conv.tensor()
    }

    /// Per-head vectors of a delta rule or a selective scan.
    pub(super) fn heads(&self) -> Option<&Tensor> {
        self.heads.as_ref().map(Joined::tensor)
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.conv_bias.iter().chain(&self.norm)
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
        // Attention does not see a bias of all keys, unless it is rotated or normalised.
        let unbiased = (attention.rope.is_none() && attention.qk_norm.is_none()).then_some("attn_k");
        let rows = |name: &str| {
            let described = source.describe(&format!("{prefix}{name}.weight"));
            described.and_then(|tensor| tensor.shape.first().copied())
        };
        // Head counts are only checked for attention layers.
        let (inputs, output) = match attention.latent {
            _ if !block.attends() => (vec![], None),
            Some(latent) => {
                let queries = match latent.q_rank {
                    Some(rank) => ("attn_q_a", rank),
                    None => ("attn_q", attention.latent_dims(&latent)[0]),
                };
                let mut inputs = vec![queries, ("attn_kv_a_mqa", attention.head_dim)];
                inputs.extend(attention.gates.map(|_| ("attn_gate", attention.gate_dim())));
                (inputs, Some(attention.output_dim()))
            }
            None => {
                let (q_dim, kv_dim) = (attention.q_dim(), attention.kv_dim());
                let mut inputs = match rows("attn_qkv") {
                    Some(_) => vec![("attn_qkv", attention.qkv_dim())],
                    None if attention.gates == Some(OutputGates::Heads) => {
                        vec![("attn_gate", attention.gate_dim()), ("attn_q", q_dim)]
                    }
                    None => vec![("attn_q", attention.gate_dim() + q_dim)],
                };
                if rows("attn_qkv").is_none() && attention.keys_of.is_none() {
                    let values = if attention.values_of_keys { "attn_k" } else { "attn_v" };
                    inputs.extend([("attn_k", kv_dim), (values, kv_dim)]);
                }
                (inputs, Some(q_dim))
            }
        };
        let output_names: Vec<_> = output.iter().map(|_| ("attn_output", dim)).collect();
        let owned = |names: &[(String, u32)], cols| {
            let names: Vec<(&str, u32)> = names.iter().map(|(name, rows)| (name.as_str(), *rows)).collect();
            Stack::declare(target, source, prefix, &names, cols)
        };
        let (up, down, ffn_dim) = match ffn.dense_dim().filter(|_| block.feeds_forward()) {
            None => (vec![], vec![], 0),
            Some(ffn_dim) => {
                // The shared expert alone, without routed experts.
                let suffix = match (rows("ffn_down"), rows("ffn_down_shexp")) {
                    (None, Some(_)) => "_shexp",
                    _ => "",
                };
                let up = dense_up(&rows, suffix, [ffn_dim, ffn.up_dim()]);
                (up, vec![(format!("ffn_down{suffix}"), dim)], ffn_dim)
            }
        };
        Ok(BlockWeights {
            attn_norms: match block.halves {
                Halves::FeedForward => norms(NormPlace::Nowhere, [""; 3])?,
                _ => norms(block.attn_norm, ["attn_norm", "post_attention_norm", "attn_output_norm"])?,
            },
            attn_qkv: Stack::declare_biased(target, source, prefix, (&inputs, unbiased), dim)?,
            latent: match &attention.latent {
                Some(latent) => Some(LatentWeights::declare(target, source, prefix, attention, latent)?),
                None => None,
            },
            qk_norm: if block.attends() { qk_norm(source, prefix, attention)? } else { None },
            recurrence: match block.recurs() {
                Some(recurrence) => Some(RecurrenceWeights::declare(target, source, prefix, recurrence, dim)?),
                None => None,
            },
            attn_sinks: match attention.sinks {
                true => Some(table(source, &format!("{prefix}attn_sinks.weight"), &[attention.n_heads])?),
                false => None,
            },
            attn_output: stack(&output_names, output.unwrap_or(0))?,
            cross: match block.cross {
                true => Some(CrossWeights::declare(target, source, config, block, prefix)?),
                false => None,
            },
            ffn_norms: match block.halves {
                Halves::Mixing => norms(NormPlace::Nowhere, [""; 3])?,
                // A layer's only norm is called like that of attention.
                Halves::FeedForward => norms(block.ffn_norm, ["attn_norm", "post_ffw_norm", "layer_output_norm"])?,
                Halves::Both => norms(block.ffn_norm, ["ffn_norm", "post_ffw_norm", "layer_output_norm"])?,
            },
            ffn_up: owned(&up, dim)?,
            ffn_down: owned(&down, ffn_dim)?,
            experts: match ffn.experts.as_ref().filter(|_| block.feeds_forward()) {
                Some(experts) => Some(ExpertWeights::declare(target, source, prefix, config, (experts, ffn))?),
                None => None,
            },
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

    /// Norms of queries and keys, concatenated.
    pub(super) fn qk_norm(&self) -> Option<&Tensor> {
        self.qk_norm.as_ref().map(Joined::tensor)
    }

    /// A list, like those of [`Weights`]: adapters of iterators nested this deeply would be compiled for each caller, and
    /// were a tenth of the WASM module.
    pub(super) fn stacks(&self) -> Vec<&Stack> {
        let mut stacks = vec![&self.attn_qkv, &self.attn_output, &self.ffn_up, &self.ffn_down];
        stacks.extend(self.recurrence.iter().flat_map(|recurrence| [&recurrence.input, &recurrence.output]));
        stacks.extend(self.latent.iter().flat_map(LatentWeights::stacks));
        stacks.extend(self.cross.iter().flat_map(CrossWeights::stacks));
        stacks.extend(self.experts.iter().map(|experts| &experts.logits));
        stacks.extend(self.per_layer.iter().flat_map(|half| [&half.gate, &half.proj]));
        stacks
    }

    /// F32 vectors with their own names.
    fn vectors(&self) -> Vec<&Tensor> {
        let mut vectors = Vec::new();
        let of_cross = self.cross.as_ref().map(|cross| &cross.norms);
        for norms in [&self.attn_norms, &self.ffn_norms].into_iter().chain(of_cross) {
            vectors.extend(norms.tensors());
        }
        vectors.extend(&self.attn_sinks);
        vectors.extend(self.latent.iter().flat_map(LatentWeights::tensors));
        if let Some(experts) = &self.experts {
            vectors.extend(experts.choice_bias.iter().chain(&experts.sum_bias));
            vectors.extend(experts.beside.iter().flat_map(BesideWeights::tensors));
        }
        vectors.extend(self.recurrence.iter().flat_map(RecurrenceWeights::tensors));
        vectors.extend(self.per_layer.iter().flat_map(|half| half.norm.tensors()));
        vectors.extend(&self.output_scale);
        vectors
    }
}

/// All weights of a model, declared first, uploaded later.
#[derive(Clone, Debug)]
pub struct Weights {
    /// `[V, C]`; empty in a model without tokens.
    pub token_embd: Matrix,
    /// `[positions, C]`.
    pub positions: Option<Tensor>,
    /// `[types, C]`.
    pub token_types: Option<Tensor>,
    /// Biases of attention scores, `[2 R + 1, H]`.
    pub position_biases: Option<Tensor>,
    /// Per-layer embeddings.
    pub per_layer: Option<PerLayerWeights>,
    /// Norm of the summed embeddings.
    pub embd_norm: Option<NormWeights>,
    /// Blocks in order.
    pub blocks: Vec<BlockWeights>,
    /// The MTP head without its block, which is the last one.
    pub mtp: Option<MtpWeights>,
    /// Norm of the last layer's output.
    pub output_norm: Option<NormWeights>,
    /// Output head, `[V, C]`; `None` for tied embeddings and for encoders.
    output: Option<Stack>,
}

impl Weights {
    /// Declares all tensors of `config` and checks their shapes in the source.
    ///
    /// # Errors
    /// [`Error::Config`] naming the tensor that is missing or has the wrong shape.
    pub fn declare(target: &Target, config: &ModelConfig, source: &dyn WeightSource) -> Result<Weights, Error> {
        let &ModelConfig { dim, vocab_size, max_seq_len, n_token_types, .. } = config;
        let embd = describe(source, TOKEN_EMBD, &[vocab_size, dim])?;
        let token_embd = Matrix::declare(target, TOKEN_EMBD, embd.weight, vocab_size, dim)?;
        let of_blocks = Weights::declare_blocks(target, config, source)?;
        let positions = match config.positions {
            Some(positions) => Some(table(source, "position_embd.weight", &[max_seq_len + positions.first, dim])?),
            None => None,
        };
        let token_types = match n_token_types {
            0 => None,
            n => Some(table(source, "token_types.weight", &[n, dim])?),
        };
        let n_heads = config.blocks.first().map_or(0, |block| block.attention.n_heads);
        let position_biases = match config.position_biases {
            Some(biases) => Some(table(source, "attn_rel_b.weight", &[biases.n_distances(), n_heads])?),
            None => None,
        };
        let output = match source.describe("output.weight") {
            Some(_) if config.has_head => Some(Stack::declare(target, source, "", &[("output", vocab_size)], dim)?),
            _ => None,
        };
        Ok(Weights {
            token_embd,
            positions,
            token_types,
            position_biases,
            per_layer: match config.per_layer {
                Some(per_layer) => Some(PerLayerWeights::declare(target, source, config, per_layer)?),
                None => None,
            },
            mtp: match config.n_mtp {
                0 => None,
                _ => Some(MtpWeights::declare(target, source, config, config.n_layers() as usize)?),
            },
            output,
            ..of_blocks
        })
    }

    /// As [`Weights::declare`], for the blocks and the norms around them alone: no tokens, no head.
    ///
    /// # Errors
    /// As [`Weights::declare`].
    pub(super) fn declare_blocks(
        target: &Target,
        config: &ModelConfig,
        source: &dyn WeightSource,
    ) -> Result<Weights, Error> {
        let norm = |name: &str, is_there| match is_there {
            true => NormWeights::declare(source, name, config).map(Some),
            false => Ok(None),
        };
        let blocks = config.blocks.iter().enumerate();
        let blocks = blocks
            .map(|(l, block)| BlockWeights::declare(target, source, config, block, &format!("blk.{l}.")))
            .collect::<Result<_, _>>()?;
        Ok(Weights {
            token_embd: Matrix::empty(config.dim),
            positions: None,
            token_types: None,
            position_biases: None,
            per_layer: None,
            embd_norm: norm("token_embd_norm", config.embd_norm)?,
            blocks,
            mtp: None,
            output_norm: norm("output_norm", config.output_norm)?,
            output: None,
        })
    }

    /// Declares an expert cache of `n_slots` slots for each of these layers with experts, see
    /// [`ExpertWeights::keep`]. Passes over few enough tokens use it.
    ///
    /// # Errors
    /// Errors of [`Matrix::declare`].
    pub(crate) fn cache_experts(
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
                let experts = (experts, dims, block.feed_forward.is_gated());
                weights.keep(target, source, &format!("blk.{l}."), experts, [n_slots, most_tokens])?;
            }
        }
        Ok(())
    }

    fn stacks(&self) -> Vec<&Stack> {
        let mut stacks: Vec<_> = self.blocks.iter().flat_map(BlockWeights::stacks).collect();
        stacks.extend(&self.output);
        stacks.extend(self.per_layer.iter().map(|per_layer| &per_layer.proj));
        stacks
    }

    fn experts(&self) -> impl Iterator<Item = &ExpertWeights> {
        self.blocks.iter().filter_map(|block| block.experts.as_ref())
    }

    fn joined(&self) -> Vec<&Joined> {
        let mut joined = Vec::new();
        for block in &self.blocks {
            joined.extend(&block.qk_norm);
            if let Some(recurrence) = &block.recurrence {
                joined.extend(recurrence.heads.iter().chain([&recurrence.conv]));
            }
        }
        joined
    }

    /// F32 tensors, labelled with their source names.
    fn tables(&self) -> Vec<&Tensor> {
        let norms = self.embd_norm.iter().chain(&self.output_norm);
        let mut tables: Vec<_> = norms.flat_map(NormWeights::tensors).collect();
        tables.extend(self.blocks.iter().flat_map(BlockWeights::vectors));
        tables.extend([&self.positions, &self.token_types, &self.position_biases].into_iter().flatten());
        tables.extend(self.per_layer.iter().map(|per_layer| &per_layer.norm));
        tables.extend(self.mtp.iter().flat_map(MtpWeights::tables));
        tables
    }

    /// Destinations of the source tensors, by name.
    pub fn tensor_slots(&self) -> impl Iterator<Item = (&str, TensorSlot)> {
        let table = |tensor: &Tensor| TensorSlot::Values { tensor: tensor.clone(), places: RowPlaces::from(0) };
        let mut slots: Vec<_> = self.tables().into_iter().map(|tensor| (tensor.label(), table(tensor))).collect();
        slots.extend(self.joined().into_iter().flat_map(Joined::tensor_slots));
        slots.extend(self.stacks().into_iter().flat_map(Stack::tensor_slots));
        slots.extend(self.experts().flat_map(ExpertWeights::tensor_slots));
        slots.push((TOKEN_EMBD, TensorSlot::Rows { matrix: self.token_embd.clone(), places: RowPlaces::from(0) }));
        slots.extend(self.per_layer.iter().filter_map(PerLayerWeights::destination));
        slots.extend(self.mtp.iter().map(MtpWeights::destination));
        slots.into_iter()
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let mut tensors = self.tables();
        tensors.extend(self.joined().into_iter().map(Joined::tensor));
        tensors.extend(self.stacks().into_iter().flat_map(Stack::tensors));
        tensors.extend(self.experts().flat_map(ExpertWeights::tensors));
        let per_layer = self.per_layer.iter().filter_map(|per_layer| per_layer.token_embd.as_ref());
        let matrices =
            [&self.token_embd].into_iter().chain(per_layer).chain(self.mtp.iter().flat_map(MtpWeights::matrices));
        tensors.extend(matrices.flat_map(Matrix::tensors));
        tensors.into_iter()
    }

    /// Whether the output head is a separate matrix.
    pub(super) fn has_output(&self) -> bool {
        self.output.is_some()
    }

    /// Records the output head, `y = norm(x) outputᵀ`; `output` is the embedding where they are tied.
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

    /// All matrices but embeddings and experts, each with its source tensors and their rows.
    pub(crate) fn dense_parts(&self) -> impl Iterator<Item = (&Matrix, &[(String, u32)])> {
        self.stacks().into_iter().flat_map(Stack::parts)
    }

    /// Matrices of a decode pass with their kernels.
    pub(crate) fn products(&self) -> Vec<(&'static Kernel, &Matrix)> {
        let mut products = self.layer_products();
        match &self.output {
            Some(output) => products.extend(of_stack(&shaders::MATVEC, output)),
            None => products.push((&shaders::MATVEC.kernel, &self.token_embd)),
        }
        products
    }

    /// Matrices of the layers with their kernels.
    pub(crate) fn layer_products(&self) -> Vec<(&'static Kernel, &Matrix)> {
        let mut products = Vec::new();
        for block in &self.blocks {
            let mut add = |kernel, stack| products.extend(of_stack(kernel, stack));
            let recurrence = block.recurrence.iter().flat_map(|recurrence| [&recurrence.input, &recurrence.output]);
            let per_layer = block.per_layer.iter().flat_map(|half| [&half.gate, &half.proj]);
            let router = block.experts.iter().map(|experts| &experts.logits);
            let plain = [&block.attn_qkv].into_iter().chain(recurrence).chain(per_layer);
            plain.chain([&block.attn_output]).chain(router).for_each(|stack| add(&shaders::MATVEC, stack));
            // Ups without their gates are measured as a plain product.
            let up = if block.ffn_up.as_one().is_some() { &shaders::GATE_UP.kernel } else { &shaders::MATVEC.kernel };
            add(up, &block.ffn_up);
            add(&shaders::MATVEC, &block.ffn_down);
            if let Some([up, down]) = block.experts.as_ref().map(ExpertWeights::matrices) {
                products.extend(up.map(|w| (&shaders::EXPERT_GATE_UP.kernel, w)));
                products.extend(down.map(|w| (&shaders::EXPERT_DOWN.kernel, w)));
            }
        }
        products
    }
}

/// Tensor names of a layer with their rows.
type Members = Vec<(String, u32)>;

/// Tensors of a feed-forward's first product: one, or gates and ups. `rows` returns the rows of a layer's tensor;
/// names end in `suffix`.
fn dense_up(rows: &dyn Fn(&str) -> Option<u64>, suffix: &str, [ffn_dim, up_dim]: [u32; 2]) -> Members {
    let [gate, up] = ["gate", "up"].map(|name| format!("ffn_{name}{suffix}"));
    match up_dim > ffn_dim && (rows(&gate).is_some() || rows(&up) != Some(up_dim.into())) {
        true => vec![(gate, ffn_dim), (up, ffn_dim)],
        false => vec![(up, up_dim)],
    }
}

/// Declares the norms of queries and keys, concatenated, if the layer has them.
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

/// A stack's matrices with their kernel.
fn of_stack<'a>(kernel: &'static Kernel, stack: &'a Stack) -> impl Iterator<Item = (&'static Kernel, &'a Matrix)> {
    stack.matrices().map(move |(w, _)| (kernel, w))
}
