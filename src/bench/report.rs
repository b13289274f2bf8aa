//! A device's measurements in a format for comparison. `tilewright bench --report` and `www/bench.html` write it;
//! `benches/record/community/` explains and collects it.

use serde::Serialize;

use super::kernels::{self, BenchPlan, KernelRow, Shapes, WEIGHTS};
use super::{Effort, Probes, seconds};
use crate::device::Device;
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::kernels::microbench::{
    FmaRounds, PROBE_FMA_FLOP, PROBE_READS, ReadOrder, probe_copy, probe_fma, probe_read, probe_reduce,
};
use crate::kernels::microbench::{probe_matrix, probe_matrix_size};
use crate::platform::{IS_BROWSER, Native, native};
use crate::recording::{Recorder, Recording, Workspace};
use crate::tensor::{Role, Tensor};
use crate::tuning::operands::words;

/// Name and version of the format.
pub const SCHEMA: &str = "tilewright-bench/1";

/// Result of one probe.
#[derive(Clone, Debug, Serialize)]
pub struct ProbeRow {
    /// `copy`, `read`, `read_strided`, `read_random`, `reduce`, `fma_f32`, `fma_f16` or `matrix_f16`.
    pub probe: &'static str,
    /// Label of the shader variant.
    pub kernel: &'static str,
    /// Seconds per run.
    pub seconds: f64,
    /// Bytes read and written.
    pub bytes: u64,
    /// Multiplications and additions.
    pub flop: u64,
    /// Rate of those bytes.
    pub bytes_per_second: f64,
    /// Rate of those operations.
    pub flop_per_second: f64,
}

/// A kernel of a forward pass, relative to the probes.
#[derive(Clone, Debug, Serialize)]
pub struct RatedKernel {
    /// Label of the shader variant, such as `matvec.Q4_0`.
    pub kernel: &'static str,
    /// What it computes in the forward pass, such as `qkv`.
    pub operation: &'static str,
    /// T.
    pub n_tokens: u32,
    /// Seconds per run.
    pub seconds: f64,
    /// Bytes of all operands, each once.
    pub bytes: u64,
    /// Multiplications and additions of matrix products.
    pub flop: u64,
    /// Rate of those bytes.
    pub bytes_per_second: f64,
    /// Rate of those operations.
    pub flop_per_second: f64,
    /// Rate of bytes relative to the probe `copy`; above 1 if a cache holds the operands.
    pub copy_share: f64,
    /// Rate of operations relative to the probe `fma_f32`; above 1 for half-precision products.
    pub fma_share: f64,
}

/// Work sizes for measuring the kernels, which depend on the probes' results.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Settings {
    /// Whether fewer measurements were made: one weight type, fewer samples.
    pub quick: bool,
    /// Shapes of the kernels.
    #[serde(flatten)]
    pub shapes: Shapes,
    /// Bytes of distinct operands that a kernel cycles through.
    pub cold_bytes: u64,
}

/// The measured part of a report.
#[derive(Clone, Debug)]
pub struct Measurements {
    /// Work sizes.
    pub settings: Settings,
    /// In the order of measurement.
    pub probes: Vec<ProbeRow>,
    /// Kernels of decoding, then of a prompt.
    pub kernels: Vec<RatedKernel>,
}

impl Measurements {
    /// The probes `copy` and `fma_f32` as reference rates.
    #[inline(never)]
    pub fn probes(&self) -> Probes {
        let rate =
            |name: &str, of: fn(&ProbeRow) -> f64| self.probes.iter().find(|row| row.probe == name).map_or(0.0, of);
        Probes {
            copy_bytes_per_second: rate("copy", |row| row.bytes_per_second),
            copy_tensor_bytes: self.probes.iter().find(|row| row.probe == "copy").map_or(0, |row| row.bytes / 2),
            flop_per_second: rate("fma_f32", |row| row.flop_per_second),
            matmul_size: 0,
            matmul: Vec::new(),
        }
    }
}

/// A new measurement.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measured<'a> {
    /// A probe.
    Probe(&'a ProbeRow),
    /// A kernel.
    Kernel(&'a RatedKernel),
}

/// The same adapter opened in other tiers, for probes that its default tier does not use.
#[derive(Clone, Copy, Debug, Default)]
pub struct OtherTiers<'a> {
    /// With `shader-f16`.
    pub half: Option<&'a Device>,
    /// With cooperative matrices.
    pub matrices: Option<&'a Device>,
}

/// Measures probes and kernels. Calls `on_row` for each finished row with the number of rows so far and in total.
///
/// Work grows until a run is long enough to time, but stays far below the 100 ms that make a page stutter. Kernels
/// have the shapes of a model that suits the probes' results.
///
/// # Errors
/// Errors of [`Device::run`].
pub async fn measure(
    device: &Device,
    others: OtherTiers<'_>,
    quick: bool,
    on_row: &mut dyn FnMut(Measured<'_>, usize, usize),
) -> Result<Measurements, Error> {
    let effort =
        if quick { Effort { samples: 1, sample_seconds: 0.005 } } else { Effort { samples: 3, ..Effort::USUAL } };
    let weights: &'static [WeightType] = if quick { &[WeightType::Q4_0] } else { &WEIGHTS };
    let mut kinds: Vec<(ProbeKind, &Device)> = vec![
        (ProbeKind::Copy, device),
        (ProbeKind::Read, device),
        (ProbeKind::ReadStrided, device),
        (ProbeKind::ReadRandom, device),
        (ProbeKind::Reduce, device),
        (ProbeKind::Fma, device),
    ];
    kinds.extend(others.half.map(|half| (ProbeKind::FmaHalf, half)));
    kinds.extend(
        others.matrices.filter(|_| !IS_BROWSER).map(|matrices| (ProbeKind::Matrix(native(Matrices)), matrices)),
    );

    let total = kinds.len() + BenchPlan { shapes: &shapes(0.0), weights, cold_bytes: 0, long_flop: 0, effort }.n_rows();
    let mut found = Measurements {
        settings: Settings { quick, shapes: shapes(0.0), cold_bytes: 0 },
        probes: Vec::new(),
        kernels: Vec::new(),
    };
    for (kind, device) in kinds {
        let row = probe(device, kind, effort).await?;
        device.free_unused();
        on_row(Measured::Probe(&row), found.probes.len() + 1, total);
        found.probes.push(row);
    }
    let bounds = found.probes();
    let shapes = shapes(bounds.flop_per_second);
    let cold_bytes = ((bounds.copy_bytes_per_second * COLD_SECONDS) as u64).clamp(4 << 20, MAX_COLD_BYTES);
    let long_flop = ((bounds.flop_per_second * LONG_SECONDS) as u64).clamp(1 << 20, 1 << 32);
    found.settings = Settings { quick, shapes, cold_bytes };
    let plan = BenchPlan { shapes: &shapes, weights, cold_bytes, long_flop, effort };
    let n_probes = found.probes.len();
    kernels::measure_each(device, &plan, &bounds, &mut |row| {
        device.free_unused();
        let row = RatedKernel::new(&row, &bounds);
        on_row(Measured::Kernel(&row), n_probes + found.kernels.len() + 1, total);
        found.kernels.push(row);
    })
    .await?;
    Ok(found)
}

/// Distinct operands, as seconds of copying.
const COLD_SECONDS: f64 = 0.004;
/// Exceeds the caches of large GPUs. In a page, operands are created in WASM memory.
const MAX_COLD_BYTES: u64 = if IS_BROWSER { 1 << 27 } else { 1 << 29 };
/// Total work of a kernel's copies, as seconds of the probe `fma_f32`.
const LONG_SECONDS: f64 = 0.02;

/// Shapes of a model whose kernels are short enough for a page at this rate.
fn shapes(flop_per_second: f64) -> Shapes {
    /// Operations of a prompt's products in one layer, per C^2 T.
    const LAYER_FLOP: f64 = 21.5;
    /// Minimum share of the probe's rate expected of products.
    const LEAST_SHARE: f64 = 0.1;
    /// One product takes half of it.
    const LAYER_SECONDS: f64 = 0.15;
    let budget = flop_per_second * LEAST_SHARE * LAYER_SECONDS / LAYER_FLOP;
    let sizes = [(2048, 128), (1024, 128), (512, 128), (256, 128)];
    let fits = |&(dim, n_prompt): &(u32, u32)| f64::from(dim).powi(2) * f64::from(n_prompt) <= budget;
    let (dim, n_prompt) = sizes.into_iter().find(fits).unwrap_or((256, 32));
    Shapes { dim, n_prompt, n_cached: if dim > 512 { 1024 } else { 256 } }
}

impl RatedKernel {
    #[inline(never)]
    fn new(row: &KernelRow, bounds: &Probes) -> RatedKernel {
        let [bytes_per_second, flop_per_second] = [row.bytes, row.flop].map(|n| n as f64 / row.seconds);
        RatedKernel {
            kernel: row.kernel,
            operation: row.operation,
            n_tokens: row.n_tokens,
            seconds: row.seconds,
            bytes: row.bytes,
            flop: row.flop,
            bytes_per_second,
            flop_per_second,
            copy_share: bytes_per_second / bounds.copy_bytes_per_second,
            fma_share: flop_per_second / bounds.flop_per_second,
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
struct Matrices;

#[derive(Clone, Copy, PartialEq)]
enum ProbeKind {
    Copy,
    Read,
    ReadStrided,
    ReadRandom,
    Reduce,
    Fma,
    FmaHalf,
    Matrix(Native<Matrices>),
}

impl ProbeKind {
    fn name(self) -> &'static str {
        match self {
            ProbeKind::Copy => "copy",
            ProbeKind::Read => "read",
            ProbeKind::ReadStrided => "read_strided",
            ProbeKind::ReadRandom => "read_random",
            ProbeKind::Reduce => "reduce",
            ProbeKind::Fma => "fma_f32",
            ProbeKind::FmaHalf => "fma_f16",
            ProbeKind::Matrix(_) => "matrix_f16",
        }
    }

    /// Whether the probe reads memory, which must be filled before.
    fn reads(self) -> bool {
        matches!(
            self,
            ProbeKind::Copy | ProbeKind::Read | ProbeKind::ReadStrided | ProbeKind::ReadRandom | ProbeKind::Reduce
        )
    }

    fn is_float(self) -> bool {
        matches!(self, ProbeKind::Reduce | ProbeKind::Fma | ProbeKind::FmaHalf)
    }

    /// Minimum and maximum words read or elements written, if a binding holds them.
    fn sizes(self) -> [u32; 2] {
        match self {
            ProbeKind::Fma | ProbeKind::FmaHalf => [1 << 10, 1 << 20],
            ProbeKind::Matrix(_) => [1 << 6, 1 << 14],
            // 256 MiB exceed any cache.
            _ => [1 << 18, 1 << 26],
        }
    }
}

/// Measures one probe with growing work until it takes long enough.
async fn probe(device: &Device, kind: ProbeKind, effort: Effort) -> Result<ProbeRow, Error> {
    /// A run this long shows the peak rate; the next size would take four times as long.
    const LONG_SECONDS: f64 = 0.008;
    /// Runs per submission.
    const MAX_RUNS: u32 = 32;
    let [mut size, most] = kind.sizes();
    let most = most.min((device.target().limits().max_binding_bytes / 4).min(1 << 30) as u32);
    // Random reads need a power of two.
    let most = 1 << most.max(size).ilog2();
    loop {
        let operands = Operands::new(device, kind, size)?;
        if kind.reads() {
            fill(device, &operands.x).await?;
        }
        let (recording, [bytes, flop]) = operands.recorded(device, kind, 1)?;
        let once = seconds(device, &recording, Effort { samples: 3, sample_seconds: 0.0 }).await?;
        if once < LONG_SECONDS && size < most {
            size = (size * 4).min(most);
            continue;
        }
        // On a fast device, even the largest size is short relative to a submission.
        let n = ((LONG_SECONDS / once.max(1e-9)) as u32).clamp(1, MAX_RUNS);
        let (recording, _) = operands.recorded(device, kind, n)?;
        let seconds = seconds(device, &recording, effort).await? / f64::from(n);
        let [bytes_per_second, flop_per_second] = [bytes, flop].map(|n| n as f64 / seconds);
        let kernel = recording.labels().next().unwrap_or_default();
        return Ok(ProbeRow { probe: kind.name(), kernel, seconds, bytes, flop, bytes_per_second, flop_per_second });
    }
}

/// Input and output of a probe.
struct Operands {
    x: Tensor,
    y: Tensor,
}

impl Operands {
    /// Elements per row that a workgroup sums.
    const ROW: u32 = 1 << 12;

    /// Operands for `size` words read or elements written.
    #[inline(never)]
    fn new(device: &Device, kind: ProbeKind, size: u32) -> Result<Operands, Error> {
        if matches!(kind, ProbeKind::Matrix(_)) {
            let side = probe_matrix_size(&device.target());
            let x = device.upload("x", &[6, side, side], &vec![1.0f32; 6 * (side * side) as usize])?;
            let y = Tensor::declare("y", Role::Activations, &[size, 2, 4, side, side], DType::F32)?;
            return Ok(Operands { x, y });
        }
        let dtype = if kind.is_float() { DType::F32 } else { DType::U32 };
        let n_out = match kind {
            ProbeKind::Read | ProbeKind::ReadStrided | ProbeKind::ReadRandom => size / PROBE_READS,
            ProbeKind::Reduce => size / Operands::ROW,
            _ => size,
        };
        let matrix = [size / Operands::ROW, Operands::ROW];
        let x_shape = if kind == ProbeKind::Reduce { &matrix[..] } else { &[size] };
        let x = Tensor::declare("x", Role::Activations, x_shape, dtype)?;
        Ok(Operands { x, y: Tensor::declare("y", Role::Activations, &[n_out], dtype)? })
    }

    /// Records `n` runs of a probe; returns the recording, and one run's bytes and operations.
    #[inline(never)]
    fn recorded(&self, device: &Device, kind: ProbeKind, n: u32) -> Result<(Recording, [u64; 2]), Error> {
        let mut rec = device.recorder();
        let mut work = [0; 2];
        for _ in 0..n {
            work = self.record(&mut rec, kind)?;
        }
        Ok((rec.finish(&mut Workspace::default()), work))
    }

    /// Records a probe; returns its bytes and operations.
    fn record(&self, rec: &mut Recorder, kind: ProbeKind) -> Result<[u64; 2], Error> {
        /// Words in 128 bytes.
        const STRIDE: u32 = 32;
        // As many as half precision counts without rounding.
        const FMA: FmaRounds = FmaRounds { rounds: 1024, factor: 1.0, step: 1.0 };
        let Operands { x, y } = self;
        let written = y.size_bytes();
        let flop = match kind {
            ProbeKind::Fma | ProbeKind::FmaHalf => y.len() as u64 * u64::from(FMA.rounds) * PROBE_FMA_FLOP,
            ProbeKind::Matrix(_) => {
                let side = u64::from(probe_matrix_size(rec.target()));
                y.len() as u64 * 2 * side * u64::from(MATRIX_ROUNDS)
            }
            _ => 0,
        };
        match kind {
            ProbeKind::Copy => probe_copy(rec, x, y)?,
            ProbeKind::Read => probe_read(rec, x, y, ReadOrder::Strided(1))?,
            ProbeKind::ReadStrided => probe_read(rec, x, y, ReadOrder::Strided(STRIDE))?,
            ProbeKind::ReadRandom => probe_read(rec, x, y, ReadOrder::Scattered)?,
            ProbeKind::Reduce => probe_reduce(rec, x, y)?,
            ProbeKind::Fma | ProbeKind::FmaHalf => probe_fma(rec, FMA, y)?,
            ProbeKind::Matrix(_) => probe_matrix(rec, x, y, MATRIX_ROUNDS)?,
        }
        Ok([if kind.reads() { x.size_bytes() + written } else { written }, flop])
    }
}

/// Rounds of the cooperative-matrix probe.
const MATRIX_ROUNDS: u32 = 1024;

/// Fills a tensor with normal floats: memory may not be allocated before it is written.
async fn fill(device: &Device, tensor: &Tensor) -> Result<(), Error> {
    const PIECE: usize = 1 << 18;
    /// Words after which to wait for the device, to limit uploads in flight.
    const DRAINED: usize = 1 << 23;
    // Floats from 1 to 2, with small sums.
    let piece: Vec<u32> = words(PIECE.min(tensor.len())).map(|word| word >> 9 | 0x3f80_0000).collect();
    for first in (0..tensor.len()).step_by(PIECE) {
        device.write(tensor, first, &piece[..PIECE.min(tensor.len() - first)])?;
        if first % DRAINED == 0 {
            device.drained().await?;
        }
    }
    Ok(())
}

/// The measured device.
#[derive(Clone, Debug, Serialize)]
pub struct ReportDevice {
    /// Adapter's or processor's name.
    pub name: String,
    /// `vulkan`, `metal`, `dx12`, `webgpu` or `cpu`.
    pub backend: String,
    /// Driver's name and version, if known.
    pub driver: String,
    /// Shader tier; `none` for the CPU.
    pub tier: String,
    /// Whether kernels run on the CPU's cores.
    pub is_software: bool,
}

impl ReportDevice {
    /// Describes an open device.
    pub fn new(device: &Device) -> ReportDevice {
        let info = device.info().clone();
        let is_software = !device.is_real_gpu();
        ReportDevice { name: info.name, backend: info.backend, driver: info.driver, tier: info.tier, is_software }
    }
}

/// The start of a report as JSON: everything except the rows.
#[cfg(all(target_arch = "wasm32", feature = "web"))]
pub(crate) fn head_to_json(device: &Device, measurements: &Measurements) -> String {
    #[derive(Serialize)]
    struct Head {
        schema: &'static str,
        tilewright: &'static str,
        device: ReportDevice,
        settings: Settings,
    }
    let head = Head {
        schema: SCHEMA,
        tilewright: env!("CARGO_PKG_VERSION"),
        device: ReportDevice::new(device),
        settings: measurements.settings,
    };
    serde_json::to_string(&head).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmark_shapes_grow_with_the_measured_rate() {
        let found = [0.0, 1e9, 15e9, 50e9, 200e9, 1e12, 80e12].map(shapes);
        let sizes = found.map(|shapes| (shapes.dim, shapes.n_prompt));
        assert_eq!(sizes, [(256, 32), (256, 32), (256, 128), (512, 128), (1024, 128), (2048, 128), (2048, 128)]);
        assert!(found.iter().all(|shapes| shapes.check().is_ok()));
    }

    #[test]
    fn quick_cpu_report_has_every_announced_row() {
        let device = Device::cpu();
        let mut seen = Vec::new();
        let on_row = &mut |row: Measured<'_>, done: usize, total: usize| {
            let name = match row {
                Measured::Probe(row) => row.probe.to_owned(),
                Measured::Kernel(row) => format!("{} {} {}", row.kernel, row.operation, row.n_tokens),
            };
            seen.push((name, done, total));
        };
        let found = pollster::block_on(measure(&device, OtherTiers::default(), true, on_row)).expect("the CPU works");
        let total = seen.len();
        assert_eq!(total, found.probes.len() + found.kernels.len());
        assert!(seen.iter().enumerate().all(|(i, (_, done, of))| (*done, *of) == (i + 1, total)), "{seen:?}");
        let mut names: Vec<&String> = seen.iter().map(|(name, ..)| name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), total, "each has a name of its own");
        let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
        for row in &found.probes {
            assert_eq!((row.flop > 0), row.probe.starts_with("fma"), "{row:?}");
            assert!(is_rate(row.seconds) && is_rate(row.bytes_per_second), "{row:?}");
        }
        for row in &found.kernels {
            assert!(is_rate(row.seconds) && is_rate(row.bytes_per_second) && is_rate(row.copy_share), "{row:?}");
        }
    }
}
