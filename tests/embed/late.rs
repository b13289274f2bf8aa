//! Late interaction: the tiny ColBERT models of `tests/data/encoders`, with a NumPy forward pass in float64 as
//! reference.

use serde_json::{Value, json};
use tilewright::embed::{MultiVectorEmbedder, MultiVectorOptions, TextKind};
use tilewright::retrieval::index::{DocumentIndex, IndexOptions};
use tilewright::{Device, EmbedOptions, Embedder, Error, RerankOptions, Reranker, Tier};

use super::{fed, names};
use crate::common::shared::{self, executors};
use crate::common::{self, block_on, largest_difference};

const KINDS: [(&str, TextKind); 2] = [("queries", TextKind::Query), ("documents", TextKind::Document)];
const MODELS: [&str; 2] = ["colbert", "pylate"];

fn folder(name: &str) -> std::path::PathBuf {
    common::data(&["encoders"]).expect("committed test data").join("encoders").join(name)
}

fn cases(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder(name).join("cases.json")).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn texts<'a>(cases: &'a Value, kind: &str) -> Vec<&'a str> {
    cases[kind].as_array().unwrap().iter().map(|case| case["text"].as_str().unwrap()).collect()
}

fn embedder(device: &Device, name: &str) -> MultiVectorEmbedder {
    MultiVectorEmbedder::load(device, folder(name), MultiVectorOptions::default())
        .unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn late_interaction_matches_its_references() {
    let tiers = [Tier::Baseline, Tier::F16, Tier::Subgroups, Tier::Scalar];
    for device in shared::gpus_beside_cpu(tiers).into_iter().chain([common::cpu()]) {
        let tolerance = if device.tier() == Tier::F16 { 2e-2 } else { 2e-5 };
        for name in MODELS {
            let (cases, model) = (cases(name), embedder(&device, name));
            for (key, kind) in KINDS {
                let vectors = block_on(model.embed(kind, &texts(&cases, key))).unwrap();
                for (case, vectors) in cases[key].as_array().unwrap().iter().zip(&vectors) {
                    let text = case["text"].as_str().unwrap();
                    let tokens = model.encode(kind, text).unwrap();
                    assert_eq!(json!(tokens.ids), case["ids"], "{name}: {text}");
                    assert_eq!(json!(tokens.seen_len), case["seen"], "{name}: {text}");
                    let worst = largest_difference(vectors, &floats(&case["vectors"]));
                    assert!(worst <= tolerance, "{name} on {}: {text}: {worst:.1e}", device.tier().name());
                }
            }
        }
        common::assert_tested(&device);
    }
}

/// A reranker, the sum of best similarities, and a search give the same scores.
#[test]
fn late_interaction_scores_equal_those_of_reranker_and_index() {
    for device in executors() {
        for name in MODELS {
            let (cases, model) = (cases(name), embedder(&device, name));
            let reranker = Reranker::load(&device, folder(name), RerankOptions::default()).unwrap();
            assert!(!reranker.has_sigmoid() && reranker.instruction().is_none());
            let documents = texts(&cases, "documents");
            let vectors = block_on(model.embed(TextKind::Document, &documents)).unwrap();
            let lengths: Vec<u32> = vectors.iter().map(|vectors| vectors.len() as u32 / model.dims()).collect();
            let mut index = DocumentIndex::new(&device, model.dims(), IndexOptions::default()).unwrap();
            assert_eq!(block_on(index.append(&vectors.concat(), &lengths)).unwrap(), 0..documents.len() as u32);
            for (query, want) in texts(&cases, "queries").iter().zip(cases["scores"].as_array().unwrap()) {
                let want = floats(want);
                let of_query = block_on(model.embed(TextKind::Query, &[query])).unwrap().concat();
                let scores = block_on(model.scores(&of_query, &vectors)).unwrap();
                assert!(largest_difference(&scores, &want) <= 5e-5, "{name}: {scores:?}, expected {want:?}");
                assert_eq!(block_on(reranker.score(query, &documents)).unwrap(), scores, "{name}");
                let mut found = block_on(index.search(&of_query, documents.len(), None)).unwrap();
                assert!(found.is_sorted_by(|a, b| a.score >= b.score), "{found:?}");
                found.sort_by_key(|hit| hit.id);
                let found: Vec<f32> = found.iter().map(|hit| hit.score).collect();
                assert!(largest_difference(&found, &want) <= 5e-5, "{name}: {found:?}, expected {want:?}");
            }
            let pairs = [("a river", "tax law"), ("a river", "calm"), ("what", "tax law")];
            let scores = block_on(reranker.score_pairs(&pairs)).unwrap();
            for ((query, document), score) in pairs.iter().zip(scores) {
                // Similarities are one product, whose sums have the order of its size.
                let alone = block_on(reranker.score(query, &[document])).unwrap();
                assert!(largest_difference(&alone, &[score]) <= 5e-6, "{name}: {alone:?}, {score}");
            }
            assert_eq!(reranker.encode("a", "b").unwrap_err().code(), "unsupported");
        }
    }
}

/// The files of a model, `config.json` first, with other JSON values: `(file, key, value)`.
fn changed(name: &str, changes: &[(&str, &str, Value)]) -> Vec<(String, Vec<u8>)> {
    const FILES: [&str; 10] = [
        "config.json",
        "tokenizer.json",
        "artifact.metadata",
        "modules.json",
        "config_sentence_transformers.json",
        "1_Dense/config.json",
        "2_Dense/config.json",
        "model.safetensors",
        "1_Dense/model.safetensors",
        "2_Dense/model.safetensors",
    ];
    let read = |file: &&str| Some((file.to_string(), std::fs::read(folder(name).join(file)).ok()?));
    let mut files: Vec<_> = FILES.iter().filter_map(read).collect();
    for (file, key, value) in changes {
        let bytes = &mut files.iter_mut().find(|(name, _)| name == file).unwrap().1;
        let mut json: Value = serde_json::from_slice(bytes).unwrap();
        json[*key] = value.clone();
        *bytes = json.to_string().into_bytes();
    }
    files
}

#[test]
fn late_interaction_settings_are_read_or_refused_by_name() {
    const SETTINGS: &str = "config_sentence_transformers.json";
    const METADATA: &str = "artifact.metadata";
    let device = common::cpu();
    let load = |files: &[(String, Vec<u8>)]| -> Result<MultiVectorEmbedder, Error> {
        let loader = MultiVectorEmbedder::loader(&device, names(files), MultiVectorOptions::default())?;
        block_on(fed(loader, files, 5000)?.finish())
    };
    let ids =
        |name: &str, changes: &[(&str, &str, Value)], kind| load(&changed(name, changes)).unwrap().encode(kind, "calm");
    // Each setting changes what a text becomes.
    let [query, document] = [TextKind::Query, TextKind::Document];
    let whole = ids("pylate", &[], query).unwrap();
    let plain = ids("pylate", &[(SETTINGS, "query_prefix", json!(""))], query).unwrap();
    assert_eq!((whole.ids.len(), plain.ids.len(), plain.ids[1]), (12, 12, whole.ids[2]));
    let short = ids("pylate", &[(SETTINGS, "do_query_expansion", json!(false))], query).unwrap();
    assert_eq!((&short.ids[..], short.seen_len), (&whole.ids[..4], 4));
    assert_eq!(ids("pylate", &[(SETTINGS, "query_length", json!(9))], query).unwrap().ids, whole.ids[..9]);
    assert_eq!(ids("colbert", &[(METADATA, "attend_to_mask_tokens", json!(true))], query).unwrap().seen_len, 16);
    let other = ids("colbert", &[(METADATA, "doc_token_id", json!("[unused0]"))], document).unwrap();
    assert_eq!(other.ids[1], ids("colbert", &[], query).unwrap().ids[1]);
    let kept = load(&changed("colbert", &[(METADATA, "mask_punctuation", json!(false))])).unwrap();
    let kept = block_on(kept.embed(document, &["calm ?"])).unwrap()[0].len();
    let left_out = block_on(load(&changed("colbert", &[])).unwrap().embed(document, &["calm ?"])).unwrap()[0].len();
    assert_eq!((kept, left_out), (5 * 8, 4 * 8));

    for (name, changes, code, named) in [
        ("colbert", (METADATA, "similarity", json!("l2")), "unsupported", "similarity"),
        ("colbert", (METADATA, "query_maxlen", json!(3)), "config", "query_maxlen"),
        ("colbert", (METADATA, "query_maxlen", json!("16")), "config", "query_maxlen"),
        ("colbert", ("config.json", "architectures", json!(["BertModel"])), "config", "linear.weight"),
        ("pylate", ("1_Dense/config.json", "use_residual", json!(true)), "unsupported", "use_residual"),
        (
            "pylate",
            ("1_Dense/config.json", "module_input_name", json!("sentence_embedding")),
            "unsupported",
            "module_input",
        ),
        ("pylate", ("1_Dense/config.json", "out_features", json!(11)), "config", "in_features"),
        ("pylate", ("2_Dense/config.json", "bias", json!(false)), "config", "dense_2.bias"),
        ("pylate", (SETTINGS, "attend_to_expansion_tokens", json!(false)), "unsupported", "query_length"),
        ("pylate", (SETTINGS, "default_prompt_name", json!("query")), "config", "default_prompt_name"),
    ] {
        let error = load(&changed(name, &[changes])).err().unwrap_or_else(|| panic!("{named}"));
        assert!(error.code() == code && error.to_string().contains(named), "{named}: {}: {error}", error.code());
    }
    let error = ids("pylate", &[(SETTINGS, "query_prefix", json!("[R] "))], query).unwrap_err();
    assert!(error.code() == "tokenizer" && error.to_string().contains("query marker"), "{error}");

    // One kind of model is not taken for the other.
    let error = Embedder::load(&device, folder("colbert"), EmbedOptions::default()).err().unwrap();
    assert!(error.code() == "unsupported" && error.to_string().contains("late interaction"), "{error}");
    let error = MultiVectorEmbedder::load(&device, folder("nomic"), MultiVectorOptions::default()).err().unwrap();
    assert!(error.code() == "unsupported" && error.to_string().contains("one vector for each text"), "{error}");
}
