//! Mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538): the choice of each token's experts and their two products.
//!
//! For a few tokens a workgroup has rows of one expert for one token, see [`ExpertGateUp`] and [`ExpertDown`]. For many,
//! the rows of each expert's tokens are together, see [`ExpertTiles`].

mod tiles;

pub use tiles::{ExpertProduct, ExpertTiles, expert_sum};

use super::linear::{MatvecPlan, Norm, operations, quads, set, vector};
use super::{Gate, GridPart, fold, grid_parts};
use crate::error::Error;
use crate::matrix::{Matrix, Slab};
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::constants::{expert_down, expert_gate_up, expert_tiles, route};
use crate::shaders::params::{ExpertDownParams, ExpertGateUpParams, RouteParams};
use crate::tensor::Tensor;

/// Most experts of a layer, and most that a token has.
pub const MAX_EXPERTS: u32 = route::MOST;
/// Most groups of experts.
pub const MAX_GROUPS: u32 = route::MOST_GROUPS;
/// Most experts that all tokens have.
pub const MAX_SHARED: u32 = expert_tiles::MOST - MAX_EXPERTS;

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
    /// Groups of experts that are chosen first, if any.
    pub groups: Option<ExpertGroups>,
}

/// Groups of E / n experts each (DeepSeek-AI 2024, arXiv:2412.19437): a token's experts are from the best groups alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many there are, up to [`MAX_GROUPS`]; a divisor of E.
    pub n: u32,
    /// How many a token uses.
    pub n_used: u32,
    /// Whether a group counts by the sum of its two best experts' scores rather than by its best one's.
    pub top_two: bool,
}

/// Experts that all tokens have: numbers from E on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedExperts {
    /// M.
    pub n: u32,
    /// Whether their weight is the sigmoid of one more logit, rather than 1.
    pub gated: bool,
}

/// Records the choice of each token's experts: the numbers of the K with the highest scores, `bias` added for the choice
/// alone, and their weights, times a factor of each expert; then the `shared` ones. Shader: `shaders/route.wgsl`.
///
/// # Shapes
/// `logits`: `[T, E]`, or `[T, E + 1]` where shared experts are gated; `bias`, `factors`: `[E]`; `routes`: `[T, K + M, 2]`
/// words, the expert and its weight's bits.
/// # Errors
/// [`Error::Shape`] if the operands disagree, [`Error::Operand`] if E is above [`MAX_EXPERTS`], M above [`MAX_SHARED`], K
/// above the experts of the groups that a token uses, or these are no divisors.
pub fn route(
    rec: &mut Recorder,
    router: &Router,
    shared: SharedExperts,
    logits: &Tensor,
    [bias, factors]: [Option<&Tensor>; 2],
    routes: &Tensor,
) -> Result<(), Error> {
    let [n_tokens, n_logits] = logits.dims2("route", "logits")?;
    let n_experts = n_logits - u32::from(shared.gated);
    let n_slots = routes.shape().get(1).copied().unwrap_or(0);
    routes.expect_shape("route", "routes", &[n_tokens, n_slots, 2])?;
    let operand = |operand, expected: String, found: u32| {
        Err(Error::Operand { kernel: "route", operand, expected, found: found.to_string() })
    };
    if n_experts > MAX_EXPERTS {
        return operand("logits", format!("up to {MAX_EXPERTS} experts"), n_experts);
    }
    if shared.n > MAX_SHARED {
        return operand("routes", format!("up to {MAX_SHARED} experts for all tokens"), shared.n);
    }
    let groups = router.groups.unwrap_or(ExpertGroups { n: 1, n_used: 1, top_two: false });
    let size = n_experts.checked_div(groups.n).filter(|size| size * groups.n == n_experts && groups.n <= MAX_GROUPS);
    let Some(size) = size.filter(|&size| size > 1 || !groups.top_two) else {
        return operand("logits", format!("groups of equal size, up to {MAX_GROUPS}"), groups.n);
    };
    if groups.n_used == 0 || groups.n_used > groups.n {
        return operand("logits", format!("1 to {} groups for a token", groups.n), groups.n_used);
    }
    let (n_used, most) = (n_slots.saturating_sub(shared.n), size * groups.n_used);
    if n_used == 0 || n_used > most {
        return operand("routes", format!("1 to {most} experts for a token"), n_used);
    }
    for (name, vector) in [("bias", bias), ("factors", factors)] {
        vector.map_or(Ok(()), |vector| vector.expect_shape("route", name, &[n_experts]))?;
    }
    let flags = set(&[
        (router.score == ExpertScore::Sigmoid, route::SIGMOID),
        (bias.is_some(), route::BIAS),
        (router.shares, route::SHARES),
        (shared.gated, route::GATED),
        (factors.is_some(), route::FACTORS),
        (groups.top_two, route::TOP_TWO),
    ]);
    let (scale, n_shared) = (router.scale, shared.n);
    let (n_groups, n_groups_used) = (groups.n, groups.n_used);
    let params = RouteParams { n_tokens, n_experts, n_used, flags, scale, n_shared, n_groups, n_groups_used };
    // A vector that is not there is never read; the logits are at hand.
    let operands = [logits, bias.unwrap_or(logits), factors.unwrap_or(logits), routes];
    let grid = fold(rec.target(), n_tokens.into());
    rec.dispatch(&shaders::ROUTE, None, &[], params, &operands, grid)
}

/// Rows of a matrix of gates and ups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertRows {
    /// Of each expert its F gates and then its F ups.
    Both,
    /// Gates alone. What becomes of them waits in `y` for the ups.
    Gates,
    /// Ups alone, after the gates.
    Ups,
}

/// Gates and ups of some experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGateUp<'a> {
    /// `[2 N F, C]`, or `[N F, C]` where it has rows of one kind; an expert's rows in one slab.
    pub w: &'a Matrix,
    /// Which rows it has.
    pub rows: ExpertRows,
    /// Number of its first expert; it has N.
    pub first_expert: u32,
    /// Of all experts, `[2 E F]`, of each its gates' and then its ups'; not together with a norm.
    pub bias: Option<&'a Tensor>,
    /// Normalises `x` first.
    pub norm: Option<Norm<'a>>,
    /// What is applied to the gates.
    pub gate: Gate,
}

impl ExpertGateUp<'_> {
    /// Records `y[t, s] = act(x[t] gateᵀ) * (x[t] upᵀ)` by those experts that `routes` names and `w` has, a dispatch for each
    /// slab of `w`. Shader: `shaders/expert_gate_up.wgsl`.
    ///
    /// # Shapes
    /// `x`: `[T, C]`, C a multiple of 4; `routes`: `[T, K, 2]`; `y`: `[T * K, F]`.
    /// # Errors
    /// [`Error::Shape`] if the operands disagree, [`Error::Operand`] if C is no multiple of 4 or an expert is cut.
    pub fn record(&self, rec: &mut Recorder, x: &Tensor, routes: &Tensor, y: &Tensor) -> Result<(), Error> {
        const KERNEL: &str = "expert_gate_up";
        let (n_tokens, dim) = (quads(KERNEL, x)?, self.w.cols());
        let [n_slots, ffn_dim] = y.dims2(KERNEL, "y")?;
        let n_used = routes.shape().get(1).copied().unwrap_or(0);
        x.expect_shape(KERNEL, "x", &[n_tokens, dim])?;
        routes.expect_shape(KERNEL, "routes", &[n_tokens, n_used, 2])?;
        y.expect_shape(KERNEL, "y", &[n_tokens * n_used, ffn_dim])?;
        expect_biases(KERNEL, self.bias, 2 * ffn_dim)?;
        let vector = vector(KERNEL, self.norm, self.bias, dim)?;
        let (is_apart, is_ups) = (self.rows != ExpertRows::Both, self.rows == ExpertRows::Ups);
        let lanes = MatvecPlan::new(rec, &shaders::EXPERT_GATE_UP, self.w, 1);
        let kinds = [(is_apart, ("APART", 1.0)), (is_ups, ("UPS", 1.0))];
        let kinds = kinds.into_iter().filter(|(is_set, _)| *is_set).map(|(_, constant)| constant);
        let constants: Vec<_> = lanes
            .constants(self.norm.is_some())
            .into_iter()
            .chain(self.gate.constants().iter().copied())
            .chain(kinds)
            .collect();
        let n_rows = if is_apart { ffn_dim } else { 2 * ffn_dim.next_multiple_of(2) };
        let n_groups = lanes.groups(n_rows);
        for slab in self.w.slabs() {
            let experts = Experts::of(KERNEL, slab, self.first_expert, if is_apart { ffn_dim } else { 2 * ffn_dim })?;
            let params = |first_group| ExpertGateUpParams {
                n_used,
                ffn_dim,
                dim,
                blocks: self.w.blocks(),
                w_scales: self.w.quants_words(slab),
                eps: self.norm.map_or(0.0, |norm| norm.eps),
                flags: set(&[(self.bias.is_some(), expert_gate_up::BIAS)]),
                first_group,
                first_expert: experts.first,
                n_experts: experts.n,
                n_tokens,
            };
            // A vector that is not there is never read; x is at hand.
            let operands = [&slab.words, vector.unwrap_or(x), x, routes, y];
            let of_slots = operations(n_slots, n_rows, dim);
            for GridPart { first, grid: [x_groups, y_groups, _] } in grid_parts(rec.target(), n_groups, of_slots) {
                let (kernel, grid) = (&shaders::EXPERT_GATE_UP, [x_groups, y_groups, n_slots]);
                rec.dispatch_as(lanes.tier, kernel, Some(self.w.weight()), &constants, params(first), &operands, grid)?;
            }
        }
        Ok(())
    }
}

/// The second matrices of some experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertDown<'a> {
    /// `[N C, F]`, an expert's rows in one slab.
    pub w: &'a Matrix,
    /// Number of its first expert; it has N.
    pub first_expert: u32,
    /// Of all experts, `[E C]`.
    pub bias: Option<&'a Tensor>,
    /// Whether to add to `y` instead of overwriting it.
    pub accumulate: bool,
}

impl ExpertDown<'_> {
    /// Records `y[t] = (y[t] +)` the sum of `weight * (w x[t, s] (+ bias))` over those experts that `routes` names and `w`
    /// has, a dispatch for each slab of `w`. Shader: `shaders/expert_down.wgsl`.
    ///
    /// # Shapes
    /// `x`: `[T * K, F]`, F a multiple of 4; `routes`: `[T, K, 2]`; `y`: `[T, C]`.
    /// # Errors
    /// [`Error::Shape`] if the operands disagree, [`Error::Operand`] if F is no multiple of 4 or an expert is cut.
    pub fn record(&self, rec: &mut Recorder, x: &Tensor, routes: &Tensor, y: &Tensor) -> Result<(), Error> {
        const KERNEL: &str = "expert_down";
        let n_slots = quads(KERNEL, x)?;
        let ([n_tokens, n_out], dim) = (y.dims2(KERNEL, "y")?, self.w.cols());
        let n_used = routes.shape().get(1).copied().unwrap_or(0);
        x.expect_shape(KERNEL, "x", &[n_slots, dim])?;
        routes.expect_shape(KERNEL, "routes", &[n_tokens, n_used, 2])?;
        x.expect_shape(KERNEL, "x", &[n_tokens * n_used, dim])?;
        expect_biases(KERNEL, self.bias, n_out)?;
        let lanes = MatvecPlan::new(rec, &shaders::EXPERT_DOWN, self.w, 1);
        let (constants, n_groups) = (lanes.constants(false), lanes.groups(n_out));
        for (i, slab) in self.w.slabs().iter().enumerate() {
            let experts = Experts::of(KERNEL, slab, self.first_expert, n_out)?;
            let params = |first_group| ExpertDownParams {
                n_used,
                n_out,
                dim,
                blocks: self.w.blocks(),
                w_scales: self.w.quants_words(slab),
                flags: set(&[
                    (self.bias.is_some(), expert_down::BIAS),
                    (self.accumulate || i > 0, expert_down::ACCUMULATE),
                ]),
                first_group,
                n_tokens,
                first_expert: experts.first,
                n_experts: experts.n,
            };
            let operands = [&slab.words, self.bias.unwrap_or(x), x, routes, y];
            let of_slots = operations(n_slots, n_out, dim);
            for GridPart { first, grid: [x_groups, y_groups, _] } in grid_parts(rec.target(), n_groups, of_slots) {
                let (kernel, grid) = (&shaders::EXPERT_DOWN, [x_groups, y_groups, n_tokens]);
                rec.dispatch_as(lanes.tier, kernel, Some(self.w.weight()), &constants, params(first), &operands, grid)?;
            }
        }
        Ok(())
    }
}

/// The experts of a slab.
struct Experts {
    first: u32,
    n: u32,
}

impl Experts {
    /// Those of a slab of a matrix that begins with expert `first`; an expert has so many rows.
    fn of(kernel: &'static str, slab: &Slab, first: u32, rows: u32) -> Result<Experts, Error> {
        if rows == 0 || !slab.first_row.is_multiple_of(rows) || !slab.rows.is_multiple_of(rows) {
            return Err(Error::Operand {
                kernel,
                operand: "w",
                expected: format!("slabs of whole experts, of {rows} rows each"),
                found: format!("one of {} rows from row {} on", slab.rows, slab.first_row),
            });
        }
        Ok(Experts { first: first + slab.first_row / rows, n: slab.rows / rows })
    }
}

/// Refuses biases that are not so many for each expert.
fn expect_biases(kernel: &'static str, bias: Option<&Tensor>, of_each: u32) -> Result<(), Error> {
    let Some(bias) = bias else { return Ok(()) };
    let n_experts = (bias.len() as u32).checked_div(of_each).unwrap_or(0).max(1);
    bias.expect_shape(kernel, "bias", &[n_experts * of_each])
}
