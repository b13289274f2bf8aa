//! How long it takes to refuse each hostile file of `tests/formats/`, each hostile vocabulary of `tests/tokenizer/` and each
//! chat template of `tests/chat/bombs.rs`: the ten slowest of each, and all that took longer than the 250 ms that are
//! promised, in which case it fails.
//!
//!     cargo bench --bench hostile

// What tests do with these modules beside this.
#![allow(dead_code, unused_imports)]

#[path = "../tests/formats/allocator.rs"]
mod allocator;
#[cfg(feature = "chat")]
#[path = "../tests/chat/bombs.rs"]
mod bombs;
#[path = "../tests/formats/builder.rs"]
mod builder;
#[path = "../tests/formats/hostile.rs"]
mod hostile;
#[path = "../tests/formats/hostile_gguf.rs"]
mod hostile_gguf;
#[path = "../tests/formats/hostile_safetensors.rs"]
mod hostile_safetensors;
#[path = "../tests/tokenizer/hostile.rs"]
mod hostile_vocabularies;

use std::time::{Duration, Instant};

use tilewright::formats::{Gguf, Safetensors, ShardIndex};

const PROMISED: Duration = Duration::from_millis(250);

fn main() {
    let mut refused = hostile::refuse_all(hostile_gguf::CLASSES, Gguf::parse);
    refused.extend(hostile::refuse_all(hostile_safetensors::CLASSES, Safetensors::parse));
    refused.extend(hostile::refuse_all(hostile_safetensors::INDEX_CLASSES, |json, _| ShardIndex::parse(json)));
    let mut refused: Vec<(Duration, String)> = refused.iter().map(|file| (file.elapsed, file.to_string())).collect();
    for (name, _, load) in hostile_vocabularies::all() {
        let start = Instant::now();
        let result = load();
        refused.push((start.elapsed(), name));
        assert!(result.is_err(), "{} was accepted", refused[refused.len() - 1].1);
    }
    refused.sort_by_key(|file| std::cmp::Reverse(file.0));
    let slow = refused.iter().filter(|file| file.0 > PROMISED).count();
    for (elapsed, name) in refused.iter().take(slow.max(10)) {
        println!("{:8.2} ms  {name}", elapsed.as_secs_f64() * 1e3);
    }
    println!("{} files, {slow} of them in more than {PROMISED:?}", refused.len());
    if slow > 0 || !templates_are_refused() {
        std::process::exit(1);
    }
}

/// Whether no template took too long.
#[cfg(feature = "chat")]
fn templates_are_refused() -> bool {
    use tilewright::chat::{ChatOptions, ChatTemplate, Message};
    let time = |(source, _): &(String, &str)| {
        let start = std::time::Instant::now();
        let template = ChatTemplate::from_source(source, Default::default());
        let rendered = template.and_then(|it| it.render(&[Message::new("user", "x")], &ChatOptions::default()));
        let elapsed = start.elapsed();
        (
            elapsed,
            rendered.map_or_else(|error| error.to_string(), |_| "rendered".into()),
            source.chars().take(100).collect(),
        )
    };
    let mut times: Vec<(Duration, String, String)> = bombs::all().iter().map(time).collect();
    times.sort_by_key(|(elapsed, ..)| std::cmp::Reverse(*elapsed));
    let slow = times.iter().filter(|(elapsed, ..)| *elapsed > PROMISED).count();
    for (elapsed, error, source) in times.iter().take(slow.max(10)) {
        println!("{:8.2} ms  {source:?}: {error}", elapsed.as_secs_f64() * 1e3);
    }
    println!("{} templates, {slow} of them in more than {PROMISED:?}", times.len());
    slow == 0
}

#[cfg(not(feature = "chat"))]
fn templates_are_refused() -> bool {
    true
}
