//! LoRA adapters: logits against PEFT's and merged weights, switching, cost, hostile files.

use crate::matrix::{decoders, name_of};
use crate::{common, files};

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use common::{References, Rng, block_on, largest_difference, shared};
use serde_json::{Value, json};
use tilewright::engine::{Engine, EngineOptions, Request, Stream};
use tilewright::formats::{BlockType, Gguf, Safetensors, TensorInfo, block};
use tilewright::kernels::KvType;
use tilewright::load::AdapterFile;
use tilewright::load::convert::{QuantizeOptions, quantize_file};
use tilewright::{Adapter, Device, DeviceChoice, Error, GenerateOptions, LoadOptions, Model, Recovery, Tier};

/// Tolerance against merged weights.
const TOLERANCE: f32 = 1e-4;
/// Tolerance against PEFT's logits in float64; the same as for the tiny random models themselves.
const PEFT_TOLERANCE: f32 = 2e-4;
/// Tolerance of prompts where their products are in half precision.
const HALF_TOLERANCE: f32 = 0.05;

fn tiny(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-random").join(path)
}

fn adapter(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-random-lora").join(path)
}

/// A model without rounding.
fn load(device: &Device, path: &Path) -> Model {
    let options = LoadOptions { kv_type: KvType::F32, exact: true, ..LoadOptions::default() };
    Model::load(device, path, options).unwrap_or_else(|error| panic!("{error}"))
}

/// The CPU and the adapter's default tier; with `--full` its other tiers.
fn devices() -> Vec<Device> {
    devices_in(if common::is_full() { &Tier::ALL } else { &[Tier::Subgroups] })
}

fn devices_in(tiers: &[Tier]) -> Vec<Device> {
    std::iter::once(common::cpu()).chain(shared::gpus_beside_cpu(tiers.iter().copied())).collect()
}

/// The same, newly opened, for a test that counts their work.
fn devices_of_its_own(tiers: &[Tier]) -> Vec<Device> {
    std::iter::once(common::cpu()).chain(common::gpus_beside_cpu(tiers.iter().copied())).collect()
}

fn of(device: &Device) -> String {
    format!("{} ({})", device.info().name, device.tier().name())
}

/// A test's folder, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("lora-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Logits of each position in one pass, of each position token by token, and of the last one after short passes.
fn all_logits(model: &Model, ids: &[u32]) -> [Vec<f32>; 3] {
    let at_once = block_on(model.trace(ids)).unwrap().logits;
    let mut session = model.session().unwrap();
    let by_token: Vec<f32> = ids.iter().flat_map(|&id| block_on(session.logits(&[id])).unwrap()).collect();
    session.clear();
    let mut last = Vec::new();
    for few in ids.chunks(5) {
        last = block_on(session.logits(few)).unwrap();
    }
    [at_once, by_token, last]
}

/// Compares logits in full precision, and those of the whole prompt with the precision of the device's tier.
fn assert_logits(device: &Device, got: &[Vec<f32>; 3], want: &[f32], tolerance: f32, what: &str) -> f32 {
    let what = format!("{what} on {}", of(device));
    let n_last = got[2].len();
    let wants = [want, want, &want[want.len() - n_last..]];
    let off: Vec<f32> = got.iter().zip(wants).map(|(got, want)| largest_difference(got, want)).collect();
    println!("{what}: logits within {:.1e}, {:.1e} token by token, {:.1e} by fives", off[0], off[1], off[2]);
    let at_once = if device.tier().rounds_to_half() { HALF_TOLERANCE } else { tolerance };
    let is_close = off.iter().zip([at_once, tolerance, tolerance]).all(|(&off, tolerance)| off <= tolerance);
    assert!(is_close, "{what}: {off:?}");
    off.into_iter().fold(0.0, f32::max)
}

/// Each adapter on each file format of its model: the GGUF file of a Llama has the rows of queries in another order
/// than the Hugging Face folder.
#[test]
fn lora_logits_match_peft() {
    let cases: [(&str, &str, &[&str]); 8] = [
        ("llama3-rope", "llama3-rope", &["", "model-f16.gguf"]),
        ("llama3-rope.gguf", "llama3-rope", &["", "model-f16.gguf"]),
        ("llama3-rope-q8_0.gguf", "llama3-rope", &["model-f16.gguf"]),
        ("llama3-rope-rs", "llama3-rope", &["", "model-f16.gguf"]),
        ("qwen2", "qwen2", &["", "model-f16.gguf"]),
        ("qwen3", "qwen3", &["model-f16.gguf"]),
        ("gemma3", "gemma3", &[""]),
        ("phi3", "phi3", &[""]),
    ];
    for device in devices_in(&[Tier::Subgroups, Tier::Baseline, Tier::Scalar]) {
        for (name, base, forms) in cases {
            let references = match name {
                "llama3-rope-q8_0.gguf" => adapter("llama3-rope-q8_0.safetensors"),
                _ => adapter(name.trim_end_matches(".gguf")).join("refs.safetensors"),
            };
            let references = References::open(&references);
            // Tiers differ in kernels, not in files.
            let forms = if device.is_gpu() { &forms[..1] } else { forms };
            for form in forms {
                let model = load(&device, &tiny(base).join(form));
                let adapter = model.load_adapter(adapter(name), 1.0).unwrap_or_else(|error| panic!("{error}"));
                let with = model.with_adapter(Some(&adapter)).unwrap();
                let got = all_logits(&with, &references.ids("ids"));
                let what = format!("{name} with {base}/{form}");
                assert_logits(&device, &got, &references.floats("logits"), PEFT_TOLERANCE, &what);
            }
        }
        common::assert_tested(&device);
    }
}

/// LoRA products are not in half precision, even if products of prompts are.
#[test]
fn lora_factors_stay_in_full_precision_on_the_f16_tier() {
    for device in shared::gpus([Tier::F16]) {
        let options = LoadOptions { kv_type: KvType::F32, ..LoadOptions::default() };
        let model = Model::load(&device, tiny("qwen2"), options).unwrap();
        let adapter = model.load_adapter(adapter("qwen2"), 1.0).unwrap();
        let references = References::open(&self::adapter("qwen2").join("refs.safetensors"));
        let got = all_logits(&model.with_adapter(Some(&adapter)).unwrap(), &references.ids("ids"));
        assert_logits(&device, &got, &references.floats("logits"), PEFT_TOLERANCE, "qwen2");
    }
}

/// A file's tensor as floats.
fn floats(info: &TensorInfo, file: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; info.n_elements() as usize];
    block::dequantize(info.block_type, info.bytes(file).unwrap(), &mut values).unwrap();
    values
}

fn safetensors(tensors: &[(String, Vec<u64>, Vec<f32>)]) -> Vec<u8> {
    let entries = tensors.iter().map(|(name, shape, _)| (name.as_str(), BlockType::F32, shape.as_slice()));
    let head = Safetensors::head([("format", "pt")], entries);
    let data = tensors.iter().flat_map(|(.., values)| bytemuck::cast_slice::<f32, u8>(values)).copied();
    head.into_iter().chain(data).collect()
}

/// LoRA factors that change logits by about their own size, and their addend to the matrix.
struct LoraFactors {
    a: Vec<f32>,
    b: Vec<f32>,
    rank: usize,
}

impl LoraFactors {
    fn new(rng: &mut Rng, [rows, cols]: [usize; 2], rank: usize) -> LoraFactors {
        let mut normal = |n: usize, scale: f64| (0..n).map(|_| (scale * rng.normal()) as f32).collect();
        let a = normal(rank * cols, (cols as f64).powf(-0.5));
        LoraFactors { a, b: normal(rows * rank, 0.4 * (rank as f64).powf(-0.5)), rank }
    }

    /// Element of the product, in f64.
    fn product(&self, row: usize, col: usize) -> f64 {
        let cols = self.a.len() / self.rank;
        (0..self.rank).map(|r| f64::from(self.b[row * self.rank + r]) * f64::from(self.a[r * cols + col])).sum()
    }
}

const R: usize = 6;
const ALPHA: f32 = 9.0;

fn peft_config(more: Value) -> Vec<u8> {
    let mut config = json!({ "peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "bias": "none" });
    let (Value::Object(config), Value::Object(more)) = (&mut config, more) else { panic!("objects") };
    config.extend(more);
    serde_json::to_vec(config).unwrap()
}

/// A tensor of a safetensors file: name, shape, values.
type NamedTensor = (String, Vec<u64>, Vec<f32>);

/// A random adapter of all matrices of a folder's layers that adapters can change, its number of matrices, and the
/// folder's tensors with it merged.
pub fn random_adapter(folder: &Path, seed: u64) -> (AdapterFile, usize, Vec<NamedTensor>) {
    let mut rng = Rng::new(seed);
    let file = std::fs::read(folder.join("model.safetensors")).unwrap();
    let header = Safetensors::parse(&file, file.len() as u64).unwrap();
    let (mut merged, mut factors) = (Vec::new(), Vec::new());
    for info in &header.tensors {
        let mut values = floats(info, &file);
        let is_of = |part: &&str| info.name.contains(part);
        let is_of_layer = ["layers.", ".h."].iter().any(is_of);
        // Experts, routers, the per-layer half, and what makes keys and values of latents.
        let is_other = ["expert", "router", ".gate.", "shared_mlp", "per_layer", "kv_b_proj"].iter().any(is_of);
        if let (&[first, second], true) = (&info.shape[..], is_of_layer && !is_other) {
            // GPT-2's matrices are transposed.
            let is_transposed = name_of(folder) == "gpt2";
            let [rows, cols] = if is_transposed { [second, first] } else { [first, second] }.map(|n| n as usize);
            let mut own = LoraFactors::new(&mut rng, [rows, cols], R);
            if info.name.contains("linear_attn") {
                // Delta rules multiply rounding, too.
                own.b.iter_mut().for_each(|value| *value *= 0.1);
            }
            for (at, value) in values.iter_mut().enumerate() {
                let (row, col) = if is_transposed { (at % rows, at / rows) } else { (at / cols, at % cols) };
                let added = f64::from(ALPHA) / R as f64 * own.product(row, col);
                *value = (f64::from(*value) + added) as f32;
            }
            let module = format!("base_model.model.{}", info.name.strip_suffix(".weight").unwrap());
            factors.push((format!("{module}.lora_A.weight"), vec![R as u64, cols as u64], own.a));
            factors.push((format!("{module}.lora_B.weight"), vec![rows as u64, R as u64], own.b));
        }
        merged.push((info.name.clone(), info.shape.clone(), values));
    }
    let adapter = AdapterFile::from_peft_bytes(&peft_config(json!({})), safetensors(&factors)).unwrap();
    (adapter, factors.len() / 2, merged)
}

/// Random adapters of all layer matrices of each model, against a model with merged weights.
#[test]
fn lora_logits_match_merged_weights() {
    let devices = devices();
    let mut worst = 0.0f32;
    for (seed, path) in (0..).zip(decoders()) {
        let (name, mut rng) = (name_of(&path), Rng::new(seed));
        let (adapter, n_targets, merged) = random_adapter(&path, seed);
        assert!(n_targets >= 4, "{name}");
        let folder = Folder::new(name);
        std::fs::write(folder.0.join("model.safetensors"), safetensors(&merged)).unwrap();
        std::fs::copy(path.join("config.json"), folder.0.join("config.json")).unwrap();
        let ids: Vec<u32> = (0..14).map(|_| 3 + rng.below(290) as u32).collect();
        // The others differ already on the CPU.
        let on_gpu = ["falcon-h1", "gemma3", "gpt2", "llama3-rope", "phi3", "qwen2", "qwen3", "qwen35"].contains(&name);
        for device in devices.iter().filter(|device| on_gpu || common::is_full() || !device.is_gpu()) {
            let base = load(device, &path);
            let adapter = base.add_adapter(&adapter, 1.0).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(adapter.n_targets(), n_targets);
            let want = all_logits(&load(device, &folder.0), &ids);
            let got = all_logits(&base.with_adapter(Some(&adapter)).unwrap(), &ids);
            let moved = largest_difference(&block_on(base.trace(&ids)).unwrap().logits, &want[0]);
            assert!(moved > 0.3, "{name}: the adapter moves logits by {moved}");
            worst = worst.max(assert_logits(device, &got, &want[0], TOLERANCE, name));
        }
    }
    println!("the largest difference is {worst:.1e}");
}

/// Where attention rotates halves, only heads of layers with attention have rows in another order: Ling 3's others also
/// have queries and keys, and heads of another size.
#[test]
fn lora_rows_of_recurrent_layers_keep_their_order() {
    let device = common::cpu();
    for (seed, more) in (70..).zip([json!({}), json!({ "head_dim": 48, "linear_head_dim": 16 })]) {
        let [base, merged_folder] = ["base", "merged"].map(|kind| Folder::new(&format!("recurrent-{kind}-{seed}")));
        let mut config: Value = serde_json::from_slice(&std::fs::read(tiny("ling3/config.json")).unwrap()).unwrap();
        config["rope_interleave"] = json!(false);
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        std::fs::write(base.0.join("config.json"), config.to_string()).unwrap();
        std::fs::copy(tiny("ling3/model.safetensors"), base.0.join("model.safetensors")).unwrap();
        let (adapter, _, merged) = random_adapter(&base.0, seed);
        std::fs::write(merged_folder.0.join("config.json"), config.to_string()).unwrap();
        std::fs::write(merged_folder.0.join("model.safetensors"), safetensors(&merged)).unwrap();
        let mut rng = Rng::new(seed);
        let ids: Vec<u32> = (0..14).map(|_| 3 + rng.below(290) as u32).collect();
        let model = load(&device, &base.0);
        let adapter = model.add_adapter(&adapter, 1.0).unwrap_or_else(|error| panic!("{error}"));
        let want = all_logits(&load(&device, &merged_folder.0), &ids);
        let got = all_logits(&model.with_adapter(Some(&adapter)).unwrap(), &ids);
        assert_logits(&device, &got, &want[0], TOLERANCE, &format!("ling3 with halves, {more}"));
    }
}

/// llama.cpp's converter reorders or scales these models' matrices.
#[test]
fn adapter_in_another_format_is_refused_where_the_converter_changes_weights() {
    for (name, why) in [
        ("qwen35", "the model's format: GGUF files have value heads in another order"),
        ("falcon-h1", "the model's format: GGUF files have multipliers in their weights"),
    ] {
        let (of_folder, ..) = random_adapter(&tiny(name), 0);
        let factors = [("a", vec![4, 64]), ("b", vec![64, 4])]
            .map(|(factor, shape)| (format!("blk.0.ssm_out.weight.lora_{factor}"), shape, vec![0.5f32; 256]));
        let of_gguf = AdapterFile::from_gguf_bytes(files::adapter(name, ALPHA, &factors)).unwrap();
        let gguf = tiny(name).join("model-bf16.gguf");
        for (adapter, model, expected) in [(of_folder, gguf, "GGUF"), (of_gguf, tiny(name), "PEFT")] {
            match load(&common::cpu(), &model).add_adapter(&adapter, 1.0) {
                Err(Error::Adapter { expected: found, .. }) => {
                    assert_eq!(found, format!("an adapter in {expected}, {why}"), "{name}");
                }
                other => panic!("{name}: {:?}", other.map(|adapter| adapter.n_targets())),
            }
        }
    }
}

/// Adapters on quantised weights, against the same weights expanded to F32 and merged. Types within a stack differ:
/// rows of 112 columns are not whole blocks, so some matrices stay F16.
#[test]
fn lora_on_quantised_weights_matches_merged_f32_weights() {
    let folder = Folder::new("quantised");
    for (block_type, name) in [(BlockType::Q8_0, "qwen3"), (BlockType::Q4_0, "qwen2"), (BlockType::Q5_1, "qwen3")] {
        let [packed, merged] = ["packed", "merged"].map(|kind| folder.0.join(format!("{block_type}-{kind}.gguf")));
        quantize_file(
            &tiny(name).join("model-f16.gguf"),
            &packed,
            &QuantizeOptions::new(block_type),
            &mut |_, _, _| (),
        )
        .unwrap();
        quantize_file(&packed, &merged, &QuantizeOptions::new(BlockType::F32), &mut |_, _, _| ()).unwrap();
        let mut file = std::fs::read(&merged).unwrap();
        let header = Gguf::parse(&file, file.len() as u64).unwrap();
        let mut rng = Rng::new(7);
        let mut factors = Vec::new();
        for info in header.tensors.iter().filter(|info| info.name.starts_with("blk.")) {
            let &[rows, cols] = &info.shape[..] else { continue };
            assert_eq!(info.block_type, BlockType::F32, "{}", info.name);
            let own = LoraFactors::new(&mut rng, [rows as usize, cols as usize], R);
            let mut values = floats(info, &file);
            for (at, value) in values.iter_mut().enumerate() {
                let added = own.product(at / cols as usize, at % cols as usize) * f64::from(ALPHA) / R as f64;
                *value = (f64::from(*value) + added) as f32;
            }
            file[info.offset as usize..][..info.size_bytes as usize].copy_from_slice(bytemuck::cast_slice(&values));
            factors.push((format!("{}.lora_a", info.name), vec![R as u64, cols], own.a));
            factors.push((format!("{}.lora_b", info.name), vec![rows, R as u64], own.b));
        }
        std::fs::write(&merged, &file).unwrap();
        let adapter = AdapterFile::from_gguf_bytes(files::adapter(name, ALPHA, &factors)).unwrap();
        let ids: Vec<u32> = (0..14).map(|_| 3 + rng.below(290) as u32).collect();
        for device in devices() {
            let base = load(&device, &packed);
            let adapter = base.add_adapter(&adapter, 1.0).unwrap();
            let want = all_logits(&load(&device, &merged), &ids);
            let got = all_logits(&base.with_adapter(Some(&adapter)).unwrap(), &ids);
            assert_logits(&device, &got, &want[0], TOLERANCE, &format!("{name} in {block_type}"));
        }
    }
}

fn greedy(session: &mut tilewright::Session, ids: &[u32]) -> Vec<u32> {
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(12) };
    common::collect(&mut session.generate_from(ids, &options).unwrap()).0
}

/// Tokens of an engine's completion.
fn tokens_of(stream: &mut Stream) -> Result<Vec<u32>, Error> {
    let mut tokens = Vec::new();
    while let Some(piece) = block_on(stream.next()) {
        tokens.push(piece?.id);
    }
    Ok(tokens)
}

/// Requests of one session, each with another adapter or none, have the tokens and logits of separate sessions; from
/// the second round on nothing is compiled and no buffer is created.
#[test]
fn session_switches_adapters_and_keeps_logits_equal() {
    for device in devices_of_its_own(&[Tier::Subgroups, Tier::Scalar]) {
        let model = load(&device, &tiny("llama3-rope"));
        let adapters = ["llama3-rope", "llama3-rope-rs"].map(|name| model.load_adapter(adapter(name), 1.0).unwrap());
        let turns = [Some(&adapters[0]), None, Some(&adapters[1])];
        let ids: Vec<u32> = (20..33).collect();
        let alone = turns.map(|adapter| {
            let mut session = model.with_adapter(adapter).unwrap().session().unwrap();
            (greedy(&mut session, &ids), block_on(session.logits(&[5])).unwrap())
        });
        assert!(alone[0].0 != alone[1].0 && alone[1].0 != alone[2].0 && alone[0].0 != alone[2].0);
        let mut session = model.session().unwrap();
        let mut before = device.counters();
        for round in 0..3 {
            for (adapter, (tokens, logits)) in turns.iter().zip(&alone) {
                session.set_adapter(*adapter).unwrap();
                assert_eq!(session.adapter().map(Adapter::name), adapter.map(Adapter::name));
                assert_eq!(greedy(&mut session, &ids), *tokens, "round {round} on {}", of(&device));
                // Bit-identical: the same kernels on the same numbers.
                assert_eq!(block_on(session.logits(&[5])).unwrap(), *logits, "round {round}");
            }
            let done = device.counters() - before;
            if round > 0 {
                let made = (done.pipelines_created, done.bind_groups_created, done.bytes_allocated);
                assert_eq!(made, (0, 0, 0), "round {round} on {}", of(&device));
            }
            before = device.counters();
        }
        // Changing the adapter clears the cache; setting the current one does not.
        session.set_adapter(turns[0]).unwrap();
        block_on(session.logits(&ids)).unwrap();
        let before = device.counters();
        session.set_adapter(turns[0]).unwrap();
        block_on(session.logits(&[7])).unwrap();
        let kept = device.counters() - before;
        session.set_adapter(turns[2]).unwrap();
        let before = device.counters();
        block_on(session.logits(&[7])).unwrap();
        let changed = device.counters() - before;
        assert!(changed.dispatches > kept.dispatches, "{changed:?} {kept:?}");
        // A snapshot keeps its adapter.
        let snapshot = session.snapshot().unwrap();
        let want = block_on(session.logits(&[9])).unwrap();
        session.set_adapter(None).unwrap();
        session.restore(&snapshot).unwrap();
        assert_eq!(session.adapter().map(Adapter::name), Some("llama3-rope-rs"));
        assert_eq!(block_on(session.logits(&[9])).unwrap(), want);
        common::assert_tested(&device);
    }
}

/// Engine requests, each with its own adapter or none, have the tokens of sessions; cached prefixes are shared only
/// with requests of the same adapter.
#[test]
fn engine_requests_use_their_own_adapters() {
    for device in devices() {
        let model = load(&device, &tiny("llama3-rope"));
        let names = ["llama3-rope", "llama3-rope-rs"];
        let adapters = names.map(|name| (name.to_owned(), model.load_adapter(adapter(name), 1.0).unwrap()));
        let turns = [Some(&adapters[0].1), None, Some(&adapters[1].1)];
        // Longer than a page.
        let ids: Vec<u32> = (0..100).map(|i| 20 + i * 7 % 90).collect();
        let alone = turns.map(|adapter| greedy(&mut model.with_adapter(adapter).unwrap().session().unwrap(), &ids));
        assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[0] != alone[2]);
        let model = model.with_adapters(adapters).unwrap();
        assert_eq!(model.adapter_names().collect::<Vec<_>>(), names);
        let (engine, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
        for round in 0..2 {
            let requests = [Some(names[0]), None, Some(names[1])].map(|adapter| {
                let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(12) };
                Request { adapter: adapter.map(str::to_owned), ..Request::new(ids.clone(), options) }
            });
            let streams = [0, 1, 2, 0, 1].map(|i| (i, engine.submit(requests[i].clone()).unwrap()));
            while block_on(driver.step()).unwrap() {}
            for (nth, (i, mut stream)) in streams.into_iter().enumerate() {
                assert_eq!(
                    tokens_of(&mut stream).unwrap(),
                    alone[i],
                    "round {round}, request {nth} on {}",
                    of(&device)
                );
                // The first three begin before any page is computed.
                if round > 0 {
                    assert_eq!(stream.usage().cached_tokens, 64, "request {nth}");
                } else if nth < 3 {
                    assert_eq!(stream.usage().cached_tokens, 0, "request {nth}");
                }
            }
        }
        let unknown = Request { adapter: Some("other".into()), ..Request::new(ids, GenerateOptions::greedy(1)) };
        let refusal = engine.submit(unknown).err().expect("an unknown adapter").to_string();
        assert!(refusal.contains("other") && refusal.contains("`llama3-rope-rs`"), "{refusal}");
        common::assert_tested(&device);
    }
}

/// After a device loss, requests continue with the adapters of the reloaded model; only a request whose adapter is
/// missing ends with an error.
#[test]
fn adapters_are_found_by_name_after_device_loss() {
    let open = || block_on(Device::open(&DeviceChoice::Gpu, None));
    let Some(device) = common::gpu_from(open()) else { return };
    let names = ["llama3-rope", "llama3-rope-rs"];
    let (n_loads, current) = (Cell::new(0), RefCell::new(None));
    let load = |device: &Device| {
        current.replace(Some(device.clone()));
        let model = Model::load(device, tiny("llama3-rope"), LoadOptions { exact: true, ..LoadOptions::default() })?;
        // The second time reordered, the third time without the last.
        let of_load = [vec![names[0], names[1]], vec![names[1], names[0]], vec![names[0]]];
        let adapters = of_load[n_loads.get()].iter().map(|name| {
            let loaded = model.load_adapter(adapter(name), 1.0)?;
            Ok((name.to_string(), loaded))
        });
        let adapters = adapters.collect::<Result<Vec<_>, Error>>()?;
        n_loads.set(n_loads.get() + 1);
        model.with_adapters(adapters)
    };
    let mut recovery = Recovery::new(open, load, |_| ());
    let model = recovery.load(&device).unwrap();
    let request = |name: Option<&str>| {
        let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(24) };
        Request { adapter: name.map(str::to_owned), ..Request::new((20..60).collect(), options) }
    };
    let requests = [None, Some(names[0]), Some(names[1])].map(request);
    let whole = requests.each_ref().map(|request| {
        let (engine, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
        let mut stream = engine.submit(request.clone()).unwrap();
        while block_on(driver.step()).unwrap() {}
        tokens_of(&mut stream).unwrap()
    });
    assert!(whole[0] != whole[1] && whole[1] != whole[2] && whole[0] != whole[2]);
    let (engine, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
    let streams = requests.map(|request| engine.submit(request).unwrap());
    for _ in 0..2 {
        for _ in 0..9 {
            block_on(driver.step_with(&mut recovery)).unwrap();
        }
        current.borrow().as_ref().unwrap().destroy();
    }
    while block_on(driver.step_with(&mut recovery)).unwrap() {}
    let [plain, first, last] = streams.map(|mut stream| tokens_of(&mut stream));
    assert_eq!((plain.unwrap(), first.unwrap()), (whole[0].clone(), whole[1].clone()));
    assert!(matches!(last, Err(Error::Option { option: "adapter", .. })), "{last:?}");
    assert_eq!((n_loads.get(), engine.stats().n_failed), (3, 1));
}

/// One dispatch per input of adapted products: four in a layer where all are adapted: for queries, keys and values;
/// attention's output; gates and ups; the feed-forward's output. Without an adapter nothing changes, whatever is
/// resident.
#[test]
fn adapter_adds_one_dispatch_per_adapted_input() {
    for device in devices_of_its_own(&[Tier::Subgroups, Tier::Baseline, Tier::Scalar]) {
        // Adapters of all inputs, and of two per layer.
        for (name, base, n_inputs) in [
            ("llama3-rope", "llama3-rope", 4),
            ("llama3-rope-rs", "llama3-rope", 2),
            ("qwen2", "qwen2", 4),
            ("gemma3", "gemma3", 3),
        ] {
            let model = load(&device, &tiny(base));
            let mut session = model.session().unwrap();
            let (without, ids) = (session.decode_dispatches(), (20..33).collect::<Vec<u32>>());
            let logits = block_on(session.logits(&ids)).unwrap();
            let prompt = |session: &mut tilewright::Session| {
                session.clear();
                let before = device.counters();
                let logits = block_on(session.logits(&ids)).unwrap();
                (logits, (device.counters() - before).dispatches)
            };
            let (_, of_prompt) = prompt(&mut session);
            let adapter = model.load_adapter(adapter(name), 1.0).unwrap();
            let (same, dispatches) = prompt(&mut model.session().unwrap());
            assert_eq!((same, dispatches), (logits, of_prompt), "{name} on {}", of(&device));
            session.set_adapter(Some(&adapter)).unwrap();
            let n_layers = model.config().n_layers() as usize;
            let what = format!("{name} on {}", of(&device));
            let added = session.decode_dispatches() - without;
            // The first run tests pipelines.
            prompt(&mut session);
            let (_, with) = prompt(&mut session);
            println!(
                "{what}: {without} dispatches and {added} for {n_layers} layers, in a prompt {of_prompt} and {}",
                with - of_prompt
            );
            assert_eq!(added, n_inputs * n_layers, "{what}");
            assert_eq!(with - of_prompt, 2 * (n_inputs * n_layers) as u64, "{what}");
            session.set_adapter(None).unwrap();
            assert_eq!(session.decode_dispatches(), without);
        }
    }
}

/// The scale multiplies the addend: 0 removes it, -1 negates it.
#[test]
fn lora_scale_multiplies_the_added_product() {
    let model = load(&common::cpu(), &tiny("qwen2"));
    let ids: Vec<u32> = (30..44).collect();
    let logits = |scale: f32| {
        let adapter = model.load_adapter(adapter("qwen2"), scale).unwrap();
        block_on(model.with_adapter(Some(&adapter)).unwrap().trace(&ids)).unwrap().logits
    };
    let plain = block_on(model.trace(&ids)).unwrap().logits;
    assert!(largest_difference(&logits(0.0), &plain) < TOLERANCE);
    // Small scales act nearly linearly.
    let [up, down] = [0.001, -0.001].map(logits);
    let bend = up.iter().zip(&down).zip(&plain).map(|((up, down), plain)| ((up + down) / 2.0 - plain).abs());
    let moved = largest_difference(&up, &plain);
    assert!(moved > 1e-3 && bend.fold(0.0, f32::max) < moved / 10.0);
    assert!(matches!(model.load_adapter(adapter("qwen2"), f32::NAN), Err(Error::Option { option: "scale", .. })));
}

/// The plan counts the adapter in use, the limit all resident ones.
#[test]
fn adapter_memory_is_planned_and_limited() {
    for device in devices_of_its_own(&[Tier::Subgroups]) {
        let path = tiny("llama3-rope");
        let model = load(&device, &path);
        let own = model.load_adapter(adapter("llama3-rope"), 1.0).unwrap();
        assert_eq!(model.adapters_bytes(), own.size_bytes());
        let with = model.with_adapter(Some(&own)).unwrap();
        assert_eq!(with.plan().weights_bytes, model.plan().weights_bytes + own.size_bytes());
        let mut session = model.session().unwrap();
        assert_eq!(session.plan(), model.plan());
        session.set_adapter(Some(&own)).unwrap();
        assert_eq!(session.plan().weights_bytes, with.plan().weights_bytes);

        let limit = model.plan().total_bytes() + own.size_bytes() + own.size_bytes() / 2;
        let options =
            LoadOptions { kv_type: KvType::F32, exact: true, memory_limit: Some(limit), ..LoadOptions::default() };
        let limited = Model::load(&device, &path, options).unwrap();
        let first = limited.load_adapter(adapter("llama3-rope"), 1.0).unwrap();
        let before = device.counters();
        let Err(Error::Memory { limit_bytes, .. }) = limited.load_adapter(adapter("llama3-rope.gguf"), 1.0) else {
            panic!("a second one does not fit");
        };
        assert_eq!((limit_bytes, (device.counters() - before).bytes_allocated), (limit, 0));
        assert_eq!(limited.adapters_bytes(), first.size_bytes());
        drop(first);
        assert_eq!(limited.adapters_bytes(), 0);
        limited.load_adapter(adapter("llama3-rope.gguf"), 1.0).unwrap();
    }
}

/// Handles of another model, moved sessions, and session files.
#[test]
fn adapter_of_another_model_is_refused() {
    let (device, path) = (common::cpu(), tiny("llama3-rope"));
    let [model, other] = [load(&device, &path), load(&device, &path)];
    let own = model.load_adapter(adapter("llama3-rope"), 1.0).unwrap();
    assert!(matches!(other.with_adapter(Some(&own)), Err(Error::Operand { operand: "adapter", .. })));
    let mut session = other.session().unwrap();
    assert!(matches!(session.set_adapter(Some(&own)), Err(Error::Operand { operand: "adapter", .. })));
    // A session file names its adapter.
    let mut session = model.with_adapter(Some(&own)).unwrap().session().unwrap();
    block_on(session.logits(&[5, 6, 7])).unwrap();
    let file = block_on(session.to_bytes("a note")).unwrap();
    let want = block_on(session.logits(&[9])).unwrap();
    let again = other.load_adapter(adapter("llama3-rope"), 1.0).unwrap();
    let half = other.load_adapter(adapter("llama3-rope"), 0.5).unwrap();
    let mut session = other.session().unwrap();
    for wrong in [None, Some(&half)] {
        session.set_adapter(wrong).unwrap();
        assert!(matches!(session.restore_bytes(&file), Err(Error::Format { .. })));
    }
    session.set_adapter(Some(&again)).unwrap();
    assert_eq!(session.restore_bytes(&file).unwrap(), "a note");
    assert_eq!(block_on(session.logits(&[9])).unwrap(), want);
}

/// Shapes and values by name.
type Tensors = BTreeMap<String, (Vec<u64>, Vec<f32>)>;

/// An `adapter_config.json` and an `adapter_model.safetensors`.
type Peft = (Vec<u8>, Vec<u8>);

/// An invalid adapter is refused early by the name of its fault, and leaves nothing behind.
#[test]
fn hostile_adapters_are_refused_by_name() {
    let model = load(&common::cpu(), &tiny("llama3-rope"));
    let read = |name: &str| std::fs::read(adapter("llama3-rope").join(name)).unwrap();
    let (config, weights) = (read("adapter_config.json"), read("adapter_model.safetensors"));
    let header = Safetensors::parse(&weights, weights.len() as u64).unwrap();
    let tensors: Tensors =
        header.tensors.iter().map(|info| (info.name.clone(), (info.shape.clone(), floats(info, &weights)))).collect();
    const Q: &str = "base_model.model.model.layers.1.self_attn.q_proj";
    let [q_a, q_b] = ["lora_A", "lora_B"].map(|factor| format!("{Q}.{factor}.weight"));
    let file = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = tensors.clone();
        change(&mut tensors);
        let tensors: Vec<_> = tensors.into_iter().map(|(name, (shape, values))| (name, shape, values)).collect();
        safetensors(&tensors)
    };
    let config_with = |key: &str, value: Value| {
        let mut config: serde_json::Map<String, Value> = serde_json::from_slice(&config).unwrap();
        config.insert(key.into(), value);
        serde_json::to_vec(&config).unwrap()
    };
    let renamed = |from: &str, to: &str| {
        file(&|tensors| {
            for factor in ["lora_A.weight", "lora_B.weight"] {
                let values = tensors.remove(&format!("{Q}.{factor}")).unwrap();
                tensors.insert(format!("{}.{factor}", Q.replace(from, to)), values);
            }
        })
    };
    let twice = |to: &str| {
        file(&|tensors| {
            for factor in ["lora_A.weight", "lora_B.weight"] {
                let values = tensors[&format!("{Q}.{factor}")].clone();
                tensors.insert(format!("{to}.{factor}"), values);
            }
        })
    };
    let with_config = |key: &str, value| (config_with(key, value), weights.clone());
    let with_file = |file| (config.clone(), file);
    let peft: Vec<(&str, Peft)> = vec![
        ("modules_to_save", with_config("modules_to_save", json!(["lm_head"]))),
        ("use_dora", with_config("use_dora", json!(true))),
        ("lora_bias", with_config("lora_bias", json!(true))),
        ("bias", with_config("bias", json!("all"))),
        ("init_lora_weights", with_config("init_lora_weights", json!("pissa_niter_4"))),
        ("peft_type", with_config("peft_type", json!("LOHA"))),
        ("layer_replication", with_config("layer_replication", json!([[0, 2], [1, 0]]))),
        ("target_parameters", with_config("target_parameters", json!(["mlp.experts.down_proj"]))),
        ("trainable_token_indices", with_config("trainable_token_indices", json!([1]))),
        ("alora_invocation_tokens", with_config("alora_invocation_tokens", json!([1, 2]))),
        ("something_new", with_config("something_new", json!({ "on": 1 }))),
        ("r", with_config("r", json!(0))),
        ("r", with_config("r", json!(-4))),
        ("r", with_config("r", json!("4"))),
        ("r of `model.layers.0", with_config("r", json!(5))),
        ("lora_alpha", with_config("lora_alpha", json!(null))),
        ("lora_alpha", with_config("lora_alpha", json!(1e300))),
        ("use_rslora", with_config("use_rslora", json!("yes"))),
        ("alpha_pattern", with_config("alpha_pattern", json!([1]))),
        ("alpha_pattern.q_proj", with_config("alpha_pattern", json!({ "q_proj": "much" }))),
        ("alpha_pattern.(a+)+$", with_config("alpha_pattern", json!({ "(a+)+$": 1 }))),
        ("rank_pattern.q_proj", with_config("rank_pattern", json!({ "q_proj": [1] }))),
        ("file", (b"[".to_vec(), weights.clone())),
        // A layer, matrix or part that does not exist or cannot be adapted.
        ("layers.99.", with_file(renamed("layers.1.", "layers.99."))),
        ("q_projection", with_file(renamed("q_proj", "q_projection"))),
        ("lm_head", with_file(renamed("model.layers.1.self_attn.q_proj", "lm_head"))),
        ("embed_tokens", with_file(renamed("layers.1.self_attn.q_proj", "embed_tokens"))),
        ("input_layernorm", with_file(renamed("self_attn.q_proj", "input_layernorm"))),
        ("experts", with_file(renamed("self_attn.q_proj", "mlp.experts.3.down_proj"))),
        // Nested factors, and the same matrix under two names.
        ("lora_A.lora_A", with_file(twice(&format!("{Q}.lora_A")))),
        ("lora_B.weight.lora_", with_file(twice(&format!("{Q}.lora_B.weight")))),
        ("a duplicate", with_file(twice("base_model.model.layers.1.self_attn.q_proj"))),
        ("q_proj.lora_A.weight is without its pair", with_file(file(&|tensors| drop(tensors.remove(&q_b))))),
        ("q_proj.lora_B.weight is without its pair", with_file(file(&|tensors| drop(tensors.remove(&q_a))))),
        (
            "lora_magnitude_vector",
            with_file(file(&|tensors| {
                tensors.insert(format!("{Q}.lora_magnitude_vector.weight"), (vec![128], vec![1.0; 128]));
            })),
        ),
        (
            "another_model",
            with_file(file(&|tensors| drop(tensors.insert("another_model".into(), (vec![1], vec![1.0]))))),
        ),
        // Shapes.
        ("q_proj.lora_B.weight", with_file(file(&|tensors| tensors.get_mut(&q_b).unwrap().0.reverse()))),
        (
            "q_proj.lora_A.weight",
            with_file(file(&|tensors| {
                *tensors.get_mut(&q_a).unwrap() = (vec![4, 32], vec![0.0; 128]);
            })),
        ),
        (
            "q_proj.lora_B.weight",
            with_file(file(&|tensors| {
                *tensors.get_mut(&q_b).unwrap() = (vec![64, 4], vec![0.0; 256]);
            })),
        ),
        ("q_proj.lora_B.weight", with_file(file(&|tensors| tensors.get_mut(&q_b).unwrap().0 = vec![512]))),
        ("q_proj.lora_A.weight", with_file(file(&|tensors| tensors.get_mut(&q_a).unwrap().1[77] = f32::NAN))),
        ("q_proj.lora_B.weight", with_file(file(&|tensors| tensors.get_mut(&q_b).unwrap().1[0] = f32::INFINITY))),
        ("tensors", with_file(safetensors(&[]))),
        ("", with_file(weights[..weights.len() - 1].to_vec())),
        ("", with_file(weights[..100].to_vec())),
        ("", with_file(Vec::new())),
    ];
    let other = |name: &str| {
        let read = |file: &str| std::fs::read(adapter(name).join(file)).unwrap();
        (read("adapter_config.json"), read("adapter_model.safetensors"))
    };
    let others = ["qwen2", "qwen3", "gemma3", "phi3"].map(|name| ("base_model.model.model.layers", other(name)));
    let mut found = 0;
    let mut check = |named: &str, read: &dyn Fn() -> Result<AdapterFile, Error>| {
        let start = Instant::now();
        let error = read().and_then(|file| model.add_adapter(&file, 1.0).map(drop)).expect_err(named);
        println!("{:.1} ms: {named}", start.elapsed().as_secs_f64() * 1e3);
        let text = error.to_string();
        assert!(text.contains(named), "`{named}` is not in: {text}");
        assert!(matches!(error.code(), "adapter" | "config" | "format" | "unsupported"), "{text}");
        assert_eq!(model.adapters_bytes(), 0, "{named}");
        found += 1;
    };
    for (named, (config, weights)) in peft.into_iter().chain(others) {
        check(named, &|| AdapterFile::from_peft_bytes(&config, weights.clone()));
    }

    let file = std::fs::read(adapter("llama3-rope.gguf")).unwrap();
    let factors = |name: &str| {
        [("lora_a", vec![4u64, 64], 256), ("lora_b", vec![128, 4], 512)]
            .map(|(factor, shape, n)| (format!("{name}.{factor}"), shape, vec![0.5f32; n]))
    };
    let keys = [("general.type", "adapter"), ("general.architecture", "llama"), ("adapter.type", "lora")];
    let with_key = |at: usize, text: &'static str| {
        let mut keys = keys;
        keys[at].1 = text;
        files::adapter_with(&keys, Some(1.0), &factors("blk.0.attn_q.weight"))
    };
    let of = |name: &str| files::adapter("llama", 1.0, &factors(name));
    let model_file = std::fs::read(tiny("llama3-rope/model-f16.gguf")).unwrap();
    let swapped = factors("blk.0.attn_q.weight").map(|(name, shape, values)| {
        (name.replace("lora_a", "lora_c").replace("lora_b", "lora_a").replace("lora_c", "lora_b"), shape, values)
    });
    let ggufs: Vec<(&str, Vec<u8>)> = vec![
        ("general.type", with_key(0, "model")),
        ("general.type", model_file),
        ("general.architecture", with_key(1, "qwen2")),
        ("general.architecture", files::adapter_with(&[keys[0], keys[2]], Some(1.0), &factors("blk.0.attn_q.weight"))),
        ("adapter.type", with_key(2, "control_vector")),
        ("adapter.lora.alpha", files::adapter("llama", f32::NAN, &factors("blk.0.attn_q.weight"))),
        ("adapter.lora.alpha", files::adapter("llama", f32::INFINITY, &factors("blk.0.attn_q.weight"))),
        ("blk.9.attn_q.weight", of("blk.9.attn_q.weight")),
        ("blk.01.attn_q.weight", of("blk.01.attn_q.weight")),
        ("blk.0.attn_q.lora_a", of("blk.0.attn_q")),
        ("blk.0.attn_norm.weight", of("blk.0.attn_norm.weight")),
        ("token_embd.weight", of("token_embd.weight")),
        ("output.weight", of("output.weight")),
        ("blk.0.ffn_gate_exps.weight", of("blk.0.ffn_gate_exps.weight")),
        ("blk.0.attn_q.weight.lora_a.weight", of("blk.0.attn_q.weight.lora_a.weight")),
        ("blk.0.attn_q.weight.lora_b", files::adapter("llama", 1.0, &swapped)),
        (
            "blk.0.attn_output_norm",
            files::adapter("llama", 1.0, &[("blk.0.attn_output_norm.weight".into(), vec![64], vec![1.0; 64])]),
        ),
        ("blk.0.ffn_down.weight", of("blk.0.ffn_down.weight")),
        ("without its pair", files::adapter("llama", 1.0, &factors("blk.0.attn_q.weight")[..1])),
        ("tensors", files::adapter("llama", 1.0, &[])),
        ("", file[..file.len() / 2].to_vec()),
        ("", file[..60].to_vec()),
    ];
    for (named, bytes) in ggufs {
        check(named, &|| AdapterFile::from_gguf_bytes(bytes.clone()));
    }
    assert_eq!(found, 72);
    // The error names the file, even a missing one.
    for path in [adapter("README.md"), adapter("nothing"), adapter("llama3-rope-rs/nothing.gguf"), tiny("llama3-rope")]
    {
        let error = model.load_adapter(&path, 1.0).err().unwrap().to_string();
        assert!(error.contains("llama3-rope") || error.contains("nothing") || error.contains("README"), "{error}");
    }
}
