//! Formats, errors and order of work, with a function of the text in a model's place.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int64Type};
use arrow_array::{Array, RecordBatch};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, DataType, Schema, SchemaRef};
use clap::Parser;
use serde_json::{Value, json};
use tilewright::Error;

use super::error::EmbedError;
use super::input::{Input, InputFormat, Source};
use super::job::{Job, OnError, Skipped};
use super::log::{Log, Progress};
use super::output::{OutputFormat, Target};
use super::rows::{Cells, Rows};
use super::{EmbedArgs, table};

const DIMS: usize = 3;

/// Stands for a vector: what it is of can be told from it.
fn vector(text: &str) -> [f32; DIMS] {
    let sum: u32 = text.bytes().map(u32::from).sum();
    [text.len() as f32, sum as f32, 0.1]
}

/// Refuses one text as a tokenizer would.
fn model(texts: &[&str]) -> Result<Vec<f32>, Error> {
    match texts.iter().position(|text| *text == "unspeakable") {
        Some(record) => {
            let source = Error::Tokenizer { field: "text".into(), expected: "words".into(), found: "none".into() };
            Err(Error::InRecord { record, source: Box::new(source) })
        }
        None => Ok(texts.iter().flat_map(|text| vector(text)).collect()),
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/embed").join(name)
}

/// A folder of one test's own.
struct Scratch(PathBuf);

impl Scratch {
    fn new(test: &str) -> Scratch {
        let folder = std::env::temp_dir().join(format!("tilewright-embed-{}-{test}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Scratch(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn written(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), content).unwrap();
        self.path(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A job from file to file.
struct Run<'a> {
    input: &'a Path,
    output: &'a Path,
    errors: Option<&'a Path>,
    batch_size: usize,
}

impl<'a> Run<'a> {
    fn new(input: &'a Path, output: &'a Path) -> Run<'a> {
        Run { input, output, errors: None, batch_size: 2 }
    }

    fn run(&self) -> Result<(), EmbedError> {
        self.run_with(|texts, _| model(texts))
    }

    fn run_with(
        &self,
        embed: impl FnMut(&[&str], &mut dyn FnMut(usize)) -> Result<Vec<f32>, Error>,
    ) -> Result<(), EmbedError> {
        let format = OutputFormat::of(self.output, InputFormat::Auto)?;
        let source =
            Source { path: self.input, format: InputFormat::Auto, column: "text", batch_size: self.batch_size };
        let input = source.open()?;
        let input = if format.is_tabular() { input.tabled("text")? } else { input };
        let metadata = HashMap::from([("tilewright.model".to_string(), "stand-in".to_string())]);
        let target = Target { path: self.output, format, column: "embedding", dims: DIMS as u32, metadata };
        let output = target.open(&input)?;
        self.job(format.has_nulls()).run(input, output, embed)
    }

    fn job(&self, has_nulls: bool) -> Job<'static> {
        let log = Log { json: false };
        Job {
            column: "text",
            on_error: if self.errors.is_some() { OnError::Skip } else { OnError::Fail },
            has_nulls,
            log,
            progress: Progress::new(log, false),
            skipped: Skipped::create(self.errors).unwrap(),
        }
    }
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The columns of a file, in its batches.
fn batches(path: &Path) -> Vec<RecordBatch> {
    let file = fs::File::open(path).unwrap();
    match path.extension().unwrap().to_str().unwrap() {
        "arrows" => StreamReader::try_new(file, None).unwrap().map(Result::unwrap).collect(),
        "arrow" => FileReader::try_new(file, None).unwrap().map(Result::unwrap).collect(),
        #[cfg(feature = "parquet")]
        "parquet" => super::parquet::read(file, 1024).unwrap().1.map(Result::unwrap).collect(),
        other => panic!("{other}"),
    }
}

/// The columns of a file and its metadata, which a Parquet reader's batches lack.
fn schema(path: &Path) -> SchemaRef {
    match path.extension().unwrap().to_str().unwrap() {
        #[cfg(feature = "parquet")]
        "parquet" => super::parquet::read(fs::File::open(path).unwrap(), 1024).unwrap().0,
        _ => batches(path)[0].schema(),
    }
}

/// The vectors in a table.
fn vectors(batches: &[RecordBatch]) -> Vec<Option<Vec<f32>>> {
    let vector = |vector: arrow_array::ArrayRef| vector.as_primitive::<Float32Type>().values().to_vec();
    let column = |batch: &RecordBatch| {
        let column = batch.column_by_name("embedding").unwrap().as_fixed_size_list().clone();
        column.iter().map(|row| row.map(vector)).collect::<Vec<_>>()
    };
    batches.iter().flat_map(column).collect()
}

const TEXTS: [Option<&str>; 5] =
    [Some("a red ball"), None, Some(""), Some("Äpfel, \"Öl\"\nund Übermut"), Some("eleven")];

fn expected() -> Vec<Option<Vec<f32>>> {
    TEXTS.iter().map(|text| text.map(|text| vector(text).to_vec())).collect()
}

#[test]
fn every_table_format_is_read_and_passed_through() {
    let scratch = Scratch::new("tables");
    for name in ["utf8.arrows", "large_utf8.arrows", "utf8_view.arrows", "lz4.arrow"].iter().chain(PARQUETS) {
        for extension in TABLES {
            let output = scratch.path(&format!("{name}.{extension}"));
            Run::new(&fixture(name), &output).run().unwrap_or_else(|error| panic!("{name}: {error}"));
            let schema = schema(&output);
            let (input, output) = (batches(&fixture(name)), batches(&output));
            assert_eq!(vectors(&output), expected(), "{name} to {extension}");
            for (key, value) in [("origin", "pyarrow"), ("tilewright.model", "stand-in")] {
                let found = schema.metadata().get(key).map(|value| &value[..]);
                assert_eq!(found, Some(value), "{name} to {extension}: {key}");
            }
            let item = DataType::new_fixed_size_list(DataType::Float32, DIMS as i32, true);
            assert_eq!(schema.field_with_name("embedding").unwrap().data_type(), &item);
            for column in ["id", "text", "tags"] {
                let cells = |batches: &[RecordBatch]| {
                    let of = |batch: &RecordBatch| {
                        let column = batch.column_by_name(column).unwrap();
                        (0..column.len()).map(|row| format!("{:?}", column.slice(row, 1))).collect::<Vec<_>>()
                    };
                    batches.iter().flat_map(of).collect::<Vec<_>>()
                };
                assert_eq!(cells(&output), cells(&input), "{name} to {extension}: {column}");
            }
        }
    }
}

/// Extensions of outputs that are tables of Arrow's types.
const TABLES: &[&str] = if cfg!(feature = "parquet") { &["arrows", "arrow", "parquet"] } else { &["arrows", "arrow"] };
const PARQUETS: &[&str] =
    if cfg!(feature = "parquet") { &["none.parquet", "snappy.parquet", "gzip.parquet", "lz4.parquet"] } else { &[] };

#[test]
fn a_stream_has_a_batch_for_each_batch() {
    let scratch = Scratch::new("stream");
    let output = scratch.path("out.arrows");
    Run { batch_size: 1000, ..Run::new(&fixture("utf8.arrows"), &output) }.run().unwrap();
    let sizes = |path: &Path| batches(path).iter().map(RecordBatch::num_rows).collect::<Vec<_>>();
    assert_eq!((sizes(&output), sizes(&fixture("utf8.arrows"))), (vec![2, 2, 1], vec![2, 2, 1]));
}

#[test]
fn lines_keep_what_they_held() {
    let scratch = Scratch::new("lines");
    let object = r#"{"text":"eleven","deep":{"a":[1,null]},"big":18446744073709551615,"x":1.0"#;
    let input = scratch.written("in.jsonl", format!("\u{feff}{object}}}\r\n\"alone\"\n{{\"text\":null}}"));
    let output = scratch.path("out.jsonl");
    Run::new(&input, &output).run().unwrap();
    let text = fs::read_to_string(&output).unwrap();
    let expected = [
        format!("{object},\"embedding\":[6.0,639.0,0.1]}}"),
        "{\"text\":\"alone\",\"embedding\":[5.0,527.0,0.1]}".into(),
        "{\"text\":null,\"embedding\":null}".into(),
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn lines_become_columns_by_what_they_hold_first() {
    let scratch = Scratch::new("columns");
    let records = [
        json!({ "id": 1, "text": "eleven", "ok": true, "score": 1, "any": 1, "deep": [1] }),
        json!({ "text": null, "score": 0.5, "any": "x", "ok": null }),
        json!({ "id": 3, "text": "a" }),
    ];
    let content = records.map(|record| record.to_string() + "\n").concat();
    let (input, output) = (scratch.written("in.jsonl", content), scratch.path("out.arrow"));
    Run { batch_size: 3, ..Run::new(&input, &output) }.run().unwrap();
    let table = batches(&output);
    let types: Vec<String> =
        table[0].schema().fields().iter().map(|f| format!("{} {}", f.name(), f.data_type())).take(6).collect();
    assert_eq!(types, ["id Int64", "text Utf8", "ok Boolean", "score Float64", "any Utf8", "deep Utf8"]);
    assert_eq!(table[0].column(0).as_primitive::<Int64Type>().iter().collect::<Vec<_>>(), [Some(1), None, Some(3)]);
    assert_eq!(table[0].column(4).as_string::<i32>().iter().collect::<Vec<_>>(), [Some("1"), Some("x"), None]);
    assert_eq!(vectors(&table), [Some(vector("eleven").to_vec()), None, Some(vector("a").to_vec())]);

    let late = [r#"{"text":"a","id":1}"#, r#"{"text":"b"}"#, r#"{"text":"c","id":"x"}"#, r#"{"text":"d","new":1}"#];
    let input = scratch.written("late.jsonl", late.join("\n"));
    let error = Run::new(&input, &output).run().unwrap_err().to_string();
    assert!(error.ends_with("record 3: `id` is \"x\", expected Int64 as in the records before"), "{error}");
    let errors = scratch.path("errors.jsonl");
    Run { errors: Some(&errors), ..Run::new(&input, &output) }.run().unwrap();
    let skipped: Vec<u64> = lines(&errors).iter().map(|line| line["record"].as_u64().unwrap()).collect();
    assert_eq!(skipped, [3, 4]);
    assert_eq!(vectors(&batches(&output)), [Some(vector("a").to_vec()), Some(vector("b").to_vec()), None, None]);
}

#[test]
fn an_input_without_records_makes_an_output_without() {
    let scratch = Scratch::new("empty");
    for name in ["in.jsonl", "in.txt", "in.csv"] {
        let input = scratch.written(name, if name == "in.csv" { "text\n" } else { "" });
        for extension in ["npy", "jsonl", "csv"].iter().chain(TABLES) {
            let output = scratch.path(&format!("{name}.{extension}"));
            Run::new(&input, &output).run().unwrap();
            match *extension {
                "jsonl" => assert_eq!(fs::read(&output).unwrap(), b""),
                "csv" => assert_eq!(fs::read(&output).unwrap(), b"text,embedding\n"),
                "npy" => {
                    assert!(fs::read_to_string(&output).is_err_and(|_| fs::metadata(&output).unwrap().len() == 128))
                }
                _ => assert_eq!(batches(&output).iter().map(RecordBatch::num_rows).sum::<usize>(), 0),
            }
        }
    }
}

#[test]
fn csv_and_text_are_read_as_they_are_written() {
    let scratch = Scratch::new("csv");
    let csv = "id,text\n1,\"Äpfel, \"\"Öl\"\"\nund Übermut\"\n2,\n,eleven\n";
    let (input, output) = (scratch.written("in.csv", csv), scratch.path("out.csv"));
    Run::new(&input, &output).run().unwrap();
    let [first, last] = [expected()[3].clone(), expected()[4].clone()].map(|v| serde_json::to_string(&v).unwrap());
    let quoted = csv.lines().collect::<Vec<_>>()[1..3].join("\n");
    let rows = format!("id,text,embedding\n{quoted},\"{first}\"\n2,,\n,eleven,\"{last}\"\n");
    assert_eq!(fs::read_to_string(&output).unwrap(), rows);

    let input = scratch.written("in.txt", "\u{feff}one\r\n\ntwo words");
    let output = scratch.path("text.jsonl");
    Run::new(&input, &output).run().unwrap();
    let texts: Vec<Value> = lines(&output).iter().map(|line| line["text"].clone()).collect();
    assert_eq!(texts, ["one", "", "two words"]);
    let first: Vec<f32> = serde_json::from_value(lines(&output)[0]["embedding"].clone()).unwrap();
    assert_eq!(first, vector("one"));
}

#[test]
fn npy_has_a_row_for_each_text() {
    let scratch = Scratch::new("npy");
    let input = scratch.written("in.txt", "one\ntwo\nthree");
    let output = scratch.path("out.npy");
    Run::new(&input, &output).run().unwrap();
    let bytes = fs::read(&output).unwrap();
    let header = String::from_utf8_lossy(&bytes[10..128]);
    assert!(bytes.starts_with(b"\x93NUMPY\x01\x00\x76\x00") && header.ends_with(" \n"), "{header}");
    assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 3), }"), "{header}");
    let numbers: Vec<f32> = bytes[128..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(numbers, ["one", "two", "three"].map(vector).concat());

    // A null has no row.
    let input = fixture("utf8.arrows");
    let error = Run::new(&input, &output).run().unwrap_err();
    assert_eq!(error.code(), 6);
    assert!(error.to_string().contains("record 2: `text` is null"), "{error}");
    let errors = scratch.path("errors.jsonl");
    Run { errors: Some(&errors), ..Run::new(&input, &output) }.run().unwrap();
    assert_eq!(lines(&errors)[0]["record"], 2);
    assert_eq!(fs::metadata(&output).unwrap().len(), 128 + 4 * DIMS as u64 * 4);
}

#[test]
fn a_bad_record_is_named_or_skipped() {
    let scratch = Scratch::new("bad");
    let long = vec![b'x'; (16 << 20) + 1];
    let cases: [(&str, Vec<u8>, u64, &str); 12] = [
        ("utf8.txt", b"a\nb\xffc\n".to_vec(), 2, "byte 1 is not UTF-8"),
        ("long.txt", [b"a\n", &long[..], b"\nb"].concat(), 2, "the line is longer, expected 16777216 bytes at most"),
        ("model.txt", b"a\nb\nc\nunspeakable\nd".to_vec(), 4, "tokenizer: text is none, expected words"),
        ("json.jsonl", b"{\"text\":\"a\"}\n{\"text\":\n".to_vec(), 2, "not JSON: EOF while parsing a value"),
        ("blank.jsonl", b"\n{\"text\":\"a\"}\n".to_vec(), 1, "not JSON: EOF"),
        ("array.jsonl", b"[1]".to_vec(), 1, "the line is an array, expected an object or a string"),
        ("field.jsonl", b"{\"txt\":\"a\"}".to_vec(), 1, "`text` is missing, expected a string"),
        ("type.jsonl", b"{\"text\":1,\"id\":2}".to_vec(), 1, "`text` is a number, expected a string"),
        ("utf8.jsonl", b"\"a\"\n\"\xff\"".to_vec(), 2, "byte 1 is not UTF-8"),
        ("short.csv", b"id,text\n1,a\n2\n3,c\n".to_vec(), 2, "the row is 1 fields, expected 2"),
        ("utf8.csv", b"id,text\n1,a\xff\n".to_vec(), 1, "byte 1 is not UTF-8"),
        ("other.csv", b"id,text\n1,a\n\xff,b\n".to_vec(), 2, "`id` is not UTF-8, expected text"),
    ];
    for (name, content, record, fault) in cases {
        let input = scratch.written(name, content);
        for extension in ["jsonl", "arrows"] {
            let output = scratch.path(&format!("{name}.{extension}"));
            let error = Run::new(&input, &output).run().unwrap_err();
            let message = format!("{}: record {record}: {fault}", input.display());
            assert!(error.to_string().starts_with(&message) && error.code() == 6, "{error}, not {message}");
            assert!(!output.exists(), "{name}: a job that failed leaves no file");

            let errors = scratch.path(&format!("{name}.errors"));
            Run { errors: Some(&errors), ..Run::new(&input, &output) }.run().unwrap();
            let skipped = lines(&errors);
            assert_eq!((skipped.len(), &skipped[0]["record"]), (1, &json!(record)), "{name}");
            assert!(skipped[0]["error"].as_str().unwrap().starts_with(fault), "{name}");
            let has_vector: Vec<bool> = match extension {
                "jsonl" => lines(&output).iter().map(|line| !line["embedding"].is_null()).collect(),
                _ => vectors(&batches(&output)).iter().map(Option::is_some).collect(),
            };
            let expected: Vec<bool> = (1..).take(has_vector.len()).map(|number| number != record).collect();
            assert_eq!(has_vector, expected, "{name} to {extension}");
        }
    }
}

#[test]
fn an_input_that_is_not_what_it_should_be_is_refused() {
    let scratch = Scratch::new("input");
    #[cfg(feature = "parquet")]
    let truncated = fs::read(fixture("none.parquet")).unwrap();
    let stream = fs::read(fixture("utf8.arrows")).unwrap();
    let cases = [
        #[cfg(feature = "parquet")]
        (fixture("zstd.parquet"), "NYI: compressed with ZSTD", "out.arrows"),
        #[cfg(feature = "parquet")]
        (scratch.written("cut.parquet", &truncated[..truncated.len() - 9]), "", "out.arrows"),
        (fixture("utf8.arrows"), "column `tags` is List(Utf8), which neither JSON nor CSV can hold", "out.jsonl"),
        (fixture("utf8.arrows"), "column `tags` is List(Utf8), which neither JSON nor CSV can hold", "out.csv"),
        (scratch.written("cut.arrows", &stream[..stream.len() - 300]), "", "out.arrows"),
        (scratch.written("not.arrows", "text\n"), "", "out.arrows"),
        (scratch.written("other.csv", "id,txt\n"), "no column `text` (--column); there are: id, txt", "out.csv"),
        (scratch.written("taken.csv", "text,embedding\n"), "has a column `embedding` already", "out.csv"),
    ];
    for (input, fault, output) in cases {
        let output = scratch.path(output);
        let error = Run::new(&input, &output).run().unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with(&format!("{}: {fault}", input.display())), "{message}");
        assert_eq!(error.code(), 6, "{message}");
        assert!(!output.exists());
    }
    let error = Run::new(Path::new("/nowhere.csv"), &scratch.path("out.csv")).run().unwrap_err();
    assert_eq!((error.code(), error.to_string().starts_with("/nowhere.csv: ")), (1, true), "{error}");
}

#[test]
fn a_number_column_is_no_text() {
    let input = fixture("utf8.arrows");
    let source = Source { path: &input, format: InputFormat::ArrowStream, column: "id", batch_size: 1 };
    let Err(error) = source.open() else { panic!("numbers were taken for texts") };
    assert!(error.to_string().ends_with("column `id` is Int64, expected text"), "{error}");
}

#[test]
fn errors_have_their_exit_codes() {
    let scratch = Scratch::new("codes");
    let missing = Error::NoAdapter { wanted: "x".into(), available: "none".into() };
    let option = Error::Option { option: "max_tokens", expected: "1".into(), found: "0".into() };
    let broken = Error::NonFinite { pos: 0 };
    let cases = [
        (EmbedError::Usage(String::new()), 2),
        (EmbedError::Model(option), 2),
        (EmbedError::Model(Error::Io { path: "x".into(), source: io::ErrorKind::NotFound.into() }), 3),
        (EmbedError::Work(missing), 4),
        (EmbedError::Work(broken), 1),
        (EmbedError::write(Path::new("-"), io::Error::from(io::ErrorKind::BrokenPipe)), 0),
        (EmbedError::write(Path::new("-"), ArrowError::from(io::Error::from(io::ErrorKind::BrokenPipe))), 0),
        (EmbedError::write(Path::new("file"), io::Error::from(io::ErrorKind::BrokenPipe)), 1),
        (EmbedError::write(Path::new("-"), io::Error::from(io::ErrorKind::StorageFull)), 1),
    ];
    for (error, code) in cases {
        assert_eq!(error.code(), code, "{error}");
    }

    let (input, output) = (scratch.written("in.txt", "a\nb\nc\nd"), scratch.path("out.jsonl"));
    let mut n_calls = 0;
    let error = Run::new(&input, &output).run_with(|texts, _| {
        n_calls += 1;
        if n_calls == 2 { Err(Error::NonFinite { pos: 0 }) } else { model(texts) }
    });
    assert_eq!(error.unwrap_err().code(), 1);
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1, "a job that failed leaves no file");

    // A failure that is no text's fault names the record.
    let error = Run::new(&input, &output)
        .run_with(|_, _| Err(Error::InRecord { record: 1, source: Box::new(Error::NonFinite { pos: 0 }) }));
    let error = error.unwrap_err();
    assert_eq!(error.code(), 1);
    assert!(error.to_string().contains("in.txt: record 2: logits"), "{error}");
}

#[test]
fn the_next_batch_is_read_while_one_is_embedded() {
    let scratch = Scratch::new("overlap");
    let (read, was_read) = mpsc::channel();
    let rows = |first_record: u64| {
        let object = json!({ "text": "a" }).as_object().unwrap().clone();
        Rows { first_record, cells: Cells::Objects(vec![object]), bad: Vec::new() }
    };
    let batches = (1..=4).map(move |record| {
        read.send(record).unwrap();
        Ok(rows(record))
    });
    let input = Input { name: "test".into(), schema: None, batches: Box::new(batches) };
    let path = scratch.path("out.jsonl");
    let (column, metadata) = ("embedding", HashMap::new());
    let target = Target { path: &path, format: OutputFormat::Jsonl, column, dims: DIMS as u32, metadata };
    let output = target.open(&input).unwrap();
    let was_read = Mutex::new(was_read);
    let mut n_calls = 0;
    let job = Run::new(&path, &path).job(true);
    job.run(input, output, |texts, _| {
        n_calls += 1;
        if n_calls == 1 {
            let was_read = was_read.lock().unwrap();
            let numbers: Vec<u64> = (0..3).map(|_| was_read.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
            assert_eq!(numbers, [1, 2, 3]);
        }
        model(texts)
    })
    .unwrap();
    assert_eq!(lines(&path).len(), 4);
}

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    embed: EmbedArgs,
}

#[test]
fn flags_that_do_not_go_together_are_refused() {
    let check = |args: &str| Cli::parse_from(["embed", "model"].into_iter().chain(args.split(' '))).embed.check();
    for (args, format) in [
        ("-", OutputFormat::Jsonl),
        ("- --io arrow-stream", OutputFormat::ArrowStream),
        #[cfg(feature = "parquet")]
        ("in.parquet -o out.arrow", OutputFormat::ArrowFile),
        ("in.csv -o out.npy --on-error skip --errors e.jsonl", OutputFormat::Npy),
        #[cfg(feature = "parquet")]
        ("in.csv -o out.bin --format parquet", OutputFormat::Parquet),
    ] {
        assert_eq!(check(args).unwrap(), format, "{args}");
    }
    for (args, message) in [
        ("in.bin", "--io must say"),
        ("in.csv -o out.bin", "--format must say"),
        ("in.csv --format npy", "needs a file"),
        ("- --io arrow-file", "cannot come from stdin"),
        #[cfg(not(feature = "parquet"))]
        ("in.parquet -o out.arrow", "--features parquet"),
        #[cfg(not(feature = "parquet"))]
        ("in.arrow -o out.parquet", "--features parquet"),
        ("- --errors e.jsonl", "--on-error skip"),
        ("in.csv -o out.npy --on-error skip", "--errors FILE"),
        ("- --column embedding", "name the same"),
    ] {
        let error = check(args).unwrap_err();
        assert!(error.to_string().contains(message) && error.code() == 2, "{args}: {error}");
    }
}

#[test]
fn what_does_not_fit_a_column_is_told() {
    let object = |text: &str| serde_json::from_str::<Value>(text).unwrap().as_object().unwrap().clone();
    let schema: &Schema = &table::infer(&[object(r#"{"x":1.5,"b":true,"s":"a"}"#)], "text");
    for fits in [r#"{"x":2}"#, r#"{"x":null,"s":[1]}"#, r#"{"text":"a","b":false}"#, "{}"] {
        assert!(table::misfit(&object(fits), schema).is_none(), "{fits}");
    }
    for misfits in [r#"{"x":"a"}"#, r#"{"b":1}"#, r#"{"y":null}"#] {
        assert!(table::misfit(&object(misfits), schema).is_some(), "{misfits}");
    }
}
