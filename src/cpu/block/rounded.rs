//! Products with activations that are rounded to bytes, 32 of them with one scale, as llama.cpp rounds them.
//!
//! With vectors, unpacking a weight for one multiplication takes longer than fetching it. So quants are multiplied as
//! the bytes that they are, by `maddubs`, VNNI or SIMD128. Sums within a block are exact, scales are applied in f32, and
//! offsets and mins are taken off by the sum of a block's activations. For fewer than twelve tokens rows are read as
//! they lie; for more, 32 rows at a time are repacked (`panel.rs`). With `maddubs`, products of many tokens with
//! signed quants stay exact, since bytes are no faster there; so do types without such products, products that must
//! have the same bits for every number of rows, and processors without such vectors. Processors with tiles multiply many
//! tokens by these (`tiled.rs`).

mod panel;

pub(in super::super) use self::panel::{PANEL_ROWS, Panel};
use super::super::simd::bytes::{ByteDots, ByteWork, Halves, run_bytes};
use super::super::simd::{self, Vector};
use super::{
    BLOCK, Block, FP4_LEVELS, Format, IQ4_LEVELS, Iq4, Iq4Xs, Mx, Packed, Q4, Q4K, Q4With1, Q5, Q5K, Q5With1, Q6K, Q8,
    Units, WeightType, half_scale, iq4_scale, word,
};
use crate::cpu::threads;

/// Blocks that are multiplied together: a super-block, or as many others.
const EIGHT: usize = 8;

/// Rows of activations, rounded.
pub(in super::super) struct Rounded {
    /// Those of each row in whole eights, with zeros at its end.
    eights: Vec<RoundedEight>,
    row_len: usize,
}

/// Eight rounded blocks.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct RoundedEight {
    /// The halves of four blocks each.
    quants: [Halves<[i8; 64]>; 2],
    scales: [f32; EIGHT],
    /// The sum of each block, or of each half of one with [`Offsets::by_halves`]; without mins, times the offset of
    /// the weights' quants.
    sums: [[f32; EIGHT]; 2],
    /// Start of each block's or half's integer dot product: minus the offset times the sum of its bytes.
    starts: [[i32; EIGHT]; 2],
}

impl RoundedEight {
    const ZEROS: RoundedEight = RoundedEight {
        quants: [[[0; 64]; 2]; 2],
        scales: [0.0; EIGHT],
        sums: [[0.0; EIGHT]; 2],
        starts: [[0; EIGHT]; 2],
    };
}

/// What weights of a format are less than their quants say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Offsets {
    /// Taken off each quant.
    of_quants: u8,
    /// Whether each block has a min.
    has_mins: bool,
    /// Whether each half of a block has a scale of its own.
    by_halves: bool,
}

impl Rounded {
    /// Rounds each element to the nearest of 255 steps as far apart as the block's largest magnitude asks for; rows are of
    /// `n_blocks`. For products with these weights.
    ///
    /// # Panics
    /// If there are no such products.
    pub fn of(x: &[Block], n_blocks: usize, w: &Packed<'_>) -> Rounded {
        let offsets = with_quantised!(w.weight, offsets(), {
            unreachable!("{} has no products with rounded activations", w.weight)
        });
        Rounded::with(x, n_blocks, offsets)
    }

    fn with(x: &[Block], n_blocks: usize, offsets: Offsets) -> Rounded {
        let row_len = n_blocks.div_ceil(EIGHT);
        let mut eights = vec![RoundedEight::ZEROS; x.len() / n_blocks * row_len];
        threads::for_each_chunk(&mut eights, row_len, x.len() * BLOCK, |t, eights| {
            simd::run(Round { x: &x[t * n_blocks..][..n_blocks], eights, offsets });
        });
        Rounded { eights, row_len }
    }

    /// Rows `first` and those behind it, `n` of them.
    fn rows(&self, first: usize, n: usize) -> &[RoundedEight] {
        &self.eights[first * self.row_len..][..n * self.row_len]
    }
}

/// A row of activations that is rounded.
struct Round<'a> {
    x: &'a [Block],
    eights: &'a mut [RoundedEight],
    offsets: Offsets,
}

impl simd::Work for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self) {
        let Round { x, eights, offsets: Offsets { of_quants, has_mins, by_halves } } = self;
        let offset = i32::from(of_quants);
        for (i, x) in x.iter().enumerate() {
            let (eight, at) = (&mut eights[i / EIGHT], i % EIGHT);
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
            let scale = largest / 127.0;
            // A scale so small that its inverse overflows stands for zeros.
            let inverse = if scale > 1e-37 { 1.0 / scale } else { 0.0 };
            // Adding it rounds to a whole number, ties to even, which then stands in the lowest bits.
            const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
            let mut wholes = [0i32; 32];
            for (whole, x) in wholes.iter_mut().zip(x) {
                *whole = (x * inverse + ROUND).to_bits() as i32 - ROUND.to_bits() as i32;
            }
            let mut totals = [0i32; 2];
            for (h, total) in totals.iter_mut().enumerate() {
                let quants = &mut eight.quants[at / 4][h].as_chunks_mut::<16>().0[at % 4];
                for (quant, whole) in quants.iter_mut().zip(&wholes.as_chunks::<16>().0[h]) {
                    // Of the bytes: what is not finite leaves any whole number, and many of them would overflow.
                    *quant = *whole as i8;
                    *total += i32::from(*quant);
                }
            }
            let totals = if by_halves { totals } else { [totals[0] + totals[1], 0] };
            eight.scales[at] = scale;
            for (h, total) in totals.into_iter().enumerate() {
                eight.starts[h][at] = -offset * total;
                eight.sums[h][at] = scale * (if has_mins { total } else { offset * total }) as f32;
            }
        }
    }
}

/// Formats whose quants are bytes with a scale for each block or for each half of it.
trait Quantised: Format {
    /// Whether quants may be negative; those of such formats have a bias.
    const SIGNED: bool = false;
    /// What is taken off each quant.
    const OFFSET: u8 = 0;
    /// Whether a block's weights are lessened by a min.
    const MINS: bool = false;
    /// Whether each half of a block has a scale of its own.
    const BY_HALVES: bool = false;
    /// 16-bit words of a unit's tail.
    const TAIL: usize;

    /// The quants of the first or the second four of eight blocks.
    fn quants<D: ByteDots>(units: &[Self::Unit], tails: &[u16], four: usize) -> Halves<D::Bytes>;
    /// The scales of eight blocks, and their mins; or the scales of their first halves, and those of their second ones.
    fn block_scales<V: Vector>(units: &[Self::Unit], tails: &[u16]) -> [V; 2];
}

fn offsets<F: Quantised>() -> Offsets {
    struct Find<F>(std::marker::PhantomData<F>);
    impl<F: Quantised> ByteWork for Find<F> {
        type Output = Offsets;

        fn run_bytes<D: ByteDots>(self) -> Offsets {
            offsets_with::<F, D>()
        }
    }
    run_bytes(Find::<F>(std::marker::PhantomData))
}

fn offsets_with<F: Quantised, D: ByteDots>() -> Offsets {
    let of_quants = if F::SIGNED { D::BIAS } else { F::OFFSET };
    Offsets { of_quants, has_mins: F::MINS, by_halves: F::BY_HALVES }
}

/// The first or the second four of eight.
#[inline(always)]
fn four_of<T>(eight: &[T], four: usize) -> &[T; 4] {
    &eight[..EIGHT].as_chunks().0[four]
}

/// Number `at` of each unit's tail.
#[inline(always)]
fn of_tails<F: Quantised>(tails: &[u16], at: usize) -> [u16; EIGHT] {
    let tails = &tails[..EIGHT * F::TAIL];
    let mut found = [0; EIGHT];
    if F::TAIL == 1 {
        // One load, where eight ones would be stored before a vector of them is loaded.
        found.copy_from_slice(tails);
        return found;
    }
    for (found, tail) in found.iter_mut().zip(tails.chunks_exact(F::TAIL)) {
        *found = tail[at];
    }
    found
}

#[inline(always)]
fn f16_scales<F: Quantised, V: Vector>(tails: &[u16], at: usize) -> V {
    V::from_f16(&of_tails::<F>(tails, at))
}

/// Mins that are added.
#[inline(always)]
fn f16_mins<F: Quantised, V: Vector>(tails: &[u16], at: usize) -> V {
    f16_scales::<F, V>(tails, at).fma(V::splat(-1.0), V::splat(0.0))
}

impl Quantised for Q8 {
    const TAIL: usize = 1;
    const SIGNED: bool = true;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[[i8; 32]], _: &[u16], four: usize) -> Halves<D::Bytes> {
        D::signed(four_of(units, four))
    }

    #[inline(always)]
    fn block_scales<V: Vector>(_: &[[i8; 32]], tails: &[u16]) -> [V; 2] {
        [f16_scales::<Q8, V>(tails, 0), V::splat(0.0)]
    }
}

impl Quantised for Q4 {
    const TAIL: usize = 1;
    const OFFSET: u8 = 8;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[[u32; 4]], _: &[u16], four: usize) -> Halves<D::Bytes> {
        D::nibbles(four_of(units, four))
    }

    #[inline(always)]
    fn block_scales<V: Vector>(_: &[[u32; 4]], tails: &[u16]) -> [V; 2] {
        [f16_scales::<Q4, V>(tails, 0), V::splat(0.0)]
    }
}

/// The words of fifth bits that four of eight tails of `len` hold from `at` on.
#[inline(always)]
fn fifths_of(tails: &[u16], len: usize, at: usize, four: usize) -> [u32; 4] {
    let mut fifths = [0; 4];
    for (fifths, tail) in fifths.iter_mut().zip(tails[4 * four * len..][..4 * len].chunks_exact(len)) {
        *fifths = word(&tail[at..]);
    }
    fifths
}

impl Quantised for Q5 {
    const TAIL: usize = 3;
    const OFFSET: u8 = 16;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[[u32; 4]], tails: &[u16], four: usize) -> Halves<D::Bytes> {
        D::with_fifths(D::nibbles(four_of(units, four)), &fifths_of(tails, 3, 1, four))
    }

    #[inline(always)]
    fn block_scales<V: Vector>(_: &[[u32; 4]], tails: &[u16]) -> [V; 2] {
        [f16_scales::<Q5, V>(tails, 0), V::splat(0.0)]
    }
}

impl Quantised for Iq4 {
    const TAIL: usize = 1;
    const SIGNED: bool = true;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[[u32; 4]], _: &[u16], four: usize) -> Halves<D::Bytes> {
        D::levels(D::nibbles(four_of(units, four)), &IQ4_LEVELS)
    }

    #[inline(always)]
    fn block_scales<V: Vector>(_: &[[u32; 4]], tails: &[u16]) -> [V; 2] {
        [f16_scales::<Iq4, V>(tails, 0), V::splat(0.0)]
    }
}

impl Quantised for Mx {
    const TAIL: usize = 1;
    const SIGNED: bool = true;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[[[u32; 4]; 2]], _: &[u16], four: usize) -> Halves<D::Bytes> {
        D::levels(D::nibbles(four_of(units.as_flattened(), four)), &FP4_LEVELS)
    }

    #[inline(always)]
    fn block_scales<V: Vector>(_: &[[[u32; 4]; 2]], tails: &[u16]) -> [V; 2] {
        let mut scales = [0.0; EIGHT];
        for (b, scale) in scales.iter_mut().enumerate() {
            *scale = half_scale((tails[b / 2] >> (8 * (b % 2))) as u8);
        }
        [V::load(&scales), V::splat(0.0)]
    }
}

impl Quantised for Q4With1 {
    const TAIL: usize = 2;
    const MINS: bool = true;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[[u32; 4]], _: &[u16], four: usize) -> Halves<D::Bytes> {
        D::nibbles(four_of(units, four))
    }

    #[inline(always)]
    fn block_scales<V: Vector>(_: &[[u32; 4]], tails: &[u16]) -> [V; 2] {
        [f16_scales::<Q4With1, V>(tails, 0), f16_mins::<Q4With1, V>(tails, 1)]
    }
}

impl Quantised for Q5With1 {
    const TAIL: usize = 4;
    const MINS: bool = true;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[[u32; 4]], tails: &[u16], four: usize) -> Halves<D::Bytes> {
        D::with_fifths(D::nibbles(four_of(units, four)), &fifths_of(tails, 4, 0, four))
    }

    #[inline(always)]
    fn block_scales<V: Vector>(_: &[[u32; 4]], tails: &[u16]) -> [V; 2] {
        [f16_scales::<Q5With1, V>(tails, 2), f16_mins::<Q5With1, V>(tails, 3)]
    }
}

impl Quantised for Q4K {
    const TAIL: usize = 0;
    const MINS: bool = true;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[Q4K], _: &[u16], four: usize) -> Halves<D::Bytes> {
        D::nibbles(four_of(&units[0].nibbles, four))
    }

    #[inline(always)]
    fn block_scales<V: Vector>(units: &[Q4K], _: &[u16]) -> [V; 2] {
        units[0].head.vectors()
    }
}

impl Quantised for Q5K {
    const TAIL: usize = 0;
    const MINS: bool = true;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[Q5K], _: &[u16], four: usize) -> Halves<D::Bytes> {
        let fifths = four_of(units[0].fifths.as_flattened(), four);
        D::with_fifths(D::nibbles(four_of(&units[0].nibbles, four)), fifths)
    }

    #[inline(always)]
    fn block_scales<V: Vector>(units: &[Q5K], _: &[u16]) -> [V; 2] {
        units[0].head.vectors()
    }
}

impl Quantised for Q6K {
    const TAIL: usize = 1;
    const OFFSET: u8 = 32;
    const BY_HALVES: bool = true;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[Q6K], _: &[u16], four: usize) -> Halves<D::Bytes> {
        D::with_uppers(D::nibbles(four_of(&units[0].nibbles, four)), four_of(&units[0].uppers, four))
    }

    #[inline(always)]
    fn block_scales<V: Vector>(units: &[Q6K], tails: &[u16]) -> [V; 2] {
        let (zero, of_all) = (V::splat(0.0), V::splat_f16(tails[0]));
        let [low, high] = V::even_and_odd(&units[0].scales);
        [low.fma(of_all, zero), high.fma(of_all, zero)]
    }
}

impl Quantised for Iq4Xs {
    const TAIL: usize = 4;
    const SIGNED: bool = true;

    #[inline(always)]
    fn quants<D: ByteDots>(units: &[[[u32; 4]; 8]], _: &[u16], four: usize) -> Halves<D::Bytes> {
        D::levels(D::nibbles(four_of(&units[0], four)), &IQ4_LEVELS)
    }

    #[inline(always)]
    fn block_scales<V: Vector>(_: &[[[u32; 4]; 8]], tails: &[u16]) -> [V; 2] {
        let mut scales = [0.0; EIGHT];
        for (b, scale) in scales.iter_mut().enumerate() {
            *scale = iq4_scale(tails, b);
        }
        [V::load(&scales), V::splat(0.0)]
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
use with_quantised;

impl Packed<'_> {
    /// Whether there are products of these weights with rounded activations, and they are faster here than exact ones.
    pub fn rounds(&self) -> bool {
        fn yes<F: Quantised>() -> bool {
            true
        }
        simd::bytes::has_byte_dots() && with_quantised!(self.weight, yes(), false)
    }

    /// As [`Packed::dots`], with activations that are rounded for these weights.
    pub fn rounded_dots(&self, x: &Rounded, n_blocks: usize, sums: &mut [f32]) {
        with_quantised!(self.weight, rounded_dots(self, x, n_blocks, sums), {
            unreachable!("{} has no products with rounded activations", self.weight)
        });
    }
}

fn rounded_dots<F: Quantised>(packed: &Packed<'_>, x: &Rounded, n_blocks: usize, sums: &mut [f32]) {
    run_bytes(RowDots { rows: Rows::<F>::new(packed, n_blocks), x, sums });
}

/// Rows of weights.
#[derive(Clone, Copy)]
struct Rows<'a, F: Format> {
    /// At least those of the rows.
    units: &'a [F::Unit],
    tails: &'a [u16],
    /// Units of a row.
    row_len: usize,
    /// Ones for each block of a row behind its whole eights.
    of_rest: [u32; EIGHT],
}

impl<'a, F: Quantised> Rows<'a, F> {
    /// Units of eight blocks.
    const UNITS: usize = EIGHT / F::BLOCKS;

    fn new(packed: &Packed<'a>, n_blocks: usize) -> Self {
        let Units { units, tails, .. } = Units::<F>::of(packed);
        let mut of_rest = [0; EIGHT];
        of_rest[..n_blocks % EIGHT].fill(u32::MAX);
        Rows { units, tails, row_len: n_blocks / F::BLOCKS, of_rest }
    }

    /// Whole eights of a row.
    #[inline(always)]
    fn n_whole(&self) -> usize {
        self.row_len / Self::UNITS
    }

    /// Units and tails of the whole eights of row `n`.
    #[inline(always)]
    fn eights(&self, n: usize) -> (&'a [F::Unit], &'a [u16]) {
        let (first, len) = (n * self.row_len, self.n_whole() * Self::UNITS);
        (&self.units[first..][..len], &self.tails[first * F::TAIL..][..len * F::TAIL])
    }

    /// Units of a row behind those.
    #[inline(always)]
    fn rest_len(&self) -> usize {
        self.row_len % Self::UNITS
    }

    /// Units and tails of eight blocks from the rest of row `n` on. Behind it they are those of the next row; at the end of all
    /// rows there are none, and it is copied.
    #[inline(always)]
    fn rest<'b>(&self, n: usize, copied: &'b mut Option<Rest<F>>) -> (&'b [F::Unit], &'b [u16])
    where
        'a: 'b,
    {
        let first = (n + 1) * self.row_len - self.rest_len();
        let (units, tails) = (&self.units[first..], &self.tails[first * F::TAIL..]);
        match (units.get(..Self::UNITS), tails.get(..Self::UNITS * F::TAIL)) {
            (Some(units), Some(tails)) => (units, tails),
            _ => copied.insert(Rest::new(&units[..self.rest_len()], &tails[..self.rest_len() * F::TAIL])).eight(),
        }
    }

    /// Dot products of row `n` with `T` tokens, in parts. Not of several rows: fetching ahead, processors follow one of them
    /// better than two.
    #[inline(always)]
    fn dots<D: ByteDots, const T: usize>(&self, n: usize, x: [&[RoundedEight]; T]) -> [D::Eight; T] {
        /// Bytes from what is multiplied to what is fetched: about what memory sends while it fetches.
        const AHEAD: usize = 3072;
        let (units, tails) = self.eights(n);
        let mut row = Sums::<D, T> { totals: [[D::splat(0.0); 2]; T], less: [Vector::splat(0.0); T] };
        for (i, units) in units.chunks_exact(Self::UNITS).enumerate() {
            D::prefetch::<AHEAD, _>(units);
            let tails = &tails[i * Self::UNITS * F::TAIL..][..Self::UNITS * F::TAIL];
            row.add::<F, 2>(units, tails, F::block_scales(units, tails), x, i);
        }
        if self.rest_len() > 0 {
            let mut copied = None;
            let (units, tails) = self.rest(n, &mut copied);
            // What is behind the rest counts for nothing, whatever its scales are.
            let [scales, second] = F::block_scales::<D::Eight>(units, tails);
            let scales = [scales.masked(&self.of_rest), second.masked(&self.of_rest)];
            if self.rest_len() * F::BLOCKS <= 4 {
                row.add::<F, 1>(units, tails, scales, x, self.n_whole());
            } else {
                row.add::<F, 2>(units, tails, scales, x, self.n_whole());
            }
        }
        let mut found = [Vector::splat(0.0); T];
        for ((found, [a, b]), less) in found.iter_mut().zip(row.totals).zip(row.less) {
            let both = D::folded(D::fma(a, D::splat(1.0), b));
            *found = less.fma(Vector::splat(-1.0), both);
        }
        found
    }
}

/// Fewer units than eight blocks have, with zeros behind them.
struct Rest<F: Format> {
    units: [F::Unit; EIGHT],
    /// No format of fewer blocks than a super-block has longer tails.
    tails: [u16; 4 * EIGHT],
}

impl<F: Quantised> Rest<F> {
    #[cold]
    #[inline(never)]
    fn new(units: &[F::Unit], tails: &[u16]) -> Self {
        let mut rest = Rest { units: [bytemuck::Zeroable::zeroed(); EIGHT], tails: [0; 4 * EIGHT] };
        rest.units[..units.len()].copy_from_slice(units);
        rest.tails[..tails.len()].copy_from_slice(tails);
        rest
    }

    #[inline(always)]
    fn eight(&self) -> (&[F::Unit], &[u16]) {
        (&self.units[..Rows::<F>::UNITS], &self.tails[..Rows::<F>::UNITS * F::TAIL])
    }
}

struct RowDots<'a, F: Format> {
    rows: Rows<'a, F>,
    x: &'a Rounded,
    sums: &'a mut [f32],
}

impl<F: Quantised> RowDots<'_, F> {
    /// Dot products with `T` tokens from `t` on.
    #[inline(always)]
    fn tokens<D: ByteDots, const T: usize>(&mut self, t: usize, n_rows: usize) {
        /// Rows whose lanes are added up together.
        const ROWS: usize = 4;
        let RowDots { rows, x: all_x, sums } = self;
        let rows = *rows;
        let mut x = [&all_x.eights[..0]; T];
        for (i, x) in x.iter_mut().enumerate() {
            *x = all_x.rows(t + i, 1);
        }
        for first in (0..n_rows).step_by(ROWS) {
            let mut parts = [[D::Eight::splat(0.0); ROWS]; T];
            for n in first..(first + ROWS).min(n_rows) {
                for (parts, of_row) in parts.iter_mut().zip(rows.dots::<D, T>(n, x)) {
                    parts[n - first] = of_row;
                }
            }
            for (i, parts) in parts.into_iter().enumerate() {
                let sums = &mut sums[(t + i) * n_rows + first..(t + i + 1) * n_rows];
                for (to, sum) in sums.iter_mut().zip(D::Eight::sum_each(parts)) {
                    *to = sum;
                }
            }
        }
    }
}

/// Sums of a row's products with `T` tokens.
struct Sums<D: ByteDots, const T: usize> {
    /// Of the first and the second four of each eight, or of first and second halves.
    totals: [[D::Sums; 2]; T],
    /// What offsets and mins take off.
    less: [D::Eight; T],
}

impl<D: ByteDots, const T: usize> Sums<D, T> {
    /// Adds the products of four times `FOURS` blocks with what [`Quantised::block_scales`] says of them.
    #[inline(always)]
    fn add<F: Quantised, const FOURS: usize>(
        &mut self,
        units: &[F::Unit],
        tails: &[u16],
        [scales, second]: [D::Eight; 2],
        x: [&[RoundedEight]; T],
        i: usize,
    ) {
        let zero = Vector::splat(0.0);
        for four in 0..FOURS {
            let quants = F::quants::<D>(units, tails, four);
            for t in 0..T {
                let (totals, x) = (&mut self.totals[t], &x[t][i]);
                let of_x = Vector::load(&x.scales);
                let scales = D::spread(scales.fma(of_x, zero), four == 1);
                if F::BY_HALVES {
                    let second = D::spread(second.fma(of_x, zero), four == 1);
                    let [low, high] = &x.quants[four];
                    totals[0] = D::fma(D::floats(D::dot_half(quants[0], low)), scales, totals[0]);
                    totals[1] = D::fma(D::floats(D::dot_half(quants[1], high)), second, totals[1]);
                } else {
                    let products = if F::SIGNED {
                        D::dot::<true>(quants, &x.quants[four])
                    } else {
                        D::dot::<false>(quants, &x.quants[four])
                    };
                    totals[four] = D::fma(D::floats(products), scales, totals[four]);
                }
            }
        }
        for (less, x) in self.less.iter_mut().zip(x) {
            let sums = &x[i].sums;
            if F::BY_HALVES {
                *less = scales.fma(Vector::load(&sums[0]), second.fma(Vector::load(&sums[1]), *less));
            } else if F::MINS {
                *less = second.fma(Vector::load(&sums[0]), *less);
            } else if offsets_with::<F, D>().of_quants > 0 {
                *less = scales.fma(Vector::load(&sums[0]), *less);
            }
        }
    }
}

impl<F: Quantised> ByteWork for RowDots<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run_bytes<D: ByteDots>(mut self) {
        /// Tokens that meet a block while it is in registers.
        const T: usize = 4;
        let n_tokens = self.x.eights.len() / self.x.row_len;
        let n_rows = self.sums.len() / n_tokens;
        let mut t = 0;
        while D::MANY_TOKENS && t + T <= n_tokens {
            self.tokens::<D, T>(t, n_rows);
            t += T;
        }
        for t in t..n_tokens {
            self.tokens::<D, 1>(t, n_rows);
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

    /// The exact value of a block's activations, and what their products are lessened by for each unit of offset.
    fn block(x: &Rounded, n_blocks: usize, b: usize) -> ([i8; BLOCK], f32) {
        let (row, at) = (b / n_blocks, b % n_blocks);
        let eight = &x.rows(row, 1)[at / EIGHT];
        let at = at % EIGHT;
        let quants = |i: usize| eight.quants[at / 4][i / 16][16 * (at % 4) + i % 16];
        (std::array::from_fn(quants), eight.scales[at])
    }

    const NO_OFFSETS: Offsets = Offsets { of_quants: 0, has_mins: true, by_halves: false };

    /// Runs loops of panels with one set of instructions.
    struct With<D>(std::marker::PhantomData<D>);
    impl<D: ByteDots> panel::Runner for With<D> {
        fn run(work: impl ByteWork<Output = ()>) {
            work.run_bytes::<D>();
        }
    }

    /// All products of `n_tokens`, with each set of instructions: a few tokens at a time, and by panels.
    fn by_all<F: Quantised>(packed: &Packed<'_>, x: &[Block], n_blocks: usize) -> Vec<Vec<f32>> {
        struct Products<'a, F>(&'a Packed<'a>, &'a [Block], usize, std::marker::PhantomData<F>);
        impl<F: Quantised> ByteWork for Products<'_, F> {
            type Output = Vec<Vec<f32>>;

            fn run_bytes<D: ByteDots>(self) -> Vec<Vec<f32>> {
                let Products(packed, x, n_blocks, _) = self;
                let x = Rounded::with(x, n_blocks, offsets_with::<F, D>());
                let n_rows = packed.units.len() / packed.sizes(n_blocks)[0];
                let empty = vec![f32::NAN; x.eights.len() / x.row_len * n_rows];
                let mut found = vec![empty.clone()];
                RowDots { rows: Rows::<F>::new(packed, n_blocks), x: &x, sums: &mut found[0] }.run_bytes::<D>();
                if D::SIGNED_ROWS || !F::SIGNED {
                    let mut sums = empty;
                    panel::dots_by::<F, With<D>>((packed, n_blocks), &x.eights, &mut Panel::default(), &mut sums);
                    found.push(sums);
                }
                found
            }
        }
        let products = || Products::<F>(packed, x, n_blocks, std::marker::PhantomData);
        simd::bytes::run_bytes_by_all(products).concat()
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
    fn non_finite_activations_stay_non_finite_when_rounded() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = activations(3);
            x[1][4..23].fill(odd);
            let rounded = Rounded::with(&x, 3, NO_OFFSETS);
            let is_finite =
                |b: usize| rounded.eights[0].scales[b].is_finite() && rounded.eights[0].sums[0][b].is_finite();
            assert_eq!([is_finite(0), is_finite(1), is_finite(2)], [true, false, true], "{odd}");
        }
    }

    #[test]
    fn activations_are_rounded_to_the_nearest_step() {
        let (n_blocks, n_rows) = (11, 6);
        let x = activations(n_rows * n_blocks);
        for by_halves in [false, true] {
            let offsets = Offsets { of_quants: 9, has_mins: false, by_halves };
            let rounded = Rounded::with(&x, n_blocks, offsets);
            for (b, x) in x.iter().enumerate() {
                let (quants, scale) = block(&rounded, n_blocks, b);
                let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                assert_eq!(scale, largest / 127.0);
                for (&quant, &x) in quants.iter().zip(x) {
                    let error = (f64::from(quant) * f64::from(scale) - f64::from(x)).abs();
                    assert!(quant > i8::MIN && error <= 0.5001 * f64::from(scale) + 1e-36, "{x}: {quant}");
                }
                let total = |quants: &[i8]| 9 * quants.iter().map(|&quant| i32::from(quant)).sum::<i32>();
                let totals = match by_halves {
                    true => [total(&quants[..16]), total(&quants[16..])],
                    false => [total(&quants), 0],
                };
                let eight = &rounded.rows(b / n_blocks, 1)[b % n_blocks / EIGHT];
                for (h, total) in totals.into_iter().enumerate() {
                    let at = b % n_blocks % EIGHT;
                    assert_eq!((eight.starts[h][at], eight.sums[h][at]), (-total, scale * total as f32));
                }
            }
            // What is behind a row's end counts for nothing.
            for row in 0..n_rows {
                let last = rounded.rows(row, 1)[n_blocks / EIGHT];
                assert!(last.scales[n_blocks % EIGHT..].iter().all(|&scale| scale == 0.0));
            }
        }
    }

    /// Values by ggml times what the activations are rounded to, in f64: for one token and for several, with each set of
    /// instructions that this processor has and without any, also where a row is no whole number of super-blocks.
    #[test]
    fn products_of_rounded_activations_match_f64() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/quant-vectors/more.safetensors");
        let bytes = std::fs::read(path).expect("it is in the repository");
        let vectors = Safetensors::parse(&bytes, bytes.len() as u64).expect("it is valid");
        let tensor =
            |name: String| vectors.tensor(&name).expect("it has all types").bytes(&bytes).expect("it is whole");
        let device = Device::cpu();
        let mut n_checked = 0;
        for weight in WeightType::ALL.into_iter().filter(|&weight| quantised(weight)) {
            let values: Vec<f32> = bytemuck::pod_collect_to_vec(tensor(format!("{weight}.values")));
            let of_file = weight.block_type();
            let shapes: &[(usize, usize)] = match weight.unit_len() {
                256 => &[(2, 16), (4, 8)],
                _ => &[(2, 8), (2, 6), (1, 14)],
            };
            for &(n_rows, n_blocks) in shapes {
                let n_file_blocks = n_rows * n_blocks * BLOCK / of_file.block_len() as usize;
                let of_rows = &tensor(format!("{weight}.blocks"))[..n_file_blocks * of_file.block_bytes() as usize];
                let matrix = Matrix::declare(&device.target(), "w", weight, n_rows as u32, (n_blocks * BLOCK) as u32)
                    .expect("the shape is valid");
                matrix.upload(&device, &[of_rows]).expect("whole rows");
                let slab = &matrix.slabs()[0];
                let words: Vec<u32> = pollster::block_on(device.read(&slab.words)).expect("the tensor is there");
                let packed = Packed::new(Some(weight), &words, matrix.quants_words(slab)).run(0, n_rows * n_blocks);
                for n_tokens in [1, 4, 7, 13] {
                    let x = activations(n_tokens * n_blocks);
                    let rounded = Rounded::with(&x, n_blocks, NO_OFFSETS);
                    let all_found = with_quantised!(weight, by_all(&packed, &x, n_blocks), Vec::new());
                    for (i, n) in (0..n_tokens).flat_map(|i| (0..n_rows).map(move |n| (i, n))) {
                        let values = &values[n * n_blocks * BLOCK..][..n_blocks * BLOCK];
                        let x = (0..n_blocks).flat_map(|b| {
                            let (quants, scale) = block(&rounded, n_blocks, i * n_blocks + b);
                            quants.map(|quant| f64::from(quant) * f64::from(scale))
                        });
                        // A weight may be the small difference of two large numbers, and a sum is of both.
                        let largest = values.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                        let terms =
                            values.iter().zip(x).map(|(&w, x)| (f64::from(w) * x, f64::from(largest) * x.abs()));
                        let (want, size) =
                            terms.fold((0.0, 0.0), |(sum, size), (term, most)| (sum + term, size + most));
                        for (way, found) in all_found.iter().enumerate() {
                            let found = found[i * n_rows + n];
                            let error = (f64::from(found) - want).abs();
                            assert!(
                                error <= 2e-6 * size,
                                "{weight}, {n_tokens} tokens, way {way}: {found}, expected {want} of {size}"
                            );
                            n_checked += 1;
                        }
                    }
                }
            }
        }
        assert!(n_checked >= 11 * 2 * 2 * 2 * (1 + 4 + 7 + 13));
    }

    /// Rows of fewer than eight blocks are read together with what lies behind them: of each type whose rows may be so short,
    /// every other row is made of ones, with which scales of 16 bits are NaN.
    #[test]
    fn products_do_not_depend_on_the_following_rows() {
        let n_rows = 9;
        let device = Device::cpu();
        let mut n_types = 0;
        for weight in WeightType::ALL.into_iter().filter(|&weight| quantised(weight) && weight.unit_len() < 256) {
            let of_file = weight.block_type();
            for n_blocks in (1..12).filter(|n_blocks| (n_blocks * BLOCK).is_multiple_of(weight.unit_len())) {
                let row_len = n_blocks * BLOCK;
                let row_bytes = row_len / of_file.block_len() as usize * of_file.block_bytes() as usize;
                let mut bytes = vec![0; n_rows * row_bytes];
                let floats: Vec<f32> =
                    activations(n_rows * n_blocks).concat().iter().map(|x| x.clamp(-9.0, 9.0)).collect();
                quantize_row(of_file, &floats, None, &mut bytes).expect("the rows are whole blocks");
                let products = |bytes: &[u8]| {
                    let matrix = Matrix::declare(&device.target(), "w", weight, n_rows as u32, row_len as u32)
                        .expect("the shape is valid");
                    matrix.upload(&device, &[bytes]).expect("all rows");
                    let slab = &matrix.slabs()[0];
                    let words: Vec<u32> = pollster::block_on(device.read(&slab.words)).expect("the tensor is there");
                    let packed = Packed::new(Some(weight), &words, matrix.quants_words(slab)).run(0, n_rows * n_blocks);
                    let x = activations(13 * n_blocks);
                    with_quantised!(weight, by_all(&packed, &x, n_blocks), Vec::new())
                };
                let clean = products(&bytes);
                bytes.chunks_exact_mut(row_bytes).skip(1).step_by(2).for_each(|row| row.fill(0xff));
                for (clean, found) in clean.iter().zip(products(&bytes)) {
                    let is_odd = |i: usize| i % n_rows % 2 == 1;
                    let changed: Vec<usize> = (0..found.len()).filter(|&i| found[i] != clean[i]).collect();
                    assert!(changed.iter().all(|&i| is_odd(i)), "{weight}, {n_blocks} blocks: {changed:?}");
                    // Of tokens that are zero, products with finite numbers are.
                    assert!(2 * changed.len() > (0..found.len()).filter(|&i| is_odd(i)).count(), "{weight}");
                }
            }
            n_types += 1;
        }
        assert!(n_types >= 7, "{n_types}");
    }

    /// Of random weights with activations as they come out of a norm: many of moderate size. Rounding alone makes the
    /// difference.
    #[test]
    fn rounding_costs_little() {
        /// Normalised mean squared error. The largest of 32 is about 2.1 standard deviations, so that a step is 2.1 / 127 of
        /// one, and the mean square of what rounding to steps leaves is a twelfth of their square: 2.3e-5.
        const MOST: f64 = 3e-5;
        // Rows of more than one panel, the last one of which is not whole.
        let (n_rows, n_blocks) = (40, 32);
        // Of 64 bits: those of 32 repeat themselves from row to row.
        let mut state = 3u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        // Nearly a normal distribution.
        let mut normal = || (0..12).map(|_| next()).sum::<f32>() - 6.0;
        let device = Device::cpu();
        let x: Vec<Block> = (0..n_blocks).map(|_| std::array::from_fn(|_| normal())).collect();
        let floats: Vec<f32> = (0..n_rows * n_blocks * BLOCK).map(|_| 0.02 * normal()).collect();
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
            let mut exact = vec![0.0; n_rows];
            packed.dots(&x, n_blocks, &mut exact);
            let square = |x: f32| f64::from(x) * f64::from(x);
            for found in with_quantised!(weight, by_all(&packed, &x, n_blocks), Vec::new()) {
                let error: f64 = exact.iter().zip(&found).map(|(a, b)| square(a - b)).sum();
                let nmse = error / exact.iter().copied().map(square).sum::<f64>();
                println!("{weight:<8} {nmse:.1e}");
                assert!(nmse <= MOST, "{weight}: {nmse:.1e}");
            }
        }
    }
}
