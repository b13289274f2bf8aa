//! Products by experts for many tokens: the rows of each expert's tokens are together, in tiles.

use super::{Experts, expect_biases};
use crate::error::Error;
use crate::kernels::linear::{operations, quads, set};
use crate::kernels::{MAX_EXPERTS, MAX_SHARED, check_loop, fold, grid_parts};
use crate::matrix::Matrix;
use crate::recording::{BatchInvariance, Recorder};
use crate::shaders::constants::expert_rows::BIAS;
use crate::shaders::constants::expert_sum::ACCUMULATE;
use crate::shaders::constants::expert_tiles;
use crate::shaders::params::{ExpertMatmulParams, ExpertSumParams, ExpertTilesParams};
use crate::shaders::{self, Tier};
use crate::tensor::Tensor;

/// The slots of all experts, those of each together, and the tiles that they make. A slot is a token's place for one of its
/// experts.
#[derive(Clone, Debug)]
pub struct ExpertTiles {
    /// `[T K]` words: slots in the order of their experts.
    slots: Tensor,
    /// `[tiles, 4]` words: an expert, the first of its `slots` that are in the tile, and how many. 0 past the last tile.
    tiles: Tensor,
    /// Most rows of a tile.
    tile_rows: u32,
}

impl ExpertTiles {
    /// Whether tiles suit so many slots of so many experts better than a product for each slot. On the CPU that product
    /// takes an expert's slots together by itself.
    pub fn suit(rec: &Recorder, n_slots: u32, n_experts: u32) -> bool {
        let target = rec.target();
        // Rows of an expert, on average, from which on a tile of 16 rows is less work than a product for each. On lavapipe,
        // 32 experts of width 256 for a model of 512 were 0.6 times as fast by tiles with 4 rows of each, 1.1 with 8 and
        // 1.7 with 16. On GPUs, where a product for each reads all weights once more, half as many are enough.
        let fewest = if target.tier() == Tier::Scalar { 8 } else { 4 };
        target.is_gpu()
            && (rec.batch_invariance() == BatchInvariance::Many || n_slots >= n_experts.saturating_mul(fewest))
    }

    /// Records the order of the slots that `routes` has, and their tiles. Shader: `shaders/expert_tiles.wgsl`.
    ///
    /// # Shapes
    /// `routes`: `[T, K, 2]`, as [`route`](super::route) makes it, of `n_experts` experts.
    /// # Errors
    /// [`Error::Shape`] if `routes` has another shape, [`Error::Operand`] if there are too many experts.
    pub fn record(rec: &mut Recorder, routes: &Tensor, n_experts: u32) -> Result<ExpertTiles, Error> {
        /// Rows of the tiles: of 16 x 256 outputs, or of 64 x 64 where experts have that many on average.
        const ROWS: [u32; 2] = [16, 64];
        const KERNEL: &str = "expert_tiles";
        let [n_tokens, n_used] = [0, 1].map(|i| routes.shape().get(i).copied().unwrap_or(0));
        routes.expect_shape(KERNEL, "routes", &[n_tokens, n_used, 2])?;
        if n_experts > MAX_EXPERTS + MAX_SHARED {
            return Err(Error::Operand {
                kernel: KERNEL,
                operand: "routes",
                expected: format!("up to {} experts", MAX_EXPERTS + MAX_SHARED),
                found: n_experts.to_string(),
            });
        }
        let n_slots = n_tokens.saturating_mul(n_used);
        let is_scalar = rec.target().tier() == Tier::Scalar;
        let tile_rows = ROWS[usize::from(!is_scalar && n_slots / n_experts.max(1) >= ROWS[1])];
        // Each expert has one tile at most that is not full.
        let n_tiles = n_slots / tile_rows + n_experts.min(n_slots);
        let slots = rec.temporary_words("slots", &[n_slots])?;
        let tiles = rec.temporary_words("tiles", &[n_tiles, 4])?;
        let params = ExpertTilesParams { n_slots, n_experts, tile_rows, n_tiles };
        let grid = fold(rec.target(), n_experts.div_ceil(expert_tiles::WG).into());
        rec.dispatch(&shaders::EXPERT_TILES, None, &[], params, &[routes, &slots, &tiles], grid)?;
        Ok(ExpertTiles { slots, tiles, tile_rows })
    }

    /// The slots in the order of their experts, `[T K]`, and the tiles, `[tiles, 4]`.
    pub fn tensors(&self) -> [&Tensor; 2] {
        [&self.slots, &self.tiles]
    }
}

/// A product by some experts, of the rows of all tokens that have them.
#[derive(Clone, Copy, Debug)]
pub struct ExpertProduct<'a> {
    /// `[N rows, K]`, an expert's rows in one slab.
    pub w: &'a Matrix,
    /// Rows of an expert.
    pub rows: u32,
    /// Number of its first expert; it has N.
    pub first_expert: u32,
    /// Of all experts, one for each column of `y`.
    pub bias: Option<&'a Tensor>,
    /// First column of `y` to write.
    pub y_start: u32,
}

impl ExpertProduct<'_> {
    /// Records `y[slot] = x[..] wᵀ (+ bias)` for the slots of the experts in `w`, with a dispatch for each slab of
    /// `w`. Shader: `shaders/expert_matmul.wgsl`.
    ///
    /// # Shapes
    /// `x`: `[T, K]`, a row for each token, or `[slots, K]`; K a multiple of 4; `y`: `[slots, y_start + rows]` or wider.
    /// # Errors
    /// [`Error::Shape`] if the operands disagree, [`Error::Operand`] if K is not a multiple of 4, a slab ends within
    /// an expert, or K is too long for the loops of the scalar tier.
    pub fn record(&self, rec: &mut Recorder, tiles: &ExpertTiles, x: &Tensor, y: &Tensor) -> Result<(), Error> {
        const KERNEL: &str = "expert_matmul";
        let (n_rows, dim) = (quads(KERNEL, x)?, self.w.cols());
        let (n_slots, [_, y_stride]) = (tiles.slots.len() as u32, y.dims2(KERNEL, "y")?);
        x.expect_shape(KERNEL, "x", &[n_rows, dim])?;
        y.expect_shape(KERNEL, "y", &[n_slots, y_stride.max(self.y_start.saturating_add(self.rows))])?;
        if n_rows == 0 || !n_slots.is_multiple_of(n_rows) {
            let (expected, found) = (format!("a divisor of {n_slots} rows"), n_rows.to_string());
            return Err(Error::Operand { kernel: KERNEL, operand: "x", expected, found });
        }
        expect_biases(KERNEL, self.bias, y_stride)?;
        let tier = rec.target().tier_for(&shaders::EXPERT_MATMUL, Some(self.w.weight()));
        let (cols, constants) = match (tier, tiles.tile_rows) {
            (Tier::Scalar, _) => {
                check_loop(rec.target(), KERNEL, u64::from(dim / 4), dim, "columns")?;
                (64, vec![])
            }
            (_, 16) => (256, vec![("TILE", 64.0), ("WIDTH", 64.0)]),
            _ => (64, vec![("TILE", 64.0)]),
        };
        let n_tiles = tiles.tiles.shape()[0];
        let n_groups = u64::from(n_tiles) * u64::from(self.rows.div_ceil(cols));
        for slab in self.w.slabs() {
            let experts = Experts::of(KERNEL, slab, self.first_expert, self.rows)?;
            for part in grid_parts(rec.target(), n_groups, operations(n_slots, self.rows, dim)) {
                let params = ExpertMatmulParams {
                    n_used: n_slots / n_rows,
                    n_out: self.rows,
                    dim,
                    blocks: self.w.blocks(),
                    w_scales: self.w.quants_words(slab),
                    y_start: self.y_start,
                    y_stride,
                    flags: set(&[(self.bias.is_some(), BIAS)]),
                    first_expert: experts.first,
                    n_experts: experts.n,
                    first_group: part.first,
                    n_tiles,
                };
                // A bias that is not there is never read; x is at hand.
                let operands = [&slab.words, self.bias.unwrap_or(x), x, &tiles.slots, &tiles.tiles, y];
                let (kernel, weight) = (&shaders::EXPERT_MATMUL, Some(self.w.weight()));
                rec.dispatch_as(tier, kernel, weight, &constants, params, &operands, part.grid)?;
            }
        }
        Ok(())
    }
}

/// Records `y[t] = (y[t] +)` the sum of `weight * x[t, s]` over the experts of each token. Shader:
/// `shaders/expert_sum.wgsl`.
///
/// # Shapes
/// `x`: `[T * K, C]`; `routes`: `[T, K, 2]`; `y`: `[T, C]`.
/// # Errors
/// [`Error::Shape`] if the operands disagree.
pub fn expert_sum(rec: &mut Recorder, x: &Tensor, routes: &Tensor, accumulate: bool, y: &Tensor) -> Result<(), Error> {
    let ([n_tokens, dim], n_used) = (y.dims2("expert_sum", "y")?, routes.shape().get(1).copied().unwrap_or(0));
    routes.expect_shape("expert_sum", "routes", &[n_tokens, n_used, 2])?;
    x.expect_shape("expert_sum", "x", &[n_tokens * n_used, dim])?;
    let params = ExpertSumParams { n_tokens, n_used, dim, flags: set(&[(accumulate, ACCUMULATE)]) };
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(256));
    rec.dispatch(&shaders::EXPERT_SUM, None, &[], params, &[x, routes, y], grid)
}
