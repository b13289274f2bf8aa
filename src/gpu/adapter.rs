//! Adapters, their capabilities, and the order of preference.
//!
//! On Windows, a GPU without a Vulkan driver is available through DirectX 12. wgpu compiles its shaders with DXC if
//! `dxcompiler.dll` is on the `PATH`, else with FXC, which is part of Windows: that has neither `shader-f16` nor
//! subgroups, so tiers that need them are refused, and compiles more slowly. wgpu's feature `static-dxc` would
//! include DXC. It is off because its build script downloads a prebuilt library, for `x86_64` and MSVC only.

use std::sync::Once;

#[cfg(target_arch = "wasm32")]
use crate::error::Error;
use crate::shaders::Tier;
use crate::target::{Target, TargetKind, TargetLimits};

/// Features that the cooperative-matrix tiers need.
pub(super) const MATRICES: wgpu::Features =
    wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(wgpu::Features::SHADER_F16).union(wgpu::Features::SUBGROUP);

/// Kind of adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AdapterKind {
    /// A GPU with its own memory.
    Discrete,
    /// A GPU that shares the CPU's memory.
    Integrated,
    /// A GPU or part of one assigned to a virtual machine.
    Virtual,
    /// Unknown, as in browsers.
    Other,
    /// Software on the CPU's cores.
    Software,
}

impl AdapterKind {
    /// The kind in words.
    pub fn name(self) -> &'static str {
        match self {
            AdapterKind::Discrete => "discrete",
            AdapterKind::Integrated => "integrated",
            AdapterKind::Virtual => "virtual",
            AdapterKind::Other => "of unknown kind",
            AdapterKind::Software => "software",
        }
    }

    fn of(device_type: wgpu::DeviceType) -> AdapterKind {
        match device_type {
            wgpu::DeviceType::DiscreteGpu => AdapterKind::Discrete,
            wgpu::DeviceType::IntegratedGpu => AdapterKind::Integrated,
            wgpu::DeviceType::VirtualGpu => AdapterKind::Virtual,
            wgpu::DeviceType::Other => AdapterKind::Other,
            wgpu::DeviceType::Cpu => AdapterKind::Software,
        }
    }
}

/// Which GPU to prefer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Power {
    /// Low power: integrated before discrete.
    Low,
    /// Speed: discrete before integrated.
    #[default]
    High,
}

impl Power {
    /// Sort key, lower is preferred: by kind, then by backend. A GPU may be listed once per backend; Vulkan precedes
    /// DirectX 12, which has fewer features with Windows' own shader compiler.
    pub(crate) fn rank(self, kind: AdapterKind, backend: &str) -> [u8; 2] {
        let kind = match (self, kind) {
            (Power::High, AdapterKind::Discrete) | (Power::Low, AdapterKind::Integrated) => 0,
            (Power::High, AdapterKind::Integrated) | (Power::Low, AdapterKind::Discrete) => 1,
            (_, AdapterKind::Virtual) => 2,
            (_, AdapterKind::Other) => 3,
            (_, AdapterKind::Software) => 4,
        };
        let backend = match backend {
            "vulkan" | "metal" => 0,
            "dx12" => 1,
            _ => 2,
        };
        [kind, backend]
    }
}

/// One GPU adapter.
#[derive(Clone, Debug, serde::Serialize)]
pub struct AdapterReport {
    /// Adapter's name.
    pub name: String,
    /// `vulkan`, `metal`, `dx12` or `webgpu`.
    pub backend: String,
    /// Driver's name and version.
    pub driver: String,
    /// PCI bus id, if the backend reports it.
    pub pci_bus_id: String,
    /// Kind of adapter.
    pub kind: AdapterKind,
    /// Whether the adapter runs on the CPU.
    pub is_software: bool,
    /// Whether the adapter has `shader-f16`.
    pub has_f16: bool,
    /// Minimum and maximum subgroup size, if the adapter has subgroup operations.
    pub subgroups: Option<[u32; 2]>,
    /// Sizes of square cooperative matrices with f16 inputs and f32 sums that the adapter supports and a tier uses.
    pub matrices: Vec<u32>,
    /// Whether the adapter has timestamps.
    pub has_timestamps: bool,
    /// Largest buffer in bytes.
    pub max_buffer_bytes: u64,
    /// Largest storage binding in bytes.
    pub max_binding_bytes: u64,
    /// Workgroup memory in bytes.
    pub max_workgroup_bytes: u32,
    /// Default tier.
    #[serde(serialize_with = "tier_name")]
    pub tier: Tier,
    /// Default tier of models that may round: prompt matrix products in half precision if the adapter supports it.
    #[serde(serialize_with = "tier_name")]
    pub rounding_tier: Tier,
    #[serde(skip)]
    pub(crate) adapter: wgpu::Adapter,
}

impl AdapterReport {
    /// PCI vendor id in hexadecimal.
    pub fn vendor(&self) -> String {
        format!("{:#06x}", self.adapter.get_info().vendor)
    }

    /// Whether NVIDIA made the GPU. Browsers report a name alone.
    fn is_of_nvidia(&self) -> bool {
        const NVIDIA: u32 = 0x10de;
        self.adapter.get_info().vendor == NVIDIA || self.name.to_ascii_lowercase().contains("nvidia")
    }

    /// WebGPU features that kernels use or could use; `cooperative-matrix` is wgpu's.
    pub fn features(&self) -> Vec<&'static str> {
        let known = [
            ("cooperative-matrix", wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX),
            ("shader-f16", wgpu::Features::SHADER_F16),
            ("subgroups", wgpu::Features::SUBGROUP),
            ("timestamp-query", wgpu::Features::TIMESTAMP_QUERY),
        ];
        let features = self.adapter.features();
        known.into_iter().filter(|(_, feature)| features.contains(*feature)).map(|(name, _)| name).collect()
    }

    /// WebGPU limits that bound kernels.
    pub fn limits(&self) -> Vec<(&'static str, u64)> {
        let limits = self.adapter.limits();
        vec![
            ("maxBufferSize", limits.max_buffer_size),
            ("maxComputeInvocationsPerWorkgroup", limits.max_compute_invocations_per_workgroup.into()),
            ("maxComputeWorkgroupStorageSize", limits.max_compute_workgroup_storage_size.into()),
            ("maxComputeWorkgroupsPerDimension", limits.max_compute_workgroups_per_dimension.into()),
            ("maxStorageBufferBindingSize", limits.max_storage_buffer_binding_size),
            ("maxStorageBuffersPerShaderStage", limits.max_storage_buffers_per_shader_stage.into()),
        ]
    }

    /// The target of recordings for this adapter in a tier.
    pub fn target(&self, tier: Tier) -> Target {
        self.target_within(tier, &self.adapter.limits())
    }

    /// The target in a tier for a device opened with these limits.
    pub(crate) fn target_within(&self, tier: Tier, limits: &wgpu::Limits) -> Target {
        let limits = TargetLimits {
            max_workgroups: limits.max_compute_workgroups_per_dimension,
            // Some backends refuse or corrupt buffers of 2 GiB and more, whatever the adapter reports.
            max_binding_bytes: limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min((1 << 31) - 256),
            // 100 ms of a processor with 1.3 GFLOP/s, of a discrete GPU with 2.7 TFLOP/s, and of a weak integrated
            // one with 170 GFLOP/s. Browsers do not report a GPU's kind.
            max_dispatch_operations: match self.kind {
                _ if self.is_software => 1 << 27,
                AdapterKind::Discrete => 1 << 38,
                _ => 1 << 34,
            },
            min_subgroup: self.subgroups.map_or(0, |[min, _]| min),
            max_subgroup: self.subgroups.map_or(0, |[_, max]| max),
            converts_slowly: self.is_of_nvidia(),
            max_workgroup_bytes: limits.max_compute_workgroup_storage_size,
            max_splits: if self.is_software { 1 } else { 8 },
            params_stride: params_stride(limits),
        };
        Target::new(if self.is_software { TargetKind::SoftwareGpu } else { TargetKind::Gpu }, tier, limits)
    }
}

/// Stride in bytes between the params of consecutive dispatches in a recording's uniform buffer.
pub(super) fn params_stride(limits: &wgpu::Limits) -> u32 {
    limits.min_uniform_buffer_offset_alignment.max(256)
}

fn tier_name<S: serde::Serializer>(tier: &Tier, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(tier.name())
}

/// All adapters in the order of [`Power::High`], then of the backends. If `TILEWRIGHT_NO_GPU` is set, none, and no
/// driver is loaded: for tests on machines whose adapter must not be tested.
pub async fn adapters() -> Vec<AdapterReport> {
    /// An instance is never dropped. Dropping the last one unloads the driver, and some drivers then crash threads
    /// that used them when these exit.
    static KEPT: Once = Once::new();
    if std::env::var_os("TILEWRIGHT_NO_GPU").is_some() {
        return Vec::new();
    }
    KEPT.call_once(|| std::mem::forget(instance(wgpu::Backends::PRIMARY)));
    let mut reports: Vec<AdapterReport> = instance(wgpu::Backends::PRIMARY)
        .enumerate_adapters(wgpu::Backends::PRIMARY)
        .await
        .into_iter()
        .map(report)
        .collect();
    crate::sort::by_key(&mut reports, |report| Power::High.rank(report.kind, &report.backend));
    reports
}

/// Adapter properties that a page knows and wgpu does not report.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
#[cfg(target_arch = "wasm32")]
pub struct BrowserAdapter {
    /// Display name.
    pub name: String,
    /// Whether the adapter runs on the CPU.
    pub is_software: bool,
    /// Whether the page's shim requests `subgroups` with every device: wgpu cannot (wgpu issue 10146).
    pub has_subgroups: bool,
}

/// The browser's adapter. Requires `navigator.gpu`: wgpu panics without it.
///
/// # Errors
/// [`Error::NoAdapter`] if the browser has none.
#[cfg(target_arch = "wasm32")]
pub async fn browser_adapter(known: &BrowserAdapter) -> Result<AdapterReport, Error> {
    let options =
        wgpu::RequestAdapterOptions { power_preference: wgpu::PowerPreference::HighPerformance, ..Default::default() };
    let found = instance(wgpu::Backends::BROWSER_WEBGPU).request_adapter(&options).await;
    let adapter = found.map_err(|e| Error::NoAdapter { wanted: "webgpu".into(), available: e.to_string() })?;
    let mut report = report(adapter);
    report.name = known.name.clone();
    report.is_software = known.is_software;
    report.kind = if known.is_software { AdapterKind::Software } else { AdapterKind::Other };
    // Browsers do not report subgroup sizes; kernels do not need them.
    report.subgroups = known.has_subgroups.then_some([1, 128]);
    report.tier = tier(report.is_software, known.has_subgroups);
    // Half precision without matrix units has not been measured in browsers.
    report.rounding_tier = report.tier;
    Ok(report)
}

fn instance(backends: wgpu::Backends) -> wgpu::Instance {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = backends;
    // No indirect dispatch is used, so its validation would only cost time.
    descriptor.flags = wgpu::InstanceFlags::default() - wgpu::InstanceFlags::VALIDATION_INDIRECT_CALL;
    wgpu::Instance::new(descriptor)
}

/// The best tier for an adapter.
fn tier(is_software: bool, has_subgroups: bool) -> Tier {
    match (is_software, has_subgroups) {
        (true, _) => Tier::Scalar,
        (false, true) => Tier::Subgroups,
        (false, false) => Tier::Baseline,
    }
}

/// The best tier of products that may round. Software adapters gain nothing from rounding.
fn rounding_tier(tier: Tier, has_f16: bool, matrices: &[u32]) -> Tier {
    let of_matrices = [Tier::Matrix16, Tier::Matrix8];
    let has = |tier: &Tier| tier.matrix_size().is_some_and(|size| matrices.contains(&size));
    match of_matrices.into_iter().find(has) {
        _ if tier == Tier::Scalar => tier,
        Some(tier) => tier,
        None if has_f16 => Tier::F16,
        None => tier,
    }
}

/// Sizes of supported matrices that have a tier whose kernels run on this adapter.
fn matrices(adapter: &wgpu::Adapter) -> Vec<u32> {
    /// Four subgroups form a workgroup of at most 256 invocations.
    const MAX_SUBGROUP: u32 = 64;
    /// `build.rs` allows kernels this much.
    const WORKGROUP_BYTES: u32 = 32 << 10;
    if adapter.get_info().subgroup_max_size > MAX_SUBGROUP
        || adapter.limits().max_compute_workgroup_storage_size < WORKGROUP_BYTES
    {
        return Vec::new();
    }
    let shapes = adapter.cooperative_matrix_properties();
    let is_offered = |&size: &u32| {
        shapes.iter().any(|shape| {
            [shape.m_size, shape.n_size, shape.k_size] == [size; 3]
                && shape.ab_type == wgpu::CooperativeScalarType::F16
                && shape.cr_type == wgpu::CooperativeScalarType::F32
        })
    };
    Tier::ALL.into_iter().filter_map(Tier::matrix_size).filter(is_offered).collect()
}

fn report(adapter: wgpu::Adapter) -> AdapterReport {
    let able = (adapter.features(), adapter.limits());
    report_within(adapter, able)
}

/// A report of an adapter whose device has these features and limits only.
pub fn report_within(adapter: wgpu::Adapter, (features, limits): (wgpu::Features, wgpu::Limits)) -> AdapterReport {
    let info = adapter.get_info();
    let is_software = info.device_type == wgpu::DeviceType::Cpu;
    let (has_f16, has_subgroups) =
        (features.contains(wgpu::Features::SHADER_F16), features.contains(wgpu::Features::SUBGROUP));
    let matrices = if features.contains(MATRICES) { matrices(&adapter) } else { Vec::new() };
    let tier = tier(is_software, has_subgroups);
    AdapterReport {
        name: info.name.clone(),
        backend: info.backend.to_str().to_string(),
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
        pci_bus_id: info.device_pci_bus_id.clone(),
        kind: AdapterKind::of(info.device_type),
        is_software,
        has_f16,
        subgroups: has_subgroups.then_some([info.subgroup_min_size, info.subgroup_max_size]),
        rounding_tier: rounding_tier(tier, has_f16, &matrices),
        matrices,
        has_timestamps: features.contains(wgpu::Features::TIMESTAMP_QUERY),
        max_buffer_bytes: limits.max_buffer_size,
        max_binding_bytes: limits.max_storage_buffer_binding_size,
        max_workgroup_bytes: limits.max_compute_workgroup_storage_size,
        tier,
        adapter,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AdapterKind::{Discrete, Integrated, Other, Software, Virtual};

    #[test]
    fn adapters_are_ranked_by_kind_then_by_backend() {
        // As Vulkan and DirectX list a laptop's GPUs, integrated first, plus kinds that no laptop has.
        let found = [
            ("Software", Software, "vulkan"),
            ("Unknown", Other, "vulkan"),
            ("Integrated", Integrated, "vulkan"),
            ("Virtual", Virtual, "vulkan"),
            ("Integrated dx12", Integrated, "dx12"),
            ("Discrete dx12", Discrete, "dx12"),
            ("Discrete", Discrete, "vulkan"),
            ("Second discrete", Discrete, "vulkan"),
        ];
        let ranked = |power: Power| {
            let mut found = found;
            found.sort_by_key(|&(_, kind, backend)| power.rank(kind, backend));
            found.map(|(name, ..)| name)
        };
        let rest = ["Virtual", "Unknown", "Software"];
        let discrete = ["Discrete", "Second discrete", "Discrete dx12"];
        let integrated = ["Integrated", "Integrated dx12"];
        assert_eq!(ranked(Power::High).to_vec(), [&discrete[..], &integrated, &rest].concat());
        assert_eq!(ranked(Power::Low).to_vec(), [&integrated[..], &discrete, &rest].concat());
    }
}
