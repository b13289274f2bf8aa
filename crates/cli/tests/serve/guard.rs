//! Access control.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::{Value as Json, json};
use tilewright_serve::{Server, ServerOptions};

use super::client::{Connection, get, request, send};
use super::server::own;

/// Contains a certificate for `localhost` valid for a hundred years, and its key: `openssl req -x509 -newkey ec
/// -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -subj /CN=localhost -addext
/// subjectAltName=DNS:localhost,IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE`.
const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve");

#[test]
fn foreign_hosts_and_origins_are_refused() {
    let server = own(|_, options| {
        options.hosts = vec!["models.example".into()];
        options.origins = vec!["https://app.example".into()];
    });
    let ask = |headers: &[(&str, &str)]| send(server.address, "GET", "/v1/models", headers, b"");
    let code = |headers: &[(&str, &str)]| ask(headers).json()["error"]["code"].as_str().unwrap_or("none").to_owned();
    for host in ["localhost", "localhost:8080", "LOCALHOST", "127.0.0.1:9", "[::1]:9", "models.example:80"] {
        assert_eq!(ask(&[("host", host)]).status, 200, "{host}");
    }
    for host in [
        "evil.example",
        "localhost.evil.example",
        "192.0.2.1",
        "0.0.0.0",
        "127.0.0.1.evil.example",
        "models.example.evil",
    ] {
        let answer = ask(&[("host", host)]);
        assert_eq!((answer.status, code(&[("host", host)]).as_str()), (403, "host_not_allowed"), "{host}");
    }
    for host in ["", "a b", "localhost@evil.example"] {
        assert_eq!(ask(&[("host", host)]).status, 400, "{host}");
    }
    assert_eq!(ask(&[("host", "localhost"), ("host", "evil.example")]).status, 400);
    // A request line that names another host than the header.
    let line = send(server.address, "GET", "http://evil.example/v1/models", &[("host", "localhost")], b"");
    assert_eq!(line.status, 403);

    let own = format!("http://{}", server.address);
    let host = server.address.to_string();
    assert_eq!(ask(&[("host", &host), ("origin", &own)]).status, 200);
    for origin in [
        "null",
        "http://evil.example",
        "https://localhost",
        "http://localhost:1",
        "https://app.example.evil",
        "file://",
    ] {
        let headers = [("origin", origin)];
        assert_eq!((ask(&headers).status, code(&headers).as_str()), (403, "origin_not_allowed"), "{origin}");
        assert_eq!(ask(&headers).header("access-control-allow-origin"), None);
    }
    let named = ask(&[("origin", "https://app.example")]);
    assert_eq!((named.status, named.header("access-control-allow-origin")), (200, Some("https://app.example")));
    let preflight = |origin: &str| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "x-stainless-os"),
        ];
        send(server.address, "OPTIONS", "/v1/chat/completions", &headers, b"")
    };
    let told = preflight("https://app.example");
    assert_eq!((told.status, told.header("access-control-allow-headers")), (204, Some("x-stainless-os")));
    assert_eq!(preflight("http://evil.example").status, 403);
}

#[test]
fn api_key_is_required_where_one_is_configured() {
    let server = own(|_, options| options.api_keys = vec!["first key".into(), "second".into()]);
    let status = |headers: &[(&str, &str)]| send(server.address, "GET", "/v1/models", headers, b"").status;
    for key in ["Bearer first key", "bearer second"] {
        assert_eq!(status(&[("authorization", key)]), 200, "{key}");
    }
    for key in [
        "Bearer",
        "Bearer ",
        "second",
        "Basic second",
        "Bearer secon",
        "Bearer secondd",
        "Bearer  second",
        "Bearer first key ",
    ] {
        // Trailing white space is not part of a header.
        let want = if key.ends_with("first key ") { 200 } else { 401 };
        assert_eq!(status(&[("authorization", key)]), want, "{key}");
    }
    let refused = get(server.address, "/metrics");
    assert_eq!((refused.status, refused.header("www-authenticate")), (401, Some("Bearer")));
    assert_eq!(refused.json()["error"]["code"], json!("invalid_api_key"));
    assert!(get(server.address, "/api/tags").json()["error"].is_string());
    assert_eq!(get(server.address, "/health").status, 200);
}

/// Cached prefixes do not reveal other clients' prompts.
#[test]
fn prefixes_are_shared_only_within_one_api_key_and_salt() {
    let server = own(|_, options| options.api_keys = vec!["first".into(), "second".into()]);
    let cached = |key: &str, path: &str, salt: Json| {
        let text = "Once upon a time there was a dog. ".repeat(12);
        let mut body = match path {
            "/v1/responses" => json!({"model": "story", "input": text, "max_output_tokens": 1}),
            _ => json!({"model": "story", "prompt": text, "max_tokens": 1}),
        };
        body["cache_salt"] = salt;
        let headers = [("authorization", key), ("content-type", "application/json")];
        let usage = send(server.address, "POST", path, &headers, body.to_string().as_bytes()).json()["usage"].clone();
        let details = ["prompt_tokens_details", "input_tokens_details"].into_iter().find_map(|name| usage.get(name));
        details.and_then(|details| details["cached_tokens"].as_u64()).unwrap_or_else(|| panic!("{usage}"))
    };
    for path in ["/v1/completions", "/v1/responses"] {
        for (key, salt) in [
            ("Bearer first", json!(null)),
            ("Bearer second", json!(null)),
            ("Bearer first", json!("s")),
            ("Bearer second", json!("s")),
        ] {
            assert_eq!(cached(key, path, salt.clone()), 0, "{path}: {key}, {salt}");
            assert!(cached(key, path, salt.clone()) >= 64, "{path}: {key}, {salt}");
        }
    }
}

#[test]
fn patterns_allow_hosts_and_origins() {
    let server = own(|_, options| {
        options.hosts = vec!["*.example.org".into()];
        options.origins = vec!["http://localhost:*".into(), "https://app.example:*".into()];
    });
    let status = |name: &str, value: &str| send(server.address, "GET", "/v1/models", &[(name, value)], b"").status;
    for (host, want) in
        [("a.example.org", 200), ("a.B.example.org:80", 200), ("example.org", 403), ("xexample.org", 403)]
    {
        assert_eq!(status("host", host), want, "{host}");
    }
    for (origin, want) in [
        ("http://localhost:3000", 200),
        ("http://localhost", 200),
        ("https://app.example:8443", 200),
        ("https://localhost:3000", 403),
        ("http://localhost.evil.example", 403),
        ("http://localhost:3000.evil.example", 403),
    ] {
        assert_eq!(status("origin", origin), want, "{origin}");
    }
    let any = own(|_, options| {
        options.hosts = vec!["*".into()];
        options.origins = vec!["*".into()];
    });
    let answer = send(any.address, "GET", "/health", &[("host", "any"), ("origin", "http://any.example")], b"");
    assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, Some("http://any.example")));
}

/// A changed key file takes effect without a restart, and an empty one changes nothing.
#[test]
fn changed_key_files_are_reloaded() {
    let file = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("serve-keys");
    std::fs::write(&file, "first\n").unwrap();
    let told = Arc::new(std::sync::Mutex::new(String::new()));
    let server = own(|_, options| {
        let told = told.clone();
        options.api_key_files = vec![file.clone()];
        options.report = Some(Arc::new(move |line: &str| *told.lock().unwrap() += line));
    });
    let status = |key: &str| {
        let key = format!("Bearer {key}");
        send(server.address, "GET", "/v1/models", &[("authorization", &key)], b"").status
    };
    assert_eq!((status("first"), status("second one")), (200, 401));
    std::fs::write(&file, "\n").unwrap();
    while told.lock().unwrap().is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(told.lock().unwrap().contains("api_key_file"));
    assert_eq!(status("first"), 200);
    std::fs::write(&file, "second one\n").unwrap();
    while status("second one") != 200 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(status("first"), 401);
}

#[test]
fn unsafe_server_options_are_refused() {
    let bind = |address: &str, options: ServerOptions| match Server::bind(address.parse().unwrap(), Vec::new(), options)
    {
        Ok(_) => "none".to_owned(),
        Err(error) => error.to_string(),
    };
    let keys = |keys: &[&str]| ServerOptions {
        api_keys: keys.iter().map(|key| key.to_string()).collect(),
        ..ServerOptions::default()
    };
    assert!(bind("0.0.0.0:0", keys(&[])).contains("api_key"));
    assert!(bind("[::]:0", keys(&[])).contains("api_key"));
    assert!(bind("127.0.0.1:0", keys(&[" "])).contains("api_key"));
    assert_eq!(bind("0.0.0.0:0", keys(&["key"])), "none");
    assert_eq!(bind("0.0.0.0:0", ServerOptions { is_open: true, ..ServerOptions::default() }), "none");
    for origin in [
        "http://*",
        "https://*.example.org",
        "example.org",
        "https://example.org/",
        "https://example.org/path",
        "ftp://a",
    ] {
        let options = ServerOptions { origins: vec![origin.into()], ..ServerOptions::default() };
        assert!(bind("127.0.0.1:0", options).contains("cors"), "{origin}");
    }
    for host in ["", "a*", "*.", "*.*.example", "http://example.org", "example.org/", "a b"] {
        let options = ServerOptions { hosts: vec![host.into()], ..ServerOptions::default() };
        assert!(bind("127.0.0.1:0", options).contains("allow_host"), "{host}");
    }
    let tls = Some((format!("{DATA}/client.rs").into(), format!("{DATA}/key.pem").into()));
    assert!(bind("127.0.0.1:0", ServerOptions { tls, ..ServerOptions::default() }).contains("tls_cert"));
}

#[test]
fn tls_is_served_where_configured() {
    let (certificate, key) = (format!("{DATA}/cert.pem"), format!("{DATA}/key.pem"));
    let server = own(|_, options| options.tls = Some((certificate.clone().into(), key.into())));
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&certificate).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_root_certificates(roots).with_no_client_auth());
    let client = ClientConnection::new(config, ServerName::try_from("localhost").unwrap()).unwrap();
    let mut connection = Connection::over(StreamOwned::new(client, TcpStream::connect(server.address).unwrap()));
    connection.write(&request("GET", "/health", &[("origin", "https://localhost")], b""));
    assert_eq!(connection.answer().status, 200);
    // A client without TLS does no harm.
    let mut plain = TcpStream::connect(server.address).unwrap();
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    connection.write(&request("GET", "/health", &[], b""));
    assert_eq!(connection.answer().status, 200);
}

#[test]
fn page_folder_is_served_and_no_file_outside_it() {
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("serve-page");
    std::fs::create_dir_all(folder.join("page/inner")).unwrap();
    for (name, text) in
        [("page/index.html", "<p>page"), ("page/inner/a.js", "1"), ("page/.hidden", "x"), ("secret.txt", "secret")]
    {
        std::fs::write(folder.join(name), text).unwrap();
    }
    let server = own(|_, options| {
        options.page = Some(folder.join("page"));
        options.api_keys = vec!["key".into()];
    });
    let page = get(server.address, "/");
    assert_eq!(
        (page.status, page.text().as_str(), page.header("x-content-type-options")),
        (200, "<p>page", Some("nosniff"))
    );
    assert_eq!(get(server.address, "/inner/a.js").header("content-type"), Some("text/javascript; charset=utf-8"));
    for path in [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/inner/../../secret.txt",
        "/..%2fsecret.txt",
        "/.hidden",
        "/inner/",
        "/page/index.html",
    ] {
        assert_eq!(get(server.address, path).status, 404, "{path}");
    }
    assert_eq!(get(server.address, "/v1/models").status, 401);
}

/// Static files for model downloads: ranges, ETags, and never whole in memory.
#[cfg(unix)]
#[test]
fn page_files_are_served_in_ranges() {
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("serve-ranges");
    std::fs::create_dir_all(&folder).unwrap();
    let bytes: Vec<u8> = (0..200_000u32).map(|at| ((at * 31) >> 5) as u8).collect();
    std::fs::write(folder.join("a.bin"), &bytes).unwrap();
    std::fs::write(folder.join("empty.bin"), "").unwrap();
    // Sparse, and larger than any memory.
    std::fs::File::create(folder.join("large.gguf")).unwrap().set_len(1 << 40).unwrap();
    let server = own(|_, options| options.page = Some(folder.clone()));
    let ask = |method: &str, path: &str, headers: &[(&str, &str)]| send(server.address, method, path, headers, b"");
    let whole = ask("GET", "/a.bin", &[]);
    let tag = whole.header("etag").unwrap().to_owned();
    assert_eq!((whole.status, &whole.body, whole.header("accept-ranges")), (200, &bytes, Some("bytes")));
    assert!(whole.header("content-security-policy").unwrap().contains("frame-ancestors"));
    let head = ask("HEAD", "/a.bin", &[]);
    assert_eq!((head.status, head.header("content-length"), head.header("etag")), (200, Some("200000"), Some(&*tag)));
    for (range, from, to) in
        [("0-0", 0, 1), ("70000-", 70_000, 200_000), ("65535-65536", 65_535, 65_537), ("-9", 199_991, 200_000)]
    {
        let range = format!("bytes={range}");
        for if_range in [None, Some(&*tag)] {
            let headers: Vec<(&str, &str)> =
                [Some(("range", &*range)), if_range.map(|tag| ("if-range", tag))].into_iter().flatten().collect();
            let part = ask("GET", "/a.bin", &headers);
            let told = format!("bytes {from}-{}/200000", to - 1);
            assert_eq!((part.status, part.header("content-range")), (206, Some(&*told)), "{range}");
            assert_eq!(part.body, &bytes[from..to], "{range}");
        }
        // A range of another version is useless.
        let other = ask("GET", "/a.bin", &[("range", &range), ("if-range", "\"other\"")]);
        assert_eq!((other.status, other.body.len()), (200, bytes.len()));
    }
    for (path, len) in [("/a.bin", 200_000), ("/empty.bin", 0)] {
        let none = ask("GET", path, &[("range", "bytes=200000-")]);
        let told = format!("bytes */{len}");
        assert_eq!((none.status, none.header("content-range"), none.body.len()), (416, Some(&*told), 0));
    }
    assert_eq!(ask("GET", "/a.bin", &[("range", "bytes=0-1,5-6")]).status, 200);
    for tags in [tag.clone(), format!("\"x\", W/{tag}"), "*".into()] {
        let same = ask("GET", "/a.bin", &[("if-none-match", &tags), ("range", "bytes=0-1")]);
        assert_eq!((same.status, same.header("etag"), same.body.len()), (304, Some(&*tag), 0), "{tags}");
    }
    assert_eq!(ask("GET", "/a.bin", &[("if-none-match", "\"x\"")]).status, 200);
    std::fs::write(folder.join("a.bin"), &bytes[1..]).unwrap();
    let changed = ask("GET", "/a.bin", &[("if-none-match", &tag)]);
    assert_eq!((changed.status, changed.body.len()), (200, bytes.len() - 1));

    let large = ask("HEAD", "/large.gguf", &[]);
    assert_eq!((large.status, large.header("content-length")), (200, Some("1099511627776")));
    let end = ask("GET", "/large.gguf", &[("range", "bytes=-3")]);
    assert_eq!((end.status, &end.body), (206, &vec![0; 3]));
    let mut reading = Connection::open(server.address);
    reading.write(&request("GET", "/large.gguf", &[], b""));
    assert_eq!(reading.head().header("content-length"), Some("1099511627776"));
    std::fs::remove_file(folder.join("large.gguf")).unwrap();
}

/// A renewed certificate is served without a restart, and an invalid one changes nothing.
#[test]
fn changed_certificates_are_reloaded() {
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("serve-tls");
    std::fs::create_dir_all(&folder).unwrap();
    let (certificate, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    let text = |name: &str| std::fs::read(format!("{DATA}/{name}")).unwrap();
    // A byte order mark is not part of the text.
    std::fs::write(&certificate, [b"\xef\xbb\xbf", &*text("cert.pem")].concat()).unwrap();
    std::fs::write(&key, [b"\xef\xbb\xbf", &*text("key.pem")].concat()).unwrap();
    let told = Arc::new(std::sync::Mutex::new(String::new()));
    let server = own(|_, options| {
        let told = told.clone();
        options.tls = Some((certificate.clone(), key.clone()));
        options.report = Some(Arc::new(move |line: &str| *told.lock().unwrap() += line));
    });
    let known: Vec<CertificateDer<'static>> = ["cert.pem", "renewed.pem"]
        .iter()
        .map(|name| CertificateDer::from_pem_file(format!("{DATA}/{name}")).unwrap())
        .collect();
    let served = || {
        let mut roots = RootCertStore::empty();
        known.iter().for_each(|certificate| roots.add(certificate.clone()).unwrap());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = Arc::new(config.with_root_certificates(roots).with_no_client_auth());
        let client = ClientConnection::new(config, ServerName::try_from("localhost").unwrap()).unwrap();
        let mut stream = StreamOwned::new(client, TcpStream::connect(server.address).unwrap());
        stream.write_all(&request("GET", "/health", &[], b"")).unwrap();
        let first = stream.conn.peer_certificates().unwrap()[0].clone();
        known.iter().position(|own| *own == first).unwrap()
    };
    assert_eq!(served(), 0);
    std::fs::write(&key, "no key").unwrap();
    while told.lock().unwrap().is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(told.lock().unwrap().contains("tls_key"));
    assert_eq!(served(), 0);
    std::fs::write(&certificate, text("renewed.pem")).unwrap();
    std::fs::write(&key, text("renewed-key.pem")).unwrap();
    while served() != 1 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
