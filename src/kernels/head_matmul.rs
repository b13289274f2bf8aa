//! Products of heads with matrices of their own: multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).

use super::{Norm, fold};
use crate::error::Error;
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::constants::head_matmul::{TOKENS, WG};
use crate::shaders::params::HeadMatmulParams;
use crate::tensor::Tensor;

/// The matrices of H heads in one: each head's is some of the rows that it has there.
#[derive(Clone, Copy, Debug)]
pub struct HeadMatrices<'a> {
    /// `[H rows, columns]`, in one slab.
    pub w: &'a Matrix,
    /// H.
    pub n_heads: u32,
    /// First row of each head's matrix among its rows.
    pub start: u32,
    /// N, outputs of a head.
    pub n_out: u32,
    /// K, inputs of a head.
    pub dim: u32,
    /// Whether a head's matrix is `[K, N]` rather than `[N, K]`.
    pub transposed: bool,
}

/// Heads among the columns of a projection.
#[derive(Clone, Copy, Debug)]
pub struct HeadColumns<'a> {
    /// `[T, start + H stride]` or wider; all multiples of 4.
    pub columns: &'a Tensor,
    /// First column.
    pub start: u32,
    /// Columns from one head to the next.
    pub stride: u32,
}

/// What makes products the heads of latent attention.
#[derive(Clone, Copy, Debug)]
pub struct LatentKey<'a> {
    /// `[T, start + N + R]` or wider, a token's latent and the part of its key that is rotated.
    pub columns: &'a Tensor,
    /// First column.
    pub start: u32,
    /// R. A query's part to be rotated follows its K inputs.
    pub n_turned: u32,
    /// Norm of the latent, `[N]`.
    pub norm: Norm<'a>,
}

impl HeadMatrices<'_> {
    /// Records `y[t, h] = x[t, h] w[h]ᵀ`; with `key`, the heads of latent attention: R elements of each query to be rotated
    /// before its products, and after the last query the token's key. Shader: `shaders/head_matmul.wgsl`.
    ///
    /// # Shapes
    /// `y`: `[T, H N]`, or `[T, (H + 1) (R + N)]` with `key`.
    /// # Errors
    /// [`Error::Shape`] if the operands disagree, [`Error::Operand`] for columns that are no multiples of 4, and for matrices
    /// in several slabs.
    pub fn record(
        &self,
        rec: &mut Recorder,
        x: HeadColumns<'_>,
        key: Option<LatentKey<'_>>,
        y: &Tensor,
    ) -> Result<(), Error> {
        const KERNEL: &str = "head_matmul";
        let &HeadMatrices { w, n_heads, start, n_out, dim, transposed } = self;
        let wrong = |operand, expected: String, found: u32| {
            Err(Error::Operand { kernel: KERNEL, operand, expected, found: found.to_string() })
        };
        let [n_tokens, x_stride] = x.columns.dims2(KERNEL, "x")?;
        let n_turned = key.map_or(0, |key| key.n_turned);
        for found in [dim, x_stride, x.start, x.stride] {
            if !found.is_multiple_of(4) {
                return wrong("x", "columns that are multiples of 4".into(), found);
            }
        }
        let x_end =
            x.start.saturating_add(n_heads.saturating_sub(1).saturating_mul(x.stride)).saturating_add(dim + n_turned);
        x.columns.expect_shape(KERNEL, "x", &[n_tokens, x_stride.max(x_end)])?;
        let n_keys = u32::from(key.is_some());
        y.expect_shape(KERNEL, "y", &[n_tokens, (n_heads + n_keys) * (n_turned + n_out)])?;
        let [rows, cols] = if transposed { [dim, n_out] } else { [n_out, dim] };
        let w_rows = w.rows() / n_heads.max(1);
        if w.cols() != cols || w_rows * n_heads != w.rows() || start.saturating_add(rows) > w_rows {
            return wrong("w", format!("{n_heads} times {rows} rows from row {start} on, of {cols}"), w.rows());
        }
        let [slab] = w.slabs() else { return wrong("w", "one slab".into(), w.slabs().len() as u32) };
        let (mut kv_stride, mut kv_start) = (0, 0);
        if let Some(LatentKey { columns, start, norm, .. }) = key {
            (kv_stride, kv_start) = (columns.dims2(KERNEL, "key")?[1], start);
            let least = start.saturating_add(n_out + n_turned);
            columns.expect_shape(KERNEL, "key", &[n_tokens, kv_stride.max(least)])?;
            norm.weight.expect_shape(KERNEL, "norm", &[n_out])?;
        }
        let params = HeadMatmulParams {
            n_tokens,
            n_heads,
            n_out,
            dim,
            blocks: w.blocks(),
            w_scales: w.quants_words(slab),
            w_rows,
            w_start: start,
            x_stride,
            x_start: x.start,
            x_head: x.stride,
            n_turned,
            kv_stride,
            kv_start,
            eps: key.map_or(0.0, |key| key.norm.eps),
            y_stride: (n_heads + n_keys) * (n_turned + n_out),
        };
        let outputs = u64::from(n_heads) * u64::from(n_turned + n_out) * u64::from(n_tokens.div_ceil(TOKENS));
        let n_groups = outputs.div_ceil(WG.into()) + u64::from(n_keys * n_tokens);
        let constants = [(transposed, ("TRANSPOSED", 1.0)), (key.is_some(), ("LATENT", 1.0))];
        let constants: Vec<_> = constants.into_iter().filter(|(is_set, _)| *is_set).map(|(_, set)| set).collect();
        // What is not there is never read; x is at hand.
        let (kv, norm) = key.map_or((x.columns, x.columns), |key| (key.columns, key.norm.weight));
        let operands = [&slab.words, x.columns, kv, norm, y];
        let (kernel, weight, grid) = (&shaders::HEAD_MATMUL, Some(w.weight()), fold(rec.target(), n_groups));
        rec.dispatch(kernel, weight, &constants, params, &operands, grid)
    }
}
