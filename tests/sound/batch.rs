//! Windows that are decoded side by side, next to the same windows by themselves.

use std::ops::Range;

use super::*;

/// Frames of a piece: a sound, then silence.
const PIECE: usize = 260;
const SOUND: usize = 230;
const HOP: usize = 160;
const N_PIECES: usize = 6;

/// Six pieces. Each window ends in the silence of one, 0.1 s before its end.
fn pieces() -> Vec<f32> {
    let all = long();
    let mut sound = Vec::new();
    for i in 0..N_PIECES {
        let from = i * 16_000;
        // Nowhere as quiet as the silence.
        let noisy = all[from..from + SOUND * HOP].iter().enumerate();
        sound.extend(noisy.map(|(at, sample)| sample + if at % 2 == 0 { 0.01 } else { -0.01 }));
        sound.resize((i + 1) * PIECE * HOP, 0.0);
    }
    sound
}

/// Frames of each window.
fn windows() -> Vec<Range<usize>> {
    let cuts: Vec<usize> = (1..N_PIECES).map(|i| i * PIECE - 10).collect();
    let ends = cuts.iter().copied().chain([N_PIECES * PIECE]);
    [0].into_iter().chain(cuts.iter().copied()).zip(ends).map(|(start, end)| start..end).collect()
}

fn of_batch(batch: usize) -> TranscribeOptions {
    TranscribeOptions { batch_size: batch, ..greedy() }
}

/// Segments of each window, in order.
fn heard(transcriber: &mut Transcriber, sound: &[f32], options: &TranscribeOptions) -> Vec<Vec<Segment>> {
    let mut windows = Vec::new();
    let mut on_window = |segments: &[Segment]| {
        windows.push(segments.to_vec());
        ControlFlow::Continue(())
    };
    let transcript = block_on(transcriber.transcribe_with(sound, options, &mut on_window)).unwrap();
    assert_eq!(windows.concat(), transcript.segments);
    windows
}

/// The segments of each window as a sound of its own, whose session has no other. `options` of the `i`-th by its number.
fn alone(
    transcriber: &mut Transcriber,
    sound: &[f32],
    options: impl Fn(usize) -> TranscribeOptions,
) -> Vec<Vec<Segment>> {
    let one = |(i, frames): (usize, Range<usize>)| {
        let found = heard(transcriber, &sound[frames.start * HOP..frames.end * HOP], &options(i));
        assert_eq!(found.len(), 1);
        found.concat()
    };
    windows().into_iter().enumerate().map(one).collect()
}

/// What does not depend on where a window is.
fn chosen(segments: &[Segment]) -> Vec<(&[u32], [u32; 3])> {
    let of =
        |segment: &Segment| [segment.mean_log_probability, segment.no_speech, segment.temperature].map(f32::to_bits);
    segments.iter().map(|segment| (&segment.tokens[..], of(segment))).collect()
}

fn tokens(windows: &[Vec<Segment>]) -> Vec<Vec<&[u32]>> {
    windows.iter().map(|segments| segments.iter().map(|segment| &segment.tokens[..]).collect()).collect()
}

#[test]
fn windows_of_a_batch_have_the_tokens_they_have_alone() {
    if folder().is_none() {
        return;
    }
    let sound = pieces();
    let cases = devices().into_iter().flat_map(|device| [true, false].map(|timestamps| (device.clone(), timestamps)));
    for (device, timestamps) in cases {
        let what = format!("{} ({}), timestamps {timestamps}", device.info().name, device.tier().name());
        let of_batch = |batch| TranscribeOptions { timestamps, ..of_batch(batch) };
        let mut transcriber = transcriber(&device);
        let alone = alone(&mut transcriber, &sound, |_| of_batch(2));
        // Two passes: four windows, then two.
        let found = heard(&mut transcriber, &sound, &of_batch(4));
        assert_eq!(found.len(), N_PIECES, "{what}");
        assert_eq!(tokens(&found), tokens(&alone), "{what}");
        for ((found, alone), frames) in found.iter().zip(&alone).zip(windows()) {
            let start = frames.start as f64 / 100.0;
            for (found, alone) in found.iter().zip(alone) {
                assert_eq!(found.seek as usize, frames.start, "{what}");
                let moved = [found.start - alone.start, found.end - alone.end];
                assert!(moved.iter().all(|moved| (moved - start).abs() < 1e-6), "{what}: {found:?}, alone {alone:?}");
                let off = (found.mean_log_probability - alone.mean_log_probability).abs();
                assert!(off < 1e-4, "{what}: {off}");
            }
        }
        if !device.is_gpu() {
            assert!(found.iter().zip(&alone).all(|(found, alone)| chosen(found) == chosen(alone)), "{what}");
        }
        // Beside other windows, and in another place.
        let others = heard(&mut transcriber, &sound[PIECE * HOP..], &of_batch(4));
        assert_eq!(others.len(), N_PIECES - 1, "{what}");
        for (found, other) in found[2..].iter().zip(&others[1..]) {
            assert_eq!(chosen(found), chosen(other), "{what}");
        }
        let texts: Vec<String> = found.iter().map(|it| it.iter().map(|one| one.text.as_str()).collect()).collect();
        let n_different = texts.iter().enumerate().filter(|&(i, text)| !texts[..i].contains(text)).count();
        assert!(n_different > 2, "{what}: {texts:?}");
        common::assert_tested(&device);
    }
}

#[test]
fn each_window_of_a_batch_is_judged_by_itself() {
    if folder().is_none() {
        return;
    }
    let sound = pieces();
    let mut transcriber = transcriber(&common::cpu());
    let plain = heard(&mut transcriber, &sound, &of_batch(4));
    let means: Vec<f32> = plain.iter().map(|segments| segments[0].mean_log_probability).collect();
    let mut sorted = means.clone();
    sorted.sort_unstable_by(f32::total_cmp);
    let threshold = (sorted[2] + sorted[3]) / 2.0;
    let is_wrong: Vec<bool> = means.iter().map(|&mean| mean < threshold).collect();
    assert_eq!(is_wrong.iter().filter(|&&wrong| wrong).count(), 3, "{means:?}");
    // Again at a higher temperature, with the numbers of its place in the sound.
    let retried = |batch| TranscribeOptions {
        temperatures: vec![0.0, 1.0],
        min_log_probability: threshold,
        max_compression_ratio: f32::INFINITY,
        seed: 7,
        ..of_batch(batch)
    };
    let found = heard(&mut transcriber, &sound, &retried(4));
    let alone = alone(&mut transcriber, &sound, |i| TranscribeOptions { seed: 7 + i as u64, ..retried(2) });
    for (i, (found, alone)) in found.iter().zip(&alone).enumerate() {
        assert_eq!(chosen(found), chosen(alone), "window {i}");
        if is_wrong[i] {
            assert!(found.iter().all(|segment| segment.temperature == 1.0), "window {i}");
            assert_ne!(chosen(found), chosen(&plain[i]), "window {i}");
        } else {
            assert_eq!(chosen(found), chosen(&plain[i]), "window {i}");
        }
    }
    // Nobody speaks where the model is not sure of its text.
    let silent = TranscribeOptions { max_no_speech: 0.0, min_log_probability: threshold, ..of_batch(4) };
    let found = heard(&mut transcriber, &sound, &silent);
    for (i, found) in found.iter().enumerate() {
        let want = if is_wrong[i] { &[][..] } else { &plain[i][..] };
        assert_eq!(found, want, "window {i}");
    }
    // A caller who stops has the windows up to this one, and the prompt is every window's.
    let mut n = 0;
    let mut on_window = |_: &[Segment]| {
        n += 1;
        if n < 2 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    };
    let begun = block_on(transcriber.transcribe_with(&sound, &of_batch(4), &mut on_window)).unwrap();
    assert_eq!(begun.segments, plain[..2].concat());
    let prompted = |batch| TranscribeOptions { prompt: Some("In the den".into()), ..of_batch(batch) };
    let found = heard(&mut transcriber, &sound, &prompted(4));
    let alone = self::alone(&mut transcriber, &sound, |_| prompted(2));
    assert!((0..N_PIECES).all(|i| chosen(&found[i]) == chosen(&alone[i]) && chosen(&found[i]) != chosen(&plain[i])));
}

#[test]
fn words_of_a_batch_have_the_times_they_have_alone() {
    if folder().is_none() {
        return;
    }
    let sound = pieces();
    let with_words = |batch| TranscribeOptions { words: true, timestamps: false, ..of_batch(batch) };
    for device in devices() {
        let what = format!("{} ({})", device.info().name, device.tier().name());
        let mut transcriber = transcriber(&device);
        let found = heard(&mut transcriber, &sound, &with_words(4));
        let alone = alone(&mut transcriber, &sound, |_| with_words(2));
        let words = |segments: &[Segment]| {
            let words = segments.iter().flat_map(|segment| &segment.words);
            words.map(|word| (word.text.clone(), word.start, word.end)).collect::<Vec<_>>()
        };
        // The same windows in other places.
        let others = heard(&mut transcriber, &sound, &with_words(2));
        assert!(found.iter().zip(&others).all(|(found, other)| words(found) == words(other)), "{what}");
        let mut n = 0;
        for ((found, alone), frames) in found.iter().zip(&alone).zip(windows()) {
            let (found, alone, start) = (words(found), words(alone), frames.start as f64 / 100.0);
            assert_eq!(found.len(), alone.len(), "{what}");
            // The first two words depend on the pause before them.
            for (found, alone) in found.iter().zip(&alone).skip(2) {
                let moved = [found.1 - alone.1, found.2 - alone.2];
                let is_there = moved.iter().all(|moved| (moved - start).abs() < 1e-6);
                assert!(found.0 == alone.0 && is_there, "{what}: {found:?}, alone {alone:?} and from {start}");
                n += 1;
            }
        }
        assert!(n > 4, "{what}: {n} words");
    }
}

#[test]
fn a_step_of_a_batch_has_the_dispatches_of_one_windows() {
    let Some(folder) = folder() else { return };
    let first = frames(&samples(FILES[0]));
    for device in devices() {
        let what = format!("{} ({})", device.info().name, device.tier().name());
        let model = SpeechModel::load(&device, &folder, exact()).unwrap();
        let planned = [1, 8].map(|n| model.session(n).unwrap().n_dispatches().unwrap());
        println!("{what}: {:?} dispatches", planned[0]);
        assert_eq!(planned[0], planned[1], "{what}");
    }
    // What is run, and what is allocated.
    let device = Device::cpu();
    let before = device.counters();
    let model = SpeechModel::load(&device, &folder, exact()).unwrap();
    let mut session = model.session(3).unwrap();
    let planned = model.plan(3).unwrap().total_bytes();
    for window in 0..3 {
        block_on(session.hear(window, &first)).unwrap();
    }
    block_on(session.logits(1, &[START; 64])).unwrap();
    session.rewind(1, 0);
    let mut counted = |tokens: &[(usize, u32)]| {
        let before = device.counters().dispatches;
        block_on(session.logits_of_each(tokens)).unwrap();
        device.counters().dispatches - before
    };
    let (of_three, of_one) = (counted(&[(0, START), (1, START), (2, START)]), counted(&[(1, START)]));
    assert_eq!(of_three, of_one);
    assert_eq!(of_one, session.n_dispatches().unwrap()[1] as u64);
    assert_eq!([0, 1, 2].map(|window| session.n_tokens(window)), [1, 2, 1]);
    let allocated = (device.counters() - before).bytes_allocated;
    assert!(allocated.abs_diff(planned) * 10 <= planned, "{allocated}, planned {planned}");
}

#[test]
fn windows_that_a_session_does_not_have_are_refused() {
    let Some(folder) = folder() else { return };
    let device = common::cpu();
    let model = SpeechModel::load(&device, &folder, exact()).unwrap();
    for n in [0, 65] {
        let error = model.session(n).err().unwrap().to_string();
        assert!(error.contains(&format!("`n_windows` is {n}, expected 1 to 64")), "{error}");
    }
    let mut session = model.session(2).unwrap();
    let first = frames(&samples(FILES[0]));
    let error = block_on(session.hear(2, &first)).unwrap_err().to_string();
    assert!(error.contains("`window` is 2, expected below 2"), "{error}");
    let mut refused = |tokens: &[(usize, u32)]| block_on(session.logits_of_each(tokens)).unwrap_err().to_string();
    assert!(refused(&[(0, START), (2, START)]).contains("`window` is 2, expected below 2"));
    assert!(refused(&[(1, START), (1, START)]).contains("`window` is 1 twice, expected each window once"));
    assert!(refused(&[(0, START), (1, 293)]).contains("`ids` is 293"));
    // None of them were added.
    assert_eq!([0, 1].map(|window| session.n_tokens(window)), [0, 0]);
    let mut transcriber = transcriber(&device);
    for batch in [0, 65] {
        let error = block_on(transcriber.transcribe(&[0.1], &of_batch(batch))).unwrap_err().to_string();
        assert_eq!(error, format!("option batch_size is {batch}, expected 1 to 64"));
    }
    // The limit holds for a batch's session, too; that of a short sound has no more windows than it.
    let limit = model.plan(1).unwrap().total_bytes();
    let options = TranscriberOptions { memory_limit: Some(limit), ..exact() };
    let mut limited = Transcriber::load(&device, &folder, options).unwrap();
    let error = block_on(limited.transcribe(&pieces(), &of_batch(2))).unwrap_err();
    let needed = model.plan(2).unwrap().total_bytes();
    assert!(matches!(error, Error::Memory { needed_bytes, .. } if needed_bytes == needed), "{error}");
    assert!(error.to_string().contains("smaller batch"), "{error}");
    block_on(limited.transcribe(&samples(FILES[0]), &of_batch(2))).unwrap();
}

/// A real model, of whose windows of 30 s a batch leaves out nothing.
#[test]
fn a_batch_hears_what_a_sound_says() {
    let Some(data) = common::data(&["whisper-tiny.en", "speech"]) else { return };
    let want: Json = serde_json::from_slice(&std::fs::read(data.join("speech/bridge.json")).unwrap()).unwrap();
    let sound = std::fs::read(data.join("speech/bridge.wav")).unwrap();
    let sound = Sound::decode(&sound, &SoundLimits::default()).unwrap();
    // Over a minute of the same sentence, with pauses.
    let n = 62 * SAMPLE_RATE as usize / (sound.samples().len() + 8000);
    let mut long = Vec::new();
    for _ in 0..n {
        long.extend(sound.samples());
        long.resize(long.len() + 8000, 0.0);
    }
    let device = common::cpu();
    let mut transcriber =
        Transcriber::load(&device, data.join("whisper-tiny.en"), TranscriberOptions::default()).unwrap();
    // What is repeated is no sign of a wrong text here.
    let options = TranscribeOptions { batch_size: 4, temperatures: vec![0.0], ..TranscribeOptions::default() };
    let transcript = block_on(transcriber.transcribe(&long, &options)).unwrap();
    let plain = |text: &str| -> Vec<String> {
        let letters = text.to_lowercase().replace(|c: char| !c.is_alphabetic() && c != ' ', "");
        letters.split_whitespace().map(str::to_owned).collect()
    };
    let sentence = plain(want["text"].as_str().unwrap());
    let (found, want) = (plain(&transcript.text), vec![sentence; n].concat());
    let n_equal = found.iter().zip(&want).filter(|(found, want)| found == want).count();
    println!("{n} sentences, {n_equal} of {} words: {}", want.len(), transcript.text);
    // Nothing is left out. Without temperatures, the model may say once more what it said nine times.
    assert!(n_equal == want.len() && found.len() <= want.len() + want.len() / n, "{}", transcript.text);
}
