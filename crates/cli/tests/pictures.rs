//! Pictures in `chat` and through the server, with a tiny random model: answers are those of the library.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use tilewright::chat::Message;
use tilewright::engine::EngineOptions;
use tilewright::picture::{Picture, PictureLimits};
use tilewright::{ChatModel, ChatRequest, Device, GenerateOptions, LoadOptions, Model, VisionEncoder, VisionOptions};
use tilewright_serve::{Decoder, Loaded, ModelSpec, ServerOptions};

use crate::common::{self, block_on};
use crate::picture_model::picture_model;
use crate::serve::{client, server};

const N: usize = 12;

fn picture(name: &str) -> PathBuf {
    common::data(&["pictures"]).expect("committed test data").join(format!("pictures/{name}"))
}

fn model_in(name: &str) -> PathBuf {
    picture_model(&Path::new(env!("CARGO_TARGET_TMPDIR")).join(name))
}

fn load(path: &Path) -> Model {
    let device = Device::cpu();
    let model = Model::load(&device, path, LoadOptions::default()).unwrap();
    let encoder = VisionEncoder::load(&device, path.with_file_name("mmproj.gguf"), VisionOptions::default()).unwrap();
    model.with_vision(encoder).unwrap()
}

fn options() -> GenerateOptions {
    GenerateOptions { max_tokens: N, ignore_eos: true, ..GenerateOptions::greedy(N) }
}

/// The library's greedy answer to pictures and a text, and the number of prompt tokens.
fn answer(model: &Model, pictures: &[&str], text: &str) -> (String, usize) {
    let encoder = model.vision().unwrap();
    let encode = |name: &&str| {
        let decoded = Picture::decode(&std::fs::read(picture(name)).unwrap(), &PictureLimits::default()).unwrap();
        block_on(encoder.encode(&decoded)).unwrap()
    };
    let request = ChatRequest {
        images: pictures.iter().map(encode).collect(),
        options: options(),
        ..ChatRequest::new(vec![Message::with_images("user", pictures.len(), text)])
    };
    let chat = ChatModel::new(model).unwrap();
    let n_prompt = chat.prepare(&request).unwrap().ids.len();
    let answer = block_on(chat.answer(&mut model.session().unwrap(), &request)).unwrap();
    (answer.text, n_prompt)
}

fn chat(model: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(["chat", "--device", "cpu", "-n", &N.to_string(), "--temperature", "0", "--ignore-eos"]);
    command.arg(model).args(args).env("TILEWRIGHT_CACHE_DIR", "").env_remove("TILEWRIGHT_DEVICE");
    command.stdin(Stdio::null()).output().unwrap()
}

#[test]
fn chat_answers_about_pictures() {
    let path = model_in("chat_pictures");
    let model = load(&path);
    let file = |name: &str| picture(name).to_string_lossy().into_owned();
    let mut answers = Vec::new();
    for pictures in [&["a.png"][..], &["b.png"], &["c.png", "turned.jpg"]] {
        let files: Vec<String> = pictures.iter().flat_map(|name| ["--image".into(), file(name)]).collect();
        let args: Vec<&str> = files.iter().map(String::as_str).chain(["-p", "What is this?"]).collect();
        let output = chat(&path, &args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let (expected, _) = answer(&model, pictures, "What is this?");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end_matches('\n'), expected.trim_end_matches('\n'));
        answers.push(expected);
    }
    assert!(answers[0] != answers[1] && answers[1] != answers[2], "{answers:?}");
    let refused = |args: &[&str], expected: &str| {
        let output = chat(&path, &[args, &["-p", "?"]].concat());
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(expected), "{stderr}");
    };
    refused(&["--image", "/nowhere.png"], "/nowhere.png");
    let html = Path::new(env!("CARGO_TARGET_TMPDIR")).join("page.html");
    std::fs::write(&html, "<!doctype html><p>").unwrap();
    refused(&["--image", html.to_str().unwrap()], "expected PNG, JPEG, WebP or GIF");
    refused(&["--mmproj", path.to_str().unwrap()], "clip: encoders of pictures or sound");
    let text_only = chat(Path::new("stories"), &[]);
    assert!(!text_only.status.success());
}

/// A model answers without a vision encoder that cannot be used, and says so.
#[test]
fn encoder_that_cannot_be_loaded_is_named() {
    let path = model_in("broken_encoder");
    let [mmproj, second] = ["mmproj.gguf", "other-mmproj.gguf"].map(|name| path.with_file_name(name));
    _ = std::fs::remove_file(&second);
    let answered = || {
        let output = chat(&path, &["-p", "hello"]);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{stderr}");
        stderr.lines().filter(|line| line.contains("pictures")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(answered(), Vec::<String>::new());
    let whole = std::fs::read(&mmproj).unwrap();
    std::fs::write(&second, &whole).unwrap();
    let [several] = &answered()[..] else { panic!("no notice") };
    assert!(several.contains("expected one `mmproj-*.gguf`") && several.contains("other-mmproj.gguf"), "{several}");
    std::fs::remove_file(second).unwrap();
    std::fs::write(&mmproj, &whole[..100]).unwrap();
    let [broken] = &answered()[..] else { panic!("no notice") };
    assert!(broken.starts_with("notice: ") && broken.contains("mmproj.gguf"), "{broken}");
    std::fs::remove_file(&mmproj).unwrap();
    assert_eq!(answered(), Vec::<String>::new());
}

#[test]
fn second_turn_computes_no_picture_again() {
    let model = load(&model_in("turns"));
    let device = model.vision().unwrap().device().clone();
    let (first, _) = answer(&model, &["a.png", "b.png"], "Compare.");
    let before = device.counters();
    let (again, _) = answer(&model, &["a.png", "b.png"], "Compare.");
    assert_eq!(first, again);
    // The same tokens again without the encoder's passes.
    let same = device.counters() - before;
    let before = device.counters();
    answer(&model, &["c.png", "alpha.png"], "Compare.");
    let others = device.counters() - before;
    assert!(same.dispatches < others.dispatches, "{} and {} dispatches", same.dispatches, others.dispatches);
}

fn data_url(name: &str) -> String {
    let bytes = std::fs::read(picture(name)).unwrap();
    format!("data:image/png;base64,{}", BASE64_STANDARD.encode(bytes))
}

#[test]
fn server_answers_about_pictures_in_each_api() {
    let path = model_in("served");
    let model = load(&path);
    let (expected, n_prompt) = answer(&model, &["a.png"], "What is this?");
    let load_it = move || {
        let decoder =
            Decoder::new(&load(&path), &EngineOptions { max_sequences: 2, ..EngineOptions::default() }, None)?;
        Ok(Loaded::Decoder(Arc::new(decoder)))
    };
    let running = server::start(vec![ModelSpec::new("eyes", 1 << 20, load_it)], ServerOptions::default());
    let post = |path: &str, body: Value| {
        let answer = client::post(running.address, path, &body);
        (answer.status, answer.json())
    };
    let settings = json!({"model": "eyes", "max_tokens": N, "temperature": 0, "ignore_eos": true});
    let with = |fields: Value| {
        let mut body = settings.clone();
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        body
    };
    let parts = |url: &str| json!([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]);
    let chat = |url: &str| with(json!({"messages": [{"role": "user", "content": parts(url)}]}));
    for _ in 0..2 {
        let (status, answer) = post("/v1/chat/completions", chat(&data_url("a.png")));
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["choices"][0]["message"]["content"], expected.as_str());
        assert_eq!(answer["usage"]["prompt_tokens"], n_prompt);
    }
    let encoded = BASE64_STANDARD.encode(std::fs::read(picture("a.png")).unwrap());
    let ollama = json!({"model": "eyes", "stream": false, "messages":
        [{"role": "user", "content": "What is this?", "images": [encoded]}],
        "options": {"temperature": 0, "num_predict": N}});
    let (status, answer) = post("/api/chat", ollama);
    assert_eq!((status, &answer["prompt_eval_count"]), (200, &json!(n_prompt)), "{answer}");
    let (status, shown) = post("/api/show", json!({"model": "eyes"}));
    assert!(status == 200 && shown["capabilities"].as_array().unwrap().contains(&"vision".into()), "{shown}");
    let claude = json!({"model": "eyes", "max_tokens": N, "temperature": 0, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}},
        {"type": "text", "text": "What is this?"}]}]});
    let (status, answer) = post("/v1/messages", claude);
    assert_eq!((status, &answer["usage"]["input_tokens"]), (200, &json!(n_prompt)), "{answer}");
    let responses = json!({"model": "eyes", "temperature": 0, "max_output_tokens": N, "input": [{"role": "user",
        "content": [{"type": "input_image", "image_url": data_url("a.png")},
        {"type": "input_text", "text": "What is this?"}]}]});
    let (status, answer) = post("/v1/responses", responses);
    assert_eq!((status, &answer["usage"]["input_tokens"]), (200, &json!(n_prompt)), "{answer}");
    for (url, expected) in [
        ("https://example.com/a.png", "which this server does not fetch"),
        ("http://127.0.0.1:1/a.png", "which this server does not fetch"),
        ("data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=", "SVG"),
        ("data:image/png;base64,iVBORw0KGgo=", "PNG"),
        ("data:image/png;base64,@@@", "no base64"),
        ("data:,", "data URL"),
    ] {
        let (status, answer) = post("/v1/chat/completions", chat(url));
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(expected) && message.contains("messages[0]"), "{url}: {answer}");
    }
}
