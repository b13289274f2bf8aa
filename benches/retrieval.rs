//! Vector search: time and rate of an `Index` on the first adapter and the CPU, against copying memory there.
//!
//! `cargo bench --bench retrieval` searches 100,000 vectors of 384 numbers, `TILEWRIGHT_BENCH=full` 1,000,000. Times
//! are medians from the call to the hits, in host time. A rate is the bytes of all vectors by the time of a search,
//! for any number of queries; a copy's rate counts reads and writes. A word such as `int8` selects.

mod common;

use std::time::Instant;

use tilewright::retrieval::index::{Index, IndexOptions, Metric, Storage};
use tilewright::{Device, DeviceChoice, Error};

const DIMS: u32 = 384;
/// Queries and hits.
const SEARCHES: [[usize; 2]; 5] = [[1, 10], [1, 1000], [4, 10], [32, 10], [32, 1000]];

fn main() -> Result<(), Error> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let n: u32 = if common::is_full() { 1_000_000 } else { 100_000 };
    let rounds = if common::is_full() { 15 } else { 7 };
    let numbers = common::uniform((n * DIMS) as usize);
    let queries = common::uniform(32 * DIMS as usize);
    println!("{n} vectors of {DIMS}");
    let adapter = match pollster::block_on(Device::open(&DeviceChoice::Gpu, None)) {
        Err(error @ Error::NoAdapter { .. }) => {
            println!("skipped: {error}");
            None
        }
        opened => Some(opened?),
    };
    for device in adapter.into_iter().chain([Device::cpu()]) {
        let info = device.info();
        println!("{} ({} {}), tier {}", info.name, info.backend, info.driver, info.tier);
        let copied = copy_rate(&device)?;
        println!("copies {copied:.1} GB/s");
        for storage in Storage::ALL {
            if !words.is_empty() && !words.iter().any(|word| word == storage.name()) {
                continue;
            }
            let options = IndexOptions { metric: Metric::Dot, storage, ..IndexOptions::default() };
            let mut index = Index::new(&device, DIMS, options)?;
            pollster::block_on(index.append(&numbers))?;
            for [batch, k] in SEARCHES {
                let queries = &queries[..batch * DIMS as usize];
                let seconds = median(rounds, || pollster::block_on(index.search(queries, k, None)).map(drop))?;
                let rate = index.size_bytes() as f64 / seconds / 1e9;
                println!(
                    "{:<4} {batch:>2} queries, k = {k:<4}: {:>9.3} ms, {rate:>7.2} GB/s, {:.3} of a copy",
                    storage.name(),
                    seconds * 1e3,
                    rate / copied,
                );
            }
        }
    }
    Ok(())
}

/// Median time in seconds after a warm-up that compiles.
fn median(rounds: usize, mut run: impl FnMut() -> Result<(), Error>) -> Result<f64, Error> {
    run()?;
    let mut times = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// GB/s that a copy reads and writes: on the queue of a GPU, on one thread of a CPU.
fn copy_rate(device: &Device) -> Result<f64, Error> {
    const WORDS: u32 = 1 << 24;
    let from = vec![1u32; WORDS as usize];
    let bytes = 2.0 * 4.0 * f64::from(WORDS);
    if device.is_gpu() {
        let tensors = [device.upload("from", &[WORDS], &from)?, device.upload("to", &[WORDS], &from)?];
        let pairs = [(&tensors[0], &tensors[1]); 4];
        let seconds = median(7, || {
            device.copy(&pairs)?;
            pollster::block_on(device.drained())
        })?;
        return Ok(4.0 * bytes / seconds / 1e9);
    }
    let mut to = from.clone();
    let seconds = median(7, || {
        std::hint::black_box(&mut to).copy_from_slice(&from);
        Ok(())
    })?;
    Ok(bytes / seconds / 1e9)
}
