//! `tilewright embed` and `tilewright rerank` as a user or an engine runs them: formats, exit codes, streams.

use crate::common;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::{References, largest_difference};
use serde_json::Value;

const DIMS: usize = 384;

fn command(args: &[&str]) -> Command {
    tilewright("embed", args)
}

fn tilewright(subcommand: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.arg(subcommand).args(args).env("TILEWRIGHT_CACHE_DIR", "").env("TILEWRIGHT_DEVICE", "cpu");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the command with this stdin.
fn run(mut command: Command, stdin: &[u8]) -> Output {
    let mut child = command.spawn().unwrap();
    // A command that fails early does not read.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn lines(bytes: &[u8]) -> Vec<Value> {
    text(bytes).lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"))).collect()
}

fn scratch(name: &str, content: &[u8]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("embed");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), content).unwrap();
    folder.join(name)
}

fn minilm() -> Option<String> {
    Some(common::data(&["minilm-l6-v2"])?.join("minilm-l6-v2").to_str().unwrap().to_string())
}

/// Texts with their expected vectors.
fn references(folder: &str) -> Vec<(String, Vec<f32>)> {
    let cases = std::fs::read(Path::new(folder).join("cases.json")).unwrap();
    let cases: Value = serde_json::from_slice(&cases).unwrap();
    let vectors = References::open(&Path::new(folder).join("embeddings.safetensors")).floats("f16");
    let cases = cases["cases"].as_array().unwrap().iter().zip(vectors.chunks_exact(DIMS));
    let own = cases.filter(|(case, _)| case["max_tokens"] == 256);
    own.map(|(case, vector)| (case["text"].as_str().unwrap().to_string(), vector.to_vec())).collect()
}

fn check(found: &[f32], expected: &[f32], text: &str) {
    assert_eq!(found.len(), DIMS, "{text}");
    let difference = largest_difference(found, expected);
    assert!(difference <= 1e-5, "{text}: {difference:.1e}");
}

#[test]
fn jsonl_records_get_their_embeddings() {
    let Some(model) = minilm() else { return };
    let references = references(&model);
    let records = references.iter().enumerate();
    let input: String =
        records.map(|(i, (text, _))| serde_json::json!({ "id": i, "body": text }).to_string() + "\n").collect();
    let mut command = command(&[&model, "--io", "jsonl", "--column", "body", "--batch-size", "7", "--json-logs"]);
    command.env("TILEWRIGHT_EMBED_OUT_COLUMN", "vector");
    let output = run(command, input.as_bytes());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let found = lines(&output.stdout);
    assert_eq!(found.len(), references.len());
    for (i, (line, (text, expected))) in found.iter().zip(&references).enumerate() {
        assert_eq!((&line["id"], &line["body"]), (&i.into(), &text[..].into()));
        let vector: Vec<f32> = serde_json::from_value(line["vector"].clone()).unwrap();
        check(&vector, expected, text);
    }
    let log = lines(&output.stderr);
    assert_eq!((&log[0]["level"], &log[0]["dims"]), (&"info".into(), &DIMS.into()));
    let last = log.last().unwrap();
    assert_eq!((&last["level"], &last["records"]), (&"done".into(), &references.len().into()));
}

#[cfg(feature = "tables")]
#[test]
fn arrow_stream_answers_each_batch_before_the_next() {
    use std::sync::Arc;

    use arrow_array::cast::AsArray;
    use arrow_array::types::Float32Type;
    use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch, StringArray};
    use arrow_ipc::reader::StreamReader;
    use arrow_ipc::writer::StreamWriter;

    let Some(model) = minilm() else { return };
    let references = references(&model);
    let batch = |first: usize| {
        let texts = [Some(references[first].0.as_str()), None, Some(references[first + 1].0.as_str())];
        let columns: [(&str, ArrayRef); 2] = [
            ("id", Arc::new(Int64Array::from(vec![first as i64, -1, first as i64 + 1]))),
            ("text", Arc::new(StringArray::from(texts.to_vec()))),
        ];
        RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true))).unwrap()
    };
    let mut child = command(&[&model, "--io", "arrow-stream"]).spawn().unwrap();
    let mut writer = StreamWriter::try_new(child.stdin.take().unwrap(), &batch(0).schema()).unwrap();
    writer.flush().unwrap();
    // The schema arrives before the first batch, and each batch before the next.
    let mut reader = StreamReader::try_new(child.stdout.take().unwrap(), None).unwrap();
    let metadata = reader.schema().metadata().clone();
    for (key, value) in [("pooling", "mean"), ("normalized", "true"), ("version", env!("CARGO_PKG_VERSION"))] {
        assert_eq!(metadata.get(&format!("tilewright.{key}")[..]).map(|v| &v[..]), Some(value), "{key}");
    }
    assert!(metadata.get("tilewright.model").is_some());
    for first in [0, 2, 4] {
        let sent = batch(first);
        writer.write(&sent).unwrap();
        writer.flush().unwrap();
        let found = reader.next().unwrap().unwrap();
        assert_eq!(found.columns()[..2], sent.columns()[..]);
        let vectors = found.column_by_name("embedding").unwrap().as_fixed_size_list();
        assert_eq!((vectors.value_length(), vectors.is_null(1), vectors.null_count()), (DIMS as i32, true, 1));
        for (row, case) in [(0, first), (2, first + 1)] {
            check(vectors.value(row).as_primitive::<Float32Type>().values(), &references[case].1, &references[case].0);
        }
    }
    drop(writer);
    assert!(reader.next().is_none());
    assert!(child.wait().unwrap().success());
}

#[test]
fn or_cpu_flag_runs_batches_on_the_faster_device() {
    let Some(model) = minilm() else { return };
    let mut references = references(&model);
    if !common::is_full() {
        references.truncate(4);
    }
    let input: String =
        references.iter().map(|(text, _)| serde_json::json!({ "text": text }).to_string() + "\n").collect();
    let both = [model.as_str(), "--io", "jsonl", "--or-cpu", "--json-logs"];
    let alone = run(command(&both), input.as_bytes());
    assert!(alone.status.success() && text(&alone.stderr).contains("has no effect"), "{}", text(&alone.stderr));

    let mut on_gpu = command(&both);
    on_gpu.env("TILEWRIGHT_DEVICE", "gpu");
    let output = run(on_gpu, input.as_bytes());
    if output.status.code() == Some(4) {
        assert!(std::env::var_os("REQUIRE_ADAPTER").is_none(), "{}", text(&output.stderr));
        return common::skip("no adapter");
    }
    assert!(output.status.success(), "{}", text(&output.stderr));
    for (line, (text, expected)) in lines(&output.stdout).iter().zip(&references) {
        let vector: Vec<f32> = serde_json::from_value(line["embedding"].clone()).unwrap();
        check(&vector, expected, text);
    }
    // A driver may print too.
    let own: Vec<&str> = text(&output.stderr).lines().filter(|line| line.starts_with('{')).collect();
    let log = lines(own.join("\n").as_bytes());
    let places: Vec<&Value> = log.iter().filter(|line| line["place"].is_string()).collect();
    assert!(
        !places.is_empty() && places.iter().all(|place| place["seconds"].as_array().unwrap().len() == 2),
        "{log:?}"
    );
}

#[test]
fn closed_stdout_ends_embed_without_error() {
    let Some(model) = minilm() else { return };
    let mut child = command(&[&model, "--io", "text", "--batch-size", "1"]).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    writeln!(stdin, "one").unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 8]).unwrap();
    drop(stdout);
    // It notices when it writes, and does not wait for the end of stdin.
    while child.try_wait().unwrap().is_none() {
        let _ = writeln!(stdin, "more");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(!text(&output.stderr).contains("error"), "{}", text(&output.stderr));
}

#[test]
fn failed_embed_leaves_no_output_file() {
    let Some(model) = minilm() else { return };
    let input = scratch("in.jsonl", b"{\"text\":\"one\"}\n{\"text\":2}\n{\"text\":\"three\"}\n");
    let [output, errors] = [input.with_file_name("out.npy"), input.with_file_name("errors.jsonl")];
    let _ = std::fs::remove_file(&output);
    let args = [&model, input.to_str().unwrap(), "-o", output.to_str().unwrap()];
    let failed = run(command(&args), b"");
    assert_eq!(failed.status.code(), Some(6), "{}", text(&failed.stderr));
    assert!(text(&failed.stderr).contains("in.jsonl: record 2: `text` is a number"), "{}", text(&failed.stderr));
    assert!(!output.exists());

    let skip = [&args[..], &["--on-error", "skip", "--errors", errors.to_str().unwrap()]].concat();
    let done = run(command(&skip), b"");
    assert!(done.status.success() && done.stdout.is_empty(), "{}", text(&done.stderr));
    assert_eq!(std::fs::metadata(&output).unwrap().len(), 128 + 2 * 4 * DIMS as u64);
    assert_eq!(lines(&std::fs::read(&errors).unwrap())[0]["record"], 2);
}

#[test]
fn exit_codes_distinguish_error_kinds() {
    let nowhere = ["/nowhere", "--json-logs"];
    let cases: [(&[&str], i32, &str); 5] = [
        (&["model", "--io", "arrow-file"], 2, "cannot be read from stdin"),
        (&["model", "--adapter", "pci:zz"], 2, "domain:bus:device.function"),
        (&nowhere, 3, "\"exit_code\":3"),
        (&["model", "--adapter", "pci:ffff:1f:0.0"], 4, "pci:ffff:1f:00.0"),
        (&["model", "--adapter", "99"], 4, "number 99"),
    ];
    for (args, code, message) in cases {
        let output = run(command(args), b"");
        let stderr = text(&output.stderr);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{args:?}: {stderr}");
        assert!(stderr.contains(message), "{args:?}: {stderr}");
    }
    let mut by_variable = command(&["/nowhere"]);
    by_variable.env("TILEWRIGHT_EMBED_JSON_LOGS", "1").env("TILEWRIGHT_EMBED_PROGRESS", "0");
    assert_eq!(lines(&run(by_variable, b"").stderr)[0]["exit_code"], 3);
    assert_eq!(run(command(&["model", "--pooling", "max"]), b"").status.code(), Some(2));
}

#[test]
fn embeddings_are_shortened_to_dimensions() {
    let folder = common::repository().join("tests/data/encoders/nomic");
    let model = folder.to_str().unwrap();
    let vector = |args: &[&str]| {
        let output = run(command(&[&[model, "-", "--io", "jsonl"], args].concat()), b"{\"text\":\"a dragon\"}\n");
        assert!(output.status.success(), "{}", text(&output.stderr));
        let vector = lines(&output.stdout)[0]["embedding"].clone();
        vector.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<f64>>()
    };
    let (whole, short) = (vector(&[]), vector(&["--dimensions", "8"]));
    let length = whole[..8].iter().map(|x| x * x).sum::<f64>().sqrt();
    assert_eq!(short.len(), 8);
    assert!(short.iter().zip(&whole).all(|(a, b)| (a - b / length).abs() < 1e-6), "{short:?} {whole:?}");
    let more = (whole.len() + 1).to_string();
    let refused = run(command(&[model, "-", "--dimensions", &more]), b"");
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains(&format!("--dimensions is {more}, expected 1 to {}", whole.len())));
}

#[test]
fn rerank_sorts_records_by_cross_encoder_score() {
    let folder = common::repository().join("tests/data/encoders/bert-reranker");
    let model = folder.to_str().unwrap();
    let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let query = cases["pairs"][0]["a"].as_str().unwrap();
    let pairs = cases["pairs"].as_array().unwrap().iter().filter(|pair| pair["a"] == query);
    let mut expected: Vec<(String, f64)> =
        pairs.map(|pair| (pair["b"].as_str().unwrap().into(), pair["logit"].as_f64().unwrap())).collect();
    assert!(expected.len() >= 3);
    let records: String = expected
        .iter()
        .map(|(text, _)| serde_json::json!({ "doc": text, "score": "own" }).to_string() + "\n")
        .collect();
    let records = records + "{\"doc\":null}\n";
    expected.sort_by(|a, b| b.1.total_cmp(&a.1));

    let args = [model, "--query", query, "--io", "jsonl", "--column", "doc"];
    let output = run(tilewright("rerank", &[&args[..], &["--json", "--logits"]].concat()), records.as_bytes());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let found = lines(&output.stdout);
    assert_eq!(found.len(), expected.len());
    // The record's own field is overwritten.
    assert_eq!(text(&output.stdout).matches("\"score\"").count(), expected.len());
    for (found, (text, logit)) in found.iter().zip(&expected) {
        assert_eq!(&found["doc"], text);
        assert!((found["score"].as_f64().unwrap() - logit).abs() < 2e-5, "{found}, expected {logit}");
    }

    let output = run(tilewright("rerank", &[&args[..], &["--top-k", "1"]].concat()), records.as_bytes());
    let line = text(&output.stdout).trim_end_matches('\n');
    assert_eq!(line.split_once('\t').map(|(_, text)| text), Some(&expected[0].0[..]), "{line}");

    let bad = run(tilewright("rerank", &args), b"{\"doc\":1}\n");
    assert_eq!(bad.status.code(), Some(6), "{}", text(&bad.stderr));
    let skipped = run(tilewright("rerank", &[&args[..], &["--on-error", "skip"]].concat()), b"{\"doc\":1}\n\"a\"\n");
    assert_eq!((skipped.status.code(), text(&skipped.stdout).lines().count()), (Some(0), 1));
    assert!(text(&skipped.stderr).contains("record 1"), "{}", text(&skipped.stderr));
    let encoder = run(tilewright("rerank", &["/nowhere", "--query", "a"]), b"");
    assert_eq!(encoder.status.code(), Some(3), "{}", text(&encoder.stderr));
}

#[test]
fn rerank_puts_the_instruction_into_the_prompt() {
    let folder = common::repository().join("tests/data/encoders/qwen3-reranker");
    let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    for path in [folder.clone(), folder.join("model.gguf")] {
        for case in cases["pairs"].as_array().unwrap().iter().skip(7).take(2) {
            let value = |key: &str| case[key].as_str().unwrap();
            let args = [path.to_str().unwrap(), "--query", value("a"), "--instruction", value("instruction"), "--json"];
            let record = serde_json::json!({ "text": value("b") }).to_string() + "\n";
            let output = run(tilewright("rerank", &[&args[..], &["--io", "jsonl"]].concat()), record.as_bytes());
            assert!(output.status.success(), "{}", text(&output.stderr));
            let found = lines(&output.stdout)[0]["score"].as_f64().unwrap();
            assert!((found - case["score"].as_f64().unwrap()).abs() < 2e-5, "{found}, expected {case}");
        }
    }
    let bert = common::repository().join("tests/data/encoders/bert-reranker");
    let args = [bert.to_str().unwrap(), "--query", "a", "--instruction", "find"];
    let refused = run(tilewright("rerank", &args), b"a\n");
    assert!(!refused.status.success() && text(&refused.stderr).contains("instruction"), "{}", text(&refused.stderr));
}

#[test]
fn one_text_gives_one_vector_as_json() {
    let Some(model) = minilm() else { return };
    let printed = |args: &[&str], stdin: &str| {
        let output = run(command(args), stdin.as_bytes());
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout).to_owned()
    };
    let vector: Value = serde_json::from_str(&printed(&[&model, "a quiet river"], "")).unwrap();
    assert_eq!(vector.as_array().map(Vec::len), Some(DIMS));
    let line = printed(&[&model], "a quiet river\n");
    assert_eq!(lines(line.as_bytes())[0]["embedding"], vector);
    let file = scratch("one.jsonl", b"");
    printed(&[&model, "a quiet river", "-o", file.to_str().unwrap()], "");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), line);
    // A file that is missing is no text.
    for (argument, message) in [("nowhere.txt", "nowhere.txt: "), ("no/where", "set --io to text")] {
        let output = run(command(&[&model, argument]), b"");
        assert!(!output.status.success() && text(&output.stderr).contains(message), "{}", text(&output.stderr));
    }
}

#[test]
fn task_chooses_the_adapter_and_its_prompt() {
    let folder = crate::common::repository().join("tests/data/encoders/jina3");
    let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let folder = folder.to_str().unwrap();
    for (task, args) in [(None, &[][..]), (Some("retrieval.query"), &["--task", "retrieval.query"])] {
        let of_it = |case: &&Value| case["task"].as_str() == task && case["prompt"].as_str() == task;
        let case = cases["texts"].as_array().unwrap().iter().find(of_it).unwrap();
        let output = run(command(&[&[folder, case["text"].as_str().unwrap()], args].concat()), b"");
        assert!(output.status.success(), "{}", text(&output.stderr));
        let [found, expected] = [serde_json::from_slice(&output.stdout).unwrap(), case["vector"].clone()]
            .map(|vector: Value| serde_json::from_value::<Vec<f32>>(vector).unwrap());
        let difference = largest_difference(&found, &expected);
        assert!(found.len() == expected.len() && difference <= 1e-5, "{task:?}: {difference:.1e}");
    }
    let output = run(command(&[folder, "a", "--task", "search"]), b"");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("--task is `search`, expected retrieval.query"), "{}", text(&output.stderr));
}

/// CLIP with a small vocabulary of words, and files of pictures.
fn clip(name: &str) -> (PathBuf, impl Fn(&str) -> String) {
    let data = common::data(&["tiny-random-pictures", "encoders", "pictures"]).expect("committed test data");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("embed").join(name);
    std::fs::create_dir_all(&folder).unwrap();
    for file in ["model.safetensors", "preprocessor_config.json"] {
        std::fs::copy(data.join("tiny-random-pictures/clip").join(file), folder.join(file)).unwrap();
    }
    std::fs::copy(data.join("encoders/nomic/tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    let config = std::fs::read(data.join("tiny-random-pictures/clip/config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["text_config"]["eos_token_id"] = 3.into();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let pictures = data.join("pictures");
    (folder, move |name: &str| pictures.join(name).to_str().unwrap().to_owned())
}

#[test]
fn pictures_and_texts_have_vectors_of_one_space() {
    use tilewright::picture::{Picture, PictureLimits};
    use tilewright::{Device, EmbedOptions, Embedder};

    let (folder, picture) = clip("clip");
    let model = folder.to_str().unwrap();
    let library = Embedder::load(&Device::cpu(), &folder, EmbedOptions::default()).unwrap();
    let names = ["a.png", "b.png", "turned.jpg"];
    let decoded =
        names.map(|name| Picture::decode(&std::fs::read(picture(name)).unwrap(), &PictureLimits::default()).unwrap());
    let want = common::block_on(library.embed_images(&decoded)).unwrap();
    let want: Vec<Vec<f32>> = want.chunks_exact(40).map(<[f32]>::to_vec).collect();
    let vector = |value: &Value| serde_json::from_value::<Vec<f32>>(value.clone()).unwrap();
    let succeeded = |args: &[&str]| {
        let output = run(command(args), b"");
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        lines(&output.stdout)
    };
    // One file, several, a folder.
    assert_eq!(vector(&succeeded(&[model, "--images", &picture("a.png")])[0]), want[0]);
    let files = names.map(&picture);
    let args: Vec<&str> = [model, "--images"].into_iter().chain(files.iter().map(String::as_str)).collect();
    let found = succeeded(&args);
    for ((line, file), want) in found.iter().zip(&files).zip(&want) {
        assert_eq!((line["image"].as_str(), &vector(&line["embedding"])), (Some(&file[..]), want));
    }
    let shelf = folder.join("shelf");
    std::fs::create_dir_all(&shelf).unwrap();
    for (from, to) in [("turned.jpg", "2.JPG"), ("a.png", "1.png"), ("clip/config.json", "notes.txt")] {
        std::fs::copy(picture(from), shelf.join(to)).unwrap();
    }
    let found = succeeded(&[model, "--images", shelf.to_str().unwrap(), "--dimensions", "8"]);
    let first = tilewright::embed::shortened(&want[0], 40, 8, true);
    assert_eq!((found.len(), vector(&found[0]["embedding"])), (2, first));
    assert!(found[1]["image"].as_str().unwrap().ends_with("2.JPG"));
    // A text.
    let of_text = common::block_on(library.embed(&["a quiet river"])).unwrap();
    assert_eq!(vector(&succeeded(&[model, "a quiet river"])[0]), of_text);
}

#[test]
fn files_without_pictures_are_named() {
    let (folder, picture) = clip("clip_errors");
    let model = folder.to_str().unwrap();
    let html = scratch("page.png", b"<!doctype html><p>");
    let [good, broken] = [picture("a.png"), html.to_str().unwrap().to_owned()];
    let failed = |args: &[&str], code: i32, named: &[&str]| {
        let output = run(command(args), b"");
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(named.iter().all(|named| stderr.contains(named)), "{args:?}: {stderr}");
    };
    failed(&[model, "--images", &broken], 6, &["page.png", "expected PNG, JPEG, WebP or GIF"]);
    failed(&[model, "--images", &good, &broken], 6, &["record 2", "page.png"]);
    failed(&[model, "--images", "/nowhere.png"], 6, &["/nowhere.png"]);
    failed(&[model, "--images", model], 6, &[model, "no pictures", "*.webp"]);
    failed(&[model, "a text", "--images", &good], 2, &["--images"]);
    failed(&[model, "--images", &good, "--prompt", "query"], 2, &["--prompt"]);
    failed(&[model, "--images", &good, &good, "--out-column", "image"], 2, &["--out-column"]);
    // A model of texts alone, and one whose image encoder is incomplete.
    let nomic = common::data(&["encoders"]).expect("committed test data").join("encoders/nomic");
    failed(&[nomic.to_str().unwrap(), "--images", &good], 3, &["--images", "embeds texts alone", "CLIP"]);
    std::fs::remove_file(folder.join("preprocessor_config.json")).unwrap();
    failed(&[model, "--images", &good], 3, &["--images", "preprocessor_config.json"]);
    let output = run(command(&[model, "a quiet river"]), b"");
    assert!(output.status.success(), "{}", text(&output.stderr));
    // Skipped, and listed.
    let (folder, _) = clip("clip_skips");
    let output = run(command(&[folder.to_str().unwrap(), "--images", &broken, &good, "--on-error", "skip"]), b"");
    let found = lines(&output.stdout);
    assert!(output.status.success() && text(&output.stderr).contains("page.png"), "{}", text(&output.stderr));
    assert!(found[0]["embedding"].is_null() && found[1]["embedding"].is_array(), "{found:?}");
}
