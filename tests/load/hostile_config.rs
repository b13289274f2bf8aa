//! Invalid configurations, made from those of all architectures by replacing one value at a time. Each is refused by
//! name before anything is allocated.

use std::fs;

use serde_json::{Value, json};
use tilewright::load::ModelFile;
use tilewright::{Device, Embedder, Error, LoadOptions, Model};

use super::checkpoint::{Checkpoint, checkpoint};
use super::{Folder, common};
use crate::allocator;

/// Names of the tiny random models, all of supported architectures.
fn models() -> Vec<String> {
    if common::data(&["tiny-random"]).is_none() {
        return Vec::new();
    }
    let mut names = Vec::new();
    for root in common::data_roots().iter().map(|root| root.join("tiny-random")).filter(|root| root.is_dir()) {
        let folders = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
        names.extend(
            folders
                .filter(|folder| folder.join("config.json").exists())
                .filter_map(|folder| Some(folder.file_name()?.to_str()?.to_owned())),
        );
    }
    names.sort();
    names.dedup();
    names.retain(|name| open(&checkpoint(name).unwrap().write()).is_ok());
    names
}

/// Opens a folder and plans its memory: everything before the first device allocation.
fn open(folder: &Folder) -> Result<(), Error> {
    plan(ModelFile::open(&folder.0)?)
}

fn plan(file: ModelFile) -> Result<(), Error> {
    let device = Device::cpu();
    match file.header.shape.decoder() {
        Ok(_) => Model::plan_file(&device.target(), &file, &LoadOptions::default()).map(drop),
        Err(_) => Embedder::plan_file(&device, file).map(drop),
    }
}

/// Integers that are sizes or counts: never 0 or 2^31.
const COUNTS: [&str; 34] = [
    "hidden_size",
    "n_embd",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "n_positions",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "sliding_window",
    "local_attention",
    "conv_L_cache",
    "linear_conv_kernel_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "num_experts",
    "num_local_experts",
    "global_attn_every_n_layers",
    "query_pre_attn_scalar",
    "kv_lora_rank",
    "layer_group_size",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "short_conv_kernel_size",
    "v_head_dim",
];

/// Scale factors, and offsets of non-negative numbers.
const SCALES: [&str; 14] = [
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "rope_theta",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "attention_multiplier",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "routed_scaling_factor",
    "partial_rotary_factor",
    "rotary_pct",
];

/// Counts valid at an extreme: a window of all positions; 0 for an omitted feature.
fn is_harmless(model: &str, key: &str, value: &Value) -> bool {
    let is_huge = *value != json!(0);
    match key {
        // A window beyond the context has no effect, and some configurations have an unused one.
        "sliding_window" | "local_attention" => is_huge || model.starts_with("qwen") || model == "smollm3",
        // A period longer than the model.
        "global_attn_every_n_layers" => is_huge,
        // The attention scale is its inverse square root.
        "query_pre_attn_scalar" => is_huge,
        // With experts only, the width of dense feed-forwards is unused.
        "intermediate_size" => ["qwen3-moe", "qwen35-moe", "qwen3-next", "nemotron-h-moe"].contains(&model),
        // Published dense models state the experts of others.
        "num_experts_per_tok" | "moe_intermediate_size" => model == "nemotron-h",
        _ => false,
    }
}

fn refused(model: &str, what: &str, names: &[&str], changed: &Checkpoint) {
    let folder = changed.write();
    let before = common::cpu().counters();
    let (result, peak) = allocator::peak_bytes(|| open(&folder));
    let Err(error) = result else { panic!("{model} with {what} is not refused") };
    assert_eq!(common::cpu().counters() - before, Default::default(), "{model} with {what}: `{error}`");
    assert!(peak < 4 << 20, "{model} with {what}: {peak} bytes held for `{error}`");
    let typed = |e: &Error| matches!(e, Error::Config { .. } | Error::Unsupported { .. } | Error::Format { .. });
    let is_typed = matches!(&error, Error::InFile { source, .. } if typed(source)) || typed(&error);
    assert!(is_typed, "{model} with {what}: {error:?}");
    for name in names {
        assert!(error.to_string().contains(name), "{model} with {what}: `{error}` does not name `{name}`");
    }
}

#[test]
fn every_key_of_every_architecture_is_checked() {
    let mut n = 0;
    for name in models() {
        let whole = checkpoint(&name).unwrap();
        // A configuration alone suffices for a refusal, and is refused sooner without weights.
        let fields = whole.config.as_object().unwrap();
        let with = |key: &str, value: &Value| {
            let mut changed = whole.clone();
            changed.config[key] = value.clone();
            changed
        };
        for key in COUNTS.into_iter().filter(|key| fields.get(*key).is_some_and(Value::is_number)) {
            for value in [json!(-1), json!(1.5), json!("8"), json!([8]), json!({}), json!(true), json!(1_u64 << 63)] {
                // Some models have a number here.
                if key == "query_pre_attn_scalar" && (value.is_number()) {
                    continue;
                }
                refused(&name, &format!("{key} {value}"), &[key], &with(key, &value));
                n += 1;
            }
            for value in [json!(0), json!(1_u64 << 31), json!(u32::MAX)] {
                if !is_harmless(&name, key, &value) {
                    refused(&name, &format!("{key} {value}"), &[], &with(key, &value));
                    n += 1;
                }
            }
        }
        for key in SCALES.into_iter().filter(|key| fields.get(*key).is_some_and(Value::is_number)) {
            for value in [json!(-1.0), json!("1"), json!([1.0]), json!(1e39)] {
                refused(&name, &format!("{key} {value}"), &[key], &with(key, &value));
                n += 1;
            }
            if !key.ends_with("eps") && !key.ends_with("epsilon") && key != "routed_scaling_factor" {
                refused(&name, &format!("{key} 0"), &[], &with(key, &json!(0.0)));
                n += 1;
            }
        }
        if let Some(listed) = fields.get("layer_types").and_then(Value::as_array) {
            let mut lists = vec![listed[1..].to_vec(), [&listed[..], &listed[..1]].concat(), listed.clone()];
            lists[2][0] = json!("chunked_attention");
            for list in lists {
                refused(&name, "other layer_types", &["layer_types"], &with("layer_types", &json!(list)));
                n += 1;
            }
            refused(&name, "layer_types 5", &["layer_types"], &with("layer_types", &json!(5)));
        }
        if let Some(rope) = fields.get("rope_parameters").or(fields.get("rope_scaling")).and_then(Value::as_object) {
            let object = if fields.contains_key("rope_parameters") { "rope_parameters" } else { "rope_scaling" };
            for (key, value) in rope.iter().filter(|(_, value)| value.is_number()) {
                // Stated twice, or disabled by 0.
                if ["mscale", "mscale_all_dim", "llama_4_scaling_beta", "max_position_embeddings"]
                    .contains(&key.as_str())
                {
                    continue;
                }
                for wrong in [json!(-1.0), json!("1"), json!([1.0]), json!(1e39)] {
                    let mut changed = whole.clone();
                    changed.config[object][key] = wrong.clone();
                    refused(&name, &format!("{object}.{key} {wrong} for {value}"), &[key], &changed);
                    n += 1;
                }
            }
        }
    }
    println!("{n} configurations refused");
}

/// Valid numbers that contradict each other.
#[test]
fn inconsistent_config_numbers_are_refused() {
    for (model, key, value, named) in [
        ("qwen3-moe", "num_experts_per_tok", json!(7), "expert_used_count"),
        ("mixtral", "num_experts_per_tok", json!(5), "expert_used_count"),
        ("mixtral", "num_local_experts", json!(1025), "expert_count"),
        ("qwen35", "linear_num_value_heads", json!(3), "ssm.time_step_rank"),
        ("qwen35", "linear_key_head_dim", json!(257), "ssm.state_size"),
        ("qwen35", "linear_conv_kernel_dim", json!(9), "ssm.conv_kernel"),
        ("lfm2", "conv_L_cache", json!(1 << 20), "shortconv.l_cache"),
        ("qwen3", "num_key_value_heads", json!(3), "attention.head_count_kv"),
        ("qwen3", "head_dim", json!(26), "attention.key_length"),
        ("gpt-neox", "rotary_pct", json!(0.07), "rope.dimension_count"),
        ("gpt-neox", "rotary_pct", json!(3.0), "rope.dimension_count"),
        ("gpt2", "n_head", json!(5), "n_head"),
    ] {
        let Some(mut changed) = checkpoint(model) else { return };
        changed.config[key] = value.clone();
        refused(model, &format!("{key} {value}"), &[named], &changed);
    }
}

/// A key of a GGUF file with a four-byte value: its name, the value's offset, and whether it is a float.
struct Number {
    name: String,
    at: usize,
    is_float: bool,
}

/// Numeric keys of the architecture, by GGUF's layout alone.
fn numbers(bytes: &[u8]) -> Vec<Number> {
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let size_of = |kind: u32| match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        _ => 8,
    };
    let (n, mut at) = (u64_at(16), 24);
    let mut numbers = Vec::new();
    for _ in 0..n {
        let len = u64_at(at);
        let name = String::from_utf8(bytes[at + 8..at + 8 + len].to_vec()).unwrap();
        at += 8 + len;
        let kind = u32_at(at);
        at += 4;
        match kind {
            8 => at += 8 + u64_at(at),
            9 => {
                let (of, count) = (u32_at(at), u64_at(at + 4));
                at += 12;
                match of {
                    8 => (0..count).for_each(|_| at += 8 + u64_at(at)),
                    of => at += count * size_of(of),
                }
            }
            kind => {
                let is_own = !["general.", "tokenizer.", "split."].iter().any(|begin| name.starts_with(begin));
                if is_own && matches!(kind, 4 | 6) {
                    numbers.push(Number { name, at, is_float: kind == 6 });
                }
                at += size_of(kind);
            }
        }
    }
    numbers
}

#[test]
fn every_number_of_a_gguf_file_is_checked() {
    let (mut n, folder) = (0, Folder::new());
    for model in models() {
        let Some(path) = common::find_data(&std::path::Path::new("tiny-random").join(&model).join("model-f16.gguf"))
        else {
            continue;
        };
        let whole = fs::read(path).unwrap();
        for Number { name, at, is_float } in numbers(&whole) {
            // Duplicates the embedding's rows; unused here; a window may exceed the context.
            if [".vocab_size", ".attention.causal", ".pooling_type"].iter().any(|end| name.ends_with(end)) {
                continue;
            }
            let values: Vec<[u8; 4]> = match is_float {
                true => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0].map(f32::to_le_bytes).to_vec(),
                false => [0, 1 << 31, u32::MAX].map(u32::to_le_bytes).to_vec(),
            };
            for value in values {
                let far = name.ends_with("sliding_window") && value != [0; 4];
                // Some files write 0 for none.
                let none = value == [0; 4]
                    && ["token_type_count", "expert_count", "expert_used_count"].iter().any(|end| name.ends_with(end));
                if far || none {
                    continue;
                }
                let mut bytes = whole.clone();
                bytes[at..at + 4].copy_from_slice(&value);
                let path = folder.write("model.gguf", &bytes);
                let Err(error) = ModelFile::open(&path).and_then(plan) else {
                    panic!("{model}: {name} {value:?} is not refused")
                };
                let text = error.to_string();
                let typed = |error: &Error| matches!(error, Error::Config { .. } | Error::Unsupported { .. });
                let is_typed = matches!(&error, Error::InFile { source, .. } if typed(source)) || typed(&error);
                assert!(is_typed, "{model}: {name} {value:?}: {error:?}");
                let key = name.rsplit('.').next().unwrap();
                assert!(
                    text.contains(key) || text.contains("blk.") || text.contains("embd"),
                    "{model}: {name} {value:?}: `{text}`"
                );
                n += 1;
            }
        }
    }
    println!("{n} files refused");
}
