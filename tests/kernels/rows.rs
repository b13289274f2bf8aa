//! Rows of cached keys and values, packed and decoded as `shaders/shared/row_f32.wgsl` and its like describe.

use half::f16;
use tilewright::kernels::{CachedKeys, KvType};
use tilewright::{Error, Tensor};

use crate::common::Expected;
use crate::harness::{PATTERN, Want};

/// A NaN as a float, as two halves and as a scale: must never be read.
pub const NAN_WORD: u32 = 0x7fc0_7fc0;

/// The tag of a variant.
pub fn tag(kind: KvType) -> &'static str {
    match kind {
        KvType::F32 => "F32",
        KvType::F16 => "F16",
        KvType::Q8_0 => "Q8_0",
    }
}

/// Words per row.
pub fn words(kind: KvType, d: u32) -> u32 {
    let blocks = d.div_ceil(32);
    4 * match kind {
        KvType::F32 => d.div_ceil(4),
        KvType::F16 => d.div_ceil(8),
        KvType::Q8_0 => 2 * blocks + blocks.div_ceil(4),
    }
}

/// Packs floats in rows of `d`.
pub fn pack(kind: KvType, rows: &[f32], d: u32) -> Vec<u32> {
    let mut all = Vec::new();
    for row in rows.chunks_exact(d as usize) {
        let mut bytes: Vec<u8> = match kind {
            KvType::F32 => row.iter().flat_map(|x| x.to_le_bytes()).collect(),
            KvType::F16 => row.iter().flat_map(|x| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_le_bytes()).collect(),
            KvType::Q8_0 => {
                let scales: Vec<f32> =
                    row.chunks(32).map(|block| block.iter().fold(0.0f32, |m, x| m.max(x.abs())) / 127.0).collect();
                let mut quants = vec![0u8; 32 * scales.len()];
                for (i, x) in row.iter().enumerate() {
                    let scale = scales[i / 32];
                    let quant = if scale > 1e-37 { (x / scale).round().clamp(-127.0, 127.0) } else { 0.0 };
                    quants[i] = (quant as i8) as u8;
                }
                quants.into_iter().chain(scales.iter().flat_map(|scale| scale.to_le_bytes())).collect()
            }
        };
        bytes.resize(4 * words(kind, d) as usize, 0);
        all.extend(bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes"))));
    }
    all
}

/// Decodes words in rows of `d`.
pub fn unpack(kind: KvType, packed: &[u32], d: u32) -> Vec<f32> {
    let mut all = Vec::new();
    for row in packed.chunks_exact(words(kind, d) as usize) {
        let bytes: Vec<u8> = row.iter().flat_map(|word| word.to_le_bytes()).collect();
        let float = |at: usize| f32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        all.extend((0..d as usize).map(|i| match kind {
            KvType::F32 => float(4 * i),
            KvType::F16 => f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32(),
            KvType::Q8_0 => f32::from(bytes[i] as i8) * float((d.div_ceil(32) * 32) as usize + i / 32 * 4),
        }));
    }
    all
}

/// Rounding error of a row's element.
fn rounding(kind: KvType, row: &[Expected], i: usize) -> f64 {
    match kind {
        KvType::F32 => 0.0,
        // An ulp, for any rounding of ties; or the smallest normal number, which may be flushed.
        KvType::F16 => row[i].value.abs() / 1024.0 + 6.2e-5,
        KvType::Q8_0 => {
            let block = &row[i / 32 * 32..row.len().min(i / 32 * 32 + 32)];
            let largest = block.iter().map(|e| e.value.abs() + e.bound + e.floor).fold(0.0, f64::max);
            0.501 * largest / 127.0 + 1e-36
        }
    }
}

/// Rows that hold `want` up to rounding; those that begin with a NaN are unchanged from `before`, or blank.
pub fn check(kind: KvType, want: Vec<Expected>, d: u32, before: Option<Vec<u32>>) -> Want {
    Want::Check(Box::new(move |packed| {
        let n_words = words(kind, d) as usize;
        for (r, (row, want)) in packed.chunks_exact(n_words).zip(want.chunks_exact(d as usize)).enumerate() {
            if want[0].value.is_nan() {
                let was = |i: usize| before.as_ref().map_or(PATTERN, |before| before[r * n_words + i]);
                if let Some(i) = (0..n_words).find(|&i| row[i] != was(i)) {
                    return Err(format!("word {i} of row {r} was written and should not have been"));
                }
                continue;
            }
            for (i, (&got, expected)) in unpack(kind, row, d).iter().zip(want).enumerate() {
                let value = if kind == KvType::F16 { expected.value.clamp(-65504.0, 65504.0) } else { expected.value };
                let limit = expected.bound + expected.floor + rounding(kind, want, i);
                let difference = (f64::from(got) - value).abs();
                if difference.is_nan() || difference > limit {
                    return Err(format!("element {i} of row {r} is {got:e}, expected {value:e} within {limit:.1e}"));
                }
            }
        }
        Ok(())
    }))
}

/// Both tensors as a layer's cache.
pub fn cached(kind: KvType, [k, v]: [&Tensor; 2], capacity: u32) -> Result<CachedKeys, Error> {
    Ok(CachedKeys { k: k.clone(), v: Some(v.clone()), kind, capacity })
}
