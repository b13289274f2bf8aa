//! What every hostile file has to come to: a typed error that names the field and its place, within bounds on memory.

use super::allocator::peak_bytes;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};
use tilewright::Error;

/// A hostile file and the error it has to give.
pub struct Hostile {
    pub bytes: Vec<u8>,
    /// Length of the file, of which `bytes` may be the head.
    pub file_len: u64,
    /// What the message calls the field.
    pub field: String,
    /// Where the field lies.
    pub at: RangeInclusive<u64>,
    /// Whether the error is `Unsupported` rather than `Format`.
    pub unsupported: bool,
}

impl Hostile {
    pub fn new(bytes: Vec<u8>, field: impl Into<String>, at: RangeInclusive<u64>) -> Self {
        Self { file_len: bytes.len() as u64, bytes, field: field.into(), at, unsupported: false }
    }

    pub fn unsupported(self) -> Self {
        Self { unsupported: true, ..self }
    }
}

/// The most memory that a parse of `len` bytes may take.
pub fn memory_limit(len: usize) -> usize {
    2 * len + (16 << 20)
}

/// Parses the file and checks the error, the memory, and that the message says what it has to.
pub fn refuse<T>(
    class: &str,
    seed: u64,
    file: &Hostile,
    parse: impl FnOnce(&[u8], u64) -> Result<T, Error>,
) -> Duration {
    let start = Instant::now();
    let (result, peak) = peak_bytes(|| parse(&file.bytes, file.file_len));
    let elapsed = start.elapsed();
    let Err(error) = result else { panic!("{class}, seed {seed}: accepted") };
    let message = error.to_string();
    let offset = match &error {
        Error::Format { offset, .. } if !file.unsupported => *offset,
        Error::Unsupported { field, .. } if file.unsupported => {
            field.rsplit(' ').next().and_then(|number| number.parse().ok()).expect("an offset at the field's end")
        }
        other => panic!("{class}, seed {seed}: wrong variant {other:?}"),
    };
    assert!(message.contains(&file.field), "{class}, seed {seed}: no `{}` in: {message}", file.field);
    assert!(file.at.contains(&offset), "{class}, seed {seed}: {offset} is not in {:?}: {message}", file.at);
    assert!(message.contains(&offset.to_string()), "{class}, seed {seed}: no offset in: {message}");
    assert!(message.len() < 1000 && !message.contains('\0'), "{class}, seed {seed}: {message}");
    let limit = memory_limit(file.bytes.len());
    assert!(peak <= limit, "{class}, seed {seed}: {peak} bytes of memory, the limit is {limit}");
    elapsed
}

/// A class of hostile files: its name, the number of variants, and what makes the variant of a seed.
pub type Class = (&'static str, u64, fn(u64) -> Hostile);

/// Runs all variants of all classes and says how long the slowest took.
pub fn refuse_all<T>(classes: &[Class], parse: impl Fn(&[u8], u64) -> Result<T, Error>) {
    let mut slowest = (Duration::ZERO, "");
    let mut n_files = 0;
    for &(class, n_variants, make) in classes {
        for seed in 0..n_variants {
            slowest = slowest.max((refuse(class, seed, &make(seed), &parse), class));
            n_files += 1;
        }
    }
    println!("{} classes, {n_files} files refused, the slowest in {:?} ({})", classes.len(), slowest.0, slowest.1);
}
