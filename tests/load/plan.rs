//! Memory plan of a mixture of experts with 30 billion weights, from its header alone, against sums over its shapes;
//! and of a smaller similar one against its allocations.

use std::fs::File;

use tilewright::load::ModelFile;
use tilewright::{Device, GenerateOptions, LoadOptions, MemoryPlan, Model};

use super::Folder;
use super::builder::{F32, GgufFile, STRING, U32, entry, tensor, text};
use super::common::{self, block_on};

/// Shape of a Qwen3 mixture.
#[derive(Clone, Copy)]
pub struct Shape {
    pub layers: u64,
    pub dim: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub experts: u64,
    pub used: u64,
    /// Width of a shared feed-forward beside the experts; with one it is a Granite mixture.
    pub shared: u64,
    pub ffn_dim: u64,
    pub vocab: u64,
}

/// Qwen3-30B-A3B, from its `config.json`.
const LARGE: Shape = Shape {
    layers: 48,
    dim: 2048,
    heads: 32,
    kv_heads: 4,
    head_dim: 128,
    experts: 128,
    used: 8,
    shared: 0,
    ffn_dim: 768,
    vocab: 151_936,
};

/// A hundredth of it, in the same proportions.
const SMALL: Shape = Shape {
    layers: 4,
    dim: 256,
    heads: 4,
    kv_heads: 1,
    head_dim: 64,
    experts: 16,
    used: 2,
    shared: 0,
    ffn_dim: 256,
    vocab: 2048,
};

/// GGML's type number, and bytes per number of weights.
type Type = (u32, u64, u64);
const Q8_0: Type = (8, 34, 32);
const PLAIN: Type = (0, 4, 1);

impl Shape {
    /// Tensors of the file by name, rows first, and their types.
    fn tensors(&self) -> Vec<(String, Vec<u64>, Type)> {
        let Shape { layers, dim, heads, kv_heads, head_dim, experts, shared, ffn_dim, vocab, .. } = *self;
        let mut tensors = vec![
            ("token_embd.weight".to_owned(), vec![vocab, dim], Q8_0),
            ("output.weight".to_owned(), vec![vocab, dim], Q8_0),
            ("output_norm.weight".to_owned(), vec![dim], PLAIN),
        ];
        for layer in 0..layers {
            let of_layer = [
                ("attn_norm", vec![dim], PLAIN),
                ("attn_q", vec![heads * head_dim, dim], Q8_0),
                ("attn_k", vec![kv_heads * head_dim, dim], Q8_0),
                ("attn_v", vec![kv_heads * head_dim, dim], Q8_0),
                ("attn_output", vec![dim, heads * head_dim], Q8_0),
                ("ffn_norm", vec![dim], PLAIN),
                ("ffn_gate_inp", vec![experts, dim], PLAIN),
                ("ffn_gate_exps", vec![experts, ffn_dim, dim], Q8_0),
                ("ffn_up_exps", vec![experts, ffn_dim, dim], Q8_0),
                ("ffn_down_exps", vec![experts, dim, ffn_dim], Q8_0),
            ];
            let beside = match shared {
                0 => vec![("attn_q_norm", vec![head_dim], PLAIN), ("attn_k_norm", vec![head_dim], PLAIN)],
                _ => vec![
                    ("ffn_gate_shexp", vec![shared, dim], Q8_0),
                    ("ffn_up_shexp", vec![shared, dim], Q8_0),
                    ("ffn_down_shexp", vec![dim, shared], Q8_0),
                ],
            };
            let all = of_layer.into_iter().chain(beside);
            tensors.extend(all.map(|(name, shape, of)| (format!("blk.{layer}.{name}.weight"), shape, of)));
        }
        tensors
    }

    /// The file's header, and its length including the data.
    fn header(&self) -> (Vec<u8>, u64) {
        let mut file = GgufFile::empty();
        let name = if self.shared == 0 { "qwen3moe" } else { "granitemoe" };
        file.entries.push(entry("general.architecture", STRING, text(name)));
        if self.shared > 0 {
            let shared = (self.shared as u32).to_le_bytes();
            file.entries.push(entry("granitemoe.expert_shared_feed_forward_length", U32, shared));
        }
        for (key, value) in [
            ("block_count", self.layers),
            ("embedding_length", self.dim),
            ("feed_forward_length", 3 * self.dim),
            ("context_length", 40_960),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("expert_count", self.experts),
            ("expert_used_count", self.used),
            ("expert_feed_forward_length", self.ffn_dim),
        ] {
            file.entries.push(entry(&format!("{name}.{key}"), U32, (value as u32).to_le_bytes()));
        }
        for (key, value) in [("attention.layer_norm_rms_epsilon", 1e-6_f32), ("rope.freq_base", 1e6)] {
            file.entries.push(entry(&format!("{name}.{key}"), F32, value.to_le_bytes()));
        }
        let mut offset = 0u64;
        for (name, shape, (type_number, bytes, len)) in self.tensors() {
            let dimensions: Vec<u64> = shape.iter().rev().copied().collect();
            let mut tensor = tensor(&name, &dimensions, type_number);
            // Builds no data, only its offsets.
            (tensor.type_number, tensor.size_bytes) = (type_number, 0);
            tensor.offset = Some(offset);
            offset += (shape.iter().product::<u64>() / len * bytes).next_multiple_of(32);
            file.tensors.push(tensor);
        }
        let header = file.build().bytes;
        let len = (header.len() as u64).next_multiple_of(32) + offset;
        (header, len)
    }

    /// A sparse file that reads as zeros.
    fn write(&self, folder: &Folder) -> std::path::PathBuf {
        let (header, len) = self.header();
        let path = folder.write("model.gguf", header);
        File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
        path
    }

    /// A file of random numbers: matrix rows preserve the magnitude of their input, norms are 1.
    pub fn write_random(&self, folder: &Folder) -> std::path::PathBuf {
        let mut rng = common::Rng::new(17);
        let mut bytes = self.header().0;
        for (_, shape, (type_number, ..)) in self.tensors() {
            bytes.resize(bytes.len().next_multiple_of(32), 0);
            let n: u64 = shape.iter().product();
            match (type_number, &shape[..]) {
                (8, [.., cols]) => {
                    let scale = half::f16::from_f32(1.0 / (74.0 * (*cols as f32).sqrt())).to_le_bytes();
                    for _ in 0..n / 32 {
                        bytes.extend(scale);
                        bytes.extend((0..8).flat_map(|_| rng.word().to_le_bytes()));
                    }
                }
                (_, [_]) => bytes.extend((0..n).flat_map(|_| 1f32.to_le_bytes())),
                _ => bytes.extend((0..n).flat_map(|_| (rng.word() as f32 / u32::MAX as f32 - 0.5).to_le_bytes())),
            }
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        folder.write("model.gguf", bytes)
    }

    /// Bytes of weights: two bits per block of 32 are a scale, as in the file, and norms are F32.
    fn weights_bytes(&self) -> u64 {
        self.tensors().iter().map(|(_, shape, (_, bytes, len))| shape.iter().product::<u64>() * bytes / len).sum()
    }

    /// Bytes of keys and values in F32 for `context` positions.
    fn cache_bytes(&self, context: u64) -> u64 {
        self.layers * 2 * self.kv_heads * self.head_dim * context * 4
    }

    /// Bytes of the largest pass at its widest point: logits of one token, the residual stream, the experts' outputs
    /// for all tokens and their sum.
    fn activations_bytes(&self, pass: u64, by_tiles: bool) -> u64 {
        let slots = pass * self.used;
        let widest = match by_tiles {
            // Gates and ups, or their product and each expert's output.
            true => slots * (3 * self.ffn_dim).max(self.ffn_dim + self.dim),
            false => slots * self.ffn_dim,
        };
        4 * (self.vocab + 2 * pass * self.dim + widest + pass * self.experts)
    }
}

fn close(what: &str, got: u64, want: u64) {
    let off = (got as f64 / want as f64 - 1.0).abs();
    println!("{what}: {got} bytes planned, {want} by its shapes ({:.2} % off)", 100.0 * off);
    assert!(off <= 0.1, "{what}: {got} bytes planned, {want} expected");
}

fn devices() -> Vec<Device> {
    common::executors()
}

/// Cached values may use fewer bytes than F32.
fn cache_share(plan: &MemoryPlan, of: u64) -> f64 {
    plan.cache_bytes as f64 / of as f64
}

#[test]
fn memory_plan_of_a_30b_model_reads_no_weights() {
    let folder = Folder::new();
    let path = LARGE.write(&folder);
    assert!((28e9..34e9).contains(&(LARGE.weights_bytes() as f64 * 32.0 / 34.0)), "{}", LARGE.weights_bytes());
    for device in devices() {
        let before = device.counters();
        let (plan, peak) = crate::allocator::peak_bytes(|| {
            let file = ModelFile::open(&path).unwrap();
            Model::plan_file(
                &device.target(),
                &file,
                &LoadOptions { context_length: Some(4096), ..LoadOptions::default() },
            )
            .unwrap()
        });
        assert_eq!(device.counters() - before, Default::default());
        assert!(peak < 64 << 20, "{peak} bytes held");
        let on = if device.is_gpu() { "gpu" } else { "cpu" };
        close(&format!("weights on {on}"), plan.weights_bytes, LARGE.weights_bytes());
        let rope_bytes = 4 * 4096 * LARGE.head_dim;
        let cache_bytes = LARGE.cache_bytes(4096) + rope_bytes;
        assert!(cache_share(&plan, cache_bytes) <= 1.1 && cache_share(&plan, cache_bytes) >= 0.25, "{plan:?}");
        let total = LARGE.weights_bytes() + plan.cache_bytes + LARGE.activations_bytes(128, device.is_gpu());
        close(&format!("all on {on}"), plan.total_bytes(), total);
    }
}

/// For a loadable model the allocation equals the plan.
#[test]
fn allocated_bytes_match_the_memory_plan() {
    let folder = Folder::new();
    let path = SMALL.write(&folder);
    for device in devices() {
        let file = ModelFile::open(&path).unwrap();
        let plan = Model::plan_file(
            &device.target(),
            &file,
            &LoadOptions { context_length: Some(512), ..LoadOptions::default() },
        )
        .unwrap();
        close("weights", plan.weights_bytes, SMALL.weights_bytes());
        let load = |device: &Device| {
            let options = LoadOptions { context_length: Some(512), ..LoadOptions::default() };
            Model::from_file(device, ModelFile::open(&path).unwrap(), options).unwrap()
        };
        // The self-test of the pipelines of all pass sizes releases its memory.
        let before = common::counters_of_tested(&device, |device| drop(load(device)));
        let model = load(&device);
        assert_eq!(model.plan(), plan);
        let mut session = model.session().unwrap();
        let prompt: Vec<u32> = (0..300).map(|i| i % 100).collect();
        let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(4) };
        let mut generation = session.generate_ids(&prompt, &options).unwrap();
        while let Some(piece) = block_on(generation.next()) {
            piece.unwrap();
        }
        let allocated = (device.counters() - before).bytes_allocated;
        let off = allocated as f64 / plan.total_bytes() as f64 - 1.0;
        println!("{allocated} bytes allocated, {} planned ({:.2} % more)", plan.total_bytes(), 100.0 * off);
        assert!(off.abs() <= 0.1, "{allocated} bytes allocated, {} planned", plan.total_bytes());
    }
}
