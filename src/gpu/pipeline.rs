//! Compute pipelines, compiled once per shader variant and constants, and cached on disk if the backend supports it.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;

use super::executor::Setup;
use super::faults::Faults;
use super::outcome::{Failure, Outcome, Scopes};
use crate::counters::LiveCounters;
use crate::error::Error;
use crate::platform::IS_BROWSER;
use crate::recording::{PipelineKey, Step};
use crate::shaders::Kernel;

#[derive(Debug)]
pub(crate) struct Pipeline {
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
    /// The compilation's outcome if not known at once.
    pub check: Option<Outcome>,
}

/// A compiled pipeline or its compile error.
type Compiled = Arc<OnceLock<Result<Arc<Pipeline>, Failure>>>;

pub(crate) struct Pipelines {
    /// The first thread that requests a pipeline compiles it; other threads can compile others at the same time.
    compiled: Mutex<HashMap<PipelineKey, Compiled>>,
    cache: Option<(wgpu::PipelineCache, PathBuf)>,
    /// See [`Setup::broken`].
    broken: Option<String>,
    faults: Faults,
    counters: Arc<LiveCounters>,
}

impl fmt::Debug for Pipelines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pipelines").field("compiled", &self.compiled).finish_non_exhaustive()
    }
}

impl Pipelines {
    pub fn new(device: &wgpu::Device, info: &wgpu::AdapterInfo, setup: Setup<'_>, counters: Arc<LiveCounters>) -> Self {
        let cache = disk_cache(device, info, setup.folder);
        let (broken, faults) = (setup.broken.map(str::to_string), setup.faults());
        Pipelines { compiled: Mutex::default(), cache, broken, faults, counters }
    }

    /// The pipeline for a step, compiled at first use, or its compile error. A browser reports the error later,
    /// through [`Pipeline::check`].
    pub fn get(&self, device: &wgpu::Device, step: &Step) -> Result<Arc<Pipeline>, Failure> {
        let compiled = {
            let mut all = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
            all.entry(step.pipeline()).or_default().clone()
        };
        let pipeline = compiled.get_or_init(|| self.compile(device, step).map(Arc::new)).clone()?;
        match pipeline.check.as_ref().map(Outcome::now) {
            Some(Poll::Ready(Some(failure))) => Err(failure),
            _ => Ok(pipeline),
        }
    }

    fn compile(&self, device: &wgpu::Device, step: &Step) -> Result<Pipeline, Failure> {
        self.counters.pipelines_created.add(1);
        let label = Some(step.variant.label);
        let source = match &self.broken {
            Some(broken) if *broken == step.variant.label || *broken == step.pipeline().to_string() => {
                step.variant.idle_source(step.kernel)
            }
            _ => step.variant.target_source(),
        };
        let (_done, source) = self.faults.shader(device, source)?;
        // A browser compiles asynchronously and runs an invalid pipeline as if it wrote zeros.
        let filters = [wgpu::ErrorFilter::Internal, wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Validation];
        let scopes = Scopes::open(device, &filters);
        let source = wgpu::ShaderSource::Wgsl(source.into());
        let descriptor = wgpu::ShaderModuleDescriptor { label, source };
        let module = if checked() {
            device.create_shader_module(descriptor)
        } else {
            // SAFETY: the shaders are this crate's, validated by build.rs. Kernels bound every index by `params`,
            // and the conformance tests run the same sources with bounds checks.
            unsafe { device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked()) }
        };
        let layout = bind_group_layout(device, step.kernel);
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label,
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label,
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some(step.kernel.name),
            compilation_options: wgpu::PipelineCompilationOptions {
                constants: &step.constants,
                // Kernels write workgroup memory before they read it; stale memory lets tests detect one that does
                // not. Zeroing would hide it, and stores words one by one: RADV needs over 100 s for 5120 such stores.
                zero_initialize_workgroup_memory: false,
            },
            cache: self.cache.as_ref().map(|(cache, _)| cache),
        });
        let label = step.variant.label;
        let caught = scopes.close();
        let check = Outcome::of(Box::pin(async move {
            let error = caught.await?;
            let info = module.get_compilation_info().await;
            let messages = info.messages.iter().map(|message| match message.location {
                Some(at) => format!("line {}: {}", at.line_number, message.message),
                None => message.message.clone(),
            });
            let message = std::iter::once(error.to_string()).chain(messages).collect::<Vec<_>>().join("; ");
            let message = format!("`{label}` does not compile: {message}");
            Some(Failure::Refused { context: format!("compiling `{label}`"), message })
        }))?;
        Ok(Pipeline { pipeline, layout, check })
    }

    /// Writes the cache to disk.
    pub fn save(&self) -> Result<(), Error> {
        let Some((cache, path)) = self.cache.as_ref().filter(|_| !IS_BROWSER) else { return Ok(()) };
        cache.get_data().map_or(Ok(()), |data| crate::cache::write_checked(path, &data))
    }
}

/// Whether shaders have bounds checks: in debug builds, unless `TILEWRIGHT_CHECKED` overrides it (`0`: no, else yes).
pub(crate) fn checked() -> bool {
    std::env::var_os("TILEWRIGHT_CHECKED").map_or(cfg!(debug_assertions), |value| value != "0")
}

fn bind_group_layout(device: &wgpu::Device, kernel: &Kernel) -> wgpu::BindGroupLayout {
    let buffer = |ty| wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None };
    let params = buffer(wgpu::BufferBindingType::Uniform);
    let storage =
        kernel.bindings.iter().map(|binding| buffer(wgpu::BufferBindingType::Storage { read_only: !binding.writes }));
    let entries: Vec<_> = (0..)
        .zip(std::iter::once(params).chain(storage))
        .map(|(binding, ty)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty,
            count: None,
        })
        .collect();
    device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(kernel.name), entries: &entries })
}

/// The cache for this adapter, loaded from the folder if its file exists.
fn disk_cache(
    device: &wgpu::Device,
    info: &wgpu::AdapterInfo,
    folder: Option<&Path>,
) -> Option<(wgpu::PipelineCache, PathBuf)> {
    let folder = folder.filter(|_| !IS_BROWSER && device.features().contains(wgpu::Features::PIPELINE_CACHE))?;
    let path = folder.join(format!("{}.pipelines", wgpu::util::pipeline_cache_key(info)?));
    // wgpu checks header, device and driver, but the rest has no digest.
    let data = crate::cache::read_checked(&path);
    // SAFETY: the bytes are exactly what `save` wrote for this adapter; wgpu falls back to an empty cache if the
    // adapter or driver differs.
    let cache = unsafe {
        device.create_pipeline_cache(&wgpu::PipelineCacheDescriptor {
            label: Some("tilewright"),
            data: data.as_deref(),
            fallback: true,
        })
    };
    Some((cache, path))
}
