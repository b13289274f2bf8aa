//! Downloads of models by address, from a test hub to files in a cache.

use crate::common;
#[path = "hub/server.rs"]
mod server;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::Rng;
use serde_json::{Value, json};
use server::{COMMIT, GGUF, REPO, Reply, Request, Server, cache, listing, part, sha256};
use tilewright::Error;
use tilewright::hub::{Address, Event, Hub, HubError, HubOptions};

fn options(server: &Server, cache: &Path) -> HubOptions {
    HubOptions { endpoint: server.endpoint.clone(), cache: cache.into(), token: None, is_offline: false }
}

/// A hub client that retries without waiting.
fn hub(server: &Server, cache: &Path) -> Hub {
    Hub::new(options(server, cache)).unwrap().with_sleep(|_| {})
}

fn address(text: &str) -> Address {
    text.parse().unwrap()
}

fn fetch(hub: &Hub, text: &str) -> Result<PathBuf, Error> {
    hub.fetch(&address(text), &mut |_| {})
}

/// The hub's error, which must be of this module.
fn refused(result: Result<PathBuf, Error>) -> HubError {
    match result {
        Err(Error::Hub(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn content(n: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| rng.word() as u8).collect()
}

/// Paths of all files below a folder, links included.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(files(&entry.path())),
            false => found.push(entry.path()),
        }
    }
    found
}

/// Only locks may remain of a model.
fn assert_empty(cache: &Path) {
    let mut left = files(cache);
    left.retain(|path| path.extension().is_none_or(|end| end != "lock"));
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_model_is_downloaded_once() {
    let (small, large) = (content(1000, 1), content(300_000, 2));
    let server = Server::new(REPO, &[("m-Q4_0.gguf", &small), ("m-Q8_0.gguf", &large), ("README.md", b"readme")]);
    let cache = cache("once");
    let hub = hub(&server, &cache);
    let mut events = Vec::new();
    let path = hub.fetch(&address("hf:owner/name:q8_0"), &mut |event| events.push(format!("{event:?}"))).unwrap();
    assert_eq!(fs::read(&path).unwrap(), large);
    let repo = cache.join("models--owner--name");
    assert_eq!(path, repo.join("snapshots").join(COMMIT).join("m-Q8_0.gguf"));
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    #[cfg(unix)]
    assert_eq!(fs::read_link(&path).unwrap(), Path::new("../../blobs").join(sha256(&large)));
    assert_eq!(events.first().unwrap(), "Begin { n_files: 1, total_bytes: 300000 }");
    assert_eq!(events[events.len() - 2], "Progress { done_bytes: 300000, total_bytes: 300000 }");
    let requests = server.take_requests();
    let targets: Vec<&str> = requests.iter().map(|request| request.target.as_str()).collect();
    let file = format!("/owner/name/resolve/{COMMIT}/m-Q8_0.gguf");
    let store = format!("/store/{}", sha256(&large));
    assert_eq!(targets, ["/api/models/owner/name/revision/main?blobs=true", file.as_str(), store.as_str()]);

    assert_eq!(fetch(&hub, GGUF).unwrap(), path);
    assert_eq!(server.take_requests().len(), 1, "the list alone");
    // After a new commit only changed files are downloaded.
    server.commit(&COMMIT.replace('0', "f"), &[("m-F16.gguf", &content(2000, 3))]);
    let newer = fetch(&hub, GGUF).unwrap();
    assert!(newer != path && fs::read(&newer).unwrap() == large && server.take_requests().len() == 1);
    assert_eq!(fetch(&hub, "hf:owner/name/m-F16.gguf").map(|path| fs::read(path).unwrap()).unwrap(), content(2000, 3));
    assert!(fetch(&hub, "hf:owner/name").unwrap().ends_with("m-Q4_0.gguf"));
}

#[test]
fn folder_download_has_exactly_the_model_files() {
    let shards = [content(5000, 1), content(6000, 2)];
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let index = json!({ "metadata": {}, "weight_map": { "a": names[0], "b": names[1] } }).to_string();
    let server = Server::new(
        REPO,
        &[
            ("config.json", b"{}"),
            ("tokenizer.json", b"{ }"),
            ("1_Pooling/config.json", b"{  }"),
            ("model.safetensors.index.json", index.as_bytes()),
            (names[0], &shards[0]),
            (names[1], &shards[1]),
            ("consolidated.safetensors", &content(100, 3)),
            ("pytorch_model.bin", &content(100, 4)),
        ],
    );
    let cache = cache("folder");
    let hub = hub(&server, &cache);
    let folder = fetch(&hub, "hf:owner/name").unwrap();
    let mut found: Vec<String> =
        files(&folder).iter().map(|path| path.strip_prefix(&folder).unwrap().to_string_lossy().into_owned()).collect();
    found.sort();
    let mut wanted = ["1_Pooling/config.json", "config.json", names[0], names[1], "", "tokenizer.json"];
    wanted[4] = "model.safetensors.index.json";
    assert_eq!(found, wanted);
    assert_eq!(fs::read(folder.join(names[1])).unwrap(), shards[1]);
    assert_eq!(fs::read(folder.join("1_Pooling/config.json")).unwrap(), b"{  }");
    server.take_requests();
    assert_eq!(fetch(&hub, "hf:owner/name").unwrap(), folder);
    assert_eq!(server.take_requests().len(), 1);
    let listed = hub.list().unwrap();
    assert_eq!((listed.len(), listed[0].address.to_string().as_str()), (1, "hf:owner/name"));
    // Without a shard the model is invalid; only the missing shard is downloaded again.
    fs::remove_file(folder.join(names[0])).unwrap();
    assert!(hub.find(&address("hf:owner/name")).is_err() && hub.list().unwrap().is_empty());
    assert_eq!(fetch(&hub, "hf:owner/name").unwrap(), folder);
    assert_eq!(hub.find(&address("hf:owner/name")).unwrap(), folder);
}

#[test]
fn interrupted_downloads_resume_where_they_were_cut() {
    let whole = content(100_000, 5);
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &whole)]);
    let mut rng = Rng::new(7);
    let starts = |requests: Vec<Request>| -> Vec<Option<String>> {
        let at_store = requests.into_iter().filter(|request| request.is_to_store);
        at_store.map(|request| request.header("range").map(str::to_owned)).collect()
    };
    for round in 0..20 {
        let cache = cache("cuts");
        let cut = 1 + rng.below(whole.len() - 1);
        // The connection breaks within one run.
        let body = whole.clone();
        server.replace(move |request| {
            let is_first = request.is_to_store && request.header("range").is_none();
            is_first.then(|| Reply { cut: Some(cut), ..part(&body, request) })
        });
        let path = fetch(&hub(&server, &cache), GGUF).unwrap();
        assert!(fs::read(path).unwrap() == whole, "round {round}: cut at {cut}");
        assert_eq!(starts(server.take_requests()), [None, Some(format!("bytes={cut}-"))], "round {round}");

        // The program ends, and the next run resumes the download.
        server.replace(|_| None);
        let blobs = cache.join("models--owner--name/blobs");
        fs::remove_dir_all(cache.join("models--owner--name")).unwrap();
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(format!("{}.incomplete", sha256(&whole))), &whole[..cut]).unwrap();
        let path = fetch(&hub(&server, &cache), GGUF).unwrap();
        assert!(fs::read(path).unwrap() == whole, "round {round}: left at {cut}");
        assert_eq!(starts(server.take_requests()), [Some(format!("bytes={cut}-"))], "round {round}");
    }
}

#[test]
fn wrong_partial_download_is_replaced() {
    let whole = content(50_000, 6);
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &whole)]);
    let with_left = |left: &[u8], n_downloads: usize| {
        let cache = cache("left");
        let blobs = cache.join("models--owner--name/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(format!("{}.incomplete", sha256(&whole))), left).unwrap();
        let path = fetch(&hub(&server, &cache), GGUF).unwrap();
        assert!(fs::read(path).unwrap() == whole);
        let n = server.take_requests().iter().filter(|request| request.is_to_store).count();
        assert_eq!(n, n_downloads, "{} bytes left", left.len());
    };
    with_left(&whole, 0);
    with_left(&[&whole[..], b"more"].concat(), 1);
    // Partial files of full length or shorter, with wrong contents.
    with_left(&content(50_000, 7), 1);
    with_left(&content(20_000, 7), 2);
    // A server without range requests sends the whole file.
    let body = whole.clone();
    server.replace(move |request| request.is_to_store.then(|| Reply::body(body.clone())));
    with_left(&whole[..20_000], 1);
    server.replace(|request| (request.is_to_store && request.header("range").is_some()).then(|| Reply::status(416)));
    with_left(&whole[..20_000], 2);
}

#[test]
fn wrong_hub_answers_leave_no_files() {
    let whole = content(50_000, 8);
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &whole)]);
    let cache = cache("lies");
    let lie = |reply: Reply| {
        server.replace(move |request| request.is_to_store.then(|| reply.clone()));
        let error = refused(fetch(&hub(&server, &cache), GGUF));
        assert!(!error.is_passing(), "{error}");
        let kept = files(&cache.join("models--owner--name/snapshots"));
        assert!(kept.is_empty(), "{kept:?}");
        assert!(hub(&server, &cache).find(&address(GGUF)).is_err());
        error
    };
    let mut other = whole.clone();
    other[30_000] ^= 1;
    match lie(Reply::body(other.clone())) {
        HubError::Digest { url, expected, found } => {
            assert_eq!((expected, found), (sha256(&whole), sha256(&other)));
            assert!(url.ends_with("/m-Q8_0.gguf"), "{url}");
        }
        error => panic!("{error}"),
    }
    assert_empty(&cache);
    for (reply, size) in [
        (Reply::body(&whole[1..]), 49_999),
        (Reply::body([&whole[..], b"x"].concat()), 50_001),
        (Reply { without_length: true, ..Reply::body([&whole[..], b"x"].concat()) }, 50_001),
    ] {
        match lie(reply) {
            HubError::Size { expected: 50_000, found, .. } => assert_eq!(found, size),
            error => panic!("{error}"),
        }
        assert_empty(&cache);
    }
    // The end of the connection is not the end of the file.
    server.replace({
        let short = Reply { without_length: true, ..Reply::body(&whole[..40_000]) };
        move |request| request.is_to_store.then(|| short.clone())
    });
    let error = refused(fetch(&hub(&server, &cache), GGUF));
    assert!(error.to_string().contains("ends after 40000 of 50000 bytes"), "{error}");
    // A hub that contradicts itself fails before the download.
    for (name, value) in [("X-Linked-Etag", format!("\"{}\"", sha256(b""))), ("X-Linked-Size", "49999".into())] {
        let endpoint = server.endpoint.clone();
        server.replace(move |request| {
            let reply = Reply::status(302).with("Location", format!("{endpoint}/elsewhere")).with(name, value.clone());
            match request.target.as_str() {
                "/elsewhere" => Some(Reply::body(content(50_000, 8))),
                target => target.contains("/resolve/").then_some(reply),
            }
        });
        assert!(matches!(
            refused(fetch(&hub(&server, &cache), GGUF)),
            HubError::Answer { .. } | HubError::Size { found: 49_999, .. }
        ));
    }
    server.replace(|_| None);
    assert!(fs::read(fetch(&hub(&server, &cache), GGUF).unwrap()).unwrap() == whole);
}

#[test]
fn each_http_status_is_a_distinct_error() {
    let server = Server::new(REPO, &[("m-Q8_0.gguf", b"content")]);
    for (is_of_file, status) in [false, true].into_iter().flat_map(|of_file| [401, 403, 404, 418].map(|s| (of_file, s)))
    {
        let cache = cache("status");
        server.replace(move |request| {
            let is_it = request.target.contains("/resolve/") == is_of_file;
            is_it.then(|| Reply::status(status).with("X-Error-Message", "because"))
        });
        let error = refused(fetch(&hub(&server, &cache), GGUF));
        let is_right = match &error {
            HubError::Unauthorized { .. } => status == 401,
            HubError::Forbidden { .. } => status == 403,
            HubError::NotFound { .. } => status == 404,
            HubError::Status { status: 418, .. } => status == 418,
            _ => false,
        };
        let text = error.to_string();
        assert!(is_right && text.contains("(because)") && text.contains(&server.endpoint), "{status}: {text}");
        assert_eq!(server.take_requests().len(), 1 + usize::from(is_of_file), "{status} is not tried again");
        assert_empty(&cache);
    }
    assert!(refused(fetch(&hub(&server, &cache("status")), "hf:owner/other")).to_string().contains("owner/other"));
}

#[test]
fn transient_errors_are_retried_a_bounded_number_of_times() {
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &content(3000, 1))]);
    let waits = |test: &str, is_to_store: bool, reply: Reply, n_failing: usize| {
        let cache = cache(test);
        let (kept, first) = (Arc::new(Mutex::new(Vec::new())), if is_to_store { 2 } else { 0 });
        server.take_requests();
        server.replace(move |request| {
            // Each attempt requests the file from the hub, then from the store.
            let n_before = if is_to_store { request.number.saturating_sub(first) / 2 } else { request.number };
            (request.is_to_store == is_to_store && n_before < n_failing).then(|| reply.clone())
        });
        let waits = Arc::clone(&kept);
        let hub = Hub::new(options(&server, &cache)).unwrap().with_sleep(move |wait| waits.lock().unwrap().push(wait));
        let fetched = fetch(&hub, GGUF);
        (fetched, kept.lock().unwrap().iter().map(Duration::as_millis).collect::<Vec<_>>())
    };
    for is_to_store in [false, true] {
        let (fetched, waited) = waits("429", is_to_store, Reply::status(429).with("Retry-After", "3"), 2);
        assert!(fetched.is_ok() && waited == [3000, 3000], "{fetched:?} {waited:?}");
        let (fetched, waited) = waits("503", is_to_store, Reply::status(503), 3);
        assert!(fetched.is_ok() && waited == [500, 1000, 2000], "{fetched:?} {waited:?}");
        let (fetched, waited) = waits("500", is_to_store, Reply::status(500), 9);
        assert!(matches!(refused(fetched), HubError::Status { status: 500, .. }));
        assert_eq!(waited, [500, 1000, 2000, 4000]);
        let (fetched, waited) = waits("429-long", is_to_store, Reply::status(429).with("Retry-After", "3600"), 9);
        let error = refused(fetched);
        assert!(waited.is_empty() && error.to_string().contains("wait for 3600 s"), "{error} {waited:?}");
        let broken = Reply { cut: Some(0), ..Reply::body(b"{}".to_vec()) };
        let (fetched, waited) = waits("broken", false, broken, 1);
        assert!(fetched.is_ok() && waited == [500], "{fetched:?} {waited:?}");
    }
}

#[test]
fn token_is_sent_to_the_hub_alone() {
    let whole = content(3000, 1);
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &whole)]);
    // A renamed repository: the hub redirects to another of its own addresses.
    server.replace(|request| {
        let is_old = request.target.starts_with("/api/") && !request.target.ends_with("&moved");
        is_old.then(|| Reply::status(307).with("Location", format!("{}&moved", request.target)))
    });
    let cache = cache("token");
    let options = HubOptions { token: Some("hf_secret\n".into()), ..options(&server, &cache) };
    fetch(&Hub::new(options.clone()).unwrap(), GGUF).unwrap();
    let requests = server.take_requests();
    assert_eq!(requests.len(), 4);
    for request in requests {
        let sent = request.header("authorization");
        assert_eq!(sent, (!request.is_to_store).then_some("Bearer hf_secret"), "{request:?}");
    }
    let odd = HubOptions { token: Some("hf_sec\nret".into()), ..options.clone() };
    let error = Hub::new(odd).err().unwrap().to_string();
    assert!(error.contains("HF_TOKEN") && !error.contains("sec"), "{error}");
    // Errors do not contain it either.
    server.replace(|_| Some(Reply::status(401)));
    let error = refused(fetch(&Hub::new(options).unwrap(), GGUF));
    assert!(!error.to_string().contains("secret") && !format!("{error:?}").contains("secret"), "{error}");
    server.replace(|request| Some(Reply::status(302).with("Location", request.target.clone())));
    assert!(refused(fetch(&hub(&server, &cache), GGUF)).to_string().contains("redirects"));
}

#[test]
fn offline_mode_uses_the_cache_alone() {
    let whole = content(3000, 1);
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &whole)]);
    let cache = cache("offline");
    let offline = Hub::new(HubOptions { is_offline: true, ..options(&server, &cache) }).unwrap();
    match refused(fetch(&offline, GGUF)) {
        HubError::Offline { address, cache: named, .. } => assert_eq!((address.as_str(), named), (GGUF, cache.clone())),
        error => panic!("{error}"),
    }
    let nowhere = HubOptions { endpoint: "http://127.0.0.1:9".into(), ..options(&server, &cache) };
    let nowhere = Hub::new(nowhere).unwrap().with_sleep(|_| {});
    let mut notices = Vec::new();
    let fetched = nowhere.fetch(&GGUF.parse().unwrap(), &mut |event| notices.push(format!("{event:?}")));
    assert!(matches!(refused(fetched), HubError::Unreachable { .. }));
    assert!(notices.len() == 1 && notices[0].contains("trying again"), "{notices:?}");
    assert!(server.take_requests().is_empty());

    let path = fetch(&hub(&server, &cache), GGUF).unwrap();
    server.take_requests();
    for text in [GGUF, "hf:owner/name", "hf:owner/name@main", &format!("{GGUF}@{COMMIT}"), "hf:owner/name/m-Q8_0.gguf"]
    {
        assert_eq!(fetch(&offline, text).unwrap(), path, "{text}");
        let mut notices = Vec::new();
        let on_event = &mut |event: Event<'_>| notices.push(format!("{event:?}"));
        assert_eq!(nowhere.fetch(&address(text), on_event).unwrap(), path, "{text}");
        assert!(notices.len() == 1 && notices[0].contains("using the cached copy"), "{notices:?}");
    }
    assert!(server.take_requests().is_empty());
    // A rate-limited hub does not prevent use of the cache; a hub that denies access does.
    server.replace(|_| Some(Reply::status(429)));
    assert_eq!(fetch(&hub(&server, &cache), GGUF).unwrap(), path);
    assert_eq!(server.take_requests().len(), 1);
    server.replace(|_| Some(Reply::status(404)));
    assert!(matches!(refused(fetch(&hub(&server, &cache), GGUF)), HubError::NotFound { .. }));
    let error = refused(fetch(&offline, "hf:owner/name:Q4_0"));
    assert!(error.to_string().contains("no Q4_0; there: Q8_0"), "{error}");
    // A link without its blob is not a copy.
    fs::remove_file(cache.join("models--owner--name/blobs").join(sha256(&whole))).unwrap();
    assert!(matches!(refused(fetch(&offline, GGUF)), HubError::Offline { .. }));
}

#[test]
fn malformed_file_list_is_refused() {
    let server = Server::new(REPO, &[]);
    let cache = cache("lists");
    let refuse = |list: Value, expected: &str| {
        let body = list.to_string();
        server.replace(move |_| Some(Reply::body(body.clone())));
        match refused(fetch(&hub(&server, &cache), "hf:owner/name")) {
            HubError::Answer { field, found, .. } => assert!(format!("{field}: {found}").contains(expected), "{found}"),
            error => panic!("{list}: {error}"),
        }
        assert_eq!(server.take_requests().len(), 1, "nothing is asked for afterwards");
        assert_empty(&cache);
    };
    let of = |path: &str| listing(COMMIT, &BTreeMap::from([(path.to_owned(), vec![1])]));
    for path in [
        "../m.gguf",
        "a/../../m.gguf",
        "/m.gguf",
        "..\\m.gguf",
        "C:m.gguf",
        "a//m.gguf",
        "./m.gguf",
        "",
        "m\u{0}.gguf",
        "m.gguf/",
    ] {
        refuse(of(path), "rfilename");
    }
    refuse(json!([]), "the list of files");
    refuse(json!({ "sha": COMMIT }), "siblings");
    refuse(json!({ "sha": COMMIT, "siblings": [{ "size": 1 }] }), "rfilename");
    refuse(json!({ "sha": "../../../../elsewhere", "siblings": [] }), "sha: ");
    let mut list = of("m.gguf");
    list["siblings"][0]["lfs"]["sha256"] = "../../elsewhere".into();
    refuse(list, "lfs.sha256");
    server.replace(|_| Some(Reply::body("<html>")));
    assert!(refused(fetch(&hub(&server, &cache), GGUF)).to_string().contains("expected JSON"));
}

#[test]
fn missing_digests_are_taken_from_headers() {
    let whole = content(3000, 1);
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &whole), ("config.json", b"{}")]);
    server.replace(|request| {
        let is_list = request.target.starts_with("/api/");
        let siblings = json!([{ "rfilename": "m-Q8_0.gguf" }]);
        is_list.then(|| Reply::body(json!({ "sha": COMMIT, "siblings": siblings }).to_string()))
    });
    let cache = cache("headers");
    let path = fetch(&hub(&server, &cache), GGUF).unwrap();
    assert!(fs::read(path).unwrap() == whole);
    let methods: Vec<String> = server.take_downloads().into_iter().map(|request| request.method).collect();
    assert_eq!(methods, ["HEAD", "GET", "GET"]);
}

#[test]
fn files_downloaded_by_other_programs_are_reused() {
    let (whole, config) = (content(3000, 1), b"{\"a\":1}");
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &whole), ("sub/config.json", config)]);
    let cache = cache("others");
    let repo = cache.join("models--owner--name");
    let snapshot = repo.join("snapshots").join(COMMIT);
    for folder in [repo.join("blobs"), repo.join("refs"), snapshot.clone()] {
        fs::create_dir_all(folder).unwrap();
    }
    fs::write(repo.join("refs/main"), format!("{COMMIT}\n")).unwrap();
    // Plain files instead of links, as on Windows.
    fs::write(snapshot.join("m-Q8_0.gguf"), &whole).unwrap();
    let offline = Hub::new(HubOptions { is_offline: true, ..options(&server, &cache) }).unwrap();
    assert_eq!(fetch(&offline, GGUF).unwrap(), snapshot.join("m-Q8_0.gguf"));
    assert_eq!(fetch(&hub(&server, &cache), GGUF).unwrap(), snapshot.join("m-Q8_0.gguf"));
    assert!(server.take_downloads().is_empty());
    // A file of another size is rejected.
    fs::write(snapshot.join("m-Q8_0.gguf"), b"half").unwrap();
    assert!(fs::read(fetch(&hub(&server, &cache), GGUF).unwrap()).unwrap() == whole);
    assert_eq!(server.take_downloads().len(), 2);
    // A blob without a link, needed by another commit's snapshot.
    fs::remove_dir_all(&snapshot).unwrap();
    assert!(fs::read(fetch(&hub(&server, &cache), GGUF).unwrap()).unwrap() == whole);
    assert!(server.take_downloads().is_empty());
    // A blob without a partial suffix but too short is rejected too.
    let blob = repo.join("blobs").join(sha256(&whole));
    fs::write(&blob, &whole[..7]).unwrap();
    assert!(fs::read(fetch(&hub(&server, &cache), GGUF).unwrap()).unwrap() == whole);
}

/// Later runs check sizes only, so only a full checksum detects disk corruption.
#[test]
fn damaged_files_are_found_and_downloaded_again() {
    let (weights, config) = (content(3000, 1), b"{\"a\":1}");
    let folder = [("model.safetensors", &weights[..]), ("config.json", config), ("tokenizer.json", b"{}")];
    let server = Server::new(REPO, &[&folder[..], &[("sub/m-Q8_0.gguf", &content(2000, 2))]].concat());
    let cache = cache("verified");
    let hub = hub(&server, &cache);
    let verify = |hub: &Hub, address: Option<&Address>| hub.verify(address, &mut |_| {}).unwrap();
    assert_eq!(verify(&hub, None).n_files, 0);
    let gguf = fetch(&hub, "hf:owner/name/sub").unwrap();
    let newer = COMMIT.replace('0', "f");
    server.commit(&newer, &[]);
    fetch(&hub, "hf:owner/name/sub").unwrap();
    let good = verify(&hub, Some(&address("hf:owner/name")));
    assert_eq!((good.n_files, good.size_bytes, good.damaged.len(), good.unknown.len()), (1, 2000, 0, 0));

    // Flips one bit of a Git LFS file; link and size are unchanged.
    let blob = fs::canonicalize(&gguf).unwrap();
    let damage = || {
        let mut changed = fs::read(&blob).unwrap();
        changed[1500] ^= 1;
        fs::write(&blob, &changed).unwrap();
        sha256(&changed)
    };
    let changed = damage();
    assert_eq!(fetch(&hub, "hf:owner/name/sub").map(|path| sha256(&fs::read(path).unwrap())).unwrap(), changed);
    server.take_requests();
    let found = verify(&hub, None);
    let [damaged] = &found.damaged[..] else { panic!("{found:?}") };
    assert_eq!((&*damaged.repo, &damaged.path), (REPO, &blob.clone()));
    assert_eq!(damaged.digests, [sha256(&content(2000, 2)), changed]);
    let file = |commit: &str| (commit.to_owned(), "sub/m-Q8_0.gguf".to_owned());
    assert_eq!(damaged.files, [file(COMMIT), file(&newer)]);
    assert!(damaged.restored.is_ok() && fs::read(&gguf).unwrap() == content(2000, 2));
    assert_eq!(server.take_downloads().iter().filter(|request| request.is_to_store).count(), 1);
    assert!(verify(&hub, None).damaged.is_empty());
    // Without a network the file is removed, so that it cannot be used.
    damage();
    let offline = Hub::new(HubOptions { is_offline: true, ..options(&server, &cache) }).unwrap();
    let found = verify(&offline, None);
    assert!(matches!(found.damaged[0].restored, Err(Error::Hub(HubError::Offline { .. }))), "{found:?}");
    assert!(!blob.exists() && offline.find(&address("hf:owner/name/sub")).is_err());

    // A non-LFS file that is not a link; the hub states its checksum.
    let snapshot = cache.join("models--owner--name/snapshots").join(&newer);
    let config = snapshot.join("config.json");
    let _ = fs::remove_dir_all(&cache);
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(&config, b"{\"a\":2}").unwrap();
    fs::write(snapshot.join("own.txt"), b"mine").unwrap();
    let unknown = verify(&offline, None);
    assert_eq!((unknown.n_files, unknown.unknown), (0, vec![config.clone(), snapshot.join("own.txt")]));
    let found = verify(&hub, None);
    assert_eq!((found.n_files, found.unknown), (1, vec![snapshot.join("own.txt")]));
    assert!(found.damaged[0].restored.is_ok() && fs::read(&config).unwrap() == b"{\"a\":1}", "{:?}", found.damaged);
}

/// Concurrent programs, with blobs present and links missing, as after an update of another file.
#[test]
fn concurrent_starts_share_the_cache() {
    let whole = content(3000, 1);
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &whole)]);
    let cache = cache("starts");
    let path = fetch(&hub(&server, &cache), GGUF).unwrap();
    let (barrier, failed) = (std::sync::Barrier::new(6), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let (server, cache, path, barrier, failed) = (&server, &cache, &path, &barrier, &failed);
            scope.spawn(move || {
                let hub = hub(server, cache);
                for _ in 0..40 {
                    if thread == 0 {
                        fs::remove_file(path).unwrap();
                    }
                    barrier.wait();
                    match fetch(&hub, GGUF).map(|path| fs::read(path).unwrap_or_default().len()) {
                        Ok(3000) => {}
                        other => failed.lock().unwrap().push(format!("{other:?}")),
                    }
                    barrier.wait();
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} of 240 failed: {}", failed.len(), failed[0]);
    assert!(server.take_downloads().len() == 2);
}

/// Over HTTP anyone on the way to a hub can read the token. The address of all interfaces stands for another machine.
#[cfg(target_os = "linux")]
#[test]
fn sending_a_token_unencrypted_gives_a_warning() {
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &content(3000, 1))]);
    let elsewhere = server.endpoint.replace("127.0.0.1", "0.0.0.0");
    let cache = cache("clear");
    for (endpoint, token, is_warned) in
        [(&elsewhere, Some("hf_x"), true), (&elsewhere, None, false), (&server.endpoint, Some("hf_x"), false)]
    {
        let options =
            HubOptions { endpoint: endpoint.clone(), token: token.map(str::to_owned), ..options(&server, &cache) };
        let mut notices = Vec::new();
        let on_event =
            &mut |event: Event<'_>| notices.extend(matches!(event, Event::Notice(_)).then(|| format!("{event:?}")));
        Hub::new(options).unwrap().fetch(&address(GGUF), on_event).unwrap();
        let warned = notices.iter().filter(|notice| notice.contains("without encryption") && notice.contains(endpoint));
        assert_eq!(warned.count(), usize::from(is_warned), "{notices:?}");
        assert!(notices.iter().all(|notice| !notice.contains("hf_x")));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn full_disk_is_reported_with_the_missing_bytes() {
    let whole = content(3000, 1);
    let server = Server::new(REPO, &[("m-Q8_0.gguf", &whole)]);
    let cache = cache("full");
    let blobs = cache.join("models--owner--name/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(format!("{}.incomplete", sha256(&whole)));
    std::os::unix::fs::symlink("/dev/full", &part).unwrap();
    match refused(fetch(&hub(&server, &cache), GGUF)) {
        HubError::DiskFull { path, missing_bytes: 3000 } => assert_eq!(path, part),
        error => panic!("{error}"),
    }
}

#[test]
fn removing_a_model_keeps_files_that_others_need() {
    let (small, large, shared) = (content(1000, 1), content(3000, 2), content(500, 3));
    let server = Server::new(REPO, &[("m-Q4_0.gguf", &small), ("m-Q8_0.gguf", &large), ("x-F16.gguf", &shared)]);
    let cache = cache("removed");
    let hub = hub(&server, &cache);
    for text in ["hf:owner/name:Q4_0", GGUF, "hf:owner/name:F16"] {
        fetch(&hub, text).unwrap();
    }
    let newer = COMMIT.replace('0', "f");
    server.commit(&newer, &[]);
    fetch(&hub, "hf:owner/name:F16").unwrap();
    let addresses = || hub.list().unwrap().iter().map(|model| model.address.to_string()).collect::<Vec<_>>();
    let older = |quant: &str| format!("hf:owner/name:{quant}@{COMMIT}");
    assert_eq!(addresses(), [older("Q4_0"), older("Q8_0"), older("F16"), "hf:owner/name:F16".into()]);
    let remove = |text: &str| hub.remove(&address(text));
    assert!(matches!(remove("hf:owner/name"), Err(Error::Hub(HubError::Choice { .. }))));
    for text in ["hf:owner/other", "hf:owner/name:Q5_0", "hf:owner/name:Q8_0@main", "hf:owner/name@other"] {
        assert!(matches!(remove(text), Err(Error::Hub(HubError::NotCached { .. }))), "{text}");
    }
    assert_eq!(remove(&older("F16")).unwrap(), 0, "the newer commit has the same content");
    assert_eq!(remove(GGUF).unwrap(), 3000);
    assert_eq!(addresses(), [older("Q4_0"), "hf:owner/name:F16".into()]);
    assert!(hub.find(&address("hf:owner/name:F16")).is_ok());
    assert_eq!(remove("hf:owner/name:q4_0").unwrap(), 1000);
    // Removing the last model removes the repository's folder.
    fs::write(cache.join("models--owner--name/blobs/0.incomplete"), b"half").unwrap();
    assert_eq!(remove("hf:owner/name").unwrap(), 504);
    assert_empty(&cache);
    assert!(matches!(remove("hf:owner/name"), Err(Error::Hub(HubError::NotCached { .. }))));
}
