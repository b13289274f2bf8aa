//! Exactly the limits in `docs/limits.md`.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};
use tilewright::answer::{AnswerReader, Event, Format};
use tilewright::engine::EngineOptions;
use tilewright::grammar::{Constraint, ToolChoice, ToolRules};
use tilewright::{Device, Model};
use tilewright_serve::{Limits, Server, ServerOptions};

use super::client::{Connection, done, post, request, send};
use super::server::{own, shared};
use super::{abuse, audio, endpoints, streams};

const JSON: (&str, &str) = ("content-type", "application/json");

/// The test of a limit.
enum Test {
    Here(fn()),
    /// By a test beside this one.
    Beside(#[expect(dead_code, reason = "that it exists is what counts")] fn()),
    /// By a test of another binary: file and name.
    Unit(&'static str, &'static str),
}

use Test::{Beside, Here, Unit};

const TESTS: &[(&str, Test)] = &[
    ("connections", Beside(abuse::idle_connections_are_closed_to_make_room)),
    ("header time", Beside(abuse::slow_clients_are_cut_off)),
    ("header bytes", Beside(abuse::large_headers_and_bodies_are_refused)),
    ("headers", Beside(abuse::large_headers_and_bodies_are_refused)),
    ("body time", Beside(abuse::slow_clients_are_cut_off)),
    ("body bytes", Beside(abuse::large_headers_and_bodies_are_refused)),
    ("sound bytes", Here(sound_bytes)),
    ("sound time", Here(sound_time)),
    ("sounds in messages", Beside(crate::sounds::server_answers_about_sounds)),
    ("form parts", Here(form_parts)),
    ("form text", Here(form_text)),
    ("unwanted bytes", Here(unwanted_bytes)),
    ("bytes of all requests", Beside(abuse::request_bodies_share_one_memory_limit)),
    ("JSON values", Here(json_values)),
    ("JSON depth", Here(json_depth)),
    ("write time", Beside(abuse::client_that_reads_nothing_is_cut_off)),
    ("unsent bytes", Unit("crates/serve/src/connections.rs", "fn unsent_bytes_of_an_answer_are_bounded")),
    ("file pieces", Unit("crates/serve/src/page.rs", "fn file_body_is_read_only_as_it_is_consumed")),
    ("files", Here(files)),
    ("answers", Here(answers)),
    ("stop texts", Here(stop_texts)),
    ("stop bytes", Here(stop_bytes)),
    ("salt bytes", Here(salt_bytes)),
    ("biases", Here(biases)),
    ("draft tokens", Here(guessed_tokens)),
    ("likeliest tokens", Here(likeliest_tokens)),
    ("stop tokens", Here(stop_tokens)),
    ("log probabilities of prompts", Here(log_probabilities_of_prompts)),
    ("stored responses", Unit("crates/serve/src/stored.rs", "fn least_recently_used_responses_are_dropped_by_size")),
    ("tools", Here(tools)),
    ("echoed bytes", Here(echoed_bytes)),
    ("texts", Here(texts)),
    ("prompt tokens", Here(prompt_tokens)),
    ("answer tokens", Beside(streams::server_max_tokens_limits_every_answer)),
    ("answer time", Beside(streams::answer_time_limit_ends_an_answer)),
    ("answer bytes", Here(answer_bytes)),
    ("texts at once", Here(texts_at_once)),
    ("queue", Beside(abuse::request_to_a_full_queue_is_refused_at_once)),
    ("batches", Here(batches)),
    ("models loaded", Beside(endpoints::models_are_loaded_and_unloaded)),
    ("drain", Beside(streams::answers_in_progress_finish_at_shutdown)),
    ("schema values", Here(schema_values)),
    ("schema bytes", Here(schema_bytes)),
    ("pattern bytes", Here(pattern_bytes)),
    ("pattern length", Here(pattern_length)),
    ("properties", Here(properties)),
    ("patternProperties", Here(pattern_properties)),
    ("joined patterns", Here(joined_patterns)),
    ("multipleOf", Here(multiple_of)),
    ("tool names", Here(tool_names)),
    ("tool rules", Here(tool_rules)),
    ("long prompts", Beside(abuse::long_prompts_do_not_block_short_ones)),
    ("grammars at a time", Unit("src/grammar.rs", "fn stuck_grammar_compilations_keep_their_slot")),
    ("template bytes", Unit("tests/chat.rs", "fn endless_templates_are_stopped_by_a_limit")),
    ("template steps", Unit("tests/chat.rs", "fn endless_templates_are_stopped_by_a_limit")),
    ("template text", Unit("tests/chat.rs", "fn endless_templates_are_stopped_by_a_limit")),
    ("call bytes", Here(call_bytes)),
];

/// Rows of the document's tables: names, and where they are set.
fn rows() -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(crate::common::repository().join("docs/limits.md")).unwrap();
    let cells = text.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    let rows = cells.filter(|(name, _)| *name != "limit");
    rows.map(|(name, rest)| (name.to_owned(), rest.to_owned())).collect()
}

#[test]
fn every_documented_limit_holds() {
    let rows = rows();
    let tested: BTreeMap<&str, &Test> = TESTS.iter().map(|(name, test)| (*name, test)).collect();
    let untested: Vec<_> = rows.keys().filter(|name| !tested.contains_key(name.as_str())).collect();
    let untold: Vec<_> = tested.keys().filter(|name| !rows.contains_key(**name)).collect();
    assert!(
        untested.is_empty() && untold.is_empty(),
        "without a test: {untested:?}; not in docs/limits.md: {untold:?}"
    );
    for (name, test) in TESTS {
        match test {
            Here(test) => {
                println!("{name}");
                test();
            }
            Beside(_) => {}
            Unit(file, test) => {
                let text = std::fs::read_to_string(crate::common::repository().join(file)).unwrap();
                assert!(text.contains(test), "{name}: {file} has no {test}");
            }
        }
    }
}

/// The document matches the server.
#[test]
fn default_limits_match_the_document() {
    let rows = rows();
    let limits = Limits::default();
    let says = |name: &str, value: String| {
        let row = &rows[name];
        assert!(row.starts_with(&value), "{name}: docs/limits.md has `{row}`, and the default is {value}");
    };
    let bytes =
        |n: usize| if n.is_multiple_of(1 << 20) { format!("{} MiB", n >> 20) } else { format!("{} KiB", n >> 10) };
    says("connections", limits.connections.to_string());
    says("header bytes", bytes(limits.header_bytes));
    says("headers", limits.headers.to_string());
    says("body bytes", bytes(limits.body_bytes));
    says("bytes of all requests", bytes(limits.bodies_bytes));
    says("sound bytes", bytes(limits.audio_bytes));
    says("JSON values", limits.values.to_string());
    says("answers", limits.choices.to_string());
    says("stop texts", limits.stops.to_string());
    says("tools", limits.tools.to_string());
    says("echoed bytes", bytes(limits.echo_bytes));
    says("answer bytes", bytes(limits.answer_bytes));
    says("log probabilities of prompts", bytes(limits.answer_bytes));
    says("stored responses", bytes(limits.stored_bytes));
    says("texts", limits.texts.to_string());
    says("batches", limits.batches.to_string());
    for (name, time) in [
        ("header time", limits.header_time),
        ("body time", limits.body_time),
        ("sound time", limits.audio_time),
        ("write time", limits.write_time),
        ("answer time", limits.answer_time),
        ("drain", limits.drain),
    ] {
        says(name, format!("{} s", time.as_secs()));
    }
    let engine = EngineOptions::default();
    says("texts at once", engine.max_sequences.to_string());
}

/// A request just above a limit: status, code, field, and a word of its message.
#[track_caller]
fn refused(path: &str, body: Json, code: &str, param: Json, says: &str) {
    let answer = post(shared(), path, &body);
    let told = answer.json();
    assert_eq!((answer.status, &told["error"]["code"], &told["error"]["param"]), (400, &json!(code), &param), "{told}");
    assert!(told["error"]["message"].as_str().unwrap().contains(says), "{told}");
}

fn chat(field: &str, value: Json) -> Json {
    let mut body = json!({"model": "story", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    body[field] = value;
    body
}

fn stop_tokens() {
    done(shared(), "/v1/chat/completions", chat("stop_token_ids", json!(vec![5; 1024])));
    let expected = "a list of at most 1024 token ids";
    refused(
        "/v1/chat/completions",
        chat("stop_token_ids", json!(vec![5; 1025])),
        "invalid_value",
        json!("stop_token_ids"),
        expected,
    );
}

fn log_probabilities_of_prompts() {
    let server = own(|_, options| options.limits = Limits { answer_bytes: 1 << 20, ..Limits::default() });
    // Tokens, times likely tokens and two more, times bytes.
    for field in ["logprobs", "prompt_logprobs"] {
        let ask = |n: usize| {
            let asked = json!({"prompt": vec![5; n], "echo": true, field: 6, "max_tokens": 0});
            post(server.address, "/v1/completions", &asked)
        };
        assert_eq!(ask(256).status, 200);
        let told = ask(257);
        assert_eq!((told.status, &told.json()["error"]["param"]), (400, &json!(field)), "{told:?}");
    }
}

/// A client that sends too much before reading sees the reason; one that never stops is disconnected.
fn unwanted_bytes() {
    let server = own(|_, options| options.limits = Limits { body_bytes: 4096, ..Limits::default() });
    let body = vec![b' '; 20 << 20];
    let length = body.len().to_string();
    let mut told = Connection::open(server.address);
    assert!(told.write(&request("POST", "/v1/completions", &[JSON, ("content-length", &length)], &body)));
    assert_eq!(told.answer().status, 413);
    // Missing key, wrong path or wrong method: for every error.
    for (method, path, status) in [("POST", "/v1/none", 404), ("PUT", "/v1/models", 405)] {
        let mut told = Connection::open(server.address);
        assert!(told.write(&request(method, path, &[JSON, ("content-length", &length)], &body)), "{path}");
        assert_eq!(told.answer().status, status);
    }
    let mut endless = Connection::open(server.address);
    endless.write(&request("POST", "/v1/completions", &[JSON, ("content-length", "999999999999")], b""));
    assert!((0..20).any(|_| !endless.write(&body)), "it has read all of it");
}

/// Transcripts with these limits: status and message.
fn transcript(limits: Limits, parts: &[audio::Part<'_>]) -> (u16, String) {
    let options = ServerOptions { limits, ..ServerOptions::default() };
    let server = super::server::start(vec![audio::speech()], options);
    let answer = audio::ask(server.address, audio::PATH, parts);
    (answer.status, answer.text())
}

fn sound_bytes() {
    let limits = || Limits { audio_bytes: 4096, body_bytes: 1, ..Limits::default() };
    let sound = |n| transcript(limits(), &[("file", Some("a.wav"), &audio::noise(n, 1))]);
    let (status, told) = sound(4096);
    assert!(status == 413 && told.contains("more than 4096 bytes"), "{told}");
    assert_eq!(sound(3000).0, 200);
}

/// A low rate becomes many samples, which count among the bytes of all requests.
fn sound_time() {
    let limits = || Limits { audio_time: std::time::Duration::from_secs(9), ..Limits::default() };
    let (status, told) = transcript(limits(), &[("file", Some("a.wav"), &audio::noise(10, 10))]);
    assert!(status == 400 && told.contains("at most 9 seconds") && told.contains("\"file\""), "{told}");
    assert_eq!(transcript(limits(), &[("file", Some("a.wav"), &audio::noise(10, 9))]).0, 200);
}

fn form_parts() {
    let (status, told) = transcript(Limits::default(), &[("include[]", None, &b"a"[..]); 65]);
    assert!(status == 400 && told.contains("over 64 parts"), "{told}");
}

fn form_text() {
    let (status, told) = transcript(Limits::default(), &[("prompt", None, &[b'a'; (64 << 10) + 1])]);
    assert!(status == 400 && told.contains("prompt is 65537 bytes, expected a text of at most 64 KiB"), "{told}");
}

fn json_values() {
    let n = Limits::default().values;
    let of = |n: usize| format!("{{\"model\":\"story\",\"prompt\":[{}1]}}", "1,".repeat(n - 1));
    // The object, the model's name, the list, and its elements.
    let told = send(shared(), "POST", "/v1/completions", &[JSON], of(n - 3).as_bytes()).json();
    assert_eq!(told["error"]["code"], json!("context_length_exceeded"), "{told}");
    let told = send(shared(), "POST", "/v1/completions", &[JSON], of(n - 2).as_bytes()).json();
    assert_eq!(told["error"]["code"], json!("invalid_value"), "{told}");
    assert!(told["error"]["message"].as_str().unwrap().contains(&format!("at most {n}")), "{told}");
}

fn json_depth() {
    let of = |n: usize| {
        format!("{{\"model\":\"story\",\"prompt\":\"A\",\"metadata\":{}1{}}}", "{\"a\":".repeat(n), "}".repeat(n))
    };
    let ask = |n| send(shared(), "POST", "/v1/completions", &[JSON], of(n).as_bytes());
    assert_eq!(ask(126).status, 200);
    let told = ask(127).json();
    assert_eq!(told["error"]["code"], json!("invalid_json"), "{told}");
}

fn files() {
    let folder = std::env::temp_dir().join(format!("tilewright-files-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for at in 0..=10_000 {
        std::fs::write(folder.join(at.to_string()), "").unwrap();
    }
    let options = ServerOptions { page: Some(folder.clone()), ..ServerOptions::default() };
    let error = Server::bind("127.0.0.1:0".parse().unwrap(), Vec::new(), options).err().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(error.to_string().contains("at most 10000 files"), "{error}");
}

fn answers() {
    refused("/v1/chat/completions", chat("n", json!(129)), "invalid_value", json!("n"), "1 to 128");
    let body = json!({"model": "story", "prompt": ["A", "B"], "n": 65, "max_tokens": 1});
    refused("/v1/completions", body, "invalid_value", json!("prompt"), "at most 128");
}

fn stop_texts() {
    refused("/v1/chat/completions", chat("stop", json!(vec!["x"; 65])), "invalid_value", json!("stop"), "1 to 64");
}

fn stop_bytes() {
    done(shared(), "/v1/chat/completions", chat("stop", json!("x".repeat(1024))));
    let long = json!(["x", "y".repeat(1025)]);
    refused("/v1/chat/completions", chat("stop", long), "invalid_value", json!("stop"), "1024 bytes");
}

fn salt_bytes() {
    done(shared(), "/v1/chat/completions", chat("cache_salt", json!("x".repeat(256))));
    let long = chat("cache_salt", json!("x".repeat(257)));
    refused("/v1/chat/completions", long, "invalid_value", json!("cache_salt"), "1 to 256 bytes");
}

fn biases() {
    let of = |n: u32| (0..n).map(|id| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>();
    let (most, more) = (chat("logit_bias", of(1024).into()), chat("logit_bias", of(1025).into()));
    // The built-in vocabulary is smaller.
    let told = post(shared(), "/v1/chat/completions", &most).json();
    assert!(told["error"]["message"].as_str().is_none_or(|message| message.contains("token ids below")), "{told}");
    refused("/v1/chat/completions", more, "invalid_value", json!("logit_bias"), "at most 1024");
}

fn guessed_tokens() {
    let mut body = chat("prompt_lookup", json!(8));
    body["temperature"] = 0.into();
    refused("/v1/chat/completions", body, "invalid_value", json!("prompt_lookup"), "0 to 7");
}

fn likeliest_tokens() {
    let mut body = chat("logprobs", json!(true));
    body["top_logprobs"] = 21.into();
    refused("/v1/chat/completions", body, "invalid_value", json!("top_logprobs"), "0 to 20");
    for field in ["logprobs", "prompt_logprobs"] {
        let body = json!({"model": "story", "prompt": "A", field: 21});
        refused("/v1/completions", body, "invalid_value", json!(field), "0 to 20");
    }
}

fn tools() {
    let tool = |at: usize| json!({"type": "function", "function": {"name": format!("f{at}")}});
    let all: Vec<Json> = (0..513).map(tool).collect();
    refused("/v1/chat/completions", chat("tools", all.clone().into()), "invalid_value", json!("tools"), "at most 512");
    let body = json!({"model": "story", "input": "Hi", "tools": all});
    refused("/v1/responses", body, "invalid_value", json!("tools"), "at most 512");
    // A description is a string, so its size is exact.
    let told = |description: Json| json!([{"type": "function", "function": {"name": "f", "description": description}}]);
    for description in [json!(vec![1; 1000]), json!({"a": "b"}), json!(1)] {
        let param = json!("tools[0].function.description");
        refused("/v1/chat/completions", chat("tools", told(description)), "invalid_value", param, "a text");
    }
}

fn echoed_bytes() {
    let body = |n: usize| json!({"model": "story", "prompt": "A".repeat(n), "n": 128, "echo": true, "max_tokens": 1});
    refused("/v1/completions", body((64 << 10) + 1), "invalid_value", json!("echo"), "8388608 bytes");
    // This one is too long for its model.
    refused("/v1/completions", body(64 << 10), "context_length_exceeded", Json::Null, "holds 512");
}

fn texts() {
    let many = vec!["a"; 2049];
    let body = json!({"model": "nomic", "input": many});
    refused("/v1/embeddings", body, "invalid_value", json!("input"), "1 to 2048");
    let body = json!({"model": "bert", "query": "a", "documents": many});
    refused("/v1/rerank", body, "invalid_value", json!("documents"), "1 to 2048");
}

fn prompt_tokens() {
    let body = json!({"model": "story", "prompt": vec![5; 513], "max_tokens": 1});
    refused("/v1/completions", body, "context_length_exceeded", Json::Null, "holds 512");
}

/// The buffer of an unstreamed answer is limited, and the answer so far is returned.
fn answer_bytes() {
    let server = own(|_, options| options.limits = Limits { answer_bytes: 100 << 10, ..Limits::default() });
    let body = json!({
        "model": "story", "messages": [{"role": "user", "content": "Hi"}], "n": 2, "max_tokens": 400,
        "logprobs": true, "top_logprobs": 20, "logit_bias": {"2": -100},
    });
    let answer = done(server.address, "/v1/chat/completions", body).json();
    let choices = answer["choices"].as_array().unwrap();
    let n: usize = choices.iter().map(|choice| choice["logprobs"]["content"].as_array().unwrap().len()).sum();
    assert!(choices.len() == 2 && choices.iter().all(|choice| choice["finish_reason"] == "length"), "{answer}");
    assert!((1..20).contains(&n), "{n} tokens returned");
    assert!(!choices[0]["message"]["content"].as_str().unwrap().is_empty(), "{answer}");
}

fn call_bytes() {
    let calls = |n: usize| {
        let text = "x".repeat(n);
        let call = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": \"{text}\"}}}}</tool_call>");
        let mut reader = AnswerReader::new(Format::Hermes);
        let events = [reader.push_text(&call), reader.finish()].concat();
        events.iter().filter(|event| matches!(event, Event::Call(_))).count()
    };
    assert_eq!((calls(1000), calls(1 << 20)), (1, 0));
}

fn texts_at_once() {
    let check = |max_sequences| EngineOptions { max_sequences, ..EngineOptions::default() }.check();
    assert!(check(64).is_ok() && check(65).unwrap_err().to_string().contains("1 to 64"));
}

fn batches() {
    use tilewright_serve::{Loaded, ModelSpec};
    let options = ServerOptions { limits: Limits { batches: 0, ..Limits::default() }, ..ServerOptions::default() };
    let nomic = ModelSpec::new("nomic", 1 << 20, || super::server::embedder().map(Loaded::Embedder));
    let server = super::server::start(vec![nomic], options);
    let answer = post(server.address, "/v1/embeddings", &json!({"model": "nomic", "input": "a"}));
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (429, &json!("busy")));
}

/// A schema beyond a limit is refused before any computation.
#[track_caller]
fn schema(schema: Json, says: &str) {
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    refused("/v1/chat/completions", chat("response_format", format), "constraint", json!("response_format"), says);
}

fn schema_values() {
    schema(json!({"enum": (0..10_000).collect::<Vec<_>>()}), "at most 10000");
}

fn schema_bytes() {
    schema(json!({"const": "x".repeat((256 << 10) + 1)}), "at most 262144");
}

fn pattern_bytes() {
    schema(json!({"type": "string", "pattern": "x?".repeat((8 << 10) + 1)}), "at most 16384");
}

fn pattern_length() {
    schema(json!({"type": "string", "pattern": "x{20001}"}), "at most 20000");
}

fn properties() {
    let all: serde_json::Map<String, Json> = (0..1001).map(|at| (format!("p{at}"), json!(true))).collect();
    schema(json!({"type": "object", "properties": all}), "at most 1000000");
}

fn pattern_properties() {
    let all: serde_json::Map<String, Json> = (0..65).map(|at| (format!("^p{at}$"), json!(true))).collect();
    schema(json!({"type": "object", "patternProperties": all}), "at most 64");
}

fn joined_patterns() {
    let all: Vec<Json> = (0..17).map(|at| json!({"type": "string", "pattern": format!("{at}")})).collect();
    schema(json!({"allOf": all}), "at most 16");
}

fn multiple_of() {
    schema(json!({"type": "integer", "multipleOf": 20_001}), "at most 20000");
}

/// The constraint of tools for a model with calls in Hermes format.
fn of_tools(tools: &[Json]) -> String {
    let model = Model::builtin(&Device::cpu()).unwrap();
    let rules = ToolRules { format: Format::Hermes, choice: ToolChoice::Auto, parallel: true, thinking: true };
    match Constraint::tools(tools, &rules, model.tokenizer().unwrap(), "") {
        Ok(_) => "none".into(),
        Err(error) => error.to_string(),
    }
}

fn tool_names() {
    let tool = |n: usize| [json!({"type": "function", "function": {"name": "f".repeat(n)}})];
    assert_eq!(of_tools(&tool(128)), "none");
    assert!(of_tools(&tool(129)).contains("128"));
}

fn tool_rules() {
    let tool = |at: usize| json!({"type": "function", "function": {"name": format!("{at}{}", "f".repeat(100))}});
    let tools: Vec<Json> = (0..2000).map(tool).collect();
    assert!(of_tools(&tools).contains("131072 bytes of rules"), "{}", of_tools(&tools));
}
