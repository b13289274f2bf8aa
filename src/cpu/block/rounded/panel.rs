//! Products of many tokens: a panel of rows is repacked once, so that each lane has the quants of one row, and then meets all
//! tokens. Sums of whole blocks are exact, and only then scaled.

use super::super::super::simd::Vector;
use super::super::super::simd::bytes::{ByteDots, ByteWork, SIGNED_DIFFER, run_bytes};
use super::super::Packed;
use super::{EIGHT, Quantised, Rounded, RoundedEight, Rows, WeightType, with_quantised};
use super::{Iq4, Iq4Xs, Mx, Q4, Q4K, Q4With1, Q5, Q5K, Q5With1, Q6K, Q8};

/// Rows of a panel: two vectors of sixteen.
pub(in super::super::super) const PANEL_ROWS: usize = 32;
/// Rows of a vector.
const LANES: usize = 16;
const VECTORS: usize = PANEL_ROWS / LANES;

/// A panel of rows.
#[derive(Default)]
pub(in super::super::super) struct Panel {
    /// For each four weights of the blocks of each eight, those of sixteen rows.
    quants: Vec<[Line; VECTORS]>,
    /// For each block or half of it, those of all rows.
    scales: Vec<[[f32; LANES]; VECTORS]>,
    /// For each block, with the other sign, if the format has them.
    mins: Vec<[[f32; LANES]; VECTORS]>,
}

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

impl Packed<'_> {
    /// Whether products with rounded activations by panels are faster than exact ones.
    pub fn rounds_panels(&self) -> bool {
        fn is_faster<F: Quantised>() -> bool {
            struct Find<F>(std::marker::PhantomData<F>);
            impl<F: Quantised> ByteWork for Find<F> {
                type Output = bool;

                fn run_bytes<D: ByteDots>(self) -> bool {
                    D::SIGNED_ROWS || !F::SIGNED
                }
            }
            run_bytes(Find::<F>(std::marker::PhantomData))
        }
        self.rounds() && with_quantised!(self.weight, is_faster(), false)
    }

    /// Dot products of rows of `n_blocks` with `n_tokens` rounded activations from the one at `first` on: `sums` is `[n_tokens,
    /// rows]`.
    pub fn panel_dots(
        &self,
        x: &Rounded,
        [first, n_tokens]: [usize; 2],
        n_blocks: usize,
        panel: &mut Panel,
        sums: &mut [f32],
    ) {
        with_quantised!(self.weight, panel_dots(self, x.rows(first, n_tokens), n_blocks, panel, sums), {
            unreachable!("{} has no products with rounded activations", self.weight)
        });
    }
}

fn panel_dots<F: Quantised>(
    packed: &Packed<'_>,
    x: &[RoundedEight],
    n_blocks: usize,
    panel: &mut Panel,
    sums: &mut [f32],
) {
    dots_by::<F, Best>((packed, n_blocks), x, panel, sums);
}

/// Chooses the instructions that a loop is compiled for.
pub(super) trait Runner {
    fn run(work: impl ByteWork<Output = ()>);
}

/// With the best instructions.
struct Best;

impl Runner for Best {
    fn run(work: impl ByteWork<Output = ()>) {
        run_bytes(work);
    }
}

pub(super) fn dots_by<F: Quantised, R: Runner>(
    (packed, n_blocks): (&Packed<'_>, usize),
    x: &[RoundedEight],
    panel: &mut Panel,
    sums: &mut [f32],
) {
    const { assert!(!(F::BY_HALVES && F::MINS || F::SIGNED && (F::BY_HALVES || F::MINS))) }
    let rows = Rows::<F>::new(packed, n_blocks);
    let n_rows = sums.len() / (x.len() / n_blocks.div_ceil(EIGHT));
    for first in (0..n_rows).step_by(PANEL_ROWS) {
        R::run(Pack { rows, n_blocks, panel, first, n: (n_rows - first).min(PANEL_ROWS) });
        let (panel, sums) = (&*panel, &mut *sums);
        match (F::BY_HALVES, F::MINS, F::SIGNED && SIGNED_DIFFER) {
            (true, ..) => R::run(Multiply::<true, false, false> { panel, x, n_blocks, first, sums }),
            (_, true, _) => R::run(Multiply::<false, true, false> { panel, x, n_blocks, first, sums }),
            (.., true) => R::run(Multiply::<false, false, true> { panel, x, n_blocks, first, sums }),
            (.., false) => R::run(Multiply::<false, false, false> { panel, x, n_blocks, first, sums }),
        }
    }
}

/// Groups of four weights in eight blocks.
const FOURS: usize = 8 * EIGHT;

/// Packs `n` rows from `first` on. Other rows of the panel are unused.
struct Pack<'a, F: Quantised> {
    rows: Rows<'a, F>,
    /// Blocks of a row.
    n_blocks: usize,
    panel: &'a mut Panel,
    first: usize,
    n: usize,
}

/// Scales of eight blocks.
const fn n_scales(by_halves: bool) -> usize {
    if by_halves { 2 * EIGHT } else { EIGHT }
}

impl<F: Quantised> ByteWork for Pack<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run_bytes<D: ByteDots>(self) {
        let Pack { rows, n_blocks, panel: Panel { quants, scales, mins }, first, n } = self;
        let (row_len, n_scales) = (n_blocks.div_ceil(EIGHT), const { n_scales(F::BY_HALVES) });
        quants.resize(row_len * FOURS, [Line([0; 64]); VECTORS]);
        scales.resize(row_len * n_scales, [[0.0; LANES]; VECTORS]);
        if F::MINS {
            mins.resize(row_len * EIGHT, [[0.0; LANES]; VECTORS]);
        }
        for four_rows in (0..n).step_by(4) {
            let (vector, lane) = (four_rows / LANES, four_rows % LANES);
            for i in 0..row_len {
                let (quants, scales) = (&mut quants[i * FOURS..][..FOURS], &mut scales[i * n_scales..][..n_scales]);
                let mut halves = [[[D::load(&[0; 64]); 2]; 4]; 2];
                for j in 0..4 {
                    // Where there are no further rows, the last one again.
                    let row = first + (four_rows + j).min(n - 1);
                    let mut copied = None;
                    let (units, tails) = if i < rows.n_whole() {
                        let ((units, tails), n_units) = (rows.eights(row), Rows::<F>::UNITS);
                        (&units[i * n_units..][..n_units], &tails[i * n_units * F::TAIL..][..n_units * F::TAIL])
                    } else {
                        rows.rest(row, &mut copied)
                    };
                    for (four, halves) in halves.iter_mut().enumerate() {
                        halves[j] = F::quants::<D>(units, tails, four);
                    }
                    let lane = lane + j;
                    let [of_row, second] = F::block_scales::<D::Eight>(units, tails);
                    let (of_row, second) = (of_row.lanes(), second.lanes());
                    for b in 0..EIGHT {
                        if F::BY_HALVES {
                            scales[2 * b][vector][lane] = of_row[b];
                            scales[2 * b + 1][vector][lane] = second[b];
                        } else {
                            scales[b][vector][lane] = of_row[b];
                        }
                        if F::MINS {
                            mins[i * EIGHT + b][vector][lane] = -second[b];
                        }
                    }
                }
                for (four, [a, b, c, d]) in halves.into_iter().enumerate() {
                    for half in 0..2 {
                        let words = D::interleaved([a[half], b[half], c[half], d[half]]);
                        for (word, words) in words.into_iter().enumerate() {
                            let mut of_blocks = Line([0; 64]);
                            D::store(words, &mut of_blocks.0);
                            for (block, words) in of_blocks.0.as_chunks::<16>().0.iter().enumerate() {
                                let at = (4 * four + block) * 8 + 4 * half + word;
                                quants[at][vector].0.as_chunks_mut::<16>().0[lane / 4] = *words;
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The products of a panel whose rows are those from `first` on. Formats that differ only in their quants share this code.
struct Multiply<'a, const BY_HALVES: bool, const MINS: bool, const SIGNED: bool> {
    panel: &'a Panel,
    x: &'a [RoundedEight],
    /// Blocks of a row.
    n_blocks: usize,
    first: usize,
    sums: &'a mut [f32],
}

impl<const BY_HALVES: bool, const MINS: bool, const SIGNED: bool> ByteWork for Multiply<'_, BY_HALVES, MINS, SIGNED> {
    type Output = ();

    #[inline(always)]
    fn run_bytes<D: ByteDots>(mut self) {
        match D::MANY_SUMS {
            true => self.multiply::<D, VECTORS, 5>(),
            false => self.multiply::<D, 1, 2>(),
        }
    }
}

impl<const BY_HALVES: bool, const MINS: bool, const SIGNED: bool> Multiply<'_, BY_HALVES, MINS, SIGNED> {
    /// Eights of a row.
    #[inline(always)]
    fn row_len(&self) -> usize {
        self.n_blocks.div_ceil(EIGHT)
    }

    #[inline(always)]
    fn multiply<D: ByteDots, const N: usize, const T: usize>(&mut self) {
        let n_tokens = self.x.len() / self.row_len();
        let n_rows = self.sums.len() / n_tokens;
        for vector in (0..VECTORS).step_by(N) {
            let row = self.first + vector * LANES;
            if row >= n_rows {
                break;
            }
            let width = (N * LANES).min(n_rows - row);
            let mut t = 0;
            while t < n_tokens {
                if n_tokens - t >= T {
                    let found = self.tile::<D, N, T>(vector, t);
                    self.write::<D, N, T>(found, t, [row, width], n_rows);
                    t += T;
                } else {
                    let found = self.tile::<D, N, 1>(vector, t);
                    self.write::<D, N, 1>(found, t, [row, width], n_rows);
                    t += 1;
                }
            }
        }
    }

    #[inline(always)]
    fn write<D: ByteDots, const N: usize, const T: usize>(
        &mut self,
        found: [[D::Sums; N]; T],
        t: usize,
        [row, width]: [usize; 2],
        n_rows: usize,
    ) {
        for (i, found) in found.into_iter().enumerate() {
            let to = &mut self.sums[(t + i) * n_rows + row..][..width];
            let mut sums = [0.0; PANEL_ROWS];
            for (found, sums) in found.into_iter().zip(sums.chunks_exact_mut(LANES)) {
                D::store_sums(found, sums);
            }
            to.copy_from_slice(&sums[..width]);
        }
    }

    /// Sums of `N` vectors of rows times `T` tokens.
    #[inline(always)]
    fn tile<D: ByteDots, const N: usize, const T: usize>(&self, vector: usize, t: usize) -> [[D::Sums; N]; T] {
        let mut x = [&self.x[..0]; T];
        for (i, x) in x.iter_mut().enumerate() {
            *x = &self.x[(t + i) * self.row_len()..][..self.row_len()];
        }
        let n_scales = const { n_scales(BY_HALVES) };
        let mut sums = [[D::splat(0.0); N]; T];
        for i in 0..self.row_len() {
            let quants = &self.panel.quants[i * FOURS..][..FOURS];
            let scales = &self.panel.scales[i * n_scales..][..n_scales];
            for b in 0..(self.n_blocks - i * EIGHT).min(EIGHT) {
                let mut totals = [[D::ints(0); N]; T];
                for half in 0..2 {
                    // Quants of formats with mins have no offset.
                    if !MINS && (half == 0 || BY_HALVES) {
                        for (totals, x) in totals.iter_mut().zip(x) {
                            *totals = [D::ints(x[i].starts[half][b]); N];
                        }
                    }
                    for pair in 0..2 {
                        let at = 8 * b + 4 * half + 2 * pair;
                        for n in 0..N {
                            let w = [D::load(&quants[at][vector + n].0), D::load(&quants[at + 1][vector + n].0)];
                            for (totals, x) in totals.iter_mut().zip(x) {
                                let x = &x[i].quants[b / 4][half].as_chunks::<8>().0[b % 4 * 2 + pair];
                                totals[n] = D::add_fours::<SIGNED>(totals[n], w, x);
                            }
                        }
                    }
                    if half == 1 || BY_HALVES {
                        for n in 0..N {
                            let scale = D::load_sums(&scales[if BY_HALVES { 2 * b + half } else { b }][vector + n]);
                            for ((sums, totals), x) in sums.iter_mut().zip(&totals).zip(x) {
                                let scaled = D::mul(D::floats(totals[n]), scale);
                                sums[n] = D::fma(scaled, D::splat(x[i].scales[b]), sums[n]);
                            }
                        }
                    }
                }
                if MINS {
                    for n in 0..N {
                        let mins = D::load_sums(&self.panel.mins[i * EIGHT + b][vector + n]);
                        for (sums, x) in sums.iter_mut().zip(x) {
                            sums[n] = D::fma(mins, D::splat(x[i].sums[0][b]), sums[n]);
                        }
                    }
                }
            }
        }
        sums
    }
}
