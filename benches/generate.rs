//! The built-in model from end to end, in tokens per second, on every tier of the GPU adapter and on the CPU executor.
//!
//! The clock is the host's: from the submission of the prompt to its first token, and from there to the last. That is
//! what [`tilewright::generate::Generation`] reports and what a user sees.

mod common;

use std::time::Duration;

use criterion::{Criterion, Throughput};
use tilewright::generate::Stats;
use tilewright::{Device, GenerateOptions, Model, Session};

const N_PROMPT: usize = 128;
const N_DECODE: usize = 64;

/// Prompt and generated tokens of one generation, which never ends early.
fn generate(session: &mut Session, n_decode: usize) -> [Stats; 2] {
    session.clear();
    let vocab_size = session.model().config().vocab_size;
    // The first token of a text, then ids that look like nothing in particular.
    let ids: Vec<u32> =
        [1].into_iter().chain(common::words(N_PROMPT - 1).map(|word| 3 + word % (vocab_size - 3))).collect();
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(1 + n_decode) };
    let mut generation = session.generate_ids(&ids, &options).expect("ids and options are in range");
    while let Some(piece) = pollster::block_on(generation.next()) {
        piece.expect("the device runs it");
    }
    [generation.prefill(), generation.decode()]
}

fn main() {
    let mut criterion = common::criterion();
    let targets = common::targets();
    let load = |device: &Device| Model::builtin(device).and_then(|model| model.session()).expect("the model is sound");
    for target in &targets {
        let mut session = load(&target.device);
        let mut rates: [Vec<f64>; 2] = Default::default();
        for (part, name, n_tokens) in [(0, "prefill", N_PROMPT), (1, "decode", N_DECODE)] {
            let n_decode = if part == 0 { 0 } else { N_DECODE };
            measure(&mut criterion, &format!("{name}/{n_tokens}"), target.name, n_tokens, |n| {
                let runs = (0..n).map(|_| generate(&mut session, n_decode)[part]);
                runs.map(|stats| {
                    assert_eq!(stats.tokens, n_tokens, "all tokens are there");
                    rates[part].push(stats.rate());
                    Duration::from_secs_f64(stats.seconds)
                })
                .sum()
            });
        }
        let [prefill, decode] = rates.map(|mut rates| {
            rates.sort_by(f64::total_cmp);
            rates.get(rates.len() / 2).map_or("not measured".into(), |rate| format!("{rate:.0} tokens/s"))
        });
        println!("{:<10} median: prefill {prefill}, decode {decode}", target.name);
    }
    criterion.final_summary();
}

fn measure(
    criterion: &mut Criterion,
    group: &str,
    target: &str,
    n_tokens: usize,
    mut time: impl FnMut(u64) -> Duration,
) {
    let mut group = criterion.benchmark_group(group);
    group.throughput(Throughput::Elements(n_tokens as u64));
    group.bench_function(target, |bencher| bencher.iter_custom(&mut time));
    group.finish();
}
