//! What an adapter adds to products: `y += b (a x)`, low-rank deltas (LoRA, Hu et al. 2021, arXiv:2106.09685). The product
//! `a x` is one of the usual ones; here are the kernels that go on with it.

use super::gate_up::record_gate_up;
use super::linear::{DispatchPlan, MatvecPlan};
use super::{Gate, Linear, Norm, fold};
use crate::dtype::DType;
use crate::error::Error;
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::constants::add_lora;
use crate::shaders::params::{AddLoraParams, GateUpLoraParams, GateUpParams, LinearParams, MatvecLoraParams};
use crate::tensor::Tensor;

/// Matrices side by side that an adapter can add to.
pub const MAX_MEMBERS: usize = 4;

/// Low-rank deltas of the rows of a product: row n gets `sum over r of b[n, r] * inner[t, r]`, where `r` are the columns that
/// belong to the member that n is in. Members are adapted matrices side by side, such as those of queries and values.
#[derive(Clone, Copy, Debug)]
pub struct LowRank<'a> {
    /// Products with the first factors, `[T, members R]`, R a multiple of 4.
    pub inner: &'a Tensor,
    /// Second factors, which are scaled, `[N, R]`: a row for each row of the product. Rows of what is not adapted are zero.
    pub b: &'a Tensor,
    /// Rows at which members begin, in order; of the first one 0. At most [`MAX_MEMBERS`].
    pub starts: &'a [u32],
}

impl LowRank<'_> {
    /// Quads of R, and `members` of the shaders.
    fn checked(&self, kernel: &'static str, n_tokens: u32) -> Result<(u32, [u32; 4]), Error> {
        let [_, rank] = self.b.dims2(kernel, "b")?;
        // The recorder would name the binding of a vector that is not there, which it stands in for.
        if self.b.dtype() != DType::F32 {
            let (expected, found) = ("a tensor of F32".into(), format!("one of {:?}", self.b.dtype()));
            return Err(Error::Operand { kernel, operand: "b", expected, found });
        }
        let n_members = self.starts.len();
        let is_ordered = self.starts.is_sorted_by(|a, b| a < b) && self.starts.first() == Some(&0);
        if !is_ordered || n_members > MAX_MEMBERS || !rank.is_multiple_of(4) {
            return Err(Error::Operand {
                kernel,
                operand: "b",
                expected: format!("a multiple of 4 columns, and 1 to {MAX_MEMBERS} members from row 0 on"),
                found: format!("{rank} columns, members at {:?}", self.starts),
            });
        }
        let columns = rank.saturating_mul(n_members as u32);
        self.inner.expect_shape(kernel, "inner", &[n_tokens, columns])?;
        let mut members = [u32::MAX, u32::MAX, u32::MAX, columns / 4];
        members.iter_mut().zip(&self.starts[1..]).for_each(|(member, start)| *member = *start);
        Ok((rank / 4, members))
    }

    /// Refuses fewer rows than these.
    fn expect_rows(&self, kernel: &'static str, n_rows: u32) -> Result<(), Error> {
        let [found, rank] = self.b.dims2(kernel, "b")?;
        self.b.expect_shape(kernel, "b", &[found.max(n_rows), rank])
    }
}

/// Records [`matvec`](fn@super::matvec) with low-rank deltas. The rows of `b` are the columns of `y`.
/// Shader: `shaders/matvec_lora.wgsl`.
///
/// # Shapes
/// As [`matvec`](fn@super::matvec); `b`: `[y_start + N, R]` or more rows.
/// # Errors
/// As [`matvec`](fn@super::matvec); [`Error::Shape`] and [`Error::Operand`] if `low` does not fit, or if there is an activation.
pub fn matvec_lora(rec: &mut Recorder, linear: &Linear, low: &LowRank, x: &Tensor, y: &Tensor) -> Result<(), Error> {
    let kernel = &shaders::MATVEC_LORA;
    let n_tokens = super::linear::quads(kernel.name, x)?;
    let (rank, members) = low.checked(kernel.name, n_tokens)?;
    low.expect_rows(kernel.name, linear.y_start.saturating_add(linear.w.rows()))?;
    if linear.activation.is_some() {
        let (expected, found) = ("none".into(), format!("{:?}", linear.activation));
        return Err(Error::Operand { kernel: kernel.name, operand: "activation", expected, found });
    }
    x.expect_shape(kernel.name, "x", &[n_tokens, linear.w.cols()])?;
    let lanes = MatvecPlan::as_of(rec, kernel, &shaders::MATVEC, linear.w, n_tokens);
    let plan = DispatchPlan {
        tier: lanes.tier,
        kernel,
        constants: lanes.constants(linear.norm.is_some()),
        split_blocks: None,
    };
    let grid = |rows: u32| (lanes.groups(rows), lanes.parts(n_tokens));
    let params = |linear| {
        let LinearParams { n_tokens, n_out, dim, blocks, w_scales, y_start, y_stride, .. } = linear;
        let LinearParams { flags, eps, split_blocks, first_group, .. } = linear;
        MatvecLoraParams {
            n_tokens,
            n_out,
            dim,
            blocks,
            w_scales,
            y_start,
            y_stride,
            flags,
            eps,
            split_blocks,
            first_group,
            rank,
            members,
        }
    };
    linear.dispatch_with(rec, &plan, &[x, low.inner, low.b], y, grid, params)
}

/// Records [`gate_up`](fn@super::gate_up) with low-rank deltas of gates and ups. Shader: `shaders/gate_up_lora.wgsl`.
///
/// # Shapes
/// As [`gate_up`](fn@super::gate_up); `b`: `[2 F, R]`.
/// # Errors
/// As [`gate_up`](fn@super::gate_up); [`Error::Shape`] and [`Error::Operand`] if `low` does not fit.
pub fn gate_up_lora(
    rec: &mut Recorder,
    w: &Matrix,
    norm: Option<Norm<'_>>,
    gate: Gate,
    low: &LowRank,
    x: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    record(rec, (w, false), norm, gate, low, x, y)
}

/// Records [`up_gated`](super::up_gated) with low-rank deltas of the ups; those of the gates are in `y` already.
/// Shader: `shaders/gate_up_lora.wgsl`.
///
/// # Shapes
/// As [`up_gated`](super::up_gated); `b`: `[2 F, R]`.
/// # Errors
/// As [`gate_up_lora`].
pub fn up_gated_lora(
    rec: &mut Recorder,
    w: &Matrix,
    norm: Option<Norm<'_>>,
    gate: Gate,
    low: &LowRank,
    x: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    record(rec, (w, true), norm, gate, low, x, y)
}

fn record(
    rec: &mut Recorder,
    (w, is_ups): (&Matrix, bool),
    norm: Option<Norm<'_>>,
    gate: Gate,
    low: &LowRank,
    x: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    let kernel = &shaders::GATE_UP_LORA;
    let [n_tokens, _] = x.dims2(kernel.name, "x")?;
    let (rank, members) = low.checked(kernel.name, n_tokens)?;
    low.expect_rows(kernel.name, if is_ups { w.rows().saturating_mul(2) } else { w.rows() })?;
    let lanes = MatvecPlan::as_of(rec, kernel, &shaders::GATE_UP, w, n_tokens);
    let params = |gate_up| {
        let GateUpParams { n_tokens, ffn_dim, dim, blocks, w_scales, eps, first_group } = gate_up;
        GateUpLoraParams { n_tokens, ffn_dim, dim, blocks, w_scales, eps, first_group, members, rank }
    };
    record_gate_up(rec, kernel, &lanes, (w, is_ups), norm, gate, (x, &[low.inner, low.b]), y, params)
}

/// Records `y += b inner` for any number of tokens, after the product that `y` holds. Shader: `shaders/add_lora.wgsl`.
///
/// # Shapes
/// `b`: `[N, R]`; `inner`: `[T, members R]`; `y`: `[T, N]`, or with more columns, which stay as they are.
/// # Errors
/// [`Error::Shape`] and [`Error::Operand`] if an operand does not fit.
pub fn add_lora(rec: &mut Recorder, low: &LowRank, y: &Tensor) -> Result<(), Error> {
    let kernel = &shaders::ADD_LORA;
    let ([n_tokens, y_stride], [n_out, _]) = (y.dims2(kernel.name, "y")?, low.b.dims2(kernel.name, "b")?);
    let (rank, members) = low.checked(kernel.name, n_tokens)?;
    y.expect_shape(kernel.name, "y", &[n_tokens, y_stride.max(n_out)])?;
    let outputs = u64::from(n_out) * u64::from(n_tokens.div_ceil(add_lora::TOKENS));
    let grid = fold(rec.target(), outputs.div_ceil(add_lora::WG.into()));
    let params = AddLoraParams { n_tokens, n_out, y_stride, rank, members };
    rec.dispatch(kernel, None, &[], params, &[low.inner, low.b, y], grid)
}
