//! Sound files.

use std::sync::OnceLock;

use tilewright::sound::{Sound, SoundLimits};

use super::{common, fuzz, mutate};
use crate::allocator::measure;

/// The beginning of a WAV file, as if it were all.
fn file() -> &'static [u8] {
    static FILE: OnceLock<Vec<u8>> = OnceLock::new();
    FILE.get_or_init(|| {
        let path = common::find_data("tiny-random-sound/short.wav".as_ref()).expect("committed test data");
        let mut bytes = std::fs::read(path).unwrap();
        bytes.truncate(1044);
        bytes[4..8].copy_from_slice(&1036u32.to_le_bytes());
        bytes[40..44].copy_from_slice(&1000u32.to_le_bytes());
        bytes
    })
}

#[test]
fn sound_decode() {
    fuzz("sound_decode", 2000, |rng| {
        let mut bytes = file().to_vec();
        // Most of what decides is at the beginning.
        let end = if rng.below(4) == 0 { bytes.len() } else { 48 };
        mutate::bytes(rng, &mut bytes, end);
        let (sound, asked) = measure(|| Sound::decode(&bytes, &SoundLimits::default()));
        assert!(asked.peak <= 16 * bytes.len() + (1 << 16), "{asked:?} for {} bytes", bytes.len());
        match sound {
            Ok(sound) => {
                assert!(sound.samples().len() <= bytes.len() && sound.samples().iter().all(|value| value.is_finite()));
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
