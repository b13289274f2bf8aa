//! Expert cache: mixtures of experts with some experts on the device and the others read from the file when chosen.
//! Logits are bit-identical to the whole model's for any cache size.

use std::path::Path;

use tilewright::generate::Streaming;
use tilewright::{Device, Error, GenerateOptions, LoadOptions, Model, Session};

use super::Folder;
use super::checkpoint::checkpoint;
use super::common::{self, block_on, shared};
use super::plan::Shape;

/// Eight layers: buffers for two whole layers, used by passes of many tokens, leave room for some experts of each.
const MIXTURE: Shape = Shape {
    layers: 8,
    dim: 64,
    heads: 2,
    kv_heads: 1,
    head_dim: 32,
    experts: 32,
    used: 2,
    shared: 0,
    ffn_dim: 32,
    vocab: 256,
};

fn options(max_pass: u32) -> LoadOptions<'static> {
    LoadOptions { context_length: Some(64), max_pass: Some(max_pass), stream_layers: true, ..LoadOptions::default() }
}

/// The model with a memory limit in per cent of its need, if possible.
fn limited(
    device: &Device,
    path: &Path,
    options: LoadOptions<'_>,
    needed_bytes: u64,
    hundredths: u64,
) -> Option<Model> {
    let memory_limit = Some(needed_bytes * hundredths / 100);
    match Model::load(device, path, LoadOptions { memory_limit, ..options }) {
        Ok(model) => {
            assert!(Some(model.plan().total_bytes()) <= memory_limit, "{:?} in {memory_limit:?}", model.plan());
            Some(model)
        }
        Err(Error::Memory { .. }) => None,
        Err(Error::InFile { source, .. }) if matches!(*source, Error::Memory { .. }) => None,
        Err(error) => panic!("{path:?}: {error}"),
    }
}

/// Logits of a prompt of several passes, and greedy tokens after it.
fn told(session: &mut Session, n_tokens: usize) -> (Vec<f32>, Vec<u32>) {
    let vocab_size = session.model().config().vocab_size;
    let ids: Vec<u32> = (0..21).map(|i| (i * i + 7 * i + 3) % vocab_size).collect();
    let logits = block_on(session.logits(&ids)).unwrap();
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(n_tokens) };
    let (tokens, ..) = common::collect(&mut session.generate_ids(&[5, 6], &options).unwrap());
    (logits, tokens)
}

/// Compares a model with an expert cache against the whole one.
fn check(whole: &Model, model: &Model, n_tokens: usize, what: &str) -> Streaming {
    let want = told(&mut whole.session().unwrap(), n_tokens);
    let mut session = model.session().unwrap();
    assert!(told(&mut session, n_tokens) == want, "{what}");
    // Again, with other experts cached.
    session.clear();
    assert!(told(&mut session, n_tokens) == want, "{what}, the second time");
    model.streaming().unwrap()
}

#[test]
fn experts_loaded_on_demand_give_bit_equal_logits() {
    let folder = Folder::new();
    let path = MIXTURE.write_random(&folder);
    for device in shared::executors() {
        let name = &device.info().name;
        let whole = Model::load(&device, &path, options(8)).unwrap();
        assert!(whole.streaming().is_none(), "{:?}", whole.streaming());
        let needed = whole.plan().total_bytes();
        let mut slots = Vec::new();
        for hundredths in [85, 55, 45] {
            let Some(model) = limited(&device, &path, options(8), needed, hundredths) else { continue };
            let before = model.streaming().unwrap();
            let kept = before.experts.expect("an expert cache");
            assert_eq!((before.n_layers, before.n_streamed, kept.n_experts), (8, 8, 8 * 32));
            let after = check(&whole, &model, 30, &format!("{hundredths} % on {name}"));
            let experts = after.experts.unwrap();
            let (n_slots, n_layers) = (kept.n_kept / 8, 8);
            // Each prompt is three passes; the next two tokens, with the first choice, one more; then one pass per
            // token. Idle rows choose nothing.
            let (n_wide, rows) = if 8 * 2 <= n_slots { (0, 21 + 2 + 29) } else { (4, 29) };
            assert_eq!(experts.n_chosen, 2 * rows * 2 * n_layers, "{experts:?}");
            assert_eq!(after.n_read as usize / 8, if n_wide == 0 { 0 } else { 2 * n_wide }, "{after:?}");
            assert!(experts.n_found + experts.n_read <= experts.n_chosen, "{experts:?}");
            assert!(experts.n_found > 0 && experts.n_read > 0, "{experts:?}");
            if n_wide > 0 {
                // One token at a time: every miss is read.
                assert_eq!(experts.n_found + experts.n_read, experts.n_chosen);
                let whole_layers = LoadOptions { whole_layers: true, ..options(8) };
                let by_layers = limited(&device, &path, whole_layers, needed, hundredths).unwrap();
                let by_layers = by_layers.streaming().unwrap();
                assert!(by_layers.experts.is_none());
                let of_token = experts.read_bytes / (2 * rows);
                println!("{hundredths} % on {name}: {of_token} bytes a token, {} a pass", by_layers.streamed_bytes);
                assert!(of_token * 5 < by_layers.streamed_bytes, "{of_token} of {}", by_layers.streamed_bytes);
                // Passes of many tokens need not read cached experts.
                let of_layers = after.read_bytes - experts.read_bytes;
                assert!(of_layers < after.n_read * after.streamed_bytes / 8, "{of_layers} in {} layers", after.n_read);
            }
            let of_expert = after.streamed_bytes / kept.n_experts as u64;
            assert_eq!(experts.read_bytes, experts.n_read * of_expert);
            println!("{hundredths} % on {name}: {n_slots} of 32, {:.2} found", after.hit_rate());
            slots.push(n_slots);
        }
        assert!(slots.len() >= 2 && slots[0] >= 16 && slots[1] < 16, "{slots:?}");
    }
}

/// Shared experts stay on the device, and are copied into the buffers of passes of many tokens.
#[test]
fn shared_experts_stay_on_the_device() {
    let folder = Folder::new();
    let path = Shape { shared: 64, ..MIXTURE }.write_random(&folder);
    for device in common::executors() {
        let whole = Model::load(&device, &path, options(8)).unwrap();
        let before = device.counters();
        let model = limited(&device, &path, options(8), whole.plan().total_bytes(), 55).unwrap();
        told(&mut model.session().unwrap(), 5);
        if !device.is_gpu() {
            // The pool and the self-test have their own sizes.
            let (allocated, planned) = ((device.counters() - before).bytes_allocated, model.plan().total_bytes());
            let off = allocated as f64 / planned as f64 - 1.0;
            println!("{allocated} bytes allocated, {planned} planned ({:.2} % more)", 100.0 * off);
            assert!(off.abs() <= 0.02, "{allocated} bytes allocated, {planned} planned");
        }
        let before = model.streaming().unwrap().experts.unwrap().n_chosen;
        let after = check(&whole, &model, 12, &device.info().name);
        let experts = after.experts.unwrap();
        assert!(after.n_read >= 8 * 4 && experts.n_kept < 16 * 8, "{after:?}");
        // Two choices per token.
        assert_eq!(experts.n_chosen - before, 2 * 11 * 8 * 2, "{experts:?}");
        // Draft tokens are verified in passes of eight rows.
        let prompt: Vec<u32> = (0..16).map(|i| i % 4).collect();
        let texts = [(&whole, 0), (&model, 4)].map(|(model, prompt_lookup)| {
            let options = GenerateOptions { ignore_eos: true, prompt_lookup, ..GenerateOptions::greedy(12) };
            let mut session = model.session().unwrap();
            let mut generation = session.generate_ids(&prompt, &options).unwrap();
            let (tokens, ..) = common::collect(&mut generation);
            assert_eq!(generation.speculation().drafted > 0, prompt_lookup > 0);
            tokens
        });
        assert_eq!(texts[0], texts[1]);
        // Both are the same model: a session of one continues in the other.
        let mut session = model.session().unwrap();
        let kept = told(&mut session, 5);
        let saved = folder.0.join("session");
        block_on(session.save(&saved, "")).unwrap();
        let mut reopened = whole.session().unwrap();
        reopened.load(&saved).unwrap();
        assert_eq!(reopened.tokens(), session.tokens());
        assert_eq!(told(&mut whole.session().unwrap(), 5), kept);
    }
}

/// Experts of different types cannot share slots.
#[test]
fn experts_of_mixed_types_are_read_with_their_layers() {
    let Some(plain) = checkpoint("lfm2-moe") else { return };
    let mut mixed = plain.clone();
    assert!(mixed.widen(&["experts.1.w3"]) > 0);
    for (folder, kept) in [(plain.write(), true), (mixed.write(), false)] {
        let device = common::cpu();
        let whole = Model::load(&device, &folder.0, options(1)).unwrap();
        let needed = whole.plan().total_bytes();
        let models = (1..20).rev().filter_map(|part| limited(&device, &folder.0, options(1), needed, 5 * part));
        let streaming: Vec<Streaming> = models.filter_map(|model| model.streaming()).collect();
        assert!(!streaming.is_empty());
        assert_eq!(streaming.iter().any(|it| it.experts.is_some()), kept, "{streaming:?}");
    }
}

/// Experts in all kinds of files: in one tensor or several, with biases, beside shared experts.
#[test]
fn every_moe_model_is_bit_equal_with_offloaded_experts() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    let mut n_compared = 0;
    for device in shared::executors() {
        for (folder, max_pass) in [
            ("mixtral", 1),
            ("qwen3-moe", 1),
            ("olmoe", 1),
            ("gpt-oss", 1),
            ("gpt-oss/model-mxfp4.gguf", 1),
            ("qwen35-moe", 1),
            ("lfm2-moe", 1),
            ("granite-moe", 1),
        ] {
            // Every model on the CPU; one of each kind of file on a software adapter.
            if device.is_gpu() && !common::is_full() && !["gpt-oss", "qwen35-moe"].contains(&folder) {
                continue;
            }
            let path = data.join("tiny-random").join(folder);
            let whole = Model::load(&device, &path, options(max_pass)).unwrap();
            let needed = whole.plan().total_bytes();
            let kept = |part: u64| {
                let model = limited(&device, &path, options(max_pass), needed, 4 * part)?;
                model.streaming()?.experts.map(|_| model)
            };
            // Near the maximum number of slots, and with the minimum.
            let models = [(10..25).rev().find_map(kept), (8..25).find_map(kept)];
            assert!(models.iter().all(Option::is_some), "{folder} with passes of {max_pass}");
            for model in models.into_iter().flatten() {
                let what = format!("{folder} with passes of {max_pass} on {}", device.info().name);
                let experts = check(&whole, &model, 12, &what).experts.unwrap();
                assert!(experts.n_read > 0 && experts.n_kept < experts.n_experts, "{what}: {experts:?}");
                n_compared += 1;
            }
        }
    }
    println!("{n_compared} compared");
}
