//! Many texts at once: each is what it would be alone, to the bit, whoever else is computed with it, joins or leaves.

mod common;

use std::path::Path;

use common::{Rng, block_on, executors, find_data};
use tilewright::engine::{Driver, Engine, EngineOptions, Request, Stream, Usage};
use tilewright::generate::{Piece, StopReason};
use tilewright::load::ModelFile;
use tilewright::{Device, Error, GenerateOptions, LoadOptions, Model};

fn builtin(device: &Device) -> Model {
    Model::from_file(device, ModelFile::builtin().unwrap(), LoadOptions::default()).unwrap()
}

/// A random model of the test data.
fn tiny(device: &Device, name: &str) -> Model {
    let path = find_data(&Path::new("tiny-random").join(name)).expect("the model is in the repository");
    Model::load(device, path, LoadOptions::default()).unwrap()
}

/// Tells of each token the 3 likeliest ones, so that equal texts have equal logits.
fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { ignore_eos: true, logprobs: Some(3), ..GenerateOptions::greedy(max_tokens) }
}

/// All that a stream says until it ends.
#[derive(Clone, Debug, PartialEq)]
struct Text {
    pieces: Vec<Piece>,
    reason: Option<StopReason>,
    usage: Usage,
}

fn collect(mut stream: Stream) -> Result<Text, Error> {
    let mut pieces = Vec::new();
    while let Some(piece) = block_on(stream.next()) {
        pieces.push(piece?);
    }
    Ok(Text { pieces, reason: stream.stop_reason(), usage: stream.usage() })
}

impl Text {
    fn ids(&self) -> Vec<u32> {
        self.pieces.iter().map(|piece| piece.id).collect()
    }
}

/// Computes all requests, each of which is given from the step on that it has.
fn together(model: &Model, options: &EngineOptions, requests: &[(usize, Request)]) -> (Vec<Text>, Engine) {
    let (engine, mut driver) = Engine::new(model, options).unwrap();
    let streams = in_steps(&engine, &mut driver, requests, |_| ());
    (streams.into_iter().map(|stream| collect(stream).unwrap()).collect(), engine)
}

/// Runs the driver to the end; a request is given before the step that it has. `before` is called before each step.
fn in_steps(
    engine: &Engine,
    driver: &mut Driver,
    requests: &[(usize, Request)],
    mut before: impl FnMut(usize),
) -> Vec<Stream> {
    let mut streams: Vec<Option<Stream>> = requests.iter().map(|_| None).collect();
    for step in 0.. {
        for ((at, request), stream) in requests.iter().zip(&mut streams) {
            if *at == step {
                *stream = Some(engine.submit(request.clone()).unwrap());
            }
        }
        before(step);
        let is_busy = block_on(driver.step()).unwrap();
        if !is_busy && requests.iter().all(|(at, _)| *at <= step) {
            break;
        }
    }
    streams.into_iter().map(|stream| stream.unwrap()).collect()
}

fn prompts(model: &Model, n: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut rng = Rng::new(seed);
    let vocab_size = model.config().vocab_size as usize;
    (0..n)
        .map(|_| {
            let len = 1 + rng.below(150);
            (0..len).map(|_| rng.below(vocab_size) as u32).collect()
        })
        .collect()
}

/// Sequences of models of each kind of layer: alone, and in batches that they join and leave at any step.
#[test]
fn texts_are_the_same_alone_and_in_any_batch() {
    for device in executors() {
        let mut models = vec![("builtin", builtin(&device))];
        for name in ["llama3-rope", "qwen2", "gemma3", "granite-moe", "gpt-oss", "lfm2", "qwen35", "granite-hybrid"] {
            models.push((name, tiny(&device, name)));
        }
        for (name, model) in models {
            let n = 9;
            let requests: Vec<Request> = prompts(&model, n, 1)
                .into_iter()
                .enumerate()
                .map(|(i, ids)| {
                    let sampled = GenerateOptions { temperature: 0.9, top_k: 30, seed: i as u64, ..greedy(6 + i) };
                    let penalised = GenerateOptions { repeat_penalty: 1.3, presence_penalty: 0.4, ..greedy(6 + i) };
                    let biased = GenerateOptions { logit_bias: [(ids[0], 3.0)].into(), ..sampled.clone() };
                    let options = [greedy(6 + i), sampled, penalised, biased][i % 4].clone();
                    Request::new(ids, options)
                })
                .collect();
            let options = EngineOptions { max_sequences: 4, prefix_cache: false, ..EngineOptions::default() };
            let alone: Vec<Text> = requests
                .iter()
                .map(|request| together(&model, &options, &[(0, request.clone())]).0.remove(0))
                .collect();
            for seed in [1, 2] {
                let mut rng = Rng::new(seed);
                let at: Vec<(usize, Request)> =
                    requests.iter().map(|request| (rng.below(12), request.clone())).collect();
                let (texts, engine) = together(&model, &options, &at);
                for (i, (text, alone)) in texts.iter().zip(&alone).enumerate() {
                    assert_eq!(text, alone, "{name} on {}: text {i} of seed {seed}", device.info().name);
                }
                let stats = engine.stats();
                assert_eq!((stats.n_finished, stats.n_running, stats.n_queued), (n as u64, 0, 0));
                assert_eq!(stats.n_free_pages, stats.n_pages, "all pages are back");
            }
        }
    }
}
