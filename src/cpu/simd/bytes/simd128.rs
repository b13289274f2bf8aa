//! Products of bytes by WebAssembly's vectors of 128 bits. A vector is taken as eight pairs of bytes, whose first and second
//! bytes are multiplied apart as 16 bits: each lane then has the products of its own four bytes. Relaxed SIMD multiplies bytes
//! themselves, and gives the same on every machine where one side is 0 to 127, as quants of few bits are.

use std::arch::wasm32::*;

use super::super::simd128::{Eight, further_bits};
use super::{ByteDots, ByteWork, Halves};

pub fn run<W: ByteWork>(work: W) -> W::Output {
    work.run_bytes::<Simd128>()
}

struct Simd128;

/// The first and the second byte of each pair, of quants.
#[inline(always)]
fn unsigned_pairs(quants: v128) -> [v128; 2] {
    [v128_and(quants, u16x8_splat(0xff)), u16x8_shr(quants, 8)]
}

/// The same, of activations.
#[inline(always)]
fn signed_pairs(x: v128) -> [v128; 2] {
    [i16x8_shr(i16x8_shl(x, 8), 8), i16x8_shr(x, 8)]
}

/// `sum` plus the products of four bytes, by lane.
#[inline(always)]
fn add_products(sum: v128, quants: [v128; 2], x: [v128; 2]) -> v128 {
    let both = i32x4_add(i32x4_dot_i16x8(quants[0], x[0]), i32x4_dot_i16x8(quants[1], x[1]));
    i32x4_add(sum, both)
}

/// `sum` plus the products of four bytes, by lane. Unless `SIGNED`, quants are 127 at most.
#[inline(always)]
fn add_fours<const SIGNED: bool>(sum: v128, quants: v128, x: v128) -> v128 {
    #[cfg(target_feature = "relaxed-simd")]
    if !SIGNED {
        return i32x4_relaxed_dot_i8x16_i7x16_add(x, quants, sum);
    }
    add_products(sum, unsigned_pairs(quants), signed_pairs(x))
}

/// Four vectors.
#[inline(always)]
fn load<T>(from: &[T; 64]) -> [v128; 4] {
    const { assert!(size_of::<T>() == 1) }
    let from: *const v128 = from.as_ptr().cast();
    // SAFETY: sixty-four bytes are behind the pointer, which need not be aligned.
    std::array::from_fn(|i| unsafe { v128_load(from.add(i)) })
}

#[inline(always)]
fn each<const N: usize>(f: impl FnMut(usize) -> v128) -> [v128; N] {
    std::array::from_fn(f)
}

impl ByteDots for Simd128 {
    type Eight = Eight;
    type Bytes = [v128; 4];
    type Ints = [v128; 4];
    type Sums = [v128; 4];
    const BIAS: u8 = 128;
    const SIGNED_ROWS: bool = true;
    const MANY_SUMS: bool = false;
    const MANY_TOKENS: bool = false;

    #[inline(always)]
    fn nibbles(nibbles: &[[u32; 4]; 4]) -> Halves<[v128; 4]> {
        let both = load(bytemuck::cast_ref::<_, [u8; 64]>(nibbles));
        let mask = u8x16_splat(15);
        [each(|i| v128_and(both[i], mask)), each(|i| u8x16_shr(both[i], 4))]
    }

    #[inline(always)]
    fn with_fifths([low, high]: Halves<[v128; 4]>, fifths: &[u32; 4]) -> Halves<[v128; 4]> {
        let further = fifths.map(|word| further_bits(&[word]));
        [each(|i| v128_or(low[i], further[i][0])), each(|i| v128_or(high[i], further[i][1]))]
    }

    #[inline(always)]
    fn with_uppers([low, high]: Halves<[v128; 4]>, uppers: &[[u32; 2]; 4]) -> Halves<[v128; 4]> {
        let further = uppers.map(|words| further_bits(&words));
        [each(|i| v128_or(low[i], further[i][0])), each(|i| v128_or(high[i], further[i][1]))]
    }

    #[inline(always)]
    fn levels(nibbles: Halves<[v128; 4]>, levels: &[i8; 16]) -> Halves<[v128; 4]> {
        // SAFETY: sixteen bytes are behind the pointer.
        let levels = v128_xor(unsafe { v128_load(levels.as_ptr().cast()) }, i8x16_splat(i8::MIN));
        nibbles.map(|half| half.map(|nibbles| i8x16_swizzle(levels, nibbles)))
    }

    #[inline(always)]
    fn signed(quants: &[[i8; 32]; 4]) -> Halves<[v128; 4]> {
        let [first, second] = bytemuck::cast_ref::<_, [[i8; 64]; 2]>(quants);
        let (first, second) = (load(first), load(second));
        let biased = |x: v128| v128_xor(x, i8x16_splat(i8::MIN));
        [[first[0], first[2], second[0], second[2]], [first[1], first[3], second[1], second[3]]]
            .map(|half| half.map(biased))
    }

    #[inline(always)]
    fn load(bytes: &[u8; 64]) -> [v128; 4] {
        load(bytes)
    }

    #[inline(always)]
    fn store(bytes: [v128; 4], to: &mut [u8; 64]) {
        let to: *mut v128 = to.as_mut_ptr().cast();
        for (i, bytes) in bytes.into_iter().enumerate() {
            // SAFETY: there is room for sixty-four bytes behind the pointer, which need not be aligned.
            unsafe { v128_store(to.add(i), bytes) };
        }
    }

    #[inline(always)]
    fn interleaved([a, b, c, d]: [[v128; 4]; 4]) -> [[v128; 4]; 4] {
        let mut words = [[u32x4_splat(0); 4]; 4];
        for i in 0..4 {
            let [low, high] = [[a[i], b[i]], [c[i], d[i]]]
                .map(|[a, b]| [i32x4_shuffle::<0, 4, 1, 5>(a, b), i32x4_shuffle::<2, 6, 3, 7>(a, b)]);
            words[0][i] = i64x2_shuffle::<0, 2>(low[0], high[0]);
            words[1][i] = i64x2_shuffle::<1, 3>(low[0], high[0]);
            words[2][i] = i64x2_shuffle::<0, 2>(low[1], high[1]);
            words[3][i] = i64x2_shuffle::<1, 3>(low[1], high[1]);
        }
        words
    }

    #[inline(always)]
    fn dot<const SIGNED: bool>([low, high]: Halves<[v128; 4]>, x: &Halves<[i8; 64]>) -> [v128; 4] {
        let x = [load(&x[0]), load(&x[1])];
        let sums: [v128; 4] = each(|i| add_fours::<SIGNED>(i32x4_splat(0), low[i], x[0][i]));
        each(|i| add_fours::<SIGNED>(sums[i], high[i], x[1][i]))
    }

    #[inline(always)]
    fn dot_half(quants: [v128; 4], x: &[i8; 64]) -> [v128; 4] {
        let x = load(x);
        each(|i| add_fours::<false>(i32x4_splat(0), quants[i], x[i]))
    }

    #[inline(always)]
    fn add_fours<const SIGNED: bool>(sums: [v128; 4], quants: [[v128; 4]; 2], x: &[i8; 8]) -> [v128; 4] {
        let from: *const u32 = x.as_ptr().cast();
        // SAFETY: eight bytes are behind the pointer, which need not be aligned.
        let x = unsafe { [v128_load32_splat(from), v128_load32_splat(from.add(1))] };
        each(|i| add_fours::<SIGNED>(add_fours::<SIGNED>(sums[i], quants[0][i], x[0]), quants[1][i], x[1]))
    }

    #[inline(always)]
    fn ints(x: i32) -> [v128; 4] {
        [i32x4_splat(x); 4]
    }

    #[inline(always)]
    fn floats(ints: [v128; 4]) -> [v128; 4] {
        ints.map(|ints| f32x4_convert_i32x4(ints))
    }

    #[inline(always)]
    fn splat(x: f32) -> [v128; 4] {
        [f32x4_splat(x); 4]
    }

    #[inline(always)]
    fn load_sums(x: &[f32; 16]) -> [v128; 4] {
        load(bytemuck::cast_ref::<_, [u8; 64]>(x))
    }

    #[inline(always)]
    fn store_sums(sums: [v128; 4], to: &mut [f32]) {
        let to: *mut v128 = to[..16].as_mut_ptr().cast();
        for (i, sums) in sums.into_iter().enumerate() {
            // SAFETY: there is room for sixteen floats behind the pointer, which need not be aligned.
            unsafe { v128_store(to.add(i), sums) };
        }
    }

    #[inline(always)]
    fn mul(a: [v128; 4], b: [v128; 4]) -> [v128; 4] {
        each(|i| f32x4_mul(a[i], b[i]))
    }

    #[inline(always)]
    fn fma(a: [v128; 4], b: [v128; 4], c: [v128; 4]) -> [v128; 4] {
        each(|i| f32x4_add(f32x4_mul(a[i], b[i]), c[i]))
    }

    #[inline(always)]
    fn spread(Eight(first, second): Eight, others: bool) -> [v128; 4] {
        let four = if others { second } else { first };
        [
            i32x4_shuffle::<0, 0, 0, 0>(four, four),
            i32x4_shuffle::<1, 1, 1, 1>(four, four),
            i32x4_shuffle::<2, 2, 2, 2>(four, four),
            i32x4_shuffle::<3, 3, 3, 3>(four, four),
        ]
    }

    #[inline(always)]
    fn folded(sums: [v128; 4]) -> Eight {
        Eight(f32x4_add(sums[0], sums[2]), f32x4_add(sums[1], sums[3]))
    }
}
