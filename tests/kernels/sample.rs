//! `sample`, `penalize`, `mask_logits` and `advance`.

use std::collections::{HashMap, HashSet};

use tilewright::DType;
use tilewright::kernels::{self, NON_FINITE, Sampling};

use crate::common::Expected;
use crate::harness::{Case, Data, FLUSH, Job, Operand, PATTERN, ROUND, Want};
use crate::inputs::{Inputs, Source};

/// V, tokens so far, the penalised number of them, penalty.
const PENALIZE: [(u32, u32, u32, f32); 8] = [
    (1, 1, 1, 1.3),
    (33, 5, 0, 1.3),
    (64, 64, 63, 1.1),
    (100, 65, 64, 0.8),
    (257, 300, 256, 1.5),
    (1000, 300, 257, 1.1),
    (4097, 700, 10_000, 2.0),
    (4097, 9000, u32::MAX, 1.2),
];

/// The same for sequences too long to compare all pairs of tokens: llvmpipe leaves an invocation's loops after 65,535
/// rounds in total, so a quadratic kernel fails here. Vocabularies end around a workgroup's batch.
const PENALIZE_LONG: [(u32, u32, u32, f32); 5] = [
    (32_767, 20_000, u32::MAX, 1.3),
    (32_769, 33_000, 32_768, 0.7),
    (65_536, 70_000, u32::MAX, 1.1),
    (152_064, 200_000, 150_000, 1.5),
    (100, 300_000, u32::MAX, 1.1),
];

/// V, and one token in this many is allowed, 0: none.
const MASK: [(u32, u32); 12] = [
    (1, 1),
    (1, 0),
    (31, 2),
    (32, 2),
    (33, 2),
    (255, 3),
    (256, 1),
    (257, 40),
    (1000, 2),
    (4097, 1000),
    (32_769, 2),
    (152_064, 20),
];

pub fn cases(cases: &mut Vec<Case>) {
    let all = Inputs::ALL.into_iter().flat_map(|inputs| PENALIZE.map(|sizes| (inputs, sizes)));
    for (inputs, sizes) in all.chain(PENALIZE_LONG.map(|sizes| (Inputs::Normal, sizes))) {
        let (v, n, last_n, penalty) = sizes;
        cases.push(Case {
            kernel: "penalize",
            variant: "F32".into(),
            sizes: format!("v={v},n={n},last={last_n},penalty={penalty}"),
            inputs,
            build: Box::new(move |source| penalize(source, sizes)),
        });
    }
    for inputs in Inputs::ALL {
        for (v, one_in) in MASK {
            cases.push(Case {
                kernel: "mask_logits",
                variant: "F32".into(),
                sizes: format!("v={v},one-in={one_in}"),
                inputs,
                build: Box::new(move |source| mask_logits(source, v, one_in)),
            });
        }
    }
    for [pos, n_tokens, capacity] in [[0, 1, 1], [0, 1, 2], [5, 3, 9], [5, 3, 8], [63, 1, 64], [100, 28, 500]] {
        for id in [0, 41, NON_FINITE] {
            cases.push(Case {
                kernel: "advance",
                variant: "U32".into(),
                sizes: format!("pos={pos},n={n_tokens},s={capacity},id={id}"),
                inputs: Inputs::Normal,
                build: Box::new(move |_| advance(pos, n_tokens, capacity, id)),
            });
        }
    }
    for [n_rows, n_counting, capacity] in [[1, 1, 64], [4, 3, 128], [8, 8, 64], [64, 63, 64], [64, 64, 192]] {
        cases.push(Case {
            kernel: "advance",
            variant: "U32".into(),
            sizes: format!("rows={n_rows},count={n_counting},s={capacity}"),
            inputs: Inputs::Normal,
            build: Box::new(move |_| advance_rows(n_rows, n_counting, capacity)),
        });
    }
    for vocab in [1, 2, 31, 255, 256, 257, 1000, 4097, 12_288] {
        for (name, value) in [("nan", f32::NAN), ("inf", f32::INFINITY), ("-inf", f32::NEG_INFINITY)] {
            for inputs in [Inputs::Normal, Inputs::Masked] {
                cases.push(Case {
                    kernel: "sample",
                    variant: name.into(),
                    sizes: format!("v={vocab}"),
                    inputs,
                    build: Box::new(move |source| broken(source, vocab, value)),
                });
            }
        }
    }
    // With a single allowed token, every family has one answer.
    for inputs in Inputs::ALL {
        for vocab in [1, 3, 64, 255, 257, 1000, 4096, 4097, 8199] {
            for (name, top_k, top_p, min_p) in
                [("top-k=1", 1, 1.0, 0.0), ("top-p=0", 0, 0.0, 0.0), ("min-p=1", 0, 1.0, 1.0)]
            {
                cases.push(Case {
                    kernel: "sample",
                    variant: name.into(),
                    sizes: format!("v={vocab}"),
                    inputs,
                    build: Box::new(move |source| greedy(source, vocab, top_k, top_p, min_p)),
                });
            }
        }
    }
}

pub fn sampling_words(sampling: Sampling) -> Vec<u32> {
    bytemuck::cast_slice(&[sampling]).to_vec()
}

pub fn settings(top_k: u32, top_p: f32, min_p: f32, temperature: f32) -> Sampling {
    Sampling { temperature, top_k, top_p, min_p, seed: [17, 4], repeat_penalty: 1.0, ..bytemuck::Zeroable::zeroed() }
}

fn penalize(source: &mut Source, (vocab, n, last_n, penalty): (u32, u32, u32, f32)) -> Job {
    let logits = source.rows(1, vocab);
    // Few distinct ids, so that most repeat; some lie outside the vocabulary.
    let tokens: Vec<u32> = (0..n + 2).map(|_| source.rng.below(vocab as usize * 2 / 3 + 9) as u32).collect();
    let pos = source.rng.below(n as usize) as u32;
    let start = n.saturating_sub(last_n) as usize;
    let recent: HashSet<u32> = tokens[start..n as usize].iter().copied().collect();
    // With an odd number of tokens the latter half was generated, with an even one none; one in three has the other
    // settings.
    let generated_from = if n % 2 == 1 { n / 2 } else { u32::MAX };
    let [presence, frequency] = if vocab % 3 == 0 { [0.0; 2] } else { [0.75f32, -0.125] };
    let generated = tokens.get((generated_from as usize).min(n as usize)..n as usize).unwrap_or_default();
    let mut counts: HashMap<u32, u32> = HashMap::new();
    generated.iter().for_each(|&id| *counts.entry(id).or_default() += 1);
    // More biases than the counted ones; some ids lie outside the vocabulary.
    let n_biases = (vocab % 5).min(vocab / 2);
    let biases: Vec<(u32, f32)> = (0..n_biases + 3).map(|i| (i * 7 % (vocab + 2), 3.5 - i as f32)).collect();
    let expected = |(id, &logit): (usize, &f32)| {
        let (mut value, penalty) = (f64::from(logit), f64::from(penalty));
        let mut terms = 0.0;
        if recent.contains(&(id as u32)) {
            value = if logit > 0.0 { value / penalty } else { value * penalty };
            terms = value.abs();
        }
        if let Some(&count) = counts.get(&(id as u32)) {
            value -= f64::from(presence) + f64::from(frequency) * f64::from(count);
            terms += value.abs() + f64::from(presence.abs()) + f64::from(frequency.abs()) * f64::from(count);
        }
        for (_, bias) in biases.iter().take(n_biases as usize).filter(|(of, _)| *of == id as u32) {
            value += f64::from(*bias);
            terms += value.abs() + f64::from(bias.abs());
        }
        match terms {
            0.0 => Expected::new(value, 0.0, 0.0),
            terms => Expected::new(value, 6.0 * ROUND * terms, 3.0 * FLUSH),
        }
    };
    let want = logits.iter().enumerate().map(expected).collect();
    let sampling = Sampling {
        repeat_penalty: penalty,
        repeat_last_n: last_n,
        presence_penalty: presence,
        frequency_penalty: frequency,
        generated_from,
        n_biases,
        ..settings(0, 1.0, 0.0, 1.0)
    };
    let biases: Vec<u32> = biases.iter().flat_map(|(id, bias)| [*id, bias.to_bits()]).collect();
    let operands = vec![
        Operand::words("sampling", &[1, Sampling::WORDS], sampling_words(sampling)),
        Operand::state(pos, n - pos),
        Operand::words("tokens", &[n + 2], tokens),
        Operand::words("biases", &[1, biases.len() as u32], biases),
        Operand::floats("logits", &[1, vocab], logits).becomes(Want::Close(want, 1e-10)),
    ];
    Job::new(operands, |rec, bound| {
        kernels::penalize(rec, bound.tensor(0), bound.state(1), bound.tensor(2), bound.tensor(3), bound.tensor(4))
    })
}

fn mask_logits(source: &mut Source, vocab: u32, one_in: u32) -> Job {
    let mut logits = source.rows(1, vocab);
    // Non-finite logits stay, allowed or not, so that sampling detects them.
    for (i, broken) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().enumerate() {
        if vocab > 100 {
            logits[37 * i + 5] = broken;
        }
    }
    let is_allowed: Vec<bool> = (0..vocab).map(|_| one_in > 0 && source.rng.below(one_in as usize) == 0).collect();
    // Bits beyond the vocabulary are ignored.
    let word = |bits: &[bool]| (0..32).map(|i| u32::from(bits.get(i).copied().unwrap_or(i % 2 == 0)) << i).sum();
    let words: Vec<u32> = is_allowed.chunks(32).map(word).collect();
    let stays = |(&logit, &is_allowed): (&f32, &bool)| if is_allowed || !logit.is_finite() { logit } else { f32::MIN };
    let want = logits.iter().zip(&is_allowed).map(stays).map(f32::to_bits).collect();
    let operands = vec![
        Operand::words("allowed", &[1, words.len() as u32], words),
        Operand::floats("logits", &[1, vocab], logits).becomes(Want::Exact(want)),
    ];
    Job::new(operands, |rec, bound| kernels::mask_logits(rec, bound.tensor(0), bound.tensor(1)))
}

fn advance(pos: u32, n_tokens: u32, capacity: u32, id: u32) -> Job {
    let mut tokens = vec![PATTERN; capacity as usize];
    if let Some(next) = tokens.get_mut((pos + n_tokens) as usize) {
        *next = if id == NON_FINITE { 0 } else { id };
    }
    let operands = vec![
        Operand::state(pos, n_tokens).becomes(Want::Exact(vec![pos + n_tokens, 1, id, 0])),
        Operand::words("ids", &[1], vec![id]),
        Operand::exact_words("tokens", &[capacity], tokens),
    ];
    Job::new(operands, |rec, bound| kernels::advance(rec, bound.state(0), bound.tensor(1), bound.tensor(2)))
}

/// Sequences that share a cache: row `r` has place `n_rows - r`, and some are at the end of their context.
fn advance_rows(n_rows: u32, n_counting: u32, capacity: u32) -> Job {
    let id = |r: u32| if r % 7 == 6 { NON_FINITE } else { 3 * r + 1 };
    let row = |r: u32| {
        let pos = if r % 5 == 4 { capacity - 1 } else { (7 * r) % capacity };
        vec![pos, if r == 0 { n_counting } else { 1 }, 1000 + r, r, n_rows - r, 0, 0, 0, r, 2 * r]
    };
    let rows: Vec<Vec<u32>> = (0..n_rows).map(row).collect();
    let mut tokens = vec![PATTERN; ((n_rows + 1) * capacity) as usize];
    let mut want = rows.clone();
    for (r, row) in (0..n_counting).zip(&mut want) {
        let (pos, slot) = (row[0] + 1, row[4]);
        (row[0], row[2]) = (pos, id(r));
        if pos < capacity {
            tokens[(slot * capacity + pos) as usize] = if id(r) == NON_FINITE { 0 } else { id(r) };
        }
    }
    let operands = vec![
        Operand::states(&rows).becomes(Want::Exact(want.concat())),
        Operand::words("ids", &[n_rows], (0..n_rows).map(id).collect()),
        Operand::exact_words("tokens", &[n_rows + 1, capacity], tokens),
    ];
    Job::new(operands, |rec, bound| kernels::advance(rec, bound.state(0), bound.tensor(1), bound.tensor(2)))
}

/// A draw from `logits` with an id that `accept` allows.
fn draw_one(logits: Vec<f32>, sampling: Sampling, accept: impl Fn(u32) -> bool + 'static) -> Job {
    let check = move |got: &[u32]| if accept(got[0]) { Ok(()) } else { Err(format!("token {} was drawn", got[0])) };
    let vocab = logits.len() as u32;
    let operands = vec![
        Operand::words("sampling", &[1, Sampling::WORDS], sampling_words(sampling)),
        Operand::state(11, 1),
        Operand::floats("logits", &[1, vocab], logits),
        Operand { data: Data::Blank(DType::U32), ..Operand::words("ids", &[1], vec![]) }
            .becomes(Want::Check(Box::new(check))),
    ];
    Job::new(operands, |rec, bound| {
        kernels::sample(rec, bound.tensor(0), bound.state(1), bound.tensor(2), bound.tensor(3))
    })
}

fn broken(source: &mut Source, vocab: u32, value: f32) -> Job {
    let mut logits = source.rows(1, vocab);
    let at = source.rng.below(vocab as usize);
    logits[at] = value;
    draw_one(logits, settings(40, 0.9, 0.05, 0.8), |id| id == NON_FINITE)
}

fn greedy(source: &mut Source, vocab: u32, top_k: u32, top_p: f32, min_p: f32) -> Job {
    let logits = source.rows(1, vocab);
    let highest = logits.iter().copied().fold(f32::MIN, f32::max);
    // Tokens with the highest probability in f32 may all pass a cut on probability.
    let near = move |logit: f32| top_k != 1 && f64::from(highest) - f64::from(logit) < 1e-6;
    let best: Vec<bool> = logits.iter().map(|&v| v == highest || near(v)).collect();
    draw_one(logits, settings(top_k, top_p, min_p, 0.7), move |id| best.get(id as usize).copied().unwrap_or(false))
}

/// Probabilities after all cuts, by their definitions.
#[cfg(not(target_arch = "wasm32"))]
pub fn probabilities(logits: &[f32], s: &Sampling) -> Vec<f64> {
    let highest = logits.iter().copied().fold(f32::MIN, f32::max);
    let mut sorted: Vec<f32> = logits.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let mut lowest_kept = f32::MIN;
    if s.top_k > 0 && (s.top_k as usize) < sorted.len() {
        lowest_kept = sorted[s.top_k as usize - 1];
    }
    let weight = |v: f32| (f64::from(v) - f64::from(highest)).exp();
    if s.top_p < 1.0 {
        sorted.retain(|&v| v >= lowest_kept);
        let total: f64 = sorted.iter().map(|&v| weight(v)).sum();
        let mut mass = 0.0;
        for &v in &sorted {
            mass += weight(v) / total;
            lowest_kept = v;
            if mass >= f64::from(s.top_p) {
                break;
            }
        }
    }
    let kept = |v: f32| v >= lowest_kept && weight(v) >= f64::from(s.min_p);
    let warm = |v: f32| ((f64::from(v) - f64::from(highest)) / f64::from(s.temperature)).exp();
    let weights: Vec<f64> = logits.iter().map(|&v| if kept(v) { warm(v) } else { 0.0 }).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}

/// The random number for the token after `pos`, in [0, 1): the PCG hash of Jarzynski & Olano 2020, chained.
#[cfg(not(target_arch = "wasm32"))]
pub fn random(seed: [u32; 2], pos: u32) -> f64 {
    let hash = |input: u32| {
        let state = (u64::from(input) * 747_796_405 + 2_891_336_453) as u32;
        let word = (u64::from((state >> ((state >> 28) + 4)) ^ state) * 277_803_737) as u32;
        (word >> 22) ^ word
    };
    f64::from(hash(seed[0] ^ hash(seed[1] ^ hash(pos))) >> 8) / 16_777_216.0
}
