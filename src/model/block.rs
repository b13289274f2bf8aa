//! What one layer of a transformer does. Decoders and encoders are made of the same blocks.

use crate::kernels::{AttentionConfig, Gate, Gelu, QkNorm};

/// One layer: attention, then a feed-forward, each added to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// How tokens see each other.
    pub attention: Attention,
    /// What is done with each token alone.
    pub feed_forward: FeedForward,
    /// Where attention's norms stand.
    pub attn_norm: NormPlace,
    /// Where the feed-forward's norms stand.
    pub ffn_norm: NormPlace,
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
}

/// A feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForward {
    /// F, its width: `feed_forward_length`; `intermediate_size`.
    pub dim: u32,
    /// What stands between its two products.
    pub between: Between,
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

    /// Columns of queries, keys and values side by side.
    pub fn qkv_dim(&self) -> u32 {
        self.q_dim() + 2 * self.kv_dim()
    }

    /// H, Hkv and D.
    pub fn heads(&self) -> [u32; 3] {
        [self.n_heads, self.n_kv_heads, self.head_dim]
    }

    /// What the attention kernels need to know.
    pub(super) fn kernel(&self, causal: bool) -> AttentionConfig {
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
