//! The command line as a user types it.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use serde_json::{Value as Json, json};
use tilewright::load::ModelFile;
use tilewright::{Device, GenerateOptions, LoadOptions, Model};

use super::client::{done, get, post, send};
use super::common;

pub struct Program {
    pub address: SocketAddr,
    /// Output before it was ready.
    before: String,
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
}

impl Program {
    /// Starts a server and waits until it is ready.
    pub fn start(mut command: Command) -> Program {
        let mut child = command.spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let (mut before, mut line) = (String::new(), String::new());
        while stderr.read_line(&mut line).unwrap() > 0 && line != "ready\n" {
            eprint!("{line}");
            before += &line;
            line.clear();
        }
        let address = before.lines().find(|line| line.starts_with("serving ")).and_then(|line| line.split_once("://"));
        let address = address.unwrap_or_else(|| panic!("{before}")).1.parse().unwrap();
        Program { address, before, child, stderr }
    }

    /// Its process id.
    #[cfg(unix)]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Ends it with a signal and returns its output. Windows has no signal for a single process.
    pub fn end(mut self) -> String {
        if cfg!(windows) {
            drop(self.child.stdin.take());
        } else {
            assert!(Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap().success());
        }
        assert!(self.child.wait().unwrap().success());
        let mut log = String::new();
        self.stderr.read_to_string(&mut log).unwrap();
        log
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

pub fn command(args: &[&str]) -> Command {
    let mut command = command_of(&[&["serve"], args].concat());
    if cfg!(windows) {
        command.arg("--end-with-stdin").stdin(Stdio::piped());
    }
    command
}

/// The program on the CPU, without a cache.
pub fn command_of(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("TILEWRIGHT_CACHE_DIR", "").env("TILEWRIGHT_DEVICE", "cpu").env_remove("TILEWRIGHT_API_KEY");
    command.env_remove("OTEL_EXPORTER_OTLP_ENDPOINT");
    command
}

#[test]
fn serve_ends_at_a_signal_and_logs_no_message_content() {
    let program =
        Program::start(command(&["--port", "0", "--template", "chatml", "--log-requests", "--parallel", "2"]));
    let address = program.address;
    let asked =
        json!({"model": "stories", "messages": [{"role": "user", "content": "a secret word"}], "max_tokens": 8});
    let answer = done(address, "/v1/chat/completions", asked).json();
    let named = send(address, "GET", "/v1/models", &[("x-request-id", "mine")], b"");
    assert_eq!(named.header("x-request-id"), Some("mine"));
    assert_eq!(get(address, "/none").status, 404);
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert_eq!(named.json()["data"][0]["id"], json!("stories"));
    let log = program.end();
    let told: Vec<Json> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let (first, usage) = (&told[0], &answer["usage"]);
    assert_eq!((&first["path"], &first["status"]), (&json!("/v1/chat/completions"), &json!(200)), "{log}");
    assert_eq!((&first["model"], &first["client"]), (&json!("stories"), &json!("127.0.0.1")), "{log}");
    for name in ["prompt_tokens", "completion_tokens"] {
        assert_eq!(first[name], usage[name], "{log}");
    }
    assert!(first["id"].as_str().unwrap().starts_with("req_") && first["first_token_ms"].is_u64(), "{log}");
    assert_eq!(told.len(), 3, "{log}");
    assert_eq!((&told[2]["error"], &told[2]["path"]), (&json!("unknown_url"), &json!("/none")), "{log}");
    assert!(!log.contains("secret") && !log.contains(&text), "{log}");
}

#[test]
fn serve_says_what_it_runs_on() {
    let program = Program::start(command(&["--port", "0", "--host", "localhost", "--parallel", "3", "--ctx", "256"]));
    let said = &program.before;
    for part in [
        "access: this machine only, no API key, no TLS",
        "model `stories`: context 256, 3 sequences at a time, KV cache of 768 tokens, no chat template: continues the text of \
         messages (--template NAME chooses one); memory ",
        "(cpu): ",
    ] {
        assert!(said.contains(part), "{said}");
    }
    let health = get(program.address, "/health").json();
    assert_eq!((&health["status"], &health["devices"][0]["backend"]), (&json!("ok"), &json!("cpu")), "{health}");
    assert!(health["devices"][0]["reason"].is_string() && health["version"].is_string(), "{health}");
    let model = get(program.address, "/v1/models/stories").json();
    let want = [("max_model_len", json!(256)), ("parallel", json!(3)), ("cache_tokens", json!(768))];
    for (name, value) in want {
        assert_eq!(model[name], value, "{model}");
    }
    assert_eq!((&model["meta"]["n_ctx_train"], &model["status"]), (&json!(512), &json!("loaded")), "{model}");
    assert!(model["memory"]["weights_bytes"].as_u64().unwrap() > 100_000, "{model}");
}

/// A model that cannot be loaded ends the server only if it is the only one.
#[test]
fn damaged_model_does_not_end_the_others() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let [good, bad] = ["served-good.gguf", "served-bad.gguf"].map(|name| folder.join(name).display().to_string());
    std::fs::write(&good, ModelFile::BUILTIN).unwrap();
    std::fs::write(&bad, &ModelFile::BUILTIN[..ModelFile::BUILTIN.len() / 2]).unwrap();
    let program = Program::start(command(&["--port", "0", &bad, &good]));
    assert!(program.before.contains("error: served-bad: "), "{}", program.before);
    let health = get(program.address, "/health").json();
    assert_eq!((&health["status"], &health["failed"]), (&json!("degraded"), &json!(1)), "{health}");
    done(program.address, "/v1/completions", json!({"model": "served-good", "prompt": "Once", "max_tokens": 1}));
    let refused = post(program.address, "/v1/completions", &json!({"model": "served-bad", "prompt": "Once"}));
    assert_eq!(refused.status, 500);
    let output = command(&["--port", "0", &bad]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && error.contains("error: "), "{error}");
}

/// A repeatable flag is a list in its variable; `ps` asks the server for the models that it has loaded.
#[test]
fn variables_set_flags_and_ps_lists_loaded_models() {
    let mut command = command(&["--port", "0"]);
    command.env("TILEWRIGHT_CTX", "128").env("TILEWRIGHT_ALLOW_HOST", "one.example,two.example");
    let program = Program::start({
        command.env("TILEWRIGHT_LOG_REQUESTS", "1");
        command
    });
    let port = program.address.port().to_string();
    let told = |args: &[&str]| {
        let output = command_of(&[&["ps", "--port", &port], args].concat()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let table = told(&["--host", "0.0.0.0"]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(rows.len() == 2 && rows[0][..3] == ["NAME", "SIZE", "CONTEXT"], "{table}");
    assert!(rows[1][0].starts_with("stories") && rows[1].contains(&"128"), "{table}");
    let json: Json = serde_json::from_str(&told(&["--json"])).unwrap();
    assert_eq!(json["models"].as_array().unwrap().len(), 1);
    let asked = |host: &str| send(program.address, "GET", "/v1/models", &[("host", host)], &[]).status;
    assert_eq!((asked("two.example"), asked("three.example")), (200, 403));
    assert!(program.end().contains("\"status\":403"));
    let output = command_of(&["ps", "--port", "1"]).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && message.contains("is `tilewright serve` running there?"), "{message}");
}

/// With a private authority, or a certificate of its own; `--host` is a name, an address or a URL.
#[test]
fn ps_trusts_a_given_certificate_or_any() {
    let certificate = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/cert.pem");
    let key = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/key.pem");
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/renewed.pem");
    let program = Program::start(command(&["--port", "0", "--lazy", "--tls-cert", certificate, "--tls-key", key]));
    let port = program.address.port().to_string();
    let url = format!("https://localhost:{port}");
    let asked = |args: &[&str]| {
        let output = command_of(&[&["ps", "--health", "--port", &port], args].concat()).output().unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    for args in [
        &["--cacert", certificate][..],
        &["--insecure"],
        &["-k", "--host", "0.0.0.0"],
        &["--cacert", certificate, "--host", "localhost"],
        &["--host", &url, "--cacert", certificate],
    ] {
        let (code, told) = asked(args);
        assert!(code == Some(0) && told.contains("\"status\": \"ok\""), "{args:?}: {told}");
    }
    for (args, code, says) in [
        (&["--host", &url][..], 1, "--cacert FILE names the authority's certificate, -k accepts any"),
        (&["--cacert", other], 1, "--cacert FILE names"),
        (&["--cacert", key], 1, "no certificate in it, expected one in PEM"),
        (&["--cacert", "none.pem"], 1, "--cacert none.pem: "),
        (&["--cacert", certificate, "-k"], 2, "cannot be used with"),
        (&[], 1, "-k or --cacert one with TLS"),
    ] {
        let (found, told) = asked(args);
        assert!(found == Some(code) && told.contains(says), "{args:?}: {told}");
    }
}

/// Editors query a model before they use it, which must not load it.
#[test]
fn lazy_model_is_described_before_it_is_loaded() {
    let program = Program::start(command(&["--port", "0", "--lazy"]));
    assert!(program.before.contains("\ndevice: CPU, ") && program.before.contains(" (cpu): "), "{}", program.before);
    let shown = done(program.address, "/api/show", json!({"model": "stories"})).json();
    let (info, details) = (&shown["model_info"], &shown["details"]);
    assert_eq!(
        (&info["general.architecture"], &info["llama.context_length"]),
        (&json!("llama"), &json!(512)),
        "{shown}"
    );
    assert!(info["general.parameter_count"].as_u64().unwrap() > 500_000, "{shown}");
    assert!(details["parameter_size"].as_str().unwrap().ends_with(['K', 'M']), "{shown}");
    assert!(!details["quantization_level"].as_str().unwrap().is_empty(), "{shown}");
    let tags = get(program.address, "/api/tags").json();
    assert_eq!(
        (&tags["models"][0]["details"], &tags["models"][0]["size"]),
        (details, &json!(ModelFile::BUILTIN.len()))
    );
    assert_eq!(get(program.address, "/health").json()["loaded"], json!(0));
}

/// LoRA adapters are named after their model. Requests with different ones run in one batch, and each equals the
/// library's output.
#[test]
fn request_model_name_selects_a_lora_adapter() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("served-adapters");
    std::fs::create_dir_all(&folder).unwrap();
    let paths = [1, 2].map(|seed| {
        let path = folder.join(format!("{seed}.gguf"));
        std::fs::write(&path, crate::files::adapter_of_stories(seed)).unwrap();
        path.to_str().unwrap().to_owned()
    });
    let adapters = [format!("one={}", paths[0]), format!("stories:two={}:0.5", paths[1])];
    let args = ["--port", "0", "--exact", "--lora-adapter", &adapters[0], "--lora-adapter", &adapters[1]];
    let program = Program::start(command(&args));
    let address = program.address;
    let models = get(address, "/v1/models").json();
    let ids: Vec<&str> = models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["stories", "stories:one", "stories:two"]);
    assert_eq!(models["data"][2]["parent"], json!("stories"));
    assert_eq!(get(address, "/v1/models/stories:one").json()["id"], json!("stories:one"));

    let options = LoadOptions { exact: true, ..LoadOptions::default() };
    let model = Model::from_file(&Device::cpu(), ModelFile::builtin().unwrap(), options).unwrap();
    let prompt = "Once upon a time there was a dragon.";
    let told = |adapter: Option<(&str, f32)>| {
        let adapter = adapter.map(|(path, scale)| model.load_adapter(path, scale).unwrap());
        let mut session = model.with_adapter(adapter.as_ref()).unwrap().session().unwrap();
        let options = GenerateOptions::greedy(16);
        common::collect(&mut session.generate(prompt, &options).unwrap()).1
    };
    let want = [told(None), told(Some((&paths[0], 1.0))), told(Some((&paths[1], 0.5)))];
    assert!(want[0] != want[1] && want[1] != want[2] && want[0] != want[2], "{want:?}");
    let said = |name: &str| {
        let asked = json!({"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0});
        let answer = done(address, "/v1/completions", asked).json();
        assert_eq!(answer["model"], json!(name));
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6)
            .map(|i| scope.spawn(move || (i % 3, said(["stories", "stories:one", "stories:two"][i % 3]))))
            .collect();
        for thread in threads {
            let (i, text) = thread.join().unwrap();
            assert_eq!(text, want[i], "{i}");
        }
    });
    let asked = json!({"model": "stories:three", "prompt": "x", "max_tokens": 1});
    let refused = post(address, "/v1/completions", &asked);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (404, &json!("model_not_found")));
    // An encoder has none.
    let nomic = super::server::encoder_path("nomic");
    let output = command(&["--port", "0", nomic.to_str().unwrap(), "--lora-adapter", &adapters[0]]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("`nomic:one`"), "{error}");
}

/// Concurrent completions are the same with speculative decoding, by prompt lookup and by a draft model, and with disk
/// offload.
#[test]
fn draft_tokens_and_offload_do_not_change_answers() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("served-stories.gguf");
    std::fs::write(&path, ModelFile::BUILTIN).unwrap();
    let path = path.to_str().unwrap();
    let prompts = ["Once upon a time there was a dragon.", "One day", "The cat and the dog", "She said"];
    let run = |args: &[&str], more: Json| {
        let usual = ["--port", "0", "--exact", "--parallel", "4", "--ctx", "256"];
        let program = Program::start(command(&[&usual, args, &[path]].concat()));
        let address = program.address;
        let said = |prompt: &str| {
            let mut asked =
                json!({"model": "served-stories", "prompt": prompt.repeat(3), "max_tokens": 48, "temperature": 0});
            asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            done(address, "/v1/completions", asked).json()["choices"][0]["text"].as_str().unwrap().to_owned()
        };
        let texts: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = prompts.iter().map(|prompt| scope.spawn(|| said(prompt))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let measures = get(address, "/metrics").text();
        let count = |name: &str| {
            let line = measures.lines().find(|line| line.starts_with(&format!("tilewright_engine_{name}_total")));
            line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).unwrap_or_else(|| panic!("{measures}"))
        };
        let counts = ["drafted_tokens", "accepted_tokens"].map(count);
        (texts, counts, program.before.clone())
    };
    let (want, [drafted, _], _) = run(&[], json!({}));
    assert_eq!(drafted, 0);
    let (texts, [drafted, accepted], _) = run(&["--draft", path, "--draft-tokens", "3"], json!({}));
    assert_eq!(texts, want);
    assert!(2 * accepted > drafted && drafted > 0, "{accepted} of {drafted}");
    for (args, more) in [(vec!["--prompt-lookup", "5"], json!({})), (vec![], json!({"prompt_lookup": 5}))] {
        let (texts, [drafted, ..], _) = run(&args, more);
        assert_eq!(texts, want);
        assert!(drafted > 0);
    }
    // Less than the model and one sequence need.
    let options = LoadOptions { context_length: Some(256), exact: true, ..LoadOptions::default() };
    let plan = Model::plan_file(&Device::cpu().target(), &ModelFile::builtin().unwrap(), &options).unwrap();
    let limit = (plan.total_bytes() * 885 / 1000).to_string();
    let (texts, _, told) = run(&["--memory-limit", &limit], json!({}));
    assert_eq!(texts, want);
    assert!(told.contains("from the file"), "{told}");
}

#[test]
fn serve_ends_when_its_stdin_closes() {
    let mut command = command_of(&["serve", "--port", "0", "--end-with-stdin"]);
    command.stdin(Stdio::piped());
    let mut program = Program::start(command);
    drop(program.child.stdin.take().unwrap());
    assert!(program.child.wait().unwrap().success());
}

#[test]
fn unsafe_or_missing_options_end_serve_with_an_error() {
    let pem = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/cert.pem");
    let cases: [(&[&str], i32, &str); 19] = [
        (&["--port", "0", "--tls-cert", "none", "--tls-key", pem], 1, "error: --tls-cert none: "),
        (&["--port", "0", "--tls-cert", pem, "--tls-key", pem], 2, "(no private key in it), expected a private key in"),
        (&["--port", "0", "--api-key", ""], 2, "error: --api-key is empty, expected a key"),
        (&["--port", "0", "--api-key-file", "none"], 1, "error: --api-key-file none: "),
        (&["--port", "0", "a=none.gguf"], 1, "none.gguf: no such file or folder"),
        (&["--port", "0", "--ctx", "-1"], 2, "invalid value '-1' for '--ctx <N|auto>': expected a number of tokens"),
        (
            &["--port", "0", "--lazy", "--device", "no such"],
            1,
            "error: --device is `no such`, which no adapter matches",
        ),
        (&["--port", "0", "--lora-adapter", "a=none"], 1, "error: --lora-adapter none: "),
        (
            &["--host", "0.0.0.0", "--port", "0"],
            2,
            "error: --api-key is missing, expected a key, since other machines can",
        ),
        (&["--port", "0", "--device", "cpu,pci:7"], 2, "device"),
        (&["--host", "0.0.0.0", "--port", "0"], 2, "--no-api-key"),
        (&["--host", "no such host", "--port", "0"], 2, "no such host"),
        (&["--port", "0", "--parallel", "0"], 2, "error: --parallel is 0"),
        (&["--port", "0", "--cors", "https://*.org"], 2, "error: --cors is `https://*.org`"),
        (
            &["--port", "0", "--max-body", "8M", "--max-audio", "9M", "--max-bodies", "8M"],
            2,
            "error: --max-bodies is 8388608, expected at least 9437184, the limit of one body (--max-audio)",
        ),
        (&["--port", "0", "--tls-cert", "cert.pem"], 2, "--tls-key"),
        (&["--port", "0", "none.gguf"], 1, "none.gguf"),
        (&["--port", "0", "--page", "/does/not/exist"], 1, "/does/not/exist"),
        (&["--port", "99999"], 2, "99999"),
    ];
    for (args, code, says) in cases {
        let output = command(args).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
        assert!(
            message.contains(says) && output.stdout.is_empty() && !message.contains("panicked"),
            "{args:?}: {message}"
        );
    }
}

/// `--device` with a list: one engine over both, with metrics for each.
#[test]
fn serve_uses_several_devices_together() {
    if super::common::gpu(None).is_none() {
        return;
    }
    let program = Program::start(command(&["--port", "0", "--device", "cpu, gpu", "--parallel", "2"]));
    let address = program.address;
    let asked = json!({"model": "stories", "prompt": "Once", "max_tokens": 8, "temperature": 0});
    let asking: Vec<_> = (0..6)
        .map(|_| {
            let asked = asked.clone();
            std::thread::spawn(move || done(address, "/v1/completions", asked).json()["choices"][0]["text"].clone())
        })
        .collect();
    let texts: Vec<Json> = asking.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let measures = get(address, "/metrics").text();
    let of_devices = measures.lines().filter(|line| line.starts_with("tilewright_device_finished_total{"));
    let finished: Vec<u64> = of_devices.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!((finished.len(), finished.iter().sum::<u64>()), (2, 6), "{measures}");
}
