//! Reading sound files by `symphonia`: WAV, FLAC, MP3, AAC, Vorbis and Opus, the latter three in MPEG-4, ADTS, Ogg and WebM.
//! Formats are known by their first bytes alone.

use std::io::{Cursor, ErrorKind};

use symphonia::core::codecs::audio::{AudioCodecParameters, AudioDecoder, AudioDecoderOptions, well_known};
use symphonia::core::errors::Error as Failure;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, Track, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;
use symphonia::core::packet::Packet;
use symphonia::default::{get_codecs, get_probe};

use super::opus::{OPUS_RATE, Opus};
use super::resample::Resampler;
use super::{MAX_RATE, SAMPLE_RATE, Sound, mean};
use crate::error::Error;
use crate::formats::named_by_signature;
use crate::panics::caught;

/// First bytes of the formats that are read, see [`named_by_signature`].
const FORMATS: [(usize, &[u8], &str); 14] = [
    (8, b"WAVE", "WAV"),
    (0, b"fLaC", "FLAC"),
    (0, b"OggS", "Ogg"),
    (0, b"\x1a\x45\xdf\xa3", "WebM"),
    (4, b"ftyp", "MPEG-4"),
    (0, b"ID3", "MP3"),
    (0, b"\xff\xfb", "MP3"),
    (0, b"\xff\xfa", "MP3"),
    (0, b"\xff\xf3", "MP3"),
    (0, b"\xff\xf2", "MP3"),
    (0, b"\xff\xe3", "MP3"),
    (0, b"\xff\xe2", "MP3"),
    (0, b"\xff\xf1", "AAC"),
    (0, b"\xff\xf9", "AAC"),
];

/// And of others.
const OTHERS: [(usize, &[u8], &str); 7] = [
    (0, b"FORM", "an AIFF file"),
    (0, b"caff", "a CAF file"),
    (0, b"RF64", "an RF64 file"),
    (0, b"#!AMR", "an AMR file"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "a WMA file"),
    (0, b"wvpk", "a WavPack file"),
    (0, b"MAC ", "a Monkey's Audio file"),
];

/// Samples that take the place of a damaged packet at most: those of FLAC's longest.
const MAX_SILENCE: u64 = 1 << 16;

const READ: &str = "WAV, FLAC, MP3, M4A (AAC), Ogg or WebM (Opus, Vorbis)";

/// Limits on files, checked before memory is taken for what is beyond them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoundLimits {
    /// Bytes of the file.
    pub max_bytes: u64,
    /// Seconds of sound.
    pub max_seconds: f64,
    /// Samples of the result, of four bytes each.
    pub max_samples: u64,
}

impl Default for SoundLimits {
    /// 4 GiB, 4 hours, and 4 hours at 48 kHz.
    fn default() -> SoundLimits {
        SoundLimits { max_bytes: 4 << 30, max_seconds: 4.0 * 3600.0, max_samples: 4 * 3600 * 48_000 }
    }
}

impl Sound {
    /// Decodes a sound file at its own rate: WAV (integers of 8 to 32 bits, floats, A-law and mu-law), FLAC, MP3, Ogg and WebM
    /// with Opus or Vorbis, MPEG-4 and ADTS with AAC (low complexity). Several channels become their mean; Opus and AAC have
    /// at most two.
    ///
    /// Packets that cannot be decoded become silence, unless they are more than half of them. What an encoder adds at the
    /// beginning and the end is left out where the format says how much it is. In AAC, 1024 to 2112 samples remain.
    ///
    /// # Errors
    /// [`Error::Format`] if the file is of another format, which it names, or broken; [`Error::Truncated`] if it ends
    /// before the sound that its header has; [`Error::Unsupported`] if it exceeds a limit or has another codec, which it names.
    pub fn decode(bytes: &[u8], limits: &SoundLimits) -> Result<Sound, Error> {
        decode(bytes, None, limits)
    }

    /// As [`Sound::decode`], resampled in parts while it is decoded: takes memory for the result alone.
    ///
    /// # Errors
    /// As [`Sound::decode`]; [`Error::Operand`] for a rate that is 0 or above [`MAX_RATE`].
    pub fn decode_at(bytes: &[u8], rate: u32, limits: &SoundLimits) -> Result<Sound, Error> {
        decode(bytes, Some(rate), limits)
    }
}

fn decode(bytes: &[u8], rate: Option<u32>, limits: &SoundLimits) -> Result<Sound, Error> {
    let format = named_by_signature(bytes, &FORMATS).ok_or_else(|| other_format(bytes))?;
    let file = File { format, n_bytes: bytes.len() };
    if bytes.len() as u64 > limits.max_bytes {
        let supported = format!("at most {} bytes; cut the sound into parts", limits.max_bytes);
        return Err(file.unsupported("size", format!("{} bytes", bytes.len()), supported));
    }
    caught("decoding a sound", || {
        let (mut reader, mut decoding) = file.open(bytes, rate, limits)?;
        while let Some(packet) = decoding.next(&mut *reader)? {
            decoding.take(&packet)?;
        }
        decoding.finish()
    })
    // Its only input is the file.
    .unwrap_or_else(|panic| Err(file.broken(panic.to_string())))
}

/// A file, for errors.
#[derive(Clone, Copy)]
struct File {
    format: &'static str,
    n_bytes: usize,
}

impl File {
    /// Reads the header.
    fn open<'a>(
        self,
        bytes: &'a [u8],
        rate: Option<u32>,
        limits: &SoundLimits,
    ) -> Result<(Box<dyn FormatReader + 'a>, Decoding), Error> {
        let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
        let (format, metadata) = (FormatOptions::default(), MetadataOptions::default());
        let reader = get_probe().probe(&Hint::new(), stream, format, metadata).map_err(|error| self.failed(error))?;
        let no_sound = || self.unsupported("content", "without sound".into(), "a file with a sound track".into());
        let track = reader.default_track(TrackType::Audio).ok_or_else(no_sound)?;
        let decoding = Decoding::new(self, track, rate, limits)?;
        Ok((reader, decoding))
    }

    fn unsupported(self, field: &str, found: String, supported: String) -> Error {
        Error::Unsupported { format: self.format, field: field.into(), found, supported }
    }

    fn broken(self, found: String) -> Error {
        let expected = "whole and undamaged".into();
        Error::Format { format: self.format, field: "content".into(), offset: 0, expected, found }
    }

    /// Whether the format's header has the length of the sound, rather than an estimate.
    fn has_length(self) -> bool {
        ["WAV", "FLAC", "MPEG-4"].contains(&self.format)
    }

    fn check_rate(self, rate: u32) -> Result<(), Error> {
        match (1..=MAX_RATE).contains(&rate) {
            true => Ok(()),
            false => Err(self.unsupported("sample rate", rate.to_string(), format!("1 to {MAX_RATE}"))),
        }
    }

    fn truncated(self) -> Error {
        Error::Truncated {
            part: "its sound".into(),
            needed_bytes: self.n_bytes as u64 + 1,
            found_bytes: self.n_bytes as u64,
        }
    }

    fn failed(self, error: Failure) -> Error {
        match error {
            Failure::IoError(error) if error.kind() == ErrorKind::UnexpectedEof => self.truncated(),
            Failure::Unsupported(what) => self.unsupported("content", what.into(), READ.into()),
            Failure::ResetRequired => {
                self.unsupported("content", "of several sounds in a row".into(), "a single one; convert it".into())
            }
            error => self.broken(error.to_string()),
        }
    }
}

/// A sound that is being decoded.
struct Decoding {
    file: File,
    limits: SoundLimits,
    track: Track,
    codec: Codec,
    /// By the header.
    header_rate: Option<u32>,
    /// The result's, if it is not the file's.
    rate: Option<u32>,
    /// From the first packet on: the file's rate, and what is decoded so far.
    decoded: Option<(u32, Resampler)>,
    /// Samples of each channel so far.
    n_frames: u64,
    n_packets: u64,
    n_damaged: u64,
    /// Samples of a packet: of all channels, and their mean.
    interleaved: Vec<f32>,
    mean: Vec<f32>,
}

impl Decoding {
    fn new(file: File, track: &Track, rate: Option<u32>, limits: &SoundLimits) -> Result<Decoding, Error> {
        let params = track.codec_params.as_ref().and_then(|params| params.audio());
        let params = params.ok_or_else(|| file.unsupported("codec", "unknown".into(), READ.into()))?;
        let codec = Codec::new(params).map_err(|error| match error {
            Failure::Unsupported(_) => file.unsupported("codec", codec_name(params), READ.into()),
            error => file.failed(error),
        })?;
        let decoding = Decoding {
            file,
            limits: *limits,
            track: track.clone(),
            codec,
            header_rate: params.sample_rate,
            rate,
            decoded: None,
            n_frames: 0,
            n_packets: 0,
            n_damaged: 0,
            interleaved: Vec::new(),
            mean: Vec::new(),
        };
        if let Some(rate) = params.sample_rate {
            file.check_rate(rate)?;
            let n = track.num_frames.filter(|_| file.has_length());
            decoding.check_length(n.unwrap_or(0) as f64 / f64::from(rate))?;
        }
        Ok(decoding)
    }

    /// The next packet of the track.
    fn next(&self, reader: &mut dyn FormatReader) -> Result<Option<Packet>, Error> {
        loop {
            match reader.next_packet() {
                Ok(Some(packet)) if packet.track_id != self.track.id => {}
                Ok(packet) => return Ok(packet),
                // A file that was written to a pipe, whose header has no length.
                Err(Failure::IoError(error))
                    if error.kind() == ErrorKind::UnexpectedEof && self.track.num_frames.is_none() =>
                {
                    return Ok(None);
                }
                Err(error) => return Err(self.file.failed(error)),
            }
        }
    }

    /// Decodes a packet.
    fn take(&mut self, packet: &Packet) -> Result<(), Error> {
        self.n_packets += 1;
        let n_before = self.mean.len() as u64;
        self.mean.clear();
        let (rate, n_frames) = match self.codec.decode(packet, &mut self.interleaved) {
            Ok((rate, n_channels)) => {
                self.mean.extend(mean(&self.interleaved, n_channels.max(1)));
                (rate, self.mean.len() as u64)
            }
            Err(Failure::DecodeError(_) | Failure::IoError(_)) => {
                self.n_damaged += 1;
                // Silence, once the rate is known.
                let Some(rate) = self.decoded.as_ref().map(|(rate, _)| *rate).or(self.header_rate) else {
                    return Ok(());
                };
                (rate, self.frames_of(packet, rate, n_before).min(MAX_SILENCE))
            }
            Err(error) => return Err(self.file.failed(error)),
        };
        if n_frames == 0 {
            return Ok(());
        }
        self.n_frames = self.n_frames.saturating_add(n_frames);
        self.begin(rate)?;
        self.check_length(self.n_frames as f64 / f64::from(rate))?;
        let n_result = (self.n_frames as f64 / f64::from(rate) * f64::from(self.rate.unwrap_or(rate))) as u64;
        if n_result > self.limits.max_samples {
            let supported = format!("at most {}; cut the sound into parts", self.limits.max_samples);
            return Err(self.file.unsupported("length", format!("{n_result} samples"), supported));
        }
        self.mean.resize(n_frames as usize, 0.0);
        match &mut self.decoded {
            Some((_, samples)) => samples.push(&self.mean),
            None => Ok(()),
        }
    }

    /// Begins the result at the first packet. All have the same rate.
    fn begin(&mut self, rate: u32) -> Result<(), Error> {
        match &self.decoded {
            Some((first, _)) if *first == rate => Ok(()),
            Some((first, _)) => {
                let found = format!("{first}, later {rate}");
                Err(self.file.unsupported("sample rate", found, "one rate; convert the file".into()))
            }
            None => {
                self.file.check_rate(rate)?;
                self.decoded = Some((rate, Resampler::new(rate, self.rate.unwrap_or(rate))?));
                Ok(())
            }
        }
    }

    fn check_length(&self, seconds: f64) -> Result<(), Error> {
        if seconds <= self.limits.max_seconds {
            return Ok(());
        }
        let supported = format!("at most {} seconds; cut the sound into parts", self.limits.max_seconds);
        Err(self.file.unsupported("length", format!("{seconds:.0} seconds"), supported))
    }

    /// Samples that a damaged packet should have; where it does not say, as many as the packet before it had.
    fn frames_of(&self, packet: &Packet, rate: u32, n_before: u64) -> u64 {
        let Some(base) = self.track.time_base.filter(|_| packet.dur.get() > 0) else { return n_before };
        let seconds = packet.dur.get() as f64 * f64::from(base.numer.get()) / f64::from(base.denom.get());
        (seconds * f64::from(rate)).round() as u64
    }

    fn finish(self) -> Result<Sound, Error> {
        if 2 * self.n_damaged > self.n_packets {
            return Err(self.file.broken(format!("{} of {} packets damaged", self.n_damaged, self.n_packets)));
        }
        if self.file.has_length() && self.track.num_frames.is_some_and(|n| n > self.n_frames) {
            return Err(self.file.truncated());
        }
        match self.decoded {
            Some((rate, samples)) => Ok(Sound {
                rate: self.rate.unwrap_or(rate),
                samples: samples.finish()?,
                n_damaged_packets: self.n_damaged,
            }),
            None => Sound::new(self.rate.or(self.header_rate).unwrap_or(SAMPLE_RATE), 1, &[]),
        }
    }
}

/// What decodes packets.
enum Codec {
    Symphonia(Box<dyn AudioDecoder>),
    Opus(Box<Opus>),
}

impl Codec {
    fn new(params: &AudioCodecParameters) -> Result<Codec, Failure> {
        if params.codec == well_known::CODEC_ID_OPUS {
            let opus = params.extra_data.as_deref().and_then(Opus::new);
            return opus.map(|opus| Codec::Opus(Box::new(opus))).ok_or(Failure::Unsupported("more than two channels"));
        }
        Ok(Codec::Symphonia(get_codecs().make_audio_decoder(params, &AudioDecoderOptions::default())?))
    }

    /// Decodes a packet into `[n, channels]`. Returns its rate and its channels.
    fn decode(&mut self, packet: &Packet, interleaved: &mut Vec<f32>) -> Result<(u32, usize), Failure> {
        match self {
            Codec::Symphonia(decoder) => {
                let buffer = decoder.decode(packet)?;
                buffer.copy_to_vec_interleaved(interleaved);
                Ok((buffer.spec().rate(), buffer.spec().channels().count()))
            }
            Codec::Opus(opus) => match opus.decode(&packet.data, packet.trim_end.get(), interleaved) {
                true => Ok((OPUS_RATE, opus.n_channels())),
                false => Err(Failure::DecodeError("opus")),
            },
        }
    }
}

/// The name of a codec that is not read.
fn codec_name(params: &AudioCodecParameters) -> String {
    match params.codec {
        well_known::CODEC_ID_OPUS => "Opus with more than two channels".into(),
        well_known::CODEC_ID_AAC => "AAC of another kind than low complexity, or with more than two channels".into(),
        well_known::CODEC_ID_ALAC => "ALAC".into(),
        well_known::CODEC_ID_AC3 => "AC-3".into(),
        well_known::CODEC_ID_SPEEX => "Speex".into(),
        other => format!("number {other}"),
    }
}

/// The error for a file of another format, by its first bytes.
fn other_format(bytes: &[u8]) -> Error {
    let found = match named_by_signature(bytes, &OTHERS) {
        Some(name) => name.into(),
        None if bytes.is_empty() => "an empty file".into(),
        None => "no sound in a known format".to_owned(),
    };
    let expected = format!("{READ}; `ffmpeg -i FILE -ar 16000 -ac 1 sound.wav` converts others");
    Error::Format { format: "sound", field: "content".into(), offset: 0, expected, found }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A WAV file of these chunks' values: format tag, channels, rate, bits, and the samples' bytes.
    fn wav([tag, channels, bits]: [u16; 3], rate: u32, data: &[u8]) -> Vec<u8> {
        let frame = channels * bits.div_ceil(8);
        let mut bytes = b"RIFF".to_vec();
        // Other samples than integers have a description after these, here of no bytes.
        let extra: &[u8] = if tag == 1 { &[] } else { &[0; 2] };
        bytes.extend((36 + extra.len() as u32 + data.len() as u32).to_le_bytes());
        bytes.extend(b"WAVEfmt ");
        bytes.extend((16 + extra.len() as u32).to_le_bytes());
        [tag, channels].iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        [rate, rate * u32::from(frame)].iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        [frame, bits].iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        bytes.extend(extra);
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
        let doubles: Vec<u8> = values.iter().flat_map(|value| f64::from(*value).to_le_bytes()).collect();
        for (tag, bits, data) in [
            (1, 8, eight),
            (1, 16, bytes(2)),
            (1, 24, bytes(3)),
            (1, 32, bytes(4)),
            (3, 32, floats.clone()),
            (3, 64, doubles),
        ] {
            let sound = decoded(&wav([tag, 1, bits], 8000, &data)).unwrap();
            assert_eq!((sound.rate(), sound.samples()), (8000, &values[..]), "{bits} bits");
        }
        let stereo = decoded(&wav([1, 2, 16], 192_000, &bytes(2))).unwrap();
        assert_eq!((stereo.rate(), stereo.samples()), (192_000, &[0.125, -0.5][..]));
        let many = decoded(&wav([3, 4, 32], 8000, &floats)).unwrap();
        assert_eq!(many.samples(), [-0.1875]);
        // Mu-law: a sign, an exponent and a mantissa.
        let telephone = decoded(&wav([7, 1, 8], 8000, &[0xff, 0x80, 0x00])).unwrap();
        assert_eq!(telephone.samples(), [0.0, 32124.0 / 32768.0, -32124.0 / 32768.0]);
    }

    #[test]
    fn broken_files_are_refused() {
        let whole = wav([1, 1, 16], 16000, &[0; 100]);
        assert!(decoded(&whole).is_ok());
        for end in (12..whole.len()).step_by(3) {
            let error = decoded(&whole[..end]).unwrap_err();
            assert!(error.contains("ends after") || error.contains("WAV"), "{end}: {error}");
        }
        let error = decoded(&whole[..90]).unwrap_err();
        assert_eq!(error, "the file ends after 90 bytes, but its sound needs at least 91: download or save it again");
        let floats = wav([3, 1, 32], 16000, &[[0; 4], f32::NAN.to_le_bytes()].concat());
        assert_eq!(decoded(&floats).unwrap_err(), "sound: `samples` is NaN at sample 1, expected finite numbers");
        for (bytes, want) in [
            (wav([1, 1, 16], 0, &[0; 4]), "sample rate"),
            (wav([1, 1, 16], 800_000, &[0; 4]), "WAV: sample rate is 800000, which is not supported (supported: 1 to"),
            (wav([2, 1, 4], 8000, &[0; 4]), "WAV: "),
            (wav([1, 1, 12], 8000, &[0; 4]), "WAV: "),
            (wav([1, 0, 16], 8000, &[0; 4]), "WAV: "),
        ] {
            let error = decoded(&bytes).unwrap_err();
            println!("{error}");
            assert!(error.contains(want), "{error}");
        }
    }

    #[test]
    fn sounds_of_no_samples_are_read() {
        let none = decoded(&wav([1, 1, 16], 8000, &[])).unwrap();
        assert_eq!((none.rate(), none.samples()), (8000, &[][..]));
        let one = Sound::decode_at(&wav([1, 1, 16], 8000, &[0, 64]), 16_000, &SoundLimits::default()).unwrap();
        assert_eq!((one.rate(), one.samples().len()), (16_000, 2));
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
            (&b"FORM\0\0\0\0AIFF"[..], "an AIFF file"),
            (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "a WMA file"),
            (b"", "an empty file"),
            (b"hello", "no sound in a known format"),
        ] {
            let error = decoded(bytes).unwrap_err();
            assert!(
                error.starts_with(&format!("sound: content at byte 0 is {name}, expected WAV, FLAC, MP3")),
                "{error}"
            );
        }
    }

    #[test]
    fn limits_are_checked_before_samples() {
        let bytes = wav([1, 1, 16], 10, &[0; 100]);
        for (limits, want) in [
            (SoundLimits { max_seconds: 4.0, ..SoundLimits::default() }, "WAV: length is 5 seconds"),
            (SoundLimits { max_bytes: 100, ..SoundLimits::default() }, "WAV: size is 144 bytes"),
            (SoundLimits { max_samples: 79_999, ..SoundLimits::default() }, "WAV: length is 80000 samples"),
        ] {
            let error = Sound::decode_at(&bytes, 16_000, &limits).unwrap_err().to_string();
            assert!(error.starts_with(want), "{error}");
        }
        assert!(Sound::decode_at(&bytes, 0, &SoundLimits::default()).unwrap_err().to_string().contains("`rate` is 0"));
    }
}
