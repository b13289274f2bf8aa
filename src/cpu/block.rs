//! Packed weights, block by block; `matrix.rs` describes the layout.

use bytemuck::Pod;

use super::simd::{Vector, Work, widen_f16};
use crate::dtype::BLOCK;

/// Activations that meet one block of weights.
pub(super) type Block = [f32; BLOCK];

/// How the weights of a block are stored.
pub(super) trait Format: Copy + Sync {
    /// The weights of a block, without its scale.
    type Quants: Pod + Sync;
    /// Whether blocks have a scale.
    const SCALED: bool;

    /// Weights `8 * at .. 8 * at + 8`, before scaling.
    fn eight<V: Vector>(quants: &Self::Quants, at: usize) -> V;
}

#[derive(Clone, Copy)]
pub(super) struct F32;

impl Format for F32 {
    type Quants = Block;
    const SCALED: bool = false;

    #[inline(always)]
    fn eight<V: Vector>(quants: &Block, at: usize) -> V {
        V::load(&quants.as_chunks().0[at])
    }
}

#[derive(Clone, Copy)]
pub(super) struct F16;

impl Format for F16 {
    type Quants = [u16; BLOCK];
    const SCALED: bool = false;

    #[inline(always)]
    fn eight<V: Vector>(quants: &[u16; BLOCK], at: usize) -> V {
        V::from_f16(&quants.as_chunks().0[at])
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bf16;

impl Format for Bf16 {
    type Quants = [u16; BLOCK];
    const SCALED: bool = false;

    #[inline(always)]
    fn eight<V: Vector>(quants: &[u16; BLOCK], at: usize) -> V {
        V::from_bf16(&quants.as_chunks().0[at])
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q8;

impl Format for Q8 {
    type Quants = [i8; BLOCK];
    const SCALED: bool = true;

    #[inline(always)]
    fn eight<V: Vector>(quants: &[i8; BLOCK], at: usize) -> V {
        V::from_i8(&quants.as_chunks().0[at])
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q4;

impl Format for Q4 {
    type Quants = [u8; BLOCK / 2];
    const SCALED: bool = true;

    // Byte j holds weight j in its low nibble and weight j + 16 in its high one.
    #[inline(always)]
    fn eight<V: Vector>(quants: &[u8; BLOCK / 2], at: usize) -> V {
        let eight = &quants.as_chunks().0[at % 2];
        if at < 2 { V::from_nibbles::<0>(eight) } else { V::from_nibbles::<4>(eight) }
    }
}

/// Blocks of a packed matrix, one after the other.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a, F: Format> {
    quants: &'a [F::Quants],
    /// f16; none if the format has no scales, else at least one for each block.
    scales: &'a [u16],
}

impl<'a, F: Format> Packed<'a, F> {
    /// The blocks of a slab whose scales begin at word `w_scales`.
    pub fn new(words: &'a [u32], w_scales: u32) -> Self {
        let (quants, scales) = words.split_at(w_scales as usize);
        Packed { quants: bytemuck::cast_slice(quants), scales: bytemuck::cast_slice(scales) }
    }

    /// `n` blocks from the one at `first` on.
    #[inline(always)]
    pub fn run(&self, first: usize, n: usize) -> Self {
        let scales = if F::SCALED { &self.scales[first..first + n] } else { &[] };
        Packed { quants: &self.quants[first..first + n], scales }
    }

    #[inline(always)]
    fn scale(&self, block: usize) -> f32 {
        if F::SCALED { widen_f16(self.scales[block]) } else { 1.0 }
    }

    /// Sum over all blocks of weight times `x`.
    #[inline(always)]
    pub fn dot<V: Vector>(&self, x: &[Block]) -> f32 {
        let mut sum = V::splat(0.0);
        for (i, (quants, x)) in self.quants.iter().zip(x).enumerate() {
            let mut part = V::splat(0.0);
            for (at, x) in x.as_chunks().0.iter().enumerate() {
                part = F::eight::<V>(quants, at).fma(V::load(x), part);
            }
            sum = part.fma(V::splat(self.scale(i)), sum);
        }
        sum.sum()
    }
}

/// Unpacks all blocks of `packed` into `weights`.
pub(super) struct Unpack<'a, F: Format> {
    pub packed: Packed<'a, F>,
    pub weights: &'a mut [Block],
}

impl<F: Format> Work for Unpack<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        for (i, (quants, weights)) in self.packed.quants.iter().zip(self.weights).enumerate() {
            let scale = self.packed.scale(i);
            for (at, weights) in weights.as_chunks_mut().0.iter_mut().enumerate() {
                *weights = F::eight::<V>(quants, at).lanes().map(|quant| scale * quant);
            }
        }
    }
}

/// Calls a function that is generic over [`Format`] with the format of a weight type.
macro_rules! with_format {
    ($weight:expr, $function:ident($($argument:expr),*)) => {
        match $weight {
            Some($crate::dtype::WeightType::F32) => $function::<$crate::cpu::block::F32>($($argument),*),
            Some($crate::dtype::WeightType::F16) => $function::<$crate::cpu::block::F16>($($argument),*),
            Some($crate::dtype::WeightType::BF16) => $function::<$crate::cpu::block::Bf16>($($argument),*),
            Some($crate::dtype::WeightType::Q8_0) => $function::<$crate::cpu::block::Q8>($($argument),*),
            Some($crate::dtype::WeightType::Q4_0) => $function::<$crate::cpu::block::Q4>($($argument),*),
            None => unreachable!("the recorder gives this kernel a weight type"),
        }
    };
}
pub(super) use with_format;

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::cpu::simd;

    struct Dot<'a, F: Format>(Packed<'a, F>, &'a [Block]);
    impl<F: Format> Work for Dot<'_, F> {
        type Output = f32;
        #[inline(always)]
        fn run<V: Vector>(self) -> f32 {
            self.0.dot::<V>(self.1)
        }
    }

    /// Two blocks, whose scales share a word and one of which is subnormal.
    #[test]
    fn quantised_blocks_are_unpacked_and_multiplied_by_definition() {
        let scales = [f16::from_f32(-0.75), f16::from_bits(3)];
        let scale_word = u32::from(scales[0].to_bits()) | u32::from(scales[1].to_bits()) << 16;
        let bytes: Vec<u8> = (0..64).map(|i: u8| i.wrapping_mul(151).wrapping_add(7)).collect();
        let x: Vec<Block> = (0..2).map(|b| std::array::from_fn(|i| (b * 32 + i) as f32 - 20.0)).collect();
        let check = |want: Vec<f64>, weights: Vec<Block>, dots: [f32; 2]| {
            let exact: f64 = want.iter().zip(x.as_flattened()).map(|(w, &x)| w * f64::from(x)).sum();
            let found: Vec<f64> = weights.as_flattened().iter().map(|&w| f64::from(w)).collect();
            assert_eq!(found, want);
            for dot in dots {
                assert!((f64::from(dot) / exact - 1.0).abs() < 1e-6, "{dot}, expected {exact}");
            }
        };
        let scale_of = |block: usize| f64::from(scales[block].to_f32());
        let words = |bytes: &[u8]| [bytemuck::pod_collect_to_vec::<u8, u32>(bytes), vec![scale_word]].concat();

        let words_q8 = words(&bytes);
        let packed = Packed::<Q8>::new(&words_q8, 16);
        let mut weights = vec![[0.0; 32]; 2];
        simd::run(Unpack { packed, weights: &mut weights });
        let want = (0..64).map(|i| scale_of(i / 32) * f64::from(bytes[i] as i8)).collect();
        check(want, weights, [packed.dot::<[f32; 8]>(&x), simd::run(Dot(packed, &x))]);

        let words_q4 = words(&bytes[..32]);
        let packed = Packed::<Q4>::new(&words_q4, 8);
        let mut weights = vec![[0.0; 32]; 2];
        simd::run(Unpack { packed, weights: &mut weights });
        let nibble = |i: usize| {
            let byte = bytes[i / 32 * 16 + i % 16];
            if i % 32 < 16 { byte % 16 } else { byte / 16 }
        };
        let want = (0..64).map(|i| scale_of(i / 32) * (f64::from(nibble(i)) - 8.0)).collect();
        check(want, weights, [packed.dot::<[f32; 8]>(&x), simd::run(Dot(packed, &x))]);
    }
}
