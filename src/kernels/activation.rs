//! Elementwise kernels.

use super::fold;
use super::linear::activated;
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders::constants::gelu::{QUICK_FORM, TANH_FORM};
use crate::shaders::params::{
    AddParams, ClipParams, GegluParams, GeluParams, ReluParams, ScaleParams, SigmoidGateParams, SiluParams,
    SwigluParams,
};
use crate::shaders::{self, Kernel};
use crate::tensor::Tensor;

const WG: u64 = 256;

/// Form of the Gaussian error linear unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// By the error function.
    Exact,
    /// By the hyperbolic tangent, as GPT-2 and Gemma do.
    Tanh,
    /// By a sigmoid, `x sigmoid(1.702 x)`, as OpenAI's CLIP does.
    Quick,
}

impl Gelu {
    /// Its number in `shaders/shared/gelu.wgsl`.
    fn number(self) -> u32 {
        match self {
            Gelu::Exact => 0,
            Gelu::Tanh => TANH_FORM,
            Gelu::Quick => QUICK_FORM,
        }
    }
}

/// What a gated feed-forward applies to its gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// The sigmoid linear unit.
    Silu,
    /// The Gaussian error linear unit.
    Gelu(Gelu),
    /// gpt-oss: `(min(max(up, -7), 7) + 1) * g sigmoid(1.702 g)`, where `g = min(gate, 7)`.
    Clamped,
}

impl Gate {
    /// The overrides that tell a kernel of it.
    pub(super) fn constants(self) -> &'static [(&'static str, f64)] {
        match self {
            Gate::Silu => activated(None),
            Gate::Gelu(form) => activated(Some(Activation::Gelu(form))),
            Gate::Clamped => &[("CLAMPED", 1.0)],
        }
    }
}

/// What a product applies to its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The Gaussian error linear unit.
    Gelu(Gelu),
    /// The hyperbolic tangent, as heads behind a BERT's first token do.
    Tanh,
}

/// Records `y = silu(gate) * up`, where `gate_up` holds both halves of each row. Shader: `shaders/swiglu.wgsl`.
///
/// # Shapes
/// `gate_up`: `[T, 2 F]`; `y`: `[T, F]`.
/// # Errors
/// [`Error::Shape`] if `gate_up` disagrees with `y`.
pub fn swiglu(rec: &mut Recorder, gate_up: &Tensor, y: &Tensor) -> Result<(), Error> {
    by_silu(rec, gate_up, y, &[])
}

/// Records `y = gelu(gate) * up`, where `gate_up` holds both halves of each row, as ModernBERT's feed-forward does.
/// Shader: `shaders/geglu.wgsl`.
///
/// # Shapes
/// `gate_up`: `[T, 2 F]`; `y`: `[T, F]`.
/// # Errors
/// [`Error::Shape`] if `gate_up` disagrees with `y`.
pub fn geglu(rec: &mut Recorder, gate_up: &Tensor, y: &Tensor, form: Gelu) -> Result<(), Error> {
    let kernel = &shaders::GEGLU;
    let ([n_tokens, ffn_dim], grid) = halves(rec, kernel, gate_up, y)?;
    let params = GegluParams { n_tokens, ffn_dim, form: form.number() };
    rec.dispatch(kernel, None, &[], params, &[gate_up, y], grid)
}

/// Records `y = act(gate) * up`: [`swiglu`], which has a variant for [`Gate::Clamped`], or [`geglu`].
///
/// # Shapes
/// `gate_up`: `[T, 2 F]`; `y`: `[T, F]`.
/// # Errors
/// [`Error::Shape`] if `gate_up` disagrees with `y`.
pub fn gated(rec: &mut Recorder, gate: Gate, gate_up: &Tensor, y: &Tensor) -> Result<(), Error> {
    match gate {
        Gate::Silu => swiglu(rec, gate_up, y),
        Gate::Gelu(form) => geglu(rec, gate_up, y, form),
        Gate::Clamped => by_silu(rec, gate_up, y, gate.constants()),
    }
}

/// Gates among the columns of a projection, each of which is for a group of neighbouring elements of a row.
#[derive(Clone, Copy, Debug)]
pub struct Gates<'a> {
    /// `[T, start + C / size]` or wider.
    pub columns: &'a Tensor,
    /// First column.
    pub start: u32,
    /// Elements of a group, a divisor of C: 1, a head's, or all.
    pub size: u32,
}

/// Records `y[t, i] *= sigmoid(gates[t, start + i / size])`. Shader: `shaders/sigmoid_gate.wgsl`.
///
/// # Shapes
/// `y`: `[T, C]`.
/// # Errors
/// [`Error::Shape`] if the gates disagree with `y`, [`Error::Operand`] if groups do not fill a row.
pub fn sigmoid_gate(rec: &mut Recorder, gates: Gates<'_>, y: &Tensor) -> Result<(), Error> {
    gate_rows(rec, gates, y, false)
}

/// Records `y[t, i] *= gates[t, start + i / size]`, otherwise as [`sigmoid_gate`].
///
/// # Shapes
/// `y`: `[T, C]`.
/// # Errors
/// As [`sigmoid_gate`].
pub fn multiply(rec: &mut Recorder, gates: Gates<'_>, y: &Tensor) -> Result<(), Error> {
    gate_rows(rec, gates, y, true)
}

fn gate_rows(rec: &mut Recorder, gates: Gates<'_>, y: &Tensor, is_plain: bool) -> Result<(), Error> {
    let Gates { columns, start, size } = gates;
    let ([n_rows, dim], [_, gate_stride]) = (y.dims2("sigmoid_gate", "y")?, columns.dims2("sigmoid_gate", "gates")?);
    if size == 0 || !dim.is_multiple_of(size) {
        let expected = format!("groups that fill rows of {dim}");
        return Err(Error::Operand { kernel: "sigmoid_gate", operand: "size", expected, found: size.to_string() });
    }
    let least = start.saturating_add(dim / size);
    columns.expect_shape("sigmoid_gate", "gates", &[n_rows, gate_stride.max(least)])?;
    let params = SigmoidGateParams { n_rows, dim, gate_stride, gate_start: start, size, plain: u32::from(is_plain) };
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(WG));
    rec.dispatch(&shaders::SIGMOID_GATE, None, &[], params, &[columns, y], grid)
}

fn by_silu(rec: &mut Recorder, gate_up: &Tensor, y: &Tensor, constants: &[(&'static str, f64)]) -> Result<(), Error> {
    let kernel = &shaders::SWIGLU;
    let ([n_tokens, ffn_dim], grid) = halves(rec, kernel, gate_up, y)?;
    rec.dispatch(kernel, None, constants, SwigluParams { n_tokens, ffn_dim }, &[gate_up, y], grid)
}

/// T and F of a kernel that multiplies halves, and its grid.
fn halves(rec: &Recorder, kernel: &Kernel, gate_up: &Tensor, y: &Tensor) -> Result<([u32; 2], [u32; 3]), Error> {
    let [n_tokens, ffn_dim] = y.dims2(kernel.name, "y")?;
    gate_up.expect_shape(kernel.name, "gate_up", &[n_tokens, 2 * ffn_dim])?;
    Ok(([n_tokens, ffn_dim], fold(rec.target(), (y.len() as u64).div_ceil(WG))))
}

/// Records `y = gelu(x)`. Shader: `shaders/gelu.wgsl`.
///
/// # Shapes
/// `x`, `y`: any, the same.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`.
pub fn gelu(rec: &mut Recorder, x: &Tensor, y: &Tensor, form: Gelu) -> Result<(), Error> {
    y.expect_shape("gelu", "y", x.shape())?;
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(WG));
    let params = GeluParams { len: y.len() as u32, form: form.number() };
    rec.dispatch(&shaders::GELU, None, &[], params, &[x, y], grid)
}

/// Records `y = max(x, 0)`, or its square. Shader: `shaders/relu.wgsl`.
///
/// # Shapes
/// `x`, `y`: any, the same.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`.
pub fn relu(rec: &mut Recorder, x: &Tensor, y: &Tensor, is_squared: bool) -> Result<(), Error> {
    y.expect_shape("relu", "y", x.shape())?;
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(WG));
    let params = ReluParams { len: y.len() as u32, is_squared: is_squared.into() };
    rec.dispatch(&shaders::RELU, None, &[], params, &[x, y], grid)
}

/// Records `y = min(max(x, low), high)` with bounds for each of one to three groups of columns. Shader:
/// `shaders/clip.wgsl`.
///
/// # Shapes
/// `bounds`: `[2 G]`, low and high of each group; `widths`: columns of each group; `x`, `y`: `[T, C]`.
/// # Errors
/// [`Error::Shape`] if an operand disagrees with the others, [`Error::Operand`] for another number of groups or columns.
pub fn clip(rec: &mut Recorder, bounds: &Tensor, widths: &[u32], x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let [_, width] = x.dims2("clip", "x")?;
    y.expect_shape("clip", "y", x.shape())?;
    bounds.expect_shape("clip", "bounds", &[2 * widths.len() as u32])?;
    if !(1..=3).contains(&widths.len()) || widths.iter().sum::<u32>() != width {
        let (expected, found) = (format!("one to three groups of {width} columns in all"), format!("{widths:?}"));
        return Err(Error::Operand { kernel: "clip", operand: "widths", expected, found });
    }
    let second = widths[0];
    let third = second + widths.get(1).copied().unwrap_or(0);
    let params = ClipParams { len: y.len() as u32, width, second, third };
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(WG));
    rec.dispatch(&shaders::CLIP, None, &[], params, &[bounds, x, y], grid)
}

/// Records `y = silu(x)`. Shader: `shaders/silu.wgsl`.
///
/// # Shapes
/// `x`, `y`: any, the same.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`.
pub fn silu(rec: &mut Recorder, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    y.expect_shape("silu", "y", x.shape())?;
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(WG));
    let params = SiluParams { len: y.len() as u32 };
    rec.dispatch(&shaders::SILU, None, &[], params, &[x, y], grid)
}

/// Records `y = y + x`. Shader: `shaders/add.wgsl`.
///
/// # Shapes
/// `x`, `y`: any, the same; or `x`: `[C]`, `y`: `[T, C]`, where it is added to each row.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`.
pub fn add(rec: &mut Recorder, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    match (x.shape(), y.shape()) {
        (&[dim], &[n_rows, _]) if dim > 0 => y.expect_shape("add", "y", &[n_rows, dim])?,
        _ => y.expect_shape("add", "y", x.shape())?,
    }
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(WG));
    let params = AddParams { len: y.len() as u32, x_len: x.len() as u32 };
    rec.dispatch(&shaders::ADD, None, &[], params, &[x, y], grid)
}

/// Records `y = factor * x`. Shader: `shaders/scale.wgsl`.
///
/// # Shapes
/// `x`, `y`: any, the same.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`.
pub fn scale(rec: &mut Recorder, x: &Tensor, y: &Tensor, factor: f32) -> Result<(), Error> {
    scaled(rec, x, y, factor, 0.0)
}

/// Records `y = cap * tanh(factor * x / cap)`, which approaches `cap`, a positive number. Shader: `shaders/scale.wgsl`.
///
/// # Shapes
/// `x`, `y`: any, the same.
/// # Errors
/// [`Error::Shape`] if `y` disagrees with `x`.
pub fn soft_cap(rec: &mut Recorder, x: &Tensor, y: &Tensor, factor: f32, cap: f32) -> Result<(), Error> {
    scaled(rec, x, y, factor, cap)
}

fn scaled(rec: &mut Recorder, x: &Tensor, y: &Tensor, factor: f32, cap: f32) -> Result<(), Error> {
    y.expect_shape("scale", "y", x.shape())?;
    let grid = fold(rec.target(), (y.len() as u64).div_ceil(WG));
    let params = ScaleParams { len: y.len() as u32, factor, cap };
    rec.dispatch(&shaders::SCALE, None, &[], params, &[x, y], grid)
}
