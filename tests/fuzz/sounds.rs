//! Sound files.

use std::sync::OnceLock;

use tilewright::sound::{Sound, SoundLimits};

use super::{common, fuzz, mutate};
use crate::allocator::measure;

/// Seconds of a fuzzed sound, and bytes for all else: tables of decoders and resamplers, packets.
const MAX_SECONDS: f64 = 2.0;
const MAX_EXTRA: usize = 160 << 20;

/// Files of all formats, and the beginning of a WAV file, as if it were all.
fn files() -> &'static [Vec<u8>] {
    static FILES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    FILES.get_or_init(|| {
        let folder = common::find_data("sounds".as_ref()).expect("committed test data");
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|ending| ending != "wav" && ending != "sh"));
        paths.sort();
        let mut files: Vec<_> = paths.into_iter().map(|path| std::fs::read(path).unwrap()).collect();
        let wav = common::find_data("tiny-random-sound/short.wav".as_ref()).expect("committed test data");
        let mut wav = std::fs::read(wav).unwrap();
        wav.truncate(1044);
        wav[4..8].copy_from_slice(&1036u32.to_le_bytes());
        wav[40..44].copy_from_slice(&1000u32.to_le_bytes());
        files.push(wav);
        files
    })
}

/// Gives each page of an Ogg file its checksum, without which none is read.
fn mend_pages(bytes: &mut [u8]) {
    let starts: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(b"OggS")).collect();
    for (i, &start) in starts.iter().enumerate() {
        let end = starts.get(i + 1).map_or(bytes.len(), |&next| next);
        let page = &mut bytes[start..end];
        if page.len() < 27 {
            return;
        }
        page[22..26].fill(0);
        let sum =
            page.iter().fold(0u32, |sum, &byte| {
                (0..8).fold(sum ^ (u32::from(byte) << 24), |sum, _| {
                    if sum >> 31 == 1 { (sum << 1) ^ 0x04c1_1db7 } else { sum << 1 }
                })
            });
        page[22..26].copy_from_slice(&sum.to_le_bytes());
    }
}

#[test]
fn sound_decode() {
    fuzz("sound_decode", 1500, |rng| {
        let mut bytes = files()[rng.below(files().len())].clone();
        // Most of what decides is at the beginning.
        let end = if rng.below(2) == 0 { bytes.len() } else { 64 };
        mutate::bytes(rng, &mut bytes, end);
        mend_pages(&mut bytes);
        let limits = SoundLimits { max_seconds: MAX_SECONDS, ..SoundLimits::default() };
        let (sound, asked) = measure(|| Sound::decode_at(&bytes, 16_000, &limits));
        assert!(asked.peak <= MAX_EXTRA, "{asked:?} for {} bytes", bytes.len());
        match sound {
            Ok(sound) => {
                assert!(sound.seconds() <= MAX_SECONDS + 0.001, "{} s", sound.seconds());
                assert!(sound.samples().iter().all(|value| value.is_finite()));
                true
            }
            Err(error) => {
                let message = error.to_string();
                assert!(!message.is_empty() && message.len() < 2000 && !message.contains('\0'), "{message}");
                false
            }
        }
    });
}
