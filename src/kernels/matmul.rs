//! Matrix products by tiles: the plan of a product, and the recorders that follow it.
//!
//! A plan chooses the kernel, its tile and the splits of K. Tiles have 128 x 128 or 64 x 64 outputs, and 32 x 128 or
//! 16 x 256 for 32 rows or fewer, because each tile unpacks its weights. A tile that covers its matrices exactly is
//! compiled without bounds checks (`GUARDED`). Where K is long and tiles are few, splits of K run side by side, and
//! `split_sum` adds them in order. Products that must have the same bits in every batch never change variant, and their
//! splits follow from the matrix alone.
//!
//! `matmul_half` reads `x` as `half_rows` leaves it: f16, padded to whole blocks, each row scaled by a power of two
//! if it leaves the range. So tiles copy rows and convert nothing, and all matrices with the same input share them.
//! Matrix units and plain lanes have the same staging and differ in one fragment, so any GPU with f16 tests most of
//! the matrix code. Tiles of matrices have further forms ([`TileForm`]), which the tuner measures; none is the usual one.
//!
//! Two drivers shape the shader. Matrices load from addresses that are multiples of 16 bytes: others are slow on AMD
//! and wrong on NVIDIA. Therefore `staged` is the first workgroup variable used (RADV places them in that order), and
//! every other variable takes a multiple of 16 bytes (NVIDIA places small ones first). In the native tiers workgroup
//! memory is not zeroed, so kernels write before they read.

use super::linear::{DispatchPlan, activated, operations, set, tuned, vector};
use super::{Activation, Input, Linear, check_loop, fold, grid_parts};
use crate::dtype::{BLOCK, WeightType};
use crate::error::Error;
use crate::recording::{BatchInvariance, Recorder};
use crate::shaders::constants::linear::{ACCUMULATE, BIAS};
use crate::shaders::params::{LinearParams, MatmulPlainParams, SplitSumParams};
use crate::shaders::{self, Id, Kernel, KernelOf, Tier};
use crate::target::{Choice, Target, TargetLimits, TileForm};
use crate::tensor::Tensor;

/// The part of `y` that a workgroup makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tile {
    rows: u32,
    cols: u32,
    /// Of the subgroups that share it, where they have matrices, how many are side by side.
    across: u32,
    /// How many these are.
    subgroups: u32,
    /// Steps along K whose operands are staged at a time.
    stages: u32,
}

impl Tile {
    /// Rows and columns in matrices, or in sixteens where there are none, and subgroups side by side.
    const SHAPES: [[u32; 3]; 4] = [[1, 16, 4], [2, 8, 4], [4, 4, 2], [8, 8, 2]];

    /// The tiles of a tier with barriers, from the fewest rows on.
    fn all(tier: Tier) -> impl DoubleEndedIterator<Item = Tile> + Clone {
        let side = tier.matrix_size().unwrap_or(16);
        let tile = move |[rows, cols, across]: [u32; 3]| Tile {
            rows: side * rows,
            cols: side * cols,
            across,
            subgroups: 4,
            stages: 1,
        };
        Tile::SHAPES.into_iter().map(tile)
    }

    /// The tile of a choice, which names it by its rows.
    pub fn of(Choice { tier, size, form }: Choice) -> Option<Tile> {
        let plain = Tile::all(tier).find(|tile| tile.rows == size);
        let side = match form {
            TileForm::Plain => return plain,
            _ => tier.matrix_size()?,
        };
        match (form, size / side) {
            (TileForm::Plain, _) => plain,
            (TileForm::TwoStages, _) => plain.map(|tile| Tile { stages: 2, ..tile }),
            (TileForm::EightSubgroups, 8) => plain.map(|tile| Tile { across: 4, subgroups: 8, ..tile }),
            (TileForm::EightSubgroups, 16) => {
                let [rows, cols] = [16, 8].map(|n| n * side);
                Some(Tile { rows, cols, across: 2, subgroups: 8, stages: 1 })
            }
            (TileForm::EightSubgroups, _) => None,
        }
    }

    /// Whether a workgroup of the target has the memory and the invocations. Plain tiles suit all targets of a tier.
    pub fn fits(&self, target: &Target, tier: Tier) -> bool {
        if self.stages == 1 && self.subgroups == 4 {
            return true;
        }
        let TargetLimits { max_subgroup, max_workgroup_bytes, .. } = target.limits();
        let side = tier.matrix_size().unwrap_or(16);
        self.subgroups * max_subgroup <= 256 && max_workgroup_bytes >= self.bytes(side, STEP)
    }

    /// Bytes of workgroup memory with matrices of `side` x `side`, where `depth` elements along K are staged at a time.
    fn bytes(&self, side: u32, depth: u32) -> u32 {
        // Rows are 16 bytes apart; behind them is what sums go through, and two variables of 16 bytes.
        self.stages * (self.rows + self.cols) * (2 * depth + 16) + 4 * self.subgroups * side * side + 32
    }

    /// How many cover `m` rows and `n` columns.
    fn n_tiles(&self, m: u32, n: u32) -> u64 {
        u64::from(n.div_ceil(self.cols)) * u64::from(m.div_ceil(self.rows))
    }

    fn covers(&self, m: u32, mut cols: impl Iterator<Item = u32>) -> bool {
        m.is_multiple_of(self.rows) && cols.all(|n| n.is_multiple_of(self.cols))
    }

    /// Elements along K that matrices' operands are staged of at a time, where `blocks` blocks are multiplied in one go: twice
    /// as many took 0.8 of the time on an H100, where a workgroup has the memory and an invocation the registers.
    fn depth(&self, target: &Target, tier: Tier, blocks: u32) -> u32 {
        const DEEP: u32 = 2 * STEP;
        // Subgroups read a step ahead, and have room for as many rows of either operand as they have invocations.
        let most = self.subgroups * target.limits().max_subgroup;
        let has_room = target.limits().max_workgroup_bytes >= self.bytes(16, DEEP) && self.rows.max(self.cols) <= most;
        let is_whole = (blocks * BLOCK as u32).is_multiple_of(DEEP);
        let is_deep = tier == Tier::Matrix16 && self.stages == 1 && has_room && is_whole;
        if is_deep { DEEP } else { STEP }
    }

    /// The overrides that say so; `blocks` are those that a workgroup takes along K.
    fn constants(&self, target: &Target, tier: Tier, is_exact: bool, blocks: u32) -> Vec<(&'static str, f64)> {
        let mut constants: Vec<(&'static str, u32)> = match (tier, self.rows) {
            (Tier::Baseline, 16) => vec![("TILE", 64), ("WIDTH", 64)],
            (Tier::Baseline, 32) => vec![("TILE", 64), ("WIDTH", 32)],
            (Tier::Baseline, rows) => vec![("TILE", rows)],
            _ => vec![("ROWS", self.rows), ("COLS", self.cols)],
        };
        constants.push(("GUARDED", u32::from(!is_exact)));
        if tier.matrix_size().is_some() {
            let TargetLimits { min_subgroup, max_subgroup, .. } = target.limits();
            constants.extend([("MIN_SUBGROUP", min_subgroup), ("SUBGROUP", max_subgroup), ("ACROSS", self.across)]);
            constants.push(("DEPTH", self.depth(target, tier, blocks)));
            let further = [("SUBGROUPS", self.subgroups, 4), ("STAGES", self.stages, 1)];
            constants.extend(further.iter().filter(|(_, n, usual)| n != usual).map(|&(name, n, _)| (name, n)));
        }
        constants.into_iter().map(|(name, value)| (name, f64::from(value))).collect()
    }
}

/// Elements along K that are staged at a time.
const STEP: u32 = 32;

/// Whether a kernel's choices are of tiles.
pub(crate) fn is_tiled(kernel: &Kernel) -> bool {
    [Id::Matmul, Id::MatmulHalf].contains(&kernel.id)
}

/// The kernel that takes products of many rows with `w`: in half precision where the target rounds, unless weights are of
/// 32 bits or the product keeps its precision.
pub(crate) fn product_kernel(
    target: &Target,
    &Linear { w, full_precision, .. }: &Linear,
) -> &'static KernelOf<LinearParams> {
    let has = |kernel, weight| target.tier_for(kernel, weight).rounds_to_half();
    let weight = w.weight().layout();
    let rounds = !full_precision
        && weight != WeightType::F32
        && w.cols().is_multiple_of(4)
        && has(&shaders::MATMUL_HALF, Some(weight))
        && has(&shaders::HALF_ROWS, None);
    if rounds { &shaders::MATMUL_HALF } else { &shaders::MATMUL }
}

/// Tiles that keep a large GPU busy; fewer would leave parts of it idle.
const ENOUGH: u64 = 96;
/// Columns of a K that is split where there are not enough tiles.
const LONG: u32 = 4096;
/// Workgroups that an H100 holds of the tiles of a matrix: two on each of 132 cores.
const RESIDENT: u32 = 264;
/// Columns of a split at least, where the number of rows does not matter: writing and reading the sums of many rows must
/// stay cheap next to their products.
const SPLIT_COLUMNS: u32 = 2048;

/// The choice for `[m, n, k]` where nothing was measured: of the tiles that are no higher than rows need, the largest that
/// there are enough of, or will be once K is split. The scalar kernels need operands whose rows are whole quads.
pub(super) fn usual_tile(
    target: &Target,
    (kernel, weight): (&Kernel, Option<WeightType>),
    [m, n, k]: [u32; 3],
    is_whole: bool,
) -> Choice {
    let tier = match target.tier_for(kernel, weight) {
        Tier::Scalar if is_whole => return Choice::new(Tier::Scalar, 1),
        Tier::Scalar => Tier::Baseline,
        tier => tier,
    };
    let splits = if k >= LONG { u64::from(target.limits().max_splits) } else { 1 };
    let has_enough = |tile: &Tile| tile.n_tiles(m, n) * splits.min(4) >= ENOUGH;
    let mut tiles = Tile::all(tier).rev();
    let (large, small) = (tiles.next(), tiles.next());
    let fits = |tile: &Tile| tile.rows >= m;
    let tile = match (large, small) {
        (Some(large), Some(small)) if m > small.rows && has_enough(&large) => Some(large),
        // Lower ones are wider: rows of `y` that are shared out among several would each have the weights unpacked again.
        (_, small) => tiles.rev().find(fits).or(small),
    };
    Choice::new(tier, tile.map_or(1, |tile| tile.rows))
}

/// Rounds of a tile's loops over K: the scalar kernels walk it by quads, others by elements.
pub(super) fn tile_rounds(tier: Tier, k: u32) -> u64 {
    let k = u64::from(k);
    if tier == Tier::Scalar { k / 4 + k / 32 } else { k + k / 8 }
}

/// How a product of many rows is taken.
struct ProductPlan {
    kernel: &'static KernelOf<LinearParams>,
    tier: Tier,
    constants: Vec<(&'static str, f64)>,
    /// `None`: 16 rows and 64 columns by invocations that stand alone.
    tile: Option<Tile>,
    /// Blocks of a split along K.
    split_blocks: u32,
}

impl ProductPlan {
    /// Rows and columns of a workgroup in the `scalar` tier.
    const SCALAR: Tile = Tile { rows: 16, cols: 64, across: 1, subgroups: 1, stages: 1 };

    /// For `m` rows of `x`, and rows of `y` as long as that.
    fn new(target: &Target, linear: &Linear, m: u32, y_stride: u32) -> ProductPlan {
        let w = linear.w;
        let kernel = product_kernel(target, linear);
        // The splits of what is to be the same for any number of rows do not follow the tiles.
        let k = if linear.batch_invariant { 0 } else { w.cols() };
        let usual = || usual_tile(target, (kernel, Some(w.weight())), [m, w.rows(), k], w.cols().is_multiple_of(4));
        // Variants add up in other orders: what is to be the same for any number of rows has the usual one.
        let is_same = |choice: &Choice| !linear.batch_invariant || choice.tier == usual().tier;
        let choice = tuned(target, kernel, w, m).filter(is_same).unwrap_or_else(usual);
        let tile = Tile::of(choice);
        let mut plan =
            ProductPlan { kernel, tier: choice.tier, constants: Vec::new(), tile, split_blocks: w.blocks().max(1) };
        plan.split_blocks = plan.split_blocks(target, linear, m);
        if let Some(tile) = tile {
            // Splits have rows of their own, which are as long as those of `w` are many.
            let is_split = plan.split_blocks < w.blocks();
            let (stride, start) = if is_split { (w.rows(), 0) } else { (y_stride, linear.y_start) };
            let is_aligned = [stride, start].iter().all(|n| n.is_multiple_of(4));
            // Rows in half precision end with zeros; others may end amid a block, as super-blocks are longer than blocks.
            let is_whole = match kernel.id == Id::MatmulHalf {
                true => is_aligned,
                false => w.is_whole_blocks(),
            };
            let is_exact = is_whole && tile.covers(m, w.slabs().iter().map(|slab| slab.rows));
            // Splits must not end amid a deep step.
            let blocks = if w.blocks().is_multiple_of(2) { plan.split_blocks } else { 1 };
            plan.constants = tile.constants(target, choice.tier, is_exact, blocks);
        }
        plan
    }

    fn tile(&self) -> Tile {
        self.tile.unwrap_or(ProductPlan::SCALAR)
    }

    /// Blocks of each split of K: of as many splits as were asked for, else of what occupies the device if there are few
    /// tiles and K is long. From llama.cpp's Vulkan backend is the largest number of splits; no device was measured.
    fn split_blocks(&self, target: &Target, linear: &Linear, m: u32) -> u32 {
        let blocks = linear.w.blocks().max(1);
        if !target.is_gpu() || self.tile.is_none() {
            return blocks;
        }
        let (n, k) = (linear.w.rows(), linear.w.cols());
        let max_splits = target.limits().max_splits;
        let usual = if linear.batch_invariant {
            // By the matrix alone.
            RESIDENT.div_ceil(n.div_ceil(64).max(1)).min(k / SPLIT_COLUMNS)
        } else {
            let n_tiles = self.tile().n_tiles(m, n).max(1);
            let enough = u32::try_from((2 * ENOUGH).div_ceil(n_tiles)).unwrap_or(u32::MAX);
            if k >= LONG && n_tiles < ENOUGH { enough } else { 1 }
        };
        // Each has whole blocks, so there may be fewer.
        match linear.splits.filter(|_| !linear.batch_invariant) {
            Some(splits) => blocks.div_ceil(splits.clamp(1, blocks)),
            // And whole super-blocks, which deep steps divide.
            None => blocks.div_ceil(usual.clamp(1, max_splits)).next_multiple_of(8).min(blocks),
        }
    }

    fn n_splits(&self, linear: &Linear) -> u32 {
        linear.w.blocks().div_ceil(self.split_blocks).max(1)
    }

    /// Records the dispatches of `linear`.
    fn record(&self, rec: &mut Recorder, linear: &Linear, input: &mut Input<'_>, y: &Tensor) -> Result<(), Error> {
        let &ProductPlan { kernel, tier, split_blocks, .. } = self;
        let [m, _] = input.dims(kernel.name)?;
        let plan = DispatchPlan { tier, kernel, constants: self.constants.clone(), split_blocks: Some(split_blocks) };
        let n_splits = self.n_splits(linear);
        let grid = |rows| (self.tile().n_tiles(m, rows), n_splits);
        if kernel.id == Id::MatmulHalf {
            let half = input.half(rec)?;
            linear.dispatch(rec, &plan, &[&half.rows, &half.inverse], y, grid)
        } else {
            let x = input.rows(rec)?;
            linear.dispatch(rec, &plan, &[&x], y, grid)
        }
    }
}

/// Records a tiled matrix product, and behind it [`split_sum`] if K is split. Shaders: `shaders/matmul.wgsl`, or
/// `shaders/matmul_half.wgsl` where the target rounds to half precision.
///
/// # Shapes
/// `x`: `[M, K]`; `y`: `[M, y_start + N]` or wider.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the weights, [`Error::Operand`] if there is a norm, or if the scalar
/// tier's loops cannot take so many columns.
pub fn matmul(rec: &mut Recorder, linear: &Linear, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    matmul_input(rec, linear, &mut Input::new(x), y)
}

/// As [`matmul`], of an input that other products may share.
///
/// # Errors
/// As [`matmul`].
pub(crate) fn matmul_input(
    rec: &mut Recorder,
    linear: &Linear,
    input: &mut Input<'_>,
    y: &Tensor,
) -> Result<(), Error> {
    let [m, dim] = input.dims("matmul")?;
    let [_, y_stride] = y.dims2("matmul", "y")?;
    let is_invariant = linear.batch_invariant || rec.batch_invariance() != BatchInvariance::Off;
    let plan = ProductPlan::new(rec.target(), &Linear { batch_invariant: is_invariant, ..*linear }, m, y_stride);
    let kernel = plan.kernel;
    input.expect_dim(kernel.name, linear.w.cols())?;
    check_loop(rec.target(), kernel.name, tile_rounds(plan.tier, dim), dim, "columns")?;
    linear.check(kernel, m, y)?;
    let n_splits = plan.n_splits(linear);
    if n_splits == 1 {
        return plan.record(rec, linear, input, y);
    }
    let parts = rec.temporary("splits", &[m.saturating_mul(n_splits), linear.w.rows()])?;
    let part = Linear { bias: None, activation: None, y_start: 0, accumulate: false, ..*linear };
    plan.record(rec, &part, input, &parts)?;
    split_sum(rec, &parts, linear.bias, linear.activation, linear.y_start, linear.accumulate, y)
}

/// Records the sum of a product's splits, one after the other, with its bias and activation. Shader: `shaders/split_sum.wgsl`.
///
/// # Shapes
/// `parts`: `[S M, N]`, a split's rows after those of the one before; `bias`: one value for each column of `y`; `y`:
/// `[M, y_start + N]` or wider.
/// # Errors
/// [`Error::Shape`] if `bias` or `y` disagrees with `parts`, [`Error::Operand`] if `parts` has no multiple of M rows.
pub fn split_sum(
    rec: &mut Recorder,
    parts: &Tensor,
    bias: Option<&Tensor>,
    activation: Option<Activation>,
    y_start: u32,
    accumulate: bool,
    y: &Tensor,
) -> Result<(), Error> {
    let kernel = shaders::SPLIT_SUM.name;
    let ([rows, n_out], [n_tokens, y_stride]) = (parts.dims2(kernel, "parts")?, y.dims2(kernel, "y")?);
    y.expect_shape(kernel, "y", &[n_tokens, y_stride.max(y_start.saturating_add(n_out))])?;
    if !rows.is_multiple_of(n_tokens) {
        let (expected, found) = (format!("a multiple of {n_tokens} rows"), rows.to_string());
        return Err(Error::Operand { kernel, operand: "parts", expected, found });
    }
    if let Some(bias) = bias {
        bias.expect_shape(kernel, "bias", &[y_stride])?;
    }
    let vector = vector(kernel, None, bias, n_out)?.unwrap_or(parts);
    let grid = fold(rec.target(), (u64::from(n_tokens) * u64::from(n_out)).div_ceil(256));
    let flags = [(bias.is_some(), BIAS), (accumulate, ACCUMULATE)];
    let params = SplitSumParams { n_tokens, n_out, n_splits: rows / n_tokens, y_start, y_stride, flags: set(&flags) };
    rec.dispatch(&shaders::SPLIT_SUM, None, activated(activation), params, &[parts, vector, y], grid)
}

/// Records `y = x b` of two plain matrices. Shader: `shaders/matmul_plain.wgsl`.
///
/// # Shapes
/// `x`: `[M, K]`; `b`: `[K, N]`; `y`: `[M, N]`.
/// # Errors
/// [`Error::Shape`] if `b` or `y` disagrees with `x`, [`Error::Operand`] if the scalar tier's loops cannot take so many
/// columns.
pub fn matmul_plain(rec: &mut Recorder, x: &Tensor, b: &Tensor, y: &Tensor) -> Result<(), Error> {
    let [m, k] = x.dims2("matmul_plain", "x")?;
    let [_, n] = b.dims2("matmul_plain", "b")?;
    b.expect_shape("matmul_plain", "b", &[k, n])?;
    y.expect_shape("matmul_plain", "y", &[m, n])?;
    let is_whole = k.is_multiple_of(4) && n.is_multiple_of(4);
    let kernel = &shaders::MATMUL_PLAIN;
    let choice = usual_tile(rec.target(), (kernel, None), [m, n, 0], is_whole);
    check_loop(rec.target(), kernel.name, tile_rounds(choice.tier, k), k, "columns")?;
    let tile = Tile::of(choice);
    let constants = tile.map(|tile| {
        let is_exact = k.is_multiple_of(BLOCK as u32) && tile.covers(m, std::iter::once(n));
        tile.constants(rec.target(), choice.tier, is_exact, 1)
    });
    let n_tiles = tile.unwrap_or(ProductPlan::SCALAR).n_tiles(m, n);
    for part in grid_parts(rec.target(), n_tiles, operations(m, n, k)) {
        let params = MatmulPlainParams { m, n, k, first_group: part.first };
        let constants = constants.as_deref().unwrap_or_default();
        rec.dispatch_as(choice.tier, kernel, None, constants, params, &[x, b, y], part.grid)?;
    }
    Ok(())
}
