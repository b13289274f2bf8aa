//! What one layer of a transformer does. Decoders and encoders are made of the same blocks.

use crate::kernels::{AttentionConfig, DeltaRule, Gate, Gelu, QkNorm, Router, SelectiveScan};

/// One layer: attention, then a feed-forward, each added to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// How tokens see each other.
    pub attention: Attention,
    /// What the layer does in place of attention, if it keeps a state of fixed size.
    pub recurrence: Option<Recurrence>,
    /// What is done with each token alone.
    pub feed_forward: FeedForward,
    /// Where attention's norms stand.
    pub attn_norm: NormPlace,
    /// Where the feed-forward's norms stand.
    pub ffn_norm: NormPlace,
    /// Whether a third half adds what the layer makes of its part of the token's per-layer embedding:
    /// [`ModelConfig::per_layer`](super::ModelConfig::per_layer).
    pub per_layer: bool,
    /// Whether the stream is multiplied by a number of the layer's own at its end: Gemma 4.
    pub output_scale: bool,
    /// Whether both halves read the same residual stream, as in GPT-NeoX, rather than the second one the sum after the
    /// first.
    pub parallel: bool,
}

/// Where the norms of a block's half stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlace {
    /// Nowhere: the stream comes normalised.
    Nowhere,
    /// Before the half: Llama.
    Before,
    /// On the half's result, before it is added: OLMo 2.
    Result,
    /// Before it and on the result: Gemma 2.
    Both,
    /// On the sum: BERT.
    Sum,
}

impl NormPlace {
    /// Whether the half's input is normalised.
    pub fn is_before(self) -> bool {
        matches!(self, NormPlace::Before | NormPlace::Both)
    }

    /// Whether the half's result is normalised before it is added.
    pub fn is_on_result(self) -> bool {
        matches!(self, NormPlace::Result | NormPlace::Both)
    }
}

/// A feed-forward beside the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its width: `expert_shared_feed_forward_length`; `shared_expert_intermediate_size`.
    pub dim: u32,
    /// Whether it is multiplied by the sigmoid of a product with the token.
    pub gated: bool,
}

/// What a layer that keeps a state of fixed size does with tokens in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recurrence {
    /// A gated convolution with the last inputs: LFM2.
    ShortConv {
        /// Inputs that it sees, its own included: `shortconv.l_cache`; `conv_L_cache`.
        taps: u32,
    },
    /// A gated delta rule over what a convolution makes of queries, keys and values: Qwen3.5.
    DeltaNet {
        /// Its shape: `ssm.group_count`, `ssm.time_step_rank`, `ssm.state_size`; `linear_num_key_heads` and so on.
        rule: DeltaRule,
        /// Inputs that the convolution sees: `ssm.conv_kernel`; `linear_conv_kernel_dim`.
        taps: u32,
    },
    /// A selective scan over what a convolution makes of values, and of what states are written and read by: Mamba 2.
    Mamba2 {
        /// Its shape: `ssm.group_count`, `ssm.time_step_rank`, `ssm.state_size`; `mamba_n_groups` and so on.
        scan: SelectiveScan,
        /// Inputs that the convolution sees: `ssm.conv_kernel`; `mamba_d_conv`.
        taps: u32,
    },
}

impl Recurrence {
    /// Columns of its projection, for a model of width C.
    pub fn inputs(&self, dim: u32) -> u32 {
        match self {
            Recurrence::ShortConv { .. } => 3 * dim,
            Recurrence::DeltaNet { rule, .. } => rule.inputs(),
            Recurrence::Mamba2 { scan, .. } => scan.inputs(),
        }
    }

    /// Columns of what it makes of them.
    pub fn outputs(&self, dim: u32) -> u32 {
        match self {
            Recurrence::ShortConv { .. } => dim,
            Recurrence::DeltaNet { rule, .. } => rule.n_heads * rule.value_dim,
            Recurrence::Mamba2 { scan, .. } => scan.inner_dim(),
        }
    }

    /// Channels of its convolution.
    pub fn channels(&self, dim: u32) -> u32 {
        match self {
            Recurrence::ShortConv { .. } => dim,
            Recurrence::DeltaNet { rule, .. } => rule.channels(),
            Recurrence::Mamba2 { scan, .. } => scan.channels(),
        }
    }

    /// Inputs that its convolution sees.
    pub fn taps(&self) -> u32 {
        match *self {
            Recurrence::ShortConv { taps } | Recurrence::DeltaNet { taps, .. } | Recurrence::Mamba2 { taps, .. } => {
                taps
            }
        }
    }

    /// Heads, rows and columns of the matrices that it keeps, if it does.
    pub fn matrices(&self) -> Option<[u32; 3]> {
        match self {
            Recurrence::ShortConv { .. } => None,
            Recurrence::DeltaNet { rule, .. } => Some([rule.n_heads, rule.key_dim, rule.value_dim]),
            Recurrence::Mamba2 { scan, .. } => Some([scan.n_heads, scan.state_dim, scan.head_dim]),
        }
    }
}

/// An attention layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// H, query heads: `attention.head_count`; `num_attention_heads`.
    pub n_heads: u32,
    /// Hkv, key/value heads: `attention.head_count_kv`; `num_key_value_heads`.
    pub n_kv_heads: u32,
    /// D: `attention.key_length`; `head_dim`.
    pub head_dim: u32,
    /// How far a query sees: only keys less than this away from it. `None`: all of them.
    pub window: Option<u32>,
    /// Factor of the scores.
    pub scale: f32,
    /// Bound that scores approach.
    pub soft_cap: Option<f32>,
    /// Which of the model's rotations turns queries and keys. `None`: they are not rotated.
    pub rope: Option<usize>,
    /// How queries and keys are normalised.
    pub qk_norm: Option<QkNorm>,
    /// Whether each head has a score that takes part in the softmax and has no value.
    pub sinks: bool,
    /// Whether its results are multiplied by the sigmoid of gates, which are projected before the queries.
    pub gated: bool,
    /// The earlier layer whose keys and values it reads, in place of some of its own.
    pub keys_of: Option<usize>,
}

/// A feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForward {
    /// F, its width, or that of each expert: `feed_forward_length`, `expert_feed_forward_length`; `intermediate_size`,
    /// `moe_intermediate_size`.
    pub dim: u32,
    /// What stands between its two products.
    pub between: Between,
    /// The experts that it consists of, if it does.
    pub experts: Option<Experts>,
}

/// Feed-forwards of which each token has a few.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// E: `expert_count`; `num_experts`, `num_local_experts`.
    pub n: u32,
    /// K, those of a token: `expert_used_count`; `num_experts_per_tok`.
    pub n_used: u32,
    /// How they are chosen.
    pub router: Router,
    /// Whether each has a bias that counts for the choice alone.
    pub choice_bias: bool,
    /// A feed-forward beside them that every token has.
    pub shared: Option<SharedExpert>,
}

/// What stands between the two products of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// `gelu(up)`.
    Gelu(Gelu),
    /// `act(gate) * up`.
    Gate(Gate),
}

impl Attention {
    /// Columns of the queries, `H * D`.
    pub fn q_dim(&self) -> u32 {
        self.n_heads * self.head_dim
    }

    /// Columns of the keys, and of the values, `Hkv * D`.
    pub fn kv_dim(&self) -> u32 {
        self.n_kv_heads * self.head_dim
    }

    /// Columns of the gates, which come first.
    pub fn gate_dim(&self) -> u32 {
        if self.gated { self.q_dim() } else { 0 }
    }

    /// Key/value heads that it projects.
    pub fn own_kv_heads(&self) -> u32 {
        if self.keys_of.is_some() { 0 } else { self.n_kv_heads }
    }

    /// Columns of gates, queries, and its own keys and values side by side.
    pub fn qkv_dim(&self) -> u32 {
        self.gate_dim() + self.q_dim() + 2 * self.own_kv_heads() * self.head_dim
    }

    /// H, Hkv and D.
    pub fn heads(&self) -> [u32; 3] {
        [self.n_heads, self.n_kv_heads, self.head_dim]
    }

    /// What the attention kernels need to know.
    pub(crate) fn kernel(&self, causal: bool) -> AttentionConfig {
        let Attention { n_heads, n_kv_heads, head_dim, window, scale, soft_cap, .. } = *self;
        AttentionConfig { n_heads, n_kv_heads, head_dim, window, scale, soft_cap, causal }
    }
}

impl FeedForward {
    /// Rows of its first product: gates come with their values.
    pub fn up_dim(&self) -> u32 {
        match self.between {
            Between::Gelu(_) => self.dim,
            Between::Gate(_) => 2 * self.dim,
        }
    }
}
