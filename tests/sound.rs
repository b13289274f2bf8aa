//! Speech to text against transformers' references: spectrogram, encoder layer by layer, logits, greedy tokens; and whole
//! transcripts, whose tokens are chosen again here by the published rules.

mod batch;

use std::ops::ControlFlow;
use std::path::PathBuf;

use serde_json::Value as Json;
use tilewright::kernels::KvType;
use tilewright::load::{FileName, ModelFile, SpeechFile};
use tilewright::sound::{SAMPLE_RATE, Sound, SoundLimits, Spectrogram};
use tilewright::transcribe::{Segment, SpeechModel, SpeechSession, Task, to_json};
use tilewright::{Device, Error, Tier, TranscribeOptions, Transcriber, TranscriberOptions, Transcript};

use crate::common::shared::{self, executors};
use crate::common::{self, References, block_on, largest_difference};

const TOLERANCE: f32 = 2e-4;
const FILES: [&str; 2] = ["chirp.wav", "short.wav"];
/// Frames of a window, and bands.
const FRAMES: u32 = 300;
const BANDS: usize = 80;
/// Of the tokenizer beside the model.
const START: u32 = 1;
const END: u32 = 2;
const ENGLISH: u32 = 3;
const NO_TIMESTAMPS: u32 = 141;

fn folder() -> Option<PathBuf> {
    Some(common::data(&["tiny-random-sound"])?.join("tiny-random-sound"))
}

fn samples(file: &str) -> Vec<f32> {
    let bytes = std::fs::read(folder().unwrap().join(file)).unwrap();
    let sound = Sound::decode(&bytes, &SoundLimits::default()).unwrap();
    assert_eq!(sound.rate(), SAMPLE_RATE);
    sound.samples().to_vec()
}

/// `[frames, bands]`.
fn frames(samples: &[f32]) -> Vec<f32> {
    Spectrogram::new(samples, BANDS as u32, FRAMES).unwrap().frames(0, FRAMES)
}

/// Files of each format, how many samples of an encoder's delay begin them, and how far samples may differ from ffmpeg's, which
/// are of 16 bits.
const SOUNDS: [(&str, usize, f32); 8] = [
    ("stereo.flac", 0, 0.0),
    ("mono.mp3", 0, 2e-5),
    ("stereo.mp3", 0, 2e-5),
    ("mono.ogg", 0, 2e-5),
    ("mono.opus", 0, 2e-5),
    ("stereo.webm", 0, 2e-5),
    ("mono.m4a", 1024, 2e-5),
    ("mono.aac", 0, 2e-5),
];

fn sound_file(name: &str) -> Vec<u8> {
    std::fs::read(common::find_data("sounds".as_ref()).expect("committed test data").join(name)).unwrap()
}

fn decoded(bytes: &[u8], limits: &SoundLimits) -> Result<Sound, String> {
    Sound::decode(bytes, limits).map_err(|error| error.to_string())
}

#[test]
fn files_of_all_formats_have_ffmpegs_samples() {
    for (name, n_early, tolerance) in SOUNDS {
        let [found, want] = [name, &format!("{name}.wav")].map(|name| {
            let sound = decoded(&sound_file(name), &SoundLimits::default());
            sound.unwrap_or_else(|error| panic!("{name}: {error}"))
        });
        // The last packet's end is left out by some, by ffmpeg not always.
        let n = want.samples().len().min(found.samples().len() - n_early);
        let n_more = want.samples().len().abs_diff(found.samples().len() - n_early);
        assert!(found.rate() == want.rate() && n_more < 200, "{name}: {n_more} samples more or less");
        let off = largest_difference(&found.samples()[n_early..n_early + n], &want.samples()[..n]);
        println!("{name}: within {off:.1e}");
        assert!(off <= tolerance && want.samples().iter().any(|sample| sample.abs() > 0.3), "{name}: off by {off}");
        let at_once = found.resampled(SAMPLE_RATE).unwrap();
        let in_parts = Sound::decode_at(&sound_file(name), SAMPLE_RATE, &SoundLimits::default()).unwrap();
        assert_eq!(in_parts, at_once, "{name}");
    }
}

#[test]
fn files_that_are_cut_damaged_or_too_long_are_refused() {
    let usual = SoundLimits::default();
    for (name, ..) in SOUNDS {
        let whole = sound_file(name);
        // Of the header only, and of some of the sound: as much as there is where no length is given.
        for end in [6, 40, whole.len() / 8, whole.len() / 2, whole.len() - 7] {
            match decoded(&whole[..end], &usual) {
                Ok(sound) => {
                    let has_length = [".flac", ".m4a"].iter().any(|ending| name.ends_with(ending));
                    assert!(!has_length && sound.seconds() < 0.5, "{name} up to {end}: {} s", sound.seconds());
                }
                Err(error) => assert!(
                    ["the file ends after", "content", "no sound"].iter().any(|part| error.contains(part)),
                    "{name} up to {end}: {error}"
                ),
            }
        }
        // Decoded until it is too long.
        let short = SoundLimits { max_seconds: 0.05, ..usual };
        let error = decoded(&whole, &short).unwrap_err();
        assert!(error.contains("length is 0 seconds") && error.contains("at most 0.05 seconds"), "{name}: {error}");
        let error = Sound::decode_at(&whole, 8000, &SoundLimits { max_samples: 300, ..usual }).unwrap_err().to_string();
        assert!(error.contains("supported: at most 300; cut the sound"), "{name}: {error}");
    }
    let mut lying = sound_file("stereo.flac");
    // 2^36 - 1 samples.
    lying[21] |= 0x0f;
    lying[22..26].fill(0xff);
    assert!(decoded(&lying, &usual).unwrap_err().starts_with("FLAC: length is 3116530 seconds"));
    let error = decoded(&sound_file("alac.m4a"), &usual).unwrap_err();
    assert!(error.starts_with("MPEG-4: codec is ALAC, which is not supported (supported: WAV, FLAC"), "{error}");
    // A damaged packet becomes silence, but not most of them. Each begins 6 or 7 bytes after a block's first.
    let mut damaged = sound_file("stereo.webm");
    let whole = decoded(&damaged, &usual).unwrap();
    let block = |at: usize| match damaged[at..] {
        [0xa3, 0x80..=0xff, 0x81, ..] => Some(at + 6),
        [0xa3, 0x40..=0x7f, _, 0x81, ..] => Some(at + 7),
        _ => None,
    };
    let packets: Vec<usize> = (0..damaged.len()).filter_map(block).collect();
    damaged[packets[2]..packets[2] + 2].fill(0xff);
    let partly = decoded(&damaged, &usual).unwrap();
    assert_eq!([&whole, &partly].map(Sound::n_damaged_packets), [0, 1]);
    assert_eq!(partly.resampled(SAMPLE_RATE).unwrap().n_damaged_packets(), 1);
    let n_silent = partly.samples().iter().filter(|&&sample| sample == 0.0).count();
    assert_eq!(partly.samples().len(), whole.samples().len());
    assert!((960..1000).contains(&n_silent) && partly.samples()[..1000] == whole.samples()[..1000], "{n_silent}");
    packets.iter().for_each(|&at| damaged[at..at + 2].fill(0xff));
    let error = decoded(&damaged, &usual).unwrap_err();
    assert!(error.starts_with("WebM: content at byte 0 is") && error.contains("packets damaged"), "{error}");
}

fn devices() -> Vec<Device> {
    executors().into_iter().chain(shared::gpus_beside_cpu([Tier::Baseline])).collect()
}

fn exact() -> TranscriberOptions {
    TranscriberOptions { kv_type: KvType::F32, ..TranscriberOptions::default() }
}

#[test]
fn spectrograms_are_the_references() {
    let Some(folder) = folder() else { return };
    let references = References::open(&folder.join("refs.safetensors"));
    for (i, name) in ["0.input_features", "1.input_features_first_20"].into_iter().enumerate() {
        let (want, found) = (references.floats(name), frames(&samples(FILES[i])));
        let n = want.len() / BANDS;
        let by_band: Vec<f32> =
            (0..BANDS).flat_map(|b| (0..n).map(move |t| (t, b))).map(|(t, b)| found[t * BANDS + b]).collect();
        let off = largest_difference(&by_band, &want);
        println!("{name}: within {off:.1e}");
        assert!(off <= 1e-4, "{name} differs by {off}");
    }
}

#[test]
fn whisper_has_the_references_rows_logits_and_tokens() {
    let Some(folder) = folder() else { return };
    let references = References::open(&folder.join("refs.safetensors"));
    for device in devices() {
        let what = format!("{} ({})", device.info().name, device.tier().name());
        let model = SpeechModel::load(&device, &folder, exact()).unwrap();
        let mut session = model.session(1).unwrap();
        for (i, file) in FILES.into_iter().enumerate() {
            let frames = frames(&samples(file));
            if i == 0 {
                let layers = block_on(model.trace(&frames)).unwrap();
                // Before the first layer and after it.
                let off = largest_difference(&layers[..2].concat(), &references.floats("0.encoder_layers"));
                println!("{what}: layers within {off:.1e}");
                assert!(off <= TOLERANCE, "{what}: layers differ by {off}");
            }
            block_on(session.hear(0, &frames)).unwrap();
            let rows = block_on(session.rows()).unwrap();
            let off = largest_difference(&rows, &references.floats(&format!("{i}.encoder")));
            println!("{what}: rows of {file} within {off:.1e}");
            assert!(off <= TOLERANCE, "{what}: rows of {file} differ by {off}");
            let off = [true, false].map(|at_once| logits_off(&mut session, (&references, i), at_once));
            println!("{what}: logits of {file} within {off:?}");
            assert!(off.iter().all(|off| *off <= TOLERANCE), "{what}: logits of {file} differ by {off:?}");
            check_greedy(&mut session, (&references, i), &what);
        }
        common::assert_tested(&device);
    }
}

/// The largest difference of logits after each token of a case: each prefix in a pass, or token by token.
fn logits_off(session: &mut SpeechSession, (references, i): (&References, usize), at_once: bool) -> f32 {
    let ids = references.ids(&format!("{i}.ids"));
    let want = references.floats(&format!("{i}.logits"));
    let rows = want.chunks_exact(want.len() / ids.len());
    session.rewind(0, 0);
    let mut worst = 0.0f32;
    for (n, want) in rows.enumerate() {
        if at_once {
            session.rewind(0, 0);
        }
        let logits = block_on(session.logits(0, &ids[if at_once { 0 } else { n }..=n])).unwrap();
        worst = worst.max(largest_difference(&logits, want));
    }
    worst
}

fn highest(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

fn check_greedy(session: &mut SpeechSession, (references, i): (&References, usize), what: &str) {
    let want = references.ids(&format!("{i}.greedy.ids"));
    let margins = references.floats(&format!("{i}.greedy.margins"));
    let certain = margins.iter().position(|&margin| margin < 2.0 * TOLERANCE).unwrap_or(want.len());
    session.rewind(0, 0);
    let mut next = START;
    let found: Vec<u32> = (0..certain)
        .map(|_| {
            next = highest(&block_on(session.logits(0, &[next])).unwrap());
            next
        })
        .collect();
    assert!(certain > 4, "{what}: {certain} certain tokens");
    assert_eq!(found, want[..certain], "{what}: greedy tokens of case {i}");
}

#[test]
fn keys_of_half_precision_are_close() {
    let Some(folder) = folder() else { return };
    let references = References::open(&folder.join("refs.safetensors"));
    let model = SpeechModel::load(&common::cpu(), &folder, TranscriberOptions::default()).unwrap();
    let mut session = model.session(1).unwrap();
    block_on(session.hear(0, &frames(&samples(FILES[0])))).unwrap();
    let off = logits_off(&mut session, (&references, 0), false);
    assert!(off > 0.0 && off < 2e-2, "{off}");
}

#[test]
fn model_above_the_memory_limit_is_refused_before_its_upload() {
    let Some(folder) = folder() else { return };
    let device = common::cpu();
    let needed = SpeechModel::load(&device, &folder, exact()).unwrap().plan(1).unwrap().total_bytes();
    let limited = |bytes| TranscriberOptions { memory_limit: Some(bytes), ..exact() };
    SpeechModel::load(&device, &folder, limited(needed)).unwrap();
    let before = device.counters();
    let error = SpeechModel::load(&device, &folder, limited(needed - 1)).err().unwrap();
    assert!(matches!(error, Error::Memory { needed_bytes, .. } if needed_bytes == needed), "{error}");
    assert_eq!(device.counters(), before);
}

/// A part of the model, and how to change it.
type Change = (&'static str, fn(&mut SpeechFile));

#[test]
fn causal_encoders_and_other_scales_are_seen() {
    let Some(folder) = folder() else { return };
    let references = References::open(&folder.join("refs.safetensors"));
    let changes: [Change; 3] = [
        ("attention both ways", |file| file.config.encoder.causal = true),
        ("scale of the encoder", |file| file.config.encoder.blocks[0].attention.scale = 0.5),
        ("scale of the decoder", |file| file.config.decoder.blocks[0].attention.scale = 0.5),
    ];
    for (name, change) in changes {
        let mut file = SpeechFile::open(&folder).unwrap();
        change(&mut file);
        let model = SpeechModel::from_file(&common::cpu(), &file, exact()).unwrap();
        let mut session = model.session(1).unwrap();
        block_on(session.hear(0, &frames(&samples(FILES[0])))).unwrap();
        let off = logits_off(&mut session, (&references, 0), false);
        println!("without {name}: logits off by {off:.1e}");
        assert!(off > 2.0 * TOLERANCE, "without {name}: {off}");
    }
}

/// Neither retries nor silence: the weights are random.
fn greedy() -> TranscribeOptions {
    TranscribeOptions {
        language: Some("English".into()),
        temperatures: vec![0.0],
        max_no_speech: 2.0,
        ..TranscribeOptions::default()
    }
}

fn transcriber(device: &Device) -> Transcriber {
    Transcriber::load(device, folder().unwrap(), exact()).unwrap()
}

/// Sounds of the references one after the other: 3.0 and 1.3 seconds, twice.
fn long() -> Vec<f32> {
    let [first, second] = FILES.map(samples);
    [first.clone(), second.clone(), first, second].concat()
}

#[test]
fn models_that_arrive_in_pieces_give_equal_transcripts() {
    let Some(folder) = folder() else { return };
    let content = |name: &str| (name.to_owned(), std::fs::read(folder.join(name)).unwrap());
    let files = ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"].map(content);
    for device in devices() {
        let want = block_on(transcriber(&device).transcribe(&long(), &greedy())).unwrap();
        for (longest, tell_sizes) in [(1000, true), (usize::MAX, false)] {
            let size = |content: &[u8]| tell_sizes.then_some(content.len() as u64);
            let names = files.iter().map(|(name, content)| FileName { name: name.clone(), size: size(content) });
            let mut loader = Transcriber::loader(&device, names.collect(), exact()).unwrap();
            loader.set_folder("tiny");
            common::push_all(&mut loader, &files, &mut || longest).unwrap();
            let mut found = block_on(loader.finish()).unwrap();
            assert_eq!((found.name(), found.translates()), ("tiny", true));
            assert_eq!(block_on(found.transcribe(&long(), &greedy())).unwrap(), want);
        }
    }
}

/// Those of browsers are compared with the same file, in `tests/web/speech.test.mjs`.
#[test]
fn transcripts_are_the_ones_beside_the_model() {
    let Some(folder) = folder() else { return };
    let want: Json = serde_json::from_slice(&std::fs::read(folder.join("transcript.json")).unwrap()).unwrap();
    let options = TranscribeOptions { language: Some("en".into()), timestamps: false, words: true, ..greedy() };
    for device in devices() {
        let found = block_on(transcriber(&device).transcribe(&long(), &options)).unwrap();
        let segments = to_json(&found, Task::Transcribe)["segments"].take();
        for (found, want) in segments.as_array().unwrap().iter().zip(want["segments"].as_array().unwrap()) {
            for field in ["start", "end", "text", "tokens", "seek"] {
                assert_eq!(found[field], want[field], "{field} of {found}");
            }
            let timed = |word: &Json| [word["word"].clone(), word["start"].clone(), word["end"].clone()];
            let words = |of: &Json| of["words"].as_array().unwrap().iter().map(timed).collect::<Vec<_>>();
            assert_eq!(words(found), words(want));
        }
        assert_eq!(segments.as_array().unwrap().len(), want["segments"].as_array().unwrap().len());
        assert_eq!(found.text, want["text"].as_str().unwrap());
    }
}

#[test]
fn long_sounds_become_segments_in_order() {
    if folder().is_none() {
        return;
    }
    let sound = long();
    let seconds = sound.len() as f64 / f64::from(SAMPLE_RATE);
    let mut transcripts: Vec<Transcript> = Vec::new();
    for device in devices() {
        let (mut transcriber, mut windows) = (transcriber(&device), Vec::new());
        let mut heard = |most: usize| {
            windows.clear();
            let mut on_window = |segments: &[Segment]| {
                windows.push(segments.to_vec());
                if windows.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            };
            let transcript = block_on(transcriber.transcribe_with(&sound, &greedy(), &mut on_window)).unwrap();
            assert_eq!(windows.concat(), transcript.segments);
            (transcript, windows.clone())
        };
        let (transcript, all) = heard(usize::MAX);
        let (begun, first) = heard(1);
        assert!(all.len() > 1 && first == all[..1] && begun.segments.len() < transcript.segments.len());
        assert!(transcript.segments.len() > 1, "{transcript:?}");
        assert_eq!((transcript.language.as_str(), transcript.seconds), ("en", seconds));
        let mut last = (0.0, 0);
        for segment in &transcript.segments {
            assert!(segment.start >= last.0 && segment.end >= segment.start && segment.end <= seconds, "{segment:?}");
            assert!(segment.seek >= last.1 && !segment.text.is_empty(), "{segment:?}");
            last = (segment.start, segment.seek);
        }
        assert!(last.1 > 0, "one window: {transcript:?}");
        transcripts.push(transcript);
    }
    for (other, device) in transcripts.iter().zip(devices()).skip(1) {
        let texts = |transcript: &Transcript| transcript.text.clone();
        assert_eq!(texts(other), texts(&transcripts[0]), "{}", device.info().name);
    }
}

/// Tokens of a window by the published rules, written as conditions on each token.
fn by_rules(session: &mut SpeechSession, beginning: &[u32]) -> Vec<u32> {
    let is_time = |id: u32| id > NO_TIMESTAMPS;
    let mut chosen: Vec<u32> = Vec::new();
    let mut next = beginning.to_vec();
    session.rewind(0, 0);
    while chosen.len() < session.capacity() / 2 {
        let logits = block_on(session.logits(0, &next)).unwrap();
        let times: Vec<u32> = chosen.iter().copied().filter(|&id| is_time(id)).collect();
        let ends_pair = |n: usize| chosen.len() < n || is_time(chosen[chosen.len() - n]);
        let (has_time, is_pair) = (chosen.last().is_some_and(|&id| is_time(id)), ends_pair(2));
        let allowed = |id: u32| match id {
            0 | 1 | 3..=9 | 12 | 13 | NO_TIMESTAMPS => false,
            END => !chosen.is_empty(),
            id if !is_time(id) => !chosen.is_empty() && (!has_time || is_pair),
            id => {
                let least = times.last().map_or(0, |&last| if has_time && !is_pair { last } else { last + 1 });
                let most = if chosen.is_empty() { NO_TIMESTAMPS + 51 } else { u32::MAX };
                !(has_time && is_pair) && (least..=most).contains(&id)
            }
        };
        let all = (0..logits.len() as u32).filter(|&id| allowed(id));
        let (late, early): (Vec<u32>, Vec<u32>) = all.partition(|&id| is_time(id));
        let logit = |id: &u32| f64::from(logits[*id as usize]);
        let likeliest = |ids: &[u32]| ids.iter().copied().max_by(|a, b| logit(a).total_cmp(&logit(b)));
        let sum = late.iter().map(|id| logit(id).exp()).sum::<f64>().ln();
        let text = likeliest(&early);
        let id = match text {
            Some(id) if sum <= logit(&id) => match likeliest(&late) {
                Some(time) if logit(&time) > logit(&id) => time,
                _ => id,
            },
            _ => likeliest(&late).unwrap(),
        };
        if id == END {
            break;
        }
        chosen.push(id);
        next = vec![id];
    }
    chosen
}

#[test]
fn a_windows_tokens_follow_the_published_rules() {
    let Some(folder) = folder() else { return };
    let device = common::cpu();
    let model = SpeechModel::load(&device, &folder, exact()).unwrap();
    for file in FILES {
        let sound = samples(file);
        let mut session = model.session(1).unwrap();
        block_on(session.hear(0, &frames(&sound))).unwrap();
        let want = by_rules(&mut session, &[START, ENGLISH, 6]);
        let transcript = block_on(transcriber(&device).transcribe(&sound, &greedy())).unwrap();
        let first = |segments: &[Segment]| {
            let of_window = segments.iter().filter(|segment| segment.seek == 0);
            of_window.flat_map(|segment| segment.tokens.clone()).collect::<Vec<u32>>()
        };
        let found = first(&transcript.segments);
        println!("{file}: {} of {} tokens in segments", found.len(), want.len());
        assert!(found.len() > 2 && want.starts_with(&found), "{file}: {found:?}, expected {want:?}");
    }
}

#[test]
fn prompts_languages_and_tasks_change_what_the_decoder_reads() {
    if folder().is_none() {
        return;
    }
    let (device, sound) = (common::cpu(), samples(FILES[0]));
    let mut transcriber = transcriber(&device);
    let mut text = |options: TranscribeOptions| block_on(transcriber.transcribe(&sound, &options)).unwrap();
    let plain = text(greedy());
    let german = text(TranscribeOptions { language: Some("de".into()), ..greedy() });
    let translated = text(TranscribeOptions { task: Task::Translate, language: Some("de".into()), ..greedy() });
    let prompted = text(TranscribeOptions { prompt: Some("In the den".into()), ..greedy() });
    let untimed = text(TranscribeOptions { timestamps: false, ..greedy() });
    let drawn = |seed| TranscribeOptions { temperatures: vec![1.0], seed, ..greedy() };
    let drawn = [1, 1, 2].map(|seed| text(drawn(seed)).text);
    assert!(drawn[0] == drawn[1] && drawn[0] != drawn[2], "{drawn:?}");
    assert_eq!((german.language.as_str(), translated.language.as_str()), ("de", "en"));
    let of = |transcript: &Transcript| transcript.segments.first().map(|one| one.mean_log_probability.to_bits());
    let all = [&plain, &german, &translated, &prompted, &untimed].map(of);
    assert!((1..5).all(|i| !all[..i].contains(&all[i])), "{all:?}");
    assert!(untimed.segments.iter().all(|segment| segment.tokens.iter().all(|&id| id < NO_TIMESTAMPS)));
    let json = to_json(&plain, Task::Transcribe);
    assert_eq!(
        (&json["task"], &json["language"], &json["duration"]),
        (&"transcribe".into(), &"en".into(), &3.0.into())
    );
    assert_eq!(json["segments"].as_array().map(Vec::len), Some(plain.segments.len()));
    // Detected: one of the two that the model knows.
    let (code, share) = block_on(transcriber.detect_language(&sound)).unwrap().unwrap();
    assert!(["en", "de"].contains(&code.as_str()) && (0.5..=1.0).contains(&share), "{code} {share}");
    let detected = block_on(transcriber.transcribe(&sound, &TranscribeOptions { language: None, ..greedy() })).unwrap();
    assert_eq!(detected.language, code);
}

#[test]
fn words_are_the_text_in_order() {
    if folder().is_none() {
        return;
    }
    let mut found: Vec<Vec<Segment>> = Vec::new();
    for device in devices() {
        let options = TranscribeOptions { words: true, ..greedy() };
        let transcript = block_on(transcriber(&device).transcribe(&long(), &options)).unwrap();
        let mut last = 0.0;
        for segment in &transcript.segments {
            let times = segment.words.first().zip(segment.words.last()).map(|(first, last)| (first.start, last.end));
            assert_eq!(Some((segment.start, segment.end)), times, "{segment:?}");
            assert_eq!(segment.words.iter().map(|word| word.text.as_str()).collect::<String>(), segment.text);
            for word in &segment.words {
                assert!(word.start >= last && word.end >= word.start && word.end <= transcript.seconds, "{segment:?}");
                assert!((0.0..=1.0).contains(&word.probability) && word.probability > 0.0, "{segment:?}");
                last = word.start;
            }
        }
        assert!(transcript.segments.len() > 1 && last > 0.0, "{transcript:?}");
        assert!(transcript.segments.iter().any(|segment| segment.seek > 0), "one window: {transcript:?}");
        found.push(transcript.segments);
    }
    let times = |segments: &[Segment]| -> Vec<(f64, f64)> {
        segments.iter().flat_map(|segment| &segment.words).map(|word| (word.start, word.end)).collect()
    };
    assert!(found.iter().all(|segments| times(segments) == times(&found[0])));
    // Heads that the model names in place of the upper layer's.
    let mut file = SpeechFile::open(folder().unwrap()).unwrap();
    file.generation.alignment_heads = vec![[0, 2]];
    let mut other = Transcriber::from_file(&common::cpu(), file, exact()).unwrap();
    let other = block_on(other.transcribe(&long(), &TranscribeOptions { words: true, ..greedy() })).unwrap();
    assert_ne!(times(&other.segments), times(&found[0]));
}

/// `bridge.json`: the text, and words with their times by faster-whisper.
#[test]
fn words_have_the_times_of_faster_whisper() {
    let Some(data) = common::data(&["whisper-tiny.en", "speech"]) else { return };
    let want: Json = serde_json::from_slice(&std::fs::read(data.join("speech/bridge.json")).unwrap()).unwrap();
    let sound = std::fs::read(data.join("speech/bridge.wav")).unwrap();
    let sound = Sound::decode(&sound, &SoundLimits::default()).unwrap();
    let folder = data.join("whisper-tiny.en");
    let mut transcriber = Transcriber::load(&common::cpu(), folder, TranscriberOptions::default()).unwrap();
    let options = TranscribeOptions { words: true, ..TranscribeOptions::default() };
    let transcript = block_on(transcriber.transcribe(sound.samples(), &options)).unwrap();
    assert_eq!(transcript.text, want["text"]);
    let words: Vec<_> = transcript.segments.iter().flat_map(|segment| &segment.words).collect();
    let want = want["words"].as_array().unwrap();
    assert_eq!(words.len(), want.len(), "{words:?}");
    for (word, want) in words.iter().zip(want) {
        let [start, end] = [0, 1].map(|i| want[i].as_f64().unwrap());
        println!("{} {:.2} to {:.2}, theirs {start} to {end}", word.text, word.start, word.end);
        assert_eq!(word.text.trim(), want[2]);
        assert!((word.start - start).abs() < 0.1 && (word.end - end).abs() < 0.1, "{word:?}, expected {want}");
    }
}

#[test]
fn silence_and_sounds_of_no_length_are_empty_transcripts() {
    if folder().is_none() {
        return;
    }
    let mut transcriber = transcriber(&common::cpu());
    for silence in [vec![], vec![0.0], vec![0.0; 5 * 16_000], vec![1e-6; 100]] {
        let found = block_on(transcriber.transcribe(&silence, &TranscribeOptions::default())).unwrap();
        assert_eq!((found.text.as_str(), found.segments.len(), found.language.as_str()), ("", 0, ""));
        assert_eq!(block_on(transcriber.detect_language(&silence)).unwrap(), None);
    }
    // A model that is sure that nobody speaks.
    let unsure = TranscribeOptions { max_no_speech: 0.0, min_log_probability: 0.0, ..greedy() };
    assert_eq!(block_on(transcriber.transcribe(&long(), &unsure)).unwrap().text, "");
    let one = block_on(transcriber.transcribe(&[0.5], &greedy())).unwrap();
    assert!(one.segments.iter().all(|segment| segment.end <= 1.0 / 16_000.0), "{one:?}");
}

#[test]
fn wrong_input_is_refused_by_name() {
    let Some(folder) = folder() else { return };
    let device = common::cpu();
    let mut transcriber = transcriber(&device);
    let mut refused = |samples: &[f32], options: TranscribeOptions| {
        block_on(transcriber.transcribe(samples, &options)).unwrap_err().to_string()
    };
    let error = refused(&[0.1, f32::NAN], greedy());
    assert_eq!(error, "sound: `samples` is NaN at sample 1, expected finite numbers");
    let error = refused(&[0.1], TranscribeOptions { language: Some("klingon".into()), ..greedy() });
    let want = "option language is klingon, expected a code or name of a language that the model knows: en, de";
    assert_eq!(error, want);
    let error = refused(&[0.1], TranscribeOptions { temperatures: vec![], ..greedy() });
    assert_eq!(error, "option temperatures is [], expected one or more from 0 to 2");
    let mut session = transcriber.model().session(1).unwrap();
    assert!(matches!(block_on(session.hear(0, &[0.0])), Err(Error::Operand { operand: "frames", .. })));
    block_on(session.hear(0, &vec![0.0; BANDS * FRAMES as usize])).unwrap();
    assert!(matches!(block_on(session.logits(0, &[293])), Err(Error::Operand { operand: "ids", .. })));
    assert!(matches!(block_on(session.logits(0, &[1; 65])), Err(Error::ContextFull { needed: 65, capacity: 64 })));
    let mut inspected = |heads: &[[u32; 2]], n_rows| {
        block_on(session.attention_weights(0, &[1], (heads, n_rows), &mut |_| {})).unwrap_err().to_string()
    };
    assert!(inspected(&[[2, 0]], 1).contains("`heads` is [2, 0], expected layers below 2 and heads below 3"));
    assert!(inspected(&[[0, 3]], 1).contains("`heads` is [0, 3]"));
    assert!(inspected(&[[0, 0]], 151).contains("`n_rows` is 151, expected 1 to 150"));
    // A text model's loader says what takes a speech model, and the reverse.
    let error = ModelFile::open(&folder).err().unwrap().to_string();
    assert!(error.contains("`whisper`, a speech model") && error.contains("tilewright transcribe"), "{error}");
    let text_model = common::find_data("tiny-random/qwen3".as_ref()).unwrap();
    let error = SpeechFile::open(text_model).err().unwrap().to_string();
    assert!(error.contains("model_type is `qwen3`") && error.contains("supported: whisper"), "{error}");
    let error = SpeechFile::open("no-such-folder").err().unwrap();
    assert!(matches!(error, Error::Io { .. }), "{error}");
}

#[test]
fn planned_memory_is_what_a_transcript_allocates() {
    let Some(folder) = folder() else { return };
    let device = Device::cpu();
    let before = device.counters();
    let model = SpeechModel::load(&device, &folder, exact()).unwrap();
    let planned = model.plan(1).unwrap().total_bytes();
    let mut session = model.session(1).unwrap();
    block_on(session.hear(0, &frames(&samples(FILES[0])))).unwrap();
    block_on(session.logits(0, &[START; 64])).unwrap();
    block_on(session.logits(0, &[])).unwrap_err();
    session.rewind(0, 0);
    block_on(session.logits(0, &[START])).unwrap();
    let allocated = (device.counters() - before).bytes_allocated;
    println!("planned {planned} bytes, allocated {allocated}; dispatches {:?}", session.n_dispatches().unwrap());
    assert!(allocated.abs_diff(planned) * 10 <= planned, "{allocated}, planned {planned}");
}
