//! Texts per second of an encoder, by batch, and what its pipeline gains.
//!
//! `cargo bench --bench embed -- FOLDER [TEXTS]` embeds the texts of a file, one on a line, or those below, in batches of 1,
//! 8 and 32 on the CPU and on the first adapter (`--cpu`: on the CPU alone); then all of them with 1 to 8 submissions in
//! flight; then naively: one text at a time, each with an encoder that is loaded for it. Medians of the rounds; `--json`
//! prints one object with the rates of batches on the CPU.

use std::time::Instant;

use tilewright::{Device, DeviceChoice, EmbedOptions, Embedder, Error};

const BATCHES: [usize; 3] = [1, 8, 32];
const ROUNDS: usize = 5;

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let has = |flag: &str| args.iter().any(|arg| arg == flag);
    let mut files = args.iter().filter(|arg| !arg.starts_with("--"));
    let Some(folder) = files.next() else {
        println!("skipped: no encoder named; cargo bench --bench embed -- FOLDER");
        return Ok(());
    };
    let texts: Vec<String> = match files.next() {
        Some(path) => std::fs::read_to_string(path).expect("the file of texts").lines().map(str::to_owned).collect(),
        None => usual_texts(),
    };
    let mut devices = vec![Device::cpu()];
    if !has("--cpu") && !has("--json") {
        match pollster::block_on(Device::open(&DeviceChoice::Gpu, None)) {
            Err(error @ Error::NoAdapter { .. }) => println!("skipped: {error}"),
            opened => devices.push(opened?),
        }
    }
    for device in devices {
        let embedder = Embedder::load(&device, folder, EmbedOptions::default())?;
        let rates = BATCHES.map(|batch| rate(&embedder, &texts, batch));
        if has("--json") {
            let [one, eight, many] = rates;
            println!("{{\"1\": {:.3}, \"8\": {:.3}, \"32\": {:.3}}}", one?, eight?, many?);
            continue;
        }
        println!("{}, {} texts", device.info().name, texts.len());
        for (batch, rate) in BATCHES.into_iter().zip(rates) {
            println!("batches of {batch:>2}: {:>8.1} texts/s", rate?);
        }
        let mut alone = 0.0;
        for in_flight in [1, 2, 4, 8] {
            let options =
                || EmbedOptions { in_flight: Some(in_flight), max_batch_tokens: Some(256), ..Default::default() };
            let embedder = Embedder::load(&device, folder, options())?;
            let rate = rate(&embedder, &texts, texts.len())?;
            alone = if in_flight == 1 { rate } else { alone };
            println!("{in_flight} in flight, batches of 256 tokens: {rate:>8.1} texts/s, {:.2} of one", rate / alone);
        }
        let start = Instant::now();
        let few = &texts[..texts.len().min(4)];
        for text in few {
            let embedder = Embedder::load(&device, folder, EmbedOptions::default())?;
            pollster::block_on(embedder.embed(&[text]))?;
        }
        let naive = few.len() as f64 / start.elapsed().as_secs_f64();
        let best = rate(&embedder, &texts, texts.len())?;
        println!("loaded for each text: {naive:.2} texts/s; all at once: {best:.1}, {:.0} times as many", best / naive);
    }
    Ok(())
}

/// Texts per second in batches of so many, the median of the rounds behind one that is not counted.
fn rate(embedder: &Embedder, texts: &[String], batch: usize) -> Result<f64, Error> {
    let mut rates = Vec::new();
    for round in 0..=ROUNDS {
        let start = Instant::now();
        for texts in texts.chunks(batch) {
            pollster::block_on(embedder.embed(texts))?;
        }
        if round > 0 {
            rates.push(texts.len() as f64 / start.elapsed().as_secs_f64());
        }
    }
    rates.sort_by(f64::total_cmp);
    Ok(rates[rates.len() / 2])
}

/// Texts of 3 to 60 words, as questions, titles and paragraphs have.
fn usual_texts() -> Vec<String> {
    const WORDS: [&str; 16] = [
        "the", "river", "runs", "quietly", "past", "an", "old", "engine", "that", "nobody", "has", "repaired", "since",
        "the", "spring", "flood",
    ];
    let text = |i: usize| (0..3 + i * i % 58).map(|j| WORDS[(i + j * 7) % 16]).collect::<Vec<_>>().join(" ");
    (0..64).map(text).collect()
}
