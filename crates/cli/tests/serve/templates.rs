//! Chat templates end to end: those of published models, unparsable ones, and answers returned in the next request's
//! history.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde_json::{Value as Json, json};
use tilewright::answer::{AnswerReader, Event, Format};
use tilewright::chat::{ChatOptions, ChatTemplate, Message};
use tilewright::engine::EngineOptions;
use tilewright::load::ModelFile;
use tilewright::{Device, GenerateOptions, LoadOptions, Model};
use tilewright_serve::{Decoder, Loaded, ModelSpec, ServerOptions};

use super::client::{Answer, done, post};
use super::common;
use super::program::{Program, command, command_of};
use super::scripted::{self, Says};
use super::server::{Running, start};

/// Marks of the families, and end of text.
const SPECIAL: [&str; 42] = [
    "<|im_start|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
    "<|end|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<seed:think>",
    "</seed:think>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "｜DSML｜",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<|im_end|>",
];

/// Families whose templates write a call as the model does: the template, the answer after the prompt, whether
/// it thinks, and where the kept part begins.
const FAMILIES: [(&str, &str, bool, &str); 11] = [
    (
        "GLM-4.6",
        "\n<think>I think.</think>\nCalling.\n<tool_call>t\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n\
         </tool_call>",
        true,
        "\n<think>",
    ),
    (
        "GLM-4.7-Flash",
        "I think.</think>Calling.<tool_call>t<arg_key>x</arg_key><arg_value>3</arg_value></tool_call>",
        true,
        "I think.",
    ),
    (
        "inclusionai-ling-3.0-flash",
        "I think.</think>Calling.\n<tool_call>t\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        true,
        "I think.",
    ),
    (
        "ByteDance-Seed-OSS",
        "<seed:think>I think.</seed:think>\nCalling.\n\n<seed:tool_call>\n<function=t>\n<parameter=x>3</parameter>\n\
         </function>\n</seed:tool_call>",
        true,
        "<seed:think>",
    ),
    (
        "deepseek-ai-DeepSeek-V3.1",
        "Calling.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>t<｜tool▁sep｜>{\"x\": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        false,
        "Calling.",
    ),
    // Its template writes no calls, but it makes them.
    (
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "I think.</think>Calling.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>t\n```json\n{\"x\": 3}\n\
         ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        true,
        "",
    ),
    (
        "deepseek-ai-DeepSeek-V3.2",
        "Calling.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"t\">\n<｜DSML｜parameter name=\"x\" string=\"false\">3\
         </｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        false,
        "Calling.",
    ),
    (
        "moonshotai-Kimi-K2",
        "Calling.<|tool_calls_section_begin|><|tool_call_begin|>functions.t:0<|tool_call_argument_begin|>{\"x\": 3}\
         <|tool_call_end|><|tool_calls_section_end|>",
        false,
        "Calling.",
    ),
    (
        "NVIDIA-Nemotron-Nano-v2",
        "I think.\n</think>\nCalling.\n<TOOLCALL>[{\"name\": \"t\", \"arguments\": {\"x\": 3}}]</TOOLCALL>",
        true,
        "Calling.",
    ),
    (
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "I think.\n</think>\nCalling.\n<tool_call>\n<function=t>\n<parameter=x>\n3\n</parameter>\n</function>\n\
         </tool_call>",
        true,
        "I think.",
    ),
    (
        "MiniMax-M2",
        "I think.\n</think>\n\nCalling.\n<minimax:tool_call>\n<invoke name=\"t\">\n\
         <parameter name=\"x\">3</parameter>\n\
         </invoke>\n</minimax:tool_call>",
        true,
        "I think.",
    ),
];

const N_POSITIONS: usize = 8 << 10;

fn model(template: &str, says: &Says) -> Model {
    let file = scripted::gguf(template, &SPECIAL, says, N_POSITIONS);
    let options = LoadOptions { context_length: Some(N_POSITIONS as u32), ..LoadOptions::default() };
    Model::from_file(&Device::cpu(), ModelFile::from_gguf_bytes(file).unwrap(), options).unwrap()
}

fn spec(name: &str, model: Model) -> ModelSpec {
    let options = EngineOptions { max_sequences: 1, ..EngineOptions::default() };
    ModelSpec::new(name, 0, move || Ok(Loaded::Decoder(Arc::new(Decoder::new(&model, &options, None)?))))
}

/// Names and sources of the templates of published models.
fn published() -> Vec<(String, String)> {
    let Some(folder) = common::find_data(Path::new("chat-templates")) else {
        common::skip("no test data `chat-templates`: scripts/test-data fetches it");
        return Vec::new();
    };
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|end| end == "jinja")).collect();
    files.sort();
    let read = |path: &PathBuf| {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        (name, std::fs::read_to_string(path).unwrap())
    };
    files.iter().map(read).collect()
}

fn named<'a>(templates: &'a [(String, String)], name: &str) -> &'a str {
    let found = templates.iter().find(|(own, _)| own == name);
    &found.unwrap_or_else(|| panic!("no template {name}")).1
}

fn tools() -> Json {
    let x = json!({"type": "integer", "description": "a number"});
    let parameters = json!({"type": "object", "properties": {"x": x}, "required": ["x"]});
    json!([{"type": "function", "function": {"name": "t", "description": "d", "parameters": parameters}}])
}

/// An answer's text, including reasoning.
fn said(answer: &Json) -> String {
    let message = &answer["choices"][0]["message"];
    let text = |key: &str| message[key].as_str().unwrap_or_default().to_owned();
    text("reasoning_content") + &text("content")
}

#[test]
fn every_published_template_loads_and_answers() {
    const N: usize = 2;
    let mut wrong = Vec::new();
    for (name, source) in published() {
        let model = model(&source, &Says::Always(b'k'));
        let server = start(vec![spec("x", model.clone())], ServerOptions::default());
        // As users of the library do.
        let tokenizer = model.tokenizer().unwrap();
        let template = ChatTemplate::for_model(model.chat_source(), tokenizer).unwrap();
        assert_eq!(template.unreadable().count(), 0, "{name}");
        let now = ChatOptions { now: Some(1_700_000_000), ..ChatOptions::default() };
        let ids = template.encode(tokenizer, &[Message::new("user", "zebra")], &now);
        match ids {
            Ok(ids) => {
                if !tokenizer.decode(&ids, false).unwrap().contains("zebra") {
                    wrong.push(format!("{name}: the question is missing"));
                }
                // Long ones are slow, and the server is tested as well.
                if ids.len() < 200 {
                    let mut session = model.session().unwrap();
                    let options = GenerateOptions { max_tokens: N, ..GenerateOptions::greedy(0) };
                    let (_, text, _) = common::collect(&mut session.generate_from(&ids, &options).unwrap());
                    if text != "k".repeat(N) {
                        wrong.push(format!("{name}: {text}"));
                    }
                }
            }
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
        let asked = json!({"model": "x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": N});
        let called =
            json!({"id": "call00100", "type": "function", "function": {"name": "t", "arguments": "{\"x\":3}"}});
        let history = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Calling.", "reasoning_content": "I think.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call00100", "content": "5"},
        ]);
        let with_tools = json!({"model": "x", "messages": history, "tools": tools(), "max_tokens": 1});
        let answer = post(server.address, "/v1/chat/completions", &asked);
        if answer.status != 200 || said(&answer.json()) != "k".repeat(N) {
            wrong.push(format!("{name}: {}", answer.text()));
        }
        // With tools, the format prompts for headers.
        let answer = post(server.address, "/v1/chat/completions", &with_tools);
        if answer.status != 200 {
            wrong.push(format!("{name}: {}", answer.text()));
        }
    }
    assert!(wrong.is_empty(), "{} wrong\n{}", wrong.len(), wrong.join("\n"));
}

/// A server with a model of scripted output after a request's prompt, and its response.
fn scripted(template: &str, says: &str, mut asked: Json) -> (Running, Answer) {
    // The same vocabulary, to count the prompt's tokens.
    let counting = start(vec![spec("x", model(template, &Says::Behind(1, "")))], ServerOptions::default());
    let n_asked = asked["max_tokens"].take();
    asked["max_tokens"] = 1.into();
    let usage = done(counting.address, "/v1/chat/completions", asked.clone()).json()["usage"].clone();
    asked["max_tokens"] = n_asked;
    let n_before = usage["prompt_tokens"].as_u64().unwrap() as usize;
    let server = start(vec![spec("x", model(template, &Says::Behind(n_before, says)))], ServerOptions::default());
    let answer = done(server.address, "/v1/chat/completions", asked);
    (server, answer)
}

/// The server's answer, with a tool's result, forms the next request.
#[test]
fn server_answers_are_accepted_as_history() {
    let templates = published();
    if templates.is_empty() {
        return;
    }
    for (name, says) in [
        (
            "openai-gpt-oss-120b",
            "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary<|message|>Calling.<|end|>\
             <|start|>assistant<|channel|>commentary to=functions.t <|constrain|>json<|message|>{\"x\": 3}",
        ),
        (
            "Qwen-Qwen3-0.6B",
            "<think>I think.</think>Calling.<tool_call>\n{\"name\": \"t\", \"arguments\": {\"x\": 3}}\n</tool_call>",
        ),
        (
            "meta-llama-Llama-3.1-8B-Instruct",
            "{\"name\": \"t\", \"parameters\": {\"x\": 3}}; {\"name\": \"t\", \"parameters\": {\"x\": 4}}",
        ),
    ] {
        let template = named(&templates, name);
        let question = json!({"role": "user", "content": "hi"});
        let asked =
            json!({"model": "x", "messages": [question], "tools": tools(), "max_tokens": 120, "temperature": 0});
        let (server, answer) = scripted(template, says, asked.clone());
        let message = answer.json()["choices"][0]["message"].clone();
        let calls = message["tool_calls"].as_array().unwrap_or_else(|| panic!("{name}: {}", answer.text()));
        let mut messages = vec![question, message.clone()];
        for call in calls {
            messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "five"}));
        }
        let mut next = asked;
        next["messages"] = messages.into();
        next["max_tokens"] = 1.into();
        let answer = post(server.address, "/v1/chat/completions", &next);
        assert_eq!(answer.status, 200, "{name}: {}", answer.text());
    }
}

/// Each family's answer, whole and streamed, by the server and by `chat`; and its template's own text for it, when the
/// answer is sent back.
#[test]
fn calls_of_each_family_are_answered_and_written_back() {
    let templates = published();
    if templates.is_empty() {
        return;
    }
    for (name, says, thinks, kept) in FAMILIES {
        let template = named(&templates, name);
        let question = json!({"role": "user", "content": "hi"});
        let mut asked =
            json!({"model": "x", "messages": [question], "tools": tools(), "max_tokens": 128, "temperature": 0});
        // Some templates end reasoning at once unless it is asked for.
        if thinks {
            asked["chat_template_kwargs"] = json!({"enable_thinking": true});
        }
        let (server, answer) = scripted(template, says, asked.clone());
        let choice = answer.json()["choices"][0].clone();
        let message = &choice["message"];
        let call = &message["tool_calls"][0];
        assert_eq!(call["function"], json!({"name": "t", "arguments": "{\"x\":3}"}), "{name}: {}", answer.text());
        assert_eq!(
            (&message["content"], &choice["finish_reason"]),
            (&json!("Calling."), &json!("tool_calls")),
            "{name}"
        );
        let thought = if thinks { json!("I think.") } else { Json::Null };
        assert_eq!(message["reasoning_content"], thought, "{name}");

        asked["stream"] = true.into();
        let events = done(server.address, "/v1/chat/completions", asked.clone()).events();
        let deltas = |field: &str| -> String {
            let parts = events.iter().map(|event| &event["choices"][0]["delta"]);
            parts.filter_map(|delta| delta.pointer(field)?.as_str()).collect()
        };
        let whole = if thinks { "I think." } else { "" };
        assert_eq!((deltas("/content").as_str(), deltas("/reasoning_content").as_str()), ("Calling.", whole), "{name}");
        let called = (deltas("/tool_calls/0/function/name"), deltas("/tool_calls/0/function/arguments"));
        assert_eq!(called, ("t".into(), "{\"x\":3}".into()), "{name}");

        let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "five"});
        let next = json!({"model": "x", "messages": [question, message, result], "tools": tools()});
        let prompt = done(server.address, "/apply-template", next.clone()).json()["prompt"].clone();
        let prompt = prompt.as_str().unwrap();
        if !kept.is_empty() {
            let kept = &says[says.find(kept).unwrap()..];
            assert!(prompt.contains(kept), "{name}: {kept:?} is not in {prompt:?}");
        }
        // Its results are named by the model's own ids.
        assert!(!name.contains("Kimi") || prompt.contains("## Return of functions.t:0"), "{prompt:?}");
        drop(server);

        let n_before = answer.json()["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
        let path = |ending: &str| format!("{}/family{ending}", env!("CARGO_TARGET_TMPDIR"));
        let file = scripted::gguf(template, &SPECIAL, &Says::Behind(n_before, says), N_POSITIONS);
        std::fs::write(path(".gguf"), file).unwrap();
        std::fs::write(path("_tools.json"), tools().to_string()).unwrap();
        let model = path(".gguf");
        let options = ["--tools", &path("_tools.json"), "-n", "128", "--temperature", "0", "--device", "cpu"];
        let thinking: &[&str] = if thinks { &["--template-var", "enable_thinking=true"] } else { &[] };
        let mut chat = command_of(&[&["chat", "--lines", &model], &options[..], thinking].concat());
        let mut child = chat.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let lines = format!("hi\n/save {}\n", path(".json"));
        let _ = std::io::Write::write_all(&mut child.stdin.take().unwrap(), lines.as_bytes());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let saved: Json = serde_json::from_slice(&std::fs::read(path(".json")).unwrap()).unwrap();
        let function = json!({"name": "t", "arguments": {"x": 3}});
        assert_eq!(saved[1]["tool_calls"][0]["function"], function, "{name}: {saved}");
        assert_eq!((&saved[1]["content"], &saved[1]["reasoning_content"]), (&json!("Calling."), &thought), "{name}");
        println!("{name}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Parts of a stream's calls, joined: the arguments, and in how many parts they came.
fn streamed(parts: &[&str]) -> (String, usize) {
    (parts.concat(), parts.iter().filter(|part| !part.is_empty()).count())
}

/// A call is streamed while it is generated. One that the token limit cuts off is unfinished in each API, as in OpenAI's
/// and Anthropic's own; Ollama, whose calls are objects, leaves it out.
#[test]
fn call_cut_off_by_the_token_limit_is_an_unfinished_call() {
    let says = "<tool_call>\n{\"name\": \"t\", \"arguments\": {\"x\": 3, \"y\": \"Rome, Oslo\"}}\n</tool_call>";
    let template = "{# tools <tool_call> name \"arguments\" #}{% for m in messages %}{{ m.content }}{% endfor %}";
    let server = start(vec![spec("x", model(template, &Says::Behind(2, says)))], ServerOptions::default());
    let send = |path: &str, asked: Json| done(server.address, path, asked);
    let schema = json!({"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}},
        "required": ["x", "y"]});
    let messages = json!([{"role": "user", "content": "hi"}]);
    // Marks are one token, and so is each byte.
    let n_cut = says.find(", Oslo").unwrap() + 1 - "<tool_call>".len();
    let (begun, complete) = (r#"{"x":3,"y":"Rome"#, r#"{"x":3,"y":"Rome, Oslo"}"#);
    for (n, arguments, is_whole) in [(n_cut, begun, false), (120, complete, true)] {
        let function = json!({"name": "t", "parameters": schema});
        let mut asked = json!({"model": "x", "messages": messages, "max_tokens": n, "temperature": 0,
            "tools": [{"type": "function", "function": function}]});
        let whole = send("/v1/chat/completions", asked.clone()).json()["choices"][0].clone();
        let finish = if is_whole { "tool_calls" } else { "length" };
        assert_eq!((&whole["finish_reason"], &whole["message"]["content"]), (&json!(finish), &json!("")));
        let [call] = whole["message"]["tool_calls"].as_array().unwrap().as_slice() else { panic!("{whole}") };
        assert_eq!(call["function"], json!({"name": "t", "arguments": arguments}));
        asked["stream"] = true.into();
        let events = send("/v1/chat/completions", asked).events();
        let deltas: Vec<&Json> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
        assert!(deltas.iter().all(|delta| delta["content"].as_str().unwrap_or_default().is_empty()), "{events:?}");
        let parts: Vec<&Json> = deltas.iter().filter_map(|delta| delta["tool_calls"].get(0)).collect();
        assert_eq!((&parts[0]["id"], &parts[0]["function"]["name"]), (&call["id"], &json!("t")));
        assert!(parts.iter().all(|part| part["index"] == 0) && parts[1].get("id").is_none(), "{parts:?}");
        let texts: Vec<&str> = parts.iter().filter_map(|part| part["function"]["arguments"].as_str()).collect();
        assert!(streamed(&texts).0 == arguments && streamed(&texts).1 > 6, "{texts:?}");
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], finish);

        let function = json!({"type": "function", "name": "t", "parameters": schema});
        let mut asked =
            json!({"model": "x", "input": "hi", "max_output_tokens": n, "temperature": 0, "tools": [function]});
        let response = send("/v1/responses", asked.clone()).json();
        let status = if is_whole { "completed" } else { "incomplete" };
        let is_call =
            |item: &Json| item["type"] == "function_call" && item["status"] == status && item["arguments"] == arguments;
        assert!(response["status"] == status && is_call(&response["output"][0]), "{response}");
        let next = json!({"model": "x", "previous_response_id": response["id"], "input": "hi", "max_output_tokens": 1});
        if !is_whole {
            send("/v1/responses", next);
        }
        asked["stream"] = true.into();
        let text = send("/v1/responses", asked).text();
        let events: Vec<Json> =
            text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect();
        let of = |kind: &'static str| events.iter().filter(move |event| event["type"] == kind);
        let texts: Vec<&str> =
            of("response.function_call_arguments.delta").filter_map(|event| event["delta"].as_str()).collect();
        assert!(streamed(&texts).0 == arguments && streamed(&texts).1 > 6, "{texts:?}");
        assert!(of("response.output_item.done").all(|event| is_call(&event["item"])), "{text}");
        assert!(is_call(&events.last().unwrap()["response"]["output"][0]), "{text}");

        let tool = json!({"name": "t", "input_schema": schema});
        let mut asked = json!({"model": "x", "messages": messages, "max_tokens": n, "temperature": 0, "tools": [tool]});
        let message = send("/v1/messages", asked.clone()).json();
        let [block] = message["content"].as_array().unwrap().as_slice() else { panic!("{message}") };
        // Without the incomplete text.
        let input = if is_whole { json!({"x": 3, "y": "Rome, Oslo"}) } else { json!({"x": 3}) };
        assert_eq!((&block["type"], &block["name"], &block["input"]), (&json!("tool_use"), &json!("t"), &input));
        assert_eq!(message["stop_reason"], if is_whole { "tool_use" } else { "max_tokens" });
        asked["stream"] = true.into();
        let text = send("/v1/messages", asked).text();
        let events: Vec<Json> =
            text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok()).collect();
        let texts: Vec<&str> = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
        assert!(streamed(&texts).0 == arguments && streamed(&texts).1 > 6, "{texts:?}");
        let kinds: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
        assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);

        let function = json!({"name": "t", "parameters": schema});
        let mut asked = json!({"model": "x", "messages": messages, "stream": false,
            "options": {"num_predict": n, "temperature": 0}, "tools": [{"type": "function", "function": function}]});
        let answer = send("/api/chat", asked.clone()).json();
        assert_eq!(answer["done_reason"], if is_whole { "stop" } else { "length" });
        let calls = |lines: &[Json]| -> Vec<Json> {
            let calls = lines.iter().filter_map(|line| line["message"]["tool_calls"].as_array());
            calls.flatten().map(|call| call["function"]["arguments"].clone()).collect()
        };
        let expected: Vec<Json> = if is_whole { vec![input] } else { Vec::new() };
        assert_eq!(
            (calls(std::slice::from_ref(&answer)), &answer["message"]["content"]),
            (expected.clone(), &json!(""))
        );
        asked["stream"] = true.into();
        let lines = send("/api/chat", asked).lines();
        assert_eq!((calls(&lines), lines.len()), (expected, if is_whole { 2 } else { 1 }));
    }
    // Cut off before the name, there is no call yet.
    let function = json!({"name": "t", "parameters": schema});
    let asked = json!({"model": "x", "messages": messages, "max_tokens": 6, "temperature": 0,
        "tools": [{"type": "function", "function": function}]});
    let message = send("/v1/chat/completions", asked).json()["choices"][0]["message"].clone();
    assert!(message["content"] == "" && message.get("tool_calls").is_none(), "{message}");
}

/// Arguments that clients leave empty.
#[test]
fn empty_arguments_render_like_an_empty_object() {
    let template = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}\
                    {% endfor %}{% endfor %}";
    let server = start(vec![spec("x", model(template, &Says::Always(b'k')))], ServerOptions::default());
    let asked = |arguments: &str| {
        let call = json!({"id": "a", "type": "function", "function": {"name": "t", "arguments": arguments}});
        let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "5"}]);
        done(server.address, "/v1/chat/completions", json!({"model": "x", "messages": messages, "max_tokens": 1}))
            .json()
    };
    assert_eq!(asked("")["usage"], asked("{}")["usage"]);
    assert_eq!(asked(" \n")["usage"], asked("{}")["usage"]);
}

#[test]
fn unreadable_template_does_not_stop_the_server() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let report = told.clone();
    let report: tilewright_serve::LogSink = Arc::new(move |line: &str| report.lock().unwrap().push(line.to_owned()));
    let good = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let specs = vec![
        spec("broken", model("\n{% endfor %}", &Says::Always(b'k'))),
        spec("good", model(good, &Says::Always(b'k'))),
    ];
    let server = start(specs, ServerOptions { report: Some(report), ..ServerOptions::default() });
    let told = told.lock().unwrap().clone();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].starts_with("broken: conversations are refused: ") && told[0].contains("`default`"), "{told:?}");
    let asked = |model: &str| json!({"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2});
    let refused = post(server.address, "/v1/chat/completions", &asked("broken"));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (400, &json!("template")), "{}", refused.text());
    assert!(refused.text().contains("line 2"), "{}", refused.text());
    assert_eq!(said(&done(server.address, "/v1/chat/completions", asked("good")).json()), "kk");
    let text = json!({"model": "broken", "prompt": "hi", "max_tokens": 2});
    assert_eq!(done(server.address, "/v1/completions", text).json()["choices"][0]["text"], json!("kk"));
}

/// The programs `serve` and `chat`, with files.
#[test]
fn serve_and_chat_accept_any_template() {
    let file = |name: &str, template: &str| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("template-{name}.gguf"));
        std::fs::write(&path, scripted::gguf(template, &SPECIAL, &Says::Always(b'k'), 2048)).unwrap();
        path.into_os_string().into_string().unwrap()
    };
    let usual = "{{ bos_token + strftime_now('%d') }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}";
    let (good, broken) = (file("good", usual), file("broken", "{% if %}"));
    let mut serve = command(&["--port", "0", &format!("good={good}"), &format!("broken={broken}")]);
    serve.stdin(std::process::Stdio::null());
    let program = Program::start(serve);
    let asked = |model: &str| json!({"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2});
    assert_eq!(said(&done(program.address, "/v1/chat/completions", asked("good")).json()), "kk");
    assert_eq!(post(program.address, "/v1/chat/completions", &asked("broken")).status, 400);
    assert_eq!(
        done(program.address, "/v1/completions", json!({"model": "broken", "prompt": "a", "max_tokens": 2})).status,
        200
    );
    program.end();
    for (model, more, code, says) in
        [(&good, &[][..], 0, ""), (&broken, &[], 1, "`default`: syntax"), (&broken, &["--template", "chatml"], 0, "")]
    {
        let mut chat = command_of(&[&["chat", "--lines", "-n", "2", model.as_str()], more].concat());
        let mut child = chat.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let _ = std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"hi\n");
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{told}");
        assert!(told.contains(says), "{told}");
        assert_eq!(output.stdout, if code == 0 { &b"kk\n"[..] } else { b"" });
    }
}

/// An answer without a header omits the header that the prompt began.
#[test]
fn prompt_header_is_not_part_of_an_answer() {
    let template = "{# <|channel|> <|call|> #}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>\
                    {% endfor %}<|start|>assistant";
    let asked =
        json!({"model": "x", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0});
    for says in ["Hello there.", "final answer.", "<|channel|>commentary oops", "<|message|>Hello"] {
        let (server, answer) = scripted(template, says, asked.clone());
        let text = said(&answer.json());
        assert!(!text.contains("<|start|>") && !text.contains("assistant"), "{says}: {text}");
        assert_eq!(text, says.strip_prefix("<|message|>").unwrap_or(says));
        let mut streamed = asked.clone();
        streamed["stream"] = true.into();
        let events = done(server.address, "/v1/chat/completions", streamed).events();
        let parts = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
        assert_eq!(parts.collect::<String>(), text);
    }
    let mut reader = AnswerReader::new(Format::Harmony).after_prompt("<|start|>assistant");
    let mut events = reader.push_text(" to=functions.t<|message|>{oops");
    events.extend(reader.finish());
    assert!(matches!(&events[..], [Event::NotACall { text, .. }, ..] if text.starts_with(" to=")), "{events:?}");
}
