//! Types with a codebook (IQ1, IQ2 and IQ3): an index of a few bits represents several weights.
//!
//! An entry of an IQ2 codebook holds the magnitudes of eight weights, one of IQ3 of four; signs are stored
//! separately. IQ1's single codebook holds eight values from -1 to 1 per entry. `codebooks.bin` has the entries;
//! `scripts/codebooks.py` explains and writes it.

use std::sync::LazyLock;

use super::f16_at;

/// Start of each codebook, and the end.
const STARTS: [usize; 7] = [0, 256, 768, 1792, 2048, 2560, 4608];

/// The entries of all codebooks.
static ENTRIES: LazyLock<Vec<u16>> = LazyLock::new(|| {
    let mut entries = Vec::with_capacity(STARTS[6]);
    let (mut entry, mut step, mut shift) = (0, 0, 0);
    for &byte in include_bytes!("codebooks.bin") {
        step |= u16::from(byte & 127) << shift;
        shift += 7;
        if byte < 128 {
            // Each codebook starts at zero.
            entry = if STARTS.contains(&entries.len()) { step } else { entry + step };
            entries.push(entry);
            (step, shift) = (0, 0);
        }
    }
    entries
});

/// Decoding parameters of an IQ2 or IQ3 type.
pub(crate) struct Codebook {
    /// First entry of its codebook.
    start: usize,
    /// Weights per entry, and bits per weight.
    len: usize,
    bits: usize,
    levels: &'static [f32],
    /// Index and signs of entry `i` of a super-block, first weight's sign in the lowest bit.
    index: fn(&[u8], usize) -> (u16, u8),
    /// The 4-bit scale of 16 weights.
    scale: fn(&[u8], usize) -> u8,
    /// The factor for a 4-bit scale.
    factor: fn(u8) -> f32,
}

pub(crate) const IQ2_XXS: Codebook = Codebook {
    start: STARTS[0],
    len: 8,
    bits: 2,
    levels: &[8.0, 25.0, 43.0],
    index: |block, i| {
        let of_32 = &block[2 + i / 4 * 8..][..8];
        (u16::from(of_32[i % 4]), seven_signs(word(of_32, 4), i % 4))
    },
    scale: |block, group| block[9 + group / 2 * 8] >> 4,
    factor: |scale| (0.5 + f32::from(scale)) * 0.25,
};

pub(crate) const IQ2_XS: Codebook = Codebook {
    start: STARTS[1],
    index: |block, i| {
        let quant = u16::from_le_bytes([block[2 + 2 * i], block[3 + 2 * i]]);
        (quant & 511, seven_signs(u32::from(quant >> 9), 0))
    },
    scale: |block, group| nibble(&block[66..], group),
    ..IQ2_XXS
};

pub(crate) const IQ2_S: Codebook = Codebook {
    start: STARTS[2],
    index: |block, i| {
        let upper = block[66 + i / 4] >> (2 * (i % 4)) & 3;
        (u16::from(block[2 + i]) | u16::from(upper) << 8, block[34 + i])
    },
    scale: |block, group| nibble(&block[74..], group),
    ..IQ2_XXS
};

pub(crate) const IQ3_XXS: Codebook = Codebook {
    start: STARTS[3],
    len: 4,
    bits: 3,
    levels: &[4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0],
    index: |block, i| {
        let signs = seven_signs(word(block, 66 + i / 8 * 4), i % 8 / 2);
        (u16::from(block[2 + i]), signs >> (4 * (i % 2)))
    },
    scale: |block, group| block[69 + group / 2 * 4] >> 4,
    factor: |scale| (0.5 + f32::from(scale)) * 0.5,
};

pub(crate) const IQ3_S: Codebook = Codebook {
    start: STARTS[4],
    len: 4,
    bits: 3,
    levels: &[1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0],
    index: |block, i| {
        let upper = block[66 + i / 8] >> (i % 8) & 1;
        (u16::from(block[2 + i]) | u16::from(upper) << 8, block[74 + i / 2] >> (4 * (i % 2)))
    },
    scale: |block, group| nibble(&block[106..], group / 2),
    factor: |scale| 1.0 + 2.0 * f32::from(scale),
};

impl Codebook {
    /// Levels of the weights in entry `i`, two or three bits each, and their signs.
    pub(crate) fn weights(&self, block: &[u8], i: usize) -> (u16, u8) {
        let (index, signs) = (self.index)(block, i);
        (ENTRIES[self.start + usize::from(index)], signs)
    }

    /// The scale of 16 weights.
    pub(crate) fn scale(&self, block: &[u8], group: usize) -> u8 {
        (self.scale)(block, group)
    }

    /// Decodes a super-block; its first two bytes are the overall scale.
    pub(super) fn decode<const BYTES: usize>(&self, block: &[u8; BYTES], out: &mut [f32; 256]) {
        let scale = f16_at(block, 0);
        for (i, values) in out.chunks_exact_mut(self.len).enumerate() {
            let (levels, signs) = self.weights(block, i);
            let scale = scale * (self.factor)(self.scale(block, i * self.len / 16));
            for (j, value) in values.iter_mut().enumerate() {
                let level = self.levels[usize::from(levels >> (self.bits * j)) & ((1 << self.bits) - 1)];
                *value = scale * if signs >> j & 1 == 1 { -level } else { level };
            }
        }
    }
}

/// Eight signs from the `i`-th group of seven bits; the eighth makes their parity even.
fn seven_signs(groups: u32, i: usize) -> u8 {
    let signs = (groups >> (7 * i) & 127) as u8;
    signs | (signs.count_ones() as u8 & 1) << 7
}

fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Offset of IQ1 weights from -1, 0 or 1.
const DELTA: f32 = 0.125;

/// Eight weights of an IQ1 type.
fn iq1_eight(index: u16, scale: f32, is_less: bool, out: &mut [f32]) {
    let (entry, delta) = (ENTRIES[STARTS[5] + usize::from(index)], if is_less { -DELTA } else { DELTA });
    for (j, value) in out.iter_mut().enumerate() {
        *value = scale * (f32::from(entry >> (2 * j) & 3) - 1.0 + delta);
    }
}

/// Bytes: scale of scales, 32 of indices, eight 16-bit words: upper three bits of four indices, a 3-bit scale, and
/// the delta's sign.
pub(super) fn iq1_s(block: &[u8; 50], out: &mut [f32; 256]) {
    let scale = f16_at(block, 0);
    for (i, values) in out.chunks_exact_mut(8).enumerate() {
        let (of_32, l) = (i / 4, i % 4);
        let high = u16::from_le_bytes([block[34 + 2 * of_32], block[35 + 2 * of_32]]);
        let index = u16::from(block[2 + i]) | (high >> (3 * l) & 7) << 8;
        iq1_eight(index, scale * f32::from(2 * (high >> 12 & 7) + 1), high >> 15 == 1, values);
    }
}

/// Bytes: 32 of indices, 16 with the upper three bits and the delta's sign of two indices each, four 16-bit words:
/// four 3-bit scales, and a quarter of the scale of scales.
pub(super) fn iq1_m(block: &[u8; 56], out: &mut [f32; 256]) {
    let scales: [u16; 4] = std::array::from_fn(|i| u16::from_le_bytes([block[48 + 2 * i], block[49 + 2 * i]]));
    let scale = scales.iter().rev().fold(0, |bits, word| bits << 4 | word >> 12);
    let scale = f16_at(&scale.to_le_bytes(), 0);
    for (i, values) in out.chunks_exact_mut(8).enumerate() {
        let high = block[32 + i / 2] >> (4 * (i % 2));
        let index = u16::from(block[i]) | u16::from(high & 7) << 8;
        let group_scale = scales[i / 8] >> (3 * (i / 2 % 4)) & 7;
        iq1_eight(index, scale * f32::from(2 * group_scale + 1), high & 8 != 0, values);
    }
}
