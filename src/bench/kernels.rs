//! Each kernel of a forward pass and its roofline. Functions with few callers are not inlined: in the WASM module,
//! the future around them would be several times as large.

use super::{Effort, Probes, seconds};
use crate::device::Device;
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::kernels::{
    AttentionConfig, Embedding, Gate, Heads, KvType, Linear, Norm, RopeConfig, RopeStyle, Sampling, StepState, advance,
    argmax, attention, attention_next, embed, folds_norm, gate_up, last_row, rms_norm, rope_kv, rope_table, sample,
    swiglu,
};
use crate::matrix::Matrix;
use crate::recording::{Recorder, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tuning::operands::{input, keys, matrix, words};

/// Weight types to measure; ratios are relative to the first.
pub(super) const WEIGHTS: [WeightType; 4] = [WeightType::F16, WeightType::Q8_0, WeightType::Q4_0, WeightType::Q4_K];

/// Head size.
const HEAD_DIM: u32 = 64;

/// Shapes of a Llama model of a given width, and sizes of its passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Shapes {
    /// C, a multiple of 64. F is 2.75 C, heads have 64 elements, four query heads share a key/value head (if there
    /// are as many), and V is 16 C.
    pub dim: u32,
    /// T of the prefill pass.
    pub n_prompt: u32,
    /// Tokens in the cache before the pass.
    pub n_cached: u32,
}

/// Result of one kernel.
#[derive(Clone, Debug, serde::Serialize)]
pub struct KernelRow {
    /// Label of the shader variant, such as `matvec.Q4_0`.
    pub kernel: &'static str,
    /// What it computes in the forward pass, such as `qkv`.
    pub operation: &'static str,
    /// T.
    pub n_tokens: u32,
    /// Seconds per run, among runs of the same kernel on other operands.
    pub seconds: f64,
    /// Bytes of all operands, each once.
    pub bytes: u64,
    /// Multiplications and additions of matrix products.
    pub flop: u64,
    /// The probes' time for the longer of bytes and operations, divided by `seconds`.
    pub share: f64,
    /// Time with F16 weights divided by this time; matrix products only.
    pub vs_f16: Option<f64>,
}

impl KernelRow {
    /// Whether the probes take longer for operations than for bytes.
    pub fn is_compute_bound(&self, probes: &Probes) -> bool {
        probes.is_compute_bound(self.bytes as f64, self.flop as f64)
    }
}

/// What to measure, and the amount of work per run.
#[derive(Clone, Copy, Debug)]
pub(super) struct BenchPlan<'a> {
    pub shapes: &'a Shapes,
    /// Weight types to measure; ratios are relative to the first.
    pub weights: &'static [WeightType],
    /// Target bytes of operands' copies, so that no cache holds them between runs.
    pub cold_bytes: u64,
    /// Target operations per run, by copies.
    pub long_flop: u64,
    pub effort: Effort,
}

impl BenchPlan<'_> {
    /// Number of rows from [`measure_each`].
    pub fn n_rows(&self) -> usize {
        // The kernels without a matrix, of decoding and of prompts, and the products with one.
        12 + 9 * self.weights.len()
    }
}

/// Measures all kernels of a decode pass, then of a prefill pass; `quick` measures one weight type, and each kernel
/// for a shorter time.
///
/// # Errors
/// [`Error::Option`] if a shape is out of range; errors of [`Device::run`].
pub async fn measure(device: &Device, shapes: &Shapes, probes: &Probes, quick: bool) -> Result<Vec<KernelRow>, Error> {
    let plan = match quick {
        // Ten times the caches of large GPUs.
        false => {
            BenchPlan { shapes, weights: &WEIGHTS, cold_bytes: 1 << 29, long_flop: 1 << 32, effort: Effort::USUAL }
        }
        true => BenchPlan {
            shapes,
            weights: &[WeightType::Q4_0],
            cold_bytes: 1 << 25,
            long_flop: 1 << 26,
            effort: Effort { samples: 1, sample_seconds: 0.005 },
        },
    };
    let mut rows = Vec::new();
    measure_each(device, &plan, probes, &mut |row| rows.push(row)).await?;
    Ok(rows)
}

/// As [`measure`], passing each row to a callback when finished.
pub(super) async fn measure_each(
    device: &Device,
    plan: &BenchPlan<'_>,
    probes: &Probes,
    on_row: &mut dyn FnMut(KernelRow),
) -> Result<(), Error> {
    plan.shapes.check()?;
    for n_tokens in [1, plan.shapes.n_prompt] {
        PassOperands::new(device, plan, n_tokens)?.measure(probes, on_row).await?;
    }
    Ok(())
}

impl Shapes {
    /// Refuses shapes that no model has or that would take forever.
    ///
    /// # Errors
    /// [`Error::Option`] with the number out of range.
    pub fn check(&self) -> Result<(), Error> {
        let option = |option, expected: &str, found: u32| Error::Option {
            option,
            expected: expected.into(),
            found: found.to_string(),
        };
        if !self.dim.is_multiple_of(HEAD_DIM) || !(HEAD_DIM..=1 << 14).contains(&self.dim) {
            return Err(option("dim", "a multiple of 64 up to 16384", self.dim));
        }
        if !(2..=1 << 12).contains(&self.n_prompt) {
            return Err(option("n_prompt", "2 to 4096", self.n_prompt));
        }
        if self.n_cached > 1 << 16 {
            return Err(option("depth", "at most 65536", self.n_cached));
        }
        Ok(())
    }

    fn n_heads(&self) -> u32 {
        self.dim / HEAD_DIM
    }

    fn n_kv_heads(&self) -> u32 {
        if self.n_heads().is_multiple_of(4) { self.n_heads() / 4 } else { self.n_heads() }
    }

    #[inline(never)]
    fn qkv_dim(&self) -> u32 {
        self.dim + 2 * self.n_kv_heads() * HEAD_DIM
    }

    fn ffn_dim(&self) -> u32 {
        self.dim / 4 * 11
    }

    fn vocab_size(&self) -> u32 {
        16 * self.dim
    }
}

/// Minimum work of a kernel.
#[derive(Clone, Copy)]
struct KernelWork {
    bytes: u64,
    flop: u64,
}

impl KernelWork {
    /// Moved words; arithmetic is negligible.
    fn words(n: u32) -> KernelWork {
        KernelWork { bytes: 4 * u64::from(n), flop: 0 }
    }
}

/// An operation of a pass.
#[derive(Clone, Copy, PartialEq)]
enum PassOperation {
    Embed,
    Norm,
    Qkv,
    /// Only for several tokens; for one token it is part of attention.
    Rotation,
    Attention,
    AttnOutput,
    GateUp,
    /// Only for several tokens; for one token it is part of its product.
    Gate,
    FfnDown,
    LastRow,
    Head,
    Choice,
    Draw,
    NextToken,
}

impl PassOperation {
    /// Operations for one token, in the order of the forward pass. The last one updates the state.
    const OF_DECODING: [PassOperation; 11] = [
        PassOperation::Embed,
        PassOperation::Norm,
        PassOperation::Qkv,
        PassOperation::Attention,
        PassOperation::AttnOutput,
        PassOperation::GateUp,
        PassOperation::FfnDown,
        PassOperation::Head,
        PassOperation::Choice,
        PassOperation::Draw,
        PassOperation::NextToken,
    ];

    /// Operations for several tokens.
    const OF_PROMPTS: [PassOperation; 10] = [
        PassOperation::Embed,
        PassOperation::Norm,
        PassOperation::Qkv,
        PassOperation::Rotation,
        PassOperation::Attention,
        PassOperation::AttnOutput,
        PassOperation::GateUp,
        PassOperation::Gate,
        PassOperation::FfnDown,
        PassOperation::LastRow,
    ];

    fn name(self) -> &'static str {
        match self {
            PassOperation::Embed => "embed",
            PassOperation::Norm => "norm",
            PassOperation::Qkv => "qkv",
            PassOperation::Rotation => "rotation, cache",
            PassOperation::Attention => "attention",
            PassOperation::AttnOutput => "attn_output",
            PassOperation::GateUp => "gate_up",
            PassOperation::Gate => "gate",
            PassOperation::FfnDown => "ffn_down",
            PassOperation::LastRow => "last row",
            PassOperation::Head => "head",
            PassOperation::Choice => "greedy choice",
            PassOperation::Draw => "draw",
            PassOperation::NextToken => "next token",
        }
    }

    /// N and K of the operation's matrix, if any.
    #[inline(never)]
    fn matrix(self, shapes: &Shapes) -> Option<[u32; 2]> {
        let (dim, ffn_dim) = (shapes.dim, shapes.ffn_dim());
        match self {
            PassOperation::Qkv => Some([shapes.qkv_dim(), dim]),
            PassOperation::AttnOutput => Some([dim, dim]),
            PassOperation::GateUp => Some([2 * ffn_dim, dim]),
            PassOperation::FfnDown => Some([dim, ffn_dim]),
            PassOperation::Head => Some([shapes.vocab_size(), dim]),
            _ => None,
        }
    }
}

/// Shared operands of the kernels in a pass over `n_tokens` tokens.
struct PassOperands<'a> {
    device: &'a Device,
    plan: &'a BenchPlan<'a>,
    shapes: &'a Shapes,
    n_tokens: u32,
    state: StepState,
    /// Token ids, [capacity].
    tokens: Tensor,
    /// Embedding table.
    table: Matrix,
    /// RoPE angles.
    angles: Tensor,
    /// The chosen token id.
    id: Tensor,
    sampling: Tensor,
}

impl PassOperands<'_> {
    #[inline(never)]
    fn new<'a>(device: &'a Device, plan: &'a BenchPlan<'a>, n_tokens: u32) -> Result<PassOperands<'a>, Error> {
        let shapes = plan.shapes;
        let (vocab_size, capacity) = (shapes.vocab_size(), shapes.n_cached + n_tokens);
        let state = StepState::declare()?;
        state.set(device, shapes.n_cached, n_tokens)?;
        let ids: Vec<u32> = words(capacity as usize).map(|word| word % vocab_size).collect();
        let settings = Sampling {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            seed: [1, 0],
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            generated_from: 0,
            n_biases: 0,
        };
        let angles = rope_table(&rotation(), capacity);
        Ok(PassOperands {
            device,
            plan,
            shapes,
            n_tokens,
            state,
            tokens: device.upload("tokens", &[capacity], &ids)?,
            table: matrix(device, WeightType::F16, vocab_size, shapes.dim)?,
            angles: device.upload("table", &[capacity, HEAD_DIM / 2, 2], &angles)?,
            id: Tensor::declare("ids", Role::Activations, &[1], DType::U32)?,
            sampling: device.upload::<u32>("sampling", &[1, Sampling::WORDS], bytemuck::cast_slice(&[settings]))?,
        })
    }

    /// Times each kernel, products for each weight type.
    async fn measure(&self, probes: &Probes, on_row: &mut dyn FnMut(KernelRow)) -> Result<(), Error> {
        let operations: &[PassOperation] =
            if self.n_tokens == 1 { &PassOperation::OF_DECODING } else { &PassOperation::OF_PROMPTS };
        let mut f16_seconds = 0.0;
        for &operation in operations {
            let has_matrix = operation.matrix(self.shapes).is_some();
            let weights = if has_matrix { self.plan.weights } else { &[WeightType::F16] };
            for (i, &weight) in weights.iter().enumerate() {
                let mut row = self.run(operation, weight, probes).await?;
                if i == 0 {
                    f16_seconds = row.seconds;
                }
                row.vs_f16 = has_matrix.then(|| f16_seconds / row.seconds);
                on_row(row);
            }
        }
        Ok(())
    }

    /// Times a kernel. It is recorded several times with separate operands, so that one submission outweighs its own
    /// cost, and caches do not hold what a model's other layers would have evicted.
    async fn run(&self, operation: PassOperation, weight: WeightType, probes: &Probes) -> Result<KernelRow, Error> {
        const MAX_COPIES: u64 = 64;

        let work = self.work(operation, weight)?;
        let BenchPlan { cold_bytes, long_flop, effort, .. } = *self.plan;
        let n_copies = (cold_bytes / work.bytes).min(long_flop / work.flop.max(1)).clamp(1, MAX_COPIES);
        let mut rec = self.device.recorder();
        for _ in 0..n_copies {
            self.record(&mut rec, operation, weight)?;
        }
        let recording = rec.finish(&mut Workspace::default());
        let seconds = seconds(self.device, &recording, effort).await? / n_copies as f64;
        Ok(KernelRow {
            kernel: recording.labels().next().unwrap_or_default(),
            operation: operation.name(),
            n_tokens: self.n_tokens,
            seconds,
            bytes: work.bytes,
            flop: work.flop,
            share: probes.least_seconds(work.bytes as f64, work.flop as f64) / seconds,
            vs_f16: None,
        })
    }

    /// Words of keys and values that a pass reads.
    fn cache_words(&self) -> u32 {
        let capacity = self.shapes.n_cached + self.n_tokens;
        2 * self.shapes.n_kv_heads() * capacity * KvType::default().row_words(HEAD_DIM)
    }

    #[inline(never)]
    fn work(&self, operation: PassOperation, weight: WeightType) -> Result<KernelWork, Error> {
        let (t, dim, qkv_dim) = (self.n_tokens, self.shapes.dim, self.shapes.qkv_dim());
        let vocab_size = self.shapes.vocab_size();
        if let Some([n, k]) = operation.matrix(self.shapes) {
            let matrix = Matrix::declare(&self.device.target(), "w", weight, n, k)?;
            let weights_bytes: u64 = matrix.tensors().map(Tensor::size_bytes).sum();
            return Ok(KernelWork {
                bytes: weights_bytes + 4 * u64::from(t * (k + n)),
                flop: 2 * u64::from(t) * u64::from(k) * u64::from(n),
            });
        }
        Ok(match operation {
            // A row of halves and one of floats per token.
            PassOperation::Embed => KernelWork::words(t * dim / 2 * 3),
            PassOperation::Norm => KernelWork::words(2 * t * dim + dim),
            PassOperation::Rotation => KernelWork::words(2 * t * qkv_dim + t * HEAD_DIM),
            PassOperation::Attention => {
                let capacity = self.shapes.n_cached + t;
                let seen: u64 = (capacity - t + 1..=capacity).map(u64::from).sum();
                let rows = if t == 1 { qkv_dim + dim } else { 2 * t * dim };
                KernelWork { flop: 4 * u64::from(dim) * seen, ..KernelWork::words(rows + self.cache_words()) }
            }
            PassOperation::Gate => KernelWork::words(3 * t * self.shapes.ffn_dim()),
            PassOperation::LastRow => KernelWork::words(2 * dim),
            PassOperation::Choice | PassOperation::Draw => KernelWork::words(vocab_size),
            _ => KernelWork::words(8),
        })
    }

    /// Shapes of a kernel's input and output, without its matrix and the cache; one element for a missing operand.
    #[inline(never)]
    fn shapes(&self, operation: PassOperation) -> [[u32; 2]; 2] {
        let (t, dim, vocab_size) = (self.n_tokens, self.shapes.dim, self.shapes.vocab_size());
        let (qkv_dim, ffn_dim) = (self.shapes.qkv_dim(), self.shapes.ffn_dim());
        match operation {
            PassOperation::Embed => [[1, 1], [t, dim]],
            PassOperation::Norm | PassOperation::AttnOutput => [[t, dim]; 2],
            PassOperation::Qkv => [[t, dim], [t, qkv_dim]],
            PassOperation::Rotation => [[t, qkv_dim], [t, dim]],
            PassOperation::Attention => [[t, if t == 1 { qkv_dim } else { dim }], [t, dim]],
            PassOperation::GateUp => [[t, dim], [t, if t == 1 { ffn_dim } else { 2 * ffn_dim }]],
            PassOperation::Gate => [[t, 2 * ffn_dim], [t, ffn_dim]],
            PassOperation::FfnDown => [[t, ffn_dim], [t, dim]],
            PassOperation::LastRow => [[t, dim], [1, dim]],
            PassOperation::Head => [[1, dim], [1, vocab_size]],
            PassOperation::Choice | PassOperation::Draw => [[1, vocab_size], [1, 1]],
            PassOperation::NextToken => [[1, 1]; 2],
        }
    }

    /// Records a kernel with separate operands.
    #[inline(never)]
    fn record(&self, rec: &mut Recorder, operation: PassOperation, weight: WeightType) -> Result<(), Error> {
        let (t, state) = (self.n_tokens, &self.state);
        let [x_shape, y_shape] = self.shapes(operation);
        let (x, y) = (input(self.device, &x_shape)?, Tensor::declare("y", Role::Activations, &y_shape, DType::F32)?);
        let gain = input(self.device, &x_shape[1..])?;
        if let Some([n, k]) = operation.matrix(self.shapes) {
            let w = matrix(self.device, weight, n, k)?;
            let is_gate = operation == PassOperation::GateUp && t == 1;
            let is_normed = (is_gate || operation == PassOperation::Qkv) && folds_norm(rec, &x, false);
            let norm = is_normed.then_some(Norm { weight: &gain, eps: 1e-5 });
            let accumulate = matches!(operation, PassOperation::AttnOutput | PassOperation::FfnDown);
            return match is_gate {
                true => gate_up(rec, &w, norm, Gate::Silu, &x, &y),
                false => Linear { norm, accumulate, ..Linear::new(&w) }.record(rec, &x, &y),
            };
        }
        match operation {
            PassOperation::Embed => embed(rec, state, &self.tokens, &Embedding::new(&self.table), &y),
            PassOperation::Norm => rms_norm(rec, &x, &gain, &y, 1e-5),
            PassOperation::Rotation | PassOperation::Attention => self.record_attention(rec, operation, &x, &y),
            PassOperation::Gate => swiglu(rec, &x, &y),
            PassOperation::LastRow => last_row(rec, state, &x, &y),
            PassOperation::Choice => argmax(rec, &x, &self.id),
            PassOperation::Draw => sample(rec, &self.sampling, state, &x, &self.id),
            _ => advance(rec, state, &self.id, &self.tokens),
        }
    }

    /// RoPE, cache write and attention: one kernel for one token, two for several.
    fn record_attention(
        &self,
        rec: &mut Recorder,
        operation: PassOperation,
        x: &Tensor,
        y: &Tensor,
    ) -> Result<(), Error> {
        let (n_heads, n_kv_heads) = (self.shapes.n_heads(), self.shapes.n_kv_heads());
        let rotation = rotation();
        let rope = Some((&rotation, &self.angles));
        let heads = Heads {
            n_heads,
            n_kv_heads,
            head_dim: HEAD_DIM,
            keys_hold_values: false,
            first_column: 0,
            rope,
            norm: None,
        };
        let config = AttentionConfig {
            n_heads,
            n_kv_heads,
            head_dim: HEAD_DIM,
            window: None,
            scale: 0.125,
            soft_cap: None,
            values_from: None,
            causal: true,
            whole_pass: false,
        };
        let capacity = self.shapes.n_cached + self.n_tokens;
        let cached = keys(self.device, KvType::default(), [n_kv_heads, capacity, HEAD_DIM])?;
        match operation {
            PassOperation::Rotation => rope_kv(rec, &self.state, &heads, x, y, &cached),
            _ if self.n_tokens == 1 => attention_next(rec, &self.state, &config, &heads, None, x, &cached, y),
            _ => attention(rec, &self.state, &config, None, x, &cached, y),
        }
    }
}

fn rotation() -> RopeConfig {
    RopeConfig::new(HEAD_DIM, 1e4, RopeStyle::Interleaved)
}
