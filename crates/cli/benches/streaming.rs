//! Offloading: models larger than memory. Experts: a mixture of 0.9 GB in a third of that, tokens per second with an
//! expert cache against whole layers, on the CPU and the first adapter. Layers: a model of 4 GB, tokens, memory and
//! times of the command line with all layers on the CPU, within a limit, and with half of the layers on the first
//! adapter.
//!
//! `-- experts` and `-- layers` select one of the two. Random weights predict little about a trained router: choices
//! are near uniform over tokens, but repeated tokens choose the same experts again. So the hit rate is this text's,
//! and the bytes per token for equally likely experts are printed too.
//!
//! Weights are random, written as a GGUF file of Q8_0 under `target/tmp` and removed at the end. `cargo bench --bench
//! streaming -- 8` makes the file an eighth as large. Peak memory is the process's `VmHWM`, so on Linux only.

#[path = "../../../benches/common/mod.rs"]
mod common;

use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tilewright::{Device, DeviceChoice, Error, GenerateOptions, LoadOptions, Model};

const DIM: usize = 4096;
const FFN_DIM: usize = 11008;
const N_LAYERS: usize = 18;
const N_HEADS: usize = 32;
const VOCAB_SIZE: usize = 8192;

/// The mixture: width, layers, experts per layer and per token, and their width.
const MIXTURE: [usize; 5] = [1024, 24, 64, 8, 192];
/// Width of the mixture's heads, one of which has keys and values.
const HEAD_DIM: usize = 128;

/// The model's kind: a dense one by its number of layers, or the mixture.
#[derive(Clone, Copy)]
enum Kind {
    Layers(usize),
    Mixture,
}

impl Kind {
    fn architecture(self) -> &'static str {
        match self {
            Kind::Layers(_) => "llama",
            Kind::Mixture => "olmoe",
        }
    }

    fn tensors(self) -> Vec<(String, usize, usize, bool)> {
        match self {
            Kind::Layers(n_layers) => tensors(n_layers),
            Kind::Mixture => mixture(),
        }
    }

    fn numbers(self) -> Vec<(&'static str, usize)> {
        let [dim, n_layers, ffn_dim, n_heads] = match self {
            Kind::Layers(n_layers) => [DIM, n_layers, FFN_DIM, N_HEADS],
            Kind::Mixture => [MIXTURE[0], MIXTURE[1], MIXTURE[4], MIXTURE[0] / HEAD_DIM],
        };
        let mut numbers = vec![
            ("block_count", n_layers),
            ("context_length", 4096),
            ("embedding_length", dim),
            ("feed_forward_length", ffn_dim),
            ("attention.head_count", n_heads),
        ];
        if let Kind::Mixture = self {
            let experts = [("expert_count", MIXTURE[2]), ("expert_used_count", MIXTURE[3])];
            numbers.extend(experts.into_iter().chain([("attention.head_count_kv", 1)]));
        }
        numbers
    }
}

/// The mixture's tensors.
fn mixture() -> Vec<(String, usize, usize, bool)> {
    let [dim, n_layers, n_experts, _, ffn_dim] = MIXTURE;
    let mut all = vec![
        ("token_embd.weight".into(), VOCAB_SIZE, dim, true),
        ("output.weight".into(), VOCAB_SIZE, dim, true),
        ("output_norm.weight".into(), 1, dim, false),
    ];
    for l in 0..n_layers {
        let tensor = |name: &str, rows, cols, is_matrix| (format!("blk.{l}.{name}.weight"), rows, cols, is_matrix);
        all.extend([
            tensor("attn_norm", 1, dim, false),
            tensor("attn_q", dim, dim, true),
            tensor("attn_k", HEAD_DIM, dim, true),
            tensor("attn_v", HEAD_DIM, dim, true),
            tensor("attn_q_norm", 1, dim, false),
            tensor("attn_k_norm", 1, HEAD_DIM, false),
            tensor("attn_output", dim, dim, true),
            tensor("ffn_norm", 1, dim, false),
            tensor("ffn_gate_inp", n_experts, dim, true),
            tensor("ffn_gate_exps", n_experts * ffn_dim, dim, true),
            tensor("ffn_up_exps", n_experts * ffn_dim, dim, true),
            tensor("ffn_down_exps", n_experts * dim, ffn_dim, true),
        ]);
    }
    all
}

/// The file's tensors: name, rows, columns, and whether Q8_0 rather than F32.
fn tensors(n_layers: usize) -> Vec<(String, usize, usize, bool)> {
    let mut all = vec![
        ("token_embd.weight".into(), VOCAB_SIZE, DIM, true),
        ("output.weight".into(), VOCAB_SIZE, DIM, true),
        ("output_norm.weight".into(), 1, DIM, false),
    ];
    for l in 0..n_layers {
        let tensor = |name: &str, rows, cols, is_matrix| (format!("blk.{l}.{name}.weight"), rows, cols, is_matrix);
        all.extend([
            tensor("attn_norm", 1, DIM, false),
            tensor("attn_q", DIM, DIM, true),
            tensor("attn_k", DIM, DIM, true),
            tensor("attn_v", DIM, DIM, true),
            tensor("attn_output", DIM, DIM, true),
            tensor("ffn_norm", 1, DIM, false),
            tensor("ffn_gate", FFN_DIM, DIM, true),
            tensor("ffn_up", FFN_DIM, DIM, true),
            tensor("ffn_down", DIM, FFN_DIM, true),
        ]);
    }
    all
}

fn size_bytes(rows: usize, cols: usize, is_matrix: bool) -> u64 {
    (rows * if is_matrix { cols / 32 * 34 } else { 4 * cols }) as u64
}

/// A model file, removed on drop.
struct RandomModel(PathBuf);

impl RandomModel {
    fn write(kind: Kind) -> std::io::Result<RandomModel> {
        let name = kind.architecture();
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("random-{name}-{}.gguf", std::process::id()));
        let model = RandomModel(path);
        let mut file = BufWriter::with_capacity(1 << 20, File::create(&model.0)?);
        let tensors = kind.tensors();
        let mut head: Vec<u8> = b"GGUF".to_vec();
        head.extend(3u32.to_le_bytes());
        head.extend((tensors.len() as u64).to_le_bytes());
        let numbers = kind.numbers();
        head.extend((numbers.len() as u64 + 2).to_le_bytes());
        let text = |head: &mut Vec<u8>, text: &str| {
            head.extend((text.len() as u64).to_le_bytes());
            head.extend(text.as_bytes());
        };
        text(&mut head, "general.architecture");
        head.extend(8u32.to_le_bytes());
        text(&mut head, name);
        for (key, number) in numbers {
            text(&mut head, &format!("{name}.{key}"));
            head.extend(4u32.to_le_bytes());
            head.extend((number as u32).to_le_bytes());
        }
        text(&mut head, &format!("{name}.attention.layer_norm_rms_epsilon"));
        head.extend(6u32.to_le_bytes());
        head.extend(1e-5f32.to_le_bytes());
        let mut offset = 0u64;
        for (name, rows, cols, is_matrix) in &tensors {
            text(&mut head, name);
            let dims = match (is_matrix, name.contains("_exps.")) {
                (false, _) => vec![*cols],
                (true, false) => vec![*cols, *rows],
                (true, true) => vec![*cols, *rows / MIXTURE[2], MIXTURE[2]],
            };
            head.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|&dim| head.extend((dim as u64).to_le_bytes()));
            head.extend(if *is_matrix { 8u32 } else { 0 }.to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset += size_bytes(*rows, *cols, *is_matrix).next_multiple_of(32);
        }
        head.resize(head.len().next_multiple_of(32), 0);
        file.write_all(&head)?;
        let mut words = common::words(usize::MAX);
        for (name, rows, cols, is_matrix) in tensors {
            let mut bytes = Vec::with_capacity(size_bytes(rows, cols, is_matrix) as usize);
            if is_matrix {
                // Signed bytes have a root mean square of 74: this scale keeps the magnitude of a row's input.
                let scale = 1.0 / (74.0 * (cols as f32).sqrt());
                // A mixture's embeddings have the magnitude of the layers' outputs: otherwise the sum that attention
                // adds over all tokens would choose the same experts for each.
                let is_token = matches!(kind, Kind::Mixture) && name == "token_embd.weight";
                let scale = half::f16::from_f32(if is_token { 1.0 / 74.0 } else { scale }).to_le_bytes();
                for _ in 0..rows * cols / 32 {
                    bytes.extend(scale);
                    bytes.extend(words.by_ref().take(8).flat_map(u32::to_le_bytes));
                }
            } else {
                bytes.extend(std::iter::repeat_n(1f32.to_le_bytes(), cols).flatten());
            }
            bytes.resize(bytes.len().next_multiple_of(32), 0);
            file.write_all(&bytes)?;
        }
        file.flush()?;
        Ok(model)
    }
}

impl Drop for RandomModel {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Output and peak memory of a run of the command line.
fn run(model: &RandomModel, options: &[&str]) -> Result<(Value, Option<u64>), String> {
    let prompt: Vec<String> = common::words(24).map(|word| (word as usize % VOCAB_SIZE).to_string()).collect();
    let mut child = Command::new(env!("CARGO_BIN_EXE_tilewright"))
        .arg("run")
        .arg(&model.0)
        .args([
            "--prompt-ids",
            &prompt.join(","),
            "-n",
            "16",
            // So that no token repeats.
            "--repeat-penalty",
            "2",
            "--temperature",
            "0",
            "--ctx",
            "512",
            "--json",
            "--ignore-eos",
        ])
        .args(options)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let mut peak = None;
    let status = loop {
        peak = peak_bytes(child.id()).or(peak);
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let mut texts = [String::new(), String::new()];
    let _ = child.stdout.take().map(|mut out| out.read_to_string(&mut texts[0]));
    let _ = child.stderr.take().map(|mut out| out.read_to_string(&mut texts[1]));
    if !status.success() {
        return Err(format!("{status}: {}", texts[1]));
    }
    let told = serde_json::from_str(&texts[0]).map_err(|error| error.to_string())?;
    Ok((told, peak))
}

fn peak_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kb| 1024 * kb)
}

/// Decodes a mixture in a third of the memory that it needs, by whole layers and by cached experts.
fn experts(device: &Device) -> Result<(), Error> {
    const N_TOKENS: usize = 64;
    let path = RandomModel::write(Kind::Mixture).expect("target/tmp is writable");
    let [_, n_layers, n_experts, n_used, _] = MIXTURE;
    let load = |memory_limit, whole_layers| {
        let options = LoadOptions {
            context_length: Some(512),
            max_pass: Some(32),
            stream_layers: true,
            memory_limit,
            whole_layers,
            ..LoadOptions::default()
        };
        Model::load(device, &path.0, options)
    };
    let info = device.info();
    println!("{n_layers} layers of {n_experts} experts, {n_used} per token, on {} ({})", info.name, info.backend);
    let needed = load(None, false)?.plan().total_bytes();
    let mut rates = Vec::new();
    let mut texts: Vec<Vec<u32>> = Vec::new();
    for (name, limit, whole_layers) in
        [("all of it", None, false), ("whole layers", Some(needed / 3), true), ("experts", Some(needed / 3), false)]
    {
        let model = load(limit, whole_layers)?;
        let mut session = model.session()?;
        let prompt: Vec<u32> = common::words(32).map(|word| word % VOCAB_SIZE as u32).collect();
        // So that no token repeats.
        let options = GenerateOptions { ignore_eos: true, repeat_penalty: 2.0, ..GenerateOptions::greedy(N_TOKENS) };
        let mut ids = Vec::new();
        let mut generation = session.generate_ids(&prompt, &options)?;
        // Bytes read by the prompt count separately.
        let mut first = None;
        while let Some(piece) = pollster::block_on(generation.next()) {
            ids.push(piece?.id);
            first = first.or_else(|| Some(model.streaming()));
        }
        let (prefill, decode) = (generation.prefill().rate(), generation.decode().rate());
        let memory = model.plan().total_bytes() as f64 / 1e9;
        println!("{name}: {memory:.3} GB planned; prefill {prefill:.2} tokens/s, decode {decode:.3} tokens/s");
        if let (Some(after), Some(Some(before))) = (model.streaming(), first) {
            let read_bytes = (after.read_bytes - before.read_bytes) as f64 / (N_TOKENS - 1) as f64;
            println!("    {:.1} MB read per token", read_bytes / 1e6);
            if let Some(experts) = after.experts {
                let kept = experts.n_kept as f64 / experts.n_experts as f64;
                let of_expert = after.streamed_bytes as f64 / experts.n_experts as f64;
                println!(
                    "    {} of {} experts cached; {:.1} % hits of {} choices; if equally likely, {:.1} MB per token",
                    experts.n_kept,
                    experts.n_experts,
                    100.0 * after.hit_rate(),
                    experts.n_chosen,
                    (n_layers * n_used) as f64 * (1.0 - kept) * of_expert / 1e6
                );
            }
        }
        rates.push(decode);
        texts.push(ids);
    }
    println!(
        "expert cache against whole layers: {:.2} times the tokens/s; against all in memory: {:.2}",
        rates[2] / rates[1],
        rates[2] / rates[0]
    );
    assert!(texts.iter().all(|text| *text == texts[0]), "the same tokens in all three");
    Ok(())
}

fn main() {
    let wants = |part: &str| {
        let parts: Vec<String> =
            std::env::args().filter(|argument| ["experts", "layers"].contains(&argument.as_str())).collect();
        parts.is_empty() || parts.iter().any(|wanted| wanted == part)
    };
    if wants("experts") {
        let gpu = pollster::block_on(Device::open(&DeviceChoice::Gpu, None));
        let cpu = pollster::block_on(Device::open(&DeviceChoice::Cpu, None));
        for device in [cpu, gpu] {
            if let Err(error) = device.and_then(|device| experts(&device)) {
                println!("skipped: {error}");
            }
        }
    }
    if wants("layers") {
        layers();
    }
}

fn layers() {
    let parts: u64 = std::env::args().filter_map(|argument| argument.parse().ok()).next().unwrap_or(1);
    let n_layers = (N_LAYERS / parts as usize).max(4);
    let model = RandomModel::write(Kind::Layers(n_layers)).expect("target/tmp is writable");
    let bytes = fs::metadata(&model.0).expect("just written").len();
    println!("{n_layers} layers, {:.2} GB of Q8_0; 24 prompt tokens, 16 generated", bytes as f64 / 1e9);
    let limit = (1 << 30) / parts.min(2);
    let limit_text = limit.to_string();
    let half = (n_layers / 2).to_string();
    let cases: [(&str, Vec<&str>); 4] = [
        ("cpu", vec!["--device", "cpu"]),
        ("cpu, limited", vec!["--device", "cpu", "--memory-limit", &limit_text]),
        ("cpu, exact", vec!["--device", "cpu", "--exact"]),
        ("half of the layers on the adapter, exact", vec!["--device", "gpu", "--gpu-layers", &half, "--exact"]),
    ];
    let mut tokens: Vec<Value> = Vec::new();
    for (name, options) in &cases {
        let (told, peak) = match run(&model, options) {
            Ok(told) => told,
            Err(error) => {
                println!("{name}: skipped: {error}");
                tokens.push(Value::Null);
                continue;
            }
        };
        let rate =
            |part: &str| told[part]["tokens"].as_f64().unwrap_or(0.0) / told[part]["seconds"].as_f64().unwrap_or(1.0);
        println!("{name}: prefill {:.2} tokens/s, decode {:.3} tokens/s", rate("prefill"), rate("decode"));
        if let Some(peak) = peak {
            println!("    peak memory {:.3} GB", peak as f64 / 1e9);
        }
        let streaming = &told["streaming"];
        if streaming.is_object() {
            let number = |key: &str| streaming[key].as_f64().unwrap_or(0.0);
            let seconds = |key: &str| {
                streaming[key]["secs"].as_f64().unwrap_or(0.0) + streaming[key]["nanos"].as_f64().unwrap_or(0.0) / 1e9
            };
            println!(
                "    {} of {} layers read per pass, {:.1} % of bytes stay; {} reads in {:.1} s, {:.0} % overlapped",
                number("n_streamed"),
                number("n_layers"),
                100.0 * (1.0 - number("streamed_bytes") / number("layers_bytes")),
                number("n_read"),
                seconds("reading"),
                100.0 * (1.0 - seconds("waiting") / seconds("reading").max(1e-9)),
            );
            let peak = peak.unwrap_or(0) as f64;
            println!("    {:.1} % of the limit of {:.3} GB", 100.0 * peak / limit as f64, limit as f64 / 1e9);
            assert!(peak <= 1.1 * limit as f64, "more memory than the limit and a tenth");
        }
        tokens.push(told["token_ids"].clone());
    }
    println!("tokens: {}", tokens[0]);
    assert_eq!(tokens[1], tokens[0], "the same tokens within a limit");
    if tokens[3] != Value::Null {
        assert_eq!(tokens[3], tokens[2], "the same tokens with half of the layers on the adapter");
    }
    println!("the same tokens in all cases that are to be compared");
}
