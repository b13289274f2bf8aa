//! A device, a GPU adapter or the CPU, holds tensors and runs recordings. Other modules need not know which it is.

use std::future::Future;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytemuck::Pod;

use crate::counters::{Counters, LiveCounters};
use crate::cpu::Cpu;
use crate::dtype::{DType, WeightType};
use crate::error::Error;
use crate::gpu::{AdapterKind, AdapterReport, Faults, Gpu, Power, ReadFuture, Setup};
use crate::loss::LossReason;
use crate::matrix::Matrix;
use crate::platform::{BoxFuture, IS_BROWSER, MaybeSend, MaybeSync};
use crate::recording::{Recorder, Recording};
use crate::shaders::Tier;
use crate::target::{Target, TargetKind, TargetLimits, Tuning};
use crate::tensor::{Role, Tensor, TensorWriter, WordCopy};
use crate::tested::Tested;

/// Which device to open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A real GPU if there is one, else the CPU. Prefers discrete, then integrated, virtual and unknown GPUs; among
    /// equals Vulkan or Metal, then the first listed.
    #[default]
    Auto,
    /// As [`DeviceChoice::Auto`], but prefers integrated to discrete GPUs to save power.
    LowPower,
    /// The CPU.
    Cpu,
    /// The first adapter in the order of [`DeviceChoice::Auto`], software adapters last.
    Gpu,
    /// The adapter whose name contains this text, ignoring case.
    Named(String),
    /// The adapter with this index in [`Device::adapters`].
    Number(usize),
    /// The adapter at this address on the PCI bus, see [`DeviceChoice::pci`].
    Pci(String),
}

impl DeviceChoice {
    /// The adapter at PCI address `domain:bus:device.function` in hexadecimal. Leading zeros and the domain are
    /// optional: `0000:3b:00.0`, or `00000000:3B:00.0` as NVIDIA's tools print it. `None` for an invalid address.
    pub fn pci(address: &str) -> Option<DeviceChoice> {
        let (path, function) = address.split_once('.')?;
        let mut parts = path.rsplit(':');
        let [device, bus, domain] = [parts.next()?, parts.next()?, parts.next().unwrap_or("0")];
        let [domain, bus, device, function] =
            [domain, bus, device, function].map(|part| u32::from_str_radix(part, 16).ok());
        let address = format!("{:04x}:{:02x}:{:02x}.{:x}", domain?, bus?, device?, function?);
        parts.next().is_none().then_some(DeviceChoice::Pci(address))
    }
}

impl std::str::FromStr for DeviceChoice {
    type Err = std::convert::Infallible;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            // An empty variable is as good as none.
            "auto" | "" => DeviceChoice::Auto,
            "cpu" => DeviceChoice::Cpu,
            "gpu" => DeviceChoice::Gpu,
            name => DeviceChoice::Named(name.to_string()),
        })
    }
}

/// The opened device and why it was chosen.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DeviceInfo {
    /// Adapter's or processor's name.
    pub name: String,
    /// `vulkan`, `metal`, `dx12`, `webgpu` or `cpu`.
    pub backend: String,
    /// Driver's name and version; empty for the CPU.
    pub driver: String,
    /// Shader tier of the device; `none` for the CPU. Models may use another, see [`Device::model_target`].
    pub tier: String,
    /// Why this device was chosen.
    pub reason: String,
    /// Non-fatal problems on opening, such as an ignored tuning file.
    pub notices: Vec<String>,
}

/// The clock that measures kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Clock {
    /// GPU timestamps before and after each kernel. Browsers round them, usually to 100 µs.
    Gpu,
    /// The host's clock around each kernel on the CPU.
    Cpu,
    /// The host's clock around each kernel on a GPU without timestamps: mostly round-trip time for short kernels.
    RoundTrip,
}

#[derive(Debug)]
enum Executor {
    Gpu(Box<Gpu>),
    Cpu(Cpu),
}

/// Hides the executor's type. Types of `wgpu` are nested so deeply that a proof that a future over a device is `Send` would
/// exceed the compiler's recursion limit in some programs.
trait AnyExecutor: std::fmt::Debug + MaybeSend + MaybeSync {
    fn get(&self) -> &Executor;
}

impl AnyExecutor for Executor {
    fn get(&self) -> &Executor {
        self
    }
}

#[derive(Clone, Debug)]
struct DeviceInner {
    executor: Arc<dyn AnyExecutor>,
    info: DeviceInfo,
    /// The target of recordings, without the variants that the self-test has banned since.
    target: Target,
    counters: Arc<LiveCounters>,
    /// Shared by all handles.
    tested: Arc<Tested>,
    tuning_file: Option<PathBuf>,
    rounding: Rounding,
}

/// Whether activations are rounded before products with weights of fewer than 32 bits: on the CPU to bytes or
/// BF16 if weights are quantised, on a GPU to half precision if there are many tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Rounding {
    /// Never.
    #[default]
    Never,
    /// In models, which then use this tier, unless loaded as exact.
    OfModels(Tier),
    /// Always. Exact models use this tier instead.
    Activations(Tier),
}

/// A handle to an open device. Clones share the device.
#[derive(Clone, Debug)]
pub struct Device(Arc<DeviceInner>);

impl Device {
    /// The CPU reference device, which computes in 32-bit floats only. A CPU device from [`Device::open`] may round,
    /// see [`LoadOptions::exact`](crate::LoadOptions::exact).
    pub fn cpu() -> Device {
        Device::on_cpu("requested".into()).exact()
    }

    /// The same device without rounding for models.
    pub(crate) fn exact(&self) -> Device {
        Device(Arc::new(DeviceInner { rounding: Rounding::Never, ..(*self.0).clone() }))
    }

    /// Opens the adapter that `choice` selects, or the CPU.
    pub(crate) async fn open_one(
        choice: &DeviceChoice,
        reports: Vec<AdapterReport>,
        setup: Setup<'_>,
    ) -> Result<Device, Error> {
        let real =
            |power: Power| reports.iter().filter(|r| !r.is_software).min_by_key(|r| power.rank(r.kind, &r.backend));
        let found = match choice {
            DeviceChoice::Auto | DeviceChoice::Cpu => real(Power::High),
            DeviceChoice::LowPower => real(Power::Low),
            DeviceChoice::Gpu => reports.first(),
            DeviceChoice::Named(name) => reports.iter().find(|r| r.name.to_lowercase().contains(&name.to_lowercase())),
            DeviceChoice::Number(number) => reports.get(*number),
            DeviceChoice::Pci(_) => reports.iter().find(|r| DeviceChoice::pci(&r.pci_bus_id).as_ref() == Some(choice)),
        };
        let wanted = match choice {
            DeviceChoice::Auto | DeviceChoice::LowPower | DeviceChoice::Cpu => None,
            DeviceChoice::Gpu => Some("gpu".to_string()),
            DeviceChoice::Named(name) => Some(name.clone()),
            DeviceChoice::Number(number) => Some(format!("number {number}")),
            DeviceChoice::Pci(address) => Some(format!("pci:{address}")),
        };
        let reason = match (&wanted, found, reports.first()) {
            (None, None, None) => return Ok(Device::on_cpu("no GPU adapter was found".into())),
            (None, None, Some(software)) => {
                return Ok(Device::on_cpu(format!("the only adapter is software ({})", software.name)));
            }
            (None, Some(found), _) => {
                let power = if *choice == DeviceChoice::LowPower { Power::Low } else { Power::High };
                let others = reports.iter().filter(|r| !std::ptr::eq(*r, found) && !r.is_software);
                let others: Vec<_> = others.map(|r| (r.name.as_str(), r.kind)).collect();
                why(power, found.kind, &others)
            }
            (Some(_), _, _) => "requested".to_string(),
        };
        let Some(report) = found else {
            let names: Vec<&str> = reports.iter().map(|r| r.name.as_str()).collect();
            return Err(Error::NoAdapter {
                wanted: wanted.filter(|name| !name.is_empty()).unwrap_or("gpu".into()),
                available: if names.is_empty() { "none; `cpu` always works".into() } else { names.join(", ") },
            });
        };
        let counters = Arc::new(LiveCounters::default());
        // A requested tier applies to models too.
        let tiers = setup.tier.map_or([report.tier, report.rounding_tier], |tier| [tier, tier]);
        let gpu = Gpu::open(report, &tiers, setup, counters.clone()).await?;
        Ok(Device::of_gpu(gpu, report, tiers, reason, counters))
    }

    /// The device of an open adapter, with its tier, and the tier of models that may round.
    pub(crate) fn of_gpu(
        gpu: Gpu,
        report: &AdapterReport,
        [tier, rounding_tier]: [Tier; 2],
        reason: String,
        counters: Arc<LiveCounters>,
    ) -> Device {
        let info = DeviceInfo {
            name: report.name.clone(),
            backend: report.backend.clone(),
            driver: report.driver.clone(),
            tier: tier.name().into(),
            reason,
            notices: gpu.notice().into_iter().collect(),
        };
        let target = report.target_within(tier, &gpu.limits());
        let rounding = if rounding_tier == tier { Rounding::Never } else { Rounding::OfModels(rounding_tier) };
        Device::new(Executor::Gpu(Box::new(gpu)), info, target, counters, rounding)
    }

    fn new(
        executor: Executor,
        info: DeviceInfo,
        target: Target,
        counters: Arc<LiveCounters>,
        rounding: Rounding,
    ) -> Device {
        let (executor, tested) = (Arc::new(executor), Arc::default());
        Device(Arc::new(DeviceInner { executor, info, target, counters, tested, tuning_file: None, rounding }))
    }

    /// All GPU adapters of this machine, real GPUs first.
    pub async fn adapters() -> Vec<AdapterReport> {
        crate::gpu::adapters().await
    }

    /// The CPU executor; `reason` says why it was chosen.
    pub(crate) fn on_cpu(reason: String) -> Device {
        Device::on_cpu_with(reason, Faults::default())
    }

    pub(crate) fn on_cpu_with(reason: String, faults: Faults) -> Device {
        let info = DeviceInfo {
            name: match crate::cpu::threads() {
                1 => "CPU, 1 thread".into(),
                n => format!("CPU, {n} threads"),
            },
            backend: "cpu".into(),
            driver: if cfg!(target_feature = "relaxed-simd") { "relaxed SIMD".into() } else { String::new() },
            tier: "none".into(),
            reason,
            notices: Vec::new(),
        };
        let counters = Arc::new(LiveCounters::default());
        let executor = Executor::Cpu(Cpu::new(counters.clone(), faults));
        let target = Target::cpu();
        let rounding = if crate::cpu::has_byte_dots() { Rounding::OfModels(target.tier()) } else { Rounding::Never };
        Device::new(executor, info, target, counters, rounding)
    }

    /// The device's properties and why it was chosen.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// The target of new recordings.
    pub fn target(&self) -> Target {
        self.0.target.clone().without(self.0.tested.banned())
    }

    /// An empty recorder for this device.
    pub fn recorder(&self) -> Recorder {
        Recorder::new(self.target())
    }

    /// Whether kernels run on a GPU adapter, possibly a software one.
    pub fn is_gpu(&self) -> bool {
        self.0.target.is_gpu()
    }

    /// Memory left for tensors, if known: system memory for the CPU and software adapters, the module's heap for the
    /// CPU executor in a browser. Unknown for GPUs: no WebGPU API reports free memory.
    pub(crate) fn available_bytes(&self) -> Option<u64> {
        match self.0.target.kind() {
            TargetKind::Cpu => crate::memory::of_host(),
            // In a browser, a software adapter does not use the module's memory.
            TargetKind::SoftwareGpu if !IS_BROWSER => crate::memory::of_host(),
            TargetKind::SoftwareGpu | TargetKind::Gpu => None,
        }
    }

    /// Whether kernels run on a GPU, not a software adapter.
    pub(crate) fn is_real_gpu(&self) -> bool {
        self.0.target.kind() == TargetKind::Gpu
    }

    /// Tier of the device's shader variants.
    pub fn tier(&self) -> Tier {
        self.0.target.tier()
    }

    /// Shader variants that failed the self-test, with the failure. New recordings avoid them.
    pub fn banned(&self) -> Vec<(&'static str, String)> {
        self.0.tested.found().banned.into_iter().collect()
    }

    /// Number of pipelines (shader variant plus override values) that have passed the self-test.
    pub fn n_passed(&self) -> usize {
        self.0.tested.found().passed.len()
    }

    /// Takes the self-test's notices since the last call: banned variants, pipelines without a test, results that
    /// could not be saved.
    pub fn take_notices(&self) -> Vec<String> {
        self.0.tested.take_notices()
    }

    pub(crate) fn tested(&self) -> &Tested {
        &self.0.tested
    }

    /// The same device with other self-test results.
    pub(crate) fn with_tested(&self, tested: Arc<Tested>) -> Device {
        Device(Arc::new(DeviceInner { tested, ..(*self.0).clone() }))
    }

    /// The tuned parameters for recordings.
    pub fn tuning(&self) -> &Tuning {
        self.0.target.tuning()
    }

    /// Path of the tuning file, which need not exist; `None` for the CPU or if files are disabled.
    pub fn tuning_file(&self) -> Option<&Path> {
        self.0.tuning_file.as_deref()
    }

    /// The same device with another tuning for new recordings. Tensors and recordings work on both.
    pub fn with_tuning(&self, tuning: Tuning) -> Device {
        let target = self.0.target.clone().with_tuning(tuning);
        Device(Arc::new(DeviceInner { target, ..(*self.0).clone() }))
    }

    /// The same device, configured for a model that is `exact` or may round.
    pub(crate) fn for_model(&self, exact: bool) -> Device {
        let (rounding, tier) = match self.0.rounding {
            Rounding::OfModels(tier) if !exact => (Rounding::Activations(self.0.target.tier()), tier),
            Rounding::Activations(tier) if exact => (Rounding::Never, tier),
            _ => return self.clone(),
        };
        let target = self.0.target.clone().in_tier(tier);
        Device(Arc::new(DeviceInner { rounding, target, ..(*self.0).clone() }))
    }

    /// The target of passes of a model that is `exact` or may round.
    pub fn model_target(&self, exact: bool) -> Target {
        self.for_model(exact).target()
    }

    /// Whether activations are rounded before products with weights of fewer than 32 bits.
    pub(crate) fn rounds(&self) -> bool {
        matches!(self.0.rounding, Rounding::Activations(_))
    }

    /// The same device with other limits for new recordings, so that tests reach the limits with little work.
    #[doc(hidden)]
    pub fn with_limits(&self, limits: TargetLimits) -> Device {
        let target = self.0.target.clone().with_limits(limits);
        Device(Arc::new(DeviceInner { target, ..(*self.0).clone() }))
    }

    /// The same device with its tuning, self-test results, tuning file and notices about that file.
    pub(crate) fn with_known(
        &self,
        tuning: Tuning,
        tested: Arc<Tested>,
        tuning_file: Option<PathBuf>,
        notices: Vec<String>,
    ) -> Device {
        let target = self.0.target.clone().with_tuning(tuning);
        let mut inner = DeviceInner { target, tested, tuning_file, ..(*self.0).clone() };
        inner.info.notices.extend(notices);
        Device(Arc::new(inner))
    }

    /// Limits for recordings.
    pub fn limits(&self) -> TargetLimits {
        self.0.target.limits()
    }

    /// Totals since the device was opened.
    pub fn counters(&self) -> Counters {
        self.0.counters.snapshot()
    }

    /// Allocates the tensor's memory, uninitialised, unless already allocated.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the device has no memory left, [`Error::Operand`] if the tensor exceeds the
    /// adapter's largest buffer, [`Error::Gpu`] or [`Error::DeviceLost`] if the adapter refuses. In a browser, the
    /// next read returns the first such error instead.
    pub fn allocate(&self, tensor: &Tensor) -> Result<(), Error> {
        let Some(block) = tensor.storage.block() else {
            return Err(Error::Operand {
                kernel: "allocate",
                operand: "tensor",
                expected: "a tensor of a finished recording".into(),
                found: format!("the temporary `{}`", tensor.label()),
            });
        };
        if block.memory.is_empty() {
            match self.0.executor.get() {
                Executor::Gpu(gpu) => block.memory.attach(gpu.allocate(tensor.label(), block.size_bytes)?),
                Executor::Cpu(cpu) => block.memory.attach(cpu.allocate(block.size_bytes)),
            }
        }
        Ok(())
    }

    /// Declares, allocates and fills a tensor.
    ///
    /// # Errors
    /// [`Error::Operand`] if `data` does not have `shape`'s number of elements; errors of [`Device::allocate`].
    pub fn upload<T: Pod>(&self, label: &str, shape: &[u32], data: &[T]) -> Result<Tensor, Error> {
        let tensor = Tensor::declare(label, Role::Activations, shape, dtype_of::<T>())?;
        self.write(&tensor, 0, data)?;
        Ok(tensor)
    }

    /// Declares, allocates and fills an f32 matrix, `[rows, cols]` in row-major order.
    ///
    /// # Errors
    /// [`Error::Operand`] if `data` has another length or the matrix is empty; errors of [`Device::allocate`].
    pub fn upload_matrix(&self, label: &str, [rows, cols]: [u32; 2], data: &[f32]) -> Result<Matrix, Error> {
        let matrix = Matrix::declare(&self.target(), label, WeightType::F32, rows, cols)?;
        matrix.upload(self, &[bytemuck::cast_slice(data)])?;
        Ok(matrix)
    }

    /// Writes 4-byte elements from index `first` on, allocating the tensor if necessary. Later runs see them.
    ///
    /// # Errors
    /// [`Error::Operand`] if the data does not fit; errors of [`Device::allocate`].
    pub fn write<T: Pod>(&self, tensor: &Tensor, first: usize, data: &[T]) -> Result<(), Error> {
        self.allocate(tensor)?;
        let size_bytes = size_of_val(data) as u64;
        let offset = first as u64 * 4;
        if size_of::<T>() != 4 || offset + size_bytes > tensor.size_bytes() {
            return Err(Error::Operand {
                kernel: "write",
                operand: "data",
                expected: format!("4-byte elements within the {} bytes of `{}`", tensor.size_bytes(), tensor.label()),
                found: format!("{size_bytes} bytes at byte {offset}"),
            });
        }
        self.0.counters.bytes_uploaded.add(size_bytes);
        match self.0.executor.get() {
            Executor::Gpu(gpu) => gpu.write(tensor, offset, bytemuck::cast_slice(data)),
            Executor::Cpu(cpu) => cpu.write(tensor, first, bytemuck::cast_slice(data)),
        }
    }

    /// Reads the whole tensor as a 4-byte type `T`.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] or [`Error::Gpu`] if the device fails before the read completes.
    pub async fn read<T: Pod>(&self, tensor: &Tensor) -> Result<Vec<T>, Error> {
        let mut words = self.start_read(tensor)?.await?;
        words.truncate(tensor.len());
        Ok(bytemuck::try_cast_vec(words).unwrap_or_else(|(_, words)| bytemuck::pod_collect_to_vec(&words)))
    }

    /// Reads a tensor's bytes into a new JavaScript array, without a copy in WASM memory. With a recording, runs it
    /// first in the same submission.
    ///
    /// # Errors
    /// As [`Device::run`] and [`Device::read`].
    #[cfg(all(target_arch = "wasm32", feature = "web-kernels"))]
    pub(crate) async fn read_array(
        &self,
        tensor: &Tensor,
        after: Option<&Recording>,
    ) -> Result<js_sys::Uint8Array, Error> {
        let size_bytes = tensor.len() as u32 * 4;
        let pending = match after {
            Some(recording) => self.run_and_read(recording, tensor)?,
            None => self.start_read(tensor)?,
        };
        match pending.0 {
            PendingKind::Ready(words) => {
                let words = words.unwrap_or_default();
                Ok(js_sys::Uint8Array::from(&bytemuck::cast_slice(&words)[..size_bytes as usize]))
            }
            PendingKind::Gpu(future) => future.await?.array(size_bytes),
        }
    }

    /// Submits a read of the whole tensor: the future returns what it holds now.
    ///
    /// # Errors
    /// As [`Device::read`].
    pub(crate) fn start_read(&self, tensor: &Tensor) -> Result<Pending, Error> {
        self.start_read_part(tensor, tensor.all_words())
    }

    /// Reads a range of words of a tensor.
    ///
    /// # Errors
    /// [`Error::Operand`] if the range exceeds the tensor; as [`Device::read`].
    pub(crate) async fn read_part(&self, tensor: &Tensor, words: Range<usize>) -> Result<Vec<u32>, Error> {
        if words.end as u64 * 4 > tensor.size_bytes() {
            return Err(Error::Operand {
                kernel: "read",
                operand: "words",
                expected: format!("within the {} bytes of `{}`", tensor.size_bytes(), tensor.label()),
                found: format!("{words:?}"),
            });
        }
        let n = words.len();
        let mut found = self.start_read_part(tensor, words)?.await?;
        found.truncate(n);
        Ok(found)
    }

    fn start_read_part(&self, tensor: &Tensor, words: Range<usize>) -> Result<Pending, Error> {
        self.0.counters.reads.add(1);
        self.0.counters.bytes_read.add(words.len() as u64 * 4);
        Ok(Pending(match self.0.executor.get() {
            Executor::Gpu(gpu) => PendingKind::Gpu(gpu.read(tensor, words)?),
            Executor::Cpu(cpu) => PendingKind::Ready(Some(cpu.read(tensor, words)?)),
        }))
    }

    /// Fills the tensor's whole buffer with one word, including the slack after the tensor, so that tests detect
    /// what a kernel wrote.
    #[doc(hidden)]
    pub fn fill_buffer(&self, tensor: &Tensor, word: u32) -> Result<(), Error> {
        self.allocate(tensor)?;
        match self.0.executor.get() {
            Executor::Gpu(gpu) => gpu.fill(tensor, word),
            Executor::Cpu(cpu) => cpu.fill(tensor, word),
        }
    }

    /// Reads the tensor's whole buffer, including slack.
    #[doc(hidden)]
    pub async fn read_buffer(&self, tensor: &Tensor) -> Result<Vec<u32>, Error> {
        match self.0.executor.get() {
            Executor::Gpu(gpu) => gpu.read_all(tensor)?.await?.words(),
            Executor::Cpu(cpu) => cpu.read_all(tensor),
        }
    }

    /// Compiles the recordings' pipelines in parallel on a real GPU. A software adapter would compile on the cores
    /// that it runs on, and a browser has one thread, so there pipelines are compiled at first use.
    pub(crate) fn compile<'a>(&self, recordings: impl IntoIterator<Item = &'a Recording>) {
        if let (Executor::Gpu(gpu), true) = (self.0.executor.get(), self.is_real_gpu() && !IS_BROWSER) {
            gpu.compile(recordings.into_iter().flat_map(|recording| recording.steps.iter()));
        }
    }

    /// Runs a recording. On a GPU this submits it and returns at once.
    ///
    /// # Errors
    /// [`Error::Gpu`] or [`Error::DeviceLost`] if the device refuses; at the first run, errors of
    /// [`Device::allocate`].
    pub fn run(&self, recording: &Recording) -> Result<(), Error> {
        self.run_steps(recording, 0..recording.n_dispatches())
    }

    /// Runs a range of a recording's steps.
    ///
    /// # Errors
    /// As [`Device::run`].
    pub(crate) fn run_steps(&self, recording: &Recording, which: Range<usize>) -> Result<(), Error> {
        self.prepare(recording)?;
        match self.0.executor.get() {
            Executor::Gpu(gpu) => gpu.run(recording, which),
            Executor::Cpu(cpu) => cpu.run(recording, which, self.rounds()),
        }
    }

    /// Runs a recording, then reads `tensor`, in one submission.
    ///
    /// # Errors
    /// As [`Device::run`]; the future returns those of [`Device::read`].
    pub fn run_and_read(&self, recording: &Recording, tensor: &Tensor) -> Result<Pending, Error> {
        self.replay_and_read(recording, tensor, 1)
    }

    /// Runs a recording `n_runs` times and reads `tensor` after each run, in one submission. Returns the words of
    /// all runs in order.
    ///
    /// # Errors
    /// As [`Device::run_and_read`].
    pub(crate) fn replay_and_read(
        &self,
        recording: &Recording,
        tensor: &Tensor,
        n_runs: u32,
    ) -> Result<Pending, Error> {
        self.run_steps_and_read(recording, 0..recording.n_dispatches(), tensor, n_runs)
    }

    /// As [`Device::replay_and_read`], for a range of steps.
    ///
    /// # Errors
    /// As [`Device::run_and_read`].
    pub(crate) fn run_steps_and_read(
        &self,
        recording: &Recording,
        which: Range<usize>,
        tensor: &Tensor,
        n_runs: u32,
    ) -> Result<Pending, Error> {
        self.prepare(recording)?;
        self.0.counters.reads.add(1);
        self.0.counters.bytes_read.add(tensor.size_bytes() * u64::from(n_runs));
        Ok(Pending(match self.0.executor.get() {
            Executor::Gpu(gpu) => PendingKind::Gpu(gpu.run_and_read(recording, which, tensor, n_runs)?),
            Executor::Cpu(cpu) => {
                let mut words = Vec::new();
                for _ in 0..n_runs {
                    cpu.run(recording, which.clone(), self.rounds())?;
                    words.extend(cpu.read(tensor, tensor.all_words())?);
                }
                PendingKind::Ready(Some(words))
            }
        }))
    }

    /// Runs a recording with a clock around each kernel and waits for it. Returns each kernel's label and time, from
    /// GPU timestamps or the CPU's clock.
    ///
    /// # Errors
    /// [`Error::Limit`] if the adapter has no timestamps, and errors of [`Device::run`].
    pub async fn run_profiled(&self, recording: &Recording) -> Result<Vec<(&'static str, Duration)>, Error> {
        self.prepare(recording)?;
        let times = match self.0.executor.get() {
            Executor::Gpu(gpu) => {
                let running: BoxFuture<'_, _> = Box::pin(gpu.run_profiled(recording));
                running.await?
            }
            Executor::Cpu(cpu) => cpu.run_profiled(recording, self.rounds())?,
        };
        Ok(recording.labels().zip(times).collect())
    }

    /// The clock that measures this device's kernels.
    pub(crate) fn clock(&self) -> Clock {
        match self.0.executor.get() {
            Executor::Gpu(gpu) if gpu.has_timestamps() => Clock::Gpu,
            Executor::Gpu(_) => Clock::RoundTrip,
            Executor::Cpu(_) => Clock::Cpu,
        }
    }

    /// Copies whole tensors of equal size, in order.
    ///
    /// # Errors
    /// [`Error::Shape`] if sizes differ; errors of [`Device::allocate`].
    pub fn copy(&self, pairs: &[(&Tensor, &Tensor)]) -> Result<(), Error> {
        for (from, to) in pairs {
            to.expect_shape("copy", "to", from.shape())?;
            self.allocate(to)?;
        }
        match self.0.executor.get() {
            Executor::Gpu(gpu) => gpu.copy(pairs),
            Executor::Cpu(cpu) => cpu.copy(pairs),
        }
    }

    /// Copies ranges of words between tensors, in order.
    ///
    /// # Errors
    /// [`Error::Operand`] if a range exceeds its tensor; errors of [`Device::allocate`].
    pub(crate) fn copy_words(&self, copies: &[WordCopy]) -> Result<(), Error> {
        for WordCopy { from, to, n_words } in copies {
            for (tensor, first) in [from, to] {
                if (first + n_words) as u64 * 4 > tensor.size_bytes() {
                    return Err(Error::Operand {
                        kernel: "copy",
                        operand: "words",
                        expected: format!("within the {} bytes of `{}`", tensor.size_bytes(), tensor.label()),
                        found: format!("{n_words} from word {first} on"),
                    });
                }
                self.allocate(tensor)?;
            }
        }
        match self.0.executor.get() {
            Executor::Gpu(gpu) => gpu.copy_words(copies),
            Executor::Cpu(cpu) => cpu.copy_words(copies),
        }
    }

    /// Allocates a recording's tensors and builds its pipelines and bind groups, so that runs need not.
    ///
    /// # Errors
    /// As [`Device::run`].
    pub fn prepare(&self, recording: &Recording) -> Result<(), Error> {
        if !recording.prepared.is_empty() {
            return Ok(());
        }
        self.allocate_for(recording)?;
        match self.0.executor.get() {
            Executor::Gpu(gpu) => recording.prepared.attach(gpu.prepare(&recording.steps)?),
            Executor::Cpu(cpu) => recording.prepared.attach(cpu.prepare(&recording.steps)?),
        }
        Ok(())
    }

    /// Allocates a recording's tensors.
    ///
    /// # Errors
    /// As [`Device::allocate`].
    pub(crate) fn allocate_for(&self, recording: &Recording) -> Result<(), Error> {
        recording.steps.iter().flat_map(|step| &step.operands).try_for_each(|operand| self.allocate(operand))
    }

    /// Resolves when all runs and writes so far are done, for example to limit pending uploads.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] or [`Error::Gpu`] if the device failed since.
    pub async fn drained(&self) -> Result<(), Error> {
        match self.0.executor.get() {
            Executor::Gpu(gpu) => gpu.drained()?.await,
            Executor::Cpu(_) => Ok(()),
        }
    }

    /// Frees pooled buffers that are not in use.
    pub(crate) fn free_unused(&self) {
        if let Executor::Gpu(gpu) = self.0.executor.get() {
            gpu.free_unused();
        }
    }

    /// Destroys a GPU device: frees its memory, and later calls return [`Error::DeviceLost`].
    pub fn destroy(&self) {
        if let Executor::Gpu(gpu) = self.0.executor.get() {
            gpu.destroy();
        }
    }

    /// Bytes of GPU buffers in use.
    #[doc(hidden)]
    pub fn used_bytes(&self) -> u64 {
        match self.0.executor.get() {
            Executor::Gpu(gpu) => gpu.used_bytes(),
            Executor::Cpu(_) => 0,
        }
    }

    /// Whether the device is lost: calls return [`Error::DeviceLost`].
    pub fn is_lost(&self) -> bool {
        match self.0.executor.get() {
            Executor::Gpu(gpu) => gpu.is_lost(),
            Executor::Cpu(_) => false,
        }
    }

    /// Marks a GPU device that may hang as lost: pending reads fail, and its memory is freed if it ever answers.
    pub(crate) fn give_up(&self, reason: LossReason, message: String) {
        if let Executor::Gpu(gpu) = self.0.executor.get() {
            gpu.give_up(reason, message);
        }
    }

    /// Saves compiled pipelines to disk for the next start. Does nothing if the backend does not support it.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be written; the device stays usable.
    pub fn save_pipeline_cache(&self) -> Result<(), Error> {
        match self.0.executor.get() {
            Executor::Gpu(gpu) => gpu.save_pipeline_cache(),
            Executor::Cpu(_) => Ok(()),
        }
    }
}

impl TensorWriter for Device {
    fn write_words(&self, tensor: &Tensor, first: usize, words: &[u32]) -> Result<(), Error> {
        self.write(tensor, first, words)
    }
}

/// Why this GPU was preferred to the real GPUs in `others`.
fn why(power: Power, kind: AdapterKind, others: &[(&str, AdapterKind)]) -> String {
    let preference = match power {
        Power::High => "",
        Power::Low => " and low power requested",
    };
    match others.iter().find(|(_, other)| *other != kind).or(others.first()) {
        None => "the only adapter that is not software".into(),
        Some((_, other)) if *other == kind => format!("the first of {} that are {}", others.len() + 1, kind.name()),
        Some((name, other)) => format!("{}{preference}; `{name}` is {}", kind.name(), other.name()),
    }
}

fn dtype_of<T: Pod>() -> DType {
    if std::any::TypeId::of::<T>() == std::any::TypeId::of::<f32>() { DType::F32 } else { DType::U32 }
}

/// A read in progress. Resolves to the words read.
pub struct Pending(PendingKind);

enum PendingKind {
    Ready(Option<Vec<u32>>),
    Gpu(ReadFuture),
}

impl Future for Pending {
    type Output = Result<Vec<u32>, Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            PendingKind::Ready(words) => Poll::Ready(Ok(words.take().unwrap_or_default())),
            PendingKind::Gpu(future) => future.as_mut().poll(cx).map(|mapped| mapped?.words()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_reason_explains_the_preferred_gpu() {
        use AdapterKind::{Discrete, Integrated};
        let cases = [
            (Power::High, Discrete, &[][..], "the only adapter that is not software"),
            (Power::High, Discrete, &[("Iris", Integrated)], "discrete; `Iris` is integrated"),
            (Power::Low, Integrated, &[("GTX", Discrete)], "integrated and low power requested; `GTX` is discrete"),
            (Power::High, Discrete, &[("GTX", Discrete)], "the first of 2 that are discrete"),
        ];
        for (power, kind, others, reason) in cases {
            assert_eq!(why(power, kind, others), reason);
        }
    }
}
