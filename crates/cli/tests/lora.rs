//! `--lora` of `tilewright run` and `bench`.

use crate::common;

use std::path::PathBuf;

use serde_json::Value;
use tilewright::kernels::KvType;
use tilewright::{GenerateOptions, LoadOptions, Model, Session};

fn tiny(path: &str) -> PathBuf {
    common::repository().join("tests/data/tiny-random").join(path)
}

fn adapter(path: &str) -> PathBuf {
    common::repository().join("tests/data/tiny-random-lora").join(path)
}

fn greedy(session: &mut Session, ids: &[u32]) -> Vec<u32> {
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(12) };
    common::collect(&mut session.generate_from(ids, &options).unwrap()).0
}

#[test]
fn run_and_bench_accept_a_lora_adapter() {
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_tilewright"));
        let model = tiny("llama3-rope");
        command.args(args).arg(&model).args(["--device", "cpu", "--exact", "--kv-type", "f32"]);
        command.env("TILEWRIGHT_CACHE_DIR", "");
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let ids = "20,21,22,23,24,25,26,27,28,29,30,31,32";
    let tokens = |lora: &[&str]| {
        let (code, out, err) =
            run(&[&["run", "--prompt-ids", ids, "--temperature", "0", "-n", "12", "--ignore-eos", "--json"], lora]
                .concat());
        assert_eq!(code, Some(0), "{err}");
        let json: Value = serde_json::from_str(&out).unwrap();
        json["token_ids"]
            .as_array()
            .unwrap_or_else(|| panic!("{out}"))
            .iter()
            .map(|id| id.as_u64().unwrap() as u32)
            .collect::<Vec<_>>()
    };
    let options = LoadOptions { kv_type: KvType::F32, exact: true, ..LoadOptions::default() };
    let model = Model::load(&common::cpu(), tiny("llama3-rope"), options).unwrap();
    let want = |scale: f32| {
        let adapter = model.load_adapter(adapter("llama3-rope"), scale).unwrap();
        greedy(&mut model.with_adapter(Some(&adapter)).unwrap().session().unwrap(), &(20..33).collect::<Vec<u32>>())
    };
    let path = adapter("llama3-rope.gguf");
    let path = path.to_str().unwrap();
    assert_eq!(tokens(&["--lora", path]), want(1.0));
    assert_eq!(tokens(&["--lora", &format!("{path}:0.25")]), want(0.25));
    assert_eq!(
        tokens(&["--lora", &format!("{path}:0")]),
        greedy(&mut model.session().unwrap(), &(20..33).collect::<Vec<u32>>())
    );
    let (code, _, err) = run(&["run", "--prompt-ids", ids, "--lora", adapter("qwen2").to_str().unwrap()]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("adapter: base_model.model.model.layers.0") && err.contains("expected"), "{err}");
    let (code, out, err) = run(&["bench", "-p", "8", "-n", "2", "--repetitions", "1", "--lora", path]);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("tg2"), "{out}");
}
