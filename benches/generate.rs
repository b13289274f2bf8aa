//! The built-in model end to end, in tokens per second, on every tier of the GPU adapter and on the CPU executor.
//!
//! Times are host times: from submission of the prompt to the first token, and from there to the last one, as
//! [`tilewright::generate::Generation`] reports them.
//!
//! Then prompt lookup against plain decoding, in turns on the CPU: a model of 134 M parameters copies a passage of its
//! prompt, so every draft token is accepted.

mod common;
#[path = "../tests/common/copier.rs"]
mod copier;

use std::time::Duration;

use copier::{Copier, Sizes};
use criterion::{Criterion, Throughput};
use tilewright::formats::BlockType;
use tilewright::generate::{Speculation, Stats};
use tilewright::load::convert::{QuantizeOptions, quantize_file};
use tilewright::{Device, Error, GenerateOptions, LoadOptions, Model, Session};

const N_PROMPT: usize = 128;
const N_DECODE: usize = 64;

/// Prompt and generated tokens of one generation that never ends early.
fn generate(session: &mut Session, n_decode: usize) -> [Stats; 2] {
    session.clear();
    let vocab_size = session.model().config().vocab_size;
    // The begin-of-text token, then arbitrary ids.
    let ids: Vec<u32> =
        [1].into_iter().chain(common::words(N_PROMPT - 1).map(|word| 3 + word % (vocab_size - 3))).collect();
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(1 + n_decode) };
    let mut generation = session.generate_ids(&ids, &options).expect("ids and options are in range");
    while let Some(piece) = pollster::block_on(generation.next()) {
        piece.expect("the recording runs");
    }
    [generation.prefill(), generation.decode()]
}

fn main() {
    let mut criterion = common::criterion();
    let targets = common::targets();
    let load = |device: &Device| Model::builtin(device).and_then(|model| model.session()).expect("the model loads");
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
    // As Criterion parses a filter.
    let part = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    if part.is_none_or(|part| "copying".contains(&part)) {
        copying().expect("the model loads");
    }
}

/// Decoding that copies, with and without draft tokens.
fn copying() -> Result<(), Error> {
    const N_COPIED: usize = 128;
    const ROUNDS: usize = 7;
    let sizes = Sizes {
        dim: 1024,
        ffn_dim: 2816,
        n_layers: 12,
        n_heads: 16,
        n_kv_heads: 4,
        vocab_size: 4096,
        context_length: 1024,
    };
    let mut words = common::words(usize::MAX);
    let copier = Copier::new(env!("CARGO_TARGET_TMPDIR").as_ref(), sizes, || words.next().expect("endless words"));
    // A passage, filler, and the beginning of the passage.
    let prompt = [copier.passage(0, 256), copier.passage(2000, 64), copier.passage(0, 8)].concat();
    let want = copier.passage(8, 1 + N_COPIED);
    println!("\n{:<8} {:>16} {:>16} {:>7} {:>17}", "copying", "tokens/s", "with look-up", "ratio", "tokens a pass");
    for block_type in [BlockType::Q4_0, BlockType::Q4_K, BlockType::Q8_0] {
        let file = copier.folder.join(format!("{}.gguf", block_type.name()));
        quantize_file(&copier.folder, &file, &QuantizeOptions::new(block_type), &mut |_, _, _| ())?;
        let mut session = Model::load(&Device::cpu(), &file, LoadOptions::default())?.session()?;
        let (mut rates, mut guessed) = ([Vec::new(), Vec::new()], Speculation::default());
        for round in 0..=ROUNDS {
            for (rates, prompt_lookup) in rates.iter_mut().zip([0, GenerateOptions::MAX_DRAFT_TOKENS]) {
                session.clear();
                let options =
                    GenerateOptions { ignore_eos: true, prompt_lookup, ..GenerateOptions::greedy(want.len()) };
                let mut generation = session.generate_ids(&prompt, &options)?;
                let mut ids = Vec::new();
                while let Some(piece) = pollster::block_on(generation.next()) {
                    ids.push(piece?.id);
                }
                assert_eq!(ids, want, "the passage is copied");
                // The first round is a warm-up.
                if round > 0 {
                    rates.push(generation.decode().rate());
                }
                guessed = generation.speculation();
            }
        }
        let [plain, looked_up] = rates.map(|mut rates| {
            rates.sort_by(f64::total_cmp);
            rates[rates.len() / 2]
        });
        let a_pass = N_COPIED as f64 / (N_COPIED - guessed.accepted) as f64;
        let ratio = looked_up / plain;
        println!("{:<8} {plain:>16.1} {looked_up:>16.1} {ratio:>6.2}x {a_pass:>17.2}", block_type.name());
    }
    Ok(())
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
