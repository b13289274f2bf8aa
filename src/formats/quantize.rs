//! Quantises floats to block types: the inverse of [`block::dequantize`](super::block::dequantize).
//!
//! The searches are those of ggml's `quantize_*` in `ggml-quants.c`, in the same order of operations, so that files
//! are byte-identical to llama.cpp's. `tests/quantize.rs` compares them.

mod fit;
mod iq4;
mod k;
mod small;

use super::{BlockType, Error};
use small::Group;

/// The output types of [`quantize_row`].
pub const QUANTIZABLE: [BlockType; 16] = [
    BlockType::F32,
    BlockType::F16,
    BlockType::BF16,
    BlockType::Q8_0,
    BlockType::Q4_0,
    BlockType::Q4_1,
    BlockType::Q5_0,
    BlockType::Q5_1,
    BlockType::Q2_K,
    BlockType::Q3_K,
    BlockType::Q4_K,
    BlockType::Q5_K,
    BlockType::Q6_K,
    BlockType::IQ4_NL,
    BlockType::IQ4_XS,
    BlockType::MXFP4,
];

/// Quantises one row of a matrix to blocks of `block_type` in `out`.
///
/// `row` is a whole number of blocks, and `out` has their size in bytes. `importance` has one non-negative value per
/// element, the mean square of the column's inputs, which weights the element's error. Floats, Q8_0 and MXFP4 ignore
/// it.
///
/// # Errors
/// [`Error::Operand`] if lengths disagree, for a non-finite value or importance, and for values too large for the
/// type or its scale; [`Error::Unsupported`] for a type that is not [`QUANTIZABLE`].
pub fn quantize_row(
    block_type: BlockType,
    row: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), Error> {
    let wrong =
        |operand, expected: String, found: String| Error::Operand { kernel: "quantize", operand, expected, found };
    if !QUANTIZABLE.contains(&block_type) {
        return Err(unsupported(block_type));
    }
    let (block_len, block_bytes) = (block_type.block_len() as usize, block_type.block_bytes() as usize);
    if !row.len().is_multiple_of(block_len) {
        let expected = format!("a multiple of {block_len} elements, the block of {block_type}");
        return Err(wrong("row", expected, format!("{} elements", row.len())));
    }
    if out.len() != row.len() / block_len * block_bytes {
        let expected = format!("{block_bytes} bytes per {block_len} of {} elements", row.len());
        return Err(wrong("out", expected, format!("{} bytes", out.len())));
    }
    if let Some(at) = row.iter().position(|x| !x.is_finite()) {
        return Err(wrong("row", "finite numbers".into(), format!("{} at element {at}", row[at])));
    }
    if let Some(importance) = importance {
        if importance.len() != row.len() {
            let expected = format!("{} elements, as many as the row", row.len());
            return Err(wrong("importance", expected, format!("{} elements", importance.len())));
        }
        if let Some(at) = importance.iter().position(|x| !(x.is_finite() && *x >= 0.0)) {
            let found = format!("{} at element {at}", importance[at]);
            return Err(wrong("importance", "finite numbers of 0 or more".into(), found));
        }
    }
    /// More than 65504 (the largest f16) times the largest scale and quant of any type, but small enough that no
    /// search overflows.
    const LARGEST: f32 = 1e9;
    let is_scaled = block_len > 1 && block_type != BlockType::MXFP4;
    let too_large = match row.iter().position(|x| is_scaled && x.abs() > LARGEST) {
        Some(at) => Some(at / block_len),
        None => {
            write(block_type, row, importance, out);
            out.chunks_exact(block_bytes).position(|block| !is_finite(block_type, block))
        }
    };
    match too_large {
        None => Ok(()),
        Some(block) => {
            let values = &row[block * block_len..][..block_len];
            let expected = format!("magnitudes that {block_type} can hold");
            Err(wrong("row", expected, format!("{:e} in block {block}", fit::extreme(values))))
        }
    }
}

fn unsupported(block_type: BlockType) -> Error {
    Error::Unsupported {
        format: "quantize",
        field: "block type".into(),
        found: block_type.name().into(),
        supported: QUANTIZABLE.map(BlockType::name).join(" "),
    }
}

/// Quantises a row of valid length.
fn write(block_type: BlockType, row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    // Of the whole row, as in ggml; computed only if used.
    let mean_square = || fit::sum_of_squares(row) / row.len() as f32;
    match block_type {
        BlockType::F16 => each(row, None, out, |[x]: &[f32; 1], _, out: &mut [u8; 2]| put_f16(out, 0, *x)),
        BlockType::BF16 => each(row, None, out, |[x]: &[f32; 1], _, out: &mut [u8; 2]| {
            *out = half::bf16::from_f32(*x).to_le_bytes();
        }),
        BlockType::Q4_0 => each_group(row, importance, mean_square, out, small::q4_0),
        BlockType::Q4_1 => each_group(row, importance, mean_square, out, small::q4_1),
        BlockType::Q5_0 => each_group(row, importance, mean_square, out, small::q5_0),
        BlockType::Q5_1 => each_group(row, importance, mean_square, out, small::q5_1),
        BlockType::Q8_0 => each_group(row, None, mean_square, out, small::q8_0),
        BlockType::MXFP4 => each_group(row, None, mean_square, out, small::mxfp4),
        BlockType::IQ4_NL => each(row, importance, out, iq4::iq4_nl),
        BlockType::IQ4_XS => each(row, importance, out, iq4::iq4_xs),
        BlockType::Q2_K => each(row, importance, out, k::q2_k),
        BlockType::Q3_K => each(row, importance, out, k::q3_k),
        BlockType::Q4_K => each(row, importance, out, k::q4_k),
        BlockType::Q5_K => each(row, importance, out, k::q5_k),
        BlockType::Q6_K => each(row, importance, out, k::q6_k),
        _ => each(row, None, out, |[x]: &[f32; 1], _, out: &mut [u8; 4]| *out = x.to_le_bytes()),
    }
}

/// Encodes block by block; the arrays' lengths bound every index of an encoder.
fn each<const LEN: usize, const BYTES: usize>(
    row: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
    encode: impl Fn(&[f32; LEN], Option<&[f32; LEN]>, &mut [u8; BYTES]),
) {
    let mut importance = importance.map(|importance| importance.as_chunks::<LEN>().0.iter());
    for (values, block) in row.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        encode(values, importance.as_mut().and_then(Iterator::next), block);
    }
}

/// As [`each`], for blocks of 32 that need the row's mean square.
fn each_group<const BYTES: usize>(
    row: &[f32],
    importance: Option<&[f32]>,
    mean_square: impl Fn() -> f32,
    out: &mut [u8],
    encode: impl Fn(Group<'_>, &mut [u8; BYTES]),
) {
    let mean_square = if importance.is_some() { mean_square() } else { 0.0 };
    each(row, importance, out, |values, importance, block| {
        encode(Group { values, importance: importance.map(|importance| (importance, mean_square)) }, block);
    });
}

/// Whether the floats of a block, its scales or values, are finite.
fn is_finite(block_type: BlockType, block: &[u8]) -> bool {
    let scales: &[usize] = match block_type {
        BlockType::F32 | BlockType::MXFP4 => return true,
        BlockType::BF16 => return block[1] & 0x7f != 0x7f || block[0] & 0x80 == 0,
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4_K | BlockType::Q5_K => &[0, 2],
        BlockType::Q2_K => &[80, 82],
        BlockType::Q3_K => &[108],
        BlockType::Q6_K => &[208],
        _ => &[0],
    };
    // An f16 with all exponent bits set is infinite or NaN.
    scales.iter().all(|&at| block[at + 1] & 0x7c != 0x7c)
}

/// Writes an f16 at byte `at`, rounding ties to even.
fn put_f16(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
}

/// A scale after rounding to f16.
fn rounded_f16(value: f32) -> f32 {
    half::f16::from_f32(value).to_f32()
}
