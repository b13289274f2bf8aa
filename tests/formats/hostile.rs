//! Requirements for every hostile file: a typed error that names the field and its offset, within bounds on memory and
//! work.
//!
//! Tests use no clock, so the time bound is a bound on allocations: copying or collecting more than the file's
//! contents requests more than a multiple of its size, and repeated small allocations are too many. `cargo bench
//! --bench hostile` prints milliseconds.

use crate::allocator::measure;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};
use tilewright::Error;

/// A hostile file and its expected error.
pub struct Hostile {
    pub bytes: Vec<u8>,
    /// Length of the file; `bytes` may be a prefix.
    pub file_len: u64,
    /// The field's name in the message.
    pub field: String,
    /// The field's offset.
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

/// Peak memory limit for a parse of `len` bytes.
pub fn memory_limit(len: usize) -> usize {
    2 * len + (16 << 20)
}

/// Limit of total bytes allocated by a parse of `len` bytes, with collections that grow by doubling.
pub fn work_limit(len: usize) -> usize {
    16 * len + (64 << 10)
}

/// Limit of allocations: a header's entry has at least 4 bytes and a few pieces in memory.
pub fn calls_limit(len: usize) -> usize {
    len + 1000
}

/// Parses the file and checks the error, its message, memory and work.
pub fn refuse<T>(
    class: &str,
    seed: u64,
    file: &Hostile,
    parse: impl FnOnce(&[u8], u64) -> Result<T, Error>,
) -> Duration {
    let start = Instant::now();
    let (result, asked) = measure(|| parse(&file.bytes, file.file_len));
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
    assert!(asked.peak <= limit, "{class}, seed {seed}: {} bytes of memory, the limit is {limit}", asked.peak);
    let (bytes, calls) = (work_limit(file.bytes.len()), calls_limit(file.bytes.len()));
    assert!(
        asked.total <= bytes && asked.calls <= calls,
        "{class}, seed {seed}: {asked:?} for {} bytes",
        file.bytes.len()
    );
    elapsed
}

/// A class of hostile files: name, number of variants, and a function from seed to variant.
pub type Class = (&'static str, u64, fn(u64) -> Hostile);

/// A refused file.
pub struct Refused {
    pub class: &'static str,
    pub seed: u64,
    pub size_bytes: usize,
    pub elapsed: Duration,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, variant {}, {} bytes", self.class, self.seed, self.size_bytes)
    }
}

/// Runs all variants of all classes and returns their times.
pub fn refuse_all<T>(classes: &[Class], parse: impl Fn(&[u8], u64) -> Result<T, Error>) -> Vec<Refused> {
    let mut refused = Vec::new();
    for &(class, n_variants, make) in classes {
        for seed in 0..n_variants {
            let file = make(seed);
            let elapsed = refuse(class, seed, &file, &parse);
            refused.push(Refused { class, seed, size_bytes: file.bytes.len(), elapsed });
        }
    }
    let slowest: Option<&Refused> = refused.iter().max_by_key(|file| file.elapsed);
    let slowest = slowest.map(|file| format!("{:?} ({file})", file.elapsed)).unwrap_or_default();
    println!("{} classes, {} files refused, the slowest in {slowest}", classes.len(), refused.len());
    refused
}
