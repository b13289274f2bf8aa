//! Real weights: logits, hidden states and greedy continuations against published and independently computed
//! references, on the GPU and the CPU. The data folder's README describes the references and their tolerances.

use crate::common;
#[path = "model/features.rs"]
mod features;
#[path = "model/inside.rs"]
mod inside;

use std::path::Path;

use common::shared::{self, executors};
use common::{References, block_on, largest_difference};
use serde_json::Value;
use tilewright::formats::Gguf;
use tilewright::kernels::KvType;
use tilewright::load::ModelFile;
use tilewright::{Device, GenerateOptions, LoadOptions, Model, Tier};

/// Float32 arithmetic on any weight type.
const TOLERANCE: f32 = 1e-3;
/// Float32 arithmetic on the tiny random models.
const TINY_TOLERANCE: f32 = 2e-4;

/// Activations rounded to F16 in parts.
const HALF_TOLERANCE: f32 = 0.05;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn margins(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|margin| margin.as_f64().unwrap() as f32).collect()
}

/// With an F32 cache.
fn load(device: &Device, path: &Path) -> Model {
    load_as(device, path, KvType::F32)
}

/// Exact: a GPU with half precision would round, unlike the references.
fn load_as(device: &Device, path: &Path, kv_type: KvType) -> Model {
    Model::load(device, path, LoadOptions { kv_type, exact: true, ..LoadOptions::default() })
        .unwrap_or_else(|e| panic!("{e}"))
}

/// Generates greedily and compares with the reference up to the first near-tie.
fn check_greedy(model: &Model, prompt: &[u32], want: &[u32], margins: &[f32], tolerance: f32, what: &str) -> usize {
    let certain = margins.iter().position(|&margin| margin < 2.0 * tolerance).unwrap_or(want.len());
    let mut session = model.session().unwrap();
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(want.len()) };
    let mut generation = session.generate_ids(prompt, &options).unwrap();
    let mut got = Vec::new();
    while let Some(piece) = block_on(generation.next()) {
        got.push(piece.unwrap_or_else(|e| panic!("{what}: {e}")).id);
    }
    assert_eq!(got.len(), want.len(), "{what}");
    assert_eq!(got[..certain], want[..certain], "{what}");
    certain
}

/// A tiny random model in each of its formats: logits of all positions, hidden states, greedy continuation.
fn check_tiny(name: &str) {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    let folder = data.join("tiny-random").join(name);
    let files = [
        (folder.clone(), "refs"),
        (folder.join("model-f16.gguf"), "refs_gguf"),
        (folder.join("model-bf16.gguf"), "refs_gguf"),
        (folder.join("model-mxfp4.gguf"), "refs_mxfp4"),
        // With one matrix for keys and values.
        (folder.join("model-older.gguf"), "refs_gguf"),
    ];
    for (path, references) in files {
        if !path.exists() {
            continue;
        }
        // The file's own references, float64 ones where F32 is ambiguous, or those of all files.
        let named = [references, "refs_f64", "refs"].map(|stem| folder.join(stem).with_extension("safetensors"));
        let named = if references == "refs" { &named[1..] } else { &named[..] };
        let references = References::open(named.iter().find(|path| path.exists()).unwrap());
        let tiers = [Tier::Subgroups, Tier::Baseline];
        let tiers = if common::is_full() { &tiers[..] } else { &tiers[..1] };
        // Later GGUF files have the same weights as the folders: the adapter's default tier runs only the others.
        let is_later = !path.is_dir() && !path.ends_with("model-f16.gguf");
        let usual = if is_later { vec![common::cpu()] } else { executors() };
        for device in usual.into_iter().chain(shared::gpus_beside_cpu(tiers.iter().copied())) {
            check_tiny_file(&device, &path, &references);
            common::assert_tested(&device);
        }
    }
}

fn check_tiny_file(device: &Device, path: &Path, references: &References) {
    let model = load(device, path);
    let what = format!("{} on {} ({})", path.display(), device.info().name, device.tier().name());
    let mut worst = [0.0f32; 2];
    for i in 0..4 {
        let trace = block_on(model.trace(&references.ids(&format!("{i}.ids")))).unwrap();
        worst[0] = worst[0].max(largest_difference(&trace.logits, &references.floats(&format!("{i}.logits"))));
        if i == 1 {
            // The reference's last entry is after the final norm, ours before it.
            let want = references.floats("1.hidden");
            let got = trace.hidden[..model.config().blocks.len()].concat();
            worst[1] = largest_difference(&got, &want[..got.len()]);
        }
    }
    println!("{what}: logits within {:.1e}, hidden states within {:.1e}", worst[0], worst[1]);
    assert!(worst.iter().all(|&worst| worst <= TINY_TOLERANCE), "{what}: {worst:?}");
    let (prompt, want) = (references.ids("greedy.prompt"), references.ids("greedy.ids"));
    let margins = references.floats("greedy.margins");
    check_greedy(&model, &prompt, &want, &margins, TINY_TOLERANCE, &what);
    if path.is_dir() || common::is_full() {
        check_tiny_caches(device, path, references, &what);
    }
}

/// The longest case with rounding caches.
fn check_tiny_caches(device: &Device, path: &Path, references: &References, what: &str) {
    let (ids, want) = (references.ids("3.ids"), references.floats("3.logits"));
    let [lowest, highest] = [f32::min, f32::max].map(|pick| want.iter().copied().fold(want[0], pick));
    // Eight bits round a block's largest value 2^4 times as coarsely as f16, and a quarter of it 2^6 times. A model
    // sensitive to rounding may reach this bound.
    const COARSER: f32 = 64.0;
    let mut off_by_half = 0.0;
    for kv_type in [KvType::F16, KvType::Q8_0] {
        let tolerance = match kv_type {
            KvType::F16 => HALF_TOLERANCE,
            _ => f32::max(0.03 * (highest - lowest), COARSER * off_by_half),
        };
        let model = load_as(device, path, kv_type);
        let vocab_size = model.config().vocab_size as usize;
        let got = block_on(model.trace(&ids)).unwrap().logits;
        let positions = got.chunks_exact(vocab_size).zip(want.chunks_exact(vocab_size));
        let off: Vec<f32> = positions.map(|(got, want)| largest_difference(got, want)).collect();
        let n_off = off.iter().filter(|&&off| off > tolerance).count();
        let worst = off.iter().copied().fold(0.0, f32::max);
        if kv_type == KvType::F16 {
            off_by_half = worst;
        }
        println!("{what}, {kv_type}: logits within {worst:.1e} of {:.1}, {n_off} further off", highest - lowest);
        // With random weights, eight bits may choose another expert where two are nearly tied.
        let has_experts = model.config().blocks.iter().any(|block| block.feed_forward.experts.is_some());
        let most = if has_experts && kv_type == KvType::Q8_0 { ids.len() / 2 } else { 0 };
        assert!(n_off <= most, "{what}, {kv_type}: {n_off} positions are off, by up to {worst}");
        // Continuing token by token equals a prompt of all tokens.
        let mut session = model.session().unwrap();
        block_on(session.logits(&ids[..ids.len() - 4])).unwrap();
        let mut last = Vec::new();
        for &id in &ids[ids.len() - 4..] {
            last = block_on(session.logits(&[id])).unwrap();
        }
        let difference = largest_difference(&last, &got[got.len() - vocab_size..]);
        assert!(difference <= tolerance, "{what}, {kv_type}, token by token: {difference}");
    }
    assert_eq!(LoadOptions::default().kv_type, KvType::F16);
}

/// The text part of models that also take pictures, by a prompt without one.
#[test]
fn text_of_picture_models_has_the_references_logits() {
    let Some(data) = common::data(&["tiny-random-pictures"]) else { return };
    for name in ["gemma4-unified", "lfm3-vl", "qwen3-vl", "smolvlm"] {
        let folder = data.join("tiny-random-pictures").join(name);
        let references = References::open(&folder.join("refs.safetensors"));
        for path in [folder.clone(), folder.join("model-bf16.gguf")].into_iter().filter(|path| path.exists()) {
            for device in executors() {
                let trace = block_on(load(&device, &path).trace(&references.ids("3.ids"))).unwrap();
                let difference = largest_difference(&trace.logits, &references.floats("3.logits"));
                assert!(difference <= TINY_TOLERANCE, "{} on {}: {difference}", path.display(), device.info().name);
            }
        }
    }
}

/// One model per set of features of an architecture; see the data folder's README.
macro_rules! tiny_random_models {
    ($($test:ident: $folder:literal,)*) => {
        mod tiny_random_models {
            $(#[test]
            fn $test() {
                super::check_tiny($folder);
            })*
        }
    };
}

tiny_random_models! {
    deepseek_v2: "deepseek-v2",
    ernie4_5: "ernie4-5",
    exaone4: "exaone4",
    falcon_h1: "falcon-h1",
    gemma4_31b: "gemma4-31b",
    gemma4_moe: "gemma4-moe",
    glm4_moe: "glm4-moe",
    glm4_moe_lite: "glm4-moe-lite",
    lfm3: "lfm3",
    ling2: "ling2",
    ling3: "ling3",
    olmo_hybrid: "olmo-hybrid",
    qwen3_next: "qwen3-next",
    seed_oss: "seed-oss",
    gemma: "gemma",
    gemma2: "gemma2",
    gemma3: "gemma3",
    gemma4: "gemma4",
    gpt2: "gpt2",
    gpt_neox: "gpt-neox",
    gpt_oss: "gpt-oss",
    granite: "granite",
    granite_hybrid: "granite-hybrid",
    granite_moe: "granite-moe",
    hunyuan_dense: "hunyuan-dense",
    lfm2: "lfm2",
    lfm2_moe: "lfm2-moe",
    llama: "llama-mha-bias",
    llama3: "llama3-rope",
    ministral3: "ministral3",
    mamba2: "mamba2",
    mistral: "mistral-sliding",
    mixtral: "mixtral",
    nemotron_h: "nemotron-h",
    nemotron_h_moe: "nemotron-h-moe",
    olmo2: "olmo2",
    olmo3: "olmo3",
    olmoe: "olmoe",
    phi3: "phi3",
    phi3_longrope: "phi3-longrope",
    qwen2: "qwen2",
    qwen3: "qwen3",
    qwen3_moe: "qwen3-moe",
    qwen35: "qwen35",
    qwen35_moe: "qwen35-moe",
    smollm3: "smollm3",
}

/// A completion that outgrows the context with short angles: every token equals that of a pass over all before it,
/// even if the session rolls back and continues.
#[test]
fn longrope_switch_recomputes_the_whole_sequence() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    let path = data.join("tiny-random/phi3-longrope");
    for device in executors() {
        let model = load(&device, &path);
        let options = |n, tokens_per_submit| GenerateOptions {
            ignore_eos: true,
            tokens_per_submit: Some(tokens_per_submit),
            ..GenerateOptions::greedy(n)
        };
        let prompt: Vec<u32> = (10..30).collect();
        let mut want = prompt.clone();
        for _ in 0..24 {
            let trace = block_on(model.trace(&want)).unwrap();
            let last = &trace.logits[trace.logits.len() - model.config().vocab_size as usize..];
            want.push((0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap() as u32);
        }
        let mut session = model.session().unwrap();
        for (keep, tokens_per_submit) in [(0, 1), (31, 4), (33, 3), (40, 1), (20, 8)] {
            session.truncate(keep);
            let known = session.tokens().len();
            let rest = if known == 0 { &prompt[..] } else { &[] };
            let n = want.len() - known.max(prompt.len());
            let mut generation = session.generate_ids(rest, &options(n, tokens_per_submit)).unwrap();
            while let Some(piece) = block_on(generation.next()) {
                piece.unwrap();
            }
            drop(generation);
            assert_eq!(session.tokens(), want, "{} from {keep}", device.info().name);
        }
    }
}

/// The built-in model's first tokens, and a prompt of several passes, equal in all tiers.
#[test]
fn every_tier_gives_the_same_text() {
    let reference = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/builtin/reference.json")).unwrap();
    let reference: Value = serde_json::from_slice(&reference).unwrap();
    let mut want: Option<Vec<f32>> = None;
    for device in shared::gpus(Tier::ALL) {
        let tier = device.tier();
        // Half precision applies only to the staging of tiles.
        let tolerance = if tier.rounds_to_half() { HALF_TOLERANCE } else { TOLERANCE };
        let model = Model::builtin(&device).unwrap();
        let mut text = Vec::new();
        for case in reference["cases"].as_array().unwrap() {
            let (prompt, greedy) = (ids(&case["ids"]), ids(&case["greedy_ids"]));
            check_greedy(&model, &prompt, &greedy, &margins(&case["greedy_margins"]), tolerance, tier.name());
            text.extend(prompt.into_iter().chain(greedy));
        }
        let logits = block_on(model.session().unwrap().logits(&text)).unwrap();
        let difference = largest_difference(&logits, want.get_or_insert_with(|| logits.clone()));
        println!("{}: logits behind {} tokens within {difference:.1e}", tier.name(), text.len());
        assert!(difference <= tolerance, "{}: logits differ by {difference}", tier.name());
    }
}

/// Tests on weights that are not in the repository: see `scripts/test`.
mod further_data {
    use super::*;

    /// Tokens generated on a GPU without `TILEWRIGHT_FULL`.
    const SHORT: usize = 12;

    /// All cases of one weight file, on all executors.
    fn check_stories(folder: &str, variant: &str, file: &str) {
        let Some(data) = common::data(&[folder]) else { return };
        let folder = data.join(folder);
        let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
        let references = References::open(&folder.join("logits.safetensors"));
        for device in executors() {
            let model = load(&device, &folder.join(file));
            let on = &device.info().name;
            let (mut worst, mut n_logits, mut n_tokens) = (0.0f32, 0, 0);
            let mut check_logits = |name: &str, ids: &[u32]| {
                let got = block_on(model.session().unwrap().logits(ids)).unwrap();
                let difference = largest_difference(&got, &references.floats(&format!("{variant}/{name}")));
                assert!(difference <= TOLERANCE, "{file} on {on}, {name}: logits differ by {difference}");
                worst = worst.max(difference);
                n_logits += 1;
            };
            for case in cases["cases"].as_array().unwrap() {
                let name = case["name"].as_str().unwrap();
                let prompt = ids(&case["ids"]);
                check_logits(name, &prompt);
                if cases["prefix_of"] == *name {
                    for n in ids(&cases["prefixes"]) {
                        check_logits(&format!("prefix_{n}"), &prompt[..n as usize]);
                    }
                }
                let greedy = &case["greedy"][variant];
                let margins = margins(&greedy["margins"]);
                let what = format!("{file} on {on}, greedy {name}");
                let want = ids(&greedy["ids"]);
                let n = if device.is_gpu() && !common::is_full() { want.len().min(SHORT) } else { want.len() };
                n_tokens += check_greedy(&model, &prompt, &want[..n], &margins[..n], TOLERANCE, &what);
            }
            println!("{file} on {on}: {n_logits} logit vectors, worst {worst:.1e}; {n_tokens} greedy tokens");
        }
    }

    /// Logits of all positions and the residual stream after each block.
    fn check_trace(folder: &str, file: &str) {
        let Some(data) = common::data(&[folder]) else { return };
        let folder = data.join(folder);
        let references = References::open(&folder.join("trace.safetensors"));
        for device in executors() {
            let model = load(&device, &folder.join(file));
            let trace = block_on(model.trace(&references.ids("ids"))).unwrap();
            let logits = largest_difference(&trace.logits, &references.floats("all_logits"));
            let want = references.floats("hidden");
            let got = trace.hidden.concat();
            // One model's residual stream reaches hundreds: its error is relative to that.
            let scale = want.iter().fold(1.0f32, |scale, x| scale.max(x.abs()));
            let hidden = largest_difference(&got, &want) / scale;
            println!("{file} on {}: all logits within {logits:.1e}, hidden within {hidden:.1e}", device.info().name);
            assert!(logits <= TOLERANCE && hidden <= TOLERANCE, "{file}: logits {logits}, hidden {hidden}");
        }
    }

    macro_rules! stories {
        ($($name:ident: $folder:literal, $variant:literal, $file:literal;)*) => {
            $(#[test]
            fn $name() {
                check_stories($folder, $variant, $file);
            })*
        };
    }

    stories! {
        stories260k_f32: "stories260k", "f32", "stories260k-f32.gguf";
        stories260k_safetensors: "stories260k", "f32", "model.safetensors";
        stories260k_f16: "stories260k", "f16", "stories260k-f16.gguf";
        stories260k_q8_0: "stories260k", "q8_0", "stories260k-q8_0.gguf";
        stories260k_q4_0: "stories260k", "q4_0", "stories260k-q4_0.gguf";
        stories260k_wide_q2_k: "stories260k-wide", "q2_k", "stories260k-wide-q2_k.gguf";
        stories260k_wide_q3_k_m: "stories260k-wide", "q3_k_m", "stories260k-wide-q3_k_m.gguf";
        stories260k_wide_q4_0: "stories260k-wide", "q4_0", "stories260k-wide-q4_0.gguf";
        stories260k_wide_q4_k_m: "stories260k-wide", "q4_k_m", "stories260k-wide-q4_k_m.gguf";
        stories260k_wide_q5_k_m: "stories260k-wide", "q5_k_m", "stories260k-wide-q5_k_m.gguf";
        stories260k_wide_q6_k: "stories260k-wide", "q6_k", "stories260k-wide-q6_k.gguf";
        stories260k_wide_mixed: "stories260k-wide", "mixed", "stories260k-wide-mixed.gguf";
        tinystories656k_bf16: "tinystories656k", "bf16", "model.safetensors";
        tinystories656k_q5_0: "tinystories656k", "q5_0", "tinystories656k-q5_0.gguf";
        tinystories656k_q8_0: "tinystories656k", "q8_0", "tinystories656k-q8_0.gguf";
    }

    /// Weights of thirteen types have the file's size on a GPU, except for padding: nothing is expanded.
    #[test]
    fn mixed_weights_stay_packed() {
        let Some(data) = common::data(&["stories260k-wide"]) else { return };
        let path = data.join("stories260k-wide/stories260k-wide-mixed.gguf");
        let bytes = std::fs::read(&path).unwrap();
        let tensors = Gguf::parse(&bytes, bytes.len() as u64).unwrap().tensors;
        let in_file: u64 = tensors.iter().map(|tensor| tensor.size_bytes).sum();
        for device in shared::gpus([Tier::Baseline]) {
            // `allocated_bytes_match_the_memory_plan` in tests/load checks the allocation.
            let file = ModelFile::open(&path).unwrap();
            let plan = Model::plan_file(&device.target(), &file, &LoadOptions::default()).unwrap();
            let on_device = plan.weights_bytes;
            println!("{in_file} bytes in the file, {on_device} on the device");
            // Two bytes per super-block of Q3_K.
            assert_eq!(on_device - in_file, 2 * 640, "{in_file} bytes in the file, {on_device} on the device");
        }
    }

    #[test]
    fn traces() {
        check_trace("stories260k", "stories260k-f32.gguf");
        check_trace("tinystories656k", "model.safetensors");
    }

    /// The adapter's default tier runs all cases; the others run a prompt of several passes and a continuation.
    #[test]
    fn every_tier_continues_a_long_prompt() {
        let Some(data) = common::data(&["stories260k"]) else { return };
        let folder = data.join("stories260k");
        let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
        let references = References::open(&folder.join("logits.safetensors"));
        let case = cases["cases"].as_array().unwrap().iter().find(|case| case["name"] == "long_400").unwrap();
        let (prompt, greedy) = (ids(&case["ids"]), &case["greedy"]["q8_0"]);
        let margins = margins(&greedy["margins"]);
        for device in shared::gpus(Tier::ALL) {
            let tier = device.tier();
            // Half precision applies only to the staging of tiles.
            let tolerance = if tier.rounds_to_half() { HALF_TOLERANCE } else { TOLERANCE };
            let model = load(&device, &folder.join("stories260k-q8_0.gguf"));
            let got = block_on(model.session().unwrap().logits(&prompt)).unwrap();
            let difference = largest_difference(&got, &references.floats("q8_0/long_400"));
            assert!(difference <= tolerance, "{}: logits differ by {difference}", tier.name());
            let n = check_greedy(&model, &prompt, &ids(&greedy["ids"]), &margins, tolerance, tier.name());
            println!("{}: logits within {difference:.1e}, {n} greedy tokens", tier.name());
        }
    }
}
