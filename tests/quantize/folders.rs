//! Hugging Face folders converted to GGUF: against files by other programs, and against the folders themselves.

use std::path::{Path, PathBuf};

use super::common::{self, block_on};
use super::files::{folder, open, quantized, values};
use tilewright::formats::BlockType;
use tilewright::kernels::KvType;
use tilewright::load::convert::QuantizeOptions;
use tilewright::{LoadOptions, Model};

fn data(set: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(set)
}

/// A test's copy of a tiny random folder, with texts in its `config.json` replaced.
fn copy(test: &str, name: &str, replaced: &[(&str, &str)]) -> PathBuf {
    let (from, to) = (data("tiny-random").join(name), folder(&format!("{test}-{name}")));
    let mut config = std::fs::read_to_string(from.join("config.json")).unwrap();
    for (old, new) in replaced {
        assert!(config.contains(old), "{name}: no {old}");
        config = config.replace(old, new);
    }
    std::fs::write(to.join("config.json"), config).unwrap();
    std::fs::copy(from.join("model.safetensors"), to.join("model.safetensors")).unwrap();
    to
}

fn logits(path: &Path) -> Vec<f32> {
    let model =
        Model::load(&common::cpu(), path, LoadOptions { kv_type: KvType::F32, ..LoadOptions::default() }).unwrap();
    let ids: Vec<u32> = (0..24).map(|i| i * 11 % 290).collect();
    block_on(model.session().unwrap().logits(&ids)).unwrap()
}

/// The GGUF files beside the folders hold the same numbers, written by another program.
#[test]
fn converted_tensors_match_the_reference_gguf_files() {
    for name in ["llama-mha-bias", "llama3-rope", "qwen2", "qwen3"] {
        let from = data("tiny-random").join(name);
        let output = folder(&format!("twin-{name}")).join("f16.gguf");
        quantized(&from, &output, &QuantizeOptions::new(BlockType::F16)).unwrap();
        let ((bytes, gguf), (twin_bytes, twin)) = (open(&output), open(&from.join("model-f16.gguf")));
        assert_eq!(gguf.tensors.len(), twin.tensors.len(), "{name}");
        for want in &twin.tensors {
            let got = gguf.tensor(&want.name).unwrap_or_else(|| panic!("{name}: no {}", want.name));
            assert_eq!(got.shape, want.shape, "{name}: {}", want.name);
            let differs = values(&bytes, got).iter().zip(&values(&twin_bytes, want)).any(|(a, b)| (a - b).abs() > 1e-5);
            assert!(!differs, "{name}: {}", want.name);
        }
    }
}

/// A folder and its F32 conversion compute the same.
#[test]
fn converted_file_computes_like_its_folder() {
    let usual_scale = [("\"query_pre_attn_scalar\": 24", "\"query_pre_attn_scalar\": 16")];
    let cases: [(&str, &[(&str, &str)]); 8] = [
        ("llama-mha-bias", &[]),
        ("llama3-rope", &[]),
        ("mistral-sliding", &[]),
        ("qwen2", &[]),
        ("qwen3", &[]),
        ("gemma", &[]),
        ("gemma2", &usual_scale),
        ("gemma3", &usual_scale),
    ];
    for (name, replaced) in cases {
        let from = copy("computes", name, replaced);
        let output = from.join("f32.gguf");
        quantized(&from, &output, &QuantizeOptions::new(BlockType::F32)).unwrap();
        let difference = common::largest_difference(&logits(&output), &logits(&from));
        println!("{name}: logits within {difference:.1e}");
        assert!(difference <= 2e-4, "{name}: logits differ by {difference}");
    }
}

/// The byte-level BPE vocabulary, with filler tokens, and its special tokens.
#[test]
fn byte_level_tokenizer_survives_conversion_to_gguf() {
    let from = copy("tokenizer", "qwen3", &[]);
    std::fs::copy(data("encoders/roberta-reranker/tokenizer.json"), from.join("tokenizer.json")).unwrap();
    std::fs::write(from.join("tokenizer_config.json"), r#"{"bos_token": "<s>", "eos_token": "</s>"}"#).unwrap();
    let output = from.join("q8_0.gguf");
    quantized(&from, &output, &QuantizeOptions::new(BlockType::Q8_0)).unwrap();
    let (_, gguf) = open(&output);
    assert_eq!(gguf.metadata.get_str("tokenizer.ggml.model").unwrap(), Some("gpt2"));
    assert_eq!(gguf.metadata.get_str_array("tokenizer.ggml.tokens").unwrap().unwrap().len(), 293);
    let tokenizers = [&from, &output].map(|path| tilewright::load::tokenizer(path).unwrap());
    for text in ["Hello world, it's 1234 tests!", "  a\n\n b\t🚀 é 你好", "</s> is text"] {
        let [want, got] = [0, 1].map(|i| tokenizers[i].encode(text, true).unwrap());
        assert_eq!(got, want, "{text}");
    }
}

/// SentencePiece BPE, with scores derived from merges.
mod further_data {
    use super::*;

    #[test]
    fn sentencepiece_tokenizer_survives_conversion_to_gguf() {
        let Some(data) = common::data(&["stories260k", "tinystories656k"]) else { return };
        for name in ["stories260k", "tinystories656k"] {
            let from = data.join(name);
            let output = folder(&format!("folder-{name}")).join("f16.gguf");
            quantized(&from, &output, &QuantizeOptions::new(BlockType::F16)).unwrap();
            let tokenizers = [&from, &output].map(|path| tilewright::load::tokenizer(path).unwrap());
            let cases: serde_json::Value =
                serde_json::from_slice(&std::fs::read(from.join("tokenizer_cases.json")).unwrap()).unwrap();
            let cases = cases.as_array().or_else(|| cases["cases"].as_array()).unwrap();
            let mut n_equal = 0;
            for text in cases.iter().filter_map(|case| case["text"].as_str()) {
                let [want, got] = [0, 1].map(|i| tokenizers[i].encode(text, true).unwrap());
                n_equal += usize::from(got == want);
            }
            println!("{name}: {n_equal} of {} texts have the same ids", cases.len());
            assert_eq!(n_equal, cases.len(), "{name}");
        }
    }
}

/// Features that GGUF cannot express or that are unknown are refused by name before anything is written.
#[test]
fn unsupported_folders_are_refused_by_name() {
    let output = folder("refused").join("out.gguf");
    let refused = |folder: &Path| {
        let message = quantized(folder, &output, &QuantizeOptions::new(BlockType::F16)).unwrap_err().to_string();
        assert!(!output.exists());
        message
    };
    let random = data("tiny-random");
    let message = refused(&random.join("gemma2"));
    assert!(message.contains("query_pre_attn_scalar is 24 in the folder"), "{message}");
    for name in ["gpt2", "phi3", "smollm3"] {
        let message = refused(&random.join(name));
        let found = format!("model_type is `{name}`, which is not supported (supported: folders of llama, qwen2");
        assert!(message.contains(&found), "{message}");
    }
    let from = copy("refused", "qwen2", &[]);
    std::fs::write(from.join("vocab.json"), "{}").unwrap();
    let message = refused(&from);
    assert!(message.contains("tokenizer.json is missing beside `vocab.json`"), "{message}");
}
