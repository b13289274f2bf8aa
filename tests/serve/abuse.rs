//! Limits hold whatever a client sends, and others notice nothing of it.

use std::time::Duration;

use serde_json::json;
use tilewright::serve::Limits;

use super::client::{Connection, done, get, post, request, send};
use super::server::{Running, own, shared};

const JSON: (&str, &str) = ("content-type", "application/json");

/// A server whose clients have little time and little room.
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
fn slow_clients_are_cut_off() {
    let server = tight();
    // Nothing, a header that does not end, and an idle connection that had an answer.
    let mut silent = Connection::open(server.address);
    let mut slow = Connection::open(server.address);
    slow.write(b"GET /health HTTP/1.1\r\nhost: local");
    let mut idle = Connection::open(server.address);
    idle.write(&request("GET", "/health", &[], b""));
    assert_eq!(idle.answer().status, 200);
    assert!(silent.is_closed() && slow.is_closed() && idle.is_closed());
    // A body that does not end.
    let mut body = Connection::open(server.address);
    body.write(&request("POST", "/v1/completions", &[JSON, ("content-length", "100")], b"{"));
    let answer = body.answer();
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (408, &json!("request_timeout")));
    is_alive(&server);
}

#[test]
fn who_reads_nothing_is_cut_off() {
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("serve-unread");
    std::fs::create_dir_all(&folder).unwrap();
    // More than sockets hold.
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
fn large_headers_and_bodies_are_refused() {
    let server = tight();
    let long = "x".repeat(1 << 20);
    let many: Vec<(String, &str)> = (0..10_000).map(|at| (format!("x-{at}"), "1")).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    for headers in [&[("x-long", long.as_str())][..], &many] {
        let mut connection = Connection::open(server.address);
        // The server says no before it has read all of it, and then reads no more.
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
    // By its length, before any of it came; by what came; in chunks.
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
    // Two lengths would be two requests to two readers.
    connection.write(&request(
        "POST",
        "/v1/completions",
        &[JSON, ("content-length", "2"), ("content-length", "3")],
        b"{}",
    ));
    assert_eq!(connection.answer().status, 400);
    is_alive(&server);
}

#[test]
fn other_protocols_are_refused() {
    let server = tight();
    for bytes in
        [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9\r\n\r\n", &[0; 64]]
    {
        let mut connection = Connection::open(server.address);
        connection.write(bytes);
        assert!(connection.is_closed() || connection.head().status >= 400);
    }
    is_alive(&server);
}

#[test]
fn connections_beyond_the_limit_wait() {
    let server = tight();
    let mut held: Vec<Connection> = (0..4).map(|_| Connection::open(server.address)).collect();
    let mut next = Connection::open(server.address);
    next.write(&request("GET", "/health", &[], b""));
    // The others are idle, and their time ends.
    assert_eq!(next.answer().status, 200);
    assert!(held.iter_mut().all(Connection::is_closed));
}

#[test]
fn a_full_queue_is_told_at_once() {
    let server = own(|engine, _| (engine.max_sequences, engine.max_queued) = (1, 1));
    // Many long texts, of which the engine always has one at work and one that waits.
    let many = json!({"model": "story", "prompt": "A", "n": 128, "max_tokens": 500, "stream": true, "logit_bias": {"2": -100}});
    let mut busy = Connection::open(server.address);
    busy.write(&request("POST", "/v1/completions", &[JSON], many.to_string().as_bytes()));
    assert_eq!(busy.head().status, 200);
    let short = json!({"model": "story", "prompt": "A", "max_tokens": 1});
    // In the moment between two texts there may be room.
    let refused = std::iter::repeat_with(|| post(server.address, "/v1/completions", &short))
        .find(|answer| answer.status != 200)
        .unwrap();
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert_eq!((&refused.json()["error"]["code"], refused.header("x-should-retry")), (&json!("busy"), None));
    // Its client goes, and the next one has the room.
    drop(busy);
    while post(server.address, "/v1/completions", &short).status != 200 {
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_client_that_goes_away_cancels_its_text() {
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
        // At least the one at work was cancelled, and none of it goes on.
        while number("engine_cancelled_total") <= at || number("requests_running") + number("requests_queued") > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    done(server.address, "/v1/completions", json!({"model": "story", "prompt": "A", "max_tokens": 1}));
}

#[test]
fn what_a_client_sends_changes_nothing_for_others() {
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
        // Gone within the headers, the body, the queue or the text.
        connection.write(bytes.get(..bytes.len() * usize::from(at) / 15).unwrap_or(&bytes));
        if at > 17 {
            connection.head();
        }
    }
    for stream in streams {
        assert_eq!(stream.join().unwrap()["choices"], alone["choices"]);
    }
}
