//! Block types: their sizes and decoders.
//!
//! A block is a group of consecutive weights of one row. Layouts match ggml's `ggml-common.h`; values are computed in
//! the order of ggml's `dequantize_row_*`, so that they agree bit for bit.

pub(crate) mod codebook;

use super::Error;
use codebook::{IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};

macro_rules! block_types {
    ($($name:ident, $ggml_id:expr, $in_safetensors:expr, $len:expr, $size_bytes:expr, $doc:expr;)*) => {
        /// Storage type of weights, named as in the files.
        // The formats' own names: `Q40` for `Q4_0` would help no one.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum BlockType {
            $(#[doc = $doc] $name,)*
        }

        impl BlockType {
            /// All block types, those with a GGML number first, in its order.
            pub const ALL: &'static [BlockType] = &[$(BlockType::$name,)*];

            /// Name in files, such as `Q4_0` or `BF16`.
            pub const fn name(self) -> &'static str {
                match self { $(BlockType::$name => stringify!($name),)* }
            }

            /// Number in GGUF files (`enum ggml_type`); `None` for types of safetensors only.
            pub const fn ggml_id(self) -> Option<u32> {
                match self { $(BlockType::$name => $ggml_id,)* }
            }

            /// Whether safetensors has this `dtype`.
            pub const fn in_safetensors(self) -> bool {
                match self { $(BlockType::$name => $in_safetensors,)* }
            }

            /// Elements in a block.
            pub const fn block_len(self) -> u64 {
                match self { $(BlockType::$name => $len,)* }
            }

            /// Bytes of a block.
            pub const fn block_bytes(self) -> u64 {
                match self { $(BlockType::$name => $size_bytes,)* }
            }

            /// Bytes of a tensor of this shape; `None` if it is not whole blocks, or too large to count.
            pub(crate) fn size_bytes(self, shape: &[u64]) -> Option<u64> {
                let n = shape.iter().try_fold(1_u64, |product, &dimension| product.checked_mul(dimension))?;
                let n_blocks = n.is_multiple_of(self.block_len()).then_some(n / self.block_len())?;
                n_blocks.checked_mul(self.block_bytes())
            }
        }
    };
}

// Name, GGML number, whether safetensors has it, elements and bytes per block.
block_types! {
    F32, Some(0), true, 1, 4, "32-bit float.";
    F16, Some(1), true, 1, 2, "16-bit float with 5 exponent bits.";
    Q4_0, Some(2), false, 32, 18, "4-bit quants, one f16 scale for 32.";
    Q4_1, Some(3), false, 32, 20, "4-bit quants, f16 scale and min for 32.";
    Q5_0, Some(6), false, 32, 22, "5-bit quants, one f16 scale for 32.";
    Q5_1, Some(7), false, 32, 24, "5-bit quants, f16 scale and min for 32.";
    Q8_0, Some(8), false, 32, 34, "8-bit quants, one f16 scale for 32.";
    Q8_1, Some(9), false, 32, 36, "8-bit quants, f16 scale and sum for 32; an activation format.";
    Q2_K, Some(10), false, 256, 84, "2-bit quants, 4-bit scales and mins per 16 of 256.";
    Q3_K, Some(11), false, 256, 110, "3-bit quants, 6-bit scales per 16 of 256.";
    Q4_K, Some(12), false, 256, 144, "4-bit quants, 6-bit scales and mins per 32 of 256.";
    Q5_K, Some(13), false, 256, 176, "5-bit quants, 6-bit scales and mins per 32 of 256.";
    Q6_K, Some(14), false, 256, 210, "6-bit quants, 8-bit scales per 16 of 256.";
    Q8_K, Some(15), false, 256, 292, "8-bit quants, one f32 scale for 256; an activation format.";
    IQ2_XXS, Some(16), false, 256, 66, "2.06 bits a weight, from a codebook.";
    IQ2_XS, Some(17), false, 256, 74, "2.31 bits a weight, from a codebook.";
    IQ3_XXS, Some(18), false, 256, 98, "3.06 bits a weight, from a codebook.";
    IQ1_S, Some(19), false, 256, 50, "1.56 bits a weight, from a codebook.";
    IQ4_NL, Some(20), false, 32, 18, "4-bit index into 16 uneven levels, one f16 scale for 32.";
    IQ3_S, Some(21), false, 256, 110, "3.44 bits a weight, from a codebook.";
    IQ2_S, Some(22), false, 256, 82, "2.56 bits a weight, from a codebook.";
    IQ4_XS, Some(23), false, 256, 136, "The levels of `IQ4_NL`, 6-bit scales per 32 of 256.";
    I8, Some(24), true, 1, 1, "8-bit signed integer.";
    I16, Some(25), true, 1, 2, "16-bit signed integer.";
    I32, Some(26), true, 1, 4, "32-bit signed integer.";
    I64, Some(27), true, 1, 8, "64-bit signed integer.";
    F64, Some(28), true, 1, 8, "64-bit float.";
    IQ1_M, Some(29), false, 256, 56, "1.75 bits a weight, from a codebook.";
    BF16, Some(30), true, 1, 2, "The upper half of a 32-bit float.";
    TQ1_0, Some(34), false, 256, 54, "Ternary, five weights in a byte.";
    TQ2_0, Some(35), false, 256, 66, "Ternary, four weights in a byte.";
    MXFP4, Some(39), false, 32, 17, "4-bit floats, one power of two for 32 (OCP microscaling).";
    NVFP4, Some(40), false, 64, 36, "4-bit floats, an 8-bit float scale per 16 of 64.";
    Q1_0, Some(41), false, 128, 18, "Signs, one f16 scale for 128.";
    Q2_0, Some(42), false, 64, 18, "2-bit quants, one f16 scale for 64.";
    BOOL, None, true, 1, 1, "A byte, 0 or 1.";
    U8, None, true, 1, 1, "8-bit unsigned integer.";
    U16, None, true, 1, 2, "16-bit unsigned integer.";
    U32, None, true, 1, 4, "32-bit unsigned integer.";
    U64, None, true, 1, 8, "64-bit unsigned integer.";
    F8_E4M3, None, true, 1, 1, "8-bit float with 4 exponent bits.";
    F8_E5M2, None, true, 1, 1, "8-bit float with 5 exponent bits.";
    F8_E4M3FNUZ, None, true, 1, 1, "8-bit float with 4 exponent bits and a single zero.";
    F8_E5M2FNUZ, None, true, 1, 1, "8-bit float with 5 exponent bits and a single zero.";
    F8_E8M0, None, true, 1, 1, "A power of two, the scale of microscaling blocks.";
    F6_E2M3, None, true, 4, 3, "6-bit float with 2 exponent bits.";
    F6_E3M2, None, true, 4, 3, "6-bit float with 3 exponent bits.";
    F4, None, true, 2, 1, "4-bit float.";
    C64, None, true, 1, 8, "Complex number of two 32-bit floats.";
}

impl BlockType {
    /// The type with this number in GGUF files; `None` if the number is unknown or was removed.
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|block_type| block_type.ggml_id() == Some(id))
    }

    /// The type with this name in safetensors.
    pub fn from_safetensors(dtype: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|block_type| block_type.in_safetensors() && block_type.name() == dtype)
    }
}

impl std::fmt::Display for BlockType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Decodes `bytes`, which are whole blocks, to `out`, which has one f32 per element.
///
/// # Errors
/// [`Error::Operand`] if the lengths disagree, [`Error::Unsupported`] for a type without a decoder (integers,
/// activation formats and the smaller floats of safetensors).
pub fn dequantize(block_type: BlockType, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let decode: fn(&[u8], &mut [f32]) = match block_type {
        BlockType::F32 => |bytes, out| each_block::<4, 1>(bytes, out, |block, out| *out = [f32::from_le_bytes(*block)]),
        BlockType::F16 => |bytes, out| each_block::<2, 1>(bytes, out, |block, out| *out = [f16_at(block, 0)]),
        BlockType::BF16 => |bytes, out| each_block::<2, 1>(bytes, out, bf16),
        BlockType::Q4_0 => |bytes, out| each_block(bytes, out, q4_0),
        BlockType::Q4_1 => |bytes, out| each_block(bytes, out, q4_1),
        BlockType::Q5_0 => |bytes, out| each_block(bytes, out, q5_0),
        BlockType::Q5_1 => |bytes, out| each_block(bytes, out, q5_1),
        BlockType::Q8_0 => |bytes, out| each_block(bytes, out, q8_0),
        BlockType::Q2_K => |bytes, out| each_block(bytes, out, q2_k),
        BlockType::Q3_K => |bytes, out| each_block(bytes, out, q3_k),
        BlockType::Q4_K => |bytes, out| each_block(bytes, out, q4_k),
        BlockType::Q5_K => |bytes, out| each_block(bytes, out, q5_k),
        BlockType::Q6_K => |bytes, out| each_block(bytes, out, q6_k),
        BlockType::IQ4_NL => |bytes, out| each_block(bytes, out, iq4_nl),
        BlockType::IQ4_XS => |bytes, out| each_block(bytes, out, iq4_xs),
        BlockType::IQ3_S => |bytes, out| each_block::<110, 256>(bytes, out, |block, out| IQ3_S.decode(block, out)),
        BlockType::IQ3_XXS => |bytes, out| each_block::<98, 256>(bytes, out, |block, out| IQ3_XXS.decode(block, out)),
        BlockType::IQ2_S => |bytes, out| each_block::<82, 256>(bytes, out, |block, out| IQ2_S.decode(block, out)),
        BlockType::IQ2_XS => |bytes, out| each_block::<74, 256>(bytes, out, |block, out| IQ2_XS.decode(block, out)),
        BlockType::IQ2_XXS => |bytes, out| each_block::<66, 256>(bytes, out, |block, out| IQ2_XXS.decode(block, out)),
        BlockType::IQ1_S => |bytes, out| each_block(bytes, out, codebook::iq1_s),
        BlockType::IQ1_M => |bytes, out| each_block(bytes, out, codebook::iq1_m),
        BlockType::TQ1_0 => |bytes, out| each_block(bytes, out, tq1_0),
        BlockType::TQ2_0 => |bytes, out| each_block(bytes, out, tq2_0),
        BlockType::MXFP4 => |bytes, out| each_block(bytes, out, mxfp4),
        BlockType::NVFP4 => |bytes, out| each_block(bytes, out, nvfp4),
        BlockType::Q2_0 => |bytes, out| each_block(bytes, out, q2_0),
        BlockType::Q1_0 => |bytes, out| each_block(bytes, out, q1_0),
        other => {
            return Err(Error::Unsupported {
                format: "dequantize",
                field: "block type".into(),
                found: other.name().into(),
                supported: "F32, F16, BF16, Q1_0 to Q8_0, Q2_K to Q6_K, IQ1_S to IQ4_XS, TQ1_0, TQ2_0, MXFP4, NVFP4"
                    .into(),
            });
        }
    };
    let (len, block_bytes) = (out.len() as u64, block_type.block_bytes());
    let expected = len.is_multiple_of(block_type.block_len()).then(|| len / block_type.block_len() * block_bytes);
    if expected != Some(bytes.len() as u64) {
        return Err(Error::Operand {
            kernel: "dequantize",
            operand: "bytes",
            expected: format!("{block_bytes} bytes per {} of {len} elements", block_type.block_len()),
            found: format!("{} bytes", bytes.len()),
        });
    }
    decode(bytes, out);
    Ok(())
}

/// Decodes block by block; the compiler checks the arrays' lengths, which bound every index below.
fn each_block<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    for (block, values) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, values);
    }
}

/// The f16 at byte `at`, subnormals included.
fn f16_at<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn bf16(block: &[u8; 2], out: &mut [f32; 1]) {
    *out = [half::bf16::from_le_bytes(*block).to_f32()];
}

// In the 32-element types byte j holds elements j (low nibble) and j + 16 (high nibble).

fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    for j in 0..16 {
        let quants = block[2 + j];
        out[j] = ((quants & 15) as f32 - 8.0) * scale;
        out[j + 16] = ((quants >> 4) as f32 - 8.0) * scale;
    }
}

fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, min) = (f16_at(block, 0), f16_at(block, 2));
    for j in 0..16 {
        let quants = block[4 + j];
        out[j] = (quants & 15) as f32 * scale + min;
        out[j + 16] = (quants >> 4) as f32 * scale + min;
    }
}

/// Quants j and j + 16 of a 5-bit block: nibbles from `nibbles`, fifth bits from bits j and j + 16 of `high`.
fn five_bits(nibbles: u8, high: u32, j: usize) -> (f32, f32) {
    let low_half = (nibbles & 15) as u32 | (high >> j & 1) << 4;
    let high_half = (nibbles >> 4) as u32 | (high >> (j + 16) & 1) << 4;
    (low_half as f32, high_half as f32)
}

fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for j in 0..16 {
        let (first, second) = five_bits(block[6 + j], high, j);
        out[j] = (first - 16.0) * scale;
        out[j + 16] = (second - 16.0) * scale;
    }
}

fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, min) = (f16_at(block, 0), f16_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for j in 0..16 {
        let (first, second) = five_bits(block[8 + j], high, j);
        out[j] = first * scale + min;
        out[j + 16] = second * scale + min;
    }
}

fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    for j in 0..32 {
        out[j] = (block[2 + j] as i8) as f32 * scale;
    }
}

// The 256-element types have two halves of 128. In Q2_K and Q3_K a half has 32 bytes of quants, and bits 2k and 2k +
// 1 of each byte are part k of 32 elements.

/// Bytes: 16 of scales (low nibble) and mins (high nibble), 64 of quants, scale of scales, scale of mins.
fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scale, min) = (f16_at(block, 80), f16_at(block, 82));
    for (i, value) in out.iter_mut().enumerate() {
        let (half, part, l) = (i / 128, i / 32 % 4, i % 32);
        let scales = block[i / 16];
        let quant = block[16 + half * 32 + l] >> (2 * part) & 3;
        *value = scale * (scales & 15) as f32 * quant as f32 - min * (scales >> 4) as f32;
    }
}

/// Bytes: 32 of third bits, 64 of quants, 12 of scales (low nibbles of 16, then their upper two bits), scale of scales.
fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let scale = f16_at(block, 108);
    for (i, value) in out.iter_mut().enumerate() {
        let (half, part, l) = (i / 128, i / 32 % 4, i % 32);
        let group = i / 16;
        let low = block[96 + group % 8] >> (4 * (group / 8)) & 15;
        let high = block[104 + group % 4] >> (2 * (group / 4)) & 3;
        let group_scale = scale * ((low | high << 4) as f32 - 32.0);
        // A cleared third bit subtracts four.
        let third = block[l] >> (4 * half + part) & 1;
        let quant = block[32 + half * 32 + l] >> (2 * part) & 3 | third << 2;
        *value = group_scale * (quant as f32 - 4.0);
    }
}

/// The 6-bit scale and min of group `j` (of 8) in Q4_K and Q5_K. `packed` holds the scales of groups 0 to 3, their
/// mins, then the low nibbles of both for groups 4 to 7, whose upper bits are the top bits of the first eight bytes.
pub(crate) fn scale_and_min(packed: &[u8], j: usize) -> (u8, u8) {
    match j < 4 {
        true => (packed[j] & 63, packed[j + 4] & 63),
        false => {
            let low = packed[j + 4];
            (low & 15 | packed[j - 4] >> 6 << 4, low >> 4 | packed[j] >> 6 << 4)
        }
    }
}

/// Bytes: scale of scales, scale of mins, 12 of scales and mins, 128 of quants: each 32 bytes hold one group of 32 in
/// their low nibbles and the next in their high ones.
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (scale, min) = (f16_at(block, 0), f16_at(block, 2));
    for group in 0..8 {
        let (group_scale, group_min) = scale_and_min(&block[4..16], group);
        for l in 0..32 {
            let quant = block[16 + group / 2 * 32 + l] >> (4 * (group % 2)) & 15;
            out[group * 32 + l] = scale * group_scale as f32 * quant as f32 - min * group_min as f32;
        }
    }
}

/// Like Q4_K with 32 bytes of fifth bits before the quants: bit `group` of byte l belongs to element l of that group.
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (scale, min) = (f16_at(block, 0), f16_at(block, 2));
    for group in 0..8 {
        let (group_scale, group_min) = scale_and_min(&block[4..16], group);
        for l in 0..32 {
            let fifth = block[16 + l] >> group & 1;
            let quant = block[48 + group / 2 * 32 + l] >> (4 * (group % 2)) & 15 | fifth << 4;
            out[group * 32 + l] = scale * group_scale as f32 * quant as f32 - min * group_min as f32;
        }
    }
}

/// Bytes: 128 of low nibbles, 64 of upper two bits, 16 signed scales, scale of scales. In each half, parts 0 and 1
/// (of 32 elements) are the low nibbles of two runs of 32 bytes, parts 2 and 3 the high ones.
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scale = f16_at(block, 208);
    for (i, value) in out.iter_mut().enumerate() {
        let (half, part, l) = (i / 128, i / 32 % 4, i % 32);
        let low = block[half * 64 + part % 2 * 32 + l] >> (4 * (part / 2)) & 15;
        let high = block[128 + half * 32 + l] >> (2 * part) & 3;
        let group_scale = (block[192 + i / 16] as i8) as f32;
        *value = scale * group_scale * ((low | high << 4) as f32 - 32.0);
    }
}

/// The sixteen levels of IQ4_NL and IQ4_XS (`kvalues_iq4nl` in ggml).
pub(crate) const IQ4_LEVELS: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = f16_at(block, 0);
    for j in 0..16 {
        let quants = block[2 + j];
        out[j] = scale * IQ4_LEVELS[(quants & 15) as usize];
        out[j + 16] = scale * IQ4_LEVELS[(quants >> 4) as usize];
    }
}

/// Bytes: scale of scales, upper two bits of eight scales, their low nibbles, 128 of quants as eight IQ4_NL groups.
fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let scale = f16_at(block, 0);
    let high = u16::from_le_bytes([block[2], block[3]]);
    for group in 0..8 {
        let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
        let group_scale = scale * ((low as u16 | (high >> (2 * group) & 3) << 4) as f32 - 32.0);
        for j in 0..16 {
            let quants = block[8 + group * 16 + j];
            out[group * 32 + j] = group_scale * IQ4_LEVELS[(quants & 15) as usize];
            out[group * 32 + j + 16] = group_scale * IQ4_LEVELS[(quants >> 4) as usize];
        }
    }
}

/// Twice the values of a 4-bit float with 2 exponent bits (OCP microscaling 1.0, section 5.3.3).
pub(crate) const FP4_DOUBLED: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// Half of the scale 2^(exponent - 127), to undo the doubled values; subnormal for exponents 0 and 1.
pub(crate) fn half_scale(exponent: u8) -> f32 {
    let exponent = u32::from(exponent);
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 })
}

/// Bytes: a biased exponent, 16 of quants.
fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    let half_scale = half_scale(block[0]);
    for j in 0..16 {
        let quants = block[1 + j];
        out[j] = half_scale * FP4_DOUBLED[(quants & 15) as usize];
        out[j + 16] = half_scale * FP4_DOUBLED[(quants >> 4) as usize];
    }
}

/// Half the value of an unsigned 8-bit float with 4 exponent bits, to undo the doubled values. NaN means 0, and the
/// eighth bit is ignored.
fn half_float_scale(bits: u8) -> f32 {
    match (bits, bits >> 3 & 15, f32::from(bits & 7)) {
        (0x7f, ..) => 0.0,
        (_, 0, fraction) => fraction * 2f32.powi(-10),
        (_, exponent, fraction) => (8.0 + fraction) * 2f32.powi(i32::from(exponent) - 11),
    }
}

/// Bytes: four scales, 32 of quants: eight bytes hold 16 elements, the first eight in their low nibbles.
fn nvfp4(block: &[u8; 36], out: &mut [f32; 64]) {
    for (i, value) in out.iter_mut().enumerate() {
        let (run, j) = (i / 16, i % 16);
        let quant = block[4 + 8 * run + j % 8] >> (4 * (j / 8)) & 15;
        *value = half_float_scale(block[run]) * FP4_DOUBLED[quant as usize];
    }
}

fn q2_0(block: &[u8; 18], out: &mut [f32; 64]) {
    let scale = f16_at(block, 0);
    for (i, value) in out.iter_mut().enumerate() {
        *value = (f32::from(block[2 + i / 4] >> (2 * (i % 4)) & 3) - 1.0) * scale;
    }
}

fn q1_0(block: &[u8; 18], out: &mut [f32; 128]) {
    let scale = f16_at(block, 0);
    for (i, value) in out.iter_mut().enumerate() {
        *value = if block[2 + i / 8] >> (i % 8) & 1 == 1 { scale } else { -scale };
    }
}

/// Bytes: 48 with five ternary digits each, four with four, scale. A byte is a fraction of 256 with its leading
/// digits first; a run of 32 bytes and one of 16 hold the first digit of each byte, then the second ones and so on.
fn tq1_0(block: &[u8; 54], out: &mut [f32; 256]) {
    let scale = f16_at(block, 52);
    let runs: [(usize, usize, u32); 3] = [(0, 32, 5), (32, 16, 5), (48, 4, 4)];
    let digits = runs.into_iter().flat_map(|(start, len, n_digits)| {
        (0..n_digits).flat_map(move |n| (start..start + len).map(move |at| (at, n)))
    });
    for (value, (at, n)) in out.iter_mut().zip(digits) {
        let digit = (u16::from(block[at].wrapping_mul(3u8.wrapping_pow(n))) * 3) >> 8;
        *value = (f32::from(digit) - 1.0) * scale;
    }
}

/// Bytes: 64 of quants, scale. In a half, bits 2k and 2k + 1 of each of 32 bytes are part k of 32 elements.
fn tq2_0(block: &[u8; 66], out: &mut [f32; 256]) {
    let scale = f16_at(block, 64);
    for (i, value) in out.iter_mut().enumerate() {
        let (half, part, l) = (i / 128, i / 32 % 4, i % 32);
        *value = (f32::from(block[half * 32 + l] >> (2 * part) & 3) - 1.0) * scale;
    }
}
