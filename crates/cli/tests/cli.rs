//! The command line as a user types it: output, exit codes, messages.

use crate::{common, files};

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tilewright::{Device, EmbedOptions, Embedder};

fn tilewright(args: &[&str]) -> Output {
    command(args).stdin(Stdio::null()).output().unwrap()
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(args).env("TILEWRIGHT_CACHE_DIR", "").env_remove("TILEWRIGHT_DEVICE");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A file in this test's own folder.
fn file(name: &str, content: &[u8]) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cli");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path
}

/// Checks for one clear sentence on stderr, the exit code, empty stdout, and no panic.
fn fails(args: &[&str], code: i32, expected: &[&str]) {
    let output = tilewright(args);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
    assert!(output.stdout.is_empty(), "{args:?} printed {}", text(&output.stdout));
    for expected in expected {
        assert!(message.contains(expected), "{args:?}: `{message}` lacks `{expected}`");
    }
    assert!(!message.contains("panicked"), "{message}");
}

/// JSON printed by a successful command.
fn json_of(args: &[&str]) -> Value {
    let output = tilewright(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Whether a command with `--device gpu` reports that there is no adapter: a visible skip, or a failure if
/// `REQUIRE_ADAPTER` is set.
fn lacks_adapter(message: &str) -> bool {
    let lacks = message.contains("no adapter matches");
    if lacks {
        assert!(std::env::var_os("REQUIRE_ADAPTER").is_none(), "REQUIRE_ADAPTER is set: {message}");
        common::skip("no adapter");
    }
    lacks
}

const BUILTIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/stories.gguf");

#[test]
fn cli_without_arguments_tells_a_story() {
    let output = tilewright(&["--device", "cpu", "--seed", "1"]);
    let story = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(story.starts_with("Once upon a time") && story.len() > 200, "{story}");
    let summary = text(&output.stderr);
    assert!(summary.contains("tokens/s") && summary.contains("seed 1"), "{summary}");
}

/// Shell completions and manual pages cover the subcommands and flags listed by `--help`.
#[test]
fn completions_and_man_pages_cover_all_commands_and_flags() {
    let told = |args: &[&str]| {
        let output = tilewright(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let help = told(&["--help"]);
    let listed = help.split("\nOptions:\n").next().unwrap();
    let listed = listed.lines().filter(|line| !line.contains("tilewright <COMMAND>"));
    let commands: Vec<&str> = listed.filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    assert!(["run", "man", "version"].iter().all(|name| commands.contains(name)), "{help}");
    // Flags of commands are explained there.
    assert!(help.contains("\nModels:\n") && !help.contains("--temperature"), "{help}");

    let shells = ["bash", "elvish", "fish", "powershell", "zsh"].map(|shell| (shell, told(&["completions", shell])));
    // Words of some subcommands only, and global ones.
    let words = [&commands[..], &["logit-bias", "imatrix", "version"]].concat();
    for (shell, script) in &shells {
        let missing: Vec<_> = words.iter().filter(|word| !script.contains(**word)).collect();
        assert!(missing.is_empty(), "{shell}: {missing:?}");
    }
    fails(&["completions", "sh"], 2, &["invalid value 'sh'", "bash"]);
    // Zero would make the server useless.
    for flag in ["--max-connections", "--max-body", "--max-audio", "--max-bodies", "--answer-time"] {
        fails(&["serve", flag, "0"], 2, &["invalid value '0'", flag, "1"]);
    }

    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cli-man");
    assert!(told(&["man", "--dir", folder.to_str().unwrap()]).is_empty());
    let page = |name: &str| std::fs::read_to_string(folder.join(format!("{name}.1"))).unwrap();
    assert_eq!(page("tilewright"), told(&["man"]));
    for command in &commands {
        assert!(page(&format!("tilewright-{command}")).contains(".SH OPTIONS"), "{command}");
        assert!(page("tilewright").contains(&format!("tilewright\\-{command}(1)")), "{command}");
    }
    assert!(page("tilewright-bench-kernels").contains(".TH"));
    // No manual page contains machine-specific paths.
    let home = std::env::var("HOME").unwrap_or_default();
    assert!(home.len() < 2 || !page("tilewright-pull").contains(&home));
    fails(&["man", "--dir", BUILTIN], 1, &["stories.gguf"]);
}

#[test]
fn no_gpu_environment_variable_hides_all_adapters() {
    let told = |args: &[&str]| command(args).env("TILEWRIGHT_NO_GPU", "1").output().unwrap();
    let info: Value = serde_json::from_slice(&told(&["info", "--json"]).stdout).unwrap();
    assert_eq!(info["adapters"], serde_json::json!([]));
    let output = told(&["--device", "gpu", "--max-tokens", "1"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no adapter matches"), "{}", text(&output.stderr));
}

/// Drivers print to stderr themselves; Mesa's does if `XDG_RUNTIME_DIR` is not set.
#[test]
fn driver_messages_do_not_reach_stderr() {
    for args in [&["info"][..], &["info", "--device", "gpu"], &["inspect", BUILTIN, "--device", "gpu"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
        command.args(args).env("TILEWRIGHT_CACHE_DIR", "").env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
        let message = text(&command.output().unwrap().stderr);
        let ours = |line: &str| ["notice: ", "error: --device is `gpu`"].iter().any(|o| line.starts_with(o));
        assert!(message.lines().all(ours), "{args:?}: {message}");
    }
}

#[test]
fn json_output_is_one_object_with_documented_fields() {
    let run = |args: &[&str]| -> Value {
        let all = [&["run", BUILTIN, "--device", "cpu", "--json", "-n", "12", "--seed", "5"], args].concat();
        let output = tilewright(&all);
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let value = run(&[]);
    for field in ["model", "device", "prompt_token_ids", "token_ids", "text", "stop_reason", "counters"] {
        assert!(!value[field].is_null(), "{field} is missing in {value}");
    }
    assert_eq!(value["token_ids"].as_array().unwrap().len(), 12);
    assert_eq!(value["stop_reason"], "max_tokens");
    assert_eq!(value["prefill"]["tokens"], value["prompt_token_ids"].as_array().unwrap().len());
    assert_eq!(value["decode"]["tokens"], 11);
    assert!(value["decode"]["seconds"].as_f64().unwrap() > 0.0);
    assert_eq!(run(&[])["token_ids"], value["token_ids"], "a seed fixes the text");

    let prompt = file("prompt.txt", "Lily had a red ball".as_bytes());
    let from_file = run(&["--prompt-file", prompt.to_str().unwrap()]);
    assert_eq!(from_file["prompt_token_ids"], run(&["--prompt", "Lily had a red ball"])["prompt_token_ids"]);
}

/// Editors and PowerShell write a byte order mark, which is not part of the text.
#[test]
fn byte_order_mark_in_input_files_is_ignored() {
    let marked = |name: &str, content: &str| {
        let plain = file(&format!("plain-{name}"), content.as_bytes());
        let marked = file(&format!("marked-{name}"), format!("\u{feff}{content}").as_bytes());
        [plain, marked].map(|path| path.to_str().unwrap().to_owned())
    };
    let told = |args: &[&str], input: &str| {
        let mut child =
            command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let run = ["run", BUILTIN, "--device", "cpu", "--seed", "2", "-n", "9"];
    for (flag, name, content) in [
        ("--prompt-file", "prompt.txt", "Lily had a red ball"),
        ("--json-schema", "schema.json", "{\"enum\": [1, 2]}"),
        ("--grammar", "grammar.gbnf", "root ::= [a-c] \"=\" [0-9]"),
        ("--tools", "tools.json", "[{\"name\": \"get_time\"}]"),
    ] {
        let [plain, with_mark] = marked(name, content);
        assert_eq!(
            told(&[&run[..], &[flag, &with_mark]].concat(), ""),
            told(&[&run[..], &[flag, &plain]].concat(), ""),
            "{flag}"
        );
    }
    let from_stdin = [&run[..], &["--prompt-file", "-"]].concat();
    assert_eq!(told(&from_stdin, "\u{feff}Lily"), told(&from_stdin, "Lily"));
    let [plain, with_mark] = marked("lines.txt", "Lily\nTom\n");
    let lines = |path: &str| told(&[&run[..], &["--parallel", "2", "--prompt-file", path]].concat(), "");
    assert_eq!(lines(&with_mark), lines(&plain));
    // Within the text it is a character.
    assert_ne!(told(&from_stdin, "Li\u{feff}ly"), told(&from_stdin, "Lily"));

    let chat = ["chat", BUILTIN, "--lines", "--device", "cpu", "--template", "chatml", "--seed", "2", "-n", "5"];
    assert_eq!(told(&chat, "\u{feff}Hello\nAgain\n"), told(&chat, "Hello\nAgain\n"));
    let [plain, with_mark] = marked("talk.json", "[{\"role\": \"user\", \"content\": \"Hello\"}]");
    let goes_on = |path: &str| told(&[&chat[..], &["--session", path]].concat(), "");
    assert_eq!(goes_on(&with_mark), goes_on(&plain));
}

#[test]
fn generation_flags_take_effect() {
    let ids = |args: &[&str]| -> Vec<u64> {
        let output = tilewright(&[&["--device", "cpu", "--json", "-n", "30"], args].concat());
        let value: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{args:?}: {e}"));
        value["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
    };
    let greedy = ids(&["--temperature", "0"]);
    assert_eq!(ids(&["--top-k", "1", "--seed", "3"]), greedy);
    assert_eq!(ids(&["--top-p", "0.000001", "--seed", "4"]), greedy);
    assert_eq!(ids(&["--min-p", "1", "--seed", "4"]), greedy);
    assert_eq!(ids(&["--temperature", "0", "--tokens-per-submit", "4"]), greedy);
    assert_eq!(ids(&["--temperature", "0", "--kv-type", "f32"]), greedy);
    assert_ne!(ids(&["--temperature", "0", "--repeat-penalty", "5"]), greedy);
    assert_eq!(ids(&["--temperature", "0", "--repeat-penalty", "5", "--repeat-last-n", "0"]), greedy);
    assert_ne!(ids(&["--temperature", "3", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "3"]), greedy);
}

#[test]
fn draft_tokens_do_not_change_cli_output_and_are_counted() {
    let args = ["run", BUILTIN, "--device", "cpu", "--temperature", "0", "-n", "150", "--ignore-eos"];
    let run = |more: &[&str]| json_of(&[&args[..], more, &["--json"]].concat());
    let plain = run(&[]);
    assert_eq!(plain["speculation"]["passes"], 0);
    for more in [&["--prompt-lookup", "7"][..], &["--draft", BUILTIN, "--draft-tokens", "3"]] {
        let guessed = run(more);
        assert_eq!(guessed["token_ids"], plain["token_ids"], "{more:?}");
        assert!(guessed["speculation"]["passes"].as_u64().unwrap() > 0, "{guessed}");
        let said = text(&tilewright(&[&args[..], more].concat()).stderr);
        assert!(said.contains("draft tokens accepted"), "{said}");
    }
    // The text ends before anything repeats.
    let said = text(&tilewright(&[&args[..7], &["1", "--prompt-lookup", "7"]].concat()).stderr);
    assert!(said.contains("no draft tokens"), "{said}");
    fails(&[&args[..7], &["1", "--mtp", "3"]].concat(), 2, &["error: --mtp is 3", "MTP head"]);
    fails(
        &["run", BUILTIN, "--device", "cpu", "--prompt-lookup", "7"],
        2,
        &["error: --prompt-lookup is 7", "temperature 0"],
    );
    fails(&["run", BUILTIN, "--device", "cpu", "--draft", BUILTIN], 2, &["draft", "temperature 0"]);
}

#[test]
fn constrained_output_matches_its_schema_or_grammar() {
    let run = |more: &[&str]| -> String {
        let value = json_of(&[&["run", BUILTIN, "--device", "cpu", "--seed", "2", "--json"], more].concat());
        assert_ne!(value["stop_reason"], "max_tokens", "{value}");
        value["text"].as_str().unwrap().to_owned()
    };
    let json =
        |text: String| -> Value { serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}")) };
    let schema = r#"{"type": "object", "properties": {"size": {"enum": ["small", "big"]}}, "required": ["size"], "additionalProperties": false}"#;
    let path = file("schema.json", schema.as_bytes());
    for given in [schema, path.to_str().unwrap()] {
        assert!(["small", "big"].map(Value::from).contains(&json(run(&["--json-schema", given]))["size"]));
    }
    // Its output may be of any length.
    let begun = json_of(&["run", BUILTIN, "--device", "cpu", "--json", "-n", "5", "--json-object"]);
    assert!(begun["text"].as_str().unwrap().starts_with('{'), "{begun}");
    assert!(["yes", "no"].contains(&&*run(&["--regex", "yes|no"])));
    let grammar = file("pairs.lark", b"start: pair (\",\" pair)?\npair: /[a-c]/ \"=\" /[0-9]/");
    let pairs = regex::Regex::new("^[a-c]=[0-9](,[a-c]=[0-9])?$").unwrap();
    let written = run(&["--grammar", grammar.to_str().unwrap()]);
    assert!(pairs.is_match(&written), "{written}");
    let grammar = file("pairs.gbnf", b"# pairs\nroot ::= pair (\",\" pair)?\npair ::= [a-c] \"=\" [0-9]\n");
    let written = run(&["--grammar", grammar.to_str().unwrap()]);
    assert!(pairs.is_match(&written), "{written}");
    // Constraints apply to chat answers from their first character.
    let args = ["chat", BUILTIN, "--lines", "--device", "cpu", "--template", "chatml", "--regex", "(one|two)!"];
    let mut child = command(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"Count.\nGo on.\n").unwrap();
    let answers = text(&child.wait_with_output().unwrap().stdout);
    assert!(answers.lines().count() == 2 && answers.lines().all(|line| ["one!", "two!"].contains(&line)), "{answers}");

    let run = ["run", BUILTIN, "--device", "cpu"];
    fails(
        &[&run[..], &["--json-schema", r#"{"type": "integer", "minimum": 2, "maximum": 1}"#]].concat(),
        2,
        &["--json-schema is unusable", "minimum"],
    );
    fails(&[&run[..], &["--json-schema", "{"]].concat(), 2, &["--json-schema", "EOF"]);
    fails(&[&run[..], &["--json-schema", "missing.json"]].concat(), 1, &["missing.json"]);
    fails(&[&run[..], &["--regex", "("]].concat(), 2, &["--regex", "unclosed group"]);
    fails(&[&run[..], &["--regex", "a", "--json-object"]].concat(), 2, &["--regex", "--json-object"]);
    fails(&[&run[..], &["--regex", "a", "--temperature", "0", "--prompt-lookup", "3"]].concat(), 2, &["constraint"]);
}

#[test]
fn tool_choice_flag_enforces_valid_calls() {
    let tools = r#"[{"type": "function", "function": {"name": "set_light", "description": "Turns a lamp on or off.",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}, "room": {"enum": ["hall", "attic"]}},
        "required": ["on", "room"]}}}, {"type": "function", "function": {"name": "get_time", "description": "The time."}}]"#;
    let tools = file("tools.json", tools.as_bytes());
    let tools = tools.to_str().unwrap();
    let run = |more: &[&str]| {
        let args = ["run", BUILTIN, "--device", "cpu", "--seed", "2", "--temperature", "1", "--tools", tools];
        json_of(&[&args[..], &["--json"], more].concat())
    };
    for format in ["hermes", "xml", "llama3", "mistral", "gemma4", "harmony", "lfm2", "granite", "json"] {
        let found = run(&["--tool-format", format, "--tool-choice", "set_light", "--single-call", "--no-thinking"]);
        let calls = found["tool_calls"].as_array().unwrap();
        // In harmony the model may write to the user first.
        if format == "harmony" && found["stop_reason"] == "max_tokens" {
            continue;
        }
        assert_eq!(found["stop_reason"], "complete", "{format}: {found}");
        assert_eq!(calls.len(), 1, "{format}: {found}");
        let arguments = &calls[0]["function"]["arguments"];
        assert!(calls[0]["function"]["name"] == "set_light" && arguments["on"].is_boolean(), "{format}: {found}");
        assert!(["hall", "attic"].contains(&arguments["room"].as_str().unwrap()), "{format}: {found}");
    }
    // As text output, the call is on its own line.
    let args = [
        "run",
        BUILTIN,
        "--device",
        "cpu",
        "--seed",
        "2",
        "--tools",
        tools,
        "--tool-choice",
        "get_time",
        "--single-call",
        "--no-thinking",
    ];
    let printed = text(&tilewright(&[&args[..], &["--tool-format", "json", "--prompt", "Now "]].concat()).stdout);
    assert_eq!(printed, "Now call get_time {}\n");

    let chat = [
        "chat",
        "--lines",
        BUILTIN,
        "--device",
        "cpu",
        "--template",
        "chatml",
        "--tools",
        tools,
        "--seed",
        "3",
        "--tool-format",
        "json",
    ];
    let mut child = command(&[&chat[..], &["--tool-choice", "get_time", "--single-call", "--no-thinking"]].concat());
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"\"\"\"\nWhat\ntime?\n\"\"\"\n/history\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(text(&output.stdout), "call get_time {}\n", "{}", text(&output.stderr));
    assert!(
        text(&output.stderr).contains("user: What\ntime?\nassistant: \ncall get_time {}\n"),
        "{}",
        text(&output.stderr)
    );

    let bad = file("same.json", br#"[{"name": "a"}, {"name": "a"}]"#);
    fails(&["run", BUILTIN, "--device", "cpu", "--tools", bad.to_str().unwrap()], 2, &["`a`: name"]);
    let run = ["run", BUILTIN, "--device", "cpu", "--tools", tools];
    fails(&[&run[..], &["--tool-choice", "no_such"]].concat(), 2, &["--tool-choice is `no_such`"]);
    fails(&[&run[..], &["--tool-choice", "auto", "--regex", "a"]].concat(), 2, &["error: --tool-choice is given"]);
    fails(&["run", BUILTIN, "--tool-choice", "auto"], 2, &["--tools"]);
    fails(&["run", BUILTIN, "--tools", "missing.json"], 1, &["missing.json"]);
}

/// More lines than the batch holds: each text equals that of its own run, in the order of the lines.
#[test]
fn prompt_file_lines_are_continued_in_parallel() {
    let lines = ["Once upon a time", "The dog", "One day, a girl named Lily", "", "Tom had a red ball", "In the park"];
    let path = file("lines.txt", lines.join("\n").as_bytes());
    let path = path.to_str().unwrap();
    let common = ["run", "--device", "cpu", "--seed", "7", "-n", "9", "--json"];
    let output = tilewright(&[&common[..], &["--parallel", "2", "--prompt-file", path]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told: Vec<Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(told.len(), lines.len());
    for (i, (told, line)) in told.iter().zip(lines).enumerate() {
        let seed = (7 + i).to_string();
        let alone = json_of(&["run", "--device", "cpu", "--seed", &seed, "-n", "9", "--json", "--prompt", line]);
        assert_eq!((&told["line"], &told["seed"]), (&Value::from(i), &alone["seed"]));
        for key in ["text", "token_ids", "stop_reason"] {
            assert_eq!(told[key], alone[key], "line {i}: {key}");
        }
    }
    assert!(text(&output.stderr).contains("6 texts"), "{}", text(&output.stderr));
    fails(&["run", "--parallel", "2"], 2, &["--prompt-file"]);
    fails(&["run", "--parallel", "65", "--prompt-file", path], 2, &["64"]);
    fails(&["run", "--parallel", "2", "--prompt-file", path, "--profile"], 2, &["--profile"]);
}

#[test]
fn profile_prints_a_table_of_kernels() {
    let output = tilewright(&["--device", "cpu", "-n", "5", "--profile"]);
    let table = text(&output.stderr);
    for kernel in ["matvec.Q8_0", "attention", "gate_up.Q8_0", "us/call"] {
        assert!(table.contains(kernel), "{table}");
    }
}

#[test]
fn info_tokenize_and_inspect_print_text_and_json() {
    assert!(json_of(&["info", "--json"])["adapters"].is_array());
    assert!(text(&tilewright(&["info"]).stdout).contains("device"));

    let tokens = json_of(&["tokenize", "--json", "Once upon a time"]);
    assert_eq!(tokens["token_ids"].as_array().unwrap().len(), tokens["pieces"].as_array().unwrap().len());
    assert_eq!(tokens, json_of(&["tokenize", BUILTIN, "Once upon a time", "--json"]));
    let plain = json_of(&["tokenize", "--json", "--no-special", "Once upon a time"]);
    assert_eq!(plain["token_ids"].as_array().unwrap()[..], tokens["token_ids"].as_array().unwrap()[1..]);

    let content = json_of(&["inspect", BUILTIN, "--device", "cpu", "--json"]);
    assert_eq!(content["metadata"]["general.architecture"], "llama");
    assert!(content["tensors"].as_array().unwrap().iter().any(|t| t["name"] == "token_embd.weight"));
    assert!(content["memory"]["weights_bytes"].as_u64().unwrap() > 1_000_000);
    assert!(text(&tilewright(&["inspect"]).stdout).contains("memory:"));
    for encoder in ["nomic", "nomic/model.gguf", "bert-reranker", "modernbert-reranker/model.gguf"] {
        let path = format!("{}/../../tests/data/encoders/{encoder}", env!("CARGO_MANIFEST_DIR"));
        let content = json_of(&["inspect", &path, "--device", "cpu", "--json"]);
        assert!(content["error"].is_null(), "{encoder}: {}", content["error"]);
        assert!(content["memory"]["weights_bytes"].as_u64().unwrap() > 1000, "{encoder}");
    }
}

#[test]
fn bench_measures_a_model() {
    let tiny = ["bench", BUILTIN, "--device", "cpu", "-p", "8,0", "-n", "6", "-d", "0,16", "-r", "2"];
    let value = json_of(&[&tiny[..], &["--json"]].concat());
    assert_eq!((&value["sequences"], &value["repetitions"]), (&1.into(), &2.into()));
    for probe in ["copy_bytes_per_second", "flop_per_second"] {
        assert!(value["probes"][probe].as_f64().unwrap() > 1e6, "{value}");
    }
    let rows = value["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["test"].as_str().unwrap()).collect();
    assert_eq!(names, ["pp8", "tg6", "pp8 @ d16", "tg6 @ d16"]);
    for row in rows {
        let number = |field: &str| row[field].as_f64().unwrap_or_else(|| panic!("{field} is missing in {row}"));
        let rate = |field: &str| row["tokens_per_second"][field].as_f64().unwrap();
        assert!(0.0 < rate("lowest") && rate("lowest") <= rate("median") && rate("median") <= rate("highest"));
        let decodes = row["phase"] == "decode";
        // A prompt of 8 tokens is one pass, and so is each generated token.
        assert_eq!(number("submits_per_token"), if decodes { 1.0 } else { 1.0 / 8.0 }, "{row}");
        assert!(number("read_bytes_per_token") <= 16.0 && number("dispatches_per_token") > 1.0, "{row}");
        // Sampling settings, position and ids, once per generation.
        assert!(number("uploaded_bytes_per_token") <= 16.0, "{row}");
        let share = if decodes { "bandwidth_share" } else { "flop_share" };
        assert!(number("bytes_per_token") > 1e5 && number("flop_per_token") > 1e6 && number(share) > 0.0, "{row}");
    }
    let bytes = |i: usize| rows[i]["bytes_per_token"].as_f64().unwrap();
    let config = json_of(&["inspect", BUILTIN, "--device", "cpu", "--json"]);
    let config = |key: &str| config["metadata"][format!("llama.{key}")].as_u64().unwrap();
    let head_dim = config("embedding_length") / config("attention.head_count");
    // F16 cache.
    let position_bytes = 2 * config("block_count") * config("attention.head_count_kv") * head_dim * 2;
    assert_eq!(bytes(3) - bytes(1), 16.0 * position_bytes as f64, "16 more positions are read");

    let csv = text(&tilewright(&[&tiny[..], &["--csv"]].concat()).stdout);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 5, "{csv}");
    assert!(lines[0].starts_with("device,tier,test,phase") && lines[0].contains("tokens_per_second.median"), "{csv}");
    let table = text(&tilewright(&tiny).stdout);
    for expected in ["one sequence", "`scale`", "`matmul`", "tg6 @ d16", "of copy", "of FLOP/s"] {
        assert!(table.contains(expected), "{table}");
    }
}

#[test]
fn bench_writes_a_report() {
    let path = file("report.json", b"");
    let path = path.to_str().unwrap();
    let tiny = ["bench", BUILTIN, "--device", "cpu", "-p", "8", "-n", "4", "-r", "1", "--quick", "--report", path];
    // The second time it overwrites the first report.
    for _ in 0..if common::is_full() { 2 } else { 1 } {
        let output = tilewright(&tiny);
        assert!(output.status.success() && output.stdout.is_empty(), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("benches/record/community"), "{}", text(&output.stderr));
    }
    let value: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!((&value["schema"], &value["source"]), (&"tilewright-bench/1".into(), &"cli".into()));
    assert_eq!((&value["device"]["backend"], &value["adapter"]), (&"cpu".into(), &Value::Null));
    let names = |rows: &str, field: &str| -> Vec<String> {
        value[rows].as_array().unwrap().iter().map(|row| row[field].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names("probes", "probe"), ["copy", "read", "read_strided", "read_random", "reduce", "fma_f32"]);
    assert_eq!(names("kernels", "kernel").len(), 21);
    let tests: Vec<&Value> = value["models"][0]["tests"].as_array().unwrap().iter().map(|row| &row["test"]).collect();
    assert_eq!(tests, ["pp8", "tg4"]);
    let checker = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/record/community/check.mjs");
    match Command::new("node").args([checker, path]).output() {
        Ok(output) => assert!(output.status.success(), "{}", text(&output.stdout)),
        Err(error) => common::skip_part(format_args!("the checker of reports: node: {error}")),
    }

    // Never overwrites a file that is not a report, and fails before measuring.
    fails(&["bench", "--report", BUILTIN], 2, &["report", "a new file, or a report to overwrite"]);
    fails(&["bench", "--report", env!("CARGO_MANIFEST_DIR")], 2, &["report", "a new file"]);
    fails(&["bench", "--report", "--json"], 2, &["--json"]);
    fails(&["bench", "--quick"], 2, &["--report"]);
}

#[test]
fn bench_writes_an_html_page_with_its_results() {
    let page = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("page");
    std::fs::create_dir_all(&page).unwrap();
    let html = concat!(
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'self'\">\n",
        "<link rel=\"stylesheet\" href=\"dashboard.css\">\n<script type=\"module\" src=\"dashboard.js\"></script>\n",
    );
    for (name, text) in [("html", html), ("css", "p { margin: 0 }"), ("js", "start();\n//# sourceMappingURL=x.map")] {
        std::fs::write(page.join(format!("dashboard.{name}")), text).unwrap();
    }
    let [folder, report] = [page.clone(), page.join("report.html")].map(|path| path.to_str().unwrap().to_owned());
    let tune = file("tune.json", br#"{"bench": "tune", "rows": []}"#);
    let tiny = ["bench", BUILTIN, "--device", "cpu", "-p", "8", "-n", "4", "-r", "1", "--quick", "--page", &folder];
    let output = tilewright(&[&tiny[..], &["--html", &report, "--with", tune.to_str().unwrap()]].concat());
    assert!(output.status.success() && output.stdout.is_empty(), "{}", text(&output.stderr));
    let written = std::fs::read_to_string(&report).unwrap();
    let (_, data) = written.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    let data: Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    let parts = data["parts"].as_array().unwrap();
    let names: Vec<&str> = parts.iter().map(|part| part["bench"].as_str().unwrap()).collect();
    assert_eq!(names, ["model", "kernels", "memory", "tune"]);
    let model = &parts[0];
    // Prefill produces the first token.
    assert_eq!(model["pieces"][0]["seconds"].as_array().unwrap().len(), 5, "{model}");
    assert!(model["timeline"]["dispatches"].as_array().unwrap().len() > 10, "{model}");
    assert_eq!(model["memory"], json_of(&["inspect", BUILTIN, "--device", "cpu", "--ctx", "8", "--json"])["memory"]);
    assert!(written.contains("<script type=\"module\">start();</script>") && !written.contains("'self'"), "{written}");

    let html = |rest: &[&str], says: &str| fails(&[&["bench", "--html"], rest].concat(), 2, &[says]);
    html(&["report.txt"], "a file that ends in .html");
    html(&[&report, "--page", env!("CARGO_MANIFEST_DIR")], "scripts/build-web");
    html(
        &[&report, "--page", &folder, "--with", concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/models.json")],
        "with",
    );
    html(&[&report, "--json"], "--json");
}

#[test]
fn bench_memory_lists_model_sizes_by_weight_type() {
    let value = json_of(&["bench", "memory", "--device", "cpu", "--weights", "f16,q4_0", "--ctx", "1024", "--json"]);
    assert_eq!((&value["bench"], &value["context_length"]), (&"memory".into(), &1024.into()));
    let rows = value["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 12, "{value}");
    // 4.5 bits of 16: nearly all weights are matrices.
    let bytes = |row: &Value| row["weights_bytes"].as_f64().unwrap();
    assert!((bytes(&rows[11]) / bytes(&rows[10]) / (4.5 / 16.0) - 1.0).abs() < 0.01, "{value}");
    let table = text(&tilewright(&["bench", "memory", "--device", "cpu"]).stdout);
    assert!(table.contains("one session of 4096 tokens") && table.contains("Llama-3.1-70B    F32"), "{table}");
    fails(&["bench", "memory", "--weights", "q9"], 2, &["F32, F16"]);
    fails(&["bench", "memory", "--device", "cpu", "--ctx", "0"], 2, &["error: --ctx is 0"]);
}

#[test]
fn bench_batch_size_sets_the_prefill_pass_size() {
    let sizes = ["bench", BUILTIN, "--device", "cpu", "-p", "20", "-n", "2", "-d", "0,3", "-r", "1", "-b", "1,8,128"];
    let value = json_of(&[&sizes[..], &["--json"]].concat());
    let rows = value["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["test"].as_str().unwrap()).collect();
    let expected = [
        ["pp20 b1", "tg2 b1", "pp20 @ d3 b1", "tg2 @ d3 b1"],
        ["pp20 b8", "tg2 b8", "pp20 @ d3 b8", "tg2 @ d3 b8"],
        ["pp20", "tg2", "pp20 @ d3", "tg2 @ d3"],
    ];
    assert_eq!(names, expected.as_flattened());
    let passes = [(1, 20.0), (8, 3.0), (128, 1.0)];
    for (rows, (batch_size, n_passes)) in rows.chunks(4).zip(passes) {
        assert!(rows.iter().all(|row| row["batch_size"] == batch_size), "{value}");
        assert_eq!([&rows[0], &rows[2]].map(|row| row["submits_per_token"].as_f64()), [Some(n_passes / 20.0); 2]);
    }
    let csv = text(&tilewright(&[&sizes[..], &["--csv"]].concat()).stdout);
    assert!(csv.contains("depth,batch_size,") && csv.contains("pp20 @ d3 b8,prefill,20,3,8,"), "{csv}");
    assert!(text(&tilewright(&sizes).stdout).contains("\npp20 @ d3 b8 "));
}

#[test]
fn bench_counts_submissions_of_several_tokens_each() {
    let args = |n| ["bench", "--device", "gpu", "-p", "0", "-n", "15", "-r", "1", "--json", "--tokens-per-submit", n];
    let output = tilewright(&args("4"));
    let message = text(&output.stderr);
    if lacks_adapter(&message) {
        return;
    }
    assert!(output.status.success(), "{message}");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    let number = |field: &str| value["rows"][0][field].as_f64().unwrap();
    assert_eq!(value["tokens_per_submit"], 4);
    // The prompt, then 4, 4, 4 and 3 tokens.
    assert_eq!(number("submits_per_token"), 5.0 / 16.0);
    assert_eq!(number("read_bytes_per_token"), 16.0);
    let one = json_of(&args("1"));
    assert_eq!(one["rows"][0]["submits_per_token"], 1.0);
    assert_eq!(one["rows"][0]["dispatches_per_token"], number("dispatches_per_token"));
}

#[test]
fn bench_measures_kernels() {
    let tiny = ["bench", "kernels", "--device", "cpu", "--dim", "64", "-p", "16", "-d", "8", "--texts", "4"];
    let value = json_of(&[&tiny[..], &["--json"]].concat());
    let rows = value["rows"].as_array().unwrap();
    for kernel in ["embed.F16", "rms_norm", "matvec.Q4_0", "matmul.F16", "rope_kv", "attention", "swiglu", "argmax"] {
        let row = rows.iter().find(|row| row["kernel"].as_str().unwrap().starts_with(kernel));
        let row = row.unwrap_or_else(|| panic!("{kernel} is missing in {value}"));
        assert!(row["seconds"].as_f64().unwrap() > 0.0 && row["share"].as_f64().unwrap() > 0.0, "{row}");
    }
    for row in rows.iter().filter(|row| row["kernel"].as_str().unwrap().ends_with(".F16")) {
        assert!(row["vs_f16"].as_f64().is_none_or(|ratio| ratio == 1.0), "{row}");
    }
    assert_eq!(value["cache"]["rows"][0]["n_tokens"], 4);
    assert!(value["reads"]["scattered_bytes_per_second"].as_f64().unwrap() > 1e6, "{value}");
    // A table measures everything again.
    if common::is_full() {
        let table = text(&tilewright(&tiny).stdout);
        for expected in ["of probe", "vs F16", "`probe_read`", "without ms", "gate_up"] {
            assert!(table.contains(expected), "{table}");
        }
    }
}

#[test]
fn bench_ablate_measures_every_case() {
    let args = ["bench", "ablate", "--device", "gpu", "--tier", "f16", "--quick"];
    let output = tilewright(&[&args[..], &["--json"]].concat());
    let message = text(&output.stderr);
    if lacks_adapter(&message) {
        return;
    }
    if !output.status.success() && message.contains("shader-f16") {
        return common::skip("the adapter has no tier f16");
    }
    assert!(output.status.success(), "{message}");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = value["rows"].as_array().unwrap();
    let cases = |part: &str| -> Vec<&str> {
        rows.iter().filter(|row| row["part"] == part).map(|row| row["case"].as_str().unwrap()).collect()
    };
    let matvec = ["as is", "bytes by conversions", "bytes by bits", "loads only", "no scale", "x constant"];
    assert_eq!(cases("matvec"), matvec.map(|case| format!("Q4_0 {case}")));
    let mut matmul = vec!["F16 as is", "F16 staging only", "F16 matrices only"];
    matmul.extend(["Q4_0 as is", "Q4_0 no unpack", "Q4_0 staging only", "Q4_0 matrices only"]);
    matmul.extend(["Q4_K as is", "Q4_K no unpack", "Q4_K staging only", "Q4_K matrices only"]);
    assert_eq!(cases("matmul_half"), matmul);
    let rows_cases = [8, 16, 32, 64].map(|n| ["few", "many"].map(|class| format!("{n} rows, {class}")));
    assert_eq!(cases("rows"), rows_cases.concat());
    assert_eq!(cases("chain"), ["each reads what the one before wrote", "independent"]);
    assert_eq!(cases("attention"), ["4 cached", "64 cached", "256 cached"]);
    for row in rows {
        for field in ["seconds", "of_as_is", "predicted_of_as_is", "predicted_seconds", "bytes_per_second"] {
            // What is not finite is null.
            assert!(row[field].as_f64().is_some_and(|number| number > 0.0), "{field} of {row}");
        }
    }
    // A case is measured with its own shader: one with a function replaced has another label.
    let kernel_of = |case: &str| rows.iter().find(|row| row["case"] == case).unwrap()["kernel"].as_str().unwrap();
    assert!(kernel_of("Q4_0 as is").starts_with("matvec.Q4_0."));
    assert!(kernel_of("Q4_0 loads only").starts_with("matvec_loads.Q4_0."));
    assert!(kernel_of("Q4_K staging only").starts_with("matmul_half_staging.Q4_K."));
    // This tier stages a fixed depth, by one kind of workgroup.
    let left_out = value["left_out"].as_array().unwrap();
    let left_out: Vec<&str> = left_out.iter().map(|left| left["case"].as_str().unwrap()).collect();
    let of_matrices = ["half the depth", "two stages", "eight subgroups", "two stages, eight subgroups"];
    assert_eq!(left_out, of_matrices.map(|case| format!("Q4_0 {case}")));

    let table = text(&tilewright(&[&args[..], &["--only", "chain"]].concat()).stdout);
    assert!(["predicted", "independent"].iter().all(|word| table.contains(word)), "{table}");
    assert!(!table.contains("matvec"), "{table}");
    let none = json_of(&[&args[..], &["--only", "chain", "--limit", "0", "--json"]].concat());
    assert_eq!((none["rows"].as_array().unwrap().len(), none["left_out"].as_array().unwrap().len()), (0, 2));
    fails(&["bench", "ablate", "--device", "cpu"], 2, &["a GPU", "no shaders"]);
    fails(&["bench", "ablate", "--only", "matvec,some"], 2, &["some", "matmul_half"]);
}

#[test]
fn bench_mol_plans_mixture_of_logits_shapes() {
    let weights = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/mol/mol.safetensors");
    let mut args = vec!["bench", "mol", "--device", "cpu", "--strip", "16", "--items", "1000", "--components", "2x3"];
    args.extend(["--dims", "4,8", "--gates", "5", "--storage", "f32", "--batch", "2", "--measured", "1"]);
    let table = tilewright(&args);
    let printed = text(&table.stdout);
    assert!(table.status.success(), "{}", text(&table.stderr));
    for expected in
        ["8 x 8 x 32, gate 128, F16, batch 32, 16 items", "the chain takes", "2 of 2 shapes fit", "batch 2: 2 x 3 x 8"]
    {
        assert!(printed.contains(expected), "`{expected}` is missing in {printed}");
    }

    args.extend(["--weights", weights, "--recall", "0.9", "--json"]);
    let found = json_of(&args);
    let operations: Vec<&str> =
        found["tables"][2]["rows"].as_array().unwrap().iter().map(|row| row["operation"].as_str().unwrap()).collect();
    assert_eq!(operations, ["mixture", "chain", "highest logit", "dot product"]);
    // 64 pairs, 32 queries, 16 items; 2 x 32 operations per product and 4 x 128 for the gate.
    assert_eq!(found["tables"][2]["rows"][0]["flop"], 64 * 32 * 16 * (2 * 32 + 4 * 128));
    let plans = found["plans"].as_array().unwrap();
    // A row of 8 numbers for each of 3 components, and 16 for the gate.
    assert_eq!((plans.len(), &plans[0]["items_bytes"]), (2, &(1000 * 4 * (3 * 8 + 16)).into()));
    assert!(plans[0]["measured_seconds"].as_f64().unwrap() > 0.0 && plans[1]["measured_seconds"].is_null());
    let searches = &found["searches"];
    let best = &searches["trials"][searches["best"].as_u64().unwrap() as usize];
    assert!(best["recall"].as_f64().unwrap() >= 0.9, "{searches}");

    // Measures everything again.
    if common::is_full() {
        let csv = tilewright(&[&args[..args.len() - 5], &["--csv"]].concat());
        let rows = text(&csv.stdout);
        assert!(rows.lines().count() == 3 && rows.starts_with("device,tier,shape.query_components"), "{rows}");
    }
    fails(&["bench", "mol", "--components", "8x"], 2, &["8x4"]);
    fails(&["bench", "mol", "--components", "9x9"], 2, &["64"]);
    fails(&["bench", "mol", "--storage", "q4_0"], 2, &["f32, f16 or q8_0"]);
    fails(&["bench", "mol", "--batch", "33"], 2, &["error: --batch is 33, expected 1 to 32"]);
}

#[test]
fn bench_measures_a_text_encoder() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/encoders/nomic");
    let lines = ["a b", "the cat", "", "b a b a", "the cat", "a a a a a a"];
    let path = file("bench_texts.txt", lines.join("\n").as_bytes());
    let texts = path.to_str().unwrap();
    let tiny = ["bench", "embed", model, "--device", "cpu", "--texts", texts, "-b", "4,1,2", "-r", "6"];
    let pipeline = ["--in-flight", "1,4"];
    let value = json_of(&[&tiny[..], &pipeline, &["--max-ms", "1e9", "--max-mb", "1", "--json"]].concat());
    // Ignores empty and repeated lines.
    assert_eq!((&value["texts"], &value["repetitions"]), (&4.into(), &6.into()));

    let is_close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b;
    let embedder = Embedder::load(&Device::cpu(), model, EmbedOptions::default()).unwrap();
    let lengths = [0, 1, 3, 5].map(|i: usize| embedder.encode(lines[i]).unwrap().ids.len());
    let n_tokens: usize = lengths.iter().sum();
    let rows = value["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["n_texts"].as_u64().unwrap()).collect::<Vec<_>>(), [4, 1, 2]);
    for row in rows {
        let number = |field: &str| row[field].as_f64().unwrap_or_else(|| panic!("{field} is missing in {row}"));
        let n_texts = row["n_texts"].as_u64().unwrap();
        let n_batches = 4.0 / n_texts as f64;
        assert_eq!(number("n_tokens"), n_tokens as f64 / n_batches);
        // Two layers of 4608 weights; keys and values have 24 numbers each.
        let flop: usize = lengths.iter().map(|n| 2 * (2 * 4608 * n + 4 * 24 * n * n)).sum();
        assert_eq!(number("flop"), flop as f64 / n_batches);
        // Rows are padded to whole blocks of 32: token embeddings are F16; layers are F16 if products support it, else
        // widened to F32; five norms with biases.
        let weights_bytes = of_halves() * 2 * 32 * (72 + 24 + 64 + 24) + 4 * 5 * 2 * 24;
        // Reads and writes of the residual stream, attention and products of two layers.
        let token_bytes = 2 * 32 + 4 * 2 * (6 * 24 + 2 * 72 + 2 * 24 + 2 * 32);
        let bytes = weights_bytes as f64 + (token_bytes * n_tokens + 4 * 4 * 24) as f64 / n_batches;
        assert_eq!(number("bytes"), bytes);
        assert!(is_close(number("intensity"), number("flop") / bytes), "{row}");
        // A batch is one recording with one read: a vector of 24 numbers per text, none of them cached.
        assert_eq!([number("submits"), number("reads"), number("bytes_read")], [1.0, 1.0, 4.0 * 24.0 * n_texts as f64]);
        assert_eq!(number("dispatches"), embedder.n_dispatches(n_tokens as u32, 4).unwrap() as f64);
        let memory = |n_texts| embedder.batch_plan(n_tokens as u32, n_texts).unwrap().total_bytes() as f64;
        assert!(number("memory_bytes") > weights_bytes as f64 && number("memory_bytes") <= memory(4), "{row}");
        assert!(n_texts < 4 || number("memory_bytes") == memory(4), "{row}");
        let latency = ["p50", "p95", "p99"].map(|p| row["latency_seconds"][p].as_f64().unwrap());
        assert!(0.0 < latency[0] && latency[0] <= latency[1] && latency[1] <= latency[2], "{row}");
        for rate in ["texts_per_second", "tokens_per_second"] {
            let [lowest, median, highest] = ["lowest", "median", "highest"].map(|s| row[rate][s].as_f64().unwrap());
            assert!(0.0 < lowest && lowest <= median && median <= highest, "{row}");
        }
        let probe = |name: &str| value["probes"][name].as_f64().unwrap();
        let [of_bytes, of_flop] = [bytes / probe("copy_bytes_per_second"), number("flop") / probe("flop_per_second")];
        assert!(is_close(number("least_seconds"), of_bytes.max(of_flop)), "{row}");
        assert_eq!(row["bound"], if of_flop > of_bytes { "operations" } else { "bandwidth" });
        assert!(is_close(number("flop_share"), of_flop / number("seconds")), "{row}");
        // A line fitted to noise may fall.
        assert!(row["predicted_seconds"].is_null() == rows[0]["predicted_seconds"].is_null(), "{value}");
    }
    let rate = |row: &&Value| row["texts_per_second"]["median"].as_f64().unwrap();
    let fastest = rows.iter().max_by(|a, b| rate(a).total_cmp(&rate(b))).unwrap();
    assert_eq!(value["best"], fastest["n_texts"]);

    let parts = &value["parts"];
    assert_eq!((&parts["n_texts"], &parts["n_tokens"]), (&4.into(), &n_tokens.into()));
    for part in ["tokenize_seconds", "vectors_seconds", "seconds"] {
        assert!(parts[part].as_f64().unwrap() > 0.0, "{parts}");
    }
    let flights = value["in_flight"].as_array().unwrap();
    assert_eq!(flights.iter().map(|row| row["in_flight"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 4]);
    assert_eq!(flights[0]["ratio"], 1.0);
    assert!(is_close(flights[1]["ratio"].as_f64().unwrap(), rate(&&flights[1]) / rate(&&flights[0])), "{value}");
    let naive = &value["naive"];
    let gain = 4.0 / parts["seconds"].as_f64().unwrap() / naive["texts_per_second"].as_f64().unwrap();
    assert!(is_close(naive["gain"].as_f64().unwrap(), gain), "{value}");

    let short = [&tiny[..], &["--in-flight", "0", "--no-naive"]].concat();
    let slow = json_of(&[&short[..], &["--max-ms", "1e-9", "--json"]].concat());
    assert!(slow["best"].is_null() && slow["naive"].is_null() && slow["in_flight"] == serde_json::json!([]), "{slow}");

    let csv = text(&tilewright(&[&short[..], &["--csv"]].concat()).stdout);
    assert!(
        csv.lines().count() == 4 && csv.starts_with("device,tier,n_texts,n_tokens,texts_per_second.lowest"),
        "{csv}"
    );
    let table = text(&tilewright(&[&tiny[..], &pipeline].concat()).stdout);
    for expected in
        ["4 texts, 6 repetitions", "`matmul`", "p99 ms", "predicted ms", "most texts/s: batches of", "of call"]
    {
        assert!(table.contains(expected), "`{expected}` is missing in {table}");
    }
    assert!(table.contains("4 in flight") && table.contains("loaded for each of 4 texts"), "{table}");
    let none = text(&tilewright(&[&short[..], &["--max-mb", "0"]].concat()).stdout);
    assert!(none.contains("no batch fits the limits") && !none.contains("in flight"), "{none}");

    let bad = |args: &[&str], code, expected: &[&str]| fails(&[&tiny[..7], args].concat(), code, expected);
    bad(&["-b", "5"], 2, &["error: -b is 5", "1 to 4"]);
    bad(&["-b", "0"], 2, &["error: -b is 0", "1 to 4"]);
    bad(&["-r", "0"], 2, &["error: -r is 0, expected at least 1"]);
    bad(&["--in-flight", "9"], 2, &["--in-flight", "9"]);
    bad(&["--max-ms=-1"], 2, &["--max-ms", "milliseconds above 0"]);
    bad(&["--max-ms", "nan"], 2, &["--max-ms", "milliseconds above 0"]);
    let empty = file("no_texts.txt", b"\n \n");
    fails(&["bench", "embed", model, "--texts", empty.to_str().unwrap()], 2, &["texts", "a line with text"]);
    fails(&["bench", "embed", model, "--texts", "/no/such.txt"], 1, &["/no/such.txt"]);
    fails(&["bench", "embed", "/no/such/encoder", "--device", "cpu"], 1, &["/no/such/encoder"]);
    fails(&["bench", "embed", BUILTIN, "--device", "cpu"], 1, &["a language model"]);
}

#[test]
fn bench_counts_submissions_of_an_encoder() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/encoders/nomic");
    let args = ["bench", "embed", model, "--device", "gpu", "-b", "3", "-r", "2", "--json", "--no-naive"];
    let in_flight = if common::is_full() { "1,8" } else { "0" };
    let args = [&args[..], &["--in-flight", in_flight]].concat();
    let output = tilewright(&args);
    let message = text(&output.stderr);
    if lacks_adapter(&message) {
        return;
    }
    assert!(output.status.success(), "{message}");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = &value["rows"][0];
    // Three vectors share a pass for four.
    assert_eq!([&row["submits"], &row["reads"], &row["bytes_read"]], [1.0, 1.0, 4.0 * 24.0 * 4.0]);
    assert!(!common::is_full() || value["in_flight"][1]["ratio"].as_f64().unwrap() > 0.0, "{value}");
}

#[test]
fn kv_type_shrinks_the_cache_and_auto_context_fits_memory() {
    let plan = |args: &[&str]| {
        let inspected = json_of(&[&["inspect", BUILTIN, "--device", "cpu", "--json"], args].concat());
        ["weights_bytes", "cache_bytes", "activations_bytes"].map(|part| inspected["memory"][part].as_u64().unwrap())
    };
    let [f32, f16, q8_0] = ["f32", "f16", "q8_0"].map(|kv_type| plan(&["--kv-type", kv_type])[1]);
    assert!(q8_0 < f16 && f16 < f32, "{f32} {f16} {q8_0}");
    let limit = plan(&["--ctx", "128"]).iter().sum::<u64>().to_string();
    let limited = ["--device", "cpu", "-n", "4", "--memory-limit", &limit];
    // Layers that do not fit are offloaded to disk, unless they all fit with a shorter context.
    let output = tilewright(&limited);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let told = text(&output.stderr);
    assert!(told.contains("from the file") && told.contains("--ctx 128"), "{told}");
    let output = tilewright(&[&limited[..], &["--ctx", "auto"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!text(&output.stderr).contains("from the file"), "{}", text(&output.stderr));
    fails(&["--device", "cpu", "-n", "4", "--memory-limit", "500K"], 1, &["memory"]);
}

#[test]
fn embedding_table_is_offloaded_under_a_memory_limit() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/tiny-random/qwen3/model-f16.gguf");
    let run = |args: &[&str]| {
        let usual =
            ["run", model, "--device", "cpu", "--prompt-ids", "5,6,7", "--temperature", "0", "-n", "6", "--json"];
        let output = tilewright(&[&usual[..], args].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        (serde_json::from_slice::<Value>(&output.stdout).unwrap(), text(&output.stderr))
    };
    let (whole, _) = run(&[]);
    assert!(whole["streaming"].is_null());
    // One byte too few: the message names the offloaded table and the context that would fit.
    let needed: u64 = whole["memory"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum();
    for (args, hint) in [(vec!["--stream-rows".into()], false), (vec![format!("--memory-limit={}", needed - 1)], true)]
    {
        let (rows, told) = run(&args.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(rows["token_ids"], whole["token_ids"]);
        let streaming = &rows["streaming"];
        // 293 rows of 64 f16; the prompt and five tokens read theirs.
        assert_eq!([&streaming["tables_bytes"], &streaming["n_rows_read"]], [293 * 64 * 2, 3 + 5], "{streaming}");
        assert!(told.contains("tables") && told.contains("--ctx") == hint, "{told}");
    }
    // The same is known before the model is loaded.
    let limit = (needed - 1).to_string();
    let inspect = ["inspect", model, "--device", "cpu", "--memory-limit", &limit];
    let planned = json_of(&[&inspect[..], &["--json"]].concat());
    assert_eq!(planned["streaming"]["tables_bytes"], 293 * 64 * 2, "{planned}");
    let planned: u64 = planned["memory"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum();
    assert!(planned < needed, "{planned} {needed}");
    let shown = text(&tilewright(&inspect).stdout);
    assert!(shown.contains("embedding tables of") && shown.contains("--ctx"), "{shown}");
    // The built-in model's table is tied to its head.
    let output = tilewright(&["--device", "cpu", "-n", "2", "--stream-rows"]);
    assert!(output.status.success() && text(&output.stderr).contains("no table"), "{}", text(&output.stderr));
}

#[test]
fn errors_are_one_sentence_and_an_exit_code() {
    fails(&["--no-such-flag"], 2, &["--no-such-flag"]);
    fails(&["run", "--temperature", "hot"], 2, &["--temperature"]);
    fails(&["--device", "cpu", "--temp", "-1"], 2, &["error: --temp is -1, expected 0, or 0.001 to 100"]);
    fails(&["--ctx", "lots"], 2, &["--ctx", "auto"]);
    fails(&["--kv-type", "f8"], 2, &["--kv-type", "f32, f16, q8_0"]);
    fails(&["--tier", "t9"], 2, &["--tier"]);
    fails(&["--memory-limit", "much"], 2, &["--memory-limit"]);
    fails(&["--prompt", "a", "--prompt-file", "b"], 2, &["--prompt-file"]);
    fails(&["--device", "no such gpu"], 1, &["no such gpu"]);
    fails(&["bench", "-r", "0"], 2, &["error: -r is 0, expected at least 1"]);
    fails(&["bench", "-p", "0", "-n", "0"], 2, &["error: -p and -n are 0"]);
    fails(&["bench", "-p", "many"], 2, &["-p"]);
    fails(&["bench", "-b", "7"], 2, &["--batch-size", "[1, 8, 32, 128, 512]"]);
    fails(&["bench", "--batch-size", "8,many"], 2, &["--batch-size", "many"]);
    fails(&["bench", "--tokens-per-submit", "17"], 2, &["error: --tokens-per-submit is 17, expected 1 to 16"]);
    fails(&["--tokens-per-submit", "0"], 2, &["--tokens-per-submit is 0", "1 to 16"]);
    fails(&["bench", "--json", "--csv"], 2, &["--csv"]);
    fails(
        &["bench", "--device", "cpu", "-d", "1000000"],
        2,
        &["error: --n-prompt, --n-gen and -d are 1000512, expected 1 to the model's 512 together"],
    );
    fails(&["bench", "/no/such/model.gguf"], 1, &["/no/such/model.gguf"]);
    fails(&["bench", "kernels", "--dim", "100"], 2, &["dim", "multiple of 64"]);
    fails(&["bench", "kernels", "-p", "1"], 2, &["error: -p is 1, expected 2 to 4096"]);
    fails(&["tune", "--device", "cpu"], 2, &["device", "a GPU"]);
    fails(&["tune", "--model", "/no/such/model.gguf"], 1, &["/no/such/model.gguf"]);
    fails(&["run", "/no/such/model.gguf"], 1, &["/no/such/model.gguf"]);
    fails(&["--prompt-file", "/no/such/prompt"], 1, &["/no/such/prompt"]);
    fails(&["--device", "cpu", "--memory-limit", "1M"], 1, &["memory", "limit"]);
    fails(
        &["--device", "cpu", "--ctx", "4", "--prompt", "a long prompt that does not fit"],
        1,
        &["context full", "--slide", "--ctx"],
    );

    let model = std::fs::read(BUILTIN).unwrap();
    let run = |path: &Path, expected: &[&str]| {
        let path = path.to_str().unwrap();
        fails(&["run", path, "--device", "cpu"], 1, &[&[path], expected].concat());
    };
    run(&file("empty.gguf", b""), &["the file ends after 0 bytes"]);
    run(&file("pointer.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), &["git lfs pull"]);
    run(&file("text.gguf", b"this is no model at all, just some text"), &["gguf", "magic"]);
    run(
        &file("cut.gguf", &model[..5000]),
        &["the file ends after 5000 bytes, but its header needs", "download or save it again"],
    );
    run(&file("cut_data.gguf", &model[..model.len() - 5000]), &["but tensor `", "download or save it again"]);
    let renamed = String::from_utf8_lossy(b"llama.block_count").into_owned();
    let at = model.windows(renamed.len()).position(|w| w == renamed.as_bytes()).unwrap();
    let mut other = model.clone();
    other[at..at + 5].copy_from_slice(b"lamma");
    run(&file("renamed.gguf", &other), &["llama.block_count", "missing"]);
    let at = model.windows(9).position(|w| w == b"output_no").unwrap();
    let mut other = model.clone();
    other[at..at + 9].copy_from_slice(b"outpux_no");
    run(&file("other_norm.gguf", &other), &["output_norm.weight", "missing"]);
    run(&file("wrong.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\xff"), &[]);
}

/// What was typed, what was found, what is right, and where it helps, what to do next.
#[test]
fn errors_name_flags_and_what_is_right() {
    let list = file("list.json", b"[{\"type\": \"function\"}, 5]");
    let tools = file("tools.json", b"[{\"type\": \"function\"}]");
    let (list, tools) = (list.to_str().unwrap(), tools.to_str().unwrap());
    let out = file("exists.gguf", b"");
    let out = out.to_str().unwrap();
    let cases: &[(&str, i32, &[&str])] = &[
        ("run --ctx -1", 2, &["invalid value '-1' for '--ctx <N|auto>': expected a number of tokens"]),
        ("run --mtp 2 --temp 0", 2, &["--mtp is 2, but tilewright stories has no MTP head, expected 0; --draft MODEL"]),
        ("chat --mtp 2 --temp 0 --template chatml", 2, &["--mtp is 2, but", "has no MTP head, expected 0"]),
        ("run --beams 99", 2, &["--beams is 99, expected 1 to 32"]),
        ("run --json-schema {", 2, &["--json-schema is unusable (EOF while parsing", "expected a schema in JSON"]),
        ("run --json-schema {\"type\":\"odd\"}", 2, &["--json-schema is unusable (Invalid type: odd), expected"]),
        ("run --regex (", 2, &["--regex is unusable (invalid regex \"(\": unclosed group), expected"]),
        ("run --grammar nofile", 1, &["--grammar nofile: "]),
        ("run --tools LIST", 1, &["--tools ", "list.json: an item is not an object; expected a JSON list of objects"]),
        ("run --tools TOOLS", 2, &["--tools: tool 0: name is missing, expected a text"]),
        ("run --prompt-ids 99999", 1, &["--prompt-ids has the id 99999, expected token ids below 1024"]),
        ("run -f nofile", 1, &["-f nofile: "]),
        ("run --session LIST", 1, &["--session ", "list.json: safetensors"]),
        ("run --draft ENCODER --temp 0", 1, &["--draft ", "is an encoder, which turns texts into vectors, expected a"]),
        ("run --memory-limit 1", 1, &["the limit is 1", "; --memory-limit sets the limit"]),
        ("quantize BUILTIN /none/x.gguf --type Q4_0", 1, &["/none/x.gguf: the folder does not exist"]),
        ("quantize BUILTIN OUT --type Q4_0", 1, &["exists.gguf: exists already; --force overwrites it"]),
        ("split BUILTIN /none/x", 1, &["/none/x-00001-of-", "the folder does not exist"]),
        ("merge BUILTIN OUT", 1, &["split.count is missing (a whole model), expected a shard"]),
        ("imatrix BUILTIN -f TOOLS -o /none/x", 1, &["-o /none/x: the folder does not exist"]),
        ("imatrix BUILTIN -f TOOLS -o OUT", 1, &["-o ", "exists already; --force overwrites it"]),
        ("perplexity BUILTIN -f TOOLS -c 100", 2, &["-c is 100, expected at most the text's ", "a longer text"]),
        ("perplexity BUILTIN --kl TOOLS", 1, &["--kl ", "tools.json: predictions: magic"]),
        (
            "kernels export -",
            2,
            &["--kernel is missing, expected one variant for `-`, by --kernel, --weight and --tier"],
        ),
        ("kernels export - --kernel matvec", 2, &["--kernel is `matvec` with ", " variants (matvec.F32.t0, ", "..."]),
        ("kernels export - --kernel matvek", 2, &["--kernel is `matvek`, expected a kernel of", ", such as matvec"]),
        ("kernels export - --kernel add --weight Q4_0", 2, &["--weight is Q4_0, expected one of the variants add.t0"]),
        ("--device cpu -c 64 list --available", 2, &["unexpected argument '--device' found"]),
        // Flags of llama.cpp and vLLM, and slips.
        ("run BUILTIN --no-mmap", 2, &["unexpected argument '--no-mmap'", "tip: leave it out: weights"]),
        ("chat BUILTIN --jinja", 2, &["'--jinja'", "tip: leave it out: the model's chat template"]),
        ("run BUILTIN -b 512", 2, &["'-b'", "tip: leave it out: the device decides"]),
        ("run BUILTIN --max-model-len 64", 2, &["tip: use --ctx"]),
        ("run BUILTIN -cnv", 2, &["'--conversation'", "tip: use `tilewright chat`"]),
        ("serve BUILTIN --max_model_len 64", 2, &["'--max_model_len'", "tip: use --ctx"]),
        ("serve BUILTIN --metrics", 2, &["'--metrics'", "tip: leave it out: the endpoint"]),
        ("run BUILTIN -ncmoe 3", 2, &["'--n-cpu-moe'", "tip: use --memory-limit"]),
        ("create a -f Modelfile", 2, &["unrecognized subcommand 'create'", "tip: `tilewright serve NAME=MODEL`"]),
        ("run hf:qwen3 a", 2, &["hf:qwen3", "it has no owner, expected hf:owner/repo"]),
        ("embed ENCODER a.png", 2, &["a.png: a picture, which --images embeds"]),
        ("info --device cuda", 1, &["expected auto, gpu, cpu, or a number", "did you mean `gpu`?"]),
        ("run SPEECH a", 1, &["tiny-random-sound is a speech model: use `tilewright transcribe`"]),
        ("run BUILTIN a --grammar root::=x", 2, &["--grammar"]),
        ("run stories", 1, &["stories: no such file or folder; the built-in model is the default"]),
        ("pull llama3.2", 2, &["did you mean `hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M`?"]),
        ("transcribe a.wav", 2, &["<FILE>", "tip: the first argument is the model, such as hf:openai/whisper-tiny"]),
    ];
    for (words, code, expected) in cases {
        let word = |word: &'static str| match word {
            "LIST" => list.to_owned(),
            "TOOLS" => tools.to_owned(),
            "OUT" => out.to_owned(),
            "BUILTIN" => BUILTIN.to_owned(),
            "SPEECH" => concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/tiny-random-sound").to_owned(),
            "ENCODER" => concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/encoders/nomic").to_owned(),
            word => word.to_owned(),
        };
        let words: Vec<String> = words.split_whitespace().map(word).collect();
        let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
        if ["run", "chat", "perplexity"].contains(&words[0]) {
            words.extend(["--device", "cpu"]);
        }
        fails(&words, *code, expected);
    }
    let first = tilewright(&["--device", "cpu", "--temp", "0", "-n", "4", "run"]);
    let last = tilewright(&["run", "--device", "cpu", "--temp", "0", "-n", "4", "--seed", "-1"]);
    assert!(first.status.success() && first.stdout == last.stdout, "{}", text(&first.stderr));
}

/// The fields of `params` are those of the struct in the exported shader, with offsets by their sizes.
#[test]
fn exported_kernels_list_the_fields_of_their_params() {
    let folder = file("kernels", b"").with_extension("d");
    assert!(tilewright(&["kernels", "export", folder.to_str().unwrap(), "--tier", "baseline"]).status.success());
    let table: Value = serde_json::from_slice(&std::fs::read(folder.join("kernels.json")).unwrap()).unwrap();
    let mut n_fields = 0;
    for kernel in table.as_array().unwrap() {
        let name = kernel["variants"][0]["file"].as_str().unwrap();
        let source = std::fs::read_to_string(folder.join(name)).unwrap();
        let plain: String = source.lines().map(|line| line.split("//").next().unwrap()).collect();
        let (_, of_params) = plain.split_once("var<uniform> params: ").unwrap();
        let (_, body) = plain.split_once(&format!("struct {} {{", of_params.split(';').next().unwrap())).unwrap();
        let mut end = 0;
        let mut fields = Vec::new();
        // No type but an array has a comma followed by a letter and a colon.
        for field in body.split('}').next().unwrap().split(',').filter(|field| field.contains(':')) {
            let (field, kind) = field.split_once(':').unwrap();
            if !field.trim().starts_with('_') {
                fields.push((field.trim(), end, kind.trim()));
                end += match kind.trim() {
                    "u32" | "i32" | "f32" => 4,
                    "vec2<u32>" | "vec2<f32>" => 8,
                    _ => 16,
                };
            }
        }
        let listed = kernel["params"].as_array().unwrap();
        assert_eq!(listed.len(), fields.len(), "{name}: {listed:?}, {fields:?}");
        for (listed, (field, offset, kind)) in listed.iter().zip(fields) {
            n_fields += 1;
            assert_eq!((&listed["name"], &listed["offset"]), (&field.into(), &offset.into()), "{name}");
            assert!(listed["type"].as_str().unwrap().starts_with(kind), "{name}: {listed}, {kind}");
        }
        assert!(end <= kernel["params_bytes"].as_u64().unwrap(), "{name}");
    }
    assert!(n_fields > 100, "{n_fields}");
}

/// Without a vocabulary, ids are both input and output: those of the references.
#[test]
fn prompt_ids_are_continued_without_a_vocabulary() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    for path in
        ["tiny-random/qwen3", "tiny-random/qwen3/model-f16.gguf", "tiny-random/lfm2"].map(|path| data.join(path))
    {
        let folder = if path.is_dir() { path.clone() } else { path.parent().unwrap().to_owned() };
        let references = common::References::open(&folder.join("refs.safetensors"));
        let listed = |ids: &[u32]| ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let (prompt, want) = (references.ids("greedy.prompt"), references.ids("greedy.ids"));
        let (ids, n, path) = (listed(&prompt), want.len().to_string(), path.to_str().unwrap());
        let args =
            ["run", path, "--prompt-ids", &ids, "-n", &n, "--temperature", "0", "--ignore-eos", "--device", "cpu"];
        let json = json_of(&[&args[..], &["--json"]].concat());
        assert_eq!(json["prompt_token_ids"], serde_json::json!(prompt), "{path}");
        assert_eq!(json["token_ids"], serde_json::json!(want), "{path}");
        let output = tilewright(&args);
        assert_eq!(text(&output.stdout).trim_end(), listed(&want), "{path}");
    }
    fails(&["run", "--prompt-ids", "1,x"], 2, &["prompt-ids"]);
    fails(&["run", "--prompt-ids", "1,99999", "--device", "cpu"], 1, &["99999"]);
}

/// Layers are on the requested devices, for one and several sequences; impossible placements are refused by name.
#[test]
fn layers_on_flag_places_layers_on_named_devices() {
    let args = ["run", BUILTIN, "--exact", "--temperature", "0", "-n", "12", "--json"];
    let output = tilewright(&[&args[..], &["--device", "gpu"]].concat());
    if lacks_adapter(&text(&output.stderr)) {
        return;
    }
    let whole: Value = serde_json::from_slice(&output.stdout).unwrap();
    let split = ["--device", "gpu", "--gpu-layers", "4", "--layers-on", "gpu=2", "--layers-on", "cpu=1"];
    let value = json_of(&[&args[..], &split].concat());
    assert_eq!(value["token_ids"], whole["token_ids"]);
    let [name, cpu] = [&whole, &value].map(|value| value["placement"][0]["device"].as_str().unwrap().to_owned());
    assert!(cpu.starts_with("CPU") && name == whole["device"]["name"], "{cpu}, {name}");
    let placed = |value: &Value| -> Vec<(String, u64, u64)> {
        let one = |placed: &Value| {
            assert!(placed["plan"]["weights_bytes"].as_u64().unwrap() > 0, "{placed}");
            let [start, end] = ["start", "end"].map(|end| placed["layers"][end].as_u64().unwrap());
            (placed["device"].as_str().unwrap().to_owned(), start, end)
        };
        value["placement"].as_array().unwrap().iter().map(one).collect()
    };
    assert_eq!(placed(&whole), [(name.clone(), 0, 5)]);
    let want = [(&cpu, 0, 1), (&name, 1, 3), (&cpu, 3, 4), (&name, 4, 5)];
    assert_eq!(placed(&value), want.map(|(device, start, end)| (device.clone(), start, end)));

    let lines = file("layers.txt", b"Once upon a time\nThe cat\n");
    let several = ["--parallel", "2", "--prompt-file", lines.to_str().unwrap()];
    let output = tilewright(&[&args[..], &split, &several].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let first: Value = serde_json::from_str(text(&output.stdout).lines().next().unwrap()).unwrap();
    assert_eq!(first["token_ids"], whole["token_ids"]);

    let output = tilewright(&[&args[..], &["--device", "cpu", "--layers-on", "gpu=2"]].concat());
    assert!(text(&output.stderr).contains("notice: there is no GPU for --layers-on; the CPU computes all layers"));
    for (wrong, code, words) in [
        ("gpu", 2, ["gpu", "such as 1=12"]),
        ("gpu=x", 2, ["gpu=x", "such as 1=12"]),
        ("gpu=5", 2, ["--layers-on is", "1 to 4 of the 5 layers"]),
        ("gpu=0", 2, ["--layers-on is", "1 to 4 of the 5 layers"]),
        ("no-such-adapter=1", 1, ["no adapter", "no-such-adapter"]),
    ] {
        fails(&["run", BUILTIN, "--device", "gpu", "--layers-on", wrong], code, &words);
    }
}

#[test]
fn unwritable_pipeline_cache_is_a_warning() {
    let blocker = file("not_a_folder", b"");
    let output = Command::new(env!("CARGO_BIN_EXE_tilewright"))
        .args(["--device", "gpu", "-n", "2", "--temperature", "0"])
        .env("TILEWRIGHT_CACHE_DIR", &blocker)
        .output()
        .unwrap();
    let message = text(&output.stderr);
    if lacks_adapter(&message) {
        return;
    }
    assert!(output.status.success(), "{message}");
    // Only Vulkan has a pipeline cache.
    assert_eq!(
        message.contains("warning: the pipeline cache was not saved"),
        message.contains("(vulkan)"),
        "{message}"
    );
    assert!(text(&output.stdout).starts_with("Once upon a time"));
}

#[test]
fn closed_stdout_is_not_an_error() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tilewright"))
        .args(["--device", "cpu", "--ignore-eos", "-n", "400"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let message = text(&output.stderr);
    assert!(output.status.success() && !message.contains("panicked"), "{message}");
}

/// Output of a command that loses its device before these steps, and its loss messages. `None` without an adapter.
fn disturbed(args: &[&str], input: &Path, steps: &str) -> Option<(String, Vec<String>)> {
    let mut command = command(&[args, &["--device", "gpu"]].concat());
    let input = std::fs::File::open(input).unwrap();
    let output = command.stdin(input).env("TILEWRIGHT_LOSE_DEVICE", steps).output().unwrap();
    let message = text(&output.stderr);
    if lacks_adapter(&message) {
        return None;
    }
    assert!(output.status.success(), "{args:?}: {message}");
    let notices = message.lines().filter(|line| line.starts_with("notice: the device was lost")).map(String::from);
    Some((text(&output.stdout), notices.collect()))
}

#[test]
fn device_loss_does_not_change_printed_output() {
    let encoders = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/encoders");
    let [nomic, bert] = ["nomic", "bert-reranker"].map(|name| format!("{encoders}/{name}"));
    let texts = file("lost.txt", b"one\ntwo words\nthe cat sat\nby the door\nand ran\n");
    let messages = file("lost_chat.txt", b"Tell me a story.\nAnd then?\n");
    let run = ["run", BUILTIN, "--temperature", "0", "-n", "24"];
    let sampled = ["run", BUILTIN, "--seed", "3", "-n", "24"];
    let split = ["run", BUILTIN, "--temperature", "0", "-n", "24", "--layers-on", "gpu=1", "--layers-on", "cpu=1"];
    let chat = ["chat", BUILTIN, "--lines", "--template", "chatml", "--temperature", "0", "-n", "8"];
    let embed = ["embed", &nomic, "--batch-size", "2"];
    let rerank = ["rerank", &bert, "--query", "where is the cat"];
    // Steps are pieces of an answer, or attempts of a batch.
    let cases: [(&[&str], &str, usize); 6] = [
        (&run, "4,5,20", 3),
        (&sampled, "9", 1),
        (&split, "7", 1),
        (&chat, "3", 2),
        (&embed, "2,3", 2),
        (&rerank, "1", 1),
    ];
    for (args, steps, n_losses) in common::drawn(3, cases) {
        let input = if args[0] == "chat" { &messages } else { &texts };
        let Some((undisturbed, none)) = disturbed(args, input, "") else { return };
        assert!(undisturbed.len() > 20 && none.is_empty(), "{args:?}: {undisturbed} {none:?}");
        let (printed, notices) = disturbed(args, input, steps).unwrap();
        assert_eq!(printed, undisturbed, "{args:?}");
        assert_eq!(notices.len(), n_losses, "{args:?}: {notices:?}");
    }
}

/// Bytes per weight of an encoder's F16 file on this processor.
fn of_halves() -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
        return 2;
    }
    4
}

/// A second run computes only new tokens, and a conversation in two runs equals one run.
#[test]
fn session_file_saves_recomputation() {
    let fresh = |name: &str| {
        let path = file(name, b"");
        std::fs::remove_file(&path).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let path = fresh("run.session");
    let device = ["--device", "cpu", "--temperature", "0", "--session"];
    let args = |prompt| [&["run", BUILTIN, "--json", "-n", "12", "--prompt", prompt], &device[..], &[&path]].concat();
    let first = json_of(&args("Once upon a time"));
    let again = json_of(&args("Once upon a time"));
    assert_eq!(first["text"], again["text"]);
    assert_eq!((first["prefill"]["tokens"].as_u64(), again["prefill"]["tokens"].as_u64()), (Some(5), Some(1)));
    let longer = format!("Once upon a time{}", first["text"].as_str().unwrap());
    let longer = json_of(&args(&longer));
    let n_tokens = longer["prompt_token_ids"].as_array().unwrap().len() as u64;
    assert!(longer["prefill"]["tokens"].as_u64().unwrap() < n_tokens - 5, "{longer}");

    let talk = |exact: &[&str], path: &str, lines: &str| {
        let input = std::fs::File::open(file("session_chat.txt", lines.as_bytes())).unwrap();
        let chat = ["chat", BUILTIN, "--lines", "--template", "chatml", "-n", "8"];
        let output = command(&[&chat, exact, &device[..], &[path]].concat()).stdin(input).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    for exact in [&[][..], &["--exact"]] {
        let (once, twice, json) = (fresh("once.session"), fresh("twice.session"), fresh("talk.json"));
        let whole = talk(exact, &once, &format!("/system Be brief.\nTell me a story.\nAnd then?\n/save {json}\n"));
        let conversation = std::fs::read_to_string(&json).unwrap();
        let parts = ["/system Be brief.\nTell me a story.\n", &format!("And then?\n/save {json}\n")];
        assert_eq!(parts.map(|lines| talk(exact, &twice, lines)).concat(), whole);
        assert_eq!(std::fs::read_to_string(&json).unwrap(), conversation);
        assert!(conversation.contains("Be brief.") && conversation.contains("And then?"), "{conversation}");
        // `/load` of both kinds of file, within another conversation. Without --exact activations are rounded, so keys
        // of generated tokens differ from keys of the same tokens in a prompt.
        if exact.is_empty() {
            continue;
        }
        let again = fresh("again.session");
        let loaded = talk(exact, &again, &format!("Something else.\n/load {once}\n/regen\n/load {json}\n/regen\n"));
        let answer = whole.lines().last().unwrap();
        assert!(loaded.lines().skip(1).all(|line| line == answer) && loaded.lines().count() == 3, "{loaded}");
    }

    // Truncated by half, and from a model with another key type.
    let bytes = std::fs::read(&path).unwrap();
    let half = file("half.session", &bytes[..bytes.len() / 2]);
    let of_half = ["run", BUILTIN, "--device", "cpu", "--session", half.to_str().unwrap()];
    fails(&of_half, 1, &["half.session", "end of data"]);
    assert_eq!(std::fs::read(&half).unwrap(), &bytes[..bytes.len() / 2]);
    fails(
        &["run", BUILTIN, "--device", "cpu", "--kv-type", "q8_0", "--session", &path],
        1,
        &["kv_type", "q8_0", "f16"],
    );
}

/// Ids from llama.cpp and Hugging Face; the files hold only vocabularies, two of them of unsupported architectures.
#[test]
fn tokenize_command_works_on_vocabulary_only_files() {
    let Some(folder) = common::data(&["vocab"]) else { return };
    let folder = folder.join("vocab");
    for name in ["llama-spm", "gpt-2", "bert-bge"] {
        let cases = std::fs::read(folder.join(format!("{name}.cases.json"))).unwrap();
        let cases: Value = serde_json::from_slice(&cases).unwrap();
        let cases: Vec<&Value> = cases["cases"].as_array().unwrap().iter().filter(|case| case["text"] != "").collect();
        assert!(cases.len() >= 8, "{name}");
        let model = folder.join(format!("ggml-vocab-{name}.gguf"));
        for case in cases.iter().step_by(cases.len() / 8) {
            let text = case["text"].as_str().unwrap();
            let model = model.to_str().unwrap();
            let found = json_of(&["tokenize", "--model", model, "--no-special", "--json", "--", text]);
            assert_eq!(found["token_ids"], case["ids"], "{name}: {text:?}");
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn oversized_context_is_refused_with_one_that_fits() {
    // The built-in model with a valid context that exceeds any machine's memory.
    let mut bytes = std::fs::read(BUILTIN).unwrap();
    let key = b"llama.context_length";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&(1_u32 << 24).to_le_bytes());
    let model = file("long.gguf", &bytes);
    let args = ["run", model.to_str().unwrap(), "--device", "cpu", "--ctx", "16777216", "--prompt", "Once"];
    // 45 GB.
    let args = [&args[..], &["--kv-type", "f32"]].concat();
    fails(&args, 1, &["memory: ", "a context of ", "available memory"]);
}

/// A model in the first place is run: with a chat template as a message of `chat`, else as the beginning of a text.
#[test]
fn model_in_place_of_a_command_is_run() {
    let told = |args: &[&str]| {
        let output = tilewright(&[args, &["--device", "cpu", "-n", "8", "--temp", "0"]].concat());
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        (text(&output.stdout), text(&output.stderr))
    };
    let (story, summary) = told(&["run", BUILTIN, "The cat"]);
    assert!(story.starts_with("The cat") && summary.contains("prefill"), "{story}{summary}");
    for args in [
        &[BUILTIN, "The cat"][..],
        &["-m", BUILTIN, "The cat"],
        &["run", "The cat", "--model", BUILTIN],
        &["-v", BUILTIN, "-p", "The cat", "-c", "0", "-t", "1", "-ngl", "99"],
    ] {
        assert_eq!(told(args).0, story, "{args:?}");
    }
    let (quiet, nothing) = told(&["-q", BUILTIN, "The cat", "--no-display-prompt"]);
    assert_eq!(("The cat".to_owned() + &quiet, nothing), (story.clone(), String::new()));
    assert!(told(&["--verbose", BUILTIN, "-p", "The cat"]).1.contains("debug: device CPU"));

    let path = file("chats.gguf", &files::with_templates("The {{ messages[0].content }}", &[]));
    let path = path.to_str().unwrap();
    let (answer, _) = told(&[path, "cat"]);
    assert_eq!(answer, told(&["chat", path, "cat"]).0);
    assert!(!answer.starts_with("The cat") && story.contains(answer.trim()), "{answer}, {story}");
    // A flag of `run` alone.
    assert_eq!(told(&[path, "The cat", "--parse-special"]).0, story);

    fails(&["run", BUILTIN, "-m", BUILTIN], 2, &["the model is given twice"]);
    fails(&["run", "-m", BUILTIN, "one", "-p", "two"], 2, &["the prompt is given twice"]);
    fails(&["Why is the sky blue?"], 2, &["for the built-in one: `tilewright -p PROMPT`"]);
    fails(&["tokenise"], 2, &["unrecognized subcommand 'tokenise'", "similar subcommand", "'tokenize'"]);
    fails(&["llama3.2"], 2, &["unrecognized subcommand", "tilewright hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"]);
}

/// A longer context than the model's is reduced, and `-n -1` fills it.
#[test]
fn context_is_at_most_the_models_and_can_be_filled() {
    let output = tilewright(&["--device", "cpu", "-c", "100000", "-n", "-1", "--ignore-eos", "--temp", "0", "--json"]);
    let warning = "warning: a context of 100000 tokens is more than the model's 512, which is used instead";
    assert_eq!(text(&output.stderr).lines().next(), Some(warning));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["stop_reason"], "context_full");
    let n_tokens = json["prompt_token_ids"].as_array().unwrap().len() + json["token_ids"].as_array().unwrap().len();
    assert!((512..=513).contains(&n_tokens), "{n_tokens}");
    let plan = json_of(&["show", BUILTIN, "--device", "cpu", "-q", "--ctx", "100000", "--json"]);
    assert!(plan["error"].is_null(), "{plan}");
}

/// Several completions begin with the prompt, as a single one does.
#[test]
fn several_completions_are_printed_with_their_prompts() {
    let path = file("prompts.txt", b"The cat\nThe dog\n");
    let path = path.to_str().unwrap();
    for (args, prompts) in [
        (&["-p", "The cat", "--count", "2", "--seed", "5"][..], ["The cat", "---\nThe cat"]),
        (&["-p", "The cat", "--beams", "2"], ["\tThe cat", "\tThe cat"]),
        (&["--parallel", "2", "-f", path, "--seed", "5"], ["The cat", "---\nThe dog"]),
    ] {
        let args = [args, &["-n", "3", "--device", "cpu"]].concat();
        let told = text(&tilewright(&args).stdout);
        assert_eq!(told.matches("The ").count(), 2, "{args:?}: {told}");
        assert!(prompts.iter().all(|prompt| told.contains(prompt)), "{args:?}: {told}");
        let bare = text(&tilewright(&[&args[..], &["--no-display-prompt"]].concat()).stdout);
        assert_eq!(bare, told.replace("The cat", "").replace("The dog", ""), "{args:?}");
    }
}

#[test]
fn models_of_other_names_lead_to_what_works() {
    for (args, expected) in [
        (&["run", "llama3.2:3b"][..], "`hf:bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M`"),
        (&["chat", "Qwen/Qwen3-0.6B-GGUF"], "`hf:Qwen/Qwen3-0.6B-GGUF`"),
        (&["Qwen/Qwen3-0.6B-GGUF"], "`hf:Qwen/Qwen3-0.6B-GGUF`"),
        (&["bench", "https://huggingface.co/a/b/resolve/main/c.gguf"], "`hf:a/b/c.gguf`"),
        (&["inspect", "https://example.org/c.gguf"], "download it"),
        (&["run", "nothing.gguf"], "no such file or folder; expected a GGUF file"),
    ] {
        fails(args, 1, &[expected]);
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("cli-several");
    std::fs::create_dir_all(&folder).unwrap();
    for name in ["b-Q8_0.gguf", "a-Q4_0.gguf"] {
        std::fs::copy(BUILTIN, folder.join(name)).unwrap();
    }
    fails(&["run", folder.to_str().unwrap()], 1, &["config.json is missing", "this folder: a-Q4_0.gguf, b-Q8_0.gguf"]);
    let encoder = |name: &str| format!("{}/../../tests/data/encoders/{name}", env!("CARGO_MANIFEST_DIR"));
    for (args, model, command) in [
        (&["run"][..], "nomic", "embed"),
        (&["chat"], "nomic/model.gguf", "embed"),
        (&["bench"], "nomic", "bench embed"),
        (&["run"], "bert-reranker", "rerank"),
    ] {
        let model = encoder(model);
        let args = [args, &[&model, "--device", "cpu"]].concat();
        fails(&args, 1, &[&model, "encoder", &format!("use `tilewright {command}`")]);
    }
    fails(&["embed", BUILTIN, "--device", "cpu"], 3, &["a language model", "use `tilewright run`"]);
}

#[test]
fn environment_variables_and_threads_are_checked() {
    let told = |args: &[&str], variables: &[(&str, &str)]| {
        let output = command(args).stdin(Stdio::null()).envs(variables.iter().copied()).output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let (code, message) = told(&["version"], &[("TILEWRIGHT_PARALEL", "3"), ("RAYON_NUM_THREADS", "abc")]);
    assert_eq!(code, Some(0));
    let begin = "notice: the environment variable TILEWRIGHT_PARALEL is not known";
    let hint = if cfg!(feature = "serve") { "; did you mean TILEWRIGHT_PARALLEL?" } else { "" };
    assert!(message.lines().any(|line| line == format!("{begin}{hint}")), "{message}");
    assert!(message.contains("RAYON_NUM_THREADS is `abc`, expected a number"), "{message}");
    // What Kubernetes sets for a service.
    let links = [("TILEWRIGHT_PORT", "tcp://10.0.0.1:8080"), ("TILEWRIGHT_SERVICE_HOST", "10.0.0.1")];
    assert_eq!(told(&["version"], &links), (Some(0), String::new()));
    assert_eq!(told(&["-q", "version"], &[("TILEWRIGHT_X", "1")]), (Some(0), String::new()));
    let (_, message) = told(&["version"], &[("TILEWRIGHT_LOG", "loud")]);
    assert!(message.contains("TILEWRIGHT_LOG is `loud`, expected one of error, warn, info, debug"), "{message}");

    fails(&["info", "-t", "0"], 2, &["'--threads <N>'", "expected 1 to 1024"]);
    for (args, variables) in [(&["info", "-t", "3"][..], &[][..]), (&["info"], &[("TILEWRIGHT_THREADS", "3")])] {
        let args = [args, &["--device", "cpu"]].concat();
        let output = command(&args).envs(variables.iter().copied()).output().unwrap();
        assert!(text(&output.stdout).contains("CPU, 3 threads"), "{}", text(&output.stdout));
    }
    if cfg!(feature = "serve") {
        for (name, value, expected) in [
            ("TILEWRIGHT_PARALLEL", "0", "error: TILEWRIGHT_PARALLEL is 0, expected 1 to 64"),
            ("TILEWRIGHT_PORT", "none", "invalid value 'none' for '--port"),
            ("TILEWRIGHT_LAZY", "maybe", "invalid value 'maybe' for '--lazy'"),
        ] {
            let (code, message) = told(&["serve", "--device", "cpu"], &[(name, value)]);
            assert!(code == Some(2) && message.contains(expected), "{name}: {message}");
        }
    }
    let missing = format!("{}/no_folder/x.session", env!("CARGO_TARGET_TMPDIR"));
    fails(&["run", "--session", &missing], 2, &["error: --session is `", "a file in a folder that exists"]);
    assert!(!Path::new(&missing).parent().unwrap().exists());
}
