//! Time to refuse each hostile file of `tests/formats/`, each hostile vocabulary of `tests/tokenizer/`, each chat
//! template of `tests/chat/bombs.rs`, each constraint of `tests/grammar/bombs.rs`, each picture of
//! `tests/picture/bombs.rs`, and each `config.json` of the test data with each of its numbers replaced. Prints the ten
//! slowest and all above the promised 250 ms, in which case the bench fails.
//!
//!     cargo bench --bench hostile

// The tests use more of these modules.
#![allow(dead_code, unused_imports)]

#[path = "../tests/common/allocator.rs"]
mod allocator;
#[cfg(feature = "chat")]
#[path = "../tests/chat/bombs.rs"]
mod bombs;
#[path = "../tests/formats/builder.rs"]
mod builder;
#[cfg(all(feature = "builtin", feature = "grammar"))]
#[path = "../tests/grammar/bombs.rs"]
mod constraints;
#[path = "../tests/formats/hostile.rs"]
mod hostile;
#[path = "../tests/formats/hostile_gguf.rs"]
mod hostile_gguf;
#[path = "../tests/formats/hostile_safetensors.rs"]
mod hostile_safetensors;
#[path = "../tests/tokenizer/hostile.rs"]
mod hostile_vocabularies;
#[cfg(feature = "pictures")]
#[path = "../tests/picture/bombs.rs"]
mod pictures;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tilewright::formats::{Gguf, Safetensors, ShardIndex};
use tilewright::load::ModelFile;

const PROMISED: Duration = Duration::from_millis(250);

fn main() {
    let mut files = hostile::refuse_all(hostile_gguf::CLASSES, Gguf::parse);
    files.extend(hostile::refuse_all(hostile_safetensors::CLASSES, Safetensors::parse));
    files.extend(hostile::refuse_all(hostile_safetensors::INDEX_CLASSES, |json, _| ShardIndex::parse(json)));
    let files = files.iter().map(|file| (file.elapsed, file.to_string()));
    let mut refused: Vec<(Duration, String)> = files.chain(vocabularies()).chain(configurations()).collect();
    #[cfg(feature = "chat")]
    refused.extend(templates());
    #[cfg(all(feature = "builtin", feature = "grammar"))]
    refused.extend(constraints());
    #[cfg(feature = "pictures")]
    refused.extend(pictures());
    refused.sort_by_key(|(elapsed, _)| std::cmp::Reverse(*elapsed));
    let slow = refused.iter().filter(|(elapsed, _)| *elapsed > PROMISED).count();
    for (elapsed, what) in refused.iter().take(slow.max(10)) {
        println!("{:8.2} ms  {what}", elapsed.as_secs_f64() * 1e3);
    }
    println!("{} files, {slow} of them in more than {PROMISED:?}", refused.len());
    if slow > 0 {
        std::process::exit(1);
    }
}

fn vocabularies() -> Vec<(Duration, String)> {
    let refuse = |(name, _, load): (String, &str, hostile_vocabularies::Attempt)| {
        let start = Instant::now();
        let result = load();
        assert!(result.is_err(), "{name} was accepted");
        (start.elapsed(), name)
    };
    hostile_vocabularies::all().into_iter().map(refuse).collect()
}

#[cfg(feature = "chat")]
fn templates() -> impl Iterator<Item = (Duration, String)> {
    use tilewright::chat::{ChatOptions, ChatTemplate, Message};
    bombs::all().into_iter().map(|(source, _)| {
        let start = Instant::now();
        let template = ChatTemplate::from_source(&source, Default::default());
        let rendered = template.and_then(|it| it.render(&[Message::new("user", "x")], &ChatOptions::default()));
        let elapsed = start.elapsed();
        let error = rendered.map_or_else(|error| error.to_string(), |_| "rendered".into());
        (elapsed, format!("{:?}: {error}", source.chars().take(100).collect::<String>()))
    })
}

/// Refused constraints, and large valid ones.
#[cfg(all(feature = "builtin", feature = "grammar"))]
fn constraints() -> Vec<(Duration, String)> {
    let model = tilewright::Model::builtin(&tilewright::Device::cpu()).expect("the model loads");
    let grammars = model.grammars().expect("a usable vocabulary");
    let all = constraints::all().into_iter().map(|(constraint, _)| (constraint, false));
    let all = all.chain(constraints::large().into_iter().map(|constraint| (constraint, true)));
    let begin = |(constraint, is_read): (tilewright::grammar::Constraint, bool)| {
        let start = Instant::now();
        let begun = grammars.begin(&constraint, &[]);
        let elapsed = start.elapsed();
        let shown: String = format!("{constraint:?}").chars().take(100).collect();
        assert_eq!(begun.is_ok(), is_read, "{shown}");
        (elapsed, begun.map_or_else(|error| format!("{shown}: {error}"), |_| format!("{shown}: read")))
    };
    all.map(begin).collect()
}

#[cfg(feature = "pictures")]
fn pictures() -> impl Iterator<Item = (Duration, String)> {
    use tilewright::picture::{Picture, PictureLimits};
    pictures::all().into_iter().map(|(name, bytes, _)| {
        let start = Instant::now();
        let decoded = Picture::decode(&bytes, &PictureLimits::default());
        let elapsed = start.elapsed();
        (elapsed, decoded.map_or_else(|error| format!("{name}: {error}"), |_| format!("{name}: decoded")))
    })
}

/// Opens a folder without weights for each number of each test configuration and each value that no model has.
fn configurations() -> Vec<(Duration, String)> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hostile-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the build's folder is writable");
    std::fs::write(folder.join("model.safetensors"), builder::safetensors("{}", 0)).expect("the folder is writable");
    let models = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny-random"));
    let mut opened = Vec::new();
    for model in models.into_iter().flatten().flatten().map(|entry| entry.path()) {
        let Ok(bytes) = std::fs::read(model.join("config.json")) else { continue };
        let config: Value = serde_json::from_slice(&bytes).expect("a configuration");
        let numbers = config.as_object().into_iter().flatten().filter(|(_, value)| value.is_number());
        for (key, _) in numbers {
            for value in [json!(-1), json!(0), json!(0.5), json!(1u64 << 31), json!(u32::MAX), json!(1e39), json!("1")]
            {
                let mut changed = config.clone();
                changed[key] = value.clone();
                std::fs::write(folder.join("config.json"), changed.to_string()).expect("the folder is writable");
                let start = Instant::now();
                // Some values are harmless; their time counts too.
                drop(ModelFile::open(&folder));
                opened.push((start.elapsed(), format!("{} with {key} {value}", model.display())));
            }
        }
    }
    // A leftover folder lies in the build's own folder.
    let _ = std::fs::remove_dir_all(&folder);
    opened
}
