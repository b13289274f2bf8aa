//! Speculative decoding by prompt lookup and draft models: the same output in fewer passes.

use std::path::Path;

use tilewright::generate::{ContextPolicy, Speculation, StopReason};
use tilewright::kernels::KvType;
use tilewright::{Device, Error, GenerateOptions, LoadOptions, Model};

use super::common::copier::{Copier, Sizes};
use super::common::shared::executors;
use super::common::{self, Rng, block_on};
use super::{builtin, collect, endless};

/// Openings of stories: like the model's training data, and others.
const OPENINGS: [&str; 10] = [
    "Once upon a time",
    "Lily had a red ball. Tom had a red ball too. Lily",
    "The dog ran. The dog ran. The dog",
    "One day, a little cat",
    "Mia and Ben played in the sun. Mia and Ben played in the",
    "the the the the",
    "\"Look!\" said Tom. \"Look!\" said",
    "There was a big tree. The big tree had a",
    "12 12 12 13",
    "A bird sang. \"I like your song,\" said the fox. The bird sang. \"I like",
];

const SIZES: Sizes =
    Sizes { dim: 128, ffn_dim: 256, n_layers: 2, n_heads: 4, n_kv_heads: 2, vocab_size: 600, context_length: 512 };

/// A model that copies from its prompt. Other seeds have other texts and the same vocabulary.
fn copier(seed: u64) -> Copier {
    let mut rng = Rng::new(seed);
    Copier::new(env!("CARGO_TARGET_TMPDIR").as_ref(), SIZES, || rng.word())
}

fn load(device: &Device, copier: &Copier, options: LoadOptions<'_>) -> Model {
    Model::load(device, &copier.folder, options).unwrap()
}

/// Ids of a generation after `prompt`, and its speculation counters.
fn continued(model: &Model, prompt: &[u32], options: &GenerateOptions) -> (Vec<u32>, Speculation) {
    let mut session = model.session().unwrap();
    let mut generation = session.generate_ids(prompt, options).unwrap();
    let mut ids = Vec::new();
    while let Some(piece) = block_on(generation.next()) {
        ids.push(piece.unwrap().id);
    }
    (ids, generation.speculation())
}

fn looking_up(n: u32, options: GenerateOptions) -> GenerateOptions {
    GenerateOptions { prompt_lookup: n, ..options }
}

/// Ids, text and stop reason of a generation, and its speculation counters.
fn run(model: &Model, prompt: &str, options: &GenerateOptions) -> ((Vec<u32>, String, StopReason), Speculation) {
    let mut session = model.session().unwrap();
    let mut generation = session.generate(prompt, options).unwrap();
    (common::collect(&mut generation), generation.speculation())
}

#[test]
fn prompt_lookup_does_not_change_greedy_output() {
    for device in executors() {
        // A software GPU is a hundred times slower.
        let (n_tokens, guesses) = if device.is_gpu() { (48, vec![7]) } else { (280, vec![7, 2]) };
        let model = builtin(&device, None);
        let (mut total, mut all) = (0, Speculation::default());
        for opening in OPENINGS {
            let (want, none) = run(&model, opening, &endless(n_tokens));
            assert_eq!(none, Speculation::default());
            for &n in &guesses {
                let (found, guessed) = run(&model, opening, &looking_up(n, endless(n_tokens)));
                assert_eq!(found, want, "{}: {opening}, {n} at a time", device.info().name);
                assert!(guessed.drafted <= guessed.passes * n as usize, "{guessed:?}");
                total += found.0.len();
                all.drafted += guessed.drafted;
                all.accepted += guessed.accepted;
                all.passes += guessed.passes;
            }
        }
        assert!(total == OPENINGS.len() * n_tokens * guesses.len() && all.accepted > total / 200, "{total}: {all:?}");
        println!(
            "{}: {total} tokens, {} of {} guesses accepted in {} passes, {:.2} tokens a pass",
            device.info().name,
            all.accepted,
            all.drafted,
            all.passes,
            total as f64 / (total - all.accepted) as f64
        );
    }
}

#[test]
fn prompt_lookup_does_not_change_where_output_stops() {
    let opening = OPENINGS[2];
    for device in executors() {
        let model = builtin(&device, None);
        let (text, _) = run(&model, opening, &endless(40));
        // A late stop string, so that draft tokens extend past it.
        let stop = text.1.split_whitespace().last().unwrap().to_owned();
        let slide = GenerateOptions { context_policy: ContextPolicy::Slide, ..endless(60) };
        let cases = [
            (None, GenerateOptions { stop: vec![stop], ..endless(60) }, StopReason::StopText),
            (None, GenerateOptions::greedy(400), StopReason::Eos),
            (None, endless(5), StopReason::MaxTokens),
            (None, endless(1), StopReason::MaxTokens),
            (Some(39), endless(100), StopReason::ContextFull),
            (Some(24), slide, StopReason::MaxTokens),
        ];
        for (context_length, options, reason) in cases {
            let model = builtin(&device, context_length);
            let (want, _) = run(&model, opening, &options);
            let (found, guessed) = run(&model, opening, &looking_up(7, options));
            assert_eq!((&found, found.2), (&want, reason), "{}: {context_length:?}", device.info().name);
            println!("{}: {reason:?} after {} tokens: {guessed:?}", device.info().name, found.0.len());
        }
    }
}

#[test]
fn session_continues_after_an_abandoned_generation() {
    for device in executors() {
        let model = builtin(&device, None);
        let opening = OPENINGS[2];
        let ((want, ..), _) = run(&model, opening, &endless(30));
        for n_kept in 0..20 {
            let mut session = model.session().unwrap();
            let mut generation = session.generate(opening, &looking_up(7, endless(30))).unwrap();
            for &id in &want[..n_kept] {
                assert_eq!(block_on(generation.next()).unwrap().unwrap().id, id);
            }
            // Some verified tokens are not read.
            drop(generation);
            let before = session.snapshot().unwrap();
            let rest = collect(session.generate_ids(&[], &endless(30 - n_kept)).unwrap()).0;
            assert_eq!(rest, want[n_kept..], "{}: after {n_kept} tokens", device.info().name);
            session.restore(&before).unwrap();
            let rest = collect(session.generate_ids(&[], &looking_up(3, endless(30 - n_kept))).unwrap()).0;
            assert_eq!(rest, want[n_kept..], "{}: restored after {n_kept} tokens", device.info().name);
        }
    }
}

#[test]
fn copied_passage_takes_an_eighth_of_the_passes() {
    let copier = copier(1);
    // A passage, filler, and the beginning of the passage.
    let prompt = [copier.passage(0, 100), copier.passage(300, 20), copier.passage(0, 3)].concat();
    for device in common::executors() {
        let model = load(&device, &copier, LoadOptions::default());
        let want = copier.passage(3, 81);
        let mut session = model.session().unwrap();
        for round in 0..2 {
            session.clear();
            let mut generation = session.generate_ids(&prompt, &looking_up(7, endless(81))).unwrap();
            let mut ids = vec![block_on(generation.next()).unwrap().unwrap().id];
            let before = device.counters();
            while let Some(piece) = block_on(generation.next()) {
                ids.push(piece.unwrap().id);
            }
            let did = device.counters() - before;
            assert_eq!(ids, want, "{}", device.info().name);
            let all_right = Speculation { drafted: 70, accepted: 70, passes: 10 };
            assert_eq!(generation.speculation(), all_right, "{}", device.info().name);
            // The first verification also runs the self-test and creates buffers and bind groups.
            if round > 0 {
                assert_eq!(did.submits, 10, "{did:?}");
                assert_eq!((did.buffers_created, did.bind_groups_created), (0, 0), "{did:?}");
                assert_eq!(did.bytes_read, 10 * 4 * 8, "a token for each row: {did:?}");
            }
        }
        assert_eq!(continued(&model, &prompt, &endless(81)).0, want);
        // No pass is padded past the context, and none is wasted.
        for (n, context_length) in [(1, None), (2, None), (9, None), (60, Some(150))] {
            let options = LoadOptions { context_length, ..LoadOptions::default() };
            let model = load(&device, &copier, options);
            let (ids, guessed) = continued(&model, &prompt, &looking_up(7, endless(n)));
            let n = n.min(context_length.map_or(n, |length| length as usize - prompt.len() + 1));
            assert_eq!(ids, want[..n], "{}", device.info().name);
            assert!(guessed.drafted < n, "{guessed:?}");
        }
    }
}

#[test]
fn rejected_draft_tokens_leave_no_trace() {
    let copier = copier(1);
    // The passage has a wrong token: some draft tokens are right before others are wrong. Prefill produces the first
    // token.
    for n_right in 0..7 {
        let mut passage = copier.passage(0, 40);
        passage[9 + n_right] = copier.passage(500, 1)[0];
        let prompt = [passage, copier.passage(300, 20), copier.passage(6, 2)].concat();
        for device in executors() {
            let model = load(&device, &copier, LoadOptions::default());
            let (ids, guessed) = continued(&model, &prompt, &looking_up(7, endless(25)));
            assert_eq!(ids, copier.passage(8, 25), "{}: {n_right}", device.info().name);
            assert!(guessed.accepted >= n_right && guessed.accepted < guessed.drafted, "{guessed:?}");
        }
    }
}

/// On the CPU, a BF16 model with the lowest bits of all weights changed, which chooses the same tokens some of the
/// time.
fn similar(folder: &Path) -> Model {
    let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("similar").join(folder.file_name().unwrap());
    std::fs::create_dir_all(&to).unwrap();
    std::fs::copy(folder.join("config.json"), to.join("config.json")).unwrap();
    let mut file = std::fs::read(folder.join("model.safetensors")).unwrap();
    let header_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let mut rng = Rng::new(5);
    file[8 + header_len..].chunks_exact_mut(2).for_each(|bits| bits[0] ^= rng.word() as u8 & 7);
    std::fs::write(to.join("model.safetensors"), file).unwrap();
    Model::load(&Device::cpu(), &to, LoadOptions::default()).unwrap()
}

/// Recurrent states cannot roll back by single tokens: after a wrong draft the accepted tokens are recomputed.
#[test]
fn recurrent_layers_verify_draft_tokens() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    for device in executors() {
        let mut all = Speculation::default();
        let names = ["qwen35", "granite-hybrid", "lfm2"];
        // Layer kinds differ in their state, but not in handling draft tokens.
        let n_names = if device.is_gpu() && !common::is_full() { 1 } else { 3 };
        for name in &names[..n_names] {
            let what = format!("{name} on {}", device.info().name);
            let model = Model::load(&device, data.join("tiny-random").join(name), LoadOptions::default()).unwrap();
            let prompt = [[17, 40, 23, 9].repeat(3), vec![60, 61], [17, 40, 23, 9].repeat(2)].concat();
            let (want, _) = continued(&model, &prompt, &endless(40));
            for n in [1, 3, 4, 7] {
                let (ids, guessed) = continued(&model, &prompt, &looking_up(n, endless(40)));
                assert_eq!(ids, want, "{what}, {n} at a time: {guessed:?}");
            }
            let (ids, guessed) = drafted(&model, &model, &prompt, 5, &endless(40));
            assert_eq!((&ids, guessed.accepted), (&want, guessed.drafted), "{what}: {guessed:?}");
            assert!(guessed.passes <= 8, "{what}: {guessed:?}");
            let similar = similar(&data.join("tiny-random").join(name));
            // A software GPU is a hundred times slower.
            for (first, n) in (1..=if device.is_gpu() { 3 } else { 8 }).zip([7, 5, 3, 6, 7, 2, 4, 7]) {
                let prompt = [first, 40, 23];
                let (want, _) = continued(&model, &prompt, &endless(40));
                let (ids, guessed) = drafted(&model, &similar, &prompt, n, &endless(40));
                assert_eq!(ids, want, "{what} after {prompt:?}, {n} at a time: {guessed:?}");
                all.drafted += guessed.drafted;
                all.accepted += guessed.accepted;
                all.passes += guessed.passes;
            }
            // A generation can be dropped anywhere and another one continues.
            for n_kept in [1, 2, 5, 9, 14] {
                let mut session = model.session().unwrap();
                let [mut draft, mut draft_after] = [(); 2].map(|()| similar.session().unwrap());
                let mut generation = session.generate_ids(&prompt, &endless(40)).unwrap();
                generation.draft_with(&mut draft, 7).unwrap();
                for &id in &want[..n_kept] {
                    assert_eq!(block_on(generation.next()).unwrap().unwrap().id, id, "{what}");
                }
                drop(generation);
                let mut generation = session.generate_ids(&[], &endless(40 - n_kept)).unwrap();
                generation.draft_with(&mut draft_after, 5).unwrap();
                assert_eq!(common::collect(&mut generation).0, want[n_kept..], "{what}: after {n_kept} tokens");
            }
        }
        println!("{}: {all:?}", device.info().name);
        assert!(all.accepted > 0 && all.accepted < all.drafted, "{all:?}");
    }
}

#[test]
fn prompt_lookup_without_greedy_sampling_is_refused() {
    let model = builtin(&Device::cpu(), None);
    let refused = |options: GenerateOptions| {
        let mut session = model.session().unwrap();
        let error = session.generate("One", &options).err().expect("must be refused");
        assert!(matches!(error, Error::Option { option: "prompt_lookup", .. }), "{error}");
        error.to_string()
    };
    assert!(refused(looking_up(8, endless(5))).contains("0 to 7"));
    for options in [
        GenerateOptions::default(),
        GenerateOptions { repeat_penalty: 1.1, ..endless(5) },
        GenerateOptions { temperature: 0.5, ..endless(5) },
    ] {
        assert!(refused(looking_up(1, options)).contains("speculation requires greedy decoding (temperature 0)"));
    }
    // A penalty over no tokens has no effect.
    let none = GenerateOptions { repeat_penalty: 1.1, repeat_last_n: 0, ..endless(5) };
    assert_eq!(run(&model, "One", &looking_up(7, none)).0, run(&model, "One", &endless(5)).0);
}

#[test]
fn prompt_lookup_works_with_all_kv_types_and_pass_sizes() {
    let copier = copier(1);
    let prompt = [copier.passage(0, 30), copier.passage(0, 3)].concat();
    for device in executors() {
        for kv_type in KvType::ALL {
            for max_pass in [1, 8] {
                let options = LoadOptions { kv_type, max_pass: Some(max_pass), ..LoadOptions::default() };
                let (ids, guessed) = continued(&load(&device, &copier, options), &prompt, &looking_up(7, endless(24)));
                assert_eq!(ids, copier.passage(3, 24), "{}, {kv_type}", device.info().name);
                // Passes of one token cannot verify drafts.
                assert_eq!(guessed.passes > 0, max_pass > 1, "{guessed:?}");
            }
        }
    }
}

/// Ids of a generation with draft tokens from `draft`, and its speculation counters.
fn drafted(model: &Model, draft: &Model, prompt: &[u32], n: u32, options: &GenerateOptions) -> (Vec<u32>, Speculation) {
    let [mut session, mut draft] = [model, draft].map(|model| model.session().unwrap());
    let mut generation = session.generate_ids(prompt, options).unwrap();
    generation.draft_with(&mut draft, n).unwrap();
    let mut ids = Vec::new();
    while let Some(piece) = block_on(generation.next()) {
        ids.push(piece.unwrap().id);
    }
    (ids, generation.speculation())
}

#[test]
fn draft_model_does_not_change_output() {
    for device in executors() {
        let n_tokens = if device.is_gpu() { 24 } else { 150 };
        let model = builtin(&device, None);
        // Equal weights draft correctly each time; when the draft model's context is full, drafting stops and
        // generation continues.
        for (context_length, guesses_to_the_end) in [(None, true), (Some(40), false)] {
            let draft = builtin(&Device::cpu(), context_length);
            let prompt = model.encode(OPENINGS[0]).unwrap();
            let (want, _) = continued(&model, &prompt, &endless(n_tokens));
            for n in [1, 4, 7] {
                let (ids, guessed) = drafted(&model, &draft, &prompt, n, &endless(n_tokens));
                assert_eq!(ids, want, "{}: {n} at a time", device.info().name);
                assert!(guessed.passes > 0 && guessed.accepted > 0, "{guessed:?}");
                // Executors may differ at tied logits; these texts have none.
                assert_eq!(guessed.accepted, guessed.drafted, "{guessed:?}");
                // The last token may come alone: another draft token would exceed the limit.
                if guesses_to_the_end {
                    assert_eq!(guessed.passes, (n_tokens - 2).div_ceil(n as usize + 1), "{guessed:?}");
                }
            }
        }
    }
}

#[test]
fn wrong_draft_model_costs_passes_but_no_tokens() {
    let [copier, other] = [1, 2].map(copier);
    for device in executors() {
        let [model, wrong] = [&copier, &other].map(|it| load(&device, it, LoadOptions::default()));
        let prompt = copier.passage(0, 20);
        let (ids, guessed) = drafted(&model, &wrong, &prompt, 4, &endless(12));
        assert_eq!(ids, copier.passage(20, 12), "{}", device.info().name);
        assert!(guessed.passes == 10 && guessed.accepted == 0, "{guessed:?}");
        // Prompt lookup takes precedence if it finds a match.
        let prompt = [copier.passage(0, 40), copier.passage(0, 3)].concat();
        let (ids, guessed) = drafted(&model, &wrong, &prompt, 4, &looking_up(7, endless(17)));
        assert_eq!(ids, copier.passage(3, 17), "{}", device.info().name);
        assert_eq!(guessed, Speculation { drafted: 14, accepted: 14, passes: 2 }, "{}", device.info().name);
    }
}

#[test]
fn incompatible_draft_models_are_refused() {
    let copier = copier(1);
    let (model, other) = (builtin(&Device::cpu(), None), load(&Device::cpu(), &copier, LoadOptions::default()));
    let refused = |draft: &Model, n: u32, options: GenerateOptions| {
        let [mut session, mut draft] = [&model, draft].map(|model| model.session().unwrap());
        let mut generation = session.generate("One", &options).unwrap();
        generation.draft_with(&mut draft, n).unwrap_err().to_string()
    };
    assert!(refused(&other, 4, endless(5)).contains("a vocabulary of 1024 tokens"));
    assert!(refused(&model, 0, endless(5)).contains("1 or more"));
    assert!(refused(&model, 8, endless(5)).contains("0 to 7"));
    assert!(
        refused(&model, 4, GenerateOptions::default()).contains("speculation requires greedy decoding (temperature 0)")
    );
}
