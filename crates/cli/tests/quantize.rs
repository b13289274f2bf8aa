//! `tilewright quantize` as a user types it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tilewright::formats::quantize::QUANTIZABLE;

const BUILTIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/stories.gguf");
const RANDOM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/tiny-random/llama3-rope/model-f16.gguf");

fn tilewright(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(args).env("TILEWRIGHT_CACHE_DIR", "").env_remove("TILEWRIGHT_DEVICE").stdin(Stdio::null());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("quantize-command").join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// JSON printed by a successful command, and its stderr.
fn json(args: &[&str]) -> (Value, String) {
    let output = tilewright(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    (serde_json::from_slice(&output.stdout).unwrap(), text(&output.stderr))
}

fn run(model: &Path) -> String {
    let model = model.to_str().unwrap();
    let (ran, _) = json(&[
        "run",
        model,
        "--device",
        "cpu",
        "--prompt",
        "Once upon a time",
        "-n",
        "24",
        "--temperature",
        "0",
        "--json",
    ]);
    ran["text"].as_str().unwrap().to_owned()
}

/// Writes the built-in model and a random one in each type, and loads them.
#[test]
fn quantize_command_writes_a_working_file_of_each_type() {
    let folder = folder("types");
    let want = run(Path::new(BUILTIN));
    for block_type in QUANTIZABLE {
        let name = block_type.name();
        let output = folder.join(format!("{name}.gguf"));
        let path = output.to_str().unwrap();
        let (report, _) = json(&["quantize", BUILTIN, path, "--pure", "--type", &name.to_lowercase(), "--json"]);
        assert_eq!(report["type"], name);
        assert_eq!(report["written_bytes"], std::fs::metadata(&output).unwrap().len());
        let got = run(&output);
        println!("{name}: {} bytes, {} bits a weight: {got}", report["written_bytes"], report["bits_per_weight"]);
        // The least rounded types give the same tokens.
        if ["F32", "F16", "Q8_0"].contains(&name) {
            assert_eq!(got, want, "{name}");
        }
        assert!(got.len() > 20, "{name}: {got}");
        let random = folder.join(format!("random-{name}.gguf"));
        let (_, said) = json(&["quantize", RANDOM, random.to_str().unwrap(), name, "--pure", "--json"]);
        assert!(!said.contains("already quantised"), "{said}");
        let (seen, _) = json(&["inspect", random.to_str().unwrap(), "--device", "cpu", "--json"]);
        assert_eq!(seen["error"], Value::Null, "{name}");
    }
}

#[test]
fn quantize_command_prints_a_report_and_keeps_old_files() {
    let folder = folder("report");
    let output = folder.join("q4_0.gguf");
    let path = output.to_str().unwrap();
    let printed = tilewright(&["quantize", BUILTIN, path, "--type", "Q4_0"]);
    let (stdout, stderr) = (text(&printed.stdout), text(&printed.stderr));
    assert!(printed.status.success(), "{stderr}");
    assert!(stdout.starts_with("Q4_0") && stdout.contains("q4_0.gguf: ") && stdout.contains(" MiB\n"), "{stdout}");
    assert!(stdout.contains("F32"), "norms keep their type: {stdout}");
    let recipe = folder.join("recipe").with_extension("gguf");
    let (report, _) = json(&["quantize", BUILTIN, recipe.to_str().unwrap(), "q4_k", "--json"]);
    assert_eq!((&report["type"], &report["pure"]), (&"Q4_K_M".into(), &false.into()));
    std::fs::remove_file(recipe).unwrap();
    // The file exists now.
    let again = tilewright(&["quantize", BUILTIN, path, "--type", "Q8_0"]);
    assert_eq!(again.status.code(), Some(1));
    let message = text(&again.stderr);
    assert!(message.contains("q4_0.gguf: exists already; --force overwrites it"), "{message}");
    assert!(tilewright(&["quantize", BUILTIN, path, "--type", "Q8_0", "--force"]).status.success());
    let left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["q4_0.gguf"]);
}

#[test]
fn invalid_quantize_arguments_are_refused() {
    let folder = folder("mistakes");
    let output = folder.join("out.gguf");
    let path = output.to_str().unwrap();
    let fails = |args: &[&str], code: i32, expected: &str| {
        let output = tilewright(args);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
        assert!(message.contains(expected) && !message.contains("panicked"), "{args:?}: {message}");
        assert!(output.stdout.is_empty());
    };
    fails(&["quantize", BUILTIN, path, "--type", "Q9_0"], 2, "expected one of F32, F16, BF16, Q8_0");
    fails(&["quantize", BUILTIN, path], 2, "--type <TYPE>");
    fails(&["quantize", BUILTIN, path, "Q8_0", "--type", "Q8_0"], 2, "cannot be used with");
    fails(&["quantize", BUILTIN, path, "MXFP4"], 2, "--type is MXFP4, expected a recipe, such as MXFP4_MOE");
    fails(&["quantize", "nowhere.gguf", path, "--type", "Q8_0"], 1, "nowhere.gguf: ");
    fails(&["quantize", BUILTIN, path, "--type", "Q8_0", "--imatrix", RANDOM], 1, "model-f16.gguf: imatrix: tensors");
    let nowhere = folder.join("no").join("out.gguf");
    fails(
        &["quantize", BUILTIN, nowhere.to_str().unwrap(), "--type", "Q8_0"],
        1,
        "out.gguf: the folder does not exist",
    );
    assert!(!output.exists());
}
