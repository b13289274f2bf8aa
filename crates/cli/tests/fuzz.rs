//! Random request bodies, and partial responses. `tests/fuzz` has the library's parsers.

#[path = "../../../tests/formats/builder.rs"]
#[allow(dead_code)] // tests of formats use all of it
mod builder;
#[path = "../../../tests/fuzz/mutate.rs"]
mod mutate;
#[path = "../../../tests/fuzz/target.rs"]
mod target;

use serde_json::{Value as Json, json};

use crate::serve::client::{Answer, Connection, done, get, request, send};
use crate::serve::server::shared;
use target::fuzz;

const JSON: (&str, &str) = ("content-type", "application/json");

/// Valid requests for every endpoint that accepts a body. Answers are short.
fn requests() -> Vec<(&'static str, Json)> {
    let message =
        json!([{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]);
    let tool =
        json!([{"type": "function", "function": {"name": "sun", "parameters": {"type": "object", "properties": {}}}}]);
    vec![
        (
            "/v1/chat/completions",
            json!({
                "model": "story", "messages": message, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "seed": 3, "n": 2,
                "stop": ["x"], "logprobs": true, "top_logprobs": 1, "logit_bias": {"5": 1}, "stream": false, "user": "u",
                "presence_penalty": 0.1, "frequency_penalty": 0.1, "stream_options": {"include_usage": true},
            }),
        ),
        (
            "/v1/chat/completions",
            json!({"model": "story", "messages": message, "max_tokens": 2, "tools": tool, "tool_choice": "auto"}),
        ),
        (
            "/v1/chat/completions",
            json!({
                "model": "story", "messages": message, "max_tokens": 2,
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
            }),
        ),
        (
            "/v1/completions",
            json!({"model": "plain", "prompt": ["A", "B"], "max_tokens": 2, "echo": true, "stream": true}),
        ),
        (
            "/v1/completions",
            json!({"model": "plain", "prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 2, "top_k": 4, "min_p": 0.1}),
        ),
        (
            "/v1/responses",
            json!({
                "model": "story", "input": message, "max_output_tokens": 2, "instructions": "i", "stream": true,
                "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "metadata": {"a": "b"},
            }),
        ),
        ("/v1/embeddings", json!({"model": "nomic", "input": ["a", "b"], "encoding_format": "base64"})),
        ("/v1/rerank", json!({"model": "bert", "query": "q", "documents": ["a", {"text": "b"}], "top_n": 1})),
        (
            "/api/generate",
            json!({"model": "story", "prompt": "A", "options": {"num_predict": 2, "seed": 1}, "stream": false}),
        ),
        (
            "/api/chat",
            json!({"model": "story", "messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 2}}),
        ),
        ("/api/embed", json!({"model": "nomic", "input": "a", "truncate": true})),
        ("/api/show", json!({"model": "story"})),
    ]
}

/// Keeps an answer short, however the request was changed.
fn bounded(body: &mut Json) {
    let most = |body: &mut Json, field: &str, most: u64| {
        if let Some(value) = body.get_mut(field).filter(|value| value.as_f64().is_some_and(|value| value > most as f64))
        {
            *value = most.into();
        }
    };
    if !body.is_object() {
        return;
    }
    for field in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
        most(body, field, 2);
    }
    most(body, "n", 3);
    if let Some(options) = body.get_mut("options") {
        most(options, "num_predict", 2);
    }
    // Without a token limit, generation continues to the end of the context.
    let limits = ["max_tokens", "max_completion_tokens", "max_output_tokens", "options"];
    if limits.iter().all(|field| body.get(field).is_none_or(Json::is_null)) {
        body["max_tokens"] = 2.into();
    }
}

fn is_in_order(path: &str, body: &[u8], answer: &Answer) {
    let shown = String::from_utf8_lossy(&body[..body.len().min(2000)]).into_owned();
    assert!([200, 400, 404, 413, 415, 429].contains(&answer.status), "{path} {shown}: {answer:?}");
    if answer.status != 200 {
        let told = answer.json();
        let message = match path.starts_with("/api/") {
            true => &told["error"],
            false => &told["error"]["message"],
        };
        assert!(message.as_str().is_some_and(|message| (1..4000).contains(&message.len())), "{path} {shown}: {told}");
    }
}

#[test]
fn http_request_body() {
    let requests = requests();
    for (path, body) in &requests {
        done(shared(), path, body.clone());
    }
    fuzz("http_request_body", 400, |rng| {
        let (path, mut body) = requests[rng.below(requests.len())].clone();
        mutate::json(rng, &mut body);
        bounded(&mut body);
        let mut bytes = body.to_string().into_bytes();
        if rng.below(6) == 0 {
            let end = bytes.len();
            mutate::bytes(rng, &mut bytes, end);
            // Keeps the token limit.
            if let Ok(mut changed) = serde_json::from_slice::<Json>(&bytes) {
                bounded(&mut changed);
                bytes = changed.to_string().into_bytes();
            }
        }
        let answer = send(shared(), "POST", path, &[JSON], &bytes);
        is_in_order(path, &bytes, &answer);
        // Also changes the bytes around the body: the connection is answered or closed, and the next one is served.
        if rng.below(4) == 0 {
            let mut raw = request("POST", path, &[JSON], &bytes);
            let head = raw.windows(4).position(|window| window == b"\r\n\r\n").unwrap_or(raw.len());
            mutate::bytes(rng, &mut raw, head);
            raw.truncate(1 << 16);
            let mut connection = Connection::open(shared());
            connection.write(&raw);
            connection.end();
            if !connection.is_closed() {
                let status = connection.head().status;
                assert!((100..600).contains(&status) && status != 500, "{status}: {}", String::from_utf8_lossy(&raw));
            }
        }
        assert_eq!(get(shared(), "/health").status, 200);
        answer.status == 200
    });
}

/// For any text, the events of a stream add up to it: the prompt is echoed before the answer.
#[test]
fn sse_stream_split() {
    fuzz("sse_stream_split", 20, |rng| {
        let prompts: Vec<String> = (0..1 + rng.below(3)).map(|_| "A".to_owned() + &mutate::any_text(rng, 60)).collect();
        let n_tokens = rng.below(12);
        let asked = |streams: bool| {
            json!({
                "model": "plain", "prompt": prompts, "max_tokens": n_tokens, "echo": true, "seed": 7, "temperature": 1.5,
                "stream": streams, "stop": ["\n\n"],
            })
        };
        let answer = send(shared(), "POST", "/v1/completions", &[JSON], asked(false).to_string().as_bytes());
        if answer.status != 200 {
            // Too long for the model.
            assert_eq!(answer.json()["error"]["code"], json!("context_length_exceeded"));
            return false;
        }
        let whole = answer.json();
        let mut texts = vec![String::new(); prompts.len()];
        let mut reasons = vec![Json::Null; prompts.len()];
        for event in done(shared(), "/v1/completions", asked(true)).events() {
            for choice in event["choices"].as_array().unwrap() {
                let index = choice["index"].as_u64().unwrap() as usize;
                assert_eq!(reasons[index], Json::Null, "nothing follows an end");
                texts[index] += choice["text"].as_str().unwrap();
                reasons[index] = choice["finish_reason"].clone();
            }
        }
        for (index, (text, reason)) in texts.iter().zip(&reasons).enumerate() {
            let choice = &whole["choices"][index];
            assert_eq!((choice["text"].as_str(), &choice["finish_reason"]), (Some(text.as_str()), reason));
            assert!(text.starts_with(&prompts[index]), "{:?} became {text:?}", prompts[index]);
        }
        true
    });
}
