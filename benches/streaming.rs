//! A model of 4 GB whose layers are not all in the memory of one device: tokens, memory and times of the command line, with
//! all of it on the CPU, within a limit, and with half of the layers on the first adapter.
//!
//! Weights are random, written as a GGUF file of Q8_0 under `target/tmp`, which is removed at the end. `cargo bench --bench
//! streaming -- 8` makes it an eighth as large. Peaks of memory are the kernel's (`VmHWM`), of all of a process, and so there
//! on Linux alone.

mod common;

use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

const DIM: usize = 4096;
const FFN_DIM: usize = 11008;
const N_LAYERS: usize = 18;
const N_HEADS: usize = 32;
const VOCAB_SIZE: usize = 8192;

/// What the file's tensors are: name, rows, columns, and whether they are of Q8_0, or else of F32.
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

/// A model file, which is removed with it.
struct RandomModel(PathBuf);

impl RandomModel {
    fn write(n_layers: usize) -> std::io::Result<RandomModel> {
        let path =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("random-{n_layers}-{}.gguf", std::process::id()));
        let model = RandomModel(path);
        let mut file = BufWriter::with_capacity(1 << 20, File::create(&model.0)?);
        let tensors = tensors(n_layers);
        let mut head: Vec<u8> = b"GGUF".to_vec();
        head.extend(3u32.to_le_bytes());
        head.extend((tensors.len() as u64).to_le_bytes());
        let numbers = [
            ("block_count", n_layers),
            ("context_length", 4096),
            ("embedding_length", DIM),
            ("feed_forward_length", FFN_DIM),
            ("attention.head_count", N_HEADS),
        ];
        head.extend((numbers.len() as u64 + 2).to_le_bytes());
        let text = |head: &mut Vec<u8>, text: &str| {
            head.extend((text.len() as u64).to_le_bytes());
            head.extend(text.as_bytes());
        };
        text(&mut head, "general.architecture");
        head.extend(8u32.to_le_bytes());
        text(&mut head, "llama");
        for (key, number) in numbers {
            text(&mut head, &format!("llama.{key}"));
            head.extend(4u32.to_le_bytes());
            head.extend((number as u32).to_le_bytes());
        }
        text(&mut head, "llama.attention.layer_norm_rms_epsilon");
        head.extend(6u32.to_le_bytes());
        head.extend(1e-5f32.to_le_bytes());
        let mut offset = 0u64;
        for (name, rows, cols, is_matrix) in &tensors {
            text(&mut head, name);
            let dims: &[usize] = if *is_matrix { &[*cols, *rows] } else { &[*cols] };
            head.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|&dim| head.extend((dim as u64).to_le_bytes()));
            head.extend(if *is_matrix { 8u32 } else { 0 }.to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset += size_bytes(*rows, *cols, *is_matrix).next_multiple_of(32);
        }
        head.resize(head.len().next_multiple_of(32), 0);
        file.write_all(&head)?;
        let mut words = common::words(usize::MAX);
        for (_, rows, cols, is_matrix) in tensors {
            let mut bytes = Vec::with_capacity(size_bytes(rows, cols, is_matrix) as usize);
            if is_matrix {
                // Signed bytes are 74 in the root mean square: with this scale a row keeps the magnitude of its input.
                let scale = half::f16::from_f32(1.0 / (74.0 * (cols as f32).sqrt())).to_le_bytes();
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

/// What a run of the command line told, and the most memory that it had.
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
            // So that no token comes twice.
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

fn main() {
    let parts: u64 = std::env::args().filter_map(|argument| argument.parse().ok()).next().unwrap_or(1);
    let n_layers = (N_LAYERS / parts as usize).max(4);
    let model = RandomModel::write(n_layers).expect("target/tmp takes the file");
    let bytes = fs::metadata(&model.0).expect("it was just written").len();
    println!("{n_layers} layers, {:.2} GB of Q8_0; 24 tokens of prompt, 16 generated", bytes as f64 / 1e9);
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
            println!("    peak of memory {:.3} GB", peak as f64 / 1e9);
        }
        let streaming = &told["streaming"];
        if streaming.is_object() {
            let number = |key: &str| streaming[key].as_f64().unwrap_or(0.0);
            let seconds = |key: &str| {
                streaming[key]["secs"].as_f64().unwrap_or(0.0) + streaming[key]["nanos"].as_f64().unwrap_or(0.0) / 1e9
            };
            println!(
                "    {} of {} layers read in each pass, {:.1} % of their bytes stay; {} reads in {:.1} s, {:.0} % of that while others were computed",
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
