//! Sounds in `chat` and through the server, with a tiny random model: answers are those of the library.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use tilewright::chat::Message;
use tilewright::engine::EngineOptions;
use tilewright::picture::{Picture, PictureLimits};
use tilewright::sound::Sound;
use tilewright::{
    AudioEncoder, ChatModel, ChatRequest, Device, GenerateOptions, LoadOptions, Model, VisionEncoder, VisionOptions,
};
use tilewright_serve::{Decoder, Loaded, ModelSpec, ServerOptions};

use crate::common::{self, block_on};
use crate::picture_model::{picture_model, sound_model};
use crate::serve::{client, server};

const N: usize = 12;
/// Of a picture: the context holds 256 tokens.
const MAX_ROWS: u32 = 16;

fn temporary(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

fn load(path: &Path) -> Model {
    let (device, mmproj) = (Device::cpu(), path.with_file_name("mmproj.gguf"));
    let model = Model::load(&device, path, LoadOptions::default()).unwrap();
    let vision = VisionEncoder::load(&device, &mmproj, VisionOptions { max_rows: MAX_ROWS }).unwrap();
    let model = model.with_vision(vision).unwrap();
    model.with_audio(AudioEncoder::load(&device, &mmproj).unwrap()).unwrap()
}

/// A WAV file of 16-bit samples: a tone with some noise, twice for two channels.
fn wav(rate: u32, channels: u16, seconds: f64, seed: u64) -> Vec<u8> {
    let mut rng = common::Rng::new(seed);
    let pitch = 200.0 + 150.0 * seed as f64;
    let mut data = Vec::new();
    for at in 0..(seconds * f64::from(rate)).round() as u32 {
        let tone = (f64::from(at) / f64::from(rate) * pitch * std::f64::consts::TAU).sin() * 8000.0;
        let sample = (tone + rng.normal() * 500.0) as i16;
        (0..channels).for_each(|_| data.extend(sample.to_le_bytes()));
    }
    let (frame, size) = (2 * channels, data.len() as u32);
    let mut file = [b"RIFF", &(36 + size).to_le_bytes()[..], b"WAVEfmt ", &16u32.to_le_bytes()].concat();
    file.extend([1u16.to_le_bytes(), channels.to_le_bytes()].concat());
    file.extend([rate.to_le_bytes(), (rate * u32::from(frame)).to_le_bytes()].concat());
    file.extend([frame.to_le_bytes(), 16u16.to_le_bytes()].concat());
    file.extend([b"data", &size.to_le_bytes()[..], &data].concat());
    file
}

/// Two sounds of 20 rows, one at another rate and with two channels.
fn sounds() -> [Vec<u8>; 2] {
    [wav(16_000, 1, 0.05, 1), wav(48_000, 2, 0.05, 2)]
}

fn written(name: &str, bytes: &[u8]) -> String {
    let path = temporary(name);
    std::fs::write(&path, bytes).unwrap();
    path.to_string_lossy().into_owned()
}

fn picture() -> PathBuf {
    common::data(&["pictures"]).expect("committed test data").join("pictures/a.png")
}

/// The library's greedy answer to sounds and a text, after a picture if wanted, and the number of prompt tokens.
fn answer(model: &Model, sounds: &[&[u8]], has_picture: bool, text: &str) -> (String, usize) {
    let encoder = model.audio().unwrap();
    let encode = |file: &&[u8]| {
        let sound = Sound::decode_at(file, encoder.rate(), &encoder.limits()).unwrap();
        block_on(encoder.encode(&sound)).unwrap()
    };
    let mut message = Message::with_sounds("user", sounds.len(), text);
    let mut images = Vec::new();
    if has_picture {
        message.content.as_array_mut().unwrap().insert(0, json!({"type": "image"}));
        let picture = Picture::decode(&std::fs::read(picture()).unwrap(), &PictureLimits::default()).unwrap();
        images.push(block_on(model.vision().unwrap().encode(&picture)).unwrap());
    }
    let options = GenerateOptions { max_tokens: N, ignore_eos: true, ..GenerateOptions::greedy(N) };
    let sounds = sounds.iter().map(encode).collect();
    let request = ChatRequest { images, sounds, options, ..ChatRequest::new(vec![message]) };
    let chat = ChatModel::new(model).unwrap();
    let n_prompt = chat.prepare(&request).unwrap().ids.len();
    (block_on(chat.answer(&mut model.session().unwrap(), &request)).unwrap().text, n_prompt)
}

fn chat(model: &Path, args: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(["chat", "--device", "cpu", "-n", &N.to_string(), "--temperature", "0", "--ignore-eos"]);
    command.args(["--image-max-tokens", &MAX_ROWS.to_string()]);
    command.arg(model).args(args).env("TILEWRIGHT_CACHE_DIR", "").env_remove("TILEWRIGHT_DEVICE");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim_end_matches('\n').to_owned()
}

#[test]
fn chat_answers_about_sounds() {
    const TEXT: &str = "What is said?";
    let path = sound_model(&temporary("chat_sounds"));
    let model = load(&path);
    let sounds = sounds();
    let files = [0, 1].map(|i| written(&format!("chat-{i}.wav"), &sounds[i]));
    let expect = |sounds: &[&[u8]], has_picture| answer(&model, sounds, has_picture, TEXT).0;
    let (first, second) = (expect(&[&sounds[0]], false), expect(&[&sounds[1]], false));
    assert_ne!(first, second);
    let args =
        |files: &[&String]| files.iter().flat_map(|file| ["--audio".into(), (*file).clone()]).collect::<Vec<_>>();
    let asked = |files: &[&String], others: &[&str]| {
        let files = args(files);
        let args: Vec<&str> = files.iter().map(String::as_str).chain(others.iter().copied()).collect();
        stdout(&chat(&path, &args, ""))
    };
    let is = |got: String, expected: &str| assert_eq!(got, expected.trim_end_matches('\n'));
    is(asked(&[&files[0]], &["-p", TEXT]), &first);
    is(asked(&[&files[1]], &["-p", TEXT]), &second);
    is(asked(&[&files[0], &files[1]], &["-p", TEXT]), &expect(&[&sounds[0], &sounds[1]], false));
    let image = picture().to_string_lossy().into_owned();
    is(asked(&[&files[1]], &["--image", &image, "-p", TEXT]), &expect(&[&sounds[1]], true));
    let mmproj = path.with_file_name("mmproj.gguf").to_string_lossy().into_owned();
    is(asked(&[&files[0]], &["--mmproj", &mmproj, "-p", TEXT]), &first);
    // By a command, with the other sound in a conversation that is saved and loaded.
    let saved = temporary("sounds.json").to_string_lossy().into_owned();
    let lines = format!("/audio\n/audio {}\n{TEXT}\n/save {saved}\n/history\n", files[1]);
    let output = chat(&path, &["--lines"], &lines);
    is(stdout(&output), &second);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("needs the name of a file") && stderr.contains(&format!("[{}]", files[1])), "{stderr}");
    let output = chat(&path, &["--lines"], &format!("/load {saved}\n/regen\n"));
    is(stdout(&output), &second);
}

#[test]
fn sounds_that_cannot_be_heard_are_named() {
    let path = sound_model(&temporary("refused_sounds"));
    let refused = |model: &Path, file: &str, expected: &str| {
        let output = chat(model, &["--audio", file, "-p", "?"], "");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(expected), "{stderr}");
    };
    refused(&path, "/nowhere.wav", "/nowhere.wav");
    refused(&path, &written("page.wav", b"<!doctype html><p>"), "page.wav");
    refused(&path, &written("long.wav", &wav(8000, 1, 2.0, 1)), "length is 2 seconds");
    refused(&path, &written("empty.wav", &wav(8000, 1, 0.0, 1)), "`number of samples` is 0");
    let whole = written("whole.wav", &sounds()[0]);
    refused(
        &picture_model(&temporary("deaf")),
        &whole,
        "which takes no sounds, which is not supported (supported: models of Gemma 4 unified",
    );
}

#[test]
pub fn server_answers_about_sounds() {
    const TEXT: &str = "What is said?";
    let path = sound_model(&temporary("served_sounds"));
    let (sounds, model) = (sounds(), load(&path));
    let (expected, n_prompt) = answer(&model, &[&sounds[1]], false, TEXT);
    let with_picture = answer(&model, &[&sounds[0]], true, TEXT);
    let spec = |name: &'static str, load: fn(&Path) -> Model, path: PathBuf| {
        ModelSpec::new(name, 1 << 20, move || {
            let options = EngineOptions { max_sequences: 2, ..EngineOptions::default() };
            Ok(Loaded::Decoder(Arc::new(Decoder::new(&load(&path), &options, None)?)))
        })
    };
    let deaf = |path: &Path| Model::load(&Device::cpu(), path, LoadOptions::default()).unwrap();
    let models = vec![spec("ears", load, path), spec("deaf", deaf, picture_model(&temporary("served_deaf")))];
    let running = server::start(models, ServerOptions::default());
    let post = |path: &str, body: Value| {
        let answer = client::post(running.address, path, &body);
        (answer.status, answer.json())
    };
    let encoded = sounds.each_ref().map(|sound| BASE64_STANDARD.encode(sound));
    let audio =
        |data: &str, format: &str| json!({"type": "input_audio", "input_audio": {"data": data, "format": format}});
    let chat = |model: &str, parts: Vec<Value>| {
        let parts: Value = parts.into_iter().chain([json!({"type": "text", "text": TEXT})]).collect();
        json!({"model": model, "max_tokens": N, "temperature": 0, "ignore_eos": true,
            "messages": [{"role": "user", "content": parts}]})
    };
    for _ in 0..2 {
        let (status, answer) = post("/v1/chat/completions", chat("ears", vec![audio(&encoded[1], "wav")]));
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["choices"][0]["message"]["content"], expected.as_str());
        assert_eq!(answer["usage"]["prompt_tokens"], n_prompt);
    }
    let url = format!("data:image/png;base64,{}", BASE64_STANDARD.encode(std::fs::read(picture()).unwrap()));
    let image = json!({"type": "image_url", "image_url": {"url": url}});
    let (status, answer) = post("/v1/chat/completions", chat("ears", vec![image, audio(&encoded[0], "wav")]));
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], with_picture.0.as_str());
    let responses = json!({"model": "ears", "temperature": 0, "max_output_tokens": N, "input": [{"role": "user",
        "content": [audio(&encoded[1], "wav"), {"type": "input_text", "text": TEXT}]}]});
    let (status, answer) = post("/v1/responses", responses);
    assert_eq!((status, &answer["usage"]["input_tokens"]), (200, &json!(n_prompt)), "{answer}");
    let (_, shown) = post("/api/show", json!({"model": "ears"}));
    assert!(shown["capabilities"].as_array().unwrap().contains(&"audio".into()), "{shown}");
    let props = client::get(running.address, "/props?model=ears").json();
    assert_eq!(props["modalities"], json!({"vision": true, "audio": true}));
    let long = BASE64_STANDARD.encode(wav(8000, 1, 2.0, 1));
    for (model, part, expected) in [
        ("deaf", audio(&encoded[0], "wav"), "is a sound, which tiny-random-qwen3-vl does not support"),
        ("ears", audio(&encoded[0], "flac"), "input_audio.format is \"flac\", expected wav or mp3"),
        ("ears", audio("", "wav"), "expected a sound in base64"),
        ("ears", audio("@@@", "wav"), "no base64"),
        ("ears", audio("aGVsbG8gd29ybGQ=", "mp3"), "expected WAV"),
        ("ears", audio(&BASE64_STANDARD.encode(&sounds[0][..60]), "wav"), "the file ends after 60 bytes"),
        ("ears", audio(&long, "wav"), "length is 2 seconds"),
        ("ears", json!({"type": "input_audio"}), "input_audio.format is missing"),
    ] {
        let (status, answer) = post("/v1/chat/completions", chat(model, vec![part]));
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(expected) && message.contains("messages[0]"), "{expected}: {answer}");
    }
    let (status, answer) = post("/v1/chat/completions", chat("ears", vec![audio(&encoded[0], "wav"); 33]));
    assert_eq!(
        (status, &answer["error"]["message"]),
        (400, &json!("messages have over 32 pictures and sounds")),
        "{answer}"
    );
}
