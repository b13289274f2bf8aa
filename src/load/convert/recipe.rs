//! Recipes: which type each matrix of a model gets, by its role and layer.
//!
//! The rules are those of llama.cpp's `llama-quantize`, as of build 11739 (`llama_tensor_get_type` in
//! `src/llama-quant.cpp`): the same input gives the same file, byte for byte.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use super::plan::is_quantized;
use crate::formats::BlockType;
use crate::formats::gguf::{Gguf, Value};
use crate::model::ModelConfig;

macro_rules! recipes {
    ($($name:ident, $block_type:ident, $number:literal;)*) => {
        /// A mixture of types for the matrices of a model, named as in llama.cpp. `S`, `M` and `L` are small, medium and
        /// large: the larger, the more matrices get more bits than the recipe's usual type.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[expect(non_camel_case_types, missing_docs, reason = "names in llama.cpp")]
        pub enum Recipe {
            $($name,)*
        }

        impl Recipe {
            /// All recipes.
            pub const ALL: [Recipe; [$($number),*].len()] = [$(Recipe::$name),*];

            /// The type of most matrices.
            pub fn block_type(self) -> BlockType {
                match self { $(Recipe::$name => BlockType::$block_type,)* }
            }

            /// `general.file_type`: the number in `enum llama_ftype` of `llama.h`.
            pub(super) fn file_type(self) -> u32 {
                match self { $(Recipe::$name => $number,)* }
            }
        }
    };
}

// Name, type of most matrices, and number in files.
recipes! {
    F32, F32, 0;
    F16, F16, 1;
    BF16, BF16, 32;
    Q8_0, Q8_0, 7;
    Q4_0, Q4_0, 2;
    Q4_1, Q4_1, 3;
    Q5_0, Q5_0, 8;
    Q5_1, Q5_1, 9;
    Q2_K_S, Q2_K, 21;
    Q2_K, Q2_K, 10;
    Q3_K_S, Q3_K, 11;
    Q3_K_M, Q3_K, 12;
    Q3_K_L, Q3_K, 13;
    Q4_K_S, Q4_K, 14;
    Q4_K_M, Q4_K, 15;
    Q5_K_S, Q5_K, 16;
    Q5_K_M, Q5_K, 17;
    Q6_K, Q6_K, 18;
    IQ4_NL, IQ4_NL, 25;
    IQ4_XS, IQ4_XS, 30;
    MXFP4_MOE, MXFP4, 38;
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl FromStr for Recipe {
    type Err = String;

    /// Parses a name in any case. `Q3_K`, `Q4_K` and `Q5_K` are the medium recipes, as in llama.cpp.
    fn from_str(text: &str) -> Result<Recipe, String> {
        let upper = text.to_ascii_uppercase();
        let name = match upper.as_str() {
            "Q3_K" => "Q3_K_M",
            "Q4_K" => "Q4_K_M",
            "Q5_K" => "Q5_K_M",
            other => other,
        };
        Recipe::ALL
            .into_iter()
            .find(|recipe| recipe.to_string() == name)
            .ok_or_else(|| format!("expected one of {}", Recipe::ALL.map(|recipe| recipe.to_string()).join(", ")))
    }
}

/// What recipes depend on besides the tensors.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelTraits {
    is_falcon: bool,
    /// Llama 2 70B and models of its size, whose V matrices are small beside the others.
    is_70b: bool,
    n_layers: usize,
    n_experts: usize,
    /// Query heads per head of keys and values in the first layer.
    n_gqa: usize,
}

impl ModelTraits {
    pub fn new(architecture: &str, n_layers: usize, n_experts: usize, [n_heads, n_kv_heads]: [u32; 2]) -> ModelTraits {
        let is_gqa = n_heads != n_kv_heads;
        let is_70b = n_layers == 80
            && match architecture {
                "llama" | "llama-embed" => is_gqa,
                "qwen2" | "deci" => true,
                _ => false,
            };
        let n_gqa = n_heads.checked_div(n_kv_heads).unwrap_or(0) as usize;
        ModelTraits { is_falcon: architecture == "falcon", is_70b, n_layers, n_experts, n_gqa }
    }

    /// From a GGUF file's keys; 0 for what it does not have.
    pub fn of_gguf(file: &Gguf) -> ModelTraits {
        let keys = &file.metadata;
        let architecture = keys.get_str("general.architecture").ok().flatten().unwrap_or_default();
        // Of the first layer, if each has its own.
        let number = |name: &str| match keys.get(&format!("{architecture}.{name}")) {
            Some(Value::Array(array)) => array.iter().next().and_then(Value::as_integer),
            value => value.and_then(Value::as_integer),
        };
        let count = |name: &str| number(name).and_then(|number| u32::try_from(number).ok());
        let [n_layers, n_experts] = ["block_count", "expert_count"].map(|name| count(name).unwrap_or(0) as usize);
        let n_heads = count("attention.head_count").unwrap_or(0);
        let n_kv_heads = count("attention.head_count_kv").unwrap_or(n_heads);
        ModelTraits::new(architecture, n_layers, n_experts, [n_heads, n_kv_heads])
    }

    pub fn of_config(architecture: &str, config: &ModelConfig) -> ModelTraits {
        let block = config.blocks.first();
        let heads = block.map_or([0; 2], |block| [block.attention.n_heads, block.attention.n_kv_heads]);
        let n_experts = block.and_then(|block| block.feed_forward.experts).map_or(0, |experts| experts.n as usize);
        ModelTraits::new(architecture, config.blocks.len(), n_experts, heads)
    }
}

/// A tensor's role, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TensorRole {
    Embedding,
    Output,
    Query,
    Key,
    Value,
    /// Queries, keys and values in one matrix.
    Qkv,
    AttentionOutput,
    Up,
    Gate,
    Down,
    Other,
}

impl TensorRole {
    fn of(name: &str) -> TensorRole {
        const PARTS: [(&str, TensorRole); 9] = [
            ("attn_qkv.weight", TensorRole::Qkv),
            ("attn_kv_b.weight", TensorRole::Value),
            ("attn_v.weight", TensorRole::Value),
            ("attn_k.weight", TensorRole::Key),
            ("attn_q.weight", TensorRole::Query),
            ("attn_output.weight", TensorRole::AttentionOutput),
            ("ffn_up", TensorRole::Up),
            ("ffn_gate", TensorRole::Gate),
            ("ffn_down", TensorRole::Down),
        ];
        match name {
            "output.weight" => TensorRole::Output,
            "token_embd.weight" | "per_layer_token_embd.weight" => TensorRole::Embedding,
            _ => PARTS.into_iter().find(|(part, _)| name.contains(part)).map_or(TensorRole::Other, |(_, role)| role),
        }
    }

    fn has_values(self) -> bool {
        matches!(self, TensorRole::Value | TensorRole::Qkv)
    }
}

/// llama.cpp's order of tensors: those outside layers, then layer by layer, each by name.
pub(super) fn by_layer(a: &str, b: &str) -> Ordering {
    let layer = |name: &str| crate::model::layer_of(name);
    layer(a).cmp(&layer(b)).then_with(|| a.cmp(b))
}

/// Chooses types tensor by tensor, in the order of [`by_layer`].
struct Chooser<'a> {
    recipe: Recipe,
    traits: &'a ModelTraits,
    has_importance: bool,
    /// Whether the embedding is also the output head.
    is_tied: bool,
    /// Matrices with values, in all and so far.
    n_values: usize,
    values_before: usize,
    downs_before: usize,
}

/// The types of all matrices that `recipe` quantises, by tensor name, before fallbacks for rows that are not a whole
/// number of blocks.
pub(super) fn types<'t>(
    recipe: Recipe,
    traits: &ModelTraits,
    has_importance: bool,
    tensors: impl Iterator<Item = (&'t str, &'t [u64])>,
) -> HashMap<&'t str, BlockType> {
    let mut tensors: Vec<_> = tensors.collect();
    tensors.sort_by(|(a, _), (b, _)| by_layer(a, b));
    let roles = || tensors.iter().map(|(name, _)| TensorRole::of(name));
    let mut chooser = Chooser {
        recipe,
        traits,
        has_importance,
        is_tied: !roles().any(|role| role == TensorRole::Output),
        n_values: roles().filter(|role| role.has_values()).count(),
        values_before: 0,
        downs_before: 0,
    };
    let quantized = tensors.iter().filter(|(name, shape)| is_quantized(name, shape));
    quantized.map(|&(name, shape)| (name, chooser.next(name, shape))).collect()
}

impl Chooser<'_> {
    fn next(&mut self, name: &str, shape: &[u64]) -> BlockType {
        let usual = self.recipe.block_type();
        if usual.block_len() == 1 {
            return usual;
        }
        let role = TensorRole::of(name);
        if role == TensorRole::Output || role == TensorRole::Embedding && self.is_tied {
            return self.output(shape);
        }
        if self.recipe == Recipe::MXFP4_MOE {
            // Expert matrices have three dimensions.
            let is_experts = shape.len() > 2 && shape[shape.len() - 3] > 1;
            return if is_experts { BlockType::MXFP4 } else { BlockType::Q8_0 };
        }
        match role {
            TensorRole::Value | TensorRole::Qkv => self.values(),
            TensorRole::Key if self.traits.n_experts == 8 => BlockType::Q8_0,
            TensorRole::Down => self.down(name),
            TensorRole::AttentionOutput => self.attention_output(),
            _ => usual,
        }
    }

    /// The output head.
    fn output(&self, shape: &[u64]) -> BlockType {
        let usual = self.recipe.block_type();
        let is_whole = shape.last().is_some_and(|row| row.is_multiple_of(usual.block_len()));
        match usual {
            BlockType::Q8_0 | BlockType::MXFP4 => BlockType::Q8_0,
            _ if self.traits.is_falcon || !is_whole => BlockType::Q8_0,
            _ => BlockType::Q6_K,
        }
    }

    /// Matrices with values, the most sensitive of attention.
    fn values(&mut self) -> BlockType {
        let before = self.values_before;
        self.values_before += 1;
        let ModelTraits { is_70b, n_experts, n_gqa, .. } = *self.traits;
        if n_experts == 8 {
            return BlockType::Q8_0;
        }
        let is_small = n_gqa >= 4;
        let chosen = match self.recipe {
            Recipe::Q2_K if is_small => BlockType::Q4_K,
            Recipe::Q2_K => BlockType::Q3_K,
            Recipe::Q2_K_S if is_small => BlockType::Q4_K,
            Recipe::Q3_K_M if before < 2 => BlockType::Q5_K,
            Recipe::Q3_K_M => BlockType::Q4_K,
            Recipe::Q3_K_L => BlockType::Q5_K,
            Recipe::IQ4_NL | Recipe::IQ4_XS if is_small => BlockType::Q5_K,
            Recipe::Q4_K_M | Recipe::Q5_K_M if has_more_bits(before, self.n_values) => BlockType::Q6_K,
            Recipe::Q4_K_S if before < 4 => BlockType::Q5_K,
            recipe => recipe.block_type(),
        };
        match chosen {
            BlockType::Q3_K | BlockType::Q4_K if is_70b => BlockType::Q5_K,
            chosen => chosen,
        }
    }

    fn down(&mut self, name: &str) -> BlockType {
        let before = self.downs_before;
        self.downs_before += 1;
        let ModelTraits { is_falcon, n_layers, n_experts, .. } = *self.traits;
        // A layer may have several such matrices if there are experts.
        let layer = if n_experts > 1 { crate::model::layer_of(name).map_or(0, |l| l as usize) } else { before };
        let (is_first, has_more) = (layer < n_layers / 8, has_more_bits(layer, n_layers));
        match self.recipe {
            Recipe::Q2_K => BlockType::Q3_K,
            Recipe::Q2_K_S if is_first => BlockType::Q4_K,
            Recipe::Q3_K_M if layer < n_layers / 16 => BlockType::Q5_K,
            Recipe::Q3_K_M if !is_falcon || has_more => BlockType::Q4_K,
            Recipe::Q3_K_L if is_falcon => BlockType::Q4_K,
            Recipe::Q3_K_L => BlockType::Q5_K,
            Recipe::Q4_K_M if is_falcon && layer < n_layers / 16 => BlockType::Q6_K,
            Recipe::Q4_K_M if is_falcon && has_more => BlockType::Q5_K,
            Recipe::Q4_K_M | Recipe::Q5_K_M if has_more && (!is_falcon || self.recipe == Recipe::Q5_K_M) => {
                BlockType::Q6_K
            }
            Recipe::IQ4_NL | Recipe::IQ4_XS if is_first && !self.has_importance => BlockType::Q5_K,
            Recipe::Q4_K_S if is_first && !is_falcon => BlockType::Q5_K,
            Recipe::Q4_0 if is_first && self.has_importance => BlockType::Q4_1,
            Recipe::Q5_0 if is_first && self.has_importance => BlockType::Q5_1,
            recipe => recipe.block_type(),
        }
    }

    fn attention_output(&self) -> BlockType {
        let usual = self.recipe.block_type();
        match (self.traits.is_falcon, self.traits.n_experts == 8, self.recipe) {
            (true, _, Recipe::Q3_K_L) => BlockType::Q4_K,
            (true, ..) => usual,
            (false, true, recipe) => match recipe {
                Recipe::Q2_K | Recipe::Q3_K_S | Recipe::Q3_K_M | Recipe::Q4_K_S | Recipe::Q4_K_M => BlockType::Q5_K,
                Recipe::IQ4_NL | Recipe::IQ4_XS => BlockType::Q5_K,
                _ => usual,
            },
            (false, false, Recipe::Q2_K) => BlockType::Q3_K,
            (false, false, Recipe::Q3_K_M) => BlockType::Q4_K,
            (false, false, Recipe::Q3_K_L) => BlockType::Q5_K,
            (false, false, _) => usual,
        }
    }
}

/// Whether the `i`-th of `n` matrices is among those that get more bits: the first and the last eighth, and every
/// third between.
fn has_more_bits(i: usize, n: usize) -> bool {
    i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
}
