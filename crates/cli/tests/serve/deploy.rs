//! The deployment files under `examples/`: their commands start a server that does what the files say of it.

use std::path::{Path, PathBuf};
use std::process::Command;

use tilewright::load::ModelFile;

use super::client::{get, send};
use super::program::{Program, command};

fn example(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name)).unwrap()
}

/// A folder with a model and a key, in place of the paths in the files.
fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("deploy");
    std::fs::create_dir_all(&folder).unwrap();
    // Tests beside this one read them.
    tilewright::replace_file(&folder.join("model.gguf"), ModelFile::BUILTIN).unwrap();
    tilewright::replace_file(&folder.join("key"), b"the key\n").unwrap();
    folder
}

/// Starts `serve` with a file's arguments, its paths and port replaced.
fn start(args: &[String]) -> Program {
    let folder = folder();
    let local = |arg: &String| match arg.as_str() {
        arg if arg.ends_with("/model.gguf") => folder.join("model.gguf").display().to_string(),
        arg if arg.starts_with('/') && arg.ends_with("/key") => folder.join("key").display().to_string(),
        "8080" => "0".into(),
        arg => arg.into(),
    };
    let args: Vec<String> = args.iter().map(local).collect();
    assert_eq!(args.first().map(String::as_str), Some("serve"));
    let mut args: Vec<&str> = args[1..].iter().map(String::as_str).collect();
    if !args.contains(&"--port") {
        args.extend(["--port", "0"]);
    }
    Program::start(command(&args))
}

/// Whether the server takes requests for this host with the key only.
fn assert_guarded(program: &Program, host: &str) {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], program.address.port()));
    let status = |headers: &[(&str, &str)]| send(address, "GET", "/v1/models", headers, b"").status;
    assert_eq!(status(&[("host", host)]), 401);
    assert_eq!(status(&[("host", host), ("authorization", "Bearer the key")]), 200);
    assert_eq!(get(address, "/health").status, 200);
}

/// The words of a YAML list: in one line with brackets, or a line for each.
fn words(text: &str, key: &str) -> Vec<String> {
    let plain = |word: &str| word.trim().trim_matches('"').to_owned();
    let at = text.find(&format!("{key}:")).unwrap_or_else(|| panic!("{key}")) + key.len() + 1;
    let rest = &text[at..];
    match rest.trim_start_matches(' ').strip_prefix('[') {
        Some(list) => list.split(']').next().unwrap().split(',').map(plain).collect(),
        None => {
            let lines = rest.lines().skip(1).map(str::trim).filter(|line| !line.starts_with('#'));
            lines.map_while(|line| line.strip_prefix("- ")).map(plain).collect()
        }
    }
}

#[test]
fn kubernetes_files_start_a_guarded_server() {
    for name in ["kubernetes/cpu.yaml", "kubernetes/gpu.yaml"] {
        let program = start(&words(&example(name), "args"));
        assert_guarded(&program, "tilewright");
        assert_guarded(&program, "127.0.0.1");
    }
}

/// The container's health check succeeds once the server is ready, and fails without a server.
#[test]
fn compose_file_starts_a_guarded_server() {
    let file = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Containerfile")).unwrap();
    let check = words(
        &file.replace("HEALTHCHECK", "\nHEALTHCHECK").replace("CMD [\"tilewright\", \"ps\"", "check: [\"ps\""),
        "check",
    );
    assert_eq!(check, ["ps", "--health"]);
    let healthy = |port: u16| {
        let port = port.to_string();
        let output = super::program::command_of(&["ps", "--health", "--port", &port]).output().unwrap();
        output.status.success() && String::from_utf8(output.stdout).unwrap().contains("\"ok\"")
    };
    assert!(!healthy(9));
    let program = start(&words(&example("compose/compose.yaml"), "command"));
    assert_guarded(&program, "tilewright:8080");
    assert!(healthy(program.address.port()));
}

/// Also the reload of changed keys, and the stop.
#[cfg(unix)]
#[test]
fn systemd_unit_starts_reloads_and_stops_a_server() {
    let unit = example("systemd/tilewright.service");
    let line = |key: &str| unit.lines().find_map(|line| line.strip_prefix(&format!("{key}="))).unwrap();
    let args: Vec<String> = line("ExecStart").split(' ').map(str::to_owned).collect();
    assert_eq!(args[0], "/usr/local/bin/tilewright");
    let program = start(&args[1..]);
    assert_guarded(&program, "localhost");
    let reload = line("ExecReload").replace("$MAINPID", &program.id().to_string());
    let words: Vec<&str> = reload.split(' ').collect();
    assert!(Command::new(words[0]).args(&words[1..]).status().unwrap().success());
    // A signal that is not handled would have ended it.
    assert_guarded(&program, "localhost");
    let seconds = |key: &str, text: &str| -> u32 {
        text.split(key)
            .nth(1)
            .unwrap()
            .trim_start_matches([' ', '='])
            .split_whitespace()
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    assert!(seconds("TimeoutStopSec", &unit) > seconds("--drain", &unit));
    program.end();
}
