//! Linear layers: what a product is, and how it is taken for one token or a few.
//!
//! `matvec` and `gate_up` take up to eight tokens with one pass over the weights. `COLUMNS` is the smallest of 1, 2,
//! 4 and 8 that covers them: an invocation unpacks a weight once and multiplies it with all of them. Larger passes,
//! and passes of eight where matrices are 8 x 8 or the tier is `scalar`, use the tiles of `matmul.rs`.
//!
//! - For one token, invocations have whole blocks of the weights, or 16 bytes of a block that is nothing but weights,
//!   and the workgroup first puts `x` (normalised, if there is a norm) into workgroup memory, with neighbours' quads side
//!   by side. Reading `x` where it lies would touch a cache line per invocation.
//! - For several tokens there is more of `x` than of the weights to read, so four neighbours share a block.
//! - A folded norm costs no dispatch: its factor is the same for all rows, so the loop over `x` also sums the squares
//!   and scales the sums at the end. There is one binding for a norm's weight or a bias, since WebGPU guarantees
//!   eight; with a bias the norm is a kernel of its own.
//! - The `scalar` tier takes one token at a time, because its sums of several were less exact.
//! - A dispatch that could run too long is cut (`Target::max_dispatch_operations`).

use bytemuck::Pod;

use super::matmul::{Tile, is_tiled, matmul_input, tile_rounds, usual_tile};
use super::{Activation, Gelu, Input, LOOP_ROUNDS, grid_parts, rms_norm, tier_for};
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::matrix::Matrix;
use crate::recording::{BatchInvariance, Recorder};
use crate::shaders::constants::linear::{ACCUMULATE, BIAS};
use crate::shaders::constants::linear_norm::SHIFT;
use crate::shaders::params::LinearParams;
use crate::shaders::{self, Kernel, KernelOf, Tier};
use crate::target::{Bucket, Choice, Target, TileForm};
use crate::tensor::Tensor;

/// Flag for the CPU alone: a row's result is the same for every number of rows.
pub(crate) const INVARIANT: u32 = 1 << 16;
const _: () = assert!((BIAS | ACCUMULATE | SHIFT) & INVARIANT == 0, "it is no flag of a shader's");

/// An RMSNorm in front of a product.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// `[K]`.
    pub weight: &'a Tensor,
    /// Added to the mean square.
    pub eps: f32,
}

/// Tokens whose products an invocation of `matvec` or `gate_up` takes side by side at most: as many as its registers hold
/// sums of.
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
    /// Applied to the product plus bias as it is written, or by `split_sum` if K is split.
    pub activation: Option<Activation>,
    /// First column of `y` to write: several matrices can fill one `y` side by side.
    pub y_start: u32,
    /// Whether to add to `y` instead of overwriting it.
    pub accumulate: bool,
    /// Whether a row of `y` is to be the same to the last bit whatever rows `x` has beside it.
    /// [`matmul`](fn@super::matmul) can, and
    /// [`linear_norm`](super::linear_norm): their tiles add up along K in one order on a GPU, and splits of K follow from
    /// `w` alone.
    pub batch_invariant: bool,
    /// Splits of K that `matmul` takes side by side on a GPU and adds up at the end, in their order: at most one for
    /// each block. `None`: as many as occupy the device where K is long and tiles are few. The `scalar` tier's own
    /// kernel has none.
    pub splits: Option<u32>,
    /// Whether the operands keep their precision on a GPU whose tier rounds them to half.
    pub full_precision: bool,
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
            full_precision: false,
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
        self.record_input(rec, &mut Input::normed(x, self.norm), y)
    }

    /// As [`Linear::record`] of an input that other products may share; the norm is the input's.
    ///
    /// # Errors
    /// As [`Linear::record`].
    pub fn record_input(&self, rec: &mut Recorder, input: &mut Input<'_>, y: &Tensor) -> Result<(), Error> {
        match input.folded(rec, self.bias.is_some())? {
            Some((x, norm)) => matvec(rec, &Linear { norm, ..*self }, &x, y),
            None => matmul_input(rec, &Linear { norm: None, ..*self }, input, y),
        }
    }

    /// Refuses a `y` of other than `n_rows` rows or too few columns, and what the kernel cannot take.
    pub(super) fn check(&self, kernel: &Kernel, n_rows: u32, y: &Tensor) -> Result<(), Error> {
        let [_, y_stride] = y.dims2(kernel.name, "y")?;
        let y_end = self.y_start.saturating_add(self.w.rows());
        y.expect_shape(kernel.name, "y", &[n_rows, y_stride.max(y_end)])?;
        if let Some(bias) = self.bias {
            bias.expect_shape(kernel.name, "bias", &[y_stride])?;
        }
        // `matvec`, with what an adapter adds or without.
        if let Some(norm) = self.norm.filter(|_| !kernel.name.starts_with(shaders::MATVEC.name)) {
            return Err(Error::Operand {
                kernel: kernel.name,
                operand: "norm",
                expected: "none: `matvec` alone takes one".into(),
                found: format!("`{}`", norm.weight.label()),
            });
        }
        Ok(())
    }

    /// Records one dispatch for each slab of `w`, or several, with what the kernel has of `x` as `inputs`, its rows first;
    /// `grid` gives the workgroups for a number of rows of `w`: those that may be cut and folded, and how many are side by
    /// side in z.
    pub(crate) fn dispatch(
        &self,
        rec: &mut Recorder,
        plan: &DispatchPlan,
        inputs: &[&Tensor],
        y: &Tensor,
        grid: impl Fn(u32) -> (u64, u32),
    ) -> Result<(), Error> {
        self.dispatch_with(rec, plan, inputs, y, grid, |params| params)
    }

    /// As [`Linear::dispatch`], of a kernel whose params have something after these.
    pub(super) fn dispatch_with<P: Pod>(
        &self,
        rec: &mut Recorder,
        plan: &DispatchPlan<P>,
        inputs: &[&Tensor],
        y: &Tensor,
        grid: impl Fn(u32) -> (u64, u32),
        with: impl Fn(LinearParams) -> P,
    ) -> Result<(), Error> {
        let DispatchPlan { tier, kernel, constants, split_blocks } = plan;
        let split_blocks = split_blocks.unwrap_or_else(|| self.w.blocks());
        let x = inputs[0];
        let ([n_tokens, dim], [_, y_stride]) = (x.dims2(kernel.name, "x")?, y.dims2(kernel.name, "y")?);
        let n_splits = self.w.blocks().div_ceil(split_blocks.max(1)).max(1);
        self.check(kernel, n_tokens.saturating_mul(n_splits), y)?;
        let vector = vector(kernel.name, self.norm, self.bias, dim)?;
        let flags = [(self.bias.is_some(), BIAS), (self.accumulate, ACCUMULATE), (self.batch_invariant, INVARIANT)];
        let constants = [constants, activated(self.activation)].concat();
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
                    flags: set(&flags),
                    eps: self.norm.map_or(0.0, |norm| norm.eps),
                    split_blocks,
                    first_group: part.first,
                };
                let [x_groups, y_groups, _] = part.grid;
                // A vector that is not there is never read; some tensor of F32 is at hand.
                let unused = inputs.last().copied().unwrap_or(x);
                let operands = [&[&slab.words, vector.unwrap_or(unused)], inputs, &[y]].concat();
                rec.dispatch_as(
                    *tier,
                    kernel,
                    Some(self.w.weight()),
                    &constants,
                    with(params),
                    &operands,
                    [x_groups, y_groups, z],
                )?;
            }
        }
        Ok(())
    }
}

/// How a product is taken.
pub(crate) struct DispatchPlan<P: 'static = LinearParams> {
    pub tier: Tier,
    pub kernel: &'static KernelOf<P>,
    pub constants: Vec<(&'static str, f64)>,
    /// Blocks of a split along K, each with rows of its own in `y`; `None`: there are no splits.
    pub split_blocks: Option<u32>,
}

/// The flags that are to be set.
pub(super) fn set(flags: &[(bool, u32)]) -> u32 {
    flags.iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum()
}

/// The overrides that stand for an activation.
pub(super) fn activated(activation: Option<Activation>) -> &'static [(&'static str, f64)] {
    match activation {
        None => &[],
        Some(Activation::Gelu(Gelu::Exact)) => &[("GELU", 1.0)],
        Some(Activation::Gelu(Gelu::Tanh)) => &[("GELU", 1.0), ("GELU_TANH", 1.0)],
        Some(Activation::Gelu(Gelu::Quick)) => &[("GELU", 1.0), ("GELU_QUICK", 1.0)],
        Some(Activation::Tanh) => &[("TANH", 1.0)],
    }
}

/// Multiplications and additions of a product.
pub(super) fn operations(m: u32, n: u32, k: u32) -> u64 {
    2 * u64::from(m) * u64::from(n) * u64::from(k)
}

/// Rounds of the loops over a row of `w`: one for each block and each of its eight quads.
fn rounds(w: &Matrix) -> u64 {
    9 * u64::from(w.blocks())
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
    let lanes = MatvecPlan::new(rec, &shaders::MATVEC, linear.w, n_tokens);
    let (tier, constants) = (lanes.tier, lanes.constants(linear.norm.is_some()));
    let grid = |rows: u32| (lanes.groups(rows), lanes.parts(n_tokens));
    x.expect_shape("matvec", "x", &[n_tokens, linear.w.cols()])?;
    linear.dispatch(rec, &DispatchPlan { tier, kernel: &shaders::MATVEC, constants, split_blocks: None }, &[x], y, grid)
}

/// Invocations that share rows at most.
const MAX_LANES: u32 = 64;
/// Invocations of a workgroup of `matvec` and `gate_up`.
const WG: u32 = 64;
/// The same with one column: twice as many rows share what the workgroup reads of `x`, for which an H100 took 0.87 to 0.93 of
/// the time. More columns would have too much memory between them.
const WIDE_WG: u32 = 128;
/// Rows that invocations share.
const ROWS: u32 = 4;
/// Invocations that share rows at least: they read 128 bytes of a row side by side.
const LEAST_LANES: u32 = 8;
/// Invocations that keep a large GPU reading: 132 cores, of an H100, have as many with a quarter of their places.
const BUSY: u32 = 65_536;

/// How a product with a few tokens is shared out.
pub(super) struct MatvecPlan {
    pub tier: Tier,
    /// Invocations that share four rows of the matrix.
    n: u32,
    /// Tokens that they take side by side.
    columns: u32,
    /// Loads of 16 bytes that hold the weights of a block and nothing else; 1 for other blocks.
    parts: u32,
    /// Whether blocks of a row go past its end.
    ragged: bool,
}

impl MatvecPlan {
    /// How `kernel` takes the product of so many tokens with `w`: the fewest columns that cover them. Each of the
    /// invocations that share rows ends with the sums of one column, so there are no fewer of them. In the `scalar` tier
    /// there is one column: an invocation that adds up all of K by itself would add up several one product at a time.
    pub fn new(rec: &Recorder, kernel: &Kernel, w: &Matrix, n_tokens: u32) -> MatvecPlan {
        MatvecPlan::as_of(rec, kernel, kernel, w, n_tokens)
    }

    /// As [`Lanes::new`], by what was measured of another kernel, `like`, where nothing was of this one.
    pub fn as_of(rec: &Recorder, kernel: &Kernel, like: &Kernel, w: &Matrix, n_tokens: u32) -> MatvecPlan {
        let target = rec.target();
        let known = [kernel, like].into_iter().find_map(|of| {
            let choice = target.tuning().choice(Bucket::of(of, w.weight(), [w.tuned_rows(), w.blocks(), 1]));
            choice.filter(|&choice| is_sound(target, kernel, w, choice))
        });
        let Choice { tier, size, .. } = known.unwrap_or_else(|| usual(target, kernel, w, 1));
        let ragged = !w.is_whole_blocks();
        let parts = match w.weight().layout() {
            WeightType::F32 => 8,
            WeightType::F16 | WeightType::BF16 => 4,
            _ => 1,
        };
        let most_columns = match rec.batch_invariance() {
            BatchInvariance::Few { columns } => columns,
            _ => n_tokens,
        };
        match (tier, most_columns.clamp(1, MAX_COLUMNS).next_power_of_two()) {
            (Tier::Scalar, _) => MatvecPlan { tier, n: 1, columns: 1, parts: 1, ragged },
            (_, columns) => MatvecPlan { tier, n: size.max(columns), columns, parts, ragged },
        }
    }

    /// The overrides that say so.
    pub fn constants(&self, norm: bool) -> Vec<(&'static str, f64)> {
        let lanes = (self.tier != Tier::Scalar).then_some(("LANES", f64::from(self.n)));
        let wide = (self.invocations() != WG).then_some(("WG", f64::from(WIDE_WG)));
        // Several columns are taken by quads, so they need not know.
        let columns = match self.columns {
            1 => self.ragged.then_some(("RAGGED", 1.0)),
            columns => Some(("COLUMNS", f64::from(columns))),
        };
        let parts = (self.columns == 1 && self.parts > 1).then_some(("PARTS", f64::from(self.parts)));
        lanes.into_iter().chain(wide).chain(columns).chain(parts).chain(norm.then_some(("NORM", 1.0))).collect()
    }

    /// Invocations of a workgroup.
    fn invocations(&self) -> u32 {
        if self.columns == 1 && self.tier != Tier::Scalar { WIDE_WG } else { WG }
    }

    /// The workgroups for `rows` rows of a matrix, four to each `n` invocations.
    pub fn groups(&self, rows: u32) -> u64 {
        u64::from(rows.div_ceil(ROWS * self.invocations() / self.n))
    }

    /// How many times as many there are for so many tokens, in z.
    pub fn parts(&self, n_tokens: u32) -> u32 {
        n_tokens.div_ceil(self.columns)
    }
}

/// The choice of the target's tuning, if it has one and can follow it.
pub(super) fn tuned(target: &Target, kernel: &Kernel, w: &Matrix, n_tokens: u32) -> Option<Choice> {
    let tuned = target.tuning().choice(Bucket::of(kernel, w.weight(), [w.rows(), w.blocks(), n_tokens]));
    tuned.filter(|&choice| is_sound(target, kernel, w, choice))
}

/// The choice where nothing was measured. In the `scalar` tier an invocation takes four rows alone, unless they are so
/// long that they must be shared.
pub(crate) fn usual(target: &Target, kernel: &Kernel, w: &Matrix, n_tokens: u32) -> Choice {
    if is_tiled(kernel) {
        let sizes = [n_tokens, w.rows(), w.cols()];
        return usual_tile(target, (kernel, Some(w.weight())), sizes, w.cols().is_multiple_of(4));
    }
    match tier_for(target, kernel, Some(w.weight()), rounds(w)) {
        Tier::Scalar => Choice::new(Tier::Scalar, 1),
        // Rows share what a workgroup reads of `x`, so only as many invocations share a row as keep a large GPU busy, and no
        // more than there are blocks to share out.
        tier => {
            let wanted = (BUSY / w.rows().div_ceil(ROWS)).next_power_of_two();
            Choice::new(tier, wanted.clamp(LEAST_LANES, MAX_LANES).min(w.blocks().next_power_of_two()))
        }
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
    let (has_size, rounds) = if is_tiled(kernel) {
        let has_size =
            choice.tier == Tier::Scalar || Tile::of(choice).is_some_and(|tile| tile.fits(target, choice.tier));
        (has_size, tile_rounds(choice.tier, w.cols()))
    } else {
        let has_size = choice.size.is_power_of_two() && choice.size <= MAX_LANES && choice.form == TileForm::Plain;
        (has_size, rounds(w) / u64::from(choice.size.max(1)))
    };
    has_tier
        && has_size
        && variant.is_some_and(|variant| !target.is_banned(variant.label))
        && rounds <= u64::from(LOOP_ROUNDS)
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

/// Whether it pays to fold a norm into a product: not for many tokens, nor where each invocation would add up the squares of
/// all of `x` by itself. A kernel takes a norm or a bias.
pub(crate) fn folds_norm(rec: &Recorder, x: &Tensor, has_bias: bool) -> bool {
    suits_few(rec, x) && !has_bias && rec.target().tier() != Tier::Scalar
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

/// Whether `x` has so few tokens that its products are with vectors.
pub(crate) fn suits_few(rec: &Recorder, x: &Tensor) -> bool {
    matches!(*x.shape(), [n_tokens, dim] if are_few(rec, [n_tokens, dim]))
}

/// As [`suits_few`], by rows and columns: `matmul` begins where `matvec` would have to read weights twice. It begins with eight
/// tokens where they fill its smallest tile, with matrices of 8 x 8, and in the `scalar` tier, whose `matvec` reads weights
/// again for each token.
pub(super) fn are_few(rec: &Recorder, [n_tokens, dim]: [u32; 2]) -> bool {
    let most = match (rec.batch_invariance(), rec.target().tier()) {
        (BatchInvariance::Few { .. }, _) => u32::MAX,
        (BatchInvariance::Many, _) => 0,
        (BatchInvariance::Off, Tier::Matrix8 | Tier::Scalar) => MAX_COLUMNS - 1,
        (BatchInvariance::Off, _) => MAX_COLUMNS,
    };
    n_tokens <= most && dim.is_multiple_of(4)
}
