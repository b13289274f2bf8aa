//! Mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538): the choice of each token's experts and their two products.

use bytemuck::{Pod, Zeroable};

use super::linear::{ACCUMULATE, BIAS, NORM, Norm, lanes, lanes_groups, operations, quads, vector};
use super::{Gate, GridPart, fold, grid_parts};
use crate::error::Error;
use crate::matrix::Matrix;
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::Tensor;

/// Mirrors `Params` in `shaders/route.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct RouteParams {
    pub n_tokens: u32,
    pub n_experts: u32,
    pub n_used: u32,
    pub flags: u32,
    pub scale: f32,
    pub _pad: [u32; 3],
}

/// Mirrors `Params` in `shaders/expert_gate_up.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ExpertGateUpParams {
    pub n_used: u32,
    pub ffn_dim: u32,
    pub dim: u32,
    pub blocks: u32,
    pub w_scales: u32,
    pub eps: f32,
    pub flags: u32,
    pub first_group: u32,
    pub expert_rows: u32,
    pub up_row: u32,
    pub n_tokens: u32,
    pub n_experts: u32,
}

/// Mirrors `Params` in `shaders/expert_down.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct ExpertDownParams {
    pub n_used: u32,
    pub n_out: u32,
    pub dim: u32,
    pub blocks: u32,
    pub w_scales: u32,
    pub flags: u32,
    pub first_group: u32,
    pub n_tokens: u32,
    pub n_experts: u32,
    pub _pad: [u32; 3],
}

/// Flags of `route`, beside `ROUTE_BIAS`.
pub(crate) const SIGMOID: u32 = 1;
pub(crate) const ROUTE_BIAS: u32 = 2;
pub(crate) const SHARES: u32 = 4;

/// Most experts of a layer, and most that a token has.
pub const MAX_EXPERTS: u32 = 1024;

/// How experts are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertScore {
    /// By the softmax over all.
    Softmax,
    /// Each by the sigmoid.
    Sigmoid,
}

/// How the experts of a token are chosen and weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// Of the logits.
    pub score: ExpertScore,
    /// Whether weights are shares of the sum of the chosen scores rather than these scores.
    pub shares: bool,
    /// Factor of the weights.
    pub scale: f32,
}

/// Records the choice of each token's experts: the numbers of the K with the highest scores, `bias` added for the choice
/// alone, and their weights. Shader: `shaders/route.wgsl`.
///
/// # Shapes
/// `logits`: `[T, E]`; `bias`: `[E]`; `routes`: `[T, K, 2]` words, the expert and its weight's bits.
/// # Errors
/// [`Error::Shape`] if the operands disagree, [`Error::Operand`] if E is above [`MAX_EXPERTS`] or K above E.
pub fn route(
    rec: &mut Recorder,
    router: &Router,
    logits: &Tensor,
    bias: Option<&Tensor>,
    routes: &Tensor,
) -> Result<(), Error> {
    let [n_tokens, n_experts] = logits.dims2("route", "logits")?;
    let n_used = routes.shape().get(1).copied().unwrap_or(0);
    routes.expect_shape("route", "routes", &[n_tokens, n_used, 2])?;
    let operand = |operand, expected: String, found: u32| {
        Err(Error::Operand { kernel: "route", operand, expected, found: found.to_string() })
    };
    if n_experts > MAX_EXPERTS {
        return operand("logits", format!("up to {MAX_EXPERTS} columns"), n_experts);
    }
    if n_used == 0 || n_used > n_experts {
        return operand("routes", format!("1 to {n_experts} experts for a token"), n_used);
    }
    if let Some(bias) = bias {
        bias.expect_shape("route", "bias", &[n_experts])?;
    }
    let flags =
        [(router.score == ExpertScore::Sigmoid, SIGMOID), (bias.is_some(), ROUTE_BIAS), (router.shares, SHARES)];
    let flags = flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum();
    let params = RouteParams { n_tokens, n_experts, n_used, flags, scale: router.scale, _pad: [0; 3] };
    // A bias that is not there is never read; the logits are at hand.
    let operands = [logits, bias.unwrap_or(logits), routes];
    let grid = fold(rec.device(), n_tokens.into());
    rec.dispatch(&shaders::ROUTE, None, &[], params, &operands, grid)
}

/// The gates and ups of all experts in one matrix.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGateUp<'a> {
    /// `[2 E F, C]` in one slab, see [`Matrix::n_slabs`].
    pub w: &'a Matrix,
    /// `[2 E F]`; not together with a norm.
    pub bias: Option<&'a Tensor>,
    /// Normalises `x` first.
    pub norm: Option<Norm<'a>>,
    /// E.
    pub n_experts: u32,
    /// Whether each expert's gates come before its own ups, rather than all gates before all ups.
    pub by_expert: bool,
    /// What is applied to the gates.
    pub gate: Gate,
}

impl ExpertGateUp<'_> {
    /// Records `y[t, s] = act(x[t] gateᵀ) * (x[t] upᵀ)` by the experts that `routes` names.
    /// Shader: `shaders/expert_gate_up.wgsl`.
    ///
    /// # Shapes
    /// `x`: `[T, C]`, C a multiple of 4; `routes`: `[T, K, 2]`; `y`: `[T * K, F]`.
    /// # Errors
    /// [`Error::Shape`] if the operands disagree, [`Error::Operand`] if C is no multiple of 4 or `w` is in slabs.
    pub fn record(&self, rec: &mut Recorder, x: &Tensor, routes: &Tensor, y: &Tensor) -> Result<(), Error> {
        const KERNEL: &str = "expert_gate_up";
        let n_tokens = quads(KERNEL, x)?;
        let slab = self.w.only_slab(KERNEL)?;
        let (dim, ffn_dim) = (self.w.cols(), self.w.rows() / (2 * self.n_experts.max(1)));
        let n_used = routes.shape().get(1).copied().unwrap_or(0);
        x.expect_shape(KERNEL, "x", &[n_tokens, dim])?;
        routes.expect_shape(KERNEL, "routes", &[n_tokens, n_used, 2])?;
        y.expect_shape(KERNEL, "y", &[n_tokens * n_used, ffn_dim])?;
        if let Some(bias) = self.bias {
            bias.expect_shape(KERNEL, "bias", &[self.w.rows()])?;
        }
        let vector = vector(KERNEL, self.norm, self.bias, dim)?;
        let (gate_flags, gate) = self.gate.flags();
        let flags = if self.norm.is_some() { NORM } else { 0 } | if self.bias.is_some() { BIAS } else { 0 };
        let (expert_rows, up_row) = match self.by_expert {
            true => (2 * ffn_dim, ffn_dim),
            false => (ffn_dim, self.n_experts * ffn_dim),
        };
        let params = |first_group| ExpertGateUpParams {
            n_used,
            ffn_dim,
            dim,
            blocks: self.w.blocks(),
            w_scales: self.w.quants_words(slab),
            eps: self.norm.map_or(0.0, |norm| norm.eps),
            flags: flags | gate_flags,
            first_group,
            expert_rows,
            up_row,
            n_tokens,
            n_experts: self.n_experts,
        };
        let (choice, constants) = lanes(rec, &shaders::EXPERT_GATE_UP, self.w, self.norm.is_some());
        let constants = [constants, gate.to_vec()].concat();
        let n_groups = lanes_groups(2 * ffn_dim.next_multiple_of(2), choice.size);
        // A vector that is not there is never read; x is at hand.
        let operands = [&slab.words, vector.unwrap_or(x), x, routes, y];
        let of_slots = operations(n_tokens * n_used, 2 * ffn_dim, dim);
        for GridPart { first, grid: [x_groups, y_groups, _] } in grid_parts(rec.device(), n_groups, of_slots) {
            let (kernel, grid) = (&shaders::EXPERT_GATE_UP, [x_groups, y_groups, n_tokens * n_used]);
            rec.dispatch_as(choice.tier, kernel, Some(self.w.weight()), &constants, params(first), &operands, grid)?;
        }
        Ok(())
    }
}

/// The second matrices of all experts in one.
#[derive(Clone, Copy, Debug)]
pub struct ExpertDown<'a> {
    /// `[E C, F]` in one slab, see [`Matrix::n_slabs`].
    pub w: &'a Matrix,
    /// `[E C]`.
    pub bias: Option<&'a Tensor>,
    /// Whether to add to `y` instead of overwriting it.
    pub accumulate: bool,
}

impl ExpertDown<'_> {
    /// Records `y[t] = (y[t] +)` the sum of `weight * (w x[t, s] (+ bias))` over the experts that `routes` names.
    /// Shader: `shaders/expert_down.wgsl`.
    ///
    /// # Shapes
    /// `x`: `[T * K, F]`, F a multiple of 4; `routes`: `[T, K, 2]`; `y`: `[T, C]`.
    /// # Errors
    /// [`Error::Shape`] if the operands disagree, [`Error::Operand`] if F is no multiple of 4 or `w` is in slabs.
    pub fn record(&self, rec: &mut Recorder, x: &Tensor, routes: &Tensor, y: &Tensor) -> Result<(), Error> {
        const KERNEL: &str = "expert_down";
        let n_slots = quads(KERNEL, x)?;
        let slab = self.w.only_slab(KERNEL)?;
        let ([n_tokens, n_out], dim) = (y.dims2(KERNEL, "y")?, self.w.cols());
        let n_used = routes.shape().get(1).copied().unwrap_or(0);
        x.expect_shape(KERNEL, "x", &[n_slots, dim])?;
        routes.expect_shape(KERNEL, "routes", &[n_tokens, n_used, 2])?;
        x.expect_shape(KERNEL, "x", &[n_tokens * n_used, dim])?;
        let n_experts = self.w.rows() / n_out;
        if let Some(bias) = self.bias {
            bias.expect_shape(KERNEL, "bias", &[self.w.rows()])?;
        }
        let flags = if self.bias.is_some() { BIAS } else { 0 } | if self.accumulate { ACCUMULATE } else { 0 };
        let params = |first_group| ExpertDownParams {
            n_used,
            n_out,
            dim,
            blocks: self.w.blocks(),
            w_scales: self.w.quants_words(slab),
            flags,
            first_group,
            n_tokens,
            n_experts,
            _pad: [0; 3],
        };
        let (choice, constants) = lanes(rec, &shaders::EXPERT_DOWN, self.w, false);
        let n_groups = lanes_groups(n_out, choice.size);
        let operands = [&slab.words, self.bias.unwrap_or(x), x, routes, y];
        for GridPart { first, grid: [x_groups, y_groups, _] } in
            grid_parts(rec.device(), n_groups, operations(n_slots, n_out, dim))
        {
            let (kernel, grid) = (&shaders::EXPERT_DOWN, [x_groups, y_groups, n_tokens]);
            rec.dispatch_as(choice.tier, kernel, Some(self.w.weight()), &constants, params(first), &operands, grid)?;
        }
        Ok(())
    }
}
