//! Reading sound files: WAV with integers of 8 to 32 bits or floats. Formats are known by their first bytes alone.

use std::io::{Cursor, ErrorKind};

use hound::{SampleFormat, WavReader, WavSpec};

use super::{MAX_RATE, Sound};
use crate::error::Error;
use crate::formats::named_by_signature;

/// Other formats, see [`named_by_signature`].
const OTHERS: [(usize, &[u8], &str); 9] = [
    (0, b"ID3", "an MP3 file"),
    (0, b"\xff\xfb", "an MP3 file"),
    (0, b"\xff\xf3", "an MP3 file"),
    (0, b"\xff\xf2", "an MP3 file"),
    (0, b"fLaC", "a FLAC file"),
    (0, b"OggS", "an Ogg file"),
    (4, b"ftyp", "an MPEG-4 file"),
    (0, b"\x1a\x45\xdf\xa3", "a WebM or Matroska file"),
    (0, b"FORM", "an AIFF file"),
];

/// Limits on files, checked before samples are decoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoundLimits {
    /// Bytes of the file.
    pub max_bytes: u64,
    /// Seconds of sound.
    pub max_seconds: f64,
}

impl Default for SoundLimits {
    /// 4 GiB and 4 hours.
    fn default() -> SoundLimits {
        SoundLimits { max_bytes: 4 << 30, max_seconds: 4.0 * 3600.0 }
    }
}

impl Sound {
    /// Decodes a WAV file: PCM of 8, 16, 24 or 32 bits, or floats of 32 bits. Several channels become their mean.
    ///
    /// # Errors
    /// [`Error::Format`] if the file is of another format, which it names, or broken; [`Error::Truncated`] if it ends
    /// early; [`Error::Unsupported`] if it exceeds a limit or has another kind of samples.
    pub fn decode(bytes: &[u8], limits: &SoundLimits) -> Result<Sound, Error> {
        if !(bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WAVE")) {
            return Err(other_format(bytes));
        }
        let refused = |field: &str, found: String, supported: String| Error::Unsupported {
            format: "wav",
            field: field.into(),
            found,
            supported,
        };
        if bytes.len() as u64 > limits.max_bytes {
            let supported = format!("at most {} bytes; cut the sound into parts", limits.max_bytes);
            return Err(refused("size", format!("{} bytes", bytes.len()), supported));
        }
        let mended = with_length(bytes);
        let bytes = mended.as_deref().unwrap_or(bytes);
        let mut reader = WavReader::new(Cursor::new(bytes)).map_err(|error| broken(error, bytes.len()))?;
        let WavSpec { channels, sample_rate, bits_per_sample, sample_format } = reader.spec();
        if !(1..=MAX_RATE).contains(&sample_rate) {
            return Err(refused("sample rate", sample_rate.to_string(), format!("1 to {MAX_RATE}")));
        }
        let seconds = f64::from(reader.duration()) / f64::from(sample_rate);
        if seconds > limits.max_seconds {
            let supported = format!("at most {} seconds; cut the sound into parts", limits.max_seconds);
            return Err(refused("length", format!("{seconds:.0} seconds"), supported));
        }
        let needed_bytes = u64::from(reader.len()) * u64::from(bits_per_sample.div_ceil(8));
        if needed_bytes > bytes.len() as u64 {
            return Err(truncated(needed_bytes, bytes.len()));
        }
        let samples: Result<Vec<f32>, hound::Error> = match sample_format {
            SampleFormat::Float => reader.samples::<f32>().collect(),
            SampleFormat::Int => {
                let scale = 1.0 / (1u64 << bits_per_sample.clamp(1, 32).saturating_sub(1)) as f32;
                reader.samples::<i32>().map(|sample| Ok(sample? as f32 * scale)).collect()
            }
        };
        Sound::new(sample_rate, channels.into(), &samples.map_err(|error| broken(error, bytes.len()))?)
    }
}

/// A file that was written to a pipe, with the lengths that its writer did not know: all that is there.
fn with_length(bytes: &[u8]) -> Option<Vec<u8>> {
    const UNKNOWN: [u8; 4] = [0xff; 4];
    /// Where the samples begin at most.
    const MAX_HEAD: usize = 4096;
    if bytes.get(4..8) != Some(&UNKNOWN) || bytes.get(12..16) != Some(b"fmt ") {
        return None;
    }
    let frame_bytes = usize::from(u16::from_le_bytes(bytes.get(32..34)?.try_into().ok()?)).max(1);
    let head = bytes.get(..bytes.len().min(MAX_HEAD))?;
    let at = head.windows(8).position(|window| window.starts_with(b"data") && window.ends_with(&UNKNOWN))? + 8;
    let len = u32::try_from((bytes.len() - at) / frame_bytes * frame_bytes).ok()?;
    let mut mended = bytes.to_vec();
    mended[at - 4..at].copy_from_slice(&len.to_le_bytes());
    Some(mended)
}

fn truncated(needed_bytes: u64, found_bytes: usize) -> Error {
    Error::Truncated { part: "its sound".into(), needed_bytes, found_bytes: found_bytes as u64 }
}

/// The error for a file that is no WAV file, by its first bytes.
fn other_format(bytes: &[u8]) -> Error {
    let found = match named_by_signature(bytes, &OTHERS) {
        Some(name) => name.into(),
        None if bytes.is_empty() => "an empty file".into(),
        None => "no sound in a known format".to_owned(),
    };
    let expected = "a WAV file; `ffmpeg -i FILE -ar 16000 -ac 1 sound.wav` converts others".into();
    Error::Format { format: "sound", field: "content".into(), offset: 0, expected, found }
}

fn broken(error: hound::Error, n_bytes: usize) -> Error {
    match error {
        hound::Error::IoError(error) if error.kind() == ErrorKind::UnexpectedEof => {
            truncated(n_bytes as u64 + 1, n_bytes)
        }
        hound::Error::FormatError("Failed to read enough bytes.") => truncated(n_bytes as u64 + 1, n_bytes),
        hound::Error::Unsupported | hound::Error::InvalidSampleFormat | hound::Error::TooWide => Error::Unsupported {
            format: "wav",
            field: "samples".into(),
            found: "of another kind".into(),
            supported: "PCM of 8, 16, 24 or 32 bits, or floats of 32 bits".into(),
        },
        other => Error::Format {
            format: "wav",
            field: "content".into(),
            offset: 0,
            expected: "a header and samples".into(),
            found: other.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A WAV file of these chunks' values: format tag, channels, rate, bits, and the samples' bytes.
    fn wav([tag, channels, bits]: [u16; 3], rate: u32, data: &[u8]) -> Vec<u8> {
        let frame = channels * bits.div_ceil(8);
        let mut bytes = b"RIFF".to_vec();
        bytes.extend((36 + data.len() as u32).to_le_bytes());
        bytes.extend(b"WAVEfmt ");
        bytes.extend(16u32.to_le_bytes());
        [tag, channels].iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        [rate, rate * u32::from(frame)].iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        [frame, bits].iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        bytes.extend(b"data");
        bytes.extend((data.len() as u32).to_le_bytes());
        bytes.extend(data);
        bytes
    }

    fn decoded(bytes: &[u8]) -> Result<Sound, String> {
        Sound::decode(bytes, &SoundLimits::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn all_kinds_of_samples_have_the_same_values() {
        let values = [0.5f32, -0.25, 0.0, -1.0];
        let bytes = |n: usize| -> Vec<u8> {
            let scale = 2f64.powi(8 * n as i32 - 1);
            let of = |value: &f32| ((f64::from(*value) * scale) as i64).to_le_bytes()[..n].to_vec();
            values.iter().flat_map(of).collect()
        };
        let eight: Vec<u8> = values.iter().map(|value| (value * 128.0 + 128.0) as u8).collect();
        let floats: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        for (tag, bits, data) in
            [(1, 8, eight), (1, 16, bytes(2)), (1, 24, bytes(3)), (1, 32, bytes(4)), (3, 32, floats)]
        {
            let sound = decoded(&wav([tag, 1, bits], 8000, &data)).unwrap();
            assert_eq!((sound.rate(), sound.samples()), (8000, &values[..]), "{bits} bits");
        }
        let stereo = decoded(&wav([1, 2, 16], 192_000, &bytes(2))).unwrap();
        assert_eq!((stereo.rate(), stereo.samples()), (192_000, &[0.125, -0.5][..]));
    }

    #[test]
    fn broken_files_are_refused() {
        let whole = wav([1, 1, 16], 16000, &[0; 100]);
        assert!(decoded(&whole).is_ok());
        for end in (12..whole.len()).step_by(3) {
            let error = decoded(&whole[..end]).unwrap_err();
            assert!(error.contains("ends after") || error.contains("wav"), "{end}: {error}");
        }
        let error = decoded(&whole[..90]).unwrap_err();
        assert_eq!(error, "the file ends after 90 bytes, but its sound needs at least 100: download or save it again");
        let floats = wav([3, 1, 32], 16000, &f32::NAN.to_le_bytes());
        assert_eq!(decoded(&floats).unwrap_err(), "sound: `samples` is NaN at sample 0, expected finite numbers");
        assert!(decoded(&wav([1, 1, 16], 0, &[0; 4])).unwrap_err().contains("sample rate"));
        assert!(decoded(&wav([7, 1, 8], 8000, &[0; 4])).unwrap_err().contains("PCM of 8, 16, 24 or 32 bits"));
    }

    #[test]
    fn files_of_a_pipe_are_read_to_their_end() {
        let mut bytes = wav([1, 2, 16], 16000, &[0, 64, 0, 64, 0, 32, 0, 32, 9]);
        bytes[4..8].fill(0xff);
        bytes[40..44].fill(0xff);
        assert_eq!(decoded(&bytes).unwrap().samples(), [0.5, 0.25]);
    }

    #[test]
    fn other_formats_are_named() {
        for (bytes, name) in [
            (&b"ID3\x04"[..], "an MP3 file"),
            (b"OggS", "an Ogg file"),
            (b"\0\0\0\x20ftypM4A ", "an MPEG-4 file"),
            (b"", "an empty file"),
            (b"hello", "no sound in a known format"),
        ] {
            let error = decoded(bytes).unwrap_err();
            assert!(error.starts_with(&format!("sound: content at byte 0 is {name}, expected a WAV file")), "{error}");
        }
    }

    #[test]
    fn limits_are_checked_before_samples() {
        let bytes = wav([1, 1, 16], 10, &[0; 100]);
        let limits = SoundLimits { max_seconds: 4.0, ..SoundLimits::default() };
        let error = Sound::decode(&bytes, &limits).unwrap_err().to_string();
        assert!(error.starts_with("wav: length is 5 seconds"), "{error}");
        let limits = SoundLimits { max_bytes: 100, ..SoundLimits::default() };
        let error = Sound::decode(&bytes, &limits).unwrap_err().to_string();
        assert!(error.starts_with("wav: size is 144 bytes"), "{error}");
    }
}
