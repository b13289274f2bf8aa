//! The table of architectures: keys, tensor names and block structure in both formats.
//!
//! Each starts from Llama; [`Architecture::describe`] applies the differences.

mod bailing;
mod bert;
mod clip;
mod deepseek;
mod embedding_gemma;
mod ernie;
mod eurobert;
mod exaone4;
mod falcon_h1;
mod gemma;
mod gemma4;
mod glm4_moe;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod granite_hybrid;
mod gte;
mod hunyuan;
mod lfm2;
mod lfm3;
mod llama;
mod mamba2;
mod modern_bert;
mod mpnet;
mod nemotron_h;
mod nomic_bert;
mod olmo;
mod olmo_hybrid;
mod phi3;
mod qwen;
mod qwen35;
mod qwen3_next;
mod refused;
mod seed_oss;
mod smollm3;
mod t5;

pub(super) use clip::{PROJECTION, says_generation};
pub(super) use embedding_gemma::projection;
pub(super) use refused::refused;

#[cfg(feature = "lora")]
use super::huggingface::missing;
use super::keys::{Key, Keys};
use super::scaling;
use super::tensor_index::{FileLayout, TensorIndex};
use super::unread::MTP_COPIES;
use crate::error::Error;
use crate::kernels::{ExpertGroups, ExpertScore, Gate, Gelu, MAX_GROUPS, RopeConfig, RopeScaling, RopeStyle, Router};
use crate::model::{
    Attention, Between, Block, Experts, FeedForward, MAX_CONTEXT, MAX_DIM, MAX_LAYERS, ModelConfig, NormKind,
    SharedExpert,
};

pub(super) struct Architecture {
    /// `general.architecture` in GGUF.
    pub gguf: &'static str,
    /// `model_type` in `config.json`.
    pub json: &'static [&'static str],
    /// RoPE style in GGUF files, and in Hugging Face folders.
    pub pairs: [RopeStyle; 2],
    /// Checkpoint names of tensors with their GGUF names, if they differ from `USUAL_NAMES`; names in layers start
    /// after the layer number.
    pub names: &'static [(&'static str, &'static str)],
    /// GGUF names of tensors with their usual GGUF names, if they differ; names in layers start after the layer
    /// number.
    pub gguf_names: &'static [(&'static str, &'static str)],
    /// The layout of a tensor in published checkpoints, by its GGUF name.
    pub stored: fn(&str, &ModelConfig) -> FileLayout,
    /// The same for GGUF files.
    pub gguf_stored: fn(&str, &ModelConfig) -> FileLayout,
    /// Renames a tensor of a published checkpoint, by its GGUF name, where that depends on the layer.
    pub renamed: fn(String, &ModelConfig) -> String,
    /// Whether embedding and head are tied by default in a `config.json`.
    pub tied: bool,
    /// The key of the norms' epsilon, and the default of a `config.json`.
    pub eps: (Key, Option<f32>),
    /// The default activation of the feed-forward.
    pub activation: &'static str,
    /// Whether the feed-forward is gated.
    pub gated: bool,
    /// The default feed-forward width, in model widths.
    pub ffn_widths: Option<u32>,
    /// Defaults from transformers that published configurations omit, as a JSON object.
    pub defaults: &'static str,
    /// [`ModelConfig::row_factors`] of published checkpoints, for architectures that have any.
    pub factors: Option<FactorsOf>,
    /// Whether its MTP head is supported, with a block like the last attention layer.
    pub mtp: bool,
    /// Whether [`Architecture::describe`] reads the sizes of attention heads, or there are none.
    pub describes_heads: bool,
    /// Applies the differences from Llama.
    pub describe: fn(&Keys<'_>, &mut ModelConfig) -> Result<(), Error>,
}

/// A tensor's name in its layer, and how many of its rows have which factor.
pub(super) type Factors = (&'static str, Vec<(u32, f32)>);

type FactorsOf = fn(&Keys<'_>, &ModelConfig) -> Result<Vec<Factors>, Error>;

const ALL: [Architecture; 56] = [
    llama::LLAMA,
    llama::MISTRAL3,
    llama::MIXTRAL,
    qwen::QWEN2,
    qwen::QWEN3,
    qwen::QWEN3_MOE,
    qwen::QWEN3_VL,
    qwen::QWEN3_VL_MOE,
    qwen3_next::QWEN3_NEXT,
    seed_oss::SEED_OSS,
    glm4_moe::GLM4_MOE,
    deepseek::DEEPSEEK,
    deepseek::GLM4_MOE_LITE,
    bailing::LING2,
    bailing::LING3,
    qwen35::QWEN35,
    qwen35::QWEN35_MOE,
    gemma::GEMMA,
    gemma::GEMMA2,
    gemma::GEMMA3,
    embedding_gemma::EMBEDDING_GEMMA,
    embedding_gemma::EMBEDDING_GEMMA2,
    gemma4::GEMMA4,
    phi3::PHI3,
    smollm3::SMOLLM3,
    granite::GRANITE,
    granite_hybrid::GRANITE_HYBRID,
    granite_hybrid::GRANITE_MOE,
    olmo::OLMO2,
    olmo::OLMO3,
    olmo::OLMOE,
    olmo_hybrid::OLMO_HYBRID,
    gpt_oss::GPT_OSS,
    lfm2::LFM2,
    lfm2::LFM2_MOE,
    lfm3::LFM3,
    mamba2::MAMBA2,
    nemotron_h::NEMOTRON_H,
    nemotron_h::NEMOTRON_H_MOE,
    falcon_h1::FALCON_H1,
    exaone4::EXAONE4,
    ernie::ERNIE4_5,
    hunyuan::HUNYUAN_DENSE,
    gpt2::GPT2,
    gpt_neox::GPT_NEOX,
    bert::BERT,
    bert::JINA_BERT_V3,
    mpnet::MPNET,
    t5::T5_ENCODER,
    gte::GTE,
    eurobert::EUROBERT,
    modern_bert::MODERN_BERT,
    nomic_bert::NOMIC_BERT,
    nomic_bert::NOMIC_BERT_MOE,
    clip::CLIP,
    clip::SIGLIP,
];

impl Architecture {
    /// The architecture of a GGUF file.
    pub fn of_gguf(name: &str) -> Option<&'static Architecture> {
        const { &ALL }.iter().find(|architecture| architecture.gguf == name && !name.is_empty())
    }

    /// The architecture of a `config.json`.
    pub fn of_json(model_type: &str) -> Option<&'static Architecture> {
        const { &ALL }.iter().find(|architecture| architecture.json.contains(&model_type))
    }

    /// The architecture of a model of either format.
    ///
    /// # Errors
    /// [`Error::Config`] if it is unknown.
    #[cfg(feature = "lora")]
    pub fn of_model(config: &ModelConfig) -> Result<&'static Architecture, Error> {
        let name = &*config.architecture;
        let found = Architecture::of_gguf(name).or_else(|| Architecture::of_json(name));
        found.ok_or_else(|| missing("general.architecture"))
    }

    /// The GGUF name of a checkpoint's tensor `name`; `None` if it has none.
    pub fn gguf_name(&self, name: &str) -> Option<String> {
        // Prefixes of multimodal models' text parts first.
        const PREFIXES: [&str; 14] = [
            "backbone.",
            "model.language_model.",
            "model.text_model.",
            "text_model.",
            "language_model.model.",
            "language_model.",
            "model.",
            "transformer.",
            "gpt_neox.",
            "bert.",
            "roberta.",
            "mpnet.",
            "new.",
            "nomic_bert.",
        ];
        const LAYERS: [&str; 5] = ["layers.", "h.", "encoder.layer.", "encoder.layers.", "encoder.block."];
        let without = |prefixes: &[&str], name| prefixes.iter().find_map(|&prefix| str::strip_prefix(name, prefix));
        let name = without(&PREFIXES, name).unwrap_or(name);
        // Old checkpoints use TensorFlow's names for norms; stacked experts and sinks have no suffix.
        let (stem, suffix) = match name.rsplit_once('.') {
            Some((stem, "weight" | "gamma")) => (stem, "weight"),
            Some((stem, "bias" | "beta")) => (stem, "bias"),
            _ => name.strip_suffix("_bias").map_or((name, "weight"), |stem| (stem, "bias")),
        };
        let find = |part: &str| {
            let mut names = self.names.iter().chain(&USUAL_NAMES);
            names.find(|(theirs, _)| *theirs == part).map(|(_, ours)| (*ours).to_owned())
        };
        match without(&LAYERS, stem) {
            None => find(stem).map(|plain| format!("{plain}.{suffix}")),
            Some(rest) => {
                let (layer, part) = rest.split_once('.')?;
                let found = find(part).or_else(|| {
                    // A single expert's tensor.
                    let (before, after) = part.split_once(".experts.")?;
                    let (expert, matrix) = after.split_once('.')?;
                    Some(format!("{}.{expert}", find(&format!("{before}.experts.{matrix}"))?))
                });
                Some(format!("blk.{layer}.{}.{suffix}", found?))
            }
        }
    }

    /// The GGUF name of an MTP head's tensor, with the head's block after `n_layers` layers; `None` if it has none.
    pub fn mtp_name(&self, name: &str, n_layers: u32) -> Option<String> {
        let name = name.strip_prefix("model.").unwrap_or(name).strip_prefix("mtp.").filter(|_| self.mtp)?;
        match name.strip_prefix("layers.0.") {
            Some(of_block) => self.gguf_name(&format!("layers.{n_layers}.{of_block}")),
            None => {
                let stem = name.strip_suffix(".weight")?;
                let (_, ours) = FURTHER_NAMES.iter().find(|(theirs, _)| *theirs == stem)?;
                Some(format!("blk.{n_layers}.nextn.{ours}.weight"))
            }
        }
    }

    /// The MTP head's block, if the catalog has one head and it fits this configuration. Removes the head's own
    /// embedding and output head, and adds them to `unread`. `n_mtp`: the stated number.
    pub fn take_mtp_block(
        &self,
        config: &ModelConfig,
        tensor_index: &mut TensorIndex,
        n_mtp: Option<u32>,
        unread: &mut Vec<&'static str>,
    ) -> Option<Block> {
        let n_layers = config.n_layers();
        tensor_index
            .find(&format!("blk.{n_layers}.nextn.eh_proj.weight"))
            .filter(|_| self.mtp && n_mtp.unwrap_or(1) == 1)?;
        let block = config.blocks.iter().rfind(|block| block.recurrence.is_none()).cloned()?;
        tensor_index.leave_untold(n_layers);
        // Published ones are copies of the model's, which the head shares.
        let own = ["token_embd", "nextn.embed_tokens", "nextn.shared_head_head"];
        let removed = own.map(|name| tensor_index.remove(&format!("blk.{n_layers}.{name}.weight")).is_some());
        if removed.contains(&true) {
            unread.push(MTP_COPIES);
        }
        Some(block)
    }

    /// The usual GGUF name of a GGUF file's tensor.
    pub fn usual_name(&self, name: &str) -> String {
        // T5's encoder has a decoder beside it.
        let name = name.strip_prefix("enc.").unwrap_or(name);
        let renamed = || {
            let (before, rest) = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
                Some((layer, rest)) => (format!("blk.{layer}."), rest),
                None => (String::new(), name),
            };
            let find = |part: &str| self.gguf_names.iter().find(|(theirs, _)| *theirs == part).map(|(_, ours)| *ours);
            // A layer may have a tensor of all.
            if let Some((ours, (_, suffix))) = name.rsplit_once('.').and_then(|parts| Some((find(parts.0)?, parts))) {
                return Some(format!("{ours}.{suffix}"));
            }
            // Some names have no suffix, or one of their own.
            let (stem, suffix) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
            match find(rest) {
                Some(ours) => Some(format!("{before}{ours}.weight")),
                None => find(stem).map(|ours| format!("{before}{ours}.{suffix}")),
            }
        };
        renamed().unwrap_or_else(|| name.to_owned())
    }

    /// The configuration from a model's keys.
    ///
    /// # Errors
    /// [`Error::Config`] or [`Error::Unsupported`] naming the key.
    pub fn config(&self, keys: &Keys<'_>) -> Result<ModelConfig, Error> {
        let mut config = self.llama_like(keys)?;
        (self.describe)(keys, &mut config)?;
        if keys.is_gguf() {
            // GGUF counts MTP layers, which come last, as layers.
            let (n_layers, n_mtp) = (config.n_layers(), keys.u32(MTP_LAYERS)?.unwrap_or(0));
            if n_mtp >= n_layers {
                return Err(keys.wrong(MTP_LAYERS, format!("fewer than the {n_layers} layers"), n_mtp));
            }
            config.blocks.truncate((n_layers - n_mtp) as usize);
        }
        config.check()?;
        Ok(config)
    }

    /// A Llama (Touvron et al. 2023, arXiv:2302.13971) with these keys.
    fn llama_like(&self, keys: &Keys<'_>) -> Result<ModelConfig, Error> {
        // Limited before any arithmetic.
        let optional = |key: Key, max: u32| match keys.u32(key)? {
            Some(value) if !(1..=max).contains(&value) => Err(keys.wrong(key, format!("1 to {max}"), value)),
            value => Ok(value),
        };
        let limited = |key: Key, max: u32| optional(key, max)?.ok_or_else(|| keys.missing(key));
        // Some state the number of layers only by listing them.
        let listed = keys.strs(Key("", "layers_block_type"))?.and_then(|listed| u32::try_from(listed.len()).ok());
        let n_layers = match listed.filter(|n| (1..=MAX_LAYERS).contains(n)) {
            Some(n) if keys.u32(LAYERS)?.is_none() => n,
            _ => limited(LAYERS, MAX_LAYERS)?,
        };
        let (dim, n_heads) = (limited(WIDTH, MAX_DIM)?, keys.required(HEADS)?);
        let divided = (n_heads > 0 && dim.is_multiple_of(n_heads)).then(|| dim / n_heads);
        let stated = optional(Key("attention.key_length", "head_dim"), MAX_DIM)?;
        let head_dim = stated.or(divided).or(self.describes_heads.then_some(8));
        let head_dim = head_dim.ok_or_else(|| keys.wrong(HEADS, format!("a divisor of the width {dim}"), n_heads))?;
        if let Some(found) = keys.u32(VALUE_DIM)?.filter(|&found| found != head_dim && !self.describes_heads) {
            return Err(keys.unsupported(VALUE_DIM, found, &format!("that of keys, {head_dim}")));
        }
        const SHARE: Key = Key("", "rope_parameters.partial_rotary_factor|partial_rotary_factor");
        let share = keys.f32(SHARE)?.unwrap_or(1.0);
        if !(share > 0.0 && share <= 1.0) {
            return Err(keys.wrong(SHARE, "a number above 0, up to 1".into(), share));
        }
        let rot_dims = optional(Key("rope.dimension_count", ""), MAX_DIM)?.unwrap_or((head_dim as f32 * share) as u32);
        let max_seq_len = limited(CONTEXT, MAX_CONTEXT)?;
        let rope = RopeConfig {
            rot_dims,
            theta: keys.f32(THETA)?.unwrap_or(10_000.0).into(),
            style: self.pairs[usize::from(!keys.is_gguf())],
            scaling: scaling::read(keys, rot_dims, max_seq_len)?,
            query_growth: scaling::query_growth(keys)?,
        };
        let attention = Attention { rope: Some(0), ..Attention::plain(n_heads, head_dim) };
        let widths = keys.each_u32(FFN_WIDTH, n_layers)?;
        let ffn_dim = match (widths.as_ref().and_then(|widths| widths.first()), self.ffn_widths) {
            (Some(&ffn_dim), _) => ffn_dim,
            (None, Some(widths)) => dim.saturating_mul(widths),
            (None, None) => return Err(keys.missing(FFN_WIDTH)),
        };
        let feed_forward = FeedForward { dim: ffn_dim, between: self.between(keys)?, experts: None };
        let mut blocks = vec![Block::plain(attention, feed_forward); n_layers as usize];
        for (block, n_kv_heads) in blocks.iter_mut().zip(keys.each_u32(KV_HEADS, n_layers)?.into_iter().flatten()) {
            block.attention.n_kv_heads = n_kv_heads;
        }
        for (block, ffn_dim) in blocks.iter_mut().zip(widths.into_iter().flatten()) {
            block.feed_forward.dim = ffn_dim;
        }
        let vocab_size = match keys.is_gguf() {
            true => keys.rows("token_embd.weight")?,
            false => keys.required(Key("", "vocab_size"))?,
        };
        let norm_eps = match (keys.f32(self.eps.0)?, self.eps.1) {
            (Some(eps), _) => eps,
            (None, Some(eps)) if !keys.is_gguf() => eps,
            _ => return Err(keys.missing(self.eps.0)),
        };
        Ok(ModelConfig {
            architecture: keys.architecture.into(),
            dim,
            vocab_size,
            max_seq_len,
            blocks,
            n_mtp: 0,
            norm: NormKind::Rms,
            norm_eps,
            ropes: vec![rope],
            mrope: None,
            positions: None,
            position_biases: None,
            n_token_types: 0,
            per_layer: None,
            embd_norm: false,
            output_norm: true,
            embd_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            logit_soft_cap: None,
            causal: true,
            has_head: true,
            row_factors: Vec::new(),
        })
    }

    /// The activation between the feed-forward's products.
    fn between(&self, keys: &Keys<'_>) -> Result<Between, Error> {
        let key = Key("hidden_activation", "hidden_act|hidden_activation|activation_function|mlp_hidden_act");
        let name = keys.str(key)?.unwrap_or(self.activation);
        if name == "relu2" && !self.gated {
            return Ok(Between::SquaredRelu);
        }
        match (activation(name), self.gated) {
            (Some(gate), true) => Ok(Between::Gate(gate)),
            (Some(Gate::Gelu(form)), false) => Ok(Between::Gelu(form)),
            (_, true) => {
                Err(keys.unsupported(key, name, "silu, gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, quick_gelu"))
            }
            (_, false) => {
                Err(keys.unsupported(key, name, "gelu, gelu_new, gelu_fast, gelu_pytorch_tanh, quick_gelu, relu2"))
            }
        }
    }
}

/// The layout of a recurrence's decay rates, which published checkpoints store as logarithms.
fn decay_logs(name: &str, _: &ModelConfig) -> FileLayout {
    if name.ends_with("ssm_a.weight") { FileLayout::NegativeLog } else { FileLayout::AsRead }
}

/// Query heads of a model whose attention layers are alike.
fn n_heads(config: &ModelConfig) -> u32 {
    config.blocks.first().map_or(1, |block| block.attention.n_heads)
}

/// The activation of this name; `None` if unknown.
pub(super) fn activation(name: &str) -> Option<Gate> {
    match name {
        "silu" | "swish" | "swiglu" => Some(Gate::Silu),
        "gelu" => Some(Gate::Gelu(Gelu::Exact)),
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Some(Gate::Gelu(Gelu::Tanh)),
        "quick_gelu" => Some(Gate::Gelu(Gelu::Quick)),
        _ => None,
    }
}

/// Makes the feed-forward of layers selected by `has_experts` a mixture of experts, if the files have experts.
fn mixture(
    keys: &Keys<'_>,
    config: &mut ModelConfig,
    router: Router,
    has_experts: impl Fn(usize) -> bool,
) -> Result<(), Error> {
    let Some(n) = keys.u32(EXPERTS)?.filter(|&n| n > 0) else { return Ok(()) };
    let n_used =
        keys.required(Key("expert_used_count", "num_experts_per_tok|num_experts_per_token|top_k_experts|moe_top_k"))?;
    let dim = keys.u32(Key("expert_feed_forward_length", "moe_intermediate_size"))?;
    let shares = keys.bool(Key("expert_weights_norm", "norm_topk_prob|moe_renormalize"))?.unwrap_or(router.shares);
    let scale = keys.f32(EXPERT_SCALE)?.filter(|&scale| scale != 0.0);
    let router = Router { shares, scale: scale.unwrap_or(router.scale), ..router };
    let gating = Key("expert_gating_func", "");
    if let Some(found) = keys.u32(gating)? {
        // 1 is the softmax over all, 3 over the selected experts: equal for normalised weights.
        let known = match router.score {
            ExpertScore::Softmax if router.shares => &[0, 1, 3][..],
            ExpertScore::Softmax => &[0, 1],
            ExpertScore::Sigmoid => &[0, 2],
        };
        if !known.contains(&found) {
            return Err(keys.unsupported(gating, found, &format!("one of {known:?}")));
        }
    }
    for (_, block) in config.blocks.iter_mut().enumerate().filter(|(l, _)| has_experts(*l)) {
        block.feed_forward.dim = dim.unwrap_or(block.feed_forward.dim);
        block.feed_forward.experts = Some(Experts { n, n_used, router, choice_bias: false, shared: None, dense: None });
    }
    Ok(())
}

/// As [`mixture`], with groups of experts and a shared expert as wide as several routed ones, after the first dense
/// layers: DeepSeek (2024, arXiv:2405.04434) and models after it.
fn mixture_after_dense(keys: &Keys<'_>, config: &mut ModelConfig, router: Router) -> Result<(), Error> {
    let n_dense = Key("leading_dense_block_count", "first_k_dense_replace|num_dense_layers");
    let stated = keys.u32(n_dense)?.unwrap_or(0) as usize;
    let n_dense = listed_dense(keys, config.blocks.len())?.unwrap_or(stated);
    let n_groups = [GROUPS, USED_GROUPS].map(|key| keys.u32(key));
    let groups = match n_groups {
        [Ok(Some(n)), used_groups] if n > 1 => {
            let n_experts = keys.u32(EXPERTS)?.unwrap_or(0);
            if n > MAX_GROUPS || !n_experts.is_multiple_of(n) {
                return Err(keys.wrong(GROUPS, format!("a divisor of the {n_experts} experts up to {MAX_GROUPS}"), n));
            }
            let n_used = used_groups?.unwrap_or(n);
            if !(1..=n).contains(&n_used) {
                return Err(keys.wrong(USED_GROUPS, format!("1 to {n}"), n_used));
            }
            Some(ExpertGroups { n, n_used, top_two: router.score == ExpertScore::Sigmoid })
        }
        [all_groups, used_groups] => all_groups.and(used_groups).map(|_| None)?,
    };
    mixture(keys, config, Router { groups, ..router }, |l| l >= n_dense)?;
    let n_shared = keys.u32(Key("expert_shared_count", "n_shared_experts|num_shared_experts"))?.unwrap_or(0);
    for (l, block) in config.blocks.iter_mut().enumerate() {
        let FeedForward { dim, experts, .. } = &mut block.feed_forward;
        let Some(experts) = experts else { continue };
        experts.choice_bias = match keys.is_gguf() {
            true => keys.has(&format!("blk.{l}.exp_probs_b.bias")),
            false => router.score == ExpertScore::Sigmoid,
        };
        experts.shared = match n_shared {
            0 => None,
            n => Some(SharedExpert { dim: dim.saturating_mul(n), gated: false }),
        };
    }
    Ok(())
}

/// How many layers are dense where a `config.json` lists all.
fn listed_dense(keys: &Keys<'_>, n_layers: usize) -> Result<Option<usize>, Error> {
    let key = Key("", "mlp_layer_types");
    let Some(kinds) = keys.strs(key)? else { return Ok(None) };
    let n_dense = kinds.iter().take_while(|&&kind| kind == "dense").count();
    match kinds.len() == n_layers && kinds[n_dense..].iter().all(|&kind| kind == "sparse") {
        true => Ok(Some(n_dense)),
        false => Err(keys.wrong(key, format!("dense layers, then sparse ones, {n_layers} in all"), kinds.join(", "))),
    }
}

/// The usual router: weights are normalised over the selected experts.
const SHARES: Router = Router { score: ExpertScore::Softmax, shares: true, scale: 1.0, groups: None };

/// A router that scores each expert by itself.
const SIGMOIDS: Router = Router { score: ExpertScore::Sigmoid, ..SHARES };

/// Turns a decoder into an encoder, bidirectional unless `causal`.
fn encoder(config: &mut ModelConfig, causal: bool) {
    config.causal = causal;
    config.has_head = false;
}

/// The sliding-window layers: from `layer_types`, or GGUF's list or interval. By default all but every
/// `usual_every`-th.
fn sliding(keys: &Keys<'_>, config: &ModelConfig, usual_every: u32) -> Result<Vec<bool>, Error> {
    let pattern = Key("attention.sliding_window_pattern", "sliding_window_pattern|_sliding_window_pattern");
    let n_layers = config.blocks.len();
    keys.says(pattern);
    if let Some(listed) = listed_sliding(keys, n_layers)? {
        return Ok(listed);
    }
    if let Some(list) = keys.bools(pattern)? {
        return match list.len() == n_layers {
            true => Ok(list),
            false => Err(keys.wrong(pattern, format!("{n_layers}, one per layer"), list.len())),
        };
    }
    match keys.u32(pattern)?.unwrap_or(usual_every) {
        0 => Err(keys.wrong(pattern, "1 or more".into(), 0)),
        every => Ok((1..=n_layers as u64).map(|l| !l.is_multiple_of(every.into())).collect()),
    }
}

/// The sliding-window layers listed in a `config.json`.
fn listed_sliding(keys: &Keys<'_>, n_layers: usize) -> Result<Option<Vec<bool>>, Error> {
    let listed = listed_layers(keys, n_layers, &["full_attention", "sliding_attention"])?;
    Ok(listed.map(|listed| listed.iter().map(|&kind| kind == 1).collect()))
}

/// Layer types listed in a `config.json`, as indices into `known`.
pub(super) fn listed_layers(keys: &Keys<'_>, n_layers: usize, known: &[&str]) -> Result<Option<Vec<usize>>, Error> {
    let key = Key("", "layer_types");
    let Some(types) = keys.strs(key)? else { return Ok(None) };
    let kind = |name: &&str| {
        let place = known.iter().position(|known| known == name);
        place.ok_or_else(|| keys.unsupported(key, name, &known.join(", ")))
    };
    let found = types.iter().map(kind).collect::<Result<Vec<_>, _>>()?;
    match found.len() == n_layers {
        true => Ok(Some(found)),
        false => Err(keys.wrong(key, format!("{n_layers}, one per layer"), found.len())),
    }
}

/// Adds the unscaled RoPE of the sliding-window layers and returns its index.
fn add_local_rope(keys: &Keys<'_>, config: &mut ModelConfig, usual_theta: f64) -> Result<usize, Error> {
    let theta =
        Key("rope.freq_base_swa", "rope_parameters.sliding_attention.rope_theta|rope_local_base_freq|local_rope_theta");
    let kind = Key("", "rope_parameters.sliding_attention.rope_type");
    if let Some(found) = keys.str(kind)?.filter(|&found| found != "default") {
        return Err(keys.unsupported(kind, found, "default"));
    }
    let theta = keys.f32(theta)?.map_or(usual_theta, f64::from);
    let local = RopeConfig { theta, scaling: RopeScaling::None, query_growth: None, ..config.ropes[0].clone() };
    config.ropes.push(local);
    Ok(config.ropes.len() - 1)
}

const WIDTH: Key = Key("embedding_length", "hidden_size|n_embd|d_model");
const FFN_WIDTH: Key = Key("feed_forward_length", "intermediate_size|block_ff_dim|n_inner|d_ff");
const LAYERS: Key = Key("block_count", "num_hidden_layers|n_layer|num_layers");
const HEADS: Key = Key("attention.head_count", "num_attention_heads|n_head|num_heads");
const CONTEXT: Key = Key("context_length", "max_position_embeddings|n_positions|n_ctx|model_max_length");
const THETA: Key = Key(
    "rope.freq_base",
    "rope_parameters.full_attention.rope_theta|rope_parameters.rope_theta|rope_theta|\
     global_rope_theta|rotary_emb_base|theta",
);
const WINDOW: Key = Key("attention.sliding_window", "sliding_window");
const FINAL_SOFT_CAP: Key = Key("final_logit_softcapping", "final_logit_softcapping");
pub(super) const MTP_LAYERS: Key = Key("nextn_predict_layers", "num_nextn_predict_layers");
const EXPERTS: Key = Key("expert_count", "num_local_experts|num_experts|n_routed_experts");
const GROUPS: Key = Key("expert_group_count", "n_group|num_expert_group");
const USED_GROUPS: Key = Key("expert_group_used_count", "topk_group");
const EXPERT_SCALE: Key = Key("expert_weights_scale", "routed_scaling_factor");
const KV_HEADS: Key = Key("attention.head_count_kv", "num_key_value_heads");
const VALUE_DIM: Key = Key("attention.value_length", "v_head_dim");
const RMS_EPS: Key = Key("attention.layer_norm_rms_epsilon", "rms_norm_eps");

/// Checkpoint and GGUF names of an MTP head's tensors outside its block.
const FURTHER_NAMES: [(&str, &str); 4] = [
    ("fc", "eh_proj"),
    ("pre_fc_norm_embedding", "enorm"),
    ("pre_fc_norm_hidden", "hnorm"),
    ("norm", "shared_head_norm"),
];

/// Checkpoint and GGUF names of tensors.
const USUAL_NAMES: [(&str, &str); 24] = [
    ("embed_tokens", "token_embd"),
    ("norm", "output_norm"),
    ("lm_head", "output"),
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    // MTP heads that are stored like a layer after the last one.
    ("eh_proj", "nextn.eh_proj"),
    ("enorm", "nextn.enorm"),
    ("hnorm", "nextn.hnorm"),
    ("shared_head.norm", "nextn.shared_head_norm"),
    ("shared_head.head", "nextn.shared_head_head"),
    ("final_layernorm", "nextn.shared_head_norm"),
];
