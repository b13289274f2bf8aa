//! Benchmarks: a model's speed on a device, relative to the minimum work per token and to the device's peak rates.
//!
//! Rates are those of a session, a single sequence, by the host's clock, as users see them. [`Roofline`] computes
//! the minimum bytes and operations per token. [`Probes`] measures the device in the same run with one kernel that
//! only moves bytes and one that only multiplies. [`kernels`] does the same for each kernel, [`embed`] for text
//! encoders, [`mol`] for mixtures of logits. A [`report`] has all of it for one
//! device, in a format for exchange. [`ablate`] shows where a kernel's time goes.

#[cfg(not(target_arch = "wasm32"))]
pub mod ablate;
pub mod embed;
pub mod kernels;
#[cfg(not(target_arch = "wasm32"))]
pub mod mol;
pub mod report;
pub mod shapes;

use web_time::Instant;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::generate::{GenerateOptions, Session};
use crate::kernels::microbench::{PROBE_READS, ReadOrder, probe_read};
use crate::kernels::{CachedKeys, Linear, matmul, scale};
use crate::matrix::Matrix;
use crate::model::{Attention, Block, KvCache, ModelConfig, Transformer};
use crate::recording::{Recording, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tuning::operands::{uniform, words};

/// Minimum, median and maximum of repeated measurements.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Spread {
    /// The lowest.
    pub lowest: f64,
    /// The median, the upper of two.
    pub median: f64,
    /// The highest.
    pub highest: f64,
}

impl Spread {
    /// The spread of `values`; zeros if there are none.
    pub fn of(mut values: Vec<f64>) -> Spread {
        crate::sort::by(&mut values, f64::total_cmp);
        let at = |i: usize| values.get(i).copied().unwrap_or_default();
        Spread { lowest: at(0), median: at(values.len() / 2), highest: at(values.len().saturating_sub(1)) }
    }
}

/// Percentiles of latencies, by nearest rank.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Percentiles {
    /// The median.
    pub p50: f64,
    /// The 95th percentile.
    pub p95: f64,
    /// The 99th percentile.
    pub p99: f64,
}

impl Percentiles {
    /// The percentiles of `values`; zeros if there are none.
    pub fn of(mut values: Vec<f64>) -> Percentiles {
        crate::sort::by(&mut values, f64::total_cmp);
        let rank = |percent: usize| (values.len() * percent).div_ceil(100);
        let at = |percent| values.get(rank(percent).saturating_sub(1)).copied().unwrap_or_default();
        Percentiles { p50: at(50), p95: at(95), p99: at(99) }
    }
}

/// Minimum work for a model's tokens. Weights and cache count by their size on the device; the embedding table, of
/// which a token reads one row, counts only if it is also the head. Activations are ignored: in a model larger than
/// the device's caches they are less than a hundredth of the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roofline {
    /// Bytes of weights read in every pass.
    pub weights_bytes: u64,
    /// Operations with the layers' weights, per token.
    pub layers_flop: u64,
    /// Operations with the head, per pass.
    pub head_flop: u64,
    /// Costs of keys and values in each layer.
    pub layers: Vec<KeyCosts>,
}

/// Costs of keys and values in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyCosts {
    /// Bytes per position.
    pub position_bytes: u64,
    /// Operations per key that a query sees, in all heads.
    pub key_flop: u64,
    /// Maximum keys that a query sees, including its own.
    pub window: u64,
}

impl KeyCosts {
    pub(super) fn of(attention: &Attention, position_bytes: u64) -> KeyCosts {
        let window = attention.window.map_or(u64::MAX, u64::from);
        KeyCosts { position_bytes, key_flop: 4 * u64::from(attention.q_dim()), window }
    }
}

/// Number of weights in a block's products.
fn products(config: &ModelConfig, block: &Block) -> u64 {
    let Block { attention, feed_forward, .. } = block;
    let of_block = [attention.qkv_dim(), attention.q_dim(), feed_forward.up_dim(), feed_forward.dim];
    u64::from(config.dim) * of_block.map(u64::from).iter().sum::<u64>()
}

impl Roofline {
    /// The roofline of a model and its cache, which need not be allocated.
    pub fn new(transformer: &Transformer, cache: &KvCache) -> Roofline {
        let (config, weights) = (&transformer.config, &transformer.weights);
        let bytes = |tensor: &Tensor| tensor.size_bytes();
        let is_tied = weights.tensor_slots().all(|(name, _)| name != "output.weight");
        // A pass reads one row per token of these tables.
        let per_layer = weights.per_layer.iter().filter_map(|per_layer| per_layer.token_embd.as_ref());
        let tables = per_layer.chain((!is_tied).then_some(&weights.token_embd));
        let table_bytes: u64 = tables.flat_map(Matrix::tensors).map(bytes).sum();
        // One row per head, of keys and of values.
        let of_position = |CachedKeys { k, v, .. }: &CachedKeys| {
            [k].into_iter().chain(v).map(|rows| bytes(rows) / u64::from(rows.shape()[1])).sum()
        };
        let position_bytes = |l| cache.keys(l).map_or(0, of_position);
        let layers = config.blocks.iter().enumerate();
        Roofline {
            weights_bytes: weights.tensors().map(bytes).sum::<u64>() - table_bytes,
            layers_flop: 2 * config.blocks.iter().map(|block| products(config, block)).sum::<u64>(),
            head_flop: 2 * u64::from(config.vocab_size) * u64::from(config.dim),
            layers: layers.map(|(l, block)| KeyCosts::of(&block.attention, position_bytes(l))).collect(),
        }
    }

    /// Bytes of the pass over one token after `n_cached` others: all weights, the keys and values it reads, and
    /// those it writes.
    pub fn decode_bytes(&self, n_cached: u64) -> u64 {
        self.prefill_bytes(1, n_cached)
    }

    /// Bytes of one pass over `n_tokens` tokens after `n_cached` others.
    pub fn prefill_bytes(&self, n_tokens: u64, n_cached: u64) -> u64 {
        let of_layer = |layer: &KeyCosts| layer.position_bytes * (n_tokens + n_cached.min(layer.window - 1));
        self.weights_bytes + self.layers.iter().map(of_layer).sum::<u64>()
    }

    /// Operations of `n_tokens` tokens after `n_cached` others, with the last one's logits: a multiplication and an
    /// addition per weight, and per element of each key and value that is read.
    pub fn flop(&self, n_tokens: u64, n_cached: u64) -> u64 {
        let seen = |window: u64| (n_cached..n_cached + n_tokens).map(|pos| (pos + 1).min(window)).sum::<u64>();
        let keys: u64 = self.layers.iter().map(|layer| layer.key_flop * seen(layer.window)).sum();
        n_tokens * self.layers_flop + self.head_flop + keys
    }
}

/// Bytes of a tensor that exceeds any processor's caches.
const LARGE_BYTES: u64 = 128 << 20;

/// The rate of `matmul` with F32 weights at one size.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct ProductRate {
    /// M, N and K.
    pub size: u32,
    /// Multiplications and additions per second.
    pub flop_per_second: f64,
}

/// A device's peak rates, as a reference for others.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Probes {
    /// Bytes read and written per second by `scale`.
    pub copy_bytes_per_second: f64,
    /// Bytes of `scale`'s input, and of its output.
    pub copy_tensor_bytes: u64,
    /// Multiplications and additions per second by `matmul` with F32 weights.
    pub flop_per_second: f64,
    /// M, N and K of that product, the fastest size.
    pub matmul_size: u32,
    /// All measured sizes.
    pub matmul: Vec<ProductRate>,
}

/// Read bandwidth for 4-byte words by access pattern, in bytes of the words themselves.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Reads {
    /// Consecutive words.
    pub sequential_bytes_per_second: f64,
    /// With a stride of 128 bytes.
    pub strided_bytes_per_second: f64,
    /// In random order.
    pub scattered_bytes_per_second: f64,
    /// Bytes of the tensor read.
    pub tensor_bytes: u64,
}

impl Reads {
    /// Measures a device with `probe_read`.
    ///
    /// # Errors
    /// Errors of [`Device::run`].
    pub async fn measure(device: &Device) -> Result<Reads, Error> {
        /// Words in 128 bytes.
        const STRIDE: u32 = 32;
        let tensor_bytes = 1 << LARGE_BYTES.min(device.limits().max_binding_bytes).ilog2();
        let len = (tensor_bytes / 4) as u32;
        let content: Vec<u32> = words(len as usize).collect();
        let x = device.upload("x", &[len], &content)?;
        let y = Tensor::declare("y", Role::Activations, &[len / PROBE_READS], DType::U32)?;
        let mut rates = [0.0; 3];
        let orders = [ReadOrder::Strided(1), ReadOrder::Strided(STRIDE), ReadOrder::Scattered];
        for (rate, order) in rates.iter_mut().zip(orders) {
            let mut rec = device.recorder();
            probe_read(&mut rec, &x, &y, order)?;
            *rate =
                tensor_bytes as f64 / seconds(device, &rec.finish(&mut Workspace::default()), Effort::USUAL).await?;
        }
        let [sequential_bytes_per_second, strided_bytes_per_second, scattered_bytes_per_second] = rates;
        Ok(Reads { sequential_bytes_per_second, strided_bytes_per_second, scattered_bytes_per_second, tensor_bytes })
    }
}

impl Probes {
    /// Measures a device for about a second, with growing tensors until a run is long enough.
    ///
    /// # Errors
    /// Errors of [`Device::run`].
    pub async fn measure(device: &Device) -> Result<Probes, Error> {
        /// A product this long shows the peak rate; the next size would take eight times as long.
        const LONG_SECONDS: f64 = 0.01;

        let copy_tensor_bytes = LARGE_BYTES.min(device.limits().max_binding_bytes);
        let shape = [(copy_tensor_bytes / 4) as u32];
        let x = device.upload("x", &shape, &uniform(shape[0] as usize))?;
        let y = Tensor::declare("y", Role::Activations, &shape, DType::F32)?;
        let mut rec = device.recorder();
        scale(&mut rec, &x, &y, 0.5)?;
        let copy_seconds = seconds(device, &rec.finish(&mut Workspace::default()), Effort::USUAL).await?;
        drop((x, y));

        let mut matmul_rates = Vec::new();
        for size in [256u32, 512, 1024, 2048, 4096] {
            let values = uniform((size * size) as usize);
            let w = device.upload_matrix("w", [size, size], &values)?;
            let x = device.upload("x", &[size, size], &values)?;
            let y = Tensor::declare("y", Role::Activations, &[size, size], DType::F32)?;
            let mut rec = device.recorder();
            matmul(&mut rec, &Linear::new(&w), &x, &y)?;
            let seconds = seconds(device, &rec.finish(&mut Workspace::default()), Effort::USUAL).await?;
            matmul_rates.push(ProductRate { size, flop_per_second: 2.0 * f64::from(size).powi(3) / seconds });
            if seconds > LONG_SECONDS {
                break;
            }
        }
        let none = ProductRate { size: 0, flop_per_second: 0.0 };
        let faster = |a: ProductRate, b: &ProductRate| if b.flop_per_second > a.flop_per_second { *b } else { a };
        let best = matmul_rates.iter().fold(none, faster);
        Ok(Probes {
            copy_bytes_per_second: 2.0 * copy_tensor_bytes as f64 / copy_seconds,
            copy_tensor_bytes,
            flop_per_second: best.flop_per_second,
            matmul_size: best.size,
            matmul: matmul_rates,
        })
    }

    /// Whether operations take longer than bytes.
    pub fn is_compute_bound(&self, bytes: f64, flop: f64) -> bool {
        flop / self.flop_per_second > bytes / self.copy_bytes_per_second
    }

    /// Minimum seconds for this work.
    pub fn least_seconds(&self, bytes: f64, flop: f64) -> f64 {
        (bytes / self.copy_bytes_per_second).max(flop / self.flop_per_second)
    }
}

/// Bytes available for a model on this machine's CPU, if the system reports it.
pub fn free_bytes() -> Option<u64> {
    crate::memory::of_host()
}

/// Limits on a batch.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Limits {
    /// Maximum seconds: of a mixture over all items, or of an encoder's batch (95th percentile).
    pub seconds: Option<f64>,
    /// Maximum bytes: of all items, or of weights and batch.
    pub bytes: Option<u64>,
}

/// The measured phase of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// A prompt, up to the first token.
    Prefill,
    /// Generated tokens.
    Decode,
}

/// A measurement: `n_tokens` tokens after `depth` others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    /// Prompt or generated tokens.
    pub phase: Phase,
    /// Number of tokens.
    pub n_tokens: usize,
    /// Tokens in the context before.
    pub depth: usize,
}

impl Case {
    /// Context positions that this case needs.
    pub fn positions(&self) -> usize {
        match self.phase {
            Phase::Prefill => self.depth + self.n_tokens,
            // The first generated token belongs to the prompt, here one token.
            Phase::Decode => self.depth + self.n_tokens + 1,
        }
    }

    /// The name as in llama-bench: `pp512`, `tg128`, `tg128 @ d1024`.
    pub fn name(&self) -> String {
        let phase = if self.phase == Phase::Prefill { "pp" } else { "tg" };
        let depth = if self.depth > 0 { format!(" @ d{}", self.depth) } else { String::new() };
        format!("{phase}{}{depth}", self.n_tokens)
    }
}

/// One row of results. Counts are per token; a decoded token's include its share of the one-token prompt.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Row {
    /// [`Case::name`], followed by the batch size if not the device's default, as in `pp512 b32`.
    pub test: String,
    /// Prompt or generated tokens.
    pub phase: Phase,
    /// Number of tokens.
    pub n_tokens: usize,
    /// Tokens in the context before.
    pub depth: usize,
    /// [`Model::max_pass`](crate::Model::max_pass) of the session: maximum prompt tokens per pass.
    pub batch_size: u32,
    /// Over the repetitions.
    pub tokens_per_second: Spread,
    /// Kernels run.
    pub dispatches_per_token: f64,
    /// Command buffers submitted.
    pub submits_per_token: f64,
    /// Bytes written by the host.
    pub uploaded_bytes_per_token: f64,
    /// Bytes read back by the host.
    pub read_bytes_per_token: f64,
    /// Minimum bytes by the [`Roofline`].
    pub bytes_per_token: f64,
    /// Minimum operations by the [`Roofline`].
    pub flop_per_token: f64,
    /// Rate of those bytes relative to the copy probe; limits decoding.
    pub bandwidth_share: f64,
    /// Rate of those operations relative to the multiply probe; limits prompts.
    pub flop_share: f64,
    /// Buffers created in the last repetition.
    pub buffers_created: u64,
    /// Time of each piece in the last repetition, in seconds from its start: one token, or those of one submission.
    #[serde(skip)]
    pub piece_seconds: Vec<f64>,
}

/// Measures one case `repetitions` times after a warm-up, with the given [`GenerateOptions::tokens_per_submit`].
/// Clears the session; its context must have [`Case::positions`].
///
/// # Errors
/// [`Error::Option`] if there are no tokens or no repetitions; errors of [`Session::generate_ids`] and
/// [`Generation::next`](crate::generate::Generation::next).
pub async fn measure(
    session: &mut Session,
    case: Case,
    tokens_per_submit: Option<u32>,
    repetitions: usize,
    probes: &Probes,
) -> Result<Row, Error> {
    for (option, value) in [("n_tokens", case.n_tokens), ("repetitions", repetitions)] {
        if value == 0 {
            return Err(Error::Option { option, expected: "at least 1".into(), found: "0".into() });
        }
    }
    let Case { phase, n_tokens, depth } = case;
    let ids = token_ids(session.model().config().vocab_size, depth + n_tokens);
    session.clear();
    if depth > 0 {
        generate(session, &ids[..depth], 1, None).await?;
    }
    // Prompt and generated tokens, and the number of tokens counted.
    let (n_prompt, n_generated, n_counted) = match phase {
        Phase::Prefill => (n_tokens, 1, n_tokens),
        Phase::Decode => (1, 1 + n_tokens, 1 + n_tokens),
    };
    let device = session.model().device().clone();
    let (mut rates, mut piece_seconds) = (Vec::new(), Vec::new());
    let mut before = device.counters();
    for run in 0..=repetitions {
        session.truncate(depth);
        before = if run == repetitions { device.counters() } else { before };
        let prompt = &ids[depth..depth + n_prompt];
        piece_seconds.clear();
        let start = Instant::now();
        let on_piece = || piece_seconds.push(start.elapsed().as_secs_f64());
        let [prefill, decode] = generate_each(session, prompt, n_generated, tokens_per_submit, on_piece).await?;
        // The first run compiles pipelines and allocates.
        if run > 0 {
            rates.push(if phase == Phase::Prefill { prefill } else { decode });
        }
    }
    let counters = device.counters() - before;
    let per_token = |count: u64| count as f64 / n_counted as f64;

    let roofline = Roofline::new(session.model().transformer(), session.cache());
    let (n, depth) = (n_tokens as u64, depth as u64);
    let (bytes, flop): (u64, u64) = match phase {
        Phase::Prefill => (roofline.prefill_bytes(n, depth), roofline.flop(n, depth)),
        Phase::Decode => {
            let positions = depth + 1..depth + 1 + n;
            (positions.clone().map(|p| roofline.decode_bytes(p)).sum(), positions.map(|p| roofline.flop(1, p)).sum())
        }
    };
    let (bytes_per_token, flop_per_token) = (bytes as f64 / n as f64, flop as f64 / n as f64);
    let tokens_per_second = Spread::of(rates);
    let batch_size = session.model().max_pass();
    let is_usual = batch_size == device.target().usual_max_pass();
    Ok(Row {
        test: if is_usual { case.name() } else { format!("{} b{batch_size}", case.name()) },
        phase,
        n_tokens,
        depth: case.depth,
        batch_size,
        tokens_per_second,
        dispatches_per_token: per_token(counters.dispatches),
        submits_per_token: per_token(counters.submits),
        uploaded_bytes_per_token: per_token(counters.bytes_uploaded),
        read_bytes_per_token: per_token(counters.bytes_read),
        bytes_per_token,
        flop_per_token,
        bandwidth_share: bytes_per_token * tokens_per_second.median / probes.copy_bytes_per_second,
        flop_share: flop_per_token * tokens_per_second.median / probes.flop_per_second,
        buffers_created: counters.buffers_created,
        piece_seconds,
    })
}

/// Seconds for `n_tokens` tokens with the KV cache, and with recomputing the whole sequence for each token.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct CacheRow {
    /// Tokens generated after a one-token prompt.
    pub n_tokens: usize,
    /// With the cache.
    pub cached_seconds: f64,
    /// Without.
    pub uncached_seconds: f64,
}

/// Measures the gain of the KV cache, as the median of three runs.
///
/// # Errors
/// As [`measure`].
pub async fn measure_cache(session: &mut Session, n_tokens: usize) -> Result<CacheRow, Error> {
    const REPETITIONS: usize = 3;
    let ids = token_ids(session.model().config().vocab_size, n_tokens);
    let [mut cached, mut uncached] = [Vec::new(), Vec::new()];
    for run in 0..=REPETITIONS {
        session.clear();
        let start = Instant::now();
        generate(session, &ids[..1], n_tokens, None).await?;
        let cached_seconds = start.elapsed().as_secs_f64();
        let start = Instant::now();
        for n in 1..=n_tokens {
            session.clear();
            generate(session, &ids[..n], 1, None).await?;
        }
        if run > 0 {
            cached.push(cached_seconds);
            uncached.push(start.elapsed().as_secs_f64());
        }
    }
    let [cached_seconds, uncached_seconds] = [cached, uncached].map(|times| Spread::of(times).median);
    Ok(CacheRow { n_tokens, cached_seconds, uncached_seconds })
}

/// Completes `prompt` and returns the rates of prefill and decoding.
async fn generate(
    session: &mut Session,
    prompt: &[u32],
    n_generated: usize,
    tokens_per_submit: Option<u32>,
) -> Result<[f64; 2], Error> {
    generate_each(session, prompt, n_generated, tokens_per_submit, || ()).await
}

/// As [`generate`], and calls `on_piece` for each piece.
async fn generate_each(
    session: &mut Session,
    prompt: &[u32],
    n_generated: usize,
    tokens_per_submit: Option<u32>,
    mut on_piece: impl FnMut(),
) -> Result<[f64; 2], Error> {
    let options = GenerateOptions { ignore_eos: true, tokens_per_submit, ..GenerateOptions::greedy(n_generated) };
    let mut generation = session.generate_ids(prompt, &options)?;
    while let Some(piece) = generation.next().await {
        piece?;
        on_piece();
    }
    Ok([generation.prefill().rate(), generation.decode().rate()])
}

/// Measuring effort.
#[derive(Clone, Copy, Debug)]
struct Effort {
    samples: usize,
    /// Minimum seconds of a sample, to outweigh clock resolution and waiting, unless that needs too many runs.
    sample_seconds: f64,
}

impl Effort {
    const USUAL: Effort = Effort { samples: 5, sample_seconds: 0.02 };
}

/// Seconds per run of a recording with several runs in flight: the median of a few samples.
async fn seconds(device: &Device, recording: &Recording, effort: Effort) -> Result<f64, Error> {
    const MAX_RUNS: usize = 512;

    let sample = async |n_runs: usize| {
        let start = Instant::now();
        for _ in 0..n_runs {
            device.run(recording)?;
        }
        device.drained().await?;
        Ok::<f64, Error>(start.elapsed().as_secs_f64())
    };
    sample(1).await?;
    let once = sample(1).await?;
    let n_runs = ((effort.sample_seconds / once.max(1e-9)).ceil() as usize).clamp(1, MAX_RUNS);
    let mut times = Vec::new();
    for _ in 0..effort.samples {
        times.push(sample(n_runs).await? / n_runs as f64);
    }
    Ok(Spread::of(times).median)
}

/// Seeded pseudo-random ids.
fn token_ids(vocab_size: u32, n: usize) -> Vec<u32> {
    words(n).map(|word| word % vocab_size).collect()
}

/// Seeded numbers in [0, 1).
pub fn fractions(seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    })
}

/// Seeded, approximately normal numbers: sums of twelve uniform ones.
pub fn normal(seed: u64) -> impl Iterator<Item = f32> {
    let mut uniform = fractions(seed);
    std::iter::repeat_with(move || uniform.by_ref().take(12).sum::<f32>() - 6.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::WeightType;
    use crate::kernels::{Gate, KvType};
    use crate::model::{Between, FeedForward, NormKind, SourceTensor, WeightSource, Weights};

    /// Llama-3.2-1B in Q8_0, norms in F32.
    struct Llama1B {
        is_tied: bool,
    }

    impl WeightSource for Llama1B {
        fn describe(&self, name: &str) -> Option<SourceTensor> {
            let tensor = |weight, shape: &[u64]| Some(SourceTensor { weight, shape: shape.to_vec() });
            let part = name.rsplit('.').nth(1).unwrap_or_default();
            match part {
                _ if !name.ends_with(".weight") => None,
                "attn_norm" | "ffn_norm" | "output_norm" => tensor(WeightType::F32, &[2048]),
                "attn_q" | "attn_output" => tensor(WeightType::Q8_0, &[2048, 2048]),
                "attn_k" | "attn_v" => tensor(WeightType::Q8_0, &[512, 2048]),
                "ffn_gate" | "ffn_up" => tensor(WeightType::Q8_0, &[8192, 2048]),
                "ffn_down" => tensor(WeightType::Q8_0, &[2048, 8192]),
                "output" if self.is_tied => None,
                "output" | "token_embd" => tensor(WeightType::Q8_0, &[128_256, 2048]),
                _ => None,
            }
        }
    }

    fn roofline(is_tied: bool, window: Option<u32>) -> Roofline {
        let attention = Attention { n_kv_heads: 8, window, ..Attention::plain(32, 64) };
        let feed_forward = FeedForward { dim: 8192, between: Between::Gate(Gate::Silu), experts: None };
        let block = Block::plain(attention, feed_forward);
        let config = ModelConfig {
            architecture: "llama".into(),
            dim: 2048,
            vocab_size: 128_256,
            max_seq_len: 8192,
            blocks: vec![block; 16],
            n_mtp: 0,
            norm: NormKind::Rms,
            norm_eps: 1e-5,
            ropes: Vec::new(),
            mrope: None,
            positions: None,
            position_biases: None,
            n_token_types: 0,
            per_layer: None,
            embd_norm: false,
            output_norm: true,
            embd_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            logit_soft_cap: None,
            causal: true,
            has_head: true,
            row_factors: Vec::new(),
        };
        let cache = KvCache::declare(&config, KvType::F32, 4096, 512).unwrap();
        let weights = Weights::declare(&Device::cpu().target(), &config, &Llama1B { is_tied }).unwrap();
        Roofline::new(&Transformer::declare(config, weights, 4096).unwrap(), &cache)
    }

    #[test]
    fn roofline_of_llama_3_2_1b_matches_hand_count() {
        // 2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 2048 * 8192 weights in each of 16 layers.
        let (layers, head) = (60_817_408 * 16, 128_256 * 2048);
        let norms_bytes = (2 * 16 + 1) * 2048 * 4;
        for is_tied in [true, false] {
            let found = roofline(is_tied, None);
            // Q8_0 has 34 bytes per 32 weights; an embedding table besides the head changes nothing.
            assert_eq!(found.weights_bytes, (layers + head) / 32 * 34 + norms_bytes);
            // 8 heads of 64, keys and values, 16 layers, 4 bytes: twice the 32,768 of a cache in half precision.
            assert_eq!(found.layers.iter().map(|layer| layer.position_bytes).sum::<u64>(), 65_536);
            assert_eq!(found.decode_bytes(0), found.weights_bytes + 65_536);
            assert_eq!(found.decode_bytes(1000), found.weights_bytes + 1001 * 65_536);
            assert_eq!(found.prefill_bytes(128, 1000), found.weights_bytes + 1128 * 65_536);
            // One token sees itself and all earlier ones.
            assert_eq!(found.flop(1, 1000), 2 * (layers + head) + 4 * 16 * 32 * 64 * 1001);
            assert_eq!(found.flop(3, 0), 2 * (3 * layers + head) + 4 * 16 * 32 * 64 * (1 + 2 + 3));
        }
        let windowed = roofline(true, Some(100));
        assert_eq!(windowed.decode_bytes(1000), windowed.weights_bytes + 100 * 65_536);
        assert_eq!(windowed.decode_bytes(98), windowed.weights_bytes + 99 * 65_536);
        assert_eq!(windowed.flop(2, 1000) - windowed.flop(1, 1000), 2 * layers + 4 * 16 * 32 * 64 * 100);
    }

    #[test]
    fn spread_has_lowest_median_and_highest() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { lowest: 1.0, median: 2.0, highest: 3.0 });
        assert_eq!(Spread::of(vec![2.0, 1.0]).median, 2.0);
        assert_eq!(Spread::of(Vec::new()).median, 0.0);
    }

    #[test]
    fn percentiles_use_the_nearest_rank() {
        let of = |n: u32| Percentiles::of((1..=n).rev().map(f64::from).collect());
        assert_eq!(of(100), Percentiles { p50: 50.0, p95: 95.0, p99: 99.0 });
        assert_eq!(of(50), Percentiles { p50: 25.0, p95: 48.0, p99: 50.0 });
        assert_eq!(of(5), Percentiles { p50: 3.0, p95: 5.0, p99: 5.0 });
        assert_eq!(of(1), Percentiles { p50: 1.0, p95: 1.0, p99: 1.0 });
        assert_eq!(of(0), Percentiles { p50: 0.0, p95: 0.0, p99: 0.0 });
    }

    #[test]
    fn case_names_follow_llama_bench() {
        let case = |phase, depth| Case { phase, n_tokens: 128, depth };
        assert_eq!(case(Phase::Prefill, 0).name(), "pp128");
        assert_eq!(case(Phase::Decode, 1024).name(), "tg128 @ d1024");
        assert_eq!([case(Phase::Prefill, 7).positions(), case(Phase::Decode, 7).positions()], [135, 136]);
    }
}
