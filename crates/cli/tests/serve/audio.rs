//! Speech to text: forms, formats and streams against the library, refusals, a client that leaves, a lost GPU.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value as Json, json};
use tilewright::sound::{Sound, SoundLimits};
use tilewright::transcribe::{Task, to_json, to_srt, to_vtt, words_to_json};
use tilewright::{Breaker, Device, Error, TranscribeOptions, Transcriber, TranscriberOptions, Transcript};
use tilewright_serve::{Loaded, ModelSpec, ServerOptions};

use super::client::{Answer, Connection, get, post, request, send};
use super::common;
use super::faults::Gpu;
use super::program::{Program, command};
use super::server::{Running, shared, start, story};

pub const PATH: &str = "/v1/audio/transcriptions";

/// The folder of the random speech model, with sounds.
pub fn folder() -> PathBuf {
    common::data(&["tiny-random-sound"]).expect("committed test data").join("tiny-random-sound")
}

fn load(device: &Device) -> Result<Transcriber, Error> {
    Transcriber::load(device, folder(), TranscriberOptions::default())
}

/// The model `whisper`.
pub fn speech() -> ModelSpec {
    ModelSpec::new("whisper", 1 << 20, || Ok(Loaded::Transcriber(load(&Device::cpu())?.into())))
}

fn server() -> Running {
    start(vec![speech()], ServerOptions::default())
}

/// A part of a form: a field's name, a file's name if it is one, and the content.
pub type Part<'p> = (&'p str, Option<&'p str>, &'p [u8]);

/// A form, as `curl -F` sends it.
pub fn form(parts: &[Part<'_>]) -> Vec<u8> {
    let part = |(name, file, content): &Part<'_>| {
        let file = file.map(|file| format!("; filename=\"{file}\"\r\ncontent-type: audio/wav")).unwrap_or_default();
        let head = format!("--edge\r\ncontent-disposition: form-data; name=\"{name}\"{file}\r\n\r\n");
        [head.as_bytes(), content, b"\r\n"].concat()
    };
    [parts.iter().flat_map(part).collect(), b"--edge--\r\n".to_vec()].concat()
}

const FORM: (&str, &str) = ("content-type", "multipart/form-data; boundary=edge");

pub fn ask(address: SocketAddr, path: &str, parts: &[Part<'_>]) -> Answer {
    send(address, "POST", path, &[FORM], &form(parts))
}

/// The form of a sound with texts.
fn asked(server: &Running, path: &str, sound: &[u8], texts: &[(&str, &str)]) -> Answer {
    let texts = texts.iter().map(|(name, text)| (*name, None, text.as_bytes()));
    ask(server.address, path, &texts.chain([("file", Some("a.wav"), sound)]).collect::<Vec<_>>())
}

fn answered(server: &Running, path: &str, sound: &[u8], texts: &[(&str, &str)]) -> Answer {
    let answer = asked(server, path, sound, texts);
    assert_eq!(answer.status, 200, "{texts:?}: {}", answer.text());
    answer
}

fn chirp() -> Vec<u8> {
    std::fs::read(folder().join("chirp.wav")).unwrap()
}

/// The library's transcript.
fn expected(sound: &[u8], options: &TranscribeOptions) -> Transcript {
    let sound = Sound::decode_at(sound, 16_000, &SoundLimits::default()).unwrap();
    pollster::block_on(load(&Device::cpu()).unwrap().transcribe(sound.samples(), options)).unwrap()
}

/// A WAV file of noise, one byte for each sample.
pub fn noise(rate: u32, seconds: u32) -> Vec<u8> {
    let n = rate * seconds;
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    wav(rate, &(0..n).map(|_| next()).collect::<Vec<u8>>())
}

fn wav(rate: u32, samples: &[u8]) -> Vec<u8> {
    let n = samples.len() as u32;
    let head: [&[u8]; 5] = [b"RIFF", &(36 + n).to_le_bytes(), b"WAVEfmt ", &16u32.to_le_bytes(), &[1, 0, 1, 0]];
    let rest: [&[u8]; 5] = [&rate.to_le_bytes(), &rate.to_le_bytes(), &[1, 0, 8, 0], b"data", &n.to_le_bytes()];
    [head.concat(), rest.concat(), samples.to_vec()].concat()
}

#[test]
fn transcripts_match_the_library_in_all_formats() {
    let (server, sound) = (server(), chirp());
    let english = || TranscribeOptions { language: Some("en".into()), ..TranscribeOptions::default() };
    let whole = expected(&sound, &english());
    assert!(!whole.segments.is_empty());
    let of = |format: &str| {
        answered(&server, PATH, &sound, &[("model", "whisper"), ("language", "English"), ("response_format", format)])
    };
    let usage = json!({"type": "duration", "seconds": 3.0});
    let short = json!({"text": whole.text, "usage": usage});
    assert_eq!(of("json").json(), short);
    assert_eq!(asked(&server, PATH, &sound, &[("language", "en"), ("temperature", "0.0")]).json(), short);
    let mut long = to_json(&whole, Task::Transcribe);
    (long["language"], long["usage"]) = (json!("english"), usage);
    assert_eq!(of("verbose_json").json(), long);
    for (format, text) in
        [("text", format!("{}\n", whole.text)), ("srt", to_srt(&whole.segments)), ("vtt", to_vtt(&whole.segments))]
    {
        let answer = of(format);
        assert_eq!((answer.header("content-type"), answer.text()), (Some("text/plain; charset=utf-8"), text));
    }
    // What else changes a text, and what does not.
    let drawn = TranscribeOptions { temperatures: vec![0.7], ..english() };
    let prompted = TranscribeOptions { prompt: Some("In the den".into()), ..english() };
    let translated = TranscribeOptions { task: Task::Translate, language: Some("de".into()), ..english() };
    for (path, options, texts) in [
        (PATH, drawn, [("language", "en"), ("temperature", "0.7")]),
        (PATH, prompted, [("language", "en"), ("prompt", "In the den")]),
        ("/v1/audio/translations", translated, [("language", "german"), ("prompt", "")]),
    ] {
        let want = expected(&sound, &options);
        assert_ne!(want.text, whole.text, "{texts:?}");
        let neutral = [("timestamp_granularities[]", "segment"), ("chunking_strategy", "auto"), ("stream", "False")];
        let format = [("response_format", "verbose_json")];
        let found = answered(&server, path, &sound, &[&texts[..], &neutral, &format].concat()).json();
        assert_eq!((&found["text"], &found["language"]), (&json!(want.text), &json!("english")), "{texts:?}");
        assert_eq!(found["segments"], to_json(&want, options.task)["segments"], "{texts:?}");
    }
    // Words, in place of segments or beside them.
    let want = expected(&sound, &TranscribeOptions { words: true, ..english() });
    let words = words_to_json(&want);
    assert!(words.as_array().is_some_and(|words| words.len() > want.segments.len()), "{words}");
    let texts = [("language", "en"), ("response_format", "verbose_json"), ("timestamp_granularities[]", "word")];
    let found = answered(&server, PATH, &sound, &texts).json();
    assert_eq!((&found["words"], &found["text"], found.get("segments")), (&words, &json!(want.text), None));
    let both = [&texts[..], &[("timestamp_granularities[]", "segment")]].concat();
    let found = answered(&server, PATH, &sound, &both).json();
    let segment = &found["segments"][0];
    assert_eq!(found["words"], words);
    assert!(segment["start"] == words[0]["start"] && segment.get("words").is_none(), "{found}");
    // Detected, from a sound of another rate.
    let low = noise(4000, 2);
    let want = expected(&low, &TranscribeOptions::default());
    assert_eq!(answered(&server, PATH, &low, &[]).json()["text"], json!(want.text));
}

#[test]
fn silence_is_an_empty_text() {
    let server = server();
    for sound in [wav(8000, &[128; 8000]), wav(8000, &[])] {
        for (format, text) in [("text", "\n"), ("srt", ""), ("vtt", "WEBVTT\n\n")] {
            assert_eq!(answered(&server, PATH, &sound, &[("response_format", format)]).text(), text);
        }
        assert_eq!(answered(&server, PATH, &sound, &[]).json()["text"], json!(""));
        let done = json!([{"type": "transcript.text.done", "text": ""}]);
        assert_eq!(json!(answered(&server, PATH, &sound, &[("stream", "true")]).events()), done);
    }
}

#[test]
fn sounds_of_all_formats_are_transcribed() {
    let server = server();
    let folder = common::find_data("sounds".as_ref()).unwrap();
    for name in ["stereo.flac", "mono.mp3", "mono.ogg", "mono.opus", "stereo.webm", "mono.m4a", "mono.aac"] {
        let sound = std::fs::read(folder.join(name)).unwrap();
        let want = expected(&sound, &TranscribeOptions { language: Some("en".into()), ..TranscribeOptions::default() });
        assert_eq!(answered(&server, PATH, &sound, &[("language", "en")]).json()["text"], json!(want.text), "{name}");
    }
}

/// The texts of a streamed transcript's events, checked.
fn streamed(events: &[Json]) -> (Vec<String>, String) {
    let (done, deltas) = events.split_last().unwrap();
    assert_eq!(done["type"], json!("transcript.text.done"), "{events:?}");
    let delta = |event: &Json| {
        assert_eq!(event["type"], json!("transcript.text.delta"));
        event["delta"].as_str().unwrap().to_owned()
    };
    (deltas.iter().map(delta).collect(), done["text"].as_str().unwrap().into())
}

#[test]
fn segments_are_streamed_as_events() {
    let (server, sound) = (server(), noise(4000, 8));
    let want = expected(&sound, &TranscribeOptions::default());
    let (deltas, whole) = streamed(&answered(&server, PATH, &sound, &[("stream", "true")]).events());
    assert_eq!((deltas.len(), deltas.concat().trim_end(), &whole), (want.segments.len(), &*want.text, &want.text));
    assert!(deltas.len() > 1);
    // An early error has its own status.
    let refused = asked(&server, PATH, &sound, &[("stream", "true"), ("language", "klingon")]);
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("language")));
}

#[test]
fn invalid_forms_are_refused_by_name() {
    let options = tilewright::engine::EngineOptions { max_sequences: 1, ..Default::default() };
    let server = start(vec![speech(), story("story", options)], ServerOptions::default());
    let sound = chirp();
    let refused = |parts: &[Part<'_>], code: &str, param: Json, says: &str| {
        let answer = ask(server.address, PATH, parts);
        let told = answer.json();
        let found = (answer.status, &told["error"]["code"], &told["error"]["param"]);
        assert_eq!(found, (400, &json!(code), &param), "{told}");
        assert!(told["error"]["message"].as_str().unwrap().contains(says), "{told}");
    };
    let file = |content| ("file", Some("a.wav"), content);
    for (content, says) in [
        (&b"FORM of AIFF"[..], "file is an AIFF file, expected WAV, FLAC, MP3, M4A (AAC), Ogg or WebM (Opus, Vorbis)"),
        (&b"words"[..], "file is no sound in a known format"),
        (&b""[..], "file is an empty file"),
        (&sound[..1000], "file: the file ends after 1000 bytes"),
    ] {
        refused(&[file(content)], "invalid_value", json!("file"), says);
    }
    for (name, text, code, says) in [
        ("langage", "en", "unsupported_value", "langage is not supported; did you mean `language`?"),
        (
            "timestamp_granularities[]",
            "word",
            "unsupported_value",
            "needs response_format \"verbose_json\", not \"json\"",
        ),
        ("timestamp_granularities[]", "letter", "invalid_value", "expected a list of \"segment\" and \"word\""),
        ("chunking_strategy", "whole", "unsupported_value", "leave it out or send \"auto\""),
        ("include[]", "logprobs", "unsupported_value", "include[] is not supported"),
        ("language", "klingon", "invalid_value", "a language that the model knows: en, de"),
        ("response_format", "xml", "invalid_value", "response_format is \"xml\", expected \"json\", \"text\""),
        ("temperature", "2", "invalid_value", "temperature is 2.0, expected a number from 0 to 1"),
        ("temperature", "nan", "invalid_value", "temperature is \"nan\", expected a number"),
        ("stream", "yes", "invalid_value", "stream is \"yes\", expected true or false"),
        ("model", "story", "invalid_value", "story is a generative model and cannot transcribe speech"),
        ("file", "words", "invalid_value", "file is in the form twice"),
    ] {
        refused(&[file(&sound), (name, None, text.as_bytes())], code, json!(name), says);
    }
    // Before the file is decoded, and waits for its turn.
    let unknown = [file(b"words"), ("language", None, b"klingon")];
    refused(&unknown, "invalid_value", json!("language"), "a language that the model knows");
    refused(&[("audio", Some("a.wav"), &sound)], "unsupported_value", json!("audio"), "audio is not supported");
    let subtitles: [Part<'_>; 2] = [("stream", None, b"true"), ("response_format", None, b"srt")];
    let not_streamed = "response_format is \"srt\", which is not streamed";
    refused(&[&subtitles[..], &[file(&sound)]].concat(), "unsupported_value", json!("response_format"), not_streamed);
    refused(&[("prompt", None, b"\xff"), file(&sound)], "invalid_value", json!("prompt"), "prompt is not UTF-8");
    refused(&[("model", None, b"whisper")], "invalid_value", json!("file"), "file is missing, expected a file");
    refused(&[], "invalid_value", json!("file"), "file is missing");
    let body = form(&[file(&sound)]);
    for (headers, body, status, says) in [
        (&[FORM][..], &body[..body.len() - 9], 400, "the form cannot be read"),
        (&[("content-type", "multipart/form-data")], &body, 400, "no boundary"),
        (&[], &body, 400, "no boundary"),
        (&[("content-type", "application/json")], b"{}", 415, "expected multipart/form-data"),
    ] {
        let answer = send(server.address, "POST", PATH, headers, body);
        let told = answer.json()["error"]["message"].to_string();
        assert!(answer.status == status && told.contains(says), "{headers:?}: {} {told}", answer.status);
    }
    // Endpoints of texts say what the model is; without a name, each takes the model that can do it.
    let chat = |model: &str| json!({"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    for (path, mut body) in [
        ("/v1/chat/completions", chat("whisper")),
        ("/v1/embeddings", json!({"input": "a"})),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"]})),
        ("/tokenize", json!({"content": "a"})),
        ("/api/generate", json!({"prompt": "a"})),
    ] {
        body["model"] = json!("whisper");
        let answer = post(server.address, path, &body);
        assert!(answer.status == 400 && answer.text().contains("a speech model"), "{path}: {}", answer.text());
    }
    let info = get(server.address, "/info?model=whisper");
    assert_eq!((info.status, info.text().contains("is a speech model")), (424, true));
    assert_eq!(post(server.address, "/tokenize", &json!({"content": "a"})).status, 200);
    answered(&server, PATH, &wav(8000, &[128; 8]), &[]);
    let none = ask(shared(), PATH, &[file(&sound)]).json();
    assert_eq!(none["error"]["message"], json!("model is missing, and no served model transcribes speech"));
}

/// Kernels that the model `whisper` has run.
fn n_dispatches(server: &Running) -> u64 {
    let text = get(server.address, "/metrics").text();
    let found =
        text.lines().find_map(|line| line.strip_prefix("tilewright_device_dispatches_total{model=\"whisper\"} "));
    found.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

/// Metrics and models are read meanwhile.
#[test]
fn client_that_disconnects_ends_its_transcript() {
    let server = server();
    let texts = [("stream", "true"), ("temperature", "1")];
    answered(&server, PATH, &noise(1000, 30), &texts);
    let of_half_a_minute = n_dispatches(&server);
    const WINDOWS: u32 = 80;
    let sound = noise(1000, 30 * WINDOWS);
    let fields = texts.map(|(name, text)| (name, None, text.as_bytes()));
    let body = form(&[&fields[..], &[("file", Some("a.wav"), &sound)]].concat());
    let mut connection = Connection::open(server.address);
    connection.write(&request("POST", PATH, &[FORM], &body));
    assert_eq!(connection.head().status, 200);
    assert!(connection.chunk().starts_with(b"data: {"));
    assert_eq!(get(server.address, "/v1/models").json()["data"][0]["status"], json!("loaded"));
    drop(connection);
    // Waits for its turn.
    answered(&server, PATH, &wav(1000, &[128; 10]), &[]);
    let of_beginning = n_dispatches(&server) - of_half_a_minute;
    // A busy machine notices late.
    let most = u64::from(WINDOWS) * of_half_a_minute * 9 / 10;
    assert!(of_beginning > 0 && of_beginning < most, "{of_beginning} dispatches; nine tenths of the sound take {most}");
}

/// The sound is heard again, and its client gets each segment once.
#[test]
fn lost_gpu_repeats_the_transcript() {
    let gpu = Gpu::default();
    if common::gpu_from(gpu.open()).is_none() {
        return;
    }
    let (of_load, breaker) = (gpu.clone(), Arc::new(Breaker::default()));
    let load = move || Ok(Loaded::Transcriber(load(&of_load.open()?)?.into()));
    let server =
        start(vec![ModelSpec::new("whisper", 1 << 20, load).with_breakers(vec![breaker])], ServerOptions::default());
    let sound = noise(4000, 12);
    let texts = [("stream", "true"), ("temperature", "1")];
    let (deltas, whole) = streamed(&answered(&server, PATH, &sound, &texts).events());
    let mut connection = Connection::open(server.address);
    let fields = texts.map(|(name, text)| (name, None, text.as_bytes()));
    connection.write(&request(
        "POST",
        PATH,
        &[FORM],
        &form(&[&fields[..], &[("file", Some("a.wav"), &sound)]].concat()),
    ));
    let mut answer = connection.head();
    answer.body = connection.chunk();
    gpu.lose();
    loop {
        match connection.chunk() {
            chunk if chunk.is_empty() => break,
            chunk => answer.body.extend(chunk),
        }
    }
    assert_eq!(streamed(&answer.events()), (deltas, whole));
    let lost = "tilewright_device_lost_total{model=\"whisper\",reason=\"destroyed\"} 1";
    assert!(get(server.address, "/metrics").text().contains(lost));
}

#[test]
fn speech_model_is_described_before_it_is_loaded_and_its_requests_are_logged() {
    let folder = folder();
    let model = format!("whisper={}", folder.to_str().unwrap());
    let program = Program::start(command(&["--port", "0", "--lazy", "--lenient", "--log-requests", &model]));
    let about = || get(program.address, "/v1/models/whisper").json();
    let shown = post(program.address, "/api/show", &json!({"model": "whisper", "verbose": true})).json();
    assert_eq!(shown["capabilities"], json!(["transcription"]));
    assert_eq!(shown["model_info"]["general.architecture"], json!("whisper"));
    let tensors = shown["tensors"].as_array().unwrap();
    assert!(tensors.iter().any(|tensor| tensor["name"] == json!("model.encoder.conv1.weight")), "{tensors:?}");
    assert_eq!((&about()["status"], &about()["max_model_len"]), (&json!("unloaded"), &json!(64)));
    let whole: Part<'_> = ("chunking_strategy", None, b"whole");
    let answer = ask(program.address, PATH, &[whole, ("file", Some("a.wav"), &chirp())]);
    assert_eq!((answer.status, answer.header("x-tilewright-ignored")), (200, Some("chunking_strategy")));
    let want = expected(&chirp(), &TranscribeOptions::default());
    assert_eq!(answer.json()["text"], json!(want.text));
    assert_eq!(about()["status"], json!("loaded"));
    assert!(about()["memory"]["weights_bytes"].as_u64().unwrap() > 0, "{}", about());
    let log = program.end();
    assert!(log.contains("speech to text in 2 languages; memory "), "{log}");
    let line = log.lines().find(|line| line.contains(PATH) && line.starts_with('{')).unwrap();
    let line: Json = serde_json::from_str(line).unwrap();
    let n_tokens: usize = want.segments.iter().map(|segment| segment.tokens.len()).sum();
    assert_eq!((&line["model"], &line["completion_tokens"]), (&json!("whisper"), &json!(n_tokens)), "{line}");
}
