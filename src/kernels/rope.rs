//! Rotary position embedding.

use bytemuck::{Pod, Zeroable};

use super::{StepState, fold};
use crate::error::Error;
use crate::recording::Recorder;
use crate::shaders;
use crate::tensor::Tensor;

/// Mirrors `Params` in `shaders/rope.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct RopeParams {
    pub n_tokens: u32,
    pub n_heads: u32,
    pub head_dim: u32,
    pub rot_dims: u32,
    pub style: u32,
    pub _pad: [u32; 3],
}

/// Mirrors `Params` in `shaders/rope_kv.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct RopeKvParams {
    pub n_tokens: u32,
    pub n_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim: u32,
    pub rot_dims: u32,
    pub style: u32,
    pub capacity: u32,
    pub _pad: u32,
}

/// Mirrors `Params` in `shaders/rope_packed.wgsl`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct RopePackedParams {
    pub n_tokens: u32,
    pub n_heads: u32,
    pub head_dim: u32,
    pub rot_dims: u32,
    pub style: u32,
    pub stride: u32,
    pub _pad: [u32; 2],
}

/// Which elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `(2 i, 2 i + 1)`, as in GGUF files of the llama architecture.
    Interleaved,
    /// `(i, i + rot_dims / 2)`, as in Hugging Face files.
    Halves,
}

/// How angles are stretched for contexts longer than the model was first trained on.
#[derive(Clone, Debug, PartialEq, Default)]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    None,
    /// All positions divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Each frequency divided by a factor of its own, as GGUF's `rope_freqs.weight` states them.
    Factors(Vec<f32>),
    /// Llama 3: low frequencies are divided by `factor`, high ones kept, those between blended.
    Llama3 {
        /// Divides the low frequencies.
        factor: f64,
        /// `original_max_seq_len / low_freq_factor` is the wavelength above which a frequency is low.
        low_freq_factor: f64,
        /// `original_max_seq_len / high_freq_factor` is the wavelength below which a frequency is high.
        high_freq_factor: f64,
        /// Context length before scaling.
        original_max_seq_len: f64,
    },
}

/// Parameters of the embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Elements of a head that are rotated; even, at most the head's size.
    pub rot_dims: u32,
    /// Base of the frequencies.
    pub theta: f64,
    /// Pairing.
    pub style: RopeStyle,
    /// Stretching.
    pub scaling: RopeScaling,
}

/// The table of `(cos, sin)` for positions `0..n_pos`: `[n_pos, rot_dims / 2, 2]`, computed in f64.
pub fn rope_table(config: &RopeConfig, n_pos: u32) -> Vec<f32> {
    let half = config.rot_dims / 2;
    let frequency = |i: u32| {
        let plain = config.theta.powf(-f64::from(2 * i) / f64::from(config.rot_dims));
        match &config.scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear { factor } => plain / factor,
            RopeScaling::Factors(factors) => plain / factors.get(i as usize).copied().map_or(1.0, f64::from),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_seq_len } => {
                // Turns over the original context tell how high a frequency is; the blend is linear in them.
                let turns = original_max_seq_len * plain / std::f64::consts::TAU;
                let share = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                share * plain + (1.0 - share) * plain / factor
            }
        }
    };
    let frequencies: Vec<f64> = (0..half).map(frequency).collect();
    let angles = (0..n_pos).flat_map(|pos| frequencies.iter().map(move |f| f64::from(pos) * f));
    angles.flat_map(|angle| [angle.cos() as f32, angle.sin() as f32]).collect()
}

/// Refuses a pairing that does not fit the head, or a table that does not fit the pairing.
pub(super) fn check(kernel: &'static str, config: &RopeConfig, head_dim: u32, table: &Tensor) -> Result<(), Error> {
    let rot_dims = config.rot_dims;
    if !head_dim.is_multiple_of(2) || !rot_dims.is_multiple_of(2) || rot_dims == 0 || rot_dims > head_dim {
        return Err(Error::Operand {
            kernel,
            operand: "rot_dims",
            expected: format!("an even number up to the head's {head_dim}, itself even"),
            found: rot_dims.to_string(),
        });
    }
    let n_pos = table.shape()[0];
    table.expect_shape(kernel, "table", &[n_pos, rot_dims / 2, 2])
}

/// Records the rotation of heads at positions `pos..`. Shader: `shaders/rope.wgsl`.
///
/// # Shapes
/// `table`: `[S, rot_dims / 2, 2]` from [`rope_table`]; `x`, `y`: `[T, H, D]`.
/// # Errors
/// [`Error::Shape`] or [`Error::Operand`] if the operands disagree.
pub fn rope(
    rec: &mut Recorder,
    state: &StepState,
    config: &RopeConfig,
    table: &Tensor,
    x: &Tensor,
    y: &Tensor,
) -> Result<(), Error> {
    let &[n_tokens, n_heads, head_dim] = x.shape() else {
        return Err(Error::Operand {
            kernel: "rope",
            operand: "x",
            expected: "a tensor of three dimensions".into(),
            found: format!("of shape {:?}", x.shape()),
        });
    };
    check("rope", config, head_dim, table)?;
    y.expect_shape("rope", "y", x.shape())?;
    let grid = fold(rec.device(), (x.len() as u64 / 2).div_ceil(64));
    let params = RopeParams {
        n_tokens,
        n_heads,
        head_dim,
        rot_dims: config.rot_dims,
        style: u32::from(config.style == RopeStyle::Halves),
        _pad: [0; 3],
    };
    rec.dispatch(&shaders::ROPE, None, &[], params, &[state.tensor(), table, x, y], grid)
}

/// Records the split of a fused projection: rotated queries to `q`, rotated keys and values to the cache at
/// `pos..`. Shader: `shaders/rope_kv.wgsl`.
///
/// # Shapes
/// `table`: `[S, rot_dims / 2, 2]`; `qkv`: `[T, (H + 2 Hkv) * D]`; `q`: `[T, H * D]`; `k`, `v`: `[Hkv, S, D]`.
/// # Errors
/// [`Error::Shape`] or [`Error::Operand`] if the operands disagree.
#[allow(clippy::too_many_arguments)]
pub fn rope_kv(
    rec: &mut Recorder,
    state: &StepState,
    config: &RopeConfig,
    table: &Tensor,
    qkv: &Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
) -> Result<(), Error> {
    let [n_tokens, q_dim] = q.dims2("rope_kv", "q")?;
    let &[n_kv_heads, capacity, head_dim] = k.shape() else {
        return Err(Error::Operand {
            kernel: "rope_kv",
            operand: "k",
            expected: "a tensor of three dimensions".into(),
            found: format!("of shape {:?}", k.shape()),
        });
    };
    check("rope_kv", config, head_dim, table)?;
    let n_heads = q_dim / head_dim;
    q.expect_shape("rope_kv", "q", &[n_tokens, n_heads * head_dim])?;
    v.expect_shape("rope_kv", "v", k.shape())?;
    qkv.expect_shape("rope_kv", "qkv", &[n_tokens, (n_heads + 2 * n_kv_heads) * head_dim])?;
    let grid = fold(rec.device(), (qkv.len() as u64 / 2).div_ceil(64));
    let params = RopeKvParams {
        n_tokens,
        n_heads,
        n_kv_heads,
        head_dim,
        rot_dims: config.rot_dims,
        style: u32::from(config.style == RopeStyle::Halves),
        capacity,
        _pad: 0,
    };
    rec.dispatch(&shaders::ROPE_KV, None, &[], params, &[state.tensor(), table, qkv, q, k, v], grid)
}

/// Records the rotation of packed queries and keys where they stand; values stay as they are. Shader:
/// `shaders/rope_packed.wgsl`.
///
/// # Shapes
/// `tokens`: U32 `[T, 3]`, of which the second column are positions; `table`: `[S, rot_dims / 2, 2]`; `qkv`:
/// `[T, (H + 2 Hkv) * D]`.
/// # Errors
/// [`Error::Shape`] or [`Error::Operand`] if the operands disagree.
pub fn rope_packed(
    rec: &mut Recorder,
    config: &RopeConfig,
    [n_heads, n_kv_heads, head_dim]: [u32; 3],
    tokens: &Tensor,
    table: &Tensor,
    qkv: &Tensor,
) -> Result<(), Error> {
    let [n_tokens, _] = tokens.dims2("rope_packed", "tokens")?;
    check("rope_packed", config, head_dim, table)?;
    let stride = (n_heads + 2 * n_kv_heads) * head_dim;
    tokens.expect_shape("rope_packed", "tokens", &[n_tokens, 3])?;
    qkv.expect_shape("rope_packed", "qkv", &[n_tokens, stride])?;
    let n_heads = n_heads + n_kv_heads;
    let n_pairs = u64::from(n_tokens) * u64::from(n_heads) * u64::from(config.rot_dims / 2);
    let grid = fold(rec.device(), n_pairs.div_ceil(64));
    let params = RopePackedParams {
        n_tokens,
        n_heads,
        head_dim,
        rot_dims: config.rot_dims,
        style: u32::from(config.style == RopeStyle::Halves),
        stride,
        _pad: [0; 2],
    };
    rec.dispatch(&shaders::ROPE_PACKED, None, &[], params, &[tokens, table, qkv], grid)
}
