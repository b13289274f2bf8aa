//! Recipes of `quantize` against llama.cpp's files, by the digests that `scripts/llama_recipes.py` made from the same
//! inputs: one of each kind of model whose matrices get other types.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use tilewright::formats::BlockType;
use tilewright::formats::gguf::{Value, ValueType};
use tilewright::formats::gguf_writer::GgufHeader;
use tilewright::load::convert::{ImportanceMatrix, QuantizeOptions, Recipe, quantize_file};

/// Lines of model, recipe and digest of llama.cpp's file.
const DIGESTS: &str = include_str!("recipes.txt");

/// A model of few rows: recipes look at names, columns and keys alone.
struct Tiny {
    name: &'static str,
    architecture: &'static str,
    n_layers: u32,
    heads: [u32; 2],
    n_experts: u32,
    /// Columns of most matrices, and of downs.
    columns: [u64; 2],
    is_tied: bool,
    has_importance: bool,
}

const LLAMA: Tiny = Tiny {
    name: "llama",
    architecture: "llama",
    n_layers: 16,
    heads: [4, 2],
    n_experts: 0,
    columns: [256, 512],
    is_tied: false,
    has_importance: false,
};

const MODELS: [Tiny; 7] = [
    LLAMA,
    Tiny { name: "tied", n_layers: 9, heads: [8, 2], is_tied: true, ..LLAMA },
    Tiny { name: "importance", has_importance: true, n_layers: 11, ..LLAMA },
    Tiny { name: "experts", n_layers: 8, n_experts: 8, ..LLAMA },
    Tiny { name: "falcon", architecture: "falcon", ..LLAMA },
    Tiny { name: "large", n_layers: 80, heads: [8, 1], ..LLAMA },
    Tiny { name: "odd", n_layers: 3, columns: [96, 256], ..LLAMA },
];

impl Tiny {
    /// Names and shapes, in an order that is not llama.cpp's.
    fn tensors(&self) -> Vec<(String, Vec<u64>)> {
        let [wide, long] = self.columns;
        let mut tensors = vec![("token_embd.weight".to_owned(), vec![3, wide])];
        for layer in (0..self.n_layers).rev() {
            let mut add =
                |name: &str, shape: &[u64]| tensors.push((format!("blk.{layer}.{name}.weight"), shape.into()));
            add("attn_norm", &[wide]);
            match self.architecture {
                "falcon" => add("attn_qkv", &[2, wide]),
                _ => ["attn_v", "attn_q", "attn_k"].into_iter().for_each(|name| add(name, &[2, wide])),
            }
            add("attn_output", &[1, wide]);
            match self.n_experts {
                0 => {
                    add("ffn_down", &[2, long]);
                    add("ffn_up", &[2, wide]);
                    add("ffn_gate", &[2, wide]);
                }
                n => {
                    let n = u64::from(n);
                    add("ffn_gate_inp", &[n, wide]);
                    add("ffn_down_exps", &[n, 1, long]);
                    add("ffn_up_exps", &[n, 1, wide]);
                    add("ffn_gate_exps", &[n, 1, wide]);
                }
            }
        }
        tensors.push(("output_norm.weight".into(), vec![wide]));
        if !self.is_tied {
            tensors.push(("output.weight".into(), vec![3, wide]));
        }
        tensors
    }

    fn write(&self, path: &Path) {
        let mut header = GgufHeader::new(32);
        let key = |name: &str| format!("{}.{name}", self.architecture);
        let number =
            |header: &mut GgufHeader, name: &str, value: u32| header.set(&key(name), Value::U32(value)).unwrap();
        header.set("general.file_type", Value::U32(0)).unwrap();
        header.set("general.architecture", Value::Str(self.architecture)).unwrap();
        number(&mut header, "block_count", self.n_layers);
        number(&mut header, "context_length", 64);
        number(&mut header, "embedding_length", self.columns[0] as u32);
        number(&mut header, "feed_forward_length", self.columns[1] as u32);
        number(&mut header, "attention.head_count", self.heads[0]);
        number(&mut header, "attention.head_count_kv", self.heads[1]);
        if self.n_experts > 0 {
            number(&mut header, "expert_count", self.n_experts);
            number(&mut header, "expert_used_count", 2);
        }
        let epsilon = if self.architecture == "falcon" { "layer_norm_epsilon" } else { "layer_norm_rms_epsilon" };
        header.set(&key(&format!("attention.{epsilon}")), Value::F32(1e-5)).unwrap();
        header.set("tokenizer.ggml.model", Value::Str("no_vocab")).unwrap();
        write(path, header, &self.tensors(), |i| (noise(i) - 0.5) * 0.25);
    }

    /// An importance matrix, as `llama-imatrix` would write it.
    fn write_importance(&self, path: &Path) {
        let mut header = GgufHeader::new(32);
        header.set("general.type", Value::Str("imatrix")).unwrap();
        header.set_array("imatrix.datasets", ValueType::String, [Value::Str("none")].into_iter()).unwrap();
        header.set("imatrix.chunk_count", Value::U32(1)).unwrap();
        header.set("imatrix.chunk_size", Value::U32(512)).unwrap();
        let of_matrices =
            self.tensors().into_iter().filter(|(name, shape)| name.starts_with("blk.") && shape.len() > 1);
        let tensors: Vec<_> = of_matrices
            .flat_map(|(name, shape)| {
                let columns = shape[shape.len() - 1];
                [(format!("{name}.in_sum2"), vec![1, columns]), (format!("{name}.counts"), vec![1, 1])]
            })
            .collect();
        write(path, header, &tensors, |i| 1.0 + noise(i) * 4.0);
    }
}

/// Reproducible numbers from 0 to 1 that look random.
fn noise(i: u32) -> f32 {
    let mut bits = i.wrapping_mul(2_654_435_761);
    bits ^= bits >> 15;
    bits = bits.wrapping_mul(2_246_822_519);
    bits ^= bits >> 13;
    (bits >> 8) as f32 / (1 << 24) as f32
}

/// Writes a file of F32 tensors with these numbers.
fn write(path: &Path, mut header: GgufHeader, tensors: &[(String, Vec<u64>)], value: impl Fn(u32) -> f32) {
    let (mut data, mut next) = (Vec::new(), 0);
    for (name, shape) in tensors {
        let n_values = header.add_tensor(name, shape, BlockType::F32).unwrap() / 4;
        let values = next..next + n_values as u32;
        next = values.end;
        data.extend(values.flat_map(|i| value(i).to_le_bytes()));
        data.resize(data.len() + header.padding(data.len() as u64), 0);
    }
    std::fs::write(path, [header.to_bytes(), data].concat()).unwrap();
}

/// The inputs' folder, where `scripts/llama_recipes.py` finds them.
fn folder() -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("recipes");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn recipes_give_the_bytes_of_llama_cpp() {
    let folder = folder();
    let mut n_compared = 0;
    let mut wrong = Vec::new();
    for model in MODELS {
        let input = folder.join(format!("{}.gguf", model.name));
        model.write(&input);
        let importance = model.has_importance.then(|| {
            let path = folder.join(format!("{}.imatrix", model.name));
            model.write_importance(&path);
            ImportanceMatrix::open(path).unwrap()
        });
        for line in DIGESTS.lines().filter(|line| line.split(' ').next() == Some(model.name)) {
            let [_, recipe, want] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            let mut options = QuantizeOptions::of(recipe.parse::<Recipe>().unwrap());
            options.importance.clone_from(&importance);
            options.overwrite = true;
            let output = folder.join("out");
            quantize_file(&input, &output, &options, &mut |_, _, _| ()).unwrap();
            let digest = Sha256::digest(std::fs::read(&output).unwrap());
            let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            if digest != want {
                wrong.push(format!("{} {recipe}", model.name));
            }
            n_compared += 1;
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
    assert_eq!(n_compared, DIGESTS.lines().count());
}

/// llama.cpp refuses it as well.
#[test]
fn recipe_that_needs_importances_is_refused_without_them() {
    let folder = folder();
    let input = folder.join("plain.gguf");
    LLAMA.write(&input);
    let options = QuantizeOptions::of(Recipe::Q2_K_S);
    let error = quantize_file(&input, &folder.join("never"), &options, &mut |_, _, _| ()).unwrap_err().to_string();
    assert!(error.contains("Q2_K without importances") && error.contains("or Q2_K"), "{error}");
    assert!(!folder.join("never").exists());
}
