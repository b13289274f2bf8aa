//! Continuous batching: each completion is bit-identical to that of its own run, whatever joins or leaves its batch.

use crate::common;

use std::cell::Cell;
use std::path::Path;

use common::copier::{Copier, Sizes};
use common::shared::executors;
use common::{Rng, block_on, find_data};
use tilewright::engine::{Driver, Engine, EngineOptions, Request, Stream, Usage};
use tilewright::generate::{ContextPolicy, DeviceLayers, Piece, StopReason};
use tilewright::kernels::KvType;
use tilewright::load::ModelFile;
use tilewright::{
    Bucket, Choice, Device, DeviceChoice, Error, GenerateOptions, LoadOptions, Model, Recovery, Tier, Tuning,
    WeightType,
};

fn builtin(device: &Device) -> Model {
    Model::from_file(device, ModelFile::builtin().unwrap(), LoadOptions::default()).unwrap()
}

/// A random model of the test data.
fn tiny(device: &Device, name: &str) -> Model {
    let path = find_data(&Path::new("tiny-random").join(name)).expect("the model is in the repository");
    Model::load(device, path, LoadOptions::default()).unwrap()
}

/// The same model, exact, with its first layers on other devices.
fn split(device: &Device, name: &str, others: &[(&Device, u32)]) -> Model {
    let path = find_data(&Path::new("tiny-random").join(name)).expect("the model is in the repository");
    let layers_on = layers_on(others);
    let options = LoadOptions { layers_on, exact: true, kv_type: KvType::F32, ..LoadOptions::default() };
    Model::load(device, path, options).unwrap()
}

fn layers_on(others: &[(&Device, u32)]) -> Vec<DeviceLayers> {
    others.iter().map(|&(device, n_layers)| DeviceLayers { device: device.clone(), n_layers }).collect()
}

/// Reports the top 3 log-probabilities per token, so that equal completions have equal logits.
fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { ignore_eos: true, logprobs: Some(3), ..GenerateOptions::greedy(max_tokens) }
}

/// All pieces of a stream up to its end.
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

/// Runs all requests, each submitted at its given step.
fn together(model: &Model, options: &EngineOptions, requests: &[(usize, Request)]) -> (Vec<Text>, Engine) {
    let (engine, mut driver) = Engine::new(model, options).unwrap();
    let streams = in_steps(&engine, &mut driver, requests, |_| ());
    (streams.into_iter().map(|stream| collect(stream).unwrap()).collect(), engine)
}

/// Runs the driver to the end; a request is submitted before its step. `before` is called before each step.
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

/// Sequences of models with each kind of layer: alone, and in batches that they join and leave at any step. On a GPU
/// some kinds in one batch; with `--full` all kinds in two.
#[test]
fn sequence_is_bit_equal_alone_and_in_any_batch() {
    for device in executors() {
        let has_all = common::is_full() || !device.is_gpu();
        let mut models = vec![("builtin", builtin(&device))];
        let others: &[&str] = match has_all {
            true => &["llama3-rope", "qwen2", "gemma3", "granite-moe", "gpt-oss", "lfm2", "qwen35", "granite-hybrid"],
            false => &["gemma3", "granite-moe", "qwen35"],
        };
        models.extend(others.iter().map(|name| (*name, tiny(&device, name))));
        if device.is_gpu() {
            models.push(("gemma3, half on the CPU", split(&device, "gemma3", &[(&common::cpu(), 2)])));
        }
        for (name, model) in common::drawn_on(&device, 2, models) {
            let n = 9;
            let requests: Vec<Request> = prompts(&model, n, 1)
                .into_iter()
                .enumerate()
                .map(|(i, ids)| {
                    let sampled =
                        GenerateOptions { temperature: 0.9, top_k: 30, seed: Some(i as u64), ..greedy(6 + i) };
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
            for seed in 1..=if has_all { 2 } else { 1 } {
                let mut rng = Rng::new(seed);
                let at: Vec<(usize, Request)> =
                    requests.iter().map(|request| (rng.below(12), request.clone())).collect();
                let (texts, engine) = together(&model, &options, &at);
                for (i, (text, alone)) in texts.iter().zip(&alone).enumerate() {
                    assert_eq!(text, alone, "{name} on {}: text {i} of seed {seed}", device.info().name);
                }
                let stats = engine.stats();
                assert_eq!((stats.n_finished, stats.n_running, stats.n_queued), (n as u64, 0, 0));
                assert_eq!(stats.n_free_pages, stats.n_pages, "all pages are free");
            }
        }
    }
}

/// From 16 sequences on, one has the same bits beside however many others, but not those of few, unless the
/// engine is deterministic.
#[test]
fn bits_depend_on_the_class_of_batch_sizes_unless_deterministic() {
    for device in [Some(common::cpu()), common::gpu(Some(Tier::F16))].into_iter().flatten() {
        for name in common::drawn(1, ["llama3-rope", "granite-moe", "qwen35"]) {
            let model = tiny(&device, name);
            let all = prompts(&model, 24, 5);
            // The last one joins when the others decode, and ends before them.
            let last_of = |n_others: usize, deterministic: bool| {
                let options = EngineOptions { max_sequences: 24, deterministic, ..EngineOptions::default() };
                let others = all[1..=n_others].iter().map(|ids| {
                    (0, Request::new(ids.clone(), GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(90) }))
                });
                let last = (60, Request::new(all[0].clone(), greedy(6)));
                together(&model, &options, &others.chain([last]).collect::<Vec<_>>()).0.pop().unwrap().pieces
            };
            let [alone, beside_15, beside_23] = [0, 15, 23].map(|n| last_of(n, false));
            let at = device.info().name.clone();
            assert_eq!(beside_15, beside_23, "{name} on {at}");
            assert_ne!(beside_15, alone, "{name} on {at}: few sequences have products of their own");
            for n in [0, 7, 15, 23] {
                assert_eq!(last_of(n, true), alone, "{name} on {at}, deterministic beside {n}");
            }
        }
    }
}

/// On a GPU, decode passes are submitted ahead of reading the previous tokens. Completions equal those that read each
/// token first, as requests for log-probabilities do: across page boundaries, with recurrent states, unpredictable
/// ends, joins and cancellations. If all ends are known, no pass is wasted.
#[test]
fn passes_submitted_ahead_do_not_change_output() {
    for device in executors() {
        let others = common::drawn_on(&device, 1, ["gemma3", "qwen35"]).into_iter().map(|name| tiny(&device, name));
        for model in std::iter::once(builtin(&device)).chain(others) {
            let name = format!("{} on {}", model.name(), device.info().name);
            let requests: Vec<Request> = prompts(&model, 6, 3)
                .into_iter()
                .enumerate()
                .map(|(i, ids)| {
                    let max_tokens = 20 + 13 * i;
                    let sampled =
                        GenerateOptions { temperature: 0.9, top_k: 30, seed: Some(i as u64), ..greedy(max_tokens) };
                    let penalised = GenerateOptions { repeat_penalty: 1.3, frequency_penalty: 0.4, ..sampled.clone() };
                    Request::new(ids, [greedy(max_tokens), sampled, penalised][i % 3].clone())
                })
                .collect();
            let options = EngineOptions { max_sequences: 4, ..EngineOptions::default() };
            let at: Vec<(usize, Request)> = requests.iter().cloned().enumerate().map(|(i, r)| (5 * i, r)).collect();
            let (read_first, engine) = together(&model, &options, &at);
            assert_eq!(engine.stats().n_ahead_passes, 0, "{name}");
            let quick = |ends: bool| {
                let request = |(i, (at, request)): (usize, &(usize, Request))| {
                    let mut request = request.clone();
                    request.options.logprobs = None;
                    if ends && i % 2 == 1 {
                        // In the middle of its completion.
                        let ids = read_first[i].ids();
                        request.options.stop_ids = vec![ids[ids.len() / 2]];
                        request.options.ignore_eos = false;
                    }
                    (*at, request)
                };
                at.iter().enumerate().map(request).collect::<Vec<_>>()
            };

            let (texts, engine) = together(&model, &options, &quick(false));
            let stats = engine.stats();
            for (i, (text, other)) in texts.iter().zip(&read_first).enumerate() {
                assert_eq!((text.ids(), text.reason), (other.ids(), other.reason), "{name}: text {i}");
            }
            assert_eq!(stats.n_ahead_passes > 0, device.is_gpu(), "{name}: {stats:?}");
            let n_tokens: usize = texts.iter().map(|text| text.pieces.len()).sum();
            assert_eq!(stats.generated_tokens, n_tokens as u64, "{name}");

            let (texts, engine) = together(&model, &options, &quick(true));
            for (i, (text, other)) in texts.iter().zip(&read_first).enumerate() {
                let (ids, whole) = (text.ids(), other.ids());
                assert_eq!(ids, whole[..ids.len()], "{name}: text {i}");
                let ends = i % 2 == 1;
                assert_eq!(text.reason, Some(if ends { StopReason::Eos } else { StopReason::MaxTokens }));
                assert_eq!(ids.len() < whole.len(), ends, "{name}: text {i}");
            }
            let stats = engine.stats();
            assert_eq!((stats.n_finished, stats.n_free_pages + stats.n_kept_pages), (6, stats.n_pages), "{name}");
        }
    }
}

fn ids(n: usize, seed: u64, model: &Model) -> Vec<u32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| rng.below(model.config().vocab_size as usize) as u32).collect()
}

/// Prefix cache with a second prompt that begins like the first, in models with and without windows and recurrent
/// states: whole common pages are computed once, and completions equal those without a cache.
#[test]
fn common_prefix_is_computed_once() {
    const COMMON: usize = 150;
    for device in executors() {
        let mut models = vec![("builtin", builtin(&device))];
        let others = ["gemma3", "mistral-sliding", "lfm2", "qwen35", "granite-hybrid"];
        models.extend(common::drawn_on(&device, 1, others).into_iter().map(|name| (name, tiny(&device, name))));
        for (name, model) in models {
            let common = ids(COMMON, 1, &model);
            let request = |seed, n| Request::new([&common[..], &ids(n, seed, &model)].concat(), greedy(5));
            // The third request arrives after the others have ended; the last one repeats the whole first prompt.
            let requests = [(0, request(2, 9)), (4, request(3, 40)), (30, request(4, 1)), (31, request(2, 9))];
            let (texts, engine) = together(&model, &EngineOptions::default(), &requests);
            let options = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
            let (without, _) = together(&model, &options, &requests);
            let in_pages = COMMON / 64 * 64;
            for (i, (text, without)) in texts.iter().zip(&without).enumerate() {
                assert_eq!(text.pieces, without.pieces, "{name} on {}: text {i}", device.info().name);
                assert_eq!(text.usage.cached_tokens, if i == 0 { 0 } else { in_pages }, "{name}: text {i}");
            }
            let stats = engine.stats();
            // A prompt's last token is always computed.
            let n_prompts: usize = requests.iter().map(|(_, request)| request.ids.len() - 1).sum();
            assert_eq!(stats.cached_tokens, 3 * in_pages as u64, "{name}");
            assert_eq!(stats.prompt_tokens, (n_prompts - 3 * in_pages) as u64, "{name}");
        }
    }
}

/// Layers with a window keep fewer pages than others. Completions are bit-identical to those of an engine that keeps all
/// positions, which CPU offload requires: of long prompts, in batches, with draft tokens, after prefix-cache hits, and
/// where the window's pages of a cached prefix were evicted.
#[test]
fn pages_of_windows_change_no_bit_and_take_less_memory() {
    for device in executors() {
        let names = ["gemma3", "gemma4", "gpt-oss", "mistral-sliding"];
        for name in common::drawn_on(&device, 2, names) {
            let model = tiny(&device, name);
            let context = format!("{name} on {}", device.info().name);
            let prompt = ids(190, 1, &model);
            let request = |n: usize, seed, n_tokens| {
                Request::new([&prompt[..n], &ids(8, seed, &model)].concat(), greedy(n_tokens))
            };
            let drafted = GenerateOptions { prompt_lookup: 4, logprobs: None, ..greedy(40) };
            let mut requests = vec![
                (0, request(190, 2, 50)),
                (0, request(70, 3, 60)),
                (3, Request::new(prompt[..9].repeat(12), drafted)),
                (40, request(150, 4, 20)),
                (90, request(140, 5, 9)),
                (91, request(190, 2, 9)),
            ];
            // More prompts than have window pages, and again from the latest on; the first one's were evicted and are
            // computed again.
            let order = (0..18).chain((0..18).rev()).chain([0]).enumerate();
            requests.extend(order.map(|(i, seed)| (100 + 8 * i, Request::new(ids(150, 10 + seed, &model), greedy(3)))));
            let few = EngineOptions {
                max_sequences: 4,
                prompt_lookup: 4,
                cache_tokens: Some(4096),
                ..EngineOptions::default()
            };
            let all = EngineOptions { host_cache_bytes: 1, ..few.clone() };
            let [(texts, few), (want, all)] = [few, all].map(|options| together(&model, &options, &requests));
            for (i, (text, want)) in texts.iter().zip(&want).enumerate() {
                assert_eq!(text.pieces, want.pieces, "{context}: text {i}");
            }
            let cached = |texts: &[Text]| texts.iter().map(|text| text.usage.cached_tokens).collect::<Vec<_>>();
            assert_eq!(cached(&texts)[4..6], [128, 192], "{context}");
            let cached = cached(&texts);
            assert_eq!((cached[24], cached[41], cached[42]), (128, 0, 128), "{context}: {cached:?}");
            let [few, all] = [few, all].map(|engine| engine.plan().cache_bytes);
            assert!(few * 4 < all * 3, "{context}: {few} of {all} bytes");
        }
    }
}

/// The executors, and the CPU as opened by default, which rounds activations.
fn executors_and_opened_cpu() -> Vec<Device> {
    let mut devices = executors();
    devices.push(block_on(Device::open(&DeviceChoice::Cpu, None)).unwrap());
    devices
}

/// Prompts of later turns contain earlier completions. Completions are bit-identical with and without the prefix
/// cache, on devices that round and on others: only pages computed in a prompt are reused.
#[test]
fn prefix_cache_hit_keeps_output_bit_equal() {
    for device in executors_and_opened_cpu() {
        let mut models = vec![("builtin", builtin(&device))];
        let others: &[&str] = match (common::is_full(), device.is_gpu()) {
            (true, _) => &["gemma3", "granite-moe", "qwen35", "granite-hybrid"],
            (false, false) => &["gemma3", "qwen35"],
            (false, true) => &[],
        };
        models.extend(others.iter().map(|name| (*name, tiny(&device, name))));
        for (name, model) in models {
            let context = format!("{name} on {}", device.info().name);
            let with = Engine::new(&model, &EngineOptions::default()).unwrap();
            let without = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
            let mut engines = [with, Engine::new(&model, &without).unwrap()];
            let mut prompt = ids(90, 1, &model);
            for (turn, (n_generated, n_cached)) in [(80, 0), (12, 64), (5, 128)].into_iter().enumerate() {
                let [with, without] = engines.each_mut().map(|(engine, driver)| {
                    let streams =
                        in_steps(engine, driver, &[(0, Request::new(prompt.clone(), greedy(n_generated)))], |_| ());
                    collect(streams.into_iter().next().unwrap()).unwrap()
                });
                assert_eq!(with.pieces, without.pieces, "{context}: turn {turn}");
                assert_eq!(with.usage.cached_tokens, n_cached, "{context}: turn {turn}");
                prompt.extend(with.ids());
                prompt.extend(ids(15, 2 + turn as u64, &model));
            }
        }
    }
}

/// A prompt is prefilled in different chunks beside a running completion and after a cached prefix. Its completion is
/// the same, even if the device was tuned and such sizes have other variants.
#[test]
fn prefill_is_bit_equal_however_the_prompt_is_chunked() {
    let mut tuning = Tuning::default();
    for weight in [WeightType::F16, WeightType::Q4_0, WeightType::Q8_0] {
        let sizes = |first: u32| (0..8).map(move |log| first << log);
        for (rows, blocks) in sizes(32).flat_map(|rows| sizes(1).map(move |blocks| (rows, blocks))) {
            for kernel in ["matmul", "matmul_half"] {
                let bucket = Bucket { kernel, weight, rows, blocks, tokens: 256 };
                tuning.choose(bucket, Some(Choice::new(Tier::Baseline, 64)));
            }
        }
    }
    // Recurrent states are copied at these: of 240 tokens the CPU computes 128, then whole pages.
    const PASS_ENDS: [usize; 2] = [128, 192];
    let mut devices = executors_and_opened_cpu();
    let tuned = devices.iter().find(|device| device.is_gpu()).map(|device| device.with_tuning(tuning));
    devices.extend(tuned);
    for device in devices {
        let others: &[&str] = match (common::is_full(), device.is_gpu()) {
            (true, false) => &["gemma3", "granite-moe", "qwen35", "gpt-oss"],
            (false, false) => &["gemma3", "granite-moe"],
            (_, true) => &[],
        };
        let mut models = vec![("builtin", builtin(&device))];
        models.extend(others.iter().map(|name| (*name, tiny(&device, name))));
        for (name, model) in models {
            let context = format!("{name} on {}", device.info().name);
            let whole = ids(240, 1, &model);
            let request = |n: usize, seed| Request::new([&whole[..n], &ids(240 - n, seed, &model)].concat(), greedy(3));
            let options = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
            let alone = together(&model, &options, &[(0, request(240, 1))]).0.remove(0);
            let beside = [(0, Request::new(vec![1, 2], greedy(12))), (2, request(240, 1))];
            assert_eq!(together(&model, &options, &beside).0[1].pieces, alone.pieces, "{context}, beside another");
            for n_common in [64, 130, 200] {
                let after = [(0, request(n_common, 2)), (9, request(240, 1))];
                let (texts, _) = together(&model, &EngineOptions::default(), &after);
                let n_cached = match model.config().is_recurrent() {
                    true => PASS_ENDS.into_iter().rfind(|&end| end <= n_common).unwrap_or(0),
                    false => n_common / 64 * 64,
                };
                assert_eq!(texts[1].usage.cached_tokens, n_cached, "{context}");
                assert_eq!(texts[1].pieces, alone.pieces, "{context}, after {n_common} cached tokens");
            }
        }
    }
}

/// Requests share cached prefixes only with requests of the same salt.
#[test]
fn prefixes_are_shared_only_within_one_cache_salt() {
    let model = builtin(&common::cpu());
    let (engine, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
    let mut cached = |salt: Option<&str>| {
        let request = Request { cache_salt: salt.map(str::to_owned), ..Request::new(ids(150, 1, &model), greedy(2)) };
        let stream = engine.submit(request).unwrap();
        while block_on(driver.step()).unwrap() {}
        collect(stream).unwrap().usage.cached_tokens
    };
    let salts = [None, Some("a"), Some("b"), Some("")];
    assert_eq!(salts.map(&mut cached), [0; 4], "no prefix is shared between salts");
    assert_eq!(salts.map(&mut cached), [128; 4], "each salt hits its own prefix");
    let most = Request::MAX_SALT_BYTES;
    let with = |n| engine.submit(Request { cache_salt: Some("s".repeat(n)), ..Request::new(vec![1], greedy(1)) });
    assert!(with(most).is_ok());
    assert!(matches!(with(most + 1).err(), Some(Error::Option { option: "cache_salt", .. })));
}

/// Twenty prompts that are nine tenths equal.
#[test]
fn shared_prompt_tokens_are_not_recomputed() {
    let model = builtin(&common::cpu());
    let common = ids(360, 1, &model);
    let request = |seed| Request::new([&common[..], &ids(40, seed, &model)].concat(), greedy(4));
    let requests: Vec<_> = (0..20).map(|i| (4 * i as usize, request(i))).collect();
    let (_, engine) = together(&model, &EngineOptions::default(), &requests);
    let stats = engine.stats();
    let share = stats.cached_tokens as f64 / (stats.cached_tokens + stats.prompt_tokens) as f64;
    println!("{} of {} prompt tokens were not computed ({:.0} %)", stats.cached_tokens, 20 * 399, 100.0 * share);
    assert_eq!(stats.cached_tokens, 19 * 320);
}

/// A dropped completion leaves the others unchanged, and its pages are free at the next step.
#[test]
fn dropped_request_does_not_affect_others() {
    let model = builtin(&common::cpu());
    let options = EngineOptions { max_sequences: 8, max_queued: 64, ..EngineOptions::default() };
    let requests: Vec<Request> = prompts(&model, 24, 3).into_iter().map(|ids| Request::new(ids, greedy(24))).collect();
    let alone: Vec<Vec<u32>> =
        requests.iter().map(|request| together(&model, &options, &[(0, request.clone())]).0[0].ids()).collect();
    let (engine, mut driver) = Engine::new(&model, &options).unwrap();
    let mut streams: Vec<Option<Stream>> =
        requests.iter().map(|request| Some(engine.submit(request.clone()).unwrap())).collect();
    // Every third one is dropped: while queued, in prefill or in decode.
    let mut rng = Rng::new(9);
    let dropped: Vec<(usize, usize)> = (0..24).step_by(3).map(|i| (i, rng.below(60))).collect();
    for step in 0.. {
        for (i, _) in dropped.iter().filter(|(_, at)| *at == step) {
            streams[*i] = None;
        }
        if !block_on(driver.step()).unwrap() && step > 60 {
            break;
        }
    }
    for (i, (stream, alone)) in streams.into_iter().zip(&alone).enumerate() {
        if let Some(stream) = stream {
            assert_eq!(collect(stream).unwrap().ids(), *alone, "text {i}");
        }
    }
    let stats = engine.stats();
    assert_eq!((stats.n_running, stats.n_queued, stats.n_failed), (0, 0, 0));
    assert_eq!(stats.n_finished + stats.n_cancelled, 24);
    assert!(stats.n_cancelled > 3, "{stats:?}");
    assert_eq!(stats.n_free_pages + stats.n_kept_pages, stats.n_pages);
}

/// CPU offload of the prefix cache: three prompts in a cache with room for one. The first one's pages go to host
/// memory and return, with keys of all positions, windows, and recurrent states; with room for a single page, one page
/// returns.
#[test]
fn evicted_prefix_pages_are_restored_from_host_memory() {
    const PAGE: usize = 64;
    for device in executors() {
        let cpu = common::cpu();
        let others = [vec![], vec![(&cpu, 1)], vec![(&cpu, 1), (&device, 1)]];
        let names = ["llama3-rope", "gemma3", "qwen35"];
        let all = names.into_iter().flat_map(|name| others.iter().map(move |others| (name, others)));
        let all = all.filter(|(name, others)| others.is_empty() || (device.is_gpu() && *name != names[0]));
        for (name, others) in common::drawn_on(&device, 3, all) {
            let path = find_data(&Path::new("tiny-random").join(name)).expect("the model is in the repository");
            let context_length = Some(4 * PAGE as u32);
            let load_options = LoadOptions { context_length, layers_on: layers_on(others), ..LoadOptions::default() };
            let model = Model::load(&device, path, load_options).unwrap();
            let request = |seed| Request::new(ids(3 * PAGE + 9, seed, &model), greedy(6));
            let run = |host_cache_bytes| {
                let options = EngineOptions {
                    max_sequences: 1,
                    cache_tokens: Some(4 * PAGE as u32),
                    host_cache_bytes,
                    ..EngineOptions::default()
                };
                let (engine, mut driver) = Engine::new(&model, &options).unwrap();
                let texts = [1, 2, 3, 1].map(|seed| {
                    let stream = engine.submit(request(seed)).unwrap();
                    while block_on(driver.step()).unwrap() {}
                    collect(stream).unwrap()
                });
                (texts, engine.stats())
            };
            let (without, stats) = run(0);
            assert_eq!((stats.cached_tokens, stats.spilled_pages, stats.n_host_pages), (0, 0, 0), "{name}");
            let (with, stats) = run(1 << 30);
            assert_eq!(with.clone().map(|text| text.pieces), without.clone().map(|text| text.pieces), "{name}");
            assert_eq!(with[3].usage.cached_tokens, 3 * PAGE, "{name}");
            assert_eq!((stats.cached_tokens, stats.restored_pages), (3 * PAGE as u64, 3), "{name}");
            // Three pages for each of three prompts; the device holds the last three.
            assert_eq!((stats.spilled_pages, stats.n_host_pages), (9, 6), "{name}");
            let (few, stats) = run(stats.host_page_bytes / 6 + 1);
            assert_eq!(few.map(|text| text.pieces), without.map(|text| text.pieces), "{name}");
            assert!(stats.n_host_pages <= 1 && stats.restored_pages <= 1, "{name}: {stats:?}");
        }
    }
}

/// Pipeline stages: with layers split over devices, completions equal the CPU's, and probabilities agree up to the
/// order of sums: for layers with all keys, windows and recurrent states, on any device. Common prefixes are computed
/// once.
#[test]
fn layers_on_several_devices_give_equal_output() {
    let Some(gpu) = executors().into_iter().find(Device::is_gpu) else { return };
    let Some(other) = common::gpu(None) else { return };
    let cpu = common::cpu();
    for name in common::drawn(1, ["llama3-rope", "gemma3", "lfm2", "qwen35", "gpt-oss"]) {
        let whole = split(&cpu, name, &[]);
        let n_layers = whole.config().n_layers();
        let mut requests: Vec<(usize, Request)> = prompts(&whole, 5, 4)
            .into_iter()
            .enumerate()
            .map(|(i, ids)| {
                let sampled = GenerateOptions { temperature: 0.9, top_k: 30, seed: Some(i as u64), ..greedy(8 + i) };
                (2 * i, Request::new(ids, if i % 2 == 0 { greedy(8 + i) } else { sampled }))
            })
            .collect();
        requests.extend([
            (0, Request::new(ids(150, 9, &whole), greedy(4))),
            (40, Request::new(ids(150, 9, &whole), greedy(4))),
        ]);
        let options = EngineOptions { max_sequences: 4, ..EngineOptions::default() };
        let (want, _) = together(&whole, &options, &requests);
        let splits: [&[_]; 4] =
            [&[(&cpu, 1)], &[(&cpu, n_layers - 1)], &[(&other, 1)], &[(&cpu, 1), (&other, n_layers - 2)]];
        for others in splits {
            let model = split(&gpu, name, others);
            let (got, engine) = together(&model, &options, &requests);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let places: Vec<_> = others.iter().map(|(device, n)| (&device.info().backend, n)).collect();
                let context = format!("{name}, layers elsewhere {places:?}: text {i}");
                assert_eq!(got.ids(), want.ids(), "{context}");
                for (piece, of_cpu) in got.pieces.iter().zip(&want.pieces) {
                    let logprob = |piece: &Piece| piece.logprobs.as_ref().expect("requested").logprob;
                    let difference = (logprob(piece) - logprob(of_cpu)).abs();
                    assert!(difference < 1e-3, "{context}: probabilities differ by {difference}");
                }
            }
            let weights_bytes: u64 = model.placement().unwrap().iter().map(|placed| placed.plan.weights_bytes).sum();
            assert_eq!(engine.plan().weights_bytes, weights_bytes, "{name}");
            assert_eq!(engine.stats().cached_tokens, 128, "{name}: two pages");
            assert_eq!(engine.stats().n_ahead_passes, 0, "the host carries rows from device to device");
            let devices = &engine.devices()[0];
            assert!(others.iter().all(|(device, _)| devices.device.contains(&device.info().name)), "{devices:?}");
        }
    }
}

/// The self-test covers every pipeline, including those for prompts of one or a few tokens and for the fewest rows of
/// attention.
#[test]
fn every_pipeline_of_an_engine_is_self_tested() {
    for device in common::gpus([Tier::Scalar, Tier::Subgroups]) {
        let others = common::drawn(1, ["gemma3", "qwen35"]).into_iter().map(|name| tiny(&device, name));
        for model in std::iter::once(builtin(&device)).chain(others) {
            let requests = [1, 2, 3, 5, 20].map(|n| (0, Request::new(ids(n, 1, &model), greedy(2))));
            let options = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
            together(&model, &options, &requests);
            common::assert_tested(&device);
        }
    }
}

/// After a cancellation or deadline at most two tokens arrive.
#[test]
fn cancelled_and_expired_requests_end_at_once() {
    let model = builtin(&common::cpu());
    let (engine, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
    let mut stream = engine.submit(Request::new(vec![1, 5], greedy(400))).unwrap();
    let deadline = Some(web_time::Instant::now());
    let late = engine.submit(Request { deadline, ..Request::new(vec![1, 5], greedy(400)) }).unwrap();
    for _ in 0..5 {
        block_on(driver.step()).unwrap();
    }
    for _ in 0..5 {
        assert!(block_on(stream.next()).is_some());
    }
    stream.handle().cancel();
    while block_on(driver.step()).unwrap() {}
    let text = collect(stream).unwrap();
    assert!(text.pieces.len() <= 2, "{} tokens", text.pieces.len());
    assert_eq!(text.reason, Some(StopReason::Cancelled));
    assert_eq!(
        collect(late).unwrap(),
        Text { pieces: vec![], reason: Some(StopReason::Deadline), usage: Usage::default() }
    );
}

/// The queue is bounded; higher priorities run first; accepted requests finish after the engine is closed.
#[test]
fn request_queue_is_bounded_and_ordered_by_priority() {
    let model = builtin(&common::cpu());
    let options = EngineOptions { max_sequences: 1, max_queued: 2, ..EngineOptions::default() };
    let (engine, mut driver) = Engine::new(&model, &options).unwrap();
    let request = |priority| Request { priority, ..Request::new(vec![1, 5, 9], greedy(3)) };
    let mut streams = vec![engine.submit(request(0)).unwrap()];
    block_on(driver.step()).unwrap();
    streams.push(engine.submit(request(0)).unwrap());
    streams.push(engine.submit(request(5)).unwrap());
    let refused = engine.submit(request(9)).err();
    assert!(matches!(refused, Some(Error::Busy { n_waiting: 2 })), "{refused:?}");
    engine.close();
    assert!(matches!(engine.submit(request(0)).err(), Some(Error::Busy { .. })));
    let mut ended = Vec::new();
    while block_on(driver.step()).unwrap() {
        for (i, stream) in streams.iter().enumerate() {
            if stream.stop_reason().is_some() && !ended.contains(&i) {
                ended.push(i);
            }
        }
    }
    assert_eq!(ended[..2], [0, 2], "higher priority first");
    let texts: Vec<Text> = streams.into_iter().map(|stream| collect(stream).unwrap()).collect();
    assert!(texts.iter().all(|text| text.pieces == texts[0].pieces && text.pieces.len() == 3));
    assert_eq!(engine.stats().n_refused, 2);
    // Nothing more arrives.
    block_on(driver.run());
}

#[test]
fn unsupported_engine_requests_are_refused_by_name() {
    let model = builtin(&common::cpu());
    let (engine, _driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
    let refused = |request: Request| engine.submit(request).err().map(|error| error.to_string()).unwrap_or_default();
    let with = |options| Request::new(vec![1], options);
    for (request, named) in [
        (Request::new(vec![], greedy(1)), "no tokens at all"),
        (Request::new(vec![1, 1 << 30], greedy(1)), "the id 1073741824"),
        (Request::new(vec![1; 5000], greedy(1)), "context full"),
        (with(GenerateOptions { temperature: f32::NAN, ..greedy(1) }), "temperature"),
        (with(GenerateOptions { prompt_lookup: 8, logprobs: None, ..greedy(1) }), "prompt_lookup"),
        (with(GenerateOptions { prompt_lookup: 3, ..greedy(1) }), "prompt_lookup"),
        (with(GenerateOptions { mtp_tokens: 3, logprobs: None, ..greedy(1) }), "mtp_tokens"),
        (with(GenerateOptions { logit_bias: [(1 << 30, 1.0)].into(), ..greedy(1) }), "logit_bias"),
    ] {
        let said = refused(request);
        assert!(said.contains(named), "{named}: {said}");
    }
    for options in [
        EngineOptions { max_sequences: 0, ..EngineOptions::default() },
        EngineOptions { max_sequences: 65, ..EngineOptions::default() },
        EngineOptions { cache_tokens: Some(0), ..EngineOptions::default() },
        EngineOptions { prefix_cache: false, host_cache_bytes: 1, ..EngineOptions::default() },
        EngineOptions { prompt_lookup: 8, ..EngineOptions::default() },
        EngineOptions { draft_tokens: 8, ..EngineOptions::default() },
    ] {
        assert!(matches!(Engine::new(&model, &options).err(), Some(Error::Option { .. })), "{options:?}");
    }
}

/// Requests of all kinds beside greedy ones with repetitive prompts, which random models continue repetitively.
fn repeating(model: &Model, n: usize) -> Vec<(usize, Request)> {
    let request = |i: usize| {
        let ids = ids(10 + 7 * i, i as u64, model).repeat(4);
        let drawn = GenerateOptions { temperature: 0.9, top_k: 30, seed: Some(0), ..greedy(20) };
        let penalised = GenerateOptions { repeat_penalty: 1.3, ..greedy(20) };
        let options = if i % 4 == 2 { [drawn, penalised][i / 4 % 2].clone() } else { greedy(70 - i) };
        (2 * i, Request::new(ids, options))
    };
    (0..n).map(request).collect()
}

/// The built-in model with a LoRA adapter that changes it strongly.
fn wrong_draft(model: &Model) -> Model {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("wrong-draft.gguf");
    std::fs::write(&path, crate::files::adapter_of_stories(7)).unwrap();
    let adapter = model.load_adapter(&path, 20.0).unwrap();
    model.with_adapter(Some(&adapter)).unwrap()
}

/// Speculative decoding: draft tokens are verified beside other sequences in a pass's idle rows, and no output bit
/// changes: across page boundaries, with all or no drafts accepted, and in models with head norms, windows and sinks.
#[test]
fn draft_tokens_do_not_change_engine_output() {
    for device in executors() {
        let others =
            common::drawn_on(&device, 1, ["gemma3", "qwen3", "gpt-oss", "lfm2", "olmo2", "granite-hybrid", "qwen35"]);
        let others = others.into_iter().map(|name| (name, tiny(&device, name)));
        for (name, model) in [("builtin", builtin(&device))].into_iter().chain(others) {
            let requests = repeating(&model, 6);
            let plain = EngineOptions { max_sequences: 4, ..EngineOptions::default() };
            let (want, without) = together(&model, &plain, &requests);
            assert_eq!(without.stats().drafted_tokens, 0);
            let n_passes = without.stats().n_decode_passes;
            let drafted_by = |draft: &Model| match model.config().is_recurrent() {
                true => model.clone(),
                false => model.with_draft(draft).unwrap(),
            };
            let right = drafted_by(&model);
            let wrong = if name == "builtin" { wrong_draft(&model) } else { model.clone() };
            let wrong = drafted_by(&wrong);
            for (way, model, options) in [
                ("look-up", &model, EngineOptions { prompt_lookup: 7, ..plain.clone() }),
                ("a draft that is right", &right, EngineOptions { draft_tokens: 4, ..plain.clone() }),
                ("a draft that is wrong", &wrong, EngineOptions { draft_tokens: 3, ..plain.clone() }),
                ("both", &right, EngineOptions { prompt_lookup: 2, draft_tokens: 5, ..plain.clone() }),
            ] {
                // A software adapter takes long for each.
                if device.is_gpu() && !common::is_full() && way.starts_with("a draft") {
                    continue;
                }
                // A recurrent state cannot be rolled back unless the model drafts itself.
                if options.draft_tokens > 0 && model.draft().is_none() {
                    continue;
                }
                let (texts, engine) = together(model, &options, &requests);
                let case = format!("{name} on {}, {way}", device.info().name);
                for (i, (text, want)) in texts.iter().zip(&want).enumerate() {
                    assert_eq!(text.pieces, want.pieces, "{case}: text {i}");
                    assert_eq!(text.reason, want.reason, "{case}: text {i}");
                }
                let stats = engine.stats();
                assert_eq!(stats.generated_tokens, without.stats().generated_tokens, "{case}");
                assert_eq!(stats.n_free_pages + stats.n_kept_pages, stats.n_pages, "{case}");
                assert!(stats.drafted_tokens > 0 && stats.n_decode_passes < n_passes + 1, "{case}: {stats:?}");
                match way {
                    "a draft that is wrong" if name == "builtin" => {
                        assert!(2 * stats.accepted_tokens < stats.drafted_tokens, "{case}: {stats:?}");
                    }
                    "a draft that is right" => {
                        assert!(10 * stats.accepted_tokens > 9 * stats.drafted_tokens, "{case}: {stats:?}");
                        assert!(5 * stats.n_decode_passes < 4 * n_passes, "{case}: {n_passes} before, {stats:?}");
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Completions that outgrow the context continue with its latter half, each as it would alone and in a session, beside
/// others that join and leave; so does a prompt that outgrew it.
#[test]
fn sequences_continue_beyond_the_context_by_sliding() {
    let file = || ModelFile::builtin().unwrap();
    for device in executors() {
        let options = LoadOptions { context_length: Some(128), exact: true, ..LoadOptions::default() };
        let model = Model::from_file(&device, file(), options).unwrap();
        let slides = |options| GenerateOptions { context_policy: ContextPolicy::Slide, ..options };
        let penalised = GenerateOptions { presence_penalty: 0.3, ..greedy(170) };
        let requests = [
            (0, Request::new(ids(20, 1, &model), slides(greedy(300)))),
            (3, Request::new(ids(300, 2, &model), slides(greedy(90)))),
            (5, Request::new(ids(90, 3, &model), slides(penalised))),
            (9, Request::new(ids(100, 4, &model), greedy(200))),
        ];
        let options = EngineOptions { max_sequences: 3, ..EngineOptions::default() };
        let (texts, engine) = together(&model, &options, &requests);
        for (i, (text, (_, request))) in texts.iter().zip(&requests).enumerate() {
            let (alone, _) = together(&model, &options, &[(0, request.clone())]);
            assert_eq!(text.pieces, alone[0].pieces, "text {i} on {}", device.info().name);
            let mut session = model.session().unwrap();
            let options = GenerateOptions { logprobs: None, ..request.options.clone() };
            let of_session = common::collect(&mut session.generate_ids(&request.ids, &options).unwrap()).0;
            assert_eq!(text.ids(), of_session, "text {i} on {}", device.info().name);
        }
        let lengths: Vec<_> = texts.iter().map(|text| (text.pieces.len(), text.reason)).collect();
        let [full, most] = [StopReason::ContextFull, StopReason::MaxTokens].map(Some);
        assert_eq!(lengths, [(300, most), (90, most), (170, most), (29, full)]);
        let stats = engine.stats();
        assert_eq!((stats.n_free_pages + stats.n_kept_pages, stats.n_finished), (stats.n_pages, 4));
    }
}

/// Disk offload: completions with layers or experts read from the file in each pass equal those of the whole model.
#[test]
fn offloaded_layers_give_equal_engine_output() {
    for device in executors() {
        let builtin = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories.gguf");
        let of = |name: &str| find_data(&Path::new("tiny-random").join(name)).expect("the model is in the repository");
        let mut n_streamed = 0;
        for path in common::drawn_on(&device, 2, [builtin, of("qwen3"), of("qwen3-moe"), of("gpt-oss")]) {
            let load = |memory_limit| {
                let options = LoadOptions {
                    memory_limit,
                    stream_layers: true,
                    context_length: Some(256),
                    ..LoadOptions::default()
                };
                Model::load(&device, &path, options)
            };
            let whole = load(None).unwrap();
            let options = EngineOptions { max_sequences: 4, ..EngineOptions::default() };
            let requests: Vec<(usize, Request)> = prompts(&whole, 5, 7)
                .into_iter()
                .enumerate()
                .map(|(i, ids)| (i, Request::new(ids, greedy(5 + i))))
                .collect();
            let (want, engine) = together(&whole, &options, &requests);
            assert!(whole.streaming().is_none());
            let needed_bytes = engine.plan().total_bytes();
            let fits = |model: &Model| Engine::new(model, &options).is_ok();
            let smaller = (1..20).rev().filter_map(|part| load(Some(needed_bytes * part / 20)).ok());
            let Some(model) = smaller.filter(|model| model.streaming().is_some()).find(fits) else {
                println!("{}: slots and a cache would take as much as they save", path.display());
                continue;
            };
            let (got, engine) = together(&model, &options, &requests);
            assert_eq!(got, want, "{} on {}", path.display(), device.info().name);
            let streaming = model.streaming().unwrap();
            assert!(streaming.read_bytes > 0 && engine.plan().total_bytes() < needed_bytes, "{streaming:?}");
            n_streamed += 1;
        }
        assert!(n_streamed > 0 || device.is_gpu(), "no model has layers in the file on {}", device.info().name);
    }
}

/// The same for models whose table rows are read per token.
#[test]
fn fetched_embedding_rows_give_equal_engine_output() {
    let path = find_data(Path::new("tiny-random/gemma4/model-bf16.gguf")).expect("the model is in the repository");
    for device in executors() {
        let load = |stream_rows| {
            let options = LoadOptions { stream_rows, context_length: Some(256), ..LoadOptions::default() };
            Model::load(&device, &path, options).unwrap()
        };
        let whole = load(false);
        let requests: Vec<(usize, Request)> = prompts(&whole, 5, 8)
            .into_iter()
            .enumerate()
            .map(|(i, ids)| (i, Request::new(ids, greedy(5 + i))))
            .collect();
        let options = EngineOptions { max_sequences: 3, ..EngineOptions::default() };
        let (want, _) = together(&whole, &options, &requests);
        let model = load(true);
        let (got, _) = together(&model, &options, &requests);
        let streaming = model.streaming().unwrap();
        assert!(streaming.tables_bytes > 0 && streaming.n_rows_read > 0, "{streaming:?}");
        assert_eq!(got, want, "{}", device.info().name);
    }
}

/// A completion ends at the end of the context, and one limited to no tokens ends at once.
#[test]
fn sequence_ends_when_the_context_is_full() {
    let model = builtin(&common::cpu());
    let n = model.context_length() as usize - 3;
    let requests = [(0, Request::new(ids(n, 1, &model), greedy(100))), (0, Request::new(vec![1], greedy(0)))];
    let (texts, _) = together(&model, &EngineOptions::default(), &requests);
    assert_eq!((texts[0].pieces.len(), texts[0].reason), (4, Some(StopReason::ContextFull)));
    assert_eq!((texts[1].pieces.len(), texts[1].reason), (0, Some(StopReason::MaxTokens)));
}

/// A pass over one sequence has no more dispatches than a session's; one over 8 has as many, and one submission.
#[test]
fn batch_takes_the_dispatches_of_one_sequence() {
    for device in common::executors() {
        let model = builtin(&device);
        let of_session = model.session().unwrap().decode_dispatches() as u64;
        let options = EngineOptions { max_sequences: 8, ..EngineOptions::default() };
        for n in [1, 8] {
            let (engine, mut driver) = Engine::new(&model, &options).unwrap();
            // A prompt's only token is computed in a pass over rows.
            let request = || Request::new(vec![1], GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(20) });
            let mut texts = || {
                let _streams: Vec<Stream> = (0..n).map(|_| engine.submit(request()).unwrap()).collect();
                while block_on(driver.step()).unwrap() {}
            };
            // Warm-up.
            texts();
            let (before, passes_before) = (device.counters(), engine.stats());
            texts();
            let (counters, stats) = (device.counters() - before, engine.stats());
            let n_passes = stats.n_decode_passes - passes_before.n_decode_passes;
            let info = device.info();
            println!("{n} on {}: {counters:?} of {n_passes} passes, {of_session} of a session", info.name);
            assert!(counters.dispatches <= of_session * n_passes, "{n} on {}", info.name);
            assert_eq!((counters.buffers_created, counters.bind_groups_created), (0, 0), "{n} on {}", info.name);
            assert!(counters.submits <= n_passes, "{n} on {}: {}", info.name, counters.submits);
        }
    }
}

/// After a device loss the model is reloaded and every completion continues with the same tokens.
#[test]
fn sequences_resume_with_equal_tokens_after_device_loss() {
    let open = || block_on(Device::open(&DeviceChoice::Gpu, None));
    let Some(device) = common::gpu_from(open()) else { return };
    let requests: Vec<Request> = [5, 90, 40]
        .into_iter()
        .map(|n| {
            let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(12) };
            Request::new(vec![1; n], options)
        })
        .collect();
    let mut recovery = Recovery::new(open, Model::builtin, |_| ());
    let model = recovery.load(&device).unwrap();
    let whole: Vec<Vec<u32>> = requests
        .iter()
        .map(|request| together(&model, &EngineOptions::default(), &[(0, request.clone())]).0[0].ids())
        .collect();
    let (engine, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
    let streams: Vec<Stream> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    for _ in 0..5 {
        block_on(driver.step()).unwrap();
    }
    device.destroy();
    engine.close();
    let of_lost = device.counters();
    block_on(driver.run_with(&mut recovery));
    let counters = engine.devices()[0].counters;
    assert!(counters.dispatches > of_lost.dispatches, "dispatches of both devices: {counters:?}, {of_lost:?}");
    for (stream, whole) in streams.into_iter().zip(&whole) {
        assert_eq!(collect(stream).unwrap().ids(), *whole);
    }
    assert_eq!(engine.stats().n_failed, 0);
}

/// The same if the lost device only computes the first layers.
#[test]
fn sequences_resume_after_losing_one_of_two_devices() {
    let open = || block_on(Device::open(&DeviceChoice::Gpu, None));
    let Some(device) = common::gpu_from(open()) else { return };
    let first = Cell::new(None);
    let load = |device: &Device| {
        let opened = open()?;
        let options = LoadOptions { layers_on: layers_on(&[(&opened, 2)]), ..LoadOptions::default() };
        first.set(Some(opened));
        Model::from_file(device, ModelFile::builtin()?, options)
    };
    let mut recovery = Recovery::new(open, load, |_| ());
    let model = recovery.load(&device).unwrap();
    let requests: Vec<Request> = [5, 90, 40].map(|n| Request::new(vec![1; n], greedy(12))).into();
    let alone = |request: &Request| together(&model, &EngineOptions::default(), &[(0, request.clone())]).0.remove(0);
    let whole: Vec<Text> = requests.iter().map(alone).collect();
    let (engine, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
    let streams: Vec<Stream> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    for _ in 0..5 {
        block_on(driver.step()).unwrap();
    }
    first.take().unwrap().destroy();
    engine.close();
    block_on(driver.run_with(&mut recovery));
    for (stream, whole) in streams.into_iter().zip(&whole) {
        assert_eq!(collect(stream).unwrap().ids(), whole.ids());
    }
    let stats = engine.stats();
    assert_eq!((stats.n_failed, stats.n_recoveries), (0, 1));
    assert!(first.take().is_some_and(|device| device.counters().dispatches > 0), "the device was reopened and used");
}

/// Requests of 5 pages each, the first 4 in common, and their completions when run alone.
fn sharing(model: &Model, n: usize) -> Vec<(Request, Vec<u32>)> {
    let common = ids(4 * 64, 1, model);
    let options = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
    let request = |i: usize| {
        let greedy = GenerateOptions { logprobs: None, ..greedy(25 + i) };
        Request::new([&common[..], &ids(9 + i, 2 + i as u64, model)].concat(), greedy)
    };
    let alone = |request: Request| (request.clone(), together(model, &options, &[(0, request)]).0[0].ids());
    (0..n).map(|i| alone(request(i))).collect()
}

/// Completions that share pages need more pages than available when recomputed separately after a device loss: those
/// without pages wait, then continue with the same tokens on pages computed for the first.
#[test]
fn page_sharing_sequences_resume_after_loss_with_few_pages() {
    let open = || block_on(Device::open(&DeviceChoice::Gpu, None));
    let Some(device) = common::gpu_from(open()) else { return };
    let load = |device: &Device| {
        let options = LoadOptions { context_length: Some(5 * 64), ..LoadOptions::default() };
        Model::from_file(device, ModelFile::builtin()?, options)
    };
    let mut recovery = Recovery::new(open, load, |_| ());
    let model = recovery.load(&device).unwrap();
    let requests = sharing(&model, 3);
    let options = EngineOptions { cache_tokens: Some(7 * 64), ..EngineOptions::default() };
    let (engine, mut driver) = Engine::new(&model, &options).unwrap();
    let mut streams = Vec::new();
    for (request, _) in &requests {
        streams.push(engine.submit(request.clone()).unwrap());
        for _ in 0..4 {
            block_on(driver.step()).unwrap();
        }
    }
    let stats = engine.stats();
    assert_eq!((stats.n_running, stats.n_pages), (3, 7), "{stats:?}");
    device.destroy();
    engine.close();
    block_on(driver.run_with(&mut recovery));
    for (i, (stream, (_, alone))) in streams.into_iter().zip(&requests).enumerate() {
        let text = collect(stream).unwrap_or_else(|error| panic!("text {i}: {error}"));
        assert_eq!((text.ids(), text.reason), (alone.clone(), Some(StopReason::MaxTokens)), "text {i}");
    }
    let stats = engine.stats();
    assert_eq!((stats.n_failed, stats.n_finished, stats.n_recoveries), (0, 3, 1));
    assert_eq!(stats.n_free_pages + stats.n_kept_pages, stats.n_pages, "all pages are free");
}

/// The same with RoPE angles that depend on length: each is recomputed when its own length requires it, while others
/// still hold the common pages.
#[test]
fn page_sharing_sequences_switch_angles_with_few_pages() {
    let from = find_data(Path::new("tiny-random/phi3-longrope")).expect("the model is in the repository");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("longrope-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(from.join("model.safetensors"), folder.join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    let changed = config
        .replace("\"original_max_position_embeddings\": 32", "\"original_max_position_embeddings\": 100")
        .replace("\"max_position_embeddings\": 128", "\"max_position_embeddings\": 192");
    assert_ne!(config, changed);
    std::fs::write(folder.join("config.json"), changed).unwrap();
    let model = Model::load(&common::cpu(), &folder, LoadOptions::default()).unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    assert_eq!(model.context_length(), 192);

    let common = ids(70, 1, &model);
    let requests: Vec<(usize, Request)> = (0..3)
        .map(|i| (4 * i, Request::new([&common[..], &ids(5, 2 + i as u64, &model)].concat(), greedy(60))))
        .collect();
    let without = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
    let alone: Vec<Text> =
        requests.iter().map(|(_, request)| together(&model, &without, &[(0, request.clone())]).0.remove(0)).collect();
    // Three pages each, the first one common to all.
    for n_pages in [5, 7] {
        let options = EngineOptions { cache_tokens: Some(n_pages * 64), ..EngineOptions::default() };
        let (texts, engine) = together(&model, &options, &requests);
        for (i, (text, alone)) in texts.iter().zip(&alone).enumerate() {
            assert_eq!((&text.pieces, text.reason), (&alone.pieces, alone.reason), "text {i} with {n_pages} pages");
        }
        let stats = engine.stats();
        assert_eq!((stats.n_failed, stats.n_finished, stats.n_queued), (0, 3, 0), "{n_pages} pages");
        assert_eq!(stats.n_free_pages + stats.n_kept_pages, stats.n_pages, "{n_pages} pages");
        assert!(texts[1].usage.cached_tokens == 64, "{n_pages} pages: {:?}", texts[1].usage);
    }
}

/// Without a way to reload the model, every completion and the engine end with an error.
#[test]
fn device_loss_without_reload_fails_all_requests() {
    let Some(device) = common::gpu_from(block_on(Device::open(&DeviceChoice::Gpu, None))) else { return };
    let model = builtin(&device);
    let (engine, mut driver) = Engine::new(&model, &EngineOptions::default()).unwrap();
    let streams: Vec<Stream> =
        (0..3).map(|i| engine.submit(Request::new(vec![1, 5 + i], greedy(50))).unwrap()).collect();
    for _ in 0..4 {
        block_on(driver.step()).unwrap();
    }
    device.destroy();
    assert!(block_on(driver.step()).is_err());
    for stream in streams {
        assert!(collect(stream).is_err());
    }
    let stats = engine.stats();
    assert_eq!((stats.n_failed, stats.n_running, stats.n_free_pages), (3, 0, stats.n_pages));
}

/// If the driver is gone, all waiters get an error: a running completion, a queued one, and a late one.
#[test]
fn dropped_driver_ends_all_waiting_streams() {
    let model = builtin(&common::cpu());
    let options = EngineOptions { max_sequences: 1, ..EngineOptions::default() };
    let (engine, mut driver) = Engine::new(&model, &options).unwrap();
    let request = || Request::new(vec![1, 5], greedy(50));
    let mut running = engine.submit(request()).unwrap();
    block_on(driver.step()).unwrap();
    let mut waiting = engine.submit(request()).unwrap();
    drop(driver);
    // The next item, if it is ready.
    let next = |stream: &mut Stream| {
        let mut next = std::pin::pin!(stream.next());
        match next.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
            std::task::Poll::Ready(next) => next,
            std::task::Poll::Pending => panic!("waits for ever"),
        }
    };
    while let Some(Ok(_)) = next(&mut running) {}
    assert_eq!(running.stop_reason(), None, "no stop reason");
    assert_eq!(next(&mut waiting).map(|piece| piece.unwrap_err().code()), Some("stopped"));
    assert!(next(&mut waiting).is_none());
    assert_eq!(engine.submit(request()).err().map(|error| error.code()), Some("stopped"));
    let stats = engine.stats();
    assert_eq!((stats.n_failed, stats.n_running, stats.n_queued), (2, 0, 0));
}

/// Two devices sharing one queue: each completion equals that of one device alone, both devices do work, and no request
/// is lost. The device with more free places takes a request.
#[test]
fn two_devices_serve_one_queue() {
    let devices = executors();
    let [cpu, gpu] = &devices[..] else { return };
    let models = [builtin(cpu), builtin(gpu)];
    let options = EngineOptions { max_sequences: 2, max_queued: 64, prefix_cache: false, ..EngineOptions::default() };
    let requests: Vec<Request> =
        prompts(&models[0], 10, 5).into_iter().map(|ids| Request::new(ids, greedy(5))).collect();
    let alone: Vec<[Text; 2]> = requests
        .iter()
        .map(|request| [0, 1].map(|i| together(&models[i], &options, &[(0, request.clone())]).0.remove(0)))
        .collect();
    let (engine, mut drivers) = Engine::over(&models, &options).unwrap();
    let streams: Vec<Stream> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let running = |engine: &Engine| engine.devices().iter().map(|device| device.stats.n_running).collect::<Vec<_>>();
    // The first fills no more places than the second.
    block_on(drivers[0].step()).unwrap();
    assert_eq!(running(&engine), [1, 0]);
    block_on(drivers[1].step()).unwrap();
    block_on(drivers[0].step()).unwrap();
    block_on(drivers[1].step()).unwrap();
    assert_eq!(running(&engine), [2, 2]);
    while drivers.iter_mut().map(|driver| block_on(driver.step()).unwrap()).fold(false, |any, is_busy| any | is_busy) {}
    for (i, (stream, alone)) in streams.into_iter().zip(&alone).enumerate() {
        assert_eq!(alone[0].ids(), alone[1].ids(), "text {i} on both");
        let text = collect(stream).unwrap();
        assert!(alone.contains(&text), "text {i}");
    }
    let stats = engine.stats();
    assert_eq!((stats.n_submitted, stats.n_finished, stats.n_failed), (10, 10, 0));
    let each = engine.devices();
    assert!(each.iter().all(|device| device.stats.n_finished > 1), "{each:?}");
    assert_eq!([&each[0].device, &each[1].device], [cpu, gpu].map(|device| &device.info().name));
    // After a device is gone, the other one takes the queued requests.
    let last = engine.submit(requests[0].clone()).unwrap();
    drop(drivers.remove(0));
    while block_on(drivers[0].step()).unwrap() {}
    assert_eq!(collect(last).unwrap(), alone[0][1]);
    // All devices must have the same model.
    let others = [models[0].clone(), tiny(gpu, "qwen2")];
    assert!(matches!(Engine::over(&others, &options).err(), Some(Error::Operand { operand: "models", .. })));
}

/// A model's vocabulary may be padded beyond its tokenizer's. Tokens in the padding have no text and end nothing.
#[test]
fn padded_vocabulary_ids_have_no_text() {
    const KNOWN: u32 = 256;
    let sizes =
        Sizes { dim: 64, ffn_dim: 128, n_layers: 1, n_heads: 2, n_kv_heads: 1, vocab_size: 300, context_length: 512 };
    let mut rng = Rng::new(5);
    let copier = Copier::new(env!("CARGO_TARGET_TMPDIR").as_ref(), sizes, || rng.word());
    let vocab: serde_json::Map<String, serde_json::Value> =
        (0..KNOWN).map(|id| (format!("t{id}"), id.into())).collect();
    let byte_level = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    });
    let tokenizer = serde_json::json!({
        "added_tokens": [], "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level, "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    std::fs::write(copier.folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let model = Model::load(&common::cpu(), &copier.folder, LoadOptions::default()).unwrap();
    assert_eq!(model.tokenizer().unwrap().vocab_size(), KNOWN as usize);

    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(100) };
    let (texts, _) =
        together(&model, &EngineOptions::default(), &[(0, Request::new(copier.passage(0, 50), options.clone()))]);
    assert_eq!(texts[0].ids(), copier.passage(50, 100));
    let of_engine: Vec<String> = texts[0].pieces.iter().map(|piece| piece.text.clone()).collect();
    let want = |id: u32| if id < KNOWN { format!("t{id}") } else { String::new() };
    assert_eq!(of_engine, copier.passage(50, 100).into_iter().map(want).collect::<Vec<_>>());
    assert!(of_engine.iter().any(String::is_empty));
    let mut session = model.session().unwrap();
    let (ids, text, _) = common::collect(&mut session.generate_ids(&copier.passage(0, 50), &options).unwrap());
    assert_eq!((ids, text), (copier.passage(50, 100), of_engine.concat()));
}
