//! Errors of requests: status, code and the field at fault.

use serde_json::{Value as Json, json};

use super::client::{done, get, post, request, send};
use super::server::shared;

fn is_refused(path: &str, body: Json, status: u16, code: &str, param: Json, says: &str) {
    let answer = post(shared(), path, &body);
    let told = answer.json();
    let error = &told["error"];
    let short: String = body.to_string().chars().take(200).collect();
    assert_eq!(answer.status, status, "{path} {short}: {told}");
    assert_eq!((&error["code"], &error["param"]), (&json!(code), &param), "{path} {short}: {told}");
    assert!(error["message"].as_str().unwrap().contains(says), "{path} {short}: {told}");
    assert_eq!(answer.header("x-should-retry"), Some("false"));
}

/// A valid request with one field changed.
fn with(base: &Json, field: &str, value: Json) -> Json {
    let mut changed = base.clone();
    changed[field] = value;
    changed
}

#[test]
fn invalid_chat_fields_are_refused_by_name() {
    let base = json!({"model": "story", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    let long = "a story ".repeat(600);
    let tool = |function: Json| json!([{"type": "function", "function": function}]);
    let values: Vec<(&str, Json, Json, &str)> = vec![
        ("n", json!(1_000_000_000), json!("n"), "1 to 128"),
        ("n", json!(-1), json!("n"), "whole number"),
        ("n", json!(1.5), json!("n"), "1.5"),
        ("temperature", json!(-0.1), json!("temperature"), "from 0 to 2"),
        ("temperature", json!("hot"), json!("temperature"), "\"hot\""),
        ("top_p", json!(2), json!("top_p"), "from 0 to 1"),
        ("top_p", json!(0), json!("top_p"), "above 0"),
        ("top_k", json!(1u64 << 63), json!("top_k"), "whole number"),
        ("min_p", json!(-1), json!("min_p"), "from 0 to 1"),
        ("repeat_last_n", json!(-2), json!("repeat_last_n"), "a whole number from -1 to 4294967295"),
        ("repetition_penalty", json!(101), json!("repetition_penalty"), "from 0 to 100"),
        ("seed", json!(1.5), json!("seed"), "whole number"),
        ("seed", json!(1e30), json!("seed"), "2^63"),
        ("seed", json!("7"), json!("seed"), "whole number"),
        ("presence_penalty", json!(3), json!("presence_penalty"), "-2 to 2"),
        ("frequency_penalty", json!(1e300), json!("frequency_penalty"), "-2 to 2"),
        ("max_tokens", json!(-2), json!("max_tokens"), "whole number"),
        ("n_predict", json!(0.5), json!("n_predict"), "whole number"),
        ("min_tokens", json!(2), json!("min_tokens"), "at most max_tokens, 1"),
        ("stop_token_ids", json!([1, "a"]), json!("stop_token_ids"), "token ids"),
        ("prompt_logprobs", json!(-1), json!("prompt_logprobs"), "from 0 to 20"),
        ("structured_outputs", json!({"regex": 5}), json!("structured_outputs.regex"), "a text"),
        ("structured_outputs", json!({"choice": []}), json!("structured_outputs.choice"), "one text or more"),
        ("guided_json", json!("{"), json!("guided_json"), "a JSON schema"),
        ("chat_template_kwargs", json!("thinks"), json!("chat_template_kwargs"), "template variables"),
        ("continue_final_message", json!(true), json!("continue_final_message"), "the assistant's"),
        ("max_completion_tokens", json!("many"), json!("max_completion_tokens"), "whole number"),
        ("stop", json!([""]), json!("stop"), "none of them empty"),
        ("stop", json!(vec!["x"; 100_000]), json!("stop"), "a list of 100000"),
        ("stop", json!(5), json!("stop"), "texts"),
        ("stop", json!(["x", "é".repeat(513)]), json!("stop"), "longer than 1024 bytes"),
        ("cache_salt", json!(5), json!("cache_salt"), "a text"),
        ("cache_salt", json!(""), json!("cache_salt"), "1 to 256 bytes"),
        ("cache_salt", json!("s".repeat(257)), json!("cache_salt"), "1 to 256 bytes"),
        ("logit_bias", json!({"01": 1}), json!("logit_bias"), "\"01\""),
        ("logit_bias", json!({"5": 101}), json!("logit_bias[\"5\"]"), "-100 to 100"),
        ("logit_bias", json!([1]), json!("logit_bias[0]"), "a token's id and a bias"),
        ("logit_bias", json!([[5, true]]), json!("logit_bias[0]"), "a token's id and a bias"),
        ("logit_bias", json!("5"), json!("logit_bias"), "a list of pairs"),
        (
            "logit_bias",
            (0..100_000).map(|id| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into(),
            json!("logit_bias"),
            "at most",
        ),
        ("logit_bias", json!({"999999": 1}), json!("logit_bias"), "token ids below"),
        ("stream", json!("yes"), json!("stream"), "true or false"),
        ("stream_options", json!(1), json!("stream_options"), "an object"),
        ("stream_options", json!({"include_usage": 1}), json!("stream_options.include_usage"), "true or false"),
        ("top_logprobs", json!(3), json!("top_logprobs"), "unless logprobs is true"),
        ("response_format", json!({"type": "json_object", "schema": 5}), json!("response_format.schema"), "a schema"),
        ("messages", json!("Hi"), json!("messages"), "a list"),
        ("messages", json!([]), json!("messages"), "one message or more"),
        ("messages", json!([5]), json!("messages[0]"), "an object with a role"),
        ("messages", json!([{"content": "x"}]), json!("messages[0].role"), "missing"),
        ("messages", json!([{"role": "user", "content": 5}]), json!("messages[0].content"), "a text"),
        ("messages", json!([{"role": "assistant", "tool_calls": [{}]}]), json!("messages[0].tool_calls[0]"), "a call"),
        (
            "messages",
            json!([{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]),
            json!("messages[0].tool_calls[0].function.arguments"),
            "JSON",
        ),
        ("tools", json!({}), json!("tools"), "a list of tools"),
        ("tools", tool(json!({"description": "x"})), json!("tools[0].function.name"), "missing"),
        ("tool_choice", json!("always"), json!("tool_choice"), "\"auto\""),
        ("tool_choice", json!("required"), json!("tool_choice"), "no tools"),
        ("parallel_tool_calls", json!(1), json!("parallel_tool_calls"), "true or false"),
        ("reasoning_effort", json!("huge"), json!("reasoning_effort"), "minimal"),
        ("response_format", json!({"type": "yaml"}), json!("response_format"), "json_schema"),
        ("response_format", json!({"type": "json_schema"}), json!("response_format.json_schema.schema"), "a schema"),
        ("model", json!(5), json!("model"), "a text"),
        ("model", Json::Null, json!("model"), "one of `story`, `plain`"),
    ];
    for (field, value, param, says) in values {
        is_refused("/v1/chat/completions", with(&base, field, value), 400, "invalid_value", param, says);
    }
    let unsupported = [
        ("audio", json!({}), json!("audio")),
        ("store", json!(true), json!("store")),
        ("typical_p", json!(0.5), json!("typical_p")),
        ("use_beam_search", json!(true), json!("use_beam_search")),
        ("structured_outputs", json!({"structural_tag": "{}"}), json!("structured_outputs.structural_tag")),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AA=="}]}]),
            json!("messages[0].content[0]"),
        ),
        ("stream_options", json!({"include_obfuscation": true}), json!("stream_options.include_obfuscation")),
    ];
    for (field, value, param) in unsupported {
        is_refused("/v1/chat/completions", with(&base, field, value), 400, "unsupported_value", param, "support");
    }
    for streams in [false, true] {
        let base = with(&base, "stream", streams.into());
        let refused = |field, value, status, code, param: Json, says| {
            is_refused("/v1/chat/completions", with(&base, field, value), status, code, param, says);
        };
        refused("model", json!("none"), 404, "model_not_found", json!("model"), "\"none\"; this server has `story`, ");
        refused("model", json!("../../etc/passwd"), 404, "model_not_found", json!("model"), "no model");
        refused("model", json!("plain"), 400, "template", Json::Null, "no chat template");
        refused("model", json!("nomic"), 400, "invalid_value", json!("model"), "cannot generate text");
        // More than the context, reporting both numbers; also as a single word.
        refused(
            "messages",
            json!([{"role": "user", "content": long}]),
            400,
            "context_length_exceeded",
            Json::Null,
            "holds 512",
        );
        let word = json!([{"role": "user", "content": "a".repeat(1 << 16)}]);
        refused("messages", word, 400, "context_length_exceeded", Json::Null, "holds 512");
        let schema = json!({"type": "json_schema", "json_schema": {"schema": {"not": {}}}});
        refused("response_format", schema, 400, "constraint", json!("response_format"), "response_format is unusable");
        let choice = json!({"type": "function", "function": {"name": "moon"}});
        let tools = with(&base, "tools", tool(json!({"name": "sun"})));
        let param = json!("tool_choice");
        is_refused("/v1/chat/completions", with(&tools, "tool_choice", choice), 400, "invalid_value", param, "moon");
        let odd = tool(json!({"name": "sun", "parameters": {"type": "odd"}}));
        refused("tools", odd, 400, "constraint", json!("tools"), "tools: `sun`: ");
        let wrong = tool(json!({"name": "sun", "parameters": {"properties": {"x": {"type": "strin"}}}}));
        refused("tools", wrong, 400, "constraint", json!("tools"), "tools: `sun`: parameters");
    }
}

/// Under each API's names.
#[test]
fn unusable_constraints_are_refused_by_their_fields() {
    let odd = json!({"type": "odd"});
    let format = json!({"type": "json_schema", "schema": odd, "name": "a"});
    let chat = json!({"model": "story", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    let prompt = json!({"model": "plain", "prompt": "A", "max_tokens": 1});
    let cases = [
        ("response_format", json!({"type": "json_object", "schema": odd}), "response_format is unusable"),
        ("structured_outputs", json!({"regex": "("}), "structured_outputs.regex is unusable"),
        ("structured_outputs", json!({"grammar": "root ::= \"a"}), "structured_outputs.grammar: line 1 is"),
        ("guided_json", odd.clone(), "guided_json is unusable"),
        ("guided_regex", json!("("), "guided_regex is unusable"),
        ("guided_grammar", json!("start: ("), "guided_grammar is unusable"),
        ("regex", json!("("), "regex is unusable"),
        ("ebnf", json!("root ::= x"), "ebnf: line 1 is `x`"),
        ("json_schema", odd.clone(), "json_schema is unusable"),
        ("grammar", json!("root ::= \"a"), "grammar: line 1 is"),
    ];
    for (field, value, says) in cases {
        let param = json!(says.split([':', ' ']).next());
        for (path, base) in [("/v1/chat/completions", &chat), ("/v1/completions", &prompt)] {
            is_refused(path, with(base, field, value.clone()), 400, "constraint", param.clone(), says);
        }
    }
    let input = json!({"model": "story", "input": "Hi", "max_output_tokens": 1, "text": {"format": format}});
    is_refused("/v1/responses", input, 400, "constraint", json!("text.format"), "text.format is unusable");
    let of_llama = json!({"model": "plain", "prompt": "A", "n_predict": 1, "grammar": "root ::= x"});
    let of_anthropic = with(&chat, "output_config", json!({"format": format}));
    let of_ollama = json!({"model": "story", "prompt": "A", "format": odd});
    for (path, body, says) in [
        ("/completion", of_llama, "grammar: line 1 is `x`, expected a defined rule"),
        ("/v1/messages", of_anthropic, "output_config.format is unusable"),
        ("/api/generate", of_ollama, "format is unusable"),
    ] {
        let answer = post(shared(), path, &body);
        let told = answer.text();
        assert!(answer.status == 400 && told.contains(says), "{path}: {} {told}", answer.status);
        assert!(!told.contains("constraint: "), "{path}: {told}");
    }
}

/// Each field in OpenAI's and Ollama's specifications, with its no-op value: the response does not change.
#[test]
fn fields_with_neutral_values_change_nothing() {
    let (format, tools) = (json!({"type": "text"}), json!([]));
    let of_both = [
        ("frequency_penalty", json!(0)),
        ("logit_bias", json!({})),
        ("max_completion_tokens", json!(2)),
        ("metadata", json!({"a": "b"})),
        ("modalities", json!(["text"])),
        ("n", json!(1.0)),
        ("presence_penalty", json!(0.0)),
        ("prompt_cache_key", json!("a")),
        ("safety_identifier", json!("a")),
        ("service_tier", json!("auto")),
        ("service_tier", json!("default")),
        ("stop", json!([])),
        ("store", json!(false)),
        ("stream", json!(false)),
        ("stream_options", json!({"include_usage": false, "include_obfuscation": false})),
        ("user", json!("a")),
        ("cache_prompt", json!(true)),
        ("dry_multiplier", json!(0.0)),
        ("dynatemp_range", json!(0)),
        ("guided_grammar", Json::Null),
        ("ignore_eos", json!(true)),
        ("include_stop_str_in_output", json!(false)),
        ("length_penalty", json!(1.0)),
        ("logit_bias", json!([])),
        ("max_tokens", json!(-1)),
        ("min_tokens", json!(2)),
        ("mirostat", json!(0)),
        ("priority", json!(-7)),
        ("repetition_penalty", json!(1.0)),
        ("return_token_ids", json!(true)),
        ("seed", json!(-1)),
        ("skip_special_tokens", json!(true)),
        ("stop_token_ids", json!([])),
        ("stream_options", json!({"include_usage": true, "continuous_usage_stats": true})),
        ("structured_outputs", json!({})),
        ("tfs_z", json!(1)),
        ("timings_per_token", json!(true)),
        ("top_k", json!(-1)),
        ("top_n_sigma", json!(-1)),
        ("typical_p", json!(1.0)),
        ("use_beam_search", json!(false)),
        ("xtc_probability", json!(0)),
    ];
    let of_chat = [
        ("add_generation_prompt", json!(true)),
        ("chat_template_kwargs", json!({"enable_thinking": false})),
        ("continue_final_message", json!(false)),
        ("audio", Json::Null),
        ("best_of", json!(1)),
        ("function_call", json!("auto")),
        ("functions", json!([])),
        ("logprobs", json!(false)),
        ("parallel_tool_calls", json!(true)),
        ("prediction", Json::Null),
        ("prompt_cache_retention", json!("in_memory")),
        ("response_format", format.clone()),
        ("tool_choice", json!("none")),
        ("tool_choice", json!("auto")),
        ("tools", tools.clone()),
        ("top_logprobs", json!(0)),
        ("verbosity", json!("medium")),
        ("web_search_options", Json::Null),
    ];
    let of_text = [("best_of", json!(1)), ("echo", json!(false)), ("suffix", json!("")), ("suffix", Json::Null)];
    let of_responses = [
        ("background", json!(false)),
        ("context_management", json!([])),
        ("conversation", Json::Null),
        ("include", json!([])),
        ("max_tool_calls", json!(5)),
        ("metadata", json!({})),
        ("parallel_tool_calls", json!(true)),
        ("previous_response_id", Json::Null),
        ("prompt", Json::Null),
        ("prompt_cache_key", json!("a")),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("safety_identifier", json!("a")),
        ("service_tier", json!("auto")),
        ("store", json!(false)),
        ("stream_options", json!({"include_obfuscation": false})),
        ("text", json!({"format": format, "verbosity": "medium"})),
        ("tool_choice", json!("auto")),
        ("tools", tools.clone()),
        ("top_logprobs", json!(0)),
        ("truncation", json!("disabled")),
        ("truncation", json!("auto")),
        ("user", json!("a")),
    ];
    let options = [
        ("frequency_penalty", json!(0)),
        ("mirostat", json!(0)),
        ("mirostat_eta", json!(0.1)),
        ("mirostat_tau", json!(5.0)),
        ("num_ctx", json!(4096)),
        ("num_keep", json!(4)),
        ("numa", json!(false)),
        ("penalize_newline", json!(true)),
        ("presence_penalty", json!(0)),
        ("stop", json!([])),
        ("tfs_z", json!(1.0)),
        ("typical_p", json!(1.0)),
        ("vocab_only", json!(false)),
    ];
    let of_ollama = [
        ("context", json!([])),
        ("format", json!("")),
        ("images", json!([])),
        ("keep_alive", json!("5m")),
        ("logprobs", json!(false)),
        ("shift", json!(true)),
        ("suffix", json!("")),
        ("system", json!("")),
        ("template", json!("")),
        ("think", json!(false)),
        ("think", Json::Null),
        ("top_logprobs", json!(0)),
        ("truncate", json!(true)),
        ("truncate", json!(false)),
    ];
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let text = |answer: &Json| {
        let texts = ["/choices/0/message/content", "/choices/0/text", "/output/0/content/0/text", "/response"];
        texts.iter().find_map(|at| answer.pointer(at)).unwrap_or_else(|| panic!("{answer}")).clone()
    };
    let alike = |path: &str, base: &Json, fields: Vec<(&str, Json)>| {
        let alone = text(&done(shared(), path, base.clone()).json());
        for (field, value) in fields {
            let answer = post(shared(), path, &with(base, field, value.clone()));
            assert_eq!(answer.status, 200, "{path} {field}: {value}: {}", answer.text());
            assert_eq!(text(&answer.json()), alone, "{path} {field}: {value}");
        }
    };
    let chat = json!({"model": "story", "messages": messages, "max_completion_tokens": 2, "temperature": 0});
    alike("/v1/chat/completions", &chat, of_both.iter().chain(&of_chat).cloned().collect());
    let prompt = json!({"model": "story", "prompt": "Hi", "max_completion_tokens": 2, "temperature": 0});
    alike("/v1/completions", &prompt, of_both.iter().chain(&of_text).cloned().collect());
    let input = json!({"model": "story", "input": "Hi", "max_output_tokens": 2, "temperature": 0});
    alike("/v1/responses", &input, of_responses.to_vec());
    let generate =
        json!({"model": "story", "prompt": "Hi", "stream": false, "options": {"num_predict": 2, "temperature": 0}});
    alike("/api/generate", &generate, of_ollama.to_vec());
    let with_options = options.map(|(option, value)| ("options", with(&generate["options"], option, value)));
    alike("/api/generate", &generate, with_options.to_vec());
    // Values that are not no-ops.
    for (path, base, field, value) in [
        ("/v1/completions", &prompt, "best_of", json!(2)),
        ("/v1/completions", &prompt, "suffix", json!("x")),
        ("/v1/chat/completions", &chat, "modalities", json!(["text", "audio"])),
        ("/v1/chat/completions", &chat, "verbosity", json!("low")),
        ("/v1/chat/completions", &chat, "functions", json!([{"name": "f"}])),
    ] {
        is_refused(path, with(base, field, value), 400, "unsupported_value", json!(field), field);
    }
}

#[test]
fn invalid_fields_of_other_endpoints_are_refused() {
    let text = json!({"model": "plain", "prompt": "A", "max_tokens": 1});
    let values = [
        ("prompt", json!([]), "prompt"),
        ("prompt", json!([1, -1]), "prompt"),
        ("prompt", json!([["a"], 5]), "prompt"),
        ("prompt", json!(vec!["A"; 129]), "prompt"),
        ("logprobs", json!(21), "logprobs"),
        ("echo", json!("yes"), "echo"),
    ];
    for (field, value, param) in values {
        is_refused("/v1/completions", with(&text, field, value), 400, "invalid_value", json!(param), "expected");
    }
    is_refused(
        "/v1/completions",
        with(&text, "prompt", json!([4_000_000])),
        400,
        "invalid_value",
        json!("prompt"),
        "prompt is the id 4000000",
    );
    is_refused(
        "/v1/completions",
        with(&text, "suffix", json!("x")),
        400,
        "unsupported_value",
        json!("suffix"),
        "suffix",
    );

    let input = json!({"model": "story", "input": "Hi", "max_output_tokens": 1});
    for (field, value, param) in [
        ("input", json!([{"type": "image"}]), "input[0].type"),
        ("input", json!(5), "input"),
        ("include", json!(["everything"]), "include"),
        ("reasoning", json!({"effort": "huge"}), "reasoning.effort"),
        ("text", json!({"format": {"type": "yaml"}}), "text.format"),
        ("tool_choice", json!("always"), "tool_choice"),
    ] {
        is_refused("/v1/responses", with(&input, field, value), 400, "invalid_value", json!(param), "expected");
    }
    is_refused(
        "/v1/responses",
        with(&input, "previous_response_id", json!("x")),
        404,
        "previous_response_not_found",
        json!("previous_response_id"),
        "\"x\"",
    );

    let texts = json!({"model": "nomic", "input": "A"});
    for (field, value, code) in [
        ("input", json!([]), "invalid_value"),
        ("input", json!(["a", Json::Null]), "invalid_value"),
        ("input", json!(vec!["a"; 2049]), "invalid_value"),
        ("input", json!([1, "a"]), "invalid_value"),
        ("dimensions", json!(5000), "invalid_value"),
        ("encoding_format", json!("text"), "invalid_value"),
    ] {
        is_refused("/v1/embeddings", with(&texts, field, value), 400, code, json!(field), field);
    }
    is_refused(
        "/v1/embeddings",
        with(&texts, "model", json!("story")),
        400,
        "invalid_value",
        json!("model"),
        "cannot compute embeddings",
    );
    let documents = json!({"model": "bert", "query": "q", "documents": ["a"]});
    for (field, value) in
        [("documents", json!([])), ("documents", json!([5])), ("query", json!(1)), ("top_n", json!(0))]
    {
        is_refused("/v1/rerank", with(&documents, field, value), 400, "invalid_value", json!(field), "expected");
    }
    is_refused(
        "/v1/rerank",
        with(&documents, "model", json!("nomic")),
        400,
        "invalid_value",
        json!("model"),
        "cannot score documents",
    );

    // In Ollama's format.
    let chat =
        json!({"model": "story", "messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 1}});
    for (field, value) in [
        ("options", json!({"temperature": "hot"})),
        ("options", json!({"typical_p": 0.5})),
        ("format", json!("yaml")),
        ("keep_alive", json!("soon")),
        ("think", json!("much")),
        ("messages", json!([{"role": "user", "content": "x", "images": ["aGk="]}])),
        ("template", json!("x")),
    ] {
        let answer = post(shared(), "/api/chat", &with(&chat, field, value));
        let told = answer.json();
        assert_eq!((answer.status, told.as_object().unwrap().len()), (400, 1), "{field}: {told}");
        assert!(told["error"].as_str().unwrap().contains(field), "{field}: {told}");
    }
}

#[test]
fn malformed_requests_are_refused() {
    let json_type = [("content-type", "application/json")];
    let told = |method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]| {
        let answer = send(shared(), method, path, headers, body);
        (answer.status, answer.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
    };
    let refused = |status: u16, code: &str| (status, code.to_owned());
    let path = "/v1/chat/completions";
    let deep = [vec![b'['; 10_000], vec![b']'; 10_000]].concat();
    for body in
        [&b"{"[..], b"", b"not JSON", b"{\"model\": \"\xff\xfe\"}", b"{\"n\": NaN}", b"{\"temperature\": 1e999}", &deep]
    {
        assert_eq!(told("POST", path, &json_type, body), refused(400, "invalid_json"), "{:?}", body.get(..20));
    }
    for body in [&b"[]"[..], b"5", b"null"] {
        assert_eq!(told("POST", path, &json_type, body), refused(400, "invalid_value"));
    }
    assert_eq!(told("POST", path, &[("content-type", "text/plain")], b"{}"), refused(415, "unsupported_media_type"));
    let zipped = [json_type[0], ("content-encoding", "gzip")];
    assert_eq!(told("POST", path, &zipped, b"{}"), refused(415, "unsupported_media_type"));
    assert_eq!(told("GET", path, &[], b""), refused(405, "method_not_allowed"));
    assert_eq!(told("POST", "/v1/nothing", &json_type, b"{}"), refused(404, "unknown_url"));
    assert_eq!(told("GET", "/v1/models/none", &[], b""), refused(404, "model_not_found"));
    assert_eq!(told("POST", "/v1/models/story", &[], b""), refused(405, "method_not_allowed"));
    for path in ["/../Cargo.toml", "/%2e%2e/Cargo.toml", "//etc/passwd"] {
        assert_eq!(told("GET", path, &[], b""), refused(404, "unknown_url"), "{path}");
    }
    assert_eq!(get(shared(), "/v1/models").json()["data"].as_array().unwrap().len(), 4);
    // Two pipelined requests get two responses in order.
    let mut connection = super::client::Connection::open(shared());
    let both = [request("GET", "/health", &[], b""), request("GET", "/v1/models/nomic", &[], b"")].concat();
    connection.write(&both);
    assert_eq!(connection.answer().json()["status"], json!("ok"));
    assert_eq!(connection.answer().json()["id"], json!("nomic"));
}
