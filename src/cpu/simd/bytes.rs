//! Products of bytes: quants of weights, none below zero, times rounded activations. Sixty-four bytes at a time are the first
//! halves of four blocks or the second ones, or four bytes of each of sixteen rows.

use super::Vector;

#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod simd128;

/// Of four blocks: the first halves of all of them, and the second ones.
pub(in super::super) type Halves<B> = [B; 2];

/// Products of bytes.
pub(in super::super) trait ByteDots {
    type Eight: Vector;
    /// Sixty-four of them.
    type Bytes: Copy;
    /// Sixteen whole numbers.
    type Ints: Copy;
    /// Sixteen floats.
    type Sums: Copy;
    /// What is added to signed quants, if anything.
    const BIAS: u8;
    /// Whether [`ByteDots::add_fours`] takes signed quants.
    const SIGNED_ROWS: bool;
    /// Whether 32 registers hold sums.
    const MANY_SUMS: bool;
    /// Whether registers hold a block for several tokens.
    const MANY_TOKENS: bool = true;

    /// Those of four bits.
    fn nibbles(nibbles: &[[u32; 4]; 4]) -> Halves<Self::Bytes>;
    /// With a fifth bit: quad q of a block has bit q of each byte of its word.
    fn with_fifths(nibbles: Halves<Self::Bytes>, fifths: &[u32; 4]) -> Halves<Self::Bytes>;
    /// With two further bits: quad q of a block has bits 2 (q / 2) of each byte of word q % 2.
    fn with_uppers(nibbles: Halves<Self::Bytes>, uppers: &[[u32; 2]; 4]) -> Halves<Self::Bytes>;
    /// The levels that nibbles count, with the bias.
    fn levels(nibbles: Halves<Self::Bytes>, levels: &[i8; 16]) -> Halves<Self::Bytes>;
    /// With the bias.
    fn signed(quants: &[[i8; 32]; 4]) -> Halves<Self::Bytes>;
    fn load(bytes: &[u8; 64]) -> Self::Bytes;
    fn store(bytes: Self::Bytes, to: &mut [u8; 64]);
    /// The words of four rows: the first of each four words of each row, then the second and so on.
    fn interleaved(rows: [Self::Bytes; 4]) -> [Self::Bytes; 4];

    /// Exact products with both halves of four blocks; four lanes have those of one block. Bytes of `x` are -127 to 127. Quants
    /// are 63 at most, or signed ones with the bias.
    fn dot<const SIGNED: bool>(quants: Halves<Self::Bytes>, x: &Halves<[i8; 64]>) -> Self::Ints;
    /// Exact products with one half, of quants that are 63 at most.
    fn dot_half(quants: Self::Bytes, x: &[i8; 64]) -> Self::Ints;
    /// Adds the exact products of eight bytes of each row, four behind four, with those of `x`, which all rows meet. Quants may
    /// be signed only where `SIGNED` says so, unless [`SIGNED_DIFFER`] is false.
    fn add_fours<const SIGNED: bool>(sums: Self::Ints, quants: [Self::Bytes; 2], x: &[i8; 8]) -> Self::Ints;

    fn ints(x: i32) -> Self::Ints;
    fn floats(ints: Self::Ints) -> Self::Sums;
    fn splat(x: f32) -> Self::Sums;
    fn load_sums(x: &[f32; 16]) -> Self::Sums;
    fn store_sums(sums: Self::Sums, to: &mut [f32]);
    fn mul(a: Self::Sums, b: Self::Sums) -> Self::Sums;
    /// `a * b + c`.
    fn fma(a: Self::Sums, b: Self::Sums, c: Self::Sums) -> Self::Sums;
    /// Each of the first four numbers, or of the others, four times.
    fn spread(scales: Self::Eight, others: bool) -> Self::Sums;
    /// The first eight plus the others.
    fn folded(sums: Self::Sums) -> Self::Eight;
    /// Says that what lies `AHEAD` bytes behind the beginning of each cache line of these is needed soon.
    #[inline(always)]
    fn prefetch<const AHEAD: usize, T>(_: &[T]) {}
}

/// Whether rows of signed quants need other instructions than those of others.
pub(in super::super) const SIGNED_DIFFER: bool = cfg!(target_feature = "relaxed-simd");

/// A loop over products of bytes.
pub(in super::super) trait ByteWork {
    type Output;

    /// Does the work.
    fn run_bytes<D: ByteDots>(self) -> Self::Output;
}

/// Whether products of bytes are faster here than those of floats.
pub(crate) fn has_byte_dots() -> bool {
    #[cfg(target_arch = "x86_64")]
    return super::avx2::is_there();
    // Speech and kernels alone never round, so their modules do without.
    #[cfg(not(target_arch = "x86_64"))]
    cfg!(all(target_arch = "wasm32", target_feature = "simd128", feature = "web"))
}

/// Does the work with the best instructions that this processor has.
pub(in super::super) fn run_bytes<W: ByteWork>(work: W) -> W::Output {
    #[cfg(target_arch = "x86_64")]
    if super::avx2::is_there() {
        // SAFETY: the processor has these features, as just checked.
        return unsafe {
            if x86::has_vnni512() {
                x86::run_vnni512(work)
            } else if x86::has_vnni() {
                x86::run_vnni(work)
            } else {
                x86::run_pairwise(work)
            }
        };
    }
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    return simd128::run(work);
    #[cfg(not(all(target_arch = "wasm32", target_feature = "simd128")))]
    work.run_bytes::<Plain>()
}

/// Does the work with each set of instructions that this processor has, and with none.
#[cfg(test)]
pub(in super::super) fn run_bytes_by_all<W: ByteWork>(mut work: impl FnMut() -> W) -> Vec<W::Output> {
    let mut outputs = vec![work().run_bytes::<Plain>()];
    #[cfg(target_arch = "x86_64")]
    if super::avx2::is_there() {
        // SAFETY: the processor has these features, as just checked.
        unsafe {
            outputs.push(x86::run_pairwise(work()));
            if x86::has_vnni() {
                outputs.push(x86::run_vnni(work()));
            }
            if x86::has_vnni512() {
                outputs.push(x86::run_vnni512(work()));
            }
        }
    }
    outputs
}

/// For any processor.
pub(in super::super) struct Plain;

impl Plain {
    /// Sums of four products, by lane.
    #[inline(always)]
    fn products(quants: &[u8; 64], x: &[i8; 64], is_signed: bool, sums: &mut [i32; 16]) {
        for (sum, (quants, x)) in sums.iter_mut().zip(quants.as_chunks::<4>().0.iter().zip(x.as_chunks::<4>().0)) {
            for (&quant, &x) in quants.iter().zip(x) {
                let quant = if is_signed { i32::from(quant as i8) } else { i32::from(quant) };
                *sum += quant * i32::from(x);
            }
        }
    }
}

impl ByteDots for Plain {
    type Eight = [f32; 8];
    type Bytes = [u8; 64];
    type Ints = [i32; 16];
    type Sums = [f32; 16];
    const BIAS: u8 = 0;
    const SIGNED_ROWS: bool = false;
    const MANY_SUMS: bool = false;

    #[inline(always)]
    fn nibbles(nibbles: &[[u32; 4]; 4]) -> Halves<[u8; 64]> {
        let mut halves = [[0; 64]; 2];
        for (i, word) in nibbles.as_flattened().iter().enumerate() {
            for (half, shift) in halves.iter_mut().zip([0, 4]) {
                half[4 * i..][..4].copy_from_slice(&(word >> shift & 0x0f0f_0f0f).to_le_bytes());
            }
        }
        halves
    }

    #[inline(always)]
    fn with_fifths(mut nibbles: Halves<[u8; 64]>, fifths: &[u32; 4]) -> Halves<[u8; 64]> {
        for (h, half) in nibbles.iter_mut().enumerate() {
            for (i, quant) in half.iter_mut().enumerate() {
                let byte = fifths[i / 16] >> (8 * (i % 4));
                *quant |= ((byte >> (4 * h + i / 4 % 4) & 1) as u8) << 4;
            }
        }
        nibbles
    }

    #[inline(always)]
    fn with_uppers(mut nibbles: Halves<[u8; 64]>, uppers: &[[u32; 2]; 4]) -> Halves<[u8; 64]> {
        for (h, half) in nibbles.iter_mut().enumerate() {
            for (i, quant) in half.iter_mut().enumerate() {
                let quad = 4 * h + i / 4 % 4;
                let byte = uppers[i / 16][quad % 2] >> (8 * (i % 4));
                *quant |= ((byte >> (2 * (quad / 2)) & 3) as u8) << 4;
            }
        }
        nibbles
    }

    #[inline(always)]
    fn levels(nibbles: Halves<[u8; 64]>, levels: &[i8; 16]) -> Halves<[u8; 64]> {
        nibbles.map(|half| half.map(|nibble| levels[usize::from(nibble & 15)] as u8))
    }

    #[inline(always)]
    fn signed(quants: &[[i8; 32]; 4]) -> Halves<[u8; 64]> {
        [0, 1].map(|h| std::array::from_fn(|i| quants[i / 16][16 * h + i % 16] as u8))
    }

    #[inline(always)]
    fn load(bytes: &[u8; 64]) -> [u8; 64] {
        *bytes
    }

    #[inline(always)]
    fn store(bytes: [u8; 64], to: &mut [u8; 64]) {
        *to = bytes;
    }

    #[inline(always)]
    fn interleaved(rows: [[u8; 64]; 4]) -> [[u8; 64]; 4] {
        std::array::from_fn(|i| std::array::from_fn(|at| rows[at / 4 % 4][at / 16 * 16 + 4 * i + at % 4]))
    }

    #[inline(always)]
    fn dot<const SIGNED: bool>(quants: Halves<[u8; 64]>, x: &Halves<[i8; 64]>) -> [i32; 16] {
        let mut sums = [0; 16];
        Plain::products(&quants[0], &x[0], SIGNED, &mut sums);
        Plain::products(&quants[1], &x[1], SIGNED, &mut sums);
        sums
    }

    #[inline(always)]
    fn dot_half(quants: [u8; 64], x: &[i8; 64]) -> [i32; 16] {
        let mut sums = [0; 16];
        Plain::products(&quants, x, false, &mut sums);
        sums
    }

    #[inline(always)]
    fn add_fours<const SIGNED: bool>(mut sums: [i32; 16], quants: [[u8; 64]; 2], x: &[i8; 8]) -> [i32; 16] {
        for (quants, x) in quants.iter().zip(x.as_chunks::<4>().0) {
            Plain::products(quants, &std::array::from_fn(|i| x[i % 4]), false, &mut sums);
        }
        sums
    }

    #[inline(always)]
    fn ints(x: i32) -> [i32; 16] {
        [x; 16]
    }

    #[inline(always)]
    fn floats(ints: [i32; 16]) -> [f32; 16] {
        ints.map(|int| int as f32)
    }

    #[inline(always)]
    fn splat(x: f32) -> [f32; 16] {
        [x; 16]
    }

    #[inline(always)]
    fn load_sums(x: &[f32; 16]) -> [f32; 16] {
        *x
    }

    #[inline(always)]
    fn store_sums(sums: [f32; 16], to: &mut [f32]) {
        to[..16].copy_from_slice(&sums);
    }

    #[inline(always)]
    fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn spread(scales: [f32; 8], others: bool) -> [f32; 16] {
        std::array::from_fn(|i| scales[i / 4 + if others { 4 } else { 0 }])
    }

    #[inline(always)]
    fn folded(sums: [f32; 16]) -> [f32; 8] {
        std::array::from_fn(|i| sums[i] + sums[i + 8])
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::avx2::Eight;
    use super::super::avx512;
    use super::{ByteDots, ByteWork, Halves};

    pub fn has_vnni() -> bool {
        is_x86_feature_detected!("avxvnni")
    }

    pub fn has_vnni512() -> bool {
        avx512::is_there() && is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vnni")
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn run_pairwise<W: ByteWork>(work: W) -> W::Output {
        work.run_bytes::<Pairwise>()
    }

    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    pub fn run_vnni<W: ByteWork>(work: W) -> W::Output {
        work.run_bytes::<Vnni>()
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl,avx512dq,avx512bw,avx512vnni")]
    pub fn run_vnni512<W: ByteWork>(work: W) -> W::Output {
        work.run_bytes::<Vnni512>()
    }

    // SAFETY, for all blocks below: only the functions above name these types, so their methods are only called where the
    // processor has the features, and what is loaded or stored is as long as the array behind the pointer; none of the
    // instructions asks for alignment.

    /// As [`ByteDots::prefetch`]. An address that nothing lies at is as good as any.
    #[inline(always)]
    fn prefetch<const AHEAD: usize, T>(now: &[T]) {
        let mut at = 0;
        while at < size_of_val(now) {
            unsafe { _mm_prefetch::<_MM_HINT_T0>(now.as_ptr().cast::<i8>().wrapping_add(at + AHEAD)) };
            at += 64;
        }
    }

    /// Defines products of bytes with vectors of 256 bits by those of two vectors: of both halves, of signed quants, of one half,
    /// and of fours.
    macro_rules! byte_dots {
        (
            $name:ident, $bias:expr, $signed_rows:expr, $doc:expr,
            dot($q:ident, $x:ident): $dot:expr, signed: $dot_signed:expr,
            half($h:ident, $y:ident): $half:expr,
            fours($start:ident, $w:ident, $z:ident): $fours:expr
        ) => {
            #[doc = $doc]
            pub struct $name;

            impl ByteDots for $name {
                type Eight = Eight;
                type Bytes = [__m256i; 2];
                type Ints = [__m256i; 2];
                type Sums = [__m256; 2];
                const BIAS: u8 = ($bias as i8).cast_unsigned();
                const SIGNED_ROWS: bool = $signed_rows;
                const MANY_SUMS: bool = false;

                #[inline(always)]
                fn nibbles(nibbles: &[[u32; 4]; 4]) -> Halves<Self::Bytes> {
                    unsafe {
                        let from: *const __m256i = nibbles.as_ptr().cast();
                        let (a, b) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
                        let mask = _mm256_set1_epi8(15);
                        let (c, d) = (_mm256_srli_epi16::<4>(a), _mm256_srli_epi16::<4>(b));
                        [
                            [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)],
                            [_mm256_and_si256(c, mask), _mm256_and_si256(d, mask)],
                        ]
                    }
                }

                #[inline(always)]
                fn with_fifths([low, high]: Halves<Self::Bytes>, fifths: &[u32; 4]) -> Halves<Self::Bytes> {
                    unsafe {
                        let words = _mm256_castsi128_si256(_mm_loadu_si128(fifths.as_ptr().cast()));
                        let words = [
                            _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)),
                            _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3)),
                        ];
                        let mask = _mm256_set1_epi8(16);
                        let (up, down) =
                            (_mm256_setr_epi32(4, 3, 2, 1, 4, 3, 2, 1), _mm256_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3));
                        let with =
                            |quants: __m256i, fifths: __m256i| _mm256_or_si256(quants, _mm256_and_si256(fifths, mask));
                        [
                            [
                                with(low[0], _mm256_sllv_epi32(words[0], up)),
                                with(low[1], _mm256_sllv_epi32(words[1], up)),
                            ],
                            [
                                with(high[0], _mm256_srlv_epi32(words[0], down)),
                                with(high[1], _mm256_srlv_epi32(words[1], down)),
                            ],
                        ]
                    }
                }

                #[inline(always)]
                fn with_uppers([low, high]: Halves<Self::Bytes>, uppers: &[[u32; 2]; 4]) -> Halves<Self::Bytes> {
                    unsafe {
                        let words = _mm256_loadu_si256(uppers.as_ptr().cast());
                        let words = [
                            _mm256_permute4x64_epi64::<0b01_01_00_00>(words),
                            _mm256_permute4x64_epi64::<0b11_11_10_10>(words),
                        ];
                        let mask = _mm256_set1_epi8(48);
                        let (up, down) =
                            (_mm256_setr_epi32(4, 4, 2, 2, 4, 4, 2, 2), _mm256_setr_epi32(0, 0, 2, 2, 0, 0, 2, 2));
                        let with =
                            |quants: __m256i, uppers: __m256i| _mm256_or_si256(quants, _mm256_and_si256(uppers, mask));
                        [
                            [
                                with(low[0], _mm256_sllv_epi32(words[0], up)),
                                with(low[1], _mm256_sllv_epi32(words[1], up)),
                            ],
                            [
                                with(high[0], _mm256_srlv_epi32(words[0], down)),
                                with(high[1], _mm256_srlv_epi32(words[1], down)),
                            ],
                        ]
                    }
                }

                #[inline(always)]
                fn levels([low, high]: Halves<Self::Bytes>, levels: &[i8; 16]) -> Halves<Self::Bytes> {
                    unsafe {
                        let levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(levels.as_ptr().cast()));
                        let levels = _mm256_xor_si256(levels, _mm256_set1_epi8($bias));
                        [
                            [_mm256_shuffle_epi8(levels, low[0]), _mm256_shuffle_epi8(levels, low[1])],
                            [_mm256_shuffle_epi8(levels, high[0]), _mm256_shuffle_epi8(levels, high[1])],
                        ]
                    }
                }

                #[inline(always)]
                fn signed(quants: &[[i8; 32]; 4]) -> Halves<Self::Bytes> {
                    unsafe {
                        let bias = _mm256_set1_epi8($bias);
                        let block = |i: usize| _mm256_xor_si256(_mm256_loadu_si256(quants[i].as_ptr().cast()), bias);
                        let [a, b, c, d] = [block(0), block(1), block(2), block(3)];
                        [
                            [_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x20>(c, d)],
                            [_mm256_permute2x128_si256::<0x31>(a, b), _mm256_permute2x128_si256::<0x31>(c, d)],
                        ]
                    }
                }

                #[inline(always)]
                fn load(bytes: &[u8; 64]) -> Self::Bytes {
                    let from: *const __m256i = bytes.as_ptr().cast();
                    unsafe { [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))] }
                }

                #[inline(always)]
                fn store(bytes: Self::Bytes, to: &mut [u8; 64]) {
                    let to: *mut __m256i = to.as_mut_ptr().cast();
                    unsafe {
                        _mm256_storeu_si256(to, bytes[0]);
                        _mm256_storeu_si256(to.add(1), bytes[1]);
                    }
                }

                #[inline(always)]
                fn interleaved([a, b, c, d]: [Self::Bytes; 4]) -> [Self::Bytes; 4] {
                    let mut found = [a; 4];
                    for i in 0..2 {
                        unsafe {
                            let (ab, cd) = (_mm256_unpacklo_epi32(a[i], b[i]), _mm256_unpacklo_epi32(c[i], d[i]));
                            found[0][i] = _mm256_unpacklo_epi64(ab, cd);
                            found[1][i] = _mm256_unpackhi_epi64(ab, cd);
                            let (ab, cd) = (_mm256_unpackhi_epi32(a[i], b[i]), _mm256_unpackhi_epi32(c[i], d[i]));
                            found[2][i] = _mm256_unpacklo_epi64(ab, cd);
                            found[3][i] = _mm256_unpackhi_epi64(ab, cd);
                        }
                    }
                    found
                }

                #[inline(always)]
                fn dot<const SIGNED: bool>([low, high]: Halves<Self::Bytes>, x: &Halves<[i8; 64]>) -> Self::Ints {
                    let (from_low, from_high): (*const __m256i, *const __m256i) =
                        (x[0].as_ptr().cast(), x[1].as_ptr().cast());
                    unsafe {
                        let one = |$q: [__m256i; 2], $x: [__m256i; 2]| if SIGNED { $dot_signed } else { $dot };
                        [
                            one([low[0], high[0]], [_mm256_loadu_si256(from_low), _mm256_loadu_si256(from_high)]),
                            one(
                                [low[1], high[1]],
                                [_mm256_loadu_si256(from_low.add(1)), _mm256_loadu_si256(from_high.add(1))],
                            ),
                        ]
                    }
                }

                #[inline(always)]
                fn dot_half(quants: Self::Bytes, x: &[i8; 64]) -> Self::Ints {
                    let from: *const __m256i = x.as_ptr().cast();
                    unsafe {
                        let one = |$h: __m256i, $y: __m256i| $half;
                        [one(quants[0], _mm256_loadu_si256(from)), one(quants[1], _mm256_loadu_si256(from.add(1)))]
                    }
                }

                #[inline(always)]
                fn add_fours<const SIGNED: bool>(
                    sums: Self::Ints,
                    quants: [Self::Bytes; 2],
                    x: &[i8; 8],
                ) -> Self::Ints {
                    let from: *const i32 = x.as_ptr().cast();
                    unsafe {
                        let x =
                            [_mm256_set1_epi32(from.read_unaligned()), _mm256_set1_epi32(from.add(1).read_unaligned())];
                        let one = |$start: __m256i, $w: [__m256i; 2], $z: [__m256i; 2]| $fours;
                        [one(sums[0], [quants[0][0], quants[1][0]], x), one(sums[1], [quants[0][1], quants[1][1]], x)]
                    }
                }

                #[inline(always)]
                fn ints(x: i32) -> Self::Ints {
                    [unsafe { _mm256_set1_epi32(x) }; 2]
                }

                #[inline(always)]
                fn floats(ints: Self::Ints) -> Self::Sums {
                    unsafe { [_mm256_cvtepi32_ps(ints[0]), _mm256_cvtepi32_ps(ints[1])] }
                }

                #[inline(always)]
                fn splat(x: f32) -> Self::Sums {
                    [unsafe { _mm256_set1_ps(x) }; 2]
                }

                #[inline(always)]
                fn load_sums(x: &[f32; 16]) -> Self::Sums {
                    unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
                }

                #[inline(always)]
                fn store_sums(sums: Self::Sums, to: &mut [f32]) {
                    let to = to[..16].as_mut_ptr();
                    unsafe {
                        _mm256_storeu_ps(to, sums[0]);
                        _mm256_storeu_ps(to.add(8), sums[1]);
                    }
                }

                #[inline(always)]
                fn mul(a: Self::Sums, b: Self::Sums) -> Self::Sums {
                    unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
                }

                #[inline(always)]
                fn fma(a: Self::Sums, b: Self::Sums, c: Self::Sums) -> Self::Sums {
                    unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
                }

                #[inline(always)]
                fn spread(Eight(scales): Eight, others: bool) -> Self::Sums {
                    unsafe {
                        let first = _mm256_add_epi32(
                            _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1),
                            _mm256_set1_epi32(if others { 4 } else { 0 }),
                        );
                        let second = _mm256_add_epi32(first, _mm256_set1_epi32(2));
                        [_mm256_permutevar8x32_ps(scales, first), _mm256_permutevar8x32_ps(scales, second)]
                    }
                }

                #[inline(always)]
                fn folded(sums: Self::Sums) -> Eight {
                    Eight(unsafe { _mm256_add_ps(sums[0], sums[1]) })
                }

                #[inline(always)]
                fn prefetch<const AHEAD: usize, T>(now: &[T]) {
                    prefetch::<AHEAD, T>(now);
                }
            }
        };
    }

    byte_dots! {
        Pairwise, 0, false, "Pairs of products in 16 bits first, which hold four of 63 times 127, or two of 128 times 127.",
        dot(q, x): {
            let pairs = _mm256_add_epi16(_mm256_maddubs_epi16(q[0], x[0]), _mm256_maddubs_epi16(q[1], x[1]));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        },
        // As unsigned, quants lose their sign to the other operand.
        signed: {
            let low = _mm256_maddubs_epi16(_mm256_abs_epi8(q[0]), _mm256_sign_epi8(x[0], q[0]));
            let high = _mm256_maddubs_epi16(_mm256_abs_epi8(q[1]), _mm256_sign_epi8(x[1], q[1]));
            let ones = _mm256_set1_epi16(1);
            _mm256_add_epi32(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones))
        },
        half(q, x): _mm256_madd_epi16(_mm256_maddubs_epi16(q, x), _mm256_set1_epi16(1)),
        fours(start, q, x): {
            let pairs = _mm256_add_epi16(_mm256_maddubs_epi16(q[0], x[0]), _mm256_maddubs_epi16(q[1], x[1]));
            _mm256_add_epi32(start, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
    byte_dots! {
        Vnni, i8::MIN, true, "For processors with AVX-VNNI.",
        dot(q, x): _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), q[0], x[0]), q[1], x[1]),
        signed: _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), q[0], x[0]), q[1], x[1]),
        half(q, x): _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), q, x),
        fours(start, q, x): _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(start, q[0], x[0]), q[1], x[1])
    }

    /// For processors with AVX-512's VNNI.
    pub struct Vnni512;

    impl ByteDots for Vnni512 {
        type Eight = Eight;
        type Bytes = __m512i;
        type Ints = __m512i;
        type Sums = __m512;
        const BIAS: u8 = 128;
        const SIGNED_ROWS: bool = true;
        const MANY_SUMS: bool = true;

        #[inline(always)]
        fn nibbles(nibbles: &[[u32; 4]; 4]) -> Halves<__m512i> {
            unsafe {
                let both = _mm512_loadu_si512(nibbles.as_ptr().cast());
                let mask = _mm512_set1_epi8(15);
                [_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(both), mask)]
            }
        }

        #[inline(always)]
        fn with_fifths([low, high]: Halves<__m512i>, fifths: &[u32; 4]) -> Halves<__m512i> {
            /// a or b and c.
            const WITH: i32 = 0xf8;
            unsafe {
                let each = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
                let words = _mm512_castsi128_si512(_mm_loadu_si128(fifths.as_ptr().cast()));
                let words = _mm512_permutexvar_epi32(each, words);
                let mask = _mm512_set1_epi8(16);
                let up = _mm512_sllv_epi32(words, _mm512_setr_epi32(4, 3, 2, 1, 4, 3, 2, 1, 4, 3, 2, 1, 4, 3, 2, 1));
                let down = _mm512_srlv_epi32(words, _mm512_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3));
                [_mm512_ternarylogic_epi32::<WITH>(low, up, mask), _mm512_ternarylogic_epi32::<WITH>(high, down, mask)]
            }
        }

        #[inline(always)]
        fn with_uppers([low, high]: Halves<__m512i>, uppers: &[[u32; 2]; 4]) -> Halves<__m512i> {
            /// a or b and c.
            const WITH: i32 = 0xf8;
            unsafe {
                let words = _mm512_castsi256_si512(_mm256_loadu_si256(uppers.as_ptr().cast()));
                let words = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), words);
                let mask = _mm512_set1_epi8(48);
                let up = _mm512_sllv_epi32(words, _mm512_setr_epi32(4, 4, 2, 2, 4, 4, 2, 2, 4, 4, 2, 2, 4, 4, 2, 2));
                let down = _mm512_srlv_epi32(words, _mm512_setr_epi32(0, 0, 2, 2, 0, 0, 2, 2, 0, 0, 2, 2, 0, 0, 2, 2));
                [_mm512_ternarylogic_epi32::<WITH>(low, up, mask), _mm512_ternarylogic_epi32::<WITH>(high, down, mask)]
            }
        }

        #[inline(always)]
        fn levels([low, high]: Halves<__m512i>, levels: &[i8; 16]) -> Halves<__m512i> {
            unsafe {
                let levels = _mm512_broadcast_i32x4(_mm_loadu_si128(levels.as_ptr().cast()));
                let levels = _mm512_xor_si512(levels, _mm512_set1_epi8(i8::MIN));
                [_mm512_shuffle_epi8(levels, low), _mm512_shuffle_epi8(levels, high)]
            }
        }

        #[inline(always)]
        fn signed(quants: &[[i8; 32]; 4]) -> Halves<__m512i> {
            unsafe {
                let from: *const i8 = quants.as_ptr().cast();
                let bias = _mm512_set1_epi8(i8::MIN);
                let a = _mm512_xor_si512(_mm512_loadu_si512(from.cast()), bias);
                let b = _mm512_xor_si512(_mm512_loadu_si512(from.add(64).cast()), bias);
                [_mm512_shuffle_i64x2::<0b10_00_10_00>(a, b), _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b)]
            }
        }

        #[inline(always)]
        fn load(bytes: &[u8; 64]) -> __m512i {
            unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
        }

        #[inline(always)]
        fn store(bytes: __m512i, to: &mut [u8; 64]) {
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), bytes) }
        }

        #[inline(always)]
        fn interleaved([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
            unsafe {
                let (low, high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
                let (low2, high2) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
                [
                    _mm512_unpacklo_epi64(low, high),
                    _mm512_unpackhi_epi64(low, high),
                    _mm512_unpacklo_epi64(low2, high2),
                    _mm512_unpackhi_epi64(low2, high2),
                ]
            }
        }

        #[inline(always)]
        fn dot<const SIGNED: bool>([low, high]: Halves<__m512i>, x: &Halves<[i8; 64]>) -> __m512i {
            unsafe {
                let part = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, _mm512_loadu_si512(x[0].as_ptr().cast()));
                _mm512_dpbusd_epi32(part, high, _mm512_loadu_si512(x[1].as_ptr().cast()))
            }
        }

        #[inline(always)]
        fn dot_half(quants: __m512i, x: &[i8; 64]) -> __m512i {
            unsafe { _mm512_dpbusd_epi32(_mm512_setzero_si512(), quants, _mm512_loadu_si512(x.as_ptr().cast())) }
        }

        #[inline(always)]
        fn add_fours<const SIGNED: bool>(sums: __m512i, quants: [__m512i; 2], x: &[i8; 8]) -> __m512i {
            let from: *const i32 = x.as_ptr().cast();
            unsafe {
                let part = _mm512_dpbusd_epi32(sums, quants[0], _mm512_set1_epi32(from.read_unaligned()));
                _mm512_dpbusd_epi32(part, quants[1], _mm512_set1_epi32(from.add(1).read_unaligned()))
            }
        }

        #[inline(always)]
        fn ints(x: i32) -> __m512i {
            unsafe { _mm512_set1_epi32(x) }
        }

        #[inline(always)]
        fn floats(ints: __m512i) -> __m512 {
            unsafe { _mm512_cvtepi32_ps(ints) }
        }

        #[inline(always)]
        fn splat(x: f32) -> __m512 {
            unsafe { _mm512_set1_ps(x) }
        }

        #[inline(always)]
        fn load_sums(x: &[f32; 16]) -> __m512 {
            unsafe { _mm512_loadu_ps(x.as_ptr()) }
        }

        #[inline(always)]
        fn store_sums(sums: __m512, to: &mut [f32]) {
            unsafe { _mm512_storeu_ps(to[..16].as_mut_ptr(), sums) }
        }

        #[inline(always)]
        fn mul(a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }

        #[inline(always)]
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        fn spread(Eight(scales): Eight, others: bool) -> __m512 {
            unsafe {
                let each = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
                let each = _mm512_add_epi32(each, _mm512_set1_epi32(if others { 4 } else { 0 }));
                _mm512_permutexvar_ps(each, _mm512_castps256_ps512(scales))
            }
        }

        #[inline(always)]
        fn folded(sums: __m512) -> Eight {
            Eight(unsafe { _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps::<1>(sums)) })
        }

        #[inline(always)]
        fn prefetch<const AHEAD: usize, T>(now: &[T]) {
            prefetch::<AHEAD, T>(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes without a pattern.
    fn bytes(n: usize, seed: u32) -> Vec<u8> {
        let mut state = seed;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..n).map(|_| byte()).collect()
    }

    /// What blocks of each kind hold, the first halves of four and then the second ones.
    struct Unpack<'a>(&'a [u8; 128]);
    impl ByteWork for Unpack<'_> {
        type Output = Vec<Vec<u8>>;
        fn run_bytes<D: ByteDots>(self) -> Vec<Vec<u8>> {
            let words: [[u32; 4]; 8] = bytemuck::cast(*self.0);
            let nibbles = D::nibbles(&words.as_chunks::<4>().0[0]);
            let levels = bytemuck::cast(words[4]);
            let uppers: [[u32; 2]; 4] = bytemuck::cast([words[6], words[7]]);
            let unbiased = |quants: u8| quants.wrapping_sub(D::BIAS);
            let unpacked = [
                (nibbles, false),
                (D::with_fifths(nibbles, &words[5]), false),
                (D::with_uppers(nibbles, &uppers), false),
                (D::levels(nibbles, &levels), true),
                (D::signed(&bytemuck::cast(words)), true),
            ];
            let stored = unpacked.map(|(halves, has_bias)| {
                let mut stored = [[0; 64]; 2];
                halves.into_iter().zip(&mut stored).for_each(|(half, stored)| D::store(half, stored));
                stored.concat().into_iter().map(|quant| if has_bias { unbiased(quant) } else { quant }).collect()
            });
            stored.to_vec()
        }
    }

    #[test]
    fn byte_blocks_unpack_to_the_defined_quants() {
        for seed in 0..100 {
            let bytes: [u8; 128] = bytes(128, seed).try_into().expect("as many");
            let byte = |word: usize, i: usize| bytes[4 * word + i];
            let want = |quant: &dyn Fn(usize, usize) -> u8| -> Vec<u8> {
                // Block and element.
                (0..128).map(|i| quant(i % 64 / 16, i / 64 * 16 + i % 16)).collect()
            };
            let nibble = |b: usize, i: usize| byte(4 * b + i / 4 % 4, i % 4) >> (i / 16 * 4) & 15;
            let wants = [
                want(&nibble),
                want(&|b, i| nibble(b, i) | (byte(20 + b, i % 4) >> (i / 4) & 1) << 4),
                want(&|b, i| nibble(b, i) | (byte(24 + 2 * b + i / 4 % 2, i % 4) >> (i / 8 * 2) & 3) << 4),
                want(&|b, i| bytes[64 + usize::from(nibble(b, i))]),
                want(&|b, i| bytes[32 * b + i]),
            ];
            for found in run_bytes_by_all(|| Unpack(&bytes)) {
                assert_eq!(found, wants);
            }
        }
    }

    /// Products of unsigned and of signed quants.
    struct Products<'a>(&'a Halves<[u8; 64]>, &'a Halves<[i8; 64]>, bool);
    impl ByteWork for Products<'_> {
        type Output = [[f32; 16]; 3];
        fn run_bytes<D: ByteDots>(self) -> [[f32; 16]; 3] {
            let Products(quants, x, is_signed) = self;
            let biased = |half: [u8; 64]| half.map(|quant| quant.wrapping_add(if is_signed { D::BIAS } else { 0 }));
            let halves = quants.map(|half| D::load(&biased(half)));
            let dot = if is_signed { D::dot::<true>(halves, x) } else { D::dot::<false>(halves, x) };
            let fours = D::add_fours::<false>(D::ints(-77), halves, &std::array::from_fn(|i| x[0][i]));
            let mut found = [[0.0; 16]; 3];
            for (ints, found) in [dot, D::dot_half(halves[1], &x[1]), fours].into_iter().zip(&mut found) {
                D::store_sums(D::floats(ints), found);
            }
            if is_signed {
                // The bias of all products. Only the first ones are of quants so large.
                for (sum, x) in found[0].iter_mut().zip(0..) {
                    let of_lane = self.1.iter().flat_map(|x_half| &x_half[4 * x..4 * x + 4]);
                    *sum -= f32::from(D::BIAS) * of_lane.map(|&x| f32::from(x)).sum::<f32>();
                }
                (found[1], found[2]) = ([0.0; 16], [0.0; 16]);
            }
            found
        }
    }

    /// By the definition, in whole numbers.
    #[test]
    fn integer_products_are_exact() {
        let x_of = |seed: u32| -> Halves<[i8; 64]> {
            let all: Vec<i8> = bytes(128, seed).into_iter().map(|byte| byte.cast_signed().max(-127)).collect();
            std::array::from_fn(|h| std::array::from_fn(|i| all[64 * h + i]))
        };
        let mut cases = Vec::new();
        for [quant, x] in [[63, 127], [63, -127], [0, 127], [i8::MIN, 127], [i8::MIN, -127], [127, -127]] {
            cases.push(([[quant.cast_unsigned(); 64]; 2], [[x; 64]; 2], !(0..=63).contains(&quant)));
        }
        for seed in 0..200 {
            let quants: [u8; 128] = bytes(128, 1000 + seed).try_into().expect("as many");
            let quants: Halves<[u8; 64]> = bytemuck::cast(quants);
            cases.push((quants, x_of(seed), true));
            cases.push((quants.map(|half| half.map(|quant| quant & 63)), x_of(seed), false));
        }
        for (quants, x, is_signed) in &cases {
            let value = |h: usize, i: usize| match is_signed {
                true => i32::from(quants[h][i].cast_signed()),
                false => i32::from(quants[h][i]),
            };
            let half = |h: usize, lane: usize| -> i32 {
                (4 * lane..4 * lane + 4).map(|i| value(h, i) * i32::from(x[h][i])).sum()
            };
            let four = |h: usize, lane: usize| -> i32 {
                (0..4).map(|i| value(h, 4 * lane + i) * i32::from(x[0][4 * h + i])).sum()
            };
            let mut want: [[f32; 16]; 3] = [
                std::array::from_fn(|lane| (half(0, lane) + half(1, lane)) as f32),
                std::array::from_fn(|lane| half(1, lane) as f32),
                std::array::from_fn(|lane| (four(0, lane) + four(1, lane) - 77) as f32),
            ];
            if *is_signed {
                (want[1], want[2]) = ([0.0; 16], [0.0; 16]);
            }
            for found in run_bytes_by_all(|| Products(quants, x, *is_signed)) {
                assert_eq!(found, want, "{quants:?} {x:?}");
            }
        }
    }

    struct OfFloats<'a>(&'a [f32; 16], &'a [f32; 8]);
    impl ByteWork for OfFloats<'_> {
        type Output = Vec<f32>;
        fn run_bytes<D: ByteDots>(self) -> Vec<f32> {
            let (x, scales) = (D::load_sums(self.0), || D::Eight::load(self.1));
            let mut found = vec![0.0; 80];
            for (sums, to) in [
                D::mul(x, D::splat(3.0)),
                D::fma(x, D::splat(-2.0), D::splat(1.0)),
                D::spread(scales(), false),
                D::spread(scales(), true),
            ]
            .into_iter()
            .zip(found.chunks_mut(16))
            {
                D::store_sums(sums, to);
            }
            found[64..72].copy_from_slice(&D::folded(x).lanes());
            found
        }
    }

    #[test]
    fn float_vector_operations_match_their_definition() {
        let x: [f32; 16] = std::array::from_fn(|i| (i * i) as f32);
        let scales: [f32; 8] = std::array::from_fn(|i| 100.0 - i as f32);
        let mut want: Vec<f32> = x.iter().map(|x| 3.0 * x).collect();
        want.extend(x.map(|x| 1.0 - 2.0 * x));
        want.extend((0..32).map(|i| scales[i / 4]));
        want.extend((0..8).map(|i| x[i] + x[i + 8]));
        want.extend([0.0; 8]);
        for found in run_bytes_by_all(|| OfFloats(&x, &scales)) {
            assert_eq!(found, want);
        }
    }
}
