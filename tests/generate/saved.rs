//! Session files: a reopened session recomputes nothing and continues with the same output; truncated files and those
//! of another model are refused.

use tilewright::formats::Safetensors;
use tilewright::kernels::KvType;
use tilewright::load::ModelFile;
use tilewright::{Device, Error, GenerateOptions, LoadOptions, Model, Session};

use super::common::shared::executors;
use super::common::{self, block_on};
use super::{builtin, collect, endless};

/// The built-in model with a context longer than in training.
fn with_long_context(device: &Device, kv_type: KvType) -> Model {
    let mut bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/stories.gguf")).unwrap();
    let key = b"llama.context_length";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&4096_u32.to_le_bytes());
    let options = LoadOptions { kv_type, ..LoadOptions::default() };
    Model::from_file(device, ModelFile::from_gguf_bytes(bytes).unwrap(), options).unwrap()
}

#[test]
fn reopened_session_recomputes_none_of_2000_tokens() {
    let ids: Vec<u32> = (0..2000).map(|i| 3 + (i * i + 7 * i) % 1000).collect();
    let path = std::env::temp_dir().join(format!("tilewright-session-{}", std::process::id()));
    for device in executors() {
        let kv_types = if device.is_gpu() { vec![KvType::default()] } else { KvType::ALL.to_vec() };
        for kv_type in kv_types {
            let model = with_long_context(&device, kv_type);
            let mut session = model.session().unwrap();
            collect(session.generate_ids(&ids, &endless(20)).unwrap());
            block_on(session.save(&path, "{\"anything\": \"läßt sich\"}")).unwrap();
            let told = session.tokens().to_vec();
            // The next message, in the running session and in one reopened on a reloaded model.
            let next: Vec<u32> = told.iter().copied().chain([50, 60, 70]).collect();
            let (want, ..) = collect(session.generate_from(&next, &endless(20)).unwrap());
            let mut reopened = with_long_context(&device, kv_type).session().unwrap();
            assert_eq!(reopened.load(&path).unwrap(), "{\"anything\": \"läßt sich\"}");
            assert_eq!(reopened.tokens(), told);
            let mut generation = reopened.generate_from(&next, &endless(20)).unwrap();
            block_on(generation.next()).unwrap().unwrap();
            // The last of the 2,020 tokens may not have been computed.
            let n_computed = generation.prefill().tokens;
            assert!((3..=4).contains(&n_computed), "{n_computed} of {} on {}", next.len(), device.info().name);
            let (rest, ..) = collect(generation);
            assert_eq!(rest, want[1..], "{kv_type} on {}", device.info().name);
            // The same prompt again: all but its last token is cached.
            let mut generation = reopened.generate_from(&told, &endless(1)).unwrap();
            block_on(generation.next()).unwrap().unwrap();
            assert_eq!(generation.prefill().tokens, 1);
        }
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn empty_session_can_be_saved_and_restored() {
    let model = builtin(&common::cpu(), None);
    let bytes = block_on(model.session().unwrap().to_bytes("")).unwrap();
    let mut session = story(&model, 8);
    assert_eq!(session.restore_bytes(&bytes).unwrap(), "");
    assert!(session.tokens().is_empty());
    collect(session.generate("Once upon a time", &endless(8)).unwrap());
    assert_eq!(session.tokens(), story(&model, 8).tokens());
}

fn story(model: &Model, n: usize) -> Session {
    let mut session = model.session().unwrap();
    collect(session.generate("Once upon a time", &endless(n)).unwrap());
    session
}

/// A file with one part of its header replaced.
fn with(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + len]).unwrap();
    assert!(header.contains(from), "{from}: {header}");
    let header = header.replacen(from, to, 1);
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[8 + len..]].concat()
}

#[test]
fn foreign_session_file_is_refused_and_changes_nothing() {
    let device = common::cpu();
    let model = builtin(&device, None);
    let bytes = block_on(story(&model, 20).to_bytes("note")).unwrap();
    let cases: [(Vec<u8>, &str, &str); 12] = [
        (with(&bytes, "tilewright session", "tilewright index"), "format", "`tilewright session`"),
        (with(&bytes, "\"version\":\"2\"", "\"version\":\"1\""), "version", "(supported: version 2)"),
        (with(&bytes, "\"model\":\"", "\"model\":\"f"), "model", "the weights of `tilewright stories`"),
        (with(&bytes, "\"kv_type\":\"f16\"", "\"kv_type\":\"q8_0\""), "kv_type", "f16"),
        (with(&bytes, "\"cached\":\"", "\"cached\":\"9"), "cached", "at most the"),
        (with(&bytes, "\"cached\":\"", "\"cached\":\"-"), "cached", "a number below 2^32"),
        (with(&bytes, "\"rope_offset\"", "\"angels\""), "rope_offset", "a text in __metadata__"),
        (with(&bytes, "\"cache.1.v\"", "\"cache.9.v\""), "cache.1.v", "a tensor"),
        (
            with(&bytes, "\"cache.0.k\":{\"dtype\":\"U32\"", "\"cache.0.k\":{\"dtype\":\"F32\""),
            "cache.0.k",
            "expected U32",
        ),
        (with(&bytes, "\"tokens\":{\"dtype\":\"U32\"", "\"tokens\":{\"dtype\":\"I32\""), "tokens", "expected U32"),
        (bytes[..bytes.len() - 1].to_vec(), "end of data", "bytes of data"),
        (bytes[..bytes.len() / 2].to_vec(), "end of data", "bytes of data"),
    ];
    let mut session = story(&model, 5);
    let before = session.tokens().to_vec();
    for (bytes, field, expected) in &cases {
        let error = session.restore_bytes(bytes).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(field) && text.contains(expected), "{field}: {text}");
        assert_eq!(session.tokens(), before);
    }
    // An invalid token at the start of the data.
    let header = Safetensors::parse(&bytes, bytes.len() as u64).unwrap();
    let at = header.tensor("tokens").unwrap().offset as usize;
    let mut wrong = bytes.clone();
    wrong[at + 8..at + 12].copy_from_slice(&5000_u32.to_le_bytes());
    let text = session.restore_bytes(&wrong).unwrap_err().to_string();
    assert!(text.contains("token 2") && text.contains("5000") && text.contains("below 1024"), "{text}");

    // Another context length.
    let short = builtin(&device, Some(16));
    let error = short.session().unwrap().restore_bytes(&bytes).unwrap_err();
    assert!(matches!(error, Error::ContextFull { capacity: 16, .. }), "{error}");

    // The session continues unaffected.
    let (next, ..) = collect(session.generate_ids(&[], &GenerateOptions::greedy(10)).unwrap());
    let (want, ..) = collect(story(&model, 5).generate_ids(&[], &GenerateOptions::greedy(10)).unwrap());
    assert_eq!(next, want);
}

/// For recurrent layers, a file lists the positions of its states. Passes continue after the last cached position:
/// without the latest state they would continue from an earlier one.
#[test]
fn session_file_without_its_latest_state_is_refused() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    for name in ["lfm2", "qwen35", "granite-hybrid"] {
        let path = data.join("tiny-random").join(name);
        let model = Model::load(&common::cpu(), path, LoadOptions::default()).unwrap();
        for n in [1, 7, 20] {
            let ids: Vec<u32> = (3..3 + n).collect();
            let mut session = model.session().unwrap();
            block_on(session.logits(&ids)).unwrap();
            let bytes = block_on(session.to_bytes("")).unwrap();
            let header = Safetensors::parse(&bytes, bytes.len() as u64).unwrap();
            let at = header.tensor("states").unwrap().offset as usize;
            let mut other = model.session().unwrap();
            other.restore_bytes(&bytes).unwrap();
            assert_eq!(other.tokens(), ids);
            // No state, and only an earlier one.
            let earlier = (0..4).map(|turn| if turn == n % 4 { 0 } else { (n / 4 * 4 + turn).saturating_sub(4) });
            for states in [vec![0; 4], earlier.collect()] {
                let mut crafted = bytes.clone();
                crafted[at..at + 16].copy_from_slice(bytemuck::cast_slice(&states[..]));
                let error = other.restore_bytes(&crafted).unwrap_err().to_string();
                let expected = format!("after {n} tokens, as many as are cached");
                assert!(error.contains("state") && error.contains(&expected), "{name}, {states:?}: {error}");
                assert_eq!(other.tokens(), ids, "{name}: as it was");
            }
        }
    }
}

/// A file truncated anywhere, or with any header byte changed, is an error or the same session.
#[test]
fn damaged_session_file_never_panics() {
    let model = builtin(&common::cpu(), None);
    let whole = story(&model, 20);
    let bytes = block_on(whole.to_bytes("note")).unwrap();
    let mut session = model.session().unwrap();
    for len in (0..bytes.len()).step_by(bytes.len() / 300) {
        session.restore_bytes(&bytes[..len]).unwrap_err();
    }
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (mut n_refused, mut n_taken) = (0, 0);
    for at in 0..8 + header_len {
        let mut damaged = bytes.clone();
        damaged[at] = damaged[at].wrapping_add(1);
        match session.restore_bytes(&damaged) {
            Err(_) => n_refused += 1,
            // A change in the note, the name, or to another valid number.
            Ok(_) => n_taken += 1,
        }
    }
    assert!(n_refused > header_len * 8 / 10 && n_taken < header_len / 5, "{n_refused} refused, {n_taken} taken");
}

/// A model's identity depends on every byte of its weights, wherever they are, and on its tokens' texts.
#[test]
fn session_of_a_model_with_other_weights_is_refused() {
    let device = common::cpu();
    let whole = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/stories.gguf")).unwrap();
    let load = |file: &[u8], more: LoadOptions<'static>| {
        let file = ModelFile::from_gguf_bytes(file.to_vec()).unwrap();
        Model::from_file(&device, file, LoadOptions { context_length: Some(64), max_pass: Some(8), ..more })
    };
    let resident = load(&whole, LoadOptions::default()).unwrap();
    let bytes = block_on(story(&resident, 8).to_bytes("")).unwrap();
    let needed_bytes = resident.plan().total_bytes();
    let within = |part: u64| LoadOptions {
        memory_limit: Some(needed_bytes * part / 20),
        stream_layers: true,
        ..LoadOptions::default()
    };
    let streams = |model: &Model| model.streaming().is_some_and(|streaming| streaming.n_streamed > 0);
    let part = (1..20).find(|&part| load(&whole, within(part)).is_ok_and(|model| streams(&model))).unwrap();
    let refused = |file: &[u8], more: LoadOptions<'static>, what: &str| {
        let error = load(file, more).unwrap().session().unwrap().restore_bytes(&bytes).expect_err(what).to_string();
        assert!(error.contains("expected the weights of `tilewright stories`"), "{what}: {error}");
    };
    // The same model with disk offload of layers, in both modes.
    let streamed = load(&whole, within(part)).unwrap();
    streamed.session().unwrap().restore_bytes(&bytes).unwrap();
    let from_streamed = block_on(story(&streamed, 8).to_bytes("")).unwrap();
    resident.session().unwrap().restore_bytes(&from_streamed).unwrap();

    let header = tilewright::formats::Gguf::parse(&whole, whole.len() as u64).unwrap();
    let changed = |at: u64| {
        let mut file = whole.clone();
        file[at as usize] ^= 1;
        file
    };
    for name in ["token_embd.weight", "blk.0.ffn_down.weight", "blk.3.attn_q.weight", "output_norm.weight"] {
        let tensor = header.tensors.iter().find(|tensor| tensor.name == name).unwrap();
        let last = tensor.size_bytes - 1;
        for at in [last.min(5000), last] {
            let file = changed(tensor.offset + at);
            refused(&file, LoadOptions::default(), &format!("{name}, byte {at}"));
            refused(&file, within(part), &format!("{name}, byte {at}, with layers in the file"));
        }
    }
    let word = "\u{2581}Lily".as_bytes();
    let at = whole.windows(word.len()).position(|window| window == word).unwrap() + word.len() - 1;
    refused(&changed(at as u64), LoadOptions::default(), "another word");
}

/// A model's identity also includes properties besides its weights.
#[test]
fn session_of_a_model_with_another_epsilon_is_refused() {
    let device = common::cpu();
    let bytes = block_on(story(&builtin(&device, None), 8).to_bytes("")).unwrap();
    let mut file = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/stories.gguf")).unwrap();
    let key = b"llama.attention.layer_norm_rms_epsilon";
    let at = file.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    file[at..at + 4].copy_from_slice(&1e-3_f32.to_le_bytes());
    let other = Model::from_file(&device, ModelFile::from_gguf_bytes(file).unwrap(), LoadOptions::default()).unwrap();
    let text = other.session().unwrap().restore_bytes(&bytes).unwrap_err().to_string();
    assert!(text.contains("the weights of"), "{text}");
}

/// Window layers keep slightly more than passes can see. The saved part determines how far a session rolls back
/// without recomputing; in any case the logits equal those of a recomputing session.
#[test]
fn reopened_session_truncates_by_any_number_of_tokens() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    let options = LoadOptions { kv_type: KvType::F32, ..LoadOptions::default() };
    let model = Model::load(&common::cpu(), data.join("tiny-random/gemma3"), options).unwrap();
    let [short, long] = [8, 32].map(|max_pass| model.with_max_pass(max_pass).unwrap());
    let ids: Vec<u32> = (0..60).map(|i| 3 + (i * i + 7 * i) % 290).collect();
    let (mut n_known, mut n_all) = (0, 0);
    for (writer, reader) in [(&short, &short), (&short, &long), (&long, &short)] {
        let mut session = writer.session().unwrap();
        block_on(session.logits(&ids[..57])).unwrap();
        let bytes = block_on(session.to_bytes("")).unwrap();
        for back in 0..40 {
            let mut session = reader.session().unwrap();
            session.restore_bytes(&bytes).unwrap();
            session.truncate(57 - back);
            let next = [&ids[..57 - back], &[77]].concat();
            let got = block_on(session.logits(&[77])).unwrap();
            let want = block_on(reader.session().unwrap().logits(&next)).unwrap();
            let difference = common::largest_difference(&got, &want);
            assert!(difference <= 2e-4, "back by {back}: off by {difference}");
            session.restore_bytes(&bytes).unwrap();
            session.truncate(57 - back);
            let mut generation = session.generate_ids(&[77], &GenerateOptions::greedy(1)).unwrap();
            block_on(generation.next()).unwrap().unwrap();
            if generation.prefill().tokens == 1 { n_known += 1 } else { n_all += 1 }
        }
    }
    assert!(n_known >= 10 && n_all >= 10, "{n_known} rolled back, {n_all} restarted");
}
