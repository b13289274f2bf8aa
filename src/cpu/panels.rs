//! Weights in panels, and products with them: of some rows, all weights of one column come one after the other, so that a
//! vector of them meets a token's activation in all lanes, and sums of many rows and tokens stay in registers until they are
//! whole. Rows as they lie have sums in all lanes of a vector, which are added up for each row and token: for 32 tokens with
//! 384 columns that and fetching rows side by side cost two fifths of the time.
//!
//! A matrix is put into panels where a product first wants it so, and its rows are given up; what reads it otherwise puts
//! them together again ([`super::Memory`]). Halves stay halves, since they are widened as they are loaded.

use bytemuck::Pod;

use super::simd::{self, Lanes, WideWork};
use super::threads;
use crate::dtype::{BLOCK, WeightType};
use crate::kernels::INVARIANT;
use crate::recording::Step;
use crate::shaders::params::LinearParams;
use crate::shaders::{Id, read_params};

/// Vectors of weights that a panel has side by side.
const VECTORS: usize = 3;
/// Columns whose products are added up before they are added to those before: in one long sum, digits would be lost.
/// The weights of so many columns of a panel stay in the nearest cache while all tokens meet them.
const RUN: usize = 128;

/// The order of a matrix whose rows are in panels: the panel, the column, the row in the panel. The last panel is filled up
/// with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Panels {
    n_rows: usize,
    /// Weights in a row, in whole blocks.
    dim: usize,
    /// Rows of a panel.
    pub width: usize,
    weight: PanelWeight,
}

/// What weights in panels are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PanelWeight {
    F32,
    F16,
}

/// Whether products that are the same in every batch take halves as they are.
pub(crate) fn take_halves() -> bool {
    simd::panel_lanes().is_some()
}

impl Panels {
    /// The order in which a step wants its first operand, if not in rows.
    pub fn wanted(step: &Step) -> Option<Panels> {
        let lanes = simd::panel_lanes()?;
        if ![Id::Matmul, Id::Matvec, Id::LinearNorm].contains(&step.kernel.id) {
            return None;
        }
        let params: LinearParams = read_params(&step.params);
        let weight = match step.variant.weight {
            Some(WeightType::F32) => PanelWeight::F32,
            Some(WeightType::F16) => PanelWeight::F16,
            _ => return None,
        };
        let (n_rows, dim) = (params.n_out as usize, params.blocks as usize * BLOCK);
        let panels = Panels { n_rows, dim, width: VECTORS * lanes, weight };
        let is_whole = panels.words(n_rows) == params.w_scales as usize;
        (params.flags & INVARIANT != 0 && is_whole && n_rows >= panels.width).then_some(panels)
    }

    /// Words of so many rows.
    pub fn words(&self, n_rows: usize) -> usize {
        match self.weight {
            PanelWeight::F32 => n_rows * self.dim,
            PanelWeight::F16 => n_rows * self.dim / 2,
        }
    }

    /// Words of all panels.
    pub fn len(&self) -> usize {
        self.words(self.n_rows.next_multiple_of(self.width))
    }

    /// Puts rows into panels, on several threads.
    pub fn pack(&self, rows: &[u32], panels: &mut [u32]) {
        match self.weight {
            PanelWeight::F32 => self.pack_as::<u32>(rows, panels),
            PanelWeight::F16 => self.pack_as::<u16>(rows, panels),
        }
    }

    fn pack_as<E: Pod + Send + Sync>(&self, rows: &[u32], panels: &mut [u32]) {
        let &Panels { n_rows, dim, width, .. } = self;
        let rows: &[E] = &bytemuck::cast_slice(rows)[..n_rows * dim];
        threads::for_each_chunk(bytemuck::cast_slice_mut::<_, E>(panels), width * dim, rows.len(), |panel, to| {
            for (i, row) in rows.chunks_exact(dim).skip(panel * width).take(width).enumerate() {
                to[i..].iter_mut().step_by(width).zip(row).for_each(|(to, &weight)| *to = weight);
            }
        });
    }

    /// Puts the rows together again, on the calling thread, which may hold locks that others wait for.
    pub fn unpack(&self, panels: &[u32], rows: &mut [u32]) {
        match self.weight {
            PanelWeight::F32 => self.unpack_as::<u32>(panels, rows),
            PanelWeight::F16 => self.unpack_as::<u16>(panels, rows),
        }
    }

    fn unpack_as<E: Pod>(&self, panels: &[u32], rows: &mut [u32]) {
        let &Panels { n_rows, dim, width, .. } = self;
        let panels: &[E] = bytemuck::cast_slice(panels);
        let rows: &mut [E] = &mut bytemuck::cast_slice_mut(rows)[..n_rows * dim];
        for (n, row) in rows.chunks_exact_mut(dim).enumerate() {
            let weights = panels[n / width * width * dim + n % width..].iter().step_by(width);
            row.iter_mut().zip(weights).for_each(|(to, &weight)| *to = weight);
        }
    }

    /// `sums[t, n] = x[t] . w[n]` of whole panels from the one with row `first` on; `sums` is `[T, rows of the panels]`.
    pub fn dots(&self, panels: &[u32], first: usize, x: &[f32], sums: &mut [f32]) {
        let dim = self.dim;
        let n_rows = sums.len() / (x.len() / dim);
        let w = &panels[self.words(first)..][..self.words(n_rows)];
        match self.weight {
            PanelWeight::F32 => simd::run_wide(PanelDots::<f32> { w: bytemuck::cast_slice(w), x, dim, sums }),
            PanelWeight::F16 => simd::run_wide(PanelDots::<u16> { w: bytemuck::cast_slice(w), x, dim, sums }),
        }
    }
}

/// Weights of some columns of a panel.
type Columns<E, const LEN: usize> = [[[E; LEN]; VECTORS]];

/// How a weight is stored.
trait Element: Copy {
    fn load<const LEN: usize, L: Lanes<LEN>>(weights: &[Self; LEN]) -> L;

    /// The columns as floats, converted into `floats` if they are halves.
    fn widened<'a, const LEN: usize, L: Lanes<LEN>>(
        columns: &'a Columns<Self, LEN>,
        floats: &'a mut Columns<f32, LEN>,
    ) -> &'a Columns<f32, LEN>;
}

impl Element for f32 {
    #[inline(always)]
    fn load<const LEN: usize, L: Lanes<LEN>>(weights: &[f32; LEN]) -> L {
        L::load(weights)
    }

    #[inline(always)]
    fn widened<'a, const LEN: usize, L: Lanes<LEN>>(
        columns: &'a Columns<f32, LEN>,
        _: &'a mut Columns<f32, LEN>,
    ) -> &'a Columns<f32, LEN> {
        columns
    }
}

/// An f16.
impl Element for u16 {
    #[inline(always)]
    fn load<const LEN: usize, L: Lanes<LEN>>(weights: &[u16; LEN]) -> L {
        L::from_f16(weights)
    }

    #[inline(always)]
    fn widened<'a, const LEN: usize, L: Lanes<LEN>>(
        columns: &'a Columns<u16, LEN>,
        floats: &'a mut Columns<f32, LEN>,
    ) -> &'a Columns<f32, LEN> {
        let floats = &mut floats[..columns.len()];
        for (to, weights) in floats.as_flattened_mut().iter_mut().zip(columns.as_flattened()) {
            L::from_f16(weights).store(to);
        }
        floats
    }
}

/// `sums[t, n] = x[t] . w[n]`, where `w` is in panels of [`VECTORS`] vectors. A token's sums do not depend on the others.
struct PanelDots<'a, E> {
    w: &'a [E],
    x: &'a [f32],
    dim: usize,
    sums: &'a mut [f32],
}

impl<E: Element> WideWork for PanelDots<'_, E> {
    #[inline(always)]
    fn run_wide<const LEN: usize, L: Lanes<LEN>>(self) {
        // As many sums as there are registers for, beside a panel's weights and what they are multiplied by.
        match L::SUMS {
            ..16 => self.tiled::<LEN, L, 4>(),
            16.. => self.tiled::<LEN, L, 8>(),
        }
    }
}

impl<E: Element> PanelDots<'_, E> {
    #[inline(always)]
    fn tiled<const LEN: usize, L: Lanes<LEN>, const T: usize>(self) {
        let PanelDots { w, x, dim, sums } = self;
        let (width, n_tokens) = (VECTORS * LEN, x.len() / dim);
        let n_rows = w.len() / dim;
        assert!(n_rows.is_multiple_of(width) && sums.len() == n_tokens * n_rows);
        for (panel, w) in w.chunks_exact(width * dim).enumerate() {
            let columns = w.as_chunks::<LEN>().0.as_chunks::<VECTORS>().0;
            for (i, columns) in columns.chunks(RUN).enumerate() {
                let x = &x[i * RUN..];
                let mut run = Run { x, dim, n_tokens, sums: &mut sums[panel * width..], stride: n_rows, adds: i > 0 };
                if n_tokens > T {
                    let mut floats = [[[0.0; LEN]; VECTORS]; RUN];
                    run.add::<LEN, L, f32, T>(E::widened::<LEN, L>(columns, &mut floats));
                } else {
                    run.add::<LEN, L, E, T>(columns);
                }
            }
        }
    }
}

/// Some columns of all tokens.
struct Run<'a> {
    /// From the first column on, rows of `dim`.
    x: &'a [f32],
    dim: usize,
    n_tokens: usize,
    /// Those of a panel, in rows of `stride`.
    sums: &'a mut [f32],
    stride: usize,
    /// Whether there are columns before.
    adds: bool,
}

impl Run<'_> {
    /// Adds products with the weights of these columns.
    #[inline(always)]
    fn add<const LEN: usize, L: Lanes<LEN>, E: Element, const T: usize>(&mut self, columns: &Columns<E, LEN>) {
        let mut t = 0;
        while t < self.n_tokens {
            t += match self.n_tokens - t {
                rest if rest >= T => self.tile::<LEN, L, E, T>(columns, t),
                4.. => self.tile::<LEN, L, E, 4>(columns, t),
                _ => self.tile::<LEN, L, E, 1>(columns, t),
            };
        }
    }

    /// Adds those of `T` tokens from the `first` on; returns `T`. Loops, since what a closure calls may not be inlined,
    /// and is then compiled for any processor.
    #[inline(always)]
    fn tile<const LEN: usize, L: Lanes<LEN>, E: Element, const T: usize>(
        &mut self,
        columns: &Columns<E, LEN>,
        first: usize,
    ) -> usize {
        let mut rows = [&self.x[..0]; T];
        for (t, row) in rows.iter_mut().enumerate() {
            *row = &self.x[(first + t) * self.dim..][..columns.len()];
        }
        let mut sums = [[L::splat(0.0); VECTORS]; T];
        for (k, column) in columns.iter().enumerate() {
            let mut weights = [L::splat(0.0); VECTORS];
            for (weights, column) in weights.iter_mut().zip(column) {
                *weights = E::load::<LEN, L>(column);
            }
            for (sums, row) in sums.iter_mut().zip(rows) {
                let x = L::splat(row[k]);
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = x.fma(weights, *sum);
                }
            }
        }
        let one = L::splat(1.0);
        for (t, sums) in sums.into_iter().enumerate() {
            let to = self.sums[(first + t) * self.stride..][..VECTORS * LEN].as_chunks_mut::<LEN>().0;
            for (to, sum) in to.iter_mut().zip(sums) {
                let sum = if self.adds { sum.fma(one, L::load(to)) } else { sum };
                sum.store(to);
            }
        }
        T
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::simd::Work;
    use super::*;

    fn panels(n_rows: usize, dim: usize, lanes: usize, weight: PanelWeight) -> Panels {
        Panels { n_rows, dim, width: VECTORS * lanes, weight }
    }

    /// Small integers: sums are exact in any order.
    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i * i % 23) as f32 - 11.0).collect()
    }

    /// The rows as they are stored.
    fn stored(rows: &[f32], weight: PanelWeight) -> Vec<u32> {
        match weight {
            PanelWeight::F32 => rows.iter().map(|x| x.to_bits()).collect(),
            PanelWeight::F16 => {
                let bits: Vec<u16> = rows.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
                bytemuck::pod_collect_to_vec(&bits)
            }
        }
    }

    #[test]
    fn packed_panels_unpack_to_the_same_rows() {
        for weight in [PanelWeight::F32, PanelWeight::F16] {
            for (n_rows, dim, lanes) in [(48, 32, 16), (70, 64, 16), (1, 32, 8), (95, 1056, 8)] {
                let panels = panels(n_rows, dim, lanes, weight);
                let rows = stored(&numbers(n_rows * dim), weight);
                let mut packed = vec![0; panels.len()];
                panels.pack(&rows, &mut packed);
                let mut found = vec![0; rows.len()];
                panels.unpack(&packed, &mut found);
                assert_eq!(found, rows, "{panels:?}");
            }
        }
    }

    /// On this processor, on one with vectors of 256 bits at most, and on any.
    const WAYS: [(usize, bool); 3] = [(16, false), (8, false), (8, true)];

    /// Sums of all rows, `[tokens, rows of the panels]`; `None` where the processor has no such vectors.
    fn products(rows: &[f32], x: &[f32], dim: usize, weight: PanelWeight, way: (usize, bool)) -> Option<Vec<f32>> {
        let (lanes, _) = way;
        if lanes == 16 && simd::panel_lanes() != Some(16) {
            return None;
        }
        let panels = panels(rows.len() / dim, dim, lanes, weight);
        let mut packed = vec![0; panels.len()];
        panels.pack(&stored(rows, weight), &mut packed);
        let mut sums = vec![f32::NAN; x.len() / dim * panels.n_rows.next_multiple_of(panels.width)];
        macro_rules! run {
            ($element:ty) => {{
                let w = bytemuck::cast_slice::<u32, $element>(&packed);
                let work = PanelDots { w, x, dim, sums: &mut sums };
                match way {
                    (16, _) => simd::run_wide(work),
                    (_, false) => simd::run(work),
                    (_, true) => work.run::<[f32; 8]>(),
                }
            }};
        }
        match weight {
            PanelWeight::F32 => run!(f32),
            PanelWeight::F16 => run!(u16),
        }
        Some(sums)
    }

    #[test]
    fn panel_products_agree_for_any_lanes_and_token_count() {
        for weight in [PanelWeight::F32, PanelWeight::F16] {
            for (n_rows, dim) in [(48, 32), (70, 64), (24, 1056), (95, 544)] {
                for n_tokens in [1, 3, 4, 7, 8, 13, 21] {
                    let (rows, x) = (numbers(n_rows * dim), numbers(n_tokens * dim));
                    let want =
                        |t: usize, n: usize| -> f32 { (0..dim).map(|k| x[t * dim + k] * rows[n * dim + k]).sum() };
                    for way in WAYS {
                        let Some(sums) = products(&rows, &x, dim, weight, way) else { continue };
                        for (t, sums) in sums.chunks_exact(sums.len() / n_tokens).enumerate() {
                            for (n, &sum) in sums.iter().take(n_rows).enumerate() {
                                assert_eq!(sum, want(t, n), "{n_rows} {weight:?} {way:?}, {n_tokens} tokens, {t}, {n}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn panel_products_do_not_depend_on_the_token_count() {
        const MOST: usize = 21;
        let uneven = |n| numbers(n).into_iter().map(|x| x / 7.0).collect::<Vec<_>>();
        for weight in [PanelWeight::F32, PanelWeight::F16] {
            for (n_rows, dim) in [(48, 32), (70, 416)] {
                let (rows, x) = (uneven(n_rows * dim), uneven(MOST * dim));
                for way in WAYS {
                    let product = |n_tokens: usize| products(&rows, &x[..n_tokens * dim], dim, weight, way);
                    let Some(all) = product(MOST) else { continue };
                    for n_tokens in 1..MOST {
                        let some = product(n_tokens).unwrap();
                        assert!(some == all[..some.len()], "{n_rows} {weight:?} {way:?}, {n_tokens} tokens");
                    }
                }
            }
        }
    }
}
