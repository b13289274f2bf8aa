//! Tables in and out, with a function of the text instead of a model.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Int64Type};
use arrow_array::{Array, RecordBatch};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, DataType, Schema, SchemaRef};
use serde_json::{Value, json};

use super::super::error::EmbedError;
use super::super::input::{InputFormat, InputSource, ReadProgress};
use super::super::tests::{
    BadCase, DIMS, FileJob, ScratchFolder, bad_lines, each_bad_record_is_named_or_skipped, lines, vector,
};
use super::{objects, parquet};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/embed").join(name)
}

/// The batches of a file.
fn batches(path: &Path) -> Vec<RecordBatch> {
    let file = fs::File::open(path).unwrap();
    match path.extension().unwrap().to_str().unwrap() {
        "arrows" => StreamReader::try_new(file, None).unwrap().map(Result::unwrap).collect(),
        "arrow" => FileReader::try_new(file, None).unwrap().map(Result::unwrap).collect(),
        "parquet" => parquet::read(file, 1024).unwrap().1.map(Result::unwrap).collect(),
        other => panic!("{other}"),
    }
}

/// The schema of a file with its metadata, which a Parquet reader's batches lack.
fn schema(path: &Path) -> SchemaRef {
    match path.extension().unwrap().to_str().unwrap() {
        "parquet" => parquet::read(fs::File::open(path).unwrap(), 1024).unwrap().0,
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

/// Extensions of Arrow and Parquet outputs.
const TABLES: [&str; 3] = ["arrows", "arrow", "parquet"];
const PARQUETS: [&str; 4] = ["none.parquet", "snappy.parquet", "gzip.parquet", "lz4.parquet"];

#[test]
fn every_table_format_is_read_and_keeps_its_columns() {
    let scratch = ScratchFolder::new("tables");
    for name in ["utf8.arrows", "large_utf8.arrows", "utf8_view.arrows", "lz4.arrow"].iter().chain(&PARQUETS) {
        for extension in TABLES {
            let output = scratch.path(&format!("{name}.{extension}"));
            FileJob::new(&fixture(name), &output).run().unwrap_or_else(|error| panic!("{name}: {error}"));
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

#[test]
fn arrow_stream_output_keeps_the_input_batches() {
    let scratch = ScratchFolder::new("stream");
    let output = scratch.path("out.arrows");
    FileJob { batch_size: 1000, ..FileJob::new(&fixture("utf8.arrows"), &output) }.run().unwrap();
    let sizes = |path: &Path| batches(path).iter().map(RecordBatch::num_rows).collect::<Vec<_>>();
    assert_eq!((sizes(&output), sizes(&fixture("utf8.arrows"))), (vec![2, 2, 1], vec![2, 2, 1]));
}

#[test]
fn jsonl_column_types_are_inferred_from_the_first_batch() {
    let scratch = ScratchFolder::new("columns");
    let records = [
        json!({ "id": 1, "text": "eleven", "ok": true, "score": 1, "any": 1, "deep": [1] }),
        json!({ "text": null, "score": 0.5, "any": "x", "ok": null }),
        json!({ "id": 3, "text": "a" }),
    ];
    let content = records.map(|record| record.to_string() + "\n").concat();
    let (input, output) = (scratch.written("in.jsonl", content), scratch.path("out.arrow"));
    FileJob { batch_size: 3, ..FileJob::new(&input, &output) }.run().unwrap();
    let table = batches(&output);
    let types: Vec<String> =
        table[0].schema().fields().iter().map(|f| format!("{} {}", f.name(), f.data_type())).take(6).collect();
    assert_eq!(types, ["id Int64", "text Utf8", "ok Boolean", "score Float64", "any Utf8", "deep Utf8"]);
    assert_eq!(table[0].column(0).as_primitive::<Int64Type>().iter().collect::<Vec<_>>(), [Some(1), None, Some(3)]);
    assert_eq!(table[0].column(4).as_string::<i32>().iter().collect::<Vec<_>>(), [Some("1"), Some("x"), None]);
    assert_eq!(vectors(&table), [Some(vector("eleven").to_vec()), None, Some(vector("a").to_vec())]);

    let late = [r#"{"text":"a","id":1}"#, r#"{"text":"b"}"#, r#"{"text":"c","id":"x"}"#, r#"{"text":"d","new":1}"#];
    let input = scratch.written("late.jsonl", late.join("\n"));
    let error = FileJob::new(&input, &output).run().unwrap_err().to_string();
    assert!(error.ends_with("record 3: `id` is \"x\", expected Int64 as in earlier records"), "{error}");
    let errors = scratch.path("errors.jsonl");
    FileJob { errors: Some(&errors), ..FileJob::new(&input, &output) }.run().unwrap();
    let skipped: Vec<u64> = lines(&errors).iter().map(|line| line["record"].as_u64().unwrap()).collect();
    assert_eq!(skipped, [3, 4]);
    assert_eq!(vectors(&batches(&output)), [Some(vector("a").to_vec()), Some(vector("b").to_vec()), None, None]);
}

#[test]
fn text_column_of_numbers_is_refused() {
    let input = fixture("utf8.arrows");
    let source = InputSource {
        path: &input,
        format: InputFormat::ArrowStream,
        column: "id",
        batch_size: 1,
        read: ReadProgress::default(),
    };
    let Err(error) = source.open() else { panic!("numbers were taken for texts") };
    assert!(error.to_string().ends_with("column `id` is Int64, expected text"), "{error}");
}

#[test]
fn record_that_does_not_fit_its_column_is_detected() {
    let object = |text: &str| serde_json::from_str::<Value>(text).unwrap().as_object().unwrap().clone();
    let schema: &Schema = &objects::infer(&[object(r#"{"x":1.5,"b":true,"s":"a"}"#)], "text");
    for fits in [r#"{"x":2}"#, r#"{"x":null,"s":[1]}"#, r#"{"text":"a","b":false}"#, "{}"] {
        assert!(objects::misfit(&object(fits), schema).is_none(), "{fits}");
    }
    for misfits in [r#"{"x":"a"}"#, r#"{"b":1}"#, r#"{"y":null}"#] {
        assert!(objects::misfit(&object(misfits), schema).is_some(), "{misfits}");
    }
}

#[test]
fn malformed_or_unsupported_table_is_refused() {
    let scratch = ScratchFolder::new("input");
    let truncated = fs::read(fixture("none.parquet")).unwrap();
    let stream = fs::read(fixture("utf8.arrows")).unwrap();
    let cases = [
        (fixture("zstd.parquet"), "NYI: compressed with ZSTD", "out.arrows"),
        (scratch.written("cut.parquet", &truncated[..truncated.len() - 9]), "", "out.arrows"),
        (fixture("utf8.arrows"), "column `tags` is List(Utf8), which neither JSON nor CSV can hold", "out.jsonl"),
        (fixture("utf8.arrows"), "column `tags` is List(Utf8), which neither JSON nor CSV can hold", "out.csv"),
        (scratch.written("cut.arrows", &stream[..stream.len() - 300]), "", "out.arrows"),
        (scratch.written("not.arrows", "text\n"), "", "out.arrows"),
        (scratch.written("other.csv", "id,txt\n"), "no column `text`; choose one with --column: id, txt", "out.csv"),
        (scratch.written("taken.csv", "text,embedding\n"), "has a column `embedding` already", "out.csv"),
    ];
    for (input, fault, output) in cases {
        let output = scratch.path(output);
        let error = FileJob::new(&input, &output).run().unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with(&format!("{}: {fault}", input.display())), "{message}");
        assert_eq!(error.code(), 6, "{message}");
        assert!(!output.exists());
    }
    let error = FileJob::new(Path::new("/nowhere.csv"), &scratch.path("out.csv")).run().unwrap_err();
    assert_eq!((error.code(), error.to_string().starts_with("/nowhere.csv: ")), (1, true), "{error}");
}

#[test]
fn empty_input_makes_an_empty_table() {
    let scratch = ScratchFolder::new("empty-tables");
    for name in ["in.jsonl", "in.txt", "in.csv"] {
        let input = scratch.written(name, if name == "in.csv" { "text\n" } else { "" });
        for extension in ["npy", "jsonl", "csv"].iter().chain(&TABLES) {
            let output = scratch.path(&format!("{name}.{extension}"));
            FileJob::new(&input, &output).run().unwrap();
            match *extension {
                "jsonl" => assert_eq!(fs::read(&output).unwrap(), b""),
                "csv" => assert_eq!(fs::read(&output).unwrap(), b"text,embedding\n"),
                "npy" => assert_eq!(fs::metadata(&output).unwrap().len(), 128),
                _ => assert_eq!(batches(&output).iter().map(RecordBatch::num_rows).sum::<usize>(), 0),
            }
        }
    }
}

#[test]
fn csv_quoting_survives_a_round_trip() {
    let scratch = ScratchFolder::new("csv");
    let csv = "id,text\n1,\"Äpfel, \"\"Öl\"\"\nund Übermut\"\n2,\n,eleven\n";
    let (input, output) = (scratch.written("in.csv", csv), scratch.path("out.csv"));
    FileJob::new(&input, &output).run().unwrap();
    let [first, last] = [expected()[3].clone(), expected()[4].clone()].map(|v| serde_json::to_string(&v).unwrap());
    let quoted = csv.lines().collect::<Vec<_>>()[1..3].join("\n");
    let rows = format!("id,text,embedding\n{quoted},\"{first}\"\n2,,\n,eleven,\"{last}\"\n");
    assert_eq!(fs::read_to_string(&output).unwrap(), rows);
}

#[test]
fn bad_table_record_is_named_or_skipped() {
    let scratch = ScratchFolder::new("bad-tables");
    let csv: [BadCase; 3] = [
        ("short.csv", b"id,text\n1,a\n2\n3,c\n".to_vec(), 2, "the row is 1 fields, expected 2"),
        ("utf8.csv", b"id,text\n1,a\xff\n".to_vec(), 1, "invalid UTF-8 at byte 1"),
        ("other.csv", b"id,text\n1,a\n\xff,b\n".to_vec(), 2, "`id` is not UTF-8, expected text"),
    ];
    each_bad_record_is_named_or_skipped(&scratch, &csv, "jsonl", |output| {
        lines(output).iter().map(|line| !line["embedding"].is_null()).collect()
    });
    each_bad_record_is_named_or_skipped(&scratch, &[&bad_lines()[..], &csv].concat(), "arrows", |output| {
        vectors(&batches(output)).iter().map(Option::is_some).collect()
    });
}

#[test]
fn null_text_in_a_table_is_an_error_for_npy() {
    let scratch = ScratchFolder::new("npy-tables");
    let (input, output) = (fixture("utf8.arrows"), scratch.path("out.npy"));
    let error = FileJob::new(&input, &output).run().unwrap_err();
    assert!(error.code() == 6 && error.to_string().contains("record 2: `text` is null"), "{error}");
}

#[test]
fn broken_pipe_inside_an_arrow_error_exits_with_0() {
    let error = ArrowError::from(io::Error::from(io::ErrorKind::BrokenPipe));
    assert_eq!(EmbedError::write(Path::new("-"), error).code(), 0);
}
