//! The tiny random models of `tests/data/encoders`, with a NumPy forward pass in float64 as reference: cross-encoders,
//! ModernBERT, Qwen3 as an encoder, Nomic's BERT; as folders and as GGUF files.

use std::path::PathBuf;

use serde_json::{Value, json};
use tilewright::bench::embed::{EmbedCase, EmbedParts};
use tilewright::bench::{self, Probes};
use tilewright::embed::Tokens;
use tilewright::kernels::Pooling;
use tilewright::load::ModelFile;
#[cfg(feature = "tokenizer-json")]
use tilewright::tokenizer::{Tokenizer, TokenizerConfig};
use tilewright::{Device, EmbedOptions, Embedder, Error, RerankOptions, Reranker, Tier};

use super::{cosine_distance, fed, in_pieces, names};
use crate::common::shared::{self, executors};
use crate::common::{self, References, Rng, block_on, largest_difference};

/// The path of a folder, or of a file in it.
fn folder(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/encoders")).join(name)
}

/// The cases of a folder, or of a file's folder.
fn cases(path: &str, kind: &str) -> Vec<Value> {
    let name = path.split('/').next().unwrap();
    let cases: Value = serde_json::from_slice(&std::fs::read(folder(name).join("cases.json")).unwrap()).unwrap();
    cases[kind].as_array().unwrap().clone()
}

fn text<'a>(case: &'a Value, key: &str) -> &'a str {
    case[key].as_str().unwrap()
}

fn ids(case: &Value) -> Vec<u32> {
    case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn reranker(device: &Device, name: &str, options: RerankOptions<'_>) -> Reranker {
    Reranker::load(device, folder(name), options).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn embedder(device: &Device, path: &str, options: EmbedOptions<'_>) -> Embedder {
    Embedder::load(device, folder(path), options).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The CPU, and the adapter in each tier.
fn devices() -> Vec<Device> {
    let tiers = [Tier::Baseline, Tier::F16, Tier::Subgroups, Tier::Scalar];
    std::iter::once(common::cpu()).chain(shared::gpus_beside_cpu(tiers)).collect()
}

#[test]
fn rerankers_match_their_references() {
    for device in devices() {
        // That tier rounds operands of products to 11 bits.
        let tolerance = if device.tier() == Tier::F16 { 2e-2 } else { 2e-5 };
        let files = [
            ("bert-reranker", false),
            ("roberta-reranker", true),
            ("roberta-reranker/model.gguf", true),
            ("gte", true),
            ("modernbert-reranker", true),
            ("modernbert-reranker/model.gguf", true),
            ("modernbert-bpe", true),
            ("modernbert-bpe/reranker.gguf", true),
        ];
        for (name, sigmoid) in common::drawn_on(&device, 3, files) {
            let cases = cases(name, "pairs");
            let pairs: Vec<_> = cases.iter().map(|case| (text(case, "a"), text(case, "b"))).collect();
            let model = reranker(&device, name, RerankOptions::default());
            assert_eq!(model.has_sigmoid(), sigmoid, "{name}");
            let other = reranker(&device, name, RerankOptions { sigmoid: Some(!sigmoid), ..RerankOptions::default() });
            let (own, other) =
                (block_on(model.score_pairs(&pairs)).unwrap(), block_on(other.score_pairs(&pairs)).unwrap());
            let mut worst = 0.0f64;
            for (i, case) in cases.iter().enumerate() {
                assert_eq!(model.encode(pairs[i].0, pairs[i].1).unwrap().ids, ids(case), "{name}: pair {i}");
                let (logit, score) = (case["logit"].as_f64().unwrap(), case["score"].as_f64().unwrap());
                let of_other = if sigmoid { logit } else { 1.0 / (1.0 + (-logit).exp()) };
                for (found, want) in [(own[i], score), (other[i], of_other)] {
                    worst = worst.max((f64::from(found) - want).abs() / (1.0 + want.abs()));
                }
            }
            println!("{name} on {}, {}: {worst:.1e}", device.info().name, device.tier().name());
            assert!(worst <= tolerance, "{name}: {worst:.1e}");
        }
        common::assert_tested(&device);
    }
}

#[test]
fn stale_buffer_contents_do_not_change_vectors() {
    let mut rng = Rng::new(3);
    let texts: Vec<Tokens> =
        [3, 1, 9, 2].map(|len| Tokens::from((0..len).map(|_| rng.below(30) as u32).collect::<Vec<_>>())).to_vec();
    for device in common::gpus(Tier::ALL) {
        for name in ["qwen3-embedding", "nomic", "modernbert-bpe"] {
            let vectors = || {
                let model = embedder(&device, name, EmbedOptions::default());
                block_on(model.embed_tokens(&texts)).unwrap()
            };
            let want = vectors();
            // Ids far beyond the vocabulary, NaN as floats.
            common::poison_pool(&device, u32::MAX);
            assert_eq!(vectors(), want, "{name} in tier {}", device.tier().name());
        }
    }
}

#[test]
fn encoders_match_their_references() {
    for device in devices() {
        let tolerance = if device.tier() == Tier::F16 { 1e-3 } else { 1e-9 };
        for (name, pooling) in [
            ("qwen3-embedding", Pooling::Last),
            ("nomic", Pooling::Mean),
            ("modernbert-bpe", Pooling::Cls),
            ("mpnet", Pooling::Mean),
            ("nomic-moe", Pooling::Mean),
            ("gte", Pooling::Cls),
            ("eurobert", Pooling::Mean),
            ("t5", Pooling::Mean),
            ("t5-gated", Pooling::Mean),
        ] {
            let cases = cases(name, "texts");
            let plain = embedder(&device, name, EmbedOptions::default());
            assert_eq!((plain.pooling(), plain.normalizes(), plain.prompt()), (pooling, true, ""), "{name}");
            let mut worst = 0.0f64;
            let prompts = plain.prompts().keys().map(|name| Some(name.as_str()));
            for prompt in [None].into_iter().chain(prompts) {
                let model = plain.with_prompt(prompt).unwrap();
                let cases: Vec<&Value> = cases.iter().filter(|case| case["prompt"].as_str() == prompt).collect();
                let texts: Vec<&str> = cases.iter().map(|case| text(case, "text")).collect();
                let vectors = block_on(model.embed(&texts)).unwrap();
                for (case, vector) in cases.iter().zip(vectors.chunks_exact(model.dims() as usize)) {
                    assert_eq!(model.encode(text(case, "text")).unwrap().ids, ids(case), "{name}: {case}");
                    worst = worst.max(cosine_distance(vector, &vector_of(case)));
                }
            }
            println!("{name} on {}, {}: {worst:.1e}", device.info().name, device.tier().name());
            assert!(worst <= tolerance, "{name}: {worst:.1e}");
        }
    }
}

#[test]
fn tasks_adapters_match_their_references() {
    for device in devices() {
        let tolerance = if device.tier() == Tier::F16 { 1e-3 } else { 1e-9 };
        for (name, pooling, usual) in [
            ("jina3", Pooling::Mean, None),
            ("jina5-small", Pooling::Last, Some("retrieval")),
            ("jina5-nano", Pooling::Last, Some("retrieval")),
        ] {
            let cases = cases(name, "texts");
            let mut tasks: Vec<Option<&str>> = cases.iter().map(|case| case["task"].as_str()).collect();
            tasks.dedup();
            assert!(tasks.contains(&usual) && tasks.len() > 1, "{name}: {tasks:?}");
            let mut worst = 0.0f64;
            for task in tasks {
                // The usual task needs no name.
                let task_named = task.filter(|task| Some(*task) != usual).map(str::to_owned);
                let plain = embedder(&device, name, EmbedOptions { task: task_named, ..EmbedOptions::default() });
                assert_eq!((plain.pooling(), plain.normalizes()), (pooling, true), "{name}");
                let prompt = task.and_then(|task| plain.prompts().get(task)).map_or("", String::as_str);
                assert_eq!(plain.prompt(), prompt, "{name}");
                for case in cases.iter().filter(|case| case["task"].as_str() == task) {
                    let model = plain.with_prompt(case["prompt"].as_str()).unwrap();
                    assert_eq!(model.encode(text(case, "text")).unwrap().ids, ids(case), "{name}: {case}");
                    let vector = block_on(model.embed(&[text(case, "text")])).unwrap();
                    worst = worst.max(cosine_distance(&vector, &vector_of(case)));
                }
            }
            println!("{name} on {}, {}: {worst:.1e}", device.info().name, device.tier().name());
            assert!(worst <= tolerance, "{name}: {worst:.1e}");
        }
        // Files of one task or none.
        for (path, task) in
            [("jina3-port", None), ("jina3/model.gguf", None), ("jina5-nano/model.gguf", Some("text-matching"))]
        {
            let model = embedder(&device, path, EmbedOptions::default());
            let of = if path == "jina3-port" { "jina3" } else { path };
            for case in cases(of, "texts").iter().filter(|case| case["task"].as_str() == task) {
                let vector = block_on(model.embed_tokens(&[Tokens::from(ids(case))])).unwrap();
                let distance = cosine_distance(&vector, &vector_of(case));
                assert!(distance <= tolerance, "{path} on {}: {distance:.1e}", device.info().name);
            }
        }
    }
}

#[test]
fn t5_with_its_decoder_is_refused() {
    let device = common::cpu();
    let load = |from: &str, to: &str| {
        let mut files = files("t5-gated");
        let config = String::from_utf8(files[0].1.clone()).unwrap();
        assert!(config.contains(from), "{config}");
        files[0].1 = config.replace(from, to).into_bytes();
        in_pieces(&device, &files, 5000).err().unwrap()
    };
    for (from, to, named) in [
        ("T5EncoderModel", "T5ForConditionalGeneration", "whose decoder attends to an encoder"),
        ("gated-gelu", "gated-relu", "feed_forward_proj"),
        (r#""d_kv": 12"#, r#""d_kv": 0"#, "d_kv"),
        (r#""relative_attention_num_buckets": 32"#, r#""relative_attention_num_buckets": 6"#, "num_buckets"),
    ] {
        let error = load(from, to);
        assert!(["unsupported", "config"].contains(&error.code()) && error.to_string().contains(named), "{error}");
    }
}

#[test]
fn unknown_tasks_and_missing_adapters_are_refused() {
    let device = common::cpu();
    let load = |path: PathBuf, task: Option<&str>| {
        let options = EmbedOptions { task: task.map(str::to_owned), ..EmbedOptions::default() };
        Embedder::load(&device, path, options).err().unwrap()
    };
    for (path, task, named) in [
        ("jina3", "separation", "task is `separation`, expected retrieval.query, retrieval.passage, text-matching"),
        ("jina5-nano", "clustering", "task is `clustering`, expected retrieval, text-matching"),
        ("mpnet", "retrieval", "task is `retrieval`, expected none: the model has no tasks"),
        ("jina5-nano/model.gguf", "retrieval", "expected none: the model has no tasks"),
    ] {
        let error = load(folder(path), Some(task)).to_string();
        assert!(error.contains(named), "{error}");
    }
    // Factors of another number of tasks, or with another rank.
    for (from, to, named) in [
        (r#""retrieval.passage","#, "", "factors of 2 tasks"),
        (r#""lora_adaptations""#, r#""lora_adaptatjons""#, "lora_"),
        // A key that is not read.
        (r#""lora_adaptations""#, r#""_lora_adaptations""#, "lora_adaptations is missing"),
    ] {
        let mut files = files("jina3");
        let config = String::from_utf8(files[0].1.clone()).unwrap();
        assert!(config.contains(from), "{config}");
        files[0].1 = config.replacen(from, to, 1).into_bytes();
        let copied = std::env::temp_dir().join(format!("tilewright-factors-{}", std::process::id()));
        std::fs::create_dir_all(copied.join("1_Pooling")).unwrap();
        files.iter().for_each(|(name, bytes)| std::fs::write(copied.join(name), bytes).unwrap());
        let error = load(copied, Some("retrieval.query")).to_string();
        assert!(error.contains(named), "{error}");
    }
    // A matrix's factors twice, once without a prefix.
    let mut stacked = files("jina3");
    let (_, weights) = stacked.iter_mut().find(|(name, _)| name == "model.safetensors").unwrap();
    let names = ["A", "B"].map(|part| format!("roberta.encoder.layers.0.mixer.Wqkv{FACTOR}{part}"));
    *weights = twice(weights, &names, ["roberta.encoder", "encoder"]);
    let copied = std::env::temp_dir().join(format!("tilewright-factors-{}", std::process::id()));
    stacked.iter().for_each(|(name, bytes)| std::fs::write(copied.join(name), bytes).unwrap());
    let error = load(copied, Some("retrieval.query"));
    assert!(error.code() == "adapter" && error.to_string().contains("a duplicate"), "{error}");
    // Weights alone are those of no model, but have a plan.
    let file = ModelFile::open(folder("jina5-nano")).unwrap();
    assert!(Embedder::plan_file(&device, file).unwrap().total_bytes() > 0);
    let error = Embedder::from_file(&device, ModelFile::open(folder("jina5-nano")).unwrap(), EmbedOptions::default());
    assert!(error.err().unwrap().to_string().contains("adapters"));
    let files: Vec<_> = files("jina5-nano");
    let error = in_pieces(&device, &files, 5000).err().unwrap();
    assert!(error.code() == "unsupported" && error.to_string().contains("adapters"), "{error}");
    let copied = std::env::temp_dir().join(format!("tilewright-tasks-{}", std::process::id()));
    std::fs::create_dir_all(&copied).unwrap();
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(folder("jina5-nano").join(file), copied.join(file)).unwrap();
    }
    let error = load(copied.clone(), None).to_string();
    assert!(error.contains("adapters/retrieval"), "{error}");
    // Names that are not those of a folder in the folder of adapters.
    let config = std::fs::read_to_string(copied.join("config.json")).unwrap();
    for name in ["", ".", "..", "../adapters/retrieval", "/etc", r"a\\b", "C:", "retrieval.", "retrieval "] {
        let changed = config.replacen(r#""retrieval""#, &format!(r#""{name}""#), 1);
        assert_ne!(changed, config);
        std::fs::write(copied.join("config.json"), changed).unwrap();
        let error = load(copied.clone(), None);
        assert!(error.code() == "config" && error.to_string().contains("task_names"), "{name}: {error}");
    }
    std::fs::write(copied.join("config.json"), config).unwrap();
    let to = copied.join("adapters/retrieval");
    // A matrix twice, once with a prefix.
    std::fs::create_dir_all(&to).unwrap();
    let source = folder("jina5-nano/adapters/retrieval");
    std::fs::copy(source.join("adapter_config.json"), to.join("adapter_config.json")).unwrap();
    let adapter = std::fs::read(source.join("adapter_model.safetensors")).unwrap();
    let names = ["A", "B"].map(|part| format!("base_model.model.layers.0.mlp.down_proj.lora_{part}.weight"));
    let adapter = twice(&adapter, &names, ["model.layers", "model.model.layers"]);
    std::fs::write(to.join("adapter_model.safetensors"), adapter).unwrap();
    let error = load(copied.clone(), None);
    assert!(error.code() == "adapter" && error.to_string().contains("a duplicate"), "{error}");
    // The other model's adapter.
    std::fs::create_dir_all(&to).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(folder("jina5-small/adapters/retrieval").join(file), to.join(file)).unwrap();
    }
    let error = load(copied, None);
    assert!(error.code() == "adapter" && error.to_string().contains("shape"), "{error}");
}

/// Where factors of all tasks are.
const FACTOR: &str = ".parametrizations.weight.0.lora_";

/// The file with these tensors once more, under names with another part.
fn twice(bytes: &[u8], names: &[String], [from, to]: [&str; 2]) -> Vec<u8> {
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let mut data = bytes[8 + len..].to_vec();
    for name in names {
        let mut entry = header[name].clone();
        let [begin, end] = [0, 1].map(|i| entry["data_offsets"][i].as_u64().unwrap() as usize);
        entry["data_offsets"] = json!([data.len(), data.len() + end - begin]);
        data.extend_from_within(begin..end);
        header[name.replace(from, to)] = entry;
    }
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

fn vector_of(case: &Value) -> Vec<f32> {
    case["vector"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

#[test]
fn all_nomic_file_formats_give_equal_vectors() {
    let cases: Vec<Value> = cases("nomic", "texts");
    let texts: Vec<Tokens> = cases.iter().map(|case| Tokens::from(ids(case))).collect();
    for device in executors() {
        for path in ["nomic", "nomic-v5", "nomic/model.gguf"] {
            let model = embedder(&device, path, EmbedOptions::default());
            assert_eq!((model.config().max_seq_len, model.pooling()), (48, Pooling::Mean), "{path}");
            let vectors = block_on(model.embed_tokens(&texts)).unwrap();
            for (case, vector) in cases.iter().zip(vectors.chunks_exact(24)) {
                let distance = cosine_distance(vector, &vector_of(case));
                assert!(distance <= 1e-9, "{path}: {distance:.1e}");
            }
        }
    }
}

/// GGUF files lack the bias of the sum of experts.
#[test]
fn nomic_experts_in_gguf_match_their_references() {
    let cases: Vec<Value> = cases("nomic-moe", "gguf");
    let texts: Vec<&str> = cases.iter().map(|case| text(case, "text")).collect();
    for device in executors() {
        let model = embedder(&device, "nomic-moe/model.gguf", EmbedOptions::default());
        let vectors = block_on(model.embed(&texts)).unwrap();
        for (case, vector) in cases.iter().zip(vectors.chunks_exact(24)) {
            let distance = cosine_distance(vector, &vector_of(case));
            assert!(distance <= 1e-9, "{case}: {distance:.1e}");
        }
    }
}

/// GGUF files contain everything except prompts.
#[test]
fn gguf_encoders_match_their_safetensors_folders() {
    for device in executors() {
        for (name, pooling) in
            [("qwen3-embedding", Pooling::Last), ("modernbert-bpe", Pooling::Cls), ("t5-gated", Pooling::Mean)]
        {
            let of_folder = embedder(&device, name, EmbedOptions::default());
            let of_file = embedder(&device, &format!("{name}/model.gguf"), EmbedOptions::default());
            assert_eq!((of_file.pooling(), of_file.normalizes()), (pooling, true), "{name}");
            assert_eq!((of_file.max_tokens(), of_file.prompts().len()), (of_folder.max_tokens(), 0), "{name}");
            let cases = cases(name, "texts");
            let prompted = |case: &Value| {
                let prompt = case["prompt"].as_str().map_or("", |name| of_folder.prompts()[name].as_str());
                format!("{prompt}{}", text(case, "text"))
            };
            let texts: Vec<String> = cases.iter().map(prompted).collect();
            let vectors = block_on(of_file.embed(&texts)).unwrap();
            assert_eq!(vectors, block_on(of_folder.embed(&texts)).unwrap(), "{name}");
            for ((case, text), vector) in cases.iter().zip(&texts).zip(vectors.chunks_exact(of_file.dims() as usize)) {
                assert_eq!(of_file.encode(text).unwrap().ids, ids(case), "{name}: {case}");
                let distance = cosine_distance(vector, &vector_of(case));
                assert!(distance <= 1e-9, "{name}: {distance:.1e}");
            }
        }
        // A converted cross-encoder loads as an encoder on request.
        let options = || EmbedOptions { pooling: Some(Pooling::Mean), ..EmbedOptions::default() };
        let texts = ["what is tax law", "", "the quiet engine ran"];
        for [file, name] in
            [["bert-reranker/model.gguf", "bert-reranker"], ["modernbert-bpe/reranker.gguf", "modernbert-bpe"]]
        {
            let [file, folder] = [file, name].map(|path| block_on(embedder(&device, path, options()).embed(&texts)));
            assert_eq!(file.unwrap(), folder.unwrap(), "{name}");
        }
    }
}

/// Offset of a key's value, after its type, in a GGUF file.
fn value_of(file: &[u8], key: &str) -> usize {
    let named = [&(key.len() as u64).to_le_bytes()[..], key.as_bytes()].concat();
    let at = file.windows(named.len()).position(|window| window == named);
    at.unwrap_or_else(|| panic!("no {key}")) + named.len() + 4
}

#[test]
fn unsupported_gguf_encoders_are_refused_by_key() {
    enum Change {
        /// Replaces a key or tensor name by another one of equal length.
        Rename(&'static str),
        Number(u32),
        Text(&'static str),
        Retype,
    }
    use Change::{Number, Rename, Retype, Text};
    let device = common::cpu();
    let [modern, pairs, qwen] =
        ["modernbert-bpe/model.gguf", "modernbert-bpe/reranker.gguf", "qwen3-embedding/model.gguf"];
    let [other, roberta] = ["modernbert-reranker/model.gguf", "roberta-reranker/model.gguf"];
    for (path, key, change, code, named) in [
        (modern, "modern-bert.context_length", Rename("modern-bert.context_lengtX"), "config", "context_length"),
        (modern, "modern-bert.rope.freq_base", Rename("modern-bert.rope.freq_basX"), "config", "rope.freq_base"),
        (modern, "modern-bert.rope.freq_base_swa", Number(0), "config", "rope.freq_base"),
        (modern, "modern-bert.block_count", Rename("modern-bert.block_counX"), "config", "modern-bert.block_count"),
        (
            modern,
            "modern-bert.attention.layer_norm_epsilon",
            Rename("modern-bert.attention.layer_norm_epsiloX"),
            "config",
            "modern-bert.attention.layer_norm_epsilon",
        ),
        (modern, "modern-bert.attention.head_count", Number(3), "config", "modern-bert.attention.head_count"),
        (modern, "modern-bert.attention.sliding_window", Retype, "format", "modern-bert.attention.sliding_window"),
        (
            other,
            "modern-bert.attention.sliding_window_pattern",
            Number(0),
            "config",
            "attention.sliding_window_pattern",
        ),
        (modern, "modern-bert.hidden_activation", Text("relu"), "unsupported", "modern-bert.hidden_activation"),
        (modern, "modern-bert.pooling_type", Number(5), "unsupported", "modern-bert.pooling_type"),
        (modern, "modern-bert.pooling_type", Number(4), "config", "cls.output.weight"),
        (modern, "blk.1.attn_norm.weight", Rename("blk.0.attn_norm.weight"), "config", "blk.1.attn_norm.weight"),
        (modern, "token_embd_norm.weight", Rename("token_embd_norm.weighX"), "config", "token_embd_norm.weight"),
        (pairs, "modern-bert.classifier.pooling_type", Number(3), "unsupported", "modern-bert.classifier.pooling_type"),
        (roberta, "token_types.weight", Rename("token_typeX.weight"), "unsupported", "token_types.weight"),
        (roberta, "position_embd.weight", Rename("position_embX.weight"), "config", "position_embd.weight"),
        (qwen, "qwen3.pooling_type", Number(4), "config", "qwen3.classifier.output_labels"),
        (qwen, "qwen3.pooling_type", Number(5), "unsupported", "qwen3.pooling_type"),
        (qwen, "qwen3.pooling_type", Rename("qwen3.pooling_typX"), "unsupported", "qwen3.pooling_typX"),
        (qwen, "qwen3.attention.head_count_kv", Number(3), "config", "attention.head_count_kv"),
        (qwen, "qwen3.context_length", Rename("qwen3.context_lengtX"), "config", "qwen3.context_length"),
        (
            qwen,
            "qwen3.attention.layer_norm_rms_epsilon",
            Rename("qwen3.attention.layer_norm_rms_epsiloX"),
            "config",
            "qwen3.attention.layer_norm_rms_epsilon",
        ),
        (qwen, "blk.1.attn_q_norm.weight", Rename("blk.1.attn_X_norm.weight"), "config", "blk.1.attn_q_norm.weight"),
    ] {
        let mut file = std::fs::read(folder(path)).unwrap();
        let at = value_of(&file, key);
        match change {
            Rename(name) => file[at - 4 - key.len()..at - 4].copy_from_slice(name.as_bytes()),
            Number(number) => file[at..at + 4].copy_from_slice(&number.to_le_bytes()),
            Text(text) => file[at + 8..at + 8 + text.len()].copy_from_slice(text.as_bytes()),
            Retype => file[at - 4..at].copy_from_slice(&6u32.to_le_bytes()),
        }
        let error = in_pieces(&device, &[("x.gguf".into(), file)], 5000).err().unwrap_or_else(|| panic!("{key}"));
        assert!(error.code() == code && error.to_string().contains(named), "{key}: {}: {error}", error.code());
    }
    let mut file = std::fs::read(folder(modern)).unwrap();
    let at = value_of(&file, "modern-bert.attention.sliding_window");
    file[at..at + 4].fill(0);
    let without = in_pieces(&device, &[("x.gguf".into(), file)], 5000).unwrap();
    assert!(without.config().blocks.iter().all(|block| block.attention.window.is_none()));
    // Adds a second label, of the size of the data's alignment.
    let mut file = std::fs::read(folder(pairs)).unwrap();
    let at = value_of(&file, "modern-bert.classifier.output_labels") + 4;
    file[at] = 2;
    let label = 24u64.to_le_bytes().into_iter().chain([b'x'; 24]);
    file.splice(at + 8..at + 8, label);
    let files = [("x.gguf".to_string(), file)];
    let loader = Reranker::loader(&device, names(&files), RerankOptions::default()).unwrap();
    let error = fed(loader, &files, 5000).err().unwrap();
    assert!(error.to_string().contains("classifier.output_labels"), "{error}");
    // Valid files of another kind.
    let embedding = |path| Embedder::load(&device, folder(path), EmbedOptions::default()).err().unwrap();
    let scoring = |path| Reranker::load(&device, folder(path), RerankOptions::default()).err().unwrap();
    for (error, named) in [
        (embedding(pairs), "pooling_type is "),
        (embedding(roberta), "pooling_type is "),
        (embedding("bert-reranker"), "pooling_type is "),
        (scoring(modern), "pooling_type (architectures) is "),
        (scoring(qwen), "pooling_type (architectures) is "),
        (scoring("bert-reranker/model.gguf"), "cls.weight"),
    ] {
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
}

/// A decoder with sentence-transformers' files is an encoder. The reference is transformers.
#[test]
fn qwen3_embedding_equals_its_decoders_last_hidden_state() {
    let Some(folder) = common::data(&["tiny-random"]).map(|data| data.join("tiny-random/qwen3")) else { return };
    let references = References::open(&folder.join("refs.safetensors"));
    let (ids, hidden) = (references.ids("1.ids"), references.floats("1.hidden"));
    let read = |name: &str| (name.to_string(), std::fs::read(folder.join(name)).unwrap());
    let decoder = ["config.json", "model.safetensors"].map(read);
    let mut files = decoder.to_vec();
    files.push(("1_Pooling/config.json".into(), br#"{ "pooling_mode_lasttoken": true }"#.to_vec()));
    files.push(("modules.json".into(), b"[]".to_vec()));
    for device in executors() {
        assert_eq!(in_pieces(&device, &decoder, 5000).err().unwrap().code(), "unsupported");
        let model = in_pieces(&device, &files, 5000).unwrap();
        assert!(!model.normalizes());
        let dims = model.dims() as usize;
        // Attention is causal, so each token is the last one of its own prefix.
        let texts: Vec<Tokens> = (1..=ids.len()).map(|n| Tokens::from(ids[..n].to_vec())).collect();
        let want = &hidden[hidden.len() - ids.len() * dims..];
        let difference = largest_difference(&block_on(model.embed_tokens(&texts)).unwrap(), want);
        println!("qwen3 on {}: worst {difference:.1e}", device.info().name);
        assert!(difference <= 2e-4, "{difference:.1e}");
    }
}

/// Older files of RoBERTa's classifiers have the pooler of the model that they were trained from, too: here other numbers of
/// the same shape.
#[test]
fn poolers_beside_a_classifier_are_not_read() {
    let (device, name) = (common::cpu(), "roberta-reranker");
    let mut files = files(name);
    let weights = &mut files.last_mut().unwrap().1;
    let names = ["weight", "bias"].map(|part| format!("roberta.encoder.layer.0.attention.self.query.{part}"));
    *weights = twice(weights, &names, ["encoder.layer.0.attention.self.query", "pooler.dense"]);
    let loader = Reranker::loader(&device, super::names(&files), RerankOptions::default()).unwrap();
    let model = block_on(fed(loader, &files, 5000).unwrap().finish()).unwrap();
    let (own, cases) = (reranker(&device, name, RerankOptions::default()), cases(name, "pairs"));
    let pairs: Vec<_> = cases.iter().map(|case| (text(case, "a"), text(case, "b"))).collect();
    assert_eq!(block_on(model.score_pairs(&pairs)).unwrap(), block_on(own.score_pairs(&pairs)).unwrap());
}

/// An external pipeline adds the same tokens around pairs, with the same types.
#[cfg(feature = "tokenizer-json")]
#[test]
fn pairs_encode_equally_with_the_tokenizers_crate() {
    let device = common::cpu();
    for name in ["bert-reranker", "roberta-reranker"] {
        let mut files = files(name);
        let mut json: Value = serde_json::from_slice(&files[1].1).unwrap();
        let mut steps = vec![serde_json::json!({ "type": "Lowercase" })];
        steps.extend(Some(json["normalizer"].clone()).filter(|step| !step.is_null()));
        json["normalizer"] = serde_json::json!({ "type": "Sequence", "normalizers": steps });
        files[1].1 = json.to_string().into_bytes();
        let tokenizer = Tokenizer::from_json(&files[1].1, &TokenizerConfig::default()).unwrap();
        assert_eq!(tokenizer.algorithm(), "tokenizers");
        let loader = Reranker::loader(&device, names(&files), RerankOptions::default()).unwrap();
        let model = block_on(fed(loader, &files, 5000).unwrap().finish()).unwrap();
        let (own, cases) = (reranker(&device, name, RerankOptions::default()), cases(name, "pairs"));
        let pairs: Vec<_> = cases.iter().map(|case| (text(case, "a"), text(case, "b"))).collect();
        for (case, (a, b)) in cases.iter().zip(&pairs) {
            assert_eq!(model.encode(a, b).unwrap(), own.encode(a, b).unwrap(), "{name}: {case}");
        }
        assert_eq!(block_on(model.score_pairs(&pairs)).unwrap(), block_on(own.score_pairs(&pairs)).unwrap());
    }
}

#[test]
fn embedding_prompts_are_chosen_by_name() {
    let device = common::cpu();
    let options = EmbedOptions { cached_vectors: 9, ..EmbedOptions::default() };
    let model = embedder(&device, "nomic", options);
    assert_eq!(model.prompts().keys().collect::<Vec<_>>(), ["document", "query"]);
    let query = model.with_prompt(Some("query")).unwrap();
    assert_eq!(query.prompt(), "search query : ");
    let vectors = |model: &Embedder, text: &str| block_on(model.embed(&[text])).unwrap();
    // The cache key is the model's input.
    let (plain, prompted) = (vectors(&model, "tax law"), vectors(&query, "tax law"));
    assert_ne!(plain, prompted);
    assert_eq!(vectors(&model, "search query : tax law"), prompted);
    assert_eq!(vectors(&query.with_prompt(None).unwrap(), "tax law"), plain);
    assert_eq!(model.cached_vectors().unwrap().hits(), 2);
    let error = model.with_prompt(Some("title")).err().unwrap();
    assert_eq!(
        error.to_string(),
        Error::Option { option: "prompt", expected: "document, query".into(), found: "title".into() }.to_string()
    );

    let mut files = files("nomic");
    for (prompts, wanted) in [
        (r#"{ "prompts": { "q": "a " }, "default_prompt_name": "q" }"#, Ok("a ")),
        (r#"{ "prompts": { "q": "a " } }"#, Ok("")),
        (r#"{ "default_prompt_name": "q" }"#, Err("default_prompt_name")),
        (r#"{ "prompts": { "q": 1 } }"#, Err("texts by name")),
        (r#"{ "prompts": "q" }"#, Err("an object")),
    ] {
        files.retain(|(name, _)| name != "config_sentence_transformers.json");
        files.push(("config_sentence_transformers.json".into(), prompts.into()));
        match (in_pieces(&device, &files, 5000), wanted) {
            (Ok(model), Ok(prompt)) => assert_eq!(model.prompt(), prompt),
            (Err(error), Err(named)) => assert!(error.to_string().contains(named), "{error}"),
            (loaded, _) => panic!("{prompts}: {:?}", loaded.map(|_| ())),
        }
    }
}

#[test]
fn documents_are_ranked_by_score_then_position() {
    for device in executors() {
        let model = reranker(&device, "bert-reranker", RerankOptions::default());
        let documents = ["a calm stream", "tax law", "the old engine", "tax law", ""];
        let scores = block_on(model.score("what is tax law", &documents)).unwrap();
        let ranked = block_on(model.rank("what is tax law", &documents)).unwrap();
        assert_eq!(scores[1], scores[3]);
        let place = |index| ranked.iter().position(|ranked| ranked.index == index).unwrap();
        assert_eq!(place(1) + 1, place(3), "{ranked:?}");
        assert!(ranked.is_sorted_by(|a, b| a.score >= b.score), "{ranked:?}");
        assert!(ranked.iter().all(|ranked| ranked.score == scores[ranked.index]));
        assert!(block_on(model.rank::<&str>("what", &[])).unwrap().is_empty());

        let options = RerankOptions { max_batch_tokens: Some(16), ..RerankOptions::default() };
        let small = reranker(&device, "bert-reranker", options);
        let mut seen = Vec::new();
        let told = block_on(small.rank_with("what is tax law", &documents, &mut |done| seen.push(done))).unwrap();
        assert_eq!(told, ranked);
        assert!(seen.is_sorted() && seen.first() < seen.last() && seen.last() == Some(&documents.len()), "{seen:?}");
    }
}

#[test]
fn encoder_name_comes_from_its_folder_or_gguf_metadata() {
    let device = common::cpu();
    let files = files("nomic");
    let name = |folder: Option<&str>, files: &[(String, Vec<u8>)]| {
        let mut loader = Embedder::loader(&device, names(files), EmbedOptions::default()).unwrap();
        folder.into_iter().for_each(|folder| loader.set_folder(folder));
        block_on(fed(loader, files, 5000).unwrap().finish()).unwrap().name().to_string()
    };
    assert_eq!(name(Some("a folder"), &files), "a folder");
    assert_eq!(name(None, &files), "model");
    assert_eq!(embedder(&device, "nomic", EmbedOptions::default()).name(), "nomic");
    // A GGUF file states its own name.
    let gguf = [("x.gguf".to_string(), std::fs::read(folder("nomic/model.gguf")).unwrap())];
    assert_eq!(name(Some("a folder"), &gguf), name(None, &gguf));
}

/// Random words, in very different numbers.
fn words(rng: &mut Rng) -> String {
    const WORDS: [&str; 8] = ["the", "river", "engine", "quietly", "law", "?", "stream", "zebra"];
    (0..[0, 2, 7, 19][rng.below(4)]).map(|_| WORDS[rng.below(8)]).collect::<Vec<_>>().join(" ")
}

/// Requires rows to be bit-identical to those computed alone; `rows` computes some of `n` texts.
fn check_alone(label: &str, n: usize, rows: &dyn Fn(&[usize]) -> Vec<f32>, alone: &mut Vec<Vec<u32>>) {
    let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    if alone.is_empty() {
        *alone = (0..n).map(|i| bits(&rows(&[i]))).collect();
    }
    let mut order: Vec<usize> = (0..n).collect();
    for round in 0..3 {
        let found = rows(&order);
        for (&i, row) in order.iter().zip(found.chunks_exact(found.len() / order.len())) {
            assert!(bits(row) == alone[i], "{label}: {i} in order {round}");
        }
        let mut rng = Rng::new(round);
        (1..order.len()).rev().for_each(|i| order.swap(i, rng.below(i + 1)));
        order.truncate(20);
    }
}

#[test]
fn scores_and_vectors_are_bit_equal_in_every_batch() {
    let mut rng = Rng::new(3);
    let pairs: Vec<(String, String)> = (0..24).map(|_| (words(&mut rng), words(&mut rng))).collect();
    for device in executors() {
        for name in ["bert-reranker", "modernbert-reranker"] {
            let mut alone = Vec::new();
            for max_batch_tokens in [Some(16), Some(100), None] {
                let model = reranker(&device, name, RerankOptions { max_batch_tokens, ..RerankOptions::default() });
                let rows = |order: &[usize]| {
                    let some: Vec<_> = order.iter().map(|&i| (&pairs[i].0, &pairs[i].1)).collect();
                    block_on(model.score_pairs(&some)).unwrap()
                };
                check_alone(name, pairs.len(), &rows, &mut alone);
            }
        }
        for name in ["qwen3-embedding", "nomic", "mpnet", "nomic-moe"] {
            let mut alone = Vec::new();
            for max_batch_tokens in [Some(16), Some(100), None] {
                let model = embedder(&device, name, EmbedOptions { max_batch_tokens, ..EmbedOptions::default() });
                let rows = |order: &[usize]| {
                    let some: Vec<_> = order.iter().map(|&i| &pairs[i].0).collect();
                    block_on(model.embed(&some)).unwrap()
                };
                check_alone(name, pairs.len(), &rows, &mut alone);
            }
        }
    }
}

#[test]
fn unsupported_rerankers_and_inputs_are_refused_by_name() {
    let device = common::cpu();
    let load = |files: &[(String, Vec<u8>)]| {
        let loader = Reranker::loader(&device, names(files), RerankOptions::default())?;
        block_on(fed(loader, files, 5000)?.finish())
    };
    let whole = reranker(&device, "bert-reranker", RerankOptions::default());
    let want = block_on(whole.score("tax", &["law"])).unwrap();
    assert_eq!(block_on(load(&files("bert-reranker")).unwrap().score("tax", &["law"])).unwrap(), want);

    for (name, from, to, named) in [
        ("bert-reranker", r#""0": "LABEL_0""#, r#""0": "A", "1": "B""#, "num_labels"),
        ("bert-reranker", "torch.nn.modules.linear.Identity", "torch.nn.Softmax", "`Softmax`"),
        ("bert-reranker", "BertForSequenceClassification", "BertModel", "without a scoring head"),
        ("modernbert-reranker", r#""mean""#, r#""max""#, "classifier_pooling"),
    ] {
        let mut files = files(name);
        let config = String::from_utf8(files[0].1.clone()).unwrap();
        assert!(config.contains(from), "{config}");
        files[0].1 = config.replace(from, to).into_bytes();
        let error = load(&files).err().unwrap();
        assert!(error.code() == "unsupported" && error.to_string().contains(named), "{error}");
    }
    // Texts in reverse order, as a template may request.
    let mut swapped = files("bert-reranker");
    let mut tokenizer: Value = serde_json::from_slice(&swapped[1].1).unwrap();
    let special = |id: &str| json!({ "SpecialToken": { "id": id, "type_id": 0 } });
    let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
    let id = |name: &str| {
        let tokens = tokenizer["added_tokens"].as_array().unwrap();
        tokens.iter().find(|token| token["content"] == name).unwrap()["id"].clone()
    };
    let known = |name: &str| json!({ "id": name, "ids": [id(name)], "tokens": [name] });
    let template = |first: &str, second: &str| {
        json!({
            "type": "TemplateProcessing",
            "single": [special("[CLS]"), text("A"), special("[SEP]")],
            "pair": [special("[CLS]"), text(first), special("[SEP]"), text(second), special("[SEP]")],
            "special_tokens": { "[CLS]": known("[CLS]"), "[SEP]": known("[SEP]") },
        })
    };
    let [straight, other] = [template("A", "B"), template("B", "A")];
    tokenizer["post_processor"] = straight;
    swapped[1].1 = tokenizer.to_string().into_bytes();
    assert!(load(&swapped).is_ok());
    tokenizer["post_processor"] = other;
    swapped[1].1 = tokenizer.to_string().into_bytes();
    let error = load(&swapped).err().unwrap();
    assert!(error.code() == "tokenizer" && error.to_string().contains("post_processor"), "{error}");

    let mut without = files("bert-reranker");
    without.retain(|(name, _)| name != "tokenizer.json");
    let error = block_on(load(&without).unwrap().score("a", &["b"])).unwrap_err();
    assert!(matches!(&error, Error::InRecord { record: 0, .. }), "{error}");
    let options = RerankOptions { max_tokens: Some(2), ..RerankOptions::default() };
    let error = Reranker::load(&device, folder("bert-reranker"), options).err().unwrap();
    assert!(error.to_string().contains("max_tokens"), "{error}");
    let error = Reranker::load(&device, folder("nomic"), RerankOptions::default()).err().unwrap();
    assert!(error.to_string().contains("without a scoring head"), "{error}");
}

/// The files of a model, `config.json` first.
fn files(name: &str) -> Vec<(String, Vec<u8>)> {
    let names = ["config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json", "model.safetensors"];
    let read = |file: &str| Some((file.to_string(), std::fs::read(folder(name).join(file)).ok()?));
    names.into_iter().filter_map(read).collect()
}

#[test]
fn embedding_benchmark_bypasses_the_vector_cache() {
    let device = common::cpu();
    let embedder = embedder(&device, "nomic", EmbedOptions { cached_vectors: 64, ..EmbedOptions::default() });
    let texts: Vec<String> = ["a b", "the cat", "b a b a", "a a a a"].map(String::from).to_vec();
    let lengths: Vec<usize> = texts.iter().map(|text| embedder.encode(text).unwrap().ids.len()).collect();
    let probes = Probes {
        copy_bytes_per_second: 1e9,
        copy_tensor_bytes: 0,
        flop_per_second: 1e9,
        matmul_size: 0,
        matmul: Vec::new(),
    };
    let case = EmbedCase { n_texts: 2, repetitions: 7 };
    let row = block_on(bench::embed::measure(&embedder, &texts, case, &probes)).unwrap();
    assert_eq!([row.n_tokens, row.submits, row.reads], [lengths.iter().sum::<usize>() as f64 / 2.0, 1.0, 1.0]);
    assert_eq!(row.dispatches, embedder.n_dispatches(8, 2).unwrap() as f64);
    let vectors = embedder.cached_vectors().unwrap();
    let encodings = embedder.encodings().unwrap();
    assert_eq!([vectors.hits(), vectors.misses(), encodings.hits(), encodings.misses()], [0, 2, 0, 2]);

    let parts = block_on(EmbedParts::measure(&embedder, &texts)).unwrap();
    assert_eq!([vectors.hits(), vectors.misses(), encodings.hits(), encodings.misses()], [0, 4, 0, 4]);
    assert_eq!((parts.n_texts, parts.n_tokens), (4, lengths.iter().sum()));
    let refused = block_on(bench::embed::measure(&embedder, &texts, EmbedCase { n_texts: 5, repetitions: 1 }, &probes));
    assert!(matches!(refused, Err(Error::Option { option: "batch", .. })), "{refused:?}");
}
