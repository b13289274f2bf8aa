//! Kills the program at any point while it writes: a later run finds nothing broken and gives the same output.

use crate::common;
use crate::hub::server;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::Rng;
use server::{Server, sha256};

const BUILTIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/stories.gguf");

/// This test's own, empty folder.
fn folder(test: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("crash").join(test);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// A program that writes its files to a folder.
struct Program<'a> {
    folder: &'a Path,
    args: Vec<String>,
    endpoint: Option<&'a str>,
}

impl Program<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
        command.args(&self.args).env("TILEWRIGHT_CACHE_DIR", self.folder.join("cache"));
        command.env_remove("TILEWRIGHT_DEVICE").env_remove("TILEWRIGHT_DIE_AT").stdin(Stdio::null());
        command.env("HF_HOME", self.folder.join("hub"));
        if let Some(endpoint) = self.endpoint {
            command.env("HF_ENDPOINT", endpoint);
        }
        command
    }

    /// Runs it to its end and requires success.
    fn run(&self) -> Output {
        let output = self.command().output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{:?}: {said}", self.args);
        assert!(!said.contains("is ignored") && !said.contains("warning"), "{said}");
        output
    }

    /// Kills it at the `n`-th write point. False if there are fewer.
    fn dies_at(&self, n: usize) -> bool {
        let output = self.command().env("TILEWRIGHT_DIE_AT", n.to_string()).output().unwrap();
        assert!(output.status.success() || output.status.code().is_none(), "{output:?}");
        !output.status.success()
    }

    /// Kills it after some time. False if it had already ended.
    fn killed_after(&self, time: Duration) -> bool {
        let mut child = self.command().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(time);
        child.kill().unwrap();
        !child.wait().unwrap().success()
    }
}

/// Kills it at every point, or at some; after each, a new run must succeed.
fn dies_anywhere(program: &Program<'_>, check: impl Fn(&Output), picked: impl Fn(usize) -> bool) {
    let fresh = || {
        let _ = fs::remove_dir_all(program.folder);
        fs::create_dir_all(program.folder).unwrap();
    };
    fresh();
    check(&program.run());
    let mut n_died = 0;
    for n in 1.. {
        if !picked(n) && n < 200 {
            continue;
        }
        fresh();
        if !program.dies_at(n) {
            break;
        }
        n_died += 1;
        check(&program.run());
        // The files written by that run are valid too.
        check(&program.run());
    }
    println!("died {n_died} times: {:?}", program.args);
    assert!(n_died > 2);
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn story<'a>(folder: &'a Path, device: &str) -> Program<'a> {
    let session = folder.join("story.session").display().to_string();
    let args = ["run", BUILTIN, "--device", device, "--temperature", "0", "-n", "4", "--session", &session];
    Program { folder, args: args.map(str::to_owned).into(), endpoint: None }
}

#[test]
fn killed_save_leaves_the_old_or_complete_session() {
    let folder = folder("session");
    let program = story(&folder, "cpu");
    let whole = text(&program.run());
    let picked = |n| common::is_full() || n % 3 == 2;
    dies_anywhere(&program, |output| assert_eq!(text(output), whole), picked);
}

/// Pipelines, self-test results, and a session, on a GPU.
#[test]
fn killed_write_leaves_the_old_or_complete_cache() {
    if !common::is_full() {
        return;
    }
    if common::gpu(None).is_none() {
        return;
    }
    let folder = folder("caches");
    let program = story(&folder, "gpu");
    let whole = text(&program.run());
    assert!(fs::read_dir(folder.join("cache")).unwrap().count() > 1, "pipelines and a tuning");
    dies_anywhere(&program, |output| assert_eq!(text(output), whole), |_| true);
}

#[test]
fn killed_download_resumes_or_is_complete() {
    let mut rng = Rng::new(1);
    let content: Vec<u8> = (0..900_000).map(|_| rng.word() as u8).collect();
    let server = Server::new("owner/name", &[("m-Q8_0.gguf", &content)]);
    let folder = folder("download");
    let program = Program {
        folder: &folder,
        args: ["pull", "hf:owner/name:Q8_0"].map(str::to_owned).into(),
        endpoint: Some(&server.endpoint),
    };
    let check = |output: &Output| {
        let path = text(output);
        assert_eq!(sha256(&fs::read(path.trim()).unwrap()), sha256(&content), "{path}");
    };
    dies_anywhere(&program, check, |n| common::is_full() || n % 4 == 1);
}

/// `kill -9` at arbitrary times: while loading, computing or writing. The next run succeeds in any case.
#[test]
fn run_after_a_kill_at_any_time_succeeds() {
    let devices: &[&str] = if common::is_full() { &["cpu", "gpu"] } else { &["cpu"] };
    let n = if common::is_full() { 25 } else { 3 };
    for device in devices {
        if *device == "gpu" && common::gpu(None).is_none() {
            continue;
        }
        let folder = folder(device);
        let program = story(&folder, device);
        let start = Instant::now();
        let whole = text(&program.run());
        let (lasts, mut rng, mut n_killed) = (start.elapsed(), Rng::new(7), 0);
        for i in 0..n {
            let share = rng.unit();
            n_killed += u32::from(program.killed_after(lasts.mul_f64(share)));
            if i % 5 == 4 || i + 1 == n {
                assert_eq!(text(&program.run()), whole);
                // The next run starts with empty files.
                fs::remove_dir_all(&folder).unwrap();
                fs::create_dir_all(&folder).unwrap();
            }
        }
        println!("killed {n_killed} of {n} times on {device}");
    }
}
