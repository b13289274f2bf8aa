//! Packed weights, block by block; `matrix.rs` describes the layout.

use bytemuck::{Pod, Zeroable};

mod rounded;
mod tiled;

pub(super) use self::rounded::{PANEL_ROWS, Panel, Rounded};
use self::tiled::unpack_tiles;
pub(super) use self::tiled::{TiledPanel, TiledRows};
use super::simd::tiles::{Pair, Tiles};
use super::simd::{self, BlockWork, Sums, Vector, Wide, widen_f16};
use crate::dtype::{BLOCK, WeightType};
use crate::formats::block::{FP4_DOUBLED, IQ4_LEVELS as IQ4_FLOATS, half_scale};
use crate::platform::IS_BROWSER;

/// Activations that meet one block of weights.
pub(super) type Block = [f32; BLOCK];

/// How weights are stored.
trait Format: Copy + Sync {
    /// A block, a few or a super-block, without its tail.
    type Unit: Pod + Sync;
    /// Blocks in a unit.
    const BLOCKS: usize;

    /// What all weights of a unit are multiplied by, as its tail says.
    #[inline(always)]
    fn scale<S: Sums>(_tail: &[u16]) -> S {
        S::splat(1.0)
    }

    /// What a unit says of its blocks' scales.
    #[inline(always)]
    fn scales<V: Vector>(_unit: &Self::Unit, _tail: &[u16]) -> Scales {
        Scales::default()
    }

    /// Weights of block `at` of a unit, before [`Format::scale`]. `scales` are the unit's own.
    fn block<W: Wide>(unit: &Self::Unit, tail: &[u16], scales: &Scales, at: usize) -> W;
}

/// Of a super-block's blocks: eight scales and eight mins, or two scales for each.
type Scales = [[f32; 8]; 2];

/// `scale * quant - min`, exact but for the rounding of the difference.
#[inline(always)]
fn affine<W: Wide>(quants: W, scale: f32, min: f32) -> W {
    quants.fma(W::splat(scale), W::splat(-min))
}

#[derive(Clone, Copy)]
struct F32;

impl Format for F32 {
    type Unit = Block;
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn block<W: Wide>(unit: &Block, _: &[u16], _: &Scales, _: usize) -> W {
        W::load(unit)
    }
}

#[derive(Clone, Copy)]
struct F16;

impl Format for F16 {
    type Unit = [u16; BLOCK];
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn block<W: Wide>(unit: &[u16; BLOCK], _: &[u16], _: &Scales, _: usize) -> W {
        W::from_f16(unit)
    }
}

#[derive(Clone, Copy)]
struct Bf16;

impl Format for Bf16 {
    type Unit = [u16; BLOCK];
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn block<W: Wide>(unit: &[u16; BLOCK], _: &[u16], _: &Scales, _: usize) -> W {
        W::from_bf16(unit)
    }
}

#[derive(Clone, Copy)]
struct Q8;

impl Format for Q8 {
    type Unit = [i8; BLOCK];
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn scale<S: Sums>(tail: &[u16]) -> S {
        S::splat_f16(tail[0])
    }

    #[inline(always)]
    fn block<W: Wide>(unit: &[i8; BLOCK], _: &[u16], _: &Scales, _: usize) -> W {
        W::from_i8(unit)
    }
}

#[derive(Clone, Copy)]
struct Q4;

impl Format for Q4 {
    type Unit = [u32; 4];
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn scale<S: Sums>(tail: &[u16]) -> S {
        S::splat_f16(tail[0])
    }

    #[inline(always)]
    fn block<W: Wide>(unit: &[u32; 4], _: &[u16], _: &Scales, _: usize) -> W {
        W::from_quads(unit, &[], 8)
    }
}

/// Scales and mins at the head of a Q4_K or Q5_K super-block.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Head {
    /// f16, of all scales and of all mins.
    of_all: [u16; 2],
    /// Low nibbles of eight scales, and of eight mins.
    low: [u32; 2],
    /// Upper two bits of eight scales, then of eight mins.
    high: [u16; 2],
}

impl Head {
    /// The scales, and the mins.
    #[inline(always)]
    fn vectors<V: Vector>(&self) -> [V; 2] {
        let (zero, [of_scales, of_mins]) = (Vector::splat(0.0), self.of_all);
        let scales = V::six_bits(self.low[0], self.high[0]).fma(Vector::splat_f16(of_scales), zero);
        let mins = V::six_bits(self.low[1], self.high[1]).fma(Vector::splat_f16(of_mins), zero);
        [scales, mins]
    }

    #[inline(always)]
    fn scales<V: Vector>(&self) -> Scales {
        self.vectors::<V>().map(V::lanes)
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Q4K {
    head: Head,
    nibbles: [[u32; 4]; 8],
}

impl Format for Q4K {
    type Unit = Q4K;
    const BLOCKS: usize = 8;

    #[inline(always)]
    fn scales<V: Vector>(unit: &Q4K, _: &[u16]) -> Scales {
        unit.head.scales::<V>()
    }

    #[inline(always)]
    fn block<W: Wide>(unit: &Q4K, _: &[u16], [scales, mins]: &Scales, at: usize) -> W {
        affine(W::from_quads(&unit.nibbles[at], &[], 0), scales[at], mins[at])
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Q5K {
    head: Head,
    fifths: [[u32; 1]; 8],
    nibbles: [[u32; 4]; 8],
}

impl Format for Q5K {
    type Unit = Q5K;
    const BLOCKS: usize = 8;

    #[inline(always)]
    fn scales<V: Vector>(unit: &Q5K, _: &[u16]) -> Scales {
        unit.head.scales::<V>()
    }

    #[inline(always)]
    fn block<W: Wide>(unit: &Q5K, _: &[u16], [scales, mins]: &Scales, at: usize) -> W {
        affine(W::from_quads(&unit.nibbles[at], &unit.fifths[at], 0), scales[at], mins[at])
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Q6K {
    scales: [i8; 16],
    uppers: [[u32; 2]; 8],
    nibbles: [[u32; 4]; 8],
}

impl Format for Q6K {
    type Unit = Q6K;
    const BLOCKS: usize = 8;

    #[inline(always)]
    fn scale<S: Sums>(tail: &[u16]) -> S {
        S::splat_f16(tail[0])
    }

    #[inline(always)]
    fn scales<V: Vector>(unit: &Q6K, _: &[u16]) -> Scales {
        let (scales, _) = unit.scales.as_chunks::<8>();
        [V::from_i8(&scales[0]).lanes(), V::from_i8(&scales[1]).lanes()]
    }

    #[inline(always)]
    fn block<W: Wide>(unit: &Q6K, _: &[u16], scales: &Scales, at: usize) -> W {
        let (scales, first) = (&scales[at / 4], at % 4 * 2);
        by_halves(W::from_quads(&unit.nibbles[at], &unit.uppers[at], 32), scales[first], scales[first + 1])
    }
}

/// `scale * weight` with a scale for each half of a block.
#[inline(always)]
fn by_halves<W: Wide>(weights: W, low: f32, high: f32) -> W {
    weights.fma(W::halves(low, high), W::splat(0.0))
}

#[derive(Clone, Copy)]
struct Q4With1;

impl Format for Q4With1 {
    type Unit = [u32; 4];
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn block<W: Wide>(unit: &[u32; 4], tail: &[u16], _: &Scales, _: usize) -> W {
        with_min(W::from_quads(unit, &[], 0), &tail[..2])
    }
}

/// `scale * quant + min`, both f16.
#[inline(always)]
fn with_min<W: Wide>(quants: W, tail: &[u16]) -> W {
    quants.fma(W::splat_f16(tail[0]), W::splat_f16(tail[1]))
}

#[derive(Clone, Copy)]
struct Q5;

impl Format for Q5 {
    type Unit = [u32; 4];
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn scale<S: Sums>(tail: &[u16]) -> S {
        S::splat_f16(tail[0])
    }

    #[inline(always)]
    fn block<W: Wide>(unit: &[u32; 4], tail: &[u16], _: &Scales, _: usize) -> W {
        W::from_quads(unit, &[word(&tail[1..])], 16)
    }
}

#[derive(Clone, Copy)]
struct Q5With1;

impl Format for Q5With1 {
    type Unit = [u32; 4];
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn block<W: Wide>(unit: &[u32; 4], tail: &[u16], _: &Scales, _: usize) -> W {
        with_min(W::from_quads(unit, &[word(tail)], 0), &tail[2..])
    }
}

/// A word of two halves.
#[inline(always)]
fn word(tail: &[u16]) -> u32 {
    u32::from(tail[0]) | u32::from(tail[1]) << 16
}

/// No nibbles under the upper bits of [`Vector::from_quads`], which are sixteen times the quant then.
const NONE: [u32; 4] = [0; 4];

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Q2K {
    /// Nibbles of scale and min.
    groups: [u8; 16],
    quants: [[u32; 2]; 8],
}

impl Format for Q2K {
    type Unit = Q2K;
    const BLOCKS: usize = 8;

    #[inline(always)]
    fn block<W: Wide>(unit: &Q2K, tail: &[u16], _: &Scales, at: usize) -> W {
        let quants = W::from_quads(&NONE, &unit.quants[at], 0);
        let (scale, min) = (widen_f16(tail[0]) / 16.0, -widen_f16(tail[1]));
        let of = |group: u8| [scale * i32::from(group & 15) as f32, min * i32::from(group >> 4) as f32];
        let ([s, m], [t, n]) = (of(unit.groups[2 * at]), of(unit.groups[2 * at + 1]));
        quants.fma(W::halves(s, t), W::halves(m, n))
    }
}

/// Super-blocks of 3-bit quants, Q3_K's and IQ2's.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ThreeBits {
    /// An f16.
    scale: u32,
    /// Low nibbles of sixteen scales.
    low: [u32; 2],
    /// Upper two bits of them.
    high: u32,
    lower: [[u32; 2]; 8],
    thirds: [u32; 8],
}

impl ThreeBits {
    /// The scales of both halves of a block, as numbers of six bits.
    #[inline(always)]
    fn scales(&self, at: usize) -> [f32; 2] {
        [0, 1].map(|half| {
            let low = self.low[at / 4] >> (8 * (at % 4) + 4 * half) & 15;
            (low | (self.high >> (4 * at + 2 * half) & 3) << 4) as i32 as f32
        })
    }
}

#[derive(Clone, Copy)]
struct Q3K;

impl Format for Q3K {
    type Unit = ThreeBits;
    const BLOCKS: usize = 8;

    #[inline(always)]
    fn block<W: Wide>(unit: &ThreeBits, _: &[u16], _: &Scales, at: usize) -> W {
        let scale = widen_f16(unit.scale as u16) / 16.0;
        let [low, high] = unit.scales(at).map(|group| scale * (group - 32.0));
        let lower = W::from_quads(&NONE, &unit.lower[at], 0);
        // A third bit that is not set takes four away.
        let thirds = W::from_quads(&NONE, &[unit.thirds[at]], 16);
        by_halves(thirds.fma(W::splat(4.0), lower), low, high)
    }
}

/// The levels 8, 25 and 43 of 0, 16 and 32, and 62 of 48, which no codebook has.
#[inline(always)]
fn level<W: Wide>(counts: W) -> W {
    counts.fma(W::splat(0.5 / 256.0), W::splat(16.5 / 16.0)).fma(counts, W::splat(8.0))
}

#[derive(Clone, Copy)]
struct Iq2;

impl Format for Iq2 {
    type Unit = ThreeBits;
    const BLOCKS: usize = 8;

    #[inline(always)]
    fn block<W: Wide>(unit: &ThreeBits, _: &[u16], _: &Scales, at: usize) -> W {
        // Signs are -8 and 8, the wrong way round.
        let scale = widen_f16(unit.scale as u16) / -32.0;
        let [low, high] = unit.scales(at).map(|group| scale * (group + 0.5));
        let counts = W::from_quads(&NONE, &unit.lower[at], 0);
        let signs = W::from_quads(&NONE, &[unit.thirds[at]], 8);
        by_halves(signs.fma(level(counts), W::splat(0.0)), low, high)
    }
}

/// Of IQ4_NL and IQ4_XS, as `formats` has them.
const IQ4_LEVELS: [i8; 16] = levels(IQ4_FLOATS);
/// Twice the 4-bit floats.
const FP4_LEVELS: [i8; 16] = levels(FP4_DOUBLED);

/// Whole numbers as bytes.
const fn levels(floats: [f32; 16]) -> [i8; 16] {
    let (mut levels, mut i) = ([0; 16], 0);
    while i < 16 {
        levels[i] = floats[i] as i8;
        i += 1;
    }
    levels
}

#[derive(Clone, Copy)]
struct Iq4;

impl Format for Iq4 {
    type Unit = [u32; 4];
    const BLOCKS: usize = 1;

    #[inline(always)]
    fn scale<S: Sums>(tail: &[u16]) -> S {
        S::splat_f16(tail[0])
    }

    #[inline(always)]
    fn block<W: Wide>(unit: &[u32; 4], _: &[u16], _: &Scales, _: usize) -> W {
        W::from_levels(unit, &IQ4_LEVELS)
    }
}

/// The scale of a block of IQ4_XS.
#[inline(always)]
fn iq4_scale(tail: &[u16], at: usize) -> f32 {
    let group = word(&tail[2..]) >> (4 * at) & 15 | (u32::from(tail[1]) >> (2 * at) & 3) << 4;
    widen_f16(tail[0]) * (group as i32 as f32 - 32.0)
}

#[derive(Clone, Copy)]
struct Iq4Xs;

impl Format for Iq4Xs {
    type Unit = [[u32; 4]; 8];
    const BLOCKS: usize = 8;

    #[inline(always)]
    fn block<W: Wide>(unit: &[[u32; 4]; 8], tail: &[u16], _: &Scales, at: usize) -> W {
        let scale = iq4_scale(tail, at);
        by_halves(W::from_levels(&unit[at], &IQ4_LEVELS), scale, scale)
    }
}

#[derive(Clone, Copy)]
struct Iq3;

impl Format for Iq3 {
    type Unit = [[u32; 4]; 8];
    const BLOCKS: usize = 8;

    #[inline(always)]
    fn block<W: Wide>(unit: &[[u32; 4]; 8], tail: &[u16], _: &Scales, at: usize) -> W {
        // Twice the levels, as the outermost one may be 15.5.
        let mut levels: [i8; 16] = std::array::from_fn(|i| 4 * i as i8 - 30);
        let outermost = (2.0 * widen_f16(tail[1])) as i8;
        (levels[0], levels[15]) = (-outermost, outermost);
        let scale = 0.5 * widen_f16(tail[0]) * (2 * (word(&tail[2..]) >> (4 * at) & 15) + 1) as i32 as f32;
        by_halves(W::from_levels(&unit[at], &levels), scale, scale)
    }
}

#[derive(Clone, Copy)]
struct Mx;

impl Format for Mx {
    type Unit = [[u32; 4]; 2];
    const BLOCKS: usize = 2;

    #[inline(always)]
    fn block<W: Wide>(unit: &[[u32; 4]; 2], tail: &[u16], _: &Scales, at: usize) -> W {
        let scale = half_scale((tail[0] >> (8 * at)) as u8);
        by_halves(W::from_levels(&unit[at], &FP4_LEVELS), scale, scale)
    }
}

#[derive(Clone, Copy)]
struct Nv;

impl Format for Nv {
    type Unit = [[u32; 4]; 2];
    const BLOCKS: usize = 2;

    #[inline(always)]
    fn block<W: Wide>(unit: &[[u32; 4]; 2], tail: &[u16], _: &Scales, at: usize) -> W {
        // As f16 these 8-bit floats are too small by 2^8, of which one is for the doubled levels.
        let [low, high] = [tail[at], tail[at] >> 8].map(|bits| 128.0 * widen_f16((bits & 127) << 7));
        by_halves(W::from_levels(&unit[at], &FP4_LEVELS), low, high)
    }
}

#[derive(Clone, Copy)]
struct Q2;

impl Format for Q2 {
    type Unit = [[u32; 2]; 2];
    const BLOCKS: usize = 2;

    #[inline(always)]
    fn scale<S: Sums>(tail: &[u16]) -> S {
        S::splat(widen_f16(tail[0]) / 16.0)
    }

    #[inline(always)]
    fn block<W: Wide>(unit: &[[u32; 2]; 2], _: &[u16], _: &Scales, at: usize) -> W {
        W::from_quads(&NONE, &unit[at], 16)
    }
}

#[derive(Clone, Copy)]
struct Q1;

impl Format for Q1 {
    type Unit = [u32; 4];
    const BLOCKS: usize = 4;

    #[inline(always)]
    fn scale<S: Sums>(tail: &[u16]) -> S {
        S::splat(widen_f16(tail[0]) / 8.0)
    }

    #[inline(always)]
    fn block<W: Wide>(unit: &[u32; 4], _: &[u16], _: &Scales, at: usize) -> W {
        W::from_quads(&NONE, &[unit[at]], 8)
    }
}

/// Calls a function that is generic over [`Format`] with the format of a weight type.
macro_rules! with_format {
    ($weight:expr, $function:ident($($argument:expr),*)) => {
        match $weight.layout() {
            WeightType::F32 => $function::<F32>($($argument),*),
            WeightType::F16 => $function::<F16>($($argument),*),
            WeightType::BF16 => $function::<Bf16>($($argument),*),
            WeightType::Q8_0 => $function::<Q8>($($argument),*),
            WeightType::Q4_0 => $function::<Q4>($($argument),*),
            WeightType::Q4_1 => $function::<Q4With1>($($argument),*),
            WeightType::Q5_0 => $function::<Q5>($($argument),*),
            WeightType::Q5_1 => $function::<Q5With1>($($argument),*),
            WeightType::Q2_K => $function::<Q2K>($($argument),*),
            WeightType::Q3_K => $function::<Q3K>($($argument),*),
            WeightType::Q4_K => $function::<Q4K>($($argument),*),
            WeightType::Q5_K => $function::<Q5K>($($argument),*),
            WeightType::Q6_K => $function::<Q6K>($($argument),*),
            WeightType::IQ4_NL => $function::<Iq4>($($argument),*),
            WeightType::IQ4_XS => $function::<Iq4Xs>($($argument),*),
            WeightType::IQ3_S | WeightType::IQ3_XXS => $function::<Iq3>($($argument),*),
            WeightType::IQ2_S | WeightType::IQ2_XS | WeightType::IQ2_XXS => $function::<Iq2>($($argument),*),
            WeightType::MXFP4 => $function::<Mx>($($argument),*),
            WeightType::NVFP4 => $function::<Nv>($($argument),*),
            WeightType::Q2_0 => $function::<Q2>($($argument),*),
            WeightType::Q1_0 => $function::<Q1>($($argument),*),
        }
    };
}

/// Blocks of a packed matrix in whole units, one after the other. Only what depends on the format is compiled for each of
/// them.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a> {
    weight: WeightType,
    units: &'a [u32],
    /// At least those of the units.
    tails: &'a [u16],
}

impl<'a> Packed<'a> {
    /// The units of a slab whose tails begin at word `w_tails`.
    ///
    /// # Panics
    /// Without a weight type: the recorder gives kernels of packed weights one.
    pub fn new(weight: Option<WeightType>, words: &'a [u32], w_tails: u32) -> Self {
        let Some(weight) = weight else { unreachable!("the recorder gives this kernel a weight type") };
        let (units, tails) = words.split_at(w_tails as usize);
        Packed { weight, units, tails: bytemuck::cast_slice(tails) }
    }

    /// Units with their tails.
    pub fn of(self, units: &'a [u32], tails: &'a [u16]) -> Self {
        Packed { units, tails, ..self }
    }

    /// Words and halves of `n` blocks.
    fn sizes(&self, n: usize) -> [usize; 2] {
        let n_units = n / (self.weight.unit_len() / BLOCK);
        [n_units * self.weight.unit_bytes() / 4, n_units * self.weight.tail_len()]
    }

    /// `n` blocks from the one at `first` on, in whole units.
    pub fn run(&self, first: usize, n: usize) -> Self {
        let ([word, half], [n_words, n_halves]) = (self.sizes(first), self.sizes(n));
        Packed { units: &self.units[word..][..n_words], tails: &self.tails[half..][..n_halves], ..*self }
    }

    /// All blocks from the one at `first` on, which begins a unit.
    pub fn from(&self, first: usize) -> Self {
        let [word, half] = self.sizes(first);
        Packed { units: &self.units[word..], tails: &self.tails[half..], ..*self }
    }

    /// Copies of `n` blocks from each of those on, in whole units, and of their tails.
    pub fn gather(&self, first: &[usize], n: usize) -> (Vec<u32>, Vec<u16>) {
        let [n_words, n_halves] = self.sizes(n);
        let (mut units, mut tails) =
            (Vec::with_capacity(first.len() * n_words), Vec::with_capacity(first.len() * n_halves));
        for &first in first {
            units.extend_from_slice(&self.units[self.sizes(first)[0]..][..n_words]);
        }
        for &first in first {
            tails.extend_from_slice(&self.tails[self.sizes(first)[1]..][..n_halves]);
        }
        (units, tails)
    }

    /// The weights, where they lie as floats already.
    pub fn floats(&self) -> Option<&'a [f32]> {
        (self.weight == WeightType::F32).then(|| bytemuck::cast_slice(self.units))
    }

    /// Unpacks all blocks.
    pub fn unpack(&self, weights: &mut [Block]) {
        with_format!(self.weight, unpack(self, weights))
    }

    /// Rounds whole rows, no more than a panel has; others of it stay what they are.
    fn unpack_tiles(&self, tiles: Tiles, panel: &mut [Pair]) {
        with_format!(self.weight, unpack_tiles(self, tiles, panel))
    }

    /// Dot products of rows of `n_blocks` with the activations of a few tokens: `sums` is `[T, rows]`.
    pub fn dots(&self, x: &[Block], n_blocks: usize, sums: &mut [f32]) {
        with_format!(self.weight, dots(self, x, n_blocks, sums))
    }
}

fn unpack<F: Format>(packed: &Packed<'_>, weights: &mut [Block]) {
    simd::run_blocks(Unpack::<F> { units: Units::of(packed), weights });
}

fn dots<F: Format>(packed: &Packed<'_>, x: &[Block], n_blocks: usize, sums: &mut [f32]) {
    simd::run_blocks(RowDots::<F> { rows: Units::of(packed), x, n_blocks, sums });
}

/// Units of one format.
#[derive(Clone, Copy)]
struct Units<'a, F: Format> {
    units: &'a [F::Unit],
    tails: &'a [u16],
    tail_len: usize,
}

impl<'a, F: Format> Units<'a, F> {
    fn of(packed: &Packed<'a>) -> Self {
        let tail_len = packed.weight.tail_len();
        Units { units: bytemuck::cast_slice(packed.units), tails: packed.tails, tail_len }
    }

    #[inline(always)]
    fn tail(&self, unit: usize) -> &'a [u16] {
        &self.tails[unit * self.tail_len..][..self.tail_len]
    }

    /// Sums over all blocks of units from `first` on of weight times each `x`.
    #[inline(always)]
    fn dots<W: Wide, const T: usize>(&self, first: usize, x: [&[Block]; T]) -> [f32; T] {
        let n_units = x[0].len() / F::BLOCKS;
        let x = x.map(|x| &x[..n_units * F::BLOCKS]);
        let mut sums = [W::Sum::splat(0.0); T];
        for (i, unit) in self.units[first..][..n_units].iter().enumerate() {
            let tail = self.tail(first + i);
            let (scale, scales) = (F::scale::<W::Sum>(tail), F::scales::<W::Eight>(unit, tail));
            for at in 0..F::BLOCKS {
                let weights = F::block::<W>(unit, tail, &scales, at);
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = weights.add_dot(&x[i * F::BLOCKS + at], scale, *sum);
                }
            }
        }
        let mut found = [0.0; T];
        for (found, sum) in found.iter_mut().zip(sums) {
            *found = sum.total();
        }
        found
    }
}

struct RowDots<'a, F: Format> {
    rows: Units<'a, F>,
    x: &'a [Block],
    n_blocks: usize,
    sums: &'a mut [f32],
}

impl<F: Format> BlockWork for RowDots<'_, F> {
    #[inline(always)]
    fn run_blocks<W: Wide>(self) {
        /// Tokens that meet a block while it is in registers. One on the web, where the code's size counts.
        const T: usize = if IS_BROWSER { 1 } else { 4 };
        let (n_tokens, n_units) = (self.x.len() / self.n_blocks, self.n_blocks / F::BLOCKS);
        let n_rows = self.sums.len() / n_tokens;
        let x = |t: usize| &self.x[t * self.n_blocks..][..self.n_blocks];
        for n in 0..n_rows {
            let mut t = 0;
            while t + T <= n_tokens {
                let found = self.rows.dots::<W, T>(n * n_units, std::array::from_fn(|i| x(t + i)));
                for (i, found) in found.into_iter().enumerate() {
                    self.sums[(t + i) * n_rows + n] = found;
                }
                t += T;
            }
            if T > 1 {
                for t in t..n_tokens {
                    [self.sums[t * n_rows + n]] = self.rows.dots::<W, 1>(n * n_units, [x(t)]);
                }
            }
        }
    }
}

struct Unpack<'a, F: Format> {
    units: Units<'a, F>,
    weights: &'a mut [Block],
}

impl<F: Format> BlockWork for Unpack<'_, F> {
    #[inline(always)]
    fn run_blocks<W: Wide>(self) {
        for (i, (unit, weights)) in self.units.units.iter().zip(self.weights.chunks_exact_mut(F::BLOCKS)).enumerate() {
            let tail = self.units.tail(i);
            let (scale, scales) = (F::scale::<W::Sum>(tail), F::scales::<W::Eight>(unit, tail));
            for (at, weights) in weights.iter_mut().enumerate() {
                F::block::<W>(unit, tail, &scales, at).scaled(scale).store(weights);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::formats::Safetensors;
    use crate::matrix::Matrix;

    /// The sum without special instructions.
    fn plain_dot<F: Format>(packed: &Packed<'_>, x: &[Block]) -> f32 {
        let [sum] = Units::<F>::of(packed).dots::<[[f32; 8]; 4], 1>(0, [x]);
        sum
    }

    /// Blocks and values by ggml: values are equal, and dot products agree, with and without special instructions.
    #[test]
    fn quantised_values_and_dot_products_match_ggml() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/quant-vectors/more.safetensors");
        let bytes = std::fs::read(path).expect("it is in the repository");
        let vectors = Safetensors::parse(&bytes, bytes.len() as u64).expect("it is valid");
        let tensor =
            |name: String| vectors.tensor(&name).expect("it has all types").bytes(&bytes).expect("it is whole");
        let device = Device::cpu();
        let quantised = WeightType::ALL.into_iter().filter(|weight| weight.block_type().block_len() > 1);
        for weight in quantised {
            let want: Vec<f32> = bytemuck::pod_collect_to_vec(tensor(format!("{weight}.values")));
            let matrix =
                Matrix::declare(&device.target(), "w", weight, 1, want.len() as u32).expect("the shape is valid");
            matrix.upload(&device, &[tensor(format!("{weight}.blocks"))]).expect("one row");
            let slab = &matrix.slabs()[0];
            let words: Vec<u32> = pollster::block_on(device.read(&slab.words)).expect("the tensor is there");
            let packed = Packed::new(Some(weight), &words, matrix.quants_words(slab));
            let mut weights = vec![[0.0; BLOCK]; matrix.blocks() as usize];
            packed.unpack(&mut weights);
            for (i, (found, want)) in weights.as_flattened().iter().zip(&want).enumerate() {
                assert_eq!(found, want, "{weight}, weight {i}");
            }
            let x = |b: usize| std::array::from_fn(|i| ((b * 37 + i * 11) % 64) as f32);
            let x: Vec<Block> = (0..weights.len()).map(x).collect();
            let terms = want.iter().zip(x.as_flattened()).map(|(&w, &x)| f64::from(w) * f64::from(x));
            let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            let mut sums = [0.0];
            packed.dots(&x, x.len(), &mut sums);
            for dot in [sums[0], with_format!(weight, plain_dot(&packed, &x))] {
                assert!((f64::from(dot) - exact).abs() < 1e-6 * size, "{weight}: {dot}, expected {exact}");
            }
        }
    }
}
