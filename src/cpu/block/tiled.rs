//! Products of many tokens by tiles, where the processor has them: weights and activations are rounded to BF16, and products
//! are added up in f32. That loses less than rounding activations to bytes: for random numbers, the mean squared error
//! is a quarter as large. Tiles of bytes would have to be scaled for each block, which takes longer than the products.

use super::super::simd::tiles::{Configured, Line, Pair, Square, Sums, TileWork, Tiles};
use super::super::simd::{Lanes, Wide};
use super::{Block, Format, PANEL_ROWS, Packed, Units};
use crate::cpu::threads;
use crate::dtype::BLOCK;

/// Rows of a tile.
const ROWS: usize = 16;
const ZERO_SUMS: Sums = [Square([[0.0; ROWS]; ROWS]); 2];
const ZEROS: Pair = [[Line([0; BLOCK]); ROWS]; 2];

/// Rows of activations, rounded.
pub(in super::super) struct TiledRows {
    tiles: Tiles,
    /// Of each 32 rows, a pair of tiles for each block, with zeros behind the last row.
    pairs: Vec<Pair>,
    n_blocks: usize,
}

/// A thread's buffer for unpacked weights.
#[derive(Default)]
pub(in super::super) struct TiledPanel(Vec<Pair>);

impl TiledRows {
    /// Rows that lie together: a product's first one is a multiple of as many.
    pub const GROUP: usize = 2 * ROWS;

    /// Rounds rows of `n_blocks`.
    pub fn of(tiles: Tiles, x: &[Block], n_blocks: usize) -> TiledRows {
        /// Pairs that a thread takes at a time.
        const RUN: usize = 16;
        let n_groups = (x.len() / n_blocks).div_ceil(TiledRows::GROUP);
        let mut pairs = vec![ZEROS; n_groups * n_blocks];
        threads::for_each_chunk(&mut pairs, RUN, x.len() * BLOCK, |run, pairs| {
            tiles.run(RoundRows { x, n_blocks, first: run * RUN, pairs });
        });
        TiledRows { tiles, pairs, n_blocks }
    }
}

struct RoundRows<'a> {
    x: &'a [Block],
    n_blocks: usize,
    /// The number of the first pair.
    first: usize,
    pairs: &'a mut [Pair],
}

impl TileWork for RoundRows<'_> {
    #[inline(always)]
    fn run_tiles<W: Wide, L: Lanes<16>>(self, tiles: &Configured) {
        let RoundRows { x, n_blocks, first, pairs } = self;
        for (i, pair) in pairs.iter_mut().enumerate() {
            let (group, b) = ((first + i) / n_blocks, (first + i) % n_blocks);
            for (half, tile) in pair.iter_mut().enumerate() {
                let row = group * TiledRows::GROUP + half * ROWS;
                let mut square = Square([[0.0; 16]; ROWS]);
                for (t, to) in square.0.iter_mut().enumerate() {
                    if let Some(block) = x.get((row + t) * n_blocks + b) {
                        *to = bytemuck::cast(tiles.rounded(block).0);
                    }
                }
                // Two elements are as large as a float.
                L::transpose(&mut square.0);
                for (line, from) in tile.iter_mut().zip(square.0) {
                    line.0 = bytemuck::cast(from);
                }
            }
        }
    }
}

impl Packed<'_> {
    /// The tiles that these weights are multiplied by, if they are quantised and the processor has tiles.
    pub fn tiles(&self) -> Option<Tiles> {
        Tiles::of_processor().filter(|_| self.weight.block_type().block_len() > 1)
    }

    /// Dot products of all rows with `n_tokens` activations from the one at `first` on, which begins a group: `sums` is
    /// `[n_tokens, rows]`.
    pub fn tiled_dots(
        &self,
        x: &TiledRows,
        [first, n_tokens]: [usize; 2],
        TiledPanel(panel): &mut TiledPanel,
        sums: &mut [f32],
    ) {
        let n_blocks = x.n_blocks;
        let x_pairs = &x.pairs[first / TiledRows::GROUP * n_blocks..];
        let n_rows = sums.len() / n_tokens;
        panel.resize(n_blocks, ZEROS);
        for first in (0..n_rows).step_by(PANEL_ROWS) {
            let n = (n_rows - first).min(PANEL_ROWS);
            let rows = self.run(first * n_blocks, n * n_blocks);
            rows.unpack_tiles(x.tiles, panel);
            x.tiles.run(Multiply { panel, x: x_pairs, n_tokens, first, n, sums, n_rows });
        }
    }
}

/// Rounds at most as many rows as a panel has.
pub(super) fn unpack_tiles<F: Format>(rows: &Packed<'_>, tiles: Tiles, panel: &mut [Pair]) {
    tiles.run(Unpack::<F> { rows: Units::of(rows), panel });
}

struct Unpack<'a, F: Format> {
    rows: Units<'a, F>,
    panel: &'a mut [Pair],
}

impl<F: Format> TileWork for Unpack<'_, F> {
    #[inline(always)]
    fn run_tiles<W: Wide, L: Lanes<16>>(self, tiles: &Configured) {
        let row_len = self.panel.len() / F::BLOCKS;
        for (n, units) in self.rows.units.chunks_exact(row_len).enumerate() {
            for (i, (unit, pairs)) in units.iter().zip(self.panel.chunks_exact_mut(F::BLOCKS)).enumerate() {
                let tail = self.rows.tail(n * row_len + i);
                let (scale, scales) = (F::scale::<W::Sum>(tail), F::scales::<W::Eight>(unit, tail));
                for (at, pair) in pairs.iter_mut().enumerate() {
                    let mut weights = [0.0; BLOCK];
                    F::block::<W>(unit, tail, &scales, at).scaled(scale).store(&mut weights);
                    pair[n / ROWS][n % ROWS] = tiles.rounded(&weights);
                }
            }
        }
    }
}

/// A panel's products.
struct Multiply<'a> {
    panel: &'a [Pair],
    /// Groups from the first one on.
    x: &'a [Pair],
    n_tokens: usize,
    /// The panel's first row, and how many it has.
    first: usize,
    n: usize,
    /// `[n_tokens, n_rows]`.
    sums: &'a mut [f32],
    n_rows: usize,
}

impl TileWork for Multiply<'_> {
    #[inline(always)]
    fn run_tiles<W: Wide, L: Lanes<16>>(mut self, tiles: &Configured) {
        let mut found = [ZERO_SUMS; 2];
        for (group, x) in self.x.chunks_exact(self.panel.len()).enumerate() {
            let t = group * TiledRows::GROUP;
            match self.n_tokens.saturating_sub(t) {
                0 => break,
                1..=ROWS => self.multiply::<L, 1>(tiles, x, t, &mut [found[0]]),
                _ => self.multiply::<L, 2>(tiles, x, t, &mut found),
            }
        }
    }
}

impl Multiply<'_> {
    /// Products with `N` tiles of tokens from `t` on.
    #[inline(always)]
    fn multiply<L: Lanes<16>, const N: usize>(
        &mut self,
        tiles: &Configured,
        x: &[Pair],
        t: usize,
        found: &mut [Sums; N],
    ) {
        tiles.multiply(self.panel, x, found);
        for (half, tokens) in found.iter_mut().enumerate() {
            for (i, Square(square)) in tokens.iter_mut().enumerate() {
                let columns = self.first + i * ROWS..self.first + self.n.min((i + 1) * ROWS);
                if columns.is_empty() {
                    break;
                }
                L::transpose(square);
                let rows = self.sums.chunks_exact_mut(self.n_rows).skip(t + half * ROWS);
                for (sums, found) in rows.zip(square.iter()) {
                    let to = &mut sums[columns.clone()];
                    match <&mut [f32; ROWS]>::try_from(&mut *to) {
                        Ok(to) => *to = *found,
                        Err(_) => to.copy_from_slice(&found[..columns.len()]),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::Rounded;
    use super::*;
    use crate::device::Device;
    use crate::dtype::WeightType;
    use crate::formats::Safetensors;
    use crate::formats::quantize::quantize_row;
    use crate::matrix::Matrix;

    fn quantised() -> impl Iterator<Item = WeightType> {
        WeightType::ALL.into_iter().filter(|weight| weight.block_type().block_len() > 1)
    }

    /// Calls `work` with packed weights of `bytes`.
    fn with_packed<R>(
        weight: WeightType,
        [n_rows, n_blocks]: [usize; 2],
        bytes: &[u8],
        work: impl FnOnce(&Packed<'_>) -> R,
    ) -> R {
        let device = Device::cpu();
        let matrix = Matrix::declare(&device.target(), "w", weight, n_rows as u32, (n_blocks * BLOCK) as u32)
            .expect("the shape is valid");
        matrix.upload(&device, &[bytes]).expect("whole rows");
        let slab = &matrix.slabs()[0];
        let words: Vec<u32> = pollster::block_on(device.read(&slab.words)).expect("the tensor is there");
        work(&Packed::new(Some(weight), &words, matrix.quants_words(slab)).run(0, n_rows * n_blocks))
    }

    /// Nearly normal numbers.
    fn normal(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        (0..n).map(|_| (0..12).map(|_| next()).sum::<f32>() - 6.0).collect()
    }

    /// Products of `n_rows` rows with all tokens of `x`, or `None` without tiles.
    fn products(packed: &Packed<'_>, n_rows: usize, n_blocks: usize, x: &[f32]) -> Option<Vec<f32>> {
        let n_tokens = x.len() / (n_blocks * BLOCK);
        let x = TiledRows::of(packed.tiles()?, x.as_chunks().0, n_blocks);
        let mut sums = vec![f32::NAN; n_tokens * n_rows];
        packed.tiled_dots(&x, [0, n_tokens], &mut TiledPanel::default(), &mut sums);
        Some(sums)
    }

    /// Values by ggml and activations, both rounded by `half`, in f64; rows that fill no tile, and tokens of several groups.
    #[test]
    fn tile_products_match_f64() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/quant-vectors/more.safetensors");
        let bytes = std::fs::read(path).expect("it is in the repository");
        let vectors = Safetensors::parse(&bytes, bytes.len() as u64).expect("it is valid");
        let tensor =
            |name: String| vectors.tensor(&name).expect("it has all types").bytes(&bytes).expect("it is whole");
        let rounded = |x: f32| bf16::from_f32(x).to_f64();
        let mut n_types = 0;
        for weight in quantised() {
            let all_values: Vec<f32> = bytemuck::pod_collect_to_vec(tensor(format!("{weight}.values")));
            let all_blocks = tensor(format!("{weight}.blocks"));
            // What is uploaded must be whole units.
            let unit = weight.unit_len().max(weight.block_type().block_len() as usize);
            let unit_bytes =
                unit / weight.block_type().block_len() as usize * weight.block_type().block_bytes() as usize;
            let n_units = all_values.len() / unit;
            for [n_rows, row_units] in [[1, 1], [17, 3], [37, 2]] {
                // Rows that differ, of the units again and again.
                let order = || (0..n_rows * row_units).map(|i| (i + i / n_units) % n_units);
                let values: Vec<f32> = order().flat_map(|u| all_values[u * unit..][..unit].to_vec()).collect();
                let blocks: Vec<u8> =
                    order().flat_map(|u| all_blocks[u * unit_bytes..][..unit_bytes].to_vec()).collect();
                let dim = row_units * unit;
                for n_tokens in [1, 16, 17, 33, 70] {
                    let x = normal(n_tokens * dim, 5);
                    let found = with_packed(weight, [n_rows, dim / BLOCK], &blocks, |packed| {
                        products(packed, n_rows, dim / BLOCK, &x)
                    });
                    let Some(found) = found else { continue };
                    for (i, &found) in found.iter().enumerate() {
                        let (w, x) = (&values[i % n_rows * dim..][..dim], &x[i / n_rows * dim..][..dim]);
                        let terms = w.iter().zip(x).map(|(&w, &x)| rounded(w) * rounded(x));
                        let (want, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                        let error = (f64::from(found) - want).abs();
                        // Tiles take subnormal numbers for zero.
                        let size = size + dim as f64 * 1e6 * f64::from(f32::MIN_POSITIVE);
                        assert!(
                            error <= 2e-6 * size,
                            "{weight}, {n_rows} rows, {n_tokens} tokens, {i}: {found}, not {want}"
                        );
                    }
                }
            }
            n_types += 1;
        }
        assert!(n_types >= 20, "{n_types}");
    }

    #[test]
    fn tile_products_depend_on_their_own_row_and_token_alone() {
        let (n_rows, n_blocks, n_tokens) = (45, 8, 75);
        let dim = n_blocks * BLOCK;
        let weights = normal(n_rows * dim, 1);
        let mut bytes = vec![0; n_rows * dim / 32 * 34];
        quantize_row(WeightType::Q8_0.block_type(), &weights, None, &mut bytes).expect("the rows are whole blocks");
        let mut x = normal(n_tokens * dim, 2);
        with_packed(WeightType::Q8_0, [n_rows, n_blocks], &bytes, |packed| {
            let Some(all) = products(packed, n_rows, n_blocks, &x) else { return };
            for n in 1..n_tokens {
                let some = products(packed, n_rows, n_blocks, &x[..n * dim]).expect("there are tiles");
                assert!(some == all[..n * n_rows], "{n} tokens");
            }
            // Begins at the second group.
            let tiled = TiledRows::of(packed.tiles().expect("there are tiles"), x.as_chunks().0, n_blocks);
            let mut later = vec![0.0; 43 * n_rows];
            packed.tiled_dots(&tiled, [32, 43], &mut TiledPanel::default(), &mut later);
            assert!(later == all[32 * n_rows..]);
            for [first, n] in [[0, 16], [3, 17], [13, 32], [40, 5]] {
                let rows = packed.run(first * n_blocks, n * n_blocks);
                let found = products(&rows, n, n_blocks, &x).expect("there are tiles");
                for (found, all) in found.chunks(n).zip(all.chunks(n_rows)) {
                    assert_eq!(found, &all[first..][..n], "{n} rows from {first} on");
                }
            }
            // What is not finite is so in its own token's products, whatever the panel had before.
            for (t, odd) in [(5, f32::NAN), (20, f32::INFINITY), (74, f32::NEG_INFINITY)] {
                x[t * dim + 3 * t] = odd;
            }
            let found = products(packed, n_rows, n_blocks, &x).expect("there are tiles");
            for (t, (found, all)) in found.chunks(n_rows).zip(all.chunks(n_rows)).enumerate() {
                if [5, 20, 74].contains(&t) {
                    assert!(found.iter().all(|sum| !sum.is_finite()), "token {t}");
                } else {
                    assert_eq!(found, all, "token {t}");
                }
            }
        });
    }

    /// Less than bytes lose, of activations as they come out of a norm and of some with outliers.
    #[test]
    fn rounding_to_bf16_costs_less_than_to_bytes() {
        /// Normalised mean squared error. A number's last place is 2^-7 of its power of two, so that rounding leaves 2^-14 / 12 of
        /// that power's square. Between powers, squares are 2.3 times it on average: 2.2e-6, of both factors 4.4e-6. Quants
        /// that are few take some values only.
        const MOST: f64 = 8e-6;
        let (n_rows, n_blocks) = (40, 32);
        let dim = n_blocks * BLOCK;
        let weights: Vec<f32> = normal(n_rows * dim, 3).iter().map(|x| 0.02 * x).collect();
        let even = normal(dim, 4);
        let mut outliers = even.clone();
        outliers.iter_mut().step_by(61).for_each(|x| *x *= 30.0);
        for weight in [WeightType::Q4_0, WeightType::Q8_0, WeightType::Q4_K, WeightType::Q6_K] {
            let of_file = weight.block_type();
            let mut bytes = vec![0; weights.len() / of_file.block_len() as usize * of_file.block_bytes() as usize];
            quantize_row(of_file, &weights, None, &mut bytes).expect("the rows are whole blocks");
            with_packed(weight, [n_rows, n_blocks], &bytes, |packed| {
                // Of a few large numbers the errors cancel out less.
                for (x, most) in [(&even, MOST), (&outliers, 3.0 * MOST)] {
                    let Some(found) = products(packed, n_rows, n_blocks, x) else { continue };
                    let mut exact = vec![0.0; n_rows];
                    packed.dots(x.as_chunks().0, n_blocks, &mut exact);
                    let mut of_bytes = vec![0.0; n_rows];
                    packed.rounded_dots(&Rounded::of(x.as_chunks().0, n_blocks, packed), n_blocks, &mut of_bytes);
                    let square = |x: f32| f64::from(x) * f64::from(x);
                    let nmse = |found: &[f32]| {
                        exact.iter().zip(found).map(|(a, b)| square(a - b)).sum::<f64>()
                            / exact.iter().copied().map(square).sum::<f64>()
                    };
                    let (found, of_bytes) = (nmse(&found), nmse(&of_bytes));
                    println!("{weight:<8} {found:.1e}, bytes {of_bytes:.1e}");
                    assert!(found <= most && found < 0.5 * of_bytes, "{weight}: {found:.1e}, bytes {of_bytes:.1e}");
                }
            });
        }
    }
}
