//! Every model of the test data, alone and batched, in every mode of an engine: the same completions.

use std::path::{Path, PathBuf};

use tilewright::engine::{Engine, EngineOptions, Request};
use tilewright::generate::{ContextPolicy, Piece};
use tilewright::grammar::Constraint;
use tilewright::kernels::KvType;
use tilewright::{Device, GenerateOptions, LoadOptions, Model};

use crate::common::{self, block_on};
use crate::lora::random_adapter;

/// Default context of each sequence.
const CONTEXT: u32 = 128;
const N_TOKENS: usize = 24;

/// Folders of generative models.
pub fn decoders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-random");
    let folders = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = folders
        .filter(|folder| {
            let config: serde_json::Value =
                serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).unwrap()).unwrap();
            let is_encoder = ["bert", "roberta", "modernbert"].contains(&config["model_type"].as_str().unwrap());
            !is_encoder && !folder.join("modules.json").exists()
        })
        .collect();
    folders.sort();
    folders
}

pub fn name_of(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

fn load(device: &Device, path: &Path, options: LoadOptions<'_>) -> Model {
    let context_length = options.context_length.or(Some(CONTEXT));
    Model::load(device, path, LoadOptions { context_length, exact: true, kv_type: KvType::F32, ..options })
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Four prompts; the first is repetitive, and two share a prefix.
fn prompts(model: &Model) -> [Vec<u32>; 4] {
    let vocab_size = model.config().vocab_size;
    let ids = |n: u32, seed: u32| (0..n).map(move |i| (i * i * seed + 7 * i + 3 * seed) % vocab_size);
    [
        ids(9, 2).collect::<Vec<_>>().repeat(3),
        ids(70, 5).collect(),
        ids(70, 5).chain(ids(5, 3)).collect(),
        ids(2, 7).collect(),
    ]
}

/// Completions of these requests with logits: one by one, or batched.
fn texts(model: &Model, options: &EngineOptions, requests: &[Request], at_once: bool) -> (Vec<Vec<Piece>>, u64) {
    let (engine, mut driver) = Engine::new(model, options).unwrap_or_else(|error| panic!("{error}"));
    let mut texts = Vec::new();
    for some in requests.chunks(if at_once { requests.len() } else { 1 }) {
        let streams: Vec<_> = some.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
        while block_on(driver.step()).unwrap_or_else(|error| panic!("{error}")) {}
        for mut stream in streams {
            let mut pieces = Vec::new();
            while let Some(piece) = block_on(stream.next()) {
                pieces.push(piece.unwrap_or_else(|error| panic!("{error}")));
            }
            texts.push(pieces);
        }
    }
    (texts, engine.stats().drafted_tokens)
}

fn greedy() -> GenerateOptions {
    GenerateOptions { ignore_eos: true, logprobs: Some(2), ..GenerateOptions::greedy(N_TOKENS) }
}

/// The greedy tokens of a session.
fn of_session(model: &Model, ids: &[u32], options: &GenerateOptions) -> Vec<u32> {
    let mut session = model.session().unwrap();
    let options = GenerateOptions { logprobs: None, ..options.clone() };
    common::collect(&mut session.generate_ids(ids, &options).unwrap()).0
}

/// As [`of_session`], but halfway the session is saved and restored in another.
fn of_saved_session(model: &Model, ids: &[u32]) -> Vec<u32> {
    let half = |n| GenerateOptions { logprobs: None, max_tokens: n, ..greedy() };
    let mut session = model.session().unwrap();
    let (mut tokens, _, _) = common::collect(&mut session.generate_ids(ids, &half(N_TOKENS / 2)).unwrap());
    let saved = block_on(session.to_bytes("")).unwrap();
    let mut restored = model.session().unwrap();
    restored.restore_bytes(&saved).unwrap();
    assert!(restored.n_cached() >= ids.len(), "{} of {}", restored.n_cached(), ids.len());
    tokens.extend(common::collect(&mut restored.generate_ids(&[], &half(N_TOKENS - N_TOKENS / 2)).unwrap()).0);
    tokens
}

fn ids_of(text: &[Piece]) -> Vec<u32> {
    text.iter().map(|piece| piece.id).collect()
}

/// How often each mode ran.
#[derive(Debug, Default, PartialEq)]
struct Computed {
    plain: usize,
    saved: usize,
    look_up: usize,
    draft: usize,
    lora: usize,
    offload: usize,
    slide: usize,
    constraint: usize,
}

#[test]
fn every_model_is_batch_invariant_with_every_feature() {
    let paths = decoders();
    let (n_models, mut n) = (paths.len(), Computed::default());
    for path in &paths {
        one_model(&common::cpu(), path, &mut n);
    }
    println!("{n_models} models: {n:?}");
    assert!(n_models >= 30, "{n_models} models");
    let of_all = [n.plain, n.saved, n.look_up, n.lora, n.slide, n.constraint];
    assert_eq!(of_all, [n_models; 6], "{n:?}");
    assert!(n.draft > 20 && n.offload >= 5, "{n:?}");
}

/// The part that runs on an adapter.
#[test]
fn model_is_batch_invariant_on_a_gpu() {
    for device in common::shared::executors().into_iter().filter(Device::is_gpu) {
        for path in common::drawn(1, decoders()) {
            one_model(&device, &path, &mut Computed::default());
        }
    }
}

fn one_model(device: &Device, path: &Path, n: &mut Computed) {
    let (model, name) = (load(device, path, LoadOptions::default()), name_of(path));
    let requests: Vec<Request> = prompts(&model).map(|ids| Request::new(ids, greedy())).into();
    let engine = EngineOptions { max_sequences: 4, ..EngineOptions::default() };
    let same = |way: &str, found: &[Vec<Piece>], want: &[Vec<Piece>]| {
        for (i, (found, want)) in found.iter().zip(want).enumerate() {
            assert_eq!(found, want, "{name}, {way}, on {}: text {i}", device.info().name);
        }
    };
    let both = |way: &str, model: &Model, options: &EngineOptions, requests: &[Request]| {
        let ((alone, n_alone), (together, n_together)) =
            (texts(model, options, requests, false), texts(model, options, requests, true));
        same(&format!("{way}, at once"), &together, &alone);
        (alone, n_alone + n_together)
    };

    let (want, n_drafted) = both("plain", &model, &engine, &requests);
    assert_eq!(n_drafted, 0, "{name}");
    for (text, request) in want.iter().zip(&requests) {
        assert_eq!(ids_of(text), of_session(&model, &request.ids, &greedy()), "{name}: a session");
    }
    n.plain += 1;

    assert_eq!(of_saved_session(&model, &requests[1].ids), ids_of(&want[1]), "{name}: a saved session");
    n.saved += 1;

    let (found, n_drafted) = both("look-up", &model, &EngineOptions { prompt_lookup: 5, ..engine.clone() }, &requests);
    same("look-up", &found, &want);
    assert!(n_drafted > 0, "{name}: no draft tokens");
    n.look_up += 1;

    if let Ok(drafted) = model.with_draft(&model) {
        let (found, n_drafted) =
            both("draft", &drafted, &EngineOptions { draft_tokens: 3, ..engine.clone() }, &requests);
        same("draft", &found, &want);
        assert!(n_drafted > 0, "{name}: no draft tokens");
        n.draft += 1;
    }

    let adapter = model.add_adapter(&random_adapter(path, 1).0, 1.0).unwrap();
    let adapted = model.with_adapters([("own".to_owned(), adapter.clone())]).unwrap();
    let of_adapters: Vec<Request> = (0..)
        .zip(&requests)
        .map(|(i, own)| Request { adapter: (i % 2 == 0).then(|| "own".into()), ..own.clone() })
        .collect();
    let options = EngineOptions { prompt_lookup: 3, ..engine.clone() };
    let (found, _) = both("adapters", &adapted, &options, &of_adapters);
    let adapted = model.with_adapter(Some(&adapter)).unwrap();
    for (i, (text, request)) in found.iter().zip(&of_adapters).enumerate() {
        match request.adapter {
            Some(_) => assert_eq!(ids_of(text), of_session(&adapted, &request.ids, &greedy()), "{name}: adapters"),
            None => assert_eq!(text, &want[i], "{name}: beside adapters"),
        }
    }
    n.lora += 1;

    let needed_bytes = Engine::new(&model, &engine).unwrap().0.plan().total_bytes();
    if let Some(model) = offloaded(device, path, &engine, needed_bytes) {
        let (found, _) = both("offload", &model, &engine, &requests);
        same("offload", &found, &want);
        n.offload += 1;
    }

    let short = load(device, path, LoadOptions { context_length: Some(48), ..LoadOptions::default() });
    let slides = GenerateOptions { context_policy: ContextPolicy::Slide, ..greedy() };
    let requests: Vec<Request> =
        requests.iter().map(|request| Request { options: slides.clone(), ..request.clone() }).collect();
    let (found, _) = both("slide", &short, &EngineOptions { prompt_lookup: 2, ..engine }, &requests);
    for (text, request) in found.iter().zip(&requests) {
        assert_eq!(ids_of(text), of_session(&short, &request.ids, &slides), "{name}: a session that slides");
    }
    n.slide += 1;

    let folder = with_tokenizer(path);
    let model = load(device, &folder, LoadOptions::default());
    let words = GenerateOptions { constraint: Some(Constraint::Regex("[a-z0-9]+".into())), ..greedy() };
    let requests: Vec<Request> = (0..)
        .zip(prompts(&model))
        .map(|(i, ids)| Request::new(ids, if i % 2 == 0 { words.clone() } else { greedy() }))
        .collect();
    let (found, _) = both("constraint", &model, &engine, &requests);
    for (i, (text, request)) in found.iter().zip(&requests).enumerate() {
        assert_eq!(ids_of(text), of_session(&model, &request.ids, &request.options), "{name}: a session's constraint");
        match i % 2 {
            0 => {
                let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
                assert!(text.iter().all(|piece| piece.text.chars().all(is_allowed)), "{name}: {text:?}");
            }
            _ => assert_eq!(ids_of(text), ids_of(&want[i]), "{name}: beside constraints"),
        }
    }
    n.constraint += 1;
}

/// The folder with a byte-level tokenizer: a token for each byte, then `t256` and so on.
fn with_tokenizer(path: &Path) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("matrix").join(name_of(path));
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(path.join(name), folder.join(name)).unwrap();
    }
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
    // GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from 256 on.
    let is_printable = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let letter = |byte: u32| match is_printable(&byte) {
        true => byte,
        false => 256 + (0..byte).filter(|byte| !is_printable(byte)).count() as u32,
    };
    let token = |id: u32| match id {
        0..=255 => char::from_u32(letter(id)).unwrap().to_string(),
        _ => format!("t{id}"),
    };
    let vocab_size = config["vocab_size"].as_u64().unwrap() as u32;
    let vocab: serde_json::Map<String, serde_json::Value> = (0..vocab_size).map(|id| (token(id), id.into())).collect();
    let byte_level = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    });
    let tokenizer = serde_json::json!({
        "added_tokens": [], "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level, "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    folder
}

/// The same model with layers on disk, if that saves memory: most of these models' layers are smaller than the buffers
/// of passes. Otherwise with table rows on disk, if it has tables.
fn offloaded(device: &Device, path: &Path, engine: &EngineOptions, needed_bytes: u64) -> Option<Model> {
    let with_layers = (1..20).rev().find_map(|part| {
        let options = LoadOptions {
            context_length: Some(CONTEXT),
            max_pass: Some(8),
            exact: true,
            kv_type: KvType::F32,
            memory_limit: Some(needed_bytes * part / 20),
            stream_layers: true,
            ..LoadOptions::default()
        };
        let model = Model::load(device, path, options).ok().filter(|model| model.streaming().is_some())?;
        // Buffers shared by sequences must fit too.
        Engine::new(&model, engine).is_ok().then_some(model)
    });
    with_layers.or_else(|| {
        let model = load(device, path, LoadOptions { stream_rows: true, ..LoadOptions::default() });
        model.streaming().is_some().then_some(model)
    })
}
