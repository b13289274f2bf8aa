//! Inner loops for the processor at hand. They are written once over [`Vector`] and compiled twice on x86-64: for any
//! such processor, and for those with AVX2, FMA and F16C; some also for AVX-512. On the web they use vectors of 128 bits.

use std::ops::{Add, Div, Mul, Neg, Sub};

pub(super) mod bytes;
pub(super) mod tiles;

/// A loop to be compiled for several instruction sets. Everything in it must be inlined to benefit.
pub(super) trait Work {
    type Output;

    /// Does the work.
    fn run<V: Vector>(self) -> Self::Output;
}

/// Does the work with the best instructions that this processor has.
pub(super) fn run<W: Work>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    if avx2::is_there() {
        // SAFETY: the processor has these features, as just checked.
        return unsafe { avx2::run(work) };
    }
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    return work.run::<simd128::Eight>();
    #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
    work.run::<[f32; 8]>()
}

/// What loops that the compiler turns into vectors know of the instructions.
pub(super) trait Instructions: Copy {
    /// Whether a fused multiply-add is one of them.
    const FUSED: bool;
    /// What a [`Function`] takes at a time: one number where the compiler makes vectors of a loop by itself.
    type Numbers: Numbers;
}

/// One number, or several side by side.
pub(super) trait Numbers:
    Copy + Neg<Output = Self> + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    const LEN: usize;

    fn splat(x: f32) -> Self;
    /// The first `LEN` elements.
    fn load(x: &[f32]) -> Self;
    /// Writes the first `LEN` elements.
    fn store(self, y: &mut [f32]);
    /// `self * b + c`, fused only where that is no library call.
    fn fma<I: Instructions>(self, b: Self, c: Self) -> Self;
    fn abs(self) -> Self;
    /// At least `limit`; NaN stays NaN.
    fn at_least(self, limit: f32) -> Self;
    /// At most `limit`; NaN stays NaN.
    fn at_most(self, limit: f32) -> Self;
    /// `then` where this is below `limit`, else `other`.
    fn if_below(self, limit: f32, then: Self, other: Self) -> Self;
    /// `2^n` for the whole number `n` that stands in the lowest bits.
    fn two_to_lowest(self) -> Self;
}

impl Numbers for f32 {
    const LEN: usize = 1;

    #[inline(always)]
    fn splat(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn load(x: &[f32]) -> f32 {
        x[0]
    }

    #[inline(always)]
    fn store(self, y: &mut [f32]) {
        y[0] = self;
    }

    #[inline(always)]
    fn fma<I: Instructions>(self, b: f32, c: f32) -> f32 {
        if I::FUSED { self.mul_add(b, c) } else { self * b + c }
    }

    #[inline(always)]
    fn abs(self) -> f32 {
        self.abs()
    }

    #[inline(always)]
    fn at_least(self, limit: f32) -> f32 {
        if self < limit { limit } else { self }
    }

    #[inline(always)]
    fn at_most(self, limit: f32) -> f32 {
        if self > limit { limit } else { self }
    }

    #[inline(always)]
    fn if_below(self, limit: f32, then: f32, other: f32) -> f32 {
        if self < limit { then } else { other }
    }

    #[inline(always)]
    fn two_to_lowest(self) -> f32 {
        f32::from_bits((self.to_bits() << 23).wrapping_add(1.0f32.to_bits()))
    }
}

/// Floats side by side that are multiplied and added up, as many as the processor's widest vectors have.
pub(super) trait Lanes<const LEN: usize>: Instructions {
    /// Sums that a loop can keep in registers while it multiplies, the pointers to the rows among them.
    const SUMS: usize;

    fn splat(x: f32) -> Self;
    fn load(x: &[f32; LEN]) -> Self;
    fn store(self, y: &mut [f32; LEN]);
    /// The values of f16.
    fn from_f16(bits: &[u16; LEN]) -> Self;
    fn from_i8(x: &[i8; LEN]) -> Self;
    /// `self * b + c`.
    fn fma(self, b: Self, c: Self) -> Self;
    /// Says that these are needed soon.
    fn prefetch(x: &[f32]);
    /// The sum of each vector's lanes, in one order whatever their number.
    fn sum_each<const N: usize>(vectors: [Self; N]) -> [f32; N];

    /// Exchanges rows and columns.
    #[inline(always)]
    fn transpose(square: &mut [[f32; LEN]; LEN]) {
        let rows = *square;
        for (i, to) in square.iter_mut().enumerate() {
            for (to, row) in to.iter_mut().zip(&rows) {
                *to = row[i];
            }
        }
    }
}

impl<V: Vector> Lanes<8> for V {
    const SUMS: usize = V::SUMS;

    #[inline(always)]
    fn splat(x: f32) -> V {
        Vector::splat(x)
    }

    #[inline(always)]
    fn load(x: &[f32; 8]) -> V {
        Vector::load(x)
    }

    #[inline(always)]
    fn store(self, y: &mut [f32; 8]) {
        *y = self.lanes();
    }

    #[inline(always)]
    fn from_f16(bits: &[u16; 8]) -> V {
        Vector::from_f16(bits)
    }

    #[inline(always)]
    fn from_i8(x: &[i8; 8]) -> V {
        Vector::from_i8(x)
    }

    #[inline(always)]
    fn fma(self, b: V, c: V) -> V {
        Vector::fma(self, b, c)
    }

    #[inline(always)]
    fn prefetch(x: &[f32]) {
        <V as Vector>::prefetch(x);
    }

    #[inline(always)]
    fn sum_each<const N: usize>(vectors: [V; N]) -> [f32; N] {
        <V as Vector>::sum_each(vectors)
    }
}

/// A loop over [`Lanes`].
pub(super) trait WideWork {
    /// Does the work.
    fn run_wide<const LEN: usize, L: Lanes<LEN>>(self);
}

impl<W: WideWork> Work for W {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        self.run_wide::<8, V>();
    }
}

/// Does the work with vectors of 512 bits where the processor has them, else as [`run`].
pub(super) fn run_wide<W: WideWork>(work: W) {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_there() {
        // SAFETY: the processor has the features, as just checked.
        return unsafe { avx512::run(work) };
    }
    run(work)
}

/// Floats in a vector of [`run_wide`] where weights are put into panels, which no loop for other processors has been measured
/// with.
#[inline(always)]
pub(super) fn panel_lanes() -> Option<usize> {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_there() {
        return Some(16);
    } else if avx2::is_there() {
        return Some(8);
    }
    None
}

/// Thirty-two signed bytes, the quants of a block.
pub(super) trait Bytes: Copy {
    /// Quants less `offset`: nibbles with `B` further bits each above them, at most two. Of a block's eight quads of `B`
    /// bits, quad q lies in word q % B at bits B (q / B) of each byte.
    fn from_quads<const B: usize>(nibbles: &[u32; 4], upper: &[u32; B], offset: i8) -> Self;
    /// The levels that a block's nibbles count, quads as above.
    fn from_levels(nibbles: &[u32; 4], levels: &[i8; 16]) -> Self;
}

/// The thirty-two floats of a block.
pub(super) trait Wide: Copy {
    type Eight: Vector;
    /// Lanes in which products are added up.
    type Sum: Sums;

    fn splat(x: f32) -> Self;
    /// One number in the first sixteen, another one in the others.
    fn halves(low: f32, high: f32) -> Self;
    fn splat_f16(bits: u16) -> Self;
    fn load(x: &[f32; 32]) -> Self;
    fn store(self, y: &mut [f32; 32]);
    fn from_f16(bits: &[u16; 32]) -> Self;
    fn from_bf16(bits: &[u16; 32]) -> Self;
    fn from_i8(x: &[i8; 32]) -> Self;
    /// As [`Bytes::from_quads`].
    fn from_quads<const B: usize>(nibbles: &[u32; 4], upper: &[u32; B], offset: i8) -> Self;
    /// As [`Bytes::from_levels`].
    fn from_levels(nibbles: &[u32; 4], levels: &[i8; 16]) -> Self;
    /// `self * b + c`.
    fn fma(self, b: Self, c: Self) -> Self;
    /// All of them times `scale`.
    fn scaled(self, scale: Self::Sum) -> Self;
    /// `sum + scale * (self . x)`.
    fn add_dot(self, x: &[f32; 32], scale: Self::Sum, sum: Self::Sum) -> Self::Sum;
}

/// Lanes in which products are added up.
pub(super) trait Sums: Copy {
    fn splat(x: f32) -> Self;
    /// The value of an f16 in all lanes.
    fn splat_f16(bits: u16) -> Self;
    fn total(self) -> f32;
}

impl<V: Vector> Sums for V {
    #[inline(always)]
    fn splat(x: f32) -> V {
        Vector::splat(x)
    }

    #[inline(always)]
    fn splat_f16(bits: u16) -> V {
        Vector::splat_f16(bits)
    }

    #[inline(always)]
    fn total(self) -> f32 {
        self.sum()
    }
}

impl<V: Vector> Wide for [V; 4] {
    type Eight = V;
    type Sum = V;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        [Vector::splat(x); 4]
    }

    #[inline(always)]
    fn halves(low: f32, high: f32) -> Self {
        let (low, high) = (Vector::splat(low), Vector::splat(high));
        [low, low, high, high]
    }

    #[inline(always)]
    fn splat_f16(bits: u16) -> Self {
        [Vector::splat_f16(bits); 4]
    }

    #[inline(always)]
    fn load(x: &[f32; 32]) -> Self {
        let (x, _) = x.as_chunks();
        [Vector::load(&x[0]), Vector::load(&x[1]), Vector::load(&x[2]), Vector::load(&x[3])]
    }

    #[inline(always)]
    fn store(self, y: &mut [f32; 32]) {
        for (y, eight) in y.as_chunks_mut().0.iter_mut().zip(self) {
            *y = eight.lanes();
        }
    }

    #[inline(always)]
    fn from_f16(bits: &[u16; 32]) -> Self {
        let (x, _) = bits.as_chunks();
        [Vector::from_f16(&x[0]), Vector::from_f16(&x[1]), Vector::from_f16(&x[2]), Vector::from_f16(&x[3])]
    }

    #[inline(always)]
    fn from_bf16(bits: &[u16; 32]) -> Self {
        let (x, _) = bits.as_chunks();
        [V::from_bf16(&x[0]), V::from_bf16(&x[1]), V::from_bf16(&x[2]), V::from_bf16(&x[3])]
    }

    #[inline(always)]
    fn from_i8(x: &[i8; 32]) -> Self {
        let (x, _) = x.as_chunks();
        [Vector::from_i8(&x[0]), Vector::from_i8(&x[1]), Vector::from_i8(&x[2]), Vector::from_i8(&x[3])]
    }

    #[inline(always)]
    fn from_quads<const B: usize>(nibbles: &[u32; 4], upper: &[u32; B], offset: i8) -> Self {
        V::from_bytes(V::Bytes::from_quads(nibbles, upper, offset))
    }

    #[inline(always)]
    fn from_levels(nibbles: &[u32; 4], levels: &[i8; 16]) -> Self {
        V::from_bytes(V::Bytes::from_levels(nibbles, levels))
    }

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        let [s, t, u, v] = self;
        [Vector::fma(s, b[0], c[0]), Vector::fma(t, b[1], c[1]), Vector::fma(u, b[2], c[2]), Vector::fma(v, b[3], c[3])]
    }

    #[inline(always)]
    fn scaled(self, scale: V) -> Self {
        Wide::fma(self, [scale; 4], Wide::splat(0.0))
    }

    #[inline(always)]
    fn add_dot(self, x: &[f32; 32], scale: V, sum: V) -> V {
        let mut part = Vector::splat(0.0);
        for (eight, x) in self.into_iter().zip(x.as_chunks().0) {
            part = Vector::fma(eight, Vector::load(x), part);
        }
        Vector::fma(part, scale, sum)
    }
}

/// A loop over blocks.
pub(super) trait BlockWork {
    /// Does the work.
    fn run_blocks<W: Wide>(self);
}

/// Does the work with the best instructions that this processor has.
pub(super) fn run_blocks<W: BlockWork>(work: W) {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_there() {
        // SAFETY: the processor has the features, as just checked.
        return unsafe { avx512::run_blocks(work) };
    }
    run(OfVectors(work));
}

/// Blocks of four vectors of eight.
struct OfVectors<W>(W);

impl<W: BlockWork> Work for OfVectors<W> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        self.0.run_blocks::<[V; 4]>();
    }
}

/// Eight floats side by side.
pub(super) trait Vector: Instructions {
    type Bytes: Bytes;
    /// Sums that a loop can keep in registers while it multiplies.
    const SUMS: usize;

    fn splat(x: f32) -> Self;
    /// The value of an f16 in all lanes.
    fn splat_f16(bits: u16) -> Self;
    fn load(x: &[f32; 8]) -> Self;
    fn lanes(self) -> [f32; 8];
    /// The bits that a mask has ones for.
    fn masked(self, mask: &[u32; 8]) -> Self;
    /// `self * b + c`.
    fn fma(self, b: Self, c: Self) -> Self;

    /// The values of eight f16.
    fn from_f16(bits: &[u16; 8]) -> Self;
    /// The values of eight BF16.
    fn from_bf16(bits: &[u16; 8]) -> Self;
    fn from_i8(x: &[i8; 8]) -> Self;
    /// Every second number from the first on, and from the second on.
    #[inline(always)]
    fn even_and_odd(x: &[i8; 16]) -> [Self; 2] {
        let mut halves = [[0; 8]; 2];
        for (i, pair) in x.as_chunks::<2>().0.iter().enumerate() {
            (halves[0][i], halves[1][i]) = (pair[0], pair[1]);
        }
        [Self::from_i8(&halves[0]), Self::from_i8(&halves[1])]
    }
    fn from_bytes(bytes: Self::Bytes) -> [Self; 4];
    /// Eight numbers of six bits: their low nibbles, and their upper two bits.
    fn six_bits(low: u32, high: u16) -> Self;

    /// Says that these are needed soon.
    #[inline(always)]
    fn prefetch(_x: &[f32]) {}

    /// The sum of each vector's lanes.
    #[inline(always)]
    fn sum_each<const N: usize>(vectors: [Self; N]) -> [f32; N] {
        vectors.map(Self::sum)
    }

    /// The sum of all lanes, in pairs.
    #[inline(always)]
    fn sum(self) -> f32 {
        let a = self.lanes();
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
}

impl Instructions for [f32; 8] {
    const FUSED: bool = cfg!(target_arch = "aarch64");
    type Numbers = f32;
}

/// For any processor; the compiler uses what vectors the target has.
impl Vector for [f32; 8] {
    type Bytes = [i8; 32];
    const SUMS: usize = if cfg!(target_arch = "aarch64") { 12 } else { 4 };

    #[inline(always)]
    fn splat(x: f32) -> Self {
        [x; 8]
    }

    #[inline(always)]
    fn splat_f16(bits: u16) -> Self {
        [widen_f16(bits); 8]
    }

    #[inline(always)]
    fn load(x: &[f32; 8]) -> Self {
        *x
    }

    #[inline(always)]
    fn masked(mut self, mask: &[u32; 8]) -> Self {
        for (lane, mask) in self.iter_mut().zip(mask) {
            *lane = f32::from_bits(lane.to_bits() & mask);
        }
        self
    }

    #[inline(always)]
    fn lanes(self) -> [f32; 8] {
        self
    }

    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        std::array::from_fn(|i| self[i].fma::<Self>(b[i], c[i]))
    }

    #[inline(always)]
    fn from_f16(bits: &[u16; 8]) -> Self {
        bits.map(widen_f16)
    }

    #[inline(always)]
    fn from_bf16(bits: &[u16; 8]) -> Self {
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    fn from_i8(x: &[i8; 8]) -> Self {
        x.map(f32::from)
    }

    #[inline(always)]
    fn from_bytes(bytes: [i8; 32]) -> [Self; 4] {
        let (eights, _) = bytes.as_chunks::<8>();
        std::array::from_fn(|i| eights[i].map(f32::from))
    }

    #[inline(always)]
    fn six_bits(low: u32, high: u16) -> Self {
        // Only signed integers become floats in one instruction.
        std::array::from_fn(|i| (low >> (4 * i) & 15 | (u32::from(high) >> (2 * i) & 3) << 4) as i32 as f32)
    }
}

impl Bytes for [i8; 32] {
    #[inline(always)]
    fn from_quads<const B: usize>(nibbles: &[u32; 4], upper: &[u32; B], offset: i8) -> Self {
        let mask = ((1 << B) - 1) * 0x0101_0101;
        let mut bytes = [0; 32];
        for (q, to) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let low = nibbles[q % 4] >> (4 * (q / 4)) & 0x0f0f_0f0f;
            let high = if B == 0 { 0 } else { upper[q % B] >> (B * (q / B)) & mask };
            *to = (low | high << 4).to_le_bytes().map(|quant| (quant as i8).wrapping_sub(offset));
        }
        bytes
    }

    #[inline(always)]
    fn from_levels(nibbles: &[u32; 4], levels: &[i8; 16]) -> Self {
        std::array::from_fn(|i| levels[(nibbles[i / 4 % 4] >> (i / 16 * 4 + i % 4 * 8) & 15) as usize])
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use super::avx2::{Eight, Register};
    use super::{BlockWork, Bytes, Instructions, Lanes, Sums, Vector, Wide, WideWork};

    pub fn is_there() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
    }

    // Without the second feature, half of the registers could not be read as shorter ones, and were not used.
    #[target_feature(enable = "avx512f,avx512vl,avx512dq")]
    pub fn run<W: WideWork>(work: W) {
        work.run_wide::<16, Sixteen>();
    }

    #[target_feature(enable = "avx512f,avx512vl,avx512dq")]
    pub fn run_blocks<W: BlockWork>(work: W) {
        work.run_blocks::<[Sixteen; 2]>();
    }

    /// Only [`run`], [`run_blocks`] and `tiles` name it, so its methods are only called where the processor has the features.
    #[derive(Clone, Copy)]
    pub struct Sixteen(__m512);

    impl Instructions for Sixteen {
        const FUSED: bool = true;
        type Numbers = f32;
    }

    // SAFETY, for all blocks below: the processor has the features, as said above, and what is loaded or stored is as long as
    // the array behind the pointer; none of the instructions asks for alignment.
    impl Sixteen {
        /// The halves of each vector added up: those of `a`, then those of `b`.
        #[inline(always)]
        fn pairs(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4::<0b01_00_11_10>(a, b)) }
        }

        #[inline(always)]
        fn from_bf16(bits: &[u16; 16]) -> Self {
            Sixteen(unsafe {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bits.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            })
        }

        /// Of four rows, in quarter q of vector i, column 4q + i.
        #[inline(always)]
        fn columns([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
            unsafe {
                let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
                let (ab2, cd2) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
                let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
                let (ab2, cd2) = (_mm512_castps_pd(ab2), _mm512_castps_pd(cd2));
                [
                    _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
                    _mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)),
                    _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)),
                ]
            }
        }

        /// In vector q, quarter q of each.
        #[inline(always)]
        fn quarters([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
            unsafe {
                let (ab, cd) =
                    (_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_f32x4::<0b01_00_01_00>(c, d));
                let (ab2, cd2) =
                    (_mm512_shuffle_f32x4::<0b11_10_11_10>(a, b), _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d));
                [
                    _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
                    _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
                    _mm512_shuffle_f32x4::<0b10_00_10_00>(ab2, cd2),
                    _mm512_shuffle_f32x4::<0b11_01_11_01>(ab2, cd2),
                ]
            }
        }

        /// The sums of four vectors' lanes: pairs of quarters, then quarters, then lanes.
        #[inline(always)]
        fn sum_four([a, b, c, d]: [Sixteen; 4]) -> [f32; 4] {
            let mut sums = [0.0; 4];
            unsafe {
                let (ab, cd) = (Self::pairs(a.0, b.0), Self::pairs(c.0, d.0));
                let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd);
                let quarters = _mm512_add_ps(even, _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd));
                let halves = _mm512_add_ps(quarters, _mm512_permute_ps::<0b01_00_11_10>(quarters));
                let whole = _mm512_add_ps(halves, _mm512_permute_ps::<0b10_11_00_01>(halves));
                _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, whole)));
            }
            sums
        }
    }

    impl Sums for Sixteen {
        #[inline(always)]
        fn splat(x: f32) -> Self {
            Sixteen(unsafe { _mm512_set1_ps(x) })
        }

        #[inline(always)]
        fn splat_f16(bits: u16) -> Self {
            Sixteen(unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(bits as i16)) })
        }

        #[inline(always)]
        fn total(self) -> f32 {
            // Rows may be of a few blocks.
            let halves = unsafe { [_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0)] };
            Eight(unsafe { _mm256_add_ps(halves[0], halves[1]) }).sum()
        }
    }

    impl Wide for [Sixteen; 2] {
        type Eight = Eight;
        type Sum = Sixteen;

        #[inline(always)]
        fn splat(x: f32) -> Self {
            [Sums::splat(x); 2]
        }

        #[inline(always)]
        fn halves(low: f32, high: f32) -> Self {
            [Sums::splat(low), Sums::splat(high)]
        }

        #[inline(always)]
        fn splat_f16(bits: u16) -> Self {
            [Sums::splat_f16(bits); 2]
        }

        #[inline(always)]
        fn load(x: &[f32; 32]) -> Self {
            let (x, _) = x.as_chunks();
            [Lanes::load(&x[0]), Lanes::load(&x[1])]
        }

        #[inline(always)]
        fn store(self, y: &mut [f32; 32]) {
            for (y, sixteen) in y.as_chunks_mut().0.iter_mut().zip(self) {
                sixteen.store(y);
            }
        }

        #[inline(always)]
        fn from_f16(bits: &[u16; 32]) -> Self {
            let (x, _) = bits.as_chunks();
            [Lanes::from_f16(&x[0]), Lanes::from_f16(&x[1])]
        }

        #[inline(always)]
        fn from_bf16(bits: &[u16; 32]) -> Self {
            let (x, _) = bits.as_chunks();
            [Sixteen::from_bf16(&x[0]), Sixteen::from_bf16(&x[1])]
        }

        #[inline(always)]
        fn from_i8(x: &[i8; 32]) -> Self {
            let (x, _) = x.as_chunks();
            [Lanes::from_i8(&x[0]), Lanes::from_i8(&x[1])]
        }

        #[inline(always)]
        fn from_quads<const B: usize>(nibbles: &[u32; 4], upper: &[u32; B], offset: i8) -> Self {
            if B == 0 {
                // Sixteen floats to choose from fit a register.
                let levels: [i8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15].map(|i: i8| i - offset);
                return Self::from_levels(nibbles, &levels);
            }
            let Register(bytes) = Register::from_quads(nibbles, upper, offset);
            unsafe {
                let [low, high] = [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)];
                [low, high].map(|bytes| Sixteen(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))))
            }
        }

        #[inline(always)]
        fn from_levels(nibbles: &[u32; 4], levels: &[i8; 16]) -> Self {
            let Sixteen(levels) = Lanes::from_i8(levels);
            unsafe {
                // A permutation only reads the lowest four bits of each lane.
                let low = _mm512_cvtepu8_epi32(_mm_loadu_si128(nibbles.as_ptr().cast()));
                let high = _mm512_srli_epi32::<4>(low);
                [Sixteen(_mm512_permutexvar_ps(low, levels)), Sixteen(_mm512_permutexvar_ps(high, levels))]
            }
        }

        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            let [s, t] = self;
            [Lanes::fma(s, b[0], c[0]), Lanes::fma(t, b[1], c[1])]
        }

        #[inline(always)]
        fn scaled(self, scale: Sixteen) -> Self {
            let zero = Sums::splat(0.0);
            self.fma([scale; 2], [zero; 2])
        }

        #[inline(always)]
        fn add_dot(self, x: &[f32; 32], scale: Sixteen, sum: Sixteen) -> Sixteen {
            let ([low, high], (x, _)) = (self, x.as_chunks());
            let part = Lanes::fma(high, Lanes::load(&x[1]), Lanes::fma(low, Lanes::load(&x[0]), Sums::splat(0.0)));
            Lanes::fma(part, scale, sum)
        }
    }

    impl Lanes<16> for Sixteen {
        const SUMS: usize = 16;

        #[inline(always)]
        fn splat(x: f32) -> Self {
            Sixteen(unsafe { _mm512_set1_ps(x) })
        }

        #[inline(always)]
        fn load(x: &[f32; 16]) -> Self {
            Sixteen(unsafe { _mm512_loadu_ps(x.as_ptr()) })
        }

        #[inline(always)]
        fn store(self, y: &mut [f32; 16]) {
            unsafe { _mm512_storeu_ps(y.as_mut_ptr(), self.0) }
        }

        #[inline(always)]
        fn from_f16(bits: &[u16; 16]) -> Self {
            Sixteen(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bits.as_ptr().cast())) })
        }

        #[inline(always)]
        fn from_i8(x: &[i8; 16]) -> Self {
            Sixteen(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) })
        }

        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            Sixteen(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
        }

        #[inline(always)]
        fn prefetch(x: &[f32]) {
            <Eight as Vector>::prefetch(x);
        }

        #[inline(always)]
        fn transpose(square: &mut [[f32; 16]; 16]) {
            // The compiler makes gathers and scatters of plain loops, and keeps in memory what loops over vectors change.
            let at = |i: usize| unsafe { _mm512_loadu_ps(square[i].as_ptr()) };
            let [a, b, c, d] = [
                Self::columns([at(0), at(1), at(2), at(3)]),
                Self::columns([at(4), at(5), at(6), at(7)]),
                Self::columns([at(8), at(9), at(10), at(11)]),
                Self::columns([at(12), at(13), at(14), at(15)]),
            ];
            let [e, f, g, h] = [
                Self::quarters([a[0], b[0], c[0], d[0]]),
                Self::quarters([a[1], b[1], c[1], d[1]]),
                Self::quarters([a[2], b[2], c[2], d[2]]),
                Self::quarters([a[3], b[3], c[3], d[3]]),
            ];
            let mut put = |q: usize, rows: [__m512; 4]| {
                Sixteen(rows[0]).store(&mut square[4 * q]);
                Sixteen(rows[1]).store(&mut square[4 * q + 1]);
                Sixteen(rows[2]).store(&mut square[4 * q + 2]);
                Sixteen(rows[3]).store(&mut square[4 * q + 3]);
            };
            put(0, [e[0], f[0], g[0], h[0]]);
            put(1, [e[1], f[1], g[1], h[1]]);
            put(2, [e[2], f[2], g[2], h[2]]);
            put(3, [e[3], f[3], g[3], h[3]]);
        }

        #[inline(always)]
        fn sum_each<const N: usize>(vectors: [Self; N]) -> [f32; N] {
            // Not one function for both widths: a function that is handed over is compiled for any processor.
            let mut sums = [0.0; N];
            for (vectors, sums) in vectors.chunks(4).zip(sums.chunks_mut(4)) {
                let four = std::array::from_fn(|i| vectors[i.min(vectors.len() - 1)]);
                sums.copy_from_slice(&Self::sum_four(four)[..sums.len()]);
            }
            sums
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{Bytes, Instructions, Vector, Work};

    pub fn is_there() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn run<W: Work>(work: W) -> W::Output {
        work.run::<Eight>()
    }

    /// Only [`run`], products of bytes and what needs AVX-512 name it, so its methods are only called where the processor has the features.
    #[derive(Clone, Copy)]
    pub struct Eight(pub __m256);

    impl Instructions for Eight {
        const FUSED: bool = true;
        type Numbers = f32;
    }

    // SAFETY, for all blocks below: the processor has the features, as said above, and what is loaded or stored is as
    // long as the array behind the pointer; none of the instructions asks for alignment.
    impl Eight {
        /// The sums of four vectors' lanes.
        #[inline(always)]
        fn sum_four([a, b, c, d]: [Eight; 4]) -> [f32; 4] {
            let mut sums = [0.0; 4];
            unsafe {
                let pairs = _mm256_hadd_ps(_mm256_hadd_ps(a.0, b.0), _mm256_hadd_ps(c.0, d.0));
                let both = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps::<1>(pairs));
                _mm_storeu_ps(sums.as_mut_ptr(), both);
            }
            sums
        }
    }

    impl Vector for Eight {
        type Bytes = Register;
        const SUMS: usize = 12;

        #[inline(always)]
        fn splat(x: f32) -> Self {
            Eight(unsafe { _mm256_set1_ps(x) })
        }

        #[inline(always)]
        fn splat_f16(bits: u16) -> Self {
            Eight(unsafe { _mm256_cvtph_ps(_mm_set1_epi16(bits as i16)) })
        }

        #[inline(always)]
        fn load(x: &[f32; 8]) -> Self {
            Eight(unsafe { _mm256_loadu_ps(x.as_ptr()) })
        }

        #[inline(always)]
        fn masked(self, mask: &[u32; 8]) -> Self {
            Eight(unsafe { _mm256_and_ps(self.0, _mm256_loadu_ps(mask.as_ptr().cast())) })
        }

        #[inline(always)]
        fn lanes(self) -> [f32; 8] {
            let mut lanes = [0.0; 8];
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), self.0) };
            lanes
        }

        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            Eight(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
        }

        #[inline(always)]
        fn prefetch(x: &[f32]) {
            /// Of a cache line.
            const FLOATS: usize = 16;
            for line in x.chunks(FLOATS) {
                unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
            }
        }

        #[inline(always)]
        fn sum_each<const N: usize>(vectors: [Self; N]) -> [f32; N] {
            // Not one function for both widths: a function that is handed over is compiled for any processor.
            let mut sums = [0.0; N];
            for (vectors, sums) in vectors.chunks(4).zip(sums.chunks_mut(4)) {
                let four = std::array::from_fn(|i| vectors[i.min(vectors.len() - 1)]);
                sums.copy_from_slice(&Self::sum_four(four)[..sums.len()]);
            }
            sums
        }

        #[inline(always)]
        fn from_f16(bits: &[u16; 8]) -> Self {
            Eight(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(bits.as_ptr().cast())) })
        }

        #[inline(always)]
        fn from_bf16(bits: &[u16; 8]) -> Self {
            Eight(unsafe {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(bits.as_ptr().cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            })
        }

        #[inline(always)]
        fn from_i8(x: &[i8; 8]) -> Self {
            Eight(unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))) })
        }

        #[inline(always)]
        fn even_and_odd(x: &[i8; 16]) -> [Eight; 2] {
            unsafe {
                let pairs = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
                let even = _mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(pairs));
                let odd = _mm256_srai_epi32::<24>(_mm256_slli_epi32::<16>(pairs));
                [Eight(_mm256_cvtepi32_ps(even)), Eight(_mm256_cvtepi32_ps(odd))]
            }
        }

        #[inline(always)]
        fn from_bytes(Register(bytes): Register) -> [Eight; 4] {
            unsafe {
                let eight = |bytes: __m128i| Eight(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
                let [a, b] = [_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes)];
                [eight(a), eight(_mm_srli_si128::<8>(a)), eight(b), eight(_mm_srli_si128::<8>(b))]
            }
        }

        #[inline(always)]
        fn six_bits(low: u32, high: u16) -> Self {
            Eight(unsafe {
                let low =
                    _mm256_srlv_epi32(_mm256_set1_epi32(low as i32), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
                let high = _mm256_srlv_epi32(
                    _mm256_set1_epi32(i32::from(high) << 4),
                    _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14),
                );
                let low = _mm256_and_si256(low, _mm256_set1_epi32(15));
                let high = _mm256_and_si256(high, _mm256_set1_epi32(3 << 4));
                _mm256_cvtepi32_ps(_mm256_or_si256(low, high))
            })
        }
    }

    /// As [`Eight`].
    #[derive(Clone, Copy)]
    pub struct Register(pub __m256i);

    impl Bytes for Register {
        #[inline(always)]
        fn from_quads<const B: usize>(nibbles: &[u32; 4], upper: &[u32; B], offset: i8) -> Self {
            unsafe {
                let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(nibbles.as_ptr().cast()));
                let shifted = _mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
                let low = _mm256_and_si256(shifted, _mm256_set1_epi8(15));
                let high = match *upper.as_slice() {
                    [one] => {
                        let each = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                        let shifted = _mm256_srlv_epi32(_mm256_set1_epi32(one as i32), each);
                        _mm256_and_si256(shifted, _mm256_set1_epi8(1))
                    }
                    [even, odd] => {
                        let words = _mm256_set1_epi64x((u64::from(odd) << 32 | u64::from(even)) as i64);
                        let shifted = _mm256_srlv_epi32(words, _mm256_setr_epi32(0, 0, 2, 2, 4, 4, 6, 6));
                        _mm256_and_si256(shifted, _mm256_set1_epi8(3))
                    }
                    _ => _mm256_setzero_si256(),
                };
                let quants = _mm256_or_si256(low, _mm256_slli_epi32::<4>(high));
                Register(_mm256_sub_epi8(quants, _mm256_set1_epi8(offset)))
            }
        }

        #[inline(always)]
        fn from_levels(nibbles: &[u32; 4], levels: &[i8; 16]) -> Self {
            unsafe {
                let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(nibbles.as_ptr().cast()));
                let shifted = _mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
                let levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(levels.as_ptr().cast()));
                Register(_mm256_shuffle_epi8(levels, _mm256_and_si256(shifted, _mm256_set1_epi8(15))))
            }
        }
    }
}

/// WebAssembly's vectors of 128 bits. The compiler does not find them by itself in `from_quads` over arrays: a block of
/// Q4_0 times activations took 20.5 ns in Node and takes 4.7.
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod simd128 {
    use std::arch::wasm32::*;
    use std::ops::{Add, Div, Mul, Neg, Sub};

    use super::{Bytes, Instructions, Numbers, Vector, widen_f16};

    #[derive(Clone, Copy)]
    pub struct Eight(pub v128, pub v128);

    impl Instructions for Eight {
        const FUSED: bool = false;
        type Numbers = Four;
    }

    /// For functions of single numbers: the module is linked for size, and then the compiler makes no vectors of loops.
    #[derive(Clone, Copy)]
    pub struct Four(v128);

    macro_rules! operators {
        ($($operator:ident $method:ident $instruction:ident;)*) => {
            $(impl $operator for Four {
                type Output = Four;

                #[inline(always)]
                fn $method(self, other: Four) -> Four {
                    Four($instruction(self.0, other.0))
                }
            })*
        };
    }
    operators! {
        Add add f32x4_add;
        Sub sub f32x4_sub;
        Mul mul f32x4_mul;
        Div div f32x4_div;
    }

    impl Neg for Four {
        type Output = Four;

        #[inline(always)]
        fn neg(self) -> Four {
            Four(f32x4_neg(self.0))
        }
    }

    // `pmin` and `pmax` give their first operand unless the second is less or more.
    impl Numbers for Four {
        const LEN: usize = 4;

        #[inline(always)]
        fn splat(x: f32) -> Four {
            Four(f32x4_splat(x))
        }

        #[inline(always)]
        fn load(x: &[f32]) -> Four {
            let x: *const v128 = x[..4].as_ptr().cast();
            // SAFETY: four floats are behind the pointer, which need not be aligned.
            Four(unsafe { v128_load(x) })
        }

        #[inline(always)]
        fn store(self, y: &mut [f32]) {
            let y: *mut v128 = y[..4].as_mut_ptr().cast();
            // SAFETY: there is room for four floats behind the pointer, which need not be aligned.
            unsafe { v128_store(y, self.0) };
        }

        #[inline(always)]
        fn fma<I: Instructions>(self, b: Four, c: Four) -> Four {
            self * b + c
        }

        #[inline(always)]
        fn abs(self) -> Four {
            Four(f32x4_abs(self.0))
        }

        #[inline(always)]
        fn at_least(self, limit: f32) -> Four {
            Four(f32x4_pmax(self.0, f32x4_splat(limit)))
        }

        #[inline(always)]
        fn at_most(self, limit: f32) -> Four {
            Four(f32x4_pmin(self.0, f32x4_splat(limit)))
        }

        #[inline(always)]
        fn if_below(self, limit: f32, then: Four, other: Four) -> Four {
            Four(v128_bitselect(then.0, other.0, f32x4_lt(self.0, f32x4_splat(limit))))
        }

        #[inline(always)]
        fn two_to_lowest(self) -> Four {
            Four(i32x4_add(i32x4_shl(self.0, 23), f32x4_splat(1.0)))
        }
    }

    // SAFETY, for all blocks below: what is loaded or stored is as long as the array behind the pointer; neither asks
    // for alignment.
    impl Vector for Eight {
        type Bytes = Pair;
        const SUMS: usize = 4;

        #[inline(always)]
        fn splat(x: f32) -> Self {
            Eight(f32x4_splat(x), f32x4_splat(x))
        }

        #[inline(always)]
        fn splat_f16(bits: u16) -> Self {
            Self::splat(widen_f16(bits))
        }

        #[inline(always)]
        fn load(x: &[f32; 8]) -> Self {
            let x: *const v128 = x.as_ptr().cast();
            unsafe { Eight(v128_load(x), v128_load(x.add(1))) }
        }

        #[inline(always)]
        fn masked(self, mask: &[u32; 8]) -> Self {
            let mask: *const v128 = mask.as_ptr().cast();
            unsafe { Eight(v128_and(self.0, v128_load(mask)), v128_and(self.1, v128_load(mask.add(1)))) }
        }

        #[inline(always)]
        fn lanes(self) -> [f32; 8] {
            let mut lanes = [0.0; 8];
            let to: *mut v128 = lanes.as_mut_ptr().cast();
            unsafe {
                v128_store(to, self.0);
                v128_store(to.add(1), self.1);
            }
            lanes
        }

        #[inline(always)]
        fn fma(self, b: Self, c: Self) -> Self {
            Eight(f32x4_add(f32x4_mul(self.0, b.0), c.0), f32x4_add(f32x4_mul(self.1, b.1), c.1))
        }

        #[inline(always)]
        fn from_f16(bits: &[u16; 8]) -> Self {
            let bits = unsafe { v128_load(bits.as_ptr().cast()) };
            Eight(widen_four(u32x4_extend_low_u16x8(bits)), widen_four(u32x4_extend_high_u16x8(bits)))
        }

        #[inline(always)]
        fn from_bf16(bits: &[u16; 8]) -> Self {
            let bits = unsafe { v128_load(bits.as_ptr().cast()) };
            Eight(i32x4_shl(u32x4_extend_low_u16x8(bits), 16), i32x4_shl(u32x4_extend_high_u16x8(bits), 16))
        }

        #[inline(always)]
        fn from_i8(x: &[i8; 8]) -> Self {
            from_i16(unsafe { i16x8_load_extend_i8x8(x.as_ptr()) })
        }

        #[inline(always)]
        fn from_bytes(Pair(low, high): Pair) -> [Eight; 4] {
            [
                from_i16(i16x8_extend_low_i8x16(low)),
                from_i16(i16x8_extend_high_i8x16(low)),
                from_i16(i16x8_extend_low_i8x16(high)),
                from_i16(i16x8_extend_high_i8x16(high)),
            ]
        }

        #[inline(always)]
        fn six_bits(low: u32, high: u16) -> Self {
            // A word for each lane, as vectors cannot be shifted by different amounts.
            let of = |i: u32| low >> (4 * i) & 15 | (u32::from(high) >> (2 * i) & 3) << 4;
            let four = |i: u32| f32x4_convert_i32x4(u32x4(of(i), of(i + 1), of(i + 2), of(i + 3)));
            Eight(four(0), four(4))
        }
    }

    /// The first half, and the second one.
    #[derive(Clone, Copy)]
    pub struct Pair(v128, v128);

    impl Bytes for Pair {
        #[inline(always)]
        fn from_quads<const B: usize>(nibbles: &[u32; 4], upper: &[u32; B], offset: i8) -> Self {
            let nibbles = unsafe { v128_load(nibbles.as_ptr().cast()) };
            let mask = u8x16_splat(15);
            let (mut low, mut high) = (v128_and(nibbles, mask), v128_and(u32x4_shr(nibbles, 4), mask));
            if B > 0 {
                let [of_low, of_high] = further_bits(upper);
                (low, high) = (v128_or(low, of_low), v128_or(high, of_high));
            }
            let offset = i8x16_splat(offset);
            Pair(i8x16_sub(low, offset), i8x16_sub(high, offset))
        }

        #[inline(always)]
        fn from_levels(nibbles: &[u32; 4], levels: &[i8; 16]) -> Self {
            let nibbles = unsafe { v128_load(nibbles.as_ptr().cast()) };
            let levels = unsafe { v128_load(levels.as_ptr().cast()) };
            let mask = u8x16_splat(15);
            let (low, high) = (v128_and(nibbles, mask), v128_and(u32x4_shr(nibbles, 4), mask));
            Pair(i8x16_swizzle(levels, low), i8x16_swizzle(levels, high))
        }
    }

    /// The bits behind the nibbles of a block, one or two: each in the upper half of its byte, for the lower half of the
    /// block and for the upper one. Quad q has bit q of each byte of its word, or bits 2 (q / 2) of word q % 2.
    #[inline(always)]
    pub fn further_bits<const B: usize>(words: &[u32; B]) -> [v128; 2] {
        // Words are shifted by different amounts by multiplying them; the bits then lie at 4 - B of each byte for the lower
        // half, and at 8 - B for the upper one.
        let further = match *words.as_slice() {
            [one] => i32x4_mul(u32x4_splat(one), i32x4(8, 4, 2, 1)),
            [even, odd] => i32x4_mul(u32x4(even, odd, even, odd), i32x4(4, 4, 1, 1)),
            _ => u32x4_splat(0),
        };
        let mask = u8x16_splat(((1 << B) - 1) << 4);
        [v128_and(u32x4_shl(further, B as u32), mask), v128_and(u32x4_shr(further, 4 - B as u32), mask)]
    }

    /// The values of four f16, each in the lower half of a lane.
    #[inline(always)]
    fn widen_four(bits: v128) -> v128 {
        // Exponent and mantissa at their places in a float that is too small by this power of two, also a subnormal one.
        let magnitude = i32x4_shl(v128_and(bits, u32x4_splat(0x7fff)), 13);
        let value = f32x4_mul(magnitude, f32x4_splat(f32::from_bits((127 + 112) << 23)));
        // Infinities and NaNs keep the highest exponent.
        let is_finite = i32x4_lt(magnitude, i32x4_splat(0x7c00 << 13));
        let value = v128_or(value, v128_andnot(u32x4_splat(0x7f80_0000), is_finite));
        v128_or(value, i32x4_shl(v128_and(bits, u32x4_splat(0x8000)), 16))
    }

    #[inline(always)]
    fn from_i16(x: v128) -> Eight {
        let (low, high) = (i32x4_extend_low_i16x8(x), i32x4_extend_high_i16x8(x));
        Eight(f32x4_convert_i32x4(low), f32x4_convert_i32x4(high))
    }
}

/// The value of an f16. Written out, because `half` asks the processor for its features at each call, which keeps loops
/// from being vectorised.
#[inline(always)]
pub(super) fn widen_f16(bits: u16) -> f32 {
    const EXPONENT: u32 = 0x7c00 << 13;
    const REBIAS: u32 = (127 - 15) << 23;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let exponent = magnitude & EXPONENT;
    // A subnormal becomes the mantissa of the smallest normal number, which is then taken off.
    let smallest = REBIAS + (1 << 23);
    let subnormal = (f32::from_bits(magnitude + smallest) - f32::from_bits(smallest)).to_bits();
    let normal = magnitude + REBIAS;
    // Infinities and NaNs keep the highest exponent.
    let finite = if exponent == 0 { subnormal } else { normal };
    let value = if exponent == EXPONENT { normal + REBIAS } else { finite };
    f32::from_bits(value | u32::from(bits & 0x8000) << 16)
}

/// `e^x` to about one unit in the last place, without branches so that loops over it vectorise. Zero below -87, where
/// the result would soon be subnormal; arguments above 88 count as 88, so that it is always finite. NaN stays NaN.
///
/// `x = n ln 2 + r` with an integer `n`, and a polynomial for `e^r` with the coefficients of Cephes' `expf`.
#[inline(always)]
pub(super) fn exp<I: Instructions, X: Numbers>(x: X) -> X {
    // Adding it rounds to an integer, which then stands in the lowest bits.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    // ln 2 in two parts; products of the first with an integer are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const LOWEST: f32 = -87.0;
    let within = x.at_least(LOWEST).at_most(88.0);
    let rounded = within.fma::<I>(X::splat(std::f32::consts::LOG2_E), X::splat(ROUND));
    let n = rounded - X::splat(ROUND);
    let r = n.fma::<I>(X::splat(-LN_2_LOW), n.fma::<I>(X::splat(-LN_2_HIGH), within));
    let p = polynomial::<I, X, 6>(r, [0.5, 1.666_666_5e-1, 4.166_579_6e-2, 8.333_452e-3, 1.398_2e-3, 1.987_569_1e-4]);
    let power = p.fma::<I>(r * r, r) + X::splat(1.0);
    x.if_below(LOWEST, X::splat(0.0), power * rounded.two_to_lowest())
}

/// The polynomial with these coefficients, that of `x^0` first.
#[inline(always)]
pub(super) fn polynomial<I: Instructions, X: Numbers, const N: usize>(x: X, coefficients: [f32; N]) -> X {
    let mut sum = X::splat(coefficients[N - 1]);
    let mut i = N - 1;
    while i > 0 {
        i -= 1;
        sum = sum.fma::<I>(x, X::splat(coefficients[i]));
    }
    sum
}

/// A function of one number.
pub(super) trait Function {
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X;
}

/// Fills `y` with the function of each element of `x`.
pub(super) struct Map<'a, F> {
    pub function: F,
    pub x: &'a [f32],
    pub y: &'a mut [f32],
}

impl<F: Function> WideWork for Map<'_, F> {
    #[inline(always)]
    fn run_wide<const LEN: usize, L: Lanes<LEN>>(self) {
        let Map { function, x, y } = self;
        let n = L::Numbers::LEN;
        for (y, x) in y.chunks_exact_mut(n).zip(x.chunks_exact(n)) {
            function.at::<L, L::Numbers>(L::Numbers::load(x)).store(y);
        }
        let whole = y.len() / n * n;
        for (y, &x) in y[whole..].iter_mut().zip(&x[whole..]) {
            *y = function.at::<L, f32>(x);
        }
    }
}

/// Replaces each element by the function of it.
#[inline(always)]
pub(super) fn each<I: Instructions>(x: &mut [f32], function: &impl Function) {
    let mut several = x.chunks_exact_mut(I::Numbers::LEN);
    for x in &mut several {
        function.at::<I, I::Numbers>(I::Numbers::load(x)).store(x);
    }
    for x in several.into_remainder() {
        *x = function.at::<I, f32>(*x);
    }
}

/// The exponential.
pub(super) struct Exp;

impl Function for Exp {
    #[inline(always)]
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X {
        exp::<I, X>(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_widening_matches_the_half_crate_for_all_bits() {
        for bits in 0..=u16::MAX {
            let (found, want) = (widen_f16(bits), half::f16::from_bits(bits).to_f32());
            assert!(found.to_bits() == want.to_bits() || (found.is_nan() && want.is_nan()), "{bits:#06x}: {found}");
        }
    }

    /// What each conversion makes of the bytes.
    struct Everything<'a>(&'a [u8; 16]);
    impl Work for Everything<'_> {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<V: Vector>(self) -> Vec<f32> {
            let halves: [u16; 8] = bytemuck::cast(*self.0);
            let (bytes, _) = self.0.as_chunks::<8>();
            let from_bytes = V::from_i8(&bytes[0].map(|byte| byte as i8));
            let words: [u32; 4] = bytemuck::cast(*self.0);
            let quads = [
                <[V; 4]>::from_quads(&words, &[], 8),
                <[V; 4]>::from_quads(&words, &[words[1]], 0),
                <[V; 4]>::from_quads(&words, &[words[2], words[3]], 32),
                <[V; 4]>::from_levels(&words, &self.0.map(|byte| byte.wrapping_mul(77) as i8)),
            ];
            let converted = [V::from_f16(&halves), V::from_bf16(&halves), from_bytes].into_iter().chain(quads.concat());
            converted.flat_map(|vector| vector.lanes()).collect()
        }
    }

    #[test]
    fn scalar_and_simd_instructions_agree() {
        for start in 0..=255u8 {
            let bytes = std::array::from_fn(|i| start.wrapping_add((31 * i) as u8));
            let [found, want] = [run(Everything(&bytes)), Everything(&bytes).run::<[f32; 8]>()];
            assert!(found.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())));
        }
    }

    /// What blocks of each kind hold.
    struct Blocks<'a>(&'a [u8; 64], &'a mut Vec<f32>);
    impl BlockWork for Blocks<'_> {
        #[inline(always)]
        fn run_blocks<W: Wide>(self) {
            let (bytes, _) = self.0.as_chunks::<32>();
            let words: [u32; 8] = bytemuck::cast(bytes[0]);
            let (nibbles, _) = words.as_chunks::<4>();
            let quants = bytes[0].map(|byte| byte as i8);
            let halves: [u16; 32] = bytemuck::cast(*self.0);
            let levels: [i8; 16] = std::array::from_fn(|i| quants[i].wrapping_mul(77));
            let blocks = [
                W::from_i8(&quants),
                W::from_f16(&halves.map(|bits| bits & 0xbfff)),
                W::from_bf16(&halves.map(|bits| bits & 0xbfff)),
                W::from_quads(&nibbles[0], &[], 8),
                W::from_quads(&nibbles[0], &[words[5]], 16),
                W::from_quads(&nibbles[0], &[words[6], words[7]], 32),
                W::from_levels(&nibbles[1], &levels),
                W::halves(1.0, 2.0),
                W::splat_f16(halves[0] & 0xbfff).scaled(W::Sum::splat(3.0)),
            ];
            let mut sum = W::Sum::splat(0.0);
            for block in blocks {
                let mut values = [0.0; 32];
                block.store(&mut values);
                self.1.extend(values);
                sum = W::load(&values).add_dot(&std::array::from_fn(|i| i as f32), W::Sum::splat_f16(0x4000), sum);
            }
            // Lanes are summed in an order of their own.
            self.1.push(sum.total());
        }
    }

    #[test]
    fn block_operations_agree_for_every_vector_width() {
        for start in 0..=255u8 {
            let bytes = std::array::from_fn(|i| start.wrapping_add((31 * i) as u8));
            let [mut best, mut short, mut want] = [const { Vec::new() }; 3];
            run_blocks(Blocks(&bytes, &mut best));
            run(OfVectors(Blocks(&bytes, &mut short)));
            Blocks(&bytes, &mut want).run_blocks::<[[f32; 8]; 4]>();
            let terms = want[..want.len() - 1].iter().enumerate().map(|(i, x)| 2.0 * f64::from(*x) * (i % 32) as f64);
            let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            for found in [&best, &short, &want] {
                assert_eq!(found[..found.len() - 1], want[..want.len() - 1]);
                let sum = found[found.len() - 1];
                assert!((f64::from(sum) - exact).abs() <= 1e-6 * size, "{sum}, expected {exact}");
            }
        }
    }

    #[test]
    fn six_bit_values_are_joined_from_low_and_high_bits() {
        struct SixBits(u32, u16);
        impl Work for SixBits {
            type Output = [f32; 8];
            #[inline(always)]
            fn run<V: Vector>(self) -> [f32; 8] {
                V::six_bits(self.0, self.1).lanes()
            }
        }
        let numbers = [63, 0, 1, 16, 15, 48, 37, 26];
        let low = numbers.iter().rev().fold(0, |word, number| word << 4 | number & 15);
        let high = numbers.iter().rev().fold(0, |word, number| word << 2 | (number >> 4) as u16);
        let want = numbers.map(|number| number as f32);
        assert_eq!([run(SixBits(low, high)), SixBits(low, high).run::<[f32; 8]>()], [want; 2]);
    }

    /// `a[i] b[i] + 1` summed over the lanes of each vector, so many vectors at once.
    struct SumEach<'a, const N: usize>(&'a [f32], &'a mut Vec<f32>);
    impl<const N: usize> WideWork for SumEach<'_, N> {
        #[inline(always)]
        fn run_wide<const LEN: usize, L: Lanes<LEN>>(self) {
            let runs = self.0.as_chunks::<LEN>().0;
            let vectors = std::array::from_fn(|i| L::load(&runs[i]).fma(L::load(&runs[N - 1 - i]), L::splat(1.0)));
            let sums = L::sum_each::<N>(vectors);
            self.1.extend(sums.iter().map(|sum| sum - LEN as f32));
            let mut first = [0.0; LEN];
            vectors[0].store(&mut first);
            assert_eq!(first.iter().sum::<f32>(), sums[0]);
        }
    }

    #[test]
    fn lane_sums_match_their_definition() {
        fn check<const N: usize>() {
            // Whole numbers, so that sums are exact; every sixteen repeats eight.
            let x: Vec<f32> = (0..16 * N).map(|i| (i / 16 * 5 + i % 8) as f32 - 9.0).collect();
            let halves: Vec<f32> = x.chunks(16).flat_map(|run| run[..8].to_vec()).collect();
            let want: Vec<f32> = (0..N)
                .map(|i| (0..8).map(|lane| halves[8 * i + lane] * halves[8 * (N - 1 - i) + lane]).sum())
                .collect();
            let [mut any, mut short, mut wide] = [const { Vec::new() }; 3];
            SumEach::<N>(&halves, &mut any).run::<[f32; 8]>();
            run(SumEach::<N>(&halves, &mut short));
            run_wide(SumEach::<N>(if is_wide() { &x } else { &halves }, &mut wide));
            assert_eq!([&any, &short], [&want; 2], "{N}");
            let times = if is_wide() { 2.0 } else { 1.0 };
            assert_eq!(wide, want.iter().map(|sum| times * sum).collect::<Vec<_>>(), "{N}");
        }
        fn is_wide() -> bool {
            #[cfg(target_arch = "x86_64")]
            return avx512::is_there();
            #[cfg(not(target_arch = "x86_64"))]
            false
        }
        check::<1>();
        check::<3>();
        check::<4>();
        check::<6>();
    }

    #[test]
    fn exp_agrees_with_f64_on_its_whole_range() {
        let x: Vec<f32> = (0..175_000).map(|i| -87.0 + i as f32 * 0.001).collect();
        let mut fused = vec![0.0; x.len()];
        run_wide(Map { function: Exp, x: &x, y: &mut fused });
        for (&x, fused) in x.iter().zip(fused) {
            let want = f64::from(x).exp();
            for found in [fused, exp::<[f32; 8], f32>(x)] {
                assert!((f64::from(found) / want - 1.0).abs() < 2.5e-7, "exp({x}) is {want}, found {found}");
            }
        }
        assert_eq!(
            [exp::<[f32; 8], f32>(0.0), exp::<[f32; 8], f32>(-1e4), exp::<[f32; 8], f32>(f32::NEG_INFINITY)],
            [1.0, 0.0, 0.0]
        );
        assert!(exp::<[f32; 8], f32>(1e30).is_finite() && exp::<[f32; 8], f32>(f32::NAN).is_nan());
    }
}
