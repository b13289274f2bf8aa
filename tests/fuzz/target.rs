//! Runs a target with many inputs.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::builder::Rng;
use crate::common;

/// Runs a target, by default with the seeds below `n`. The target returns whether its input was accepted.
pub fn fuzz(name: &str, n: u64, target: impl Fn(&mut Rng) -> bool) {
    let asked = |variable: &str| std::env::var(variable).ok();
    let one = asked("TILEWRIGHT_CASE").and_then(|case| case.strip_prefix(name)?.strip_prefix('/')?.parse().ok());
    let seconds: Option<u64> = asked("TILEWRIGHT_FUZZ").map(|seconds| seconds.parse().expect("a number of seconds"));
    let begin = Instant::now();
    let (mut n_done, mut n_accepted, mut slowest) = (0, 0, (Duration::ZERO, 0));
    let mut run = |seed: u64| {
        let since = Instant::now();
        // Distinct per target, and unrelated for adjacent seeds.
        let mut rng = Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ name.len() as u64);
        match catch_unwind(AssertUnwindSafe(|| target(&mut rng))) {
            Ok(is_accepted) => n_accepted += u64::from(is_accepted),
            Err(panic) => {
                println!("TILEWRIGHT_CASE={name}/{seed}");
                resume_unwind(panic);
            }
        }
        (n_done, slowest) = (n_done + 1, slowest.max((since.elapsed(), seed)));
    };
    match (one, seconds) {
        (Some(seed), _) => run(seed),
        (None, Some(seconds)) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
            (now.as_nanos() as u64..).take_while(|_| begin.elapsed() < Duration::from_secs(seconds)).for_each(&mut run);
        }
        (None, None) => (0..n * if common::is_full() { 20 } else { 1 }).for_each(&mut run),
    }
    let elapsed = begin.elapsed();
    println!(
        "{name}: {n_done} inputs in {elapsed:.1?}, {n_accepted} accepted, the slowest, {}, in {:.1?}",
        slowest.1, slowest.0
    );
}
