//! Several devices sharing one queue: tokens per second of an engine on one, two or more devices.
//!
//!     cargo bench --bench devices [-- MODEL [DEVICE,DEVICE]]
//!
//! 64 requests, each with its own prompt and the same number of tokens, are submitted at once. The time lasts until
//! the last one ends; the result is the median of three rounds after a warm-up that compiles. Ratios are to the first
//! device alone.

use std::time::Instant;

use tilewright::engine::{DeviceStats, Engine, EngineOptions, Request, Stream};
use tilewright::{Device, DeviceChoice, Error, GenerateOptions, LoadOptions, Model};

const N_TEXTS: usize = 64;
const N_TOKENS: usize = 32;
const N_PROMPT: usize = 16;
const ROUNDS: usize = 3;

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let mut models = Vec::new();
    for name in args.get(1).map_or("cpu,gpu", String::as_str).split(',') {
        let Ok(choice) = name.parse::<DeviceChoice>();
        let device = pollster::block_on(Device::open(&choice, None))?;
        // Exact, so that all devices generate the same tokens.
        let options = LoadOptions { context_length: Some(512), exact: true, ..LoadOptions::default() };
        models.push(match args.first().filter(|path| *path != "builtin") {
            Some(path) => Model::load(&device, path, options)?,
            None => Model::builtin(&device)?,
        });
    }
    println!("{}, {N_TEXTS} texts of {N_TOKENS} tokens", models[0].name());
    let mut first = None;
    let each = models.iter().map(std::slice::from_ref);
    for set in each.chain((2..=models.len()).map(|n| &models[..n])) {
        let (rate, told) = rate(set)?;
        println!("{rate:>8.1} tokens/s, {:>5.2}x: {told}", rate / *first.get_or_insert(rate));
    }
    Ok(())
}

/// Tokens per second, and the number of requests finished per device.
fn rate(models: &[Model]) -> Result<(f64, String), Error> {
    let options = EngineOptions {
        max_sequences: 8,
        max_queued: N_TEXTS,
        prefix_cache: false,
        cache_tokens: Some(8 * 512),
        ..EngineOptions::default()
    };
    let (engine, drivers) = Engine::over(models, &options)?;
    let threads: Vec<_> =
        drivers.into_iter().map(|mut driver| std::thread::spawn(move || pollster::block_on(driver.run()))).collect();
    let mut rates = Vec::new();
    for round in 0..=ROUNDS {
        let start = Instant::now();
        let requests = (0..N_TEXTS).map(|i| request(models, i));
        let streams = requests.map(|request| engine.submit(request)).collect::<Result<Vec<Stream>, Error>>()?;
        for mut stream in streams {
            while let Some(piece) = pollster::block_on(stream.next()) {
                piece?;
            }
        }
        if round > 0 {
            rates.push((N_TEXTS * N_TOKENS) as f64 / start.elapsed().as_secs_f64());
        }
    }
    let told = |each: &DeviceStats| format!("{} texts on {}", each.stats.n_finished, each.device);
    let told: Vec<String> = engine.devices().iter().map(told).collect();
    drop(engine);
    threads.into_iter().for_each(|thread| thread.join().expect("a driver does not panic"));
    rates.sort_by(f64::total_cmp);
    Ok((rates[ROUNDS / 2], told.join(", ")))
}

fn request(models: &[Model], i: usize) -> Request {
    let vocab_size = models[0].config().vocab_size as usize;
    let ids = (0..N_PROMPT).map(|t| ((7919 * (i + 1) * (t + 3)) % vocab_size) as u32).collect();
    Request::new(ids, GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(N_TOKENS) })
}
