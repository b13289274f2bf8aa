//! Draws of `sample` and `advance` in a loop: each against the oracle, and all against their probabilities.

use tilewright::kernels::{self, Sampling, StepState};
use tilewright::{DType, Device, Error, Role, Tensor, Tier, Workspace};

use crate::common::{self, Rng, block_on, shared};
use crate::sample::{probabilities, random, sampling_words, settings};

/// Consecutive draws from the same logits.
const DRAWS: u32 = 512;

struct Setting {
    logits: Vec<f32>,
    /// One token in this many is allowed, including the first; 1 allows all.
    one_in: u32,
    sampling: Sampling,
}

impl Setting {
    fn allows(&self, id: usize) -> bool {
        (id as u32).is_multiple_of(self.one_in)
    }
}

/// Vocabularies around the workgroup of 256, and of one to three parts of 4096, each with cuts alone and combined.
fn all_settings() -> Vec<Setting> {
    let mut all = Vec::new();
    for (i, vocab) in [7, 64, 255, 257, 1000, 4099, 10_000].into_iter().enumerate() {
        for (j, (one_in, top_k, top_p, min_p, temperature)) in [
            (1, 0, 1.0, 0.0, 1.0),
            (1, 5, 1.0, 0.0, 1.0),
            (1, 0, 0.6, 0.0, 1.0),
            (1, 0, 1.0, 0.1, 0.7),
            (1, 40, 0.93, 0.02, 0.8),
            (1, 3, 0.99, 0.0, 2.5),
            // Often fewer tokens than top-k.
            (26, 40, 0.93, 0.02, 0.8),
            (3, 0, 1.0, 0.0, 100.0),
        ]
        .into_iter()
        .enumerate()
        {
            let mut rng = Rng::new((i * 100 + j) as u64);
            let mut logits: Vec<f32> = (0..vocab).map(|_| 2.0 * rng.normal() as f32).collect();
            logits[vocab / 2] = logits[vocab / 3]; // a tie
            if vocab > 4096 {
                // Coarse enough for many ties, also at the k-th, within a part and across parts.
                logits.iter_mut().for_each(|logit| *logit = (*logit * 16.0).round() / 16.0);
            }
            let seed = [rng.word(), rng.word()];
            let sampling = Sampling { seed, ..settings(top_k, top_p, min_p, temperature) };
            all.push(Setting { logits, one_in, sampling });
        }
    }
    all
}

/// Tokens drawn at positions 1 to `DRAWS`: `sample` and `advance` in turn, in one recording, after `mask_logits`.
fn draws(device: &Device, setting: &Setting) -> Result<Vec<u32>, Error> {
    let vocab = setting.logits.len() as u32;
    let sampling = device.upload("sampling", &[1, Sampling::WORDS], &sampling_words(setting.sampling))?;
    let logits = device.upload("logits", &[1, vocab], &setting.logits)?;
    let mut words = vec![0u32; setting.logits.len().div_ceil(32)];
    (0..setting.logits.len()).filter(|&id| setting.allows(id)).for_each(|id| words[id / 32] |= 1 << (id % 32));
    let allowed = device.upload("allowed", &[1, words.len() as u32], &words)?;
    let ids = Tensor::declare("ids", Role::Activations, &[1], DType::U32)?;
    let tokens = Tensor::declare("tokens", Role::Activations, &[DRAWS + 1], DType::U32)?;
    let state = StepState::declare()?;
    let mut rec = device.recorder();
    if setting.one_in > 1 {
        kernels::mask_logits(&mut rec, &allowed, &logits)?;
    }
    for _ in 0..DRAWS {
        kernels::sample(&mut rec, &sampling, &state, &logits, &ids)?;
        kernels::advance(&mut rec, &state, &ids, &tokens)?;
    }
    let recording = rec.finish(&mut Workspace::default());
    state.set(device, 0, 1)?;
    device.run(&recording)?;
    let tokens: Vec<u32> = block_on(device.read(&tokens))?;
    Ok(tokens[1..].to_vec())
}

/// Share of draws that may differ, where a random number is within rounding error of the border between two tokens.
const DIFFERENT: f64 = 0.005;

fn check_draws(device: &Device) {
    let (mut different, mut total) = (0, 0);
    for (i, setting) in common::drawn_on(device, 8, all_settings().iter().enumerate()) {
        let drawn = draws(device, setting).expect("the draws run");
        let logits: Vec<f32> = setting
            .logits
            .iter()
            .enumerate()
            .map(|(id, &logit)| if setting.allows(id) { logit } else { f32::NEG_INFINITY })
            .collect();
        let probs = probabilities(&logits, &setting.sampling);
        let label = format!("setting {i}: {} tokens, {:?}", probs.len(), setting.sampling);

        let mut counts = vec![0u32; probs.len()];
        for (pos, &token) in (1..).zip(&drawn) {
            let allowed = probs.get(token as usize).is_some_and(|&p| p > 0.0);
            assert!(allowed, "{label}: token {token} at position {pos} was cut");
            counts[token as usize] += 1;
            let threshold = random(setting.sampling.seed, pos);
            let mut mass = 0.0;
            let want = probs.iter().position(|p| {
                mass += p;
                mass > threshold
            });
            different += usize::from(want != Some(token as usize));
            total += 1;
        }

        // Pearson's chi-square; tokens expected less than five times share a class.
        let (mut chi, mut classes, mut rest) = (0.0, 0.0, (0.0, 0.0));
        for (&count, p) in counts.iter().zip(&probs) {
            let (count, expected) = (f64::from(count), p * f64::from(DRAWS));
            if expected < 5.0 {
                rest = (rest.0 + count, rest.1 + expected);
            } else {
                chi += (count - expected).powi(2) / expected;
                classes += 1.0;
            }
        }
        if rest.1 >= 5.0 {
            chi += (rest.0 - rest.1).powi(2) / rest.1;
            classes += 1.0;
        }
        let freedom: f64 = classes - 1.0;
        assert!(
            chi <= freedom + 4.0 * (2.0 * freedom).sqrt() + 4.0,
            "{label}: chi-square {chi:.1} of {freedom} degrees"
        );
    }
    println!("{}: {total} draws, {different} differ from the oracle", device.info().name);
    assert!(f64::from(different as u32) <= DIFFERENT * f64::from(total), "{different} of {total} draws differ");
}

/// Draws from lists of a vocabulary's parts are bit-identical to draws from all logits: the 400 likeliest tokens have
/// all the mass, so a top-k of 1024, with lists, and one of 1025, without, have the same sums.
#[test]
fn candidate_lists_do_not_change_draws() {
    let mut rng = Rng::new(77);
    let vocab = 9001u32;
    let alive: std::collections::HashSet<usize> = (0..400).map(|_| rng.below(vocab as usize)).collect();
    let of = |id: usize, rng: &mut Rng| match alive.contains(&id) {
        true => 2.0 * rng.normal() as f32,
        false => -200.0 - 0.01 * id as f32,
    };
    let logits: Vec<f32> = (0..vocab as usize).map(|id| of(id, &mut rng)).collect();
    let gpu = shared::gpu(Some(Tier::Baseline));
    let cuts = [(1.0, 0.0, 1.0), (0.8, 0.0, 1.3), (0.95, 0.05, 0.8)];
    for device in gpu.into_iter().chain([common::cpu()]) {
        for (top_p, min_p, temperature) in common::drawn_on(&device, 1, cuts) {
            let [listed, all] = [1024, 1025].map(|top_k| {
                let seed = [9, 1];
                let sampling = Sampling { seed, ..settings(top_k, top_p, min_p, temperature) };
                draws(&device, &Setting { logits: logits.clone(), one_in: 1, sampling }).expect("the draws run")
            });
            let distinct: std::collections::HashSet<&u32> = all.iter().collect();
            assert!(distinct.len() > 20, "{} tokens", distinct.len());
            assert_eq!(listed, all, "{}: {top_p} {min_p} {temperature}", device.info().name);
        }
    }
}

#[test]
fn cpu_draws_match_oracle() {
    check_draws(&common::cpu());
}

#[test]
fn gpu_draws_match_oracle() {
    let Some(gpu) = shared::gpu(Some(Tier::Baseline)) else { return };
    check_draws(&gpu);
}

#[test]
fn gpu_and_cpu_draw_the_same() {
    let Some(gpu) = shared::gpu(Some(Tier::Baseline)) else { return };
    let cpu = common::cpu();
    let (mut same, mut total) = (0, 0);
    for setting in common::drawn(8, &all_settings()) {
        let (a, b) = (draws(&gpu, setting).expect("gpu"), draws(&cpu, setting).expect("cpu"));
        same += a.iter().zip(&b).filter(|(a, b)| a == b).count();
        total += a.len();
    }
    println!("{same} of {total} draws are the same on both executors");
    assert!(same as f64 >= (1.0 - DIFFERENT) * total as f64, "{same} of {total}");
}
