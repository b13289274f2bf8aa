//! Models by address on the command line, from a test hub to files in a cache.

#[path = "../../../tests/hub/server.rs"]
#[allow(dead_code)] // tests of the library use all of it
pub mod server;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use server::{COMMIT, GGUF, REPO, Reply, Server, cache, sha256};

/// The program with this hub, this cache and no other environment.
fn tilewright(server: &Server, home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    for name in
        ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TILEWRIGHT_DEVICE", "HTTP_PROXY", "http_proxy", "ALL_PROXY"]
    {
        command.env_remove(name);
    }
    command.args(args).env("HF_HOME", home).env("HF_ENDPOINT", &server.endpoint).env("TILEWRIGHT_CACHE_DIR", "");
    command.stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn commands_accept_hub_addresses() {
    let stories = fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/stories.gguf")).unwrap();
    let server = Server::new(REPO, &[("stories-Q8_0.gguf", &stories)]);
    let home = cache("commands");
    fs::create_dir_all(&home).unwrap();
    // As written by a Windows editor.
    fs::write(home.join("token"), "\u{feff}hf_kept\r\n").unwrap();
    let succeeds = |args: &[&str]| {
        let output = tilewright(&server, &home, args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        (text(&output.stdout), text(&output.stderr))
    };
    let fails = |args: &[&str], code: i32, expected: &str| {
        let output = tilewright(&server, &home, args);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
        assert!(message.contains(expected) && !message.contains("panicked"), "{args:?}: {message}");
    };
    let path = home.join("hub/models--owner--name/snapshots").join(COMMIT).join("stories-Q8_0.gguf");
    assert!(succeeds(&["list"]).1.contains("no models in"));

    let (printed, said) = succeeds(&["pull", GGUF]);
    assert_eq!(printed.trim_end(), path.to_str().unwrap());
    let lines: Vec<&str> = said.lines().collect();
    assert!(
        lines.len() == 2 && lines[0].starts_with("notice: downloading hf:owner/name:Q8_0: 1 file, 1.2 MiB"),
        "{said}"
    );
    assert!(lines[1].starts_with("notice: downloaded to "), "{said}");
    let requests = server.take_requests();
    assert_eq!(requests[0].header("authorization"), Some("Bearer hf_kept"));

    // Every command with a model argument; nothing is downloaded again.
    let ids = ["--device", "cpu", "--json", "-n", "3", "--temperature", "0"];
    let (generated, _) = succeeds(&[&["run", "hf:owner/name"][..], &ids].concat());
    let generated: Value = serde_json::from_str(&generated).unwrap();
    assert_eq!(generated["token_ids"].as_array().unwrap().len(), 3);
    succeeds(&[&["run", GGUF, "--draft", GGUF][..], &ids].concat());
    assert!(succeeds(&["inspect", GGUF, "--device", "cpu"]).0.contains("general.architecture"));
    succeeds(&["tokenize", "a story", "--model", GGUF]);
    succeeds(&["chat", GGUF, "hi", "--device", "cpu", "--template", "chatml", "-n", "2"]);
    succeeds(&["bench", GGUF, "--device", "cpu", "-p", "8", "-n", "0", "-r", "1", "--json"]);
    let quantised = home.join("out.gguf");
    succeeds(&["quantize", GGUF, quantised.to_str().unwrap(), "--type", "Q4_0"]);
    assert!(server.take_downloads().is_empty());

    let (listed, _) = succeeds(&["list", "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed[0]["address"], GGUF);
    assert_eq!(listed[0]["size_bytes"], stories.len());
    assert_eq!(listed[0]["path"], path.to_str().unwrap());
    assert!(listed[0]["modified_unix_s"].as_u64().unwrap() > 1_700_000_000);
    let (listed, _) = succeeds(&["list"]);
    assert!(listed.starts_with("hf:owner/name:Q8_0  ") && listed.lines().count() == 1, "{listed}");
    assert!(succeeds(&["list", "--available"]).0.contains("hf:Qwen/"));
    let (available, _) = succeeds(&["list", "--available", "--json"]);
    assert!(serde_json::from_str::<Value>(&available).unwrap()[0]["size_bytes"].is_u64());

    let (printed, said) = succeeds(&["pull", "--verify"]);
    assert!(printed.is_empty() && said.contains("notice: 1 file verified, 1.2 MiB"), "{printed}{said}");
    let mut damaged = stories.clone();
    damaged[200_000] ^= 1;
    fs::write(fs::canonicalize(&path).unwrap(), &damaged).unwrap();
    let (printed, said) = succeeds(&["pull", "--verify", GGUF]);
    assert_eq!(printed.trim_end(), path.to_str().unwrap());
    assert!(
        said.contains("stories-Q8_0.gguf of owner/name was damaged: ") && said.contains(&sha256(&damaged)),
        "{said}"
    );
    assert!(said.contains("stories-Q8_0.gguf of owner/name was downloaded again"), "{said}");
    assert!(fs::read(&path).unwrap() == stories);
    fails(&["pull"], 2, "ADDRESS");

    let (freed, _) = succeeds(&["rm", GGUF]);
    assert_eq!(freed, format!("{} bytes freed (1.2 MiB)\n", stories.len()));
    assert!(!path.exists());
    fails(&["rm", GGUF], 1, "hf:owner/name:Q8_0 is not in ");
    fails(&["run", "hf:owner"], 2, "`hf:owner` is not a model address");
    fails(&["rm", "hf:owner"], 2, "is not a model address");
    fails(&["run", "hf:owner/name:Q5_K_M"], 1, "no Q5_K_M; there is Q8_0");
    fails(&["embed", "hf:owner/other"], 3, "status 404");
    fails(&["rerank", "hf:owner", "--query", "x"], 2, "is not a model address");
    server.replace(|_| Some(Reply::status(403)));
    fails(&["run", GGUF], 1, "the model's page says how to get access");
    let mut offline = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    let output = offline.args(["run", GGUF]).env("HF_HOME", &home).env("HF_HUB_OFFLINE", "1").output().unwrap();
    let message = text(&output.stderr);
    assert!(output.status.code() == Some(1) && message.contains("HF_HUB_OFFLINE is set"), "{message}");
}
