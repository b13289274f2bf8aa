//! Benchmarks of mixtures of logits: the roofline, and the shapes that fit limits of time and memory.

use super::{Effort, Limits, Probes, seconds};
use crate::device::Device;
use crate::dtype::WeightType;
use crate::error::Error;
use crate::kernels::microbench::{mol_gate, weighted_sum};
use crate::kernels::{
    self, Combination, Linear, MolActivation, MolForm, MolGate, MolGateWeights, MolOperands, MolScores, Pairing,
};
use crate::matrix::{Matrix, file_row_bytes};
use crate::recording::{Recording, Workspace};
use crate::target::{Bucket, Choice};
use crate::tensor::Tensor;
use crate::tuning::operands::{input, matrix, uniform};

/// A mixture of crossed pairs with the gate `z * sigmoid(z)`, and its use. Ding & Zhai 2024, arXiv:2407.15462.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct MolShape {
    /// N: components of a query.
    pub query_components: u32,
    /// M: components of an item.
    pub item_components: u32,
    /// D: dimensions of a component, a multiple of 4.
    pub dim: u32,
    /// H: width of the gate's hidden layer.
    pub hidden: u32,
    /// Storage type of items' components: F32, F16 or Q8_0. Gates are F32.
    pub storage: WeightType,
    /// B: queries per batch.
    pub n_queries: u32,
}

/// Minimum work of a pass over items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct MolWork {
    /// Bytes of all operands, each once.
    pub bytes: u64,
    /// Multiplications and additions of the components' products.
    pub dot_flop: u64,
    /// Multiplications and additions of the gate's layers.
    pub gate_flop: u64,
}

impl MolShape {
    /// Components, pairs and gate.
    pub fn form(&self) -> MolForm {
        MolForm {
            query_components: self.query_components,
            item_components: self.item_components,
            hidden: self.hidden,
            pairing: Pairing::Cross,
            combination: Combination::GluSilu,
            activation: MolActivation::Silu,
        }
    }

    /// Refuses shapes that the kernel does not support.
    ///
    /// # Errors
    /// [`Error::Option`] for a number out of range or an unsupported storage type.
    pub fn check(&self) -> Result<(), Error> {
        let refuse =
            |option, expected: &str, found: String| Err(Error::Option { option, expected: expected.into(), found });
        if self.form().check().is_err() {
            let found = format!("{} x {}", self.query_components, self.item_components);
            return refuse("components", "two numbers whose product, both rounded up to fours, is at most 64", found);
        }
        if self.dim == 0 || !self.dim.is_multiple_of(4) || self.dim > 1 << 12 {
            return refuse("dim", "a multiple of 4 up to 4096", self.dim.to_string());
        }
        if !(1..=32).contains(&self.n_queries) {
            return refuse("n_queries", "1 to 32", self.n_queries.to_string());
        }
        if !matches!(self.storage, WeightType::F32 | WeightType::F16 | WeightType::Q8_0) {
            return refuse("storage", "F32, F16 or Q8_0", self.storage.to_string());
        }
        Ok(())
    }

    /// Bytes of an item: components and gate.
    pub fn item_bytes(&self) -> u64 {
        self.form().item_bytes(self.storage, self.dim)
    }

    /// Minimum work to score `n_items` items.
    pub fn work(&self, n_items: u64) -> MolWork {
        let form = self.form();
        let scores = n_items * u64::from(self.n_queries);
        let dots = form.dot_operations(self.dim);
        MolWork {
            bytes: n_items * self.item_bytes() + 4 * scores,
            dot_flop: scores * dots,
            gate_flop: scores * (form.operations(self.dim) - dots),
        }
    }
}

impl std::fmt::Display for MolShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MolShape { query_components, item_components, dim, hidden, storage, n_queries } = self;
        write!(f, "{query_components} x {item_components} x {dim}, gate {hidden}, {storage}, batch {n_queries}")
    }
}

impl MolWork {
    /// Total operations.
    pub fn flop(&self) -> u64 {
        self.dot_flop + self.gate_flop
    }

    /// Minimum seconds by the probes' rates.
    pub fn least_seconds(&self, probes: &Probes) -> f64 {
        probes.least_seconds(self.bytes as f64, self.flop() as f64)
    }
}

/// A way to score items, or a part of it.
#[derive(Clone, Debug, serde::Serialize)]
pub struct MolRow {
    /// `mixture`, `chain`, `highest logit` or `dot product`.
    pub operation: &'static str,
    /// Kernels run.
    pub n_dispatches: usize,
    /// Minimum bytes; for the chain, the bytes that its kernels read and write.
    pub bytes: u64,
    /// Multiplications and additions.
    pub flop: u64,
    /// Measured seconds.
    pub seconds: f64,
    /// Minimum seconds by the probes' rates: the longer of bytes and operations.
    pub least_seconds: f64,
}

impl MolRow {
    /// Operations per byte.
    pub fn intensity(&self) -> f64 {
        self.flop as f64 / self.bytes as f64
    }

    /// The minimum time divided by the measured one.
    pub fn share(&self) -> f64 {
        self.least_seconds / self.seconds
    }
}

/// Operands of a mixture, filled with normal floats.
struct Corpus {
    shape: MolShape,
    n_items: u32,
    items: Matrix,
    queries: Tensor,
    /// A and B: `[B, P]` and `[I, P]`.
    gates: [Vec<f32>; 2],
    gate: MolGate,
    /// `[H, P]`, `[H]`, `[P, H]`, `[P]`.
    weights: [Vec<f32>; 4],
}

impl Corpus {
    fn new(device: &Device, shape: MolShape, n_items: u32) -> Result<Corpus, Error> {
        shape.check()?;
        let MolShape { query_components: n, item_components: m, dim, hidden, storage, n_queries } = shape;
        let form = shape.form();
        let pairs = form.n_pairs();
        let numbers = |n: u32| uniform(n as usize);
        // Scaled so that sums are as large as their terms: with weights of size one, gates would differ so much that
        // exponentials are subnormal, which is slow on CPUs.
        let layer = |n: u32, n_terms: u32| -> Vec<f32> {
            numbers(n).into_iter().map(|x| x * (3.0 / n_terms as f32).sqrt()).collect()
        };
        let weights = [layer(hidden * pairs, pairs), numbers(hidden), layer(pairs * hidden, hidden), numbers(pairs)];
        let [w1, b1, w2, b2] = &weights;
        let gate = MolGate::new(device, form, &MolGateWeights { w1, b1, w2, b2 })?;
        Ok(Corpus {
            shape,
            n_items,
            items: matrix(device, storage, m * n_items, dim)?,
            queries: device.upload("queries", &[n_queries, n * dim], &layer(n_queries * n * dim, dim))?,
            gates: [numbers(n_queries * pairs), numbers(n_items * pairs)],
            gate,
            weights,
        })
    }

    fn mixture(&self, device: &Device, what: MolScores<'_>) -> Result<Recording, Error> {
        let mut rec = device.recorder();
        let form = self.gate.form();
        let rows = |values: &[f32], n| device.upload("gates", &[n, form.gate_columns()], &form.gate_rows(values));
        let (query_gates, item_gates) =
            (rows(&self.gates[0], self.shape.n_queries)?, rows(&self.gates[1], self.n_items)?);
        let operands = MolOperands {
            items: &self.items,
            item_gates: &item_gates,
            queries: &self.queries,
            query_gates: &query_gates,
        };
        let scores = rec.temporary("scores", &[self.shape.n_queries, self.n_items])?;
        kernels::mol(&mut rec, &self.gate, &operands, what, &scores)?;
        Ok(rec.finish(&mut Workspace::default()))
    }

    /// The same scores by separate kernels, as in a framework: logits, transposition, two layers with SiLU between
    /// them, gates, softmax, weighted sum.
    fn chain(&self, device: &Device) -> Result<(Recording, u64), Error> {
        let MolShape { query_components: n, dim, hidden, n_queries, .. } = self.shape;
        let (n_items, pairs) = (self.n_items, self.shape.form().n_pairs());
        let rows = n_items * n_queries;
        let [w1, b1, w2, b2] = &self.weights;
        let w1 = device.upload_matrix("w1", [hidden, pairs], w1)?;
        let w2 = device.upload_matrix("w2", [pairs, hidden], w2)?;
        let (b1, b2) = (device.upload("b1", &[hidden], b1)?, device.upload("b2", &[pairs], b2)?);
        let a = device.upload("a", &[n_queries, pairs], &self.gates[0])?;
        let b = device.upload("b", &[n_items, pairs], &self.gates[1])?;
        let mut rec = device.recorder();
        let blank = |shape: &[u32]| rec.temporary("y", shape);
        let logits = blank(&[n_queries * n, self.items.rows()])?;
        let by_item = blank(&[n_items, n_queries * pairs, 1])?;
        let [z, hidden] = [blank(&[rows, hidden])?, blank(&[rows, hidden])?];
        let [c, gates, pi] = [blank(&[rows, pairs])?, blank(&[rows, pairs])?, blank(&[rows, pairs])?];
        let scores = blank(&[rows])?;

        Linear::new(&self.items).record(&mut rec, &self.queries.reshape(&[n_queries * n, dim])?, &logits)?;
        kernels::by_head(&mut rec, &logits.reshape(&[n_queries * pairs, n_items])?, &by_item)?;
        let l = by_item.reshape(&[rows, pairs])?;
        Linear { bias: Some(&b1), ..Linear::new(&w1) }.record(&mut rec, &l, &z)?;
        kernels::silu(&mut rec, &z, &hidden)?;
        Linear { bias: Some(&b2), ..Linear::new(&w2) }.record(&mut rec, &hidden, &c)?;
        let cube = [n_items, n_queries, pairs];
        let parts = [&a, &b, &c.reshape(&cube)?];
        mol_gate(&mut rec, Combination::GluSilu, parts, &gates.reshape(&cube)?)?;
        kernels::softmax(&mut rec, &gates, &pi)?;
        weighted_sum(&mut rec, &pi, &l, &scores)?;
        let recording = rec.finish(&mut Workspace::default());
        let bytes = recording.operand_bytes();
        Ok((recording, bytes))
    }

    /// A dot-product scan that reads as many bytes per item.
    fn dot_product(&self, device: &Device) -> Result<(Recording, MolWork), Error> {
        let MolShape { storage, n_queries, .. } = self.shape;
        let bytes = self.shape.item_bytes();
        // Whole blocks of 32 numbers.
        let block = file_row_bytes(storage, 32) as u64;
        let dim = 32 * bytes.div_ceil(block) as u32;
        let items = matrix(device, storage, self.n_items, dim)?;
        let mut rec = device.recorder();
        let x = input(device, &[n_queries, dim])?;
        let y = rec.temporary("y", &[n_queries, self.n_items])?;
        Linear::new(&items).record(&mut rec, &x, &y)?;
        let (n_items, n_scores) = (u64::from(self.n_items), u64::from(self.n_items * n_queries));
        let bytes = n_items * file_row_bytes(storage, dim as usize) as u64 + 4 * n_scores;
        let work = MolWork { bytes, dot_flop: 2 * u64::from(dim) * n_scores, gate_flop: 0 };
        Ok((rec.finish(&mut Workspace::default()), work))
    }
}

/// Measures a mixture in one kernel, as a chain of kernels, its highest logit only, and a dot-product scan with as
/// many bytes per item, interleaved.
///
/// # Errors
/// Errors of [`MolShape::check`] and of [`Device::run`].
pub async fn measure(device: &Device, shape: MolShape, n_items: u32, probes: &Probes) -> Result<Vec<MolRow>, Error> {
    const ROUNDS: usize = 5;
    let corpus = Corpus::new(device, shape, n_items)?;
    let work = shape.work(n_items.into());
    let bound = MolWork { gate_flop: 0, ..work };
    let (chain, chain_bytes) = corpus.chain(device)?;
    let (dots, of_dots) = corpus.dot_product(device)?;
    let runs = [
        ("mixture", corpus.mixture(device, MolScores::All)?, work),
        ("chain", chain, MolWork { bytes: chain_bytes, ..work }),
        ("highest logit", corpus.mixture(device, MolScores::Bounds)?, bound),
        ("dot product", dots, of_dots),
    ];
    // Interleaved, so that other load on the machine affects all alike.
    let mut times = runs.each_ref().map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for ((_, recording, _), times) in runs.iter().zip(&mut times) {
            times.push(seconds(device, recording, Effort::USUAL).await?);
        }
    }
    let row = |((operation, recording, work), times): ((&'static str, Recording, MolWork), Vec<f64>)| MolRow {
        operation,
        n_dispatches: recording.n_dispatches(),
        bytes: work.bytes,
        flop: work.flop(),
        seconds: super::Spread::of(times).median,
        least_seconds: work.least_seconds(probes),
    };
    Ok(runs.into_iter().zip(times).map(row).collect())
}

/// Rates that predict a mixture's time: the kernel's rates at one shape.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct MolRates {
    /// Operations per second of the components' products.
    pub dot_flop_per_second: f64,
    /// Operations per second of the gate's layers.
    pub gate_flop_per_second: f64,
    /// Bytes per second of the copy probe.
    pub bytes_per_second: f64,
}

impl MolRates {
    /// The rates at a shape from the rows of [`measure`].
    pub fn new(shape: &MolShape, n_items: u32, rows: &[MolRow], probes: &Probes) -> MolRates {
        let work = shape.work(n_items.into());
        let seconds =
            |operation| rows.iter().find(|row| row.operation == operation).map_or(f64::NAN, |row| row.seconds);
        let (all, dots) = (seconds("mixture"), seconds("highest logit"));
        MolRates {
            dot_flop_per_second: work.dot_flop as f64 / dots,
            // The gate takes some time, even if below the clock's resolution.
            gate_flop_per_second: work.gate_flop as f64 / (all - dots).max(0.01 * all),
            bytes_per_second: probes.copy_bytes_per_second,
        }
    }

    /// Predicted seconds for this work.
    pub fn seconds(&self, work: &MolWork) -> f64 {
        let flop = work.dot_flop as f64 / self.dot_flop_per_second + work.gate_flop as f64 / self.gate_flop_per_second;
        flop.max(work.bytes as f64 / self.bytes_per_second)
    }
}

/// A shape and its costs for all items.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct MolPlan {
    /// The shape.
    pub shape: MolShape,
    /// Bytes of all items' components and gates.
    pub items_bytes: u64,
    /// Minimum seconds by the probes' rates: no kernel is faster on this device.
    pub least_seconds: f64,
    /// Predicted by [`MolRates`].
    pub predicted_seconds: f64,
    /// Measured on a strip of items, times the number of strips.
    pub measured_seconds: Option<f64>,
    /// The fastest measured number of queries per invocation; `None` on the CPU.
    pub tile: Option<u32>,
}

impl MolPlan {
    /// Whether the plan is within the limits, by the measured time if there is one.
    pub fn fits(&self, limits: &Limits) -> bool {
        let seconds = self.measured_seconds.unwrap_or(self.predicted_seconds);
        limits.seconds.is_none_or(|limit| seconds <= limit)
            && limits.bytes.is_none_or(|limit| self.items_bytes <= limit)
    }
}

/// Plans for the shapes in `grid` with `n_items` items: more operations (more expressive) first, then faster ones.
pub fn predict(grid: &[MolShape], n_items: u64, rates: &MolRates, probes: &Probes) -> Vec<MolPlan> {
    let plan = |&shape: &MolShape| {
        let work = shape.work(n_items);
        MolPlan {
            shape,
            items_bytes: n_items * shape.item_bytes(),
            least_seconds: work.least_seconds(probes),
            predicted_seconds: rates.seconds(&work),
            measured_seconds: None,
            tile: None,
        }
    };
    let mut plans: Vec<MolPlan> = grid.iter().map(plan).collect();
    let capacity = |plan: &MolPlan| plan.shape.form().operations(plan.shape.dim);
    plans.sort_by(|a, b| {
        let faster = a.predicted_seconds.total_cmp(&b.predicted_seconds);
        capacity(b).cmp(&capacity(a)).then(a.items_bytes.cmp(&b.items_bytes)).then(faster)
    });
    plans
}

/// Measures a plan's shape on a strip of items, with each possible number of queries per invocation. Returns the
/// device with the fastest number in its tuning, if not the default.
///
/// # Errors
/// Errors of [`MolShape::check`] and of [`Device::run`].
pub async fn settle(device: &Device, plan: &mut MolPlan, n_items: u64) -> Result<Device, Error> {
    /// Operations of a strip that outweigh the cost of a submission.
    const LONG_FLOP: u64 = 1 << 30;
    const GAIN: f64 = 0.95;

    let flop = plan.shape.work(1).flop();
    let longest = device.limits().max_binding_bytes / (plan.shape.item_bytes().max(4 * 32) * 2);
    let strip = (LONG_FLOP / flop).clamp(256, 1 << 16).min(longest).min(n_items).max(1) as u32;
    let corpus = Corpus::new(device, plan.shape, strip)?;
    let bucket = Bucket::of(
        &crate::shaders::MOL,
        corpus.items.weight(),
        [plan.shape.form().n_pairs(), corpus.items.blocks(), plan.shape.n_queries],
    );
    let mut tuning = device.tuning().clone();
    tuning.choose(bucket, None);
    let usual = device.with_tuning(tuning.clone());
    let mut best = (seconds(&usual, &corpus.mixture(&usual, MolScores::All)?, Effort::USUAL).await?, None);
    if device.is_gpu() {
        let own = kernels::mol_tile(&usual.target(), &plan.shape.form(), &corpus.items, plan.shape.n_queries);
        let most = plan.shape.n_queries.next_power_of_two();
        for size in kernels::MOL_TILES.into_iter().filter(|&size| size != own && size <= most) {
            tuning.choose(
                bucket,
                Some(Choice::new(device.target().tier_for(&crate::shaders::MOL, Some(plan.shape.storage)), size)),
            );
            let tuned = device.with_tuning(tuning.clone());
            let time = seconds(&tuned, &corpus.mixture(&tuned, MolScores::All)?, Effort::USUAL).await?;
            if time < GAIN * best.0 {
                best = (time, Some(tuned));
            }
        }
    }
    let (time, tuned) = best;
    let device = tuned.unwrap_or(usual);
    plan.measured_seconds = Some(time * n_items as f64 / f64::from(strip));
    plan.tile = device
        .is_gpu()
        .then(|| kernels::mol_tile(&device.target(), &plan.shape.form(), &corpus.items, plan.shape.n_queries));
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: MolShape = MolShape {
        query_components: 8,
        item_components: 8,
        dim: 32,
        hidden: 128,
        storage: WeightType::F16,
        n_queries: 32,
    };

    fn probes() -> Probes {
        let (copy_bytes_per_second, flop_per_second) = (1e11, 1e12);
        Probes { copy_bytes_per_second, copy_tensor_bytes: 0, flop_per_second, matmul_size: 0, matmul: Vec::new() }
    }

    /// The paper's shape for Amazon Books: 4,096 operations of products and 32,768 of the gate for each score.
    #[test]
    fn work_of_amazon_books_shape_matches_the_paper() {
        assert_eq!(SHAPE.item_bytes(), 8 * 32 * 2 + 64 * 4);
        let work = SHAPE.work(695_762);
        let scores = 695_762 * 32;
        assert_eq!([work.dot_flop, work.gate_flop], [4096 * scores, 32_768 * scores]);
        assert_eq!(work.bytes, 695_762 * 768 + 4 * scores);
        assert!((work.least_seconds(&probes()) - 36_864.0 * scores as f64 / 1e12).abs() < 1e-9);
    }

    #[test]
    fn kernel_chain_and_fused_kernel_give_equal_scores() {
        let device = Device::cpu();
        let corpus =
            Corpus::new(&device, MolShape { n_queries: 3, ..SHAPE }, 40).expect("the kernel supports the shape");
        let (chain, _) = corpus.chain(&device).expect("it is recorded");
        let mixture = corpus.mixture(&device, MolScores::All).expect("it is recorded");
        let scores = |recording: &Recording| -> Vec<f32> {
            let last = recording.steps.last().and_then(|step| step.operands.last()).expect("it writes scores");
            pollster::block_on(async { device.run_and_read(recording, last)?.await })
                .map(bytemuck::cast_vec)
                .expect("the CPU runs it")
        };
        let (by_item, by_query) = (scores(&chain), scores(&mixture));
        assert_eq!([by_item.len(), by_query.len()], [120, 120]);
        for (i, item) in by_item.chunks_exact(3).enumerate() {
            for (query, &score) in item.iter().enumerate() {
                let other = by_query[query * 40 + i];
                assert!(
                    (score - other).abs() < 1e-4 * other.abs().max(1.0),
                    "{score} and {other}, item {i}, query {query}"
                );
            }
        }
    }

    #[test]
    fn planned_shapes_respect_time_and_memory_limits() {
        let rates = MolRates { dot_flop_per_second: 1e12, gate_flop_per_second: 5e11, bytes_per_second: 1e11 };
        let grid = [16, 32, 128].map(|hidden| MolShape { hidden, ..SHAPE });
        let plans = predict(&grid, 1_000_000, &rates, &probes());
        assert_eq!(plans.iter().map(|plan| plan.shape.hidden).collect::<Vec<_>>(), [128, 32, 16]);
        // 32 million scores, 4,096 operations at 1e12 per second and 256 per hidden unit at half of that rate.
        let seconds = 32e6 * (4096.0 / 1e12 + 32.0 * 256.0 / 5e11);
        assert!((plans[1].predicted_seconds - seconds).abs() < 1e-9 * seconds);
        let limits = Limits { seconds: Some(seconds), bytes: None };
        assert_eq!(plans.iter().map(|plan| plan.fits(&limits)).collect::<Vec<_>>(), [false, true, true]);
        let mut measured = plans[1];
        measured.measured_seconds = Some(seconds * 1.1);
        assert!(!measured.fits(&limits));
        assert!(!plans[2].fits(&Limits { seconds: None, bytes: Some(767_999_999) }));
        assert!(plans[2].fits(&Limits { seconds: None, bytes: Some(768_000_000) }));
    }
}
