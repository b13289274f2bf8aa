//! Every published or computed file in the data folder loads and matches its description.

use super::common;
use super::data::{self, Reference};
use super::hostile::memory_limit;
use crate::allocator::peak_bytes;
use std::time::{Duration, Instant};
use tilewright::Error;
use tilewright::formats::block::dequantize;
use tilewright::formats::{BlockType, ConfigJson, Gguf, Safetensors, TensorInfo};

/// Parses all files of one kind within the memory bound and returns their number.
fn parse_all(extension: &str, parse: fn(&[u8], u64) -> Result<Vec<TensorInfo>, Error>) -> usize {
    let (mut n_tensors, mut slowest) = (0, Duration::ZERO);
    let files: Vec<_> = common::data_roots().iter().flat_map(|root| data::files(root, extension)).collect();
    for path in &files {
        let bytes = data::read(path);
        let start = Instant::now();
        let (result, peak) = peak_bytes(|| parse(&bytes, bytes.len() as u64));
        slowest = slowest.max(start.elapsed());
        let tensors = result.unwrap_or_else(|error| panic!("{}", error.in_file(path)));
        assert!(peak <= memory_limit(bytes.len()), "{}: {peak} bytes of memory", path.display());
        for tensor in &tensors {
            let blocks = tensor.shape.iter().product::<u64>() / tensor.block_type.block_len();
            assert_eq!(tensor.bytes(&bytes).unwrap().len() as u64, blocks * tensor.block_type.block_bytes());
        }
        n_tensors += tensors.len();
    }
    println!("{} files *.{extension}, {n_tensors} tensors, the slowest in {slowest:?}", files.len());
    files.len()
}

#[test]
fn all_published_gguf_files_parse() {
    let n_files = parse_all("gguf", |bytes, file_len| Ok(Gguf::parse(bytes, file_len)?.tensors));
    assert!(n_files >= 12, "{n_files}");
}

#[test]
fn all_published_safetensors_files_parse() {
    let n_files = parse_all("safetensors", |bytes, file_len| Ok(Safetensors::parse(bytes, file_len)?.tensors));
    assert!(n_files >= 60, "{n_files}");
}

/// A tiny Llama's shapes follow from its `config.json`; weights stored in the same order in both formats are equal.
#[test]
fn gguf_and_safetensors_hold_equal_weights() {
    let Some(folder) = common::data(&["tiny-random"]) else { return };
    let folder = folder.join("tiny-random/llama3-rope");
    let config = ConfigJson::parse(&data::read(folder.join("config.json"))).unwrap();
    let number = |key: &str| u64::from(config.get_u32(key).unwrap().unwrap());
    let (dim, ffn_dim, vocab_size) = (number("hidden_size"), number("intermediate_size"), number("vocab_size"));
    let (head_dim, n_layers) = (number("head_dim"), number("num_hidden_layers"));
    let [q_dim, kv_dim] = ["num_attention_heads", "num_key_value_heads"].map(|key| number(key) * head_dim);

    let bytes = data::read(folder.join("model-f16.gguf"));
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    let reference = Reference::open(folder.join("model.safetensors"));
    let mut n_found = 0;
    let mut expect = |name: String, shape: &[u64], twin: Option<String>| {
        let tensor = gguf.tensor(&name).unwrap_or_else(|| panic!("no {name}"));
        // Only vectors are wider than in the other file.
        let block_type = if shape.len() == 1 { BlockType::F32 } else { BlockType::F16 };
        assert_eq!((tensor.shape.as_slice(), tensor.block_type), (shape, block_type), "{name}");
        if let Some(twin) = twin {
            let values = |block_type, bytes: &[u8]| {
                let mut values = vec![f32::NAN; tensor.n_elements() as usize];
                dequantize(block_type, bytes, &mut values).unwrap_or_else(|e| panic!("{name}: {e}"));
                values
            };
            let found = values(block_type, tensor.bytes(&bytes).unwrap());
            assert!(found == values(BlockType::F16, reference.bytes(&twin)), "{name} differs from {twin}");
        }
        n_found += 1;
    };
    expect("token_embd.weight".into(), &[vocab_size, dim], Some("model.embed_tokens.weight".into()));
    expect("output_norm.weight".into(), &[dim], Some("model.norm.weight".into()));
    expect("rope_freqs.weight".into(), &[head_dim / 2], None);
    for layer in 0..n_layers {
        for (name, shape, twin) in [
            ("attn_norm", &[dim][..], Some("input_layernorm")),
            ("attn_q", &[q_dim, dim], None), // rows in another order, for another RoPE style
            ("attn_k", &[kv_dim, dim], None),
            ("attn_v", &[kv_dim, dim], Some("self_attn.v_proj")),
            ("attn_output", &[dim, q_dim], Some("self_attn.o_proj")),
            ("ffn_norm", &[dim], Some("post_attention_layernorm")),
            ("ffn_gate", &[ffn_dim, dim], Some("mlp.gate_proj")),
            ("ffn_up", &[ffn_dim, dim], Some("mlp.up_proj")),
            ("ffn_down", &[dim, ffn_dim], Some("mlp.down_proj")),
        ] {
            let twin = twin.map(|twin| format!("model.layers.{layer}.{twin}.weight"));
            expect(format!("blk.{layer}.{name}.weight"), shape, twin);
        }
    }
    assert_eq!(n_found, gguf.tensors.len());

    let metadata = &gguf.metadata;
    assert_eq!(metadata.get_str("general.architecture").unwrap(), Some("llama"));
    assert_eq!(metadata.get_u32("llama.embedding_length").unwrap().map(u64::from), Some(dim));
    assert_eq!(metadata.get_u32("llama.block_count").unwrap().map(u64::from), Some(n_layers));
    let eps = config.get_f32("rms_norm_eps").unwrap();
    assert_eq!(metadata.get_f32("llama.attention.layer_norm_rms_epsilon").unwrap(), eps);
}

/// Vocabularies have their models' published sizes, with known tokens at known ids.
#[test]
fn vocabularies_match_published_sizes_and_tokens() {
    let Some(folder) = common::data(&["vocab"]) else { return };
    for (file, n_tokens, id, token) in [
        ("ggml-vocab-gpt-2.gguf", 50_257, 15_496, "Hello"),
        ("ggml-vocab-llama-spm.gguf", 32_000, 15_043, "▁Hello"),
        ("ggml-vocab-bert-bge.gguf", 30_522, 101, "[CLS]"),
    ] {
        let bytes = data::read(folder.join("vocab").join(file));
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        assert!(gguf.tensors.is_empty());
        let tokens = gguf.metadata.get_str_array("tokenizer.ggml.tokens").unwrap().unwrap();
        assert_eq!((tokens.len(), tokens[id]), (n_tokens, token), "{file}");
        let types = gguf.metadata.get_i32_array("tokenizer.ggml.token_type").unwrap().unwrap();
        assert_eq!(types.len(), n_tokens, "{file}");
    }
}

/// Tests on files that are not in the repository: see `scripts/test`.
mod further_data {
    use super::*;

    /// The mixed file covers many types; the list is from its description.
    #[test]
    fn mixed_gguf_file_holds_13_block_types() {
        let Some(folder) = common::data(&["stories260k-wide"]) else { return };
        let bytes = data::read(folder.join("stories260k-wide/stories260k-wide-mixed.gguf"));
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
        let mut types: Vec<_> = gguf.tensors.iter().map(|tensor| tensor.block_type.name()).collect();
        types.sort_unstable();
        types.dedup();
        println!("{types:?}");
        assert_eq!(types.len(), 13, "{types:?}");
    }
}
