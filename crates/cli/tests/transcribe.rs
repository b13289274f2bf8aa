//! `tilewright transcribe` with a random model: formats of one transcript, files in a folder, errors that name the file.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::common;

fn folder() -> Option<PathBuf> {
    Some(common::data(&["tiny-random-sound"])?.join("tiny-random-sound"))
}

fn transcribe(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(["transcribe", "--device", "cpu"]).args(args).env("TILEWRIGHT_CACHE_DIR", "").stdin(Stdio::null());
    command.output().unwrap()
}

fn stdout(args: &[&str]) -> String {
    let output = transcribe(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refused(args: &[&str], code: i32) -> String {
    let output = transcribe(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
    assert_eq!(output.stdout, b"", "{args:?}");
    error
}

#[test]
fn transcripts_are_the_same_in_all_formats() {
    let Some(folder) = folder() else { return };
    let sound = folder.join("chirp.wav");
    let [model, sound] = [&folder, &sound].map(|path| path.to_str().unwrap());
    let json: Value = serde_json::from_str(&stdout(&[model, sound, "--language", "en", "--json"])).unwrap();
    assert_eq!(
        (&json["language"], &json["task"], &json["duration"]),
        (&"en".into(), &"transcribe".into(), &3.0.into())
    );
    let segments = json["segments"].as_array().unwrap();
    let text = |segment: &Value| segment["text"].as_str().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    let texts: Vec<String> = segments.iter().map(text).collect();
    let plain = stdout(&[model, sound, "--language", "english"]);
    assert_eq!(stdout(&[model, sound, "-l", "en-US"]), plain);
    assert_eq!(stdout(&[model, sound, "-l", "auto"]), stdout(&[model, sound]));
    assert_eq!(
        plain.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>(),
        texts
    );
    let json: Value = serde_json::from_str(&stdout(&[model, sound, "-l", "en", "--json", "--words"])).unwrap();
    let segments_with_words = json["segments"].as_array().unwrap();
    let words: Vec<&str> = segments_with_words
        .iter()
        .flat_map(|segment| segment["words"].as_array().unwrap())
        .map(|word| word["word"].as_str().unwrap())
        .collect();
    let timed = stdout(&[model, sound, "-l", "en", "--words"]);
    let texts: Vec<&str> = timed.lines().map(|line| line.split_once("]  ").unwrap().1).collect();
    assert_eq!(texts, words.iter().map(|word| word.trim()).collect::<Vec<_>>());
    assert!(texts.len() > segments_with_words.len() && timed.starts_with("[00:00:0"), "{timed}");
    let srt = stdout(&[model, sound, "-l", "en", "--srt"]);
    assert_eq!(srt.matches(" --> ").count(), segments.len());
    let vtt = stdout(&[model, sound, "-l", "en", "--vtt"]);
    assert!(vtt.starts_with("WEBVTT\n\n") && vtt.matches(" --> ").count() == segments.len(), "{vtt}");
    let translated: Value =
        serde_json::from_str(&stdout(&[model, sound, "-l", "de", "--translate", "--json"])).unwrap();
    assert_eq!((&translated["language"], &translated["task"]), (&"en".into(), &"translate".into()));
}

#[test]
fn batches_of_windows_hear_all_of_a_long_sound() {
    let Some(folder) = folder() else { return };
    // 3 s of 16 bits, three times.
    let mut bytes = std::fs::read(folder.join("chirp.wav")).unwrap();
    let at = bytes.windows(4).position(|name| name == b"data").unwrap() + 8;
    let samples = bytes[at..].to_vec();
    (0..2).for_each(|_| bytes.extend_from_slice(&samples));
    let n = u32::try_from(bytes.len()).unwrap();
    bytes[4..8].copy_from_slice(&(n - 8).to_le_bytes());
    bytes[at - 4..at].copy_from_slice(&(n - at as u32).to_le_bytes());
    let path = std::env::temp_dir().join(format!("tilewright-long-{}.wav", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    let [model, sound] = [&folder, &path].map(|path| path.to_str().unwrap());
    let heard = |batch: &str| -> Value {
        serde_json::from_str(&stdout(&[model, sound, "-l", "en", "--batch-size", batch, "--json"])).unwrap()
    };
    let [two, three] = ["2", "3"].map(heard);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(two, three);
    let of = |name: &str| {
        two["segments"].as_array().unwrap().iter().map(|one| one[name].as_f64().unwrap()).collect::<Vec<_>>()
    };
    let (seeks, ends) = (of("seek"), of("end"));
    assert!(seeks.is_sorted() && seeks.first() == Some(&0.0) && seeks.last() > Some(&400.0), "{two}");
    assert!(ends.iter().all(|&end| end <= 9.0), "{two}");
}

#[test]
fn several_sounds_become_files_of_their_names() {
    let Some(folder) = folder() else { return };
    let out = std::env::temp_dir().join(format!("tilewright-transcripts-{}", std::process::id()));
    let sounds = ["chirp.wav", "short.wav"].map(|name| folder.join(name));
    let [model, first, second] = [&folder, &sounds[0], &sounds[1]].map(|path| path.to_str().unwrap());
    let to = out.to_str().unwrap();
    assert_eq!(stdout(&[model, first, second, "-l", "en", "--srt", "--output-dir", to]), "");
    let read = |name: &str| std::fs::read_to_string(out.join(name)).unwrap();
    assert_eq!(read("chirp.srt"), stdout(&[model, first, "-l", "en", "--srt"]));
    assert_eq!(read("short.srt"), stdout(&[model, second, "-l", "en", "--srt"]));
    let error = refused(&[model, first, first, "--output-dir", to], 2);
    assert!(error.contains("--output-dir") && error.contains("chirp.txt"), "{error}");
    let error = refused(&[model, first, second, "--vtt"], 2);
    assert!(error.contains("--vtt is for 2 files, expected one file, or a folder by --output-dir"), "{error}");
    std::fs::remove_dir_all(&out).unwrap();
}

#[test]
fn sounds_of_all_formats_are_transcribed() {
    let Some(folder) = folder() else { return };
    let sounds = common::find_data(Path::new("sounds")).unwrap();
    let names = ["stereo.flac", "mono.mp3", "mono.ogg", "mono.opus", "stereo.webm", "mono.m4a", "mono.aac"];
    let paths: Vec<String> = names.iter().map(|name| sounds.join(name).to_str().unwrap().to_owned()).collect();
    let mut args = vec![folder.to_str().unwrap(), "-l", "en", "--json"];
    args.extend(paths.iter().map(String::as_str));
    let printed = stdout(&args);
    let transcripts: Vec<Value> =
        serde_json::Deserializer::from_str(&printed).into_iter().collect::<Result<_, _>>().unwrap();
    assert_eq!(printed.lines().count(), names.len(), "{printed}");
    assert!(transcripts.iter().zip(&paths).all(|(one, path)| one["file"] == path.as_str()), "{printed}");
    let seconds: Vec<f64> = transcripts.iter().map(|one| one["duration"].as_f64().unwrap()).collect();
    for (i, want) in [0.2, 0.4, 0.4, 0.18, 0.09, 0.46, 0.28].into_iter().enumerate() {
        assert!((seconds[i] - want).abs() < 0.01, "{}: {} s, expected {want}", names[i], seconds[i]);
    }
    let of = |name: &str| stdout(&[args[0], sounds.join(name).to_str().unwrap(), "-l", "en"]);
    assert_eq!(of("stereo.flac"), of("stereo.flac.wav"));
}

#[test]
fn damaged_packets_are_reported() {
    let Some(folder) = folder() else { return };
    let mut bytes = std::fs::read(common::find_data(Path::new("sounds/stereo.webm")).unwrap()).unwrap();
    // The third packet, 7 bytes after the beginning of its block.
    let is_block = |at: &usize| matches!(bytes[*at..], [0xa3, 0x40..=0x7f, _, 0x81, ..]);
    let at = (0..bytes.len()).filter(is_block).nth(2).unwrap();
    bytes[at + 7..at + 9].fill(0xff);
    let path = std::env::temp_dir().join(format!("tilewright-damaged-{}.webm", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    let output = transcribe(&[folder.to_str().unwrap(), path.to_str().unwrap(), "-l", "en"]);
    std::fs::remove_file(&path).unwrap();
    let told = String::from_utf8(output.stderr).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        output.status.success()
            && told.contains("warning: ")
            && told.contains("1 damaged packet was replaced with silence"),
        "{told}"
    );
}

#[test]
fn errors_name_the_file_or_the_flag() {
    let Some(folder) = folder() else { return };
    let model = folder.to_str().unwrap();
    let bad = std::env::temp_dir().join(format!("tilewright-bad-{}.wav", std::process::id()));
    let path = bad.to_str().unwrap();
    let whole = std::fs::read(folder.join("chirp.wav")).unwrap();
    for (bytes, want) in [
        (&whole[..1000], "the file ends after 1000 bytes"),
        (&b"words"[..], "no sound in a known format, expected WAV, FLAC, MP3, M4A (AAC), Ogg or WebM (Opus, Vorbis)"),
        (&b""[..], "an empty file, expected WAV"),
    ] {
        std::fs::write(&bad, bytes).unwrap();
        let error = refused(&[model, path], 1);
        assert!(error.contains(path) && error.contains(want), "{error}");
    }
    std::fs::remove_file(&bad).unwrap();
    // Before the model is looked at.
    assert!(refused(&["hf:a/b", path], 1).contains(path));
    let sound = folder.join("short.wav");
    let sound = sound.to_str().unwrap();
    let error = refused(&[model, sound, "--language", "klingon"], 2);
    assert!(error.contains("--language is klingon") && error.contains("en, de"), "{error}");
    let error = refused(&[model, sound, "--batch-size", "65"], 2);
    assert!(error.contains("--batch-size") && error.contains("65"), "{error}");
    let text_model = common::find_data(Path::new("tiny-random/qwen3")).unwrap();
    let error = refused(&[text_model.to_str().unwrap(), sound], 1);
    assert!(error.contains("model_type is `qwen3`") && error.contains("whisper"), "{error}");
}
