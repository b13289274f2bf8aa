//! Products with activations that are rounded to bytes, 32 of them with one scale, as llama.cpp rounds them.

use super::super::simd::{self, ByteDots, ByteWork, Bytes, Vector};
use super::{
    Block, FP4_LEVELS, Format, IQ4_LEVELS, Iq4, Iq4Xs, Mx, Packed, Q4, Q4K, Q4With1, Q5, Q5K, Q5With1, Q6K, Q8, Scales,
    Units, WeightType, half_scale, word,
};

/// Rows of activations, rounded.
pub(in super::super) struct Rounded {
    blocks: Vec<RoundedBlock>,
    /// What each block adds up to.
    sums: Vec<f32>,
}

#[derive(Clone, Copy, Default)]
struct RoundedBlock {
    quants: [i8; 32],
    scale: f32,
    /// What its quants add up to, with the other sign: an eighth of what an offset of 8 takes off.
    less: i32,
}

impl Rounded {
    /// Rounds each element to the nearest of 255 steps as far apart as the block's largest magnitude asks for.
    pub fn of(x: &[Block]) -> Rounded {
        let mut rounded = Rounded { blocks: vec![RoundedBlock::default(); x.len()], sums: vec![0.0; x.len()] };
        simd::run(Round { x, rounded: &mut rounded });
        rounded
    }
}

struct Round<'a> {
    x: &'a [Block],
    rounded: &'a mut Rounded,
}

impl simd::Work for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        let Round { x, rounded: Rounded { blocks, sums } } = self;
        for ((x, RoundedBlock { quants, scale, less }), sum) in x.iter().zip(blocks).zip(sums) {
            // As whole numbers, magnitudes have the same order, and NaN is the largest: it makes the scale one.
            let mut lanes = [0; 8];
            for eight in x.as_chunks::<8>().0 {
                for (lane, x) in lanes.iter_mut().zip(eight) {
                    *lane = x.abs().to_bits().max(*lane);
                }
            }
            let mut bits = 0;
            for lane in lanes {
                bits = lane.max(bits);
            }
            let largest = f32::from_bits(bits);
            *scale = largest / 127.0;
            // A scale so small that its inverse overflows stands for zeros.
            let inverse = if *scale > 1e-37 { 1.0 / *scale } else { 0.0 };
            // Adding it rounds to a whole number, ties to even, which then stands in the lowest bits.
            const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
            let mut wholes = [0i32; 32];
            for (whole, x) in wholes.iter_mut().zip(x) {
                *whole = (x * inverse + ROUND).to_bits() as i32 - ROUND.to_bits() as i32;
            }
            // Of the bytes: what is not finite leaves any whole number, and many of them would overflow.
            let mut total = 0;
            for (quant, whole) in quants.iter_mut().zip(wholes) {
                *quant = whole as i8;
                total += i32::from(*quant);
            }
            *less = -total;
            *sum = *scale * total as f32;
        }
    }
}

/// Formats whose quants are bytes with a scale for each block or for each half of it.
trait Quantised: Format {
    /// Whether quants may be negative.
    const SIGNED: bool;
    /// What is taken off each quant, a multiple of eight.
    const OFFSET: i32 = 0;
    /// Whether a block's weights are lessened by a min.
    const MINS: bool = false;
    /// 16-bit words of a unit's tail.
    const TAIL: usize;

    /// The quants of block `at` of a unit.
    fn quants<B: Bytes>(unit: &Self::Unit, tail: &[u16], at: usize) -> B;
    /// The scale of a block's first half in the first four lanes, of the second one in the others. `scales` are the unit's.
    fn block_scale<V: Vector>(tail: &[u16], scales: &Scales, at: usize) -> V;
    /// What eight blocks are lessened by; an eighth of that, eight times, where a unit has one.
    #[inline(always)]
    fn mins<V: Vector>(_tail: &[u16], scales: &Scales) -> V {
        V::load(&scales[1])
    }
}

impl Quantised for Q8 {
    const TAIL: usize = 1;
    const SIGNED: bool = true;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &[i8; 32], _: &[u16], _: usize) -> B {
        B::from_i8(unit)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(tail: &[u16], _: &Scales, _: usize) -> V {
        Vector::splat_f16(tail[0])
    }
}

impl Quantised for Q4 {
    const TAIL: usize = 1;
    const SIGNED: bool = false;
    const OFFSET: i32 = 8;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &[u32; 4], _: &[u16], _: usize) -> B {
        B::from_quads(unit, &[], 0)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(tail: &[u16], _: &Scales, _: usize) -> V {
        Vector::splat_f16(tail[0])
    }
}

impl Quantised for Q5 {
    const TAIL: usize = 3;
    const SIGNED: bool = false;
    const OFFSET: i32 = 16;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &[u32; 4], tail: &[u16], _: usize) -> B {
        B::from_quads(unit, &[word(&tail[1..])], 0)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(tail: &[u16], _: &Scales, _: usize) -> V {
        Vector::splat_f16(tail[0])
    }
}

impl Quantised for Iq4 {
    const TAIL: usize = 1;
    const SIGNED: bool = true;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &[u32; 4], _: &[u16], _: usize) -> B {
        B::from_levels(unit, &IQ4_LEVELS)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(tail: &[u16], _: &Scales, _: usize) -> V {
        Vector::splat_f16(tail[0])
    }
}

impl Quantised for Mx {
    const TAIL: usize = 1;
    const SIGNED: bool = true;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &[[u32; 4]; 2], _: &[u16], at: usize) -> B {
        B::from_levels(&unit[at], &FP4_LEVELS)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(tail: &[u16], _: &Scales, at: usize) -> V {
        Vector::splat(half_scale((tail[0] >> (8 * at)) as u8))
    }
}

impl Quantised for Q4With1 {
    const TAIL: usize = 2;
    const SIGNED: bool = false;
    const MINS: bool = true;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &[u32; 4], _: &[u16], _: usize) -> B {
        B::from_quads(unit, &[], 0)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(tail: &[u16], _: &Scales, _: usize) -> V {
        Vector::splat_f16(tail[0])
    }

    #[inline(always)]
    fn mins<V: Vector>(tail: &[u16], _: &Scales) -> V {
        V::splat_f16(tail[1]).fma(Vector::splat(-0.125), Vector::splat(0.0))
    }
}

impl Quantised for Q5With1 {
    const TAIL: usize = 4;
    const SIGNED: bool = false;
    const MINS: bool = true;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &[u32; 4], tail: &[u16], _: usize) -> B {
        B::from_quads(unit, &[word(tail)], 0)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(tail: &[u16], _: &Scales, _: usize) -> V {
        Vector::splat_f16(tail[2])
    }

    #[inline(always)]
    fn mins<V: Vector>(tail: &[u16], _: &Scales) -> V {
        V::splat_f16(tail[3]).fma(Vector::splat(-0.125), Vector::splat(0.0))
    }
}

impl Quantised for Q4K {
    const TAIL: usize = 0;
    const SIGNED: bool = false;
    const MINS: bool = true;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &Q4K, _: &[u16], at: usize) -> B {
        B::from_quads(&unit.nibbles[at], &[], 0)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(_: &[u16], scales: &Scales, at: usize) -> V {
        Vector::splat(scales[0][at])
    }
}

impl Quantised for Q5K {
    const TAIL: usize = 0;
    const SIGNED: bool = false;
    const MINS: bool = true;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &Q5K, _: &[u16], at: usize) -> B {
        B::from_quads(&unit.nibbles[at], &unit.fifths[at], 0)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(_: &[u16], scales: &Scales, at: usize) -> V {
        Vector::splat(scales[0][at])
    }
}

impl Quantised for Q6K {
    const TAIL: usize = 1;
    const SIGNED: bool = true;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &Q6K, _: &[u16], at: usize) -> B {
        B::from_quads(&unit.nibbles[at], &unit.uppers[at], 32)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(tail: &[u16], scales: &Scales, at: usize) -> V {
        let (scales, first) = (&scales[at / 4], at % 4 * 2);
        V::halves(scales[first], scales[first + 1]).fma(Vector::splat_f16(tail[0]), Vector::splat(0.0))
    }
}

impl Quantised for Iq4Xs {
    const TAIL: usize = 4;
    const SIGNED: bool = true;

    #[inline(always)]
    fn quants<B: Bytes>(unit: &[[u32; 4]; 8], _: &[u16], at: usize) -> B {
        B::from_levels(&unit[at], &IQ4_LEVELS)
    }

    #[inline(always)]
    fn block_scale<V: Vector>(tail: &[u16], _: &Scales, at: usize) -> V {
        Vector::splat(super::iq4_scale(tail, at))
    }
}

/// Calls a function that is generic over [`Quantised`] with the format of a weight type.
macro_rules! with_quantised {
    ($weight:expr, $function:ident($($argument:expr),*), $other:expr) => {
        match $weight.layout() {
            WeightType::Q8_0 => $function::<Q8>($($argument),*),
            WeightType::Q4_0 => $function::<Q4>($($argument),*),
            WeightType::Q4_1 => $function::<Q4With1>($($argument),*),
            WeightType::Q5_0 => $function::<Q5>($($argument),*),
            WeightType::Q5_1 => $function::<Q5With1>($($argument),*),
            WeightType::Q4_K => $function::<Q4K>($($argument),*),
            WeightType::Q5_K => $function::<Q5K>($($argument),*),
            WeightType::Q6_K => $function::<Q6K>($($argument),*),
            WeightType::IQ4_NL => $function::<Iq4>($($argument),*),
            WeightType::IQ4_XS => $function::<Iq4Xs>($($argument),*),
            WeightType::MXFP4 => $function::<Mx>($($argument),*),
            _ => $other,
        }
    };
}

impl Packed<'_> {
    /// Whether there are products of these weights with rounded activations, and they are faster here than exact ones.
    pub fn rounds(&self) -> bool {
        fn yes<F: Quantised>() -> bool {
            true
        }
        simd::has_byte_dots() && with_quantised!(self.weight, yes(), false)
    }

    /// As [`Packed::dots`], with activations that are rounded.
    pub fn rounded_dots(&self, x: &Rounded, n_blocks: usize, sums: &mut [f32]) {
        with_quantised!(self.weight, rounded_dots(self, x, n_blocks, sums), {
            unreachable!("{} has no products with rounded activations", self.weight)
        });
    }
}

fn rounded_dots<F: Quantised>(packed: &Packed<'_>, x: &Rounded, n_blocks: usize, sums: &mut [f32]) {
    simd::run_bytes(RowDots::<F> { rows: Units::of(packed), x, n_blocks, sums });
}

struct RowDots<'a, F: Format> {
    rows: Units<'a, F>,
    x: &'a Rounded,
    n_blocks: usize,
    sums: &'a mut [f32],
}

impl<F: Quantised> RowDots<'_, F> {
    /// Dot products of row `n` with `T` tokens from `t` on. Not of several rows: fetching ahead, processors follow one of them
    /// better than two.
    #[inline(always)]
    fn row<D: ByteDots, const T: usize>(&mut self, n: usize, t: usize, n_rows: usize) {
        let n_units = self.n_blocks / F::BLOCKS;
        let n_blocks = n_units * F::BLOCKS;
        let units = &self.rows.units[n * n_units..][..n_units];
        let tails = &self.rows.tails[n * n_units * F::TAIL..][..n_units * F::TAIL];
        let x: [&[RoundedBlock]; T] = std::array::from_fn(|i| &self.x.blocks[(t + i) * n_blocks..][..n_blocks]);
        let sums: [&[f32]; T] = std::array::from_fn(|i| &self.x.sums[(t + i) * n_blocks..][..n_blocks]);
        // Sums of even blocks and of odd ones, so that none waits for the one before.
        let mut row = Row::<D::Eight, T> {
            even: [Vector::splat(0.0); T],
            odd: [Vector::splat(0.0); T],
            less: [Vector::splat(0.0); T],
        };
        let mut i = 0;
        while i < n_units {
            row.add::<D, F>(&units[i], &tails[i * F::TAIL..][..F::TAIL], x, sums, i, false);
            i += 1;
            if F::BLOCKS == 1 && i < n_units {
                row.add::<D, F>(&units[i], &tails[i * F::TAIL..][..F::TAIL], x, sums, i, true);
                i += 1;
            }
        }
        for i in 0..T {
            let less = if F::MINS { row.less[i].sum() } else { 0.0 };
            self.sums[(t + i) * n_rows + n] = row.even[i].fma(Vector::splat(1.0), row.odd[i]).sum() - less;
        }
    }
}

/// Sums of a row's products with `T` tokens.
struct Row<V, const T: usize> {
    even: [V; T],
    odd: [V; T],
    /// What mins take off.
    less: [V; T],
}

impl<V: Vector, const T: usize> Row<V, T> {
    /// Adds the products of unit `i`; `is_odd` says whether its first block is an odd one.
    #[inline(always)]
    fn add<D: ByteDots<Eight = V>, F: Quantised>(
        &mut self,
        unit: &F::Unit,
        tail: &[u16],
        x: [&[RoundedBlock]; T],
        sums: [&[f32]; T],
        i: usize,
        is_odd: bool,
    ) {
        let zero = Vector::splat(0.0);
        let scales = F::scales::<V>(unit, tail);
        for at in 0..F::BLOCKS {
            let of_block = F::block_scale::<V>(tail, &scales, at);
            let weights = F::quants(unit, tail, at);
            for t in 0..T {
                let x = &x[t][i * F::BLOCKS..][..F::BLOCKS][at];
                let scale = of_block.fma(Vector::splat(x.scale), zero);
                let products = D::dot(weights, &x.quants, F::SIGNED, F::OFFSET / 8 * x.less);
                let totals = if is_odd == (at % 2 == 1) { &mut self.even } else { &mut self.odd };
                totals[t] = products.fma(scale, totals[t]);
            }
        }
        if F::MINS {
            let mins = F::mins::<V>(tail, &scales);
            for (less, sums) in self.less.iter_mut().zip(sums) {
                let sums = match sums[i * F::BLOCKS..][..F::BLOCKS] {
                    [one] => Vector::splat(one),
                    [a, b, c, d, e, f, g, h] => Vector::load(&[a, b, c, d, e, f, g, h]),
                    _ => unreachable!("units with mins have one block or eight"),
                };
                *less = mins.fma(sums, *less);
            }
        }
    }
}

impl<F: Quantised> ByteWork for RowDots<'_, F> {
    #[inline(always)]
    fn run_bytes<D: ByteDots>(mut self) {
        /// Tokens that meet a block while it is in registers.
        const T: usize = 4;
        let n_tokens = self.x.blocks.len() / self.n_blocks;
        let n_rows = self.sums.len() / n_tokens;
        for n in 0..n_rows {
            let mut t = 0;
            while t + T <= n_tokens {
                self.row::<D, T>(n, t, n_rows);
                t += T;
            }
            for t in t..n_tokens {
                self.row::<D, 1>(n, t, n_rows);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::dtype::BLOCK;
    use crate::formats::Safetensors;
    use crate::formats::quantize::quantize_row;
    use crate::matrix::Matrix;

    fn quantised(weight: WeightType) -> bool {
        fn yes<F: Quantised>() -> bool {
            true
        }
        with_quantised!(weight, yes(), false)
    }

    /// Without special instructions.
    fn plain<F: Quantised>(packed: &Packed<'_>, x: &Rounded, n_blocks: usize, sums: &mut [f32]) {
        RowDots::<F> { rows: Units::of(packed), x, n_blocks, sums }.run_bytes::<simd::Plain>();
    }

    /// Activations of any size, blocks of zeros, of the smallest numbers and with one that outweighs the others among them.
    fn activations(n_blocks: usize) -> Vec<Block> {
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let size = |b: usize| [1.0, 0.0, 1e-40, 300.0, 0.01][b % 5];
        let mut x: Vec<Block> = (0..n_blocks).map(|b| std::array::from_fn(|_| size(b) * next())).collect();
        x[n_blocks - 1][3] = 1e4;
        x
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = activations(3);
            x[1][4..23].fill(odd);
            let Rounded { blocks, sums } = Rounded::of(&x);
            let is_finite = |b: usize| blocks[b].scale.is_finite() && sums[b].is_finite();
            assert_eq!([is_finite(0), is_finite(1), is_finite(2)], [true, false, true], "{odd}");
        }
    }

    #[test]
    fn activations_are_rounded_to_the_nearest_step() {
        let x = activations(64);
        let Rounded { blocks, sums } = Rounded::of(&x);
        for ((x, block), sum) in x.iter().zip(&blocks).zip(sums) {
            let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            assert_eq!(block.scale, largest / 127.0);
            for (&quant, &x) in block.quants.iter().zip(x) {
                let error = (f64::from(quant) * f64::from(block.scale) - f64::from(x)).abs();
                assert!(quant > i8::MIN && error <= 0.5001 * f64::from(block.scale) + 1e-36, "{x}: {quant}");
            }
            let total: i32 = block.quants.iter().map(|&quant| i32::from(quant)).sum();
            assert_eq!((block.less, sum), (-total, block.scale * total as f32));
        }
    }

    /// Values by ggml times what the activations are rounded to, in f64: for one token and for several, with and without
    /// special instructions.
    #[test]
    fn products_are_those_of_the_rounded_activations() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/quant-vectors/more.safetensors");
        let bytes = std::fs::read(path).expect("it is in the repository");
        let vectors = Safetensors::parse(&bytes, bytes.len() as u64).expect("it is valid");
        let tensor =
            |name: String| vectors.tensor(&name).expect("it has all types").bytes(&bytes).expect("it is whole");
        let device = Device::cpu();
        let mut n_checked = 0;
        for weight in WeightType::ALL.into_iter().filter(|&weight| quantised(weight)) {
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(tensor(format!("{weight}.values")));
            // Two rows, the second one the first half of the vectors again.
            let n_blocks = values.len() / BLOCK / 2;
            let matrix =
                Matrix::declare(&device.target(), "w", weight, 2, values.len() as u32 / 2).expect("the shape is valid");
            matrix.upload(&device, &[tensor(format!("{weight}.blocks"))]).expect("two rows");
            let slab = &matrix.slabs()[0];
            let words: Vec<u32> = pollster::block_on(device.read(&slab.words)).expect("the tensor is there");
            let packed = Packed::new(Some(weight), &words, matrix.quants_words(slab));
            for n_tokens in [1, 4, 7] {
                let x = activations(n_tokens * n_blocks);
                let rounded = Rounded::of(&x);
                let mut found = [vec![f32::NAN; 2 * n_tokens], vec![f32::NAN; 2 * n_tokens]];
                packed.rounded_dots(&rounded, n_blocks, &mut found[0]);
                with_quantised!(weight, plain(&packed, &rounded, n_blocks, &mut found[1]), ());
                for (i, values) in (0..2 * n_tokens).map(|i| (i, &values[i % 2 * n_blocks * BLOCK..])) {
                    let blocks = rounded.blocks[i / 2 * n_blocks..][..n_blocks].iter();
                    let x = blocks.flat_map(|b| b.quants.map(|quant| f64::from(quant) * f64::from(b.scale)));
                    // A weight may be the small difference of two large numbers, and a sum is of both.
                    let largest = values[..n_blocks * BLOCK].iter().fold(0.0f32, |a, b| a.max(b.abs()));
                    let terms = values.iter().zip(x).map(|(&w, x)| (f64::from(w) * x, f64::from(largest) * x.abs()));
                    let (want, size) = terms.fold((0.0, 0.0), |(sum, size), (term, most)| (sum + term, size + most));
                    for found in [found[0][i], found[1][i]] {
                        let error = (f64::from(found) - want).abs();
                        assert!(
                            error <= 2e-6 * size,
                            "{weight}, {n_tokens} tokens: {found}, expected {want} of {size}"
                        );
                        n_checked += 1;
                    }
                }
            }
        }
        assert_eq!(n_checked, 11 * 2 * 2 * (1 + 4 + 7));
    }

    /// Of random weights with activations as they come out of a norm: many of moderate size. Rounding alone makes the
    /// difference.
    #[test]
    fn rounding_costs_little() {
        /// Normalised mean squared error. The largest of 32 is about 2.1 standard deviations, so that a step is 2.1 / 127 of
        /// one, and the mean square of what rounding to steps leaves is a twelfth of their square: 2.3e-5.
        const MOST: f64 = 3e-5;
        let (n_rows, n_blocks) = (16, 32);
        let mut state = 3u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32
        };
        // Nearly a normal distribution.
        let mut normal = || (0..12).map(|_| next()).sum::<f32>() - 6.0;
        let device = Device::cpu();
        let x: Vec<Block> = (0..n_blocks).map(|_| std::array::from_fn(|_| normal())).collect();
        let floats: Vec<f32> = (0..n_rows * n_blocks * BLOCK).map(|_| 0.02 * normal()).collect();
        let rounded = Rounded::of(&x);
        for weight in WeightType::ALL.into_iter().filter(|&weight| quantised(weight)) {
            let of_file = weight.block_type();
            let mut bytes = vec![0; floats.len() / of_file.block_len() as usize * of_file.block_bytes() as usize];
            quantize_row(of_file, &floats, None, &mut bytes).expect("the row is whole blocks");
            let shape = [n_rows as u32, (n_blocks * BLOCK) as u32];
            let matrix =
                Matrix::declare(&device.target(), "w", weight, shape[0], shape[1]).expect("the shape is valid");
            matrix.upload(&device, &[&bytes]).expect("all rows");
            let slab = &matrix.slabs()[0];
            let words: Vec<u32> = pollster::block_on(device.read(&slab.words)).expect("the tensor is there");
            let packed = Packed::new(Some(weight), &words, matrix.quants_words(slab));
            let [mut exact, mut found] = [vec![0.0; n_rows], vec![0.0; n_rows]];
            packed.dots(&x, n_blocks, &mut exact);
            packed.rounded_dots(&rounded, n_blocks, &mut found);
            let square = |x: f32| f64::from(x) * f64::from(x);
            let error: f64 = exact.iter().zip(&found).map(|(a, b)| square(a - b)).sum();
            let nmse = error / exact.iter().copied().map(square).sum::<f64>();
            println!("{weight:<8} {nmse:.1e}");
            assert!(nmse <= MOST, "{weight}: {nmse:.1e}");
        }
    }
}
