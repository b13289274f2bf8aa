//! Streams: start, silence and end.

use std::time::Duration;

use serde_json::json;
use tilewright_serve::Limits;

use super::client::{Connection, done, request};
use super::server::own;

const JSON: (&str, &str) = ("content-type", "application/json");

#[test]
fn waiting_stream_sends_keep_alive_events() {
    let server = own(|engine, options| {
        (engine.max_sequences, engine.max_queued) = (1, 8);
        options.limits = Limits { keep_alive: Duration::from_millis(20), ..Limits::default() };
    });
    let ask = |n: usize| {
        let body = json!({"model": "story", "prompt": "A", "n": n, "max_tokens": 500, "stream": true, "logit_bias": {"2": -100}});
        let mut connection = Connection::open(server.address);
        connection.write(&request("POST", "/v1/completions", &[JSON], body.to_string().as_bytes()));
        connection.head();
        connection
    };
    let first = ask(64);
    let mut second = ask(1);
    assert_eq!(second.chunk(), b": alive\n\n");
    drop(first);
    loop {
        let chunk = second.chunk();
        match chunk.starts_with(b": alive") {
            true => continue,
            false => break assert!(chunk.starts_with(b"data: {")),
        }
    }
}

#[test]
pub fn answer_time_limit_ends_an_answer() {
    let server = own(|_, options| options.limits = Limits { answer_time: Duration::ZERO, ..Limits::default() });
    let asked = json!({"model": "story", "prompt": "A", "max_tokens": 400, "logit_bias": {"2": -100}});
    let answer = done(server.address, "/v1/completions", asked).json();
    assert_eq!(answer["choices"][0]["finish_reason"], json!("length"));
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < 400, "{answer}");
}

#[test]
pub fn server_max_tokens_limits_every_answer() {
    let server = own(|_, options| options.limits = Limits { max_tokens: Some(3), ..Limits::default() });
    let asked = json!({"model": "story", "messages": [{"role": "user", "content": "A"}]});
    let answer = done(server.address, "/v1/chat/completions", asked.clone()).json();
    assert_eq!(answer["usage"]["completion_tokens"], json!(3));
    let mut more = asked;
    more["max_tokens"] = json!(4);
    let refused = super::client::post(server.address, "/v1/chat/completions", &more);
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("max_tokens")));
}

#[test]
pub fn answers_in_progress_finish_at_shutdown() {
    let mut server = own(|engine, _| engine.max_sequences = 1);
    let body =
        json!({"model": "story", "prompt": "A", "n": 4, "max_tokens": 200, "stream": true, "logit_bias": {"2": -100}});
    let mut connection = Connection::open(server.address);
    connection.write(&request("POST", "/v1/completions", &[JSON], body.to_string().as_bytes()));
    assert_eq!(connection.head().status, 200);
    let mut text = connection.chunk();
    let ended = server.end();
    loop {
        match connection.chunk() {
            chunk if chunk.is_empty() => break,
            chunk => text.extend(chunk),
        }
    }
    assert!(text.ends_with(b"data: [DONE]\n\n"));
    ended.join().unwrap();
    assert!(std::net::TcpStream::connect(server.address).is_err());
}
