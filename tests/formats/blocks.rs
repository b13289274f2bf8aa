//! Block decoders against values of other implementations.

use super::common;
use super::data::{self, Reference};
use tilewright::Error;
use tilewright::formats::block::dequantize;
use tilewright::formats::{BlockType, Gguf};

/// Quantised types.
const DECODED: [BlockType; 25] = [
    BlockType::Q4_0,
    BlockType::Q4_1,
    BlockType::Q5_0,
    BlockType::Q5_1,
    BlockType::Q8_0,
    BlockType::Q2_K,
    BlockType::Q3_K,
    BlockType::Q4_K,
    BlockType::Q5_K,
    BlockType::Q6_K,
    BlockType::IQ4_NL,
    BlockType::IQ4_XS,
    BlockType::IQ3_S,
    BlockType::IQ3_XXS,
    BlockType::IQ2_S,
    BlockType::IQ2_XS,
    BlockType::IQ2_XXS,
    BlockType::IQ1_S,
    BlockType::TQ1_0,
    BlockType::TQ2_0,
    BlockType::MXFP4,
    // In the second file only.
    BlockType::IQ1_M,
    BlockType::NVFP4,
    BlockType::Q2_0,
    BlockType::Q1_0,
];

/// Values equal ggml's bit for bit, for random bits with scales of every kind, subnormals included, and for every
/// codebook entry.
#[test]
fn dequantised_blocks_match_ggml_bit_for_bit() {
    let Some(data) = common::data(&["quant-vectors"]) else { return };
    for (file, n_types) in [("vectors.safetensors", 21), ("more.safetensors", 25)] {
        let vectors = Reference::open(data.join("quant-vectors").join(file));
        for block_type in &DECODED[..n_types] {
            let want = vectors.f32s(&format!("{block_type}.values"));
            let mut got = vec![f32::NAN; want.len()];
            dequantize(*block_type, vectors.bytes(&format!("{block_type}.blocks")), &mut got).unwrap();
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_eq!(got.to_bits(), want.to_bits(), "{block_type}, value {i}: {got:e} instead of {want:e}");
            }
            println!("{file}: {block_type}: {} values equal", want.len());
        }
    }
}

/// Sizes of all types with vectors, as in `ggml-common.h` and the shared vectors.
#[test]
fn block_sizes_match_ggml() {
    let Some(data) = common::data(&["quant-vectors"]) else { return };
    let vectors = Reference::open(data.join("quant-vectors/vectors.safetensors"));
    let mut n_types = 0;
    for &block_type in BlockType::ALL {
        if DECODED[..21].contains(&block_type) {
            let bytes = vectors.bytes(&format!("{block_type}.blocks")).len() as u64;
            assert_eq!(bytes, 6 * 512 / block_type.block_len() * block_type.block_bytes(), "{block_type}");
            n_types += 1;
        }
    }
    assert_eq!(n_types, 21);
}

/// Every f16, computed here from sign, exponent and fraction.
#[test]
fn f16_values_are_exact() {
    for bits in 0..=u16::MAX {
        let (sign, exponent, fraction) = (bits >> 15, (bits >> 10 & 31) as i32, (bits & 1023) as f64);
        let magnitude = match exponent {
            0 => fraction * 2_f64.powi(-24),
            31 if fraction == 0.0 => f64::INFINITY,
            31 => continue, // a NaN: only its being NaN is guaranteed
            _ => (1024.0 + fraction) * 2_f64.powi(exponent - 25),
        };
        let want = if sign == 1 { -magnitude } else { magnitude };
        let mut got = [0.0];
        dequantize(BlockType::F16, &bits.to_le_bytes(), &mut got).unwrap();
        assert_eq!(f64::from(got[0]).to_bits(), want.to_bits(), "{bits:#06x}");
    }
}

#[test]
fn bf16_and_f32_keep_their_bits() {
    let mut got = [0.0; 2];
    dequantize(BlockType::BF16, &[0x80, 0x3F, 0x01, 0x80], &mut got).unwrap();
    assert_eq!(got.map(f32::to_bits), [0x3F80_0000, 0x8001_0000]);
    dequantize(BlockType::F32, &[0, 0, 0x80, 0x3F, 1, 0, 0, 0x80], &mut got).unwrap();
    assert_eq!(got.map(f32::to_bits), [0x3F80_0000, 0x8000_0001]);
}

#[test]
fn wrong_lengths_and_types_are_errors() {
    for block_type in DECODED {
        let (len, n_bytes) = (block_type.block_len() as usize, block_type.block_bytes() as usize);
        let bytes = vec![0; 2 * n_bytes];
        let mut out = vec![0.0; 2 * len];
        assert!(dequantize(block_type, &bytes, &mut out).is_ok());
        for (n_bytes, n_out) in [(2 * n_bytes - 1, 2 * len), (n_bytes, 2 * len), (2 * n_bytes, 2 * len - 1), (0, len)] {
            let result = dequantize(block_type, &bytes[..n_bytes], &mut out[..n_out]);
            assert!(matches!(result, Err(Error::Operand { operand: "bytes", .. })), "{block_type}: {result:?}");
        }
    }
    let result = dequantize(BlockType::Q8_K, &[0; 292], &mut [0.0; 256]);
    assert!(matches!(result, Err(Error::Unsupported { .. })), "{result:?}");
}

/// Tests on files that are not in the repository: see `scripts/test`.
mod further_data {
    use super::*;

    /// In the smaller files each tensor is within half a quantisation step of the F32 weights.
    #[test]
    fn quantised_files_are_close_to_the_float_file() {
        let Some(folder) = common::data(&["stories260k"]) else { return };
        let open = |name: &str| {
            let bytes = data::read(folder.join("stories260k").join(name));
            (Gguf::parse(&bytes, bytes.len() as u64).unwrap(), bytes)
        };
        let values = |(gguf, bytes): &(Gguf, Vec<u8>), name: &str| {
            let tensor = gguf.tensor(name).unwrap();
            let mut values = vec![0.0; tensor.n_elements() as usize];
            dequantize(tensor.block_type, tensor.bytes(bytes).unwrap(), &mut values).unwrap();
            (tensor.block_type, values)
        };
        let float = open("stories260k-f32.gguf");
        for file in ["stories260k-f16.gguf", "stories260k-q8_0.gguf", "stories260k-q4_0.gguf"] {
            let other = open(file);
            assert_eq!(other.0.tensors.len(), float.0.tensors.len());
            let mut types = vec![];
            for tensor in &float.0.tensors {
                let (_, want) = values(&float, &tensor.name);
                let (block_type, got) = values(&other, &tensor.name);
                types.push(block_type.name());
                for (want, got) in want.chunks(32).zip(got.chunks(32)) {
                    let largest = want.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
                    // Half a step, or a whole one for an asymmetric range, plus the rounding of the f16 scale.
                    let bound = match block_type {
                        BlockType::F32 => 0.0,
                        BlockType::F16 => largest / 2048.0 + 1e-7,
                        BlockType::Q8_0 => largest / 127.0 * 0.5 + largest / 1024.0,
                        BlockType::Q4_0 => largest / 8.0 + largest / 1024.0,
                        other => panic!("{other} in {file}"),
                    };
                    for (want, got) in want.iter().zip(got) {
                        assert!((want - got).abs() <= bound, "{file}, {}: {got} for {want}", tensor.name);
                    }
                }
            }
            types.sort_unstable();
            types.dedup();
            println!("{file}: {} tensors within bounds, {types:?}", other.0.tensors.len());
        }
    }
}
