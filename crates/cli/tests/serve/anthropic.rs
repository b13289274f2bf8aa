//! Anthropic's API.

use std::sync::Arc;

use serde_json::{Value as Json, json};
use tilewright::engine::EngineOptions;
use tilewright::load::ModelFile;
use tilewright::{Device, GenerateOptions, LoadOptions, Model};
use tilewright_serve::{Decoder, Loaded, ModelSpec, ServerOptions};

use super::client::{Answer, done, get, post, send};
use super::endpoints::{PROMPT, told};
use super::scripted::{self, Says};
use super::server::{Running, own, shared, start};

/// Events of a stream, whose names are their types. Pings are left out.
fn events_of(answer: &Answer) -> Vec<Json> {
    let text = answer.text();
    let events = text.split("\n\n").filter(|event| !event.is_empty()).map(|event| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Json = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: ").unwrap(), data["type"]);
        data
    });
    events.filter(|event| event["type"] != "ping").collect()
}

/// The message that a client makes of events.
fn message_of(events: &[Json]) -> Json {
    let mut message = events[0]["message"].clone();
    let (mut blocks, mut input): (Vec<Json>, String) = (Vec::new(), String::new());
    for event in &events[1..] {
        let at = event["index"].as_u64().map(|at| at as usize);
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(at, Some(blocks.len()));
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                let (block, delta) = (&mut blocks[at.unwrap()], &event["delta"]);
                let field = match delta["type"].as_str().unwrap() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "input_json_delta" => {
                        input += delta["partial_json"].as_str().unwrap();
                        continue;
                    }
                    other => panic!("{other}"),
                };
                let text = block[field].as_str().unwrap().to_owned() + delta[field].as_str().unwrap();
                block[field] = text.into();
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            "content_block_stop" if !input.is_empty() => {
                blocks[at.unwrap()]["input"] = serde_json::from_str(&std::mem::take(&mut input)).unwrap();
            }
            "content_block_stop" | "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    message["content"] = blocks.into();
    message
}

fn n_input(usage: &Json) -> u64 {
    usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap()
}

#[test]
fn messages_match_the_model_whole_and_streamed() {
    let (text, _) = told(true, &GenerateOptions::greedy(12));
    let messages = json!([{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]);
    let mut asked = json!({"model": "story", "messages": messages, "max_tokens": 12, "temperature": 0});
    let whole = done(shared(), "/v1/messages", asked.clone());
    assert!(whole.header("request-id").is_some_and(|id| Some(id) == whole.header("x-request-id")), "{whole:?}");
    let whole = whole.json();
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["model"]),
        (&json!("message"), &json!("assistant"), &json!("story"))
    );
    assert_eq!(whole["content"], json!([{"type": "text", "text": text}]));
    assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!("max_tokens"), &Json::Null));
    assert_eq!(whole["usage"]["output_tokens"], json!(12));
    let counted = json!({"model": "story", "messages": messages});
    let counted = done(shared(), "/v1/messages/count_tokens", counted).json();
    assert_eq!(counted, json!({"input_tokens": n_input(&whole["usage"])}));

    // The second of two stop strings, and one of another length that is not reached.
    let stop = &text[10..14];
    for (stops, reason, sequence) in
        [(json!(["zebra", stop]), "stop_sequence", json!(stop)), (json!(["zebra"]), "max_tokens", Json::Null)]
    {
        asked["stop_sequences"] = stops;
        asked["stream"] = false.into();
        let whole = done(shared(), "/v1/messages", asked.clone()).json();
        assert_eq!((&whole["stop_reason"], &whole["stop_sequence"]), (&json!(reason), &sequence));
        let is_cut = reason == "stop_sequence";
        let expected = if is_cut { &text[..text.find(stop).unwrap()] } else { text.as_str() };
        assert_eq!(whole["content"][0]["text"], json!(expected));
        asked["stream"] = true.into();
        let events = events_of(&done(shared(), "/v1/messages", asked.clone()));
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!(kinds[..3], ["message_start", "content_block_start", "content_block_delta"]);
        assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
        let streamed = message_of(&events);
        for field in ["content", "stop_reason", "stop_sequence", "model", "role", "type"] {
            assert_eq!(streamed[field], whole[field], "{field}");
        }
        assert_eq!(n_input(&streamed["usage"]), n_input(&whole["usage"]));
        assert_eq!(n_input(&events[0]["message"]["usage"]), n_input(&whole["usage"]));
    }

    // An answer begun by the request has only what follows.
    asked["messages"] = json!([messages[0], {"role": "assistant", "content": "Once there"}]);
    asked.as_object_mut().unwrap().remove("stop_sequences");
    let streamed = message_of(&events_of(&done(shared(), "/v1/messages", asked.clone())));
    asked["stream"] = false.into();
    let whole = done(shared(), "/v1/messages", asked).json();
    let text = whole["content"][0]["text"].as_str().unwrap();
    assert!(!text.is_empty() && !text.starts_with("Once there"), "{whole}");
    assert_eq!(streamed["content"], whole["content"]);
}

const SPECIAL: [&str; 5] = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"];

/// A template in Qwen's format.
const TEMPLATE: &str = "{# <tool_call> <think> \"arguments\" #}{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }}\
                        {% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};\
                        {% endfor %}A:";

fn scripted_server(says: &Says) -> Running {
    let file = scripted::gguf(TEMPLATE, &SPECIAL, says, 4096);
    let options = LoadOptions { context_length: Some(4096), ..LoadOptions::default() };
    let model = Model::from_file(&Device::cpu(), ModelFile::from_gguf_bytes(file).unwrap(), options).unwrap();
    let engine = EngineOptions { max_sequences: 1, ..EngineOptions::default() };
    let spec = ModelSpec::new("x", 0, move || Ok(Loaded::Decoder(Arc::new(Decoder::new(&model, &engine, None)?))));
    start(vec![spec], ServerOptions::default())
}

fn weather() -> Json {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    json!([{"name": "weather", "description": "The weather.", "input_schema": schema}])
}

#[test]
fn thoughts_and_calls_are_blocks() {
    let counting = scripted_server(&Says::Behind(1, "k"));
    // Without the model's name, since there is one.
    let mut asked = json!({"messages": [{"role": "user", "content": "hi"}], "tools": weather(), "max_tokens": 100,
        "temperature": 0, "thinking": {"type": "enabled", "budget_tokens": 50}});
    let n = done(counting.address, "/v1/messages/count_tokens", asked.clone()).json();
    let n = n["input_tokens"].as_u64().unwrap() as usize;
    assert_eq!(n, "user:hi;A:".len());
    let says =
        "<think>hm</think>Look.<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}</tool_call>";
    let server = scripted_server(&Says::Behind(n, says));
    let answer = done(server.address, "/v1/messages", asked.clone());
    assert_eq!(answer.header("x-tilewright-notice"), Some("thinking.budget_tokens is not supported; it was ignored"));
    let whole = answer.json();
    let id = &whole["content"][2]["id"];
    let expected = json!([
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Look."},
        {"type": "tool_use", "id": id, "name": "weather", "input": {"city": "Rome"}},
    ]);
    assert_eq!((&whole["content"], &whole["stop_reason"]), (&expected, &json!("tool_use")));
    assert!(id.is_string() && whole["usage"]["output_tokens_details"]["thinking_tokens"].as_u64() > Some(0));
    let mut streamed = asked.clone();
    streamed["stream"] = true.into();
    assert_eq!(message_of(&events_of(&done(server.address, "/v1/messages", streamed.clone())))["content"], expected);
    streamed["thinking"]["display"] = "omitted".into();
    let hidden = message_of(&events_of(&done(server.address, "/v1/messages", streamed)));
    assert_eq!(hidden["content"][0], json!({"type": "thinking", "thinking": "", "signature": ""}));

    // The answer goes back, and the result of the call.
    let result = json!({"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": "sun"}]});
    asked["messages"] = json!([
        asked["messages"][0],
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]);
    asked["tool_choice"] = json!({"type": "none"});
    let n = done(counting.address, "/v1/messages/count_tokens", asked.clone()).json();
    let prompt = "user:hi;assistant:hmLook.weather{\"city\": \"Rome\"};tool:sun;user:So?;A:";
    assert_eq!(n["input_tokens"], json!(prompt.len()));
    // A picture as a result, as of Claude Code's tool Read.
    let mut pictured = asked.clone();
    let source = json!({"type": "base64", "media_type": "image/png", "data": "AA=="});
    pictured["messages"][2]["content"][0]["content"] = json!([{"type": "image", "source": source}]);
    let n = done(counting.address, "/v1/messages/count_tokens", pictured).json();
    let unreadable = "Error: this result is not a text, and the model reads only text.";
    assert_eq!(n["input_tokens"], json!(prompt.replace("sun", unreadable).len()));
    let server = scripted_server(&Says::Behind(prompt.len(), "Sunny."));
    let next = done(server.address, "/v1/messages", asked).json();
    assert_eq!(next["content"], json!([{"type": "text", "text": "Sunny."}]));
    assert_eq!((&next["stop_reason"], &next["stop_sequence"]), (&json!("end_turn"), &Json::Null));
}

#[test]
fn required_calls_and_formats_follow_their_schemas() {
    let messages = json!([{"role": "user", "content": PROMPT}]);
    for choice in [
        json!({"type": "any", "disable_parallel_tool_use": true}),
        json!({"type": "tool", "name": "weather", "disable_parallel_tool_use": true}),
    ] {
        let schema = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
            "additionalProperties": false});
        let tools = json!([{"type": "custom", "name": "weather", "input_schema": schema, "cache_control": {"type": "ephemeral"}}]);
        let asked = json!({"model": "story", "messages": messages, "tools": tools, "tool_choice": choice, "max_tokens": 200, "seed": 1});
        let answer = done(shared(), "/v1/messages", asked).json();
        let call = answer["content"].as_array().unwrap().iter().find(|block| block["type"] == "tool_use");
        let call = call.unwrap_or_else(|| panic!("{answer}"));
        assert!(["Rome", "Oslo"].contains(&call["input"]["city"].as_str().unwrap()), "{answer}");
    }
    let format = json!({"type": "json_schema", "schema": {"enum": ["Rome", "Oslo"]}});
    for (field, value) in [("output_config", json!({"format": format})), ("output_format", format)] {
        let mut asked = json!({"model": "story", "messages": messages, "max_tokens": 20});
        asked[field] = value;
        let answer = done(shared(), "/v1/messages", asked).json();
        assert!([r#""Rome""#, r#""Oslo""#].contains(&answer["content"][0]["text"].as_str().unwrap()), "{answer}");
    }
}

#[test]
fn errors_have_anthropics_format() {
    let user = |content: Json| json!([{"role": "user", "content": content}]);
    let image = json!([{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "base64", "data": "AA=="}}]);
    let ok = json!({"model": "story", "messages": user("a".into()), "max_tokens": 1});
    let with = |field: &str, value: Json| {
        let mut asked = ok.clone();
        asked[field] = value;
        asked
    };
    for (asked, status, kind, says) in [
        (
            json!({"model": "story", "messages": user("a".into())}),
            400,
            "invalid_request_error",
            "max_tokens is missing",
        ),
        (with("max_tokens", 0.into()), 400, "invalid_request_error", "max_tokens is 0"),
        (with("messages", user(image)), 400, "invalid_request_error", "messages[0].content[1] is a picture, which"),
        (with("messages", json!([{"role": "tool", "content": "a"}])), 400, "invalid_request_error", "messages[0].role"),
        (with("tools", json!([{"name": "f"}])), 400, "invalid_request_error", "tools[0].input_schema is missing"),
        (with("tool_choice", "auto".into()), 400, "invalid_request_error", "tool_choice is \"auto\""),
        (with("thread", json!({"type": "create"})), 400, "invalid_request_error", "thread is not supported"),
        (with("stop_sequence", json!(["a"])), 400, "invalid_request_error", "did you mean `stop_sequences`?"),
        (with("model", "claude-opus-4-6".into()), 404, "not_found_error", "this server has `story`, `plain`"),
        (with("model", "nomic".into()), 400, "invalid_request_error", "nomic is an embedding model"),
        (with("messages", user("a story ".repeat(900).into())), 400, "invalid_request_error", "context"),
    ] {
        for streams in [false, true] {
            let mut asked = asked.clone();
            asked["stream"] = streams.into();
            let answer = post(shared(), "/v1/messages", &asked);
            let body = answer.json();
            assert_eq!((answer.status, &body["type"], &body["error"]["type"]), (status, &json!("error"), &json!(kind)));
            assert!(body["error"]["message"].as_str().unwrap().contains(says), "{body}");
            assert_eq!(body["request_id"].as_str(), answer.header("request-id"), "{answer:?}");
        }
    }
    // By this, Anthropic's clients send all messages instead of a thread.
    let error = post(shared(), "/v1/messages", &with("thread", json!({"type": "create"}))).json()["error"].clone();
    assert_eq!(error["details"], json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]}));
    // As Anthropic's clients send a key, and ask for models.
    let server = own(|_, options| options.api_keys = vec!["a key".into()]);
    let models = |headers: &[(&str, &str)]| send(server.address, "GET", "/v1/models", headers, b"");
    let version = ("anthropic-version", "2023-06-01");
    for headers in
        [&[("x-api-key", "a key"), version][..], &[("authorization", "Bearer x"), ("x-api-key", "a key"), version]]
    {
        let listed = models(headers).json();
        assert_eq!((&listed["data"][0]["type"], &listed["first_id"]), (&json!("model"), &json!("story")), "{listed}");
        assert!(listed["data"][0]["created_at"].as_str().unwrap().ends_with('Z') && listed["has_more"] == false);
    }
    let refused = models(&[("x-api-key", "another"), version]);
    assert_eq!((refused.status, &refused.json()["error"]["type"]), (401, &json!("authentication_error")));
    assert_eq!(get(shared(), "/v1/models").json()["data"][0]["object"], json!("model"));
}

/// A request as Claude Code sends it, with parts that it is known for.
#[test]
fn claude_code_is_answered_from_the_prefix_cache() {
    let server = own(|_, _| ());
    let schema = |properties: Json, required: Json| {
        json!({"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": properties,
            "required": required, "additionalProperties": false})
    };
    let edit = json!({"type": "object", "properties": {"old": {"type": "string", "minLength": 1}}, "additionalProperties": false});
    let tools = json!([
        {"name": "Bash", "description": "Runs a command.", "input_schema": schema(
            json!({"command": {"type": "string"}, "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 600000}}), json!(["command"]))},
        {"name": "WebFetch", "description": "Fetches.", "input_schema": schema(
            json!({"url": {"type": "string", "format": "uri"}, "mode": {"anyOf": [{"const": "a"}, {"type": "null"}], "default": null}}), json!(["url"]))},
        {"name": "MultiEdit", "description": "Edits.", "input_schema": schema(
            json!({"edits": {"type": "array", "items": edit, "minItems": 1}, "answers": {"type": "object",
                "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}}}), json!(["edits"]))},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ]);
    let ask = |line: &str| {
        let cached = json!({"type": "ephemeral", "ttl": "1h"});
        let system = json!([
            {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2.1; cch={line};")},
            {"type": "text", "text": "You are a story teller. ".repeat(10), "cache_control": cached},
        ]);
        let content = json!([{"type": "text", "text": "<system-reminder>x</system-reminder>"}, {"type": "text", "text": "hi", "cache_control": cached}]);
        let asked = json!({
            "model": "story", "max_tokens": 4, "temperature": 1, "stream": true, "system": system, "tools": tools,
            "messages": [{"role": "user", "content": content}, {"role": "system", "content": "Agents: none."}],
            "metadata": {"user_id": "user_x_account__session_y"},
            "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        });
        let headers = [
            ("content-type", "application/json"),
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "claude-code-20250219,interleaved-thinking-2025-05-14"),
            ("x-app", "cli"),
        ];
        let answer = send(server.address, "POST", "/v1/messages?beta=true", &headers, asked.to_string().as_bytes());
        assert_eq!(answer.status, 200, "{}", answer.text());
        let notices = answer.headers.iter().filter(|(name, _)| name == "x-tilewright-notice").count();
        assert_eq!(notices, 2, "{answer:?}");
        message_of(&events_of(&answer))["usage"].clone()
    };
    let (first, second) = (ask("00001"), ask("00002"));
    assert_eq!((&first["cache_read_input_tokens"], n_input(&first)), (&json!(0), n_input(&second)));
    assert!(second["cache_read_input_tokens"].as_u64().unwrap() > n_input(&second) / 2, "{second}");
}
