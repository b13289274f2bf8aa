//! Units of weights, from the layout of files to the packed one: the same bits in another order, and as many bytes or
//! hardly more; codebooks are looked up.
//!
//! A unit's quants are dealt anew, because files let blocks share bytes: each block gets words of its own, which one load
//! brings, and byte i of a word belongs to weight i of a quad. Of a block's eight quads of `B` bits, quad q lies in word
//! q % B at bits B (q / B) of each byte; the nibbles of most types come from files in that order. What would not fill 16
//! bytes, such as the scale in front of a file's block, goes to the unit's tail.

use crate::dtype::WeightType;
use crate::formats::block::codebook::{self, Codebook};
use crate::formats::block::scale_and_min;

/// Blocks in a super-block.
const BLOCKS: usize = 8;

/// Packs one row. `units` and `tails` are zero.
pub(super) fn pack_row(weight: WeightType, row: &[u8], units: &mut [u32], tails: &mut [u16]) {
    let pack: fn(&[u8], &mut [u32], &mut [u16]) = match weight {
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => {
            bytemuck::cast_slice_mut(units)[..row.len()].copy_from_slice(row);
            return;
        }
        WeightType::Q8_0 | WeightType::Q4_0 | WeightType::IQ4_NL => scaled,
        WeightType::Q4_1 => q4_1,
        WeightType::Q5_0 => q5_0,
        WeightType::Q5_1 => q5_1,
        WeightType::Q2_K => q2_k,
        WeightType::Q3_K => q3_k,
        WeightType::Q4_K => q4_k,
        WeightType::Q5_K => q5_k,
        WeightType::Q6_K => q6_k,
        WeightType::IQ4_XS => iq4_xs,
        WeightType::IQ3_S => |file, unit, tail| iq3(&codebook::IQ3_S, 0x4b80, file, unit, tail),
        WeightType::IQ3_XXS => |file, unit, tail| iq3(&codebook::IQ3_XXS, 0x4bc0, file, unit, tail),
        WeightType::IQ2_S => |file, unit, _| iq2(&codebook::IQ2_S, file, unit),
        WeightType::IQ2_XS => |file, unit, _| iq2(&codebook::IQ2_XS, file, unit),
        WeightType::IQ2_XXS => |file, unit, _| iq2(&codebook::IQ2_XXS, file, unit),
        WeightType::MXFP4 => mxfp4,
        WeightType::NVFP4 => nvfp4,
        WeightType::Q2_0 => q2_0,
        WeightType::Q1_0 => q1_0,
    };
    let (block_type, tail_len) = (weight.block_type(), weight.tail_len());
    let file_bytes = weight.unit_len() / block_type.block_len() as usize * block_type.block_bytes() as usize;
    // A row may end amid a unit of several blocks.
    for (i, (from, unit)) in row.chunks(file_bytes).zip(units.chunks_exact_mut(weight.unit_bytes() / 4)).enumerate() {
        pack(from, unit, &mut tails[i * tail_len..][..tail_len]);
    }
}

/// In files, the scale is in front of the quants.
fn scaled(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    bytemuck::cast_slice_mut(unit).copy_from_slice(&file[2..]);
    tail[0] = half(file, 0);
}

/// Scale and min.
fn q4_1(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    bytemuck::cast_slice_mut(unit).copy_from_slice(&file[4..]);
    tail.copy_from_slice(&[half(file, 0), half(file, 1)]);
}

/// Scale and fifth bits.
fn q5_0(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    bytemuck::cast_slice_mut(unit).copy_from_slice(&file[6..]);
    let [low, high] = fifths(&file[2..]);
    tail.copy_from_slice(&[half(file, 0), low, high]);
}

/// Fifth bits, scale and min.
fn q5_1(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    bytemuck::cast_slice_mut(unit).copy_from_slice(&file[8..]);
    let [low, high] = fifths(&file[4..]);
    tail.copy_from_slice(&[low, high, half(file, 0), half(file, 1)]);
}

/// One bit of each weight of a block, which files keep in the order of weights, as a word in two halves.
fn fifths(file: &[u8]) -> [u16; 2] {
    let mut dealt = [0];
    deal::<1>(|_, quad| spread_bits(word(file, 0) >> (4 * quad)), &mut dealt);
    [dealt[0] as u16, (dealt[0] >> 16) as u16]
}

/// Sixteen bytes of scales and mins, 16 words of quants; the scale of all scales and that of all mins.
fn q2_k(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    let (head, quants) = unit.split_at_mut(4);
    bytemuck::cast_slice_mut(head).copy_from_slice(&file[..16]);
    deal::<2>(|block, quad| two_bits(&file[16..], block, quad), quants);
    tail.copy_from_slice(&[half(file, 40), half(file, 41)]);
}

/// The scale of all and sixteen scales in four words, 16 words of lower bits, 8 of third bits.
fn q3_k(file: &[u8], unit: &mut [u32], _: &mut [u16]) {
    let (head, rest) = unit.split_at_mut(4);
    let (lower, thirds) = rest.split_at_mut(2 * BLOCKS);
    head[0] = u32::from(half(file, 54));
    for group in 0..2 * BLOCKS {
        let low = u32::from(file[96 + group % 8] >> (4 * (group / 8)) & 15);
        let high = u32::from(file[104 + group % 4] >> (2 * (group / 4)) & 3);
        head[1 + group / 8] |= low << (4 * (group % 8));
        head[3] |= high << (2 * group);
    }
    deal::<2>(|block, quad| two_bits(&file[32..], block, quad), lower);
    // Bit b of byte l is the third of weight l of block b.
    deal::<1>(|block, quad| word(file, quad) >> block, thirds);
}

/// Four words of scales and mins, 32 of nibbles.
fn q4_k(file: &[u8], unit: &mut [u32], _: &mut [u16]) {
    let (head, nibbles) = unit.split_at_mut(4);
    scales_and_mins(file, head);
    deal::<4>(|block, quad| nibbles_of(&file[16..], block, quad), nibbles);
}

/// Four words of scales and mins, eight of fifth bits, 32 of nibbles.
fn q5_k(file: &[u8], unit: &mut [u32], _: &mut [u16]) {
    let (head, rest) = unit.split_at_mut(4);
    let (fifths, nibbles) = rest.split_at_mut(BLOCKS);
    scales_and_mins(file, head);
    // Bit b of byte l is the fifth of weight l of block b.
    deal::<1>(|block, quad| word(&file[16..], quad) >> block, fifths);
    deal::<4>(|block, quad| nibbles_of(&file[48..], block, quad), nibbles);
}

/// Sixteen scales in four words, 16 words of upper bits, 32 of nibbles. In files, the scale of all comes last.
fn q6_k(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    let (scales, rest) = unit.split_at_mut(4);
    let (uppers, nibbles) = rest.split_at_mut(2 * BLOCKS);
    bytemuck::cast_slice_mut(scales).copy_from_slice(&file[192..208]);
    // Each half of a super-block has 64 bytes of nibbles: blocks 0 and 1 in the low ones, 2 and 3 in the high ones; and
    // 32 bytes of upper bits.
    deal::<2>(|block, quad| two_bits(&file[128..], block, quad), uppers);
    deal::<4>(|block, quad| word(file, block / 4 * 16 + block % 2 * 8 + quad) >> (block % 4 / 2 * 4), nibbles);
    tail[0] = half(file, 104);
}

/// Nibbles; the scale of all, the upper two bits of eight scales, their low nibbles.
fn iq4_xs(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    bytemuck::cast_slice_mut(unit).copy_from_slice(&file[8..]);
    tail.copy_from_slice(&[half(file, 0), half(file, 1), half(file, 2), half(file, 3)]);
}

/// Nibbles, 8 and more for positive weights; the scale of all, the outermost level, eight scales. Levels are odd numbers but
/// for the outermost one, which is 15 or, in IQ3_XXS, 15.5.
fn iq3(book: &Codebook, outermost: u16, file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    let quad = |block: usize, quad: usize| {
        let (magnitudes, signs) = book.weights(file, block * 8 + quad);
        // Three bits in each byte: a negative weight has what is left of seven, so that levels ascend.
        let indices = (0..4).fold(0, |word, i| word | u32::from(magnitudes >> (3 * i) & 7) << (8 * i));
        let signs = spread_bits(u32::from(signs));
        (indices ^ (signs * 7)) | (signs ^ 0x0101_0101) << 3
    };
    deal::<4>(quad, unit);
    let scales = (0..BLOCKS).fold(0u32, |word, block| word | u32::from(book.scale(file, 2 * block)) << (4 * block));
    tail.copy_from_slice(&[half(file, 0), outermost, scales as u16, (scales >> 16) as u16]);
}

/// As Q3_K: the lower bits count magnitudes, the third one is the sign.
fn iq2(book: &Codebook, file: &[u8], unit: &mut [u32]) {
    let (head, rest) = unit.split_at_mut(4);
    let (lower, thirds) = rest.split_at_mut(2 * BLOCKS);
    head[0] = u32::from(half(file, 0));
    for group in 0..2 * BLOCKS {
        head[1 + group / 8] |= u32::from(book.scale(file, group)) << (4 * (group % 8));
    }
    let eight = |block: usize, quad: usize| book.weights(file, block * 4 + quad / 2);
    deal::<2>(|block, quad| spread_pairs(u32::from(eight(block, quad).0) >> (quad % 2 * 8)), lower);
    deal::<1>(|block, quad| spread_bits(u32::from(eight(block, quad).1) >> (quad % 2 * 4)), thirds);
}

/// Nibbles of two blocks; their exponents in one half.
fn mxfp4(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    for (i, block) in file.chunks_exact(17).enumerate() {
        bytemuck::cast_slice_mut::<u32, u8>(unit)[16 * i..][..16].copy_from_slice(&block[1..]);
        tail[0] |= u16::from(block[0]) << (8 * i);
    }
}

/// Nibbles, which files keep in runs of 16; four scales. The byte that stands for no number means 0 there.
fn nvfp4(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    let quad = |block: usize, quad: usize| {
        let (run, at) = (2 * block + quad / 4, quad % 4);
        word(&file[4..], 2 * run + at % 2) >> (4 * (at / 2))
    };
    deal::<4>(quad, unit);
    for (i, &scale) in file[..4].iter().enumerate() {
        tail[i / 2] |= if scale == 0x7f { 0 } else { u16::from(scale) << (8 * (i % 2)) };
    }
}

fn q2_0(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    deal::<2>(|block, quad| spread_pairs(u32::from(file[2 + 8 * block + quad])), unit);
    tail[0] = half(file, 0);
}

fn q1_0(file: &[u8], unit: &mut [u32], tail: &mut [u16]) {
    deal::<1>(|block, quad| spread_bits(word(&file[2..], block) >> (4 * quad)), unit);
    tail[0] = half(file, 0);
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

/// Four two-bit numbers of a K-quant in the lowest bits of four bytes: 32 bytes hold four blocks.
fn two_bits(quants: &[u8], block: usize, quad: usize) -> u32 {
    word(quants, block / 4 * 8 + quad) >> (block % 4 * 2)
}

/// The four lowest bits, each in a byte of its own.
fn spread_bits(bits: u32) -> u32 {
    ((bits & 15) * 0x0020_4081) & 0x0101_0101
}

/// The four lowest pairs of bits, each in a byte of its own.
fn spread_pairs(pairs: u32) -> u32 {
    let pairs = pairs & 255;
    (pairs | pairs << 6 | pairs << 12 | pairs << 18) & 0x0303_0303
}

/// Deals the quads of blocks to words that are zero; each has four quants in the lowest `B` bits of its bytes, and anything
/// above.
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

/// 16-bit word `at` of some bytes.
fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])
}
