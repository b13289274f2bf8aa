//! A hub for tests: serves the real hub's addresses from memory, and records requests.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use serde_json::{Value, json};
use sha1::Digest;

pub const REPO: &str = "owner/name";
pub const GGUF: &str = "hf:owner/name:Q8_0";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A cache in this test's own, empty folder.
pub fn cache(test: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("hub").join(test);
    let _ = fs::remove_dir_all(&folder);
    folder
}

/// A received request.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// Path and query.
    pub target: String,
    /// Header values by lower-case name.
    pub headers: BTreeMap<String, String>,
    /// Whether it was sent to the store, the host that redirects lead to.
    pub is_to_store: bool,
    /// Number of previous requests to both hosts.
    pub number: usize,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// The response.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Bytes of the body after which the connection breaks.
    pub cut: Option<usize>,
    /// Omits the length, so that the end of the connection ends the body.
    pub without_length: bool,
}

impl Reply {
    pub fn status(status: u16) -> Reply {
        Reply { status, ..Reply::default() }
    }

    pub fn body(body: impl Into<Vec<u8>>) -> Reply {
        Reply { status: 200, body: body.into(), ..Reply::default() }
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Reply {
        self.headers.push((name, value.into()));
        self
    }
}

/// Overrides the usual responses.
type Override = Box<dyn Fn(&Request) -> Option<Reply> + Send>;

#[derive(Default)]
struct State {
    /// Contents by path, for each repository. Weights are in LFS.
    repos: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    commit: String,
    requests: Vec<Request>,
    replace: Option<Override>,
}

/// A running hub and its store.
pub struct Server {
    state: Arc<Mutex<State>>,
    pub endpoint: String,
}

impl Server {
    /// A hub with one repository.
    pub fn new(repo: &str, files: &[(&str, &[u8])]) -> Server {
        let files = files.iter().map(|(path, content)| (path.to_string(), content.to_vec())).collect();
        let state = State { repos: BTreeMap::from([(repo.into(), files)]), commit: COMMIT.into(), ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let hosts = [false, true].map(|is_store| (is_store, TcpListener::bind("127.0.0.1:0").unwrap()));
        let [endpoint, store] = hosts.each_ref().map(|(_, host)| format!("http://{}", host.local_addr().unwrap()));
        for (is_store, host) in hosts {
            let (state, store) = (Arc::clone(&state), store.clone());
            thread::spawn(move || {
                for stream in host.incoming().flatten() {
                    let (state, store) = (Arc::clone(&state), store.clone());
                    thread::spawn(move || serve(stream, &state, is_store, &store));
                }
            });
        }
        Server { state, endpoint }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Overrides responses with those of `replace`, if any.
    pub fn replace(&self, replace: impl Fn(&Request) -> Option<Reply> + Send + 'static) {
        self.state().replace = Some(Box::new(replace));
    }

    /// Makes another commit the latest, with these additional files.
    pub fn commit(&self, commit: &str, files: &[(&str, &[u8])]) {
        let mut state = self.state();
        state.commit = commit.into();
        let repo = state.repos.values_mut().next().unwrap();
        repo.extend(files.iter().map(|(path, content)| (path.to_string(), content.to_vec())));
    }

    /// The requests since the last call.
    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state().requests)
    }

    /// Of these, the requests for contents.
    pub fn take_downloads(&self) -> Vec<Request> {
        let mut requests = self.take_requests();
        requests.retain(|request| request.is_to_store || request.target.contains("/resolve/"));
        requests
    }
}

fn serve(mut stream: TcpStream, state: &Mutex<State>, is_to_store: bool, store: &str) {
    let Some(mut request) = read(&stream) else { return };
    request.is_to_store = is_to_store;
    let reply = {
        let mut state = state.lock().unwrap();
        request.number = state.requests.len();
        state.requests.push(request.clone());
        let replaced = state.replace.as_ref().and_then(|replace| replace(&request));
        replaced.unwrap_or_else(|| answer(&state, &request, store))
    };
    let Reply { status, headers, body, cut, without_length } = reply;
    let mut head = format!("HTTP/1.1 {status} x\r\nConnection: close\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !without_length {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    let sent = if request.method == "HEAD" { &[] } else { &body[..cut.unwrap_or(body.len())] };
    // The client may have disconnected.
    let _ = stream.write_all(format!("{head}\r\n").as_bytes()).and_then(|()| stream.write_all(sent));
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream.take(64 << 10)).lines();
    let first = lines.next()?.ok()?;
    let mut words = first.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line.ok()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    Some(Request { method, target, headers, is_to_store: false, number: 0 })
}

/// Responses of the hub and its store.
fn answer(state: &State, request: &Request, store: &str) -> Reply {
    let contents = state.repos.values().flat_map(BTreeMap::values);
    if request.is_to_store {
        let named = |content: &&Vec<u8>| request.target == format!("/store/{}", sha256(content));
        let mut contents = contents;
        return contents.find(named).map_or(Reply::status(404), |content| part(content, request));
    }
    for (repo, files) in &state.repos {
        if request.target.starts_with(&format!("/api/models/{repo}/revision/")) {
            return Reply::body(listing(&state.commit, files).to_string());
        }
        let Some(rest) = request.target.strip_prefix(&format!("/{repo}/resolve/")) else { continue };
        let Some((path, content)) = files.iter().find(|(path, _)| rest == format!("{}/{path}", state.commit)) else {
            return Reply::status(404).with("X-Error-Message", "Entry not found");
        };
        if !is_lfs(path) {
            return part(content, request).with("ETag", format!("\"{}\"", git(content)));
        }
        let sha256 = sha256(content);
        return Reply::status(302)
            .with("Location", format!("{store}/store/{sha256}"))
            .with("X-Linked-Size", content.len().to_string())
            .with("X-Linked-ETag", format!("\"{sha256}\""));
    }
    Reply::status(404).with("X-Error-Message", "Repository not found")
}

/// A file's contents, or the requested range.
pub fn part(content: &[u8], request: &Request) -> Reply {
    let start = request.header("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    match start {
        None => Reply::body(content),
        Some(start) if start < content.len() => Reply { status: 206, ..Reply::body(&content[start..]) }
            .with("Content-Range", format!("bytes {start}-{}/{}", content.len() - 1, content.len())),
        Some(_) => Reply::status(416),
    }
}

/// The list of a revision's files.
pub fn listing(commit: &str, files: &BTreeMap<String, Vec<u8>>) -> Value {
    let sibling = |(path, content): (&String, &Vec<u8>)| match is_lfs(path) {
        true => json!({
            "rfilename": path,
            "size": content.len(),
            // The pointer's hash.
            "blobId": git(b"pointer"),
            "lfs": { "sha256": sha256(content), "size": content.len(), "pointerSize": 134 },
        }),
        false => json!({ "rfilename": path, "size": content.len(), "blobId": git(content) }),
    };
    json!({ "id": "a/b", "sha": commit, "siblings": files.iter().map(sibling).collect::<Vec<_>>() })
}

fn is_lfs(path: &str) -> bool {
    [".gguf", ".safetensors", ".bin"].iter().any(|end| path.ends_with(end))
}

pub fn sha256(content: &[u8]) -> String {
    hex(&sha2::Sha256::digest(content))
}

/// Git's hash of a file.
pub fn git(content: &[u8]) -> String {
    hex(&sha1::Sha1::digest([format!("blob {}\0", content.len()).as_bytes(), content].concat()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
