//! Each kernel of a forward pass on its roofline.

use super::{Probes, seconds};
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

/// Weight types whose matrices are measured; ratios are to the first.
const WEIGHTS: [WeightType; 4] = [WeightType::F16, WeightType::Q8_0, WeightType::Q4_0, WeightType::Q4_K];

/// Size of a head.
const HEAD_DIM: u32 = 64;

/// The shapes of a Llama model of a certain width, and the passes that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Shapes {
    /// C, a multiple of 64. F is 2.75 C, heads have 64 elements, four query heads share a key/value head (if there are
    /// as many), and V is 16 C.
    pub dim: u32,
    /// T of the prefill pass.
    pub n_prompt: u32,
    /// Tokens in the cache before the pass.
    pub n_cached: u32,
}

/// One kernel's result.
#[derive(Clone, Debug, serde::Serialize)]
pub struct KernelRow {
    /// Label of the shader variant, such as `matvec.Q4_0`.
    pub kernel: &'static str,
    /// What it computes in the forward pass, such as `qkv`.
    pub operation: &'static str,
    /// T.
    pub n_tokens: u32,
    /// Of one run, behind others of the same kernel on other operands.
    pub seconds: f64,
    /// Each operand once.
    pub bytes: u64,
    /// Multiplications and additions of matrix products.
    pub flop: u64,
    /// The time that the probes would need for the longer of the two, by `seconds`.
    pub share: f64,
    /// Time with F16 weights by time with these; for matrix products alone.
    pub vs_f16: Option<f64>,
}

impl KernelRow {
    /// Whether operations take the probe longer than bytes.
    pub fn is_compute_bound(&self, probes: &Probes) -> bool {
        probes.is_compute_bound(self.bytes as f64, self.flop as f64)
    }
}

/// Measures all kernels of a decode pass, then those of a prefill pass.
///
/// # Errors
/// [`Error::Option`] if a shape is out of range; errors of [`Device::run`].
pub async fn measure(device: &Device, shapes: &Shapes, probes: &Probes) -> Result<Vec<KernelRow>, Error> {
    shapes.check()?;
    let mut rows = Vec::new();
    for n_tokens in [1, shapes.n_prompt] {
        PassBench { device, shapes, probes, n_tokens, rows: &mut rows }.measure().await?;
    }
    Ok(rows)
}

impl Shapes {
    /// Refuses shapes that no model has or that would take forever.
    ///
    /// # Errors
    /// [`Error::Option`] naming the number.
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

/// The kernels of a pass over `n_tokens` tokens.
struct PassBench<'a> {
    device: &'a Device,
    shapes: &'a Shapes,
    probes: &'a Probes,
    n_tokens: u32,
    rows: &'a mut Vec<KernelRow>,
}

/// What a kernel needs at least.
#[derive(Clone, Copy)]
struct Work {
    bytes: u64,
    flop: u64,
}

impl Work {
    /// Words moved, where arithmetic does not matter.
    fn words(n: u32) -> Work {
        Work { bytes: 4 * u64::from(n), flop: 0 }
    }
}

impl PassBench<'_> {
    /// In the order of the forward pass.
    async fn measure(&mut self) -> Result<(), Error> {
        let device = self.device;
        let Shapes { dim, n_cached, .. } = *self.shapes;
        let (t, vocab_size) = (self.n_tokens, self.shapes.vocab_size());
        let ffn_dim = self.shapes.ffn_dim();
        let capacity = n_cached + t;

        let state = StepState::declare()?;
        state.set(self.device, n_cached, t)?;
        let ids: Vec<u32> = words(capacity as usize).map(|word| word % vocab_size).collect();
        let tokens = self.device.upload("tokens", &[capacity], &ids)?;
        let table = matrix(self.device, WeightType::F16, vocab_size, dim)?;
        // A row of halves and one of floats for each token.
        self.kernel("embed", Work::words(t * dim / 2 * 3), |rec| {
            embed(rec, &state, &tokens, &Embedding::new(&table), &output(&[t, dim])?)
        })
        .await?;
        self.kernel("norm", Work::words(2 * t * dim + dim), |rec| {
            rms_norm(rec, &input(device, &[t, dim])?, &input(device, &[dim])?, &output(&[t, dim])?, 1e-5)
        })
        .await?;
        self.product("qkv", dim, self.shapes.qkv_dim(), |rec, w| {
            let (x, weight) = (input(device, &[t, dim])?, input(device, &[dim])?);
            let norm = folds_norm(rec, &x, false).then_some(Norm { weight: &weight, eps: 1e-5 });
            Linear { norm, ..Linear::new(w) }.record(rec, &x, &output(&[t, w.rows()])?)
        })
        .await?;
        self.attention(&state, capacity).await?;
        self.linear("attn_output", t, dim, dim, true).await?;
        if t == 1 {
            self.product("gate_up", dim, 2 * ffn_dim, |rec, w| {
                let (x, weight) = (input(device, &[1, dim])?, input(device, &[dim])?);
                let norm = folds_norm(rec, &x, false).then_some(Norm { weight: &weight, eps: 1e-5 });
                gate_up(rec, w, norm, Gate::Silu, &x, &output(&[1, ffn_dim])?)
            })
            .await?;
        } else {
            self.linear("gate_up", t, dim, 2 * ffn_dim, false).await?;
            self.kernel("gate", Work::words(3 * t * ffn_dim), |rec| {
                swiglu(rec, &input(device, &[t, 2 * ffn_dim])?, &output(&[t, ffn_dim])?)
            })
            .await?;
        }
        self.linear("ffn_down", t, ffn_dim, dim, true).await?;
        if t > 1 {
            let work = Work::words(2 * dim);
            return self
                .kernel("last row", work, |rec| last_row(rec, &state, &input(device, &[t, dim])?, &output(&[1, dim])?))
                .await;
        }

        self.linear("head", 1, dim, vocab_size, false).await?;
        let ids = Tensor::declare("ids", Role::Activations, &[1], DType::U32)?;
        self.kernel("greedy choice", Work::words(vocab_size), |rec| {
            argmax(rec, &input(device, &[1, vocab_size])?, &ids)
        })
        .await?;
        let settings = Sampling {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            seed: [1, 0],
            repeat_penalty: 1.0,
            repeat_last_n: 64,
        };
        let sampling = self.device.upload::<u32>("sampling", &[8], bytemuck::cast_slice(&[settings]))?;
        self.kernel("draw", Work::words(vocab_size), |rec| {
            sample(rec, &sampling, &state, &input(device, &[1, vocab_size])?, &ids)
        })
        .await?;
        // It moves the state on, so it comes last.
        self.kernel("next token", Work::words(8), |rec| advance(rec, &state, &ids, &tokens)).await
    }

    /// Rotation, cache write and attention: one kernel for a token, two for more.
    async fn attention(&mut self, state: &StepState, capacity: u32) -> Result<(), Error> {
        let device = self.device;
        let (t, dim, qkv_dim) = (self.n_tokens, self.shapes.dim, self.shapes.qkv_dim());
        let (n_heads, n_kv_heads) = (self.shapes.n_heads(), self.shapes.n_kv_heads());
        let rope = RopeConfig::new(HEAD_DIM, 1e4, RopeStyle::Interleaved);
        let table = self.device.upload("table", &[capacity, HEAD_DIM / 2, 2], &rope_table(&rope, capacity))?;
        let rope = Some((&rope, &table));
        let heads = Heads { n_heads, n_kv_heads, head_dim: HEAD_DIM, first_column: 0, rope, norm: None };
        let config = AttentionConfig {
            n_heads,
            n_kv_heads,
            head_dim: HEAD_DIM,
            window: None,
            scale: 0.125,
            soft_cap: None,
            causal: true,
        };
        let kind = KvType::default();
        let shape = [n_kv_heads, capacity, HEAD_DIM];
        let cache_words = 2 * n_kv_heads * capacity * kind.row_words(HEAD_DIM);
        let seen: u64 = (capacity - t + 1..=capacity).map(u64::from).sum();
        let flop = 4 * u64::from(dim) * seen;
        if t == 1 {
            let work = Work { flop, ..Work::words(qkv_dim + dim + cache_words) };
            return self
                .kernel("attention", work, |rec| {
                    let (qkv, cached) = (input(device, &[1, qkv_dim])?, keys(device, kind, shape)?);
                    attention_next(rec, state, &config, &heads, None, &qkv, &cached, &output(&[1, dim])?)
                })
                .await;
        }
        self.kernel("rotation, cache", Work::words(2 * t * qkv_dim + t * HEAD_DIM), |rec| {
            let cached = keys(device, kind, shape)?;
            rope_kv(rec, state, &heads, &input(device, &[t, qkv_dim])?, &output(&[t, dim])?, &cached)
        })
        .await?;
        let work = Work { flop, ..Work::words(2 * t * dim + cache_words) };
        self.kernel("attention", work, |rec| {
            let cached = keys(device, kind, shape)?;
            attention(rec, state, &config, None, &input(device, &[t, dim])?, &cached, &output(&[t, dim])?)
        })
        .await
    }

    /// A linear layer with each weight type.
    async fn linear(&mut self, operation: &'static str, t: u32, k: u32, n: u32, accumulate: bool) -> Result<(), Error> {
        let device = self.device;
        self.product(operation, k, n, |rec, w| {
            let linear = Linear { accumulate, ..Linear::new(w) };
            linear.record(rec, &input(device, &[t, k])?, &output(&[t, n])?)
        })
        .await
    }

    /// A kernel with a matrix `[n, k]`, with each weight type.
    async fn product(
        &mut self,
        operation: &'static str,
        k: u32,
        n: u32,
        mut record: impl FnMut(&mut Recorder, &Matrix) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let device = self.device;
        let mut f16_seconds = None;
        let t = self.n_tokens;
        for weight in WEIGHTS {
            let weights_bytes: u64 =
                Matrix::declare(&self.device.target(), "w", weight, n, k)?.tensors().map(Tensor::size_bytes).sum();
            let work = Work {
                bytes: weights_bytes + 4 * u64::from(t * (k + n)),
                flop: 2 * u64::from(t) * u64::from(k) * u64::from(n),
            };
            let mut row = self
                .run(operation, work, |rec| {
                    let w = matrix(device, weight, n, k)?;
                    record(rec, &w)
                })
                .await?;
            row.vs_f16 = Some(*f16_seconds.get_or_insert(row.seconds) / row.seconds);
            self.rows.push(row);
        }
        Ok(())
    }

    async fn kernel(
        &mut self,
        operation: &'static str,
        work: Work,
        record: impl FnMut(&mut Recorder) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let row = self.run(operation, work, record).await?;
        self.rows.push(row);
        Ok(())
    }

    /// Times a kernel. It is recorded several times, each time with operands of its own, so that one submission has work
    /// enough to hide what it costs itself, and caches do not hold what a model's other layers would have driven out.
    async fn run(
        &self,
        operation: &'static str,
        work: Work,
        mut record: impl FnMut(&mut Recorder) -> Result<(), Error>,
    ) -> Result<KernelRow, Error> {
        // Ten times what the caches of large GPUs hold.
        const COLD_BYTES: u64 = 1 << 29;
        const LONG_FLOP: u64 = 1 << 32;
        const MAX_COPIES: u64 = 64;

        let n_copies = (COLD_BYTES / work.bytes).min(LONG_FLOP / work.flop.max(1)).clamp(1, MAX_COPIES);
        let mut rec = self.device.recorder();
        for _ in 0..n_copies {
            record(&mut rec)?;
        }
        let recording = rec.finish(&mut Workspace::default());
        let seconds = seconds(self.device, &recording).await? / n_copies as f64;
        Ok(KernelRow {
            kernel: recording.labels().next().unwrap_or_default(),
            operation,
            n_tokens: self.n_tokens,
            seconds,
            bytes: work.bytes,
            flop: work.flop,
            share: self.probes.least_seconds(work.bytes as f64, work.flop as f64) / seconds,
            vs_f16: None,
        })
    }
}

fn output(shape: &[u32]) -> Result<Tensor, Error> {
    Tensor::declare("y", Role::Activations, shape, DType::F32)
}
