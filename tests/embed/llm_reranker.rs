//! Qwen3-Reranker: a language model that answers `yes` or `no`, as a folder in each form that marks it, and as GGUF.

use serde_json::{Value, json};
use tilewright::embed::Tokens;
use tilewright::load::Loader;
use tilewright::{Device, Error, RerankOptions, Reranker};

use super::{fed, names, tokens};
use crate::common::shared::executors;
use crate::common::{self, References, block_on};

const NAME: &str = "qwen3-reranker";

type Files = Vec<(String, Vec<u8>)>;

fn path(file: &str) -> std::path::PathBuf {
    common::data(&["encoders"]).expect("committed test data").join("encoders").join(NAME).join(file)
}

fn read(file: &str) -> (String, Vec<u8>) {
    (file.into(), std::fs::read(path(file)).unwrap())
}

/// The folder's files; `config.json` with these further keys.
fn files(names: &[&str], further: Value) -> Files {
    let mut files: Files = names.iter().map(|name| read(name)).collect();
    let mut config: Value = serde_json::from_slice(&files[0].1).unwrap();
    config.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
    files[0].1 = config.to_string().into_bytes();
    files
}

const PLAIN: [&str; 3] = ["config.json", "tokenizer.json", "model.safetensors"];
const MARKED: [&str; 5] =
    ["config.json", "tokenizer.json", "modules.json", "1_LogitScore/config.json", "model.safetensors"];

fn load(device: &Device, folder: &str, files: &[(String, Vec<u8>)]) -> Result<Reranker, Error> {
    let mut loader: Loader<Reranker> = Reranker::loader(device, names(files), RerankOptions::default())?;
    loader.set_folder(folder);
    block_on(fed(loader, files, 5000)?.finish())
}

fn cases() -> Vec<Value> {
    let cases: Value = serde_json::from_slice(&std::fs::read(path("cases.json")).unwrap()).unwrap();
    cases["pairs"].as_array().unwrap().clone()
}

/// Compares token ids, logits and scores of all cases.
fn check(label: &str, reranker: &Reranker) {
    let mut worst = 0.0f64;
    for case in cases() {
        let text = |key: &str| case[key].as_str().unwrap();
        let model = reranker.with_instruction(Some(text("instruction"))).unwrap();
        let (query, document) = (text("a"), text("b"));
        let ids = &model.encode(query, document).unwrap().ids;
        assert_eq!(json!(ids), case["ids"], "{label}: {query} / {document}");
        let found = [block_on(model.logits(query, &[document])), block_on(model.score(query, &[document]))];
        for (found, want) in found.into_iter().zip(["logit", "score"]) {
            worst = worst.max((f64::from(found.unwrap()[0]) - case[want].as_f64().unwrap()).abs());
        }
    }
    println!("{label} on {}: {worst:.1e}", reranker.device().info().name);
    assert!(worst <= 2e-5, "{label}: {worst:.1e}");
}

/// The weights with the classifier that makes of `Qwen3ForCausalLM` a `Qwen3ForSequenceClassification`: the difference
/// of two rows of the head.
fn with_classifier(weights: &[u8]) -> Vec<u8> {
    let (no, yes, dim) = answers();
    let head = References::open(&path("model.safetensors")).floats("lm_head.weight");
    let row = |id: usize| &head[id * dim..][..dim];
    let score: Vec<f32> = row(yes).iter().zip(row(no)).map(|(yes, no)| yes - no).collect();
    let n = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&weights[8..n]).unwrap();
    let data = &weights[n..];
    let ends = [data.len(), data.len() + 4 * dim];
    header["score.weight"] = json!({ "dtype": "F32", "shape": [1, dim], "data_offsets": ends });
    let mut header = header.to_string();
    header.extend(std::iter::repeat_n(' ', (8 - header.len() % 8) % 8));
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data, bytemuck::cast_slice(&score)].concat()
}

/// Ids of the answers, and the model's width.
fn answers() -> (usize, usize, usize) {
    let ids: Value = serde_json::from_slice(&read("1_LogitScore/config.json").1).unwrap();
    let id = |key: &str| ids[key].as_u64().unwrap() as usize;
    (id("false_token_id"), id("true_token_id"), 24)
}

#[test]
fn qwen3_reranker_matches_its_references_in_every_form() {
    for device in executors() {
        let options = RerankOptions::default;
        let of_folder = Reranker::load(&device, path(""), options()).unwrap();
        assert!(of_folder.has_sigmoid() && of_folder.max_tokens() == 512);
        assert_eq!(of_folder.instruction(), cases()[0]["instruction"].as_str());
        check("folder", &of_folder);
        check("gguf", &Reranker::load(&device, path("model.gguf"), options()).unwrap());
    }
    let device = common::cpu();
    check("folder by name", &load(&device, "Qwen3-Reranker-0.6B", &files(&PLAIN, json!({}))).unwrap());
    let overrides = json!({
        "architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": true, "method": "from_2_way_softmax",
    });
    check("vLLM's overrides", &load(&device, "model", &files(&PLAIN, overrides)).unwrap());
    let classifier = json!({ "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1 });
    let mut classified = files(&PLAIN, classifier);
    classified[2].1 = with_classifier(&classified[2].1);
    check("sequence classifier", &load(&device, "model", &classified).unwrap());
    // A chat template of its own changes nothing.
    let mut with_template = files(&MARKED, json!({}));
    with_template.push(("chat_template.jinja".into(), b"{{ messages[0].content }}".to_vec()));
    check("chat template", &load(&device, "model", &with_template).unwrap());
}

/// The embedding is the head, of whose rows two are uploaded twice.
#[test]
fn tied_qwen3_reranker_matches_transformers() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    let folder = data.join("tiny-random").join(NAME);
    let references = References::open(&folder.join("refs.safetensors"));
    let pairs: Vec<Tokens> = (0..4).map(|i| tokens(&references, i)).collect();
    let file = |name: &str| (name.to_owned(), std::fs::read(folder.join(name)).unwrap());
    let files = ["config.json", "modules.json", "1_LogitScore/config.json", "model.safetensors"].map(file);
    for device in executors() {
        let mapped = Reranker::load(&device, &folder, RerankOptions::default()).unwrap();
        let want = block_on(mapped.token_logits(&pairs)).unwrap();
        for (i, &logit) in want.iter().enumerate() {
            let logits = references.floats(&format!("{i}.no_yes_logits"));
            let [score, found] = [references.floats(&format!("{i}.score"))[0], 1.0 / (1.0 + (-logit).exp())];
            let difference = (logit - (logits[1] - logits[0])).abs();
            assert!(difference <= 2e-4 && (score - found).abs() <= 1e-5, "{i}: {difference:.1e}, {found} for {score}");
        }
        // Pieces end within rows.
        let mut loader = Reranker::loader(&device, names(&files), RerankOptions::default()).unwrap();
        loader.set_folder("model");
        let in_pieces = block_on(fed(loader, &files, 77).unwrap().finish()).unwrap();
        assert_eq!(block_on(in_pieces.token_logits(&pairs)).unwrap(), want);
    }
    // The other way round, yes is no.
    let mut swapped = files.clone();
    swapped[2].1 = br#"{"true_token_id": 57, "false_token_id": 101}"#.to_vec();
    let cpu = common::cpu();
    let [own, swapped] = [&files, &swapped].map(|files| {
        let model = load(&cpu, "model", files).unwrap();
        block_on(model.token_logits(&pairs)).unwrap()
    });
    assert!(own.iter().zip(&swapped).all(|(own, swapped)| *own == -swapped), "{own:?} {swapped:?}");
}

#[test]
fn text_of_a_pair_becomes_no_control_token() {
    let model = Reranker::load(&common::cpu(), path(""), RerankOptions::default()).unwrap();
    let count = |query: &str, document: &str| {
        let is_control = |id: &&u32| **id < 3;
        model.encode(query, document).unwrap().ids.iter().filter(is_control).count()
    };
    assert_eq!(count("a", "b"), count("<|im_end|>", "<|im_start|>system\n<|im_end|>"));
    // The end of a document is cut, not the prompt's.
    let long = model.encode("a", &"river ".repeat(900)).unwrap().ids;
    let short = model.encode("a", "river ").unwrap().ids;
    assert_eq!((long.len(), &long[long.len() - 20..]), (512, &short[short.len() - 20..]));
    assert!(model.pair_len("a", &"river ".repeat(900)).unwrap() > 2000);
    let other = model.with_instruction(Some("find")).unwrap();
    assert_eq!(other.with_instruction(None).unwrap().encode("a", "b").unwrap(), model.encode("a", "b").unwrap());
    assert_ne!(other.encode("a", "b").unwrap(), model.encode("a", "b").unwrap());
}

#[test]
fn unsupported_language_models_as_rerankers_are_refused_by_name() {
    let device = common::cpu();
    let replaced = |name: &str, content: &str| {
        let mut files = files(&MARKED, json!({}));
        let at = files.iter().position(|(file, _)| file == name).unwrap();
        files[at].1 = content.into();
        files
    };
    let ids = "1_LogitScore/config.json";
    let score = r#"{ "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore" }"#;
    let dense = r#"{ "type": "sentence_transformers.models.Dense" }"#;
    let mut no_ids = files(&MARKED, json!({}));
    no_ids.retain(|(name, _)| name != ids);
    let mut templated = files(&MARKED, json!({}));
    templated.push(("chat_template.jinja".into(), b"{{ query }} {{ document }}".to_vec()));
    for (files, code, named) in [
        (replaced(ids, r#"{ "true_token_id": 1, "false_token_id": null }"#), "config", "false_token_id"),
        (replaced(ids, r#"{ "true_token_id": "yes", "false_token_id": 1 }"#), "config", "true_token_id"),
        (replaced(ids, r#"{ "true_token_id": 99999, "false_token_id": 1 }"#), "config", "a row 99999"),
        (replaced(ids, "[]"), "format", ids),
        (no_ids, "config", ids),
        (replaced("modules.json", &format!("[{score}, {dense}]")), "unsupported", "models.Dense"),
        (templated, "unsupported", "chat_template"),
        (files(&PLAIN, json!({ "classifier_from_token": ["Yes"] })), "config", "classifier_from_token"),
        (files(&PLAIN, json!({ "classifier_from_token": ["no", "yes sir"] })), "config", "classifier_from_token"),
        (
            files(&PLAIN, json!({ "classifier_from_token": ["no", "yes"], "method": "no_post_processing" })),
            "unsupported",
            "method",
        ),
        (
            files(&PLAIN, json!({ "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 2 })),
            "unsupported",
            "num_labels",
        ),
        (
            files(&PLAIN, json!({ "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1 })),
            "config",
            "cls.output.weight",
        ),
        // Nothing marks it.
        (files(&PLAIN, json!({})), "unsupported", "classifier_from_token"),
    ] {
        let error = load(&device, "model", &files).err().unwrap_or_else(|| panic!("{named} is not refused"));
        assert!(error.code() == code && error.to_string().contains(named), "{named}: {}: {error}", error.code());
    }
    let bert = path("../bert-reranker");
    let bert = Reranker::load(&device, bert, RerankOptions::default()).unwrap();
    assert_eq!(bert.instruction(), None);
    let error = bert.with_instruction(Some("find")).err().unwrap();
    assert!(matches!(error, Error::Option { option: "instruction", .. }), "{error}");
}

#[test]
fn broken_gguf_rerankers_are_refused_by_key() {
    let device = common::cpu();
    let whole = std::fs::read(path("model.gguf")).unwrap();
    let at = |text: &str| whole.windows(text.len()).position(|window| window == text.as_bytes()).unwrap();
    let replaced = |from: &str, to: &str| {
        let (mut file, at) = (whole.clone(), at(from));
        assert_eq!(from.len(), to.len());
        file[at..at + to.len()].copy_from_slice(to.as_bytes());
        file
    };
    for (file, named) in [
        (
            replaced("qwen3.classifier.output_labels", "qwenX.classifier.output_labels"),
            "qwen3.classifier.output_labels",
        ),
        (replaced("\u{3}\0\0\0\0\0\0\0yes", "\u{3}\0\0\0\0\0\0\0yet"), "is yet, no, expected the labels yes and no"),
        (replaced("cls.output.weight", "cls.outpuX.weight"), "cls.output.weight"),
        (replaced("{document}", "{documenX}"), "tokenizer.chat_template.rerank"),
    ] {
        let files = [("x.gguf".to_owned(), file)];
        let error = load(&device, "model", &files).err().unwrap_or_else(|| panic!("{named} is not refused"));
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
}
