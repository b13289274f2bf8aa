//! Callers on workers of a rayon pool must not deadlock.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rayon::prelude::*;
use tilewright::{Device, GenerateOptions, Model};

const PROMPTS: [&str; 4] =
    ["Once upon a time", "The red robot dog", "A ball", "Lily and Tom went to the park. They saw"];

/// The greedy ids after a prompt.
fn greedy(model: &Model, prompt: &str) -> Vec<u32> {
    let mut session = model.session().unwrap();
    let options = GenerateOptions { max_tokens: 3, temperature: 0.0, ..GenerateOptions::default() };
    let mut generation = session.generate(prompt, &options).unwrap();
    while pollster::block_on(generation.next()).transpose().unwrap().is_some() {}
    drop(generation);
    session.tokens().to_vec()
}

/// Runs the work on its own thread; a hang fails the test instead of blocking it for ever.
fn or_hang<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    const HANG: Duration = Duration::from_secs(240);
    let (done, wait) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    wait.recv_timeout(HANG).expect("a deadlock, or a caller failed")
}

/// Many sequences from the workers of the current pool; each equals that of its model alone.
fn many_callers(models: Vec<Model>, expected: Vec<Vec<u32>>) {
    let found: Vec<Vec<u32>> = (0..32usize)
        .into_par_iter()
        .with_max_len(1)
        .map(|i| greedy(&models[i % models.len()], PROMPTS[i % PROMPTS.len()]))
        .collect();
    for (i, found) in found.iter().enumerate() {
        assert_eq!(found, &expected[i % PROMPTS.len()], "caller {i}");
    }
}

fn expected() -> Vec<Vec<u32>> {
    let model = Model::builtin(&Device::cpu()).unwrap();
    PROMPTS.iter().map(|prompt| greedy(&model, prompt)).collect()
}

fn models(n: usize) -> Vec<Model> {
    (0..n).map(|_| Model::builtin(&Device::cpu()).unwrap()).collect()
}

#[test]
fn workers_of_the_global_pool_share_a_device() {
    or_hang(|| many_callers(models(1), expected()));
}

#[test]
fn workers_of_the_global_pool_share_several_devices() {
    or_hang(|| many_callers(models(3), expected()));
}

#[test]
fn workers_of_a_larger_pool_share_devices() {
    or_hang(|| {
        let expected = expected();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(8).build().unwrap();
        pool.install(|| {
            many_callers(models(1), expected.clone());
            many_callers(models(2), expected);
        });
    });
}

#[test]
fn nested_parallel_callers_do_not_deadlock() {
    or_hang(|| {
        let (expected, model) = (expected(), models(1).remove(0));
        let found: Vec<Vec<Vec<u32>>> = (0..4)
            .into_par_iter()
            .map(|_| PROMPTS.par_iter().with_max_len(1).map(|prompt| greedy(&model, prompt)).collect())
            .collect();
        assert!(found.iter().all(|found| *found == expected));
    });
}
