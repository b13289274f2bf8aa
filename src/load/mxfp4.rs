//! MXFP4 tensors (OCP Microscaling Formats 1.0, 2023) as gpt-oss publishes them: the 4-bit floats in `.._blocks` of
//! `[E, rows, groups, 16]` bytes, and the exponents, one per 32 floats, in `.._scales` of `[E, rows, groups]`.
//! Kernels read GGUF's layout: an exponent followed by its floats, in another order.

use crate::error::Error;
use crate::formats::{BlockType, TensorInfo};

/// File bytes of a group's 32 floats.
pub(super) const GROUP: usize = 16;

/// The common name of both tensors, and whether this one has the scales; `None` for other tensors.
pub(super) fn half(name: &str) -> Option<(&str, bool)> {
    let of = |suffix| name.strip_suffix(suffix);
    of("_blocks").map(|stem| (stem, false)).or(of("_scales").map(|stem| (stem, true)))
}

/// The joined tensor: as many rows, `32 * groups` columns. Offset and size are those of `blocks`.
///
/// # Errors
/// [`Error::Config`] if their types or shapes do not match.
pub(super) fn joined(name: &str, blocks: &TensorInfo, scales: &TensorInfo) -> Result<TensorInfo, Error> {
    let wrong = |tensor: &TensorInfo, expected: String| {
        let found = format!("{} of shape {:?}", tensor.block_type, tensor.shape);
        Err(Error::Config { field: tensor.name.clone(), expected, found })
    };
    let [n_experts, rows, groups, 16] = blocks.shape[..] else {
        return wrong(blocks, "U8 of shape [experts, rows, groups, 16]".into());
    };
    if blocks.block_type != BlockType::U8 {
        return wrong(blocks, "U8".into());
    }
    if scales.block_type != BlockType::U8 || scales.shape != [n_experts, rows, groups] {
        return wrong(
            scales,
            format!("U8 of shape {:?}, one byte per 16 of `{}`", [n_experts, rows, groups], blocks.name),
        );
    }
    // The bytes exist, so this cannot overflow.
    let shape = vec![n_experts, rows, 2 * GROUP as u64 * groups];
    Ok(TensorInfo { name: name.into(), shape, block_type: BlockType::MXFP4, ..blocks.clone() })
}

/// Rows of `groups` groups in GGUF's layout, from matrices of `rows` rows; with `paired`, interleaved gates and ups
/// become all gates, then all ups.
pub(super) fn repacked(blocks: &[u8], scales: &[u8], [rows, groups]: [usize; 2], paired: bool) -> Vec<u8> {
    let from = |row: usize| if paired { row % (rows / 2) * 2 + row / (rows / 2) } else { row };
    let (blocks, _) = blocks.as_chunks::<GROUP>();
    let mut packed = Vec::with_capacity(scales.len() * (GROUP + 1));
    for row in 0..scales.len() / groups {
        let first = (row / rows * rows + from(row % rows)) * groups;
        for group in first..first + groups {
            packed.push(scales[group]);
            // The file packs neighbours into a byte; GGUF packs one float of each half.
            let float = |i: usize| blocks[group][i / 2] >> (4 * (i % 2)) & 15;
            packed.extend((0..GROUP).map(|i| float(i) | float(i + GROUP) << 4));
        }
    }
    packed
}
