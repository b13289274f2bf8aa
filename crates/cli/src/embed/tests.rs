//! Formats, errors and order of work, with a function of the text instead of a model.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::Duration;

use clap::Parser;
use serde_json::{Value, json};
use tilewright::Error;

use super::error::EmbedError;
use super::input::{self, InputFormat, InputRecords, InputSource, ReadProgress, TotalRecords};
use super::job::{Job, OnError, Skipped};
use super::log::{Log, ProgressLog};
use super::output::{OutputFormat, OutputTarget};
use super::rows::{Cells, Records};
use super::{EmbedArgs, tables};

pub(super) const DIMS: usize = 3;

/// A stand-in vector that identifies its text.
pub(super) fn vector(text: &str) -> [f32; DIMS] {
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

/// A temporary folder of one test.
pub(super) struct ScratchFolder(PathBuf);

impl ScratchFolder {
    pub(super) fn new(test: &str) -> ScratchFolder {
        let folder = std::env::temp_dir().join(format!("tilewright-embed-{}-{test}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        ScratchFolder(folder)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(super) fn written(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), content).unwrap();
        self.path(name)
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A job from file to file.
pub(super) struct FileJob<'a> {
    pub input: &'a Path,
    pub output: &'a Path,
    pub errors: Option<&'a Path>,
    pub batch_size: usize,
}

impl<'a> FileJob<'a> {
    pub(super) fn new(input: &'a Path, output: &'a Path) -> FileJob<'a> {
        FileJob { input, output, errors: None, batch_size: 2 }
    }

    pub(super) fn run(&self) -> Result<(), EmbedError> {
        self.run_with(|texts, _| model(texts))
    }

    fn run_with(
        &self,
        embed: impl FnMut(&[&str], &mut dyn FnMut(usize)) -> Result<Vec<f32>, Error>,
    ) -> Result<(), EmbedError> {
        let format = OutputFormat::of(self.output, InputFormat::Auto)?;
        let source = InputSource {
            path: self.input,
            format: InputFormat::Auto,
            column: "text",
            batch_size: self.batch_size,
            read: ReadProgress::default(),
        };
        let input = source.open()?;
        let input = if format.is_tabular() { tables::tabled(input, "text")? } else { input };
        let metadata = HashMap::from([("tilewright.model".to_string(), "stand-in".to_string())]);
        let target = OutputTarget { path: self.output, format, column: "embedding", dims: DIMS as u32, metadata };
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
            progress: ProgressLog::new(log, false),
            skipped: Skipped::create(self.errors).unwrap(),
        }
    }
}

pub(super) fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn jsonl_output_keeps_all_input_fields() {
    let scratch = ScratchFolder::new("lines");
    let object = r#"{"text":"eleven","deep":{"a":[1,null]},"big":18446744073709551615,"x":1.0"#;
    let input = scratch.written("in.jsonl", format!("\u{feff}{object}}}\r\n\"alone\"\n{{\"text\":null}}"));
    let output = scratch.path("out.jsonl");
    FileJob::new(&input, &output).run().unwrap();
    let text = fs::read_to_string(&output).unwrap();
    let expected = [
        format!("{object},\"embedding\":[6.0,639.0,0.1]}}"),
        "{\"text\":\"alone\",\"embedding\":[5.0,527.0,0.1]}".into(),
        "{\"text\":null,\"embedding\":null}".into(),
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn empty_input_makes_an_empty_output() {
    let scratch = ScratchFolder::new("empty");
    for name in ["in.jsonl", "in.txt"] {
        let input = scratch.written(name, "");
        for extension in ["npy", "jsonl"] {
            let output = scratch.path(&format!("{name}.{extension}"));
            FileJob::new(&input, &output).run().unwrap();
            assert_eq!(fs::metadata(&output).unwrap().len(), if extension == "npy" { 128 } else { 0 });
        }
    }
}

#[test]
fn text_lines_are_read_without_bom_and_line_ends() {
    let scratch = ScratchFolder::new("text");
    let input = scratch.written("in.txt", "\u{feff}one\r\n\ntwo words");
    let output = scratch.path("text.jsonl");
    FileJob::new(&input, &output).run().unwrap();
    let texts: Vec<Value> = lines(&output).iter().map(|line| line["text"].clone()).collect();
    assert_eq!(texts, ["one", "", "two words"]);
    let first: Vec<f32> = serde_json::from_value(lines(&output)[0]["embedding"].clone()).unwrap();
    assert_eq!(first, vector("one"));
}

#[test]
fn npy_has_a_row_for_each_text() {
    let scratch = ScratchFolder::new("npy");
    let input = scratch.written("in.txt", "one\ntwo\nthree");
    let output = scratch.path("out.npy");
    FileJob::new(&input, &output).run().unwrap();
    let bytes = fs::read(&output).unwrap();
    let header = String::from_utf8_lossy(&bytes[10..128]);
    assert!(bytes.starts_with(b"\x93NUMPY\x01\x00\x76\x00") && header.ends_with(" \n"), "{header}");
    assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 3), }"), "{header}");
    let numbers: Vec<f32> = bytes[128..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(numbers, ["one", "two", "three"].map(vector).concat());

    // A null has no row.
    let input = scratch.written("null.jsonl", "\"a\"\n{\"text\":null}\n\"b\"\n\"c\"\n\"d\"");
    let error = FileJob::new(&input, &output).run().unwrap_err();
    assert_eq!(error.code(), 6);
    assert!(error.to_string().contains("record 2: `text` is null"), "{error}");
    let errors = scratch.path("errors.jsonl");
    FileJob { errors: Some(&errors), ..FileJob::new(&input, &output) }.run().unwrap();
    assert_eq!(lines(&errors)[0]["record"], 2);
    assert_eq!(fs::metadata(&output).unwrap().len(), 128 + 4 * DIMS as u64 * 4);
}

/// File, its content, number of the bad record, and the beginning of its fault.
pub(super) type BadCase = (&'static str, Vec<u8>, u64, &'static str);

/// Runs jobs to files with this extension; `has_vector` reads which records of a file have a vector.
pub(super) fn each_bad_record_is_named_or_skipped(
    scratch: &ScratchFolder,
    cases: &[BadCase],
    extension: &str,
    has_vector: impl Fn(&Path) -> Vec<bool>,
) {
    for (name, content, record, fault) in cases {
        let input = scratch.written(name, content);
        let output = scratch.path(&format!("{name}.{extension}"));
        let error = FileJob::new(&input, &output).run().unwrap_err();
        let message = format!("{}: record {record}: {fault}", input.display());
        assert!(error.to_string().starts_with(&message) && error.code() == 6, "{error}, not {message}");
        assert!(!output.exists(), "{name}: a job that failed leaves no file");

        let errors = scratch.path(&format!("{name}.errors"));
        FileJob { errors: Some(&errors), ..FileJob::new(&input, &output) }.run().unwrap();
        let skipped = lines(&errors);
        assert_eq!((skipped.len(), &skipped[0]["record"]), (1, &json!(record)), "{name}");
        assert!(skipped[0]["error"].as_str().unwrap().starts_with(fault), "{name}");
        let has_vector = has_vector(&output);
        let expected: Vec<bool> = (1..).take(has_vector.len()).map(|number| number != *record).collect();
        assert_eq!(has_vector, expected, "{name} to {extension}");
    }
}

/// Lines that are not valid records.
pub(super) fn bad_lines() -> Vec<BadCase> {
    let long = vec![b'x'; (16 << 20) + 1];
    vec![
        ("utf8.txt", b"a\nb\xffc\n".to_vec(), 2, "invalid UTF-8 at byte 1"),
        ("long.txt", [b"a\n", &long[..], b"\nb"].concat(), 2, "the line is too long, expected 16777216 bytes at most"),
        ("model.txt", b"a\nb\nc\nunspeakable\nd".to_vec(), 4, "tokenizer: text is none, expected words"),
        ("json.jsonl", b"{\"text\":\"a\"}\n{\"text\":\n".to_vec(), 2, "not JSON: EOF while parsing a value"),
        ("blank.jsonl", b"\n{\"text\":\"a\"}\n".to_vec(), 1, "not JSON: EOF"),
        ("array.jsonl", b"[1]".to_vec(), 1, "the line is an array, expected an object or a string"),
        ("field.jsonl", b"{\"txt\":\"a\"}".to_vec(), 1, "`text` is missing, expected a string"),
        ("type.jsonl", b"{\"text\":1,\"id\":2}".to_vec(), 1, "`text` is a number, expected a string"),
        ("utf8.jsonl", b"\"a\"\n\"\xff\"".to_vec(), 2, "invalid UTF-8 at byte 1"),
    ]
}

#[test]
fn a_bad_record_is_named_or_skipped() {
    let scratch = ScratchFolder::new("bad");
    each_bad_record_is_named_or_skipped(&scratch, &bad_lines(), "jsonl", |output| {
        lines(output).iter().map(|line| !line["embedding"].is_null()).collect()
    });
}

#[test]
fn each_error_kind_has_its_exit_code() {
    let scratch = ScratchFolder::new("codes");
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
        (EmbedError::write(Path::new("file"), io::Error::from(io::ErrorKind::BrokenPipe)), 1),
        (EmbedError::write(Path::new("-"), io::Error::from(io::ErrorKind::StorageFull)), 1),
    ];
    for (error, code) in cases {
        assert_eq!(error.code(), code, "{error}");
    }

    let (input, output) = (scratch.written("in.txt", "a\nb\nc\nd"), scratch.path("out.jsonl"));
    let mut n_calls = 0;
    let error = FileJob::new(&input, &output).run_with(|texts, _| {
        n_calls += 1;
        if n_calls == 2 { Err(Error::NonFinite { pos: 0 }) } else { model(texts) }
    });
    assert_eq!(error.unwrap_err().code(), 1);
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1, "a job that failed leaves no file");

    // An error that no text caused names the record.
    let error = FileJob::new(&input, &output)
        .run_with(|_, _| Err(Error::InRecord { record: 1, source: Box::new(Error::NonFinite { pos: 0 }) }));
    let error = error.unwrap_err();
    assert_eq!(error.code(), 1);
    assert!(error.to_string().contains("in.txt: record 2: logits"), "{error}");
}

#[test]
fn the_next_batch_is_read_while_one_is_embedded() {
    let scratch = ScratchFolder::new("overlap");
    let (read, was_read) = mpsc::channel();
    let rows = |first_record: u64| {
        let object = json!({ "text": "a" }).as_object().unwrap().clone();
        Records { first_record, cells: Cells::Objects(vec![object]), bad: Vec::new() }
    };
    let batches = (1..=4).map(move |record| {
        read.send(record).unwrap();
        Ok(rows(record))
    });
    let input = InputRecords { name: "test".into(), columns: None, batches: Box::new(batches) };
    let path = scratch.path("out.jsonl");
    let (column, metadata) = ("embedding", HashMap::new());
    let target = OutputTarget { path: &path, format: OutputFormat::Jsonl, column, dims: DIMS as u32, metadata };
    let output = target.open(&input).unwrap();
    let was_read = Mutex::new(was_read);
    let mut n_calls = 0;
    let job = FileJob::new(&path, &path).job(true);
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
struct TestCli {
    #[command(flatten)]
    embed: EmbedArgs,
}

#[test]
fn conflicting_embed_flags_are_refused() {
    let check =
        |args: &str| TestCli::parse_from(["embed", "model"].into_iter().chain(args.split(' '))).embed.check(false);
    for (args, format) in [
        ("-", OutputFormat::Jsonl),
        ("in.txt -o out.npy --on-error skip --errors e.jsonl", OutputFormat::Npy),
        #[cfg(feature = "tables")]
        ("- --io arrow-stream", OutputFormat::ArrowStream),
        #[cfg(feature = "tables")]
        ("in.parquet -o out.arrow", OutputFormat::ArrowFile),
        #[cfg(feature = "tables")]
        ("in.csv -o out.bin --format parquet", OutputFormat::Parquet),
    ] {
        assert_eq!(check(args).unwrap(), format, "{args}");
    }
    for (args, message) in [
        ("in.bin", "set --io"),
        ("in.txt -o out.bin", "set --format"),
        ("in.txt --format npy", "needs a file"),
        ("- --io arrow-file", "cannot be read from stdin"),
        #[cfg(not(feature = "tables"))]
        (
            "in.parquet",
            "in.parquet: this build has no support for Arrow, CSV and Parquet; rebuild with `--features tables`",
        ),
        #[cfg(not(feature = "tables"))]
        ("- --io arrow-stream", "the stream: this build has no support for Arrow"),
        #[cfg(not(feature = "tables"))]
        ("in.txt -o out.csv", "out.csv: this build has no support for Arrow"),
        ("- --errors e.jsonl", "--on-error skip"),
        ("in.txt -o out.npy --on-error skip", "--errors FILE"),
        ("- --column embedding", "must differ"),
    ] {
        let error = check(args).unwrap_err();
        assert!(error.to_string().contains(message) && error.code() == 2, "{args}: {error}");
    }
}

#[test]
fn number_of_records_is_estimated_until_the_file_is_read() {
    let scratch = ScratchFolder::new("total");
    let file = scratch.written("in.txt", "ten bytes\n".repeat(50));
    let read = ReadProgress::default();
    let (column, read_by) = ("text", read.clone());
    let source = InputSource { path: &file, format: InputFormat::Auto, column, batch_size: 20, read: read_by };
    let mut batches = source.open().unwrap().batches;
    assert_eq!(read.total(), None);
    for expected in [TotalRecords::Estimated(50), TotalRecords::Estimated(50), TotalRecords::Known(50)] {
        read.add_records(batches.next().unwrap().unwrap().len());
        assert_eq!(read.total(), Some(expected));
    }
    let texts = [("a quiet river", true), ("river", true), ("river.txt", false), ("a/river", false), ("-", false)];
    for (argument, is_text) in texts {
        assert_eq!(input::is_text(Path::new(argument), InputFormat::Auto), is_text, "{argument}");
    }
    assert!(!input::is_text(&file, InputFormat::Auto) && !input::is_text(Path::new("river"), InputFormat::Jsonl));
}
