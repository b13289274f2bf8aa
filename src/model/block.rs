//! One transformer layer, for decoders and encoders.

use crate::kernels::{AttentionConfig, DeltaRule, Gate, Gelu, QkNorm, Router, SelectiveScan};

/// One layer: attention, then a feed-forward, each added to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Attention.
    pub attention: Attention,
    /// Replaces attention in a recurrent layer.
    pub recurrence: Option<Recurrence>,
    /// Whether a recurrent layer has attention, too, beside its recurrence: Falcon-H1.
    pub attends_beside: bool,
    /// The halves that the layer has.
    pub halves: Halves,
    /// Feed-forward.
    pub feed_forward: FeedForward,
    /// Position of attention's norms.
    pub attn_norm: NormPlace,
    /// Position of the feed-forward's norms.
    pub ffn_norm: NormPlace,
    /// Whether the layer has a third half, which adds its per-layer embedding:
    /// [`ModelConfig::per_layer`](super::ModelConfig::per_layer).
    pub per_layer: bool,
    /// Whether the layer scales the residual stream at its end: Gemma 4.
    pub output_scale: bool,
    /// Whether both halves read the same residual stream, as in GPT-NeoX, rather than one after the other.
    pub parallel: bool,
    /// Whether the layer attends to an encoder's output between its halves, with heads like those of its attention: Whisper.
    pub cross: bool,
}

/// Halves of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Halves {
    /// Token mixing, then a feed-forward.
    Both,
    /// Attention or a recurrence alone: Nemotron-H.
    Mixing,
    /// A feed-forward alone.
    FeedForward,
}

impl Block {
    /// Attention and a feed-forward, one after the other, with norms before them and nothing else.
    pub(crate) fn plain(attention: Attention, feed_forward: FeedForward) -> Block {
        Block {
            attention,
            recurrence: None,
            attends_beside: false,
            halves: Halves::Both,
            feed_forward,
            attn_norm: NormPlace::Before,
            ffn_norm: NormPlace::Before,
            per_layer: false,
            output_scale: false,
            parallel: false,
            cross: false,
        }
    }

    /// Whether the layer has attention.
    pub fn attends(&self) -> bool {
        self.halves != Halves::FeedForward && (self.recurrence.is_none() || self.attends_beside)
    }

    /// Its recurrence, if it has one.
    pub fn recurs(&self) -> Option<&Recurrence> {
        self.recurrence.as_ref().filter(|_| self.halves != Halves::FeedForward)
    }

    /// Whether the layer has a feed-forward.
    pub fn feeds_forward(&self) -> bool {
        self.halves != Halves::Mixing
    }
}

/// Position of a half's norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlace {
    /// No norms: the stream is normalised already.
    Nowhere,
    /// Before the half: Llama.
    Before,
    /// On the half's output, before the residual sum: OLMo 2.
    Result,
    /// Before the half and on its output: Gemma 2.
    Both,
    /// On the residual sum: BERT.
    Sum,
}

impl NormPlace {
    /// Whether the half's input is normalised.
    pub fn is_before(self) -> bool {
        matches!(self, NormPlace::Before | NormPlace::Both)
    }

    /// Whether the half's output is normalised before the residual sum.
    pub fn is_on_result(self) -> bool {
        matches!(self, NormPlace::Result | NormPlace::Both)
    }
}

/// A shared expert, which every token uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its width: `expert_shared_feed_forward_length`; `shared_expert_intermediate_size`.
    pub dim: u32,
    /// Whether a sigmoid gate scales its output.
    pub gated: bool,
}

/// Token mixing other than attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Recurrence {
    /// A gated convolution over the last inputs: LFM2.
    ShortConv {
        /// Kernel size: `shortconv.l_cache`; `conv_L_cache`.
        taps: u32,
    },
    /// A gated convolution over the neighbours of patches, in encoders of pictures alone: LFM3-VL.
    GridConv {
        /// Patches on a side of the kernel: `conv_kernel_size`.
        side: u32,
    },
    /// A gated delta rule over convolved queries, keys and values: Qwen3.5.
    DeltaNet {
        /// Its shape: `ssm.group_count`, `ssm.time_step_rank`, `ssm.state_size`; `linear_num_key_heads` and so on.
        rule: DeltaRule,
        /// Kernel size of the convolution: `ssm.conv_kernel`; `linear_conv_kernel_dim`.
        taps: u32,
        /// Epsilon of its norm.
        eps: f32,
    },
    /// A selective scan over convolved values, B and C: Mamba 2.
    Mamba2 {
        /// Its shape: `ssm.group_count`, `ssm.time_step_rank`, `ssm.state_size`; `mamba_n_groups` and so on.
        scan: SelectiveScan,
        /// Kernel size of the convolution: `ssm.conv_kernel`; `mamba_d_conv`.
        taps: u32,
        /// Whether each group of heads is normalised at its end.
        normed: bool,
    },
}

impl Recurrence {
    /// Columns of its input projection, for a model of width C.
    pub fn inputs(&self, dim: u32) -> u32 {
        match self {
            Recurrence::ShortConv { .. } | Recurrence::GridConv { .. } => 3 * dim,
            Recurrence::DeltaNet { rule, .. } => rule.inputs(),
            Recurrence::Mamba2 { scan, .. } => scan.inputs(),
        }
    }

    /// Columns of its output, before the output projection.
    pub fn outputs(&self, dim: u32) -> u32 {
        match self {
            Recurrence::ShortConv { .. } | Recurrence::GridConv { .. } => dim,
            Recurrence::DeltaNet { rule, .. } => rule.n_heads * rule.value_dim,
            Recurrence::Mamba2 { scan, .. } => scan.inner_dim(),
        }
    }

    /// Channels of its convolution.
    pub fn channels(&self, dim: u32) -> u32 {
        match self {
            Recurrence::ShortConv { .. } | Recurrence::GridConv { .. } => dim,
            Recurrence::DeltaNet { rule, .. } => rule.channels(),
            Recurrence::Mamba2 { scan, .. } => scan.channels(),
        }
    }

    /// Kernel size of its convolution.
    pub fn taps(&self) -> u32 {
        match *self {
            Recurrence::GridConv { side } => side * side,
            Recurrence::ShortConv { taps } | Recurrence::DeltaNet { taps, .. } | Recurrence::Mamba2 { taps, .. } => {
                taps
            }
        }
    }

    /// Heads, rows and columns of its state matrices, if any.
    pub fn matrices(&self) -> Option<[u32; 3]> {
        match self {
            Recurrence::ShortConv { .. } | Recurrence::GridConv { .. } => None,
            Recurrence::DeltaNet { rule, .. } => Some([rule.n_heads, rule.key_dim, rule.value_dim]),
            Recurrence::Mamba2 { scan, .. } => Some([scan.n_heads, scan.state_dim, scan.head_dim]),
        }
    }
}

/// Which rows of an image or a sound see each other in a text model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowAttention {
    /// Rows see those before them, like tokens: sounds.
    Causal,
    /// Rows see each other in the layers with [`Attention::bidirectional_images`].
    ByLayer,
    /// Rows see each other in all layers, those beyond a window too: images of Gemma 4 "unified".
    Whole,
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
    /// Sliding window: a query sees keys less than this far away. `None`: all keys.
    pub window: Option<u32>,
    /// Scale of the scores.
    pub scale: f32,
    /// Soft cap of the scores.
    pub soft_cap: Option<f32>,
    /// Index into the model's RoPE configurations. `None`: no rotation.
    pub rope: Option<usize>,
    /// Norm of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Whether each head has an attention sink: a score without a value in the softmax.
    pub sinks: bool,
    /// Sigmoid gates of the output, projected before the queries; with latent attention after the latents.
    pub gates: Option<OutputGates>,
    /// An earlier layer whose keys and values this one shares.
    pub keys_of: Option<usize>,
    /// Whether the keys' projection gives the values, too: Gemma 4's larger models. Norms and rotation of keys do not
    /// apply to them.
    pub values_of_keys: bool,
    /// Whether rows of an image see those of the same image after them: Gemma 3, and local layers of Gemma 4.
    pub bidirectional_images: bool,
    /// Multi-head latent attention, if it is that: then `n_kv_heads` is 1 and `head_dim` the cached size.
    pub latent: Option<Latent>,
}

/// Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434). A token's keys and values of all heads are made of
/// one latent. It is cached with one rotated part of the keys, and the matrices that would make keys of it are applied to
/// the queries instead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// Size of the latent: `attention.kv_lora_rank`; `kv_lora_rank`. The rest of `head_dim` is rotated.
    pub kv_rank: u32,
    /// Size of the queries' latent, if they have one: `attention.q_lora_rank`; `q_lora_rank`.
    pub q_rank: Option<u32>,
    /// Elements of a query that are not rotated: `qk_nope_head_dim`.
    pub nope_dim: u32,
    /// Size of a value: `attention.value_length_mla`; `v_head_dim`.
    pub value_dim: u32,
    /// Epsilon of the norms of latents.
    pub eps: f32,
}

/// Gates of an attention layer's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputGates {
    /// One for each element: Qwen3.5.
    Elements,
    /// One for each head: LFM3.
    Heads,
}

/// A feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForward {
    /// F, its width, or that of each expert: `feed_forward_length`, `expert_feed_forward_length`; `intermediate_size`,
    /// `moe_intermediate_size`.
    pub dim: u32,
    /// Activation between its two products.
    pub between: Between,
    /// Its experts, for a mixture of experts.
    pub experts: Option<Experts>,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// E: `expert_count`; `num_experts`, `num_local_experts`.
    pub n: u32,
    /// Width of a dense feed-forward beside the experts, if any: Gemma 4. Then either half has norms of its own, as the
    /// router has, and each expert a factor.
    pub dense: Option<u32>,
    /// K, experts per token: `expert_used_count`; `num_experts_per_tok`.
    pub n_used: u32,
    /// How the router chooses experts.
    pub router: Router,
    /// Whether each expert has a bias for routing only.
    pub choice_bias: bool,
    /// The shared expert, if any.
    pub shared: Option<SharedExpert>,
}

/// Activation between the two products of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// `gelu(up)`.
    Gelu(Gelu),
    /// `max(up, 0)`: T5.
    Relu,
    /// `max(up, 0)²`: Nemotron.
    SquaredRelu,
    /// `act(gate) * up`.
    Gate(Gate),
}

impl Attention {
    /// Attention of as many key heads as query heads, with the usual scale and nothing else.
    pub(crate) fn plain(n_heads: u32, head_dim: u32) -> Attention {
        Attention {
            n_heads,
            n_kv_heads: n_heads,
            head_dim,
            window: None,
            scale: (head_dim as f32).powf(-0.5),
            soft_cap: None,
            rope: None,
            qk_norm: None,
            sinks: false,
            gates: None,
            keys_of: None,
            values_of_keys: false,
            bidirectional_images: false,
            latent: None,
        }
    }

    /// Columns of the queries, `H * D`.
    pub fn q_dim(&self) -> u32 {
        self.n_heads * self.head_dim
    }

    /// Columns of the keys, and of the values, `Hkv * D`.
    pub fn kv_dim(&self) -> u32 {
        self.n_kv_heads * self.head_dim
    }

    /// Columns of the gates, which come first; with latent attention last, after the columns of
    /// [`Attention::latent_dims`].
    pub fn gate_dim(&self) -> u32 {
        match self.gates {
            None => 0,
            Some(OutputGates::Elements) => self.q_dim(),
            Some(OutputGates::Heads) => self.n_heads,
        }
    }

    /// Columns before the queries.
    pub fn first_query(&self) -> u32 {
        if self.latent.is_some() { 0 } else { self.gate_dim() }
    }

    /// Columns of the output, before its projection.
    pub fn output_dim(&self) -> u32 {
        self.latent.map_or(self.q_dim(), |latent| self.n_heads * latent.value_dim)
    }

    /// Where keys hold their values, the first element of a key that is its value's.
    pub fn values_from(&self) -> Option<u32> {
        self.latent.map(|latent| self.head_dim.saturating_sub(latent.kv_rank))
    }

    /// With latent attention, columns of the queries as they are projected, and of the products of the layer's input: the
    /// queries or their latent, then the keys' latent and the part that is rotated.
    pub fn latent_dims(&self, latent: &Latent) -> [u32; 2] {
        let turned = self.head_dim.saturating_sub(latent.kv_rank);
        let query_dim = self.n_heads * (latent.nope_dim + turned);
        [query_dim, latent.q_rank.unwrap_or(query_dim) + self.head_dim]
    }

    /// Key/value heads that the layer projects itself.
    pub fn own_kv_heads(&self) -> u32 {
        if self.keys_of.is_some() { 0 } else { self.n_kv_heads }
    }

    /// Columns of gates, queries, and the layer's own keys and values, in this order; with latent attention of queries
    /// and keys alone.
    pub fn qkv_dim(&self) -> u32 {
        let n_kinds = if self.latent.is_some() { 1 } else { 2 };
        self.first_query() + self.q_dim() + n_kinds * self.own_kv_heads() * self.head_dim
    }

    /// H, Hkv and D.
    pub fn heads(&self) -> [u32; 3] {
        [self.n_heads, self.n_kv_heads, self.head_dim]
    }

    /// Parameters of the attention kernels for a pass over rows of an image or a sound.
    pub(crate) fn image_kernel(&self, attention: RowAttention) -> AttentionConfig {
        let causal = match attention {
            RowAttention::Causal => true,
            RowAttention::ByLayer => !self.bidirectional_images,
            RowAttention::Whole => false,
        };
        AttentionConfig { whole_pass: attention == RowAttention::Whole, ..self.kernel(causal) }
    }

    /// Parameters of the attention kernels.
    pub(crate) fn kernel(&self, causal: bool) -> AttentionConfig {
        let Attention { n_heads, n_kv_heads, head_dim, window, scale, soft_cap, .. } = *self;
        AttentionConfig {
            n_heads,
            n_kv_heads,
            head_dim,
            window,
            scale,
            soft_cap,
            values_from: self.values_from(),
            causal,
            whole_pass: false,
        }
    }
}

impl FeedForward {
    /// Width of its dense part, if it has one.
    pub fn dense_dim(&self) -> Option<u32> {
        self.experts.map_or(Some(self.dim), |experts| experts.dense)
    }

    /// Whether gates multiply its ups.
    pub fn is_gated(&self) -> bool {
        matches!(self.between, Between::Gate(_))
    }

    /// Rows of the dense part's first product: gates and ups together.
    pub fn up_dim(&self) -> u32 {
        let dim = self.dense_dim().unwrap_or(0);
        match self.between {
            Between::Gelu(_) | Between::Relu | Between::SquaredRelu => dim,
            Between::Gate(_) => 2 * dim,
        }
    }
}
