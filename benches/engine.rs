//! Continuous batching: tokens per second of 1 to 64 sequences in one engine, and of one session.
//!
//!     cargo bench --bench engine [-- MODEL [DEVICE [SEQUENCES,..]]]
//!
//! Each sequence has its own prompt and generates greedily: enough tokens for the first sequence to outlast the last
//! prefill. The rate covers only steps that decode all sequences; it is the median of three runs. Ratios are to the
//! first number of sequences in the same run, and from 16 on to the same number with `deterministic`.

use std::time::Instant;

use tilewright::engine::{Engine, EngineOptions, Request, Stream};
use tilewright::{Device, DeviceChoice, Error, GenerateOptions, LoadOptions, Model};

/// Tokens per sequence after all prompts have been read.
const N_TOKENS: usize = 64;
const N_PROMPT: usize = 16;
const RUNS: usize = 3;

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let Ok(choice) = args.get(1).map_or("cpu", String::as_str).parse::<DeviceChoice>();
    let device = pollster::block_on(Device::open(&choice, None))?;
    let model = match args.first() {
        Some(path) => Model::load(&device, path, LoadOptions { context_length: Some(512), ..LoadOptions::default() })?,
        None => Model::builtin(&device)?,
    };
    println!("{} on {}, {N_TOKENS} tokens of each at once", model.name(), device.info().name);
    let counts: Vec<usize> = match args.get(2) {
        Some(list) => list.split(',').map(|n| n.parse().expect("SEQUENCES are numbers")).collect(),
        None => vec![1, 2, 4, 8, 16, 32, 64],
    };
    println!("session: {:.1} tokens/s", median(|| session(&model))?);
    let mut single = None;
    for n in counts {
        let rate = median(|| engine(&model, n, false))?;
        let ratio = rate / *single.get_or_insert(rate);
        print!("{n:>3} sequences: {rate:>9.1} tokens/s, {ratio:>5.2}x");
        match n {
            16.. => println!(", {:>5.2}x of deterministic", rate / median(|| engine(&model, n, true))?),
            _ => println!(),
        }
    }
    Ok(())
}

fn median(mut rate: impl FnMut() -> Result<f64, Error>) -> Result<f64, Error> {
    let mut rates = (0..RUNS).map(|_| rate()).collect::<Result<Vec<f64>, Error>>()?;
    rates.sort_by(f64::total_cmp);
    Ok(rates[RUNS / 2])
}

fn prompt(model: &Model, i: usize) -> Vec<u32> {
    let vocab_size = model.config().vocab_size as usize;
    (0..N_PROMPT).map(|t| ((7919 * (i + 1) * (t + 3)) % vocab_size) as u32).collect()
}

fn options(n_prompts: usize) -> GenerateOptions {
    GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(n_prompts + N_TOKENS) }
}

fn session(model: &Model) -> Result<f64, Error> {
    let mut session = model.session()?;
    let mut generation = session.generate_ids(&prompt(model, 0), &options(1))?;
    while let Some(piece) = pollster::block_on(generation.next()) {
        piece?;
    }
    Ok(generation.decode().rate())
}

fn engine(model: &Model, n: usize, deterministic: bool) -> Result<f64, Error> {
    let (max_sequences, max_queued) = (n as u32, n);
    let engine_options = EngineOptions { max_sequences, max_queued, deterministic, ..EngineOptions::default() };
    let (engine, mut driver) = Engine::new(model, &engine_options)?;
    let streams = (0..n).map(|i| engine.submit(Request::new(prompt(model, i), options(n))));
    let _streams = streams.collect::<Result<Vec<Stream>, Error>>()?;
    // Each step reads one chunk of one prompt; then all sequences decode together.
    let (mut start, mut before) = (Instant::now(), 0);
    while pollster::block_on(driver.step())? {
        let stats = engine.stats();
        if before == 0 && stats.n_prompt_passes == n as u64 && stats.n_running == n {
            (start, before) = (Instant::now(), stats.generated_tokens);
        }
        if stats.n_running < n && before > 0 {
            break;
        }
    }
    Ok((engine.stats().generated_tokens - before) as f64 / start.elapsed().as_secs_f64())
}
