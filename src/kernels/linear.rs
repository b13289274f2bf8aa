//! Matrix products.

use bytemuck::{Pod, Zeroable};

use super::{Activation, Gelu, LOOP_ROUNDS, check_loop, fold, grid_parts, rms_norm, tier_for};
use crate::dtype::{BLOCK, DType, WeightType};
use crate::error::Error;
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders::{self, Kernel, Tier};
use crate::target::{Bucket, Choice, Target};
use crate::tensor::Tensor;

/// Mirrors `Params` in `shaders/matmul.wgsl` and `shaders/matvec.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct LinearParams {
    pub n_tokens: u32,
    pub n_out: u32,
    pub dim: u32,
    pub blocks: u32,
    pub w_scales: u32,
    pub y_start: u32,
    pub y_stride: u32,
    pub flags: u32,
    pub eps: f32,
    pub split_blocks: u32,
    pub first_group: u32,
    pub _pad: u32,
}

/// Mirrors `Params` in `shaders/split_sum.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct SplitSumParams {
    pub n_tokens: u32,
    pub n_out: u32,
    pub n_splits: u32,
    pub y_start: u32,
    pub y_stride: u32,
    pub flags: u32,
    pub _pad: [u32; 2],
}

/// Flag: add the bias.
pub(crate) const BIAS: u32 = 1;
/// Flag: add to what `y` holds.
pub(crate) const ACCUMULATE: u32 = 2;
/// Flag of `rms_norm`: multiply by a factor.
pub(crate) const FACTOR: u32 = 4;
/// Flag: normalise `x`.
pub(crate) const NORM: u32 = 4;
/// Flag: apply GELU to the sum with its bias.
pub(crate) const GELU: u32 = 8;
/// Flag beside `GELU`: by the tanh formula.
pub(crate) const GELU_TANH: u32 = 16;

/// Flag: the gate of gpt-oss.
pub(crate) const CLAMPED: u32 = 256;

/// Flag, for the CPU: a row's result is the same for every number of rows.
pub(crate) const INVARIANT: u32 = 64;

/// Flag: apply the hyperbolic tangent to the sum with its bias.
pub(crate) const TANH: u32 = 128;

/// An RMSNorm in front of a product.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// `[K]`.
    pub weight: &'a Tensor,
    /// Added to the mean square.
    pub eps: f32,
}

/// Mirrors `Params` in `shaders/matmul_plain.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PlainParams {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub first_group: u32,
}

/// Tokens that an invocation of `matvec` and `gate_up` takes side by side, at most: a power of two.
const MAX_COLUMNS: u32 = 8;

/// A linear layer: `y = act(x wᵀ (+ bias))`, or added to what `y` holds.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `[N, K]`.
    pub w: &'a Matrix,
    /// One value for each column of `y`.
    pub bias: Option<&'a Tensor>,
    /// Normalises `x` first.
    pub norm: Option<Norm<'a>>,
    /// Applied to the product with its bias, where it is written; where K is split, by `split_sum`.
    pub activation: Option<Activation>,
    /// First column of `y` to write: several matrices can fill one `y` side by side.
    pub y_start: u32,
    /// Whether to add to `y` instead of overwriting it.
    pub accumulate: bool,
    /// Whether a row of `y` is to be the same to the last bit whatever rows `x` has beside it. [`matmul`] can, and
    /// [`linear_norm`](super::linear_norm): their tiles add up along K in one order on a GPU, unless K is split.
    pub batch_invariant: bool,
    /// Splits of K that `matmul` takes side by side on a GPU and adds up at the end, in their order: at most one for
    /// each block. `None`: as many as occupy the device where K is long and tiles are few. The `scalar` tier's own
    /// kernel has none.
    pub splits: Option<u32>,
}

impl<'a> Linear<'a> {
    /// `y = x wᵀ`.
    pub fn new(w: &'a Matrix) -> Self {
        Linear {
            w,
            bias: None,
            norm: None,
            activation: None,
            y_start: 0,
            accumulate: false,
            batch_invariant: false,
            splits: None,
        }
    }

    /// Records the product with whichever kernel suits the number of tokens: `matvec` for a few, else `matmul`. A norm
    /// is a kernel of its own where it does not pay to fold it in.
    ///
    /// # Shapes
    /// `x`: `[T, K]`; `y`: `[T, y_start + N]` or wider.
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees with `w`.
    pub fn record(&self, rec: &mut Recorder, x: &Tensor, y: &Tensor) -> Result<(), Error> {
        let (x, norm) = fold_norm(rec, x, self.norm, self.bias.is_some())?;
        let linear = Linear { norm, ..*self };
        if suits_few(rec.target(), &x) { matvec(rec, &linear, &x, y) } else { matmul(rec, &linear, &x, y) }
    }

    /// Refuses operands that disagree with `w`; `y` has the rows of as many splits.
    pub(super) fn check(&self, kernel: &Kernel, n_splits: u32, x: &Tensor, y: &Tensor) -> Result<(), Error> {
        let [n_tokens, _] = x.dims2(kernel.name, "x")?;
        x.expect_shape(kernel.name, "x", &[n_tokens, self.w.cols()])?;
        let [_, y_stride] = y.dims2(kernel.name, "y")?;
        let y_end = self.y_start.saturating_add(self.w.rows());
        y.expect_shape(kernel.name, "y", &[n_tokens.saturating_mul(n_splits), y_stride.max(y_end)])?;
        if let Some(bias) = self.bias {
            bias.expect_shape(kernel.name, "bias", &[y_stride])?;
        }
        if let Some(norm) = self.norm.filter(|_| kernel.name != shaders::MATVEC.name) {
            return Err(Error::Operand {
                kernel: kernel.name,
                operand: "norm",
                expected: "none: `matvec` alone takes one".into(),
                found: format!("`{}`", norm.weight.label()),
            });
        }
        Ok(())
    }

    /// Records one dispatch for each slab of `w`, or several; `grid` gives the workgroups for a number of rows of `w`: those
    /// that may be cut and folded, and how many are side by side in z.
    pub(crate) fn dispatch(
        &self,
        rec: &mut Recorder,
        way: &Way,
        x: &Tensor,
        y: &Tensor,
        grid: impl Fn(u32) -> (u64, u32),
    ) -> Result<(), Error> {
        let Way { tier, kernel, constants, n_splits } = way;
        self.check(kernel, *n_splits, x, y)?;
        let ([n_tokens, dim], [_, y_stride]) = (x.dims2(kernel.name, "x")?, y.dims2(kernel.name, "y")?);
        let vector = vector(kernel.name, self.norm, self.bias, dim)?;
        let flags = [
            (self.bias.is_some(), BIAS),
            (self.accumulate, ACCUMULATE),
            (self.norm.is_some(), NORM),
            (self.batch_invariant, INVARIANT),
        ];
        let (activation_flags, activation) = activated(self.activation);
        let constants = [constants, activation].concat();
        for slab in self.w.slabs() {
            let (n_groups, z) = grid(slab.rows);
            for part in grid_parts(rec.target(), n_groups, operations(n_tokens, slab.rows, dim)) {
                let params = LinearParams {
                    n_tokens,
                    n_out: slab.rows,
                    dim,
                    blocks: self.w.blocks(),
                    w_scales: self.w.quants_words(slab),
                    y_start: self.y_start + slab.first_row,
                    y_stride,
                    flags: set(&flags) | activation_flags,
                    eps: self.norm.map_or(0.0, |norm| norm.eps),
                    split_blocks: self.w.blocks().div_ceil(*n_splits),
                    first_group: part.first,
                    _pad: 0,
                };
                let [x_groups, y_groups, _] = part.grid;
                // A vector that is not there is never read; x is at hand.
                let operands = [&slab.words, vector.unwrap_or(x), x, y];
                rec.dispatch_as(
                    *tier,
                    kernel,
                    Some(self.w.weight()),
                    &constants,
                    params,
                    &operands,
                    [x_groups, y_groups, z],
                )?;
            }
        }
        Ok(())
    }
}

/// How a product is taken.
pub(crate) struct Way {
    pub tier: Tier,
    pub kernel: &'static Kernel,
    pub constants: Vec<(&'static str, f64)>,
    /// Splits of K, each with rows of its own in `y`.
    pub n_splits: u32,
}

/// The flags that are to be set.
pub(super) fn set(flags: &[(bool, u32)]) -> u32 {
    flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum()
}

/// The flags and the overrides that stand for an activation: the CPU's twins know no overrides.
pub(super) fn activated(activation: Option<Activation>) -> (u32, &'static [(&'static str, f64)]) {
    match activation {
        None => (0, &[]),
        Some(Activation::Gelu(Gelu::Exact)) => (GELU, &[("GELU", 1.0)]),
        Some(Activation::Gelu(Gelu::Tanh)) => (GELU | GELU_TANH, &[("GELU", 1.0), ("GELU_TANH", 1.0)]),
        Some(Activation::Tanh) => (TANH, &[("TANH", 1.0)]),
    }
}

/// Multiplications and additions of a product.
pub(super) fn operations(m: u32, n: u32, k: u32) -> u64 {
    2 * u64::from(m) * u64::from(n) * u64::from(k)
}

/// How `matmul` or `matmul_plain` takes a product.
struct Tiling {
    tier: Tier,
    constants: Vec<(&'static str, f64)>,
    /// Rows and columns of `y` that a workgroup makes.
    rows: u32,
    cols: u32,
}

impl Tiling {
    /// For `x` of `[m, k]` and `n` columns of `y`, where nothing was measured. The scalar kernels need operands whose rows
    /// are whole quads.
    fn usual(
        target: &Target,
        (kernel, weight): (&Kernel, Option<WeightType>),
        [m, n]: [u32; 2],
        is_whole: bool,
    ) -> Choice {
        /// Large tiles that occupy a large GPU; fewer of them would leave parts of it idle.
        const ENOUGH: u64 = 128;
        let tiled = |tier: Tier| {
            let [small, large] = tile_sizes(tier);
            let is_large = m > small && u64::from(m.div_ceil(large)) * u64::from(n.div_ceil(large)) >= ENOUGH;
            Choice { tier, size: if is_large { large } else { small } }
        };
        match target.tier_for(kernel, weight) {
            Tier::Scalar if is_whole => Choice { tier: Tier::Scalar, size: 1 },
            Tier::Scalar => tiled(Tier::Baseline),
            tier => tiled(tier),
        }
    }

    /// For `m` rows, so many columns of `y` in each dispatch, and rows of `x` that end where blocks do or before.
    fn new(
        target: &Target,
        Choice { tier, size }: Choice,
        m: u32,
        ends_with_block: bool,
        mut cols: impl Iterator<Item = u32>,
    ) -> Tiling {
        match tier {
            Tier::Scalar => Tiling { tier, constants: Vec::new(), rows: 16, cols: 64 },
            _ => {
                let covers = |n: u32| n.is_multiple_of(size);
                let is_exact = covers(m) && ends_with_block && cols.all(covers);
                let mut constants = vec![("TILE", f64::from(size)), ("GUARDED", f64::from(!is_exact))];
                constants.extend(tier.matrix_size().map(|_| ("SUBGROUP", f64::from(target.limits().max_subgroup))));
                Tiling { tier, constants, rows: size, cols: size }
            }
        }
    }

    /// Tiles of `y`.
    fn n_tiles(&self, m: u32, n: u32) -> u64 {
        u64::from(n.div_ceil(self.cols)) * u64::from(m.div_ceil(self.rows))
    }

    /// Splits of K: as many as were asked for, else what occupies the device if there are few tiles and K is long. From
    /// llama.cpp's Vulkan backend are the shortest K and the largest number of splits; no device was measured.
    fn splits(&self, target: &Target, linear: &Linear, m: u32) -> u32 {
        /// Fewer tiles leave half of a large GPU idle.
        const FEW: u32 = 64;
        const LONG: u32 = 2048;
        if !target.is_gpu() || self.tier == Tier::Scalar {
            return 1;
        }
        let n_tiles = u32::try_from(self.n_tiles(m, linear.w.rows())).unwrap_or(u32::MAX).max(1);
        let is_idle = linear.w.cols() >= LONG && n_tiles < FEW;
        let usual = if is_idle { (2 * FEW / n_tiles).min(target.limits().max_splits) } else { 1 };
        let blocks = linear.w.blocks();
        let wanted = if linear.batch_invariant { 1 } else { linear.splits.unwrap_or(usual).clamp(1, blocks) };
        // Each has whole blocks, so there may be fewer.
        blocks.div_ceil(blocks.div_ceil(wanted))
    }
}

/// Rows and columns of the small and the large tiles of a tier: of 64 or 128 elements, or of 4 or 8 matrices.
fn tile_sizes(tier: Tier) -> [u32; 2] {
    let large = tier.matrix_size().map_or(128, |size| 8 * size);
    [large / 2, large]
}

/// Rounds of a tile's loops over K: the scalar kernels walk it by quads, others by elements.
fn tile_rounds(tier: Tier, k: u32) -> u64 {
    let k = u64::from(k);
    if tier == Tier::Scalar { k / 4 + k / 32 } else { k + k / 8 }
}

/// Rounds of the loops over a row of `w`: one for each block and each of its eight quads.
fn rounds(w: &Matrix) -> u64 {
    9 * u64::from(w.blocks())
}

/// Records a tiled matrix product, and behind it [`split_sum`] if K is split. Shader: `shaders/matmul.wgsl`.
///
/// # Shapes
/// `x`: `[M, K]`; `y`: `[M, y_start + N]` or wider.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the weights, [`Error::Operand`] if there is a norm, or if the scalar
/// tier's loops cannot take so many columns.
pub fn matmul(rec: &mut Recorder, linear: &Linear, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let [n_tokens, dim] = x.dims2("matmul", "x")?;
    let kernel = &shaders::MATMUL;
    let choice = choice(rec.target(), kernel, linear.w, n_tokens);
    check_loop(rec.target(), kernel.name, tile_rounds(choice.tier, dim), dim, "columns")?;
    let rows_of_slabs = linear.w.slabs().iter().map(|slab| slab.rows);
    let tiling = Tiling::new(rec.target(), choice, n_tokens, ends_with_block(linear.w), rows_of_slabs);
    let n_splits = tiling.splits(rec.target(), linear, n_tokens);
    let way = Way { tier: tiling.tier, kernel, constants: tiling.constants.clone(), n_splits };
    let grid = |rows| (tiling.n_tiles(n_tokens, rows), n_splits);
    if n_splits == 1 {
        return linear.dispatch(rec, &way, x, y, grid);
    }
    linear.check(kernel, 1, x, y)?;
    let parts = rec.temporary("splits", &[n_tokens.saturating_mul(n_splits), linear.w.rows()])?;
    let part = Linear { bias: None, activation: None, y_start: 0, accumulate: false, ..*linear };
    part.dispatch(rec, &way, x, &parts, grid)?;
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
    let (activation_flags, constants) = activated(activation);
    let params = SplitSumParams {
        n_tokens,
        n_out,
        n_splits: rows / n_tokens,
        y_start,
        y_stride,
        flags: set(&flags) | activation_flags,
        _pad: [0; 2],
    };
    rec.dispatch(&shaders::SPLIT_SUM, None, constants, params, &[parts, vector, y], grid)
}

/// Records a matrix product for one token or a few. Shader: `shaders/matvec.wgsl`.
///
/// # Shapes
/// `x`: `[T, K]`, K a multiple of 4; `y`: `[T, y_start + N]` or wider.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the weights, [`Error::Operand`] if K is no multiple of 4 or there are
/// both a norm and a bias.
pub fn matvec(rec: &mut Recorder, linear: &Linear, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let n_tokens = quads("matvec", x)?;
    let (Choice { tier, size }, constants) = lanes(rec, &shaders::MATVEC, linear.w, linear.norm.is_some());
    let (n_runs, columns) = columns(n_tokens);
    let constants = constants.into_iter().chain(columns).collect();
    let grid = |rows: u32| (lanes_groups(rows, size), n_runs);
    linear.dispatch(rec, &Way { tier, kernel: &shaders::MATVEC, constants, n_splits: 1 }, x, y, grid)
}

/// Invocations of a workgroup of `matvec` and `gate_up`.
const WG: u32 = 64;

/// The tier in which `kernel` takes rows of `w`, how many invocations share four of them, and the overrides that say so.
pub(super) fn lanes(rec: &Recorder, kernel: &Kernel, w: &Matrix, norm: bool) -> (Choice, Vec<(&'static str, f64)>) {
    let choice = choice(rec.target(), kernel, w, 1);
    let lanes = (choice.tier != Tier::Scalar).then_some(("LANES", f64::from(choice.size)));
    let unguarded = ends_with_block(w).then_some(("GUARDED", 0.0));
    (choice, lanes.into_iter().chain(unguarded).chain(norm.then_some(("NORM", 1.0))).collect())
}

/// Whether the matrix has as many columns as its blocks have weights: super-blocks are longer than blocks.
fn ends_with_block(w: &Matrix) -> bool {
    u64::from(w.blocks()) * BLOCK as u64 == u64::from(w.cols())
}

/// Runs of so many tokens that share what is unpacked of the weights, and the override that says how many these are.
pub(super) fn columns(n_tokens: u32) -> (u32, Option<(&'static str, f64)>) {
    let columns = n_tokens.next_power_of_two().min(MAX_COLUMNS);
    (n_tokens.div_ceil(columns), (columns > 1).then_some(("COLUMNS", f64::from(columns))))
}

/// How `kernel` takes the product of so many tokens with `w`. The target's tuning comes first.
fn choice(target: &Target, kernel: &Kernel, w: &Matrix, n_tokens: u32) -> Choice {
    let tuned = target.tuning().choice(Bucket::of(kernel, w.weight(), [w.rows(), w.blocks(), n_tokens]));
    tuned.filter(|&choice| is_sound(target, kernel, w, choice)).unwrap_or_else(|| usual(target, kernel, w, n_tokens))
}

/// The choice where nothing was measured. In the `scalar` tier an invocation takes four rows alone, unless they are so
/// long that they must be shared.
pub(crate) fn usual(target: &Target, kernel: &Kernel, w: &Matrix, n_tokens: u32) -> Choice {
    if kernel.name == shaders::MATMUL.name {
        return Tiling::usual(target, (kernel, Some(w.weight())), [n_tokens, w.rows()], w.cols().is_multiple_of(4));
    }
    match tier_for(target, kernel, Some(w.weight()), rounds(w)) {
        Tier::Scalar => Choice { tier: Tier::Scalar, size: 1 },
        // As many invocations as there are blocks to share out.
        tier => Choice { tier, size: w.blocks().next_power_of_two().min(WG) },
    }
}

/// Whether the target has the choice's variant, and no invocation of it goes round its loops too often.
pub(crate) fn is_sound(target: &Target, kernel: &Kernel, w: &Matrix, choice: Choice) -> bool {
    let has_tier = match choice.tier {
        Tier::Baseline => true,
        Tier::Scalar => choice.size == 1 && w.cols().is_multiple_of(4),
        tier => target.tier().order().contains(&tier),
    };
    let variant = kernel.variant(Some(w.weight()), choice.tier).filter(|variant| variant.tier == choice.tier);
    let (has_size, rounds) = if kernel.name == shaders::MATMUL.name {
        let has_size = choice.tier == Tier::Scalar || tile_sizes(choice.tier).contains(&choice.size);
        (has_size, tile_rounds(choice.tier, w.cols()))
    } else {
        let has_size = choice.size.is_power_of_two() && choice.size <= WG;
        (has_size, rounds(w) / u64::from(choice.size.max(1)))
    };
    has_tier
        && has_size
        && variant.is_some_and(|variant| !target.is_banned(variant.label))
        && rounds <= u64::from(LOOP_ROUNDS)
}

/// The workgroups for `rows` rows of `w`, four to each `lanes` invocations; there are as many for each run of tokens, in z.
pub(super) fn lanes_groups(rows: u32, lanes: u32) -> u64 {
    const ROWS: u32 = 4;
    u64::from(rows.div_ceil(ROWS * WG / lanes))
}

/// The number of rows of `x`, whose elements come in fours.
pub(super) fn quads(kernel: &'static str, x: &Tensor) -> Result<u32, Error> {
    let [n_tokens, dim] = x.dims2(kernel, "x")?;
    if !dim.is_multiple_of(4) {
        return Err(Error::Operand {
            kernel,
            operand: "x",
            expected: "a multiple of 4 columns".into(),
            found: dim.to_string(),
        });
    }
    Ok(n_tokens)
}

/// The one vector beside the weights that a kernel has a binding for.
pub(super) fn vector<'a>(
    kernel: &'static str,
    norm: Option<Norm<'a>>,
    bias: Option<&'a Tensor>,
    dim: u32,
) -> Result<Option<&'a Tensor>, Error> {
    let error =
        |operand, expected: &str, found| Err(Error::Operand { kernel, operand, expected: expected.into(), found });
    let (operand, vector) = match (norm, bias) {
        (Some(_), Some(bias)) => return error("bias", "none together with a norm", format!("`{}`", bias.label())),
        (Some(norm), None) => {
            norm.weight.expect_shape(kernel, "norm", &[dim])?;
            ("norm", norm.weight)
        }
        (None, Some(bias)) => ("bias", bias),
        (None, None) => return Ok(None),
    };
    // The recorder would name the binding that the two share.
    match vector.dtype() {
        DType::F32 => Ok(Some(vector)),
        other => error(operand, "a tensor of F32", format!("one of {other:?}")),
    }
}

/// Whether it pays to fold a norm into a product: each invocation repeats it, which for more than two tokens is predicted
/// to take longer than a kernel of its own; nor where each would add up the squares of all of `x` by itself. A kernel takes a
/// norm or a bias.
pub(crate) fn folds_norm(rec: &Recorder, x: &Tensor, has_bias: bool) -> bool {
    let target = rec.target();
    suits_few(target, x) && x.shape()[0] <= 2 && !has_bias && target.tier() != Tier::Scalar
}

/// `x` and the norm for a kernel to fold in, or `x` normalised already where folding does not pay.
pub(crate) fn fold_norm<'a>(
    rec: &mut Recorder,
    x: &Tensor,
    norm: Option<Norm<'a>>,
    has_bias: bool,
) -> Result<(Tensor, Option<Norm<'a>>), Error> {
    let Some(Norm { weight, eps }) = norm else { return Ok((x.clone(), None)) };
    if folds_norm(rec, x, has_bias) {
        return Ok((x.clone(), norm));
    }
    let normed = rec.temporary("normed", x.shape())?;
    rms_norm(rec, x, weight, &normed, eps)?;
    Ok((normed, None))
}

/// Whether `x` has so few tokens that its products are with vectors: up to where a tile's reuse of weights outweighs the part
/// of it that lies idle. A second run of [`MAX_COLUMNS`] tokens reads and unpacks the weights again. With matrix units a
/// tile is predicted to take less than that, and so does one of 16 rows in the `scalar` tier; without, one of 64 rows takes
/// four times the instructions.
pub(crate) fn suits_few(target: &Target, x: &Tensor) -> bool {
    let has_small_tiles = !target.is_gpu() || target.tier() == Tier::Scalar || target.tier().matrix_size().is_some();
    let most = if has_small_tiles { MAX_COLUMNS } else { 2 * MAX_COLUMNS };
    matches!(*x.shape(), [n_tokens, dim] if n_tokens <= most && dim.is_multiple_of(4))
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
    let choice = Tiling::usual(rec.target(), (&shaders::MATMUL_PLAIN, None), [m, n], is_whole);
    check_loop(rec.target(), "matmul_plain", tile_rounds(choice.tier, k), k, "columns")?;
    let tiling = Tiling::new(rec.target(), choice, m, k.is_multiple_of(BLOCK as u32), std::iter::once(n));
    for part in grid_parts(rec.target(), tiling.n_tiles(m, n), operations(m, n, k)) {
        let params = PlainParams { m, n, k, first_group: part.first };
        let Tiling { tier, constants, .. } = &tiling;
        rec.dispatch_as(*tier, &shaders::MATMUL_PLAIN, None, constants, params, &[x, b, y], part.grid)?;
    }
    Ok(())
}
