//! Folders of multimodal models, and unused tensors.

use serde_json::{Value, json};
use tilewright::load::ModelFile;
use tilewright::{Device, LoadOptions, Model};

use super::checkpoint::{Checkpoint, Stored, check_references, checkpoint, model};
use super::{Folder, TinyGguf, U32, common, logits};

/// An unused tensor.
fn other() -> Stored {
    Stored { dtype: "BF16".into(), shape: vec![4, 4], data: vec![0; 32] }
}

/// The same model as the text part of a multimodal one: `prefix` before its tensor names, its head named `head`, its
/// configuration nested in another.
fn wrapped(text: &Checkpoint, model_type: &str, [prefix, head]: [&str; 2], vision: &[&str]) -> Checkpoint {
    let mut whole = text.clone();
    whole.rename(|name| match name.strip_prefix("model.") {
        Some(rest) => format!("{prefix}{rest}"),
        None => format!("{head}{name}"),
    });
    for name in vision {
        whole.tensors.insert((*name).into(), other());
    }
    let mut text_config = text.config.clone();
    // Keys beside the parts apply to all.
    let tied = text_config.as_object_mut().unwrap().remove("tie_word_embeddings").unwrap_or(Value::Null);
    whole.config = json!({
        "architectures": ["ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": text_config,
        "vision_config": { "hidden_size": 32, "model_type": "vision", "num_hidden_layers": 2 },
        "image_token_id": 10,
        "tie_word_embeddings": tied,
    });
    whole
}

#[test]
fn text_part_of_a_multimodal_model_loads_as_a_model() {
    for (of, model_type, prefix, head, parts) in [
        (
            "ministral3",
            "mistral3",
            "language_model.model.",
            "language_model.",
            &["vision_tower.patch_conv.weight", "multi_modal_projector.norm.weight"][..],
        ),
        (
            "gemma3",
            "gemma3",
            "model.language_model.",
            "",
            &[
                "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
                "model.multi_modal_projector.mm_soft_emb_norm.weight",
            ],
        ),
        (
            "qwen35",
            "qwen3_5",
            "model.language_model.",
            "",
            &["model.visual.blocks.0.norm1.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight"],
        ),
        (
            "qwen35-moe",
            "qwen3_5_moe",
            "model.language_model.",
            "",
            &["model.visual.merger.norm.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"],
        ),
    ] {
        let Some(text) = checkpoint(of) else { return };
        let whole = wrapped(&text, model_type, [prefix, head], parts).write();
        let device = common::cpu();
        check_references(of, &device, &whole.0, model_type);
        let notices = device.take_notices();
        let names = |part: &str| notices.iter().filter(|notice| notice.ends_with(part)).count();
        let n_mtp = usize::from(parts.iter().any(|part| part.starts_with("mtp")));
        assert_eq!((names("vision"), names("multi-token prediction")), (1, n_mtp), "{model_type}: {notices:?}");
        assert_eq!(notices.len(), 1 + n_mtp, "{model_type}: {notices:?}");
    }
}

#[test]
fn text_part_of_a_config_is_checked_like_a_whole_one() {
    let Some(text) = checkpoint("qwen35") else { return };
    let whole = wrapped(&text, "qwen3_5", ["model.language_model.", ""], &[]);
    let refused = |named: &[&str], change: &dyn Fn(&mut Value)| {
        let mut changed = whole.clone();
        change(&mut changed.config);
        let error = ModelFile::open(&changed.write().0).err().unwrap_or_else(|| panic!("{named:?} is not refused"));
        assert!(named.iter().all(|name| error.to_string().contains(name)), "`{error}` does not name {named:?}");
    };
    refused(&["text_config", "an object"], &|config| config["text_config"] = json!([1]));
    refused(&["hidden_size", "missing"], &|config| {
        drop(config["text_config"].as_object_mut().unwrap().remove("hidden_size"))
    });
    refused(&["model_type", "`novel_text`"], &|config| config["text_config"]["model_type"] = json!("novel_text"));
    refused(&["attention_temperature"], &|config| config["text_config"]["attention_temperature"] = json!(0.5));
    refused(&["quantization_config"], &|config| config["quantization_config"] = json!({ "quant_method": "gptq" }));
}

/// Every tensor of a folder is either read or known to be unused.
#[test]
fn unused_tensors_of_a_folder_are_refused() {
    let refused = |of: &str, name: &str| {
        let Some(mut changed) = checkpoint(of) else { return };
        changed.tensors.insert(name.into(), other());
        let folder = changed.write();
        let error = match ModelFile::open(&folder.0) {
            Err(error) => error,
            Ok(file) => match Model::plan_file(&Device::cpu().target(), &file, &LoadOptions::default()) {
                Err(error) => error,
                Ok(_) => panic!("{of} with {name} is not refused"),
            },
        };
        assert!(error.to_string().contains(name) && error.to_string().contains("in the file"), "{error}");
    };
    for name in [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.mlp.gate_proj.weight_scale_inv",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.3.input_layernorm.weight",
        "model.embed_tokens_per_layer.weight",
        "model.norm.scale",
        "score.weight",
        "adapter.weight",
    ] {
        refused("llama3-rope", name);
    }
    refused("gpt2", "transformer.h.0.attn.c_attn.scale");
    refused("qwen35", "model.layers.0.linear_attn.in_proj_ba.weight");
    refused("gpt-oss", "model.layers.0.mlp.experts.1.down_proj.weight");
}

/// Buffers of old checkpoints, of any type.
#[test]
fn legacy_buffer_tensors_are_ignored() {
    let buffers: [(&str, &[&str]); 3] = [
        ("llama-mha-bias", &["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]),
        ("gpt2", &["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("gpt-neox", &["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"]),
    ];
    for (of, names) in buffers {
        let Some(mut changed) = checkpoint(of) else { return };
        for name in names {
            let buffer = Stored { dtype: "BOOL".into(), shape: vec![1, 1, 4, 4], data: vec![1; 16] };
            changed.tensors.insert((*name).into(), buffer);
        }
        let device = common::cpu();
        check_references(of, &device, &changed.write().0, of);
        assert_eq!(device.take_notices(), Vec::<String>::new(), "{of}");
    }
}

/// Extra layers for multi-token prediction, as counted in a `config.json`.
#[test]
fn mtp_layers_of_folders_are_skipped_with_a_notice() {
    let Some(mut changed) = checkpoint("qwen3-moe") else { return };
    changed.config["num_nextn_predict_layers"] = json!(1);
    for name in ["input_layernorm.weight", "mlp.experts.0.up_proj.weight"] {
        changed.tensors.insert(format!("model.layers.2.{name}"), other());
    }
    let device = common::cpu();
    let folder = changed.write();
    check_references("qwen3-moe", &device, &folder.0, "a layer more");
    assert!(device.take_notices().iter().any(|notice| notice.contains("multi-token prediction")));
    assert_eq!(model(&device, &folder).config().blocks.len(), 2);
}

/// The same in GGUF files, which include them in the number of layers.
#[test]
fn mtp_layers_of_gguf_files_are_skipped_with_a_notice() {
    let device = common::cpu();
    let want = logits(&TinyGguf::new().model(&device));
    let mut mtp = TinyGguf::new();
    mtp.set("llama.block_count", U32, 3_u32.to_le_bytes());
    mtp.set("llama.nextn_predict_layers", U32, 1_u32.to_le_bytes());
    for name in ["blk.2.attn_norm.weight", "blk.2.nextn.eh_proj.weight"] {
        mtp.put(name, &[32], 0, vec![0; 128]);
    }
    let model = mtp.model(&device);
    assert_eq!((model.config().blocks.len(), logits(&model)), (2, want));
    assert!(device.take_notices().iter().any(|notice| notice.contains("multi-token prediction")));
    for n in [3, 4, 1 << 31] {
        mtp.set("llama.nextn_predict_layers", U32, (n as u32).to_le_bytes());
        let error = ModelFile::from_gguf_bytes(mtp.bytes()).err().unwrap().to_string();
        assert!(error.contains("llama.nextn_predict_layers") && error.contains("fewer than the 3 layers"), "{error}");
    }
}

/// Gemma 3 4B's folder states only non-default values for its text part.
#[test]
fn omitted_config_keys_get_the_defaults_of_transformers() {
    let folder = Folder::new();
    let config = json!({
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" },
            "sliding_window": 1024,
        },
        "vision_config": { "hidden_size": 1152 },
    });
    folder.write("config.json", config.to_string());
    folder.write("model.safetensors", super::text("{}"));
    let file = ModelFile::open(&folder.0).unwrap_or_else(|e| panic!("{e}"));
    let config = file.header.shape.decoder().unwrap();
    assert_eq!((config.vocab_size, config.max_seq_len, config.norm_eps), (262_208, 131_072, 1e-6));
    assert_eq!((config.ropes[0].theta, config.n_layers()), (1e6, 34));
    let attention = &config.blocks[0].attention;
    assert_eq!((attention.n_heads, attention.n_kv_heads, attention.head_dim), (8, 4, 256));
    assert_eq!((attention.window, attention.scale), (Some(1024), 1.0 / 16.0));
    assert_eq!(config.blocks[5].attention.window, None);
}
