//! Ablations: kernels with a part left out or an override changed, beside the kernels as they are, to see where their
//! time goes. Each case has the time that it should take on an H100, from arithmetic, written down before it was
//! measured: where the two differ, the arithmetic is wrong, and so is what was planned by it.
//!
//! Parts are left out by shaders in `benches/shaders/ablations/`, which are the shipped ones with a function replaced.
//! An override is one entry in a case's `overrides`. Both run with the shipped kernel's plan: tile, grid, operands.

use web_time::{Duration, Instant};

use super::{Effort, Spread, seconds};
use crate::device::{Clock, Device};
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::kernels::microbench::probe_copy;
use crate::kernels::{
    AttentionConfig, Heads, KvType, Linear, RopeConfig, RopeStyle, StepState, attention_next, product_kernel,
    rope_table,
};
use crate::matrix::Matrix;
use crate::recording::{BatchInvariance, Recorder, Recording, Workspace};
use crate::shaders::{
    Ablation, Id, Kernel, MATMUL_HALF, MATMUL_HALF_MATRICES, MATMUL_HALF_NO_UNPACK, MATMUL_HALF_STAGING, MATVEC,
    MATVEC_CONSTANT_X, MATVEC_LOADS, MATVEC_NO_SCALE, overrides,
};
use crate::tensor::{Role, Tensor};
use crate::tuning::operands::{input, keys, matrix};

/// A part of the ablations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// A matrix times a vector.
    Matvec,
    /// A matrix product in half precision.
    MatmulHalf,
    /// Products of one layer for 8 to 64 rows, by the kernels for few rows and by those for many.
    Rows,
    /// Dispatches that do next to nothing, each dependent on the one before or on none.
    Chain,
    /// Attention of one token after contexts of different lengths.
    Attention,
}

impl Part {
    /// All parts, in the order of measurement.
    pub const ALL: [Part; 5] = [Part::Matvec, Part::MatmulHalf, Part::Rows, Part::Chain, Part::Attention];

    /// The part's name.
    pub fn name(self) -> &'static str {
        match self {
            Part::Matvec => "matvec",
            Part::MatmulHalf => "matmul_half",
            Part::Rows => "rows",
            Part::Chain => "chain",
            Part::Attention => "attention",
        }
    }
}

/// A kernel as it is, with a part left out, or with overrides.
struct Case {
    name: &'static str,
    weight: WeightType,
    ablation: Option<&'static Ablation>,
    /// Overrides that take other values than the kernel's plan gives them.
    overrides: &'static [(&'static str, f64)],
    /// Microseconds on an H100, with the sizes of [`Sizes::FULL`].
    predicted_us: f64,
}

/// The name of cases that others are compared with: all up to the next one.
const AS_IS: &str = "as is";

const fn as_is(weight: WeightType, predicted_us: f64) -> Case {
    Case { name: AS_IS, weight, ablation: None, overrides: &[], predicted_us }
}

const fn without(name: &'static str, weight: WeightType, ablation: &'static Ablation, predicted_us: f64) -> Case {
    Case { name, weight, ablation: Some(ablation), overrides: &[], predicted_us }
}

const fn with(
    name: &'static str,
    weight: WeightType,
    overrides: &'static [(&'static str, f64)],
    predicted_us: f64,
) -> Case {
    Case { name, weight, ablation: None, overrides, predicted_us }
}

/// Cases of `matvec`: 117 million weights, 66 MB, which 2.8 TB/s read in 24 us.
static MATVEC_CASES: [Case; 6] = [
    // The same as by bits, which is the default on NVIDIA's adapters.
    as_is(WeightType::Q4_0, 30.0),
    // A conversion for each weight, 16 a clock on 132 SMs of 1.98 GHz, is 28 us; 53 % of that rate were measured.
    with("bytes by conversions", WeightType::Q4_0, &[(overrides::BY_BITS, 0.0)], 53.0),
    // 439 clocks of the slowest pipe for 128 weights of 32 lanes are 12 us, so that memory binds, at four fifths.
    with("bytes by bits", WeightType::Q4_0, &[(overrides::BY_BITS, 1.0)], 30.0),
    // Memory alone.
    without("loads only", WeightType::Q4_0, &MATVEC_LOADS, 24.0),
    // A ninth of the bytes less, in loads of their own.
    without("no scale", WeightType::Q4_0, &MATVEC_NO_SCALE, 27.0),
    // Two barriers less for each 64 blocks of a row, and 16 KB of x less for 8 rows of 2.3 KB: from a cache.
    without("x constant", WeightType::Q4_0, &MATVEC_CONSTANT_X, 28.0),
];

/// Cases of `matmul_half`: 60 GFLOP in steps of 128 x 128 x 64, of which each takes 4,760 clocks of an SM with Q4_0.
static MATMUL_CASES: [Case; 15] = [
    // 129 TFLOP/s were measured of 4096 rows.
    as_is(WeightType::F16, 466.0),
    without("staging only", WeightType::F16, &MATMUL_HALF_STAGING, 320.0),
    without("matrices only", WeightType::F16, &MATMUL_HALF_MATRICES, 152.0),
    // 108 TFLOP/s.
    as_is(WeightType::Q4_0, 557.0),
    // 512 of 4,760 clocks for conversions, if they are not hidden.
    without("no unpack", WeightType::Q4_0, &MATMUL_HALF_NO_UNPACK, 490.0),
    // What matrices take is not hidden: a warp waits for memory before it multiplies.
    without("staging only", WeightType::Q4_0, &MATMUL_HALF_STAGING, 405.0),
    // 800 clocks of products at 62 % of the peak beside 770 to 1,280 of loads from workgroup memory.
    without("matrices only", WeightType::Q4_0, &MATMUL_HALF_MATRICES, 152.0),
    // Half as much of K a step: 0.8 of the time the other way round was measured.
    with("half the depth", WeightType::Q4_0, &[(overrides::DEPTH, 32.0)], 696.0),
    // One barrier a step, and unpacking beside products: 1.2 to 1.4 times as fast. 41 KB hold two steps of 32.
    with("two stages", WeightType::Q4_0, &[(overrides::STAGES, 2.0), (overrides::DEPTH, 32.0)], 430.0),
    // 16 warps an SM in place of 8: 1.2 to 1.4 times as fast.
    with("eight subgroups", WeightType::Q4_0, &[(overrides::SUBGROUPS, 8.0)], 430.0),
    // Not all of both gains: what one hides, the other cannot hide again.
    with(
        "two stages, eight subgroups",
        WeightType::Q4_0,
        &[(overrides::STAGES, 2.0), (overrides::DEPTH, 32.0), (overrides::SUBGROUPS, 8.0)],
        370.0,
    ),
    // 94 TFLOP/s.
    as_is(WeightType::Q4_K, 640.0),
    without("no unpack", WeightType::Q4_K, &MATMUL_HALF_NO_UNPACK, 490.0),
    without("staging only", WeightType::Q4_K, &MATMUL_HALF_STAGING, 488.0),
    without("matrices only", WeightType::Q4_K, &MATMUL_HALF_MATRICES, 152.0),
];

/// Rows, and microseconds of a layer's products by the kernels for few rows and for many.
const ROWS_CASES: [(u32, f64, f64); 4] = [
    // Few: 8.3 ms for 32 layers were measured for each eight rows, which read and unpack all weights.
    // Many: steps of K one after the other, of 1.7 us each, whatever the rows are, as tiles are fewer than SMs: without
    // splits 416, and half of attention's output and down is left once K is split in four to eight.
    (8, 260.0, 400.0),
    (16, 520.0, 400.0),
    (32, 1040.0, 430.0),
    // 14.5 ms for 32 layers, from the passes over 512 tokens and the splits.
    (64, 2080.0, 450.0),
];
/// The weight type of those products.
const ROWS_WEIGHT: WeightType = WeightType::Q4_K;

/// Microseconds of a dispatch that reads what the one before wrote, and of one that does not: 3 us between kernels
/// were measured; independent ones may overlap.
const CHAIN_US: [f64; 2] = [3.0, 1.0];

/// Positions in the cache, of which each has 4 KB, and microseconds of attention: 1.9 TB/s and 6 us for the two
/// dispatches, which a short cache does not need both of.
const ATTENTION_CASES: [(u32, f64); 3] = [(512, 8.0), (8192, 24.0), (32_768, 77.0)];

/// Sizes of operands, and the effort of measuring.
#[derive(Clone, Copy, Debug, serde::Serialize)]
struct Sizes {
    /// N and K of `matvec`.
    matvec: [u32; 2],
    /// M, N and K of `matmul_half`.
    matmul: [u32; 3],
    /// C and F of the layer whose products have few or many rows.
    layer: [u32; 2],
    /// Dispatches of a chain.
    n_chained: u32,
    /// Cached positions are divided by this.
    shorter: u32,
    /// Bytes of copies of operands, so that no cache holds them between runs.
    cold_bytes: u64,
    /// Seconds that a case may be measured for after its first three runs.
    case_seconds: f64,
}

impl Sizes {
    /// Shapes of Llama 3.1 8B.
    const FULL: Sizes = Sizes {
        matvec: [28_672, 4096],
        matmul: [512, 14_336, 4096],
        layer: [4096, 14_336],
        n_chained: 200,
        shorter: 1,
        cold_bytes: 1 << 29,
        case_seconds: 1.5,
    };

    /// For a dry run on a software adapter.
    const QUICK: Sizes = Sizes {
        matvec: [256, 256],
        matmul: [32, 128, 256],
        layer: [256, 512],
        n_chained: 20,
        shorter: 128,
        cold_bytes: 1,
        case_seconds: 0.05,
    };
}

/// Heads of attention.
const N_HEADS: u32 = 32;
const N_KV_HEADS: u32 = 8;
const HEAD_DIM: u32 = 128;

/// Result of one case.
#[derive(Clone, Debug, serde::Serialize)]
pub struct AblationRow {
    /// The part that it belongs to.
    pub part: Part,
    /// What is left out or changed, or the size; the first of a part, and each called `as is`, is what others are
    /// compared with.
    pub case: String,
    /// Label of the shader variant that is measured, the first of several.
    pub kernel: &'static str,
    /// Dispatches per run.
    pub n_dispatches: usize,
    /// Seconds per run, the median; of a chain per dispatch.
    pub seconds: f64,
    /// Bytes of all operands of the kernel as it is, each once.
    pub bytes: u64,
    /// Multiplications and additions of the kernel as it is.
    pub flop: u64,
    /// Rate of those bytes.
    pub bytes_per_second: f64,
    /// Rate of those operations.
    pub flop_per_second: f64,
    /// Seconds divided by those of the case that it is compared with.
    pub of_as_is: f64,
    /// The same as predicted for an H100 with full sizes.
    pub predicted_of_as_is: f64,
    /// Seconds predicted for an H100 with full sizes.
    pub predicted_seconds: f64,
    /// The clock of `seconds`: `device`, or `host` for a chain and where the device has no timestamps.
    pub clock: &'static str,
}

/// A case that was not measured, and why.
#[derive(Clone, Debug, serde::Serialize)]
pub struct LeftOut {
    /// The part that it belongs to.
    pub part: Part,
    /// The case, or none for all of the part.
    pub case: Option<String>,
    /// Why.
    pub reason: String,
}

/// Results of all parts.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Ablations {
    /// Whether operands were small: only ratios mean anything, and nothing compares with predictions.
    pub is_quick: bool,
    /// In the order of measurement.
    pub rows: Vec<AblationRow>,
    /// What was not measured.
    pub left_out: Vec<LeftOut>,
}

/// Measures parts for at most about `limit`: cases that would begin later are left out. `quick` measures small
/// operands, for a dry run.
///
/// # Errors
/// [`Error::Option`] for the CPU, which has no shaders; errors of [`Device::run`].
pub async fn measure(device: &Device, parts: &[Part], quick: bool, limit: Duration) -> Result<Ablations, Error> {
    if !device.is_gpu() {
        return Err(Error::Option {
            option: "device",
            expected: "a GPU: the CPU has no shaders to leave parts out of".into(),
            found: "cpu".into(),
        });
    }
    let mut bench = Bench {
        // Products round as in models.
        device: device.for_model(false),
        sizes: if quick { Sizes::QUICK } else { Sizes::FULL },
        end: Instant::now() + limit,
        found: Ablations { is_quick: quick, rows: Vec::new(), left_out: Vec::new() },
        base: [1.0; 2],
    };
    for &part in Part::ALL.iter().filter(|part| parts.contains(part)) {
        match part {
            Part::Matvec => bench.matvec().await?,
            Part::MatmulHalf => bench.matmul_half().await?,
            Part::Rows => bench.rows().await?,
            Part::Chain => bench.chain().await?,
            Part::Attention => bench.attention().await?,
        }
        device.free_unused();
    }
    Ok(bench.found)
}

/// What a case is, beside its recording.
struct About {
    part: Part,
    case: String,
    /// Whether following cases are compared with it.
    is_base: bool,
    predicted_us: f64,
    /// Bytes and operations per run.
    work: [u64; 2],
}

struct Bench {
    device: Device,
    sizes: Sizes,
    end: Instant,
    found: Ablations,
    /// Seconds of the case that others are compared with, measured and predicted.
    base: [f64; 2],
}

impl Bench {
    async fn matvec(&mut self) -> Result<(), Error> {
        let [n, k] = self.sizes.matvec;
        let x = input(&self.device, &[1, k])?;
        let copies = self.copies(WeightType::Q4_0, n, k)?;
        self.products(Part::Matvec, &MATVEC, MATVEC_CASES.iter(), &copies, &x).await
    }

    async fn matmul_half(&mut self) -> Result<(), Error> {
        let [m, n, k] = self.sizes.matmul;
        let x = input(&self.device, &[m, k])?;
        for weight in [WeightType::F16, WeightType::Q4_0, WeightType::Q4_K] {
            let w = matrix(&self.device, weight, n, k)?;
            if product_kernel(&self.device.target(), &Linear::new(&w)).id != Id::MatmulHalf {
                let tier = self.device.target().tier().name();
                let reason = format!("the tier {tier} has no products in half precision");
                self.found.left_out.push(LeftOut { part: Part::MatmulHalf, case: None, reason });
                return Ok(());
            }
            let cases = MATMUL_CASES.iter().filter(|case| case.weight == weight);
            self.products(Part::MatmulHalf, &MATMUL_HALF, cases, &[w], &x).await?;
        }
        Ok(())
    }

    /// Matrices that are read in turn.
    fn copies(&self, weight: WeightType, n: u32, k: u32) -> Result<Vec<Matrix>, Error> {
        const MAX_COPIES: u64 = 16;
        let first = matrix(&self.device, weight, n, k)?;
        let n_copies = (self.sizes.cold_bytes / bytes(&first)).clamp(1, MAX_COPIES);
        let others = (1..n_copies).map(|_| matrix(&self.device, weight, n, k));
        std::iter::once(Ok(first)).chain(others).collect()
    }

    /// Cases of a product of `x` with each of some matrices.
    async fn products(
        &mut self,
        part: Part,
        kernel: &'static Kernel,
        cases: impl Iterator<Item = &'static Case>,
        matrices: &[Matrix],
        x: &Tensor,
    ) -> Result<(), Error> {
        for case in cases {
            let mut rec = self.device.recorder();
            let mut y = None;
            for w in matrices {
                let into = Tensor::declare("y", Role::Activations, &[x.shape()[0], w.rows()], DType::F32)?;
                Linear::new(w).record(&mut rec, x, &into)?;
                y = Some(into);
            }
            let (w, y) = (&matrices[0], y.as_ref().unwrap_or(x));
            let about = About {
                part,
                case: format!("{} {}", w.weight().name(), case.name),
                is_base: case.name == AS_IS,
                predicted_us: case.predicted_us,
                work: product_work(w, x, y),
            };
            match rec.ablate(kernel, case.ablation, case.overrides) {
                Ok(()) => self.case(about, rec, Some(kernel), matrices.len()).await?,
                Err(reason) => self.found.left_out.push(LeftOut { part, case: Some(about.case), reason }),
            }
        }
        Ok(())
    }

    /// Products of a layer: queries, keys and values; attention's output; gate and up; down.
    async fn rows(&mut self) -> Result<(), Error> {
        let [dim, ffn_dim] = self.sizes.layer;
        let shapes = [[dim / 2 * 3, dim], [dim, dim], [2 * ffn_dim, dim], [dim, ffn_dim]];
        let matrices: Vec<Matrix> =
            shapes.iter().map(|&[n, k]| matrix(&self.device, ROWS_WEIGHT, n, k)).collect::<Result<_, Error>>()?;
        for (m, few_us, many_us) in ROWS_CASES {
            let classes =
                [("few", BatchInvariance::Few { columns: m.min(8) }, few_us), ("many", BatchInvariance::Many, many_us)];
            for (name, class, predicted_us) in classes {
                let mut rec = self.device.recorder().with_batch_invariance(class);
                let mut work = [0, 0];
                for w in &matrices {
                    let x = input(&self.device, &[m, w.cols()])?;
                    let y = Tensor::declare("y", Role::Activations, &[m, w.rows()], DType::F32)?;
                    Linear::new(w).record(&mut rec, &x, &y)?;
                    let [bytes, flop] = product_work(w, &x, &y);
                    work = [work[0] + bytes, work[1] + flop];
                }
                let (case, is_base) = (format!("{m} rows, {name}"), (m, name) == (ROWS_CASES[0].0, "few"));
                let about = About { part: Part::Rows, case, is_base, predicted_us, work };
                self.case(about, rec, None, 1).await?;
            }
        }
        Ok(())
    }

    async fn chain(&mut self) -> Result<(), Error> {
        let quad = || Tensor::declare("quad", Role::Activations, &[4], DType::U32);
        let (a, b) = (quad()?, quad()?);
        for (dependent, predicted_us) in [true, false].into_iter().zip(CHAIN_US) {
            let mut rec = self.device.recorder();
            for i in 0..self.sizes.n_chained {
                match (dependent, i % 2) {
                    (true, 0) => probe_copy(&mut rec, &a, &b)?,
                    (true, _) => probe_copy(&mut rec, &b, &a)?,
                    (false, _) => probe_copy(&mut rec, &a, &quad()?)?,
                }
            }
            let case = if dependent { "each reads what the one before wrote" } else { "independent" };
            let work = [a.size_bytes() + b.size_bytes(), 0];
            let about = About { part: Part::Chain, case: case.into(), is_base: dependent, predicted_us, work };
            self.case(about, rec, None, self.sizes.n_chained as usize).await?;
        }
        Ok(())
    }

    async fn attention(&mut self) -> Result<(), Error> {
        const MAX_COPIES: u64 = 64;
        let rotation = RopeConfig::new(HEAD_DIM, 1e4, RopeStyle::Interleaved);
        let config = AttentionConfig {
            n_heads: N_HEADS,
            n_kv_heads: N_KV_HEADS,
            head_dim: HEAD_DIM,
            window: None,
            scale: 0.088_388,
            soft_cap: None,
            values_from: None,
            causal: true,
            whole_pass: false,
        };
        for (depth, predicted_us) in ATTENTION_CASES {
            let n_cached = depth / self.sizes.shorter;
            let capacity = n_cached + 1;
            let table = rope_table(&rotation, capacity);
            let angles = self.device.upload("table", &[capacity, HEAD_DIM / 2, 2], &table)?;
            let heads = Heads {
                n_heads: N_HEADS,
                n_kv_heads: N_KV_HEADS,
                head_dim: HEAD_DIM,
                keys_hold_values: false,
                first_column: 0,
                rope: Some((&rotation, &angles)),
                norm: None,
            };
            let state = StepState::declare()?;
            state.set(&self.device, n_cached, 1)?;
            let kind = KvType::default();
            let cache_bytes = 8 * u64::from(N_KV_HEADS * capacity * kind.row_words(HEAD_DIM));
            let n_copies = (self.sizes.cold_bytes / 4 / cache_bytes).clamp(1, MAX_COPIES);
            let mut rec = self.device.recorder();
            for _ in 0..n_copies {
                let cached = keys(&self.device, kind, [N_KV_HEADS, capacity, HEAD_DIM])?;
                let qkv = input(&self.device, &[1, (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM])?;
                let y = Tensor::declare("y", Role::Activations, &[1, N_HEADS * HEAD_DIM], DType::F32)?;
                attention_next(&mut rec, &state, &config, &heads, None, &qkv, &cached, &y)?;
            }
            let flop = 4 * u64::from(N_HEADS * HEAD_DIM) * u64::from(capacity);
            let (case, is_base) = (format!("{n_cached} cached"), depth == ATTENTION_CASES[0].0);
            let about = About { part: Part::Attention, case, is_base, predicted_us, work: [cache_bytes, flop] };
            self.case(about, rec, None, n_copies as usize).await?;
        }
        Ok(())
    }

    /// Measures a case that was recorded `n_copies` times: all dispatches, or only those of a kernel and its
    /// ablations.
    async fn case(
        &mut self,
        about: About,
        rec: Recorder,
        only: Option<&'static Kernel>,
        n_copies: usize,
    ) -> Result<(), Error> {
        let About { part, case, is_base, predicted_us, work: [bytes, flop] } = about;
        if Instant::now() >= self.end {
            self.found.left_out.push(LeftOut { part, case: Some(case), reason: "no time was left".into() });
            return Ok(());
        }
        let recording = rec.finish(&mut Workspace::default());
        let is_counted: Vec<bool> =
            recording.dispatches().map(|d| only.is_none_or(|kernel| d.kernel().name == kernel.name)).collect();
        // What lies between the dispatches of a chain is its point.
        let by_device = part != Part::Chain && self.device.clock() == Clock::Gpu;
        let seconds = if by_device {
            self.by_timestamps(&recording, &is_counted).await?
        } else {
            let effort = Effort { samples: 3, sample_seconds: self.sizes.case_seconds / 3.0 };
            seconds(&self.device, &recording, effort).await?
        } / n_copies as f64;
        let predicted_seconds = predicted_us * 1e-6;
        if is_base {
            self.base = [seconds, predicted_seconds];
        }
        let measured = recording.labels().zip(&is_counted).find(|(_, is_counted)| **is_counted);
        self.found.rows.push(AblationRow {
            part,
            case,
            kernel: measured.map_or("", |(label, _)| label),
            n_dispatches: is_counted.iter().filter(|&&is_counted| is_counted).count() / n_copies,
            seconds,
            bytes,
            flop,
            bytes_per_second: bytes as f64 / seconds,
            flop_per_second: flop as f64 / seconds,
            of_as_is: seconds / self.base[0],
            predicted_of_as_is: predicted_seconds / self.base[1],
            predicted_seconds,
            clock: if by_device { "device" } else { "host" },
        });
        Ok(())
    }

    /// Seconds of the dispatches that count, by the device's clock: the median of several runs.
    async fn by_timestamps(&self, recording: &Recording, is_counted: &[bool]) -> Result<f64, Error> {
        const RUNS: std::ops::Range<usize> = 3..40;
        // Compiles, allocates, and wakes the device up.
        self.device.run_profiled(recording).await?;
        let end = Instant::now() + Duration::from_secs_f64(self.sizes.case_seconds);
        let mut times = Vec::new();
        while times.len() < RUNS.start || times.len() < RUNS.end && Instant::now() < end {
            let all = self.device.run_profiled(recording).await?;
            let counted = all.iter().zip(is_counted).filter(|(_, is_counted)| **is_counted);
            times.push(counted.map(|((_, time), _)| time.as_secs_f64()).sum());
        }
        Ok(Spread::of(times).median)
    }
}

fn bytes(w: &Matrix) -> u64 {
    w.tensors().map(Tensor::size_bytes).sum()
}

/// Bytes and operations of a product.
fn product_work(w: &Matrix, x: &Tensor, y: &Tensor) -> [u64; 2] {
    let flop = 2 * u64::from(w.rows()) * u64::from(w.cols()) * u64::from(x.shape()[0]);
    [bytes(w) + x.size_bytes() + y.size_bytes(), flop]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_follow_one_as_is_and_have_predictions() {
        for cases in [&MATVEC_CASES[..], &MATMUL_CASES] {
            let mut base: Option<&Case> = None;
            for case in cases {
                base = if case.name == AS_IS { Some(case) } else { base };
                assert_eq!(base.map(|base| base.weight), Some(case.weight), "{}", case.name);
                assert!(case.predicted_us > 0.0);
                let has = |ablation: &Ablation| ablation.variants.iter().any(|v| v.weight == Some(case.weight));
                assert!(case.ablation.is_none_or(has), "{} of {}", case.name, case.weight);
            }
        }
    }
}
