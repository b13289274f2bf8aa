//! How long it takes to refuse each hostile file of `tests/formats/` and each hostile vocabulary of `tests/tokenizer/`: the
//! ten slowest classes, and all that took longer than the 250 ms that are promised, in which case it fails.
//!
//!     cargo bench --bench hostile

// What tests do with these modules beside this.
#![allow(dead_code, unused_imports)]

#[path = "../tests/formats/allocator.rs"]
mod allocator;
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
    if slow > 0 {
        std::process::exit(1);
    }
}
