//! Limits hold against any client, and other clients are unaffected.

use std::sync::Arc;
use std::time::Duration;

use pollster::block_on;
use serde_json::json;
use tilewright::engine::{Engine, EngineOptions, Request};
use tilewright::generate::GenerateOptions;
use tilewright::{Device, Model};
use tilewright_serve::{Decoder, Limits, Loaded, ModelSpec, ServerOptions};

use super::client::{Connection, done, get, post, request, send};
use super::server::{Running, own, shared, start};

const JSON: (&str, &str) = ("content-type", "application/json");

/// A server with short client timeouts and small buffers.
fn tight() -> Running {
    own(|_, options| {
        let time = Duration::from_millis(200);
        options.limits =
            Limits { header_time: time, body_time: time, body_bytes: 4096, connections: 4, ..Limits::default() };
    })
}

fn is_alive(server: &Running) {
    assert_eq!(get(server.address, "/health").json()["status"], json!("ok"));
}

#[test]
pub fn slow_clients_are_cut_off() {
    let server = tight();
    // No bytes, an unfinished header, and an idle connection after a response.
    let mut silent = Connection::open(server.address);
    let mut slow = Connection::open(server.address);
    slow.write(b"GET /health HTTP/1.1\r\nhost: local");
    let mut idle = Connection::open(server.address);
    idle.write(&request("GET", "/health", &[], b""));
    assert_eq!(idle.answer().status, 200);
    assert!(silent.is_closed() && slow.is_closed() && idle.is_closed());
    // An unfinished body.
    let mut body = Connection::open(server.address);
    body.write(&request("POST", "/v1/completions", &[JSON, ("content-length", "100")], b"{"));
    let answer = body.answer();
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (408, &json!("request_timeout")));
    // A body shorter than declared.
    let mut body = Connection::open(server.address);
    body.write(&request("POST", "/v1/completions", &[JSON, ("content-length", "100")], b"{"));
    body.end();
    let answer = body.answer();
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (400, &json!("invalid_body")));
    is_alive(&server);
}

#[test]
pub fn client_that_reads_nothing_is_cut_off() {
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("serve-unread");
    std::fs::create_dir_all(&folder).unwrap();
    // More than sockets buffer.
    std::fs::write(folder.join("large.bin"), vec![0; 64 << 20]).unwrap();
    let server = own(|_, options| {
        options.page = Some(folder.clone());
        options.limits = Limits { write_time: Duration::from_millis(200), ..Limits::default() };
    });
    let mut connection = Connection::open(server.address);
    connection.write(&request("GET", "/large.bin", &[], b""));
    assert_eq!(connection.head().status, 200);
    let n_open = || {
        let text = get(server.address, "/metrics").text();
        text.lines().find_map(|line| line.strip_prefix("tilewright_connections ")?.parse::<u32>().ok()).unwrap()
    };
    while n_open() > 1 {
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(connection);
}

#[test]
pub fn large_headers_and_bodies_are_refused() {
    let server = tight();
    let long = "x".repeat(1 << 20);
    let many: Vec<(String, &str)> = (0..10_000).map(|at| (format!("x-{at}"), "1")).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    for headers in [&[("x-long", long.as_str())][..], &many] {
        let mut connection = Connection::open(server.address);
        // The server refuses before reading all of it, and then stops reading.
        if connection.write(&request("GET", "/health", headers, b"")) {
            assert!(connection.is_closed() || connection.head().status == 431);
        }
        is_alive(&server);
    }
    let line = format!("/{long}");
    let mut connection = Connection::open(server.address);
    if connection.write(&request("GET", &line, &[], b"")) {
        assert!(connection.is_closed() || [414, 431].contains(&connection.head().status));
    }
    // By its declared length before any of it arrives; by the bytes received; in chunks.
    let told = send(server.address, "POST", "/v1/completions", &[JSON, ("content-length", "1000000000")], b"");
    assert_eq!((told.status, &told.json()["error"]["code"]), (413, &json!("request_too_large")));
    let mut connection = Connection::open(server.address);
    let chunk = [b"1000\r\n", vec![b' '; 0x1000].as_slice(), b"\r\n"].concat();
    connection.write(&request("POST", "/v1/completions", &[JSON, ("transfer-encoding", "chunked")], &chunk.repeat(2)));
    assert_eq!(connection.answer().status, 413);
    let mut connection = Connection::open(server.address);
    let bomb = b"ffffffffffffffff\r\n ";
    connection.write(&request("POST", "/v1/completions", &[JSON, ("transfer-encoding", "chunked")], bomb));
    assert!([400, 408, 413].contains(&connection.answer().status));
    let mut connection = Connection::open(server.address);
    // Two lengths would allow request smuggling.
    connection.write(&request(
        "POST",
        "/v1/completions",
        &[JSON, ("content-length", "2"), ("content-length", "3")],
        b"{}",
    ));
    assert_eq!(connection.answer().status, 400);
    is_alive(&server);
}

/// A body with an ambiguous length is refused, and the bytes after it are not parsed as a request.
#[test]
fn request_body_with_two_lengths_is_refused() {
    let server = tight();
    let (length, coding) = (("content-length", "5"), ("transfer-encoding", "chunked"));
    let hidden = [b"0\r\n\r\n".to_vec(), request("GET", "/health", &[], b"")].concat();
    for headers in [
        &[JSON, length, coding][..],
        &[JSON, coding, length],
        &[JSON, ("transfer-encoding", "gzip, chunked")],
        &[JSON, ("transfer-encoding", "gzip"), coding],
        &[JSON, ("transfer-encoding", "chunked, gzip")],
    ] {
        let mut connection = Connection::open(server.address);
        // A valid request comes first.
        connection.write(&request("POST", "/v1/completions", &[JSON], b"[]"));
        connection.write(&request("POST", "/v1/completions", headers, &hidden));
        let first = connection.answer();
        assert_eq!((first.status, &first.json()["error"]["code"]), (400, &json!("invalid_value")), "{headers:?}");
        let second = connection.head();
        assert_eq!((second.status, second.header("connection")), (400, Some("close")), "{headers:?}");
        is_alive(&server);
    }
    let mut connection = Connection::open(server.address);
    connection.write(&request("POST", "/v1/completions", &[JSON, coding], &hidden));
    assert_eq!(connection.answer().json()["error"]["code"], json!("invalid_json"));
    assert!(connection.is_closed(), "what comes behind chunks is another connection's");
}

#[test]
fn other_protocols_are_refused() {
    let server = tight();
    // HTTP/2 streams that are opened and reset at once.
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    };
    let reset = |stream| [frame(1, 5, stream, b"\x82\x84\x86"), frame(3, 0, stream, b"\0\0\0\x08")].concat();
    let mut rapid = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, b"")].concat();
    rapid.extend((1..20_000).step_by(2).flat_map(reset));
    for bytes in [&rapid[..], b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9\r\n\r\n", &[0; 64]] {
        let mut connection = Connection::open(server.address);
        connection.write(bytes);
        assert!(connection.is_closed() || connection.head().status >= 400);
    }
    is_alive(&server);
}

/// A long completion that has begun.
fn at_work(server: &Running) -> Connection {
    let long = json!({"model": "story", "prompt": "A", "n": 128, "max_tokens": 500, "stream": true, "logit_bias": {"2": -100}});
    let mut connection = Connection::open(server.address);
    connection.write(&request("POST", "/v1/completions", &[JSON], long.to_string().as_bytes()));
    assert_eq!(connection.head().status, 200);
    connection
}

#[test]
pub fn idle_connections_are_closed_to_make_room() {
    let server = own(|_, options| options.limits = Limits { connections: 4, ..Limits::default() });
    let ask = || get(server.address, "/health").status;
    let mut busy = at_work(&server);
    // In this order: no bytes, an unfinished header, an awaited body.
    let mut silent = Connection::open(server.address);
    let mut slow = Connection::open(server.address);
    slow.write(b"GET /health HTTP/1.1\r\nhost: local");
    let mut body = Connection::open(server.address);
    let headers = [JSON, ("content-length", "100"), ("expect", "100-continue")];
    body.write(&request("POST", "/v1/completions", &headers, b""));
    assert_eq!(body.head().status, 100);
    let mut later = Vec::new();
    for waiting in [&mut silent, &mut slow, &mut body] {
        let mut next = Connection::open(server.address);
        next.write(&request("GET", "/health", &[], b""));
        assert_eq!(next.answer().status, 200);
        assert!(waiting.is_closed());
        // It also waits for its client, and comes last.
        later.push(next);
    }
    assert_eq!(ask(), 200);
    assert!(!busy.chunk().is_empty());
    // If all connections have running requests, the next one waits until one ends.
    let more: Vec<Connection> = (0..3).map(|_| at_work(&server)).collect();
    let mut next = Connection::open(server.address);
    next.write(&request("GET", "/health", &[], b""));
    assert!(!busy.chunk().is_empty());
    drop(more);
    assert_eq!(next.answer().status, 200);
    assert!(!busy.chunk().is_empty());
}

#[test]
pub fn request_bodies_share_one_memory_limit() {
    const KIB: usize = 1 << 10;
    let server = own(|_, options| {
        let [body_bytes, audio_bytes, bodies_bytes] = [256 * KIB; 3];
        options.limits = Limits { body_bytes, audio_bytes, bodies_bytes, ..Limits::default() };
    });
    let text = |n: usize| [vec![b' '; n], b"{}".to_vec()].concat();
    let ask = |body: &[u8]| send(server.address, "POST", "/v1/completions", &[JSON], body);
    // Parsed, and refused for another reason.
    assert_eq!(ask(&text(200 * KIB)).status, 400);
    let length = (200 * KIB + 2).to_string();
    loop {
        let mut held = Connection::open(server.address);
        let headers = [JSON, ("content-length", length.as_str())];
        held.write(&request("POST", "/v1/completions", &headers, &text(200 * KIB)[..200 * KIB]));
        let other = ask(&text(200 * KIB));
        // Ordinary requests are small.
        done(server.address, "/v1/completions", json!({"model": "story", "prompt": "A", "max_tokens": 1}));
        held.write(b"{}");
        let held = held.answer();
        assert!([400, 429].contains(&other.status) && [400, 429].contains(&held.status));
        // Their order is arbitrary.
        if (other.status, held.status) == (429, 400) {
            assert_eq!((other.header("retry-after"), &other.json()["error"]["code"]), (Some("1"), &json!("busy")));
            break;
        }
    }
    assert_eq!(ask(&text(200 * KIB)).status, 400);
}

#[test]
fn hostile_chunked_bodies_are_refused() {
    let server = own(|_, options| options.limits = Limits { body_bytes: 64 << 10, ..Limits::default() });
    let chunked = [JSON, ("transfer-encoding", "chunked")];
    let long = "x".repeat(1 << 20);
    for body in [
        "1\r\n \r\n".repeat(100_000),
        format!("1;{long}\r\n \r\n0\r\n\r\n"),
        format!("1;{}\r\n \r\n", &long[..1000]).repeat(1000),
        format!("{}1\r\n \r\n0\r\n\r\n", "0".repeat(1 << 20)),
        "10000000000000001\r\n \r\n0\r\n\r\n".to_owned(),
        format!("1\r\n \r\n0\r\n{}\r\n", "x-t: 1\r\n".repeat(100_000)),
    ] {
        let mut connection = Connection::open(server.address);
        if connection.write(&request("POST", "/v1/completions", &chunked, body.as_bytes())) {
            assert!(connection.is_closed() || [400, 413, 431].contains(&connection.head().status));
        }
        is_alive(&server);
    }
}

#[test]
pub fn request_to_a_full_queue_is_refused_at_once() {
    let server = own(|engine, _| (engine.max_sequences, engine.max_queued) = (1, 1));
    // Many long completions; the engine has one running and one queued.
    let busy = at_work(&server);
    let short = json!({"model": "story", "prompt": "A", "max_tokens": 1});
    // Between two completions there may be room.
    let refused = std::iter::repeat_with(|| post(server.address, "/v1/completions", &short))
        .find(|answer| answer.status != 200)
        .unwrap();
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert_eq!((&refused.json()["error"]["code"], refused.header("x-should-retry")), (&json!("busy"), None));
    // Its client disconnects, and the next one gets the place.
    drop(busy);
    while post(server.address, "/v1/completions", &short).status != 200 {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Under overload, refused requests build no prompts. A prompt longer than any context reveals whether it was built:
/// then the error is its length, not the full queue.
#[test]
fn full_queue_refuses_before_prompts_are_encoded() {
    let options = EngineOptions { max_sequences: 1, max_queued: 0, ..EngineOptions::default() };
    // The driver runs only when the test steps it.
    let (engine, mut driver) = Engine::new(&Model::builtin(&Device::cpu()).unwrap(), &options).unwrap();
    let decoder = Arc::new(Decoder::of(engine.clone(), Some("chatml")).unwrap());
    let story = ModelSpec::new("story", 1 << 20, move || Ok(Loaded::Decoder(decoder.clone())));
    let server = start(vec![story], ServerOptions::default());
    let waiting = engine.submit(Request::new(vec![1], GenerateOptions::default())).unwrap();

    let long = "Once ".repeat(4096);
    let messages = json!([{"role": "user", "content": long}]);
    let asked = [
        ("/v1/completions", json!({"model": "story", "prompt": long})),
        ("/v1/completions", json!({"model": "story", "prompt": [long, long], "n": 3, "echo": true, "stream": true})),
        ("/v1/completions", json!({"model": "story", "prompt": vec![5; 4096], "echo": true})),
        ("/v1/chat/completions", json!({"model": "story", "messages": messages, "n": 3})),
        ("/v1/chat/completions", json!({"model": "story", "messages": messages, "stream": true})),
        ("/v1/responses", json!({"model": "story", "input": long})),
        ("/api/generate", json!({"model": "story", "prompt": long})),
        ("/api/generate", json!({"model": "story", "prompt": long, "raw": true, "stream": false})),
        ("/api/chat", json!({"model": "story", "messages": messages})),
    ];
    for (at, (path, body)) in asked.iter().enumerate() {
        let refused = post(server.address, path, body);
        assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")), "{path}: {}", refused.text());
        let told = refused.json();
        match path.starts_with("/api/") {
            true => assert!(told["error"].as_str().is_some_and(|error| error.contains("wait")), "{told}"),
            false => assert_eq!(
                (&told["error"]["code"], &told["error"]["type"]),
                (&json!("busy"), &json!("rate_limit_error"))
            ),
        }
        let stats = engine.stats();
        assert_eq!((stats.n_refused, stats.n_submitted), (at as u64 + 1, 1), "{path}: each is refused once");
    }
    // With room in the queue, the error is the prompt's length.
    drop(waiting);
    while block_on(driver.step()).unwrap() {}
    for (path, body) in &asked {
        let refused = post(server.address, path, body);
        assert_eq!(refused.status, 400, "{path}: {}", refused.text());
    }
    assert_eq!(engine.stats().n_refused, asked.len() as u64);
}

#[test]
fn additional_answers_of_a_request_wait_for_the_queue() {
    let server = own(|engine, _| (engine.max_sequences, engine.max_queued) = (1, 0));
    let body = json!({"model": "story", "prompt": "A", "n": 3, "max_tokens": 20, "logit_bias": {"2": -100}});
    let answer = done(server.address, "/v1/completions", body).json();
    assert_eq!(answer["usage"]["completion_tokens"], json!(60));
    let measures = get(server.address, "/metrics").text();
    assert!(measures.contains("tilewright_engine_refused_total{model=\"story\"} 0\n"), "{measures}");
}

#[test]
fn disconnected_client_cancels_its_request() {
    let server = own(|engine, _| engine.max_sequences = 1);
    let long = |stream: bool| json!({"model": "story", "prompt": "A", "n": 64, "max_tokens": 500, "stream": stream, "logit_bias": {"2": -100}});
    let number = |name: &str| {
        let text = get(server.address, "/metrics").text();
        let line = text.lines().find(|line| line.starts_with(&format!("tilewright_{name}{{")));
        line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap())
    };
    for (at, streams) in [true, false].into_iter().enumerate() {
        let mut connection = Connection::open(server.address);
        connection.write(&request("POST", "/v1/completions", &[JSON], long(streams).to_string().as_bytes()));
        if streams {
            assert_eq!(connection.head().status, 200);
            assert!(!connection.chunk().is_empty());
        }
        while number("requests_running") == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(connection);
        // At least the running one was cancelled, and none continues.
        while number("engine_cancelled_total") <= at || number("requests_running") + number("requests_queued") > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    done(server.address, "/v1/completions", json!({"model": "story", "prompt": "A", "max_tokens": 1}));
}

#[test]
fn hostile_requests_do_not_change_answers_to_others() {
    let asked =
        json!({"model": "story", "messages": [{"role": "user", "content": "Once"}], "seed": 5, "max_tokens": 40});
    let alone = done(shared(), "/v1/chat/completions", asked.clone()).json();
    let streams: Vec<_> = (0..6)
        .map(|_| {
            std::thread::spawn({
                let asked = asked.clone();
                move || done(shared(), "/v1/chat/completions", asked).json()
            })
        })
        .collect();
    for at in 0..20u8 {
        let mut connection = Connection::open(shared());
        let body = json!({"model": "story", "prompt": "B", "max_tokens": 300, "stream": true}).to_string();
        let bytes = request("POST", "/v1/completions", &[JSON], body.as_bytes());
        // Disconnects within the headers, the body, the queue or the completion.
        connection.write(bytes.get(..bytes.len() * usize::from(at) / 15).unwrap_or(&bytes));
        if at > 17 {
            connection.head();
        }
    }
    for stream in streams {
        assert_eq!(stream.join().unwrap()["choices"], alone["choices"]);
    }
}

/// Prompts longer than any context take long to encode, one by one, without blocking other clients' requests.
#[test]
pub fn long_prompts_do_not_block_short_ones() {
    let server = own(|_, _| ());
    let n_threads = std::thread::available_parallelism().map_or(2, usize::from).max(2);
    let n_long = (2 * n_threads + 2).min(50);
    let long = json!({"model": "story", "prompt": "a ".repeat(1 << 19), "max_tokens": 1}).to_string();
    let mut connections: Vec<Connection> = (0..n_long)
        .map(|_| {
            let mut connection = Connection::open(server.address);
            connection.write(&request("POST", "/v1/completions", &[JSON], long.as_bytes()));
            connection
        })
        .collect();
    let n_answered = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let waiting: Vec<_> = connections
        .drain(..)
        .map(|mut connection| {
            let n_answered = n_answered.clone();
            std::thread::spawn(move || {
                let status = connection.answer().status;
                n_answered.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                status
            })
        })
        .collect();
    // In a thread queue it would have come after most of them.
    done(server.address, "/v1/completions", json!({"model": "story", "prompt": "Once", "max_tokens": 1}));
    let n_before = n_answered.load(std::sync::atomic::Ordering::SeqCst);
    let statuses: Vec<u16> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert!(statuses.iter().all(|&status| status == 400), "{statuses:?}");
    assert!(n_before <= n_long / 2, "{n_before} of {n_long} long prompts were answered before the short one");
}
