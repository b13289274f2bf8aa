//! Matrix products.

use bytemuck::{Pod, Zeroable};

use super::fold;
use crate::error::Error;
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders::{self, Kernel, Tier};
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
}

/// Flag: add the bias.
pub(crate) const BIAS: u32 = 1;
/// Flag: add to what `y` holds.
pub(crate) const ACCUMULATE: u32 = 2;

/// Mirrors `Params` in `shaders/matmul_plain.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PlainParams {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub _pad: u32,
}

/// A linear layer: `y = x wᵀ (+ bias)`, or added to what `y` holds.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `[N, K]`.
    pub w: &'a Matrix,
    /// One value for each column of `y`.
    pub bias: Option<&'a Tensor>,
    /// First column of `y` to write: several matrices can fill one `y` side by side.
    pub y_start: u32,
    /// Whether to add to `y` instead of overwriting it.
    pub accumulate: bool,
}

impl<'a> Linear<'a> {
    /// `y = x wᵀ`.
    pub fn new(w: &'a Matrix) -> Self {
        Linear { w, bias: None, y_start: 0, accumulate: false }
    }

    /// Records the product with whichever kernel suits the number of tokens: `matvec` for a few, else `matmul`.
    ///
    /// # Shapes
    /// `x`: `[T, K]`; `y`: `[T, y_start + N]` or wider.
    /// # Errors
    /// [`Error::Shape`] if an operand disagrees with `w`.
    pub fn record(&self, rec: &mut Recorder, x: &Tensor, y: &Tensor) -> Result<(), Error> {
        /// From here on a tile's reuse of weights outweighs the part of it that lies idle.
        const MATMUL_TOKENS: u32 = 8;
        let [n_tokens, dim] = x.dims2("linear", "x")?;
        if n_tokens < MATMUL_TOKENS && dim.is_multiple_of(4) {
            matvec(rec, self, x, y)
        } else {
            matmul(rec, self, x, y)
        }
    }

    /// Records one dispatch for each slab of `w`; `grid` gives the workgroups for a number of rows of `w`.
    fn dispatch(
        &self,
        rec: &mut Recorder,
        kernel: &'static Kernel,
        constants: &[(&'static str, f64)],
        x: &Tensor,
        y: &Tensor,
        grid: impl Fn(u32) -> [u32; 3],
    ) -> Result<(), Error> {
        let [n_tokens, dim] = x.dims2(kernel.name, "x")?;
        x.expect_shape(kernel.name, "x", &[n_tokens, self.w.cols()])?;
        let [_, y_stride] = y.dims2(kernel.name, "y")?;
        let y_end = self.y_start.saturating_add(self.w.rows());
        y.expect_shape(kernel.name, "y", &[n_tokens, y_stride.max(y_end)])?;
        if let Some(bias) = self.bias {
            bias.expect_shape(kernel.name, "bias", &[y_stride])?;
        }
        let bias_flag = if self.bias.is_some() { BIAS } else { 0 };
        let accumulate_flag = if self.accumulate { ACCUMULATE } else { 0 };
        for slab in self.w.slabs() {
            let params = LinearParams {
                n_tokens,
                n_out: slab.rows,
                dim,
                blocks: self.w.blocks(),
                w_scales: self.w.quants_words(slab),
                y_start: self.y_start + slab.first_row,
                y_stride,
                flags: bias_flag | accumulate_flag,
            };
            // Without a bias its binding is never read; x is at hand.
            let operands = [&slab.words, self.bias.unwrap_or(x), x, y];
            rec.dispatch(kernel, Some(self.w.weight()), constants, params, &operands, grid(slab.rows))?;
        }
        Ok(())
    }
}

/// Records a tiled matrix product. Shader: `shaders/matmul.wgsl`.
///
/// # Shapes
/// `x`: `[M, K]`; `y`: `[M, y_start + N]` or wider.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the weights.
pub fn matmul(rec: &mut Recorder, linear: &Linear, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let [n_tokens, _] = x.dims2("matmul", "x")?;
    let tile = if rec.device().tier() == Tier::Scalar { 32 } else { 64 };
    let grid = |rows: u32| [rows.div_ceil(tile), n_tokens.div_ceil(tile), 1];
    linear.dispatch(rec, &shaders::MATMUL, &[], x, y, grid)
}

/// Records a matrix product without any reuse: the baseline of the bench. Shader: `shaders/matmul_naive.wgsl`.
///
/// # Shapes
/// As [`matmul`].
/// # Errors
/// As [`matmul`].
pub fn matmul_naive(rec: &mut Recorder, linear: &Linear, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let [n_tokens, _] = x.dims2("matmul_naive", "x")?;
    let grid = |rows: u32| [rows.div_ceil(16), n_tokens.div_ceil(16), 1];
    linear.dispatch(rec, &shaders::MATMUL_NAIVE, &[], x, y, grid)
}

/// Records a matrix product for one token or a few. Shader: `shaders/matvec.wgsl`.
///
/// # Shapes
/// `x`: `[T, K]`, K a multiple of 4; `y`: `[T, y_start + N]` or wider.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the weights, [`Error::Operand`] if K is no multiple of 4.
pub fn matvec(rec: &mut Recorder, linear: &Linear, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    /// Invocations of a workgroup, and rows of w that each works on at a time.
    const WG: u32 = 64;
    const ROWS: u32 = 4;
    let [n_tokens, dim] = x.dims2("matvec", "x")?;
    if !dim.is_multiple_of(4) {
        return Err(Error::Operand {
            kernel: "matvec",
            operand: "x",
            expected: "a multiple of 4 columns".into(),
            found: dim.to_string(),
        });
    }
    let (lanes, constants) = match rec.device().tier() {
        Tier::Scalar => (1, vec![]),
        _ => {
            // As many invocations as there are blocks to share out.
            let lanes = linear.w.blocks().next_power_of_two().min(WG);
            (lanes, vec![("LANES", f64::from(lanes))])
        }
    };
    let grid = |rows: u32| {
        let [x, y, _] = fold(u64::from(rows), u64::from(ROWS * WG / lanes));
        [x, y, n_tokens]
    };
    linear.dispatch(rec, &shaders::MATVEC, &constants, x, y, grid)
}

/// Records `y = x b` of two plain matrices. Shader: `shaders/matmul_plain.wgsl`.
///
/// # Shapes
/// `x`: `[M, K]`; `b`: `[K, N]`; `y`: `[M, N]`.
/// # Errors
/// [`Error::Shape`] if `b` or `y` disagrees with `x`.
pub fn matmul_plain(rec: &mut Recorder, x: &Tensor, b: &Tensor, y: &Tensor) -> Result<(), Error> {
    let [m, k] = x.dims2("matmul_plain", "x")?;
    let [_, n] = b.dims2("matmul_plain", "b")?;
    b.expect_shape("matmul_plain", "b", &[k, n])?;
    y.expect_shape("matmul_plain", "y", &[m, n])?;
    let params = PlainParams { m, n, k, _pad: 0 };
    let grid = [n.div_ceil(64), m.div_ceil(64), 1];
    rec.dispatch(&shaders::MATMUL_PLAIN, None, &[], params, &[x, b, y], grid)
}
