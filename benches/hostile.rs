//! How long it takes to refuse each hostile file of `tests/formats/`: the ten slowest classes, and all that took longer than
//! the 250 ms that are promised, in which case it fails.
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

use std::time::Duration;

use tilewright::formats::{Gguf, Safetensors, ShardIndex};

const PROMISED: Duration = Duration::from_millis(250);

fn main() {
    let mut refused = hostile::refuse_all(hostile_gguf::CLASSES, Gguf::parse);
    refused.extend(hostile::refuse_all(hostile_safetensors::CLASSES, Safetensors::parse));
    refused.extend(hostile::refuse_all(hostile_safetensors::INDEX_CLASSES, |json, _| ShardIndex::parse(json)));
    refused.sort_by_key(|file| std::cmp::Reverse(file.elapsed));
    let slow = refused.iter().filter(|file| file.elapsed > PROMISED).count();
    for file in refused.iter().take(slow.max(10)) {
        println!("{:8.2} ms  {file}", file.elapsed.as_secs_f64() * 1e3);
    }
    println!("{} files, {slow} of them in more than {PROMISED:?}", refused.len());
    if slow > 0 {
        std::process::exit(1);
    }
}
