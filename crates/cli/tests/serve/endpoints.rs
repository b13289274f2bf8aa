//! Endpoint responses against the library.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine as _;
use serde_json::{Value as Json, json};
use tilewright::chat::{ChatOptions, ChatTemplate, Message};
use tilewright::engine::EngineOptions;
use tilewright::tokenizer::EncodeOptions;
use tilewright::{ChatModel, ChatRequest, Device, Error, GenerateOptions, LoadOptions, Model};
use tilewright_serve::{Decoder, KeepOptions, Loaded, ModelSpec, ServerOptions};

use super::client::{done, get, post, send};
use super::common::{block_on, collect};
use super::server::{embedder, load_story, own, reranker, shared, start};

pub const PROMPT: &str = "Once upon a time there was a dragon.";

fn messages() -> Json {
    json!([{"role": "user", "content": PROMPT}])
}

/// The model's output without a server: text and tokens.
pub fn told(is_chat: bool, options: &GenerateOptions) -> (String, Vec<u32>) {
    let model = Model::builtin(&Device::cpu()).unwrap();
    let ids = match is_chat {
        true => {
            let template = ChatTemplate::known("chatml").unwrap();
            template
                .encode(model.tokenizer().unwrap(), &[Message::new("user", PROMPT)], &ChatOptions::default())
                .unwrap()
        }
        false => model.encode(PROMPT).unwrap(),
    };
    let mut session = model.session().unwrap();
    let (ids, text, _) = collect(&mut session.generate_ids(&ids, options).unwrap());
    (text, ids)
}

fn drawn(seed: u64) -> GenerateOptions {
    GenerateOptions { max_tokens: 12, temperature: 1.0, seed: Some(seed), ..GenerateOptions::default() }
}

#[test]
fn chat_completions_match_the_model_whole_and_streamed() {
    let asked = json!({
        "model": "story", "messages": messages(), "max_tokens": 12, "seed": 7, "n": 2, "logprobs": true, "top_logprobs": 3,
    });
    let whole = done(shared(), "/v1/chat/completions", asked.clone()).json();
    assert_eq!((&whole["object"], &whole["model"]), (&json!("chat.completion"), &json!("story")));
    for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let (text, ids) = told(true, &drawn(7 + index as u64));
        assert_eq!(choice["message"]["content"], json!(text));
        assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(index), &json!("length")));
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!(tokens.len(), ids.len());
        for token in tokens {
            let top = token["top_logprobs"].as_array().unwrap();
            assert_eq!(top.len(), 3);
            assert!(
                top[0]["logprob"].as_f64().unwrap() >= token["logprob"].as_f64().unwrap() && top[0]["bytes"].is_array()
            );
        }
    }
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], json!(24));
    assert_eq!(usage["total_tokens"].as_u64().unwrap(), 24 + usage["prompt_tokens"].as_u64().unwrap());
    assert!(usage["prompt_tokens_details"]["cached_tokens"].is_u64());
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], json!(0));

    let mut streamed = asked;
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let chunks = done(shared(), "/v1/chat/completions", streamed).events();
    for choice in whole["choices"].as_array().unwrap() {
        let mine: Vec<&Json> =
            chunks.iter().filter_map(|c| c["choices"].get(0)).filter(|c| c["index"] == choice["index"]).collect();
        assert_eq!(mine[0]["delta"]["role"], json!("assistant"));
        let text: String = mine.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(json!(text), choice["message"]["content"]);
        assert_eq!(mine.last().unwrap()["finish_reason"], choice["finish_reason"]);
        assert!(mine.iter().rev().skip(1).all(|choice| choice["finish_reason"].is_null()));
        let tokens: Vec<&Json> =
            mine.iter().filter_map(|choice| choice["logprobs"]["content"].as_array()).flatten().collect();
        assert_eq!(json!(tokens), choice["logprobs"]["content"]);
    }
    let last = chunks.last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["total_tokens"]), (&json!([]), &usage["total_tokens"]));
    assert!(chunks.iter().rev().skip(1).all(|chunk| chunk["usage"].is_null() && chunk["id"] == last["id"]));
}

#[test]
fn completions_accept_text_and_token_prompts() {
    let ask = |more: Json| {
        let mut asked = json!({"model": "plain", "prompt": PROMPT, "max_tokens": 12, "temperature": 0});
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        done(shared(), "/v1/completions", asked).json()
    };
    let greedy = GenerateOptions::greedy(12);
    let (text, ids) = told(false, &greedy);
    let plain = ask(json!({"logprobs": 2}));
    let choice = &plain["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(text), &json!("length")));
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), ids.len());
    assert_eq!(
        logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect::<String>().trim(),
        text.trim()
    );
    let offsets: Vec<u64> = logprobs["text_offset"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert!(offsets[0] == 0 && offsets.is_sorted() && logprobs["top_logprobs"][0].as_object().unwrap().len() == 2);

    let model = Model::builtin(&Device::cpu()).unwrap();
    let prompt_ids = model.encode(PROMPT).unwrap();
    let several = ask(json!({"prompt": [prompt_ids, prompt_ids], "n": 2, "echo": true}));
    let choices = several["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    assert!(choices.iter().all(|choice| choice["text"] == json!(format!("{PROMPT}{text}"))), "{several}");
    assert_eq!(several["usage"]["prompt_tokens"].as_u64().unwrap(), 2 * prompt_ids.len() as u64);

    // Tokens of a stop string are not part of the answer.
    let stop = &text[10..14];
    let stopped = ask(json!({"stop": [stop], "logprobs": 0}));
    let choice = &stopped["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(text[..text.find(stop).unwrap()]), &json!("stop")));
    let tokens = choice["logprobs"]["tokens"].as_array().unwrap().len();
    assert!((tokens as u64) < stopped["usage"]["completion_tokens"].as_u64().unwrap());
    let chunks = done(
        shared(),
        "/v1/completions",
        json!({"model": "plain", "prompt": PROMPT, "stream": true, "temperature": 0, "max_tokens": 12}),
    )
    .events();
    assert_eq!(chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect::<String>(), text);
    let banned = ask(json!({"logit_bias": {"300": 100}, "max_tokens": 3, "logprobs": 0}));
    let tokens = banned["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    assert!(tokens.iter().all(|token| *token == tokens[0]), "{tokens:?}");
}

/// A raw prompt may contain control tokens, as with llama.cpp's server and Ollama's `raw`; a message may not.
#[test]
fn control_tokens_are_parsed_in_raw_prompts_only() {
    let text = "<s>Once</s>upon<s> a time";
    let model = Model::builtin(&Device::cpu()).unwrap();
    let encode = |parse_special| {
        let options = EncodeOptions { add_special: true, parse_special };
        model.tokenizer().unwrap().encode_with(text, options).unwrap().len()
    };
    let (raw, plain) = (encode(true), encode(false));
    assert!(raw < plain);
    let asked = json!({"model": "story", "prompt": text, "max_tokens": 1});
    let told = done(shared(), "/v1/completions", asked).json();
    assert_eq!(told["usage"]["prompt_tokens"], json!(raw));
    for model in ["story", "plain"] {
        let raw_too = model == "story";
        let asked =
            json!({"model": model, "prompt": text, "raw": raw_too, "stream": false, "options": {"num_predict": 1}});
        assert_eq!(done(shared(), "/api/generate", asked).json()["prompt_eval_count"], json!(raw), "{model}");
    }
    let template = ChatTemplate::known("chatml").unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let n = template.encode(tokenizer, &[Message::new("user", text)], &ChatOptions::default()).unwrap().len();
    assert!(n > plain);
    let messages = json!([{"role": "user", "content": text}]);
    let asked = json!({"model": "story", "messages": messages, "max_tokens": 1});
    assert_eq!(done(shared(), "/v1/chat/completions", asked).json()["usage"]["prompt_tokens"], json!(n));
    let asked = json!({"model": "story", "prompt": text, "stream": false, "options": {"num_predict": 1}});
    assert_eq!(done(shared(), "/api/generate", asked).json()["prompt_eval_count"], json!(n));
}

#[test]
fn seed_accepts_any_64_bit_integer() {
    let text = |seed: Json| {
        let asked = json!({"model": "plain", "prompt": PROMPT, "max_tokens": 12, "seed": seed});
        done(shared(), "/v1/completions", asked).json()["choices"][0]["text"].clone()
    };
    let drawn = |seed: u64| json!(told(false, &drawn(seed)).0);
    // Bounds of the range in OpenAI's specification, and neighbours that are equal in 53 bits.
    for (seed, own) in [
        (json!(-3), -3i64 as u64),
        (json!(i64::MIN), i64::MIN as u64),
        (json!(i64::MAX), i64::MAX as u64),
        (json!(-9223372036854776000.0), i64::MIN as u64),
        (json!(9223372036854776000u64), 9223372036854776000),
        (json!((1u64 << 53) + 1), (1 << 53) + 1),
        (json!(7.0), 7),
    ] {
        assert_eq!(text(seed.clone()), drawn(own), "{seed}");
    }
    let near: Vec<Json> = (0..4).map(|more| text(json!((1u64 << 60) + more))).collect();
    assert!(near.iter().any(|text| *text != near[0]), "{near:?}");
    let two = json!({"model": "plain", "prompt": PROMPT, "max_tokens": 12, "seed": -2, "n": 2});
    let two = done(shared(), "/v1/completions", two).json();
    assert_eq!((&two["choices"][0]["text"], &two["choices"][1]["text"]), (&drawn(u64::MAX - 1), &drawn(u64::MAX)));
    // -1 draws a seed, as in llama.cpp's server.
    let random: Vec<Json> = (0..4).map(|_| text(json!(-1))).collect();
    assert!(random.iter().any(|text| *text != random[0]), "{random:?}");
    let ollama = |seed: Json| {
        // Its defaults of `top_p` and `min_p` differ from ours.
        let options = json!({"seed": seed, "num_predict": 12, "temperature": 1.0, "top_p": 0.95, "min_p": 0.05});
        let asked = json!({"model": "plain", "prompt": PROMPT, "raw": true, "stream": false, "options": options});
        done(shared(), "/api/generate", asked).json()["response"].clone()
    };
    assert_eq!(ollama(json!((1u64 << 53) + 1)), drawn((1 << 53) + 1));
    assert_eq!(ollama(json!(-2)), drawn(-2i64 as u64));
    assert!(ollama(json!(-1)).is_string());
}

/// The end token is not among the tokens of a completion, even if it completes one that ends within a character.
#[test]
fn end_token_is_not_part_of_an_answer() {
    let model = Model::builtin(&Device::cpu()).unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let first_byte = tokenizer.encode("\u{1F600}", false).unwrap().into_iter();
    let byte = first_byte.map(|id| (id, tokenizer.token_bytes(id).unwrap_or_default().to_vec()));
    let (byte, _) = byte.into_iter().find(|(_, bytes)| bytes == &[0xf0]).expect("the vocabulary has a token per byte");
    let mut n_seen = 0;
    for (path, is_chat) in [("/v1/completions", false), ("/v1/chat/completions", true)] {
        for (seed, bias) in [(0, 80), (1, 80), (0, 82), (1, 82)] {
            // Either of the two at each step; the required biases depend on the model.
            let mut asked = json!({
                "model": "story", "max_tokens": 3, "seed": seed, "temperature": 2, "top_k": 2, "top_p": 1, "min_p": 0,
                "logit_bias": {byte.to_string(): 90, "2": bias},
            });
            match is_chat {
                true => (asked["messages"], asked["logprobs"]) = (messages(), true.into()),
                false => (asked["prompt"], asked["logprobs"]) = (PROMPT.into(), 0.into()),
            }
            let whole = done(shared(), path, asked.clone()).json();
            let choice = &whole["choices"][0];
            let n_told = match is_chat {
                true => choice["logprobs"]["content"].as_array().unwrap().len(),
                false => choice["logprobs"]["tokens"].as_array().unwrap().len(),
            };
            let n = whole["usage"]["completion_tokens"].as_u64().unwrap() as usize;
            let ends = choice["finish_reason"] == "stop";
            assert_eq!(n_told, n - usize::from(ends), "{path}: {whole}");
            n_seen += usize::from(ends && n > 1);
            asked["stream"] = true.into();
            let chunks = done(shared(), path, asked).events();
            let list = if is_chat { "/choices/0/logprobs/content" } else { "/choices/0/logprobs/tokens" };
            let told = chunks.iter().filter_map(|chunk| chunk.pointer(list)?.as_array());
            assert_eq!(told.map(Vec::len).sum::<usize>(), n_told, "{path}: {chunks:?}");
        }
    }
    assert!(n_seen > 0, "none ended within a character");
}

/// Unsupported features are omitted if the rest is possible, and the response reports that.
#[test]
fn unsupported_tool_types_are_ignored_with_a_notice() {
    let function = |flat: bool| match flat {
        true => json!({"type": "function", "name": "sun", "parameters": sun()["parameters"]}),
        false => json!({"type": "function", "function": sun()}),
    };
    for streams in [false, true] {
        let tools = json!([{"type": "web_search"}, function(true), {"type": "custom", "name": "x"}]);
        let asked =
            json!({"model": "story", "input": PROMPT, "tools": tools, "max_output_tokens": 4, "stream": streams});
        let answer = done(shared(), "/v1/responses", asked);
        let notices: Vec<&str> = answer
            .headers
            .iter()
            .filter(|(name, _)| name == "x-tilewright-notice")
            .map(|(_, value)| value.as_str())
            .collect();
        assert_eq!(notices.len(), 2, "{answer:?}");
        assert!(notices[0].starts_with("tools[0] ") && notices[1].starts_with("tools[2] "), "{notices:?}");
        if !streams {
            assert_eq!(answer.json()["tools"], json!([function(true)]));
        }
    }
    let tools = json!([function(false), {"type": "custom", "custom": {"name": "x"}}]);
    let asked = json!({"model": "story", "messages": messages(), "tools": tools, "max_tokens": 4});
    assert!(
        done(shared(), "/v1/chat/completions", asked).header("x-tilewright-notice").unwrap().starts_with("tools[1] ")
    );
    // Without a supported tool, the request is answered without tools.
    let asked = json!({"model": "story", "input": PROMPT, "max_output_tokens": 4, "tools": [{"type": "local_shell"}]});
    let answer = done(shared(), "/v1/responses", asked);
    assert!(answer.header("x-tilewright-notice").unwrap().starts_with("tools[0] "));
    assert_eq!(answer.json()["tools"], json!([]));
}

/// Calls without arguments in the form that clients return.
#[test]
fn missing_call_arguments_are_an_empty_object() {
    for arguments in ["", " ", "{}"] {
        let call = json!({"id": "c1", "type": "function", "function": {"name": "t", "arguments": arguments}});
        let messages = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
        ]);
        done(shared(), "/v1/chat/completions", json!({"model": "story", "messages": messages, "max_tokens": 1}));
        let input = json!([
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c1", "name": "t", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": "5"},
        ]);
        done(shared(), "/v1/responses", json!({"model": "story", "input": input, "max_output_tokens": 1}));
    }
}

fn sun() -> Json {
    json!({
        "name": "sun",
        "description": "Whether it shines.",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 7}, "place": {"enum": ["Rome", "Oslo"]}},
            "required": ["day", "place"],
            "additionalProperties": false,
        },
    })
}

fn is_call(arguments: &Json) -> bool {
    let fits = (1..=7).contains(&arguments["day"].as_i64().unwrap_or(0));
    fits && ["Rome", "Oslo"].contains(&arguments["place"].as_str().unwrap_or_default())
}

/// The server handles a conversation as the library does.
#[test]
fn chat_conversation_matches_the_library() {
    let model = Model::builtin(&Device::cpu()).unwrap();
    let chat = ChatModel::of(&model, ChatTemplate::known("chatml")).unwrap();
    let tools = json!([{"type": "function", "function": sun()}]);
    for choice in ["none", "auto", "required", "sun"] {
        let told =
            if choice == "sun" { json!({"type": "function", "function": {"name": choice}}) } else { json!(choice) };
        let asked = json!({
            "model": "story", "messages": messages(), "seed": 5, "max_tokens": 60, "reasoning_effort": "none",
            "tools": tools, "tool_choice": told, "parallel_tool_calls": false,
        });
        let whole = done(shared(), "/v1/chat/completions", asked).json();
        let request = ChatRequest {
            tools: tools.as_array().unwrap().clone(),
            tool_choice: choice.parse().unwrap(),
            parallel_calls: false,
            thinking: Some(false),
            options: GenerateOptions { max_tokens: 60, ..drawn(5) },
            ..ChatRequest::new(vec![Message::new("user", PROMPT)])
        };
        let answer = block_on(chat.answer(&mut model.session().unwrap(), &request)).unwrap();
        let message = &whole["choices"][0]["message"];
        assert_eq!(message["content"], json!(answer.text), "{choice}");
        let calls: Vec<&Json> = message["tool_calls"].as_array().into_iter().flatten().collect();
        assert_eq!(calls.len(), answer.calls.len(), "{choice}: {message}");
        for (call, own) in calls.into_iter().zip(&answer.calls) {
            let arguments = Json::Object(own.arguments.clone()).to_string();
            assert_eq!(call["function"], json!({"name": own.name, "arguments": arguments}));
        }
        let n_prompt = chat.prepare(&request).unwrap().ids.len();
        assert_eq!(whole["usage"]["prompt_tokens"], json!(n_prompt), "{choice}");
    }
}

#[test]
fn tool_calls_and_answers_follow_their_schemas() {
    let asked = json!({
        "model": "story", "messages": messages(), "seed": 3, "max_tokens": 200, "reasoning_effort": "none",
        "tools": [{"type": "function", "function": sun()}], "tool_choice": "required", "parallel_tool_calls": false,
    });
    let whole = done(shared(), "/v1/chat/completions", asked.clone()).json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], json!("tool_calls"), "{whole}");
    let call = &choice["message"]["tool_calls"][0];
    let arguments: Json = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(call["function"]["name"] == "sun" && is_call(&arguments), "{call}");
    let mut streamed = asked.clone();
    streamed["stream"] = true.into();
    let chunks = done(shared(), "/v1/chat/completions", streamed).events();
    let parts: Vec<&Json> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0)).collect();
    assert!(parts.iter().all(|part| part["index"] == 0) && parts[0]["function"]["name"] == "sun", "{chunks:?}");
    let arguments = parts.iter().filter_map(|part| part["function"]["arguments"].as_str());
    assert_eq!(arguments.collect::<String>(), call["function"]["arguments"]);

    // Cut off, also in a list of calls and before their arguments, no part of a call is text.
    for (n, parallel) in [(34, false), (34, true), (12, false), (16, true)] {
        let mut cut = asked.clone();
        (cut["max_tokens"], cut["parallel_tool_calls"]) = (n.into(), parallel.into());
        let choice = done(shared(), "/v1/chat/completions", cut).json()["choices"][0].clone();
        assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("length"), &json!("")));
        let function = &choice["message"]["tool_calls"][0]["function"];
        assert_eq!(function["name"], if n == 34 { json!("sun") } else { Json::Null }, "{choice}");
        let begins = function["arguments"].as_str().is_some_and(|text| text.starts_with("{\"day\":"));
        assert_eq!(begins, n == 34, "{choice}");
    }

    // The answer to the tool's result. Two calls in one conversation have distinct names.
    let mut conversation = messages();
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "It does."});
    conversation.as_array_mut().unwrap().extend([choice["message"].clone(), result]);
    let mut next = asked;
    next["messages"] = conversation;
    next["tool_choice"] = json!({"type": "function", "function": {"name": "sun"}});
    let next = done(shared(), "/v1/chat/completions", next).json();
    assert_ne!(next["choices"][0]["message"]["tool_calls"][0]["id"], call["id"]);

    for format in [
        json!({"type": "json_schema", "json_schema": {"name": "sun", "strict": true, "schema": sun()["parameters"]}}),
        json!({"type": "json_object", "schema": sun()["parameters"]}),
        json!({"type": "json_object", "schema": {}}),
        json!({"type": "json_object"}),
    ] {
        let asked =
            json!({"model": "story", "messages": messages(), "seed": 3, "max_tokens": 100, "response_format": format});
        let answer = done(shared(), "/v1/chat/completions", asked).json();
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        match format["type"] == "json_schema" || format["schema"]["type"] == "object" {
            true => assert!(is_call(&serde_json::from_str(text).unwrap()), "{text}"),
            false => assert!(text.starts_with('{'), "{text}"),
        }
    }
}

/// The built-in model with a chat template, added before all other keys.
pub fn with_template(template: &str) -> Vec<u8> {
    const KEY: &str = "tokenizer.chat_template";
    const BEFORE_KEYS: usize = 24;
    // Pads with a comment, so that tensors stay aligned.
    let size = 8 + KEY.len() + 4 + 8 + "{##}".len() + template.len();
    let template = format!("{{#{}#}}{template}", " ".repeat(size.next_multiple_of(32) - size));
    let file = std::fs::read(crate::common::repository().join("assets/stories.gguf")).unwrap();
    let (head, rest) = file.split_at(BEFORE_KEYS);
    let n_keys = u64::from_le_bytes(head[16..].try_into().unwrap()) + 1;
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let key = [text(KEY), 8u32.to_le_bytes().to_vec(), text(&template)].concat();
    [&head[..16], &n_keys.to_le_bytes(), &key, rest].concat()
}

/// A model's file, loaded.
pub fn load_file(path: &Path) -> Result<Loaded, Error> {
    let model = Model::load(&Device::cpu(), path, LoadOptions::default())?;
    Ok(Loaded::Decoder(Arc::new(Decoder::new(&model, &EngineOptions::default(), None)?)))
}

/// Reasoning opened by the prompt and never closed: all tokens count as reasoning.
#[test]
fn thinking_tokens_are_counted_in_the_usage() {
    let path = std::env::temp_dir().join(format!("tilewright-thinks-{}.gguf", std::process::id()));
    std::fs::write(&path, with_template("{{ messages[0].content }}<think>")).unwrap();
    let file = path.clone();
    let thinker = ModelSpec::new("thinker", 1 << 20, move || load_file(&file));
    let server = start(vec![thinker], ServerOptions::default());
    let asked = json!({"model": "thinker", "messages": messages(), "max_tokens": 12, "logit_bias": {"2": -100}});
    let whole = done(server.address, "/v1/chat/completions", asked).json();
    let details = &whole["usage"]["completion_tokens_details"];
    assert_eq!((&whole["usage"]["completion_tokens"], &details["reasoning_tokens"]), (&json!(12), &json!(12)));
    assert!(!whole["choices"][0]["message"]["reasoning_content"].as_str().unwrap().is_empty(), "{whole}");
    let asked = json!({"model": "thinker", "input": PROMPT, "max_output_tokens": 9, "temperature": 0});
    let whole = done(server.address, "/v1/responses", asked).json();
    let usage = &whole["usage"];
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], usage["output_tokens"], "{usage}");
    drop(server);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn responses_endpoint_is_equal_whole_and_streamed() {
    let asked = json!({
        "model": "story", "instructions": "Tell a story.", "input": [{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}],
        "max_output_tokens": 12, "temperature": 0,
    });
    let whole = done(shared(), "/v1/responses", asked.clone()).json();
    assert_eq!(whole["top_p"], json!(0.95));
    assert_eq!(
        (&whole["status"], &whole["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let text = &whole["output"][0]["content"][0]["text"];
    assert!(!text.as_str().unwrap().is_empty());
    let events = events_of(asked);
    assert_eq!(events[0]["type"], json!("response.created"));
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    assert_eq!(json!(deltas.map(|event| event["delta"].as_str().unwrap()).collect::<String>()), *text);
    let last = &events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["output"][0]["content"]),
        (&json!("response.incomplete"), &whole["output"][0]["content"])
    );
    // The second one finds the prompt in the prefix cache.
    for field in ["input_tokens", "output_tokens", "total_tokens"] {
        assert_eq!(last["response"]["usage"][field], whole["usage"][field], "{field}");
    }

    let mut tool = sun();
    tool["type"] = "function".into();
    let asked = json!({"model": "story", "input": PROMPT, "tools": [tool], "tool_choice": "required", "reasoning": {"effort": "none"}, "parallel_tool_calls": false});
    let called = done(shared(), "/v1/responses", asked.clone()).json();
    let call = &called["output"][0];
    assert_eq!(
        (&called["status"], &call["type"], &call["name"]),
        (&json!("completed"), &json!("function_call"), &json!("sun"))
    );
    assert!(is_call(&serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap()));
    let events = events_of(asked);
    assert!(events.iter().any(|event| event["type"] == "response.function_call_arguments.done"));
    let done_items: Vec<&Json> = events.iter().filter(|event| event["type"] == "response.output_item.done").collect();
    assert_eq!(
        json!(done_items.iter().map(|event| &event["item"]).collect::<Vec<_>>()),
        events.last().unwrap()["response"]["output"]
    );
    // A call and its result as the next input.
    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "It does."});
    let input = json!([{"role": "user", "content": PROMPT}, call, output]);
    let schema = json!({"format": {"type": "json_schema", "name": "sun", "schema": sun()["parameters"]}});
    let next = done(shared(), "/v1/responses", json!({"model": "story", "input": input, "text": schema})).json();
    assert!(
        is_call(&serde_json::from_str(next["output"][0]["content"][0]["text"].as_str().unwrap()).unwrap()),
        "{next}"
    );
}

/// Events of a response, each with its name and number.
fn events_of(mut asked: Json) -> Vec<Json> {
    asked["stream"] = true.into();
    let answer = done(shared(), "/v1/responses", asked);
    let text = answer.text();
    let events = text.split("\n\n").filter(|event| !event.is_empty()).enumerate().map(|(at, event)| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Json = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: ").unwrap(), data["type"]);
        assert_eq!(data["sequence_number"], json!(at));
        data
    });
    events.collect()
}

#[test]
fn embeddings_and_rerank_scores_match_the_encoders() {
    let texts = ["A dragon.", "The sun shines in Rome.", "Two knights rode out."];
    let want = block_on(embedder().unwrap().embed(&texts)).unwrap();
    let answer = done(shared(), "/v1/embeddings", json!({"model": "nomic", "input": texts})).json();
    let floats = |list: &Json| list.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect::<Vec<_>>();
    let got: Vec<f32> = answer["data"].as_array().unwrap().iter().flat_map(|one| floats(&one["embedding"])).collect();
    assert_eq!(got, want);
    let encoder = embedder().unwrap();
    let n: usize = texts.iter().map(|text| encoder.encode(text).unwrap().ids.len()).sum();
    assert_eq!(answer["usage"], json!({"prompt_tokens": n, "total_tokens": n}));
    let coded =
        done(shared(), "/v1/embeddings", json!({"model": "nomic", "input": texts[0], "encoding_format": "base64"}))
            .json();
    let bytes = base64::prelude::BASE64_STANDARD.decode(coded["data"][0]["embedding"].as_str().unwrap()).unwrap();
    let first: Vec<f32> = bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(first, want[..encoder.dims() as usize]);
    let ollama = done(shared(), "/api/embed", json!({"model": "nomic:latest", "input": texts})).json();
    let got: Vec<f32> = ollama["embeddings"].as_array().unwrap().iter().flat_map(&floats).collect();
    assert_eq!(got, want);

    // More than one batch.
    let documents: Vec<String> = (0..70).map(|at| format!("{} {at}", texts[at % 3])).collect();
    let want = block_on(reranker().unwrap().rank("Where does the sun shine?", &documents)).unwrap();
    let mut asked = json!({"model": "bert", "query": "Where does the sun shine?", "documents": documents, "top_n": 5, "return_documents": true});
    let answer = done(shared(), "/v1/rerank", asked.clone()).json();
    // As Cohere's clients and `vllm bench serve` ask.
    asked["truncate_prompt_tokens"] = json!(-1);
    assert_eq!(done(shared(), "/v2/rerank", asked).json()["results"], answer["results"]);
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 5);
    for (got, want) in results.iter().zip(want) {
        assert_eq!(
            (got["index"].as_u64().unwrap() as usize, got["relevance_score"].as_f64().unwrap() as f32),
            (want.index, want.score)
        );
        assert_eq!(got["document"]["text"], json!(documents[want.index]));
    }
}

#[test]
fn ollama_endpoints_match_the_model() {
    let options = json!({"temperature": 0, "num_predict": 12, "num_ctx": 256});
    let (text, _) = told(true, &GenerateOptions::greedy(12));
    let chat = json!({"model": "story", "messages": messages(), "options": options});
    let lines = done(shared(), "/api/chat", chat.clone()).lines();
    assert_eq!(lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect::<String>(), text);
    let last = lines.last().unwrap();
    assert_eq!(
        (&last["done"], &last["done_reason"], &last["eval_count"]),
        (&json!(true), &json!("length"), &json!(12))
    );
    assert!(
        lines.iter().rev().skip(1).all(|line| line["done"] == false) && last["total_duration"].as_u64().unwrap() > 0
    );
    let mut whole = chat;
    whole["stream"] = false.into();
    assert_eq!(done(shared(), "/api/chat", whole.clone()).json()["message"]["content"], json!(text));
    whole["tools"] = json!([{"type": "function", "function": sun()}]);
    whole["format"] = sun()["parameters"].clone();
    whole["options"] = json!({"seed": 1});
    let formed = done(shared(), "/api/chat", whole).json();
    assert!(is_call(&serde_json::from_str(formed["message"]["content"].as_str().unwrap()).unwrap()));

    let generate = json!({"model": "story", "prompt": PROMPT, "options": options, "stream": false});
    assert_eq!(done(shared(), "/api/generate", generate.clone()).json()["response"], json!(text));
    let mut raw = generate;
    raw["raw"] = true.into();
    assert_eq!(
        done(shared(), "/api/generate", raw).json()["response"],
        json!(told(false, &GenerateOptions::greedy(12)).0)
    );

    let tags = get(shared(), "/api/tags").json();
    let names: Vec<&Json> = tags["models"].as_array().unwrap().iter().map(|model| &model["name"]).collect();
    assert_eq!(json!(names), json!(["story", "plain", "nomic", "bert"]));
    // As editors probe for a server and its models: they require a version, a context length under the architecture's
    // name, and tools.
    for method in ["GET", "HEAD"] {
        let root = send(shared(), method, "/", &[], b"");
        let text = if method == "GET" { "Ollama is running" } else { "" };
        assert_eq!((root.status, root.text().as_str()), (200, text));
    }
    let browser = send(shared(), "GET", "/", &[("accept", "text/html,*/*")], b"");
    assert!(browser.text().starts_with("tilewright is running"), "{}", browser.text());
    let misplaced = post(shared(), "/api/generate", &json!({"model": "plain", "prompt": "A", "num_predict": 1}));
    assert!(misplaced.text().contains("did you mean `options.num_predict`?"), "{}", misplaced.text());
    let version = get(shared(), "/api/version").json()["version"].as_str().unwrap().to_owned();
    let numbers: Vec<u32> = version.split('.').map(|number| number.parse().unwrap()).collect();
    assert!(numbers.as_slice() >= [0, 6, 4].as_slice() && numbers.len() == 3, "{version}");
    let shown = done(shared(), "/api/show", json!({"model": "nomic"})).json();
    assert_eq!(shown["capabilities"], json!(["embedding"]));
    let architecture = shown["model_info"]["general.architecture"].as_str().unwrap();
    let length = format!("{architecture}.embedding_length");
    assert_eq!(shown["model_info"][length], json!(embedder().unwrap().dims()), "{shown}");
    let shown = done(shared(), "/api/show", json!({"model": "story:latest"})).json();
    let info = &shown["model_info"];
    assert_eq!(
        (&info["general.architecture"], &info["llama.context_length"]),
        (&json!("llama"), &json!(512)),
        "{shown}"
    );
    assert_eq!((&shown["details"]["family"], &shown["details"]["format"]), (&json!("llama"), &json!("gguf")));
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
    let told = &tags["models"][0];
    assert_eq!((told["digest"].as_str().unwrap().len(), &told["details"]["family"]), (64, &json!("llama")));
    // Texts that are not truncated, and one that would be.
    let embed = |text: &str, truncate: bool| {
        post(shared(), "/api/embed", &json!({"model": "nomic", "input": text, "truncate": truncate}))
    };
    assert_eq!((embed("short", false).status, embed("short", true).status), (200, 200));
    let long = "a word ".repeat(embedder().unwrap().max_tokens() as usize);
    let refused = embed(&long, false);
    assert_eq!((refused.status, embed(&long, true).status), (400, 200));
    assert!(refused.json()["error"].as_str().unwrap().contains("input[0]"));
    assert_eq!(get(shared(), "/api/ps").json()["models"].as_array().unwrap().len(), 4);
    let missing = post(shared(), "/api/chat", &json!({"model": "none", "messages": messages()}));
    assert_eq!((missing.status, missing.json()["error"].is_string()), (404, true));
}

#[test]
pub fn models_are_loaded_and_unloaded() {
    let loads: Arc<[AtomicUsize; 2]> = Arc::default();
    let spec = |at: usize, name: &str| {
        let loads = loads.clone();
        ModelSpec::new(name, 1, move || {
            loads[at].fetch_add(1, Ordering::Relaxed);
            load_story(&EngineOptions { max_sequences: 1, ..EngineOptions::default() }, None)
        })
    };
    let loaded = || [0, 1].map(|at| loads[at].load(Ordering::Relaxed));
    let keep = KeepOptions { max_loaded: Some(1), idle: None, lazy: true };
    let server = start(vec![spec(0, "a"), spec(1, "b")], ServerOptions { keep, ..ServerOptions::default() });
    assert_eq!(loaded(), [0, 0]);
    let ask =
        |model: &str| done(server.address, "/v1/completions", json!({"model": model, "prompt": "A", "max_tokens": 1}));
    let status = |model: &str| get(server.address, &format!("/v1/models/{model}")).json()["status"].clone();
    ask("a");
    ask("a");
    assert_eq!((loaded(), status("a"), status("b")), ([1, 0], json!("loaded"), json!("unloaded")));
    ask("b");
    assert_eq!((loaded(), status("a"), status("b")), ([1, 1], json!("unloaded"), json!("loaded")));
    assert_eq!(post(server.address, "/v1/models/b/unload", &json!({})).json()["status"], json!("unloaded"));
    assert_eq!(post(server.address, "/v1/models/a/load", &json!({})).json()["status"], json!("loaded"));
    assert_eq!(loaded(), [2, 1]);
    // As Ollama's clients request it: unload after this request, and at once.
    done(
        server.address,
        "/api/generate",
        json!({"model": "a", "prompt": "A", "keep_alive": 0, "options": {"num_predict": 1}}),
    );
    assert_eq!(status("a"), json!("unloaded"));
    assert_eq!(
        done(server.address, "/api/generate", json!({"model": "a", "keep_alive": "5m"})).json()["done_reason"],
        json!("load")
    );
    assert_eq!(
        done(server.address, "/api/generate", json!({"model": "a", "keep_alive": 0})).json()["done_reason"],
        json!("unload")
    );
    assert_eq!((loaded(), status("a")), ([3, 1], json!("unloaded")));
    // The next load forgets it.
    ask("a");
    assert_eq!(status("a"), json!("loaded"));
}

#[test]
fn idle_model_is_unloaded() {
    let server = own(|_, options| {
        options.keep = KeepOptions { idle: Some(Duration::from_millis(10)), ..KeepOptions::default() }
    });
    let n_loaded = || get(server.address, "/health").json()["loaded"].clone();
    for _ in 0..2 {
        while n_loaded() != 0 {
            std::thread::sleep(Duration::from_millis(50));
        }
        done(server.address, "/v1/completions", json!({"model": "story", "prompt": "A", "max_tokens": 1}));
    }
}

#[test]
fn metrics_and_openapi_document_cover_the_endpoints() {
    let server = own(|_, _| ());
    done(
        server.address,
        "/v1/completions",
        json!({"model": "story", "prompt": "A", "max_tokens": 5, "temperature": 0}),
    );
    post(server.address, "/v1/completions", &json!({}));
    get(server.address, "/nowhere");
    let answer = get(server.address, "/metrics");
    assert!(answer.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    let text = answer.text();
    for line in [
        r#"tilewright_http_requests_total{endpoint="/v1/completions",status="200"} 1"#,
        r#"tilewright_http_requests_total{endpoint="/v1/completions",status="400"} 1"#,
        r#"tilewright_http_requests_total{endpoint="other",status="404"} 1"#,
        r#"tilewright_tokens_total{model="story",kind="generated"} 5"#,
        r#"tilewright_time_to_first_token_seconds_count{model="story"} 1"#,
        r#"tilewright_time_between_tokens_seconds_count{model="story"} 4"#,
        r#"tilewright_engine_submitted_total{model="story"} 1"#,
        r#"tilewright_engine_generated_tokens_total{model="story"} 5"#,
        r#"tilewright_requests_queued{model="story"} 0"#,
        r#"tilewright_model_loaded{model="story"} 1"#,
        "# EOF",
    ] {
        assert!(text.lines().any(|own| own == line), "{line} in {text}");
    }
    let dispatches = "tilewright_device_dispatches_total{model=\"story\"} ";
    let dispatches = text.lines().find_map(|line| line.strip_prefix(dispatches)).unwrap();
    let busy =
        text.lines().find_map(|line| line.strip_prefix("tilewright_engine_busy_seconds_total{model=\"story\"} "));
    assert!(busy.unwrap().parse::<f64>().unwrap() > 0.0, "{text}");
    // Five passes over several layers.
    assert!(dispatches.parse::<u64>().unwrap() > 50, "{dispatches}");
    let weights =
        text.lines().find(|line| line.starts_with(r#"tilewright_memory_bytes{model="story",kind="weights"}"#)).unwrap();
    assert!(weights.rsplit(' ').next().unwrap().parse::<u64>().unwrap() > 1 << 20, "{weights}");

    let document = get(server.address, "/openapi.json").json();
    assert_eq!(document["openapi"], json!("3.1.0"));
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let path = path.replace("{name}", "story");
            let answer = super::client::send(
                server.address,
                &method.to_uppercase(),
                &path,
                &[("content-type", "application/json")],
                b"{}",
            );
            assert!(![404, 405].contains(&answer.status), "{method} {path}: {answer:?}");
        }
    }
}
