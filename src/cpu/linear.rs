//! `matmul`, `matmul_naive` and `matvec`: `y = (y +) act(x wᵀ (+ bias))` with packed `w`; `gate_up` and
//! `linear_norm`, which go on with the product; `split_sum`, which ends one.
//!
//! Rows of `w` are shared out over threads, a panel of them at a time. For a few tokens, the weights are multiplied as
//! they are unpacked, in registers; for more, a panel is unpacked once and multiplied as a plain matrix, or where
//! activations are rounded, repacked once and multiplied as bytes or by tiles of BF16.

use std::borrow::Cow;

use super::Call;
use super::activation::{GeluExact, GeluQuick, GeluTanh, Silu, Tanh, gated_row};
use super::block::{Block, PANEL_ROWS, Packed, Panel, Rounded, TiledPanel, TiledRows};
use super::dots::Dots;
use super::norm::{OPS as NORM_OPS, layer_norm_row, rms_norm_row};
use super::panels::Panels;
use super::simd::{self, Function, Instructions, Lanes, Numbers, WideWork};
use super::threads::{self, Tile};
use crate::dtype::{BLOCK, WeightType};
use crate::kernels::{Activation, Gate, Gelu, INVARIANT};
use crate::recording::BatchInvariance;
use crate::shaders::constants::linear::{ACCUMULATE, BIAS};
use crate::shaders::constants::linear_norm::SHIFT;
use crate::shaders::overrides;
use crate::shaders::params::{GateUpParams, LinearParams, SplitSumParams};

/// From here on unpacking a panel once costs less than unpacking it again for each token.
const PANEL_TOKENS: usize = 12;

impl Call<'_> {
    /// What is applied to sums, by the overrides of `shaders/shared/linear.wgsl`.
    fn activation(&self) -> Option<Activation> {
        match (self.is(overrides::GELU), self.is(overrides::GELU_TANH), self.is(overrides::TANH)) {
            (true, ..) if self.is(overrides::GELU_QUICK) => Some(Activation::Gelu(Gelu::Quick)),
            (true, false, _) => Some(Activation::Gelu(Gelu::Exact)),
            (true, true, _) => Some(Activation::Gelu(Gelu::Tanh)),
            (false, _, true) => Some(Activation::Tanh),
            (false, _, false) => None,
        }
    }

    /// What is applied to gates, by the overrides of `shaders/shared/gated.wgsl`.
    pub(super) fn gate(&self) -> Gate {
        match self.activation() {
            _ if self.is(overrides::CLAMPED) => Gate::Clamped,
            Some(Activation::Gelu(form)) => Gate::Gelu(form),
            _ => Gate::Silu,
        }
    }
}

pub(crate) fn matmul(mut call: Call<'_>) {
    let params: LinearParams = call.params();
    let (weight, panels, has_norm) = (call.weight, call.panels, call.is(overrides::NORM));
    let form = ProductMode::of(params.flags & INVARIANT != 0, call.rounds, call.batch_invariance);
    let end = End { activation: call.activation(), adds: params.flags & ACCUMULATE != 0 };
    let [w, vector, x, y] = call.operands();
    let (n_tokens, n_out, dim) = (params.n_tokens as usize, params.n_out as usize, params.dim as usize);
    let n_blocks = params.blocks as usize;
    let norm = has_norm.then(|| (vector.get(), params.eps));
    let x = activations(&x.get::<f32>()[..n_tokens * dim], [dim, n_blocks], norm);
    let (start, stride) = (params.y_start as usize, params.y_stride as usize);
    let to = OutputRows {
        y: &mut y.get_mut::<f32>()[..n_tokens * stride],
        start,
        stride,
        bias: (params.flags & BIAS != 0).then(|| &vector.get::<f32>()[start..][..n_out]),
        end,
    };
    Product { form, w: w.get(), w_scales: params.w_scales, panels, first_row: 0, x: &x, n_tokens, n_out, n_blocks }
        .write(weight, to);
}

/// What becomes of sums with their bias.
#[derive(Clone, Copy, Default)]
struct End {
    activation: Option<Activation>,
    /// Whether they are added to what is there.
    adds: bool,
}

/// Where a product goes: `y = (y +) act(product (+ bias))`, columns of rows from `start` on.
pub(super) struct OutputRows<'a> {
    y: &'a mut [f32],
    start: usize,
    stride: usize,
    bias: Option<&'a [f32]>,
    end: End,
}

impl<'a> OutputRows<'a> {
    /// The product alone, in columns from `start` on of rows of `stride`.
    pub fn at(y: &'a mut [f32], [start, stride]: [usize; 2]) -> OutputRows<'a> {
        OutputRows { y, start, stride, bias: None, end: End::default() }
    }

    /// The product alone.
    fn plain(y: &'a mut [f32], n_out: usize) -> OutputRows<'a> {
        OutputRows { y, start: 0, stride: n_out, bias: None, end: End::default() }
    }
}

/// Ends parts of a product's rows: `y = (y +) act(sums (+ bias))`.
struct Finish<'a, R> {
    /// `y` and sums of each row.
    rows: R,
    bias: Option<&'a [f32]>,
    end: End,
}

impl<'y, 's, R: Iterator<Item = (&'y mut [f32], &'s [f32])>> WideWork for Finish<'_, R> {
    #[inline(always)]
    fn run_wide<const LEN: usize, L: Lanes<LEN>>(self) {
        match self.end.activation {
            None => self.with::<L, _>(Same),
            Some(Activation::Tanh) => self.with::<L, _>(Tanh),
            Some(Activation::Gelu(Gelu::Exact)) => self.with::<L, _>(GeluExact),
            Some(Activation::Gelu(Gelu::Tanh)) => self.with::<L, _>(GeluTanh),
            Some(Activation::Gelu(Gelu::Quick)) => self.with::<L, _>(GeluQuick),
        }
    }
}

impl<'y, 's, R: Iterator<Item = (&'y mut [f32], &'s [f32])>> Finish<'_, R> {
    #[inline(always)]
    fn with<I: Instructions, F: Function>(self, activation: F) {
        let Finish { rows, bias, end: End { adds, .. } } = self;
        for (y, sums) in rows {
            let whole = y.len() / I::Numbers::LEN * I::Numbers::LEN;
            let ((y, last_y), (sums, last_sums)) = (y.split_at_mut(whole), sums.split_at(whole));
            let bias = bias.map(|bias| bias.split_at(whole));
            finish::<I, I::Numbers>(&activation, y, sums, bias.map(|(bias, _)| bias), adds);
            finish::<I, f32>(&activation, last_y, last_sums, bias.map(|(_, last)| last), adds);
        }
    }
}

/// `y = (y +) activation(sums (+ bias))` of as many as there are whole `X` in `y`.
#[inline(always)]
fn finish<I: Instructions, X: Numbers>(
    activation: &impl Function,
    y: &mut [f32],
    sums: &[f32],
    bias: Option<&[f32]>,
    adds: bool,
) {
    let outputs = y.chunks_exact_mut(X::LEN).zip(sums.chunks_exact(X::LEN));
    match bias {
        Some(bias) => {
            for ((y, sum), bias) in outputs.zip(bias.chunks_exact(X::LEN)) {
                put(y, activation.at::<I, X>(X::load(sum) + X::load(bias)), adds);
            }
        }
        None => {
            for (y, sum) in outputs {
                put(y, activation.at::<I, X>(X::load(sum)), adds);
            }
        }
    }
}

#[inline(always)]
fn put<X: Numbers>(y: &mut [f32], value: X, adds: bool) {
    let value = if adds { value + X::load(y) } else { value };
    value.store(y);
}

/// In place of an activation.
struct Same;

impl Function for Same {
    #[inline(always)]
    fn at<I: Instructions, X: Numbers>(&self, x: X) -> X {
        x
    }
}

pub(crate) fn linear_norm(mut call: Call<'_>) {
    let params: LinearParams = call.params();
    let (format, panels) = (call.weight, call.panels);
    let form = ProductMode::of(params.flags & INVARIANT != 0, call.rounds, call.batch_invariance);
    let [w, vector, x, weight, shift, y] = call.operands();
    let (n_tokens, n_out, dim) = (params.n_tokens as usize, params.n_out as usize, params.dim as usize);
    let n_blocks = params.blocks as usize;
    let x = activations(&x.get::<f32>()[..n_tokens * dim], [dim, n_blocks], None);
    let y = &mut y.get_mut::<f32>()[..n_tokens * n_out];
    let bias = (params.flags & BIAS != 0).then(|| &vector.get::<f32>()[..n_out]);
    let end = End { activation: None, adds: params.flags & ACCUMULATE != 0 };
    let to = OutputRows { bias, end, ..OutputRows::plain(&mut *y, n_out) };
    Product { form, w: w.get(), w_scales: params.w_scales, panels, first_row: 0, x: &x, n_tokens, n_out, n_blocks }
        .write(format, to);

    let shift = (params.flags & SHIFT != 0).then(|| &shift.get::<f32>()[..n_out]);
    let weight = &weight.get::<f32>()[..n_out];
    threads::for_each_chunk(y, n_out, n_tokens * n_out * NORM_OPS, |_, y| {
        layer_norm_row(y, weight, shift, params.eps);
    });
}

pub(crate) fn matvec(call: Call<'_>) {
    matmul(call);
}

pub(crate) fn split_sum(mut call: Call<'_>) {
    let params: SplitSumParams = call.params();
    let end = End { activation: call.activation(), adds: params.flags & ACCUMULATE != 0 };
    let [parts, vector, y] = call.operands();
    let (n_tokens, n_out, n_splits) = (params.n_tokens as usize, params.n_out as usize, params.n_splits as usize);
    let parts = &parts.get::<f32>()[..n_splits * n_tokens * n_out];
    let bias = (params.flags & BIAS != 0).then(|| &vector.get::<f32>()[params.y_start as usize..][..n_out]);
    let rows = y.get_mut::<f32>()[..n_tokens * params.y_stride as usize].chunks_exact_mut(params.y_stride as usize);
    for (t, row) in rows.enumerate() {
        let sum = |n| parts.iter().skip(t * n_out + n).step_by(n_tokens * n_out).sum();
        let sums: Vec<f32> = (0..n_out).map(sum).collect();
        let y = &mut row[params.y_start as usize..][..n_out];
        simd::run_wide(Finish { rows: std::iter::once((y, sums.as_slice())), bias, end });
    }
}

pub(crate) fn gate_up(mut call: Call<'_>) {
    let params: GateUpParams = call.params();
    let plan = GatePlan::of(&call);
    let [w, vector, x, y] = call.operands();
    gate_up_with(params, &plan, (w.get(), vector.get(), x.get(), y.get_mut()), |_, _| ());
}

/// How `gate_up` is taken.
pub(super) struct GatePlan {
    weight: Option<WeightType>,
    form: ProductMode,
    has_norm: bool,
    gate: Gate,
    pub is_ups: bool,
}

impl GatePlan {
    pub fn of(call: &Call<'_>) -> GatePlan {
        GatePlan {
            weight: call.weight,
            form: ProductMode::of(false, call.rounds, call.batch_invariance),
            has_norm: call.is(overrides::NORM),
            gate: call.gate(),
            is_ups: call.is(overrides::UPS),
        }
    }
}

/// As [`gate_up`]; `change` is given the products with all rows of `w`, and how many these are, before they are multiplied.
pub(super) fn gate_up_with(
    params: GateUpParams,
    &GatePlan { weight, form, has_norm, gate: kind, is_ups }: &GatePlan,
    (w, vector, x, y): (&[u32], &[f32], &[f32], &mut [f32]),
    change: impl FnOnce(&mut [f32], usize),
) {
    let (n_tokens, ffn_dim, dim) = (params.n_tokens as usize, params.ffn_dim as usize, params.dim as usize);
    let n_blocks = params.blocks as usize;
    let x = activations(&x[..n_tokens * dim], [dim, n_blocks], has_norm.then_some((vector, params.eps)));
    let n_out = if is_ups { ffn_dim } else { 2 * ffn_dim };
    let w_scales = params.w_scales;
    let product = Product { form, w, w_scales, panels: None, first_row: 0, x: &x, n_tokens, n_out, n_blocks };
    let mut sums = product.plain(weight);
    change(&mut sums, n_out);
    for (y, sums) in y.chunks_exact_mut(ffn_dim).zip(sums.chunks_exact(n_out)) {
        let waiting = if is_ups { y.to_vec() } else { Vec::new() };
        let (gate, up) = if is_ups { (&waiting[..], sums) } else { sums.split_at(ffn_dim) };
        gated_by(kind, gate, up, y);
    }
}

/// `y = act(gate) * up`.
pub(super) fn gated_by(kind: Gate, gate: &[f32], up: &[f32], y: &mut [f32]) {
    match kind {
        Gate::Silu => gated_row(Silu, gate, up, y),
        Gate::Clamped => {
            for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
                let gate = gate.min(7.0);
                *y = (up.clamp(-7.0, 7.0) + 1.0) * gate / (1.0 + (-1.702 * gate).exp());
            }
        }
        Gate::Gelu(Gelu::Exact) => gated_row(GeluExact, gate, up, y),
        Gate::Gelu(Gelu::Tanh) => gated_row(GeluTanh, gate, up, y),
        Gate::Gelu(Gelu::Quick) => gated_row(GeluQuick, gate, up, y),
    }
}

/// The activations in whole blocks, normalised if there are a weight and an epsilon; rows of `dim` elements that end
/// amid their blocks are padded with zeros.
pub(super) fn activations<'a>(
    x: &'a [f32],
    [dim, n_blocks]: [usize; 2],
    norm: Option<(&[f32], f32)>,
) -> Cow<'a, [Block]> {
    if norm.is_none() && dim == n_blocks * BLOCK {
        return Cow::Borrowed(x.as_chunks().0);
    }
    let mut blocks = vec![[0.0; BLOCK]; x.len() / dim * n_blocks];
    for (to, from) in blocks.as_flattened_mut().chunks_exact_mut(n_blocks * BLOCK).zip(x.chunks_exact(dim)) {
        if let Some((weight, eps)) = norm {
            rms_norm_row(from, &weight[..dim], eps, &mut to[..dim]);
        } else {
            to[..dim].copy_from_slice(from);
        }
    }
    Cow::Owned(blocks)
}

/// How a product may be computed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ProductMode {
    /// Whether activations are rounded where that is faster.
    rounds: bool,
    batch_invariance: BatchInvariance,
}

impl ProductMode {
    pub fn of(is_invariant: bool, rounds: bool, batch_invariance: BatchInvariance) -> ProductMode {
        match is_invariant {
            // Exact.
            true => ProductMode { rounds: false, batch_invariance: BatchInvariance::Many },
            false => ProductMode { rounds, batch_invariance },
        }
    }

    /// Whether weights are multiplied as they are unpacked, in registers.
    fn in_registers(self, n_tokens: usize) -> bool {
        match self.batch_invariance {
            BatchInvariance::Off => n_tokens < PANEL_TOKENS,
            BatchInvariance::Few { .. } => true,
            BatchInvariance::Many => false,
        }
    }
}

/// `x wᵀ`, where `x` is `[n_tokens, n_blocks]` blocks and `w` packed `[n_out, n_blocks]`.
pub(super) struct Product<'a> {
    pub form: ProductMode,
    pub w: &'a [u32],
    pub w_scales: u32,
    /// How the rows of `w` are ordered, if not one after the other.
    pub panels: Option<Panels>,
    /// Rows of `w` to leave out before those of the product.
    pub first_row: usize,
    pub x: &'a [Block],
    pub n_tokens: usize,
    pub n_out: usize,
    pub n_blocks: usize,
}

/// What a thread computes a panel in.
#[derive(Default)]
struct Scratch {
    unpacked: Vec<Block>,
    panel: Panel,
    tiled: TiledPanel,
    /// `[tokens, rows of the panel]`.
    sums: Vec<f32>,
}

impl Product<'_> {
    /// The product alone, `[n_tokens, n_out]`.
    pub fn plain(&self, weight: Option<WeightType>) -> Vec<f32> {
        let mut sums = vec![0.0; self.n_tokens * self.n_out];
        self.write(weight, OutputRows::plain(&mut sums, self.n_out));
        sums
    }

    pub fn write(&self, weight: Option<WeightType>, to: OutputRows<'_>) {
        /// Tokens whose sums stay in the second-level cache with a panel.
        const MAX_TOKENS: usize = 512;
        /// Floats of tokens that stay there while one panel after another meets them.
        const X_LEN: usize = 1 << 18;
        /// The same of BF16.
        const TILED_LEN: usize = 1 << 19;
        let &Product { form, w, w_scales, panels, first_row, x, n_tokens, n_out, n_blocks } = self;
        let (words, w) = (w, Packed::new(weight, w, w_scales));
        // Where nobody asks for panels, as in browsers, the compiler then leaves their products out.
        let panels = panels.filter(|_| simd::panel_lanes().is_some());
        let in_registers = form.in_registers(n_tokens);
        let tiles = if form.rounds && !in_registers { w.tiles() } else { None };
        let tiled = tiles.map(|tiles| TiledRows::of(tiles, x, n_blocks));
        let rounds = form.rounds && tiled.is_none() && if in_registers { w.rounds() } else { w.rounds_panels() };
        let rounded = rounds.then(|| Rounded::of(x, n_blocks, &w));
        let max_tokens = match (panels, &tiled) {
            (Some(_), _) => (X_LEN / (n_blocks * BLOCK)).clamp(64, MAX_TOKENS),
            (None, Some(_)) => (TILED_LEN / (n_blocks * BLOCK)).clamp(64, MAX_TOKENS),
            (None, None) => MAX_TOKENS,
        };
        let n_passes = n_tokens.div_ceil(max_tokens).max(1);
        // Whole tiles of tokens.
        let height = n_tokens.div_ceil(n_passes).next_multiple_of(if tiled.is_some() { TiledRows::GROUP } else { 8 });
        let width = if in_registers {
            threads::chunk_len(n_out, 4, 256)
        } else if rounds || tiled.is_some() {
            threads::chunk_len(n_passes * n_out, PANEL_ROWS, 8 * PANEL_ROWS)
        } else if let Some(panels) = panels {
            threads::chunk_len(n_passes * n_out, panels.width, 4 * panels.width)
        } else {
            /// Floats of an unpacked panel that stay there while all tokens meet them.
            const PANEL_LEN: usize = 1 << 18;
            let most = (PANEL_LEN / (n_blocks * BLOCK)).next_multiple_of(16).clamp(16, 256);
            threads::chunk_len(n_passes * n_out, 16, most)
        };
        let OutputRows { y, start, stride, bias, end } = to;
        let ops = n_tokens * n_out * n_blocks * BLOCK;
        let write = |Scratch { unpacked, panel, tiled: tiled_panel, sums }: &mut Scratch, mut tile: Tile<'_>| {
            let x = &x[tile.rows.start * n_blocks..tile.rows.end * n_blocks];
            let bias = bias.map(|bias| &bias[tile.columns.start..]);
            let n_rows = tile.columns.len();
            if let Some(panels) = panels {
                let n_rows = n_rows.next_multiple_of(panels.width);
                sums.resize(tile.rows.len() * n_rows, 0.0);
                panels.dots(words, tile.columns.start, x.as_flattened(), sums);
                let rows = tile.rows_mut().zip(sums.chunks_exact(n_rows));
                return simd::run_wide(Finish { rows, bias, end });
            }
            let first = (first_row + tile.columns.start) * n_blocks;
            let rows = if rounds { w.from(first) } else { w.run(first, n_rows * n_blocks) };
            sums.resize(tile.rows.len() * n_rows, 0.0);
            if let Some(x) = rounded.as_ref().filter(|_| in_registers) {
                rows.rounded_dots(x, n_blocks, sums);
            } else if let Some(x) = &rounded {
                rows.panel_dots(x, [tile.rows.start, tile.rows.len()], n_blocks, panel, sums);
            } else if let Some(x) = &tiled {
                rows.tiled_dots(x, [tile.rows.start, tile.rows.len()], tiled_panel, sums);
            } else if in_registers {
                rows.dots(x, n_blocks, sums);
            } else {
                let weights = rows.floats().unwrap_or_else(|| {
                    unpacked.resize(n_rows * n_blocks, [0.0; BLOCK]);
                    rows.unpack(unpacked);
                    unpacked.as_flattened()
                });
                simd::run_wide(Dots { w: weights, x: x.as_flattened(), dim: n_blocks * BLOCK, sums });
            }
            simd::run_wide(Finish { rows: tile.rows_mut().zip(sums.chunks_exact(n_rows)), bias, end });
        };
        threads::for_each_tile(y, stride, start..start + n_out, [height.max(1), width], ops, write);
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::cpu::Operand;
    use crate::cpu::simd::Work;

    /// Numbers in [-1, 1) without a pattern.
    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let next = |state: &mut u32| {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            Some((*state >> 8) as f32 / (1 << 23) as f32 - 1.0)
        };
        let mut state = seed;
        std::iter::from_fn(|| next(&mut state)).take(n).collect()
    }

    fn assert_close(found: &[f32], want: &[f64], size: f64) {
        for (i, (&found, &want)) in found.iter().zip(want).enumerate() {
            assert!((f64::from(found) - want).abs() < 1e-6 * size, "[{i}]: {found}, expected {want}");
        }
    }

    #[test]
    fn dot_products_agree_with_f64() {
        for [n_rows, n_tokens, dim] in [[1, 1, 32], [16, 4, 64], [17, 5, 96], [80, 33, 160], [3, 70, 1024]] {
            let (w, x) = (numbers(n_rows * dim, 1), numbers(n_tokens * dim, 2));
            let dot = |t: usize, n: usize| -> f64 {
                (0..dim).map(|k| f64::from(x[t * dim + k]) * f64::from(w[n * dim + k])).sum()
            };
            let want: Vec<f64> = (0..n_tokens * n_rows).map(|i| dot(i / n_rows, i % n_rows)).collect();
            // On this processor, on one with vectors of 256 bits at most, and on any.
            let ways: [fn(Dots<'_>); 3] =
                [|dots| simd::run_wide(dots), |dots| simd::run(dots), |dots| dots.run::<[f32; 8]>()];
            for run in ways {
                let mut sums = vec![f32::NAN; n_tokens * n_rows];
                run(Dots { w: &w, x: &x, dim, sums: &mut sums });
                assert_close(&sums, &want, (dim as f64).sqrt());
            }
        }
    }

    #[test]
    fn dot_products_do_not_depend_on_the_token_count() {
        const MOST: usize = 130;
        for (n_rows, dim) in [(1, 24), (1, 64), (1, 768), (3, 384), (16, 384), (17, 1536), (33, 520), (96, 1536)] {
            let (w, x) = (numbers(n_rows * dim, 1), numbers(MOST * dim, 2));
            let mut all = vec![0.0; MOST * n_rows];
            simd::run_wide(Dots { w: &w, x: &x, dim, sums: &mut all });
            for n_tokens in [1, 2, 3, 8, 15, 16, 17, 31, 64, 65, 100, 129] {
                let mut some = vec![0.0; n_tokens * n_rows];
                simd::run_wide(Dots { w: &w, x: &x[..n_tokens * dim], dim, sums: &mut some });
                assert_eq!(some, all[..some.len()], "{n_rows} rows of {dim}, {n_tokens} tokens");
            }
        }
    }

    /// Of more tokens than are taken at a time, with rounded activations and rows that are no whole panels.
    #[test]
    fn rounded_products_do_not_depend_on_the_token_count() {
        const MOST: usize = 600;
        let (n_out, n_blocks) = (75, 70);
        let dim = n_blocks * BLOCK;
        let words: Vec<u32> =
            numbers(n_out * n_blocks * 4, 1).iter().map(|x| x.to_bits().wrapping_mul(0x9e37_79b9)).collect();
        let scales = vec![f16::from_f32(0.01).to_bits(); n_out * n_blocks];
        let w = [words, bytemuck::pod_collect_to_vec(&scales)].concat();
        let x = numbers(MOST * dim, 2);
        let product = |n_tokens: usize| {
            Product {
                form: ProductMode::of(false, true, BatchInvariance::Many),
                w: &w,
                w_scales: (n_out * n_blocks * 4) as u32,
                panels: None,
                first_row: 0,
                x: &x.as_chunks().0[..n_tokens * n_blocks],
                n_tokens,
                n_out,
                n_blocks,
            }
            .plain(Some(WeightType::Q4_0))
        };
        let all = product(MOST);
        for n_tokens in [1, 8, 31, 32, 33, 128, 250, 513] {
            assert!(product(n_tokens) == all[..n_tokens * n_out], "{n_tokens} tokens");
        }
    }

    /// Panels of other widths, as other numbers of tokens ask for, end in other tiles.
    #[test]
    fn dot_products_do_not_depend_on_neighbouring_rows() {
        let (dim, n_tokens, n_rows) = (200, 7, 23);
        let (w, x) = (numbers(n_rows * dim, 1), numbers(n_tokens * dim, 2));
        let ways: [fn(Dots<'_>); 3] =
            [|dots| simd::run_wide(dots), |dots| simd::run(dots), |dots| dots.run::<[f32; 8]>()];
        for run in ways {
            let product = |rows: std::ops::Range<usize>| {
                let mut sums = vec![0.0; n_tokens * rows.len()];
                run(Dots { w: &w[rows.start * dim..rows.end * dim], x: &x, dim, sums: &mut sums });
                sums
            };
            let all = product(0..n_rows);
            for len in [1, 2, 3, 4, 5, 16] {
                for first in 0..n_rows - len {
                    let expected: Vec<f32> =
                        all.chunks(n_rows).flat_map(|sums| sums[first..first + len].to_vec()).collect();
                    assert_eq!(product(first..first + len), expected, "{len} rows from {first} on");
                }
            }
        }
    }

    /// Odd sizes, a bias, a slab that begins inside the rows of `y`, and numbers of tokens either side of the switch
    /// and above what is taken at a time.
    #[test]
    fn products_of_f16_weights_agree_with_f64() {
        for [n_tokens, n_out, dim] in
            [[1usize, 37, 45], [PANEL_TOKENS - 1, 300, 32], [PANEL_TOKENS, 37, 45], [33, 300, 100], [1030, 37, 45]]
        {
            let blocks = dim.div_ceil(BLOCK);
            let w: Vec<f16> = numbers(n_out * dim, 3).into_iter().map(f16::from_f32).collect();
            let mut packed = vec![0u16; n_out * blocks * BLOCK];
            for (to, from) in packed.chunks_exact_mut(blocks * BLOCK).zip(w.chunks_exact(dim)) {
                to.iter_mut().zip(from).for_each(|(to, from)| *to = from.to_bits());
            }
            let words: Vec<u32> = bytemuck::pod_collect_to_vec(&packed);
            let (bias, x, before) =
                (numbers(n_out + 5, 4), numbers(n_tokens * dim, 5), numbers(n_tokens * (n_out + 5), 6));
            let mut y = before.clone();
            let params = LinearParams {
                n_tokens: n_tokens as u32,
                n_out: n_out as u32,
                dim: dim as u32,
                blocks: blocks as u32,
                w_scales: words.len() as u32,
                y_start: 2,
                y_stride: n_out as u32 + 5,
                flags: BIAS | ACCUMULATE,
                eps: 0.0,
                split_blocks: blocks as u32,
                first_group: 0,
            };
            matmul(Call {
                params: bytemuck::bytes_of(&params),
                constants: &[],
                weight: Some(WeightType::F16),
                rounds: false,
                batch_invariance: Default::default(),
                panels: None,
                operands: vec![
                    Operand::Read(&words),
                    Operand::Read(bytemuck::cast_slice(&bias)),
                    Operand::Read(bytemuck::cast_slice(&x)),
                    Operand::Write(bytemuck::cast_slice_mut(&mut y)),
                ],
            });
            let want: Vec<f64> = (0..y.len())
                .map(|i| {
                    let (t, before) = (i / (n_out + 5), f64::from(before[i]));
                    let Some(n) = (i % (n_out + 5)).checked_sub(2).filter(|&n| n < n_out) else { return before };
                    let dot: f64 = (0..dim).map(|k| f64::from(x[t * dim + k]) * w[n * dim + k].to_f64()).sum();
                    dot + f64::from(bias[n + 2]) + before
                })
                .collect();
            assert_close(&y, &want, (dim as f64).sqrt());
        }
    }
}
