//! Host cost of a constraint per token: time to accept a token and to compute the allowed ones, with a vocabulary of
//! 150,000 tokens or more, on one core. Prints the median and maximum over the tokens of random texts of schemas, per
//! vocabulary; then the time to prepare a vocabulary and to parse a schema.
//!
//!     cargo bench --bench grammar
//!
//! Without the vocabularies of `scripts/test-data` there is nothing to measure.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/grammar/schemas.rs"]
#[allow(dead_code)] // tests use all of it
mod schemas;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::Rng;
use tilewright::formats::Gguf;
use tilewright::grammar::{Constraint, Grammars, Next};
use tilewright::load::vocab_from_gguf;
use tilewright::tokenizer::Tokenizer;

/// Texts drawn per schema.
const ROUNDS: usize = 5;
/// Maximum tokens per text.
const MOST: usize = 300;

fn main() {
    let Some(folder) = common::find_data("vocab".as_ref()) else {
        return println!("no vocabularies: `scripts/test-data` fetches them");
    };
    for name in ["ggml-vocab-qwen35", "ggml-vocab-gemma-4", "ggml-vocab-llama-bpe"] {
        let bytes = std::fs::read(folder.join(format!("{name}.gguf"))).expect("readable");
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).expect("a GGUF file");
        let vocab = vocab_from_gguf(&gguf.metadata).expect("a vocabulary");
        let tokenizer = Arc::new(Tokenizer::from_vocab(vocab).expect("a tokenizer"));
        let start = Instant::now();
        let grammars =
            Grammars::new(Arc::clone(&tokenizer), tokenizer.vocab_size() as u32).expect("a usable vocabulary");
        let (ready, grammars) = (start.elapsed(), Arc::new(grammars));

        let mut constraints: Vec<Constraint> =
            schemas::tools().into_iter().chain((0..20).map(schemas::generated)).map(Constraint::JsonSchema).collect();
        constraints.push(Constraint::JsonObject);
        let (mut begun, mut steps) = (Vec::new(), Vec::new());
        let mut rng = Rng::new(1);
        for constraint in constraints.iter().cycle().take(ROUNDS * constraints.len()) {
            let start = Instant::now();
            let mut guide = grammars.begin(constraint, tokenizer.eos_ids()).expect("usable");
            begun.push(start.elapsed());
            for _ in 0..MOST {
                let id = pick(guide.allowed().expect("a token is allowed"), &tokenizer, &mut rng);
                if tokenizer.eos_ids().contains(&id) {
                    break;
                }
                let start = Instant::now();
                if guide.accept(id).expect("the token is allowed") == Next::Complete {
                    break;
                }
                guide.allowed().expect("a token is allowed");
                steps.push(start.elapsed());
            }
        }
        let [begun, steps] = [begun, steps].map(|mut times| {
            times.sort_unstable();
            times
        });
        println!(
            "{name}, {} tokens: a token takes {} at the median, {} at the 99th percentile and {} at most ({} tokens); ready \
             after {}, a schema is read in {} at the median and {} at most",
            tokenizer.vocab_size(),
            shown(steps[steps.len() / 2]),
            shown(steps[steps.len() * 99 / 100]),
            shown(steps[steps.len() - 1]),
            steps.len(),
            shown(ready),
            shown(begun[begun.len() / 2]),
            shown(begun[begun.len() - 1]),
        );
    }
}

/// One of the allowed tokens. Picks a token that ends something one in four times, so that texts end.
fn pick(allowed: &[u32], tokenizer: &Tokenizer, rng: &mut Rng) -> u32 {
    let ids = || (0..32 * allowed.len() as u32).filter(|&id| allowed[id as usize / 32] >> (id % 32) & 1 == 1);
    let ends = |id: &u32| matches!(tokenizer.token_bytes(*id), Ok(b"\"" | b"}" | b"]"));
    let mut among: Vec<u32> = if rng.below(4) == 0 { ids().filter(ends).collect() } else { Vec::new() };
    if among.is_empty() {
        among = ids().collect();
    }
    among[rng.below(among.len())]
}

fn shown(time: Duration) -> String {
    format!("{:.3} ms", time.as_secs_f64() * 1e3)
}
