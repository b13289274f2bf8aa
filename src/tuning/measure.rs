//! The tuner: measures the device's alternatives for the matrix products of a model's passes, and chooses those that
//! are clearly faster than the defaults.

use std::time::Duration;

use web_time::Instant;

use super::operands::{input, matrix};
use super::{compare, record_tested};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::Error;
use crate::kernels::{
    Gate, Linear, Norm, folds_norm, gate_up, is_sound, is_tiled, matmul, matvec, product_kernel, usual,
};
use crate::load::ModelFile;
use crate::matrix::Matrix;
use crate::model::Weights;
use crate::platform::{IS_BROWSER, unless_browser};
use crate::recording::{Recording, Workspace};
use crate::shaders::{Id, Kernel, Tier};
use crate::target::{Bucket, Choice, TileForm, Tuning};
use crate::tensor::{Role, Tensor};

/// Maximum time per bucket, including uploads and compilations.
const BUDGET: Duration = Duration::from_secs(2);

/// The same of all products together when a model is loaded; a page has less.
const BUDGET_OF_LOAD: Duration = Duration::from_secs(if IS_BROWSER { 2 } else { 3 });

/// Interleaved rounds of all candidates; the median counts.
const ROUNDS: std::ops::Range<usize> = 5..16;

/// Share of the time that a candidate must save to be preferred to a simpler one.
const GAIN: f64 = 0.05;

/// Total bytes of a matrix's copies, read in turn so that caches help no more than in a model. A page has less time
/// to create them.
const COLD_BYTES: u64 = if IS_BROWSER { 8 << 20 } else { 32 << 20 };
const MAX_COPIES: u64 = 16;
/// Rows beyond these bytes of a matrix are left out: the measurement is long enough.
const MAX_BYTES: u64 = 2 * COLD_BYTES;

/// A choice and the time of a product with it.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Timed {
    /// Name of the variant's tier.
    pub tier: &'static str,
    /// [`Choice::size`].
    pub size: u32,
    /// [`Choice::form`].
    pub form: TileForm,
    /// Median seconds.
    pub seconds: f64,
}

/// Measurements of one bucket.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TunedRow {
    /// Kernel.
    pub kernel: &'static str,
    /// Weight type.
    pub weight: &'static str,
    /// Rows of the bucket.
    pub rows: u32,
    /// Blocks in a row of the bucket.
    pub blocks: u32,
    /// Tokens of the bucket.
    pub tokens: u32,
    /// The default choice.
    pub usual: Timed,
    /// The tuned choice: the default unless another is clearly faster.
    pub best: Timed,
    /// Measured candidates, including the default.
    pub n_measured: usize,
    /// All candidates; the rest did not fit the time budget.
    pub n_candidates: usize,
}

/// Measures the products of a model's passes over one token and over a full prefill chunk, by the device's clock if
/// it has one, else by the host's. Returns the device's tuning with the choices that pay off, and a row per bucket.
/// Ignores candidates that fail the self-test or whose results differ from the default's.
///
/// # Errors
/// [`Error::Option`] for the CPU, which has no alternatives; [`Error::Config`] if the model lacks a weight; errors
/// of [`Device::run`].
pub async fn tune(device: &Device, model: &ModelFile) -> Result<(Tuning, Vec<TunedRow>), Error> {
    if !device.is_gpu() {
        return Err(Error::Option {
            option: "device",
            expected: "a GPU: the CPU has no variants to choose from".into(),
            found: "cpu".into(),
        });
    }
    let device = &device.for_model(false);
    let weights = Weights::declare(&device.target(), model.header.shape.decoder()?, &model.header.tensor_index)?;
    let products = products(device, &weights);
    let mut tuning = device.tuning().clone();
    tuning.set_operations_rate(None);
    let (mut measured, rows) = measure_each(device, &products, tuning, |_| Some(BUDGET)).await?;
    measured.set_operations_rate(measured.operations_rate().or(device.tuning().operations_rate()));
    Ok((measured, rows))
}

/// Measures products on a device that is configured for their model, and adds the choices that pay off to its tuning.
/// Begins nothing after the time for a load, which the products share in their order; the usual choice then counts as
/// measured. But compiles and runs the first product's default variant in any case, which takes longer on slow
/// adapters.
///
/// # Errors
/// Errors of [`Device::run`].
pub(crate) async fn tune_load(
    device: &Device,
    products: &[MeasuredProduct<'_>],
) -> Result<(Tuning, Vec<TunedRow>), Error> {
    let start = Instant::now();
    let budget = |n_left| {
        let left = BUDGET_OF_LOAD.saturating_sub(start.elapsed());
        (!left.is_zero()).then(|| left / n_left)
    };
    measure_each(device, products, device.tuning().clone(), budget).await
}

/// The products of a model's passes on a device that is configured for it, one for each bucket, those first that take
/// most of the time.
pub(crate) fn products<'a>(device: &Device, weights: &'a Weights) -> Vec<MeasuredProduct<'a>> {
    /// A conversation has that many tokens of answers for each pass over its prompts, divided by how much longer such a
    /// pass takes than one over a token: 16 times on an H100, 300 times on the weakest GPUs.
    const PASSES_OF_ONE: u64 = 4;
    let target = device.target();
    let n_tokens = target.usual_max_pass();
    let of_prompts = weights
        .layer_products()
        .into_iter()
        .map(|(_, w)| (&product_kernel(&target, &Linear::new(w)).kernel, w, n_tokens));
    let mut products: Vec<MeasuredProduct> = Vec::new();
    for (kernel, w, n_tokens) in weights.products().into_iter().map(|(kernel, w)| (kernel, w, 1)).chain(of_prompts) {
        let bucket = Bucket::of(kernel, w.weight(), [w.rows(), w.blocks(), n_tokens]);
        let size_bytes: u64 = w.tensors().map(Tensor::size_bytes).sum();
        let cost = size_bytes * if n_tokens == 1 { PASSES_OF_ONE } else { 1 };
        match products.iter_mut().find(|known| known.bucket == bucket) {
            Some(known) => known.cost += cost,
            None => products.push(MeasuredProduct { kernel, w, n_tokens, bucket, cost }),
        }
    }
    crate::sort::by_key(&mut products, |product| std::cmp::Reverse(product.cost));
    products
}

/// Measures products and adds to `tuning`; `budget` is the time for the next one, by how many are left.
async fn measure_each(
    device: &Device,
    products: &[MeasuredProduct<'_>],
    mut tuning: Tuning,
    budget: impl Fn(u32) -> Option<Duration>,
) -> Result<(Tuning, Vec<TunedRow>), Error> {
    let mut rows = Vec::new();
    for (i, product) in products.iter().enumerate() {
        let Some(budget) = budget((products.len() - i) as u32) else {
            tuning.choose(product.bucket, None);
            continue;
        };
        let (row, best, rate) = measure(device, product, budget).await?;
        tuning.choose(product.bucket, best);
        if product.n_tokens > 1 {
            tuning.set_operations_rate(Some(tuning.operations_rate().map_or(rate, |slowest| slowest.min(rate))));
        }
        rows.push(row);
        device.free_unused();
    }
    Ok((tuning, rows))
}

/// A product that represents its bucket.
pub(crate) struct MeasuredProduct<'a> {
    kernel: &'static Kernel,
    w: &'a Matrix,
    n_tokens: u32,
    pub bucket: Bucket,
    /// Bytes of the bucket's weights, more for one token than for prompts.
    cost: u64,
}

/// An alternative for a product.
struct TuningCandidate {
    choice: Choice,
    device: Device,
    recording: Recording,
    result: (DType, Vec<u32>),
    times: Vec<f64>,
}

impl TuningCandidate {
    async fn new(
        untuned: &Device,
        choice: Choice,
        &MeasuredProduct { kernel, n_tokens, .. }: &MeasuredProduct<'_>,
        copies: &[Matrix],
    ) -> Result<TuningCandidate, Error> {
        let mut tuning = untuned.tuning().clone();
        tuning.choose(
            Bucket::of(kernel, copies[0].weight(), [copies[0].rows(), copies[0].blocks(), n_tokens]),
            Some(choice),
        );
        let device = untuned.with_tuning(tuning);
        let recorded = || record(&device, kernel, n_tokens, copies);
        let (recording, y) = record_tested(&device, recorded, |(recording, _)| recording).await?;
        device.run(&recording)?;
        let result = (y.dtype(), device.read(&y).await?);
        Ok(TuningCandidate { choice, device, recording, result, times: Vec::new() })
    }

    /// The median, the upper of two.
    fn median(&mut self) -> f64 {
        crate::sort::by(&mut self.times, f64::total_cmp);
        self.times[self.times.len() / 2]
    }

    /// Seconds of a run, by the device's clock if it has one. Browsers round theirs to 0.1 ms.
    async fn run(&self) -> Result<f64, Error> {
        match unless_browser(|| self.device.run_profiled(&self.recording), || Ok(Vec::new())).await {
            Ok(times) if !times.is_empty() => Ok(times.iter().map(|(_, time)| time.as_secs_f64()).sum()),
            Ok(_) | Err(Error::Limit { .. }) => self.run_by_wall_clock().await,
            Err(error) => Err(error),
        }
    }

    /// Seconds per run of several in a row, to reduce the share of waiting.
    async fn run_by_wall_clock(&self) -> Result<f64, Error> {
        const RUNS: u32 = 4;
        let start = Instant::now();
        for _ in 0..RUNS {
            self.device.run(&self.recording)?;
        }
        self.device.drained().await?;
        Ok(start.elapsed().as_secs_f64() / f64::from(RUNS))
    }
}

/// Measures one bucket by a product; returns the choice that replaces the default, if any, and the operations per
/// second of the best choice.
async fn measure(
    device: &Device,
    product: &MeasuredProduct<'_>,
    budget: Duration,
) -> Result<(TunedRow, Option<Choice>, u64), Error> {
    let &MeasuredProduct { w, bucket, .. } = product;
    let start = Instant::now();
    let size_bytes: u64 = w.tensors().map(Tensor::size_bytes).sum();
    // Whole heads, and equally many gate and up rows.
    let rows = (u64::from(w.rows()) * MAX_BYTES / size_bytes.max(MAX_BYTES)) as u32;
    let rows = if rows < w.rows() { rows / 128 * 128 } else { rows };
    let n_copies = (COLD_BYTES / size_bytes).clamp(1, MAX_COPIES);
    let mut copies = Vec::new();
    for _ in 0..n_copies {
        copies.push(matrix(device, w.weight(), rows.max(1), w.cols())?);
    }
    let untuned = device.with_tuning(Tuning::default());
    let choices = candidates(&untuned, product);

    let mut measured: Vec<TuningCandidate> = Vec::new();
    // Time to prepare the slowest candidate, and to run each once.
    let (mut longest, mut round) = (Duration::ZERO, Duration::ZERO);
    for &choice in &choices {
        // Leave time to finish the candidates begun.
        if !measured.is_empty() && start.elapsed() + longest + round * ROUNDS.start as u32 >= budget {
            break;
        }
        let begin = Instant::now();
        let mut candidate = match TuningCandidate::new(&untuned, choice, product, &copies).await {
            Ok(candidate) => candidate,
            // A compiler may refuse a variant, but not the default.
            Err(error) if measured.is_empty() || matches!(error, Error::DeviceLost { .. }) => return Err(error),
            Err(_) => continue,
        };
        longest = longest.max(begin.elapsed());
        if measured.iter().take(1).all(|usual| compare(&candidate.result, &usual.result).is_ok()) {
            let warm = Instant::now();
            let seconds = candidate.run().await? / n_copies as f64;
            candidate.times.push(seconds);
            round += warm.elapsed();
            measured.push(candidate);
        }
    }
    // A single candidate wins in any case. Others are compared by later runs than their first.
    if measured.len() > 1 {
        measured.iter_mut().for_each(|candidate| candidate.times.clear());
        for i in 0..ROUNDS.end {
            if i >= ROUNDS.start && start.elapsed() >= budget {
                break;
            }
            for candidate in &mut measured {
                let seconds = candidate.run().await? / n_copies as f64;
                candidate.times.push(seconds);
            }
        }
    }
    let medians: Vec<f64> = measured.iter_mut().map(TuningCandidate::median).collect();
    // Simpler choices come first, so each must clearly beat the best before it.
    let best = (1..medians.len()).fold(0, |best, i| if medians[i] < (1.0 - GAIN) * medians[best] { i } else { best });
    let timed = |i: usize| {
        let Choice { tier, size, form } = measured[i].choice;
        Timed { tier: tier.name(), size, form, seconds: medians[i] }
    };
    let row = TunedRow {
        kernel: bucket.kernel,
        weight: bucket.weight.name(),
        rows: bucket.rows,
        blocks: bucket.blocks,
        tokens: bucket.tokens,
        usual: timed(0),
        best: timed(best),
        n_measured: measured.len(),
        n_candidates: choices.len(),
    };
    let n_operations = 2.0 * f64::from(product.n_tokens) * f64::from(rows) * f64::from(w.cols());
    // If the clock did not advance, the rate saturates.
    let rate = (n_operations / medians[best]) as u64;
    Ok((row, (best > 0).then(|| measured[best].choice), rate))
}

/// The default choice, then the device's others by complexity: without barriers, with barriers, with subgroups. Half
/// precision is included only if the default has it, because it changes results.
fn candidates(device: &Device, &MeasuredProduct { kernel, w, n_tokens, .. }: &MeasuredProduct<'_>) -> Vec<Choice> {
    let target = device.target();
    let usual = usual(&target, kernel, w, n_tokens);
    let sizes: Vec<u32> = if is_tiled(kernel) {
        // Sizes of rows; `is_sound` decides which of them a tier has.
        vec![16, 32, 64, 128, 256]
    } else {
        (0..=6).map(|log| 1 << log).filter(|&lanes| lanes <= w.blocks().next_power_of_two()).collect()
    };
    let shared = |tier| sizes.iter().map(move |&size| Choice::new(tier, size));
    let formed = |choice| TileForm::ALL.map(|form| Choice { form, ..choice });
    let all = [Choice::new(Tier::Scalar, 1)]
        .into_iter()
        .chain(shared(Tier::Baseline))
        .chain(shared(Tier::Subgroups))
        .chain(shared(usual.tier).filter(|_| usual.tier.rounds_to_half()).flat_map(formed))
        .filter(|choice| *choice != usual && is_sound(&target, kernel, w, *choice));
    std::iter::once(usual).chain(all).collect()
}

/// Records the product of `n_tokens` tokens with each matrix, as in a pass; returns the last output.
fn record(
    device: &Device,
    kernel: &'static Kernel,
    n_tokens: u32,
    copies: &[Matrix],
) -> Result<(Recording, Tensor), Error> {
    let mut rec = device.recorder();
    let (rows, cols) = (copies[0].rows(), copies[0].cols());
    let (x, vector) = (input(device, &[n_tokens, cols])?, input(device, &[cols])?);
    let norm = folds_norm(&rec, &x, false).then_some(Norm { weight: &vector, eps: 1e-5 });
    let width = if kernel.id == Id::GateUp { rows / 2 } else { rows };
    let y = Tensor::declare("y", Role::Activations, &[n_tokens, width], DType::F32)?;
    for w in copies {
        match kernel.id {
            Id::GateUp => gate_up(&mut rec, w, norm, Gate::Silu, &x, &y)?,
            Id::Matmul | Id::MatmulHalf => matmul(&mut rec, &Linear::new(w), &x, &y)?,
            _ => matvec(&mut rec, &Linear::new(w), &x, &y)?,
        }
    }
    Ok((rec.finish(&mut Workspace::default()), y))
}
