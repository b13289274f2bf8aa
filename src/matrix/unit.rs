//! Units of weights, from the layout of files to the packed one: the same bits in another order, and as many bytes.
//!
//! Blocks of Q8_0 and Q4_0 lose the scale in front of them, nothing else. A super-block's quants are dealt anew, because
//! files let blocks share bytes: each block gets words of its own, which one load brings, and byte i of a word belongs
//! to weight i of a quad. Of a block's eight quads of `B` bits, quad q lies in word q % B at bits B (q / B) of each byte;
//! the nibbles of Q4_0 come from files in that order.

use crate::dtype::WeightType;
use crate::formats::block::scale_and_min;

/// Blocks in a super-block.
const BLOCKS: usize = 8;

/// Bytes of a quantised unit in files.
pub(super) fn file_bytes(weight: WeightType) -> usize {
    weight.unit_bytes() + if weight.has_scale() { 2 } else { 0 }
}

/// Packs one row. `units` and `scales` are zero; scales of other rows may follow.
pub(super) fn pack_row(weight: WeightType, row: &[u8], units: &mut [u32], scales: &mut [u16]) {
    let pack: fn(&[u8], &mut [u32]) -> u16 = match weight {
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => {
            bytemuck::cast_slice_mut(units)[..row.len()].copy_from_slice(row);
            return;
        }
        WeightType::Q8_0 | WeightType::Q4_0 => block,
        WeightType::Q4_K => q4_k,
        WeightType::Q5_K => q5_k,
        WeightType::Q6_K => q6_k,
    };
    let units = units.chunks_exact_mut(weight.unit_bytes() / 4);
    for (i, (from, unit)) in row.chunks_exact(file_bytes(weight)).zip(units).enumerate() {
        let scale = pack(from, unit);
        if let Some(place) = scales.get_mut(i) {
            *place = scale;
        }
    }
}

/// In files, the scale is in front of the quants.
fn block(file: &[u8], unit: &mut [u32]) -> u16 {
    bytemuck::cast_slice_mut(unit).copy_from_slice(&file[2..]);
    u16::from_le_bytes([file[0], file[1]])
}

/// Four words of scales and mins, 32 of nibbles.
fn q4_k(file: &[u8], unit: &mut [u32]) -> u16 {
    let (head, nibbles) = unit.split_at_mut(4);
    scales_and_mins(file, head);
    deal::<4>(|block, quad| nibbles_of(&file[16..], block, quad), nibbles);
    0
}

/// Four words of scales and mins, eight of fifth bits, 32 of nibbles.
fn q5_k(file: &[u8], unit: &mut [u32]) -> u16 {
    let (head, rest) = unit.split_at_mut(4);
    let (fifths, nibbles) = rest.split_at_mut(BLOCKS);
    scales_and_mins(file, head);
    // Bit b of byte l is the fifth of weight l of block b.
    deal::<1>(|block, quad| word(&file[16..], quad) >> block, fifths);
    deal::<4>(|block, quad| nibbles_of(&file[48..], block, quad), nibbles);
    0
}

/// Sixteen scales in four words, 16 words of upper bits, 32 of nibbles. In files, the scale of all comes last.
fn q6_k(file: &[u8], unit: &mut [u32]) -> u16 {
    let (scales, rest) = unit.split_at_mut(4);
    let (uppers, nibbles) = rest.split_at_mut(2 * BLOCKS);
    bytemuck::cast_slice_mut(scales).copy_from_slice(&file[192..208]);
    // Each half of a super-block has 64 bytes of nibbles: blocks 0 and 1 in the low ones, 2 and 3 in the high ones; and
    // 32 bytes of upper bits.
    deal::<2>(|block, quad| word(&file[128..], block / 4 * 8 + quad) >> (block % 4 * 2), uppers);
    deal::<4>(|block, quad| word(file, block / 4 * 16 + block % 2 * 8 + quad) >> (block % 4 / 2 * 4), nibbles);
    u16::from_le_bytes([file[208], file[209]])
}

/// The head of a Q4_K or Q5_K super-block: the f16 of all scales and that of all mins in a word, then for the blocks'
/// 6-bit scales and mins a word of low nibbles each, and one of upper bits, the mins' in its upper half.
fn scales_and_mins(file: &[u8], head: &mut [u32]) {
    head[0] = word(file, 0);
    for block in 0..BLOCKS {
        let (scale, min) = scale_and_min(&file[4..16], block);
        let (scale, min) = (u32::from(scale), u32::from(min));
        head[1] |= (scale & 15) << (4 * block);
        head[2] |= (min & 15) << (4 * block);
        head[3] |= (scale >> 4 | (min >> 4) << 16) << (2 * block);
    }
}

/// Four quants of Q4_K in the lowest bits of four bytes: 32 bytes hold an even block in low nibbles and the next one in high.
fn nibbles_of(quants: &[u8], block: usize, quad: usize) -> u32 {
    word(quants, block / 2 * 8 + quad) >> (block % 2 * 4)
}

/// Deals the quads of a super-block's blocks to words that are zero; each has four quants in the lowest `B` bits of its
/// bytes, and anything above.
fn deal<const B: usize>(quads: impl Fn(usize, usize) -> u32, words: &mut [u32]) {
    let mask = u32::from_ne_bytes([(1 << B) - 1; 4]);
    for (block, words) in words.chunks_exact_mut(B).enumerate() {
        for quad in 0..8 {
            words[quad % B] |= (quads(block, quad) & mask) << (B * (quad / B));
        }
    }
}

/// Word `at` of some bytes.
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[4 * at], bytes[4 * at + 1], bytes[4 * at + 2], bytes[4 * at + 3]])
}
