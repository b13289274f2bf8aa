//! BGE-M3's heads for tokens, in files of `torch.save`: a tiny random model with a NumPy forward pass in float64 as
//! reference.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tilewright::embed::{MultiVectorEmbedder, MultiVectorOptions, SparseEmbedder, TextKind};
use tilewright::load::{ModelFile, ModelShape, TokenHeads};
use tilewright::{EmbedOptions, Embedder};

use super::cosine_distance;
use crate::common::shared::executors;
use crate::common::{self, Rng, block_on, largest_difference};

fn folder() -> PathBuf {
    common::data(&["encoders"]).expect("committed test data").join("encoders/bge-m3")
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

#[test]
fn bge_m3_heads_match_their_references() {
    let cases: Value = serde_json::from_slice(&std::fs::read(folder().join("cases.json")).unwrap()).unwrap();
    let cases = cases["texts"].as_array().unwrap();
    let texts: Vec<&str> = cases.iter().map(|case| case["text"].as_str().unwrap()).collect();
    for device in executors() {
        // The vector of a text needs no head.
        let model = Embedder::load(&device, folder(), EmbedOptions::default()).unwrap();
        for (case, vector) in cases.iter().zip(block_on(model.embed(&texts)).unwrap().chunks_exact(16)) {
            assert!(cosine_distance(vector, &floats(&case["vector"])) <= 1e-9, "{case}");
        }
        let model = MultiVectorEmbedder::load(&device, folder(), MultiVectorOptions::default()).unwrap();
        for kind in [TextKind::Query, TextKind::Document] {
            for (case, vectors) in cases.iter().zip(block_on(model.embed(kind, &texts)).unwrap()) {
                assert!(largest_difference(&vectors, &floats(&case["vectors"])) <= 2e-5, "{case}");
            }
        }
        let model = SparseEmbedder::load(&device, folder(), MultiVectorOptions::default()).unwrap();
        for (case, found) in cases.iter().zip(block_on(model.embed(&texts)).unwrap()) {
            let want = case["weights"].as_array().unwrap();
            let ids: Vec<u64> = want.iter().map(|pair| pair[0].as_u64().unwrap()).collect();
            assert_eq!(found.iter().map(|token| u64::from(token.id)).collect::<Vec<_>>(), ids, "{case}");
            for (token, pair) in found.iter().zip(want) {
                assert!((f64::from(token.weight) - pair[1].as_f64().unwrap()).abs() <= 2e-5, "{case}");
            }
        }
    }
}

/// The heads of a folder whose `sparse_linear.pt` has these bytes.
fn heads(folder: &Path, bytes: &[u8]) -> TokenHeads {
    std::fs::write(folder.join("sparse_linear.pt"), bytes).unwrap();
    match ModelFile::open(folder).unwrap().header.shape {
        ModelShape::Encoder(shape) => shape.token_heads,
        ModelShape::Decoder(_) => panic!("a decoder"),
    }
}

#[test]
fn damaged_and_foreign_torch_files_are_refused_by_name() {
    let copy = std::env::temp_dir().join(format!("tilewright-bge-{}", std::process::id()));
    std::fs::create_dir_all(&copy).unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors", "sparse_linear.pt"] {
        std::fs::copy(folder().join(name), copy.join(name)).unwrap();
    }
    let whole = std::fs::read(folder().join("sparse_linear.pt")).unwrap();
    assert!(heads(&copy, &whole).weights.is_some());
    for len in (0..whole.len()).step_by(13) {
        let heads = heads(&copy, &whole[..len]);
        assert!(heads.weights.is_none() && heads.unread.is_some(), "{len} bytes: {heads:?}");
    }
    // Other texts of equal length in the pickle.
    let place = |part: &[u8]| whole.windows(part.len()).position(|window| window == part).unwrap();
    let changes: [(&[u8], &[u8], &str); 8] = [
        (b"collections\nOrderedDict", b"subprocess1\nOrderedDict", "subprocess1.OrderedDict"),
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v9", "_rebuild_tensor_v9"),
        (b"FloatStorage", b"DoublStorage", "DoublStorage"),
        (b"little", b"bigend", "byteorder"),
        (b"\x80\x02c", b"\x80\x05c", "pickle protocol"),
        (b")R", b")\x81", "pickle instruction"),
        (b"K\x01K\x10\x86", b"K\x02K\x10\x86", "storage"),
        (b"K\x10K\x01\x86", b"K\x09K\x01\x86", "strides"),
    ];
    for (from, to, named) in changes {
        let mut bytes = whole.clone();
        let at = place(from);
        bytes[at..at + to.len()].copy_from_slice(to);
        let heads = heads(&copy, &bytes);
        let reason = heads.unread.unwrap_or_default();
        assert!(heads.weights.is_none() && reason.contains(named), "{named}: {reason}");
        let error = SparseEmbedder::load(&common::cpu(), &copy, MultiVectorOptions::default()).err().unwrap();
        assert!(error.code() == "unsupported" && error.to_string().contains(named), "{error}");
    }
    // Whatever a byte becomes, reading ends.
    let mut rng = Rng::new(5);
    for _ in 0..300 {
        let mut bytes = whole.clone();
        for _ in 0..1 + rng.below(3) {
            let at = rng.below(bytes.len());
            bytes[at] = rng.below(256) as u8;
        }
        let _ = heads(&copy, &bytes);
    }
    std::fs::remove_dir_all(&copy).unwrap();
}
