//! Packets of Opus by `opus-rs`, which `symphonia` takes from files but does not decode (RFC 7845).

use opus_rs::OpusDecoder;

/// The rate of all Opus sounds.
pub(super) const OPUS_RATE: u32 = 48_000;
/// Samples of a channel in a packet at most: 120 ms.
const MAX_FRAMES: usize = 5760;

/// A stream of Opus packets with one or two channels.
pub(super) struct Opus {
    decoder: OpusDecoder,
    n_channels: usize,
    /// Samples of each channel before the sound's beginning, which are left out.
    n_early: usize,
    /// What samples are multiplied by.
    gain: f32,
}

impl Opus {
    /// By the header of a stream. None if it is not one, or has more than two channels.
    pub fn new(head: &[u8]) -> Option<Opus> {
        let head = head.strip_prefix(b"OpusHead")?;
        // Of MPEG-4, version 0, the numbers begin with their upper byte.
        let number = |at: usize| {
            let bytes: [u8; 2] = head.get(at..at + 2)?.try_into().ok()?;
            Some(if head[0] == 0 { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) })
        };
        let n_channels = usize::from(*head.get(1)?);
        let decibels = f32::from(number(8)?.cast_signed()) / 256.0;
        let decoder = OpusDecoder::new(OPUS_RATE as i32, n_channels).ok()?;
        Some(Opus { decoder, n_channels, n_early: number(2)?.into(), gain: 10f32.powf(decibels / 20.0) })
    }

    pub fn n_channels(&self) -> usize {
        self.n_channels
    }

    /// The samples of a packet, `[n, channels]`, without the last `n_late` of each channel. Whether it can be decoded.
    pub fn decode(&mut self, packet: &[u8], n_late: u64, interleaved: &mut Vec<f32>) -> bool {
        interleaved.clear();
        interleaved.resize(MAX_FRAMES * self.n_channels, 0.0);
        let Ok(n) = self.decoder.decode(packet, MAX_FRAMES, interleaved) else {
            interleaved.clear();
            return false;
        };
        let end = n.saturating_sub(usize::try_from(n_late).unwrap_or(n));
        let n_early = self.n_early.min(n);
        self.n_early -= n_early;
        interleaved.truncate(end * self.n_channels);
        interleaved.drain(..n_early.min(end) * self.n_channels);
        interleaved.iter_mut().for_each(|sample| *sample *= self.gain);
        true
    }
}
