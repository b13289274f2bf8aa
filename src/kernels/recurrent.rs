//! Layers that keep a state of fixed size in place of keys and values.

use super::{StepState, check_loop, fold};
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::shaders::constants::short_conv;
use crate::shaders::params::{DeltaRuleParams, SelectiveScanParams, ShortConvParams};
use crate::tensor::Tensor;

/// States that a layer has room for, in turns: those after the last passes, so that a sequence can go back by as many.
pub const N_STATES: u32 = 4;

/// States that a sequence has in a layer's `kept` ones, `[states of all sequences, ..]`, and how many sequences a pass has, with
/// so many tokens.
fn states(state: &StepState, n_tokens: u32) -> (u32, u32) {
    (state.n_states(), if state.is_batch() { n_tokens } else { 1 })
}

/// Refuses states of another shape than those of some sequences, or of one alone.
fn check_states(
    kernel: &'static str,
    operand: &'static str,
    state: &StepState,
    kept: &Tensor,
    shape: &[u32],
) -> Result<(), Error> {
    let n_states = state.n_states();
    let n = if state.is_shared() {
        kept.shape().first().copied().unwrap_or(0).next_multiple_of(n_states).max(1)
    } else {
        n_states
    };
    kept.expect_shape(kernel, operand, &[&[n], shape].concat())
}

/// Most taps of a convolution.
pub const MAX_TAPS: u32 = short_conv::MOST;

/// A causal convolution of each channel.
#[derive(Clone, Copy, Debug)]
pub struct ShortConv<'a> {
    /// `[C, taps]`, 2 to [`MAX_TAPS`] taps, the newest input's last.
    pub weight: &'a Tensor,
    /// `[C]`.
    pub bias: Option<&'a Tensor>,
    /// Whether inputs are products of two thirds of `x`, and the last third multiplies outputs; else outputs go through
    /// SiLU.
    pub gated: bool,
    /// First column of inputs that are not gated.
    pub first_column: u32,
}

impl ShortConv<'_> {
    /// Records the convolution of the pass's tokens with those before them, whose inputs are in `past`.
    /// Shader: `shaders/short_conv.wgsl`.
    ///
    /// # Shapes
    /// `x`: `[T, 3 C]` if gated, else `[T, first + C]` or wider; `past`: `[N_STATES, taps - 1, C]`, or
    /// `[sequences * states, taps - 1, C]` where sequences share it; `y`: `[T, C]`.
    /// # Errors
    /// [`Error::Shape`] if the operands disagree, [`Error::Operand`] for another number of taps.
    pub fn record(
        &self,
        rec: &mut Recorder,
        state: &StepState,
        x: &Tensor,
        past: &Tensor,
        y: &Tensor,
    ) -> Result<(), Error> {
        const KERNEL: &str = "short_conv";
        let ([n_tokens, channels], [_, x_stride]) = (y.dims2(KERNEL, "y")?, x.dims2(KERNEL, "x")?);
        let [_, taps] = self.weight.dims2(KERNEL, "weight")?;
        self.weight.expect_shape(KERNEL, "weight", &[channels, taps])?;
        if !(2..=MAX_TAPS).contains(&taps) {
            let expected = format!("2 to {MAX_TAPS} taps");
            return Err(Error::Operand { kernel: KERNEL, operand: "weight", expected, found: taps.to_string() });
        }
        let least = if self.gated { 3 * channels } else { x_stride.max(self.first_column.saturating_add(channels)) };
        x.expect_shape(KERNEL, "x", &[n_tokens, least])?;
        check_states(KERNEL, "past", state, past, &[taps - 1, channels])?;
        if let Some(bias) = self.bias {
            bias.expect_shape(KERNEL, "bias", &[channels])?;
        }
        let gated = if self.gated { short_conv::GATED } else { 0 };
        let (n_states, n_sequences) = states(state, n_tokens);
        let params = ShortConvParams {
            n_tokens,
            channels,
            taps,
            n_states,
            x_stride,
            x_start: if self.gated { 0 } else { self.first_column },
            flags: gated | if self.bias.is_some() { short_conv::BIAS } else { 0 },
            row_words: state.row_words(),
            has_slots: u32::from(state.is_shared()),
        };
        let operands = [state.tensor(), x, self.weight, self.bias.unwrap_or(self.weight), past, y];
        let grid = fold(rec.target(), u64::from(channels.div_ceil(64)) * u64::from(n_sequences));
        rec.dispatch(&shaders::SHORT_CONV, None, &[], params, &operands, grid)
    }
}

/// Shape of the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaRule {
    /// Hk, heads of queries and keys.
    pub n_key_heads: u32,
    /// H, heads of values; a multiple of Hk.
    pub n_heads: u32,
    /// Dk, up to 256.
    pub key_dim: u32,
    /// Dv, up to 256.
    pub value_dim: u32,
    /// Whether neighbouring value heads share a key head, rather than every Hk-th.
    pub grouped: bool,
    /// Factor of beta: 2 where states may have negative eigenvalues, else 1.
    pub beta_scale: f32,
    /// How states decay.
    pub decay: Decay,
}

/// How a delta rule's states decay from one token to the next, and how its outputs are gated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// By `exp(a softplus(alpha + dt))`, one for each head, with outputs times `silu(z)`: gated DeltaNet.
    Heads,
    /// By `exp(bound sigmoid(-a (alpha + dt)))`, one for each channel of the keys, with outputs times `sigmoid(z)`: Kimi
    /// Delta Attention.
    Channels {
        /// Logarithm of the fastest decay, below 0.
        bound: f32,
    },
}

impl DeltaRule {
    /// Columns of queries, keys and values side by side.
    pub fn channels(&self) -> u32 {
        2 * self.n_key_heads * self.key_dim + self.n_heads * self.value_dim
    }

    /// Number of decays of all heads.
    pub fn n_decays(&self) -> u32 {
        match self.decay {
            Decay::Heads => self.n_heads,
            Decay::Channels { .. } => self.n_heads * self.key_dim,
        }
    }

    /// Columns of queries, keys, values and output gates, of beta, one per value head, and of alpha, one per decay.
    pub fn inputs(&self) -> u32 {
        self.channels() + self.n_heads * (self.value_dim + 1) + self.n_decays()
    }

    /// Records the rule over the pass's tokens, and the gated norm of its results. Shader: `shaders/delta_rule.wgsl`.
    ///
    /// # Shapes
    /// `qkv`: `[T, channels]`; `x`: `[T, inputs]`, of which the columns after the channels count; `heads`: rates,
    /// `[H]`, time steps, `[n_decays]`, and the norm's weights, `[Dv]`, one after the other; `matrices`:
    /// `[N_STATES, H, Dk, Dv]`, or `[sequences * states, H, Dk, Dv]`; `y`: `[T, H Dv]`.
    /// # Errors
    /// [`Error::Shape`] if the operands disagree, [`Error::Operand`] for a shape that is out of range.
    pub fn record(
        &self,
        rec: &mut Recorder,
        state: &StepState,
        [qkv, x, heads]: [&Tensor; 3],
        eps: f32,
        matrices: &Tensor,
        y: &Tensor,
    ) -> Result<(), Error> {
        const KERNEL: &str = "delta_rule";
        let &DeltaRule { n_key_heads, n_heads, key_dim, value_dim, grouped, beta_scale, decay } = self;
        let wrong = |operand, expected: &str, found: u32| {
            Err(Error::Operand { kernel: KERNEL, operand, expected: expected.into(), found: found.to_string() })
        };
        if key_dim == 0 || key_dim > 256 || value_dim == 0 || value_dim > 256 {
            return wrong("head_dim", "1 to 256", key_dim.max(value_dim));
        }
        if n_key_heads == 0 || !n_heads.is_multiple_of(n_key_heads) {
            return wrong("n_heads", "a multiple of the key heads", n_heads);
        }
        let bound = match decay {
            Decay::Heads => 0.0,
            Decay::Channels { bound } if bound.is_normal() && bound < 0.0 => bound,
            Decay::Channels { bound } => {
                let expected = "a number below 0".into();
                return Err(Error::Operand { kernel: KERNEL, operand: "bound", expected, found: bound.to_string() });
            }
        };
        let [n_tokens, _] = y.dims2(KERNEL, "y")?;
        y.expect_shape(KERNEL, "y", &[n_tokens, n_heads * value_dim])?;
        qkv.expect_shape(KERNEL, "qkv", &[n_tokens, self.channels()])?;
        x.expect_shape(KERNEL, "x", &[n_tokens, self.inputs()])?;
        heads.expect_shape(KERNEL, "heads", &[n_heads + self.n_decays() + value_dim])?;
        check_states(KERNEL, "matrices", state, matrices, &[n_heads, key_dim, value_dim])?;
        let columns = u64::from(value_dim.div_ceil(128));
        let rounds = u64::from(n_tokens) * (2 * columns * u64::from(key_dim) + 8);
        check_loop(rec.target(), KERNEL, rounds, n_tokens, "tokens")?;
        let (n_states, n_sequences) = states(state, n_tokens);
        let params = DeltaRuleParams {
            n_tokens,
            n_key_heads,
            n_heads,
            key_dim,
            value_dim,
            n_states,
            x_stride: self.inputs(),
            grouped: u32::from(grouped),
            eps,
            row_words: state.row_words(),
            has_slots: u32::from(state.is_shared()),
            beta_scale,
            bound,
        };
        let operands = [state.tensor(), qkv, x, heads, matrices, y];
        let grid = fold(rec.target(), u64::from(n_heads) * u64::from(n_sequences));
        rec.dispatch(&shaders::DELTA_RULE, None, &[], params, &operands, grid)
    }
}

/// Shape of Mamba 2's selective scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectiveScan {
    /// G, groups of heads that read and write their states alike.
    pub n_groups: u32,
    /// H, a multiple of G.
    pub n_heads: u32,
    /// N, rows of a state, up to 256.
    pub state_dim: u32,
    /// P, columns of a state: width of a head, up to 256.
    pub head_dim: u32,
}

impl SelectiveScan {
    /// Columns of the values of all heads.
    pub fn inner_dim(&self) -> u32 {
        self.n_heads * self.head_dim
    }

    /// Columns of values, and of what groups write and read by.
    pub fn channels(&self) -> u32 {
        self.inner_dim() + 2 * self.n_groups * self.state_dim
    }

    /// Columns of gates, channels and time steps.
    pub fn inputs(&self) -> u32 {
        self.inner_dim() + self.channels() + self.n_heads
    }

    /// Records the scan over the pass's tokens, and the gate of its results. Shader: `shaders/selective_scan.wgsl`.
    ///
    /// # Shapes
    /// `vbc`: `[T, channels]`; `x`: `[T, inputs]`, of which gates and time steps count; `heads`: `[3 H]`, decays, biases of
    /// the time steps, and factors of the values that are added; `matrices`: `[N_STATES, H, N, P]`, or `[sequences * states, H, N, P]`; `y`: `[T, H P]`.
    /// # Errors
    /// [`Error::Shape`] if the operands disagree, [`Error::Operand`] for a shape that is out of range.
    pub fn record(
        &self,
        rec: &mut Recorder,
        state: &StepState,
        [vbc, x, heads]: [&Tensor; 3],
        matrices: &Tensor,
        y: &Tensor,
    ) -> Result<(), Error> {
        const KERNEL: &str = "selective_scan";
        let &SelectiveScan { n_groups, n_heads, state_dim, head_dim } = self;
        let wrong = |operand, expected: &str, found: u32| {
            Err(Error::Operand { kernel: KERNEL, operand, expected: expected.into(), found: found.to_string() })
        };
        if state_dim == 0 || state_dim > 256 || head_dim == 0 || head_dim > 256 {
            return wrong("head_dim", "1 to 256, as the state's rows", head_dim.max(state_dim));
        }
        if n_groups == 0 || !n_heads.is_multiple_of(n_groups) {
            return wrong("n_heads", "a multiple of the groups", n_heads);
        }
        let [n_tokens, _] = y.dims2(KERNEL, "y")?;
        y.expect_shape(KERNEL, "y", &[n_tokens, self.inner_dim()])?;
        vbc.expect_shape(KERNEL, "vbc", &[n_tokens, self.channels()])?;
        x.expect_shape(KERNEL, "x", &[n_tokens, self.inputs()])?;
        heads.expect_shape(KERNEL, "heads", &[3 * n_heads])?;
        check_states(KERNEL, "matrices", state, matrices, &[n_heads, state_dim, head_dim])?;
        let rounds = u64::from(n_tokens) * (u64::from(state_dim) + 1);
        check_loop(rec.target(), KERNEL, rounds, n_tokens, "tokens")?;
        let (n_states, n_sequences) = states(state, n_tokens);
        let params = SelectiveScanParams {
            n_tokens,
            n_heads,
            n_groups,
            head_dim,
            state_dim,
            n_states,
            x_stride: self.inputs(),
            dt_start: self.inner_dim() + self.channels(),
            row_words: state.row_words(),
            has_slots: u32::from(state.is_shared()),
        };
        let operands = [state.tensor(), vbc, x, heads, matrices, y];
        let grid = fold(rec.target(), u64::from(self.inner_dim().div_ceil(64)) * u64::from(n_sequences));
        rec.dispatch(&shaders::SELECTIVE_SCAN, None, &[], params, &operands, grid)
    }
}
