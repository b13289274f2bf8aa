//! Packed weights, block by block; `matrix.rs` describes the layout.

use bytemuck::{Pod, Zeroable};

use super::simd::{Vector, Work, widen_f16};
use crate::dtype::BLOCK;

/// Activations that meet one block of weights.
pub(super) type Block = [f32; BLOCK];

/// How weights are stored.
pub(super) trait Format: Copy + Sync {
    /// A block or a super-block, without the scale behind all of them.
    type Unit: Pod + Sync;
    /// Blocks in a unit.
    const BLOCKS: usize;
    /// Whether each unit has a scale behind all of them.
    const SCALED: bool;

    /// The weights, where they lie as floats already.
    fn floats(_units: &[Self::Unit]) -> Option<&[f32]> {
        None
    }

    /// What a unit says of its blocks' scales.
    #[inline(always)]
    fn scales(_unit: &Self::Unit) -> Scales {
        Scales::default()
    }

    /// Weights of block `at` of a unit, before the scale behind all units. `scales` are the unit's own.
    fn block<V: Vector>(unit: &Self::Unit, scales: &Scales, at: usize) -> [V; 4];
}

/// Of a super-block's blocks: eight scales and eight mins, or two scales for each.
type Scales = [[f32; 8]; 2];

/// Thirty-two elements, widened eight at a time.
#[inline(always)]
fn widen<T, V>(elements: &[T; BLOCK], eight: impl Fn(&[T; 8]) -> V) -> [V; 4] {
    let (eights, _) = elements.as_chunks();
    [eight(&eights[0]), eight(&eights[1]), eight(&eights[2]), eight(&eights[3])]
}

/// `scale * quant - min`, exact but for the rounding of the difference.
#[inline(always)]
fn affine<V: Vector>(quants: [V; 4], scale: f32, min: f32) -> [V; 4] {
    let [a, b, c, d] = quants;
    let (scale, min) = (V::splat(scale), V::splat(-min));
    [a.fma(scale, min), b.fma(scale, min), c.fma(scale, min), d.fma(scale, min)]
}

#[derive(Clone, Copy)]
pub(super) struct F32;

impl Format for F32 {
    type Unit = Block;
    const BLOCKS: usize = 1;
    const SCALED: bool = false;

    fn floats(units: &[Block]) -> Option<&[f32]> {
        Some(units.as_flattened())
    }

    #[inline(always)]
    fn block<V: Vector>(unit: &Block, _: &Scales, _: usize) -> [V; 4] {
        widen(unit, V::load)
    }
}

#[derive(Clone, Copy)]
pub(super) struct F16;

impl Format for F16 {
    type Unit = [u16; BLOCK];
    const BLOCKS: usize = 1;
    const SCALED: bool = false;

    #[inline(always)]
    fn block<V: Vector>(unit: &[u16; BLOCK], _: &Scales, _: usize) -> [V; 4] {
        widen(unit, V::from_f16)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bf16;

impl Format for Bf16 {
    type Unit = [u16; BLOCK];
    const BLOCKS: usize = 1;
    const SCALED: bool = false;

    #[inline(always)]
    fn block<V: Vector>(unit: &[u16; BLOCK], _: &Scales, _: usize) -> [V; 4] {
        widen(unit, V::from_bf16)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q8;

impl Format for Q8 {
    type Unit = [i8; BLOCK];
    const BLOCKS: usize = 1;
    const SCALED: bool = true;

    #[inline(always)]
    fn block<V: Vector>(unit: &[i8; BLOCK], _: &Scales, _: usize) -> [V; 4] {
        widen(unit, V::from_i8)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Q4;

impl Format for Q4 {
    type Unit = [u32; 4];
    const BLOCKS: usize = 1;
    const SCALED: bool = true;

    #[inline(always)]
    fn block<V: Vector>(unit: &[u32; 4], _: &Scales, _: usize) -> [V; 4] {
        V::from_quads(unit, &[], 8)
    }
}

/// Scales and mins at the head of a Q4_K or Q5_K super-block.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Head {
    /// f16, of all scales and of all mins.
    of_all: [u16; 2],
    /// Low nibbles of eight scales, and of eight mins.
    low: [u32; 2],
    /// Upper two bits of eight scales, then of eight mins.
    high: [u16; 2],
}

impl Head {
    #[inline(always)]
    fn scales(&self) -> Scales {
        let of = |i: usize| -> [f32; 8] {
            let (of_all, low, high) = (widen_f16(self.of_all[i]), self.low[i], u32::from(self.high[i]));
            // Only signed integers become floats in one instruction.
            std::array::from_fn(|at| of_all * (low >> (4 * at) & 15 | (high >> (2 * at) & 3) << 4) as i32 as f32)
        };
        [of(0), of(1)]
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q4K {
    head: Head,
    nibbles: [[u32; 4]; 8],
}

impl Format for Q4K {
    type Unit = Q4K;
    const BLOCKS: usize = 8;
    const SCALED: bool = false;

    #[inline(always)]
    fn scales(unit: &Q4K) -> Scales {
        unit.head.scales()
    }

    #[inline(always)]
    fn block<V: Vector>(unit: &Q4K, [scales, mins]: &Scales, at: usize) -> [V; 4] {
        affine(V::from_quads(&unit.nibbles[at], &[], 0), scales[at], mins[at])
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q5K {
    head: Head,
    fifths: [[u32; 1]; 8],
    nibbles: [[u32; 4]; 8],
}

impl Format for Q5K {
    type Unit = Q5K;
    const BLOCKS: usize = 8;
    const SCALED: bool = false;

    #[inline(always)]
    fn scales(unit: &Q5K) -> Scales {
        unit.head.scales()
    }

    #[inline(always)]
    fn block<V: Vector>(unit: &Q5K, [scales, mins]: &Scales, at: usize) -> [V; 4] {
        affine(V::from_quads(&unit.nibbles[at], &unit.fifths[at], 0), scales[at], mins[at])
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q6K {
    scales: [i8; 16],
    uppers: [[u32; 2]; 8],
    nibbles: [[u32; 4]; 8],
}

impl Format for Q6K {
    type Unit = Q6K;
    const BLOCKS: usize = 8;
    const SCALED: bool = true;

    #[inline(always)]
    fn scales(unit: &Q6K) -> Scales {
        let (scales, _) = unit.scales.as_chunks::<8>();
        [scales[0].map(f32::from), scales[1].map(f32::from)]
    }

    #[inline(always)]
    fn block<V: Vector>(unit: &Q6K, scales: &Scales, at: usize) -> [V; 4] {
        let [a, b, c, d] = V::from_quads(&unit.nibbles[at], &unit.uppers[at], 32);
        let (scales, at) = (&scales[at / 4], at % 4 * 2);
        let (low, high, zero) = (V::splat(scales[at]), V::splat(scales[at + 1]), V::splat(0.0));
        [a.fma(low, zero), b.fma(low, zero), c.fma(high, zero), d.fma(high, zero)]
    }
}

/// Units of a packed matrix, one after the other.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a, F: Format> {
    units: &'a [F::Unit],
    /// f16; none if the format has no scales behind the units, else at least one for each.
    scales: &'a [u16],
}

impl<'a, F: Format> Packed<'a, F> {
    /// The units of a slab whose scales begin at word `w_scales`.
    pub fn new(words: &'a [u32], w_scales: u32) -> Self {
        let (units, scales) = words.split_at(w_scales as usize);
        Packed { units: bytemuck::cast_slice(units), scales: bytemuck::cast_slice(scales) }
    }

    /// Units with their scales, if the format has any behind them.
    pub fn of(units: &'a [F::Unit], scales: &'a [u16]) -> Self {
        Packed { units, scales }
    }

    /// `n` blocks from the one at `first` on, in whole units.
    #[inline(always)]
    pub fn run(&self, first: usize, n: usize) -> Self {
        let units = first / F::BLOCKS..(first + n) / F::BLOCKS;
        let scales = if F::SCALED { &self.scales[units.clone()] } else { &[] };
        Packed { units: &self.units[units], scales }
    }

    /// Copies of `n` blocks from each of those on, in whole units, and of their scales.
    pub fn gather(&self, first: &[usize], n: usize) -> (Vec<F::Unit>, Vec<u16>) {
        fn runs<T: Copy>(all: &[T], first: impl ExactSizeIterator<Item = usize>, n: usize) -> Vec<T> {
            let mut copies = Vec::with_capacity(first.len() * n);
            first.for_each(|first| copies.extend_from_slice(&all[first..][..n]));
            copies
        }
        let (first, n) = (first.iter().map(|first| first / F::BLOCKS), n / F::BLOCKS);
        let scales = if F::SCALED { runs(self.scales, first.clone(), n) } else { Vec::new() };
        (runs(self.units, first, n), scales)
    }

    /// The weights, where they lie as floats already.
    pub fn floats(&self) -> Option<&'a [f32]> {
        F::floats(self.units)
    }

    #[inline(always)]
    fn scale<V: Vector>(&self, unit: usize) -> V {
        if F::SCALED { V::splat_f16(self.scales[unit]) } else { V::splat(1.0) }
    }

    /// Sum over all blocks of weight times `x`.
    #[inline(always)]
    pub fn dot<V: Vector>(&self, x: &[Block]) -> f32 {
        let mut sum = V::splat(0.0);
        for (i, (unit, x)) in self.units.iter().zip(x.chunks_exact(F::BLOCKS)).enumerate() {
            let (scale, scales) = (self.scale::<V>(i), F::scales(unit));
            for (at, x) in x.iter().enumerate() {
                let mut part = V::splat(0.0);
                for (weights, x) in F::block::<V>(unit, &scales, at).iter().zip(x.as_chunks().0) {
                    part = weights.fma(V::load(x), part);
                }
                sum = part.fma(scale, sum);
            }
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
        for (i, (unit, weights)) in self.packed.units.iter().zip(self.weights.chunks_exact_mut(F::BLOCKS)).enumerate() {
            let (scale, scales) = (self.packed.scale::<V>(i), F::scales(unit));
            for (at, weights) in weights.iter_mut().enumerate() {
                for (eight, weights) in F::block::<V>(unit, &scales, at).iter().zip(weights.as_chunks_mut().0) {
                    *weights = eight.fma(scale, V::splat(0.0)).lanes();
                }
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
            Some($crate::dtype::WeightType::Q4_K) => $function::<$crate::cpu::block::Q4K>($($argument),*),
            Some($crate::dtype::WeightType::Q5_K) => $function::<$crate::cpu::block::Q5K>($($argument),*),
            Some($crate::dtype::WeightType::Q6_K) => $function::<$crate::cpu::block::Q6K>($($argument),*),
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
    use crate::device::Device;
    use crate::dtype::WeightType;
    use crate::formats::BlockType;
    use crate::formats::block::dequantize;
    use crate::matrix::Matrix;

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

    /// Super-blocks with any bits, scales of every size: the decoder's values to the bit, and their dot products.
    fn super_blocks_agree_with_the_decoder<F: Format>(weight: WeightType, block_type: BlockType, halves: &[usize]) {
        const N: usize = 5;
        let mut state = 1u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let size = block_type.block_bytes() as usize;
        let mut file: Vec<u8> = (0..N * size).map(|_| byte()).collect();
        for (block, exponent) in file.chunks_exact_mut(size).zip([0x80, 0x00, 0x08, 0x20, 0xa8]) {
            halves.iter().for_each(|&at| block[at + 1] = exponent | block[at + 1] & 3);
        }
        let mut want = vec![[0.0f32; BLOCK]; N * 8];
        dequantize(block_type, &file, want.as_flattened_mut()).expect("lengths agree");

        let device = Device::cpu();
        let matrix = Matrix::declare(&device, "w", weight, 1, (N * 256) as u32).expect("the shape is valid");
        matrix.upload(&device, &[&file]).expect("one row");
        let slab = &matrix.slabs()[0];
        let words: Vec<u32> = pollster::block_on(device.read(&slab.words)).expect("the tensor is there");
        assert_eq!(words.len(), file.len().div_ceil(4), "as many bytes as in the file");
        let packed = Packed::<F>::new(&words, matrix.quants_words(slab));
        let mut weights = vec![[0.0; BLOCK]; N * 8];
        simd::run(Unpack { packed, weights: &mut weights });
        for (i, (found, want)) in weights.as_flattened().iter().zip(want.as_flattened()).enumerate() {
            assert_eq!(found, want, "{weight}, weight {i}");
        }
        let x: Vec<Block> = (0..N * 8).map(|b| std::array::from_fn(|i| ((b * 37 + i * 11) % 64) as f32)).collect();
        let terms = want.as_flattened().iter().zip(x.as_flattened()).map(|(&w, &x)| f64::from(w) * f64::from(x));
        let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
        for dot in [packed.dot::<[f32; 8]>(&x), simd::run(Dot(packed, &x))] {
            assert!((f64::from(dot) - exact).abs() < 1e-6 * size, "{weight}: {dot}, expected {exact}");
        }
    }

    #[test]
    fn super_blocks_are_packed_unpacked_and_multiplied_by_definition() {
        super_blocks_agree_with_the_decoder::<Q4K>(WeightType::Q4_K, BlockType::Q4_K, &[0, 2]);
        super_blocks_agree_with_the_decoder::<Q5K>(WeightType::Q5_K, BlockType::Q5_K, &[0, 2]);
        super_blocks_agree_with_the_decoder::<Q6K>(WeightType::Q6_K, BlockType::Q6_K, &[208]);
    }
}
