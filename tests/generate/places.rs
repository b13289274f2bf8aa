//! Models with layers off the device: offloaded to disk, or computed by other devices.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::task::{Context, Waker};

use tilewright::generate::DeviceLayers;
use tilewright::kernels::KvType;
use tilewright::load::ModelFile;
use tilewright::{Device, Error, GenerateOptions, LoadOptions, Model, Session};

use super::common::shared::executors;
use super::common::{self, block_on, both};
use super::{collect, endless};

/// Models with at least three layers and all kinds of layers.
fn models() -> Vec<PathBuf> {
    let Some(data) = common::data(&["tiny-random"]) else { return Vec::new() };
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(data.join("tiny-random")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    let decodes = |folder: &PathBuf| {
        ModelFile::open(folder).unwrap().header.shape.decoder().is_ok_and(|config| config.n_layers() > 2)
    };
    folders.retain(decodes);
    folders.push(Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories.gguf"));
    folders
}

fn load(device: &Device, path: &Path, options: LoadOptions<'_>) -> Model {
    Model::load(device, path, LoadOptions { context_length: Some(64), max_pass: Some(8), ..options }).unwrap()
}

/// Loads a model with some layers offloaded to disk.
fn streamed(device: &Device, path: &Path, needed_bytes: u64) -> Option<Model> {
    // Lowers the limit until layers are offloaded.
    (1..20).rev().find_map(|part| {
        let memory_limit = Some(needed_bytes * part / 20);
        let options = LoadOptions {
            context_length: Some(64),
            max_pass: Some(8),
            memory_limit,
            stream_layers: true,
            // The expert cache has its own tests.
            whole_layers: true,
            ..LoadOptions::default()
        };
        match Model::load(device, path, options) {
            Ok(model) if model.streaming().is_some_and(|streaming| streaming.n_streamed > 0) => Some(model),
            // Table rows are offloaded before layers.
            Ok(model) if model.streaming().is_some() => None,
            Ok(_) => panic!("{path:?} fits {part}/20 of what it needs"),
            Err(Error::InFile { source, .. }) if matches!(*source, Error::Memory { .. }) => None,
            Err(error) => panic!("{path:?}: {error}"),
        }
    })
}

/// Logits of a prompt of several passes, and greedy tokens after it.
fn told(session: &mut Session) -> (Vec<f32>, Vec<u32>) {
    let vocab_size = session.model().config().vocab_size;
    let ids: Vec<u32> = (0..21).map(|i| (i * i + 7 * i + 3) % vocab_size).collect();
    let logits = block_on(session.logits(&ids)).unwrap();
    let (tokens, ..) = collect(session.generate_ids(&[5, 6], &endless(12)).unwrap());
    (logits, tokens)
}

#[test]
fn offloaded_layers_give_bit_equal_logits() {
    let paths = models();
    let mut n_compared = 0;
    for device in executors() {
        // Every model on the CPU; two of each kind of memory on a software adapter.
        for path in &paths {
            if device.is_gpu()
                && !common::is_full()
                && !["qwen3", "gpt-oss", "stories.gguf"].iter().any(|name| path.ends_with(name))
            {
                continue;
            }
            let whole = load(&device, path, LoadOptions::default());
            assert!(whole.streaming().is_none());
            let want = told(&mut whole.session().unwrap());
            let Some(model) = streamed(&device, path, whole.plan().total_bytes()) else {
                println!("{path:?}: slots would take as much as they save");
                continue;
            };
            let before = model.streaming().unwrap();
            assert!(model.plan().total_bytes() < whole.plan().total_bytes());
            let mut session = model.session().unwrap();
            assert_eq!(told(&mut session), want, "{path:?} on {}", device.info().name);
            // Repeats after passes of another session of the model.
            told(&mut model.session().unwrap());
            session.clear();
            assert_eq!(told(&mut session), want, "{path:?} on {}", device.info().name);
            let after = model.streaming().unwrap();
            // 21 tokens are three passes of eight rows; the next two tokens, with the first choice, one more; then one
            // pass per token. Besides, up to two layers are read ahead.
            let n_passes = 3 * (3 + 1 + 11);
            let n_read = after.n_read as usize;
            let (least, most) = (n_passes * before.n_streamed, n_passes * before.n_streamed + 2);
            assert!((least..=most).contains(&n_read), "{path:?}: {n_read} reads, {least} to {most} expected");
            n_compared += 1;
        }
    }
    println!("{n_compared} models compared");
    assert!(n_compared >= 20, "{n_compared}");
}

/// Sessions that share one thread, and a dropped pass.
#[test]
fn sessions_with_offloaded_layers_take_turns() {
    let device = common::cpu();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories.gguf");
    let whole = load(&device, &path, LoadOptions::default());
    let model = streamed(&device, &path, whole.plan().total_bytes()).expect("slots smaller than layers");
    let ids = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]];
    let want = ids.map(|ids| block_on(whole.session().unwrap().logits(&ids)).unwrap());
    let [mut first, mut second] = [model.session().unwrap(), model.session().unwrap()];
    for _ in 0..3 {
        {
            let mut given_up = pin!(first.logits(&ids[1]));
            let _ = given_up.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
        first.clear();
        second.clear();
        let got = block_on(both(first.logits(&ids[0]), second.logits(&ids[1])));
        assert!(got.map(Result::unwrap) == want);
    }
}

#[test]
fn model_too_large_even_offloaded_is_refused_with_sizes() {
    let device = common::cpu();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories.gguf");
    let options = LoadOptions { memory_limit: Some(1000), stream_layers: true, ..LoadOptions::default() };
    let error = Model::load(&device, &path, options).map(drop).unwrap_err().to_string();
    assert!(error.contains("1000"), "{error}");
}

/// Devices before the model's own, by the option that selects them, with their layers.
type Split<'a> = (Option<u32>, Vec<(&'a Device, u32)>);

fn split_options(split: &Split<'_>) -> LoadOptions<'static> {
    let (gpu_layers, others) = split;
    let layers_on =
        others.iter().map(|&(device, n_layers)| DeviceLayers { device: device.clone(), n_layers }).collect();
    let gpu_layers = *gpu_layers;
    let exact = LoadOptions { kv_type: KvType::F32, exact: true, ..LoadOptions::default() };
    LoadOptions { gpu_layers, layers_on, context_length: Some(64), max_pass: Some(8), ..exact }
}

fn told_of((gpu_layers, others): &Split<'_>) -> String {
    let others: Vec<_> = others.iter().map(|(device, n_layers)| (&device.info().backend, n_layers)).collect();
    format!("{gpu_layers:?} on GPUs, elsewhere {others:?}")
}

/// On several devices, GPUs and the CPU, the tokens equal the CPU's, and the logits agree up to the order of sums.
/// State on several devices can be copied and saved as one.
#[test]
fn layers_on_several_devices_give_equal_tokens() {
    let Some(gpu) = executors().into_iter().find(Device::is_gpu) else { return };
    let Some(other) = common::gpu(None) else { return };
    let cpu = common::cpu();
    let mut n_compared = 0;
    let path = std::env::temp_dir().join(format!("tilewright-split-{}", std::process::id()));
    for name in ["qwen3", "gemma3", "lfm2", "qwen35", "llama3-rope", "gpt-oss", "stories.gguf"] {
        let Some(folder) = models().into_iter().find(|path| path.ends_with(name)) else { continue };
        let whole = load(&cpu, &folder, split_options(&(None, vec![])));
        let (logits, tokens) = told(&mut whole.session().unwrap());
        let n = whole.config().n_layers();
        let splits: [Split<'_>; 6] = [
            (Some(1), vec![]),
            (Some(n / 2), vec![]),
            (Some(n), vec![]),
            (None, vec![(&other, 1)]),
            (Some(n - 1), vec![(&other, n - 2)]),
            (None, vec![(&other, 1), (&cpu, 1)]),
        ];
        for split in splits {
            let context = format!("{name} of {n} layers, {}", told_of(&split));
            let before = cpu.counters().bytes_allocated;
            let model = Model::load(&gpu, &folder, split_options(&split)).unwrap();
            let placement = model.placement().unwrap();
            // The middle one of three devices has its layers and angle tables, and no embedding.
            if let [_, between, _] = &placement[..]
                && !between.device.is_gpu()
            {
                let allocated = cpu.counters().bytes_allocated - before;
                let rope_offset = 4 * 64 * u64::from(model.config().blocks[0].attention.head_dim);
                let most = between.plan.weights_bytes + 2 * rope_offset;
                assert!(allocated <= most, "{context}: {allocated} bytes, {most} at most");
            }
            let of_cpu = n - split.0.unwrap_or(n);
            assert_eq!(placement.len(), usize::from(of_cpu > 0) + split.1.len() + 1, "{context}");
            let ends = placement.iter().scan(0, |end, placed| {
                assert_eq!(placed.layers.start, *end, "{context}");
                *end = placed.layers.end;
                Some(placed.layers.len() as u32)
            });
            let lengths: Vec<u32> = ends.collect();
            let asked = [of_cpu].into_iter().filter(|&n| n > 0).chain(split.1.iter().map(|(_, n_layers)| *n_layers));
            assert!(
                lengths.iter().copied().eq(asked.clone().chain([n - asked.sum::<u32>()])),
                "{context}: {lengths:?}"
            );
            // Only a tied embedding is on two devices.
            let weights: u64 = placement.iter().map(|placed| placed.plan.weights_bytes).sum();
            let most_twice = u64::from(model.config().vocab_size) * u64::from(model.config().dim) * 4;
            let least = whole.plan().weights_bytes;
            assert!(
                (least..=least + most_twice).contains(&weights),
                "{context}: {weights} bytes, {least} in one place"
            );

            let mut session = model.session().unwrap();
            let (split_logits, split_tokens) = told(&mut session);
            let difference = common::largest_difference(&split_logits, &logits);
            assert!(difference < 1e-3, "{context}: logits differ by {difference}");
            assert_eq!(split_tokens, tokens, "{context}");
            // A state saved from several devices can be reopened on one.
            let snapshot = session.snapshot().unwrap();
            block_on(session.save(&path, "")).unwrap();
            let (want, ..) = collect(session.generate_ids(&[9, 8], &endless(5)).unwrap());
            session.restore(&snapshot).unwrap();
            assert_eq!(collect(session.generate_ids(&[9, 8], &endless(5)).unwrap()).0, want, "{context}");
            let mut reopened = whole.session().unwrap();
            reopened.load(&path).unwrap();
            let mut generation = reopened.generate_ids(&[9, 8], &endless(5)).unwrap();
            let first = block_on(generation.next()).unwrap().unwrap();
            assert!(generation.prefill().tokens <= 3, "{context}: {} computed again", generation.prefill().tokens);
            let rest = collect(generation).0;
            assert_eq!([&[first.id][..], &rest].concat(), want, "{context}, reopened");
            n_compared += 1;
        }
    }
    common::assert_tested(&other);
    assert!(other.counters().dispatches > 0);
    let _ = std::fs::remove_file(path);
    println!("{n_compared} compared");
    assert!(n_compared >= 30, "{n_compared}");
}

/// A device with no layers or all of them, and models that cannot be split.
#[test]
fn impossible_layer_splits_are_refused() {
    let Some(gpu) = executors().into_iter().find(Device::is_gpu) else { return };
    let cpu = common::cpu();
    let refused = |name: &str, split: Split<'_>| {
        let folder = models().into_iter().find(|path| path.ends_with(name)).expect("the model is in the repository");
        Model::load(&gpu, &folder, split_options(&split)).map(drop).unwrap_err().to_string()
    };
    let n = load(&cpu, &models().pop().unwrap(), LoadOptions::default()).config().n_layers();
    for (split, words) in [
        ((Some(0), vec![]), ["gpu_layers", "1 to"]),
        ((None, vec![(&cpu, 0)]), ["layers_on", "1 to"]),
        ((None, vec![(&cpu, n)]), ["layers_on", &format!("1 to {} of the {n} layers on CPU", n - 1)]),
        ((Some(1), vec![(&cpu, 1)]), ["layers_on", "fewer devices"]),
        ((None, vec![(&cpu, 1), (&cpu, u32::MAX)]), ["layers_on", "1 to"]),
    ] {
        let error = refused("stories.gguf", split.clone());
        assert!(words.iter().all(|word| error.contains(word)), "{}: {error}", told_of(&split));
    }
    for (split, option) in [((Some(1), vec![]), "gpu_layers"), ((None, vec![(&cpu, 1)]), "layers_on")] {
        let error = refused("gemma4", split);
        assert!(error.contains(option) && error.contains("embedding"), "{error}");
    }
}

/// Draft tokens are verified on both devices.
#[test]
fn draft_tokens_do_not_change_output_of_offloaded_layers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories.gguf");
    for device in executors() {
        let whole = load(&device, &path, LoadOptions::default());
        let (want, ..) = collect(whole.session().unwrap().generate_ids(&[1, 9, 9, 9], &endless(30)).unwrap());
        let gpu_layers = LoadOptions { gpu_layers: Some(2), ..LoadOptions::default() };
        let models = [streamed(&device, &path, whole.plan().total_bytes()), Some(load(&device, &path, gpu_layers))];
        for model in models.into_iter().flatten() {
            let options = GenerateOptions { prompt_lookup: 4, ..endless(30) };
            let mut session = model.session().unwrap();
            let mut generation = session.generate_ids(&[1, 9, 9, 9], &options).unwrap();
            let (got, ..) = common::collect(&mut generation);
            assert!(generation.speculation().drafted > 0);
            assert_eq!(got, want);
        }
    }
}

/// If no context fits with all layers, a shorter one may fit with disk offload.
#[test]
fn longest_context_that_fits_offloaded_is_chosen() {
    let device = common::cpu();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/stories.gguf");
    let short = LoadOptions { context_length: Some(64), ..LoadOptions::default() };
    let needed_bytes = Model::load(&device, &path, short).unwrap().plan().total_bytes();
    let fitted = |part: u64| {
        let memory_limit = Some(needed_bytes * part / 20);
        let options = LoadOptions { fit_context: true, memory_limit, stream_layers: true, ..LoadOptions::default() };
        Model::load(&device, &path, options)
    };
    let model = (10..20).rev().find_map(|part| fitted(part).ok()).expect("slots smaller than layers");
    assert!(model.streaming().is_some());
    assert!(model.context_length() < model.config().max_seq_len, "{}", model.context_length());
    assert!(fitted(1).is_err());
}
