//! Queries, keys and values of a few tokens.

use bytemuck::{Pod, Zeroable};

use super::linear::{BIAS, NORM, Norm, lanes, lanes_groups, operations, quads, vector};
use super::rope::{RopeConfig, RopeStyle, check};
use super::{GridPart, StepState, grid_parts};
use crate::error::Error;
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::Tensor;

/// Mirrors `Params` in `shaders/qkv.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct QkvParams {
    pub n_tokens: u32,
    pub n_out: u32,
    pub dim: u32,
    pub blocks: u32,
    pub w_scales: u32,
    pub eps: f32,
    pub first_head: u32,
    pub flags: u32,
    pub n_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim: u32,
    pub rot_dims: u32,
    pub style: u32,
    pub capacity: u32,
    pub first_group: u32,
    pub query_row: u32,
}

/// A projection to queries, keys and values, or to some of their heads.
#[derive(Clone, Copy, Debug)]
pub struct Qkv<'a> {
    /// `[N, K]` in one slab, see [`Matrix::n_slabs`]; N is a number of whole heads.
    pub w: &'a Matrix,
    /// `[(H + 2 Hkv) * D]`; not together with a norm.
    pub bias: Option<&'a Tensor>,
    /// Normalises `x` first.
    pub norm: Option<Norm<'a>>,
    /// First head that `w` makes: queries come first, then keys, then values.
    pub first_head: u32,
    /// How queries and keys are rotated, and the table of angles, `[rows, rot_dims / 2, 2]`. `None`: they are not.
    pub rope: Option<(&'a RopeConfig, &'a Tensor)>,
}

impl Qkv<'_> {
    /// Records the projection of `x` with rotated queries to `q`, rotated keys and values to the cache at `pos..`.
    /// Shader: `shaders/qkv.wgsl`.
    ///
    /// # Shapes
    /// `x`: `[T, K]`, K a multiple of 4; `q`: `[T, H * D]`; `k`, `v`: `[Hkv, S, D]`.
    /// # Errors
    /// [`Error::Shape`] or [`Error::Operand`] if the operands disagree.
    pub fn record(
        &self,
        rec: &mut Recorder,
        state: &StepState,
        x: &Tensor,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<(), Error> {
        let operand =
            |operand, expected: String, found: String| Error::Operand { kernel: "qkv", operand, expected, found };
        let n_tokens = quads("qkv", x)?;
        let slab = self.w.only_slab("qkv")?;
        let (n_out, dim) = (self.w.rows(), self.w.cols());
        let &[n_kv_heads, capacity, head_dim] = k.shape() else {
            return Err(operand("k", "a tensor of three dimensions".into(), format!("of shape {:?}", k.shape())));
        };
        if let Some((config, table)) = self.rope {
            check("qkv", config, head_dim, table)?;
        }
        let [_, q_dim] = q.dims2("qkv", "q")?;
        let n_heads = q_dim / head_dim;
        x.expect_shape("qkv", "x", &[n_tokens, dim])?;
        q.expect_shape("qkv", "q", &[n_tokens, n_heads * head_dim])?;
        v.expect_shape("qkv", "v", k.shape())?;
        let heads = n_heads + 2 * n_kv_heads;
        if !n_out.is_multiple_of(head_dim) || self.first_head + n_out / head_dim > heads {
            let expected = format!("whole heads of {head_dim} rows, up to head {heads}");
            return Err(operand("w", expected, format!("{n_out} rows from head {} on", self.first_head)));
        }
        if let Some(bias) = self.bias {
            bias.expect_shape("qkv", "bias", &[heads * head_dim])?;
        }
        let vector = vector("qkv", self.norm, self.bias, dim)?;
        let bias_flag = if self.bias.is_some() { BIAS } else { 0 };
        let norm_flag = if self.norm.is_some() { NORM } else { 0 };
        let params = |first_group| QkvParams {
            n_tokens,
            n_out,
            dim,
            blocks: self.w.blocks(),
            w_scales: self.w.quants_words(slab),
            eps: self.norm.map_or(0.0, |norm| norm.eps),
            first_head: self.first_head,
            flags: bias_flag | norm_flag,
            n_heads,
            n_kv_heads,
            head_dim,
            rot_dims: self.rope.map_or(0, |(config, _)| config.rot_dims),
            style: u32::from(self.rope.is_some_and(|(config, _)| config.style == RopeStyle::Halves)),
            capacity,
            first_group,
            query_row: self.rope.map_or(0, |(config, table)| config.query_row(table)),
        };
        let (choice, constants) = lanes(rec, &shaders::QKV, self.w, self.norm.is_some());
        let n_groups = lanes_groups(n_out, choice.size);
        // What is not there is never read; x is at hand.
        let table = self.rope.map_or(x, |(_, table)| table);
        let operands = [state.tensor(), table, &slab.words, vector.unwrap_or(x), x, q, k, v];
        let tier = choice.tier;
        for GridPart { first, grid: [x_groups, y_groups, _] } in
            grid_parts(rec.device(), n_groups, operations(n_tokens, n_out, dim))
        {
            let grid = [x_groups, y_groups, n_tokens];
            rec.dispatch_as(tier, &shaders::QKV, Some(self.w.weight()), &constants, params(first), &operands, grid)?;
        }
        Ok(())
    }
}
