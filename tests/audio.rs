//! Models that take sound against transformers' references: rows of a sound in a text, logits and continuations.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tilewright::engine::{Engine, EngineOptions, Request};
use tilewright::formats::Gguf;
use tilewright::formats::gguf::{Value, ValueType};
use tilewright::formats::gguf_writer::GgufHeader;
use tilewright::formats::safetensors::Safetensors;
use tilewright::kernels::KvType;
use tilewright::load::{AudioFile, ModelFile};
use tilewright::model::{RowAttention, RowNorm, VisionConfig};
use tilewright::sound::Sound;
use tilewright::{AudioEncoder, Error, GenerateOptions, ImageRows, LoadOptions, Model};

use crate::common::shared::{self, executors};
use crate::common::{self, References, block_on, largest_difference};
use tilewright::Tier;

/// The token that stands for a row of a sound in the references.
const ROW: u32 = 291;
/// Largest difference of rows and of logits.
const TOLERANCES: [f32; 2] = [1e-4, 5e-4];
const RATE: u32 = 16_000;

fn folder() -> Option<PathBuf> {
    Some(common::data(&["tiny-random-pictures"])?.join("tiny-random-pictures/gemma4-unified"))
}

fn references(folder: &Path) -> References {
    References::open(&folder.join("refs_audio.safetensors"))
}

fn sound(references: &References) -> Sound {
    let samples: Vec<f32> = references.ids("audio.samples").iter().map(|&n| n as i32 as f32 / 32768.0).collect();
    Sound::new(RATE, 1, &samples).unwrap()
}

fn options<'a>() -> LoadOptions<'a> {
    LoadOptions { kv_type: KvType::F32, exact: true, ..LoadOptions::default() }
}

fn rows_of(encoder: &AudioEncoder, sound: &Sound) -> Arc<ImageRows> {
    block_on(encoder.encode(sound)).unwrap().tiles[0].clone()
}

/// The prompt of the references with the sound's ids in place of [`ROW`].
fn prompt(references: &References, rows: &ImageRows) -> Vec<u32> {
    let mut rows = rows.ids.clone();
    references.ids("audio.ids").into_iter().map(|id| if id == ROW { rows.next().unwrap() } else { id }).collect()
}

/// The largest difference of the logits of tokens after the sound: the first in one pass with it, the others one by
/// one.
fn logits_after(model: &Model, references: &References, rows: &Arc<ImageRows>) -> f32 {
    let ids = prompt(references, rows);
    let want = references.floats("audio.logits");
    let want: Vec<&[f32]> = want.chunks_exact(model.config().vocab_size as usize).collect();
    let first = ids.iter().rposition(|id| rows.ids.contains(id)).unwrap() + 1;
    assert_eq!((ids.len() - first, ids.len()), (7, want.len()));
    let mut session = model.session().unwrap();
    session.set_images(std::slice::from_ref(rows)).unwrap();
    let mut worst = 0.0f32;
    for at in first..ids.len() {
        let next = if session.tokens().is_empty() { &ids[..=at] } else { &ids[at..=at] };
        let logits = block_on(session.logits(next)).unwrap();
        worst = worst.max(largest_difference(&logits, want[at]));
    }
    worst
}

fn ids_of(mut stream: tilewright::engine::Stream) -> Vec<u32> {
    let mut ids = Vec::new();
    while let Some(piece) = block_on(stream.next()) {
        ids.push(piece.unwrap().id);
    }
    ids
}

#[test]
fn gemma4_unified_has_the_references_rows_and_logits_of_a_sound() {
    let Some(folder) = folder() else { return };
    let references = references(&folder);
    let sound = sound(&references);
    let gguf = ["model-bf16.gguf", "mmproj-bf16.gguf"].map(|name| folder.join(name));
    for [text, part] in [[folder.clone(), folder.clone()], gguf] {
        for device in executors().into_iter().chain(shared::gpus_beside_cpu([Tier::Baseline])) {
            let what = format!("{} on {} ({})", part.display(), device.info().name, device.tier().name());
            let encoder = AudioEncoder::load(&device, &part).unwrap();
            let rows = rows_of(&encoder, &sound);
            let difference = largest_difference(&rows.rows[0], &references.floats("audio.embeds"));
            println!("{what}: rows within {difference:.1e}");
            assert!(difference <= TOLERANCES[0], "{what}: rows differ by {difference}");
            // In one pass, and cut by passes of 8.
            for max_pass in [None, Some(8)] {
                let model = Model::load(&device, &text, LoadOptions { max_pass, ..options() }).unwrap();
                let worst = logits_after(&model, &references, &rows);
                println!("{what}: logits within {worst:.1e}");
                assert!(worst <= TOLERANCES[1], "{what}: logits differ by {worst}");
                check_engine(&model, &references, &encoder, &what);
            }
            common::assert_tested(&device);
        }
    }
}

/// An engine continues as a session does: cold, with a cached prefix, and beside a text with another sound.
fn check_engine(model: &Model, references: &References, encoder: &AudioEncoder, what: &str) {
    let heard = sound(references);
    let other: Vec<f32> = heard.samples().iter().rev().copied().collect();
    let sounds = [heard, Sound::new(RATE, 1, &other).unwrap()].map(|sound| rows_of(encoder, &sound));
    let options = GenerateOptions { ignore_eos: true, ..GenerateOptions::greedy(12) };
    let mut session = model.session().unwrap();
    let mut want = Vec::new();
    for rows in &sounds {
        session.clear();
        session.set_images(std::slice::from_ref(rows)).unwrap();
        let mut generation = session.generate_ids(&prompt(references, rows), &options).unwrap();
        want.push(common::collect(&mut generation).0);
    }
    assert_ne!(want[0], want[1], "{what}: sounds are not heard");
    let engine = Engine::spawn(model, &EngineOptions::default()).unwrap();
    let request = |rows: &Arc<ImageRows>| Request {
        images: vec![rows.clone()],
        ..Request::new(prompt(references, rows), options.clone())
    };
    for turn in 0..2 {
        let streams = sounds.each_ref().map(|rows| engine.submit(request(rows)).unwrap());
        assert_eq!(streams.map(ids_of).to_vec(), want, "{what}: turn {turn}");
    }
}

/// A feature, and how to do without.
type Feature = (&'static str, fn(&mut VisionConfig));

const FEATURES: [Feature; 2] = [
    ("norm of frames", |sound| sound.projector.norm = RowNorm::None),
    ("attention one way", |sound| sound.attention = RowAttention::ByLayer),
];

/// A copy of the folder whose projection is zero.
fn without_projection() -> PathBuf {
    let copy = folder_with("unprojected", |_| ());
    let path = copy.join("model.safetensors");
    let mut file = std::fs::read(&path).unwrap();
    let index = Safetensors::parse(&file, file.len() as u64).unwrap();
    let bytes = index.tensor("model.embed_audio.embedding_projection.weight").unwrap().bytes(&file).unwrap();
    let start = bytes.as_ptr() as usize - file.as_ptr() as usize;
    let range = start..start + bytes.len();
    file[range].fill(0);
    std::fs::write(&path, file).unwrap();
    copy
}

#[test]
fn turning_off_any_feature_of_sounds_changes_rows_or_logits() {
    let Some(folder) = folder() else { return };
    let (references, device) = (references(&folder), common::cpu());
    let model = Model::from_file(&device, ModelFile::open(&folder).unwrap(), options()).unwrap();
    let unprojected = without_projection();
    let all = FEATURES.into_iter().map(|feature| (&folder, feature));
    let unprojected: (&PathBuf, Feature) = (&unprojected, ("projection", |_| ()));
    for (folder, (feature, turn_off)) in all.chain([unprojected]) {
        let mut file = AudioFile::open(folder).unwrap();
        turn_off(&mut file.config);
        let rows = rows_of(&AudioEncoder::from_file(&device, file).unwrap(), &sound(&references));
        let of_rows = largest_difference(&rows.rows[0], &references.floats("audio.embeds"));
        let differences = [of_rows, logits_after(&model, &references, &rows)];
        println!("without {feature}: rows off by {:.1e}, logits by {:.1e}", differences[0], differences[1]);
        assert!(differences.iter().zip(TOLERANCES).any(|(found, tolerance)| *found > 2.0 * tolerance), "{feature}");
    }
}

#[test]
fn sounds_are_computed_once_and_padded_with_silence() {
    let Some(folder) = folder() else { return };
    let device = common::cpu();
    let encoder = AudioEncoder::load(&device, &folder).unwrap();
    assert_eq!((encoder.rate(), encoder.max_rows(), encoder.max_seconds()), (RATE, 750, 750.0 * 40.0 / 16000.0));
    let sound = |n: usize| {
        let samples: Vec<f32> = (0..n).map(|i| if i < 90 { (i as f32 * 0.3).sin() } else { 0.0 }).collect();
        Sound::new(RATE, 1, &samples).unwrap()
    };
    let rows = rows_of(&encoder, &sound(90));
    assert_eq!(rows.len(), 3);
    let before = device.counters();
    assert!(Arc::ptr_eq(&rows, &rows_of(&encoder, &sound(90))));
    assert_eq!((device.counters() - before).dispatches, 0);
    let padded = rows_of(&encoder, &sound(120));
    assert!(padded.rows == rows.rows && padded.ids != rows.ids);
    let before = device.counters();
    let planned = encoder.plan(7).unwrap().total_bytes();
    rows_of(&AudioEncoder::load(&device, &folder).unwrap(), &sound(280));
    let allocated = (device.counters() - before).bytes_allocated;
    assert!(allocated.abs_diff(planned) * 10 <= planned, "{allocated}, planned {planned}");
    for (refused, expected) in [
        (Sound::new(RATE, 1, &[]).unwrap(), "audio: `number of samples` is 0, expected 1 to 30000 (1.875 seconds)"),
        (sound(30_001), "audio: `number of samples` is 30001, expected 1 to 30000"),
        (Sound::new(8000, 1, &[0.0; 80]).unwrap(), "audio: `rate` is 8000, expected 16000 samples in a second"),
    ] {
        let error = block_on(encoder.encode(&refused)).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    rows_of(&encoder, &sound(30_000));
}

/// A copy of the folder with another `config.json`.
fn folder_with(name: &str, change: impl Fn(&mut serde_json::Value)) -> PathBuf {
    let source = folder().expect("committed test data");
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sound-{name}"));
    std::fs::create_dir_all(&copy).unwrap();
    std::fs::copy(source.join("model.safetensors"), copy.join("model.safetensors")).unwrap();
    let mut config = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    change(&mut config);
    std::fs::write(copy.join("config.json"), config.to_string()).unwrap();
    copy
}

/// A copy of the GGUF file with other values, and with rows of so many columns of the text model.
fn gguf_with(name: &str, row_dim: u64, change: impl Fn(&str) -> Option<Value<'static>>) -> PathBuf {
    let file = std::fs::read(folder().expect("committed test data").join("mmproj-bf16.gguf")).unwrap();
    let gguf = Gguf::parse(&file, file.len() as u64).unwrap();
    let mut header = GgufHeader::new(32);
    for (key, value) in gguf.metadata.iter() {
        match (change(key), value) {
            (Some(value), _) => header.set(key, value).unwrap(),
            (None, Value::Array(array)) => {
                header.set_array(key, ValueType::F32, array.iter().collect::<Vec<_>>().into_iter()).unwrap();
            }
            (None, value) => header.set(key, value).unwrap(),
        }
    }
    let is_projection = |name: &str| name.starts_with("mm.a.");
    for tensor in &gguf.tensors {
        let narrow = [row_dim, tensor.shape[tensor.shape.len() - 1]];
        let shape = if is_projection(&tensor.name) { &narrow[..] } else { &tensor.shape };
        header.add_tensor(&tensor.name, shape, tensor.block_type).unwrap();
    }
    let mut written = header.to_bytes();
    for tensor in &gguf.tensors {
        let bytes = tensor.bytes(&file).unwrap();
        let n_bytes = if is_projection(&tensor.name) { bytes.len() * row_dim as usize / 64 } else { bytes.len() };
        written.extend_from_slice(&bytes[..n_bytes]);
        written.resize(written.len().next_multiple_of(32), 0);
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sound-{name}.gguf"));
    std::fs::write(&path, written).unwrap();
    path
}

fn refusal(path: &Path) -> String {
    let error = AudioEncoder::load(&common::cpu(), path).map(drop).unwrap_err();
    assert!(matches!(&error, Error::InFile { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn other_means_of_taking_sound_are_refused_by_name() {
    let of_type = |name: &'static str| folder_with(name, |config| config["model_type"] = name.into());
    for (name, means) in
        [("gemma4", "a conformer"), ("gemma3n", "a conformer"), ("qwen2_audio", "an encoder like Whisper's")]
    {
        let error = refusal(&of_type(name));
        let expected = format!("`{name}`, whose sound goes through {means}");
        assert!(error.contains(&expected) && error.contains("without an encoder: gemma4_unified"), "{error}");
    }
    let none = folder_with("none", |config| config["audio_config"] = serde_json::Value::Null);
    assert!(refusal(&none).contains("audio_config"), "{}", refusal(&none));
    assert_eq!(AudioFile::beside(&none).unwrap(), None);
    let conformer =
        gguf_with("conformer", 64, |key| (key == "clip.audio.projector_type").then_some(Value::Str("gemma4a")));
    let error = refusal(&conformer);
    assert!(error.contains("`gemma4a`, whose sound goes through a conformer") && error.contains("gemma4ua"), "{error}");
    let silent = gguf_with("silent", 64, |key| (key == "clip.has_audio_encoder").then_some(Value::Bool(false)));
    assert!(refusal(&silent).contains("clip.has_audio_encoder"), "{}", refusal(&silent));
    let wide = gguf_with("wide", 64, |key| (key == "clip.audio.embedding_length").then_some(Value::U32(48)));
    assert!(refusal(&wide).contains("mm.0.weight"), "{}", refusal(&wide));
    for length in [0, u32::MAX] {
        let path = gguf_with("length", 64, |key| (key == "clip.audio.embedding_length").then_some(Value::U32(length)));
        assert!(refusal(&path).contains("embedding_length"), "{}", refusal(&path));
    }
    assert!(refusal(&folder().unwrap().join("model-bf16.gguf")).contains("clip: encoders of pictures or sound"));
}

#[test]
fn part_for_sound_of_another_model_is_refused() {
    let Some(folder) = folder() else { return };
    let device = common::cpu();
    let path = gguf_with("narrow", 32, |key| (key == "clip.audio.projection_dim").then_some(Value::U32(32)));
    let encoder = AudioEncoder::load(&device, path).unwrap();
    let model = Model::load(&device, folder, options()).unwrap();
    let error = model.with_audio(encoder).map(drop).unwrap_err().to_string();
    assert!(error.contains("projection_dim") && error.contains("expected 64") && error.contains("32"), "{error}");
}
