//! Configurations of single families: alternative spellings of one model, and unsupported features.

use std::fs;

use serde_json::{Value, json};
use tilewright::Error;
use tilewright::load::ModelFile;
use tilewright::model::{Block, ModelConfig};

use super::builder::{ARRAY, F32, array};
use super::checkpoint::checkpoint;
use super::mtp_layers::copied;
use super::{Folder, common};

/// Configuration of a tiny random model after `change` to its file.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> Option<Result<ModelConfig, Error>> {
    let source = common::data(&["tiny-random"])?.join("tiny-random").join(name);
    let copy = Folder::new();
    fs::copy(source.join("model.safetensors"), copy.0.join("model.safetensors")).unwrap();
    let mut config = serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(copy.0.join("config.json"), config.to_string()).unwrap();
    Some(ModelFile::open(&copy.0).map(|file| file.header.shape.config().clone()))
}

/// Published files of Gemma 4 contain vision and audio parts beside the text part, and one head size for all
/// full-attention layers.
#[test]
fn published_gemma4_config_loads_like_the_plain_one() {
    let Some(plain) = changed("gemma4", |_| {}) else { return };
    let published = changed("gemma4", |config| {
        let text = config.as_object_mut().unwrap();
        text.remove("per_layer_config");
        text.remove("tie_word_embeddings");
        text.extend([("global_head_dim".into(), json!(32)), ("num_global_key_value_heads".into(), Value::Null)]);
        *config = json!({
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "text_config": config.take(),
            "vision_config": { "model_type": "gemma4_vision", "hidden_size": 768 },
            "tie_word_embeddings": true,
        });
    });
    let (plain, published) = (plain.unwrap(), published.unwrap().unwrap());
    assert_eq!(plain, published);
    let of = |l: usize| &plain.blocks[l].attention;
    let heads: Vec<_> = (0..6).map(|l| (of(l).head_dim, of(l).window, of(l).keys_of)).collect();
    let (local, global) = ((16, Some(8)), (32, None));
    let want = [local, local, global, local, local, global].map(|(head_dim, window)| (head_dim, window));
    let keys_of = [None, None, None, None, Some(3), Some(2)];
    assert_eq!(heads, want.into_iter().zip(keys_of).map(|((d, w), of)| (d, w, of)).collect::<Vec<_>>());
}

#[test]
fn unsupported_model_options_are_refused_by_key() {
    for (name, key, value, field) in [
        ("gemma4", "enable_moe_block", json!(true), "enable_moe_block"),
        ("gemma4", "num_experts", json!(8), "enable_moe_block"),
        ("gemma4", "use_bidirectional_attention", json!("all"), "use_bidirectional_attention"),
        ("gemma4", "num_kv_shared_layers", json!(7), "num_kv_shared_layers"),
        ("gemma4", "num_kv_shared_layers", json!(4), "num_kv_shared_layers"),
        ("gemma4", "hidden_size_per_layer_input", json!(u32::MAX), "hidden_size_per_layer_input"),
        ("gemma4", "vocab_size_per_layer_input", json!(0), "vocab_size_per_layer_input"),
        (
            "gemma4",
            "per_layer_config",
            json!({ "2": { "head_dim": u32::MAX }, "5": { "head_dim": u32::MAX } }),
            "head_dim",
        ),
        ("gemma4", "per_layer_config", json!({ "5": { "head_dim": 48 } }), "num_kv_shared_layers"),
        ("gemma4", "per_layer_config", json!({ "5": { "other": 1 } }), "per_layer_config.5.other"),
        ("gemma4", "layer_types", json!(["full_attention"]), "layer_types"),
        ("granite-hybrid", "mamba_n_groups", json!(3), "mamba_n_groups"),
        ("deepseek-v2", "qk_rope_head_dim", json!(12), "qk_rope_head_dim"),
        ("deepseek-v2", "kv_lora_rank", json!(0), "kv_lora_rank"),
        ("deepseek-v2", "topk_method", json!("noaux_tc"), "topk_method"),
        ("deepseek-v2", "scoring_func", json!("tanh"), "scoring_func"),
        ("deepseek-v2", "moe_layer_freq", json!(2), "moe_layer_freq"),
        ("glm4-moe", "n_group", json!(4), "n_group"),
        ("glm4-moe-lite", "mlp_layer_types", json!(["sparse", "dense", "sparse"]), "mlp_layer_types"),
        ("nemotron-h", "layers_block_type", json!(["mlp", "mlp", "mlp", "mlp", "rwkv"]), "layers_block_type"),
        ("nemotron-h-moe", "moe_latent_size", json!(32), "moe_latent_size"),
        ("falcon-h1", "ssm_multipliers", json!([1.0]), "ssm_multipliers"),
        ("falcon-h1", "mlp_multipliers", json!([0.9, "1"]), "mlp_multipliers"),
        ("qwen3-next", "mlp_only_layers", json!([1]), "mlp_only_layers"),
        ("qwen3-next", "decoder_sparse_step", json!(2), "decoder_sparse_step"),
        ("granite-hybrid", "mamba_n_groups", json!(0), "mamba_n_groups"),
        ("granite-hybrid", "mamba_n_heads", json!(7), "mamba_n_heads"),
        ("granite-hybrid", "mamba_n_heads", json!(0), "mamba_n_heads"),
        ("granite-hybrid", "mamba_d_state", json!(512), "mamba_d_state"),
        ("granite-hybrid", "mamba_d_conv", json!(9), "mamba_d_conv"),
        ("granite-hybrid", "mamba_expand", json!(u32::MAX), "mamba_n_heads"),
        ("granite-hybrid", "time_step_limit", json!([0.1, 1.0]), "time_step_limit"),
        ("ling2", "score_function", json!("softmax"), "score_function"),
        ("ling2", "score_function", Value::Null, "score_function"),
        ("ling2", "use_qk_norm", json!(false), "use_qk_norm"),
        ("ling2", "rotary_dim", json!(16), "rotary_dim"),
        ("ling3", "kda_safe_gate", json!(false), "kda_safe_gate"),
        ("ling3", "kda_lower_bound", json!(0), "kda_lower_bound"),
        ("ling3", "kda_lower_bound", json!(5), "kda_lower_bound"),
        ("ling3", "kda_lower_bound", Value::Null, "kda_lower_bound"),
        ("ling3", "no_kda_lora", json!(false), "no_kda_lora"),
        ("ling3", "use_mla_nope", json!(true), "use_mla_nope"),
        ("ling3", "layer_group_size", json!(3), "layer_group_size"),
        ("ling3", "layer_types", json!(["linear_attention", "full_attention"]), "layer_types"),
        ("ling3", "short_conv_kernel_size", json!(9), "short_conv_kernel_size"),
        ("ling3", "head_dim", json!(257), "kda.head_dim (linear_head_dim, head_dim)"),
        ("ling3", "num_key_value_heads", json!(2), "num_key_value_heads"),
        ("ling3", "linear_num_heads", json!(8), "linear_num_heads"),
        ("ling3", "topk_method", json!("greedy"), "topk_method"),
        ("ling3", "moe_router_enable_expert_bias", json!(false), "moe_router_enable_expert_bias"),
        (
            "ling3",
            "gated_attention_proj_granularity_type",
            json!("element_wise"),
            "gated_attention_proj_granularity_type",
        ),
        ("ling3", "moe_shared_expert_intermediate_size", json!(48), "moe_shared_expert_intermediate_size"),
        ("ling3", "expert_swiglu_limit_list", json!([null, 0, 7.0]), "per-layer SwiGLU limits (Ling 3.0 Flash)"),
        ("ling3", "share_expert_swiglu_limit_list", json!([0.0, 5]), "per-layer SwiGLU limits (Ling 3.0 Flash)"),
        ("ling3", "expert_swiglu_limit_list", json!(7.0), "expert_swiglu_limit_list"),
        // Defaults of implementations differ from other models' values.
        ("ling3", "routed_scaling_factor", Value::Null, "routed_scaling_factor is missing"),
        ("ling3", "n_group", Value::Null, "n_group is missing"),
        ("ling3", "topk_group", Value::Null, "topk_group is missing"),
        ("ling3", "rope_parameters", Value::Null, "rope_theta is missing"),
        ("ling3", "use_qk_norm", json!(false), "use_qk_norm"),
        ("ling3", "linear_silu", json!(false), "linear_silu"),
        ("ling3", "mtp_use_kda", json!(true), "mtp_use_kda"),
        ("ling3", "scoring_func", json!("softmax"), "scoring_func"),
        ("ling2", "scoring_func", json!("softmax"), "scoring_func"),
        ("ling2", "use_qk_norm", Value::Null, "use_qk_norm is missing as in Ling 1"),
        ("ling3", "kda_lower_bound", Value::Null, "Ling 2.5, with Lightning attention"),
        ("ling2", "model_type", json!("bailing_moe_linear"), "which needs Lightning attention"),
    ] {
        let Some(found) = changed(name, |config| config[key] = value.clone()) else { return };
        let error = found.err().unwrap_or_else(|| panic!("{name} with {key} {value} is taken")).to_string();
        assert!(error.contains(field), "{name} with {key} {value}: {error}");
    }
}

#[test]
fn ling3_without_limits_loads() {
    let Some(plain) = changed("ling3", |_| {}) else { return };
    let plain = plain.unwrap();
    for key in ["expert_swiglu_limit_list", "share_expert_swiglu_limit_list"] {
        for value in [Value::Null, json!([]), json!([0, 0.0, null, 0])] {
            let found = changed("ling3", |config| config[key] = value.clone()).unwrap();
            assert_eq!(found.unwrap_or_else(|e| panic!("{key} {value}: {e}")), plain);
        }
    }
    for key in ["bailingmoe3.swiglu_clamp_exp", "bailingmoe3.swiglu_clamp_shexp"] {
        for (last, is_taken) in [(0.0f32, true), (7.0, false)] {
            let (mut tiny, _) = copied("ling3", &[]);
            let limits: Vec<u8> = [0.0, 0.0, 0.0, last].iter().flat_map(|limit| limit.to_le_bytes()).collect();
            tiny.set(key, ARRAY, array(F32, 4, limits));
            match ModelFile::from_gguf_bytes(tiny.bytes()) {
                Ok(_) => assert!(is_taken, "{key} {last}"),
                Err(error) => {
                    assert!(!is_taken && error.to_string().contains("per-layer SwiGLU limits"), "{key}: {error}");
                    assert_eq!(error.code(), "unsupported");
                }
            }
        }
    }
}

/// Layers of both kinds have a projection of their output, called `o_proj` in one kind and `dense` in the other.
#[test]
fn two_tensors_with_one_gguf_name_are_refused() {
    let Some(plain) = checkpoint("ling3") else { return };
    for (name, other) in [
        ("model.layers.0.attention.o_proj.weight", "model.layers.0.attention.dense.weight"),
        ("model.layers.1.attention.dense.weight", "model.layers.1.attention.o_proj.weight"),
        ("model.layers.2.mlp.experts.3.up_proj.weight", "layers.2.mlp.experts.3.up_proj.weight"),
    ] {
        let mut twice = plain.clone();
        twice.tensors.insert(other.into(), twice.tensors[name].clone());
        let error = ModelFile::open(&twice.write().0).err().unwrap_or_else(|| panic!("{name} is taken twice"));
        assert_eq!(error.code(), "config");
        let error = error.to_string();
        assert!([name, other, "a duplicate"].iter().all(|part| error.contains(part)), "{error}");
    }
}

/// transformers 5 writes other names than the published files have, and the rotated part of a head as its size.
#[test]
fn ling3_config_of_transformers_loads_like_the_published_one() {
    let Some(published) = changed("ling3", |_| {}) else { return };
    let of_transformers = changed("ling3", |config| {
        let fields = config.as_object_mut().unwrap();
        for (published, written) in [
            ("max_position_embeddings", "model_max_length"),
            ("n_group", "num_expert_group"),
            ("norm_topk_prob", "moe_renormalize"),
            ("num_experts_per_tok", "num_experts_per_token"),
            ("head_dim", "linear_head_dim"),
        ] {
            let value = fields.remove(published).unwrap();
            fields.insert(written.into(), value);
        }
        let kinds = ["linear_attention", "full_attention"].repeat(2);
        fields.extend([
            ("head_dim".into(), json!(8)),
            ("layer_types".into(), json!(kinds)),
            ("linear_conv_kernel_dim".into(), json!(4)),
            ("linear_num_heads".into(), json!(4)),
            ("mlp_layer_types".into(), json!(["dense", "sparse", "sparse", "sparse"])),
        ]);
    });
    let (published, of_transformers) = (published.unwrap(), of_transformers.unwrap().unwrap());
    let read = |config: &ModelConfig| -> Vec<_> {
        // Attention of layers without any is not read.
        let attention = |block: &Block| block.attends().then(|| block.attention.clone());
        config.blocks.iter().map(|block| (block.recurrence, block.feed_forward.clone(), attention(block))).collect()
    };
    assert_eq!(read(&published), read(&of_transformers));
    assert_eq!(published.max_seq_len, of_transformers.max_seq_len);
}

#[test]
fn keys_of_ling3_in_gguf_are_checked() {
    let Some(path) = common::find_data(std::path::Path::new("tiny-random/ling3/model-bf16.gguf")) else { return };
    let whole = fs::read(path).unwrap();
    let (folder, zero) = (Folder::new(), [0; 4]);
    for (key, value) in [
        ("kda.head_dim", zero),
        ("kda.head_dim", 257_u32.to_le_bytes()),
        ("ssm.conv_kernel", zero),
        ("ssm.conv_kernel", 9_u32.to_le_bytes()),
        ("kda.gate_lower_bound", zero),
        ("kda.gate_lower_bound", 5_f32.to_le_bytes()),
        ("kda.gate_lower_bound", f32::NAN.to_le_bytes()),
        ("attention.kv_lora_rank", zero),
        ("attention.value_length_mla", zero),
        ("expert_shared_feed_forward_length", 48_u32.to_le_bytes()),
        ("expert_gating_func", 1_u32.to_le_bytes()),
        // A flag of one byte.
        ("kda.safe_gate", zero),
    ] {
        let name = format!("bailingmoe3.{key}");
        let at = whole.windows(name.len()).position(|found| found == name.as_bytes()).unwrap() + name.len() + 4;
        let len = if key.ends_with("safe_gate") { 1 } else { 4 };
        let mut bytes = whole.clone();
        bytes[at..at + len].copy_from_slice(&value[..len]);
        let error = ModelFile::open(folder.write("model.gguf", &bytes)).err();
        let error = error.unwrap_or_else(|| panic!("{key} {value:?} is taken"));
        let typed = |error: &Error| matches!(error, Error::Config { .. } | Error::Unsupported { .. });
        assert!(matches!(&error, Error::InFile { source, .. } if typed(source)) || typed(&error), "{error:?}");
        assert!(error.to_string().contains(key), "{key} {value:?}: {error}");
    }
}
