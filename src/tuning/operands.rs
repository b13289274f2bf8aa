//! Operands of the tuner, the self-test and the benches: seeded normal floats, not of high statistical quality.
//! Functions called by the self-test's checks are not inlined: 34 copies would be a fiftieth of the WASM module.

use crate::cpu::cached::write_row;
use crate::device::Device;
use crate::dtype::WeightType;
use crate::error::Error;
use crate::kernels::{CachedKeys, KvType};
use crate::matrix::Matrix;
use crate::tensor::Tensor;

/// An input of numbers in [-1, 1).
#[inline(never)]
pub(crate) fn input(device: &Device, shape: &[u32]) -> Result<Tensor, Error> {
    device.upload("x", shape, &uniform(shape.iter().product::<u32>() as usize))
}

/// Cached keys and values of numbers in [-1, 1).
#[inline(never)]
pub(crate) fn keys(device: &Device, kind: KvType, shape: [u32; 3]) -> Result<CachedKeys, Error> {
    let cached = CachedKeys::declare("cache", kind, shape, shape[1])?;
    fill(device, &cached, shape)?;
    Ok(cached)
}

/// As [`keys`], of keys that hold their values.
#[inline(never)]
pub(crate) fn latent_keys(device: &Device, kind: KvType, shape: [u32; 3]) -> Result<CachedKeys, Error> {
    let cached = CachedKeys::declare_latent("cache", kind, shape, shape[1])?;
    fill(device, &cached, shape)?;
    Ok(cached)
}

fn fill(device: &Device, cached: &CachedKeys, shape @ [.., head_dim]: [u32; 3]) -> Result<(), Error> {
    let kind = cached.kind;
    for tensor in [&cached.k].into_iter().chain(&cached.v) {
        let mut content = vec![0; tensor.len()];
        let heads = uniform(shape.iter().product::<u32>() as usize);
        let rows = content.chunks_exact_mut(kind.row_words(head_dim) as usize);
        rows.zip(heads.chunks_exact(head_dim as usize)).for_each(|(row, head)| write_row(kind, head, row));
        device.write(tensor, 0, &content)?;
    }
    Ok(())
}

/// A matrix whose words are normal numbers whether read as floats, halves, scales or quants: subnormals and NaNs can
/// have other speeds.
#[inline(never)]
pub(crate) fn matrix(device: &Device, weight: WeightType, rows: u32, cols: u32) -> Result<Matrix, Error> {
    let matrix = Matrix::declare(&device.target(), "w", weight, rows, cols)?;
    for slab in matrix.slabs() {
        let n_quants = matrix.quants_words(slab) as usize;
        let ordinary = |(i, word): (usize, u32)| match (weight.layout(), i.checked_sub(n_quants)) {
            // Tails are 8-bit exponents.
            (WeightType::MXFP4, Some(_)) => (word & 0x0707_0707) | 0x7878_7878,
            // The outermost level is 15 or 15.5.
            (WeightType::IQ3_S, Some(at)) if at % 2 == 0 => (word & 0x80ff) | 0x4b80_3800,
            _ => (word & 0x80ff_80ff) | 0x3800_3800,
        };
        let content: Vec<u32> = words(slab.words.len()).enumerate().map(ordinary).collect();
        device.write(&slab.words, 0, &content)?;
    }
    Ok(matrix)
}

/// Seeded numbers in [-1, 1).
pub(crate) fn uniform(n: usize) -> Vec<f32> {
    words(n).map(|word| word as f32 / (1u64 << 31) as f32 - 1.0).collect()
}

/// Seeded words: the high bits of a linear congruential generator (Knuth, MMIX).
pub(crate) fn words(n: usize) -> impl Iterator<Item = u32> {
    let next = |state: u64| state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    std::iter::successors(Some(1), move |&state| Some(next(state))).skip(1).take(n).map(|state| (state >> 32) as u32)
}
