//! Rows of cached keys and values as `shaders/shared/row_f32.wgsl` and its like lay them out.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use super::simd::{Lanes, widen_f16};
use crate::dtype::BLOCK;
use crate::kernels::{KvType, StepState};

/// In which slot the row of a position is.
#[derive(Clone, Copy)]
pub(super) enum Pages<'a> {
    /// One after the other, and again from the first one on.
    Ring(usize),
    /// In the pages of a sequence that shares the slots: every so many entries.
    Table(&'a [u32], usize),
}

impl<'a> Pages<'a> {
    /// Of the sequence that the row of the step state from word `first` on tells of. `page_table`: the override of that name.
    pub fn of_row(state: &'a [u32], page_table: u32, first: usize, slots: usize) -> Pages<'a> {
        let entries = |skipped, every| Pages::Table(&state[first + StepState::ROW_HEAD as usize + skipped..], every);
        match page_table {
            0 => Pages::Ring(slots),
            1 => entries(0, 1),
            2 => entries(0, 2),
            _ => entries(1, 2),
        }
    }

    #[inline(always)]
    pub fn slot(self, position: usize) -> usize {
        self.run(position).0
    }

    /// The slot of a position, and of how many positions from it on the slots come one after the other.
    #[inline(always)]
    pub fn run(self, position: usize) -> (usize, usize) {
        const PAGE: usize = crate::kernels::PAGE as usize;
        match self {
            Pages::Ring(slots) => (position % slots, slots - position % slots),
            Pages::Table(pages, every) => {
                let within = position % PAGE;
                (pages[position / PAGE * every] as usize * PAGE + within, PAGE - within)
            }
        }
    }
}

/// Rounds a head to a row.
pub(crate) fn write_row(kind: KvType, head: &[f32], row: &mut [u32]) {
    match kind {
        KvType::F32 => row.copy_from_slice(bytemuck::cast_slice(head)),
        KvType::F16 => {
            let halves: &mut [u16] = bytemuck::cast_slice_mut(row);
            let (halves, rest) = halves.split_at_mut(head.len());
            let (lowest, highest) = (f16::MIN.to_f32(), f16::MAX.to_f32());
            for (halves, head) in halves.chunks_mut(BLOCK).zip(head.chunks(BLOCK)) {
                let mut within = [0.0; BLOCK];
                within.iter_mut().zip(head).for_each(|(to, x)| *to = x.clamp(lowest, highest));
                halves.reinterpret_cast_mut::<f16>().convert_from_f32_slice(&within[..head.len()]);
            }
            rest.fill(0);
        }
        KvType::Q8_0 => {
            let (quants, scales) = row.split_at_mut(head.len().div_ceil(BLOCK) * BLOCK / 4);
            scales.fill(0);
            for ((block, quants), scale_bits) in head.chunks(BLOCK).zip(quants.chunks_mut(BLOCK / 4)).zip(scales) {
                let scale = block.iter().fold(0.0f32, |highest, x| highest.max(x.abs())) / 127.0;
                // A scale so small that its inverse overflows stands for zeros.
                let inverse = if scale > 1e-37 { 1.0 / scale } else { 0.0 };
                *scale_bits = scale.to_bits();
                let quants: &mut [i8] = bytemuck::cast_slice_mut(quants);
                quants.fill(0);
                for (quant, x) in quants.iter_mut().zip(block) {
                    *quant = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
                }
            }
        }
    }
}

/// How elements of rows are stored, for loops that read them as vectors.
pub(super) trait Stored {
    /// Whole runs of a row's elements.
    type Runs<'a, const LEN: usize>: Copy;

    /// `n` runs of a row from the one at `first` on.
    fn runs<const LEN: usize>(row: &[u32], dim: usize, first: usize, n: usize) -> Self::Runs<'_, LEN>;
    /// The elements of one of the runs.
    fn load<const LEN: usize, L: Lanes<LEN>>(runs: Self::Runs<'_, LEN>, at: usize) -> L;
    /// The elements of a row from `first` on, fewer than a run.
    fn rest<const LEN: usize>(row: &[u32], dim: usize, first: usize) -> [f32; LEN];
}

/// [`KvType::F32`].
pub(super) struct Floats;

impl Stored for Floats {
    type Runs<'a, const LEN: usize> = &'a [[f32; LEN]];

    #[inline(always)]
    fn runs<const LEN: usize>(row: &[u32], _: usize, first: usize, n: usize) -> &[[f32; LEN]] {
        &bytemuck::cast_slice(row).as_chunks().0[first..][..n]
    }

    #[inline(always)]
    fn load<const LEN: usize, L: Lanes<LEN>>(runs: &[[f32; LEN]], at: usize) -> L {
        L::load(&runs[at])
    }

    #[inline(always)]
    fn rest<const LEN: usize>(row: &[u32], dim: usize, first: usize) -> [f32; LEN] {
        padded(&bytemuck::cast_slice(row)[first..dim], |&x| x)
    }
}

/// [`KvType::F16`].
pub(super) struct Halves;

impl Stored for Halves {
    type Runs<'a, const LEN: usize> = &'a [[u16; LEN]];

    #[inline(always)]
    fn runs<const LEN: usize>(row: &[u32], _: usize, first: usize, n: usize) -> &[[u16; LEN]] {
        &bytemuck::cast_slice(row).as_chunks().0[first..][..n]
    }

    #[inline(always)]
    fn load<const LEN: usize, L: Lanes<LEN>>(runs: &[[u16; LEN]], at: usize) -> L {
        L::from_f16(&runs[at])
    }

    #[inline(always)]
    fn rest<const LEN: usize>(row: &[u32], dim: usize, first: usize) -> [f32; LEN] {
        padded(&bytemuck::cast_slice(row)[first..dim], |&bits| widen_f16(bits))
    }
}

/// [`KvType::Q8_0`].
pub(super) struct Quants;

/// Runs of quants, and the scales of the whole row.
#[derive(Clone, Copy)]
pub(super) struct ScaledRuns<'a, const LEN: usize> {
    quants: &'a [[i8; LEN]],
    scales: &'a [f32],
    first: usize,
}

/// Quants and scales of a row.
#[inline(always)]
fn parts(row: &[u32], dim: usize) -> (&[i8], &[f32]) {
    let (quants, scales) = row.split_at(dim.div_ceil(BLOCK) * BLOCK / 4);
    (bytemuck::cast_slice(quants), bytemuck::cast_slice(scales))
}

impl Stored for Quants {
    type Runs<'a, const LEN: usize> = ScaledRuns<'a, LEN>;

    #[inline(always)]
    fn runs<const LEN: usize>(row: &[u32], dim: usize, first: usize, n: usize) -> ScaledRuns<'_, LEN> {
        let (quants, scales) = parts(row, dim);
        ScaledRuns { quants: &quants.as_chunks().0[first..][..n], scales, first }
    }

    #[inline(always)]
    fn load<const LEN: usize, L: Lanes<LEN>>(runs: ScaledRuns<'_, LEN>, at: usize) -> L {
        let scale = runs.scales[(runs.first + at) * LEN / BLOCK];
        L::from_i8(&runs.quants[at]).fma(L::splat(scale), L::splat(0.0))
    }

    #[inline(always)]
    fn rest<const LEN: usize>(row: &[u32], dim: usize, first: usize) -> [f32; LEN] {
        let (quants, scales) = parts(row, dim);
        // Runs are of 8 or 16 elements, so that what remains is in one block.
        padded(&quants[first..dim], |&quant| scales[first / BLOCK] * f32::from(quant))
    }
}

/// Elements with zeros behind them.
#[inline(always)]
fn padded<T, const LEN: usize>(elements: &[T], value: impl Fn(&T) -> f32) -> [f32; LEN] {
    let mut run = [0.0; LEN];
    run.iter_mut().zip(elements).for_each(|(to, x)| *to = value(x));
    run
}

/// What a row holds.
pub(crate) fn read_row(kind: KvType, row: &[u32], head: &mut [f32]) {
    match kind {
        KvType::F32 => head.copy_from_slice(&bytemuck::cast_slice(row)[..head.len()]),
        KvType::F16 => {
            let halves: &[u16] = bytemuck::cast_slice(row);
            halves[..head.len()].reinterpret_cast::<f16>().convert_to_f32_slice(head);
        }
        KvType::Q8_0 => {
            let (quants, scales) = row.split_at(head.len().div_ceil(BLOCK) * BLOCK / 4);
            for ((block, quants), &scale) in head.chunks_mut(BLOCK).zip(quants.chunks(BLOCK / 4)).zip(scales) {
                let (scale, quants): (f32, &[i8]) = (f32::from_bits(scale), bytemuck::cast_slice(quants));
                block.iter_mut().zip(quants).for_each(|(x, &quant)| *x = scale * f32::from(quant));
            }
        }
    }
}
