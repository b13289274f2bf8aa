//! From file to model: hostile GGUF semantics, Hugging Face folders in all their forms, and the same weights in both
//! formats. Files are generated from a tiny random Llama; only the comparison of `config.json` dialects reads the data
//! folder.

#[path = "common/allocator.rs"]
mod allocator;
#[path = "formats/builder.rs"]
#[allow(dead_code)] // tests of formats use all of it
mod builder;
#[path = "load/checkpoint.rs"]
mod checkpoint;
mod common;
#[path = "load/experts.rs"]
mod experts;
#[path = "load/families.rs"]
mod families;
#[path = "load/hostile_config.rs"]
mod hostile_config;
#[path = "load/kept.rs"]
mod kept;
#[path = "load/mtp.rs"]
mod mtp;
#[path = "load/mtp_layers.rs"]
mod mtp_layers;
#[path = "load/parts.rs"]
mod parts;
#[path = "load/pieces.rs"]
mod pieces;
#[path = "load/plan.rs"]
mod plan;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use builder::{ARRAY, BOOL, F32, GgufFile, STRING, U32, U64, array, entry, json_entry, text};
use common::{Rng, block_on, largest_difference};
use serde_json::{Value, json};
use tilewright::kernels::{KvType, RopeScaling, RopeStyle};
use tilewright::load::{FileName, HeaderReader, ModelFile};
use tilewright::model::Block;
use tilewright::{Device, Error, GenerateOptions, LoadOptions, Model};

const I32: u32 = 5;
const I64: u32 = 11;
const F64: u32 = 12;

const DIM: u64 = 32;
const FFN_DIM: u64 = 64;
const N_LAYERS: u32 = 2;
const N_HEADS: u64 = 4;
const N_KV_HEADS: u64 = 2;
const HEAD_DIM: u64 = 8;
const VOCAB: u64 = 40;

/// Tensor name in GGUF, published name, and shape, rows first; `#` is the layer.
const ROLES: [(&str, &str, &[u64]); 12] = [
    ("token_embd", "model.embed_tokens", &[VOCAB, DIM]),
    ("blk.#.attn_norm", "model.layers.#.input_layernorm", &[DIM]),
    ("blk.#.attn_q", "model.layers.#.self_attn.q_proj", &[N_HEADS * HEAD_DIM, DIM]),
    ("blk.#.attn_k", "model.layers.#.self_attn.k_proj", &[N_KV_HEADS * HEAD_DIM, DIM]),
    ("blk.#.attn_v", "model.layers.#.self_attn.v_proj", &[N_KV_HEADS * HEAD_DIM, DIM]),
    ("blk.#.attn_output", "model.layers.#.self_attn.o_proj", &[DIM, N_HEADS * HEAD_DIM]),
    ("blk.#.ffn_norm", "model.layers.#.post_attention_layernorm", &[DIM]),
    ("blk.#.ffn_gate", "model.layers.#.mlp.gate_proj", &[FFN_DIM, DIM]),
    ("blk.#.ffn_up", "model.layers.#.mlp.up_proj", &[FFN_DIM, DIM]),
    ("blk.#.ffn_down", "model.layers.#.mlp.down_proj", &[DIM, FFN_DIM]),
    ("output_norm", "model.norm", &[DIM]),
    ("output", "lm_head", &[VOCAB, DIM]),
];

/// One tensor of the tiny model, rows of Q and K in the published order.
#[derive(Clone)]
struct Weight {
    gguf: String,
    published: String,
    shape: &'static [u64],
    values: Vec<f32>,
}

/// Weights are multiples of this, at most 127 of them, so that F32, F16, BF16 and Q8_0 all hold them exactly.
const QUANTUM: f32 = 1.0 / 256.0;

fn weights() -> Vec<Weight> {
    let mut rng = Rng::new(11);
    let mut weight = |role: &(&str, &str, &'static [u64]), layer: u32| {
        let name = |pattern: &str| format!("{}.weight", pattern.replace('#', &layer.to_string()));
        let quant = |rng: &mut Rng| if role.0.ends_with("norm") { 64 + rng.below(64) } else { rng.below(255) } as f32;
        let zero = if role.0.ends_with("norm") { 0.0 } else { 127.0 };
        let values = (0..role.2.iter().product()).map(|_| (quant(&mut rng) - zero) * QUANTUM).collect();
        Weight { gguf: name(role.0), published: name(role.1), shape: role.2, values }
    };
    let mut weights = Vec::new();
    for role in &ROLES {
        let n_layers = if role.0.contains('#') { N_LAYERS } else { 1 };
        weights.extend((0..n_layers).map(|layer| weight(role, layer)));
    }
    weights
}

/// Rows of Q or K reordered as by llama.cpp's converter: the halves of a head, interleaved.
fn interleaved(values: &[f32]) -> Vec<f32> {
    let (cols, half) = (DIM as usize, HEAD_DIM as usize / 2);
    let rows: Vec<&[f32]> = values.chunks(cols).collect();
    let heads = rows.chunks(2 * half);
    heads.flat_map(|head| (0..half).flat_map(|i| [head[i], head[i + half]])).flatten().copied().collect()
}

/// Encodes `values` in a GGML type of the builder's table.
fn encode(values: &[f32], type_number: u32) -> Vec<u8> {
    let bf16 = |x: &f32| ((x.to_bits() >> 16) as u16).to_le_bytes();
    let q8_0 = |block: &[f32]| {
        let quants = block.iter().map(|x| (x / QUANTUM) as i8 as u8);
        half::f16::from_f32(QUANTUM).to_le_bytes().into_iter().chain(quants).collect::<Vec<u8>>()
    };
    match type_number {
        0 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        1 => values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
        8 => values.chunks(32).flat_map(q8_0).collect(),
        30 => values.iter().flat_map(bf16).collect(),
        other => panic!("no encoder for type {other}"),
    }
}

/// The tiny model as a GGUF file, with every field mutable.
#[derive(Clone)]
struct TinyGguf {
    file: GgufFile,
    /// In the order of the file's tensors.
    data: Vec<Vec<u8>>,
}

impl TinyGguf {
    fn new() -> TinyGguf {
        let mut tiny = TinyGguf { file: GgufFile::empty(), data: Vec::new() };
        tiny.set("general.architecture", STRING, text("llama"));
        tiny.set("general.name", STRING, text("tiny"));
        let numbers = [
            ("embedding_length", DIM as u32),
            ("feed_forward_length", FFN_DIM as u32),
            ("block_count", N_LAYERS),
            ("attention.head_count", N_HEADS as u32),
            ("attention.head_count_kv", N_KV_HEADS as u32),
            ("context_length", 4096),
            ("rope.dimension_count", HEAD_DIM as u32),
        ];
        for (key, number) in numbers {
            tiny.set(&format!("llama.{key}"), U32, number.to_le_bytes());
        }
        tiny.set("llama.attention.layer_norm_rms_epsilon", F32, 1e-5_f32.to_le_bytes());
        tiny.set("llama.rope.freq_base", F32, 10_000_f32.to_le_bytes());
        tiny.set_vocab(VOCAB as usize);
        for weight in weights() {
            let is_paired = weight.gguf.contains("attn_q") || weight.gguf.contains("attn_k");
            let values = if is_paired { interleaved(&weight.values) } else { weight.values };
            tiny.put(&weight.gguf, weight.shape, 0, encode(&values, 0));
        }
        tiny
    }

    /// Three special tokens, and letters up to `n_tokens`.
    fn set_vocab(&mut self, n_tokens: usize) {
        let letters = (0..).map(|i| char::from_u32('a' as u32 + i).unwrap().to_string());
        let tokens = ["<unk>", "<s>", "</s>", "▁"].map(String::from).into_iter().chain(letters);
        let tokens: Vec<u8> = tokens.take(n_tokens).flat_map(text).collect();
        let types = [2_u32, 3, 3].into_iter().chain(std::iter::repeat(1)).take(n_tokens).flat_map(u32::to_le_bytes);
        let n = n_tokens as u64;
        self.set("tokenizer.ggml.model", STRING, text("llama"));
        self.set("tokenizer.ggml.tokens", ARRAY, array(STRING, n, tokens));
        self.set("tokenizer.ggml.token_type", ARRAY, array(U32, n, types.collect::<Vec<u8>>()));
        self.set("tokenizer.ggml.scores", ARRAY, array(F32, n, vec![0; 4 * n_tokens]));
    }

    /// Sets a key, new or not.
    fn set(&mut self, key: &str, value_type: u32, value: impl Into<Vec<u8>>) {
        let entry = entry(key, value_type, value);
        match self.file.entries.iter_mut().find(|old| old.key == entry.key) {
            Some(old) => *old = entry,
            None => self.file.entries.push(entry),
        }
    }

    fn remove(&mut self, key: &str) {
        let n_before = self.file.entries.len();
        self.file.entries.retain(|entry| entry.key != key.as_bytes());
        assert_eq!(self.file.entries.len(), n_before - 1, "no key {key}");
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.file.tensors.iter().position(|tensor| tensor.name == name.as_bytes())
    }

    /// Sets a tensor, new or not, with its shape as rows first.
    fn put(&mut self, name: &str, shape: &[u64], type_number: u32, data: Vec<u8>) {
        let dimensions: Vec<u64> = shape.iter().rev().copied().collect();
        let mut tensor = builder::tensor(name, &dimensions, 0); // the builder requires a type
        (tensor.type_number, tensor.size_bytes) = (type_number, data.len() as u64);
        match self.position(name) {
            Some(at) => (self.file.tensors[at], self.data[at]) = (tensor, data),
            None => {
                self.file.tensors.push(tensor);
                self.data.push(data);
            }
        }
    }

    fn drop_tensor(&mut self, name: &str) {
        let at = self.position(name).unwrap();
        self.file.tensors.remove(at);
        self.data.remove(at);
    }

    /// Replaces one number of an F32 tensor.
    fn poison(&mut self, name: &str, element: usize, value: f32) {
        let at = self.position(name).unwrap();
        self.data[at][4 * element..][..4].copy_from_slice(&value.to_le_bytes());
    }

    fn bytes(&self) -> Vec<u8> {
        let mut built = self.file.build();
        for (range, data) in built.data.iter().zip(&self.data) {
            built.bytes[range.start as usize..range.end as usize].copy_from_slice(data);
        }
        built.bytes
    }

    fn model(&self, device: &Device) -> Model {
        let file = ModelFile::from_gguf_bytes(self.bytes()).unwrap_or_else(|e| panic!("{e}"));
        Model::from_file(device, file, LoadOptions { kv_type: KvType::F32, ..LoadOptions::default() })
            .unwrap_or_else(|e| panic!("{e}"))
    }
}

/// A separate folder per use, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("load-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A leftover folder lies in the build's own temporary folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn load(device: &Device, path: &Path) -> Result<Model, Error> {
    Model::load(device, path, LoadOptions { kv_type: KvType::F32, ..LoadOptions::default() })
}

/// Long enough for RoPE to matter.
const PROMPT: [u32; 9] = [1, 5, 17, 9, 30, 5, 5, 22, 12];

/// Logits at every position of the prompt.
fn logits(model: &Model) -> Vec<f32> {
    block_on(model.trace(&PROMPT)).unwrap_or_else(|e| panic!("{e}")).logits
}

/// Requires that loading `path` fails with an error in `file` that contains all of `names`, without device allocations
/// and with few on the host.
fn expect_refusal(device: &Device, path: &Path, file: &Path, what: &str, names: &[&str]) {
    let before = device.counters();
    let (result, peak) = allocator::peak_bytes(|| load(device, path));
    let Err(error) = result else { panic!("{what} is not refused") };
    assert_eq!(device.counters() - before, Default::default(), "{what}: the device did something before `{error}`");
    assert!(peak < 1 << 20, "{what}: {peak} bytes held for `{error}`");
    match &error {
        Error::InFile { path, source } => {
            assert_eq!(path, file, "{what}: {error}");
            let is_typed = matches!(**source, Error::Config { .. } | Error::Unsupported { .. } | Error::Format { .. });
            assert!(is_typed, "{what}: {source:?}");
        }
        Error::Io { path, .. } => assert_eq!(path, file, "{what}: {error}"),
        other => panic!("{what}: {other} names no file"),
    }
    for name in names {
        assert!(error.to_string().contains(name), "{what}: `{error}` does not name `{name}`");
    }
}

/// Changes the tiny GGUF file and expects its refusal.
struct Hostile {
    device: Device,
    folder: Folder,
    n_refused: usize,
}

impl Hostile {
    fn new() -> Hostile {
        Hostile { device: common::cpu(), folder: Folder::new(), n_refused: 0 }
    }

    fn refused(&mut self, what: &str, names: &[&str], change: impl FnOnce(&mut TinyGguf)) {
        let mut tiny = TinyGguf::new();
        change(&mut tiny);
        let path = self.folder.write("tiny.gguf", tiny.bytes());
        expect_refusal(&self.device, &path, &path, what, names);
        self.n_refused += 1;
    }

    fn number(&mut self, key: &str, value: u32, name: &str) {
        let key = format!("llama.{key}");
        self.refused(&format!("{key} {value}"), &[name], |tiny| tiny.set(&key, U32, value.to_le_bytes()));
    }

    fn float(&mut self, key: &str, value: f32) {
        let full = format!("llama.{key}");
        self.refused(&format!("{full} {value}"), &[key], |tiny| tiny.set(&full, F32, value.to_le_bytes()));
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        println!("{} files refused", self.n_refused);
    }
}

#[test]
fn unmodified_tiny_gguf_loads() {
    let device = common::cpu();
    let folder = Folder::new();
    let model = load(&device, &folder.write("tiny.gguf", TinyGguf::new().bytes())).unwrap();
    assert_eq!((model.name(), model.context_length()), ("tiny", 4096));
    let logits = logits(&model);
    assert_eq!(logits.len(), PROMPT.len() * VOCAB as usize);
    assert!(logits.iter().all(|x| x.is_finite()));
    let mut session = model.session().unwrap();
    let mut generation = session.generate("cab", &GenerateOptions::greedy(4)).unwrap();
    block_on(generation.next()).unwrap().unwrap();
}

#[test]
fn contradictory_numbers_are_refused() {
    let mut hostile = Hostile::new();
    for value in [0, 3, 5, 6, 7, 31, 33, 64, 1 << 16, 1 << 31, u32::MAX] {
        hostile.number("attention.head_count", value, "llama.attention.head_count");
    }
    for value in [0, 3, 5, 8, 16, 4096, 1 << 31, u32::MAX] {
        hostile.number("attention.head_count_kv", value, "attention.head_count_kv");
    }
    hostile.number("attention.head_count_kv", 1, "blk.0.attn_k.weight");
    hostile.number("attention.head_count_kv", 4, "blk.0.attn_k.weight");
    for value in [0, 4097, 1 << 31, u32::MAX] {
        hostile.number("block_count", value, "block_count");
    }
    for value in [3, 7, 100, 4095, 4096] {
        hostile.number("block_count", value, "blk.2.attn_norm.weight");
    }
    hostile.number("block_count", 1, "blk.1.attn_k.weight");
    for value in [0, (1 << 28) + 1, 1 << 31, u32::MAX] {
        hostile.number("context_length", value, "context_length");
    }
    for value in [0, 31, 33, (1 << 20) + 4, u32::MAX] {
        let is_divided = matches!(value, 31 | 33);
        let name = if is_divided { "a divisor of the width" } else { "embedding_length" };
        hostile.number("embedding_length", value, name);
    }
    hostile.number("embedding_length", 64, "token_embd.weight");
    for value in [0, (1 << 20) + 1, 1 << 31, u32::MAX] {
        hostile.number("feed_forward_length", value, "feed_forward_length");
    }
    for value in [1, 32, 63, 65, 1 << 20] {
        hostile.number("feed_forward_length", value, "blk.0.ffn_gate.weight");
    }
    for value in [0, 577, 580, 1 << 31, u32::MAX] {
        hostile.number("attention.key_length", value, "attention.key_length");
    }
    hostile.number("attention.key_length", 10, "a multiple of 4");
    hostile.number("attention.key_length", 16, "blk.0.attn_q.weight");
    for value in [0, 1, 3, 7, 9, 10, 1 << 31, u32::MAX] {
        hostile.number("rope.dimension_count", value, "rope.dimension_count");
    }
    for value in [1, 2, 8, 1 << 31, u32::MAX] {
        hostile.number("expert_count", value, "expert_used_count");
    }
    hostile.number("attention.sliding_window", 0, "attention.sliding_window");
    // With an explicit head size, the number of heads is not checked against the width.
    for value in [0, 3, 4097, u32::MAX] {
        hostile.refused(&format!("{value} heads of size 8"), &["attention.head_count"], |tiny| {
            tiny.set("llama.attention.key_length", U32, 8_u32.to_le_bytes());
            tiny.set("llama.attention.head_count", U32, value.to_le_bytes());
        });
    }
}

#[test]
fn numbers_beyond_32_bits_and_wrong_types_are_refused() {
    let mut hostile = Hostile::new();
    for key in ["context_length", "block_count", "attention.head_count", "embedding_length", "rope.dimension_count"] {
        let key = format!("llama.{key}");
        for value in [1 << 32, 1 << 63, u64::MAX] {
            hostile.refused(&format!("{key} {value}"), &[&key], |tiny| tiny.set(&key, U64, value.to_le_bytes()));
        }
        hostile.refused("a negative number", &[&key, "-1"], |tiny| tiny.set(&key, I32, (-1_i32).to_le_bytes()));
        hostile.refused("a text", &[&key], |tiny| tiny.set(&key, STRING, text("4")));
        hostile.refused("a float", &[&key], |tiny| tiny.set(&key, F32, 4_f32.to_le_bytes()));
        let per_layer = array(U32, 2, [4, 0, 0, 0, 4, 0, 0, 0]);
        hostile.refused("an array", &[&key], |tiny| tiny.set(&key, ARRAY, per_layer));
    }
    for key in ["llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"] {
        hostile.refused("a text", &[key], |tiny| tiny.set(key, STRING, text("1e-5")));
        hostile.refused("an integer", &[key], |tiny| tiny.set(key, U32, [0; 4]));
    }
}

#[test]
fn missing_required_keys_are_named() {
    let mut hostile = Hostile::new();
    for key in [
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "attention.head_count",
        "context_length",
        "attention.layer_norm_rms_epsilon",
    ] {
        let key = format!("llama.{key}");
        hostile.refused("a missing key", &[&key, "missing"], |tiny| tiny.remove(&key));
    }
}

#[test]
fn implausible_float_parameters_are_refused() {
    let mut hostile = Hostile::new();
    for value in [f32::NAN, 0.0, -0.0, -1.0, -10_000.0, f32::INFINITY, f32::NEG_INFINITY, 0.5, f32::MIN_POSITIVE] {
        hostile.float("rope.freq_base", value);
    }
    for value in [-1e-5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, 1e30, f32::MIN] {
        hostile.float("attention.layer_norm_rms_epsilon", value);
    }
    hostile.refused("64-bit NaN", &["rope.freq_base"], |tiny| {
        tiny.set("llama.rope.freq_base", F64, f64::NAN.to_le_bytes());
    });
    hostile.refused("64-bit float beyond 32 bits", &["rope.freq_base"], |tiny| {
        tiny.set("llama.rope.freq_base", F64, 1e300_f64.to_le_bytes());
    });
    for value in [0.0, -2.0, f32::NAN, f32::INFINITY] {
        hostile.refused(&format!("scaling by {value}"), &["llama.rope.scaling.factor"], |tiny| {
            tiny.set("llama.rope.scaling.type", STRING, text("linear"));
            tiny.set("llama.rope.scaling.factor", F32, value.to_le_bytes());
        });
    }
    for kind in ["su", "longrope", "", "LINEAR"] {
        hostile.refused(&format!("scaling `{kind}`"), &["llama.rope.scaling.type", kind], |tiny| {
            tiny.set("llama.rope.scaling.type", STRING, text(kind));
        });
    }
}

#[test]
fn unsupported_architectures_are_refused_by_name() {
    let mut hostile = Hostile::new();
    for architecture in ["gptj", "mpt", "mixtral", "", "LLAMA", "llama ", "llama4", "clip"] {
        hostile.refused(architecture, &["general.architecture", &format!("`{architecture}`")], |tiny| {
            tiny.set("general.architecture", STRING, text(architecture));
        });
    }
    // For a known but unsupported architecture, the error names the missing feature.
    hostile.refused("rwkv", &["`rwkv7`, which needs linear attention of RWKV"], |tiny| {
        tiny.set("general.architecture", STRING, text("rwkv7"));
    });
    hostile.refused("no architecture", &["general.architecture", "missing"], |tiny| {
        tiny.remove("general.architecture");
    });
    hostile.refused("a number", &["general.architecture"], |tiny| tiny.set("general.architecture", U32, [0; 4]));
    hostile.refused("a part of a split model", &["split.count"], |tiny| tiny.set("split.count", U32, [2, 0, 0, 0]));
}

#[test]
fn missing_or_misshapen_tensors_are_named() {
    let mut hostile = Hostile::new();
    for weight in weights() {
        let name = weight.gguf.as_str();
        if name != "output.weight" {
            hostile.refused("a missing tensor", &[name, "missing"], |tiny| tiny.drop_tensor(name));
        }
        let mut shapes = vec![weight.shape.to_vec(); 3];
        shapes[0][0] += 1;
        shapes[1][0] -= 1;
        shapes[2].insert(0, 1);
        if let &[rows, cols] = weight.shape {
            shapes.extend([vec![rows, cols + 32], vec![rows * cols], vec![1, rows, cols]]);
            if rows != cols {
                shapes.push(vec![cols, rows]);
            }
        }
        for shape in shapes {
            let data = vec![0; 4 * shape.iter().product::<u64>() as usize];
            // The embedding's rows define the vocabulary's size, so the error names another tensor.
            let named = match (name, &shape[..]) {
                ("token_embd.weight", &[rows, DIM]) if rows > VOCAB => "output.weight",
                ("token_embd.weight", &[rows, ..]) if rows < VOCAB => "tokenizer.ggml.tokens",
                _ => name,
            };
            hostile.refused(&format!("{name} of shape {shape:?}"), &[named], |tiny| tiny.put(name, &shape, 0, data));
        }
    }
}

#[test]
fn unknown_tensors_are_refused_rather_than_ignored() {
    let mut hostile = Hostile::new();
    for name in [
        "blk.2.attn_norm.weight",
        "blk.4294967296.attn_q.weight",
        "blk.0.attn_q_norm.weight",
        "blk.0.attn_norm.bias",
        "blk.0.ffn_gate_inp.weight",
        "blk.1.attn_q",
        "blk.attn_q.weight",
        "token_embd.bias",
        "output_norm.bias",
        "attn_q.weight",
        "weight",
    ] {
        hostile.refused(name, &[name, "in the file"], |tiny| tiny.put(name, &[DIM], 0, vec![0; 4 * DIM as usize]));
    }
    // One bias of a fused projection requires the others.
    hostile.refused("a lone bias", &["blk.0.attn_k.bias", "missing"], |tiny| {
        tiny.put("blk.0.attn_q.bias", &[DIM], 0, vec![0; 4 * DIM as usize]);
    });
}

#[test]
fn unreadable_weight_types_are_refused_in_every_role() {
    let mut hostile = Hostile::new();
    // Number, name, and bytes of 32 elements.
    for (type_number, type_name, size) in
        [(9, "Q8_1", 36), (24, "I8", 32), (25, "I16", 64), (26, "I32", 128), (27, "I64", 256), (28, "F64", 256)]
    {
        for weight in weights() {
            let data = vec![0; weight.values.len() / 32 * size];
            hostile.refused("a type", &[&weight.gguf, type_name], |tiny| {
                tiny.put(&weight.gguf, weight.shape, type_number, data);
            });
        }
    }
}

/// Every tensor role in every type that holds the weights exactly: equal weights give equal logits up to the order of
/// sums.
#[test]
fn every_readable_weight_type_works_in_every_role() {
    let device = common::cpu();
    let want = logits(&TinyGguf::new().model(&device));
    let mut worst = 0.0f32;
    for weight in weights() {
        for type_number in [1, 8, 30] {
            let mut tiny = TinyGguf::new();
            let at = tiny.position(&weight.gguf).unwrap();
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(&tiny.data[at]);
            tiny.put(&weight.gguf, weight.shape, type_number, encode(&values, type_number));
            let difference = largest_difference(&logits(&tiny.model(&device)), &want);
            assert!(difference <= 1e-5, "{} in type {type_number}: logits differ by {difference}", weight.gguf);
            worst = worst.max(difference);
        }
    }
    println!("worst difference {worst:.1e}");
}

#[test]
fn rope_frequency_factors_are_checked_and_used() {
    let mut hostile = Hostile::new();
    let f32s = |values: &[f32]| encode(values, 0);
    for shape in [vec![1], vec![3], vec![5], vec![8], vec![1 << 15], vec![1, 4], vec![2, 2], vec![4, 1]] {
        let data = f32s(&vec![1.0; shape.iter().product::<u64>() as usize]);
        hostile.refused(&format!("factors of shape {shape:?}"), &["rope_freqs.weight", "[4]"], |tiny| {
            tiny.put("rope_freqs.weight", &shape, 0, data);
        });
    }
    for value in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in 0..4 {
            let mut factors = [1.0; 4];
            factors[at] = value;
            hostile.refused(&format!("a factor of {value}"), &["rope_freqs.weight", "above 0"], |tiny| {
                tiny.put("rope_freqs.weight", &[4], 0, f32s(&factors));
            });
        }
    }
    let device = common::cpu();
    let with = |factors: [f32; 4]| {
        let mut tiny = TinyGguf::new();
        tiny.put("rope_freqs.weight", &[4], 0, f32s(&factors));
        logits(&tiny.model(&device))
    };
    let mut linear = TinyGguf::new();
    linear.set("llama.rope.scaling.type", STRING, text("linear"));
    linear.set("llama.rope.scaling.factor", F32, 3_f32.to_le_bytes());
    let plain = logits(&TinyGguf::new().model(&device));
    assert_eq!(with([1.0; 4]), plain);
    assert_eq!(with([3.0; 4]), logits(&linear.model(&device)));
    assert!(largest_difference(&with([1.0, 2.0, 4.0, 8.0]), &plain) > 1e-4);
}

#[test]
fn vocabulary_must_fit_the_embedding_but_may_be_absent() {
    let mut hostile = Hostile::new();
    for n_tokens in [41, 42, 100, 1000] {
        hostile.refused(&format!("{n_tokens} tokens"), &["tokenizer.ggml.tokens", "40 rows"], |tiny| {
            tiny.set_vocab(n_tokens);
        });
    }
    let device = common::cpu();
    let works_on_ids = |tiny: &TinyGguf, name: &str| {
        let model = tiny.model(&device);
        let mut session = model.session().unwrap();
        assert_eq!(block_on(session.logits(&PROMPT)).unwrap().len(), VOCAB as usize);
        let error = session.generate("cab", &GenerateOptions::greedy(1)).err().unwrap();
        assert!(matches!(&error, Error::Tokenizer { .. }), "{error}");
        assert!(error.to_string().contains(name), "`{error}` does not name `{name}`");
    };
    for (key, name) in [("tokens", "tokenizer.ggml.tokens"), ("model", "tokenizer.ggml.model"), ("scores", "scores")] {
        let mut tiny = TinyGguf::new();
        tiny.remove(&format!("tokenizer.ggml.{key}"));
        works_on_ids(&tiny, name);
    }
    for (key, value_type, value, name) in [
        ("tokens", ARRAY, array(U32, 2, [0; 8]), "tokenizer.ggml.tokens"),
        ("model", STRING, text("no_vocab"), "no_vocab"),
        ("model", STRING, text("rwkv"), "rwkv"),
        ("eos_token_id", U32, vec![40, 0, 0, 0], "eos_id"),
        ("token_type", ARRAY, array(U32, 40, [9; 160]), "token_types"),
    ] {
        let mut tiny = TinyGguf::new();
        tiny.set(&format!("tokenizer.ggml.{key}"), value_type, value);
        works_on_ids(&tiny, name);
    }
}

#[test]
fn non_finite_weights_end_generation_with_an_error() {
    let device = common::cpu();
    for weight in weights() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut tiny = TinyGguf::new();
            let row = if weight.gguf == "token_embd.weight" { PROMPT[1] as usize } else { 0 };
            tiny.poison(&weight.gguf, row * DIM as usize + 3, value);
            let model = tiny.model(&device);
            for options in [GenerateOptions::greedy(3), GenerateOptions { max_tokens: 3, ..Default::default() }] {
                let mut session = model.session().unwrap();
                let mut generation = session.generate_ids(&PROMPT, &options).unwrap();
                let first = block_on(generation.next()).unwrap();
                let is_named = matches!(first, Err(Error::NonFinite { pos }) if pos == PROMPT.len() as u32);
                assert!(is_named, "{value} in {}, temperature {}: {first:?}", weight.gguf, options.temperature);
                assert!(block_on(generation.next()).is_none());
            }
        }
    }
}

/// A safetensors file of F32 tensors with their published names.
fn safetensors<'a>(weights: impl IntoIterator<Item = &'a Weight>) -> Vec<u8> {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for weight in weights {
        let begin = data.len();
        data.extend(encode(&weight.values, 0));
        entries.push(json_entry(&weight.published, "F32", &format!("{:?}", weight.shape), begin, data.len()));
    }
    [text(format!("{{{}}}", entries.join(","))), data].concat()
}

fn config_json() -> Value {
    json!({
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "intermediate_size": FFN_DIM,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": false,
    })
}

/// A folder with the tiny model in one file.
fn published() -> Folder {
    let folder = Folder::new();
    folder.write("config.json", config_json().to_string());
    folder.write("model.safetensors", safetensors(&weights()));
    folder
}

const INDEX: &str = "model.safetensors.index.json";
const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// An index that assigns tensors to the two shards alternately.
fn index() -> Value {
    let shard_of = |(i, weight): (usize, Weight)| (weight.published, json!(SHARDS[i % 2]));
    let map: serde_json::Map<String, Value> = weights().into_iter().enumerate().map(shard_of).collect();
    json!({ "metadata": { "total_size": 1 }, "weight_map": map })
}

/// A folder with the tiny model in two shards.
fn sharded() -> Folder {
    let folder = Folder::new();
    folder.write("config.json", config_json().to_string());
    folder.write(INDEX, index().to_string());
    for (i, shard) in SHARDS.iter().enumerate() {
        folder.write(shard, safetensors(weights().iter().skip(i).step_by(2)));
    }
    folder
}

#[test]
fn gguf_and_safetensors_give_the_same_logits() {
    let device = common::cpu();
    let folder = published();
    let from_folder = load(&device, &folder.0).unwrap();
    let from_gguf = TinyGguf::new().model(&device);
    assert_eq!(from_folder.config().ropes[0].style, RopeStyle::Halves);
    assert_eq!(from_gguf.config().ropes[0].style, RopeStyle::Interleaved);
    let (want, got) = (logits(&from_gguf), logits(&from_folder));
    let difference = largest_difference(&got, &want);
    println!("logits differ by {difference:.1e}");
    assert!(difference <= 1e-5, "{difference}");

    // Row order matters: published rows with GGUF's RoPE style give another model.
    let mut unordered = TinyGguf::new();
    for weight in weights().iter().filter(|weight| weight.gguf.contains("attn_q")) {
        unordered.put(&weight.gguf, weight.shape, 0, encode(&weight.values, 0));
    }
    let difference = largest_difference(&logits(&unordered.model(&device)), &want);
    assert!(difference > 1e-3, "{difference}");
}

#[test]
fn shards_named_by_any_path_give_the_same_logits() {
    let device = common::cpu();
    let (single, split) = (published(), sharded());
    let want = logits(&load(&device, &single.0).unwrap());
    let mut paths = ["model.safetensors", "config.json"].map(|name| single.0.join(name)).to_vec();
    paths.extend([INDEX, SHARDS[0], SHARDS[1], "config.json"].map(|name| split.0.join(name)));
    paths.extend([split.0.clone(), split.0.join(""), split.0.join(".")]);
    for path in paths {
        let model = load(&device, &path).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(logits(&model), want, "{}", path.display());
    }
    // A file not listed in the index is loaded by itself.
    let other = split.write("other.safetensors", safetensors(&weights()));
    assert_eq!(logits(&load(&device, &other).unwrap()), want);
}

#[test]
fn shard_index_that_does_not_fit_its_shards_is_refused() {
    let device = common::cpu();
    let first = weights()[0].published.clone();
    let with_first_in = |shard: &str| {
        let mut index = index();
        index["weight_map"][&first] = json!(shard);
        index.to_string()
    };
    for name in ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", "", "x.bin", "a\\b.safetensors"] {
        let folder = sharded();
        let index = folder.write(INDEX, with_first_in(name));
        expect_refusal(&device, &folder.0, &index, name, &["not a plain *.safetensors name", &first]);
    }
    let folder = sharded();
    folder.write(INDEX, with_first_in(SHARDS[1]));
    expect_refusal(&device, &folder.0, &folder.0.join(SHARDS[1]), "a tensor elsewhere", &[&first, SHARDS[1]]);

    let mut listed = index();
    listed["weight_map"]["model.layers.9.mlp.up_proj.weight"] = json!("third.safetensors");
    folder.write(INDEX, listed.to_string());
    expect_refusal(&device, &folder.0, &folder.0.join("third.safetensors"), "a missing shard", &[]);
    listed["weight_map"]["model.layers.9.mlp.up_proj.weight"] = json!(SHARDS[0]);
    folder.write(INDEX, listed.to_string());
    let named = ["model.layers.9.mlp.up_proj.weight", "missing"];
    expect_refusal(&device, &folder.0, &folder.0.join(SHARDS[0]), "a tensor in no shard", &named);

    let mut unlisted = index();
    unlisted["weight_map"].as_object_mut().unwrap().remove(&first);
    folder.write(INDEX, unlisted.to_string());
    expect_refusal(&device, &folder.0, &folder.0.join(SHARDS[0]), "a tensor not in the index", &[&first]);

    for (content, name) in [("{}", "weight_map"), ("[]", "an object"), ("", "EOF"), (r#"{"weight_map": 1}"#, "invalid")]
    {
        let index = folder.write(INDEX, content);
        expect_refusal(&device, &folder.0, &index, content, &[name]);
    }
    fs::remove_file(folder.0.join(SHARDS[1])).unwrap();
    folder.write(INDEX, index().to_string());
    expect_refusal(&device, &folder.0, &folder.0.join(SHARDS[1]), "a deleted shard", &[]);
}

#[test]
fn unsupported_configurations_are_refused() {
    let device = common::cpu();
    let folder = published();
    let path = folder.0.join("config.json");
    let refused = |changes: Value, names: &[&str]| {
        let mut config = config_json();
        let fields = config.as_object_mut().unwrap();
        for (key, value) in changes.as_object().unwrap() {
            fields.insert(key.clone(), value.clone());
        }
        folder.write("config.json", config.to_string());
        expect_refusal(&device, &folder.0, &path, &changes.to_string(), names);
    };
    for model_type in ["gptj", "mpt", "deepseek_v4", "", "Llama"] {
        refused(json!({ "model_type": model_type }), &["model_type", &format!("`{model_type}`")]);
    }
    refused(json!({ "model_type": null }), &["model_type", "missing"]);
    refused(json!({ "model_type": 5 }), &["model_type"]);
    for activation in ["relu", "relu2", "mish", "", "SiLU"] {
        refused(json!({ "hidden_act": activation }), &["hidden_act", &format!("`{activation}`")]);
    }
    refused(json!({ "num_local_experts": 8 }), &["num_local_experts"]);
    for (changes, name) in [
        (json!({ "attention_temperature": 0.5 }), "attention_temperature"),
        (json!({ "rope_scaling": { "rope_type": "linear", "factor": 2.0, "ntk": 3 } }), "rope_scaling.ntk"),
        (json!({ "quantization_config": { "quant_method": "gptq" } }), "quantization_config.quant_method"),
    ] {
        refused(changes, &[name, "unknown for"]);
    }
    for kind in ["dynamic", "longrope", "su", "mrope", ""] {
        let named = format!("`{kind}`");
        refused(json!({ "rope_scaling": { "rope_type": kind, "factor": 2.0 } }), &["rope_scaling.rope_type", &named]);
        refused(json!({ "rope_scaling": { "type": kind, "factor": 2.0 } }), &["rope_scaling", &named]);
        refused(json!({ "rope_parameters": { "rope_type": kind } }), &["rope_parameters.rope_type", &named]);
    }
    for factor in [json!(0), json!(-1.0), json!("2"), json!(null), json!(1e300), json!([2])] {
        let scaling = json!({ "rope_scaling": { "rope_type": "linear", "factor": factor } });
        refused(scaling, &["rope_scaling.factor"]);
    }
    for (low, high) in [(4.0, 1.0), (2.0, 2.0)] {
        let scaling = json!({ "rope_type": "llama3", "factor": 8, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": 64 });
        refused(json!({ "rope_scaling": scaling }), &["rope_scaling.high_freq_factor"]);
    }
    for key in ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"] {
        let mut scaling = json!({ "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 64 });
        scaling[key] = json!(null);
        refused(json!({ "rope_scaling": scaling }), &[&format!("rope_scaling.{key}"), "missing"]);
    }
    for key in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ] {
        refused(json!({ key: null }), &[key, "missing"]);
        refused(json!({ key: -1 }), &[key]);
        refused(json!({ key: "8" }), &[key]);
    }
    for key in ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"] {
        refused(json!({ key: 0 }), &[key]);
        refused(json!({ key: u32::MAX }), &[key]);
        refused(json!({ key: 1_u64 << 63 }), &[key]);
    }
    refused(json!({ "num_attention_heads": 0, "head_dim": 8 }), &["num_attention_heads"]);
    refused(json!({ "num_attention_heads": 0 }), &["num_attention_heads"]);
    refused(json!({ "num_key_value_heads": 3 }), &["num_key_value_heads"]);
    refused(json!({ "rope_theta": 0 }), &["rope_theta"]);
    refused(json!({ "rope_parameters": { "rope_theta": -5.0 } }), &["rope_theta"]);
    refused(json!({ "rope_parameters": 5 }), &["rope_parameters"]);
    refused(json!({ "sliding_window": 0 }), &["sliding_window"]);
    for content in ["", "[]", "{", "null", "{}"] {
        folder.write("config.json", content);
        expect_refusal(&device, &folder.0, &path, content, &[]);
    }
    fs::remove_file(&path).unwrap();
    expect_refusal(&device, &folder.0, &path, "no config.json", &[]);
}

#[test]
fn folders_with_missing_or_wrong_weights_are_refused() {
    let device = common::cpu();
    let folder = published();
    let path = folder.0.join("model.safetensors");
    for weight in weights() {
        let without = |weights: &[Weight]| safetensors(weights.iter().filter(|other| other.gguf != weight.gguf));
        folder.write("model.safetensors", without(&weights()));
        let name = if weight.gguf == "output.weight" { &weight.published } else { &weight.gguf };
        expect_refusal(&device, &folder.0, &folder.0, "a missing tensor", &[name, "missing"]);
    }
    for dtype in ["I32", "U32"] {
        let file = safetensors(&weights());
        let at = file.windows(3).position(|three| three == b"F32").unwrap();
        // A type name of equal length and element size: nothing else changes.
        let changed = [&file[..at], dtype.as_bytes(), &file[at + 3..]].concat();
        folder.write("model.safetensors", changed);
        expect_refusal(&device, &folder.0, &path, dtype, &["model.embed_tokens.weight", dtype]);
    }
    fs::remove_file(&path).unwrap();
    expect_refusal(&device, &folder.0, &path, "no weights", &[]);
    let nowhere = folder.0.join("nowhere");
    expect_refusal(&device, &nowhere, &nowhere, "no file", &[]);
}

#[test]
fn tied_head_uses_the_embedding() {
    let device = common::cpu();
    let folder = published();
    let untied = logits(&load(&device, &folder.0).unwrap());
    let mut config = config_json();
    config["tie_word_embeddings"] = json!(true);
    folder.write("config.json", config.to_string());
    folder.write("model.safetensors", safetensors(weights().iter().filter(|weight| weight.gguf != "output.weight")));
    let tied = logits(&load(&device, &folder.0).unwrap());
    let mut same = weights();
    let embedding = same[0].values.clone();
    same.last_mut().unwrap().values = embedding;
    folder.write("model.safetensors", safetensors(&same));
    assert_eq!(logits(&load(&device, &folder.0).unwrap()), tied);
    assert_ne!(tied, untied);
}

#[test]
fn folder_without_a_tokenizer_works_on_token_ids() {
    let device = common::cpu();
    let folder = published();
    let says = |name: &str| {
        let model = load(&device, &folder.0).unwrap();
        let mut session = model.session().unwrap();
        let mut generation = session.generate_ids(&PROMPT, &GenerateOptions::greedy(2)).unwrap();
        assert!(block_on(generation.next()).unwrap().unwrap().id < VOCAB as u32);
        let error = session.generate("cab", &GenerateOptions::greedy(1)).err().unwrap();
        assert!(matches!(&error, Error::Tokenizer { .. }) && error.to_string().contains(name), "{error}");
    };
    says("tokenizer.json");
    folder.write("tokenizer.json", "{");
    says("tokenizer.json");
    folder.write("tokenizer_config.json", "[");
    says("tokenizer_config.json");
}

/// Byte-level BPE without merges, with tokens `t0`, `t1` and so on.
fn tokenizer_json() -> Value {
    let vocab: serde_json::Map<String, Value> = (0..VOCAB).map(|id| (format!("t{id}"), json!(id))).collect();
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "added_tokens": [], "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] },
    })
}

/// Three files of a folder name end-of-turn tokens.
#[test]
fn eos_tokens_are_read_from_three_files_of_a_folder() {
    let folder = published();
    folder.write("tokenizer.json", tokenizer_json().to_string());
    folder.write("tokenizer_config.json", r#"{ "eos_token": "t2" }"#);
    let ends = || tilewright::load::tokenizer(&folder.0).map(|tokenizer| tokenizer.eos_ids().to_vec());
    assert_eq!(ends().unwrap(), [2]);
    folder.write("generation_config.json", r#"{ "eos_token_id": [4, 2, 3, 100000] }"#);
    assert_eq!(ends().unwrap(), [2, 4, 3]);
    let mut config = config_json();
    config["eos_token_id"] = json!(5);
    folder.write("config.json", config.to_string());
    assert_eq!(ends().unwrap(), [2, 5, 4, 3]);
    // -1 means no token.
    folder.write("generation_config.json", r#"{ "eos_token_id": [-1, 4], "pad_token_id": -1 }"#);
    assert_eq!(ends().unwrap(), [2, 5, 4]);
    for broken in [r#"{ "eos_token_id": "x" }"#, r#"{ "eos_token_id": [-2] }"#, "{"] {
        folder.write("generation_config.json", broken);
        let message = ends().unwrap_err().to_string();
        assert!(message.contains("generation_config.json"), "{message}");
    }
}

/// Editors write a byte order mark, and Python writes numbers that are invalid JSON.
#[test]
fn folder_json_may_have_a_bom_and_python_floats() {
    let device = common::cpu();
    let want = logits(&load(&device, &published().0).unwrap());
    let folder = sharded();
    let marked = |text: String| format!("\u{feff}{text}");
    let mut config = config_json();
    config["initializer_range"] = json!("?");
    let config = config.to_string();
    for number in ["Infinity", "-Infinity", "NaN"] {
        folder.write("config.json", marked(config.replace("\"?\"", number)));
        folder.write(INDEX, marked(index().to_string()));
        folder.write("tokenizer.json", marked(tokenizer_json().to_string()));
        folder.write(
            "tokenizer_config.json",
            marked(format!("{{\"eos_token\": \"t2\", \"model_max_length\": {number}}}")),
        );
        folder.write("generation_config.json", marked(format!("{{\"eos_token_id\": 3, \"top_p\": {number}}}")));
        folder.write("chat_template.jinja", marked("{{ messages[0].content }}".into()));
        let model = load(&device, &folder.0).unwrap_or_else(|error| panic!("{number}: {error}"));
        assert_eq!(logits(&model), want, "{number}");
        assert_eq!(model.tokenizer().unwrap().eos_ids(), [2, 3]);
        assert_eq!(model.chat_source().templates, [("default".into(), "{{ messages[0].content }}".into())]);
    }
    // A relevant key must have a valid number.
    folder.write(
        "config.json",
        config.replace("\"?\"", "0.02").replace("\"rms_norm_eps\":", "\"rms_norm_eps\": NaN, \"x\":"),
    );
    let error = load(&device, &folder.0).err().unwrap().to_string();
    assert!(error.contains("rms_norm_eps") && error.contains("NaN"), "{error}");
}

/// Special-token ids that mean "none", in each width found in files, or unused ones.
#[test]
fn special_token_ids_out_of_range_mean_none() {
    let device = common::cpu();
    let want = logits(&TinyGguf::new().model(&device));
    let none: [(u32, &[u8]); 4] = [(U32, &[255; 4]), (I32, &[255; 4]), (I64, &[255; 8]), (U64, &[255; 8])];
    let beyond = (VOCAB as u32 + 5).to_le_bytes();
    for name in ["bos", "eos", "eot", "eom", "unknown", "seperator", "separator", "cls", "padding"] {
        let key = format!("tokenizer.ggml.{name}_token_id");
        for (value_type, value) in none.iter().copied().chain([(U32, &beyond[..])]) {
            let mut tiny = TinyGguf::new();
            tiny.set(&key, value_type, value);
            let what = format!("{key} {value_type} {value:?}");
            device.take_notices();
            if name == "eos" && value.len() == 4 && value[0] != 255 {
                // Such a token must end completions.
                let error = tiny.model(&device).tokenizer().err().unwrap().to_string();
                assert!(error.contains("eos_id"), "{error}");
                continue;
            }
            let model = tiny.model(&device);
            assert_eq!(logits(&model), want, "{what}");
            model.tokenizer().unwrap_or_else(|error| panic!("{what}: {error}"));
            let notices = device.take_notices();
            assert!(notices.len() == 1 && notices[0].contains("ignored"), "{what}: {notices:?}");
        }
    }
    // A token added before each text must exist.
    let mut tiny = TinyGguf::new();
    tiny.set("tokenizer.ggml.bos_token_id", U32, beyond);
    tiny.set("tokenizer.ggml.add_bos_token", BOOL, [1]);
    let error = tiny.model(&device).tokenizer().err().unwrap().to_string();
    assert!(error.contains("bos_id"), "{error}");
}

#[test]
fn config_keys_without_meaning_change_nothing() {
    let device = common::cpu();
    let folder = published();
    let mut config = config_json();
    let want = logits(&load(&device, &folder.0).unwrap());
    for (key, value) in [("num_local_experts", json!(0)), ("attention_temperature", Value::Null), ("x", json!([]))] {
        config[key] = value;
    }
    for (key, value) in
        [("torch_dtype", json!("float32")), ("bos_token_id", json!(1)), ("attention_dropout", json!(0.1))]
    {
        config[key] = value;
    }
    folder.write("config.json", config.to_string());
    assert_eq!(logits(&load(&device, &folder.0).unwrap()), want);
}

/// Both dialects of every published configuration.
#[test]
fn v4_and_v5_configs_of_every_model_load_equally() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    let mut n_pairs = 0;
    for folder in fs::read_dir(data.join("tiny-random")).unwrap().map(|entry| entry.unwrap().path()) {
        if !folder.join("config_v5.json").exists() {
            continue;
        }
        let copy = Folder::new();
        fs::copy(folder.join("model.safetensors"), copy.0.join("model.safetensors")).unwrap();
        let [v4, v5] = ["config.json", "config_v5.json"].map(|file| {
            fs::copy(folder.join(file), copy.0.join("config.json")).unwrap();
            ModelFile::open(&copy.0).map(|file| file.header.shape.config().clone())
        });
        match (v4, v5) {
            (Ok(v4), Ok(v5)) => assert_eq!(v4, v5, "{}", folder.display()),
            (v4, v5) => panic!("{}: {v4:?} and {v5:?}", folder.display()),
        }
        n_pairs += 1;
    }
    assert_eq!(n_pairs, 20);
}

/// Both dialects of a published configuration, against values read from the file by hand.
#[test]
fn transformers_4_and_5_configs_load_as_published() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    let llama3 =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_seq_len: 64.0 };
    for (name, heads, theta, scaling, window) in [
        ("llama-mha-bias", (4, 4, 16), 10_000.0, RopeScaling::None, None),
        ("llama3-rope", (4, 1, 32), 500_000.0, llama3, None),
        ("mistral-sliding", (4, 2, 16), 10_000.0, RopeScaling::None, Some(8)),
    ] {
        let source = data.join("tiny-random").join(name);
        let folder = Folder::new();
        fs::copy(source.join("model.safetensors"), folder.0.join("model.safetensors")).unwrap();
        let [v4, v5] = ["config.json", "config_v5.json"].map(|file| {
            fs::copy(source.join(file), folder.0.join("config.json")).unwrap();
            ModelFile::open(&folder.0).unwrap_or_else(|e| panic!("{e}")).header.shape.decoder().unwrap().clone()
        });
        assert_eq!(v4, v5, "{name}");
        assert_eq!((v5.dim, v5.n_layers(), v5.vocab_size, v5.max_seq_len), (64, 3, 293, 256), "{name}");
        assert_eq!((v5.ropes[0].theta, &v5.ropes[0].scaling), (theta, &scaling), "{name}");
        for Block { attention, feed_forward, .. } in &v5.blocks {
            assert_eq!((attention.n_heads, attention.n_kv_heads, attention.head_dim), heads, "{name}");
            assert_eq!((feed_forward.dim, attention.window), (112, window), "{name}");
        }
    }
}

#[test]
fn model_over_the_limit_names_a_context_that_fits() {
    let device = common::cpu();
    let open = || ModelFile::from_gguf_bytes(TinyGguf::new().bytes()).unwrap();
    let try_with = |context_length: Option<u32>, memory_limit: u64| {
        let options = LoadOptions { context_length, memory_limit: Some(memory_limit), ..LoadOptions::default() };
        Model::from_file(&device, open(), options).map(|model| model.plan().total_bytes())
    };
    let plan = Model::plan_file(&device.target(), &open(), &LoadOptions::default()).unwrap();
    assert_eq!(try_with(None, plan.total_bytes()).unwrap(), plan.total_bytes());

    for limit in [plan.total_bytes() - 1, plan.total_bytes() - plan.cache_bytes / 2 - 20_000] {
        let before = device.counters();
        let error = try_with(None, limit).unwrap_err();
        assert_eq!(device.counters() - before, Default::default());
        let Error::Memory { needed_bytes, limit_bytes, hint, breakdown } = &error else { panic!("{error}") };
        assert_eq!((*needed_bytes, *limit_bytes), (plan.total_bytes(), limit));
        for part in [plan.weights_bytes, plan.cache_bytes, plan.activations_bytes] {
            assert!(breakdown.contains(&part.to_string()), "{error}");
        }
        let fits: u32 = hint.split(' ').find_map(|word| word.parse().ok()).unwrap_or_else(|| panic!("{error}"));
        println!("{error}");
        assert!(try_with(Some(fits), limit).unwrap() <= limit, "{error}");
        assert!(try_with(Some(2 * fits), limit).is_err(), "{error}");
    }
    let error = try_with(None, plan.weights_bytes).unwrap_err();
    assert!(error.to_string().contains("no context length"), "{error}");
}

/// An allowed context length far beyond the memory costs nothing until requested.
#[test]
fn claimed_context_length_is_not_allocated_by_default() {
    let device = common::cpu();
    let mut tiny = TinyGguf::new();
    tiny.set("llama.context_length", U32, (1_u32 << 28).to_le_bytes());
    let model = tiny.model(&device);
    assert_eq!((model.config().max_seq_len, model.context_length()), (1 << 28, 4096));
    let before = device.counters();
    let file = ModelFile::from_gguf_bytes(tiny.bytes()).unwrap();
    let options = LoadOptions { context_length: Some(1 << 28), memory_limit: Some(1 << 30), ..LoadOptions::default() };
    let (result, peak) = allocator::peak_bytes(|| Model::from_file(&device, file, options));
    let error = result.err().unwrap();
    assert!(matches!(error, Error::Memory { .. }), "{error}");
    assert_eq!(device.counters() - before, Default::default());
    assert!(peak < 1 << 20, "{peak} bytes");
}

/// The default limit is the machine's memory.
#[cfg(target_os = "linux")]
#[test]
fn model_beyond_machine_memory_is_refused_before_loading() {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let kib = |key: &str| -> u64 {
        let line = meminfo.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let machine_bytes = (kib("MemTotal:") + kib("SwapTotal:")) * 1024;
    let device = common::cpu();
    let mut tiny = TinyGguf::new();
    tiny.set("llama.context_length", U32, (1_u32 << 28).to_le_bytes());
    let file = ModelFile::from_gguf_bytes(tiny.bytes()).unwrap();
    let plan = Model::plan_file(
        &device.target(),
        &file,
        &LoadOptions { context_length: Some(1 << 28), ..LoadOptions::default() },
    )
    .unwrap();
    if plan.total_bytes() <= machine_bytes {
        return common::skip("this machine has memory for any model of the test");
    }
    let before = device.counters();
    let options = LoadOptions { context_length: Some(1 << 28), ..LoadOptions::default() };
    let error = Model::from_file(&device, file, options).err().unwrap();
    let Error::Memory { needed_bytes, limit_bytes, hint, .. } = &error else { panic!("{error}") };
    assert!(*needed_bytes == plan.total_bytes() && *limit_bytes <= machine_bytes, "{error}");
    assert!(hint.contains("would fit") && hint.contains("available memory"), "{error}");
    assert_eq!(device.counters() - before, Default::default());
}

#[test]
fn vocabulary_only_gguf_is_enough_to_tokenize() {
    let mut alone = TinyGguf::new();
    alone.set("general.architecture", STRING, text("no-model"));
    (alone.file.tensors, alone.data) = (Vec::new(), Vec::new());
    let folder = Folder::new();
    let [alone, model] = [("alone.gguf", alone), ("model.gguf", TinyGguf::new())].map(|(name, tiny)| {
        let path = folder.0.join(name);
        fs::write(&path, tiny.bytes()).unwrap();
        path
    });
    let ids = |path| tilewright::load::tokenizer(path).unwrap().encode("a b", true).unwrap();
    assert_eq!(ids(&alone), ids(&model));
    assert!(!ids(&alone).is_empty());
    assert!(ModelFile::open(&alone).err().unwrap().to_string().contains("no-model"));

    let mut without = TinyGguf::new();
    without.remove("tokenizer.ggml.tokens");
    fs::write(&alone, without.bytes()).unwrap();
    let error = tilewright::load::tokenizer(&alone).err().unwrap().to_string();
    assert!(error.contains("alone.gguf") && error.contains("tokenizer.ggml.tokens"), "{error}");
}

/// As from a server without a size: a text or array that would fill the memory before it is known to be invalid.
#[test]
fn endless_header_is_refused_with_its_offset() {
    let mut endless = TinyGguf::new();
    endless.set("general.name", STRING, (1_u64 << 40).to_le_bytes());
    let bytes = endless.bytes();
    let files = vec![FileName { name: "endless.gguf".into(), size: None }];
    let mut reader = HeaderReader::new(files).unwrap();
    let error = bytes.chunks(64).find_map(|piece| reader.push(piece).err()).expect("the parser must refuse");
    let Error::InFile { path, source } = &error else { panic!("{error}") };
    let Error::Format { field, offset, .. } = &**source else { panic!("{error}") };
    assert_eq!((path.to_str(), &field[..]), (Some("endless.gguf"), "header"), "{error}");
    assert!(*offset > 0 && *offset <= bytes.len() as u64, "{error}");
}

/// File information from headers alone, for any architecture.
#[test]
fn outline_describes_files_that_cannot_be_loaded() {
    let outline = |file: &TinyGguf| {
        let bytes = file.bytes();
        let size = Some(bytes.len() as u64);
        let mut reader = HeaderReader::new(vec![FileName { name: "tiny.gguf".into(), size }]).unwrap();
        assert!(reader.outline().is_err(), "nothing has been read");
        while reader.wanted().is_some() {
            reader.push(&bytes).unwrap();
        }
        (reader.outline().unwrap(), reader.finish().map(|(header, _)| header))
    };
    let mut file = TinyGguf::new();
    file.set("general.license", STRING, text("mit"));
    let (known, header) = outline(&file);
    assert_eq!(known.licence.as_deref(), Some("mit"));
    assert_eq!((known.architecture.as_deref(), known.content), (Some("llama"), None));
    assert_eq!(known.weights, header.unwrap().tensor_index.shares());
    let n: u64 = known.weights.iter().map(|share| share.n_elements).sum();
    let size: u64 = known.weights.iter().map(|share| share.size_bytes).sum();
    assert!(n > 0 && known.weights.is_sorted_by_key(|share| std::cmp::Reverse(share.size_bytes)));
    assert!(size < file.bytes().len() as u64);
    file.set("general.architecture", STRING, text("other"));
    file.set("other.context_length", U32, 77_u32.to_le_bytes());
    file.set("general.type", STRING, text("adapter"));
    let (unknown, header) = outline(&file);
    assert_eq!(header.err().unwrap().code(), "unsupported");
    assert_eq!((unknown.architecture.as_deref(), unknown.max_context_length), (Some("other"), Some(77)));
    assert_eq!((unknown.content.as_deref(), unknown.weights), (Some("adapter"), known.weights));
}
