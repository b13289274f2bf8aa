//! Passes of well-known models without their weights, for any target, present or not: to inspect and count what
//! would be compiled and run.

use crate::dtype::WeightType;
use crate::embed::{OutputHead, record_texts};
use crate::error::Error;
use crate::generate::{LoadOptions, plan_of, record_pass};
use crate::kernels::Pooling;
use crate::load::config_of_json;
use crate::model::{
    BatchSize, Drawing, Ending, ModelConfig, Sampler, SourceTensor, Transformer, WeightSource, Weights,
};
use crate::recording::{MemoryPlan, Recording};
use crate::target::Target;

/// A model as described by its `config.json`.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The model's name.
    pub name: &'static str,
    json: &'static str,
}

/// Small and large decoders of three families, and a text encoder, from the models' own files.
pub const SHAPES: [Shape; 5] = [
    Shape {
        name: "Llama-3.2-1B",
        json: r#"{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
            "tie_word_embeddings": true}"#,
    },
    Shape {
        name: "Qwen3-0.6B",
        json: r#"{"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
            "tie_word_embeddings": true}"#,
    },
    Shape {
        name: "Llama-3.1-8B",
        json: r#"{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
            "tie_word_embeddings": false}"#,
    },
    Shape {
        name: "Gemma-3-1B",
        json: r#"{"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "vocab_size": 262144,
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0, "sliding_window": 512, "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true}"#,
    },
    Shape {
        name: "MiniLM-L6",
        json: r#"{"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
            "intermediate_size": 1536, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2,
            "layer_norm_eps": 1e-12, "hidden_act": "gelu"}"#,
    },
];

/// Decoders of 1 to 70 billion weights, for memory plans.
pub const SIZES: [Shape; 6] = [
    SHAPES[0],
    Shape {
        name: "Llama-3.2-3B",
        json: r#"{"model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
            "tie_word_embeddings": true}"#,
    },
    SHAPES[2],
    Shape {
        name: "Qwen3-14B",
        json: r#"{"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 17408, "vocab_size": 151936,
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
            "tie_word_embeddings": false}"#,
    },
    Shape {
        name: "Qwen3-32B",
        json: r#"{"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
            "tie_word_embeddings": false}"#,
    },
    Shape {
        name: "Llama-3.1-70B",
        json: r#"{"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 28672, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
            "tie_word_embeddings": false}"#,
    },
];

/// A pass of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShapePass {
    /// Tokens in the pass: 1 for decoding. For an encoder, all in one text.
    pub n_tokens: u32,
    /// Positions in a decoder's cache.
    pub context_length: u32,
}

impl Shape {
    /// The model's configuration.
    ///
    /// # Errors
    /// None in practice: the configurations are those above.
    pub fn config(&self) -> Result<ModelConfig, Error> {
        config_of_json(self.json.as_bytes())
    }

    /// Memory needed for a decoder's weights and one session, by the same plan as loading. Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Option`] for options out of range; [`Error::Operand`] if the target's limits are too small.
    pub fn plan(&self, target: &Target, weight: WeightType, options: &LoadOptions<'_>) -> Result<MemoryPlan, Error> {
        let config = self.config()?;
        let weights = Weights::declare(target, &config, &Imagined { config: &config, weight })?;
        plan_of(target, config, weights, options)
    }

    /// Records a pass: of a decoder with greedy sampling, of an encoder with mean pooling.
    ///
    /// # Errors
    /// [`Error::Operand`] if the target's limits are too small.
    pub fn record(&self, target: &Target, weight: WeightType, pass: ShapePass) -> Result<Recording, Error> {
        self.record_to(target, weight, pass, Ending::GREEDY)
    }

    /// As [`Shape::record`], with random sampling for a decoder.
    ///
    /// # Errors
    /// As [`Shape::record`].
    pub fn record_sampled(&self, target: &Target, weight: WeightType, pass: ShapePass) -> Result<Recording, Error> {
        self.record_to(target, weight, pass, Ending::Sample(Sampler { draw: Drawing::All, ..Sampler::default() }))
    }

    fn record_to(
        &self,
        target: &Target,
        weight: WeightType,
        pass: ShapePass,
        ending: Ending,
    ) -> Result<Recording, Error> {
        let ShapePass { n_tokens, context_length } = pass;
        let config = self.config()?;
        let is_decoder = config.has_head;
        let weights = Weights::declare(target, &config, &Imagined { config: &config, weight })?;
        let n_pos = if is_decoder { context_length } else { config.max_seq_len };
        let transformer = Transformer::declare(config, weights, n_pos)?;
        if is_decoder {
            return record_pass(target, &transformer, context_length, n_tokens, ending);
        }
        let head = OutputHead::Vector { pooling: Pooling::Mean, normalize: true, layers: Vec::new() };
        record_texts(target, &transformer, &head, BatchSize { n_tokens, n_sequences: 1 }, n_pos)
    }
}

/// Tensors of a model with this configuration: matrices of one type, all others F32.
struct Imagined<'a> {
    config: &'a ModelConfig,
    weight: WeightType,
}

impl WeightSource for Imagined<'_> {
    fn describe(&self, name: &str) -> Option<SourceTensor> {
        let ModelConfig { dim, vocab_size, .. } = *self.config;
        let (stem, suffix) = name.rsplit_once('.')?;
        let (layer, part) = match stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, part)) => (layer.parse().ok()?, part),
            None => (0, stem),
        };
        let block = self.config.blocks.get::<usize>(layer)?;
        let heads = &block.attention;
        let (queries, keys) = (heads.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim);
        let matrix = match part {
            "token_embd" => Some([vocab_size, dim]),
            // If a decoder's head is separate from the embedding.
            "output" if dim >= 4096 => Some([vocab_size, dim]),
            "attn_q" => Some([queries, dim]),
            "attn_k" | "attn_v" => Some([keys, dim]),
            "attn_output" => Some([dim, queries]),
            "ffn_gate" | "ffn_up" => Some([block.feed_forward.dim, dim]),
            "ffn_down" => Some([dim, block.feed_forward.dim]),
            _ => None,
        };
        // BERT's products and norms have biases.
        let is_bert = !self.config.causal;
        let shape: Vec<u32> = match (matrix, part, suffix) {
            (Some([rows, _]), _, "bias") if is_bert => vec![rows],
            (Some(shape), _, "weight") => shape.to_vec(),
            (None, "attn_q_norm" | "attn_k_norm", "weight") => vec![heads.head_dim],
            (None, "position_embd", "weight") => vec![self.config.max_seq_len, dim],
            (None, "token_types", "weight") => vec![self.config.n_token_types, dim],
            (None, part, _) if part.ends_with("_norm") && (is_bert || suffix == "weight") => vec![dim],
            _ => return None,
        };
        let weight = if matrix.is_some() && suffix == "weight" { self.weight } else { WeightType::F32 };
        Some(SourceTensor { weight, shape: shape.into_iter().map(u64::from).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_weight_counts_match_model_cards() {
        // Millions, from the model cards.
        let known = [1236.0, 596.0, 8030.0, 1000.0, 22.7];
        for (shape, millions) in SHAPES.iter().zip(known) {
            let pass = ShapePass { n_tokens: 1, context_length: 128 };
            let recording = shape.record(&Target::cpu(), WeightType::F32, pass).expect("it is recorded");
            let found = MemoryPlan::of([&recording], []).weights_bytes as f64 / 4e6;
            assert!((found / millions - 1.0).abs() < 0.01, "{}: {found} millions", shape.name);
        }
    }

    /// Layers, width, heads, KV heads, head size, feed-forward width, vocabulary; whether the head is its own matrix.
    const KNOWN: [([u64; 7], bool); 6] = [
        ([16, 2048, 32, 8, 64, 8192, 128_256], false),
        ([28, 3072, 24, 8, 128, 8192, 128_256], false),
        ([32, 4096, 32, 8, 128, 14_336, 128_256], true),
        ([40, 5120, 40, 8, 128, 17_408, 151_936], true),
        ([64, 5120, 64, 8, 128, 25_600, 151_936], true),
        ([80, 8192, 64, 8, 128, 28_672, 128_256], true),
    ];

    #[test]
    fn memory_plan_of_a_shape_is_the_sum_of_its_parts() {
        use crate::kernels::KvType;
        let types = [(WeightType::F32, 4.0), (WeightType::F16, 2.0), (WeightType::Q8_0, 34.0 / 32.0)];
        let types = types.into_iter().chain([(WeightType::Q4_0, 18.0 / 32.0), (WeightType::Q4_K, 144.0 / 256.0)]);
        // Billions, from the model cards.
        let billions = [1.24, 3.21, 8.03, 14.8, 32.8, 70.6];
        for (weight, bytes) in types {
            for ((shape, ([layers, dim, heads, kv_heads, head, ffn, vocab], has_head)), billions) in
                SIZES.iter().zip(KNOWN).zip(billions)
            {
                let of_layer = dim * (2 * heads + 2 * kv_heads) * head + 3 * dim * ffn;
                let matrices = layers * of_layer + if has_head { 2 } else { 1 } * vocab * dim;
                assert!((matrices as f64 / 1e9 / billions - 1.0).abs() < 0.01, "{}: {matrices}", shape.name);
                let options =
                    LoadOptions { context_length: Some(4096), kv_type: KvType::F16, ..LoadOptions::default() };
                let plan = shape.plan(&Target::cpu(), weight, &options).expect("it is planned");
                // The rest is norms and angles.
                let rest = plan.weights_bytes as f64 - matrices as f64 * bytes;
                assert!((0.0..16e6).contains(&rest), "{} {weight}: {rest} more than {matrices}", shape.name);
                // Two bytes per key element and two per value element, in slightly more rows than there are positions.
                let cache = layers * 4096 * kv_heads * head * 4;
                assert!((cache..=cache * 101 / 100).contains(&plan.cache_bytes), "{} {weight}: {plan:?}", shape.name);
                // Rows of the largest pass: at most a few times the widest product's output, and one row of logits.
                let row = 4 * (2 * dim + 2 * ffn + (heads + 2 * kv_heads) * head);
                let least = 128 * row / 4 + 4 * vocab;
                assert!(
                    (least..4 * 128 * row + 16 * vocab).contains(&plan.activations_bytes),
                    "{}: {plan:?}",
                    shape.name
                );
            }
        }
    }

    #[test]
    fn absent_gpu_is_recorded_with_its_own_tier_variants() {
        use crate::shaders::Tier;
        use crate::target::{TargetKind, TargetLimits};
        let limits = TargetLimits {
            max_workgroups: 65_535,
            max_binding_bytes: 2 << 30,
            max_dispatch_operations: 1 << 38,
            min_subgroup: 32,
            max_subgroup: 32,
            converts_slowly: true,
            max_workgroup_bytes: 48 << 10,
            max_splits: 8,
            params_stride: 256,
        };
        let target = Target::new(TargetKind::Gpu, Tier::Matrix16, limits);
        for shape in SHAPES {
            let pass = ShapePass { n_tokens: 512, context_length: 4096 };
            let recording = shape.record(&target, WeightType::Q4_0, pass).expect("it is recorded");
            let has = recording.dispatches().any(|dispatch| dispatch.label() == "matmul_half.Q4_0.matrix16");
            assert!(has, "{}: {:?}", shape.name, recording.labels().collect::<Vec<_>>());
            // Heads of 256 are too large, and an encoder's packed rows are f32.
            let fits = !["Gemma-3-1B", "MiniLM-L6"].contains(&shape.name);
            let attention = if fits { "attention_half.F16.matrix16" } else { "attention_prefill." };
            let labels: Vec<_> = recording.labels().filter(|label| label.starts_with("attention_")).collect();
            let has = !labels.is_empty() && labels.iter().all(|label| label.starts_with(attention));
            assert!(has, "{}: {labels:?}", shape.name);
        }
    }
}
